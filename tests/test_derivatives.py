"""Derivatives of every kind: finite differences, second order, forward mode, per-sample; and those of sigma."""

from typing import Any

import pytest
import torch
from plain import BACKENDS, NOISES, TOLERANCE, draw, plain_loss, run, value_and_grad
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from expacc import ExactLoss, argmax_probabilities, exact_loss, expected_error, log_expected_accuracy
from expacc.kernels.dispatch import watch_paths

# torch scripts its own decompositions when a process first uses forward mode.
both = pytest.mark.parametrize("backend", BACKENDS)
noises = pytest.mark.parametrize("noise", NOISES)
wide, narrow = TOLERANCE[torch.float64], TOLERANCE[torch.float32]
# The reference needs some thousand small operations a call, so the checks below are given small batches.
TARGET = torch.tensor([1, 0])
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "error": {"power": 1.0, "normalize": False},
    "likelihood-margin": {"power": 0.0, "normalize": False, "margin": 0.7},
    "weight-mean": {"weight": torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64), "reduction": "mean"},
}


@noises
@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck_in_both_modes(noise: Any, name: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return run("reference", x, TARGET, noise=noise, backend="reference", **OPTIONS[name])

    leaf = draw(2, 3).requires_grad_()
    assert gradcheck(loss, (leaf,), check_forward_ad=True, fast_mode=noise == "gaussian")


@noises
@pytest.mark.parametrize("name", OPTIONS)
def test_gradgradcheck(noise: Any, name: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return run("reference", x, TARGET, noise=noise, backend="reference", **OPTIONS[name])

    assert gradgradcheck(loss, (draw(2, 3).requires_grad_(),), fast_mode=True)


@noises
@pytest.mark.parametrize("kind", ["smoothing", "probabilities"])
def test_gradcheck_of_soft_targets(noise: Any, kind: str) -> None:
    target = TARGET[:1] if kind == "smoothing" else torch.tensor([[0.7, 0.3, 0.0]], dtype=torch.float64)
    smoothing = 0.1 * (kind == "smoothing")

    def loss(x: torch.Tensor) -> torch.Tensor:
        return run("reference", x, target, noise=noise, label_smoothing=smoothing)

    leaf = draw(1, 3).requires_grad_()
    assert gradcheck(loss, (leaf,), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(loss, (leaf,), fast_mode=True)


@noises
@pytest.mark.parametrize("shape", [(), (2,)], ids=["0-dim", "per-sample"])
def test_gradcheck_of_sigma_and_power(noise: Any, shape: Any) -> None:
    logits = draw(2, 3)

    def loss(sigma: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
        return run("reference", logits, TARGET, sigma, power=power, noise=noise, margin=0.7, backend="reference")

    sigma = torch.full(shape, 1.3, dtype=torch.float64).requires_grad_()
    power = torch.tensor(0.3, dtype=torch.float64).requires_grad_()
    assert gradcheck(loss, (sigma, power), check_forward_ad=True, fast_mode=True)


@both
@noises
@pytest.mark.parametrize("shape", [(), (4,)], ids=["0-dim", "per-sample"])
@pytest.mark.parametrize("leaf", ["sigma", "sigma-and-logits"])
@pytest.mark.parametrize("margin", [None, 0.5], ids=lambda r: f"margin{r}")
def test_sigma_gets_its_gradient(backend: str, noise: Any, shape: Any, leaf: str, margin: float | None) -> None:
    logits = draw(4, 5, dtype=torch.float32).requires_grad_(leaf != "sigma")
    target = torch.tensor([0, -100, 2, 3])
    sigma = (torch.linspace(0.7, 2.0, 4) if shape else torch.tensor(1.3)).requires_grad_()
    options: dict[str, Any] = {"noise": noise, "margin": margin, "reduction": "sum"}
    run(backend, logits, target, sigma, backend=backend, **options).backward()
    twin = sigma.detach().clone().requires_grad_()
    plain_loss(logits.detach(), target, twin, **options).backward()
    assert sigma.grad is not None
    assert sigma.grad.dtype == torch.float32
    torch.testing.assert_close(sigma.grad, twin.grad, rtol=1e-4, atol=1e-6)


@both
@noises
def test_sigma_keeps_a_finite_gradient_beside_masks(backend: str, noise: Any) -> None:
    logits, sigma = draw(3, 4, dtype=torch.float32), torch.ones(3).requires_grad_()
    logits[0, 3], logits[1] = -torch.inf, -torch.inf
    run(backend, logits, torch.tensor([0, 1, 2]), sigma, noise=noise, backend=backend).sum().backward()
    assert sigma.grad is not None
    assert torch.isfinite(sigma.grad).all()
    assert sigma.grad[0] != 0
    assert sigma.grad[1] == 0


@both
@noises
def test_equal_sigmas_are_one_sigma(backend: str, noise: Any) -> None:
    logits, target = draw(3, 4, dtype=torch.float32), torch.tensor([0, 1, 2])
    want = run(backend, logits, target, 1.7, noise=noise, backend=backend)
    one = run(backend, logits, target, torch.tensor(1.7, dtype=torch.float64), noise=noise, backend=backend)
    each = run(backend, logits, target, torch.full((3,), 1.7), noise=noise, backend=backend)
    assert torch.equal(want, one)
    torch.testing.assert_close(each, want, **narrow)


@both
@noises
def test_power_as_a_tensor_gets_its_gradient(backend: str, noise: Any) -> None:
    logits, target = draw(3, 4, dtype=torch.float32), torch.tensor([0, 1, 2])
    power = torch.tensor(0.3, dtype=torch.float64).requires_grad_()
    with watch_paths() as paths:
        exact_loss(logits, target, power=power, noise=noise, reduction="mean").backward()
    assert len(paths) == 1
    near = [plain_loss(logits, target, power=q, noise=noise, reduction="mean") for q in (0.3 - 1e-5, 0.3 + 1e-5)]
    assert power.grad is not None
    assert float(power.grad) == pytest.approx(float(near[1] - near[0]) / 2e-5, rel=1e-4)


@both
@noises
@pytest.mark.parametrize("normalize", [False, True, "cap"], ids=["raw", "normalized", "capped"])
def test_second_derivatives_equal_the_references(backend: str, noise: Any, normalize: Any) -> None:
    target, direction = torch.tensor([0, 1]), draw(2, 3, seed=5)
    options: dict[str, Any] = {"noise": noise, "normalize": normalize, "reduction": "mean"}

    def product(ask: str, path: str, dtype: torch.dtype) -> torch.Tensor:
        leaf = draw(2, 3, dtype=dtype).requires_grad_()
        value = run(path, leaf, target, backend=ask, **options)
        (grad,) = torch.autograd.grad(value, leaf, create_graph=True)
        (second,) = torch.autograd.grad((grad * direction.to(dtype)).sum(), leaf)
        return second

    want = product("reference", "reference", torch.float64)
    torch.testing.assert_close(product(backend, backend, torch.float32).double(), want, rtol=1e-4, atol=1e-6)


@both
@noises
def test_a_gradient_penalty_trains(backend: str, noise: Any) -> None:
    leaf = draw(2, 3, dtype=torch.float32).requires_grad_()
    loss = run(backend, leaf, TARGET, noise=noise, reduction="sum", backend=backend)
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (loss + grad.square().sum()).backward()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
    assert not torch.allclose(leaf.grad, grad.detach())


@noises
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("door", ["dual", "jvp"])
def test_forward_mode_equals_reverse_mode(noise: Any, dtype: torch.dtype, door: str) -> None:
    logits, tangent = draw(2, 3, dtype=dtype), draw(2, 3, dtype=dtype, seed=4)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return exact_loss(x, TARGET, noise=noise, reduction="mean")

    with watch_paths() as paths:
        if door == "jvp":
            _, slope = torch.func.jvp(loss, (logits,), (tangent,))
        else:
            with forward_ad.dual_level():
                slope = forward_ad.unpack_dual(loss(forward_ad.make_dual(logits, tangent))).tangent
    assert paths == ["reference"]
    _, grad = value_and_grad(lambda x: run("reference", x, TARGET, noise=noise, reduction="sum",
                                           backend="reference"), logits)  # fmt: skip
    assert slope is not None
    torch.testing.assert_close(slope, (grad / 0.5 * tangent).sum() / 2, **TOLERANCE[dtype])


@noises
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("normalize", [False, True, "cap"], ids=["raw", "normalized", "capped"])
def test_vmapped_gradients_equal_those_of_single_samples(noise: Any, dtype: torch.dtype, normalize: Any) -> None:
    logits, target = draw(4, 3, dtype=dtype), torch.tensor([0, 1, -100, 2])
    logits[1, 0] = -torch.inf
    logits[3] = 0.5
    options: dict[str, Any] = {"noise": noise, "normalize": normalize, "reduction": "mean"}

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return exact_loss(x, y, **options)

    with watch_paths() as paths:
        grads = torch.func.vmap(torch.func.grad(loss))(logits, target)
    assert paths == ["reference"]
    singles = [value_and_grad(lambda x, y=y: run("reference", x, y, backend="reference", **options), row)[1] / 0.5
               for row, y in zip(logits, target, strict=True)]  # fmt: skip
    torch.testing.assert_close(grads, torch.stack(singles), **TOLERANCE[dtype])


@noises
def test_vmap_over_sigma(noise: Any) -> None:
    logits, sigmas = draw(2, 3), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    values = torch.func.vmap(lambda s: exact_loss(logits, TARGET, s, noise=noise))(sigmas)
    want = [exact_loss(logits, TARGET, float(s), noise=noise) for s in sigmas]
    torch.testing.assert_close(values, torch.stack(want), **wide)


@noises
@pytest.mark.parametrize("kind", ["smoothing", "probabilities"])
def test_vmapped_gradients_of_soft_targets(noise: Any, kind: str) -> None:
    logits = draw(2, 3)
    target = TARGET if kind == "smoothing" else torch.softmax(draw(2, 3, seed=2), 1)
    options: dict[str, Any] = {"noise": noise, "label_smoothing": 0.1 * (kind == "smoothing"), "reduction": "mean"}
    grads = torch.func.vmap(torch.func.grad(lambda x, y: exact_loss(x, y, **options)))(logits, target)
    singles = [value_and_grad(lambda x, y=y: exact_loss(x, y, **options), row)[1] / 0.5
               for row, y in zip(logits, target, strict=True)]  # fmt: skip
    torch.testing.assert_close(grads, torch.stack(singles), **wide)


@noises
def test_hessian_of_the_log_is_a_graph_laplacian(noise: Any) -> None:
    hessian = torch.func.hessian(lambda x: -log_expected_accuracy(x, torch.tensor(1), noise=noise))(draw(4))
    torch.testing.assert_close(hessian.sum(-1), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-10)
    torch.testing.assert_close(hessian, hessian.T, rtol=1e-8, atol=1e-10)
    assert (hessian - hessian.diag().diag() <= 1e-12).all()
    assert (torch.linalg.eigvalsh(hessian) >= -1e-10).all()


@noises
@pytest.mark.parametrize("function", [expected_error, log_expected_accuracy], ids=lambda f: f.__name__)
def test_gradcheck_of_the_functions(noise: Any, function: Any) -> None:
    leaf = draw(2, 3).requires_grad_()
    assert gradcheck(lambda x: function(x, TARGET, noise=noise), (leaf,), check_forward_ad=True, fast_mode=True)


@noises
def test_gradcheck_of_all_win_probabilities(noise: Any) -> None:
    sigma = torch.tensor([1.0, 2.0], dtype=torch.float64).requires_grad_()
    leaf = draw(2, 3).requires_grad_()
    function = lambda x, s: argmax_probabilities(x, s, noise=noise)  # noqa: E731
    assert gradcheck(function, (leaf, sigma), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function, (leaf, sigma), fast_mode=True)


@both
def test_forcing_the_kernel_under_a_transform_says_what_to_write(backend: str) -> None:
    loss = ExactLoss(backend=backend)  # type: ignore[arg-type]
    if backend == "reference":
        assert torch.isfinite(torch.func.grad(loss)(draw(2, 3, dtype=torch.float32), TARGET)).all()
        return
    with pytest.raises(RuntimeError, match=r"backend='cpu' cannot take this call: function transforms.*backend='auto'"):
        torch.func.grad(loss)(draw(2, 3, dtype=torch.float32), TARGET)


@both
@noises
@pytest.mark.parametrize("normalize", [False, True, "cap"], ids=["raw", "normalized", "capped"])
@pytest.mark.parametrize("shape", ["none", "mean"])
def test_batched_upstream_gradients_equal_single_ones(backend: str, noise: Any, normalize: Any, shape: str) -> None:
    leaf = draw(2, 3, dtype=torch.float32).requires_grad_()
    options: dict[str, Any] = {"noise": noise, "normalize": normalize, "reduction": shape}
    upstream = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, -1.0]])[:, : (2 if shape == "none" else 1)]
    upstream = upstream if shape == "none" else upstream[:, 0]
    value = run(backend, leaf, TARGET, backend=backend, **options)
    (batched,) = torch.autograd.grad(value, leaf, upstream, is_grads_batched=True, retain_graph=True)
    singles = [torch.autograd.grad(value, leaf, row, retain_graph=True)[0] for row in upstream]
    torch.testing.assert_close(batched, torch.stack(singles), **narrow)
