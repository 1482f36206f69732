/* lua_rows.c - rows of logits that outlive a step, and how far two models' rows are apart.
 *
 * core.rows(n, n_vocab) is room for n rows; a "score" request with keep = rows fills it in order.
 */
#include "base/mem.h"
#include "lua/lua_int.h"
#include "sample/row.h"
#include <math.h>

#define ROWS "llmrun.rows"

typedef struct rows_ud {
    float *x;
    size_t n;
    int n_vocab;
} rows_ud;

static int rows_close(lua_State *L)
{
    rows_ud *u = luaL_checkudata(L, 1, ROWS);
    lr_free(u->x);
    u->x = NULL;
    return 0;
}

static rows_ud *check_rows(lua_State *L, int idx) { return lr_lua_check_open(L, idx, ROWS, "room for rows"); }

float *lr_lua_check_rows(lua_State *L, int idx, int n_vocab, size_t *n_rows)
{
    rows_ud *u = check_rows(L, idx);
    if (u->n_vocab != n_vocab)
        luaL_error(L, "keep: rows of %d logits, where the vocabulary has %d", u->n_vocab, n_vocab);
    *n_rows = u->n;
    return u->x;
}

/* rows(n, n_vocab) -> room for n rows; nil, message, code */
static int rows_new(lua_State *L)
{
    lr_error err;
    size_t bytes;
    lua_Integer n = luaL_checkinteger(L, 1), n_vocab = luaL_checkinteger(L, 2);
    luaL_argcheck(L, n >= 1 && n <= 1 << 20, 1, "1 to 1048576 rows");
    luaL_argcheck(L, n_vocab >= 1 && n_vocab <= 1 << 24, 2, "1 to 16777216 logits");
    rows_ud *u = lua_newuserdatauv(L, sizeof *u, 0);
    *u = (rows_ud){NULL, (size_t)n, (int)n_vocab};
    luaL_setmetatable(L, ROWS);
    if (!lr_mul((size_t)n, (size_t)n_vocab * sizeof(float), &bytes) || !(u->x = lr_calloc(bytes, 1))) {
        lr_fail(&err, LR_ENOMEM, "no memory for %d rows of %d logits", (int)n, (int)n_vocab);
        return lr_lua_fail(L, &err);
    }
    return 1;
}

static const float *row_of(lua_State *L, int idx, const rows_ud *u, lua_Integer i)
{
    luaL_argcheck(L, i >= 1 && (size_t)i <= u->n, idx, "no such row");
    return u->x + (size_t)(i - 1) * (size_t)u->n_vocab;
}

/* r:diverge(i, other, id) -> Kullback-Leibler divergence of row i of `other` from row i of r (natural logarithm, r is
 * the truth), whether both have the same best token, probability of token id in r, and in other */
static int rows_diverge(lua_State *L)
{
    const rows_ud *a = check_rows(L, 1), *b = check_rows(L, 3);
    lua_Integer i = luaL_checkinteger(L, 2), id = luaL_checkinteger(L, 4);
    luaL_argcheck(L, a->n_vocab == b->n_vocab, 3, "rows of another vocabulary");
    luaL_argcheck(L, id >= 0 && id < a->n_vocab, 4, "no id of this vocabulary");
    const float *x = row_of(L, 2, a, i), *y = row_of(L, 2, b, i);
    double lx = lr_row_logsumexp(x, a->n_vocab), ly = lr_row_logsumexp(y, a->n_vocab), kl = 0;
    for (int k = 0; k < a->n_vocab; k++) {
        double p = x[k] - lx;
        if (p > -60) kl += exp(p) * (p - (y[k] - ly));
    }
    lua_pushnumber(L, kl > 0 ? kl : 0); /* below 0 by rounding alone */
    lua_pushboolean(L, lr_row_argmax(x, a->n_vocab) == lr_row_argmax(y, a->n_vocab));
    lua_pushnumber(L, exp(x[id] - lx));
    lua_pushnumber(L, exp(y[id] - ly));
    return 4;
}

static const luaL_Reg methods[] = {{"diverge", rows_diverge}, {"close", rows_close}, {NULL, NULL}};

void lr_lua_open_rows(lua_State *L)
{
    lr_lua_class(L, ROWS, methods, rows_close);
    lua_pushcfunction(L, rows_new);
    lua_setfield(L, -2, "rows");
}
