/* cpu_center.c - what all keys of a layer have in common, for KV types that round to few bits.
 *
 * A bias on the keys' projection can be a hundred times as large as what tells one key from another, and a scale that
 * has to reach it leaves the rest too few steps. Taking the same vector off all keys of a layer changes no weight of
 * the softmax, so the mean of the bias over the first SPAN (8192) positions, turned by RoPE as the keys are, is taken
 * off: nearly all of it in the slow dimensions, where such biases lie, and nothing in the fast ones, whose mean is 0.
 * For a turn of angle a a position, the mean of the factor is a geometric sum: sin(SPAN a / 2) / (SPAN sin(a / 2)),
 * turned by (SPAN - 1) a / 2.
 */
#include "backend/cpu_int.h"
#include "backend/kv_center.h"
#include "base/mem.h"

static const plan_op *maker(const lr_plan *p, int value)
{
    for (int i = 0; i < p->n_ops; i++)
        if (p->ops[i].out == value && value >= 0) return &p->ops[i];
    return NULL;
}

/* Scores of the layer have no fixed point that a shift would move: no sink beside them, no cap on them. */
static bool shift_free(const lr_plan *p, int layer)
{
    for (int i = 0; i < p->n_ops; i++) {
        const plan_op *o = &p->ops[i];
        if (o->kind == LR_OP_ATTN && o->layer == layer && (o->sinks || o->softcap > 0)) return false;
    }
    return true;
}

static int center_of(lr_plan *p, plan_op *kv, lr_error *err)
{
    const plan_op *made = maker(p, kv->in[0]), *rope = made && made->kind == LR_OP_ROPE ? made : NULL;
    if (rope) made = maker(p, rope->in[0]);
    if (!made || made->kind != LR_OP_LINEAR || !made->bias || !shift_free(p, kv->layer)) return 0;
    int width = p->values[kv->in[0]].width;
    float *c = lr_memdup(made->bias->vec, (size_t)width * sizeof *c);
    if (!c) return lr_fail(err, LR_ENOMEM, "no memory for the plan");
    const rope_table *t = rope ? &p->ropes[rope->rope] : NULL;
    for (int h = 0; rope && h < rope->n_heads; h++)
        lr_kv_center_turn(t->freq, t->n_rot, rope->layer_norm, t->attn_scale, c + (size_t)h * (size_t)rope->head_dim);
    kv->center = c;
    return 0;
}

int lr_cpu_centers(lr_plan *p, lr_error *err)
{
    int rc = 0;
    for (int i = 0; i < p->n_ops && !rc; i++)
        if (p->ops[i].kind == LR_OP_KV) rc = center_of(p, &p->ops[i], err);
    return rc;
}
