/* device_comm.h - carriers of groups of devices: what a shared object like NCCL's exports as "llmrun_device_comm".
 *
 * The table of operations is that of comm.h, but data lies in device memory, and calls only queue their work on the
 * group's stream. all_reduce may add in an order of the carrier's own.
 */
#ifndef LR_BASE_DEVICE_COMM_H
#define LR_BASE_DEVICE_COMM_H
#include "base/comm.h"

typedef struct lr_device_carrier {
    const char *abi; /* LR_CARRIER_ABI */
    /* The ranks of a group of processes, each with its device. */
    int (*join)(lr_comm *host, int device, lr_comm **out, lr_error *err);
    void *(*stream)(lr_comm *); /* a cudaStream_t */
} lr_device_carrier;

typedef const lr_device_carrier *lr_device_carrier_entry(void);

#endif
