// linear.cu - y = x w^T from the file's own weight blocks.
//
// Exact mode, any number of rows: blocks of weights are unpacked to half precision in shared memory and multiplied with
// mma.m16n8k16 (weights are the 16, rows the 8), sums in float32. k is cut into parts by the shape of the weight alone
// (k_part); a part's sum is one chain of mma in ascending k, and the parts are added in ascending order: by a second
// kernel where there are few rows (the parts then fill the device), in registers where there are many. So an output's
// bits depend on its row and the weight only. Rows come as halves scaled by a power of two each (LR_CU_F16), as
// bfloat16 for BF16 weights.
//
// Fast mode, up to 8 rows: a warp an output feature, 32 values a lane at a time, integer products (dp4a) of 8-bit rows.
// Reference mode: the same shape in float32, weights exact.
#include "linear.cuh"

// ---- the cut of k ----

// A part is a multiple of 256 values; the fewest parts that give some 300 blocks of 64 features for one row, at
// most 16. A row of experts has n_used products.
static int k_part(int n, int k, const lr_cu_slots *slots)
{
    int blocks = (n + 63) / 64 * (slots ? slots->n_used : 1), parts = (300 + blocks - 1) / blocks, most = k / 512;
    if (parts > most) parts = most;
    if (parts > 16) parts = 16;
    if (parts < 1) parts = 1;
    int units = (k + 255) / 256;
    return (units + parts - 1) / parts * 256;
}

// ---- parts of k ----

static __device__ __forceinline__ float join(const mma_args &a, int parts, size_t at)
{
    size_t size = (size_t)a.m * a.n;
    float s = 0;
    for (int p = 0; p < parts; p++) s = __fadd_rn(s, a.parts[p * size + at]);
    return s;
}

__global__ void __launch_bounds__(256) join_k(mma_args a, int parts)
{
    int n = a.act >= 0 ? a.seg[0].n : a.n;
    size_t at = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (at >= (size_t)a.m * n) return;
    int row = (int)(at / n), f = (int)(at % n), expert = a.at.own ? a.at.own[row] : 0;
    if (expert < 0) return; // a slot of nobody's
    if (a.act >= 0) {
        size_t gate = (size_t)row * a.n + f;
        finish_glu(a, row, expert, f, join(a, parts, gate), join(a, parts, gate + n));
        return;
    }
    segment g = segment_at(a, [&](const segment &s) { return f >= s.first; });
    finish(a, g, row, expert, f - g.first, join(a, parts, at));
}

// ---- launchers ----

static bool is_plain(int type) { return type == LR_F32 || type == LR_F16 || type == LR_BF16; }

static const cu_linear_format *format_of(int type)
{
    const cu_linear_format *const tables[] = {cu_linear_1(), cu_linear_2(), cu_linear_3(), cu_linear_4()};
    for (const cu_linear_format *f : tables)
        for (; f->block; f++)
            if (f->type == type) return f;
    return nullptr;
}

cudaError_t cu_init_linear()
{
    const cu_linear_format *const tables[] = {cu_linear_1(), cu_linear_2(), cu_linear_3(), cu_linear_4()};
    cudaError_t e = cudaSuccess;
    for (const cu_linear_format *f : tables)
        for (; f->block && !e; f++) e = f->allow();
    return e;
}

// A product by the tensor cores, cut into parts of k that are joined here.
static cudaError_t mma(const cu_linear_format *f, mma_args a, const lr_cu_slots *slots, void *work, cudaStream_t s)
{
    int parts = (a.k + a.part - 1) / a.part;
    if (a.m > SPLIT) parts = 1;
    if (parts > 1) a.parts = (float *)work;
    cudaError_t e = f->mma(a, parts, slots, s);
    if (e || parts == 1) return e;
    size_t results = (size_t)a.m * (a.act >= 0 ? a.seg[0].n : a.n);
    return cu_launch(join_k, dim3((results + 255) / 256), dim3(256), 0, s, a, parts);
}

extern "C" {

bool lr_cu_weight_good(int type) { return format_of(type) != nullptr; }

lr_cu_form lr_cu_linear_form(lr_cu_math math, int type, int m)
{
    if (math == LR_CU_REF) return LR_CU_F32;
    if (math == LR_CU_FAST && m <= SMALL) return is_plain(type) ? LR_CU_F32 : LR_CU_INT8;
    return type == LR_BF16 ? LR_CU_BF16 : LR_CU_F16;
}

size_t lr_cu_product_work(lr_cu_math math, const lr_cu_product *p, int m)
{
    long long rows = p->slots && p->of_rows ? (long long)m * p->slots->n_used : m;
    int n = 0, k = p->w[0].k;
    for (int i = 0; i < p->n_weights; i++) n += p->w[i].n;
    if (math == LR_CU_REF || n <= 0 || k <= 0 || m <= 0) return 0;
    int part = k_part(n, k, p->slots), parts = (k + part - 1) / part;
    return parts > 1 ? (size_t)parts * (size_t)(rows < SPLIT ? rows : (long long)SPLIT) * (size_t)n * 4 : 0;
}

cudaError_t lr_cu_multiply(lr_cu_math math, const lr_cu_product *p, const void *x, int m, void *work, cudaStream_t s)
{
    const lr_cu_weight *w = p->w;
    const lr_cu_slots *slots = p->slots;
    const cu_linear_format *f = format_of(w->type);
    lr_cu_form form = lr_cu_linear_form(math, w->type, m);
    bool vector = form == LR_CU_F32 || form == LR_CU_INT8;
    if (!f || m < 0 || p->n_weights < 1 || p->n_weights > LR_CU_JOINT || w->k % f->block || w->k % 8 ||
        (p->n_weights > 1 && vector) || (p->glu && (p->n_weights != 2 || w[0].n != w[1].n || p->add)))
        return cudaErrorInvalidValue;
    for (int i = 0; i < p->n_weights; i++)
        if (w[i].n <= 0 || w[i].k <= 0 || w[i].k != w->k || w[i].type != w->type) return cudaErrorInvalidValue;
    if (m == 0) return cudaSuccess;
    const float *scale = form == LR_CU_F16 || form == LR_CU_INT8
                             ? (const float *)((const char *)x + cu_packed_bytes(form, m, w->k))
                             : nullptr;
    mma_args a = {};
    int rows = slots ? slots->m * slots->n_used : m;
    if (slots) {
        if (m != (p->of_rows ? slots->m : rows)) return cudaErrorInvalidValue;
        a.at = {slots->pieces, p->of_rows ? slots->row : nullptr, slots->own};
    }
    for (int i = 0; i < p->n_weights; i++) {
        a.seg[i] = {
            (const uint8_t *)w[i].data, w[i].row_bytes, w[i].row_bytes * w[i].n, p->bias[i], p->y[i], w[i].n, a.n, 0};
        a.n += w[i].n;
    }
    if (vector) {
        vec_args v = {a.seg[0], x, scale, w->k, rows, p->add, a.at};
        return form == LR_CU_F32 ? f->ref(v, slots, s) : f->dot(v, slots, s);
    }
    a.n_seg = p->n_weights;
    a.x = (const uint16_t *)x;
    a.scale = scale;
    a.k = w->k;
    a.m = rows;
    a.part = k_part(a.n, a.k, slots);
    a.act = p->glu ? p->act : -1;
    a.add = p->add;
    return mma(f, a, slots, work, s);
}

size_t lr_cu_linear_work(lr_cu_math math, int type, int n, int k, int m)
{
    lr_cu_product p = {};
    p.n_weights = 1;
    p.w[0] = {nullptr, type, n, k, 0};
    return lr_cu_product_work(math, &p, m);
}

cudaError_t lr_cu_linear(lr_cu_math math, const lr_cu_weight *w, const void *x, int m, const float *bias, bool add,
                         float *y, void *work, cudaStream_t s)
{
    lr_cu_product p = {};
    p.n_weights = 1;
    p.w[0] = *w;
    p.bias[0] = bias;
    p.y[0] = y;
    p.add = add;
    return lr_cu_multiply(math, &p, x, m, work, s);
}

cudaError_t lr_cu_dequant(const lr_cu_weight *w, uint16_t *out, cudaStream_t s)
{
    const cu_linear_format *f = format_of(w->type);
    if (!f || w->n <= 0 || w->k <= 0 || w->k % 8 || w->k % f->block) return cudaErrorInvalidValue;
    return f->unpack(w, out, s);
}

} // extern "C"
