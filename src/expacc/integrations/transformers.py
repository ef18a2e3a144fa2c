"""For the Hugging Face Trainer: a `compute_loss_func` and a callback.

    loss = ExactLoss(power=1, margin=0.5)
    Trainer(..., args=TrainingArguments(..., max_grad_norm=0.0),
            compute_loss_func=TrainerLoss(loss), callbacks=[AttachExact(loss)])

The loss alone, ``compute_loss_func=TrainerLoss(ExactLoss())``, is the default's one line.
"""

from typing import Any, Literal, cast

from torch import Tensor
from torch.nn.functional import pad
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from expacc.attachment import Attachment, Kind, attach
from expacc.integrations._resume import go_on
from expacc.losses import ExactLoss

_KEY = "expacc.AttachExact"  # in trainer_state.json, among the callbacks that have a state


def _stateful(state: TrainerState) -> dict[str, Any]:
    """Return what the Trainer writes into trainer_state.json for callbacks (declared as the list it is made from)."""
    return cast(dict[str, Any], state.stateful_callbacks)


class _StateWhenWritten:
    """Stands in the Trainer's state for what the attachment's will be when a checkpoint is written.

    The Trainer may decide to save after the callbacks' turn (save_strategy="best": after the evaluation), and asking
    for the state at every step would wait for the device. It writes a copy of its state, and a copy of this is plain.
    Not an `ExportableState`: restore_callback_states_from_checkpoint makes such a callback anew, without its loss.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, ({"args": {}, "attributes": self._attachment.state_dict()},)


class TrainerLoss:
    """An `ExactLoss` as the Trainer calls it.

    Class dimension last, as in Hugging Face's models: (N, C) or (N, T, C). With gradient accumulation each batch counts
    by its share of the labels, as the Trainer asks. Labels are taken as they stand, one per row or position: right for
    sequence and token classification. A causal language model's, which are its own input, need ``shift=True``.

    Args:
        loss: with reduction "mean" and ignore_index -100, by which the Trainer counts labels.
        shift: compare each position's scores with the next one's label, as transformers' causal language models do in
            their own loss.

    Raises:
        ValueError: the loss has another reduction or ignore_index.
    """

    def __init__(self, loss: ExactLoss, *, shift: bool = False) -> None:
        if loss.reduction != "mean":
            raise ValueError(f"TrainerLoss needs reduction='mean', got {loss.reduction!r}: write ExactLoss().")
        if loss.ignore_index != -100:
            raise ValueError(
                f"TrainerLoss needs ignore_index=-100, got {loss.ignore_index}: the Trainer divides by the number of "
                "labels that are not -100. Write ExactLoss(), and -100 in the labels."
            )
        self.loss, self.shift = loss, shift

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the loss of a model's outputs."""
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        if self.shift:
            labels = pad(labels, (0, 1), value=-100)[..., 1:]
        value = self.loss(logits.movedim(-1, 1) if logits.ndim > 2 else logits, labels)
        if num_items_in_batch is None:
            return value
        return value * (labels != -100).sum() / num_items_in_batch


class AttachExact(TrainerCallback):
    """Attach the variance schedule and the gradient normaliser when training starts.

    The Trainer knows how many optimizer steps there will be. The state goes into all its checkpoints
    (trainer_state.json) and comes back from them. From a checkpoint without it, sigma goes on at the value of the step
    that the training has reached, with a warning. After an interrupt, `train` attaches anew.

    Args:
        loss: the loss that `TrainerLoss` holds.
        sigma, power, schedule, normalize_gradient, recipe: as in `expacc.attach`.

    Raises:
        ValueError: at the start of training: the Trainer clips gradients beside the normaliser, or is asked for a label
            smoothing that it would leave out.
    """

    def __init__(
        self,
        loss: ExactLoss,
        *,
        sigma: tuple[float, float] | None = (10.0, 1.0),
        power: tuple[float, float] | None = None,
        schedule: Kind = "exponential",
        normalize_gradient: bool = True,
        recipe: Literal["paper"] | None = None,
    ) -> None:
        self.loss = loss
        self._options: dict[str, Any] = {
            "sigma": sigma, "power": power, "schedule": schedule, "normalize_gradient": normalize_gradient,
            "recipe": recipe,
        }  # fmt: skip
        self.attachment: Attachment | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach; go on from a checkpoint where there is one."""
        self._detach()  # a training that was interrupted, or had too large a batch, has seen no on_train_end
        if smoothing := args.label_smoothing_factor:
            raise ValueError(
                f"TrainingArguments(label_smoothing_factor={smoothing:g}) has no effect beside a compute_loss_func: "
                f"write ExactLoss(label_smoothing={smoothing:g}) in its place."
            )
        self.attachment = attach(kwargs["optimizer"], self.loss, state.max_steps, **self._options)
        if args.max_grad_norm > 0 and self.attachment.normalizer is not None:
            self._detach()
            raise ValueError(
                f"TrainingArguments(max_grad_norm={args.max_grad_norm:g}) clips what AttachExact normalises: "
                "write max_grad_norm=0.0, or AttachExact(loss, normalize_gradient=False)."
            )
        callbacks = _stateful(state)
        kept = callbacks[_KEY]["attributes"] if _KEY in callbacks else None
        go_on(self.attachment, kept, state.global_step)
        callbacks[_KEY] = _StateWhenWritten(self.attachment)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the hooks off: another training attaches anew."""
        self._detach()

    def _detach(self) -> None:
        if self.attachment is not None:
            self.attachment.detach()
