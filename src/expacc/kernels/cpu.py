"""The native CPU kernel as torch sees it: two doors to one call of the library that `build.py` makes.

`loss` is the eager door, an autograd.Function round one ctypes call; `loss_op` is the same behind torch.library, for
torch.compile. The call does everything: normalisation, value, gradient, reduction. Backward only scales the gradient.

**Conventions.** float32, bfloat16 or float16 logits on the CPU; arithmetic in float32 with sums in double; the gradient
of half-precision logits stays in float32 until backward has multiplied it, and is rounded once. `normalize`: one mean
and one standard deviation (unbiased; 1e-5 under the root) over the finite entries of the rows that count and hold no
NaN. A second backward and second derivatives recompute. Same bits on every run and with any number of threads.

**Threads** are torch's own: the library is handed GOMP_parallel from the OpenMP runtime that torch has loaded. Where
torch brings another runtime without that symbol, the kernel runs on the calling thread.
"""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from expacc.integrals.opaque import refuse_forward_mode
from expacc.kernels.build import LIBRARY

_VARIANTS = ("baseline", "avx2", "avx512")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_NOISES = {"gaussian": 0, "gumbel": 1}
_NORMALIZE = (False, True, "cap")
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_INTERFACE = 2  # EXPACC_INTERFACE of native/request.h
_REQUEST = struct.Struct("@28qd")  # expacc_request of native/request.h
_COMPLETION = struct.Struct("@18q")  # expacc_completion


class _Native(NamedTuple):
    loss: Any
    finish: Any
    variant: int
    parallel: int  # address of GOMP_parallel; 0: none


class _Failure(NamedTuple):
    reason: str


def _load(wanted: str | None) -> _Native | _Failure:
    # The variable names another build of the same library: the benchmark of the loss measures several.
    path = Path(os.environ.get("EXPACC_CPU_LIBRARY") or Path(__file__).with_name(LIBRARY))
    if not path.exists():
        return _Failure("it was not built; with a C compiler: python -m expacc.kernels.build")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return _Failure(f"it cannot be loaded: {error}")
    if not hasattr(library, "expacc_interface") or library.expacc_interface() != _INTERFACE:
        return _Failure("it was built from other sources; with a C compiler: python -m expacc.kernels.build")
    library.expacc_variants.restype = ctypes.c_int64
    present = [name for bit, name in enumerate(_VARIANTS) if library.expacc_variants() >> bit & 1]
    name = wanted or present[-1]
    if name not in present:
        return _Failure(f"EXPACC_CPU_VARIANT={name} does not run here; what does: {', '.join(present)}")
    library.expacc_loss.restype = ctypes.c_int64
    library.expacc_loss.argtypes = [ctypes.c_int64, ctypes.c_char_p]
    library.expacc_finish.restype = None
    library.expacc_finish.argtypes = [ctypes.c_int64, ctypes.c_char_p]
    return _Native(library.expacc_loss, library.expacc_finish, _VARIANTS.index(name), _find_parallel())


def _find_parallel() -> int:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch uses; 0 where it has none."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libomp.dylib", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            try:
                # Already loaded: this only looks it up, and the symbol is searched in what it depends on, too.
                return ctypes.cast(ctypes.CDLL(str(folder / name)).GOMP_parallel, ctypes.c_void_p).value or 0
            except (OSError, AttributeError):
                continue
    return 0


_current: _Native | _Failure | None = None


def _native() -> _Native | _Failure:
    global _current
    if _current is None:
        _current = _load(os.environ.get("EXPACC_CPU_VARIANT"))
    return _current


@contextmanager
def force_variant(name: str) -> Iterator[None]:
    """Use this instruction set inside the block, in every thread: for tests and benchmarks.

    Raises:
        ValueError: the kernel has no such variant, or this machine does not run it.
    """
    global _current
    before, chosen = _native(), _load(name)
    if isinstance(chosen, _Failure):
        raise ValueError(f"cannot use variant {name!r}: {chosen.reason}.")
    _current = chosen
    try:
        yield
    finally:
        _current = before


def available() -> bool:
    """Say whether the native kernel is there and runs on this machine."""
    return isinstance(_native(), _Native)


def unavailable_reason() -> str:
    """Return why the kernel is not available; "" where it is."""
    native = _native()
    return native.reason if isinstance(native, _Failure) else ""


def variant() -> str:
    """Return the instruction set in use: "avx512", "avx2" or "baseline"; "" without the kernel.

    The environment variable EXPACC_CPU_VARIANT chooses another one, read when the kernel is first used.
    """
    native = _native()
    return _VARIANTS[native.variant] if isinstance(native, _Native) else ""


def covers(logits: Tensor, target: Tensor, sigma: Tensor, power: Tensor, weight: Tensor | None) -> bool:
    """Say whether the kernel takes these tensors: dtypes, devices, and no gradient wanted but in logits and sigma."""
    others = (target, sigma, power) if weight is None else (target, sigma, power, weight)
    return (
        logits.dtype in _DTYPES
        and logits.dtype != torch.float64
        and all(tensor.device.type == "cpu" for tensor in (logits, *others))
        and not power.requires_grad
        and (weight is None or not weight.requires_grad)
    )


class _Options(NamedTuple):
    """What is not a tensor, in the order in which the doors take it."""

    margin: float | None
    noise: str
    normalize: bool | str
    ignore_index: int
    reduction: str


class _Outcome(NamedTuple):
    loss: Tensor
    grad: Tensor | None  # float32, shape of the logits, not yet multiplied by what comes from above
    sigma_grad: Tensor | None  # float64, per sample, likewise
    couple: Tensor | None  # float64: what the statistics' gradient needs where that is a vector


def _as_3d(x: Tensor) -> tuple[Tensor, int, int, int, int, int, int]:
    """Return a view (outer, classes, inner), a copy where there is none, with its sizes and strides."""
    if x.ndim == 2:
        shape, stride = x.shape, x.stride()
        return x, shape[0], 1, shape[1], stride[0], 0, stride[1]
    if x.ndim == 1:
        return x, 1, 1, x.shape[0], 0, 0, x.stride(0)
    flat = x.flatten(2) if x.ndim > 3 else x
    shape, stride = flat.shape, flat.stride()
    return flat, shape[0], shape[2], shape[1], stride[0], stride[2], stride[1]


def _gradient_like(logits: Tensor) -> Tensor:
    """Return an empty float32 tensor of the logits' shape, in their layout where that can be viewed as 3-D."""
    grad = torch.empty_like(logits, dtype=torch.float32)
    if grad.ndim > 3 and grad.flatten(2).data_ptr() != grad.data_ptr():
        grad = torch.empty(logits.shape, dtype=torch.float32)
    return grad


def _evaluate(
    logits: Tensor, target: Tensor, sigma: Tensor, power: Tensor, weight: Tensor | None, options: _Options,
    want_grad: bool, want_sigma: bool,
) -> _Outcome:  # fmt: skip
    """Call the library once."""
    native = _native()
    if isinstance(native, _Failure):
        raise RuntimeError(f"the native CPU kernel is not available: {native.reason}.")
    margin, noise, normalize, ignore_index, reduction = options
    x, outer, inner, classes, x_outer, x_inner, x_class = _as_3d(logits)
    target = _index_rows(target)
    if sigma.dtype not in (torch.float64, torch.float32):
        sigma = sigma.double()
    per_row = sigma.ndim > 0
    if per_row:
        sigma = sigma.contiguous()
    if power.dtype != torch.float64:
        power = power.double()
    if weight is not None and (weight.dtype not in (torch.float64, torch.float32) or not weight.is_contiguous()):
        weight = weight.double().contiguous()
    rows = outer * inner
    vector = reduction == "none"
    loss = torch.empty(target.shape if vector else (), dtype=logits.dtype)
    grad = couple = None
    g, g_outer, g_inner, g_class = 0, 0, 0, 0
    # The statistics couple the rows, so sigma's own gradient is the only one that can do without the logits'.
    if want_grad:
        grad = _gradient_like(logits)
        flat, _, _, _, g_outer, g_inner, g_class = _as_3d(grad)
        g = flat.data_ptr()
        if normalize and vector:
            couple = torch.empty(rows + 2, dtype=torch.float64)
    sigma_grad = torch.empty(target.shape, dtype=torch.float64) if want_sigma else None
    wrong = native.loss(
        native.variant,
        _REQUEST.pack(
            x.data_ptr(), _DTYPES[logits.dtype], outer, inner, classes, x_outer, x_inner, x_class,
            g, g_outer, g_inner, g_class,
            loss.data_ptr(), target.data_ptr(), ignore_index,
            0 if weight is None else weight.data_ptr(), 0 if weight is None else _DTYPES[weight.dtype],
            sigma.data_ptr(), _DTYPES[sigma.dtype], per_row, power.data_ptr(),
            _NOISES[noise], _NORMALIZE.index(normalize), _REDUCTIONS[reduction],
            0 if sigma_grad is None else sigma_grad.data_ptr(), 0 if couple is None else couple.data_ptr(),
            native.parallel, torch.get_num_threads(),
            float("inf") if margin is None else margin,
        ),
    )  # fmt: skip
    if wrong >= 0:
        from expacc._checks import raise_out_of_range

        position = tuple(int(i) for i in torch.unravel_index(torch.tensor(wrong), target.shape)) if target.ndim else ()
        raise_out_of_range(int(target[position]), position, classes, ignore_index)
    if wrong == -2:
        raise MemoryError("the native CPU kernel could not allocate its working memory")
    return _Outcome(loss, grad, sigma_grad, couple)


def _index_rows(target: Tensor) -> Tensor:
    if target.dtype != torch.int64:
        target = target.long()
    return target if target.is_contiguous() else target.contiguous()


def _complete(
    logits: Tensor, target: Tensor, grad: Tensor, couple: Tensor | None, upstream: Tensor, ignore_index: int
) -> None:
    """Multiply the rows of `grad` by `upstream`, and add what flows through the statistics, in place."""
    native = _native()
    assert isinstance(native, _Native)  # what made grad was there
    x, outer, inner, classes, x_outer, x_inner, x_class = _as_3d(logits)
    flat, _, _, _, g_outer, g_inner, g_class = _as_3d(grad)
    target = _index_rows(target)
    upstream = upstream.double().contiguous()
    native.finish(
        native.variant,
        _COMPLETION.pack(
            x.data_ptr(), _DTYPES[logits.dtype], outer, inner, classes, x_outer, x_inner, x_class,
            flat.data_ptr(), g_outer, g_inner, g_class, target.data_ptr(), ignore_index, upstream.data_ptr(),
            0 if couple is None else couple.data_ptr(), native.parallel, torch.get_num_threads(),
        ),
    )  # fmt: skip


class _Loss(torch.autograd.Function):
    """The eager door. Backward hands the gradient over; asked again, it computes it again."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, logits: Tensor, target: Tensor, sigma: Tensor, power: Tensor, weight: Tensor | None, options: _Options
    ) -> Tensor:
        wanted = ctx.needs_input_grad
        outcome = _evaluate(logits, target, sigma, power, weight, options, wanted[0], wanted[2])
        # A 0-dim σ and q are kept as numbers: a schedule may move the loss's own before backward.
        moves = sigma.ndim == 0 and not wanted[2]
        ctx.numbers = sigma.item() if moves else None, power.item()
        ctx.save_for_backward(logits, target, weight, None if moves else sigma)
        ctx.outcome, ctx.options = outcome[1:], options
        return outcome[0]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled() or _is_batched(upstream):
            return _differentiable_backward(ctx, upstream)
        outcome, ctx.outcome = ctx.outcome, None
        if outcome is None:
            wanted = ctx.needs_input_grad
            outcome = _evaluate(*_inputs(ctx), ctx.options, wanted[0], wanted[2])[1:]
        grad, sigma_grad, couple = outcome
        options: _Options = ctx.options
        if sigma_grad is not None:
            sigma_grad = sigma_grad * upstream
            sigma = ctx.saved_tensors[3]
            sigma_grad = (sigma_grad if sigma.ndim else sigma_grad.sum()).to(sigma.dtype)
        if grad is not None:
            if options.reduction == "none":
                logits, target = ctx.saved_tensors[:2]
                _complete(logits, target, grad, couple, upstream, options.ignore_index)
                dtype = logits.dtype
            else:
                dtype = upstream.dtype  # the loss's, which is the logits'
                if upstream.item() != 1.0:
                    grad.mul_(upstream)
            if dtype != torch.float32:
                grad = grad.to(dtype)
        return grad, None, sigma_grad, None, None, None


def _inputs(ctx: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return logits, target, sigma, power and weight as they were in forward."""
    logits, target, weight, sigma = ctx.saved_tensors
    number, power = (None if value is None else torch.tensor(value, dtype=torch.float64) for value in ctx.numbers)
    return logits, target, number if sigma is None else sigma, power, weight  # pyright: ignore[reportReturnType]


def _is_batched(tensor: Tensor) -> bool:
    """Say whether a tensor is vmap's: autograd.grad(is_grads_batched=True) and vectorised Jacobians send such ones."""
    return is_batchedtensor(tensor) or is_legacy_batchedtensor(tensor)


def _differentiable_backward(ctx: Any, upstream: Tensor) -> Any:
    """Return the gradients with a graph of their own, from the reference."""
    from expacc.functional import exact_loss  # which imports this module

    logits, target, sigma, power, weight = _inputs(ctx)
    margin, noise, normalize, ignore_index, reduction = ctx.options
    wanted = ctx.needs_input_grad
    again = torch.is_grad_enabled()  # not so where a batch of upstream gradients brought us here
    with torch.enable_grad():
        loss = exact_loss(
            logits, target, sigma, margin=margin, power=power, noise=noise, normalize=normalize, weight=weight,
            ignore_index=ignore_index, reduction=reduction, backend="reference",
        )  # fmt: skip
    inputs = [tensor for tensor, want in ((logits, wanted[0]), (sigma, wanted[2])) if want]
    grads = iter(torch.autograd.grad(loss, inputs, upstream, create_graph=again, allow_unused=True))
    return next(grads) if wanted[0] else None, None, next(grads) if wanted[2] else None, None, None, None


def loss(
    logits: Tensor, target: Tensor, sigma: Tensor, power: Tensor, *, margin: float | None = None,
    noise: str = "gaussian", normalize: bool | str = True, weight: Tensor | None = None, ignore_index: int = -100,
    reduction: str = "none",
) -> Tensor:  # fmt: skip
    """Return the loss of `expacc.functional.exact_loss` for class indices, from the native kernel: the eager door.

    Args:
        logits: (C,), (N, C) or (N, C, d1, …), float32, bfloat16 or float16, any strides.
        target: class indices of the samples' shape, any integer dtype.
        sigma: σ, 0-dim or of the samples' shape; may require a gradient.
        power: q, 0-dim.
        margin, noise, normalize, weight, ignore_index, reduction: as there.

    Returns:
        Loss in the logits' dtype. Differentiable any number of times; second derivatives come from the reference.

    Raises:
        IndexError: a target out of range.
        RuntimeError: the kernel is not available.
    """
    options = _Options(margin, noise, normalize, ignore_index, reduction)
    if torch.is_grad_enabled() and (logits.requires_grad or sigma.requires_grad):
        return _Loss.apply(logits, target, sigma, power, weight, options)  # pyright: ignore[reportReturnType]
    return _evaluate(logits, target, sigma, power, weight, options, False, False).loss


# ---- the door for torch.compile ----


@torch.library.custom_op("expacc::loss", mutates_args=())
def _loss_op(
    logits: Tensor, target: Tensor, sigma: Tensor, power: Tensor, weight: Tensor | None, margin: float | None,
    noise: str, normalize: int, ignore_index: int, reduction: str, want_grad: bool, want_sigma: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    options = _Options(margin, noise, _NORMALIZE[normalize], ignore_index, reduction)
    outcome = _evaluate(logits, target, sigma, power, weight, options, want_grad, want_sigma)
    grad = torch.empty(0) if outcome.grad is None else outcome.grad.contiguous()
    sigma_grad, couple = (torch.empty(0, dtype=torch.float64) if part is None else part for part in outcome[2:])
    return outcome.loss, grad, sigma_grad, couple


@_loss_op.register_fake
def _(logits, target, sigma, power, weight, margin, noise, normalize, ignore_index, reduction, want_grad, want_sigma):
    refuse_forward_mode()
    vector = reduction == "none"
    loss = logits.new_empty(target.shape if vector else ())
    grad = torch.empty(logits.shape if want_grad else (0,), dtype=torch.float32, device=logits.device)
    sigma_grad = grad.new_empty(target.shape if want_sigma else (0,), dtype=torch.float64)
    coupled = want_grad and normalize and vector
    return loss, grad, sigma_grad, grad.new_empty((target.numel() + 2 if coupled else 0,), dtype=torch.float64)


@torch.library.custom_op("expacc::loss_backward", mutates_args=())
def _backward_op(
    logits: Tensor, target: Tensor, grad: Tensor, couple: Tensor, upstream: Tensor, ignore_index: int
) -> Tensor:
    grad = grad.clone(memory_format=torch.contiguous_format)
    if upstream.ndim == 0 and target.ndim > 0:
        grad.mul_(upstream)
    else:
        _complete(logits, target, grad, couple if couple.numel() else None, upstream, ignore_index)
    return grad if grad.dtype == logits.dtype else grad.to(logits.dtype)


@_backward_op.register_fake
def _(logits, target, grad, couple, upstream, ignore_index):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    logits, target, sigma, *_ = inputs
    _, grad, sigma_grad, couple = output
    ctx.save_for_backward(logits, target, sigma, grad, sigma_grad, couple)
    ctx.mark_non_differentiable(grad, sigma_grad, couple)
    ctx.ignore_index, ctx.want_grad, ctx.want_sigma = inputs[8], inputs[10], inputs[11]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> Any:
    logits, target, sigma, grad, sigma_grad, couple = ctx.saved_tensors
    to_logits = to_sigma = None
    if upstream is not None and ctx.want_grad:
        to_logits = torch.ops.expacc.loss_backward(logits, target, grad, couple, upstream, ctx.ignore_index)
    if upstream is not None and ctx.want_sigma:
        to_sigma = sigma_grad * upstream
        to_sigma = (to_sigma if sigma.ndim else to_sigma.sum()).to(sigma.dtype)
    return to_logits, None, to_sigma, *[None] * 9


_loss_op.register_autograd(_backward, setup_context=_setup_context)


def loss_op(
    logits: Tensor, target: Tensor, sigma: Tensor, power: Tensor, *, margin: float | None = None,
    noise: str = "gaussian", normalize: bool | str = True, weight: Tensor | None = None, ignore_index: int = -100,
    reduction: str = "none",
) -> Tensor:  # fmt: skip
    """Return the same as `loss`, through `torch.ops.expacc.loss`: the door for torch.compile.

    sigma and power are tensors, so that moving them does not compile again. No second derivatives: they raise.
    """
    learning = torch.is_grad_enabled()
    return torch.ops.expacc.loss(
        logits, target, sigma, power, weight, margin, noise, _NORMALIZE.index(normalize), ignore_index, reduction,
        learning and logits.requires_grad, learning and sigma.requires_grad,
    )[0]  # fmt: skip
