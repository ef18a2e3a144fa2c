r"""The paper's protocol for linear models: minibatches, momentum, a falling σ, a normalised gradient.

8000 steps of 256 rows, momentum 0.9, the learning rate falling exponentially to 1e-4, σ 10 → 0.01, the loss with its
margin, and α/2·‖A‖² beside it.
"""

from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state

from expacc.attachment import attach
from expacc.linear.continuation import Path
from expacc.linear.objective import DenseRows, Objective
from expacc.losses import ExactLoss

BATCH, MOMENTUM, LAST_RATE = 256, 0.9, 1e-4


def train(
    objective: Objective, *, sigma: tuple[float, float], margin: float | None, noise: Any, learning_rate: float,
    steps: int, random_state: Any, start: torch.Tensor | None,
) -> Path:  # fmt: skip
    """Train, and return the end as a path of one σ.

    Args:
        objective: the linear problem; its weights say how often a row is drawn.
        sigma: first and last σ.
        margin: r, or None.
        noise: "gaussian" or "gumbel".
        learning_rate: first one.
        steps: number of steps.
        random_state: a seed or a generator, as in scikit-learn.
        start: V, or None for PyTorch's usual first weights.
    """
    rows = objective.rows
    random = check_random_state(random_state)
    features, outputs = rows.shape[1], objective.classes - 1
    bound = features**-0.5
    first = (random.uniform(-bound, bound, (features, outputs)), random.uniform(-bound, bound, outputs))
    if start is not None:
        w, b = objective.weights(start)
        first = (w.numpy(), b.numpy())
    weight, bias = (torch.tensor(each, dtype=torch.float32, requires_grad=True) for each in first)
    if not objective.fit_intercept:
        bias = torch.zeros(outputs)
    parameters = [weight, bias] if objective.fit_intercept else [weight]
    loss_fn = ExactLoss(power=1, margin=margin, noise=noise, normalize=False)
    optimizer = torch.optim.SGD(parameters, lr=learning_rate, momentum=MOMENTUM)
    attach(optimizer, loss_fn, steps, sigma=sigma)
    decay = (min(LAST_RATE, learning_rate) / learning_rate) ** (1 / steps)
    for batch in _batches(objective, random, steps):
        part = rows.x[batch.numpy()].toarray() if not isinstance(rows, DenseRows) else rows.x[batch]
        x = torch.as_tensor(part).float()
        scores = torch.nn.functional.pad(x @ weight + bias, (1, 0))
        loss = loss_fn(scores, objective.target[batch])
        if objective.alpha:
            loss = loss + 0.5 * objective.alpha * weight.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= decay
    v = objective.coordinates(weight.detach().double(), bias.detach().double())
    scores = objective.scores(v)
    return Path(v, [sigma[1]], [1.0 - objective.accuracy(scores)], [objective.accuracy(scores)], steps, sigma[1])


def _batches(objective: Objective, random: Any, steps: int) -> Any:
    """Give row numbers: permutations of the rows, epoch by epoch; with unequal weights, draws in their proportion."""
    weight = objective.weight.numpy()
    n = len(weight)
    if weight.max() - weight.min() > 1e-9 * weight.max():
        for _ in range(steps):
            yield torch.from_numpy(random.choice(n, size=min(BATCH, n), p=weight))
        return
    order, at = np.empty(0, dtype=np.int64), 0
    for _ in range(steps):
        if at + min(BATCH, n) > len(order):
            order, at = random.permutation(n), 0
        yield torch.from_numpy(order[at : at + BATCH])
        at += BATCH
