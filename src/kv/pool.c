/* pool.c - KV blocks: free, used, cached; reference counts and eviction. See kv.h. */
#include "kv/kv_int.h"
#include "base/mem.h"
#include <limits.h>
#include <math.h>
#include <string.h>

static int check_config(const lr_kv_config *c, lr_error *err)
{
    if (c->block_size < 1 || c->block_size > 256) {
        return lr_fail(err, LR_EINVAL, "KV block size %d is not 1..256", c->block_size);
    }
    if (c->n_groups < 1 || c->n_groups > LR_KV_GROUPS) {
        return lr_fail(err, LR_EINVAL, "%d KV block groups, 1..%d are possible", c->n_groups, LR_KV_GROUPS);
    }
    for (int g = 0; g < c->n_groups; g++) {
        if (c->n_blocks[g] < 1 || c->n_blocks[g] > INT_MAX / 4 / c->block_size) {
            return lr_fail(err, LR_EINVAL, "%d KV blocks of %d tokens in group %d are not possible", c->n_blocks[g],
                           c->block_size, g);
        }
        if (c->window[g] < 0) return lr_fail(err, LR_EINVAL, "KV group %d has a negative window", g);
    }
    return 0;
}

int lr_kv_new(lr_kv **out, const lr_kv_config *cfg, lr_error *err)
{
    int rc = check_config(cfg, err);
    if (rc) return rc;
    lr_kv *kv = lr_calloc(1, sizeof *kv);
    if (!kv) return lr_fail(err, LR_ENOMEM, "no memory for the KV pool");
    kv->cfg = *cfg;
    if (kv->cfg.evict_scan <= 0) kv->cfg.evict_scan = 256;
    for (int g = 0; g < cfg->n_groups; g++) {
        kv_group *p = &kv->group[g];
        p->n = p->n_free = cfg->n_blocks[g];
        p->window = cfg->window[g];
        p->oldest = p->newest = -1;
        p->blocks = lr_calloc((size_t)p->n, sizeof *p->blocks);
        if (!p->blocks) {
            rc = lr_fail(err, LR_ENOMEM, "no memory for %d KV block records", p->n);
            goto fail;
        }
        for (int b = 0; b < p->n; b++) p->blocks[b].next = b + 1 < p->n ? b + 1 : -1;
    }
    rc = cfg->spill && cfg->prefix_cache ? lr_kv__spill_new(kv, err) : 0;
    if (!rc) rc = lr_kv__index_init(kv, err);
    if (rc) goto fail;
    *out = kv;
    return 0;
fail:
    lr_kv_free(kv);
    return rc;
}

void lr_kv_free(lr_kv *kv)
{
    if (!kv) return;
    lr_kv__index_deinit(kv);
    lr_kv__spill_free(kv);
    for (int g = 0; g < LR_KV_GROUPS; g++) lr_free(kv->group[g].blocks);
    lr_free(kv);
}

void lr_kv_get_stats(const lr_kv *kv, int g, lr_kv_stats *s)
{
    memset(s, 0, sizeof *s);
    if (g < 0 || g >= kv->cfg.n_groups) return;
    const kv_group *p = &kv->group[g];
    *s = (lr_kv_stats){.total = p->n,
                       .free = p->n_free,
                       .cached = p->n_cached,
                       .used = p->n - p->n_free - p->n_cached,
                       .evicted = p->evicted,
                       .copied = p->copied};
    if (g == 0 && kv->spill) lr_kv__spill_stats(kv, s);
}

int lr_kv_available(const lr_kv *kv, int g) { return kv->group[g].n_free + kv->group[g].n_cached; }

void lr_kv_set_time(lr_kv *kv, double now) { kv->now = now; }

void lr_kv_set_score(lr_kv *kv, double (*fn)(void *user, const lr_kv_leaf *leaf), void *user)
{
    kv->score = fn;
    kv->score_user = user;
}

static void push_free(kv_group *p, int b)
{
    p->blocks[b].next = p->free;
    p->free = b;
    p->n_free++;
}

static void cached_append(kv_group *p, int b)
{
    p->blocks[b].prev = p->newest;
    p->blocks[b].next = -1;
    if (p->newest >= 0) {
        p->blocks[p->newest].next = b;
    } else {
        p->oldest = b;
    }
    p->newest = b;
    p->n_cached++;
}

static void cached_remove(kv_group *p, int b)
{
    kv_block *x = &p->blocks[b];
    if (x->prev >= 0) {
        p->blocks[x->prev].next = x->next;
    } else {
        p->oldest = x->next;
    }
    if (x->next >= 0) {
        p->blocks[x->next].prev = x->prev;
    } else {
        p->newest = x->prev;
    }
    p->n_cached--;
}

void lr_kv__ref(lr_kv *kv, int g, int b)
{
    kv_group *p = &kv->group[g];
    if (p->blocks[b].ref++ == 0) cached_remove(p, b);
}

void lr_kv__deref(lr_kv *kv, int g, int b)
{
    kv_group *p = &kv->group[g];
    if (--p->blocks[b].ref > 0) return;
    if (p->blocks[b].node) {
        p->blocks[b].node->last_used = kv->now;
        cached_append(p, b);
    } else {
        push_free(p, b);
    }
}

void lr_kv__unlink(lr_kv *kv, lr_kv_node *node, int g)
{
    kv_group *p = &kv->group[g];
    int b = node->block[g];
    node->block[g] = -1;
    p->blocks[b].node = NULL;
    if (p->blocks[b].ref == 0) {
        cached_remove(p, b);
        push_free(p, b);
    }
    lr_kv__node_gc(kv, node);
}

/* The block to evict: the front of the list, or the leaf with the lowest score among the first evict_scan. */
static int pick_victim(lr_kv *kv, int g)
{
    kv_group *p = &kv->group[g];
    int best = p->oldest, seen = 0;
    double best_score = 0;
    if (!kv->score || p->window > 0) return best;
    for (int b = p->oldest; b >= 0 && seen < kv->cfg.evict_scan; b = p->blocks[b].next) {
        const lr_kv_node *n = p->blocks[b].node;
        if (n->child) continue;
        lr_kv_leaf leaf = {
            .tag = n->tag, .n_tokens = n->depth * kv->cfg.block_size, .hits = n->hits, .last_used = n->last_used};
        double s = kv->score(kv->score_user, &leaf);
        if (isnan(s)) return p->oldest;
        if (seen++ == 0 || s < best_score) {
            best = b;
            best_score = s;
        }
    }
    return best;
}

/* Evicts one cached block of group g; without its full-view block a node is no hit, so its other blocks go too. */
static void evict(lr_kv *kv, int g)
{
    kv_group *p = &kv->group[g];
    lr_kv_node *node = p->blocks[pick_victim(kv, g)].node;
    p->evicted++;
    node->users++; /* keeps it while blocks are taken away */
    if (kv->spill && g == 0) lr_kv__spill_out(kv, node);
    if (p->window == 0) {
        for (int h = 0; h < kv->cfg.n_groups; h++) {
            if (h == g || node->block[h] < 0 || kv->group[h].blocks[node->block[h]].ref) continue;
            kv->group[h].evicted++;
            lr_kv__unlink(kv, node, h);
        }
    }
    lr_kv__unlink(kv, node, g);
    node->users--;
    lr_kv__node_gc(kv, node);
}

int lr_kv__alloc(lr_kv *kv, int g)
{
    kv_group *p = &kv->group[g];
    if (p->n_free == 0) {
        if (p->n_cached == 0) return -1;
        evict(kv, g);
    }
    int b = p->free;
    p->free = p->blocks[b].next;
    p->n_free--;
    p->blocks[b] = (kv_block){.ref = 1, .prev = -1, .next = -1};
    return b;
}

void lr_kv_drop_cached(lr_kv *kv)
{
    lr_kv__spill_drop_all(kv);
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        while (kv->group[g].n_cached) lr_kv__unlink(kv, kv->group[g].blocks[kv->group[g].oldest].node, g);
    }
}

int lr_kv_need(const lr_kv *kv, int g, int n, int rows)
{
    int64_t bs = kv->cfg.block_size, all = ((int64_t)n + rows + bs - 1) / bs, w = kv->group[g].window;
    /* a span of w + rows positions, at worst placed so that it touches a block more at each end */
    int64_t span = (w + rows + 2 * bs - 2) / bs;
    return (int)(w > 0 && span < all ? span : all);
}
