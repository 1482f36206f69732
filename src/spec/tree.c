/* tree.c - drafts that branch, put into the order in which they are run: see spec.h.
 *
 * The order is that of a walk which takes each node's first child at once: the first branch of all is one run of rows
 * behind the sequence's last token, and every other run starts at a node whose parent stands further in front.
 */
#include "spec/spec.h"

/* Drops what has no parent and what repeats a sibling; *n nodes stay. */
static void tidy(lr_spec_tree *t)
{
    int to[LR_SPEC_MAX], n = 0;
    for (int i = 0; i < t->n; i++) {
        int p = t->parent[i], same = -1;
        bool lost = p >= i || p < -1 || (p >= 0 && to[p] < 0);
        if (!lost && p >= 0) p = to[p];
        for (int j = 0; !lost && j < n; j++)
            if (t->parent[j] == p && t->token[j] == t->token[i]) same = j;
        to[i] = lost ? -1 : same >= 0 ? same : n;
        if (lost || same >= 0) continue;
        t->token[n] = t->token[i];
        t->parent[n++] = p;
    }
    t->n = n;
}

static int first_child(const lr_spec_tree *t, int node, int from)
{
    for (int i = from; i < t->n; i++)
        if (t->parent[i] == node) return i;
    return -1;
}

void lr_spec_tree_order(lr_spec_tree *t)
{
    lr_spec_tree in;
    int old[LR_SPEC_MAX + 1], top = 0, n = 0; /* the path that is being walked: nodes of `in`, */
    int at[LR_SPEC_MAX + 1];                  /* their new numbers, */
    int next[LR_SPEC_MAX + 1];                /* and where to look for the next child */
    tidy(t);
    in = *t;
    old[0] = at[0] = -1;
    next[0] = 0;
    t->n_runs = 0;
    while (top >= 0) {
        int i = first_child(&in, old[top], next[top]);
        if (i < 0) {
            top--;
            continue;
        }
        next[top] = i + 1;
        t->token[n] = in.token[i];
        t->parent[n] = at[top];
        t->depth[n] = top + 1;
        if (at[top] != n - 1 || n == 0) t->run_first[t->n_runs++] = n;
        t->run[n] = t->n_runs - 1;
        top++;
        old[top] = i;
        at[top] = n++;
        next[top] = 0;
    }
    t->run_first[t->n_runs] = n;
}

void lr_spec_tree_best(lr_spec_tree *t, const int32_t *ids, const float *chance, int places, int wide, int k,
                       double least)
{
    int depth[LR_SPEC_MAX + 1] = {0}, next[LR_SPEC_MAX + 1] = {0}; /* [0]: the root; next: its first guess not taken */
    double sure[LR_SPEC_MAX + 1];
    sure[0] = 1;
    for (t->n = 0; t->n < k && t->n < LR_SPEC_MAX;) {
        double best = 0;
        int at = -1;
        for (int i = 0; i <= t->n; i++) {
            if (depth[i] == places || next[i] == wide) continue;
            double c = sure[i] * (double)chance[depth[i] * wide + next[i]];
            if (c <= best) continue;
            best = c;
            at = i;
        }
        if (at < 0 || best < least) return;
        t->token[t->n] = ids[depth[at] * wide + next[at]++];
        t->parent[t->n++] = at - 1;
        depth[t->n] = depth[at] + 1;
        next[t->n] = 0;
        sure[t->n] = best;
    }
}

int lr_spec_tree_child(const lr_spec_tree *t, int node, int32_t token)
{
    for (int i = node + 1; i < t->n; i++)
        if (t->parent[i] == node && t->token[i] == token) return i;
    return -1;
}

bool lr_spec_tree_above(const lr_spec_tree *t, int above, int node)
{
    while (node > above) node = t->parent[node];
    return node == above;
}
