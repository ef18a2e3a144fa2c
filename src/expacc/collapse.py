r"""CollapseWatch: say once, with numbers, that σ has become too small for the scores and nothing is learned any more.

Where every gap between scores is many σ, the loss is a step and its gradient 0. That alone is no fault: it is how a
training ends in which every sample is right, or has met the margin. It is one where samples are still wrong.
"""

import warnings
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expacc import _checks
from expacc._scores import normalize_scores
from expacc.functional import Normalize, exact_loss
from expacc.kernels.dispatch import needs_operator, under_transform
from expacc.losses import ExactLoss


class CollapseWatch:
    """Look at the loss's own batches now and then; warn once where σ has collapsed.

    A look costs one more evaluation of the loss. It is taken at the first training call after 0, 1, 2, 4, 8, …
    optimizer steps, and then some 50 times in a training. What it found is read when the device has it: the host does
    not wait. Two looks in a row have to find it, on 100 samples together.

    Args:
        loss: whose calls to look at; anything but an `ExactLoss` is left alone.
        total_steps: optimizer steps of the whole training.
    """

    LOOKS = 50
    DEAD = 1e-7  # largest |∂ℓ/∂m| of a sample that counts as none; it is about 0.3 where the decision is open
    SHARE = 0.99  # of the samples without a gradient
    UNSATISFIED = 0.05  # and of those that are wrong, or short of the margin
    SAMPLES = 100  # fewer cannot show what 99 % of them do

    def __init__(self, loss: Any, total_steps: int) -> None:
        self.step = 0
        self._every = max(1, total_steps // self.LOOKS)
        self._due, self._warned = True, False
        self._looks, self._samples = 0, 0  # in a row that found a collapse
        self._pending: _Look | None = None
        watched = isinstance(loss, ExactLoss)
        self._handle = loss.register_forward_hook(self, with_kwargs=True) if watched else None

    def detach(self) -> None:
        """Take the hook off the loss."""
        if self._handle is not None:
            self._handle.remove()

    def __reduce__(self) -> Any:
        """A copy of the loss, or one from a pickle, is another loss: nobody watches it."""
        return _Nobody, ()

    def __call__(self, loss: ExactLoss, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Look, as the loss's forward hook, if it is time to and this is a call that trains."""
        if torch.compiler.is_compiling() or not self._due or self._pending is not None or not _trains(loss, output):
            return
        self._due = False
        with suppress(Exception):  # a diagnosis must not end the training that it watches
            self._pending = _Look(_Copy(look(loss, *args, **kwargs)), self.step, loss.margin, loss.normalize)

    def after_step(self, step: int) -> None:
        """Note that the optimizer has made a step; report what there is to report."""
        self.step = step
        if self._warned:
            return
        self._due = self._due or step % self._every == 0 or (step < self._every and step.bit_count() == 1)
        if self._pending is not None and self._pending.found.is_here():
            seen, self._pending = self._pending, None
            self.judge(seen, _Found(*seen.found.read()))

    def judge(self, seen: "_Look", found: "_Found") -> None:
        """Count what a look found, and warn where it is the second in a row."""
        if not found.valid:
            return
        if found.dead < self.SHARE * found.valid or found.unsatisfied < self.UNSATISFIED * found.valid:
            self._looks, self._samples = 0, 0
            return
        self._looks, self._samples = self._looks + 1, self._samples + int(found.valid)
        if self._looks >= 2 and self._samples >= self.SAMPLES:
            self._warned = True
            # Past this class, the attachment's hook and torch's own wrapper, at the caller's optimizer.step().
            warnings.warn(_describe(seen, found), UserWarning, stacklevel=5)


class _Nobody:
    """What a copied loss has in the place of the watch."""

    def __call__(self, *args: Any) -> None:
        """Do nothing."""


class _Found(NamedTuple):
    valid: float  # samples that count
    dead: float  # of those, without a gradient
    unsatisfied: float  # of those, wrong or short of the margin
    sigma: float  # sum over those
    lead: float  # sum over those of |x_y - max x_i|


class _Copy:
    """Numbers on their way to the host, where a GPU must first compute them."""

    def __init__(self, values: Tensor) -> None:
        self._here, self._event = values, None
        if values.is_cuda:
            self._here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._here.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def is_here(self) -> bool:
        """Say whether reading would not wait; asking is refused while a graph is captured."""
        return self._event is None or (not torch.cuda.is_current_stream_capturing() and self._event.query())

    def read(self) -> list[float]:
        """Return the numbers."""
        return self._here.tolist()


class _Look(NamedTuple):
    found: _Copy
    step: int
    margin: float | None
    normalized: Normalize


def _trains(loss: ExactLoss, output: Any) -> bool:
    """Say whether a call is one that trains, seen by nobody who would take the look for a part of it."""
    if not (loss.training and torch.is_grad_enabled() and isinstance(output, Tensor) and output.requires_grad):
        return False
    if needs_operator(output) or under_transform():
        return False
    return not (output.is_cuda and torch.cuda.is_current_stream_capturing())


def look(loss: ExactLoss, logits: Tensor, target: Tensor, sigma: Tensor | None = None) -> Tensor:
    """Return the numbers of `_Found`, on the logits' device.

    The scores are normalised first and detached, so that a sample's gradient is its own and not, through the mean and
    the deviation, its neighbours'. By this process's statistics alone: with a `data_group` others need not look now.
    """
    sigma = loss.sigma if sigma is None else sigma.detach()
    sigma = sigma.flatten() if sigma.ndim else sigma
    x, target, valid = _rows(logits.detach(), target, loss.ignore_index)
    x = torch.where(valid.unsqueeze(-1), x, torch.zeros_like(x))
    if loss.normalize:
        x = normalize_scores(x, valid, cap=loss.normalize == "cap")
    lead = _leads(x, target)
    unsatisfied = valid & (lead < (0.0 if loss.margin is None else loss.margin))
    idle = valid & (_slopes(loss, x.float(), target, sigma) * sigma < CollapseWatch.DEAD)
    finite = torch.where(valid & torch.isfinite(lead), lead.abs(), torch.zeros_like(lead))
    return torch.stack([part.double().sum() for part in (valid, idle, unsatisfied, valid * sigma, finite)])


def _rows(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (N, C) in float64, target (N,), or (N, C) of probabilities, and which rows count."""
    if logits.ndim == 1:
        logits, target = logits.unsqueeze(0), target.unsqueeze(0)
    x = logits.movedim(1, -1).reshape(-1, _checks.class_count(logits)).double()
    if target.is_floating_point():
        target = target.movedim(1, -1).reshape(x.shape)
        return x, target.float(), target.sum(-1) > 0
    target = target.reshape(-1).long()
    return x, target, target != ignore_index


def _leads(x: Tensor, target: Tensor) -> Tensor:
    """Return x_y - max_{i≠y} x_i, y the target, or its likeliest class."""
    own = (target.argmax(-1) if target.is_floating_point() else target).clamp(0, x.shape[-1] - 1).unsqueeze(-1)
    mine = torch.arange(x.shape[-1], device=x.device) == own
    return x.gather(-1, own).squeeze(-1) - x.masked_fill(mine, -torch.inf).amax(-1)


def _slopes(loss: ExactLoss, x: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
    """Return every row's largest |∂ℓ/∂x_i|, of scores that are normalised already."""
    # Hooks of its own, because those of a checkpoint around the loss would count what is saved here.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        x = x.requires_grad_()
        value = exact_loss(
            x, target, sigma, margin=loss.margin, power=loss.power, noise=loss.noise, normalize=False,
            ignore_index=loss.ignore_index, label_smoothing=loss.label_smoothing, reduction="sum",
        )  # fmt: skip
        return torch.autograd.grad(value, x)[0].abs().amax(-1)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _describe(seen: _Look, found: _Found) -> str:
    sigma, lead = found.sigma / found.valid, found.lead / found.valid
    wrong = "are not classified correctly" if seen.margin is None else f"lead by less than the margin {seen.margin:g}"
    numbers = (
        f"after optimizer step {seen.step}, {found.dead / found.valid:.1%} of a batch's samples had no gradient (below "
        f"{CollapseWatch.DEAD:g}), while {found.unsatisfied / found.valid:.1%} {wrong}: nothing more is learned from "
        "here on. "
        f"A target is {lead / sigma:.3g} sigma from its best competitor on average. "
    )
    if seen.normalized:
        return (
            f"sigma = {sigma:g} has collapsed: {numbers}Let sigma end higher, attach(…, sigma=(first, last)) with a "
            f"last of the order of {lead:.2g}, or let it fall more slowly."
        )
    return (
        f"the scores have outgrown sigma = {sigma:g}: {numbers}They are not normalised: write "
        f"ExactLoss(normalize=True), or a smaller learning rate, or a sigma of the order of {lead:.2g}."
    )
