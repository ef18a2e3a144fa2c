/* The closed-form twin, Gumbel noise: P = 1/(1 + Σ exp(-m_i)), a softmax of the capped gaps; any number of classes.
 *
 *     L = -log(1 + S),  S = Σ exp(-m_i),     G_i = ∂L/∂m_i = exp(-m_i)/(1 + S)
 *
 * With the exponents t_i = -m_i = max((x_i - x_y) scale, -cap) shifted by a = max(0, max t_i); where no t_i is positive,
 * a = 0 and L = -log1p(S) keeps the digits of a confident row. Memory is read twice and the gradient written twice, as
 * by a fused cross-entropy. Exponents are floats: they lose |t|·2^-24, as cross-entropy's do.
 */
#include "rows.h"
#include "vec.h"
#include "kernels.h"

#include <math.h>

#define BLOCK (32 * EXPACC_LANES) /* summed in float; blocks in double */

#define FAR 3.4028235e38f /* FLT_MAX: a difference of finite scores may overflow, and inf - inf follow */

static void one_row(const expacc_rows *in, ptrdiff_t r) {
    const ptrdiff_t n = in->classes;
    const float *x = in->x + r * in->stride;
    float *g = in->grad ? in->grad + r * in->grad_stride : NULL;
    const int64_t y = in->target[r];
    double *dot = in->dot ? in->dot + r : NULL, *dot_live = in->dot_live ? in->dot_live + r : NULL;
    if (dot) *dot = 0;
    if (dot_live) *dot_live = 0;
    float whole = 0; /* what all entries of the gradient are where the row is special */
    if (y < 0) {
        in->log_p[r] = 0;
        goto flat;
    }

    /* The largest score; sums of zeros that show a NaN. */
    vf top = vf_set(-INFINITY), strange = {0};
    ptrdiff_t i = 0;
    for (; i + EXPACC_LANES <= n; i += EXPACC_LANES) {
        vf v = vf_load(x + i);
        strange += v * 0.0f;
        top = vf_max(v, top);
    }
    if (i < n) {
        vf v = vf_load_some(x + i, n - i, x[n - 1]);
        strange += v * 0.0f;
        top = vf_max(v, top);
    }
    const float most = vf_largest(top), own = x[y];
    if (!vm_all(vf_eq(strange, (vf){0}))) {
        int broken = 0, live = 0, above = 0;
        for (ptrdiff_t k = 0; k < n; k++) {
            broken |= isnan(x[k]);
            live |= k != y && x[k] > -INFINITY;
            above |= k != y && x[k] == INFINITY;
        }
        if (broken || (above && own == INFINITY)) {
            in->log_p[r] = whole = NAN;
            goto flat;
        }
        if (above || (own == -INFINITY && live)) {
            in->log_p[r] = -INFINITY;
            goto flat;
        }
        if (own == -INFINITY || own == INFINITY || !live) {
            in->log_p[r] = own == -INFINITY ? (float)-log((double)n) : 0.0f;
            goto flat;
        }
    }

    const float scale = (float)in->scale[r], cap = (float)in->cap[r];
    const int capped = cap < INFINITY;
    const float floor = -cap;
    float shift = (most - own) * scale < FAR ? (most - own) * scale : FAR; /* the target's own t is 0, so most >= own and shift >= 0 */
    if (capped && floor > shift) shift = floor;
    /* exp(t - shift), with the target's own replaced by 0: summed, kept. */
    double sum = 0, wide = 0, live = 0;
    vf part = {0}, part_wide = {0}, part_live = {0};
    const int dots = dot || dot_live;
    const float infinity = INFINITY;
    for (i = 0; i < n; i += EXPACC_LANES) {
        vf v = vf_load_some(x + i, n - i, -infinity);
        vf t = vf_min((v - own) * scale, vf_set(FAR));
        if (capped) t = vf_select(vf_lt(vf_set(-infinity), t), vf_max(t, vf_set(floor)), t);
        vf arg = t - shift;
        vf e = vf_where(vf_lt(vf_set(-87.0f), arg), vf_exp(arg));
        part += e;
        if (dots) { /* -Σ e m; a masked class has e = 0 and m = inf; the target's own m is 0, or taken out below */
            vf d = vf_where(vf_lt((vf){0}, e), e * t);
            part_wide += d;
            if (capped) part_live += vf_where(vf_lt(vf_set(floor), (v - own) * scale), d);
        }
        if (g) vf_store_some(g + i, e, n - i);
        if ((i & (BLOCK - 1)) == BLOCK - EXPACC_LANES) {
            sum += vf_sum(part), wide += vf_sum(part_wide), live += vf_sum(part_live);
            part = part_wide = part_live = (vf){0};
        }
    }
    sum += vf_sum(part), wide += vf_sum(part_wide), live += vf_sum(part_live);
    float mine;
    {
        float t = capped && floor > 0 ? floor : 0.0f;
        vf arg = vf_set(t - shift);
        mine = vf_where(vf_lt(vf_set(-87.0f), arg), vf_exp(arg))[0];
    }
    sum -= mine;
    if (capped && floor > 0) wide -= (double)mine * floor;
    if (!capped) live = wide;
    /* For a confident row the difference has lost its digits: once more without the target. */
    if (sum < 0.01 * mine) {
        sum = 0, part = (vf){0};
        for (i = 0; i < n; i += EXPACC_LANES) {
            vf v = vf_load_some(x + i, n - i, -infinity);
            vf t = vf_min((v - own) * scale, vf_set(FAR));
            if (capped) t = vf_select(vf_lt(vf_set(-infinity), t), vf_max(t, vf_set(floor)), t);
            vf arg = t - shift, e = vf_where(vf_lt(vf_set(-87.0f), arg), vf_exp(arg));
            if (y - i >= 0 && y - i < EXPACC_LANES) e[y - i] = 0;
            part += e;
            if ((i & (BLOCK - 1)) == BLOCK - EXPACC_LANES) {
                sum += vf_sum(part);
                part = (vf){0};
            }
        }
        sum += vf_sum(part);
    }
    const double one = shift > 0 ? exp(-(double)shift) : 1.0, all = one + sum;
    const double log_p = shift > 0 ? -((double)shift + log(all)) : -log1p(sum);
    in->log_p[r] = (float)log_p;
    if (!g && !dot && !dot_live) return;

    const double weight = in->factor[r] * exp(in->power * log_p) / all;
    if (dot) *dot = -weight * wide;
    if (dot_live) *dot_live = -weight * live;
    if (!g) return;
    float c = (float)(weight * in->scale[r]), more = 1.0f;
    if (fabsf(c) > FAR) expacc_split(weight * in->scale[r], &c, &more);
    double total = 0;
    part = (vf){0};
    for (i = 0; i < n; i += EXPACC_LANES) {
        vf e = c * vf_load_some(g + i, n - i, 0) * more;
        if (capped) {
            vf u = (vf_load_some(x + i, n - i, -infinity) - own) * scale;
            e = vf_where(vf_lt(vf_set(floor), u), e);
        }
        if (y - i >= 0 && y - i < EXPACC_LANES) e[y - i] = 0;
        part += e;
        vf_store_some(g + i, e, n - i);
        if ((i & (BLOCK - 1)) == BLOCK - EXPACC_LANES) {
            total += vf_sum(part);
            part = (vf){0};
        }
    }
    total += vf_sum(part);
    g[y] = -(float)total;
    return;

flat:
    if (g)
        for (ptrdiff_t k = 0; k < n; k++) g[k] = whole;
}

size_t EXPACC_NAME(expacc_gumbel_scratch)(ptrdiff_t classes) {
    (void)classes;
    return 0;
}

void EXPACC_NAME(expacc_gumbel)(const expacc_rows *in, void *scratch) {
    (void)scratch;
    for (ptrdiff_t r = 0; r < in->rows; r++) one_row(in, r);
}
