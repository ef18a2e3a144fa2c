"""From records to tables: the same `Table` for the terminal and, as Markdown, for README and docs."""

from expacc.studies.records import Record
from expacc.studies.report import Table

SYMBOLS = {"log_cdf": "log Φ(x)", "hazard": "λ(x)", "excess": "x + λ(x)"}


def markdown(table: Table) -> str:
    """Return a table in Markdown, the first column to the left, the others to the right, the note below.

    >>> print(markdown(Table("T", ["a", "b"], [["x", "1"]], "one")))
    | a | b |
    |:--|--:|
    | x | 1 |
    <BLANKLINE>
    one
    """
    rule = "|:--|" + "--:|" * (len(table.columns) - 1)
    lines = [_line(table.columns), rule, *map(_line, table.rows)]
    return "\n".join(lines + (["", table.note] if table.note else []))


def _line(cells) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def special_table(record: Record) -> Table:
    """Return the largest error in ULP of every function and dtype, ours beside torch's."""
    rows = []
    ours = [row for row in record.rows if row["method"] == "expacc"]
    for row in ours:
        rival = [
            each
            for each in record.rows
            if each["method"] != "expacc" and all(each[key] == row[key] for key in ("function", "dtype"))
        ]
        cells = [SYMBOLS[row["function"]], row["dtype"], f"{row['points']:,}"]
        rows.append(cells + [cell for each in (row, *rival) for cell in _ulp(each)] + [""] * (0 if rival else 3))
    columns = ["function", "dtype", "inputs", "expacc: ULP", "at x", "inf or NaN", "torch: ULP", "at x", "inf or NaN"]
    return Table("Largest error in units in the last place", columns, rows)


def _ulp(row: dict) -> list[str]:
    """Return the largest error, its input, and what is wrongly infinite or NaN."""
    if row["value"] is None:
        return ["refuses the dtype", "", ""]
    text = f"{row['value']:.2f}" if row["value"] < 1000 else f"{row['value']:.0e}"
    broken = f"{row['broken']:,}, from x = {float(row['broken_at']):.4g}" if row["broken"] else "none"
    return [text, f"{float(row['at']):.6g}", broken]


# Error bounds of the contract, by (dtype, quantity), for up to 1000 classes and above.
PROMISED = {
    ("float64", "P"): (1e-11, 1e-10),
    ("float64", "1 − P"): (1e-9, 1e-9),
    ("float64", "gradient"): (1e-10, 1e-10),
    ("float32", "P"): (3e-6, 3e-5),
    ("float32", "1 − P"): (1e-4, 1e-4),
    ("float32", "gradient"): (3e-5, 3e-5),
}


def accuracy_table(record: Record) -> Table:
    """Return the worst error of the default, by path and number of classes, beside what is promised."""
    rows = [row for row in record.rows if row["method"] == "default"]
    kinds = dict.fromkeys((row["quantity"], row["dtype"], row["backend"]) for row in rows)
    classes = sorted({row["classes"] for row in rows})
    body = []
    for quantity, dtype, backend in sorted(
        kinds, key=lambda kind: (kind[1:], ("P", "1 − P", "gradient").index(kind[0]))
    ):
        cells = [f"{quantity}", dtype, backend]
        low, high = PROMISED[dtype, quantity]
        for count in classes:
            found = [
                row["value"]
                for row in rows
                if (row["quantity"], row["dtype"], row["backend"], row["classes"]) == (quantity, dtype, backend, count)
            ]
            cells.append(f"{found[0]:.0e}" if found and found[0] is not None else "")
        body.append([*cells, f"{low:.0e}" if low == high else f"{low:.0e}; {high:.0e}"])
    columns = ["error of", "dtype", "path", *(f"C = {count:,}".replace(",", " ") for count in classes), "promised"]
    note = (
        "P: over max(1, |log P|). Gradient: competitors over the row's largest entry, the true class relative. "
        "Two promises: to 1000 classes; above."
    )
    return Table("Worst relative error of the default over certified rows", columns, body, note)


BASE = "CrossEntropyLoss"
HEADS = {
    BASE: "cross-entropy",
    "ExactLoss(normalize=False)": "Gaussian",
    "ExactLoss()": "Gaussian, normalised",
    'ExactLoss(noise="gumbel", normalize=False)': "Gumbel",
    'ExactLoss(noise="gumbel")': "Gumbel, normalised",
    'ExactLoss(backend="reference", normalize=False)': "reference path",
    "Genz, 16 samples": "Genz, 16 samples",
}


def builds(record: Record) -> list[str | None]:
    """Return the builds of the kernel that a loss record holds, the one that loads by itself first."""
    return list(dict.fromkeys(row["build"] for row in record.rows))


def loss_table(record: Record, dtype: str = "float32", scale: float = 2.0, build: str | None = "first") -> Table:
    """Return CrossEntropyLoss's time, and every other method's median over it (over it at the lower decile)."""
    build = builds(record)[0] if build == "first" else build
    rows = [
        row
        for row in record.rows
        if (row["metric"], row["dtype"], row.get("scale"), row["build"]) == ("seconds", dtype, scale, build)
    ]
    others = [name for name in dict.fromkeys(row["method"] for row in rows) if name != BASE]
    body = []
    for shape in dict.fromkeys((row["batch"], row["classes"]) for row in rows):
        cells = {row["method"]: row for row in rows if (row["batch"], row["classes"]) == shape}
        base = f"{1e3 * cells[BASE]['value']:.3f} ms"
        body.append([_shape(shape), base, *(_ratio(cells.get(name)) for name in others)])
    note = f"{dtype}, logits at scale {scale:g}, kernel: {build or 'none'}. "
    note += "Forward and backward, median over cross-entropy's median (in brackets: lower decile over lower decile)."
    return Table("Time over cross-entropy's", ["batch × classes", "cross-entropy", *map(_head, others)], body, note)


def memory_table(record: Record, dtype: str = "float32", build: str | None = "first") -> Table:
    """Return the peak extra memory over the logits' size."""
    build = builds(record)[0] if build == "first" else build
    rows = [
        row for row in record.rows if (row["metric"], row["dtype"], row["build"]) == ("peak extra bytes", dtype, build)
    ]
    names = list(dict.fromkeys(row["method"] for row in rows))
    body = []
    for shape in dict.fromkeys((row["batch"], row["classes"]) for row in rows):
        cells = {row["method"]: row for row in rows if (row["batch"], row["classes"]) == shape}
        size = next(iter(cells.values()))["logits_bytes"]
        body.append([_shape(shape), f"{size / 1e6:.2f} MB", *(_over(cells.get(name)) for name in names)])
    note = f"{dtype}. Resident bytes at the peak of forward and backward beyond those before, over the logits; the "
    note += "gradient (1) counts. Differences below 0.2 MB are the noise of the system's pages."
    return Table("Peak extra memory over the logits", ["batch × classes", "logits", *map(_head, names)], body, note)


def scale_table(record: Record, dtype: str = "float32") -> Table:
    """Return each method's slowest over fastest median among the scales of the logits."""
    times: dict[tuple, list[float]] = {}
    for row in record.rows:
        if row["metric"] == "seconds" and row["dtype"] == dtype and row["value"] and row["build"] == builds(record)[0]:
            times.setdefault((row["method"], row["batch"], row["classes"]), []).append(row["value"])
    times = {key: values for key, values in times.items() if len(values) > 1}
    names = list(dict.fromkeys(key[0] for key in times))
    body = [
        [_shape(shape), *(_spread(times.get((name, *shape))) for name in names)]
        for shape in dict.fromkeys(key[1:] for key in times)
    ]
    return Table("Slowest over fastest of the scales 0.3, 2 and 8", ["batch × classes", *map(_head, names)], body)


def _head(method: str) -> str:
    return HEADS.get(method, method)


def _shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]} × {shape[1]:,}".replace(",", " ")


def _ratio(row: dict | None) -> str:
    if row is None or row["value"] is None:
        return "—"
    return f"{_digits(row['ratio'])} ({_digits(row['ratio_lower_decile'])})"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}".replace(",", " ")


def _over(row: dict | None) -> str:
    return "—" if row is None or row["value"] is None else f"{row['over_logits']:.2f}"


def _spread(values: list[float] | None) -> str:
    return "—" if values is None else f"{max(values) / min(values):.2f}"


def toy_table(record: Record) -> Table:
    """Return the thresholds and accuracies of the toy examples, with the paper's beside them."""
    body = []
    for task, method in dict.fromkeys((row["task"], row["method"]) for row in record.rows):
        mine = {row["metric"]: row for row in record.rows if (row["task"], row["method"]) == (task, method)}
        threshold, accuracy, wrong = (mine[metric] for metric in ("threshold", "accuracy", "misclassified points"))
        cells = [task, method, _threshold(threshold["value"]), threshold["paper"]]
        cells += [f"{100 * row:.0f} %" for row in (accuracy["value"], accuracy["paper"])]
        body.append([*cells, ", ".join(f"{point:g}" for point in wrong["value"]) or "none"])
    columns = ["example", "method", "threshold", "paper", "accuracy", "paper", "misclassified"]
    return Table("The paper's toy examples", columns, body)


def _threshold(value: float | list[float] | None) -> str:
    if value is None:
        return "none (w = 0)"
    return f"[{value[0]:g}, {value[1]:g}]" if isinstance(value, list) else f"{value:.3f}"


def origin(record: Record) -> str:
    """Return the line that says where, with what and by which command a record was made."""
    hardware = record.hardware
    versions = record.versions
    what = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "scipy") if name in versions)
    accelerator = f", {hardware['accelerator']}" if hardware["accelerator"] else ""
    where = f"{hardware['processor']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB{accelerator}"
    return f"`{record.command}` at {record.commit[:12]}{'+' * record.commit.endswith('-dirty')}: {where}; {what}."


# The published training accuracies of EXACT, in percent: the paper's Table 1.
PUBLISHED_TRAIN = {
    "adult": 85.47, "annealing": 100.0, "audit-risk": 100.0, "balance-scale": 91.60, "breast-cancer-wisconsin": 99.03,
    "car": 96.67, "cylinder-bands": 87.42, "dry-bean": 92.67, "mice-protein": 100.0, "wine": 100.0,
}  # fmt: skip


LINEAR_NAMES = {
    "ExactClassifier(alpha=0)": "EXACT, α = 0",
    "ExactClassifier(alpha=0, whiten=True)": "whitened",
    'ExactClassifier(alpha=0, noise="gumbel")': "Gumbel",
    "ExactClassifier()": "default",
    "LogisticRegression": "logistic",
    "LinearSVC": "SVC",
}


def linear_table(record: Record) -> Table:
    """Return the training accuracy of every method on every table, beside the published one."""
    body = [
        [task, f"{PUBLISHED_TRAIN[task]:.2f}"]
        + [f"{100 * record.value(method=m, task=task, split='train', metric='accuracy'):.2f}" for m in LINEAR_NAMES]
        for task in PUBLISHED_TRAIN
        if any(row["task"] == task for row in record.rows)
    ]
    return Table("Training accuracy, %", ["table", "paper", *LINEAR_NAMES.values()], body)


def linear_times_table(record: Record) -> Table:
    """Return the seconds of one fit of every method on every table."""
    body = [
        [task] + [f"{record.value(method=m, task=task, metric='seconds'):.3f}" for m in LINEAR_NAMES]
        for task in PUBLISHED_TRAIN
        if any(row["task"] == task for row in record.rows)
    ]
    return Table("Seconds of one fit", ["table", *LINEAR_NAMES.values()], body, "One thread.")


def linear_sizes_table(record: Record) -> Table:
    """Return seconds of ExactClassifier over LogisticRegression's, and both accuracies, by synthetic size."""
    sizes = dict.fromkeys(
        (row["rows"], row["features"], row["classes"]) for row in record.rows if row["task"] == "synthetic"
    )
    body = []
    for rows, features, classes in sizes:
        where = {"task": "synthetic", "rows": rows, "features": features, "classes": classes}
        found = [
            (record.value(method=m, metric="seconds", **where), record.value(method=m, metric="accuracy", **where))
            for m in ("ExactClassifier()", "LogisticRegression")
        ]
        ours, theirs = found
        body.append([f"{rows:,} × {features}".replace(",", " "), str(classes), f"{ours[0]:.2f} s", f"{theirs[0]:.2f} s",
                     f"{ours[0] / theirs[0]:.0f}", f"{100 * ours[1]:.2f}", f"{100 * theirs[1]:.2f}"])  # fmt: skip
    columns = ["rows × features", "classes", "EXACT", "LogisticRegression", "ratio", "EXACT: train %", "theirs"]
    return Table("Time on synthetic rows", columns, body, "One thread, float32, default settings.")
