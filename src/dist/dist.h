/* dist.h - one run on several processes: who is in it, what rank 0 tells the others, and how all end together.
 *
 * A launcher (mpirun) starts the processes; each is a rank. Rank 0 runs the program: Lua, the scheduler, sampling. The
 * others follow: they hear rank 0's orders one after the other and do what these say. An order is a kind (a byte), the
 * number of a model, and a body; it goes down a binary tree of the ranks. Engine thread only.
 *
 * A rank that fails where the others cannot know ends the run on all of them (lr_dist_die): message, then the launcher
 * kills what is left. Nothing here opens a port; who may connect is the launcher's and its network's business.
 */
#ifndef LR_DIST_DIST_H
#define LR_DIST_DIST_H
#include "base/comm.h"
#include <stdbool.h>

/* How many processes the launcher says it started (Open MPI, PMI); 1 without one. Opens nothing. */
int lr_dist_launched(void);

typedef struct lr_dist_info {
    int rank, size;
    int local_rank, local_size; /* among the ranks of this host */
    const char *host, *carrier;
} lr_dist_info;

/* Joins the run: opens the carrier, once. LR_ENOTFOUND if there is none on this machine. */
int lr_dist_open(lr_error *err);
/* All ranks; NULL before lr_dist_open and after lr_dist_close. Borrowed. */
lr_comm *lr_dist_world(void);
/* False (and info is that of a single process) if there is no world. */
bool lr_dist_get_info(lr_dist_info *info);
/* All ranks of a group, each with its GPU (negative: none): from now on group->device carries between these, if every
 * rank has one and the NCCL carrier; else nothing changes, and data goes through the host. */
int lr_dist_devices(lr_comm *group, int gpu, lr_error *err);
/* Leaves the run; rank 0 tells the others to. Called at exit by itself. */
void lr_dist_close(void);
/* Prints "llmrun: rank 2 of 4 (host): what: error" and ends the processes of all ranks. Does not return. */
void lr_dist_die(const char *what, const lr_error *err) __attribute__((noreturn));

/* ---- orders ---- */

typedef enum lr_order {
    LR_ORDER_QUIT = 1, /* the end */
    LR_ORDER_LOAD,     /* body: text for lua/llmrun/dist.lua */
    LR_ORDER_ROOM,     /* of model n: lr_kv_spec and sizes; what there is for them */
    LR_ORDER_START,    /* the same; make them */
    LR_ORDER_FORWARD,  /* a batch */
    LR_ORDER_KV_COPY,  /* groups and blocks */
    LR_ORDER_KV_READ,
    LR_ORDER_KV_WRITE,
    LR_ORDER_FREE,
    LR_ORDER_LAST = LR_ORDER_FREE
} lr_order;

/* A growing body of an order, or one that is read. Reading past the end sets `bad` and gives zeros. */
typedef struct lr_pack {
    char *data;
    size_t n, cap; /* bytes written, or there */
    size_t at;     /* of reading */
    bool bad;      /* out of memory, or past the end */
} lr_pack;

void lr_pack_begin(lr_pack *, lr_order kind, int model); /* empties it and writes the header */
void lr_pack_put(lr_pack *, const void *data, size_t n);
void lr_pack_int(lr_pack *, int64_t v);
/* n bytes of the body, or NULL (and bad) if there are fewer. Valid until the pack is used again. */
const void *lr_pack_get(lr_pack *, size_t n);
/* A number lo <= v <= hi; anything else is bad and gives lo. */
int64_t lr_pack_take(lr_pack *, int64_t lo, int64_t hi);
void lr_pack_deinit(lr_pack *);

/* Reads and checks the header of an order of n bytes: right length, known kind, a model's number. */
int lr_order_check(lr_pack *, lr_order *kind, int *model, lr_error *err);

/* Rank 0: sends an order that lr_pack_begin began. Other ranks: waits for the next and passes it on. */
int lr_dist_tell(lr_pack *, lr_error *err);
int lr_dist_hear(lr_pack *, lr_order *kind, int *model, lr_error *err);

/* All ranks say how something went (rc, err). 0 if it went well everywhere; otherwise each gets the error of the lowest
 * rank that failed, with its name if it is another. `same`: must be equal on all ranks (0: no matter). */
int lr_dist_agree(int rc, uint64_t same, lr_error *err);

#endif
