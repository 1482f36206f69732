/* test_dist.c - orders as bytes, hostile ones too, and which part of a layer graph a rank gets. No MPI is needed. */
#include "base/mem.h"
#include "dist/dist.h"
#include "model/share.h"
#include <stdarg.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

/* ---- orders ---- */

static int check(const void *data, size_t n, lr_error *err)
{
    char copy[256]; /* to the byte, so that a sanitizer sees a read past the end */
    lr_pack p = {.data = lr_memdup(data, n), .n = n, .cap = n};
    lr_order kind = LR_ORDER_QUIT;
    int model = 0, rc = lr_order_check(&p, &kind, &model, err);
    snprintf(copy, sizeof copy, "%d %d", (int)kind, model);
    lr_pack_deinit(&p);
    return rc;
}

static void test_hostile_orders(void **state)
{
    lr_error err;
    lr_pack p = {0};
    unsigned char noise[64];
    uint32_t x = 12345;
    for (size_t i = 0; i < sizeof noise; i++) {
        x = x * 1664525 + 1013904223;
        noise[i] = (unsigned char)(x >> 24);
    }
    assert_int_equal(check("\1", 1, &err), LR_EFORMAT);
    assert_int_equal(check(noise, sizeof noise, &err), LR_EFORMAT);
    lr_pack_begin(&p, LR_ORDER_KV_COPY, 3);
    uint64_t len = 0;
    memcpy(p.data + 12, &len, sizeof len);
    assert_int_equal(check(p.data, p.n, &err), 0);
    len = (uint64_t)1 << 63;
    memcpy(p.data + 12, &len, sizeof len);
    assert_int_equal(check(p.data, p.n, &err), LR_EFORMAT);
    assert_non_null(strstr(err.text, "9223372036854775808 bytes"));
    len = 8; /* a header, and then nothing */
    memcpy(p.data + 12, &len, sizeof len);
    assert_int_equal(check(p.data, p.n, &err), LR_EFORMAT);
    len = 0;
    memcpy(p.data + 12, &len, sizeof len);
    for (int kind = 0; kind < 256; kind++) {
        p.data[4] = (char)kind;
        assert_int_equal(check(p.data, p.n, &err), kind >= LR_ORDER_QUIT && kind <= LR_ORDER_LAST ? 0 : LR_EFORMAT);
    }
    lr_pack_deinit(&p);
}

static void test_bodies(void **state)
{
    lr_pack p = {0};
    lr_pack_begin(&p, LR_ORDER_START, 1);
    size_t header = p.n;
    lr_pack_int(&p, 7);
    lr_pack_int(&p, -1);
    lr_pack_put(&p, "abc", 3);
    p.at = header;
    assert_int_equal(lr_pack_take(&p, 0, 10), 7);
    assert_false(p.bad);
    assert_int_equal(lr_pack_take(&p, 0, 10), 0); /* out of range */
    assert_true(p.bad);
    p.bad = false;
    assert_memory_equal(lr_pack_get(&p, 3), "abc", 3);
    assert_null(lr_pack_get(&p, 1));
    assert_true(p.bad);
    assert_null(lr_pack_get(&p, SIZE_MAX));
    lr_pack_deinit(&p);
}

/* ---- parts ---- */

enum { HEADS = 8, KV = 2, DIM = 8, WIDTH = 64, FF = 100, VOCAB = 77, LAYERS = 3 };

typedef struct graph {
    lr_op ops[64];
    int width[64];
    size_t cost[64];
    lr_kv_layer layers[LAYERS];
    lr_program p;
} graph;

static int add(graph *g, lr_op_kind kind, int a, int b, int width)
{
    lr_op *o = &g->ops[g->p.n_ops];
    *o = (lr_op){.kind = kind, .in = {a, b}, .out = -1};
    g->cost[g->p.n_ops++] = kind == LR_OP_LINEAR ? (size_t)g->width[a] * (size_t)width : 0;
    if (width == 0) return -1;
    o->out = g->p.n_values;
    g->width[g->p.n_values] = width;
    return g->p.n_values++;
}

static lr_op *last(graph *g) { return &g->ops[g->p.n_ops - 1]; }

/* The Llama family's wiring. */
static void build(graph *g)
{
    memset(g, 0, sizeof *g);
    int x = add(g, LR_OP_EMBED, -1, -1, WIDTH);
    for (int l = 0; l < LAYERS; l++) {
        lr_attn a = {.layer = l, .n_heads = HEADS, .n_kv_heads = KV, .head_dim = DIM, .scale = 1};
        lr_rope r = {.n_heads = HEADS, .head_dim = DIM, .n_rot = DIM, .base = 1e4f, .freq_scale = 1, .attn_scale = 1};
        g->layers[l] = (lr_kv_layer){KV, DIM, 0};
        int h = add(g, LR_OP_NORM, x, -1, WIDTH);
        last(g)->u.norm.group = WIDTH;
        int q = add(g, LR_OP_LINEAR, h, -1, HEADS * DIM), k = add(g, LR_OP_LINEAR, h, -1, KV * DIM);
        int v = add(g, LR_OP_LINEAR, h, -1, KV * DIM);
        q = add(g, LR_OP_ROPE, q, -1, HEADS * DIM);
        last(g)->u.rope = r;
        r.n_heads = KV;
        k = add(g, LR_OP_ROPE, k, -1, KV * DIM);
        last(g)->u.rope = r;
        add(g, LR_OP_KV, k, v, 0);
        last(g)->u.attn = a;
        int o = add(g, LR_OP_ATTN, q, -1, HEADS * DIM);
        last(g)->u.attn = a;
        if (l == LAYERS - 1) {
            o = add(g, LR_OP_ROWS, o, -1, HEADS * DIM);
            x = add(g, LR_OP_ROWS, x, -1, WIDTH);
        }
        x = add(g, LR_OP_ADD, x, add(g, LR_OP_LINEAR, o, -1, WIDTH), WIDTH);
        h = add(g, LR_OP_NORM, x, -1, WIDTH);
        last(g)->u.norm.group = WIDTH;
        int gate = add(g, LR_OP_LINEAR, h, -1, FF), up = add(g, LR_OP_LINEAR, h, -1, FF);
        x = add(g, LR_OP_ADD, x, add(g, LR_OP_LINEAR, add(g, LR_OP_GLU, gate, up, FF), -1, WIDTH), WIDTH);
    }
    g->p.hidden = x;
    g->p.logits = add(g, LR_OP_LINEAR, x, -1, VOCAB);
    g->p.ops = g->ops;
    g->p.width = g->width;
}

static int count(const lr_share *p, lr_op_kind kind)
{
    int n = 0;
    for (int i = 0; i < p->n_ops; i++) n += p->ops[i].kind == kind;
    return n;
}

static int make(lr_share *p, const graph *g, int tp, int pp, int rank, lr_error *err)
{
    lr_place pl = {tp, pp, rank % tp, rank / tp, NULL};
    return lr_share_make(p, &g->p, g->layers, LAYERS, g->cost, &pl, err);
}

static void test_columns(void **state)
{
    lr_error err;
    graph g;
    build(&g);
    for (int tp = 1; tp <= 8; tp *= 2) {
        int logits = 0, q = 0;
        for (int r = 0; r < tp; r++) {
            lr_share p;
            assert_int_equal(make(&p, &g, tp, 1, r, &err), 0);
            assert_int_equal(count(&p, LR_OP_GATHER), tp == 1 ? 0 : 4 * LAYERS);
            assert_int_equal(count(&p, LR_OP_SLICE), 0);
            assert_int_equal(p.logits_at[tp], VOCAB);
            assert_false(p.partial);
            assert_int_equal(p.width[p.hidden], WIDTH);
            logits += p.result_width;
            for (int i = 0; i < p.n_ops; i++) {
                if (p.ops[i].kind != LR_OP_ATTN) continue;
                assert_int_equal(p.ops[i].u.attn.n_heads, HEADS / tp);
                assert_int_equal(p.ops[i].u.attn.n_kv_heads, tp > KV ? 1 : KV / tp);
            }
            assert_int_equal(p.layers[1].n_kv_heads, tp > KV ? 1 : KV / tp);
            /* the first product is the queries', the second the keys': which rows of their weights */
            const struct lr_share_rows *rows[2];
            for (int i = 0, n = 0; n < 2; i++)
                if (p.ops[i].kind == LR_OP_LINEAR) rows[n++] = &p.rows[i];
            if (tp > 1) {
                assert_int_equal(rows[0]->from, q);
                assert_int_equal(rows[1]->from, tp <= KV ? r * KV / tp * DIM : r / (tp / KV) * DIM);
                assert_int_equal(rows[1]->n, (tp > KV ? 1 : KV / tp) * DIM);
            }
            q += rows[0]->n;
            lr_share_deinit(&p);
        }
        assert_int_equal(logits, VOCAB);
        if (tp > 1) assert_int_equal(q, HEADS * DIM);
    }
}

static void test_refused(void **state)
{
    static const int bad[] = {3, 5, 6, 7, 16, 1000};
    lr_error err;
    lr_share p;
    graph g;
    build(&g);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(make(&p, &g, bad[i], 1, 0, &err), LR_ESHAPE);
        assert_non_null(strstr(err.text, "counts that can be: 1 2 4 8"));
    }
    assert_int_equal(make(&p, &g, 1, LAYERS + 1, 0, &err), LR_ESHAPE);
    assert_non_null(strstr(err.text, "1 to 3 pipeline stages"));
}

static void test_stages(void **state)
{
    lr_error err;
    graph g;
    build(&g);
    for (int pp = 1; pp <= LAYERS; pp++) {
        int layers = 0, linears = 0;
        for (int s = 0; s < pp; s++) {
            lr_share p;
            assert_int_equal(make(&p, &g, 1, pp, s, &err), 0);
            assert_int_equal(p.first_layer, layers);
            assert_true(p.n_layers >= 1);
            assert_int_equal(count(&p, LR_OP_INPUT), s > 0);
            assert_int_equal(count(&p, LR_OP_EMBED), s == 0);
            assert_int_equal(p.in_width, s > 0 ? WIDTH : 0);
            assert_int_equal(p.partial, s < pp - 1);
            assert_int_equal(p.result_width, s < pp - 1 ? WIDTH : VOCAB);
            for (int i = 0; i < p.n_ops; i++)
                if (p.ops[i].kind == LR_OP_KV) assert_in_range(p.ops[i].u.attn.layer, 0, p.n_layers - 1);
            layers += p.n_layers;
            linears += count(&p, LR_OP_LINEAR);
            lr_share_deinit(&p);
        }
        assert_int_equal(layers, LAYERS);
        assert_int_equal(linears, LAYERS * 7 + 1);
    }
}

/* Without memory at any point: an error, and nothing is left over. */
static void test_no_memory(void **state)
{
    lr_error err;
    graph g;
    build(&g);
    for (int n = 1;; n++) {
        lr_share p;
        lr_mem_fail_at(n);
        int rc = make(&p, &g, 2, 2, 1, &err);
        lr_mem_fail_at(0);
        if (rc == 0) {
            lr_share_deinit(&p);
            assert_true(n > 20);
            return;
        }
        assert_int_equal(rc, LR_ENOMEM);
    }
}

/* Six experts, two of them for a row, over four ranks. */
static void test_experts(void **state)
{
    graph g;
    lr_share p;
    lr_error err;
    int lo = 0;
    build(&g);
    int x = g.p.hidden, logits = add(&g, LR_OP_LINEAR, x, -1, 6), route = add(&g, LR_OP_ROUTE, logits, -1, 4);
    last(&g)->u.route = (lr_route){.n_experts = 6, .n_used = 2, .scale = 1};
    int up = add(&g, LR_OP_EXPERTS, x, route, FF);
    up = add(&g, LR_OP_ACT, up, -1, FF);
    int down = add(&g, LR_OP_EXPERTS, up, route, WIDTH), slots[64];
    for (int i = 0; i < 64; i++) slots[i] = -1;
    for (int v = up - 1; v <= down; v++) slots[v] = route;
    x = add(&g, LR_OP_MIX, down, route, WIDTH);
    g.p.hidden = x;
    g.p.logits = add(&g, LR_OP_LINEAR, x, -1, VOCAB);
    g.p.route = slots;
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(make(&p, &g, 4, 1, rank, &err), 0);
        int n = 6 * (rank + 1) / 4 - lo, seen = 0;
        for (int i = 0; i < p.n_ops; i++) {
            const lr_op *o = &p.ops[i];
            if (o->kind == LR_OP_ROUTE) assert_int_equal(o->u.route.from * 10 + o->u.route.n_own, lo * 10 + n);
            if (o->kind == LR_OP_EXPERTS) assert_int_equal(p.rows[i].from * 10 + p.rows[i].n, lo * 10 + n);
            seen += o->kind == LR_OP_EXPERTS;
            if (o->kind != LR_OP_MIX) continue;
            const lr_op *all = &p.ops[i - 1];
            assert_int_equal(all->kind, LR_OP_GATHER);
            assert_int_equal(all->out, o->in[0]);
            assert_int_equal(all->u.gather.at[rank], lo);
            assert_int_equal(all->u.gather.at[4], 6);
            assert_int_equal(p.route[all->out], o->in[1]);
        }
        assert_int_equal(seen, 2);
        lo += n;
        lr_share_deinit(&p);
    }
    assert_int_equal(make(&p, &g, 1, 1, 0, &err), 0); /* one rank has all, and gathers nothing */
    assert_int_equal(count(&p, LR_OP_GATHER), 0);
    lr_share_deinit(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_hostile_orders), cmocka_unit_test(test_bodies),
                                       cmocka_unit_test(test_columns),        cmocka_unit_test(test_refused),
                                       cmocka_unit_test(test_stages),         cmocka_unit_test(test_no_memory),
                                       cmocka_unit_test(test_experts)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
