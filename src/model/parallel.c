/* parallel.c - see parallel.h: how the run is divided, a model's life on all ranks, its KV blocks. */
#define _GNU_SOURCE
#include "base/mem.h"
#include "base/pool.h"
#include "model/parallel_int.h"
#include <sched.h>
#include <stdio.h>
#include <string.h>

enum { MICRO_ROWS = 128, MOST_MODELS = 1024 };

lr_division lr_parallel__run;
static parallel *models[MOST_MODELS]; /* of followers, by number */

/* ---- division ---- */

typedef struct seat {
    char host[64];
    cpu_set_t cores;
} seat;

/* Ranks of one host that may use the same cores share them. */
static int count_threads(lr_comm *world, int *out, lr_error *err)
{
    lr_dist_info info;
    seat mine;
    memset(&mine, 0, sizeof mine);
    lr_dist_get_info(&info);
    snprintf(mine.host, sizeof mine.host, "%.63s", info.host);
    if (sched_getaffinity(0, sizeof mine.cores, &mine.cores) != 0) CPU_ZERO(&mine.cores);
    seat *all = lr_calloc((size_t)world->size, sizeof *all);
    int *bytes = lr_calloc((size_t)world->size, sizeof *bytes), same = 0;
    int rc = all && bytes ? 0 : lr_fail(err, LR_ENOMEM, "no memory for a run of %d ranks", world->size);
    for (int r = 0; r < world->size && !rc; r++) bytes[r] = (int)sizeof *all;
    if (!rc) rc = world->ops->all_gather(world, &mine, all, bytes, err);
    for (int r = 0; r < world->size && !rc; r++) same += memcmp(&all[r], &mine, sizeof mine) == 0;
    lr_free(all);
    lr_free(bytes);
    int n = lr_pool_cores() / (same > 0 ? same : 1);
    *out = n > 0 ? n : 1;
    return rc;
}

int lr_parallel_setup(int tp, int pp, int micro_rows, lr_error *err)
{
    lr_comm *world = lr_dist_world();
    lr_division *d = &lr_parallel__run;
    int n = world ? world->size : 1;
    if (d->data) return lr_fail(err, LR_ESTATE, "the ranks are divided already");
    if (tp < 1 || pp < 1 || (int64_t)tp * pp != n)
        return lr_fail(err, LR_EINVAL, "--tp %d times --pp %d is not the number of processes, %d", tp, pp, n);
    if (!world) return lr_fail(err, LR_ESTATE, "there is only one process");
    d->place = (lr_place){tp, pp, world->rank % tp, world->rank / tp, NULL};
    d->micro_rows = micro_rows > 0 ? micro_rows : MICRO_ROWS;
    int rc = world->ops->split(world, d->place.stage, &d->place.group, err);
    if (!rc) rc = world->ops->split(world, 0, &d->data, err);
    return rc ? rc : count_threads(world, &d->threads, err);
}

const lr_place *lr_parallel_place(void) { return lr_parallel__run.data ? &lr_parallel__run.place : NULL; }
int lr_parallel_threads(void) { return lr_parallel__run.threads; }

/* ---- the model ---- */

static parallel *self(lr_model *m) { return (parallel *)m; }
static bool leads(const parallel *p) { return p->world->rank == 0; }

/* Something that only rank 0 knows went wrong: no rank would learn of it otherwise. */
static void must(int rc, const char *what, const lr_error *err)
{
    if (rc) lr_dist_die(what, err);
}

static void drop_buffers(parallel *p)
{
    lr_free(p->block_bytes);
    lr_free(p->block);
    lr_free_aligned(p->in);
    lr_free_aligned(p->res);
    lr_free_aligned(p->hid);
    lr_free_aligned(p->columns);
    lr_free(p->seqs);
    lr_free(p->micro_seqs);
    lr_free(p->out_rows);
    lr_free(p->out_all);
    lr_free(p->columns_at);
    lr_free(p->tables);
    lr_free(p->echoes);
    p->block_bytes = NULL;
    p->block = NULL;
    p->in = p->res = p->hid = p->columns = NULL;
    p->seqs = p->micro_seqs = NULL;
    p->out_rows = p->out_all = p->tables = NULL;
    p->columns_at = NULL;
    p->cap_tables = 0;
    p->echoes = NULL;
    p->cap_echoes = 0;
}

static void free_here(parallel *p)
{
    drop_buffers(p);
    lr_pack_deinit(&p->pack);
    lr_model_free(p->own);
    lr_vocab_unref(p->base.vocab);
    lr_free(p->base.kv_layers);
    lr_free(p);
}

static void model_free(lr_model *m)
{
    parallel *p = self(m);
    lr_error err;
    if (lr_dist_world()) { /* else: the run has ended */
        lr_pack_begin(&p->pack, LR_ORDER_FREE, p->id);
        must(lr_dist_tell(&p->pack, &err), "freeing a model", &err);
    }
    free_here(p);
}

static float *rows(int n, int width, int *failed)
{
    size_t bytes;
    float *f = NULL;
    if (n < 1 || width < 1) return NULL;
    if (lr_mul((size_t)n, (size_t)width * sizeof *f, &bytes)) f = lr_alloc_aligned(bytes);
    if (!f) *failed = 1;
    return f;
}

static int make_buffers(parallel *p, lr_error *err)
{
    const lr_share *t = p->part;
    const lr_place *pl = &lr_parallel__run.place;
    int failed = 0;
    size_t most = 1;
    drop_buffers(p);
    p->own_width = t->result_width;
    p->send_width = t->partial ? 0 : t->logits_at[pl->tp_rank + 1] - t->logits_at[pl->tp_rank];
    for (int g = 0; g < p->base.n_groups; g++)
        if (p->own->ops->kv_block_bytes(p->own, g) > most) most = p->own->ops->kv_block_bytes(p->own, g);
    p->block = lr_malloc(most);
    p->in = rows(p->max_rows, t->in_width, &failed);
    p->res = rows(t->partial ? p->max_rows : p->max_out, p->own_width, &failed);
    if (!t->partial) p->hid = rows(p->max_out, p->base.n_embd, &failed);
    if (leads(p)) p->columns = rows(p->max_out, p->base.n_vocab, &failed);
    p->block_bytes = lr_calloc((size_t)p->world->size, sizeof *p->block_bytes);
    p->seqs = lr_calloc((size_t)p->max_rows, sizeof *p->seqs);
    p->micro_seqs = lr_calloc((size_t)p->max_rows, sizeof *p->micro_seqs);
    p->out_rows = lr_calloc((size_t)p->max_out, sizeof *p->out_rows);
    p->out_all = lr_calloc((size_t)p->max_out, sizeof *p->out_all);
    p->columns_at = lr_calloc((size_t)pl->tp + 1, sizeof *p->columns_at);
    if (failed || !p->block || !p->block_bytes || !p->seqs || !p->micro_seqs || !p->out_rows || !p->out_all ||
        !p->columns_at)
        return lr_fail(err, LR_ENOMEM, "no memory for %d rows of a batch", p->max_rows);
    return 0;
}

/* Every rank learns how large blocks are elsewhere, and rank 0 how much memory all hold. */
static int exchange_sizes(parallel *p, lr_error *err)
{
    typedef struct sizes {
        int64_t block[LR_KV_GROUPS];
        uint64_t memory[3];
        int64_t columns; /* of the logits */
    } sizes;
    const lr_place *pl = &lr_parallel__run.place;
    int n = p->world->size, last = n - pl->tp;
    sizes mine = {0}, *all = lr_calloc((size_t)n, sizeof *all);
    int *bytes = lr_calloc((size_t)n, sizeof *bytes);
    size_t m[3] = {0};
    if (!all || !bytes) {
        lr_fail(err, LR_ENOMEM, "no memory for a run of %d ranks", n);
        must(err->code, "starting a model", err);
    }
    for (int g = 0; g < p->base.n_groups; g++) mine.block[g] = (int64_t)p->own->ops->kv_block_bytes(p->own, g);
    p->own->ops->memory(p->own, &m[0], &m[1], &m[2]);
    for (int i = 0; i < 3; i++) mine.memory[i] = m[i];
    mine.columns = p->send_width;
    for (int r = 0; r < n; r++) bytes[r] = (int)sizeof *all;
    int rc = p->data->ops->all_gather(p->data, &mine, all, bytes, err);
    memset(p->all_block_bytes, 0, sizeof p->all_block_bytes);
    memset(p->memory, 0, sizeof p->memory);
    for (int r = 0; r < n && !rc; r++) {
        memcpy(p->block_bytes[r], all[r].block, sizeof all[r].block);
        for (int g = 0; g < LR_KV_GROUPS; g++) p->all_block_bytes[g] += (size_t)all[r].block[g];
        for (int i = 0; i < 3; i++) p->memory[i] += (size_t)all[r].memory[i];
        if (r >= last) p->columns_at[r - last + 1] = p->columns_at[r - last] + (int)all[r].columns;
    }
    lr_free(all);
    lr_free(bytes);
    return rc;
}

/* The same on all ranks. */
static int start_here(parallel *p, const lr_kv_spec *s, int max_rows, int max_out, lr_error *err)
{
    p->max_rows = max_rows;
    p->max_out = max_out;
    p->block_size = s->block_size;
    memcpy(p->n_blocks, s->n_blocks, sizeof p->n_blocks);
    int rc = p->own->ops->start(p->own, s, max_rows, max_out, err);
    if (!rc) rc = make_buffers(p, err);
    rc = lr_dist_agree(rc, 0, err);
    return rc ? rc : exchange_sizes(p, err);
}

static void tell_start(parallel *p, lr_order kind, const lr_kv_spec *s, int max_rows, int max_out)
{
    lr_error err;
    const int v[] = {s->type, s->value_type, s->block_size, s->n_blocks[0], s->n_blocks[1], max_rows, max_out};
    lr_pack_begin(&p->pack, kind, p->id);
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) lr_pack_int(&p->pack, v[i]);
    must(lr_dist_tell(&p->pack, &err), "starting a model", &err);
}

static int model_start(lr_model *m, const lr_kv_spec *s, int max_rows, int max_out, lr_error *err)
{
    tell_start(self(m), LR_ORDER_START, s, max_rows, max_out);
    return start_here(self(m), s, max_rows, max_out, err);
}

static double pool_bytes(const lr_kv_spec *spec, const lr_model *m, int first_layer)
{
    const lr_kv_spec s = lr_model_kv_spec(m, spec, first_layer);
    double n = 0;
    for (int g = 0; g < m->n_groups; g++) n += (double)s.n_blocks[g] * (double)lr_kv_spec_block_bytes(&s, g);
    return n;
}

/* What the whole model's KV may take so that each rank's device has room for its part. The same on all ranks. */
static int least_room(parallel *p, const lr_kv_spec *s, int max_rows, int max_out, size_t *out, lr_error *err)
{
    int n = p->data->size;
    double own = pool_bytes(s, p->own, p->part->first_layer), most = (double)(SIZE_MAX / 2), mine = most;
    size_t room = p->own->ops->room ? p->own->ops->room(p->own, s, max_rows, max_out) : 0;
    double *all = lr_calloc((size_t)n, sizeof *all);
    int *bytes = lr_calloc((size_t)n, sizeof *bytes);
    if (room && own > 0) mine = (double)room * (pool_bytes(s, &p->base, 0) / own);
    int rc = lr_dist_agree(all && bytes ? 0 : lr_fail(err, LR_ENOMEM, "no memory for a run of %d ranks", n), 0, err);
    for (int r = 0; r < n && !rc; r++) bytes[r] = (int)sizeof *all;
    if (!rc) rc = p->data->ops->all_gather(p->data, &mine, all, bytes, err);
    for (int r = 0; r < n && !rc; r++)
        if (all[r] < most) most = all[r];
    *out = most > 1 ? (size_t)most : 1;
    lr_free(all);
    lr_free(bytes);
    return rc;
}

static size_t room(lr_model *m, const lr_kv_spec *s, int max_rows, int max_out)
{
    parallel *p = self(m);
    size_t n = p->own->ops->room ? p->own->ops->room(p->own, NULL, 0, 0) : 0;
    lr_error err;
    if (!n || !s) return n;
    tell_start(p, LR_ORDER_ROOM, s, max_rows, max_out);
    must(least_room(p, s, max_rows, max_out, &n, &err), "sizing a model's KV", &err);
    return n;
}

/* A follower's share of room and model_start. */
static int started(parallel *p, lr_order kind, lr_pack *b, lr_error *err)
{
    size_t least;
    lr_kv_spec s = {.type = (int)lr_pack_take(b, 0, 1 << 16), .value_type = (int)lr_pack_take(b, 0, 1 << 16)};
    s.block_size = (int)lr_pack_take(b, 1, 256);
    for (int g = 0; g < LR_KV_GROUPS; g++) s.n_blocks[g] = (int)lr_pack_take(b, 0, 1 << 28);
    int max_rows = (int)lr_pack_take(b, 1, 1 << 20), max_out = (int)lr_pack_take(b, 1, 1 << 20);
    if (b->bad) return lr_fail(err, LR_EFORMAT, "an order to start a model with numbers out of range");
    if (kind == LR_ORDER_ROOM) return least_room(p, &s, max_rows, max_out, &least, err);
    lr_error why; /* rank 0 has it too and tells */
    start_here(p, &s, max_rows, max_out, &why);
    return 0;
}

/* ---- KV ---- */

static void tell_blocks(parallel *p, lr_order kind, int a, int b, int c)
{
    lr_error err;
    lr_pack_begin(&p->pack, kind, p->id);
    lr_pack_int(&p->pack, a);
    lr_pack_int(&p->pack, b);
    lr_pack_int(&p->pack, c);
    must(lr_dist_tell(&p->pack, &err), "KV blocks", &err);
}

static void kv_copy(lr_model *m, int group, int dst, int src)
{
    parallel *p = self(m);
    tell_blocks(p, LR_ORDER_KV_COPY, group, dst, src);
    p->own->ops->kv_copy(p->own, group, dst, src);
}

static size_t kv_block_bytes(const lr_model *m, int group) { return ((const parallel *)m)->all_block_bytes[group]; }

static void kv_read(lr_model *m, int group, int block, void *dst)
{
    parallel *p = self(m);
    lr_error err;
    char *at = dst;
    tell_blocks(p, LR_ORDER_KV_READ, group, block, 0);
    p->own->ops->kv_read(p->own, group, block, at);
    for (int r = 1; r < p->data->size; r++) {
        at += p->block_bytes[r - 1][group];
        size_t n = (size_t)p->block_bytes[r][group];
        if (n) must(p->data->ops->recv(p->data, r, at, n, &err), "reading KV blocks", &err);
    }
}

static void kv_write(lr_model *m, int group, int block, const void *src)
{
    parallel *p = self(m);
    lr_error err;
    const char *at = src;
    tell_blocks(p, LR_ORDER_KV_WRITE, group, block, 0);
    p->own->ops->kv_write(p->own, group, block, at);
    for (int r = 1; r < p->data->size; r++) {
        at += p->block_bytes[r - 1][group];
        size_t n = (size_t)p->block_bytes[r][group];
        if (n) must(p->data->ops->send_start(p->data, r, at, n, &err), "writing KV blocks", &err);
    }
    must(p->data->ops->finish(p->data, &err), "writing KV blocks", &err);
}

/* A follower's share of kv_copy, kv_read, kv_write. */
static int blocks_moved(parallel *p, lr_order kind, lr_pack *b, lr_error *err)
{
    int g = (int)lr_pack_take(b, 0, p->base.n_groups - 1), most = p->n_blocks[g] - 1;
    int first = (int)lr_pack_take(b, 0, most), second = (int)lr_pack_take(b, 0, most);
    if (b->bad || !p->block) return lr_fail(err, LR_EFORMAT, "an order about KV blocks that are not there");
    size_t n = p->own->ops->kv_block_bytes(p->own, g);
    int rc = 0;
    if (n == 0) return 0;
    switch (kind) {
    case LR_ORDER_KV_COPY:
        p->own->ops->kv_copy(p->own, g, first, second);
        break;
    case LR_ORDER_KV_READ:
        p->own->ops->kv_read(p->own, g, first, p->block);
        rc = p->data->ops->send_start(p->data, 0, p->block, n, err);
        if (!rc) rc = p->data->ops->finish(p->data, err);
        break;
    default:
        rc = p->data->ops->recv(p->data, 0, p->block, n, err);
        if (!rc) p->own->ops->kv_write(p->own, g, first, p->block);
        break;
    }
    return rc;
}

static void memory(const lr_model *m, size_t *weights, size_t *kv, size_t *work)
{
    const parallel *p = (const parallel *)m;
    *weights = p->memory[0];
    *kv = p->memory[1];
    *work = p->memory[2];
}

/* ---- joining ---- */

static const lr_model_ops parallel_ops = {.free = model_free,
                                          .start = model_start,
                                          .forward = lr_parallel__forward,
                                          .kv_copy = kv_copy,
                                          .kv_block_bytes = kv_block_bytes,
                                          .kv_read = kv_read,
                                          .kv_write = kv_write,
                                          .memory = memory,
                                          .room = room};

int lr_parallel_join(lr_model **out, lr_model *part, int id, lr_error *err)
{
    const lr_division *d = &lr_parallel__run;
    if (id < 1 || id >= MOST_MODELS || models[id])
        return lr_fail(err, LR_ELIMIT, "model %d of a run that can have %d", id, MOST_MODELS - 1);
    parallel *p = lr_calloc(1, sizeof *p);
    const lr_share *t = lr_graph_share(part);
    lr_kv_layer *layers = t ? lr_memdup(t->whole_layers, (size_t)t->n_whole_layers * sizeof *layers) : NULL;
    if (!p || !layers) {
        lr_free(p);
        lr_free(layers);
        return lr_fail(err, LR_ENOMEM, "no memory for a model on several ranks");
    }
    lr_backend *be = lr_model_backend(part);
    int rc = lr_dist_devices(d->place.group, be->ops->gpu ? be->ops->gpu(be) : -1, err);
    if (rc) {
        lr_free(p);
        lr_free(layers);
        return rc;
    }
    p->base = *part;
    p->base.ops = &parallel_ops;
    p->base.draws = p->base.halves = false; /* other ranks wait for each step's tokens */
    p->base.peaks = false;                  /* each rank has some columns */
    p->base.vocab = lr_vocab_ref(part->vocab);
    p->base.kv_layers = layers;
    p->base.n_kv_layers = t->n_whole_layers;
    /* a saved block holds the parts of these ranks one behind the other */
    p->base.fingerprint ^= 0x9e3779b97f4a7c15u * ((uint64_t)d->place.tp << 16 ^ (uint64_t)d->place.pp);
    p->own = part;
    p->part = t;
    p->id = id;
    p->world = lr_dist_world();
    p->data = d->data;
    *out = leads(p) ? &p->base : NULL;
    if (!leads(p)) models[id] = p;
    return 0;
}

static int obey(parallel *p, lr_order kind, lr_pack *b, lr_error *err)
{
    switch (kind) {
    case LR_ORDER_ROOM:
    case LR_ORDER_START:
        return started(p, kind, b, err);
    case LR_ORDER_FORWARD:
        return lr_parallel__forwarded(p, b, err);
    case LR_ORDER_KV_COPY:
    case LR_ORDER_KV_READ:
    case LR_ORDER_KV_WRITE:
        return blocks_moved(p, kind, b, err);
    case LR_ORDER_FREE:
        models[p->id] = NULL;
        free_here(p);
        return 0;
    default:
        return lr_fail(err, LR_EFORMAT, "order %d is not for a model", (int)kind);
    }
}

lr_order lr_parallel_follow(int *model, const char **body, size_t *len)
{
    static lr_pack pack;
    static const char *const doing[] = {
        "",        "the end",           "loading",           "sizing a model's KV", "starting a model", "forward pass",
        "KV copy", "reading KV blocks", "writing KV blocks", "freeing a model"};
    lr_error err;
    for (;;) {
        lr_order kind;
        must(lr_dist_hear(&pack, &kind, model, &err), "waiting for rank 0", &err);
        if (kind == LR_ORDER_LOAD || kind == LR_ORDER_QUIT) {
            *len = pack.n - pack.at;
            *body = lr_pack_get(&pack, *len);
            if (kind == LR_ORDER_QUIT) {
                for (int i = 0; i < MOST_MODELS; i++)
                    if (models[i]) free_here(models[i]);
                lr_pack_deinit(&pack);
            }
            return kind;
        }
        parallel *p = *model > 0 && *model < MOST_MODELS ? models[*model] : NULL;
        if (!p) must(lr_fail(&err, LR_EFORMAT, "an order for model %d, which is not there", *model), doing[kind], &err);
        must(obey(p, kind, &pack, &err), doing[kind], &err);
        if (kind == LR_ORDER_FREE) return kind;
    }
}

bool lr_parallel_get_stats(const lr_model *m, lr_parallel_stats *s)
{
    if (m->ops != &parallel_ops) return false;
    const lr_division *d = &lr_parallel__run;
    *s = ((const parallel *)m)->stats;
    s->tp = d->place.tp;
    s->pp = d->place.pp;
    return true;
}

lr_model *lr_parallel_own(lr_model *m) { return m->ops == &parallel_ops ? self(m)->own : m; }
