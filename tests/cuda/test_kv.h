// test_kv.h - a paged store for tests, and how its bytes are read.
#pragma once
#include "test.h"

struct kv_store {
    int type, heads, dim, block_size;
    size_t stride; // a little more than a block, to see that it is respected
    dev<uint8_t> k, v;
    kv_store(int t, int h, int d, int bs, int blocks)
        : type(t), heads(h), dim(d), block_size(bs), stride(lr_cu_kv_bytes(t, h, d, bs) + 32), k(stride * blocks),
          v(stride * blocks)
    {
    }
    lr_cu_kv view() const { return {{k, stride, type}, {v, stride, type}, heads, dim, block_size}; }
};

double kv_read(const kv_store &kv, const std::vector<uint8_t> &bytes, int block, int head, int slot, int i);
// What a type keeps of v; group: the 32 values that share a scale (Q8_0).
double kv_round(int type, double v, const std::vector<float> &group);
