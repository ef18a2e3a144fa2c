r"""The standard normal law on the whole line: log Φ, the hazard λ = φ/Φ and its excess x + λ.

These three close under differentiation, so every derivative of every order is one of them again:

    (log Φ)' = λ,    λ' = -λ·w,    w' = 1 - λ·w,    with w(x) = x + λ(x) > 0.

Arithmetic is float64 whatever comes in; a narrower input is widened and its result rounded once. That makes
float32 results correctly rounded nearly everywhere, and this module is the definition, not the fast path.

Rejected: ``torch.special.log_ndtr`` (its gradient cancels for large negative x: 4 % off at -1e3 in float32),
``log(ndtr(x))`` (flushes the left tail to -inf, loses all digits for x > 8), λ as ``exp(log φ - log Φ)`` (loses
x²·eps, all digits at x = -1e8), autograd through ``erfcx`` (its own derivative cancels like log_ndtr's).
"""

import math
from typing import Any

import torch
from torch import Tensor

_SQRT_HALF = math.sqrt(0.5)
_SQRT_TWO_OVER_PI = math.sqrt(2.0 / math.pi)
# exp(-x²/2) is 0 in float64 beyond this; the clamp keeps inf - inf out of its computation.
_FLUSH = 39.0
LOG_SQRT_TWO_PI = 0.5 * math.log(2.0 * math.pi)

# Below this the excess x + λ comes from a continued fraction; above, from the sum, which loses at most
# eps·25 to cancellation there.
_EXCESS_SWITCH = -5.0
_FRACTION_DEPTH = 40


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.double()


def _gauss(x: Tensor) -> Tensor:
    """Return exp(-x²/2). Squaring a rounded x would cost x²/2 ulp (800 at x = 40), so x is split: h has few bits,
    h² is exact, and x² = h² + (x-h)(x+h)."""
    x = x.clamp(-_FLUSH, _FLUSH)
    h = torch.round(x * 16.0) * 0.0625
    return torch.exp(-0.5 * h * h) * torch.exp(-0.5 * (x - h) * (x + h))


def _log_cdf(x: Tensor) -> Tensor:
    wide = _wide(x)
    # Left of -1: Φ(x) = exp(-x²/2)·erfcx(-x/√2)/2, both logs negative, no cancellation. Right of 1: log1p keeps
    # the digits of the small upper tail, by erfcx again because erfc(x/√2) amplifies the rounding of x/√2.
    # The clamps keep the branches not taken finite.
    low = wide.clamp(max=0.0)
    left = torch.log(0.5 * torch.special.erfcx(-_SQRT_HALF * low)) - 0.5 * low * low
    middle = torch.log1p(-0.5 * torch.erfc(_SQRT_HALF * wide.clamp(-1.0, 1.0)))
    right = torch.log1p(-0.5 * torch.special.erfcx(_SQRT_HALF * wide.clamp(min=1.0)) * _gauss(wide))
    return torch.where(wide < -1.0, left, torch.where(wide < 1.0, middle, right)).to(x.dtype)


def _hazard(x: Tensor) -> Tensor:
    wide = _wide(x)
    left = _SQRT_TWO_OVER_PI / torch.special.erfcx(-_SQRT_HALF * wide.clamp(max=0.0))
    right = _SQRT_TWO_OVER_PI * _gauss(wide) / torch.erfc(-_SQRT_HALF * wide.clamp(min=0.0))
    return torch.where(wide < 0.0, left, right).to(x.dtype)


def _excess(x: Tensor) -> Tensor:
    wide = _wide(x)
    right = wide + _hazard(wide)
    # Mills' ratio as Laplace's continued fraction gives λ = t + 1/(t + 2/(t + 3/(t + …))) with t = -x, so the
    # excess is the fraction without its leading t: nothing cancels.
    t = -wide.clamp(max=_EXCESS_SWITCH)
    tail = t
    for k in range(_FRACTION_DEPTH, 1, -1):
        tail = t + k / tail
    return torch.where(wide < _EXCESS_SWITCH, 1.0 / tail, right).to(x.dtype)


class _LogCdf(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _log_cdf(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return upstream * hazard(x)


class _Hazard(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _hazard(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return upstream * _hazard_slope(x)


class _Excess(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _excess(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return upstream * (1.0 + _hazard_slope(x))


# Forward-mode AD needs a jvp; Dynamo refuses a Function that has one. Hence two doors to the same arithmetic.
class _LogCdfForward(_LogCdf):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent * hazard(ctx.saved_tensors[0])


class _HazardForward(_Hazard):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent * _hazard_slope(ctx.saved_tensors[0])


class _ExcessForward(_Excess):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent * (1.0 + _hazard_slope(ctx.saved_tensors[0]))


def _hazard_slope(x: Tensor) -> Tensor:
    """Return λ' = -λ·w. At x = inf the product is 0·inf, whose limit is 0."""
    return -hazard(x) * torch.where(torch.isinf(x), torch.zeros_like(x), excess(x))


def log_cdf(x: Tensor) -> Tensor:
    r"""Return log Φ(x), the log of the standard normal distribution function.

    Limits: -x²/2 - log(-x√(2π)) for x → -inf, -φ(x)/x for x → +inf.

    Args:
        x: real tensor of any shape; log Φ(inf) = 0, log Φ(-inf) = -inf.

    Returns:
        Tensor of x's shape and dtype; differentiable any number of times.

    >>> [f"{value:.12g}" for value in log_cdf(torch.tensor([-40.0, 0.0, 9.0], dtype=torch.float64)).tolist()]
    ['-804.608442014', '-0.69314718056', '-1.12858840595e-19']
    """
    return (_LogCdf if torch.compiler.is_compiling() else _LogCdfForward).apply(x)  # pyright: ignore[reportReturnType]


def hazard(x: Tensor) -> Tensor:
    r"""Return λ(x) = φ(x)/Φ(x), the derivative of log Φ: positive, decreasing, convex, log-concave.

    Limits: -x - 1/x for x → -inf, φ(x) for x → +inf.

    >>> [f"{value:.12g}" for value in hazard(torch.tensor([-1e3, 0.0], dtype=torch.float64)).tolist()]
    ['1000.001', '0.797884560803']
    """
    return (_Hazard if torch.compiler.is_compiling() else _HazardForward).apply(x)  # pyright: ignore[reportReturnType]


def excess(x: Tensor) -> Tensor:
    r"""Return w(x) = x + λ(x) without cancellation: positive, increasing, 1/|x| on the left, x on the right.

    λ·w = -λ' is the curvature of -log Φ, in (0, 1).

    >>> [f"{value:.12g}" for value in excess(torch.tensor([-1e8], dtype=torch.float64)).tolist()]
    ['1e-08']
    """
    return (_Excess if torch.compiler.is_compiling() else _ExcessForward).apply(x)  # pyright: ignore[reportReturnType]
