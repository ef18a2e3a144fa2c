r"""The closed-form twin: the win probability under Gumbel noise, in the same interface as the quadrature's.

With independent standard Gumbel noise class y has the largest mu_i/sigma + noise_i with probability
softmax(mu/sigma)_y; in gaps m_i = (mu_y - mu_i)/sigma

    P = 1/(1 + S),    S = Σ_i exp(-m_i),    log P = -log(1 + S),    1 - P = S/(1 + S) = -expm1(log P).

Everything is an ordinary torch operation: derivatives of any order, forward mode, vmap and compile come by themselves.

Rejected: ``log_softmax`` (log P = -1e-20 comes out as 0: the log of 1 + S loses a small S) and
``-softplus(logsumexp(-m))`` (loses |log S| ulp of it, 1e-13 at S = 1e-300).
"""

import math

import torch
from torch import Tensor

UNIT_SIGMA = math.sqrt(6.0) / math.pi  # σ at which this noise has standard deviation 1


def log_win_probability(m: Tensor) -> Tensor:
    r"""Return log P = -log(1 + Σ_i exp(-m_i)), to full relative accuracy at both ends.

    Limits: one competitor gives log sigmoid(m); n equal gaps of 0 give -log(n + 1); no competitor gives 0.

    Args:
        m: gaps, (..., C). +inf: the class takes no part; any -inf: P = 0 with gradient 0; NaN: NaN.

    Returns:
        (...), ≤ 0; differentiable any number of times, in forward and reverse mode.

    >>> m = torch.tensor([[torch.inf, 0.0], [torch.inf, 50.0], [torch.inf, -1e4]], dtype=torch.float64)
    >>> [f"{value:.9g}" for value in log_win_probability(m).tolist()]
    ['-0.693147181', '-1.92874985e-22', '-10000']
    """
    lost = torch.isneginf(m).any(-1)
    m = torch.where(lost.unsqueeze(-1), torch.zeros_like(m), m)
    # log(1 + S) = k + log(1 + (S·e^-k + e^-k - 1)) for every k; this one keeps the exponentials in range, and is 0
    # where S is small. Being arbitrary, it is a constant to derivatives of every order.
    k = (-m).detach().amax(-1).clamp(min=0.0)
    log_p = 0.0 - (k + torch.log1p(torch.exp(-m - k.unsqueeze(-1)).sum(-1) + torch.expm1(-k)))
    return torch.where(lost, -torch.inf, log_p)


def log_win_probabilities(u: Tensor) -> Tensor:
    r"""Return log P_k of every class, log_softmax(u), to full relative accuracy also where P_k is nearly 1.

    Args:
        u: scores in units of sigma, (..., C). -inf: the class takes no part, log P = -inf with gradient 0; a row of
            -inf alone counts as equal scores with gradient 0; one +inf is certain to win; NaN: NaN.

    Returns:
        (..., C), ≤ 0; differentiable any number of times.

    >>> p = log_win_probabilities(torch.tensor([50.0, 0.0], dtype=torch.float64))
    >>> [f"{value:.9g}" for value in p.tolist()]
    ['-1.92874985e-22', '-50']
    """
    u = torch.where(torch.isneginf(u).all(-1, keepdim=True), torch.zeros_like(u), u)
    infinite = torch.isposinf(u)
    certain = infinite.sum(-1, keepdim=True) == 1
    u = torch.where(certain, torch.zeros_like(u), u)
    # Relative to the best class, whose own term is the 1 of log1p.
    index = u.detach().argmax(-1, keepdim=True)
    mine = torch.arange(u.shape[-1], device=u.device) == index
    below = u - torch.where(mine, u, torch.zeros_like(u)).sum(-1, keepdim=True)
    others = torch.where(mine, torch.zeros_like(u), torch.exp(below)).sum(-1, keepdim=True)
    log_p = below - torch.log1p(others)
    decided = torch.where(infinite, torch.zeros_like(u), torch.full_like(u, -torch.inf))
    return torch.where(certain | torch.isneginf(u), decided, log_p)


def win_probabilities(u: Tensor) -> Tensor:
    r"""Return P_k of every class, softmax(u), with the conventions of `log_win_probabilities`.

    >>> win_probabilities(torch.tensor([0.0, 0.0, -torch.inf])).tolist()
    [0.5, 0.5, 0.0]
    """
    return torch.exp(log_win_probabilities(u))
