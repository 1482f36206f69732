/* look.c - what a block is, for people to look at. See kv.h. */
#include "kv/kv_int.h"

bool lr_kv_look(const lr_kv *kv, int g, int block, lr_kv_view *out)
{
    if (g < 0 || g >= kv->cfg.n_groups || block < 0 || block >= kv->group[g].n) return false;
    const kv_block *b = &kv->group[g].blocks[block];
    const lr_kv_node *n = b->node;
    *out = (lr_kv_view){.refs = b->ref, .indexed = n != NULL, .parent = -1};
    if (!n) return true;
    out->depth = n->depth;
    out->hits = n->hits;
    out->last_used = n->last_used;
    if (n->parent && n->parent->depth > 0) out->parent = n->parent->block[g];
    return true;
}
