r"""The standard normal law on the whole line: log Φ, the hazard λ = φ/Φ and its excess x + λ.

These three close under differentiation, so every derivative of every order is one of them again:

    (log Φ)' = λ,    λ' = -λ·w,    w' = 1 - λ·w,    with w(x) = x + λ(x) > 0.

One function carries everything: the excess on the left half line, v(a) = w(-a) for a = |x| ≥ 0. With it

    λ(-a) = a + v,    Φ(-a) = φ(a)/(a + v) =: Q,    Φ(a) = 1 - Q,

so only sums of positive terms occur, no cancellation anywhere. Measured against 4500-bit arithmetic on 11 000 points of
[-1e8, 40], float64: log Φ within 3.8 ulp, λ 3.3, w 4.2; the tests hold 4, 4 and 8.

Arithmetic is float64 whatever comes in; a narrower input is widened and its result rounded once. That makes
float32 results correctly rounded nearly everywhere, and this module is the definition, not the fast path.

Rejected: ``torch.special.log_ndtr`` (its gradient cancels for large negative x: 4 % off at -1e3 in float32),
``log(ndtr(x))`` (flushes the left tail to -inf, loses all digits for x > 8), λ as ``exp(log φ - log Φ)`` (loses
x²·eps, all digits at x = -1e8), autograd through ``erfcx`` (its own derivative cancels like log_ndtr's), ``erfcx``
itself (it leaves w = x + λ to cancellation, 96 ulp at -5, and its scalar code takes 16 ns an element on a CPU; a
whole function below takes 20), and ``torch.where`` between branches (4 ns: half as long as the fraction).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from expacc.integrals.opaque import make_opaque

# Elements per thread, torch's own grain: below it an operation does not use more threads.
_CHUNK = 2**15

# exp(-x²/2) is 0 in float64 beyond this; the clamp keeps inf - inf out of its computation.
_FLUSH = 39.0
LOG_SQRT_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_INV_SQRT_TWO_PI = 0.3989422804014327
_SQRT_HALF_PI = math.sqrt(0.5 * math.pi)

# (1/v(a) - √(π/2))/a = _TOP(s)/_BOTTOM(s) with s = 1/(1 + a), relative error 6.6e-17 on [0, inf): lowest power first,
# by tests/reference/fit_excess.py. All coefficients are positive, so Horner's rule loses nothing; in this form the
# error of the fraction counts fully only for large a, where s is small and the fraction's is one rounding.
_TOP = (
    1.0, 20.270982446804194, 231.46252887718268, 1802.3839859375796, 10370.474035972366, 45474.138814659775,
    153131.94046798607, 391060.8249485653, 728679.424360739, 905316.6206223934, 583108.0912262553,
)  # fmt: skip
_BOTTOM = (
    1.0, 21.524296584119547, 257.69254821924375, 2106.5351258532132, 12760.341742841425, 59230.364884327646,
    212755.8335712288, 585577.9638904197, 1192428.15177462, 1650638.1707413022, 1223281.2408883288,
)  # fmt: skip

# Methods that end in _ work on temporaries: a fresh buffer per step would double the time of large inputs. Not
# square_ and clamp_, for which vmap has no rule but a loop.


def _polynomial(coefficients: tuple[float, ...], s: Tensor) -> Tensor:
    total = s * coefficients[-1]
    for c in coefficients[-2:0:-1]:
        total.add_(c).mul_(s)
    return total.add_(coefficients[0])


def _left_excess(a: Tensor) -> Tensor:
    """Return v(a) = w(-a) for a ≥ 0: √(2/π) at 0, 1/a far out."""
    s = a.add(1.0).reciprocal_()
    fraction = _polynomial(_TOP, s).div_(_polynomial(_BOTTOM, s))
    return fraction.mul_(a).add_(_SQRT_HALF_PI).reciprocal_()


def _density(a: Tensor) -> Tensor:
    """Return φ(a) for a ≥ 0. Squaring a rounded a would cost a²/2 ulp (800 at a = 40), so a is split: h has few
    bits, h² is exact, and a² = h² + (a-h)(a+h).
    """
    a = a.clamp(max=_FLUSH)
    h = (a * 16.0).round_().mul_(0.0625)
    rest = (h - a).mul_(h + a).mul_(0.5).exp_()
    return h.square().mul_(-0.5).exp_().mul_(rest).mul_(_INV_SQRT_TWO_PI)


def _is_left(x: Tensor) -> Tensor:
    """Return 1 where x < 0 and 0 elsewhere: with these weights lerp picks one of two finite numbers exactly."""
    return x.sign().clamp(max=0.0).neg_()


def _log_cdf(x: Tensor) -> Tensor:
    a = x.abs()
    rate = _left_excess(a).add_(a)
    # Right of 0: log1p(-Q). Left: log(1/(√(2π)·λ)) - x²/2, both negative, through the same log1p; subtracting 1
    # there costs an absolute a·eps beside x²/2, and the clamp keeps the log finite beyond a = 1e15.
    right = _density(a).div_(rate).neg_()
    left = rate.reciprocal_().mul_(_INV_SQRT_TWO_PI).sub_(1.0)
    log = torch.lerp(right, left, _is_left(x)).clamp(min=-1.0 + 2.0**-53).log1p_()
    low = x.clamp(max=0.0)
    return log.sub_(low.mul(0.5).mul_(low))  # not square() first: x² overflows where x²/2 does not


def _bounded_part(x: Tensor) -> Tensor:
    """Return λ(x) for x ≥ 0 and w(x) for x < 0: λ and w less their linear asymptotes."""
    a = x.abs()
    excess = _left_excess(a)
    density = _density(a)
    upper = density.div(a.add_(excess)).neg_().add_(1.0)
    return torch.lerp(density.div_(upper), excess, _is_left(x))


def _hazard(x: Tensor) -> Tensor:
    return _bounded_part(x).sub_(x.clamp(max=0.0))


def _excess(x: Tensor) -> Tensor:
    return _bounded_part(x).add_(x.clamp(min=0.0))


def _in_chunks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x), on a CPU in chunks that stay in the cache: 20 ns an element instead of 100 for large x."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return function(x)
    chunk = _CHUNK * torch.get_num_threads()
    if x.numel() <= chunk:
        return function(x)
    return torch.cat([function(part) for part in x.reshape(-1).split(chunk)]).view(x.shape)


class _LogCdf(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _in_chunks(_log_cdf, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return upstream * hazard(x)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent * hazard(ctx.saved_tensors[0])


class _Hazard(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _in_chunks(_hazard, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return upstream * _hazard_slope(x)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent * _hazard_slope(ctx.saved_tensors[0])


class _Excess(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _in_chunks(_excess, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return upstream * (1.0 + _hazard_slope(x))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent * (1.0 + _hazard_slope(ctx.saved_tensors[0]))


def _hazard_slope(x: Tensor) -> Tensor:
    """Return λ' = -λ·w. At x = ±inf the product is 0·inf; the clamp gives its limits, -1 and 0."""
    edge = math.sqrt(torch.finfo(x.dtype).max)
    x = x.clamp(-edge, edge)
    return -hazard(x) * excess(x)


# Compiled graphs take operators (opaque.py): Dynamo refuses a Function with a jvp, and torch 2.11's makes the gradient
# of one without it 0 in silence.
def _as_operator(name: str, function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    def call(x: Tensor, nodes: int, drop: float) -> Any:
        return function.apply(x)

    return make_opaque(name, call, keeps_classes=True)


_compiled_log_cdf = _as_operator("log_cdf", _LogCdf)
_compiled_hazard = _as_operator("hazard", _Hazard)
_compiled_excess = _as_operator("excess", _Excess)


def _enter(function: type[torch.autograd.Function], compiled: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return function(x) through the door that fits; the argument is widened outside the Function, so that the products
    in derivatives of every order are float64, too.
    """
    wide = x.double()
    result: Any = compiled(wide, 0, 0.0) if torch.compiler.is_compiling() else function.apply(wide)
    return result.to(x.dtype)


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
    return _enter(_LogCdf, _compiled_log_cdf, x)


def hazard(x: Tensor) -> Tensor:
    r"""Return λ(x) = φ(x)/Φ(x), the derivative of log Φ: positive, decreasing, convex, log-concave.

    Limits: -x - 1/x for x → -inf, φ(x) for x → +inf.

    >>> [f"{value:.12g}" for value in hazard(torch.tensor([-1e3, 0.0], dtype=torch.float64)).tolist()]
    ['1000.001', '0.797884560803']
    """
    return _enter(_Hazard, _compiled_hazard, x)


def excess(x: Tensor) -> Tensor:
    r"""Return w(x) = x + λ(x) without cancellation: positive, increasing, 1/|x| on the left, x on the right.

    λ·w = -λ' is the curvature of -log Φ, in (0, 1).

    >>> [f"{value:.12g}" for value in excess(torch.tensor([-1e8], dtype=torch.float64)).tolist()]
    ['1e-08']
    """
    return _enter(_Excess, _compiled_excess, x)
