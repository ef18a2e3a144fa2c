"""ExactLoss as a module: σ and q as state, pickling, hooks, functional calls, what it shows of itself."""

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from plain import BACKENDS, NOISES, TOLERANCE, draw, draw_target, plain_loss

from expacc import ExactLoss, exact_loss
from expacc.kernels.dispatch import watch_paths

both = pytest.mark.parametrize("backend", BACKENDS)
noises = pytest.mark.parametrize("noise", NOISES)
close = TOLERANCE[torch.float32]
LOGITS, TARGET = draw(6, 5, dtype=torch.float32), draw_target(6, classes=5)
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])


def evaluate(loss: ExactLoss, path: str, *extra: Any) -> torch.Tensor:
    with watch_paths() as paths:
        value = loss(LOGITS, TARGET, *extra)
    assert paths == [path]
    return value


@both
@noises
def test_the_module_is_the_function(backend: Any, noise: Any) -> None:
    options: dict[str, Any] = {"noise": noise, "power": 1, "margin": 0.5, "weight": WEIGHT, "ignore_index": 2}
    loss = ExactLoss(sigma=2.0, backend=backend, **options)
    want = exact_loss(LOGITS, TARGET, 2.0, reduction="mean", backend=backend, **options)
    assert torch.equal(evaluate(loss, backend), want)


@both
@noises
def test_defaults_are_those_documented(backend: Any, noise: Any) -> None:
    value = evaluate(ExactLoss(noise=noise, backend=backend), backend)
    want = plain_loss(LOGITS, TARGET, 1.0, power=0.3, noise=noise, normalize=True, reduction="mean")
    torch.testing.assert_close(value, want.float(), **close)


@both
def test_sigma_of_the_call_replaces_the_modules(backend: Any) -> None:
    loss, sigma = ExactLoss(sigma=5.0, backend=backend), torch.linspace(0.5, 2.0, 6)
    value = evaluate(loss, backend, sigma)
    torch.testing.assert_close(value, plain_loss(LOGITS, TARGET, sigma, reduction="mean").float(), **close)
    assert torch.equal(evaluate(loss, backend, torch.tensor(5.0)), evaluate(loss, backend))


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.float(),
        lambda m: m.double(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.float32),
        lambda m: torch.nn.Sequential(m).half()[0],
    ],
    ids=["half", "bfloat16", "float", "double", "to-half", "to-device-and-dtype", "inside-a-model"],
)
def test_sigma_and_power_stay_float64_and_exact(move: Any) -> None:
    loss = move(ExactLoss(sigma=1 / 3, power=0.1, weight=WEIGHT))
    assert loss.sigma.dtype == loss.power.dtype == torch.float64
    assert loss.sigma.item() == 1 / 3
    assert loss.power.item() == 0.1


@pytest.mark.parametrize("name", ["sigma", "power"])
@pytest.mark.parametrize(
    "value", [2, 2.0, torch.tensor(2.0), torch.tensor(2.0, dtype=torch.bfloat16)], ids=["int", "float", "f32", "bf16"]
)
def test_assignment_moves_the_value_in_place(name: str, value: Any) -> None:
    loss = ExactLoss()
    held = getattr(loss, name)
    setattr(loss, name, value)
    assert getattr(loss, name) is held
    assert held.dtype == torch.float64
    assert held.item() == 2.0


@both
def test_a_moved_sigma_and_power_count(backend: Any) -> None:
    loss = ExactLoss(backend=backend)
    loss.sigma, loss.power = 2.0, 1.0
    assert torch.equal(evaluate(loss, backend), evaluate(ExactLoss(sigma=2.0, power=1.0, backend=backend), backend))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), torch.tensor(-1.0), torch.tensor(0.0)], ids=str)
def test_a_sigma_that_is_not_positive_is_refused_and_nothing_moves(value: Any) -> None:
    loss = ExactLoss(sigma=3.0)
    with pytest.raises(ValueError, match=r"sigma must be positive and finite, got .*write for example sigma=1.0"):
        loss.sigma = value
    assert loss.sigma.item() == 3.0
    with pytest.raises(ValueError, match="sigma must be positive and finite"):
        ExactLoss(sigma=value)


def test_a_parameter_in_place_of_the_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"sigma is state that a schedule moves.*loss\(logits, target, sigma\)"):
        ExactLoss().sigma = torch.nn.Parameter(torch.tensor(1.0))


@both
@pytest.mark.parametrize("way", ["pickle", "deepcopy", "copy", "torch.save"])
def test_a_copy_is_equal_and_apart(backend: Any, way: str) -> None:
    loss = ExactLoss(sigma=0.7, power=0.5, weight=WEIGHT, margin=1.0, ignore_index=3, backend=backend)
    want = evaluate(loss, backend)
    if way == "torch.save":
        buffer = io.BytesIO()
        torch.save(loss, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    else:
        twin = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy, "copy": copy.copy}[way](
            loss
        )
    assert torch.equal(evaluate(twin, backend), want)
    if way != "copy":
        twin.sigma = 9.0
        assert loss.sigma.item() == 0.7


def test_state_dict_round_trip_with_weights_only() -> None:
    loss, buffer = ExactLoss(sigma=0.7, power=0.1, weight=WEIGHT), io.BytesIO()
    torch.save(loss.state_dict(), buffer)
    buffer.seek(0)
    twin = ExactLoss(weight=torch.ones(5))
    held = twin.sigma
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    assert twin.sigma is held
    assert sorted(loss.state_dict()) == ["power", "sigma", "weight"]
    assert torch.equal(twin(LOGITS, TARGET), loss(LOGITS, TARGET))


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_in_half_precision_leaves_the_state_float64(assign: bool) -> None:
    state = {"sigma": torch.tensor(0.5, dtype=torch.float16), "power": torch.tensor(1.0, dtype=torch.float16)}
    loss = ExactLoss()
    loss.load_state_dict(state, assign=assign)
    assert loss.sigma.dtype == loss.power.dtype == torch.float64
    assert (loss.sigma.item(), loss.power.item()) == (0.5, 1.0)


def test_the_loss_owns_no_parameters_and_no_view_of_the_callers_sigma() -> None:
    sigma = torch.tensor(1.0, dtype=torch.float64)
    loss = ExactLoss(sigma=sigma)  # type: ignore[arg-type]
    sigma.fill_(9.0)
    assert loss.sigma.item() == 1.0
    assert list(loss.parameters()) == []


@both
def test_hooks_fire(backend: Any) -> None:
    loss, seen = ExactLoss(backend=backend), []
    loss.register_forward_pre_hook(lambda module, args: seen.append("before"))
    loss.register_forward_hook(lambda module, args, output: seen.append("after"))
    loss.register_full_backward_pre_hook(lambda module, grad: seen.append("backward-before"))
    loss.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward-after"))
    leaf = LOGITS.clone().requires_grad_()
    loss(leaf, TARGET).backward()
    assert seen == ["before", "after", "backward-before", "backward-after"]
    assert leaf.grad is not None


@both
@noises
def test_functional_call_replaces_the_state(backend: Any, noise: Any) -> None:
    loss, sigma = ExactLoss(noise=noise, backend=backend), torch.tensor(1.7, dtype=torch.float64).requires_grad_()
    with watch_paths() as paths:
        value = torch.func.functional_call(loss, {"sigma": sigma}, (LOGITS, TARGET))
    value.backward()
    assert paths == [backend]
    assert loss.sigma.item() == 1.0
    torch.testing.assert_close(value.detach(), exact_loss(LOGITS, TARGET, 1.7, noise=noise, reduction="mean"), **close)
    assert sigma.grad is not None
    assert sigma.grad != 0


@pytest.mark.parametrize("training", [True, False])
def test_eval_mode_normalises_as_training_does(training: bool) -> None:
    loss = ExactLoss().train(training)
    torch.testing.assert_close(loss(LOGITS, TARGET), plain_loss(LOGITS, TARGET, reduction="mean").float(), **close)


@both
@noises
@pytest.mark.parametrize("shape", [(1, 2), (2,)], ids=str)
def test_one_sample_of_two_classes_warns_once_and_has_no_gradient(backend: Any, noise: Any, shape: Any) -> None:
    loss = ExactLoss(noise=noise, backend=backend)
    leaf = draw(*shape, dtype=torch.float32).requires_grad_()
    target = torch.zeros(shape[:-1], dtype=torch.int64)
    with pytest.warns(UserWarning, match=r"gradient is 0. Use larger .* ExactLoss\(normalize=False\)") as caught:
        loss(leaf, target).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(leaf, target)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.zeros(shape), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 4), (0, 2), (1, 1), (2, 1), (1, 3), (2, 2), (1, 2, 2)], ids=str)
def test_other_shapes_do_not_warn(shape: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ExactLoss()(torch.zeros(shape), torch.zeros(shape[:1] + shape[2:], dtype=torch.int64))
        ExactLoss(normalize=False)(torch.zeros(1, 2), torch.tensor([0]))


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "ExactLoss(sigma=1, power=0.3, normalize=True)"),
        ({"margin": 2, "power": 1}, "ExactLoss(sigma=1, power=1, normalize=True, margin=2)"),
        ({"noise": "gumbel", "normalize": False}, "ExactLoss(sigma=1, power=0.3, normalize=False, noise='gumbel')"),
        (
            {"label_smoothing": 0.1, "reduction": "sum", "backend": "reference", "ignore_index": 0, "nodes": 32},
            (
                "ExactLoss(sigma=1, power=0.3, normalize=True, ignore_index=0, label_smoothing=0.1, "
                "reduction='sum', nodes=32, backend='reference')"
            ),
        ),
        ({"weight": torch.ones(7)}, "ExactLoss(sigma=1, power=0.3, normalize=True, weight of 7 classes)"),
    ],
    ids=["default", "paper", "gumbel", "rest", "weight"],
)
def test_repr_shows_what_differs_from_the_default(options: dict[str, Any], shown: str) -> None:
    assert repr(ExactLoss(**options)) == shown


def test_repr_follows_the_schedule() -> None:
    loss = ExactLoss()
    loss.sigma = 0.25
    assert repr(loss) == "ExactLoss(sigma=0.25, power=0.3, normalize=True)"


@both
@noises
def test_an_ordinary_loop_learns(backend: Any, noise: Any) -> None:
    target = torch.arange(12) % 3
    features = 4.0 * torch.eye(3, 4)[target] + draw(12, 4, dtype=torch.float32, scale=0.3, seed=1)
    model = torch.nn.Linear(4, 3)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    loss = ExactLoss(noise=noise, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(6):
        optimizer.zero_grad()
        loss(model(features), target).backward()
        optimizer.step()
    assert (model(features).argmax(1) == target).all()


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_schedule_may_move_before_backward(backend, reduction):
    """The gradient is that of the σ and q of forward, also a second time."""
    x, target = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 5
    slopes = []
    for moves in (False, True):
        loss, mine = ExactLoss(reduction=reduction, backend=backend), x.clone().requires_grad_()
        value = loss(mine, target).mean()
        if moves:
            loss.sigma, loss.power = 2.0, 0.7
        value.backward(retain_graph=True)
        value.backward()
        slopes.append(mine.grad)
    assert torch.equal(*slopes)
