"""The table of the accuracy contract, cell by cell, against certified truth, through the public functions.

An id reads: row of the table, dtype, backend, number of classes. Rows: P, 1 - P, log P, ∇P (competitors over the row's
largest; the true class) of each function, the win probabilities. bf16 and fp16 must be the float32 result, rounded.
"""

import json
import math

import numpy as np
import pytest
import torch
from contract import (
    CONTRACTS,
    FUNCTIONS,
    LEAST_ERROR,
    LEAST_GRADIENT,
    LEAST_LOG,
    LEAST_WIN,
    PATHS,
    SIZES,
    TRUTH,
    Column,
    Result,
    evaluate,
    evaluate_wins,
    load_truth,
    require,
    stack,
)
from families import cases, fingerprint

from expacc import argmax_probabilities, expected_error
from expacc.kernels.dispatch import watch_paths

CELLS = [pytest.param(p, c, id=f"{p}-C{c}") for p in PATHS for c in SIZES]
WIN_CELLS = [pytest.param(p, c, id=f"{p}-C{c}") for p in PATHS[:2] for c in SIZES]
HALVES = [pytest.param(d, id=str(d).removeprefix("torch.")) for d in (torch.bfloat16, torch.float16)]
BACKENDS = [pytest.param(b, id=b) for b in ("reference", "cpu")]


def _names(results: list[Result]) -> list[str]:
    return [r.case.name for r in results]


def test_cases_committed():
    truth = load_truth()
    assert len(truth) >= 300
    assert {c.classes for c in cases()} == set(SIZES)


def test_truth_belongs_to_the_rows():
    """The families make, bit for bit, the rows that were certified."""
    stored = {name: record["crc32"] for name, record in json.loads(TRUTH.read_text()).items()}
    assert stored == {case.name: fingerprint(case) for case in cases()}


@pytest.mark.parametrize(("path", "classes"), CELLS)
def test_accuracy(path, classes):
    contract = CONTRACTS[path.dtype]
    kept = [r for r in evaluate(path, classes, "accuracy") if r.truth.log_p >= contract.least_log_p]
    errors = np.array([abs(r.value - r.truth.p) / r.truth.p for r in kept])
    limits = np.array([contract.p[classes > 1000] * max(1.0, -r.truth.log_p) for r in kept])
    require(_names(kept), errors, limits, 5)


@pytest.mark.parametrize(("path", "classes"), CELLS)
def test_error(path, classes):
    kept = [r for r in evaluate(path, classes, "error") if r.truth.error >= LEAST_ERROR]
    errors = np.array([abs(r.value - r.truth.error) / r.truth.error for r in kept])
    require(_names(kept), errors, CONTRACTS[path.dtype].error, 5)


@pytest.mark.parametrize(("path", "classes"), CELLS)
def test_log_accuracy(path, classes):
    """Down to -1e6; where P > ½, log P is held to the row of 1 - P."""
    contract = CONTRACTS[path.dtype]
    kept = [r for r in evaluate(path, classes, "log") if r.truth.log_p >= LEAST_LOG and r.truth.error >= LEAST_ERROR]
    errors = np.array([abs(r.value - r.truth.log_p) / -r.truth.log_p for r in kept])
    limits = np.array([contract.error if r.truth.p > 0.5 else contract.log_p[classes > 1000] for r in kept])
    require(_names(kept), errors, limits, 5)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("path", "classes"), CELLS)
def test_beyond_the_table_finite(path, classes, function):
    """Below every limit of the table the values are still finite, of the right sign, and the gradients too."""
    results = evaluate(path, classes, function)
    values = np.array([r.value for r in results])
    masses = np.array([r.gradient.mass for r in results])
    assert np.isfinite(values).all()
    assert np.isfinite(masses).all()
    assert (values <= 0.0).all() if function == "log" else ((values >= 0.0) & (values <= 1.0)).all()


def _slopes(result: Result, function: str) -> tuple[dict[int, float], float]:
    truth = result.truth
    return (truth.log_slopes, truth.log_own) if function == "log" else (truth.slopes, truth.own)


def _with_gradient(path: Column, classes: int, function: str) -> list[Result]:
    """Return the results whose largest certified competitor entry is ≥ 1e-30 (and log P ≥ -1e6)."""
    out = evaluate(path, classes, function)
    return [
        r
        for r in out
        if r.truth.log_p >= LEAST_LOG and max(_slopes(r, function)[0].values(), default=0.0) >= LEAST_GRADIENT
    ]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("path", "classes"), CELLS)
def test_gradient_of_competitors(path, classes, function):
    """Each certified entry over the row's largest; and no other entry above the largest."""
    kept = _with_gradient(path, classes, function)
    errors = []
    for result in kept:
        truth = _slopes(result, function)[0]
        top = max(truth.values())
        certified = max(abs(result.gradient.chosen[k] - t) for k, t in truth.items())
        errors.append(max(certified, abs(result.gradient.largest - top), result.gradient.wrong_sign) / top)
    require(_names(kept), np.array(errors), CONTRACTS[path.dtype].gradient, 5)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("path", "classes"), CELLS)
def test_gradient_of_true_class(path, classes, function):
    kept = _with_gradient(path, classes, function)
    own = np.array([_slopes(r, function)[1] for r in kept])
    errors = np.abs(np.array([r.gradient.own for r in kept]) - own) / own
    require(_names(kept), errors, CONTRACTS[path.dtype].gradient, 5)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("path", "classes"), CELLS)
def test_gradient_sums_to_zero(path, classes, function):
    kept = [r for r in evaluate(path, classes, function) if r.gradient.mass >= LEAST_GRADIENT]
    errors = np.array([abs(r.gradient.total) / r.gradient.mass for r in kept])
    require(_names(kept), errors, CONTRACTS[path.dtype].balance, 5)


@pytest.mark.parametrize(("path", "classes"), WIN_CELLS)
def test_win_probabilities(path, classes):
    contract = CONTRACTS[path.dtype]
    names, errors, limits = [], [], []
    for case, truth, chosen, _ in evaluate_wins(path, classes):
        certified = truth.wins | {-1: truth.p}
        names += [f"{case.name} class {k}" for k in certified]
        errors += [abs(chosen[k] - w) for k, w in certified.items()]
        relative = [contract.win_relative * w if w > LEAST_WIN else math.inf for w in certified.values()]
        limits += [min(contract.win_absolute, limit) for limit in relative]
    require(names, np.array(errors), np.array(limits), 5)


@pytest.mark.parametrize(("path", "classes"), WIN_CELLS)
def test_win_probabilities_sum_to_one(path, classes):
    results = evaluate_wins(path, classes)
    errors = np.array([abs(total - 1.0) for *_, total in results])
    limit = 1e-11 if path.dtype == torch.float64 else 3e-6
    require([case.name for case, *_ in results], errors, limit, 2)


def _round_rows(classes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the half-precision scores of cases without margin whose scores this dtype can hold."""
    chosen = [c for c in cases() if c.classes == classes and c.margin is None][:: 3 if classes == 1000 else 1]
    logits, target, sigma = stack(chosen, torch.float32)
    logits = logits.to(dtype)
    keep = torch.isfinite(logits).all(-1)
    return logits[keep], target[keep], torch.as_tensor(sigma, dtype=torch.float64).expand(len(keep))[keep]


@pytest.mark.parametrize("classes", SIZES[:-1], ids=lambda c: f"C{c}")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES)
def test_half_input(dtype, backend, function, classes):
    """Value and gradient are those of float32 on the rounded input, rounded once."""
    half, target, sigma = _round_rows(classes, dtype)
    assert len(half) >= 15
    single = half.float().requires_grad_()
    half = half.requires_grad_()
    got, want = (FUNCTIONS[function](x, target, sigma, backend=backend) for x in (half, single))
    got_slope, want_slope = (torch.autograd.grad(v.sum(), x)[0] for v, x in ((got, half), (want, single)))
    assert (got.dtype, got_slope.dtype) == (dtype, dtype)
    assert torch.equal(got, want.to(dtype))
    assert torch.equal(got_slope, want_slope.to(dtype))


@pytest.mark.parametrize("classes", SIZES[:-1], ids=lambda c: f"C{c}")
@pytest.mark.parametrize("dtype", HALVES)
def test_half_input_win_probabilities(dtype, classes):
    half, _, sigma = _round_rows(classes, dtype)
    assert torch.equal(argmax_probabilities(half, sigma), argmax_probabilities(half.float(), sigma).to(dtype))


@pytest.mark.parametrize(
    ("path", "classes"), [pytest.param(p, c, id=f"{p}-C{c}") for p in PATHS for c in (10, 1000, 100_000)]
)
def test_bit_for_bit_twice(path, classes):
    case = next(c for c in cases() if c.name == f"lead4-spread-C{classes}-offset1000")
    logits, target, sigma = stack([case], path.dtype)
    logits.requires_grad_()
    runs = []
    for _ in range(2):
        with watch_paths() as paths:
            value = expected_error(logits, target, sigma, backend=path.backend)
        assert paths == [path.backend]
        runs.append((value.detach(), torch.autograd.grad(value.sum(), logits)[0]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
