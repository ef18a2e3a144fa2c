"""The win probabilities of all classes: against the quadrature of each class on its own, masks, derivatives."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from expacc import argmax_probabilities
from expacc.integrals import all_classes
from expacc.integrals.all_classes import log_win_probabilities, win_probabilities
from expacc.integrals.quadrature import Rule, auto_rule, log_win_probability

EXACT = Rule(160, 40.0)
DTYPES = [pytest.param(d, id=str(d).removeprefix("torch.")) for d in (torch.float64, torch.float32)]
INF, NAN = math.inf, math.nan


def rule_for(u: Tensor, dtype: torch.dtype = torch.float64) -> Rule:
    return auto_rule(u.shape[-1], dtype)


def one_by_one(u: Tensor) -> Tensor:
    """Return log P of every class, each with nodes of its own."""
    m = u.unsqueeze(-1) - u.unsqueeze(-2)
    own = torch.eye(u.shape[-1], dtype=torch.bool)
    return log_win_probability(torch.where(own, torch.inf, m), EXACT)


def lead(classes: int, d: float) -> Tensor:
    u = torch.zeros(1, classes, dtype=torch.float64)
    u[0, 0] = d
    return u


def spread(classes: int, scale: float) -> Tensor:
    return scale * torch.randn(1, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(classes))


def two_top(classes: int, d: float) -> Tensor:
    """Two classes at the top, the others d below: the narrow flank from two sides."""
    u = torch.full((1, classes), -d, dtype=torch.float64)
    u[0, :2] = 0.0
    return u


def line(classes: int, d: float) -> Tensor:
    return torch.linspace(0.0, -d, classes, dtype=torch.float64)[None]


ROWS = {
    f"{make.__name__}-{size:g}-C{c}": make(c, size)
    for c in (2, 3, 10, 60)
    for make, sizes in (
        (spread, (0.3, 2.0, 8.0, 100.0)),
        (lead, (0.0, 3.0, 5.0, 6.5, 20.0, -4.0, -30.0)),
        (two_top, (2.0, 4.0, 6.0, 7.99, 8.01, 1e4)),
        (line, (6.0, 30.0, 1e4)),
    )
    for size in sizes
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROWS)
def test_win_probabilities_one_by_one(name, dtype):
    """Absolute everywhere, and relative above 1e-6."""
    u = ROWS[name]
    p, want = win_probabilities(u, rule_for(u, dtype)), one_by_one(u).exp()
    wide = dtype == torch.float64
    limit = torch.where(want > 1e-6, want * (1e-8 if wide else 1e-4), torch.inf).clamp(max=1e-11 if wide else 3e-6)
    assert ((p - want).abs() <= limit).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROWS)
def test_log_win_probabilities_one_by_one(name, dtype):
    """The log P row of the contract, for every class, down to -1e6; where P > ½ the row of 1 - P down to 1e-30."""
    u = ROWS[name]
    log_p, want = log_win_probabilities(u, rule_for(u, dtype)), one_by_one(u)
    wide = dtype == torch.float64
    relative = torch.where(want > -math.log(2.0), 1e-9 if wide else 1e-4, 1e-10 if wide else 1e-5)
    held = (want > -1e6) & (want < -1e-30)
    # Two or three classes so far apart that one is certain beyond 1e-30 and the others below -1e6: nothing is asked.
    assert held.any() or name.startswith(("line-10000-C2", "line-10000-C3", "spread-100"))
    assert ((log_p - want).abs() <= relative * want.abs())[held].all()
    assert (log_p <= 0.0).all()


@pytest.mark.parametrize("gap", [7.9, 8.0, 8.1, 15.9, 16.0, 100.0, 1e4])
@pytest.mark.parametrize("pairs", [1, 30])
def test_classes_on_both_sides_of_a_bucket(pairs, gap):
    """The width of a bucket is no edge in the result."""
    u = torch.tensor([[0.0] + [-gap + 1e-9, -gap - 1e-9] * pairs], dtype=torch.float64)
    log_p, want = log_win_probabilities(u, rule_for(u)), one_by_one(u)
    torch.testing.assert_close(log_p, want, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("function", [win_probabilities, log_win_probabilities])
def test_rows_do_not_touch_each_other(function):
    u = torch.cat([spread(7, 1.0), spread(7, 30.0), lead(7, 5.0), spread(7, 1e4)])
    together = function(u, rule_for(u))
    apart = torch.cat([function(row[None], rule_for(row)) for row in u])
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("function", [win_probabilities, log_win_probabilities])
def test_chunks_of_rows_change_nothing(function, monkeypatch):
    """Value, gradient, second derivatives and batched upstream gradients, with a row a chunk and with all in one."""
    u = torch.cat([spread(6, 1.0), spread(6, 9.0), lead(6, 4.0)]).requires_grad_()
    above = torch.linspace(0.5, 2.0, u.numel(), dtype=torch.float64).view(3, 6)

    def derive():
        value = function(u, rule_for(u))
        (slope,) = torch.autograd.grad(value, u, above, retain_graph=True)
        (smooth,) = torch.autograd.grad(value, u, above, create_graph=True)
        (bend,) = torch.autograd.grad(smooth.square().sum(), u, retain_graph=True)
        (many,) = torch.autograd.grad(value, u, torch.stack([above, -above]), is_grads_batched=True)
        return value, slope, smooth, bend, many

    whole = derive()
    monkeypatch.setattr(all_classes, "_CPU_CHUNK", 1)
    for got, want in zip(derive(), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-13)


MASKED = {
    "one masked": [0.0, 1.0, -INF],
    "all but one": [-INF, 3.0, -INF],
    "all but two": [-INF, 3.0, -INF, 1.0],
    "far and masked": [0.0, -1e4, -INF, -30.0],
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_classes_take_no_part(name):
    u = torch.tensor([MASKED[name]], dtype=torch.float64, requires_grad=True)
    keep = torch.isfinite(u[0])
    alone = u.detach()[:, keep].requires_grad_()
    weights = torch.linspace(1.0, 2.0, u.shape[-1], dtype=torch.float64)
    for function in (win_probabilities, lambda v, r: log_win_probabilities(v, r).exp()):
        got, want = function(u, rule_for(u)), function(alone, rule_for(alone))
        torch.testing.assert_close(got[:, keep], want, rtol=1e-11, atol=1e-300)
        assert (got[:, ~keep] == 0.0).all()
        (slope,) = torch.autograd.grad((got * weights).sum(), u)
        (want_slope,) = torch.autograd.grad((want * weights[keep]).sum(), alone)
        torch.testing.assert_close(slope[:, keep], want_slope, rtol=1e-9, atol=1e-13)
        assert (slope[:, ~keep] == 0.0).all()


def test_row_of_masked_classes_is_equal_scores():
    u = torch.tensor([[-INF] * 4, [0.0, 1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    log_p = log_win_probabilities(u, rule_for(u))
    torch.testing.assert_close(log_p[0], torch.full((4,), -math.log(4.0), dtype=torch.float64), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(win_probabilities(u, rule_for(u))[0], log_p[0].exp(), rtol=1e-12, atol=0.0)
    (slope,) = torch.autograd.grad(log_p[:, 0].sum(), u)
    assert (slope[0] == 0.0).all()
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("classes", [1, 2, 5])
def test_one_infinite_score_wins(classes):
    u = torch.zeros(1, classes, dtype=torch.float64)
    u[0, -1] = INF
    want = torch.zeros(1, classes, dtype=torch.float64)
    want[0, -1] = 1.0
    assert torch.equal(win_probabilities(u, rule_for(u)), want)
    assert torch.equal(log_win_probabilities(u, rule_for(u)).exp(), want)


@pytest.mark.parametrize("function", [win_probabilities, log_win_probabilities])
def test_nan_stays_in_its_row(function):
    u = torch.tensor([[0.0, NAN, 1.0], [0.0, 2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    value = function(u, rule_for(u))
    (slope,) = torch.autograd.grad(value[1].square().sum(), u, retain_graph=True)
    assert torch.isnan(value[0]).all()
    torch.testing.assert_close(value[1:], function(u.detach()[1:], rule_for(u)))
    assert torch.isfinite(slope[1]).all()


@pytest.mark.parametrize("function", [win_probabilities, log_win_probabilities])
@pytest.mark.parametrize("score", [-1e4, 0.0, 3.0])
def test_one_class_is_certain(score, function):
    u = torch.tensor([[score]], dtype=torch.float64, requires_grad=True)
    value = function(u, rule_for(u))
    assert value.item() == (1.0 if function is win_probabilities else 0.0)
    assert torch.autograd.grad(value.sum(), u)[0].item() == 0.0


GRADIENT_ROWS = {
    "spread": [[0.3, -0.5, 1.2, 0.1]],
    "confident": [[6.0, 0.5, -0.2, 0.1]],
    "three buckets": [[0.0, -1.0, -9.5, -20.0]],
    "near tie at the top": [[1.0, 0.999, -2.0, 0.2]],
    "two rows": [[0.3, -0.5, 1.2], [5.0, 0.0, -12.0]],
}


@pytest.mark.parametrize("function", [win_probabilities, log_win_probabilities])
@pytest.mark.parametrize("name", GRADIENT_ROWS)
def test_derivatives_by_differences(name, function):
    u = torch.tensor(GRADIENT_ROWS[name], dtype=torch.float64, requires_grad=True)
    rule = rule_for(u)
    assert torch.autograd.gradcheck(lambda v: function(v, rule), (u,), rtol=1e-6, atol=1e-8)
    assert torch.autograd.gradgradcheck(lambda v: function(v, rule), (u,), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("function", [win_probabilities, log_win_probabilities])
@pytest.mark.parametrize("name", GRADIENT_ROWS)
def test_forward_mode_is_the_transpose(name, function):
    u = torch.tensor(GRADIENT_ROWS[name], dtype=torch.float64)
    rule = rule_for(u)
    backward = torch.func.jacrev(lambda v: function(v, rule))(u)
    tangent = torch.linspace(-1.0, 2.0, u.numel(), dtype=torch.float64).reshape(u.shape)
    _, forward = torch.func.jvp(lambda v: function(v, rule), (u,), (tangent,))
    torch.testing.assert_close(forward, (backward * tangent).sum((-1, -2)), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("function", [win_probabilities, log_win_probabilities])
def test_vmap_over_gradients(function):
    u = torch.cat([spread(5, 1.0), spread(5, 9.0), lead(5, 4.0)])
    rule = rule_for(u)
    mapped = torch.func.vmap(torch.func.grad(lambda row: function(row, rule)[0]))(u)
    one_by_one = torch.stack([torch.func.grad(lambda row: function(row, rule)[0])(row) for row in u])
    torch.testing.assert_close(mapped, one_by_one, rtol=1e-9, atol=1e-12)


@given(
    st.lists(st.floats(-12.0, 12.0), min_size=2, max_size=9),
    st.floats(-100.0, 100.0),
    st.sampled_from([win_probabilities, log_win_probabilities]),
)
def test_laws(values, shift, function):
    """Shift changes nothing, a permutation permutes, probabilities sum to 1, the order is that of the scores."""
    u = torch.tensor([values], dtype=torch.float64)
    order = torch.tensor(sorted(range(len(values)), key=lambda k: hash((k, len(values)))))
    p = function(u, rule_for(u))
    torch.testing.assert_close(function(u + shift, rule_for(u)), p, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(function(u[:, order], rule_for(u)), p[:, order], rtol=1e-9, atol=1e-11)
    total = p.sum() if function is win_probabilities else p.exp().sum()
    assert total.item() == pytest.approx(1.0, abs=1e-11)
    ranked = p[0, u[0].argsort()]
    assert (ranked.diff() >= -1e-11).all()


@pytest.mark.parametrize("classes", [100_000])
def test_many_classes(classes):
    """The first 20 of 100 000 classes, and the sum, without a table of nodes times classes in memory twice."""
    x = 1.5 * torch.randn(classes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = argmax_probabilities(x)
    some = x.argsort(descending=True)[[0, 1, 50, 5000, classes - 1]]
    m = torch.where(torch.arange(classes) == some[:, None], torch.inf, x[some][:, None] - x)
    want = log_win_probability(m, auto_rule(classes, torch.float64)).exp()
    assert ((p[some] - want).abs() <= 1e-11).all()
    assert ((p[some] - want).abs() <= 1e-8 * want)[want > 1e-6].all()
    assert p.sum().item() == pytest.approx(1.0, abs=1e-11)
