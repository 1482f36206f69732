/* constrain.c - see constrain.h. */
#include "engine/constrain.h"
#include "base/mem.h"
#include <string.h>

typedef struct constrain {
    lr_matcher *m;
    bool force; /* cut what must come as the tokenizer does, and allow only that */
    lr_forced forced, saved;
    size_t tried;       /* tokens accepted since it was saved */
    lr_token_mask *own; /* what the matcher's state allows; NULL = not asked for yet */
    size_t words;
    int32_t one;     /* the only bit that is set in */
    uint32_t bits[]; /* (words) of the model's vocabulary */
} constrain;

/* ---- what must come ---- */

int lr_forced_look(lr_forced *f, lr_matcher *m, lr_error *err)
{
    size_t n = 0;
    if (f->looked) return 0;
    int rc = lr_matcher_forced_tokens(m, (lr_str){f->tail, f->n_tail}, f->queue, LR_FORCED_MAX, &n, err);
    f->at = 0;
    f->n = (int)n;
    f->looked = rc == 0;
    return rc;
}

void lr_forced_took(lr_forced *f, const lr_vocab *v, int32_t token)
{
    size_t n;
    const char *s = lr_vocab_piece(v, token, &n);
    f->at = f->at < f->n && f->queue[f->at] == token ? f->at + 1 : f->n;
    if (f->at == f->n) f->looked = false;
    if (n > LR_FORCED_TAIL) {
        s += n - LR_FORCED_TAIL;
        n = LR_FORCED_TAIL;
    }
    size_t keep = f->n_tail + n > LR_FORCED_TAIL ? LR_FORCED_TAIL - n : f->n_tail;
    memmove(f->tail, f->tail + f->n_tail - keep, keep);
    if (n) memcpy(f->tail + keep, s, n);
    f->n_tail = keep + n;
}

/* ---- a matcher as a constraint ---- */

static int own_mask(constrain *c, lr_error *err)
{
    return c->own ? 0 : lr_matcher_share_mask(c->m, c->words, &c->own, err);
}

static void forget_mask(constrain *c)
{
    lr_token_mask_unref(c->own);
    c->own = NULL;
}

/* The only token that is allowed. */
static int32_t only_one(const constrain *c)
{
    for (size_t w = 0; w < c->words; w++) {
        if (c->own->bits[w]) return (int32_t)(32 * w) + __builtin_ctz(c->own->bits[w]);
    }
    return -1;
}

/* Finds what must come now: text that is no choice, or the only token that spells one of several. */
static int look(constrain *c, lr_error *err)
{
    lr_forced *f = &c->forced;
    if (!c->force || f->looked) return 0;
    int rc = lr_forced_look(f, c->m, err);
    if (rc || f->n) return rc;
    rc = own_mask(c, err);
    if (rc || c->own->n != 1 || lr_matcher_can_end(c->m)) return rc;
    f->queue[f->n++] = only_one(c);
    return 0;
}

static int mask(void *user, const uint32_t **bits, lr_error *err)
{
    constrain *c = user;
    int rc = look(c, err);
    if (rc) return rc;
    if (c->forced.at < c->forced.n) {
        int32_t id = c->forced.queue[c->forced.at];
        c->bits[c->one / 32] = 0;
        c->bits[id / 32] = 1u << (id % 32);
        c->one = id;
        *bits = c->bits;
        return 0;
    }
    rc = own_mask(c, err);
    if (rc) return rc;
    if (c->own->n == 0) return lr_fail(err, LR_EINVAL, "no token of the vocabulary goes on as the grammar wants");
    *bits = c->own->bits;
    return 0;
}

static int forced(void *user, int32_t *token, lr_error *err)
{
    constrain *c = user;
    int rc = look(c, err);
    if (rc || c->forced.at == c->forced.n) return rc;
    *token = c->forced.queue[c->forced.at];
    return 1;
}

static int accept(void *user, int32_t token, lr_error *err)
{
    constrain *c = user;
    int rc = lr_matcher_accept(c->m, token, err);
    if (rc) return rc;
    forget_mask(c);
    c->tried++;
    lr_forced_took(&c->forced, lr_matcher_vocab(c->m), token);
    return lr_matcher_done(c->m);
}

/* What is accepted while this is on is only tried: it is as if it never was once this is off. */
static int ahead(void *user, bool on, lr_error *err)
{
    constrain *c = user;
    if (on) {
        c->saved = c->forced;
        c->tried = 0;
        return 0;
    }
    c->forced = c->saved;
    forget_mask(c);
    return c->tried ? lr_matcher_rollback(c->m, c->tried, err) : 0;
}

static void start(void *user, bool strip_space, bool force)
{
    constrain *c = user;
    lr_matcher_strip_space(c->m, strip_space);
    c->force = force;
}

static void destroy(void *user)
{
    constrain *c = user;
    forget_mask(c);
    lr_matcher_free(c->m);
    lr_free(c);
}

int lr_constraint_of_matcher(lr_constraint *out, lr_matcher *m, int n_vocab, lr_error *err)
{
    size_t words = ((size_t)n_vocab + 31) / 32;
    if (words < lr_matcher_words(m)) return lr_fail(err, LR_EINVAL, "the grammar's vocabulary is not the model's");
    constrain *c = lr_calloc(1, sizeof *c + words * sizeof *c->bits);
    if (!c) return lr_fail(err, LR_ENOMEM, "no memory for a constraint");
    c->m = m;
    c->words = words;
    *out = (lr_constraint){
        .user = c, .mask = mask, .lasting = true, .accept = accept, .start = start, .forced = forced, .free = destroy};
    lr_grammar_info info;
    lr_grammar_get_info(lr_matcher_grammar(m), &info);
    if (info.n_holes == 0) out->ahead = ahead; /* a hole's function is asked about texts that are, only */
    return 0;
}

lr_matcher *lr_constraint_matcher(const lr_constraint *c) { return c->mask == mask ? ((constrain *)c->user)->m : NULL; }
