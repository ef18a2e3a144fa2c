"""The compiled door: an integral as one opaque operator, with a gradient, for torch.compile.

Traced through, the fixed Newton steps and the special functions make graphs that Inductor needs minutes for; and
Dynamo refuses autograd functions with a jvp. As an operator the integral is one node of the graph and runs eagerly
inside it. Eager code does not come here: a custom operator has no forward-mode AD and no second derivative.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The dispatcher's state outside any operator, as it is while this module is imported.
_EAGER = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())


def refuse_forward_mode() -> None:
    """Raise where an operator would be traced with forward-mode AD active: its tangent would silently be 0.

    Called by the operators' fake implementations, which is where a compiler meets them.
    """
    if forward_ad._current_level >= 0:  # as torch's own compiler reads it
        raise RuntimeError(
            "forward-mode AD (torch.func.jvp, jacfwd, dual numbers) of expacc's loss has no rule inside torch.compile: "
            "take the derivative outside the compiled function, or leave the loss out of it (torch.compiler.disable)."
        )


def make_opaque(name: str, function: Callable[..., Tensor], *, keeps_classes: bool) -> Callable[..., Tensor]:
    """Register ``function(x, nodes, drop)`` as the operator ``expacc::name`` with its vector-Jacobian product.

    Args:
        name: of the operator.
        function: differentiable by autograd; x is (..., C).
        keeps_classes: whether the result is (..., C), or (...).

    Returns:
        The operator.
    """

    @torch.library.custom_op(f"expacc::{name}", mutates_args=())
    def value(x: Tensor, nodes: int, drop: float) -> Tensor:
        return function(x, nodes, drop)

    @torch.library.custom_op(f"expacc::{name}_vjp", mutates_args=())
    def vjp(grad: Tensor, x: Tensor, nodes: int, drop: float) -> Tensor:
        # An operator's body runs below autograd; lifting that for the block is what makes it differentiable here.
        with torch._C._ForceDispatchKeyGuard(*_EAGER), torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(function(x, nodes, drop), x, grad)[0]

    @value.register_fake
    def _(x: Tensor, nodes: int, drop: float) -> Tensor:
        refuse_forward_mode()
        return x.new_empty(x.shape if keeps_classes else x.shape[:-1])

    @vjp.register_fake
    def _(grad: Tensor, x: Tensor, nodes: int, drop: float) -> Tensor:
        return torch.empty_like(x)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.nodes, ctx.drop = inputs
        ctx.save_for_backward(x)

    def backward(ctx: Any, grad: Tensor) -> Any:
        return vjp(grad, *ctx.saved_tensors, ctx.nodes, ctx.drop), None, None

    value.register_autograd(backward, setup_context=save)

    # Every dimension but the last is a batch: a new one goes to the front.
    @value.register_vmap
    def _(info: Any, dims: Any, x: Tensor, nodes: int, drop: float) -> tuple[Tensor, int]:
        return value(x.movedim(dims[0], 0), nodes, drop), 0

    @vjp.register_vmap
    def _(info: Any, dims: Any, grad: Tensor, x: Tensor, nodes: int, drop: float) -> tuple[Tensor, int]:
        grad, x = (
            part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
            for part, dim in ((grad, dims[0]), (x, dims[1]))
        )
        return vjp(grad, x, nodes, drop), 0

    return value
