/* comm.h - a group of ranks that exchange bytes: the one interface, whoever carries them.
 *
 * A rank is a process; a group has ranks 0 .. size-1. Carriers (src/dist: Open MPI, NCCL) fill the table. Every call is
 * made by all ranks of the group in the same order, but for send_start, recv and probe, which meet in pairs: messages
 * of one pair arrive in the order they were sent. No call adds floats in an order of its own: all_reduce adds the
 * ranks' values in the order of the ranks, so that its result is the same everywhere and every time.
 *
 * Where the data lies is the carrier's business: host memory for MPI, device memory (and a stream) for NCCL. Calls come
 * from one thread at a time. An error means that the group is broken for good: the run is to be ended (lr_dist_die).
 */
#ifndef LR_BASE_COMM_H
#define LR_BASE_COMM_H
#include "base/error.h"
#include <stddef.h>
#include <stdint.h>

typedef struct lr_comm lr_comm;

typedef struct lr_comm_ops {
    const char *name; /* "mpi", "nccl" */
    void (*free)(lr_comm *);
    /* Groups of the ranks that give the same color, in the order of their ranks here. */
    int (*split)(lr_comm *, int color, lr_comm **out, lr_error *err);
    /* The bytes[r] bytes that each rank r has at `in`, one rank behind the other, to everyone's `out`. */
    int (*all_gather)(lr_comm *, const void *in, void *out, const int *bytes, lr_error *err);
    /* x[i] = the sum of all ranks' x[i], added in the order of the ranks. */
    int (*all_reduce)(lr_comm *, float *x, int n, lr_error *err);
    int (*broadcast)(lr_comm *, void *data, size_t bytes, int root, lr_error *err);
    /* Begins to send; the data stays as it is until finish has returned. */
    int (*send_start)(lr_comm *, int to, const void *data, size_t bytes, lr_error *err);
    /* Waits for everything that send_start began. */
    int (*finish)(lr_comm *, lr_error *err);
    /* A message of exactly that many bytes. */
    int (*recv)(lr_comm *, int from, void *data, size_t bytes, lr_error *err);
    /* Waits for the next message and gives its size. May wait for hours, so it sleeps in between. */
    int (*probe)(lr_comm *, int from, size_t *bytes, lr_error *err);
    /* Lets transfers that were begun go on; to be called now and then during long computations. */
    void (*tick)(lr_comm *);
    /* Ends the processes of all ranks. Does not return. */
    void (*abort)(lr_comm *, int status);
} lr_comm_ops;

struct lr_comm {
    const lr_comm_ops *ops;
    int rank, size;
    lr_comm
        *device;  /* the same ranks, between their GPUs (device_comm.h); until the run ends; NULL = through the host */
    void *stream; /* of device: a cudaStream_t */
    uint64_t calls, bytes; /* of all_gather, all_reduce and broadcast: how many, and the bytes sent by this rank */
    double seconds;        /* spent in them, waiting for slower ranks included */
};

/* What a carrier's shared object exports as "llmrun_comm". open: joins the run that this process was started in (by
 * mpirun); local: how many ranks share this rank's host, and its number among them; host: a name, valid for good.
 * close: leaves the run in good order, the world is freed. */
typedef struct lr_carrier {
    const char *abi; /* LR_CARRIER_ABI; stays the first member */
    int (*open)(lr_comm **world, int *local_rank, int *local_size, const char **host, lr_error *err);
    void (*close)(lr_comm *world);
} lr_carrier;

#define LR_CARRIER_ABI "llmrun-comm-2"
typedef const lr_carrier *lr_carrier_entry(void);

#endif
