/* constrain.c - see constrain.h. */
#include "engine/constrain.h"
#include "base/mem.h"
#include <string.h>

#define QUEUE 128 /* tokens that must come, found at once */
#define TAIL  48  /* bytes of the text that are kept: what a tokenizer wants to see before a word */

typedef struct constrain {
    lr_matcher *m;
    bool force;  /* cut what must come as the tokenizer does, and allow only that */
    bool looked; /* queue is what must come now */
    int at, n;   /* in queue */
    int32_t queue[QUEUE];
    size_t n_tail;
    char tail[TAIL];
    bool masked; /* bits are those of the matcher's state, and allow so many tokens */
    size_t n_allowed;
    size_t words;
    uint32_t bits[]; /* (words) of the model's vocabulary; beyond the matcher's words all 0 */
} constrain;

static int own_mask(constrain *c, lr_error *err)
{
    if (c->masked) return 0;
    memset(c->bits, 0, c->words * sizeof *c->bits);
    int rc = lr_matcher_mask(c->m, c->bits, &c->n_allowed, err);
    c->masked = rc == 0;
    return rc;
}

/* The only token that is allowed. */
static int32_t only_one(const constrain *c)
{
    for (size_t w = 0; w < c->words; w++) {
        if (c->bits[w]) return (int32_t)(32 * w) + __builtin_ctz(c->bits[w]);
    }
    return -1;
}

/* Finds what must come now. */
static int look(constrain *c, lr_error *err)
{
    size_t n = 0;
    if (!c->force || c->looked) return 0;
    c->masked = false;
    int rc = lr_matcher_forced_tokens(c->m, (lr_str){c->tail, c->n_tail}, c->bits, c->queue, QUEUE, &n, err);
    if (rc) return rc;
    c->at = 0;
    c->n = (int)n;
    c->looked = true;
    if (n) return 0;
    rc = own_mask(c, err);
    if (rc || c->n_allowed != 1 || lr_matcher_can_end(c->m)) return rc;
    c->queue[c->n++] = only_one(c);
    return 0;
}

static int mask(void *user, const uint32_t **bits, lr_error *err)
{
    constrain *c = user;
    int rc = look(c, err);
    if (rc) return rc;
    if (c->at < c->n) {
        int32_t id = c->queue[c->at];
        memset(c->bits, 0, c->words * sizeof *c->bits);
        c->bits[id / 32] = 1u << (id % 32);
        c->masked = false;
    } else {
        rc = own_mask(c, err);
        if (rc) return rc;
        if (c->n_allowed == 0)
            return lr_fail(err, LR_ESTATE, "no token of the vocabulary goes on as the grammar wants");
    }
    *bits = c->bits;
    return 0;
}

static int forced(void *user, int32_t *token, lr_error *err)
{
    constrain *c = user;
    int rc = look(c, err);
    if (rc || c->at == c->n) return rc;
    *token = c->queue[c->at];
    return 1;
}

/* The text's end is kept. */
static void remember(constrain *c, int32_t token)
{
    size_t n;
    const char *s = lr_vocab_piece(lr_matcher_vocab(c->m), token, &n);
    if (n > TAIL) {
        s += n - TAIL;
        n = TAIL;
    }
    size_t keep = c->n_tail + n > TAIL ? TAIL - n : c->n_tail;
    memmove(c->tail, c->tail + c->n_tail - keep, keep);
    memcpy(c->tail + keep, s, n);
    c->n_tail = keep + n;
}

static int accept(void *user, int32_t token, lr_error *err)
{
    constrain *c = user;
    int rc = lr_matcher_accept(c->m, token, err);
    if (rc) return rc;
    if (c->at < c->n && c->queue[c->at] == token)
        c->at++;
    else
        c->at = c->n;
    if (c->at == c->n) c->looked = false;
    c->masked = false;
    remember(c, token);
    return lr_matcher_done(c->m);
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
    *out =
        (lr_constraint){.user = c, .mask = mask, .accept = accept, .start = start, .forced = forced, .free = destroy};
    return 0;
}

lr_matcher *lr_constraint_matcher(const lr_constraint *c) { return c->mask == mask ? ((constrain *)c->user)->m : NULL; }
