/* grammar_fixture.h - vocabularies of any byte pieces, and short names for building grammars, for the tests of
 * src/grammar.
 */
#ifndef LR_TEST_GRAMMAR_FIXTURE_H
#define LR_TEST_GRAMMAR_FIXTURE_H
#include "base/mem.h"
#include "grammar/grammar.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A byte as byte-level BPE spells it in a file. */
static inline size_t alphabet_put(char *out, unsigned b)
{
    unsigned cp = b;
    if (b < 33 || b == 127 || (b >= 128 && b < 161) || b == 173) {
        unsigned n = b < 33 ? b : b < 161 ? b - 127 + 33 : 67;
        cp = 256 + n;
    }
    if (cp < 128) {
        out[0] = (char)cp;
        return 1;
    }
    out[0] = (char)(0xC0 | cp >> 6);
    out[1] = (char)(0x80 | (cp & 63));
    return 2;
}

/* A vocabulary of pieces (any bytes) and, behind them, the end token "<|endoftext|>" with id n. */
static inline lr_vocab *piece_vocab(const lr_str *pieces, size_t n)
{
    lr_str *tok = calloc(n + 1, sizeof *tok);
    int32_t *types = calloc(n + 1, sizeof *types);
    for (size_t i = 0; i < n; i++) {
        char *s = malloc(2 * pieces[i].n + 1);
        size_t o = 0;
        for (size_t k = 0; k < pieces[i].n; k++) o += alphabet_put(s + o, (unsigned char)pieces[i].s[k]);
        tok[i] = (lr_str){s, o};
        types[i] = LR_TT_NORMAL;
    }
    tok[n] = LR_STR("<|endoftext|>");
    types[n] = LR_TT_CONTROL;
    lr_vocab_spec spec = {.model = "gpt2", .pre = "smollm", .n_tokens = (uint32_t)n + 1, .tokens = tok, .types = types};
    spec.bos = spec.unk = spec.eot = spec.pad = -1;
    spec.eos = (int32_t)n;
    lr_vocab *v = NULL;
    lr_error err;
    if (lr_vocab_new(&v, &spec, &err)) {
        printf("vocabulary: %s\n", err.text);
        exit(1);
    }
    for (size_t i = 0; i < n; i++) {
        size_t m;
        const char *s = lr_vocab_piece(v, (int32_t)i, &m);
        if (m != pieces[i].n || memcmp(s, pieces[i].s, m) != 0) {
            printf("piece %zu came out otherwise\n", i);
            exit(1);
        }
        free((char *)tok[i].s);
    }
    free(tok);
    free(types);
    return v;
}

/* All 256 bytes as tokens 0..255, the end 256. */
static inline lr_vocab *byte_vocab(void)
{
    static char bytes[256];
    lr_str s[256];
    for (int i = 0; i < 256; i++) {
        bytes[i] = (char)i;
        s[i] = (lr_str){bytes + i, 1};
    }
    return piece_vocab(s, 256);
}

static inline lr_gnode b_lit(lr_gb *b, const char *s) { return lr_gb_lit(b, s, strlen(s)); }
static inline lr_gnode b_class(lr_gb *b, const char *bytes)
{
    uint64_t set[4] = {0};
    for (; *bytes; bytes++) set[(unsigned char)*bytes >> 6] |= (uint64_t)1 << ((unsigned char)*bytes & 63);
    return lr_gb_bytes(b, set);
}
#define b_seq(b, ...)                                                                                                  \
    lr_gb_seq(b, (const lr_gnode[]){__VA_ARGS__}, sizeof((const lr_gnode[]){__VA_ARGS__}) / sizeof(lr_gnode))
#define b_alt(b, ...)                                                                                                  \
    lr_gb_alt(b, (const lr_gnode[]){__VA_ARGS__}, sizeof((const lr_gnode[]){__VA_ARGS__}) / sizeof(lr_gnode))

/* Whether the grammar matches exactly the text; *upto: bytes of it that were allowed. Takes it byte by byte. */
static inline bool matches(lr_grammar *g, lr_grammar_trie *t, lr_str text, size_t *upto)
{
    lr_matcher *m;
    lr_error err;
    if (lr_matcher_new(&m, g, t, NULL, &err)) {
        printf("matcher: %s\n", err.text);
        exit(1);
    }
    size_t i = 0;
    while (i < text.n && lr_matcher_accept_bytes(m, text.s + i, 1, &err) == 0) i++;
    bool ok = i == text.n && lr_matcher_can_end(m);
    if (upto) *upto = i;
    lr_matcher_free(m);
    return ok;
}

#endif
