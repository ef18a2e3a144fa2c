r"""The competitors: other losses for classification, with the conventions of ``CrossEntropyLoss`` and `ExactLoss`.

Each is a function of a sample's gaps d_i = x_y - x_i, or of its probability p = softmax(x)_y. `weight`,
`ignore_index` and `reduction` are as in ``torch.nn.CrossEntropyLoss``; an empty mean is 0. Targets are class indices;
`GeneralizedCrossEntropyLoss`, an `ExactLoss`, takes class probabilities too.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from expacc import _checks
from expacc.functional import Reduction, check_range
from expacc.losses import ExactLoss


class _Baseline(nn.Module):
    """Checks, ignored targets, weights and the reduction; a subclass says what a sample's loss is."""

    weight: Tensor | None
    numbers: ClassVar[tuple[str, ...]] = ()  # the attributes that a subclass adds, as its repr shows them

    def __init__(
        self, *, weight: Tensor | None = None, ignore_index: int = -100, reduction: Reduction = "mean"
    ) -> None:
        super().__init__()
        _checks.check_weight_form(weight)
        _checks.check_ignore_index(ignore_index)
        _checks.check_choice("reduction", reduction, _checks.REDUCTIONS)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits (C,), (N, C) or (N, C, d1, …) and class indices."""
        _checks.check_logits(logits)
        if _checks.check_target(logits, target, self.ignore_index):
            raise ValueError(f"target must hold class indices here, got {target.dtype}: write target.long().")
        _checks.check_weight(self.weight, logits)
        target = target.long()
        valid = target != self.ignore_index
        check_range(target, valid, _checks.class_count(logits), self.ignore_index)
        safe = torch.where(valid, target, 0)
        rows = logits.movedim(1, -1) if logits.ndim > 1 else logits
        rows = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
        rows = torch.where(valid.unsqueeze(-1), rows, torch.zeros_like(rows))
        scale = torch.ones_like(rows[..., 0]) if self.weight is None else self.weight.to(rows.dtype)[safe]
        scale = torch.where(valid, scale, torch.zeros_like(scale))
        loss = scale * self._of_rows(rows, safe.unsqueeze(-1))
        if self.reduction == "none":
            return loss.to(logits.dtype)
        total = scale.sum() if self.reduction == "mean" else torch.ones_like(loss.sum())
        return (loss.sum() / torch.where(total == 0, torch.ones_like(total), total)).to(logits.dtype)

    def _of_rows(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss (...) of rows x (..., C) with targets y (..., 1)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Show the loss's own numbers, and what else differs from the defaults."""
        shown = [f"{name}={getattr(self, name)!r}" for name in self.numbers]
        if self.weight is not None:
            shown.append(f"weight of {len(self.weight)} classes")
        if self.ignore_index != -100:
            shown.append(f"ignore_index={self.ignore_index}")
        if self.reduction != "mean":
            shown.append(f"reduction={self.reduction!r}")
        return ", ".join(shown)


def _gaps(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return d_i = x_y - x_i (..., C) and a mask of the competitors."""
    others = torch.ones_like(x, dtype=torch.bool).scatter(-1, y, False)
    return x.gather(-1, y) - x, others


class HingeLoss(_Baseline):
    r"""The multi-class hinge loss: max(0, r - (x_y - max_{i≠y} x_i)), or the sum over the competitors.

    Two classes with margin 1 give the binary hinge loss of f = x_1 - x_0.

    Args:
        margin: r ≥ 0.
        form: "max" (Crammer and Singer, JMLR 2, 2001) or "sum" (Weston and Watkins, ESANN 1999).
        weight, ignore_index, reduction: as in CrossEntropyLoss.

    >>> HingeLoss(margin=1.0)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([0]))
    tensor(0.5000)
    """

    numbers = ("margin", "form")

    def __init__(self, *, margin: float = 1.0, form: str = "max", **options: Any) -> None:
        super().__init__(**options)
        _checks.check_not_negative("margin", margin, "1.0")
        _checks.check_choice("form", form, ("max", "sum"))
        self.margin, self.form = margin, form

    def _of_rows(self, x: Tensor, y: Tensor) -> Tensor:
        d, others = _gaps(x, y)
        lack = torch.where(others, (self.margin - d).clamp(min=0.0), 0.0)
        return lack.amax(-1) if self.form == "max" else lack.sum(-1)


class SigmoidLoss(_Baseline):
    r"""The sigmoid relaxation of the 0-1 error: σ(-β·(x_y - max_{i≠y} x_i)).

    β → ∞ is the 0-1 error; two classes give 1 - p at β = 1. Mason, Baxter, Bartlett and Frean, NIPS 1999; Nguyen and
    Sanner, ICML 2013.

    Args:
        beta: β > 0, the steepness.
        weight, ignore_index, reduction: as in CrossEntropyLoss.

    >>> SigmoidLoss()(torch.tensor([[1.0, 1.0]]), torch.tensor([0]))
    tensor(0.5000)
    """

    numbers = ("beta",)

    def __init__(self, *, beta: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        _checks.check_number("beta", beta, "1.0", positive=True)
        self.beta = beta

    def _of_rows(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(-self.beta * _lead(x, y))


class PolynomialLoss(_Baseline):
    r"""The cubic relaxation of the 0-1 error: a smooth step from 1 at a lead of -w to 0 at a lead of w.

    With t = d/w in [-1, 1]: (2 - 3t + t³)/4, the one cubic that joins 1 and 0 without a kink; outside, 1 or 0. w → 0 is
    the 0-1 error. After the smooth relaxations of Nguyen and Sanner, ICML 2013.

    Args:
        width: w > 0.
        weight, ignore_index, reduction: as in CrossEntropyLoss.

    >>> PolynomialLoss(width=2.0)(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    tensor(0.1562)
    """

    numbers = ("width",)

    def __init__(self, *, width: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        _checks.check_number("width", width, "1.0", positive=True)
        self.width = width

    def _of_rows(self, x: Tensor, y: Tensor) -> Tensor:
        t = (_lead(x, y) / self.width).clamp(-1.0, 1.0)
        return (2.0 - 3.0 * t + t**3) / 4.0


def _lead(x: Tensor, y: Tensor) -> Tensor:
    """Return x_y - max_{i≠y} x_i (...); +inf where nobody competes."""
    d, others = _gaps(x, y)
    return torch.where(others, d, torch.inf).amin(-1)


class Poly1CrossEntropyLoss(_Baseline):
    r"""Cross-entropy plus ε·(1 - p): PolyLoss with one term changed. Leng et al., ICLR 2022.

    ε = 0 is cross-entropy.

    Args:
        epsilon: ε.
        weight, ignore_index, reduction: as in CrossEntropyLoss.

    >>> Poly1CrossEntropyLoss(epsilon=2.0)(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor(1.6931)
    """

    numbers = ("epsilon",)

    def __init__(self, *, epsilon: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        _checks.check_number("epsilon", epsilon, "1.0")
        self.epsilon = epsilon

    def _of_rows(self, x: Tensor, y: Tensor) -> Tensor:
        log_p = torch.log_softmax(x, -1).gather(-1, y).squeeze(-1)
        return -log_p - self.epsilon * torch.expm1(log_p)


class GeneralizedCrossEntropyLoss(ExactLoss):
    r"""(1 - p^q)/q with p = softmax(x)_y. Zhang and Sabuncu, NeurIPS 2018.

    A name for the Gumbel twin: ``ExactLoss(power=q, noise="gumbel", normalize=False)``.

    Args:
        power: q; 0 is cross-entropy, 1 half the mean absolute error.
        options: as in `ExactLoss`.

    >>> GeneralizedCrossEntropyLoss(power=0.7)(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor(0.5492)
    """

    def __init__(self, *, power: float = 0.7, **options: Any) -> None:
        super().__init__(power=power, noise="gumbel", normalize=False, **options)


class BetaBernoulliLoss(_Baseline):
    r"""The Beta-Bernoulli relaxation: -log(w·θ + (1 - w)·σ(γ·d)), d the lead over the best competitor.

    The posterior mean of a Beta prior θ and a steep logistic: bounded by -log(w·θ), a smooth 0-1 loss. w → 0, γ = 1 is
    the binary cross-entropy of the lead. Hasan and Pal, "A New Smooth Approximation to the Zero One Loss with a
    Probabilistic Interpretation", 2015 (arXiv:1511.05643). That is of two classes; the lead makes it one of many.

    Args:
        prior_weight: w in (0, 1), the weight of the prior, (α + β)/(α + β + n).
        prior: θ in (0, 1), the prior mean, α/(α + β).
        gamma: γ > 0, the steepness.
        weight, ignore_index, reduction: as in CrossEntropyLoss.

    >>> BetaBernoulliLoss(prior_weight=0.5)(torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
    tensor(0.6931)
    """

    numbers = ("prior_weight", "prior", "gamma")

    def __init__(self, *, prior_weight: float = 0.1, prior: float = 0.5, gamma: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        _checks.check_inside("prior_weight", prior_weight, "0.1")
        _checks.check_inside("prior", prior, "0.5")
        _checks.check_number("gamma", gamma, "1.0", positive=True)
        self.prior_weight, self.prior, self.gamma = prior_weight, prior, gamma

    def _of_rows(self, x: Tensor, y: Tensor) -> Tensor:
        # In logs: at a lead of -300 the logistic is 0 in float32, and a tiny w·θ with it.
        own = torch.nn.functional.logsigmoid(self.gamma * _lead(x, y)) + math.log1p(-self.prior_weight)
        prior = math.log(self.prior_weight) + math.log(self.prior)
        return -torch.logaddexp(own, torch.full_like(own, prior))
