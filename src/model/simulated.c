/* simulated.c - see simulated.h: a cost model, a clock, and tokens that follow from those before. */
#include "model/simulated.h"
#include "base/mem.h"
#include <math.h>
#include <string.h>

typedef struct simulated {
    lr_model m; /* first */
    lr_sim_cost cost;
    lr_kv_layer layer;
    size_t token_bytes, block_bytes;
    int block_size, max_rows;
    double *by_rows; /* (max_rows + 1) seconds of a step of so many rows */
    double now;
    double cold, cold_at; /* how cold the weights were, and when */
} simulated;

static void free_model(lr_model *m)
{
    simulated *s = (simulated *)m;
    lr_free(s->by_rows);
    lr_vocab_unref(m->vocab);
    lr_free(s);
}

/* What the table says about a number of rows. */
static double of_rows(const lr_sim_cost *c, int rows)
{
    int i = 0;
    while (i < c->n_points && c->rows[i] < rows) i++;
    if (i == 0 || c->n_points == 1) return c->seconds[0];
    if (i == c->n_points) i--; /* past the end: on along the last two */
    double slope = (c->seconds[i] - c->seconds[i - 1]) / (c->rows[i] - c->rows[i - 1]);
    double t = c->seconds[i - 1] + slope * (rows - c->rows[i - 1]);
    return t > 0 ? t : 0;
}

static int start(lr_model *m, const lr_kv_spec *spec, int max_rows, int max_out, lr_error *err)
{
    simulated *s = (simulated *)m;
    double *t = lr_calloc((size_t)max_rows + 1, sizeof *t);
    if (!t || !lr_mul(s->token_bytes, (size_t)spec->block_size, &s->block_bytes)) {
        lr_free(t);
        return lr_fail(err, LR_ENOMEM, "no memory for the times of steps of up to %d rows", max_rows);
    }
    for (int n = 1; n <= max_rows; n++) t[n] = of_rows(&s->cost, n);
    lr_free(s->by_rows);
    s->by_rows = t;
    s->max_rows = max_rows;
    s->block_size = spec->block_size;
    return 0;
}

/* How cold the weights are now. */
static double cold_now(const simulated *s)
{
    return 1 - (1 - s->cold) * exp(-(s->now - s->cold_at) / s->cost.cool_seconds);
}

double lr_simulated_seconds(const lr_model *m, const lr_sim_load *l)
{
    const simulated *s = (const simulated *)m;
    const lr_sim_cost *c = &s->cost;
    double t = s->by_rows[l->rows] + c->step + c->sequence * l->seqs + c->token * l->outs +
               c->decode_context * (double)l->context + c->prefill_pair * (double)l->pairs;
    if (c->cool_seconds > 0) t += cold_now(s) * (l->rows <= c->narrow_rows ? c->cold_narrow : c->cold_wide);
    return t;
}

void lr_simulated_pass(lr_model *m, const lr_sim_load *l)
{
    simulated *s = (simulated *)m;
    s->now += lr_simulated_seconds(m, l);
    if (s->cost.cool_seconds > 0) {
        s->cold = cold_now(s) * s->cost.cold_keep;
        s->cold_at = s->now;
    }
}

double lr_simulated_now(void *model) { return ((const simulated *)model)->now; }

void lr_simulated_wait(lr_model *m, double until)
{
    simulated *s = (simulated *)m;
    if (until > s->now) s->now = until;
}

int32_t lr_simulated_text(uint64_t salt, uint64_t i)
{
    uint64_t h = (salt * 0x9E3779B97F4A7C15u ^ i) * 0xD6E8FEB86659FD93u;
    h = (h ^ h >> 32) * 0xD6E8FEB86659FD93u;
    return (int32_t)(h >> 44);
}

int32_t lr_simulated_next(int32_t token, int pos)
{
    uint64_t h = ((uint64_t)(uint32_t)token << 32 | (uint32_t)pos) * 0x9E3779B97F4A7C15u;
    h = (h ^ h >> 29) * 0xBF58476D1CE4E5B9u;
    return (int32_t)(h >> 44);
}

static int forward(lr_model *m, const lr_batch *b, lr_error *err)
{
    lr_sim_load l = {.rows = b->n_rows, .seqs = b->n_seqs, .outs = b->n_out};
    const lr_batch_seq *q = b->seqs;
    for (int i = 0; i < b->n_seqs; i++) {
        int64_t n = q[i].n, before = q[i].pos;
        if (n == 1) {
            l.context += before + 1;
        } else {
            l.pairs += n * before + n * (n + 1) / 2;
        }
    }
    for (int i = 0; i < b->n_out; i++) {
        int row = b->out_rows[i];
        while (row >= q->row + q->n) q++;
        b->told[i] = lr_simulated_next(b->tokens[row], q->pos + row - q->row);
    }
    lr_simulated_pass(m, &l);
    return 0;
}

static size_t block_bytes(const lr_model *m, int group) { return ((const simulated *)m)->block_bytes; }

static void kv_copy(lr_model *m, int g, int dst, int src) {}

static void kv_read(lr_model *m, int g, int b, void *dst)
{
    simulated *s = (simulated *)m;
    s->now += s->cost.block_move;
}

static void kv_write(lr_model *m, int g, int b, const void *src)
{
    simulated *s = (simulated *)m;
    s->now += s->cost.block_move;
}

static void memory(const lr_model *m, size_t *weights, size_t *kv, size_t *work) { *weights = *kv = *work = 0; }

static const lr_model_ops ops = {free_model, start, forward, kv_copy, block_bytes, kv_read, kv_write,
                                 memory,     NULL,  NULL,    NULL,    NULL,        NULL};

bool lr_simulated_is(const lr_model *m) { return m->ops == &ops; }

static int check_cost(const lr_sim_cost *c, lr_error *err)
{
    const struct {
        const char *name;
        double v;
    } field[] = {{"step", c->step},
                 {"sequence", c->sequence},
                 {"token", c->token},
                 {"decode_context", c->decode_context},
                 {"prefill_pair", c->prefill_pair},
                 {"block_move", c->block_move},
                 {"cold_narrow", c->cold_narrow},
                 {"cold_wide", c->cold_wide},
                 {"cool_seconds", c->cool_seconds}};
    if (c->n_points < 1 || c->n_points > LR_SIM_POINTS)
        return lr_fail(err, LR_EINVAL, "rows: %d points, 1 to %d are possible", c->n_points, LR_SIM_POINTS);
    for (int i = 0; i < c->n_points; i++) {
        if (c->rows[i] < 1 || (i > 0 && c->rows[i] <= c->rows[i - 1]))
            return lr_fail(err, LR_EINVAL, "rows[%d] is %d: numbers from 1 on, ascending, expected", i + 1, c->rows[i]);
        if (!(c->seconds[i] > 0 && c->seconds[i] < 1e6))
            return lr_fail(err, LR_EINVAL, "seconds[%d] is %g: a time expected", i + 1, c->seconds[i]);
    }
    for (size_t i = 0; i < sizeof field / sizeof *field; i++) {
        if (!(field[i].v >= 0 && field[i].v < 1e6))
            return lr_fail(err, LR_EINVAL, "%s is %g: a time expected", field[i].name, field[i].v);
    }
    if (!(c->cold_keep >= 0 && c->cold_keep <= 1))
        return lr_fail(err, LR_EINVAL, "cold_keep is %g: 0 to 1 expected", c->cold_keep);
    return 0;
}

int lr_simulated_new(lr_model **out, const lr_sim_config *cfg, lr_error *err)
{
    int rc = check_cost(&cfg->cost, err);
    if (rc) return rc;
    if (cfg->n_ctx < 1 || cfg->n_ctx > 1 << 24)
        return lr_fail(err, LR_EINVAL, "context is %d: 1 to %d tokens expected", cfg->n_ctx, 1 << 24);
    if (cfg->token_bytes < 1 || cfg->token_bytes > (size_t)1 << 30)
        return lr_fail(err, LR_EINVAL, "a token's KV of %zu bytes", cfg->token_bytes);
    if (!cfg->vocab) return lr_fail(err, LR_EINVAL, "a vocabulary is needed");
    simulated *s = lr_calloc(1, sizeof *s);
    if (!s) return lr_fail(err, LR_ENOMEM, "no memory for a simulated model");
    s->cost = cfg->cost;
    s->cold = 1;
    s->token_bytes = cfg->token_bytes;
    s->layer = (lr_kv_layer){.n_kv_heads = 1, .head_dim = 32};
    s->m = (lr_model){.ops = &ops,
                      .n_vocab = LR_SIM_VOCAB,
                      .n_ctx = cfg->n_ctx,
                      .n_kv_layers = 1,
                      .kv_layers = &s->layer,
                      .n_groups = 1,
                      .tells = true,
                      .fingerprint = 0x51e0000000000000u,
                      .vocab = lr_vocab_ref(cfg->vocab),
                      .name = "simulated"};
    *out = &s->m;
    return 0;
}
