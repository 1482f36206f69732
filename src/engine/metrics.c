/* metrics.c - histograms and the Prometheus text. See metrics.h. */
#include "engine/engine_int.h"
#include "base/mem.h"
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static const double bounds_T[] = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1,
                                  0.15,   0.25,    0.5,    0.75,  1,      2.5,   5,    10,   20,   40,   80,    160};
static const double bounds_L[] = {0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1,   1.5, 2,
                                  2.5,   5,     10,   15,    20,   30,  40,   50,  60,   120, 240, 480};
static const double bounds_N[] = {1,    2,    5,    10,    20,    50,    100,    200,   500,
                                  1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000};
static const double bounds_B[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536};

#define N_OF(a) ((int)(sizeof(a) / sizeof *(a)))

/* Buckets are few and values cluster low: a linear search beats a clever one. */
static void add(lr_hist *h, const double *bound, int n, double v)
{
    int i = 0;
    while (i < n && v > bound[i]) i++;
    h->count[i]++;
    h->n++;
    h->sum += v;
}

void lr_hist__add_T(lr_hist *h, double v) { add(h, bounds_T, N_OF(bounds_T), v); }
void lr_hist__add_L(lr_hist *h, double v) { add(h, bounds_L, N_OF(bounds_L), v); }
void lr_hist__add_N(lr_hist *h, double v) { add(h, bounds_N, N_OF(bounds_N), v); }
void lr_hist__add_B(lr_hist *h, double v) { add(h, bounds_B, N_OF(bounds_B), v); }

typedef struct field {
    const char *field, *name, *help;
    size_t at;
    const double *bound;
    int n;
} field;

static const field counters[] = {
#define X(f, name, help) {#f, name, help, offsetof(lr_metrics, f), NULL, 0},
    LR_COUNTER_LIST(X)
#undef X
};

static const field hists[] = {
#define X(f, name, help, kind) {#f, name, help, offsetof(lr_metrics, f), bounds_##kind, N_OF(bounds_##kind)},
    LR_HIST_LIST(X)
#undef X
};

const uint64_t *lr_metrics_counter(const lr_metrics *m, int i, const char **name)
{
    if (i < 0 || i >= N_OF(counters)) return NULL;
    *name = counters[i].field;
    return (const uint64_t *)((const char *)m + counters[i].at);
}

const lr_hist *lr_metrics_hist(const lr_metrics *m, int i, const char **name)
{
    if (i < 0 || i >= N_OF(hists)) return NULL;
    *name = hists[i].field;
    return (const lr_hist *)((const char *)m + hists[i].at);
}

double lr_metrics_quantile(const lr_metrics *m, const lr_hist *h, double q)
{
    const field *f = NULL;
    for (int i = 0; i < N_OF(hists); i++) {
        if ((const char *)m + hists[i].at == (const char *)h) f = &hists[i];
    }
    if (!f || h->n == 0 || !(q >= 0 && q <= 1)) return NAN;
    double want = q * (double)h->n, below = 0;
    for (int i = 0; i <= f->n; i++) {
        double c = (double)h->count[i];
        if (c > 0 && below + c >= want) {
            double lo = i > 0 ? f->bound[i - 1] : 0, hi = i < f->n ? f->bound[i] : lo;
            return lo + (hi - lo) * (want - below) / c;
        }
        below += c;
    }
    return NAN;
}

/* ---- text ---- */

typedef struct buf {
    char *s;
    size_t n, cap;
    bool failed;
} buf;

__attribute__((format(printf, 2, 3))) static void put(buf *b, const char *fmt, ...)
{
    va_list ap;
    while (!b->failed) {
        va_start(ap, fmt);
        int n = vsnprintf(b->s ? b->s + b->n : NULL, b->s ? b->cap - b->n : 0, fmt, ap);
        va_end(ap);
        if (n >= 0 && b->s && (size_t)n < b->cap - b->n) {
            b->n += (size_t)n;
            return;
        }
        size_t cap = b->cap * 2 + 8192;
        char *p = n < 0 ? NULL : lr_realloc(b->s, cap);
        if (!p) {
            b->failed = true;
            return;
        }
        b->s = p;
        b->cap = cap;
    }
}

static void head(buf *b, const char *name, const char *help, const char *type)
{
    put(b, "# HELP llmrun:%s %s\n# TYPE llmrun:%s %s\n", name, help, name, type);
}

static void gauge(buf *b, const char *label, const char *name, const char *help, double v)
{
    head(b, name, help, "gauge");
    put(b, "llmrun:%s{%s} %.17g\n", name, label, v);
}

static void hist(buf *b, const char *label, const field *f, const lr_hist *h)
{
    uint64_t sum = 0;
    head(b, f->name, f->help, "histogram");
    for (int i = 0; i < f->n; i++) {
        sum += h->count[i];
        put(b, "llmrun:%s_bucket{%s,le=\"%g\"} %llu\n", f->name, label, f->bound[i], (unsigned long long)sum);
    }
    put(b, "llmrun:%s_bucket{%s,le=\"+Inf\"} %llu\n", f->name, label, (unsigned long long)h->n);
    put(b, "llmrun:%s_sum{%s} %.17g\nllmrun:%s_count{%s} %llu\n", f->name, label, h->sum, f->name, label,
        (unsigned long long)h->n);
}

/* model_name="..." with what the format wants escaped. */
static void make_label(const char *model, char *out, size_t cap)
{
    size_t n = (size_t)snprintf(out, cap, "model_name=\"");
    for (; *model && n + 4 < cap; model++) {
        if (*model == '\\' || *model == '"' || *model == '\n') out[n++] = '\\';
        out[n++] = *model == '\n' ? 'n' : *model;
    }
    out[n++] = '"';
    out[n] = 0;
}

static void put_gauges(buf *b, const lr_engine *e, const char *label)
{
    lr_kv_stats kv;
    lr_engine_info info;
    lr_kv_get_stats(e->kv, 0, &kv);
    lr_engine_get_info(e, &info);
    gauge(b, label, "num_requests_running", "Requests in the batch", e->running.n);
    gauge(b, label, "num_requests_waiting", "Requests in the queue", e->waiting.n);
    gauge(b, label, "num_sequences", "Sequences alive", e->n_seqs);
    gauge(b, label, "kv_cache_usage_perc", "Part of the KV blocks that sequences hold, 0..1",
          (double)kv.used / kv.total);
    gauge(b, label, "kv_blocks_free", "Free KV blocks", kv.free);
    gauge(b, label, "kv_blocks_cached", "KV blocks that only the prefix cache holds", kv.cached);
    gauge(b, label, "kv_blocks_pinned", "KV blocks of pinned sequences", e->pinned[0]);
    gauge(b, label, "kv_slots_unused", "Token slots of sequences' last blocks that hold no token", info.slack);
    gauge(b, label, "swap_bytes", "Bytes of swapped-out sequences", (double)e->swapped);
    head(b, "kv_evictions_total", "KV blocks taken from the prefix cache", "counter");
    put(b, "llmrun:kv_evictions_total{%s} %llu\n", label, (unsigned long long)kv.evicted);
    head(b, "kv_copies_total", "KV blocks copied on write", "counter");
    put(b, "llmrun:kv_copies_total{%s} %llu\n", label, (unsigned long long)kv.copied);
    gauge(b, label, "kv_blocks_spilled", "KV blocks that the spill file holds", kv.spilled);
    head(b, "kv_spill_out_total", "KV blocks written to the spill file", "counter");
    put(b, "llmrun:kv_spill_out_total{%s} %llu\n", label, (unsigned long long)kv.spill_out);
    head(b, "kv_spill_in_total", "KV blocks brought back from the spill file", "counter");
    put(b, "llmrun:kv_spill_in_total{%s} %llu\n", label, (unsigned long long)kv.spill_in);
}

static void put_places(buf *b, const char *label, const char *name, const char *help, const uint64_t *v)
{
    head(b, name, help, "counter");
    for (int i = 0; i < LR_SPEC_POSITIONS; i++)
        put(b, "llmrun:%s{%s,position=\"%d\"} %llu\n", name, label, i, (unsigned long long)v[i]);
}

int lr_engine_prometheus(const lr_engine *e, const char *model, char **text, size_t *n, lr_error *err)
{
    char label[256];
    buf b = {0};
    const char *name;
    make_label(model ? model : e->model->name, label, sizeof label);
    put_gauges(&b, e, label);
    for (int i = 0; i < N_OF(counters); i++) {
        head(&b, counters[i].name, counters[i].help, "counter");
        put(&b, "llmrun:%s{%s} %llu\n", counters[i].name, label,
            (unsigned long long)*lr_metrics_counter(&e->metrics, i, &name));
    }
    put_places(&b, label, "spec_decode_num_draft_tokens_per_pos_total", "Tokens of drafts, by place in the draft",
               e->metrics.spec_tried_at);
    put_places(&b, label, "spec_decode_num_accepted_tokens_per_pos_total",
               "Tokens of drafts that were taken, by place in the draft", e->metrics.spec_accepted_at);
    uint64_t preempted = e->metrics.preempt_recompute + e->metrics.preempt_swap;
    head(&b, "num_preemptions_total", "Preemptions of either kind", "counter");
    put(&b, "llmrun:num_preemptions_total{%s} %llu\n", label, (unsigned long long)preempted);
    head(&b, "request_success_total", "Ended requests by reason", "counter");
    for (int f = LR_FINISH_STOP; f <= LR_FINISH_ERROR; f++) {
        put(&b, "llmrun:request_success_total{%s,finished_reason=\"%s\"} %llu\n", label, lr_finish_name((lr_finish)f),
            (unsigned long long)e->metrics.finished[f]);
    }
    for (int i = 0; i < N_OF(hists); i++) hist(&b, label, &hists[i], lr_metrics_hist(&e->metrics, i, &name));
    if (b.failed) {
        lr_free(b.s);
        return lr_fail(err, LR_ENOMEM, "no memory for the metrics text");
    }
    *text = b.s;
    *n = b.n;
    return 0;
}
