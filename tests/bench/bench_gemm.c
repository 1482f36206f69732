/* bench_gemm.c - speed of the matrix product: JSON lines, one a (table, type, shape, rows).
 *
 *   bench_gemm [-i isa] [-t threads] [-q type,type] [-s KxN,KxN] [-m rows,rows] [-c MiB] [-r repeats] [-b 8|11|14|16]
 *
 * Fields: gops (2 m n k operations over the best time, processor time of the slowest thread), gbs (packed bytes over
 * the best time), with -c MiB the weights are copies that together take that much memory, each call using the next one,
 * so that they come from memory and not from a cache. Then a plain read of the same bytes takes turns with the
 * products, copy after copy: read_gbs, and share, the median of the rounds' ratios (gbs: of the median round). First
 * come the machine's own figures: vpdpbusd and AMX int8 peaks of all threads.
 */
#define _GNU_SOURCE
#include "base/mem.h"
#include "cpu/cpu.h"
#include "cpu/gemm.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { MAX_THREADS = 64 };

/* Processor time of this thread: other programs on the machine disturb it less than they disturb the clock. */
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- a team of threads that spin between jobs, so that starting one costs little ---- */

typedef void job_fn(void *arg, int thread, int n);
static struct {
    int n;
    job_fn *fn;
    void *arg;
    atomic_int round, done;
    double took[MAX_THREADS];
} team;

static void do_job(int id)
{
    double t = now();
    team.fn(team.arg, id, team.n);
    team.took[id] = now() - t;
}

static void *team_thread(void *arg)
{
    int id = (int)(intptr_t)arg;
    for (int round = 1;; round++) {
        while (atomic_load_explicit(&team.round, memory_order_acquire) < round)
#if defined(__x86_64__)
            _mm_pause()
#endif
                ;
        do_job(id);
        atomic_fetch_add(&team.done, 1);
    }
    return NULL;
}

static void team_start(int n)
{
    team.n = n;
    for (int i = 1; i < n; i++) {
        pthread_t t;
        if (pthread_create(&t, NULL, team_thread, (void *)(intptr_t)i)) exit(1);
        pthread_detach(t);
    }
}

/* Runs a job on all threads; the time of the slowest. */
static double team_run(job_fn *fn, void *arg)
{
    team.fn = fn;
    team.arg = arg;
    atomic_store(&team.done, 0);
    atomic_fetch_add(&team.round, 1);
    do_job(0);
    while (atomic_load(&team.done) < team.n - 1) {
    }
    double top = 0;
    for (int i = 0; i < team.n; i++) top = team.took[i] > top ? team.took[i] : top;
    return top;
}

static double best_of(int repeats, job_fn *fn, void *arg)
{
    double best = 1e9;
    for (int i = 0; i < repeats; i++) {
        double t = team_run(fn, arg);
        best = t < best ? t : best;
    }
    return best;
}

/* ---- the machine's own figures ---- */

typedef struct read_job {
    const char *p;
    size_t n;
} read_job;

#if defined(__x86_64__)
enum { PEAK_STEPS = 4000000 };

__attribute__((target("avx512f,avx512vnni"))) static void vnni_job(void *arg, int thread, int n)
{
    (void)arg;
    (void)thread;
    (void)n;
    __m512i a = _mm512_set1_epi8(3), c0 = a, c1 = a, c2 = a, c3 = a, c4 = a, c5 = a, c6 = a, c7 = a, c8 = a, c9 = a;
    for (int i = 0; i < PEAK_STEPS; i += 10) {
        c0 = _mm512_dpbusd_epi32(c0, a, a), c1 = _mm512_dpbusd_epi32(c1, a, a), c2 = _mm512_dpbusd_epi32(c2, a, a);
        c3 = _mm512_dpbusd_epi32(c3, a, a), c4 = _mm512_dpbusd_epi32(c4, a, a), c5 = _mm512_dpbusd_epi32(c5, a, a);
        c6 = _mm512_dpbusd_epi32(c6, a, a), c7 = _mm512_dpbusd_epi32(c7, a, a), c8 = _mm512_dpbusd_epi32(c8, a, a);
        c9 = _mm512_dpbusd_epi32(c9, a, a);
        __asm__ volatile("" : "+v"(c0), "+v"(c1), "+v"(c2), "+v"(c3), "+v"(c4));
        __asm__ volatile("" : "+v"(c5), "+v"(c6), "+v"(c7), "+v"(c8), "+v"(c9));
    }
}

typedef struct {
    uint8_t palette, start, zero[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} tile_config;

__attribute__((target("amx-tile,amx-int8"))) static void amx_job(void *arg, int thread, int n)
{
    (void)arg;
    (void)thread;
    (void)n;
    tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) c.rows[i] = 16, c.colsb[i] = 64;
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
    for (int i = 0; i < PEAK_STEPS / 10; i += 4) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 5, 6);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
}

__attribute__((target("avx512f"))) static void read_part(void *arg, int thread, int n)
{
    const read_job *j = arg;
    const size_t part = j->n / (size_t)n / 256 * 256;
    const char *p = j->p + part * (size_t)thread;
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (size_t i = 0; i < part; i += 256) {
        for (size_t l = 0; l < 256; l += 64) _mm_prefetch(p + i + 32768 + l, _MM_HINT_T1); /* as limits.c */
        a = _mm512_xor_si512(a, _mm512_loadu_si512(p + i));
        b = _mm512_xor_si512(b, _mm512_loadu_si512(p + i + 64));
        c = _mm512_xor_si512(c, _mm512_loadu_si512(p + i + 128));
        d = _mm512_xor_si512(d, _mm512_loadu_si512(p + i + 192));
    }
    __m512i s = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
    __asm__ volatile("" ::"v"(s));
}

static void machine(void)
{
    if (lr_cpu_table("avx512"))
        printf("{\"peak\":\"vpdpbusd\",\"threads\":%d,\"gops\":%.0f}\n", team.n,
               128e-9 * PEAK_STEPS * team.n / best_of(20, vnni_job, NULL));
    if (lr_cpu_table("amx"))
        printf("{\"peak\":\"amx int8\",\"threads\":%d,\"gops\":%.0f}\n", team.n,
               32768e-9 * PEAK_STEPS / 10 * team.n / best_of(20, amx_job, NULL));
}
#else
static void machine(void) {}

static void read_part(void *arg, int thread, int n)
{
    (void)arg;
    (void)thread;
    (void)n;
}
#endif

/* ---- the product ---- */

typedef struct gemm_job {
    const lr_cpu_kernels *t;
    lr_gemm_w w;
    lr_qact qa;
    const float *x;
    float *y;
    int m;
} gemm_job;

static void gemm_part(void *arg, int thread, int n)
{
    const gemm_job *j = arg;
    const int strips = (j->w.n + LR_STRIP - 1) / LR_STRIP;
    j->t->gemm(&j->w, &j->qa, j->x, (size_t)j->w.k, j->m, j->y, (size_t)j->w.n, strips * thread / n,
               strips * (thread + 1) / n);
}

typedef struct options {
    const char *isa, *types, *shapes, *rows;
    int threads, repeats;
    int bits; /* of the rows: 8, 11, 14 or 16 (bf16) */
    size_t cold;
} options;

/* Memory in large pages, as the engine has it. */
static void *big_new(size_t n)
{
    n = (n + 8191) & ~(size_t)4095;
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) exit(1);
    madvise(p, n, MADV_HUGEPAGE);
    return p;
}

static void big_free(void *p, size_t n) { munmap(p, (n + 8191) & ~(size_t)4095); }

/* The weights: packed random blocks (all of one pattern: scales of 2^-8), `copies` of them. */
static char *weights_new(int type, int k, int n, size_t copies, lr_gemm_w *w, size_t *bytes)
{
    const size_t row = (size_t)(k / lr_dtype_block(type)) * (size_t)lr_dtype_bytes(type);
    const size_t strips = ((size_t)n + LR_STRIP - 1) / LR_STRIP, strip = lr_pack_strip_bytes(type, k);
    *bytes = strip ? strips * strip : (size_t)n * row;
    char *p = big_new(*bytes * copies);
    memset(p, 0x1C, *bytes * copies); /* a half of 0x1C1C is 0.004 */
    *w = (lr_gemm_w){type, n, k, strip != 0, strip ? strip : row, p, NULL, 0, 0};
    return p;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, ascending);
    return x[n / 2];
}

/* From memory, in turns with a plain read of the same copy: seconds of a product, median of the rounds. */
static double cold_rounds(const options *o, gemm_job *j, char *base, size_t bytes, size_t copies, double *share,
                          double *read_gbs)
{
    enum { MOST = 64 };
    double product[MOST], read[MOST], ratio[MOST], total = 0;
    int n = 0;
    for (; n < 3 || (total < 0.3 * o->repeats && n < MOST); n++) {
        double p = 0, r = 0;
        for (size_t i = 0; i < copies; i++) { /* halves: what one reads is not what the other left in a cache */
            const size_t other = (i + copies / 2) % copies;
            j->w.data = base + i * bytes;
            read_job rj = {base + other * bytes, bytes};
            p += team_run(gemm_part, j);
            r += team_run(read_part, &rj);
        }
        product[n] = p / (double)copies;
        read[n] = r / (double)copies;
        ratio[n] = r / p;
        total += p + r;
    }
    *share = median(ratio, n);
    *read_gbs = 1e-9 * (double)bytes / median(read, n);
    return median(product, n);
}

/* The same weights again and again: the best time. */
static double warm(const options *o, gemm_job *j)
{
    double best = 1e9, total = 0;
    for (int calls = 0; calls < 3 || (total < 0.15 * o->repeats && calls < 100000); calls++) {
        const double s = team_run(gemm_part, j);
        total += s;
        best = s < best ? s : best;
    }
    return best;
}

static void bench(const options *o, const lr_cpu_kernels *t, int type, int k, int n, int m)
{
    gemm_job j = {.t = t, .m = m};
    size_t bytes, one = (size_t)n * (size_t)k;
    const size_t packed = lr_pack_strip_bytes(type, k) * (((size_t)n + LR_STRIP - 1) / LR_STRIP);
    size_t copies = o->cold / (packed ? packed : one);
    if (copies < 1) copies = 1;
    char *base = weights_new(type, k, n, copies, &j.w, &bytes);
    const size_t cells = (size_t)m * (size_t)k;
    const size_t area = cells * 4 + cells * 5 + (size_t)m * (size_t)n * 4 + 4096;
    char *mem = big_new(area);
    float *x = (float *)mem;
    j.qa = (lr_qact){.k = k};
    if (o->bits == 16) {
        j.qa.h = (uint16_t *)(mem + cells * 4);
    } else {
        j.qa.fine = o->bits == 11;
        j.qa.wide = o->bits == 14;
        lr_qact_place(&j.qa, mem + cells * 4, (size_t)m);
    }
    j.y = (float *)(mem + cells * 9);
    j.x = x;
    for (size_t i = 0; i < cells; i++) x[i] = (float)(int)(i * 2654435761u >> 8 & 0xFFFF) / 65536.0f - 0.5f;
    double tq = now();
    t->quantize(x, (size_t)k, m, j.qa, 0, k);
    tq = now() - tq;
    double share = 0, read = 0,
           best = copies > 1 ? cold_rounds(o, &j, base, bytes, copies, &share, &read) : warm(o, &j);
    printf("{\"isa\":\"%s\",\"bits\":%d,\"type\":\"%s\",\"k\":%d,\"n\":%d,\"m\":%d,\"threads\":%d,\"us\":%.1f,\"gops\":"
           "%.0f,"
           "\"gbs\":%.1f,\"read_gbs\":%.1f,\"share\":%.2f,\"quantize_us\":%.1f}\n",
           t->name, o->bits, lr_dtype_name(type), k, n, m, team.n, best * 1e6, 2e-9 * (double)m * (double)one / best,
           1e-9 * (double)bytes / best, read, share, tq * 1e6);
    fflush(stdout);
    big_free(base, bytes * copies);
    big_free(mem, area);
}

static void bench_rows(const options *o, const lr_cpu_kernels *t, int type, int k, int n)
{
    char *rows = lr_strdup(o->rows), *save;
    for (char *r = strtok_r(rows, ",", &save); r; r = strtok_r(NULL, ",", &save)) bench(o, t, type, k, n, atoi(r));
    lr_free(rows);
}

int main(int argc, char **argv)
{
    options o = {.types = "Q4_1,Q8_0,Q5_0,Q4_K,Q6_K",
                 .shapes = "576x1536,1536x576,640x2048,896x4864,4864x896,1536x8960,8960x1536",
                 .rows = "1,2,4,8,16,32,128,512",
                 .threads = 1,
                 .bits = 8,
                 .repeats = 1};
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *v = argv[i + 1];
        switch (argv[i][1]) {
        case 'i':
            o.isa = v;
            break;
        case 't':
            o.threads = atoi(v);
            break;
        case 'q':
            o.types = v;
            break;
        case 's':
            o.shapes = v;
            break;
        case 'm':
            o.rows = v;
            break;
        case 'c':
            o.cold = (size_t)atoi(v) << 20;
            break;
        case 'r':
            o.repeats = atoi(v);
            break;
        case 'b':
            o.bits = atoi(v);
            break;
        default:
            fprintf(stderr, "unknown option %s\n", argv[i]);
            return 2;
        }
    }
    const lr_cpu_kernels *t = lr_cpu_table(o.isa);
    if (!t || o.threads < 1 || o.threads > MAX_THREADS) return fprintf(stderr, "no such table or thread count\n"), 2;
    if (o.bits != 8 && !((o.bits == 11 || o.bits == 14) && t->fine) && !(o.bits == 16 && t->bf16))
        return fprintf(stderr, "the table has no rows of %d bits\n", o.bits), 2;
    team_start(o.threads);
    machine();
    char *types = lr_strdup(o.types), *save;
    for (char *q = strtok_r(types, ",", &save); q; q = strtok_r(NULL, ",", &save)) {
        char *shapes = lr_strdup(o.shapes), *save2;
        for (char *s = strtok_r(shapes, ",", &save2); s; s = strtok_r(NULL, ",", &save2)) {
            int k = 0, n = 0, type = lr_dtype_parse(q);
            if (type < 0 || sscanf(s, "%dx%d", &k, &n) != 2) return fprintf(stderr, "bad type or shape\n"), 2;
            if (k % lr_dtype_block(type) || (o.bits == 14 && lr_dtype_block(type) != LR_WIDE))
                continue; /* no such shape */
            bench_rows(&o, t, type, k, n);
        }
        lr_free(shapes);
    }
    lr_free(types);
    return 0;
}
