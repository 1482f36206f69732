// test.h - what the kernel tests share: device arrays, running, comparing. Only the runtime API, so that the same tests
// run on the emulation and on a device.
#pragma once
extern "C" {
#include "base/act.h"
#include "base/dtype.h"
}
#include "cuda/kernels.h"
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <vector>

extern int passed, failed;
extern bool small_only; // under the thread sanitizer: fewer shapes

void verdict(bool ok, const std::string &name, const std::string &why);

// Deterministic numbers.
struct rnd {
    uint64_t s;
    explicit rnd(uint64_t seed) : s(seed * 0x9e3779b97f4a7c15u + 1) {}
    uint32_t u32()
    {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        return (uint32_t)(s >> 32);
    }
    int below(int n) { return (int)(u32() % (unsigned)n); }
    float uniform() { return (float)(int32_t)u32() * 0x1p-31f; } // -1 .. 1
    float normal() { return (uniform() + uniform() + uniform() + uniform()) * 0.866f; }
};
std::vector<float> normals(rnd &r, size_t n, float scale = 1);

// An array on the device, `pad` unused bytes (0xff) behind it.
template <class T> struct dev {
    T *p = nullptr;
    size_t n = 0;
    explicit dev(size_t count, size_t pad = 0) : n(count)
    {
        if (cudaMalloc((void **)&p, n * sizeof(T) + pad)) abort();
        cudaMemset(p, 0xff, n * sizeof(T) + pad);
    }
    explicit dev(const std::vector<T> &v, size_t pad = 0) : dev(v.size(), pad) { set(v); }
    dev(const dev &) = delete;
    dev &operator=(const dev &) = delete;
    ~dev() { cudaFree(p); }
    void set(const std::vector<T> &v) { cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice); }
    std::vector<T> get() const
    {
        std::vector<T> v(n);
        if (n) cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost);
        return v;
    }
    operator T *() const { return p; }
};

// Runs a launcher to its end; false (and a failure) where it says an error.
template <class F> static bool run(const std::string &name, F f)
{
    cudaError_t e = f();
    if (!e) e = cudaDeviceSynchronize();
    if (e) verdict(false, name, cudaGetErrorString(e));
    return e == cudaSuccess;
}
// A launcher must refuse.
template <class F> static void refuses(const std::string &name, F f)
{
    cudaError_t e = f();
    verdict(e == cudaErrorInvalidValue, name, "not refused");
}

// |got - want| <= tol * size(i); size null: 1 + |want|.
void near(const std::string &name, const std::vector<float> &got, const std::vector<double> &want, double tol,
          const std::vector<double> *size = nullptr);
// The same bytes.
void same(const std::string &name, const void *a, const void *b, size_t bytes);

std::string fmt(const char *f, ...) __attribute__((format(printf, 1, 2)));

float round_f16(float f);
float round_bf16(float f);
// Random blocks of a format: n rows of k values, with sane scales.
std::vector<uint8_t> random_blocks(rnd &r, int type, int n, int k);
extern const std::vector<int> all_types;

void test_rows();
void test_linear();
void test_kv();
void test_attn();
void test_sample();
void test_moe();
void test_adapt();
