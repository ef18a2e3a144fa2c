/* Vectors of float and double, and the functions the kernels need on them: exp, log, log Φ, λ = φ/Φ.
 *
 * One source, three widths: EXPACC_LANES floats are 16 with AVX-512, 8 with AVX2, 4 elsewhere (SSE2, NEON). Plain C
 * with the vector extensions of gcc and clang; intrinsics only where the extensions do not reach what matters
 * (masks, rounding, reciprocals). Build with -ffp-contract=fast, so that a * b + c is one instruction where there
 * is one. Every object is built once per variant, with EXPACC_VARIANT its name; EXPACC_NAME(f) is f_<variant>.
 *
 * Fits, all minimax in the relative error, by Lawson's reweighted least squares in double on 2000 to 4000 points,
 * then rounded to float; the largest error measured in float arithmetic against double over the whole line:
 *   vf_exp        degree 6 on |r| <= log(2)/2                                       8.3e-8  (|x| <= 87)
 *   vf_exp_half   exp(-s/2) by 2^r, degree 5 on |r| <= 1/2                          9.1e-8
 *   vf_log        degree 10 on [sqrt(1/2), sqrt(2)]                                 7.9e-8;  vf_log1p 1.2e-7
 *   vf_log_cdf, vf_hazard                                                           4.1e-6 at x = 12: x²/2 ulp of
 *                 the rounded square, as in every form exp(-x²/2); 4e-7 for x < 2
 *   R(t) = erfcx(t/√2)/2 = N(t)/D(t), degrees 4 and 5 on [0, ∞), N/D → 1/(t√2π)     4.6e-8 before, 3e-7 after rounding
 *   the same with degrees 3 and 4, to steer by (mode, steps), never in a result      1.8e-6
 * Left of 0: Φ = exp(-t²/2) R, λ = 1/(√2π R); right of 0: Φ = 1 - E R, λ = E/(√2π (1 - E R)), E = exp(-t²/2).
 */
#ifndef EXPACC_VEC_H
#define EXPACC_VEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef EXPACC_VARIANT
#define EXPACC_VARIANT baseline
#endif
#define EXPACC_JOIN2(a, b) a##_##b
#define EXPACC_JOIN(a, b) EXPACC_JOIN2(a, b)
#define EXPACC_NAME(f) EXPACC_JOIN(f, EXPACC_VARIANT)

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define EXPACC_LANES 16
#define EXPACC_MASKS 1 /* comparisons give a mask register */
#elif defined(__AVX2__)
#define EXPACC_LANES 8
#define EXPACC_MASKS 0
#else
#define EXPACC_LANES 4
#define EXPACC_MASKS 0
#endif

#define EXPACC_INLINE static inline __attribute__((always_inline, unused))

typedef float vf __attribute__((vector_size(4 * EXPACC_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * EXPACC_LANES)));
typedef double vd __attribute__((vector_size(4 * EXPACC_LANES)));   /* half as many lanes as vf */
typedef int64_t vl __attribute__((vector_size(4 * EXPACC_LANES)));
typedef float vhf __attribute__((vector_size(2 * EXPACC_LANES)));   /* half a vf: converts to and from vd */
#if EXPACC_MASKS
typedef __mmask16 vm;
#else
typedef vi vm;
#endif

/* ---- moving ---- */
EXPACC_INLINE vf vf_set(float a) { return a - (vf){0}; }
EXPACC_INLINE vd vd_set(double a) { return a - (vd){0}; }
EXPACC_INLINE vf vf_load(const float *p) { vf a; memcpy(&a, p, sizeof a); return a; }
EXPACC_INLINE void vf_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
/* The first n floats, n < EXPACC_LANES or not; the other lanes hold fill, or are not written. */
EXPACC_INLINE vf vf_load_some(const float *p, ptrdiff_t n, float fill) {
    if (n >= EXPACC_LANES) return vf_load(p);
#if EXPACC_MASKS
    return (vf)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), (__mmask16)((1u << n) - 1), p);
#else
    float b[EXPACC_LANES];
    for (int i = 0; i < EXPACC_LANES; i++) b[i] = i < n ? p[i] : fill;
    return vf_load(b);
#endif
}
EXPACC_INLINE void vf_store_some(float *p, vf a, ptrdiff_t n) {
    if (n >= EXPACC_LANES) {
        vf_store(p, a);
        return;
    }
#if EXPACC_MASKS
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)a);
#else
    float b[EXPACC_LANES];
    vf_store(b, a);
    for (ptrdiff_t i = 0; i < n; i++) p[i] = b[i];
#endif
}
EXPACC_INLINE vd vd_load(const double *p) { vd a; memcpy(&a, p, sizeof a); return a; }
EXPACC_INLINE void vd_store(double *p, vd a) { memcpy(p, &a, sizeof a); }
EXPACC_INLINE vd vd_load_float(const float *p) { vhf a; memcpy(&a, p, sizeof a); return __builtin_convertvector(a, vd); }
EXPACC_INLINE void vd_store_float(float *p, vd a) { vhf b = __builtin_convertvector(a, vhf); memcpy(p, &b, sizeof b); }

/* ---- choosing; a comparison with NaN is false ---- */
#if EXPACC_MASKS
EXPACC_INLINE vm vf_lt(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
EXPACC_INLINE vm vf_le(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LE_OQ); }
EXPACC_INLINE vm vf_eq(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
EXPACC_INLINE vf vf_select(vm m, vf a, vf b) { return (vf)_mm512_mask_blend_ps(m, (__m512)b, (__m512)a); }
EXPACC_INLINE vf vf_where(vm m, vf a) { return (vf)_mm512_maskz_mov_ps(m, (__m512)a); }
EXPACC_INLINE vm vm_not(vm m) { return (vm)~m; }
EXPACC_INLINE int vm_any(vm m) { return m != 0; }
EXPACC_INLINE int vm_all(vm m) { return m == (vm)0xffff; }
/* The smaller or larger of two; b where one of them is NaN. */
EXPACC_INLINE vf vf_min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
EXPACC_INLINE vf vf_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#else
EXPACC_INLINE vm vf_lt(vf a, vf b) { return (vm)(a < b); }
EXPACC_INLINE vm vf_le(vf a, vf b) { return (vm)(a <= b); }
EXPACC_INLINE vm vf_eq(vf a, vf b) { return (vm)(a == b); }
EXPACC_INLINE vm vm_not(vm m) { return ~m; }
#if defined(__AVX2__)
EXPACC_INLINE vf vf_select(vm m, vf a, vf b) { return (vf)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)m); }
EXPACC_INLINE int vm_any(vm m) { return _mm256_movemask_ps((__m256)m) != 0; }
EXPACC_INLINE int vm_all(vm m) { return _mm256_movemask_ps((__m256)m) == 0xff; }
EXPACC_INLINE vf vf_min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
EXPACC_INLINE vf vf_max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
#else
EXPACC_INLINE vf vf_select(vm m, vf a, vf b) { return (vf)(((vi)a & m) | ((vi)b & ~m)); }
EXPACC_INLINE int vm_any(vm m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
EXPACC_INLINE int vm_all(vm m) { return (m[0] & m[1] & m[2] & m[3]) != 0; }
EXPACC_INLINE vf vf_min(vf a, vf b) { return vf_select(a < b, a, b); }
EXPACC_INLINE vf vf_max(vf a, vf b) { return vf_select(a > b, a, b); }
#endif
EXPACC_INLINE vf vf_where(vm m, vf a) { return (vf)((vi)a & m); }
#endif
EXPACC_INLINE vf vf_abs(vf a) { return (vf)((vi)a & 0x7fffffff); }
EXPACC_INLINE vm vf_isnan(vf a) { return vm_not(vf_eq(a, a)); }
EXPACC_INLINE vd vd_select(vl m, vd a, vd b) { return (vd)(((vl)a & m) | ((vl)b & ~m)); }

/* ---- sums over the lanes, always in the same order ---- */
EXPACC_INLINE double vd_sum(vd a) {
#if EXPACC_MASKS
    return _mm512_reduce_add_pd((__m512d)a);
#else
    double s = 0;
    for (int i = 0; i < EXPACC_LANES / 2; i++) s += a[i];
    return s;
#endif
}
EXPACC_INLINE double vf_sum(vf a) {
    float b[EXPACC_LANES];
    vf_store(b, a);
    return vd_sum(vd_load_float(b) + vd_load_float(b + EXPACC_LANES / 2));
}
EXPACC_INLINE float vf_least(vf a) {
#if EXPACC_MASKS
    return _mm512_reduce_min_ps((__m512)a);
#else
    float s = a[0];
    for (int i = 1; i < EXPACC_LANES; i++) s = a[i] < s ? a[i] : s;
    return s;
#endif
}
EXPACC_INLINE float vf_largest(vf a) {
#if EXPACC_MASKS
    return _mm512_reduce_max_ps((__m512)a);
#else
    float s = a[0];
    for (int i = 1; i < EXPACC_LANES; i++) s = a[i] > s ? a[i] : s;
    return s;
#endif
}

/* ---- arithmetic ---- */
/* 1/a to an ulp or two, for finite normal a with a normal reciprocal. */
EXPACC_INLINE vf vf_rcp(vf a) {
#if EXPACC_MASKS
    vf y = (vf)_mm512_rcp14_ps((__m512)a);
    return y + y * (1.0f - a * y);
#else
    return 1.0f / a;
#endif
}

/* 1/a to 1e-4: to steer by. */
EXPACC_INLINE vf vf_rcp_rough(vf a) {
#if EXPACC_MASKS
    return (vf)_mm512_rcp14_ps((__m512)a);
#else
    return 1.0f / a;
#endif
}

/* 1/sqrt(a) for normal a > 0, to 1e-4: to steer by. */
EXPACC_INLINE vf vf_rsqrt_rough(vf a) {
#if EXPACC_MASKS
    return (vf)_mm512_rsqrt14_ps((__m512)a);
#else
    vf y = (vf)(0x5f375a86 - ((vi)a >> 1));
    y = y * (1.5f - 0.5f * a * y * y);
    return y * (1.5f - 0.5f * a * y * y);
#endif
}

/* exp(x); below -87 it tends to 0 (no denormals), above 88 it stays near e^88. NaN is not kept. */
EXPACC_INLINE vf vf_exp(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = vf_max(vf_min(x, vf_set(88.0f)), vf_set(-87.3f));
    vf shifted = x * 1.44269504f + magic;
    vf n = shifted - magic;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = 1.381422858685255e-3f * r + 8.368900045752525e-3f;
    p = p * r + 4.166840761899948e-2f;
    p = p * r + 0.1666651964187622f;
    p = p * r + 0.4999999403953552f;
    p = (p * r) * r + r + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

/* log(x) for normal x > 0. */
EXPACC_INLINE vf vf_log(vf x) {
    vi bits = (vi)x - 0x3f3504f3; /* sqrt(1/2) */
    vf n = __builtin_convertvector(bits >> 23, vf);
    vf f = (vf)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
    vf p = -7.634536176919937e-2f * f + 0.12761639058589935f;
    p = p * f - 0.1316019743680954f;
    p = p * f + 0.14201751351356506f;
    p = p * f - 0.16623355448246002f;
    p = p * f + 0.20001226663589478f;
    p = p * f - 0.250008225440979f;
    p = p * f + 0.3333333134651184f;
    vf s = f * f;
    p = p * (s * f) - n * 2.12194440e-4f;
    p = p - 0.5f * s;
    return (p + f) + n * 0.693359375f;
}

/* log(1 + x) to full relative accuracy, x > -1, x not large. */
EXPACC_INLINE vf vf_log1p(vf x) {
    vf u = 1.0f + x;
    return vf_log(u) + (x - (u - 1.0f)) / u;
}

/* Numerator and denominator of R(t) = erfcx(t/√2)/2, t >= 0 (to 1e7: t^5 has to stay finite). */
EXPACC_INLINE vf vf_mills_top(vf t) {
    vf n = 5.741821601986885e-3f * t + 5.0927113741636276e-2f;
    n = n * t + 0.21267393231391907f;
    n = n * t + 0.4762353301048279f;
    return n * t + 0.5f;
}
EXPACC_INLINE vf vf_mills_bottom(vf t) {
    vf d = 1.4392612501978874e-2f * t + 0.1276555359363556f;
    d = d * t + 0.5474698543548584f;
    d = d * t + 1.3219038248062134f;
    d = d * t + 1.7503581047058105f;
    return d * t + 1.0f;
}
EXPACC_INLINE vf vf_mills_top_rough(vf t) {
    vf n = 2.2177405655384064e-2f * t + 0.13998165726661682f;
    n = n * t + 0.39587903022766113f;
    return n * t + 0.499999076128006f;
}
EXPACC_INLINE vf vf_mills_bottom_rough(vf t) {
    vf d = 5.559051036834717e-2f * t + 0.3508642315864563f;
    d = d * t + 1.0487968921661377f;
    d = d * t + 1.589563012123108f;
    return d * t + 1.0f;
}

#define EXPACC_FAR 3e7f            /* |x| is cut here, so that t^5 stays finite */
#define EXPACC_INV_SQRT_2PI 0.3989422804f
#define EXPACC_LOG_SQRT_2PI 0.9189385332f

/* The parts of Φ at x: with xm = min(x, 0) and g = 1/(Φ(x) exp(xm²/2)),
 *     log Φ = -xm²/2 - log g,     λ = E g/√2π,     E = exp(-max(x, 0)²/2).
 * So a product of Φ's is a product of g's and a sum of squares, and neither needs a logarithm per factor. */
/* exp(-s/2) for s >= 0, not below 2^-125.6: 1e-7 and the rounding of s. */
EXPACC_INLINE vf vf_exp_half(vf s) {
    const float magic = 12582912.0f, rate = -0.72134752f; /* -log2(e)/2 */
    s = vf_min(s, vf_set(174.0f));
    vf shifted = s * rate + magic;
    vf r = s * rate - (shifted - magic);
    vf p = 1.326473313383758e-3f * r + 9.671514853835106e-3f;
    p = p * r + 5.550733581185341e-2f;
    p = p * r + 0.24022242426872253f;
    p = p * r + 0.6931470036506653f;
    p = p * r + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

typedef struct { vf square, g, e; } vf_normal;
EXPACC_INLINE vf_normal vf_normal_parts(vf x) {
    vf t = vf_min(vf_abs(x), vf_set(EXPACC_FAR)), s = x * x;
    vm left = vf_lt(x, (vf){0});
    vf top = vf_mills_top(t), bottom = vf_mills_bottom(t);
    vf_normal out;
    out.square = vf_where(left, s);
    out.e = vf_exp_half(vf_where(vm_not(left), s));
    out.g = bottom * vf_rcp(vf_select(left, top, bottom - out.e * top));
    return out;
}

EXPACC_INLINE vf vf_log_cdf(vf x) {
    vf_normal p = vf_normal_parts(x);
    /* Right of 0 log g is small and would lose its digits: log1p of the small tail E R instead. */
    vf xp = vf_max(x, (vf){0});
    vf tail = p.e * vf_mills_top(xp) / vf_mills_bottom(xp);
    return vf_select(vf_lt(x, (vf){0}), -0.5f * p.square - vf_log(p.g), vf_log1p(-tail));
}

EXPACC_INLINE vf vf_hazard(vf x) {
    vf_normal p = vf_normal_parts(x);
    return EXPACC_INV_SQRT_2PI * (p.e * p.g);
}

/* λ to 1e-4 or so: to steer by. */
EXPACC_INLINE vf vf_hazard_rough(vf x) {
    vf t = vf_min(vf_abs(x), vf_set(EXPACC_FAR));
    vm right = vm_not(vf_lt(x, (vf){0}));
    vf top = vf_mills_top_rough(t), bottom = vf_mills_bottom_rough(t);
    vf e = vf_exp_half(vf_where(right, x * x));
    return EXPACC_INV_SQRT_2PI * (e * bottom) * vf_rcp_rough(vf_select(right, bottom - e * top, top));
}

#endif
