/* ngram.c - prompt lookup, the names of methods, and whether two vocabularies agree. See spec.h. */
#include "spec/spec.h"
#include <string.h>

enum { LOOK_BACK = 32768, PADDING = 1024 };

static const char *const names[LR_SPEC_METHODS] = {"off",   "ngram",      "suffix", "draft",
                                                   "given", "early_exit", "heads",  "eagle"};

const char *lr_spec_method_name(lr_spec_method m) { return (unsigned)m < LR_SPEC_METHODS ? names[m] : "unknown"; }

int lr_spec_method_parse(const char *name)
{
    for (int i = 0; i < LR_SPEC_METHODS; i++)
        if (strcmp(names[i], name) == 0) return i;
    return -1;
}

int lr_ngram_propose(const int32_t *tokens, int n, int min, int max, int k, int32_t *out, int *match)
{
    int best = 0, at = 0, from = n > LOOK_BACK ? n - LOOK_BACK : 0;
    if (min < 1) min = 1;
    *match = 0;
    if (n <= min || k <= 0) return 0;
    int32_t last = tokens[n - 1];
    for (int i = n - 2; i >= from + min - 1 && best < max; i--) { /* i: where the last token stood before */
        if (tokens[i] != last) continue;
        int m = 1;
        while (m < max && m <= i - from && tokens[i - m] == tokens[n - 1 - m]) m++;
        if (m > best) {
            best = m;
            at = i + 1;
        }
    }
    if (best < min) return 0;
    int got = 0;
    /* past the end of the text it goes on with itself: a text that repeats has its period continued */
    for (int i = at; got < k; i++, got++) out[got] = i < n ? tokens[i] : out[i - n];
    *match = best;
    return got;
}

/* Adds a path of tokens to a tree; false if all of it is there. */
static bool add_path(lr_spec_tree *t, const int32_t *path, int k)
{
    int node = -1, i = 0, next;
    for (; i < k && (next = lr_spec_tree_child(t, node, path[i])) >= 0; i++) node = next;
    if (i == k) return false;
    for (; i < k && t->n < LR_SPEC_MAX; i++) {
        t->token[t->n] = path[i];
        t->parent[t->n] = node;
        node = t->n++;
    }
    return true;
}

void lr_ngram_branches(const int32_t *tokens, int n, int m, int branches, int k, lr_spec_tree *t)
{
    int from = n > LOOK_BACK ? n - LOOK_BACK : 0;
    if (m < 1 || k < 1 || n <= m) return;
    for (int i = n - 2; i >= from + m - 1 && branches > 0 && t->n < LR_SPEC_MAX; i--) {
        if (tokens[i] != tokens[n - 1] || memcmp(tokens + i - m + 1, tokens + n - m, (size_t)m * sizeof *tokens) != 0)
            continue;
        int32_t path[LR_SPEC_MAX];
        int got = 0;
        for (int j = i + 1; j < n && got < k && got < LR_SPEC_MAX; j++) path[got++] = tokens[j];
        if (add_path(t, path, got)) branches--;
    }
}

/* ---- vocabularies ---- */

static int differ(lr_error *err, int id, const char *what)
{
    return lr_fail(err, LR_EUNSUPPORTED, "the draft model's vocabulary is another one: token %d has another %s", id,
                   what);
}

int lr_spec_check_vocab(const lr_model *target, const lr_model *draft, int *common, lr_error *err)
{
    const lr_vocab *a = target->vocab, *b = draft->vocab;
    int na = (int)lr_vocab_size(a), nb = (int)lr_vocab_size(b), n = na < nb ? na : nb;
    *common = target->n_vocab < draft->n_vocab ? target->n_vocab : draft->n_vocab;
    if (a == b) return 0;
    if (na - n > PADDING || nb - n > PADDING)
        return lr_fail(err, LR_EUNSUPPORTED, "the draft model has %d tokens, the model %d", nb, na);
    if (lr_vocab_bos(a) != lr_vocab_bos(b)) {
        return lr_fail(err, LR_EUNSUPPORTED, "the draft model's beginning-of-text token is %d, the model's %d",
                       lr_vocab_bos(b), lr_vocab_bos(a));
    }
    for (int i = 0; i < n; i++) {
        size_t la, lb;
        const char *pa = lr_vocab_piece(a, i, &la), *pb = lr_vocab_piece(b, i, &lb);
        if (la != lb || (la && memcmp(pa, pb, la) != 0)) {
            return lr_fail(err, LR_EUNSUPPORTED,
                           "the draft model's vocabulary is another one: token %d is '%.*s' there and '%.*s' here", i,
                           (int)(lb < 40 ? lb : 40), pb, (int)(la < 40 ? la : 40), pa);
        }
        if (lr_vocab_is_eog(a, i) != lr_vocab_is_eog(b, i)) return differ(err, i, "role (end of text)");
    }
    if (n < *common) *common = n;
    return 0;
}
