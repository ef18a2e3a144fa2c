r"""GradientNormalizer: divide the gradient by the running mean of its own norm, just before the optimizer uses it.

The gradient of the expected error grows like 1/σ while σ falls, by a factor of ten to a thousand over a schedule. The
paper divides it by a running mean, exponentially smoothed with 0.9. With n_k the global norm at step k,

    μ_1 = n_1,    μ_k = 0.9·μ_{k-1} + 0.1·n_k,    g ← g/max(μ_k, floor).

A gradient that is exactly 0 says nothing of the scale of the others: it leaves μ as it is. It is not a clip: the
direction stays, and so does a step that is larger or smaller than its neighbours.
"""

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from expacc import _checks

_AT_WORK: "WeakSet[GradientNormalizer]" = WeakSet()


def real_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose step moves the weights: of SAM and its kin, and of accelerate's, the one inside.

    SAM goes up, calls a closure for a second gradient, comes back, and lets the inner one step; accelerate skips the
    inner one's step while gradients accumulate, or where they overflow.
    """
    for name in ("base_optimizer", "optimizer"):
        if isinstance(inner := getattr(optimizer, name, None), Optimizer):
            return real_optimizer(inner)
    return optimizer


def check_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the real optimizer; raise where it, or what wraps it, is none."""
    _checks.check_optimizer(optimizer)
    inner = real_optimizer(optimizer)
    _checks.check_optimizer(inner)
    return inner


def check_normalizable(optimizer: Optimizer) -> None:
    """Raise where a real optimizer's gradients cannot be normalised, or are already."""
    _checks.check_normalizable(optimizer)
    if any(each.optimizer is optimizer for each in _AT_WORK):
        _checks.refuse_second_normalizer(optimizer)


class GradientNormalizer:
    """Divide an optimizer's gradients by the running mean of their norm, in its own step.

    It hooks into ``optimizer.step``, so the loop keeps its lines. The norm is that of all gradients of all parameter
    groups together; under DDP every rank computes the same one, under FSDP2 it is that of all shards. The host waits
    for nothing. A step whose gradient holds an inf or a NaN passes unchanged and leaves no trace in the mean; nor does
    one whose gradient is exactly 0, where nothing was to be learned. The norm is taken in float32 (float64 if a
    parameter is): above 1e19 its square overflows and counts as an inf, below 1e-23 it underflows and counts as a 0.

    Under a GradScaler the mean is that of unscaled gradients: ``scaler.step`` unscales before the hook runs, and an
    optimizer with ``fused=True``, which is handed scaled ones, says by how much.

    Args:
        optimizer: whose gradients. Of a SAM-like optimizer, the one inside is meant.
        smoothing: weight of the past, in [0, 1).
        floor: smallest divisor.

    Raises:
        TypeError: not a torch optimizer, or one that asks for gradients within its step (LBFGS).
        ValueError: the optimizer has no parameters, clips gradients itself, holds FSDP1's, or has a normaliser
            already; a number out of its range.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> normalizer = GradientNormalizer(optimizer)
    >>> weight.grad = torch.tensor([30.0, 40.0])
    >>> optimizer.step()
    >>> weight.data, normalizer.mean
    (tensor([-0.6000, -0.8000]), 50.0)
    """

    def __init__(self, optimizer: Optimizer, smoothing: float = 0.9, floor: float = 1e-12) -> None:
        inner = check_optimizer(optimizer)
        _checks.check_fraction("smoothing", smoothing, "0.9")
        _checks.check_number("floor", floor, "1e-12", positive=True)
        check_normalizable(inner)
        self.optimizer = inner
        self.smoothing, self.floor = float(smoothing), float(floor)
        self._mean: Tensor | float | None = None  # a float between loading and the next step
        self._handle = self.optimizer.register_step_pre_hook(self._before_step)
        _AT_WORK.add(self)

    @property
    def mean(self) -> float | None:
        """The running mean of the norm; None before the first finite step. Reading it waits for the device."""
        mean = None if self._mean is None else float(self._mean)
        return mean if mean == mean else None

    def detach(self) -> None:
        """Take the hook off the optimizer."""
        self._handle.remove()
        _AT_WORK.discard(self)

    def state_dict(self) -> dict[str, float | None]:
        """Return the state in plain numbers. On a GPU this waits for the device."""
        return {"mean": self.mean, "smoothing": self.smoothing, "floor": self.floor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state.

        Raises:
            KeyError: a key is missing or unknown.
        """
        _checks.check_keys(type(self).__name__, state_dict, self.state_dict())
        self._mean, self.smoothing, self.floor = (state_dict[key] for key in ("mean", "smoothing", "floor"))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Normalise what is there; with a closure, as Lightning's, what will be there when it has run."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._normalize(optimizer)
            return None

        def wrapped() -> Any:
            value = closure()
            self._normalize(optimizer)
            return value

        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, kwargs | {"closure": wrapped}

    @torch.no_grad()
    def _normalize(self, optimizer: Optimizer) -> None:
        grads = _collect(optimizer)
        if not grads:
            return
        norm = _total_norm(grads)
        scale = getattr(optimizer, "grad_scale", None)  # what a fused optimizer's gradients are still multiplied by
        if scale is not None:
            norm = norm / scale.to(norm.device)
        counts = torch.isfinite(norm) & (norm > 0)
        # NaN stands for "no step yet": whether there was one must not be asked of the device.
        old = self._mean
        if not isinstance(old, Tensor):
            old = torch.full_like(norm, torch.nan if old is None else old)
        new = torch.where(torch.isnan(old), norm, self.smoothing * old + (1.0 - self.smoothing) * norm)
        self._mean = torch.where(counts, new, old)
        factor = torch.where(counts, 1.0 / new.clamp(min=self.floor), 1.0)
        for part in _alike([_local(grad) for grad in grads]):
            _multiply(part, factor)


def _collect(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients there are. Of a sparse one repeated indices are summed first: its numbers are its norm's."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse and not parameter.grad.is_coalesced():
                parameter.grad = parameter.grad.coalesce()
            found.append(parameter.grad)
    return found


def _local(grad: Tensor) -> Tensor:
    """Return the dense numbers that lie here: the local shard of a DTensor, the values of a sparse gradient; a view."""
    to_local = getattr(grad, "to_local", None)
    grad = grad if to_local is None else to_local()
    return grad._values() if grad.is_sparse else grad


def _total_norm(grads: list[Tensor]) -> Tensor:
    """Return the norm of all gradients together, 0-dim, in float32 at least: float16 would overflow at 65504."""
    sharded = [grad for grad in grads if hasattr(grad, "full_tensor")]
    norms = []
    if sharded:
        whole: Any = get_total_norm(sharded)  # a DTensor: partial sums over the ranks
        norms.append(whole.full_tensor().reshape(1))
    for part in _alike([_local(grad) for grad in grads if not hasattr(grad, "full_tensor")]):
        dtype = torch.promote_types(part[0].dtype, torch.float32)
        each = torch._foreach_norm(part, 2.0, dtype)  # pyright: ignore[reportPrivateImportUsage]
        norms.append(torch.stack(each))
    wide = torch.float32
    for norm in norms:
        wide = torch.promote_types(wide, norm.dtype)
    return torch.linalg.vector_norm(torch.cat([norm.to(norms[0].device, wide) for norm in norms]))


def _multiply(part: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device and dtype by a 0-dim tensor, in place."""
    times = 1
    if part[0].dtype == torch.float16:  # 1e-7 has few digits left there, its root all of them
        factor, times = factor.sqrt(), 2
    for _ in range(times):
        torch._foreach_mul_(part, factor.to(part[0]))  # pyright: ignore[reportPrivateImportUsage]: as torch.optim


def _alike(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups of one device and dtype, as foreach operations take them."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
