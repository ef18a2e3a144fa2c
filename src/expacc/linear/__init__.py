"""The most accurate linear classifier on a table: `ExactClassifier`, a scikit-learn estimator, and its solvers."""

import importlib.util

if importlib.util.find_spec("sklearn") is None:
    raise ImportError(
        "ExactClassifier needs scikit-learn, part of the extra 'linear': in a checkout, "
        "pip install '.[linear]' -c constraints.txt"
    )

from expacc.linear.estimator import ExactClassifier

__all__ = ["ExactClassifier"]
