/* Tables of log Φ and of λ = φ/Φ with its derivatives on the grid x = LOW + i/32, laid out for vectors of equal steps.
 *
 * `cdf[w]` holds at each grid point the cubic c0 + c1 t + c2 t² + c3 t³ of log Φ(x + t W), |t| <= 1/2, W = 1/(8 << w).
 * `hazard[d]` holds the d-th derivative of λ in x.
 *
 * Layout `a` puts points 2^a apart next to each other, so that the values at x, x + 2^a/32, x + 2·2^a/32, ... are one
 * unaligned load: the point i is at TABLE_AT(i, a). A load may run on to HIGH; from 13.1 on everything is 0 (below
 * the smallest normal float).
 */
#ifndef EXPACC_TABLES_H
#define EXPACC_TABLES_H

#define TABLE_LOW (-26)
#define TABLE_HIGH 46
#define TABLE_PER_UNIT 32
#define TABLE_POINTS ((TABLE_HIGH - TABLE_LOW) * TABLE_PER_UNIT)
#define TABLE_LAYOUTS 6                 /* steps 1/32, 1/16, 1/8, 1/4, 1/2, 1 */
#define TABLE_AT(i, a) (((i) & ((1 << (a)) - 1)) * (TABLE_POINTS >> (a)) + ((i) >> (a)))

typedef struct {
    float cdf[3][TABLE_LAYOUTS][4][TABLE_POINTS];
    float hazard[TABLE_LAYOUTS][3][TABLE_POINTS];
} expacc_tables_type;

extern expacc_tables_type expacc_tables; /* filled when the library is loaded */

#endif
