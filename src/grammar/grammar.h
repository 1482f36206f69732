/* grammar.h - constrained generation: which tokens may come next so that the text stays inside a language.
 *
 * A front end describes the language with a builder (lr_gb): nodes over bytes, and rules that may refer to each other
 * in any way (recursion, left recursion and ambiguity are fine). lr_gb_compile makes a grammar of it. A matcher walks
 * one text through a grammar and gives, for each next token, the set of allowed ids as bits. Everything is matched by
 * bytes: a character may be spread over several tokens and a token over several rules.
 *
 * How it works. Each rule becomes a nondeterministic automaton over bytes whose edges may also call rules; left
 * recursion is rewritten away. Sets of its states are determinised lazily. A matcher's state is a set of (automaton
 * state, frame) pairs with at most one pair a frame; a frame is where a called rule returns to: a set of (automaton
 * state, frame) pairs again, shared by content, so that ambiguous derivations merge (as in Earley's algorithm) and
 * right recursion needs no depth. Token masks come from a walk of the vocabulary's trie: what depends on the automaton
 * state alone is kept with it, and only tokens that reach past the end of the innermost rule are walked again.
 *
 * Bounds. Every table has a limit; a grammar or text that needs more is LR_ELIMIT or LR_EUNSUPPORTED with the reason,
 * on the call concerned. A rule that no finite text matches is refused by compile.
 *
 * One thread uses a grammar, its matchers and the trie. Grammars and tries are shared by reference count.
 */
#ifndef LR_GRAMMAR_GRAMMAR_H
#define LR_GRAMMAR_GRAMMAR_H
#include "base/error.h"
#include "base/str.h"
#include "text/text.h"

/* ---- building ---- */

typedef struct lr_gb lr_gb;
typedef struct lr_grammar lr_grammar;

/* A node of a builder; 0 after an error. Nodes may be used any number of times. */
typedef uint32_t lr_gnode;

/* How characters are spelt in bytes. */
typedef enum lr_spell {
    LR_SPELL_RAW,  /* UTF-8 */
    LR_SPELL_JSON, /* inside a JSON string: UTF-8, or an escape where JSON demands or allows one */
} lr_spell;

#define LR_REP_INF (-1)

int lr_gb_new(lr_gb **out, lr_error *err);
void lr_gb_free(lr_gb *); /* NULL is allowed */
/* The first error so far, or NULL. After one, every call gives 0 and compile fails with it. */
const lr_error *lr_gb_error(const lr_gb *);
/* Records an error of the caller's, unless there is one. */
void lr_gb_fail(lr_gb *, int code, const char *text);

lr_gnode lr_gb_empty(lr_gb *);
/* Matches nothing at all. */
lr_gnode lr_gb_never(lr_gb *);
lr_gnode lr_gb_lit(lr_gb *, const char *s, size_t n);
/* One byte of a set: bit b % 64 of set[b / 64]. */
lr_gnode lr_gb_bytes(lr_gb *, const uint64_t set[4]);
/* One character of a set: n ranges lo, hi (ascending, apart) of code points. Surrogates in it are ignored. */
lr_gnode lr_gb_chars(lr_gb *, const uint32_t (*ranges)[2], size_t n, lr_spell spell);
lr_gnode lr_gb_seq(lr_gb *, const lr_gnode *nodes, size_t n);
lr_gnode lr_gb_alt(lr_gb *, const lr_gnode *nodes, size_t n);
/* min..max times; max may be LR_REP_INF. Large bounds are counted, not copied. */
lr_gnode lr_gb_rep(lr_gb *, lr_gnode node, int32_t min, int32_t max);
/* Any of the strings. Good for very many. */
lr_gnode lr_gb_lits(lr_gb *, const lr_str *strings, size_t n);

/* An automaton over nodes: edges lead from a place to a place and match a node on the way. Place 0 is the start, place
 * n_places - 1 the end. */
typedef struct lr_gedge {
    uint32_t from, to;
    lr_gnode node;
} lr_gedge;
lr_gnode lr_gb_graph(lr_gb *, uint32_t n_places, const lr_gedge *edges, size_t n);

/* A rule to be defined once; the name is for messages. */
uint32_t lr_gb_rule(lr_gb *, const char *name, size_t n);
void lr_gb_define(lr_gb *, uint32_t rule, lr_gnode node);
/* Keeps a rule from being copied into its callers: right for what many places share and what ends by itself (a quoted
 * string). */
void lr_gb_keep(lr_gb *, uint32_t rule);
/* Marks a rule that matches one item of a JSON array or one name of a JSON object (with its quotes): what it has
 * matched may not be the same value as an earlier item of that array, or an earlier name of that object. The whole text
 * must be JSON, and the rule may not be the root. See unique.c. */
void lr_gb_unique(lr_gb *, uint32_t rule);
/* Texts in which JSON documents stand behind marks: up to one, and from a document's end to the next, the text is free
 * and does not hold the mark. Not copied if empty. */
void lr_gb_mark(lr_gb *, const char *s, size_t n);
lr_gnode lr_gb_ref(lr_gb *, uint32_t rule);
/* A hole: what may stand here is asked when it is reached (lr_hole_fn). id is the caller's. */
lr_gnode lr_gb_hole(lr_gb *, int id, const char *name, size_t n);

/* The grammar of the texts that rule `root` matches. The builder can go on being used. LR_EINVAL: a rule that is not
 * defined or that no finite text matches; LR_ELIMIT: too large; LR_EUNSUPPORTED: left recursion through a counted
 * repetition. Starts with one reference. */
int lr_gb_compile(lr_gb *, uint32_t root, lr_grammar **out, lr_error *err);
lr_grammar *lr_grammar_ref(lr_grammar *);
void lr_grammar_unref(lr_grammar *); /* NULL is allowed */

typedef struct lr_grammar_info {
    uint32_t n_rules, n_states; /* after inlining; states of the nondeterministic automaton */
    uint32_t n_holes;
    uint32_t n_dfa;    /* determinised states at present */
    uint32_t n_frames; /* frames alive */
    size_t bytes;      /* memory in all, cached masks included */
    uint64_t walked;   /* trie nodes visited so far */
} lr_grammar_info;
void lr_grammar_get_info(const lr_grammar *, lr_grammar_info *);

/* ---- vocabulary ---- */

typedef struct lr_grammar_trie lr_grammar_trie;
/* The trie of a vocabulary's pieces, built at the first call for it and shared after; those of the last two
 * vocabularies, and these, are kept until lr_grammar_trie_drop. Control, unknown and unused
 * tokens, and user-defined names of chat machinery (<|...|>) are not in it: a constrained text is plain text. */
int lr_grammar_trie_get(lr_grammar_trie **out, lr_vocab *v, lr_error *err);
void lr_grammar_trie_drop(void);
lr_grammar_trie *lr_grammar_trie_ref(lr_grammar_trie *);
void lr_grammar_trie_unref(lr_grammar_trie *); /* NULL is allowed */
uint32_t lr_grammar_trie_nodes(const lr_grammar_trie *);

/* ---- matching ---- */

typedef struct lr_matcher lr_matcher;

/* Gives the strings that may stand in a hole, after the text so far (which may end in bytes that a token still to be
 * chosen would bring). *strings is borrowed until the next call. No string at all closes that way; an empty string is
 * an error. Negative = error, on the call that asked. Asked once for one hole at one text. */
typedef int (*lr_hole_fn)(void *user, int id, lr_str text, const lr_str **strings, size_t *n, lr_error *err);

typedef struct lr_matcher_options {
    lr_hole_fn hole; /* needed if the grammar has holes */
    void *hole_user;
    void *(*hole_dup)(void *); /* for copies; NULL = shared as it is */
    void (*hole_free)(void *); /* or NULL */
    bool strip_space; /* the first piece loses a first space (a text's start in add_space_prefix vocabularies) */
} lr_matcher_options;

#define LR_MATCHER_HISTORY 256 /* tokens that can be rolled back */

/* At the start of a text. o may be NULL. Keeps references. hole_user is the matcher's once this succeeds. */
int lr_matcher_new(lr_matcher **out, lr_grammar *g, lr_grammar_trie *t, const lr_matcher_options *o, lr_error *err);
void lr_matcher_free(lr_matcher *); /* NULL is allowed */
/* A matcher that stands where this one does, history included. */
int lr_matcher_copy(lr_matcher **out, const lr_matcher *, lr_error *err);
/* Whether the first piece loses a first space; matters until a token is taken. */
void lr_matcher_strip_space(lr_matcher *, bool on);
lr_grammar *lr_matcher_grammar(const lr_matcher *); /* borrowed */

/* Words of a mask: ceil(vocabulary size / 32). */
size_t lr_matcher_words(const lr_matcher *);
/* bits (lr_matcher_words): bit id % 32 of word id / 32 is set iff the token may come next. End-of-generation tokens are
 * allowed iff the text may end here. *n (or NULL): number of tokens allowed, ends included. After the end or an error
 * nothing is. LR_ELIMIT, LR_ENOMEM, and what a hole's function returns; bits are then all 0. */
int lr_matcher_mask(lr_matcher *, uint32_t *bits, size_t *n, lr_error *err);

/* The same as something that matchers of a grammar share where they may take the same tokens, not to be written to. */
typedef struct lr_token_mask {
    uint32_t refs;
    size_t n;        /* tokens allowed */
    size_t words;    /* at least those asked for; beyond the vocabulary's all 0 */
    uint32_t bits[]; /* (words) */
} lr_token_mask;
/* A reference. Errors as lr_matcher_mask. */
int lr_matcher_share_mask(lr_matcher *, size_t words, lr_token_mask **out, lr_error *err);
void lr_token_mask_unref(lr_token_mask *); /* NULL is allowed */

/* Takes a token. LR_EINVAL if it is not allowed, the matcher then stands where it did. */
int lr_matcher_accept(lr_matcher *, int32_t token, lr_error *err);
/* The same for bytes; counts as one token for rollback. */
int lr_matcher_accept_bytes(lr_matcher *, const char *s, size_t n, lr_error *err);
/* Whether the token would be accepted. */
bool lr_matcher_allows(lr_matcher *, int32_t token);
/* The text may end here. */
bool lr_matcher_can_end(const lr_matcher *);
/* Nothing but the end may follow. */
bool lr_matcher_done(const lr_matcher *);
/* Takes back the last n tokens. LR_EINVAL: more than were taken, or than are remembered. */
int lr_matcher_rollback(lr_matcher *, size_t n, lr_error *err);
size_t lr_matcher_taken(const lr_matcher *); /* tokens taken so far, less those taken back */
/* Bytes that must come next whatever is chosen, at most cap. The text they make need not end at a token's border. */
size_t lr_matcher_forced(lr_matcher *, char *buf, size_t cap);
/* Tokens that may be taken for what must come next, cut as the model's tokenizer cuts the text: at most cap, *n may be
 * 0. before: the end of the text so far (some words are enough), empty at its start. Whoever takes them takes what the
 * grammar allows; other tokens might spell the same. Errors: as lr_matcher_mask. */
int lr_matcher_forced_tokens(lr_matcher *, lr_str before, int32_t *ids, size_t cap, size_t *n, lr_error *err);
lr_vocab *lr_matcher_vocab(const lr_matcher *); /* borrowed */

/* ---- regular expressions ---- */

/* A set of texts, as an automaton over characters, closed under the set operations. Immutable. */
typedef struct lr_regex lr_regex;

enum lr_regex_flags {
    LR_RE_SEARCH = 1, /* the pattern may match anywhere in the text; else it must match all of it */
    LR_RE_ICASE = 2,  /* ASCII letters match either case */
    LR_RE_DOTALL = 4, /* . matches line ends too */
};

/* Syntax: ECMAScript's (\d and \w are ASCII; \p{...} is not known), plus (?i:...), (?s:...), \A and \z. Lookahead is
 * allowed at the very start of the pattern (behind ^). Else LR_EUNSUPPORTED (\b, lookaround, back references) or
 * LR_EFORMAT, each with the byte of the pattern; LR_ELIMIT if too large. */
int lr_regex_new(lr_regex **out, const char *pattern, size_t n, unsigned flags, lr_error *err);
int lr_regex_lits(lr_regex **out, const lr_str *strings, size_t n, lr_error *err); /* UTF-8 */
void lr_regex_free(lr_regex *);                                                    /* NULL is allowed */
/* LR_ELIMIT if the result is too large. */
int lr_regex_and(lr_regex **out, const lr_regex *a, const lr_regex *b, lr_error *err);
int lr_regex_or(lr_regex **out, const lr_regex *a, const lr_regex *b, lr_error *err);
int lr_regex_not(lr_regex **out, const lr_regex *a, lr_error *err);
/* Texts of a of min..max characters; max may be LR_REP_INF. */
int lr_regex_length(lr_regex **out, const lr_regex *a, int32_t min, int32_t max, lr_error *err);
/* Decimal numbers (-12.50) that are multiples of p / 10^k, leading zeros allowed. */
int lr_regex_multiple(lr_regex **out, uint32_t p, uint32_t k, lr_error *err);
/* Whether no text at all is in it; whether a text of the two is in both. */
int lr_regex_is_empty(const lr_regex *, bool *yes, lr_error *err);
int lr_regex_overlaps(const lr_regex *a, const lr_regex *b, bool *yes, lr_error *err);
int lr_regex_matches(const lr_regex *, const char *s, size_t n, bool *yes, lr_error *err);
/* Calls fn with each of its texts (UTF-8) if there are at most `most`, of at most LR_REGEX_WORD bytes; *all tells
 * whether that is so. fn may have been called for some even if not. */
#define LR_REGEX_WORD 256
int lr_regex_words(const lr_regex *, size_t most, void (*fn)(void *user, lr_str word), void *user, bool *all,
                   lr_error *err);
/* The node that matches its texts, spelt that way; 0 with the builder's error set. */
lr_gnode lr_gb_regex(lr_gb *, const lr_regex *, lr_spell spell);

#endif
