r"""The definition: log P(the target wins) of a row, by one-dimensional quadrature. Torch operations only.

With gaps m_i = (mu_y - mu_i)/sigma over the competitors i (a class that takes no part has m_i = +inf):

    P     = ∫ φ(z) F(z) dz,                    F(z) = ∏_i Φ(z + m_i)
    1 - P = ∫ Φ(z) F(z) Σ_i λ(z + m_i) dz      by parts: positive, so nothing is subtracted from 1
    ∂P/∂m_i = ∫ φ(z) F(z) λ(z + m_i) dz ≥ 0

**Supports.** Each integrand, the last two at the nearest competitor (smallest gap m*), has after a shift the form

    exp f(y),    f(y) = -κ·y²/2 + Σ_j log Φ(y + b_j),    f'' ≤ -κ,    f'(0) ≥ 0

    P:        y = z,         κ = 1,   b = m
    1 - P:    y = z + m*,    κ = 1,   b = m - m*,    with that of the nearest competitor (0) replaced by -m*
    ∂P/∂m:    y = z + m*/2,  κ = 2,   b = m - m*/2,  without the nearest competitor

λ falls, so the nearest competitor's integrand bounds the others' at every z: outside its support nobody counts.
f' is convex and decreasing: Newton for the mode climbs monotonically from y = 0; f is concave: Newton for an edge,
f = peak - drop, started outside at y* ± sqrt(2·drop/κ), stays outside. No safeguard is needed and the number of
steps is fixed, so nothing here depends on data but the arithmetic.

**Nodes** are equally spaced over the support: for entire integrands with Gaussian decay the trapezoid rule converges
like exp(-c/h²). Rejected: Gauss-Hermite at the mode with its curvature, superb on spread scores, wrong by 3e-4 where
the target stands above many classes and the integrand is a wide Gaussian cut off by a much narrower edge.

Arithmetic is float64 for every input; the input's dtype only decides how many nodes "auto" takes.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expacc.integrals.normal import LOG_SQRT_TWO_PI, hazard, log_cdf
from expacc.integrals.opaque import make_opaque

# Fewer steps only widen the support: a low mode lowers the level, and an edge comes from outside. The climb is longest
# for many equal scores, about log C steps, and the edges come down from f ~ -C·drop by a factor of 4 a step. Measured
# on 4 000 rows up to C = 100 000: 12 and 10 give the final support within 2 %; 8 and 6 make it 3 times as long.
_MODE_STEPS = 16
_EDGE_STEPS = 12
# Upper limit on the numbers in one (rows, nodes, classes) temporary; nodes are taken in blocks below it. On a CPU a
# block should stay in the cache (8M numbers cost 2.5 times as much each as 0.4M), a GPU wants few launches.
_CPU_BLOCK, _GPU_BLOCK = 1 << 18, 1 << 23


_FAR = 1e6  # gaps; beyond, a row's log P is that of a scaled row
_CERTAIN = 1e3


class Rule(NamedTuple):
    """How finely to integrate: the number of nodes and how far below the peak (in log) the support ends."""

    nodes: int
    drop: float


def auto_rule(classes: int, dtype: torch.dtype, nodes: int | str = "auto") -> Rule:
    """Return the rule that meets the accuracy contract for logits of this dtype; a number of nodes overrides it.

    The counts leave more than a factor of 10 to the contract. Largest error of ∇P, the hardest, over 4 000 rows:
    float64 8e-15 (64 nodes, C = 100), 3e-14 (80, 1000), 1e-12 (104, 100 000); float32 1e-8 (32, 100), 1e-7 (36, 1000),
    1e-7 (48, 100 000). Eight nodes fewer multiply it by about 50.

    >>> auto_rule(10, torch.float64)
    Rule(nodes=64, drop=32.0)
    """
    wide = dtype == torch.float64
    drop = 32.0 if wide else 17.0
    if nodes != "auto":
        return Rule(int(nodes), drop)
    small, medium, large = (64, 80, 104) if wide else (32, 36, 48)
    return Rule(small if classes <= 100 else medium if classes <= 1000 else large, drop)


class _Support(NamedTuple):
    low: Tensor
    high: Tensor


def _slope(y: Tensor, b: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
    """Return f'(y) and -f''(y) for y (..., K) and b (..., C)."""
    x = y.unsqueeze(-1) + b.unsqueeze(-2)
    rate = hazard(x)
    # The curvature only steers Newton, so the cancelling x + λ will do; at x = inf the product is 0·inf.
    bend = torch.where(torch.isinf(x), 0.0, rate * (x + rate)).clamp(0.0, 1.0)
    return rate.sum(-1) - kappa * y, bend.sum(-1) + kappa


def _height(y: Tensor, b: Tensor, kappa: float) -> Tensor:
    """Return f(y) for y (..., K) and b (..., C)."""
    return log_cdf(y.unsqueeze(-1) + b.unsqueeze(-2)).sum(-1) - 0.5 * kappa * y * y


def _support(b: Tensor, kappa: float, drop: float) -> _Support:
    """Return the interval of y (each (..., 1)) where f is within ``drop`` of its peak."""
    mode = torch.zeros_like(b[..., :1])
    for _ in range(_MODE_STEPS):
        slope, bend = _slope(mode, b, kappa)
        mode = mode + slope / bend
    level = _height(mode, b, kappa) - drop
    reach = math.sqrt(2.0 * drop / kappa)
    edge = torch.cat((mode - reach, mode + reach), -1)
    for _ in range(_EDGE_STEPS):
        edge = edge - (_height(edge, b, kappa) - level) / _slope(edge, b, kappa)[0]
    return _Support(edge[..., :1], edge[..., 1:])


def _nodes(support: _Support, count: int) -> tuple[Tensor, Tensor]:
    """Return equally spaced nodes (..., count) over the support and their step (..., 1)."""
    step = (support.high - support.low) / (count - 1)
    return support.low + step * torch.arange(count, dtype=step.dtype, device=step.device), step


def _blocks(z: Tensor, classes: int) -> tuple[Tensor, ...]:
    rows = max(1, z.numel() // z.shape[-1])
    block = _GPU_BLOCK if z.is_cuda else _CPU_BLOCK
    return z.split(max(1, block // (rows * classes)), -1)


def _nearest(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest gap (..., 1) and a mask of the one class that has it."""
    least, index = m.min(-1, keepdim=True)
    return least, torch.arange(m.shape[-1], device=m.device) == index


def _log_win(m: Tensor, rule: Rule) -> Tensor:
    """Return log P of rows of gaps (..., C), of which at least one is finite and none is -inf."""
    win = _support(m, 1.0, rule.drop)
    z, step = _nodes(win, rule.nodes)
    g = torch.cat([_height(part, m, 1.0) for part in _blocks(z, m.shape[-1])], -1)
    log_p = torch.logsumexp(g, -1) + (torch.log(step.squeeze(-1)) - LOG_SQRT_TWO_PI)

    least, mine = _nearest(m)
    lose = _support(torch.where(mine, -least, m - least), 1.0, rule.drop + math.log(m.shape[-1]))
    z, step = _nodes(lose, rule.nodes)
    z = z - least
    density = []
    for part in _blocks(z, m.shape[-1]):
        x = part.unsqueeze(-1) + m.unsqueeze(-2)
        density.append(torch.exp(log_cdf(part) + log_cdf(x).sum(-1)) * hazard(x).sum(-1))
    q = step.squeeze(-1) * torch.cat(density, -1).sum(-1)
    return torch.where(log_p > -math.log(2.0), torch.log1p(-q.clamp(max=0.5 + 1e-6)), log_p)


def _win_slope(m: Tensor, log_p: Tensor, rule: Rule) -> Tensor:
    """Return ∂ log P/∂m_i (..., C), differentiable in m and log_p; the nodes themselves are constants."""
    likely = log_p.unsqueeze(-1) > -math.log(2.0)
    with torch.no_grad():
        least, mine = _nearest(m)
        drop = rule.drop + math.log(m.shape[-1])
        slope = _support(torch.where(mine, math.inf, m - 0.5 * least), 2.0, drop)
        low, high = slope.low - 0.5 * least, slope.high - 0.5 * least
        # Hopeless rows divide by ∫ φF over the same nodes instead of by P: the rounding of log P, 1e-3 at -1e13, never
        # enters. The interval has to hold both supports for that; for confident rows they lie far apart, and there P
        # is near 1 and does as the divisor.
        win = _support(m, 1.0, rule.drop)
        low = torch.where(likely, low, torch.minimum(low, win.low))
        high = torch.where(likely, high, torch.maximum(high, win.high))
        z, step = _nodes(_Support(low, high), rule.nodes)
        blocks = _blocks(z, m.shape[-1])
    g = torch.cat([_height(part, m, 1.0) for part in blocks], -1)
    # Not exp(g - logsumexp g), which keeps the rounding of the log: 3e-5 at log P = -2e11.
    divisor = log_p.unsqueeze(-1) - torch.log(step) + LOG_SQRT_TWO_PI
    sure = torch.exp(torch.where(likely, g - divisor, torch.zeros_like(g)))
    weights = torch.where(likely, sure, torch.softmax(g, -1)).split([part.shape[-1] for part in blocks], -1)
    total = torch.zeros_like(m)
    for part, weight in zip(blocks, weights, strict=True):
        # Not a matrix product: BLAS sums in an order that depends on where the memory lies, so the bits would vary.
        total = total + (weight.unsqueeze(-1) * hazard(part.unsqueeze(-1) + m.unsqueeze(-2))).sum(-2)
    return total


class _LogWin(torch.autograd.Function):
    """log P with the gradient's own quadrature as its derivative; differentiable any number of times, both ways."""

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor, nodes: int, drop: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _log_win(m, Rule(nodes, drop))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        m, ctx.nodes, ctx.drop = inputs
        ctx.save_for_backward(m, output)
        ctx.save_for_forward(m, output)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        m, log_p = ctx.saved_tensors
        return upstream.unsqueeze(-1) * _win_slope(m, log_p, Rule(ctx.nodes, ctx.drop)), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        m, log_p = ctx.saved_tensors
        return (tangent * _win_slope(m, log_p, Rule(ctx.nodes, ctx.drop))).sum(-1)


_compiled_log_win = make_opaque("log_win_probability", _LogWin.apply, keeps_classes=False)


def log_win_probability(m: Tensor, rule: Rule) -> Tensor:
    r"""Return log P = log ∫ φ(z) ∏_i Φ(z + m_i) dz, to full relative accuracy at both ends.

    Limits: one competitor gives log Φ(m/√2); n equal gaps of 0 give -log(n + 1); no competitor gives 0.

    Args:
        m: gaps, (..., C), float64. +inf: the class takes no part; any -inf: P = 0 with gradient 0; NaN: NaN.
        rule: nodes and support.

    Returns:
        (...), float64, ≤ 0; differentiable any number of times, in forward and reverse mode.

    >>> m = torch.tensor([[math.inf, 1.0], [math.inf, -60.0]], dtype=torch.float64)
    >>> [f"{value:.9f}" for value in log_win_probability(m, Rule(96, 36.0)).tolist()]
    ['-0.274108033', '-904.667264291']
    """
    lost = torch.isneginf(m).any(-1)
    won = torch.isposinf(m).all(-1)
    # Rows decided beforehand are integrated with harmless gaps, so that no NaN reaches them through where's gradient.
    safe = torch.where((lost | won).unsqueeze(-1), torch.zeros_like(m), m)
    # log P(m) → s²·log P(m/s) for hopeless rows: beyond a gap of -1e6 that is right to 1e-10, and the heights of
    # neighbouring nodes, numbers of m²/4, would differ by less than their rounding. Winning gaps beyond it are certain.
    scale = (-safe.detach().amin(-1, keepdim=True) / _FAR).clamp(min=1.0)
    near = safe / scale
    near = torch.where(near > 10.0 * _FAR, torch.inf, near)
    near = torch.where(torch.isposinf(near).all(-1, keepdim=True), torch.full_like(near, _CERTAIN), near)
    door = _compiled_log_win if torch.compiler.is_compiling() else _LogWin.apply
    log_p: Tensor = door(near, rule.nodes, rule.drop) * scale.squeeze(-1).square()
    return torch.where(lost, -math.inf, torch.where(won, 0.0, log_p))
