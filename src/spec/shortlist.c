/* shortlist.c - the part of a large vocabulary that drafts are chosen from: see spec.h. */
#include "base/mem.h"
#include "spec/spec.h"
#include <string.h>

enum { FIRST = 32768, LARGE = 2 /* a vocabulary that has so many times the first ids */ };

/* A list saves up to a third of a pass. A token that is not in it ends a draft: with one in ten most of that is lost.
 */
static const float NOVEL_MOST = 0.1f, NOVEL_STEP = 1 / 64.0f;

static bool has(const uint32_t *bits, int id) { return bits[id / (32 * LR_LISTED)] >> id / LR_LISTED % 32 & 1; }
static void add(uint32_t *bits, int id) { bits[id / (32 * LR_LISTED)] |= 1u << id / LR_LISTED % 32; }

int lr_shortlist_words(int n_vocab) { return (n_vocab + 32 * LR_LISTED - 1) / (32 * LR_LISTED); }

static size_t bytes(int n_vocab) { return (size_t)lr_shortlist_words(n_vocab) * sizeof(uint32_t); }

uint32_t *lr_shortlist_any(const lr_vocab *v, int n_vocab, int first)
{
    if (first == 0) first = FIRST;
    if (first < 0 || n_vocab / LARGE < first) return NULL;
    uint32_t *bits = lr_calloc(1, bytes(n_vocab));
    for (int id = 0; bits && id < n_vocab; id++)
        if (id < first || lr_vocab_is_control(v, id) || lr_vocab_is_eog(v, id)) add(bits, id);
    return bits;
}

void lr_shortlist_see(lr_shortlist *s, const int32_t *tokens, int n)
{
    if (!s->any) return;
    if (!s->bits && (s->bits = lr_malloc(bytes(s->n_vocab)))) memcpy(s->bits, s->any, bytes(s->n_vocab));
    for (int i = 0; s->bits && i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= s->n_vocab) continue;
        const bool known = has(s->bits, tokens[i]);
        s->novel += NOVEL_STEP * ((known ? 0 : 1) - s->novel);
        if (!known) add(s->bits, tokens[i]);
    }
}

void lr_shortlist_copy(lr_shortlist *to, const lr_shortlist *from)
{
    if (!from->bits || (!to->bits && !(to->bits = lr_malloc(bytes(from->n_vocab))))) return;
    memcpy(to->bits, from->bits, bytes(from->n_vocab));
    to->novel = from->novel;
}

void lr_shortlist_free(lr_shortlist *s)
{
    lr_free(s->bits);
    s->bits = NULL;
}

bool lr_shortlist_join(uint32_t *pass, const lr_shortlist *s)
{
    if (!s->bits || s->novel > NOVEL_MOST) return false;
    for (int i = 0; i < lr_shortlist_words(s->n_vocab); i++) pass[i] |= s->bits[i];
    return true;
}
