"""Train classifiers for accuracy itself: `ExactLoss` in place of ``CrossEntropyLoss``.

The public names, imported when first used: the command line answers `--help` without waiting for torch.
"""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expacc.attachment import Attachment, attach
    from expacc.baselines import (
        BetaBernoulliLoss,
        GeneralizedCrossEntropyLoss,
        HingeLoss,
        Poly1CrossEntropyLoss,
        PolynomialLoss,
        SigmoidLoss,
    )
    from expacc.functional import (
        argmax_probabilities,
        exact_loss,
        expected_accuracy,
        expected_error,
        log_expected_accuracy,
    )
    from expacc.linear import ExactClassifier
    from expacc.losses import ExactLoss
    from expacc.normalizer import GradientNormalizer
    from expacc.schedules import (
        ConstantPower,
        ConstantSigma,
        CosinePower,
        CosineSigma,
        ExponentialPower,
        ExponentialSigma,
        LinearPower,
        LinearSigma,
    )

__all__ = [
    "Attachment",
    "BetaBernoulliLoss",
    "ConstantPower",
    "ConstantSigma",
    "CosinePower",
    "CosineSigma",
    "ExactClassifier",
    "ExactLoss",
    "ExponentialPower",
    "ExponentialSigma",
    "GeneralizedCrossEntropyLoss",
    "GradientNormalizer",
    "HingeLoss",
    "LinearPower",
    "LinearSigma",
    "Poly1CrossEntropyLoss",
    "PolynomialLoss",
    "SigmoidLoss",
    "argmax_probabilities",
    "attach",
    "exact_loss",
    "expected_accuracy",
    "expected_error",
    "log_expected_accuracy",
]

_HOMES = {
    "Attachment": "attachment",
    "ExactClassifier": "linear",
    "ExactLoss": "losses",
    "GradientNormalizer": "normalizer",
    "attach": "attachment",
}


def _home(name: str) -> str:
    """Return the module of a public name."""
    if name in _HOMES:
        return _HOMES[name]
    if name.endswith(("Sigma", "Power")):
        return "schedules"
    return "baselines" if name.endswith("Loss") else "functional"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        nearest = difflib.get_close_matches(name, __all__, 3, 0.4) or __all__
        raise AttributeError(f"module 'expacc' has no attribute {name!r}; near to it: {', '.join(nearest)}")
    value = globals()[name] = getattr(importlib.import_module(f"expacc.{_home(name)}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
