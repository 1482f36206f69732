// test_kv.h - a paged store for tests, and how its bytes are read.
#pragma once
#include "test.h"

struct kv_store {
    int type, v_type, heads, dim, block_size;
    size_t stride, v_stride; // a little more than a block, to see that it is respected
    dev<uint8_t> k, v;
    kv_store(int t, int vt, int h, int d, int bs, int blocks)
        : type(t), v_type(vt), heads(h), dim(d), block_size(bs), stride(lr_cu_kv_bytes(t, h, d, bs) + 32),
          v_stride(lr_cu_kv_bytes(vt, h, d, bs) + 32), k(stride * blocks), v(v_stride * blocks)
    {
    }
    lr_cu_kv view() const { return {{k, stride, type}, {v, v_stride, v_type}, heads, dim, block_size, nullptr}; }
};

// What the store has of a key (values: `of_v`), in the basis that it keeps.
double kv_read(const kv_store &kv, bool of_v, const std::vector<uint8_t> &bytes, int block, int head, int slot, int i);
// All heads of dim values, turned.
template <class T> std::vector<T> turned(std::vector<T> x, int dim)
{
    int block = dim & -dim;
    for (size_t b = 0; b < x.size(); b += block) {
        for (int h = 1; h < block; h *= 2)
            for (int i = 0; i < block; i++) {
                if (i & h) continue;
                T lo = x[b + i], hi = x[b + i + h];
                x[b + i] = lo + hi;
                x[b + i + h] = lo - hi;
            }
        for (int i = 0; i < block; i++) x[b + i] *= (T)1 / (T)sqrtf((float)block);
    }
    return x;
}
// What a type keeps of v; group: the 32 values that share a scale (integers).
double kv_round(int type, double v, const std::vector<float> &group);
