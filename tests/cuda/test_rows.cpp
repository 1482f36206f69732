// test_rows.cpp - rows.cu: norms, activations, packing, embedding, gathering, against double.
#include "test.h"
#include <functional>

namespace
{
double act_ref(int act, double x)
{
    switch (act) {
    case LR_ACT_SILU:
        return x / (1 + exp(-x));
    case LR_ACT_GELU_TANH:
        return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    case LR_ACT_GELU_ERF:
        return 0.5 * x * (1 + erf(x * 0.7071067811865476));
    case LR_ACT_RELU:
        return x > 0 ? x : 0;
    case LR_ACT_SIGMOID:
        return 1 / (1 + exp(-x));
    default:
        return x > 0 ? x * x : 0;
    }
}

struct norm_case {
    int m, width, group;
    bool layer, w, bias, add, sum, in_place;
};

void norm_one(const norm_case &c, rnd &r)
{
    std::string name =
        fmt("norm %dx%d group %d%s%s%s%s%s%s", c.m, c.width, c.group, c.layer ? " layer" : "", c.w ? " w" : "",
            c.bias ? " bias" : "", c.add ? " add" : "", c.sum ? " sum" : "", c.in_place ? " in place" : "");
    size_t n = (size_t)c.m * c.width;
    auto x = normals(r, n, 3), add = normals(r, n), w = normals(r, c.group), b = normals(r, c.group);
    for (auto &v : x) v += 1;
    dev<float> dx(x), dadd(add), dw(w), db(b), dsum(n), dy(n);
    lr_cu_norm p = {c.w ? dw.p : nullptr, c.bias ? db.p : nullptr, c.width, c.group, 1e-5f, c.layer};
    float *sum = !c.sum ? nullptr : c.in_place ? dx.p : dsum.p;
    if (!run(name, [&] {
            return lr_cu_norm_rows(&p, dx, c.add ? dadd.p : nullptr, sum, c.m, {dy, nullptr, LR_CU_F32}, 0);
        }))
        return;
    std::vector<double> want(n), sums(n);
    for (size_t i = 0; i < n; i++) sums[i] = (float)(x[i] + (c.add ? add[i] : 0));
    for (size_t at = 0; at < n; at += c.group) {
        double mean = 0, s = 0;
        for (int i = 0; i < c.group; i++) mean += c.layer ? sums[at + i] / c.group : 0;
        for (int i = 0; i < c.group; i++) s += (sums[at + i] - mean) * (sums[at + i] - mean) / c.group;
        for (int i = 0; i < c.group; i++)
            want[at + i] = (sums[at + i] - mean) / sqrt(s + 1e-5) * (c.w ? w[i] : 1) + (c.bias && c.layer ? b[i] : 0);
    }
    near(name, dy.get(), want, 3e-6);
    if (c.sum) near(name + ": sum", c.in_place ? dx.get() : dsum.get(), sums, 0);
}

void test_norm()
{
    rnd r(1);
    for (norm_case c : std::initializer_list<norm_case>{
             {1, 64, 64, false, true, false, false, false, false},
             {3, 100, 100, false, true, false, true, true, false},
             {2, 257, 257, false, false, false, true, true, true},
             {2, 576, 576, true, true, true, false, false, false},
             {1, 300, 300, true, true, false, true, false, false},
             {3, 192, 64, false, true, false, false, false, false},
             {2, 60, 20, true, true, true, true, true, false},
             {2, 7, 7, false, true, false, false, false, false},
         })
        norm_one(c, r);
}

void test_elementwise()
{
    rnd r(2);
    for (int width : {1, 33, 256, 700}) {
        int m = 3;
        size_t n = (size_t)m * width;
        auto a = normals(r, n, 4), b = normals(r, n);
        std::vector<double> want(n);
        dev<float> da(a), db(b), dy(n);
        lr_cu_out out = {dy, nullptr, LR_CU_F32};
        auto each = [&](const char *what, double tol, std::function<cudaError_t()> f,
                        std::function<double(size_t)> ref) {
            std::string name = fmt("%s %d", what, width);
            if (!run(name, f)) return;
            for (size_t i = 0; i < n; i++) want[i] = ref(i);
            near(name, dy.get(), want, tol);
        };
        each(
            "add", 1e-7, [&] { return lr_cu_add(da, db, m, width, out, 0); }, [&](size_t i) { return a[i] + b[i]; });
        each(
            "mul", 1e-7, [&] { return lr_cu_mul(da, db, m, width, out, 0); },
            [&](size_t i) { return (double)a[i] * b[i]; });
        each(
            "scale", 1e-7, [&] { return lr_cu_scale(da, 0.37f, m, width, out, 0); },
            [&](size_t i) { return a[i] * (double)0.37f; });
        each(
            "softcap", 1e-6, [&] { return lr_cu_softcap(da, 2.5f, m, width, out, 0); },
            [&](size_t i) { return 2.5 * tanh(a[i] / 2.5); });
        each(
            "mul by a value a row", 1e-7, [&] { return lr_cu_mul_row(da, db, m, width, out, 0); },
            [&](size_t i) { return (double)a[i] * b[i / width]; });
        each(
            "clamped glu", 2e-6, [&] { return lr_cu_glu(LR_ACT_SWIGLU_CLAMP, da, db, m, width, out, 0); },
            [&](size_t i) {
                double g = std::min(a[i], 7.0f), u = std::min(std::max(b[i], -7.0f), 7.0f);
                return g / (1 + exp(-1.702 * g)) * (u + 1);
            });
        for (int act = LR_ACT_SILU; act <= LR_ACT_SIGMOID; act++) {
            each(
                "act", 2e-6, [&] { return lr_cu_act(act, da, m, width, out, 0); },
                [&](size_t i) { return act_ref(act, a[i]); });
            each(
                "glu", 2e-6, [&] { return lr_cu_glu(act, da, db, m, width, out, 0); },
                [&](size_t i) { return act_ref(act, a[i]) * b[i]; });
        }
        // in place, and the row gather
        lr_cu_out self = {da, nullptr, LR_CU_F32};
        if (run("add in place", [&] { return lr_cu_add(da, db, m, width, self, 0); })) {
            for (size_t i = 0; i < n; i++) want[i] = (float)(a[i] + b[i]);
            near("add in place", da.get(), want, 0);
        }
        dev<int32_t> rows(std::vector<int32_t>{2, -1, 0});
        if (run("gather", [&] { return lr_cu_gather(db, rows, m, width, out, 0); })) {
            for (size_t i = 0; i < n; i++) {
                int from = i / width == 0 ? 2 : i / width == 1 ? -1 : 0;
                want[i] = from < 0 ? 0 : b[from * width + i % width];
            }
            near("gather", dy.get(), want, 0);
        }
        if (run("bias", [&] { return lr_cu_bias(db, da, m, width, 0); })) {
            auto s = da.get();
            for (size_t i = 0; i < n; i++) want[i] = (float)(b[i] + s[i % width]);
            near("bias", db.get(), want, 0);
        }
    }
    dev<float> one(32);
    refuses("unknown act", [&] { return lr_cu_act(17, one, 1, 32, {one, nullptr, LR_CU_F32}, 0); });
    refuses("no output", [&] { return lr_cu_add(one, one, 1, 32, {nullptr, nullptr, LR_CU_F32}, 0); });
    refuses("int8 of 33", [&] { return lr_cu_add(one, one, 1, 33, {nullptr, one.p, LR_CU_INT8}, 0); });
}

void test_parts()
{
    rnd r(8);
    const struct {
        lr_cu_parts p;
        bool with_b;
    } cases[] = {{{1, 100, 33, 40, 0, false}, false}, {{4, 24, 16, 8, 0, false}, false},
                 {{4, 16, 0, 16, 8, true}, true},     {{3, 32, 0, 32, 32, false}, true},
                 {{5, 12, 0, 12, 4, false}, false},   {{2, 300, 1, 299, 7, true}, true}};
    for (const auto &c : cases) {
        const lr_cu_parts &p = c.p;
        int m = 3, each = p.n_a + p.n_b, width = p.n_heads * each, wide_b = p.shared ? p.n_b : p.n_heads * p.n_b;
        auto a = normals(r, (size_t)m * p.n_heads * p.stride_a), b = normals(r, (size_t)m * wide_b + 1);
        dev<float> da(a), db(b), dy((size_t)m * width);
        std::string name = fmt("parts %d of %d, %d", p.n_heads, p.stride_a, p.n_a);
        if (!run(name, [&] {
                return lr_cu_parts_of(&p, da, c.with_b ? db.p : nullptr, m, {dy, nullptr, LR_CU_F32}, 0);
            }))
            continue;
        std::vector<double> want;
        for (int row = 0; row < m; row++)
            for (int h = 0; h < p.n_heads; h++) {
                for (int j = 0; j < p.n_a; j++) want.push_back(a[(row * p.n_heads + h) * p.stride_a + p.first + j]);
                for (int j = 0; j < p.n_b; j++)
                    want.push_back(!c.with_b ? 0 : b[row * wide_b + (p.shared ? 0 : h * p.n_b) + j]);
            }
        near(name, dy.get(), want, 0);
    }
    // 7 columns of three ranks: 2, 0 and 5
    int m = 4, width = 7;
    std::vector<int32_t> at = {0, 2, 2, 7};
    std::vector<float> x((size_t)m * width);
    std::vector<double> want(x.size());
    for (int rank = 0, i = 0; rank < 3; rank++)
        for (int row = 0; row < m; row++)
            for (int col = at[rank]; col < at[rank + 1]; col++) {
                x[i++] = (float)(row * 10 + col);
                want[row * width + col] = row * 10 + col;
            }
    dev<float> dx(x), dy(x.size());
    dev<int32_t> dat(at);
    if (run("ranks", [&] { return lr_cu_ranks(dx, dat, m, width, {dy, nullptr, LR_CU_F32}, 0); }))
        near("ranks", dy.get(), want, 0);
    lr_cu_parts bad = {2, 8, 4, 5, 0, false};
    refuses("a part behind its head", [&] {
        return lr_cu_parts_of(&bad, dx, nullptr, 1, {dy, nullptr, LR_CU_F32}, 0);
    });
}

void test_pack()
{
    rnd r(3);
    for (int k : {32, 96, 576})
        for (float size : {1.0f, 1e6f, 1e-12f, 0.0f}) {
            int m = 3;
            auto x = normals(r, (size_t)m * k, size);
            if (size > 0) x[k + 5] = 300 * size; // a massive one in row 1
            dev<float> dx(x);
            for (int form = 0; form < LR_CU_FORMS; form++) {
                std::string name = fmt("pack form %d k %d size %g", form, k, (double)size);
                dev<uint8_t> p(lr_cu_rows_bytes((lr_cu_form)form, m, k));
                dev<float> copy((size_t)m * k);
                if (!run(name, [&] { return lr_cu_rows(dx, m, k, {copy, p, (lr_cu_form)form}, 0); })) continue;
                auto got = p.get();
                same(name + ": f32", copy.get().data(), x.data(), x.size() * 4);
                size_t n = (size_t)m * k, at = (n * (form == LR_CU_F32    ? 4
                                                     : form == LR_CU_INT8 ? 1
                                                                          : 2) +
                                                15) /
                                               16 * 16;
                bool ok = true;
                for (int row = 0; row < m; row++) {
                    float max = 0, scale = 1;
                    for (int i = 0; i < k; i++) max = fmaxf(max, fabsf(x[(size_t)row * k + i]));
                    if (form == LR_CU_F16) {
                        memcpy(&scale, &got[at + 4 * row], 4);
                        int e;
                        ok = ok && frexpf(scale, &e) == 0.5f; // a power of two
                        ok = ok && (max == 0 ? scale == 1 : max / scale >= 8192 && max / scale < 16384);
                    }
                    for (int i = 0; i < k; i++) {
                        size_t j = (size_t)row * k + i;
                        float v = 0, want = x[j];
                        uint16_t h;
                        memcpy(&h, &got[form == LR_CU_INT8 ? 0 : 2 * j], 2);
                        if (form == LR_CU_F32) memcpy(&v, &got[4 * j], 4);
                        if (form == LR_CU_BF16) v = lr_bf16_to_f32(h), want = round_bf16(want);
                        if (form == LR_CU_F16) v = lr_f16_to_f32(h), want = round_f16(want / scale);
                        if (form == LR_CU_INT8) {
                            float big = 0, d;
                            for (int t = i / 32 * 32; t < i / 32 * 32 + 32; t++)
                                big = fmaxf(big, fabsf(x[(size_t)row * k + t]));
                            memcpy(&d, &got[at + 4 * (j / 32)], 4);
                            v = (float)(int8_t)got[j];
                            ok = ok && d == big / 127.0f;
                            want = d > 0 ? nearbyintf(x[j] / d) : 0;
                        }
                        ok = ok && v == want;
                    }
                }
                verdict(ok, name, "wrong values");
            }
        }
}

void test_embed()
{
    rnd r(4);
    for (int type : all_types) {
        int n = 5, k = lr_dtype_block(type) == 1 ? 37 : 512;
        auto w = random_blocks(r, type, n, k);
        std::vector<float> ref((size_t)n * k);
        lr_dtype_to_f32(type, w.data(), ref.data(), ref.size());
        dev<uint8_t> dw(w, 16);
        std::vector<int32_t> tokens = {4, 0, -1, 3, 5};
        dev<int32_t> dt(tokens);
        dev<float> y(tokens.size() * k);
        lr_cu_weight lw = {dw, type, n, k, w.size() / n};
        std::string name = fmt("embed %s", lr_dtype_name(type));
        if (!run(name, [&] { return lr_cu_embed(&lw, dt, (int)tokens.size(), 1.5f, {y, nullptr, LR_CU_F32}, 0); }))
            continue;
        std::vector<double> want(tokens.size() * k);
        for (size_t i = 0; i < want.size(); i++) {
            int t = tokens[i / k];
            want[i] = t < 0 || t >= n ? 0 : (float)(ref[(size_t)t * k + i % k] * 1.5f);
        }
        near(name, y.get(), want, 0);
    }
    dev<float> y(8);
    lr_cu_weight odd = {y, LR_I32, 1, 8, 32};
    refuses("embed I32", [&] { return lr_cu_embed(&odd, (const int32_t *)y.p, 1, 1, {y, nullptr, LR_CU_F32}, 0); });
}
} // namespace

void test_rows()
{
    test_norm();
    test_elementwise();
    test_parts();
    test_pack();
    test_embed();
}
