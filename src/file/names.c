/* names.c - see names.h */
#include "file/names.h"
#include "base/mem.h"
#include "file/mapfile.h"
#include <stdlib.h>
#include <string.h>

#define CHUNK_SIZE 65536

struct lr_keep_chunk {
    struct lr_keep_chunk *next;
    size_t used, cap;
    _Alignas(16) char data[];
};

void *lr_keep_get(lr_keep *k, size_t n)
{
    size_t need;
    if (!lr_add(n, 15, &need)) return NULL;
    need &= ~(size_t)15;
    struct lr_keep_chunk *c = k->chunks;
    if (!c || c->cap - c->used < need) {
        size_t cap = need > CHUNK_SIZE ? need : CHUNK_SIZE, total;
        if (!lr_add(cap, sizeof *c, &total) || !(c = lr_malloc(total))) return NULL;
        c->used = 0;
        c->cap = cap;
        c->next = k->chunks;
        k->chunks = c;
    }
    void *out = c->data + c->used;
    c->used += need;
    return out;
}

void lr_keep_deinit(lr_keep *k)
{
    for (struct lr_keep_chunk *c = k->chunks, *next; c; c = next) {
        next = c->next;
        lr_free(c);
    }
    k->chunks = NULL;
}

static uint64_t hash_of(const char *s)
{
    uint64_t h = 14695981039346656037u; /* FNV-1a */
    for (; *s; s++) h = (h ^ (uint8_t)*s) * 1099511628211u;
    return h;
}

static int compare_slots(const void *pa, const void *pb)
{
    const lr_name_slot *a = pa, *b = pb;
    return a->hash != b->hash ? (a->hash < b->hash ? -1 : 1) : strcmp(a->name, b->name);
}

int lr_names_index(lr_name_slot **out, const char *const *names, size_t n, size_t stride, const char *what,
                   lr_error *err)
{
    lr_name_slot *s = lr_reallocarray(NULL, n, sizeof *s);
    if (!s) return lr_fail(err, LR_ENOMEM, "no memory for an index of %zu names", n);
    for (size_t i = 0; i < n; i++) {
        const char *name = *(const char *const *)((const char *)names + i * stride);
        s[i] = (lr_name_slot){hash_of(name), name, i};
    }
    if (n) qsort(s, n, sizeof *s, compare_slots);
    for (size_t i = 1; i < n; i++) {
        if (compare_slots(&s[i - 1], &s[i]) != 0) continue;
        char show[160];
        lr_printable(show, sizeof show, s[i].name, strlen(s[i].name));
        lr_free(s);
        return lr_fail(err, LR_EFORMAT, "%s %s appears twice", what, show);
    }
    *out = s;
    return 0;
}

ptrdiff_t lr_names_find(const lr_name_slot *index, size_t n, const char *name)
{
    lr_name_slot key = {hash_of(name), name, 0};
    const lr_name_slot *s = n ? bsearch(&key, index, n, sizeof *s, compare_slots) : NULL;
    return s ? (ptrdiff_t)s->i : -1;
}

static int compare_spans(const void *pa, const void *pb)
{
    const lr_span *a = pa, *b = pb;
    return a->start != b->start ? (a->start < b->start ? -1 : 1) : (a->size > b->size) - (a->size < b->size);
}

void lr_spans_sort(lr_span *spans, size_t n)
{
    if (n) qsort(spans, n, sizeof *spans, compare_spans);
}
