r"""The win probability of every class of a row at once, from shared nodes, linear in the number of classes.

With u_j = mu_j/sigma, m_j = max u - u_j ≥ 0 and log F(z) = Σ_j log Φ(z + m_j) over all classes,

    P_k = ∫ λ(z + m_k) F(z) dz,        Σ_k P_k = ∫ F' dz = 1.

λ falls, so the best class's integrand bounds every other's: over its support (quadrature.py) all P_k are right
absolutely, at the cost of one row. That is `win_probabilities`.

Relatively they are not: the integrand of a class far below the best lies further left, narrower, and P_k = 1e-38 came
out wrong by 2e-3. `log_win_probabilities` puts classes of similar score into buckets and gives each bucket nodes of
its own over the union of its classes' supports; log F at those nodes is shared by the bucket.

Memory: nodes times classes for the rows of a chunk at a time, and nothing but the scores between forward and backward,
which computes each chunk again. With label smoothing, 256 × 1000, that is a quarter of what autograd would keep, and no
slower.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad

from expacc.integrals.normal import LOG_SQRT_TWO_PI, hazard, log_cdf
from expacc.integrals.opaque import make_opaque
from expacc.integrals.quadrature import Rule, _nodes, _support, log_win_probability

# Numbers in one (rows, nodes, classes) temporary from which a batch is cut into chunks of rows.
_CPU_CHUNK, _GPU_CHUNK = 1 << 20, 1 << 24
# Width of a bucket in units of sigma: it lengthens the union of supports, about 17 long, by half of this.
_BUCKET = 8.0


def _below_top(u: Tensor) -> tuple[Tensor, Tensor]:
    """Return m = max u - u, (..., C), and a mask of the one best class; -inf (masked) gives m = +inf.

    A row of -inf alone counts as equal scores, with gradient 0.
    """
    u = torch.where(torch.isneginf(u).all(-1, keepdim=True), torch.zeros_like(u), u)
    top, index = u.detach().max(-1, keepdim=True)
    mine = torch.arange(u.shape[-1], device=u.device) == index
    # The best class's own score is the frame: its gradient enters here, and m of the best is 0 by construction.
    best = torch.where(mine, u, torch.zeros_like(u)).sum(-1, keepdim=True)
    out = torch.isneginf(u)
    m = best - torch.where(out, best, u)
    # +inf is above everything: inf - inf would be NaN where the row has one such class only.
    m = torch.where(torch.isposinf(top) & ~torch.isposinf(u), torch.inf, torch.where(mine & ~torch.isnan(m), 0.0, m))
    return torch.where(out, torch.inf, m), mine


def win_probabilities(u: Tensor, rule: Rule) -> Tensor:
    r"""Return P_k of every class from the nodes of the best one.

    Limits: equal scores give 1/C; a common shift changes nothing; far apart, one 1 and zeros.

    Args:
        u: scores in units of sigma, (..., C), float64. -inf: the class takes no part, P = 0.
        rule: nodes and support.

    Returns:
        (..., C), float64; absolute error about 1e-12, relative 1e-9 above 1e-6; differentiable.

    >>> p = win_probabilities(torch.zeros(1, 4, dtype=torch.float64), Rule(96, 36.0))
    >>> [f"{value:.12f}" for value in p[0].tolist()]
    ['0.250000000000', '0.250000000000', '0.250000000000', '0.250000000000']
    """
    if torch.compiler.is_compiling():
        return _compiled_win(u, *rule)
    return _by_rows(_win_probabilities, u, rule)


def _win_probabilities(u: Tensor, rule: Rule) -> Tensor:
    m, mine = _below_top(u)
    with torch.no_grad():
        others = torch.where(mine, torch.inf, m)
        # A row without competitors would have no support: any finite gap gives it one, and P = 1 either way.
        alone = torch.isinf(others).all(-1, keepdim=True)
        z, step = _nodes(_support(torch.where(alone, torch.zeros_like(m), others), 1.0, rule.drop), rule.nodes)
    x = z.unsqueeze(-1) + m.unsqueeze(-2)
    weights = torch.exp(log_cdf(x).sum(-1)) * step
    # A lone class's density λ(z)Φ(z) = φ(z), over the support of something narrower, would miss mass: it is certain.
    return torch.where(
        alone, mine.to(m.dtype) + 0.0 * m.nan_to_num(0.0, 0.0), (weights.unsqueeze(-1) * hazard(x)).sum(-2)
    )


def log_win_probabilities(u: Tensor, rule: Rule) -> Tensor:
    r"""Return log P_k of every class, each to full relative accuracy.

    Cost: O(C·nodes) for every bucket of width 8σ that holds a class; the number of buckets is read from the data.
    Where it cannot be read (under vmap or forward mode) every class is a bucket, O(C²·nodes).

    Args:
        u: scores in units of sigma, (..., C), float64. -inf: the class takes no part, log P = -inf with gradient 0.
        rule: nodes and support.

    Returns:
        (..., C), float64, ≤ 0; differentiable.

    >>> u = torch.tensor([[0.0, 0.0, -30.0]], dtype=torch.float64)
    >>> [f"{value:.6f}" for value in log_win_probabilities(u, Rule(96, 36.0))[0].tolist()]
    ['-0.693147', '-0.693147', '-307.002208']
    """
    if torch.compiler.is_compiling():
        return _compiled_log_win(u, *rule)
    return _by_rows(_log_win_probabilities, u, rule)


def _log_win_probabilities(u: Tensor, rule: Rule) -> Tensor:
    m, mine = _below_top(u)
    classes = m.shape[-1]
    takes_part = ~torch.isinf(m)
    best = log_win_probability(torch.where(mine, torch.inf, m), rule)
    with torch.no_grad():
        safe = torch.where(takes_part, m, 0.0)
        bucket = torch.div(safe, _BUCKET, rounding_mode="floor")
        identity = torch.arange(classes, dtype=m.dtype, device=m.device).expand_as(bucket)
        # torch.unique has no forward mode, and no_grad does not end it.
        if _transformed():
            bucket, labels = identity, range(classes)
        else:
            labels = torch.unique(bucket[takes_part & ~mine & ~torch.isnan(bucket)]).tolist()
            if len(labels) >= classes:
                bucket, labels = identity, range(classes)
    result = torch.where(mine, best.unsqueeze(-1), torch.where(torch.isnan(m), m, -torch.inf))
    wider = Rule(rule.nodes + rule.nodes // 4, rule.drop)
    for label in labels:
        here = (bucket == label) & takes_part & ~mine
        result = torch.where(here, _bucket_log_probability(m, here, wider), result)
    return result


def _bucket_log_probability(m: Tensor, here: Tensor, rule: Rule) -> Tensor:
    """Return log P_k (..., C) of the classes `here`; what it returns for the others has no meaning."""
    with torch.no_grad():
        low = torch.where(here, m, torch.inf).amin(-1, keepdim=True)
        high = torch.where(here, m, -torch.inf).amax(-1, keepdim=True)
        empty = torch.isinf(low)
        low, high = torch.where(empty, 0.0, low), torch.where(empty, 0.0, high)
        left, right = (_class_support(m, gap, rule.drop) for gap in (high, low))
        z, step = _nodes(left._replace(high=torch.maximum(left.high, right.high)), rule.nodes)
    # Classes outside the bucket get a harmless gap, so that no inf or NaN reaches the others through the gradient.
    x = z.unsqueeze(-1) + m.unsqueeze(-2)
    every = log_cdf(x)
    own = z.unsqueeze(-1) + torch.where(here, m, torch.zeros_like(m)).unsqueeze(-2)
    minus = torch.where(here.unsqueeze(-2), every, torch.zeros_like(every))
    log_integrand = -0.5 * own * own + (every.sum(-1, keepdim=True) - minus)
    return torch.logsumexp(log_integrand, -2) + (torch.log(step) - LOG_SQRT_TWO_PI)


def _class_support(m: Tensor, gap: Tensor, drop: float):
    """Return the support, in the best class's frame, of the integrand of a class at this gap (..., 1) below it."""
    mine = torch.arange(m.shape[-1], device=m.device) == (m - gap).abs().argmin(-1, keepdim=True)
    support = _support(torch.where(mine, torch.inf, m - gap), 1.0, drop)
    return support._replace(low=support.low - gap, high=support.high - gap)


def _transformed() -> bool:
    """Say whether a functorch transform or forward-mode AD is active: neither has a public accessor."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


class _ByRows(torch.autograd.Function):
    """A function of rows that do not touch each other, evaluated and differentiated some rows at a time."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, u: Tensor, function: Callable[[Tensor, Rule], Tensor], rule: Rule, rows: int
    ) -> Tensor:
        ctx.save_for_backward(u)
        ctx.function, ctx.rule, ctx.rows = function, rule, rows
        return torch.cat([function(part, rule) for part in u.split(rows)])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (u,) = ctx.saved_tensors
        again = torch.is_grad_enabled()  # somebody wants second derivatives: one graph of all rows
        whole = again or is_batchedtensor(upstream) or is_legacy_batchedtensor(upstream)
        grads = []
        for part, above in ((u, upstream),) if whole else zip(u.split(ctx.rows), upstream.split(ctx.rows), strict=True):
            with torch.enable_grad():
                part = part if again else part.detach().requires_grad_()
                value = ctx.function(part, ctx.rule)
            grads += torch.autograd.grad(value, part, above, create_graph=again)
        return torch.cat(grads), None, None, None


def _by_rows(function: Callable[[Tensor, Rule], Tensor], u: Tensor, rule: Rule) -> Tensor:
    """Return function(u, rule), in chunks of rows where it would fill the memory."""
    flat = u.reshape(-1, u.shape[-1])
    rows = max(1, (_GPU_CHUNK if u.is_cuda else _CPU_CHUNK) // (rule.nodes * u.shape[-1]))
    if len(flat) <= rows or _transformed():
        return function(u, rule)
    result: Tensor = _ByRows.apply(flat, function, rule, rows)  # pyright: ignore[reportAssignmentType]
    return result.view(u.shape)


_compiled_win = make_opaque(
    "win_probabilities", lambda u, nodes, drop: win_probabilities(u, Rule(nodes, drop)), keeps_classes=True
)
_compiled_log_win = make_opaque(
    "log_win_probabilities", lambda u, nodes, drop: log_win_probabilities(u, Rule(nodes, drop)), keeps_classes=True
)
