/* suffix.c - a suffix automaton over tokens: see spec.h.
 *
 * The smallest automaton of all substrings of a text (Blumer and others, 1985): a state stands for substrings that end
 * at the same places; `len` is the longest of them, `link` the state of the longest suffix that ends at more places.
 * Each token adds one state or two, in constant time on average. Several texts follow one another behind separators
 * (END), which no query follows. `last` of a state is the latest place where it ended before the token that was added
 * last, so that a proposal never points at the text's own end.
 *
 * Edges of a state are a list (a copied state needs them all) and in a hash table (state, token) -> edge.
 */
#include "base/mem.h"
#include "spec/spec.h"
#include <string.h>

#define NIL UINT32_MAX

enum { END = -1, LINKS = 16 }; /* LINKS: shorter suffixes of a place that learn of it */

typedef struct state {
    int32_t len, last; /* last: end position (tokens before it) */
    uint32_t link, edges;
} state;

typedef struct edge {
    int32_t token;
    uint32_t from, to, next, chain; /* next edge of the state, next of the hash slot */
} edge;

struct lr_suffix {
    int refs, max;
    uint32_t epoch; /* grows when places are no longer valid */
    int32_t *text;
    int n, text_cap;
    state *st;
    uint32_t n_st, st_cap;
    edge *ed;
    uint32_t n_ed, ed_cap;
    uint32_t *slot, n_slots; /* a power of two */
    uint32_t tip;            /* the state of the whole text */
    bool told;               /* the links of the tip know where it ends */
};

/* ---- memory ---- */

static int grow(void **p, uint32_t *cap, uint32_t need, size_t size)
{
    if (need <= *cap) return 0;
    uint32_t c = *cap * 2 > need ? *cap * 2 : need;
    void *q = lr_reallocarray(*p, c, size);
    if (!q) return LR_ENOMEM;
    *p = q;
    *cap = c;
    return 0;
}

static uint32_t hash(const lr_suffix *s, uint32_t from, int32_t token)
{
    uint64_t h = ((uint64_t)from << 32 | (uint32_t)token) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(h >> 32) & (s->n_slots - 1);
}

static int rehash(lr_suffix *s, uint32_t n)
{
    uint32_t *slot = lr_reallocarray(NULL, n, sizeof *slot);
    if (!slot) return LR_ENOMEM;
    lr_free(s->slot);
    s->slot = slot;
    s->n_slots = n;
    memset(slot, 0xff, n * sizeof *slot);
    for (uint32_t i = 0; i < s->n_ed; i++) {
        uint32_t h = hash(s, s->ed[i].from, s->ed[i].token);
        s->ed[i].chain = slot[h];
        slot[h] = i;
    }
    return 0;
}

/* Room for one more token: two states; a copy's edges are checked when it is made. */
static int reserve(lr_suffix *s)
{
    uint32_t cap = (uint32_t)s->text_cap;
    int rc = grow((void **)&s->text, &cap, (uint32_t)s->n + 1, sizeof *s->text);
    s->text_cap = (int)cap;
    if (!rc) rc = grow((void **)&s->st, &s->st_cap, s->n_st + 2, sizeof *s->st);
    return rc;
}

static void clear(lr_suffix *s)
{
    s->n = 0;
    s->n_st = 1;
    s->n_ed = 0;
    s->tip = 0;
    s->told = true;
    s->epoch++;
    s->st[0] = (state){.len = 0, .last = 0, .link = NIL, .edges = NIL};
    memset(s->slot, 0xff, s->n_slots * sizeof *s->slot);
}

int lr_suffix_new(lr_suffix **out, int max_tokens, lr_error *err)
{
    lr_suffix *s = lr_calloc(1, sizeof *s);
    if (!s || reserve(s) || rehash(s, 64)) {
        if (s) lr_free(s->text);
        if (s) lr_free(s->st);
        lr_free(s);
        return lr_fail(err, LR_ENOMEM, "no memory for a suffix automaton");
    }
    s->refs = 1;
    s->max = max_tokens < 16 ? 16 : max_tokens;
    clear(s);
    *out = s;
    return 0;
}

lr_suffix *lr_suffix_ref(lr_suffix *s)
{
    s->refs++;
    return s;
}

void lr_suffix_unref(lr_suffix *s)
{
    if (!s || --s->refs > 0) return;
    lr_free(s->text);
    lr_free(s->st);
    lr_free(s->ed);
    lr_free(s->slot);
    lr_free(s);
}

/* ---- building ---- */

static edge *find(const lr_suffix *s, uint32_t from, int32_t token)
{
    for (uint32_t i = s->slot[hash(s, from, token)]; i != NIL; i = s->ed[i].chain)
        if (s->ed[i].from == from && s->ed[i].token == token) return &s->ed[i];
    return NULL;
}

static int add_edge(lr_suffix *s, uint32_t from, int32_t token, uint32_t to)
{
    int rc = grow((void **)&s->ed, &s->ed_cap, s->n_ed + 1, sizeof *s->ed);
    if (!rc && s->n_ed + 1 > s->n_slots / 2) rc = rehash(s, s->n_slots * 2);
    if (rc) return rc;
    uint32_t h = hash(s, from, token), i = s->n_ed++;
    s->ed[i] = (edge){token, from, to, s->st[from].edges, s->slot[h]};
    s->st[from].edges = i;
    s->slot[h] = i;
    return 0;
}

/* A state between p and q: the suffixes of q that p's substrings and the token make. */
static int split(lr_suffix *s, uint32_t p, int32_t token, uint32_t q, uint32_t *out)
{
    uint32_t c = s->n_st++;
    s->st[c] = (state){.len = s->st[p].len + 1, .last = s->st[q].last, .link = s->st[q].link, .edges = NIL};
    for (uint32_t i = s->st[q].edges; i != NIL; i = s->ed[i].next)
        if (add_edge(s, c, s->ed[i].token, s->ed[i].to)) return LR_ENOMEM;
    for (edge *e; p != NIL && (e = find(s, p, token)) && e->to == q; p = s->st[p].link) e->to = c;
    s->st[q].link = c;
    *out = c;
    return 0;
}

/* The suffixes of the text so far ended here. */
static void tell(lr_suffix *s)
{
    uint32_t p = s->tip;
    for (int i = 0; i < LINKS && p != NIL && p != 0; i++, p = s->st[p].link) s->st[p].last = s->n;
    s->told = true;
}

static int add(lr_suffix *s, int32_t token)
{
    if (reserve(s)) return LR_ENOMEM;
    if (!s->told) tell(s);
    uint32_t cur = s->n_st++, p = s->tip;
    edge *e = NULL;
    s->st[cur] = (state){.len = s->st[p].len + 1, .last = s->n + 1, .link = 0, .edges = NIL};
    s->text[s->n] = token;
    for (; p != NIL && !(e = find(s, p, token)); p = s->st[p].link)
        if (add_edge(s, p, token, cur)) return LR_ENOMEM;
    if (p != NIL) {
        uint32_t q = e->to;
        if (s->st[q].len == s->st[p].len + 1) {
            s->st[cur].link = q;
        } else if (split(s, p, token, q, &s->st[cur].link)) {
            return LR_ENOMEM;
        }
    }
    s->n++;
    s->tip = cur;
    s->told = false;
    return 0;
}

/* Keeps the newer half. */
static int forget(lr_suffix *s)
{
    int keep = s->max / 2, n = s->n;
    int32_t *old = s->text;
    s->text = NULL;
    s->text_cap = 0;
    int rc = reserve(s);
    if (rc) {
        lr_free(s->text);
        s->text = old; /* clear needs none, later calls do */
        s->text_cap = n;
        return rc;
    }
    clear(s);
    for (int i = n - keep; i < n && !rc; i++) rc = add(s, old[i]);
    lr_free(old);
    return rc;
}

int lr_suffix_extend(lr_suffix *s, const int32_t *tokens, int n, lr_error *err)
{
    int rc = 0;
    for (int i = 0; i < n && !rc; i++) {
        if (s->n >= s->max) rc = forget(s);
        if (!rc) rc = add(s, tokens[i]);
    }
    if (!rc) return 0;
    clear(s);
    return lr_fail(err, LR_ENOMEM, "no memory for a suffix automaton of %d tokens", s->max);
}

int lr_suffix_end(lr_suffix *s, lr_error *err)
{
    static const int32_t end = END;
    return s->n == 0 || s->text[s->n - 1] == END ? 0 : lr_suffix_extend(s, &end, 1, err);
}

int lr_suffix_len(const lr_suffix *s) { return s->n; }

/* ---- asking ---- */

/* The tokens from `at` on; past the end of the text it goes on with itself if self is set. */
static int copy(const lr_suffix *s, int at, int k, bool self, int32_t *out)
{
    int got = 0;
    for (int i = at; got < k && (i < s->n || self); i++, got++) {
        int32_t t = i < s->n ? s->text[i] : out[i - s->n];
        if (t == END) break;
        out[got] = t;
    }
    return got;
}

int lr_suffix_propose(const lr_suffix *s, int min, int k, int32_t *out, int *match)
{
    *match = 0;
    if (s->tip == 0 || k <= 0) return 0;
    uint32_t p = s->st[s->tip].link; /* the longest suffix that ends elsewhere too */
    if (p == NIL || p == 0 || s->st[p].len < (min < 1 ? 1 : min)) return 0;
    *match = s->st[p].len;
    return copy(s, s->st[p].last, k, true, out);
}

void lr_suffix_follow(const lr_suffix *s, lr_suffix_at *at, const int32_t *tokens, int n)
{
    if (at->epoch != s->epoch) *at = (lr_suffix_at){.epoch = s->epoch};
    for (int i = 0; i < n; i++) {
        edge *e = NULL;
        uint32_t p = at->state;
        while (p != NIL && !(e = find(s, p, tokens[i]))) {
            p = s->st[p].link;
            if (p != NIL) at->len = s->st[p].len;
        }
        at->state = e ? e->to : 0;
        at->len = e ? at->len + 1 : 0;
    }
}

int lr_suffix_propose_at(const lr_suffix *s, const lr_suffix_at *at, int min, int k, int32_t *out, int *match)
{
    *match = 0;
    if (at->epoch != s->epoch || at->state == 0 || at->len < (min < 1 ? 1 : min)) return 0;
    *match = at->len;
    return copy(s, s->st[at->state].last, k, false, out);
}
