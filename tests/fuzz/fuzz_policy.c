/* fuzz_policy.c - libFuzzer target: bytes decide what clients and a policy do, on the scripted model; every invariant
 * is checked after each step and every text against the model alone. See tests/unit/engine_trial.h.
 *
 *   scripts/fuzz policy
 */
#include "../unit/engine_trial.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    run_bytes(data, size);
    return 0;
}
