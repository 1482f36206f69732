/* lua_policy_int.h - what the two files that bind policies share: lua_policy.c (installing one, the hooks) and
 * lua_policy_view.c (the step, requests and leaves as hooks see them).
 *
 * Hooks run on a Lua thread of the policy's own. What they need lies in one table, the "env", which the policy's
 * userdata holds and the engine's userdata that one; C finds it through a table with weak values, so that a policy and
 * an engine that refer to each other can be collected.
 */
#ifndef LR_LUA_LUA_POLICY_INT_H
#define LR_LUA_LUA_POLICY_INT_H
#include "engine/policy.h"
#include "lua/lua_engine_int.h"

enum { HOOK_ADMIT, HOOK_SCHEDULE, HOOK_PREEMPT, HOOK_EVICT, HOOK_TOKEN, HOOK_FINISH, HOOK_DRAFT, N_HOOKS };
extern const char *const lr_lua_hook_names[N_HOOKS];

/* Places in the env. */
enum {
    ENV_SELF = 1, /* the policy, first argument of every hook */
    ENV_THREAD,
    ENV_STEP,
    ENV_LEAF,
    ENV_NEED,     /* third argument of preempt */
    ENV_REQUESTS, /* lr_policy_req.ref -> userdata */
    ENV_RUNNING,  /* lists, filled when they are first asked for in a step */
    ENV_WAITING,
    ENV_FAILED, /* function(hook, message, failures, set_aside) */
    ENV_HOOKS   /* ENV_HOOKS + HOOK_...: the functions */
};

struct lr_lua_policy;

/* A request as hooks see it; user value 1: what the policy keeps with it (a table, made when needed). */
#define POLICY_REQ "llmrun.policy_request"
typedef struct lr_policy_req {
    uint32_t magic;
    int ref;
    lr_request *r; /* NULL = it has ended, or the policy is gone */
    uint64_t id;
    struct lr_lua_policy *p;
    struct lr_policy_req *prev, *next;
} lr_policy_req;

/* The step or a leaf as hooks see it; user value 1: the env. */
#define POLICY_STEP "llmrun.policy_step"
#define POLICY_LEAF "llmrun.policy_leaf"
typedef struct lr_policy_view {
    uint32_t magic;
    struct lr_lua_policy *p; /* NULL = the policy is gone */
} lr_policy_view;

typedef struct lr_lua_policy {
    lr_engine_ud *eng;
    lr_engine *e;
    lua_State *L; /* the thread that hooks run on */
    lr_policy_view *step_view, *leaf_view;
    lr_step *step;           /* in the hooks schedule and preempt; else NULL */
    const lr_kv_leaf *leaf;  /* in evict */
    int phase;               /* the hook that runs; N_HOOKS = none */
    lr_policy_req *requests; /* those that Lua has seen and that have not ended */
    uint64_t listed;         /* generation of the step whose lists are filled */
    bool has_running, has_waiting;
    int n_running, n_waiting; /* entries of the lists */
    lr_lua_limits limits;
    int max_failures; /* of a hook in a row */
    bool set_aside, steady;
    struct {
        bool there, logged;
        int in_a_row;
        uint64_t failures;
    } hook[N_HOOKS];
    char name[64];
} lr_lua_policy;

/* Pushes the policy's env; nil if it is being collected. */
void lr_policy_push_env(lua_State *L, const lr_lua_policy *p);
/* Pushes the userdata of a request, making it the first time. env: its index. May raise. */
void lr_policy_push_request(lua_State *L, lr_lua_policy *p, int env, lr_request *r);
/* The request has ended: its userdata stays, but is dead. Raises nothing. */
void lr_policy_forget(lr_lua_policy *p, lr_policy_req *q);
/* The request at idx; raises if it is none. q->r may be NULL. */
lr_policy_req *lr_policy_check_request(lua_State *L, int idx);
/* The way of preempting at idx: "recompute", "swap" or nil (as the engine is configured). */
lr_preempt_how lr_policy_check_how(lua_State *L, int idx, const lr_lua_policy *p);
/* Pushes a view of the class, with the env at index env. */
lr_policy_view *lr_policy_push_view(lua_State *L, lr_lua_policy *p, const char *class_name, int env);
/* Registers the classes, and leaves in the table on the stack's top what Lua may add methods to. */
void lr_policy_open_views(lua_State *L);

#endif
