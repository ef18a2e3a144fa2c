"""integrals/normal.py against mpmath, on the whole line.

Truth: λ = φ(x)/Φ(x) with Φ(x) = erfc(-x/√2)/2 at 60 digits, w = x + λ, log Φ(x) = log(Φ(x)) or log1p(-Φ(-x)); the
cancellation of w at -1e8 costs 16 of the 60.
"""

import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from expacc.integrals import normal
from expacc.integrals.normal import excess, hazard, log_cdf

# torch's own, from the first dual number of a process

Function = Callable[[Tensor], Tensor]
FUNCTIONS = pytest.mark.parametrize("function", [log_cdf, hazard, excess], ids=lambda f: f.__name__)
# Largest error in ulp of float64; the measured ones are 3.8, 3.3 and 4.2.
ULP = {"log_cdf": 4.0, "hazard": 4.0, "excess": 8.0}

_DRAW = np.random.default_rng(20)
SWEEPS = {
    "middle": np.linspace(-9.0, 9.0, 801) + _DRAW.uniform(-1e-3, 1e-3, 801),
    "left": -np.linspace(9.0, 60.0, 201) + _DRAW.uniform(-1e-3, 1e-3, 201),
    "right": np.linspace(9.0, 37.5, 201) + _DRAW.uniform(-1e-3, 1e-3, 201),
    "far": -(10.0 ** np.linspace(1.5, 8.0, 101)),
    "near 0": np.concatenate([s * 10.0 ** np.linspace(-310.0, -0.5, 151) for s in (-1.0, 1.0)]),
}


def truth(name: str, x: float) -> Any:
    """Return the function's value at the double x, to at least 40 digits."""
    with mpmath.workdps(60):
        t = mpmath.mpf(x)
        cdf = mpmath.erfc(-t / mpmath.sqrt(2)) / 2
        rate = mpmath.exp(-t * t / 2) / mpmath.sqrt(2 * mpmath.pi) / cdf
        match name:
            case "log_cdf":
                return mpmath.log(cdf) if x < 0 else mpmath.log1p(-mpmath.erfc(t / mpmath.sqrt(2)) / 2)
            case "hazard":
                return rate
            case "excess":
                return t + rate
            case "slope of hazard":
                return -rate * (t + rate)
            case "bend of hazard":
                w = t + rate
                return rate * (w * w + rate * w - 1)
            case "slope of excess":
                return 1 - rate * (t + rate)
        raise KeyError(name)


def worst_ulp(name: str, x: np.ndarray, computed: Tensor) -> tuple[float, float]:
    """Return the largest error in units of the last place of the computed dtype, and where it is."""
    info = torch.finfo(computed.dtype)

    def error(at: float, y: float) -> float:
        exact = truth(name, at)
        exponent = math.frexp(float(exact))[1] - 1
        return float(
            abs(mpmath.mpf(y) - exact) / max(mpmath.ldexp(info.eps, exponent), info.smallest_normal * info.eps)
        )

    errors = [error(float(a), y) for a, y in zip(x, computed.tolist(), strict=True)]
    index = int(np.argmax(errors))
    return errors[index], float(x[index])


@FUNCTIONS
@pytest.mark.parametrize("sweep", SWEEPS)
def test_float64_is_within_a_few_ulp(function: Function, sweep: str) -> None:
    x = SWEEPS[sweep]
    error, where = worst_ulp(function.__name__, x, function(torch.from_numpy(x)))
    assert error <= ULP[function.__name__], f"{error:.2f} ulp at {where!r}"


@FUNCTIONS
@pytest.mark.parametrize("sweep", ["middle", "left", "far"])
def test_float32_is_the_truth_rounded_once(function: Function, sweep: str) -> None:
    x = SWEEPS[sweep].astype(np.float32)
    result = function(torch.from_numpy(x))
    assert result.dtype == torch.float32
    error, where = worst_ulp(function.__name__, x.astype(np.float64), result)
    assert error <= 0.5 + 1e-6, f"{error:.7f} ulp at {where!r}"


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_precision_value_is_the_float64_result_rounded(function: Function, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    result = function(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result, function(x.double()).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (log_cdf, math.inf, 0.0), (log_cdf, -math.inf, -math.inf), (log_cdf, math.nan, math.nan),
        (log_cdf, 0.0, -math.log(2)), (log_cdf, -0.0, -math.log(2)),
        (hazard, math.inf, 0.0), (hazard, -math.inf, math.inf), (hazard, math.nan, math.nan),
        (hazard, 0.0, math.sqrt(2 / math.pi)), (hazard, -0.0, math.sqrt(2 / math.pi)),
        (excess, math.inf, math.inf), (excess, -math.inf, 0.0), (excess, math.nan, math.nan),
        (excess, 0.0, math.sqrt(2 / math.pi)), (excess, -0.0, math.sqrt(2 / math.pi)),
    ],
)  # fmt: skip
def test_special_values(function: Function, x: float, expected: float, dtype: torch.dtype) -> None:
    result = function(torch.tensor(x, dtype=dtype))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result, torch.tensor(expected, dtype=dtype), rtol=eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("x", [-1e150, -1e20, 1e20, 1e150])
@FUNCTIONS
def test_astronomic_arguments(function: Function, x: float) -> None:
    left = {"log_cdf": -0.5 * x * x, "hazard": -x, "excess": -1 / x}
    right = {"log_cdf": 0.0, "hazard": 0.0, "excess": x}
    expected = (left if x < 0 else right)[function.__name__]
    assert function(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(expected, rel=4e-16)


DERIVATIVES = [
    # function, order, name of the truth, how its error counts: absolute for w' and λ'', which pass through 1 - λw
    pytest.param(log_cdf, 1, "hazard", "ulp", id="(log Φ)'"),
    pytest.param(log_cdf, 2, "slope of hazard", "ulp", id="(log Φ)''"),
    pytest.param(hazard, 1, "slope of hazard", "ulp", id="λ'"),
    pytest.param(hazard, 2, "bend of hazard", "absolute", id="λ''"),
    pytest.param(excess, 1, "slope of excess", "absolute", id="w'"),
    pytest.param(excess, 2, "bend of hazard", "absolute", id="w''"),
]


@pytest.mark.parametrize(("function", "order", "name", "measure"), DERIVATIVES)
@pytest.mark.parametrize("sweep", ["middle", "left", "far", "near 0"])
def test_derivatives(function: Function, order: int, name: str, measure: str, sweep: str) -> None:
    x = SWEEPS[sweep]
    at = torch.from_numpy(x).requires_grad_()
    derivative = function(at)
    for _ in range(order):
        (derivative,) = torch.autograd.grad(derivative.sum(), at, create_graph=True)
    if measure == "ulp":
        error, where = worst_ulp(name, x, derivative.detach())
        assert error <= 8.0, f"{error:.2f} ulp at {where!r}"
    else:
        exact = torch.tensor([float(truth(name, float(a))) for a in x], dtype=torch.float64)
        # λ'' = -λ'w - λw' multiplies the rounding of w' = 1 - λw by λ, which is |x| on the left
        allowed = 8 * 2.0**-52 * (1 + at.detach().abs() if name == "bend of hazard" else torch.ones_like(exact))
        worst = ((derivative.detach() - exact).abs() / allowed).max().item()
        assert worst <= 1.0, f"{worst:.2f} times the tolerance"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("x", "slope", "bend"), [(math.inf, 0.0, 0.0), (-math.inf, math.inf, -1.0), (math.nan, math.nan, math.nan)]
)
def test_derivatives_of_log_cdf_at_the_ends(x: float, slope: float, bend: float, dtype: torch.dtype) -> None:
    at = torch.tensor(x, dtype=dtype, requires_grad=True)
    (first,) = torch.autograd.grad(log_cdf(at), at, create_graph=True)
    (second,) = torch.autograd.grad(first, at)
    torch.testing.assert_close(
        torch.stack([first, second]), torch.tensor([slope, bend], dtype=dtype), rtol=0, atol=0, equal_nan=True
    )


@FUNCTIONS
def test_narrow_dtypes_differentiate_in_float64(function: Function) -> None:
    # λ'' formed in bfloat16 is -1.2 at -300, where it is 7e-8
    at = torch.tensor([-300.0, -3.0, 0.5], dtype=torch.bfloat16, requires_grad=True)
    (first,) = torch.autograd.grad(function(at).sum(), at, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), at)
    wide = at.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(function(wide).sum(), wide, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), wide)
    torch.testing.assert_close(second, expected.bfloat16(), rtol=0, atol=0)


def points() -> Tensor:
    return torch.tensor([-30.0, -6.0, -1.5, -0.1, 0.0, 0.2, 1.3, 5.0], dtype=torch.float64)


@FUNCTIONS
def test_gradcheck(function: Function) -> None:
    x = points().requires_grad_()
    assert torch.autograd.gradcheck(
        function, x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(function, x, check_fwd_over_rev=True)


@FUNCTIONS
def test_jvp_and_vmap_agree_with_the_gradient(function: Function) -> None:
    x = points().requires_grad_()
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    x = x.detach()
    tangent = torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, expected, rtol=1e-15, atol=0)
    torch.testing.assert_close(torch.vmap(torch.func.grad(function))(x), expected, rtol=1e-15, atol=0)
    third = torch.vmap(torch.func.grad(torch.func.jacfwd(torch.func.grad(function))))(x)
    assert torch.isfinite(third).all()


def all_three(x: Tensor) -> Tensor:
    return torch.stack([log_cdf(x), hazard(x), excess(x)])


@pytest.mark.parametrize(
    ("function", "backend"),
    [(log_cdf, "aot_eager"), (hazard, "aot_eager"), (excess, "aot_eager"), (all_three, "inductor")],
)
@pytest.mark.filterwarnings("ignore:.*(instantiated|torch.jit):DeprecationWarning")  # torch's own, of any Function
def test_compiles_without_a_break(function: Function, backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    x = points().requires_grad_()
    y = compiled(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close(y, function(x), rtol=1e-14, atol=0)
    torch.testing.assert_close(slope, expected, rtol=1e-14, atol=0)


@FUNCTIONS
def test_leaves_its_argument_alone_and_takes_any_layout(function: Function) -> None:
    x = torch.linspace(-3.0, 3.0, 24, dtype=torch.float64).view(4, 6)
    before = x.clone()
    torch.testing.assert_close(function(x.mT[1:]), function(x).mT[1:], rtol=0, atol=0)
    assert torch.equal(function(x[:1].expand(3, 6))[2], function(x[0]))
    assert torch.equal(x, before)
    assert function(x[:0]).shape == (0, 6)


@FUNCTIONS
def test_large_arguments_go_in_chunks_with_the_same_result(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-30.0, 30.0, 4 * 6 * 50, dtype=torch.float64).view(4, 50, 6).mT.requires_grad_()
    monkeypatch.setattr(normal, "_CHUNK", 10**9)
    whole = function(x)
    monkeypatch.setattr(normal, "_CHUNK", 101)
    parts = function(x)
    torch.testing.assert_close(parts, whole, rtol=1e-15, atol=0)
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (parts, whole)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-15, atol=0)
    torch.testing.assert_close(torch.vmap(function)(x.detach()), whole.detach(), rtol=1e-15, atol=0)


def test_the_fraction_is_as_good_as_it_says() -> None:
    # in exact arithmetic, with the rounded coefficients: what is left is the fit and their rounding
    def error(a: float) -> float:
        with mpmath.workdps(60):
            s = 1 / (1 + mpmath.mpf(a))
            fraction = mpmath.polyval(normal._TOP[::-1], s) / mpmath.polyval(normal._BOTTOM[::-1], s)
            exact = (1 / truth("excess", -a) - mpmath.sqrt(mpmath.pi / 2)) / a
            return float(abs(fraction / exact - 1))

    worst = max((error(float(a)), float(a)) for a in 10.0 ** np.linspace(-2.0, 6.0, 301))
    assert worst[0] < 1.6e-16, worst
