// attn_f32.cu - attention over a float32 cache: everything in float32, slow, the reference. A block a row and head.
//
// Warp w takes slots w, w + 4, ... one after another (a softmax that rescales as it goes), and the four are joined in
// order: the order is that of absolute slots, so it depends on the row alone.
#include "attn.cuh"

enum { THREADS = 128, WARPS = 4, PER_LANE = 8 }; // head_dim <= 32 * PER_LANE

__global__ void __launch_bounds__(THREADS) attn_f32_k(attn_args a)
{
    SHARED(float, sm, [WARPS]);
    SHARED(float, sl, [WARPS]);
    SHARED(float, so, [WARPS][32 * PER_LANE]);
    int head = blockIdx.y, d = a.kv.head_dim, bs = a.kv.block_size, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int row = row_of_block(a);
    if (row < 0) return;
    row_of r = look_up_row(a, row, head);
    const float *q = a.q + ((size_t)row * a.p.n_heads + head) * d;
    int seq = a.at.seq[row], kvh = head / a.group;
    float m = -INFINITY, l = 0, o[PER_LANE] = {};
    for (int slot = first_slot(a, row) / WARPS * WARPS + warp; slot <= r.slot; slot += WARPS) {
        if (!sees(r, slot)) continue; // the whole warp agrees
        size_t at = ((size_t)kvh * bs + slot % bs) * d;
        const float *k = (const float *)cu_kv_block(a.kv.k, a.at, seq, slot, bs) + at;
        const float *v = (const float *)cu_kv_block(a.kv.v, a.at, seq, slot, bs) + at;
        float s = 0;
        for (int i = lane; i < d; i += 32) s = __fmaf_rn(q[i], k[i], s);
        s = __fmul_rn(cu_warp_sum(s), a.p.scale);
        if (a.p.softcap > 0) s = a.p.softcap * tanhf(s / a.p.softcap);
        float top = fmaxf(m, s), old = expf(m - top), p = expf(s - top);
        m = top;
        l = __fmaf_rn(l, old, p);
        for (int j = 0; j < PER_LANE; j++)
            if (lane + 32 * j < d) o[j] = __fmaf_rn(o[j], old, __fmul_rn(p, v[lane + 32 * j]));
    }
    if (lane == 0) {
        sm[warp] = m;
        sl[warp] = l;
    }
    for (int j = 0; j < PER_LANE; j++)
        if (lane + 32 * j < d) so[warp][lane + 32 * j] = o[j];
    __syncthreads();
    float top = a.p.sinks ? a.p.sinks[head] : -INFINITY, sum = 0;
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, sm[w]);
    if (a.p.sinks) sum = expf(a.p.sinks[head] - top);
    for (int w = 0; w < WARPS; w++)
        if (sl[w] > 0) sum = __fmaf_rn(sl[w], expf(sm[w] - top), sum);
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float x = 0;
        for (int w = 0; w < WARPS; w++)
            if (sl[w] > 0) x = __fmaf_rn(so[w][i], expf(sm[w] - top), x);
        a.out[((size_t)row * a.p.n_heads + head) * d + i] = sum > 0 ? x / sum : 0.0f;
    }
}

cudaError_t cu_attn_f32(const attn_args &a, int n_tiles, cudaStream_t s)
{
    return cu_launch(attn_f32_k, dim3(n_tiles * a.tile_rows, a.p.n_heads), dim3(THREADS), 0, s, a);
}
