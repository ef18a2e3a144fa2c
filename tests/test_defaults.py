"""The study of the default: its plan, its stages, what a killed run keeps, and what its rows are made to say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from expacc import ExactLoss
from expacc.baselines import HingeLoss
from expacc.cli import COMMANDS
from expacc.studies import CommandError, defaults
from expacc.studies import defaults_plan as plan
from expacc.studies.defaults_verdict import compare_cells, find_broken, judge, pair
from expacc.studies.fleet import Part, Recipe, Task
from expacc.studies.records import Record

RESULTS = Path(__file__).parents[1] / "results"
FEW = {
    plan.REFERENCE: Recipe(nn.CrossEntropyLoss),
    "hinge": Recipe(HingeLoss),
    plan.DEFAULT: Recipe(ExactLoss),
    # It learns nothing, so its cells break and are repeated.
    "Gaussian broken": Recipe(lambda: ExactLoss(power=1, sigma=1e-6)),
}
RATES = (0.01, 0.1, 1.0)


def _tiny(folder: Path | None) -> Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(120, 4, generator=generator)
    target = inputs[:, :3].argmax(1)
    parts = [
        Part(np.arange(60), np.arange(60, 80), np.arange(80, 120)),
        Part(np.arange(60, 120), *np.arange(40).reshape(2, 20)),
    ]
    return Task(inputs, target, parts, lambda: nn.Linear(4, 3), epochs=5, batch=20)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PROBLEMS", {"one": _tiny, "two": _tiny})
    monkeypatch.setattr(plan, "RECIPES", FEW)
    monkeypatch.setattr(plan, "CANDIDATES", (plan.DEFAULT, "Gaussian broken"))
    monkeypatch.setattr(plan, "RATES", {"SGD": RATES})


def _run(out: Path) -> Record:
    defaults.run(out, ["one", "two"], ["SGD"], None, "cpu", json=False)
    return Record.read(out / "defaults.json")


def test_every_run_of_the_plan_is_in_the_record(small: None, tmp_path: Path, capsys: Any) -> None:
    record = _run(tmp_path)
    runs = [(r["problem"], r["method"], r["rate"], r["seed"]) for r in record.rows]
    assert len(set(runs)) == len(runs)
    grid = {(p, m, rate, 0) for p in ("one", "two") for m in FEW for rate in RATES}
    assert grid <= set(runs)
    for problem in ("one", "two"):
        for method in FEW:
            best = {(r["rate"], r["seed"]) for r in record.rows
                    if (r["problem"], r["method"], r["stage"]) == (problem, method, "best")}  # fmt: skip
            assert len(best) == 5
            assert {seed for _, seed in best} == set(plan.SEEDS)
    repeated = {(r["method"], r["rate"]) for r in record.rows if r["stage"] == "repeat"}
    assert {"Gaussian broken", plan.REFERENCE} <= {method for method, _ in repeated}
    assert "behind on" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"defaults", "defaults.json", "defaults.png", "defaults.svg"}


def test_a_killed_run_goes_on_and_computes_nothing_twice(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _run(tmp_path / "whole")
    trained: list[int] = []
    honest = defaults.train

    def dies(*args: Any) -> Any:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(1)
        return honest(*args)

    monkeypatch.setattr(defaults, "train", dies)
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path / "cut")
    (tmp_path / "cut" / "defaults" / "one-SGD-best.json").write_text('{"claim": "cut sh')  # half a file
    monkeypatch.setattr(defaults, "train", lambda *args: trained.append(1) or honest(*args))
    assert _run(tmp_path / "cut").rows == whole.rows
    assert len(trained) == 3 + 4  # the damaged stage, and the three of the second problem
    assert _run(tmp_path / "cut").rows == whole.rows
    assert len(trained) == 7


def test_what_another_commit_computed_is_computed_again(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path)
    trained: list[int] = []
    honest = defaults.train
    monkeypatch.setattr(defaults, "train", lambda *args: trained.append(1) or honest(*args))
    monkeypatch.setattr("expacc.studies.records.find_commit", lambda: "f" * 40)
    _run(tmp_path)
    assert len(trained) == 6


def _rows(accuracies: dict[tuple[str, float], dict[int, float]]) -> list[dict[str, Any]]:
    return [
        {"method": method, "rate": rate, "seed": seed, "value": value, "validation": value, "problem": "p",
         "optimizer": "SGD", "stage": "grid" if seed == 0 else "best"}
        for (method, rate), found in accuracies.items() for seed, value in found.items()
    ]  # fmt: skip


FIVE = dict.fromkeys(plan.SEEDS, 0.9)


@pytest.mark.parametrize(
    ("reference", "ours", "broken"),
    [(0.9, 0.881, []), (0.9, 0.879, [("Gaussian 0.3", 0.1)]), (0.44, 0.1, []), (0.46, 0.43, [("Gaussian 0.3", 0.1)])],
    ids=["within", "below", "where cross-entropy fails", "where it is at half of its best"],
)
def test_a_cell_breaks_two_points_below_where_cross_entropy_trains(
    reference: float, ours: float, broken: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CANDIDATES", ("Gaussian 0.3",))
    rows = _rows({
        (plan.REFERENCE, 0.01): {0: 0.9}, ("Gaussian 0.3", 0.01): {0: 0.9},
        (plan.REFERENCE, 0.1): {0: reference}, ("Gaussian 0.3", 0.1): {0: ours},
    })  # fmt: skip
    assert find_broken(rows) == broken


@pytest.mark.parametrize(("five", "difference"), [(0.9, 0.0), (0.85, -0.05)], ids=["mended", "broken"])
def test_the_mean_of_five_seeds_decides_what_one_broke(five: float, difference: float) -> None:
    rows = _rows({(plan.REFERENCE, 0.1): {0: 0.9} | FIVE, ("hinge", 0.1): {0: 0.7} | dict.fromkeys(plan.SEEDS, five)})
    assert {name: d for name, _, d in compare_cells(rows)}["hinge"] == pytest.approx(difference)


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [((0.5, 0.6, 0.7, 0.6, 0.5), 0.1), ((0.7, 0.7, 0.7, 0.7, 0.7), 0.1), ((0.5, 0.7, 0.6, 0.7, 0.5), 0.03),
     ((0.7, 0.6, 0.6, 0.6, 0.7), 0.01)],
    ids=["highest", "all alike", "two beside the middle", "both ends"],
)  # fmt: skip
def test_the_best_rate_is_the_highest_then_the_middle_then_the_smaller(accuracies: Any, best: float) -> None:
    rows: Any = _rows({("hinge", rate): {0: a} for rate, a in zip(plan.RATES["SGD"], accuracies, strict=True)})
    assert defaults.find_best_rate(rows, "hinge", "SGD") == best


def test_failures_name_the_criteria() -> None:
    accuracies = {(plan.REFERENCE, 0.1): {0: 0.9} | FIVE}
    for name, one, five in (("hinge", 0.8, 0.8), (plan.DEFAULT, 0.9, 0.92)):
        accuracies[name, 0.1] = {0: one} | {seed: five + seed / 1e4 for seed in plan.SEEDS}
    verdict = judge(_rows(accuracies))
    assert verdict.failures(plan.DEFAULT) == []
    assert verdict.failures("hinge") == ["collapses in 1 cells", "behind by 9.97 points", "behind on p"]
    assert verdict.losses[plan.DEFAULT].difference == pytest.approx(0.0203)
    assert verdict.losses[plan.DEFAULT].problems["p"].error == pytest.approx(
        np.std([1, 2, 3, 4, 5], ddof=1) / 5**0.5 / 1e4
    )


def test_a_pair_of_differences_has_a_mean_and_an_error() -> None:
    assert pair([0.01, 0.03]) == pytest.approx((0.02, 0.01))


def test_the_committed_record_is_a_whole_plan() -> None:
    rows = Record.read(RESULTS / "defaults.json").rows
    methods = {row["method"] for row in rows}
    assert methods <= set(plan.RECIPES)
    for problem in plan.PROBLEMS:
        for optimizer, rates in plan.RATES.items():
            here = [row for row in rows if (row["problem"], row["optimizer"]) == (problem, optimizer)]
            assert {(r["method"], r["rate"]) for r in here if r["stage"] == "grid"} == {
                (m, x) for m in methods for x in rates
            }
            assert {(r["method"], r["seed"]) for r in here if r["stage"] == "best"} == {
                (m, s) for m in methods for s in plan.SEEDS
            }


@pytest.mark.parametrize(("flag", "names"), [("--problems", plan.PROBLEMS), ("--optimizers", plan.RATES)])
def test_the_command_line_offers_what_the_plan_has(flag: str, names: Any) -> None:
    assert COMMANDS["study defaults"].options[flag]["choices"] == tuple(names)


@pytest.mark.parametrize("folder", [None, Path("nowhere")], ids=["no folder", "not in it"])
def test_images_that_are_not_there_are_asked_for_before_the_work(folder: Path | None, tmp_path: Path) -> None:
    with pytest.raises(
        CommandError, match=r"mnist is read from its official files and .*: write --data DIR, with them"
    ):
        defaults.run(tmp_path, ["mnist"], ["SGD"], folder, "cpu", json=False)


@pytest.mark.parametrize("device", ["abacus", "meta:x"])
def test_a_device_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=rf"--device {device} cannot be used here .*; write cpu or cuda"):
        defaults.run(tmp_path, ["digits-mlp"], ["SGD"], None, device, json=False)


def test_json_is_the_record(small: None, tmp_path: Path, capsys: Any) -> None:
    defaults.run(tmp_path, ["one"], ["SGD"], None, "cpu", json=True)
    assert json.loads(capsys.readouterr().out)["command"] == "expacc study defaults --problems one"


@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn", "cylinder-bands", "mice-protein", "dry-bean", "adult"])
def test_a_problem_keeps_its_parts_apart(name: str) -> None:
    task = plan.PROBLEMS[name](None)
    for part in task.parts:
        rows = np.concatenate([part.train, part.validation, part.test])
        assert len(np.unique(rows)) == len(rows)
        assert task.inputs[torch.from_numpy(part.train)].isfinite().all()
    tested = np.concatenate([part.test for part in task.parts])
    assert len(np.unique(tested)) == len(tested)
    if len(task.parts) > 1:  # every row once
        assert len(tested) * len(task.parts) == len(task.target)
    assert task.network()(task.inputs[:2]).shape == (2, int(task.target.max()) + 1)


@pytest.mark.parametrize("width", [28, 32, 8])
def test_a_cnn_takes_images_of_its_side(width: int) -> None:
    assert plan.make_cnn(width, (3, 4, 5), 7)(torch.zeros(2, 3, width, width)).shape == (2, 7)
