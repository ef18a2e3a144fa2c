/* The row kernel for few classes: EXPACC_LANES rows side by side, one lane a row, and every class summed at every node.
 *
 * One set of nodes per row serves the value, the complement and the gradient (formulas in rows.h and in
 * integrals/quadrature.py). With f(z) = -z²/2 + Σ log Φ(z + m_i) and the nearest competitor n = min m_i,
 *
 *     P = ∫ e^f/√2π,    1 - P = ∫ e^f Φ/(√2π φ)(z) Σ λ(z + m_i),    ∂P/∂m_i = ∫ e^f λ(z + m_i)/√2π
 *
 * 1. Start: the mode of the nearest competitor's gradient integrand e^f λ(z + n), by Newton from z = -n/2, from where it
 *    climbs monotonically. It lies inside the support of what is needed: for a confident row all of 1 - P, for
 *    any other row (P < 0.7 needs n < 3 with few classes) near the mode of e^f, a little to its left.
 * 2. Step: the curvature of that integrand grows to the left, where the flank may be far narrower than the peak
 *    (target a little above many classes). It is taken a little down the left flank and the step is STEP times its
 *    scale: trapezoid sums of an integrand of scale s converge like exp(-2π²s²/step²).
 * 3. March to the right, then to the left, until the terms of everything that is needed are negligible: no edge is
 *    searched, nothing can be cut off. A lane that is done adds zeros, so no row depends on its neighbours.
 * Which of P and 1 - P a row needs is seen at the right end: where the complement's terms have died away and its sum
 * is below 0.4, the integral of P is not finished.
 *
 * Rounding: m is rounded once from double; all exponents are sums of one sign, so log P and log(1 - P) lose a few
 * ulp of themselves.
 */
#include "rows.h"
#include "vec.h"
#include "kernels.h"

#include <math.h>

#define STEP 1.1f
#define FLANK 1.0f
#define NEWTON 4
#define MOST_NODES 96           /* of one side; never met but by gaps where float has no digits left for z */
#define NEGLIGIBLE_VALUE 3e-7f
#define NEGLIGIBLE 2e-6f
#define ABSENT 6e7f             /* m of a class that takes no part: Φ = 1 and λ = 0 at every node */
#define CERTAIN 18.7f           /* every gap beyond it: 1 - P and the gradient are below the smallest float */
#define LN2 0.6931471806f

enum { NORMAL, LOST, WON, BROKEN, LEVEL }; /* P = 0, P = 1, NaN, all -inf */

/* Return what a row with a score that is not finite is. */
static int classify(const float *x, ptrdiff_t classes, int64_t y) {
    int any_live = 0, any_top = 0;
    for (ptrdiff_t i = 0; i < classes; i++) {
        if (isnan(x[i])) return BROKEN;
        if (i == y) continue;
        any_top |= x[i] == INFINITY;
        any_live |= x[i] > -INFINITY;
    }
    if (any_top) return x[y] == INFINITY ? BROKEN : LOST; /* inf - inf, as in the reference */
    if (x[y] == -INFINITY) return any_live ? LOST : LEVEL;
    return any_live && x[y] < INFINITY ? NORMAL : WON;
}

typedef struct { vf w, q, sum; } node_terms;

/* e^f/e^ref, the complement's term and Σ λ√2π at z; λ√2π of each competitor to lam. */
EXPACC_INLINE node_terms evaluate(vf z, vf ref, const vf *m, ptrdiff_t n, vf *restrict lam, vf *log_scale) {
    vf square = z * z, prod = vf_set(1.0f), sum = {0};
    vi exponent = {0};
    for (ptrdiff_t j = 0; j < n; j++) {
        vf_normal p = vf_normal_parts(m[j] + z);
        square += p.square;
        prod *= p.g;
        vf l = p.e * p.g;
        lam[j] = l;
        sum += l;
        if ((j & 3) == 3) { /* g <= 1e8: four of them fit beside a mantissa */
            exponent += ((vi)prod >> 23) - 127;
            prod = (vf)(((vi)prod & 0x007fffff) | 0x3f800000);
        }
    }
    vf height = -0.5f * square - LN2 * __builtin_convertvector(exponent, vf);
    if (log_scale) *log_scale = ref = height;
    node_terms out;
    vf arg = height - ref;
    out.w = vf_where(vf_lt(vf_set(-87.0f), arg), vf_exp(arg)) * vf_rcp(prod);
    vf_normal own = vf_normal_parts(z);
    out.q = out.w * sum * vf_rcp(own.e * own.g);
    out.sum = sum;
    return out;
}

/* λ(x + λ), in (0, 1). Far left the sum has no digits left (λ is good to 1e-4 here), and a 0 there would make Newton
 * overshoot and come back to its start. */
EXPACC_INLINE vf bend(vf x, vf l) {
    return vf_select(vf_lt(x, vf_set(-20.0f)), vf_set(1.0f), vf_max(vf_min(l * (x + l), vf_set(1.0f)), (vf){0}));
}

/* The slope of Σ log Φ(z + m_i) without the nearest competitor, and minus its curvature: to steer by. */
EXPACC_INLINE void slope(vf z, vf nearest, const vf *m, ptrdiff_t n, vf *first, vf *second) {
    vf x = nearest + z, l = vf_hazard_rough(x);
    vf a = -l, b = -bend(x, l);
    for (ptrdiff_t j = 0; j < n; j++) {
        x = m[j] + z;
        l = vf_hazard_rough(x);
        a += l;
        b += bend(x, l);
    }
    *first = a;
    *second = vf_max(b, (vf){0});
}

static void group(const expacc_rows *in, ptrdiff_t first, int count, vf *m, vf *lam, vf *acc, vf *live) {
    const ptrdiff_t n = in->classes - 1;
    const float inf = INFINITY;
    float *buffer = (float *)acc;
    int kind[EXPACC_LANES], special = 0, used = 0;
    double own[EXPACC_LANES], scale[EXPACC_LANES], cap[EXPACC_LANES];

    /* Rows into lanes. */
    for (int r = 0; r < EXPACC_LANES; r++) {
        int64_t y = r < count ? in->target[first + r] : -1;
        kind[r] = NORMAL;
        if (y < 0) {
            own[r] = 0, scale[r] = 1, cap[r] = inf;
            for (ptrdiff_t j = 0; j < n; j++) buffer[j * EXPACC_LANES + r] = 0;
            continue;
        }
        used = 1;
        const float *x = in->x + (first + r) * in->stride;
        for (ptrdiff_t j = 0; j < y; j++) buffer[j * EXPACC_LANES + r] = x[j];
        for (ptrdiff_t j = y; j < n; j++) buffer[j * EXPACC_LANES + r] = x[j + 1];
        own[r] = x[y], scale[r] = in->scale[first + r], cap[r] = in->cap[first + r];
        if (!isfinite(x[y])) special = 1;
    }
    if (!used) {
        for (int r = 0; r < count; r++) in->log_p[first + r] = 0;
        for (int r = 0; r < count && in->dot; r++) in->dot[first + r] = 0;
        for (int r = 0; r < count && in->dot_live; r++) in->dot_live[first + r] = 0;
        for (int r = 0; r < count && in->grad; r++)
            memset(in->grad + (first + r) * in->grad_stride, 0, in->classes * sizeof(float));
        return;
    }
    vf zeros = {0}, check = zeros;
    for (ptrdiff_t j = 0; j < n; j++) check += acc[j] * 0.0f;
    special |= !vm_all(vf_eq(check, zeros));
    if (special)
        for (int r = 0; r < count; r++) {
            int64_t y = in->target[first + r];
            if (y < 0) continue;
            kind[r] = classify(in->x + (first + r) * in->stride, in->classes, y);
            if (kind[r] != NORMAL) {
                own[r] = 0;
                for (ptrdiff_t j = 0; j < n; j++) buffer[j * EXPACC_LANES + r] = 0;
            }
        }

    /* Gaps, in double and rounded once. A masked competitor is beyond every cap. */
    vf nearest = vf_set(ABSENT);
    int capped = 0;
    for (int r = 0; r < EXPACC_LANES; r++) capped |= cap[r] < inf;
    for (ptrdiff_t j = 0; j < n; j++) {
        float gap[EXPACC_LANES], alive[EXPACC_LANES];
        const int half = EXPACC_LANES / 2;
        for (int h = 0; h < 2; h++) {
            vd d = (vd_load(own + h * half) - vd_load_float(buffer + j * EXPACC_LANES + h * half)) * vd_load(scale + h * half);
            if (capped) {
                vd top = vd_load(cap + h * half);
                vl below = (vl)(d < top);
                vd_store_float(alive + h * half, vd_select(below, vd_set(1), vd_set(0)));
                d = vd_select(below, d, vd_select((vl)(d < vd_set(inf)), top, d));
            }
            vd_store_float(gap + h * half, d);
        }
        if (capped) live[j] = vf_load(alive);
        m[j] = vf_min(vf_max(vf_load(gap), vf_set(-ABSENT)), vf_set(ABSENT));
        nearest = vf_min(nearest, m[j]);
    }

    for (int r = 0; r < count; r++)
        if (kind[r] == NORMAL && nearest[r] > CERTAIN) kind[r] = WON;

    /* The start, the step. */
    vf z = -0.5f * nearest, slope1, slope2;
    for (int k = 0; k < NEWTON; k++) {
        slope(z, nearest, m, n, &slope1, &slope2);
        z += (slope1 - (z + z + nearest)) * vf_rcp(2.0f + slope2);
    }
    vf start = z;
    z -= FLANK * vf_rsqrt_rough(2.0f + slope2);
    slope(z, nearest, m, n, &slope1, &slope2);
    vf step = STEP * vf_rsqrt_rough(2.0f + slope2);

    /* The sums. */
    vf ref;
    node_terms t = evaluate(start, zeros, m, n, lam, &ref);
    vf vsum = t.w, qsum = t.q, gsum = t.w * t.sum;
    for (ptrdiff_t j = 0; j < n; j++) acc[j] = t.w * lam[j];
    vf unit = step * EXPACC_INV_SQRT_2PI;
    vf level = vf_where(vf_lt(vf_set(-87.0f), ref), vf_exp(ref)) * unit;
    vf confident = zeros; /* 1 where 1 - P is the one to use */
    /* P <= Φ(n/√2): no row with a competitor above the target is confident (and there level may have underflowed). */
    vf hopeful = vf_where(vf_lt(zeros, nearest), vf_set(1.0f));
    vf worth = vf_where(vf_le(nearest, vf_set(CERTAIN)), vf_set(1.0f));
    vf active = worth, y = zeros;
    for (int k = 0; k < MOST_NODES; k++) {
        y += step;
        t = evaluate(start + y, ref, m, n, lam, NULL);
        t.w *= active;
        t.q *= active;
        vf g = t.w * t.sum;
        vsum += t.w, qsum += t.q, gsum += g;
        for (ptrdiff_t j = 0; j < n; j++) acc[j] += t.w * lam[j];
        vf sure = vf_where(vf_le(t.q, NEGLIGIBLE * qsum), vf_where(vf_lt(qsum * level, vf_set(0.4f)), active * hopeful));
        vf over = vf_select(vf_le(t.w, NEGLIGIBLE_VALUE * vsum), vf_set(1.0f), sure);
        over = vf_where(vf_le(g, NEGLIGIBLE * gsum), over * active);
        confident += over * sure;
        active -= over;
        if (vm_all(vf_le(active, zeros))) break;
    }
    active = worth, y = zeros;
    vm sure = vf_lt(vf_set(0.5f), confident);
    for (int k = 0; k < MOST_NODES; k++) {
        y += step;
        t = evaluate(start - y, ref, m, n, lam, NULL);
        t.w *= active;
        t.q *= active;
        vf g = t.w * t.sum;
        vsum += t.w, qsum += t.q, gsum += g;
        for (ptrdiff_t j = 0; j < n; j++) acc[j] += t.w * lam[j];
        vf over = vf_select(sure, vf_where(vf_le(t.q, NEGLIGIBLE * qsum), active),
                            vf_where(vf_le(t.w, NEGLIGIBLE_VALUE * vsum), active));
        active -= vf_where(vf_le(g, NEGLIGIBLE * gsum), over);
        if (vm_all(vf_le(active, zeros))) break;
    }

    /* The results. */
    vf miss = vf_min(qsum * level, vf_set(0.5f));
    vf log_p = vf_select(sure, vf_log1p(-miss), ref + vf_log(vsum * unit));
    float out[EXPACC_LANES];
    vf_store(out, log_p);
    for (int r = 0; r < count; r++) {
        float v = in->target[first + r] < 0 ? 0.0f : out[r];
        if (kind[r] == LOST) v = -inf;
        if (kind[r] == WON) v = 0;
        if (kind[r] == BROKEN) v = NAN;
        if (kind[r] == LEVEL) v = (float)-log((double)in->classes);
        in->log_p[first + r] = v;
    }
    if (!in->grad && !in->dot && !in->dot_live) return;

    float factor[EXPACC_LANES], widen[EXPACC_LANES];
    for (int r = 0; r < EXPACC_LANES; r++) {
        int in_use = r < count && in->target[first + r] >= 0 && kind[r] == NORMAL;
        factor[r] = in_use ? (float)in->factor[first + r] : 0.0f;
        widen[r] = (float)scale[r];
    }
    vf exponent = (float)in->power * log_p;
    vf weight = vf_load(factor) * vf_where(vf_lt(vf_set(-87.0f), exponent), vf_exp(exponent));
    vf per_term = EXPACC_INV_SQRT_2PI * vf_select(sure, level * vf_rcp(1.0f - miss), vf_rcp(vsum));
    vf coefficient = weight * per_term;
    if (special)
        for (ptrdiff_t j = 0; j < n; j++) acc[j] = vf_where(vf_lt(m[j], vf_set(0.9f * ABSENT)), acc[j]);
    if (in->dot || in->dot_live) {
        vf all = zeros, below = zeros;
        for (ptrdiff_t j = 0; j < n; j++) {
            vf d = acc[j] * coefficient * m[j];
            all += d;
            below += capped ? d * live[j] : d;
        }
        for (int r = 0; r < count; r++) {
            int counts = kind[r] == NORMAL && in->target[first + r] >= 0;
            if (in->dot) in->dot[first + r] = counts ? all[r] : 0;
            if (in->dot_live) in->dot_live[first + r] = counts ? below[r] : 0;
        }
    }
    if (!in->grad) return;
    coefficient *= vf_load(widen);
    vf total = zeros;
    for (ptrdiff_t j = 0; j < n; j++) {
        vf d = acc[j] * coefficient;
        if (capped) d *= live[j];
        total += d;
        acc[j] = d;
    }
    for (int r = 0; r < count; r++) {
        float *g = in->grad + (first + r) * in->grad_stride;
        int64_t y = in->target[first + r];
        if (y < 0 || kind[r] != NORMAL) {
            float v = kind[r] == BROKEN ? NAN : 0.0f;
            for (ptrdiff_t j = 0; j <= n; j++) g[j] = v;
            continue;
        }
        for (ptrdiff_t j = 0; j < y; j++) g[j] = buffer[j * EXPACC_LANES + r];
        g[y] = -total[r];
        for (ptrdiff_t j = y; j < n; j++) g[j + 1] = buffer[j * EXPACC_LANES + r];
    }
}

size_t EXPACC_NAME(expacc_direct_scratch)(ptrdiff_t classes) { return 4 * (size_t)classes * sizeof(vf); }

void EXPACC_NAME(expacc_direct)(const expacc_rows *in, void *scratch) {
    vf *m = scratch, *lam = m + in->classes, *acc = lam + in->classes, *live = acc + in->classes;
    for (ptrdiff_t first = 0; first < in->rows; first += EXPACC_LANES) {
        ptrdiff_t count = in->rows - first;
        group(in, first, count < EXPACC_LANES ? (int)count : EXPACC_LANES, m, lam, acc, live);
    }
}
