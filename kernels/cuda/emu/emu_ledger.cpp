// emu_ledger.cpp - see emu_ledger.h. A process that has died has given back all it had, as on a device.
#include "emu_ledger.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

namespace
{
emu_ledger own, *book;
int file = -1;

void open_book()
{
    if (book) return;
    book = &own;
    const char *path = getenv("EMU_LEDGER");
    if (!path || !*path) return;
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof own) != 0) return;
    void *p = mmap(nullptr, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (p != MAP_FAILED) book = (emu_ledger *)p;
}

// Locked while it lives.
struct page {
    emu_process *me;
    page()
    {
        open_book();
        if (file >= 0) flock(file, LOCK_EX);
        me = nullptr;
        for (auto &p : book->process) {
            if (p.pid && p.pid != getpid() && kill((pid_t)p.pid, 0) != 0 && errno == ESRCH) {
                book->live -= p.live;
                p = {};
            }
            if (p.pid == getpid()) me = &p;
        }
        for (auto &p : book->process)
            if (!me && !p.pid) (me = &p)->pid = getpid();
        if (!me) abort(); // more processes than a test has
    }
    ~page()
    {
        if (file >= 0) flock(file, LOCK_UN);
    }
    size_t used(int device) const
    {
        int64_t n = 0;
        for (auto &p : book->process) n += p.used[device];
        return (size_t)n;
    }
    void add(int device, int64_t n, int things)
    {
        me->live += things;
        book->live += things;
        if (device >= 0) me->used[device] += n;
    }
};
} // namespace

bool emu_ledger_take(int device, size_t n, size_t all)
{
    page p;
    book->asked++;
    bool refuse = book->refuse > 0 && --book->refuse == 0;
    if (!refuse && device >= 0) refuse = n > all || p.used(device) > all - n;
    if (refuse)
        book->refused++;
    else
        p.add(device, (int64_t)n, 1);
    return !refuse;
}

void emu_ledger_give(int device, size_t n)
{
    page p;
    p.add(device, -(int64_t)n, -1);
}

size_t emu_ledger_used(int device)
{
    page p;
    return p.used(device);
}
