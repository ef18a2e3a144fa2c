"""integrals/monte_carlo.py: unbiased in value and in every derivative, for any function of the scores."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from expacc.integrals.monte_carlo import expected_indicator, win_probability
from expacc.integrals.quadrature import Rule, log_win_probability

# torch's own, from the first dual number of a process

INF = math.inf
GAPS = [INF, 0.8, -0.3, 1.5]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def double(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_unbiased(drawn: Tensor, expected: Tensor) -> None:
    """Assert agreement within four standard errors of independent estimates, the first dimension."""
    error = drawn.std(0) / math.sqrt(len(drawn))
    assert ((drawn.mean(0) - expected).abs() <= 4 * error + 1e-12).all(), (drawn.mean(0), expected, error)


def first_wins(s: Tensor) -> Tensor:
    return s.argmax(-1) == 0


def exact_win(mean: Tensor, sigma: Tensor) -> Tensor:
    """Return P(score 0 is the largest) by quadrature."""
    m = (mean[..., :1] - mean[..., 1:]) / sigma.unsqueeze(-1)
    return log_win_probability(m, Rule(96, 36.0)).exp()


@pytest.mark.parametrize("samples", [1, 2, 64])
def test_the_accuracy_and_its_gradients_are_unbiased(samples: int) -> None:
    rows = 20_000
    mean, sigma = double([0.5, 0.0, -0.4]), double([1.3])[0]
    reference = [mean.clone().requires_grad_(), sigma.clone().requires_grad_()]
    p = exact_win(*reference)
    slopes = torch.autograd.grad(p, reference)
    arguments = [mean.expand(rows, -1).clone().requires_grad_(), sigma.expand(rows).clone().requires_grad_()]
    estimate = expected_indicator(arguments[0], first_wins, arguments[1], samples, generator(samples + 10))
    drawn = torch.autograd.grad(estimate.sum(), arguments)
    assert_unbiased(estimate.detach(), p.detach())
    assert_unbiased(drawn[0], slopes[0])
    assert_unbiased(drawn[1], slopes[1])


def test_second_derivatives_are_unbiased() -> None:
    rows = 100_000
    mean = double([0.5, 0.0, -0.4])
    expected = torch.autograd.functional.hessian(lambda x: exact_win(x, double([1.0])[0]), mean)
    x = mean.expand(rows, -1).clone().requires_grad_()
    value = expected_indicator(x, first_wins, 1.0, 4, generator(2))
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope[:, 0].sum(), x)
    assert_unbiased(second, expected[0])


@pytest.mark.parametrize(
    ("function", "value", "slope"),
    [
        # E of s ~ N(μ, 0.25) at μ = (0.4, -1)
        pytest.param(lambda s: (s[..., 0] > 0).float(), 0.788144601416603, [0.579383, 0.0], id="half line"),
        pytest.param(lambda s: s.sum(-1), -0.6, [1.0, 1.0], id="linear"),
        pytest.param(lambda s: s.square().sum(-1), 1.66, [0.8, -2.0], id="square"),
        pytest.param(lambda s: torch.ones_like(s[..., 0]), 1.0, [0.0, 0.0], id="constant"),
        pytest.param(lambda s: s[..., 0].abs() < INF, 1.0, [0.0, 0.0], id="bool"),
    ],
)
def test_any_function_of_the_scores(function: Callable, value: float, slope: list[float]) -> None:
    mean = double([0.4, -1.0]).expand(20_000, 2).clone().requires_grad_()
    estimate = expected_indicator(mean, function, 0.5, 8, generator(1))
    (drawn,) = torch.autograd.grad(estimate.sum(), mean)
    assert_unbiased(estimate.detach(), double([value])[0])
    assert_unbiased(drawn, double(slope))


def test_any_covariance() -> None:
    covariance = torch.eye(3, dtype=torch.float64) + 1
    m = double([0.8, -0.3, 1.5])
    reference = m.clone().requires_grad_()
    p = log_win_probability(reference, Rule(96, 36.0)).exp()
    (slope,) = torch.autograd.grad(p, reference)
    rows = m.expand(20_000, 3).clone().requires_grad_()
    estimate = expected_indicator(
        rows, lambda t: (t > 0).all(-1), samples=8, generator=generator(4), covariance=covariance
    )
    (drawn,) = torch.autograd.grad(estimate.sum(), rows)
    assert_unbiased(estimate.detach(), p.detach())
    assert_unbiased(drawn, slope)


@pytest.mark.parametrize("samples", [1, 16])
def test_win_probability_is_unbiased(samples: int) -> None:
    reference = double(GAPS).requires_grad_()
    p = log_win_probability(reference, Rule(96, 36.0)).exp()
    (slope,) = torch.autograd.grad(p, reference)
    m = double(GAPS).expand(20_000, 4).clone().requires_grad_()
    estimate = win_probability(m, samples, generator(samples))
    (drawn,) = torch.autograd.grad(estimate.sum(), m)
    assert_unbiased(estimate.detach(), p.detach())
    assert_unbiased(drawn, slope)


def test_win_probabilitys_gradient_is_the_log_derivative_of_the_differences() -> None:
    # ∇ log N(t; m, Σ) = Σ⁻¹(t − m), from the same noise
    m = double(GAPS).requires_grad_()
    samples = 32
    (slope,) = torch.autograd.grad(win_probability(m, samples, generator()), m)
    e = torch.randn((samples, 4), generator=generator(), dtype=torch.float64)
    t = double(GAPS)[1:] + e[:, :1] - e[:, 1:]
    score = torch.linalg.solve(torch.eye(3, dtype=torch.float64) + 1, (t - double(GAPS)[1:]).mT).mT
    expected = ((t > 0).all(-1, keepdim=True) * score).mean(0)
    torch.testing.assert_close(slope[1:], expected, rtol=1e-12, atol=1e-15)
    assert slope[0] == 0


def test_win_probabilitys_second_derivative_is_unbiased() -> None:
    expected = torch.autograd.functional.hessian(
        lambda x: log_win_probability(x, Rule(96, 36.0)).exp(), double(GAPS[1:])
    )
    m = double(GAPS).expand(100_000, 4).clone().requires_grad_()
    (slope,) = torch.autograd.grad(win_probability(m, 4, generator()).sum(), m, create_graph=True)
    (second,) = torch.autograd.grad(slope[:, 1].sum(), m)
    assert_unbiased(second[:, 1:], expected[0])


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        pytest.param([INF, INF, INF], 1.0, id="no competitor"),
        pytest.param([INF], 1.0, id="one class"),
        pytest.param([INF, -INF, 1.0], 0.0, id="lost"),
        pytest.param([1e8, INF, 1e300], 1.0, id="far right"),
        pytest.param([-1e8, INF, 0.0], 0.0, id="far wrong"),
    ],
)
def test_extremes_of_win_probability(m: list[float], expected: float) -> None:
    x = double(m).requires_grad_()
    p = win_probability(x, 64, generator())
    (slope,) = torch.autograd.grad(p, x)
    assert p.item() == expected
    assert torch.isfinite(slope).all()
    assert (slope[torch.isinf(x)] == 0).all()


def test_a_masked_competitor_changes_nothing_in_distribution() -> None:
    m = double([*GAPS, INF, INF]).expand(20_000, 6).clone().requires_grad_()
    reference = double(GAPS).requires_grad_()
    p = log_win_probability(reference, Rule(96, 36.0)).exp()
    estimate = win_probability(m, 4, generator(8))
    (drawn,) = torch.autograd.grad(estimate.sum(), m)
    assert_unbiased(estimate.detach(), p.detach())
    assert_unbiased(drawn[:, :4], torch.autograd.grad(p, reference)[0])


@pytest.mark.parametrize("estimate", [
    lambda x: win_probability(x, 8, generator()), lambda x: expected_indicator(x, first_wins, 1.0, 8, generator())
], ids=["win_probability", "expected_indicator"])  # fmt: skip
def test_nan_stays_in_its_row_and_inf_has_no_gradient(estimate: Callable) -> None:
    x = double([[INF, 0.0, 1.0], [INF, math.nan, 1.0]]).requires_grad_()
    p = estimate(x)
    (slope,) = torch.autograd.grad(p.sum(), x)
    assert torch.isnan(p).tolist() == [False, True]
    assert torch.isfinite(slope[0]).all()
    assert slope[0, 0] == 0
    assert torch.isnan(slope[1]).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_dtype_is_the_arguments(dtype: torch.dtype) -> None:
    m = torch.tensor(GAPS, dtype=dtype, requires_grad=True)
    p = win_probability(m, 8, generator())
    assert p.dtype == dtype
    assert torch.autograd.grad(p, m)[0].dtype == dtype
    assert expected_indicator(m[1:], first_wins, 1.0, 8, generator()).dtype == dtype


def test_forward_mode_agrees_with_the_gradient() -> None:
    m = double(GAPS[1:])

    def function(x: Tensor) -> Tensor:
        return expected_indicator(x, first_wins, 0.7, 32, generator())

    tangent = torch.func.jvp(function, (m,), (double([1.0, -2.0, 0.5]),))[1]
    slope = torch.func.grad(function)(m)
    torch.testing.assert_close(tangent, slope @ double([1.0, -2.0, 0.5]))


def test_only_the_generator_decides() -> None:
    m = double(GAPS).requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        p = win_probability(m, 16, generator(1)) + expected_indicator(m[1:], first_wins, 1.0, 16, generator(2))
        return p, torch.autograd.grad(p, m)[0]

    torch.manual_seed(0)
    state = torch.get_rng_state()
    one = run()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    other = run()
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


def test_the_indicator_records_no_graph_and_is_called_once() -> None:
    calls: list[Tensor] = []

    def indicator(s: Tensor) -> Tensor:
        calls.append(s)
        return first_wins(s)

    mean = torch.zeros(2, 5, 3, requires_grad=True)
    assert expected_indicator(mean, indicator, 1.0, 7, generator()).shape == (2, 5)
    assert [tuple(s.shape) for s in calls] == [(7, 2, 5, 3)]
    assert not calls[0].requires_grad


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"generator": None}, ValueError, "generator must be a torch.Generator, got None"),
        ({"samples": 0}, ValueError, "samples must be at least 1, got 0"),
        ({"samples": 2.0}, TypeError, "samples must be an integer, got 2.0"),
        ({"mean": torch.zeros(2, dtype=torch.int32)}, TypeError, "mean must be floating point, got torch.int32"),
        ({"sigma": 0.0}, ValueError, "sigma must be positive, got 0.0"),
        ({"sigma": math.nan}, ValueError, "sigma must be positive, got nan"),
        ({"sigma": "1"}, TypeError, "sigma must be a number or a tensor, got str"),
        ({"sigma": torch.ones(3)}, ValueError, r"sigma must have no dimensions or shape \(4,\), got shape \(3,\)"),
        ({"sigma": torch.tensor(1)}, TypeError, "sigma must be floating point, got torch.int64"),
        ({"sigma": 2.0, "covariance": torch.eye(2)}, ValueError, "sigma and covariance were both given"),
        ({"covariance": torch.eye(3)}, ValueError, r"covariance must have shape \(2, 2\).*got \(3, 3\)"),
        ({"covariance": torch.eye(2, requires_grad=True)}, ValueError, r"write covariance\.detach\(\)"),
        ({"covariance": -torch.eye(2)}, ValueError, "covariance must be positive definite"),
        ({"indicator": lambda s: s > 0}, ValueError, r"indicator must return a tensor of shape \(4, 4\).*\(4, 4, 2\)"),
        ({"indicator": lambda s: 1.0}, ValueError, r"indicator must return a tensor of shape \(4, 4\).*got float"),
    ],
)  # fmt: skip
def test_errors_say_what_arrived(arguments: dict, error: type[Exception], message: str) -> None:
    valid = {"mean": torch.zeros(4, 2), "indicator": first_wins, "samples": 4, "generator": generator()}
    with pytest.raises(error, match=message):
        expected_indicator(**(valid | arguments))


def test_win_probability_needs_a_class() -> None:
    with pytest.raises(ValueError, match=r"m must have at least one class, got shape \(2, 0\)"):
        win_probability(torch.zeros(2, 0), 4, generator())
