/* kv_center.h - the mean of a key bias over positions, for backends whose KV rounds to few bits: see cpu_center.c. */
#ifndef LR_BACKEND_KV_CENTER_H
#define LR_BACKEND_KV_CENTER_H
#include <math.h>
#include <stdbool.h>

enum { LR_KV_CENTER_SPAN = 8192 };

/* One head's bias b, turned by RoPE at each of the first positions -> their mean. freq: (n_rot / 2) of the rotation. */
static inline void lr_kv_center_turn(const double *freq, int n_rot, bool interleaved, float attn_scale, float *b)
{
    const double span = LR_KV_CENTER_SPAN;
    for (int i = 0; i < n_rot / 2; i++) {
        float *x = b + (interleaved ? 2 * i : i), *y = interleaved ? x + 1 : x + n_rot / 2;
        double a = freq[i] / 2, s = sin(a), mean = fabs(s) > 1e-12 ? sin(span * a) / (span * s) : 1;
        double c = mean * attn_scale * cos((span - 1) * a), d = mean * attn_scale * sin((span - 1) * a);
        double x0 = *x, y0 = *y;
        *x = (float)(x0 * c - y0 * d);
        *y = (float)(x0 * d + y0 * c);
    }
}

#endif
