/* speculate_int.h - drafts as the other files of src/engine see them. */
#ifndef LR_ENGINE_SPECULATE_INT_H
#define LR_ENGINE_SPECULATE_INT_H
#include "engine/engine_int.h"
#include "engine/speculate.h"
#include "model/eagle.h"
#include "model/heads.h"
#include "model/part.h"

enum { SPEC_KEPT = 8 };  /* drafts of sequences that are closed */
enum { SPEC_EXITS = 4 }; /* parts of the model that leave early */
enum { SPEC_BEST = 64 }; /* tokens of a draft model's distribution that a draft is drawn from */

/* What a place of a draft was drawn from. */
typedef struct spec_dist {
    int n; /* 0 = not drawn */
    int32_t ids[SPEC_BEST];
    float q[SPEC_BEST];
} spec_dist;

/* A request's drafts. They lie behind the sequence's tokens: tokens[len .. len + n - 1]. */
struct lr_spec_req {
    lr_spec_params p;
    lr_pace_odds odds;
    lr_suffix *own; /* SUFFIX: of the sequence's first own_n tokens */
    int own_n;
    lr_suffix_at at; /* in p.memory, of the same tokens */
    int at_n;
    lr_sampler *plain;     /* chooses a draft model's tokens */
    spec_dist *dist;       /* (LR_SPEC_MAX) */
    bool dist_now;         /* the draft in flight is judged by them */
    lr_spec_method method; /* of the draft in flight */
    int match;
    lr_spec_tree tree;               /* the draft in flight; n = 0: none */
    lr_kv_table *table[LR_SPEC_MAX]; /* of its runs, but for the first (branches.c) */
    int in_run;                      /* whose blocks the sequence has */
    int fed, fed_pos; /* EAGLE: the last node whose features the draft has; the position of the row before all nodes */
    float *hidden;    /* HEADS: (n_embd) the row behind the sequence's first hidden_at tokens; or NULL */
    int hidden_at;
    int exit;          /* the engine's, that it drafts with; -1 = none */
    lr_shortlist list; /* EXIT: of the sequence's first n_listed tokens */
    int n_listed;
    int item;                     /* of the engine's, while drafts are made */
    bool ahead;                   /* its constraint is trying what is drafted */
    double chance, bar, side_bar; /* of the draft being made, and what it must be for another token, for a branch */
};

/* The engine's: made when a request first speculates. */
struct lr_spec_state {
    lr_draft *draft;
    struct {
        lr_draft_slot *draft;
        lr_kv_space *space;
    } kept[SPEC_KEPT]; /* the last one to come is the last */
    int n_kept;
    lr_model *eagle;            /* the draft's model, if it goes on from features; else NULL */
    float *features, *eagle_in; /* (max_batch_tokens, lr_eagle_width) of the batch; input rows of some of them */
    struct lr_spec_exit {
        lr_part *part;
        int layers, max_rows;
    } exits[SPEC_EXITS];
    int n_exits;
    lr_shortlists lists; /* of exits */
    lr_heads *heads;     /* NULL = none */
    float *heads_logits; /* (heads, heads_rows, n_vocab) */
    float *heads_rows;   /* (heads_most, n_embd) */
    int heads_most;      /* requests a run */
    lr_pace pace;
    bool held; /* it is not told of steps */
    /* (max_seqs) of the step being made */
    struct lr_spec_item {
        lr_request *r;
        lr_pace_item pace;
        lr_spec_choice choice;
        bool fixed;
        int most;           /* tokens of its draft */
        lr_spec_tree sides; /* what else could come at the places of the draft; parent = the place before. HEADS: all */
    } * items;
    lr_pace_item *open; /* those whose k is to be chosen */
    lr_draft_job *jobs;
    lr_request **job_req;
    float *row; /* (n_vocab) the draft model's row for samplers; NULL without one */
    int n_items;
    int generating; /* requests that will have a token, those with drafts included */
    double draft_time;
    bool may;          /* somebody could have a draft, and nobody asked for a number of tokens */
    lr_pace_step made; /* the step, as it goes */
    /* of the step's branches */
    lr_kv_table **tables; /* (cap_tables) NULL = not made yet; n_tables in use */
    int n_tables, cap_tables;
    lr_batch_echo *echoes; /* (cap_echoes) */
    int n_echoes, want_echoes, cap_echoes;
};

/* Checks the parameters and makes r->spec. */
int lr_spec__begin(lr_request *, const lr_spec_params *, lr_error *err);
/* The request has ended: memory learns. */
void lr_spec__end(lr_request *);
void lr_spec__free(lr_request *);
void lr_spec__free_state(lr_engine *);
/* Between schedule and batch: makes the drafts of this step. */
void lr_spec__plan(lr_engine *);
/* Draft rows of the request in this step. */
static inline int lr_spec__n(const lr_request *r) { return r->spec ? r->spec->tree.n : 0; }
/* Those behind the sequence's own rows. */
static inline int lr_spec__behind(const lr_request *r) { return lr_spec__n(r) ? r->spec->tree.run_first[1] : 0; }
/* The node below `node` (-1 = the sequence's last token) with this token, -1 = none. */
static inline int lr_spec__child(const lr_request *r, int node, int32_t id)
{
    return lr_spec_tree_child(&r->spec->tree, node, id);
}

/* drafting.c */
/* What a request needs before its first draft by a method; false: it can have none now. */
bool lr_spec__ready(lr_request *, lr_spec_method);
/* Makes the drafts of all items whose method runs a model. */
void lr_spec__run_models(lr_engine *);

/* inherit.c */
/* Gives the sequence a draft, which knows what it can from others'. pos: of the first features that will come, -1 = the
 * draft needs none. */
int lr_spec__open_draft(lr_engine *, lr_seq *, int pos, lr_error *err);
/* The sequence is closed. */
void lr_spec__retire(lr_seq *);
void lr_spec__forget(lr_engine *);

/* branches.c */
/* Blocks for the tree of the request, which may lose its branches (where the model can't have any). False: no room. */
bool lr_spec__room(lr_engine *, lr_request *);
/* The rows of its branches, behind the request's own; first: the first of those. */
void lr_spec__add_branches(lr_engine *, lr_batch *, const lr_request *, int first);
/* The node's KV, and that of what leads to it, becomes the sequence's. */
void lr_spec__enter(lr_request *, int node);
/* The step is over. */
void lr_spec__release(lr_engine *);
void lr_spec__free_branches(struct lr_spec_state *);

/* The draft at place i of the request's, whose logits are being looked at. */
int lr_spec__draw(lr_request *, int i, float *logits, const uint32_t *mask, const lr_sample_ctx *ctx, int32_t *id,
                  float *logprob, lr_top *top, lr_error *err);
/* The way through a request's draft ended at a node, -1 = none was taken; `open`: not because the request ended. */
void lr_spec__verified(lr_request *, int node, bool open);
/* A token was drawn at a node (-1 = behind the sequence's own rows): its hidden row is kept for heads. */
void lr_spec__drawn(lr_request *, int node);
/* Whether features of the request's rows are wanted; where they go. */
float *lr_spec__features(const lr_request *);
/* The forward pass gave features. */
void lr_spec__feed(lr_engine *, const lr_batch *);
/* Those of the nodes that lead to this one are right. */
void lr_spec__feed_path(lr_request *, int node);
/* The forward pass of the step took so long. */
void lr_spec__saw_forward(lr_engine *, const lr_batch *, double seconds);
/* Its results were taken, in so many seconds. */
void lr_spec__settle(lr_engine *, double seconds);

#endif
