/* encode_fit.h - scales for runs of up to 256 values, by weighted least squares. Used by the writers of block formats.
 */
#ifndef LR_BASE_ENCODE_FIT_H
#define LR_BASE_ENCODE_FIT_H

/* x[i] ~ scale * q[i] + low, q[i] in 0..most, low <= 0: values in n levels from a scale and a minimum. Looks through
 * ranges around that of the values and refits each; *scale >= 0. Returns the weighted squared error. */
float lr_fit_range(int n, const float *x, const float *w, int most, float *scale, float *low);

/* x[i] ~ scale * q[i], q[i] in -half..half-1. Returns the scale (of any sign, since one end reaches further). */
float lr_fit_signed(int n, const float *x, const float *w, int half);

/* x[i] ~ scale * level[q[i]], 16 levels, ascending. Returns the scale. */
float lr_fit_levels(int n, const float *x, const float *w, const signed char *level);

/* The number of the level nearest to v, of two the lower; n_levels: a power of two. */
int lr_nearest_level(float v, const signed char *level, int n_levels);

/* Nearest integer, ties to even, for |v| < 2^22. */
static inline float lr_nearest(float v) { return (v + 12582912.0f) - 12582912.0f; }

/* Nearest integer to v, within lo..hi; NaN gives lo. */
static inline int lr_level(float v, float lo, float hi)
{
    v = v > lo ? v : lo;
    v = v < hi ? v : hi;
    return (int)lr_nearest(v);
}

#endif
