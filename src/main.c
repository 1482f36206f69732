/* main.c - the llmrun program: its arguments go to the embedded Lua command line (lua/llmrun/cli/main.lua).
 *
 * Recursion is bounded by numbers of calls (Lua's 200 in C, nested patterns, JSON, grammars), which all fit in half a
 * mebibyte of stack. A smaller limit of it (ulimit -s) would end the program without a word, so it is raised, or named.
 */
#include "lua/lua_state.h"
#include <stdbool.h>
#include <stdio.h>
#include <sys/resource.h>

enum { LEAST = 1 << 20, GOOD = 8 << 20 }; /* bytes */

static bool has_stack(void)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_STACK, &r) != 0 || r.rlim_cur >= LEAST) return true;
    r.rlim_cur = r.rlim_max < GOOD ? r.rlim_max : GOOD;
    if (r.rlim_cur >= LEAST && setrlimit(RLIMIT_STACK, &r) == 0) return true; /* the system asks for it as it grows */
    fprintf(stderr, "llmrun: the stack may have %llu KiB (ulimit -s); at least %d are needed\n",
            (unsigned long long)r.rlim_cur >> 10, LEAST >> 10);
    return false;
}

int main(int argc, char **argv) { return has_stack() ? lr_lua_main(argc, argv) : 1; }
