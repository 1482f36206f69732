/* newfile.h - a file that is written whole or not at all: its bytes go to a file beside its place, which takes that
 * place (an old file's, too) only when it is complete and on the disk.
 *
 * Where the file system can, the file beside it has no name until then (O_TMPFILE), so that nothing is left of it when
 * the process is ended, by whatever signal. Elsewhere it is called "PATH.tmp-PID-N", and stays when the process is
 * killed.
 */
#ifndef LR_FILE_NEWFILE_H
#define LR_FILE_NEWFILE_H
#include "base/error.h"
#include <stdbool.h>
#include <stddef.h>

typedef struct lr_newfile {
    int fd;       /* -1 = not open; its owner writes to it */
    char *path;   /* where it is to be */
    char *folder; /* that holds it */
    char *temp;   /* room for its other name */
    bool named;   /* it has that name now */
} lr_newfile;

/* mode: permissions, less the umask. LR_EINVAL: there is something there that is no regular file; LR_ENOTFOUND: there
 * is no such folder; LR_EIO. Errors name the path. */
int lr_newfile_open(lr_newfile *f, const char *path, int mode, lr_error *err);
/* Syncs it and puts it in its place; f is then closed, also after an error. */
int lr_newfile_finish(lr_newfile *f, lr_error *err);
/* Leaves nothing of it. Of a closed or zeroed (fd -1) one: frees what is left. */
void lr_newfile_discard(lr_newfile *f);

#endif
