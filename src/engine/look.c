/* look.c - see look.h. */
#include "engine/look.h"
#include "engine/engine_int.h"

bool lr_engine_look_block(const lr_engine *e, int block, lr_kv_view *out) { return lr_kv_look(e->kv, 0, block, out); }

void lr_engine_room(lr_engine *e, int *available, int *idle, int *prompt_rows)
{
    *prompt_rows = lr_engine__prompt_rows(e);
    *available = lr_kv_available(e->kv, 0);
    *idle = 0;
    for (const lr_seq *q = e->idle_old; q; q = q->idle_next) *idle += lr_kv_table_held(&q->kv, 0);
}

void lr_engine_look_seqs(const lr_engine *e, bool (*fn)(void *user, const lr_look_seq *), void *user)
{
    for (const lr_seq *q = e->seqs; q; q = q->next) {
        lr_look_seq s = {.id = q->id,
                         .request = q->req,
                         .len = (size_t)q->len,
                         .computed = (size_t)q->kv.computed,
                         .blocks = q->kv.block[0],
                         .n_blocks = q->kv.n[0]};
        if (!fn(user, &s)) return;
    }
}
