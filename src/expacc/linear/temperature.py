"""The scale of the noise at which the scores are the likeliest: what `predict_proba` uses."""

import math

import torch
from torch import Tensor

from expacc.integrals.gumbel import UNIT_SIGMA

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def fit_temperature(scores: Tensor, target: Tensor, weight: Tensor, noise: str) -> float:
    """Return σ of least mean -log P, by golden section over log σ.

    By the Gumbel twin, which has a closed form; Gaussian noise takes the σ of the same standard deviation. -log softmax
    is convex in 1/σ, so there is one minimum. Separated rows have none: σ ends at the small end of what is looked at.

    Args:
        scores: (rows, classes - 1), of all classes but the first, whose score is 0.
        target: class indices.
        weight: of the rows, of sum 1.
        noise: "gaussian" or "gumbel".
    """
    full = torch.nn.functional.pad(scores, (1, 0))
    spread = float((weight @ (full - full.mean(1, keepdim=True)).square()).mean().sqrt())
    if not 0 < spread < math.inf:
        return 1.0

    def loss(log_sigma: float) -> float:
        logits = full * math.exp(-log_sigma)
        return float(weight @ torch.nn.functional.cross_entropy(logits, target, reduction="none"))

    low, high = math.log(spread) - math.log(100.0), math.log(spread) + math.log(1000.0)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > 1e-4:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = loss(right)
    sigma = math.exp((low + high) / 2)
    return sigma if noise == "gumbel" else sigma / UNIT_SIGMA
