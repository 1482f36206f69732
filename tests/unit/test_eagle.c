/* test_eagle.c - drafts that go on from a model's features, of both shapes, against sums in double precision; and the
 * features that the model tells.
 */
#include "small_graph.h"
#include "engine/speculate_int.h"
#include "model/eagle.h"
#include <math.h>
#include <stdio.h>
#include <unistd.h>

enum { HEADS = 2, DIM = 32, INNER = 96, OWN = 20, ROWS = 5, TAPS = 3 };

/* ---- a file ---- */

enum { FC, FC_BIAS, Q, K, V, O, POST, GATE, UP, DOWN, IN, HIDDEN, NORM, HEAD, PARTS };

typedef struct part {
    const char *first, *third; /* names in both shapes; NULL: not in it */
    int n, k;                  /* of the first shape; k = 0: a vector */
    float *w;
} part;

static part parts[PARTS] = {
    {"fc.weight", "fc.weight", WIDTH, 2 * WIDTH, NULL},
    {"fc.bias", NULL, WIDTH, 0, NULL},
    {"layers.0.self_attn.q_proj.weight", "midlayer.self_attn.q_proj.weight", WIDTH, WIDTH, NULL},
    {"layers.0.self_attn.k_proj.weight", "midlayer.self_attn.k_proj.weight", WIDTH, WIDTH, NULL},
    {"layers.0.self_attn.v_proj.weight", "midlayer.self_attn.v_proj.weight", WIDTH, WIDTH, NULL},
    {"layers.0.self_attn.o_proj.weight", "midlayer.self_attn.o_proj.weight", WIDTH, WIDTH, NULL},
    {"layers.0.post_attention_layernorm.weight", "midlayer.post_attention_layernorm.weight", WIDTH, 0, NULL},
    {"layers.0.mlp.gate_proj.weight", "midlayer.mlp.gate_proj.weight", INNER, WIDTH, NULL},
    {"layers.0.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight", INNER, WIDTH, NULL},
    {"layers.0.mlp.down_proj.weight", "midlayer.mlp.down_proj.weight", WIDTH, INNER, NULL},
    {NULL, "midlayer.input_layernorm.weight", WIDTH, 0, NULL},
    {NULL, "midlayer.hidden_norm.weight", WIDTH, 0, NULL},
    {NULL, "norm.weight", WIDTH, 0, NULL},
    {"lm_head.weight", "lm_head.weight", OWN, WIDTH, NULL},
};

static int columns(int i, bool third)
{
    if (third && i == FC) return TAPS * WIDTH;
    return third && i >= Q && i <= V ? 2 * WIDTH : parts[i].k;
}

static int own_id(int i) { return 2 * i + 1; }

/* own: with a matrix of the draft's, and d2t. */
static void write_file(const char *path, bool third, bool own, int64_t shift)
{
    static char text[8192];
    int n = 0;
    size_t at = 0;
    uint32_t seed = third ? 11 : 5;
    text[n++] = '{';
    for (int i = 0; i < PARTS; i++) {
        part *p = &parts[i];
        const char *name = third ? p->third : p->first;
        int k = columns(i, third);
        size_t count = (size_t)p->n * (size_t)(k ? k : 1);
        free(p->w);
        p->w = NULL;
        if (!name || (i == HEAD && !own)) continue;
        p->w = malloc(count * sizeof(float));
        for (size_t j = 0; j < count; j++) p->w[j] = random_float(&seed) * 0.2f + (k ? 0 : 0.9f);
        n += snprintf(text + n, sizeof text - (size_t)n, "\"%s\":{\"dtype\":\"F32\",\"shape\":[%d", name, p->n);
        if (k) n += snprintf(text + n, sizeof text - (size_t)n, ",%d", k);
        n += snprintf(text + n, sizeof text - (size_t)n, "],\"data_offsets\":[%zu,%zu]},", at, at + count * 4);
        at += count * 4;
    }
    n += snprintf(text + n, sizeof text - (size_t)n,
                  "\"d2t\":{\"dtype\":\"I64\",\"shape\":[%d],\"data_offsets\":[%zu,%zu]}}", OWN, at, at + OWN * 8);
    uint64_t size = (uint64_t)n;
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fwrite(&size, sizeof size, 1, f);
    fwrite(text, 1, (size_t)n, f);
    for (int i = 0; i < PARTS; i++)
        if (parts[i].w)
            fwrite(parts[i].w, 4, (size_t)parts[i].n * (size_t)(columns(i, third) ? columns(i, third) : 1), f);
    for (int i = 0; i < OWN; i++) {
        int64_t d = own_id(i) - i + shift;
        fwrite(&d, 8, 1, f);
    }
    assert_int_equal(fclose(f), 0);
}

/* ---- the definition ---- */

static void product(int i, bool third, const double *x, double *y)
{
    int k = columns(i, third);
    for (int r = 0; r < parts[i].n; r++) {
        y[r] = 0;
        for (int j = 0; j < k; j++) y[r] += (double)parts[i].w[r * k + j] * x[j];
    }
}

static void rms(const double *x, const float *w, double *y)
{
    double sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += x[i] * x[i];
    for (int i = 0; i < WIDTH; i++) y[i] = x[i] / sqrt(sum / WIDTH + 1e-5) * (double)w[i];
}

static void rotate(double *x, int pos)
{
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < DIM / 2; i++) {
            double a = pos * pow(10000, -2.0 * i / DIM), *p = x + h * DIM + i, *q = p + DIM / 2, u = *p;
            *p = u * cos(a) - *q * sin(a);
            *q = *q * cos(a) + u * sin(a);
        }
}

static double keys[ROWS][WIDTH], vals[ROWS][WIDTH];

/* Row `pos`, of a token and an input row -> hidden row. */
static void layer(bool third, int pos, int token, const double *in, double *out)
{
    double c[2 * WIDTH], x[WIDTH], y[INNER], z[INNER], q[WIDTH], a[WIDTH] = {0};
    for (int i = 0; i < WIDTH; i++) {
        x[i] = (double)sg_embd[token * WIDTH + i];
        c[WIDTH + i] = in[i];
    }
    if (third) {
        rms(x, parts[IN].w, c);
        rms(in, parts[HIDDEN].w, c + WIDTH);
        memcpy(x, in, sizeof x);
    } else {
        memcpy(c, x, sizeof x);
        product(FC, false, c, x);
        for (int i = 0; i < WIDTH; i++) c[i] = x[i] += (double)parts[FC_BIAS].w[i];
    }
    product(Q, third, c, q);
    product(K, third, c, keys[pos]);
    product(V, third, c, vals[pos]);
    rotate(q, pos);
    rotate(keys[pos], pos);
    for (int h = 0; h < HEADS; h++) {
        double s[ROWS], sum = 0;
        for (int p = 0; p <= pos; p++) {
            s[p] = 0;
            for (int i = 0; i < DIM; i++) s[p] += q[h * DIM + i] * keys[p][h * DIM + i];
            sum += s[p] = exp(s[p] / sqrt(DIM));
        }
        for (int p = 0; p <= pos; p++)
            for (int i = 0; i < DIM; i++) a[h * DIM + i] += s[p] / sum * vals[p][h * DIM + i];
    }
    product(O, third, a, q);
    for (int i = 0; i < WIDTH; i++) x[i] += q[i];
    rms(x, parts[POST].w, a);
    product(GATE, third, a, y);
    product(UP, third, a, z);
    for (int i = 0; i < INNER; i++) y[i] = y[i] / (1 + exp(-y[i])) * z[i];
    product(DOWN, third, y, q);
    for (int i = 0; i < WIDTH; i++) out[i] = x[i] + q[i];
}

static void check_logits(bool third, bool own, const double *hidden, const float *logits)
{
    double x[WIDTH], want[OWN];
    memcpy(x, hidden, sizeof x);
    if (third) rms(hidden, parts[NORM].w, x);
    if (!own) {
        for (int i = 0; i < FX_VOCAB; i++) {
            double sum = 0;
            for (int j = 0; j < WIDTH; j++) sum += (double)sg_head[i * WIDTH + j] * x[j];
            assert_true(fabs(sum - (double)logits[i]) < 1e-3);
        }
        return;
    }
    product(HEAD, third, x, want);
    for (int i = 0, k = 0; i < FX_VOCAB; i++) {
        if (k < OWN && own_id(k) == i)
            assert_true(fabs(want[k++] - (double)logits[i]) < 1e-3);
        else
            assert_true(logits[i] == -INFINITY);
    }
}

/* ---- tests ---- */

static const lr_eagle_config config = {HEADS, HEADS, DIM, 1e-5f, 10000, {0}, true};

/* Rows in two batches, the second one's input being what the first one's last row says. */
static void check_rows(lr_model *e, bool third, bool own)
{
    static float features[ROWS * TAPS * WIDTH], in[ROWS * WIDTH], hidden[ROWS * WIDTH], logits[ROWS * FX_VOCAB];
    int32_t tokens[ROWS] = {3, 4, 9, 4, 7}, table[] = {1}, outs[] = {1, 3}, last[] = {0};
    int width = lr_eagle_width(e);
    uint32_t seed = 3;
    lr_error err;
    lr_kv_spec spec = {.type = LR_F32, .value_type = LR_F32, .block_size = 16, .n_blocks = {2}};
    lr_batch_seq s = {.n = 4, .table = {table}};
    lr_batch b = {.n_rows = 4,
                  .tokens = tokens,
                  .input = in,
                  .n_seqs = 1,
                  .seqs = &s,
                  .n_out = 2,
                  .out_rows = outs,
                  .logits = logits,
                  .hidden = hidden};
    assert_int_equal(width, third ? TAPS * WIDTH : WIDTH);
    assert_int_equal(e->ops->start(e, &spec, 16, 16, &err), 0);
    for (int i = 0; i < 4 * width; i++) features[i] = random_float(&seed);
    assert_int_equal(lr_eagle_input(e, features, 4, in, &err), 0);
    for (int r = 0; r < 4; r++) {
        double x[WIDTH], f[TAPS * WIDTH];
        for (int i = 0; i < width; i++) f[i] = (double)features[r * width + i];
        for (int i = 0; i < WIDTH; i++) x[i] = f[i];
        if (third) product(FC, true, f, x);
        for (int i = 0; i < WIDTH; i++) assert_true(fabs(x[i] - (double)in[r * WIDTH + i]) < 1e-4);
    }
    assert_int_equal(e->ops->forward(e, &b, &err), 0);
    for (int r = 0, k = 0; r < 4; r++) {
        double x[WIDTH], y[WIDTH];
        for (int i = 0; i < WIDTH; i++) x[i] = (double)in[r * WIDTH + i];
        layer(third, r, tokens[r], x, y);
        if (k < 2 && outs[k] != r) continue;
        for (int i = 0; i < WIDTH; i++) assert_true(fabs(y[i] - (double)hidden[k * WIDTH + i]) < 1e-4);
        check_logits(third, own, y, logits + k++ * FX_VOCAB);
    }
    memcpy(in, hidden + WIDTH, WIDTH * sizeof *in);
    s = (lr_batch_seq){.n = 1, .pos = 4, .table = {table}};
    b.n_rows = b.n_out = 1;
    b.tokens = tokens + 4;
    b.out_rows = last;
    double x[WIDTH], y[WIDTH];
    for (int i = 0; i < WIDTH; i++) x[i] = (double)in[i];
    layer(third, 4, tokens[4], x, y);
    assert_int_equal(e->ops->forward(e, &b, &err), 0);
    check_logits(third, own, y, logits);
}

/* The model gives the same logits with and without features, and these are what they are said to be. */
static void check_features(lr_model *m, bool third, const float *before)
{
    static float features[5 * TAPS * WIDTH], logits[2 * FX_VOCAB], hidden[2 * WIDTH], exit[5 * FX_VOCAB];
    int32_t tokens[] = {3, 4, 5, 6, 7}, table[] = {2}, outs[] = {2, 4}, all[] = {0, 1, 2, 3, 4};
    lr_error err;
    lr_batch_seq s = {.row = 0, .n = 5, .pos = 0, .table = {table}};
    lr_batch b = {.n_rows = 5,
                  .tokens = tokens,
                  .n_seqs = 1,
                  .seqs = &s,
                  .n_out = 2,
                  .out_rows = outs,
                  .logits = logits,
                  .hidden = hidden,
                  .features = features};
    assert_int_equal(m->ops->forward(m, &b, &err), 0);
    assert_memory_equal(logits, before, sizeof logits);
    for (int k = 0; k < 2 && !third; k++)
        assert_memory_equal(features + outs[k] * WIDTH, hidden + k * WIDTH, WIDTH * sizeof(float));
    if (!third) return;
    lr_part *p; /* after two layers, which is where all three places are: n = 5, 5 / 2, 5 - 3 */
    assert_int_equal(lr_part_exit(&p, m, 2, 16, 16, &err), 0);
    b.n_out = 5;
    b.out_rows = all;
    b.logits = exit;
    b.hidden = b.features = NULL;
    assert_int_equal(lr_part_run(p, &b, &err), 0);
    lr_part_free(p);
    for (int r = 0; r < 5; r++) {
        double x[WIDTH], y[WIDTH];
        assert_memory_equal(features + r * 3 * WIDTH, features + (r * 3 + 1) * WIDTH, WIDTH * sizeof(float));
        assert_memory_equal(features + r * 3 * WIDTH, features + (r * 3 + 2) * WIDTH, WIDTH * sizeof(float));
        for (int i = 0; i < WIDTH; i++) x[i] = (double)features[r * 3 * WIDTH + i];
        rms(x, sg_ones, y);
        check_logits(false, false, y, exit + r * FX_VOCAB);
    }
}

static void test_eagle(void **state)
{
    for (int k = 0; k < 4; k++) {
        bool third = k % 2, own = k < 2;
        static float before[2 * FX_VOCAB];
        char path[] = "/tmp/llmrun_eagle_XXXXXX";
        int fd = mkstemp(path);
        int32_t tokens[] = {3, 4, 5, 6, 7}, table[] = {2}, outs[] = {2, 4};
        lr_batch_seq s = {.row = 0, .n = 5, .pos = 0, .table = {table}};
        lr_batch b = {
            .n_rows = 5, .tokens = tokens, .n_seqs = 1, .seqs = &s, .n_out = 2, .out_rows = outs, .logits = before};
        lr_error err;
        lr_model *e, *m = sg_make(SG_LAYERS, -1);
        assert_true(fd >= 0);
        close(fd);
        assert_int_equal(m->ops->forward(m, &b, &err), 0);
        write_file(path, third, own, 0);
        assert_int_equal(lr_eagle_new(&e, m, path, &config, &err), 0);
        check_rows(e, third, own && parts[HEAD].w);
        check_features(m, third, before);
        lr_model_free(e);
        lr_model_free(m);
        unlink(path);
    }
}

static void test_bad_files(void **state)
{
    char path[] = "/tmp/llmrun_eagle_XXXXXX";
    int fd = mkstemp(path);
    lr_error err;
    lr_model *e, *m = sg_make(SG_LAYERS, -1);
    lr_eagle_config c = config;
    assert_true(fd >= 0);
    close(fd);
    write_file(path, false, true, FX_VOCAB);
    assert_int_equal(lr_eagle_new(&e, m, path, &c, &err), LR_EFORMAT);
    write_file(path, false, true, -5);
    assert_int_equal(lr_eagle_new(&e, m, path, &c, &err), LR_EFORMAT);
    write_file(path, false, true, 0);
    c.head_dim = 16;
    assert_int_equal(lr_eagle_new(&e, m, path, &c, &err), LR_ESHAPE);
    c = config;
    c.n_kv_heads = 0;
    assert_int_equal(lr_eagle_new(&e, m, path, &c, &err), LR_EINVAL);
    write_file(path, true, true, 0);
    c = config;
    for (int i = 0; i < 2; i++) { /* of five layers: behind 2, 2, 2 */
        c.taps[0] = c.taps[1] = c.taps[2] = 2 + i;
        assert_int_equal(lr_eagle_new(&e, m, path, &c, &err), i ? LR_EUNSUPPORTED : 0);
        if (i == 0) lr_model_free(e);
        lr_model_free(m);
        m = sg_make(SG_LAYERS, -1);
    }
    lr_model_free(m);
    unlink(path);
}

/* What is drafted for a text that begins like an earlier one, which the model does not compute again: the draft knows
 * that beginning from the earlier one, open or closed, of the same namespace. */
static void test_beginnings(void **state)
{
    enum { SAME = 40, ALL = 44 };
    for (int third = 0; third < 2; third++) {
        char path[] = "/tmp/llmrun_eagle_XXXXXX";
        int fd = mkstemp(path), base;
        lr_error err;
        lr_engine *e;
        lr_engine_config cfg = lr_engine_defaults();
        lr_spec_params sp = lr_spec_defaults(LR_SPEC_EAGLE);
        lr_req_params p = lr_req_defaults(LR_REQ_GENERATE);
        cfg.max_seqs = 4;
        sp.fixed = true;
        sp.k = 2;
        p.spec = &sp;
        p.max_tokens = 8;
        p.ignore_eos = true;
        assert_true(fd >= 0);
        close(fd);
        write_file(path, third, true, 0);
        if (lr_engine_new(&e, sg_make(SG_LAYERS, -1), &cfg, &err)) fail_msg("%s", err.text);
        if (lr_engine_set_eagle(e, path, &config, NULL, &err)) fail_msg("%s", err.text);
        for (int round = 0; round < 4; round++) {
            lr_seq_config sc = {.salt = round == 3 ? LR_STR("other") : (lr_str){NULL, 0}};
            int32_t tokens[ALL];
            lr_request *r;
            lr_seq *q;
            for (int i = 0; i < ALL; i++) tokens[i] = 3 + (i * i + (i < SAME ? 0 : round)) % 40;
            if (lr_seq_new(e, &sc, &q, &err) || lr_seq_append(q, tokens, ALL, &err)) fail_msg("%s", err.text);
            if (lr_request_new(e, q, &p, &r, &err)) fail_msg("%s", err.text);
            fx_run(e);
            fx_check(e);
            assert_true(lr_request_info(r)->spec.drafts > 0);
            assert_int_equal(lr_request_info(r)->n_cached >= SAME / 16 * 16, round == 1 || round == 2);
            int shares = lr_draft_shares(q->draft, q->tokens, q->len, &base);
            if (shares < ALL - 1)
                fail_msg("third %d round %d: %d base %d waiting %d", third, round, shares, base,
                         lr_draft_waiting(q->draft));
            assert_int_equal(base, 0); /* nothing before the rows that it has */
            lr_request_free(r);
            if (round != 1) lr_seq_free(q); /* that one stays open */
        }
        lr_engine_free(e);
        unlink(path);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_eagle), cmocka_unit_test(test_bad_files),
                                       cmocka_unit_test(test_beginnings)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    for (int i = 0; i < PARTS; i++) free(parts[i].w);
    return rc;
}
