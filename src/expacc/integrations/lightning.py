"""A PyTorch Lightning callback: `attach` for whatever optimizer the module configures, in Lightning's checkpoints."""

from operator import attrgetter
from typing import Any, Literal

import pytorch_lightning as pl
from torch import nn

from expacc.attachment import Attachment, Kind, attach
from expacc.integrations._resume import go_on
from expacc.losses import ExactLoss


class AttachExact(pl.Callback):
    """Attach the variance schedule and the gradient normaliser when training starts.

    Lightning knows how many optimizer steps there will be. The state goes into Lightning's checkpoints and comes back
    from them. From a checkpoint without it, sigma goes on at the value of the step that the training has reached, with
    a warning; in another fit of the same trainer (more epochs), at the step where the last one ended.

    A trainer of the package `lightning` (``import lightning as L``), whose callbacks are of a class of their own, takes
    this one in a list, ``L.Trainer(callbacks=[AttachExact()])`` (tried by hand with 2.6.6).

    Args:
        loss: name of the module's attribute, "loss_fn" or "head.loss_fn"; None: the one `ExactLoss` there is.
        sigma, power, schedule, normalize_gradient, recipe: as in `expacc.attach`.

    Raises:
        TypeError: loss is not a name.
        ValueError: at the start of training: no loss or several, several optimizers, no end of training, or gradient
            clipping beside the normaliser.
    """

    def __init__(
        self,
        loss: str | None = None,
        *,
        sigma: tuple[float, float] | None = (10.0, 1.0),
        power: tuple[float, float] | None = None,
        schedule: Kind = "exponential",
        normalize_gradient: bool = True,
        recipe: Literal["paper"] | None = None,
    ) -> None:
        if loss is not None and not isinstance(loss, str):
            raise TypeError(
                f"loss must be the name of the module's attribute, got {type(loss).__name__}: "
                "write AttachExact(loss='loss_fn')."
            )
        self.loss = loss
        self._options: dict[str, Any] = {
            "sigma": sigma, "power": power, "schedule": schedule, "normalize_gradient": normalize_gradient,
            "recipe": recipe,
        }  # fmt: skip
        self.attachment: Attachment | None = None
        self._loaded: dict[str, Any] | None = None
        self._made = 0  # the trainer's steps when the hooks were taken off

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach; go on from a checkpoint, or from the trainer's last fit, where there is one."""
        kept = self._take_kept(trainer)
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"AttachExact needs one optimizer, configure_optimizers returned {len(trainer.optimizers)}: "
                "attach by hand, expacc.attach(optimizer, loss, total_steps)."
            )
        steps = trainer.estimated_stepping_batches
        if not 0 < steps < float("inf"):
            raise ValueError("AttachExact must know when training ends: write Trainer(max_epochs=…) or max_steps=….")
        self.attachment = attach(trainer.optimizers[0], find_loss(pl_module, self.loss), int(steps), **self._options)
        if trainer.gradient_clip_val and self.attachment.normalizer is not None:  # on_exception takes the hooks off
            raise ValueError(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) clips what AttachExact normalises: "
                "leave it out, or write AttachExact(normalize_gradient=False)."
            )
        go_on(self.attachment, kept, trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the hooks off: another fit attaches anew."""
        self._loaded, self._made = None, trainer.global_step
        if self.attachment is not None:
            self.attachment.detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take the hooks off."""
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the attachment's state for Lightning's checkpoint."""
        return {} if self.attachment is None else self.attachment.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's state until training starts."""
        self._loaded = state_dict or None

    def _take_kept(self, trainer: pl.Trainer) -> dict[str, Any] | None:
        """Return the state to go on from: a checkpoint's, or, where a trainer fits on, the one of its last fit."""
        kept, self._loaded = self._loaded, None
        if kept is None and self.attachment and not trainer.ckpt_path and 0 < self._made == trainer.global_step:
            return self.attachment.state_dict()
        return kept


def find_loss(module: nn.Module, name: str | None = None) -> Any:
    """Return the loss of that name, or the one `ExactLoss` among a module's submodules.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = {each: loss for each, loss in module.named_modules() if isinstance(loss, ExactLoss)}
    kind = type(module).__name__
    if name is not None:
        try:
            return attrgetter(name)(module)
        except AttributeError:
            held = f"; its losses of type ExactLoss: {', '.join(found) or 'none'}"
            raise ValueError(f"{kind} has no {name}, which AttachExact(loss={name!r}) names{held}.") from None
    if not found:
        raise ValueError(f"{kind} holds no loss of type ExactLoss: write self.loss_fn = ExactLoss() in its __init__.")
    if len(found) > 1:
        raise ValueError(
            f"{kind} holds {len(found)} losses of type ExactLoss, {', '.join(found)}, and one is attached: "
            f"write AttachExact(loss={next(iter(found))!r})."
        )
    return next(iter(found.values()))
