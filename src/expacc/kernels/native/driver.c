/* One call from Python: targets, statistics, rows, gradient, reduction. Everything here is per variant.
 *
 * Rows go through in chunks whose size depends on the shape alone. The threads take them from a counter, each chunk
 * leaves its sums in a place of its own, and the places are added up in order: the same bits with any number of
 * threads. The threads are torch's own (GOMP_parallel of the OpenMP runtime it has loaded): a second pool beside its
 * spinning one costs milliseconds a call.
 *
 * Normalisation: x^ = (x - mean)/std, std² = Σ (x - mean)²/(n - 1) + 1e-5, over the n finite entries of the rows that
 * count and hold no NaN. A row's gaps do not see the mean, so only 1/std enters, with sigma, in `scale`. The gradient
 * through the statistics: rows of the gradient sum to 0, so the mean has none, and with D = Σ_rows Σ_i w G_i m_i over
 * the competitors below the margin (what the row kernels return as dot_live), grad_k += (x_k - mean) D/((n - 1) std²).
 */
#include "request.h"
#include "kernels.h"

#include <math.h>
#include <stdlib.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define NORMALIZE_EPS 1e-5
/* Up to here rows lie in lanes and are summed directly; beyond, they are binned. */
#define DIRECT_CLASSES 40
/* A region on other threads costs some 3 us; below these amounts of work one thread is faster. */
#define PARALLEL_WORK 10000.0  /* in entries of a binned row; see cost() */
#define PARALLEL_SWEEP 32768.0 /* entries of a pass over memory */

/* ---- one chunk of rows at a time ---- */

typedef struct {
    const expacc_request *in;
    int64_t rows, chunk, chunks;
    size_t scratch;        /* bytes of one row kernel */
    int64_t next;          /* the counter */
    int failed;            /* no memory */
    double total_weight;
    double mean, deviation, couple;
    double *sums;          /* per chunk, WIDTH doubles */
    void (*kernel)(const expacc_rows *, void *);
} job;
enum { SUM_LOSS, SUM_DOT, COUNT = 0, MEAN_OF, SQUARES, WIDTH = 4 };

/* Denormals take a hundred cycles each and mean nothing here. */
#if defined(__SSE2__)
typedef unsigned int mode_word;
static mode_word flush_denormals(void) { mode_word old = _mm_getcsr(); _mm_setcsr(old | 0x8040); return old; }
static void restore_denormals(mode_word old) { _mm_setcsr(old); }
#elif defined(__aarch64__)
typedef uint64_t mode_word;
static mode_word flush_denormals(void) {
    mode_word old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"(old | (1ull << 24)));
    return old;
}
static void restore_denormals(mode_word old) { __asm__ volatile("msr fpcr, %0" : : "r"(old)); }
#else
typedef int mode_word;
static mode_word flush_denormals(void) { return 0; }
static void restore_denormals(mode_word old) { (void)old; }
#endif

static void run(expacc_parallel parallel, int64_t threads, void (*fn)(void *), void *data) {
    if (parallel && threads > 1) parallel(fn, data, (unsigned)threads, 0);
    else fn(data);
}

static inline float from_half(uint16_t h, int64_t dtype) {
    uint32_t bits;
    float f;
    if (dtype == BFLOAT16) {
        bits = (uint32_t)h << 16;
        memcpy(&f, &bits, 4);
        return f;
    }
    /* Exponent and mantissa moved, then scaled by 2^112: denormals come out normal. */
    bits = (uint32_t)(h & 0x7fff) << 13;
    memcpy(&f, &bits, 4);
    f = (h & 0x7c00) == 0x7c00 ? f : f * 0x1p112f;
    memcpy(&bits, &f, 4);
    if ((h & 0x7c00) == 0x7c00) bits |= 0x7f800000;
    else if ((h & 0x7c00) == 0 && (h & 0x3ff)) {
        f = (float)(h & 0x3ff) * 0x1p-24f; /* not by the product above: it reads a denormal, which is flushed */
        memcpy(&bits, &f, 4);
    }
    bits |= (uint32_t)(h & 0x8000) << 16;
    memcpy(&f, &bits, 4);
    return f;
}

static void store_loss(void *loss, int64_t at, double value, int64_t dtype) {
    if (dtype == FLOAT32) {
        ((float *)loss)[at] = (float)value;
        return;
    }
    uint16_t h;
    if (value != value) h = dtype == BFLOAT16 ? 0x7fc0 : 0x7e00;
    else if (dtype == BFLOAT16) {
        float f = (float)value;
        uint32_t bits;
        memcpy(&bits, &f, 4);
        h = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    } else { /* value >= 0 but for rounding: to nearest even by an addition */
        double a = fabs(value);
        if (a >= 65520.0) h = 0x7c00;
        else if (a < 0x1p-14) h = (uint16_t)nearbyint(a * 0x1p24);
        else {
            int e;
            double f = frexp(a, &e); /* in [1/2, 1) */
            h = (uint16_t)(((e + 14) << 10) + ((int64_t)nearbyint(f * 2048.0) - 1024));
        }
        if (value < 0) h |= 0x8000;
    }
    ((uint16_t *)loss)[at] = h;
}

/* Rows first .. first + count as contiguous floats: where they lie, or copied. */
static const float *rows_of(const void *x, int64_t dtype, int64_t inner, int64_t classes, int64_t so, int64_t si,
                            int64_t sc, int64_t first, int64_t count, float *copy, ptrdiff_t *stride) {
    if (dtype == FLOAT32 && inner == 1 && sc == 1) {
        *stride = so;
        return (const float *)x + first * so;
    }
    *stride = classes;
    for (int64_t r = 0; r < count;) {
        int64_t o = (first + r) / inner, i = (first + r) % inner, run = inner - i;
        if (run > count - r) run = count - r;
        int64_t base = o * so + i * si;
        float *to = copy + r * classes;
        if (dtype == FLOAT32) {
            const float *from = (const float *)x + base;
            for (int64_t c = 0; c < classes; c++)
                for (int64_t k = 0; k < run; k++) to[k * classes + c] = from[k * si + c * sc];
        } else {
            const uint16_t *from = (const uint16_t *)x + base;
            if (dtype == BFLOAT16)
                for (int64_t c = 0; c < classes; c++)
                    for (int64_t k = 0; k < run; k++) to[k * classes + c] = from_half(from[k * si + c * sc], BFLOAT16);
            else
                for (int64_t c = 0; c < classes; c++)
                    for (int64_t k = 0; k < run; k++) to[k * classes + c] = from_half(from[k * si + c * sc], FLOAT16);
        }
        r += run;
    }
    return copy;
}

/* ---- statistics ---- */

/* Σ (x - shift) and Σ (x - shift)²; not finite where an entry is not. */
static void sweep(const float *x, int64_t n, double shift, double *sum, double *squares) {
    const int half = EXPACC_LANES / 2;
    const vd s = vd_set(shift);
    vd a[4] = {{0}}, b[4] = {{0}};
    int64_t c = 0;
    for (; c + 4 * half <= n; c += 4 * half)
        for (int k = 0; k < 4; k++) {
            vd u = vd_load_float(x + c + k * half) - s;
            a[k] += u, b[k] += u * u;
        }
    double one = vd_sum((a[0] + a[1]) + (a[2] + a[3])), two = vd_sum((b[0] + b[1]) + (b[2] + b[3]));
    for (; c < n; c++) {
        double u = x[c] - shift;
        one += u, two += u * u;
    }
    *sum = one, *squares = two;
}

static void measure(const expacc_request *in, int64_t first, int64_t count, float *copy, double *out) {
    const int64_t classes = in->classes;
    ptrdiff_t stride;
    const float *x = rows_of(in->x, in->dtype, in->inner, classes, in->x_outer, in->x_inner, in->x_class, first, count,
                             copy, &stride);
    double n = 0, sum = 0, squares = 0, shift = 0;
    int have_shift = 0;
    for (int64_t r = 0; r < count; r++) {
        if (in->target[first + r] == in->ignore_index) continue;
        const float *row = x + r * stride;
        int64_t length = classes;
        if (stride == classes) /* the rows up to the next one that is left out, in one sweep */
            while (r + 1 < count && in->target[first + r + 1] != in->ignore_index) r++, length += classes;
        if (!have_shift && isfinite(row[0])) shift = row[0], have_shift = 1;
        double one, two;
        sweep(row, length, shift, &one, &two);
        if (two - two == 0) {
            sum += one, squares += two, n += (double)length;
            continue;
        }
        for (int64_t k = 0; k < length; k += classes) {
            int broken = 0;
            for (int64_t c = 0; c < classes; c++) broken |= isnan(row[k + c]);
            for (int64_t c = 0; c < classes && !broken; c++) {
                if (!isfinite(row[k + c])) continue;
                double u = row[k + c] - shift;
                sum += u, squares += u * u, n += 1;
            }
        }
    }
    out[COUNT] = n;
    out[MEAN_OF] = n > 0 ? shift + sum / n : 0;
    out[SQUARES] = n > 0 ? squares - sum * (sum / n) : 0;
    if (out[SQUARES] < 0) out[SQUARES] = 0;
}

static void measure_worker(void *data) {
    job *j = data;
    float *copy = NULL;
    mode_word mode = flush_denormals();
    for (;;) {
        int64_t c = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (c >= j->chunks) break;
        int64_t first = c * j->chunk, count = j->rows - first < j->chunk ? j->rows - first : j->chunk;
        if (!copy && !(j->in->dtype == FLOAT32 && j->in->inner == 1 && j->in->x_class == 1)) {
            copy = malloc(j->chunk * j->in->classes * sizeof(float));
            if (!copy) { j->failed = 1; break; }
        }
        measure(j->in, first, count, copy, j->sums + c * WIDTH);
    }
    restore_denormals(mode);
    free(copy);
}

/* ---- rows ---- */

/* (exp(x) - 1)/x, to a few ulp; 1 at 0. Branchless, so that a loop over rows becomes vectors. */
static inline double relative_expm1(double whole) {
    double x = whole < -745.0 ? -745.0 : whole > 709.0 ? 709.0 : whole;
    double shifted = x * 1.4426950408889634 + 6755399441055744.0;
    double n = shifted - 6755399441055744.0;
    double r = x - n * 0.693147180369123816490;
    r -= n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0; /* Taylor to r^13: |r| <= 0.35, 2e-17 */
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    int64_t bits;
    memcpy(&bits, &shifted, 8);
    bits = ((bits - 0x4338000000000000) + 1023) << 52; /* 6755399441055744 is 0x4338000000000000 */
    double two;
    memcpy(&two, &bits, 8);
    two = n < -1022.0 ? 0.0 : two;
    double all = two * (p * r) + (two - 1.0);
    /* p = expm1(r)/r; where n = 0 it is the answer, also at 0 */
    return n == 0.0 ? p : all / whole; /* not / x: far left it is -1/whole */
}

static inline double sigma_of(const expacc_request *in, int64_t row) {
    int64_t at = in->sigma_per_row ? row : 0;
    return in->sigma_dtype == FLOAT64 ? ((const double *)in->sigma)[at] : (double)((const float *)in->sigma)[at];
}

static inline double weight_of(const expacc_request *in, int64_t y) {
    if (!in->weight) return 1.0;
    return in->weight_dtype == FLOAT64 ? ((const double *)in->weight)[y] : (double)((const float *)in->weight)[y];
}

typedef struct {
    int64_t *target;
    double *scale, *cap, *factor, *share, *dot, *dot_live, *loss;
    float *log_p, *copy, *grad;
    void *kernel;
} workspace;

/* A row of -inf alone counts as equal scores, and below a negative margin those are as far behind as anybody: the kernel
 * is asked again, about zeros. Its gradient stays 0. */
static void level_rows(const job *j, const expacc_rows *rows, const workspace *w) {
    const int64_t classes = rows->classes;
    float *zeros = NULL;
    for (int64_t r = 0; r < rows->rows; r++) {
        const float *x = rows->x + r * rows->stride;
        int64_t k = 0;
        while (k < classes && x[k] == -INFINITY) k++;
        if (k < classes || w->target[r] < 0) continue;
        if (!zeros) zeros = calloc((size_t)classes, sizeof(float));
        if (!zeros) { w->log_p[r] = NAN; continue; }
        expacc_rows one = *rows;
        one.x = zeros, one.stride = classes, one.rows = 1, one.grad = NULL, one.dot_live = NULL;
        one.target = w->target + r, one.scale = w->scale + r, one.cap = w->cap + r, one.factor = w->factor + r;
        one.log_p = w->log_p + r;
        if (one.dot) one.dot = w->dot + r;
        j->kernel(&one, w->kernel);
    }
    free(zeros);
}

static void one_chunk(const job *j, int64_t c, const workspace *w) {
    const expacc_request *in = j->in;
    const int64_t first = c * j->chunk, classes = in->classes;
    const int64_t count = j->rows - first < j->chunk ? j->rows - first : j->chunk;
    const double power = *in->power;
    const int dots = in->normalize && in->grad, wide = in->sigma_grad != NULL;
    expacc_rows rows = {0};
    rows.x = rows_of(in->x, in->dtype, in->inner, classes, in->x_outer, in->x_inner, in->x_class, first, count, w->copy,
                     &rows.stride);
    const int in_place = in->grad && in->inner == 1 && in->g_class == 1;
    rows.rows = count, rows.classes = classes, rows.power = power;
    rows.target = w->target, rows.scale = w->scale, rows.cap = w->cap, rows.factor = w->factor;
    rows.log_p = w->log_p, rows.dot = wide ? w->dot : NULL, rows.dot_live = dots ? w->dot_live : NULL;
    if (in->grad) {
        rows.grad = in_place ? in->grad + first * in->g_outer : w->grad;
        rows.grad_stride = in_place ? in->g_outer : classes;
    }
    const double divisor = in->reduction == MEAN ? j->total_weight : 1.0;
    for (int64_t r = 0; r < count; r++) {
        int64_t y = in->target[first + r];
        int counts = y != in->ignore_index;
        double sigma = sigma_of(in, first + r), scale = 1.0 / (sigma * j->deviation);
        w->share[r] = counts ? weight_of(in, y) : 0.0;
        w->factor[r] = w->share[r] / divisor;
        int sound = scale > 0 && scale < 1e300;
        w->target[r] = counts && sound ? y : -1;
        w->scale[r] = sound ? scale : 1.0;
        w->cap[r] = sound && in->margin < INFINITY ? in->margin / sigma : INFINITY;
        w->loss[r] = counts && !sound ? NAN : 0.0;
    }
    if (classes > 1) {
        j->kernel(&rows, w->kernel);
        if (in->margin < 0) level_rows(j, &rows, w);
    }
    else { /* nobody to lose to */
        for (int64_t r = 0; r < count; r++) {
            float v = rows.x[r * rows.stride];
            int broken = w->target[r] >= 0 && isnan(v);
            w->log_p[r] = broken ? NAN : 0.0f;
            if (rows.grad) rows.grad[r * rows.grad_stride] = broken ? NAN : 0.0f;
            w->dot[r] = w->dot_live[r] = 0;
        }
    }
    const double lost = power > 0 ? 1.0 / power : INFINITY;
    for (int64_t r = 0; r < count; r++) {
        double l = w->log_p[r];
        double value = l == -INFINITY ? lost : 0.0 - l * relative_expm1(power * l);
        w->loss[r] += w->share[r] * value;
    }
    double loss = 0, dot = 0;
    for (int64_t r = 0; r < count; r++) {
        if (in->target[first + r] == in->ignore_index) w->loss[r] = 0;
        loss += w->loss[r];
    }
    if (in->reduction == NONE)
        for (int64_t r = 0; r < count; r++) store_loss(in->loss, first + r, w->loss[r], in->dtype);
    for (int64_t r = 0; r < count; r++) {
        int unsound = w->target[r] < 0 && in->target[first + r] != in->ignore_index;
        int broken = unsound || w->log_p[r] != w->log_p[r];
        if (dots) {
            double d = broken ? 0.0 : w->dot_live[r];
            dot += d;
            if (in->couple) in->couple[first + r] = d;
        }
        if (wide) in->sigma_grad[first + r] = broken ? NAN : w->target[r] < 0 ? 0.0 : w->dot[r] / sigma_of(in, first + r);
        if (unsound && rows.grad)
            for (int64_t k = 0; k < classes; k++) rows.grad[r * rows.grad_stride + k] = NAN;
    }
    j->sums[c * WIDTH + SUM_LOSS] = loss;
    j->sums[c * WIDTH + SUM_DOT] = dot;
    if (in->grad && !in_place)
        for (int64_t r = 0; r < count;) {
            int64_t o = (first + r) / in->inner, i = (first + r) % in->inner, run = in->inner - i;
            if (run > count - r) run = count - r;
            float *to = in->grad + o * in->g_outer + i * in->g_inner;
            const float *from = w->grad + r * classes;
            for (int64_t k = 0; k < classes; k++)
                for (int64_t q = 0; q < run; q++) to[q * in->g_inner + k * in->g_class] = from[q * classes + k];
            r += run;
        }
}

static inline size_t round_up(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

static void row_worker(void *data) {
    job *j = data;
    const expacc_request *in = j->in;
    char *block = NULL;
    workspace w = {0};
    mode_word mode = flush_denormals();
    for (;;) {
        int64_t c = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (c >= j->chunks) break;
        if (!block) {
            const size_t column = round_up(j->chunk * sizeof(double)), table = round_up(j->chunk * in->classes * sizeof(float));
            const int copies = !(in->dtype == FLOAT32 && in->inner == 1 && in->x_class == 1);
            const int scatters = in->grad && !(in->inner == 1 && in->g_class == 1);
            block = malloc(64 + round_up(j->scratch) + 9 * column + (copies + scatters) * table);
            if (!block) { j->failed = 1; break; }
            char *at = block + (64 - (uintptr_t)block % 64);
            w.kernel = at, at += round_up(j->scratch);
            w.target = (int64_t *)at, at += column;
            w.scale = (double *)at, at += column;
            w.cap = (double *)at, at += column;
            w.factor = (double *)at, at += column;
            w.share = (double *)at, at += column;
            w.dot = (double *)at, at += column;
            w.dot_live = (double *)at, at += column;
            w.loss = (double *)at, at += column;
            w.log_p = (float *)at, at += column;
            if (copies) w.copy = (float *)at, at += table;
            if (scatters) w.grad = (float *)at;
        }
        one_chunk(j, c, &w);
    }
    restore_denormals(mode);
    free(block);
}

/* ---- the gradient through the statistics; scaling by what comes from above ---- */

typedef struct {
    const expacc_completion *in;
    int64_t rows, chunk, chunks, next;
    double mean, slope;    /* 0: no statistics */
} finish_job;

static inline float entry(const void *x, int64_t dtype, int64_t at) {
    return dtype == FLOAT32 ? ((const float *)x)[at] : from_half(((const uint16_t *)x)[at], dtype);
}

static void finish_worker(void *data) {
    finish_job *j = data;
    const expacc_completion *in = j->in;
    mode_word mode = flush_denormals();
    for (;;) {
        int64_t chunk = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (chunk >= j->chunks) break;
        int64_t first = chunk * j->chunk, count = j->rows - first < j->chunk ? j->rows - first : j->chunk;
        for (int64_t r = first; r < first + count; r++) {
            if (in->target[r] == in->ignore_index) continue;
            int64_t o = r / in->inner, i = r % in->inner;
            float *g = in->grad + o * in->g_outer + i * in->g_inner;
            int64_t at = o * in->x_outer + i * in->x_inner;
            const double up = in->upstream ? in->upstream[r] : 1.0, slope = j->slope, mean = j->mean;
            if (slope == 0) {
                const float u = (float)up;
                if (in->g_class == 1) for (int64_t k = 0; k < in->classes; k++) g[k] *= u;
                else for (int64_t k = 0; k < in->classes; k++) g[k * in->g_class] *= u;
            } else if (in->dtype == FLOAT32 && in->x_class == 1 && in->g_class == 1 && fabs(slope) > 1e-30) {
                /* (a smaller slope, of logits beyond 1e15, would underflow in float) */
                const float *x = (const float *)in->x + at;
                /* The mean in two parts: x - high is exact where it is small. */
                const float high = (float)mean, low = (float)(mean - high), rate = (float)slope, u = (float)up;
                int64_t k = 0;
                for (; k + EXPACC_LANES <= in->classes; k += EXPACC_LANES) {
                    vf v = vf_load(x + k), d = ((v - high) - low) * rate;
                    vf_store(g + k, u * vf_load(g + k) + vf_where(vf_eq(v - v, (vf){0}), d));
                }
                for (; k < in->classes; k++) {
                    float d = ((x[k] - high) - low) * rate;
                    g[k] = u * g[k] + (x[k] - x[k] == 0 ? d : 0.0f);
                }
            } else
                for (int64_t k = 0; k < in->classes; k++) {
                    float x = entry(in->x, in->dtype, at + k * in->x_class);
                    double d = x - x == 0 ? ((double)x - mean) * slope : 0.0;
                    g[k * in->g_class] = (float)(up * g[k * in->g_class] + d);
                }
        }
    }
    restore_denormals(mode);
}

static void finish(const expacc_completion *in, double mean, double slope) {
    finish_job j = {.in = in, .rows = in->outer * in->inner, .mean = mean, .slope = slope};
    j.chunk = 1 + 16384 / (in->classes + 1);
    j.chunks = (j.rows + j.chunk - 1) / j.chunk;
    int alone = (double)j.rows * in->classes < PARALLEL_SWEEP;
    run(in->parallel, alone ? 1 : in->threads, finish_worker, &j);
}

/* Multiply every row of the gradient by its upstream value and add what flows through the statistics. */
void EXPACC_NAME(expacc_finish)(const expacc_completion *in) {
    double slope = 0, mean = 0;
    const int64_t rows = in->outer * in->inner;
    if (in->couple) {
        for (int64_t r = 0; r < rows; r++)
            if (in->couple[r] != 0) slope += in->couple[r] * in->upstream[r];
        mean = in->couple[rows];
        slope = in->couple[rows + 1] == 0 ? 0 : slope * in->couple[rows + 1]; /* 0: capped, whatever the sum */
    }
    finish(in, mean, slope);
}

/* ---- the call ---- */

/* Return -1; -2: no memory; else the first row whose target is out of range. */
int64_t EXPACC_NAME(expacc_loss)(const expacc_request *in) {
    job j = {.in = in, .rows = in->outer * in->inner, .deviation = 1.0};
    const int64_t classes = in->classes;
    double total = 0;
    for (int64_t r = 0; r < j.rows; r++) {
        int64_t y = in->target[r];
        if (y == in->ignore_index) continue;
        if (y < 0 || y >= classes) return r;
        total += weight_of(in, y);
    }
    j.total_weight = total == 0 ? 1.0 : total;

    int direct = 0;
    if (in->noise == GUMBEL) j.kernel = EXPACC_NAME(expacc_gumbel), j.scratch = EXPACC_NAME(expacc_gumbel_scratch)(classes);
    else if (classes <= DIRECT_CLASSES) {
        direct = 1;
        j.kernel = EXPACC_NAME(expacc_direct), j.scratch = EXPACC_NAME(expacc_direct_scratch)(classes);
    } else
#ifndef EXPACC_NO_BINNED
        j.kernel = EXPACC_NAME(expacc_binned), j.scratch = EXPACC_NAME(expacc_binned_scratch)(classes);
#else
        j.kernel = EXPACC_NAME(expacc_direct), j.scratch = EXPACC_NAME(expacc_direct_scratch)(classes);
#endif

    /* Chunks: multiples of 16 lanes for rows in lanes, about a microsecond or more of work each. */
    j.chunk = classes >= 2048 ? 1 : direct ? (classes >= 8 ? 16 : 64) : classes >= 256 ? 4 : 16;
    j.chunks = (j.rows + j.chunk - 1) / j.chunk;
    double few[64 * WIDTH];
    j.sums = j.chunks <= 64 ? few : malloc(j.chunks * WIDTH * sizeof(double));
    if (!j.sums) return -2;

    const double entries = (double)j.rows * classes;
    double n = 0, mean = 0, squares = 0;
    int capped = 0; /* the logits stay as they are, and nothing flows through the statistics */
    if (in->normalize) {
        run(in->parallel, entries < PARALLEL_SWEEP ? 1 : in->threads, measure_worker, &j);
        for (int64_t c = 0; c < j.chunks; c++) { /* Chan's update, in order */
            const double *s = j.sums + c * WIDTH;
            if (s[COUNT] == 0) continue;
            double both = n + s[COUNT], apart = s[MEAN_OF] - mean;
            mean += apart * (s[COUNT] / both);
            squares += s[SQUARES] + apart * apart * (n * s[COUNT] / both);
            n = both;
        }
        j.deviation = sqrt(squares / (n > 2 ? n - 1 : 1) + NORMALIZE_EPS);
        capped = in->normalize == CAP && j.deviation <= 1;
        if (capped) j.deviation = 1;
    }

    /* Direct rows cost some twenty times a binned entry, a Gumbel entry a third. */
    double work = entries * (direct ? 6.0 : in->noise == GUMBEL ? 0.4 : 1.0) + j.rows * (direct ? 0.0 : 100.0);
    j.next = 0;
    if (!j.failed) run(in->parallel, work < PARALLEL_WORK ? 1 : in->threads, row_worker, &j);
    int failed = j.failed;
    if (!failed) {
        double loss = 0, dot = 0;
        for (int64_t c = 0; c < j.chunks; c++) loss += j.sums[c * WIDTH + SUM_LOSS], dot += j.sums[c * WIDTH + SUM_DOT];
        if (in->reduction != NONE) store_loss(in->loss, 0, in->reduction == MEAN ? loss / j.total_weight : loss, in->dtype);
        const double slope = capped ? 0 : 1.0 / ((n > 2 ? n - 1 : 1) * j.deviation * j.deviation);
        if (in->normalize && in->couple) in->couple[j.rows] = mean, in->couple[j.rows + 1] = slope;
        else if (in->normalize && in->grad && !capped && dot != 0) {
            expacc_completion last = {in->x, in->dtype, in->outer, in->inner, classes, in->x_outer, in->x_inner, in->x_class,
                                      in->grad, in->g_outer, in->g_inner, in->g_class, in->target, in->ignore_index,
                                      NULL, NULL, in->parallel, in->threads};
            finish(&last, mean, dot * slope);
        }
    }
    if (j.sums != few) free(j.sums);
    return failed ? -2 : -1;
}
