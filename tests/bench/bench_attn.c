/* bench_attn.c - speed of attention: prefill in GFLOP/s and as a share of this core's measured multiply-add peak,
 * decode in GB/s of keys and values read; then the vocabulary and row kernels. One thread, one JSON line a figure.
 *
 *   bench_attn [scalar|avx2|avx512|amx]       (default: the best this machine has)
 *
 * The peak is that of the same table's vector width. A prefill counts 4 * D flops for each (row, position, head) that
 * is seen. Decode runs over many sequences in turn (192 MB, in huge pages, blocks scattered), so that keys and values
 * come from memory, not from cache; the median sequence counts.
 */
#include "backend/backend.h"
#include "base/mem.h"
#include "cpu/attn_int.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static double now(void) /* this thread's processor time: a busy machine distorts it less */
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

#ifdef __x86_64__
/* Ten chains of fused multiply-adds in registers 0 .. 9, of R = ymm or zmm. */
#define FMA(R, i) "vfmadd213ps %%" R "11, %%" R "10, %%" R #i "\n"
#define PEAK(name, isa, R, lanes)                                                                                      \
    __attribute__((target(isa))) static double name(void)                                                              \
    {                                                                                                                  \
        double best = 0;                                                                                               \
        for (int rep = 0; rep < 20; rep++) {                                                                           \
            __asm__ volatile("vzeroall" ::: "xmm10", "xmm11");                                                         \
            double t = now();                                                                                          \
            for (int n = 0; n < 200000; n++) {                                                                         \
                __asm__ volatile(FMA(R, 0) FMA(R, 1) FMA(R, 2) FMA(R, 3) FMA(R, 4) FMA(R, 5) FMA(R, 6) FMA(R, 7)       \
                                     FMA(R, 8) FMA(R, 9)                                                               \
                                 :                                                                                     \
                                 :                                                                                     \
                                 : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9");    \
            }                                                                                                          \
            double f = 200000.0 * 10 * (lanes)*2 / (now() - t) * 1e-9;                                                 \
            if (f > best) best = f;                                                                                    \
        }                                                                                                              \
        return best;                                                                                                   \
    }
PEAK(peak_avx512, "avx512f", "zmm", 16)
PEAK(peak_avx2, "avx2,fma", "ymm", 8)
#endif

static const lr_cpu_kernels *kern;
static double peak;

typedef struct pool {
    int n, heads, dim, type, bs, blocks;
    char *k, *v;
    size_t stride;
    int32_t *table;
} pool;

/* Blocks lie anywhere in the pool: with small pages much of decode would be spent on address translation. */
static void huge_pages(char *p, size_t n)
{
    uintptr_t a = ((uintptr_t)p + 4095) & ~(uintptr_t)4095, e = ((uintptr_t)p + n) & ~(uintptr_t)4095;
    if (e > a) madvise((void *)a, e - a, MADV_HUGEPAGE);
}

static pool pool_new(int n, int heads, int dim, int type, int bs)
{
    pool p = {.n = n, .heads = heads, .dim = dim, .type = type, .bs = bs, .blocks = (n + bs - 1) / bs};
    p.stride = (lr_cpu_kv_bytes(type, true, heads, dim, bs) + 63) / 64 * 64;
    p.k = lr_alloc_aligned(p.stride * p.blocks);
    p.v = lr_alloc_aligned(p.stride * p.blocks);
    huge_pages(p.k, p.stride * p.blocks);
    huge_pages(p.v, p.stride * p.blocks);
    p.table = malloc(sizeof(int32_t) * p.blocks);
    float *x = malloc(sizeof(float) * heads * dim);
    for (int i = 0; i < p.blocks; i++) p.table[i] = (int)((long)i * 7919 % p.blocks);
    for (int i = 0; i < n; i++) {
        for (int d = 0; d < heads * dim; d++) x[d] = (float)((i * 31 + d * 17) % 101) / 50 - 1;
        size_t at = (size_t)p.table[i / bs] * p.stride;
        kern->kv_put(x, x, NULL, heads, dim, type, type, bs, i % bs, p.k + at, p.v + at);
    }
    free(x);
    return p;
}

static void pool_free(pool *p)
{
    lr_free_aligned(p->k);
    lr_free_aligned(p->v);
    free(p->table);
}

static lr_attn_task task(const pool *p, int group, const float *q, float *out)
{
    size_t w = (size_t)p->heads * group * p->dim;
    return (lr_attn_task){.q = q,
                          .q_stride = w,
                          .out = out,
                          .out_stride = w,
                          .n_group = group,
                          .head_dim = p->dim,
                          .n_kv_heads = p->heads,
                          .scale = 0.1f,
                          .k_type = p->type,
                          .v_type = p->type,
                          .block_size = p->bs,
                          .table = p->table,
                          .k = p->k,
                          .v = p->v,
                          .block_stride = p->stride};
}

static void prefill(int heads, int group, int dim, int rows, int type, int bs, int window)
{
    pool p = pool_new(rows, heads, dim, type, bs);
    size_t n = (size_t)rows * heads * group * dim;
    float *q = lr_alloc_aligned(n * 4), *out = lr_alloc_aligned(n * 4);
    for (size_t i = 0; i < n; i++) q[i] = (float)(i * 37 % 97) / 48 - 1;
    void *scratch = lr_alloc_aligned(lr_cpu_attn_scratch(group, dim, LR_ATTN_ROWS));
    double best = 1e9, pairs = 0;
    for (int r = 0; r < rows; r++) pairs += window && r >= window ? window : r + 1;
    for (int rep = 0; rep < 12; rep++) {
        double t0 = now();
        for (int h = 0; h < heads; h++) {
            for (int r = 0; r < rows; r += LR_ATTN_ROWS) {
                lr_attn_task t =
                    task(&p, group, q + (size_t)r * heads * group * dim, out + (size_t)r * heads * group * dim);
                t.n_rows = rows - r < LR_ATTN_ROWS ? rows - r : LR_ATTN_ROWS;
                t.pos = r;
                t.kv_head = h;
                t.window = window;
                kern->attn(&t, scratch);
            }
        }
        double s = now() - t0;
        if (s < best) best = s;
    }
    double gf = pairs * heads * group * dim * 4 / best * 1e-9;
    printf("{\"bench\":\"prefill\",\"isa\":\"%s\",\"heads\":%d,\"kv_heads\":%d,\"head_dim\":%d,\"rows\":%d,\"type\":\"%"
           "s\","
           "\"block\":%d,\"window\":%d,\"ms\":%.3f,\"gflops\":%.1f,\"peak_share\":%.3f}\n",
           kern->name, heads * group, heads, dim, rows, lr_dtype_name(type), bs, window, best * 1e3, gf,
           peak ? gf / peak : 0);
    lr_free_aligned(q);
    lr_free_aligned(out);
    lr_free_aligned(scratch);
    pool_free(&p);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void decode(int heads, int group, int dim, int ctx, int type, int bs)
{
    size_t row = (lr_cpu_kv_bytes(type, true, heads, dim, bs) + lr_cpu_kv_bytes(type, false, heads, dim, bs)) / bs,
           total = (size_t)192 << 20;
    int seqs = (int)(total / (row * ctx)) + 1;
    ctx = ctx / bs * bs;
    pool p = pool_new(seqs * ctx, heads, dim, type, bs);
    size_t n = (size_t)heads * group * dim;
    float *q = lr_alloc_aligned(n * 4), *out = lr_alloc_aligned(n * 4);
    for (size_t i = 0; i < n; i++) q[i] = (float)(i * 37 % 97) / 48 - 1;
    void *scratch = lr_alloc_aligned(lr_cpu_attn_scratch(group, dim, LR_ATTN_ROWS));
    double *took = malloc(sizeof(double) * (size_t)seqs);
    for (int s = 0; s < seqs; s++) {
        double t0 = now();
        for (int h = 0; h < heads; h++) {
            lr_attn_task t = task(&p, group, q, out);
            t.n_rows = 1;
            t.pos = ctx - 1;
            t.kv_head = h;
            t.table = p.table + s * (ctx / bs);
            kern->attn(&t, scratch);
        }
        took[s] = now() - t0;
    }
    qsort(took, (size_t)seqs, sizeof *took, ascending);
    double mid = took[seqs / 2];
    printf("{\"bench\":\"decode\",\"isa\":\"%s\",\"heads\":%d,\"kv_heads\":%d,\"head_dim\":%d,\"context\":%d,\"type\":"
           "\"%s\","
           "\"block\":%d,\"us\":%.2f,\"gbs\":%.2f}\n",
           kern->name, heads * group, heads, dim, ctx, lr_dtype_name(type), bs, mid * 1e6,
           (double)row * ctx / mid * 1e-9);
    free(took);
    lr_free_aligned(q);
    lr_free_aligned(out);
    lr_free_aligned(scratch);
    pool_free(&p);
}

/* Rows of n sequences that differ in their last 64 positions only, one by one and as gangs of at most `rows`. Layers
 * take turns, so that the common part is not in the second-level cache before the first row. */
static void forks(int heads, int group, int dim, int ctx, int n, int rows, int type)
{
    enum { LAYERS = 16, OWN = 4, MOST = 32 };
    int bs = 16, blocks = ctx / bs, common = ctx - OWN * bs, layer_blocks = blocks + MOST * OWN;
    pool p = pool_new(LAYERS * layer_blocks * bs, heads, dim, type, bs);
    size_t width = (size_t)heads * group * dim;
    float *q = lr_alloc_aligned(MOST * width * 4), *out = lr_alloc_aligned(MOST * width * 4);
    int32_t *tables = malloc(sizeof(int32_t) * MOST * (size_t)blocks);
    void *scratch = lr_alloc_aligned(lr_cpu_attn_scratch(group, dim, LR_ATTN_ROWS));
    double best[2] = {1e9, 1e9};
    for (size_t i = 0; i < MOST * width; i++) q[i] = (float)(i * 37 % 97) / 48 - 1;
    for (int rep = 0; rep < 6 * LAYERS; rep++) {
        for (int i = 0; i < n; i++)
            for (int b = 0; b < blocks; b++)
                tables[i * blocks + b] = p.table[rep % LAYERS * layer_blocks + (b < blocks - OWN ? b : b + i * OWN)];
        double t0 = now();
        for (int h = 0; h < heads; h++) {
            for (int from = 0; from < n; from += rows) {
                lr_attn_task t[LR_ATTN_ROWS];
                lr_attn_gang g = {.tasks = t, .n = n - from < rows ? n - from : rows, .to = common & -LR_ATTN_STEP};
                for (int i = 0; i < g.n; i++) {
                    t[i] = task(&p, group, q + (size_t)(from + i) * width, out + (size_t)(from + i) * width);
                    t[i].n_rows = 1;
                    t[i].pos = ctx - 1;
                    t[i].kv_head = h;
                    t[i].table = tables + (from + i) * blocks;
                }
                for (int i = 0; i < g.n && rep % 2; i++) kern->attn(&t[i], scratch);
                if (rep % 2 == 0) kern->attn_gang(&g, scratch);
            }
        }
        double s = now() - t0;
        if (s < best[rep % 2]) best[rep % 2] = s;
    }
    printf("{\"bench\":\"forks\",\"isa\":\"%s\",\"heads\":%d,\"kv_heads\":%d,\"head_dim\":%d,\"type\":\"%s\","
           "\"context\":%d,"
           "\"forks\":%d,\"gang\":%d,\"us\":%.1f,\"alone_us\":%.1f,\"ratio\":%.2f}\n",
           kern->name, heads * group, heads, dim, lr_dtype_name(type), ctx, n, rows, best[0] * 1e6, best[1] * 1e6,
           best[1] / best[0]);
    free(tables);
    lr_free_aligned(q);
    lr_free_aligned(out);
    lr_free_aligned(scratch);
    pool_free(&p);
}

static void memory_speed(void)
{
    size_t n = (size_t)96 << 20;
    long *x = lr_alloc_aligned(n), sum = 0;
    memset(x, 1, n);
    double best = 1e9;
    for (int rep = 0; rep < 5; rep++) {
        double t0 = now();
        for (size_t i = 0; i < n / sizeof *x; i++) sum += x[i];
        double s = now() - t0;
        if (s < best) best = s;
    }
    __asm__ volatile("" : : "r"(sum));
    printf("{\"bench\":\"memory_read\",\"gbs\":%.2f}\n", (double)n / best * 1e-9);
    lr_free_aligned(x);
}

#define TIME(what, n, reps, call)                                                                                      \
    do {                                                                                                               \
        double best_ = 1e9;                                                                                            \
        for (int rep_ = 0; rep_ < 7; rep_++) {                                                                         \
            double t_ = now();                                                                                         \
            for (int r_ = 0; r_ < (reps); r_++) call;                                                                  \
            t_ = (now() - t_) / (reps);                                                                                \
            if (t_ < best_) best_ = t_;                                                                                \
        }                                                                                                              \
        printf("{\"bench\":\"%s\",\"isa\":\"%s\",\"n\":%d,\"us\":%.3f}\n", what, kern->name, n, best_ * 1e6);          \
    } while (0)

static void vocab_and_rows(void)
{
    enum { V = 262144, D = 4096 };
    static float x[V], y[V], vals[LR_TOPK_MAX];
    static int32_t ids[V];
    static uint32_t bits[V / 32];
    memset(bits, 0xff, sizeof bits);
    uint32_t u = 1;
    for (int i = 0; i < V; i++) {
        u = u * 1664525u + 1013904223u;
        x[i] = (float)(u >> 8) / 1e6f - 8;
    }
    volatile float keep = 0;
    TIME("argmax", V, 20, keep = (float)kern->argmax(x, V));
    TIME("mass", V, 20, keep = (float)kern->mass(x, V, kern->max(x, V)));
    TIME("topk_40", V, 20, kern->topk(x, V, 40, ids, vals));
    TIME("topk_1024", V, 20, kern->topk(x, V, 1024, ids, vals));
    TIME("count_above", V, 20, keep = (float)kern->count_above(x, V, 4));
    TIME("compact_above", V, 20, kern->compact_above(x, V, -2, ids, V));
    TIME("mask", V, 20, kern->mask(y, bits, V));
    TIME("rmsnorm", D, 2000, kern->rmsnorm(x, x + D, y, D, 1e-5f));
    TIME("layernorm", D, 2000, kern->layernorm(x, x + D, x, y, D, 1e-5f));
    TIME("add", D, 2000, kern->add(x, x + D, y, D));
    TIME("swiglu", D, 2000, kern->glu(LR_ACT_SILU, x, x + D, y, D));
    TIME("geglu_tanh", D, 2000, kern->glu(LR_ACT_GELU_TANH, x, x + D, y, D));
    TIME("gelu_erf", D, 2000, kern->act(LR_ACT_GELU_ERF, x, y, D));
    TIME("softcap", D, 2000, kern->softcap(x, 50, y, D));
    TIME("rope", D, 2000, kern->rope(y, D / 64, 64, 64, false, x));
    TIME("kv_put_f16", 192 * 2, 2000, kern->kv_put(x, x, NULL, 3, 64, LR_F16, LR_F16, 16, 3, (char *)y, (char *)ids));
    (void)keep;
}

int main(int argc, char **argv)
{
    static lr_cpu_kernels all[4] = {{.name = "scalar"}, {.name = "avx2"}, {.name = "avx512"}, {.name = "amx"}};
    int pick = 0;
    for (int i = 0; i < 4; i++)
        lr_rows_fill_scalar(&all[i]), lr_attn_fill_scalar(&all[i]), lr_vocab_fill_scalar(&all[i]);
#ifdef __x86_64__
    lr_rows_fill_avx2(&all[1]), lr_attn_fill_avx2(&all[1]), lr_vocab_fill_avx2(&all[1]);
    lr_rows_fill_avx512(&all[2]), lr_attn_fill_avx512(&all[2]), lr_vocab_fill_avx512(&all[2]);
    const bool amx = lr_cpu_table("amx") != NULL; /* which asks for the tiles as well */
    lr_rows_fill_avx512(&all[3]), lr_attn_fill_avx512(&all[3]), lr_vocab_fill_avx512(&all[3]);
    lr_attn_fill_amx(&all[3]);
    pick = amx ? 3 : __builtin_cpu_supports("avx512bw") ? 2 : __builtin_cpu_supports("fma") ? 1 : 0;
#endif
    for (int i = 0; i <= pick; i++) {
        if (argc > 1 && strcmp(argv[1], all[i].name) == 0) pick = i;
    }
    kern = &all[pick];
#ifdef __x86_64__
    peak = pick >= 2 ? peak_avx512() : pick == 1 ? peak_avx2() : 0;
#endif
    printf("{\"bench\":\"fma_peak\",\"isa\":\"%s\",\"gflops\":%.1f}\n", kern->name, peak);
    memory_speed();
    static const int shapes[][3] = {{3, 3, 64}, {2, 7, 64}, {2, 6, 128}, {1, 4, 256}}; /* KV heads, group, head_dim */
    for (int i = 0; i < 4; i++) prefill(shapes[i][0], shapes[i][1], shapes[i][2], 512, LR_F16, 16, 0);
    prefill(3, 3, 64, 2048, LR_F16, 16, 0);
    prefill(1, 4, 256, 2048, LR_F16, 16, 512);
    prefill(3, 3, 64, 512, LR_F32, 16, 0);
    for (int i = 0; i < 4; i++) prefill(shapes[i][0], shapes[i][1], shapes[i][2], 512, LR_BF16, 16, 0);
    prefill(3, 3, 64, 512, LR_Q8_0, 16, 0);
    prefill(3, 3, 64, 512, LR_F16, 1, 0);
    for (int i = 0; i < 3; i++) {
        static const int counts[][2] = {{4, 4}, {8, 4}, {8, 8}, {16, 8}, {16, 16}, {32, 16}};
        for (int c = 0; c < 6; c++) {
            forks(shapes[i][0], shapes[i][1], shapes[i][2], 2048, counts[c][0], counts[c][1], LR_F16);
            forks(shapes[i][0], shapes[i][1], shapes[i][2], 2048, counts[c][0], counts[c][1], LR_BF16);
        }
    }
    static const int contexts[] = {128, 1024, 8192};
    for (int i = 0; i < 4; i++) {
        for (int c = 0; c < 3; c++) decode(shapes[i][0], shapes[i][1], shapes[i][2], contexts[c], LR_F16, 16);
    }
    for (int i = 0; i < 4; i++) decode(shapes[i][0], shapes[i][1], shapes[i][2], 1024, LR_BF16, 16);
    decode(3, 3, 64, 1024, LR_F32, 16);
    decode(3, 3, 64, 1024, LR_Q8_0, 16);
    decode(3, 3, 64, 1024, LR_F16, 32);
    decode(3, 3, 64, 1024, LR_F16, 1);
    decode(8, 1, 64, 1024, LR_F16, 16);
    vocab_and_rows();
    return 0;
}
