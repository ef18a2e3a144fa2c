r"""L-BFGS whose line search costs no product with X: the scores are linear in V, so those of every step are known.

An iteration takes one product X·direction and one Xᵀ·slopes; a step of the line search only rows. What it remembers of
the curvature is handed from one σ to the next. Line search by bisection to the weak Wolfe conditions, which end for a
function with kinks (a margin's) too.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from expacc.linear.objective import Losses, Objective

ARMIJO, WOLFE = 1e-4, 0.9
TRIALS = 20


@dataclass
class State:
    """Hold where the path is.

    Args:
        v: V.
        scores: of V.
        loss: of V; None where the objective has changed.
        pairs: (change of V, change of the gradient) of the last steps, oldest first.
    """

    v: Tensor
    scores: Tensor
    loss: float | None = None
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def minimize(objective: Objective, of: Losses, state: State, max_iter: int, tol: float, memory: int = 20) -> int:
    """Move a state down the objective; return the number of iterations.

    Args:
        objective: the linear problem.
        of: losses and slopes of scores.
        state: moved in place.
        max_iter: most iterations.
        tol: ends where the loss falls by less than this share.
        memory: pairs to remember.
    """
    slopes = torch.empty_like(state.scores)
    loss = objective.losses(of, state.scores, None, 0.0, slopes)[0] + objective.penalty(state.v)[0]
    gradient = objective.gradient(state.v, slopes)
    for iteration in range(max_iter):
        state.loss = loss
        norm = float(gradient.norm())
        if norm < 1e-14:
            return iteration
        direction = -_times_inverse(state.pairs, gradient)
        if float((direction * gradient).sum()) >= 0:  # curvature of another σ misleads
            state.pairs.clear()
            direction = -gradient / norm
        falls = float((direction * gradient).sum())
        moves = objective.scores(direction)
        step, found = _search(objective, of, state, direction, moves, loss, falls, slopes)
        if found >= loss:
            if not state.pairs:
                return iteration
            state.pairs.clear()  # once more, along the gradient itself
            continue
        state.v = state.v + step * direction
        state.scores += step * moves
        new = objective.gradient(state.v, slopes)
        change, turn = step * direction, new - gradient
        if float((change * turn).sum()) > 1e-12 * float(turn.square().sum()):
            state.pairs.append((change, turn))
            del state.pairs[:-memory]
        done = loss - found < tol * max(abs(loss), 1e-3)
        loss, gradient, state.loss = found, new, found
        if done:
            return iteration + 1
    return max_iter


def _search(
    objective: Objective, of: Losses, state: State, direction: Tensor, moves: Tensor, loss: float, falls: float,
    slopes: Tensor,
) -> tuple[float, float]:  # fmt: skip
    """Return a step and the loss there; `slopes` holds those of the last trial, which is the one returned."""
    low, high, step, found = 0.0, None, 1.0, loss
    for _ in range(TRIALS):
        value, along = objective.losses(of, state.scores, moves, step, slopes)
        penalty, more = objective.penalty(state.v + step * direction, direction)
        found, along = value + penalty, along + more
        if found > loss + ARMIJO * step * falls:
            high = step
        elif along < WOLFE * falls:
            low = step
        else:
            break
        step = 2.0 * step if high is None else 0.5 * (low + high)
    else:  # the last trial was not evaluated at this step
        step = low if low else step
        value, _ = objective.losses(of, state.scores, moves, step, slopes)
        found = value + objective.penalty(state.v + step * direction)[0]
    return step, found


def _times_inverse(pairs: list[tuple[Tensor, Tensor]], gradient: Tensor) -> Tensor:
    """Return the two-loop product of the remembered inverse curvature with a gradient."""
    if not pairs:
        return gradient / gradient.norm()
    product, shares = gradient.clone(), []
    for change, turn in reversed(pairs):
        shares.append(float((change * product).sum() / (change * turn).sum()))
        product -= shares[-1] * turn
    change, turn = pairs[-1]
    product *= (change * turn).sum() / turn.square().sum()
    for (change, turn), share in zip(pairs, reversed(shares), strict=True):
        product += change * (share - float((turn * product).sum() / (change * turn).sum()))
    return product
