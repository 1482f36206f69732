/* cpu_run.h - what the walk over a plan (cpu_run.c) shares with its products: cpu_gemm.c, cpu_share.c. */
#ifndef LR_BACKEND_CPU_RUN_H
#define LR_BACKEND_CPU_RUN_H
#include "backend/cpu_int.h"

typedef struct run_ctx {
    lr_plan *p;
    const lr_kv_store *kv;
    const lr_batch *b;
    int n_threads;
    int failed; /* of an exchange */
    lr_error *err;
    bool lora; /* a sequence has an adapter */
    /* the phase at hand */
    int stage;
    bool second; /* of the stage's two */
    int rows, strips, pieces;
    bool shared; /* its units are shared out to the threads: lr_plan.shares */
    int ticked;  /* thread 0's: the stage of the last tick */
} run_ctx;

/* Where a thread's reading goes on: strips of a weight. */
typedef struct place {
    const lr_weight *w;
    int strip, end;
} place;

static inline int lr_cpu_less(int a, int b) { return a < b ? a : b; }

/* Rows that a stage, or an operation, has. */
static inline int lr_cpu_rows(const run_ctx *c, bool narrow, int route)
{
    int rows = narrow ? c->b->n_out : c->b->n_rows;
    return route < 0 || rows == 0 ? rows : c->p->routes[route].n_slots;
}

/* ---- products of a stage, cut into tasks of rows and strips: cpu_gemm.c ---- */

/* Strips s0..s1-1 of m rows from r0 on of operation o of stage s, of its weight's matrix `mat`: with what adapters add,
 * the bias, and the peaks, where logits have them; of logits that are not listed -inf. then: what the thread will read
 * next, or NULL. */
void lr_cpu_product(const run_ctx *, const stage *s, const plan_op *o, int mat, int r0, int m, int s0, int s1,
                    const place *then);
/* The GLU of columns j0..j1-1 of an item's m rows from r0 on. */
void lr_cpu_glu(const run_ctx *, const gemm_item *, int r0, int m, int j0, int j1);
/* Before the products: a row with an adapter through the first factors. */
void lr_cpu_lora_task(const run_ctx *, const stage *, int row);
/* Whether a product of a stage makes logits whose peaks are wanted. */
bool lr_cpu_stage_has_peaks(const run_ctx *, const stage *);
/* Strips a task takes; tasks of so many; one of them. */
int lr_cpu_gemm_strips(const run_ctx *, const stage *, int rows);
int lr_cpu_gemm_tasks(const run_ctx *, const stage *, int rows, int strips);
void lr_cpu_gemm_task(const run_ctx *, const stage *, int task, int rows, int strips);

/* ---- products of few rows: cpu_share.c ---- */

/* Whether the threads share a stage's strips out among them. */
bool lr_cpu_is_shared(const run_ctx *, const stage *, int rows);
/* Strips of a unit. */
int lr_cpu_unit_strips(const run_ctx *, const stage *);
/* Sets the shares of stage c->stage; the number of tasks that is enough for them. */
int lr_cpu_share_out(const run_ctx *, const stage *, int strips);
void lr_cpu_shared_task(const run_ctx *, const stage *, int thread);

#endif
