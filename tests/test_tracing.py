"""Who watches operators sees the kernel as one, and tensors without memory of their own never reach its addresses."""

from typing import Any

import pytest
import torch
from plain import NOISES, TOLERANCE, draw, plain_loss, run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from expacc import ExactLoss, exact_loss
from expacc.kernels.dispatch import watch_paths

noises = pytest.mark.parametrize("noise", NOISES)
X, Y = draw(3, 4, dtype=torch.float32), torch.tensor([0, 1, 2])
single = TOLERANCE[torch.float32]


class Named(torch.Tensor):
    """A subclass that changes nothing."""


class Recorder(TorchDispatchMode):
    """Collect the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@noises
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_fake_tensors_give_shape_and_dtype(noise: Any, reduction: Any) -> None:
    with FakeTensorMode():
        leaf = torch.empty(3, 4, dtype=torch.bfloat16, requires_grad=True)
        value = exact_loss(leaf, torch.empty(3, dtype=torch.int64), noise=noise, reduction=reduction, backend="cpu")
        (grad,) = torch.autograd.grad(value.sum(), leaf)
    assert value.shape == ((3,) if reduction == "none" else ())
    assert (grad.shape, value.dtype, grad.dtype) == ((3, 4), torch.bfloat16, torch.bfloat16)


@noises
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_records_the_operator_and_no_constants(noise: Any, mode: str) -> None:
    graph = make_fx(lambda x, y: exact_loss(x, y, noise=noise, backend="cpu"), tracing_mode=mode)(X, Y)
    assert any("expacc.loss" in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(3.0 * X, Y), run("cpu", 3.0 * X, Y, noise=noise, backend="cpu"), **single)


@noises
@pytest.mark.parametrize("strict", [False, True])
def test_export(noise: Any, strict: bool) -> None:
    loss = ExactLoss(noise=noise, backend="cpu")
    program = torch.export.export(loss, (X, Y), strict=strict)
    assert any("expacc.loss" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(3.0 * X, Y), loss(3.0 * X, Y), **single)


@noises
def test_a_dispatch_mode_sees_one_operator(noise: Any) -> None:
    leaf = X.clone().requires_grad_()
    with Recorder() as recorder:
        value = run("cpu", leaf, Y, noise=noise, reduction="mean", backend="cpu")
        value.backward()
    twin = X.clone().requires_grad_()
    run("cpu", twin, Y, noise=noise, reduction="mean", backend="cpu").backward()
    assert "expacc.loss.default" in recorder.seen
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, twin.grad, **single)


@noises
def test_subclasses_are_taken(noise: Any) -> None:
    leaf = X.as_subclass(Named).requires_grad_()
    value = run("cpu", leaf, Y, noise=noise, backend="cpu")
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    twin = X.clone().requires_grad_()
    (want,) = torch.autograd.grad(run("cpu", twin, Y, noise=noise, backend="cpu").sum(), twin)
    torch.testing.assert_close(torch.Tensor(grad), want, **single)


@noises
def test_lazily_negated_views_keep_their_sign(noise: Any) -> None:
    logits = torch.complex(torch.zeros(3, 4), X).conj().imag
    assert logits.is_neg()
    with watch_paths() as paths:
        value = exact_loss(logits, Y, noise=noise)
    assert paths == ["reference"]
    torch.testing.assert_close(value, plain_loss(-X, Y, noise=noise).float(), **single)


@noises
@pytest.mark.parametrize("device", ["meta"])
def test_the_meta_device_gives_a_shape(noise: Any, device: str) -> None:
    value = exact_loss(X.to(device), Y.to(device), noise=noise)
    assert value.device.type == device
    assert value.shape == (3,)


def test_saved_tensor_hooks_are_met() -> None:
    twin, leaf = X.clone().requires_grad_(), X.clone().requires_grad_()
    run("cpu", twin, Y, backend="cpu").sum().backward()
    with torch.autograd.graph.save_on_cpu():
        value = run("cpu", leaf, Y, backend="cpu").sum()
    value.backward()
    torch.testing.assert_close(leaf.grad, twin.grad, rtol=0, atol=0)
