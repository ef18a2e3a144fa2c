"""Where a training that goes on finds σ: one rule for every trainer."""

import warnings
from typing import Any

from expacc.attachment import Attachment


def go_on(attachment: Attachment, kept: dict[str, Any] | None, made: int) -> None:
    """Take the state that was kept; where there is none, take the place that the steps made so far say, and warn.

    Left at its first step, the schedule would not reach its end: the trainer makes only the steps that are left.

    Args:
        attachment: fresh, for the steps of the whole training.
        kept: an attachment's state, or None.
        made: the trainer's count of optimizer steps so far.
    """
    if kept is not None:
        attachment.load_state_dict(kept)
    elif made > 0:
        for each in attachment.schedules.values():
            each.load_state_dict(each.state_dict() | {"last_epoch": made})
        attachment.load_state_dict(attachment.state_dict() | {"steps": made})
        warnings.warn(
            f"this training goes on after step {made} of {attachment.total_steps} without a state of AttachExact: "
            f"{_describe(attachment)}. For a schedule from its start, begin a new training with these weights.",
            UserWarning,
            stacklevel=3,
        )


def _describe(attachment: Attachment) -> str:
    parts = [
        f"{name} goes on at {each.value_at(each.last_epoch):g} ({each.start:g} → {each.end:g})"
        for name, each in attachment.schedules.items()
    ]
    if attachment.normalizer is not None:
        parts.append("the normaliser's mean begins anew")
    return ", ".join(parts)
