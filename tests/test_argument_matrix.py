"""Whatever CrossEntropyLoss accepts has the same meaning: its argument matrix, by value, gradient and path."""

from typing import Any

import pytest
import torch
from plain import BACKENDS, TOLERANCE, draw, draw_target, home, plain_loss, run, value_and_grad
from torch.nn.functional import cross_entropy

C = 5
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0, 1.5], dtype=torch.float64)
SHAPES = {"C": (C,), "NC": (6, C), "NCd": (3, C, 2), "NCdd": (2, C, 3, 2)}
SOFT = ("probabilities", "probabilities-weight", "probabilities-smoothing-weight")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight": {"weight": WEIGHT},
    "ignore": {"ignore_index": -100},
    "ignore255-weight": {"ignore_index": 255, "weight": WEIGHT},
    "ignore0": {"ignore_index": 0},
    "smoothing": {"label_smoothing": 0.2},
    "smoothing1": {"label_smoothing": 1.0},
    "smoothing-weight-ignore": {"label_smoothing": 0.2, "weight": WEIGHT, "ignore_index": 1},
    "probabilities": {},
    "probabilities-weight": {"weight": WEIGHT},
    "probabilities-smoothing-weight": {"label_smoothing": 0.2, "weight": WEIGHT},
}


def make(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    logits = draw(*shape, dtype=dtype)
    options = dict(OPTIONS[name])
    if "weight" in options:
        options["weight"] = options["weight"].to(dtype)
    if name in SOFT:
        return logits, torch.softmax(draw(*shape, seed=2), 1 if len(shape) > 1 else 0).to(dtype), options
    target = draw_target(*(shape[:1] + shape[2:] if len(shape) > 1 else ()), classes=C)
    if not target.ndim:
        target = torch.tensor(4)  # alone and ignored, or of weight 0, the mean differs: test_differences.py
    ignore = options.get("ignore_index", 0)
    if ignore in (-100, 255) and target.ndim:
        target[1] = ignore
    return logits, target, options


def is_soft(name: str) -> bool:
    return name in SOFT or "smoothing" in name


def check_equals_cross_entropy(backend: str, dtype: torch.dtype, shape: Any, name: str, reduction: str) -> None:
    logits, target, options = make(shape, name, dtype)
    ask, path = home(backend, dtype, soft=is_soft(name))
    twin: dict[str, Any] = {"noise": "gumbel", "power": 0, "normalize": False, "backend": ask}
    value, grad = value_and_grad(lambda x: run(path, x, target, reduction=reduction, **twin, **options), logits)
    want, slope = value_and_grad(lambda x: cross_entropy(x, target, reduction=reduction, **options), logits)
    torch.testing.assert_close(value, want, **TOLERANCE[dtype])
    torch.testing.assert_close(grad, slope, **TOLERANCE[dtype])


def check_equals_rows(backend: str, dtype: torch.dtype, shape: Any, name: str, reduction: str) -> None:
    logits, target, options = make(shape, name, dtype)
    ask, path = home(backend, dtype, soft=is_soft(name))
    value, grad = value_and_grad(lambda x: run(path, x, target, reduction=reduction, backend=ask, **options), logits)
    want, slope = value_and_grad(lambda x: plain_loss(x, target, reduction=reduction, **options).to(dtype), logits)
    torch.testing.assert_close(value, want, **TOLERANCE[dtype])
    torch.testing.assert_close(grad, slope, **TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gumbel_at_power_zero_is_cross_entropy(backend: str, reduction: str, name: str) -> None:
    check_equals_cross_entropy(backend, torch.float32, SHAPES["NC"], name, reduction)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "NC"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gumbel_is_cross_entropy_in_every_shape(backend: str, shape: str, name: str) -> None:
    check_equals_cross_entropy(backend, torch.float32, SHAPES[shape], name, "mean")


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_gumbel_is_cross_entropy_in_float64(reduction: str, shape: str, name: str) -> None:
    check_equals_cross_entropy("reference", torch.float64, SHAPES[shape], name, reduction)


# Soft targets take a second through the reference with Gaussian noise, whatever backend was asked for: once each.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", [n for n in OPTIONS if not is_soft(n)])
def test_gaussian_default_equals_single_rows(backend: str, reduction: str, name: str) -> None:
    check_equals_rows(backend, torch.float32, SHAPES["NC"], name, reduction)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "NC"])
@pytest.mark.parametrize("name", ["plain", "ignore255-weight"])
def test_gaussian_equals_single_rows_in_every_shape(backend: str, shape: str, name: str) -> None:
    check_equals_rows(backend, torch.float32, SHAPES[shape], name, "mean")


@pytest.mark.parametrize("name", OPTIONS)
def test_gaussian_equals_single_rows_in_float64(name: str) -> None:
    check_equals_rows("reference", torch.float64, SHAPES["C" if is_soft(name) else "NC"], name, "mean")


@pytest.mark.parametrize("name", ["smoothing-weight-ignore", "probabilities-smoothing-weight"])
def test_gaussian_soft_targets_equal_single_rows(name: str) -> None:
    check_equals_rows("cpu", torch.float32, (2, C, 2), name, "mean")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integer_targets_of_every_width_mean_the_same(backend: str, noise: Any, dtype: torch.dtype) -> None:
    logits, target = draw(6, C, dtype=torch.float32), draw_target(6, classes=C)
    want = run(backend, logits, target, noise=noise, backend=backend, ignore_index=2)
    assert torch.equal(run(backend, logits, target.to(dtype), noise=noise, backend=backend, ignore_index=2), want)


@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
def test_probability_target_has_cross_entropys_gradient(noise: Any) -> None:
    logits, target = draw(3, C), torch.softmax(draw(3, C, seed=2), 1)
    options: dict[str, Any] = {"noise": noise, "power": 0, "normalize": False, "reduction": "mean"}
    _, grad = value_and_grad(lambda t: run("reference", logits, t, weight=WEIGHT, **options), target)
    _, want = value_and_grad(lambda t: plain_loss(logits, t, weight=WEIGHT, **options), target)
    torch.testing.assert_close(grad, want, **TOLERANCE[torch.float64])


@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("margin", [None, -0.5, 0.0, 1.0], ids=lambda r: f"margin{r}")
@pytest.mark.parametrize("power", [-1.0, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("normalize", [False, True, "cap"], ids=["raw", "normalized", "capped"])
def test_own_options_equal_single_rows(
    backend: str, noise: Any, margin: float | None, power: float, normalize: Any
) -> None:
    logits, target = draw(4, C, dtype=torch.float32), draw_target(4, classes=C)
    options: dict[str, Any] = {"margin": margin, "power": power, "noise": noise, "normalize": normalize}
    sigma = torch.tensor([0.8, 1.0, 1.5, 3.0], dtype=torch.float64)
    value, grad = value_and_grad(lambda x: run(backend, x, target, sigma, backend=backend, **options), logits)
    want, slope = value_and_grad(lambda x: plain_loss(x, target, sigma, **options).float(), logits)
    torch.testing.assert_close(value, want, **TOLERANCE[torch.float32])
    torch.testing.assert_close(grad, slope, **TOLERANCE[torch.float32])
