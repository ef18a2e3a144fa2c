"""The gradient normaliser: its arithmetic, what leaves no trace, scalers, groups, sparse gradients, its state."""

import math
import warnings

import pytest
import torch
from pytorch_optimizer import LBFGS as OtherLBFGS
from pytorch_optimizer import SAM
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel

from expacc import GradientNormalizer

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "fused": lambda p: torch.optim.SGD(p, lr=1.0, fused=True),
}


def weights(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(size)) for size in sizes]


def give(parameters: list[torch.nn.Parameter], seed: int, scale: float = 1.0) -> float:
    """Set gradients and return their global norm."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = scale * torch.randn(p.shape, generator=generator)
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_formula(name):
    """μ_1 = n_1, μ_k = 0.9 μ + 0.1 n_k over all groups; the optimizer sees g/μ_k."""
    a, b, twin = weights(3, 4), weights(2), weights(3, 4, 2)
    optimizer = OPTIMIZERS[name]([{"params": a}, {"params": b, "lr": 0.5}])
    plain = OPTIMIZERS[name]([{"params": twin[:2]}, {"params": twin[2:], "lr": 0.5}])
    normalizer, mean = GradientNormalizer(optimizer), None
    for k, scale in enumerate((1.0, 100.0, 1e-3, 7.0)):
        norm = give([*a, *b], k, scale)
        mean = norm if mean is None else 0.9 * mean + 0.1 * norm
        for p, q in zip([*a, *b], twin, strict=True):
            assert p.grad is not None
            q.grad = p.grad / mean
        optimizer.step()
        plain.step()
        assert normalizer.mean == pytest.approx(mean, rel=1e-6)
    torch.testing.assert_close(torch.cat([*a, *b]), torch.cat(twin), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_leaves_no_trace(bad):
    (w,) = weights(3)
    optimizer = torch.optim.SGD([w], lr=1.0)
    normalizer = GradientNormalizer(optimizer)
    for values in ([bad, 1.0, 2.0], [3.0, 0.0, 4.0], [1.0, bad, 0.0]):
        before = torch.tensor(values)
        w.grad = before.clone()
        optimizer.step()
        if not torch.isfinite(before).all():
            torch.testing.assert_close(w.grad, before, equal_nan=True)
            w.data.zero_()
    assert normalizer.mean == 5.0


def test_missing_and_zero_gradients():
    a, b = weights(2, 3)
    optimizer = torch.optim.SGD([a, b], lr=1.0)
    normalizer = GradientNormalizer(optimizer, floor=1e-3)
    optimizer.step()
    assert normalizer.mean is None
    a.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert b.grad is None
    assert normalizer.mean == 5.0
    torch.testing.assert_close(a.data, torch.tensor([-0.6, -0.8]))
    fresh = GradientNormalizer(torch.optim.SGD([b], lr=1.0), floor=1e-3)
    b.grad = torch.full((3,), 1e-6)
    fresh.optimizer.step()
    torch.testing.assert_close(b.grad, torch.full((3,), 1e-3))  # divided by the floor, not by its norm


@pytest.mark.parametrize("zeros", [(0,), (1,), (0, 1, 3)], ids=["first", "second", "several"])
def test_a_gradient_of_zero_leaves_no_trace(zeros):
    (w,) = weights(2)
    optimizer = torch.optim.SGD([w], lr=1.0)
    normalizer = GradientNormalizer(optimizer)
    for k in range(5):
        w.data.zero_()
        w.grad = torch.zeros(2) if k in zeros else torch.tensor([3.0, 4.0])
        optimizer.step()
        norm = float(w.detach().norm())
        assert norm == pytest.approx(0.0 if k in zeros else 1.0, rel=1e-6)
    assert normalizer.mean == pytest.approx(5.0, rel=1e-6)


def test_the_norm_has_the_widest_dtype_of_all_parameters():
    """Whatever comes first: 1e40 is an inf in float32."""
    narrow, wide = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    normalizer = GradientNormalizer(torch.optim.SGD([narrow, wide], lr=1.0))
    narrow.grad, wide.grad = torch.ones(2), torch.tensor([3e40, 4e40], dtype=torch.float64)
    normalizer.optimizer.step()
    assert normalizer.mean == pytest.approx(5e40, rel=1e-12)
    torch.testing.assert_close(wide.data, torch.tensor([-0.6, -0.8], dtype=torch.float64))


@pytest.mark.parametrize("size", [1e20, 1e-25], ids=["large", "tiny"])
def test_what_float32_cannot_square_passes_unchanged(size):
    """As the docstring says."""
    (w,) = weights(2)
    normalizer = GradientNormalizer(torch.optim.SGD([w], lr=1.0))
    w.grad = torch.full((2,), size)
    normalizer.optimizer.step()
    torch.testing.assert_close(w.data, torch.full((2,), -size))
    assert normalizer.mean is None


def test_sparse_gradients_count_what_they_add_up_to():
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    normalizer = GradientNormalizer(optimizer)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 1, 3])).sum().backward()  # row 1 twice: gradients 2 and 1
    optimizer.step()
    norm = math.sqrt(2 * 4 + 2 * 1)
    assert normalizer.mean == pytest.approx(norm, rel=1e-6)
    moved = (before - embedding.weight.detach()) * norm
    torch.testing.assert_close(moved[:, 0], torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0]), rtol=1e-5, atol=1e-6)


def test_half_precision_norms_do_not_overflow():
    w = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.float16))
    normalizer = GradientNormalizer(torch.optim.SGD([w], lr=1.0))
    w.grad = torch.full((10_000,), 6e4, dtype=torch.float16)
    normalizer.optimizer.step()
    assert normalizer.mean == pytest.approx(6e6, rel=1e-3)
    torch.testing.assert_close(w.grad.float(), torch.full((10_000,), 0.01), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_a_scaler_the_mean_is_of_unscaled_gradients(name):
    """Also of a fused optimizer, whose hooks see scaled ones."""
    runs = []
    for enabled in (False, True):
        (w,) = weights(4)
        optimizer = OPTIMIZERS[name]([w])
        normalizer = GradientNormalizer(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        for k in range(5):
            optimizer.zero_grad()
            target = torch.arange(4.0) * (k + 1)
            scaler.scale((w - target).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        runs.append((w.detach(), normalizer.mean))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-6, atol=1e-6)
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_the_scaler_skips_leaves_no_trace(name):
    (w,) = weights(2)
    optimizer = OPTIMIZERS[name]([w])
    normalizer = GradientNormalizer(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for k, factor in enumerate((1.0, math.inf, 1.0)):
        optimizer.zero_grad()
        scaler.scale(((w - 3.0 - k) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert normalizer.mean == pytest.approx(math.sqrt(2.0), rel=1e-6)
    assert torch.isfinite(w).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("keyword", [True, False])
def test_a_closures_gradients_are_normalised_when_it_has_run(name, keyword):
    """As Lightning steps: the gradient comes into being within ``optimizer.step``."""
    ends = []
    for closed in (False, True):
        (w,) = weights(3)
        optimizer = OPTIMIZERS[name]([w])
        normalizer = GradientNormalizer(optimizer)
        for k in range(4):

            def closure(w=w, k=k):
                w.grad = None
                value = ((w - 5.0 * k) ** 2).sum()
                value.backward()
                return value

            if not closed:
                closure()
                optimizer.step()
            else:
                value = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
                assert value is not None
        ends.append((w.detach(), normalizer.mean))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_accumulated_gradients_are_one():
    """Two backward passes before a step: the norm of their sum, one step of the mean."""
    (w,) = weights(2)
    optimizer = torch.optim.SGD([w], lr=1.0)
    normalizer = GradientNormalizer(optimizer)
    for _ in range(2):
        (w * torch.tensor([3.0, 4.0])).sum().backward()
    optimizer.step()
    assert normalizer.mean == 10.0


def test_state_goes_on_bit_for_bit(tmp_path):
    runs = []
    for stop in (False, True):
        parameters = weights(5)
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        normalizer = GradientNormalizer(optimizer, smoothing=0.8)
        for k in range(9):
            if stop and k == 4:
                path = tmp_path / "state.pt"
                torch.save([parameters[0].data, optimizer.state_dict(), normalizer.state_dict()], path)
                data, optimized, state = torch.load(path, weights_only=True)
                parameters = weights(5)
                parameters[0].data.copy_(data)
                optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
                optimizer.load_state_dict(optimized)
                normalizer = GradientNormalizer(optimizer)
                normalizer.load_state_dict(state)
            give(parameters, k, scale=10.0**k)
            optimizer.step()
        runs.append((parameters[0].data, normalizer.mean, normalizer.smoothing))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]


def test_detached_it_does_nothing():
    (w,) = weights(2)
    optimizer = torch.optim.SGD([w], lr=1.0)
    GradientNormalizer(optimizer).detach()
    GradientNormalizer(optimizer).detach()  # and makes room for another
    w.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert w.data.tolist() == [-3.0, -4.0]


def _scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(weights(1), lr=1.0), 1)


def _clipping() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(weights(1), lr=1.0)
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    return optimizer


def _empty() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(weights(1), lr=1.0)
    optimizer.param_groups[0]["params"] = []
    return optimizer


def _twice() -> None:
    optimizer = torch.optim.SGD(weights(1), lr=1.0)
    GradientNormalizer(optimizer)
    GradientNormalizer(optimizer)


def _inside_and_outside() -> None:
    optimizer = SAM(weights(1), torch.optim.SGD, lr=1.0)
    GradientNormalizer(optimizer.base_optimizer)
    GradientNormalizer(optimizer)


@pytest.mark.parametrize("original", [True, False], ids=["use_orig_params", "flat"])
def test_fsdp1_is_refused(original, tmp_path):
    """Every rank would divide by the norm of its own shard."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about its own future
            model = FullyShardedDataParallel(
                torch.nn.Linear(3, 2), device_id=torch.device("cpu"), use_orig_params=original
            )
        with pytest.raises(ValueError, match=r"of FullyShardedDataParallel \(FSDP1\).* Write fully_shard\(model\)"):
            GradientNormalizer(torch.optim.SGD(model.parameters(), lr=1.0))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GradientNormalizer("sgd"), TypeError, "must be a torch.optim.Optimizer, got str"),
        (lambda: GradientNormalizer(_scheduler()), TypeError, "got StepLR. .* write scheduler.optimizer"),
        (lambda: GradientNormalizer(torch.optim.LBFGS(weights(1))), TypeError, "must not be LBFGS"),
        (lambda: GradientNormalizer(OtherLBFGS(weights(1))), TypeError, "must not be LBFGS: it asks .* Write SGD or"),
        (lambda: GradientNormalizer(SAM(weights(1), OtherLBFGS)), TypeError, "must not be LBFGS"),
        (_twice, ValueError, r"gradients of this SGD are normalised already, .* Call the other's detach\(\), or write"),
        (_inside_and_outside, ValueError, "gradients of this SGD are normalised already"),
        (lambda: GradientNormalizer(_empty()), ValueError, "has no parameters: make it with model.parameters"),
        (lambda: GradientNormalizer(_clipping()), ValueError, "SGD clips gradients .max_grad_norm=1., .* write"),
        (lambda: GradientNormalizer(torch.optim.SGD(weights(1)), 1.0), ValueError, r"smoothing must lie in \[0"),
        (lambda: GradientNormalizer(torch.optim.SGD(weights(1)), floor=0.0), ValueError, "floor must be positive"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(make, error, message):
    with pytest.raises(error, match=message):
        make()
