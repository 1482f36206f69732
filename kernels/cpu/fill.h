/* fill.h - how table.c puts the tables together: each file of kernels writes its own entries into a table.
 *
 * A fill function sets only the entries that its instruction set has a version of; call the scalar ones first, so that
 * the table is complete. No entry may be called on a machine that lacks the instruction set.
 */
#ifndef LR_KERNELS_CPU_FILL_H
#define LR_KERNELS_CPU_FILL_H
#include "cpu/cpu.h"

void lr_rows_fill_scalar(lr_cpu_kernels *k);
void lr_rows_fill_avx2(lr_cpu_kernels *k);
void lr_rows_fill_avx512(lr_cpu_kernels *k);
void lr_rows_fill_neon(lr_cpu_kernels *k);

void lr_attn_fill_scalar(lr_cpu_kernels *k);
void lr_attn_fill_avx2(lr_cpu_kernels *k);
void lr_attn_fill_avx512(lr_cpu_kernels *k);
void lr_attn_fill_amx(lr_cpu_kernels *k);
void lr_attn_fill_neon(lr_cpu_kernels *k);

void lr_vocab_fill_scalar(lr_cpu_kernels *k);
void lr_vocab_fill_avx2(lr_cpu_kernels *k);
void lr_vocab_fill_avx512(lr_cpu_kernels *k);
void lr_vocab_fill_neon(lr_cpu_kernels *k);

#endif
