"""Equal rows as one row of their joint weight, in an order of its own: a weight of 2 is then the row twice, to the bit.

The path to a good optimum is long and not convex: rounding in another order would end somewhere else.
"""

from typing import Any

import numpy as np

LARGEST = 20_000_000  # numbers in X up to which it is done; beyond, a copy in another order costs more than it is worth
_MIX = np.uint64(0x9E3779B97F4A7C15)


def merge_rows(x: Any, target: np.ndarray, weight: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return rows, targets and weights with equal (row, target) merged, ordered by what they hold.

    Args:
        x: (rows, features), an array or a SciPy CSR matrix.
        target: class indices.
        weight: of the rows.
    """
    if x.shape[0] * x.shape[1] > LARGEST:
        return x, target, weight
    keys = _hash_rows(x, target)
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    if len(first) < len(keys) and not _all_equal(x, target, first[group]):  # one in 1e13 at a million rows
        first, group = np.argsort(keys, kind="stable"), np.argsort(np.argsort(keys, kind="stable"))
    return x[first], target[first], np.bincount(group, weights=weight)


def _hash_rows(x: Any, target: np.ndarray) -> np.ndarray:
    """Return a number of 64 bits for every row and its target, the same for equal ones."""
    if hasattr(x, "tocsr"):
        x = x.tocsr()
        x.sort_indices()
        nonzero = x.data != 0
        parts = _mix(_bits(x.data)) * _odd(x.shape[1])[x.indices] * nonzero
        keys = np.zeros(x.shape[0], dtype=np.uint64)
        np.add.at(keys, np.repeat(np.arange(x.shape[0]), np.diff(x.indptr)), parts)
    else:
        keys = np.zeros(x.shape[0], dtype=np.uint64)
        for column, factor in enumerate(_odd(x.shape[1])):
            keys += _mix(_bits(x[:, column])) * factor
    return _mix(keys + _mix(target.astype(np.uint64) + np.uint64(1)))


def _bits(values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values) + values.dtype.type(0)  # -0 is 0
    return values.view(np.uint64 if values.dtype == np.float64 else np.uint32).astype(np.uint64)


def _mix(bits: np.ndarray) -> np.ndarray:
    """Return bits of which each depends on all: floats of few digits end in zeros."""
    bits = (bits ^ (bits >> np.uint64(31))) * _MIX
    bits = (bits ^ (bits >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return bits ^ (bits >> np.uint64(32))


def _odd(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**63, count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def _all_equal(x: Any, target: np.ndarray, other: np.ndarray) -> bool:
    apart = np.flatnonzero(other != np.arange(len(other)))
    same = x[apart] != x[other[apart]]
    return not (same.nnz if hasattr(same, "nnz") else same.any()) and bool(
        (target[apart] == target[other[apart]]).all()
    )
