/* text.h - tokenizers (byte-level BPE, SentencePiece BPE, those of tokenizer.json) and the streaming detokenizer.
 *
 * A vocabulary (lr_vocab) is built once from a model file's own tables and never changes; any thread may use it at any
 * time. "Raw text" of a token is what the file holds ("Ġthe", "▁the", "<0x0A>"); its "piece" is the bytes it stands
 * for (" the", " the", "\n").
 *
 * What is promised, for input of any bytes:
 * - lr_tokenize gives the ids of the model's own tokenizer; lr_detokenize of them gives the input back byte for byte,
 *   invalid UTF-8 and zero bytes included. Three exceptions: qwen2 and the other rules that say so (presplit.c) bring
 * the valid parts of a text into Unicode normal form C first, as those models' own tokenizers do; a byte that a
 * byte-level vocabulary has no token for (SmolLM2 lacks 0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2 and those that
 * are never valid) is spelt as U+FFFD, or is the unknown token, or an error if there is neither (its own tokenizer
 * would drop it); and a SentencePiece vocabulary without byte tokens writes its unknown token for characters it lacks.
 * - Time is n log n at worst in the length of the text, whatever the text; the stack is constant.
 *
 * Choices:
 * - A control token's name in a text is plain text unless LR_TOK_SPECIAL is given. User-defined tokens (GGUF type 4,
 *   e.g. runs of spaces or "<table>") belong to the plain text and are always taken, longest first, except names of
 *   chat machinery: end-of-generation tokens, those of the shape <|...|>, and, in byte-level vocabularies, <...>,
 *   </...> and [...].
 * - BOS is put first if LR_TOK_BOS is given and the file wants one, but not a second one before a text whose first
 *   token already is BOS. EOS likewise at the end.
 * - Bytes that are not UTF-8, a surrogate (ED A0 80) and overlong forms among them, are characters of their own: they
 *   join the word around them in byte-level BPE and are byte tokens in SentencePiece. Refusing them is for the caller.
 * - U+2581, which SentencePiece uses for a space inside its tables, is spelt as three byte tokens when it occurs in a
 *   text, so that it comes back as itself and not as a space.
 * - The space that SentencePiece models with add_space_prefix want before a text is put at its start and after each
 *   control token, and is taken away at the same places by the detokenizers.
 */
#ifndef LR_TEXT_TEXT_H
#define LR_TEXT_TEXT_H
#include "base/error.h"
#include "base/str.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct lr_vocab lr_vocab;

/* GGUF token types (tokenizer.ggml.token_type). */
enum lr_token_type {
    LR_TT_NORMAL = 1,
    LR_TT_UNKNOWN = 2,
    LR_TT_CONTROL = 3,
    LR_TT_USER = 4, /* user-defined */
    LR_TT_UNUSED = 5,
    LR_TT_BYTE = 6,
};

/* Of a token that is found in a text by its name. */
enum lr_token_edge {
    LR_EDGE_LEFT = 1,  /* takes the white space before it along */
    LR_EDGE_RIGHT = 2, /* and that behind it */
    LR_EDGE_WORD = 4,  /* only where no letter, number or _ stands next to it */
};

/* Everything is borrowed for the call only. */
typedef struct lr_vocab_spec {
    const char *model;    /* tokenizer.ggml.model: "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE); of
                           * tokenizer.json also "chars" (BPE over characters by merges) and "unigram" */
    const char *pre;      /* tokenizer.ggml.pre: "smollm", "qwen2", "llama-bpe", ...; needed for gpt2, else ignored */
    uint32_t n_tokens;    /* 1 .. LR_VOCAB_MAX */
    const lr_str *tokens; /* (n_tokens) raw text; at most LR_TOKEN_MAX bytes each */
    const float *scores;  /* (n_tokens) or NULL: all 0; needed for llama */
    const double *logs;   /* (n_tokens) unigram: log probabilities */
    size_t n_steps;       /* what is done to text first, see pipe.h: instead of pre; needed for chars and unigram */
    const struct lr_step_spec *steps;
    const int32_t *types;            /* (n_tokens) lr_token_type, or NULL: all normal */
    size_t n_merges;                 /* gpt2 only */
    const lr_str *merges;            /* (n_merges) "a b", best first; a zero byte instead of the space is taken too */
    size_t n_eogs;                   /* further tokens that end generation */
    const int32_t *eogs;             /* (n_eogs) */
    size_t n_edges;                  /* what tokens found by their names take along, see lr_token_edge */
    const int32_t *edges;            /* (2 n_edges) id, lr_token_edge bits */
    int nfc, whole;                  /* gpt2: instead of what the rule says (presplit.h): 1 yes, -1 no, 0 as it says */
    int32_t bos, eos, unk, eot, pad; /* -1 = none */
    bool add_bos, add_eos;           /* tokenizer.ggml.add_bos_token, add_eos_token; see lr_text_default_bos */
    bool add_space_prefix;           /* llama only; a file that does not say means true. With steps: decoding takes
                                      * a space away at the start, and (not prefix_once) after control tokens */
    bool prefix_once;
    bool fuse_unk; /* chars: neighbouring unknown characters are one token */
} lr_vocab_spec;

#define LR_VOCAB_MAX (1u << 24)
#define LR_TOKEN_MAX 2048
#define LR_TEXT_MAX  ((size_t)1 << 28) /* bytes in one lr_tokenize */

/* LR_EUNSUPPORTED: a model or pre name this build does not know (never guessed); LR_EFORMAT: tables that contradict
 * themselves; LR_ENOMEM. The vocabulary starts with one reference. */
int lr_vocab_new(lr_vocab **out, const lr_vocab_spec *spec, lr_error *err);
lr_vocab *lr_vocab_ref(lr_vocab *v);
void lr_vocab_unref(lr_vocab *v); /* NULL is allowed */

/* What a file that has no add_bos_token key means: true for "llama" and for the pre names whose own tokenizers put
 * BOS first. pre may be NULL. */
bool lr_text_default_bos(const char *model, const char *pre);
/* Whether lr_vocab_new would know this pre name of a gpt2 vocabulary. */
bool lr_text_pre_known(const char *pre);

uint32_t lr_vocab_size(const lr_vocab *v);
/* -1 = none */
int32_t lr_vocab_bos(const lr_vocab *v);
int32_t lr_vocab_eos(const lr_vocab *v);
int32_t lr_vocab_eot(const lr_vocab *v);
int32_t lr_vocab_unk(const lr_vocab *v);
int32_t lr_vocab_pad(const lr_vocab *v);
bool lr_vocab_add_bos(const lr_vocab *v);
bool lr_vocab_add_eos(const lr_vocab *v);
/* An id that is out of range is normal type, no control, no end, and has an empty piece. */
int lr_vocab_type(const lr_vocab *v, int32_t id); /* lr_token_type */
/* Control or unknown: not part of the text that a reader sees. */
bool lr_vocab_is_control(const lr_vocab *v, int32_t id);
/* End of generation: eos, eot, and well-known names (<|im_end|>, <end_of_turn>, <|eot_id|>, <|endoftext|>, ...) of
 * control or user-defined tokens. */
bool lr_vocab_is_eog(const lr_vocab *v, int32_t id);
/* The bytes the token stands for, borrowed as long as the vocabulary, not zero-terminated, possibly no whole
 * characters. Control tokens give their own name. */
const char *lr_vocab_piece(const lr_vocab *v, int32_t id, size_t *n);
/* The text of the token in the file. */
const char *lr_vocab_raw(const lr_vocab *v, int32_t id, size_t *n);
/* The id whose raw text is exactly this, else whose piece is exactly this; -1 if there is none. The lowest id wins. */
int32_t lr_vocab_find(const lr_vocab *v, const char *text, size_t n);
/* Length of the longest piece. */
size_t lr_vocab_max_piece(const lr_vocab *v);

enum lr_tok_flags {
    LR_TOK_SPECIAL = 1, /* names of control and user-defined tokens in the text are those tokens */
    LR_TOK_BOS = 2,     /* BOS and EOS as the file wants them */
};
/* *ids: lr_malloc'd, the caller frees it with lr_free; a valid block even when *n_ids is 0. LR_ELIMIT: longer than
 * LR_TEXT_MAX. LR_EUNSUPPORTED: a byte that the vocabulary cannot spell and no unknown token. */
int lr_tokenize(const lr_vocab *v, const char *text, size_t n, unsigned flags, int32_t **ids, size_t *n_ids,
                lr_error *err);
/* The raw bytes of all pieces, joined; no replacement characters. special: control tokens show their names, else
 * nothing. Ids out of range: LR_EINVAL. *text: lr_malloc'd, with a zero after its *len bytes. */
int lr_detokenize(const lr_vocab *v, const int32_t *ids, size_t n, bool special, char **text, size_t *len,
                  lr_error *err);

/* Streaming detokenizer: tokens in, valid UTF-8 out, never half a character. A byte sequence that can no longer become
 * a character is replaced by U+FFFD (one for each maximal part of a character, as the Unicode standard recommends).
 * What it has put out after any push is what lr_detokenize gives of the whole, less an unfinished character at the
 * end. It is a plain value: copy it to fork, no freeing. Constant work a token, no allocation. Control tokens that
 * are not shown are as if they were not there: an unfinished character goes on after them. */
typedef struct lr_detok {
    const lr_vocab *v; /* borrowed */
    uint8_t pend[4];   /* an unfinished character */
    uint8_t n_pend;
    bool special;
    bool strip; /* the next piece loses its first space: text start of add_space_prefix vocabularies */
} lr_detok;

#define LR_DETOK_CAP (3 * LR_TOKEN_MAX + 16) /* a buffer that is enough for any push or flush */

/* At the start of a text. */
void lr_detok_init(lr_detok *d, const lr_vocab *v, bool special);
/* Goes over the prompt that the pushed tokens will follow, putting out nothing: an unfinished character at its end is
 * completed by the tokens to come, and the pushes give decode(prompt + output) minus decode(prompt). Call after init;
 * looks at no more than the last few tokens. */
void lr_detok_prime(lr_detok *d, const int32_t *ids, size_t n);
/* -> bytes written to buf, complete characters only. cap >= 3 * lr_vocab_max_piece + 9 (LR_DETOK_CAP always is). An id
 * out of range gives nothing. */
size_t lr_detok_push(lr_detok *d, int32_t id, char *buf, size_t cap);
/* The end: an unfinished character comes out as U+FFFD. cap >= 3. */
size_t lr_detok_flush(lr_detok *d, char *buf, size_t cap);

#endif
