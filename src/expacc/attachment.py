r"""attach: the paper's variance schedule and gradient normaliser, wired to an optimizer's own hooks in one line.

    attachment = attach(optimizer, loss_fn, total_steps=len(loader) * epochs)

The loop keeps its lines: before each ``optimizer.step`` the gradient is normalised, after it σ (and q) move on. Steps
that a GradScaler skips do not count, but for an optimizer with ``fused=True``: there only the device knows. Of SAM and
its kin the inner optimizer's step counts, once per real step.
"""

import gc
import warnings
from typing import Any, Literal
from weakref import WeakSet, finalize

from torch.optim import Optimizer

from expacc import _checks
from expacc.collapse import CollapseWatch
from expacc.normalizer import GradientNormalizer, check_normalizable, check_optimizer, real_optimizer
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
_SCHEDULES: dict[str, dict[str, type[Schedule]]] = {
    "sigma": {"exponential": ExponentialSigma, "linear": LinearSigma, "cosine": CosineSigma},
    "power": {"exponential": ExponentialPower, "linear": LinearPower, "cosine": CosinePower},
}
# Section 4.4 of the paper. Its σ 10 → 1 (0.01 for linear models), exponential, and its normaliser are the defaults of
# attach; the margin is the loss's.
RECIPES = {"paper": 1.0}  # q
_ALIVE: "WeakSet[Attachment]" = WeakSet()  # what keeps one alive is its optimizer's hook


class Attachment:
    """What `attach` wired: its schedules, its normaliser, one state for all of them.

    Args:
        optimizer, loss, total_steps, sigma, power, schedule, normalize_gradient: as in `attach`, which checks them.
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
        self.schedules: dict[str, Schedule] = {
            name: _SCHEDULES[name][schedule](loss, *ends, total_steps=total_steps)
            for name, ends in (("sigma", sigma), ("power", power))
            if ends is not None
        }
        self.normalizer = GradientNormalizer(optimizer) if normalize_gradient else None
        self.steps, self._told = 0, False
        self._handle = real_optimizer(optimizer).register_step_post_hook(self._after_step)
        self.watch = CollapseWatch(loss, total_steps)
        # A loss outlives its optimizers; without this it would collect a hook of each.
        finalize(self, self.watch.detach).atexit = False
        _ALIVE.add(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of everything attached, in plain types; on a GPU this waits for the device.

        The schedules' plans are in it to be compared: on loading, the attachment keeps its own.
        """
        return {
            "steps": self.steps,
            "schedules": {name: each.plan() for name, each in self.schedules.items()},
            "normalizer": None if self.normalizer is None else self.normalizer.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state: the plan is this attachment's own, from the saved step on; σ and q are moved to it.

        Where the state was saved under another plan, of another length, say, it warns and names both.

        Raises:
            KeyError: a key is missing or unknown.
            ValueError: the state is of an attachment with other parts.
        """
        _checks.check_keys(type(self).__name__, state_dict, self.state_dict())
        plans, normalizer, steps = state_dict["schedules"], state_dict["normalizer"], int(state_dict["steps"])
        _checks.check_keys("schedules", plans, self.schedules)
        for name, each in self.schedules.items():
            _checks.check_keys(f"schedules[{name!r}]", plans[name], each.plan())
        if (normalizer is None) != (self.normalizer is None):
            raise ValueError(
                f"this state was saved with normalize_gradient={normalizer is not None}: attach with the same."
            )
        if self.normalizer is not None:
            self.normalizer.load_state_dict(normalizer)
        self.steps = self.watch.step = steps
        for each in self.schedules.values():
            each.load_state_dict(each.state_dict() | {"last_epoch": steps})
        self._compare(plans)

    def detach(self) -> None:
        """Take every hook off; the loss keeps the σ and q it has."""
        self._handle.remove()
        self.watch.detach()
        if self.normalizer is not None:
            self.normalizer.detach()
        _ALIVE.discard(self)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        for each in self.schedules.values():
            each.step()
        self.watch.after_step(self.steps)
        past = {name: each for name, each in self.schedules.items() if each.last_epoch > each.total_steps}
        if past and not self._told:
            self._told = True
            stays = " and ".join(f"{name} stays {each.end:g}" for name, each in past.items())
            planned = next(iter(past.values())).total_steps
            warnings.warn(
                f"the optimizer has made step {self.steps} and total_steps is {planned}: {stays} from here on. "
                "Write the number of optimizer steps of the whole training.",
                UserWarning,
                stacklevel=3,  # past torch's own wrapper, at the caller's line
            )

    def _compare(self, plans: dict[str, dict[str, Any]]) -> None:
        """Warn where the saved plans are not this attachment's."""
        for name, each in self.schedules.items():
            if plans[name] != each.plan():
                warnings.warn(
                    f"{name} was saved at step {_say(self.steps, plans[name])}; it goes on as step "
                    f"{_say(self.steps, each.plan())}, {name}={each.value_at(self.steps):g}. To go on as before, "
                    "attach with the saved settings.",
                    UserWarning,
                    stacklevel=3,
                )


def _say(step: int, plan: dict[str, Any]) -> str:
    return f"{step} of {plan['total_steps']} ({plan['kind']} {plan['start']:g} → {plan['end']:g})"


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

    It warns where the optimizer steps past `total_steps`, and, once, where σ has become too small for the scores and
    samples that are still wrong have no gradient left (`expacc.collapse`). Under ``torch.compile`` of the loss nobody
    looks for the latter.

    Args:
        optimizer: any torch optimizer but LBFGS; of SAM and its kin the inner one's steps count.
        loss: an `ExactLoss`, or anything with ``sigma`` (and ``power``, where that moves).
        total_steps: optimizer steps of the whole training, ``len(loader) * epochs`` without gradient accumulation.
        sigma: first and last σ; the paper's 10 → 1 for networks, (10, 0.01) for linear models. None: σ stays.
        power: first and last q; None leaves the loss's power alone.
        schedule: "exponential" (the paper's), "linear" or "cosine".
        normalize_gradient: divide the gradient by the running mean of its norm.
        recipe: "paper" sets the loss's q = 1. The rest of the published settings, σ 10 → 1, exponential and the
            normaliser, are the defaults here; what is written beside the recipe holds.

    Returns:
        What was attached: one ``state_dict``, ``detach()``.

    Raises:
        TypeError, ValueError: an argument that cannot be meant, or something that is attached already; the message
            says what to write. Then nothing has been touched.

    >>> import torch
    >>> from expacc import ExactLoss
    >>> model, loss = torch.nn.Linear(2, 3), ExactLoss(power=1, margin=0.5)
    >>> attachment = attach(torch.optim.SGD(model.parameters(), lr=0.1), loss, total_steps=100)
    >>> float(loss.sigma)
    10.0
    """
    inner = check_optimizer(optimizer)
    _checks.check_choice("schedule", schedule, tuple(_SCHEDULES["sigma"]))
    total_steps = _checks.check_steps("total_steps", total_steps)
    _checks.check_flag("normalize_gradient", normalize_gradient)
    moved = {name: ends for name, ends in (("sigma", sigma), ("power", power)) if ends is not None}
    for name, ends in moved.items():
        _checks.check_ends(name, ends, schedule)
        _checks.check_scheduled(loss, name)
    if recipe is not None:
        _checks.check_choice("recipe", recipe, tuple(RECIPES))
        _checks.check_scheduled(loss, "power")
        if power is not None:
            _checks.refuse_recipe_power(recipe, power)
    _check_free(inner, loss, moved)
    if normalize_gradient:
        check_normalizable(inner)
    # Nothing is touched before here: what is refused leaves the loss and the optimizer as they were.
    if recipe is not None:
        loss.power = RECIPES[recipe]
    return Attachment(optimizer, loss, total_steps, sigma, power, schedule, normalize_gradient)


def _check_free(inner: Optimizer, loss: Any, moved: Any) -> None:
    """Raise where the optimizer has an attachment, or where another one moves what this one is to move."""
    if _find_rival(inner, loss, moved) is None:
        return
    gc.collect()  # an optimizer that was dropped, in a notebook's last run, say, lives on in a cycle with its hooks
    rival = _find_rival(inner, loss, moved)
    if rival is None:
        return
    if real_optimizer(rival.optimizer) is inner:
        _checks.refuse_second_attachment(inner, _bare(rival.loss) is _bare(loss))
    name = next(name for name in moved if name in rival.schedules)
    _checks.refuse_second_mover(name, real_optimizer(rival.optimizer), rival.steps, rival.total_steps)


def _find_rival(inner: Optimizer, loss: Any, moved: Any) -> Attachment | None:
    for each in list(_ALIVE):
        if real_optimizer(each.optimizer) is inner:
            return each
        if _bare(each.loss) is _bare(loss) and not each.schedules.keys().isdisjoint(moved):
            return each
    return None


def _bare(loss: Any) -> Any:
    """Return the loss that torch.compile has wrapped."""
    return getattr(loss, "_orig_mod", loss)
