/* check.c - verifies the invariants that kv.h names; used by tests after every step. */
#include "kv/kv_int.h"
#include "base/mem.h"
#include <string.h>

static int check_group(const lr_kv *kv, int g, lr_error *err)
{
    const kv_group *p = &kv->group[g];
    int32_t *holders = lr_calloc((size_t)p->n, sizeof *holders);
    int rc = 0, n_free = 0, n_cached = 0, prev = -1;
    if (!holders) return lr_fail(err, LR_ENOMEM, "no memory to check the KV pool");
    for (const lr_kv_table *t = kv->tables; t; t = t->next) {
        for (int i = 0; i < t->n[g]; i++) {
            int b = t->block[g][i];
            if ((b < 0) != (i < t->first[g]) || b >= p->n) {
                rc = lr_fail(err, LR_ESTATE, "group %d: entry %d of a table is %d, first is %d", g, i, b, t->first[g]);
                goto out;
            }
            if (b >= 0) holders[b]++;
        }
    }
    for (int b = p->free; b >= 0 && n_free <= p->n; b = p->blocks[b].next, n_free++) {
        if (p->blocks[b].ref || p->blocks[b].node) {
            rc = lr_fail(err, LR_ESTATE, "group %d: free block %d is in use", g, b);
            goto out;
        }
        holders[b] = -1;
    }
    for (int b = p->oldest; b >= 0 && n_cached <= p->n; prev = b, b = p->blocks[b].next, n_cached++) {
        if (p->blocks[b].ref || !p->blocks[b].node || p->blocks[b].prev != prev) {
            rc = lr_fail(err, LR_ESTATE, "group %d: cached block %d is not one", g, b);
            goto out;
        }
    }
    if (n_free != p->n_free || n_cached != p->n_cached) {
        rc = lr_fail(err, LR_ESTATE, "group %d: %d free (%d counted), %d cached (%d counted)", g, p->n_free, n_free,
                     p->n_cached, n_cached);
        goto out;
    }
    for (int b = 0; b < p->n && !rc; b++) {
        const kv_block *x = &p->blocks[b];
        if (holders[b] >= 0 && holders[b] != x->ref) {
            rc = lr_fail(err, LR_ESTATE, "group %d: block %d has %d references, %d holders", g, b, x->ref, holders[b]);
        } else if (holders[b] == 0 && !x->node) {
            rc = lr_fail(err, LR_ESTATE, "group %d: block %d is lost", g, b);
        } else if (x->node && x->node->block[g] != b) {
            rc = lr_fail(err, LR_ESTATE, "group %d: block %d and its node disagree", g, b);
        }
    }
out:
    lr_free(holders);
    return rc;
}

static int check_node(const lr_kv *kv, const lr_kv_node *n, lr_error *err)
{
    int children = 0;
    const lr_kv_node *prev = NULL;
    for (const lr_kv_node *c = n->child; c; prev = c, c = c->sib_next, children++) {
        if (c->parent != n || c->sib_prev != prev || c->depth != n->depth + 1) {
            return lr_fail(err, LR_ESTATE, "index: child %d at depth %d is not linked to its parent", children,
                           n->depth);
        }
    }
    if (!n->parent) return 0;
    if (lr_kv__find_child(kv, n->parent, lr_kv__node_tokens(kv, n)) != n) {
        return lr_fail(err, LR_ESTATE, "index: a node at depth %d is not found by its tokens", n->depth);
    }
    if (n->slot >= 0 && lr_kv__spill_node(kv, n->slot) != n) {
        return lr_fail(err, LR_ESTATE, "index: a node names spill slot %d, which does not know it", n->slot);
    }
    bool needed = n->child || n->users > 0 || n->slot >= 0;
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        int b = n->block[g];
        if (b >= 0 && kv->group[g].blocks[b].node != n) {
            return lr_fail(err, LR_ESTATE, "index: a node names block %d of group %d, which does not know it", b, g);
        }
        needed = needed || b >= 0;
    }
    return needed ? 0 : lr_fail(err, LR_ESTATE, "index: a node at depth %d is of no use", n->depth);
}

static int check_table(const lr_kv *kv, const lr_kv_table *t, lr_error *err)
{
    int bs = kv->cfg.block_size;
    if (t->n_indexed * bs > t->computed) return lr_fail(err, LR_ESTATE, "a table is indexed past what is computed");
    const lr_kv_node *n = t->tail;
    if (n->depth != t->n_indexed) return lr_fail(err, LR_ESTATE, "a table's tail is at depth %d", n->depth);
    for (int i = t->n_indexed; i-- > 0; n = n->parent) {
        for (int g = 0; g < kv->cfg.n_groups; g++) {
            if (t->block[g][i] >= 0 && t->block[g][i] != n->block[g]) {
                return lr_fail(err, LR_ESTATE, "group %d: entry %d of a table is not the index's block", g, i);
            }
        }
    }
    if (n != &t->space->root) return lr_fail(err, LR_ESTATE, "a table's tail is in another namespace");
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        if (t->n[g] < lr_kv__ceil_blocks(kv, t->computed)) {
            return lr_fail(err, LR_ESTATE, "group %d: a table lacks blocks of computed tokens", g);
        }
        if (t->first[g] > lr_kv__window_first(kv, g, t->computed)) {
            return lr_fail(err, LR_ESTATE, "group %d: a table lacks blocks of its window", g);
        }
    }
    return 0;
}

int lr_kv_check(const lr_kv *kv, lr_error *err)
{
    int n_nodes = 0, rc = 0;
    for (int g = 0; g < kv->cfg.n_groups && !rc; g++) rc = check_group(kv, g, err);
    for (const lr_kv_table *t = kv->tables; t && !rc; t = t->next) rc = check_table(kv, t, err);
    for (uint64_t b = 0; b <= kv->bucket_mask && !rc; b++) {
        for (const lr_kv_node *n = kv->bucket[b]; n && !rc; n = n->hash_next, n_nodes++) rc = check_node(kv, n, err);
    }
    for (int i = 0; i < KV_SPACE_BUCKETS && !rc; i++) {
        for (const lr_kv_space *s = kv->spaces[i]; s && !rc; s = s->next) rc = check_node(kv, &s->root, err);
    }
    if (!rc && n_nodes != kv->n_nodes_used) {
        rc = lr_fail(err, LR_ESTATE, "index: %d nodes in use, %d found", kv->n_nodes_used, n_nodes);
    }
    return rc;
}
