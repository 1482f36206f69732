/* plugin.c - finds and opens the CUDA plugin: see plugin.h.
 *
 * The file is opened once and stays open: a CUDA runtime can't be taken out of a process. A failure is not kept, so a
 * plugin that is put in its place later is found by the next call.
 */
#define _GNU_SOURCE
#include "backend/plugin.h"
#include "base/place.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_NAME "libllmrun_cuda.so"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const lr_plugin *opened;

static int check(void *so, const char *path, lr_error *err)
{
    lr_plugin_entry *entry;
    *(void **)(&entry) = dlsym(so, "llmrun_plugin");
    const lr_plugin *p = entry ? entry() : NULL;
    int rc = 0;
    if (!p || !p->abi) {
        rc = lr_fail(err, LR_EFORMAT, "%s is no plugin of llmrun", path);
    } else if (strcmp(p->abi, LR_PLUGIN_ABI) != 0) {
        rc = lr_fail(err, LR_EUNSUPPORTED, "%s is of another build of llmrun (%.40s, this program needs %s)", path,
                     p->abi, LR_PLUGIN_ABI);
    }
    if (rc) {
        dlclose(so);
        return rc;
    }
    opened = p;
    return 0;
}

/* Opens path; LR_ENOTFOUND if there is no such file (or, for a bare name, if the linker doesn't find it). */
static int try(const char *path, lr_error *err)
{
    if (strchr(path, '/') && access(path, F_OK) != 0) return lr_fail(err, LR_ENOTFOUND, "there is no file %s", path);
    void *so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (so) return check(so, path, err);
    const char *why = dlerror();
    if (!strchr(path, '/')) return lr_fail(err, LR_ENOTFOUND, "%s is not found", path);
    return lr_fail(err, LR_EIO, "the CUDA plugin can't be opened: %s", why ? why : path);
}

static int open_plugin(lr_error *err)
{
    const char *env = getenv("LLMRUN_CUDA_PLUGIN");
    char folder[2200], path[2300];
    if (env && *env) return try(env, err) ? lr_fail_prefix(err, "LLMRUN_CUDA_PLUGIN") : 0;
    for (int i = 0; lr_place_folder(i, folder, sizeof folder); i++) {
        if (!folder[0]) continue;
        snprintf(path, sizeof path, "%s/" FILE_NAME, folder);
        int rc = try(path, err);
        if (rc != LR_ENOTFOUND) return rc;
    }
    if (try(FILE_NAME, err) != LR_ENOTFOUND) return err->code;
    lr_place_folder(0, folder, sizeof folder);
    return lr_fail(err, LR_ENOTFOUND,
                   "this needs the CUDA plugin: there is no " FILE_NAME
                   " in %s, in ../lib/llmrun, or where the dynamic "
                   "linker looks (LLMRUN_CUDA_PLUGIN names another file)",
                   folder);
}

int lr_backend_cuda(lr_backend **out, const lr_backend_config *cfg, int index, lr_error *err)
{
    pthread_mutex_lock(&lock);
    int rc = opened ? 0 : open_plugin(err);
    pthread_mutex_unlock(&lock);
    return rc ? rc : opened->open(out, cfg, index, err);
}
