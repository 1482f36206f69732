/* regex_dfa.c - automata over characters: made from trees, and combined. See regex_int.h.
 *
 * Code points that no set of the pattern tells apart are one "atom" (a range). ^ passes only before the first
 * character; behind $ nothing more may be read, which is a second copy ("ended") of the states.
 *
 * What can fail here returns 0, LR_ENOMEM or LR_ELIMIT; failed() finds the words for it.
 */
#include "grammar/regex_int.h"
#include "text/unicode.h"
#include <stdlib.h>

#define NONE UINT32_MAX

static int failed(int rc, lr_error *err)
{
    if (rc == LR_ENOMEM) return lr_fail(err, rc, "regex: no memory");
    return lr_fail(err, rc, "regex: it needs too many states; smaller bounds of repetitions, and fewer, need less");
}

/* ---- numbering of keys ---- */

/* Keys are runs of words; each new one gets the next number. */
typedef struct keys {
    uint32_t *word; /* all keys, one behind the other */
    uint32_t n_word, cap_word;
    uint32_t *at, n, cap;   /* (n + 1) where key i begins */
    uint32_t *slot, n_slot; /* hash table: number + 1 */
} keys;

static void keys_free(keys *k)
{
    lr_free(k->word);
    lr_free(k->at);
    lr_free(k->slot);
}

static uint32_t key_hash(const uint32_t *w, uint32_t n)
{
    uint64_t h = n + 1;
    for (uint32_t i = 0; i < n; i++) {
        h = (h ^ w[i]) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    return (uint32_t)(h >> 16);
}

/* Room for one more key of n words; false: no memory. */
static bool keys_grow(keys *k, uint32_t n)
{
    if (k->n_word + n > k->cap_word) {
        uint32_t cap = (k->n_word + n) * 2 + 64, *p = lr_reallocarray(k->word, cap, sizeof *p);
        if (!p) return false;
        k->word = p;
        k->cap_word = cap;
    }
    if (k->n + 2 > k->cap) {
        uint32_t cap = k->cap * 2 + 64, *p = lr_reallocarray(k->at, cap, sizeof *p);
        if (!p) return false;
        k->at = p;
        k->cap = cap;
    }
    if (2 * (k->n + 1) <= k->n_slot) return true;
    uint32_t size = k->n_slot ? k->n_slot * 2 : 128, *s = lr_calloc(size, sizeof *s);
    if (!s) return false;
    for (uint32_t i = 0; i < k->n; i++) {
        uint32_t h = key_hash(k->word + k->at[i], k->at[i + 1] - k->at[i]) & (size - 1);
        while (s[h]) h = (h + 1) & (size - 1);
        s[h] = i + 1;
    }
    lr_free(k->slot);
    k->slot = s;
    k->n_slot = size;
    return true;
}

/* The number of a key. */
static int key_number(keys *k, const uint32_t *w, uint32_t n, uint32_t *out)
{
    if (!keys_grow(k, n)) return LR_ENOMEM;
    uint32_t h = key_hash(w, n) & (k->n_slot - 1);
    for (; k->slot[h]; h = (h + 1) & (k->n_slot - 1)) {
        uint32_t i = *out = k->slot[h] - 1;
        if (k->at[i + 1] - k->at[i] == n && (n == 0 || memcmp(k->word + k->at[i], w, n * sizeof *w) == 0)) return 0;
    }
    if (k->n >= LR_RE_MAX_STATES) return LR_ELIMIT;
    k->slot[h] = k->n + 1;
    k->at[k->n] = k->n_word;
    if (n) memcpy(k->word + k->n_word, w, n * sizeof *w);
    k->n_word += n;
    k->at[k->n + 1] = k->n_word;
    *out = k->n++;
    return 0;
}

/* ---- tables ---- */

static rdfa *rdfa_new(uint32_t n_atom)
{
    rdfa *a = lr_calloc(1, sizeof *a);
    if (!a) return NULL;
    a->refs = 1;
    a->n_atom = n_atom;
    a->atom = lr_reallocarray(NULL, n_atom, sizeof *a->atom);
    if (a->atom) return a;
    lr_rdfa_unref(a);
    return NULL;
}

void lr_rdfa_unref(rdfa *a)
{
    if (!a || --a->refs > 0) return;
    lr_free(a->atom);
    lr_free(a->trans);
    lr_free(a->accept);
    lr_free(a);
}

/* Room for state number n - 1 and those below; cap: states there is room for. */
static int rdfa_grow(rdfa *a, uint32_t *cap, uint32_t n)
{
    if (n <= *cap) return 0;
    uint32_t want = n * 2 + 16;
    if ((uint64_t)n * a->n_atom > LR_RE_MAX_TABLE) return LR_ELIMIT;
    uint32_t *t = lr_reallocarray(a->trans, (size_t)want * a->n_atom, sizeof *t);
    if (t) a->trans = t;
    bool *acc = lr_reallocarray(a->accept, want, sizeof *acc);
    if (acc) a->accept = acc;
    if (!t || !acc) return LR_ENOMEM;
    *cap = want;
    return 0;
}

static uint32_t atom_of(const rdfa *a, uint32_t c)
{
    uint32_t lo = 0, hi = a->n_atom;
    while (hi - lo > 1) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (a->atom[mid] <= c)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* ---- fewer states (Moore's algorithm) ---- */

#define MINIMIZE_WORK                                                                                                  \
    8000000 /* table entries that are looked at: long chains take as many rounds as they have states */

/* Renumbers so that states that no text tells apart are one; 0 stays the dead one. Where it fails, a is larger, but
 * right.
 */
static void minimize(rdfa *a)
{
    if (a->n < 3) return;
    uint64_t work = 0;
    uint32_t *cls = lr_calloc(a->n, sizeof *cls), *key = lr_reallocarray(NULL, a->n_atom + 1, sizeof *key), n_cls = 1;
    uint32_t *next = lr_calloc(a->n, sizeof *next);
    bool ok = cls && key && next;
    for (uint32_t q = 0; ok && q < a->n; q++) {
        cls[q] = a->accept[q];
        n_cls = a->accept[q] ? 2 : n_cls;
    }
    for (bool again = true; ok && again;) {
        keys k = {0};
        work += (uint64_t)a->n * (a->n_atom + 1);
        if (work > MINIMIZE_WORK) ok = false;
        for (uint32_t q = 0; q < a->n && ok; q++) {
            key[0] = cls[q];
            for (uint32_t c = 0; c < a->n_atom; c++) key[c + 1] = cls[a->trans[(size_t)q * a->n_atom + c]];
            ok = !key_number(&k, key, a->n_atom + 1, &next[q]);
        }
        again = ok && k.n != n_cls;
        n_cls = k.n;
        if (ok) memcpy(cls, next, a->n * sizeof *cls);
        keys_free(&k);
    }
    for (uint32_t q = 0; ok && q < a->n; q++) { /* numbers are in order of first states: never larger than q */
        uint32_t c = cls[q];
        for (uint32_t i = 0; i < a->n_atom; i++)
            a->trans[(size_t)c * a->n_atom + i] = cls[a->trans[(size_t)q * a->n_atom + i]];
        a->accept[c] = a->accept[q];
    }
    if (ok) {
        a->start = cls[a->start];
        a->n = n_cls;
    }
    lr_free(cls);
    lr_free(key);
    lr_free(next);
}

/* ---- tree -> nondeterministic ---- */

enum { T_SET, T_SPLIT, T_BOL, T_EOL, T_ACCEPT };

typedef struct tstate {
    uint32_t kind, set, a, b; /* set NONE: any character */
} tstate;

typedef struct thompson {
    const rtree *t;
    tstate *st;
    uint32_t n, cap;
    int depth;
    int rc; /* why a state could not be made */
} thompson;

static uint32_t no_state(thompson *h, int rc)
{
    if (!h->rc) h->rc = rc;
    return NONE;
}

static uint32_t state(thompson *h, uint32_t kind, uint32_t set, uint32_t a, uint32_t b)
{
    if (a == NONE || b == NONE) return NONE;
    if (h->n == h->cap) {
        uint32_t cap = h->cap * 2 + 64;
        if (cap >= 2 * LR_RE_MAX_NFA) return no_state(h, LR_ELIMIT);
        tstate *p = lr_reallocarray(h->st, cap, sizeof *p);
        if (!p) return no_state(h, LR_ENOMEM);
        h->st = p;
        h->cap = cap;
    }
    h->st[h->n] = (tstate){kind, set, a, b};
    return h->n++;
}

static uint32_t any_star(thompson *h, uint32_t next)
{
    uint32_t loop = state(h, T_SPLIT, 0, 0, next);
    if (loop == NONE) return loop;
    uint32_t body = state(h, T_SET, NONE, loop, 0);
    if (body == NONE) return body;
    h->st[loop].a = body;
    return loop;
}

static uint32_t build(thompson *h, uint32_t id, uint32_t next);

static uint32_t build_rep(thompson *h, const rnode *n, uint32_t next)
{
    uint32_t s = next;
    if (n->max < 0) {
        s = state(h, T_SPLIT, 0, 0, next);
        uint32_t body = s == NONE ? s : build(h, n->a, s);
        if (body == NONE) return body;
        h->st[s].a = body;
    }
    for (int32_t i = n->min; i < n->max && s != NONE; i++) {
        s = build(h, n->a, s);
        s = s == NONE ? s : state(h, T_SPLIT, 0, s, next);
    }
    for (int32_t i = 0; i < n->min && s != NONE; i++) s = build(h, n->a, s);
    return s;
}

static uint32_t build(thompson *h, uint32_t id, uint32_t next)
{
    const rnode *n = &h->t->node[id];
    uint32_t s = NONE;
    if (next == NONE) return NONE;
    if (h->depth > 4 * LR_RE_MAX_DEPTH) return no_state(h, LR_ELIMIT);
    h->depth++;
    switch ((rkind)n->kind) {
    case R_EMPTY:
        s = next;
        break;
    case R_SET:
        s = state(h, T_SET, n->a, next, 0);
        break;
    case R_SEQ:
        s = next;
        for (uint32_t i = n->b; i-- > 0 && s != NONE;) s = build(h, h->t->list[n->a + i], s);
        break;
    case R_ALT:
        s = build(h, h->t->list[n->a + n->b - 1], next);
        for (uint32_t i = n->b - 1; i-- > 0 && s != NONE;) {
            uint32_t one = build(h, h->t->list[n->a + i], next);
            s = state(h, T_SPLIT, 0, one, s);
        }
        break;
    case R_REP:
        s = build_rep(h, n, next);
        break;
    case R_BOL:
    case R_EOL:
        s = state(h, n->kind == R_BOL ? T_BOL : T_EOL, 0, next, 0);
        break;
    }
    h->depth--;
    return s;
}

/* ---- nondeterministic -> deterministic ---- */

typedef struct subsets {
    thompson *h;
    rdfa *a;
    uint64_t *in; /* (n_set, words) atoms of each set */
    uint32_t words;
    uint32_t *sub, n_sub;  /* (2 h->n) state * 2 + ended, core states only */
    uint32_t *stack;       /* (4 h->n) */
    uint32_t *seen, stamp; /* (2 h->n) */
} subsets;

static void reach(subsets *s, uint32_t item, bool at_start)
{
    uint32_t top = 0;
    s->stack[top++] = item;
    while (top) {
        item = s->stack[--top];
        if (s->seen[item] == s->stamp) continue;
        s->seen[item] = s->stamp;
        const tstate *t = &s->h->st[item / 2];
        uint32_t ended = item & 1;
        switch (t->kind) {
        case T_SPLIT:
            s->stack[top++] = t->a * 2 + ended;
            s->stack[top++] = t->b * 2 + ended;
            break;
        case T_BOL:
            if (at_start) s->stack[top++] = t->a * 2 + ended;
            break;
        case T_EOL:
            s->stack[top++] = t->a * 2 + 1;
            break;
        case T_SET:
            if (!ended) s->sub[s->n_sub++] = item;
            break;
        default:
            s->sub[s->n_sub++] = item;
            break;
        }
    }
}

static int cmp_u32(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static bool set_has(const subsets *s, uint32_t set, uint32_t atom)
{
    if (set == NONE) return s->a->atom[atom] != 0xD800;
    return s->in[(size_t)set * s->words + atom / 64] >> (atom % 64) & 1;
}

/* Ranges' ends of all sets, as the first code points of atoms. */
static int make_atoms(rdfa **out, const rtree *t)
{
    size_t n = 3;
    for (uint32_t i = 0; i < t->n_set; i++) n += 2 * (size_t)t->set[i].n;
    if (n >= 1u << 22) return LR_ELIMIT;
    uint32_t *p = lr_reallocarray(NULL, n, sizeof *p);
    if (!p) return LR_ENOMEM;
    n = 0;
    p[n++] = 0;
    p[n++] = 0xD800;
    p[n++] = 0xE000;
    for (uint32_t i = 0; i < t->n_set; i++) {
        for (uint32_t k = 0; k < t->set[i].n; k++) {
            p[n++] = t->set[i].r[k][0];
            if (t->set[i].r[k][1] < LR_CHAR_MAX) p[n++] = t->set[i].r[k][1] + 1;
        }
    }
    qsort(p, n, sizeof *p, cmp_u32);
    uint32_t m = 1;
    for (size_t i = 1; i < n; i++) {
        if (p[i] != p[m - 1]) p[m++] = p[i];
    }
    *out = rdfa_new(m);
    if (*out) memcpy((*out)->atom, p, m * sizeof *p);
    lr_free(p);
    return *out ? 0 : LR_ENOMEM;
}

static int make_members(subsets *s, const rtree *t)
{
    s->words = (s->a->n_atom + 63) / 64;
    if ((uint64_t)s->words * t->n_set > 1u << 22) return LR_ELIMIT;
    s->in = lr_calloc((size_t)t->n_set * s->words + 1, sizeof *s->in);
    if (!s->in) return LR_ENOMEM;
    for (uint32_t i = 0; i < t->n_set; i++) {
        for (uint32_t c = 0; c < s->a->n_atom; c++) {
            if (s->a->atom[c] == 0xD800 || !lr_chars_has(&t->set[i], s->a->atom[c])) continue;
            s->in[(size_t)i * s->words + c / 64] |= (uint64_t)1 << (c % 64);
        }
    }
    return 0;
}

static int determinize(subsets *s, uint32_t start)
{
    keys k = {0};
    uint32_t cap = 0, dead;
    rdfa *a = s->a;
    uint64_t work = 0;
    int rc = key_number(&k, NULL, 0, &dead); /* nothing: it is 0 */
    s->stamp = 1;
    reach(s, start * 2, true);
    if (s->n_sub > 1) qsort(s->sub, s->n_sub, sizeof *s->sub, cmp_u32);
    if (!rc) rc = key_number(&k, s->sub, s->n_sub, &a->start);
    for (uint32_t q = 0; !rc && q < k.n; q++) {
        rc = rdfa_grow(a, &cap, k.n);
        uint32_t n = k.at[q + 1] - k.at[q];
        if (!rc) a->accept[q] = false;
        for (uint32_t i = 0; i < n && !rc; i++) {
            if (s->h->st[k.word[k.at[q] + i] / 2].kind == T_ACCEPT) a->accept[q] = true;
        }
        for (uint32_t c = 0; c < a->n_atom && !rc; c++) {
            s->n_sub = 0;
            s->stamp++;
            for (uint32_t i = 0; i < n; i++) {
                uint32_t item = k.word[k.at[q] + i];
                const tstate *t = &s->h->st[item / 2];
                if (t->kind == T_SET && set_has(s, t->set, c)) reach(s, t->a * 2, false);
            }
            work += n + s->n_sub + 1;
            if (s->n_sub > 1) qsort(s->sub, s->n_sub, sizeof *s->sub, cmp_u32);
            uint32_t *to = &a->trans[(size_t)q * a->n_atom + c];
            rc = work < 100000000 ? key_number(&k, s->sub, s->n_sub, to) : LR_ELIMIT;
        }
    }
    a->n = k.n;
    keys_free(&k);
    if (!rc) minimize(a);
    return rc;
}

int lr_rdfa_of_tree(rdfa **out, const rtree *t, uint32_t root, bool prefix_any, bool suffix_any, lr_error *err)
{
    thompson h = {.t = t};
    subsets s = {.h = &h};
    uint32_t start = state(&h, T_ACCEPT, 0, 0, 0);
    if (suffix_any && start != NONE) start = any_star(&h, start);
    if (start != NONE) start = build(&h, root, start);
    if (prefix_any && start != NONE) start = any_star(&h, start);
    int rc = start == NONE ? h.rc : make_atoms(&s.a, t);
    if (!rc) rc = make_members(&s, t);
    if (!rc) {
        s.sub = lr_reallocarray(NULL, h.n, 2 * sizeof(uint32_t));
        s.stack = lr_reallocarray(NULL, h.n, 5 * sizeof(uint32_t));
        s.seen = lr_calloc(h.n, 2 * sizeof(uint32_t));
        rc = s.sub && s.stack && s.seen ? determinize(&s, start) : LR_ENOMEM;
    }
    lr_free(h.st);
    lr_free(s.in);
    lr_free(s.sub);
    lr_free(s.stack);
    lr_free(s.seen);
    if (rc) {
        lr_rdfa_unref(s.a);
        return failed(rc, err);
    }
    *out = s.a;
    return 0;
}

/* ---- operations ---- */

/* The atoms of both; map_a, map_b: (n_atom) which of a's and b's they lie in. */
static rdfa *join_atoms(const rdfa *a, const rdfa *b, uint32_t **map_a, uint32_t **map_b)
{
    rdfa *o = rdfa_new(a->n_atom + b->n_atom);
    *map_a = lr_reallocarray(NULL, a->n_atom + b->n_atom, sizeof **map_a);
    *map_b = lr_reallocarray(NULL, a->n_atom + b->n_atom, sizeof **map_b);
    if (!o || !*map_a || !*map_b) {
        lr_rdfa_unref(o);
        return NULL;
    }
    uint32_t i = 0, k = 0, n = 0;
    while (i < a->n_atom || k < b->n_atom) {
        uint32_t x = i < a->n_atom ? a->atom[i] : NONE, y = k < b->n_atom ? b->atom[k] : NONE;
        o->atom[n] = x < y ? x : y;
        i += x <= y;
        k += y <= x;
        (*map_a)[n] = i - 1;
        (*map_b)[n] = k - 1;
        n++;
    }
    o->n_atom = n;
    return o;
}

int lr_rdfa_product(rdfa **out, const rdfa *a, const rdfa *b, int op, lr_error *err)
{
    uint32_t *ma = NULL, *mb = NULL, cap = 0, dead, pair[2] = {0, 0};
    rdfa *o = join_atoms(a, b, &ma, &mb);
    keys k = {0};
    int rc = o ? key_number(&k, pair, 2, &dead) : LR_ENOMEM; /* both dead: it is 0 */
    if (!rc) {
        pair[0] = a->start;
        pair[1] = b->start;
        rc = key_number(&k, pair, 2, &o->start);
    }
    for (uint32_t q = 0; !rc && q < k.n; q++) {
        rc = rdfa_grow(o, &cap, k.n);
        uint32_t x = k.word[2 * q], y = k.word[2 * q + 1];
        if (!rc) o->accept[q] = op == RDFA_AND ? a->accept[x] && b->accept[y] : a->accept[x] || b->accept[y];
        for (uint32_t c = 0; c < o->n_atom && !rc; c++) {
            pair[0] = a->trans[(size_t)x * a->n_atom + ma[c]];
            pair[1] = b->trans[(size_t)y * b->n_atom + mb[c]];
            if (op == RDFA_AND && (!pair[0] || !pair[1])) pair[0] = pair[1] = 0;
            rc = key_number(&k, pair, 2, &o->trans[(size_t)q * o->n_atom + c]);
        }
    }
    keys_free(&k);
    lr_free(ma);
    lr_free(mb);
    if (rc) {
        lr_rdfa_unref(o);
        return failed(rc, err);
    }
    o->n = k.n;
    minimize(o);
    *out = o;
    return 0;
}

int lr_rdfa_not(rdfa **out, const rdfa *a, lr_error *err)
{
    /* A new dead state 0 for the surrogates; the old one now accepts. */
    rdfa *o = rdfa_new(a->n_atom);
    uint32_t cap = 0;
    int rc = o ? rdfa_grow(o, &cap, a->n + 1) : LR_ENOMEM;
    if (rc) {
        lr_rdfa_unref(o);
        return failed(rc, err);
    }
    memcpy(o->atom, a->atom, a->n_atom * sizeof *a->atom);
    o->n = a->n + 1;
    o->start = a->start + 1;
    for (uint32_t q = 0; q < o->n; q++) {
        o->accept[q] = q > 0 && !a->accept[q - 1];
        for (uint32_t c = 0; c < a->n_atom; c++) {
            bool dead = q == 0 || a->atom[c] == 0xD800;
            o->trans[(size_t)q * o->n_atom + c] = dead ? 0 : a->trans[(size_t)(q - 1) * a->n_atom + c] + 1;
        }
    }
    minimize(o);
    *out = o;
    return 0;
}

int lr_rdfa_count(rdfa **out, int32_t min, int32_t max, lr_error *err)
{
    uint32_t last = (uint32_t)(max < 0 ? min : max), cap = 0; /* state 1 + k: k characters */
    if (last + 2 > LR_RE_MAX_STATES) return failed(LR_ELIMIT, err);
    rdfa *o = rdfa_new(3);
    int rc = o ? rdfa_grow(o, &cap, last + 2) : LR_ENOMEM;
    if (rc) {
        lr_rdfa_unref(o);
        return failed(rc, err);
    }
    o->atom[0] = 0;
    o->atom[1] = 0xD800;
    o->atom[2] = 0xE000;
    o->n = last + 2;
    o->start = 1;
    for (uint32_t q = 0; q < o->n; q++) {
        uint32_t to = q == 0 ? 0 : q <= last ? q + 1 : max < 0 ? q : 0;
        o->accept[q] = q > 0 && (int64_t)q - 1 >= min;
        o->trans[3 * q] = o->trans[3 * q + 2] = to;
        o->trans[3 * q + 1] = 0;
    }
    *out = o;
    return 0;
}

/* States: 1 start, 2 behind the sign, then for each remainder r of p: digits with that remainder, and with j = 1 .. k +
 * 1 digits behind the point (j = k + 1: only zeros may follow), and, first of these, just behind the point. */
int lr_rdfa_multiple(rdfa **out, uint32_t p, uint32_t k, lr_error *err)
{
    uint64_t n = 3 + (uint64_t)p * (k + 3);
    uint32_t cap = 0;
    if (p == 0 || n > LR_RE_MAX_STATES) return failed(LR_ELIMIT, err);
    rdfa *o = rdfa_new(15);
    int rc = o ? rdfa_grow(o, &cap, (uint32_t)n) : LR_ENOMEM;
    if (rc) {
        lr_rdfa_unref(o);
        return failed(rc, err);
    }
    static const uint32_t atom[15] = {0, '-', '.', '/', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', '9' + 1};
    memcpy(o->atom, atom, sizeof atom);
    o->n = (uint32_t)n;
    o->start = 1;
    memset(o->trans, 0, o->n * 15 * sizeof *o->trans);
    memset(o->accept, 0, o->n);
#define AT(r, j) (3 + (r) * (k + 3) + (j)) /* j 0: before the point, 1: just behind it, 2 ..: digits behind it */
    o->trans[1 * 15 + 1] = 2;
    for (uint32_t d = 0; d < 10; d++) o->trans[1 * 15 + 4 + d] = o->trans[2 * 15 + 4 + d] = AT(d % p, 0);
    for (uint32_t r = 0; r < p; r++) {
        for (uint32_t j = 0; j < k + 3; j++) {
            uint32_t *to = o->trans + (size_t)AT(r, j) * 15, digits = j < 2 ? 0 : j - 1;
            if (j == 0) to[2] = AT(r, 1);
            for (uint32_t d = 0; d < 10; d++) {
                uint32_t next = (uint32_t)(((uint64_t)r * 10 + d) % p);
                if (j == 0)
                    to[4 + d] = AT(next, 0);
                else if (digits < k)
                    to[4 + d] = AT(next, j + 1);
                else if (d == 0)
                    to[4 + d] = AT(r, k + 2);
            }
            uint32_t left = 1 % p; /* 10^(k - digits so far) */
            for (uint32_t z = digits < k ? digits : k; z < k; z++) left = (uint32_t)((uint64_t)left * 10 % p);
            o->accept[AT(r, j)] = j != 1 && (uint64_t)r * left % p == 0;
        }
    }
#undef AT
    minimize(o);
    *out = o;
    return 0;
}

/* ---- questions ---- */

uint8_t *lr_rdfa__live(const rdfa *a)
{
    uint8_t *live = lr_calloc(a->n, 1);
    for (uint32_t q = 0; live && q < a->n; q++) live[q] = a->accept[q];
    for (bool again = true; live && again;) {
        again = false;
        for (uint32_t q = a->n; q-- > 0;) {
            if (live[q]) continue;
            for (uint32_t c = 0; c < a->n_atom && !live[q]; c++) live[q] = live[a->trans[(size_t)q * a->n_atom + c]];
            again = again || live[q];
        }
    }
    return live;
}

bool lr_rdfa_is_empty(const rdfa *a)
{
    /* every state but the dead one was reached from the start when it was made */
    for (uint32_t q = 0; q < a->n; q++) {
        if (a->accept[q]) return false;
    }
    return true;
}

int lr_rdfa_overlap(const rdfa *a, const rdfa *b, bool *yes, lr_error *err)
{
    rdfa *both = NULL;
    int rc = lr_rdfa_product(&both, a, b, RDFA_AND, err);
    if (rc) return rc;
    *yes = !lr_rdfa_is_empty(both);
    lr_rdfa_unref(both);
    return 0;
}

bool lr_rdfa_matches(const rdfa *a, const char *s, size_t n)
{
    uint32_t q = a->start;
    for (size_t i = 0; i < n;) {
        int32_t cp;
        i += lr_utf8_get((const uint8_t *)s + i, n - i, &cp);
        if (cp < 0) return false;
        q = a->trans[(size_t)q * a->n_atom + atom_of(a, (uint32_t)cp)];
    }
    return a->accept[q];
}
