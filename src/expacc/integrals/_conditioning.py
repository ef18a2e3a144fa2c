"""The arithmetic of Genz's algorithm: the sweeps over the coordinates and the gradients made of them (see genz.py)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from expacc.integrals._points import Sequence, draw_uniforms

# Elements of a block of the gradient's sweep. 2^18 floats (1 MB) keep the three working arrays in the cache and the
# cost of dispatch under a percent; the whole, rows·samples·d², is never formed.
_BLOCK = 2**18


def _columns(d: int, first: int) -> tuple[list[float], list[float]]:
    """Return α, β of the Cholesky factor of I + 11ᵀ/first: column k of Σ is column 1 of what is left after k − 1."""
    alpha = [math.sqrt(1 + 1 / k) for k in range(first, first + d)]
    return alpha, [1 / (k * a) for k, a in zip(range(first, first + d), alpha, strict=True)]


def _quantile_(probability: Tensor) -> Tensor:
    """Replace probabilities by normal quantiles, with the clamp of the module's docstring."""
    info = torch.finfo(probability.dtype)
    return torch.special.ndtri(probability.clamp_(info.tiny, 1 - info.eps / 2), out=probability)


def sweep_structured(
    mean: Callable[[int], Tensor], d: int, points: Tensor, first: int, shape: tuple[int, ...]
) -> Tensor:
    """Return the mean over the last dimension of ∏ Φ(b_k), for the covariance I + 11ᵀ/first.

    Args:
        mean: of step k, broadcastable to `shape`; asked for one at a time, as together they fill rows·d².
        d: number of steps.
        points: w of each step, (d − 1, …), broadcastable likewise.
        shape: of the working arrays, samples last.
    """
    alpha, beta = _columns(d, first)
    total, product, e = points.new_zeros(shape), points.new_ones(shape), points.new_empty(shape)
    for k in range(d):
        torch.sub(total, mean(k), out=e)
        e.mul_(math.sqrt(0.5) / alpha[k]).erfc_().mul_(0.5)
        product.mul_(e)
        if k + 1 < d:  # nothing is conditioned on the last coordinate
            total.add_(_quantile_(e.mul_(points[k])), alpha=beta[k])
    return product.mean(-1)


def sweep_general(mean: Tensor, cholesky: Tensor, points: Tensor) -> Tensor:
    """Return the mean over samples of ∏ Φ(b_k), for groups of rows with a factor each.

    Args:
        mean: (G, R, d).
        cholesky: L, (G, d, d).
        points: w, (d − 1, G or 1, R, S).
    """
    groups, rows, d = mean.shape
    samples = points.shape[-1]
    u = mean.new_empty(groups, rows * samples, max(d - 1, 0))
    product = mean.new_ones(groups, rows, samples)
    for k in range(d):
        # a matrix-vector product over the coordinates conditioned on so far, which autocast would round to bfloat16
        with torch.autocast(u.device.type, enabled=False):
            shift = (u[..., :k] @ cholesky[:, k, :k, None]).view(groups, rows, samples)
        e = shift.sub_(mean[:, :, k, None]).div_(cholesky[:, k, k, None, None])
        e = e.mul_(math.sqrt(0.5)).erfc_().mul_(0.5)
        product.mul_(e)
        if k + 1 < d:
            u[..., k] = _quantile_(e.mul_(points[k])).view(groups, -1)
    return product.mean(-1)


def structured_gradient(m: Tensor, samples: int, generator: torch.Generator, sequence: Sequence) -> Tensor:
    """Estimate ∂P/∂m, (N, d), by Theorem 4.3 with Σ̂ = I + ½·11ᵀ, in blocks over rows and coordinates."""
    n, d = m.shape
    points = draw_uniforms(max(d - 2, 0), n, samples, generator, sequence, like=m)
    factor = torch.ones_like(m)
    finite = torch.where(torch.isinf(m), 0, m)  # inf − inf would be NaN where the density below is 0
    if d > 1:
        wide = max(1, min(d, _BLOCK // (max(n, 1) * samples)))  # coordinates, all rows: the longest inner loops
        tall = max(1, min(n, _BLOCK // samples)) if wide == 1 else max(n, 1)
        for row in range(0, n, tall):
            rows = m[row : row + tall]
            for i in range(0, d, wide):
                half = finite[row : row + tall, i : i + wide] / 2
                given = torch.arange(i, i + half.shape[1], device=m.device)

                def mean(k: int, rows: Tensor = rows, half: Tensor = half, given: Tensor = given) -> Tensor:
                    # the k-th of the others: m_k for the coordinates i > k, m_{k+1} for the rest
                    return (torch.where(given > k, rows[:, k, None], rows[:, k + 1, None]) - half)[..., None]

                factor[row : row + tall, i : i + wide] = sweep_structured(
                    mean, d - 1, points[:, row : row + tall, None], 2, (*half.shape, samples)
                )
    return factor * torch.exp(-m.square() / 4) / math.sqrt(4 * math.pi)


def general_gradient(m: Tensor, sigma: Tensor, samples: int, generator: torch.Generator, sequence: Sequence) -> Tensor:
    """Estimate ∂P/∂m, (G, R, d), by Theorem 4.3, in blocks over the coordinates."""
    groups, rows, d = m.shape
    points = draw_uniforms(max(d - 2, 0), groups * rows, samples, generator, sequence, like=m)
    points = points.view(-1, groups, rows, samples)
    factor = torch.ones_like(m)
    finite = torch.where(torch.isinf(m), 0, m)
    others = torch.arange(max(d - 1, 0), device=m.device)
    wide = max(1, min(d, _BLOCK // max(1, groups * (rows * samples + d) * d)))
    for i in range(0, d if d > 1 else 0, wide):
        given = torch.arange(i, min(i + wide, d), device=m.device)
        rest = others + (others >= given[:, None])  # (I, d − 1): the others of every i
        cross = sigma[:, given[:, None], rest]  # (G, I, d − 1)
        scale = sigma[:, given, given]  # (G, I)
        m_hat = m[:, :, rest] - finite[:, :, given, None] * (cross / scale[..., None])[:, None]
        hat = sigma[:, rest[:, :, None], rest[:, None, :]] - cross[..., None] * (cross / scale[..., None])[..., None, :]
        count = len(given)
        flat = m_hat.transpose(1, 2).reshape(groups * count, rows, d - 1)
        w = points[:, :, None].expand(-1, -1, count, -1, -1).reshape(-1, groups * count, rows, samples)
        value = sweep_general(flat, factorize(hat.flatten(0, 1)), w)
        factor[:, :, i : i + wide] = value.view(groups, count, rows).transpose(1, 2)
    variance = sigma.diagonal(dim1=-2, dim2=-1)[:, None]
    return factor * torch.exp(-m.square() / (2 * variance)) / torch.sqrt(2 * math.pi * variance)


def factorize(sigma: Tensor) -> Tensor:
    """Return the Cholesky factor, or raise a ValueError that names the argument."""
    factor, info = torch.linalg.cholesky_ex(sigma)
    if info.any():
        raise ValueError("covariance must be positive definite: add a small multiple of the identity to it.")
    return factor
