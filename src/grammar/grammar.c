/* grammar.c - from a builder to a grammar, and a grammar's life. See grammar.h. */
#include "grammar/grammar_int.h"

int lr_grammar__new(lr_grammar **out, nfa *n, lr_error *err)
{
    lr_grammar *g = lr_calloc(1, sizeof *g);
    if (!g) return lr_fail(err, LR_ENOMEM, "no memory for a grammar");
    g->refs = 1;
    g->w.heap = lr_calloc((size_t)n->n_rule + 1, sizeof *g->w.heap);
    g->w.first = lr_calloc((size_t)n->n_rule + 1, sizeof *g->w.first);
    if (!g->w.heap || !g->w.first) {
        lr_free(g->w.heap);
        lr_free(g->w.first);
        lr_free(g);
        return lr_fail(err, LR_ENOMEM, "no memory for a grammar");
    }
    g->n = n;
    *out = g;
    return 0;
}

static int check_rules(const lr_gb *b, uint32_t root, lr_error *err)
{
    if (root >= b->n_rule) return lr_fail(err, LR_EINVAL, "there is no such rule");
    for (uint32_t r = 0; r < b->n_rule; r++) {
        if (!b->rule[r].defined) return lr_fail(err, LR_EINVAL, "rule %s is not defined", b->rule[r].name);
    }
    return 0;
}

/* The automaton, ready to be used. */
static int make_nfa(lr_gb *b, uint32_t root, nfa *n, lr_error *err)
{
    gplan plan;
    int rc = lr_gplan_make(b, &plan, err);
    if (rc) return rc;
    rc = lr_emit(b, root, &plan, n, err);
    lr_gplan_free(&plan);
    if (!rc) rc = lr_nfa_nullable(n, err);
    if (!rc) rc = lr_nfa_trim(n, err);
    if (rc) return rc;
    if (n->st[n->rule[n->root].start].kind == N_DEAD && n->rule[n->root].hole < 0) {
        return lr_fail(err, LR_EINVAL, "rule %s: no finite text matches it", n->rule[n->root].name);
    }
    rc = lr_nfa_unleft(n, err);
    if (!rc) rc = lr_nfa_trim(n, err);
    if (!rc) lr_nfa__classes(n);
    if (!rc && n->n_unique) rc = lr_nfa_widen(n, err);
    return rc;
}

int lr_gb_compile(lr_gb *b, uint32_t root, lr_grammar **out, lr_error *err)
{
    nfa *n = NULL;
    if (b->err.code) {
        *err = b->err;
        return err->code;
    }
    int rc = check_rules(b, root, err);
    if (!rc) rc = lr_nfa__new(&n, err);
    if (!rc) rc = make_nfa(b, root, n, err);
    if (!rc && b->err.code) {
        *err = b->err;
        rc = err->code;
    }
    if (!rc) rc = lr_grammar__new(out, n, err);
    if (rc) lr_nfa__unref(n);
    return rc;
}

lr_grammar *lr_grammar_ref(lr_grammar *g)
{
    g->refs++;
    return g;
}

void lr_grammar_unref(lr_grammar *g)
{
    if (!g || --g->refs > 0) return;
    gwork *w = &g->w;
    lr_grammar__drop_masks(g);
    if (g->root) lr_frame__unref(g, g->root);
    lr_dfa__free_all(g);
    lr_grammar_trie_unref(g->trie);
    lr_walker_free(g->walker);
    lr_free(g->scratch);
    lr_free(g->fbucket); /* no frames are left: matchers hold references on their grammar */
    lr_free(w->kernel.at);
    lr_free(w->out.at);
    lr_free(w->ret.at);
    lr_free(w->tmp);
    lr_free(w->heap);
    lr_free(w->first);
    lr_free(w->contrib);
    lr_free(w->sub);
    lr_free(w->stack);
    lr_free(w->seen);
    lr_free(w->seen_count);
    lr_nfa__unref(g->n);
    lr_free(g);
}

void lr_grammar_get_info(const lr_grammar *g, lr_grammar_info *i)
{
    *i = (lr_grammar_info){.n_rules = g->n->n_rule,
                           .n_states = g->n->n_st,
                           .n_holes = g->n->n_hole,
                           .n_frames = g->n_frame,
                           .walked = g->walked};
    for (uint32_t d = 1; d < g->n_d; d++) i->n_dfa += !(g->d[d].flags & D_FREE);
    i->bytes = sizeof *g + g->n->n_st * sizeof *g->n->st + g->n->n_set * sizeof *g->n->set +
               g->n->n_rule * sizeof *g->n->rule + g->d_bytes + g->base_bytes + g->mask_bytes;
}
