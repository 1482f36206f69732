/* order.c - orders of rank 0 to the others: their bytes, and their way down the tree. See dist.h.
 *
 *   u32 magic, u8 kind, 3 bytes 0, u32 model, u64 length of the body, body
 *
 * Rank r passes an order on to ranks 2r+1 and 2r+2 before it acts on it. What comes in is checked like a file: length,
 * kind and every number, since a rank of another build, or a confused network, must end in a message.
 */
#include "base/mem.h"
#include "dist/dist.h"
#include <string.h>

enum { MAGIC = 0x316c724f, HEADER = 20, MOST_MODELS = 1 << 16 };
#define MOST_BYTES ((size_t)1 << 30)

static void reserve(lr_pack *p, size_t n)
{
    size_t want, cap = p->cap;
    if (p->bad || (lr_add(p->n, n, &want) && want <= cap)) return;
    if (want > MOST_BYTES) {
        p->bad = true;
        return;
    }
    while (cap < want) cap = cap ? cap * 2 : 4096;
    char *q = lr_realloc(p->data, cap);
    if (!q) {
        p->bad = true;
        return;
    }
    p->data = q;
    p->cap = cap;
}

void lr_pack_put(lr_pack *p, const void *data, size_t n)
{
    reserve(p, n);
    if (p->bad || n == 0) return;
    memcpy(p->data + p->n, data, n);
    p->n += n;
}

void lr_pack_int(lr_pack *p, int64_t v) { lr_pack_put(p, &v, sizeof v); }

void lr_pack_begin(lr_pack *p, lr_order kind, int model)
{
    uint32_t magic = MAGIC, k = (uint32_t)kind, m = (uint32_t)model;
    uint64_t len = 0;
    p->n = p->at = 0;
    p->bad = false;
    lr_pack_put(p, &magic, 4);
    lr_pack_put(p, &k, 4);
    lr_pack_put(p, &m, 4);
    lr_pack_put(p, &len, 8);
}

const void *lr_pack_get(lr_pack *p, size_t n)
{
    if (p->bad || n > p->n - p->at) {
        p->bad = true;
        return NULL;
    }
    const void *r = p->data + p->at;
    p->at += n;
    return r;
}

int64_t lr_pack_take(lr_pack *p, int64_t lo, int64_t hi)
{
    int64_t v;
    const void *b = lr_pack_get(p, sizeof v);
    if (!b) return lo;
    memcpy(&v, b, sizeof v);
    if (v >= lo && v <= hi) return v;
    p->bad = true;
    return lo;
}

void lr_pack_deinit(lr_pack *p)
{
    lr_free(p->data);
    *p = (lr_pack){0};
}

int lr_order_check(lr_pack *p, lr_order *kind, int *model, lr_error *err)
{
    uint32_t magic, k, m;
    uint64_t len;
    p->at = 0;
    p->bad = false;
    const char *h = lr_pack_get(p, HEADER);
    if (!h) return lr_fail(err, LR_EFORMAT, "an order of %zu bytes is shorter than a header", p->n);
    memcpy(&magic, h, 4);
    memcpy(&k, h + 4, 4);
    memcpy(&m, h + 8, 4);
    memcpy(&len, h + 12, 8);
    if (magic != MAGIC) return lr_fail(err, LR_EFORMAT, "this is no order (it begins with %08x)", magic);
    if (k < LR_ORDER_QUIT || k > LR_ORDER_LAST) return lr_fail(err, LR_EFORMAT, "an order of unknown kind %u", k);
    if (m > MOST_MODELS) return lr_fail(err, LR_EFORMAT, "an order for model %u", m);
    if (len != p->n - HEADER)
        return lr_fail(err, LR_EFORMAT, "an order says that it has %llu bytes, %zu are there", (unsigned long long)len,
                       p->n - HEADER);
    *kind = (lr_order)k;
    *model = (int)m;
    return 0;
}

static int pass_on(lr_comm *w, const lr_pack *p, lr_error *err)
{
    int rc = 0;
    for (int to = 2 * w->rank + 1; to <= 2 * w->rank + 2 && to < w->size && !rc; to++)
        rc = w->ops->send_start(w, to, p->data, p->n, err);
    return rc ? rc : w->ops->finish(w, err);
}

int lr_dist_tell(lr_pack *p, lr_error *err)
{
    uint64_t len = p->n - HEADER;
    if (p->bad) return lr_fail(err, LR_ENOMEM, "no memory for an order to the other ranks");
    memcpy(p->data + 12, &len, sizeof len);
    return pass_on(lr_dist_world(), p, err);
}

int lr_dist_hear(lr_pack *p, lr_order *kind, int *model, lr_error *err)
{
    lr_comm *w = lr_dist_world();
    int from = (w->rank - 1) / 2;
    size_t n = 0;
    int rc = w->ops->probe(w, from, &n, err);
    if (rc) return rc;
    p->n = p->at = 0;
    p->bad = false;
    reserve(p, n);
    if (p->bad) return lr_fail(err, LR_ENOMEM, "no memory for an order of %zu bytes", n);
    if ((rc = w->ops->recv(w, from, p->data, n, err))) return rc;
    p->n = n;
    if ((rc = lr_order_check(p, kind, model, err))) return rc;
    return pass_on(w, p, err);
}
