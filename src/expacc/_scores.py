"""From logits to the gaps that the integrals take, and from log P to the loss: the reference's steps, in float64."""

from typing import Any

import torch
from torch import Tensor

NORMALIZE_EPS = (
    1e-5  # inside the root, as in torch's BatchNorm: tiny logits are not blown up, constant ones stay finite
)
_SERIES = 1e-3  # below it 1 + x/2 + x²/6 + x³/24 + x⁴/120 is exact to 1e-18
_FAR = -0.5  # below it exp(x) - 1 is as exact as expm1(x)


def normalize_scores(x: Tensor, valid: Tensor, group: Any = None, cap: bool = False) -> Tensor:
    r"""Return (x - mean)/√(var + 1e-5), with one mean and one variance over batch and classes.

    The paper's batch normalisation inside the loss (its listing: ``mu.mean()``, ``mu.std()``, the unbiased one).
    Entries that are not finite and rows that are not valid take no part and pass unchanged; a row with a NaN gets
    the others' statistics, but none of its gradient reaches them.

    Args:
        x: scores (..., C), float64.
        valid: rows that count, (...).
        group: process group whose ranks share the statistics; None: this batch alone.
        cap: divide only by what exceeds 1: a small spread is not enlarged, and has no gradient.
    """
    poisoned = torch.isnan(x).any(-1, keepdim=True)
    keep = torch.isfinite(x) & valid.unsqueeze(-1) & ~poisoned
    safe = torch.where(keep, x, torch.zeros_like(x))
    count, total = keep.sum().to(x.dtype), safe.sum()
    if group is not None:
        count, total = all_reduce(count, group), all_reduce(total, group)
    mean = total / count.clamp(min=1.0)
    square = torch.where(keep, safe - mean, torch.zeros_like(x)).square().sum()
    if group is not None:
        square = all_reduce(square, group)
    std = torch.sqrt(square / (count - 1.0).clamp(min=1.0) + NORMALIZE_EPS)
    if cap:
        std = torch.where(std > 1.0, std, torch.ones_like(std))
    apart = (x - mean.detach()) / std.detach()
    # A row with two scores of +inf may come out NaN: its finite entries count, but none of its gradient flows back.
    keep = keep & (torch.isposinf(x).sum(-1, keepdim=True) < 2)
    return torch.where(keep, (safe - mean) / std, torch.where(torch.isfinite(x), apart, x))


def all_reduce(value: Tensor, group: Any) -> Tensor:
    """Return the sum over the ranks, whose gradient is the sum over the ranks' gradients."""
    # torch.distributed may be missing from a build; nothing else here needs it.
    from torch.distributed.nn.functional import all_reduce as differentiable_all_reduce

    return differentiable_all_reduce(value, group=group)


def gaps(x: Tensor, target: Tensor, sigma: Tensor | float, margin: float | None) -> Tensor:
    r"""Return m_i = min(x_y - x_i, r)/σ, (..., C), in the form that the integrals take: +inf where nobody competes.

    A competitor of -inf takes no part, whatever the margin; a target of -inf loses (m = -inf) to finite competitors;
    a row of -inf alone counts as equal scores with gradient 0; a NaN stays in its row.

    Args:
        x: scores (..., C), float64.
        target: class indices (...), all in range.
        sigma: number, 0-dim tensor or one per row, (...).
        margin: r, or None.
    """
    x = torch.where(torch.isneginf(x).all(-1, keepdim=True), torch.zeros_like(x), x)
    # A row with a NaN is NaN all through, also where a mask or the margin would cut its gradient off.
    x = torch.where(torch.isnan(x).any(-1, keepdim=True), x + torch.nan, x)
    own = x.gather(-1, target.unsqueeze(-1))
    gap = own - x
    # Infinite gaps bypass the arithmetic: their gradient in sigma would be inf·0. A NaN goes through: sigma's is NaN.
    finite = ~torch.isinf(gap)
    m = torch.where(finite, gap, torch.zeros_like(gap))
    if margin is not None:
        # Not clamp, whose gradient at gap = r is 1: a competitor that has met the margin has none, on every path.
        m = torch.where(m >= margin, torch.full_like(m, margin), m)
    m = m / (sigma.unsqueeze(-1) if isinstance(sigma, Tensor) and sigma.ndim else sigma)
    m = torch.where(finite, m, gap)
    mine = torch.arange(x.shape[-1], device=x.device) == target.unsqueeze(-1)
    m = torch.where(torch.isneginf(x) | mine, torch.inf, m)
    return torch.where(mine & torch.isnan(own), own, m)


def power_loss(log_p: Tensor, power: Tensor | float) -> Tensor:
    r"""Return (1 - P^q)/q = -log P · e(q log P), e(x) = (exp(x) - 1)/x, e(0) = 1.

    Smooth in q, also through 0, where it is -log P; no branch on q is taken in Python. P = 0 gives 1/q for q > 0 and
    inf otherwise.

    >>> p = torch.tensor([0.25], dtype=torch.float64).log()
    >>> [round(power_loss(p, q).item(), 9) for q in (1, 1e-300, 0, -1)]
    [0.75, 1.386294361, 1.386294361, 3.0]
    """
    # A sum, not a move: a 0-dim q on the CPU would make the host wait for the device.
    power = torch.zeros_like(log_p) + power
    lost = torch.isneginf(log_p)
    finite = torch.where(lost, torch.zeros_like(log_p), log_p)
    x = power * finite
    small = x.abs() < _SERIES
    series = 1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * (1.0 + x / 5)))
    # ∂ℓ/∂log P = -P^q to full relative accuracy. torch differentiates expm1 as its result + 1, which rounds a P^q of
    # 1e-20 to 0, and exp as itself; so exp where nothing cancels in the value, expm1 between.
    far = x < _FAR
    inner = torch.expm1(torch.where(small | far, torch.ones_like(x), x))
    outer = torch.exp(torch.where(far, x, torch.zeros_like(x))) - 1.0
    divisor = torch.where(small, torch.ones_like(power), power)
    loss = torch.where(small, (0.0 - finite) * series, (0.0 - torch.where(far, outer, inner)) / divisor)
    positive = power > 0
    # Divided where it is wanted only: at q = 1e-300 the gradient of 1/q would be 0·inf elsewhere.
    ceiling = torch.where(positive, 1.0 / torch.where(positive & lost, power, torch.ones_like(power)), torch.inf)
    return torch.where(lost, ceiling, loss)
