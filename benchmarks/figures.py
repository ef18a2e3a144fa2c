"""The accuracy figure: one panel per quantity and number of classes, all on the same axes."""

from pathlib import Path
from typing import Any

from benchmarks.cases import QUANTITIES
from expacc.studies.records import Record
from expacc.studies.report import COLORS, figure, save_figure

BOTTOM, TOP = 1e-25, 300.0
# method → colour, marker, dash, label
CURVES: dict[str, tuple[str, str, Any, str]] = {
    "expacc": ("exact", "o", "-", "this package: equal steps over the support"),
    "Gauss–Hermite at the mode": ("cross-entropy", "s", "--", "Gauss–Hermite at the mode, scaled by its curvature"),
    "Gauss–Hermite at 0": ("hinge", "^", ":", "Gauss–Hermite at fixed nodes"),
    "Genz": ("other", "x", "none", "Genz, 1, 16, 256 samples"),
}
EPS = 2.0**-52


def draw_accuracy(record: Record, folder: Path) -> list[Path]:
    """Draw the worst (line) and median (edge of the band) error against the nodes; save PNG and SVG."""
    classes = sorted({row["classes"] for row in record.rows})
    with figure(12.5, 8.2) as drawn:
        axes = drawn.subplots(len(QUANTITIES), len(classes), sharex=True, sharey=True, squeeze=False)
        for i, quantity in enumerate(QUANTITIES):
            for j, count in enumerate(classes):
                _panel(axes[i][j], [row for row in record.rows if row["classes"] == count], quantity)
            axes[i][0].set_ylabel(f"relative error of {'the gradient' if quantity == 'gradient' else quantity}")
        for j, count in enumerate(classes):
            axes[0][j].set_title(f"C = {count:,}".replace(",", " "))
            axes[-1][j].set_xlabel("nodes, or samples")
        # both lines are in every panel; named once, where no curve comes
        first = axes[0][0]
        first.text(300, EPS / 2, "float64's ε", ha="right", va="top", fontsize=9, color=COLORS["faint"])
        text = "certified radius"
        first.text(300, 1.6e-24, text, ha="right", va="bottom", fontsize=9, color=COLORS["faint"])
        handles, labels = _legend()
        drawn.legend(handles, labels, loc="outside lower center", ncols=3, handlelength=2.6, columnspacing=2.0)
        return save_figure(drawn, folder, "accuracy")


def _panel(ax, rows: list[dict], quantity: str) -> None:
    for method, (color, marker, dash, _) in CURVES.items():
        points = sorted(
            (row["nodes"], row["value"], row["median"])
            for row in rows
            if row["method"] == method and row.get("quantity") == quantity and row["value"] is not None
        )
        if not points:
            continue
        x = [point[0] for point in points]
        worst = [_clip(point[1]) for point in points]
        median = [_clip(point[2]) for point in points]
        ink = COLORS[color]
        line = {"linestyle": dash, "marker": marker, "markersize": 4 if marker != "x" else 6, "linewidth": 1.8}
        ax.plot(x, worst, color=ink, **line, zorder=4 if method == "expacc" else 3)
        if method != "Genz":
            ax.fill_between(x, median, worst, color=ink, alpha=0.13, linewidth=0, zorder=1)
    for row in rows:
        if row["method"].startswith("scipy") and row.get("quantity") == quantity:
            ax.axhline(_clip(row["value"]), color=COLORS["ink"], linestyle=(0, (1, 1.5)), linewidth=1.4, zorder=2)
        if row["method"] == "certified":
            ax.axhspan(BOTTOM / 10, row["value"], color=COLORS["faint"], alpha=0.45, linewidth=0)
    ax.axhline(EPS, color=COLORS["faint"], linewidth=0.8, zorder=0)
    ax.set(xscale="log", yscale="log", xlim=(0.8, 330), ylim=(BOTTOM, TOP))
    ax.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
    ax.set_yticks([10.0**-k for k in (0, 4, 8, 12, 16, 20, 24)])
    ax.minorticks_off()
    ax.grid(color=COLORS["faint"], alpha=0.25, linewidth=0.6)


def _clip(value: float) -> float:
    return min(max(value, EPS / 8), TOP / 5)  # a marker at the very edge would be cut


def _legend():
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list = []
    for color, marker, dash, _ in CURVES.values():
        handles.append(Line2D([], [], color=COLORS[color], marker=marker, linestyle=dash, markersize=5))
    handles.append(Line2D([], [], color=COLORS["ink"], linestyle=(0, (1, 1.5)), linewidth=1.4))
    handles.append(Patch(color=COLORS["faint"], alpha=0.45, linewidth=0))
    labels = [label for *_, label in CURVES.values()]
    return handles, [*labels, "scipy multivariate_normal.cdf", "radius of the certified truth"]
