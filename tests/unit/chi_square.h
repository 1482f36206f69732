/* chi_square.h - whether numbers that were drawn have the distribution they should have. */
#ifndef LR_TESTS_CHI_SQUARE_H
#define LR_TESTS_CHI_SQUARE_H
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

/* Upper 0.1 % points of chi-square for 1 .. 80 degrees of freedom (Wilson and Hilferty's approximation). */
static inline double chi_square_limit(int df)
{
    double z = 3.0902, v = 2.0 / (9.0 * df), c = 1 - v + z * sqrt(v);
    return df * c * c * c;
}

/* Of n that were drawn; *df: degrees of freedom. What has no chance must not have come. */
static inline double chi_square(const int *seen, const double *p, int cells, int n, int *df)
{
    double x = 0;
    *df = -1;
    for (int i = 0; i < cells; i++) {
        double want = p[i] * n;
        if (p[i] <= 0) assert_int_equal(seen[i], 0);
        if (p[i] <= 0) continue;
        x += (seen[i] - want) * (seen[i] - want) / want;
        ++*df;
    }
    return x;
}

#endif
