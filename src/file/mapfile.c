/* mapfile.c - see mapfile.h
 *
 * The maps stand in a table that the signal handler reads: base is set last and cleared first. What a handler may do:
 * it reads atomics and maps zeros over the pages from the one at fault to the map's end, which is one system call.
 */
#define _GNU_SOURCE
#include "file/mapfile.h"
#include "base/mem.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#define LR_POISON 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LR_POISON 1
#endif
#endif
#ifdef LR_POISON
#include <sanitizer/asan_interface.h>
#endif

static int fail_errno(lr_error *err, const char *what, int e)
{
    char text[128];
    /* the GNU strerror_r, which is thread-safe and may return a static string */
    return lr_fail(err, e == ENOENT ? LR_ENOTFOUND : LR_EIO, "%s: %s", what, strerror_r(e, text, sizeof text));
}

/* ---- maps that lose their file ---- */

enum { MAX_MAPS = 512 };

static struct {
    atomic_uintptr_t base; /* 0 = free, 1 = being taken */
    atomic_size_t size;
    atomic_bool lost;
} maps[MAX_MAPS];
static atomic_bool any_lost;
static struct sigaction before;

static int add_map(const void *base, size_t size)
{
    for (int i = 0; i < MAX_MAPS; i++) {
        uintptr_t none = 0;
        if (!atomic_compare_exchange_strong(&maps[i].base, &none, 1)) continue;
        atomic_store(&maps[i].lost, false);
        atomic_store(&maps[i].size, size);
        atomic_store(&maps[i].base, (uintptr_t)base);
        return i;
    }
    return -1;
}

static void on_bus_error(int sig, siginfo_t *si, void *context)
{
    uintptr_t at = (uintptr_t)si->si_addr, page = at & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
    for (int i = 0; i < MAX_MAPS; i++) {
        uintptr_t base = atomic_load(&maps[i].base);
        size_t size = atomic_load(&maps[i].size);
        if (base <= 1 || at < base || at - base >= size) continue;
        int e = errno;
        void *p = mmap((void *)page, size - (page - base), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        errno = e;
        if (p == MAP_FAILED) break;
        atomic_store(&maps[i].lost, true);
        atomic_store(&any_lost, true);
        return;
    }
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(sig, si, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
        before.sa_handler(sig);
    else
        signal(sig, SIG_DFL); /* it comes again at once */
}

void lr_mapfile_catch(void)
{
    static atomic_bool done;
    struct sigaction sa = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&sa.sa_mask);
    if (!atomic_exchange(&done, true)) (void)sigaction(SIGBUS, &sa, &before);
}

int lr_mapfile_intact(const lr_mapfile *m, lr_error *err)
{
    if (!atomic_load_explicit(&any_lost, memory_order_relaxed) || m->slot < 0 || !atomic_load(&maps[m->slot].lost))
        return 0;
    return lr_fail(err, LR_EIO, "can't be read any more: it was made shorter, or its disk failed");
}

/* ---- opening ---- */

static const char *kind_of(mode_t mode)
{
    return S_ISDIR(mode)    ? "a directory"
           : S_ISFIFO(mode) ? "a pipe"
           : S_ISSOCK(mode) ? "a socket"
           : S_ISCHR(mode)  ? "a device"
                            : "not a regular file";
}

static int fill_copy(lr_mapfile *m, lr_error *err)
{
    uint8_t *p = lr_alloc_aligned(m->size);
    if (!p) return lr_fail(err, LR_ENOMEM, "no memory for a copy of %zu bytes", m->size);
    m->base = p;
    m->copied = true;
#ifdef LR_POISON /* what the allocation was rounded up by */
    ASAN_POISON_MEMORY_REGION(p + m->size, (64 - m->size % 64) % 64);
#endif
    return lr_mapfile_read(m, 0, p, m->size, err);
}

int lr_mapfile_open(lr_mapfile *m, const char *path, bool copy, lr_error *err)
{
    *m = (lr_mapfile){.fd = -1, .slot = -1};
    int rc;
    struct stat st;
    lr_mapfile f = {
        .slot = -1,
        .fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)}; /* O_NONBLOCK: a pipe must not hang */
    if (f.fd < 0) return fail_errno(err, "cannot open", errno);
    if (fstat(f.fd, &st) != 0) {
        rc = fail_errno(err, "cannot stat", errno);
        goto fail;
    }
    if (!S_ISREG(st.st_mode)) {
        rc = lr_fail(err, LR_EINVAL, "is %s, not a model file", kind_of(st.st_mode));
        goto fail;
    }
    if (st.st_size <= 0 || (uint64_t)st.st_size > SIZE_MAX / 2) {
        rc = lr_fail(err, LR_EFORMAT, st.st_size == 0 ? "is empty" : "is too large");
        goto fail;
    }
    f.size = (size_t)st.st_size;
    f.mtime_s = st.st_mtim.tv_sec;
    f.mtime_ns = st.st_mtim.tv_nsec;
    if (copy) {
        rc = fill_copy(&f, err);
    } else {
        void *p = mmap(NULL, f.size, PROT_READ, MAP_PRIVATE, f.fd, 0);
        rc = p == MAP_FAILED ? fail_errno(err, "cannot map", errno) : 0;
        if (rc == 0) {
            f.base = p;
            f.slot = add_map(p, f.size);
        }
    }
    if (rc != 0) goto fail;
    *m = f;
    return 0;
fail:
    if (f.base)
        lr_mapfile_close(&f); /* a copy that could not be read */
    else
        close(f.fd);
    return rc;
}

void lr_mapfile_close(lr_mapfile *m)
{
    if (!m->base) return;
    if (m->slot >= 0) atomic_store(&maps[m->slot].base, 0);
    if (m->copied)
        lr_free_aligned((void *)m->base);
    else
        munmap((void *)m->base, m->size);
    close(m->fd);
    *m = (lr_mapfile){.fd = -1, .slot = -1};
}

int lr_mapfile_unchanged(const lr_mapfile *m, lr_error *err)
{
    struct stat st;
    if (lr_mapfile_intact(m, err) != 0) return err->code;
    if (fstat(m->fd, &st) != 0) return fail_errno(err, "cannot stat", errno);
    if ((uint64_t)st.st_size != m->size)
        return lr_fail(err, LR_ESTATE, "has changed since it was opened: %zu bytes then, %lld now", m->size,
                       (long long)st.st_size);
    if (st.st_mtim.tv_sec != m->mtime_s || st.st_mtim.tv_nsec != m->mtime_ns)
        return lr_fail(err, LR_ESTATE, "was written to since it was opened");
    return 0;
}

int lr_mapfile_read(const lr_mapfile *m, uint64_t offset, void *dst, size_t n, lr_error *err)
{
    uint8_t *p = dst;
    while (n > 0) {
        ssize_t got = pread(m->fd, p, n < (1u << 30) ? n : 1u << 30, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail_errno(err, "cannot read", errno);
        if (got == 0)
            return lr_fail(err, LR_EIO, "has become shorter while it was read: no byte at %llu",
                           (unsigned long long)offset);
        p += got;
        offset += (uint64_t)got;
        n -= (size_t)got;
    }
    return 0;
}

void lr_mapfile_advise(const lr_mapfile *m, size_t at, size_t n, int advice, bool whole)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), from = at, to = at + n;
    if (m->copied || at > m->size || n > m->size - at) return;
    if (whole) {
        from = (from + page - 1) / page * page;
        if (to != m->size) to = to / page * page; /* nothing follows in the file's last page */
    } else {
        from = from / page * page;
    }
    if (to > from) (void)madvise((uint8_t *)m->base + from, to - from, advice);
}

/* Bytes of the valid UTF-8 sequence of a printable character at p; 0 if there is none. */
static size_t good_char(const uint8_t *p, const uint8_t *end)
{
    if (*p < 0x80) return *p >= 0x20 && *p != 0x7F;
    size_t n = *p >= 0xF0 ? 4 : *p >= 0xE0 ? 3 : 2;
    if (*p < 0xC2 || *p > 0xF4 || (size_t)(end - p) < n) return 0;
    for (size_t i = 1; i < n; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if ((*p == 0xE0 && p[1] < 0xA0) || (*p == 0xED && p[1] > 0x9F)) return 0; /* overlong, surrogate */
    if ((*p == 0xF0 && p[1] < 0x90) || (*p == 0xF4 && p[1] > 0x8F)) return 0; /* overlong, beyond U+10FFFF */
    return n == 2 && *p == 0xC2 && p[1] < 0xA0 ? 0 : n;                       /* C1 controls */
}

const char *lr_printable(char *buf, size_t size, const void *s, size_t n)
{
    const uint8_t *p = s, *end = p + n;
    size_t room = size - 1, at = 0, head = n, tail = n;
    if (n > room) { /* a third of the room for the head, the rest for the tail; both cut at a character */
        head = (room - 3) / 3;
        tail = n - (room - 3 - head);
        while (head > 0 && (p[head] & 0xC0) == 0x80) head--;
        while (tail < n && (p[tail] & 0xC0) == 0x80) tail++;
    }
    for (size_t i = 0; i < n;) {
        if (i == head && head < tail) {
            memcpy(buf + at, "...", 3);
            at += 3;
            i = tail;
            if (i >= n) break;
        }
        size_t len = good_char(p + i, end);
        if (i < head && i + len > head) len = 0;
        if (len)
            memcpy(buf + at, p + i, len);
        else
            buf[at] = '?', len = 1;
        at += len;
        i += len;
    }
    buf[at] = 0;
    return buf;
}
