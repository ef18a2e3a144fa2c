"""integrals/gumbel.py against log_softmax, mpmath and its own limits."""

import math

import mpmath
import pytest
import torch
from torch import Tensor

from expacc.integrals.gumbel import log_win_probabilities, log_win_probability, win_probabilities

# torch's own, from the first dual number of a process

INF = math.inf


def scores(rows: int = 6, classes: int = 7, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)


def gaps(u: Tensor, target: int = 2) -> Tensor:
    """Return the gaps of a target, +inf in its own column."""
    mine = torch.arange(u.shape[-1]) == target
    return torch.where(mine, INF, u[..., target : target + 1] - u)


def exact(m: list[float]) -> float:
    with mpmath.workdps(60):
        return float(-mpmath.log1p(mpmath.fsum(mpmath.exp(-mpmath.mpf(x)) for x in m if x != INF)))


@pytest.mark.parametrize(
    "m",
    [
        [0.0], [1.0, -2.0, 0.5], [700.0], [720.0, 745.0], [40.0, 41.0, 39.5], [1e-20], [-1e-20, 1e-20], [-1e-9],
        [-700.0], [-1e4, -1e4, 3.0], [-1e15, 2.0], [1e4, INF], [0.0] * 1000, [9.0] * 1000, [-3.0] * 99 + [INF],
    ],
    ids=lambda m: f"{len(m)} from {m[0]:g}",
)  # fmt: skip
def test_both_ends_to_full_relative_accuracy(m: list[float]) -> None:
    log_p = log_win_probability(torch.tensor([INF, *m], dtype=torch.float64)).item()
    expected = exact(m)
    # a subnormal 1 - P has fewer digits
    assert log_p == pytest.approx(expected, rel=4e-15, abs=5e-324)
    assert -math.expm1(log_p) == pytest.approx(-math.expm1(expected), rel=4e-15, abs=5e-324)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_log_softmax(dtype: torch.dtype) -> None:
    u = scores().to(dtype)
    expected = torch.log_softmax(u, -1)
    rtol = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(log_win_probability(gaps(u)), expected[:, 2], rtol=rtol, atol=rtol)
    torch.testing.assert_close(log_win_probabilities(u), expected, rtol=rtol, atol=rtol)
    torch.testing.assert_close(win_probabilities(u), expected.exp(), rtol=rtol, atol=0)


def test_the_gradient_is_the_softmax_of_the_others() -> None:
    m = gaps(scores()).requires_grad_()
    (slope,) = torch.autograd.grad(log_win_probability(m).sum(), m)
    expected = torch.softmax(scores(), -1).clone()
    expected[:, 2] = 0
    torch.testing.assert_close(slope, expected, rtol=1e-13, atol=0)


def test_one_competitor_is_the_logistic_law() -> None:
    m = torch.linspace(-800.0, 800.0, 33, dtype=torch.float64)
    torch.testing.assert_close(
        log_win_probability(m.unsqueeze(-1)), torch.nn.functional.logsigmoid(m), rtol=1e-14, atol=0
    )


def test_a_small_chance_of_losing_keeps_its_digits() -> None:
    # log_softmax gives 0 here
    u = torch.tensor([60.0, 0.0, 1.0], dtype=torch.float64)
    lost = -torch.expm1(log_win_probabilities(u)[0]).item()
    assert lost == pytest.approx((1 + math.e) * math.exp(-60), rel=1e-14)


@pytest.mark.parametrize(
    ("m", "value", "slope"),
    [
        pytest.param([INF, INF, INF], 0.0, [0.0, 0.0, 0.0], id="no competitor"),
        pytest.param([INF], 0.0, [0.0], id="one class"),
        pytest.param([INF, 0.0, INF], -math.log(2), [0.0, 0.5, 0.0], id="a masked competitor"),
        pytest.param([INF, -INF, 0.0], -INF, [0.0, 0.0, 0.0], id="lost"),
        pytest.param([-INF, -INF, -INF], -INF, [0.0, 0.0, 0.0], id="lost to all"),
    ],
)
def test_infinite_gaps(m: list[float], value: float, slope: list[float]) -> None:
    x = torch.tensor(m, dtype=torch.float64, requires_grad=True)
    log_p = log_win_probability(x)
    (first,) = torch.autograd.grad(log_p, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert log_p.item() == pytest.approx(value, rel=1e-15)
    assert first.tolist() == pytest.approx(slope, rel=1e-15)
    assert torch.isfinite(second).all()


def test_nan_stays_in_its_row() -> None:
    m = torch.tensor([[INF, 0.0, 1.0], [INF, math.nan, 1.0]], dtype=torch.float64, requires_grad=True)
    log_p = log_win_probability(m)
    (slope,) = torch.autograd.grad(log_p.sum(), m)
    assert torch.isnan(log_p).tolist() == [False, True]
    assert torch.isfinite(slope[0]).all()
    assert torch.isnan(slope[1]).any()


@pytest.mark.parametrize(
    ("u", "expected"),
    [
        pytest.param([-INF, -INF], [0.5, 0.5], id="all masked: equal"),
        pytest.param([0.0, -INF], [1.0, 0.0], id="one left"),
        pytest.param([0.0, INF, 3.0], [0.0, 1.0, 0.0], id="a certain winner"),
        pytest.param([7.0], [1.0], id="one class"),
    ],
)
def test_infinite_scores(u: list[float], expected: list[float]) -> None:
    x = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    p = win_probabilities(x)
    (slope,) = torch.autograd.grad(p[0] - 2 * p[-1], x)
    assert p.tolist() == pytest.approx(expected, abs=1e-15)
    assert slope.tolist() == [0.0] * len(u)
    finite = torch.where(torch.isinf(log_win_probabilities(x)), 0.0, log_win_probabilities(x))
    assert torch.isfinite(torch.autograd.grad(finite.sum(), x)[0]).all()


def test_nan_scores_stay_in_their_row() -> None:
    p = win_probabilities(torch.tensor([[0.0, math.nan], [0.0, 0.0]]))
    assert torch.isnan(p[0]).all()
    assert p[1].tolist() == [0.5, 0.5]


def test_probabilities_sum_to_one_and_ignore_a_shift() -> None:
    u = scores(scale=20.0)
    torch.testing.assert_close(win_probabilities(u).sum(-1), torch.ones(6, dtype=torch.float64), rtol=1e-14, atol=0)
    torch.testing.assert_close(win_probabilities(u + 64.0), win_probabilities(u), rtol=1e-12, atol=0)


FUNCTIONS = pytest.mark.parametrize(
    "function",
    [lambda u: log_win_probability(u), log_win_probabilities, win_probabilities],
    ids=["log_win_probability", "log_win_probabilities", "win_probabilities"],
)


@FUNCTIONS
def test_gradcheck(function) -> None:
    u = scores(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(
        function, u, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(function, u, check_fwd_over_rev=True)


@FUNCTIONS
def test_vmap_jvp_and_third_derivatives(function) -> None:
    u = scores(3, 4)
    rows = torch.vmap(function)(u)
    torch.testing.assert_close(rows, function(u), rtol=1e-15, atol=0)
    gradient = torch.vmap(torch.func.grad(lambda row: function(row).square().sum()))(u)
    x = u.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(function(x).square().sum(), x)[0], rtol=1e-14, atol=1e-15)
    forward = torch.func.jacfwd(lambda row: function(row).square().sum())
    torch.testing.assert_close(torch.vmap(forward)(u), gradient, rtol=1e-13, atol=1e-15)
    third = torch.func.jacfwd(torch.func.hessian(lambda row: function(row).sum()))(u[0])
    assert torch.isfinite(third).all()


@FUNCTIONS
def test_compiles_without_a_break(function) -> None:
    torch.compiler.reset()
    u = scores(3, 4).requires_grad_()
    y = torch.compile(function, fullgraph=True, backend="aot_eager")(u)
    torch.testing.assert_close(y, function(u), rtol=1e-14, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), u)[0], torch.autograd.grad(function(u).square().sum(), u)[0]
    )
