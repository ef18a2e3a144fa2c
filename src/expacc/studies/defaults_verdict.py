"""What the rows of the defaults study say, by the criteria of its plan: broken cells, paired differences, the worst."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from expacc.studies import defaults_plan as plan

Row = Mapping[str, Any]


class OfProblem(NamedTuple):
    """Hold a loss on a problem: its accuracy, the mean paired difference to cross-entropy, the standard error."""

    accuracy: float
    difference: float
    error: float


@dataclass
class OfLoss:
    """Hold what a loss did against cross-entropy.

    Args:
        accuracy: mean over problems, optimizers and seeds, each loss at its best rate.
        difference, error: mean paired difference to cross-entropy there, and its standard error.
        problems: the same by problem.
        cells: of the grid that count.
        broken: those below cross-entropy by more than the plan allows: problem, optimizer, rate.
        lowest, lowest_cell: the lowest difference of all cells that count.
    """

    accuracy: float = 0.0
    difference: float = 0.0
    error: float = 0.0
    problems: dict[str, OfProblem] = field(default_factory=dict)
    cells: int = 0
    broken: list[tuple[str, str, float]] = field(default_factory=list)
    lowest: float = 0.0
    lowest_cell: str = ""

    @property
    def behind(self) -> list[str]:
        """Return the problems on which it is behind by more than the plan's limit."""
        return [name for name, found in self.problems.items() if found.difference < -plan.LIMIT * found.error]


@dataclass
class Verdict:
    """Hold what the study says of every loss."""

    losses: dict[str, OfLoss]

    def failures(self, name: str) -> list[str]:
        """Return the plan's criteria that a loss fails."""
        each = self.losses[name]
        return [
            *([f"collapses in {len(each.broken)} cells"] if each.broken else []),
            *([f"behind by {-100 * each.difference:.2f} points"] if each.difference < 0 else []),
            *([f"behind on {', '.join(each.behind)}"] if each.behind else []),
        ]


def pair(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences and its standard error.

    >>> pair([0.0, 2.0])
    (1.0, 1.0)
    """
    values = np.asarray(differences)
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)


def find_broken(rows: Iterable[Row]) -> list[tuple[str, float]]:
    """Return the candidates and rates whose cell broke with the grid's seed, of one problem and optimizer."""
    grid = {(row["method"], row["rate"]): row["value"] for row in rows if row["seed"] == plan.GRID_SEED}
    rates = [rate for name, rate in grid if name == plan.REFERENCE]
    least = plan.FLOOR * max(grid[plan.REFERENCE, rate] for rate in rates)
    return [
        (name, rate)
        for name in plan.CANDIDATES
        for rate in rates
        if grid[plan.REFERENCE, rate] >= least and is_below(grid[name, rate], grid[plan.REFERENCE, rate])
    ]


def is_below(accuracy: float, reference: float) -> bool:
    """Say whether an accuracy breaks a cell."""
    return accuracy < reference - plan.COLLAPSE


def judge(rows: Sequence[Row]) -> Verdict:
    """Return the verdict on all losses, from rows alone."""
    by_cell: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_cell[row["problem"], row["optimizer"]].append(row)
    pairs: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    there = {row["method"] for row in rows}
    losses = {name: OfLoss(lowest=float("inf")) for name in plan.RECIPES if name in there}
    for (problem, optimizer), cell in by_cell.items():
        best = {(row["method"], row["seed"]): row["value"] for row in cell if row["stage"] == "best"}
        for name in losses:
            pairs[name][problem] += [(best[name, seed], best[plan.REFERENCE, seed]) for seed in plan.SEEDS]
        for name, rate, difference in compare_cells(cell):
            each = losses[name]
            each.cells += 1
            if difference < -plan.COLLAPSE:
                each.broken.append((problem, optimizer, rate))
            if difference < each.lowest:
                each.lowest, each.lowest_cell = difference, f"{problem} {optimizer} {rate:g}"
    for name, each in losses.items():
        for problem, found in pairs[name].items():
            each.problems[problem] = OfProblem(
                float(np.mean([ours for ours, _ in found])), *pair([ours - reference for ours, reference in found])
            )
        everywhere = [both for found in pairs[name].values() for both in found]
        each.accuracy = float(np.mean([ours for ours, _ in everywhere]))
        each.difference, each.error = pair([ours - reference for ours, reference in everywhere])
    return Verdict(losses)


def compare_cells(cell: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Return loss, rate and difference to cross-entropy of every cell that counts, of one problem and optimizer.

    A difference of one seed; where there are five pairs at that rate and one seed broke it, their mean.
    """
    held: dict[tuple[str, float], dict[int, float]] = defaultdict(dict)
    for row in cell:
        held[row["method"], row["rate"]][row["seed"]] = row["value"]
    reference = {rate: values for (name, rate), values in held.items() if name == plan.REFERENCE}
    least = plan.FLOOR * max(values[plan.GRID_SEED] for values in reference.values())
    found = []
    for (name, rate), values in held.items():
        theirs = reference[rate]
        if theirs[plan.GRID_SEED] < least:
            continue
        difference = values[plan.GRID_SEED] - theirs[plan.GRID_SEED]
        seeds = [seed for seed in plan.SEEDS if seed in values and seed in theirs]
        if is_below(values[plan.GRID_SEED], theirs[plan.GRID_SEED]) and len(seeds) == len(plan.SEEDS):
            difference = float(np.mean([values[seed] - theirs[seed] for seed in seeds]))
        found.append((name, rate, difference))
    return found
