/* plugin.h - devices that need libraries which a machine may not have are shared objects, opened when asked for.
 *
 * libllmrun_cuda.so exports one function, llmrun_plugin. The program opens it by itself when "cuda:N" is asked for, or
 * with "auto" when it is found: at $LLMRUN_CUDA_PLUGIN, beside the program, in ../lib/llmrun of the program's folder,
 * or where the dynamic linker looks. Both sides carry LR_PLUGIN_ABI, a digest of the headers between them made at build
 * time, so a plugin of another build is refused, not called.
 */
#ifndef LR_BACKEND_PLUGIN_H
#define LR_BACKEND_PLUGIN_H
#include "backend/backend.h"

#ifndef LR_PLUGIN_ABI
#define LR_PLUGIN_ABI "none" /* CMake gives it to the sources that need it */
#endif

typedef struct lr_plugin {
    const char *abi; /* LR_PLUGIN_ABI of the plugin's build; stays the first member for good */
    /* Opens device `index` of the plugin's kind. LR_ENOTFOUND: no driver, no device, no device of that number.
     * LR_ENOMEM: the device is full. LR_EUNSUPPORTED: it can't do what cfg asks. */
    int (*open)(lr_backend **out, const lr_backend_config *cfg, int index, lr_error *err);
} lr_plugin;

typedef const lr_plugin *lr_plugin_entry(void); /* "llmrun_plugin" */

/* The backend of CUDA device `index`, through its plugin. LR_ENOTFOUND with the places looked at if there is none. */
int lr_backend_cuda(lr_backend **out, const lr_backend_config *cfg, int index, lr_error *err);

#endif
