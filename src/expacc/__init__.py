"""expacc: train classifiers for accuracy itself."""

from expacc.functional import (
    argmax_probabilities,
    exact_loss,
    expected_accuracy,
    expected_error,
    log_expected_accuracy,
)
from expacc.losses import ExactLoss

__all__ = [
    "ExactLoss",
    "argmax_probabilities",
    "exact_loss",
    "expected_accuracy",
    "expected_error",
    "log_expected_accuracy",
]
