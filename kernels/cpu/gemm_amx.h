/* gemm_amx.h - what the AMX products share: the tile configuration, and who does what. */
#ifndef LR_KERNELS_CPU_GEMM_AMX_H
#define LR_KERNELS_CPU_GEMM_AMX_H
#include "cpu/cpu.h"

typedef struct lr_tile_config { /* the operand of ldtilecfg */
    uint8_t palette, start, zero[14];
    uint16_t colsb[16]; /* bytes of a row */
    uint8_t rows[16];
} lr_tile_config;

static inline void lr_tiles_load(const lr_tile_config *c) { __asm__ volatile("ldtilecfg %0" ::"m"(*c)); }

/* Loads a tile: rows lie `stride` bytes apart. The compiler's own intrinsic does not say that it reads memory, so
 * stores before it may be moved behind it. */
#define LR_TILE_LOAD(tile, base, stride) LR_TILE_LOAD_(tile, base, stride)
#define LR_TILE_LOAD_(tile, base, stride)                                                                              \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void *)(base)), "r"((long)(stride)) : "memory")

/* What a tile of sums is stored to. */
typedef int32_t lr_tile_sums[16][16] __attribute__((aligned(64)));

/* Packed weights, rows in bf16 (qa->h), any m. */
void lr_gemm_bf16_amx(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1);
/* Packed weights, rows of 11 bits, more rows than FEW. */
void lr_gemm_fine_amx(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1);
/* Packed weights, two to four rows of 11 or 14 bits, where it takes them: by the number of strips too. */
bool lr_gemm_few_amx_takes(const lr_gemm_w *w, const lr_qact *qa, int m, int strips);
void lr_gemm_few_amx(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1);
enum { WIDE_FEW = 4 }; /* rows of 14 bits that go the VNNI way */
/* Packed weights of super-blocks, rows of 14 bits, more rows than WIDE_FEW. */
void lr_gemm_wide_amx(const lr_gemm_w *w, const lr_qact *qa, int m, float *y, size_t ldy, int s0, int s1);
void lr_quantize_bf16_amx(const float *x, size_t ldx, int m, lr_qact qa, int c0, int c1);

#endif
