"""Write the committed records into README.md and docs/: no number there is typed by hand.

Between the lines `<!-- begin: NAME -->` and `<!-- end: NAME -->` stands what `BLOCKS[NAME]` makes of a record in
results/.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import CHECKOUT, RESULTS
from benchmarks.tables import (
    accuracy_table,
    builds,
    linear_sizes_table,
    linear_table,
    linear_times_table,
    loss_table,
    markdown,
    memory_table,
    origin,
    scale_table,
    special_table,
    toy_table,
)
from expacc.studies import CommandError
from expacc.studies.defaults import make_tables
from expacc.studies.defaults_verdict import judge
from expacc.studies.records import Record, write_atomically

_MARKED = re.compile(r"(<!-- begin: (\S+) -->\n)(.*?)(<!-- end: \2 -->)", re.DOTALL)


def _every_loss(record: Record) -> str:
    """Return the tables of every build at every scale and dtype, each under its own line."""
    parts = []
    for build in builds(record):
        for dtype in ("float32", "float64"):
            for scale in (0.3, 2.0, 8.0):
                table = loss_table(record, dtype, scale, build)
                if table.rows:
                    parts.append(markdown(table))
    return "\n\n".join(parts)


def _builds(record: Record) -> str:
    return "\n\n".join(markdown(loss_table(record, build=build)) for build in builds(record))


# block → (record, what is made of it)
BLOCKS: dict[str, tuple[str, Callable[[Record], str]]] = {
    "loss": ("loss.json", lambda record: markdown(loss_table(record))),
    "loss-builds": ("loss.json", _builds),
    "loss-every": ("loss.json", _every_loss),
    "loss-memory": ("loss.json", lambda record: markdown(memory_table(record))),
    "loss-scales": ("loss.json", lambda record: markdown(scale_table(record))),
    "loss-origin": ("loss.json", origin),
    "accuracy": ("accuracy.json", lambda record: markdown(accuracy_table(record))),
    "accuracy-origin": ("accuracy.json", origin),
    "special": ("special.json", lambda record: markdown(special_table(record))),
    "special-origin": ("special.json", origin),
    "toy": ("toy.json", lambda record: markdown(toy_table(record))),
    "toy-origin": ("toy.json", origin),
    "linear": ("linear.json", lambda record: markdown(linear_table(record))),
    "linear-times": ("linear.json", lambda record: markdown(linear_times_table(record))),
    "linear-sizes": ("linear.json", lambda record: markdown(linear_sizes_table(record))),
    "linear-origin": ("linear.json", origin),
    "defaults": ("defaults.json", lambda record: markdown(make_tables(judge(record.rows))[0])),
    "defaults-problems": ("defaults.json", lambda record: markdown(make_tables(judge(record.rows))[1])),
    "defaults-origin": ("defaults.json", origin),
}


def render(text: str, results: Path = RESULTS) -> str:
    r"""Return a page with every marked block made anew.

    Raises:
        CommandError: a block that nobody makes, one that is not closed, or one whose record is missing.

    >>> render("no blocks\n")
    'no blocks\n'
    """

    def fill(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        if name not in BLOCKS:
            raise CommandError(f"no block is called {name}: there are {', '.join(BLOCKS)}")
        record, make = BLOCKS[name]
        if not (results / record).exists():
            command = (
                "expacc study toy --out results" if name.startswith("toy") else f"python -m benchmarks {record[:-5]}"
            )
            raise CommandError(f"{name} needs results/{record}: {command}")
        return f"{begin}\n{make(Record.read(results / record))}\n\n{end}"

    done = _MARKED.sub(fill, text)
    if loose := [line for line in _MARKED.sub("", text).splitlines() if re.match(r"<!-- (begin|end): ", line)]:
        raise CommandError(f"unpaired {loose[0]}: a block stands between <!-- begin: NAME --> and <!-- end: NAME -->")
    return done


def pages() -> Iterator[Path]:
    """Yield the pages of this checkout that may hold blocks."""
    yield from (path for path in (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))) if path.exists())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `render`."""
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a page is out of step")


def run(args: argparse.Namespace) -> int:
    """Bring every page in step with the records."""
    status = 0
    before = {path: path.read_text(encoding="utf-8") for path in pages()}
    after = {path: render(old) for path, old in before.items()}  # all of them, before the first is written
    for path, old in before.items():
        new = after[path]
        if new != old:
            name = path.relative_to(CHECKOUT)
            print(f"{name}: {'out of step' if args.check else 'rewritten'}", file=sys.stderr)
            status = 1 if args.check else status
            if not args.check:
                write_atomically(path, new.encode())
    return status
