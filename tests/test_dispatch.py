"""Who computes: the dispatcher's choice, what it says when a wish cannot be met, and that it can be watched."""

import threading
import warnings
from typing import Any

import pytest
import torch
from plain import NOISES, TOLERANCE, draw, draw_target, plain_loss

from expacc import ExactLoss, exact_loss, expected_accuracy, expected_error, log_expected_accuracy
from expacc.kernels import cpu, dispatch
from expacc.kernels.dispatch import watch_paths

noises = pytest.mark.parametrize("noise", NOISES)
X, Y = draw(4, 5, dtype=torch.float32), draw_target(4, classes=5)
G = torch.Generator().manual_seed(0)

# What the kernel does not do, and the reason it gives.
BEYOND: dict[str, tuple[dict[str, Any], str]] = {
    "float64": ({"logits": X.double()}, r"it takes CPU tensors of torch.float32, .*, not torch.float64 on cpu"),
    "smoothing": ({"label_smoothing": 0.1}, "label smoothing go through the reference"),
    "probabilities": ({"target": torch.softmax(X, 1)}, "probability targets .* go through the reference"),
    "nodes": ({"nodes": 32}, "nodes=32 needs the reference"),
    "genz": ({"integrator": "genz", "generator": G}, "sampled integrators have no kernel"),
    "monte-carlo": ({"integrator": "monte_carlo", "generator": G}, "sampled integrators have no kernel"),
    "learned-power": ({"power": torch.tensor(0.3).requires_grad_()}, "gradient of power or weight needs the reference"),
    "learned-weight": ({"weight": torch.ones(5).requires_grad_()}, "gradient of power or weight needs the reference"),
}


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: False)
    monkeypatch.setattr(cpu, "unavailable_reason", lambda: "it was not built")
    monkeypatch.setattr(dispatch, "_told", False)


def test_the_kernel_is_here() -> None:
    assert cpu.available(), cpu.unavailable_reason()
    assert cpu.unavailable_reason() == ""
    assert cpu.variant() in ("baseline", "avx2", "avx512")


@noises
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_auto_takes_the_kernel(noise: Any, dtype: torch.dtype) -> None:
    with watch_paths() as paths:
        exact_loss(X.to(dtype), Y, noise=noise)
        ExactLoss(noise=noise, weight=torch.ones(5), margin=1.0, ignore_index=2)(X.to(dtype), Y)
        expected_accuracy(X.to(dtype), Y, noise=noise)
        expected_error(X.to(dtype), Y, noise=noise)
        log_expected_accuracy(X.to(dtype), Y, noise=noise)
    assert paths == ["cpu"] * 5


@pytest.mark.parametrize("name", BEYOND)
def test_auto_falls_back_where_the_kernel_ends(name: str) -> None:
    with watch_paths() as paths:
        value = exact_loss(**{"logits": X, "target": Y, **BEYOND[name][0]})
    assert paths == ["reference"]
    assert torch.isfinite(value).all()


@pytest.mark.parametrize("name", BEYOND)
def test_forcing_the_kernel_beyond_its_end_says_what_to_write(name: str) -> None:
    changed, reason = BEYOND[name]
    with pytest.raises(
        RuntimeError, match=rf"^backend='cpu' cannot take this call: .*{reason}.* Write backend='auto'\.$"
    ):
        exact_loss(**{"logits": X, "target": Y, "backend": "cpu", **changed})


@pytest.mark.parametrize("name", BEYOND)
def test_the_reference_takes_everything(name: str) -> None:
    with watch_paths() as paths:
        exact_loss(**{"logits": X, "target": Y, "backend": "reference", **BEYOND[name][0]})
    assert paths == ["reference"]


def test_power_that_learns_gets_its_gradient_by_itself() -> None:
    power = torch.tensor(0.3).requires_grad_()
    exact_loss(X, Y, power=power).sum().backward()
    assert power.grad is not None
    assert power.grad != 0
    with torch.no_grad(), watch_paths() as paths:
        exact_loss(X, Y, power=power)
    assert paths == ["cpu"]  # nobody asks for the gradient here


@pytest.mark.usefixtures("no_kernel")
def test_a_missing_kernel_warns_once_and_computes_the_same() -> None:
    with pytest.warns(RuntimeWarning, match=r"native CPU kernel is missing \(it was not built\): .* slower") as caught:
        first, second = exact_loss(X, Y), exact_loss(X, Y)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(first, second)
    torch.testing.assert_close(first, plain_loss(X, Y).float(), **TOLERANCE[torch.float32])


@pytest.mark.usefixtures("no_kernel")
def test_a_missing_kernel_is_no_ones_business_who_did_not_ask_for_it() -> None:
    with warnings.catch_warnings(), watch_paths() as paths:
        warnings.simplefilter("error")
        exact_loss(X, Y, backend="reference")
    assert paths == ["reference"]


@pytest.mark.usefixtures("no_kernel")
def test_a_missing_kernel_that_was_asked_for_is_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"backend='cpu' cannot take this call: it was not built. Write backend='auto'"
    ):
        exact_loss(X, Y, backend="cpu")


@pytest.mark.usefixtures("no_kernel")
def test_a_call_that_the_kernel_would_not_take_does_not_tell_of_its_absence() -> None:
    with warnings.catch_warnings(), watch_paths() as paths:
        warnings.simplefilter("error")
        exact_loss(X.double(), Y)
        exact_loss(X, Y, label_smoothing=0.1)
    assert paths == ["reference", "reference"]


def test_watchers_nest_and_stop() -> None:
    with watch_paths() as outer:
        exact_loss(X, Y)
        with watch_paths() as inner:
            exact_loss(X, Y, backend="reference")
        exact_loss(X, Y)
    exact_loss(X, Y)
    assert outer == ["cpu", "reference", "cpu"]
    assert inner == ["reference"]


def test_watchers_see_their_own_thread_only() -> None:
    with watch_paths() as paths:
        thread = threading.Thread(target=lambda: exact_loss(X, Y))
        thread.start()
        thread.join()
    assert paths == []


def test_a_watcher_stops_when_the_block_fails() -> None:
    with pytest.raises(IndexError), watch_paths() as paths:
        exact_loss(X, Y + 9)
    exact_loss(X, Y)
    assert len(paths) <= 1


@noises
@pytest.mark.parametrize("classes", [2, 7, 33, 300], ids=lambda c: f"C{c}")
@pytest.mark.parametrize("normalize", [False, True, "cap"], ids=["raw", "normalized", "capped"])
def test_both_paths_give_the_same_numbers(noise: Any, classes: int, normalize: Any) -> None:
    logits, target = draw(3, classes, dtype=torch.float32), draw_target(3, classes=classes)
    options: dict[str, Any] = {"noise": noise, "normalize": normalize, "reduction": "mean"}
    results = []
    for backend in ("cpu", "reference"):
        leaf = logits.clone().requires_grad_()
        value = exact_loss(leaf, target, backend=backend, **options)
        value.backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], **TOLERANCE[torch.float32])
