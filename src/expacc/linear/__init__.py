"""The most accurate linear classifier on a table: `ExactClassifier`, a scikit-learn estimator, and its solvers."""

from expacc.linear.estimator import ExactClassifier

__all__ = ["ExactClassifier"]
