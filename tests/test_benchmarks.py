"""The benchmarks run, their records are well-formed, the pages are in step with them, and the maxima only fall."""

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

from benchmarks import RESULTS, accuracy, cases, loss, render, rivals, special, tables
from benchmarks.__main__ import main
from expacc.studies import CommandError
from expacc.studies.records import Record

RECORDS = [name for name in ("loss", "accuracy", "special") if (RESULTS / f"{name}.json").exists()]
SPECIAL = [row for row in Record.read(RESULTS / "special.json").rows if row["method"] == "expacc"]


def _id(row: dict) -> str:
    return f"{row['function']}-{row['dtype']}"


# ---- committed records ----


@pytest.mark.parametrize("name", RECORDS)
def test_a_committed_record_is_of_a_full_run(name):
    record = Record.read(RESULTS / f"{name}.json")
    assert record.command == f"python -m benchmarks {name}"
    assert record.hardware["processor"]
    assert record.versions["torch"]


@pytest.mark.parametrize("name", RECORDS)
def test_no_cell_is_recorded_twice(name):
    keys = (
        "method",
        "metric",
        "quantity",
        "function",
        "dtype",
        "backend",
        "batch",
        "classes",
        "scale",
        "build",
        "nodes",
    )
    seen = [tuple(row.get(key) for key in keys) for row in Record.read(RESULTS / f"{name}.json").rows]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("name", RECORDS)
def test_an_empty_cell_says_why(name):
    empty = [row for row in Record.read(RESULTS / f"{name}.json").rows if row["value"] is None]
    assert all(row["reason"] for row in empty)


@pytest.mark.parametrize("path", list(render.pages()), ids=lambda path: path.name)
def test_pages_are_in_step_with_the_records(path):
    text = path.read_text(encoding="utf-8")
    assert render.render(text) == text, "run: python -m benchmarks render"


# ---- log Φ, λ and x + λ: the record may only go down ----


@pytest.mark.parametrize("row", SPECIAL, ids=_id)
def test_the_recorded_worst_input_is_no_worse(row):
    x = torch.tensor([float(row["at"])], dtype=special.DTYPES[row["dtype"]])
    again = special.measure("expacc", row["function"], x, *special.true_values(x)[row["function"]])
    assert again["value"] <= math.ceil(row["value"])  # another vector library may round the other way


@pytest.mark.parametrize("row", SPECIAL, ids=_id)
def test_a_thinned_sweep_stays_below_the_recorded_maximum(row):
    x = special.sweep(row["dtype"], 4000, seed=7)
    x = x[:: -(-len(x) // 2000)]
    again = special.measure("expacc", row["function"], x, *special.true_values(x)[row["function"]])
    assert again["value"] <= math.ceil(row["value"])
    assert again["broken"] <= row["broken"]


@pytest.mark.parametrize(
    ("got", "true", "ulps"),
    [
        (1.0, 1.0 + 2.0**-52, 1.0),
        (2.0, 2.0 - 2.0**-52, 2.0),
        (-3e300, -3e300 * (1 + 2.0**-51), 2.0),
        (5e-324, 1.5e-323, 2.0),
        (0.0, 0.0, 0.0),
        (math.inf, 1e308, math.nan),
        (math.nan, 1.0, math.nan),
    ],
    ids=["above-1", "below-2", "large", "subnormal", "zero", "wrong-inf", "nan"],
)
def test_ulp_errors_of_doubles(got, true, ulps):
    high = torch.tensor([true], dtype=torch.float64)
    error = special.ulp_errors(torch.tensor([got], dtype=torch.float64), high, torch.zeros_like(high)).item()
    assert error == pytest.approx(ulps, rel=0.5, nan_ok=True)


def test_an_overflow_of_the_dtype_is_no_error():
    high = torch.tensor([-1e30], dtype=torch.float64)
    assert special.ulp_errors(torch.tensor([-math.inf], dtype=torch.float16), high, high * 0).item() == 0.0


@pytest.mark.parametrize("x", [-1e10, -300.0, -20.5, -3.0, 0.0, 2.0, 30.0])
def test_truth_agrees_with_mpmath(x):
    with mpmath.workdps(60):
        t = mpmath.mpf(x)
        # Mills' ratio, as mpmath's own Φ underflows to 0 on the far left
        mills = mpmath.hyperu(0.5, 0.5, t * t / 2) / mpmath.sqrt(2) if x < 0 else mpmath.ncdf(t) / mpmath.npdf(t)
        log_cdf, rate = mpmath.log(mills) - t * t / 2 - mpmath.log(2 * mpmath.pi) / 2, 1 / mills
        for ball, known in zip(special.truth(x), (log_cdf, rate, t + rate), strict=True):
            assert float(ball) == pytest.approx(float(known), rel=1e-15)


def test_a_record_that_got_worse_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "special.json"
    record = Record.read(RESULTS / "special.json")
    for row in record.rows:
        row["value"] = 0.0 if row["method"] == "expacc" else row["value"]
    record.write(out)
    before = out.read_bytes()
    rows = [row | {"value": 1.0, "at": 0.0} for row in record.rows]
    monkeypatch.setattr(special, "measure_all", lambda *_, **__: rows)
    assert main(["special", "--quick", "--out", str(out)]) == 2
    assert out.read_bytes() == before
    assert main(["special", "--quick", "--out", str(out), "--accept"]) == 0
    assert out.read_bytes() != before


# ---- the rivals: no straw men ----


@pytest.mark.parametrize("scaled", [False, True], ids=["fixed", "scaled"])
def test_gauss_hermite_is_exact_where_it_should_be(scaled):
    (row,) = (row for row in cases.load_truth(2) if row.name == "random0.3-C2")
    errors = row.errors(*rivals.gauss_hermite(row, 64, scaled=scaled))
    assert set(errors) == set(cases.QUANTITIES)
    assert max(errors.values()) < 1e-12


def test_genz_with_two_classes_samples_nothing():
    rows = cases.load_truth(2, 3)
    errors = [row.errors(*found) for row, found in zip(rows, rivals.genz(rows, 1, gradient=True), strict=True)]
    assert max(error["P"] for error in errors if "P" in error) < 1e-13


def test_an_error_counts_the_true_class_and_the_competitors():
    row = cases.load_truth(10, 1)[0]
    slope = np.zeros(len(row.m))
    assert row.errors(row.value["P"], row.value["1 − P"], slope)["gradient"] == 1.0


# ---- the commands ----


def test_quick_accuracy_runs_and_draws(tmp_path):
    out = tmp_path / "accuracy.json"
    assert main(["accuracy", "--quick", "--out", str(out), "--figures", str(tmp_path)]) == 0
    record = Record.read(out)
    assert {row["method"] for row in record.rows} >= {"expacc", "Genz", "certified", "default"}
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
    assert (tmp_path / "accuracy.svg").exists()
    worst = [row["value"] for row in record.rows if row["method"] == "expacc" and row["nodes"] == 48]
    assert max(worst) < 1e-4


def test_an_interrupted_accuracy_run_goes_on(tmp_path, monkeypatch):
    row = {"method": "certified", "classes": 2, "metric": "largest relative radius", "value": 1e-24, "cases": 1}
    started = []

    def job(name: str, fails: bool) -> Iterator[dict]:
        started.append(name)
        if fails:
            raise KeyboardInterrupt
        yield row | {"name": name}

    def jobs(fails: bool) -> list:
        return [("first", partial(job, "first", False)), ("second", partial(job, "second", fails))]

    command = ["accuracy", "--quick", "--out", str(tmp_path / "accuracy.json"), "--figures", str(tmp_path)]
    monkeypatch.setattr(accuracy, "plan", lambda _: jobs(True))
    assert main(command) == 130
    assert not (tmp_path / "accuracy.json").exists()
    monkeypatch.setattr(accuracy, "plan", lambda _: jobs(False))
    assert main(command) == 0
    assert started == ["first", "second", "second"]
    assert [each["name"] for each in Record.read(tmp_path / "accuracy.json").rows] == ["first", "second"]
    assert not list(tmp_path.glob(".*"))


def test_quick_loss_runs(tmp_path):
    out = tmp_path / "loss.json"
    assert main(["loss", "--quick", "--out", str(out)]) == 0
    record = Record.read(out)
    assert {row["method"] for row in record.rows} == set(loss.METHODS)
    seconds = [row for row in record.rows if row["metric"] == "seconds"]
    assert {row["path"] for row in seconds if row["method"] == loss.BASE} == {"torch"}
    assert {row["path"] for row in seconds if "reference" in row["method"]} == {"reference"}
    assert all(row["value"] > 0 for row in seconds)


def test_quick_special_runs(tmp_path):
    out = tmp_path / "special.json"
    assert main(["special", "--quick", "--out", str(out)]) == 0
    assert len(Record.read(out).rows) == len(special.DTYPES) * len(special.CANDIDATES)


def test_every_method_takes_part_and_cross_entropy_in_every_round():
    ready = {
        name: (loss.METHODS[name].make(), *loss.make_batch("float32", 4, 5, 1.0), 1e-4, []) for name in loss.METHODS
    }
    times = loss._take_turns(ready, 0.01)
    assert all(times.values())
    assert len(times[loss.BASE]) == max(map(len, times.values()))


def test_a_slow_shape_is_skipped_and_says_so():
    cell = loss.Cell("float32", 4, 1000, loss.SCALE, (loss.BASE, "Genz, 16 samples"))
    row, base = loss.measure(cell, 0.01, {("Genz, 16 samples", "float32"): 1.0})
    assert base["value"] > 0
    assert row["value"] is None
    assert "predicted" in row["reason"]


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.__main__.NEEDS", {"special": ("no_such_module",)})
    assert main(["special"]) == 2
    assert "no_such_module" in capsys.readouterr().err


def test_ctrl_c_leaves_no_record(tmp_path, monkeypatch, capsys):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(special, "measure_all", interrupt)
    assert main(["special", "--out", str(tmp_path / "special.json")]) == 130
    assert list(tmp_path.iterdir()) == []
    assert "no record" in capsys.readouterr().err


# ---- pages ----


def _write(folder: Path, rows: list[dict]) -> None:
    fields = {"claim": "c", "command": "k", "commit": "0" * 40, "versions": {"torch": "2"}, "hardware": {}}
    (folder / "special.json").write_text(json.dumps(fields | {"rows": rows}))


def test_render_fills_a_block_and_leaves_the_rest(tmp_path):
    row = {"method": "expacc", "function": "hazard", "dtype": "float32", "metric": "ulp", "value": 0.5, "at": -1.0}
    _write(tmp_path, [row | {"points": 1000, "broken": 2, "broken_at": -1e300}])
    text = "above\n<!-- begin: special -->\nold\n<!-- end: special -->\nbelow\n"
    made = render.render(text, tmp_path)
    assert made.startswith("above\n<!-- begin: special -->\n\n| function")
    assert made.endswith("-->\nbelow\n")
    assert "old" not in made
    assert "| λ(x) | float32 | 1,000 | 0.50 | -1 | 2, from x = -1e+300 |" in made
    assert render.render(made, tmp_path) == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- begin: nothing -->\n<!-- end: nothing -->\n", "no block is called nothing"),
        ("<!-- begin: special -->\n<!-- end: loss -->\n", "unpaired <!-- begin: special -->"),
        ("<!-- begin: special -->\n<!-- end: special -->\n", "python -m benchmarks special"),
    ],
    ids=["unknown", "unpaired", "no-record"],
)
def test_render_refuses(tmp_path, text, says):
    with pytest.raises(CommandError, match=says):
        render.render(text, tmp_path)


def test_the_toy_table_shows_numbers_intervals_and_none():
    rows = [
        {"task": "t", "method": method, "metric": "threshold", "value": value, "paper": "0.7"}
        for method, value in (("EXACT", 0.125), ("hinge", [0.75, 1.0]), ("flat", None))
    ]
    for method in ("EXACT", "hinge", "flat"):
        rows.append({"task": "t", "method": method, "metric": "accuracy", "value": 0.8, "paper": 0.6})
        rows.append({"task": "t", "method": method, "metric": "misclassified points", "value": [-6.0]})
    table = tables.toy_table(Record("c", "k", "0", {}, {}, rows))
    assert [row[2] for row in table.rows] == ["0.125", "[0.75, 1]", "none (w = 0)"]
    assert table.rows[0][3:] == ["0.7", "80 %", "60 %", "-6"]


def test_markdown_keeps_a_bar_inside_its_cell():
    assert "a\\|b" in tables.markdown(tables.Table("", ["x"], [["a|b"]]))
