/* shared.c - part of llmrun.so and libllmrun.so only: stderr for archives that were compiled for programs.
 *
 * Debian's liblua5.4-cjson.a takes stderr to be at an address that is fixed when it is linked, which a shared object
 * can't have for a variable of the C library. The linker (--wrap=stderr) leads it here instead.
 */
#include <stdio.h>

extern FILE *__real_stderr; /* NOLINT(bugprone-reserved-identifier): the linker's names */
__attribute__((visibility("hidden"))) FILE *__wrap_stderr; /* NOLINT(bugprone-reserved-identifier) */

__attribute__((constructor)) static void take_stderr(void) { __wrap_stderr = __real_stderr; }
