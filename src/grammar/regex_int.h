/* regex_int.h - inside of the regular expressions: trees, and automata over characters.
 *
 * regex_parse.c pattern -> tree; regex_dfa.c tree -> automaton, and the operations on automata; regex.c what grammar.h
 * offers, and nodes for a builder.
 */
#ifndef LR_GRAMMAR_REGEX_INT_H
#define LR_GRAMMAR_REGEX_INT_H
#include "base/mem.h"
#include "grammar/chars.h"
#include "grammar/grammar.h"
#include <string.h>

#define LR_RE_MAX_PATTERN 65536
#define LR_RE_MAX_NODES   200000
#define LR_RE_MAX_DEPTH   150
#define LR_RE_MAX_STATES  20000      /* of an automaton */
#define LR_RE_MAX_NFA     200000     /* on the way to one */
#define LR_RE_MAX_TABLE   (1u << 23) /* its entries */
#define LR_RE_MAX_LOOKS   16

typedef enum rkind { R_EMPTY, R_SET, R_SEQ, R_ALT, R_REP, R_BOL, R_EOL } rkind;

typedef struct rnode {
    uint8_t kind;
    uint32_t a, b; /* SET: set; SEQ, ALT: offset, count in list; REP: child */
    int32_t min, max;
} rnode;

typedef struct rtree {
    rnode *node;
    uint32_t n_node, cap_node;
    uint32_t *list;
    uint32_t n_list, cap_list;
    lr_chars *set;
    uint32_t n_set, cap_set;
    uint32_t root;
    uint32_t look[LR_RE_MAX_LOOKS]; /* lookaheads at the start */
    bool look_not[LR_RE_MAX_LOOKS];
    uint32_t n_look;
    bool anchored; /* ^ stood before the lookaheads */
} rtree;

int lr_rtree_parse(rtree *t, const char *s, size_t n, unsigned flags, lr_error *err);
void lr_rtree_free(rtree *t);
static inline bool lr_rtree__full(const rtree *t) { return t->n_node >= LR_RE_MAX_NODES; }
uint32_t lr_rtree__add(rtree *t, rnode n); /* UINT32_MAX: no memory, or it is full */
uint32_t lr_rtree__list(rtree *t, rkind kind, const uint32_t *nodes, uint32_t n);
uint32_t lr_rtree__set(rtree *t, lr_chars *set); /* takes the set */

/* A complete deterministic automaton over code points; state 0 is the dead one. */
typedef struct rdfa {
    uint32_t n; /* states */
    uint32_t start;
    uint32_t n_atom;
    uint32_t *atom;  /* (n_atom) first code point of each; the last one ends at LR_CHAR_MAX; surrogates lead nowhere */
    uint32_t *trans; /* (n, n_atom) */
    bool *accept;    /* (n) */
    uint32_t refs;
} rdfa;

/* All that make one: LR_ENOMEM, or LR_ELIMIT if it would be too large. */
/* The texts of node `root`; with search: those that hold one. */
int lr_rdfa_of_tree(rdfa **out, const rtree *t, uint32_t root, bool prefix_any, bool suffix_any, lr_error *err);
enum { RDFA_AND, RDFA_OR };
int lr_rdfa_product(rdfa **out, const rdfa *a, const rdfa *b, int op, lr_error *err);
int lr_rdfa_not(rdfa **out, const rdfa *a, lr_error *err);
int lr_rdfa_count(rdfa **out, int32_t min, int32_t max, lr_error *err); /* all texts of that many characters */
/* Decimal numbers (a sign or none, digits, a point and digits or not) that are multiples of p / 10^k. */
int lr_rdfa_multiple(rdfa **out, uint32_t p, uint32_t k, lr_error *err);
bool lr_rdfa_is_empty(const rdfa *a);
/* Whether some text is in both; fails as the product. */
int lr_rdfa_overlap(const rdfa *a, const rdfa *b, bool *yes, lr_error *err);
bool lr_rdfa_matches(const rdfa *a, const char *s, size_t n);
void lr_rdfa_unref(rdfa *);
/* live[q]: an accepting state can be reached. (n) bytes, lr_malloc'd; NULL: no memory. */
uint8_t *lr_rdfa__live(const rdfa *a);

struct lr_regex {
    rtree tree;  /* n_node 0 = made of automata */
    bool simple; /* anchors only at the ends of its branches, no lookahead: the tree itself can be emitted */
    bool search;
    rdfa *dfa; /* made when first needed */
};

#endif
