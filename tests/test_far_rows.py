"""Rows whose target stands far behind, on the kernel: finite however far, and the definition's numbers.

The contract ends at log P = -1e6, some 2000σ behind; beyond, the same tolerances are held against the definition.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from expacc import ExactLoss, attach, exact_loss, expected_accuracy, expected_error, log_expected_accuracy
from expacc.kernels import cpu

FLOAT64 = torch.float64


def _variants() -> Iterator[str]:
    for name in ("baseline", "avx2", "avx512"):
        try:
            with cpu.force_variant(name):
                yield name
        except ValueError:
            continue


VARIANTS = list(_variants())
POWERS = (0.0, 0.3, 1.0)
# In σ. On both sides of where the row kernels change their method; 65 554.125 was the first that gave NaN.
GAPS = (5.0, 30.0, 119.0, 121.0, 249.0, 251.0, 1999.0, 65554.125, 3e5, 1e6, 1e7, 1e12)


def _noise(rows: int, classes: int) -> Tensor:
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(classes), dtype=FLOAT64)


# How far the competitors (rows, classes - 1) are ahead of the target, in σ; the first is the furthest.
SHAPES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "together": lambda gap, n: gap.expand(-1, n),
    "crowd": lambda gap, n: gap - _noise(len(gap), n).abs(),
    "alone": lambda gap, n: torch.where(torch.arange(n) == 0, gap, _noise(len(gap), n)),
    "spread": lambda gap, n: gap * torch.linspace(1.0, 0.0, n, dtype=FLOAT64),
    "stairs": lambda gap, n: gap * 0.7 ** torch.arange(n),
    # where the integrand of the furthest alone has its mode, so that these decide its shape
    "edge": lambda gap, n: torch.where(torch.arange(n) == 0, gap, 0.5 * gap + _noise(len(gap), n)),
    "masked": lambda gap, n: torch.where(torch.arange(n) % 3 == 1, -math.inf, gap - torch.arange(n)),
}
SETTINGS = {
    "sigma 1": (1.0, None),
    "sigma 1e-3": (1e-3, None),
    "sigma 1e3": (1e3, None),
    "sigma 0.01 margin 0.5": (0.01, 0.5),
    "sigma 1 margin -50": (1.0, -50.0),
}


def make_rows(shape: str, classes: int, sigma: float = 1.0, gaps: tuple[float, ...] = GAPS) -> tuple[Tensor, Tensor]:
    """Return float32 scores, a row per gap, and targets all over the row."""
    ahead = SHAPES[shape](torch.tensor(gaps, dtype=FLOAT64)[:, None], classes - 1)
    target = torch.arange(len(gaps)) * 7 % classes
    x = torch.zeros(len(gaps), classes, dtype=FLOAT64)
    others = torch.arange(classes).expand_as(x)[torch.arange(classes) != target[:, None]].view(len(gaps), -1)
    return x.scatter(1, others, ahead * sigma).float(), target


def evaluate(backend: str, x: Tensor, target: Tensor, sigma: float, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses and their gradients in the scores and in sigma; the reference's from float64 on."""
    x = (x.double() if backend == "reference" else x.clone()).requires_grad_()
    sigmas = torch.full(target.shape, sigma, dtype=FLOAT64, requires_grad=True)
    loss = exact_loss(x, target, sigmas, normalize=False, backend=backend, **options)  # type: ignore[arg-type]
    return loss.detach().double(), *(g.double() for g in torch.autograd.grad(loss.sum(), (x, sigmas)))


def assert_agrees(x: Tensor, target: Tensor, sigma: float, slack: Tensor | float = 0.0, **options: Any) -> None:
    """Hold the kernel to the float32 column against the definition; `slack` is added to the gradient's."""
    value, grad, sigma_grad = evaluate("cpu", x, target, sigma, **options)
    want, slope, sigma_slope = evaluate("reference", x, target, sigma, **options)
    torch.testing.assert_close(value, want, rtol=1e-5, atol=0.0)
    assert torch.isfinite(grad).all()
    own = torch.nn.functional.one_hot(target, x.shape[1]).bool()
    largest = slope.masked_fill(own, 0.0).amax(1)
    counts = largest * sigma >= 1e-30
    assert (grad[~counts].abs() * sigma <= 1e-29).all()
    tolerance = torch.as_tensor(3e-5 + slack).expand_as(largest)
    errors = (grad - slope).masked_fill(own, 0.0).abs().amax(1)
    assert (errors <= tolerance * largest)[counts].all(), (errors / largest)[counts]
    errors = ((grad - slope)[own] / slope[own]).abs()
    assert (errors <= tolerance)[counts].all(), errors[counts]
    errors = (sigma_grad / sigma_slope - 1.0).abs()
    assert (errors <= tolerance)[counts].all(), errors[counts]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("classes", [2, 3, 10, 40, 41, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_gaussian(shape, classes, setting):
    sigma, margin = SETTINGS[setting]
    x, target = make_rows(shape, classes, sigma)
    for power in POWERS:
        assert_agrees(x, target, sigma, power=power, margin=None if margin is None else margin * sigma)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("classes", [2, 10, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_gumbel(shape, classes, setting):
    """Its exponents are floats, as cross-entropy's are, and lose |m|·2^-24: two of them make an entry."""
    sigma, margin = SETTINGS[setting]
    x, target = make_rows(shape, classes, sigma)
    margin = None if margin is None else margin * sigma
    for power in POWERS:
        slack = 2.0**-23 * torch.tensor(GAPS, dtype=FLOAT64)
        assert_agrees(x, target, sigma, slack, power=power, margin=margin, noise="gumbel")


@pytest.mark.parametrize("classes", [2, 10, 40])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_instruction_set(variant, shape, classes):
    x, target = make_rows(shape, classes)
    with cpu.force_variant(variant):
        assert_agrees(x, target, 1.0, power=0.0)


@pytest.mark.parametrize("function", [expected_accuracy, expected_error, log_expected_accuracy])
@pytest.mark.parametrize("gap", [65554.125, 1e7, 1e18, 1e30])
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_every_function_is_finite(classes, gap, function):
    x = torch.full((1, classes), gap)
    x[0, 0] = 0.0
    x.requires_grad_()
    value = function(x, torch.tensor([0]))
    (grad,) = torch.autograd.grad(value.sum(), x)
    assert torch.isfinite(grad).all()
    # log P itself, -gap²/4 and less, may be beyond float
    assert torch.isfinite(value).all() or (function is log_expected_accuracy and gap > 1e19)


@pytest.mark.parametrize("power", [*POWERS, -1.0])
@pytest.mark.parametrize("classes", [2, 10, 40, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_row_depends_on_its_neighbours(variant, classes, power):
    parts = [make_rows(shape, classes) for shape in SHAPES]
    x, target = (
        torch.cat(part)[torch.arange(7 * len(GAPS)) * 5 % (7 * len(GAPS))] for part in zip(*parts, strict=True)
    )
    with cpu.force_variant(variant):
        together = evaluate("cpu", x, target, 1.0, power=power)
        alone = [evaluate("cpu", x[i : i + 1], target[i : i + 1], 1.0, power=power) for i in range(len(x))]
    assert all(torch.equal(a, torch.cat(b)) for a, b in zip(together, zip(*alone, strict=True), strict=True))


@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
@pytest.mark.parametrize("classes", [3, 10, 41, 300])
@pytest.mark.parametrize("power", [-0.1, -1.0, -3.0])
def test_a_negative_power_beyond_float(power, classes, noise):
    """P^q beyond float is an infinite loss and gradient, but 0 where a class is too far behind to count, never NaN."""
    x = torch.zeros(6, classes)
    x[:, 1] = torch.tensor([12.0, 18.0, 30.0, 100.0, 1e3, 1e5])
    x[:, 2] = -3.0 * x[:, 1]
    value, grad, sigma_grad = evaluate("cpu", x, torch.zeros(6, dtype=torch.int64), 1.0, power=power, noise=noise)
    want, slope, sigma_slope = evaluate(
        "reference", x, torch.zeros(6, dtype=torch.int64), 1.0, power=power, noise=noise
    )
    torch.testing.assert_close(value, want.float().double(), rtol=1e-4, atol=0.0)
    assert not grad.isnan().any()
    assert not sigma_grad.isnan().any()
    assert (grad[:, 0] < 0).all()
    assert (grad[:, 2] < 1e-3 * grad[:, 1]).all()
    held = slope.isfinite().all(1) & sigma_slope.isfinite()  # the reference's float64
    torch.testing.assert_close(grad[held, :2], slope[held, :2].float().double(), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(sigma_grad[held], sigma_slope[held], rtol=1e-4, atol=0.0)


@pytest.mark.filterwarnings("ignore:the scores have outgrown sigma")  # they have
def test_a_training_that_goes_wrong_stays_finite():
    """Raw pixels, a large step and a vanishing σ drive rows 1e5σ behind; once that made every weight NaN."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32), torch.tensor(digits)
    torch.manual_seed(0)
    model, loss = nn.Linear(64, 10), ExactLoss(power=1.0, margin=5.0, normalize=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    batches = [batch for _ in range(10) for batch in torch.randperm(len(x))[: 28 * 64].split(64)]
    attach(optimizer, loss, total_steps=len(batches), sigma=(10.0, 0.01))
    furthest = 0.0
    for batch in batches:
        optimizer.zero_grad()
        scores = model(x[batch])
        furthest = max(furthest, (scores.amax(1) - scores.amin(1)).max().item() / float(loss.sigma))
        loss(scores, y[batch]).backward()
        optimizer.step()
    assert furthest > 65554.0
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
