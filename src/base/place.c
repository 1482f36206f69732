/* place.c - see place.h. */
#define _GNU_SOURCE
#include "base/place.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

/* From bin/ to the library folder of an installed tree: set by the build. */
#ifndef LR_LIBDIR
#define LR_LIBDIR "lib"
#endif

static void cut_name(char *path)
{
    char *slash = strrchr(path, '/');
    *(slash ? slash : path) = 0;
}

static void program_folder(char *buf, size_t cap)
{
    ssize_t n = readlink("/proc/self/exe", buf, cap - 1);
    buf[n > 0 ? n : 0] = 0;
    if (n <= 0) { /* no /proc here (a chroot): the path it was started by */
        const char *path = (const char *)getauxval(AT_EXECFN); /* NOLINT(performance-no-int-to-ptr) */
        char *real = path && strchr(path, '/') ? realpath(path, NULL) : NULL;
        if (real) snprintf(buf, cap, "%s", real);
        free(real);
    }
    cut_name(buf);
}

/* "" if this code is part of the program itself. */
static void own_folder(char *buf, size_t cap)
{
    Dl_info program, own;
    buf[0] = 0;
    void *entry = (void *)getauxval(AT_ENTRY); /* NOLINT(performance-no-int-to-ptr) */
    if (!dladdr((void *)&lr_place_folder, &own) || !dladdr(entry, &program)) return;
    if (own.dli_fbase == program.dli_fbase) return;
    char *real = realpath(own.dli_fname, NULL);
    if (real) snprintf(buf, cap, "%s", real);
    free(real);
    cut_name(buf);
}

bool lr_place_folder(int i, char *buf, size_t cap)
{
    /* an object lies in LIBDIR (the C library) or in LIBDIR/lua/5.4 (the Lua module) */
    static const struct {
        bool own;
        const char *behind;
    } places[] = {
        {false, ""},
        {false, "/../" LR_LIBDIR "/llmrun"},
        {false, "/../lib/llmrun"},
        {true, ""},
        {true, "/llmrun"},
        {true, "/../../llmrun"},
    };
    char folder[2048];
    if (i < 0 || (size_t)i >= sizeof places / sizeof *places) return false;
    (places[i].own ? own_folder : program_folder)(folder, sizeof folder);
    buf[0] = 0;
    if (folder[0]) snprintf(buf, cap, "%s%s", folder, places[i].behind);
    return true;
}
