r"""The largest error of log Φ, λ = φ/Φ and x + λ, in units in the last place, with the input that gives it.

    error(x) = |computed(x) − f(x)| / ulp(f(x)),    ulp(y) = 2^(max(⌊log₂|y|⌋, e_min) − p + 1) of the dtype

so that rounding correctly is 0.5 at most. f(x) comes from ball arithmetic (python-flint) as a sum of two doubles.
bfloat16 and float16: every finite value and both infinities. float32 and float64: every exponent and sign with random
mantissas, the ends of each binade, and a uniform sweep where the functions bend.

The record may only go down: a run whose maxima are above those of the file it would replace leaves it alone.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from flint import arb, ctx
from torch import Tensor

from benchmarks import RESULTS
from benchmarks.tables import special_table
from expacc.integrals.normal import excess, hazard, log_cdf
from expacc.studies import CommandError
from expacc.studies.records import Record, begin_record
from expacc.studies.report import print_table, track

CLAIM = "log Φ, λ = φ/Φ and x + λ are within a few ULP of the truth for every input of every dtype."
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
BEND = (-60.0, 40.0)  # beyond, the functions are their asymptotes or 0 in every dtype
SEED = 20250101
FUNCTIONS = ("log_cdf", "hazard", "excess")


def _torch_hazard(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(torch.special.log_ndtr(x).sum(), x)
    return slope


# (method, function) → what computes it
CANDIDATES: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("expacc", "log_cdf"): log_cdf,
    ("expacc", "hazard"): hazard,
    ("expacc", "excess"): excess,
    ("torch.special.log_ndtr", "log_cdf"): torch.special.log_ndtr,
    ("torch.special.log_ndtr", "hazard"): _torch_hazard,
}


def sweep(name: str, points: int, seed: int = SEED) -> Tensor:
    """Return the inputs for a dtype: all of them up to 16 bits, else about `points`, sorted and without repeats.

    >>> sweep("float16", 0).numel()  # 2^16 patterns less the NaNs, 0 and −0 counted once
    63489
    """
    dtype = DTYPES[name]
    if torch.finfo(dtype).bits == 16:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).double()
        return torch.unique(values[~values.isnan()]).to(dtype)
    pick = np.random.Generator(np.random.PCG64(seed))
    whole, float_type = (np.uint32, np.float32) if name == "float32" else (np.uint64, np.float64)
    bits = 23 if name == "float32" else 52
    top = 2 ** (8 if name == "float32" else 11) - 1  # the exponent of inf and NaN
    each = max(3, points // (4 * top))
    mantissa = pick.integers(0, 2**bits, (top, each), dtype=np.uint64)
    mantissa[:, 0], mantissa[:, 1] = 0, 2**bits - 1
    pattern = (np.arange(top, dtype=np.uint64)[:, None] << np.uint64(bits)) | mantissa
    wide = pattern.astype(whole).view(float_type).ravel()
    bend = pick.uniform(*BEND, max(points // 2, 64)).astype(float_type)
    every = np.concatenate([wide, -wide, bend, np.array([np.inf, -np.inf], float_type)])
    return torch.from_numpy(np.unique(every))


def truth(x: float) -> tuple[arb, arb, arb]:
    """Return log Φ, λ and x + λ at a finite x as balls of relative radius below 1e-20.

    With t = −x ≥ 0 and the scaled erfcx(t/√2) = U(½, ½, t²/2)/√π nothing under- or overflows on the left.

    >>> [value.str(12, radius=False) for value in truth(-1e200)]
    ['-5.00000000000e+399', '1.00000000000e+200', '1.00000000000e-200']
    """
    ctx.prec = 192
    exact = arb(x)
    root = (2 / arb.pi()).sqrt()
    if x > 60:  # Φ(−60) is below 1e-783
        return arb(0), arb(0), exact
    if x > 0:
        upper = (exact / arb(2).sqrt()).erfc() / 2
        rate = (-exact * exact / 2).exp() * root / 2 / (1 - upper)
        return (-upper).log1p(), rate, exact + rate
    half = exact * exact / 2
    if x > -20:
        scaled = half.exp() * (-exact / arb(2).sqrt()).erfc()
    else:
        scaled = half.hypgeom_u(arb(0.5), arb(0.5)) / arb.pi().sqrt()
    rate = root / scaled
    # x + λ = 1/t − 2/t³ + …: from 1e16 on the second term is below the ball's radius, and the sum would cancel
    return (scaled / 2).log() - half, rate, exact + rate if x > -1e16 else -1 / exact


def _pair(value: arb) -> tuple[float, float]:
    """Split into the nearest double and the rest."""
    high = float(value)
    return (high, float(value - arb(high))) if math.isfinite(high) else (high, 0.0)


def true_values(x: Tensor, progress: str = "") -> dict[str, tuple[Tensor, Tensor]]:
    """Return function → (high, low) parts of the truth at every x, infinities by their limits."""
    limits = {math.inf: (0.0, 0.0, math.inf), -math.inf: (-math.inf, math.inf, 0.0)}
    inputs: Iterator[float] = track(x.double().tolist(), progress) if progress else iter(x.double().tolist())
    rows = [
        [(limit, 0.0) for limit in limits[value]] if math.isinf(value) else [_pair(ball) for ball in truth(value)]
        for value in inputs
    ]
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3, 2)
    return {name: (table[:, i, 0], table[:, i, 1]) for i, name in enumerate(FUNCTIONS)}


def ulp_errors(got: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Return the error of every value in ULP of its dtype; NaN where an infinity or a NaN has no right to be.

    >>> one = torch.tensor([1.0], dtype=torch.float64)
    >>> ulp_errors(torch.tensor([1.0 + 2**-22]), one, one * 2**-24).item()
    1.5
    """
    info = torch.finfo(got.dtype)
    _, exponent = torch.frexp(high.abs())  # |high| = f·2^e with f in [½, 1)
    _, least = torch.frexp(torch.tensor(info.tiny, dtype=torch.float64))
    last = torch.maximum(exponent, least) - 1
    precision = round(-math.log2(info.eps))
    # in two steps, as the ulp of a subnormal double's neighbourhood is itself subnormal and its inverse overflows
    error = ((got.double() - high) - low).abs()
    error = torch.ldexp(torch.ldexp(error, -last // 2), precision - last - (-last // 2))
    # the halves are integers that add up; ldexp is exact here, as nothing leaves the normal range downwards
    overflow = got.isinf() & (got.double().sign() == high.sign()) & (high.abs() > info.max)
    return torch.where(overflow, 0.0, torch.where(got.isfinite(), error, math.nan))


def measure(method: str, function: str, x: Tensor, high: Tensor, low: Tensor) -> dict:
    """Return one row of the record: the largest finite error, its input, and what came out infinite or NaN."""
    row: dict = {"method": method, "function": function, "dtype": str(x.dtype).removeprefix("torch."), "metric": "ulp"}
    row |= {"value": None, "at": None, "points": x.numel(), "broken": 0, "broken_at": None}
    start = time.perf_counter()
    try:
        got = CANDIDATES[method, function](x).detach()
    except (RuntimeError, NotImplementedError) as error:
        return row | {"reason": f"refused: {str(error).splitlines()[0]}", "seconds": 0.0}
    seconds = time.perf_counter() - start
    error = ulp_errors(got, high, low)
    broken = error.isnan()
    worst = int(torch.where(broken, -1.0, error).argmax())
    row |= {"value": round(error[worst].item(), 3), "at": _plain(x[worst].item()), "broken": int(broken.sum())}
    if broken.any():
        # the one nearest to 0: from there on outwards the function cannot be used
        row["broken_at"] = _plain(x[broken][x[broken].double().abs().argmin()].item())
    return row | {"seconds": round(seconds, 4)}


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def measure_all(points: int, dtypes: tuple[str, ...] = tuple(DTYPES), progress: bool = False) -> list[dict]:
    """Return the rows of every candidate over the sweeps."""
    rows = []
    for name in dtypes:
        x = sweep(name, points)
        known = true_values(x, f"truth, {name}" if progress else "")
        rows += [measure(method, function, x, *known[function]) for method, function in CANDIDATES]
    return rows


def risen(new: Record, old: Record) -> list[str]:
    """Name the maxima of this package that are above those of an older record."""
    text = []
    for row in (row for row in new.rows if row["method"] == "expacc"):
        key = {name: row[name] for name in ("method", "function", "dtype")}
        before = old.value(**key)
        if before is not None and (row["broken"] or row["value"] > before):
            text.append(f"{row['function']} in {row['dtype']}: {before} before, {row['value']} now, at {row['at']!r}")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `special`."""
    parser.add_argument("--quick", action="store_true", help="a few thousand inputs, to see that it runs")
    parser.add_argument("--points", type=int, default=400_000, help="inputs for float32 and for float64 each")
    parser.add_argument("--out", type=Path, default=RESULTS / "special.json")
    parser.add_argument("--accept", action="store_true", help="replace a record whose maxima were lower")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the record unless it got worse."""
    record = begin_record(CLAIM, "python -m benchmarks special" + (" --quick" if args.quick else ""))
    rows = measure_all(2000 if args.quick else args.points, progress=True)
    for row in rows:
        record.add(**row)
    print_table(special_table(record))
    if args.out.exists() and not args.accept:
        worse = risen(record, Record.read(args.out))
        if worse:
            raise CommandError(f"{args.out.name} may only go down and is left alone; " + "; ".join(worse))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record.write(args.out)
    return 0
