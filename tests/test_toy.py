"""The toy study: every number it prints, by a second way of getting it."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, linprog, minimize, minimize_scalar
from scipy.stats import norm

from expacc.losses import ExactLoss
from expacc.studies import CommandError, toy
from expacc.studies.records import Record
from expacc.studies.report import render_table
from expacc.studies.toy import FIVE, THREE, Example, Outcome

RESULTS = Path(__file__).parents[1] / "results"
FIGURES = {f"toy-{name}.{ending}" for name in ("threshold", "sigma", "weight") for ending in ("png", "svg")}
EXAMPLES = pytest.mark.parametrize("example", [THREE, FIVE], ids=lambda example: example.name)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    return {example.name: toy.solve(example, seed=0) for example in (THREE, FIVE)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("toy") / "new" / "folder"
    _run("study", "toy", "--out", str(out))
    return out


def _run(*words: str) -> bytes:
    # In a process of its own: this one has imported scipy, and a record names what was imported.
    command = [sys.executable, "-W", "ignore", "-m", "expacc", *words]
    return subprocess.run(command, capture_output=True, check=True).stdout


def _margins(example: Example, weight: float, bias: float) -> np.ndarray:
    return np.array(example.labels) * (weight * np.array(example.points) + bias)


def test_exact_ends_at_the_closed_form_maximum_of_the_three_points(outcomes: dict[str, list[Outcome]]) -> None:
    s = math.sqrt(2) * THREE.sigmas[1]
    root: Any = brentq(lambda t: t**2 + t * math.exp(1 / (32 * s**2)) - 1, 0, 1, xtol=1e-15)
    assert outcomes[THREE.name][0].thresholds == pytest.approx([-4 * s**2 * math.log(root)] * 2, abs=3e-4)
    assert outcomes[THREE.name][0].thresholds == pytest.approx([0.125] * 2, abs=3e-4)


@pytest.mark.parametrize("sigma", [0.5, 0.1, 0.05], ids=str)
def test_the_closed_form_is_the_maximum(sigma: float) -> None:
    s = math.sqrt(2) * sigma
    root: Any = brentq(lambda t: t**2 + t * math.exp(1 / (32 * s**2)) - 1, 0, 1, xtol=1e-15)
    lost: Any = minimize_scalar(
        lambda b: -norm.cdf(_margins(THREE, 1, -b) / s).mean(),
        bounds=(-1, 2),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert -4 * s**2 * math.log(root) == pytest.approx(lost.x, abs=1e-6)


def test_exact_ends_at_the_maximum_of_the_five_points(outcomes: dict[str, list[Outcome]]) -> None:
    def lost(b: float) -> float:  # the scores 0 and f over their common standard deviation, and the closed form of P
        f = np.array(FIVE.points) - b
        scale = np.concatenate([0 * f, f]).std(ddof=1) * math.sqrt(2) * FIVE.sigmas[1]
        return -norm.cdf(np.array(FIVE.labels) * f / scale).mean()

    best: Any = minimize_scalar(lost, bounds=(-6, -5), method="bounded", options={"xatol": 1e-9})
    assert outcomes[FIVE.name][0].thresholds == pytest.approx([best.x] * 2, abs=5e-3)
    assert outcomes[FIVE.name][0].ends[0][0] > 0
    assert outcomes[FIVE.name][0].check["expected accuracy at the last sigma"] == pytest.approx(-best.fun, abs=1e-5)


@pytest.mark.parametrize("seed", [1, 2, 3], ids=str)
@EXAMPLES
def test_exact_gets_there_from_other_starts(example: Example, seed: int) -> None:
    weight, bias = toy.train_exact(example, seed)
    low, high = {"three points": (0, 0.25), "five points": (-6, -5)}[example.name]
    assert weight > 0
    assert low < -bias / weight < high


def test_training_moves_no_global_random_state() -> None:
    before = torch.get_rng_state()
    toy.train_exact(THREE, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_cross_entropy_of_the_three_points_solves_the_papers_cubic(outcomes: dict[str, list[Outcome]]) -> None:
    a = math.exp(0.25)
    u: Any = brentq(lambda u: a * u**3 - (1 + a + a * a) * u - 2 * a, 1, 10, xtol=1e-15)  # 1.284u³ - 3.933u - 2.568
    assert outcomes[THREE.name][1].thresholds == pytest.approx([math.log(u)] * 2, abs=1e-12)
    assert math.log(u) == pytest.approx(0.70009, abs=5e-6)


def test_cross_entropy_of_the_five_points_is_scipys_optimum(outcomes: dict[str, list[Outcome]]) -> None:
    found = minimize(lambda p: np.logaddexp(0, -_margins(FIVE, *p)).sum(), [0, 0], tol=1e-13)
    assert outcomes[FIVE.name][1].ends[0] == pytest.approx(found.x, abs=1e-5)
    assert outcomes[FIVE.name][1].thresholds == pytest.approx([-8.3265] * 2, abs=1e-4)


@EXAMPLES
def test_cross_entropy_ends_with_no_gradient(outcomes: dict[str, list[Outcome]], example: Example) -> None:
    assert outcomes[example.name][1].check["gradient norm"] < 1e-14


@EXAMPLES
def test_hinge_is_the_optimum_of_its_linear_program(outcomes: dict[str, list[Outcome]], example: Example) -> None:
    x, y, n = np.array(example.points), np.array(example.labels), len(example.points)
    # minimise Σ slack over weight, bias, slack: slack ≥ 1 - y(wx + c)
    program = linprog(
        [0, 0] + [1] * n, A_ub=np.c_[-y * x, -y, -np.eye(n)], b_ub=-np.ones(n),
        bounds=[(None, None) if example.has_weight else (1, 1), (None, None)] + [(0, None)] * n,
    )  # fmt: skip
    assert outcomes[example.name][2].check["loss"] == pytest.approx(program.fun, abs=1e-9)


def test_hinge_has_an_interval_for_the_three_points(outcomes: dict[str, list[Outcome]]) -> None:
    assert outcomes[THREE.name][2].thresholds == (0.75, 1.0)
    inside, outside = np.linspace(0.75, 1, 11), np.array([0.74, 1.01])
    loss = np.vectorize(lambda b: np.maximum(0, 1 - _margins(THREE, 1, -b)).sum())
    assert loss(inside) == pytest.approx(1.75, abs=1e-12)
    assert (loss(outside) > 1.755).all()


def test_hinge_has_no_weight_for_the_five_points(outcomes: dict[str, list[Outcome]]) -> None:
    assert outcomes[FIVE.name][2].ends == ((0.0, 1.0), (0.0, 1.0))
    assert outcomes[FIVE.name][2].thresholds is None


@pytest.mark.parametrize(
    ("example", "accuracies", "wrong"),
    [(THREE, [1, 2 / 3, 2 / 3], [[], [0.25], [0.25]]), (FIVE, [0.8, 0.6, 0.6], [[0.0], [-6.0, 0.0], [-6.0, 0.0]])],
    ids=["three points", "five points"],
)
def test_accuracies_are_the_papers(
    outcomes: dict[str, list[Outcome]], example: Example, accuracies: list[float], wrong: list[list[float]]
) -> None:
    assert [outcome.accuracy(example) for outcome in outcomes[example.name]] == pytest.approx(accuracies)
    assert [outcome.wrong(example) for outcome in outcomes[example.name]] == wrong


def test_no_threshold_gets_more_than_four_of_the_five_points() -> None:
    cuts = np.array([-7, -6, -5.5, -5, -4.5, -4, -2, 0, 1, 2, 3])  # one in every gap, and every point
    calls = np.array([[w * (np.array(FIVE.points) - b) >= 0 for b in cuts] for w in (1, -1)])
    right = (calls == (np.array(FIVE.labels) > 0)).sum(-1)
    assert cuts[right[0] == 4].tolist() == [-5.5, -5]
    assert right[0].max() == 4
    assert right[1].max() == 3


@EXAMPLES
def test_the_curves_of_the_figures_are_the_loss_that_is_trained(example: Example) -> None:
    loss = ExactLoss(power=1, normalize=example.normalize, sigma=0.3)
    points, target = torch.tensor(example.points), (torch.tensor(example.labels) > 0).long()
    f = points + 0.4
    value = 1 - loss(torch.stack([0 * f, f], 1), target)
    # the loss adds 1e-5 to the variance, for constant scores
    assert toy.expected_accuracies(example, torch.tensor([-0.4]), 0.3).item() == pytest.approx(value.item(), abs=1e-5)


def test_a_run_writes_the_record_and_the_figures_and_nothing_else(written: Path) -> None:
    assert {path.name for path in written.iterdir()} == {"toy.json", *FIGURES}
    assert (written / "toy-weight.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (written / "toy-weight.svg").read_bytes()


def test_the_record_has_the_papers_numbers_beside_ours(written: Path) -> None:
    record = Record.read(written / "toy.json")
    where = {"task": "five points", "method": "cross-entropy"}
    assert record.value(**where, metric="threshold", paper="-7.75") == pytest.approx(-8.3265, abs=1e-4)
    assert record.value(task="three points", method="hinge", metric="threshold") == [0.75, 1.0]
    assert record.value(task="five points", method="hinge", metric="threshold", paper="-11") is None
    assert record.command == "expacc study toy --seed 0"


def test_a_second_run_writes_the_same_bytes(written: Path, tmp_path: Path) -> None:
    printed = _run("study", "toy", "--json", "--out", str(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in written.iterdir()
    }
    assert printed == (written / "toy.json").read_bytes()


def test_the_committed_record_is_what_a_run_finds(written: Path) -> None:
    fresh, committed = Record.read(written / "toy.json"), Record.read(RESULTS / "toy.json")
    assert committed.claim == fresh.claim
    assert not committed.commit.endswith("-dirty")
    keys = [{k: v for k, v in row.items() if k not in ("value", "path")} for row in committed.rows]
    assert keys == [{k: v for k, v in row.items() if k not in ("value", "path")} for row in fresh.rows]
    assert _numbers(committed) == pytest.approx(_numbers(fresh), abs=2e-3)


def _numbers(record: Record) -> list[float]:
    values = [row["value"] for row in record.rows if row["value"] is not None]
    return [number for value in values for number in (value if isinstance(value, list) else [value])]


def test_the_tables_fit_80_columns(outcomes: dict[str, list[Outcome]]) -> None:
    three, five = (render_table(table, width=80) for table in toy.make_tables(outcomes))
    assert "[0.75, 1]   [0.75, 1]" in three
    assert "-8.3265   -7.75" in five
    assert "none     -11" in five


def test_out_that_is_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CommandError, match=r"--out .*file is a file; name a folder"):
        toy.run(tmp_path / "file", seed=0, json=False)
    assert (tmp_path / "file").read_text() == "mine"


def test_out_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # not chmod: root may write everywhere
    monkeypatch.setattr(toy, "solve", None)
    with pytest.raises(PermissionError, match="no permission to write there") as raised:
        toy.run(tmp_path, seed=0, json=False)
    assert raised.value.filename == str(tmp_path)


def test_an_interrupt_before_the_end_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> list[Path]:
        raise KeyboardInterrupt

    monkeypatch.setattr("expacc.studies.toy_figures.draw_weight", interrupt)
    with pytest.raises(KeyboardInterrupt):
        toy.run(tmp_path, seed=0, json=False)
    assert not (tmp_path / "toy.json").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
