/* record.c - see record.h. */
#include "engine/record.h"
#include "base/mem.h"
#include "engine/engine_int.h"
#include "model/adapter.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct text {
    char *at;
    size_t n, cap;
} text;

struct lr_record {
    text out;   /* whole lines */
    text later; /* lines that came up inside of a step: behind the step's own */
    text run, draft, took, ended, last_run;
    uint64_t took_by;
    bool stepping, failed;
    double start;
};

static bool reserve(lr_record *c, text *t, size_t more)
{
    size_t need, cap = t->cap ? t->cap * 2 : 256;
    if (!lr_add(t->n, more, &need)) return false;
    if (need <= t->cap) return true;
    while (cap < need) cap *= 2;
    char *p = lr_realloc(t->at, cap);
    if (!p) {
        c->failed = true;
        return false;
    }
    t->at = p;
    t->cap = cap;
    return true;
}

__attribute__((format(printf, 3, 4))) static void put(lr_record *c, text *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (!c->failed && reserve(c, t, 200)) {
        int n = vsnprintf(t->at + t->n, 200, format, args);
        if (n > 0) t->n += n < 200 ? (size_t)n : 199;
    }
    va_end(args);
}

static void add(lr_record *c, text *t, const text *what)
{
    if (what->n == 0 || c->failed || !reserve(c, t, what->n)) return;
    memcpy(t->at + t->n, what->at, what->n);
    t->n += what->n;
}

/* A number, faster than put: these make up nearly all of a record. */
static void put_int(lr_record *c, text *t, char before, int64_t v)
{
    char digits[24];
    int n = 0;
    uint64_t u = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;
    if (c->failed || !reserve(c, t, 24)) return;
    if (before) t->at[t->n++] = before;
    if (v < 0) t->at[t->n++] = '-';
    do {
        digits[n++] = (char)('0' + u % 10);
        u /= 10;
    } while (u);
    while (n > 0) t->at[t->n++] = digits[--n];
}

static text *lines(lr_record *c) { return c->stepping ? &c->later : &c->out; }

/* ---- beginning, taking, ending ---- */

static void begin_seq(lr_record *c, const lr_seq *s)
{
    text *t = lines(c);
    put(c, t, "{\"seq\":%llu", (unsigned long long)s->id);
    if (s->salt_hash) put(c, t, ",\"salt\":\"%016llx\"", (unsigned long long)s->salt_hash);
    if (s->lora) put(c, t, ",\"adapter\":\"%016llx\"", (unsigned long long)lr_adapter_fingerprint(s->lora));
    put(c, t, "}\n");
}

int lr_engine_record(lr_engine *e, bool on, lr_error *err)
{
    int rc = lr_engine__not_in_step(e, err);
    if (rc) return rc;
    lr_record__free(e);
    if (!on) return 0;
    e->record = lr_calloc(1, sizeof *e->record);
    if (!e->record) return lr_fail(err, LR_ENOMEM, "no memory for a record");
    e->record->start = lr_engine__now(e);
    const lr_seq *first = e->seqs;
    while (first && first->next) first = first->next;
    for (const lr_seq *s = first; s; s = s->prev) { /* the oldest first */
        begin_seq(e->record, s);
        lr_record__append(s, s->tokens, (size_t)s->len);
    }
    return 0;
}

void lr_record__free(lr_engine *e)
{
    lr_record *c = e->record;
    if (!c) return;
    text *all[] = {&c->out, &c->later, &c->run, &c->draft, &c->took, &c->ended, &c->last_run};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) lr_free(all[i]->at);
    lr_free(c);
    e->record = NULL;
}

int lr_engine_record_take(lr_engine *e, const char **out, size_t *n, lr_error *err)
{
    lr_record *c = e->record;
    *out = "";
    *n = 0;
    if (!c) return lr_fail(err, LR_ESTATE, "no record is kept");
    if (c->failed) return lr_fail(err, LR_ENOMEM, "no memory for the record");
    if (c->out.n) *out = c->out.at;
    *n = c->out.n;
    c->out.n = 0;
    return 0;
}

void lr_engine_set_exact(lr_engine *e, bool on) { e->exact = on; }

/* ---- sequences ---- */

void lr_record__seq(lr_seq *s)
{
    if (s->e->record) begin_seq(s->e->record, s);
}

void lr_record__fork(lr_seq *f, const lr_seq *of)
{
    lr_record *c = f->e->record;
    if (!c) return;
    put(c, lines(c), "{\"fork\":%llu,\"of\":%llu,\"len\":%d}\n", (unsigned long long)f->id, (unsigned long long)of->id,
        f->len);
}

void lr_record__append(const lr_seq *s, const int32_t *tokens, size_t n)
{
    lr_record *c = s->e->record;
    if (!c || n == 0) return;
    text *t = lines(c);
    put(c, t, "{\"add\":%llu,\"ids\":[", (unsigned long long)s->id);
    for (size_t i = 0; i < n; i++) put_int(c, t, i ? ',' : 0, tokens[i]);
    put(c, t, "]}\n");
}

void lr_record__truncate(const lr_seq *s)
{
    lr_record *c = s->e->record;
    if (c) put(c, lines(c), "{\"cut\":%llu,\"len\":%d}\n", (unsigned long long)s->id, s->len);
}

void lr_record__pin(const lr_seq *s, bool on)
{
    lr_record *c = s->e->record;
    if (c) put(c, lines(c), "{\"pin\":%llu,\"on\":%s}\n", (unsigned long long)s->id, on ? "true" : "false");
}

void lr_record__free_seq(const lr_seq *s)
{
    lr_record *c = s->e->record;
    if (c) put(c, lines(c), "{\"drop\":%llu}\n", (unsigned long long)s->id);
}

void lr_record__forget(lr_engine *e)
{
    if (e->record) put(e->record, lines(e->record), "{\"forget\":true}\n");
}

/* ---- steps ---- */

void lr_record__begin_step(lr_engine *e)
{
    lr_record *c = e->record;
    if (!c) return;
    c->stepping = true;
    c->took_by = 0;
    c->run.n = c->draft.n = c->took.n = c->ended.n = 0;
}

/* "3:1 4:64 5! 7^" */
void lr_record__decide(lr_engine *e, const lr_request *r, char what, int n)
{
    lr_record *c = e->record;
    if (!c || !c->stepping) return;
    put_int(c, &c->run, c->run.n ? ' ' : 0, (int64_t)r->info.id);
    if (what == '!' || what == '~') {
        put(c, &c->run, "%c", what);
    } else {
        put_int(c, &c->run, what, n);
    }
}

void lr_record__park(const lr_seq *s)
{
    lr_record *c = s->e->record;
    if (!c || !c->stepping) return;
    put_int(c, &c->run, c->run.n ? ' ' : 0, (int64_t)s->id);
    put(c, &c->run, "^");
}

/* "3:17,18,19.0": tokens, each with the place of the one it follows if that is not the one before it (-1: the text) */
void lr_record__draft(const lr_request *r, const int32_t *tokens, const int *parent, int n)
{
    lr_record *c = r->e->record;
    if (!c || !c->stepping || n == 0) return;
    put_int(c, &c->draft, c->draft.n ? ' ' : 0, (int64_t)r->info.id);
    for (int i = 0; i < n; i++) {
        put_int(c, &c->draft, i ? ',' : ':', tokens[i]);
        if (parent[i] != i - 1) put_int(c, &c->draft, '.', parent[i]);
    }
}

/* "3:45 4:67,68" */
void lr_record__token(const lr_request *r, int32_t id)
{
    lr_record *c = r->e->record;
    if (!c || !c->stepping) return;
    bool more = c->took_by == r->info.id;
    if (!more) put_int(c, &c->took, c->took.n ? ' ' : 0, (int64_t)r->info.id);
    put_int(c, &c->took, more ? ',' : ':', id);
    c->took_by = r->info.id;
}

/* "3:stop:120": how, and the sequence's length then */
void lr_record__end(const lr_request *r)
{
    lr_record *c = r->e->record;
    if (!c) return;
    text *t = c->stepping ? &c->ended : &c->out;
    if (!c->stepping) put(c, t, "{\"ended\":\"");
    put(c, t, "%s%llu:%s:%d", c->stepping && t->n ? " " : "", (unsigned long long)r->info.id,
        lr_finish_name(r->info.finish), r->info.seq ? r->info.seq->len : 0);
    if (!c->stepping) put(c, t, "\",\"t\":%.6f}\n", r->info.t_end - c->start);
}

static void put_field(lr_record *c, const char *name, const text *value)
{
    if (value->n == 0) return;
    put(c, &c->out, ",\"%s\":\"", name);
    add(c, &c->out, value);
    put(c, &c->out, "\"");
}

void lr_record__end_step(lr_engine *e, double t0, double t1, int rows)
{
    lr_record *c = e->record;
    if (!c || !c->stepping) return;
    c->stepping = false;
    put(c, &c->out, "{\"step\":%llu,\"t\":%.6f,\"ms\":%.3f,\"rows\":%d", (unsigned long long)e->generation,
        t0 - c->start, (t1 - t0) * 1e3, rows);
    bool same = c->run.n > 0 && c->run.n == c->last_run.n && memcmp(c->run.at, c->last_run.at, c->run.n) == 0;
    if (same) {
        put(c, &c->out, ",\"run\":\"=\"");
    } else {
        put_field(c, "run", &c->run);
    }
    put_field(c, "draft", &c->draft);
    put_field(c, "took", &c->took);
    put_field(c, "ended", &c->ended);
    put(c, &c->out, "}\n");
    add(c, &c->out, &c->later);
    c->later.n = 0;
    text was = c->last_run;
    c->last_run = c->run;
    c->run = was;
}
