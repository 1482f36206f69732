/* backend_int.h - the devices that lr_backend_new knows. */
#ifndef LR_BACKEND_BACKEND_INT_H
#define LR_BACKEND_BACKEND_INT_H
#include "backend/backend.h"

int lr_backend_cpu(lr_backend **out, const lr_backend_config *cfg, lr_error *err);
/* Bytes of a layer's keys, or values, in a block: whole cache lines. */
size_t lr_kv_part_bytes(const lr_kv_spec *, int layer, bool keys);

#endif
