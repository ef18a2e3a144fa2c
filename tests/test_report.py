"""Reports: tables as text, figures as the same bytes every time, progress only where somebody looks."""

import io
from pathlib import Path

import matplotlib
import pytest
from rich.console import Console

from expacc.studies.report import Table, figure, print_table, render_table, save_figure, track

TABLE = Table("Thresholds", ("method", "threshold"), [["EXACT", "0.125"], ["hinge", "[0.75, 1]"]], "A note.")


def test_a_table_keeps_brackets_and_its_note() -> None:
    lines = [line.strip() for line in render_table(TABLE).splitlines()]
    assert lines[0] == "Thresholds"
    assert "hinge    [0.75, 1]" in lines
    assert lines[-1] == "A note."


@pytest.mark.parametrize("width", [30, 20, 12], ids=str)
def test_a_narrow_table_stays_within_its_width_and_cuts_nothing_off(width: int) -> None:
    text = render_table(TABLE, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_a_table_goes_to_stdout_whole_where_that_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Table("", ("method", "threshold"), [["EXACT", "0.125 " * 15]]))
    assert ("0.125 " * 15).strip() in capsys.readouterr().out


def test_progress_is_silent_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(3), "steps")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_progress_shows_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=shown, force_terminal=True, width=80))
    assert list(track(range(3), "the steps")) == [0, 1, 2]
    assert "the steps" in shown.getvalue()


def _save(folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    with figure(3, 2) as drawn:
        drawn.subplots().plot([0, 1], [0, 1], label="σ = 0.1")
        paths = save_figure(drawn, folder, "line")
    assert [path.name for path in paths] == ["line.png", "line.svg"]
    return {path.name: path.read_bytes() for path in paths}


def test_the_same_figure_has_the_same_bytes_whatever_the_users_settings(tmp_path: Path) -> None:
    before = _save(tmp_path / "one")
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30.0, "svg.hashsalt": None}):
        assert _save(tmp_path / "two") == before
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
