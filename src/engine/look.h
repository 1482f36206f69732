/* look.h - a picture of an engine for people: which blocks there are, who holds them, what the prefix cache remembers.
 *
 * Between steps; costs a walk over what is looked at, so a few times a second.
 */
#ifndef LR_ENGINE_LOOK_H
#define LR_ENGINE_LOOK_H
#include "engine/engine.h"

/* The blocks of group 0; see lr_kv_look. */
bool lr_engine_look_block(const lr_engine *, int block, lr_kv_view *out);

typedef struct lr_look_seq {
    uint64_t id;
    lr_request *request; /* NULL = idle */
    size_t len, computed;
    const int32_t *blocks; /* (n_blocks) of group 0 in order, -1 = let go; borrowed until the next step */
    int n_blocks;
} lr_look_seq;
/* Calls fn for each sequence, the newest first; it returns false to end. */
void lr_engine_look_seqs(const lr_engine *, bool (*fn)(void *user, const lr_look_seq *), void *user);

/* Blocks of group 0 that are free or evictable, those that idle sequences would give up (shared ones are counted more
 * than once), and the rows that the built-in rule would take of prompts. */
void lr_engine_room(lr_engine *, int *available, int *idle, int *prompt_rows);

#endif
