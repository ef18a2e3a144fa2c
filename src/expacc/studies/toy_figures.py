"""The figures of the toy study: the paper's Figure 1, its figure of sigma, and the five points of its appendix."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from expacc.studies.report import COLORS, figure, save_figure
from expacc.studies.toy import FIVE, THREE, Example, Outcome, describe_threshold, expected_accuracies

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MINUS = "\N{MINUS SIGN}"  # as matplotlib writes it on the axes
Outcomes = dict[str, list[Outcome]]
SIGMA_TINTS = ("#F3C9A6", "#EBA46C", "#DF7D33", "#B84E00")  # EXACT's colour, darker as sigma falls

LOSS_NAMES = {
    "EXACT": f"EXACT: expected mistakes, σ = {THREE.sigmas[1]:g}",
    "cross-entropy": "cross-entropy",
    "hinge": "hinge",
}


def draw_threshold(folder: Path, outcomes: Outcomes) -> list[Path]:
    """Draw Figure 1: the three points under each method's threshold, and the losses over the threshold."""
    ends = (-0.45, 1.35)
    b = np.linspace(*ends, 901)
    f = np.array(THREE.points)[:, None] - b
    gains = np.array(THREE.labels)[:, None] * f
    curves = {
        "EXACT": len(THREE.points)
        * (1 - expected_accuracies(THREE, torch.tensor(b, dtype=torch.float32), THREE.sigmas[1]).numpy()),
        "cross-entropy": np.log1p(np.exp(-gains)).sum(0),
        "hinge": np.maximum(0, 1 - gains).sum(0),
    }
    with figure(7.6, 6.2) as drawn:
        lanes, losses = drawn.subplots(2, 1, sharex=True, height_ratios=(1, 1.25))
        _draw_lanes(lanes, THREE, outcomes[THREE.name], ends, digits=3)
        lanes.set_title("Three points: only EXACT separates them")
        mistakes = ((f >= 0) != (np.array(THREE.labels)[:, None] > 0)).sum(0)
        losses.step(b, mistakes, where="mid", color=COLORS["faint"], linewidth=1.2, linestyle=":", label="mistakes")
        for (method, curve), style in zip(curves.items(), ("-", "--", "-."), strict=True):
            losses.plot(b, curve, style, color=COLORS[method.lower()], label=LOSS_NAMES[method])
        for outcome in outcomes[THREE.name]:
            low, high = outcome.thresholds or ends  # always there: the weight is 1
            color, level = COLORS[outcome.method.lower()], np.interp(low, b, curves[outcome.method])
            if low < high:
                losses.plot([low, high], [level, level], color=color, linewidth=6, solid_capstyle="round", alpha=0.45)
            else:
                losses.plot(low, level, "o", color=color, markersize=8, markeredgecolor="white", zorder=4)
        losses.set_title("What each loss says about the threshold, summed over the points")
        losses.set(xlabel="x and threshold b", ylabel="loss", xlim=ends, ylim=(-0.1, 4.4))
        losses.legend(loc="upper right", ncols=2)
        return save_figure(drawn, folder, "toy-threshold")


def draw_sigma(folder: Path, outcomes: Outcomes) -> list[Path]:
    """Draw the figure of sigma: expected accuracy over the threshold, and where its maximum goes as sigma falls."""
    with figure(7.6, 4.2) as drawn:
        axes = drawn.subplots()
        _draw_expected(axes, THREE, (-0.75, 1.75), (0.5, 0.25, 0.1, 0.05))
        axes.set_title("Three points: as σ falls, expected accuracy becomes accuracy")
        axes.set(xlabel="threshold b", ylim=(0.28, 1.04))
        axes.legend(loc="upper right", title="dot: maximum", alignment="left")
        return save_figure(drawn, folder, "toy-sigma")


def draw_weight(folder: Path, outcomes: Outcomes) -> list[Path]:
    """Draw the five points under each method's threshold, and the expected accuracy that leads EXACT there."""
    ends = (-13.0, 3.6)
    with figure(7.6, 6.2) as drawn:
        lanes, expected = drawn.subplots(2, 1, sharex=True, height_ratios=(1, 1.25))
        _draw_lanes(lanes, FIVE, outcomes[FIVE.name], ends, digits=2)
        lanes.set_title("Five points: 80% are within reach, and only EXACT reaches them")
        _draw_expected(expected, FIVE, ends, (0.6, 0.5, 0.3, 0.1))
        expected.set_title("EXACT's way there: the maximum moves into the gap as σ falls")
        expected.set(xlabel=f"x and threshold {MINUS}c/w, w > 0", xlim=ends, ylim=(0.28, 0.84))
        expected.legend(loc="upper left", title="dot: maximum", alignment="left", ncols=2)
        return save_figure(drawn, folder, "toy-weight")


def _draw_lanes(
    axes: "Axes", example: Example, outcomes: list[Outcome], ends: tuple[float, float], digits: int
) -> None:
    """Draw a lane for each method: what it calls 1 is shaded, its threshold is a bar, its mistakes are crossed out."""
    for height, outcome in zip((2, 1, 0), outcomes, strict=True):
        color = COLORS[outcome.method.lower()]
        low, high = outcome.thresholds or (ends[0], ends[0])
        axes.barh(height, ends[1] - high, left=high, height=0.56, color=color, alpha=0.16, linewidth=0)
        if outcome.thresholds is None:
            text, where = "w = 0: no threshold", ends[0]
        else:
            axes.barh(height, high - low, left=low, height=0.56, color=color, alpha=0.45, linewidth=0)
            axes.plot([low, low], [height - 0.34, height + 0.34], color=color, solid_capstyle="butt", linewidth=3)
            text, where = describe_threshold(outcome, digits).replace("-", MINUS), low
        nudge = 0.012 * (ends[1] - ends[0])
        axes.text(where + nudge, height + 0.3, text, color=color, va="bottom", fontsize=10)
        axes.text(ends[1] + nudge, height, f"{outcome.accuracy(example):.0%}", color=color, va="center", weight="bold")
        for x, y in zip(example.points, example.labels, strict=True):
            face = COLORS["ink"] if y > 0 else "white"
            axes.plot(x, height, "o", markersize=9, color=face, markeredgecolor=COLORS["ink"], markeredgewidth=1.4)
            if x in outcome.wrong(example):
                axes.plot(x, height, "x", markersize=17, color=COLORS["ink"], markeredgewidth=1.8)
    axes.set(yticks=(2, 1, 0), yticklabels=[outcome.method for outcome in outcomes], ylim=(-1.15, 2.75), xlim=ends)
    axes.tick_params(axis="both", length=0, labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    _draw_key(axes, ends)


def _draw_key(axes: "Axes", ends: tuple[float, float]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ink = {"color": COLORS["ink"], "linestyle": "", "markeredgewidth": 1.4}
    keys = [
        Line2D([], [], marker="o", markersize=8, markerfacecolor="white", label=f"label {MINUS}1", **ink),
        Line2D([], [], marker="o", markersize=8, label="label 1", **ink),
        Line2D([], [], marker="x", markersize=10, label="misclassified", **ink),
        Patch(facecolor=COLORS["faint"], alpha=0.3, label="called 1"),
    ]
    axes.legend(handles=keys, loc="lower center", ncols=4, columnspacing=1.6, handletextpad=0.4)


def _draw_expected(axes: "Axes", example: Example, ends: tuple[float, float], sigmas: tuple[float, ...]) -> None:
    b = torch.linspace(*ends, 801)
    tops = []
    for sigma, color in zip(sigmas, SIGMA_TINTS, strict=True):
        accuracy = expected_accuracies(example, b, sigma).numpy()
        top = int(accuracy.argmax())
        tops.append((float(b[top]), float(accuracy[top])))
        axes.plot(b, accuracy, color=color, label=f"σ = {sigma:g}")
    axes.plot(*zip(*tops, strict=True), color=COLORS["ink"], linewidth=1, linestyle=":", zorder=4)
    for (x, y), color in zip(tops, SIGMA_TINTS, strict=True):
        axes.plot(x, y, "o", color=color, markersize=8, markeredgecolor="white", zorder=5)
    for x in example.points:
        label = "a point" if x == example.points[0] else None
        axes.axvline(x, color=COLORS["faint"], linewidth=0.8, alpha=0.5, zorder=0, label=label)
    axes.set_ylabel("expected accuracy")
