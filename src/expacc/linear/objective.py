r"""The linear problem: rows, weights and penalty, as a function of V whose products with the rows are kept.

Scores of the first class are 0, the others XW + b. V holds W and b in coordinates of its own: columns centred, and
scaled (or whitened) by training statistics, so that an optimizer's steps do not depend on units. X itself is read only:
nothing of its size is made.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Losses = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # scores, target → losses, slopes
CHUNK = 1 << 15  # rows at a time


class DenseRows:
    """Hold a dense X, (rows, features), on any device, in float32 or float64."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.shape, self.device = x, x.shape, x.device

    def some(self, rows: slice) -> "DenseRows":
        """Return a copy of some rows."""
        return DenseRows(self.x[rows].contiguous())

    def times(self, weights: Tensor, rows: slice) -> Tensor:
        """Return X·weights of some rows, in float64."""
        return (self.x[rows] @ weights.to(self.x.dtype)).double()

    def transposed_times(self, slopes: Tensor, rows: slice) -> Tensor:
        """Return Xᵀ·slopes of some rows, in float64."""
        return (self.x[rows].T @ slopes.to(self.x.dtype)).double()

    def moments(self, weight: Tensor, rows: slice, center: Tensor | None) -> Tensor:
        """Return Σ w·x, or about a centre Σ w·(x - c)², by feature."""
        part = self.x[rows].double()
        return weight[rows] @ (part if center is None else (part - center).square())

    def covariance(self, weight: Tensor, rows: slice, center: Tensor) -> Tensor:
        """Return Σ w·(x - c)(x - c)ᵀ."""
        part = self.x[rows].double() - center
        return part.T @ (part * weight[rows, None])


class SparseRows:
    """Hold a SciPy sparse X as CSR, on the CPU; it is never made dense."""

    def __init__(self, x: Any) -> None:
        self.x, self.shape, self.device = x.tocsr(), x.shape, torch.device("cpu")

    def some(self, rows: slice) -> "SparseRows":
        """Return a copy of some rows."""
        return SparseRows(self.x[rows])

    def _part(self, rows: slice) -> Any:
        """Return some rows; all of them as they are, because SciPy's slices are copies."""
        return self.x if (rows.start, rows.stop) == (0, self.shape[0]) else self.x[rows]

    def times(self, weights: Tensor, rows: slice) -> Tensor:
        """Return X·weights of some rows, in float64."""
        return torch.from_numpy(np.asarray(self._part(rows) @ weights.numpy(), dtype=np.float64))

    def transposed_times(self, slopes: Tensor, rows: slice) -> Tensor:
        """Return Xᵀ·slopes of some rows, in float64."""
        return torch.from_numpy(np.asarray(self._part(rows).T @ slopes.numpy(), dtype=np.float64))

    def moments(self, weight: Tensor, rows: slice, center: Tensor | None) -> Tensor:
        """Return Σ w·x, or about a centre Σ w·(x - c)², by feature."""
        part, w = self._part(rows), weight[rows].numpy()
        first = torch.from_numpy(np.asarray(part.T @ w, dtype=np.float64))
        if center is None:
            return first
        second = torch.from_numpy(np.asarray(part.multiply(part).T @ w, dtype=np.float64))
        return second - 2 * center * first + center.square() * float(w.sum())

    def covariance(self, weight: Tensor, rows: slice, center: Tensor) -> Tensor:
        """Return Σ w·(x - c)(x - c)ᵀ."""
        part, w = self._part(rows), weight[rows].numpy()
        second = torch.from_numpy(np.asarray((part.multiply(w[:, None]).tocsr().T @ part).toarray(), dtype=np.float64))
        first = torch.from_numpy(np.asarray(part.T @ w, dtype=np.float64))
        return (
            second
            - torch.outer(first, center)
            - torch.outer(center, first)
            + float(w.sum()) * torch.outer(center, center)
        )


class Objective:
    """Hold Σ w·ℓ + α/2·‖W‖² with Σ w = 1, and the map from V to W and b.

    Args:
        rows: X.
        target: class indices.
        weight: of every row, not negative.
        classes: number of classes.
        alpha: α.
        fit_intercept: whether b is free; else 0, and nothing is centred.
        whiten: map by the inverse root of the covariance instead of the deviations.
    """

    def __init__(
        self, rows: DenseRows | SparseRows, target: Tensor, weight: Tensor, classes: int, alpha: float,
        fit_intercept: bool, whiten: bool,
    ) -> None:  # fmt: skip
        self.rows, self.target, self.classes = rows, target, classes
        self.alpha, self.fit_intercept = alpha, fit_intercept
        self.weight = weight / weight.sum()
        n, p = rows.shape
        self.chunks = [slice(begin, min(begin + CHUNK, n)) for begin in range(0, n, CHUNK)]
        zero = torch.zeros(p, dtype=torch.float64, device=rows.device)
        self.center = self._sum(lambda c: rows.moments(self.weight, c, None)) if fit_intercept else zero
        if whiten:
            self.map = _inverse_root(self._sum(lambda c: rows.covariance(self.weight, c, self.center)))
        else:
            variance = self._sum(lambda c: rows.moments(self.weight, c, self.center)).clamp(min=0.0)
            self.map = _inverse_deviation(variance, self.center)

    def _sum(self, of: Callable[[slice], Tensor]) -> Tensor:
        total = of(self.chunks[0])
        for chunk in self.chunks[1:]:
            total += of(chunk)
        return total

    def start(self) -> Tensor:
        """Return V = 0."""
        inner = self.map.shape[-1]  # fewer than features where whitening leaves directions out
        return torch.zeros(inner + 1, self.classes - 1, dtype=torch.float64, device=self.rows.device)

    def weights(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return W (features, classes - 1) and b of V."""
        w = self.map @ v[:-1] if self.map.ndim == 2 else self.map[:, None] * v[:-1]
        return w, v[-1] - self.center @ w

    def coordinates(self, w: Tensor, b: Tensor) -> Tensor:
        """Return V of W and b, where the map has an inverse."""
        inner = torch.linalg.pinv(self.map) @ w if self.map.ndim == 2 else w / self.map[:, None]
        return torch.cat([inner, (b + self.center @ w).unsqueeze(0)])

    def scores(self, v: Tensor) -> Tensor:
        """Return the scores (rows, classes - 1) of V."""
        w, b = self.weights(v)
        scores = torch.empty(self.rows.shape[0], w.shape[1], dtype=torch.float64, device=w.device)
        for chunk in self.chunks:
            scores[chunk] = self.rows.times(w, chunk) + b
        return scores

    def losses(
        self, of: Losses, scores: Tensor, direction: Tensor | None, step: float, slopes: Tensor
    ) -> tuple[float, float]:
        """Return the mean loss at scores + step·direction and its slope along the direction; fill `slopes` (w·∂ℓ)."""
        total = along = 0.0
        for chunk in self.chunks:
            moved = scores[chunk] if direction is None else scores[chunk] + step * direction[chunk]
            loss, slope = of(moved, self.target[chunk])
            torch.mul(slope, self.weight[chunk, None], out=slopes[chunk])
            total += float(self.weight[chunk] @ loss)
            if direction is not None:
                along += float((slopes[chunk] * direction[chunk]).sum())
        return total, along

    def penalty(self, v: Tensor, direction: Tensor | None = None) -> tuple[float, float]:
        """Return α/2·‖W‖² and its slope along a direction."""
        if self.alpha == 0:
            return 0.0, 0.0
        w, _ = self.weights(v)
        along = 0.0 if direction is None else self.alpha * float((w * self.weights(direction)[0]).sum())
        return 0.5 * self.alpha * float(w.square().sum()), along

    def gradient(self, v: Tensor, slopes: Tensor) -> Tensor:
        """Return the gradient in V."""
        of_b = slopes.sum(0)
        of_w = self._sum(lambda chunk: self.rows.transposed_times(slopes[chunk], chunk)) - torch.outer(
            self.center, of_b
        )
        if self.alpha:
            of_w += self.alpha * self.weights(v)[0]
        inner = self.map.T @ of_w if self.map.ndim == 2 else self.map[:, None] * of_w
        return torch.cat([inner, of_b.unsqueeze(0) if self.fit_intercept else torch.zeros_like(of_b).unsqueeze(0)])

    def accuracy(self, scores: Tensor) -> float:
        """Return the weighted share of the rows whose target has the highest score; of equals the first class wins."""
        right = 0.0
        for chunk in self.chunks:
            found = torch.nn.functional.pad(scores[chunk], (1, 0)).argmax(1)
            right += float(self.weight[chunk] @ (found == self.target[chunk]).double())
        return right


def _inverse_deviation(variance: Tensor, center: Tensor) -> Tensor:
    """Return 1/deviation; 1 for a constant column, whose variance is rounding only."""
    constant = variance <= (10 * torch.finfo(torch.float64).eps * (1 + center.abs())).square()
    return torch.where(constant, 1.0, variance.clamp(min=1e-300).rsqrt())


def _inverse_root(covariance: Tensor) -> Tensor:
    """Return U·Λ^(-1/2): directions without variance are left out."""
    values, vectors = torch.linalg.eigh(covariance)
    keep = values > 1e-10 * values[-1]
    return vectors[:, keep] * values[keep].rsqrt()
