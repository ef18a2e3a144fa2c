/* Tables of log Φ and of λ = φ/Φ with its derivatives on the grid x = LOW + i/32, laid out for vectors of equal steps.
 *
 * `cdf[w]` holds at each grid point the cubic c0 + c1 t + c2 t² + c3 t³ of log Φ(x + t W), |t| <= 1/2, W = 1/(8 << w).
 * `hazard[d]` holds the d-th derivative of λ in x.
 *
 * Layout `a` puts points that are TABLE_STRIDES[a] apart next to each other, so that the values at equally spaced x are one
 * unaligned load: the point i is at table_at(i, a). A load may run on to HIGH; from 13.1 on everything is 0 (below the
 * smallest normal float).
 */
#ifndef EXPACC_TABLES_H
#define EXPACC_TABLES_H

#define TABLE_LOW (-26)
#define TABLE_HIGH 46
#define TABLE_PER_UNIT 32
#define TABLE_POINTS ((TABLE_HIGH - TABLE_LOW) * TABLE_PER_UNIT)
#define TABLE_LAYOUTS 10
#define TABLE_HALF 7                    /* the layouts of step 1/2 and 1 */
#define TABLE_ONE 9
static const int TABLE_STRIDES[TABLE_LAYOUTS] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}; /* divisors of TABLE_POINTS */

/* i / stride as a product: exact for i < 2^15. */
static inline int table_magic(int a) { return (65536 + TABLE_STRIDES[a] - 1) / TABLE_STRIDES[a]; }
static inline int table_at(int i, int a) {
    const int stride = TABLE_STRIDES[a], quotient = i / stride;
    return (i - quotient * stride) * (TABLE_POINTS / stride) + quotient;
}

typedef struct {
    float cdf[3][TABLE_LAYOUTS][4][TABLE_POINTS];
    float hazard[2][3][TABLE_POINTS];   /* of layouts TABLE_HALF and TABLE_ONE */
} expacc_tables_type;

extern expacc_tables_type expacc_tables; /* filled when the library is loaded */

#endif
