/* place.h - where the shared objects that come with this one (plugins, carriers) may lie.
 *
 * In the folder of the program, and in the library folder of an installed tree beside it; where this code is itself in
 * a shared object (a Lua module, the C library), also in its folder, and in the library folder of the tree it lies in.
 */
#ifndef LR_BASE_PLACE_H
#define LR_BASE_PLACE_H
#include <stdbool.h>
#include <stddef.h>

/* The i-th such folder (0, 1, ...) into buf, without a slash at its end; false behind the last one. A folder that does
 * not apply is "". */
bool lr_place_folder(int i, char *buf, size_t cap);

#endif
