"""The loss once more, row by row in plain float64: what the tests of the conventions compare with.

Independent of the package: a dense trapezoid over fixed nodes with torch's own functions and autograd, conventions
spelled out for one row at a time. Good for moderate scores (gaps within about 12σ), which is all those tests use.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from expacc import exact_loss
from expacc.kernels.dispatch import watch_paths

BACKENDS = ("reference", "cpu")
NOISES = ("gaussian", "gumbel")
_Z = torch.linspace(-14.0, 14.0, 561, dtype=torch.float64)

# What a value, and a gradient entry, may differ by: the contract of the dtype with room for the sum over a batch.
TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 3e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-6},
    torch.float16: {"rtol": 1e-3, "atol": 1e-6},
}


def draw(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 2.0, seed: int = 0) -> Tensor:
    """Return logits from an explicit seed."""
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (scale * values).to(dtype)


def draw_target(*shape: int, classes: int, seed: int = 1) -> Tensor:
    """Return class indices from an explicit seed."""
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def home(backend: str, dtype: torch.dtype, *, soft: bool = False) -> tuple[str, str]:
    """Return (backend to ask for, path that must run): what the kernel does not take, "auto" sends to the reference."""
    if backend == "cpu" and (soft or dtype == torch.float64):
        return "auto", "reference"
    return backend, backend


def run(path: str, *args: Any, **options: Any) -> Tensor:
    """Return exact_loss(...), asserting that exactly this path ran."""
    with watch_paths() as paths:
        value = exact_loss(*args, **options)
    assert paths == [path]
    return value


def log_win(row: Tensor, k: int, sigma: Tensor, margin: float | None, noise: str) -> Tensor:
    """Return log P of class k in one row (C)."""
    others = [i for i in range(len(row)) if i != k and row[i] != -math.inf]
    if not others:
        return (row[k] - row[k]) if torch.isfinite(row[k]) else torch.zeros((), dtype=torch.float64)
    gap = row[k] - row[others]
    m = (gap if margin is None else gap.clamp(max=margin)) / sigma
    if noise == "gumbel":
        return -torch.logsumexp(torch.cat((torch.zeros(1, dtype=m.dtype), -m)), 0)
    log_density = -0.5 * _Z * _Z + torch.special.log_ndtr(_Z[:, None] + m).sum(-1)
    return torch.logsumexp(log_density, 0) + math.log(float(_Z[1] - _Z[0]) / math.sqrt(2.0 * math.pi))


def power_loss(log_p: Tensor, power: float) -> Tensor:
    """Return (1 - P^q)/q."""
    return -log_p if power == 0 else -torch.expm1(power * log_p) / power


def plain_loss(
    logits: Tensor,
    target: Tensor,
    sigma: Tensor | float = 1.0,
    *,
    margin: float | None = None,
    power: float = 0.3,
    noise: str = "gaussian",
    normalize: bool | str = True,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "none",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return exact_loss of the same arguments, evaluated in float64 one row at a time."""
    soft = target.is_floating_point()
    shape = logits.shape[:1] + logits.shape[2:] if logits.ndim > 1 else logits.shape[:0]
    classes = logits.shape[1] if logits.ndim > 1 else logits.shape[0]
    rows = (logits.movedim(1, -1) if logits.ndim > 1 else logits).reshape(-1, classes).double()
    wanted = (target.movedim(1, -1) if soft and logits.ndim > 1 else target).reshape(-1, *([classes] if soft else []))
    sigmas = torch.as_tensor(sigma, dtype=torch.float64).expand(shape).reshape(-1)
    weights = torch.ones(classes, dtype=torch.float64) if weight is None else weight.double()
    counted = [n for n in range(len(rows)) if soft or int(wanted[n]) != ignore_index]
    if normalize:
        rows = _normalized(rows, counted, cap=normalize == "cap")
    losses, scales = [], []
    for n in range(len(rows)):
        loss, scale = rows[n].new_zeros(()), rows[n].new_zeros(())
        if n in counted:
            t = wanted[n].double() if soft else torch.nn.functional.one_hot(wanted[n].long(), classes).double()
            t = (1.0 - label_smoothing) * t + label_smoothing / classes
            parts = [
                weights[k] * t[k] * power_loss(log_win(rows[n], k, sigmas[n], margin, noise), power)
                for k in range(classes)
                if t[k] != 0
            ]
            loss = torch.stack(parts).sum() if parts else loss
            scale = torch.ones_like(loss) if soft else weights[int(wanted[n])]
        losses.append(loss)
        scales.append(scale)
    loss = torch.stack(losses).reshape(shape)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / torch.stack(scales).sum()


def _normalized(rows: Tensor, counted: list[int], cap: bool) -> Tensor:
    values = torch.cat([rows[n][torch.isfinite(rows[n])] for n in counted if not torch.isnan(rows[n]).any()])
    deviation = torch.sqrt(values.var() + 1e-5)
    return rows if cap and deviation <= 1 else (rows - values.mean()) / deviation


def value_and_grad(function: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return function(logits) and the gradient of its sum, or of its scalar."""
    leaf = logits.detach().clone().requires_grad_()
    value = function(leaf)
    # Unequal upstream gradients show a row that got another row's; eighths are exact in every dtype.
    upstream = (0.5 + torch.arange(value.numel()) % 8 / 8).reshape(value.shape).to(value.dtype)
    value.backward(upstream)
    assert leaf.grad is not None
    return value.detach(), leaf.grad
