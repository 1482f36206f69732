/* backend_int.h - the devices that lr_backend_new knows. */
#ifndef LR_BACKEND_BACKEND_INT_H
#define LR_BACKEND_BACKEND_INT_H
#include "backend/backend.h"

int lr_backend_cpu(lr_backend **out, const lr_backend_config *cfg, lr_error *err);

#endif
