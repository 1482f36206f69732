/* mask_int.h - what the files that make token masks share: the walker and what is kept of walks. See mask.c. */
#ifndef LR_GRAMMAR_MASK_INT_H
#define LR_GRAMMAR_MASK_INT_H
#include "grammar/grammar_int.h"

/* The state at one depth of the trie. */
typedef struct level {
    uint32_t n, off;       /* n > 1: items at off of the walk's list */
    gitem one;             /* n == 1 */
    const uint32_t *trans; /* n == 1: its table, if there is one yet */
    bool ends;
} level;

struct walker {
    lr_grammar *g;
    lr_matcher *m;
    const lr_grammar_trie *t;
    uint32_t *bits;
    uint32_t *pop, n_pop, cap_pop; /* when wanted */
    bool want_pops;
    level *lev; /* (max_depth + 2) */
    gitem *items;
    uint32_t cap_items;
    char *path;                       /* bytes from the root to the present node, if there are holes or unique rules */
    uint32_t *trail, n_trail;         /* the nodes that path is of, as far as known */
    uint32_t *cand, n_cand, cap_cand; /* nodes at which a unique rule may have to go on; see unique.c */
    bool narrow;                      /* what follows may have an end: also nodes on the way there */
    uint32_t skip;                    /* bytes at the start of path that are no text (a stripped space) */
};

/* Bits that are set, of n words. */
size_t lr_mask__count(const uint32_t *bits, size_t n);

/* walk.c */
/* The grammar's walker, set up for a matcher; NULL: w.err. */
walker *lr_walker_get(lr_matcher *, uint32_t *bits);
bool lr_walk__no_memory(lr_grammar *); /* false, with w.err */
/* Sets the bits of the tokens of a node that has some. */
static inline void lr_walk__allow(const walker *k, uint32_t *bits, const tnode *t)
{
    int32_t token = t->token;
    bits[token / 32] |= 1u << (token % 32);
    if (!t->many) return;
    while ((token = k->t->same[token]) >= 0) bits[token / 32] |= 1u << (token % 32);
}
bool lr_walk__add_pop(walker *, uint32_t node);
/* Walks what is below node v from a state; of the root's children all but `but` (0 = none). */
bool lr_walk(walker *, uint32_t v, const gitem *it, uint32_t n, uint32_t but);

/* ---- what may not come twice (unique.c) ---- */

/* Which tokens have to be looked at one by one for an item that may end a unique rule: only those at and below k->cand,
 * or all (also with w.err). */
typedef enum lr_doubt { LR_DOUBT_NONE, LR_DOUBT_SOME, LR_DOUBT_ALL } lr_doubt;
lr_doubt lr_unique__doubt(walker *k, uint32_t d);

/* ---- bases (base.c) ---- */

/* What one DFA state allows as far as it does not depend on the frame. */
struct lr_base {
    uint32_t refs;
    uint32_t n_pop, n_sparse;
    uint32_t *pop;   /* (n_pop) trie nodes at which the rule may have ended, and below which tokens go on */
    int32_t *sparse; /* (n_sparse) allowed ids; or */
    uint32_t *bits;  /* all as a mask */
    size_t bytes;
};

/* The base of byte part d. *temporary: it is the caller's (a hole was reached). NULL: w.err. */
lr_base *lr_base_get(walker *, uint32_t d, bool *temporary);
void lr_base_unref(lr_base *);
void lr_base_or(const lr_base *, uint32_t *bits, size_t words);

/* ---- counted loops (count.c) ---- */

typedef struct counted {
    int32_t what; /* token or trie node */
    uint32_t n;   /* iterations that it takes */
} counted;

/* What a state inside a counted loop allows, by the number of iterations that it takes. */
struct lr_count {
    uint32_t refs;
    uint32_t n_stay, n_leave, n_pop; /* all sorted by n */
    counted *stay;  /* tokens that end inside the loop or at the end of an iteration: n at most what is left */
    counted *leave; /* tokens that end behind the loop */
    counted *pop;   /* nodes at which the rule may have ended */
    uint32_t *all;  /* if there are many: all of stay as a mask, and */
    uint32_t *upto; /* (LR_COUNT_MASKS, words) those with n <= i */
    size_t bytes;
};
#define LR_COUNT_MASKS 16

/* For state `in` (part.in of some state). NULL: w.err, or, without it, the loop cannot be counted so. */
lr_count *lr_count_get(walker *, uint32_t in);
void lr_count_unref(lr_count *);
/* The tokens of c when `left` more iterations may be begun and at least `need` must be. UINT32_MAX: any number. */
void lr_count_or(const lr_count *c, uint32_t need, uint32_t left, uint32_t *bits, uint32_t *scratch, size_t words);
/* The most iterations that any token takes: beyond it counts make no difference. */
uint32_t lr_count_most(const lr_count *c);
/* The run of c->pop that then counts. */
const counted *lr_count_pops(const lr_count *c, uint32_t need, uint32_t left, uint32_t *n);

/* ---- shared between grammars (base.c) ---- */

struct shared_base {
    uint64_t key[2];
    lr_base *base; /* both NULL = free */
    lr_count *cnt;
};

/* The rule whose own states hold all items of d, if what is kept of it may be shared; NULL otherwise. */
const nrule *lr_shared__home(const lr_grammar *, uint32_t d);
void lr_shared__key(const lr_grammar *, const nrule *, const uint64_t sig[2], uint32_t d, uint64_t key[2]);
const struct shared_base *lr_shared__find(const lr_grammar_trie *, const uint64_t key[2]); /* NULL = not there */
/* Takes a reference on what it is given. It does no harm if it fails. */
void lr_shared__put(lr_grammar_trie *, const uint64_t key[2], lr_base *, lr_count *);

#endif
