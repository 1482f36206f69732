/* look.c - what the CPU can do and would do: see look.h. */
#include "backend/look.h"
#include "cpu/cpu.h"
#include "cpu/limits.h"
#include <stdlib.h>

static const lr_cpu_kernels *table(const char *isa)
{
    const char *env = getenv("LLMRUN_ISA");
    return lr_cpu_table(env && *env ? env : isa);
}

const char *lr_look_isa(const char *isa)
{
    const lr_cpu_kernels *k = table(isa);
    return k ? k->name : NULL;
}

int lr_look_limits(int threads, size_t bytes, double seconds, const char *isa, lr_look_limit *out, int cap)
{
    enum { MOST = 32 };
    lr_limit l[MOST];
    int n = lr_limits(threads, bytes, seconds, isa, l, cap < MOST ? cap : MOST);
    for (int i = 0; i < n; i++) out[i] = (lr_look_limit){l[i].name, l[i].unit, l[i].value};
    return n;
}

size_t lr_look_cache(void) { return lr_last_cache(); }

const char *lr_look_product(const char *isa, lr_compute compute, int type, int k, int m)
{
    const lr_cpu_kernels *t = table(isa);
    if (!t) return "not to be had here";
    if (compute == LR_COMPUTE_F32) return "float32 reference";
    if (compute == LR_COMPUTE_BF16 && !t->bf16) return "not to be had here";
    uint16_t h = 0;
    const bool fine = compute == LR_COMPUTE_FAST && t->fine;
    const lr_gemm_w w = {.type = type, .k = k, .packed = lr_pack_strip_bytes(type, k) != 0};
    const lr_qact qa = {.k = k,
                        .h = compute == LR_COMPUTE_BF16 ? &h : NULL,
                        .fine = fine && !lr_pack_super(type),
                        .wide = fine && lr_pack_super(type)};
    return t->way(&w, &qa, m);
}
