/* mapfile.h - a read-only regular file in memory: mapped, or copied into our own memory on request.
 *
 * What the readers of model files share: opening with clear refusals (directory, pipe, empty file), the bytes, hints
 * for the page cache, reads past the mapping, and the question whether the file was touched meanwhile.
 *
 * A mapped file that is made shorter, or whose disk fails, ends the process with SIGBUS at the next touch of what is
 * gone, unless lr_mapfile_catch was called: then what is gone reads as zeros from there on, and the file counts as
 * lost.
 */
#ifndef LR_FILE_MAPFILE_H
#define LR_FILE_MAPFILE_H
#include "base/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct lr_mapfile {
    const uint8_t *base; /* size bytes; page-aligned if mapped, else 64-byte aligned */
    size_t size;         /* >= 1 */
    int fd;
    bool copied;
    int slot;                  /* among the maps that lr_mapfile_catch knows; -1 = none */
    int64_t mtime_s, mtime_ns; /* when opened */
} lr_mapfile;

/* copy: read the whole file into memory instead of mapping it. Text of errors does not name the path. */
int lr_mapfile_open(lr_mapfile *m, const char *path, bool copy, lr_error *err);
/* Of an opened or a zeroed one. */
void lr_mapfile_close(lr_mapfile *m);
/* LR_ESTATE if size or modification time differ from when it was opened. */
int lr_mapfile_unchanged(const lr_mapfile *m, lr_error *err);
/* For the process as a whole, once, before threads that touch maps: a signal handler for SIGBUS. Touches of anything
 * else go to the handler that was there before. */
void lr_mapfile_catch(void);
/* LR_EIO if a touch of this map has failed so far. Any thread; costs a load while nothing is lost anywhere. */
int lr_mapfile_intact(const lr_mapfile *m, lr_error *err);
/* Reads n bytes at offset through the file descriptor. LR_EIO if they are not there. */
int lr_mapfile_read(const lr_mapfile *m, uint64_t offset, void *dst, size_t n, lr_error *err);
/* madvise(advice) on the pages of [at, at + n): all they touch, or with whole only those they fill. No-op on a copy. */
void lr_mapfile_advise(const lr_mapfile *m, size_t at, size_t n, int advice, bool whole);

/* Makes bytes from a file fit to print: control bytes and invalid UTF-8 become '?', long text is cut in its middle.
 * Writes at most size bytes with the zero; size >= 16. Returns buf. */
const char *lr_printable(char *buf, size_t size, const void *s, size_t n);

#endif
