/* text_int.h - what the files of src/text share: the vocabulary's tables and the merge engine.
 *
 * Ids are int32_t, -1 for none. All tables are flat arrays made by lr_vocab_new and never changed afterwards.
 */
#ifndef LR_TEXT_TEXT_INT_H
#define LR_TEXT_TEXT_INT_H
#include "base/mem.h"
#include "text/pipe.h"
#include "text/presplit.h"
#include "text/text.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* BPE: byte-level. SPM: SentencePiece's BPE, by scores; CHARS: the same by merges; UNIGRAM. */
enum lr_vocab_kind { LR_VOCAB_BPE, LR_VOCAB_SPM, LR_VOCAB_CHARS, LR_VOCAB_UNIGRAM };

/* Bits of lr_vocab.flag[id]. */
enum {
    LR_TF_CONTROL = 1, /* control or unknown */
    LR_TF_EOG = 2,
    LR_TF_NAME = 4,   /* is in the text only by LR_TOK_SPECIAL */
    LR_TF_PLAIN = 8,  /* is taken from plain text as a whole, before merging */
    LR_TF_MERGE = 16, /* SentencePiece: may come out of a merge */
};

typedef struct lr_pair {
    uint64_t key; /* left id << 32 | right id, plus 1; 0 = empty slot */
    uint32_t rank;
    int32_t id; /* what they merge to */
} lr_pair;

/* Names found in texts, sorted by their bytes; first[b]..first[b + 1] are those that begin with b. */
typedef struct lr_vocab_names {
    uint32_t n;
    int32_t *id; /* (n) */
    uint32_t first[257];
} lr_vocab_names;

/* Tokens that the Unigram model finds in texts, sorted by their bytes. */
typedef struct lr_unigram {
    uint32_t n;
    int32_t *id; /* (n) */
    uint32_t first[257];
    double *score; /* (vocabulary) */
    double unknown;
} lr_unigram;

struct lr_vocab {
    atomic_uint refs;
    enum lr_vocab_kind kind;
    const lr_pre *pre; /* BPE */
    uint32_t n;
    int32_t bos, eos, unk, eot, pad;
    bool add_bos, add_eos, add_space_prefix;
    bool nfc, whole;  /* BPE: see lr_pre */
    bool fuse_unk;    /* CHARS: neighbouring unknowns are one */
    bool prefix_once; /* add_space_prefix: at the text's start only */
    lr_pipe *pipe;    /* or NULL: pre, or as SPM does */
    size_t max_raw, max_piece;

    char *raw_text, *piece_text;
    uint32_t *raw_at, *piece_at; /* (n + 1) */
    uint8_t *type, *flag;        /* (n) */
    uint8_t *edge;               /* (n) lr_token_edge, or NULL: none has any */
    uint32_t *rank;              /* (n) SentencePiece: the higher the score, the lower the rank */

    struct lr_slot {
        uint32_t hash, id1;
    } * slot; /* raw text -> id + 1, open addressing; of equal texts the lowest id */
    uint32_t slot_mask;
    lr_pair *pair; /* BPE */
    uint64_t pair_mask;
    lr_unigram uni;
    uint8_t *near; /* SentencePiece: bitmap of hashed character pairs that stand side by side in some piece */

    int32_t byte_id[256];          /* the token of one byte, -1 none */
    lr_vocab_names special, plain; /* with and without LR_TOK_SPECIAL */
};

#define LR_NEAR_BITS 20
static inline uint32_t lr_near_hash(int32_t a, int32_t b)
{
    uint32_t h = (uint32_t)a * 0x9E3779B1u ^ ((uint32_t)b * 0x85EBCA77u + 0x165667B1u);
    h ^= h >> 15;
    return (h * 0xC2B2AE3Du) >> (32 - LR_NEAR_BITS);
}

uint32_t lr_text_hash(const char *s, size_t n);
/* The id whose raw text this is, -1 none. */
int32_t lr_vocab_raw_id(const lr_vocab *v, const char *s, size_t n);
static inline lr_str lr_vocab_raw_str(const lr_vocab *v, uint32_t id)
{
    return (lr_str){v->raw_text + v->raw_at[id], v->raw_at[id + 1] - v->raw_at[id]};
}
static inline lr_str lr_vocab_piece_str(const lr_vocab *v, uint32_t id)
{
    return (lr_str){v->piece_text + v->piece_at[id], v->piece_at[id + 1] - v->piece_at[id]};
}
/* The longest name at s[i..n); -1 none. */
int32_t lr_vocab_names_match(const lr_vocab *v, const lr_vocab_names *names, const uint8_t *s, size_t i, size_t n);

/* The byte-level alphabet: the UTF-8 spelling (1 or 2 bytes) of byte b in a token's raw text -> its length. */
size_t lr_text_bytelevel(uint8_t b, char *out);

/* ---- tokenizing ---- */

/* A growing list of ids. */
typedef struct lr_ids {
    int32_t *id;
    size_t n, cap;
} lr_ids;
int lr_text_ids_add(lr_ids *o, int32_t id, lr_error *err);

typedef struct lr_sym {
    uint32_t at, end; /* place in the word; end 0: merged away */
    int32_t prev, next;
    int32_t id; /* -1: no token (SentencePiece) */
} lr_sym;

/* One lr_tokenize at work: the output and the merge engine's memory, kept from word to word. */
typedef struct lr_tok {
    const lr_vocab *v;
    lr_error *err;
    lr_ids out;
    lr_sym *sym;
    size_t n_sym, cap_sym;
    uint64_t *heap; /* rank << 32 | symbol, see merge.c */
    size_t n_heap, cap_heap;
    const uint8_t *start; /* of the whole text */
    const uint8_t *text;  /* BPE: the segment that is being split */
    char *word;           /* SentencePiece: a word in the spelling of raw text */
    size_t cap_word;
} lr_tok;

/* Adds a symbol at the end of the word; places must grow. */
int lr_text_merge_push(lr_tok *t, uint32_t at, uint32_t end, int32_t id);
/* Merges the symbols until none is left to merge. pair tells what two neighbours (symbols a, b of t->sym) merge to:
 * false, or true and *rank, *id. */
int lr_text_merge_run(lr_tok *t,
                      bool (*pair)(const lr_tok *t, const lr_sym *a, const lr_sym *b, uint32_t *rank, int32_t *id));

/* A segment of text without names in it. */
int lr_text_bpe(lr_tok *t, const uint8_t *s, size_t n);
int lr_text_spm(lr_tok *t, const uint8_t *s, size_t n, bool space_prefix);
/* A word. */
int lr_text_bpe_word(lr_tok *t, const uint8_t *s, size_t n);
int lr_text_chars(lr_tok *t, const uint8_t *s, size_t n);
int lr_text_unigram(lr_tok *t, const uint8_t *s, size_t n);
bool lr_text_pair_rank(const lr_tok *t, const lr_sym *a, const lr_sym *b, uint32_t *rank, int32_t *id);
/* Tables of the Unigram model; scores (n). */
int lr_unigram_init(lr_vocab *v, const double *scores, lr_error *err);

#endif
