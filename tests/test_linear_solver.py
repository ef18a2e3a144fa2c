"""The linear problem and its solvers: gradients, chunks, coordinates, optima that another program finds too."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from scipy.optimize import minimize as scipy_minimize
from torch import Tensor

from expacc.linear import objective as module
from expacc.linear.continuation import follow
from expacc.linear.lbfgs import State, minimize
from expacc.linear.merge import merge_rows
from expacc.linear.objective import DenseRows, Objective, SparseRows
from expacc.linear.rows import expected_errors, log_losses

N, P, C = 80, 4, 3
KINDS = pytest.mark.parametrize("kind", ["dense", "sparse", "float32"])
MAPS = pytest.mark.parametrize("options", [{}, {"fit_intercept": False}, {"whiten": True}, {"alpha": 0.3}],
                               ids=["plain", "no intercept", "whitened", "penalty"])  # fmt: skip
ERRORS = partial(expected_errors, sigma=0.8, margin=2.0, noise="gaussian")


def make(kind: str = "dense", **options: Any) -> Objective:
    random = np.random.default_rng(0)
    x = random.normal(size=(N, P)) * [1.0, 30.0, 0.01, 2.0] + [0.0, 100.0, 3.0, -2.0]
    x[random.random(x.shape) < 0.3] = 0.0
    target = torch.from_numpy(random.integers(0, C, N))
    weight = torch.from_numpy(random.integers(1, 4, N).astype(float))
    rows = {"dense": lambda: DenseRows(torch.from_numpy(x)), "sparse": lambda: SparseRows(scipy.sparse.csr_matrix(x)),
            "float32": lambda: DenseRows(torch.from_numpy(x).float())}[kind]()  # fmt: skip
    return Objective(rows, target, weight, C, **({"alpha": 0.0, "fit_intercept": True, "whiten": False} | options))


def value(objective: Objective, v: Tensor) -> float:
    scores = objective.scores(v)
    return objective.losses(ERRORS, scores, None, 0.0, torch.empty_like(scores))[0] + objective.penalty(v)[0]


def point(objective: Objective) -> Tensor:
    v = torch.randn(objective.start().shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if not objective.fit_intercept:
        v[-1] = 0.0
    return v


@KINDS
@MAPS
def test_the_gradient_is_the_slope_of_the_value(kind: str, options: Any) -> None:
    objective = make(kind, **options)
    v, h = point(objective), 1e-2 if kind == "float32" else 1e-6
    slopes = torch.empty(N, C - 1, dtype=torch.float64)
    objective.losses(ERRORS, objective.scores(v), None, 0.0, slopes)
    found = objective.gradient(v, slopes)
    for place in ((0, 0), (2, 1), (found.shape[0] - 1, 0)):
        if place[0] == found.shape[0] - 1 and not objective.fit_intercept:
            assert found[place] == 0.0
            continue
        step = torch.zeros_like(v)
        step[place] = h
        slope = (value(objective, v + step) - value(objective, v - step)) / (2 * h)
        assert found[place].item() == pytest.approx(slope, abs=2e-4 if kind == "float32" else 1e-8)


@KINDS
@MAPS
def test_weights_and_coordinates_undo_each_other(kind: str, options: Any) -> None:
    objective = make(kind, **options)
    v = point(objective)
    torch.testing.assert_close(objective.coordinates(*objective.weights(v)), v, rtol=1e-8, atol=1e-8)


def test_sparse_rows_are_dense_rows() -> None:
    dense, sparse = make("dense", whiten=True), make("sparse", whiten=True)
    v = point(dense)
    torch.testing.assert_close(sparse.scores(v).abs(), dense.scores(v).abs(), rtol=1e-7, atol=1e-7)
    assert value(sparse, v) == pytest.approx(value(dense, v), rel=1e-9)


@KINDS
def test_chunks_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(kind, alpha=0.1)
    monkeypatch.setattr(module, "CHUNK", 7)
    parts = make(kind, alpha=0.1)
    assert len(parts.chunks) == 12
    v = point(whole)
    assert value(parts, v) == pytest.approx(value(whole, v), rel=1e-6 if kind == "float32" else 1e-12)
    assert parts.accuracy(parts.scores(v)) == pytest.approx(whole.accuracy(whole.scores(v)))


def test_a_constant_column_and_a_huge_one_do_no_harm() -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 3)))
    x[:, 1], x[:, 2] = 7.0, x[:, 2] * 1e9
    target = (x[:, 0] > 0).long()
    objective = Objective(DenseRows(x), target, torch.ones(50, dtype=torch.float64), 2, 0.0, True, False)
    path = follow(
        objective, sigma_start=3.0, sigma_end=0.1, n_sigmas=6, margin=1.0, noise="gaussian", max_iter=60, tol=1e-6
    )
    assert max(path.accuracies) == 1.0
    assert all(part.isfinite().all() for part in objective.weights(path.v))


@pytest.mark.parametrize("alpha", [1e-2, 1e-1])
def test_the_convex_problem_ends_at_the_optimum_that_scipy_finds(alpha: float) -> None:
    objective = make(alpha=alpha)
    of = partial(log_losses, sigma=1.0, margin=np.inf)
    state = State(objective.start(), objective.scores(objective.start()))
    minimize(objective, of, state, max_iter=500, tol=1e-14)

    def fun(flat: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.from_numpy(flat).view(state.v.shape)
        scores, slopes = objective.scores(v), torch.empty_like(state.scores)
        loss = objective.losses(of, scores, None, 0.0, slopes)[0] + objective.penalty(v)[0]
        return loss, objective.gradient(v, slopes).numpy().ravel()

    found: Any = scipy_minimize(fun, np.zeros(state.v.numel()), jac=True, method="L-BFGS-B",
                                options={"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-10})  # fmt: skip
    assert state.loss == pytest.approx(found.fun, rel=1e-9)
    torch.testing.assert_close(state.v.flatten(), torch.from_numpy(found.x), rtol=1e-3, atol=1e-4)


def test_a_path_never_ends_above_where_it_begins() -> None:
    objective = make()
    path = follow(
        objective, sigma_start=3.0, sigma_end=0.1, n_sigmas=8, margin=1.0, noise="gaussian", max_iter=60, tol=1e-6
    )
    assert objective.accuracy(objective.scores(path.v)) == max(path.accuracies)
    assert path.sigma == path.sigmas[max(k for k, a in enumerate(path.accuracies) if a == max(path.accuracies))]
    assert len(path.losses) == 8


def test_equal_rows_are_merged_whatever_their_order() -> None:
    random = np.random.default_rng(0)
    x, target = random.normal(size=(10, 3)), random.integers(0, 2, 10)
    weight = random.integers(1, 4, 10).astype(float)
    again = np.repeat(np.arange(10), weight.astype(int))
    random.shuffle(again)
    once, many = merge_rows(x, target, weight), merge_rows(x[again], target[again], np.ones(len(again)))
    for a, b in zip(once, many, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_sparse_and_dense_rows_are_merged_alike(dtype: Any) -> None:
    x = np.array([[0.0, 1.0], [-0.0, 1.0], [2.0, 0.0], [0.0, 1.0]], dtype=dtype)
    target, weight = np.array([1, 1, 0, 0]), np.ones(4)
    dense, sparse = merge_rows(x, target, weight), merge_rows(scipy.sparse.csr_matrix(x), target, weight)
    assert sorted(dense[2]) == sorted(sparse[2]) == [1.0, 1.0, 2.0]
    assert len(dense[1]) == 3


def test_rows_that_differ_in_the_last_digit_stay_apart() -> None:
    x = np.array([[1.0], [np.nextafter(1.0, 2.0)], [2.0**40], [2.0**41]])
    assert len(merge_rows(x, np.zeros(4, dtype=int), np.ones(4))[1]) == 4
