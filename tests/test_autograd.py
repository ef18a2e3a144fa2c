"""What the loss owes autograd: gradients that nobody shares, graphs kept, hooks, modes, threads, determinism."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import BACKENDS, NOISES, TOLERANCE, draw, draw_target, plain_loss, run, value_and_grad
from torch.utils.checkpoint import checkpoint

from expacc import ExactLoss

both = pytest.mark.parametrize("backend", BACKENDS)
noises = pytest.mark.parametrize("noise", NOISES)
reductions = pytest.mark.parametrize("reduction", ["none", "mean"])
normalized = pytest.mark.parametrize("normalize", [False, True, "cap"], ids=["raw", "normalized", "capped"])
close = TOLERANCE[torch.float32]
TARGET = torch.tensor([0, 1, 2, 3, 0, -100])


def make(backend: str, noise: Any, **options: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    logits = draw(6, 5, dtype=torch.float32)
    return logits, lambda x: run(backend, x, TARGET, noise=noise, backend=backend, **options)


@both
@noises
@reductions
@normalized
def test_backward_twice_gives_the_same_twice(backend: str, noise: Any, reduction: str, normalize: Any) -> None:
    logits, loss = make(backend, noise, reduction=reduction, normalize=normalize)
    leaf = logits.requires_grad_()
    value = loss(leaf).sum()
    (first,) = torch.autograd.grad(value, leaf, retain_graph=True)
    kept = first.clone()
    first.fill_(7.0)  # what a user does with a gradient must not reach the graph
    (second,) = torch.autograd.grad(value, leaf, retain_graph=True)
    second.mul_(0.0)
    value.backward(torch.tensor(3.0))
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, 3.0 * kept, **close)


@both
@noises
@reductions
def test_gradients_accumulate(backend: str, noise: Any, reduction: str) -> None:
    logits, loss = make(backend, noise, reduction=reduction)
    _, want = value_and_grad(lambda x: loss(x).sum(), logits)
    leaf = logits.requires_grad_()
    loss(leaf).sum().backward(torch.tensor(0.5))
    assert leaf.grad is not None
    held = leaf.grad
    held.mul_(2.0)  # in place, as clipping does
    value = loss(leaf).sum()
    value.backward(torch.tensor(0.5), retain_graph=True)
    value.backward(torch.tensor(0.5))
    torch.testing.assert_close(leaf.grad, 4.0 * want, **close)
    assert leaf.grad is held


@both
@noises
@reductions
def test_a_hook_that_changes_the_gradient_changes_nothing_else(backend: str, noise: Any, reduction: str) -> None:
    logits, loss = make(backend, noise, reduction=reduction)
    _, want = value_and_grad(lambda x: loss(x).sum(), logits)
    leaf = logits.clone().requires_grad_()
    middle = leaf * 1.0
    middle.register_hook(lambda grad: grad.mul_(10.0))
    value = loss(middle).sum()
    value.backward(torch.tensor(0.5), retain_graph=True)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, 10.0 * want, **close)
    value.backward(torch.tensor(0.5))
    torch.testing.assert_close(leaf.grad, 20.0 * want, **close)


@both
@noises
@reductions
def test_two_branches_on_the_same_logits_add(backend: str, noise: Any, reduction: str) -> None:
    logits, loss = make(backend, noise, reduction=reduction)
    _, want = value_and_grad(lambda x: loss(x).sum(), logits)
    _, both_branches = value_and_grad(lambda x: (loss(x) + 2.0 * loss(x)).sum() + x.sum(), logits)
    torch.testing.assert_close(both_branches - 0.5, 3.0 * want, **close)


@both
@noises
def test_a_freed_graph_says_so(backend: str, noise: Any) -> None:
    logits, loss = make(backend, noise, reduction="mean")
    value = loss(logits.requires_grad_())
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


@both
@noises
def test_logits_changed_in_place_after_the_call_do_not_spoil_the_gradient(backend: str, noise: Any) -> None:
    logits, loss = make(backend, noise, reduction="mean")
    _, want = value_and_grad(loss, logits)
    leaf = logits.requires_grad_()
    middle = leaf * 1.0
    value = loss(middle)
    middle.add_(1.0)
    value.backward(torch.tensor(0.5))
    torch.testing.assert_close(leaf.grad, want, **close)


@noises
def test_the_kernel_notices_changed_logits_where_it_needs_them_again(noise: Any) -> None:
    logits, loss = make("cpu", noise, reduction="none", normalize=True)
    middle = logits.requires_grad_() * 1.0
    value = loss(middle)
    middle.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


@both
@noises
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_without_gradients_the_value_is_the_same(backend: str, noise: Any, mode: Any) -> None:
    logits, loss = make(backend, noise, reduction="mean")
    want = loss(logits.clone().requires_grad_())
    with mode():
        value = loss(logits.clone().requires_grad_())
    assert not value.requires_grad
    assert torch.equal(value, want.detach())


@both
@noises
def test_inference_tensors_are_taken(backend: str, noise: Any) -> None:
    logits, loss = make(backend, noise, reduction="mean")
    with torch.inference_mode():
        inferred = logits.clone()
    assert torch.equal(loss(inferred), loss(logits))


@both
@noises
def test_nothing_wants_a_gradient_nothing_has_one(backend: str, noise: Any) -> None:
    logits, loss = make(backend, noise, reduction="mean")
    assert not loss(logits).requires_grad


@both
@noises
def test_parameters_and_their_subclasses_are_logits(backend: str, noise: Any) -> None:
    logits, loss = make(backend, noise, reduction="mean")
    want, slope = value_and_grad(loss, logits)
    weight = torch.nn.Parameter(logits.clone())
    value = loss(weight)
    value.backward(torch.tensor(0.5))
    assert type(value) is torch.Tensor
    assert torch.equal(value.detach(), want)
    torch.testing.assert_close(weight.grad, slope, **close)


@both
@noises
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(backend: str, noise: Any, reentrant: bool) -> None:
    logits, loss = make(backend, noise, reduction="mean")
    want, slope = value_and_grad(lambda x: loss(x * 2.0), logits)
    value, grad = value_and_grad(lambda x: checkpoint(lambda y: loss(y * 2.0), x, use_reentrant=reentrant), logits)
    assert torch.equal(value, want)
    assert torch.equal(grad, slope)


@both
@noises
@normalized
def test_same_bits_twice(backend: str, noise: Any, normalize: Any) -> None:
    rows, classes = (300, 37) if backend == "cpu" else (8, 5)  # enough for several threads
    logits, target = draw(rows, classes, dtype=torch.float32), draw_target(rows, classes=classes)
    options: dict[str, Any] = {"noise": noise, "normalize": normalize, "reduction": "mean", "backend": backend}
    first = value_and_grad(lambda x: run(backend, x, target, **options), logits)
    second = value_and_grad(lambda x: run(backend, x, target, **options), logits)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@both
@noises
def test_deterministic_mode_is_met(backend: str, noise: Any) -> None:
    logits, loss = make(backend, noise, reduction="mean", weight=torch.arange(1.0, 6.0))
    want, slope = value_and_grad(loss, logits)
    torch.use_deterministic_algorithms(True)
    try:
        value, grad = value_and_grad(loss, logits)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(value, want)
    assert torch.equal(grad, slope)


@both
@noises
def test_the_global_random_state_is_neither_read_nor_moved(backend: str, noise: Any) -> None:
    logits, loss = make(backend, noise, reduction="mean")
    values = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        values.append(value_and_grad(loss, logits))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(values[0][0], values[1][0])
    assert torch.equal(values[0][1], values[1][1])


@both
@noises
def test_one_loss_serves_many_threads(backend: str, noise: Any) -> None:
    loss = ExactLoss(noise=noise, backend=backend)
    batches = [(draw(5, 7, dtype=torch.float32, seed=n), draw_target(5, classes=7, seed=n)) for n in range(8)]
    want = [value_and_grad(lambda x, y=y: loss(x, y), logits) for logits, y in batches]
    got: dict[int, Any] = {}

    def work(n: int) -> None:
        logits, y = batches[n]
        got[n] = [value_and_grad(lambda x: loss(x, y), logits) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(8))
    assert all(torch.equal(part, want[n][i]) for n in got for pair in got[n] for i, part in enumerate(pair))


@both
@noises
@normalized
def test_gradient_rows_sum_to_zero(backend: str, noise: Any, normalize: Any) -> None:
    logits, loss = make(backend, noise, normalize=normalize, reduction="sum")
    _, grad = value_and_grad(loss, logits)
    total = grad.double().sum() if normalize else grad.double().sum(-1)
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-6)


@both
@noises
@reductions
@pytest.mark.parametrize("scale", [0.0, -2.0, 1024.0])
def test_upstream_gradients_scale(backend: str, noise: Any, reduction: str, scale: float) -> None:
    logits, loss = make(backend, noise, reduction=reduction)
    _, want = value_and_grad(lambda x: loss(x).sum(), logits)
    _, grad = value_and_grad(lambda x: (loss(x) * scale).sum(), logits)
    torch.testing.assert_close(grad, scale * want, **close)


@both
@noises
@normalized
def test_vector_upstream_reaches_its_own_rows(backend: str, noise: Any, normalize: Any) -> None:
    logits, loss = make(backend, noise, normalize=normalize)
    upstream = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.0, 5.0])
    leaf, twin = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss(leaf).backward(upstream)
    plain_loss(twin, TARGET, noise=noise, normalize=normalize).backward(upstream.double())
    torch.testing.assert_close(leaf.grad, twin.grad, **close)
