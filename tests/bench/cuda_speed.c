/* cuda_speed.c - what scripts/gpu_check measures on a device, a JSON object a line:
 *
 *   cuda_speed [-t] device|kernels|model|decode
 *
 *   device    the chip, its memory, the measured rate of a device-to-device copy
 *   kernels   products with one row, type by type: share of that rate; attention over long contexts; products of many
 *             rows: TFLOP/s
 *   model     a whole model of random weights (SmolLM2-135M's shape) against the CPU's float32 logits; rows of one
 *             batch bit for bit against rows one at a time
 *   decode    tokens a second at batch 1, 8, 64, 256, and of prompts, of a model of random weights (Llama 3 8B's shape,
 *             Q4_K and Q6_K), in the default arithmetic and in "loose"
 *
 * -t: tiny shapes, for a dry run on the emulated device. The backend comes from the plugin (LLMRUN_CUDA_PLUGIN); the
 * kernels are linked in.
 */
#include "../unit/device_model.h"
#include "cuda/kernels.h"
#include <time.h>

static bool tiny;
static double copy_rate; /* bytes a second, read and written */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void die(const char *what)
{
    printf("{\"failed\":\"%s\"}\n", what);
    exit(1);
}

static void must(cudaError_t e, const char *what)
{
    char text[300];
    if (!e) return;
    snprintf(text, sizeof text, "%s: %s (%d)", what, cudaGetErrorString(e), (int)e);
    die(text);
}

static void *device(size_t n)
{
    void *p = NULL;
    must(cudaMalloc(&p, n), "device memory");
    must(cudaMemset(p, 0, n), "device memory");
    return p;
}

/* Seconds of one call of fn, by the device's clock: the mean of a run that takes some 50 ms. */
typedef cudaError_t launch_fn(void *arg, int i, cudaStream_t s);
static double time_of(launch_fn *fn, void *arg)
{
    cudaStream_t s;
    cudaEvent_t a, b;
    float ms = 0;
    must(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "a stream");
    must(cudaEventCreate(&a), "an event");
    must(cudaEventCreate(&b), "an event");
    for (int i = 0; i < 3; i++) must(fn(arg, i, s), "a launch");
    int n = tiny ? 1 : 20;
    for (int round = 0; round < 2; round++) {
        must(cudaEventRecord(a, s), "an event");
        for (int i = 0; i < n; i++) must(fn(arg, i, s), "a launch");
        must(cudaEventRecord(b, s), "an event");
        must(cudaStreamSynchronize(s), "running");
        must(cudaEventElapsedTime(&ms, a, b), "an event");
        if (round == 1 || tiny || ms > 40) break;
        n = ms > 0 ? (int)((float)n * 50 / ms) + 1 : n;
        if (n > 20000) n = 20000;
    }
    cudaEventDestroy(a);
    cudaEventDestroy(b);
    cudaStreamDestroy(s);
    return ms > 0 ? (double)ms * 1e-3 / n : 1e-9;
}

/* ---- device ---- */

typedef struct copy_arg {
    char *a, *b;
    size_t n;
} copy_arg;

static cudaError_t copy(void *arg, int i, cudaStream_t s)
{
    copy_arg *c = arg;
    (void)i;
    return cudaMemcpyAsync(c->a, c->b, c->n, cudaMemcpyDeviceToDevice, s);
}

static void measure_copy(void)
{
    copy_arg c = {.n = tiny ? 4096 : (size_t)2 << 30};
    c.a = device(c.n);
    c.b = device(c.n);
    copy_rate = 2 * (double)c.n / time_of(copy, &c);
    cudaFree(c.a);
    cudaFree(c.b);
}

static void show_device(void)
{
    struct cudaDeviceProp p;
    int driver = 0, runtime = 0;
    size_t room, all;
    must(cudaGetDeviceProperties(&p, 0), "the device");
    must(cudaMemGetInfo(&room, &all), "the device's memory");
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    printf("{\"what\":\"device\",\"name\":\"%s\",\"sm\":%d,\"processors\":%d,\"memory\":%zu,\"free\":%zu,\"driver\":%d,"
           "\"runtime\":%d,\"copy_gbs\":%.1f}\n",
           p.name, p.major * 10 + p.minor, p.multiProcessorCount, all, room, driver, runtime, copy_rate * 1e-9);
}

/* ---- kernels ---- */

typedef struct linear_arg {
    lr_cu_weight w[16]; /* copies, so that none stays in the cache */
    int n_copies, m;
    lr_cu_math math;
    void *x, *work;
    float *y;
} linear_arg;

static cudaError_t linear(void *arg, int i, cudaStream_t s)
{
    linear_arg *l = arg;
    return lr_cu_linear(l->math, &l->w[i % l->n_copies], l->x, l->m, NULL, false, l->y, l->work, s);
}

static void product(int type, int n, int k, int m, lr_cu_math math, const char *mode)
{
    if (!lr_cu_weight_good(type)) return;
    size_t row = (size_t)(k / lr_dtype_block(type)) * (size_t)lr_dtype_bytes(type), bytes = row * (size_t)n;
    linear_arg l = {.m = m, .math = math, .n_copies = tiny || m > 64 ? 1 : 8};
    char *host = malloc(bytes + 64);
    if (!host) die("memory");
    dm_fill(type, host, (size_t)n * (size_t)k, 1.0f / sqrtf((float)k), 7);
    for (int i = 0; i < l.n_copies; i++) {
        void *p = device(bytes + 256);
        must(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice), "copying weights");
        l.w[i] = (lr_cu_weight){.data = p, .type = type, .n = n, .k = k, .row_bytes = row};
    }
    lr_cu_form form = lr_cu_linear_form(math, type, m);
    l.x = device(lr_cu_rows_bytes(form, m, k));
    l.y = device((size_t)m * (size_t)n * sizeof(float));
    l.work = device(lr_cu_linear_work(math, type, n, k, m) + 16);
    double t = time_of(linear, &l);
    printf(
        "{\"what\":\"product\",\"math\":\"%s\",\"type\":\"%s\",\"n\":%d,\"k\":%d,\"rows\":%d,\"us\":%.2f,\"gbs\":%.1f,"
        "\"share_of_copy\":%.3f,\"tflops\":%.2f}\n",
        mode, lr_dtype_name(type), n, k, m, t * 1e6, (double)bytes / t * 1e-9, (double)bytes / t / copy_rate,
        2.0 * m * n * k / t * 1e-12);
    fflush(stdout);
    for (int i = 0; i < l.n_copies; i++) cudaFree((void *)(uintptr_t)l.w[i].data);
    cudaFree(l.x);
    cudaFree(l.y);
    cudaFree(l.work);
    free(host);
}

typedef struct experts_arg {
    lr_cu_choice choice;
    lr_cu_slots slots;
    lr_cu_product p;
    int m;
    float *logits, *chosen;
    int32_t *live;
    void *x, *work;
} experts_arg;

static cudaError_t route(void *arg, int i, cudaStream_t s)
{
    experts_arg *a = arg;
    (void)i;
    return lr_cu_route(&a->choice, &a->slots, a->logits, NULL, a->live, a->chosen, s);
}

static cudaError_t up(void *arg, int i, cudaStream_t s)
{
    experts_arg *a = arg;
    (void)i;
    return lr_cu_multiply(LR_CU_EXACT, &a->p, a->x, a->m, a->work, s);
}

/* Gate, up and activation of m rows: 8 experts of 128, 768 of 2048 wide each (Q4_K), and their choice. The weights that
 * are read are those of experts that a row has chosen. */
static void experts(int m)
{
    int n_experts = tiny ? 6 : 128, used = tiny ? 2 : 8, n = tiny ? 32 : 768, k = tiny ? 256 : 2048, all = m * used;
    size_t row = (size_t)(k / 256) * 144, bytes = row * (size_t)(n * n_experts), fewer = 0;
    char *host = malloc(bytes + 64);
    float *logits = malloc((size_t)(m * n_experts) * sizeof *logits);
    int32_t *start = malloc(((size_t)n_experts + 1) * sizeof *start);
    uint64_t seed = 5;
    if (!host || !logits || !start) die("memory");
    for (int i = 0; i < m * n_experts; i++) logits[i] = dm_float(&seed);
    experts_arg a = {.choice = {.n_experts = n_experts, .n_used = used, .normalize = true, .scale = 1}, .m = m};
    a.slots = (lr_cu_slots){.n_experts = n_experts, .n_used = used, .n_own = n_experts};
    lr_cu_slots_in(&a.slots, device(lr_cu_slots_bytes(n_experts, used, m)), LR_CU_EXACT, m);
    a.p = (lr_cu_product){.n_weights = 2, .glu = true, .slots = &a.slots, .of_rows = true};
    for (int i = 0; i < 2; i++) {
        void *w = device(bytes + 256);
        dm_fill(LR_Q4_K, host, (size_t)(n * n_experts) * (size_t)k, 1.0f / sqrtf((float)k), 7 + (uint64_t)i);
        must(cudaMemcpy(w, host, bytes, cudaMemcpyHostToDevice), "copying experts");
        a.p.w[i] = (lr_cu_weight){.data = w, .type = LR_Q4_K, .n = n, .k = k, .row_bytes = row};
    }
    a.p.y[0] = device((size_t)all * (size_t)n * sizeof(float));
    a.logits = device((size_t)(m * n_experts) * sizeof *logits);
    a.chosen = device((size_t)all * 2 * sizeof(float));
    a.live = device((size_t)m * sizeof *a.live);
    a.x = device(lr_cu_rows_bytes(lr_cu_linear_form(LR_CU_EXACT, LR_Q4_K, m), m, k));
    a.work = device(lr_cu_product_work(LR_CU_EXACT, &a.p, m) + 16);
    must(cudaMemcpy(a.logits, logits, (size_t)(m * n_experts) * sizeof *logits, cudaMemcpyHostToDevice), "logits");
    double choosing = time_of(route, &a), t = time_of(up, &a);
    must(cudaMemcpy(start, a.slots.start, ((size_t)n_experts + 1) * sizeof *start, cudaMemcpyDeviceToHost), "slots");
    for (int e = 0; e < n_experts && m > 1; e++) fewer += start[e + 1] > start[e];
    double read = 2.0 * (double)row * n * (double)(m > 1 ? fewer : (size_t)used);
    printf("{\"what\":\"experts\",\"rows\":%d,\"experts\":%d,\"used\":%d,\"n\":%d,\"k\":%d,\"us\":%.2f,"
           "\"choosing_us\":%.2f,\"gbs\":%.1f,\"share_of_copy\":%.3f,\"tflops\":%.2f}\n",
           m, n_experts, used, n, k, t * 1e6, choosing * 1e6, read / t * 1e-9, read / t / copy_rate,
           4.0 * all * n * k / t * 1e-12);
    fflush(stdout);
    void *const mine[] = {(void *)(uintptr_t)a.p.w[0].data,
                          (void *)(uintptr_t)a.p.w[1].data,
                          a.p.y[0],
                          a.logits,
                          a.chosen,
                          a.live,
                          a.x,
                          a.work,
                          a.slots.row};
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++) cudaFree(mine[i]);
    free(host);
    free(logits);
    free(start);
}

typedef struct adapt_arg {
    lr_cu_adapters l;
    lr_cu_product p;
    int m;
    void *x, *work;
} adapt_arg;

static cudaError_t adapt(void *arg, int i, cudaStream_t s)
{
    adapt_arg *a = arg;
    (void)i;
    return lr_cu_adapt(&a->l, &a->p, LR_CU_F16, a->x, a->m, a->work, s);
}

/* What adapters of rank 16 add to a product: m rows with one adapter, or one each. */
static void adapters(int m, bool each)
{
    int n = tiny ? 48 : 4096, k = tiny ? 64 : 4096, rank = tiny ? 3 : 16, kinds = each ? m : 1;
    size_t na = (size_t)rank * (size_t)k, nb = (size_t)rank * (size_t)n;
    float *factors = device((na + nb) * (size_t)kinds * sizeof *factors);
    lr_cu_adapter_part *parts = calloc((size_t)kinds, sizeof *parts), *at = device((size_t)kinds * sizeof *parts);
    const lr_cu_adapter_part **rows = calloc((size_t)m, sizeof *rows), **of = device((size_t)m * sizeof *rows);
    if (!parts || !rows) die("memory");
    for (int i = 0; i < kinds; i++) {
        float *f = factors + (size_t)i * (na + nb);
        parts[i] = (lr_cu_adapter_part){f, f + na, rank};
    }
    for (int i = 0; i < m; i++) rows[i] = at + (each ? i : 0);
    must(cudaMemcpy(at, parts, (size_t)kinds * sizeof *parts, cudaMemcpyHostToDevice), "adapters");
    must(cudaMemcpy(of, rows, (size_t)m * sizeof *rows, cudaMemcpyHostToDevice), "adapters");
    adapt_arg a = {.l = {.rows = of, .ranks = (rank + 7) / 8 * 8}, .p = {.n_weights = 1}, .m = m};
    a.p.w[0] = (lr_cu_weight){.n = n, .k = k};
    a.p.y[0] = device((size_t)m * (size_t)n * sizeof(float));
    a.x = device(lr_cu_rows_bytes(LR_CU_F16, m, k));
    a.work = device(lr_cu_adapt_work(1, a.l.ranks, m));
    double t = time_of(adapt, &a), read = (double)(na + nb) * 4 * kinds;
    printf("{\"what\":\"adapters\",\"rows\":%d,\"adapters\":%d,\"rank\":%d,\"n\":%d,\"k\":%d,\"us\":%.2f,"
           "\"gbs\":%.1f,\"tflops\":%.2f}\n",
           m, kinds, rank, n, k, t * 1e6, read / t * 1e-9, 2.0 * m * (double)(na + nb) / t * 1e-12);
    fflush(stdout);
    void *const mine[] = {factors, at, of, a.p.y[0], a.x, a.work};
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++) cudaFree(mine[i]);
    free(parts);
    free(rows);
}

typedef struct attn_arg {
    lr_cu_attn a;
    lr_cu_kv kv;
    lr_cu_rows_at at;
    float *q, *out;
    void *work;
    int slots;
} attn_arg;

static cudaError_t attention(void *arg, int i, cudaStream_t s)
{
    attn_arg *a = arg;
    (void)i;
    return lr_cu_attn_rows(&a->a, &a->kv, a->q, &a->at, NULL, a->at.n_rows, 0, false, a->slots, a->out, a->work, s);
}

/* Decode attention: `seqs` sequences of `slots` tokens, 32 heads on 8, of 128. */
static void decode_attention(int type, int seqs, int slots)
{
    int heads = tiny ? 4 : 32, kv_heads = tiny ? 2 : 8, dim = tiny ? 32 : 128, bs = 16, per = (slots + bs - 1) / bs;
    size_t part = lr_cu_kv_bytes(type, kv_heads, dim, bs);
    int32_t *table = malloc((size_t)(seqs * per) * 4), *small = malloc((size_t)seqs * 4 * 3);
    if (!table || !small) die("memory");
    for (int i = 0; i < seqs * per; i++) table[i] = (i * 7919) % (seqs * per); /* 7919 is prime: a permutation */
    for (int i = 0; i < seqs; i++) {
        small[i] = i;
        small[seqs + i] = slots - 1;
        small[2 * seqs + i] = i * per;
    }
    int32_t *dt = device((size_t)(seqs * per) * 4), *ds = device((size_t)seqs * 12);
    must(cudaMemcpy(dt, table, (size_t)(seqs * per) * 4, cudaMemcpyHostToDevice), "tables");
    must(cudaMemcpy(ds, small, (size_t)seqs * 12, cudaMemcpyHostToDevice), "tables");
    char *pool = device(2 * part * (size_t)(seqs * per));
    size_t width = (size_t)heads * (size_t)dim;
    attn_arg a = {
        .a = {.n_heads = heads, .scale = 0.1f},
        .kv = {.k = {pool, 2 * part, type},
               .v = {pool + part, 2 * part, type},
               .n_kv_heads = kv_heads,
               .head_dim = dim,
               .block_size = bs},
        .at = {.n_rows = seqs, .seq = ds, .pos = ds + seqs, .slot = ds + seqs, .table = dt, .table_at = ds + 2 * seqs},
        .q = device((size_t)seqs * width * 4),
        .out = device((size_t)seqs * width * 4),
        .work = device(lr_cu_attn_work(seqs, heads, dim, slots) + 16),
        .slots = slots};
    double t = time_of(attention, &a), bytes = 2.0 * (double)part * seqs * per;
    printf("{\"what\":\"attention\",\"kv\":\"%s\",\"sequences\":%d,\"context\":%d,\"us\":%.2f,\"gbs\":%.1f,"
           "\"share_of_copy\":%.3f}\n",
           lr_dtype_name(type), seqs, slots, t * 1e6, bytes / t * 1e-9, bytes / t / copy_rate);
    void *const all[] = {dt, ds, pool, a.q, a.out, a.work};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) cudaFree(all[i]);
    free(table);
    free(small);
}

static void kernels(void)
{
    static const int types[] = {LR_Q4_0, LR_Q4_1, LR_Q5_0,   LR_Q8_0,  LR_Q2_K, LR_Q3_K, LR_Q4_K,
                                LR_Q5_K, LR_Q6_K, LR_IQ4_XS, LR_MXFP4, LR_BF16, LR_F16};
    int n = tiny ? 32 : 14336, k = tiny ? 256 : 4096;
    must(lr_cu_init(), "kernels");
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        product(types[i], n, k, 1, LR_CU_EXACT, "exact");
        product(types[i], n, k, 1, LR_CU_FAST, "fast");
        if (types[i] == LR_Q4_K || types[i] == LR_Q8_0) product(types[i], n, k, 8, LR_CU_EXACT, "exact");
    }
    product(LR_Q4_K, n, k, tiny ? 24 : 64, LR_CU_EXACT, "exact");
    product(LR_Q4_K, n, k, tiny ? 40 : 2048, LR_CU_EXACT, "exact");
    product(LR_BF16, n, k, tiny ? 40 : 2048, LR_CU_EXACT, "exact");
    experts(1);
    experts(tiny ? 3 : 64);
    experts(tiny ? 9 : 2048);
    adapters(1, true);
    adapters(tiny ? 3 : 64, true);
    adapters(tiny ? 70 : 2048, false);
    decode_attention(LR_F16, tiny ? 2 : 1, tiny ? 40 : 32768);
    decode_attention(LR_F16, tiny ? 3 : 64, tiny ? 300 : 4096);
    decode_attention(LR_Q8_0, tiny ? 2 : 64, tiny ? 20 : 4096);
}

/* ---- models ---- */

static lr_backend *backend(const char *name, lr_compute compute)
{
    lr_error err;
    lr_backend *be = NULL;
    lr_backend_config c = {.device = name, .compute = compute};
    if (lr_backend_new(&be, &c, &err)) die(err.text);
    return be;
}

typedef struct batch {
    int n; /* sequences */
    int32_t *tokens, *out, **tables;
    lr_batch_seq *seqs;
} batch;

/* n sequences of rows_each tokens from position pos on, with blocks of their own. */
static batch make_batch(const dm_model *m, int n, int rows_each, int pos)
{
    batch b = {.n = n};
    int per = (pos + rows_each + m->block_size - 1) / m->block_size;
    b.tokens = calloc((size_t)(n * rows_each), sizeof *b.tokens);
    b.out = calloc((size_t)(n * rows_each), sizeof *b.out);
    b.seqs = calloc((size_t)n, sizeof *b.seqs);
    b.tables = calloc((size_t)n, sizeof *b.tables);
    if (!b.tokens || !b.out || !b.seqs || !b.tables) die("memory");
    for (int i = 0; i < n; i++) {
        b.tables[i] = calloc((size_t)per, sizeof **b.tables);
        if (!b.tables[i]) die("memory");
        for (int j = 0; j < per; j++) b.tables[i][j] = i * per + j;
        b.seqs[i] =
            (lr_batch_seq){.row = i * rows_each, .n = rows_each, .pos = pos, .table = {b.tables[i], b.tables[i]}};
        for (int j = 0; j < rows_each; j++) b.tokens[i * rows_each + j] = (i * 131 + (pos + j) * 17) % m->s.vocab;
        b.out[i] = (i + 1) * rows_each - 1;
    }
    return b;
}

static void free_batch(batch *b)
{
    for (int i = 0; i < b->n; i++) free(b->tables[i]);
    free(b->tokens);
    free(b->out);
    free(b->seqs);
    free(b->tables);
}

/* Seconds of the batch; logits NULL: they stay on the device. */
static double run(dm_model *m, const batch *b, int rows_each, float *logits)
{
    lr_error err;
    lr_batch x = {.n_rows = b->n * rows_each,
                  .tokens = b->tokens,
                  .n_seqs = b->n,
                  .seqs = b->seqs,
                  .n_out = b->n,
                  .out_rows = b->out,
                  .logits = logits};
    double t = now();
    if (m->be->ops->run(m->be, m->plan, m->kv, &x, &err)) die(err.text);
    return now() - t;
}

static void open_model(dm_model *m, lr_backend *be, const dm_shape *s, int kv, int blocks, int rows, int outs)
{
    lr_error err;
    if (dm_open(m, be, s, &err) || dm_start(m, kv, blocks, 16, rows, outs, &err)) die(err.text);
}

/* Logits behind a prompt of `rows`, whole; then in chunks of 1 and 7, whose bits must be the same. */
static void compare_one(const dm_shape *s, int type, int down, const float *want, int rows, lr_compute compute,
                        const char *mode, double most)
{
    dm_model m;
    dm_shape shape = *s;
    shape.type = type;
    shape.down_type = down;
    float *got = calloc((size_t)s->vocab, sizeof *got), *parts = calloc((size_t)s->vocab, sizeof *parts);
    open_model(&m, backend("cuda:0", compute), &shape, compute == LR_COMPUTE_F32 ? LR_F32 : LR_F16, 64, rows, 8);
    batch b = make_batch(&m, 1, rows, 0);
    run(&m, &b, rows, got);
    free_batch(&b);
    for (int pos = 0, n; pos < rows; pos += n) {
        n = pos % 8 == 0 ? 1 : 7;
        if (n > rows - pos) n = rows - pos;
        b = make_batch(&m, 1, n, pos);
        for (int j = 0; j < (pos + n + 15) / 16; j++) b.tables[0][j] = j;
        run(&m, &b, n, parts);
        free_batch(&b);
    }
    bool same = memcmp(got, parts, (size_t)s->vocab * sizeof *got) == 0, bits = compute != LR_COMPUTE_LOOSE;
    double e = dm_error(got, want, (size_t)s->vocab);
    printf("{\"what\":\"model\",\"math\":\"%s\",\"type\":\"%s\",\"error\":%.3g,\"most\":%.3g,\"same_bits\":%s,\"good\":"
           "%s}\n",
           mode, lr_dtype_name(type), e, most, same ? "true" : "false",
           e <= most && (same || !bits) ? "true" : "false");
    fflush(stdout);
    free(got);
    free(parts);
    dm_close(&m);
}

static void compare(void)
{
    dm_shape s = {.width = 576,
                  .layers = 30,
                  .heads = 9,
                  .kv_heads = 3,
                  .dim = 64,
                  .ff = 1536,
                  .vocab = 49152,
                  .interleaved = true};
    if (tiny) s = (dm_shape){.width = 64, .layers = 2, .heads = 2, .kv_heads = 1, .dim = 32, .ff = 96, .vocab = 100};
    static const int types[][2] = {{LR_Q8_0, LR_Q8_0}, {LR_Q4_0, LR_Q4_1}, {LR_BF16, LR_BF16}, {LR_F16, LR_F16}};
    int rows = tiny ? 9 : 24;
    float *want = calloc((size_t)s.vocab, sizeof *want);
    for (size_t i = 0; i < sizeof types / sizeof *types && want; i++) {
        dm_model cpu;
        s.type = types[i][0];
        s.down_type = types[i][1];
        open_model(&cpu, backend("cpu", LR_COMPUTE_F32), &s, LR_F32, 64, rows, 8);
        batch b = make_batch(&cpu, 1, rows, 0);
        run(&cpu, &b, rows, want);
        free_batch(&b);
        dm_close(&cpu);
        compare_one(&s, s.type, s.down_type, want, rows, LR_COMPUTE_FAST, "default", 1e-3);
        compare_one(&s, s.type, s.down_type, want, rows, LR_COMPUTE_F32, "f32", 1e-9);
        compare_one(&s, s.type, s.down_type, want, rows, LR_COMPUTE_LOOSE, "loose", 1e-2);
    }
    free(want);
}

/* Best of several runs, after one that captures. */
static double best_of(dm_model *m, const batch *b, int rows_each, float *logits, int times)
{
    double best = 1e9;
    run(m, b, rows_each, logits);
    for (int i = 0; i < times; i++) {
        double t = run(m, b, rows_each, logits);
        if (t < best) best = t;
    }
    return best;
}

static void decode(void)
{
    static const int sizes[] = {1, 8, 64, 256};
    dm_shape s = {.width = 4096,
                  .layers = 32,
                  .heads = 32,
                  .kv_heads = 8,
                  .dim = 128,
                  .ff = 14336,
                  .vocab = 128256,
                  .type = LR_Q4_K,
                  .down_type = LR_Q6_K,
                  .one_for_all = true};
    if (tiny)
        s = (dm_shape){.width = 256,
                       .layers = 1,
                       .heads = 2,
                       .kv_heads = 1,
                       .dim = 128,
                       .ff = 256,
                       .vocab = 96,
                       .type = LR_Q4_K,
                       .down_type = LR_Q6_K,
                       .one_for_all = true};
    int context = tiny ? 20 : 512, most = tiny ? 8 : 256, rows = tiny ? 32 : 2048, times = tiny ? 1 : 20;
    const struct {
        const char *name;
        lr_compute c;
    } modes[] = {{"default", LR_COMPUTE_FAST}, {"loose", LR_COMPUTE_LOOSE}};
    for (int k = 0; k < 2; k++) {
        dm_model m;
        double t0 = now();
        open_model(&m, backend("cuda:0", modes[k].c), &s, LR_F16, most * (context / 16 + 2), rows, most);
        double load = now() - t0;
        float *logits = malloc((size_t)most * (size_t)s.vocab * sizeof *logits);
        if (!logits) die("memory");
        printf("{\"what\":\"load\",\"math\":\"%s\",\"backend\":\"%s\",\"weight_bytes\":%zu,\"seconds\":%.2f}\n",
               modes[k].name, m.be->ops->describe(m.be), m.weight_bytes, load);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes && sizes[i] <= most; i++) {
            batch b = make_batch(&m, sizes[i], 1, context);
            double t = best_of(&m, &b, 1, NULL, times), all = best_of(&m, &b, 1, logits, times);
            printf("{\"what\":\"decode\",\"math\":\"%s\",\"batch\":%d,\"context\":%d,\"ms\":%.3f,\"tokens_s\":%.1f,"
                   "\"tokens_s_with_logits\":%.1f,\"weights_gbs\":%.1f,\"share_of_copy\":%.3f}\n",
                   modes[k].name, sizes[i], context, t * 1e3, sizes[i] / t, sizes[i] / all,
                   (double)m.weight_bytes / t * 1e-9, (double)m.weight_bytes / t / copy_rate);
            fflush(stdout);
            free_batch(&b);
        }
        batch b = make_batch(&m, 1, rows, 0);
        double t = best_of(&m, &b, rows, logits, tiny ? 1 : 4);
        double per = 2.0 * s.layers * s.width * ((2.0 * s.heads + 2.0 * s.kv_heads) * s.dim + 3.0 * s.ff);
        printf("{\"what\":\"prefill\",\"math\":\"%s\",\"rows\":%d,\"ms\":%.2f,\"tokens_s\":%.1f,\"tflops\":%.1f}\n",
               modes[k].name, rows, t * 1e3, rows / t, per * rows / t * 1e-12);
        free_batch(&b);
        free(logits);
        dm_close(&m);
    }
}

int main(int argc, char **argv)
{
    tiny = argc > 1 && strcmp(argv[1], "-t") == 0;
    const char *what = argc > 1 + tiny ? argv[1 + tiny] : "";
    must(cudaSetDevice(0), "the device");
    measure_copy();
    if (strcmp(what, "device") == 0)
        show_device();
    else if (strcmp(what, "kernels") == 0)
        kernels();
    else if (strcmp(what, "model") == 0)
        compare();
    else if (strcmp(what, "decode") == 0)
        decode();
    else {
        fprintf(stderr, "usage: cuda_speed [-t] device|kernels|model|decode\n");
        return 2;
    }
    return 0;
}
