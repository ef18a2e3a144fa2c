"""Fit the fraction on which integrals/normal.py rests, and print its coefficients: run by hand, once.

For v(a) = λ(-a) - a, the left half line's excess, T(a) = (1/v(a) - √(π/2))/a falls from 1 (a → inf) to 0.57 (a = 0).
T = P(a)/Q(a), monic of degree 10 each, is fitted to relative error by reweighted linear least squares on Chebyshev
points of 2/(2 + a), weights moved towards equal errors (Lawson); then a = (1 - s)/s makes it a fraction in s.
Degree 9 leaves 2.6e-15, degree 10 6.6e-17.
"""

from typing import Any

from mpmath import mp, mpf

DEGREE = 10
POINTS = 10 * DEGREE
ROUNDS = 24


def ratio(a: Any) -> Any:
    """Return T(a), a > 0."""
    with mp.workdps(100 + int(3 * abs(mp.log10(a)))):
        if a > 1e5:  # the asymptotic series, 1e-50 at this distance
            v = 1 / a - 2 / a**3 + 10 / a**5 - 74 / a**7 + 706 / a**9
        else:
            v = 2 * mp.npdf(a) / mp.erfc(a / mp.sqrt(2)) - a
        return (1 / v - mp.sqrt(mp.pi / 2)) / a


def fit() -> tuple[Any, list[Any], list[Any]]:
    """Return the largest relative error on the points, and P and Q, lowest power first."""
    points = [4 / (1 - mp.cos(mp.pi * (2 * k + 1) / (2 * POINTS))) - 2 for k in range(POINTS)]
    values = [ratio(a) for a in points]
    scale, lawson = [mpf(1)] * POINTS, [mpf(1)] * POINTS
    best = (mp.inf, [], [])
    for step in range(ROUNDS):
        left, right = mp.matrix(POINTS, 2 * DEGREE), mp.matrix(POINTS, 1)
        for i, (a, t) in enumerate(zip(points, values, strict=True)):
            weight = lawson[i] * scale[i] / t
            for k in range(DEGREE):
                left[i, k], left[i, DEGREE + k] = weight * a**k, -weight * t * a**k
            right[i] = weight * (t - 1) * a**DEGREE
        x = mp.lu_solve(left.T * left, left.T * right)
        top, bottom = [*x[:DEGREE], mpf(1)], [*x[DEGREE:], mpf(1)]
        scale = [1 / mp.polyval(bottom[::-1], a) for a in points]
        errors = [abs(mp.polyval(top[::-1], a) * s / t - 1) for a, s, t in zip(points, scale, values, strict=True)]
        worst = max(errors)
        best = min(best, (worst, top, bottom), key=lambda item: item[0])
        if step >= 2:
            lawson = [w * mp.sqrt(e / worst + mpf("0.02")) for w, e in zip(lawson, errors, strict=True)]
    return best


def in_s(polynomial: list[Any]) -> list[float]:
    """Return the coefficients of s^n·P((1 - s)/s), lowest power first."""
    out = [mpf(0)] * (DEGREE + 1)
    for k, p in enumerate(polynomial):
        for j in range(k + 1):
            out[DEGREE - k + j] += p * mp.binomial(k, j) * (-1) ** j
    return [float(c) for c in out]


if __name__ == "__main__":
    mp.dps = 120
    error, top, bottom = fit()
    print("relative error", mp.nstr(error, 3))
    print("_TOP =", in_s(top))
    print("_BOTTOM =", in_s(bottom))
