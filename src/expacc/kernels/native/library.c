/* The library's door: which variants it holds and the machine can run, and the two calls, by variant. */
#include "request.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(_WIN32)
#define EXPORT __attribute__((dllexport))
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define DECLARE(name)                                             \
    int64_t expacc_loss_##name(const expacc_request *in);         \
    void expacc_finish_##name(const expacc_completion *in);
#ifdef EXPACC_HAVE_AVX512
DECLARE(avx512)
#endif
#ifdef EXPACC_HAVE_AVX2
DECLARE(avx2)
#endif
DECLARE(baseline)

enum { BASELINE, AVX2, AVX512 };

#if defined(__x86_64__)
static int machine(void) {
    /* Not __builtin_cpu_supports: zig's runtime library has no table for it. */
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return BASELINE;
    const unsigned needs = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C | bit_MOVBE;
    if ((c & needs) != needs) return BASELINE;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6) return BASELINE; /* the system keeps the wide registers */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return BASELINE;
    const unsigned two = bit_AVX2 | bit_BMI | bit_BMI2;
    if ((b & two) != two) return BASELINE;
    const unsigned five = bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL;
    return (b & five) == five && (low & 0xe6) == 0xe6 ? AVX512 : AVX2;
}
#else
static int machine(void) { return BASELINE; }
#endif

/* Return the variants that are here and run here, bit 0 baseline, 1 AVX2, 2 AVX-512. */
EXPORT int64_t expacc_variants(void) {
    int64_t found = 1 << BASELINE;
    const int most = machine();
#ifdef EXPACC_HAVE_AVX2
    if (most >= AVX2) found |= 1 << AVX2;
#endif
#ifdef EXPACC_HAVE_AVX512
    if (most >= AVX512) found |= 1 << AVX512;
#endif
    (void)most;
    return found;
}

/* Return which requests the library understands: cpu.py asks before it sends one. */
EXPORT int64_t expacc_interface(void) { return EXPACC_INTERFACE; }

EXPORT int64_t expacc_loss(int64_t variant, const expacc_request *in) {
    switch (variant) {
#ifdef EXPACC_HAVE_AVX512
    case AVX512: return expacc_loss_avx512(in);
#endif
#ifdef EXPACC_HAVE_AVX2
    case AVX2: return expacc_loss_avx2(in);
#endif
    default: return expacc_loss_baseline(in);
    }
}

EXPORT void expacc_finish(int64_t variant, const expacc_completion *in) {
    switch (variant) {
#ifdef EXPACC_HAVE_AVX512
    case AVX512: expacc_finish_avx512(in); return;
#endif
#ifdef EXPACC_HAVE_AVX2
    case AVX2: expacc_finish_avx2(in); return;
#endif
    default: expacc_finish_baseline(in);
    }
}
