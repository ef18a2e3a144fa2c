"""Tables and figures in one style: rich for the terminal, matplotlib for PNG and SVG, both imported when used."""

import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from expacc.studies.records import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
PIPE_WIDTH = 120

# Okabe and Ito's palette, told apart with every common colour blindness; a figure also varies dashes or markers,
# because a printout may be grey.
COLORS = {
    "exact": "#D55E00",
    "cross-entropy": "#0072B2",
    "hinge": "#009E73",
    "other": "#CC79A7",
    "ink": "#222222",
    "faint": "#8A8A8A",
}

STYLE: Any = {  # matplotlib's own type for it is a list of every key there is
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same glyphs, hence the same bytes, everywhere
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 8,
    "axes.labelsize": 11,
    "axes.edgecolor": COLORS["faint"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": COLORS["ink"],
    "axes.labelcolor": COLORS["ink"],
    "xtick.color": COLORS["ink"],
    "ytick.color": COLORS["ink"],
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 2.0,
    "figure.facecolor": "white",
    "figure.constrained_layout.w_pad": 0.1,
    "savefig.dpi": 160,
    "svg.hashsalt": "expacc",  # the ids inside an SVG are random without it
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class Table:
    """Hold a table as text: a title, the column heads, the rows, and a note under it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def print_table(table: Table, console: Any = None) -> None:
    """Print a table with rich; the first column is set left, the others right.

    Args:
        table: what to print.
        console: a rich ``Console``; stdout without one.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    # A pipe or a file has no width: rich would take 80 columns and break the cells of a wider table.
    console = console or Console(width=None if sys.stdout and sys.stdout.isatty() else PIPE_WIDTH)
    # Text, not markup: "[0.75, 1]" is an interval and not a style.
    drawn = RichTable(
        title=Text(table.title, style="bold"), title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD
    )
    drawn.caption = Text(table.note) if table.note else None
    for index, name in enumerate(table.columns):
        drawn.add_column(Text(name), justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    console.print(drawn)


def render_table(table: Table, width: int = 110) -> str:
    """Return a table as plain text of at most ``width`` columns.

    >>> print(render_table(Table("Points", ["method", "value"], [["EXACT", "0.125"]])).strip())
    Points
    <BLANKLINE>
      method   value
     ────────────────
      EXACT    0.125
    """
    from rich.console import Console

    text = io.StringIO()
    print_table(table, Console(file=text, width=width, color_system=None, force_terminal=False))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def track(sequence: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate with a progress bar and the time left on stderr, gone at the end; off a terminal, silently."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    yield from rich_track(
        sequence, description, total=total, console=console, transient=True, disable=not console.is_terminal
    )


class Progress:
    """Show how far a long work is, and the time left, on stderr; gone at the end; off a terminal, silent.

    Args:
        description: what is being done.
        total: steps of the whole work, as far as known; `extend` adds to it.
    """

    def __init__(self, description: str, total: int) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TaskProgressColumn(),
                   progress.TimeRemainingColumn(), progress.TimeElapsedColumn())  # fmt: skip
        self._bar = progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(description, total=total)
        self._total = total

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, steps: int = 1) -> None:
        """Say that steps are done."""
        self._bar.advance(self._task, steps)

    def extend(self, steps: int) -> None:
        """Say that there is more to do than was known."""
        self._total += steps
        self._bar.update(self._task, total=self._total)


@contextmanager
def figure(width: float, height: float) -> Iterator["Figure"]:
    """Give a figure in the common style, in inches, without touching pyplot, its backend or the user's settings."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # somebody's matplotlibrc must not change the bytes
        matplotlib.rcParams.update(STYLE)
        yield Figure(figsize=(width, height), layout="constrained")


def save_figure(drawn: "Figure", folder: Path, name: str) -> list[Path]:
    """Save a figure as PNG and SVG; the same figure gives the same bytes. Call it inside ``figure``.

    Args:
        drawn: the figure.
        folder: an existing folder.
        name: file name without ending.

    Returns:
        The two paths.
    """
    paths = []
    for ending, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        data = io.BytesIO()
        drawn.savefig(data, format=ending, metadata=metadata)
        paths.append(folder / f"{name}.{ending}")
        write_atomically(paths[-1], data.getvalue())
    return paths
