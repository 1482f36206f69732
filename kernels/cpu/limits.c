/* limits.c - what this machine can do at best: see limits.h.
 *
 * Read bandwidth: every thread streams its own slice of a buffer far larger than any cache, in one or several places at
 * once, 64 bytes a load, asking for what lies a little ahead or leaving that to the machine; the best way counts, as
 * none is the best everywhere (one place without asking is a fifth behind two with it on a Sapphire Rapids).
 * Arithmetic: each instruction that the kernels may use, on registers alone with enough independent sums to hide its
 * latency.
 */
#define _GNU_SOURCE
#include "cpu/limits.h"
#include "base/clock.h"
#include "base/mem.h"
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

enum { MAX_THREADS = 1024, SLACK = 4096, LINES = 256 }; /* LINES: bytes that are read in one place, by turns */
#define KEEP(x) __asm__ volatile("" : : "r"(&(x)) : "memory")

typedef struct {
    const char *name, *unit, *isa;
    double (*run)(long rounds); /* does the work, returns its operations */
    int (*there)(void);
} op_t;

#if defined(__x86_64__)

/* SUMS independent sums of one instruction a round */
#define SUMS 12
#define ARITHMETIC(fn, isa, vec, zero, a0, b0, step, ops)                                                              \
    __attribute__((target(isa), noinline)) static double fn(long rounds)                                               \
    {                                                                                                                  \
        vec s[SUMS];                                                                                                   \
        __typeof__(a0) a = a0;                                                                                         \
        __typeof__(b0) b = b0;                                                                                         \
        _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; i++)                                                        \
        {                                                                                                              \
            s[i] = zero;                                                                                               \
            __asm__ volatile("" : "+v"(s[i])); /* else they are all found equal, and one is left */                    \
        }                                                                                                              \
        for (long r = 0; r < rounds; r++) {                                                                            \
            _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; i++) s[i] = step;                                       \
            __asm__ volatile("" : "+v"(a), "+v"(b));                                                                   \
        }                                                                                                              \
        KEEP(s);                                                                                                       \
        return (double)rounds * SUMS * (ops);                                                                          \
    }

ARITHMETIC(f32_avx2, "avx2,fma", __m256, _mm256_setzero_ps(), _mm256_set1_ps(1.0f), _mm256_set1_ps(1e-9f),
           _mm256_fmadd_ps(a, b, s[i]), 8 * 2)
ARITHMETIC(f32_avx512, "avx512f", __m512, _mm512_setzero_ps(), _mm512_set1_ps(1.0f), _mm512_set1_ps(1e-9f),
           _mm512_fmadd_ps(a, b, s[i]), 16 * 2)
ARITHMETIC(int8_avx2, "avx2", __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(3), _mm256_set1_epi8(5),
           _mm256_add_epi32(s[i], _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_xor_si256(a, s[i]), b), a)), 32 * 2)
ARITHMETIC(int8_avx512_vnni, "avx512f,avx512vnni", __m512i, _mm512_setzero_si512(), _mm512_set1_epi8(3),
           _mm512_set1_epi8(5), _mm512_dpbusd_epi32(s[i], a, b), 64 * 2)
#if __GNUC__ >= 11 || defined(__clang__)
ARITHMETIC(int8_avx_vnni, "avx2,avxvnni", __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(3), _mm256_set1_epi8(5),
           _mm256_dpbusd_avx_epi32(s[i], a, b), 32 * 2)
ARITHMETIC(bf16_avx512, "avx512f,avx512bf16", __m512, _mm512_setzero_ps(), (__m512bh)_mm512_set1_epi16(0x3f80),
           (__m512bh)_mm512_set1_epi16(0x3f80), _mm512_dpbf16_ps(s[i], a, b), 32 * 2)

/* Eight tiles of 16 rows of 64 bytes: four sums, two left and two right factors. */
__attribute__((target("amx-tile"))) static void amx_begin(void)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) c;
    memset(&c, 0, sizeof c);
    c.palette = 1;
    for (int i = 0; i < 8; i++) c.row_bytes[i] = 64, c.rows[i] = 16;
    KEEP(c); /* GCC 12 takes ldtilecfg to read 8 bytes only and drops the other stores */
    _tile_loadconfig(&c);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
}

__attribute__((target("amx-tile,amx-int8"), noinline)) static double int8_amx(long rounds)
{
    amx_begin();
    for (long r = 0; r < rounds; r++) {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_release();
    return (double)rounds * 4 * 16 * 16 * 64 * 2;
}

__attribute__((target("amx-tile,amx-bf16"), noinline)) static double bf16_amx(long rounds)
{
    amx_begin();
    for (long r = 0; r < rounds; r++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return (double)rounds * 4 * 16 * 16 * 32 * 2;
}
#endif

static int leaf7(unsigned sub, int reg, int bit)
{
    unsigned r[4];
    if (!__get_cpuid_count(7, sub, &r[0], &r[1], &r[2], &r[3])) return 0;
    return r[reg] >> bit & 1;
}
static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static int has_avx512(void) { return __builtin_cpu_supports("avx512f"); }
static int has_avx512_vnni(void) { return has_avx512() && leaf7(0, 2, 11); }
#if __GNUC__ >= 11 || defined(__clang__)
static int has_avx_vnni(void) { return has_avx2() && leaf7(1, 0, 4); }
static int has_avx512_bf16(void) { return has_avx512() && leaf7(1, 0, 5); }
/* The kernel gives a process the tile registers on request only (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA). */
static int has_amx(void) { return leaf7(0, 3, 24) && syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
static int has_amx_int8(void) { return has_amx() && leaf7(0, 3, 25); }
static int has_amx_bf16(void) { return has_amx() && leaf7(0, 3, 22); }
#endif

static const op_t ops[] = {{"f32_avx2", "GFLOPS", "avx2", f32_avx2, has_avx2},
                           {"f32_avx512", "GFLOPS", "avx512", f32_avx512, has_avx512},
                           {"int8_avx2", "GOPS", "avx2", int8_avx2, has_avx2},
                           {"int8_avx512_vnni", "GOPS", "avx512", int8_avx512_vnni, has_avx512_vnni},
#if __GNUC__ >= 11 || defined(__clang__)
                           {"int8_avx_vnni", "GOPS", "avx2", int8_avx_vnni, has_avx_vnni},
                           {"int8_amx", "GOPS", "amx", int8_amx, has_amx_int8},
                           {"bf16_avx512", "GFLOPS", "avx512", bf16_avx512, has_avx512_bf16},
                           {"bf16_amx", "GFLOPS", "amx", bf16_amx, has_amx_bf16},
#endif
                           {NULL, NULL, NULL, NULL, NULL}};

__attribute__((target("avx512f"), noinline)) static void read_avx512(const char *p, size_t n, int places, size_t ahead,
                                                                     bool l2)
{
    __m512i s0 = _mm512_setzero_si512(), s1 = s0, s2 = s0, s3 = s0;
    const size_t part = n / (size_t)places;
    for (size_t i = 0; i + LINES <= part; i += LINES) {
        for (int k = 0; k < places; k++) {
            const char *q = p + (size_t)k * part + i;
            for (size_t l = 0; ahead && l < LINES; l += 64)
                l2 ? _mm_prefetch(q + ahead + l, _MM_HINT_T1) : _mm_prefetch(q + ahead + l, _MM_HINT_T0);
            s0 = _mm512_xor_si512(s0, _mm512_loadu_si512(q));
            s1 = _mm512_xor_si512(s1, _mm512_loadu_si512(q + 64));
            s2 = _mm512_xor_si512(s2, _mm512_loadu_si512(q + 128));
            s3 = _mm512_xor_si512(s3, _mm512_loadu_si512(q + 192));
        }
    }
    s0 = _mm512_xor_si512(_mm512_xor_si512(s0, s1), _mm512_xor_si512(s2, s3));
    KEEP(s0);
}

#elif defined(__aarch64__)

#define SUMS 16
__attribute__((noinline)) static double f32_neon(long rounds)
{
    float32x4_t s[SUMS], a = vdupq_n_f32(1.0f), b = vdupq_n_f32(1e-9f);
    for (int i = 0; i < SUMS; i++) {
        s[i] = vdupq_n_f32(0);
        __asm__ volatile("" : "+w"(s[i]));
    }
    for (long r = 0; r < rounds; r++) {
        _Pragma("GCC unroll 16") for (int i = 0; i < SUMS; i++) s[i] = vfmaq_f32(s[i], a, b);
        __asm__ volatile("" : "+w"(a), "+w"(b));
    }
    KEEP(s);
    return (double)rounds * SUMS * 4 * 2;
}
__attribute__((target("arch=armv8.2-a+dotprod"), noinline)) static double int8_neon(long rounds)
{
    int32x4_t s[SUMS];
    int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(5);
    for (int i = 0; i < SUMS; i++) {
        s[i] = vdupq_n_s32(0);
        __asm__ volatile("" : "+w"(s[i]));
    }
    for (long r = 0; r < rounds; r++) {
        _Pragma("GCC unroll 16") for (int i = 0; i < SUMS; i++) s[i] = vdotq_s32(s[i], a, b);
        __asm__ volatile("" : "+w"(a), "+w"(b));
    }
    KEEP(s);
    return (double)rounds * SUMS * 16 * 2;
}
static int has_neon(void) { return 1; }
static int has_dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; }
static const op_t ops[] = {{"f32_neon", "GFLOPS", "neon", f32_neon, has_neon},
                           {"int8_neon_dot", "GOPS", "neon", int8_neon, has_dotprod},
                           {NULL, NULL, NULL, NULL, NULL}};

#else
static const op_t ops[] = {{NULL, NULL, NULL, NULL, NULL}};
#endif

__attribute__((noinline)) static void read_plain(const char *p, size_t n, int places, size_t ahead, bool l2)
{
    uint64_t s[8] = {0};
    const size_t part = n / (size_t)places;
    for (size_t i = 0; i + LINES <= part; i += LINES) {
        for (int k = 0; k < places; k++) {
            const char *q = p + (size_t)k * part + i;
            for (size_t l = 0; l < LINES; l += 64) {
                uint64_t v[8];
                if (ahead) l2 ? __builtin_prefetch(q + ahead + l, 0, 2) : __builtin_prefetch(q + ahead + l, 0, 3);
                memcpy(v, q + l, 64);
                for (int w = 0; w < 8; w++) s[w] ^= v[w];
            }
        }
    }
    KEEP(s);
}

/* Ways to read a slice: places at once, bytes asked for ahead (0: nothing), into L2 or L1. What is best differs between
 * makes. */
static const struct {
    int places;
    size_t ahead;
    bool l2;
} ways[] = {{2, 1024, false}, {1, 1024, false}, {4, 2048, false}, {2, 0, false},
            {1, 0, false},    {1, 32768, true}, {2, 8192, true}};
enum { WAYS = sizeof ways / sizeof *ways };

/* ---- the threads: all start a run together; its time goes from the first start to the last end ---- */

typedef struct {
    pthread_barrier_t gate;
    const op_t *op; /* NULL: read memory ... */
    int way;        /* ... so */
    long rounds;
    char *buffer;
    size_t bytes; /* of all threads together */
    int n_threads;
    double done[MAX_THREADS]; /* operations or bytes of each thread */
    double start[MAX_THREADS], end[MAX_THREADS];
} job_t;

typedef struct {
    job_t *job;
    int index;
} worker_t;

static void read_memory(const char *p, size_t n, int way)
{
#if defined(__x86_64__)
    if (has_avx512()) {
        read_avx512(p, n, ways[way].places, ways[way].ahead, ways[way].l2);
        return;
    }
#endif
    read_plain(p, n, ways[way].places, ways[way].ahead, ways[way].l2);
}

static void *work(void *arg)
{
    const worker_t *w = arg;
    job_t *j = w->job;
    const size_t part = j->bytes / (size_t)j->n_threads & ~(size_t)4095;
    pthread_barrier_wait(&j->gate);
    j->start[w->index] = lr_now();
    if (j->op) {
        j->done[w->index] = j->op->run(j->rounds);
    } else {
        read_memory(j->buffer + (size_t)w->index * part, part, j->way);
        j->done[w->index] = (double)part;
    }
    j->end[w->index] = lr_now();
    return NULL;
}

/* One run of the job by n threads: 10^9 operations or bytes a second. */
static double rate(job_t *j, double *seconds)
{
    pthread_t id[MAX_THREADS];
    worker_t w[MAX_THREADS];
    double sum = 0;
    pthread_barrier_init(&j->gate, NULL, (unsigned)j->n_threads);
    for (int i = 0; i < j->n_threads; i++) {
        w[i] = (worker_t){j, i};
        if (pthread_create(&id[i], NULL, work, &w[i])) abort(); /* the others wait at the gate for it */
    }
    double first = 0, last = 0;
    for (int i = 0; i < j->n_threads; i++) {
        pthread_join(id[i], NULL);
        sum += j->done[i];
        if (i == 0 || j->start[i] < first) first = j->start[i];
        if (i == 0 || j->end[i] > last) last = j->end[i];
    }
    *seconds = last - first;
    pthread_barrier_destroy(&j->gate);
    return sum / *seconds * 1e-9;
}

static double best(job_t *j, double want_seconds)
{
    double top = 0, seconds;
    if (j->op) {
        j->rounds = 1000;
        while (rate(j, &seconds), seconds < 0.02) j->rounds *= 4;
        j->rounds = (long)((double)j->rounds * want_seconds / seconds) + 1;
    }
    for (int run = 0; run < (j->op ? 3 : 2 * WAYS); run++) {
        j->way = run % WAYS;
        double r = rate(j, &seconds);
        if (r > top) top = r;
    }
    return top;
}

int lr_limits(int threads, size_t bytes, double seconds, const char *isa, lr_limit *out, int cap)
{
    job_t *j = lr_calloc(1, sizeof *j);
    int n = 0;
    if (!j) return 0;
    j->n_threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    j->bytes = bytes & ~(size_t)4095;
    j->buffer = mmap(NULL, j->bytes + SLACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (j->buffer != MAP_FAILED && n < cap) {
        madvise(j->buffer, j->bytes, MADV_HUGEPAGE);
        memset(j->buffer, 1, j->bytes); /* real pages: reading untouched ones reads one page of zeros */
        out[n++] = (lr_limit){"read", "GB/s", "", best(j, seconds)};
        munmap(j->buffer, j->bytes + SLACK);
    }
    for (const op_t *op = ops; op->name && n < cap; op++) {
        if ((isa && strcmp(isa, op->isa) != 0) || !op->there()) continue;
        j->op = op;
        out[n++] = (lr_limit){op->name, op->unit, op->isa, best(j, seconds)};
    }
    lr_free(j);
    return n;
}

size_t lr_last_cache(void)
{
    size_t most = 0;
    for (int i = 0; i < 10; i++) {
        char path[80];
        unsigned long n = 0;
        char unit = 0;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", i);
        FILE *f = fopen(path, "r");
        if (!f) break;
        if (fscanf(f, "%lu%c", &n, &unit) >= 1) {
            const size_t bytes = (size_t)n << (unit == 'M' ? 20 : unit == 'K' ? 10 : 0);
            if (bytes > most) most = bytes;
        }
        fclose(f);
    }
    return most;
}
