/* What Python asks of the library: one block of 8-byte fields, in the order of cpu.py's _REQUEST.
 * Row (o, i) of outer x inner rows has its class c at x + o * x_outer + i * x_inner + c * x_class.
 */
#ifndef EXPACC_REQUEST_H
#define EXPACC_REQUEST_H

#include <stddef.h>
#include <stdint.h>

/* One more whenever a request or the meaning of a field changes; _INTERFACE in cpu.py. */
#define EXPACC_INTERFACE 2

enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };
enum { GAUSSIAN, GUMBEL };
enum { NONE, MEAN, SUM };
enum { CAP = 2 };

/* GOMP_parallel: run fn(data) on that many threads and wait. */
typedef void (*expacc_parallel)(void (*fn)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    const void *x;
    int64_t dtype;         /* FLOAT32, BFLOAT16 or FLOAT16; of the loss, too */
    int64_t outer, inner, classes;
    int64_t x_outer, x_inner, x_class;
    float *grad;           /* NULL: not wanted */
    int64_t g_outer, g_inner, g_class;
    void *loss;            /* one, or with reduction NONE one per row */
    const int64_t *target; /* per row */
    int64_t ignore_index;
    const void *weight;    /* per class; NULL: 1 */
    int64_t weight_dtype;
    const void *sigma;     /* one, or one per row */
    int64_t sigma_dtype;   /* FLOAT32 or FLOAT64 */
    int64_t sigma_per_row;
    const double *power;
    int64_t noise;
    int64_t normalize;     /* 0: no; 1: divide by the deviation; CAP: where it exceeds 1 */
    int64_t reduction;
    double *sigma_grad;    /* out, per row; NULL: not wanted */
    double *couple;        /* out, with reduction NONE and normalize: per row its share in the gradient of the standard
                              deviation, then the mean and 1/((n - 1) std²): what expacc_finish needs */
    expacc_parallel parallel; /* NULL: this thread alone */
    int64_t threads;
    double margin;         /* inf: none */
} expacc_request;

typedef struct {
    const void *x;
    int64_t dtype;
    int64_t outer, inner, classes;
    int64_t x_outer, x_inner, x_class;
    float *grad;           /* in and out */
    int64_t g_outer, g_inner, g_class;
    const int64_t *target;
    int64_t ignore_index;
    const double *upstream; /* per row */
    const double *couple;  /* as above, or NULL */
    expacc_parallel parallel;
    int64_t threads;
} expacc_completion;

#endif
