"""normalize="cap": the logits as they are while their spread is at most 1, normalised beyond."""

from typing import Any

import pytest
import torch
from torch import Tensor

from expacc import ExactLoss, exact_loss

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])
NOISES = pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
TARGET = torch.arange(40) % 6


def logits_of(spread: float) -> Tensor:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))
    return (x - x.mean()) / x.std() * spread + 3.0


def value_and_grad(x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    value = exact_loss(x, TARGET, 0.7, **options)
    (value * torch.linspace(0.5, 1.5, len(value))).sum().backward()
    assert x.grad is not None
    return value.detach(), x.grad


@BACKENDS
@NOISES
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.99])
def test_a_small_spread_changes_nothing(backend: Any, noise: Any, spread: float) -> None:
    capped, raw = (
        value_and_grad(logits_of(spread), normalize=mode, noise=noise, backend=backend) for mode in ("cap", False)
    )
    assert torch.equal(capped[0], raw[0])
    torch.testing.assert_close(capped[1], raw[1], rtol=1e-6, atol=1e-9)


@BACKENDS
@NOISES
@pytest.mark.parametrize("spread", [1.01, 3.0, 1e6])
def test_a_large_spread_is_normalised(backend: Any, noise: Any, spread: float) -> None:
    capped, normalised = (
        value_and_grad(logits_of(spread), normalize=mode, noise=noise, backend=backend) for mode in ("cap", True)
    )
    assert torch.equal(capped[0], normalised[0])
    assert torch.equal(capped[1], normalised[1])


@BACKENDS
def test_the_value_is_continuous_where_the_cap_sets_in(backend: Any) -> None:
    below, above = (value_and_grad(logits_of(s), normalize="cap", backend=backend)[0] for s in (0.99999, 1.00001))
    torch.testing.assert_close(below, above, rtol=2e-5, atol=1e-6)


def test_beyond_the_cap_a_louder_network_gains_nothing() -> None:
    loss = ExactLoss(normalize="cap", sigma=0.7)
    torch.testing.assert_close(loss(logits_of(2.0), TARGET), loss(logits_of(200.0), TARGET), rtol=1e-4, atol=0)
    assert loss(logits_of(0.5), TARGET) != loss(logits_of(0.25), TARGET)


@BACKENDS
def test_a_nan_below_the_cap_stays_in_its_row(backend: Any) -> None:
    x = logits_of(0.5)
    x[3, 0] = torch.nan
    x.requires_grad_()
    exact_loss(x, TARGET, normalize="cap", backend=backend).nansum().backward()
    assert x.grad is not None
    assert x.grad[torch.arange(40) != 3].isfinite().all()


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_derivatives_know_the_cap(spread: float) -> None:
    def loss(x: Tensor) -> Tensor:
        return exact_loss(x, TARGET[:4], normalize="cap")

    x = logits_of(spread)[:4].double().requires_grad_()
    assert torch.autograd.gradcheck(loss, x, check_forward_ad=True, atol=1e-6)
    assert torch.autograd.gradgradcheck(loss, x, atol=1e-6)
