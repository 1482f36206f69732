/* spec.h - speculation: who proposes tokens, and how many of them pay.
 *
 * A draft is a run of tokens that may follow a sequence. The engine runs all drafts of all requests as rows of one
 * batch, and takes from the left what the sampler would have taken as well (engine/speculate.c). Here is what makes
 * drafts, and knows nothing of requests:
 *
 *   ngram    what followed the last tokens where they stood before, in prompt and output ("prompt lookup")
 *   suffix   the same by the longest suffix that ever stood before, in a suffix automaton of the text and, if there is
 *            one, of a memory that sessions share
 *   exit     the model's own first layers (driven by the engine, whose KV they share)
 *   heads    heads trained for the model guess from its last hidden row; their best guesses are a tree
 *   eagle    a layer trained for the model goes on from what the model's own layers made of the text; otherwise as
 * draft draft    a smaller model of the same vocabulary, with KV blocks of its own; drafts of many sequences run
 * together
 *
 * lr_pace measures what steps and draft passes cost and how often drafts are right, and says how many pay.
 */
#ifndef LR_SPEC_SPEC_H
#define LR_SPEC_SPEC_H
#include "kv/kv.h"
#include "model/model.h"

typedef enum lr_spec_method {
    LR_SPEC_OFF,
    LR_SPEC_NGRAM,
    LR_SPEC_SUFFIX,
    LR_SPEC_DRAFT,
    LR_SPEC_GIVEN, /* tokens that somebody names */
    LR_SPEC_EXIT,  /* the model's own first layers (model/part.h) */
    LR_SPEC_HEADS, /* heads that were trained for the model (model/heads.h) */
    LR_SPEC_EAGLE, /* a layer that goes on from the model's features (model/eagle.h) */
} lr_spec_method;
#define LR_SPEC_METHODS 8

/* Whether a forward pass is run for each place of its drafts. */
static inline bool lr_spec_has_passes(lr_spec_method m)
{
    return m == LR_SPEC_DRAFT || m == LR_SPEC_EXIT || m == LR_SPEC_EAGLE;
}

#define LR_SPEC_MAX       32 /* tokens of a draft */
#define LR_SPEC_POSITIONS 16 /* places whose acceptance is counted one by one; the last one counts the rest too */

/* "off", "ngram" ...; a static string. */
const char *lr_spec_method_name(lr_spec_method);
/* The method of that name, -1 = none. */
int lr_spec_method_parse(const char *name);

/* What has come of drafts. */
typedef struct lr_spec_stats {
    uint64_t drafts, drafted, accepted; /* runs of drafts, tokens in them, tokens taken from them */
    uint64_t tried_at[LR_SPEC_POSITIONS], accepted_at[LR_SPEC_POSITIONS]; /* by place in the draft */
    double draft_time, verify_time; /* seconds: making drafts; this one's part of the forward passes with drafts */
} lr_spec_stats;

/* ---- trees ---- */

/* Drafts that branch: node i's token follows that of its parent, -1 being the sequence's last token. A parent stands
 * before its children, so the first k nodes of a tree are a tree. */
typedef struct lr_spec_tree {
    int n;
    int32_t token[LR_SPEC_MAX];
    int parent[LR_SPEC_MAX];
    /* results of lr_spec_tree_order */
    int depth[LR_SPEC_MAX];         /* 1 = follows the sequence's last token */
    int run[LR_SPEC_MAX];           /* the run that it is in */
    int n_runs;                     /* runs: nodes, each the parent of the next one, */
    int run_first[LR_SPEC_MAX + 1]; /* run_first[i] .. run_first[i + 1] - 1 */
} lr_spec_tree;

/* Puts the nodes in the order of a walk that takes first children first; drops nodes without a parent, and puts
 * siblings of the same token together. */
void lr_spec_tree_order(lr_spec_tree *);
/* A tree of guesses: place i (< places) has `wide` of them, ids[i * wide ..], with their chances, the best first. Takes
 * the likeliest ways, each step at its chance, at most k nodes and none whose chance is below `least`. */
void lr_spec_tree_best(lr_spec_tree *, const int32_t *ids, const float *chance, int places, int wide, int k,
                       double least);
/* The child of a node (-1 = the root) with this token, -1 = none. */
int lr_spec_tree_child(const lr_spec_tree *, int node, int32_t token);
/* Whether `above` is the node or one of those that lead to it (ordered trees; -1 is above all). */
bool lr_spec_tree_above(const lr_spec_tree *, int above, int node);

/* ---- n-grams ---- */

/* Proposes what followed the last m tokens of tokens (n) at their latest earlier place, for the largest m in min..max
 * for which there is one; *match = m. At most k tokens into out; how many. Looks back over 32768 tokens. */
int lr_ngram_propose(const int32_t *tokens, int n, int min, int max, int k, int32_t *out, int *match);
/* Adds to a tree what followed the last m tokens at earlier places: at most `branches` branches that differ from those
 * that are there, each of at most k tokens. */
void lr_ngram_branches(const int32_t *tokens, int n, int m, int branches, int k, lr_spec_tree *t);

/* ---- suffix automaton ---- */

/* A text (or several, one after the other) and all its substrings. */
typedef struct lr_suffix lr_suffix;

/* max_tokens: when it holds so many, the older half is forgotten. Starts with one reference. */
int lr_suffix_new(lr_suffix **out, int max_tokens, lr_error *err);
lr_suffix *lr_suffix_ref(lr_suffix *);
void lr_suffix_unref(lr_suffix *); /* NULL is allowed */
/* The text goes on with these tokens. LR_ENOMEM: the automaton is empty then. */
int lr_suffix_extend(lr_suffix *, const int32_t *tokens, int n, lr_error *err);
/* The text ends here: what comes next is another one. */
int lr_suffix_end(lr_suffix *, lr_error *err);
int lr_suffix_len(const lr_suffix *); /* tokens held */
/* What followed the longest suffix of the text (at least min tokens) that stood in it before, at its latest place. */
int lr_suffix_propose(const lr_suffix *, int min, int k, int32_t *out, int *match);

/* A place in an automaton: the longest suffix of what was followed so far that is in it. Zero-initialise. */
typedef struct lr_suffix_at {
    uint32_t state, epoch;
    int len;
} lr_suffix_at;
void lr_suffix_follow(const lr_suffix *, lr_suffix_at *, const int32_t *tokens, int n);
int lr_suffix_propose_at(const lr_suffix *, const lr_suffix_at *, int min, int k, int32_t *out, int *match);

/* ---- shortlists ---- */

/* Of a large vocabulary a text uses little, and a draft pass of a small model reads more for its logits than for
 * anything else. So drafts are chosen from a shortlist: the first ids, which tokenizers that merge by frequency give to
 * frequent tokens, those that are no text (ends), and what stood in the text, by LR_LISTED neighbours (FR-Spec,
 * arXiv:2502.14856, with a list from the text in place of a corpus). Where a text brings many new tokens that are not
 * in it, as in scripts whose tokens come late, its drafts are chosen from all. */
typedef struct lr_shortlists { /* of a vocabulary; all zero = there are none */
    int n_vocab;
    uint32_t *any;  /* (lr_shortlist_words) what is in every list */
    uint32_t *pass; /* (the same) the lists of a pass together */
} lr_shortlists;
typedef struct lr_shortlist { /* of a text */
    const lr_shortlists *of;
    uint32_t *bits; /* (lr_shortlist_words) NULL = nothing was seen yet */
    float novel;    /* how often a token was not in it when it came, lately */
} lr_shortlist;

int lr_shortlist_words(int n_vocab);
/* first: ids from 0 on, at most half of all; 0 = 32768. *out has no lists if the vocabulary is smaller. LR_ENOMEM. */
int lr_shortlists_new(lr_shortlists *out, const lr_vocab *, int n_vocab, int first, lr_error *err);
void lr_shortlists_free(lr_shortlists *);
/* The text goes on with these tokens. Without memory drafts are chosen from all. */
void lr_shortlist_see(lr_shortlist *, const int32_t *tokens, int n);
/* What another text of the same vocabulary has seen. */
void lr_shortlist_copy(lr_shortlist *to, const lr_shortlist *from);
void lr_shortlist_free(lr_shortlist *);
/* A pass begins; a text takes part: false if its drafts are chosen from all. */
void lr_shortlists_clear(lr_shortlists *);
bool lr_shortlists_join(lr_shortlists *, const lr_shortlist *);

/* ---- draft model ---- */

/* Whether a draft model's tokens mean the same: each id that both have must have the same piece and kind, the
 * beginning-of-text token must agree, and the sizes may differ by padding (1024 ids). LR_EUNSUPPORTED says what
 * differs, with both values. *common: ids that may be drafted. */
int lr_spec_check_vocab(const lr_model *target, const lr_model *draft, int *common, lr_error *err);

typedef struct lr_draft lr_draft;
typedef struct lr_draft_slot lr_draft_slot; /* a sequence's KV in the draft model */

typedef struct lr_draft_config {
    int block_size, kv_blocks, kv_type; /* 16; 0 = for max_seqs contexts, at most 16384 tokens; LR_F16 */
    int max_rows, max_seqs;             /* rows a pass, sequences at once */
    int context;                        /* longest sequence; 0 = the model's */
    int common;                         /* ids that may be drafted, of lr_spec_check_vocab */
    int shortlist;                      /* first ids of shortlists; 0 = 32768, -1 = all logits are computed */
    bool features;                      /* rows need the target's features as well (model/eagle.h) */
    double (*now)(void *user);          /* clock in seconds; NULL = monotonic time */
    void *now_user;
} lr_draft_config;

/* Takes the model over when it succeeds. */
int lr_draft_new(lr_draft **out, lr_model *m, const lr_draft_config *cfg, lr_error *err);
void lr_draft_free(lr_draft *); /* all slots must be closed; NULL is allowed */
const lr_model *lr_draft_model(const lr_draft *);
int lr_draft_open(lr_draft *, lr_draft_slot **out, lr_error *err);
/* A slot that starts with the same KV. */
int lr_draft_fork(lr_draft_slot *, lr_draft_slot **out, lr_error *err);
void lr_draft_close(lr_draft_slot *); /* NULL is allowed */
/* Lets go of the slot's KV. */
void lr_draft_drop(lr_draft_slot *);
/* How many leading rows of the slot are computed and of these tokens (n); *base: the first one's position. */
int lr_draft_shares(const lr_draft_slot *, const int32_t *tokens, int n, int *base);
int lr_draft_computed(const lr_draft_slot *);
/* Drafts with features: a fork begins another text, whose own features come from position pos on. The row before, of
 * which the other text's next token was, stands in for that of this token. */
void lr_draft_adopt(lr_draft_slot *, int pos, int32_t token);
/* Tokens of a sequence that a draft would have to compute first. */
int lr_draft_behind(const lr_draft_slot *, const int32_t *tokens, int n);

/* Drafts with features: input rows (n, n_embd of the draft model) for the sequence's positions from pos on, which the
 * target has computed. What was known of them and of what followed is forgotten. False: no memory; it begins anew. */
bool lr_draft_feed(lr_draft_slot *, int pos, int n, const float *in);
/* Whether a draft could be made behind n tokens, and how many rows are not run yet. */
bool lr_draft_knows(const lr_draft_slot *, int n);
int lr_draft_waiting(const lr_draft_slot *);

/* A draft wanted: at most k tokens behind tokens (n). With features k may be 0: what waits is run, but for one row. */
typedef struct lr_draft_job {
    lr_draft_slot *slot;
    const int32_t *tokens; /* (n), n >= 1 */
    int n, k;
    /* Chooses the next token from logits (n_vocab of the draft model; it may change them; ids that the target lacks are
     * -inf). i: its place in the draft. 0 = go on, 1 = this one is the last, negative = none, the draft ends before it.
     */
    int (*pick)(void *user, struct lr_draft_job *, int i, float *logits, int32_t *id);
    void *user;
    int32_t *out; /* (k) */
    int got;      /* result */
    bool stalled; /* result: it had too much to catch up with, or there was no room; later */
    /* inside */
    int pending;
} lr_draft_job;

/* Runs the draft model for all jobs together: what they lack first, at most `catch_up` rows in all, then one pass for
 * each place. Negative: the model failed, no job has a draft. */
int lr_draft_run(lr_draft *, lr_draft_job *jobs, int n_jobs, int catch_up, lr_error *err);
/* Seconds and rows of the passes of the last run; returns how many there were, at most LR_SPEC_MAX + 64. */
int lr_draft_passes(const lr_draft *, const int **rows, const double **seconds);
void lr_draft_memory(const lr_draft *, size_t *weights, size_t *kv, size_t *work);
int lr_draft_check(const lr_draft *, lr_error *err);

/* ---- how many pay ---- */

#define LR_PACE_ROWS  128 /* steps of more rows are not told apart */
#define LR_PACE_LAST  16  /* times that are kept */
#define LR_PACE_SIZES 8   /* of batches: 1, 2 or 3, 4 to 7 ... */

/* What is known of drafts: how many of the tokens looked at were right, by method and by how long the match was. */
#define LR_PACE_CLASSES 3
typedef struct lr_pace_odds {
    struct {
        float right, tried;
    } at[LR_SPEC_METHODS][LR_PACE_CLASSES], side[LR_SPEC_METHODS]; /* side: of branches, where the first was wrong */
    uint32_t idle;                                                 /* steps since the request's last draft */
    uint32_t wait; /* steps until one is tried although it does not seem to pay */
    int granted;   /* rows that it may catch up with: what is begun is finished */
} lr_pace_odds;

/* Times by number of rows, the odds of all requests (those of a new one, until it has its own), and what drafts have
 * gained or cost (account.c). All zero to begin with. */
typedef struct lr_pace {
    struct lr_pace_time {
        double t;                 /* seconds, as if nothing had disturbed them; 0 = not seen */
        float last[LR_PACE_LAST]; /* a ring of them */
        uint32_t n, at;           /* how often seen, and at which step last */
    } step[LR_PACE_ROWS + 1], drafted[LR_PACE_ROWS + 1], mixed[LR_PACE_ROWS + 1];
    struct lr_pace_time pass[LR_SPEC_METHODS][LR_PACE_ROWS + 1];
    uint32_t now; /* steps seen in all */
    lr_pace_odds all;
    /* in account.c */
    double dearer; /* drafts take exp(dearer) times what is known of them, next to plain steps */
    struct lr_pace_seen {
        double by; /* what it took, as a part of what was thought */
        uint32_t at;
    } seen[2];      /* the last step without drafts, and with */
    double pair[3]; /* what the last pairs of such steps said */
    uint32_t n_pairs;
    int n_odd; /* steps with drafts in a row that took more, or all less, than was thought */
    bool odd_more;
    int due;                  /* steps to be made without drafts, to be measured */
    uint32_t plain_at, every; /* the last one, and how often there is to be one while drafts pay */
    /* passes since the last step: seconds that are usual, as measured, of rows to catch up; those of known times */
    double made, ran, caught_up, sure_made, sure_ran;
    struct lr_pace_account {
        double credit, lent, saved, most; /* in plain steps */
        bool open, drafting;
        uint32_t explored, wait; /* when what does not seem to pay was last tried, and until it is again */
        int trying, lasted;      /* steps that it is still tried; steps that it has paid */
    } account[LR_SPEC_METHODS][LR_PACE_SIZES]; /* what one way gains is not for another to lose */
    lr_spec_method kind;                       /* whose account it is: of most requests that could have drafts */
} lr_pace;

/* A step that was made. */
typedef struct lr_pace_step {
    int rows, drafts; /* rows of the batch; those of drafts among them */
    int generating;   /* requests that had a token */
    int more;         /* tokens taken of drafts */
    bool pure;        /* each row had logits */
    bool open;        /* drafts could be made, and none was asked for by number */
    double seconds;   /* of the forward pass and of taking its results */
    double drafting;  /* of making drafts */
} lr_pace_step;

/* A request that could have drafts in this step. */
typedef struct lr_pace_item {
    lr_pace_odds *odds;
    lr_spec_method method;
    int match;     /* length of the match, 0 for a model */
    int most;      /* tokens there are, or that may be asked for */
    int behind;    /* DRAFT: rows to catch up with */
    int remaining; /* tokens that it may still generate */
    int k;         /* result: at most so many */
    double bar;    /* result, methods with passes: as long as the draft's chance is at least this */
    double least;  /* result: the chance that a token must have to pay */
} lr_pace_item;

/* A step without drafts, where there are never any. */
void lr_pace_saw_step(lr_pace *, int rows, double seconds);
/* A pass of `rows` rows for the drafts of so many requests; the others are what had to be caught up with. */
void lr_pace_saw_pass(lr_pace *, lr_spec_method, int rows, int drafts, double seconds);
/* A step has been made, after its passes. */
void lr_pace_settle(lr_pace *, const lr_pace_step *);
/* Seconds that a step, or a draft pass, of so many rows is expected to take; 0 if nothing is known yet. */
double lr_pace_step_time(const lr_pace *, int rows);
double lr_pace_pass_time(const lr_pace *, lr_spec_method, int rows);
/* The chance of one more token to be right. */
double lr_pace_odds_of(const lr_pace *, const lr_pace_odds *, lr_spec_method, int match);
/* n tokens of a draft of `tried` looked at were right (right <= tried). */
void lr_pace_learn(lr_pace *, lr_pace_odds *, lr_spec_method, int match, int tried, int right);
/* One of the branches where the first one was wrong was right, or none. */
void lr_pace_learn_side(lr_pace *, lr_pace_odds *, lr_spec_method, bool right);
/* Keeps of a tree whose first k nodes are a draft that was chosen for the item, in a row, the other nodes whose chance
 * pays. */
void lr_pace_cut(const lr_pace *, const lr_pace_item *, int k, lr_spec_tree *);
/* Chooses k of each item such that the tokens per second of all are most, for a step of `rows` rows and `others`
 * requests without drafts besides; at most `room` draft rows in all. What that may lose is bounded: see account.c. */
void lr_pace_choose(lr_pace *, lr_pace_item *items, int n, int rows, int others, int room);

#endif
