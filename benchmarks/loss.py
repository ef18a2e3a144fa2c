"""Time and peak extra memory of one forward and backward, ours beside CrossEntropyLoss's.

All methods of a cell (batch × classes, dtype, scale of the logits) take turns in every round, in an order drawn anew,
so that what disturbs the machine disturbs them alike; a slow method takes part in fewer rounds. A row holds the median
and the lower decile of its times and the ratio of each to CrossEntropyLoss's over all rounds (its times are bimodal:
compare both). Not over the same rounds alone: after a slow method's call it finds cold caches and looks slow, too.
Time includes the Python call and torch's dispatch; the logits are a leaf whose gradient is None before.
Memory: see memory.py. The row names the path that ran, and the build of the kernel.
"""

import argparse
import gc
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import CHECKOUT, RESULTS
from benchmarks.memory import peak_bytes
from benchmarks.tables import builds, loss_table, memory_table, scale_table
from expacc.integrals.genz import win_probability
from expacc.kernels import build, cpu
from expacc.kernels.dispatch import watch_paths
from expacc.losses import ExactLoss
from expacc.studies import CommandError
from expacc.studies.records import Record, begin_record
from expacc.studies.report import print_table, track

CLAIM = (
    "In float32 ExactLoss, by its native kernel, costs one to four times CrossEntropyLoss's time and no more memory, "
    "forward and backward, up to 100 000 classes."
)
BASE = "CrossEntropyLoss"
SHAPES = ((256, 10), (256, 100), (256, 1000), (64, 10_000), (16, 100_000))
QUICK_SHAPES = ((8, 10), (4, 50))
DTYPES = ("float32", "float64")
SCALES = (0.3, 2.0, 8.0)
SCALE = 2.0  # where memory and the slow methods are measured
MOST = 400  # rounds
SLOW = 0.5  # seconds a call from which a method is measured at one scale, by a call or two
LIBRARY = "EXPACC_CPU_LIBRARY"  # names the file of the kernel to load

Call = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Method:
    """One way to compute a loss.

    Args:
        make: the loss as a function of logits and target.
        patience: seconds that a single call may take, by dtype; what is predicted to take longer is skipped, and the
            row says so.
        order: the cost grows like batch · classes^order, to predict it from the shape before.
        rows: of a batch with 1000 classes or more, take this many rows and scale the time up.
    """

    make: Callable[[], Call]
    patience: dict[str, float]
    order: int = 1
    rows: int | None = None


def _genz() -> Call:
    generator = torch.Generator().manual_seed(0)

    def call(logits: Tensor, target: Tensor) -> Tensor:
        m = logits.gather(1, target[:, None]) - logits
        m = m.scatter(1, target[:, None], torch.inf)
        return (1 - win_probability(m, 16, generator)).mean()

    return call


_PATIENT, _BRIEF = {"float32": 60.0, "float64": 60.0}, {"float32": 2.0, "float64": 2.0}
METHODS: dict[str, Method] = {
    BASE: Method(nn.CrossEntropyLoss, _PATIENT),
    "ExactLoss(normalize=False)": Method(partial(ExactLoss, normalize=False), _PATIENT),
    "ExactLoss()": Method(ExactLoss, _BRIEF),
    'ExactLoss(noise="gumbel", normalize=False)': Method(partial(ExactLoss, noise="gumbel", normalize=False), _BRIEF),
    'ExactLoss(noise="gumbel")': Method(partial(ExactLoss, noise="gumbel"), _BRIEF),
    'ExactLoss(backend="reference", normalize=False)': Method(
        partial(ExactLoss, backend="reference", normalize=False), {"float32": 60.0, "float64": 2.0}
    ),
    "Genz, 16 samples": Method(_genz, {"float32": 5.0, "float64": 5.0}, order=2, rows=16),
}
KERNEL_METHODS = tuple(METHODS)[:5]


def make_batch(dtype: str, batch: int, classes: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return normal logits of the given scale, a leaf that wants a gradient, and uniform targets."""
    generator = torch.Generator().manual_seed(classes)
    logits = scale * torch.randn(batch, classes, generator=generator, dtype=getattr(torch, dtype))
    return logits.requires_grad_(), torch.randint(classes, (batch,), generator=generator)


def step(call: Call, logits: Tensor, target: Tensor) -> float:
    """Run forward and backward once and return the seconds."""
    logits.grad = None
    start = time.perf_counter()
    call(logits, target).backward()
    return time.perf_counter() - start


@dataclass
class Cell:
    """The methods that share the rounds of one batch, with what is known of each before."""

    dtype: str
    batch: int
    classes: int
    scale: float
    names: tuple[str, ...]

    def keys(self, name: str) -> dict:
        """Return the keys of a method's row."""
        keys = {"method": name, "batch": self.batch, "classes": self.classes, "dtype": self.dtype}
        return keys | {"scale": self.scale, "metric": "seconds"}


def measure(cell: Cell, budget: float, cost: dict[tuple[str, str], float]) -> Iterator[dict]:
    """Yield a row per method.

    Args:
        cell: what to measure.
        budget: seconds for all the methods but the slow ones' single calls.
        cost: (method, dtype) → seconds per batch · classes^order, from the cell before; brought up to date here.
    """
    ready: dict[str, tuple[Call, Tensor, Tensor, float, list[str]]] = {}
    for name in cell.names:
        method = METHODS[name]
        work = cell.batch * cell.classes**method.order
        rows = method.rows if method.rows and cell.classes >= 1000 else cell.batch
        predicted = cost.get((name, cell.dtype), 0.0) * work
        once = predicted * rows / cell.batch
        if once > method.patience[cell.dtype] or (once > SLOW and cell.scale != SCALE):
            why = f"a call of about {predicted:.2g} s is measured at scale {SCALE:g} only"
            if once > method.patience[cell.dtype]:
                why = f"predicted from the shape before: about {predicted:.2g} s a call"
            yield cell.keys(name) | {"value": None, "reason": why}
            continue
        call = method.make()
        logits, target = make_batch(cell.dtype, rows, cell.classes, cell.scale)
        with watch_paths() as paths:
            seconds = step(call, logits, target)
        if seconds < SLOW:
            seconds = min(seconds, step(call, logits, target), step(call, logits, target))
        cost[name, cell.dtype] = seconds / rows / cell.classes**method.order
        ready[name] = call, logits, target, seconds, paths
    times = _take_turns(ready, budget)
    base = np.array(times[BASE])
    for name, (_, logits, _, _, paths) in ready.items():
        ours = np.array(times[name]) * cell.batch / len(logits)
        row = cell.keys(name) | {"value": _round(np.median(ours)), "lower_decile": _round(np.quantile(ours, 0.1))}
        row |= {
            "ratio": _round(np.median(ours) / np.median(base)),
            "ratio_lower_decile": _round(np.quantile(ours, 0.1) / np.quantile(base, 0.1)),
            "rounds": len(ours),
            "path": paths[0] if paths else "torch",
        }
        yield row | ({"rows_measured": len(logits)} if len(logits) < cell.batch else {})


def _take_turns(ready: dict, budget: float) -> dict[str, list[float]]:
    """Return the seconds of every round that a method took part in."""
    share = budget / len(ready)
    turns = {name: int(min(MOST, max(2, share / entry[3]))) for name, entry in ready.items()}
    turns |= {name: 1 for name, entry in ready.items() if entry[3] > max(SLOW, share)}
    rounds = turns[BASE] = max(turns.values())
    order = np.random.Generator(np.random.PCG64(0))
    times: dict[str, list[float]] = {name: [] for name in ready}
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds):
            due = [name for name, n in turns.items() if r * n // rounds != (r - 1) * n // rounds]
            for name in (due[i] for i in order.permutation(len(due))):
                call, logits, target, *_ = ready[name]
                times[name].append(step(call, logits, target))
    finally:
        gc.enable()
    return times


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def measure_memory(measured: list[dict], repeats: int) -> Iterator[dict]:
    """Yield the peak of every method and shape whose time was measured, in bytes and over those of the logits."""
    cells = [
        (row["method"], row["dtype"], row["batch"], row["classes"])
        for row in measured
        if row["value"] is not None
        and row["value"] < (10 if row["method"].startswith("ExactLoss") else SLOW)
        and row["scale"] == SCALE
        and "rows_measured" not in row
    ]
    for (name, dtype, batch, classes), peak in zip(cells, peak_bytes(cells, repeats), strict=True):
        size = batch * classes * torch.finfo(getattr(torch, dtype)).bits // 8
        row = {"method": name, "batch": batch, "classes": classes, "dtype": dtype, "metric": "peak extra bytes"}
        row |= {"value": peak, "logits_bytes": size}
        yield row | ({"reason": "not measured"} if peak is None else {"over_logits": _round(peak / size)})


def measure_all(quick: bool, names: tuple[str, ...], dtypes: tuple[str, ...], budget: float) -> Iterator[dict]:
    """Yield every row of one build, whose name each carries: times, then memory."""
    shapes, scales = (QUICK_SHAPES, (SCALE,)) if quick else (SHAPES, (SCALE, *[s for s in SCALES if s != SCALE]))
    cost: dict[tuple[str, str], float] = {}
    cells = [
        Cell(dtype, batch, classes, scale, names) for dtype in dtypes for batch, classes in shapes for scale in scales
    ]
    measured = []
    for cell in track(cells, f"time, {name_build() or 'no kernel'}"):
        measured += measure(cell, budget, cost)
    for row in (*measured, *measure_memory(measured[: len(names)] if quick else measured, 1 if quick else 3)):
        yield row | {"build": name_build()}


def name_build() -> str | None:
    """Return instruction set and compiler of the kernel in use, e.g. "avx512, GCC 13.2"; None without a kernel."""
    if not cpu.available():
        return None
    library = os.environ.get(LIBRARY) or Path(cpu.__file__).with_name(build.LIBRARY)
    # Compilers leave their name in the file (ELF's .comment); the kernel itself need not know it.
    found = re.search(rb"(GCC|clang)(?:: \([^)]*\)| version) (\d+\.\d+)", Path(library).read_bytes())
    return f"{cpu.variant()}, {b' '.join(found.groups()).decode() if found else 'unknown compiler'}"


def measure_build(compiler: list[str], quick: bool) -> list[dict]:
    """Build the kernel with another compiler and return its rows, from a process of its own: one loads one library."""
    with tempfile.TemporaryDirectory() as folder:
        library, out = Path(folder) / build.LIBRARY, Path(folder) / "build.json"
        try:
            build.build(library, compiler)
        except build.BuildError as error:
            raise CommandError(f"the second build failed: {error}") from error
        command = [sys.executable, "-m", "benchmarks", "loss", "--kernel-only", "--out", str(out)]
        subprocess.run(
            command + (["--quick"] if quick else []),
            cwd=CHECKOUT,
            env={**os.environ, LIBRARY: str(library)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return Record.read(out).rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `loss`."""
    parser.add_argument("--quick", action="store_true", help="two small shapes, a few rounds, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "loss.json")
    parser.add_argument(
        "--compiler",
        action="append",
        help="build the kernel with this command, too, and measure it beside the loaded one; may be repeated. "
        "Default: the ziglang wheel's compiler where it is installed; --compiler '' for none",
    )
    parser.add_argument("--kernel-only", action="store_true", help="only what the native kernel takes")
    parser.add_argument("--budget", type=float, default=2.5, help="seconds of rounds per cell")


def run(args: argparse.Namespace) -> int:
    """Measure every build, write the record, print its tables."""
    record = begin_record(CLAIM, "python -m benchmarks loss" + (" --quick" if args.quick else ""))
    names, dtypes = (KERNEL_METHODS, DTYPES[:1]) if args.kernel_only else (tuple(METHODS), DTYPES)
    for row in measure_all(args.quick, names, dtypes, 0.02 if args.quick else args.budget):
        record.add(**row)
    for compiler in _other_compilers(args):
        for row in measure_build(compiler, args.quick):
            record.add(**row)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record.write(args.out)
    tables = [loss_table(record, build=name) for name in builds(record)]
    for table in (*tables, memory_table(record), scale_table(record)):
        print_table(table)
    return 0


def _other_compilers(args: argparse.Namespace) -> list[list[str]]:
    if args.compiler is not None:
        return [shlex.split(command) for command in args.compiler if command]
    wanted = not (args.quick or args.kernel_only) and importlib.util.find_spec("ziglang") is not None
    return [[sys.executable, "-m", "ziglang", "cc"]] if wanted and cpu.available() else []
