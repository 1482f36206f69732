/* lua_int.h - what the binding files share.
 *
 * One file binds one module: lua_<module>.c has `void lr_lua_open_<module>(lua_State *L)`, which adds its functions to
 * the table on the top of the stack (it becomes require "llmrun.core") and leaves the stack as it was. A new file is
 * added to the list in lua_state.c. Bindings are thin: check arguments, call, push; what a user sees is made of them
 * in lua/llmrun.
 *
 * Errors: misuse raises (luaL_argerror and friends); what can go wrong in good use returns nil, text, code name
 * (lr_lua_fail). Userdata is created first, empty and with its metatable, then the resource is acquired into it; __gc
 * and __close are one idempotent function. Nothing that needs freeing is held across a call that may raise.
 */
#ifndef LR_LUA_LUA_INT_H
#define LR_LUA_LUA_INT_H
#include "base/error.h"
#include <lauxlib.h>
#include <lua.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

struct lr_model;
struct lr_vocab;

/* A model as Lua holds it, until an engine takes it over. User value 1 keeps what the model needs (its file). */
#define LR_LUA_MODEL "llmrun.model"
typedef struct lr_lua_model {
    struct lr_model *model; /* NULL: not loaded yet, closed, or taken by an engine */
} lr_lua_model;
/* Pushes an empty model userdata with its metatable (lua_model.c). */
lr_lua_model *lr_lua_new_model(lua_State *L);
/* The model at idx; raises if it is none or closed. */
struct lr_model *lr_lua_check_model(lua_State *L, int idx);
/* Pushes a table of what a model is: see lua_model.c. */
void lr_lua_push_model_info(lua_State *L, const struct lr_model *m);

/* The GGUF file at idx; raises if it is none or closed (lua_graph.c). */
struct lr_gguf;
struct lr_gguf *lr_lua_check_gguf(lua_State *L, int idx);

/* A vocabulary as Lua holds it: one reference. */
#define LR_LUA_VOCAB "llmrun.vocab"
/* Pushes a userdata that takes a reference of its own. */
void lr_lua_push_vocab(lua_State *L, struct lr_vocab *v);
struct lr_vocab *lr_lua_check_vocab(lua_State *L, int idx);
/* The options { special =, bos = } at idx as flags of lr_tokenize. */
unsigned lr_lua_tok_flags(lua_State *L, int idx);

/* Rows of logits that Lua keeps (lua_rows.c): those of the userdata at idx, and how many there are. Raises if it is
 * none, or made for a vocabulary of another size. */
float *lr_lua_check_rows(lua_State *L, int idx, int n_vocab, size_t *n_rows);

/* Pushes nil, err->text, lr_error_name(err->code) and returns 3. */
int lr_lua_fail(lua_State *L, const lr_error *err);
/* Raises err->text with the position of the Lua caller. */
int lr_lua_raise(lua_State *L, const lr_error *err);

/* Makes a metatable of the name with methods (as __index) and, if not NULL, close as __gc and __close. Leaves nothing
 * on the stack. */
void lr_lua_class(lua_State *L, const char *name, const luaL_Reg *methods, lua_CFunction close);
/* As luaL_checkudata, and the pointer at the start of the userdata must not be NULL: "<what> is closed" otherwise. */
void *lr_lua_check_open(lua_State *L, int idx, const char *name, const char *what);

/* A path at idx: as luaL_checkstring, and raises if it holds a zero byte, before which the system would end it. */
const char *lr_lua_check_path(lua_State *L, int idx);

/* Token ids from the list at idx, into a new userdata on the top of the stack (so that an error frees it). Each must be
 * an integer in 0..n_vocab-1; the error names the place in the list. */
const int32_t *lr_lua_check_ids(lua_State *L, int idx, int64_t n_vocab, size_t *n);
/* Pushes a list of n ids. */
void lr_lua_push_ids(lua_State *L, const int32_t *ids, size_t n);

/* Pushes a list of n lengths. */
void lr_lua_push_shape(lua_State *L, const uint64_t *ne, int n);

/* Optional fields of the option table at idx (idx may be nil or none: all default). Wrong types raise, naming the
 * field. */
lua_Integer lr_lua_opt_int(lua_State *L, int idx, const char *field, lua_Integer def);
int lr_lua_opt_i32(lua_State *L, int idx, const char *field, int def); /* one that fits into 32 bits */
lua_Number lr_lua_opt_num(lua_State *L, int idx, const char *field, lua_Number def);
bool lr_lua_opt_bool(lua_State *L, int idx, const char *field, bool def);
/* The string stays on the table; valid while the table holds it. NULL by default. */
const char *lr_lua_opt_str(lua_State *L, int idx, const char *field, const char *def);

/* Calls the function below its n_args arguments with a traceback handler; the one door from C into Lua outside of
 * coroutines. 0 with n_results results on the stack, or LR_ESCRIPT with err filled (first line: the error; the rest the
 * traceback, cut to fit) and nothing on the stack. */
int lr_lua_call(lua_State *L, int n_args, int n_results, lr_error *err);
/* Message handler: the error value as a text with a traceback. */
int lr_lua_traceback(lua_State *L);

/* What a hook may take; see lua_guard.c. */
typedef struct lr_lua_limits {
    double seconds; /* processor time; 0 = no limit. Inside another limited call that one's counts */
    size_t bytes;   /* growth of the Lua heap; 0 = no limit */
    double hard;    /* if > 0: what takes longer than `seconds` is preempted (lr_lua_preempt) where it can yield, and
                       stopped when this much is over */
} lr_lua_limits;
/* As lr_lua_call, with limits: LR_ESCRIPT for an error, LR_ELIMIT for what went over, LR_ENOMEM; LR_EIO: nothing was
 * called, as nobody could watch over its time. */
int lr_lua_call_limited(lua_State *L, int n_args, int n_results, const lr_lua_limits *, lr_error *err);
/* The same, but leaves the whole message (a string, if it could be made) on the stack when it fails. */
int lr_lua_pcall_limited(lua_State *L, int n_args, int n_results, const lr_lua_limits *, lr_error *err);
/* What a function of a trusted program may take when it is called inside a step of the engine, where it keeps all
 * others waiting: a stage of a sampler, the `next` of a scripted model. */
extern const lr_lua_limits lr_lua_step_limits;
/* A time limit hangs over what runs now; its time is over. */
bool lr_lua_limited(void);
bool lr_lua_is_late(void);
/* For loops in C: raises if the time of the limited call is over. */
void lr_lua_check_time(lua_State *L);
/* For a thread made before the limited call that resumes it: where signals are held back (the thread sanitizer). */
void lr_lua_watch_early(lua_State *L);
/* Nothing is stopped for its time while this is on: for reporting what was stopped. */
void lr_lua_hold_time(bool on);

/* core.close, a function of Lua's: the thread at index 1 is closed, under the limits of the call that closes it. */
int lr_lua_close_coroutine(lua_State *L);
/* The thread runs a finalizer (lua_bounded.c). */
bool lr_lua_is_finalizer(const lua_State *L);
/* A new table with weak keys ("k") or values ("v") under key in the registry. */
void lr_lua_weak_table(lua_State *L, const void *key, const char *mode);
/* The metatable of a class of C's, under this name in the registry, can't be given another finalizer. */
void lr_lua_hide_finalizer(lua_State *L, const char *name);

void lr_lua_open_guard(lua_State *L);
void lr_lua_open_coroutine(lua_State *L);
void lr_lua_open_sys(lua_State *L);
void lr_lua_open_cpu(lua_State *L);
void lr_lua_open_model(lua_State *L);
void lr_lua_open_graph(lua_State *L);
void lr_lua_open_adapter(lua_State *L);
void lr_lua_open_aside(lua_State *L);
void lr_lua_open_lookup(lua_State *L);
void lr_lua_open_writer(lua_State *L);
void lr_lua_open_rows(lua_State *L);
void lr_lua_open_text(lua_State *L);
void lr_lua_open_folder(lua_State *L);
void lr_lua_open_engine(lua_State *L);
void lr_lua_open_logits(lua_State *L);
void lr_lua_open_sample(lua_State *L);
void lr_lua_open_scripted(lua_State *L);
void lr_lua_open_policy(lua_State *L);
void lr_lua_open_http(lua_State *L);
void lr_lua_open_json(lua_State *L);
void lr_lua_open_grammar(lua_State *L);
void lr_lua_open_net(lua_State *L);
void lr_lua_open_newfile(lua_State *L);
void lr_lua_open_look(lua_State *L);
void lr_lua_open_curl(lua_State *L);
void lr_lua_open_exec(lua_State *L);
void lr_lua_open_pattern(lua_State *L);
void lr_lua_open_bounded(lua_State *L);
void lr_lua_open_sandbox(lua_State *L);
void lr_lua_open_spec(lua_State *L);
void lr_lua_open_dist(lua_State *L);
void lr_lua_open_simulate(lua_State *L);

/* Pushes a table of find, match, gmatch, gsub, each bounded to so many steps a call (lua_pattern.c). */
void lr_lua_push_patterns(lua_State *L, lua_Integer steps);

/* The folder of safetensors at idx, NULL if the value is none. */
struct lr_folder;
struct lr_folder *lr_lua_to_folder(lua_State *L, int idx);

/* ---- logits ---- */

struct lr_logits;
/* A view of logits: userdata that says "stale view" once what it shows is gone. Three kinds: of a row that the engine
 * owns until its next step, of a row inside a sampler callback, and of memory of its own (a copy). */
#define LR_LUA_LOGITS "llmrun.logits"
/* A view of x (n) that lives while *owner is not NULL and *stamp == its value now; owner and stamp lie in userdata that
 * user value 1 (the value at the stack's top, popped) keeps alive. */
void lr_lua_push_row(lua_State *L, float *x, int n, void *const *owner, const uint64_t *stamp);
/* A view without a row, to be pointed at one with lr_lua_point_view; NULL makes it stale. */
void lr_lua_push_view(lua_State *L);
void lr_lua_point_view(lua_State *L, int idx, struct lr_logits *l);
/* The logits at idx; raises if the view is stale or none. */
struct lr_logits *lr_lua_check_logits(lua_State *L, int idx);

/* ---- tags ---- */

/* A tag as the engine keeps it: an integer stands for itself (its sign bit must be clear), a table for an id of its
 * own. 0 for nil. The table is not kept alive: when it is gone, so is what the id stands for. Raises for other types.
 */
uint64_t lr_lua_tag(lua_State *L, int idx);
/* The option of that name at idx. */
uint64_t lr_lua_opt_tag(lua_State *L, int idx, const char *field);
/* Pushes the table or integer, nil for 0 or a table that is gone. */
void lr_lua_push_tag(lua_State *L, uint64_t tag);
/* If the option table at idx has a table as that field, it becomes user value n of the userdata at ud. */
void lr_lua_keep_tag(lua_State *L, int idx, const char *field, int ud, int n);

/* ---- samplers ---- */

struct lr_sampler;
/* The sampler of the list of stages at idx (see lua_sample.c for their form), for a vocabulary of n_vocab. Raises on
 * misuse. The result is the caller's. */
struct lr_sampler *lr_lua_make_sampler(lua_State *L, int idx, uint64_t seed, int n_vocab);

/* ---- steps ---- */

/* The state that runs the engine's step now, for callbacks; NULL outside of a step. */
lua_State *lr_lua_step_state(void);
/* Before and after a step: returns what to give back. */
lua_State *lr_lua_enter_step(lua_State *L);
void lr_lua_leave_step(lua_State *before);

/* The coroutines that are being resumed, innermost first, on the C stack of those who resume them. enter and leave go
 * round each resume; signal handlers of the same thread may walk the list at any time. */
typedef struct lr_lua_frame {
    lua_State *L;
    struct lr_lua_frame *up;
} lr_lua_frame;
void lr_lua_enter(lr_lua_frame *f, lua_State *L);
void lr_lua_leave(const lr_lua_frame *f);
/* The innermost; NULL: none, as far as is known. */
const lr_lua_frame *lr_lua_running(void);

/* In a hook for a count or a line, on a thread that can yield: parks it, so that whoever steps it gets control. */
void lr_lua_preempt(lua_State *L);
/* Whether the thread was preempted; it is as any other afterwards. */
bool lr_lua_take_preempted(lua_State *co);

enum { LR_LUA_SAME_SIGNAL_NS = 100000000 }; /* what follows within is the same signal */
/* Ctrl-C was pressed and nobody has taken note yet. */
bool lr_lua_interrupted(void);
/* Readable from then on: what sleeps looks at it too. -1: it can't be had (errno). */
int lr_lua_interrupt_fd(void);

#endif
