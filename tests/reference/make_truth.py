"""Compute the certified truth of every case in tests/families.py: truth.json, beside this script.

    PYTHONPATH=tests python tests/reference/make_truth.py            # the cases that are missing; resumes after a kill
    PYTHONPATH=tests python tests/reference/make_truth.py --check 20 # certify 20 cases anew and compare

Method, "trapezoid": every integrand here is f(z) = Σ_k c_k · (one or two φ's) · (Φ's), c_k ≥ 0, with C factors φ or Φ
of shifted arguments in each term (C classes). On a line Im z = b they grow by little:

    |φ(x + ib)| = φ(x) e^(b²/2),    |Φ(x + ib)| = |∫_0^∞ φ(x + ib − s) ds| ≤ e^(b²/2) Φ(x).

So ∫ |f(x + ib)| dx ≤ e^(C b²/2) I with I = ∫ f, and the trapezoidal rule T on all nodes kh is off by at most
(Trefethen and Weideman, SIAM Review 56 (2014), Theorem 5.1), with b = 2π/(C h),

    |T − I| ≤ 2 I e^(C b²/2)/(e^(2πb/h) − 1) ≈ 2 I exp(−2π²/(C h²)):

a proven *relative* bound that holds however the scores lie; h below gives exp(−60). The nodes left out are bounded by
the geometric series: each term is log-concave, so the ratio of neighbouring nodes falls. All sums run in arb arithmetic
(python-flint), with equal scores grouped, from the exact float32 scores and the exact double sigma and margin. Nothing
overflows: arb's exponents are unbounded. P and 1 − P come from integrals of their own and are required to add up to 1.

--check certifies again with other nodes and another precision; up to C = 10 it also asks acb.integral for P.

Each value is [mid-value to 25 digits, relative radius]. Quantities, with λ = φ/Φ and F(z) = ∏ Φ(z + m_i):
    P      ∫ φ F                        Q      1 − P = ∫ Φ F Σ λ(z + m_i)                   logP   log P
    G      {class: ∂P/∂m_i = ∫ φ F λ(z + m_i)} for chosen competitors; for every class of the same score, too
    live   Σ ∂P/∂m_i over the competitors with mu_y − mu_i < r (all, without a margin): sigma · ∂P/∂mu_y
    W      {class: win probability ∫ Φ F λ(z + m_k)} for the same classes (without a margin); the target's is P
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from families import Case, cases, fingerprint, scores
from flint import acb, arb, ctx, fmpq
from scipy.special import erfcx, log_ndtr

TRUTH = Path(__file__).with_name("truth.json")
NATS = 75.0  # the supports end where the integrand has fallen by e^-75
RADIUS = 1e-18


@dataclass
class Groups:
    """The distinct competitor scores: m (doubles to plan with), exact m (arb), how many, which are below the margin."""

    m: np.ndarray
    exact: list[arb]
    count: np.ndarray
    live: np.ndarray
    first: np.ndarray  # a class of each group


def group_scores(case: Case, row: np.ndarray, target: int) -> Groups:
    """Group the competitors by score; m stays an exact rational until arb divides."""
    others = np.delete(np.arange(len(row)), target)
    values, first, count = np.unique(row[others], return_index=True, return_counts=True)
    sigma, top = fmpq(*case.sigma.as_integer_ratio()), fmpq(*float(row[target]).as_integer_ratio())
    gaps = [top - fmpq(*float(v).as_integer_ratio()) for v in values]
    if case.margin is not None:
        limit = fmpq(*case.margin.as_integer_ratio())
        live = np.array([g < limit for g in gaps])
        gaps = [min(g, limit) for g in gaps]
    else:
        live = np.ones(len(gaps), dtype=bool)
    exact = [arb(g / sigma) for g in gaps]
    return Groups(np.array([float(e.mid()) for e in exact]), exact, count, live, others[first])


def hazard(x: np.ndarray) -> np.ndarray:
    """φ/Φ in double precision, to plan with."""
    return math.sqrt(2 / math.pi) / erfcx(-np.minimum(x, 26.0) / math.sqrt(2)) * (x < 26.0)


@dataclass
class Term:
    """A log-concave integrand, head(z) · F(z) · [λ(z + m_k)]: head is φ or Φ; k = −1 without λ."""

    head: str
    k: int

    def slope(self, z: float, g: Groups) -> float:
        """Derivative of the log, decreasing in z."""
        s = (g.count * hazard(z + g.m)).sum() + (-z if self.head == "phi" else hazard(np.array(z)))
        return float(s if self.k < 0 else s - (z + g.m[self.k]) - hazard(z + g.m[self.k]))

    def log(self, z: float, g: Groups) -> float:
        s = (g.count * log_ndtr(z + g.m)).sum() + (-z * z / 2 if self.head == "phi" else log_ndtr(z))
        return float(s if self.k < 0 else s - (z + g.m[self.k]) ** 2 / 2 - log_ndtr(z + g.m[self.k]))

    def support(self, g: Groups) -> tuple[float, float, float]:
        """Return left end, right end and log height of the part within e^-NATS of the peak, by bisection."""
        far = float(np.abs(g.m).max()) + 50.0
        peak = _bisect(lambda z: self.slope(z, g) > 0, -far, far)
        height = self.log(peak, g)
        left, right = peak - 1.0, peak + 1.0
        while self.log(left, g) > height - NATS:
            left = peak - 2 * (peak - left)
        while self.log(right, g) > height - NATS:
            right = peak + 2 * (right - peak)
        left = _bisect(lambda z: self.log(z, g) < height - NATS, left, peak)
        right = _bisect(lambda z: self.log(z, g) > height - NATS, peak, right)
        return left, right, height


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Find where `holds` turns from true to false, to a few per cent of a unit: planning needs no more."""
    while high - low > max(1e-3, 1e-13 * abs(low + high)):
        mid = (low + high) / 2
        low, high = (mid, high) if holds(mid) else (low, mid)
    return (low + high) / 2


def plan_sum(head: str, g: Groups, live: np.ndarray) -> tuple[float, float]:
    """Support of head · F · Σ_live n_k λ_k: the union over the terms that count, from a selection of the groups."""
    index = np.flatnonzero(live)
    chosen = np.unique(np.concatenate([index[np.linspace(0, len(index) - 1, 12).astype(int)], index[-3:], index[:3]]))
    chosen = np.union1d(chosen, index[np.argsort(g.count[index])[-3:]])
    spans = [(*Term(head, int(k)).support(g), math.log(g.count[k])) for k in chosen]
    best = max(h + n for _, _, h, n in spans)
    kept = [s for s in spans if s[2] + s[3] > best - NATS]
    return min(s[0] for s in kept), max(s[1] for s in kept)


class Nodes:
    """φ(z), Φ(z), F(z) and all Φ(z + m_g) at the nodes kh, in arb, remembered."""

    def __init__(self, g: Groups, classes: int, fine: float) -> None:
        step = math.sqrt(2 * math.pi**2 / (60.0 * classes)) * fine
        self.g, self.h = g, math.ldexp(round(math.ldexp(step, 12 + 10)), -12 - 10)
        self.seen: dict[int, tuple[arb, arb, arb, list[arb], list[arb]]] = {}
        self.half, self.norm = -1 / arb(2).sqrt(), 1 / (2 * arb.pi()).sqrt()
        self.delta = 2 * (-2 * arb.pi() ** 2 / (classes * arb(self.h) ** 2)).exp() * arb("1.01")

    def phi(self, x: arb) -> arb:
        return self.norm * (-x * x / 2).exp()

    def cdf(self, x: arb) -> arb:
        return (self.half * x).erfc() / 2

    def at(self, k: int) -> tuple[arb, arb, arb, list[arb], list[arb]]:
        """Return (φ(z), Φ(z), F(z), [Φ(z + m_g)], [λ(z + m_g)])."""
        if k not in self.seen:
            z = arb(self.h) * k
            args = [z + m for m in self.g.exact]
            below = [self.cdf(x) for x in args]
            product = arb(1)
            for p, n in zip(below, self.g.count, strict=True):
                product *= p ** int(n)
            self.seen[k] = (
                self.phi(z),
                self.cdf(z),
                product,
                below,
                [self.phi(x) / p for x, p in zip(args, below, strict=True)],
            )
        return self.seen[k]

    def terms(self, k: int, head: str, weights: dict[int, int] | None) -> tuple[list[arb], list[arb]]:
        """Return the log-concave terms of the integrand at node k, and for each a log-concave bound to fall back on.

        The bound replaces φ(z + m_k) by φ(0) ≥ φ: it falls to the left even where a far class has its peak there.
        """
        phi, cdf, product, below, ratio = self.at(k)
        base = (phi if head == "phi" else cdf) * product
        if weights is None:
            return [base], [base]
        return (
            [base * ratio[i] * n for i, n in weights.items()],
            [base / below[i] * self.norm * n for i, n in weights.items()],
        )

    def integrate(self, head: str, weights: dict[int, int] | None, span: tuple[float, float]) -> arb:
        """Enclose ∫ head · F · Σ n_k λ_k (without λ when `weights` is None)."""
        first, last = math.floor(span[0] / self.h), math.ceil(span[1] / self.h)
        for _ in range(8):
            tails = [self.bound_tail(end, way, head, weights) for end, way in ((first, -1), (last, 1))]
            if tails[0] is not None and tails[1] is not None:
                break
            grow = (last - first) // 4 + 1
            first, last = first - grow * (tails[0] is None), last + grow * (tails[1] is None)
        else:
            raise ArithmeticError("the tail does not fall geometrically: extend the support")
        total = arb(0)
        for k in range(first, last + 1):
            phi, cdf, product, _, ratio = self.at(k)
            value = (phi if head == "phi" else cdf) * product
            if weights is not None:
                rate = arb(0)
                for i, n in weights.items():
                    rate += ratio[i] * n
                value *= rate
            total += value
        total += (tails[0] + tails[1]) * arb(0.5, 0.5)
        return total * self.h / (1 + self.delta * arb(0, 1))

    def bound_tail(self, end: int, way: int, head: str, weights: dict[int, int] | None) -> arb | None:
        """Bound the nodes beyond `end`: Σ t ρ/(1 − ρ), ρ the ratio of the last two nodes of a log-concave term."""
        last, inner = self.terms(end, head, weights), self.terms(end - way, head, weights)
        total = arb(0)
        for t, s, bound, bound_in in zip(last[0], inner[0], last[1], inner[1], strict=True):
            rho = t / s
            if not rho < 1:
                t, rho = bound, bound / bound_in
            if not rho < 1:
                return None
            total += t * rho / (1 - rho)
        return arb(total.upper())


def choose_groups(g: Groups) -> list[int]:
    """Choose up to six groups: the best competitor, the next, quantiles of the classes, the last."""
    order = np.arange(len(g.m))[::-1]  # highest score first, where ∂P/∂m is largest
    if len(order) <= 6:
        return [int(k) for k in order]
    heap = np.cumsum(g.count[order])
    ranks = [int(np.searchsorted(heap, q * heap[-1])) for q in (0.05, 0.25, 0.5)]
    return [int(order[r]) for r in dict.fromkeys([0, 1, *ranks, len(order) - 1])]


def certify(case: Case, precision: int, fine: float = 1.0) -> dict:
    """Enclose every quantity of one case."""
    ctx.prec = precision
    row, target = scores(case)
    g = group_scores(case, row, target)
    nodes = Nodes(g, case.classes, fine)
    everyone = {int(i): int(n) for i, n in enumerate(g.count)}
    p = nodes.integrate("phi", None, Term("phi", -1).support(g)[:2])
    q = nodes.integrate("Phi", everyone, plan_sum("Phi", g, np.ones(len(g.m), dtype=bool)))
    if not (p + q).contains(1):
        raise ArithmeticError(f"{case.name}: P + Q = {p + q} excludes 1")
    values: dict = {"P": p, "Q": q, "logP": (-q).log1p() if q < 0.5 else p.log()}
    chosen = choose_groups(g)
    label = {k: str(int(g.first[k])) for k in chosen}
    live = {i: n for i, n in everyone.items() if g.live[i]}
    one = {k: Term("phi", k).support(g)[:2] for k in chosen if g.live[k]}
    values["G"] = {label[k]: nodes.integrate("phi", {k: 1}, s) for k, s in one.items()}
    values["live"] = nodes.integrate("phi", live, plan_sum("phi", g, g.live)) if live else arb(0)
    if case.margin is None:
        values["W"] = {label[k]: nodes.integrate("Phi", {k: 1}, Term("Phi", k).support(g)[:2]) for k in chosen}
    return {"values": values, "nodes": len(nodes.seen), "groups": len(g.m)}


def relative_radius(x: arb) -> float:
    return 0.0 if x == 0 else float((arb(x.rad()) / abs(x)).upper())


def flatten(values: dict) -> list[arb]:
    return [x for v in values.values() for x in (v.values() if isinstance(v, dict) else [v])]


def certify_until(case: Case, fine: float = 1.0, extra: int = 0) -> dict:
    """Raise the precision until every relative radius is below RADIUS; the larger of |x| decides at a log P of 0."""
    for precision in (128, 192, 320):
        result = certify(case, precision + extra, fine)
        if max(map(relative_radius, flatten(result["values"]))) < RADIUS:
            return result | {"precision": precision + extra}
    raise ArithmeticError(f"{case.name}: radius above {RADIUS} at {precision} bits")


def encode(x: arb) -> list:
    """Store mid-value (25 digits) and relative radius, the rounding to 25 digits included."""
    return [x.mid().str(25, radius=False), float(f"{relative_radius(x) + 1e-24:.1e}")]


def make_record(case: Case) -> dict:
    start = time.perf_counter()
    r = certify_until(case)
    stored = {
        k: {i: encode(x) for i, x in v.items()} if isinstance(v, dict) else encode(v) for k, v in r["values"].items()
    }
    how = {"method": "trapezoid", "certified": True, "bits": r["precision"], "nodes": r["nodes"], "groups": r["groups"]}
    return {"crc32": fingerprint(case), **stored, **how, "seconds": round(time.perf_counter() - start, 2)}


def check_record(case: Case, record: dict) -> None:
    """Certify again with finer nodes and more bits: the enclosures must overlap. Up to C = 10, also by acb.integral."""
    again = certify_until(case, fine=0.83, extra=40)["values"]
    for key, value in again.items():
        for name, x in value.items() if isinstance(value, dict) else [("", value)]:
            mid, radius = record[key][name] if name else record[key]
            if not arb(mid) * arb(1, radius) == x and not (arb(mid) * arb(1, radius)).overlaps(x):
                raise ArithmeticError(f"{case.name}: {key} {name} stored {mid}, again {x}")
    if case.classes <= 10:
        p = integrate_adaptively(case)
        if not p.overlaps(again["P"]):
            raise ArithmeticError(f"{case.name}: acb.integral says {p}, the trapezoid {again['P']}")


def integrate_adaptively(case: Case) -> arb:
    """Enclose P by acb.integral over its support; what lies outside is at most e^-NATS of the peak, widened by e^10."""
    g = group_scores(case, *scores(case))
    left, right, height = Term("phi", -1).support(g)
    root = arb(2).sqrt()

    def integrand(z: acb, _: bool) -> acb:
        value = (-z * z / 2).exp() / (2 * arb.pi()).sqrt()
        for m, n in zip(g.exact, g.count, strict=True):
            value *= ((-(z + m) / root).erfc() / 2) ** int(n)
        return value

    inside = acb.integral(
        integrand, arb(left), arb(right), rel_tol=arb(2) ** -90, abs_tol=arb(height).exp() * arb(2) ** -90
    )
    return inside.real + arb(0, 1) * (arb(height) - NATS + 10).exp()


def write(path: Path, lines: dict[str, dict]) -> None:
    """Write one case per line, to a temporary name first."""
    body = ",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in lines.items())
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as f:
        f.write("{\n" + body + "\n}\n")
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--check", type=int, metavar="N", help="certify N stored cases anew, evenly spread over the list"
    )
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    args = parser.parse_args()
    done: dict[str, dict] = json.loads(TRUTH.read_text()) if TRUTH.exists() else {}
    wanted = [c for c in cases() if args.only in c.name]
    if args.check:
        for case in wanted[:: max(1, len(wanted) // args.check)][: args.check]:
            check_record(case, done[case.name])
            print(f"{case.name}: confirmed", flush=True)
        return
    todo = [c for c in wanted if done.get(c.name, {}).get("crc32") != fingerprint(c)]
    for i, case in enumerate(todo):
        done[case.name] = record = make_record(case)
        print(f"{i + 1}/{len(todo)} {case.name}: P = {record['P'][0]}, {record['seconds']} s", flush=True)
        write(TRUTH, done)
    names = [c.name for c in cases()]
    write(TRUTH, {n: done[n] for n in names if n in done})


if __name__ == "__main__":
    main()
