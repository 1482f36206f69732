/* snapshot.c - a sequence to a file and back. See lr_seq_save.
 *
 * The file: a header (struct head), n_tokens token ids, the held KV blocks group by group in table order, and a 64-bit
 * checksum of everything before it. All in the machine's byte order; a file from the other order has another magic.
 * It is written whole or not at all (file/newfile.h): a reader sees the old file, the new one, or none.
 */
#include "engine/engine_int.h"
#include "base/mem.h"
#include "file/newfile.h"
#include "model/adapter.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC   0x31564b524c6d4c6cu /* "lLmLRKV1" */
#define VERSION 1u

typedef struct head {
    uint64_t magic;
    uint32_t version, n_groups;
    uint64_t fingerprint;
    int16_t kv_type, kv_value_type;
    int32_t block_size;
    int32_t n_tokens, computed;
    int32_t first[LR_KV_GROUPS]; /* entries before are not there */
    uint64_t block_bytes[LR_KV_GROUPS];
    uint64_t kv_bytes;
} head;

_Static_assert(sizeof(head) == 72, "the header has no holes");

/* Four lanes of multiply and rotate, so that a checksum costs less than the copy beside it. */
typedef struct sum {
    uint64_t lane[4], n;
} sum;

static uint64_t turn(uint64_t h, uint64_t v)
{
    h = (h ^ v) * 0x9E3779B97F4A7C15u;
    return h << 31 | h >> 33;
}

/* n: a multiple of 32 except in the last call. */
static void sum_add(sum *s, const void *data, size_t n)
{
    const char *p = data;
    uint64_t v[4];
    s->n += n;
    for (; n >= 32; n -= 32, p += 32) {
        memcpy(v, p, 32);
        for (int i = 0; i < 4; i++) s->lane[i] = turn(s->lane[i], v[i]);
    }
    if (n == 0) return;
    memset(v, 0, sizeof v);
    memcpy(v, p, n);
    for (int i = 0; i < 4; i++) s->lane[i] = turn(s->lane[i], v[i]);
}

static uint64_t sum_of(const char *data, size_t n)
{
    sum s = {{1, 2, 3, 4}, 0};
    sum_add(&s, data, n);
    uint64_t h = turn(0, s.n);
    for (int i = 0; i < 4; i++) h = turn(h, s.lane[i]);
    return turn(h, h >> 17);
}

/* ---- writing ---- */

static int write_all(int fd, const char *p, size_t n)
{
    while (n > 0) {
        ssize_t k = write(fd, p, n < (1 << 30) ? n : 1 << 30);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return -1;
        p += k;
        n -= (size_t)k;
    }
    return 0;
}

static int write_file(const char *path, const char *data, size_t n, lr_error *err)
{
    lr_newfile f;
    int rc = lr_newfile_open(&f, path, 0600, err);
    if (rc) return rc;
    if (write_all(f.fd, data, n) == 0) return lr_newfile_finish(&f, err);
    rc = lr_fail(err, LR_EIO, "%s: %s", path, strerror(errno));
    lr_newfile_discard(&f);
    return rc;
}

int lr_seq_save(lr_seq *s, const char *path, lr_error *err)
{
    lr_engine *e = s->e;
    int rc = lr_engine__not_in_step(e, err);
    if (rc) return rc;
    if (!s->req) lr_kv_table_trim(e->kv, &s->kv);
    head h = {.magic = MAGIC,
              .version = VERSION,
              .n_groups = (uint32_t)e->model->n_groups,
              .fingerprint = e->model->fingerprint ^ lr_adapter_fingerprint(s->lora),
              .kv_type = (int16_t)e->cfg.kv_type,
              .kv_value_type = (int16_t)e->cfg.kv_value_type,
              .block_size = e->cfg.block_size,
              .n_tokens = s->len,
              .computed = s->kv.computed};
    size_t tokens = (size_t)s->len * sizeof *s->tokens, n;
    /* an active request's table may reach past what is computed: its tokens alone are saved */
    for (int g = 0; g < e->model->n_groups; g++) {
        if (s->kv.n[g] != (s->kv.computed + h.block_size - 1) / h.block_size) h.computed = 0;
        h.block_bytes[g] = e->model->ops->kv_block_bytes(e->model, g);
    }
    if (h.computed) {
        memcpy(h.first, s->kv.first, sizeof h.first);
        h.kv_bytes = lr_kv_table_bytes(e->kv, &s->kv);
    }
    if (!lr_add(sizeof h + tokens + sizeof(uint64_t), (size_t)h.kv_bytes, &n))
        return lr_fail(err, LR_ENOMEM, "too large to save");
    char *data = lr_malloc(n);
    if (!data) return lr_fail(err, LR_ENOMEM, "no memory to save %zu bytes", n);
    memcpy(data, &h, sizeof h);
    if (tokens) memcpy(data + sizeof h, s->tokens, tokens);
    if (h.kv_bytes) lr_kv_table_read(e->kv, &s->kv, data + sizeof h + tokens);
    uint64_t check = sum_of(data, n - sizeof check);
    memcpy(data + n - sizeof check, &check, sizeof check);
    rc = write_file(path, data, n, err);
    lr_free(data);
    return rc;
}

/* ---- reading ---- */

static int read_all(int fd, char *p, size_t n)
{
    while (n > 0) {
        ssize_t k = read(fd, p, n < (1 << 30) ? n : 1 << 30);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return -1;
        p += k;
        n -= (size_t)k;
    }
    return 0;
}

/* Numbers that fit each other and the size of the file. */
static int check_head(const head *h, uint64_t size, const char *path, lr_error *err)
{
    if (h->magic != MAGIC) return lr_fail(err, LR_EFORMAT, "%s is not a saved sequence", path);
    if (h->version != VERSION)
        return lr_fail(err, LR_EUNSUPPORTED, "%s: version %u, this build reads %u", path, h->version, VERSION);
    size_t n, kv = 0;
    bool ok = h->n_groups >= 1 && h->n_groups <= LR_KV_GROUPS && h->n_tokens >= 0 && h->computed >= 0 &&
              h->computed <= h->n_tokens && h->block_size >= 1 && h->block_size <= 256;
    int64_t blocks = ok ? ((int64_t)h->computed + h->block_size - 1) / h->block_size : 0;
    for (uint32_t g = 0; ok && g < h->n_groups && h->computed > 0; g++) {
        ok = h->first[g] >= 0 && h->first[g] <= blocks &&
             lr_mul((size_t)(blocks - h->first[g]), h->block_bytes[g], &n) && lr_add(kv, n, &kv);
    }
    ok = ok && kv == h->kv_bytes &&
         lr_add(kv, sizeof *h + (size_t)h->n_tokens * sizeof(int32_t) + sizeof(uint64_t), &n) && n == size;
    return ok ? 0
              : lr_fail(err, LR_EFORMAT, "%s is damaged: %llu bytes do not fit its header", path,
                        (unsigned long long)size);
}

/* Reads the whole file and checks it; *data is the caller's. */
static int load(const char *path, head *h, char **data, lr_error *err)
{
    struct stat st;
    uint64_t want;
    char *p = NULL;
    int rc, fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return lr_fail(err, errno == ENOENT ? LR_ENOTFOUND : LR_EIO, "%s: %s", path, strerror(errno));
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        rc = lr_fail(err, LR_EIO, "%s is not a file", path);
        goto out;
    }
    if ((uint64_t)st.st_size < sizeof *h + sizeof want || read_all(fd, (char *)h, sizeof *h)) {
        rc = lr_fail(err, LR_EFORMAT, "%s is too short for a saved sequence", path);
        goto out;
    }
    rc = check_head(h, (uint64_t)st.st_size, path, err);
    if (rc) goto out;
    size_t n = (size_t)st.st_size;
    p = lr_malloc(n);
    if (!p) {
        rc = lr_fail(err, LR_ENOMEM, "no memory for the %zu bytes of %s", n, path);
        goto out;
    }
    memcpy(p, h, sizeof *h);
    if (read_all(fd, p + sizeof *h, n - sizeof *h)) {
        rc = lr_fail(err, LR_EIO, "%s could not be read", path);
        goto out;
    }
    memcpy(&want, p + n - sizeof want, sizeof want);
    if (sum_of(p, n - sizeof want) != want) rc = lr_fail(err, LR_EFORMAT, "%s is damaged: its checksum is wrong", path);
out:
    close(fd);
    if (rc) {
        lr_free(p);
    } else {
        *data = p;
    }
    return rc;
}

/* The KV of the file can be used as it is. */
static bool same_layout(const lr_engine *e, const head *h)
{
    if (h->kv_type != e->cfg.kv_type || h->kv_value_type != e->cfg.kv_value_type ||
        h->block_size != e->cfg.block_size || (int)h->n_groups != e->model->n_groups)
        return false;
    for (int g = 0; g < e->model->n_groups; g++) {
        int w = e->model->window[g], first = w > 0 && h->computed >= w ? (h->computed - w + 1) / h->block_size : 0;
        if (h->block_bytes[g] != e->model->ops->kv_block_bytes(e->model, g) || h->first[g] > first) return false;
    }
    return true;
}

static void take_kv(lr_seq *s, const head *h, const char *kv)
{
    lr_engine *e = s->e;
    int first[LR_KV_GROUPS];
    if (h->computed == 0 || !same_layout(e, h)) return;
    memcpy(first, h->first, sizeof first);
    lr_kv_set_time(e->kv, lr_engine__now(e));
    while (!lr_kv_table_write(e->kv, &s->kv, h->computed, first, kv)) {
        if (!lr_engine__park_one(e)) return; /* no room: it is computed again */
    }
    lr_kv_table_advance(e->kv, &s->kv, s->tokens, 0);
    lr_seq__rest(s);
}

int lr_seq_restore(lr_engine *e, const char *path, const lr_seq_config *cfg, lr_seq **out, lr_error *err)
{
    head h = {0};
    char *data = NULL;
    lr_seq *s = NULL;
    int rc = lr_engine__not_in_step(e, err);
    if (!rc) rc = load(path, &h, &data, err);
    if (!data) return rc;
    if (h.fingerprint != (e->model->fingerprint ^ lr_adapter_fingerprint(cfg ? cfg->lora : NULL))) {
        rc = lr_fail(err, LR_ESTATE, "%s was saved with another model or adapter", path);
    } else {
        rc = lr_seq_new(e, cfg, &s, err);
    }
    if (s) {
        rc = lr_seq_append(s, (const int32_t *)(data + sizeof h), (size_t)h.n_tokens, err);
        if (!rc) take_kv(s, &h, data + sizeof h + (size_t)h.n_tokens * sizeof(int32_t));
    }
    lr_free(data);
    if (rc) {
        lr_seq_free(s);
        return rc;
    }
    *out = s;
    return 0;
}
