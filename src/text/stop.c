/* stop.c - the Aho-Corasick automaton of stop.h.
 *
 * Nodes are numbered breadth first, so that the children of a node lie side by side, ordered by byte, and a step is a
 * binary search among them. Node 0 is the start. A node stands for the beginning (its first `depth` bytes) of the stop
 * string `text`; that is all there is to know about what is held back.
 */
#include "text/stop.h"
#include "base/mem.h"
#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct node {
    uint32_t child, n_child; /* first child, their number */
    uint32_t fail;           /* the longest other beginning that this one ends in */
    uint32_t depth;
    const char *text; /* depth bytes */
    int32_t hit;      /* index of the longest stop string that ends here, -1 none */
    uint32_t hit_n;   /* its length */
    uint8_t byte;     /* the step from the parent to here */
} node;

struct lr_stopset {
    atomic_uint refs;
    size_t n_nodes, max_depth;
    node *nodes;
    char *bytes; /* all strings */
};

typedef struct item {
    lr_str s; /* in our own bytes */
    int32_t index;
} item;

static int by_text(const void *pa, const void *pb)
{
    const item *a = pa, *b = pb;
    int c = memcmp(a->s.s, b->s.s, a->s.n < b->s.n ? a->s.n : b->s.n);
    if (c) return c;
    if (a->s.n != b->s.n) return a->s.n < b->s.n ? -1 : 1;
    return a->index < b->index ? -1 : 1;
}

static uint32_t child_of(const lr_stopset *set, uint32_t at, uint8_t b)
{
    const node *nd = &set->nodes[at];
    uint32_t lo = nd->child, hi = lo + nd->n_child;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (set->nodes[mid].byte < b)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < nd->child + nd->n_child && set->nodes[lo].byte == b ? lo : 0;
}

static uint32_t next_node(const lr_stopset *set, uint32_t at, uint8_t b)
{
    for (;;) {
        uint32_t c = child_of(set, at, b);
        if (c) return c;
        if (at == 0) return 0;
        at = set->nodes[at].fail;
    }
}

/* Makes the children of node `at`, which stands for the sorted items [lo, hi) that share its beginning. range[] keeps
 * the items of each node. */
static void grow(lr_stopset *set, uint32_t at, const item *it, uint32_t (*range)[2])
{
    uint32_t lo = range[at][0], hi = range[at][1], d = set->nodes[at].depth;
    while (lo < hi && it[lo].s.n == d) lo++; /* strings that end here */
    set->nodes[at].child = (uint32_t)set->n_nodes;
    while (lo < hi) {
        uint8_t b = (uint8_t)it[lo].s.s[d];
        uint32_t end = lo + 1, id = (uint32_t)set->n_nodes++;
        while (end < hi && (uint8_t)it[end].s.s[d] == b) end++;
        node *c = &set->nodes[id];
        *c = (node){.depth = d + 1, .text = it[lo].s.s, .byte = b};
        c->fail = at == 0 ? 0 : next_node(set, set->nodes[at].fail, b);
        c->hit = set->nodes[c->fail].hit;
        c->hit_n = set->nodes[c->fail].hit_n;
        if (it[lo].s.n == d + 1) {
            c->hit = it[lo].index;
            c->hit_n = d + 1;
        }
        range[id][0] = lo;
        range[id][1] = end;
        set->nodes[at].n_child++;
        lo = end;
    }
}

static int build(lr_stopset *set, item *it, size_t n, size_t total, lr_error *err)
{
    uint32_t(*range)[2] = lr_reallocarray(NULL, total + 1, sizeof *range);
    set->nodes = lr_reallocarray(NULL, total + 1, sizeof *set->nodes);
    if (!range || !set->nodes) {
        lr_free(range);
        return lr_fail(err, LR_ENOMEM, "no memory for %zu stop strings", n);
    }
    qsort(it, n, sizeof *it, by_text);
    set->nodes[0] = (node){.hit = -1};
    set->n_nodes = 1;
    range[0][0] = 0;
    range[0][1] = (uint32_t)n;
    for (uint32_t at = 0; at < set->n_nodes; at++) grow(set, at, it, range);
    lr_free(range);
    return 0;
}

int lr_stopset_new(lr_stopset **out, const lr_str *strings, size_t n, lr_error *err)
{
    size_t total = 0;
    if (n > LR_STOP_MAX_STRINGS) return lr_fail(err, LR_ELIMIT, "%zu stop strings; at most %d", n, LR_STOP_MAX_STRINGS);
    for (size_t i = 0; i < n; i++) {
        if (strings[i].n == 0) return lr_fail(err, LR_EINVAL, "stop string %zu is empty", i + 1);
        if (!lr_add(total, strings[i].n, &total) || total > LR_STOP_MAX_BYTES)
            return lr_fail(err, LR_ELIMIT, "stop strings are longer than %zu bytes together", LR_STOP_MAX_BYTES);
    }
    lr_stopset *set = lr_calloc(1, sizeof *set);
    item *it = lr_reallocarray(NULL, n + 1, sizeof *it);
    if (set) set->bytes = lr_malloc(total + 1);
    if (!set || !it || !set->bytes) {
        lr_fail(err, LR_ENOMEM, "no memory for %zu stop strings", n);
        goto fail;
    }
    atomic_init(&set->refs, 1);
    char *p = set->bytes;
    for (size_t i = 0; i < n; i++) {
        memcpy(p, strings[i].s, strings[i].n);
        it[i] = (item){{p, strings[i].n}, (int32_t)i};
        p += strings[i].n;
        if (strings[i].n > set->max_depth) set->max_depth = strings[i].n;
    }
    if (build(set, it, n, total, err)) goto fail;
    lr_free(it);
    *out = set;
    return 0;
fail:
    lr_free(it);
    lr_stopset_unref(set);
    return err->code;
}

lr_stopset *lr_stopset_ref(lr_stopset *s)
{
    if (s) atomic_fetch_add(&s->refs, 1);
    return s;
}

void lr_stopset_unref(lr_stopset *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) > 1) return;
    lr_free(s->nodes);
    lr_free(s->bytes);
    lr_free(s);
}

size_t lr_stopset_max_held(const lr_stopset *s) { return s && s->max_depth ? s->max_depth - 1 : 0; }

void lr_stop_init(lr_stop *st, const lr_stopset *set) { *st = (lr_stop){set, 0, -1}; }

size_t lr_stop_held(const lr_stop *st) { return st->set && st->hit < 0 ? st->set->nodes[st->node].depth : 0; }

/* Writes the first `safe` bytes of held ++ text. */
static size_t emit(lr_str held, const char *text, size_t safe, char *out, size_t cap)
{
    size_t a = safe < held.n ? safe : held.n;
    assert(safe <= cap);
    if (safe > cap) return 0;
    if (a) memcpy(out, held.s, a);
    if (safe > a) memcpy(out + a, text, safe - a);
    return safe;
}

static lr_str held_text(const lr_stop *st)
{
    return lr_stop_held(st) ? (lr_str){st->set->nodes[st->node].text, lr_stop_held(st)} : (lr_str){"", 0};
}

size_t lr_stop_push(lr_stop *st, const char *text, size_t n, char *out, size_t cap)
{
    lr_str held = held_text(st);
    if (st->hit >= 0) return 0;
    if (!st->set) return emit(held, text, n, out, cap);
    size_t used = 0, keep;
    uint32_t at = st->node;
    while (used < n) {
        at = next_node(st->set, at, (uint8_t)text[used++]);
        if (st->set->nodes[at].hit >= 0) break;
    }
    const node *nd = &st->set->nodes[at];
    keep = nd->hit >= 0 ? nd->hit_n : nd->depth;
    st->hit = nd->hit;
    st->node = nd->hit >= 0 ? 0 : at;
    return emit(held, text, held.n + used - keep, out, cap);
}

size_t lr_stop_flush(lr_stop *st, char *out, size_t cap)
{
    lr_str held = held_text(st);
    st->node = 0;
    return emit(held, "", held.n, out, cap);
}
