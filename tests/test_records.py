"""Records: what they hold, what they refuse, and that a file is whole at every moment."""

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from expacc.studies import CommandError, records, require_extra
from expacc.studies.records import Record, RecordError, begin_record, write_atomically


@pytest.fixture
def record() -> Record:
    made = Record("a claim", "expacc study toy", "abc", {"python": "3.11"}, {"cores": 2})
    made.add(method="EXACT", metric="accuracy", value=0.8, seed=0)
    made.add(method="hinge", metric="accuracy", value=0.6, seed=0)
    return made


def test_a_record_comes_back_as_it_was_written(record: Record, tmp_path: Path) -> None:
    record.write(tmp_path / "toy.json")
    assert Record.read(tmp_path / "toy.json") == record


def test_a_record_is_json_with_a_line_per_row(record: Record) -> None:
    text = record.text()
    assert list(json.loads(text)) == ["claim", "command", "commit", "versions", "hardware", "rows"]
    assert '    {"method": "EXACT", "metric": "accuracy", "value": 0.8, "seed": 0},\n' in text


def test_an_empty_record_is_json() -> None:
    assert json.loads(Record("a claim", "", "", {}, {}).text())["rows"] == []


def test_value_finds_the_one_row(record: Record) -> None:
    assert record.value(method="hinge") == 0.6


@pytest.mark.parametrize("keys", [{"seed": 0}, {"method": "cross-entropy"}, {"no_such_key": None}], ids=str)
def test_value_refuses_none_and_several(record: Record, keys: dict[str, object]) -> None:
    with pytest.raises(KeyError, match=r"[02] rows have .* name keys that only one row has"):
        record.value(**keys)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({"method": "EXACT", "metric": "accuracy"}, r"rows\[2\] lacks value: every cell says"),
        ({"value": 1}, "lacks method, metric"),
        ({"method": "EXACT", "metric": "loss", "value": math.nan}, "cannot be written as JSON: .*None with the reason"),
        ({"method": "EXACT", "metric": "loss", "value": [1, math.inf]}, "cannot be written as JSON"),
        ({"method": "EXACT", "metric": "loss", "value": {1, 2}}, "type set is not JSON serializable"),
    ],
    ids=["no value", "only value", "nan", "inf in a list", "a set"],
)
def test_a_cell_that_is_none_is_refused_when_it_is_added(record: Record, cell: dict, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        record.add(**cell)
    assert len(record.rows) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "toy.json is not a record: .*cut short"),
        ('{"claim": "a', "toy.json is not a record: .*cut short"),
        ("[]", "toy.json holds list; a record has exactly claim, command"),
        ('{"claim": "a"}', "toy.json holds claim; a record has exactly claim, command"),
        (
            '{"claim": 1, "command": "", "commit": "", "versions": {}, "hardware": {}, "rows": []}',
            "toy.json: claim must be str, not int",
        ),
        (
            '{"claim": "", "command": "", "commit": "", "versions": {}, "hardware": {}, "rows": [3]}',
            r"toy.json: rows\[0\] lacks method, metric, value",
        ),
        (
            (
                '{"claim": "", "command": "", "commit": "", "versions": {}, "hardware": {}, '
                '"rows": [{"method": "", "metric": "", "value": NaN}]}'
            ),
            r"toy.json: rows\[0\] cannot be written as JSON",
        ),
    ],
    ids=["empty", "cut short", "a list", "fields missing", "wrong type", "a row that is a number", "NaN"],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "toy.json").write_text(text)
    with pytest.raises(RecordError, match=message):
        Record.read(tmp_path / "toy.json")


def test_a_record_that_cannot_be_written_leaves_the_old_file(record: Record, tmp_path: Path) -> None:
    record.write(tmp_path / "toy.json")
    before = (tmp_path / "toy.json").read_bytes()
    record.rows.append({"method": "EXACT"})
    with pytest.raises(RecordError, match="lacks metric, value"):
        record.write(tmp_path / "toy.json")
    assert (tmp_path / "toy.json").read_bytes() == before


def test_an_interrupt_while_writing_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "toy.json").write_text("old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "toy.json", b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("toy.json", "old")]


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text("old")
    program = """
        import os, signal, sys
        from expacc.studies.records import write_atomically
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        write_atomically(sys.argv[1], b"new")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "toy.json")], check=False)
    assert done.returncode == -9
    assert (tmp_path / "toy.json").read_text() == "old"


def test_a_written_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_atomically(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_begin_record_says_where_it_ran_and_no_path() -> None:
    made = begin_record("a claim", ["study", "toy", "--out", "/home/ada/results", "--seed", "3"])
    assert made.command == "study toy --out results --seed 3"
    assert {"python", "expacc"} <= set(made.versions)
    assert made.hardware["cores"] >= 1
    assert made.commit


def test_the_commit_of_a_package_outside_its_checkout_is_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "CHECKOUT", tmp_path)
    assert records.find_commit() == records.find_version()


@pytest.mark.parametrize(
    ("porcelain", "commit"), [("", "abc"), (" M src/expacc/losses.py", "abc-dirty")], ids=["clean", "changed"]
)
def test_the_commit_says_whether_the_code_differs(monkeypatch: pytest.MonkeyPatch, porcelain: str, commit: str) -> None:
    answers = {"ls-files": "records.py", "rev-parse": "abc", "status": porcelain}
    monkeypatch.setattr(records, "_output", lambda *command: answers[command[1]])
    assert records.find_commit() == commit


def test_an_extra_that_is_missing_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(CommandError) as raised:
        require_extra("expacc study toy", "studies", "json", "no_such_module")
    assert str(raised.value) == (
        "expacc study toy needs no_such_module, part of the extra 'studies': "
        "in a checkout, pip install '.[studies]' -c constraints.txt"
    )
