/* small_graph.h - a small layer graph whose weights a test knows: layers x + attention(norm x) W, a norm, a head. */
#ifndef LR_TESTS_SMALL_GRAPH_H
#define LR_TESTS_SMALL_GRAPH_H
#include "engine_fixture.h"
#include "base/dtype.h"
#include "model/graph.h"
#include "model/part.h"

enum { WIDTH = 64, BIG = 256 * WIDTH, SG_LAYERS = 5 };

static float sg_embd[BIG], sg_head[BIG], sg_layer[SG_LAYERS][BIG], sg_ones[WIDTH];

static float random_float(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (float)(*seed >> 8) / (1 << 23) - 1;
}

/* "e": embedding, "0" ..: of the layers, "h": the head, "n": ones. */
static bool sg_find(void *user, const char *name, lr_tensor *t)
{
    char c = name[0];
    int rows = c == 'n' ? 1 : c == 'e' || c == 'h' ? FX_VOCAB : WIDTH;
    const float *w = c == 'n' ? sg_ones : c == 'e' ? sg_embd : c == 'h' ? sg_head : sg_layer[c - '0'];
    *t = (lr_tensor){.name = name, .type = LR_F32, .n_dims = rows == 1 ? 1 : 2, .data = w};
    t->ne[0] = WIDTH;
    t->ne[1] = (uint64_t)rows;
    t->ne[2] = t->ne[3] = 1;
    t->size = (size_t)WIDTH * (size_t)rows * sizeof(float);
    return user == NULL;
}

/* A model of so many layers; the one with the number idle (-1: none) adds nothing. It is started, with KV for 64 rows.
 */
static lr_model *sg_make(int layers, int idle)
{
    lr_backend_config cfg = {.device = "cpu", .threads = 1, .compute = LR_COMPUTE_F32};
    lr_backend *be;
    lr_graph *g;
    lr_model *m;
    lr_error err;
    int x, y, logits;
    uint32_t seed = 7;
    for (int i = 0; i < BIG; i++) {
        sg_embd[i] = random_float(&seed) * 0.3f;
        sg_head[i] = random_float(&seed) * 0.3f;
        for (int l = 0; l < layers; l++) sg_layer[l][i] = random_float(&seed) * (l == idle ? 0 : 0.3f);
    }
    for (int i = 0; i < WIDTH; i++) sg_ones[i] = 1;
    assert_int_equal(lr_backend_new(&be, &cfg, &err), 0);
    assert_int_equal(lr_graph_new(&g, be, (lr_weight_source){.find = sg_find}, &err), 0);
    assert_int_equal(lr_graph_embed(g, "e", 1, &x, &err), 0);
    for (int l = 0; l < layers; l++) {
        char name[] = {(char)('0' + l), 0};
        lr_attn a = {.n_heads = 2, .n_kv_heads = 2, .head_dim = WIDTH / 2, .scale = 0.2f};
        assert_int_equal(lr_graph_norm(g, x, "n", NULL, 1e-5f, 0, false, &y, &err), 0);
        assert_int_equal(lr_graph_attention(g, y, y, y, a, NULL, &y, &err), 0);
        assert_int_equal(lr_graph_linear(g, y, name, NULL, WIDTH, 0, &y, &err), 0);
        assert_int_equal(lr_graph_binary(g, LR_OP_ADD, x, y, &x, &err), 0);
    }
    assert_int_equal(lr_graph_norm(g, x, "n", NULL, 1e-5f, 0, false, &y, &err), 0);
    assert_int_equal(lr_graph_linear(g, y, "h", NULL, FX_VOCAB, 0, &logits, &err), 0);
    lr_vocab *v = fx_vocab();
    lr_graph_info info = {.name = "small", .n_ctx = 64, .vocab = v};
    assert_int_equal(lr_graph_finish(g, logits, y, &info, &m, &err), 0);
    lr_vocab_unref(v);
    lr_kv_spec spec = {.type = LR_F32, .value_type = LR_F32, .block_size = 16, .n_blocks = {4}};
    assert_int_equal(m->ops->start(m, &spec, 16, 16, &err), 0);
    return m;
}

#endif
