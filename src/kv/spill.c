/* spill.c - the spill file: what is evicted from the cache is kept there, and read back on a hit. See kv.h.
 *
 * The file is an array of slots, a block each. Slots are used again in the order in which they were filled; since
 * leaves are evicted first, leaves are forgotten first. A checksum of each slot stays in memory. A write that fails
 * switches the file off for good (what it holds stays readable), a read that fails is a miss.
 */
#include "kv/kv_int.h"
#include "base/mem.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct slot {
    lr_kv_node *node;   /* NULL = free */
    uint64_t check;     /* of the contents */
    int32_t prev, next; /* in use: by age; free: next only */
} slot;

struct kv_spill {
    int fd;
    slot *slots; /* (n) */
    int n, n_used;
    int32_t free, oldest, newest;
    size_t bytes; /* of a slot */
    char *buf;    /* (bytes) */
    bool broken;
    uint64_t out, in, failed;
};

static uint64_t check_of(const char *p, size_t n)
{
    uint64_t h[2] = {n, ~n}, v[2];
    for (; n > 0;) {
        size_t k = n < 16 ? n : 16;
        v[0] = v[1] = 0;
        memcpy(v, p, k);
        for (int i = 0; i < 2; i++) {
            h[i] = (h[i] ^ v[i]) * 0x9E3779B97F4A7C15u;
            h[i] = h[i] << 29 | h[i] >> 35;
        }
        p += k;
        n -= k;
    }
    return h[0] ^ h[1] * 31;
}

static int open_file(const char *path, lr_error *err)
{
    struct stat st;
    char name[4096];
    int fd;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
        int k = snprintf(name, sizeof name, "%s/llmrun-spill-XXXXXX", path);
        if (k < 0 || (size_t)k >= sizeof name) return lr_fail(err, LR_EINVAL, "the spill path is too long");
        fd = mkstemp(name);
        if (fd >= 0) fcntl(fd, F_SETFD, FD_CLOEXEC);
        path = name;
    } else {
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    }
    if (fd < 0) return lr_fail(err, LR_EIO, "spill file %s: %s", path, strerror(errno));
    unlink(path); /* it lives as long as it is open */
    return fd;
}

int lr_kv__spill_new(lr_kv *kv, lr_error *err)
{
    size_t bytes = kv->cfg.mover.block_bytes[0], n = bytes ? kv->cfg.spill_bytes / bytes : 0;
    if (kv->cfg.n_groups > 1 || kv->cfg.window[0] > 0) {
        return lr_fail(err, LR_EUNSUPPORTED, "a spill file is not possible for a model with sliding windows");
    }
    if (n < 1)
        return lr_fail(err, LR_EINVAL, "a spill file of %zu bytes holds no block of %zu", kv->cfg.spill_bytes, bytes);
    if (n > 1 << 24) n = 1 << 24;
    kv_spill *s = lr_calloc(1, sizeof *s);
    if (!s) return lr_fail(err, LR_ENOMEM, "no memory for the spill file");
    kv->spill = s;
    s->fd = -1;
    s->n = (int)n;
    s->bytes = bytes;
    s->oldest = s->newest = -1;
    s->slots = lr_calloc(n, sizeof *s->slots);
    s->buf = lr_malloc(bytes);
    if (!s->slots || !s->buf) return lr_fail(err, LR_ENOMEM, "no memory for a spill file of %zu blocks", n);
    for (int i = 0; i < s->n; i++) s->slots[i].next = i + 1 < s->n ? i + 1 : -1;
    s->fd = open_file(kv->cfg.spill, err);
    return s->fd < 0 ? err->code : 0;
}

void lr_kv__spill_free(lr_kv *kv)
{
    kv_spill *s = kv->spill;
    if (!s) return;
    if (s->fd >= 0) close(s->fd);
    lr_free(s->slots);
    lr_free(s->buf);
    lr_free(s);
    kv->spill = NULL;
}

static void list_remove(kv_spill *s, int i)
{
    slot *x = &s->slots[i];
    *(x->prev >= 0 ? &s->slots[x->prev].next : &s->oldest) = x->next;
    *(x->next >= 0 ? &s->slots[x->next].prev : &s->newest) = x->prev;
}

static void list_append(kv_spill *s, int i)
{
    slot *x = &s->slots[i];
    x->prev = s->newest;
    x->next = -1;
    *(s->newest >= 0 ? &s->slots[s->newest].next : &s->oldest) = i;
    s->newest = i;
}

void lr_kv__spill_drop(lr_kv *kv, lr_kv_node *n)
{
    kv_spill *s = kv->spill;
    int i = n->slot;
    list_remove(s, i);
    s->slots[i].node = NULL;
    s->slots[i].next = s->free;
    s->free = i;
    s->n_used--;
    n->slot = -1;
    lr_kv__node_gc(kv, n);
}

void lr_kv__spill_drop_all(lr_kv *kv)
{
    while (kv->spill && kv->spill->oldest >= 0) lr_kv__spill_drop(kv, kv->spill->slots[kv->spill->oldest].node);
}

/* All n bytes at an offset, by pread or pwrite. */
static bool transfer(kv_spill *s, int i, bool out)
{
    size_t done = 0;
    off_t at = (off_t)i * (off_t)s->bytes;
    while (done < s->bytes) {
        ssize_t k = out ? pwrite(s->fd, s->buf + done, s->bytes - done, at + (off_t)done)
                        : pread(s->fd, s->buf + done, s->bytes - done, at + (off_t)done);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return false;
        done += (size_t)k;
    }
    return true;
}

void lr_kv__spill_out(lr_kv *kv, lr_kv_node *n)
{
    kv_spill *s = kv->spill;
    if (n->slot >= 0) { /* a copy is there: it counts as new */
        list_remove(s, n->slot);
        list_append(s, n->slot);
        return;
    }
    if (s->broken) return;
    if (s->free < 0) lr_kv__spill_drop(kv, s->slots[s->oldest].node);
    int i = s->free;
    kv->cfg.mover.read(kv->cfg.mover.user, 0, n->block[0], s->buf);
    if (!transfer(s, i, true)) {
        s->broken = true;
        s->failed++;
        return;
    }
    s->free = s->slots[i].next;
    s->slots[i].node = n;
    s->slots[i].check = check_of(s->buf, s->bytes);
    list_append(s, i);
    n->slot = i;
    s->n_used++;
    s->out++;
}

bool lr_kv__spill_in(lr_kv *kv, lr_kv_node *n, int b)
{
    kv_spill *s = kv->spill;
    if (!transfer(s, n->slot, false) || check_of(s->buf, s->bytes) != s->slots[n->slot].check) {
        s->failed++;
        lr_kv__spill_drop(kv, n);
        return false;
    }
    kv->cfg.mover.write(kv->cfg.mover.user, 0, b, s->buf);
    s->in++;
    if (s->free < 0) lr_kv__spill_drop(kv, n); /* its place is needed more than a clean copy */
    return true;
}

int lr_kv__spill_slots(const lr_kv *kv) { return kv->spill ? kv->spill->n : 0; }

const lr_kv_node *lr_kv__spill_node(const lr_kv *kv, int i)
{
    return kv->spill && i >= 0 && i < kv->spill->n ? kv->spill->slots[i].node : NULL;
}

void lr_kv__spill_stats(const lr_kv *kv, lr_kv_stats *st)
{
    st->spilled = kv->spill->n_used;
    st->spill_out = kv->spill->out;
    st->spill_in = kv->spill->in;
    st->spill_failed = kv->spill->failed;
}
