/* nfa.c - the nondeterministic automaton: its states, and tries of strings. See grammar_int.h. */
#include "grammar/grammar_int.h"
#include <stdlib.h>

int lr_nfa__new(nfa **out, lr_error *err)
{
    nfa *n = lr_calloc(1, sizeof *n);
    if (!n) return lr_fail(err, LR_ENOMEM, "no memory for a grammar");
    n->refs = 1;
    n->in_loop = N_NONE;
    for (int i = 0; i < 256; i++) n->one[i] = N_NONE;
    if (lr_nfa__state(n, N_END, 0, 0, 0) != 0) {
        lr_nfa__unref(n);
        return lr_fail(err, LR_ENOMEM, "no memory for a grammar");
    }
    *out = n;
    return 0;
}

void lr_nfa__unref(nfa *n)
{
    if (!n || --n->refs > 0) return;
    for (uint32_t i = 0; i < n->n_rule; i++) lr_free(n->rule[i].name);
    lr_free(n->rule);
    lr_free(n->st);
    lr_free(n->set);
    lr_free(n->loop);
    lr_free(n->wide);
    lr_free(n->mark);
    lr_free(n);
}

int lr_nfa__copy(nfa **out, const nfa *o, lr_error *err)
{
    nfa *n = lr_memdup(o, sizeof *o);
    if (!n) return lr_fail(err, LR_ENOMEM, "no memory for a grammar");
    n->refs = 1;
    n->st = lr_memdup(o->st, o->n_st * sizeof *o->st);
    n->set = lr_memdup(o->set, o->n_set * sizeof *o->set);
    n->loop = lr_memdup(o->loop, o->n_loop * sizeof *o->loop);
    n->rule = lr_memdup(o->rule, o->n_rule * sizeof *o->rule);
    n->wide = o->wide ? lr_memdup(o->wide, o->n_wide) : NULL;
    n->mark = o->mark ? lr_memdup(o->mark, o->n_mark) : NULL;
    n->cap_st = o->n_st;
    n->cap_set = o->n_set;
    n->cap_loop = o->n_loop;
    n->cap_rule = o->n_rule;
    bool ok = n->st && n->set && n->loop && n->rule && (n->wide || !o->wide) && (n->mark || !o->mark);
    for (uint32_t i = 0; n->rule && i < o->n_rule; i++) {
        n->rule[i].name = lr_strdup(o->rule[i].name);
        n->rule[i].d0 = 0;
        ok = ok && n->rule[i].name;
    }
    if (!n->rule) n->n_rule = 0;
    if (!ok) {
        lr_nfa__unref(n);
        return lr_fail(err, LR_ENOMEM, "no memory for a grammar");
    }
    *out = n;
    return 0;
}

static bool grow(void **p, uint32_t *cap, uint32_t n, uint32_t max, size_t size)
{
    if (n < *cap) return true;
    if (n >= max) return false;
    uint32_t want = *cap * 2 < 64 ? 64 : *cap * 2;
    if (want > max) want = max;
    void *q = lr_reallocarray(*p, want, size);
    if (!q) return false;
    *p = q;
    *cap = want;
    return true;
}

uint32_t lr_nfa__state(nfa *n, nkind kind, uint32_t x, uint32_t a, uint32_t b)
{
    if (x == N_NONE || a == N_NONE || b == N_NONE) return N_NONE;
    if (!grow((void **)&n->st, &n->cap_st, n->n_st, LR_G_MAX_NFA, sizeof *n->st)) return N_NONE;
    n->st[n->n_st] = (nstate){.kind = (uint8_t)kind, .x = x, .a = a, .b = b, .loop = n->in_loop};
    return n->n_st++;
}

uint32_t lr_nfa__one(nfa *n, unsigned byte)
{
    if (n->one[byte] != N_NONE) return n->one[byte];
    if (!grow((void **)&n->set, &n->cap_set, n->n_set, 2 * LR_G_MAX_SETS, sizeof *n->set)) return N_NONE;
    memset(&n->set[n->n_set], 0, sizeof *n->set);
    gset_add(&n->set[n->n_set], byte);
    return n->one[byte] = n->n_set++;
}

uint32_t lr_nfa__loop(nfa *n, uint32_t min, uint32_t max, uint32_t rule)
{
    if (!grow((void **)&n->loop, &n->cap_loop, n->n_loop, LR_G_MAX_NFA, sizeof *n->loop)) return N_NONE;
    n->loop[n->n_loop] = (gloop){min, max, rule};
    return n->n_loop++;
}

uint32_t lr_nfa__rule(nfa *n, const char *name)
{
    char *copy = lr_strdup(name);
    if (!copy || !grow((void **)&n->rule, &n->cap_rule, n->n_rule, LR_G_MAX_NFA, sizeof *n->rule)) {
        lr_free(copy);
        return N_NONE;
    }
    n->rule[n->n_rule] = (nrule){.start = N_NONE, .hole = -1, .name = copy};
    return n->n_rule++;
}

int lr_nfa__full(const nfa *n, lr_error *err)
{
    if (n->n_st >= LR_G_MAX_NFA) {
        return lr_fail(err, LR_ELIMIT, "the grammar is too large: its automaton needs more than %u states",
                       LR_G_MAX_NFA);
    }
    return lr_fail(err, LR_ENOMEM, "no memory for the grammar's automaton");
}

uint32_t lr_nfa__either(nfa *n, uint32_t a, uint32_t b)
{
    if (a == N_NONE || b == N_NONE) return a == N_NONE ? b : a;
    return a == b ? a : lr_nfa__state(n, N_SPLIT, 0, a, b);
}

/* ---- strings ---- */

static int cmp_str(const void *pa, const void *pb)
{
    const lr_str *a = pa, *b = pb;
    size_t n = a->n < b->n ? a->n : b->n;
    int c = n ? memcmp(a->s, b->s, n) : 0;
    return c ? c : (a->n > b->n) - (a->n < b->n);
}

void lr_nfa__sort_strings(lr_str *s, size_t *n, bool *has_empty)
{
    size_t out = 0;
    if (*n > 1) qsort(s, *n, sizeof *s, cmp_str);
    *has_empty = *n > 0 && s[0].n == 0;
    for (size_t i = 0; i < *n; i++) {
        if (s[i].n == 0 || (out > 0 && lr_str_eq(s[out - 1], s[i]))) continue;
        s[out++] = s[i];
    }
    *n = out;
}

/* Completes the nodes of the path `prev` that are deeper than `keep`: open[d] is the entry of what follows after the
 * first d bytes, as far as it is known. */
static bool fold(nfa *n, uint32_t *open, lr_str prev, size_t keep)
{
    for (size_t d = prev.n; d-- > keep;) {
        uint32_t st = lr_nfa__state(n, N_BYTES, lr_nfa__one(n, (uint8_t)prev.s[d]), open[d + 1], 0);
        open[d] = st == N_NONE ? N_NONE : lr_nfa__either(n, st, open[d]);
        if (open[d] == N_NONE) return false;
        open[d + 1] = N_NONE;
    }
    return true;
}

uint32_t lr_nfa__strings(nfa *n, const lr_str *s, size_t count, uint32_t next)
{
    size_t longest = 0;
    for (size_t i = 0; i < count; i++) longest = s[i].n > longest ? s[i].n : longest;
    uint32_t *open = lr_reallocarray(NULL, longest + 2, sizeof *open), entry = N_NONE;
    if (!open) return N_NONE;
    for (size_t i = 0; i < longest + 2; i++) open[i] = N_NONE;
    lr_str prev = {NULL, 0};
    bool ok = true;
    for (size_t i = 0; i < count && ok; i++) {
        size_t same = 0;
        while (same < prev.n && same < s[i].n && prev.s[same] == s[i].s[same]) same++;
        ok = fold(n, open, prev, same);
        open[s[i].n] = next;
        prev = s[i];
    }
    if (ok && fold(n, open, prev, 0)) entry = open[0];
    lr_free(open);
    return entry;
}

/* ---- classes ---- */

/* Bytes that no set tells apart are one class. */
void lr_nfa__classes(nfa *n)
{
    uint64_t sig[256];
    for (unsigned b = 0; b < 256; b++) sig[b] = 0x243F6A8885A308D3u;
    for (uint32_t i = 0; i < n->n_set; i++) {
        uint64_t key = (i + 1) * 0x9E3779B97F4A7C15u;
        for (unsigned b = 0; b < 256; b++) {
            if (!gset_has(&n->set[i], b)) continue;
            uint64_t h = (sig[b] ^ key) * 0xD6E8FEB86659FD93u;
            sig[b] = h ^ h >> 32;
        }
    }
    n->n_cls = 0;
    for (unsigned b = 0; b < 256; b++) {
        unsigned c = 0;
        while (c < n->n_cls && sig[n->rep[c]] != sig[b]) c++;
        if (c == n->n_cls) n->rep[n->n_cls++] = (uint8_t)b;
        n->cls[b] = (uint8_t)c;
    }
}
