/* The row kernels of one variant, as the driver calls them. `scratch`: 64-byte aligned, at least
 * EXPACC_NAME(<kernel>_scratch)(classes) bytes, one per thread, contents free.
 */
#ifndef EXPACC_KERNELS_H
#define EXPACC_KERNELS_H

#include "rows.h"
#include "vec.h"

void EXPACC_NAME(expacc_direct)(const expacc_rows *in, void *scratch);   /* few classes; right for any number */
size_t EXPACC_NAME(expacc_direct_scratch)(ptrdiff_t classes);
void EXPACC_NAME(expacc_binned)(const expacc_rows *in, void *scratch);   /* many classes: binned.c */
size_t EXPACC_NAME(expacc_binned_scratch)(ptrdiff_t classes);
void EXPACC_NAME(expacc_gumbel)(const expacc_rows *in, void *scratch);   /* the closed form, any number of classes */
size_t EXPACC_NAME(expacc_gumbel_scratch)(ptrdiff_t classes);

#endif
