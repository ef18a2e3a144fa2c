"""Laws of the win probability, on whatever rows hypothesis comes up with: both paths, both kinds of noise."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from plain import BACKENDS, NOISES

from expacc import argmax_probabilities, expected_accuracy, expected_error, log_expected_accuracy

both = pytest.mark.parametrize("backend", BACKENDS)
noises = pytest.mark.parametrize("noise", NOISES)
# Multiples of 1/64: exact in float32, also after a shift, so that what the law compares is the same row.
SCORES = st.lists(st.integers(-640, 640).map(lambda k: k / 64), min_size=2, max_size=60)
MARGINS = st.sampled_from([None, -1.0, 0.0, 0.5, 5.0])
SIGMAS = st.sampled_from([0.05, 0.3, 1.0, 4.0, 100.0])


def accuracy(row: torch.Tensor, target: int, sigma: float, **options: Any) -> float:
    return expected_accuracy(row[None], torch.tensor([target]), sigma, **options).item()


@both
@noises
@given(values=SCORES, data=st.data(), margin=MARGINS, sigma=SIGMAS, shift=st.integers(-200, 200))
def test_shift_and_permutation_change_nothing(backend, noise, values, data, margin, sigma, shift):
    row, target = torch.tensor(values), data.draw(st.integers(0, len(values) - 1))
    options = {"margin": margin, "noise": noise, "backend": backend}
    p = accuracy(row, target, sigma, **options)
    assert accuracy(row + shift, target, sigma, **options) == pytest.approx(p, rel=1e-5, abs=1e-37)
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    place = int((order == target).nonzero())
    assert accuracy(row[order], place, sigma, **options) == pytest.approx(p, rel=1e-5, abs=1e-37)


@both
@noises
@given(values=SCORES, data=st.data(), margin=MARGINS, sigma=SIGMAS, rise=st.floats(0.01, 3.0))
def test_a_higher_true_score_is_never_worse(backend, noise, values, data, margin, sigma, rise):
    row, target = torch.tensor(values), data.draw(st.integers(0, len(values) - 1))
    options = {"margin": margin, "noise": noise, "backend": backend}
    higher = row.clone()
    higher[target] += rise
    before, after = accuracy(row, target, sigma, **options), accuracy(higher, target, sigma, **options)
    assert after >= before * (1.0 - 1e-5)
    logits, y = torch.stack([row, higher]), torch.tensor([target, target])
    error = expected_error(logits, y, sigma, **options)
    assert error[1] <= error[0] * (1.0 + 2e-4)
    assert ((error >= 0.0) & (error <= 1.0)).all()
    assert 0.0 <= before <= 1.0
    assert after + float(error[1]) == pytest.approx(1.0, abs=1e-5)


@noises
@given(values=SCORES, sigma=SIGMAS)
def test_somebody_wins(noise, values, sigma):
    """The win probabilities sum to 1, are ordered like the scores, and each is its class's expected accuracy."""
    row = torch.tensor(values, dtype=torch.float64)
    p = argmax_probabilities(row, sigma, noise=noise)
    assert p.sum().item() == pytest.approx(1.0, abs=1e-11)
    assert (p[row.argsort()].diff() >= -1e-11).all()
    y = torch.arange(len(values))
    each = expected_accuracy(row.expand(len(values), -1), y, sigma, noise=noise)
    torch.testing.assert_close(p, each, rtol=1e-8, atol=1e-11)


@both
@noises
@given(values=SCORES, data=st.data())
def test_without_noise_it_is_accuracy_and_with_much_it_is_chance(backend, noise, values, data):
    row, target = torch.tensor(values), data.draw(st.integers(0, len(values) - 1))
    lead = float(row[target] - torch.cat([row[:target], row[target + 1 :]]).max())
    assume(lead != 0.0)
    options = {"noise": noise, "backend": backend}
    assert accuracy(row, target, 1e-4, **options) == (1.0 if lead > 0.0 else 0.0)
    assert accuracy(row, target, 1e7, **options) == pytest.approx(1.0 / len(values), rel=1e-4)


@both
@noises
@given(values=SCORES, data=st.data(), margin=MARGINS, sigma=SIGMAS)
def test_gradient_rows_sum_to_zero_and_push_the_right_way(backend, noise, values, data, margin, sigma):
    target = data.draw(st.integers(0, len(values) - 1))
    row = torch.tensor([values], requires_grad=True)
    options: dict[str, Any] = {"margin": margin, "noise": noise, "backend": backend}
    value = log_expected_accuracy(row, torch.tensor([target]), sigma, **options)
    (slope,) = torch.autograd.grad(value.sum(), row)
    others = torch.arange(len(values)) != target
    assert slope[0, target] >= 0.0
    assert (slope[0, others] <= 0.0).all()
    assert abs(slope.double().sum().item()) <= 2e-6 * slope.double().abs().sum().item()


@both
@noises
@given(data=st.data(), size=st.integers(2, 30), margin=MARGINS, sigma=SIGMAS, part=st.floats(0.05, 0.95))
def test_minus_log_p_is_convex_along_every_line(backend, noise, data, size, margin, sigma, part):
    """With and without a margin, for every σ: the chord lies above."""
    draw = st.lists(st.integers(-320, 320).map(lambda k: k / 64), min_size=size, max_size=size)
    a, b = (torch.tensor(data.draw(draw), dtype=torch.float64) for _ in range(2))
    dtype = torch.float64 if backend == "reference" else torch.float32
    line = torch.stack([a, (1.0 - part) * a + part * b, b]).to(dtype)
    options: dict[str, Any] = {"margin": margin, "noise": noise, "backend": backend}
    low, middle, high = (-log_expected_accuracy(line, torch.zeros(3, dtype=torch.long), sigma, **options)).tolist()
    chord = (1.0 - part) * low + part * high
    # the scores between are rounded, and the slope of -log P is up to |gap|/σ² per score
    rounding = torch.finfo(dtype).eps * 16.0 * (1.0 + chord) * max(1.0, 1.0 / sigma**2)
    assert middle <= chord * (1.0 + (1e-9 if dtype == torch.float64 else 2e-5)) + rounding + math.ulp(0.0)
