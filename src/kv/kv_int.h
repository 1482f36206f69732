/* kv_int.h - inside of src/kv: blocks, index nodes, and the calls between pool.c, index.c and table.c.
 *
 * Free blocks of a group are a stack linked by `next`; cached ones a doubly linked list, longest unused first. A table
 * lets go of its blocks from the last to the first, so in that list a child always comes before its parent: evicting
 * from the front is leaf first by itself.
 */
#ifndef LR_KV_KV_INT_H
#define LR_KV_KV_INT_H
#include "kv/kv.h"

typedef struct kv_block {
    int32_t ref;        /* tables that hold it */
    int32_t prev, next; /* free stack or cached list, -1 = end */
    lr_kv_node *node;   /* the node that names it, NULL = not indexed */
} kv_block;

typedef struct kv_group {
    kv_block *blocks; /* (n) */
    int n, n_free, n_cached;
    int32_t free;           /* top of the stack */
    int32_t oldest, newest; /* ends of the cached list */
    int window;
    uint64_t evicted, copied;
} kv_group;

struct lr_kv_node {
    lr_kv_node *parent; /* NULL = a root */
    lr_kv_node *child;  /* the latest child */
    lr_kv_node *sib_prev, *sib_next;
    lr_kv_node *hash_next; /* bucket chain; also the free list of nodes */
    uint64_t hash;
    int32_t block[LR_KV_GROUPS]; /* -1 = none */
    int32_t slot;                /* of the spill file, -1 = none */
    int32_t users;               /* tables whose tail it is, and calls that hold it */
    int32_t depth;               /* blocks from the root, itself included; 0 = a root */
    uint64_t tag, hits;
    double last_used;
};

struct lr_kv_space {
    lr_kv_node root; /* first: a root node is its space */
    lr_kv_space *next;
    char *key; /* length of the salt (8 bytes), salt, adapter */
    size_t key_n;
    uint64_t key_hash;
    int refs;
};

typedef struct kv_spill kv_spill;

#define KV_SPACE_BUCKETS 256

struct lr_kv {
    lr_kv_config cfg;
    kv_group group[LR_KV_GROUPS];
    lr_kv_node *nodes;    /* (n_nodes) */
    int32_t *node_tokens; /* (n_nodes, block_size) */
    int n_nodes, n_nodes_used;
    lr_kv_node *free_node;
    lr_kv_node **bucket; /* (bucket_mask + 1) */
    uint64_t bucket_mask, hash_mask;
    lr_kv_space *spaces[KV_SPACE_BUCKETS];
    uint64_t space_serial;
    lr_kv_table *tables;
    double now;
    double (*score)(void *user, const lr_kv_leaf *leaf);
    void *score_user;
    kv_spill *spill;   /* NULL = none */
    lr_kv_node **path; /* (n_blocks[0]) scratch of take_hit */
};

static inline int lr_kv__ceil_blocks(const lr_kv *kv, int tokens)
{
    return (int)(((int64_t)tokens + kv->cfg.block_size - 1) / kv->cfg.block_size);
}

/* pool.c */
void lr_kv__ref(lr_kv *, int g, int b);
void lr_kv__deref(lr_kv *, int g, int b);
/* A block with one reference, evicting if need be; -1 = none. */
int lr_kv__alloc(lr_kv *, int g);
/* Cuts the tie of node and block; a block without holders becomes free. The node may cease to exist. */
void lr_kv__unlink(lr_kv *, lr_kv_node *node, int g);

/* index.c */
int lr_kv__index_init(lr_kv *, lr_error *err);
void lr_kv__index_deinit(lr_kv *);
const int32_t *lr_kv__node_tokens(const lr_kv *, const lr_kv_node *);
lr_kv_node *lr_kv__find_child(const lr_kv *, const lr_kv_node *parent, const int32_t *tokens);
/* NULL when the node memory is used up. */
lr_kv_node *lr_kv__add_child(lr_kv *, lr_kv_node *parent, const int32_t *tokens);
/* Frees the node if nothing needs it any more, and then its parents likewise; a root's space too. */
void lr_kv__node_gc(lr_kv *, lr_kv_node *);
/* The longest usable hit behind `from` (blocks from_blocks, run[g] of the last of which are at hand): returns its
 * length in blocks (>= from_blocks) and its last node. */
int lr_kv__find_hit(const lr_kv *, lr_kv_node *from, int from_blocks, const int run[LR_KV_GROUPS],
                    const int32_t *tokens, int limit, lr_kv_node **end);
/* What a prompt could take up of group g here: a block, or a copy in the spill file. */
static inline bool lr_kv__has(const lr_kv_node *n, int g) { return n->block[g] >= 0 || (g == 0 && n->slot >= 0); }
/* First block that a row at position len looks at in group g. */
static inline int lr_kv__window_first(const lr_kv *kv, int g, int len)
{
    int w = kv->group[g].window;
    return w == 0 || len < w ? 0 : (len - w + 1) / kv->cfg.block_size;
}

/* spill.c */
int lr_kv__spill_new(lr_kv *, lr_error *err);
void lr_kv__spill_free(lr_kv *);
/* Writes the node's block of group 0 to the file, unless a copy is there. Errors: there is none. */
void lr_kv__spill_out(lr_kv *, lr_kv_node *);
/* Reads the node's copy into block b; false (and the copy is gone) if that fails. The caller holds the node. */
bool lr_kv__spill_in(lr_kv *, lr_kv_node *, int b);
/* Forgets the node's copy. The node may cease to exist. */
void lr_kv__spill_drop(lr_kv *, lr_kv_node *);
void lr_kv__spill_drop_all(lr_kv *);
int lr_kv__spill_slots(const lr_kv *);
void lr_kv__spill_stats(const lr_kv *, lr_kv_stats *);
/* The node whose copy a slot holds, NULL = free. For lr_kv_check. */
const lr_kv_node *lr_kv__spill_node(const lr_kv *, int slot);

#endif
