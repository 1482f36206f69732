/* test_cuda.c - the CUDA backend on the emulated device: models of random weights against the CPU's float32 path, row
 * by row bit-identical over batches, chunks, block sizes and reaches, and what it says when it can't.
 *
 * The plugin is libllmrun_cuda_emu.so beside this program; LLMRUN_CUDA_PLUGIN names another, such as the real one on a
 * machine with a GPU.
 */
#include "device_model.h"
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>
#include <cmocka.h>

enum { MOST_TOKENS = 600, MOST_BLOCKS = 600, MOST_ROWS = 300, BLOCKS = 640 };

static bool emulated, missing, sanitized;

/* ---- sequences ---- */

typedef struct seq {
    int32_t tokens[MOST_TOKENS];
    int n, pos;
    int32_t table[LR_KV_GROUPS][MOST_BLOCKS];
} seq;

static uint64_t state = 1;

static int rnd(int n) { return (int)(dm_next(&state) % (uint32_t)n); }

static void seq_new(seq *s, const dm_model *m, int first_block, int n, int vocab)
{
    memset(s, 0, sizeof *s);
    s->n = n;
    for (int i = 0; i < n; i++) s->tokens[i] = rnd(vocab);
    int blocks = (MOST_TOKENS + m->block_size - 1) / m->block_size;
    for (int g = 0; g < LR_KV_GROUPS; g++) /* scattered: every other one from behind */
        for (int i = 0; i < blocks; i++) s->table[g][i] = (int32_t)(first_block + (i % 2 ? blocks - 1 - i / 2 : i / 2));
}

/* Runs the next n[i] tokens of each sequence in one batch; logits of all their rows, in order, if all, else of each's
 * last. */
static void run(dm_model *m, seq **seqs, const int *n, int n_seqs, bool all, float *logits)
{
    int32_t tokens[MOST_ROWS], out[MOST_ROWS];
    lr_batch_seq bs[MOST_ROWS];
    lr_batch b = {.tokens = tokens, .seqs = bs, .out_rows = out, .logits = logits};
    lr_error err;
    for (int i = 0; i < n_seqs; i++) {
        if (n[i] == 0) continue;
        seq *s = seqs[i];
        bs[b.n_seqs++] = (lr_batch_seq){.row = b.n_rows, .n = n[i], .pos = s->pos, .table = {s->table[0], s->table[1]}};
        for (int j = 0; j < n[i]; j++) {
            if (all || j == n[i] - 1) out[b.n_out++] = b.n_rows;
            tokens[b.n_rows++] = s->tokens[s->pos + j];
        }
        s->pos += n[i];
    }
    if (m->be->ops->run(m->be, m->plan, m->kv, &b, &err)) fail_msg("%s", err.text);
}

static lr_backend *backend(const char *device, lr_compute compute)
{
    lr_backend *be = NULL;
    lr_error err;
    lr_backend_config c = {.device = device, .threads = 1, .compute = compute};
    if (lr_backend_new(&be, &c, &err)) fail_msg("%s", err.text);
    return be;
}

static void open_model(dm_model *m, const char *device, lr_compute compute, const dm_shape *s, int kv, int bs)
{
    lr_error err;
    if (dm_open(m, backend(device, compute), s, &err) || dm_start(m, kv, BLOCKS, bs, MOST_ROWS, MOST_ROWS, &err))
        fail_msg("%s", err.text);
}

/* ---- shapes ---- */

static const struct {
    const char *name;
    dm_shape s;
    double near; /* normalised square error of the default arithmetic */
} models[] = {
    {"llama",
     {.width = 64,
      .layers = 2,
      .heads = 4,
      .kv_heads = 2,
      .dim = 16,
      .ff = 96,
      .vocab = 130,
      .type = LR_Q8_0,
      .down_type = LR_F16,
      .interleaved = true},
     1e-4},
    {"qwen",
     {.width = 64,
      .layers = 2,
      .heads = 2,
      .kv_heads = 1,
      .dim = 32,
      .ff = 96,
      .vocab = 100,
      .type = LR_Q4_0,
      .down_type = LR_Q5_0,
      .biases = true,
      .head_norms = true},
     1e-4},
    {"gemma",
     {.width = 64,
      .layers = 4,
      .heads = 4,
      .kv_heads = 1,
      .dim = 32,
      .ff = 96,
      .vocab = 100,
      .type = LR_BF16,
      .down_type = LR_Q4_1,
      .post_norms = true,
      .window = 9,
      .attn_cap = 20,
      .logit_cap = 15,
      .act = LR_ACT_GELU_TANH},
     1e-3},
    {"gpt-2",
     {.width = 64,
      .layers = 2,
      .heads = 2,
      .kv_heads = 2,
      .dim = 32,
      .ff = 128,
      .vocab = 100,
      .type = LR_F32,
      .down_type = LR_F32,
      .biases = true,
      .layer_norm = true,
      .positions = true,
      .plain_ff = true,
      .act = LR_ACT_GELU_ERF},
     1e-4},
    {"k-quants",
     {.width = 256,
      .layers = 1,
      .heads = 4,
      .kv_heads = 2,
      .dim = 64,
      .ff = 256,
      .vocab = 65,
      .type = LR_Q4_K,
      .down_type = LR_Q6_K,
      .sinks = true},
     1e-4},
    {"k-quants 2",
     {.width = 256,
      .layers = 1,
      .heads = 4,
      .kv_heads = 4,
      .dim = 64,
      .ff = 256,
      .vocab = 65,
      .type = LR_Q5_K,
      .down_type = LR_MXFP4},
     1e-4},
    {"experts",
     {.width = 64,
      .layers = 3,
      .heads = 2,
      .kv_heads = 1,
      .dim = 32,
      .ff = 96,
      .vocab = 100,
      .type = LR_Q8_0,
      .down_type = LR_Q8_0,
      .experts = 6,
      .used = 2},
     1e-4},
    {"experts of few bits",
     {.width = 64,
      .layers = 2,
      .heads = 2,
      .kv_heads = 1,
      .dim = 32,
      .ff = 64,
      .vocab = 100,
      .type = LR_MXFP4,
      .down_type = LR_MXFP4,
      .biases = true,
      .experts = 4,
      .used = 4,
      .gate = LR_GATE_SOFTMAX_CHOSEN,
      .act = LR_ACT_SWIGLU_CLAMP},
     1e-3},
    {"k-quants of few bits",
     {.width = 256,
      .layers = 1,
      .heads = 4,
      .kv_heads = 2,
      .dim = 64,
      .ff = 256,
      .vocab = 65,
      .type = LR_Q2_K,
      .down_type = LR_Q3_K},
     1e-4},
    {"codebooks",
     {.width = 256,
      .layers = 1,
      .heads = 4,
      .kv_heads = 2,
      .dim = 64,
      .ff = 256,
      .vocab = 65,
      .type = LR_IQ4_XS,
      .down_type = LR_IQ4_NL},
     1e-4},
};
/* The last ones differ from others in formats only. */
enum { N_MODELS = sizeof models / sizeof *models, N_SHAPES = N_MODELS - 2 };

static int best(const float *l, int n)
{
    int b = 0;
    for (int i = 1; i < n; i++)
        if (l[i] > l[b]) b = i;
    return b;
}

/* ---- against the CPU ---- */

/* kv, gpu_kv: of the CPU and of the device. */
static double error_of(const dm_shape *s, lr_compute compute, int kv, int gpu_kv, int *differ)
{
    static const int prompt[] = {5, 19, 1}, steps = 4;
    dm_model cpu, gpu;
    seq a[3], b[3];
    open_model(&cpu, "cpu", LR_COMPUTE_F32, s, kv, 16);
    open_model(&gpu, "cuda:0", compute, s, gpu_kv, 16);
    for (int i = 0; i < 3; i++) {
        seq_new(&a[i], &cpu, i * 50, prompt[i], s->vocab);
        b[i] = a[i];
    }
    size_t v = (size_t)s->vocab;
    float *x = calloc(25 * v, sizeof *x), *y = calloc(25 * v, sizeof *y);
    seq *pa[] = {&a[0], &a[1], &a[2]}, *pb[] = {&b[0], &b[1], &b[2]};
    double worst = 0;
    *differ = 0;
    for (int step = 0; step <= steps; step++) {
        int ones[] = {1, 1, 1};
        run(&cpu, pa, step ? ones : prompt, 3, false, x);
        run(&gpu, pb, step ? ones : prompt, 3, false, y);
        double e = dm_error(y, x, 3 * v);
        if (!(e <= worst)) worst = e;
        for (int i = 0; i < 3; i++) { /* greedy, the CPU's choice for both */
            int t = best(x + (size_t)i * v, s->vocab);
            if (best(y + (size_t)i * v, s->vocab) != t) ++*differ;
            a[i].tokens[a[i].n++] = t;
            b[i].tokens[b[i].n++] = t;
        }
    }
    free(x);
    free(y);
    dm_close(&cpu);
    dm_close(&gpu);
    return worst;
}

static void against_cpu(const dm_shape *s, const char *name, lr_compute compute, double most)
{
    int differ;
    double worst = error_of(s, compute, LR_F32, compute == LR_COMPUTE_F32 ? LR_F32 : LR_F16, &differ);
    if (!(worst <= most)) fail_msg("%s: normalised error %.3g, %.3g allowed", name, worst, most);
    if (compute == LR_COMPUTE_F32) assert_int_equal(differ, 0);
}

/* KV of few bits keeps what the CPU's keeps: the error against the CPU with the same types is that of the device's
 * products, and less than what the types cost. */
static void test_kv_types(void **st)
{
    (void)st;
    static const struct {
        int model, kv;
        double most;
    } tries[] = {{1, LR_Q8_0, 5e-5}, {1, LR_Q4_0, 1e-4}, {2, LR_Q4_0, 2e-3}, {3, LR_Q4_0, 4e-4}};
    int differ;
    if (missing) skip();
    for (size_t i = 0; i < sizeof tries / sizeof *tries; i++) {
        double e = error_of(&models[tries[i].model].s, LR_COMPUTE_FAST, tries[i].kv, tries[i].kv, &differ);
        if (!(e <= tries[i].most)) fail_msg("KV of type %d: error %.3g", tries[i].kv, e);
    }
    assert_true(error_of(&models[1].s, LR_COMPUTE_FAST, LR_F32, LR_Q4_0, &differ) > 5e-4);
    assert_true(error_of(&models[3].s, LR_COMPUTE_FAST, LR_F32, LR_KV_FP8, &differ) < 1e-3);
}

static void test_f32(void **st)
{
    (void)st;
    if (missing) skip();
    for (int i = 0; i < N_MODELS; i++) against_cpu(&models[i].s, models[i].name, LR_COMPUTE_F32, 1e-10);
}

static void test_default(void **st)
{
    (void)st;
    if (missing) skip();
    for (int i = 0; i < N_MODELS; i++) against_cpu(&models[i].s, models[i].name, LR_COMPUTE_FAST, models[i].near);
}

/* ---- promise 1 ---- */

/* Each sequence alone, in prompts of one chunk, then token by token. */
static void alone(const dm_shape *s, lr_compute compute, int kv, const seq *seqs, int n_seqs, float **out)
{
    dm_model m;
    open_model(&m, "cuda:0", compute, s, kv, 16);
    for (int i = 0; i < n_seqs; i++) {
        seq q, *p = &q;
        seq_new(&q, &m, 40, 1, s->vocab);
        memcpy(q.tokens, seqs[i].tokens, sizeof q.tokens);
        for (int at = 0; at < seqs[i].n;) {
            int n = at == 0 ? (seqs[i].n + 1) / 2 : 1;
            run(&m, &p, &n, 1, true, out[i] + (size_t)at * (size_t)s->vocab);
            at += n;
        }
    }
    dm_close(&m);
}

enum { SEQS = 5 };

static void schedule(const dm_shape *s, const char *name, lr_compute compute, int kv, const seq *seqs, float **want)
{
    static const int sizes[] = {1, 3, 16, 32};
    dm_model m;
    int bs = sizes[rnd(4)];
    lr_error err;
    if (dm_open(&m, backend("cuda:0", compute), s, &err) ||
        dm_start(&m, kv, SEQS * (MOST_TOKENS / bs + 1), bs, MOST_ROWS, MOST_ROWS, &err))
        fail_msg("%s", err.text);
    seq mine[SEQS], *p[SEQS];
    size_t v = (size_t)s->vocab;
    float *got = calloc(MOST_ROWS * v, sizeof *got);
    for (int i = 0; i < SEQS; i++) {
        seq_new(&mine[i], &m, i * (MOST_TOKENS / bs + 1), 1, s->vocab);
        memcpy(mine[i].tokens, seqs[i].tokens, sizeof mine[i].tokens);
        mine[i].n = seqs[i].n;
        p[i] = &mine[i];
    }
    for (bool more = true; more;) {
        int n[SEQS], pos[SEQS], most = rnd(3) ? 1 + rnd(40) : 1;
        more = false;
        for (int i = 0; i < SEQS; i++) {
            int left = mine[i].n - mine[i].pos;
            n[i] = left > 0 && rnd(4) ? 1 + rnd(most < left ? most : left) : 0;
            pos[i] = mine[i].pos;
            if (left > n[i]) more = true;
        }
        if (n[0] + n[1] + n[2] + n[3] + n[4] == 0) continue;
        run(&m, p, n, SEQS, true, got);
        const float *g = got;
        for (int i = 0; i < SEQS; i++)
            for (int j = 0; j < n[i]; j++, g += v)
                if (memcmp(g, want[i] + (size_t)(pos[i] + j) * v, v * sizeof *g) != 0)
                    fail_msg("%s: sequence %d, position %d differs (blocks of %d)", name, i, pos[i] + j, bs);
    }
    free(got);
    dm_close(&m);
}

static void same_bits(int model, lr_compute compute, int kv, int rounds)
{
    static const int lengths[SEQS] = {3, 21, 50, 300, 34};
    const dm_shape *s = &models[model].s;
    seq seqs[SEQS];
    dm_model shape = {.block_size = 16};
    float *want[SEQS];
    for (int i = 0; i < SEQS; i++) {
        int n = lengths[i];
        if (n > 256 && (sanitized || model != 0)) n = 40;
        if (s->width > 64 || s->experts) n = n / 3 + 1;
        seq_new(&seqs[i], &shape, 0, n, s->vocab);
        want[i] = calloc((size_t)n * (size_t)s->vocab, sizeof **want);
    }
    alone(s, compute, kv, seqs, SEQS, want);
    for (int i = 0; i < rounds; i++) schedule(s, models[model].name, compute, kv, seqs, want);
    for (int i = 0; i < SEQS; i++) free(want[i]);
}

static void test_promise(void **st)
{
    (void)st;
    if (missing) skip();
    static const int kv[N_SHAPES] = {LR_F16, LR_Q8_0, LR_BF16, LR_F32, LR_Q4_0, LR_KV_FP8, LR_F16, LR_F16};
    int rounds = sanitized ? 1 : 2;
    for (int i = 0; i < N_SHAPES; i++) same_bits(i, LR_COMPUTE_FAST, kv[i], i ? rounds : 2 * rounds);
    same_bits(0, LR_COMPUTE_F32, LR_F32, 1);
}

/* ---- many rows through cuBLAS ---- */

static void test_loose(void **st)
{
    (void)st;
    if (missing) skip();
    const dm_shape *s = &models[1].s;
    dm_model cpu, gpu;
    seq a, b, *pa = &a, *pb = &b;
    int n = 150, one = 1;
    float *x = calloc((size_t)s->vocab, sizeof *x), *y = calloc((size_t)s->vocab, sizeof *y);
    open_model(&cpu, "cpu", LR_COMPUTE_F32, s, LR_F32, 16);
    open_model(&gpu, "cuda:0", LR_COMPUTE_LOOSE, s, LR_F16, 16);
    seq_new(&a, &cpu, 0, n + 1, s->vocab);
    b = a;
    for (int i = 0; i < 2; i++) { /* 150 rows through bfloat16, one with activations of 8 bits */
        run(&cpu, &pa, i ? &one : &n, 1, false, x);
        run(&gpu, &pb, i ? &one : &n, 1, false, y);
        double e = dm_error(y, x, (size_t)s->vocab);
        if (!(e < 5e-3)) fail_msg("%d rows: normalised error %.3g", i ? 1 : n, e);
    }
    free(x);
    free(y);
    dm_close(&cpu);
    dm_close(&gpu);
}

/* ---- blocks that move, rows that are echoed ---- */

static void test_moves(void **st)
{
    (void)st;
    if (missing) skip();
    const dm_shape *s = &models[2].s; /* two groups */
    dm_model m;
    seq a, *p = &a;
    int n = 20, one = 1;
    size_t v = (size_t)s->vocab;
    float *x = calloc(v, sizeof *x), *y = calloc(v, sizeof *y);
    open_model(&m, "cuda:0", LR_COMPUTE_FAST, s, LR_F16, 16);
    seq_new(&a, &m, 0, 21, s->vocab);
    run(&m, &p, &n, 1, false, x);
    seq before = a;
    run(&m, &p, &one, 1, false, x);
    a = before;
    const lr_backend_ops *ops = m.be->ops;
    for (int g = 0; g < 2; g++) { /* one block goes over the host, one is copied; the old ones are spoiled */
        size_t bytes = ops->kv_block_bytes(m.be, m.kv, g);
        char *host = malloc(bytes), *junk = calloc(1, bytes);
        ops->kv_read(m.be, m.kv, g, a.table[g][0], host);
        ops->kv_write(m.be, m.kv, g, 500, host);
        ops->kv_copy(m.be, m.kv, g, 501, a.table[g][1]);
        ops->kv_write(m.be, m.kv, g, a.table[g][0], junk);
        ops->kv_write(m.be, m.kv, g, a.table[g][1], junk);
        a.table[g][0] = 500;
        a.table[g][1] = 501;
        free(host);
        free(junk);
    }
    run(&m, &p, &one, 1, false, y);
    assert_memory_equal(x, y, v * sizeof *x);
    free(x);
    free(y);
    dm_close(&m);
}

/* Two drafts behind one prompt, as branches of a tree, and as sequences of their own. */
static void test_echoes(void **st)
{
    (void)st;
    if (missing) skip();
    const dm_shape *s = &models[1].s;
    dm_model m;
    size_t v = (size_t)s->vocab;
    float *want = calloc(2 * v, sizeof *want), *got = calloc(3 * v, sizeof *got);
    lr_error err;
    open_model(&m, "cuda:0", LR_COMPUTE_FAST, s, LR_Q8_0, 4);
    assert_true(m.be->ops->echoes);
    for (int i = 0; i < 2; i++) { /* prompt of 9, then the token 7, then 11 or 12 */
        seq q, *p = &q;
        int n[] = {9, 1, 1};
        seq_new(&q, &m, 0, 12, s->vocab);
        for (int k = 0; k < 9; k++) q.tokens[k] = k * 5 % s->vocab;
        q.tokens[9] = 7;
        q.tokens[10] = 11 + i;
        for (int k = 0; k < 3; k++) run(&m, &p, &n[k], 1, false, want + (size_t)i * v);
    }
    seq q, *p = &q;
    int n = 9;
    seq_new(&q, &m, 0, 12, s->vocab);
    for (int k = 0; k < 9; k++) q.tokens[k] = k * 5 % s->vocab;
    run(&m, &p, &n, 1, false, got);
    /* the second branch has a block of its own behind the prompt's two and a bit, and its ancestor echoed into it */
    int32_t other[8], tokens[] = {7, 11, 12}, out[] = {0, 1, 2};
    memcpy(other, q.table[0], sizeof other);
    other[2] = 600;
    m.be->ops->kv_copy(m.be, m.kv, 0, 600, q.table[0][2]);
    lr_batch_seq seqs[] = {{.row = 0, .n = 2, .pos = 9, .table = {q.table[0], q.table[1]}},
                           {.row = 2, .n = 1, .pos = 10, .table = {other, q.table[1]}}};
    lr_batch_echo echo = {.row = 0, .table = {other, q.table[1]}};
    lr_batch b = {.n_rows = 3,
                  .tokens = tokens,
                  .n_seqs = 2,
                  .seqs = seqs,
                  .n_echoes = 1,
                  .echoes = &echo,
                  .n_out = 3,
                  .out_rows = out,
                  .logits = got};
    if (m.be->ops->run(m.be, m.plan, m.kv, &b, &err)) fail_msg("%s", err.text);
    assert_memory_equal(got + v, want, v * sizeof *want);
    assert_memory_equal(got + 2 * v, want + v, v * sizeof *want);
    free(want);
    free(got);
    dm_close(&m);
}

/* ---- what can't be ---- */

static void says(int rc, int code, const lr_error *err, const char *word)
{
    if (rc != code || !strstr(err->text, word))
        fail_msg("%d (%d wanted): '%s' without '%s'", rc, code, err->text, word);
}

static int open_as(const char *device, lr_compute compute, lr_error *err)
{
    lr_backend *be = NULL;
    lr_backend_config c = {.device = device, .threads = 1, .compute = compute};
    int rc = lr_backend_new(&be, &c, err);
    if (!rc) {
        if (strcmp(be->ops->name, "cuda") != 0) rc = 1; /* "auto" took the CPU */
        lr_backend_free(be);
    }
    return rc;
}

static void test_devices(void **st)
{
    (void)st;
    lr_error err;
    says(open_as("cuda:x", LR_COMPUTE_FAST, &err), LR_EINVAL, &err, "cuda:x");
    says(open_as("cuda:", LR_COMPUTE_FAST, &err), LR_EINVAL, &err, "cuda:");
    says(open_as("gpu", LR_COMPUTE_FAST, &err), LR_EINVAL, &err, "\"cuda:N\"");
    if (missing || !emulated) skip();
    says(open_as("cuda:7", LR_COMPUTE_FAST, &err), LR_ENOTFOUND, &err, "this process sees 1 GPU, the last is cuda:0");
    says(open_as("cuda:0", LR_COMPUTE_INT8, &err), LR_EUNSUPPORTED, &err, "int8");
    assert_int_equal(open_as("cuda", LR_COMPUTE_FAST, &err), 0);
    assert_int_equal(open_as("auto", LR_COMPUTE_FAST, &err), 0);
    assert_int_equal(open_as("auto", LR_COMPUTE_INT8, &err), 1); /* only the CPU has it */
    setenv("EMU_DEVICES", "0", 1);
    says(open_as("cuda:0", LR_COMPUTE_FAST, &err), LR_ENOTFOUND, &err, "finds no GPU");
    assert_int_equal(open_as("auto", LR_COMPUTE_FAST, &err), 1);
    setenv("EMU_DEVICES", "1", 1);
    setenv("LLMRUN_DEVICE", "cpu", 1);
    assert_int_equal(open_as("auto", LR_COMPUTE_FAST, &err), 1);
    assert_int_equal(open_as("cuda:0", LR_COMPUTE_FAST, &err), 0);
    unsetenv("LLMRUN_DEVICE");
}

static void nothing_left(lr_backend *be)
{
    size_t w, kv, work;
    be->ops->memory(be, &w, &kv, &work);
    assert_int_equal(w + kv + work, 0);
}

/* A device with so many bytes: what doesn't fit is said with numbers, and what was there before goes. */
static void test_full(void **st)
{
    (void)st;
    if (missing || !emulated) skip();
    const dm_shape *s = &models[0].s;
    static const struct {
        const char *bytes, *word;
        int blocks;
    } cases[] = {
        {"60000", "needed for a weight", 4}, {"400000", "4000 KV blocks", 4000}, {"400000", "are needed for", 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dm_model m;
        lr_error err;
        setenv("EMU_MEMORY", cases[i].bytes, 1);
        lr_backend *be = backend("cuda:0", LR_COMPUTE_FAST);
        size_t room = be->ops->room(be);
        int rc = dm_open(&m, be, s, &err); /* a failure takes the backend along */
        if (!rc) {
            rc = dm_start(&m, LR_F16, cases[i].blocks, 16, MOST_ROWS, MOST_ROWS, &err);
            for (int j = 0; j < m.n_weights; j++) be->ops->weight_free(be, m.w[j]);
            m.n_weights = 0;
            if (m.kv) be->ops->kv_free(be, m.kv);
            m.kv = NULL;
            nothing_left(be);
            assert_int_equal(be->ops->room(be), room);
            dm_close(&m);
        }
        says(rc, LR_ENOMEM, &err, cases[i].word);
        says(rc, LR_ENOMEM, &err, "are free");
    }
    unsetenv("EMU_MEMORY");
}

static void test_refused(void **st)
{
    (void)st;
    if (missing) skip();
    dm_model m;
    lr_error err;
    lr_plan *plan = NULL;
    open_model(&m, "cuda:0", LR_COMPUTE_FAST, &models[0].s, LR_F16, 16);
    const lr_backend_ops *ops = m.be->ops;
    lr_op_kind kind = m.ops[m.n_ops - 2].kind;
    m.ops[m.n_ops - 2].kind = (lr_op_kind)77;
    says(ops->compile(m.be, &m.prog, m.kv, 8, 8, &plan, &err), LR_EUNSUPPORTED, &err, "has no operation");
    m.ops[m.n_ops - 2].kind = kind;
    says(ops->compile(m.be, &m.prog, m.kv, 0, 8, &plan, &err), LR_EINVAL, &err, "a batch of 0 rows");
    says(dm_start(&m, LR_Q4_0, 8, 16, 8, 8, &err), LR_EUNSUPPORTED, &err, "Q4_0");
    says(dm_start(&m, LR_F16, 8, 300, 8, 8, &err), LR_EINVAL, &err, "300");
    char block[64] = {0};
    lr_weight *w = NULL;
    lr_tensor t = {.name = "x", .type = LR_I32, .n_dims = 2, .ne = {4, 4, 1, 1}, .data = block, .size = 64};
    says(ops->weight_new(m.be, &t, true, false, &w, &err), LR_EUNSUPPORTED, &err, "I32");
    dm_close(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f32),     cmocka_unit_test(test_default), cmocka_unit_test(test_kv_types),
        cmocka_unit_test(test_promise), cmocka_unit_test(test_loose),   cmocka_unit_test(test_moves),
        cmocka_unit_test(test_echoes),  cmocka_unit_test(test_devices), cmocka_unit_test(test_full),
        cmocka_unit_test(test_refused),
    };
    char path[2048] = "";
    unsetenv("LLMRUN_DEVICE");
    sanitized = getenv("LLMRUN_TEST_SANITIZE") != NULL;
#if defined(__SANITIZE_ADDRESS__)
    sanitized = true;
#endif
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 64);
    emulated = !getenv("LLMRUN_CUDA_PLUGIN");
    if (emulated && n > 0) {
        snprintf(strrchr(path, '/') + 1, 40, "libllmrun_cuda_emu.so");
        missing = access(path, F_OK) != 0;
        setenv("LLMRUN_CUDA_PLUGIN", path, 1);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
