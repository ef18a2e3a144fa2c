"""Values that are known another way: closed forms, scipy's bivariate normal, limits, high precision."""

import math
from itertools import product

import mpmath
import numpy as np
import pytest
import torch
from contract import CONTRACTS, FUNCTIONS, PATHS
from mpmath import mpf
from scipy.special import log_ndtr
from scipy.stats import multivariate_normal

from expacc import argmax_probabilities, exact_loss, expected_accuracy, expected_error, log_expected_accuracy
from expacc._scores import power_loss

mpmath.mp.dps = 50
DELTAS = (-80.0, -12.0, -2.5, -0.125, 0.0, 0.125, 2.5, 12.0)
TINY = (1e-300, 1e-100, 1e-30, 1e-16, 1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
LOGS = (-1e-300, -1e-20, -1e-3, -0.1, -0.6931, -3.0, -40.0, -700.0, -1e4, -1e6)


def pair(delta: float, column, sigma: float = 1.0) -> torch.Tensor:
    return torch.tensor([[delta * sigma, 0.0]], dtype=column.dtype, requires_grad=True)


def phi(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


@pytest.mark.parametrize("column", PATHS, ids=str)
@pytest.mark.parametrize("sigma", [0.25, 1.0, 8.0])
@pytest.mark.parametrize("delta", DELTAS)
def test_two_classes_closed_form(delta, sigma, column):
    """P = Φ(Δ/(σ√2)), ∂P/∂Δ = φ(Δ/(σ√2))/(σ√2)."""
    contract, x = CONTRACTS[column.dtype], pair(delta, column, sigma)
    log_p = log_expected_accuracy(x, torch.tensor([0]), sigma, backend=column.backend)
    want = float(log_ndtr(delta / math.sqrt(2.0)))
    slope = math.exp(math.log(phi(0.0)) - delta * delta / 4.0 - want) / (sigma * math.sqrt(2.0))
    assert log_p.item() == pytest.approx(want, rel=contract.error if delta > 0 else contract.log_p[False])
    (gradient,) = torch.autograd.grad(log_p.sum(), x)
    np.testing.assert_allclose(gradient[0], [slope, -slope], rtol=contract.gradient)


@pytest.mark.parametrize("column", PATHS, ids=str)
@pytest.mark.parametrize(("a", "b"), list(product((-3.0, -0.5, 0.0, 1.25, 4.0), repeat=2)))
def test_three_classes_bivariate_normal(a, b, column):
    """The two differences to the target have variance 2 and correlation ½."""
    x = torch.tensor([[0.0, -a, -b]], dtype=column.dtype)
    covariance = [[2.0, 1.0], [1.0, 2.0]]
    want = float(multivariate_normal.cdf([a, b], [0.0, 0.0], covariance, abseps=1e-13, releps=1e-13, rng=0))
    got = expected_accuracy(x, torch.tensor([0]), backend=column.backend).item()
    assert got == pytest.approx(want, rel=max(1e-9, CONTRACTS[column.dtype].p[False] * max(1.0, -math.log(want))))


@pytest.mark.parametrize("column", PATHS, ids=str)
@pytest.mark.parametrize("score", [0.0, -7.5, 1e4])
@pytest.mark.parametrize("classes", [1, 2, 3, 10, 100, 1000, 20_000])
def test_equal_scores(classes, score, column):
    """P = 1/C; the competitors share the gradient."""
    contract = CONTRACTS[column.dtype]
    x = torch.full((1, classes), score, dtype=column.dtype, requires_grad=True)
    p = expected_accuracy(x, torch.tensor([classes // 2]), backend=column.backend)
    (gradient,) = torch.autograd.grad(p.sum(), x)
    others = torch.cat([gradient[0, : classes // 2], gradient[0, classes // 2 + 1 :]])
    assert p.item() == pytest.approx(1.0 / classes, rel=contract.p[classes > 1000] * max(1.0, math.log(classes)))
    assert torch.allclose(others, others[:1].expand_as(others), rtol=contract.gradient, atol=0.0)


@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("classes", [1, 2, 3, 10, 100, 1000])
def test_win_probabilities_are_each_target_s(classes, scale, dtype, noise):
    """Every class's P, from nodes of its own, is its entry of argmax_probabilities; and they sum to 1."""
    contract = CONTRACTS[dtype]
    x = scale * torch.randn(1, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(classes))
    x = x.to(dtype)
    wins = argmax_probabilities(x, noise=noise)[0]
    some = torch.unique(torch.cat([x[0].argsort(descending=True)[:20], torch.arange(min(classes, 20))]))
    own = expected_accuracy(x.expand(len(some), -1), some, noise=noise, backend="reference")
    assert torch.allclose(wins[some], own, rtol=contract.win_relative, atol=contract.win_absolute)
    assert wins.double().sum().item() == pytest.approx(1.0, abs=contract.win_absolute)


@pytest.mark.parametrize("column", PATHS, ids=str)
@pytest.mark.parametrize(("target", "limit"), [(0, 1.0), (1, 0.0), (2, 0.0)])
def test_small_sigma_is_the_zero_one_accuracy(target, limit, column):
    x = torch.tensor([[2.0, 1.0, -3.0]], dtype=column.dtype)
    y = torch.tensor([target])
    assert expected_accuracy(x, y, 1e-3, backend=column.backend).item() == limit
    assert expected_error(x, y, 1e-3, backend=column.backend).item() == 1.0 - limit


@pytest.mark.parametrize("column", PATHS, ids=str)
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_large_sigma_is_chance(classes, column):
    x = torch.linspace(-2.0, 2.0, classes, dtype=column.dtype)[None]
    p = expected_accuracy(x, torch.tensor([0]), 1e9, backend=column.backend).item()
    assert p == pytest.approx(1.0 / classes, rel=1e-5 if column.dtype == torch.float32 else 2e-8)


@pytest.mark.parametrize("column", PATHS, ids=str)
@pytest.mark.parametrize("margin", [-1.0, 0.0, 0.5, 2.0])
def test_margin_met_by_all(margin, column):
    """Where every gap exceeds r, the row is that of C - 1 competitors at r, and its gradient is 0."""
    classes = 6
    x = torch.zeros(1, classes, dtype=column.dtype)
    x[0, 2] = 3.0
    x.requires_grad_()
    row = torch.zeros(1, classes, dtype=column.dtype)
    row[0, 2] = margin
    got = log_expected_accuracy(x, torch.tensor([2]), margin=margin, backend=column.backend)
    want = log_expected_accuracy(row, torch.tensor([2]), backend=column.backend)
    assert got.item() == pytest.approx(want.item(), rel=CONTRACTS[column.dtype].log_p[False])
    assert torch.equal(torch.autograd.grad(got.sum(), x)[0], torch.zeros_like(x))


@pytest.mark.parametrize("column", PATHS, ids=str)
def test_margin_met_by_some(column):
    """A competitor beyond the margin stands at it and has no gradient; the others are as they were."""
    x = torch.tensor([[1.0, 0.8, -4.0]], dtype=column.dtype, requires_grad=True)
    moved = torch.tensor([[1.0, 0.8, 0.5]], dtype=column.dtype, requires_grad=True)
    y = torch.tensor([0])
    got = log_expected_accuracy(x, y, margin=0.5, backend=column.backend)
    want = log_expected_accuracy(moved, y, backend=column.backend)
    got_slope, want_slope = torch.autograd.grad(got.sum(), x)[0][0], torch.autograd.grad(want.sum(), moved)[0][0]
    rtol = CONTRACTS[column.dtype].gradient
    assert got.item() == pytest.approx(want.item(), rel=rtol)
    assert got_slope[2] == 0.0
    assert got_slope[1].item() == pytest.approx(want_slope[1].item(), rel=rtol)
    assert got_slope[0].item() == pytest.approx(-want_slope[1].item(), rel=rtol)


@pytest.mark.parametrize("column", PATHS, ids=str)
@pytest.mark.parametrize(("power", "function"), [(1.0, "error"), (0.0, "log")])
def test_power_ends(power, function, column):
    x = 3.0 * torch.randn(40, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x, y = x.to(column.dtype), torch.arange(40) % 7
    got = exact_loss(x, y, power=power, normalize=False, backend=column.backend)
    want = FUNCTIONS[function](x, y, backend=column.backend)
    assert torch.equal(got, want if function == "error" else -want)


@pytest.mark.parametrize("log_p", LOGS)
@pytest.mark.parametrize("q", [s * t for t in TINY for s in (1.0, -1.0)])
def test_power_in_high_precision(q, log_p):
    """(1 - P^q)/q = -expm1(q log P)/q to 1e-12, and its derivative -P^q."""
    log = torch.tensor([log_p], dtype=torch.float64, requires_grad=True)
    loss = power_loss(log, q)
    exponent = mpf(q) * mpf(log_p)
    want = float(-mpmath.expm1(exponent) / mpf(q))
    if math.isinf(want):
        assert loss.item() == want
        return
    assert loss.item() == pytest.approx(want, rel=1e-12)
    (slope,) = torch.autograd.grad(loss.sum(), log)
    assert slope.item() == pytest.approx(float(-mpmath.exp(exponent)), rel=1e-12)
    tensor = power_loss(log.detach(), torch.tensor(q, dtype=torch.float64))
    assert torch.equal(tensor, loss.detach())


@pytest.mark.parametrize("q", [-0.5, -1e-2, -1e-9, 0.0, 1e-300, 1e-9, 1e-3, 1e-2, 0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("log_p", [-1e-3, -0.5, -3.0, -60.0])
def test_power_derivative_in_q(log_p, q):
    """∂ℓ/∂q = -(ℓ + log P·P^q)/q, -log²P/2 at 0."""
    power = torch.tensor(q, dtype=torch.float64, requires_grad=True)
    loss = power_loss(torch.tensor([log_p], dtype=torch.float64), power)
    (slope,) = torch.autograd.grad(loss.sum(), power)
    x, big = mpf(q), mpf(log_p)
    with mpmath.workdps(700):
        exact = -(big**2) / 2 if q == 0.0 else (-mpmath.exp(x * big) * big * x - (1 - mpmath.exp(x * big))) / x**2
    assert slope.item() == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize("column", PATHS, ids=str)
@pytest.mark.parametrize("q", [0.0, 1e-12, 1e-6])
def test_gradient_of_a_hopeless_row(q, column):
    """At log P = -1e4 the loss has the gradient -P^q ∇log P."""
    delta = -199.94  # log Φ(delta/√2) = -1e4 or so
    x = pair(delta, column)
    loss = exact_loss(x, torch.tensor([0]), power=q, normalize=False, backend=column.backend)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    held = float(x[0, 0].item())
    log_p = float(log_ndtr(held / math.sqrt(2.0)))
    slope = math.exp(math.log(phi(0.0)) - held * held / 4.0 - log_p + q * log_p) / math.sqrt(2.0)
    assert log_p == pytest.approx(-1e4, rel=1e-3)
    np.testing.assert_allclose(gradient[0], [-slope, slope], rtol=CONTRACTS[column.dtype].gradient)


@pytest.mark.parametrize("q", [-0.5, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("margin", [None, 0.4])
@pytest.mark.parametrize("column", PATHS, ids=str)
def test_sigma_gradient(column, margin, q):
    """Per-sample ∂ℓ/∂σ = P^q Σ_i m_i ∂log P/∂m_i /σ, from a central difference of the float64 reference."""
    x = 1.5 * torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    x, y = x.to(column.dtype), torch.arange(12) % 5
    sigma = torch.linspace(0.3, 2.5, 12, dtype=torch.float64, requires_grad=True)

    def loss(s, logits, backend):
        return exact_loss(logits, y, s, margin=margin, power=q, normalize=False, backend=backend)

    def difference(h):
        return loss(sigma + h, x.double(), "reference") - loss(sigma - h, x.double(), "reference")

    (slope,) = torch.autograd.grad(loss(sigma, x, column.backend).sum(), sigma)
    with torch.no_grad():
        h = 1e-4 * sigma
        want = (8 * difference(h) - difference(2 * h)) / (12 * h)
    rtol = 1e-9 if column.dtype == torch.float64 else 1e-4
    assert torch.allclose(slope, want, rtol=rtol, atol=rtol * float(want.abs().max()))
