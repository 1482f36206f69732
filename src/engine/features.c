/* features.c - what the model makes of its rows, for a draft that goes on from there (model/eagle.h).
 *
 * Each step gives the features of all its rows. Those of a request's own rows are known to be right and are fed to its
 * draft at once; those of drafted tokens as the walk through the draft takes them. The draft runs them when it is asked
 * (spec/draft.c), or when many have come.
 */
#include "engine/speculate_int.h"

float *lr_spec__features(const lr_request *r)
{
    const struct lr_spec_state *st = r->e->spec;
    const struct lr_spec_req *s = r->spec;
    bool may = st->eagle && (s->p.method == LR_SPEC_EAGLE || s->p.choose || r->e->policy.draft);
    return may && r->info.kind == LR_REQ_GENERATE ? st->features : NULL;
}

/* n rows of the batch are the sequence's from position pos on. */
static void feed(lr_request *r, int row, int pos, int n)
{
    struct lr_spec_state *st = r->e->spec;
    lr_seq *q = r->info.seq;
    lr_error err;
    size_t width = (size_t)lr_eagle_width(st->eagle);
    if (!q->draft && lr_spec__open_draft(r->e, q, pos, &err)) return;
    if (lr_eagle_input(st->eagle, st->features + (size_t)row * width, n, st->eagle_in, &err)) return;
    lr_draft_feed(q->draft, pos, n, st->eagle_in);
}

void lr_spec__feed(lr_engine *e, const lr_batch *b)
{
    for (int i = 0; i < b->n_seqs; i++) {
        lr_request *r = e->batch_req[i];
        if (!r || !r->spec || !lr_spec__features(r)) continue;
        feed(r, b->seqs[i].row, b->seqs[i].pos, r->granted);
        r->spec->fed = -1;
        r->spec->fed_pos = b->seqs[i].pos + r->granted - 1;
    }
}

void lr_spec__feed_path(lr_request *r, int node)
{
    struct lr_spec_req *s = r->spec;
    int path[LR_SPEC_MAX], n = 0;
    for (int i = node; i >= 0 && i != s->fed; i = s->tree.parent[i]) path[n++] = i;
    while (n-- > 0) feed(r, r->e->out_rows[r->out + path[n] + 1], s->fed_pos + s->tree.depth[path[n]], 1);
    s->fed = node;
}
