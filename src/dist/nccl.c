/* nccl.c - NCCL as carrier between GPUs: a shared object of its own. See base/device_comm.h.
 *
 * A group is made from a group of processes that another carrier (MPI) connects: rank 0 draws NCCL's identifier and
 * sends it to the others over that. Data lies in device memory and every call only queues work on the group's stream,
 * so that a backend can put exchanges between its kernels; finish waits for the stream. NCCL gathers equal parts only,
 * so all_gather is a broadcast from each rank, in one NCCL group. NCCL's all-reduce adds in an order of its own, the
 * same every time for one set of ranks, but not that of the ranks: no forward pass uses it.
 *
 * Built where NCCL's header and library are found. It has not been run on hardware.
 */
#include "base/device_comm.h"
#include "base/mem.h"
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

typedef struct nccl_comm {
    lr_comm base;
    ncclComm_t comm;
    cudaStream_t stream; /* owned */
} nccl_comm;

static nccl_comm *self(lr_comm *c) { return (nccl_comm *)c; }

static int check(ncclResult_t rc, const char *what, lr_error *err)
{
    return rc == ncclSuccess ? 0 : lr_fail(err, LR_EIO, "NCCL %s: %s", what, ncclGetErrorString(rc));
}

static int check_cuda(cudaError_t rc, const char *what, lr_error *err)
{
    return rc == cudaSuccess ? 0 : lr_fail(err, LR_EIO, "CUDA %s: %s", what, cudaGetErrorString(rc));
}

static void comm_free(lr_comm *b)
{
    nccl_comm *c = self(b);
    if (!c) return;
    if (c->comm) ncclCommDestroy(c->comm);
    if (c->stream) cudaStreamDestroy(c->stream);
    lr_free(c);
}

static const lr_comm_ops nccl_ops;

static int make(ncclComm_t comm, int rank, int size, lr_comm **out, lr_error *err)
{
    nccl_comm *c = lr_calloc(1, sizeof *c);
    if (!c) {
        ncclCommDestroy(comm);
        return lr_fail(err, LR_ENOMEM, "no memory for a group of ranks");
    }
    c->base = (lr_comm){.ops = &nccl_ops, .rank = rank, .size = size};
    c->comm = comm;
    int rc = check_cuda(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "stream", err);
    if (rc) {
        comm_free(&c->base);
        return rc;
    }
    *out = &c->base;
    return 0;
}

static int comm_split(lr_comm *b, int color, lr_comm **out, lr_error *err)
{
    ncclComm_t part;
    int rank = 0, size = 0, rc = check(ncclCommSplit(self(b)->comm, color, b->rank, &part, NULL), "split", err);
    if (!rc) rc = check(ncclCommUserRank(part, &rank), "split", err);
    if (!rc) rc = check(ncclCommCount(part, &size), "split", err);
    return rc ? rc : make(part, rank, size, out, err);
}

static int comm_all_gather(lr_comm *b, const void *in, void *out, const int *bytes, lr_error *err)
{
    nccl_comm *c = self(b);
    char *at = out;
    int rc = check(ncclGroupStart(), "all-gather", err);
    for (int r = 0; r < b->size && !rc; r++) {
        if (bytes[r] > 0)
            rc = check(ncclBroadcast(r == b->rank ? in : at, at, (size_t)bytes[r], ncclInt8, r, c->comm, c->stream),
                       "all-gather", err);
        at += bytes[r];
    }
    ncclResult_t end = ncclGroupEnd();
    b->calls++;
    b->bytes += (uint64_t)bytes[b->rank];
    return rc ? rc : check(end, "all-gather", err);
}

static int comm_all_reduce(lr_comm *b, float *x, int n, lr_error *err)
{
    nccl_comm *c = self(b);
    b->calls++;
    b->bytes += (uint64_t)n * sizeof *x;
    return check(ncclAllReduce(x, x, (size_t)n, ncclFloat32, ncclSum, c->comm, c->stream), "all-reduce", err);
}

static int comm_broadcast(lr_comm *b, void *data, size_t bytes, int root, lr_error *err)
{
    b->calls++;
    b->bytes += b->rank == root ? bytes : 0;
    return check(ncclBroadcast(data, data, bytes, ncclInt8, root, self(b)->comm, self(b)->stream), "broadcast", err);
}

static int comm_send_start(lr_comm *b, int to, const void *data, size_t bytes, lr_error *err)
{
    return check(ncclSend(data, bytes, ncclInt8, to, self(b)->comm, self(b)->stream), "send", err);
}

static int comm_finish(lr_comm *b, lr_error *err)
{
    return check_cuda(cudaStreamSynchronize(self(b)->stream), "exchange", err);
}

static int comm_recv(lr_comm *b, int from, void *data, size_t bytes, lr_error *err)
{
    return check(ncclRecv(data, bytes, ncclInt8, from, self(b)->comm, self(b)->stream), "receive", err);
}

static int comm_probe(lr_comm *b, int from, size_t *bytes, lr_error *err)
{
    (void)b, (void)from, (void)bytes;
    return lr_fail(err, LR_EUNSUPPORTED, "NCCL does not tell the size of a message");
}

static void comm_tick(lr_comm *b) { (void)b; } /* the GPU's work goes on by itself */

static void comm_abort(lr_comm *b, int status)
{
    ncclCommAbort(self(b)->comm);
    _Exit(status);
}

static const lr_comm_ops nccl_ops = {.name = "nccl",
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

static int join(lr_comm *host, int device, lr_comm **out, lr_error *err)
{
    ncclUniqueId id;
    ncclComm_t comm;
    int rc = check_cuda(cudaSetDevice(device), "device", err);
    memset(&id, 0, sizeof id);
    if (!rc && host->rank == 0) rc = check(ncclGetUniqueId(&id), "start", err);
    if (rc) return rc;
    if ((rc = host->ops->broadcast(host, &id, sizeof id, 0, err))) return rc;
    if ((rc = check(ncclCommInitRank(&comm, host->size, id, host->rank), "start", err))) return rc;
    return make(comm, host->rank, host->size, out, err);
}

static void *stream(lr_comm *b) { return self(b)->stream; }

__attribute__((visibility("default"))) const lr_device_carrier *llmrun_device_comm(void)
{
    static const lr_device_carrier carrier = {LR_CARRIER_ABI, join, stream};
    return &carrier;
}
