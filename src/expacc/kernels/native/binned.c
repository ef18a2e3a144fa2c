/* The row kernel for many classes: the classes of a row are compressed, the nodes see the compressed row. */
#include "kernels.h"
#include "rows.h"
#include "tables.h"
#include "vec.h"

#include <math.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define LISTED 256              /* up to so many classes are kept one by one */
#define CELLS 288
#define FINE 4000               /* from so many classes on fine cells cost nothing */
#define COPIES 4                /* of the histogram: a class does not wait for the class before it */
#define RUN (16 * EXPACC_LANES)  /* classes whose gradient is summed in float */
#define BATCH 256               /* classes that are binned at a time */
#define SAMPLED 2048            /* from so many classes on a sample of them says how many can be cut away */
#define SAMPLES 256
#define NODES 128
#define SCAN 32
#define PIECES 32               /* of the gradient */
#define CERTAIN 18.7
#define DROP 13.0f
#define DROP_SLOPE 11.0f
#define FLANK_DROP 4.5f
#define PEAK_STEP 1.0f
#define FLANK_STEP 1.5f
#define UNIT TABLE_PER_UNIT

typedef float v4 __attribute__((vector_size(16)));

typedef struct {
    float hist[CELLS][COPIES][4];      /* a cache line per cell */
    double total[CELLS][4];
    float cell[CELLS][4];              /* the cells that are not empty, */
    int32_t point[CELLS];              /* and their middles in 1/32 */
    float group[CELLS];
    float gap[2 * BATCH + 16];         /* in cells: classes that wait to be binned */
    uint32_t slot[BATCH + 16];
    float power[(BATCH + 16) * 4];
    float sample[SAMPLES + 32];
    float height[NODES], weight[NODES];
    float value[3][PIECES + 16];
    float piece[PIECES][8];
    float coef[5][PIECES];
    int32_t offset[LISTED + 16], index[LISTED + 16];
    float rest[LISTED + 16];
} work;

enum { NORMAL, LOST, WON, BROKEN, LEVEL };

/* ---- small pieces ---- */
/* libm's are calls: they have rules for NaN. */
#define LESS(a, b) ((a) < (b) ? (a) : (b))
#define MORE(a, b) ((a) > (b) ? (a) : (b))
static float log_one(float x) { return vf_log(vf_set(x))[0]; }
static float exp_one(float x) { return x < -87.0f ? 0.0f : vf_exp(vf_set(x))[0]; }

EXPACC_INLINE vi vi_load(const int32_t *p) { vi a; memcpy(&a, p, sizeof a); return a; }
EXPACC_INLINE void vi_store(int32_t *p, vi a) { memcpy(p, &a, sizeof a); }
EXPACC_INLINE vi lane_index(void) {
    vi a;
    for (int i = 0; i < EXPACC_LANES; i++) a[i] = i;
    return a;
}
EXPACC_INLINE v4 v4_load(const float *p) { v4 a; memcpy(&a, p, sizeof a); return a; }
EXPACC_INLINE void v4_store(float *p, v4 a) { memcpy(p, &a, sizeof a); }
EXPACC_INLINE vf lanes_ramp(void) {
    vf a;
    for (int i = 0; i < EXPACC_LANES; i++) a[i] = (float)i;
    return a;
}
/* The first n numbers, -inf in the other lanes. */
EXPACC_INLINE vf load_part(const float *x, ptrdiff_t n) {
#if EXPACC_LANES == 16
    return (vf)_mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), (__mmask16)((1u << n) - 1), x);
#else
    float part[EXPACC_LANES];
    for (int k = 0; k < EXPACC_LANES; k++) part[k] = k < n ? x[k] : -INFINITY;
    return vf_load(part);
#endif
}
EXPACC_INLINE void store_part(float *x, ptrdiff_t n, vf a) {
#if EXPACC_LANES == 16
    _mm512_mask_storeu_ps(x, (__mmask16)((1u << n) - 1), (__m512)a);
#else
    for (int k = 0; k < n; k++) x[k] = a[k];
#endif
}
/* Sum and maximum over the lanes as a tree. */
EXPACC_INLINE float sum_lanes(vf a) {
#if EXPACC_LANES == 16
    return _mm512_reduce_add_ps((__m512)a);
#else
    float s[EXPACC_LANES];
    vf_store(s, a);
    for (int n = EXPACC_LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) s[i] += s[i + n];
    return s[0];
#endif
}
EXPACC_INLINE float max_lanes(vf a) {
#if EXPACC_LANES == 16
    return _mm512_reduce_max_ps((__m512)a);
#else
    float s[EXPACC_LANES];
    vf_store(s, a);
    for (int n = EXPACC_LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) s[i] = s[i] > s[i + n] ? s[i] : s[i + n];
    return s[0];
#endif
}
/* Round to the nearest integer, |a| < 2^22. */
EXPACC_INLINE vf vf_round(vf a) {
    const float magic = 12582912.0f;
    return (a + magic) - magic;
}
/* 1 - exp(f) for f <= 0, to full relative accuracy. */
EXPACC_INLINE vf vf_lack(vf f) {
    vf s = vf_max(f, vf_set(-0.5f));
    vf p = 1.0f / 40320 * s + 1.0f / 5040;
    p = p * s + 1.0f / 720;
    p = p * s + 1.0f / 120;
    p = p * s + 1.0f / 24;
    p = p * s + 1.0f / 6;
    p = p * s + 0.5f;
    p = -(p * s * s + s);
    return vf_select(vf_lt(f, vf_set(-0.5f)), 1.0f - vf_exp(f), p);
}

/* ---- what a row is ---- */
static int classify(const float *x, ptrdiff_t classes, int64_t y) {
    int any_live = 0, any_top = 0;
    for (ptrdiff_t i = 0; i < classes; i++) {
        if (isnan(x[i])) return BROKEN;
        if (i == y) continue;
        any_top |= x[i] == INFINITY;
        any_live |= x[i] > -INFINITY;
    }
    if (any_top) return x[y] == INFINITY ? BROKEN : LOST;
    if (x[y] == -INFINITY) return any_live ? LOST : LEVEL;
    return any_live && x[y] < INFINITY ? NORMAL : WON;
}

/* The largest score but the target's; *finite is 0 where any score is not finite. `sample` gets the largest scores of
 * `*samples` parts of the row: the classes that matter are among them. */
static float largest(const float *x, ptrdiff_t classes, ptrdiff_t y, int *finite, float *sample, int *samples) {
    const ptrdiff_t vectors = classes / EXPACC_LANES;
    ptrdiff_t run = vectors / (SAMPLES / EXPACC_LANES) + 1;
    if (run < 8) run = 8;
    vf top = vf_set(-INFINITY), check = {0}, check2 = check;
    *samples = 0;
    for (ptrdiff_t v = 0; v < vectors; v += run) {
        const ptrdiff_t end = v + run < vectors ? v + run : vectors, mine = y / EXPACC_LANES;
        vf part = vf_set(-INFINITY), part2 = part;
        ptrdiff_t k = v;
        for (int half = 0; half < 2; half++) {
            const ptrdiff_t stop = half == 0 && mine >= v && mine < end ? mine : end;
            for (; k + 1 < stop; k += 2) {
                vf a = vf_load(x + k * EXPACC_LANES), b = vf_load(x + (k + 1) * EXPACC_LANES);
                part = vf_max(part, a), part2 = vf_max(part2, b);
                check += a * 0.0f, check2 += b * 0.0f;
            }
            if (k < stop) {
                vf a = vf_load(x + k * EXPACC_LANES);
                part = vf_max(part, a);
                check += a * 0.0f;
                k++;
            }
            if (k == end) break;
            vf a = vf_load(x + k * EXPACC_LANES);
            check += a * 0.0f;
            part = vf_max(part, vf_select(vf_eq(lanes_ramp(), vf_set((float)(y - k * EXPACC_LANES))), vf_set(-INFINITY), a));
            k++;
        }
        part = vf_max(part, part2);
        top = vf_max(top, part);
        vf_store(sample + *samples, part);
        *samples += EXPACC_LANES;
    }
    const ptrdiff_t done = vectors * EXPACC_LANES;
    check += check2;
    if (done < classes) {
        vf a = load_part(x + done, classes - done), lane = lanes_ramp();
        check += vf_where(vf_lt(lane, vf_set((float)(classes - done))), a) * 0.0f;
        if (y >= done) a = vf_select(vf_eq(lane, vf_set((float)(y - done))), vf_set(-INFINITY), a);
        top = vf_max(top, a);
    }
    *finite = vm_all(vf_eq(check, (vf){0}));
    return max_lanes(top);
}

/* ---- the row as the nodes see it: a list of classes, or cells with four moments ---- */
typedef struct {
    work *w;
    int listed;      /* > 0: so many classes one by one (offset t in cells of 1/32); else cells */
    int cells, fit;  /* the number of cells that are not empty, of width 1/(8 << fit) */
    int groups;      /* of 1/4: coarser cells to steer by */
} compressed;


/* log F at `vectors` vectors of nodes, `skip` steps of layout a to the right of the table point `first`. */
EXPACC_INLINE void heights_block(const compressed *c, int first, int a, int skip, int rough, int vectors, float *out) {
    work *w = c->w;
    const int stride = TABLE_STRIDES[a], magic = table_magic(a), run = TABLE_POINTS / stride;
    vf sum[4], more[4];
    for (int v = 0; v < vectors; v++) sum[v] = more[v] = (vf){0};
    if (c->listed) {
        const float *table = &expacc_tables.cdf[2][a][0][skip];
        for (int i = 0; i < c->listed; i++) {
            const float *p = table + w->offset[i];
            if (rough) {
                for (int v = 0; v < vectors; v++) sum[v] += vf_load(p + v * EXPACC_LANES);
            } else {
                vf t = vf_set(w->rest[i]);
                for (int v = 0; v < vectors; v++) {
                    const float *q = p + v * EXPACC_LANES;
                    vf s = vf_load(q + 3 * TABLE_POINTS) * t + vf_load(q + 2 * TABLE_POINTS);
                    s = s * t + vf_load(q + TABLE_POINTS);
                    sum[v] += s * t + vf_load(q);
                }
            }
        }
    } else if (rough) {
        /* groups of width 1/4, at their middles */
        const float *table = &expacc_tables.cdf[2][a][0][skip];
        for (int g = 0; g < c->groups; g++) {
            const int at = first + 8 * g + 3, quotient = (at * magic) >> 16;
            const float *p = table + (at - quotient * stride) * run + quotient;
            vf n = vf_set(w->group[g]);
            for (int v = 0; v < vectors; v++) sum[v] += n * vf_load(p + v * EXPACC_LANES);
        }
    } else {
        const float *table = &expacc_tables.cdf[c->fit][a][0][skip];
        for (int j = 0; j < c->cells; j++) {
            const int at = first + w->point[j], quotient = (at * magic) >> 16;
            const float *p = table + (at - quotient * stride) * run + quotient;
            const float *m = w->cell[j];
            vf m0 = vf_set(m[0]), m1 = vf_set(m[1]), m2 = vf_set(m[2]), m3 = vf_set(m[3]);
            for (int v = 0; v < vectors; v++) {
                const float *q = p + v * EXPACC_LANES;
                sum[v] += m0 * vf_load(q);
                more[v] += m1 * vf_load(q + TABLE_POINTS);
                sum[v] += m2 * vf_load(q + 2 * TABLE_POINTS);
                more[v] += m3 * vf_load(q + 3 * TABLE_POINTS);
            }
        }
    }
    for (int v = 0; v < vectors; v++) vf_store(out + v * EXPACC_LANES, sum[v] + more[v]);
}

/* log F at count nodes (a multiple of EXPACC_LANES) from the table point `first` on in steps of layout a; only to steer
 * by where `rough`. */
static void heights(const compressed *c, int first, int a, int rough, int count, float *out) {
    work *w = c->w;
    if (c->listed) {
        const int stride = TABLE_STRIDES[a], magic = table_magic(a), run = TABLE_POINTS / stride;
        const vi limit = (vi){0} + (14 - TABLE_LOW) * UNIT; /* from there on it is 0 */
        for (int i = 0; i < c->listed; i += EXPACC_LANES) {
            vi at = vi_load(w->index + i) + first;
            vi over = at > limit;
            at = (at & ~over) | (limit & over);
            vi quotient = (at * magic) >> 16;
            vi_store(w->offset + i, (at - quotient * stride) * run + quotient);
        }
    }
    int k = 0;
    if (rough) {
        for (; k < count; k += 2 * EXPACC_LANES) heights_block(c, first, a, k, 1, 2, out + k);
        return;
    }
    for (; k + 2 * EXPACC_LANES <= count; k += 2 * EXPACC_LANES) heights_block(c, first, a, k, 0, 2, out + k);
    if (k < count) heights_block(c, first, a, k, 0, 1, out + k);
}

/* ---- where the integrands live ---- */
typedef struct {
    double low, high; /* the support, in y = z + nearest gap */
    double mode;      /* a point near the peak of what is integrated */
    int layout;       /* of the step */
    int confident;    /* 1 - P is the one to integrate */
    int outside;      /* the table does not reach */
} support;

/* Bits of the lanes above a level, over SCAN floats. */
EXPACC_INLINE uint32_t above(const float *e, float level) {
    uint32_t bits = 0;
#if EXPACC_LANES == 16
    for (int k = 0; k < SCAN; k += 16) bits |= (uint32_t)vf_lt(vf_set(level), vf_load(e + k)) << k;
#elif EXPACC_LANES == 8
    for (int k = 0; k < SCAN; k += 8)
        bits |= (uint32_t)_mm256_movemask_ps((__m256)vf_lt(vf_set(level), vf_load(e + k))) << k;
#else
    for (int k = 0; k < SCAN; k++) bits |= (uint32_t)(e[k] > level) << k;
#endif
    return bits;
}

/* Where e crosses the level, left and right of its peak (in steps), by chords: e is concave near enough. */
EXPACC_INLINE void crossings(const float *e, float level, float *left, float *right) {
    uint32_t bits = above(e, level);
    int l = __builtin_ctz(bits), r = 31 - __builtin_clz(bits);
    *left = l == 0 ? 0.0f : (float)l - (e[l] - level) / (e[l] - e[l - 1]);
    *right = r == SCAN - 1 ? (float)r : (float)r + (e[r] - level) / (e[r] - e[r + 1]);
}

/* Look at the row at SCAN points from table point `first` on, in steps of layout a. */
static support look(const compressed *c, double nearest, int first, int a) {
    float f[SCAN], g[SCAN], value[SCAN], slope[SCAN];
    support s = {0};
    double wide_low = 1e9, wide_high = -1e9;
    for (;;) {
        heights(c, first, a, 1, SCAN, f);
        const float step = (float)TABLE_STRIDES[a] / UNIT, y0 = TABLE_LOW + (float)first / UNIT, z0 = (float)(y0 - nearest);
        const float *cdf = &expacc_tables.cdf[2][a][0][table_at(first, a)];
        vf best = vf_set(-INFINITY), best_slope = best, mass = {0};
        for (int k = 0; k < SCAN; k += EXPACC_LANES) {
            vf move = (lanes_ramp() + (float)k) * step, z = move + z0, y = move + y0;
            vf h = vf_load(f + k) - 0.5f * z * z;
            vf d = h - 0.5f * y * y - vf_load(cdf + k); /* log λ = log φ - log Φ, without a constant */
            vf_store(g + k, h);
            vf_store(slope + k, d);
            best = vf_max(best, h), best_slope = vf_max(best_slope, d);
            mass += vf_exp(h);
        }
        s.confident = sum_lanes(mass) * step * EXPACC_INV_SQRT_2PI > 0.5f;
        float top = max_lanes(best), top_slope = max_lanes(best_slope);
        const float *v = g;
        s.outside = first == 0 && (g[0] > top - 24.0f || slope[0] > top_slope - 24.0f);
        if (s.confident) {
            best = vf_set(-INFINITY);
            for (int k = 0; k < SCAN; k += EXPACC_LANES) {
                vf z = (lanes_ramp() + (float)k) * step + z0;
                vf q = vf_log(vf_max(vf_lack(vf_load(f + k)), vf_set(1e-37f))) - 0.5f * z * z;
                vf_store(value + k, q);
                best = vf_max(best, q);
            }
            top = max_lanes(best);
            v = value;
        }
        const int mode = __builtin_ctz(above(v, top - 1e-6f * fabsf(top) - 1e-6f));
        const float bend = mode > 0 && mode < SCAN - 1 ? 2 * v[mode] - v[mode - 1] - v[mode + 1] : 0;
        float low, high, low2, high2;
        crossings(v, top - DROP, &low, &high);
        crossings(slope, top_slope - DROP_SLOPE, &low2, &high2);
        low = LESS(low, low2), high = MORE(high, high2);
        /* An edge beyond what a closer look sees is that of the wider look. */
        s.low = low > 0 ? y0 + step * low : LESS(y0, wide_low);
        s.high = high < SCAN - 1 ? y0 + step * high : MORE(y0 + step * high, wide_high);
        s.mode = y0 + step * (float)mode;
        if (!s.confident && a > 0 && bend > 2.0f) { /* too narrow to be seen: closer, around the peak */
            const int b = a >= TABLE_ONE ? 5 : a >= TABLE_HALF ? 3 : a > 3 ? 1 : 0; /* a quarter */
            const int to = first + mode * TABLE_STRIDES[a] - SCAN / 2 * TABLE_STRIDES[b];
            a = b, first = to < 0 ? 0 : to;
            wide_low = s.low, wide_high = s.high;
            continue;
        }
        /* The step: fine enough at the peak and a little down its left flank. */
        uint32_t under;
        int flank;
        if (s.confident) {
            under = ~above(f, -FLANK_DROP);
            flank = under ? 31 - __builtin_clz(under) : 0;
            if (flank < (int)low) flank = (int)low;
        } else {
            under = ~above(g, top - FLANK_DROP) & ((1u << mode) - 1);
            flank = under ? 31 - __builtin_clz(under) : 0;
        }
        float want = s.confident ? 0.5f : bend > 0 ? PEAK_STEP * step / sqrtf(bend) : 0.75f;
        if (flank > 0 && flank < SCAN - 1) {
            float k1 = 2 * g[flank] - g[flank - 1] - g[flank + 1];
            if (k1 > 0) want = LESS(want, FLANK_STEP * step / sqrtf(k1));
        }
        int layout = 0;
        want *= UNIT;
        while (layout < TABLE_ONE - 1 && (float)TABLE_STRIDES[layout + 1] <= want) layout++;
        while ((s.high - s.low) * UNIT > (double)((NODES - EXPACC_LANES) * TABLE_STRIDES[layout])) layout++;
        s.layout = layout;
        return s;
    }
}

/* ---- compressing ---- */
/* Beyond this gap above the nearest a class is worth less than 1e-6/C of the row, wherever the row lives (from low on):
 * depth = 2 log(1e6 C). */
static double reach(double low, double depth) {
    double right = MORE(low, 0.0);
    return sqrt(right * right + depth) - low;
}

/* The classes one by one: index and rest of gap * 32, gaps held at `held`. */
static void list_row(compressed *c, const float *x, ptrdiff_t n, ptrdiff_t y, float top, double scale, double held) {
    work *w = c->w;
    c->listed = (int)n;
    const float unit = (float)(scale * UNIT), shut = (float)LESS(held * UNIT, 3000.0);
    for (ptrdiff_t i = 0; i < n; i += EXPACC_LANES) {
        vf d = top - (i + EXPACC_LANES <= n ? vf_load(x + i) : load_part(x + i, n - i));
        vf q = vf_select(vf_lt(d, vf_set(INFINITY)), vf_min(d * unit, vf_set(shut)), vf_set(3000.0f));
        vf r = vf_round(q);
        vf_store(w->rest + i, q - r);
        vi_store(w->index + i, __builtin_convertvector(r, vi));
    }
    if (y >= 0) w->index[y] = 3000, w->rest[y] = 0;
}

/* Add the powers 1, t, t², t³ of n gaps (a multiple of EXPACC_LANES) to their cells. */
static void deposit(work *w, const float *gap, ptrdiff_t n) {
    enum { RUNS = EXPACC_LANES / 4 };
    for (ptrdiff_t i = 0; i < n; i += EXPACC_LANES) {
        float *p = w->power + 4 * i;
        vf q = vf_load(gap + i), r = vf_round(q), t = q - r, t2 = t * t, t3 = t2 * t;
        vi number = __builtin_convertvector(r, vi) << 6;
        memcpy(w->slot + i, &number, sizeof number);
#if EXPACC_LANES == 16
        __m512 one = _mm512_set1_ps(1.0f), a = (__m512)t, b = (__m512)t2, c = (__m512)t3;
        __m512 l0 = _mm512_unpacklo_ps(one, a), h0 = _mm512_unpackhi_ps(one, a);
        __m512 l1 = _mm512_unpacklo_ps(b, c), h1 = _mm512_unpackhi_ps(b, c);
        _mm512_storeu_ps(p, (__m512)_mm512_unpacklo_pd((__m512d)l0, (__m512d)l1));
        _mm512_storeu_ps(p + 16, (__m512)_mm512_unpackhi_pd((__m512d)l0, (__m512d)l1));
        _mm512_storeu_ps(p + 32, (__m512)_mm512_unpacklo_pd((__m512d)h0, (__m512d)h1));
        _mm512_storeu_ps(p + 48, (__m512)_mm512_unpackhi_pd((__m512d)h0, (__m512d)h1));
#elif EXPACC_LANES == 8
        __m256 one = _mm256_set1_ps(1.0f), a = (__m256)t, b = (__m256)t2, c = (__m256)t3;
        __m256 l0 = _mm256_unpacklo_ps(one, a), h0 = _mm256_unpackhi_ps(one, a);
        __m256 l1 = _mm256_unpacklo_ps(b, c), h1 = _mm256_unpackhi_ps(b, c);
        _mm256_storeu_ps(p, (__m256)_mm256_unpacklo_pd((__m256d)l0, (__m256d)l1));
        _mm256_storeu_ps(p + 8, (__m256)_mm256_unpackhi_pd((__m256d)l0, (__m256d)l1));
        _mm256_storeu_ps(p + 16, (__m256)_mm256_unpacklo_pd((__m256d)h0, (__m256d)h1));
        _mm256_storeu_ps(p + 24, (__m256)_mm256_unpackhi_pd((__m256d)h0, (__m256d)h1));
#else
        for (int k = 0; k < EXPACC_LANES; k++) {
            v4 m = {1.0f, t[k], t2[k], t3[k]};
            v4_store(p + 4 * k, m);
        }
#endif
    }
    /* A loop of its own: together with the one above the additions fill the scheduler and it takes 1.4 times as long. */
    char *hist = (char *)w->hist;
    for (ptrdiff_t i = 0; i < n; i += EXPACC_LANES) {
        const uint32_t *slot = w->slot + i;
        const float *p = w->power + 4 * i;
        /* With 16 and 8 lanes the classes k, k + 4, k + 8, k + 12 of a vector stand together. */
#pragma GCC unroll 4
        for (int r4 = 0; r4 < RUNS; r4++)
#pragma GCC unroll 4
            for (int c4 = 0; c4 < COPIES; c4++) {
                float *h = (float *)(hist + slot[4 * r4 + c4]) + 4 * c4;
                const int at = EXPACC_LANES >= 8 ? c4 * RUNS + r4 : 4 * r4 + c4;
                v4_store(h, v4_load(h) + v4_load(p + 4 * at));
            }
    }
}

EXPACC_INLINE v4 cell_sum(const work *w, int j) {
    return (v4_load(w->hist[j][0]) + v4_load(w->hist[j][1])) + (v4_load(w->hist[j][2]) + v4_load(w->hist[j][3]));
}

/* Move what the cells hold into sums in double: float would lose its digits with 100 000 equal classes. */
static void settle(work *w, int cells, int *settled) {
    if (!*settled) memset(w->total, 0, sizeof w->total[0] * (size_t)cells);
    *settled = 1;
    for (int j = 0; j < cells; j++) {
        v4 sum = cell_sum(w, j);
        for (int k = 0; k < 4; k++) w->total[j][k] += sum[k];
    }
    memset(w->hist, 0, sizeof w->hist[0] * (size_t)cells);
}

/* Write the numbers of those lanes of a that are in the mask, and return how many. */
EXPACC_INLINE ptrdiff_t keep(float *out, vm in, vf a) {
#if EXPACC_LANES == 16
    _mm512_storeu_ps(out, _mm512_maskz_compress_ps(in, (__m512)a));
    return __builtin_popcount(in);
#else
    ptrdiff_t n = 0;
    for (int k = 0; k < EXPACC_LANES; k++) {
        out[n] = a[k];
        n -= in[k];
    }
    return n;
#endif
}

/* Compress the classes with gaps u = (top - x) * scale below `most`; gaps are held at `held`. */
static void bin_row(compressed *c, const float *x, ptrdiff_t n, ptrdiff_t y, float top, double scale, double most, double held) {
    work *w = c->w;
    const int per = 8 << c->fit, wide = UNIT / per;
    int cells = (int)(most * per + 0.5) + 1;
    if (cells > CELLS - 1) cells = CELLS - 1;
    memset(w->hist, 0, sizeof w->hist[0] * (size_t)cells + sizeof w->hist[0]);
    const float unit = (float)(scale * per), limit = (float)cells - 0.501f, shut = (float)LESS(held * per, 1e30);
    int settled = 0, waiting = 0, deposited = 0;
    for (ptrdiff_t i0 = 0; i0 < n; i0 += BATCH) {
        const ptrdiff_t size = n - i0 < BATCH ? n - i0 : BATCH;
        for (ptrdiff_t i = 0; i < size; i += EXPACC_LANES) {
            vf v = i + EXPACC_LANES <= size ? vf_load(x + i0 + i) : load_part(x + i0 + i, size - i);
            if ((size_t)(y - i0 - i) < EXPACC_LANES)
                v = vf_select(vf_eq(lanes_ramp(), vf_set((float)(y - i0 - i))), vf_set(-INFINITY), v);
            vf d = top - v, q = vf_min(d * unit, vf_set(shut));
            vm in = vf_lt(q, vf_set(limit));
            if (shut < limit) { /* everybody is near then, but a class that takes no part */
                vf alive = vf_where(vf_lt(d, vf_set(INFINITY)), vf_set(1.0f));
                in = vf_lt(vf_set(0.5f), alive);
                q = vf_where(in, q);
            }
            waiting += (int)keep(w->gap + waiting, in, q);
        }
        if (waiting >= BATCH) {
            deposit(w, w->gap, BATCH);
            waiting -= BATCH;
            memmove(w->gap, w->gap + BATCH, sizeof(float) * (size_t)waiting);
            if (++deposited % 8 == 0) settle(w, cells, &settled);
        }
    }
    if (!deposited && waiting <= LISTED) { /* few are left: one by one */
        c->listed = waiting;
        for (int i = 0; i < waiting; i += EXPACC_LANES) {
            vf q = vf_load(w->gap + i) * (float)wide, r = vf_round(q);
            vf_store(w->rest + i, q - r);
            vi_store(w->index + i, __builtin_convertvector(r, vi));
        }
        return;
    }
    const int rest = waiting % EXPACC_LANES;
    if (rest)
        for (int k = rest; k < EXPACC_LANES; k++) w->gap[waiting++] = (float)cells;
    deposit(w, w->gap, waiting);
    const int group = 2 << c->fit;
    int used = 0;
    c->listed = 0;
    c->groups = (cells + group - 1) / group;
    for (int g = 0; g < c->groups; g++) {
        float count = 0;
        const int end = (g + 1) * group < cells ? (g + 1) * group : cells;
        for (int j = g * group; j < end; j++) {
            v4 sum = cell_sum(w, j);
            if (settled)
                for (int k = 0; k < 4; k++) sum[k] = (float)(w->total[j][k] + (double)sum[k]);
            v4_store(w->cell[used], sum);
            w->point[used] = j * wide;
            used += sum[0] != 0.0f;
            count += sum[0];
        }
        w->group[g] = count;
    }
    c->cells = used;
}

/* ---- the integrals ---- */
typedef struct {
    double log_p;
    double slope;   /* ∂L/∂m of the nearest competitor, the unit of the pieces */
    int pieces;     /* the classes beyond take no part in the gradient */
    float width;    /* of a piece */
} integrals;

static integrals integrate(const compressed *c, double nearest, const support *s, double depth, int slopes) {
    work *w = c->w;
    integrals out = {0};
    const int a = s->layout, stride = TABLE_STRIDES[a];
    const double step = (double)stride / UNIT;
    int first = (int)((s->low - TABLE_LOW) * UNIT);
    if (first < 0) first = 0;
    const double y0 = TABLE_LOW + (double)first / UNIT;
    int count = (int)((s->high - y0) / step) + 2;
    count = (count + EXPACC_LANES - 1) & ~(EXPACC_LANES - 1);
    if (count > NODES) count = NODES;
    heights(c, first, a, 0, count, w->height);

    /* e^(-z²/2) F relative to its value at the mode, without the large common part */
    const double zr = s->mode - nearest;
    const float twice = (float)(s->mode - 2 * nearest), mode = (float)s->mode;
    double mass;
    if (!s->confident) {
        vf best = vf_set(-INFINITY), sum = {0};
        for (int k = 0; k < count; k += EXPACC_LANES) {
            vf y = (lanes_ramp() + (float)k) * (float)step + (float)y0;
            vf g = vf_load(w->height + k) - 0.5f * (y - mode) * (y + twice);
            vf_store(w->weight + k, g);
            best = vf_max(best, g);
        }
        const float top = max_lanes(best);
        for (int k = 0; k < count; k += EXPACC_LANES) {
            vf g = vf_load(w->weight + k) - top;
            vf e = vf_where(vf_lt(vf_set(-60.0f), g), vf_exp(g));
            vf_store(w->weight + k, e);
            sum += e;
        }
        mass = (double)sum_lanes(sum);
        out.log_p = (double)top - 0.5 * zr * zr + (double)log_one((float)(mass * step * EXPACC_INV_SQRT_2PI));
        out.slope = 1.0 / mass;
    } else {
        vf sum = {0};
        for (int k = 0; k < count; k += EXPACC_LANES) {
            vf y = (lanes_ramp() + (float)k) * (float)step + (float)y0;
            vf g = -0.5f * (y - mode) * (y + twice), h = vf_load(w->height + k);
            vf e = vf_where(vf_lt(vf_set(-60.0f), g), vf_exp(g));
            sum += e * vf_lack(h);
            vf_store(w->weight + k, vf_where(vf_lt(vf_set(-60.0f), h), e * vf_exp(h)));
        }
        double unit = step * EXPACC_INV_SQRT_2PI * (double)exp_one((float)(-0.5 * zr * zr));
        double miss = LESS((double)sum_lanes(sum) * unit, 0.75);
        out.log_p = (double)vf_log1p(vf_set((float)-miss))[0];
        out.slope = unit / (1.0 - miss);
    }
    if (!slopes) return out;

    /* log G at equally spaced gaps, with two derivatives */
    int low = 0, high = count;
    while (low < count - 1 && w->weight[low] == 0.0f) low++;
    while (high > low + 1 && w->weight[high - 1] == 0.0f) high--;
    const double bottom = y0 + low * step, most = reach(MORE(bottom, s->low), depth);
    const int b = most > 15.5;
    const float width = b ? 1.0f : 0.5f;
    vf sums[3][PIECES / EXPACC_LANES];
    for (int d = 0; d < 3; d++)
        for (int v = 0; v < PIECES / EXPACC_LANES; v++) sums[d][v] = (vf){0};
    for (int k = low; k < high; k++) {
        const float *p = &expacc_tables.hazard[b][0][table_at(first + k * stride, b ? TABLE_ONE : TABLE_HALF)];
        vf e = vf_set(w->weight[k]);
        for (int d = 0; d < 3; d++)
            for (int v = 0; v < PIECES / EXPACC_LANES; v++)
                sums[d][v] += e * vf_load(p + d * TABLE_POINTS + v * EXPACC_LANES);
    }
    double unit = (double)sums[0][0][0];
    out.slope *= unit;
    float inverse = (float)(1.0 / unit);
    for (int v = 0; v < PIECES / EXPACC_LANES; v++) {
        vf g = vf_max(sums[0][v], vf_set(1e-37f));
        vf l1 = sums[1][v] / g;
        vf h = vf_exp(0.125f * vf_log(vf_max(g * inverse, vf_set(1e-37f)))), slope = l1 * (0.125f * width);
        vf_store(w->value[0] + v * EXPACC_LANES, h);
        vf_store(w->value[1] + v * EXPACC_LANES, h * slope);
        vf_store(w->value[2] + v * EXPACC_LANES, h * ((sums[2][v] / g - l1 * l1) * (0.125f * width * width) + slope * slope));
    }
    for (int d = 0; d < 3; d++) w->value[d][PIECES] = 0;
    for (int v = 0; v < PIECES; v += EXPACC_LANES) {
        vf p0 = vf_load(w->value[0] + v), d = vf_load(w->value[0] + v + 1) - p0;
        vf d0 = vf_load(w->value[1] + v), d1 = vf_load(w->value[1] + v + 1);
        vf e0 = vf_load(w->value[2] + v), e1 = vf_load(w->value[2] + v + 1);
        vf_store(w->coef[0] + v, p0);
        vf_store(w->coef[1] + v, d0);
        vf k4 = 0.25f * (e0 + e1) + 0.5f * (d0 - d1);
        vf_store(w->coef[2] + v, 3.0f * d - 2.0f * d0 - d1 + k4);
        vf_store(w->coef[3] + v, d0 + d1 - 2.0f * d - 2.0f * k4);
        vf_store(w->coef[4] + v, k4);
    }
#if EXPACC_LANES != 16
    for (int j = 0; j < PIECES; j++)
        for (int k = 0; k < 5; k++) w->piece[j][k] = w->coef[k][j];
#endif
    out.width = width;
    out.pieces = (int)(most / width) + 1;
    if (out.pieces > PIECES - 1) out.pieces = PIECES - 1;
    return out;
}

typedef struct {
    float top, unit, shut, last;  /* gap in pieces: min((top - x) * unit, shut), nothing from last on */
    float coefficient;            /* of the entry */
    float threshold;              /* scores above it are below the cap */
} slope_rule;

#if EXPACC_LANES == 16
typedef struct { __m512 low[5], high[5]; } pieces; /* stay in registers */
EXPACC_INLINE pieces load_pieces(const work *w) {
    pieces p;
    for (int k = 0; k < 5; k++) p.low[k] = _mm512_loadu_ps(w->coef[k]), p.high[k] = _mm512_loadu_ps(w->coef[k] + 16);
    return p;
}
EXPACC_INLINE vf polynomial(const pieces *c, vi j, vf t) {
    const __m512i i = (__m512i)j;
    vf p = (vf)_mm512_permutex2var_ps(c->low[4], i, c->high[4]);
#pragma GCC unroll 4
    for (int k = 3; k >= 0; k--) p = p * t + (vf)_mm512_permutex2var_ps(c->low[k], i, c->high[k]);
    return p;
}
#else
typedef const float (*pieces)[8];
EXPACC_INLINE pieces load_pieces(const work *w) { return w->piece; }
EXPACC_INLINE vf polynomial(const pieces *piece, vi j, vf t) {
    vf p;
    for (int k = 0; k < EXPACC_LANES; k++) {
        const float *c = (*piece)[j[k]];
        float s = t[k];
        p[k] = (((c[4] * s + c[3]) * s + c[2]) * s + c[1]) * s + c[0];
    }
    return p;
}
#endif

/* The entry of the gradient, 0 where a class takes no part; *gap its gap in pieces. */
EXPACC_INLINE vf slope_of(const pieces *c, const slope_rule *r, int capped, vf x, vf *gap) {
    vf d = r->top - x;
    vf q = d * r->unit;
    if (capped) q = vf_select(vf_lt(d, vf_set(INFINITY)), vf_min(q, vf_set(r->shut)), vf_set(1e9f));
    vm in = vf_lt(q, vf_set(r->last));
    q = vf_min(q, vf_set(r->last));
    *gap = q;
    vi j = __builtin_convertvector(q, vi);
    vf p = polynomial(c, j, q - __builtin_convertvector(j, vf));
    p *= p, p *= p;
    return vf_where(in, p * p * r->coefficient);
}

typedef struct { double all, all_gap, live, live_gap; } slope_sums;

EXPACC_INLINE slope_sums slopes_of(const work *w, const slope_rule *rule, const float *x, float *grad, ptrdiff_t n, ptrdiff_t y,
                                   int capped, int dots) {
    const slope_rule r = *rule;
    const pieces c = load_pieces(w);
    vd total[4] = {{0}};
    for (ptrdiff_t i0 = 0; i0 < n; i0 += RUN) {
        const ptrdiff_t size = n - i0 < RUN ? n - i0 : RUN;
        vf sum[4] = {{0}}; /* all, all · gap, those below the cap, those · gap: few terms in float, the rest in double */
        for (ptrdiff_t i = 0; i < size; i += EXPACC_LANES) {
            const float *p = x + i0 + i;
            const int part = i + EXPACC_LANES > size;
            vf v = part ? load_part(p, size - i) : vf_load(p), q;
            vf g = slope_of(&c, &r, capped, v, &q);
            if ((size_t)(y - i0 - i) < EXPACC_LANES)
                g = vf_select(vf_eq(lanes_ramp(), vf_set((float)(y - i0 - i))), (vf){0}, g);
            if (dots && capped) sum[0] += g, sum[1] += g * q;
            if (capped) g = vf_where(vf_lt(vf_set(r.threshold), v), g);
            sum[2] += g;
            if (dots) sum[3] += g * q;
            if (!grad) continue;
            if (part) store_part(grad + i0 + i, size - i, g);
            else vf_store(grad + i0 + i, g);
        }
        for (int k = 0; k < 4; k++) {
            float half[EXPACC_LANES];
            vf_store(half, sum[k]);
            total[k] += vd_load_float(half) + vd_load_float(half + EXPACC_LANES / 2);
        }
    }
    slope_sums s = {vd_sum(total[0]), vd_sum(total[1]), vd_sum(total[2]), vd_sum(total[3])};
    if (!capped) s.all = s.live, s.all_gap = s.live_gap;
    return s;
}

/* The next float up or down; one step from 0 is the smallest normal number, denormals count as 0. */
static float neighbour(float x, int up) {
    if (fabsf(x) < 2e-38f) return up ? (x < 0 ? 0.0f : 2e-38f) : (x > 0 ? 0.0f : -2e-38f);
    return nextafterf(x, up ? INFINITY : -INFINITY);
}

/* The largest score x with (own - x) * scale >= cap: scores up to it have met the margin. */
static float cap_threshold(double own, double scale, double cap) {
    float x = (float)(own - cap / scale);
    while ((own - (double)x) * scale >= cap) x = neighbour(x, 1);
    while (!((own - (double)x) * scale >= cap)) x = neighbour(x, 0);
    return x;
}

static void fill_row(const expacc_rows *in, ptrdiff_t r, float log_p, float grad) {
    in->log_p[r] = log_p;
    if (in->dot) in->dot[r] = 0;
    if (in->dot_live) in->dot_live[r] = 0;
    if (in->grad)
        for (ptrdiff_t i = 0; i < in->classes; i++) in->grad[r * in->grad_stride + i] = grad;
}

/* ---- rows the table does not hold: hopeless ones, the nearest competitor some 40 sigma above the target ----
 *
 * There the integrand is a narrow, nearly Gaussian peak, and the gaps are large numbers whose differences matter: sums
 * over the classes in double, with the square taken out of log Φ and the linear part out of λ. */
typedef struct { double square, rest, hazard, bend; } far_terms;

/* x = y + u of EXPACC_LANES classes, as float and in two halves; +inf where nobody takes part. */
EXPACC_INLINE vf far_arguments(const float *scores, ptrdiff_t n, ptrdiff_t skip, double y, float top, double scale, double held,
                               vd half[2]) {
    float x[EXPACC_LANES], wide[EXPACC_LANES];
    vf_store(x, n >= EXPACC_LANES ? vf_load(scores) : load_part(scores, n));
    if (skip >= 0 && skip < EXPACC_LANES) x[skip] = -INFINITY;
    for (int h = 0; h < 2; h++) {
        vd d = vd_set((double)top) - vd_load_float(x + h * (EXPACC_LANES / 2));
        vd u = d * scale;
        u = vd_select((vl)(u < vd_set(held)), u, vd_set(held));
        u = vd_select((vl)(d < vd_set(INFINITY)), u, vd_set(INFINITY));
        half[h] = u + y;
        vd_store_float(wide + h * (EXPACC_LANES / 2), half[h]);
    }
    return vf_load(wide);
}

/* λ + x for x < 0 (the linear part taken out), to 1e-5. */
EXPACC_INLINE vf far_excess(vf x) {
    vf t = vf_max(-x, vf_set(1.0f)), i = 1.0f / t;
    return vf_select(vf_lt(x, vf_set(-20.0f)), i * (1.0f - i * i * (2.0f - 10.0f * i * i)), vf_hazard(x) + x);
}

static far_terms far_sum(const float *x, ptrdiff_t n, ptrdiff_t y_class, double y, float top, double scale, double held, int slopes) {
    far_terms s = {0};
    for (ptrdiff_t i = 0; i < n; i += EXPACC_LANES) {
        vd half[2];
        vf v = far_arguments(x + i, n - i, y_class - i, y, top, scale, held, half), zero = {0};
        if (!vm_any(vf_lt(v, vf_set(14.0f)))) continue;
        vf c = vf_max(vf_min(v, vf_set(14.0f)), vf_set(-EXPACC_FAR));
        vm left = vf_lt(c, zero);
        for (int h = 0; h < 2; h++) {
            vd m = vd_select((vl)(half[h] < vd_set(0)), half[h], vd_set(0));
            s.square += vd_sum(m * m);
            s.hazard -= vd_sum(m);
        }
        vf t = vf_max(-c, zero);
        vf rest = vf_select(left, vf_log(vf_mills_top(t) / vf_mills_bottom(t)), vf_log_cdf(c));
        s.rest += vf_sum(vf_where(vf_lt(v, vf_set(14.0f)), rest));
        if (!slopes) continue;
        vf l = vf_hazard(c), e = vf_select(left, far_excess(c), l);
        s.hazard += vf_sum(e);
        s.bend += vf_sum(vf_max(zero, vf_min(vf_set(1.0f), vf_select(left, (t + e) * e, l * (c + l)))));
    }
    return s;
}

/* The product, 0 where v is 0: with a negative power the weight may be inf. */
static double times(double weight, double v) { return v != 0 ? weight * v : 0; }

#define FAR_NODES 25
static void far_row(const expacc_rows *in, ptrdiff_t r, float top, double nearest, double u_scale, double held, int wanted) {
    const ptrdiff_t n = in->classes, own = in->target[r];
    const double stretch = nearest < -EXPACC_FURTHEST ? -nearest / EXPACC_FURTHEST : 1;
    nearest /= stretch, u_scale /= stretch, held /= stretch;
    const float *x = in->x + r * in->stride;
    double y = 0.5 * nearest, width = 1; /* left of the mode: Newton climbs monotonically */
    for (int k = 0; k < 60; k++) {
        far_terms s = far_sum(x, n, own, y, top, u_scale, held, 1);
        double move = (s.hazard - (y - nearest)) / (1 + s.bend);
        width = 1 / sqrt(1 + s.bend);
        y += move;
        if (fabs(move) < 0.02 * width) break;
    }
    double height[FAR_NODES], at[FAR_NODES], sum = 0, mean = 0, best = -INFINITY;
    for (int k = 0; k < FAR_NODES; k++) {
        at[k] = y + (k - FAR_NODES / 2) * 0.5 * width;
        far_terms s = far_sum(x, n, own, at[k], top, u_scale, held, 0);
        double z = at[k] - nearest;
        height[k] = s.rest - 0.5 * (s.square + z * z);
        best = MORE(best, height[k]);
    }
    for (int k = 0; k < FAR_NODES; k++) {
        height[k] = exp(height[k] - best);
        sum += height[k], mean += height[k] * (at[k] - y);
    }
    const double log_p = (best + log(sum * 0.5 * width) - 0.9189385332046727) * stretch * stretch;
    in->log_p[r] = (float)log_p;
    if (!wanted) return;
    mean = y + mean / sum;
    for (int k = 0; k < FAR_NODES; k++) height[k] /= sum;
    const double scale = in->scale[r], cap = in->cap[r], weight = in->factor[r] * exp(in->power * log_p) * stretch * stretch;
    const float threshold = cap < INFINITY ? cap_threshold(x[own], scale, cap) : -INFINITY;
    float *grad = in->grad ? in->grad + r * in->grad_stride : NULL;
    double all = 0, all_gap = 0, live = 0, live_gap = 0;
    for (ptrdiff_t i = 0; i < n; i += EXPACC_LANES) {
        vd half[2];
        vf v = far_arguments(x + i, n - i, own - i, mean, top, u_scale, held, half), zero = {0}, g = zero;
        vm near = vf_lt(v, vf_set(14.0f + 8.0f * (float)width));
        if (vm_all(vf_lt(v, vf_set(-40.0f)))) g = far_excess(v) - v;
        else if (vm_any(near)) {
            for (int k = 0; k < FAR_NODES; k++) {
                float part[EXPACC_LANES];
                for (int h = 0; h < 2; h++) vd_store_float(part + h * (EXPACC_LANES / 2), half[h] + (at[k] - mean));
                vf c = vf_max(vf_min(vf_load(part), vf_set(14.0f)), vf_set(-EXPACC_FAR));
                g += (float)height[k] * vf_select(vf_lt(c, zero), far_excess(c) - c, vf_hazard(c));
            }
            g = vf_where(near, g);
        }
        for (int k = 0; k < EXPACC_LANES && i + k < n; k++) {
            double entry = (double)g[k], gap = entry > 0 ? half[k / (EXPACC_LANES / 2)][k % (EXPACC_LANES / 2)] - mean + nearest : 0;
            int below = x[i + k] > threshold;
            all += entry, all_gap += entry * gap;
            if (below) live += entry, live_gap += entry * gap;
            if (grad) grad[i + k] = below ? (float)times(weight * (scale / stretch), entry) : 0.0f;
        }
    }
    if (grad) grad[own] = (float)-times(weight * (scale / stretch), live);
    if (in->dot) in->dot[r] = times(weight, all_gap);
    if (in->dot_live) in->dot_live[r] = times(weight, live_gap);
}

static void row(const expacc_rows *in, ptrdiff_t r, work *w, double depth) {
    const ptrdiff_t n = in->classes;
    const int64_t y = in->target[r];
    if (y < 0) { fill_row(in, r, 0, 0); return; }
    const float *x = in->x + r * in->stride;
    int finite;
    int samples;
    const float top = largest(x, n, y, &finite, w->sample, &samples);
    if (!finite) {
        int kind = classify(x, n, y);
        if (kind == BROKEN) { fill_row(in, r, NAN, NAN); return; }
        if (kind == LOST) { fill_row(in, r, -INFINITY, 0); return; }
        if (kind == WON) { fill_row(in, r, 0, 0); return; }
        if (kind == LEVEL) { fill_row(in, r, (float)-log((double)n), 0); return; }
    }
    const double scale = in->scale[r], cap = in->cap[r], own = x[y];
    const double gap = (own - (double)top) * scale, nearest = LESS(gap, cap);
    if (nearest > CERTAIN) { fill_row(in, r, 0, 0); return; }
    if (nearest < -EXPACC_NOWHERE) { fill_row(in, r, -INFINITY, 0); return; }
    if (expacc_hopeless(in->power, nearest)) { fill_row(in, r, (float)(-0.25 * nearest * nearest), 0); return; }
    /* All gaps relative to the nearest; where the nearest is capped, so is everybody. */
    const double held = cap - nearest, u_scale = gap < cap ? scale : 0.0;

    const int wanted = in->grad || in->dot || in->dot_live;
    compressed c = {w, 0, 0, 0, 0};
    if (nearest < -250) { far_row(in, r, top, nearest, u_scale, held, wanted); return; }
    double low = 0.5 * nearest - 4.4;
    int first = (int)((low - 0.5 - TABLE_LOW) * UNIT), a = nearest >= -10 ? TABLE_HALF : TABLE_ONE;
    if (first < 0) first = 0;
    if (n <= LISTED) list_row(&c, x, n, y, top, u_scale, held);
    else {
        if (n >= SAMPLED) {
        /* Classes left out only raise F to the left: where the sample's integrands begin, the row's do or further right. */
        list_row(&c, w->sample, samples, -1, top, u_scale, held);
        support s = look(&c, nearest, first, a);
        if (!s.outside) low = MORE(low, s.low - 0.1);
        }
        const double most = reach(MORE(low, (double)TABLE_LOW), depth);
        /* Cells of 1/8 leave log F an error of up to 3e-6 with 1000 classes on one cell's edge: a quarter of the contract
         * where log P is below -4, too much where it is not. */
        c.fit = most <= 8 ? 2 : most <= 16 && (nearest > -2 || n > FINE) ? 1 : 0;
        bin_row(&c, x, n, y, top, u_scale, most, held);
    }
    support s = look(&c, nearest, first, a);
    if (s.outside) { far_row(in, r, top, nearest, u_scale, held, wanted); return; }
    integrals v = integrate(&c, nearest, &s, depth, wanted);
    in->log_p[r] = (float)v.log_p;
    if (!wanted) return;

    const double damping = in->power < 0 ? exp(in->power * v.log_p) : (double)exp_one((float)(in->power * v.log_p));
    const double weight = in->factor[r] * damping * v.slope * scale;
    float coefficient, more;
    expacc_split(weight, &coefficient, &more);
    const double lift = more == 1 ? 1 : weight / coefficient;
    const float width = v.width;
    slope_rule rule = {top, (float)(u_scale / width), (float)LESS(held / width, 1e6), (float)v.pieces, coefficient, -INFINITY};
    const int capped = cap < INFINITY;
    if (capped) rule.threshold = cap_threshold(own, scale, cap);
    float *grad = in->grad ? in->grad + r * in->grad_stride : NULL;
    int dots = in->dot || in->dot_live;
    slope_sums sums = capped ? (dots ? slopes_of(w, &rule, x, grad, n, y, 1, 1) : slopes_of(w, &rule, x, grad, n, y, 1, 0))
                                  : (dots ? slopes_of(w, &rule, x, grad, n, y, 0, 1) : slopes_of(w, &rule, x, grad, n, y, 0, 0));
    if (grad) grad[y] = (float)-sums.live;
    for (ptrdiff_t i = 0; grad && more != 1 && i < n; i++) grad[i] *= more;
    if (in->dot) in->dot[r] = (nearest * sums.all + width * sums.all_gap) / scale * lift;
    if (in->dot_live) in->dot_live[r] = (nearest * sums.live + width * sums.live_gap) / scale * lift;
}

size_t EXPACC_NAME(expacc_binned_scratch)(ptrdiff_t classes) {
    (void)classes;
    return sizeof(work);
}

void EXPACC_NAME(expacc_binned)(const expacc_rows *in, void *scratch) {
    const double depth = 2 * (14 + log((double)in->classes));
#if defined(__x86_64__)
    /* Tails run into denormals, which cost a hundred cycles each there: they count as 0. */
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040);
#endif
    for (ptrdiff_t r = 0; r < in->rows; r++) row(in, r, scratch, depth);
#if defined(__x86_64__)
    _mm_setcsr(saved);
#endif
}
