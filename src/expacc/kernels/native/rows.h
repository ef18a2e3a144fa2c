/* The contract between the driver and the row kernels: float32, Gaussian noise, one target per row.
 *
 * For a row with scores x, target y: m_i = min((x_y - x_i) * scale, cap) over the competitors i != y, and
 *
 *     L   = log P,  P = ∫ φ(z) ∏ Φ(z + m_i) dz,      G_i = ∂L/∂m_i >= 0
 *     w   = factor * exp(power * L)                   minus the loss's derivative in L
 *     grad_i = w * scale * G_i   where (x_y - x_i) * scale < cap,  else 0        (i != y)
 *     grad_y = - Σ grad_i
 *
 * which is the gradient of factor * (1 - P^power)/power in the scores. `scale` is 1/(sigma * standard deviation).
 * L is right at both ends: for P > 1/2 it is log1p(-Q), with Q = 1 - P from its own integral.
 */
#ifndef EXPACC_ROWS_H
#define EXPACC_ROWS_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const float *x;        /* scores; row r starts at x + r * stride, classes are contiguous */
    ptrdiff_t stride;
    const int64_t *target; /* per row: 0 .. classes - 1, or negative: the row is left out (log_p = 0, grad = 0) */
    ptrdiff_t rows;
    ptrdiff_t classes;     /* >= 2 */
    const double *scale;   /* per row, positive and finite */
    const double *cap;     /* per row, margin / sigma; +inf without a margin */
    const double *factor;  /* per row: weight, reduction; may be 0 */
    double power;
    float *log_p;          /* out, per row */
    float *grad;           /* out, row r at grad + r * grad_stride, classes contiguous; NULL: not wanted */
    ptrdiff_t grad_stride;
    double *dot;           /* out, per row: Σ w * G_i * m_i over all competitors; NULL: not wanted */
    double *dot_live;      /* out, per row: the same over those below the cap; NULL: not wanted */
} expacc_rows;

/* Special scores: a competitor of -inf takes no part (m = +inf, its grad is 0). A target of -inf with a finite
 * competitor, or a competitor of +inf: P = 0 (log_p = -inf, grad 0). A NaN anywhere: log_p and the row's grad NaN.
 * A row of -inf alone counts as equal scores with gradient 0; no live finite competitor: P = 1, gradient 0. */

/* Rows without hope, as in the reference. Beyond EXPACC_FURTHEST log P(m) is s² log P(m/s) to 1e-10; beyond
 * EXPACC_NOWHERE a gap's square is not finite: P = 0. Below exp(-EXPACC_NOTHING) w is 0 whatever the scale, and the loss
 * 1/power whatever the log_p: such a row need not be integrated, log P < -gap²/4 says enough. */
#define EXPACC_FURTHEST 1e6
#define EXPACC_NOWHERE 1e150
#define EXPACC_NOTHING 500.0
static inline int expacc_hopeless(double power, double gap) { return gap < 0 && power * gap * gap > 4 * EXPACC_NOTHING; }

/* A weight as a product of two floats. A negative power makes it larger than float holds: inf, and the gradient of a
 * class far behind inf · 0. */
static inline void expacc_split(double weight, float *one, float *other) {
    const double size = weight < 0 ? -weight : weight;
    *other = size > 1e68 ? 1e38f : size > 1e30 ? (float)(size / 1e30) : 1.0f;
    *one = size > 1e30 ? (weight < 0 ? -1e30f : 1e30f) : (float)weight;
}

#endif
