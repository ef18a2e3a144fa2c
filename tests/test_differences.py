"""Where ExactLoss deliberately differs from CrossEntropyLoss: one test each. And what it treats as it does."""

import math
from typing import Any

import pytest
import torch
from plain import BACKENDS, NOISES, TOLERANCE, draw, draw_target, plain_loss, run, value_and_grad
from torch.nn.functional import cross_entropy

from expacc import ExactLoss

INF = math.inf
both = pytest.mark.parametrize("backend", BACKENDS)
noises = pytest.mark.parametrize("noise", NOISES)
normalized = pytest.mark.parametrize("normalize", [False, True, "cap"], ids=["raw", "normalized", "capped"])
reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.mark.parametrize("name", ["size_average", "reduce"])
def test_the_deprecated_reductions_are_not_taken(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        ExactLoss(**{name: True})  # type: ignore[arg-type]


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        ExactLoss(torch.ones(3))  # type: ignore[misc]


@both
@noises
@normalized
@reductions
@pytest.mark.parametrize("shape", [(0, 4), (0, 4, 3), (2, 4, 0)], ids=str)
def test_empty_batch_is_a_connected_zero(backend: str, noise: Any, normalize: Any, reduction: str, shape: Any) -> None:
    logits = torch.zeros(shape)
    target = torch.zeros(shape[:1] + shape[2:], dtype=torch.int64)
    options: dict[str, Any] = {"noise": noise, "normalize": normalize, "reduction": reduction, "backend": backend}
    value, grad = value_and_grad(lambda x: run(backend, x, target, **options), logits)
    assert torch.equal(value, torch.zeros(target.shape if reduction == "none" else ()))
    assert torch.equal(grad, logits)


@both
@noises
@normalized
@reductions
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 4, 3)], ids=str)
def test_all_ignored_batch_is_a_connected_zero(
    backend: str, noise: Any, normalize: Any, reduction: str, shape: Any
) -> None:
    target = torch.full(shape[:1] + shape[2:] if len(shape) > 1 else (), 255)
    options: dict[str, Any] = {"noise": noise, "normalize": normalize, "reduction": reduction, "backend": backend}
    value, grad = value_and_grad(
        lambda x: run(backend, x, target, ignore_index=255, **options), draw(*shape, dtype=torch.float32)
    )
    assert torch.equal(value, torch.zeros(target.shape if reduction == "none" else ()))
    assert torch.equal(grad, torch.zeros(shape))


@both
@noises
def test_a_mean_of_total_weight_zero_is_a_connected_zero(backend: str, noise: Any) -> None:
    weight = torch.tensor([0.0, 1.0, 1.0])
    options: dict[str, Any] = {"weight": weight, "reduction": "mean", "noise": noise, "backend": backend}
    value, grad = value_and_grad(
        lambda x: run(backend, x, torch.zeros(4, dtype=torch.int64), **options), draw(4, 3, dtype=torch.float32)
    )
    assert value == 0
    assert torch.equal(grad, torch.zeros(4, 3))


@both
@noises
@normalized
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_what_an_ignored_row_holds_touches_nothing(backend: str, noise: Any, normalize: Any, bad: float) -> None:
    logits, target = draw(4, 3, dtype=torch.float32), torch.tensor([0, -100, 1, 2])
    options: dict[str, Any] = {"noise": noise, "normalize": normalize, "reduction": "mean", "backend": backend}
    want, slope = value_and_grad(lambda x: run(backend, x, target, **options), logits)
    logits[1, 2] = bad
    value, grad = value_and_grad(lambda x: run(backend, x, target, **options), logits)
    assert torch.equal(value, want)
    assert torch.equal(grad, slope)
    assert torch.equal(grad[1], torch.zeros(3))


@noises
@pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("score", [-INF, -1e4])
def test_a_class_of_probability_zero_contributes_nothing(noise: Any, power: float, score: float) -> None:
    logits, target = draw(2, 4), torch.softmax(draw(2, 4, seed=2), 1)
    logits[0, 1], target[0, 1] = score, 0.0
    options: dict[str, Any] = {"noise": noise, "power": power, "normalize": False}
    value, grad = value_and_grad(lambda x: run("reference", x, target, **options), logits)
    rest = [0, 2, 3]
    want, slope = value_and_grad(lambda x: run("reference", x, target[:1, rest], **options), logits[:1, rest])
    torch.testing.assert_close(value[:1], want, **TOLERANCE[torch.float64])
    torch.testing.assert_close(grad[:1, rest], slope, **TOLERANCE[torch.float64])
    assert grad[0, 1] == 0


@both
@noises
@normalized
@pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
def test_a_row_of_minus_inf_alone_counts_as_equal_scores(
    backend: str, noise: Any, normalize: Any, power: float
) -> None:
    logits, target = draw(3, 4, dtype=torch.float32), torch.tensor([0, 1, 2])
    logits[1] = -INF
    options: dict[str, Any] = {"noise": noise, "power": power, "normalize": normalize, "backend": backend}
    value, grad = value_and_grad(lambda x: run(backend, x, target, **options), logits)
    equal = math.log(4.0) if power == 0 else (1.0 - 0.25**power) / power
    torch.testing.assert_close(value[1], torch.tensor(equal), **TOLERANCE[torch.float32])
    assert torch.equal(grad[1], torch.zeros(4))
    assert torch.isfinite(value).all()
    assert torch.isfinite(grad).all()


@noises
@pytest.mark.parametrize("kind", ["smoothing", "probabilities"])
def test_a_row_of_minus_inf_alone_counts_as_equal_scores_for_soft_targets(noise: Any, kind: str) -> None:
    logits = draw(2, 4)
    logits[1] = -INF
    soft = torch.full((2, 4), 0.25, dtype=torch.float64)
    target, smoothing = (torch.tensor([0, 1]), 0.1) if kind == "smoothing" else (soft, 0.0)
    options: dict[str, Any] = {"noise": noise, "power": 0, "label_smoothing": smoothing}
    value, grad = value_and_grad(lambda x: run("reference", x, target, **options), logits)
    torch.testing.assert_close(value[1], torch.tensor(math.log(4.0), dtype=torch.float64))
    assert torch.equal(grad[1], torch.zeros(4, dtype=torch.float64))
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("kind", ["smoothing", "probabilities"])
def test_margin_with_soft_targets_is_refused(kind: str) -> None:
    target = torch.tensor([0, 1]) if kind == "smoothing" else torch.full((2, 3), 1 / 3)
    loss = {"margin": 0.5, "label_smoothing": 0.1 if kind == "smoothing" else 0.0}
    with pytest.raises(ValueError, match=r"cannot be combined with margin=0.5.*Write margin=None"):
        run("reference", torch.zeros(2, 3), target, **loss)


def test_margin_with_smoothing_is_refused_when_the_loss_is_made() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing=0.1 cannot be combined with margin=2"):
        ExactLoss(margin=2, label_smoothing=0.1)


@both
@noises
@pytest.mark.parametrize("target", [4, -1, -101, 2**40])
@pytest.mark.parametrize("compact", [False, True], ids=["int64", "int32"])
def test_a_target_out_of_range_is_named_with_its_place(backend: str, noise: Any, target: int, compact: bool) -> None:
    labels = torch.tensor([[0, 1], [target if target < 2**31 else 4, 9]], dtype=torch.int32 if compact else torch.int64)
    if not compact:
        labels[1, 0] = target
    with pytest.raises(IndexError, match=rf"target\[1, 0\] is {int(labels[1, 0])}, outside 0 … 3"):
        run(backend, torch.zeros(2, 4, 2), labels, noise=noise, backend=backend)


@both
@noises
def test_minus_100_is_out_of_range_where_another_index_is_ignored(backend: str, noise: Any) -> None:
    with pytest.raises(IndexError, match=r"target\[1\] is -100.*not ignore_index=0"):
        run(backend, torch.zeros(2, 4), torch.tensor([0, -100]), ignore_index=0, noise=noise, backend=backend)


@both
@noises
def test_an_unbatched_target_out_of_range_is_named(backend: str, noise: Any) -> None:
    with pytest.raises(IndexError, match=r"target is 7, outside 0 … 3"):
        run(backend, torch.zeros(4), torch.tensor(7), noise=noise, backend=backend)


@both
@noises
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded-rows", "expanded-classes", "target-strided"])
def test_strides_do_not_matter(backend: str, noise: Any, layout: str) -> None:
    base, target = draw(6, 8, dtype=torch.float32), draw_target(6, classes=6)
    logits = {
        "transposed": base.T[:6, :6],
        "strided": base[:, ::2].repeat(1, 2)[:, ::1][:, 1:7],
        "expanded-rows": base[:1, :6].expand(6, 6),
        "expanded-classes": base[:, :1].expand(6, 6),
        "target-strided": base[:, :6],
    }[layout]
    if layout == "target-strided":
        target = torch.stack((target, target + 100), 1)[:, 0]
    leaf, dense = logits.detach().requires_grad_(), logits.clone().contiguous().requires_grad_()
    value = run(backend, leaf, target, noise=noise, backend=backend)
    want = run(backend, dense, target.contiguous(), noise=noise, backend=backend)
    upstream = draw(6, dtype=torch.float32, seed=3)
    assert torch.equal(value, want)
    (grad,), (slope,) = torch.autograd.grad(value, leaf, upstream), torch.autograd.grad(want, dense, upstream)
    torch.testing.assert_close(grad, slope, **TOLERANCE[torch.float32])


@both
@noises
def test_the_inputs_are_left_as_they_were(backend: str, noise: Any) -> None:
    logits, target, weight = draw(4, 3, dtype=torch.float32), torch.tensor([0, -100, 1, 2]), torch.tensor([1.0, 2, 3])
    sigma = torch.tensor([1.0, 2.0, 3.0, 0.5])
    before = [t.clone() for t in (logits, target, weight, sigma)]
    value_and_grad(
        lambda x: run(backend, x, target, sigma, weight=weight, noise=noise, reduction="mean", backend=backend), logits
    )
    assert all(torch.equal(a, b) for a, b in zip(before, (logits, target, weight, sigma), strict=True))


@both
def test_default_mean_is_cross_entropys_weighted_mean(backend: str) -> None:
    logits, target = draw(5, 3, dtype=torch.float32), torch.tensor([0, 1, -100, 2, 2])
    weight = torch.tensor([1.0, 5.0, 0.5])
    options: dict[str, Any] = {"noise": "gumbel", "power": 0, "normalize": False, "backend": backend}
    loss = ExactLoss(weight=weight, **options)
    torch.testing.assert_close(loss(logits, target), cross_entropy(logits, target, weight))
    torch.testing.assert_close(
        ExactLoss(weight=weight, backend=backend)(logits, target),
        plain_loss(logits, target, weight=weight, reduction="mean").float(),
        **TOLERANCE[torch.float32],
    )
