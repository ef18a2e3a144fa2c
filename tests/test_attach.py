"""attach: the same bits as a loop written out by hand, its state, its warnings, what cannot be meant."""

import warnings

import pytest
import torch
from pytorch_optimizer import SAM
from torch import nn

from expacc import ExactLoss, ExponentialSigma, GradientNormalizer, LinearPower, attach

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(64) % 4
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def network(seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def bits(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(step * 16, step * 16 + 16) % len(X)
    return X[rows], Y[rows]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_a_loop_written_out_by_hand(name):
    """Bit-identical parameters after 200 steps, with σ and q moving and the gradient normalised."""
    models, losses = (network(), network()), (ExactLoss(margin=0.5), ExactLoss(margin=0.5))
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    attach(optimizers[0], losses[0], total_steps=200, sigma=(10, 1), power=(0.3, 1.0), schedule="linear")
    start, end, mean = 10.0, 1.0, None
    for step in range(200):
        for model, loss, optimizer in zip(models, losses, optimizers, strict=True):
            if loss is losses[1]:
                part = step / 200
                loss.sigma = start + (end - start) * part if step else start
                loss.power = 0.3 + (1.0 - 0.3) * part if step else 0.3
            optimizer.zero_grad()
            x, y = batch(step)
            loss(model(x), y).backward()
            if loss is losses[1]:
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
                mean = norm if mean is None else 0.9 * mean + (1.0 - 0.9) * norm
                torch._foreach_mul_(grads, 1.0 / mean)
            optimizer.step()
    assert torch.equal(bits(models[0]), bits(models[1]))
    assert float(losses[0].sigma) == 1.0


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stop", [1, 7, 19])
def test_goes_on_bit_for_bit_in_a_new_process(name, stop, tmp_path):
    ends = []
    for stops in (False, True):
        model, loss = network(), ExactLoss(power=1, margin=0.5)
        optimizer = OPTIMIZERS[name](model.parameters())
        attachment = attach(optimizer, loss, total_steps=20)
        for step in range(20):
            if stops and step == stop:
                parts = (model, loss, optimizer, attachment)
                torch.save([part.state_dict() for part in parts], tmp_path / "checkpoint.pt")
                states = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
                model, loss = network(seed=2), ExactLoss(margin=0.5)
                optimizer = OPTIMIZERS[name](model.parameters())
                attachment = attach(optimizer, loss, total_steps=20)
                for part, state in zip((model, loss, optimizer, attachment), states, strict=True):
                    part.load_state_dict(state)
            optimizer.zero_grad()
            x, y = batch(step)
            loss(model(x), y).backward()
            optimizer.step()
        ends.append((bits(model), float(loss.sigma), attachment.state_dict()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_bit_for_bit_under_a_scaler(name, tmp_path):
    """With a step that overflows and is skipped on the way; of a fused optimizer's only the device knows: it counts."""
    ends, steps = [], 12 if "fused" in name else 11
    for stops in (False, True):
        model, loss = network(), ExactLoss(power=1, margin=0.5)
        optimizer = OPTIMIZERS[name](model.parameters())
        attachment, scaler = attach(optimizer, loss, steps), torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(12):
            if stops and step == 7:
                parts = (model, loss, optimizer, attachment, scaler)
                torch.save([part.state_dict() for part in parts], tmp_path / "checkpoint.pt")
                states = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
                model, loss = network(seed=2), ExactLoss(margin=0.5)
                optimizer = OPTIMIZERS[name](model.parameters())
                attachment, scaler = attach(optimizer, loss, steps), torch.amp.GradScaler("cpu")
                for part, state in zip((model, loss, optimizer, attachment, scaler), states, strict=True):
                    part.load_state_dict(state)
            optimizer.zero_grad()
            x, y = batch(step)
            scaler.scale(loss(model(x), y) * (float("inf") if step == 4 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append((bits(model), float(loss.sigma), attachment.state_dict(), scaler.get_scale()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]
    assert ends[0][1] == 1.0


def _sharpness_aware(model: nn.Module) -> SAM:
    return SAM(model.parameters(), torch.optim.SGD, rho=0.5, adaptive=True, lr=0.1, momentum=0.9)


def _climb(model: nn.Module, loss: ExactLoss, optimizer: SAM, step: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        x, y = batch(step)
        value = loss(model(x), y)
        value.backward()
        return value

    closure()
    optimizer.step(closure)


def test_asam_advances_once_per_real_step():
    """Two gradients, one step: σ moves once, and the mean takes the norm of the second gradient only."""
    model, loss = network(), ExactLoss(power=1, margin=0.5)
    optimizer = _sharpness_aware(model)
    attachment = attach(optimizer, loss, total_steps=10)
    norms = []
    optimizer.base_optimizer.register_step_pre_hook(
        lambda o, *_: norms.append(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])))
    )
    attached_first = attachment.normalizer
    assert attached_first is not None
    for step in range(4):
        _climb(model, loss, optimizer, step)
    assert attachment.schedules["sigma"].last_epoch == 4
    assert len(norms) == 4
    assert float(norms[0]) == pytest.approx(1.0, rel=1e-6)  # this hook runs after the normaliser's


@pytest.mark.parametrize("stop", [1, 6])
def test_asam_goes_on_bit_for_bit(stop, tmp_path):
    ends = []
    for stops in (False, True):
        model, loss = network(), ExactLoss(power=1, margin=0.5)
        optimizer = _sharpness_aware(model)
        attachment = attach(optimizer, loss, total_steps=12)
        for step in range(12):
            if stops and step == stop:
                parts = (model, loss, optimizer, attachment)
                torch.save([part.state_dict() for part in parts], tmp_path / "checkpoint.pt")
                states = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
                model, loss = network(seed=2), ExactLoss(margin=0.5)
                optimizer = _sharpness_aware(model)
                attachment = attach(optimizer, loss, total_steps=12)
                for part, state in zip((model, loss, optimizer, attachment), states, strict=True):
                    part.load_state_dict(state)
            _climb(model, loss, optimizer, step)
        ends.append((bits(model), float(loss.sigma), attachment.state_dict()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]


def test_the_recipe_sets_the_published_numbers():
    model, loss = network(), ExactLoss()
    attachment = attach(torch.optim.SGD(model.parameters()), loss, total_steps=5, recipe="paper", schedule="cosine")
    assert float(loss.power) == 1.0
    assert float(loss.sigma) == 10.0
    assert isinstance(attachment.schedules["sigma"], ExponentialSigma)
    assert attachment.schedules["sigma"].end == 1.0
    assert isinstance(attachment.normalizer, GradientNormalizer)


def test_without_a_recipe_the_power_stays():
    loss = ExactLoss(power=0.3)
    attachment = attach(torch.optim.SGD(network().parameters()), loss, total_steps=5, normalize_gradient=False)
    assert float(loss.power) == 0.3
    assert attachment.normalizer is None
    attachment.detach()
    again = attach(torch.optim.SGD(network().parameters()), loss, 5, sigma=None, power=(1, 0), schedule="linear")
    assert isinstance(again.schedules["power"], LinearPower)
    assert set(again.schedules) == {"power"}


def test_a_step_that_the_scaler_skips_does_not_count():
    model, loss = network(), ExactLoss()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    attachment = attach(optimizer, loss, total_steps=10)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(loss(model(X), Y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert attachment.schedules["sigma"].last_epoch == 2


def test_detached_nothing_moves():
    model, loss = network(), ExactLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach(optimizer, loss, total_steps=10, sigma=(8, 1))
    attachment.detach()
    loss(model(X), Y).backward()
    optimizer.step()
    assert float(loss.sigma) == 8.0
    attach(optimizer, loss, total_steps=10)  # may be attached again


def test_past_its_end_it_warns_once():
    model, loss = network(), ExactLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(optimizer, loss, total_steps=2, sigma=(3, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            optimizer.zero_grad()
            loss(model(X), Y).backward()
            optimizer.step()
    (warning,) = [str(w.message) for w in caught]
    assert warning.startswith("the optimizer has made step 3 and total_steps is 2: sigma stays 1 from here on.")


def _attach(**options):
    options = {"optimizer": torch.optim.SGD(network().parameters()), "loss": ExactLoss(), "total_steps": 5} | options
    return attach(options.pop("optimizer"), options.pop("loss"), options.pop("total_steps"), **options)


def _twice():
    optimizer = torch.optim.SGD(network().parameters())
    attach(optimizer, ExactLoss(), 5)
    attach(optimizer, ExactLoss(), 5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: _attach(optimizer="sgd"), TypeError, "optimizer must be a torch.optim.Optimizer, got str"),
        (
            lambda: _attach(optimizer=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(network().parameters()), 1)),
            TypeError, "got StepLR. The optimizer comes first",
        ),
        (lambda: _attach(optimizer=torch.optim.LBFGS(network().parameters())), TypeError, "must not be LBFGS"),
        (lambda: _attach(total_steps=0), ValueError, "total_steps must be positive, got 0"),
        (lambda: _attach(total_steps=-3), ValueError, "total_steps must be positive, got -3"),
        (lambda: _attach(total_steps=2.0), TypeError, "total_steps must be an integer, got 2.0"),
        (lambda: _attach(sigma=(0.0, 1.0)), ValueError, "start must be positive and finite, got 0.0"),
        (lambda: _attach(sigma=(1.0, -1.0)), ValueError, "end must be positive and finite, got -1.0"),
        (lambda: _attach(sigma=3.0), TypeError, r"sigma must be a pair .first, last. or None, got 3.0: write"),
        (lambda: _attach(loss=nn.CrossEntropyLoss()), TypeError, "must have sigma.*CrossEntropyLoss has none"),
        (lambda: _attach(schedule="step"), ValueError, "schedule must be one of 'exponential', 'linear', 'cosine'"),
        (lambda: _attach(recipe="mine"), ValueError, "recipe must be one of 'paper'"),
        (_twice, ValueError, r"has an attachment already: call its detach\(\) first"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_state_of_other_parts_is_refused():
    full, bare = _attach(), _attach(normalize_gradient=False)
    with pytest.raises(ValueError, match="saved with normalize_gradient=True: attach with the same"):
        bare.load_state_dict(full.state_dict())
    with pytest.raises(KeyError, match="state of schedules has 'sigma'; it needs"):
        _attach(sigma=None).load_state_dict(full.state_dict())
