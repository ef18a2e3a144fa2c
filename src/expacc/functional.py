r"""The one way in: per-sample expected accuracy, error and the loss family, as functions of logits and target.

Scores s = mu + σ·noise; P is the probability that the target's score is the largest. Conventions are those of
:func:`torch.nn.functional.cross_entropy`: class dimension 1, extra dimensions, unbatched rows, class indices or
probabilities. Everything is deterministic (unless a sampled integrator is asked for) and exact to the logits' dtype.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from expacc import _checks
from expacc._scores import all_reduce, gaps, normalize_scores, power_loss
from expacc.integrals import genz, gumbel, monte_carlo
from expacc.integrals.all_classes import log_win_probabilities, win_probabilities
from expacc.integrals.quadrature import auto_rule, log_win_probability
from expacc.kernels import cpu
from expacc.kernels.dispatch import Call, choose_path, needs_operator, note_path, under_transform

Noise = Literal["gaussian", "gumbel"]
Reduction = Literal["none", "mean", "sum"]
Normalize = bool | Literal["cap"]
Integrator = Literal["quadrature", "genz", "monte_carlo"]
Backend = Literal["auto", "reference", "cpu"]
Number = Tensor | float


def exact_loss(
    logits: Tensor,
    target: Tensor,
    sigma: Number = 1.0,
    *,
    margin: float | None = None,
    power: Number = 0.3,
    noise: Noise = "gaussian",
    normalize: Normalize = True,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "none",
    label_smoothing: float = 0.0,
    nodes: int | Literal["auto"] = "auto",
    integrator: Integrator = "quadrature",
    samples: int = 16,
    generator: torch.Generator | None = None,
    data_group: Any = None,
    backend: Backend = "auto",
) -> Tensor:
    r"""Return the loss ℓ = (1 - P^q)/q of every sample, with P the probability that the target wins.

    Limits: q = 1 is the expected error, q → 0 is -log P; with Gumbel noise, q = 0, σ = 1 and normalize=False it is
    cross-entropy. Class probabilities t give Σ_k t_k ℓ(P_k).

    Args:
        logits: mu, (C,), (N, C) or (N, C, d1, …).
        target: class indices, shape of the samples, or class probabilities, shape of the logits.
        sigma: σ, a positive number, a 0-dim tensor or one value per sample. Its gradient flows.
        margin: r in m_i = min(mu_y - mu_i, r)/σ; None: no margin.
        power: q, a number or a 0-dim tensor.
        noise: "gaussian", or "gumbel" for the closed-form twin.
        normalize: True: subtract the mean and divide by the standard deviation of all logits of the batch first.
            "cap": divide by that where it is more than 1. False: neither.
        weight: one factor per class, (C,).
        ignore_index: target value whose samples count nothing.
        reduction: "none", "sum", or "mean", weighted as cross-entropy's. An empty mean is 0.
        label_smoothing: ε; the target becomes (1 - ε)·target + ε/C.
        nodes: number of quadrature nodes; "auto" meets the accuracy contract of the dtype.
        integrator: "quadrature", or the sampled "genz" and "monte_carlo", which need a generator.
        samples: points per row of a sampled integrator.
        generator: where the points come from.
        data_group: process group over which `normalize`'s statistics and the mean's weights are summed; "world": all.
        backend: "auto", "reference" or "cpu".

    Returns:
        Loss in the logits' dtype: shape of the samples, or 0-dim where reduced.

    Raises:
        TypeError, ValueError: an argument that cannot be meant; the message says what to write.
        IndexError: a target out of range.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    >>> exact_loss(logits, torch.tensor([0, 2]), power=1, normalize=False)
    tensor([0.1342, 0.6667])
    """
    _checks.check_logits(logits)
    soft = _checks.check_target(logits, target, ignore_index)
    _checks.check_sigma(sigma, logits)
    _checks.check_margin(margin)
    _checks.check_power(power)
    _checks.check_choice("noise", noise, _checks.NOISES)
    _checks.check_normalize(normalize)
    _checks.check_weight(weight, logits)
    _checks.check_choice("reduction", reduction, _checks.REDUCTIONS)
    _checks.check_smoothing(label_smoothing, margin)
    _checks.check_nodes(nodes)
    _checks.check_choice("integrator", integrator, _checks.INTEGRATORS)
    _checks.check_choice("backend", backend, _checks.BACKENDS)
    data_group = _find_group(data_group)
    if soft and margin is not None:
        _checks.refuse_soft_margin("a target of class probabilities", margin)
    sampled = integrator != "quadrature"
    if sampled:
        _checks.check_sampled(integrator, noise, soft or label_smoothing > 0)
    if logits.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(logits.device.type):
        logits = logits.float()  # as autocast does for cross_entropy
    learned = torch.is_grad_enabled() and (_learns(power) or _learns(weight))
    call = Call(backend, soft or label_smoothing > 0, sampled, nodes, data_group is not None, learned)
    if choose_path(logits, target, call) == "cpu":
        note_path("cpu")
        sigma, power = _as_scalar(sigma), _as_scalar(power)
        door = cpu.loss_op if needs_operator(logits, target, sigma, power, weight) else cpu.loss
        return door(
            logits, target, sigma, power, margin=margin, noise=noise, normalize=normalize,
            weight=weight, ignore_index=ignore_index, reduction=reduction,
        )  # fmt: skip

    note_path("reference")
    x, target, weight = _prepare(logits, target, weight, soft)
    sigma = _widen(sigma)
    valid = torch.ones_like(x[..., 0], dtype=torch.bool)
    if not soft:
        valid = target != ignore_index
        check_range(target, valid, x.shape[-1], ignore_index)
        target = torch.where(valid, target, 0)
        # What an ignored row holds must not touch a gradient, not even as 0·NaN.
        x = torch.where(valid.unsqueeze(-1), x, torch.zeros_like(x))
    if normalize:
        x = normalize_scores(x, valid, data_group, normalize == "cap")
    if soft or label_smoothing > 0:
        loss, scale = _soft_loss(x, target, sigma, power, noise, nodes, weight, label_smoothing, soft, logits.dtype)
    else:
        m = gaps(x, target, sigma, margin)
        if sampled:
            sample = genz.win_probability if integrator == "genz" else monte_carlo.win_probability
            tiny = torch.finfo(m.dtype).tiny  # a sampled P of 0 has no log and no gradient
            log_p = torch.log(sample(m, samples, generator).clamp(min=tiny))
        else:
            log_p = _log_win(x, m, target, sigma, noise, nodes, logits.dtype)
        scale = torch.ones_like(log_p) if weight is None else weight[target]
        loss = scale * power_loss(log_p, power)
    scale = torch.where(valid, scale, torch.zeros_like(scale))
    loss = torch.where(valid, loss, torch.zeros_like(loss))
    return _reduce(loss, scale, reduction, data_group).to(logits.dtype)


def expected_error(
    logits: Tensor,
    target: Tensor,
    sigma: Number = 1.0,
    *,
    margin: float | None = None,
    noise: Noise = "gaussian",
    nodes: int | Literal["auto"] = "auto",
    backend: Backend = "auto",
) -> Tensor:
    r"""Return 1 - P of every sample, the expected error, to full relative accuracy.

    Limits: σ → 0 is the 0-1 error, σ → ∞ is 1 - 1/C; two classes give Φ(-Δ/(σ√2)).

    Args:
        logits, target, sigma, margin, noise, nodes, backend: as in `exact_loss`; target of class indices.

    Returns:
        Tensor of the samples' shape, in [0, 1]. A sample whose target is -100 gives 0.

    >>> expected_error(torch.zeros(2, 5), torch.tensor([0, 3]))
    tensor([0.8000, 0.8000])
    """
    return _per_sample(logits, target, sigma, 1.0, margin, noise, nodes, backend)


def log_expected_accuracy(
    logits: Tensor,
    target: Tensor,
    sigma: Number = 1.0,
    *,
    margin: float | None = None,
    noise: Noise = "gaussian",
    nodes: int | Literal["auto"] = "auto",
    backend: Backend = "auto",
) -> Tensor:
    r"""Return log P of every sample, right where P underflows and where it is nearly 1; concave in the logits.

    Args:
        logits, target, sigma, margin, noise, nodes, backend: as in `exact_loss`; target of class indices.

    Returns:
        Tensor of the samples' shape, ≤ 0. A sample whose target is -100 gives 0.

    >>> log_expected_accuracy(torch.tensor([[0.0, 100.0]]), torch.tensor([0]))
    tensor([-2505.1777])
    """
    return -_per_sample(logits, target, sigma, 0.0, margin, noise, nodes, backend)


def expected_accuracy(
    logits: Tensor,
    target: Tensor,
    sigma: Number = 1.0,
    *,
    margin: float | None = None,
    noise: Noise = "gaussian",
    nodes: int | Literal["auto"] = "auto",
    backend: Backend = "auto",
) -> Tensor:
    r"""Return P of every sample: the probability that the target's noisy score is the largest.

    P = ∫ φ(z) ∏_{i≠y} Φ(z + m_i) dz, m_i = min(mu_y - mu_i, r)/σ.

    Args:
        logits, target, sigma, margin, noise, nodes, backend: as in `exact_loss`; target of class indices.

    Returns:
        Tensor of the samples' shape, in [0, 1]. A sample whose target is -100 gives 1.

    >>> expected_accuracy(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    tensor([0.7602])
    """
    # The exponential of a log P that was rounded to half precision would be off by |log P|/256.
    half = isinstance(logits, Tensor) and logits.dtype in (torch.bfloat16, torch.float16)
    wide = logits.float() if half else logits
    p = torch.exp(log_expected_accuracy(wide, target, sigma, margin=margin, noise=noise, nodes=nodes, backend=backend))
    return p.to(logits.dtype) if half and not torch.is_autocast_enabled(logits.device.type) else p


def argmax_probabilities(
    logits: Tensor,
    sigma: Number = 1.0,
    *,
    noise: Noise = "gaussian",
    nodes: int | Literal["auto"] = "auto",
    backend: Literal["auto", "reference"] = "auto",
) -> Tensor:
    r"""Return the win probability of every class, from one shared set of nodes: O(N·C), summing to 1.

    The Gaussian twin of softmax(logits/σ), which is what noise="gumbel" gives.

    Args:
        logits: mu, (C,), (N, C) or (N, C, d1, …).
        sigma: σ, as in `exact_loss`.
        noise, nodes, backend: as in `exact_loss`.

    Returns:
        Tensor of the logits' shape and dtype; differentiable.

    >>> argmax_probabilities(torch.tensor([1.0, 0.0]))
    tensor([0.7602, 0.2398])
    """
    _checks.check_logits(logits)
    _checks.check_sigma(sigma, logits)
    _checks.check_choice("noise", noise, _checks.NOISES)
    _checks.check_nodes(nodes)
    _checks.check_choice("backend", backend, ("auto", "reference"))
    if logits.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(logits.device.type):
        logits = logits.float()
    note_path("reference")
    x, sigma = _rows(logits).double(), _widen(sigma)
    u = x / (sigma.unsqueeze(-1) if isinstance(sigma, Tensor) and sigma.ndim else sigma)
    if noise == "gumbel":
        p = gumbel.win_probabilities(u)
    else:
        p = win_probabilities(u, auto_rule(u.shape[-1], logits.dtype, nodes))
    return (p.movedim(-1, 1) if logits.ndim > 1 else p).to(logits.dtype)


def _per_sample(logits, target, sigma, power, margin, noise, nodes, backend) -> Tensor:
    if isinstance(target, Tensor) and target.is_floating_point():
        raise ValueError(
            f"target must hold class indices here, got {target.dtype}: write target.long(), "
            "or exact_loss for class probabilities."
        )
    return exact_loss(
        logits, target, sigma, margin=margin, power=power, noise=noise, normalize=False, nodes=nodes, backend=backend
    )


def check_group(data_group: Any) -> None:
    """Raise for a name other than "world"."""
    if isinstance(data_group, str) and data_group != "world":
        raise ValueError(f"data_group must be a process group, 'world' or None, got {data_group!r}.")


def _find_group(data_group: Any) -> Any:
    """Return the process group, of "world" the one that torch.distributed has by now."""
    if not isinstance(data_group, str):
        return data_group
    check_group(data_group)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError(
            "data_group='world' needs torch.distributed, and it is not initialised: call "
            "torch.distributed.init_process_group() before the loss, or write data_group=None in a single process."
        )
    return torch.distributed.group.WORLD


def _learns(value: Any) -> bool:
    """Say whether a value is a tensor that wants a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def _rows(logits: Tensor) -> Tensor:
    """Return the logits with the class dimension last."""
    return logits.movedim(1, -1) if logits.ndim > 1 else logits


def _prepare(logits: Tensor, target: Tensor, weight: Tensor | None, soft: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return scores (..., C) in float64, the target as the reference takes it, and the weight in float64."""
    target = _rows(target).double() if soft else target.long()
    return _rows(logits).double(), target, None if weight is None else weight.double()


def _widen(sigma: Number) -> Number:
    """Return sigma in float64; a tensor's values cannot be refused without waiting, but none may pass as a scale."""
    if not isinstance(sigma, Tensor):
        return float(sigma)
    sigma = sigma.double()
    return torch.where((sigma > 0) & torch.isfinite(sigma), sigma, torch.nan)


def _as_scalar(value: Number) -> Tensor:
    """Return a number as the 0-dim float64 tensor that the kernel reads; a tensor as it is."""
    if isinstance(value, Tensor):
        return value
    if torch.compiler.is_compiling():  # a sum, which Dynamo makes an input of the graph: tensor() compiles per value
        return torch.zeros((), dtype=torch.float64) + value
    return torch.tensor(value, dtype=torch.float64)


def check_range(target: Tensor, valid: Tensor, classes: int, ignore_index: int) -> None:
    """Raise for the first target out of range. On a GPU the gather does: looking would wait for the device."""
    if target.device.type != "cpu" or torch.compiler.is_compiling() or under_transform():
        return
    wrong = valid & ((target < 0) | (target >= classes))
    if wrong.any():
        position = tuple(wrong.nonzero()[0].tolist())
        _checks.raise_out_of_range(int(target[position]), position, classes, ignore_index)


def _log_win(x: Tensor, m: Tensor, target: Tensor, sigma: Number, noise: str, nodes: Any, dtype: torch.dtype) -> Tensor:
    """Return log P of rows of gaps."""
    if noise == "gaussian":
        return log_win_probability(m, auto_rule(m.shape[-1], dtype, nodes))
    return gumbel.log_win_probability(m)


def _soft_loss(x, target, sigma, power, noise, nodes, weight, smoothing, soft, dtype) -> tuple[Tensor, Tensor]:
    """Return Σ_k w_k t_k ℓ(P_k) and the sample's weight in the mean, with cross-entropy's rules for both."""
    classes = x.shape[-1]
    u = x / (sigma.unsqueeze(-1) if isinstance(sigma, Tensor) and sigma.ndim else sigma)
    if noise == "gumbel":
        log_p = gumbel.log_win_probabilities(u)
    else:
        log_p = log_win_probabilities(u, auto_rule(classes, dtype, nodes))
    if soft:
        scale = torch.ones_like(log_p[..., 0])  # the mean over probabilities divides by the number of samples
    else:
        scale = torch.ones_like(log_p[..., 0]) if weight is None else weight[target]
        # Not one_hot: it looks at the values, which waits for a GPU and which vmap refuses. Not a comparison with
        # arange: a target out of range would pass.
        target = torch.zeros_like(log_p).scatter(-1, target.unsqueeze(-1), 1.0)
    t = (1.0 - smoothing) * target + smoothing / classes
    # 0·inf: a class of probability 0 contributes 0 whatever its score.
    log_p = torch.where((t == 0) & torch.isneginf(log_p), torch.zeros_like(log_p), log_p)
    terms = t * power_loss(log_p, power)
    return (terms if weight is None else terms * weight).sum(-1), scale


def _reduce(loss: Tensor, scale: Tensor, reduction: str, group: Any) -> Tensor:
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    total = scale.sum()
    if group is not None:
        # Times the ranks: DDP divides the gradients by their number afterwards.
        ranks = torch.distributed.get_world_size(group)
        total = all_reduce(total, group) / ranks
    return loss.sum() / torch.where(total == 0, torch.ones_like(total), total)
