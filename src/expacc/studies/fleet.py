r"""Train many small networks as one tensor program: a fleet. Its ships differ in loss, learning rate, seed, data part.

The weights of T networks are stacked, and ``torch.func.vmap`` runs an ordinary module over the stack. Each ship has its
own learning rate, loss and running mean of the gradient's norm; nothing else is shared but time: a fleet of 80 costs a
few times one. Equal seeds mean equal first weights and equal batches, so that two losses are compared in pairs.

The optimizers' rules are written out here, because those of ``torch.optim`` take one learning rate for a whole tensor;
tests hold them against ``torch.optim``, and a ship against a loop of one's own.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from expacc._scores import normalize_scores
from expacc.functional import exact_loss
from expacc.losses import ExactLoss
from expacc.schedules import ExponentialSigma

EVALUATED = 2048  # rows at a time, of one data part


@dataclass(frozen=True)
class Part:
    """Hold one way to divide the rows: their numbers in training, validation and test part."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Task:
    """Hold what a fleet is trained on.

    Args:
        inputs: (rows, ...), float32.
        target: class indices (rows,).
        parts: how to divide the rows; folds of a cross-validation, or one.
        network: makes a network without buffers, from torch's global generator.
        epochs, batch: of the training; a last, smaller batch is left out.
    """

    inputs: Tensor
    target: Tensor
    parts: Sequence[Part]
    network: Callable[[], nn.Module]
    epochs: int
    batch: int

    @property
    def batches(self) -> int:
        """Return how many batches an epoch has: as many as the smallest part gives, in all parts."""
        return min(len(part.train) for part in self.parts) // self.batch

    @property
    def steps(self) -> int:
        """Return how many steps a training has."""
        return self.epochs * self.batches


@dataclass(frozen=True)
class Recipe:
    """Hold a loss, and what the paper puts round it.

    Args:
        loss: makes the loss.
        sigma: first and last σ of an exponential schedule; None: it stays.
        normalize_gradient: divide by the running mean of the gradient's norm.
    """

    loss: Callable[[], nn.Module]
    sigma: tuple[float, float] | None = None
    normalize_gradient: bool = False


@dataclass(frozen=True, order=True)
class Ship:
    """Name one network of the fleet: its recipe, learning rate, seed and part of the data."""

    recipe: str
    rate: float
    seed: int
    part: int = 0


@dataclass
class Rule:
    """Hold an optimizer's rule: how many tensors it remembers per weight, and what a step does in place."""

    slots: int
    step: Callable[[Tensor, Tensor, list[Tensor], Tensor, Tensor], None]


def _sgd(weight: Tensor, grad: Tensor, memory: list[Tensor], rate: Tensor, count: Tensor) -> None:
    (momentum,) = memory
    momentum.mul_(0.9).add_(grad)
    weight.sub_(rate * momentum)


def _adam(weight: Tensor, grad: Tensor, memory: list[Tensor], rate: Tensor, count: Tensor) -> None:
    first, second = memory
    first.lerp_(grad, 0.1)
    second.mul_(0.999).addcmul_(grad, grad, value=0.001)
    unit = (second / (1 - 0.999**count)).sqrt() + 1e-8
    weight.sub_(rate / (1 - 0.9**count) * first / unit)


def _adamw(weight: Tensor, grad: Tensor, memory: list[Tensor], rate: Tensor, count: Tensor) -> None:
    weight.mul_(1 - 0.01 * rate)
    _adam(weight, grad, memory, rate, count)


# torch.optim's: SGD(momentum=0.9), Adam(), AdamW()
RULES = {"SGD": Rule(1, _sgd), "Adam": Rule(2, _adam), "AdamW": Rule(2, _adamw)}


@dataclass
class Result:
    """Hold accuracies by ship, on its validation and its test part."""

    validation: dict[Ship, float] = field(default_factory=dict)
    test: dict[Ship, float] = field(default_factory=dict)


def train(
    task: Task,
    ships: Sequence[Ship],
    recipes: Mapping[str, Recipe],
    optimizer: str,
    device: torch.device | str = "cpu",
    watch: Callable[[], None] = lambda: None,
) -> Result:
    """Train a fleet, and return how accurate each ship became. The learning rate falls to 0 along a cosine.

    Args:
        task: the data and the network.
        ships: whom to train.
        recipes: by name.
        optimizer: a key of `RULES`.
        device: where.
        watch: called after every step.
    """
    ships = sorted(ships)  # ships of a recipe lie side by side
    fleet = Fleet(task, ships, recipes, optimizer, torch.device(device))
    streams = sorted({(ship.seed, ship.part) for ship in ships})
    orders = [_batches(task, seed, part) for seed, part in streams]
    for done, rows in enumerate(zip(*orders, strict=True)):
        fleet.rows.copy_(torch.from_numpy(np.stack(rows)))
        fleet.decay.fill_((1 + math.cos(math.pi * done / task.steps)) / 2)
        fleet.step()
        for schedule in fleet.schedules:
            schedule.step()
        watch()
    return fleet.evaluate()


def _batches(task: Task, seed: int, part: int) -> Iterator[np.ndarray]:
    """Give the rows of every step of one seed on one part."""
    generator = np.random.default_rng([seed, part])
    rows = task.parts[part].train
    for _ in range(task.epochs):
        order = generator.permutation(len(rows))[: task.batches * task.batch]
        yield from rows[order].reshape(task.batches, task.batch)


class Fleet:
    """Hold the stacked weights of all ships, and make one step with all of them."""

    def __init__(
        self, task: Task, ships: Sequence[Ship], recipes: Mapping[str, Recipe], optimizer: str, device: torch.device
    ) -> None:
        self.task, self.ships, self.device = task, ships, device
        self.inputs, self.target, self.labels = task.inputs.to(device), task.target.to(device), task.target
        streams = sorted({(ship.seed, ship.part) for ship in ships})
        made = {stream: _begin(task.network, stream) for stream in streams}
        stacked, _ = stack_module_state([made[ship.seed, ship.part] for ship in ships])
        self.network = copy.deepcopy(made[streams[0]]).to("meta")
        self.weights = {name: value.detach().to(device).requires_grad_() for name, value in stacked.items()}
        self.rule = RULES[optimizer]
        self.memory = {
            name: [torch.zeros_like(value) for _ in range(self.rule.slots)] for name, value in self.weights.items()
        }
        self.rates = torch.tensor([ship.rate for ship in ships], device=device)
        self.decay = torch.ones((), device=device)
        self.count = torch.zeros((), device=device, dtype=torch.float64)
        self.rows = torch.zeros(len(streams), task.batch, dtype=torch.long, device=device)
        self.stream = torch.tensor([streams.index((ship.seed, ship.part)) for ship in ships], device=device)
        self.groups: list[tuple[slice, nn.Module]] = []
        self.schedules: list[ExponentialSigma] = []
        normalized = torch.zeros(len(ships), dtype=torch.bool)
        begin = 0
        for name, members in groupby(ships, key=lambda ship: ship.recipe):
            group = slice(begin, begin := begin + len(list(members)))
            recipe = recipes[name]
            loss = recipe.loss()
            self.groups.append((group, loss))
            normalized[group] = recipe.normalize_gradient
            if recipe.sigma is not None:
                self.schedules.append(ExponentialSigma(loss, *recipe.sigma, total_steps=task.steps))
        self.normalized = normalized.to(device) if normalized.any() else None
        self.norm = torch.full((len(ships),), torch.nan, device=device)  # its running mean; NaN: no step yet

    def scores(self, weights: dict[str, Tensor], inputs: Tensor, shared: bool) -> Tensor:
        """Return the scores (T, rows, classes) of inputs (rows, ...), shared by all ships, or (T, rows, ...)."""

        def one(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
            return functional_call(self.network, weights, (inputs,))

        return vmap(one, in_dims=(0, None if shared else 0))(weights, inputs)

    def step(self) -> None:
        """Make one step with the rows and the decay that are set."""
        shared = len(self.rows) == 1
        rows = self.rows[0] if shared else self.rows[self.stream]
        scores = self.scores(self.weights, self.inputs[rows], shared)
        target = self.labels[rows.cpu()].expand(scores.shape[:2])
        # On the host, whatever trains the networks: its kernel takes a millisecond where the reference would take 300.
        host = scores.detach().cpu().requires_grad_()
        losses = [mean_losses(loss, host[group], target[group]) for group, loss in self.groups]
        (slope,) = torch.autograd.grad(torch.cat(losses).sum(), host)
        grads = torch.autograd.grad(scores, list(self.weights.values()), slope.to(self.device))
        with torch.no_grad():
            self._update(grads)

    def _update(self, grads: Sequence[Tensor]) -> None:
        self.count += 1
        if self.normalized is not None:
            grads = self._normalize(grads, self.normalized)
        for (name, weight), grad in zip(self.weights.items(), grads, strict=True):
            rate = (self.rates * self.decay).view(-1, *[1] * (weight.ndim - 1))
            self.rule.step(weight, grad, self.memory[name], rate, self.count)

    def _normalize(self, grads: Sequence[Tensor], wanted: Tensor) -> list[Tensor]:
        """Do what `GradientNormalizer` does, ship by ship, for those whose recipe wants it."""
        norm = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
        finite = norm.isfinite()
        new = torch.where(self.norm.isnan(), norm, 0.9 * self.norm + 0.1 * norm)
        self.norm.copy_(torch.where(finite, new, self.norm))
        factor = torch.where(finite & wanted, 1 / new.clamp(min=1e-12), 1.0)
        return [grad * factor.view(-1, *[1] * (grad.ndim - 1)) for grad in grads]

    @torch.no_grad()
    def evaluate(self) -> Result:
        """Return the accuracies of all ships; a score that is not finite is wrong."""
        result = Result()
        for part in sorted({ship.part for ship in self.ships}):
            here = [k for k, ship in enumerate(self.ships) if ship.part == part]
            weights = {name: value[here] for name, value in self.weights.items()}
            for name in ("validation", "test"):
                rows = torch.from_numpy(getattr(self.task.parts[part], name)).to(self.device)
                right = torch.zeros(len(here), device=self.device)
                for some in rows.split(EVALUATED):
                    scores = self.scores(weights, self.inputs[some], shared=True)
                    hit = (scores.argmax(-1) == self.target[some]) & scores.isfinite().all(-1)
                    right += hit.sum(-1)
                accuracy = (right / len(rows)).tolist()
                getattr(result, name).update({self.ships[k]: a for k, a in zip(here, accuracy, strict=True)})
        return result


def mean_losses(loss: nn.Module, scores: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of every ship (T,), for scores (T, rows, classes) and targets (T, rows).

    What `ExactLoss` normalises is a batch, so the scores of each ship are normalised here, by its own function; then
    all rows of all ships are one call of the kernel, where vmap would take the slow reference.
    """
    if not isinstance(loss, ExactLoss):
        return vmap(loss)(scores, target)
    if loss.normalize:
        every = torch.ones(scores.shape[:2], dtype=torch.bool)
        scores = vmap(partial(normalize_scores, cap=loss.normalize == "cap"))(scores, every)
    rows = exact_loss(
        scores.flatten(0, 1), target.flatten(), loss.sigma, margin=loss.margin, power=loss.power, noise=loss.noise,
        normalize=False,
    )  # fmt: skip
    return rows.view(target.shape).mean(1)


def _begin(network: Callable[[], nn.Module], stream: tuple[int, int]) -> nn.Module:
    """Make the network of a seed and a part; the global generator is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.SeedSequence(stream).generate_state(1)[0]))
        return network()
