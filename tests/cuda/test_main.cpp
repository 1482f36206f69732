// test_main.cpp - the kernel tests: test_main [GROUP...]; ends with "N passed, M failed". Exit status 77: no device.
#include "test.h"
#include <stdarg.h>

int passed, failed;
bool small_only;

std::string fmt(const char *f, ...)
{
    char s[256];
    va_list ap;
    va_start(ap, f);
    vsnprintf(s, sizeof s, f, ap);
    va_end(ap);
    return s;
}

void verdict(bool ok, const std::string &name, const std::string &why)
{
    ok ? passed++ : failed++;
    if (!ok) printf("FAIL %s: %s\n", name.c_str(), why.c_str());
}

void near(const std::string &name, const std::vector<float> &got, const std::vector<double> &want, double tol,
          const std::vector<double> *size)
{
    if (got.size() != want.size()) return verdict(false, name, "sizes differ");
    double worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < got.size(); i++) {
        double d = fabs((double)got[i] - want[i]) / (size ? (*size)[i] + 1e-30 : 1 + fabs(want[i]));
        if (!(d <= 1e30)) d = 1e30;
        if (d > worst) worst = d, at = i;
    }
    verdict(worst <= tol, name,
            fmt("element %zu of %zu: got %.9g, want %.9g (off by %.2g, %.2g allowed)", at, got.size(),
                got.empty() ? 0.0 : (double)got[at], got.empty() ? 0.0 : want[at], worst, tol));
}

void same(const std::string &name, const void *a, const void *b, size_t bytes)
{
    size_t i = 0;
    while (i < bytes && ((const char *)a)[i] == ((const char *)b)[i]) i++;
    verdict(i == bytes, name, fmt("byte %zu of %zu differs", i, bytes));
}

std::vector<float> normals(rnd &r, size_t n, float scale)
{
    std::vector<float> v(n);
    for (auto &x : v) x = r.normal() * scale;
    return v;
}

float round_f16(float f) { return lr_f16_to_f32(lr_f32_to_f16(f)); }
float round_bf16(float f) { return lr_bf16_to_f32(lr_f32_to_bf16(f)); }

const std::vector<int> all_types = {LR_F32,  LR_F16,  LR_BF16, LR_Q4_0, LR_Q4_1, LR_Q5_0,   LR_Q5_1,   LR_Q8_0,
                                    LR_Q2_K, LR_Q3_K, LR_Q4_K, LR_Q5_K, LR_Q6_K, LR_IQ4_NL, LR_IQ4_XS, LR_MXFP4};

std::vector<uint8_t> random_blocks(rnd &r, int type, int n, int k)
{
    size_t bytes = (size_t)n * (k / lr_dtype_block(type)) * lr_dtype_bytes(type);
    std::vector<uint8_t> v(bytes);
    for (auto &b : v) b = (uint8_t)r.u32();
    auto half = [&](size_t at, float f) {
        uint16_t h = lr_f32_to_f16(f);
        memcpy(&v[at], &h, 2);
    };
    size_t size = (size_t)lr_dtype_bytes(type);
    for (size_t at = 0; at < bytes; at += size) {
        float d = (0.5f + 0.4f * r.uniform()) * 0.02f;
        switch (type) {
        case LR_F32: {
            float f = r.normal() * 0.1f;
            memcpy(&v[at], &f, 4);
            break;
        }
        case LR_F16:
            half(at, r.normal() * 0.1f);
            break;
        case LR_BF16: {
            uint16_t h = lr_f32_to_bf16(r.normal() * 0.1f);
            memcpy(&v[at], &h, 2);
            break;
        }
        case LR_Q4_1:
        case LR_Q5_1:
            half(at, d);
            half(at + 2, -8 * d);
            break;
        case LR_Q4_K:
        case LR_Q5_K:
            half(at, d / 32);
            half(at + 2, d / 8);
            break;
        case LR_Q2_K:
            half(at + 80, d / 8);
            half(at + 82, d / 8);
            break;
        case LR_Q3_K:
            half(at + 108, d / 32);
            break;
        case LR_IQ4_NL:
            half(at, d / 8);
            break;
        case LR_IQ4_XS:
            half(at, d / 256);
            break;
        case LR_Q6_K:
            half(at + 208, d / 64);
            break;
        case LR_MXFP4:
            v[at] = (uint8_t)(120 + r.below(4));
            if (r.below(64) == 0) v[at] = (uint8_t)r.below(3); // tiny scales have a rule of their own
            break;
        default:
            half(at, type == LR_Q8_0 ? d / 8 : d);
        }
    }
    return v;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, nullptr, _IOLBF, 0);
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e || !n) {
        printf("no CUDA device: %s\n", cudaGetErrorString(e));
        return 77;
    }
    small_only = getenv("LLMRUN_CUDA_SMALL") != nullptr;
    if (lr_cu_init()) {
        printf("lr_cu_init failed\n");
        return 1;
    }
    const struct {
        const char *name;
        void (*f)();
    } groups[] = {{"rows", test_rows},     {"linear", test_linear}, {"kv", test_kv},      {"attn", test_attn},
                  {"sample", test_sample}, {"moe", test_moe},       {"adapt", test_adapt}};
    for (auto &g : groups) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++) wanted = wanted || !strcmp(argv[i], g.name);
        if (!wanted) continue;
        int p = passed, f = failed;
        g.f();
        printf("%-8s %4d passed %4d failed\n", g.name, passed - p, failed - f);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
