/* test_attn.c - attention and KV writing of every instruction set of this machine: against a float64 reference over a
 * sweep of shapes and types, and bit for bit against themselves over tiles, block sizes, chunks and pieces.
 */
#include "base/mem.h"
#include "cpu/attn_int.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static lr_cpu_kernels tables[4];
static int n_tables;

static uint32_t seed = 1;

static float rnd(void) /* -1 .. 1 */
{
    seed = seed * 1664525u + 1013904223u;
    return (float)(int32_t)seed / 2147483648.0f;
}

/* A sequence of n positions: its rows in float, and paged in blocks that lie in a scrambled order. */
typedef struct seq {
    int n, heads, dim, bs, type, blocks;
    float *key, *val;    /* (n, heads, dim) */
    const float *center; /* (heads, dim) or NULL */
    int other;           /* of values, plus 1; 0: as keys */
    char *k, *v;
    size_t stride;
    int32_t *table;
} seq;

static int value_type(const seq *s) { return s->other ? s->other - 1 : s->type; }

static void seq_page(seq *s, const lr_cpu_kernels *kern, int type, int bs)
{
    s->type = type;
    s->bs = bs;
    s->blocks = (s->n + bs - 1) / bs;
    size_t keys = lr_cpu_kv_bytes(type, true, s->heads, s->dim, bs);
    size_t values = lr_cpu_kv_bytes(value_type(s), false, s->heads, s->dim, bs);
    s->stride = keys > values ? keys : values;
    size_t bytes = s->stride * (size_t)s->blocks;
    s->k = malloc(bytes); /* exactly as much as the layout says: the sanitizer sees a read past it */
    s->v = malloc(bytes);
    memset(s->k, 0xff, bytes); /* slots that were never written hold NaN */
    memset(s->v, 0xff, bytes);
    s->table = malloc(sizeof(int32_t) * (size_t)s->blocks);
    for (int i = 0; i < s->blocks; i++) s->table[i] = (i & 1) ? s->blocks - 1 - i / 2 : i / 2;
    for (int p = 0; p < s->n; p++) {
        size_t at = (size_t)p * s->heads * s->dim, b = (size_t)s->table[p / bs] * s->stride;
        kern->kv_put(s->key + at, s->val + at, s->center, s->heads, s->dim, type, value_type(s), bs, p % bs, s->k + b,
                     s->v + b);
    }
}

static void seq_unpage(seq *s)
{
    free(s->k);
    free(s->v);
    free(s->table);
}

static seq seq_new(int n, int heads, int dim)
{
    seq s = {.n = n, .heads = heads, .dim = dim};
    size_t c = (size_t)n * heads * dim;
    s.key = malloc(c * 4);
    s.val = malloc(c * 4);
    for (size_t i = 0; i < c; i++) s.key[i] = rnd() * 2, s.val[i] = rnd();
    return s;
}

static void seq_free(seq *s)
{
    free(s->key);
    free(s->val);
}

typedef struct query {
    int rows, pos, group, window;
    float softcap;
    const float *sinks;
} query;

static lr_attn_task task_of(const seq *s, const query *c, const float *q, float *out, int kv_head)
{
    size_t width = (size_t)s->heads * c->group * s->dim;
    return (lr_attn_task){.q = q,
                          .q_stride = width,
                          .out = out,
                          .out_stride = width,
                          .n_rows = c->rows,
                          .pos = c->pos,
                          .kv_head = kv_head,
                          .n_group = c->group,
                          .head_dim = s->dim,
                          .n_kv_heads = s->heads,
                          .window = c->window,
                          .scale = 1 / sqrtf((float)s->dim),
                          .softcap = c->softcap,
                          .sinks = c->sinks,
                          .k_type = s->type,
                          .v_type = value_type(s),
                          .block_size = s->bs,
                          .table = s->table,
                          .k = s->k,
                          .v = s->v,
                          .block_stride = s->stride};
}

/* All heads of the rows, in tiles of `tile` rows; pieces: by attn_part and attn_combine. */
static void run(const lr_cpu_kernels *kern, const seq *s, const query *c, const float *q, float *out, int tile,
                bool pieces)
{
    void *scratch = lr_alloc_aligned(lr_cpu_attn_scratch(c->group, s->dim, tile));
    for (int r = 0; r < c->rows; r += tile) {
        for (int h = 0; h < s->heads; h++) {
            lr_attn_task t = task_of(s, c, q, out, h);
            t.q += r * t.q_stride;
            t.out += r * t.out_stride;
            t.pos += r;
            t.n_rows = c->rows - r < tile ? c->rows - r : tile;
            if (!pieces) {
                kern->attn(&t, scratch);
                continue;
            }
            int first, last;
            lr_attn_chunks(&t, &first, &last);
            size_t part = lr_cpu_attn_part_floats(&t);
            float *parts = malloc(part * sizeof(float) * (size_t)(last - first + 2));
            for (int i = last; i >= first; i--) kern->attn_part(&t, i, parts + (i - first) * part, scratch);
            kern->attn_combine(&t, parts, last - first + 1);
            free(parts);
        }
    }
    lr_free_aligned(scratch);
}

/* x (n, a power of two) times the Hadamard matrix over the root of n, by its definition. */
static void hadamard(const double *x, int n, double *out)
{
    for (int i = 0; i < n; i++) {
        out[i] = 0;
        for (int j = 0; j < n; j++) out[i] += __builtin_popcount(i & j) % 2 ? -x[j] : x[j];
        out[i] /= sqrt(n);
    }
}

/* The same for each block of a row whose length is a multiple of it. */
static void hadamard_row(const double *x, int dim, double *out)
{
    int block = dim & -dim;
    for (int d = 0; d < dim; d += block) hadamard(x + d, block, out + d);
}

/* The same in float, in the order of sums that the kernels promise, so that rounding to 8 bits ends alike. */
static void hadamard_float(float *x, int dim)
{
    int block = dim & -dim;
    for (int h = 1; h < block; h *= 2) {
        for (int i = 0; i < dim; i++) {
            if (i & h) continue;
            float a = x[i], b = x[i + h];
            x[i] = a + b;
            x[i + h] = a - b;
        }
    }
    for (int i = 0; i < dim; i++) x[i] *= 1 / sqrtf((float)block);
}

/* One group as the store holds it. */
static void round_group(const float *x, int n, int type, bool keys, double *out)
{
    int big = 0, low = type == LR_Q8_0 ? -127 : keys ? -32 : -8, high = type == LR_Q8_0 ? 127 : -low - 1;
    for (int d = 1; d < n; d++)
        if (fabsf(x[d]) > fabsf(x[big]) || (x[d] > 0 && x[d] == -x[big])) big = d;
    float f = lr_f16_to_f32(lr_f32_to_f16(type == LR_Q8_0 ? fabsf(x[big]) / 127 : x[big] / low));
    for (int d = 0; d < n; d++) out[d] = f * fmaxf(low, fminf(high, rintf(x[d] / f)));
}

/* What the store holds of a row of a head. */
static void round_row(const float *x, int dim, int type, bool keys, double *out)
{
    if (!lr_kv_turned(type)) {
        for (int d = 0; d < dim; d++) {
            out[d] = type == LR_F32   ? x[d]
                     : type == LR_F16 ? lr_f16_to_f32(lr_f32_to_f16(x[d]))
                                      : lr_bf16_to_f32(lr_f32_to_bf16(x[d]));
        }
        return;
    }
    float t[256];
    double stored[256];
    memcpy(t, x, (size_t)dim * sizeof(float));
    hadamard_float(t, dim);
    for (int g = 0; g < dim; g += 32) round_group(t + g, dim - g < 32 ? dim - g : 32, type, keys, stored + g);
    hadamard_row(stored, dim, out);
}

/* The definition, in double, for one row and head. */
static void reference(const seq *s, const query *c, const float *q, int r, int h, double *out)
{
    int p = c->pos + r, lo = c->window && p >= c->window ? p - c->window + 1 : 0, kvh = h / c->group, dim = s->dim;
    double *w = malloc(sizeof(double) * (size_t)(p + 2)), *row = malloc(sizeof(double) * (size_t)dim);
    double top = c->sinks ? c->sinks[h] : -INFINITY, sum = 0;
    const float *qr = q + ((size_t)r * s->heads * c->group + h) * dim;
    for (int j = lo; j <= p; j++) {
        double x = 0;
        round_row(s->key + ((size_t)j * s->heads + kvh) * dim, dim, s->type, true, row);
        for (int d = 0; d < dim; d++) x += qr[d] * row[d];
        x /= sqrt(dim);
        if (c->softcap > 0) x = c->softcap * tanh(x / c->softcap);
        w[j] = x;
        top = fmax(top, x);
    }
    for (int d = 0; d < dim; d++) out[d] = 0;
    for (int j = lo; j <= p; j++) sum += w[j] = exp(w[j] - top);
    if (c->sinks) sum += exp(c->sinks[h] - top);
    for (int j = lo; j <= p; j++) {
        round_row(s->val + ((size_t)j * s->heads + kvh) * dim, dim, value_type(s), false, row);
        for (int d = 0; d < dim; d++) out[d] += w[j] / sum * row[d];
    }
    free(w);
    free(row);
}

static float *queries(const seq *s, const query *c)
{
    size_t n = (size_t)c->rows * s->heads * c->group * s->dim;
    float *q = malloc(n * sizeof(float));
    for (size_t i = 0; i < n; i++) q[i] = rnd() * 2;
    return q;
}

/* Runs the case on all tables and holds it against the reference; row tile 5, so that several tiles and a rest occur.
 */
static void check_case(seq *s, const query *c, int type, int bs)
{
    size_t n = (size_t)c->rows * s->heads * c->group * s->dim;
    float *q = queries(s, c), *out = malloc(n * sizeof(float));
    double *want = malloc(n * sizeof(double));
    for (int i = 0; i < n_tables; i++) {
        seq_page(s, &tables[i], type, bs);
        for (int r = 0; i == 0 && r < c->rows; r++) {
            for (int h = 0; h < s->heads * c->group; h++) {
                reference(s, c, q, r, h, want + ((size_t)r * s->heads * c->group + h) * s->dim);
            }
        }
        memset(out, 0xff, n * sizeof(float));
        run(&tables[i], s, c, q, out, 5, false);
        double err = 0, norm = 0;
        for (size_t j = 0; j < n; j++) err += (out[j] - want[j]) * (out[j] - want[j]), norm += want[j] * want[j];
        /* tiles: queries and weights in two planes of bfloat16, 2^-17 of a number is lost */
        if (!(err <= (strcmp(tables[i].name, "amx") ? 1e-11 : 3e-10) * norm)) {
            fail_msg("%s type %s/%s bs %d dim %d heads %d group %d rows %d pos %d window %d cap %g sinks %d: nmse %g",
                     tables[i].name, lr_dtype_name(type), lr_dtype_name(value_type(s)), bs, s->dim, s->heads, c->group,
                     c->rows, c->pos, c->window, (double)c->softcap, c->sinks != NULL, err / norm);
        }
        seq_unpage(s);
    }
    free(q);
    free(out);
    free(want);
}

enum { TYPES = 5 };
static const int types[TYPES] = {LR_F32, LR_F16, LR_BF16, LR_Q8_0, LR_Q4_0};
static const int dims[] = {32, 64, 80, 96, 128, 256, 40, 24};
static const int sizes[] = {16, 32, 1, 2, 3, 7, 48, 256};

/* Q4_0 takes whole groups only. */
static int type_at(int i, int dim)
{
    int type = types[i % TYPES];
    return type == LR_Q4_0 && dim % 32 ? LR_Q8_0 : type;
}

static void test_shapes(void **state)
{
    for (int d = 0; d < 8; d++) {
        for (int g = 1; g <= 8; g++) {
            seq s = seq_new(90, 1 + (d + g) % 3, dims[d]);
            query c = {.rows = 1 + (g * 5 + d) % 16, .group = g};
            c.pos = (g * 13 + d * 7) % (s.n - c.rows);
            check_case(&s, &c, type_at(d + g, dims[d]), sizes[(d * 3 + g) % 8]);
            seq_free(&s);
        }
    }
    seq s = seq_new(70, 8, 64);
    query c = {.rows = 3, .group = 1, .pos = 66};
    check_case(&s, &c, LR_F16, 16);
    seq_free(&s);
}

static void test_two_types(void **state)
{
    seq s = seq_new(90, 2, 64);
    for (int i = 0; i < TYPES * TYPES; i++) {
        query c = {.rows = i % 3 ? 16 : 1, .group = 1 + i % 4, .pos = 70};
        s.other = types[i / TYPES] + 1;
        if (types[i % TYPES] != types[i / TYPES]) check_case(&s, &c, types[i % TYPES], i % 2 ? 16 : 3);
    }
    seq_free(&s);
}

static void test_positions(void **state)
{
    seq s = seq_new(200, 1, 32);
    for (int p = 0; p < 200; p++) {
        query c = {.rows = 1, .group = 2, .pos = p};
        check_case(&s, &c, types[p % TYPES], sizes[p / 4 % 8]);
    }
    seq_free(&s);
}

static void test_chunk_limits(void **state)
{
    static const int at[] = {1020, 1022, 1023, 1024, 1025, 2040, 2047, 2048};
    seq s = seq_new(2070, 1, 32);
    for (int i = 0; i < 8; i++) {
        query c = {.rows = 1 + i * 2, .group = 1, .pos = at[i], .window = i == 5 ? 1010 : 0};
        check_case(&s, &c, types[i % TYPES], i % 2 ? 16 : 48);
    }
    seq_free(&s);
}

static void test_windows(void **state)
{
    seq s = seq_new(230, 1, 32);
    static const int windows[] = {1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129};
    for (int i = 0; i < 12; i++) {
        int w = windows[i];
        for (int e = -1; e <= 1; e++) { /* the last row's position: W-1, W, W+1, and farther */
            query c = {.rows = 1, .group = 2, .pos = w + e, .window = w};
            if (c.pos >= 0) check_case(&s, &c, types[i % TYPES], sizes[(i + e + 1) % 8]);
        }
        query c = {.rows = 16, .group = 3, .pos = 200 - i * 3, .window = w};
        check_case(&s, &c, types[i % TYPES], sizes[i % 8]);
    }
    seq_free(&s);
}

static void test_softcap_sinks(void **state)
{
    float sinks[8] = {0.5f, -3, 2, 30, -1e4f, 0, 1, 4};
    seq s = seq_new(150, 2, 64);
    for (int i = 0; i < 8; i++) {
        query c = {
            .rows = 7, .group = 4, .pos = 10 + i * 17, .softcap = i % 2 ? 2.0f : 0, .sinks = i % 3 ? sinks : NULL};
        check_case(&s, &c, types[i % TYPES], 16);
    }
    seq_free(&s);
}

/* Mean square error of the case's output in `type` against float64 on the unrounded rows, over that of the values. */
static double loss(seq *s, const query *c, const float *q, const lr_cpu_kernels *kern, int type)
{
    size_t n = (size_t)c->rows * s->heads * c->group * s->dim, width = (size_t)s->heads * c->group;
    float *out = malloc(n * sizeof(float));
    double *want = malloc(n * sizeof(double)), err = 0, norm = 0;
    s->type = LR_F32;
    for (size_t i = 0; i < (size_t)c->rows * width; i++)
        reference(s, c, q, (int)(i / width), (int)(i % width), want + i * s->dim);
    seq_page(s, kern, type, 16);
    run(kern, s, c, q, out, 16, false);
    seq_unpage(s);
    for (size_t i = 0; i < n; i++) err += (out[i] - want[i]) * (out[i] - want[i]), norm += want[i] * want[i];
    free(out);
    free(want);
    return err / norm;
}

/* Channels that are far larger than the others, in every key (a bias of the projection makes such): 8 bits must still
 * tell the others apart; 4 bits, and 8 bits to a finer degree, if they are told how large. */
static void test_outlier_channels(void **state)
{
    for (int d = 0; d < 4; d++) {
        int dim = dims[(int[]){0, 1, 4, 5}[d]];
        float center[256] = {0};
        seq s = seq_new(200, 1, dim);
        center[3] = 150, center[dim / 2 + 5] = -90;
        for (int p = 0; p < s.n; p++)
            for (int j = 0; j < dim; j++) s.key[p * dim + j] += center[j];
        query c = {.rows = 16, .group = 2, .pos = 184};
        float *q = queries(&s, &c);
        for (int i = 0; i < n_tables; i++) {
            static const struct {
                int type;
                bool told;
                double most;
            } cases[] = {{LR_Q8_0, false, 0.02}, {LR_Q8_0, true, 1e-4}, {LR_Q4_0, true, 0.03}};
            for (int k = 0; k < 3; k++) {
                s.center = cases[k].told ? center : NULL;
                double e = loss(&s, &c, q, &tables[i], cases[k].type);
                if (!(e <= cases[k].most))
                    fail_msg("%s: dim %d: case %d: normalised error %g", tables[i].name, dim, k, e);
            }
        }
        free(q);
        seq_free(&s);
    }
}

/* ---- the same bits, whatever the company ---- */

static void same(const float *a, const float *b, size_t n, const char *what, const char *table)
{
    for (size_t i = 0; i < n; i++) {
        if (memcmp(a + i, b + i, 4))
            fail_msg("%s: %s differs at %zu: %.9g %.9g", table, what, i, (double)a[i], (double)b[i]);
    }
}

static void check_same(seq *s, const query *c, int type)
{
    size_t n = (size_t)c->rows * s->heads * c->group * s->dim;
    float *q = queries(s, c), *one = malloc(n * sizeof(float)), *out = malloc(n * sizeof(float));
    for (int i = 0; i < n_tables; i++) {
        seq_page(s, &tables[i], type, 16);
        run(&tables[i], s, c, q, one, 1, false);
        static const int tiles[] = {16, 2, 3, 5, 8, 13};
        for (int t = 0; t < 6; t++) {
            run(&tables[i], s, c, q, out, tiles[t], t % 2);
            same(one, out, n, "row tile", tables[i].name);
        }
        run(&tables[i], s, c, q, out, 1, true);
        same(one, out, n, "pieces", tables[i].name);
        seq_unpage(s);
        for (int b = 1; b < 8; b++) {
            seq_page(s, &tables[i], type, sizes[b]);
            run(&tables[i], s, c, q, out, b % 2 ? 16 : 1, b % 3 == 0);
            same(one, out, n, "block size", tables[i].name);
            seq_unpage(s);
        }
    }
    free(q);
    free(one);
    free(out);
}

static void test_same_bits(void **state)
{
    float sinks[16];
    for (int i = 0; i < 16; i++) sinks[i] = rnd() * 3;
    seq s = seq_new(160, 2, 64), w = seq_new(120, 1, 80), l = seq_new(1100, 1, 32);
    for (int i = 0; i < TYPES; i++) {
        query a = {.rows = 33, .group = 3, .pos = 120, .softcap = i == 1 ? 5 : 0, .sinks = i == 2 ? sinks : NULL};
        check_same(&s, &a, types[i]);
        query b = {.rows = 40, .group = 7, .pos = 70, .window = 20 + i * 7};
        check_same(&w, &b, type_at(i, w.dim));
        query c = {.rows = 37, .group = 1, .pos = 1003, .window = i % 2 ? 1000 : 0};
        check_same(&l, &c, types[i]);
    }
    seq_free(&s);
    seq_free(&w);
    seq_free(&l);
}

/* Members whose tables begin alike: alone, as a gang, and as a gang in pieces. */
static void check_gang(const lr_cpu_kernels *kern, seq *s, const query *c, int both, int own, int chunk_n)
{
    enum { MEMBERS = 4 };
    static const int rows[MEMBERS] = {1, 3, 1, 6}, shift[MEMBERS] = {0, 5, 17, 1};
    int bs = s->bs, blocks = (both + own) / bs, width = s->heads * c->group * s->dim, first, last;
    size_t n = (size_t)11 * width, at = 0;
    int32_t *tables_of = malloc(sizeof(int32_t) * MEMBERS * (size_t)blocks);
    float *q = malloc(n * sizeof(float)), *one = malloc(n * sizeof(float)), *out = malloc(n * sizeof(float));
    lr_attn_task t[MEMBERS];
    void *scratch = lr_alloc_aligned(lr_cpu_attn_scratch(c->group, s->dim, LR_ATTN_ROWS));
    for (size_t i = 0; i < n; i++) q[i] = rnd() * 2;
    for (int h = 0; h < s->heads; h++) {
        lr_attn_gang g = {.tasks = t, .n = MEMBERS, .to = both / 64 * 64};
        float *parts[MEMBERS], *to[MEMBERS];
        at = 0;
        for (int i = 0; i < MEMBERS; i++) {
            int32_t *table = tables_of + i * blocks;
            for (int b = 0; b < blocks; b++) table[b] = s->table[b < both / bs ? b : b + i * (own / bs)];
            t[i] = task_of(s, c, q + at, out + at, h);
            t[i].table = table;
            t[i].n_rows = rows[i];
            t[i].pos = both + shift[i];
            at += (size_t)rows[i] * width;
            if (c->window && t[i].pos + rows[i] - c->window > g.from) g.from = t[i].pos + rows[i] - c->window;
        }
        g.from = (g.from + 63) / 64 * 64;
        if (g.from > g.to) g.from = g.to;
        for (int i = 0; i < MEMBERS; i++) {
            lr_attn_task alone = t[i];
            alone.out = one + (t[i].out - out);
            kern->attn(&alone, scratch);
        }
        memset(out, 0xff, n * sizeof(float));
        kern->attn_gang(&g, scratch);
        for (int i = 0; i < MEMBERS; i++)
            for (int r = 0; r < rows[i]; r++)
                for (int j = 0, k = h * c->group * s->dim; j < c->group * s->dim; j++, k++)
                    assert_memory_equal(t[i].out + r * width + k, one + (t[i].out - out) + r * width + k, 4);
        memset(out, 0xff, n * sizeof(float));
        lr_attn_gang_chunks(&g, &first, &last);
        assert_int_equal(last - first + 1, chunk_n);
        for (int i = 0; i < MEMBERS; i++)
            parts[i] = malloc(lr_cpu_attn_part_floats(&t[i]) * sizeof(float) * (size_t)chunk_n);
        for (int k = last; k >= first; k--) {
            for (int i = 0; i < MEMBERS; i++) to[i] = parts[i] + (size_t)(k - first) * lr_cpu_attn_part_floats(&t[i]);
            kern->attn_gang_part(&g, k, to, scratch);
        }
        for (int i = 0; i < MEMBERS; i++) {
            kern->attn_combine(&t[i], parts[i], chunk_n);
            free(parts[i]);
            for (int r = 0; r < rows[i]; r++)
                for (int j = 0, k = h * c->group * s->dim; j < c->group * s->dim; j++, k++)
                    assert_memory_equal(t[i].out + r * width + k, one + (t[i].out - out) + r * width + k, 4);
        }
    }
    lr_free_aligned(scratch);
    free(tables_of);
    free(q);
    free(one);
    free(out);
}

static void test_gangs(void **state)
{
    static const struct {
        int both, own, bs, group, dim, window, chunks;
    } cases[] = {{192, 48, 16, 3, 64, 0, 1},   {240, 48, 48, 7, 64, 0, 1},     {64, 48, 16, 1, 128, 0, 1},
                 {210, 42, 7, 2, 40, 0, 1},    {1104, 48, 16, 3, 32, 0, 2},    {1040, 48, 16, 4, 64, 0, 2},
                 {320, 48, 16, 2, 80, 200, 1}, {1104, 48, 16, 2, 32, 1050, 2}, {1008, 48, 16, 2, 32, 0, 2}};
    for (int k = 0; k < 9; k++) {
        query c = {.group = cases[k].group, .window = cases[k].window, .softcap = k % 3 == 1 ? 4 : 0};
        seq s = seq_new(cases[k].both + 4 * cases[k].own, 2, cases[k].dim);
        for (int i = 0; i < n_tables; i++)
            for (int type = k % 2; type < TYPES; type += 2) {
                seq_page(&s, &tables[i], type_at(type, cases[k].dim), cases[k].bs);
                check_gang(&tables[i], &s, &c, cases[k].both, cases[k].own, cases[k].chunks);
                seq_unpage(&s);
            }
        seq_free(&s);
    }
}

/* ---- the edges ---- */

static void test_nothing_to_see(void **state)
{
    seq s = seq_new(4, 1, 32);
    float sinks[2] = {1, 2};
    for (int i = 0; i < n_tables; i++) {
        seq_page(&s, &tables[i], LR_F16, 16);
        for (int k = 0; k < 2; k++) {
            query c = {.rows = 2, .group = 2, .pos = -5, .sinks = k ? sinks : NULL};
            float *q = queries(&s, &c), out[2 * 2 * 32];
            for (int pieces = 0; pieces < 2; pieces++) {
                memset(out, 0xff, sizeof out);
                run(&tables[i], &s, &c, q, out, 2, pieces);
                for (int j = 0; j < 128; j++) assert_true(out[j] == 0);
            }
            c.pos = -1; /* the second row sees position 0 */
            for (int pieces = 0; pieces < 2; pieces++) {
                run(&tables[i], &s, &c, q, out, 2, pieces);
                for (int j = 0; j < 64; j++) assert_true(out[j] == 0);
                for (int j = 64; j < 128; j++) assert_true(isfinite(out[j]) && out[j] != 0);
            }
            free(q);
        }
        seq_unpage(&s);
    }
    seq_free(&s);
}

/* All scores -inf but one: that one's value comes out; all -inf: zeros. Scores far beyond exp's range stay exact. */
static void test_extreme_scores(void **state)
{
    seq s = seq_new(100, 1, 32);
    query c = {.rows = 1, .group = 1, .pos = 99};
    float q[32], out[32];
    for (int d = 0; d < 32; d++) q[d] = d == 0;
    for (int i = 0; i < n_tables; i++) {
        for (int k = 0; k < 4; k++) {
            for (int p = 0; p < 100; p++) {
                for (int d = 0; d < 32; d++) s.key[p * 32 + d] = 0;
                s.key[p * 32] = k == 2              ? (p == 70 ? 3e38f : -3e38f)
                                : p == 70 && k == 0 ? 1
                                : k == 3            ? 1e30f
                                                    : -INFINITY;
            }
            seq_page(&s, &tables[i], LR_F32, 16);
            c.softcap = k == 3 ? 30 : 0;
            run(&tables[i], &s, &c, q, out, 1, false);
            for (int d = 0; d < 32; d++) {
                if (k == 1)
                    assert_true(out[d] == 0);
                else if (k == 3)
                    assert_true(isfinite(out[d]));
                else
                    assert_true(fabsf(out[d] - s.val[70 * 32 + d]) <= 1e-6f);
            }
            seq_unpage(&s);
        }
    }
    seq_free(&s);
}

/* Values of positions that a row does not see, NaN among them, change no bit of it; nor do missing blocks. */
static void test_unseen_is_untouched(void **state)
{
    for (int i = 0; i < n_tables; i++) {
        seq s = seq_new(200, 1, 64);
        query c = {.rows = 8, .group = 2, .pos = 150, .window = 40};
        size_t n = 8 * 2 * 64;
        float *q = queries(&s, &c), *a = malloc(n * 4), *b = malloc(n * 4);
        seq_page(&s, &tables[i], LR_F16, 16);
        run(&tables[i], &s, &c, q, a, 8, false);
        seq_unpage(&s);
        for (int p = 0; p < 200; p++) {
            if (p < 111 || p > 157) s.key[p * 64 + 3] = NAN, s.val[p * 64 + 5] = NAN;
        }
        seq_page(&s, &tables[i], LR_F16, 16);
        for (int t = 0; t < s.blocks; t++) {
            if (t < 111 / 16 || t > 157 / 16) s.table[t] = 1 << 20;
        }
        run(&tables[i], &s, &c, q, b, 8, false);
        same(a, b, n, "unseen positions", tables[i].name);
        run(&tables[i], &s, &c, q, b, 8, true);
        same(a, b, n, "unseen positions", tables[i].name);
        s.val[157 * 64 + 7] = NAN; /* the last row sees it, the others do not */
        seq_unpage(&s);
        seq_page(&s, &tables[i], LR_F16, 16);
        run(&tables[i], &s, &c, q, b, 8, false);
        same(a, b, 7 * 2 * 64, "a later row's NaN", tables[i].name);
        assert_true(isnan(b[7 * 2 * 64 + 7]));
        seq_unpage(&s);
        free(q);
        free(a);
        free(b);
        seq_free(&s);
    }
}

static void test_kv_put_bytes(void **state)
{
    static const float odd[] = {0, -0.0f, 1e30f, -1e30f, 65504, 65520, 1e-9f, 6e-8f, -3e-5f, 0.33333f, 127, -127.5f};
    for (int t = 0; t < TYPES; t++) {
        for (int d = 0; d < 8; d++) {
            if (types[t] != type_at(t, dims[d])) continue;
            seq s = seq_new(23, 2, dims[d]);
            for (int j = 0; j < 12; j++) s.key[j * 3] = odd[j], s.val[j * 3 + 1] = odd[j];
            for (int b = 0; b < 8; b++) {
                seq_page(&s, &tables[0], types[t], sizes[b]);
                seq first = s;
                for (int i = 1; i < n_tables; i++) {
                    seq_page(&s, &tables[i], types[t], sizes[b]);
                    assert_memory_equal(first.k, s.k, s.stride * (size_t)s.blocks);
                    assert_memory_equal(first.v, s.v, s.stride * (size_t)s.blocks);
                    seq_unpage(&s);
                }
                seq_unpage(&first);
            }
            seq_free(&s);
        }
    }
}

int main(void)
{
    static lr_cpu_kernels all[4] = {{.name = "scalar"}};
    bool has[4] = {true, false, false, false};
    lr_attn_fill_scalar(&all[0]);
#if defined(__x86_64__)
    all[1].name = "avx2";
    all[2].name = "avx512";
    lr_attn_fill_avx2(&all[1]);
    lr_attn_fill_avx512(&all[2]);
    has[1] = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    has[2] = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    has[3] = lr_cpu_table("amx") != NULL; /* which asks for the tiles as well */
    if (has[3]) all[3] = *lr_cpu_table("amx");
#elif defined(__aarch64__)
    all[1].name = "neon";
    lr_attn_fill_neon(&all[1]);
    has[1] = true;
#endif
    for (int i = 0; i < 4; i++) {
        if (has[i]) tables[n_tables++] = all[i];
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_put_bytes),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_positions),
        cmocka_unit_test(test_chunk_limits),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_softcap_sinks),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_gangs),
        cmocka_unit_test(test_nothing_to_see),
        cmocka_unit_test(test_extreme_scores),
        cmocka_unit_test(test_unseen_is_untouched),
        cmocka_unit_test(test_outlier_channels),
        cmocka_unit_test(test_two_types),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
