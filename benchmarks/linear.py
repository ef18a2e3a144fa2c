r"""Training accuracy and time of ExactClassifier, LogisticRegression and LinearSVC: ten tables, synthetic sizes.

One thread. The tables are prepared as the paper does, on their own test part or the paper's split; a cell's time is the
least of `ROUNDS` fits, the methods in turn. Synthetic rows: normal features in float32, labels from a linear model with
Gumbel noise, so that no classifier can be right on all; there once.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

from benchmarks import RESULTS
from benchmarks.tables import linear_sizes_table, linear_table, linear_times_table
from expacc.datasets.preparation import make_preparation
from expacc.datasets.tables import PAPER, load_table
from expacc.linear import ExactClassifier
from expacc.studies import CommandError
from expacc.studies.records import Record, begin_record
from expacc.studies.report import print_table, track

CLAIM = "Full-batch continuation reaches the paper's training accuracy on every table, in at most two seconds."
ROUNDS = 3
METHODS: dict[str, Callable[[], Any]] = {
    "ExactClassifier(alpha=0)": partial(ExactClassifier, alpha=0.0),
    "ExactClassifier(alpha=0, whiten=True)": partial(ExactClassifier, alpha=0.0, whiten=True),
    'ExactClassifier(alpha=0, noise="gumbel")': partial(ExactClassifier, alpha=0.0, noise="gumbel"),
    "ExactClassifier()": ExactClassifier,
    "LogisticRegression": partial(LogisticRegression, max_iter=10_000),
    "LinearSVC": partial(LinearSVC, max_iter=10_000),
}
SIZES = tuple((rows, 20, classes) for classes in (2, 5) for rows in (10_000, 100_000, 1_000_000))
SIZED = ("ExactClassifier()", "LogisticRegression")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--tables", nargs="+", default=list(PAPER), metavar="NAME", help="which; default: all ten")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write results/linear.json where all was measured."""
    if unknown := sorted(set(options.tables) - set(PAPER)):
        raise CommandError(f"--tables: {', '.join(unknown)} is none of {', '.join(PAPER)}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        record = begin_record(CLAIM, "python -m benchmarks linear")
        for name in track(options.tables, "tables"):
            measure_table(record, name)
        whole = set(options.tables) == set(PAPER)
        for size in track(SIZES if whole else (), "sizes"):
            measure_size(record, *size)
    finally:
        torch.set_num_threads(threads)
    print_table(linear_table(record))
    print_table(linear_times_table(record))
    if whole:
        print_table(linear_sizes_table(record))
        record.write(RESULTS / "linear.json")
    return 0


def measure_table(record: Record, name: str) -> None:
    """Add the cells of one table."""
    train, test, labels, held = load_table(name).split()
    preparation = make_preparation(train).fit(train)
    x, z = preparation.transform(train), preparation.transform(test)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(ROUNDS):
        for method, make in METHODS.items():
            begin = time.perf_counter()
            model = make().fit(x, labels)
            seconds[method].append(time.perf_counter() - begin)
            if len(seconds[method]) == 1:
                where = {"task": name, "rows": len(x), "features": x.shape[1], "classes": len(model.classes_)}
                for split, (rows, truth) in {"train": (x, labels), "test": (z, held)}.items():
                    record.add(
                        method=method, **where, split=split, metric="accuracy", value=float(model.score(rows, truth))
                    )
    for method, found in seconds.items():
        record.add(method=method, task=name, metric="seconds", value=round(min(found), 4))


def measure_size(record: Record, rows: int, features: int, classes: int) -> None:
    """Add the cells of one synthetic size."""
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, features), dtype=np.float32)
    y = (
        x @ random.standard_normal((features, classes), dtype=np.float32)
        + 2 * features**0.5 * random.gumbel(size=(rows, classes))
    ).argmax(1)
    for method in SIZED:
        begin = time.perf_counter()
        model = METHODS[method]().fit(x, y)
        where = {"task": "synthetic", "rows": rows, "features": features, "classes": classes}
        record.add(method=method, **where, metric="seconds", value=round(time.perf_counter() - begin, 4))
        record.add(method=method, **where, split="train", metric="accuracy", value=float(model.score(x, y)))
