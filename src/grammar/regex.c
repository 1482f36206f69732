/* regex.c - regular expressions as grammar.h offers them, and as nodes of a builder. See regex_int.h. */
#include "grammar/grammar_int.h"
#include "grammar/regex_int.h"
#include "text/unicode.h"
#include <stdlib.h>

static lr_regex *make(void) { return lr_calloc(1, sizeof(lr_regex)); }

static int no_memory(lr_error *err) { return lr_fail(err, LR_ENOMEM, "regex: no memory"); }

void lr_regex_free(lr_regex *r)
{
    if (!r) return;
    lr_rtree_free(&r->tree);
    lr_rdfa_unref(r->dfa);
    lr_free(r);
}

/* ---- anchors ---- */

/* Whether a tree holds an anchor; the nesting is bounded. */
static bool has_anchor(const rtree *t, uint32_t id)
{
    const rnode *n = &t->node[id];
    if (n->kind == R_BOL || n->kind == R_EOL) return true;
    if (n->kind == R_REP) return has_anchor(t, n->a);
    for (uint32_t i = 0; (n->kind == R_SEQ || n->kind == R_ALT) && i < n->b; i++) {
        if (has_anchor(t, t->list[n->a + i])) return true;
    }
    return false;
}

/* A branch of the whole pattern: its nodes without ^ at the start and $ at the end. */
typedef struct branch {
    const uint32_t *node;
    uint32_t n;
    bool bol, eol;
} branch;

static branch branch_of(const rtree *t, const uint32_t *id)
{
    branch b = {.node = id, .n = 1};
    if (t->node[*id].kind == R_SEQ) b = (branch){.node = t->list + t->node[*id].a, .n = t->node[*id].b};
    while (b.n && t->node[b.node[0]].kind == R_BOL) {
        b.bol = true;
        b.node++;
        b.n--;
    }
    while (b.n && t->node[b.node[b.n - 1]].kind == R_EOL) {
        b.eol = true;
        b.n--;
    }
    return b;
}

/* Branch i of the whole pattern; false if there is none. */
static bool branch_at(const rtree *t, uint32_t i, branch *b)
{
    const rnode *root = &t->node[t->root];
    uint32_t n = root->kind == R_ALT ? root->b : 1;
    if (i < n) *b = branch_of(t, root->kind == R_ALT ? &t->list[root->a + i] : &t->root);
    return i < n;
}

static bool is_simple(const rtree *t)
{
    branch b;
    if (t->n_look) return false;
    for (uint32_t i = 0; branch_at(t, i, &b); i++) {
        for (uint32_t k = 0; k < b.n; k++) {
            if (has_anchor(t, b.node[k])) return false;
        }
    }
    return true;
}

/* ---- making ---- */

int lr_regex_new(lr_regex **out, const char *pattern, size_t n, unsigned flags, lr_error *err)
{
    lr_regex *r = make();
    if (!r) return no_memory(err);
    int rc = lr_rtree_parse(&r->tree, pattern, n, flags, err);
    if (rc) {
        lr_regex_free(r);
        return rc;
    }
    r->search = (flags & LR_RE_SEARCH) != 0;
    r->simple = is_simple(&r->tree);
    *out = r;
    return 0;
}

static int no_node(const rtree *t, lr_error *err)
{
    if (!lr_rtree__full(t)) return no_memory(err);
    return lr_fail(err, LR_ELIMIT, "too many or too long strings");
}

/* One string as a sequence of characters. */
static uint32_t literal(rtree *t, lr_str s, lr_error *err)
{
    uint32_t *node = lr_reallocarray(NULL, s.n + 1, sizeof *node), n = 0, out = UINT32_MAX;
    bool ok = node != NULL;
    if (!ok) no_memory(err);
    for (size_t i = 0; i < s.n && ok;) {
        int32_t cp;
        lr_chars set = {0};
        i += lr_utf8_get((const uint8_t *)s.s + i, s.n - i, &cp);
        ok = cp >= 0 || !lr_fail(err, LR_EFORMAT, "a string is not UTF-8");
        ok = ok && (lr_chars_add(&set, (uint32_t)cp, (uint32_t)cp) || !no_memory(err));
        if (ok) node[n] = lr_rtree__set(t, &set);
        ok = ok && (node[n++] != UINT32_MAX || !no_node(t, err));
    }
    if (ok) {
        out = lr_rtree__list(t, R_SEQ, node, n);
        if (out == UINT32_MAX) no_node(t, err);
    }
    lr_free(node);
    return out;
}

int lr_regex_lits(lr_regex **out, const lr_str *s, size_t n, lr_error *err)
{
    lr_regex *r = make();
    uint32_t *each = lr_reallocarray(NULL, n + 1, sizeof *each);
    bool ok = r && each;
    if (!ok) no_memory(err);
    for (size_t i = 0; i < n && ok; i++) {
        each[i] = literal(&r->tree, s[i], err);
        ok = each[i] != UINT32_MAX;
    }
    if (ok) {
        lr_chars none = {0};
        r->tree.root = n ? lr_rtree__list(&r->tree, R_ALT, each, (uint32_t)n) : lr_rtree__set(&r->tree, &none);
        ok = r->tree.root != UINT32_MAX || !no_node(&r->tree, err);
    }
    lr_free(each);
    if (!ok) {
        lr_regex_free(r);
        return err->code;
    }
    r->simple = true;
    *out = r;
    return 0;
}

/* ---- automata ---- */

/* With its lookaheads. */
static int tree_dfa(const lr_regex *r, rdfa **out, lr_error *err)
{
    const rtree *t = &r->tree;
    bool search = r->search && !t->anchored;
    int rc = lr_rdfa_of_tree(out, t, t->root, search, r->search, err);
    for (uint32_t i = 0; i < t->n_look && !rc; i++) {
        rdfa *look = NULL, *other = NULL;
        rc = lr_rdfa_of_tree(&look, t, t->look[i], false, true, err);
        if (!rc && t->look_not[i]) {
            rc = lr_rdfa_not(&other, look, err);
            lr_rdfa_unref(look);
            look = other;
            other = NULL;
        }
        if (!rc) rc = lr_rdfa_product(&other, *out, look, RDFA_AND, err);
        lr_rdfa_unref(look);
        if (!rc) {
            lr_rdfa_unref(*out);
            *out = other;
        }
    }
    return rc;
}

/* The automaton, made when it is first asked for: the one thing in a regex that changes. */
static int dfa_of(const lr_regex *r, const rdfa **out, lr_error *err)
{
    if (!r->dfa) {
        rdfa *a = NULL;
        int rc = tree_dfa(r, &a, err);
        if (rc) {
            lr_rdfa_unref(a);
            return rc;
        }
        ((lr_regex *)(uintptr_t)r)->dfa = a;
    }
    *out = r->dfa;
    return 0;
}

static int wrap(lr_regex **out, rdfa *a, lr_error *err)
{
    lr_regex *r = make();
    if (!r) {
        lr_rdfa_unref(a);
        return no_memory(err);
    }
    r->dfa = a;
    *out = r;
    return 0;
}

static int combine(lr_regex **out, const lr_regex *x, const lr_regex *y, int op, lr_error *err)
{
    const rdfa *a, *b;
    rdfa *o = NULL;
    int rc = dfa_of(x, &a, err);
    if (!rc) rc = dfa_of(y, &b, err);
    if (!rc) rc = lr_rdfa_product(&o, a, b, op, err);
    return rc ? rc : wrap(out, o, err);
}

int lr_regex_and(lr_regex **out, const lr_regex *a, const lr_regex *b, lr_error *err)
{
    return combine(out, a, b, RDFA_AND, err);
}

int lr_regex_or(lr_regex **out, const lr_regex *a, const lr_regex *b, lr_error *err)
{
    return combine(out, a, b, RDFA_OR, err);
}

int lr_regex_not(lr_regex **out, const lr_regex *x, lr_error *err)
{
    const rdfa *a;
    rdfa *o = NULL;
    int rc = dfa_of(x, &a, err);
    if (!rc) rc = lr_rdfa_not(&o, a, err);
    return rc ? rc : wrap(out, o, err);
}

int lr_regex_length(lr_regex **out, const lr_regex *x, int32_t min, int32_t max, lr_error *err)
{
    const rdfa *a;
    rdfa *count = NULL, *o = NULL;
    if (min < 0 || max < LR_REP_INF || (max >= 0 && max < min)) return lr_fail(err, LR_EINVAL, "regex: bad lengths");
    int rc = dfa_of(x, &a, err);
    if (!rc) rc = lr_rdfa_count(&count, min, max, err);
    if (!rc) rc = lr_rdfa_product(&o, a, count, RDFA_AND, err);
    lr_rdfa_unref(count);
    return rc ? rc : wrap(out, o, err);
}

int lr_regex_multiple(lr_regex **out, uint32_t p, uint32_t k, lr_error *err)
{
    rdfa *o = NULL;
    int rc = lr_rdfa_multiple(&o, p, k, err);
    return rc ? rc : wrap(out, o, err);
}

int lr_regex_is_empty(const lr_regex *x, bool *yes, lr_error *err)
{
    const rdfa *a;
    int rc = dfa_of(x, &a, err);
    if (!rc) *yes = lr_rdfa_is_empty(a);
    return rc;
}

int lr_regex_overlaps(const lr_regex *x, const lr_regex *y, bool *yes, lr_error *err)
{
    const rdfa *a, *b;
    int rc = dfa_of(x, &a, err);
    if (!rc) rc = dfa_of(y, &b, err);
    return rc ? rc : lr_rdfa_overlap(a, b, yes, err);
}

int lr_regex_matches(const lr_regex *x, const char *s, size_t n, bool *yes, lr_error *err)
{
    const rdfa *a;
    int rc = dfa_of(x, &a, err);
    if (!rc) *yes = lr_rdfa_matches(a, s, n);
    return rc;
}

/* ---- words ---- */

typedef struct words {
    const rdfa *a;
    const uint8_t *live;
    size_t left;
    void (*fn)(void *user, lr_str word);
    void *user;
    char text[LR_REGEX_WORD + 8];
} words;

/* The words of state q behind n bytes of text; false: there are too many. */
static bool words_of(words *w, uint32_t q, size_t n)
{
    const rdfa *a = w->a;
    if (!w->live[q]) return true;
    if (n > LR_REGEX_WORD) return false;
    if (a->accept[q]) {
        if (w->left-- == 0) return false;
        w->fn(w->user, (lr_str){w->text, n});
    }
    for (uint32_t k = 0; k < a->n_atom; k++) {
        uint32_t to = a->trans[(size_t)q * a->n_atom + k], last = k + 1 < a->n_atom ? a->atom[k + 1] - 1 : LR_CHAR_MAX;
        if (!w->live[to]) continue;
        if (last - a->atom[k] > w->left) return false;
        for (uint32_t c = a->atom[k]; c <= last; c++) {
            size_t more = c >= 0xD800 && c < 0xE000 ? 0 : lr_char_put(c, w->text + n);
            if (more && !words_of(w, to, n + more)) return false;
        }
    }
    return true;
}

int lr_regex_words(const lr_regex *x, size_t most, void (*fn)(void *user, lr_str word), void *user, bool *all,
                   lr_error *err)
{
    words w = {.left = most, .fn = fn, .user = user};
    int rc = dfa_of(x, &w.a, err);
    if (rc) return rc;
    uint8_t *live = lr_rdfa__live(w.a);
    if (!live) return lr_fail(err, LR_ENOMEM, "no memory for a regular expression");
    w.live = live;
    *all = words_of(&w, w.a->start, 0);
    lr_free(live);
    return 0;
}

/* ---- nodes ---- */

static const uint32_t any_char[1][2] = {{0, LR_CHAR_MAX}};

static lr_gnode emit_tree(lr_gb *b, const rtree *t, uint32_t id, lr_spell spell);

static lr_gnode emit_list(lr_gb *b, const rtree *t, const uint32_t *list, uint32_t n, bool alt, lr_spell spell)
{
    lr_gnode *node = lr_reallocarray(NULL, (size_t)n + 1, sizeof *node);
    if (!node) {
        lr_gb_fail(b, LR_ENOMEM, "no memory for the grammar");
        return 0;
    }
    for (uint32_t i = 0; i < n; i++) node[i] = emit_tree(b, t, list[i], spell);
    lr_gnode out = alt ? lr_gb_alt(b, node, n) : lr_gb_seq(b, node, n);
    lr_free(node);
    return out;
}

static lr_gnode emit_tree(lr_gb *b, const rtree *t, uint32_t id, lr_spell spell)
{
    const rnode *n = &t->node[id];
    if (b->err.code) return 0;
    switch ((rkind)n->kind) {
    case R_SET:
        return lr_gb_chars(b, (const uint32_t(*)[2])t->set[n->a].r, t->set[n->a].n, spell);
    case R_SEQ:
    case R_ALT:
        return emit_list(b, t, t->list + n->a, n->b, n->kind == R_ALT, spell);
    case R_REP:
        return lr_gb_rep(b, emit_tree(b, t, n->a, spell), n->min, n->max);
    default:
        return lr_gb_empty(b);
    }
}

static lr_gnode emit_simple(lr_gb *b, const lr_regex *r, lr_spell spell)
{
    const rtree *t = &r->tree;
    uint32_t n = t->node[t->root].kind == R_ALT ? t->node[t->root].b : 1;
    lr_gnode *alt = lr_reallocarray(NULL, n, sizeof *alt);
    if (!alt) {
        lr_gb_fail(b, LR_ENOMEM, "no memory for the grammar");
        return 0;
    }
    lr_gnode any = r->search ? lr_gb_rep(b, lr_gb_chars(b, any_char, 1, spell), 0, LR_REP_INF) : lr_gb_empty(b);
    branch br;
    for (uint32_t i = 0; branch_at(t, i, &br); i++) {
        lr_gnode body = emit_list(b, t, br.node, br.n, false, spell);
        lr_gnode part[3] = {br.bol ? lr_gb_empty(b) : any, body, br.eol ? lr_gb_empty(b) : any};
        alt[i] = lr_gb_seq(b, part, 3);
    }
    lr_gnode out = lr_gb_alt(b, alt, n);
    lr_free(alt);
    return out;
}

/* Where an atom leads. */
typedef struct move {
    uint32_t to, atom;
} move;

static int cmp_move(const void *pa, const void *pb)
{
    const move *a = pa, *b = pb;
    if (a->to != b->to) return a->to < b->to ? -1 : 1;
    return (a->atom > b->atom) - (a->atom < b->atom);
}

/* The edges of state q, one for each state that it leads to. moves: (n_atom) room; set: room too. */
static void emit_state(lr_gb *b, const rdfa *a, const uint8_t *live, uint32_t q, lr_spell spell, move *moves,
                       lr_chars *set, lr_gedge **edge, uint32_t *n, uint32_t *cap)
{
    uint32_t n_move = 0;
    for (uint32_t c = 0; c < a->n_atom; c++) {
        uint32_t to = a->trans[(size_t)q * a->n_atom + c];
        if (live[to] && a->atom[c] != 0xD800) moves[n_move++] = (move){to, c};
    }
    qsort(moves, n_move, sizeof *moves, cmp_move);
    for (uint32_t i = 0; i < n_move && !b->err.code;) {
        uint32_t to = moves[i].to;
        bool ok = true;
        set->n = 0;
        for (; i < n_move && moves[i].to == to && ok; i++) {
            uint32_t c = moves[i].atom;
            ok = lr_chars_add(set, a->atom[c], c + 1 < a->n_atom ? a->atom[c + 1] - 1 : LR_CHAR_MAX);
        }
        if (!ok) lr_gb_fail(b, LR_ENOMEM, "no memory for the grammar");
        lr_chars_fix(set);
        if (!lr_gb__grow(b, (void **)edge, cap, *n, 2, sizeof **edge)) return;
        (*edge)[*n] = (lr_gedge){q + 1, to + 1, lr_gb_chars(b, (const uint32_t(*)[2])set->r, set->n, spell)};
        ++*n;
    }
}

/* Place 0 leads to the start, place q + 1 is state q, the last one the end. */
static lr_gnode emit_dfa(lr_gb *b, const rdfa *a, lr_spell spell)
{
    uint8_t *live = lr_rdfa__live(a);
    lr_gedge *edge = NULL;
    move *moves = lr_reallocarray(NULL, a->n_atom, sizeof *moves);
    lr_chars set = {0};
    uint32_t n = 0, cap = 0;
    if (!live || !moves) lr_gb_fail(b, LR_ENOMEM, "no memory for the grammar");
    lr_gnode empty = lr_gb_empty(b), out = 0;
    if (lr_gb__grow(b, (void **)&edge, &cap, 0, 1, sizeof *edge)) edge[n++] = (lr_gedge){0, a->start + 1, empty};
    for (uint32_t q = 0; q < a->n && !b->err.code; q++) {
        if (!live[q]) continue;
        emit_state(b, a, live, q, spell, moves, &set, &edge, &n, &cap);
        if (a->accept[q] && lr_gb__grow(b, (void **)&edge, &cap, n, 1, sizeof *edge))
            edge[n++] = (lr_gedge){q + 1, a->n + 1, empty};
    }
    if (!b->err.code) out = live[a->start] ? lr_gb_graph(b, a->n + 2, edge, n) : lr_gb_never(b);
    lr_chars_free(&set);
    lr_free(moves);
    lr_free(edge);
    lr_free(live);
    return out;
}

lr_gnode lr_gb_regex(lr_gb *b, const lr_regex *r, lr_spell spell)
{
    const rdfa *a;
    lr_error err;
    if (b->err.code) return 0;
    if (r->simple) return emit_simple(b, r, spell);
    if (dfa_of(r, &a, &err)) {
        lr_gb_fail(b, err.code, err.text);
        return 0;
    }
    return emit_dfa(b, a, spell);
}
