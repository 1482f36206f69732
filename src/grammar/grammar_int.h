/* grammar_int.h - inside of src/grammar: the builder's nodes, the automata, frames, and the calls between its files.
 *
 * build.c nodes and rules; emit.c nodes -> nondeterministic automaton (NFA); compile.c what is done to it (inlining,
 * dead ends, order of rules); leftrec.c left recursion; dfa.c determinised states; step.c frames and one byte's step;
 * match.c matchers; unique.c what may not come twice; mask.c token masks; trie.c the vocabulary; chars.c characters ->
 * bytes; regex*.c expressions.
 *
 * NFA. One array of states for all rules; state 0 is the end of every rule (where control goes from there is in the
 * frame). A call always matches at least one byte: where a rule may be empty there is a way around the call. So a rule
 * that was called is never complete at the place where it was called, and frames made at a place are complete when the
 * place is left.
 *
 * Items. A DFA state is a sorted list of items: NFA state in the low half, count of the counted loop it lies in (else
 * 0) in the high half. A "full" state holds what is reached without a byte: byte edges, calls, the end. Its "byte part"
 * holds the byte edges alone; matcher states hold byte parts.
 */
#ifndef LR_GRAMMAR_GRAMMAR_INT_H
#define LR_GRAMMAR_GRAMMAR_INT_H
#include "base/mem.h"
#include "grammar/grammar.h"
#include <string.h>

/* ---- limits ---- */

#define LR_G_MAX_NODES   (1u << 22)
#define LR_G_MAX_RULES   (1u << 17)
#define LR_G_MAX_DEPTH   400                /* nesting of nodes */
#define LR_G_MAX_NFA     (1u << 20)         /* states of an automaton */
#define LR_G_MAX_COUNT   (1 << 20)          /* bound of a repetition */
#define LR_G_MAX_SETS    4096               /* different byte sets */
#define LR_G_MAX_SUBSET  (1u << 17)         /* items of a DFA state */
#define LR_G_MAX_ITEMS   2048               /* pairs in a matcher's state */
#define LR_G_MAX_RETURNS 4096               /* pairs in a frame */
#define LR_G_MAX_LEVELS  512                /* arrays and objects in one another, where items may not come twice */
#define LR_G_MAX_NEST    512                /* frames above one another: calls deeper than this are not taken */
#define LR_G_SOFT_DFA    ((size_t)24 << 20) /* bytes of DFA states: unused ones are dropped beyond */
#define LR_G_HARD_DFA    ((size_t)128 << 20)
#define LR_G_MAX_WORK    (1u << 21)         /* slow steps in one call */
#define LR_G_BASE_BYTES  ((size_t)24 << 20) /* cached masks of one grammar */

/* ---- builder ---- */

typedef enum gkind { G_NEVER, G_EMPTY, G_LIT, G_BYTES, G_SEQ, G_ALT, G_REP, G_REF, G_LITS, G_GRAPH } gkind;

typedef struct gnode {
    uint8_t kind;
    uint16_t depth; /* 1 + deepest child */
    uint32_t a, b;  /* LIT: offset, length in text; BYTES: set; SEQ, ALT: offset, count in list; REP: child; REF: rule;
                       LITS: offset, count in lits; GRAPH: offset in list of (places, edges, from, to, node ...) */
    int32_t min, max;
} gnode;

typedef struct grule {
    char *name;
    lr_gnode node; /* 0 = not defined */
    bool keep, defined, unique;
    int hole; /* index, -1 = none */
    int hole_id;
} grule;

typedef struct gset {
    uint64_t w[4];
} gset;

static inline bool gset_has(const gset *s, unsigned b) { return s->w[b >> 6] >> (b & 63) & 1; }
static inline void gset_add(gset *s, unsigned b) { s->w[b >> 6] |= (uint64_t)1 << (b & 63); }

struct lr_gb {
    lr_error err; /* code 0 = none */
    gnode *node;
    uint32_t n_node, cap_node;
    uint32_t *list;
    uint32_t n_list, cap_list;
    char *text;
    uint32_t n_text, cap_text;
    uint32_t *lits; /* offset, length pairs in text */
    uint32_t n_lits, cap_lits;
    gset *set;
    uint32_t n_set, cap_set;
    uint16_t set_slot[2 * LR_G_MAX_SETS]; /* hash table: index + 1 */
    grule *rule;
    uint32_t n_rule, cap_rule;
    uint32_t n_hole;
    char *mark; /* or NULL */
    size_t n_mark;
};

/* Room for `more` elements behind n; false after an error is recorded. */
bool lr_gb__grow(lr_gb *, void **p, uint32_t *cap, uint32_t n, uint32_t more, size_t size);
/* Index of a set. */
uint32_t lr_gb__set(lr_gb *, const gset *s);

/* ---- automaton ---- */

typedef enum nkind {
    N_DEAD,  /* leads nowhere */
    N_END,   /* state 0 only */
    N_BYTES, /* set x, then a */
    N_CALL,  /* rule x, then a; if the rule may be empty and b is 0, also a at once */
    N_SPLIT, /* a and b */
    N_ENTER, /* loop x: a with count 1; b if min is 0 */
    N_LOOP,  /* loop x: a with count + 1 while count < max; b with count 0 if count >= min */
} nkind;

typedef struct nstate {
    uint8_t kind;
    uint32_t x, a, b;
    uint32_t loop; /* the counted loop it lies in, N_NONE = none */
} nstate;

typedef struct gloop {
    uint32_t min, max; /* max UINT32_MAX = none: counts stop at min then */
    uint32_t rule;     /* rule that is its body; if that may be empty, min is 0 in the end. UINT32_MAX = none */
} gloop;

typedef struct nrule {
    uint32_t start; /* state */
    uint32_t rank;  /* rules that a rule calls before its first byte have larger ranks */
    uint32_t d0;    /* full DFA state at its start; 0 = not yet */
    int32_t hole;   /* index of the hole, -1 = none */
    int32_t hole_id;
    bool nullable;
    bool unique;               /* see lr_gb_unique */
    bool shares;               /* calls no rule: its cached masks may be shared between grammars, under sig */
    uint64_t sig[2], loose[2]; /* hash of its automaton; the same without the bounds of its loops */
    uint32_t lo, hi;           /* its states as they were emitted */
    char *name;
} nrule;

/* The immutable part, shared by the instances of a grammar with holes. */
typedef struct nfa {
    uint32_t refs;
    nstate *st;
    uint32_t n_st, cap_st;
    gset *set;
    uint32_t n_set, cap_set;
    uint32_t one[256]; /* the set of that byte alone, UINT32_MAX = not made */
    gloop *loop;
    uint32_t n_loop, cap_loop;
    nrule *rule;
    uint32_t n_rule, cap_rule;
    uint32_t root, n_hole, n_cls;
    uint32_t n_unique; /* unique rules */
    uint8_t *wide;     /* (n_wide) if there are: infinitely many texts lead from that state to its rule's end */
    uint32_t n_wide;
    char *mark; /* or NULL: see lr_gb_mark */
    size_t n_mark;
    uint32_t in_loop;           /* while states are made: the loop they lie in */
    uint8_t cls[256], rep[256]; /* byte -> class; class -> one of its bytes */
} nfa;

#define N_NONE UINT32_MAX

/* nfa.c. What makes states or sets gives N_NONE when the automaton is full or there is no memory. */
int lr_nfa__new(nfa **out, lr_error *err);
int lr_nfa__copy(nfa **out, const nfa *, lr_error *err);
void lr_nfa__unref(nfa *);
uint32_t lr_nfa__state(nfa *, nkind kind, uint32_t x, uint32_t a, uint32_t b);
uint32_t lr_nfa__one(nfa *, unsigned byte); /* the set of a byte alone */
uint32_t lr_nfa__loop(nfa *, uint32_t min, uint32_t max, uint32_t rule);
uint32_t lr_nfa__rule(nfa *, const char *name);
/* The choice of two entries, either of which may be N_NONE for "none". */
uint32_t lr_nfa__either(nfa *, uint32_t a, uint32_t b);
/* The trie of strings (sorted by bytes, no two alike, none empty), leading to `next`. */
uint32_t lr_nfa__strings(nfa *, const lr_str *strings, size_t n, uint32_t next);
/* Sorts, drops duplicates and empty ones. */
void lr_nfa__sort_strings(lr_str *strings, size_t *n, bool *has_empty);
void lr_nfa__classes(nfa *);
int lr_nfa__full(const nfa *, lr_error *err);

/* plan.c: which rules of a builder are copied into their callers. */
typedef struct gplan {
    uint8_t *copy;  /* (n_rule) */
    uint32_t *size; /* (n_node) states it would take, about; saturates */
} gplan;
int lr_gplan_make(const lr_gb *, gplan *, lr_error *err);
void lr_gplan_free(gplan *);
/* emit.c: the automaton of all rules that root needs. */
int lr_emit(lr_gb *, uint32_t root, const gplan *, nfa *, lr_error *err);
/* trim.c: which rules may be empty; then dead ends become N_DEAD. */
int lr_nfa_nullable(nfa *, lr_error *err);
int lr_nfa_trim(nfa *, lr_error *err);
/* unique.c: makes n->wide. */
int lr_nfa_widen(nfa *, lr_error *err);
/* leftrec.c: rewrites left recursion, then ranks the rules. */
int lr_nfa_unleft(nfa *, lr_error *err);
/* scc.c: edges of v are edge[edge_at[v] .. edge_at[v + 1] - 1]. comp[v]: number of v's component, components that can
 * be reached having the smaller numbers; order: all nodes by component. LR_ENOMEM. */
int lr_scc(uint32_t n, const uint32_t *edge_at, const uint32_t *edge, uint32_t *comp, uint32_t *order);

/* ---- determinised ---- */

#define D_UNKNOWN UINT32_MAX
#define D_DEAD    0u
#define PLAIN     0x80000000u /* in tables of transitions only */
#define OPEN      0x80000000u /* counts from here on are of a loop without bounds; see count.c */

enum {
    D_ENDS = 1,
    D_PLAIN = 2,
    D_MARK = 4,
    D_FREE = 8,
    D_COUNTED = 16 /* some item has a count */,
    D_SPLIT = 32,
    D_NO_COUNT = 64,
    D_NARROW = 128 /* there are unique rules, and only finitely many texts lead from here to the rule's end */
};

typedef struct lr_base lr_base;
typedef struct lr_count lr_count;

typedef struct dstate {
    uint64_t *items; /* (n) sorted, then n_calls pairs: rule, DFA state after it (D_UNKNOWN until needed) */
    uint32_t *trans; /* (n_cls) full states after a byte, with PLAIN if they are plain; or NULL */
    lr_base *base;   /* cached mask of the byte part, or NULL */
    lr_count *cnt;   /* the same for states of a loop without bounds */
    struct {
        uint32_t in, out; /* see lr_dfa__split; known if flag D_SPLIT is set; in D_UNKNOWN: it cannot be split */
        uint32_t count, loop;
    } part;
    uint32_t n, hash, next; /* next: hash chain or free list */
    uint32_t byte;          /* its byte part; itself if it is one; D_DEAD if empty */
    uint32_t n_calls;
    uint8_t flags;
} dstate;

/* ---- frames ---- */

typedef struct frame frame;
typedef struct gitem {
    uint32_t d;
    frame *f;
} gitem;

struct frame {
    frame *next; /* hash chain */
    uint32_t hash, refs;
    uint32_t n;
    uint16_t depth;
    bool root;    /* returning from here may end the text */
    bool unique;  /* of a unique rule */
    bool guarded; /* that, or what returns here may end a unique rule by that */
    gitem ret[];  /* (n) sorted by frame: where it returns to, full DFA states */
};

/* A set of items as it stands after a byte. Owners hold a reference on each frame. */
typedef struct gstate {
    gitem *it;
    uint32_t n, cap;
    bool ends; /* the text may end here */
} gstate;

/* ---- instances ---- */

typedef struct gmaskent gmaskent;
typedef struct walker walker;

typedef struct itemlist {
    gitem *at;
    uint32_t n, cap;
} itemlist;

/* What one matcher call works with. */
typedef struct gwork {
    itemlist kernel, out, ret;
    bool ends, hole_hit; /* hole_hit: a hole was asked for */
    frame **tmp;         /* frames made in this call, a reference each */
    uint32_t n_tmp, cap_tmp;
    uint32_t *heap, n_heap; /* rules with contributions, by rank; (n_rule) */
    uint32_t *first;        /* (n_rule) first contribution, 0 = none */
    struct contrib {
        gitem item;
        uint32_t next;
    } * contrib;
    uint32_t n_contrib, cap_contrib;
    uint64_t *sub; /* subset under construction */
    uint32_t n_sub, cap_sub;
    uint32_t *stack, cap_stack;                   /* pairs: state, count */
    uint32_t *seen, *seen_count, cap_seen, stamp; /* per NFA state */
    uint32_t steps;                               /* left */
    lr_error err;                                 /* code 0 = none */
} gwork;

struct lr_grammar {
    uint32_t refs;
    nfa *n;
    dstate *d;
    uint32_t n_d, cap_d, d_free;
    uint32_t *bucket, n_bucket; /* DFA states by hash */
    size_t d_bytes, base_bytes, mask_bytes;
    frame **fbucket;
    uint32_t n_fbucket, n_frame;
    frame *root; /* returns nowhere: the text may end there */
    gwork w;
    lr_matcher *matchers;  /* all alive */
    lr_grammar_trie *trie; /* of the cached masks */
    gmaskent *mask;        /* whole masks */
    uint32_t n_mask;
    uint64_t mask_use; /* counts uses of them */
    uint32_t *scratch; /* (2 n_scratch) the first half is zeros between uses */
    size_t n_scratch;
    walker *walker; /* room for walks */
    uint64_t walked;
};

int lr_grammar__new(lr_grammar **out, nfa *n, lr_error *err);
/* Drops cached masks. */
void lr_grammar__drop_masks(lr_grammar *);
/* Drops DFA states that nobody needs, if there are many. Between calls only. */
void lr_grammar__collect(lr_grammar *);

/* dfa.c: full state of the set in w.sub (any order); D_DEAD if empty or on error (w.err). */
uint32_t lr_dfa__intern(lr_grammar *);
uint32_t lr_dfa__of_state(lr_grammar *, uint32_t nfa_state, uint32_t count);
uint32_t lr_dfa__byte_part(lr_grammar *, uint32_t d);
uint32_t lr_dfa__trans_slow(lr_grammar *, uint32_t d, unsigned cls);
uint32_t lr_dfa__after_call(lr_grammar *, uint32_t d, uint32_t i);
uint32_t lr_dfa__union(lr_grammar *, uint32_t a, uint32_t b);
/* Splits the items of d: part.in, those inside a counted loop, with counts set to OPEN; part.out, the others;
 * part.count, what the counts were; part.loop. False: the counts are not all the same or of several loops, or w.err. */
bool lr_dfa__split(lr_grammar *, uint32_t d);
static inline uint32_t *lr_dfa__calls(const dstate *s) { return (uint32_t *)(s->items + s->n); }
static inline uint32_t lr_dfa__trans(lr_grammar *g, uint32_t d, unsigned cls)
{
    const uint32_t *t = g->d[d].trans;
    uint32_t r = t ? t[cls] : D_UNKNOWN;
    return r != D_UNKNOWN ? r & ~PLAIN : lr_dfa__trans_slow(g, d, cls);
}
void lr_dfa__free_all(lr_grammar *);

/* step.c */
static inline frame *lr_frame__ref(frame *f)
{
    f->refs++;
    return f;
}
void lr_frame__unref(lr_grammar *, frame *);
frame *lr_frame__root(lr_grammar *); /* g->root, made when first needed; NULL: w.err */
/* w.kernel (full states) -> w.out (byte parts, sorted by frame) and w.ends. m: for holes, may be NULL. text: what a
 * hole is told comes after the matcher's text. False: w.err. */
bool lr_step__close(lr_grammar *, lr_matcher *m, lr_str text);
/* Clears kernel and out, and puts into kernel what comes after byte b from items (n). */
void lr_step__byte(lr_grammar *, const gitem *it, uint32_t n, unsigned b);
/* Puts the root rule's start into out. */
bool lr_step__start(lr_grammar *, lr_matcher *m);
/* Gives back the frames made since the call began. */
void lr_step__end_call(lr_grammar *);
void lr_step__begin_call(lr_grammar *);
bool lr_step__push(gwork *, itemlist *, uint32_t d, frame *f);

/* ---- matchers ---- */

/* A hash that goes on byte by byte. */
typedef struct texthash {
    uint64_t a, b;
} texthash;
static inline void texthash_add(texthash *h, unsigned byte)
{
    h->a = (h->a ^ (byte + 1)) * 0x9E3779B97F4A7C15u;
    h->a ^= h->a >> 32;
    h->b = (h->b + byte + 1) * 0xC2B2AE3D27D4EB4Fu;
    h->b ^= h->b >> 29;
}

typedef struct gslot {
    gstate s;      /* without items and not ends: an end token was taken */
    size_t n_text; /* length and hash of the text then */
    texthash hash;
} gslot;

/* What a hole's function said at a text. */
typedef struct hole_memo {
    uint32_t rule, d; /* full state at the start of the strings; D_DEAD: there are none */
    texthash text, strings;
} hole_memo;

/* Where a JSON text stands (unique.c): the arrays and objects that are open. */
typedef struct jscan {
    size_t n; /* bytes looked at */
    uint32_t depth;
    bool in_string, escaped;
    bool inside; /* a document; without marks all is */
    struct jlevel {
        size_t from, part; /* behind the bracket; behind the last bracket, comma or colon */
        bool object, name; /* name: a name of an object is next */
    } level[LR_G_MAX_LEVELS];
} jscan;

struct lr_matcher {
    lr_grammar *g; /* its own instance if there are holes */
    lr_grammar_trie *t;
    lr_matcher *prev, *next;
    lr_matcher_options o;
    gslot slot[LR_MATCHER_HISTORY + 1];
    uint32_t at;   /* slot of the present state */
    uint32_t back; /* tokens that can be rolled back */
    size_t taken;
    char *text; /* what was taken; kept only if there are holes or unique rules */
    size_t cap_text;
    jscan *scan; /* at some earlier text, or NULL */
    hole_memo *memo;
    size_t n_memo, cap_memo;
};

static inline gstate *lr_matcher__state(lr_matcher *m) { return &m->slot[m->at].s; }
/* Entry DFA state (full) of hole `rule` at the text; D_DEAD with or without w.err. */
uint32_t lr_matcher__hole(lr_matcher *m, uint32_t rule, lr_str text);
/* The text so far and `more` in one piece, zero-terminated, in the matcher's buffer; NULL if there is no memory. */
const char *lr_matcher__join_text(lr_matcher *m, lr_str more);
/* Whether what a unique rule has matched, up to the end of `more`, stands there a second time. True with w.err too. */
bool lr_unique__repeats(lr_matcher *m, lr_str more);
/* Whether a unique rule that is being matched, and of which full or byte state d (D_NARROW) is left, can still end with
 * something that has not been there. True where that is not certain. */
bool lr_unique__alive(lr_matcher *m, uint32_t d, lr_str more);
bool lr_state__set(lr_grammar *, gstate *s, const gitem *it, uint32_t n, bool ends); /* takes references */
void lr_state__clear(lr_grammar *, gstate *s);

/* ---- trie ---- */

typedef struct tnode {
    uint32_t skip;  /* first node that is not below this one */
    int32_t token;  /* the lowest id whose piece ends here, -1 = none */
    uint16_t depth; /* bytes up to here */
    uint8_t byte;
    uint8_t many; /* more ids have the same piece */
} tnode;

struct lr_grammar_trie {
    uint32_t refs;
    lr_vocab *v;
    tnode *node; /* in depth-first order, children by byte; node 0 is the root */
    uint32_t n_node, n_vocab;
    int32_t *same; /* (n_vocab) the next id with the same piece, -1 */
    int32_t *eog;  /* end-of-generation ids */
    uint32_t n_eog, max_depth;
    lr_grammar_trie *next;      /* all tries */
    struct shared_base *shared; /* (cap_shared) masks of rules that call none, by signature: a hash table */
    uint32_t n_shared, cap_shared;
    size_t shared_bytes;
};

bool lr_trie__is_text(const lr_vocab *v, int32_t id);

/* ---- masks ---- */

/* What may come where the matcher stands, ends included: words at least; a reference. NULL: w.err, or no memory. Within
 * a call (lr_step__begin_call). */
lr_token_mask *lr_mask__of(lr_matcher *m, size_t words);
void lr_mask__free_base(lr_grammar *, lr_base *);
void lr_mask__free_count(lr_grammar *, lr_count *);
void lr_mask__free_shared(lr_grammar_trie *);
void lr_walker_free(walker *); /* NULL is allowed */

#endif
