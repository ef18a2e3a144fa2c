"""Genz's algorithm against the quadrature and scipy: Theorems 4.2 and 4.3 as tests."""

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from expacc.integrals.genz import orthant_probability, structured_orthant_probability, win_probability
from expacc.integrals.normal import log_cdf
from expacc.integrals.quadrature import Rule, log_win_probability

INF = math.inf
REPEATS = 24
# The means of the paper's study of the integral's error.
PAPER = [1.0, 2.0, 0.5, 10.0, 6.0, -3.0, -4.0, 5.0, 1.0, 0.0]
MEANS = {
    "equal": [0.0] * 9,
    # in rising order: as given, the estimates are too skewed for a standard error to describe (see `reorder`)
    "paper": sorted(PAPER),
    "confident": [3.0, 4.0, 2.5, 5.0],
    "hopeless": [-2.0, -3.0, 1.0, 0.5],
    "one": [0.7],
    "two": [0.3, -1.2],
    "flank": [3.0] * 29,
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def double(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def structure(d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64) + 1


def truth(mean: Tensor) -> tuple[float, Tensor]:
    """Return P and ∂P/∂m from the quadrature."""
    m = mean.clone().requires_grad_()
    p = log_win_probability(m, Rule(128, 36.0)).exp()
    return p.item(), torch.autograd.grad(p, m)[0]


def structured(mean: Tensor, samples: int, source: torch.Generator) -> Tensor:
    return structured_orthant_probability(mean, samples, source)


def reordered(mean: Tensor, samples: int, source: torch.Generator) -> Tensor:
    return structured_orthant_probability(mean.flip(-1), samples, source, reorder=True)


def general(mean: Tensor, samples: int, source: torch.Generator) -> Tensor:
    return orthant_probability(mean, structure(mean.shape[-1]), samples, source)


def sobol(mean: Tensor, samples: int, source: torch.Generator) -> Tensor:
    return structured_orthant_probability(mean, samples, source, sequence="sobol")


def repeats(estimate: Callable, mean: Tensor, samples: int = 64) -> tuple[Tensor, Tensor]:
    """Return values and gradients of independent estimates: rows share a Sobol scramble, hence one call each."""
    source = generator(7)
    values, slopes = [], []
    for _ in range(REPEATS):
        m = mean.clone().requires_grad_()
        value = estimate(m, samples, source)
        slopes.append(torch.autograd.grad(value, m)[0])
        values.append(value.detach())
    return torch.stack(values), torch.stack(slopes)


def assert_unbiased(drawn: Tensor, expected: Tensor) -> None:
    """Assert agreement within four standard errors of the repeats; 1e-13 is for what has no variance."""
    error = drawn.std(0) / math.sqrt(len(drawn))
    assert ((drawn.mean(0) - expected).abs() <= 4 * error + 1e-13).all()


ESTIMATES = pytest.mark.parametrize("estimate", [structured, reordered, general, sobol], ids=lambda f: f.__name__)


@ESTIMATES
@pytest.mark.parametrize("name", MEANS)
def test_theorems_4_2_and_4_3_value_and_gradient_agree_with_the_quadrature(estimate: Callable, name: str) -> None:
    mean = double(MEANS[name])
    p, slope = truth(mean)
    values, slopes = repeats(estimate, mean)
    assert_unbiased(values, double([p])[0])
    assert_unbiased(slopes, slope)
    # so that a wide error does not make the test easy
    assert values.std() <= 0.1 * p
    assert (slopes.std(0) <= 0.25 * slope.max() + 1e-13).all()


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("sequence", ["random", "sobol"])
def test_structured_is_the_general_estimate(name: str, sequence) -> None:
    mean = double([MEANS[name], MEANS[name][::-1]]).requires_grad_()
    one = structured_orthant_probability(mean, 16, generator(3), sequence=sequence)
    other = orthant_probability(mean, structure(mean.shape[-1]), 16, generator(3), sequence=sequence)
    torch.testing.assert_close(one, other, rtol=1e-11, atol=0)
    slopes = [torch.autograd.grad(p.sum(), mean)[0] for p in (one, other)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-18)


def random_case(d: int) -> tuple[Tensor, Tensor]:
    source = generator(d)
    a = torch.randn(d, d, generator=source, dtype=torch.float64)
    return torch.randn(d, generator=source, dtype=torch.float64), a @ a.mT + 0.3 * torch.eye(d, dtype=torch.float64)


def scipy_orthant(mean: Tensor, covariance: Tensor) -> float:
    """Return P(t > 0) = P(-t < 0), to about 1e-7."""
    d = len(mean)
    return float(
        multivariate_normal.cdf(
            torch.zeros(d).numpy(),
            (-mean).numpy(),
            covariance.numpy(),  # pyright: ignore[reportArgumentType]  # scipy annotates its default, 1
            abseps=1e-8,
            releps=1e-8,
            maxpts=400_000 * d,
            rng=1,
        )
    )


@pytest.mark.parametrize("d", [2, 3, 4, 5])
def test_any_covariance_agrees_with_scipy(d: int) -> None:
    mean, covariance = random_case(d)
    values, slopes = repeats(lambda m, s, g: orthant_probability(m, covariance, s, g), mean, samples=256)
    error = values.std() / math.sqrt(REPEATS)
    assert abs(values.mean().item() - scipy_orthant(mean, covariance)) <= 4 * error + 1e-6
    # the gradient, against central differences of scipy's value
    step = 1e-2 * torch.eye(d, dtype=torch.float64)
    differences = double(
        [(scipy_orthant(mean + h, covariance) - scipy_orthant(mean - h, covariance)) / 2e-2 for h in step]
    )
    error = slopes.std(0) / math.sqrt(REPEATS)
    assert ((slopes.mean(0) - differences).abs() <= 4 * error + 1e-4).all()


def test_a_covariance_for_every_row() -> None:
    cases = [random_case(3), random_case(3 + 0)]
    mean = torch.stack([case[0] for case in cases])
    covariance = torch.stack([cases[0][1], structure(3)])
    m = mean.clone().requires_grad_()
    p = orthant_probability(m, covariance, 4096, generator())
    (slope,) = torch.autograd.grad(p.sum(), m)
    assert p[0].item() == pytest.approx(scipy_orthant(mean[0], covariance[0]), rel=0.05)
    expected, expected_slope = truth(mean[1])
    assert p[1].item() == pytest.approx(expected, rel=0.05)
    torch.testing.assert_close(slope[1], expected_slope, rtol=0.1, atol=1e-3)


@pytest.mark.parametrize("estimate", [structured, general], ids=lambda f: f.__name__)
def test_one_dimension_is_exact(estimate: Callable) -> None:
    mean = double([[-40.0], [-1.0], [0.0], [2.0], [40.0]]).requires_grad_()
    p = estimate(mean, 1, generator())
    expected = log_cdf(mean[:, 0] / math.sqrt(2)).exp()
    torch.testing.assert_close(p, expected, rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(p.sum(), mean)
    torch.testing.assert_close(slope[:, 0], torch.autograd.grad(expected.sum(), mean)[0][:, 0], rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("estimate", [structured, general], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3), (2, 0, 3)], ids=str)
def test_empty_shapes(estimate: Callable, shape: tuple[int, ...]) -> None:
    mean = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    p = estimate(mean, 4, generator())
    assert p.shape == shape[:-1]
    assert (p == 1).all()  # nothing to beat
    assert torch.autograd.grad(p.sum(), mean)[0].shape == shape


@ESTIMATES
@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        pytest.param([INF, INF, INF], 1.0, id="certain"),
        pytest.param([1.0, -INF, 2.0], 0.0, id="lost"),
        pytest.param([-INF, INF, -INF], 0.0, id="lost to some"),
        pytest.param([INF, 1.0, INF], 0.760249938906523, id="one left"),
        pytest.param([1e8, 1e8], 1.0, id="far right"),
        pytest.param([-1e8, 1e8, 0.0], 0.0, id="far wrong"),
        pytest.param([1e300, -1e300], 0.0, id="huge"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_extremes_are_finite(estimate: Callable, mean: list[float], expected: float, dtype: torch.dtype) -> None:
    m = torch.tensor(mean, dtype=torch.float64).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    m = torch.where(torch.isinf(double(mean)), double(mean), m).to(dtype).requires_grad_()
    if estimate is general:
        p = orthant_probability(m, structure(len(mean)).to(dtype), 4096, generator())
    else:
        p = estimate(m, 4096, generator())
    (slope,) = torch.autograd.grad(p, m)
    assert p.item() == pytest.approx(expected, rel=0.02, abs=1e-30)
    assert torch.isfinite(slope).all()
    assert (slope >= 0).all()
    assert (slope[torch.isinf(m)] == 0).all()


@ESTIMATES
def test_nan_stays_in_its_row(estimate: Callable) -> None:
    mean = double([[1.0, 2.0, 3.0], [1.0, math.nan, 3.0]]).requires_grad_()
    p = estimate(mean, 8, generator())
    (slope,) = torch.autograd.grad(p.sum(), mean)
    assert torch.isnan(p).tolist() == [False, True]
    assert torch.isfinite(slope[0]).all()
    assert torch.isnan(slope[1]).any()


@ESTIMATES
def test_backward_is_reproducible_and_leaves_the_generator_alone(estimate: Callable) -> None:
    mean = double([PAPER, PAPER[::-1]]).requires_grad_()
    source = generator(1)
    p = estimate(mean, 16, source)
    state = source.get_state()
    first, second = (torch.autograd.grad(p.sum(), mean, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(source.get_state(), state)
    again = estimate(mean, 16, generator(1))
    assert torch.equal(again, p)
    assert torch.equal(torch.autograd.grad(again.sum(), mean)[0], first)
    assert not torch.equal(estimate(mean, 16, source), p)  # the generator moved on


@ESTIMATES
def test_the_global_random_state_is_neither_read_nor_moved(estimate: Callable) -> None:
    mean = double(PAPER).requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        p = estimate(mean, 16, generator(1))
        return p, torch.autograd.grad(p, mean)[0]

    torch.manual_seed(0)
    state = torch.get_rng_state()
    one = run()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    other = run()
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@ESTIMATES
def test_second_derivatives_are_refused(estimate: Callable) -> None:
    mean = double(PAPER).requires_grad_()
    (slope,) = torch.autograd.grad(estimate(mean, 4, generator()), mean, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*integrator='quadrature'"):
        slope.sum().backward()


def test_sobol_points_reduce_the_error() -> None:
    mean = double(sorted(PAPER))
    p, slope = truth(mean)
    random_values, random_slopes = repeats(structured, mean, 128)
    sobol_values, sobol_slopes = repeats(sobol, mean, 128)
    assert (sobol_values - p).square().mean() < 0.25 * (random_values - p).square().mean()
    assert (sobol_slopes - slope).square().mean() < 0.5 * (random_slopes - slope).square().mean()


def test_reordering_reduces_the_error_of_the_papers_example() -> None:
    mean = double(PAPER).expand(400, -1).clone().requires_grad_()
    p, slope = truth(double(PAPER))

    def errors(reorder: bool) -> tuple[float, float]:
        values = structured_orthant_probability(mean, 16, generator(), reorder=reorder)
        (slopes,) = torch.autograd.grad(values.sum(), mean)
        return (values - p).square().mean().item(), (slopes - slope).square().mean().item()

    plain, better = errors(False), errors(True)
    assert better[0] < plain[0] / 100  # measured: 30² and 100²
    assert better[1] < plain[1] / 1000


def test_more_samples_reduce_the_error() -> None:
    mean = double(sorted(PAPER))
    p, _ = truth(mean)
    few, many = (statistics.fmean((repeats(structured, mean, s)[0] - p).square().tolist()) for s in (8, 512))
    assert many < few / 16  # 64 in the long run


def test_win_probability_leaves_out_the_targets_column() -> None:
    m = double([[INF, 1.0, 2.0, -0.5], [1.0, 2.0, INF, -0.5], [INF, INF, 1.0, INF], [INF] * 4]).requires_grad_()
    p = win_probability(m, 512, generator())
    (slope,) = torch.autograd.grad(p.sum(), m)
    expected, expected_slope = truth(double([1.0, 2.0, -0.5]))
    assert p[:2].tolist() == pytest.approx([expected, expected], rel=0.05)
    torch.testing.assert_close(slope[1, [0, 1, 3]], expected_slope, rtol=0.1, atol=1e-2)
    assert p[2].item() == pytest.approx(0.760249938906523, rel=0.02)
    assert p[3].item() == 1.0
    assert (slope[torch.isinf(m)] == 0).all()


def test_win_probability_of_one_class_is_one() -> None:
    m = torch.full((3, 1), INF, requires_grad=True)
    p = win_probability(m, 4, generator())
    assert p.tolist() == [1.0] * 3
    assert torch.autograd.grad(p.sum(), m)[0].tolist() == [[0.0]] * 3


def test_win_probability_reorders() -> None:
    m = double([INF, *PAPER])
    sorted_first = structured_orthant_probability(double(sorted(PAPER)), 16, generator())
    assert torch.equal(win_probability(m, 16, generator()), sorted_first)
    plain = structured_orthant_probability(double(PAPER), 16, generator())
    assert torch.equal(win_probability(m, 16, generator(), reorder=False), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_the_float32_result_rounded(dtype: torch.dtype) -> None:
    m = torch.tensor([[INF, 1.0, 2.0, -0.5]], dtype=dtype)
    p = win_probability(m, 16, generator())
    assert torch.equal(p, win_probability(m.float(), 16, generator()).to(dtype))


def test_autocast_changes_nothing() -> None:
    mean = torch.tensor(PAPER, requires_grad=True)
    covariance = structure(10).float()
    p = orthant_probability(mean, covariance, 16, generator())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same = orthant_probability(mean, covariance, 16, generator())
        (slope,) = torch.autograd.grad(same, mean)
    assert torch.equal(same, p)
    assert torch.equal(slope, torch.autograd.grad(p, mean)[0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"generator": None}, ValueError, "generator must be a torch.Generator, got None"),
        ({"generator": 0}, TypeError, "generator must be a torch.Generator, got int"),
        ({"samples": 0}, ValueError, "samples must be at least 1, got 0"),
        ({"samples": 1.5}, TypeError, "samples must be an integer, got 1.5"),
        ({"samples": True}, TypeError, "samples must be an integer, got True"),
        ({"sequence": "halton"}, ValueError, "sequence must be 'random' or 'sobol', got 'halton'"),
        ({"mean": [0.0, 0.0]}, TypeError, "mean must be a tensor, got list"),
        ({"mean": torch.zeros(2, dtype=torch.int64)}, TypeError, "mean must be floating point, got torch.int64"),
        ({"mean": torch.tensor(0.0)}, ValueError, "mean must have at least 1 dimension"),
        ({"covariance": torch.eye(3)}, ValueError, r"covariance must have shape \(2, 2\).*got \(3, 3\)"),
        ({"covariance": torch.eye(2, requires_grad=True)}, ValueError, "write covariance.detach()"),
        ({"covariance": torch.tensor([[1.0, 0.5], [0.0, 1.0]])}, ValueError, "covariance must be symmetric"),
        ({"covariance": -torch.eye(2)}, ValueError, "covariance must be positive definite"),
        ({"covariance": [[1.0]]}, TypeError, "covariance must be a tensor, got list"),
    ],
)  # fmt: skip
def test_errors_say_what_arrived(arguments: dict, error: type[Exception], message: str) -> None:
    valid = {"mean": torch.zeros(2), "covariance": torch.eye(2), "samples": 4, "generator": generator()}
    with pytest.raises(error, match=message):
        orthant_probability(**(valid | arguments))


def test_sobol_has_a_largest_dimension() -> None:
    with pytest.raises(ValueError, match="at most 21201 dimensions, and 21202 are needed"):
        structured_orthant_probability(torch.zeros(21203), 1, generator(), sequence="sobol")


def test_win_probability_needs_a_class() -> None:
    with pytest.raises(ValueError, match=r"m must have at least one class, got shape \(2, 0\)"):
        win_probability(torch.zeros(2, 0), 4, generator())
