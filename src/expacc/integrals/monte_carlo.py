r"""Plain Monte Carlo of an expectation over noisy scores, with the log-derivative (REINFORCE) gradient.

For any function f of the scores s ~ N(μ, Σ), differentiable or not, from one set of samples

    E f(s) ≈ 1/S Σ_k f(s_k),    ∇E f(s) ≈ 1/S Σ_k f(s_k)·∇ log N(s_k; μ, Σ).

Both come from one expression, 1/S Σ_k f(s_k)·w_k with the density ratio w_k = N(s_k; μ, Σ)/N(s_k; μ°, Σ°), where ° is
a detached copy: its value is 1, and its derivatives of every order are those that make the estimate's derivatives
unbiased. So nothing is silently wrong in second order, and a jvp works like a gradient.

No variance reduction: this is the method that the paper compares its own with. Use quadrature for the integral.

References:
    R. J. Williams, Simple statistical gradient-following algorithms, Machine Learning 8 (1992).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from expacc.integrals._points import check_floating, check_sampling, draw_normals


def expected_indicator(
    mean: Tensor,
    indicator: Callable[[Tensor], Tensor],
    sigma: float | Tensor = 1.0,
    samples: int = 16,
    generator: torch.Generator | None = None,
    *,
    covariance: Tensor | None = None,
) -> Tensor:
    """Estimate E f(s) for s ~ N(mean, σ²I), or N(mean, covariance), and any function f of the scores.

    Unbiased in value and in every derivative with respect to `mean` and `sigma`, for every number of samples; the
    standard error falls like 1/√samples. An infinite score has no noise, and gradient 0.

    Args:
        mean: μ, shape (…, d).
        indicator: f, takes scores of shape (samples, …, d) and returns (samples, …), bool or real. Called once,
            without recording a graph.
        sigma: σ, a positive number, or a tensor without dimensions or of shape (…). Differentiable.
        samples: samples per row; each row has its own.
        generator: where they come from. Required.
        covariance: Σ, shape (d, d), instead of sigma. Not differentiable.

    Returns:
        The estimate, shape (…), in the dtype of `mean`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: no generator; sigma and covariance both; shapes that do not fit; sigma ≤ 0; a covariance that
            requires a gradient, or is not positive definite.

    >>> mean = torch.tensor([1.0, 0.0], requires_grad=True)
    >>> wins = expected_indicator(mean, lambda s: s[..., 0] > s[..., 1], 1.0, 10**5, torch.Generator().manual_seed(0))
    >>> round(wins.item(), 2)  # Φ(1/√2) = 0.760
    0.76
    >>> [round(slope, 1) for slope in torch.autograd.grad(wins, mean)[0].tolist()]  # φ(1/√2)/√2 = 0.220
    [0.2, -0.2]
    """
    generator = check_sampling(samples, generator)
    check_floating("mean", mean, 1)
    factor = _check_scale(mean, sigma, covariance)
    center = mean.to(torch.promote_types(mean.dtype, torch.float32))
    noise = draw_normals((samples, *center.shape), generator, like=center)
    # An infinite mean minus itself is NaN; a NaN minus itself is one, too, and shall be.
    step = torch.where(torch.isinf(center), torch.zeros_like(center), center - center.detach())
    with torch.no_grad(), torch.autocast(center.device.type, enabled=False):
        spread = noise @ factor.mT if factor is not None else noise * _column(sigma)
        f = _check_outcome(indicator(center + spread), (samples, *mean.shape[:-1])).to(center.dtype)
    if factor is not None:
        whitened = torch.linalg.solve_triangular(factor, step.unsqueeze(-1), upper=False).squeeze(-1)
        return _reweighted(f, noise, whitened).to(mean.dtype)
    ratio = sigma.detach() / sigma if isinstance(sigma, Tensor) else torch.ones((), device=center.device)
    return _reweighted(f, noise, step / _column(sigma), ratio.to(center.dtype)).to(mean.dtype)


def win_probability(m: Tensor, samples: int = 16, generator: torch.Generator | None = None) -> Tensor:
    """Estimate the probability that the target wins, from the scaled differences of all classes.

    The orthant of t ~ N(m_{−y}, I + 11ᵀ), sampled as t_i = m_i + e_y − e_i with independent noise e. The gradient is
    ∇ log N(t; m, I + 11ᵀ) = ē − e_i, ē the mean of the noise of all that take part: what one gets from the scores'
    own density, −e_i, less a noise common to all.

    Args:
        m: m_i = min(mu_y − mu_i, r)/σ, shape (…, C), +inf in the target's column (gradient 0) and in those of masked
            competitors. −inf: P = 0 with gradient 0. A NaN stays in its row.
        samples, generator: as in `expected_indicator`.

    Returns:
        P, shape (…), in the dtype of `m`.

    >>> win_probability(torch.tensor([torch.inf, 1.0]), 10**5, torch.Generator().manual_seed(0)).round(decimals=2)
    tensor(0.7600)
    """
    generator = check_sampling(samples, generator)
    check_floating("m", m, 1)
    if m.shape[-1] == 0:
        raise ValueError(f"m must have at least one class, got shape {tuple(m.shape)}.")
    gap = m.to(torch.promote_types(m.dtype, torch.float32))
    noise = draw_normals((samples, *gap.shape), generator, like=gap)
    with torch.no_grad():
        absent = torch.isposinf(gap)
        target = absent.to(torch.uint8).argmax(-1, keepdim=True).expand(samples, *gap.shape[:-1], 1)
        own = noise.gather(-1, target)
        takes_part = (~absent).scatter(-1, target[0], True)
        wins = (gap + own - noise > 0).all(-1).to(gap.dtype)
        count = takes_part.sum(-1, keepdim=True)
        common = torch.where(takes_part, noise, torch.zeros_like(noise)).sum(-1, keepdim=True) / count
        noise = common - noise
    step = torch.where(torch.isinf(gap), torch.zeros_like(gap), gap - gap.detach())
    # log w = δᵀΣ⁻¹(t − m) − δᵀΣ⁻¹δ/2 with Σ⁻¹ = I − 11ᵀ/C
    square = step.square().sum(-1) - step.sum(-1).square() / count.squeeze(-1)
    weight = torch.exp((noise * step).sum(-1) - 0.5 * square)
    return (wins * weight).mean(0).to(m.dtype)


def _column(sigma: float | Tensor) -> float | Tensor:
    """Return sigma in a shape that divides (…, d)."""
    return sigma.unsqueeze(-1) if isinstance(sigma, Tensor) and sigma.ndim else sigma


def _reweighted(f: Tensor, noise: Tensor, step: Tensor, ratio: Tensor | None = None) -> Tensor:
    """Return the mean of f·w, log w = (‖e‖² − ‖ρe − δ‖²)/2 + d log ρ, for δ = L⁻¹(μ − μ°) = 0 and ρ = σ°/σ = 1."""
    cross = (noise * step).sum(-1)
    log_weight = cross - 0.5 * step.square().sum(-1)
    if ratio is not None:
        own = noise.square().sum(-1)
        log_weight = ratio * cross - 0.5 * step.square().sum(-1) + 0.5 * own * (1 - ratio * ratio)
        log_weight = log_weight + noise.shape[-1] * torch.log(ratio)
    return (f * torch.exp(log_weight)).mean(0)


def _check_scale(mean: Tensor, sigma: float | Tensor, covariance: Tensor | None) -> Tensor | None:
    """Return the Cholesky factor of the covariance, or None for a valid sigma."""
    shape, d = tuple(mean.shape[:-1]), mean.shape[-1]
    if covariance is not None:
        if isinstance(sigma, Tensor) or sigma != 1.0:
            raise ValueError("sigma and covariance were both given: write covariance=sigma**2 * covariance.")
        check_floating("covariance", covariance, 2)
        if covariance.shape != (d, d):
            raise ValueError(
                f"covariance must have shape {(d, d)} for mean of shape {tuple(mean.shape)}, "
                f"got {tuple(covariance.shape)}."
            )
        if covariance.requires_grad:
            raise ValueError("the estimate is differentiable in mean and sigma only: write covariance.detach().")
        factor, info = torch.linalg.cholesky_ex(covariance.to(torch.promote_types(mean.dtype, torch.float32)))
        if info.any():
            raise ValueError("covariance must be positive definite: add a small multiple of the identity to it.")
        return factor
    if isinstance(sigma, Tensor):
        check_floating("sigma", sigma, 0)
        if sigma.ndim and tuple(sigma.shape) != shape:
            raise ValueError(f"sigma must have no dimensions or shape {shape}, got shape {tuple(sigma.shape)}.")
    elif isinstance(sigma, bool) or not isinstance(sigma, int | float):
        raise TypeError(f"sigma must be a number or a tensor, got {type(sigma).__name__}: write for example sigma=1.0.")
    elif not sigma > 0:
        raise ValueError(f"sigma must be positive, got {sigma!r}: write for example sigma=1.0.")
    return None


def _check_outcome(outcome: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the indicator's result, or raise where it is not one number per sample."""
    if not isinstance(outcome, Tensor) or tuple(outcome.shape) != shape:
        got = f"shape {tuple(outcome.shape)}" if isinstance(outcome, Tensor) else type(outcome).__name__
        raise ValueError(
            f"indicator must return a tensor of shape {shape} (samples first) for scores with one more dimension at "
            f"the end, got {got}: reduce the last dimension, for example with .all(-1)."
        )
    return outcome
