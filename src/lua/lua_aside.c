/* lua_aside.c - cuts long texts into tokens aside: on a thread of its own, which is there while there are such texts.
 *
 * A text of 2 MiB takes 0.1 s and more, for which the engine's thread, that of Lua, would halt all others. It makes a
 * job, waits for the job's descriptor in the run loop (lua/llmrun/tokens.lua), and takes the ids. The thread works
 * through the queue, oldest first; both meet under one lock. A job that is dropped leaves the queue, or is freed by the
 * thread if that is at it. Where no thread can be started, the caller does the work.
 */
#include "base/mem.h"
#include "base/thread.h"
#include "lua/lua_int.h"
#include "text/text.h"
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define ASIDE "llmrun.aside"

typedef struct job {
    lr_vocab *v;
    char *text;
    size_t n;
    unsigned flags;
    int fd; /* readable once it is done */
    int rc;
    int32_t *ids;
    size_t n_ids;
    lr_error err;
    enum { JOB_WAITING, JOB_RUNNING, JOB_DONE } state;
    bool dropped; /* the thread frees it */
    struct job *next;
} job;

static struct {
    pthread_mutex_t lock;
    job *first;
    bool works; /* the thread is there */
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void job_free(job *j)
{
    lr_vocab_unref(j->v);
    lr_free(j->text);
    lr_free(j->ids);
    if (j->fd >= 0) close(j->fd);
    lr_free(j);
}

static void *work(void *unused)
{
    pthread_mutex_lock(&queue.lock);
    for (job *j; (j = queue.first);) {
        queue.first = j->next;
        j->state = JOB_RUNNING;
        pthread_mutex_unlock(&queue.lock);
        j->rc = lr_tokenize(j->v, j->text, j->n, j->flags, &j->ids, &j->n_ids, &j->err);
        pthread_mutex_lock(&queue.lock);
        j->state = JOB_DONE;
        if (j->dropped)
            job_free(j);
        else
            (void)!write(j->fd, &(uint64_t){1}, sizeof(uint64_t)); /* can't fail: the counter was 0 */
    }
    queue.works = false;
    pthread_mutex_unlock(&queue.lock);
    return unused;
}

static void enqueue(job *j)
{
    pthread_mutex_lock(&queue.lock);
    job **at = &queue.first;
    while (*at) at = &(*at)->next;
    *at = j;
    bool start = !queue.works;
    queue.works = true;
    pthread_mutex_unlock(&queue.lock);
    if (start && lr_thread_aside(work, NULL)) work(NULL);
}

static int job_close(lua_State *L)
{
    job **u = luaL_checkudata(L, 1, ASIDE), *j = *u;
    *u = NULL;
    if (!j) return 0;
    pthread_mutex_lock(&queue.lock);
    for (job **at = &queue.first; *at; at = &(*at)->next) {
        if (*at != j) continue;
        *at = j->next;
        break;
    }
    bool busy = j->state == JOB_RUNNING;
    j->dropped = true;
    pthread_mutex_unlock(&queue.lock);
    if (!busy) job_free(j);
    return 0;
}

/* aside(vocab, text, {special=, bos=}) -> a job; nil, text, code */
static int core_aside(lua_State *L)
{
    lr_vocab *v = lr_lua_check_vocab(L, 1);
    size_t n;
    const char *text = luaL_checklstring(L, 2, &n);
    unsigned flags = lr_lua_tok_flags(L, 3);
    lr_error err;
    job **u = lua_newuserdatauv(L, sizeof *u, 0);
    *u = NULL;
    luaL_setmetatable(L, ASIDE);
    job *j = lr_calloc(1, sizeof *j);
    if (j) {
        *j = (job){.v = lr_vocab_ref(v), .n = n, .flags = flags, .fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
        j->text = lr_memdup(text, n);
    }
    if (!j || j->fd < 0 || !j->text) {
        if (j && j->fd < 0)
            lr_fail(&err, LR_EIO, "eventfd: %s", strerror(errno));
        else
            lr_fail(&err, LR_ENOMEM, "no memory to tokenize %zu bytes", n);
        if (j) job_free(j);
        return lr_lua_fail(L, &err);
    }
    *u = j;
    enqueue(j);
    return 1;
}

static job *check_job(lua_State *L) { return *(job **)lr_lua_check_open(L, 1, ASIDE, "the work on a text"); }

/* job:fd() -> a descriptor that can be read once it is done */
static int job_fd(lua_State *L)
{
    lua_pushinteger(L, check_job(L)->fd);
    return 1;
}

/* job:result() -> ids; nil, text, code; nothing while it is not done. Once. */
static int job_result(lua_State *L)
{
    job *j = check_job(L);
    pthread_mutex_lock(&queue.lock);
    bool done = j->state == JOB_DONE;
    pthread_mutex_unlock(&queue.lock);
    if (!done) return 0;
    if (j->rc) return lr_lua_fail(L, &j->err);
    lr_lua_push_ids(L, j->ids, j->n_ids);
    return 1;
}

void lr_lua_open_aside(lua_State *L)
{
    static const luaL_Reg methods[] = {{"fd", job_fd}, {"result", job_result}, {"close", job_close}, {NULL, NULL}};
    lr_lua_class(L, ASIDE, methods, job_close);
    lua_pushcfunction(L, core_aside);
    lua_setfield(L, -2, "aside");
}
