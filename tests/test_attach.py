"""attach: the same bits as a loop written out by hand, recipes, what is attached once, what cannot be meant."""

import gc
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loops import OPTIMIZERS, Run, X, Y, batch, bits, network
from pytorch_optimizer import SAM
from torch import nn

from expacc import CosineSigma, ExactLoss, ExponentialSigma, GradientNormalizer, LinearPower, attach


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


def test_the_recipe_sets_the_published_numbers():
    loss = ExactLoss()
    attachment = attach(optimizer(), loss, total_steps=5, recipe="paper")
    assert (float(loss.power), float(loss.sigma)) == (1.0, 10.0)
    assert isinstance(attachment.schedules["sigma"], ExponentialSigma)
    assert attachment.schedules["sigma"].end == 1.0
    assert isinstance(attachment.normalizer, GradientNormalizer)


def test_what_is_written_beside_the_recipe_holds():
    loss = ExactLoss()
    options = {"sigma": (10, 0.01), "schedule": "cosine", "normalize_gradient": False}
    attachment = attach(optimizer(), loss, 5, recipe="paper", **options)
    assert float(loss.power) == 1.0
    assert isinstance(attachment.schedules["sigma"], CosineSigma)
    assert attachment.schedules["sigma"].end == 0.01
    assert attachment.normalizer is None


def test_without_a_recipe_the_power_stays():
    loss = ExactLoss(power=0.3)
    attachment = attach(optimizer(), loss, total_steps=5, normalize_gradient=False)
    assert float(loss.power) == 0.3
    assert attachment.normalizer is None
    attachment.detach()
    again = attach(optimizer(), loss, 5, sigma=None, power=(1, 0), schedule="linear")
    assert isinstance(again.schedules["power"], LinearPower)
    assert set(again.schedules) == {"power"}


def test_a_step_that_the_scaler_skips_does_not_count():
    run, scaler = Run("sgd", 10), torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        run.optimizer.zero_grad()
        scaler.scale(run.loss(run.model(X), Y) * factor).backward()
        scaler.step(run.optimizer)
        scaler.update()
    assert run.attachment.schedules["sigma"].last_epoch == 2


def test_detached_nothing_moves():
    run = Run("sgd", 10, sigma=(8, 1))
    run.attachment.detach()
    run.go(0, 1)
    assert float(run.loss.sigma) == 8.0
    assert not run.loss._forward_hooks
    attach(run.optimizer, run.loss, total_steps=10)  # may be attached again


def test_past_its_end_it_warns_once_at_the_callers_line():
    run = Run("sgd", 2, sigma=(3, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            run.loss(run.model(X), Y).backward()
            run.optimizer.step()
    (warning,) = caught
    assert str(warning.message).startswith(
        "the optimizer has made step 3 and total_steps is 2: sigma stays 1 from here on. Write the number of"
    )
    assert warning.filename == __file__


def test_whole_numbers_of_numpy_are_whole_numbers():
    attachment = attach(optimizer(), ExactLoss(), np.int64(5))
    assert type(attachment.state_dict()["schedules"]["sigma"]["total_steps"]) is int


def test_what_is_dropped_is_freed():
    """Optimizer, parameters and their state; and a loss that lives on keeps no hook of theirs."""
    loss, seen = ExactLoss(), []
    for _ in range(5):
        model = network()
        stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        attachment = attach(stepper, loss, total_steps=10)
        loss(model(X), Y).backward()
        stepper.step()
        seen += map(weakref.ref, (stepper, attachment, *model.parameters()))
        del model, stepper, attachment  # its loss may be attached again at once
    gc.collect()
    assert [each() for each in seen] == [None] * len(seen)
    assert not loss._forward_hooks


def wrap(inner):
    """Make of an optimizer what accelerate makes of it, as far as attach looks."""
    outer = torch.optim.SGD(inner.param_groups[0]["params"], lr=1.0)
    outer.optimizer = inner
    return outer


@pytest.mark.parametrize("outside", [wrap, lambda inner: inner], ids=["wrapped", "itself"])
@pytest.mark.parametrize("order", [1, -1], ids=["inside-first", "outside-first"])
def test_an_optimizer_is_attached_once(outside, order):
    """Also where one of the two is inside the other: as before and after accelerator.prepare."""
    loss, inner = ExactLoss(), optimizer()
    one, other = [inner, outside(inner)][::order]
    first = attach(one, loss, 5)
    with pytest.raises(ValueError, match=r"this SGD has an attachment already: call its detach\(\) first, or attach"):
        attach(other, loss, 5)
    first.detach()
    attach(other, loss, 5)


def test_a_second_loss_of_an_optimizer_is_told_what_to_do():
    stepper = optimizer()
    attach(stepper, ExactLoss(), 5)
    with pytest.raises(ValueError, match=r"already, to another loss: .* one ExactLoss .* ExponentialSigma\(loss"):
        attach(stepper, ExactLoss(), 5)


@pytest.mark.parametrize("compiled", [False, True], ids=["loss", "compiled"])
def test_one_loss_is_moved_by_one_attachment(compiled):
    """A second one may move what the first leaves alone."""
    run = Run("adam", 10)
    rival = torch.compile(run.loss) if compiled else run.loss
    run.go(0, 3)
    with pytest.raises(ValueError, match=r"sigma is moved already, by the attachment to Adam \(step 3 of 10\): call .*"
                       r"detach\(\) first, or leave it the sigma and write attach\(…, sigma=None\) here"):  # fmt: skip
        attach(optimizer(), rival, 100)
    second = attach(optimizer(), rival, 100, sigma=None, power=(1.0, 0.5))
    with pytest.raises(ValueError, match=r"power is moved already, by the attachment to SGD \(step 0 of 100\)"):
        attach(optimizer(), rival, 100, sigma=None, power=(1.0, 0.5))
    second.detach()
    attach(optimizer(), rival, 100, sigma=None, power=(1.0, 0.5))


def optimizer(**group):
    made = torch.optim.SGD(network().parameters(), lr=0.1)
    made.param_groups[0] |= group
    return made


def normalized():
    made = optimizer()
    GradientNormalizer(made)
    return made


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: optimizer(max_grad_norm=1.0), {}),
        (normalized, {}),
        (optimizer, {"power": (0.3, 0.0)}),
        (optimizer, {"power": (0.3, 1.0)}),
        (optimizer, {"sigma": (3.0, 0.0)}),
        (optimizer, {"normalize_gradient": 1}),
    ],
    ids=["clipping", "normalised", "power-to-0", "recipe-and-power", "sigma-to-0", "flag"],
)
def test_refused_it_has_touched_nothing(make, options):
    made, loss = make(), ExactLoss(sigma=0.7)
    hooks = [dict(each) for each in (made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks)]
    with pytest.raises((TypeError, ValueError)):
        attach(made, loss, 5, recipe="paper", **options)
    assert (float(loss.sigma), float(loss.power)) == (0.7, 0.3)
    assert not loss._forward_hooks
    assert hooks == [made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks]


def _attach(**options):
    options = {"optimizer": optimizer(), "loss": ExactLoss(), "total_steps": 5} | options
    return attach(options.pop("optimizer"), options.pop("loss"), options.pop("total_steps"), **options)


# (arguments that replace those of a good call, type, message)
REFUSED = {
    "optimizer-text": ({"optimizer": "sgd"}, TypeError, "optimizer must be a torch.optim.Optimizer, got str"),
    "scheduler": (
        {"optimizer": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(network().parameters()), 1)}, TypeError,
        "got StepLR. The optimizer comes first",
    ),
    "lbfgs": ({"optimizer": torch.optim.LBFGS(network().parameters())}, TypeError, "must not be LBFGS"),
    "lbfgs-inside": ({"optimizer": SAM(network().parameters(), torch.optim.LBFGS)}, TypeError, "must not be LBFGS"),
    "clipping": ({"optimizer": optimizer(max_grad_norm=1.0)}, ValueError, "SGD clips gradients .max_grad_norm=1.,"),
    "normalised": ({"optimizer": normalized()}, ValueError, r"normalised already, .*, normalize_gradient=False\)"),
    "steps-zero": ({"total_steps": 0}, ValueError, "total_steps must be positive, got 0"),
    "steps-negative": ({"total_steps": -3}, ValueError, "total_steps must be positive, got -3"),
    "steps-float": ({"total_steps": 2.0}, TypeError, "total_steps must be an integer, got 2.0"),
    "sigma-zero": (
        {"sigma": (0, 1)}, ValueError,
        r"sigma must be positive and finite at both ends, got \(0, 1\): write for example sigma=\(10, 1\)",
    ),
    "sigma-negative": ({"sigma": (1.0, -1.0)}, ValueError, r"sigma must be positive .*, got \(1.0, -1.0\): write"),
    "sigma-inf": ({"sigma": (1.0, np.inf)}, ValueError, r"sigma must be positive and finite .*, got \(1.0, inf\)"),
    "sigma-number": ({"sigma": 3.0}, TypeError, r"sigma must be a pair \(first, last\) or None, got 3.0: write"),
    "sigma-text": (
        {"sigma": ("10", 1)}, TypeError,
        r"sigma must be a pair of numbers \(first, last\), got .*: write for example sigma=\(10, 1\), or float\(…\)",
    ),
    "power-to-zero": (
        {"power": (0.3, 0)}, ValueError,
        r"power=\(0.3, 0\) cannot be reached exponentially, .*: write schedule='linear' or 'cosine', or two positive",
    ),
    "power-nan": ({"power": (np.nan, 0)}, ValueError, r"power must be finite at both ends, got \(nan, 0\): write"),
    "loss": ({"loss": nn.CrossEntropyLoss()}, TypeError, "must have sigma.*CrossEntropyLoss has none"),
    "schedule": ({"schedule": "step"}, ValueError, "schedule must be one of 'exponential', 'linear', 'cosine'"),
    "normalize": ({"normalize_gradient": "no"}, TypeError, "normalize_gradient must be True or False, got str"),
    "recipe": ({"recipe": "mine"}, ValueError, "recipe must be one of 'paper'"),
    "recipe-power": (
        {"recipe": "paper", "power": (0.3, 0.5)}, ValueError,
        r"recipe='paper' sets q = 1 and power=\(0.3, 0.5\) moves q: leave one of them out",
    ),
    "recipe-loss": (
        {"recipe": "paper", "loss": SimpleNamespace(sigma=1.0)}, TypeError, "must have power, .* has none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant(name):
    changed, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        _attach(**changed)


def test_what_attach_normalises_takes_no_second_normaliser():
    with pytest.raises(ValueError, match=r"of this SGD are normalised already, .* Call the other's detach\(\), or"):
        GradientNormalizer(_attach().optimizer)
