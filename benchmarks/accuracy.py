"""The error of P, of 1 − P and of the gradient against the number of nodes, over certified truth.

Worst and median over the certified rows (tests/reference/truth.json) of 2, 10, 100, 1000 and 100 000 classes, of this
package's rule, of Gauss–Hermite fixed at 0 and scaled by the curvature at each mode, of our Genz at 1, 16 and 256
samples, and of SciPy's multivariate_normal.cdf. "default" is nodes="auto" through the public door.

    P: relative, rows with P ≥ 1e-300     1 − P: relative, ≥ 1e-30
    gradient: competitors over the row's largest entry, the true class relative; rows where that entry is ≥ 1e-30
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import FIGURES, RESULTS
from benchmarks.cases import LEAST, QUANTITIES, Truth, load_truth
from benchmarks.figures import draw_accuracy
from benchmarks.rivals import Found, gauss_hermite, genz, scipy_cdf
from benchmarks.tables import accuracy_table
from expacc.functional import exact_loss
from expacc.integrals.quadrature import Rule, auto_rule, log_win_probability
from expacc.kernels import cpu
from expacc.kernels.dispatch import watch_paths
from expacc.studies.records import Record, begin_record
from expacc.studies.report import print_table, track

CLAIM = (
    "Equally spaced nodes over each integrand's support reach double precision for every certified row (of 100 000 "
    "classes five were run), where fixed nodes, nodes scaled by the mode's curvature, and sampling do not."
)
CLASSES = (2, 10, 100, 1000, 100_000)
NODES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
FEW_NODES = (8, 16, 32, 64, 96, 128)
SAMPLES = (1, 16, 256)
DROP = auto_rule(2, torch.float64).drop
# (classes, samples) → the most rows asked for a gradient, which is O(samples·C²)
GENZ_ROWS = {(1000, 16): 23, (1000, 256): 4}
# points and rows; SciPy's own default (10⁶·d points) takes minutes a row at 100 classes, and the Cholesky-ordered
# sweep 5 s a row at 1000 whatever the points
SCIPY_PLAN = {2: (None, None), 10: (None, None), 100: (25_000, None), 1000: (5_000, 4)}


def quadrature(rows: list[Truth], rule: Rule) -> list[Found]:
    """Return what this package computes with a rule: P and 1 − P from its log P, the gradient from backward."""
    m = torch.from_numpy(np.stack([row.m for row in rows])).requires_grad_()
    log_p = log_win_probability(m, rule)
    (slope,) = torch.autograd.grad(log_p.sum(), m)
    log_p = log_p.detach()
    p, q = log_p.exp(), -torch.expm1(log_p)
    return list(zip(p.tolist(), q.tolist(), (slope * p[:, None]).numpy(), strict=True))


def default(rows: list[Truth], dtype: torch.dtype, backend: str) -> list[Found]:
    """Return what a user gets with nodes="auto": −log P and 1 − P are the loss at q = 0 and q = 1."""
    found: list[Found] = []
    for row in rows:
        logits = torch.from_numpy(row.logits).to(dtype)[None].requires_grad_()
        target, keys = torch.tensor([row.target]), {"margin": row.margin, "backend": backend, "normalize": False}
        with torch.no_grad():
            p = torch.exp(-exact_loss(logits, target, row.sigma, power=0.0, **keys).double())
        q = exact_loss(logits, target, row.sigma, power=1.0, **keys)
        (slope,) = torch.autograd.grad(q.sum(), logits)
        found.append((p.item(), q.item(), row.sigma * np.delete(slope.double().numpy()[0], row.target)))
    return found


def _default(rows: list[Truth], dtype: str, backend: str, classes: int) -> Iterator[dict]:
    with watch_paths() as paths:
        yield from measure(
            lambda rows: default(rows, getattr(torch, dtype), backend),
            [row for row in rows if dtype == "float64" or row.value["P"] >= 1e-35 or row.value["P"] < LEAST["P"]],
            contract=True, method="default", dtype=dtype, backend=backend, classes=classes, nodes="auto",
        )  # fmt: skip
    if set(paths) != {backend}:
        raise RuntimeError(f"asked for backend {backend}, ran {sorted(set(paths))}")


def measure(
    compute: Callable[[list[Truth]], list[Found]],
    rows: list[Truth],
    quantities: tuple[str, ...] = QUANTITIES,
    *,
    contract: bool = False,
    **keys: Any,
) -> Iterator[dict]:
    """Yield a row of the record per quantity: the worst relative error, its case, and the median.

    `contract` divides the error of P by max(1, |log P|), as the promise does: log P is what a dtype rounds.
    """
    start = time.perf_counter()
    found = compute(rows)
    seconds = round(time.perf_counter() - start, 3)
    errors = [row.errors(*values) for row, values in zip(rows, found, strict=True)]
    if contract:
        for row, error in zip(rows, errors, strict=True):
            error.update({"P": error["P"] / max(1.0, -math.log(row.value["P"]))} if "P" in error else {})
    for quantity in quantities:
        each = [(error[quantity], row.name) for error, row in zip(errors, rows, strict=True) if quantity in error]
        if not each:
            continue
        worst, name = max((value if np.isfinite(value) else np.inf, name) for value, name in each)
        row = keys | {"quantity": quantity, "metric": "worst relative error", "value": float(f"{worst:.3g}")}
        if np.isinf(worst):
            row |= {"value": None, "reason": "not finite"}
        yield row | {
            "median": float(f"{np.median([value for value, _ in each]):.3g}"),
            "case": name,
            "cases": len(each),
            "seconds": seconds,
        }


Job = tuple[str, Callable[[], Iterator[dict]]]


def plan(quick: bool) -> Iterator[Job]:
    """Yield what to measure as (label, thunk), so that progress can be shown and nothing runs early."""
    for classes in CLASSES[:3] if quick else CLASSES:
        rows = load_truth(classes, 3 if quick else None)
        label = f"{classes} classes"
        yield label, partial(_radius, rows, classes)
        for dtype, backend in (("float64", "reference"), ("float32", "reference"), ("float32", "cpu")):
            if backend == "reference" or cpu.available():
                yield f"{label}, {backend}", partial(_default, rows, dtype, backend, classes)
        counts = (8, 48) if quick else NODES
        # at 100 000 classes every node costs the reference 1e5 evaluations in three places
        for nodes in counts if classes <= 1000 else FEW_NODES:
            compute = partial(quadrature, rule=Rule(nodes, DROP))
            yield f"{label}, {nodes} nodes", partial(_measure, compute, rows, "expacc", classes, nodes)
        for scaled, method in ((False, "Gauss–Hermite at 0"), (True, "Gauss–Hermite at the mode")):
            for nodes in counts:
                compute = partial(_each, partial(gauss_hermite, nodes=nodes, scaled=scaled))
                yield f"{label}, {method}", partial(_measure, compute, rows, method, classes, nodes)
        if classes <= 1000:
            for samples in SAMPLES[:2] if quick else SAMPLES:
                yield f"{label}, Genz", partial(_genz, rows, samples, classes)
            if not quick or classes == 2:
                yield f"{label}, SciPy", partial(_scipy, rows, classes)


def _measure(
    compute: Callable[[list[Truth]], list[Found]], rows: list[Truth], method: str, classes: int, nodes: int
) -> Iterator[dict]:
    return measure(compute, rows, method=method, classes=classes, nodes=nodes)


def _each(compute: Callable[[Truth], Found], rows: list[Truth]) -> list[Found]:
    return [compute(row) for row in rows]


def _thin(rows: list[Truth], most: int | None) -> list[Truth]:
    return rows if most is None else rows[:: -(-len(rows) // most)]


def _radius(rows: list[Truth], classes: int) -> Iterator[dict]:
    radius = max(row.radius for row in rows)
    keys = {"method": "certified", "classes": classes, "metric": "largest relative radius", "value": radius}
    yield keys | {"cases": len(rows), "seconds": 0.0}


def _genz(rows: list[Truth], samples: int, classes: int) -> Iterator[dict]:
    keys = {"method": "Genz", "classes": classes, "nodes": samples}
    yield from measure(partial(genz, samples=samples, gradient=False), rows, QUANTITIES[:2], **keys)
    few = _thin(rows, GENZ_ROWS.get((classes, samples)))
    yield from measure(partial(genz, samples=samples, gradient=True), few, QUANTITIES[2:], **keys)


def _scipy(rows: list[Truth], classes: int) -> Iterator[dict]:
    points, most = SCIPY_PLAN[classes]
    keys = {"method": "scipy multivariate_normal.cdf", "classes": classes, "nodes": None}
    keys |= {"points": points or 1_000_000 * (classes - 1)}
    yield from measure(partial(_each, partial(scipy_cdf, points=points)), _thin(rows, most), QUANTITIES[:2], **keys)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `accuracy`."""
    parser.add_argument("--quick", action="store_true", help="few rows, few nodes, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "accuracy.json")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder of accuracy.png and accuracy.svg")
    parser.add_argument("--draw", action="store_true", help="only draw the figure of an existing record")


def _resume(part: Path, fresh: Record) -> Record:
    """Return the record of an interrupted run of the same code, or else the fresh one."""
    if not part.exists():
        return fresh
    old = Record.read(part)
    return old if (old.command, old.commit, old.versions) == (fresh.command, fresh.commit, fresh.versions) else fresh


def run(args: argparse.Namespace) -> int:
    """Measure, write the record, draw the figure, print the table of the default.

    What is done stands in a file beside the record, so that a killed run goes on where it was.
    """
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if not args.draw:
        fresh = begin_record(CLAIM, "python -m benchmarks accuracy" + (" --quick" if args.quick else ""))
        part = args.out.with_name(f".{args.out.stem}.part.json")
        record = _resume(part, fresh)
        done = {row["job"] for row in record.rows}
        for job, (_, compute) in enumerate(track(list(plan(args.quick)), "accuracy")):
            if job in done:
                continue
            for row in list(compute()):
                record.add(**row, job=job)
            record.write(part)
        for row in record.rows:
            del row["job"]
        record.write(args.out)
        part.unlink()
    record = Record.read(args.out)
    args.figures.mkdir(parents=True, exist_ok=True)
    draw_accuracy(record, args.figures)
    print_table(accuracy_table(record))
    return 0
