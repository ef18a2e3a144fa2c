"""Train classifiers for accuracy itself: `ExactLoss` in place of ``CrossEntropyLoss``.

The public names, imported when first used: the command line answers `--help` without waiting for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'expacc' has no attribute {name!r}; it has {', '.join(__all__)}")
    home = "expacc.losses" if name.endswith("Loss") else "expacc.functional"
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
