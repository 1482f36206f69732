/* match.c - matchers: one text on its way through a grammar. See grammar.h. */
#include "grammar/mask_int.h"

#define SLOTS    (LR_MATCHER_HISTORY + 1)
#define MAX_TEXT ((size_t)64 << 20)

/* ---- life ---- */

static void link_in(lr_matcher *m)
{
    m->prev = NULL;
    m->next = m->g->matchers;
    if (m->next) m->next->prev = m;
    m->g->matchers = m;
}

/* A matcher of g without a state; takes a reference to g and t. */
static lr_matcher *make(lr_grammar *g, lr_grammar_trie *t)
{
    lr_matcher *m = lr_calloc(1, sizeof *m);
    if (!m) return NULL;
    m->g = lr_grammar_ref(g);
    m->t = lr_grammar_trie_ref(t);
    link_in(m);
    return m;
}

static int start(lr_matcher *m, lr_error *err)
{
    lr_grammar *g = m->g;
    lr_step__begin_call(g);
    bool ok = lr_step__start(g, m);
    if (ok && !lr_state__set(g, lr_matcher__state(m), g->w.out.at, g->w.out.n, g->w.ends))
        ok = !lr_fail(&g->w.err, LR_ENOMEM, "no memory for a matcher");
    lr_step__end_call(g);
    if (!ok) *err = g->w.err;
    return ok ? 0 : err->code;
}

int lr_matcher_new(lr_matcher **out, lr_grammar *g, lr_grammar_trie *t, const lr_matcher_options *o, lr_error *err)
{
    lr_grammar *own = NULL;
    if (g->n->n_hole) { /* what fills the holes is the matcher's own */
        nfa *n;
        if (!o || !o->hole) return lr_fail(err, LR_EINVAL, "the grammar has holes, and nothing to fill them");
        int rc = lr_nfa__copy(&n, g->n, err);
        if (rc) return rc;
        rc = lr_grammar__new(&own, n, err);
        if (rc) {
            lr_nfa__unref(n);
            return rc;
        }
    }
    lr_matcher *m = make(own ? own : g, t);
    if (own) lr_grammar_unref(own);
    if (!m) return lr_fail(err, LR_ENOMEM, "no memory for a matcher");
    if (o) m->o = *o;
    int rc = start(m, err);
    if (rc) {
        m->o.hole_free = NULL;
        lr_matcher_free(m);
        return rc;
    }
    *out = m;
    return 0;
}

void lr_matcher_free(lr_matcher *m)
{
    if (!m) return;
    if (m->o.hole_free) m->o.hole_free(m->o.hole_user);
    for (uint32_t i = 0; i < SLOTS; i++) {
        lr_state__clear(m->g, &m->slot[i].s);
        lr_free(m->slot[i].s.it);
    }
    *(m->prev ? &m->prev->next : &m->g->matchers) = m->next;
    if (m->next) m->next->prev = m->prev;
    lr_free(m->text);
    lr_free(m->scan);
    lr_free(m->memo);
    lr_grammar_trie_unref(m->t);
    if (!m->g->matchers) lr_grammar__drop_masks(m->g); /* whole masks hold frames */
    lr_grammar_unref(m->g);
    lr_free(m);
}

static bool copy_slots(lr_matcher *m, const lr_matcher *o)
{
    for (uint32_t k = 0; k <= o->back; k++) {
        uint32_t i = (o->at + SLOTS - k) % SLOTS;
        const gslot *s = &o->slot[i];
        if (!lr_state__set(m->g, &m->slot[i].s, s->s.it, s->s.n, s->s.ends)) return false;
        m->slot[i].n_text = s->n_text;
        m->slot[i].hash = s->hash;
    }
    return true;
}

int lr_matcher_copy(lr_matcher **out, const lr_matcher *o, lr_error *err)
{
    lr_matcher *m = make(o->g, o->t);
    if (!m) return lr_fail(err, LR_ENOMEM, "no memory for a matcher");
    m->at = o->at;
    m->back = o->back;
    m->taken = o->taken;
    bool ok = copy_slots(m, o);
    size_t n_text = o->slot[o->at].n_text;
    if (ok && o->text && n_text) {
        m->text = lr_memdup(o->text, n_text);
        m->cap_text = n_text;
        ok = m->text != NULL;
    }
    if (ok && o->n_memo) {
        m->memo = lr_memdup(o->memo, o->n_memo * sizeof *o->memo);
        m->n_memo = m->cap_memo = o->n_memo;
        ok = m->memo != NULL;
    }
    if (ok && o->o.hole) {
        m->o = o->o;
        if (o->o.hole_dup) m->o.hole_user = o->o.hole_dup(o->o.hole_user);
        if (!m->o.hole_user && o->o.hole_user) {
            m->o.hole_free = NULL;
            ok = false;
        }
    } else if (ok) {
        m->o = o->o;
    }
    if (!ok) {
        lr_matcher_free(m);
        return lr_fail(err, LR_ENOMEM, "no memory for a matcher");
    }
    *out = m;
    return 0;
}

void lr_matcher_strip_space(lr_matcher *m, bool on) { m->o.strip_space = on; }
lr_grammar *lr_matcher_grammar(const lr_matcher *m) { return m->g; }
size_t lr_matcher_words(const lr_matcher *m) { return ((size_t)m->t->n_vocab + 31) / 32; }
size_t lr_matcher_taken(const lr_matcher *m) { return m->taken; }
bool lr_matcher_can_end(const lr_matcher *m) { return m->slot[m->at].s.ends; }
bool lr_matcher_done(const lr_matcher *m) { return m->slot[m->at].s.n == 0; }

/* ---- holes ---- */

const char *lr_matcher__join_text(lr_matcher *m, lr_str more)
{
    size_t n = m->slot[m->at].n_text, need;
    if (!lr_add(n, more.n, &need) || need > MAX_TEXT) return NULL;
    if (need + 1 > m->cap_text) {
        size_t cap = m->cap_text * 2 > need + 64 ? m->cap_text * 2 : need + 64;
        char *p = lr_realloc(m->text, cap);
        if (!p) return NULL;
        m->text = p;
        m->cap_text = cap;
    }
    if (more.n) memcpy(m->text + n, more.s, more.n);
    m->text[need] = 0;
    return m->text;
}

static bool remember(lr_matcher *m, hole_memo e)
{
    enum { KEEP = 1024 };
    if (m->n_memo == KEEP) { /* the older half goes; it can be asked again */
        memmove(m->memo, m->memo + KEEP / 2, KEEP / 2 * sizeof *m->memo);
        m->n_memo = KEEP / 2;
    }
    if (m->n_memo == m->cap_memo) {
        size_t cap = m->cap_memo ? m->cap_memo * 2 : 16;
        hole_memo *p = lr_reallocarray(m->memo, cap, sizeof *p);
        if (!p) return false;
        m->memo = p;
        m->cap_memo = cap;
    }
    m->memo[m->n_memo++] = e;
    return true;
}

/* The state at the start of the strings; may be one that was made before. */
static uint32_t state_of_strings(lr_matcher *m, const lr_str *strings, size_t n, texthash *id)
{
    lr_grammar *g = m->g;
    bool empty;
    *id = (texthash){1, 2};
    lr_str *s = lr_reallocarray(NULL, n + 1, sizeof *s);
    if (!s) {
        lr_fail(&g->w.err, LR_ENOMEM, "no memory for a hole's strings");
        return D_DEAD;
    }
    if (n) memcpy(s, strings, n * sizeof *s);
    lr_nfa__sort_strings(s, &n, &empty);
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < s[i].n; k++) texthash_add(id, (uint8_t)s[i].s[k]);
        texthash_add(id, 256);
    }
    uint32_t d = D_UNKNOWN;
    if (empty) {
        lr_fail(&g->w.err, LR_EINVAL, "the function of a hole gave an empty string");
    } else if (n == 0) {
        d = D_DEAD;
    } else {
        for (size_t i = m->n_memo; i-- > 0 && d == D_UNKNOWN;) {
            if (m->memo[i].strings.a == id->a && m->memo[i].strings.b == id->b) d = m->memo[i].d;
        }
    }
    if (d == D_UNKNOWN && !empty) {
        uint32_t q = lr_nfa__strings(g->n, s, n, 0);
        if (q == N_NONE)
            lr_nfa__full(g->n, &g->w.err);
        else
            d = lr_dfa__of_state(g, q, 0);
    }
    lr_free(s);
    return g->w.err.code ? D_DEAD : d;
}

uint32_t lr_matcher__hole(lr_matcher *m, uint32_t rule, lr_str more)
{
    lr_grammar *g = m->g;
    const nrule *r = &g->n->rule[rule];
    hole_memo e = {.rule = rule, .text = m->slot[m->at].hash};
    for (size_t i = 0; i < more.n; i++) texthash_add(&e.text, (uint8_t)more.s[i]);
    for (size_t i = m->n_memo; i-- > 0;) {
        const hole_memo *o = &m->memo[i];
        if (o->rule == rule && o->text.a == e.text.a && o->text.b == e.text.b) return o->d;
    }
    const char *text = lr_matcher__join_text(m, more);
    const lr_str *strings = NULL;
    size_t n = 0;
    lr_error err = {0};
    if (!text) {
        lr_fail(&g->w.err, LR_ENOMEM, "no memory for the text before a hole");
        return D_DEAD;
    }
    int rc = m->o.hole(m->o.hole_user, r->hole_id, (lr_str){text, m->slot[m->at].n_text + more.n}, &strings, &n, &err);
    if (rc < 0) {
        g->w.err = err;
        if (!err.code) lr_fail(&g->w.err, rc, "it failed");
        lr_fail_prefix(&g->w.err, "hole %s", r->name);
        return D_DEAD;
    }
    e.d = state_of_strings(m, strings, n, &e.strings);
    if (g->w.err.code) {
        lr_fail_prefix(&g->w.err, "hole %s", r->name);
        return D_DEAD;
    }
    if (!remember(m, e)) lr_fail(&g->w.err, LR_ENOMEM, "no memory for the text before a hole");
    return e.d;
}

/* ---- taking tokens ---- */

/* Walks bytes from the present state; the result is left in w.out and w.ends. LR_EINVAL: they are not allowed. */
static int walk(lr_matcher *m, const char *s, size_t n)
{
    lr_grammar *g = m->g;
    gwork *w = &g->w;
    const gstate *now = lr_matcher__state(m);
    w->out.n = 0;
    for (uint32_t i = 0; i < now->n; i++) {
        if (!lr_step__push(w, &w->out, now->it[i].d, now->it[i].f)) return w->err.code;
    }
    w->ends = now->ends;
    for (size_t i = 0; i < n; i++) {
        lr_step__byte(g, w->out.at, w->out.n, (uint8_t)s[i]);
        if (w->err.code || !lr_step__close(g, m, (lr_str){s, i + 1})) return w->err.code;
        if (w->out.n == 0 && !(w->ends && i + 1 == n)) return LR_EINVAL;
    }
    return 0;
}

/* Makes w.out the state after one more token. */
static int advance(lr_matcher *m, const char *s, size_t n, lr_error *err)
{
    uint32_t next = (m->at + 1) % SLOTS;
    gslot *from = &m->slot[m->at], *to = &m->slot[next];
    if ((m->g->n->n_hole || m->g->n->n_unique) && n && !lr_matcher__join_text(m, (lr_str){s, n}))
        return lr_fail(err, LR_ENOMEM, "no memory for the text of a matcher");
    if (!lr_state__set(m->g, &to->s, m->g->w.out.at, m->g->w.out.n, m->g->w.ends))
        return lr_fail(err, LR_ENOMEM, "no memory for a matcher's state");
    to->n_text = from->n_text + n;
    to->hash = from->hash;
    for (size_t i = 0; i < n && m->g->n->n_hole; i++) texthash_add(&to->hash, (uint8_t)s[i]);
    m->at = next;
    m->back += m->back < LR_MATCHER_HISTORY;
    m->taken++;
    return 0;
}

static int take(lr_matcher *m, const char *s, size_t n, bool end, bool dry, lr_error *err)
{
    lr_grammar *g = m->g;
    lr_grammar__collect(g);
    lr_step__begin_call(g);
    int rc;
    if (end) {
        rc = lr_matcher__state(m)->ends ? 0 : LR_EINVAL;
        g->w.out.n = 0;
        g->w.ends = false;
    } else {
        rc = walk(m, s, n);
    }
    if (!rc && !dry)
        rc = advance(m, s, n, err);
    else if (rc == LR_EINVAL && !g->w.err.code)
        lr_fail(err, LR_EINVAL, "the grammar does not allow this here");
    else if (rc)
        *err = g->w.err;
    lr_step__end_call(g);
    return rc;
}

/* The bytes that a token stands for at this place; false: it is none that a text may hold. */
static bool bytes_of(const lr_matcher *m, int32_t token, const char **s, size_t *n)
{
    if (!lr_trie__is_text(m->t->v, token)) return false;
    *s = lr_vocab_piece(m->t->v, token, n);
    if (m->o.strip_space && m->taken == 0 && (*s)[0] == ' ') {
        ++*s;
        --*n;
    }
    return *n > 0;
}

static int take_token(lr_matcher *m, int32_t token, bool dry, lr_error *err)
{
    const char *s = NULL;
    size_t n = 0;
    bool end = token >= 0 && lr_vocab_is_eog(m->t->v, token);
    if (!end && !bytes_of(m, token, &s, &n)) return lr_fail(err, LR_EINVAL, "token %d is no text", (int)token);
    int rc = take(m, s, n, end, dry, err);
    if (rc) lr_fail_prefix(err, "token %d", (int)token);
    return rc;
}

int lr_matcher_accept(lr_matcher *m, int32_t token, lr_error *err) { return take_token(m, token, false, err); }

int lr_matcher_accept_bytes(lr_matcher *m, const char *s, size_t n, lr_error *err)
{
    return take(m, s, n, false, false, err);
}

bool lr_matcher_allows(lr_matcher *m, int32_t token)
{
    lr_error err;
    return take_token(m, token, true, &err) == 0;
}

int lr_matcher_rollback(lr_matcher *m, size_t n, lr_error *err)
{
    if (n > m->taken) return lr_fail(err, LR_EINVAL, "%zu tokens were taken, %zu cannot be taken back", m->taken, n);
    if (n > m->back) {
        return lr_fail(err, LR_EINVAL, "%zu tokens cannot be taken back, only the last %u are remembered", n,
                       (unsigned)m->back);
    }
    m->at = (m->at + SLOTS - (uint32_t)n) % SLOTS;
    m->back -= (uint32_t)n;
    m->taken -= n;
    if (m->scan && m->scan->n > m->slot[m->at].n_text) *m->scan = (jscan){0};
    return 0;
}

int lr_matcher_share_mask(lr_matcher *m, size_t words, lr_token_mask **out, lr_error *err)
{
    lr_grammar *g = m->g;
    lr_grammar__collect(g);
    lr_step__begin_call(g);
    *out = lr_mask__of(m, words);
    lr_step__end_call(g);
    if (*out) return 0;
    *err = g->w.err;
    return err->code ? err->code : lr_fail(err, LR_ENOMEM, "no memory for a token mask");
}

int lr_matcher_mask(lr_matcher *m, uint32_t *bits, size_t *n, lr_error *err)
{
    size_t size = lr_matcher_words(m) * sizeof *bits;
    lr_token_mask *t;
    int rc = lr_matcher_share_mask(m, 0, &t, err);
    if (rc)
        memset(bits, 0, size);
    else
        memcpy(bits, t->bits, size);
    if (!rc && n) *n = t->n;
    if (!rc) lr_token_mask_unref(t);
    return rc;
}

/* The only byte that may follow w.out, -1 if there are several or none. */
static int only_byte(lr_grammar *g)
{
    gwork *w = &g->w;
    int only = -1;
    unsigned count[256] = {0};
    for (unsigned b = 0; b < 256; b++) count[g->n->cls[b]]++;
    for (unsigned c = 0; c < g->n->n_cls; c++) {
        bool any = false;
        for (uint32_t i = 0; i < w->out.n && !any && !w->err.code; i++) any = lr_dfa__trans(g, w->out.at[i].d, c) != 0;
        if (w->err.code) return -1;
        if (!any) continue;
        if (only >= 0 || count[c] > 1) return -1;
        only = g->n->rep[c];
    }
    return only;
}

size_t lr_matcher_forced(lr_matcher *m, char *buf, size_t cap)
{
    lr_grammar *g = m->g;
    size_t n = 0;
    lr_grammar__collect(g);
    lr_step__begin_call(g);
    if (walk(m, NULL, 0) == 0) {
        while (n < cap && !g->w.ends) {
            int b = only_byte(g);
            if (b < 0) break;
            buf[n] = (char)b;
            lr_step__byte(g, g->w.out.at, g->w.out.n, (unsigned)b);
            if (g->w.err.code || !lr_step__close(g, m, (lr_str){buf, n + 1})) break;
            if (g->w.out.n == 0 && !g->w.ends) break;
            n++;
        }
    }
    lr_step__end_call(g);
    return n;
}
