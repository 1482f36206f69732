/* constrain.h - holds a request to a grammar: a matcher as the engine's constraint. What a grammar leaves no choice about
 * is cut into tokens as the tokenizer would (lr_matcher_forced_tokens), the same whether it is forced or masked. */
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

#endif
