/* lua_http.c - binds the HTTP listener and its requests; lua/llmrun/serve.lua makes a server of it.
 *
 * A request's userdata keeps its listener's; closing the listener kills its requests: each call checks.
 */
#include "http/http.h"
#include "lua/lua_int.h"
#include <ctype.h>
#include <string.h>

#define LISTENER "llmrun.http"
#define REQUEST  "llmrun.http_request"

/* User value 1: table of the requests that are open, by id. */
typedef struct http_ud {
    lr_http *h; /* NULL = closed */
} http_ud;

/* User value 1: the listener's userdata. */
typedef struct req_ud {
    lr_http_req *r; /* NULL = closed; dead too when owner->h is NULL */
    http_ud *owner;
} req_ud;

static http_ud *check_http(lua_State *L) { return lr_lua_check_open(L, 1, LISTENER, "listener"); }

static req_ud *check_req(lua_State *L)
{
    req_ud *u = luaL_checkudata(L, 1, REQUEST);
    if (!u->r || !u->owner->h) luaL_error(L, "the HTTP request is closed");
    return u;
}

static void set_int(lua_State *L, const char *name, lua_Integer v)
{
    lua_pushinteger(L, v);
    lua_setfield(L, -2, name);
}

static int push_str(lua_State *L, lr_str s)
{
    lua_pushlstring(L, s.n ? s.s : "", s.n);
    return 1;
}

static int done(lua_State *L, int rc, const lr_error *err)
{
    if (rc) return lr_lua_fail(L, err);
    lua_pushboolean(L, 1);
    return 1;
}

/* ---- listener ---- */

static int http_close(lua_State *L)
{
    http_ud *u = luaL_checkudata(L, 1, LISTENER);
    lr_http_free(u->h);
    u->h = NULL;
    return 0;
}

static size_t opt_size(lua_State *L, const char *field, size_t def)
{
    lua_Integer v = lr_lua_opt_int(L, 1, field, (lua_Integer)def);
    if (v < 0) luaL_error(L, "option %s = %I is negative", field, (LUAI_UACINT)v);
    return (size_t)v;
}

static int opt_count(lua_State *L, const char *field, int def)
{
    lua_Integer v = lr_lua_opt_int(L, 1, field, def);
    if (v < 0 || v > INT32_MAX) luaL_error(L, "option %s = %I is out of range", field, (LUAI_UACINT)v);
    return (int)v;
}

/* http_new({ fields of lr_http_config }) -> listener; nil, text, code */
static int core_http_new(lua_State *L)
{
    lr_http_config c = lr_http_defaults();
    lr_error err;
    c.host = lr_lua_opt_str(L, 1, "host", c.host);
    c.port = opt_count(L, "port", c.port);
    c.max_connections = opt_count(L, "max_connections", c.max_connections);
    c.max_requests = opt_count(L, "max_requests", c.max_requests);
    c.max_header = opt_size(L, "max_header", c.max_header);
    c.max_body = opt_size(L, "max_body", c.max_body);
    c.max_bodies = opt_size(L, "max_bodies", c.max_bodies);
    c.max_stream = opt_size(L, "max_stream", c.max_stream);
    c.idle_timeout = lr_lua_opt_num(L, 1, "idle_timeout", c.idle_timeout);
    c.header_timeout = lr_lua_opt_num(L, 1, "header_timeout", c.header_timeout);
    c.body_timeout = lr_lua_opt_num(L, 1, "body_timeout", c.body_timeout);
    http_ud *u = lua_newuserdatauv(L, sizeof *u, 1);
    u->h = NULL;
    luaL_setmetatable(L, LISTENER);
    lua_newtable(L);
    lua_setiuservalue(L, -2, 1);
    return lr_http_new(&u->h, &c, &err) ? lr_lua_fail(L, &err) : 1;
}

static int http_port(lua_State *L)
{
    lua_pushinteger(L, lr_http_port(check_http(L)->h));
    return 1;
}

/* h:host() -> address it listens on, whether only this machine reaches it */
static int http_host(lua_State *L)
{
    http_ud *u = check_http(L);
    lua_pushstring(L, lr_http_host(u->h));
    lua_pushboolean(L, lr_http_is_loopback(u->h));
    return 2;
}

static int http_fd(lua_State *L)
{
    lua_pushinteger(L, lr_http_fd(check_http(L)->h));
    return 1;
}

static int http_poll(lua_State *L)
{
    lr_http_poll(check_http(L)->h);
    return 0;
}

static int http_drain(lua_State *L)
{
    lr_http_drain(check_http(L)->h);
    return 0;
}

/* h:next() -> request, its id, news as bits (1 new, 2 room again, 4 the client is gone); nil when there are none */
static int http_next(lua_State *L)
{
    http_ud *u = check_http(L);
    unsigned what;
    luaL_checkstack(L, 6, NULL);
    lua_getiuservalue(L, 1, 1);
    req_ud *q = lua_newuserdatauv(L, sizeof *q, 1); /* before the request is taken: this may raise */
    *q = (req_ud){NULL, u};
    luaL_setmetatable(L, REQUEST);
    lua_pushvalue(L, 1);
    lua_setiuservalue(L, -2, 1);
    lr_http_req *r = lr_http_next(u->h, &what);
    if (!r) return 0;
    lua_Integer id = (lua_Integer)lr_http_req_id(r);
    if (what & LR_HTTP_NEW) {
        q->r = r;
        lua_pushvalue(L, -1);
        lua_rawseti(L, -3, id);
    } else {
        lua_rawgeti(L, -2, id);
    }
    lua_pushinteger(L, id);
    lua_pushinteger(L, (lua_Integer)what);
    return 3;
}

/* h:stats() -> fields of lr_http_stats */
static int http_stats(lua_State *L)
{
    lr_http_stats s;
    lr_http_get_stats(check_http(L)->h, &s);
    lua_createtable(L, 0, 8);
    set_int(L, "connections", s.connections);
    set_int(L, "requests", s.requests);
    set_int(L, "pending", s.pending);
    set_int(L, "bodies", (lua_Integer)s.bodies);
    set_int(L, "accepted", (lua_Integer)s.accepted);
    set_int(L, "taken", (lua_Integer)s.taken);
    set_int(L, "refused", (lua_Integer)s.refused);
    set_int(L, "gone", (lua_Integer)s.gone);
    set_int(L, "slow", (lua_Integer)s.slow);
    return 1;
}

/* ---- request ---- */

static int req_close(lua_State *L)
{
    req_ud *u = luaL_checkudata(L, 1, REQUEST);
    lr_http_req *r = u->r;
    u->r = NULL;
    if (!r || !u->owner->h) return 0;
    lua_Integer id = (lua_Integer)lr_http_req_id(r);
    lr_http_req_free(r);
    lua_settop(L, 1);
    lua_getiuservalue(L, 1, 1);
    if (lua_getiuservalue(L, -1, 1) == LUA_TTABLE) {
        lua_pushnil(L);
        lua_rawseti(L, -2, id);
    }
    return 0;
}

static int req_method(lua_State *L) { return push_str(L, lr_http_req_method(check_req(L)->r)); }
static int req_target(lua_State *L) { return push_str(L, lr_http_req_target(check_req(L)->r)); }
static int req_body(lua_State *L) { return push_str(L, lr_http_req_body(check_req(L)->r)); }
static int req_peer(lua_State *L) { return push_str(L, lr_http_req_peer(check_req(L)->r)); }

static int req_gone(lua_State *L)
{
    lua_pushboolean(L, lr_http_req_gone(check_req(L)->r));
    return 1;
}

static int req_drop_body(lua_State *L)
{
    lr_http_req_drop_body(check_req(L)->r);
    return 0;
}

static void push_lower(lua_State *L, lr_str s)
{
    luaL_Buffer b;
    char *p = luaL_buffinitsize(L, &b, s.n);
    for (size_t i = 0; i < s.n; i++) p[i] = (char)tolower((unsigned char)s.s[i]);
    luaL_pushresultsize(&b, s.n);
}

/* r:headers() -> { name in lower case = value }; values of a name that comes more than once are joined by ", ". And the
 * number of lines of each such name */
static int req_headers(lua_State *L)
{
    req_ud *u = check_req(L);
    lr_str name, value;
    lua_newtable(L);
    int all = lua_gettop(L);
    lua_newtable(L);
    for (size_t i = 0; lr_http_req_header(u->r, i, &name, &value); i++) {
        lua_settop(L, all + 1);
        push_lower(L, name);
        lua_pushvalue(L, -1);
        if (lua_rawget(L, all) == LUA_TNIL) {
            lua_pop(L, 1);
            push_str(L, value);
            lua_rawset(L, all);
            continue;
        }
        lua_pushliteral(L, ", ");
        push_str(L, value);
        lua_concat(L, 3);
        lua_pushvalue(L, -2);
        lua_insert(L, -2);
        lua_rawset(L, all);
        lua_pushvalue(L, -1);
        lua_Integer n = lua_rawget(L, all + 1) == LUA_TNIL ? 1 : lua_tointeger(L, -1);
        lua_pop(L, 1);
        lua_pushinteger(L, n + 1);
        lua_rawset(L, all + 1);
    }
    lua_settop(L, all + 1);
    return 2;
}

#define MAX_HEADERS 64

/* Reads { name = value, ... } at idx; the strings stay on the stack. */
static size_t read_headers(lua_State *L, int idx, lr_http_header *out)
{
    size_t n = 0;
    if (lua_isnoneornil(L, idx)) return 0;
    luaL_checktype(L, idx, LUA_TTABLE);
    luaL_checkstack(L, 2 * MAX_HEADERS + 8, NULL);
    lua_pushnil(L);
    while (lua_next(L, idx)) {
        if (n == MAX_HEADERS) luaL_error(L, "more than %d headers", MAX_HEADERS);
        if (lua_type(L, -2) != LUA_TSTRING) luaL_error(L, "names of headers are strings");
        if (!lua_isstring(L, -1)) luaL_error(L, "header %s: text expected", lua_tostring(L, -2));
        const char *name = lua_tostring(L, -2), *value = luaL_tolstring(L, -1, NULL);
        out[n++] = (lr_http_header){name, value};
        lua_remove(L, -2);    /* name, text */
        lua_pushvalue(L, -2); /* the key again, for lua_next */
    }
    return n;
}

/* r:answer(status, headers, body) -> true; nil, text, code */
static int req_answer(lua_State *L)
{
    req_ud *u = check_req(L);
    int status = (int)luaL_checkinteger(L, 2);
    lr_str body;
    body.s = luaL_optlstring(L, 4, "", &body.n);
    lr_http_header headers[MAX_HEADERS];
    lr_error err;
    size_t n = read_headers(L, 3, headers);
    return done(L, lr_http_answer(u->r, status, headers, n, body, &err), &err);
}

/* r:begin(status, headers) -> true; nil, text, code */
static int req_begin(lua_State *L)
{
    req_ud *u = check_req(L);
    int status = (int)luaL_checkinteger(L, 2);
    lr_http_header headers[MAX_HEADERS];
    lr_error err;
    size_t n = read_headers(L, 3, headers);
    return done(L, lr_http_begin(u->r, status, headers, n, &err), &err);
}

/* r:write(text [, from]) -> bytes taken of text from that byte on (0 = all); fewer than there are: wait for room. nil,
 * text, code */
static int req_write(lua_State *L)
{
    req_ud *u = check_req(L);
    size_t n, taken;
    const char *s = luaL_checklstring(L, 2, &n);
    lua_Integer from = luaL_optinteger(L, 3, 0);
    luaL_argcheck(L, from >= 0 && (size_t)from <= n, 3, "outside of the text");
    lr_error err;
    if (lr_http_write(u->r, s + from, n - (size_t)from, &taken, &err)) return lr_lua_fail(L, &err);
    lua_pushinteger(L, (lua_Integer)taken);
    return 1;
}

static int req_finish(lua_State *L)
{
    lr_http_end(check_req(L)->r);
    return 0;
}

/* same_secret(a, b): whether two texts are equal, in a time that depends on the length of b alone */
static int core_same_secret(lua_State *L)
{
    size_t na, nb;
    const char *a = luaL_checklstring(L, 1, &na), *b = luaL_checklstring(L, 2, &nb);
    volatile unsigned char diff = na != nb;
    for (size_t i = 0; i < nb; i++) diff |= (unsigned char)(b[i] ^ (na ? a[i % na] : 0));
    lua_pushboolean(L, diff == 0);
    return 1;
}

void lr_lua_open_http(lua_State *L)
{
    static const luaL_Reg listener[] = {{"port", http_port},   {"host", http_host},   {"fd", http_fd},
                                        {"poll", http_poll},   {"next", http_next},   {"drain", http_drain},
                                        {"stats", http_stats}, {"close", http_close}, {NULL, NULL}};
    static const luaL_Reg request[] = {{"method", req_method},
                                       {"target", req_target},
                                       {"body", req_body},
                                       {"peer", req_peer},
                                       {"gone", req_gone},
                                       {"headers", req_headers},
                                       {"answer", req_answer},
                                       {"begin", req_begin},
                                       {"write", req_write},
                                       {"finish", req_finish},
                                       {"drop_body", req_drop_body},
                                       {"close", req_close},
                                       {NULL, NULL}};
    static const luaL_Reg fns[] = {{"http_new", core_http_new}, {"same_secret", core_same_secret}, {NULL, NULL}};
    lr_lua_class(L, LISTENER, listener, http_close);
    lr_lua_class(L, REQUEST, request, req_close);
    luaL_setfuncs(L, fns, 0);
}
