"""The row kernel for many classes against the float64 definition, on every instruction set that runs here.

The committed truth is tested elsewhere; here are the seams: the class counts at which the method changes (classes
listed or binned, all of them or only those within reach, cells settled once or often), the rows that the tables do not
hold, the scores that are not finite.
"""

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from expacc.integrals.quadrature import Rule, log_win_probability
from expacc.kernels import cpu


def _runs_here(name: str) -> bool:
    try:
        with cpu.force_variant(name):
            return True
    except ValueError:
        return False


VARIANTS = [name for name in ("baseline", "avx2", "avx512") if _runs_here(name)]
CLASSES = (33, 256, 257, 1000, 2048)
ONE, ZERO = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)


def test_the_kernel_is_there():
    assert VARIANTS, cpu.unavailable_reason()


def bell(classes: int, seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed))


def led(classes: int, lead: float, spread: float = 0.0, seed: int = 0) -> Tensor:
    """Return a row whose class 5 stands `lead` above the best other class."""
    row = -spread * bell(classes, seed).abs()
    row -= row.max()
    row[0, 5] = lead
    return row


def grouped(classes: int, near: float, far: float) -> Tensor:
    """Return a row with three classes at target - near and the others at target - far."""
    row = torch.full((1, classes), -far)
    row[0, 7:10] = -near
    row[0, 5] = 0.0
    return row


ROWS = {
    "random 0.3": lambda c: 0.3 * bell(c, c),
    "random 2": lambda c: 2.0 * bell(c, c + 1),
    "random 8": lambda c: 8.0 * bell(c, c + 2),
    "equal": lambda c: torch.zeros(1, c),
    "lead 2.3": lambda c: led(c, 2.3),
    "lead 3.7": lambda c: led(c, 3.7, 1.0),
    "lead 5": lambda c: led(c, 5.0),
    "lead 9": lambda c: led(c, 9.0, 0.5),
    "lead 14": lambda c: led(c, 14.0),
    "behind 10": lambda c: led(c, -10.0, 2.0),
    "behind 36": lambda c: led(c, -36.0, 5.0),
    "groups -4 1.53": lambda c: grouped(c, -4.0, 1.53),
    "groups 0 3.21": lambda c: grouped(c, 0.0, 3.21),
    "groups 1.9 4.4": lambda c: grouped(c, 1.9, 4.4),
}


@cache
def _define(scores: bytes, target: int, sigma: float, margin: float | None) -> tuple[float, float, Tensor]:
    row = torch.frombuffer(bytearray(scores), dtype=torch.float32).double()
    gap = row[target] - row
    live = torch.ones_like(gap) if margin is None else (gap < margin).double()
    m = (gap if margin is None else gap.clamp(max=margin)) / sigma
    m[target] = math.inf
    m = m[None].requires_grad_()
    log_win = log_win_probability(m, Rule(96, 36.0))
    (slope,) = torch.autograd.grad(log_win.sum(), m)
    slope = slope[0].nan_to_num() * live / sigma
    slope[target] = 0.0
    grad = -slope
    grad[target] = slope.sum()
    log_p = log_win.item()
    return log_p, -math.expm1(log_p), grad


def define(row: Tensor, target: int, sigma: float = 1.0, margin: float | None = None) -> tuple[float, float, Tensor]:
    """Return log P, 1 - P and the gradient of log P in the scores, in float64."""
    return _define(row.numpy().tobytes(), target, sigma, margin)


def kernel(
    x: Tensor, target: Tensor, power: Tensor, sigma: float = 1.0, margin: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss per row and its gradient in the scores."""
    x = x.clone().requires_grad_()
    sigmas = torch.tensor(sigma, dtype=torch.float64)
    loss = cpu.loss(x, target, sigmas, power, margin=margin, normalize=False, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach(), grad


def assert_contract(row: Tensor, target: int, margin: float | None = None, sigma: float = 1.0):
    """Compare the row with the definition, to the float32 column of the contract."""
    y = torch.tensor([target])
    log_p, error, slope = define(row, target, sigma, margin)
    loss, grad = kernel(row, y, ZERO, sigma, margin)
    many = row.shape[1] > 1000
    if log_p > math.log(1e-35):
        assert abs(math.expm1(-float(loss) - log_p)) <= (3e-5 if many else 3e-6) * max(1.0, -log_p)
    if log_p < -math.log(2.0):
        assert float(loss) == pytest.approx(-log_p, rel=3e-5 if many else 1e-5)
    else:
        assert float(kernel(row, y, ONE, sigma, margin)[0]) == pytest.approx(error, rel=1e-4)
    others = torch.arange(row.shape[1]) != target
    assert (grad.double()[0] + slope)[others].abs().max() <= 3e-5 * slope[others].abs().max()
    assert float(-grad[0, target]) == pytest.approx(float(slope[target]), rel=3e-5)
    assert abs(float(grad.double().sum())) <= 1e-6 * float(grad.double().abs().sum())


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("classes", CLASSES)
def test_a_row_meets_the_contract(classes, name):
    assert_contract(ROWS[name](classes), 5)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_instruction_set_meets_the_contract(variant, name):
    with cpu.force_variant(variant):
        assert_contract(ROWS[name](33), 5)
        assert_contract(ROWS[name](257), 5)


@pytest.mark.parametrize("margin", [-1.0, 0.0, 0.05, 2.0])
@pytest.mark.parametrize("classes", [100, 300])
@pytest.mark.parametrize("name", ["random 2", "lead 3.7", "groups -4 1.53"])
def test_a_row_with_a_margin_meets_the_contract(name, classes, margin):
    assert_contract(ROWS[name](classes) + torch.arange(classes) * 1e-3, 5, margin)


@pytest.mark.parametrize("sigma", [1e-3, 0.1, 10.0, 1e3])
@pytest.mark.parametrize("classes", [100, 300])
def test_sigma_is_the_unit(classes, sigma):
    assert_contract(ROWS["random 2"](classes) * sigma, 5, sigma=sigma)


@pytest.mark.parametrize("place", [0, 1, 15, 16, 250, 256, 598, 599])
def test_the_target_may_stand_anywhere(place):
    row = 2.0 * bell(600, 3)
    assert_contract(row, place)


@pytest.mark.parametrize("classes", [100, 600])
@pytest.mark.parametrize("depth", [50.0, 300.0, 1e4, 1e6])
@pytest.mark.parametrize("spread", [0.0, 3.0, 1000.0])
def test_rows_that_the_tables_do_not_hold(depth, classes, spread):
    row = led(classes, -depth, spread, seed=2)
    log_p, _, slope = define(row, 5)
    loss, grad = kernel(row, torch.tensor([5]), ZERO)
    assert float(loss) == pytest.approx(-log_p, rel=1e-5)
    others = torch.arange(classes) != 5
    assert (grad.double()[0] + slope)[others].abs().max() <= 1e-4 * slope[others].abs().max()
    assert abs(float(grad.double().sum())) <= 1e-6 * float(grad.double().abs().sum())


@pytest.mark.parametrize("classes", [100, 600])
def test_the_seam_to_the_rows_that_the_tables_do_not_hold_is_smooth(classes):
    depths = torch.linspace(36.0, 44.0, 33)
    rows = torch.cat([led(classes, -float(d), 20.0, seed=4) for d in depths])
    loss, grad = kernel(rows, torch.full((33,), 5), ZERO)
    steps = loss.diff() / depths.diff()
    slopes = -(grad[1:, 5] + grad[:-1, 5]) / 2
    torch.testing.assert_close(steps, slopes, rtol=3e-4, atol=0.0)


@pytest.mark.parametrize("classes", [100, 600, 3000])
@pytest.mark.parametrize("certain", [19.0, 30.0, 1e5])
def test_a_certain_row_has_no_loss_and_no_gradient(certain, classes):
    loss, grad = kernel(led(classes, certain), torch.tensor([5]), ONE)
    assert float(loss) == 0.0
    assert not grad.any()


@pytest.mark.parametrize("classes", [100, 600, 3000])
def test_masked_classes_take_no_part(classes):
    row = 2.0 * bell(classes, 8)
    kept = torch.arange(classes) % 3 != 1
    masked = torch.where(kept, row, -math.inf)
    target = 6
    loss, grad = kernel(masked, torch.tensor([target]), ZERO)
    small, small_grad = kernel(row[:, kept], torch.tensor([int(kept[:target].sum())]), ZERO)
    torch.testing.assert_close(loss, small, rtol=3e-6, atol=0.0)
    assert not grad[:, ~kept].any()
    torch.testing.assert_close(grad[:, kept], small_grad, rtol=0.0, atol=3e-5 * float(small_grad[0].min().abs()))


@pytest.mark.parametrize("margin", [0.5, 3.0])
@pytest.mark.parametrize("classes", [100, 600])
def test_masked_classes_take_no_part_with_a_margin(classes, margin):
    row = led(classes, 2.0, 3.0, seed=5)
    masked = row.clone()
    masked[0, 9::3] = -math.inf
    kept = torch.isfinite(masked[0])
    loss, grad = kernel(masked, torch.tensor([5]), ZERO, margin=margin)
    small, small_grad = kernel(row[:, kept], torch.tensor([5]), ZERO, margin=margin)
    torch.testing.assert_close(loss, small, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(grad[:, kept], small_grad, rtol=0.0, atol=3e-5 * float(small_grad.abs().max()))


@pytest.mark.parametrize("classes", [100, 600])
@pytest.mark.parametrize(
    ("place", "score", "loss", "gradient"),
    [(5, math.inf, 0.0, 0.0), (5, -math.inf, 1.0, 0.0), (9, math.inf, 1.0, 0.0), (9, math.nan, math.nan, math.nan)],
    ids=["target up", "target masked", "rival up", "NaN"],
)
def test_scores_that_are_not_finite(place, score, loss, gradient, classes):
    rows = bell(classes, 1, rows=3)
    rows[1, place] = score
    plain = kernel(torch.cat([rows[:1], rows[2:]]), torch.tensor([5, 5]), ONE)
    value, grad = kernel(rows, torch.tensor([5, 5, 5]), ONE)
    assert float(value[1]) == pytest.approx(loss, nan_ok=True)
    torch.testing.assert_close(grad[1], torch.full((classes,), gradient), equal_nan=True, rtol=0, atol=0)
    assert torch.equal(value[[0, 2]], plain[0])
    assert torch.equal(grad[[0, 2]], plain[1])


@pytest.mark.parametrize("classes", [100, 600, 3000])
def test_a_row_of_masked_classes_alone_counts_as_equal_scores(classes):
    loss, grad = kernel(torch.full((1, classes), -math.inf), torch.tensor([5]), ZERO)
    assert float(loss) == pytest.approx(math.log(classes), rel=1e-6)
    assert not grad.any()


@pytest.mark.parametrize("classes", [64, 300, 2500])
def test_the_same_bits_on_every_run_with_any_number_of_threads(classes):
    x, y = 2.0 * bell(classes, 9, rows=37), torch.arange(37)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results += [kernel(x, y, ONE), kernel(x, y, ONE)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


def test_a_row_does_not_depend_on_its_neighbours():
    x, y = 2.0 * bell(300, 10, rows=9), torch.arange(9)
    together = kernel(x, y, ONE)
    alone = [kernel(x[i : i + 1], y[i : i + 1], ONE) for i in range(9)]
    assert torch.equal(together[0], torch.cat([loss for loss, _ in alone]))
    assert torch.equal(together[1], torch.cat([grad for _, grad in alone]))


@pytest.mark.parametrize("offset", [-1000.0, 0.25, 4096.0])
def test_a_common_shift_changes_nothing(offset):
    x = (bell(500, 11) * 64).round() / 64  # representable with every offset
    torch.testing.assert_close(
        kernel(x + offset, torch.tensor([5]), ONE), kernel(x, torch.tensor([5]), ONE), rtol=0, atol=0
    )


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e-3])
@pytest.mark.parametrize("classes", [64, 700])
def test_nearly_equal_scores_win_equally_often(classes, scale):
    loss, grad = kernel(scale * bell(classes, 12), torch.tensor([5]), ONE)
    assert float(1.0 - loss.double()) == pytest.approx(1 / classes, rel=10 * scale + 3e-5)
    assert abs(float(grad.double().sum())) <= 1e-6 * float(grad.double().abs().sum())
