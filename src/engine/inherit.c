/* inherit.c - drafts of sequences that begin alike. What the prefix index has, the model does not compute again for a
 * new sequence; a draft would have to catch up with it, and one that goes on from features could not: it never gets
 * them. So a new sequence's draft begins as a copy of another one's of the same namespace, as far as both have the same
 * tokens: of a sequence that is open, or of one of the last that were closed, whose drafts are kept for this. A row of
 * features belongs to the token behind it as well: the last one of what both have stays that of the other text.
 */
#include "engine/speculate_int.h"

enum { WORTH = 16 }; /* tokens */

/* Whether the draft serves a sequence whose features come from position pos on (-1 = it needs none); *n: how well. */
static bool serves(const lr_draft_slot *d, const lr_seq *q, int pos, int *n)
{
    int base, rows = lr_draft_shares(d, q->tokens, q->len, &base);
    *n = rows;
    return rows >= WORTH && (pos < 0 || (base < pos && lr_draft_computed(d) >= pos - base && rows >= pos - base - 1));
}

int lr_spec__open_draft(lr_engine *e, lr_seq *q, int pos, lr_error *err)
{
    struct lr_spec_state *st = e->spec;
    lr_draft_slot *best = NULL;
    int most = 0, n;
    for (const lr_seq *s = e->seqs; s && pos; s = s->next) {
        if (s == q || !s->draft || s->kv.space != q->kv.space || !serves(s->draft, q, pos, &n) || n <= most) continue;
        best = s->draft;
        most = n;
    }
    for (int i = 0; i < st->n_kept && pos; i++) {
        if (st->kept[i].space != q->kv.space || !serves(st->kept[i].draft, q, pos, &n) || n <= most) continue;
        best = st->kept[i].draft;
        most = n;
    }
    if (best && lr_draft_fork(best, &q->draft, err) == 0) {
        if (pos > 0) lr_draft_adopt(q->draft, pos, q->tokens[pos]);
        return 0;
    }
    return lr_draft_open(st->draft, &q->draft, err);
}

static void forget(lr_engine *e, int i)
{
    struct lr_spec_state *st = e->spec;
    lr_draft_close(st->kept[i].draft);
    lr_kv_space_unref(e->kv, st->kept[i].space);
    for (st->n_kept--; i < st->n_kept; i++) st->kept[i] = st->kept[i + 1];
}

void lr_spec__retire(lr_seq *q)
{
    lr_engine *e = q->e;
    struct lr_spec_state *st = e->spec;
    int base, n = q->draft ? lr_draft_shares(q->draft, q->tokens, q->len, &base) : 0;
    if (n < WORTH) {
        lr_draft_close(q->draft);
    } else {
        for (int i = st->n_kept - 1; i >= 0; i--) { /* one that it says as well goes */
            int m = lr_draft_shares(st->kept[i].draft, q->tokens, q->len, &base);
            if (st->kept[i].space == q->kv.space && m == lr_draft_computed(st->kept[i].draft)) forget(e, i);
        }
        if (st->n_kept == SPEC_KEPT) forget(e, 0);
        st->kept[st->n_kept].draft = q->draft;
        st->kept[st->n_kept++].space = lr_kv_space_ref(q->kv.space);
    }
    q->draft = NULL;
}

void lr_spec__forget(lr_engine *e)
{
    while (e->spec->n_kept > 0) forget(e, e->spec->n_kept - 1);
}
