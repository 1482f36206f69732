/* trace.c - see trace.h. */
#include "engine/trace.h"
#include "base/mem.h"
#include "file/newfile.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct lr_trace {
    FILE *f;
    lr_newfile file; /* that f writes to; fd -1: f is what the path names itself, as it is no plain file */
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

static int open_file(lr_trace *t, lr_error *err)
{
    struct stat st;
    if (stat(t->path, &st) == 0 && !S_ISREG(st.st_mode)) {
        t->f = fopen(t->path, "w");
    } else {
        int rc = lr_newfile_open(&t->file, t->path, 0666, err);
        if (rc) return rc;
        int fd = dup(t->file.fd);
        t->f = fd < 0 ? NULL : fdopen(fd, "w");
        if (!t->f && fd >= 0) close(fd);
    }
    return t->f ? 0 : lr_fail(err, LR_EIO, "%s: %s", t->path, strerror(errno));
}

static void free_trace(lr_trace *t)
{
    lr_newfile_discard(&t->file);
    lr_free(t->path);
    lr_free(t);
}

int lr_trace_open(lr_trace **out, const char *path, lr_error *err)
{
    lr_trace *t = lr_calloc(1, sizeof *t);
    if (!t) return lr_fail(err, LR_ENOMEM, "no memory for a trace");
    t->file.fd = -1;
    t->path = lr_strdup(path);
    int rc = t->path ? open_file(t, err) : lr_fail(err, LR_ENOMEM, "no memory for a trace");
    if (rc) {
        free_trace(t);
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
    if (!rc && t->file.fd >= 0) rc = lr_newfile_finish(&t->file, err);
    free_trace(t);
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
