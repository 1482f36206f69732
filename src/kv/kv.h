/* kv.h - who owns which KV block: the block pool, the block tables of sequences, and the prefix index.
 *
 * The backend stores the keys and values; this module only deals in block numbers. A block holds block_size token slots
 * of every layer of its group. Group g has a pool of its own and, if window[g] > 0, a sliding window: a row at position
 * p looks at positions p - window + 1 .. p only, so blocks that lie wholly before that are let go as a table moves on.
 *
 * A block is in one of three states: free; used (reference count = number of tables that hold it); cached (no table
 * holds it, but the index knows what it contains, so a later prompt may take it up again; it can be evicted).
 * The index is a radix tree. A node stands for one full block of tokens behind its parent's; the root of each tree is a
 * namespace (lr_kv_space), so prompts of different salt or adapter never meet. A lookup hashes, but a hit is decided by
 * comparing parent and tokens. A node knows a block per group, and may lack one (evicted, or fallen out of a window).
 * With a spill file, what is evicted is written there first and comes back when a prompt asks for it (only for models
 * without windows). The file has no name, so nothing is left behind; each block is checked when it is read.
 *
 * A table (lr_kv_table) belongs to one sequence: its blocks, how many leading tokens have valid KV ("computed"), and
 * how far the index knows it. Tables share blocks; a block that is shared or indexed is copied before it is written.
 * Invariants (lr_kv_check): references equal holders; free + used + cached = total; indexed blocks of a table are the
 * ones its index nodes name. Engine thread only. After lr_kv_new only lr_kv_space_get, lr_kv_table_reserve and
 * lr_kv_table_fork allocate memory.
 */
#ifndef LR_KV_KV_H
#define LR_KV_KV_H
#include "backend/backend.h"
#include "base/error.h"
#include "base/str.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct lr_kv lr_kv;
typedef struct lr_kv_space lr_kv_space; /* a namespace of the index */
typedef struct lr_kv_node lr_kv_node;

/* A cached leaf of the index, as a score function sees it. */
typedef struct lr_kv_leaf {
    uint64_t tag;     /* of the sequence that last held it (lr_kv_table.tag) */
    int n_tokens;     /* length of the prefix that it ends */
    uint64_t hits;    /* times that a prompt took it up */
    double last_used; /* seconds on the clock of the pool's owner */
} lr_kv_leaf;

/* What moves block contents; all run at once, in order. */
typedef struct lr_kv_mover {
    void *user;
    void (*copy)(void *user, int group, int dst, int src);
    void (*read)(void *user, int group, int block, void *dst); /* block_bytes[group] bytes */
    void (*write)(void *user, int group, int block, const void *src);
    size_t block_bytes[LR_KV_GROUPS];
} lr_kv_mover;

typedef struct lr_kv_config {
    int block_size;             /* 1..256 */
    int n_groups;               /* 1..LR_KV_GROUPS */
    int n_blocks[LR_KV_GROUPS]; /* >= 1 for each group in use */
    int window[LR_KV_GROUPS];   /* 0 = sees everything */
    bool prefix_cache;          /* false: nothing is indexed, nothing is found */
    int hash_bits;              /* test hook: keep only so many bits of a hash; 0 = all */
    int evict_scan;             /* leaves that a score function is asked about per eviction; 0 = 256 */
    const char *spill;          /* folder, or file to be made, that evicted blocks go to; NULL = they are forgotten */
    size_t spill_bytes;         /* at most; the oldest go first */
    lr_kv_mover mover;
} lr_kv_config;

/* Per group: total = free + used + cached. */
typedef struct lr_kv_stats {
    int total, free, used, cached;
    uint64_t evicted;                           /* blocks taken from the cache since the start */
    uint64_t copied;                            /* blocks copied on write */
    int spilled;                                /* blocks whose contents the spill file holds (group 0) */
    uint64_t spill_out, spill_in, spill_failed; /* blocks written, brought back; reads and writes that went wrong */
} lr_kv_stats;

int lr_kv_new(lr_kv **out, const lr_kv_config *cfg, lr_error *err);
/* All tables must be deinitialised. */
void lr_kv_free(lr_kv *);
void lr_kv_get_stats(const lr_kv *, int group, lr_kv_stats *);
/* Blocks that could be had now: free + cached. */
int lr_kv_available(const lr_kv *, int group);
/* The time that blocks are stamped with. */
void lr_kv_set_time(lr_kv *, double now);
/* Lowest score is evicted first; NaN or NULL fn = least recently used. Asked about leaves of groups without a window.
 */
void lr_kv_set_score(lr_kv *, double (*fn)(void *user, const lr_kv_leaf *leaf), void *user);
/* Forgets every cached block that no table holds. */
void lr_kv_drop_cached(lr_kv *);
/* Verifies every invariant; 0 or LR_ESTATE with a text that says which is broken. For tests; slow. */
int lr_kv_check(const lr_kv *, lr_error *err);

/* The namespace of a salt and an adapter name (either may be empty; compared byte by byte, never mixed up). Takes a
 * reference that lr_kv_space_unref gives back. */
int lr_kv_space_get(lr_kv *, lr_str salt, lr_str adapter, lr_kv_space **out, lr_error *err);
lr_kv_space *lr_kv_space_ref(lr_kv_space *);
void lr_kv_space_unref(lr_kv *, lr_kv_space *);

/* Fields are for reading only, tag excepted. */
typedef struct lr_kv_table {
    int32_t *block[LR_KV_GROUPS]; /* (cap) block of each block_size positions; -1 = let go (before the window) */
    int n[LR_KV_GROUPS];          /* entries in use; they may reach past `computed` (room for a coming batch) */
    int first[LR_KV_GROUPS];      /* entries below are -1 */
    int cap;
    int computed;     /* leading tokens with valid KV */
    int n_indexed;    /* leading full blocks that the index knows */
    uint64_t tag;     /* copied to the index nodes that the table makes or takes up */
    lr_kv_node *tail; /* node of block n_indexed - 1 (the space's root if 0) */
    lr_kv_space *space;
    struct lr_kv_table *prev, *next; /* all tables of the pool */
} lr_kv_table;

/* An empty table in a namespace (a reference to it is taken). */
void lr_kv_table_init(lr_kv *, lr_kv_table *, lr_kv_space *space);
/* Lets go of everything. */
void lr_kv_table_deinit(lr_kv *, lr_kv_table *);
/* Also changes the nodes behind the table that carry its old tag. */
void lr_kv_table_set_tag(lr_kv_table *, uint64_t tag);
/* Memory for the entries of n tokens. */
int lr_kv_table_reserve(lr_kv *, lr_kv_table *, int n_tokens, lr_error *err);
/* dst (initialised, empty) becomes a copy of src that shares all its blocks. */
int lr_kv_table_fork(lr_kv *, lr_kv_table *dst, const lr_kv_table *src, lr_error *err);
/* Takes up blocks that the index knows for tokens[computed..], at most so that computed <= limit (<= tokens at hand);
 * whole blocks, and the matching part of one more by copying. A length counts as a hit only if every group has all that
 * a row at that length looks at. Needs lr_kv_table_reserve(limit). Returns the tokens gained. */
int lr_kv_table_match(lr_kv *, lr_kv_table *, const int32_t *tokens, int limit);
/* What match would give for an empty table (whole blocks only), changing nothing. held: blocks of it in group 0 that
 * tables hold now (they take nothing from lr_kv_available); may be NULL. */
int lr_kv_space_peek(const lr_kv *, const lr_kv_space *, const int32_t *tokens, int limit, int *held);
/* Makes the slots of positions computed .. computed + n - 1 writable: blocks are allocated (evicting cached ones) or
 * copied. True, or false with nothing changed but *group and *missing (blocks short) set. Reserve first. */
bool lr_kv_table_grow(lr_kv *, lr_kv_table *, int n, int *group, int *missing);
/* n more tokens are computed: indexes blocks that became full (taking the index's own block where it has one) and lets
 * go of blocks that left the window. tokens: the whole sequence. */
void lr_kv_table_advance(lr_kv *, lr_kv_table *, const int32_t *tokens, int n);
/* computed = min(computed, n), and frees what lies beyond; 0 if a window no longer reaches back far enough (match may
 * find the blocks again). */
void lr_kv_table_truncate(lr_kv *, lr_kv_table *, int n);
/* Frees entries that reach past computed. */
void lr_kv_table_trim(lr_kv *, lr_kv_table *);
/* Lets go of all blocks (cached ones stay in the index); computed = 0. */
void lr_kv_table_drop(lr_kv *, lr_kv_table *);
/* Exchanges the entries from computed / block_size on of two tables of one namespace, the second of which began as a
 * fork of the first: what t holds for its coming rows becomes other's, and the other way round. Each must have reserved
 * what the other one holds. */
void lr_kv_table_swap(lr_kv *, lr_kv_table *t, lr_kv_table *other);
/* Blocks held in a group. */
int lr_kv_table_held(const lr_kv_table *, int group);
/* Bytes that lr_kv_table_read writes: the contents of all held blocks, group by group, in table order. */
size_t lr_kv_table_bytes(const lr_kv *, const lr_kv_table *);
void lr_kv_table_read(const lr_kv *, const lr_kv_table *, void *dst);
/* Fills an empty table with the contents that read gave: computed tokens, entries first[g] .. of each group. False if
 * the pool has no room, changing nothing. Reserve first. */
bool lr_kv_table_write(lr_kv *, lr_kv_table *, int computed, const int first[LR_KV_GROUPS], const void *src);

/* A block, for people to look at: tables that hold it; whether the index knows it, and then: its place from the root
 * (1, 2, ...), the block before it (-1: none that is held or cached), times that it was taken up, and when last. */
typedef struct lr_kv_view {
    int refs;
    bool indexed;
    int depth, parent;
    uint64_t hits;
    double last_used;
} lr_kv_view;
/* False: there is no such block. */
bool lr_kv_look(const lr_kv *, int group, int block, lr_kv_view *out);

/* Blocks that `n` computed tokens plus `rows` more need at most in a group, alone. */
int lr_kv_need(const lr_kv *, int group, int n, int rows);

#endif
