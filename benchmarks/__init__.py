"""Benchmarks: one claim each, `python -m benchmarks NAME` from a checkout, a JSON record in results/."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "results"
DOCS = CHECKOUT / "docs"
FIGURES = DOCS / "figures"
