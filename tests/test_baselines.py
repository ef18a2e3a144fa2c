"""The competitors: each against its formula, the limits it has, and CrossEntropyLoss's conventions."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from expacc import (
    BetaBernoulliLoss,
    ExactLoss,
    GeneralizedCrossEntropyLoss,
    HingeLoss,
    Poly1CrossEntropyLoss,
    PolynomialLoss,
    SigmoidLoss,
)

X = 2.0 * torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3, 1, 0, 2])
MAKES = {
    "hinge": HingeLoss,
    "hinge-sum": lambda **o: HingeLoss(form="sum", **o),
    "sigmoid": SigmoidLoss,
    "polynomial": lambda **o: PolynomialLoss(width=3.0, **o),
    "beta-bernoulli": BetaBernoulliLoss,
    "poly1": Poly1CrossEntropyLoss,
    "gce": GeneralizedCrossEntropyLoss,
}


def by_hand(name: str, row: list[float], y: int) -> float:
    """Return the loss of one row, from its formula, in plain Python."""
    others = [v for i, v in enumerate(row) if i != y]
    lead = row[y] - max(others)
    p = math.exp(row[y]) / sum(map(math.exp, row))
    t = min(max(lead / 3.0, -1.0), 1.0)
    return {
        "hinge": max(0.0, 1.0 - lead),
        "hinge-sum": sum(max(0.0, 1.0 - row[y] + v) for v in others),
        "sigmoid": 1.0 / (1.0 + math.exp(lead)),
        "polynomial": 0.25 * (2.0 - 3.0 * t + t**3),
        "beta-bernoulli": -math.log(0.1 * 0.5 + 0.9 / (1.0 + math.exp(-lead))),
        "poly1": -math.log(p) + 1.0 - p,
        "gce": (1.0 - p**0.7) / 0.7,
    }[name]


@pytest.mark.parametrize("name", MAKES)
def test_the_formula(name):
    want = [by_hand(name, row, y) for row, y in zip(X.tolist(), Y.tolist(), strict=True)]
    got = MAKES[name](reduction="none")(X, Y)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", MAKES)
def test_the_gradient(name):
    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: MAKES[name](reduction="none")(v, Y), (x,))


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_ignored_targets_and_reductions(name, reduction):
    """As cross_entropy: the mean divides by the weights of the targets that count."""
    weight, target = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64), Y.clone()
    target[3] = -100
    each = MAKES[name](reduction="none")(X, Y) * weight[Y]
    each[3] = 0.0
    total = weight[Y].sum() - weight[Y[3]]
    want = {"none": each, "sum": each.sum(), "mean": each.sum() / total}[reduction]
    torch.testing.assert_close(MAKES[name](reduction=reduction, weight=weight)(X, target), want)


@pytest.mark.parametrize("name", MAKES)
def test_shapes_dtypes_and_empty_batches(name):
    loss = MAKES[name](reduction="none")
    flat = loss(X[:6], Y[:6])
    images = X[:6].view(3, 2, 4).movedim(-1, 1)
    torch.testing.assert_close(loss(images, Y[:6].view(3, 2)), flat.view(3, 2))
    torch.testing.assert_close(loss(X[0], Y[0]), flat[0])
    assert loss(X[:6].bfloat16(), Y[:6]).dtype == torch.bfloat16
    empty = MAKES[name]()(X[:0].requires_grad_(), Y[:0])
    assert empty.item() == 0.0
    empty.backward()


@pytest.mark.parametrize("name", MAKES)
def test_an_ignored_row_may_hold_anything(name):
    x = X.clone()
    x[2] = math.nan
    x.requires_grad_()
    target = torch.where(torch.arange(7) == 2, -100, Y)
    MAKES[name]()(x, target).backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[2] == 0.0).all()


def test_limits():
    """Poly1 with ε = 0 and GCE with q = 0 are cross-entropy; two classes: binary hinge, sigmoid and logistic."""
    torch.testing.assert_close(Poly1CrossEntropyLoss(epsilon=0.0)(X, Y), cross_entropy(X, Y))
    torch.testing.assert_close(GeneralizedCrossEntropyLoss(power=0.0)(X, Y), cross_entropy(X, Y))
    torch.testing.assert_close(
        GeneralizedCrossEntropyLoss()(X, Y), ExactLoss(power=0.7, noise="gumbel", normalize=False)(X, Y)
    )
    f, y = X[:, 0], Y % 2
    two, sign = torch.stack([torch.zeros_like(f), f], -1), 2.0 * y - 1.0
    torch.testing.assert_close(HingeLoss()(two, y), (1.0 - sign * f).clamp(min=0.0).mean())
    torch.testing.assert_close(HingeLoss(form="sum")(two, y), HingeLoss()(two, y))
    torch.testing.assert_close(SigmoidLoss(beta=2.0)(two, y), torch.sigmoid(-2.0 * sign * f).mean())
    torch.testing.assert_close(BetaBernoulliLoss(prior_weight=1e-12)(two, y), cross_entropy(two, y))


@pytest.mark.parametrize("prior", [0.5, 1e-20], ids=["half", "tiny"])
@pytest.mark.parametrize("lead", [-300.0, -1e4, 300.0])
def test_beta_bernoulli_far_away(lead, prior):
    """Also where the logistic and w·θ are 0 in float32: -log(w·θ) far below, -log(1 - w) far above."""
    loss, x = BetaBernoulliLoss(prior_weight=1e-30, prior=prior), torch.tensor([[lead, 0.0]], requires_grad=True)
    value = loss(x, torch.tensor([0]))
    value.backward()
    logistic = math.exp(lead) if lead < 0 else 1.0
    assert value.item() == pytest.approx(-math.log(1e-30 * prior + logistic), rel=1e-6)
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (HingeLoss(), "HingeLoss(margin=1.0, form='max')"),
        (SigmoidLoss(beta=2), "SigmoidLoss(beta=2)"),
        (PolynomialLoss(reduction="sum"), "PolynomialLoss(width=1.0, reduction='sum')"),
        (
            BetaBernoulliLoss(ignore_index=3),
            "BetaBernoulliLoss(prior_weight=0.1, prior=0.5, gamma=1.0, ignore_index=3)",
        ),
        (Poly1CrossEntropyLoss(weight=torch.ones(2)), "Poly1CrossEntropyLoss(epsilon=1.0, weight of 2 classes)"),
    ],
    ids=["hinge", "sigmoid", "polynomial", "beta-bernoulli", "poly1"],
)
def test_a_loss_shows_its_numbers(loss, shown):
    assert repr(loss) == shown


@pytest.mark.parametrize("make", [SigmoidLoss, PolynomialLoss], ids=["sigmoid", "polynomial"])
def test_relaxations_become_the_error(make):
    steep = make(beta=1e4) if make is SigmoidLoss else make(width=1e-4)
    assert steep(X, Y).item() == pytest.approx((X.argmax(1) != Y).double().mean().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HingeLoss(form="mean"), "form must be one of 'max', 'sum', got 'mean'"),
        (lambda: HingeLoss(margin=math.inf), "margin must be finite"),
        (lambda: SigmoidLoss(beta=0.0), "beta must be positive"),
        (lambda: PolynomialLoss(width=-1.0), "width must be positive"),
        (lambda: HingeLoss(margin=-1), "margin must not be negative, got -1: write for example margin=1.0"),
        (lambda: BetaBernoulliLoss(prior_weight=1.0), r"prior_weight must lie in \(0, 1\), got 1.0: .*=0.1"),
        (lambda: BetaBernoulliLoss(prior_weight=0.0), r"prior_weight must lie in \(0, 1\), got 0.0: .*=0.1"),
        (lambda: BetaBernoulliLoss(prior=0), r"prior must lie in \(0, 1\), got 0: .*=0.5"),
        (lambda: HingeLoss(reduction="max"), "reduction must be one of"),
        (lambda: HingeLoss()(X, X.softmax(-1)), "target must hold class indices here"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_target_out_of_range_is_named():
    with pytest.raises(IndexError, match=r"target\[3\] is 9, outside 0 … 3"):
        HingeLoss()(X, torch.tensor([0, 1, 2, 9, 1, 0, 2]))
