/* backend.c - finds the backend of a device name. */
#include "backend/backend.h"
#include "backend/backend_int.h"
#include "cpu/cpu.h"
#include <string.h>

int lr_backend_new(lr_backend **out, const lr_backend_config *cfg, lr_error *err)
{
    const char *device = cfg->device ? cfg->device : "auto";
    if (strcmp(device, "cpu") == 0 || strcmp(device, "auto") == 0) return lr_backend_cpu(out, cfg, err);
    return lr_fail(err, LR_EINVAL, "device '%s' is not known: use \"cpu\" or \"auto\"", device);
}

void lr_backend_free(lr_backend *b)
{
    if (b) b->ops->free(b);
}

bool lr_kv_type_good(int type)
{
    return type == LR_F32 || type == LR_F16 || type == LR_BF16 || type == LR_Q8_0 || type == LR_Q4_0;
}

int lr_kv_layer_type(int type, int layer) { return layer == 0 && (type == LR_Q8_0 || type == LR_Q4_0) ? LR_F16 : type; }

size_t lr_kv_part_bytes(const lr_kv_spec *s, int layer, bool keys)
{
    const lr_kv_layer *l = &s->layers[layer];
    int type = lr_kv_layer_type(keys ? s->type : s->value_type, layer);
    return (lr_cpu_kv_bytes(type, keys, l->n_kv_heads, l->head_dim, s->block_size) + 63) & ~(size_t)63;
}

size_t lr_kv_spec_block_bytes(const lr_kv_spec *s, int group)
{
    size_t n = 0;
    for (int i = 0; i < s->n_layers; i++)
        if (s->layers[i].group == group) n += lr_kv_part_bytes(s, i, true) + lr_kv_part_bytes(s, i, false);
    return n;
}
