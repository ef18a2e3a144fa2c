r"""The other ways to compute the same integrals: Gauss–Hermite, Genz's samples, SciPy's distribution function.

The rules get what this package's own rule has: the three positive integrands, in the log domain,

    P = ∫ φF dz,    1 − P = ∫ Φ F Σ_i λ(z + m_i) dz,    ∂P/∂m_i = ∫ φ F λ(z + m_i) dz,    F = ∏ Φ(z + m_j)

and with `scaled` each integrand has nodes of its own at the mode of its dominating term, scaled by the curvature
there (`expacc.integrals.quadrature` derives the three forms). Equal gaps are grouped, which changes no sum.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import erfcx, log_ndtr, roots_hermite
from scipy.stats import multivariate_normal

from benchmarks.cases import Truth
from expacc.integrals.genz import structured_orthant_probability

_NEWTON = 60
Found = tuple[float, float, np.ndarray | None]  # P, 1 − P, ∂P/∂m


@dataclass
class _Groups:
    """Distinct gaps in ascending order, how often each occurs, and which one every competitor has."""

    m: np.ndarray
    count: np.ndarray
    inverse: np.ndarray


def _hazard(x: np.ndarray) -> np.ndarray:
    low, high = np.minimum(x, 0.0), np.clip(x, 0.0, 40.0)
    left = math.sqrt(2 / math.pi) / erfcx(-low / math.sqrt(2))
    return np.where(x < 0, left, math.sqrt(2 / math.pi) * np.exp(-0.5 * high * high) / (2 * np.exp(log_ndtr(high))))


def _mode(b: np.ndarray, count: np.ndarray, kappa: float) -> tuple[float, float]:
    """Return y* and (−f''(y*))^(−1/2) of f = −κy²/2 + Σ count·log Φ(y + b), whose slope at 0 is not negative."""
    y, bend = 0.0, kappa
    for _ in range(_NEWTON):
        rate = _hazard(y + b)
        slope = count @ rate - kappa * y
        bend = count @ np.clip(rate * (y + b + rate), 0.0, 1.0) + kappa
        y += slope / bend
    return float(y), float(1 / math.sqrt(bend))


def gauss_hermite(row: Truth, nodes: int, *, scaled: bool) -> Found:
    """Return P, 1 − P and the gradient by Gauss–Hermite: nodes fixed at 0 for φ, or at each mode by its curvature."""
    m, inverse, count = np.unique(row.m, return_inverse=True, return_counts=True)
    groups = _Groups(m, count.astype(float), inverse)
    x, weight = roots_hermite(nodes)
    with np.errstate(divide="ignore"):  # the outermost weights of a large rule are 0
        log_weight = np.log(weight) + x * x + 0.5 * math.log(2.0)
    forms = [(0.0, 1.0)] * 3
    if scaled:
        least, rest = m[0], groups.count - (np.arange(len(m)) == 0)
        y, s = _mode(m, groups.count, 1.0)
        lost, lost_scale = _mode(np.append(m - least, -least), np.append(rest, 1.0), 1.0)
        bent, bent_scale = _mode(m - least / 2, rest, 2.0)
        forms = [(y, s), (lost - least, lost_scale), (bent - least / 2, bent_scale)]
    z = [center + scale * math.sqrt(2) * x for center, scale in forms]
    log_w = [log_weight + math.log(scale) for _, scale in forms]

    p = _sum(log_w[0] + _log_gauss(z[0]) + _log_product(z[0], groups))
    with np.errstate(divide="ignore"):
        rates = np.log(_hazard(z[1][:, None] + groups.m) @ groups.count)
    q = _sum(log_w[1] + log_ndtr(z[1]) + _log_product(z[1], groups) + rates)
    height = np.exp(log_w[2] + _log_gauss(z[2]) + _log_product(z[2], groups))
    slope = height @ _hazard(z[2][:, None] + groups.m)
    return p, q, slope[groups.inverse.ravel()]


def _log_gauss(z: np.ndarray) -> np.ndarray:
    return -0.5 * z * z - 0.5 * math.log(2 * math.pi)


def _log_product(z: np.ndarray, groups: _Groups) -> np.ndarray:
    return log_ndtr(z[:, None] + groups.m) @ groups.count


def _sum(logs: np.ndarray) -> float:
    return float(np.exp(logs).sum())


def genz(rows: list[Truth], samples: int, *, gradient: bool, seed: int = 0) -> list[Found]:
    """Return our own structured Genz for every row, 1 − P by subtraction: it has no other."""
    generator = torch.Generator().manual_seed(seed)
    m = torch.from_numpy(np.stack([row.m for row in rows])).requires_grad_(gradient)
    p = structured_orthant_probability(m, samples, generator)
    slope: Any = [None] * len(rows)
    if gradient:
        slope = torch.autograd.grad(p.sum(), m)[0].numpy()
    values = p.detach().tolist()
    return [(value, 1 - value, each) for value, each in zip(values, slope, strict=True)]


def scipy_cdf(row: Truth, points: int | None, seed: int = 0) -> Found:
    """Return scipy.stats.multivariate_normal.cdf of N(0, I + 11ᵀ) at m; it has no gradient."""
    d = len(row.m)
    cdf: Any = multivariate_normal.cdf  # whose annotations are those of the frozen class
    p = cdf(row.m, np.zeros(d), np.eye(d) + 1, maxpts=points, rng=np.random.default_rng(seed))
    return float(p), float(1 - p), None
