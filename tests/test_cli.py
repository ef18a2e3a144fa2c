"""The command line, used as its user would: right, wrong, interrupted, into a pipe."""

import os
import pty
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from expacc import cli
from expacc.studies import CommandError


def _expacc(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "expacc", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # pyright: ignore


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Put a function in the place of the toy study."""

    def put(run: Callable[..., None]) -> None:
        module = types.ModuleType("expacc.studies.toy")
        module.run = run  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "expacc.studies.toy", module)

    return put


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["study", "--help"], ["study", "toy", "--help"]], ids=" ".join
)
def test_help_comes_without_torch(words: list[str]) -> None:
    program = (
        "import sys\nfrom expacc.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(sorted({'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert "expacc" in done.stdout


def test_version_is_the_packages() -> None:
    from expacc.studies.records import find_version

    assert _expacc("--version").stdout == f"expacc {find_version()}\n"


def test_help_of_the_study_names_every_option() -> None:
    shown = _expacc("study", "toy", "--help").stdout
    assert [flag for flag in ("--out DIR", "--seed N", "--json", "--debug") if flag not in shown] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expacc: the following arguments are required: command; see expacc --help"),
        (["study"], "expacc study: the following arguments are required: study; see expacc study --help"),
        (["stuby"], "expacc: argument command: invalid choice: 'stuby' (choose from"),
        (["study", "tow"], "expacc study: argument study: invalid choice: 'tow' (choose from"),
        (["study", "toy", "--sed", "3"], "expacc: unrecognized arguments: --sed 3; see expacc --help"),
        (["study", "toy", "extra"], "expacc: unrecognized arguments: extra"),
        (
            ["study", "toy", "--seed", "-1"],
            "expacc study toy: argument --seed: must be a whole number from 0 to 2**63 - 1, not '-1'",
        ),
        (["study", "toy", "--seed", "1.5"], "expacc study toy: argument --seed: must be a whole number"),
        (["study", "toy", "--seed", str(2**63)], "expacc study toy: argument --seed: must be a whole number"),
        (["study", "toy", "--out"], "expacc study toy: argument --out: expected one argument"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_wrong_use_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)


def test_options_reach_the_study(fake: Callable[..., None]) -> None:
    seen = {}
    fake(lambda **options: seen.update(options))
    assert cli.main(["study", "toy", "--seed", "7", "--out", "there"]) == 0
    assert seen == {"seed": 7, "out": Path("there"), "json": False}


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CommandError("--out x is a file; name a folder"), 2, "--out x is a file; name a folder"),
        (PermissionError(13, "Permission denied", "x/y"), 1, "x/y: Permission denied"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (ValueError("first line\nsecond line"), 1, "ValueError: first line (--debug shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["wrong use", "no permission", "disk full", "a bug", "Ctrl-C"],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, message: str, fake: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    def run(**_: object) -> None:
        raise error

    fake(run)
    assert cli.main(["study", "toy"]) == code
    assert capfd.readouterr() == ("", f"expacc study toy: {message}\n")


def test_debug_shows_where_an_error_came_from(fake: Callable[..., None]) -> None:
    def run(**_: object) -> None:
        raise ValueError("a bug")

    fake(run)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["study", "toy", "--debug"])


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else name)
    assert cli.main(["study", "toy"]) == 2
    assert capfd.readouterr().err == (
        "expacc study toy: this command needs matplotlib, part of the extra 'studies': "
        "in a checkout, pip install '.[studies]' -c constraints.txt\n"
    )


def test_every_command_has_a_module_that_runs_it() -> None:
    import importlib
    import inspect

    takes = {
        words: set(inspect.signature(importlib.import_module(command.module).run).parameters)
        for words, command in cli.COMMANDS.items()
    }
    assert takes == {
        words: {flag.lstrip("-").replace("-", "_") for flag in command.options}
        for words, command in cli.COMMANDS.items()
    }


def test_the_study_prints_its_tables_and_no_progress_into_a_pipe(tmp_path: Path) -> None:
    done = _expacc("study", "toy", "--out", "results", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == "The record and the figures are in results\n"
    assert [
        [line.split()[0], line.split()[1][:6]] for line in done.stdout.splitlines() if line.startswith("  EXACT")
    ] == [
        ["EXACT", "0.1250"],
        ["EXACT", "-5.484"],
    ]
    assert (tmp_path / "results" / "toy.json").is_file()


# The command line with a study that only prints, so that the tests of its output take no time.
PRINT = """
import sys, types
module = types.ModuleType("expacc.studies.toy")
module.run = lambda **_: print("the tables" * 100_000)
sys.modules["expacc.studies.toy"] = module
from expacc.cli import main
sys.exit(main(["study", "toy"]))
"""


def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", PRINT], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(3) == b"the"
        running.stdout.close()
        assert (running.stderr.read(), running.wait()) == (b"", 0)


def test_a_full_disk_on_stdout_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINT], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "expacc study toy: No space left on device\n")


@pytest.mark.parametrize("out", ["file", "file/below"], ids=["a file", "below a file"])
def test_out_that_is_no_folder_is_an_error(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("mine")
    done = _expacc("study", "toy", "--out", out, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2 if out == "file" else 1, "", 1)
    assert done.stderr.startswith("expacc study toy: ")
    assert "Not a directory" in done.stderr or "is a file; name a folder" in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_an_interrupt_ends_with_130_one_line_and_no_record(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "expacc", "study", "toy", "--out", str(tmp_path / "out")]
    child, terminal = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, text=True) as running:
        os.close(terminal)
        shown = os.read(child, 1)  # progress has begun
        running.send_signal(signal.SIGINT)
        while chunk := _read(child):
            shown += chunk
        assert running.wait() == 130
    assert shown.decode().rstrip().endswith("expacc study toy: interrupted")
    assert "Traceback" not in shown.decode()
    assert list((tmp_path / "out").iterdir()) == []


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux says so where the other end is closed
        return b""
