r"""attach: the paper's variance schedule and gradient normaliser, wired to an optimizer's own hooks in one line.

    attachment = attach(optimizer, loss_fn, total_steps=len(loader) * epochs)

The loop keeps its lines: before each ``optimizer.step`` the gradient is normalised, after it σ (and q) move on. Steps
that a GradScaler skips do not count, but for an optimizer with ``fused=True``: there only the device knows. Of SAM and
its kin the inner optimizer's step counts, once per real step.
"""

import warnings
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from expacc import _checks
from expacc.collapse import CollapseWatch
from expacc.normalizer import GradientNormalizer, real_optimizer
from expacc.schedules import (
    CosinePower,
    CosineSigma,
    ExponentialPower,
    ExponentialSigma,
    LinearPower,
    LinearSigma,
    Schedule,
)

Kind = Literal["exponential", "linear", "cosine"]
_SIGMA = {"exponential": ExponentialSigma, "linear": LinearSigma, "cosine": CosineSigma}
_POWER = {"exponential": ExponentialPower, "linear": LinearPower, "cosine": CosinePower}
RECIPES: dict[str, dict[str, Any]] = {
    # Section 4.4 of the paper for networks; 0.01 in the place of 1 for linear models. The margin is the loss's.
    "paper": {"power": 1.0, "sigma": (10.0, 1.0), "schedule": "exponential", "normalize_gradient": True},
}
_ATTACHED: "WeakKeyDictionary[Optimizer, Attachment]" = WeakKeyDictionary()


class Attachment:
    """What `attach` wired: its schedules, its normaliser, one state for all of them.

    Args:
        optimizer, loss, total_steps, sigma, power, schedule, normalize_gradient: as in `attach`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        loss: Any,
        total_steps: int,
        sigma: tuple[float, float] | None,
        power: tuple[float, float] | None,
        schedule: Kind,
        normalize_gradient: bool,
    ) -> None:
        self.optimizer, self.loss, self.total_steps = optimizer, loss, total_steps
        self.schedules: dict[str, Schedule] = {}
        if sigma is not None:
            self.schedules["sigma"] = _SIGMA[schedule](loss, *sigma, total_steps=total_steps)
        if power is not None:
            self.schedules["power"] = _POWER[schedule](loss, *power, total_steps=total_steps)
        self.normalizer = GradientNormalizer(optimizer) if normalize_gradient else None
        self.steps = 0
        self._handle = real_optimizer(optimizer).register_step_post_hook(self._after_step)
        self.watch = CollapseWatch(loss, total_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of everything attached, in plain types; on a GPU this waits for the device."""
        return {
            "schedules": {name: each.state_dict() for name, each in self.schedules.items()},
            "normalizer": None if self.normalizer is None else self.normalizer.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state, and move the loss to its σ and q.

        Raises:
            KeyError: a key is missing or unknown.
            ValueError: the state is of an attachment with other parts.
        """
        _checks.check_keys(type(self).__name__, state_dict, self.state_dict())
        schedules, normalizer = state_dict["schedules"], state_dict["normalizer"]
        _checks.check_keys("schedules", schedules, self.schedules)
        if (normalizer is None) != (self.normalizer is None):
            raise ValueError(
                f"this state was saved with normalize_gradient={normalizer is not None}: attach with the same."
            )
        for name, each in self.schedules.items():
            each.load_state_dict(schedules[name])
        if self.normalizer is not None:
            self.normalizer.load_state_dict(normalizer)
        self.steps = self.watch.step = state_dict["steps"]

    def detach(self) -> None:
        """Take every hook off; the loss keeps the σ and q it has."""
        self._handle.remove()
        self.watch.detach()
        if self.normalizer is not None:
            self.normalizer.detach()
        if _ATTACHED.get(self.optimizer) is self:
            del _ATTACHED[self.optimizer]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        for each in self.schedules.values():
            each.step()
        self.watch.after_step(self.steps)
        if self.steps == self.total_steps + 1:
            warnings.warn(
                f"the optimizer has made step {self.steps} and total_steps is {self.total_steps}: "
                f"{self._describe()} from here on. Write the number of optimizer steps of the whole training.",
                UserWarning,
                stacklevel=2,
            )

    def _describe(self) -> str:
        return " and ".join(f"{name} stays {each.end:g}" for name, each in self.schedules.items()) or "nothing moves"


def attach(
    optimizer: Optimizer,
    loss: Any,
    total_steps: int,
    *,
    sigma: tuple[float, float] | None = (10.0, 1.0),
    power: tuple[float, float] | None = None,
    schedule: Kind = "exponential",
    normalize_gradient: bool = True,
    recipe: Literal["paper"] | None = None,
) -> Attachment:
    r"""Wire the paper's variance schedule and gradient normaliser to the optimizer's own hooks.

    Before every ``optimizer.step`` the gradient is divided by the running mean of its norm; after it σ moves on. Call
    it once, after the optimizer is made and before any learning-rate scheduler steps. Not together with gradient
    clipping: a normalised gradient has norm about 1.

    Args:
        optimizer: any torch optimizer but LBFGS; of SAM and its kin the inner one's steps count.
        loss: an `ExactLoss`, or anything with ``sigma`` (and ``power``, where that moves).
        total_steps: optimizer steps of the whole training, ``len(loader) * epochs`` without gradient accumulation.
        sigma: first and last σ; the paper's 10 → 1 for networks, (10, 0.01) for linear models. None: σ stays.
        power: first and last q; None leaves the loss's power alone.
        schedule: "exponential" (the paper's), "linear" or "cosine".
        normalize_gradient: divide the gradient by the running mean of its norm.
        recipe: "paper" sets the published ones by name: q = 1, σ 10 → 1, exponential, normaliser on.

    Returns:
        What was attached: one ``state_dict``, ``detach()``.

    Raises:
        TypeError, ValueError: an argument that cannot be meant; the message says what to write.

    >>> import torch
    >>> from expacc import ExactLoss
    >>> model, loss = torch.nn.Linear(2, 3), ExactLoss(power=1, margin=0.5)
    >>> attachment = attach(torch.optim.SGD(model.parameters(), lr=0.1), loss, total_steps=100)
    >>> float(loss.sigma)
    10.0
    """
    _checks.check_optimizer(optimizer)
    _checks.check_choice("schedule", schedule, tuple(_SIGMA))
    _checks.check_steps("total_steps", total_steps)
    if recipe is not None:
        _checks.check_choice("recipe", recipe, tuple(RECIPES))
        chosen = RECIPES[recipe]
        sigma, schedule = chosen["sigma"], chosen["schedule"]
        normalize_gradient = chosen["normalize_gradient"]
        _checks.check_scheduled(loss, "power")
        loss.power = chosen["power"]
    for name, ends in (("sigma", sigma), ("power", power)):
        _checks.check_ends(name, ends)
    if optimizer in _ATTACHED:
        raise ValueError("this optimizer has an attachment already: call its detach() first, or attach once.")
    attachment = Attachment(optimizer, loss, total_steps, sigma, power, schedule, normalize_gradient)
    _ATTACHED[optimizer] = attachment
    return attachment
