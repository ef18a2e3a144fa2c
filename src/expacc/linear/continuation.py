r"""The path: full-batch minimisation of the expected error while σ falls, each σ from where the last one ended.

It starts from the one optimum of the convex -log P at the first σ (of the Gumbel twin, in closed form; from W = 0 where
α is 0 and there may be none), so no seed enters. What is returned is the end of the σ with the best training accuracy,
of equals the last.

Of very many rows a share, every k-th, walks the path; all of them take its last third, in few iterations. On 100 000
synthetic rows of five classes that is half of the time for the same accuracy, and its price no longer grows with the
rows but for those few iterations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from expacc.linear.lbfgs import State, minimize
from expacc.linear.objective import Objective
from expacc.linear.rows import expected_errors, log_losses


@dataclass
class Path:
    """Hold what a solver found.

    Args:
        v: V of the best end.
        sigmas: every σ.
        losses, accuracies: at its end, the expected error (with penalty) and the accuracy.
        iterations: of all.
        sigma: that of the best end.
    """

    v: torch.Tensor
    sigmas: list[float]
    losses: list[float]
    accuracies: list[float]
    iterations: int
    sigma: float


def follow(
    objective: Objective, *, sigma_start: float, sigma_end: float, n_sigmas: int, margin: float, noise: str,
    max_iter: int, tol: float, start: torch.Tensor | None = None,
    watch: Callable[[int, float, float], None] | None = None,
) -> Path:  # fmt: skip
    """Follow the path from σ_start to σ_end.

    Args:
        objective: the linear problem.
        sigma_start, sigma_end, n_sigmas: σ falls in equal ratios.
        margin: r; inf: none.
        noise: "gaussian" or "gumbel".
        max_iter, tol: of every σ.
        start: V to begin with, in the place of the convex problem's optimum.
        watch: told number, σ and accuracy after every σ.
    """
    v = objective.start() if start is None else start
    state = State(v, objective.scores(v))
    iterations = 0
    if start is None and objective.alpha > 0:
        convex = partial(log_losses, sigma=sigma_start, margin=margin)
        iterations += minimize(objective, convex, state, max_iter, tol)
        state.pairs.clear()
    sigmas = np.geomspace(sigma_start, sigma_end, n_sigmas).tolist()
    path = Path(state.v, sigmas, [], [], iterations, sigmas[0])
    best = -1.0
    for number, sigma in enumerate(sigmas):
        errors = partial(expected_errors, sigma=sigma, margin=margin, noise=noise)
        path.iterations += minimize(objective, errors, state, max_iter, tol)
        accuracy = objective.accuracy(state.scores)
        path.losses.append(float(state.loss or 0.0))
        path.accuracies.append(accuracy)
        if accuracy >= best:
            best, path.v, path.sigma = accuracy, state.v, sigma
        if watch is not None:
            watch(number, sigma, accuracy)
    return path


def follow_large(
    objective: Objective, share: Objective, *, sigma_start: float, sigma_end: float, n_sigmas: int, margin: float,
    noise: str, max_iter: int, tol: float, watch: Callable[[int, float, float], None] | None = None,
) -> Path:  # fmt: skip
    """Follow the path with a share of the rows, then its last third with all of them.

    Args:
        objective: the linear problem.
        share: the same of some of its rows.
        sigma_start, sigma_end, n_sigmas, margin, noise, max_iter, tol, watch: as in `follow`; `watch` sees both.
    """
    sigmas = np.geomspace(sigma_start, sigma_end, n_sigmas)
    last = max(1, round(n_sigmas / 3))
    begun = follow(
        share, sigma_start=sigma_start, sigma_end=sigma_end, n_sigmas=n_sigmas, margin=margin, noise=noise,
        max_iter=max_iter, tol=tol, watch=watch,
    )  # fmt: skip
    path = follow(
        objective, sigma_start=float(sigmas[-last]), sigma_end=sigma_end, n_sigmas=last, margin=margin, noise=noise,
        max_iter=max(1, max_iter // 3), tol=max(tol, 1e-5), start=objective.coordinates(*share.weights(begun.v)),
        watch=watch,
    )  # fmt: skip
    path.iterations += begun.iterations
    return path
