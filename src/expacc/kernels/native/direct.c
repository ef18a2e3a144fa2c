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
 * Rounding: places are y = z + n and gaps u = m - n >= 0, rounded once from double: for a row behind its competitors all
 * that matters lies near y = 0, however large z is. All exponents are sums of one sign, so log P and log(1 - P) lose a
 * few ulp of themselves.
 *
 * Rows further behind than FAR: exponents of m² would differ from node to node by their rounding, and beyond 6e4 sigma by
 * more than exp can hold. They take a second pass, in which every square is taken relative to its value at the start
 * and Newton goes on until it stands, past one class after the other. Other rows do not pay for it.
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
#define CERTAIN 18.7            /* every gap beyond it: 1 - P and the gradient are below the smallest float */
#define FAR 120.0               /* up to here the first pass's gradient is good to 2e-5, with 40 classes */
#define FAR_NEWTON 40
#define LN2 0.6931471806f

/* To be integrated in this pass; P = 0, P = 1, NaN, all -inf, P^q = 0; for the other pass; no row, or not to count. */
enum { NORMAL, LOST, WON, BROKEN, LEVEL, HOPELESS, ELSEWHERE, LEFT_OUT };

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

/* e^f/e^ref, the complement's term and Σ λ√2π at y; λ√2π of each competitor to lam. At y = start the height, less
 * -start_z²/2 and, in the far pass, less the squares of the classes, goes to *own_height and is the ref. */
EXPACC_INLINE node_terms evaluate(int far, vf y, vf start, vf nearest, vf ref, const vf *u, ptrdiff_t n, vf *restrict lam,
                                  vf *own_height) {
    const vf zero = {0}, z = y - nearest, moved = y - start;
    vf square = moved * (z + (start - nearest)), prod = vf_set(1.0f), sum = {0};
    vi exponent = {0};
    for (ptrdiff_t j = 0; j < n; j++) {
        vf x = u[j] + y;
        vf_normal p = vf_normal_parts(x);
        if (far) {
            vf a = u[j] + start, left = vf_min(x, zero), before = vf_min(a, zero);
            square += vf_select(vf_lt(vf_max(x, a), zero), moved, left - before) * (left + before);
        } else square += p.square;
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
    if (own_height) *own_height = ref = height;
    node_terms out;
    vf arg = height - ref;
    if (far) arg = vf_min(arg, vf_set(40.0f)); /* the start is at the peak, but for rounding */
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

/* λ to 1e-4; in the far pass to rounding where it is large, or Newton would end up far from the mode. */
EXPACC_INLINE vf steer(int far, vf x) {
    vf l = vf_hazard_rough(x);
    return far ? vf_select(vf_lt(x, vf_set(-30.0f)), vf_rcp_rough(-x) - x, l) : l;
}

/* The slope of Σ log Φ(u_i + y) without the nearest competitor, and minus its curvature: to steer by. */
EXPACC_INLINE void slope(int far, vf y, const vf *u, ptrdiff_t n, vf *first, vf *second) {
    vf l = steer(far, y);
    vf a = -l, b = -bend(y, l);
    for (ptrdiff_t j = 0; j < n; j++) {
        vf x = u[j] + y;
        l = steer(far, x);
        a += l;
        b += bend(x, l);
    }
    *first = a;
    *second = vf_max(b, (vf){0});
}

/* One pass over the rows first .. first + count: the far pass over those in `behind`, the other over the rest. Return the
 * rows that are left to the far pass. */
EXPACC_INLINE unsigned group(int far, const expacc_rows *in, ptrdiff_t first, int count, unsigned behind, vf *u, vf *lam,
                             vf *acc, vf *live) {
    const ptrdiff_t n = in->classes - 1;
    const int half = EXPACC_LANES / 2;
    const float inf = INFINITY;
    float *buffer = (float *)acc;
    int kind[EXPACC_LANES], special = 0, used = 0, capped = 0;
    double own[EXPACC_LANES], scale[EXPACC_LANES], cap[EXPACC_LANES], least[EXPACC_LANES], stretch[EXPACC_LANES];

    /* Rows into lanes. */
    for (int r = 0; r < EXPACC_LANES; r++) {
        int64_t y = r < count ? in->target[first + r] : -1;
        kind[r] = y < 0 ? LEFT_OUT : far && !(behind >> r & 1) ? ELSEWHERE : NORMAL;
        if (kind[r] != NORMAL) {
            own[r] = 0, scale[r] = 1, cap[r] = inf;
            for (ptrdiff_t j = 0; j < n; j++) buffer[j * EXPACC_LANES + r] = 0;
            continue;
        }
        used = 1;
        const float *x = in->x + (first + r) * in->stride;
        for (ptrdiff_t j = 0; j < y; j++) buffer[j * EXPACC_LANES + r] = x[j];
        for (ptrdiff_t j = y; j < n; j++) buffer[j * EXPACC_LANES + r] = x[j + 1];
        own[r] = x[y], scale[r] = in->scale[first + r], cap[r] = in->cap[first + r];
        capped |= cap[r] < inf;
        if (!isfinite(x[y])) special = 1;
    }
    if (!used) {
        for (int r = 0; r < count; r++) in->log_p[first + r] = 0;
        for (int r = 0; r < count && in->dot; r++) in->dot[first + r] = 0;
        for (int r = 0; r < count && in->dot_live; r++) in->dot_live[first + r] = 0;
        for (int r = 0; r < count && in->grad; r++)
            memset(in->grad + (first + r) * in->grad_stride, 0, in->classes * sizeof(float));
        return 0;
    }
    vf zeros = {0}, check = zeros;
    for (ptrdiff_t j = 0; j < n; j++) check += acc[j] * 0.0f;
    special |= !vm_all(vf_eq(check, zeros));
    if (special)
        for (int r = 0; r < count; r++) {
            if (kind[r] != NORMAL) continue;
            kind[r] = classify(in->x + (first + r) * in->stride, in->classes, in->target[first + r]);
            if (kind[r] != NORMAL) {
                own[r] = 0;
                for (ptrdiff_t j = 0; j < n; j++) buffer[j * EXPACC_LANES + r] = 0;
            }
        }

    /* The nearest competitor. A masked one is beyond every cap. */
    vf top = acc[0], nearest = vf_set(ABSENT);
    for (ptrdiff_t j = 1; j < n; j++) top = vf_max(top, acc[j]);
    behind = 0;
    for (int r = 0; r < EXPACC_LANES; r++) {
        double d = (own[r] - (double)top[r]) * scale[r];
        least[r] = d = d < cap[r] ? d : cap[r];
        if (far) stretch[r] = 1;
        if (kind[r] != NORMAL) continue;
        if (far && d < -EXPACC_FURTHEST) {
            stretch[r] = -d / EXPACC_FURTHEST;
            least[r] = d = -EXPACC_FURTHEST, scale[r] /= stretch[r], cap[r] /= stretch[r];
        }
        if (d > CERTAIN) kind[r] = WON;
        else if (d < -EXPACC_NOWHERE) kind[r] = LOST;
        else if (!far && d < -FAR) {
            kind[r] = expacc_hopeless(in->power, d) ? HOPELESS : ELSEWHERE;
            if (kind[r] == ELSEWHERE) behind |= 1u << r;
        } else nearest[r] = (float)d;
    }

    /* Gaps, in double and rounded once. */
    for (ptrdiff_t j = 0; j < n; j++) {
        float gap[EXPACC_LANES], alive[EXPACC_LANES];
        for (int h = 0; h < 2; h++) {
            vd d = (vd_load(own + h * half) - vd_load_float(buffer + j * EXPACC_LANES + h * half)) * vd_load(scale + h * half);
            if (capped) {
                vd most = vd_load(cap + h * half);
                vl below = (vl)(d < most);
                vd_store_float(alive + h * half, vd_select(below, vd_set(1), vd_set(0)));
                d = vd_select(below, d, vd_select((vl)(d < vd_set(inf)), most, d));
            }
            vd_store_float(gap + h * half, d - vd_load(least + h * half));
        }
        if (capped) live[j] = vf_load(alive);
        u[j] = vf_min(vf_load(gap), vf_set(ABSENT));
    }

    /* The start, the step. */
    vf y = 0.5f * nearest, slope1, slope2 = zeros, climbing = vf_set(1.0f);
    for (int k = 0; k < (far ? FAR_NEWTON : NEWTON); k++) {
        vf curve;
        slope(far, y, u, n, &slope1, &curve);
        vf z = y - nearest, move = (slope1 - (y + z)) * vf_rcp(2.0f + curve);
        if (far) { /* a lane that stands stays: it must not depend on how long the others climb */
            vm climbs = vf_lt(zeros, climbing);
            slope2 = vf_select(climbs, curve, slope2);
            y += vf_where(climbs, move);
            climbing = vf_where(vf_lt(0.05f + 3e-7f * vf_abs(z), vf_abs(move)), climbing);
            if (vm_all(vf_le(climbing, zeros))) break;
        } else slope2 = curve, y += move;
    }
    vf start = y;
    y -= FLANK * vf_rsqrt_rough(2.0f + slope2);
    slope(far, y, u, n, &slope1, &slope2);
    vf step = STEP * vf_rsqrt_rough(2.0f + slope2);

    /* The sums. */
    vf ref, away = start - nearest;
    node_terms t = evaluate(far, start, start, nearest, zeros, u, n, lam, &ref);
    vf vsum = t.w, qsum = t.q, gsum = t.w * t.sum, square = zeros;
    for (ptrdiff_t j = 0; j < n; j++) acc[j] = t.w * lam[j];
    for (ptrdiff_t j = 0; far && j < n; j++) {
        vf left = vf_min(u[j] + start, zeros);
        square += left * left;
    }
    const vf peak = (ref - 0.5f * square) - 0.5f * away * away; /* the largest last: 40 roundings of it would be seen */
    vf unit = step * EXPACC_INV_SQRT_2PI;
    vf level = vf_where(vf_lt(vf_set(-87.0f), peak), vf_exp(peak)) * unit;
    vf confident = zeros; /* 1 where 1 - P is the one to use */
    /* P <= Φ(n/√2): no row with a competitor above the target is confident (and there level may have underflowed). */
    vf hopeful = vf_where(vf_lt(zeros, nearest), vf_set(1.0f));
    vf worth = vf_where(vf_le(nearest, vf_set((float)CERTAIN)), vf_set(1.0f));
    vf active = worth, moved = zeros;
    for (int k = 0; k < MOST_NODES; k++) {
        moved += step;
        t = evaluate(far, start + moved, start, nearest, ref, u, n, lam, NULL);
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
    active = worth, moved = zeros;
    vm sure = vf_lt(vf_set(0.5f), confident);
    for (int k = 0; k < MOST_NODES; k++) {
        moved += step;
        t = evaluate(far, start - moved, start, nearest, ref, u, n, lam, NULL);
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
    vf log_p = vf_select(sure, vf_log1p(-miss), peak + vf_log(vsum * unit));
    float out[EXPACC_LANES];
    vf_store(out, log_p);
    for (int r = 0; r < count; r++) {
        if (kind[r] == ELSEWHERE) continue;
        float v = far ? (float)(out[r] * (stretch[r] * stretch[r])) : out[r];
        if (kind[r] == LOST) v = -inf;
        if (kind[r] == WON || kind[r] == LEFT_OUT) v = 0;
        if (kind[r] == BROKEN) v = NAN;
        if (kind[r] == LEVEL) v = (float)-log((double)in->classes);
        if (kind[r] == HOPELESS) v = (float)(-0.25 * least[r] * least[r]);
        in->log_p[first + r] = v;
    }
    if (!in->grad && !in->dot && !in->dot_live) return behind;

    /* The weights, in double where they may be beyond float. */
    const int careful = far || in->power < 0;
    double weight[EXPACC_LANES];
    float factor[EXPACC_LANES], more[EXPACC_LANES];
    if (careful)
        for (int r = 0; r < EXPACC_LANES; r++) {
            const double square = far ? stretch[r] * stretch[r] : 1;
            weight[r] = kind[r] == NORMAL ? in->factor[first + r] * exp(in->power * (out[r] * square)) * square : 0;
            expacc_split(weight[r] * scale[r], factor + r, more + r);
        }
    else {
        for (int r = 0; r < EXPACC_LANES; r++) factor[r] = kind[r] == NORMAL ? (float)in->factor[first + r] : 0.0f;
        vf exponent = (float)in->power * log_p;
        vf damped = vf_load(factor) * vf_where(vf_lt(vf_set(-87.0f), exponent), vf_exp(exponent));
        vf_store(factor, damped);
        for (int r = 0; r < EXPACC_LANES; r++) more[r] = (float)scale[r];
        for (int r = 0; r < EXPACC_LANES && (in->dot || in->dot_live); r++) weight[r] = factor[r];
    }
    vf per_term = EXPACC_INV_SQRT_2PI * vf_select(sure, level * vf_rcp(1.0f - miss), vf_rcp(vsum));
    if (special)
        for (ptrdiff_t j = 0; j < n; j++) acc[j] = vf_where(vf_lt(u[j], vf_set(0.9f * ABSENT)), acc[j]);
    if (in->dot || in->dot_live) {
        vf all = zeros, below = zeros;
        for (ptrdiff_t j = 0; j < n; j++) {
            vf d = acc[j] * per_term * (u[j] + nearest);
            all += d;
            below += capped ? d * live[j] : d;
        }
        for (int r = 0; r < count; r++) {
            if (kind[r] == ELSEWHERE) continue;
            if (in->dot) in->dot[first + r] = kind[r] == NORMAL ? weight[r] * all[r] : 0;
            if (in->dot_live) in->dot_live[first + r] = kind[r] == NORMAL ? weight[r] * below[r] : 0;
        }
    }
    if (!in->grad) return behind;
    /* Not all of it in one: per_term may be 1e20 where the terms are small. */
    const vf one = vf_load(factor), other = vf_load(more), coefficient = careful ? per_term : one * per_term * other;
    vf total = zeros;
    for (ptrdiff_t j = 0; j < n; j++) {
        vf d = acc[j] * coefficient;
        if (careful) d = d * one * other;
        if (capped) d = vf_where(vf_lt(zeros, live[j]), d); /* not a product: d may be inf */
        total += d;
        acc[j] = d;
    }
    for (int r = 0; r < count; r++) {
        float *g = in->grad + (first + r) * in->grad_stride;
        int64_t y = in->target[first + r];
        if (kind[r] == ELSEWHERE) continue;
        if (kind[r] != NORMAL) {
            float v = kind[r] == BROKEN ? NAN : 0.0f;
            for (ptrdiff_t j = 0; j <= n; j++) g[j] = v;
            continue;
        }
        for (ptrdiff_t j = 0; j < y; j++) g[j] = buffer[j * EXPACC_LANES + r];
        g[y] = -total[r];
        for (ptrdiff_t j = y; j < n; j++) g[j + 1] = buffer[j * EXPACC_LANES + r];
    }
    return behind;
}

/* Two functions, so that neither pays for what it does not do. */
static __attribute__((noinline)) unsigned near_pass(const expacc_rows *in, ptrdiff_t first, int count, vf *u, vf *lam, vf *acc,
                                                    vf *live) {
    return group(0, in, first, count, 0, u, lam, acc, live);
}
static __attribute__((noinline)) void far_pass(const expacc_rows *in, ptrdiff_t first, int count, unsigned behind, vf *u,
                                               vf *lam, vf *acc, vf *live) {
    group(1, in, first, count, behind, u, lam, acc, live);
}

size_t EXPACC_NAME(expacc_direct_scratch)(ptrdiff_t classes) { return 4 * (size_t)classes * sizeof(vf); }

void EXPACC_NAME(expacc_direct)(const expacc_rows *in, void *scratch) {
    vf *u = scratch, *lam = u + in->classes, *acc = lam + in->classes, *live = acc + in->classes;
    for (ptrdiff_t first = 0; first < in->rows; first += EXPACC_LANES) {
        const int count = in->rows - first < EXPACC_LANES ? (int)(in->rows - first) : EXPACC_LANES;
        const unsigned behind = near_pass(in, first, count, u, lam, acc, live);
        if (behind) far_pass(in, first, count, behind, u, lam, acc, live);
    }
}
