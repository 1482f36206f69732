/* newfile.c - see newfile.h */
#define _GNU_SOURCE
#include "file/newfile.h"
#include "base/mem.h"
#include "file/mapfile.h"
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SUFFIX 48 /* room for what follows the path in the temporary name */

static int fail_errno(const lr_newfile *f, lr_error *err, const char *what)
{
    int e = errno;
    char text[128], show[240];
    return lr_fail(err, e == ENOENT ? LR_ENOTFOUND : LR_EIO, "%s: cannot %s: %s",
                   lr_printable(show, sizeof show, f->path, strlen(f->path)), what, strerror_r(e, text, sizeof text));
}

/* The folder that holds the path, to be freed. */
static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? lr_memdup(path, slash == path ? 1 : (size_t)(slash - path)) : lr_strdup(".");
}

static void next_name(lr_newfile *f)
{
    static atomic_uint counter;
    snprintf(f->temp, strlen(f->path) + SUFFIX, "%s.tmp-%ld-%u", f->path, (long)getpid(),
             atomic_fetch_add(&counter, 1));
}

static int open_unnamed(lr_newfile *f, int mode)
{
#ifdef O_TMPFILE
    if (access("/proc/self/fd", X_OK) != 0) return -1; /* it could not be given its name */
    f->fd = open(f->folder, O_WRONLY | O_TMPFILE | O_CLOEXEC, mode);
#endif
    return f->fd;
}

static int open_named(lr_newfile *f, int mode)
{
    for (int tries = 0; tries < 100 && f->fd < 0; tries++) {
        next_name(f);
        f->fd = open(f->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
        if (f->fd < 0 && errno != EEXIST) break;
    }
    f->named = f->fd >= 0;
    return f->fd;
}

int lr_newfile_open(lr_newfile *f, const char *path, int mode, lr_error *err)
{
    struct stat st;
    *f = (lr_newfile){
        .fd = -1, .path = lr_strdup(path), .folder = folder_of(path), .temp = lr_malloc(strlen(path) + SUFFIX)};
    int rc = 0;
    if (!f->path || !f->folder || !f->temp)
        rc = lr_fail(err, LR_ENOMEM, "no memory to write a file");
    else if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        char show[240];
        rc = lr_fail(err, LR_EINVAL, "%s is no regular file", lr_printable(show, sizeof show, path, strlen(path)));
    } else if (open_unnamed(f, mode) < 0 && open_named(f, mode) < 0)
        rc = fail_errno(f, err, "create a file beside it");
    if (rc) lr_newfile_discard(f);
    return rc;
}

/* Makes the rename durable; a file system that cannot sync folders is no reason to fail. */
static void sync_folder(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    (void)fsync(fd);
    close(fd);
}

/* A name for what has none yet. */
static int give_name(lr_newfile *f)
{
    char self[40];
    snprintf(self, sizeof self, "/proc/self/fd/%d", f->fd);
    for (int tries = 0; tries < 100 && !f->named; tries++) {
        next_name(f);
        f->named = linkat(AT_FDCWD, self, AT_FDCWD, f->temp, AT_SYMLINK_FOLLOW) == 0;
        if (!f->named && errno != EEXIST) break;
    }
    return f->named ? 0 : -1;
}

int lr_newfile_finish(lr_newfile *f, lr_error *err)
{
    int rc = fsync(f->fd) != 0 ? fail_errno(f, err, "sync") : 0;
    if (!rc && !f->named && give_name(f) != 0) rc = fail_errno(f, err, "name a file beside it");
    int fd = f->fd;
    f->fd = -1;
    if (close(fd) != 0 && !rc) rc = fail_errno(f, err, "close");
    if (!rc && rename(f->temp, f->path) != 0) rc = fail_errno(f, err, "rename to");
    if (!rc) {
        f->named = false;
        sync_folder(f->folder);
    }
    lr_newfile_discard(f);
    return rc;
}

void lr_newfile_discard(lr_newfile *f)
{
    if (f->fd >= 0) close(f->fd);
    if (f->named) unlink(f->temp);
    lr_free(f->path);
    lr_free(f->folder);
    lr_free(f->temp);
    *f = (lr_newfile){.fd = -1};
}
