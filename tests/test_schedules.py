"""Schedules of σ and q: their values, their state, and what cannot be meant."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from expacc import (
    ConstantPower,
    ConstantSigma,
    CosinePower,
    CosineSigma,
    ExactLoss,
    ExponentialPower,
    ExponentialSigma,
    LinearPower,
    LinearSigma,
)

MOVING = [ExponentialSigma, LinearSigma, CosineSigma, ExponentialPower, LinearPower, CosinePower]


def last(schedule) -> float:
    return getattr(schedule, f"get_last_{schedule.attribute}")()


@pytest.mark.parametrize("kind", MOVING)
def test_from_start_to_end_and_no_further(kind):
    loss = ExactLoss()
    schedule = kind(loss, 4.0, 0.25, total_steps=8)
    seen = []
    for _ in range(12):
        seen.append(float(getattr(loss, kind.attribute)))
        assert last(schedule) == seen[-1]
        schedule.step()
    assert seen[0] == 4.0
    assert seen[8:] == [0.25] * 4
    assert all(a > b for a, b in itertools.pairwise(seen[:9]))
    assert schedule.last_epoch == 12


@pytest.mark.parametrize(
    ("kind", "half", "quarter"),
    [
        (ExponentialSigma, math.sqrt(10.0), 10.0**0.75),
        (LinearSigma, 5.5, 7.75),
        (CosineSigma, 5.5, 1.0 + 9.0 * (1.0 + math.sqrt(0.5)) / 2.0),
    ],
)
def test_curves(kind, half, quarter):
    schedule = kind(ExactLoss(), 10.0, 1.0, total_steps=4)
    assert schedule.value_at(2) == pytest.approx(half, rel=1e-15)
    assert schedule.value_at(1) == pytest.approx(quarter, rel=1e-15)


@pytest.mark.parametrize("kind", [ConstantSigma, ConstantPower])
def test_constant(kind):
    loss = ExactLoss()
    schedule = kind(loss, 0.7)
    for _ in range(3):
        schedule.step()
        assert float(getattr(loss, kind.attribute)) == last(schedule) == 0.7


@pytest.mark.parametrize("kind", MOVING)
def test_goes_on_bit_for_bit_from_its_state(kind, tmp_path):
    """Plain numbers, loaded with weights_only, and the same bits from there on."""
    one, other = ExactLoss(), ExactLoss()
    schedule = kind(one, 3.0, 0.5, total_steps=7)
    for _ in range(3):
        schedule.step()
    torch.save(schedule.state_dict(), tmp_path / "state.pt")
    again = kind(other, 9.0, 8.0, total_steps=2)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(6):
        assert torch.equal(getattr(one, kind.attribute), getattr(other, kind.attribute))
        schedule.step()
        again.step()


def test_a_state_of_something_else_is_refused():
    schedule = LinearSigma(ExactLoss(), 1.0, 0.5, total_steps=3)
    with pytest.raises(KeyError, match="state of LinearSigma has 'x'; it needs 'start', 'end', "):
        schedule.load_state_dict({"x": 1})
    with pytest.raises(KeyError, match="state of LinearSigma has nothing; it needs 'start', 'end', "):
        schedule.load_state_dict({})


def test_whole_numbers_of_numpy_are_whole_numbers():
    """And the state stays plain: JSON knows none of NumPy's."""
    schedule = LinearSigma(ExactLoss(), 3.0, 1.0, np.int64(4), last_epoch=np.int32(2))
    assert json.loads(json.dumps(schedule.state_dict()))["last_epoch"] == 2
    assert json.loads(json.dumps(schedule.plan()))["total_steps"] == 4


@pytest.mark.parametrize(
    ("kind", "name"), [(LinearPower, "linear"), (CosineSigma, "cosine"), (ExponentialSigma, "exponential")]
)
def test_plan(kind, name):
    assert kind(ExactLoss(), 2, 1, total_steps=5).plan() == {"kind": name, "start": 2.0, "end": 1.0, "total_steps": 5}
    assert ConstantSigma(ExactLoss(), 2).plan()["kind"] == "constant"


def test_moves_where_it_is():
    """In place: a captured graph and a compiled step keep looking at the same tensor."""
    loss = ExactLoss()
    before = loss.sigma
    LinearSigma(loss, 5.0, 1.0, total_steps=3).step()
    assert loss.sigma is before


def test_shows_itself():
    assert (
        repr(ExponentialSigma(ExactLoss(), 10, 1, total_steps=5)) == "ExponentialSigma(10 → 1, step 0 of 5, sigma=10)"
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LinearSigma(torch.nn.CrossEntropyLoss(), 1, 1, 3), TypeError, "must have sigma.*Loss has none"),
        (lambda: LinearSigma(ExactLoss(), 0.0, 1, 3), ValueError, "start must be positive and finite, got 0.0"),
        (lambda: LinearSigma(ExactLoss(), 1, -1.0, 3), ValueError, "end must be positive and finite, got -1.0"),
        (lambda: ExponentialPower(ExactLoss(), 0.0, 1, 3), ValueError, "start must be positive and finite, got 0.0"),
        (lambda: LinearPower(ExactLoss(), math.nan, 1, 3), ValueError, "start must be finite, got nan"),
        (lambda: LinearSigma(ExactLoss(), 1, 1, 0), ValueError, "total_steps must be positive, got 0: write"),
        (lambda: LinearSigma(ExactLoss(), 1, 1, 2.5), TypeError, "total_steps must be an integer, got 2.5: write"),
        (lambda: LinearSigma(ExactLoss(), 1, 1, True), TypeError, "total_steps must be an integer, got True: write"),
        (lambda: LinearSigma(ExactLoss(), 1, 1, 3, 2.5), TypeError, "last_epoch must be an integer, got 2.5: write"),
        (lambda: LinearSigma(ExactLoss(), 1, 1, 3, -2), ValueError, "last_epoch must be at least -1, got -2: write"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(make, error, message):
    with pytest.raises(error, match=message):
        make()
