"""Dtypes and autocast as CrossEntropyLoss has them: half precision in, float32 or better inside, rounded once."""

from typing import Any

import pytest
import torch
from plain import BACKENDS, NOISES, TOLERANCE, draw, draw_target, plain_loss, run, value_and_grad
from torch.nn.functional import cross_entropy

from expacc import ExactLoss, argmax_probabilities, expected_accuracy, expected_error, log_expected_accuracy

both = pytest.mark.parametrize("backend", BACKENDS)
noises = pytest.mark.parametrize("noise", NOISES)
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TARGET = torch.tensor([0, 1, 2, 3, 0, -100])


@both
@noises
@halves
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("normalize", [False, True, "cap"], ids=["raw", "normalized", "capped"])
def test_half_is_the_float32_result_on_the_rounded_input(
    backend: str, noise: Any, dtype: torch.dtype, reduction: str, normalize: Any
) -> None:
    logits = draw(6, 5, dtype=dtype)
    options: dict[str, Any] = {"noise": noise, "reduction": reduction, "normalize": normalize, "backend": backend}
    value, grad = value_and_grad(lambda x: run(backend, x, TARGET, **options), logits)
    want, slope = value_and_grad(lambda x: run(backend, x, TARGET, **options), logits.float())
    assert value.dtype == grad.dtype == dtype
    # One rounding: half an ulp of the narrow dtype, and the wide result's own error.
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(value.float(), want, rtol=0.51 * ulp, atol=1e-7)
    torch.testing.assert_close(grad.float(), slope, rtol=0.51 * ulp, atol=1e-7)


@both
@noises
@halves
def test_half_agrees_with_single_rows(backend: str, noise: Any, dtype: torch.dtype) -> None:
    logits = draw(6, 5, dtype=dtype)
    value, grad = value_and_grad(lambda x: run(backend, x, TARGET, noise=noise, backend=backend), logits)
    want, slope = value_and_grad(lambda x: plain_loss(x, TARGET, noise=noise).to(dtype), logits)
    torch.testing.assert_close(value, want, **TOLERANCE[dtype])
    torch.testing.assert_close(grad, slope, **TOLERANCE[dtype])


@both
@noises
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_true_class_gets_minus_the_others_before_rounding(backend: str, noise: Any, dtype: torch.dtype) -> None:
    # One large entry and a hundred small ones: summed after rounding they would miss by their number times an ulp.
    logits = torch.zeros(1, 101, dtype=dtype)
    _, grad = value_and_grad(
        lambda x: run(backend, x, torch.tensor([7]), noise=noise, normalize=False, backend=backend), logits
    )
    others = grad.double().sum() - grad[0, 7].double()
    assert float(-grad[0, 7].double() / others) == pytest.approx(1.0, rel=2 * torch.finfo(dtype).eps)


@both
@noises
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_autocast_gives_cross_entropys_output_dtype(
    backend: str, noise: Any, dtype: torch.dtype, reduction: Any
) -> None:
    logits, leaf = draw(6, 5, dtype=dtype), draw(6, 5, dtype=dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = run(backend, leaf, TARGET, noise=noise, reduction=reduction, backend=backend)
        other = cross_entropy(logits, TARGET, reduction=reduction)
    assert value.dtype == other.dtype == torch.float32
    value.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype


@both
@noises
def test_autocast_trains_a_model(backend: str, noise: Any) -> None:
    model = torch.nn.Linear(4, 3)
    loss = ExactLoss(noise=noise, backend=backend)
    features, target = draw(6, 4, dtype=torch.float32), draw_target(6, classes=3)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(features)
        value = loss(logits, target)
    value.backward()
    assert logits.dtype == torch.bfloat16
    assert value.dtype == torch.float32
    want = plain_loss(logits.detach(), target, noise=noise, reduction="mean")
    torch.testing.assert_close(value.double(), want, **TOLERANCE[torch.float32])
    assert model.weight.grad is not None
    assert torch.isfinite(model.weight.grad).all()


@both
def test_autocast_does_not_narrow_the_arithmetic(backend: str) -> None:
    logits, target = draw(6, 5, dtype=torch.float32), draw_target(6, classes=5)
    want, slope = value_and_grad(lambda x: run(backend, x, target, backend=backend), logits)
    with torch.autocast("cpu", torch.bfloat16):
        value, grad = value_and_grad(lambda x: run(backend, x, target, backend=backend), logits)
    assert torch.equal(value, want)
    assert torch.equal(grad, slope)


@noises
def test_autocast_of_float64_keeps_float64(noise: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        value = run("reference", draw(6, 5), TARGET, noise=noise)
    torch.testing.assert_close(value, plain_loss(draw(6, 5), TARGET, noise=noise), **TOLERANCE[torch.float64])


@noises
def test_autocast_with_soft_targets(noise: Any) -> None:
    logits, target = draw(2, 3, dtype=torch.bfloat16), torch.softmax(draw(2, 3, seed=2), 1).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        value = run("reference", logits, target, noise=noise)
        other = cross_entropy(logits, target)
    assert value.dtype == other.dtype
    torch.testing.assert_close(value, plain_loss(logits, target, noise=noise).float(), **TOLERANCE[torch.float32])


@both
@noises
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("weight", FLOATS, ids=str)
def test_weights_of_any_float_dtype(backend: str, noise: Any, dtype: torch.dtype, weight: torch.dtype) -> None:
    logits, weights = draw(6, 4, dtype=dtype), torch.tensor([0.5, 2.0, 1.0, 0.25], dtype=weight)
    value = run(backend, logits, TARGET, weight=weights, noise=noise, reduction="mean", backend=backend)
    want = plain_loss(logits, TARGET, weight=weights, noise=noise, reduction="mean").to(dtype)
    torch.testing.assert_close(value, want, **TOLERANCE[dtype])


@both
@noises
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (6,)], ids=["0-dim", "per-sample"])
def test_sigma_of_any_float_dtype(backend: str, noise: Any, dtype: torch.dtype, shape: Any) -> None:
    logits, sigma = draw(6, 4, dtype=torch.float32), torch.full(shape, 1.5, dtype=dtype).requires_grad_()
    value = run(backend, logits, TARGET, sigma, noise=noise, backend=backend)
    torch.testing.assert_close(value, plain_loss(logits, TARGET, 1.5, noise=noise).float(), **TOLERANCE[torch.float32])
    value.sum().backward()
    assert sigma.grad is not None
    assert sigma.grad.dtype == dtype


@noises
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_probabilities_of_any_float_dtype(noise: Any, target: torch.dtype) -> None:
    logits, t = draw(2, 4, dtype=torch.float32), torch.softmax(draw(2, 4, seed=2), 1).to(target)
    value = run("reference", logits, t, noise=noise)
    torch.testing.assert_close(value, plain_loss(logits, t, noise=noise).float(), **TOLERANCE[torch.float32])


@noises
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "function", [expected_accuracy, expected_error, log_expected_accuracy], ids=lambda f: f.__name__
)
def test_functions_return_the_logits_dtype(noise: Any, dtype: torch.dtype, function: Any) -> None:
    assert function(draw(6, 4, dtype=dtype), TARGET, noise=noise).dtype == dtype
    assert argmax_probabilities(draw(6, 4, dtype=dtype), noise=noise).dtype == dtype


@both
@halves
def test_sums_do_not_overflow_half_inside(backend: str, dtype: torch.dtype) -> None:
    # 100 000 rows of loss 2/3: a sum in float16 would be inf, its mean is not.
    logits, target = torch.zeros(100_000, 3, dtype=dtype), torch.zeros(100_000, dtype=torch.int64)
    value = run(backend, logits, target, power=1, noise="gumbel", reduction="mean", backend=backend)
    assert float(value) == pytest.approx(2 / 3, rel=torch.finfo(dtype).eps)
