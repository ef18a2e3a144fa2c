"""The study behind ExactLoss's default: twenty-six losses, eight problems, three optimizers, five learning rates.

The plan, and what decides, is in :mod:`expacc.studies.defaults_plan`. A stage of a problem and an optimizer is trained
as one fleet and kept under ``out/defaults`` when it is done; a killed study goes on from there. ``defaults.json``
joins them.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expacc.studies import CommandError, prepare_folder
from expacc.studies import defaults_plan as plan
from expacc.studies.defaults_verdict import Verdict, find_broken, judge
from expacc.studies.fleet import Ship, Task, train
from expacc.studies.records import Record, RecordError, begin_record
from expacc.studies.report import Progress, Table, print_table

CLAIM = (
    "ExactLoss's default never collapses where cross-entropy trains, and at each loss's best learning rate it is not "
    "behind"
)
Rows = list[dict[str, Any]]


def run(
    out: Path,
    problems: Sequence[str],
    optimizers: Sequence[str],
    data: Path | None,
    device: str,
    json: bool,
) -> None:
    """Do the study: write ``defaults.json`` and the heat map into ``out``, print the tables or the record.

    Args:
        out: folder.
        problems, optimizers: which; the plan's all.
        data: folder of the image sets' folders.
        device: "auto", or a torch device.
        json: print the record.

    Raises:
        CommandError: where ``out`` is a file, or an image set is missing.
        OSError: where ``out`` cannot be written.
    """
    from expacc.studies import defaults_figures  # matplotlib: half a second

    where = _find_device(device)
    prepare_folder(out)
    prepare_folder(out / "defaults")
    tasks = {name: plan.PROBLEMS[name](data) for name in problems}  # before the work: what is missing is said now
    joined = _begin(problems, optimizers)
    with Progress("training", total=2 * len(optimizers) * sum(task.steps for task in tasks.values())) as progress:
        for problem, task in tasks.items():
            for optimizer in optimizers:
                joined.rows += run_cell(out / "defaults", joined, problem, optimizer, task, where, progress)
    verdict = judge(joined.rows)
    defaults_figures.draw(out, joined.rows, verdict)
    joined.write(out / "defaults.json")  # last: where it is, everything is
    if json:
        print(joined.text(), end="")
    else:
        for table in make_tables(verdict):
            print_table(table)
    print(f"The record and the figure are in {out}", file=sys.stderr)


def run_cell(
    folder: Path, origin: Record, problem: str, optimizer: str, task: Task, device: torch.device, progress: Progress
) -> Rows:  # fmt: skip
    """Return the rows of all stages of one problem with one optimizer, read where they were finished before.

    Args:
        folder: of the finished stages.
        origin: a record whose commit, torch and hardware a finished stage must share.
        problem, optimizer: of the plan.
        task: the problem, loaded.
        device: where to train.
        progress: told of every step.
    """
    rows: Rows = []
    for stage, plan_stage in STAGES.items():
        planned = plan_stage(rows, optimizer)
        path = folder / f"{problem}-{optimizer}-{stage}.json"
        done = _read_finished(path, origin, planned)
        if stage == "repeat" and planned:
            progress.extend(task.steps)
        if done is None:
            done = _train_stage(task, planned, optimizer, device, progress)
            for row in done:
                row |= {"problem": problem, "optimizer": optimizer, "stage": stage, "device": device.type}
            replace(origin, rows=done).write(path)
        elif planned:
            progress.advance(task.steps)
        rows += done
    return rows


Planned = list[tuple[str, float, int]]  # recipe, learning rate, seed


def plan_grid(rows: Rows, optimizer: str) -> Planned:
    """Return every loss at every rate with one seed."""
    return [(recipe, rate, plan.GRID_SEED) for recipe in plan.RECIPES for rate in plan.RATES[optimizer]]


def plan_best(rows: Rows, optimizer: str) -> Planned:
    """Return every loss at its own best rate, by the grid's validation accuracy, with five seeds."""
    return [(recipe, find_best_rate(rows, recipe, optimizer), s) for recipe in plan.RECIPES for s in plan.SEEDS]


def plan_repeat(rows: Rows, optimizer: str) -> Planned:
    """Return the candidates whose cells broke with one seed, and cross-entropy there, with five seeds.

    What was trained at its best rate is not trained again.
    """
    there = {(row["method"], row["rate"], row["seed"]) for row in rows}
    wanted = []
    for recipe, rate in find_broken(rows):
        wanted += [(name, rate, seed) for name in (recipe, plan.REFERENCE) for seed in plan.SEEDS]
    return sorted(set(wanted) - there)


def find_best_rate(rows: Rows, recipe: str, optimizer: str) -> float:
    """Return the rate of a loss's best validation accuracy in the grid; of equals, the one nearest the middle."""
    rates = plan.RATES[optimizer]
    found = {
        row["rate"]: row["validation"] for row in rows if row["method"] == recipe and row["seed"] == plan.GRID_SEED
    }
    return min(rates, key=lambda rate: (-found[rate], abs(rates.index(rate) - len(rates) // 2), rate))


STAGES = {"grid": plan_grid, "best": plan_best, "repeat": plan_repeat}


def _train_stage(task: Task, planned: Planned, optimizer: str, device: torch.device, progress: Progress) -> Rows:
    """Train what is planned as one fleet; of the folds of a cross-validation, the accuracies are joined."""
    if not planned:
        return []
    parts = range(len(task.parts))
    ships = [Ship(recipe, rate, seed, part) for recipe, rate, seed in planned for part in parts]
    result = train(task, ships, plan.RECIPES, optimizer, device, progress.advance)
    sizes = {name: [len(getattr(part, name)) for part in task.parts] for name in ("validation", "test")}
    rows: Rows = []
    for recipe, rate, seed in planned:
        test, validation = (
            float(np.average([getattr(result, name)[Ship(recipe, rate, seed, k)] for k in parts], weights=sizes[name]))
            for name in ("test", "validation")
        )
        rows.append(
            {"method": recipe, "metric": "test accuracy", "value": round(test, 6), "validation": round(validation, 6),
             "rate": rate, "seed": seed}
        )  # fmt: skip
    return rows


def _find_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.zeros((), device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise CommandError(f"--device {device} cannot be used here ({reason}); write cpu or cuda") from None
    return found


def _begin(problems: Sequence[str], optimizers: Sequence[str]) -> Record:
    command = ["expacc", "study", "defaults"]
    if set(problems) != set(plan.PROBLEMS):
        command += ["--problems", *problems]
    if set(optimizers) != set(plan.RATES):
        command += ["--optimizers", *optimizers]
    if {"mnist", "cifar-100"} & set(problems):
        command += ["--data", "DIR"]
    return begin_record(CLAIM, command)


def _read_finished(path: Path, origin: Record, planned: Planned) -> Rows | None:
    """Return a finished stage's rows, or None: not there, cut short, or of other code or another machine."""
    try:
        held = Record.read(path)
    except (FileNotFoundError, RecordError):
        return None
    if _identify(held) != _identify(origin):
        return None
    return held.rows if {(r["method"], r["rate"], r["seed"]) for r in held.rows} == set(planned) else None


def _identify(record: Record) -> tuple[object, ...]:
    """Return what two records must share for their numbers to be the same."""
    return (record.commit, record.versions["torch"], record.hardware["processor"], record.hardware["accelerator"])


def make_tables(verdict: Verdict) -> list[Table]:
    """Return the table of all losses by the plan's criteria, and that of all losses by problem."""
    losses = [
        [
            name,
            f"{each.accuracy:.2%}",
            _points(each.difference, each.error),
            f"{len(each.broken)} of {each.cells}",
            f"{100 * each.lowest:+.1f}",
            ", ".join(each.behind) or "none",
        ]
        for name, each in verdict.losses.items()
    ]
    problems = list(verdict.losses[plan.REFERENCE].problems)
    by_problem = [
        [name, *(_clear_points(*each.problems[problem][1:]) for problem in problems)]
        for name, each in verdict.losses.items()
        if name != plan.REFERENCE
    ]
    reference = [f"{each.accuracy:.2%}" for each in verdict.losses[plan.REFERENCE].problems.values()]
    return [
        Table(
            "Losses against cross-entropy, in points of test accuracy",
            ("loss", "mean", "difference", "collapses", "lowest cell", "behind on"),
            losses,
            "Mean and difference: each loss at its own best learning rate, five seeds, ± paired standard error. "
            f"Collapses: cells of problem, optimizer and rate over {100 * plan.COLLAPSE:g} points below cross-entropy. "
            f"Behind: by more than {plan.LIMIT:g} standard errors.",
        ),
        Table(
            "By problem: points above cross-entropy, at the best rates",
            ("loss", *problems),
            [["cross-entropy itself", *reference], *by_problem],
            f"* by more than {plan.LIMIT:g} paired standard errors.",
        ),
    ]


def _points(difference: float, error: float) -> str:
    return f"{100 * difference:+.2f} ± {100 * error:.2f}"


def _clear_points(difference: float, error: float) -> str:
    """Return points of accuracy, with a star where they are many standard errors from 0."""
    return f"{100 * difference:+.2f}{' *' if abs(difference) > plan.LIMIT * error else ''}"
