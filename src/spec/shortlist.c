/* shortlist.c - the part of a large vocabulary that drafts are chosen from: see spec.h. */
#include "base/mem.h"
#include "spec/spec.h"
#include <string.h>

enum { FIRST = 32768, LARGE = 2 /* a vocabulary that has so many times the first ids */ };

/* A list saves up to a third of a pass. A token that is not in it ends a draft: with one in ten most of that is lost.
 */
static const float NOVEL_MOST = 0.1f, NOVEL_STEP = 1 / 64.0f;

static void add(uint32_t *bits, int id) { bits[id / (32 * LR_LISTED)] |= 1u << id / LR_LISTED % 32; }

int lr_shortlist_words(int n_vocab) { return (n_vocab + 32 * LR_LISTED - 1) / (32 * LR_LISTED); }

static size_t bytes(int n_vocab) { return (size_t)lr_shortlist_words(n_vocab) * sizeof(uint32_t); }

int lr_shortlists_new(lr_shortlists *out, const lr_vocab *v, int n_vocab, int first, lr_error *err)
{
    *out = (lr_shortlists){0};
    if (first == 0) first = FIRST;
    if (first < 0 || n_vocab / LARGE < first) return 0;
    *out = (lr_shortlists){n_vocab, lr_calloc(1, bytes(n_vocab)), lr_calloc(1, bytes(n_vocab))};
    if (!out->any || !out->pass) {
        lr_shortlists_free(out);
        return lr_fail(err, LR_ENOMEM, "no memory for shortlists of %d tokens", n_vocab);
    }
    for (int id = 0; id < n_vocab; id++)
        if (id < first || lr_vocab_is_control(v, id) || lr_vocab_is_eog(v, id)) add(out->any, id);
    return 0;
}

void lr_shortlists_free(lr_shortlists *l)
{
    lr_free(l->any);
    lr_free(l->pass);
    *l = (lr_shortlists){0};
}

void lr_shortlist_see(lr_shortlist *s, const int32_t *tokens, int n)
{
    const lr_shortlists *of = s->of;
    if (!of || !of->any) return;
    if (!s->bits && (s->bits = lr_malloc(bytes(of->n_vocab)))) memcpy(s->bits, of->any, bytes(of->n_vocab));
    for (int i = 0; s->bits && i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= of->n_vocab) continue;
        const bool known = lr_is_listed(s->bits, tokens[i]);
        s->novel += NOVEL_STEP * ((known ? 0 : 1) - s->novel);
        if (!known) add(s->bits, tokens[i]);
    }
}

void lr_shortlist_copy(lr_shortlist *to, const lr_shortlist *from)
{
    if (!from->bits || (!to->bits && !(to->bits = lr_malloc(bytes(from->of->n_vocab))))) return;
    memcpy(to->bits, from->bits, bytes(from->of->n_vocab));
    to->novel = from->novel;
}

void lr_shortlist_free(lr_shortlist *s)
{
    lr_free(s->bits);
    s->bits = NULL;
}

void lr_shortlists_clear(lr_shortlists *l)
{
    if (l->pass) memset(l->pass, 0, bytes(l->n_vocab));
}

bool lr_shortlists_join(lr_shortlists *l, const lr_shortlist *s)
{
    if (!s->bits || s->novel > NOVEL_MOST) return false;
    for (int i = 0; i < lr_shortlist_words(l->n_vocab); i++) l->pass[i] |= s->bits[i];
    return true;
}
