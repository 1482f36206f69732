/* table.c - the tables of CPU kernels and which of them this machine can run.
 *
 * A table starts as the scalar one and takes over each better instruction set's entries in turn, so it is complete and
 * its newest entries win. Tables are put together once, at first use, and never change afterwards.
 */
#define _GNU_SOURCE
#include "cpu/fill.h"
#include "cpu/gemm.h"
#include <pthread.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static void fill_scalar(lr_cpu_kernels *k)
{
    lr_rows_fill_scalar(k);
    lr_attn_fill_scalar(k);
    lr_vocab_fill_scalar(k);
    lr_gemm_fill_scalar(k);
}

static bool always(void) { return true; }

#if defined(__x86_64__)
typedef struct features {
    uint32_t c1, b7, c7, d7, a71; /* leaf 1 ecx; leaf 7 ebx, ecx, edx; leaf 7.1 eax */
    uint64_t xcr0;
} features;

static features read_features(void)
{
    features f = {0};
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &f.c1, &d)) return f;
    if (__get_cpuid_count(7, 0, &a, &f.b7, &f.c7, &f.d7) && a >= 1) __get_cpuid_count(7, 1, &f.a71, &b, &c, &d);
    if (f.c1 & bit_OSXSAVE) {
        uint32_t lo, hi;
        __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
        f.xcr0 = (uint64_t)hi << 32 | lo;
    }
    return f;
}

static bool all(uint64_t have, uint64_t want) { return (have & want) == want; }

/* Registers that the OS must save: SSE, AVX / + opmask, ZMM / + tile config, tile data. */
enum { XCR_AVX = 0x6, XCR_AVX512 = 0xE6, XCR_AMX = 0x600E6 };

static bool has_avx2(void)
{
    features f = read_features();
    uint32_t fma = 1u << 12, f16c = 1u << 29, avx = 1u << 28, avx2 = 1u << 5, bmi2 = 1u << 8;
    return all(f.xcr0, XCR_AVX) && all(f.c1, fma | f16c | avx) && all(f.b7, avx2 | bmi2);
}

static bool has_avx512(void)
{
    features f = read_features();
    uint32_t foundation = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, vnni = 1u << 11;
    return has_avx2() && all(f.xcr0, XCR_AVX512) && all(f.b7, foundation | dq | bw | vl) && all(f.c7, vnni);
}

/* Linux hands out the tile registers on request, for the whole process, once. */
static bool ask_for_tiles(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

static bool has_amx(void)
{
    features f = read_features();
    uint32_t bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25, vbmi = 1u << 1, avx512_bf16 = 1u << 5;
    return has_avx512() && all(f.xcr0, XCR_AMX) && all(f.d7, bf16 | tile | int8) && all(f.c7, vbmi) &&
           all(f.a71, avx512_bf16) && ask_for_tiles();
}

static void fill_avx2(lr_cpu_kernels *k)
{
    lr_rows_fill_avx2(k);
    lr_attn_fill_avx2(k);
    lr_vocab_fill_avx2(k);
    lr_gemm_fill_avx2(k);
}

static void fill_avx512(lr_cpu_kernels *k)
{
    lr_rows_fill_avx512(k);
    lr_attn_fill_avx512(k);
    lr_vocab_fill_avx512(k);
    lr_gemm_fill_avx512(k);
}

static void fill_amx(lr_cpu_kernels *k)
{
    lr_attn_fill_amx(k);
    lr_gemm_fill_amx(k);
}

static const struct {
    const char *name;
    bool (*has)(void);
    void (*fill)(lr_cpu_kernels *);
} sets[] = {
    /* worst first: each fills over the ones before it */
    {"scalar", always, fill_scalar},
    {"avx2", has_avx2, fill_avx2},
    {"avx512", has_avx512, fill_avx512},
    {"amx", has_amx, fill_amx},
};
#elif defined(__aarch64__)
#include <sys/auxv.h>

static bool has_neon(void)
{
    enum { HWCAP_DOTPROD = 1 << 20 };
    return getauxval(AT_HWCAP) & HWCAP_DOTPROD;
}

static void fill_neon(lr_cpu_kernels *k)
{
    lr_rows_fill_neon(k);
    lr_attn_fill_neon(k);
    lr_vocab_fill_neon(k);
    lr_gemm_fill_neon(k);
}

static const struct {
    const char *name;
    bool (*has)(void);
    void (*fill)(lr_cpu_kernels *);
} sets[] = {{"scalar", always, fill_scalar}, {"neon", has_neon, fill_neon}};
#else
static const struct {
    const char *name;
    bool (*has)(void);
    void (*fill)(lr_cpu_kernels *);
} sets[] = {{"scalar", always, fill_scalar}};
#endif

enum { N_SETS = sizeof sets / sizeof *sets };

static lr_cpu_kernels tables[N_SETS];
static const lr_cpu_kernels *list[N_SETS + 1]; /* best first */
static bool usable[N_SETS];                    /* of list: asked once, cpuid is slow in virtual machines */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void build(void)
{
    for (int i = 0; i < N_SETS; i++) {
        if (i) tables[i] = tables[i - 1];
        tables[i].fine = tables[i].bf16 = false; /* not inherited: forms of rows belong to a set's own product */
        const bool has = sets[i].has();
        if (has) sets[i].fill(&tables[i]); /* the fill function itself is compiled for the set */
        tables[i].name = sets[i].name;
        tables[i].supported = sets[i].has;
        list[N_SETS - 1 - i] = &tables[i];
        usable[N_SETS - 1 - i] = has;
    }
}

const lr_cpu_kernels *const *lr_cpu_tables(void)
{
    pthread_once(&once, build);
    return list;
}

const lr_cpu_kernels *lr_cpu_table(const char *name)
{
    const lr_cpu_kernels *const *t = lr_cpu_tables();
    for (int i = 0; t[i]; i++)
        if ((!name || strcmp(name, t[i]->name) == 0) && usable[i]) return t[i];
    return NULL;
}
