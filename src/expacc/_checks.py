"""Every check on user input, and every message. A message names the argument, says what arrived and what to write."""

import math
import operator
from collections.abc import Collection
from typing import Any, NoReturn

import torch
from torch import Tensor

NOISES = ("gaussian", "gumbel")
INTEGRATORS = ("quadrature", "genz", "monte_carlo")
REDUCTIONS = ("none", "mean", "sum")
BACKENDS = ("auto", "reference", "cpu")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_number(name: str, value: Any, example: str, *, positive: bool = False) -> None:
    """Raise unless ``value`` is a finite real number (and positive)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{name} must be a number, got {type(value).__name__}: write for example {name}={example}, "
            "or float(…) of a NumPy one."
        )
    # not math.isfinite: Dynamo cannot trace it on a float that it made symbolic
    if not -math.inf < value < math.inf or (positive and value <= 0):
        kind = "positive and finite" if positive else "finite"
        raise ValueError(f"{name} must be {kind}, got {value!r}: write for example {name}={example}.")


def check_flag(name: str, value: Any) -> None:
    """Raise unless ``value`` is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name} must be True or False, got {describe(value)}.")


def check_normalize(normalize: Any) -> None:
    """Raise unless `normalize` is True, False or "cap"."""
    if normalize is not True and normalize is not False and not (isinstance(normalize, str) and normalize == "cap"):
        raise TypeError(
            f'normalize must be "cap" (divide the logits by their spread where it exceeds 1), True (always divide) or '
            f"False, got {describe(normalize)}."
        )


def check_margin(margin: Any) -> None:
    """Raise unless the margin is None or a finite number."""
    if margin is not None:
        check_number("margin", margin, "0.5 (None: no margin)")


def check_nodes(nodes: Any) -> None:
    """Raise unless ``nodes`` is "auto" or an integer of at least 2."""
    if isinstance(nodes, str) and nodes == "auto":
        return
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 2:
        raise ValueError(f"nodes must be 'auto' or an integer of at least 2, got {nodes!r}.")


def check_smoothing(label_smoothing: Any, margin: float | None) -> None:
    """Raise unless the smoothing is in [0, 1] and not combined with a margin."""
    check_number("label_smoothing", label_smoothing, "0.1")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing!r}.")
    if label_smoothing > 0 and margin is not None:
        refuse_soft_margin(f"label_smoothing={label_smoothing!r}", margin)


def refuse_soft_margin(what: str, margin: float) -> NoReturn:
    """Raise: a margin is a property of the one true class, and differs with it."""
    raise ValueError(
        f"{what} cannot be combined with margin={margin!r}: the margin differs by target class. "
        "Write margin=None, or class-index targets without label_smoothing."
    )


def check_power(power: Any) -> None:
    """Raise unless ``power`` is a finite number or a 0-dim floating-point tensor."""
    if isinstance(power, Tensor):
        if power.ndim != 0 or not power.is_floating_point():
            raise ValueError(
                f"power must be a number or a 0-dim floating-point tensor, got shape {tuple(power.shape)} "
                f"and dtype {power.dtype}."
            )
        return
    check_number("power", power, "0.3 (1: expected error, 0: −log P)")


def check_sigma(sigma: Any, logits: Tensor) -> None:
    """Raise unless ``sigma`` is a positive number, a 0-dim tensor, or a tensor with one value per sample.

    The values of a tensor are not read: that would make the host wait for the device.
    """
    if not isinstance(sigma, Tensor):
        check_number("sigma", sigma, "1.0", positive=True)
    elif not sigma.is_floating_point():
        raise TypeError(f"sigma must be floating point, got {sigma.dtype}: write sigma.float().")
    elif sigma.ndim and sigma.shape != sample_shape(logits):
        raise ValueError(
            "sigma must be a number, a 0-dim tensor or have one value per sample, "
            f"shape {tuple(sample_shape(logits))}; got shape {tuple(sigma.shape)}."
        )


def check_logits(logits: Any) -> None:
    """Raise unless ``logits`` is a floating-point tensor with a class dimension."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits).__name__}: write torch.as_tensor(logits).")
    if logits.dtype not in _FLOATS:
        raise TypeError(f"logits must be float32, float64, bfloat16 or float16, got {logits.dtype}: write .float().")
    if logits.layout != torch.strided or logits.is_nested:
        kind = "a nested tensor: write logits.to_padded_tensor(float('-inf'))"
        if not logits.is_nested:
            kind = f"layout {logits.layout}: write logits.to_dense()"
        raise TypeError(f"logits must be a dense tensor, got {kind}.")
    if logits.ndim == 0 or class_count(logits) == 0:
        raise ValueError(
            f"logits must have a class dimension of at least 1, (C,), (N, C) or (N, C, d1, …); "
            f"got shape {tuple(logits.shape)}."
        )


def class_count(logits: Tensor) -> int:
    """Return C: dimension 1, or 0 where unbatched."""
    return logits.shape[1 if logits.ndim > 1 else 0]


def sample_shape(logits: Tensor) -> tuple[int, ...]:
    """Return the shape of the samples: that of ``logits`` without its class dimension."""
    return logits.shape[:1] + logits.shape[2:] if logits.ndim > 1 else logits.shape[:0]


def check_target(logits: Tensor, target: Any, ignore_index: int) -> bool:
    """Raise unless ``target`` fits ``logits``; return whether it holds class probabilities."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}: write torch.as_tensor(target).")
    check_ignore_index(ignore_index)
    if target.layout != torch.strided:
        raise TypeError(f"target must be a dense tensor, got layout {target.layout}: write target.to_dense().")
    if target.device != logits.device:
        raise ValueError(
            f"target is on {target.device} and logits on {logits.device}: write target.to({str(logits.device)!r})."
        )
    shape = sample_shape(logits)
    if target.dtype in _INTEGERS:
        if target.shape != shape:
            raise ValueError(
                f"target of class indices must have shape {tuple(shape)} for logits of shape {tuple(logits.shape)}, "
                f"got {tuple(target.shape)}."
            )
        return False
    if not target.is_floating_point():
        raise TypeError(f"target must hold integers or class probabilities, got {target.dtype}: write target.long().")
    if target.shape != logits.shape:
        raise ValueError(
            f"target of floating point holds class probabilities and must have logits' shape {tuple(logits.shape)}, "
            f"got {tuple(target.shape)}; for class indices write target.long()."
        )
    if ignore_index >= 0:
        raise ValueError(
            f"ignore_index={ignore_index} has no meaning with probability targets: leave it out, "
            "and give the rows to ignore probabilities of 0."
        )
    return True


def check_ignore_index(ignore_index: Any) -> None:
    """Raise unless ``ignore_index`` is an integer."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int) or not -(2**63) <= ignore_index < 2**63:
        raise TypeError(
            f"ignore_index must be an integer, got {ignore_index!r}: write for example ignore_index=-100 (64 bits)."
        )


def check_weight_form(weight: Any) -> None:
    """Raise unless ``weight`` is None or a vector of floating point: what can be said without the logits."""
    if weight is None:
        return
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise TypeError(f"weight must be a floating-point tensor of one number per class, got {describe(weight)}.")
    if weight.ndim != 1:
        raise ValueError(f"weight must have one number per class, shape (C,); got shape {tuple(weight.shape)}.")


def check_weight(weight: Any, logits: Tensor) -> None:
    """Raise unless ``weight`` is None or one number per class on the logits' device."""
    check_weight_form(weight)
    if weight is None:
        return
    if weight.shape != (class_count(logits),):
        raise ValueError(
            f"weight must have one number per class, shape ({class_count(logits)},); got shape {tuple(weight.shape)}."
        )
    if weight.device != logits.device:
        raise ValueError(
            f"weight is on {weight.device} and logits on {logits.device}: write loss.to({str(logits.device)!r})."
        )


def raise_out_of_range(value: int, position: tuple[int, ...], classes: int, ignore_index: int) -> NoReturn:
    """Raise the IndexError that CrossEntropyLoss raises, saying which value and where."""
    where = f"target[{', '.join(map(str, position))}]" if position else "target"
    raise IndexError(
        f"{where} is {value}, outside 0 … {classes - 1} and not ignore_index={ignore_index}: "
        "check the labels, or the number of classes of the model."
    )


def describe(value: Any) -> str:
    """Say what a value is, for a message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return type(value).__name__


def check_sampled(integrator: str, noise: str, soft: bool) -> None:
    """Raise unless a sampled integrator can do what is asked."""
    if noise != "gaussian":
        raise ValueError(f"integrator={integrator!r} samples Gaussian noise only, got noise={noise!r}.")
    if soft:
        raise ValueError(
            f"integrator={integrator!r} takes class indices without label_smoothing: "
            "write integrator='quadrature' for class probabilities."
        )


def check_generator(integrator: str, samples: Any, generator: Any) -> None:
    """Raise unless a sampled integrator has a number of points and a generator."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples must be an integer of at least 1, got {samples!r}: write for example samples=16.")
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"integrator={integrator!r} needs generator=torch.Generator().manual_seed(0), got {describe(generator)}: "
            "the global random state is never read."
        )


def as_state(name: str, value: Any, *, positive: bool = False) -> Tensor:
    """Return a number as a 0-dim float64 tensor of its own."""
    if isinstance(value, Tensor):
        if value.ndim != 0 or not value.is_floating_point():
            raise ValueError(f"{name} must be a number or a 0-dim floating-point tensor, got {describe(value)}.")
        if value.device.type == "cpu":  # elsewhere looking would wait for the device
            check_number(name, value.item(), "1.0" if positive else "0.3", positive=positive)
        return value.detach().to(torch.float64, copy=True)
    check_number(name, value, "1.0" if positive else "0.3", positive=positive)
    return torch.tensor(value, dtype=torch.float64)


def check_steps(name: str, value: Any) -> int:
    """Return a positive whole number, NumPy's too, as Python's own; raise where it is none."""
    steps = as_whole(name, value, "len(loader) * epochs")
    if steps <= 0:
        raise ValueError(f"{name} must be positive, got {value}: write for example {name}=len(loader) * epochs.")
    return steps


def check_epoch(name: str, value: Any) -> int:
    """Return a whole number of at least -1, as the schedulers of torch begin."""
    epoch = as_whole(name, value, "-1 (begin)")
    if epoch < -1:
        raise ValueError(f"{name} must be at least -1, got {value}: write for example {name}=-1 (begin).")
    return epoch


def as_whole(name: str, value: Any, example: str) -> int:
    """Return a whole number as Python's own; raise where it is none."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, got {value!r}: write for example {name}={example}.")


def check_scheduled(loss: Any, attribute: str) -> None:
    """Raise unless the loss has the number that a schedule is to move."""
    if not hasattr(loss, attribute):
        raise TypeError(
            f"loss must have {attribute}, which the schedule moves; {type(loss).__name__} has none: "
            "write for example loss=ExactLoss()."
        )


def check_ends(name: str, ends: Any, schedule: str) -> None:
    """Raise unless ``ends`` is None or two numbers between which the schedule can move."""
    if ends is None:
        return
    if not (isinstance(ends, tuple | list) and len(ends) == 2):
        raise TypeError(f"{name} must be a pair (first, last) or None, got {ends!r}: write for example {name}=(10, 1).")
    if any(isinstance(end, bool) or not isinstance(end, int | float) for end in ends):
        raise TypeError(
            f"{name} must be a pair of numbers (first, last), got {ends!r}: write for example {name}=(10, 1), or "
            "float(…) of NumPy's."
        )
    positive = name == "sigma"
    if not all(math.isfinite(end) for end in ends) or (positive and min(ends) <= 0):
        kind = "positive and finite" if positive else "finite"
        raise ValueError(f"{name} must be {kind} at both ends, got {ends!r}: write for example {name}=(10, 1).")
    if schedule == "exponential" and min(ends) <= 0:
        raise ValueError(
            f"{name}={ends!r} cannot be reached exponentially, by factors: write schedule='linear' or 'cosine', or two "
            "positive ends."
        )


def check_fraction(name: str, value: Any, example: str) -> None:
    """Raise unless ``value`` lies in [0, 1)."""
    check_number(name, value, example)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must lie in [0, 1), got {value!r}: write for example {name}={example}.")


def check_inside(name: str, value: Any, example: str) -> None:
    """Raise unless ``value`` lies in (0, 1)."""
    check_number(name, value, example)
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} must lie in (0, 1), got {value!r}: write for example {name}={example}.")


def check_not_negative(name: str, value: Any, example: str) -> None:
    """Raise unless ``value`` is a finite number of at least 0."""
    check_number(name, value, example)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value!r}: write for example {name}={example}.")


def check_optimizer(optimizer: Any) -> None:
    """Raise unless ``optimizer`` is one whose steps use gradients that are there before."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        hint = ""
        if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
            hint = " The optimizer comes first, the scheduler after it: write scheduler.optimizer."
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.{hint}")
    if any("LBFGS" in cls.__name__ for cls in type(optimizer).__mro__):  # other libraries have their own
        raise TypeError(
            f"optimizer must not be {type(optimizer).__name__}: it asks for gradients within its step, after the hooks "
            "have run. Write SGD or Adam; for a linear model see ExactClassifier."
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError("optimizer has no parameters: make it with model.parameters() first.")


_CLIPS = ("max_grad_norm", "clip_grad_norm", "max_norm", "gradient_clip_val", "clip_value")


def check_normalizable(optimizer: torch.optim.Optimizer) -> None:
    """Raise where the optimizer clips gradients itself, or where one process cannot know their norm."""
    for group in optimizer.param_groups:
        if any(map(_is_flat_shard, group["params"])):
            raise ValueError(
                "optimizer holds parameters of FullyShardedDataParallel (FSDP1), whose shards do not say that they "
                "are shards: every rank would divide by a norm of its own. Write fully_shard(model) (FSDP2), or "
                "attach(…, normalize_gradient=False)."
            )
        for name in _CLIPS:
            if isinstance(value := group.get(name), int | float) and value > 0:
                raise ValueError(
                    f"{type(optimizer).__name__} clips gradients ({name}={value:g}), and a normalised gradient has "
                    f"norm about 1: write {name}=0, or normalize_gradient=False."
                )


def _is_flat_shard(parameter: Any) -> bool:
    """Say whether FSDP1 made this parameter: its own, or with use_orig_params=True the one that looks like before."""
    return getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False)


def refuse_second_attachment(optimizer: Any, same_loss: bool) -> NoReturn:
    """Raise: σ would move twice a step, or the gradient be normalised twice."""
    cure = "call its detach() first, or attach once."
    if not same_loss:
        cure = (
            "for both to follow one schedule, make them one ExactLoss and call it twice; otherwise move the second by "
            "hand, ExponentialSigma(loss, 10, 1, total_steps) and its step() after optimizer.step()."
        )
    whose = "" if same_loss else ", to another loss"
    raise ValueError(f"this {type(optimizer).__name__} has an attachment already{whose}: {cure}")


def refuse_second_mover(name: str, optimizer: Any, step: int, total_steps: int) -> NoReturn:
    """Raise: two attachments would write one number in turns."""
    raise ValueError(
        f"this loss's {name} is moved already, by the attachment to {type(optimizer).__name__} (step {step} of "
        f"{total_steps}): call that one's detach() first, or leave it the {name} and write attach(…, {name}=None) here."
    )


def refuse_recipe_power(recipe: str, power: Any) -> NoReturn:
    """Raise: what the recipe sets would be moved at once."""
    raise ValueError(
        f"recipe={recipe!r} sets q = 1 and power={power!r} moves q: leave one of them out. The recipe's other settings "
        "are attach's defaults."
    )


def refuse_second_normalizer(optimizer: torch.optim.Optimizer) -> NoReturn:
    """Raise: what is divided by its norm already would be divided by 1, and the first would see the second's work."""
    raise ValueError(
        f"the gradients of this {type(optimizer).__name__} are normalised already, by a GradientNormalizer or by "
        "attach: keep one. Call the other's detach(), or write attach(…, normalize_gradient=False)."
    )


def check_keys(what: str, given: Any, wanted: Any) -> None:
    """Raise unless a state has exactly the keys that this class saves."""
    if set(given) != set(wanted):
        has, needs = (", ".join(map(repr, keys)) or "nothing" for keys in (given, wanted))
        raise KeyError(f"the state of {what} has {has}; it needs {needs}.")
