/* encode_fit.c - weighted least squares over scales.
 *
 * For levels q given, the best scale (and minimum) is a linear problem in one or two unknowns; for a scale given, the
 * best levels are the nearest ones. So: start from several scales near the one that spans the values, and of each take
 * the best levels, then the best scale for them. The best of all is refined by the same two steps until it stands.
 */
#include "base/encode_fit.h"
#include <math.h>
#include <stdbool.h>

#define STEPS  8 /* refinements at most */
#define SHIFTS 9 /* starts below and above */

/* Best scale and minimum for levels q; false if the levels don't tell (all alike). */
static bool solve(int n, const float *x, const float *w, const float *q, float *scale, float *low)
{
    float sw = 0, sx = 0, sq = 0, sqq = 0, sqx = 0;
    for (int i = 0; i < n; i++) {
        sw += w[i];
        sx += w[i] * x[i];
        sq += w[i] * q[i];
        sqq += w[i] * q[i] * q[i];
        sqx += w[i] * q[i] * x[i];
    }
    float det = sw * sqq - sq * sq;
    if (!(det > 0)) return false;
    *scale = (sw * sqx - sq * sx) / det;
    *low = (sqq * sx - sq * sqx) / det;
    if (*low > 0) {
        *low = 0;
        *scale = sqq > 0 ? sqx / sqq : 0;
    }
    return *scale > 0;
}

/* Nearest levels for a scale and minimum; returns their error. */
static float assign(int n, const float *x, const float *w, float most, float scale, float low, float *q)
{
    float inv = 1.0f / scale, err = 0;
    for (int i = 0; i < n; i++) {
        float v = (x[i] - low) * inv;
        v = v > 0 ? v : 0;
        v = v < most ? v : most;
        q[i] = lr_nearest(v);
        float d = scale * q[i] + low - x[i];
        err += w[i] * d * d;
    }
    return err;
}

float lr_fit_range(int n, const float *x, const float *w, int most, float *scale, float *low)
{
    float lo = 0, hi = x[0], best, q[256];
    for (int i = 0; i < n; i++) {
        if (x[i] < lo) lo = x[i];
        if (x[i] > hi) hi = x[i];
    }
    *low = lo;
    *scale = (hi - lo) / (float)most;
    if (!(*scale > 0) || !isfinite(1.0f / *scale)) {
        *scale = 0;
        best = 0;
        for (int i = 0; i < n; i++) best += w[i] * (x[i] - lo) * (x[i] - lo);
        return best;
    }
    best = assign(n, x, w, (float)most, *scale, lo, q);
    for (int k = -SHIFTS; k <= SHIFTS; k++) {
        float s = (hi - lo) / ((float)most + 0.1f * (float)k), l;
        assign(n, x, w, (float)most, s, lo, q);
        for (int step = 0; step < STEPS && solve(n, x, w, q, &s, &l); step++) {
            float err = assign(n, x, w, (float)most, s, l, q);
            if (!(err < best)) break;
            best = err;
            *scale = s;
            *low = l;
        }
    }
    return best;
}

/* One start of the one-sided problem: levels for `inv`, then the best scale for them, while that gains. gain is what
 * the error falls by, sum(wqx)^2 / sum(wqq). */
static void improve(int n, const float *x, const float *w, float half, float inv, float *best, float *scale)
{
    for (int step = 0; step < STEPS; step++) {
        float sqx = 0, sqq = 0;
        for (int i = 0; i < n; i++) {
            float v = x[i] * inv;
            v = v > -half ? v : -half;
            v = v < half - 1 ? v : half - 1;
            v = lr_nearest(v);
            sqx += w[i] * v * x[i];
            sqq += w[i] * v * v;
        }
        if (!(sqq > 0) || !(sqx * sqx > *best * sqq)) return;
        *best = sqx * sqx / sqq;
        *scale = sqx / sqq;
        inv = 1.0f / *scale;
    }
}

/* The value furthest from 0. */
static float extreme(int n, const float *x)
{
    float m = 0;
    for (int i = 0; i < n; i++)
        if (fabsf(x[i]) > fabsf(m)) m = x[i];
    return m;
}

float lr_fit_signed(int n, const float *x, const float *w, int half)
{
    float m = extreme(n, x), best = 0, scale = 0;
    if (m == 0 || !isfinite((float)half / m)) return 0;
    for (int k = -SHIFTS; k <= SHIFTS; k++)
        improve(n, x, w, (float)half, -((float)half + 0.1f * (float)k) / m, &best, &scale);
    improve(n, x, w, (float)half, (float)(half - 1) / m, &best, &scale);
    return scale;
}

/* Without branches: no processor could foretell them. */
int lr_nearest_level(float v, const signed char *level, int n_levels)
{
    int i = 0;
    for (int s = n_levels / 2; s > 0; s /= 2) i += s * (2 * v > (float)(level[i + s - 1] + level[i + s]));
    return i;
}

/* The same for 16 levels, by the 15 midpoints between them. */
static int nearest_of_16(float v, const float *middle)
{
    int i = 8 * (v > middle[7]);
    i += 4 * (v > middle[i + 3]);
    i += 2 * (v > middle[i + 1]);
    return i + (v > middle[i]);
}

float lr_fit_levels(int n, const float *x, const float *w, const signed char *level)
{
    float m = extreme(n, x), best = 0, scale = 0, middle[15];
    if (m == 0 || !isfinite(127.0f / m)) return 0;
    for (int i = 0; i < 15; i++) middle[i] = 0.5f * (float)(level[i] + level[i + 1]);
    for (int side = 0; side < 2; side++) {
        float end = (float)level[side ? 15 : 0];
        for (int k = -2; k <= 2; k++) {
            float inv = (end + 4.0f * (float)k) / m;
            for (int step = 0; step < STEPS; step++) {
                float sqx = 0, sqq = 0;
                for (int i = 0; i < n; i++) {
                    float v = (float)level[nearest_of_16(x[i] * inv, middle)];
                    sqx += w[i] * v * x[i];
                    sqq += w[i] * v * v;
                }
                if (!(sqq > 0) || !(sqx * sqx > best * sqq)) break;
                best = sqx * sqx / sqq;
                scale = sqx / sqq;
                inv = 1.0f / scale;
            }
        }
    }
    return scale;
}
