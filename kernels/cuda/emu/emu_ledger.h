/* emu_ledger.h - what the emulated device counts: bytes of its memory in use, and things that are asked for and have to
 * be given back (device and pinned memory, streams, events, captured graphs).
 *
 * EMU_LEDGER names the file it is kept in, made at the first use; all processes that name the same one are on the same
 * device, and whoever reads and writes the file (from Lua, say: four int64 at its beginning) sees what is left, and may
 * have the so-many-th request refused. Without it each process has a ledger of its own.
 */
#ifndef EMU_LEDGER_H
#define EMU_LEDGER_H
#include <stddef.h>
#include <stdint.h>

enum { EMU_DEVICES_MAX = 8, EMU_PROCESSES = 32 };

typedef struct emu_process {
    int64_t pid, live, used[EMU_DEVICES_MAX];
} emu_process;

typedef struct emu_ledger {
    int64_t refuse;  /* so many requests from now on, the last is refused as a full device does; 0: none */
    int64_t asked;   /* requests so far */
    int64_t refused; /* of these */
    int64_t live;    /* things not given back, of living processes */
    emu_process process[EMU_PROCESSES];
} emu_ledger;

#ifdef __cplusplus
/* Takes n bytes of a device that has `all`; device < 0: another thing than its memory. False: refused. */
bool emu_ledger_take(int device, size_t n, size_t all);
void emu_ledger_give(int device, size_t n);
size_t emu_ledger_used(int device);
#endif
#endif
