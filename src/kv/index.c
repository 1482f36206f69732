/* index.c - the prefix index: a radix tree over full blocks of tokens, one tree a namespace, and a hash table over all
 * nodes. See kv.h. */
#include "kv/kv_int.h"
#include "base/mem.h"
#include <string.h>

static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 29;
}

int lr_kv__index_init(lr_kv *kv, lr_error *err)
{
    size_t n = 0, n_buckets = 16, n_tokens;
    for (int g = 0; g < kv->cfg.n_groups; g++) n += (size_t)kv->cfg.n_blocks[g];
    n += (size_t)lr_kv__spill_slots(kv);
    if (!kv->cfg.prefix_cache) n = 0;
    while (n_buckets < n) n_buckets *= 2;
    kv->hash_mask =
        kv->cfg.hash_bits > 0 && kv->cfg.hash_bits < 64 ? ((uint64_t)1 << kv->cfg.hash_bits) - 1 : UINT64_MAX;
    kv->bucket_mask = n_buckets - 1;
    kv->n_nodes = (int)n;
    kv->nodes = lr_calloc(n, sizeof *kv->nodes);
    kv->node_tokens = lr_mul(n, (size_t)kv->cfg.block_size, &n_tokens) ? lr_calloc(n_tokens, sizeof(int32_t)) : NULL;
    kv->bucket = lr_calloc(n_buckets, sizeof(lr_kv_node *));
    kv->path = lr_calloc((size_t)kv->cfg.n_blocks[0], sizeof(lr_kv_node *));
    if (!kv->nodes || !kv->node_tokens || !kv->bucket || !kv->path) {
        return lr_fail(err, LR_ENOMEM, "no memory for a prefix index of %zu blocks", n);
    }
    for (size_t i = n; i-- > 0;) {
        kv->nodes[i].hash_next = kv->free_node;
        kv->free_node = &kv->nodes[i];
    }
    return 0;
}

void lr_kv__index_deinit(lr_kv *kv)
{
    for (int i = 0; i < KV_SPACE_BUCKETS; i++) {
        for (lr_kv_space *s = kv->spaces[i], *next; s; s = next) {
            next = s->next;
            lr_free(s->key);
            lr_free(s);
        }
    }
    lr_free(kv->nodes);
    lr_free(kv->node_tokens);
    lr_free(kv->bucket);
    lr_free(kv->path);
}

/* ---- namespaces ---- */

static uint64_t hash_bytes(const char *s, size_t n)
{
    uint64_t h = n;
    for (size_t i = 0; i < n; i++) h = mix(h, (unsigned char)s[i] + 1);
    return h;
}

int lr_kv_space_get(lr_kv *kv, lr_str salt, lr_str adapter, lr_kv_space **out, lr_error *err)
{
    size_t n;
    uint64_t salt_n = salt.n;
    if (!lr_add(salt.n, adapter.n, &n) || !lr_add(n, sizeof salt_n, &n))
        return lr_fail(err, LR_ENOMEM, "salt too long");
    char *key = lr_malloc(n);
    if (!key) return lr_fail(err, LR_ENOMEM, "no memory for a cache salt of %zu bytes", salt.n);
    memcpy(key, &salt_n, sizeof salt_n);
    if (salt.n) memcpy(key + sizeof salt_n, salt.s, salt.n);
    if (adapter.n) memcpy(key + sizeof salt_n + salt.n, adapter.s, adapter.n);
    uint64_t h = hash_bytes(key, n);
    lr_kv_space **at = &kv->spaces[h % KV_SPACE_BUCKETS];
    for (lr_kv_space *s = *at; s; s = s->next) {
        if (s->key_hash != h || s->key_n != n || memcmp(s->key, key, n) != 0) continue;
        lr_free(key);
        s->refs++;
        *out = s;
        return 0;
    }
    lr_kv_space *s = lr_calloc(1, sizeof *s);
    if (!s) {
        lr_free(key);
        return lr_fail(err, LR_ENOMEM, "no memory for a cache namespace");
    }
    s->key = key;
    s->key_n = n;
    s->key_hash = h;
    s->refs = 1;
    s->root.slot = -1;
    s->root.hash = mix(++kv->space_serial, 0x5eed);
    for (int g = 0; g < LR_KV_GROUPS; g++) s->root.block[g] = -1;
    s->next = *at;
    *at = s;
    *out = s;
    return 0;
}

lr_kv_space *lr_kv_space_ref(lr_kv_space *s)
{
    s->refs++;
    return s;
}

static void space_gc(lr_kv *kv, lr_kv_space *s)
{
    if (s->refs > 0 || s->root.child) return;
    lr_kv_space **at = &kv->spaces[s->key_hash % KV_SPACE_BUCKETS];
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    lr_free(s->key);
    lr_free(s);
}

void lr_kv_space_unref(lr_kv *kv, lr_kv_space *s)
{
    if (!s) return;
    s->refs--;
    space_gc(kv, s);
}

/* ---- nodes ---- */

const int32_t *lr_kv__node_tokens(const lr_kv *kv, const lr_kv_node *n)
{
    return kv->node_tokens + (size_t)(n - kv->nodes) * (size_t)kv->cfg.block_size;
}

static uint64_t child_hash(const lr_kv *kv, const lr_kv_node *parent, const int32_t *tokens)
{
    uint64_t h = parent->hash;
    for (int i = 0; i < kv->cfg.block_size; i++) h = mix(h, (uint32_t)tokens[i] + 1u);
    return h & kv->hash_mask;
}

lr_kv_node *lr_kv__find_child(const lr_kv *kv, const lr_kv_node *parent, const int32_t *tokens)
{
    if (!parent->child) return NULL;
    uint64_t h = child_hash(kv, parent, tokens);
    for (lr_kv_node *n = kv->bucket[h & kv->bucket_mask]; n; n = n->hash_next) {
        if (n->hash != h || n->parent != parent) continue;
        if (memcmp(lr_kv__node_tokens(kv, n), tokens, (size_t)kv->cfg.block_size * sizeof *tokens) == 0) return n;
    }
    return NULL;
}

lr_kv_node *lr_kv__add_child(lr_kv *kv, lr_kv_node *parent, const int32_t *tokens)
{
    lr_kv_node *n = kv->free_node;
    if (!n) return NULL;
    kv->free_node = n->hash_next;
    kv->n_nodes_used++;
    *n = (lr_kv_node){.parent = parent, .hash = child_hash(kv, parent, tokens), .depth = parent->depth + 1, .slot = -1};
    for (int g = 0; g < LR_KV_GROUPS; g++) n->block[g] = -1;
    memcpy(kv->node_tokens + (size_t)(n - kv->nodes) * (size_t)kv->cfg.block_size, tokens,
           (size_t)kv->cfg.block_size * sizeof *tokens);
    n->sib_next = parent->child;
    if (parent->child) parent->child->sib_prev = n;
    parent->child = n;
    lr_kv_node **at = &kv->bucket[n->hash & kv->bucket_mask];
    n->hash_next = *at;
    *at = n;
    return n;
}

static bool is_needed(const lr_kv *kv, const lr_kv_node *n)
{
    if (n->child || n->users > 0 || n->slot >= 0) return true;
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        if (n->block[g] >= 0) return true;
    }
    return false;
}

void lr_kv__node_gc(lr_kv *kv, lr_kv_node *n)
{
    while (n->parent && !is_needed(kv, n)) {
        lr_kv_node *parent = n->parent, **at = &kv->bucket[n->hash & kv->bucket_mask];
        while (*at != n) at = &(*at)->hash_next;
        *at = n->hash_next;
        if (n->sib_prev) {
            n->sib_prev->sib_next = n->sib_next;
        } else {
            parent->child = n->sib_next;
        }
        if (n->sib_next) n->sib_next->sib_prev = n->sib_prev;
        n->parent = NULL;
        n->hash_next = kv->free_node;
        kv->free_node = n;
        kv->n_nodes_used--;
        n = parent;
    }
    if (n->depth == 0) space_gc(kv, (lr_kv_space *)n);
}

int lr_kv__find_hit(const lr_kv *kv, lr_kv_node *from, int from_blocks, const int run0[LR_KV_GROUPS],
                    const int32_t *tokens, int limit, lr_kv_node **end)
{
    int bs = kv->cfg.block_size, best = from_blocks, run[LR_KV_GROUPS];
    lr_kv_node *n = from;
    memcpy(run, run0, sizeof run);
    *end = from;
    for (int k = from_blocks + 1; k <= kv->cfg.n_blocks[0] && (int64_t)k * bs <= limit; k++) {
        n = lr_kv__find_child(kv, n, tokens + (size_t)(k - 1) * (size_t)bs);
        if (!n) break;
        bool whole = true;
        for (int g = 0; g < kv->cfg.n_groups; g++) {
            run[g] = lr_kv__has(n, g) ? run[g] + 1 : 0;
            if (run[g] < k - lr_kv__window_first(kv, g, k * bs)) whole = false;
            if (!lr_kv__has(n, g) && kv->group[g].window == 0) return best; /* nothing behind it can be whole */
        }
        if (!whole) continue;
        best = k;
        *end = n;
    }
    return best;
}

int lr_kv_space_peek(const lr_kv *kv, const lr_kv_space *s, const int32_t *tokens, int limit, int *held)
{
    lr_kv_node *end;
    int run[LR_KV_GROUPS] = {0}, k = 0, n_held = 0;
    if (kv->cfg.prefix_cache) {
        k = lr_kv__find_hit(kv, (lr_kv_node *)&s->root, 0, run, tokens, limit, &end);
        if (held && k) {
            for (const lr_kv_node *n = end; n->parent; n = n->parent) {
                if (n->block[0] >= 0 && kv->group[0].blocks[n->block[0]].ref > 0) n_held++;
            }
        }
    }
    if (held) *held = n_held;
    return k * kv->cfg.block_size;
}
