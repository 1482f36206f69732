/* dist.c - see dist.h: the world of a run, its carrier, its end.
 *
 * The carrier is a shared object, found at $LLMRUN_MPI_PLUGIN, where base/place.h says, or
 * (base/place.h), or where the dynamic linker looks. A run is a property of the process, so its state is too.
 */
#define _GNU_SOURCE
#include "dist/dist.h"
#include "base/device_comm.h"
#include "base/mem.h"
#include "base/place.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_NAME "libllmrun_mpi.so"

static struct {
    const lr_carrier *carrier;
    lr_comm *world;
    int local_rank, local_size;
    const char *host;
    bool dying;
    pid_t pid;
} run;

static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"};
enum { N_SIZES = sizeof sizes / sizeof *sizes };

int lr_dist_launched(void)
{
    for (size_t i = 0; i < N_SIZES; i++) {
        const char *v = getenv(sizes[i]);
        if (v && atoi(v) > 0) return atoi(v);
    }
    return 1;
}

/* ---- the carrier ---- */

static int try(const char *path, lr_error *err)
{
    if (strchr(path, '/') && access(path, F_OK) != 0) return lr_fail(err, LR_ENOTFOUND, "no file %s", path);
    /* MPI opens components of its own that look for MPI's symbols: they must be visible to them */
    void *so = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!so) {
        const char *why = dlerror();
        if (!strchr(path, '/')) return lr_fail(err, LR_ENOTFOUND, "%s is not found", path);
        return lr_fail(err, LR_EIO, "the MPI carrier can't be opened: %s", why ? why : path);
    }
    lr_carrier_entry *entry;
    *(void **)(&entry) = dlsym(so, "llmrun_comm");
    const lr_carrier *c = entry ? entry() : NULL;
    if (!c || !c->abi || strcmp(c->abi, LR_CARRIER_ABI) != 0) {
        dlclose(so);
        return lr_fail(err, LR_EUNSUPPORTED, "%s is no carrier of this llmrun", path);
    }
    run.carrier = c;
    return 0;
}

static int find_carrier(lr_error *err)
{
    const char *env = getenv("LLMRUN_MPI_PLUGIN");
    char folder[2200], path[2300];
    if (env && *env) return try(env, err);
    for (int i = 0; lr_place_folder(i, folder, sizeof folder); i++) {
        if (!folder[0]) continue;
        snprintf(path, sizeof path, "%s/%s", folder, FILE_NAME);
        int rc = try(path, err);
        if (rc != LR_ENOTFOUND) return rc;
    }
    if (try(FILE_NAME, err) != LR_ENOTFOUND) return err->code;
    lr_place_folder(0, folder, sizeof folder);
    return lr_fail(err, LR_ENOTFOUND,
                   "several processes need the MPI carrier: there is no %s in %s, in ../lib/llmrun, or where the "
                   "dynamic linker looks (it is built where Open MPI's headers are; LLMRUN_MPI_PLUGIN names another "
                   "file)",
                   FILE_NAME, folder);
}

/* ---- between GPUs ---- */

/* The NCCL carrier, where it can be opened. */
static const lr_device_carrier *device_carrier(void)
{
    static bool tried;
    static const lr_device_carrier *found;
    const char *env = getenv("LLMRUN_NCCL_PLUGIN");
    char folder[2200], path[2300];
    if (tried) return found;
    tried = true;
    void *so = env && *env ? dlopen(env, RTLD_NOW) : NULL;
    for (int i = 0; !so && lr_place_folder(i, folder, sizeof folder); i++) {
        if (!folder[0]) continue;
        snprintf(path, sizeof path, "%s/libllmrun_nccl.so", folder);
        so = dlopen(path, RTLD_NOW);
    }
    lr_device_carrier_entry *entry = NULL;
    if (so) *(void **)(&entry) = dlsym(so, "llmrun_device_comm");
    const lr_device_carrier *c = entry ? entry() : NULL;
    if (c && c->abi && strcmp(c->abi, LR_CARRIER_ABI) == 0) found = c;
    return found;
}

int lr_dist_devices(lr_comm *g, int gpu, lr_error *err)
{
    if (g->size == 1 || g->device) return 0;
    const lr_device_carrier *c = gpu >= 0 ? device_carrier() : NULL;
    char mine = c != NULL, *all = lr_calloc((size_t)g->size, 1);
    int *bytes = lr_calloc((size_t)g->size, sizeof *bytes);
    int rc = all && bytes ? 0 : lr_fail(err, LR_ENOMEM, "no memory for a group of %d ranks", g->size);
    for (int r = 0; r < g->size && !rc; r++) bytes[r] = 1;
    if (!rc) rc = g->ops->all_gather(g, &mine, all, bytes, err);
    bool every = !rc && !memchr(all, 0, (size_t)g->size);
    lr_free(all);
    lr_free(bytes);
    if (rc || !every) return rc;
    rc = c->join(g, gpu, &g->device, err);
    if (!rc) g->stream = c->stream(g->device);
    return rc;
}

/* ---- the world ---- */

int lr_dist_open(lr_error *err)
{
    if (run.world) return 0;
    int rc = run.carrier ? 0 : find_carrier(err);
    if (!rc) rc = run.carrier->open(&run.world, &run.local_rank, &run.local_size, &run.host, err);
    if (rc) return rc;
    run.pid = getpid();
    for (size_t i = 0; i < N_SIZES; i++) unsetenv(sizes[i]); /* programs started from here are not of this run */
    atexit(lr_dist_close);
    return 0;
}

lr_comm *lr_dist_world(void) { return run.world; }

bool lr_dist_get_info(lr_dist_info *i)
{
    if (!run.world) {
        *i = (lr_dist_info){0, 1, 0, 1, "", "none"};
        return false;
    }
    *i = (lr_dist_info){run.world->rank, run.world->size, run.local_rank,
                        run.local_size,  run.host,        run.world->ops->name};
    return true;
}

void lr_dist_close(void)
{
    lr_error err;
    if (!run.world || run.dying || run.pid != getpid()) return;
    if (run.world->rank == 0) {
        lr_pack p = {0};
        lr_pack_begin(&p, LR_ORDER_QUIT, 0);
        int rc = lr_dist_tell(&p, &err);
        lr_pack_deinit(&p);
        if (rc) lr_dist_die("at the end", &err);
    }
    run.carrier->close(run.world);
    run.world = NULL;
}

void lr_dist_die(const char *what, const lr_error *err)
{
    run.dying = true;
    if (run.world)
        fprintf(stderr, "llmrun: rank %d of %d (%s): %s: %s\n", run.world->rank, run.world->size, run.host, what,
                err->text);
    else
        fprintf(stderr, "llmrun: %s: %s\n", what, err->text);
    fflush(NULL);
    if (run.world) run.world->ops->abort(run.world, 1);
    _exit(1);
}

/* ---- agreeing ---- */

typedef struct vote {
    int32_t code;
    uint64_t same;
    char host[64], text[400];
} vote;

int lr_dist_agree(int rc, uint64_t same, lr_error *err)
{
    lr_comm *w = run.world;
    if (!w || w->size == 1) return rc;
    vote mine = {.code = rc, .same = same};
    lr_error broken;
    snprintf(mine.host, sizeof mine.host, "%.63s", run.host);
    if (rc) snprintf(mine.text, sizeof mine.text, "%.399s", err->text);
    vote *all = lr_calloc((size_t)w->size, sizeof *all);
    int *bytes = lr_calloc((size_t)w->size, sizeof *bytes);
    if (!all || !bytes) {
        lr_fail(&broken, LR_ENOMEM, "no memory to hear the other ranks");
        lr_dist_die("loading", &broken);
    }
    for (int r = 0; r < w->size; r++) bytes[r] = (int)sizeof *all;
    if (w->ops->all_gather(w, &mine, all, bytes, &broken)) lr_dist_die("loading", &broken);
    int result = 0;
    for (int r = 0; r < w->size && !result; r++) {
        all[r].host[sizeof all[r].host - 1] = all[r].text[sizeof all[r].text - 1] = 0;
        if (all[r].code == 0) continue;
        result = all[r].code;
        if (r == w->rank || strcmp(all[r].text, all[w->rank].text) == 0) continue; /* its own text says it all */
        lr_fail(err, result, "rank %d (%s): %s", r, all[r].host, all[r].text);
    }
    for (int r = 1; r < w->size && !result; r++)
        if (all[r].same != all[0].same)
            result = lr_fail(err, LR_EINVAL, "rank %d (%s) has another file than rank 0 (%s): contents differ", r,
                             all[r].host, all[0].host);
    lr_free(all);
    lr_free(bytes);
    return result;
}
