/* share.c - see share.h
 *
 * The operations of the stage are walked once in order and written anew: each value gets a layout, whole or the columns
 * of one rank, and what an operation needs otherwise is gathered or sliced before it. A first walk, backwards, finds
 * the products whose results become queries or keys, through whatever lies between (norms of heads, RoPE, sums), since
 * these are split by heads.
 */
#include "model/share.h"
#include "base/mem.h"
#include <stdio.h>
#include <string.h>

enum { WHOLE = -1, RUN = 32 };

typedef struct layout {
    int *at;   /* (tp + 1) owned by the part; NULL where ranks share columns (copied KV heads) */
    int lo, n; /* this rank's columns */
} layout;

typedef struct role {
    char kind; /* 0; 'q', 'k': queries, keys or values; 'w': whole */
    int op;    /* q, k: the KV or ATTN operation that it goes to */
} role;

typedef struct walk {
    const lr_program *g;
    const lr_place *pl;
    lr_share *p;
    int cap_values, cap_ops;
    role *roles; /* (g->n_values) */
    int *lay;    /* (g->n_values) layout number or WHOLE */
    int *map;    /* (g->n_values) value in the part, -1 = not yet */
    int *full;   /* (g->n_values) its whole twin, -1 = none yet */
    layout *layouts;
    int n_layouts, cap_layouts;
    lr_error *err;
} walk;

/* ---- head counts ---- */

static bool heads_fit(int heads, int kv_heads, int tp)
{
    return heads % tp == 0 && (kv_heads % tp == 0 || tp % kv_heads == 0);
}

bool lr_share_fits(const lr_program *g, int tp)
{
    for (int i = 0; i < g->n_ops; i++)
        if (g->ops[i].kind == LR_OP_ATTN && !heads_fit(g->ops[i].u.attn.n_heads, g->ops[i].u.attn.n_kv_heads, tp))
            return false;
    return true;
}

static int check_heads(const lr_program *g, int tp, lr_error *err)
{
    char list[200];
    size_t n = 0;
    int heads = 0, kv = 0;
    if (lr_share_fits(g, tp)) return 0;
    for (int i = 0; i < g->n_ops; i++) {
        if (g->ops[i].kind != LR_OP_ATTN) continue;
        heads = g->ops[i].u.attn.n_heads;
        kv = g->ops[i].u.attn.n_kv_heads;
    }
    for (int t = 1; t <= heads && n < sizeof list - 8; t++)
        if (lr_share_fits(g, t)) n += (size_t)snprintf(list + n, sizeof list - n, " %d", t);
    return lr_fail(err, LR_ESHAPE,
                   "%d heads with %d KV heads can't be split over %d ranks (--tp); counts that can be:%s", heads, kv,
                   tp, list);
}

/* ---- growing ---- */

static int grow(void *array, int *cap, int n, size_t size, lr_error *err)
{
    if (n < *cap) return 0;
    int want = *cap ? *cap * 2 : 64;
    void **p = array, *q = lr_reallocarray(*p, (size_t)want, size);
    if (!q) return lr_fail(err, LR_ENOMEM, "no memory for a part of the layer graph");
    *p = q;
    *cap = want;
    return 0;
}

static int new_value(walk *w, int width, int *out)
{
    int cap = w->cap_values, rc = grow(&w->p->route, &cap, w->p->n_values, sizeof(int), w->err);
    if (rc || (rc = grow(&w->p->width, &w->cap_values, w->p->n_values, sizeof(int), w->err))) return rc;
    w->p->width[w->p->n_values] = width;
    w->p->route[w->p->n_values] = -1;
    *out = w->p->n_values++;
    return 0;
}

/* Adds an operation; width > 0: with a result. */
static int emit(walk *w, lr_op op, struct lr_share_rows rows, int width, int *out)
{
    lr_share *p = w->p;
    int cap = w->cap_ops, rc = grow(&p->ops, &w->cap_ops, p->n_ops, sizeof *p->ops, w->err);
    if (!rc && cap != w->cap_ops) {
        void *q = lr_reallocarray(p->rows, (size_t)w->cap_ops, sizeof *p->rows);
        if (!q) return lr_fail(w->err, LR_ENOMEM, "no memory for a part of the layer graph");
        p->rows = q;
    }
    op.out = -1;
    if (!rc && width > 0) rc = new_value(w, width, &op.out);
    if (rc) return rc;
    p->rows[p->n_ops] = rows;
    p->ops[p->n_ops++] = op;
    if (out) *out = op.out;
    return 0;
}

/* ---- layouts ---- */

/* Keeps a list of columns for good; NULL without memory. */
static int *keep_at(walk *w, const int *at)
{
    lr_share *p = w->p;
    if (grow(&p->at, &p->cap_at, p->n_at, sizeof *p->at, w->err)) return NULL;
    int *copy = lr_memdup(at, ((size_t)w->pl->tp + 1) * sizeof *at);
    if (copy) p->at[p->n_at++] = copy;
    return copy;
}

static int find_layout(walk *w, const int *at, int lo, int n, int *out)
{
    size_t bytes = ((size_t)w->pl->tp + 1) * sizeof *at;
    for (int i = 0; i < w->n_layouts; i++) {
        const layout *l = &w->layouts[i];
        if (l->lo != lo || l->n != n || !l->at != !at || (at && memcmp(l->at, at, bytes) != 0)) continue;
        *out = i;
        return 0;
    }
    int rc = grow(&w->layouts, &w->cap_layouts, w->n_layouts, sizeof *w->layouts, w->err);
    int *kept = at && !rc ? keep_at(w, at) : NULL;
    if (at && !kept) return lr_fail(w->err, LR_ENOMEM, "no memory for a part of the layer graph");
    w->layouts[w->n_layouts] = (layout){kept, lo, n};
    *out = w->n_layouts++;
    return 0;
}

/* `units` of `each` columns over the ranks, as even as they come. */
static int even_layout(walk *w, int units, int each, int width, int *out)
{
    int tp = w->pl->tp, rc;
    int *at = lr_calloc((size_t)tp + 1, sizeof *at);
    if (!at) return lr_fail(w->err, LR_ENOMEM, "no memory for a part of the layer graph");
    for (int r = 0; r <= tp; r++) {
        int64_t c = (int64_t)units * r / tp * each;
        at[r] = c < width ? (int)c : width;
    }
    rc = find_layout(w, at, at[w->pl->tp_rank], at[w->pl->tp_rank + 1] - at[w->pl->tp_rank], out);
    lr_free(at);
    return rc;
}

/* Of a value with this role. */
static int layout_of(walk *w, role r, int width, int *out)
{
    int tp = w->pl->tp, each = RUN;
    *out = WHOLE;
    if (tp == 1 || width < tp || r.kind == 'w') return 0;
    if (r.kind == 0) {
        while (each > 1 && width / each < tp) each /= 2;
        return even_layout(w, (width + each - 1) / each, each, width, out);
    }
    const lr_attn *a = &w->g->ops[r.op].u.attn;
    int heads = r.kind == 'q' ? a->n_heads : a->n_kv_heads;
    if (heads % tp == 0) return even_layout(w, heads, a->head_dim, width, out);
    /* more ranks than KV heads: each has the one that its query heads go to */
    return find_layout(w, NULL, w->pl->tp_rank * heads / tp * a->head_dim, a->head_dim, out);
}

static int whole(walk *w, int value, int *out)
{
    if (w->lay[value] == WHOLE || w->full[value] >= 0) {
        *out = w->lay[value] == WHOLE ? w->map[value] : w->full[value];
        return 0;
    }
    const layout *l = &w->layouts[w->lay[value]];
    if (!l->at)
        return lr_fail(
            w->err, LR_EUNSUPPORTED,
            "the graph uses keys or values for more than attention: no more ranks (--tp) than KV heads then");
    lr_op op = {.kind = LR_OP_GATHER, .in = {w->map[value], -1}};
    op.u.gather.comm = w->pl->group;
    op.u.gather.at = l->at;
    int rc = emit(w, op, (struct lr_share_rows){0}, w->g->width[value], &w->full[value]);
    *out = w->full[value];
    return rc;
}

/* The columns of a layout, whatever the value has. */
static int in_layout(walk *w, int value, int lay, int *out)
{
    if (w->lay[value] == lay) {
        *out = w->map[value];
        return 0;
    }
    int rc = whole(w, value, out);
    if (rc || lay == WHOLE) return rc;
    lr_op op = {.kind = LR_OP_SLICE, .in = {*out, -1}};
    op.u.first = w->layouts[lay].lo;
    return emit(w, op, (struct lr_share_rows){0}, w->layouts[lay].n, out);
}

/* Do all ranks' columns begin and end at multiples of n? */
static bool aligned(const walk *w, int lay, int n)
{
    if (lay == WHOLE) return false;
    const layout *l = &w->layouts[lay];
    for (int r = 0; l->at && r <= w->pl->tp; r++)
        if (l->at[r] % n) return false;
    return l->lo % n == 0 && l->n % n == 0;
}

/* ---- roles ---- */

static bool passes(const lr_program *g, const lr_op *o)
{
    switch (o->kind) {
    case LR_OP_NORM:
        return o->u.norm.group < g->width[o->in[0]];
    case LR_OP_ROPE:
    case LR_OP_ADD:
    case LR_OP_MUL:
    case LR_OP_GLU:
    case LR_OP_ACT:
    case LR_OP_SCALE:
    case LR_OP_SOFTCAP:
    case LR_OP_ROWS:
        return true;
    default:
        return false;
    }
}

static void find_roles(walk *w)
{
    for (int i = w->g->n_ops - 1; i >= 0; i--) {
        const lr_op *o = &w->g->ops[i];
        for (int j = 0; j < 2; j++) {
            if (o->in[j] < 0 || w->roles[o->in[j]].kind) continue;
            role *r = &w->roles[o->in[j]];
            if (o->kind == LR_OP_ATTN || o->kind == LR_OP_KV)
                *r = (role){o->kind == LR_OP_ATTN ? 'q' : 'k', i};
            else if (o->kind == LR_OP_ROUTE || o->kind == LR_OP_EXPERTS || o->kind == LR_OP_MIX)
                *r = (role){'w', i}; /* all ranks choose: a few columns are not worth an exchange */
            else if (o->out >= 0 && passes(w->g, o) && w->g->width[o->in[j]] == w->g->width[o->out])
                *r = w->roles[o->out];
        }
    }
}

/* ---- the walk ---- */

static int walk_linear(walk *w, const lr_op *o)
{
    lr_op n = *o;
    int lay = WHOLE, rc = whole(w, o->in[0], &n.in[0]);
    if (!rc) rc = layout_of(w, w->roles[o->out], w->g->width[o->out], &lay);
    if (rc) return rc;
    w->lay[o->out] = lay;
    if (lay == WHOLE) return emit(w, n, (struct lr_share_rows){0}, w->g->width[o->out], &w->map[o->out]);
    const layout *l = &w->layouts[lay];
    return emit(w, n, (struct lr_share_rows){l->lo, l->n}, l->n, &w->map[o->out]);
}

static int walk_attention(walk *w, int i)
{
    const lr_op *o = &w->g->ops[i];
    role r = {o->kind == LR_OP_KV ? 'k' : 'q', i};
    int lay = WHOLE, tp = w->pl->tp, rc = layout_of(w, r, w->g->width[o->in[0]], &lay);
    lr_op n = *o;
    for (int j = 0; j < 2 && !rc; j++)
        if (o->in[j] >= 0) rc = in_layout(w, o->in[j], lay, &n.in[j]);
    if (rc) return rc;
    lr_attn *a = &n.u.attn;
    a->layer -= w->p->first_layer;
    if (lay != WHOLE) {
        a->n_heads = o->u.attn.n_heads / tp;
        a->n_kv_heads = o->u.attn.n_kv_heads < tp ? 1 : o->u.attn.n_kv_heads / tp;
        if (a->sinks) a->sinks += (ptrdiff_t)w->pl->tp_rank * a->n_heads;
    }
    if (o->kind == LR_OP_KV) {
        w->p->layers[a->layer].n_kv_heads = a->n_kv_heads;
        return emit(w, n, (struct lr_share_rows){0}, 0, NULL);
    }
    w->lay[o->out] = lay;
    return emit(w, n, (struct lr_share_rows){0}, a->n_heads * a->head_dim, &w->map[o->out]);
}

/* One column in, one column out, or groups of columns: keeps the layout of its inputs where they agree. */
static int walk_columns(walk *w, const lr_op *o)
{
    lr_op n = *o;
    int lay = w->lay[o->in[0]], rc = 0;
    bool one = o->in[1] >= 0 && w->g->width[o->in[1]] != w->g->width[o->out]; /* MUL by one value a row */
    if (o->in[1] >= 0 && !one && w->lay[o->in[1]] != lay) lay = WHOLE;
    if (o->kind == LR_OP_NORM && !aligned(w, lay, o->u.norm.group)) lay = WHOLE;
    if (o->kind == LR_OP_ROPE && !aligned(w, lay, o->u.rope.head_dim)) lay = WHOLE;
    for (int j = 0; j < 2 && !rc; j++)
        if (o->in[j] >= 0) rc = in_layout(w, o->in[j], j && one ? WHOLE : lay, &n.in[j]);
    if (rc) return rc;
    int width = lay == WHOLE ? w->g->width[o->out] : w->layouts[lay].n;
    if (o->kind == LR_OP_ROPE) n.u.rope.n_heads = width / o->u.rope.head_dim;
    w->lay[o->out] = lay;
    return emit(w, n, (struct lr_share_rows){0}, width, &w->map[o->out]);
}

/* ---- experts ---- */

/* The choice of a route's value, if its experts are spread over the ranks; else NULL. */
static const lr_route *spread_route(const walk *w, int value)
{
    for (int i = 0; i < w->g->n_ops; i++) {
        const lr_op *o = &w->g->ops[i];
        if (o->kind == LR_OP_ROUTE && o->out == value)
            return w->pl->tp > 1 && o->u.route.n_experts >= w->pl->tp ? &o->u.route : NULL;
    }
    return NULL;
}

/* ROUTE, EXPERTS, MIX; n: the operation with its inputs in place. */
static int walk_experts(walk *w, const lr_op *o, lr_op n)
{
    const lr_route *t = spread_route(w, o->kind == LR_OP_ROUTE ? o->out : o->in[1]);
    struct lr_share_rows rows = {0};
    int lay = WHOLE, rc = t ? even_layout(w, t->n_experts, 1, t->n_experts, &lay) : 0; /* experts as columns */
    if (rc) return rc;
    if (t) rows = (struct lr_share_rows){w->layouts[lay].lo, w->layouts[lay].n};
    if (t && o->kind == LR_OP_ROUTE) {
        n.u.route.from = rows.from;
        n.u.route.n_own = rows.n;
        rows = (struct lr_share_rows){0};
    } else if (t && o->kind == LR_OP_MIX) {
        lr_op all = {.kind = LR_OP_GATHER, .in = {n.in[0], -1}};
        all.u.gather.comm = w->pl->group;
        all.u.gather.at = w->layouts[lay].at;
        rc = emit(w, all, (struct lr_share_rows){0}, w->g->width[o->in[0]], &n.in[0]);
        if (!rc) w->p->route[n.in[0]] = n.in[1];
        rows = (struct lr_share_rows){0};
    }
    return rc ? rc : emit(w, n, rows, w->g->width[o->out], &w->map[o->out]);
}

static int walk_op(walk *w, int i)
{
    const lr_op *o = &w->g->ops[i];
    lr_op n = *o;
    int rc = 0;
    if (o->kind == LR_OP_LINEAR) return walk_linear(w, o);
    if (o->kind == LR_OP_ATTN || o->kind == LR_OP_KV) return walk_attention(w, i);
    if (passes(w->g, o)) return walk_columns(w, o);
    for (int j = 0; j < 2 && !rc; j++)
        if (o->in[j] >= 0) rc = whole(w, o->in[j], &n.in[j]);
    if (rc || o->out < 0) return rc ? rc : emit(w, n, (struct lr_share_rows){0}, 0, NULL);
    if (o->kind == LR_OP_ROUTE || o->kind == LR_OP_EXPERTS || o->kind == LR_OP_MIX) return walk_experts(w, o, n);
    return emit(w, n, (struct lr_share_rows){0}, w->g->width[o->out], &w->map[o->out]);
}

static int input(walk *w, int value)
{
    lr_op op = {.kind = LR_OP_INPUT, .in = {-1, -1}};
    w->p->in_width = w->g->width[value];
    return emit(w, op, (struct lr_share_rows){0}, w->g->width[value], &w->map[value]);
}

/* What the stage gives: the next one's input, whole; or the logits, as they are spread over its ranks. */
static int result(walk *w, int value)
{
    lr_share *p = w->p;
    int tp = w->pl->tp, rc = 0;
    p->partial = value != w->g->logits;
    p->hidden = -1;
    if (!p->partial && w->g->hidden >= 0) rc = whole(w, w->g->hidden, &p->hidden);
    if (rc) return rc;
    if (p->partial || w->lay[value] == WHOLE) rc = whole(w, value, &p->logits);
    p->logits_at = rc ? NULL : lr_calloc((size_t)tp + 1, sizeof *p->logits_at);
    if (!p->logits_at) return rc ? rc : lr_fail(w->err, LR_ENOMEM, "no memory for a part of the layer graph");
    for (int r = 1; r <= tp; r++) p->logits_at[r] = w->g->width[value]; /* rank 0 of the stage has all */
    if (!p->partial && w->lay[value] != WHOLE) p->logits = w->map[value];
    p->result_width = p->width[p->logits];
    if (p->partial || w->lay[value] == WHOLE) return 0;
    memcpy(p->logits_at, w->layouts[w->lay[value]].at, ((size_t)tp + 1) * sizeof *p->logits_at);
    return 0;
}

static int alloc_walk(walk *w, lr_error *err)
{
    size_t n = (size_t)w->g->n_values;
    w->roles = lr_calloc(n, sizeof *w->roles);
    w->lay = lr_calloc(n, sizeof *w->lay);
    w->map = lr_calloc(n, sizeof *w->map);
    w->full = lr_calloc(n, sizeof *w->full);
    if (!w->roles || !w->lay || !w->map || !w->full)
        return lr_fail(err, LR_ENOMEM, "no memory for a part of the layer graph");
    for (size_t v = 0; v < n; v++) w->lay[v] = w->map[v] = w->full[v] = -1;
    return 0;
}

/* The KV layers of operations from .. to - 1. */
static int take_layers(walk *w, int from, int to, const lr_kv_layer *layers)
{
    lr_share *p = w->p;
    int lo = -1, hi = -1;
    for (int i = from; i < to; i++) {
        if (w->g->ops[i].kind != LR_OP_KV) continue;
        int l = w->g->ops[i].u.attn.layer;
        if (lo < 0 || l < lo) lo = l;
        if (l > hi) hi = l;
    }
    if (lo < 0) return lr_fail(w->err, LR_ESHAPE, "a pipeline stage has no KV layer");
    p->first_layer = lo;
    p->n_layers = hi - lo + 1;
    p->layers = lr_memdup(layers + lo, (size_t)p->n_layers * sizeof *p->layers);
    return p->layers ? 0 : lr_fail(w->err, LR_ENOMEM, "no memory for a part of the layer graph");
}

int lr_share_make(lr_share *out, const lr_program *g, const lr_kv_layer *layers, int n_layers, const size_t *cost,
                  const lr_place *pl, lr_error *err)
{
    lr_share p = {0};
    walk w = {.g = g, .pl = pl, .p = &p, .err = err};
    int *first = lr_calloc((size_t)pl->pp + 1, sizeof *first), *value = lr_calloc((size_t)pl->pp + 1, sizeof *value);
    int rc =
        first && value ? check_heads(g, pl->tp, err) : lr_fail(err, LR_ENOMEM, "no memory for a part of the graph");
    if (!rc) rc = lr_share_stages(g, n_layers, cost, pl->pp, first, value, err);
    if (!rc) rc = alloc_walk(&w, err);
    p.n_whole_layers = n_layers;
    if (!rc && !(p.whole_layers = lr_memdup(layers, (size_t)n_layers * sizeof *layers)))
        rc = lr_fail(err, LR_ENOMEM, "no memory for a part of the layer graph");
    if (!rc) {
        int from = first[pl->stage], to = first[pl->stage + 1];
        find_roles(&w);
        rc = take_layers(&w, from, to, layers);
        if (!rc && pl->stage > 0) rc = input(&w, value[pl->stage]);
        for (int i = from; i < to && !rc; i++) {
            rc = walk_op(&w, i);
            int v = rc ? -1 : g->ops[i].out;
            if (v >= 0 && g->route && g->route[v] >= 0) p.route[w.map[v]] = w.map[g->route[v]];
        }
        if (!rc) rc = result(&w, pl->stage == pl->pp - 1 ? g->logits : value[pl->stage + 1]);
    }
    lr_free(first);
    lr_free(value);
    lr_free(w.roles);
    lr_free(w.lay);
    lr_free(w.map);
    lr_free(w.full);
    lr_free(w.layouts);
    if (rc) {
        lr_share_deinit(&p);
        return rc;
    }
    *out = p;
    return 0;
}

void lr_share_deinit(lr_share *p)
{
    for (int i = 0; i < p->n_at; i++) lr_free(p->at[i]);
    lr_free(p->at);
    lr_free(p->width);
    lr_free(p->route);
    lr_free(p->ops);
    lr_free(p->rows);
    lr_free(p->logits_at);
    lr_free(p->layers);
    lr_free(p->whole_layers);
    *p = (lr_share){0};
}
