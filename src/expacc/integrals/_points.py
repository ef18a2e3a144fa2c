"""The points of the sampled integrators, drawn from an explicit generator and from nothing else."""

from typing import Literal

import torch
from torch import Tensor

Sequence = Literal["random", "sobol"]

_SOBOL_BITS = 30  # SobolEngine's points are multiples of 2^-30


def check_sampling(samples: int, generator: torch.Generator | None, sequence: str = "random") -> torch.Generator:
    """Return the generator, or raise where the three arguments cannot be meant.

    Raises:
        TypeError: `samples` is not an integer or `generator` not a `torch.Generator`.
        ValueError: `generator` is None, `samples` is not positive or `sequence` is unknown.
    """
    if isinstance(samples, bool) or not isinstance(samples, int):
        raise TypeError(f"samples must be an integer, got {samples!r}: write for example samples=16.")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}: write for example samples=16.")
    if sequence not in ("random", "sobol"):
        raise ValueError(f"sequence must be 'random' or 'sobol', got {sequence!r}.")
    if generator is None:
        raise ValueError(
            "generator must be a torch.Generator, got None: the global random state is never read, "
            "write generator=torch.Generator().manual_seed(0)."
        )
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {type(generator).__name__}: "
            "write generator=torch.Generator().manual_seed(0)."
        )
    return generator


def check_floating(name: str, tensor: Tensor, ndim: int) -> None:
    """Raise unless `tensor` is a real floating-point tensor of at least `ndim` dimensions."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}: write torch.as_tensor({name}).")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {tensor.dtype}: write {name}.float().")
    if tensor.ndim < ndim:
        raise ValueError(f"{name} must have at least {ndim} dimension(s), got shape {tuple(tensor.shape)}.")


def draw_seed(generator: torch.Generator) -> int:
    """Draw the seed of a child generator: what is drawn from the child does not move its parent."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def spawn_generator(seed: int, device: torch.device) -> torch.Generator:
    """Return the child generator with this seed."""
    return torch.Generator(device).manual_seed(seed)


def draw_normals(shape: tuple[int, ...], generator: torch.Generator, *, like: Tensor) -> Tensor:
    """Draw independent standard normal numbers on the generator's device, in the dtype and on the device of `like`."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)


def draw_uniforms(
    steps: int, rows: int, samples: int, generator: torch.Generator, sequence: Sequence, *, like: Tensor
) -> Tensor:
    """Draw w in the open interval (0, 1), of shape (steps, rows, samples): a step's points lie side by side.

    "random": independent points. "sobol": one scrambled Sobol net of `samples` points in `steps` dimensions, with a
    digital shift of its own for every row. The shift (an exclusive or of the bits) keeps the net a net and makes each
    row's estimate unbiased; the rows share the scrambling. One scramble per row would cost a 30×30 bit matrix per
    row and dimension.

    The draw happens on the generator's device, so a CPU generator gives the same points for a tensor on any device.

    Args:
        steps: dimension of the cube.
        rows, samples: independent estimates, points per estimate.
        like: tensor whose dtype and device the points get.
    """
    dtype, device = like.dtype, generator.device
    eps = torch.finfo(dtype).eps
    if steps == 0:
        return like.new_empty(0, rows, samples)
    if sequence == "random":
        points = torch.rand(steps, rows, samples, generator=generator, device=device, dtype=dtype)
        # rand gives multiples of eps/2 from 0: half a step stands for the 0, which has no quantile
        return points.clamp_(min=eps / 4).to(like.device)
    if steps > torch.quasirandom.SobolEngine.MAXDIM:
        raise ValueError(
            f"sequence='sobol' has at most {torch.quasirandom.SobolEngine.MAXDIM} dimensions, "
            f"and {steps} are needed here: write sequence='random'."
        )
    engine = torch.quasirandom.SobolEngine(steps, scramble=True, seed=draw_seed(generator) % 2**31)
    net = (engine.draw(samples, dtype=torch.float64).T * 2**_SOBOL_BITS).long().to(device)
    shift = torch.randint(2**_SOBOL_BITS, (steps, rows, 1), generator=generator, device=device)
    points = (torch.bitwise_xor(net[:, None, :], shift).double() + 0.5) * 2.0**-_SOBOL_BITS
    return points.to(dtype).clamp_(max=1 - eps / 2).to(like.device)
