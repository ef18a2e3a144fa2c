"""The accuracy contract as data, and the library's results on the committed cases beside their certified truth.

Everything is evaluated once per (path, classes, function) and kept as arrays over the cases; a test reads one cell.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from families import CLASSES, Case, cases, scores
from mpmath import mpf
from torch import Tensor

import expacc

TRUTH = Path(__file__).with_name("reference") / "truth.json"
EVERYTHING = bool(os.environ.get("EXPACC_TEST_ALL"))


@dataclass(frozen=True)
class Column:
    """A backend with a dtype: one column of the contract."""

    backend: str
    dtype: torch.dtype

    def __str__(self) -> str:
        """Read as a test's id."""
        return f"{str(self.dtype).removeprefix('torch.')}-{self.backend}"


PATHS = (Column("reference", torch.float64), Column("reference", torch.float32), Column("cpu", torch.float32))
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "accuracy": expacc.expected_accuracy,
    "error": expacc.expected_error,
    "log": expacc.log_expected_accuracy,
}


@dataclass(frozen=True)
class Contract:
    """The table of tolerances for one dtype; P and log P by the number of classes."""

    least_log_p: float
    p: dict[bool, float]  # classes > 1000
    error: float
    log_p: dict[bool, float]
    gradient: float
    win_absolute: float
    win_relative: float
    balance: float  # |Σ ∂P/∂μ| over Σ |∂P/∂μ|: rounding in the sum, a tenth of the tolerance of an entry


CONTRACTS = {
    torch.float64: Contract(
        math.log(1e-300), {False: 1e-11, True: 1e-10}, 1e-9, {False: 1e-10, True: 1e-10}, 1e-10, 1e-11, 1e-8, 1e-13
    ),
    torch.float32: Contract(
        math.log(1e-35), {False: 3e-6, True: 3e-5}, 1e-4, {False: 1e-5, True: 3e-5}, 3e-5, 3e-6, 1e-4, 3e-6
    ),
}
LEAST_ERROR = LEAST_GRADIENT = 1e-30
LEAST_WIN = 1e-6
LEAST_LOG = -1e6
SIZES = CLASSES


@dataclass(frozen=True)
class Truth:
    """Certified values of one case as doubles; gradients with respect to the scores."""

    p: float
    error: float
    log_p: float
    slopes: dict[int, float]  # -∂P/∂mu_i of chosen competitors
    own: float  # ∂P/∂mu_y
    log_slopes: dict[int, float]  # the same of log P, also where P underflows
    log_own: float
    wins: dict[int, float]


def _read(case: Case, record: dict) -> Truth:
    p, sigma = mpf(record["P"][0]), mpf(case.sigma)
    slopes = {int(k): mpf(v[0]) / sigma for k, v in record["G"].items()}
    live = record["live"]
    own = (mpf(live[0]) if live else mpf(0)) / sigma
    return Truth(
        p=float(p),
        error=float(mpf(record["Q"][0])),
        log_p=float(record["logP"][0]),
        slopes={k: float(v) for k, v in slopes.items()},
        own=float(own),
        log_slopes={k: float(v / p) for k, v in slopes.items()},
        log_own=float(own / p),
        wins={int(k): float(v[0]) for k, v in record.get("W", {}).items()},
    )


@cache
def load_truth() -> dict[str, Truth]:
    records = json.loads(TRUTH.read_text())
    return {case.name: _read(case, records[case.name]) for case in cases()}


def choose_cases(path: Column, classes: int, wins: bool = False) -> list[Case]:
    """Return the cases of a size; of 100 000 classes the slow reference takes some (EXPACC_TEST_ALL=1: all)."""
    chosen = [c for c in cases() if c.classes == classes and not (wins and c.margin is not None)]
    if classes <= 1000 or path.backend != "reference" or EVERYTHING:
        return chosen
    wide = path.dtype == torch.float64
    return chosen[:: (8 if wide else 12) if wins else (2 if wide else 6)]


@dataclass(frozen=True)
class Gradient:
    """What is kept of one row's gradient: certified entries, and sums over all of them."""

    chosen: dict[int, float]
    own: float
    largest: float  # over the competitors, of |g|
    wrong_sign: float  # largest entry that pushes a competitor up
    total: float
    mass: float


@dataclass(frozen=True)
class Result:
    case: Case
    truth: Truth
    value: float
    gradient: Gradient


def _summarise(row: np.ndarray, target: int, sign: float, truth: Truth) -> Gradient:
    row = row.astype(np.float64) * sign
    others = np.delete(row, target)
    return Gradient(
        chosen={k: -float(row[k]) for k in truth.slopes},
        own=float(row[target]),
        largest=float(np.abs(others).max()),
        wrong_sign=max(0.0, float(others.max())),
        total=math.fsum(row),
        mass=float(np.abs(row).sum()),
    )


def batches(chosen: list[Case], limit: int = 400_000) -> list[list[Case]]:
    """Group cases of one margin into batches of at most `limit` scores; sigma goes in per row."""
    out: list[list[Case]] = []
    for case in sorted(chosen, key=lambda c: (c.margin is not None, c.margin or 0.0)):
        fits = out and out[-1][0].margin == case.margin and (len(out[-1]) + 1) * case.classes <= limit
        if fits:
            out[-1].append(case)
        else:
            out.append([case])
    return out


def stack(batch: list[Case], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return scores, targets and sigma: one number where the batch has one, else one per row."""
    rows = [scores(case) for case in batch]
    sigmas = [case.sigma for case in batch]
    sigma = sigmas[0] if len(set(sigmas)) == 1 else torch.tensor(sigmas, dtype=torch.float64)
    logits = torch.from_numpy(np.stack([row for row, _ in rows])).to(dtype)
    return logits, torch.tensor([target for _, target in rows]), sigma


@cache
def evaluate(path: Column, classes: int, function: str) -> list[Result]:
    """Return value and autograd gradient of a public function on every case of a size."""
    truths, out = load_truth(), []
    for batch in batches(choose_cases(path, classes)):
        logits, target, sigma = stack(batch, path.dtype)
        logits.requires_grad_()
        values = FUNCTIONS[function](logits, target, sigma, margin=batch[0].margin, backend=path.backend)
        (gradient,) = torch.autograd.grad(values.sum(), logits)
        sign = -1.0 if function == "error" else 1.0
        for case, y, value, row in zip(batch, target.tolist(), values.tolist(), gradient.numpy(), strict=True):
            truth = truths[case.name]
            out.append(Result(case, truth, value, _summarise(row, y, sign, truth)))
    return out


@cache
def evaluate_wins(path: Column, classes: int) -> list[tuple[Case, Truth, dict[int, float], float]]:
    """Return (case, truth, win probability of the certified classes and the target's as -1, sum over all classes)."""
    truths, out = load_truth(), []
    for batch in batches(choose_cases(path, classes, wins=True), 100_000):
        logits, target, sigma = stack(batch, path.dtype)
        wins = expacc.argmax_probabilities(logits, sigma).double()
        for case, y, row in zip(batch, target.tolist(), wins.numpy(), strict=True):
            truth = truths[case.name]
            chosen = {k: float(row[k]) for k in truth.wins} | {-1: float(row[y])}
            out.append((case, truth, chosen, math.fsum(row)))
    return out


def require(names: list[str], errors: np.ndarray, limits: np.ndarray | float, least: int = 1) -> None:
    """Fail unless every error is within its limit, naming the worst case; and unless there are `least` cases."""
    assert len(names) >= least, f"only {len(names)} cases meet the condition of this cell"
    ratio = np.asarray(errors, dtype=np.float64) / limits
    worst = int(np.argmax(np.where(np.isnan(ratio), np.inf, ratio)))
    assert ratio[worst] <= 1.0, f"{names[worst]}: error {errors[worst]:.3g} is {ratio[worst]:.3g} times the contract"
