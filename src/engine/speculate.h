/* speculate.h - drafts of requests: what a request may ask for, and how drafts are verified.
 *
 * When a step is put together, each request that will have logits in it may get a draft: tokens behind its last one, as
 * further rows of the same forward pass. Rows that others need come first; drafts never preempt anyone. Then, from the
 * left, the request's own sampler draws at each place as it always does (with its constraint, penalties and callbacks,
 * which see the tokens before that place and no others). As long as the draw is the draft, the next place's logits are
 * already there. The rest is cut off: its KV slots are written again later.
 *
 * So the tokens are, draw by draw, those of no speculation: same seed, same text, whatever is drafted. For a draft that
 * is not random this is what rejection sampling comes to: it is taken with its probability p(x), else the token comes
 * from p without x. With `distribution` set, a draft model's token x is drawn from q and judged with min(1, p(x)/q(x)),
 * the rest from max(0, p - q) (lr_sampler_judge): more are taken at high temperatures, and the tokens' distribution is
 * the same, but the text of a seed then depends on where drafts were made.
 *
 * A draft may be a tree: several tokens may follow one (spec.h). Its branches are sequences of the batch, each with
 * blocks of its own for this step (branches.c), so that a row sees the text and what leads to it, at its own position,
 * and gives the bits that it would give without drafts. The draws walk through the tree; the path taken is then in
 * place.
 *
 * The grammar of a constraint is rolled back after each draft is chosen; verification walks it anew.
 */
#ifndef LR_ENGINE_SPECULATE_H
#define LR_ENGINE_SPECULATE_H
#include "engine/engine.h"
#include "model/eagle.h"
#include "spec/spec.h"

#define LR_SPEC_BRANCHES 8

/* A draft for one step: filled by the engine with what it would do, changed by a hook. */
typedef struct lr_spec_choice {
    lr_spec_method method;
    int k;                       /* tokens; -1 = as many as pay */
    int n;                       /* GIVEN: tokens, at most LR_SPEC_MAX */
    int32_t tokens[LR_SPEC_MAX]; /* ids outside of the vocabulary end it */
    bool branches;               /* GIVEN: they are a tree, each with the place of the one it follows, -1 = the text */
    int parent[LR_SPEC_MAX];     /* less than its own */
    /* for looking at */
    int most;          /* tokens that there is room for */
    int batch;         /* requests that generate in this step */
    double acceptance; /* chance of a token, as the request's drafts have shown */
} lr_spec_choice;

/* Start from lr_spec_defaults(). */
typedef struct lr_spec_params {
    lr_spec_method method;
    int k;                    /* most tokens a draft, 1..LR_SPEC_MAX; 0 = 16, 8 where a model runs for each */
    bool fixed;               /* always k of them, whether it pays or not */
    int branches;             /* ways at a place, 1..LR_SPEC_BRANCHES; 0 = 1, 4 for HEADS */
    int min_match, max_match; /* NGRAM, SUFFIX: tokens that must have stood before; NGRAM: longest looked for; 2, 8 */
    int layers;               /* EXIT: of the model's layers, the first ones that draft */
    bool distribution;        /* see above; DRAFT, EXIT */
    lr_suffix *memory;        /* SUFFIX: looked at beside the request's own text; learns what the request generates. A
                                 reference is taken */
    /* Changes the choice of each step. Negative = the request fails with it. NULL: not wanted. In a step. */
    int (*choose)(void *user, lr_request *, lr_spec_choice *, lr_error *err);
    void *user;
    void (*free)(void *user); /* with the request, or NULL; taken over when lr_request_new succeeds */
} lr_spec_params;

lr_spec_params lr_spec_defaults(lr_spec_method);

/* Gives the engine a draft model, which it takes over on success (one for its life). cfg: 0 in a field = as the
 * engine's. LR_EUNSUPPORTED: another vocabulary; LR_ESTATE: there is one already. */
int lr_engine_set_draft(lr_engine *, lr_model *, const lr_draft_config *cfg, lr_error *err);
const lr_model *lr_engine_draft(const lr_engine *); /* borrowed; NULL = none */
/* The same of a draft that goes on from the model's features, of a safetensors file (model/eagle.h): it takes the place
 * of the draft model. cfg may be NULL. */
int lr_engine_set_eagle(lr_engine *, const char *path, const lr_eagle_config *, const lr_draft_config *cfg,
                        lr_error *err);
/* Gives the engine heads, of a file (model/heads.h); one set for its life. LR_ESTATE: there are some already. */
int lr_engine_set_heads(lr_engine *, const char *path, lr_error *err);
/* What the engine has measured: seconds of a step or of a pass of the draft model of so many rows, 0 = not known. */
void lr_engine_pace(const lr_engine *, int rows, double *step, double *pass);
/* While held, steps say nothing of what plain ones and drafts take: they are of work that stands beside (a
 * measurement). */
void lr_engine_pace_hold(lr_engine *, bool held);
/* Seconds that making the drafts of the last step took, what a draft model caught up with included. */
double lr_engine_drafting(const lr_engine *);
/* Forgets what was measured, and what drafts gained: as in a new engine. */
void lr_engine_pace_forget(lr_engine *);

#endif
