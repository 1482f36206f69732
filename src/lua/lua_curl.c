/* lua_curl.c - an HTTP client: libcurl's multi interface, driven by the run loop; lua/llmrun/http.lua makes llm.http of
 * it.
 *
 * libcurl says which descriptors it wants watched and when it wants to be called again; both are noted here, and Lua
 * asks for what changed (changes). Nothing waits. Only http and https are spoken, also after a redirect. The library is
 * global: lr_lua_open_curl sets nothing up; the first client does.
 */
#include "base/mem.h"
#include "lua/lua_int.h"
#include <curl/curl.h>
#include <string.h>

#define CLIENT "llmrun.http_client"

enum { MAX_HEAD = 256 * 1024 };

typedef struct buffer {
    char *p;
    size_t n, cap, max;
    bool over; /* more came than max */
} buffer;

typedef struct transfer {
    struct transfer *next;
    lua_Integer id;
    CURL *easy;
    struct curl_slist *headers;
    buffer head, body;
    size_t taken; /* bytes of the body that Lua has */
    char err[CURL_ERROR_SIZE];
} transfer;

typedef struct change {
    curl_socket_t fd;
    int what; /* CURL_POLL_... */
} change;

typedef struct client {
    CURLM *multi; /* NULL = closed */
    transfer *list;
    lua_Integer next_id;
    change *changes;
    size_t n_changes, cap_changes;
    long timeout_ms; /* -1 = none */
    bool new_timeout;
} client;

/* ---- what libcurl calls ---- */

static bool buffer_add(buffer *b, const char *p, size_t n)
{
    if (n > b->max - b->n) {
        b->over = true;
        return false;
    }
    if (b->n + n > b->cap) {
        size_t cap = b->cap ? b->cap * 2 : 4096;
        if (cap < b->n + n) cap = b->n + n;
        char *q = lr_realloc(b->p, cap);
        if (!q) return false;
        b->p = q;
        b->cap = cap;
    }
    memcpy(b->p + b->n, p, n);
    b->n += n;
    return true;
}

static size_t on_body(char *p, size_t size, size_t n, void *user)
{
    transfer *t = user;
    return buffer_add(&t->body, p, size * n) ? size * n : CURL_WRITEFUNC_ERROR;
}

/* The headers of each response; those before the last one (redirects, 100 Continue) are forgotten. */
static size_t on_head(char *p, size_t size, size_t n, void *user)
{
    transfer *t = user;
    if (n > 5 && memcmp(p, "HTTP/", 5) == 0) t->head.n = 0;
    return buffer_add(&t->head, p, size * n) ? size * n : 0;
}

static int on_socket(CURL *easy, curl_socket_t fd, int what, void *user, void *unused)
{
    client *c = user;
    (void)easy;
    (void)unused;
    if (c->n_changes == c->cap_changes) {
        size_t cap = c->cap_changes ? c->cap_changes * 2 : 16;
        change *p = lr_reallocarray(c->changes, cap, sizeof *p);
        if (!p) return -1;
        c->changes = p;
        c->cap_changes = cap;
    }
    c->changes[c->n_changes++] = (change){fd, what};
    return 0;
}

static int on_timer(CURLM *multi, long ms, void *user)
{
    client *c = user;
    (void)multi;
    c->timeout_ms = ms;
    c->new_timeout = true;
    return 0;
}

/* ---- clients ---- */

static void free_transfer(client *c, transfer *t)
{
    for (transfer **p = &c->list; *p; p = &(*p)->next)
        if (*p == t) {
            *p = t->next;
            break;
        }
    if (t->easy) {
        curl_multi_remove_handle(c->multi, t->easy);
        curl_easy_cleanup(t->easy);
    }
    curl_slist_free_all(t->headers);
    lr_free(t->head.p);
    lr_free(t->body.p);
    lr_free(t);
}

static client *check_client(lua_State *L) { return lr_lua_check_open(L, 1, CLIENT, "HTTP client"); }

static int client_close(lua_State *L)
{
    client *c = luaL_checkudata(L, 1, CLIENT);
    if (!c->multi) return 0;
    while (c->list) free_transfer(c, c->list);
    curl_multi_setopt(c->multi, CURLMOPT_SOCKETFUNCTION, NULL);
    curl_multi_cleanup(c->multi);
    lr_free(c->changes);
    *c = (client){0};
    return 0;
}

/* http_client() -> client; nil, text, code */
static int core_http_client(lua_State *L)
{
    static bool ready;
    if (!ready && curl_global_init(CURL_GLOBAL_DEFAULT) == 0) ready = true;
    client *c = lua_newuserdatauv(L, sizeof *c, 0);
    *c = (client){.timeout_ms = -1};
    luaL_setmetatable(L, CLIENT);
    c->multi = ready ? curl_multi_init() : NULL;
    if (!c->multi) {
        lr_error err;
        lr_fail(&err, LR_ENOMEM, "libcurl can't be set up");
        return lr_lua_fail(L, &err);
    }
    curl_multi_setopt(c->multi, CURLMOPT_SOCKETFUNCTION, on_socket);
    curl_multi_setopt(c->multi, CURLMOPT_SOCKETDATA, c);
    curl_multi_setopt(c->multi, CURLMOPT_TIMERFUNCTION, on_timer);
    curl_multi_setopt(c->multi, CURLMOPT_TIMERDATA, c);
    return 1;
}

/* ---- transfers ---- */

static bool add_headers(lua_State *L, transfer *t)
{
    if (lua_getfield(L, 2, "headers") != LUA_TTABLE) return lua_pop(L, 1), true;
    for (lua_Integer i = 1, n = luaL_len(L, -1); i <= n; i++) {
        lua_rawgeti(L, -1, i);
        struct curl_slist *s = lua_isstring(L, -1) ? curl_slist_append(t->headers, lua_tostring(L, -1)) : NULL;
        lua_pop(L, 1);
        if (!s) return lua_pop(L, 1), false;
        t->headers = s;
    }
    lua_pop(L, 1);
    return true;
}

static long milliseconds(lua_State *L, const char *field, double def)
{
    lua_Number s = lr_lua_opt_num(L, 2, field, def);
    return s < 0.001 ? 1 : s > 1e6 ? 1000000000L : (long)(s * 1000);
}

static CURLcode set_body(lua_State *L, CURL *e, const char *method)
{
    size_t n = 0;
    CURLcode rc = CURLE_OK;
    lua_getfield(L, 2, "body");
    const char *body = lua_tolstring(L, -1, &n);
    if (body) {
        rc = curl_easy_setopt(e, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)n);
        if (!rc) rc = curl_easy_setopt(e, CURLOPT_COPYPOSTFIELDS, body);
    }
    lua_pop(L, 1);
    if (!rc && strcmp(method, "HEAD") == 0) return curl_easy_setopt(e, CURLOPT_NOBODY, 1L);
    if (!rc && !(strcmp(method, "GET") == 0 && !body)) rc = curl_easy_setopt(e, CURLOPT_CUSTOMREQUEST, method);
    return rc;
}

static CURLcode set_options(lua_State *L, transfer *t)
{
    CURL *e = t->easy;
    CURLcode rc = CURLE_OK;
#define SET(option, value)                                                                                             \
    if (!rc) rc = curl_easy_setopt(e, option, value)
    SET(CURLOPT_URL, lr_lua_opt_str(L, 2, "url", ""));
    SET(CURLOPT_PROTOCOLS_STR, "http,https");
    SET(CURLOPT_REDIR_PROTOCOLS_STR, "http,https");
    SET(CURLOPT_FOLLOWLOCATION, 1L);
    SET(CURLOPT_MAXREDIRS, (long)lr_lua_opt_int(L, 2, "redirects", 5));
    SET(CURLOPT_NOSIGNAL, 1L);
#if LIBCURL_VERSION_NUM >= 0x075700
    SET(CURLOPT_QUICK_EXIT, 1L); /* its end does not wait for a name server; the thread that looks up ends by itself */
#endif
    SET(CURLOPT_ERRORBUFFER, t->err);
    SET(CURLOPT_WRITEFUNCTION, on_body);
    SET(CURLOPT_WRITEDATA, t);
    SET(CURLOPT_HEADERFUNCTION, on_head);
    SET(CURLOPT_HEADERDATA, t);
    SET(CURLOPT_ACCEPT_ENCODING, "");
    SET(CURLOPT_USERAGENT, "llmrun");
    SET(CURLOPT_TIMEOUT_MS, milliseconds(L, "timeout", 30));
    SET(CURLOPT_CONNECTTIMEOUT_MS, milliseconds(L, "connect_timeout", 10));
    SET(CURLOPT_HTTPHEADER, t->headers);
    if (lr_lua_opt_bool(L, 2, "insecure", false)) {
        SET(CURLOPT_SSL_VERIFYPEER, 0L);
        SET(CURLOPT_SSL_VERIFYHOST, 0L);
    }
#undef SET
    return rc ? rc : set_body(L, e, lr_lua_opt_str(L, 2, "method", "GET"));
}

/* c:add{ url, method, headers (list of "Name: value"), body, timeout, connect_timeout, redirects, insecure, max_bytes }
 * -> id; nil, text, code */
static int client_add(lua_State *L)
{
    client *c = check_client(L);
    lr_error err;
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_Integer max = lr_lua_opt_int(L, 2, "max_bytes", 16 << 20);
    transfer *t = lr_calloc(1, sizeof *t);
    if (!t) return luaL_error(L, "not enough memory");
    t->next = c->list;
    c->list = t; /* from now on the client frees it, whatever is raised */
    t->head.max = MAX_HEAD;
    t->body.max = max > 0 ? (size_t)max : 0;
    t->easy = curl_easy_init();
    CURLcode rc = t->easy && add_headers(L, t) ? CURLE_OK : CURLE_OUT_OF_MEMORY;
    if (!rc) rc = set_options(L, t);
    if (!rc && curl_multi_add_handle(c->multi, t->easy) != CURLM_OK) rc = CURLE_OUT_OF_MEMORY;
    if (rc) {
        lr_fail(&err, LR_EINVAL, "%s", t->err[0] ? t->err : curl_easy_strerror(rc));
        free_transfer(c, t);
        return lr_lua_fail(L, &err);
    }
    t->id = ++c->next_id;
    lua_pushinteger(L, t->id);
    return 1;
}

static transfer *find(client *c, lua_Integer id)
{
    transfer *t = c->list;
    while (t && t->id != id) t = t->next;
    return t;
}

/* c:remove(id): ends it, or forgets what it brought */
static int client_remove(lua_State *L)
{
    client *c = check_client(L);
    transfer *t = find(c, luaL_checkinteger(L, 2));
    if (t) free_transfer(c, t);
    return 0;
}

/* c:step([fd]): something happened to the descriptor; without it, the time that changes gave is over */
static int client_step(lua_State *L)
{
    client *c = check_client(L);
    int running;
    curl_socket_t fd = lua_isnoneornil(L, 2) ? CURL_SOCKET_TIMEOUT : (curl_socket_t)luaL_checkinteger(L, 2);
    curl_multi_socket_action(c->multi, fd, 0, &running);
    return 0;
}

/* c:changes() -> list of { fd, "r" | "w" | "rw" | false }, and the seconds until step() is to be called (-1: not at
 * all; nil: as it was) */
static int client_changes(lua_State *L)
{
    static const char *const names[] = {[CURL_POLL_IN] = "r", [CURL_POLL_OUT] = "w", [CURL_POLL_INOUT] = "rw"};
    client *c = check_client(L);
    lua_createtable(L, (int)c->n_changes, 0);
    for (size_t i = 0; i < c->n_changes; i++) {
        const change *g = &c->changes[i];
        lua_createtable(L, 2, 0);
        lua_pushinteger(L, g->fd);
        lua_rawseti(L, -2, 1);
        if (g->what >= CURL_POLL_IN && g->what <= CURL_POLL_INOUT)
            lua_pushstring(L, names[g->what]);
        else
            lua_pushboolean(L, 0);
        lua_rawseti(L, -2, 2);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    c->n_changes = 0;
    if (!c->new_timeout) return 1;
    c->new_timeout = false;
    lua_pushnumber(L, c->timeout_ms < 0 ? -1 : (lua_Number)c->timeout_ms / 1000);
    return 2;
}

/* c:data(id) -> bytes of the body since the last call */
static int client_data(lua_State *L)
{
    client *c = check_client(L);
    transfer *t = find(c, luaL_checkinteger(L, 2));
    if (!t) return luaL_error(L, "no such transfer");
    lua_pushlstring(L, t->body.n > t->taken ? t->body.p + t->taken : "", t->body.n - t->taken);
    t->taken = t->body.n;
    return 1;
}

/* c:head(id) -> the header lines of the last response so far, its status (0: none yet) */
static int client_head(lua_State *L)
{
    client *c = check_client(L);
    transfer *t = find(c, luaL_checkinteger(L, 2));
    long status = 0;
    if (!t) return luaL_error(L, "no such transfer");
    lua_pushlstring(L, t->head.n ? t->head.p : "", t->head.n);
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    lua_pushinteger(L, status);
    return 2;
}

static int code_of(CURLcode rc, const transfer *t)
{
    if (rc == CURLE_OPERATION_TIMEDOUT || t->body.over || t->head.over || rc == CURLE_TOO_MANY_REDIRECTS)
        return LR_ELIMIT;
    if (rc == CURLE_URL_MALFORMAT || rc == CURLE_UNSUPPORTED_PROTOCOL) return LR_EINVAL;
    return rc == CURLE_OUT_OF_MEMORY ? LR_ENOMEM : LR_EIO;
}

/* c:finished() -> id of a transfer that has ended, its URL; or id, nil, text, code; nothing if there is none */
static int client_finished(lua_State *L)
{
    client *c = check_client(L);
    int left;
    CURLMsg *m;
    while ((m = curl_multi_info_read(c->multi, &left))) {
        transfer *t = c->list;
        while (t && t->easy != m->easy_handle) t = t->next;
        if (m->msg != CURLMSG_DONE || !t) continue;
        CURLcode rc = m->data.result;
        lua_pushinteger(L, t->id);
        if (!rc) {
            const char *url = NULL;
            curl_easy_getinfo(t->easy, CURLINFO_EFFECTIVE_URL, &url);
            lua_pushstring(L, url ? url : "");
            return 2;
        }
        lua_pushnil(L);
        if (t->body.over)
            lua_pushfstring(L, "the answer is over the limit of %I bytes", (LUAI_UACINT)t->body.max);
        else
            lua_pushstring(L, t->err[0] ? t->err : curl_easy_strerror(rc));
        lua_pushstring(L, lr_error_name(code_of(rc, t)));
        return 4;
    }
    return 0;
}

void lr_lua_open_curl(lua_State *L)
{
    static const luaL_Reg methods[] = {{"add", client_add},           {"remove", client_remove}, {"step", client_step},
                                       {"changes", client_changes},   {"data", client_data},     {"head", client_head},
                                       {"finished", client_finished}, {"close", client_close},   {NULL, NULL}};
    lr_lua_class(L, CLIENT, methods, client_close);
    lua_pushcfunction(L, core_http_client);
    lua_setfield(L, -2, "http_client");
}
