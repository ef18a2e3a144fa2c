"""Families of score rows on which the integral is tested: recipes, not data.

A row of 100 000 scores is a name, a family and a few numbers; `scores` rebuilds it bit for bit on every machine,
because it uses a counter generator (splitmix64), exact sums and correctly rounded operations only, no libm.
Scores are float32 values, so one certified truth serves float32 and float64; sigma and margin are doubles.

A family returns the row in units of sigma, as (u, target). `scaled` multiplies u by sigma before rounding to float32,
so that the ratio mu/sigma stays interesting at every sigma; `offset` is a common shift of the row.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

CLASSES = (2, 3, 10, 100, 1000, 100_000)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Case:
    """One row: `family(classes, **params)` in units of sigma, with its sigma and margin."""

    name: str
    family: str
    classes: int
    sigma: float = 1.0
    margin: float | None = None
    scaled: bool = True
    offset: float = 0.0
    params: dict[str, Any] = field(default_factory=dict)


def draw_bits(seed: int, count: int, stream: int = 0) -> np.ndarray:
    """Return `count` 64-bit words, splitmix64 of (seed, stream, index).

    >>> hex(int(draw_bits(0, 1)[0]))
    '0xe220a8397b1dcdaf'
    """
    start = np.uint64((seed + (stream << 40)) % 2**64)
    with np.errstate(over="ignore"):
        x = start + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw_bell(seed: int, count: int, lattice: float | None = None) -> np.ndarray:
    """Return bell-shaped values of mean 0 and variance 1: twelve 32-bit uniforms minus 6, an exact sum.

    With `lattice` (a power of two) they are rounded to its multiples: few distinct values, cheap to certify.
    """
    halves = [(draw_bits(seed, count, s), s) for s in range(1, 7)]
    total = sum((w >> np.uint64(32)).astype(np.float64) + (w & np.uint64(2**32 - 1)) for w, _ in halves)
    bell = np.asarray(total) / 2.0**32 - 6.0
    return bell if lattice is None else np.round(bell / lattice) * lattice


def _place(seed: int, head: np.ndarray | list[float], rest: np.ndarray) -> tuple[np.ndarray, int]:
    """Shuffle the row [*head, *rest], whose first entry is the target."""
    row = np.concatenate([np.asarray(head, dtype=np.float64), rest])
    order = np.argsort(draw_bits(seed, len(row), 99), kind="stable")
    return row[order], int(np.flatnonzero(order == 0)[0])


def random_row(classes: int, *, scale: float, seed: int, rank: float | None = None, lattice: float | None = None):
    """Bell-shaped scores; the target is anyone, or the class at quantile `rank` (1 is the top)."""
    u = scale * draw_bell(seed, classes, lattice)
    target = int(draw_bits(seed, 1, 50)[0] % np.uint64(classes))
    if rank is not None:
        target = int(np.argsort(u, kind="stable")[round(rank * (classes - 1))])
    return u, target


def lead_row(classes: int, *, lead: float, seed: int = 0, spread: float = 0.0, lattice: float | None = None):
    """The target `lead` above the best other class; the others equal, or falling away over `spread`.

    lead > 0 is a trained model (the narrow flank), 0 equal scores, −10 to −1e4 a wrong row, 10 to 1e4 a right one.
    """
    fall = np.abs(draw_bell(seed + 7, classes - 1, lattice))
    return _place(seed, [lead], -spread * (fall - fall.min()))


def two_group_row(classes: int, *, a: float, b: float, count: int, seed: int = 0):
    """`count` competitors at m = a and the others at m = b: the target stands a, or b, above them."""
    others = np.full(classes - 1, -float(b))
    others[: min(count, classes - 1)] = -float(a)
    return _place(seed, [0.0], others)


def mixture_row(
    classes: int, *, levels: list[float], shares: list[int], width: float, seed: int, lattice: float = 0.125
):
    """Clusters of competitors around target − level, in proportion to `shares`, each of the given width."""
    ids = np.repeat(np.arange(len(levels)), shares)
    pick = ids[(draw_bits(seed, classes - 1, 3) % np.uint64(len(ids))).astype(np.int64)]
    return _place(seed, [0.0], width * draw_bell(seed, classes - 1, lattice) - np.asarray(levels)[pick])


def near_tie_row(classes: int, *, gap: float, seed: int, below: float = 3.0, lattice: float | None = None):
    """The target and one rival `gap` apart, the others `below` and further down."""
    fall = np.abs(draw_bell(seed, classes - 2, lattice)) if classes > 2 else np.empty(0)
    return _place(seed, [0.0, gap], -below - fall)


FAMILIES: dict[str, Callable[..., tuple[np.ndarray, int]]] = {
    "random": random_row,
    "lead": lead_row,
    "two-group": two_group_row,
    "mixture": mixture_row,
    "near-tie": near_tie_row,
}


def scores(case: Case) -> tuple[np.ndarray, int]:
    """Return the float32 scores (C) of a case and its target."""
    u, target = FAMILIES[case.family](case.classes, **case.params)
    return (u * (case.sigma if case.scaled else 1.0) + case.offset).astype(np.float32), target


def fingerprint(case: Case) -> int:
    """Return a checksum of the row, target, sigma and margin: a truth belongs to exactly one input."""
    row, target = scores(case)
    return zlib.crc32(row.tobytes() + repr((target, case.sigma, case.margin)).encode())


def margin_terms(case: Case, row: np.ndarray, target: int) -> np.ndarray:
    """Return m_i = min(mu_y − mu_i, r)/sigma (C − 1) of all competitors in double precision."""
    gap = float(row[target]) - np.delete(row.astype(np.float64), target)
    return (gap if case.margin is None else np.minimum(gap, case.margin)) / case.sigma


def _named(stem: str, family: str, classes: int, variants: Iterator[dict] | list[dict] = (), **params) -> list[Case]:  # type: ignore[assignment]
    """One case per variant of sigma, margin, scaled and offset, with a name that says what differs."""
    made = []
    for v in list(variants) or [{}]:
        tags = [f"{stem}-C{classes}"] + [f"{k}{v[k]:g}" for k in ("sigma", "margin", "offset") if k in v]
        tags += ["raw"] if v.get("scaled") is False else []
        made.append(Case("-".join(tags), family, classes, params=params, **v))
    return made


def _lattice(classes: int, fine: float = 0.0625) -> float | None:
    return fine if classes > 1000 else None


def cases() -> list[Case]:
    """Return every committed case, some 330 of them, in a fixed order."""
    out: list[Case] = []
    for c in CLASSES:
        big, seed = c > 1000, 1000 + c
        for k, scale in enumerate((0.3, 2.0, 8.0)):
            fine = (1 / 256, 1 / 64, 1 / 32)[k]
            out += _named(f"random{scale:g}", "random", c, scale=scale, seed=seed + k, lattice=_lattice(c, fine))
        for rank in (1.0, 0.5, 0.0):
            out += _named(
                f"random2-rank{rank:g}", "random", c, scale=2.0, seed=seed + 9, rank=rank, lattice=_lattice(c)
            )
        for lead in (0, -10, -100, -1e4, 10, 1e4):
            out += _named(f"lead{lead:g}-equal", "lead", c, lead=float(lead))
        for lead in (-10, -100, 10) if c > 2 else ():
            out += _named(
                f"lead{lead:g}-spread", "lead", c, lead=float(lead), spread=3.0, seed=seed, lattice=_lattice(c)
            )
        for lead in (2, 3, 4, 5, 6):
            out += _named(f"lead{lead}-equal", "lead", c, lead=float(lead))
            if c > 2:
                params: dict[str, Any] = {"lead": float(lead), "spread": 2.0, "seed": seed, "lattice": _lattice(c)}
                out += _named(f"lead{lead}-spread", "lead", c, **params)
        pairs = [(-8, 12), (-8, 0), (-3, 5), (-3, 2), (0, 12), (0, 4), (2, 8), (3, 5), (5, 12), (8, 12)]
        for a, b in pairs if c > 2 else []:
            for count in {1, (c - 1) // 2} if c > 3 and not big else {1 if (a + b) % 2 else max(1, (c - 1) // 20)}:
                out += _named(f"two-{a}x{count}-{b}", "two-group", c, a=a, b=b, count=count)
        for gap in (0.0, 1e-6, -1e-3):
            out += _named(f"tie{gap:g}", "near-tie", c, gap=gap, seed=seed, lattice=_lattice(c))
        if c >= 10:
            kinds = [([0, 6], [1, 9], 0.5), ([-2, 3, 9], [1, 30, 69], 1.0), ([4, 5, 20], [2, 49, 49], 0.25)]
            for n, (levels, shares, width) in enumerate(kinds):
                params = {"levels": levels, "shares": shares, "width": width, "seed": seed + n}
                out += _named(f"mixture{n}", "mixture", c, **params)
        sigmas = [{"sigma": s, "scaled": z} for s in (1e-3, 1e-2, 10.0, 1e3) for z in (True, False)]
        if c in (2, 10, 1000):
            out += _named("random2", "random", c, sigmas, scale=2.0, seed=seed + 1)
        elif big:
            out += _named("lead4-spread", "lead", c, sigmas[::3], lead=4.0, spread=2.0, seed=seed, lattice=0.0625)
        margins = [{"margin": r} for r in (-1.0, 0.0, 0.05, 0.5, 5.0)]
        wide = [{"sigma": s, "margin": r} for s, r in ((0.01, 0.05), (0.1, 0.5), (0.1, -1.0), (10.0, 5.0))]
        if c in (2, 10, 1000):
            out += _named("random2", "random", c, margins + wide, scale=2.0, seed=seed + 2, rank=0.75)
        if c in (3, 100) or big:
            out += _named("lead3-spread", "lead", c, margins, lead=3.0, spread=2.0, seed=seed, lattice=_lattice(c))
        if c in (10, 100_000):
            out += _named("lead1-equal", "lead", c, margins[2:], lead=1.0)
        out += _named("lead4-spread", "lead", c, [{"offset": 1000.0}], lead=4.0, spread=2.0, seed=seed, lattice=0.0625)
    return out


def draw_cases(seed: int, count: int) -> list[Case]:
    """Draw `count` new cases out of the families, a function of the seed alone."""
    pick = np.random.Generator(np.random.PCG64(seed))
    return [_draw_case(pick, i) for i in range(count)]


def _draw_case(pick: np.random.Generator, index: int) -> Case:
    """Draw one case: a size, a family, its numbers, a sigma and, half of the time, a margin."""
    c = int(
        pick.choice([2, 3, 5, 10, 30, 100, 300, 1000, 100_000], p=[0.1, 0.1, 0.1, 0.15, 0.1, 0.15, 0.1, 0.15, 0.05])
    )
    family = str(pick.choice(list(FAMILIES)))
    seed, lattice = int(pick.integers(2**31)), 0.0625 if c > 1000 else None
    a, b = pick.uniform(-8, 12, 2).round(3)
    lead = [pick.uniform(2, 6), pick.uniform(0, 10), 0.0, *pick.choice([-1.0, 1.0]) * np.array([10.0, 100.0])]
    params: dict[str, Any] = {
        "random": {"scale": float(2.0 ** pick.uniform(-3, 4)), "seed": seed, "lattice": lattice},
        "lead": {
            "lead": float(lead[pick.integers(len(lead))]),
            "seed": seed,
            "spread": float(pick.choice([0.0, 0.5, 2.0, 5.0])),
            "lattice": lattice,
        },
        "two-group": {"a": float(a), "b": float(b), "count": int(pick.integers(1, c)), "seed": seed},
        "mixture": {
            "levels": pick.uniform(-4, 12, 3).round(3).tolist(),
            "shares": pick.integers(1, 30, 3).tolist(),
            "width": float(pick.uniform(0, 2)),
            "seed": seed,
        },
        "near-tie": {"gap": float(10.0 ** pick.uniform(-7, -1)), "seed": seed, "lattice": lattice},
    }[family]
    sigma = float(pick.choice([1.0, 1.0, 1.0, 1e-3, 1e-2, 0.3, 10.0, 1e3]))
    margin = float(pick.choice([-1.0, 0.0, 0.05, 0.5, 5.0])) * sigma if pick.random() < 0.3 else None
    base = Case(f"drawn{index}-{family}-C{c}", family, c, sigma=sigma, margin=margin, params=params)
    return replace(base, offset=float(pick.choice([0.0, 0.0, 3.0, -20.0])) * sigma)
