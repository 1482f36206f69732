/* cpu_moe.c - mixture of experts: who goes to which expert, and the way back.
 *
 * A slot is one (row, chosen expert) pair. The slots of a batch are sorted by expert, rows ascending inside one, so
 * that the product of an expert is one matrix product over neighbouring slots, whose weights are read once; an expert
 * nobody chose is not read at all. A slot's values depend on its row and expert alone, and a row's experts are added up
 * in the order of their rank: the company that a row has in the batch changes where its slots lie and nothing else.
 */
#include "backend/cpu_int.h"
#include "base/mem.h"
#include <math.h>
#include <string.h>

/* ---- choosing ---- */

/* The best of scores (NaN and -INFINITY are never chosen before anything else), the lower number on ties. */
static int best_of(const float *scores, const bool *taken, int n)
{
    int best = -1;
    for (int i = 0; i < n; i++) {
        if (taken[i]) continue;
        if (best < 0 || scores[i] > scores[best] || (isnan(scores[best]) && !isnan(scores[i]))) best = i;
    }
    return best;
}

static void softmax(const float *x, float *y, int n)
{
    float top = -INFINITY;
    double sum = 0;
    for (int i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    for (int i = 0; i < n; i++) {
        y[i] = expf(x[i] - top);
        sum += y[i];
    }
    for (int i = 0; i < n; i++) y[i] = (float)(y[i] / sum);
}

/* Marks as taken the experts of all groups but the best ones. */
static void keep_groups(const lr_route *t, const float *scores, bool *taken)
{
    int n = t->n_experts / t->n_groups;
    float group[LR_EXPERTS_MAX];
    bool kept[LR_EXPERTS_MAX] = {false}, seen[LR_EXPERTS_MAX];
    for (int g = 0; g < t->n_groups; g++) {
        memset(seen, 0, (size_t)n * sizeof *seen);
        group[g] = 0;
        for (int i = 0; i < t->group_best && i < n; i++) {
            int e = best_of(scores + g * n, seen, n);
            seen[e] = true;
            group[g] += scores[g * n + e];
        }
    }
    for (int i = 0; i < t->n_groups_used; i++) kept[best_of(group, kept, t->n_groups)] = true;
    for (int e = 0; e < t->n_experts; e++) taken[e] = !kept[e / n];
}

void lr_cpu_route(const lr_route *t, const float *logits, const float *bias, float *out)
{
    float p[LR_EXPERTS_MAX], scores[LR_EXPERTS_MAX], *w = out + t->n_used;
    bool taken[LR_EXPERTS_MAX] = {false};
    int n = t->n_experts;
    if (t->gate == LR_GATE_SOFTMAX)
        softmax(logits, p, n);
    else
        for (int i = 0; i < n; i++) p[i] = t->gate == LR_GATE_SIGMOID ? 1.0f / (1.0f + expf(-logits[i])) : logits[i];
    for (int i = 0; i < n; i++) scores[i] = bias ? p[i] + bias[i] : p[i];
    if (t->n_groups > 0) keep_groups(t, scores, taken);
    float sum = 0;
    for (int i = 0; i < t->n_used; i++) {
        int e = best_of(scores, taken, n);
        taken[e] = true;
        out[i] = (float)e;
        w[i] = p[e];
        sum += p[e];
    }
    if (t->gate == LR_GATE_SOFTMAX_CHOSEN)
        softmax(w, w, t->n_used);
    else if (t->normalize)
        for (int i = 0; i < t->n_used; i++) w[i] /= sum;
    for (int i = 0; i < t->n_used; i++) w[i] *= t->scale;
}

/* ---- sorting ---- */

void lr_cpu_sort(moe_route *m, const float *chosen, int rows)
{
    int n = m->n_used, *start = m->start;
    memset(start, 0, ((size_t)m->n_experts + 1) * sizeof *start);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < n; i++) start[(int)chosen[(size_t)r * 2 * (size_t)n + (size_t)i] + 1]++;
    for (int e = 0; e < m->n_experts; e++) start[e + 1] += start[e];
    int first = start[m->from];
    m->n_slots = start[m->from + m->n_own] - first;
    m->n_pieces = 0;
    for (int e = 0; e < m->n_own; e++) {
        int at = start[m->from + e] - first, end = start[m->from + e + 1] - first;
        for (; at < end; at += MOE_PIECE)
            m->pieces[m->n_pieces++] = (moe_piece){e, at, end - at < MOE_PIECE ? end - at : MOE_PIECE};
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < n; i++) {
            int slot = start[(int)chosen[(size_t)r * 2 * (size_t)n + (size_t)i]]++;
            m->slot_of[(size_t)r * (size_t)n + (size_t)i] = slot;
            if (slot >= first && slot - first < m->n_slots) m->slot_row[slot - first] = r;
        }
    memmove(start + 1, start, (size_t)m->n_experts * sizeof *start); /* each has become the next one's */
    start[0] = 0;
}

/* ---- the way back ---- */

void lr_cpu_mix(const moe_route *m, const float *chosen, const float *slots, int row, float *y, int width)
{
    const float *w = chosen + (size_t)row * 2 * (size_t)m->n_used + m->n_used;
    for (int i = 0; i < m->n_used; i++) {
        const float *x = slots + (size_t)m->slot_of[(size_t)row * (size_t)m->n_used + (size_t)i] * (size_t)width;
        for (int j = 0; j < width; j++) y[j] = i ? y[j] + w[i] * x[j] : w[i] * x[j];
    }
}

/* ---- memory ---- */

int lr_cpu_route_new(lr_plan *p, const lr_route *t, bool narrow, lr_error *err)
{
    moe_route *m = lr_reallocarray(p->routes, (size_t)p->n_routes + 1, sizeof *m);
    if (!m) return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    p->routes = m;
    m += p->n_routes;
    size_t slots = (size_t)(narrow ? p->max_out : p->max_rows) * (size_t)t->n_used, n = (size_t)t->n_experts;
    *m = (moe_route){.n_experts = t->n_experts, .n_used = t->n_used, .narrow = narrow};
    m->from = t->n_own ? t->from : 0;
    m->n_own = t->n_own ? t->n_own : t->n_experts;
    m->slot_row = lr_calloc(slots, sizeof *m->slot_row);
    m->slot_of = lr_calloc(slots, sizeof *m->slot_of);
    m->start = lr_calloc(n + 1, sizeof *m->start);
    m->pieces = lr_calloc((slots < n ? slots : n) + slots / MOE_PIECE + 1, sizeof *m->pieces);
    p->n_routes++;
    if (!m->slot_row || !m->slot_of || !m->start || !m->pieces)
        return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    return p->n_routes - 1;
}

void lr_cpu_routes_free(lr_plan *p)
{
    for (int i = 0; i < p->n_routes; i++) {
        lr_free(p->routes[i].slot_row);
        lr_free(p->routes[i].slot_of);
        lr_free(p->routes[i].start);
        lr_free(p->routes[i].pieces);
    }
    lr_free(p->routes);
}
