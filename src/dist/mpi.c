/* mpi.c - Open MPI as carrier: a shared object of its own, so that llmrun starts where there is no MPI. See
 * base/comm.h.
 *
 * Nothing here waits in a tight loop where ranks may share a core: mpi_yield_when_idle is set for MPI's own waits, and
 * what can take long (the next control message, a pipeline neighbour's rows) is polled with pauses that grow from none
 * to a millisecond. Transfers that were begun go on only inside MPI calls: tick is one that does nothing else.
 */
#include "base/comm.h"
#include "base/clock.h"
#include "base/mem.h"
#include <limits.h>
#include <mpi.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { TAG = 17, FEW = 64 };

typedef struct mpi_comm {
    lr_comm base;
    MPI_Comm comm;
    int *counts, *starts; /* (size) */
    float *parts;         /* what all_reduce gathers */
    size_t cap_parts;
    MPI_Request *pending;
    int n_pending, cap_pending;
} mpi_comm;

static mpi_comm *self(lr_comm *c) { return (mpi_comm *)c; }

static int check(int rc, const char *what, lr_error *err)
{
    char text[MPI_MAX_ERROR_STRING];
    int n = 0;
    if (rc == MPI_SUCCESS) return 0;
    if (MPI_Error_string(rc, text, &n) != MPI_SUCCESS) n = 0;
    return lr_fail(err, LR_EIO, "MPI %s: %.*s", what, n, text);
}

/* A pause between two looks: the processor goes to others at once, and from the first 200 microseconds on sleep grows
 * to a sixteenth of the time waited, at most a millisecond. */
static void pause_since(double begin)
{
    double waited = lr_now() - begin, sleep = waited / 16;
    if (waited < 200e-6) {
        sched_yield();
        return;
    }
    if (sleep > 1e-3) sleep = 1e-3;
    nanosleep(&(struct timespec){0, (long)(sleep * 1e9)}, NULL);
}

static int wait_for(MPI_Request *r, const char *what, lr_error *err)
{
    double begin = lr_now();
    for (int done = 0;;) {
        int rc = check(MPI_Test(r, &done, MPI_STATUS_IGNORE), what, err);
        if (rc || done) return rc;
        pause_since(begin);
    }
}

static void count(lr_comm *c, double begin, size_t bytes)
{
    c->calls++;
    c->bytes += bytes;
    c->seconds += lr_now() - begin;
}

static int make(MPI_Comm comm, lr_comm **out, lr_error *err);

static void comm_free(lr_comm *b)
{
    mpi_comm *c = self(b);
    if (!c) return;
    if (c->comm != MPI_COMM_NULL) MPI_Comm_free(&c->comm);
    lr_free(c->counts);
    lr_free(c->starts);
    lr_free(c->parts);
    lr_free(c->pending);
    lr_free(c);
}

static int comm_split(lr_comm *b, int color, lr_comm **out, lr_error *err)
{
    MPI_Comm part;
    int rc = check(MPI_Comm_split(self(b)->comm, color, b->rank, &part), "split", err);
    return rc ? rc : make(part, out, err);
}

static int comm_all_gather(lr_comm *b, const void *in, void *out, const int *bytes, lr_error *err)
{
    mpi_comm *c = self(b);
    double begin = lr_now();
    int64_t at = 0;
    for (int r = 0; r < b->size; r++) {
        c->counts[r] = bytes[r];
        c->starts[r] = (int)at;
        at += bytes[r];
    }
    if (at > INT_MAX) return lr_fail(err, LR_ELIMIT, "an exchange of %lld bytes at once", (long long)at);
    MPI_Request r;
    int rc = check(MPI_Iallgatherv(in, bytes[b->rank], MPI_BYTE, out, c->counts, c->starts, MPI_BYTE, c->comm, &r),
                   "all-gather", err);
    if (!rc) rc = wait_for(&r, "all-gather", err);
    count(b, begin, (size_t)bytes[b->rank]);
    return rc;
}

/* Each rank adds up one part of x, of which everyone sends it theirs; then the sums are gathered: as many bytes as a
 * ring takes, and an order that is always the same. */
static int comm_all_reduce(lr_comm *b, float *x, int n, lr_error *err)
{
    mpi_comm *c = self(b);
    double begin = lr_now();
    int size = b->size, each = (n + size - 1) / size, first = each * b->rank, mine = n - first;
    if (mine > each) mine = each;
    if (mine < 0) mine = 0;
    size_t need = (size_t)size * (size_t)each;
    if (need > c->cap_parts) {
        float *p = lr_reallocarray(c->parts, need, sizeof *p);
        if (!p) return lr_fail(err, LR_ENOMEM, "no memory for an all-reduce of %d values", n);
        c->parts = p;
        c->cap_parts = need;
    }
    int rc = 0;
    for (int r = 0; r < size && !rc; r++) {
        int from = each * r < n ? each * r : n, len = n - from < each ? n - from : each;
        c->counts[r] = len;
        c->starts[r] = from;
        rc = check(MPI_Gather(x + from, len, MPI_FLOAT, c->parts, len, MPI_FLOAT, r, c->comm), "all-reduce", err);
        if (r != b->rank || rc) continue;
        for (int i = 0; i < mine; i++) {
            float sum = c->parts[i];
            for (int k = 1; k < size; k++) sum += c->parts[(size_t)k * (size_t)mine + (size_t)i];
            x[first + i] = sum;
        }
    }
    if (!rc)
        rc = check(MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, x, c->counts, c->starts, MPI_FLOAT, c->comm),
                   "all-reduce", err);
    count(b, begin, (size_t)n * sizeof *x * 2 * (size_t)(size - 1) / (size_t)size);
    return rc;
}

static int comm_broadcast(lr_comm *b, void *data, size_t bytes, int root, lr_error *err)
{
    double begin = lr_now();
    if (bytes > INT_MAX) return lr_fail(err, LR_ELIMIT, "a broadcast of %zu bytes at once", bytes);
    MPI_Request r;
    int rc = check(MPI_Ibcast(data, (int)bytes, MPI_BYTE, root, self(b)->comm, &r), "broadcast", err);
    if (!rc) rc = wait_for(&r, "broadcast", err);
    count(b, begin, b->rank == root ? bytes : 0);
    return rc;
}

static int comm_send_start(lr_comm *b, int to, const void *data, size_t bytes, lr_error *err)
{
    mpi_comm *c = self(b);
    if (bytes > INT_MAX) return lr_fail(err, LR_ELIMIT, "a message of %zu bytes", bytes);
    if (c->n_pending == c->cap_pending) {
        int cap = c->cap_pending ? 2 * c->cap_pending : FEW;
        MPI_Request *p = lr_reallocarray(c->pending, (size_t)cap, sizeof(MPI_Request));
        if (!p) return lr_fail(err, LR_ENOMEM, "no memory for a message");
        c->pending = p;
        c->cap_pending = cap;
    }
    int rc = check(MPI_Isend(data, (int)bytes, MPI_BYTE, to, TAG, c->comm, &c->pending[c->n_pending]), "send", err);
    if (!rc) c->n_pending++;
    return rc;
}

static int comm_finish(lr_comm *b, lr_error *err)
{
    mpi_comm *c = self(b);
    int rc = 0;
    for (int i = 0; i < c->n_pending && !rc; i++) rc = wait_for(&c->pending[i], "send", err);
    c->n_pending = 0;
    return rc;
}

static int comm_recv(lr_comm *b, int from, void *data, size_t bytes, lr_error *err)
{
    MPI_Request r;
    if (bytes > INT_MAX) return lr_fail(err, LR_ELIMIT, "a message of %zu bytes", bytes);
    int rc = check(MPI_Irecv(data, (int)bytes, MPI_BYTE, from, TAG, self(b)->comm, &r), "receive", err);
    return rc ? rc : wait_for(&r, "receive", err);
}

static int comm_probe(lr_comm *b, int from, size_t *bytes, lr_error *err)
{
    double begin = lr_now();
    for (;;) {
        int there = 0, n = 0;
        MPI_Status st;
        int rc = check(MPI_Iprobe(from, TAG, self(b)->comm, &there, &st), "probe", err);
        if (rc) return rc;
        if (there) {
            rc = check(MPI_Get_count(&st, MPI_BYTE, &n), "probe", err);
            *bytes = (size_t)n;
            return rc;
        }
        pause_since(begin);
    }
}

static void comm_tick(lr_comm *b)
{
    int there;
    MPI_Iprobe(MPI_ANY_SOURCE, TAG, self(b)->comm, &there, MPI_STATUS_IGNORE);
}

static void comm_abort(lr_comm *b, int status)
{
    MPI_Abort(self(b)->comm, status);
    abort();
}

static const lr_comm_ops mpi_ops = {.name = "mpi",
                                    .free = comm_free,
                                    .split = comm_split,
                                    .all_gather = comm_all_gather,
                                    .all_reduce = comm_all_reduce,
                                    .broadcast = comm_broadcast,
                                    .send_start = comm_send_start,
                                    .finish = comm_finish,
                                    .recv = comm_recv,
                                    .probe = comm_probe,
                                    .tick = comm_tick,
                                    .abort = comm_abort};

static int make(MPI_Comm comm, lr_comm **out, lr_error *err)
{
    mpi_comm *c = lr_calloc(1, sizeof *c);
    if (!c) return lr_fail(err, LR_ENOMEM, "no memory for a group of ranks");
    c->base.ops = &mpi_ops;
    c->comm = comm;
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm, &c->base.rank);
    MPI_Comm_size(comm, &c->base.size);
    c->counts = lr_calloc((size_t)c->base.size, sizeof *c->counts);
    c->starts = lr_calloc((size_t)c->base.size, sizeof *c->starts);
    if (!c->counts || !c->starts) {
        comm_free(&c->base);
        return lr_fail(err, LR_ENOMEM, "no memory for a group of ranks");
    }
    *out = &c->base;
    return 0;
}

static int mpi_open(lr_comm **world, int *local_rank, int *local_size, const char **host, lr_error *err)
{
    static char name[MPI_MAX_PROCESSOR_NAME];
    int level = 0, n = 0, done = 0, rc;
    MPI_Comm local, all;
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
    MPI_Initialized(&done);
    if (!done && (rc = check(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level), "start", err))) return rc;
    if ((rc = check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local), "start", err)))
        return rc;
    MPI_Comm_rank(local, local_rank);
    MPI_Comm_size(local, local_size);
    MPI_Comm_free(&local);
    MPI_Get_processor_name(name, &n);
    *host = name;
    if ((rc = check(MPI_Comm_dup(MPI_COMM_WORLD, &all), "start", err))) return rc;
    return make(all, world, err);
}

static void mpi_close(lr_comm *world)
{
    int done = 0;
    comm_free(world);
    MPI_Finalized(&done);
    if (!done) MPI_Finalize();
}

__attribute__((visibility("default"))) const lr_carrier *llmrun_comm(void)
{
    static const lr_carrier carrier = {LR_CARRIER_ABI, mpi_open, mpi_close};
    return &carrier;
}
