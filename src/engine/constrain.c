/* constrain.c - see constrain.h. */
#include "engine/constrain.h"
#include "base/mem.h"

typedef struct constrain {
    lr_matcher *m;
    uint32_t bits[]; /* of the model's vocabulary; beyond the matcher's words all 0 */
} constrain;

static int mask(void *user, const uint32_t **bits, lr_error *err)
{
    constrain *c = user;
    size_t n;
    int rc = lr_matcher_mask(c->m, c->bits, &n, err);
    if (rc) return rc;
    if (n == 0) return lr_fail(err, LR_ESTATE, "no token of the vocabulary goes on as the grammar wants");
    *bits = c->bits;
    return 0;
}

static int accept(void *user, int32_t token, lr_error *err)
{
    constrain *c = user;
    int rc = lr_matcher_accept(c->m, token, err);
    return rc ? rc : lr_matcher_done(c->m);
}

static void start(void *user, bool strip_space) { lr_matcher_strip_space(((constrain *)user)->m, strip_space); }

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
    *out = (lr_constraint){.user = c, .mask = mask, .accept = accept, .start = start, .free = destroy};
    return 0;
}

lr_matcher *lr_constraint_matcher(const lr_constraint *c) { return c->mask == mask ? ((constrain *)c->user)->m : NULL; }
