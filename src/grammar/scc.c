/* scc.c - strongly connected components of a directed graph (Tarjan's algorithm, without recursion). */
#include "grammar/grammar_int.h"

typedef struct tarjan {
    const uint32_t *edge_at, *edge;
    uint32_t *comp, *order, n_order, n_comp, counter;
    uint32_t *index, *low, *path, *at, *open, n_open;
} tarjan;

static void enter(tarjan *t, uint32_t depth, uint32_t v)
{
    t->path[depth] = v;
    t->at[depth] = t->edge_at[v];
    t->index[v] = t->low[v] = ++t->counter;
    t->open[t->n_open++] = v;
}

static void close_component(tarjan *t, uint32_t v)
{
    uint32_t w;
    do {
        w = t->open[--t->n_open];
        t->comp[w] = t->n_comp;
        t->order[t->n_order++] = w;
    } while (w != v);
    t->n_comp++;
}

static void visit(tarjan *t, uint32_t root)
{
    uint32_t depth = 0;
    enter(t, 0, root);
    for (;;) {
        uint32_t v = t->path[depth];
        if (t->at[depth] < t->edge_at[v + 1]) {
            uint32_t w = t->edge[t->at[depth]++];
            if (!t->index[w])
                enter(t, ++depth, w);
            else if (t->comp[w] == UINT32_MAX && t->index[w] < t->low[v])
                t->low[v] = t->index[w];
            continue;
        }
        if (t->low[v] == t->index[v]) close_component(t, v);
        if (depth == 0) return;
        uint32_t up = t->path[--depth];
        if (t->low[v] < t->low[up]) t->low[up] = t->low[v];
    }
}

int lr_scc(uint32_t n, const uint32_t *edge_at, const uint32_t *edge, uint32_t *comp, uint32_t *order)
{
    uint32_t *work = lr_calloc((size_t)n + 1, 5 * sizeof *work);
    if (!work) return LR_ENOMEM;
    tarjan t = {.edge_at = edge_at, .edge = edge, .comp = comp, .order = order};
    t.index = work;
    t.low = work + n;
    t.path = work + 2 * (size_t)n;
    t.at = work + 3 * (size_t)n;
    t.open = work + 4 * (size_t)n;
    for (uint32_t v = 0; v < n; v++) comp[v] = UINT32_MAX;
    for (uint32_t v = 0; v < n; v++) {
        if (!t.index[v]) visit(&t, v);
    }
    lr_free(work);
    return 0;
}
