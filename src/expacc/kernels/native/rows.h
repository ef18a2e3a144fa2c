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

#endif
