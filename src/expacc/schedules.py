r"""Schedules of σ and of the power q: what a loss's state is after k steps, in the shape of torch's LR schedulers.

With p = min(k/total_steps, 1), from `start` at k = 0 to `end` at k = total_steps, and `end` ever after:

    exponential  start·(end/start)^p        linear  start + (end − start)·p
    cosine       end + (start − end)·(1 + cos πp)/2        constant  start

The value goes into ``loss.sigma`` (or ``loss.power``) in place, where a compiled step and a CUDA graph see it. A step
is what the caller says it is: an optimizer's step, or an epoch. `attach` calls `step` from the optimizer's own hooks.
"""

import math
from typing import Any, ClassVar

from expacc import _checks


class Schedule:
    """Move one attribute of a loss; the subclasses say which, and along which curve.

    Args:
        loss: what has the attribute: an `ExactLoss`, or anything with a number of that name.
        start: value of the first step.
        end: value from step `total_steps` on.
        total_steps: how many calls of `step` it takes.
        last_epoch: calls so far; -1 begins.
    """

    attribute: ClassVar[str]
    kind: ClassVar[str]

    def __init__(self, loss: Any, start: float, end: float, total_steps: int, last_epoch: int = -1) -> None:
        _checks.check_scheduled(loss, self.attribute)
        self.total_steps = _checks.check_steps("total_steps", total_steps)
        self.last_epoch = max(_checks.check_epoch("last_epoch", last_epoch), 0)
        positive = self.attribute == "sigma" or self._needs_positive()
        _checks.check_number("start", start, "10.0", positive=positive)
        _checks.check_number("end", end, "1.0", positive=positive)
        self.loss = loss
        self.start, self.end = float(start), float(end)
        self._apply()

    def step(self) -> None:
        """Go one step on."""
        self.last_epoch += 1
        self._apply()

    def value_at(self, step: int) -> float:
        """Return the value after `step` steps.

        >>> from expacc import ExactLoss
        >>> [ExponentialSigma(ExactLoss(), 10, 0.1, total_steps=4).value_at(k) for k in (0, 2, 4, 9)]
        [10.0, 1.0, 0.1, 0.1]
        """
        if step <= 0:
            return self.start
        return self.end if step >= self.total_steps else self._curve(step / self.total_steps)

    def plan(self) -> dict[str, str | int | float]:
        """Return the curve in plain words and numbers; what it has done of it so far is the state.

        >>> from expacc import ExactLoss
        >>> LinearSigma(ExactLoss(), 3, 1, total_steps=4).plan()
        {'kind': 'linear', 'start': 3.0, 'end': 1.0, 'total_steps': 4}
        """
        return {"kind": self.kind, "start": self.start, "end": self.end, "total_steps": self.total_steps}

    def state_dict(self) -> dict[str, int | float]:
        """Return the state in plain numbers; the loss is not part of it."""
        return {
            "start": self.start,
            "end": self.end,
            "total_steps": self.total_steps,
            "last_epoch": self.last_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, int | float]) -> None:
        """Take a state and move the loss to its value.

        Raises:
            KeyError: a key is missing or unknown.
        """
        _checks.check_keys(type(self).__name__, state_dict, self.state_dict())
        self.start, self.end = float(state_dict["start"]), float(state_dict["end"])
        self.total_steps, self.last_epoch = int(state_dict["total_steps"]), int(state_dict["last_epoch"])
        self._apply()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.start:g} → {self.end:g}, step {self.last_epoch} of {self.total_steps}, "
            f"{self.attribute}={self.value_at(self.last_epoch):g})"
        )

    def _apply(self) -> None:
        setattr(self.loss, self.attribute, self.value_at(self.last_epoch))

    def _curve(self, part: float) -> float:
        raise NotImplementedError

    @classmethod
    def _needs_positive(cls) -> bool:
        return False


class _OfSigma(Schedule):
    attribute = "sigma"

    def get_last_sigma(self) -> float:
        """Return the σ that is in force."""
        return self.value_at(self.last_epoch)


class _OfPower(Schedule):
    attribute = "power"

    def get_last_power(self) -> float:
        """Return the q that is in force."""
        return self.value_at(self.last_epoch)


class _Exponential(Schedule):
    kind = "exponential"

    def _curve(self, part: float) -> float:
        return self.start * (self.end / self.start) ** part

    @classmethod
    def _needs_positive(cls) -> bool:
        return True


class _Linear(Schedule):
    kind = "linear"

    def _curve(self, part: float) -> float:
        return self.start + (self.end - self.start) * part


class _Cosine(Schedule):
    kind = "cosine"

    def _curve(self, part: float) -> float:
        return self.end + (self.start - self.end) * (1.0 + math.cos(math.pi * part)) / 2.0


class ExponentialSigma(_Exponential, _OfSigma):
    """σ falls by the same factor every step: the paper's schedule, 10 → 1 for networks, 10 → 0.01 for linear models."""


class LinearSigma(_Linear, _OfSigma):
    """σ moves by the same amount every step."""


class CosineSigma(_Cosine, _OfSigma):
    """σ moves along half a cosine: slowly at both ends."""


class ExponentialPower(_Exponential, _OfPower):
    """q moves by the same factor every step; both ends are positive."""


class LinearPower(_Linear, _OfPower):
    """q moves by the same amount every step."""


class CosinePower(_Cosine, _OfPower):
    """q moves along half a cosine."""


class _Constant(Schedule):
    kind = "constant"

    def __init__(self, loss: Any, value: float, total_steps: int = 1, last_epoch: int = -1) -> None:
        super().__init__(loss, value, value, total_steps, last_epoch)

    def _curve(self, part: float) -> float:
        return self.start


class ConstantSigma(_Constant, _OfSigma):
    """σ stays: the control of an ablation, with a schedule's interface."""


class ConstantPower(_Constant, _OfPower):
    """q stays."""
