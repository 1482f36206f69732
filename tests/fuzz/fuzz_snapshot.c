/* fuzz_snapshot.c - libFuzzer target: any bytes as a saved sequence; see snapshot.h.
 *
 *   scripts/fuzz snapshot
 */
#include "snapshot.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    snapshot_try(data, size);
    return 0;
}
