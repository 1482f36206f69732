/* scripted.c - a model whose logits a callback gives and whose KV holds token ids: see model.h.
 *
 * Each row writes its token id to its slot of every group; a row whose logits are wanted reads the ids of its sequence
 * back through the block tables, within the window from group 1 and before it from group 0. So the callback sees what
 * the tables say, and a wrong table shows in what it is given.
 */
#include "base/mem.h"
#include "base/clock.h"
#include "model/model.h"
#include <math.h>
#include <string.h>

typedef struct scripted {
    lr_model m; /* first */
    lr_scripted_config cfg;
    lr_kv_layer layers[LR_KV_GROUPS];
    int32_t *ids[LR_KV_GROUPS]; /* (n_blocks, block_size), -1 = never written */
    int n_blocks[LR_KV_GROUPS];
    int block_size;
    int32_t *gather; /* (n_ctx) */
} scripted;

static void drop_kv(scripted *s)
{
    for (int g = 0; g < LR_KV_GROUPS; g++) {
        lr_free(s->ids[g]);
        s->ids[g] = NULL;
    }
}

static void free_model(lr_model *m)
{
    scripted *s = (scripted *)m;
    drop_kv(s);
    lr_free(s->gather);
    lr_vocab_unref(m->vocab);
    lr_free(s);
}

static int start(lr_model *m, const lr_kv_spec *spec, int max_rows, int max_out, lr_error *err)
{
    scripted *s = (scripted *)m;
    drop_kv(s);
    s->block_size = spec->block_size;
    for (int g = 0; g < m->n_groups; g++) {
        size_t n;
        if (spec->n_blocks[g] < 1) return lr_fail(err, LR_EINVAL, "KV group %d has no blocks", g);
        if (!lr_mul((size_t)spec->n_blocks[g], (size_t)spec->block_size * sizeof(int32_t), &n)) n = SIZE_MAX;
        s->n_blocks[g] = spec->n_blocks[g];
        s->ids[g] = lr_malloc(n);
        if (!s->ids[g]) {
            drop_kv(s);
            return lr_fail(err, LR_ENOMEM, "no memory for %d KV blocks", spec->n_blocks[g]);
        }
        memset(s->ids[g], 0xff, n);
    }
    return 0;
}

static int32_t *slot_of(const scripted *s, const int32_t *const *table, int g, int pos)
{
    return &s->ids[g][(size_t)table[g][pos / s->block_size] * (size_t)s->block_size + (size_t)(pos % s->block_size)];
}

/* Copies the ids of positions from .. to - 1 out of group g's blocks. */
static void gather(scripted *s, const lr_batch_seq *q, int g, int from, int to)
{
    while (from < to) {
        int n = s->block_size - from % s->block_size;
        if (n > to - from) n = to - from;
        memcpy(s->gather + from, slot_of(s, q->table, g, from), (size_t)n * sizeof *s->gather);
        from += n;
    }
}

/* Does what the callback says for the row of sequence q at position pos. */
static int run_row(scripted *s, const lr_batch_seq *q, int pos, float *logits, lr_error *err)
{
    int n_vocab = s->m.n_vocab, window = pos + 1; /* first position that is read from group 1 */
    if (pos >= s->cfg.n_ctx) return lr_fail(err, LR_EFULL, "position %d is past the context of %d", pos, s->cfg.n_ctx);
    if (s->cfg.window > 0) window = pos >= s->cfg.window ? pos - s->cfg.window + 1 : 0;
    gather(s, q, 0, 0, window);
    gather(s, q, 1, window, pos + 1);
    for (int p = 0; p <= pos; p++) {
        if (s->gather[p] < 0) return lr_fail(err, LR_ESTATE, "the KV slot of position %d holds nothing", p);
    }
    memset(logits, 0, (size_t)n_vocab * sizeof *logits);
    if (s->cfg.next(s->cfg.user, s->gather, pos + 1, logits) == 0) return 0;
    for (int i = 0; i < n_vocab; i++) logits[i] = NAN;
    return 0;
}

static void wait_until(int64_t t)
{
    for (int64_t left; (left = t - lr_clock_ns(CLOCK_MONOTONIC)) > 0;) {
        struct timespec d = {left / 1000000000, left % 1000000000};
        if (left > 100000) nanosleep(&d, NULL); /* shorter waits spin: sleeping is not that exact */
    }
}

static int forward(lr_model *m, const lr_batch *b, lr_error *err)
{
    scripted *s = (scripted *)m;
    int64_t end = s->cfg.cost_ns > 0 ? lr_clock_ns(CLOCK_MONOTONIC) + s->cfg.cost_ns * b->n_rows : 0;
    for (int i = 0; i < b->n_seqs; i++) {
        const lr_batch_seq *q = &b->seqs[i];
        for (int g = 0; g < m->n_groups; g++) {
            for (int r = 0; r < q->n; r++) *slot_of(s, q->table, g, q->pos + r) = b->tokens[q->row + r];
        }
    }
    const lr_batch_seq *q = b->seqs;
    for (int i = 0; i < b->n_echoes; i++) {
        int row = b->echoes[i].row;
        while (row >= q->row + q->n) q++;
        for (int g = 0; g < m->n_groups; g++)
            *slot_of(s, b->echoes[i].table, g, q->pos + row - q->row) = b->tokens[row];
    }
    q = b->seqs;
    for (int i = 0; i < b->n_out; i++) {
        int row = b->out_rows[i];
        while (row >= q->row + q->n) q++;
        int rc = run_row(s, q, q->pos + row - q->row, b->logits + (size_t)i * (size_t)m->n_vocab, err);
        if (rc) return rc;
    }
    if (end) wait_until(end);
    return 0;
}

static size_t block_bytes(const lr_model *m, int group)
{
    return (size_t)((const scripted *)m)->block_size * sizeof(int32_t);
}

static char *block_at(lr_model *m, int g, int b)
{
    return (char *)((scripted *)m)->ids[g] + (size_t)b * block_bytes(m, g);
}

static void kv_copy(lr_model *m, int g, int dst, int src)
{
    memcpy(block_at(m, g, dst), block_at(m, g, src), block_bytes(m, g));
}

static void kv_read(lr_model *m, int g, int b, void *dst) { memcpy(dst, block_at(m, g, b), block_bytes(m, g)); }

static void kv_write(lr_model *m, int g, int b, const void *src) { memcpy(block_at(m, g, b), src, block_bytes(m, g)); }

static void memory(const lr_model *m, size_t *weights, size_t *kv, size_t *work)
{
    const scripted *s = (const scripted *)m;
    *weights = 0;
    *kv = 0;
    for (int g = 0; g < m->n_groups; g++) *kv += s->ids[g] ? (size_t)s->n_blocks[g] * block_bytes(m, g) : 0;
    *work = (size_t)s->cfg.n_ctx * sizeof(int32_t);
}

static const lr_model_ops ops = {free_model, start, forward, kv_copy, block_bytes, kv_read, kv_write,
                                 memory,     NULL,  NULL,    NULL,    NULL,        NULL};

int lr_scripted_new(lr_model **out, const lr_scripted_config *cfg, lr_error *err)
{
    if (cfg->n_vocab < 1 || cfg->n_vocab > (int)LR_VOCAB_MAX) {
        return lr_fail(err, LR_EINVAL, "scripted model: %d is no vocabulary size", cfg->n_vocab);
    }
    if (cfg->n_ctx < 1 || cfg->n_ctx > 1 << 24)
        return lr_fail(err, LR_EINVAL, "scripted model: %d is no context", cfg->n_ctx);
    if (cfg->window < 0 || cfg->cost_ns < 0) return lr_fail(err, LR_EINVAL, "scripted model: negative window or cost");
    if (!cfg->next || !cfg->vocab)
        return lr_fail(err, LR_EINVAL, "scripted model: a function and a vocabulary are needed");
    scripted *s = lr_calloc(1, sizeof *s);
    if (s) s->gather = lr_calloc((size_t)cfg->n_ctx, sizeof(int32_t));
    if (!s || !s->gather) {
        lr_free(s);
        return lr_fail(err, LR_ENOMEM, "no memory for a scripted model");
    }
    s->cfg = *cfg;
    for (int g = 0; g < LR_KV_GROUPS; g++) s->layers[g] = (lr_kv_layer){.n_kv_heads = 1, .head_dim = 32, .group = g};
    int groups = cfg->window > 0 ? 2 : 1;
    s->m = (lr_model){.ops = &ops,
                      .n_vocab = cfg->n_vocab,
                      .n_embd = 1,
                      .n_ctx = cfg->n_ctx,
                      .n_kv_layers = groups,
                      .kv_layers = s->layers,
                      .n_groups = groups,
                      .window = {0, cfg->window},
                      .echoes = true,
                      .fingerprint = 0x5c819ed000000000u ^ (uint64_t)cfg->n_vocab << 20 ^ (uint64_t)cfg->window,
                      .vocab = lr_vocab_ref(cfg->vocab),
                      .name = "scripted"};
    *out = &s->m;
    return 0;
}
