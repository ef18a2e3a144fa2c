"""The four functions beside the loss: closed forms, limits, and how they hang together."""

import math
from typing import Any

import pytest
import torch
from plain import BACKENDS, NOISES, TOLERANCE, draw, draw_target, log_win

from expacc import argmax_probabilities, exact_loss, expected_accuracy, expected_error, log_expected_accuracy
from expacc.kernels.dispatch import watch_paths

both = pytest.mark.parametrize("backend", BACKENDS)
noises = pytest.mark.parametrize("noise", NOISES)
FUNCTIONS = (expected_accuracy, expected_error, log_expected_accuracy)
functions = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
single = TOLERANCE[torch.float32]
wide = TOLERANCE[torch.float64]


def evaluate(path: str, function: Any, *args: Any, **options: Any) -> torch.Tensor:
    with watch_paths() as paths:
        value = function(*args, backend=path, **options)
    assert paths == [path]
    return value


def of_log(function: Any, log_p: torch.Tensor) -> torch.Tensor:
    if function is expected_accuracy:
        return log_p.exp()
    return -torch.expm1(log_p) if function is expected_error else log_p


@both
@functions
@pytest.mark.parametrize("gap", [-3.0, -0.5, 0.0, 1.0, 4.0])
@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_two_classes_with_gaussian_noise_are_a_normal_law(
    backend: str, function: Any, gap: float, sigma: float
) -> None:
    value = evaluate(backend, function, torch.tensor([[gap, 0.0]]), torch.tensor([0]), sigma)
    log_p = torch.special.log_ndtr(torch.tensor([gap / (sigma * math.sqrt(2.0))], dtype=torch.float64))
    torch.testing.assert_close(value, of_log(function, log_p).float(), **single)


@both
@functions
@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_gumbel_noise_is_a_softmax(backend: str, function: Any, sigma: float) -> None:
    logits, target = draw(4, 5, dtype=torch.float32), draw_target(4, classes=5)
    value = evaluate(backend, function, logits, target, sigma, noise="gumbel")
    log_p = torch.log_softmax(logits.double() / sigma, 1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(value, of_log(function, log_p).float(), **single)


@both
@noises
@functions
@pytest.mark.parametrize("margin", [None, 0.5], ids=lambda r: f"margin{r}")
def test_values_equal_single_rows(backend: str, noise: Any, function: Any, margin: float | None) -> None:
    logits, target = draw(4, 5, dtype=torch.float32), draw_target(4, classes=5)
    value = evaluate(backend, function, logits, target, 1.3, noise=noise, margin=margin)
    rows = [log_win(x.double(), int(y), torch.tensor(1.3), margin, noise) for x, y in zip(logits, target, strict=True)]
    torch.testing.assert_close(value, of_log(function, torch.stack(rows)).float(), **single)


@both
@noises
@functions
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 5, 3), (2, 5, 2, 2)], ids=str)
def test_results_have_the_targets_shape(backend: str, noise: Any, function: Any, shape: Any) -> None:
    target = draw_target(*(shape[:1] + shape[2:] if len(shape) > 1 else ()), classes=5)
    assert evaluate(backend, function, draw(*shape, dtype=torch.float32), target, noise=noise).shape == target.shape


@both
@noises
def test_ignored_samples_count_as_certain(backend: str, noise: Any) -> None:
    logits, target = draw(2, 5, dtype=torch.float32), torch.tensor([-100, 1])
    got = [float(evaluate(backend, function, logits, target, noise=noise)[0]) for function in FUNCTIONS]
    assert got == [1.0, 0.0, 0.0]


@both
@noises
def test_the_loss_at_power_one_is_the_error_and_at_zero_minus_the_log(backend: str, noise: Any) -> None:
    logits, target = draw(6, 5, dtype=torch.float32), draw_target(6, classes=5)
    options: dict[str, Any] = {"noise": noise, "margin": 0.7}
    error = evaluate(backend, expected_error, logits, target, **options)
    log_p = evaluate(backend, log_expected_accuracy, logits, target, **options)
    assert torch.equal(error, exact_loss(logits, target, power=1, normalize=False, backend=backend, **options))
    assert torch.equal(log_p, -exact_loss(logits, target, power=0, normalize=False, backend=backend, **options))


@both
@noises
@pytest.mark.parametrize(("sigma", "want"), [(1e-3, [0.0, 1.0]), (1e6, [0.8, 0.8])], ids=["small", "large"])
def test_error_goes_to_the_01_error_and_to_chance(backend: str, noise: Any, sigma: float, want: list[float]) -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]]).repeat(2, 1)
    value = evaluate(backend, expected_error, logits, torch.tensor([0, 1]), sigma, noise=noise)
    torch.testing.assert_close(value, torch.tensor(want), rtol=1e-5, atol=1e-6)


@both
@noises
def test_the_error_of_a_confident_row_is_not_rounded_away(backend: str, noise: Any) -> None:
    gap = 14.0 if noise == "gaussian" else 40.0
    value = evaluate(backend, expected_error, torch.tensor([[gap, 0.0]]), torch.tensor([0]), noise=noise)
    truth = 0.5 * math.erfc(7.0) if noise == "gaussian" else 1.0 / (1.0 + math.exp(40.0))
    assert float(value) == pytest.approx(truth, rel=1e-4)


@both
@noises
def test_the_log_of_a_hopeless_row_is_finite(backend: str, noise: Any) -> None:
    leaf = torch.tensor([[0.0, 1e4]]).requires_grad_()
    value = evaluate(backend, log_expected_accuracy, leaf, torch.tensor([0]), noise=noise)
    value.sum().backward()
    assert value.item() == pytest.approx(-25000010.1 if noise == "gaussian" else -1e4, rel=1e-6)
    assert leaf.grad is not None
    assert float(leaf.grad[0, 0]) == pytest.approx(5000.0 if noise == "gaussian" else 1.0, rel=1e-4)


@noises
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 5, 3), (2, 5, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_win_probabilities_sum_to_one_in_every_shape(noise: Any, shape: Any, dtype: torch.dtype) -> None:
    logits = draw(*shape, dtype=dtype)
    p = argmax_probabilities(logits, noise=noise)
    assert p.shape == logits.shape
    assert p.dtype == dtype
    total = p.sum(1 if len(shape) > 1 else 0)
    torch.testing.assert_close(total, torch.ones_like(total), **TOLERANCE[dtype])


@noises
def test_win_probabilities_equal_single_rows(noise: Any) -> None:
    logits, sigma = draw(3, 5), torch.tensor([0.7, 1.0, 2.0], dtype=torch.float64)
    p = argmax_probabilities(logits, sigma, noise=noise)
    want = torch.stack([torch.stack([log_win(x, k, s, None, noise) for k in range(5)])
                        for x, s in zip(logits, sigma, strict=True)]).exp()  # fmt: skip
    torch.testing.assert_close(p, want, **wide)


@noises
def test_win_probabilities_and_expected_accuracy_agree(noise: Any) -> None:
    logits, target = draw(2, 5, 3), draw_target(2, 3, classes=5)
    p = argmax_probabilities(logits, 1.7, noise=noise)
    want = expected_accuracy(logits, target, 1.7, noise=noise)
    torch.testing.assert_close(p.gather(1, target.unsqueeze(1)).squeeze(1), want, **wide)


def test_win_probabilities_with_gumbel_noise_are_a_softmax() -> None:
    logits = draw(4, 5)
    torch.testing.assert_close(
        argmax_probabilities(logits, 0.5, noise="gumbel"), torch.softmax(logits / 0.5, 1), **wide
    )


@noises
@pytest.mark.parametrize("shape", [(0, 5), (3, 1), (1,)], ids=str)
def test_win_probabilities_of_nothing_and_of_one_class(noise: Any, shape: Any) -> None:
    leaf = torch.zeros(shape).requires_grad_()
    p = argmax_probabilities(leaf, noise=noise)
    p.sum().backward()
    assert torch.equal(p, torch.ones(shape))
    assert torch.equal(leaf.grad, torch.zeros(shape))


@noises
@pytest.mark.parametrize("nodes", [2, 16, 200])
def test_nodes_can_be_chosen(noise: Any, nodes: int) -> None:
    with watch_paths() as paths:
        value = expected_error(draw(3, 4), torch.tensor([0, 1, 2]), noise=noise, nodes=nodes)
    want = expected_error(draw(3, 4), torch.tensor([0, 1, 2]), noise=noise)
    assert paths == ["reference"]
    near = 1e-9 if nodes == 200 or noise == "gumbel" else 1e-2
    assert bool(((value - want).abs() <= near).all()) == (nodes > 2 or noise == "gumbel")
