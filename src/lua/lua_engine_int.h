/* lua_engine_int.h - what the bindings of engine, sequences, requests and policies share. */
#ifndef LR_LUA_LUA_ENGINE_INT_H
#define LR_LUA_LUA_ENGINE_INT_H
#include "engine/engine.h"
#include "lua/lua_int.h"
#include "model/graph.h"

#define LR_LUA_ENGINE  "llmrun.engine"
#define LR_LUA_SEQ     "llmrun.seq"
#define LR_LUA_REQUEST "llmrun.request"

struct lr_lua_policy;

/* User values: 1 the model's userdata, 2 the policy's, 3 the draft model's. */
typedef struct lr_engine_ud {
    lr_engine *e;                 /* NULL = closed */
    uint64_t stamp;               /* grows when a step begins and at the close: logits of before are gone */
    struct lr_lua_policy *policy; /* NULL = the built-in rule */
    bool stepping;
} lr_engine_ud;

/* User values: 1 the engine's userdata, 2 its tag if that is a table. */
typedef struct lr_seq_ud {
    lr_seq *s; /* NULL = closed; dead too when eng->e is NULL */
    lr_engine_ud *eng;
} lr_seq_ud;

/* User values: 1 the engine's userdata, 2 the sequence's, 3 its tag if that is a table. */
typedef struct lr_request_ud {
    lr_request *r; /* NULL = closed; dead too when eng->e is NULL */
    lr_engine_ud *eng;
} lr_request_ud;

lr_engine_ud *lr_lua_check_engine(lua_State *L, int idx);
lr_seq_ud *lr_lua_check_seq(lua_State *L, int idx);
/* The adapter of an option, NULL if it is not there (lua_adapter.c). Borrowed. */
struct lr_adapter *lr_lua_opt_adapter(lua_State *L, int idx, const char *field);
/* The method engine:request, and the metatable (lua_request.c). */
int lr_lua_engine_request(lua_State *L);
void lr_lua_open_request(lua_State *L);
/* A field of a request as policies see it (policy.lua); nil if there is none of that name. prefix: tokens that the
 * cache holds; head: a number that prompts with the same first n tokens share (lua_policy_view.c). */
void lr_lua_push_request_field(lua_State *L, const lr_request *r, const char *name);
lua_Integer lr_lua_request_prefix(const lr_request *r);
lua_Integer lr_lua_request_head(const lr_request *r, lua_Integer n);
/* The method engine:set_policy (lua_policy.c). */
int lr_lua_engine_set_policy(lua_State *L);
/* Whether a hook of its policy runs now. */
bool lr_lua_in_hook(const lr_engine_ud *);
/* After a step of the engine at idx: a policy that failed too often goes. */
void lr_lua_settle_policy(lua_State *L, int idx);

#endif
