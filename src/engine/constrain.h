/* constrain.h - holds a request to a grammar: a matcher as the engine's constraint. What a grammar leaves no choice
 * about is cut into tokens as the tokenizer would (lr_matcher_forced_tokens), the same whether it is forced or masked.
 */
#ifndef LR_ENGINE_CONSTRAIN_H
#define LR_ENGINE_CONSTRAIN_H
#include "engine/engine.h"
#include "grammar/grammar.h"

/* A constraint for lr_req_params that masks with m and advances it; the text starts where m stands. n_vocab: the
 * model's, which may be larger than the vocabulary's (ids beyond are never allowed). The matcher goes with the
 * constraint; on failure it stays the caller's. A request that copies another's text needs a copy of the matcher. */
int lr_constraint_of_matcher(lr_constraint *out, lr_matcher *m, int n_vocab, lr_error *err);
/* The matcher of such a constraint; NULL if it is another kind. */
lr_matcher *lr_constraint_matcher(const lr_constraint *);

/* Tokens that must come next, for constraints made of matchers. Starts zeroed; a plain value. */
enum { LR_FORCED_MAX = 128, LR_FORCED_TAIL = 48 };
typedef struct lr_forced {
    bool looked; /* queue is what must come now */
    int at, n;   /* in queue: the next, and the end */
    int32_t queue[LR_FORCED_MAX];
    size_t n_tail; /* bytes of the text's end: what a tokenizer wants to see before a word */
    char tail[LR_FORCED_TAIL];
} lr_forced;

/* Fills the queue with what m leaves no choice about, if that is not known. */
int lr_forced_look(lr_forced *, lr_matcher *m, lr_error *err);
/* A token was taken; another one than the queue's next empties it. */
void lr_forced_took(lr_forced *, const lr_vocab *v, int32_t token);

#endif
