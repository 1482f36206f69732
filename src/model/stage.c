/* stage.c - cuts a layer graph into pipeline stages: see share.h.
 *
 * A cut is possible before an operation if exactly one value that was made before is still needed, and if it does not
 * part the operations of a KV layer. Among all choices of pp - 1 cuts with a layer in each stage, the one whose
 * heaviest stage is lightest is taken (dynamic programming over the possible cuts).
 */
#include "base/mem.h"
#include "model/share.h"
#include <string.h>

typedef struct cut {
    int op, value, layers; /* before this operation; layers that are complete before it */
    double cost;           /* of all operations before it */
} cut;

static int layer_of(const lr_op *o) { return o->kind == LR_OP_KV || o->kind == LR_OP_ATTN ? o->u.attn.layer : -1; }

/* live[i] and sum[i]: how many values go over a cut before operation i, and the sum of their numbers. */
static void count_live(const lr_program *p, int *def, int *last, int *live, int64_t *sum)
{
    for (int v = 0; v < p->n_values; v++) def[v] = last[v] = -1;
    for (int i = 0; i < p->n_ops; i++) {
        for (int j = 0; j < 2; j++)
            if (p->ops[i].in[j] >= 0) last[p->ops[i].in[j]] = i;
        if (p->ops[i].out >= 0) def[p->ops[i].out] = i;
    }
    last[p->logits] = p->n_ops;
    if (p->hidden >= 0) last[p->hidden] = p->n_ops;
    for (int v = 0; v < p->n_values; v++)
        for (int i = def[v] + 1; def[v] >= 0 && i <= last[v] && i < p->n_ops; i++) {
            live[i]++;
            sum[i] += v;
        }
}

/* Marks in `bad` the places that would part a layer's operations; returns how many layers end before each in `ends`. */
static void mark_layers(const lr_program *p, int n_layers, bool *bad, int *ends, int *first)
{
    for (int l = 0; l < n_layers; l++) first[l] = -1;
    for (int i = 0; i < p->n_ops; i++) {
        int l = layer_of(&p->ops[i]);
        if (l >= 0 && first[l] < 0) first[l] = i;
        for (int k = l >= 0 ? first[l] + 1 : i + 1; k <= i; k++) bad[k] = true;
    }
    for (int i = p->n_ops - 1; i >= 0; i--) {
        int l = layer_of(&p->ops[i]);
        if (l < 0 || first[l] < 0) continue;
        first[l] = -1; /* its last operation */
        for (int k = i + 1; k <= p->n_ops; k++) ends[k]++;
    }
}

static int find_cuts(const lr_program *p, int n_layers, const size_t *cost, cut **out, int *n_out, lr_error *err)
{
    size_t n = (size_t)p->n_ops + 1;
    int *def = lr_calloc((size_t)p->n_values * 2, sizeof *def), *live = lr_calloc(n * 2, sizeof *live), rc = 0;
    int *first = lr_calloc((size_t)n_layers + 1, sizeof *first);
    int64_t *sum = lr_calloc(n, sizeof *sum);
    bool *bad = lr_calloc(n, sizeof *bad);
    cut *c = lr_calloc(n, sizeof *c);
    int m = 0;
    double total = 0;
    if (!def || !live || !first || !sum || !bad || !c) {
        rc = lr_fail(err, LR_ENOMEM, "no memory to cut the layer graph");
    } else {
        int *ends = live + n;
        count_live(p, def, def + p->n_values, live, sum);
        mark_layers(p, n_layers, bad, ends, first);
        for (int i = 0; i <= p->n_ops; i++) {
            bool edge = i == 0 || i == p->n_ops;
            if (edge || (live[i] == 1 && !bad[i])) c[m++] = (cut){i, edge ? -1 : (int)sum[i], ends[i], total};
            if (i < p->n_ops) total += (double)cost[i];
        }
    }
    lr_free(def);
    lr_free(live);
    lr_free(first);
    lr_free(sum);
    lr_free(bad);
    if (rc) {
        lr_free(c);
        return rc;
    }
    *out = c;
    *n_out = m;
    return 0;
}

/* The most stages that have a layer each. */
static int most_stages(const cut *c, int n)
{
    int stages = 0, have = 0;
    for (int i = 1; i < n; i++)
        if (c[i].layers > have) {
            stages++;
            have = c[i].layers;
        }
    return stages;
}

/* best[s * n + j]: the heaviest stage's cost if the operations before cut j make s stages; from: where the last began.
 */
static void solve(const cut *c, int n, int pp, double *best, int *from)
{
    for (int k = 0; k < (pp + 1) * n; k++) best[k] = -1; /* impossible */
    best[0] = 0;
    for (int s = 1; s <= pp; s++)
        for (int j = 1; j < n; j++)
            for (int i = 0; i < j; i++) {
                double b = best[(s - 1) * n + i], w = c[j].cost - c[i].cost;
                if (b < 0 || c[j].layers <= c[i].layers) continue;
                if (w > b) b = w;
                double *slot = &best[s * n + j];
                if (*slot >= 0 && *slot <= b) continue;
                *slot = b;
                from[s * n + j] = i;
            }
}

int lr_share_stages(const lr_program *p, int n_layers, const size_t *cost, int pp, int *first, int *value,
                    lr_error *err)
{
    cut *c;
    int n = 0, rc = find_cuts(p, n_layers, cost, &c, &n, err);
    if (rc) return rc;
    size_t cells = ((size_t)pp + 1) * (size_t)n;
    double *best = lr_calloc(cells, sizeof *best);
    int *from = lr_calloc(cells, sizeof *from), most = most_stages(c, n);
    if (!best || !from) {
        rc = lr_fail(err, LR_ENOMEM, "no memory to cut the layer graph");
    } else if (pp > most) {
        rc = lr_fail(err, LR_ESHAPE, "the model's %d layers make 1 to %d pipeline stages (--pp), not %d", n_layers,
                     most, pp);
    } else {
        solve(c, n, pp, best, from);
        for (int s = pp, j = n - 1; s >= 0; j = from[s * n + j], s--) {
            first[s] = c[j].op;
            value[s] = c[j].value;
        }
    }
    lr_free(best);
    lr_free(from);
    lr_free(c);
    return rc;
}
