/* kv.c - sizes of KV parts, of attention scratch and of attention parts; which chunks a task needs.
 */
#include "cpu/attn_int.h"

size_t lr_cpu_kv_bytes(int type, bool keys, int n_kv_heads, int head_dim, int block_size)
{
    size_t n = lr_kv_scales_at(type, keys, n_kv_heads, head_dim, block_size);
    if (lr_kv_turned(type)) n += (size_t)n_kv_heads * lr_kv_groups(head_dim) * block_size * 2;
    return n;
}

size_t lr_cpu_attn_scratch(int n_group, int head_dim, int max_rows)
{
    size_t pairs = (size_t)n_group * max_rows, d = ((size_t)head_dim + 15) / 16 * 16;
    size_t per_pair = 3 * d                              /* queries, the chunk's sum, the sum over chunks */
                      + LR_ATTN_STEP + 16                /* weights of a step, lanes of the weights' sum */
                      + 8;                               /* maxima, sums, rescaling factors */
    size_t tiles = 2 * (d < 64 ? 64 : d) * LR_ATTN_STEP; /* a step's keys and values (scalar: whole, else a panel) */
    return (pairs * per_pair + tiles) * sizeof(float) + 16 * 64;
}

size_t lr_cpu_attn_part_floats(const lr_attn_task *t) { return (size_t)t->n_rows * t->n_group * (t->head_dim + 2); }

void lr_attn_chunks(const lr_attn_task *t, int *first, int *last)
{
    int lo, hi, unused;
    lr_attn_row_range(t, 0, &lo, &unused);
    lr_attn_row_range(t, t->n_rows - 1, &unused, &hi);
    *first = lo / LR_ATTN_CHUNK;
    *last = hi < 0 ? *first - 1 : hi / LR_ATTN_CHUNK;
}

void lr_attn_gang_chunks(const lr_attn_gang *g, int *first, int *last)
{
    lr_attn_chunks(&g->tasks[0], first, last);
    for (int i = 1; i < g->n; i++) {
        int a, b;
        lr_attn_chunks(&g->tasks[i], &a, &b);
        if (b < a) continue;
        if (*last < *first || a < *first) *first = a;
        if (b > *last) *last = b;
    }
}
