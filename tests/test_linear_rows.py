"""The linear solver's rows against the definition: errors and slopes, live, met, sure and hopeless competitors."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from expacc import expected_error, log_expected_accuracy
from expacc.linear.rows import expected_errors, log_losses

CLASSES = pytest.mark.parametrize("classes", [2, 3, 5, 9, 40])
MARGINS = pytest.mark.parametrize("margin", [0.5, 5.0, math.inf], ids=lambda r: f"r={r}")
NOISES = pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
SPREADS = pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 40.0], ids=lambda s: f"spread={s}")


def draw(classes: int, spread: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(classes)
    scores = spread * torch.randn(60, classes - 1, generator=generator, dtype=torch.float64)
    return scores, torch.randint(classes, (60,), generator=generator)


def truth(function: Any, scores: Tensor, target: Tensor, sigma: float, margin: float, noise: Any) -> Any:
    scores = scores.clone().requires_grad_()
    value = function(
        torch.nn.functional.pad(scores, (1, 0)),
        target,
        sigma,
        margin=None if margin == math.inf else margin,
        noise=noise,
    )
    value.sum().backward()
    return value.detach(), scores.grad


@CLASSES
@MARGINS
@NOISES
@SPREADS
@pytest.mark.parametrize("sigma", [0.1, 1.0, 3.0], ids=lambda s: f"sigma={s}")
def test_errors_and_slopes_are_the_definition_s(
    classes: int, margin: float, noise: str, spread: float, sigma: float
) -> None:
    scores, target = draw(classes, spread)
    error, slopes = expected_errors(scores, target, sigma, margin, noise)
    want, want_slopes = truth(expected_error, scores, target, sigma, margin, noise)
    torch.testing.assert_close(error, want, rtol=0, atol=2e-8)
    torch.testing.assert_close(slopes, want_slopes, rtol=0, atol=4e-8 / sigma)


@CLASSES
@MARGINS
@SPREADS
def test_log_losses_are_the_twin_s(classes: int, margin: float, spread: float) -> None:
    scores, target = draw(classes, spread)
    loss, slopes = log_losses(scores, target, 0.7, margin)
    want, want_slopes = truth(log_expected_accuracy, scores, target, 0.7, margin, "gumbel")
    torch.testing.assert_close(loss, -want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slopes, -want_slopes, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gap", [0.0, 2.0, -2.0, 8.0])
def test_two_classes_are_the_closed_form(gap: float) -> None:
    error, _ = expected_errors(torch.tensor([[gap]], dtype=torch.float64), torch.tensor([1]), 0.5, math.inf, "gaussian")
    assert error.item() == pytest.approx(0.5 * math.erfc(gap / 0.5 / 2), rel=1e-14)


def test_a_settled_row_has_no_slope() -> None:
    scores = torch.tensor([[5.0, -5.0], [-9.0, 9.0]], dtype=torch.float64)
    error, slopes = expected_errors(scores, torch.tensor([1, 1]), 0.1, 1.0, "gaussian")
    assert torch.equal(slopes, torch.zeros_like(slopes))
    torch.testing.assert_close(error, torch.tensor([0.0, 1.0], dtype=torch.float64), rtol=0, atol=1e-10)


def test_a_thousand_classes_meet_the_definition() -> None:
    scores = torch.randn(4, 999, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([0, 5, 500, 999])
    error, slopes = expected_errors(scores, target, 1.0, math.inf, "gaussian")
    want, want_slopes = truth(expected_error, scores, target, 1.0, math.inf, "gaussian")
    torch.testing.assert_close(error, want, rtol=0, atol=1e-7)
    torch.testing.assert_close(slopes, want_slopes, rtol=0, atol=1e-7)
