"""The native CPU kernel against the definition: every variant this machine runs, every layout, both doors."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from families import Case, draw_cases, margin_terms, scores

from expacc.functional import exact_loss
from expacc.integrals.quadrature import Rule, log_win_probability
from expacc.kernels import cpu

FLOAT64 = torch.float64
ONE, POWER = torch.tensor(1.0, dtype=FLOAT64), torch.tensor(0.3, dtype=FLOAT64)


def _variants() -> list[str]:
    names = []
    for name in ("baseline", "avx2", "avx512"):
        try:
            with cpu.force_variant(name):
                names.append(name)
        except ValueError:
            continue
    return names


VARIANTS = _variants()
SIZES = (2, 3, 5, 10, 20, 40, 64)


@pytest.fixture(params=VARIANTS)
def variant(request):
    with cpu.force_variant(request.param):
        yield request.param


def test_kernel_present():
    assert cpu.available(), cpu.unavailable_reason()
    assert cpu.unavailable_reason() == ""
    assert "baseline" in VARIANTS
    assert cpu.variant() in VARIANTS


def test_variant_unknown():
    with pytest.raises(ValueError, match=r"cannot use variant 'sse9'.*what does: baseline"), cpu.force_variant("sse9"):
        pass
    assert cpu.variant() in VARIANTS


# ---- numbers ----


def _hard_cases(classes: int) -> list[Case]:
    """Leads (the narrow flank), two groups, and rows drawn from the families, all of this size."""
    out = [
        Case(f"lead{lead}-spread{spread}", "lead", classes, params={"lead": lead, "spread": spread, "seed": classes})
        for lead in np.arange(-6.0, 10.0, 1.0).tolist()
        for spread in (0.0, 2.0)
    ]
    pairs = [(a, b) for a in range(-8, 13, 4) for b in range(-7, 13, 3)] if classes > 2 else []
    for count in {1, max(1, classes - 2)}:
        for a, b in pairs:
            out.append(Case(f"two{a},{b}x{count}", "two-group", classes, params={"a": a, "b": b, "count": count}))
    return out + [c for c in draw_cases(classes, 200) if c.classes == classes and c.margin is None]


@cache
def _definition(classes: int) -> tuple[list[Case], np.ndarray, np.ndarray, np.ndarray]:
    """Return the cases, and by the definition log P, its derivative in every m (zero at the target), the live mask."""
    batch = _hard_cases(classes)
    rows = [scores(c) for c in batch]
    m = torch.full((len(batch), batch[0].classes), math.inf, dtype=FLOAT64)
    live = torch.zeros_like(m, dtype=torch.bool)
    for i, (case, (row, target)) in enumerate(zip(batch, rows, strict=True)):
        others = [k for k in range(case.classes) if k != target]
        m[i, others] = torch.from_numpy(margin_terms(case, row, target))
        gap = float(row[target]) - row[others].astype(np.float64)
        live[i, others] = torch.from_numpy(gap < (math.inf if case.margin is None else case.margin))
    m.requires_grad_()
    log_p = log_win_probability(m, Rule(64, 30.0))
    (slope,) = torch.autograd.grad(log_p.sum(), m)
    return batch, log_p.detach().numpy(), slope.numpy(), live.numpy()


@pytest.mark.parametrize("classes", SIZES)
def test_contract(variant, classes):
    """P, 1 - P, log P and both kinds of gradient entries within the float32 column, on hard rows."""
    batch, log_p, slope, live = _definition(classes)
    x = torch.from_numpy(np.stack([scores(c)[0] for c in batch])).requires_grad_()
    y = torch.tensor([scores(c)[1] for c in batch])
    sigma = torch.tensor([c.sigma for c in batch], dtype=FLOAT64)
    value = cpu.loss(x, y, sigma, torch.zeros((), dtype=FLOAT64), normalize=False)
    (grad,) = torch.autograd.grad(value.sum(), x)
    error = cpu.loss(x.detach(), y, sigma, ONE, normalize=False).double().numpy()
    got = -value.detach().double().numpy()

    def worst(errors: np.ndarray, where: np.ndarray) -> tuple[float, str]:
        errors = np.where(where, errors, 0.0)
        return float(errors.max()), batch[int(errors.argmax())].name

    with np.errstate(all="ignore"):
        p_error = np.abs(np.expm1(got - log_p)) / np.maximum(1.0, -log_p)
        q_error = np.abs(error / -np.expm1(log_p) - 1.0)
        log_error = np.abs(got / log_p - 1.0)
    assert worst(p_error, log_p > math.log(1e-35)) <= (3e-6, "~")
    assert worst(q_error, -np.expm1(log_p) > 1e-30) <= (1e-4, "~")
    assert worst(log_error, (log_p < -0.7) & (log_p > -1e6)) <= (1e-5, "~")
    own = np.arange(len(batch)), y.numpy()
    entries = grad.double().numpy() * sigma.numpy()[:, None]
    truth = np.where(live, slope, 0.0)
    largest = truth.max(1)
    kept = largest > 1e-30
    largest = np.where(kept, largest, 1.0)
    total = np.where(kept, truth.sum(1), 1.0)
    assert worst(np.abs(entries[own] / -total - 1.0), kept) <= (3e-5, "~")
    entries[own] = 0.0
    assert worst(np.abs(entries - truth).max(1) / largest, kept) <= (3e-5, "~")


def _reference(x, y, sigma, power, **options):
    return exact_loss(x, y, sigma, power=power, backend="reference", **options)


def _compare(x, y, sigma, power, upstream=None, rtol=1e-5, **options):
    """Compare value and both gradients with the reference; errors relative to the largest entry."""
    got, want = [], []
    for call, out in ((cpu.loss, got), (_reference, want)):
        a, s = x.detach().requires_grad_(), sigma.detach().clone().requires_grad_()
        value = call(a, y, s, power, **options)
        up = torch.ones_like(value) if upstream is None else upstream.expand_as(value).to(value.dtype)
        out.extend([value.detach(), *torch.autograd.grad(value, (a, s), up)])
    for mine, his in zip(got, want, strict=True):
        assert mine.shape == his.shape
        assert mine.dtype == his.dtype
        scale = his.abs().max().double().item()
        assert (mine.double() - his.double()).abs().max().item() <= rtol * scale


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("normalize", [False, True, "cap"], ids=["raw", "normalized", "capped"])
@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
@pytest.mark.parametrize("margin", [None, 0.7, -0.5])
@pytest.mark.parametrize("shape", [(37, 10), (5,), (6, 3, 4), (3, 70), (2, 700)], ids=str)
def test_matches_reference(shape, margin, noise, normalize, reduction):
    generator = torch.Generator().manual_seed(3)
    x = 2 * torch.randn(shape, generator=generator)
    classes = shape[1] if len(shape) > 1 else shape[0]
    y = torch.randint(classes, shape[:1] + shape[2:] if len(shape) > 1 else (), generator=generator)
    if y.ndim:
        y.view(-1)[1] = -100
    sigma = 0.5 + torch.rand(y.shape, generator=generator, dtype=FLOAT64)
    upstream = torch.full((), 1.7) if reduction != "none" else 0.5 + torch.rand(y.shape, generator=generator)
    weight = 0.2 + torch.rand(classes, generator=generator)
    options = {"margin": margin, "noise": noise, "normalize": normalize, "reduction": reduction, "weight": weight}
    _compare(x, y, sigma, POWER, upstream, **options)


@pytest.mark.parametrize("power", [-1.0, 0.0, 1e-300, 1e-3, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
def test_power(variant, noise, power):
    x = 3 * torch.randn(50, 10, generator=torch.Generator().manual_seed(1))
    _compare(x, torch.arange(50) % 10, ONE, torch.tensor(power, dtype=FLOAT64), noise=noise, normalize=False, rtol=2e-5)


@pytest.mark.parametrize("classes", [2, 10, 33, 1000])
def test_gumbel_is_cross_entropy(variant, classes):
    x = (4 * torch.randn(40, classes, generator=torch.Generator().manual_seed(2))).requires_grad_()
    y = torch.arange(40) % classes
    zero = torch.zeros((), dtype=FLOAT64)
    mine = cpu.loss(x, y, ONE, zero, noise="gumbel", normalize=False, reduction="mean")
    # In float64: in float32 cross-entropy's own gradient of a confident true class cancels (5 % off at P = 1 - 1e-6).
    his = torch.nn.functional.cross_entropy(x.double(), y)
    torch.testing.assert_close(mine.double(), his, rtol=1e-6, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(v, x)[0] for v in (mine, his)), rtol=2e-5, atol=1e-12)


# ---- layouts and dtypes ----

LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "every-other": lambda x: torch.stack((x, x), -1).flatten(1)[:, ::2],
    "expanded": lambda x: x[:1].expand_as(x),
    "images": lambda x: x.unflatten(0, (3, 4, 2)).movedim(-1, 1).contiguous(),
    "channels-last": lambda x: x.unflatten(0, (3, 4, 2)).movedim(-1, 1).contiguous(memory_format=torch.channels_last),
    "crossed": lambda x: x.unflatten(0, (3, 4, 2)).permute(1, 3, 2, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("classes", [10, 50])
def test_layouts(layout, reduction, classes):
    x = LAYOUTS[layout](2 * torch.randn(24, classes, generator=torch.Generator().manual_seed(4)))
    y = torch.arange(24).reshape(x.shape[:1] + x.shape[2:]) % classes
    _compare(x, y, ONE, POWER, normalize=True, reduction=reduction)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16], ids=str)
def test_target_dtypes(dtype):
    x, y = torch.randn(20, 10, generator=torch.Generator().manual_seed(5)), torch.arange(20) % 10
    assert torch.equal(cpu.loss(x, y.to(dtype), ONE, POWER), cpu.loss(x, y, ONE, POWER))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("normalize", [False, True, "cap"], ids=["raw", "normalized", "capped"])
def test_half_is_rounded_float(dtype, reduction, normalize):
    """The value and the gradient, scaled as a loss scaler does, are the float32 ones rounded once."""
    half = torch.randn(30, 10, generator=torch.Generator().manual_seed(6)).to(dtype)
    y, out = torch.arange(30) % 10, []
    for x in (half, half.float()):
        x = x.requires_grad_()
        value = cpu.loss(x, y, ONE, POWER, normalize=normalize, reduction=reduction)
        out += [value.detach(), *torch.autograd.grad(value, x, torch.full_like(value, 1024.0))]
    assert torch.equal(out[0], out[2].to(dtype))
    assert torch.equal(out[1], out[3].to(dtype))


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-24, 3 * 2.0**-24, 6e-5, 1.0, 65504.0, math.inf], ids=str)
def test_half_is_widened_exactly(value):
    """Every kind of fp16 number, denormals too: the expected error of a row is the float32 one."""
    x = torch.tensor([[value, 0.5], [0.25, -value]], dtype=torch.float16)
    sigma = torch.tensor([1e-6, 1e3], dtype=FLOAT64)
    y = torch.tensor([0, 0])
    half = cpu.loss(x, y, sigma, POWER, normalize=False)
    assert torch.equal(half, cpu.loss(x.float(), y, sigma, POWER, normalize=False).half())


# ---- what a loss has to stand ----


@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
@pytest.mark.parametrize("classes", [4, 60])
def test_special_scores(variant, noise, classes):
    inf, nan = math.inf, math.nan
    x = torch.randn(8, classes, generator=torch.Generator().manual_seed(7))
    x[0, 1] = -inf  # a masked competitor
    x[1, 0] = -inf  # a masked target
    x[2, 1] = inf  # a competitor that cannot lose
    x[3, 1] = nan
    x[4] = -inf
    x[5, 1:] = -inf  # nobody left to beat
    x[6, 0] = inf
    x.requires_grad_()
    y = torch.zeros(8, dtype=torch.long)
    value = cpu.loss(x, y, ONE, POWER, normalize=False, noise=noise)
    (grad,) = torch.autograd.grad(value.sum(), x)
    lost = torch.tensor(1 / 0.3)
    torch.testing.assert_close(value[[1, 2]].detach(), torch.stack((lost, lost)))
    assert value[3].isnan()
    assert value[5] == value[6] == 0
    log_p = -math.log(classes)
    torch.testing.assert_close(value[4].item(), -math.expm1(0.3 * log_p) / 0.3, rtol=1e-6, atol=0)
    assert grad[3].isnan().all()
    assert (grad[[1, 2, 4, 5, 6]] == 0).all()
    assert grad[0, 1] == 0
    assert torch.isfinite(grad[[0, 7]]).all()
    small = cpu.loss(x[:1, [0, *range(2, classes)]], y[:1], ONE, POWER, normalize=False, noise=noise)
    torch.testing.assert_close(value[:1], small)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_nan_row_stays_alone(reduction):
    """Under normalize a row with a NaN, and an ignored one, take no part in the statistics or their gradient."""
    clean = torch.randn(20, 10, generator=torch.Generator().manual_seed(8))
    y = torch.arange(20) % 10
    dirty = torch.cat((clean, torch.full((2, 10), 1e3)))
    dirty[20, 3] = math.nan
    dirty.requires_grad_()
    labels = torch.cat((y, torch.tensor([0, -100])))
    value = cpu.loss(dirty, labels, ONE, POWER, reduction="none")
    alone = clean.clone().requires_grad_()
    want = cpu.loss(alone, y, ONE, POWER, reduction="none")
    torch.testing.assert_close(value[:20], want, rtol=1e-6, atol=0)
    assert value[20].isnan()
    assert value[21] == 0
    total = value if reduction == "none" else cpu.loss(dirty, labels, ONE, POWER, reduction=reduction)
    (grad,) = torch.autograd.grad(total, dirty, torch.ones_like(total))
    torch.testing.assert_close(grad[:20], torch.autograd.grad(want.sum(), alone)[0], rtol=1e-4, atol=1e-7)
    assert grad[20].isnan().all()
    assert (grad[21] == 0).all()


@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
@pytest.mark.parametrize("shape", [(300, 10), (300, 100), (70, 3000)], ids=str)
def test_same_bits_with_any_number_of_threads(shape, noise):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    y, outcomes, before = torch.arange(shape[0]) % shape[1], [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            a = x.clone().requires_grad_()
            value = cpu.loss(a, y, ONE, POWER, noise=noise, reduction="mean")
            value.backward()
            outcomes.append((value.item(), a.grad))
    finally:
        torch.set_num_threads(before)
    assert all(v == outcomes[0][0] and torch.equal(g, outcomes[0][1]) for v, g in outcomes[1:])


def test_threads_are_torchs():
    assert cpu._find_parallel() != 0


def test_rows_do_not_depend_on_their_neighbours(variant):
    x = 3 * torch.randn(50, 10, generator=torch.Generator().manual_seed(10))
    y = torch.arange(50) % 10
    whole = cpu.loss(x, y, ONE, POWER, normalize=False)
    alone = torch.cat([cpu.loss(x[i : i + 1], y[i : i + 1], ONE, POWER, normalize=False) for i in range(50)])
    assert torch.equal(whole, alone)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_backward_again(reduction):
    """The buffer is handed over once; what a second backward returns is as right, and the first is not touched."""
    x = torch.randn(20, 10, generator=torch.Generator().manual_seed(11), requires_grad=True)
    value = cpu.loss(x, torch.arange(20) % 10, ONE, POWER, reduction=reduction)
    (first,) = torch.autograd.grad(value, x, torch.full_like(value, 2.0), retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(value, x, torch.full_like(value, -4.0))
    torch.testing.assert_close(second, -2 * first)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_second_derivatives(reduction):
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(6, 5, generator=generator, requires_grad=True)
    sigma = torch.full((6,), 1.2, dtype=FLOAT64, requires_grad=True)
    y, direction, out = torch.arange(6) % 5, torch.randn(6, 5, generator=generator), []
    for call in (cpu.loss, _reference):
        value = call(x, y, sigma, POWER, normalize=True, reduction=reduction)
        (grad,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        out.append(torch.autograd.grad((grad * direction).sum(), (x, sigma)))
    torch.testing.assert_close(out[0], out[1])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("rows", [0, 4], ids=["empty", "all-ignored"])
def test_nothing_to_do(rows, reduction):
    x = torch.randn(rows, 10, requires_grad=True)
    value = cpu.loss(x, torch.full((rows,), -100), ONE, POWER, reduction=reduction)
    assert torch.equal(value, torch.zeros(rows) if reduction == "none" else torch.zeros(()))
    value.sum().backward()
    assert torch.equal(x.grad, torch.zeros(rows, 10))


def test_constant_batch():
    x = torch.full((4, 10), 3.0, requires_grad=True)
    value = cpu.loss(x, torch.arange(4), ONE, ONE, reduction="mean")
    torch.testing.assert_close(value.item(), 0.9)
    value.backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("bad", [10, -1])
def test_target_out_of_range(bad):
    with pytest.raises(IndexError, match=rf"target\[1\] is {bad}, outside 0 … 9"):
        cpu.loss(torch.randn(3, 10), torch.tensor([0, bad, 11]), ONE, POWER)


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan])
def test_sigma_that_cannot_be_stays_in_its_row(sigma):
    x = torch.randn(3, 10, requires_grad=True)
    value = cpu.loss(x, torch.arange(3), torch.tensor([1.0, sigma, 1.0], dtype=FLOAT64), POWER, normalize=False)
    value.sum().backward()
    assert value.isnan().tolist() == [False, True, False]
    assert x.grad.isnan().any(1).tolist() == [False, True, False]


def test_covers():
    x, y = torch.randn(3, 10), torch.arange(3)
    assert cpu.covers(x, y, ONE, POWER, None)
    assert not cpu.covers(x.double(), y, ONE, POWER, None)
    assert not cpu.covers(x, y, ONE, POWER.clone().requires_grad_(), None)
    assert not cpu.covers(x, y, ONE, POWER, torch.ones(10, requires_grad=True))
    assert not cpu.covers(x.to("meta"), y, ONE, POWER, None)


# ---- the door for torch.compile ----


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(reduction, dtype):
    x = torch.randn(6, 10, dtype=dtype, requires_grad=True)
    sigma = torch.ones(6, dtype=FLOAT64, requires_grad=True)
    arguments = (x, torch.arange(6), sigma, POWER, None, 0.5, "gaussian", True, -100, reduction, True, True)
    torch.library.opcheck(torch.ops.expacc.loss.default, arguments)


def test_opcheck_backward():
    x, y, upstream = torch.randn(6, 10), torch.arange(6), torch.rand(6)
    couple = torch.rand(8, dtype=FLOAT64)
    torch.library.opcheck(torch.ops.expacc.loss_backward.default, (x, y, torch.randn(6, 10), couple, upstream, -100))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_doors_agree(reduction):
    x = torch.randn(20, 10, generator=torch.Generator().manual_seed(13), requires_grad=True)
    sigma = torch.tensor(1.3, dtype=FLOAT64, requires_grad=True)
    out = []
    for door in (cpu.loss, cpu.loss_op):
        value = door(x, torch.arange(20) % 10, sigma, POWER, margin=1.0, reduction=reduction)
        out.append((value, *torch.autograd.grad(value, (x, sigma), torch.full_like(value, 1.5))))
    torch.testing.assert_close(out[0], out[1], rtol=1e-6, atol=1e-8)


def test_operator_raises_on_second_derivatives():
    x = torch.randn(6, 10, requires_grad=True)
    value = cpu.loss_op(x, torch.arange(6), ONE, POWER, reduction="mean")
    (grad,) = torch.autograd.grad(value, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"expacc\.loss_backward"):
        torch.autograd.grad(grad.sum(), x)
