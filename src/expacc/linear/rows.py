r"""What a row of scores loses, and the slope in its scores: the expected error in float64, for the linear solver.

The same integral as :mod:`expacc.integrals.quadrature`, for another need: hundreds of evaluations of all rows, of which
most are settled. With m_i = min(s_y - s_i, r)/σ

    P = ∫ φ(z) Φ(z + r/σ)^k ∏_live Φ(z + m_i) dz,

k the competitors that have met the margin: they have no slope, and one factor for all of them. What changes P by less
than 1e-10 is left out: a row with an m below -9, a competitor with an m above 9.5. One live competitor and no margin in
sight is Φ(m/√2). An error needs no relative accuracy here, so the nodes may stand still: equally spaced over ±6.5.
"""

import math

import torch
from torch import Tensor

HOPELESS, SURE = -9.0, 9.5
REACH = 6.5
BLOCK = 1 << 17  # numbers at a time in the sums: they stay in the cache
_ROOT2 = math.sqrt(2.0)


def expected_errors(scores: Tensor, target: Tensor, sigma: float, margin: float, noise: str) -> tuple[Tensor, Tensor]:
    """Return 1 - P of every row and its slope in the scores.

    Args:
        scores: (rows, classes - 1), float64, of all classes but the first, whose score is 0.
        target: class indices (rows,).
        sigma: σ.
        margin: r; inf: none.
        noise: "gaussian" or "gumbel".

    Returns:
        Errors (rows,) and slopes (rows, classes - 1).
    """
    if scores.shape[1] == 1:
        sign = (2 * target - 1).to(scores.dtype)
        m = (scores[:, 0] * sign).clamp(max=margin) / sigma
        if noise == "gumbel":
            p = torch.sigmoid(m)
            slope = p * (1 - p)
            error = torch.sigmoid(-m)
        else:
            error = 0.5 * torch.erfc(m / 2)
            slope = torch.exp(m.square() / -4) / (2 * math.sqrt(math.pi))
        slope = torch.where(m < margin / sigma, slope * sign / -sigma, 0.0)
        return error, slope.unsqueeze(1)
    gap, own = _gaps(scores, target)
    m = gap.clamp(max=margin) / sigma
    if noise == "gumbel":
        logits = (-m).masked_fill(own, 0.0)
        parts = torch.softmax(logits, 1)  # of the competitors; the target's own is P
        slopes = parts * parts.gather(1, target.unsqueeze(1))
        error = parts.masked_fill(own, 0.0).sum(1)
    else:
        error, slopes = _gaussian(m, gap >= margin, own, margin / sigma)
    return error, _to_scores(slopes.masked_fill(own | (gap >= margin), 0.0) / sigma, target)


def log_losses(scores: Tensor, target: Tensor, sigma: float, margin: float) -> tuple[Tensor, Tensor]:
    """Return -log P of every row under Gumbel noise and its slope: convex in the scores, in closed form.

    Args:
        scores, target, sigma, margin: as in `expected_errors`.
    """
    gap, own = _gaps(scores, target)
    logits = (-gap.clamp(max=margin) / sigma).masked_fill(own, 0.0)
    slopes = torch.softmax(logits, 1).masked_fill(own | (gap >= margin), 0.0)
    return torch.logsumexp(logits, 1), _to_scores(slopes / sigma, target)


def _gaps(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return s_y - s_i of all classes (rows, classes), and where i is y."""
    full = torch.nn.functional.pad(scores, (1, 0))
    own = torch.zeros_like(full, dtype=torch.bool).scatter_(1, target.unsqueeze(1), True)
    return full.gather(1, target.unsqueeze(1)) - full, own


def _to_scores(slopes: Tensor, target: Tensor) -> Tensor:
    """Return the slope in the scores, from what each competitor's approach adds to the loss."""
    return slopes.scatter(1, target.unsqueeze(1), -slopes.sum(1, keepdim=True))[:, 1:]


def _gaussian(m: Tensor, met: Tensor, own: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """Return 1 - P and ∂P/∂m, 0 where it is left out; `reach` is r/σ."""
    classes = m.shape[1]
    met = met & ~own if reach < SURE else torch.zeros_like(met)
    live = ~(met | own) & (m < SURE)
    m = m.masked_fill(~live, torch.inf)
    count, met_count = live.sum(1), met.sum(1)
    hopeless = (m < HOPELESS).any(1)
    # Rows in which all is settled: one number for every count of met competitors.
    settled = _integrate(m.new_full((classes, 1), torch.inf), torch.arange(classes, device=m.device), reach, classes)[0]
    error = torch.where(hopeless, 1.0, settled[met_count])
    slopes = torch.zeros_like(m)
    least = 0
    for width in _widths(classes):
        rows = ((count > least) & (count <= width) & ~hopeless).nonzero().squeeze(1)
        least = width
        if len(rows) == 0:
            continue
        nearest, place = m[rows].topk(width, dim=1, largest=False, sorted=False)
        error[rows], found = _integrate(nearest, met_count[rows], reach, classes)
        slopes[rows] = slopes[rows].scatter_(1, place, found)
    return error, slopes


def _widths(classes: int) -> list[int]:
    """Return how many live competitors are integrated together: 1, 2, 4, …, all."""
    doubled = [1 << k for k in range(classes.bit_length()) if 1 << k < classes]
    return [*doubled, classes]


def _integrate(m: Tensor, met: Tensor, reach: float, classes: int) -> tuple[Tensor, Tensor]:
    """Return 1 - P and ∂P/∂m of live m (n, width) beside `met` competitors (n,) at r/σ; +inf is nobody."""
    if m.shape[1] == 1 and reach >= SURE:
        return 0.5 * torch.erfc(m[:, 0] / 2), torch.exp(m.square() / -4) / (2 * math.sqrt(math.pi))
    # The maximum of C normal variables is about 1/√(2 log C) wide: the trapezoidal rule is exact to 1e-8 at this step.
    step = 0.88 / math.sqrt(2.0 * math.log(classes + 2))
    half = math.ceil(REACH / step)
    z = torch.arange(-half, half + 1, dtype=m.dtype, device=m.device) * step
    weight = torch.exp(z.square() / -2) * (step / math.sqrt(2 * math.pi))
    log_met = torch.log(0.5 * torch.erfc((z + reach) / -_ROOT2)) if reach < SURE else torch.zeros_like(z)
    error, slopes = torch.empty_like(m[:, 0]), torch.empty_like(m)
    block = max(1, BLOCK // (len(z) * m.shape[1]))
    for begin in range(0, len(m), block):
        some = slice(begin, begin + block)
        a = m[some, None, :] + z[None, :, None]
        cdf = 0.5 * torch.erfc(a / -_ROOT2)
        hazard = torch.exp(a.square() / -2) / (math.sqrt(2 * math.pi) * cdf)
        integrand = cdf.prod(2) * weight * torch.exp(met[some, None] * log_met)
        error[some] = 1.0 - integrand.sum(1)
        slopes[some] = torch.einsum("nz,nzc->nc", integrand, hazard)
    return error, slopes
