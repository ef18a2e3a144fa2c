"""ExactLoss: the loss of :mod:`expacc.functional` as a module, with σ and q as state that a schedule may move."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from expacc import _checks
from expacc.functional import Backend, Integrator, Noise, Normalize, Reduction, check_group, exact_loss

_STATE = ("sigma", "power")


class ExactLoss(nn.Module):
    r"""Train a classifier for its accuracy: the mean of (1 - P^q)/q, P the probability that the target wins.

    With noisy scores s = mu + σ·noise, P is smooth in mu. q = 1 makes the loss the expected error, q → 0 makes it
    -log P. The default, q = 0.3 and σ = 1 on normalised logits, replaces ``CrossEntropyLoss`` in one line and needs
    no schedule. It accepts what ``CrossEntropyLoss`` accepts, with the same meaning.

    Deliberately different: options are keywords; an empty or all-ignored mean is 0 (connected to the graph) instead
    of NaN; a class of probability 0 contributes 0 whatever its score; a row of -inf alone counts as equal scores with
    gradient 0; a margin together with class probabilities or label smoothing is refused.

    ``normalize=True`` is the paper's batch normalisation inside the loss: one mean and one standard deviation
    (√(var + 1e-5), var the unbiased one) over all finite logits of the rows that count. ``normalize="cap"`` divides by
    that deviation where it is more than 1 and leaves smaller logits as they are: a network that has just begun is not
    pushed harder than by cross-entropy, and one that runs away is held. Either uses the batch at hand in training and
    in eval mode alike, and is no part of the model: predictions are the argmax of the raw logits. Per-sample gradients
    (``vmap(grad)``) therefore normalise each sample by itself, and a single sample of two classes has gradient 0.

    σ and q are float64 buffers: ``.half()`` and ``.to(dtype)`` leave their dtype alone, and moving their values
    (``loss.sigma = 2.0``) neither recompiles nor re-captures anything. In a CUDA graph the loss must have been moved to
    the device, so that the graph sees σ change.

    Args:
        sigma: σ > 0, the scale of the noise, in units of the (normalised) logits.
        margin: r > 0 asks the target to lead by no more than r: m_i = min(mu_y - mu_i, r)/σ. None: no margin.
        power: q.
        noise: "gaussian", or "gumbel": P = softmax(mu/σ)_y without a margin.
        normalize: normalise the logits inside the loss: True, "cap" or False.
        weight: one factor per class, (C,), as in CrossEntropyLoss.
        ignore_index: target value whose samples count nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: ε in [0, 1].
        nodes: number of quadrature nodes; "auto" meets the accuracy contract of the dtype.
        integrator: "quadrature" (deterministic), or "genz" and "monte_carlo", the paper's variants.
        samples: points per row of a sampled integrator.
        generator: where the points of a sampled integrator come from.
        data_group: process group over which the normalisation's statistics and the mean's weights are summed. "world":
            that of all processes, looked up when the loss is called; ``torch.distributed.group.WORLD`` is None until
            ``init_process_group`` has run. None: each process for itself.
        backend: "auto", "reference" or "cpu".

    Shape:
        logits (C,), (N, C) or (N, C, d1, …); target of class indices (), (N,) or (N, d1, …), or of probabilities in
        the logits' shape; result 0-dim, or the samples' shape with reduction="none".

    >>> loss = ExactLoss()
    >>> logits = torch.tensor([[1.0, -1.0, 0.0], [0.0, 2.0, 1.0]], requires_grad=True)
    >>> value = loss(logits, torch.tensor([0, 1]))
    >>> value.backward()
    >>> value
    tensor(0.3197, grad_fn=<...>)
    """

    if TYPE_CHECKING:  # read as tensors, written as numbers too; at run time they are buffers

        @property
        def sigma(self) -> Tensor:
            """σ, 0-dim, float64."""
            ...

        @sigma.setter
        def sigma(self, value: Tensor | float) -> None: ...
        @property
        def power(self) -> Tensor:
            """q, 0-dim, float64."""
            ...

        @power.setter
        def power(self, value: Tensor | float) -> None: ...

    weight: Tensor | None

    def __init__(
        self,
        *,
        sigma: float = 1.0,
        margin: float | None = None,
        power: float = 0.3,
        noise: Noise = "gaussian",
        normalize: Normalize = True,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        nodes: int | str = "auto",
        integrator: Integrator = "quadrature",
        samples: int = 16,
        generator: torch.Generator | None = None,
        data_group: Any = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        _checks.check_margin(margin)
        _checks.check_choice("noise", noise, _checks.NOISES)
        _checks.check_normalize(normalize)
        _checks.check_weight_form(weight)
        _checks.check_ignore_index(ignore_index)
        _checks.check_choice("reduction", reduction, _checks.REDUCTIONS)
        _checks.check_smoothing(label_smoothing, margin)
        _checks.check_nodes(nodes)
        _checks.check_choice("integrator", integrator, _checks.INTEGRATORS)
        check_group(data_group)
        _checks.check_choice("backend", backend, _checks.BACKENDS)
        if integrator != "quadrature":
            _checks.check_sampled(integrator, noise, label_smoothing > 0)
            _checks.check_generator(integrator, samples, generator)
        self.register_buffer("sigma", _checks.as_state("sigma", sigma, positive=True))
        self.register_buffer("power", _checks.as_state("power", power))
        self.register_buffer("weight", weight)
        self.margin = margin
        self.noise: Noise = noise
        self.normalize: Normalize = normalize
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction
        self.label_smoothing = label_smoothing
        self.nodes: Any = nodes
        self.integrator: Integrator = integrator
        self.samples = samples
        self.generator = generator
        self.data_group = data_group
        self.backend: Backend = backend
        self._warned = False

    def forward(self, logits: Tensor, target: Tensor, sigma: Tensor | None = None) -> Tensor:
        """Return the loss; `sigma`, one value per sample, replaces the module's own for this call."""
        _checks.check_logits(logits)
        state = self._buffers  # a Module's own attributes are looked up here in the end, ten times as slowly
        if sigma is None:
            sigma = cast(Tensor, state["sigma"])
            if logits.is_cuda and not sigma.is_cuda:
                _refuse_capture()
        if self.normalize and logits.numel() == 2 and not self._warned and self._is_single(logits):
            self._warned = True
            warnings.warn(
                f"normalize={self.normalize!r} has nothing to normalise by in a single sample of two classes: its "
                f"gradient is 0{' beyond a gap of 1.4' if self.normalize == 'cap' else ''}. "
                "Use larger batches, or ExactLoss(normalize=False).",
                UserWarning,
                stacklevel=4,  # past Module's two frames, at the caller's line
            )
        return exact_loss(
            logits,
            target,
            sigma,
            margin=self.margin,
            power=cast(Tensor, state["power"]),
            noise=self.noise,
            normalize=self.normalize,
            weight=state["weight"],
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            nodes=self.nodes,
            integrator=self.integrator,
            samples=self.samples,
            generator=self.generator,
            data_group=self.data_group,
            backend=self.backend,
        )

    def _is_single(self, logits: Tensor) -> bool:
        """Say whether two logits are one sample, with nobody else's beside it."""
        return _checks.class_count(logits) == 2 and self.data_group is None and not torch.compiler.is_compiling()

    def __setattr__(self, name: str, value: Any) -> None:
        """Let ``loss.sigma = 2.0`` move the value in place, where a captured graph and a compiled loss see it."""
        if name in _STATE and name in self.__dict__.get("_buffers", ()):
            if isinstance(value, nn.Parameter):
                raise TypeError(
                    f"{name} is state that a schedule moves, not a parameter: to learn it, hand it over, "
                    "loss(logits, target, sigma) or exact_loss(logits, target, sigma, power=power)."
                )
            state = _checks.as_state(name, value, positive=name == "sigma")
            here: Tensor = getattr(self, name)
            # A number goes along with the call that fills; copying a tensor from the host would wait for a GPU.
            here.copy_(state) if isinstance(value, Tensor) else here.fill_(value)
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExactLoss":
        """Move σ and q with the module, but keep them float64: half precision would round a schedule away."""
        kept: dict[str, Tensor] = {name: getattr(self, name) for name in _STATE}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            self._buffers[name] = value.to(getattr(self, name).device)
        return self

    def extra_repr(self) -> str:
        """Show what differs from the defaults, and always σ and q."""
        shown = [f"sigma={float(self.sigma):g}", f"power={float(self.power):g}", f"normalize={self.normalize!r}"]
        if self.margin is not None:
            shown.append(f"margin={self.margin:g}")
        if self.noise != "gaussian":
            shown.append(f"noise={self.noise!r}")
        if self.integrator != "quadrature":
            shown.append(f"integrator={self.integrator!r}, samples={self.samples}")
        if self.weight is not None:
            shown.append(f"weight of {len(self.weight)} classes")
        if self.ignore_index != -100:
            shown.append(f"ignore_index={self.ignore_index}")
        if self.label_smoothing:
            shown.append(f"label_smoothing={self.label_smoothing:g}")
        if self.reduction != "mean":
            shown.append(f"reduction={self.reduction!r}")
        if self.nodes != "auto":
            shown.append(f"nodes={self.nodes}")
        if self.data_group is not None:
            shown.append(f"data_group={self.data_group!r}" if isinstance(self.data_group, str) else "with a data_group")
        if self.backend != "auto":
            shown.append(f"backend={self.backend!r}")
        return ", ".join(shown)


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured and the loss's sigma is on the CPU: the graph would keep today's value "
            "for ever. Write loss.to('cuda') before the capture."
        )
