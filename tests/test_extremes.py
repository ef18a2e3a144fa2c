"""Masks, infinities, NaN, constant logits, one class: finite where it can be, and a bad row spoils only itself."""

import math
from typing import Any

import pytest
import torch
from plain import BACKENDS, NOISES, TOLERANCE, draw, plain_loss, run, value_and_grad

from expacc import argmax_probabilities, exact_loss

INF, NAN = math.inf, math.nan
both = pytest.mark.parametrize("backend", BACKENDS)
noises = pytest.mark.parametrize("noise", NOISES)
normalized = pytest.mark.parametrize("normalize", [False, True, "cap"], ids=["raw", "normalized", "capped"])
powers = pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
close = TOLERANCE[torch.float32]


@both
@noises
@normalized
@powers
@pytest.mark.parametrize("level", [0.0, -3.5, 1e4, 1e30, -3e38])
def test_constant_logits_have_finite_value_and_gradient(
    backend: str, noise: Any, normalize: Any, power: float, level: float
) -> None:
    options: dict[str, Any] = {"noise": noise, "power": power, "normalize": normalize, "backend": backend}
    value, grad = value_and_grad(lambda x: run(backend, x, torch.tensor([0, 4]), **options), torch.full((2, 5), level))
    equal = math.log(5.0) if power == 0 else (1.0 - 0.2**power) / power
    torch.testing.assert_close(value, torch.full((2,), equal), **close)
    assert torch.isfinite(grad).all()
    torch.testing.assert_close(grad.sum(-1), torch.zeros(2), rtol=0, atol=1e-4)
    assert grad[0, 0] < 0 < grad[0, 1]


@both
@noises
@normalized
@powers
@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 1, 2)], ids=str)
def test_one_class_always_wins(backend: str, noise: Any, normalize: Any, power: float, shape: Any) -> None:
    target = torch.zeros(shape[:1] + shape[2:] if len(shape) > 1 else (), dtype=torch.int64)
    options: dict[str, Any] = {"noise": noise, "power": power, "normalize": normalize, "backend": backend}
    value, grad = value_and_grad(lambda x: run(backend, x, target, **options), draw(*shape, dtype=torch.float32))
    assert torch.equal(value, torch.zeros(target.shape))
    assert torch.equal(grad, torch.zeros(shape))


@noises
@normalized
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_one_class_always_wins_as_a_probability(noise: Any, normalize: Any, smoothing: float) -> None:
    options: dict[str, Any] = {"noise": noise, "normalize": normalize, "label_smoothing": smoothing}
    value, grad = value_and_grad(lambda x: run("reference", x, torch.ones(3, 1), **options), draw(3, 1))
    assert torch.equal(value, torch.zeros(3, dtype=torch.float64))
    assert torch.equal(grad, torch.zeros(3, 1, dtype=torch.float64))


@both
@noises
@normalized
@powers
@pytest.mark.parametrize("margin", [None, 0.5], ids=lambda r: f"margin{r}")
def test_masked_competitors_count_as_absent(
    backend: str, noise: Any, normalize: Any, power: float, margin: float | None
) -> None:
    logits, target = draw(4, 5, dtype=torch.float32), torch.tensor([0, 1, 2, 3])
    logits[0, 4] = logits[2, 0] = logits[2, 1] = -INF
    logits[3, [0, 1, 2, 4]] = -INF  # nobody left to compete with
    options: dict[str, Any] = {"noise": noise, "power": power, "normalize": normalize, "margin": margin}
    value, grad = value_and_grad(lambda x: run(backend, x, target, backend=backend, **options), logits)
    want, slope = value_and_grad(lambda x: plain_loss(x, target, **options).float(), logits)
    torch.testing.assert_close(value, want, **close)
    # The plain rows divide -inf by the standard deviation, whose gradient is then NaN; the law is that it is 0.
    slope = torch.where(torch.isinf(logits), 0.0, slope) if not normalize else None
    if slope is not None:
        torch.testing.assert_close(grad, slope, **close)
    assert torch.isfinite(grad).all()
    assert torch.equal(grad[torch.isinf(logits)], torch.zeros(7))


@both
@noises
@normalized
def test_masking_equals_a_very_low_score(backend: str, noise: Any, normalize: Any) -> None:
    logits, target = draw(3, 4, dtype=torch.float32), torch.tensor([0, 1, 2])
    options: dict[str, Any] = {"noise": noise, "normalize": normalize, "backend": backend}
    logits[:, 3] = -INF
    value, grad = value_and_grad(lambda x: run(backend, x, target, **options), logits)
    want, slope = value_and_grad(lambda x: run(backend, x, target, **options), logits[:, :3])
    torch.testing.assert_close(value, want, **close)
    torch.testing.assert_close(grad[:, :3], slope, **close)


@both
@noises
@normalized
@pytest.mark.parametrize("margin", [None, 0.5], ids=lambda r: f"margin{r}")
@pytest.mark.parametrize("power", [0.0, 0.3, 1.0, -1.0])
def test_a_masked_true_class_is_lost(
    backend: str, noise: Any, normalize: Any, margin: float | None, power: float
) -> None:
    logits, target = draw(3, 4, dtype=torch.float32), torch.tensor([0, 1, 2])
    logits[1, 1] = -INF
    options: dict[str, Any] = {"noise": noise, "power": power, "normalize": normalize, "margin": margin}
    value, grad = value_and_grad(lambda x: run(backend, x, target, backend=backend, **options), logits)
    assert value[1] == (pytest.approx(1.0 / power) if power > 0 else INF)
    assert torch.isfinite(value[[0, 2]]).all()
    assert torch.isfinite(grad).all()


@both
@noises
@powers
@pytest.mark.parametrize("margin", [None, 0.5], ids=lambda r: f"margin{r}")
def test_plus_inf_wins_or_loses_in_its_own_row(backend: str, noise: Any, power: float, margin: float | None) -> None:
    logits, target = draw(4, 3, dtype=torch.float32), torch.tensor([0, 1, 2, 0])
    options: dict[str, Any] = {"noise": noise, "power": power, "margin": margin, "normalize": False}
    want, slope = value_and_grad(lambda x: run(backend, x, target, backend=backend, **options), logits)
    logits[0, 1] = logits[1, 1] = INF
    logits[2, 1:] = INF  # equal infinities have no difference
    value, grad = value_and_grad(lambda x: run(backend, x, target, backend=backend, **options), logits)
    assert value[0] == (pytest.approx(1.0 / power) if power > 0 else INF)
    assert value[1] == 0 or margin is not None
    assert torch.isnan(value[2])
    assert torch.equal(value[3], want[3])
    assert torch.equal(grad[3], slope[3])
    assert torch.isfinite(grad[:2]).all()


@both
@noises
@pytest.mark.parametrize("bad", [INF, -INF])
def test_an_infinity_takes_no_part_in_the_statistics(backend: str, noise: Any, bad: float) -> None:
    logits, target = draw(4, 3, dtype=torch.float32), torch.tensor([0, 1, 2, 0])
    logits[1, 0] = bad
    others = [0, 2, 3]
    value, _ = value_and_grad(lambda x: run(backend, x, target, noise=noise, backend=backend), logits)
    finite = logits[torch.isfinite(logits)].double()
    scaled = (logits[others].double() - finite.mean()) / (finite.var() + 1e-5).sqrt()
    want = plain_loss(scaled, target[others], noise=noise, normalize=False).float()
    torch.testing.assert_close(value[others], want, **close)


@both
@noises
@normalized
@powers
@pytest.mark.parametrize("place", [0, 1], ids=["true-class", "competitor"])
@pytest.mark.parametrize("margin", [None, 0.5], ids=lambda r: f"margin{r}")
def test_nan_stays_in_its_row(
    backend: str, noise: Any, normalize: Any, power: float, place: int, margin: float | None
) -> None:
    logits, target = draw(4, 4, dtype=torch.float32), torch.tensor([2, 0, 1, 0])
    others = [0, 2, 3]
    logits[:2, 3], logits[1, place] = -INF, NAN
    options: dict[str, Any] = {"noise": noise, "power": power, "normalize": normalize, "margin": margin}
    upstream = torch.tensor([1.0, 2.0, 0.5, 3.0])
    leaf, rest = logits.clone().requires_grad_(), logits[others].requires_grad_()
    value = run(backend, leaf, target, backend=backend, **options)
    want = run(backend, rest, target[others], backend=backend, **options)
    (grad,), (slope,) = torch.autograd.grad(value, leaf, upstream), torch.autograd.grad(want, rest, upstream[others])
    assert torch.isnan(value[1])
    assert torch.isnan(grad[1]).all()
    torch.testing.assert_close(value[others], want, **close)
    torch.testing.assert_close(grad[others], slope, **close)


@noises
@normalized
@pytest.mark.parametrize("soft", ["smoothing", "probabilities"])
def test_nan_stays_in_its_row_with_soft_targets(noise: Any, normalize: Any, soft: str) -> None:
    logits, target = draw(3, 3), torch.tensor([2, 0, 1])
    logits[1, 1] = NAN
    if soft == "probabilities":
        target = torch.nn.functional.one_hot(target, 3).double() * 0.8 + 0.2 / 3
    options: dict[str, Any] = {"noise": noise, "normalize": normalize, "label_smoothing": 0.2 * (soft == "smoothing")}
    leaf, rest = logits.clone().requires_grad_(), logits[::2].clone().requires_grad_()
    value, want = run("reference", leaf, target, **options), run("reference", rest, target[::2], **options)
    (grad,), (slope,) = torch.autograd.grad(value.sum(), leaf), torch.autograd.grad(want.sum(), rest)
    assert torch.isnan(value[1])
    assert torch.isnan(grad[1]).all()
    torch.testing.assert_close(value[::2], want, **TOLERANCE[torch.float64])
    torch.testing.assert_close(grad[::2], slope, **TOLERANCE[torch.float64])


@both
@noises
def test_nan_reaches_the_mean_but_no_other_rows_gradient(backend: str, noise: Any) -> None:
    logits, target = draw(3, 3, dtype=torch.float32), torch.tensor([2, 0, 1])
    logits[1, 1] = NAN
    value, grad = value_and_grad(
        lambda x: run(backend, x, target, noise=noise, reduction="mean", backend=backend), logits
    )
    assert torch.isnan(value)
    assert torch.isfinite(grad[[0, 2]]).all()
    assert (grad[[0, 2]] != 0).any()


@both
@noises
@normalized
def test_hopeless_rows_keep_their_gradient_at_power_zero(backend: str, noise: Any, normalize: Any) -> None:
    logits = torch.tensor([[0.0, 1e4, -1e4], [1e4, 0.0, 0.0]])
    options: dict[str, Any] = {"noise": noise, "power": 0, "normalize": normalize, "backend": backend}
    value, grad = value_and_grad(lambda x: run(backend, x, torch.tensor([0, 0]), **options), logits)
    assert torch.isfinite(value).all()
    assert grad[0, 0] < 0 < grad[0, 1]


@noises
@pytest.mark.parametrize("bad", [INF, NAN])
def test_argmax_probabilities_keep_a_bad_row_to_itself(noise: Any, bad: float) -> None:
    logits = draw(3, 4)
    want, slope = value_and_grad(lambda x: argmax_probabilities(x, noise=noise), logits)
    logits[1, 2] = bad
    value, grad = value_and_grad(lambda x: argmax_probabilities(x, noise=noise), logits)
    assert torch.equal(value[::2], want[::2])
    torch.testing.assert_close(grad[0], slope[0], **TOLERANCE[torch.float64])
    torch.testing.assert_close(grad[2], slope[2], **TOLERANCE[torch.float64])
    assert torch.isnan(value[1]).any() or (value[1, 2] == 1 and math.isinf(bad))


@noises
def test_argmax_probabilities_of_masked_classes_are_zero(noise: Any) -> None:
    logits = draw(3, 4)
    logits[0, 1] = -INF
    logits[1] = -INF
    value, grad = value_and_grad(lambda x: argmax_probabilities(x, noise=noise), logits)
    rest = argmax_probabilities(logits[:1, [0, 2, 3]], noise=noise)
    torch.testing.assert_close(value[:1, [0, 2, 3]], rest, **TOLERANCE[torch.float64])
    assert value[0, 1] == 0
    torch.testing.assert_close(value[1], torch.full((4,), 0.25, dtype=torch.float64))
    assert torch.isfinite(grad).all()
    assert grad[0, 1] == 0
    assert torch.equal(grad[1], torch.zeros(4, dtype=torch.float64))


@both
@noises
@pytest.mark.parametrize("sigma", [0.0, -1.0, NAN])
@pytest.mark.parametrize("shape", [(), (2,)], ids=["0-dim", "per-sample"])
def test_a_tensor_that_cannot_be_a_scale_gives_nan(backend: str, noise: Any, sigma: float, shape: Any) -> None:
    # Looking at its values would make the host wait for a GPU, so it cannot raise; a number does.
    value = run(backend, draw(2, 3, dtype=torch.float32), torch.tensor([0, 1]), torch.full(shape, sigma), noise=noise,
                backend=backend)  # fmt: skip
    assert torch.isnan(value).all()


@pytest.mark.parametrize("gap", [1e5, 9.9e5, 1.1e6, 3e8, 1e12, 1e30])
def test_gaps_without_end_keep_their_logarithm(gap: float) -> None:
    """Log P → -gap²/4 with one competitor, and the gradient → gap/2, on the reference, however far."""
    x = torch.tensor([[0.0, gap]], dtype=torch.float64)
    value, grad = value_and_grad(lambda x: run("reference", x, torch.tensor([0]), power=0.0, normalize=False), x)
    tail = math.log(gap * math.sqrt(math.pi)) if gap < 1e6 else 0.0
    torch.testing.assert_close(value, torch.tensor([gap * gap / 4 + tail], dtype=torch.float64), rtol=2e-10, atol=0.0)
    # half of it: value_and_grad's upstream gradient
    torch.testing.assert_close(grad, gap / 4 * torch.tensor([[-1.0, 1.0]], dtype=torch.float64), rtol=2e-9, atol=0.0)


@pytest.mark.parametrize("gap", [3e8, 1e155, 1e300])
@powers
def test_a_lead_without_end_is_certain(gap: float, power: float) -> None:
    x = torch.tensor([[gap, 0.0, 1.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
    value, grad = value_and_grad(lambda x: run("reference", x, torch.tensor([0, 0]), power=power, normalize=False), x)
    assert value[0] == 0.0
    assert (grad[0] == 0.0).all()
    assert torch.isfinite(grad).all()


@noises
@pytest.mark.parametrize("scale", [1e15, 1e19, 1e25, 1e30])
def test_huge_logits_are_normalised_alike_on_both_paths(noise: Any, scale: float) -> None:
    x, target = draw(4, 5, dtype=torch.float32) * scale, torch.tensor([0, 1, 2, 4])
    slopes = [
        value_and_grad(lambda x, b=b: run(b, x, target, noise=noise, reduction="mean", backend=b), x)[1].double()
        * scale
        for b in BACKENDS
    ]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-4, atol=1e-5)


@noises
@pytest.mark.parametrize("classes", [4, 64])
@pytest.mark.parametrize("margin", [-2.0, -0.1, 0.5])
def test_masked_rows_below_a_margin_count_as_equal_scores(noise: Any, classes: int, margin: float) -> None:
    target, sigma = torch.tensor([1]), torch.tensor([0.7], dtype=torch.float64)
    results = []
    for level, backend in ((-INF, "cpu"), (-INF, "reference"), (0.0, "reference")):
        s = sigma.clone().requires_grad_()
        options: dict[str, Any] = {"margin": margin, "noise": noise, "normalize": False, "backend": backend}
        value = exact_loss(torch.full((1, classes), level), target, s, power=1.0, **options)
        results.append((value.detach(), torch.autograd.grad(value.sum(), s)[0]))
    for value, slope in results[:2]:
        torch.testing.assert_close(value, results[2][0], **close)
        torch.testing.assert_close(slope, results[2][1], rtol=1e-4, atol=1e-6)


@both
def test_two_infinite_scores_spoil_their_row_only(backend: str) -> None:
    x = torch.tensor([[INF, INF, 1.0, 2.0], [0.5, 1.0, 0.0, -1.0]])
    x.requires_grad_()
    value = exact_loss(x, torch.tensor([0, 1]), backend=backend)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(value[1], x)
    assert torch.isnan(value[0])
    torch.testing.assert_close(grad[1], torch.tensor([0.2718, -0.4429, 0.1168, -0.0760]), rtol=0, atol=1e-4)


@both
def test_a_nan_reaches_its_own_sigma_only(backend: str) -> None:
    sigma = torch.ones(2, requires_grad=True)
    x = torch.tensor([[NAN, 0.0, 1.0], [1.0, 0.0, 2.0]])
    exact_loss(x, torch.tensor([1, 1]), sigma, normalize=False, backend=backend).sum().backward()  # type: ignore[arg-type]
    assert sigma.grad is not None
    assert torch.isnan(sigma.grad).tolist() == [True, False]


@both
def test_an_infinite_sigma_cannot_be_meant(backend: str) -> None:
    x = draw(2, 3, dtype=torch.float32)
    assert torch.isnan(exact_loss(x, torch.tensor([0, 1]), torch.tensor(INF), backend=backend)).all()  # type: ignore[arg-type]


@both
def test_differences_beyond_float_are_a_loss(backend: str) -> None:
    x = torch.tensor([[3e38, -3e38, 0.0, 0.0]])
    value, grad = value_and_grad(
        lambda x: run(backend, x, torch.tensor([1]), noise="gumbel", power=0.0, normalize=False, backend=backend), x
    )
    assert value.item() > 3e38
    assert grad.tolist() == [[0.5, -0.5, 0.0, 0.0]]  # times value_and_grad's upstream gradient
