/* trace.c - see trace.h. */
#include "engine/trace.h"
#include "base/mem.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

struct lr_trace {
    FILE *f;
    char *path;
    bool failed;
    int why; /* errno of the first write that failed; 0 = it is not known */
};

static void failed(lr_trace *t)
{
    if (!t->failed) t->why = errno;
    t->failed = true;
}

/* what: "process_name" or "thread_name" (a track's) */
static void put_name(lr_trace *t, const char *what, int pid, int track, const char *name)
{
    if (fprintf(t->f, "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"name\":\"%s\"}}", pid, track,
                what, name) < 0) {
        failed(t);
    }
}

int lr_trace_open(lr_trace **out, const char *path, lr_error *err)
{
    lr_trace *t = lr_calloc(1, sizeof *t);
    if (!t) return lr_fail(err, LR_ENOMEM, "no memory for a trace");
    t->path = lr_strdup(path);
    if (!t->path) {
        lr_free(t);
        return lr_fail(err, LR_ENOMEM, "no memory for a trace");
    }
    t->f = fopen(path, "w");
    if (!t->f) {
        int rc = lr_fail(err, LR_EIO, "%s: %s", path, strerror(errno));
        lr_free(t->path);
        lr_free(t);
        return rc;
    }
    fputs("[\n", t->f);
    put_name(t, "process_name", LR_TRACE_ENGINE, 0, "engine");
    fputs(",\n", t->f);
    put_name(t, "thread_name", LR_TRACE_ENGINE, LR_TRACE_STEPS, "steps");
    fputs(",\n", t->f);
    put_name(t, "thread_name", LR_TRACE_ENGINE, LR_TRACE_HOOKS, "hooks");
    fputs(",\n", t->f);
    put_name(t, "process_name", LR_TRACE_REQUESTS, 0, "requests");
    *out = t;
    return 0;
}

int lr_trace_close(lr_trace *t, lr_error *err)
{
    if (!t) return 0;
    errno = 0;
    if (!t->failed && fputs("\n]\n", t->f) < 0) failed(t);
    if (fclose(t->f) != 0) failed(t);
    int rc = !t->failed ? 0
                        : lr_fail(err, LR_EIO, "%s: the trace could not be written to its end%s%s", t->path,
                                  t->why ? ": " : "", t->why ? strerror(t->why) : "");
    lr_free(t->path);
    lr_free(t);
    return rc;
}

bool lr_trace_failed(const lr_trace *t) { return t->failed; }

/* A name as JSON string contents: what would need escaping is replaced. */
static void clean(const char *s, char *out, size_t cap)
{
    size_t n = 0;
    for (; *s && n + 1 < cap; s++) out[n++] = (unsigned char)*s < 0x20 || *s == '"' || *s == '\\' ? '_' : *s;
    out[n] = 0;
}

static void event(lr_trace *t, const char *ph, int pid, uint64_t track, const char *name, double ts, double dur,
                  const char *args)
{
    char safe[64], span[48] = "";
    if (t->failed) return;
    clean(name, safe, sizeof safe);
    if (dur >= 0) snprintf(span, sizeof span, ",\"dur\":%.3f", dur * 1e6);
    int n = fprintf(t->f, ",\n{\"ph\":\"%s\",\"pid\":%d,\"tid\":%llu,\"name\":\"%s\",\"ts\":%.3f%s%s,\"args\":{%s}}",
                    ph, pid, (unsigned long long)track, safe, ts * 1e6, span, *ph == 'i' ? ",\"s\":\"t\"" : "",
                    args ? args : "");
    if (n < 0) failed(t);
}

void lr_trace_span(lr_trace *t, int pid, uint64_t track, const char *name, double t0, double t1, const char *args)
{
    event(t, "X", pid, track, name, t0, t1 > t0 ? t1 - t0 : 0, args);
}

void lr_trace_instant(lr_trace *t, int pid, uint64_t track, const char *name, double at, const char *args)
{
    event(t, "i", pid, track, name, at, -1, args);
}

void lr_trace_counter(lr_trace *t, const char *name, double at, const char *args)
{
    event(t, "C", LR_TRACE_ENGINE, 0, name, at, -1, args);
}
