"""The heat maps of the defaults study: where the default stands against cross-entropy, and all losses by problem."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from expacc.studies import defaults_plan as plan
from expacc.studies.defaults_verdict import Row, Verdict, compare_cells, pair
from expacc.studies.report import COLORS, figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPAN = 5.0  # points at which the colours end


def draw(folder: Path, rows: Sequence[Row], verdict: Verdict) -> list[Path]:
    """Draw both maps into one figure, PNG and SVG.

    Args:
        folder: an existing folder.
        rows: of the record.
        verdict: of these rows.
    """
    cells: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        cells[row["problem"], row["optimizer"]].append(row)
    with figure(15, 2.2 + 0.34 * max(len(cells), len(plan.RECIPES))) as drawn:
        left, right = drawn.subplots(1, 2, width_ratios=[5, 9])
        _draw_rates(left, cells)
        image = _draw_losses(right, cells, list(verdict.losses))
        drawn.colorbar(image, ax=right, label="points above cross-entropy", extend="both", shrink=0.8)
        return save_figure(drawn, folder, "defaults")


def _draw_rates(axes: "Axes", cells: dict[tuple[str, str], list[Row]]) -> None:
    values = np.full((len(cells), 5), np.nan)
    for k, (problem, optimizer) in enumerate(cells):
        for name, rate, difference in compare_cells(cells[problem, optimizer]):
            if name == plan.DEFAULT:
                values[k, plan.RATES[optimizer].index(rate)] = 100 * difference
    labels = [f"{problem}  {optimizer}" for problem, optimizer in cells]
    _draw_map(axes, values, labels, ["lowest", "", "middle", "", "highest"])
    axes.set_title("The default, by learning rate\n(×: cross-entropy below half of its best)")


def _draw_losses(axes: "Axes", cells: dict[tuple[str, str], list[Row]], names: Sequence[str]) -> Any:
    problems = list(dict.fromkeys(problem for problem, _ in cells))
    names = [name for name in names if name != plan.REFERENCE]
    values = np.zeros((len(names), len(problems)))
    for k, problem in enumerate(problems):
        best = {
            (row["method"], row["optimizer"], row["seed"]): row["value"]
            for (where, _), cell in cells.items() if where == problem for row in cell if row["stage"] == "best"
        }  # fmt: skip
        for i, name in enumerate(names):
            pairs = [
                best[name, optimizer, seed] - best[plan.REFERENCE, optimizer, seed]
                for where, optimizer in cells if where == problem for seed in plan.SEEDS
            ]  # fmt: skip
            values[i, k] = 100 * pair(pairs)[0]
    image = _draw_map(axes, values, names, problems)
    axes.set_title("All losses, each at its own best rate\n(mean over optimizers and five seeds)")
    return image


def _draw_map(axes: "Axes", values: np.ndarray, labels: Sequence[str], columns: Sequence[str]) -> Any:
    image = axes.imshow(values, cmap="PuOr_r", vmin=-SPAN, vmax=SPAN, aspect="auto")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xticks(range(len(columns)), columns, rotation=20 if len(columns) > 5 else 0)
    for (i, k), value in np.ndenumerate(values):
        ink = "white" if abs(value) > 0.7 * SPAN else COLORS["ink"]
        axes.text(k, i, "×" if np.isnan(value) else f"{value:+.1f}", ha="center", va="center", color=ink, fontsize=9)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image
