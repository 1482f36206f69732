/* limits.c - prints what this machine can do at best, for scripts/limits; kernels/cpu/limits.h tells what is measured.
 *
 *   llmrun_limits [--json] [--threads N] [--gib N] [--seconds S]
 *
 * The buffer is 2 GiB: shared machines report caches of hundreds of MB. With --json, a line a thread count; a missing
 * instruction has no field.
 */
#include "cpu/limits.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void cpu_name(char *out, size_t cap)
{
    char line[512];
    FILE *f = fopen("/proc/cpuinfo", "r");
    snprintf(out, cap, "unknown");
    while (f && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) || !colon) continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(out, cap, "%s", colon + 2);
        for (char *c = out; *c; c++)
            if (*c == '"' || *c == '\\') *c = ' ';
        break;
    }
    if (f) fclose(f);
}

static double number(int argc, char **argv, int *i)
{
    char *end = NULL;
    double v = *i + 1 < argc ? strtod(argv[*i + 1], &end) : 0;
    if (!end || *end || !(v > 0)) {
        fprintf(stderr, "llmrun_limits: %s wants a number above 0\n", argv[*i]);
        exit(2);
    }
    ++*i;
    return v;
}

int main(int argc, char **argv)
{
    char cpu[256];
    int json = 0;
    long threads = sysconf(_SC_NPROCESSORS_ONLN);
    double gib = 2, seconds = 0.2;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--json"))
            json = 1;
        else if (!strcmp(argv[i], "--threads"))
            threads = (long)number(argc, argv, &i);
        else if (!strcmp(argv[i], "--gib"))
            gib = number(argc, argv, &i);
        else if (!strcmp(argv[i], "--seconds"))
            seconds = number(argc, argv, &i);
        else {
            fprintf(stderr, "usage: llmrun_limits [--json] [--threads N] [--gib N] [--seconds S]\n");
            return 2;
        }
    }
    cpu_name(cpu, sizeof cpu);
    if (!json) printf("%s\nlast-level cache %14.1f MB\n", cpu, (double)lr_last_cache() * 1e-6);
    if (!json && gib * 1073741824.0 < 2 * (double)lr_last_cache())
        printf("(the buffer is less than twice that: it may be read from there)\n");
    for (long n = 1; n <= threads; n = n < threads && n * 2 > threads ? threads : n * 2) {
        lr_limit l[32];
        int count = lr_limits((int)n, (size_t)(gib * 1073741824.0), seconds, NULL, l, 32);
        if (count == 0 || strcmp(l[0].name, "read") != 0) {
            fprintf(stderr, "llmrun_limits: can't have %.1f GiB of memory; try a smaller --gib\n", gib);
            return 1;
        }
        if (json)
            printf("{\"cpu\":\"%s\",\"last_cache\":%zu,\"threads\":%ld,\"read_gbps\":%.2f", cpu, lr_last_cache(), n,
                   l[0].value);
        else
            printf("%ld thread%s\n  %-18s %10.1f GB/s\n", n, n > 1 ? "s" : "", "read", l[0].value);
        for (int i = 1; i < count; i++)
            if (json)
                printf(",\"%s_%s\":%.1f", l[i].name, l[i].unit[1] == 'F' ? "gflops" : "gops", l[i].value);
            else
                printf("  %-18s %10.1f %s\n", l[i].name, l[i].value, l[i].unit);
        if (json) printf("}\n");
        fflush(stdout);
    }
    return 0;
}
