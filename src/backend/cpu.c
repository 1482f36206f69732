/* cpu.c - the CPU backend: weights, KV storage, the table of operations. Plans are in cpu_plan.c and cpu_run.c.
 *
 * Weights stay in the mapped file; the ones of matrix products are repacked once, in parallel, for the kernels. KV
 * blocks are contiguous over all layers of their group, so copying or saving a block is one memcpy.
 */
#define _GNU_SOURCE
#include "backend/backend_int.h"
#include "backend/cpu_int.h"
#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static cpu_backend *self(const lr_backend *b) { return (cpu_backend *)b; }

/* ---- weights ---- */

typedef struct pack_job {
    const lr_weight *w;
    int n_strips;
    atomic_int next;
} pack_job;

static void pack_thread(void *arg, int thread, int n_threads)
{
    (void)thread;
    (void)n_threads;
    pack_job *j = arg;
    enum { CHUNK = 16 };
    for (int s; (s = atomic_fetch_add(&j->next, CHUNK)) < j->n_strips;) {
        int e = s + CHUNK < j->n_strips ? s + CHUNK : j->n_strips;
        /* strips are numbered through all matrices; each begins with a strip of its own */
        for (const int per = (j->w->n + LR_STRIP - 1) / LR_STRIP; s < e;) {
            int mat = s / per, s1 = e - mat * per < per ? e - mat * per : per;
            lr_pack_strips(j->w->type, j->w->rows + (size_t)mat * (size_t)j->w->n * j->w->row_bytes, j->w->row_bytes,
                           j->w->n, j->w->k, (char *)j->w->packed + (size_t)mat * j->w->mat_bytes, s - mat * per, s1);
            s = mat * per + s1;
        }
    }
}

static int prepare_linear(cpu_backend *be, lr_weight *w, lr_error *err)
{
    size_t strip = be->exact ? 0 : lr_pack_strip_bytes(w->type, w->k), total;
    w->gemm = (lr_gemm_w){w->type, w->n, w->k, false, w->row_bytes, w->rows, NULL, 0, 0};
    if (!strip) {
        if (!be->exact && w->type != LR_F32 && w->type != LR_F16 && w->type != LR_BF16)
            return lr_fail(err, LR_EUNSUPPORTED, "type %s cannot be used in a matrix product", lr_dtype_name(w->type));
        return 0;
    }
    int n_strips = (w->n + LR_STRIP - 1) / LR_STRIP;
    w->mat_bytes = strip * (size_t)n_strips;
    n_strips *= w->n_mats;
    if (!lr_mul(strip, (size_t)n_strips, &total) || !(w->packed = lr_slab_alloc(&be->slabs, total)))
        return lr_fail(err, LR_ENOMEM, "no memory for %d x %d x %d packed weights", w->n_mats, w->n, w->k);
    w->bytes = total;
    pack_job job = {.w = w, .n_strips = n_strips};
    lr_pool_run(be->pool, pack_thread, &job);
    w->gemm.packed = true;
    w->gemm.strip_bytes = strip;
    w->gemm.data = w->packed;
    return 0;
}

static int prepare_vector(lr_weight *w, lr_error *err)
{
    w->bytes = (size_t)w->n * (size_t)w->k * sizeof(float);
    w->vec = lr_alloc_aligned(w->bytes);
    if (!w->vec) return lr_fail(err, LR_ENOMEM, "no memory for %d values", w->k);
    for (int i = 0; i < w->n; i++)
        lr_dtype_to_f32(w->type, w->rows + (size_t)i * w->row_bytes, w->vec + (size_t)i * (size_t)w->k, (size_t)w->k);
    return 0;
}

static void cpu_weight_free(lr_backend *b, lr_weight *w)
{
    if (!w) return;
    self(b)->bytes_weights -= w->bytes;
    lr_slab_free(&self(b)->slabs, w->packed, w->bytes);
    lr_free_aligned(w->vec);
    lr_free(w);
}

static bool cpu_weight_keeps(const lr_backend *b, const lr_weight *w)
{
    (void)b;
    return !w->packed && !w->vec;
}

static int cpu_weight_new(lr_backend *b, const lr_tensor *t, bool linear, bool embed, lr_weight **out, lr_error *err)
{
    cpu_backend *be = self(b);
    int block = lr_dtype_block(t->type);
    if (!block) return lr_fail(err, LR_EUNSUPPORTED, "unknown type %d", t->type);
    int64_t k = t->ne[0], n = 1;
    for (int i = 1; i < t->n_dims; i++) n *= t->ne[i];
    if (k < 1 || n < 1 || k > 1 << 24 || n > 1 << 26 || k % block)
        return lr_fail(err, LR_ESHAPE, "%lld x %lld values of type %s", (long long)n, (long long)k,
                       lr_dtype_name(t->type));
    lr_weight *w = lr_calloc(1, sizeof *w);
    if (!w) return lr_fail(err, LR_ENOMEM, "no memory for a weight");
    w->type = t->type;
    w->n_mats = linear && t->n_dims == 3 ? (int)t->ne[2] : 1;
    w->n = (int)(n / w->n_mats);
    w->k = (int)k;
    w->rows = t->data;
    w->row_bytes = (size_t)(k / block) * (size_t)lr_dtype_bytes(t->type);
    int rc = linear ? prepare_linear(be, w, err) : embed ? 0 : prepare_vector(w, err);
    be->bytes_weights += w->bytes;
    if (rc) {
        cpu_weight_free(b, w);
        return rc;
    }
    *out = w;
    return 0;
}

/* ---- KV ---- */

static void cpu_kv_free(lr_backend *b, lr_kv_store *kv)
{
    if (!kv) return;
    for (int g = 0; g < LR_KV_GROUPS; g++) {
        size_t bytes = (size_t)kv->n_blocks[g] * kv->block_bytes[g];
        if (kv->base[g]) {
            munmap(kv->base[g], bytes);
            self(b)->bytes_kv -= bytes;
        }
    }
    lr_free(kv->layers);
    lr_free(kv->offset);
    lr_free(kv->part);
    lr_free(kv->k_types);
    lr_free(kv->v_types);
    lr_free(kv);
}

static int map_group(cpu_backend *be, lr_kv_store *kv, int g, lr_error *err)
{
    size_t bytes;
    if (!kv->n_blocks[g] || !kv->block_bytes[g]) return 0;
    if (!lr_mul((size_t)kv->n_blocks[g], kv->block_bytes[g], &bytes))
        return lr_fail(err, LR_EINVAL, "%d KV blocks are too many", kv->n_blocks[g]);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return lr_fail(err, LR_ENOMEM, "no memory for %d KV blocks (%zu MiB)", kv->n_blocks[g], bytes >> 20);
    madvise(p, bytes, MADV_HUGEPAGE); /* blocks are scattered: fewer TLB misses; a refusal does no harm */
    kv->base[g] = p;
    be->bytes_kv += bytes;
    return 0;
}

static void cpu_observe(lr_backend *b, lr_weight *w, lr_observed *seen)
{
    self(b)->observed += (seen != NULL) - (w->seen != NULL);
    w->seen = seen;
}

static int cpu_kv_new(lr_backend *b, const lr_kv_spec *s, lr_kv_store **out, lr_error *err)
{
    if (s->block_size < 1 || s->block_size > 256)
        return lr_fail(err, LR_EINVAL, "KV block size %d is not in 1..256", s->block_size);
    int bad = lr_kv_type_good(s->type) ? s->value_type : s->type;
    if (s->type == LR_KV_FP8) bad = s->type;
    if (!lr_kv_type_good(bad) || bad == LR_KV_FP8)
        return lr_fail(err, LR_EUNSUPPORTED, "KV type %s is not one of the CPU's: f32, f16, bf16, q8_0, q4_0",
                       lr_kv_type_text(bad) ? lr_kv_type_text(bad) : "?");
    lr_kv_store *kv = lr_calloc(1, sizeof *kv);
    if (!kv) return lr_fail(err, LR_ENOMEM, "no memory for the KV store");
    size_t n = (size_t)s->n_layers;
    int rc = 0;
    kv->layers = lr_calloc(n, sizeof *kv->layers);
    kv->offset = lr_calloc(n, sizeof *kv->offset);
    kv->part = lr_calloc(n, sizeof *kv->part);
    kv->k_types = lr_calloc(n, sizeof *kv->k_types);
    kv->v_types = lr_calloc(n, sizeof *kv->v_types);
    if (!kv->layers || !kv->offset || !kv->part || !kv->k_types || !kv->v_types)
        rc = lr_fail(err, LR_ENOMEM, "no memory for the KV store");
    kv->n_layers = s->n_layers;
    kv->block_size = s->block_size;
    for (int i = 0; i < s->n_layers && !rc; i++) {
        const lr_kv_layer *l = &s->layers[i];
        int few = s->type == LR_Q8_0 || s->type == LR_Q4_0 ? s->type : s->value_type;
        if ((few == LR_Q8_0 || few == LR_Q4_0) && l->head_dim % 32)
            rc = lr_fail(err, LR_EUNSUPPORTED, "KV type %s needs heads of a multiple of 32, not %d", lr_dtype_name(few),
                         l->head_dim);
        kv->layers[i] = *l;
        kv->k_types[i] = lr_kv_layer_type(s->type, s->first_layer + i);
        kv->v_types[i] = lr_kv_layer_type(s->value_type, s->first_layer + i);
        kv->part[i] = lr_kv_part_bytes(s, i, true);
        kv->offset[i] = kv->block_bytes[l->group];
        kv->block_bytes[l->group] += kv->part[i] + lr_kv_part_bytes(s, i, false);
    }
    for (int g = 0; g < LR_KV_GROUPS && !rc; g++) {
        kv->n_blocks[g] = s->n_blocks[g];
        rc = map_group(self(b), kv, g, err);
    }
    if (rc) {
        cpu_kv_free(b, kv);
        return rc;
    }
    *out = kv;
    return 0;
}

static char *block_at(const lr_kv_store *kv, int g, int block)
{
    return kv->base[g] + (size_t)block * kv->block_bytes[g];
}

static void cpu_kv_copy(lr_backend *b, lr_kv_store *kv, int g, int dst, int src)
{
    (void)b;
    memcpy(block_at(kv, g, dst), block_at(kv, g, src), kv->block_bytes[g]);
}

static size_t cpu_kv_block_bytes(const lr_backend *b, const lr_kv_store *kv, int g)
{
    (void)b;
    return kv->block_bytes[g];
}

static void cpu_kv_read(lr_backend *b, lr_kv_store *kv, int g, int block, void *dst)
{
    (void)b;
    memcpy(dst, block_at(kv, g, block), kv->block_bytes[g]);
}

static void cpu_kv_write(lr_backend *b, lr_kv_store *kv, int g, int block, const void *src)
{
    (void)b;
    memcpy(block_at(kv, g, block), src, kv->block_bytes[g]);
}

/* ---- the backend ---- */

static void cpu_free(lr_backend *b)
{
    lr_pool_free(self(b)->pool);
    lr_free(b);
}

static void cpu_memory(const lr_backend *b, size_t *weights, size_t *kv, size_t *work)
{
    *weights = self(b)->bytes_weights;
    *kv = self(b)->bytes_kv;
    *work = self(b)->bytes_work;
}

static const char *cpu_describe(const lr_backend *b) { return self(b)->text; }

static void cpu_parallel(lr_backend *b, lr_pool_fn fn, void *arg) { lr_pool_run(self(b)->pool, fn, arg); }
static int cpu_threads(const lr_backend *b) { return lr_pool_threads(self(b)->pool); }

static const lr_backend_ops cpu_ops = {
    .name = "cpu",
    .free = cpu_free,
    .echoes = true,
    .features = true,
    .weight_new = cpu_weight_new,
    .weight_free = cpu_weight_free,
    .weight_keeps = cpu_weight_keeps,
    .observe = cpu_observe,
    .kv_new = cpu_kv_new,
    .kv_free = cpu_kv_free,
    .kv_copy = cpu_kv_copy,
    .kv_block_bytes = cpu_kv_block_bytes,
    .kv_read = cpu_kv_read,
    .kv_write = cpu_kv_write,
    .compile = lr_cpu_compile,
    .plan_free = lr_cpu_plan_free,
    .peaks = lr_cpu_plan_peaks,
    .run = lr_cpu_run,
    .lora_new = lr_cpu_lora_new,
    .lora_free = lr_cpu_lora_free,
    .memory = cpu_memory,
    .describe = cpu_describe,
    .parallel = cpu_parallel,
    .threads = cpu_threads,
};

static void list_tables(char *buf, size_t cap)
{
    size_t n = 0;
    buf[0] = 0;
    for (const lr_cpu_kernels *const *t = lr_cpu_tables(); *t && n < cap; t++)
        if ((*t)->supported()) n += (size_t)snprintf(buf + n, cap - n, "%s%s", n ? ", " : "", (*t)->name);
}

int lr_backend_cpu(lr_backend **out, const lr_backend_config *cfg, lr_error *err)
{
    const char *env = getenv("LLMRUN_ISA"), *isa = env && *env ? env : cfg->isa;
    if (cfg->compute == LR_COMPUTE_F32) isa = "scalar";
    const lr_cpu_kernels *k = lr_cpu_table(isa);
    if (!k) {
        char known[100];
        list_tables(known, sizeof known);
        return lr_fail(err, LR_EINVAL, "instruction set '%s' is not one of those that this machine runs: %s", isa,
                       known);
    }
    if (cfg->compute == LR_COMPUTE_BF16 && !k->bf16)
        return lr_fail(err, LR_EUNSUPPORTED, "bfloat16 products need a CPU with AMX; the '%s' kernels have none",
                       k->name);
    cpu_backend *be = lr_calloc(1, sizeof *be);
    if (!be) return lr_fail(err, LR_ENOMEM, "no memory for the CPU backend");
    be->base.ops = &cpu_ops;
    be->k = k;
    be->exact = cfg->compute == LR_COMPUTE_F32;
    be->bf16 = cfg->compute == LR_COMPUTE_BF16;
    be->fine = (cfg->compute == LR_COMPUTE_FAST || cfg->compute == LR_COMPUTE_LOOSE) && k->fine;
    int rc = lr_pool_new(&be->pool, cfg->threads, err);
    if (rc) {
        lr_free(be);
        return rc;
    }
    int n = lr_pool_threads(be->pool);
    snprintf(be->text, sizeof be->text, "cpu %s%s, %d thread%s", k->name,
             be->exact  ? " float32"
             : be->bf16 ? " bfloat16"
                        : "",
             n, n == 1 ? "" : "s");
    *out = &be->base;
    return 0;
}
