"""Which path computes a loss: the one place that decides, and that can be watched deciding.

"reference" is the definition, torch operations in float64, any device, any transform. "cpu" is the native kernel. Both
give the same numbers within the contract of the logits' dtype.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from expacc.kernels import cpu

Path = Literal["reference", "cpu"]
_WATCHERS: ContextVar[tuple[list[str], ...]] = ContextVar("watchers", default=())
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # float64 goes to the reference: its contract is finer
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_told = False


class Call(NamedTuple):
    """What the choice depends on, besides the tensors themselves."""

    backend: str
    soft: bool
    sampled: bool
    nodes: int | str
    grouped: bool
    learned: bool  # power or weight wants a gradient


@contextmanager
def watch_paths() -> Iterator[list[str]]:
    """Collect the names of the paths that run inside the block, one per evaluation of a loss.

    >>> from expacc.functional import expected_error
    >>> with watch_paths() as paths:
    ...     _ = expected_error(torch.zeros(1, 2), torch.tensor([0]), backend="reference")
    >>> paths
    ['reference']
    """
    seen: list[str] = []
    token = _WATCHERS.set((*_WATCHERS.get(), seen))
    try:
        yield seen
    finally:
        _WATCHERS.reset(token)


def note_path(path: str) -> None:
    """Tell the watchers which path runs; a compiled graph has nobody to tell."""
    if torch.compiler.is_compiling():
        return
    for seen in _WATCHERS.get():
        seen.append(path)


def under_transform() -> bool:
    """Say whether a functorch transform or forward-mode AD is active."""
    # Neither has a public accessor; both are read the same way by torch's own compiler.
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _missing() -> str:
    """Return why there is no native kernel; "" where there is one. Looking for its file would break a graph."""
    return cpu.unavailable_reason()


# What torch.compiler.assume_constant_result does; calling it would import the compiler, a second at every start.
_missing._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def needs_operator(*tensors: Tensor | None) -> bool:
    """Say whether somebody watches operators: a compiler, a tracer, a dispatch mode, a tensor subclass.

    The eager door is one call with bare addresses. They would not see it, and fake tensors have no storage to read.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return True
    return not _PLAIN.issuperset(map(type, tensors))  # any() of a generator takes 1 % of a small batch's time


def _obstacle(logits: Tensor, target: Tensor, call: Call) -> str:
    """Return why the native kernel cannot take this call; "" where it can."""
    if call.soft:
        return "probability targets and label smoothing go through the reference"
    if call.sampled:
        return "sampled integrators have no kernel"
    if call.nodes != "auto":
        return f"nodes={call.nodes} needs the reference: the kernel chooses its own"
    if call.grouped:
        return "data_group needs the reference"
    if call.learned:
        return "the gradient of power or weight needs the reference"
    if logits.device.type != "cpu" or logits.dtype not in _DTYPES:
        return f"it takes CPU tensors of {', '.join(map(str, _DTYPES))}, not {logits.dtype} on {logits.device.type}"
    if not torch.compiler.is_compiling():
        if logits.is_neg():
            return "it reads memory as it is, and these logits are a lazily negated view"
        if under_transform():
            return "function transforms and forward-mode AD go through the reference"
    return _missing()


def choose_path(logits: Tensor, target: Tensor, call: Call) -> Path:
    """Return the path for this call.

    Raises:
        RuntimeError: backend="cpu" was asked for and cannot do it.
    """
    global _told
    if call.backend == "reference":
        return "reference"
    obstacle = _obstacle(logits, target, call)
    if not obstacle:
        return "cpu"
    if call.backend == "cpu":
        raise RuntimeError(f"backend='cpu' cannot take this call: {obstacle}. Write backend='auto'.")
    if not _told and not torch.compiler.is_compiling() and obstacle == _missing():
        _told = True
        warnings.warn(
            f"expacc's native CPU kernel is missing ({obstacle}): the results are the same, "
            "from the reference, but slower.",
            RuntimeWarning,
            stacklevel=3,
        )
    return "reference"
