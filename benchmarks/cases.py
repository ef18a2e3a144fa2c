"""The certified cases as the accuracy benchmark needs them: gaps in double precision beside their proven integrals."""

import importlib.util
import json
import sys
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from benchmarks import CHECKOUT

QUANTITIES = ("P", "1 − P", "gradient")
# What counts, as in the contract: below, the double itself has no room for a relative error.
LEAST = {"P": 1e-300, "1 − P": 1e-30, "gradient": 1e-30}
# The reference takes seconds a row at 100 000 classes, so five rows stand for the 53 certified ones: those with
# the largest errors at 48 nodes (of the narrow flank, "lead", two: one for the gradient, one for P).
CHOSEN = {
    100_000: (
        "random0.3-C100000",
        "lead3-equal-C100000",
        "lead4-equal-C100000",
        "two-3x4999-5-C100000",
        "mixture2-C100000",
    )
}


def _load_families() -> ModuleType:
    """Import tests/families.py by its path: the tests are no package, and must not be one for this."""
    if "families" not in sys.modules:
        spec = importlib.util.spec_from_file_location("families", CHECKOUT / "tests" / "families.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["families"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["families"]


@dataclass(frozen=True)
class Truth:
    """One certified row: its gaps m (C − 1), what is proven of it, and how well.

    Args:
        logits, target, sigma, margin: the row as a user hands it over; the logits are float32 values.
        live: the competitors whose gap is below the margin; all without one.
        value: P and 1 − P.
        slope: competitor → ∂P/∂m_i, for some of the live ones, the largest of the row among them.
        total: Σ_i ∂P/∂m_i over the live competitors.
        radius: the largest relative radius of these enclosures.
    """

    name: str
    logits: np.ndarray
    target: int
    sigma: float
    margin: float | None
    m: np.ndarray
    live: np.ndarray
    value: dict[str, float]
    slope: dict[int, float]
    total: float
    radius: float

    def errors(self, p: float, q: float, slope: np.ndarray | None) -> dict[str, float]:
        """Return quantity → relative error, of those that this row is asked for.

        Gradient, given as ∂P/∂m or as −σ·∂P/∂mu of the competitors: each one's error over the row's largest entry, and
        that of the true class, the sum over the live ones, relative; the larger of the two.
        """
        found = {"P": p, "1 − P": q}
        errors = {key: abs(found[key] / true - 1) for key, true in self.value.items() if true >= LEAST[key]}
        largest = max(self.slope.values(), default=0.0)
        if slope is not None and largest >= LEAST["gradient"]:
            each = max(abs(slope[i] - true) for i, true in self.slope.items()) / largest
            errors["gradient"] = float(max(each, abs(slope[self.live].sum() / self.total - 1)))
        return errors


def load_truth(classes: int, limit: int | None = None) -> list[Truth]:
    """Return the certified rows of a number of classes, evenly thinned to `limit`."""
    families = _load_families()
    certified = json.loads((CHECKOUT / "tests" / "reference" / "truth.json").read_text(encoding="utf-8"))
    wanted = [case for case in families.cases() if case.classes == classes and case.name in certified]
    if classes in CHOSEN:
        wanted = [case for case in wanted if case.name in CHOSEN[classes]]
    if limit is not None:
        wanted = wanted[:: -(-len(wanted) // limit)]
    return [_truth(families, case, certified[case.name]) for case in wanted]


def _truth(families: ModuleType, case, record: dict) -> Truth:
    row, target = families.scores(case)
    gap = float(row[target]) - np.delete(row.astype(np.float64), target)
    live = np.ones(len(gap), bool) if case.margin is None else gap < case.margin
    value = {key: float(record[stored][0]) for key, stored in zip(QUANTITIES, ("P", "Q"), strict=False)}
    # the target's own column is left out of m
    slope = {int(i) - (int(i) > target): float(entry[0]) for i, entry in record["G"].items()}
    radius = max(entry[1] for entry in (record["P"], record["Q"], record["live"], *record["G"].values()))
    return Truth(
        name=case.name,
        logits=row,
        target=target,
        sigma=case.sigma,
        margin=case.margin,
        m=families.margin_terms(case, row, target),
        live=live,
        value=value,
        slope=slope,
        total=float(record["live"][0]),
        radius=radius,
    )
