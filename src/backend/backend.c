/* backend.c - finds the backend of a device name. */
#include "backend/backend.h"
#include "backend/backend_int.h"
#include "backend/plugin.h"
#include "cpu/cpu.h"
#include <stdlib.h>
#include <string.h>

/* "cuda" and "cuda:0" are 0, "cuda:12" is 12; -1 = something else. */
static int cuda_index(const char *device)
{
    if (strncmp(device, "cuda", 4) != 0) return -1;
    if (!device[4]) return 0;
    size_t digits = strspn(device + 5, "0123456789");
    return device[4] == ':' && digits > 0 && digits < 5 && !device[5 + digits] ? atoi(device + 5) : -1;
}

/* What only the CPU has is asked for. */
static bool wants_cpu(const lr_backend_config *cfg) { return cfg->isa || cfg->compute == LR_COMPUTE_INT8; }

int lr_backend_new(lr_backend **out, const lr_backend_config *cfg, lr_error *err)
{
    const char *device = cfg->device ? cfg->device : "auto", *env = getenv("LLMRUN_DEVICE");
    if (strcmp(device, "auto") == 0 && env && *env) device = env;
    int index = cuda_index(device);
    if (index >= 0) return lr_backend_cuda(out, cfg, index, err);
    if (strcmp(device, "auto") == 0 && !wants_cpu(cfg) && lr_backend_cuda(out, cfg, 0, err) == 0) return 0;
    if (strcmp(device, "cpu") == 0 || strcmp(device, "auto") == 0) return lr_backend_cpu(out, cfg, err);
    return lr_fail(err, LR_EINVAL, "device '%s' is not known: use \"cpu\", \"cuda:N\" or \"auto\"", device);
}

void lr_backend_free(lr_backend *b)
{
    if (b) b->ops->free(b);
}

bool lr_kv_type_good(int type)
{
    return type == LR_F32 || type == LR_F16 || type == LR_BF16 || type == LR_Q8_0 || type == LR_Q4_0 ||
           type == LR_KV_FP8;
}

int lr_kv_type_parse(const char *name) { return strcmp(name, "fp8") == 0 ? LR_KV_FP8 : lr_dtype_parse(name); }
const char *lr_kv_type_text(int type) { return type == LR_KV_FP8 ? "fp8" : lr_dtype_name(type); }

int lr_kv_layer_type(int type, int layer) { return layer == 0 && (type == LR_Q8_0 || type == LR_Q4_0) ? LR_F16 : type; }

size_t lr_kv_part_bytes(const lr_kv_spec *s, int layer, bool keys)
{
    const lr_kv_layer *l = &s->layers[layer];
    int type = lr_kv_layer_type(keys ? s->type : s->value_type, s->first_layer + layer);
    if (type == LR_KV_FP8) return ((size_t)l->n_kv_heads * l->head_dim * s->block_size + 63) & ~(size_t)63;
    return (lr_cpu_kv_bytes(type, keys, l->n_kv_heads, l->head_dim, s->block_size) + 63) & ~(size_t)63;
}

size_t lr_kv_spec_block_bytes(const lr_kv_spec *s, int group)
{
    size_t n = 0;
    for (int i = 0; i < s->n_layers; i++)
        if (s->layers[i].group == group) n += lr_kv_part_bytes(s, i, true) + lr_kv_part_bytes(s, i, false);
    return n;
}
