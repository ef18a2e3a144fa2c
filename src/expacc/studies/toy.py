r"""The paper's two toy examples: minimising cross-entropy or the hinge loss gives up accuracy, EXACT does not.

**Three points**, f(x) = x - b (its Motivation, Figure 1). **Five points**, f(x) = w·x + c (its appendix "Toy Example
with Learned Weight"). A point is given the class 1 where f(x) ≥ 0 and -1 elsewhere, so the threshold is b, or -c/w.

EXACT is trained as the paper trains: gradient descent from a random start while sigma falls. A binary model is a model
of two scores, 0 and f, hence P(the label wins) = Φ(y·f/(√2·σ)). The paper minimised the other two losses on a grid;
here they are convex functions of one or two numbers, so their optima are given exactly. Of the three points:

    cross-entropy:  u³ - (1 + e^¼ + e^-¼)·u - 2 = 0 for u = e^b    →  b = 0.70009 (the paper's derivative)
    hinge:          constant on 0.75 ≤ b ≤ 1
    EXACT:          t² + t·exp(1/(32s²)) = 1 for t = exp(-b/(4s²)), s² = 2σ²:  for every σ one maximum; b → 1/8
"""

import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expacc.functional import expected_accuracy
from expacc.kernels.dispatch import watch_paths
from expacc.losses import ExactLoss
from expacc.studies import prepare_folder
from expacc.studies.records import Record, begin_record
from expacc.studies.report import Table, print_table, track

METHODS = ("EXACT", "cross-entropy", "hinge")
STEPS = 300
HOLD = 0.8  # share of the steps after which sigma stays: Adam is still moving when sigma arrives
DECAY = 0.1  # of the learning rate, over all steps

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Example:
    """Hold one toy example: its data, how EXACT is trained on it, and what the paper prints.

    Args:
        points, labels: the data, labels -1 and 1.
        has_weight: whether f(x) = w·x + c; else f(x) = x + c.
        normalize: whether the loss normalises the scores. Only f/σ counts, so where w is free σ means nothing without:
            w grows or shrinks instead, and from most starts it ends with one class for all. Where w is 1 it has a
            meaning, that of the points' own unit.
        sigmas: first and last σ.
        rate: Adam's first learning rate.
        paper: by method, threshold and accuracy as printed; where it only says that one is misclassified, that.
    """

    name: str
    points: tuple[float, ...]
    labels: tuple[int, ...]
    has_weight: bool
    normalize: bool
    sigmas: tuple[float, float]
    rate: float
    paper: dict[str, tuple[str, float]]


THREE = Example(
    "three points", (-0.25, 0.0, 0.25), (-1, -1, 1), False, False, (0.5, 0.05), 0.1,
    {"EXACT": ("0.125", 1.0), "cross-entropy": ("0.7", 2 / 3), "hinge": ("[0.75, 1]", 2 / 3)},
)  # fmt: skip
FIVE = Example(
    "five points", (-6.0, -5.0, -4.0, 0.0, 2.0), (-1, 1, 1, -1, 1), True, True, (3.0, 0.1), 0.2,
    {"EXACT": ("-5.35", 0.8), "cross-entropy": ("-7.75", 0.6), "hinge": ("-11", 0.6)},
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Hold where a method ended: every (weight, bias) between two ends is optimal; one optimum has equal ends."""

    method: str
    ends: tuple[tuple[float, float], tuple[float, float]]
    check: dict[str, float]  # what shows that it is an optimum

    @property
    def thresholds(self) -> tuple[float, float] | None:
        """Return the lowest and the highest optimal threshold; None where w = 0: one class for all points."""
        if any(weight == 0 for weight, _ in self.ends):
            return None
        low, high = sorted(-bias / weight for weight, bias in self.ends)
        return low, high

    def wrong(self, example: Example) -> list[float]:
        """Return the misclassified points; the same for both ends."""
        weight, bias = self.ends[0]
        data = zip(example.points, example.labels, strict=True)
        return [x for x, y in data if (weight * x + bias >= 0) != (y > 0)]

    def accuracy(self, example: Example) -> float:
        """Return the share of the points that is classified rightly."""
        return 1 - len(self.wrong(example)) / len(example.points)


def run(out: Path, seed: int, json: bool) -> None:
    """Do the study: write ``toy.json`` and the figures into ``out``, print the tables or the record.

    Raises:
        CommandError: where ``out`` is a file.
        OSError: where ``out`` cannot be written.
    """
    from expacc.studies import toy_figures  # matplotlib: half a second

    prepare_folder(out)
    with watch_paths() as paths:
        outcomes = {example.name: solve(example, seed) for example in (THREE, FIVE)}
    record = make_record(outcomes, seed, " and ".join(sorted(set(paths))))
    for draw in (toy_figures.draw_threshold, toy_figures.draw_sigma, toy_figures.draw_weight):
        draw(out, outcomes)
    record.write(out / "toy.json")  # last: where it is, everything is
    if json:
        print(record.text(), end="")
    else:
        for table in make_tables(outcomes):
            print_table(table)
            print()
    print(f"The record and the figures are in {out}", file=sys.stderr)


def solve(example: Example, seed: int) -> list[Outcome]:
    """Return where EXACT, cross-entropy and hinge put the threshold."""
    weight, bias = train_exact(example, seed)
    points, target = _data(example)
    with torch.no_grad():
        logits = _scores(points, torch.tensor(weight), torch.tensor(bias), example.normalize)
        expected = expected_accuracy(logits, target, example.sigmas[1]).mean().item()
    trained = Outcome("EXACT", ((weight, bias), (weight, bias)), {"expected accuracy at the last sigma": expected})
    return [trained, minimize_cross_entropy(example), minimize_hinge(example)]


def train_exact(example: Example, seed: int) -> tuple[float, float]:
    """Train by gradient descent on the expected error while sigma falls; return weight and bias."""
    points, target = _data(example)
    start = torch.randn(2, generator=torch.Generator().manual_seed(seed))
    bias = start[0].clone().requires_grad_()
    weight = start[1].clone().requires_grad_() if example.has_weight else torch.tensor(1.0)
    loss_fn = ExactLoss(power=1, normalize=example.normalize)
    optimizer = torch.optim.Adam([bias, weight] if example.has_weight else [bias], lr=example.rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY ** (1 / STEPS))
    first, last = example.sigmas
    for step in track(range(STEPS), f"EXACT, {example.name}"):
        loss_fn.sigma = first * (last / first) ** min(1.0, step / (HOLD * STEPS))
        optimizer.zero_grad()
        loss_fn(_scores(points, weight, bias), target).backward()
        optimizer.step()
        schedule.step()
    return weight.item(), bias.item()


def minimize_cross_entropy(example: Example) -> Outcome:
    """Minimise Σ log(1 + exp(-y·f(x))) by Newton's method.

    Strictly convex, with a minimum: no change of the parameters is good for every point.
    """
    features, offset, labels = _design(example)
    free, slope = np.zeros(features.shape[1]), np.zeros(features.shape[1])
    for _ in range(20):  # a handful are enough; the last ones stay where they are
        odds = 1 / (1 + np.exp(labels * (features @ free + offset)))
        slope = -features.T @ (labels * odds)
        free = free - np.linalg.solve(features.T @ (features * (odds * (1 - odds))[:, None]), slope)
    end = _weight_and_bias(free)
    return Outcome("cross-entropy", (end, end), {"gradient norm": float(np.linalg.norm(slope))})


def minimize_hinge(example: Example) -> Outcome:
    """Minimise Σ max(0, 1 - y·f(x)) by looking at every vertex, where as many terms have a kink as f has parameters.

    Convex, piecewise linear, and its level sets are bounded: the optima are the convex hull of the best vertices.
    """
    features, offset, labels = _design(example)
    corners = []
    for kinks in map(list, combinations(range(len(labels)), features.shape[1])):
        # y·f = 1 at a kink, and 1/y = y
        corners.append(np.linalg.solve(features[kinks], labels[kinks] - offset[kinks]))
    losses = [float(np.maximum(0, 1 - labels * (features @ corner + offset)).sum()) for corner in corners]
    best = [_weight_and_bias(c) for c, loss in zip(corners, losses, strict=True) if loss < min(losses) + 1e-12]
    return Outcome("hinge", (min(best), max(best)), {"loss": min(losses)})


def expected_accuracies(example: Example, thresholds: Tensor, sigma: float) -> Tensor:
    """Return the expected accuracy of f(x) = x - b for every b of ``thresholds``, scores normalised as in training."""
    points, target = _data(example)
    logits = _scores(points, torch.tensor(1.0), -thresholds[:, None], example.normalize)
    flat = expected_accuracy(logits.flatten(0, 1), target.repeat(len(thresholds)), sigma)
    return flat.view(len(thresholds), -1).mean(1)


def make_record(outcomes: dict[str, list[Outcome]], seed: int, path: str) -> Record:
    """Return the record: threshold, weight, accuracy and mistakes of every method, with the paper's beside them."""
    record = begin_record(
        "EXACT's threshold makes fewer mistakes than the optima of cross-entropy and of the hinge loss",
        f"expacc study toy --seed {seed}",
    )
    for example in (THREE, FIVE):
        for outcome in outcomes[example.name]:
            paper = example.paper[outcome.method]
            where = {"study": "toy", "task": example.name, "method": outcome.method}
            if outcome.method == "EXACT":
                where |= {"seed": seed, "path": path}
            thresholds = outcome.thresholds
            record.add(**where, metric="threshold", value=_one_or_both(thresholds), paper=paper[0])
            record.add(**where, metric="accuracy", value=outcome.accuracy(example), paper=paper[1])
            record.add(**where, metric="misclassified points", value=outcome.wrong(example))
            record.add(**where, metric="weight", value=outcome.ends[0][0])
            for metric, value in outcome.check.items():
                record.add(**where, metric=metric, value=value)
    return record


def _one_or_both(thresholds: tuple[float, float] | None) -> float | list[float] | None:
    if thresholds is None:
        return None
    return thresholds[0] if thresholds[0] == thresholds[1] else list(thresholds)


def make_tables(outcomes: dict[str, list[Outcome]]) -> list[Table]:
    """Return a table for each example, with the paper's numbers beside ours."""
    return [
        _table(
            THREE, outcomes, "Three points -0.25, 0, 0.25 with labels -1, -1, 1: f(x) = x - b",
            "Every threshold in (0, 0.25] separates the points.",
        ),
        _table(
            FIVE, outcomes, "Five points -6, -5, -4, 0, 2 with labels -1, 1, 1, -1, 1: f(x) = w x + c",
            "No threshold does better than 80%, and only those in (-6, -5] do that. The paper searched the other two "
            "losses on a grid; here are their exact optima. That of hinge is w = 0: it calls everything 1.",
        ),
    ]  # fmt: skip


def describe_threshold(outcome: Outcome, digits: int) -> str:
    """Return the threshold as text: a number, an interval, or that there is none.

    >>> describe_threshold(Outcome("hinge", ((1.0, -1.0), (1.0, -0.75)), {}), 3)
    '[0.75, 1]'
    """
    if outcome.thresholds is None:
        return "none"
    low, high = outcome.thresholds
    return f"{low:.{digits}f}" if low == high else f"[{low:g}, {high:g}]"


def _table(example: Example, outcomes: dict[str, list[Outcome]], title: str, note: str) -> Table:
    rows = []
    for outcome in outcomes[example.name]:
        threshold, accuracy = example.paper[outcome.method]
        wrong = ", ".join(f"{x:g}" for x in outcome.wrong(example)) or "none"
        ours = describe_threshold(outcome, 4)
        rows.append([outcome.method, ours, threshold, f"{outcome.accuracy(example):.1%}", f"{accuracy:.1%}", wrong])
    return Table(title, ("method", "threshold", "paper", "accuracy", "paper", "misclassified"), rows, note)


def _data(example: Example) -> tuple[Tensor, Tensor]:
    return torch.tensor(example.points), (torch.tensor(example.labels) > 0).long()


def _scores(points: Tensor, weight: Tensor, bias: Tensor, normalize: bool = False) -> Tensor:
    f = weight * points + bias
    scores = torch.stack([torch.zeros_like(f), f], -1)
    # The loss normalises a batch itself; many batches at once, for a curve, are normalised here.
    return scores / scores.std((-2, -1), keepdim=True) if normalize else scores


def _design(example: Example) -> tuple[Vector, Vector, Vector]:
    """Return A, o and y of f = A·(free parameters) + o."""
    x, one = np.array(example.points), np.ones(len(example.points))
    features, offset = (np.stack([x, one], 1), 0 * x) if example.has_weight else (one[:, None], x)
    return features, offset, np.array(example.labels, dtype=float)


def _weight_and_bias(free: Vector) -> tuple[float, float]:
    weight, bias = (1.0, *free) if len(free) == 1 else free
    return float(weight) + 0.0, float(bias)  # + 0.0: a weight of -0 is 0
