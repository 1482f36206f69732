/* attn_put.h - writing a row's keys and values to their KV slot, whatever the instruction set.
 *
 * For files that have put_group8, put_group4 (a group of integers and its scale), put_plain and turn of their own.
 */
#include "cpu/attn_int.h"
#include <string.h>

/* Writes a head's row x - center. */
static void put_turned(const float *x, const float *center, int head_dim, int type, lr_kv_slot to)
{
    float t[LR_KV_TURN];
    for (int d = 0; d < head_dim; d += LR_KV_TURN) {
        int n = head_dim - d < LR_KV_TURN ? head_dim - d : LR_KV_TURN;
        memcpy(t, x + d, (size_t)n * sizeof(float));
        for (int i = 0; center && i < n; i++) t[i] -= center[d + i];
        turn(t, n, lr_kv_turn_block(head_dim));
        for (int g = 0; g < n; g += LR_KV_GROUP, lr_kv_next_group(&to, type)) {
            if (type == LR_Q4_0)
                put_group4(t + g, to);
            else
                put_group8(t + g, n - g < LR_KV_GROUP ? n - g : LR_KV_GROUP, to);
        }
    }
}

static void kv_put(const float *key, const float *val, const float *center, int n_kv_heads, int head_dim, int k_type,
                   int v_type, int block_size, int slot, char *k, char *v)
{
    size_t t = (size_t)block_size, dim = (size_t)head_dim;
    for (int h = 0; h < n_kv_heads; h++, key += dim, val += dim) {
        if (lr_kv_turned(k_type))
            put_turned(key, center ? center + h * dim : NULL, head_dim, k_type,
                       lr_kv_key_slot(k, k_type, n_kv_heads, head_dim, block_size, h, slot));
        else
            put_plain(key, head_dim, k_type, k, h * dim * t + slot, t);
        if (lr_kv_turned(v_type))
            put_turned(val, NULL, head_dim, v_type,
                       lr_kv_value_slot(v, v_type, n_kv_heads, head_dim, block_size, h, slot));
        else
            put_plain(val, head_dim, v_type, v, (h * t + slot) * dim, 1);
    }
}
