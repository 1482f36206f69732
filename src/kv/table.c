/* table.c - block tables of sequences: growth with copy on write, sharing, windows, indexing. See kv.h. */
#include "kv/kv_int.h"
#include "base/mem.h"
#include <string.h>

void lr_kv_table_init(lr_kv *kv, lr_kv_table *t, lr_kv_space *space)
{
    memset(t, 0, sizeof *t);
    t->space = lr_kv_space_ref(space);
    t->tail = &space->root;
    t->tail->users++;
    t->next = kv->tables;
    if (kv->tables) kv->tables->prev = t;
    kv->tables = t;
}

static void set_tail(lr_kv *kv, lr_kv_table *t, lr_kv_node *n)
{
    lr_kv_node *old = t->tail;
    n->users++;
    t->tail = n;
    old->users--;
    if (old != n) lr_kv__node_gc(kv, old);
}

/* Lets go of entries from on, from the last to the first, the groups in turn. */
static void release_from(lr_kv *kv, lr_kv_table *t, int from)
{
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        while (t->n[g] > from) {
            int b = t->block[g][--t->n[g]];
            if (b >= 0) lr_kv__deref(kv, g, b);
        }
        if (t->first[g] > t->n[g]) t->first[g] = t->n[g];
    }
}

void lr_kv_table_drop(lr_kv *kv, lr_kv_table *t)
{
    release_from(kv, t, 0);
    t->computed = 0;
    t->n_indexed = 0;
    set_tail(kv, t, &t->space->root);
}

void lr_kv_table_deinit(lr_kv *kv, lr_kv_table *t)
{
    if (!t->space) return;
    lr_kv_table_drop(kv, t);
    t->tail->users--;
    if (t->prev) {
        t->prev->next = t->next;
    } else {
        kv->tables = t->next;
    }
    if (t->next) t->next->prev = t->prev;
    for (int g = 0; g < LR_KV_GROUPS; g++) lr_free(t->block[g]);
    lr_kv_space_unref(kv, t->space);
    memset(t, 0, sizeof *t);
}

int lr_kv_table_reserve(lr_kv *kv, lr_kv_table *t, int n_tokens, lr_error *err)
{
    int need = lr_kv__ceil_blocks(kv, n_tokens), cap = t->cap ? t->cap : 8;
    if (need <= t->cap) return 0;
    if (cap < need) cap = need + need / 4;
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        int32_t *p = lr_reallocarray(t->block[g], (size_t)cap, sizeof *p);
        if (!p) return lr_fail(err, LR_ENOMEM, "no memory for a table of %d KV blocks", cap);
        t->block[g] = p;
    }
    t->cap = cap;
    return 0;
}

int lr_kv_table_fork(lr_kv *kv, lr_kv_table *dst, const lr_kv_table *src, lr_error *err)
{
    int rc = lr_kv_table_reserve(kv, dst, src->computed, err);
    if (rc) return rc;
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        int n = lr_kv__ceil_blocks(kv, src->computed);
        if (n > src->n[g]) n = src->n[g];
        for (int i = 0; i < n; i++) {
            dst->block[g][i] = src->block[g][i];
            if (src->block[g][i] >= 0) lr_kv__ref(kv, g, src->block[g][i]);
        }
        dst->n[g] = n;
        dst->first[g] = src->first[g] < n ? src->first[g] : n;
    }
    dst->computed = src->computed;
    dst->n_indexed = src->n_indexed;
    dst->tag = src->tag;
    set_tail(kv, dst, src->tail);
    return 0;
}

/* ---- taking up what the index knows ---- */

static void touch(lr_kv *kv, lr_kv_table *t, lr_kv_node *n, bool hit)
{
    n->tag = t->tag;
    n->last_used = kv->now;
    if (hit) n->hits++;
}

/* Brings back the blocks of a path that only the spill file holds; the others were taken already. Returns how many
 * nodes of the path have their block now. */
static int bring_back(lr_kv *kv, lr_kv_table *t, int from, int k)
{
    for (int i = from; i < k; i++) {
        lr_kv_node *n = kv->path[i - from];
        if (t->block[0][i] >= 0) continue;
        int b = n->block[0] < 0 && n->slot >= 0 ? lr_kv__alloc(kv, 0) : -1;
        if (b >= 0 && n->slot >= 0 && lr_kv__spill_in(kv, n, b)) {
            n->block[0] = b;
            kv->group[0].blocks[b].node = n;
            t->block[0][i] = b;
            continue;
        }
        if (b >= 0) lr_kv__deref(kv, 0, b);
        for (int j = i; j < k; j++) { /* what lies behind the gap is of no use */
            if (t->block[0][j] >= 0) lr_kv__deref(kv, 0, t->block[0][j]);
        }
        return i;
    }
    return k;
}

/* With a spill file (one group, no window): takes the blocks at hand first, so that they are not evicted, then the
 * others. Returns the blocks of the hit and its last node. */
static int take_spilled(lr_kv *kv, lr_kv_table *t, lr_kv_node **end, int k)
{
    int from = t->n_indexed;
    lr_kv_node *n = *end, *start = t->tail;
    for (int i = k; i-- > from; n = n->parent) {
        kv->path[i - from] = n;
        n->users++;
        t->block[0][i] = n->block[0];
        if (n->block[0] >= 0) lr_kv__ref(kv, 0, n->block[0]);
    }
    int got = bring_back(kv, t, from, k);
    *end = got > from ? kv->path[got - from - 1] : start;
    (*end)->users++;
    for (int i = k; i-- > from;) {
        kv->path[i - from]->users--;
        lr_kv__node_gc(kv, kv->path[i - from]);
    }
    (*end)->users--;
    return got;
}

/* The table takes the blocks of the nodes of a hit that ends with `end` at block k. */
static void take_hit(lr_kv *kv, lr_kv_table *t, lr_kv_node *end, int k)
{
    int from = t->n_indexed;
    if (kv->spill) k = take_spilled(kv, t, &end, k);
    int len = k * kv->cfg.block_size;
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        int first = lr_kv__window_first(kv, g, len);
        if (first > from) { /* what the table held of this group is out of the window */
            for (int i = from; i-- > t->first[g];) {
                lr_kv__deref(kv, g, t->block[g][i]);
                t->block[g][i] = -1;
            }
            t->first[g] = first;
        }
        lr_kv_node *n = end;
        for (int i = k; i-- > from && !kv->spill; n = n->parent) {
            t->block[g][i] = i >= first ? n->block[g] : -1;
            if (i >= first) lr_kv__ref(kv, g, n->block[g]);
        }
        t->n[g] = k;
    }
    lr_kv_node *n = end;
    for (int i = k; i-- > from; n = n->parent) touch(kv, t, n, true);
    t->n_indexed = k;
    t->computed = len;
    set_tail(kv, t, end);
}

/* The child that agrees longest with tokens, among the latest few; *same = how many tokens (0 = none). */
static lr_kv_node *closest_child(const lr_kv *kv, const lr_kv_node *parent, const int32_t *tokens, int n, int *same)
{
    lr_kv_node *best = NULL;
    int tries = 32;
    *same = 0;
    if (n > kv->cfg.block_size) n = kv->cfg.block_size;
    for (lr_kv_node *c = parent->child; c && tries-- > 0; c = c->sib_next) {
        const int32_t *have = lr_kv__node_tokens(kv, c);
        int m = 0;
        while (m < n && have[m] == tokens[m]) m++;
        for (int g = 0; g < kv->cfg.n_groups; g++) {
            if (c->block[g] < 0) m = 0;
        }
        if (m > *same) {
            *same = m;
            best = c;
        }
    }
    return best;
}

/* Copies the part of a further block that agrees. */
static int take_part(lr_kv *kv, lr_kv_table *t, const int32_t *tokens, int limit)
{
    int same, k = t->n_indexed;
    lr_kv_node *c = closest_child(kv, t->tail, tokens + t->computed, limit - t->computed, &same);
    if (!c) return 0;
    for (int g = 0; g < kv->cfg.n_groups; g++) lr_kv__ref(kv, g, c->block[g]);
    bool room = true;
    for (int g = 0; g < kv->cfg.n_groups; g++) room = room && lr_kv_available(kv, g) > 0;
    for (int g = 0; room && g < kv->cfg.n_groups; g++) {
        int b = lr_kv__alloc(kv, g);
        kv->cfg.mover.copy(kv->cfg.mover.user, g, b, c->block[g]);
        kv->group[g].copied++;
        t->block[g][k] = b;
        t->n[g] = k + 1;
    }
    touch(kv, t, c, room);
    for (int g = 0; g < kv->cfg.n_groups; g++) lr_kv__deref(kv, g, c->block[g]);
    return room ? same : 0;
}

int lr_kv_table_match(lr_kv *kv, lr_kv_table *t, const int32_t *tokens, int limit)
{
    int before = t->computed, run[LR_KV_GROUPS] = {0}, whole = t->n_indexed * kv->cfg.block_size;
    lr_kv_node *end;
    if (!kv->cfg.prefix_cache || limit <= before || before - whole >= kv->cfg.block_size) return 0;
    lr_kv_table_trim(kv, t);
    for (int g = 0; g < kv->cfg.n_groups; g++) run[g] = t->n_indexed - t->first[g];
    int k = lr_kv__find_hit(kv, t->tail, t->n_indexed, run, tokens, limit, &end);
    if (before > whole) { /* the table's own part of a block makes room for a whole one */
        if (k == t->n_indexed) return 0;
        release_from(kv, t, t->n_indexed);
        t->computed = whole;
    }
    if (k > t->n_indexed) take_hit(kv, t, end, k);
    t->computed += take_part(kv, t, tokens, limit);
    return t->computed > before ? t->computed - before : 0; /* a copy that can't be read may cost the part */
}

/* ---- writing ---- */

static bool is_private(const kv_group *p, int b) { return p->blocks[b].ref == 1 && !p->blocks[b].node; }

/* Gives the table a block of its own in place of entry i. */
static void make_private(lr_kv *kv, lr_kv_table *t, int g, int i)
{
    kv_group *p = &kv->group[g];
    int old = t->block[g][i];
    int b = p->n_free + p->n_cached > 0 ? lr_kv__alloc(kv, g) : -1;
    if (b < 0) { /* it is the only holder (see grow_need): take it out of the index instead */
        lr_kv__unlink(kv, p->blocks[old].node, g);
        return;
    }
    kv->cfg.mover.copy(kv->cfg.mover.user, g, b, old);
    p->copied++;
    t->block[g][i] = b;
    lr_kv__deref(kv, g, old);
}

/* Blocks of group g that writing n more tokens takes for certain, and those that could do without (*spare). */
static int grow_need(const lr_kv *kv, const lr_kv_table *t, int g, int n, int *spare)
{
    const kv_group *p = &kv->group[g];
    int end = lr_kv__ceil_blocks(kv, t->computed + n), need = 0;
    *spare = 0;
    if (end > t->n[g]) need = end - t->n[g];
    for (int i = t->computed / kv->cfg.block_size; i < t->n[g] && i < end; i++) {
        const kv_block *b = &p->blocks[t->block[g][i]];
        if (b->ref > 1) {
            need++;
        } else if (b->node) {
            ++*spare;
        }
    }
    return need;
}

bool lr_kv_table_grow(lr_kv *kv, lr_kv_table *t, int n, int *group, int *missing)
{
    int spare;
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        int need = grow_need(kv, t, g, n, &spare), have = lr_kv_available(kv, g);
        if (need <= have) continue;
        *group = g;
        *missing = need - have;
        return false;
    }
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        int end = lr_kv__ceil_blocks(kv, t->computed + n);
        /* new blocks and copies of shared ones first: those of indexed ones can do without a free block */
        for (int pass = 0; pass < 2; pass++) {
            for (int i = t->computed / kv->cfg.block_size; i < t->n[g] && i < end; i++) {
                int b = t->block[g][i];
                if (!is_private(&kv->group[g], b) && (kv->group[g].blocks[b].ref > 1) == (pass == 0)) {
                    make_private(kv, t, g, i);
                }
            }
            while (pass == 0 && t->n[g] < end) {
                t->block[g][t->n[g]] = lr_kv__alloc(kv, g);
                t->n[g]++;
            }
        }
    }
    return true;
}

/* ---- after a step ---- */

/* The index learns block i of the table, or the table takes the block that the index has for the same tokens. */
static bool index_block(lr_kv *kv, lr_kv_table *t, const int32_t *tokens, int i)
{
    const int32_t *tk = tokens + (size_t)i * (size_t)kv->cfg.block_size;
    lr_kv_node *n = lr_kv__find_child(kv, t->tail, tk);
    if (!n) n = lr_kv__add_child(kv, t->tail, tk);
    if (!n) return false;
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        int mine = t->block[g][i];
        if (mine < 0 || mine == n->block[g]) continue;
        if (n->block[g] >= 0) {
            lr_kv__ref(kv, g, n->block[g]);
            t->block[g][i] = n->block[g];
            lr_kv__deref(kv, g, mine);
        } else if (!kv->group[g].blocks[mine].node) {
            n->block[g] = mine;
            kv->group[g].blocks[mine].node = n;
        }
    }
    touch(kv, t, n, false);
    t->n_indexed = i + 1;
    set_tail(kv, t, n);
    return true;
}

static void leave_window(lr_kv *kv, lr_kv_table *t)
{
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        int w = kv->group[g].window;
        if (w == 0) continue;
        /* one position more than the next row needs, so that the last row can be run again */
        while (t->first[g] < t->n[g] && (int64_t)(t->first[g] + 1) * kv->cfg.block_size <= (int64_t)t->computed - w) {
            int i = t->first[g]++;
            lr_kv__deref(kv, g, t->block[g][i]);
            t->block[g][i] = -1;
        }
    }
}

void lr_kv_table_advance(lr_kv *kv, lr_kv_table *t, const int32_t *tokens, int n)
{
    t->computed += n;
    if (kv->cfg.prefix_cache) {
        while ((int64_t)(t->n_indexed + 1) * kv->cfg.block_size <= t->computed) {
            if (!index_block(kv, t, tokens, t->n_indexed)) break;
        }
    }
    leave_window(kv, t);
}

void lr_kv_table_trim(lr_kv *kv, lr_kv_table *t) { release_from(kv, t, lr_kv__ceil_blocks(kv, t->computed)); }

void lr_kv_table_truncate(lr_kv *kv, lr_kv_table *t, int n)
{
    int bs = kv->cfg.block_size;
    if (n >= t->computed) return;
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        if (lr_kv__window_first(kv, g, n) < t->first[g]) n = 0;
    }
    if (n <= 0) {
        lr_kv_table_drop(kv, t);
        return;
    }
    t->computed = n;
    lr_kv_table_trim(kv, t);
    if (t->n_indexed > n / bs) {
        lr_kv_node *tail = t->tail;
        for (int i = t->n_indexed; i > n / bs; i--) tail = tail->parent;
        t->n_indexed = n / bs;
        set_tail(kv, t, tail);
    }
}

void lr_kv_table_swap(lr_kv *kv, lr_kv_table *t, lr_kv_table *other)
{
    int from = t->computed / kv->cfg.block_size;
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        int n = t->n[g], m = other->n[g];
        for (int i = from; i < n || i < m; i++) {
            int32_t b = i < n ? t->block[g][i] : -1;
            if (i < m) t->block[g][i] = other->block[g][i];
            if (i < n) other->block[g][i] = b;
        }
        t->n[g] = m > from ? m : from;
        other->n[g] = n > from ? n : from;
    }
}

/* ---- contents to host memory and back ---- */

int lr_kv_table_held(const lr_kv_table *t, int g) { return t->n[g] - t->first[g]; }

size_t lr_kv_table_bytes(const lr_kv *kv, const lr_kv_table *t)
{
    size_t n = 0;
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        n += (size_t)lr_kv_table_held(t, g) * kv->cfg.mover.block_bytes[g];
    }
    return n;
}

void lr_kv_table_read(const lr_kv *kv, const lr_kv_table *t, void *dst)
{
    char *p = dst;
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        for (int i = t->first[g]; i < t->n[g]; i++, p += kv->cfg.mover.block_bytes[g]) {
            kv->cfg.mover.read(kv->cfg.mover.user, g, t->block[g][i], p);
        }
    }
}

bool lr_kv_table_write(lr_kv *kv, lr_kv_table *t, int computed, const int first[LR_KV_GROUPS], const void *src)
{
    const char *p = src;
    int n = lr_kv__ceil_blocks(kv, computed);
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        if (n - first[g] > lr_kv_available(kv, g)) return false;
    }
    for (int g = 0; g < kv->cfg.n_groups; g++) {
        for (int i = 0; i < n; i++) {
            if (i < first[g]) {
                t->block[g][i] = -1;
                continue;
            }
            int b = lr_kv__alloc(kv, g);
            kv->cfg.mover.write(kv->cfg.mover.user, g, b, p);
            p += kv->cfg.mover.block_bytes[g];
            t->block[g][i] = b;
        }
        t->n[g] = n;
        t->first[g] = first[g];
    }
    t->computed = computed;
    return true;
}

void lr_kv_table_set_tag(lr_kv_table *t, uint64_t tag)
{
    uint64_t old = t->tag;
    t->tag = tag;
    for (lr_kv_node *n = t->tail; n->parent; n = n->parent) {
        if (n->tag == old) n->tag = tag;
    }
}
