"""A fleet against loops of one's own: the same networks, losses, optimizers and schedules, one at a time."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from expacc import ExactLoss, attach
from expacc.baselines import HingeLoss
from expacc.studies.fleet import Fleet, Part, Recipe, Ship, Task, _batches, mean_losses, train

RECIPES = {
    "cross-entropy": Recipe(nn.CrossEntropyLoss),
    "smoothed": Recipe(lambda: nn.CrossEntropyLoss(label_smoothing=0.1)),
    "hinge": Recipe(HingeLoss),
    "default": Recipe(ExactLoss),
    "twin": Recipe(lambda: ExactLoss(noise="gumbel", power=0.0)),
    "paper": Recipe(lambda: ExactLoss(power=1, margin=0.5), (10.0, 1.0), True),
}
OPTIMIZERS = {
    "SGD": lambda weights, rate: torch.optim.SGD(weights, lr=rate, momentum=0.9),
    "Adam": lambda weights, rate: torch.optim.Adam(weights, lr=rate),
    "AdamW": lambda weights, rate: torch.optim.AdamW(weights, lr=rate),
}


def make_task(parts=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(90, 6, generator=generator, dtype=dtype)
    target = (inputs[:, :3] + 0.3 * torch.randn(90, 3, generator=generator, dtype=dtype)).argmax(1)
    divided = [Part(np.roll(np.arange(90), 7 * k)[:50], np.arange(50, 70), np.arange(70, 90)) for k in range(parts)]

    def network():
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)

    return Task(inputs, target, divided, network, epochs=4, batch=12)


def train_alone(task, ship, optimizer):
    """Train one ship as a user would, with torch's optimizer, the library's loss and attach."""
    fleet = Fleet(task, [ship], RECIPES, optimizer, torch.device("cpu"))
    network = task.network()
    network.load_state_dict({name: value[0].detach() for name, value in fleet.weights.items()})
    recipe, steps = RECIPES[ship.recipe], task.steps
    loss_fn, stepper = recipe.loss(), OPTIMIZERS[optimizer](network.parameters(), ship.rate)
    if recipe.sigma:
        attach(stepper, loss_fn, steps, recipe="paper")
    decay = torch.optim.lr_scheduler.LambdaLR(stepper, lambda k: (1 + math.cos(math.pi * min(k, steps) / steps)) / 2)
    for rows in _batches(task, ship.seed, ship.part):
        stepper.zero_grad()
        loss_fn(network(task.inputs[rows]), task.target[rows]).backward()
        stepper.step()
        decay.step()
    return network


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_ship_is_what_a_loop_of_ones_own_trains(recipe, optimizer):
    task = make_task(parts=2)
    ships = sorted(
        Ship(name, rate, seed, part) for name in RECIPES for rate in (0.003, 0.03) for seed, part in ((0, 0), (5, 1))
    )
    fleet = Fleet(task, ships, RECIPES, optimizer, torch.device("cpu"))
    k = ships.index(Ship(recipe, 0.03, 5, 1))
    alone = train_alone(task, ships[k], optimizer)
    steps = task.steps
    orders = [_batches(task, seed, part) for seed, part in ((0, 0), (5, 1))]
    for done, rows in enumerate(zip(*orders, strict=True)):
        fleet.rows.copy_(torch.from_numpy(np.stack(rows)))
        fleet.decay.fill_((1 + math.cos(math.pi * done / steps)) / 2)
        fleet.step()
        for schedule in fleet.schedules:
            schedule.step()
    ours = {name: value[k].detach() for name, value in fleet.weights.items()}
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=2e-6, atol=2e-7)  # rates are float32
    part = task.parts[1]
    for found, rows in ((fleet.evaluate().test, part.test), (fleet.evaluate().validation, part.validation)):
        right = functional_call(alone, ours, (task.inputs[rows],)).argmax(1) == task.target[rows]
        assert found[ships[k]] == pytest.approx(right.double().mean().item())


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_of_many_are_the_losses_of_each(recipe):
    scores = torch.randn(4, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1
    target = torch.randint(3, (4, 9), generator=torch.Generator().manual_seed(1))
    loss = RECIPES[recipe].loss()
    want = torch.stack([loss(one, labels) for one, labels in zip(scores, target, strict=True)])
    torch.testing.assert_close(mean_losses(loss, scores, target), want, rtol=1e-12, atol=1e-14)


def test_who_sails_along_changes_nothing():
    task = make_task(dtype=torch.float32)
    ship = Ship("default", 0.01, 0)
    alone = train(task, [ship], RECIPES, "Adam")
    together = train(task, [Ship("hinge", 100.0, 0), ship, Ship("paper", 0.1, 0)], RECIPES, "Adam")
    assert alone.test[ship] == together.test[ship]
    assert alone.validation[ship] == together.validation[ship]


def test_training_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    train(make_task(dtype=torch.float32), [Ship("default", 0.01, 0)], RECIPES, "SGD")
    assert torch.equal(before, torch.random.get_rng_state())


def test_scores_that_are_not_finite_are_wrong():
    task = make_task(dtype=torch.float32)
    fleet = Fleet(task, [Ship("default", 0.1, 0)], RECIPES, "SGD", torch.device("cpu"))
    with torch.no_grad():
        fleet.weights["2.bias"].fill_(torch.nan)
    assert fleet.evaluate().test == {fleet.ships[0]: 0.0}


def test_an_overflow_of_one_stays_with_it():
    task = make_task(dtype=torch.float32)
    wild, tame = Ship("paper", 1e38, 0), Ship("paper", 0.1, 0)
    found = train(task, [wild, tame], RECIPES, "SGD")
    assert found.test[tame] == train(task, [tame], RECIPES, "SGD").test[tame]
    assert found.test[tame] > 0.6
