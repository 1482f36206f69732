/* trace.h - a trace of steps, batches, requests and hooks in the Trace Event Format that Chrome's tracing page and
 * Perfetto read: a JSON array of events, times in microseconds, one a line.
 *
 * The file takes its place with lr_trace_close, whole; what stood there before stays until then. Writing is buffered; a
 * full disk ends the trace (lr_trace_failed), never the engine, and leaves nothing of it. Engine thread only.
 */
#ifndef LR_ENGINE_TRACE_H
#define LR_ENGINE_TRACE_H
#include "base/error.h"
#include <stdbool.h>
#include <stdint.h>

typedef struct lr_trace lr_trace;

int lr_trace_open(lr_trace **out, const char *path, lr_error *err);
/* Ends the file; LR_EIO if not all of it could be written, and nothing is left of it. NULL is allowed. */
int lr_trace_close(lr_trace *, lr_error *err);
bool lr_trace_failed(const lr_trace *);

enum { LR_TRACE_ENGINE = 1, LR_TRACE_REQUESTS = 2 }; /* process ids in the file */
enum { LR_TRACE_STEPS = 0, LR_TRACE_HOOKS = 1 };     /* tracks of LR_TRACE_ENGINE; a request's track is its id */

/* A span on a track. t0, t1: seconds. args: JSON members without braces ("\"rows\":3"), or NULL. */
void lr_trace_span(lr_trace *, int pid, uint64_t track, const char *name, double t0, double t1, const char *args);
/* A moment on a track. */
void lr_trace_instant(lr_trace *, int pid, uint64_t track, const char *name, double t, const char *args);
/* A value over time. */
void lr_trace_counter(lr_trace *, const char *name, double t, const char *args);

#endif
