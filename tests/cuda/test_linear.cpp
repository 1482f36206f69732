// test_linear.cpp - linear.cu: products in all formats and modes against double, and a row's bits in any company.
#include "test.h"

namespace
{
struct product {
    int type, n, k;
    std::vector<uint8_t> blocks;
    std::vector<float> w, bias;
    dev<uint8_t> dw;
    dev<float> dbias;
    product(rnd &r, int t, int rows, int cols)
        : type(t), n(rows), k(cols), blocks(random_blocks(r, t, rows, cols)), w((size_t)rows * cols),
          bias(normals(r, rows)), dw(blocks, 16), dbias(bias)
    {
        lr_dtype_to_f32(type, blocks.data(), w.data(), w.size());
    }
    lr_cu_weight weight() const { return {dw, type, n, k, blocks.size() / n}; }
};

// y for rows x; y_old: what is added to, or null.
bool multiply(const std::string &name, const product &p, lr_cu_math math, const std::vector<float> &x, int m, bool bias,
              const std::vector<float> *y_old, std::vector<float> *y)
{
    lr_cu_form form = lr_cu_linear_form(math, p.type, m);
    dev<float> dx(x), dy((size_t)m * p.n);
    dev<uint8_t> packed(lr_cu_rows_bytes(form, m, p.k)), work(lr_cu_linear_work(math, p.type, p.n, p.k, m));
    if (y_old) dy.set(*y_old);
    lr_cu_weight w = p.weight();
    bool ok = run(name, [&] {
        cudaError_t e = lr_cu_rows(dx, m, p.k, {nullptr, packed, form}, 0);
        if (!e) e = lr_cu_linear(math, &w, packed, m, bias ? p.dbias.p : nullptr, y_old != nullptr, dy, work, 0);
        return e;
    });
    if (ok) *y = dy.get();
    return ok;
}

// x as a form keeps it.
std::vector<double> as_form(lr_cu_form form, const std::vector<float> &x, int k)
{
    std::vector<double> v(x.begin(), x.end());
    for (size_t row = 0; row < x.size(); row += k) {
        float max = 0;
        for (int i = 0; i < k; i++) max = fmaxf(max, fabsf(x[row + i]));
        int e;
        frexpf(max, &e);
        for (int i = 0; i < k; i++) {
            float f = x[row + i];
            if (form == LR_CU_BF16) v[row + i] = round_bf16(f);
            if (form == LR_CU_F16) v[row + i] = ldexp((double)round_f16(ldexpf(f, 14 - e)), e - 14);
            if (form == LR_CU_INT8) {
                float big = 0;
                for (int t = i / 32 * 32; t < i / 32 * 32 + 32; t++) big = fmaxf(big, fabsf(x[row + t]));
                float d = big / 127.0f;
                v[row + i] = d > 0 ? (double)d * nearbyintf(f / d) : 0;
            }
        }
    }
    return v;
}

void against_double(rnd &r, const product &p, lr_cu_math math, int m, bool bias, bool add)
{
    std::string name = fmt("linear %s %dx%d m %d math %d%s%s", lr_dtype_name(p.type), p.n, p.k, m, math,
                           bias ? " bias" : "", add ? " add" : "");
    auto x = normals(r, (size_t)m * p.k), old = normals(r, (size_t)m * p.n);
    x[3] = 500; // a massive activation
    std::vector<float> y;
    if (!multiply(name, p, math, x, m, bias, add ? &old : nullptr, &y)) return;
    lr_cu_form form = lr_cu_linear_form(math, p.type, m);
    auto xr = as_form(form, x, p.k);
    std::vector<double> want((size_t)m * p.n), size(want.size());
    for (int row = 0; row < m; row++)
        for (int f = 0; f < p.n; f++) {
            double s = 0, abs = 0;
            for (int i = 0; i < p.k; i++) {
                float w = p.w[(size_t)f * p.k + i];
                if (form == LR_CU_F16) w = round_f16(w);
                s += (double)w * xr[(size_t)row * p.k + i];
                abs += fabs((double)w * xr[(size_t)row * p.k + i]);
            }
            size_t at = (size_t)row * p.n + f;
            want[at] = s + (bias ? p.bias[f] : 0) + (add ? old[at] : 0);
            size[at] = abs + fabs(want[at]);
        }
    near(name, y, want, 1e-6, &size);
}

void test_formats()
{
    rnd r(11);
    for (int type : all_types) {
        if (!lr_cu_weight_good(type)) continue; // a test build with a part of the formats
        product p(r, type, 67, 256);
        against_double(r, p, LR_CU_EXACT, 3, true, false);
        against_double(r, p, LR_CU_REF, 5, false, true);
        against_double(r, p, LR_CU_FAST, 2, false, true);
        if (small_only) continue;
        against_double(r, p, LR_CU_EXACT, 40, false, true);
        against_double(r, p, LR_CU_FAST, 7, true, false);
        std::vector<uint16_t> bf((size_t)p.n * p.k);
        dev<uint16_t> out(bf.size());
        lr_cu_weight w = p.weight();
        std::string name = fmt("dequant %s", lr_dtype_name(type));
        if (!run(name, [&] { return lr_cu_dequant(&w, out, 0); })) continue;
        for (size_t i = 0; i < bf.size(); i++) bf[i] = lr_f32_to_bf16(p.w[i]);
        same(name, out.get().data(), bf.data(), bf.size() * 2);
    }
}

void test_shapes()
{
    rnd r(12);
    product odd(r, LR_BF16, 5, 40), one(r, LR_Q8_0, 1, 32), parts(r, LR_Q8_0, 66, 1120), tall(r, LR_BF16, 200, 1088);
    for (const product *p : {&odd, &one, &parts, &tall})
        for (int m : small_only ? std::vector<int>{9} : std::vector<int>{1, 9, 33}) {
            against_double(r, *p, LR_CU_EXACT, m, m == 9, false);
            if (m == 1) against_double(r, *p, LR_CU_FAST, m, true, true);
        }
    lr_cu_weight bad = one.weight();
    bad.k = 31;
    refuses("k 31", [&] { return lr_cu_linear(LR_CU_EXACT, &bad, one.dw, 1, nullptr, false, one.dbias, nullptr, 0); });
    bad = one.weight();
    bad.type = LR_I32;
    refuses("I32", [&] { return lr_cu_linear(LR_CU_EXACT, &bad, one.dw, 1, nullptr, false, one.dbias, nullptr, 0); });
}

// A row alone, among few, among many: the same bits.
void test_company()
{
    rnd r(13);
    for (int type : {LR_Q6_K, LR_BF16}) {
        product p(r, type, 67, 1280);
        int many = small_only ? 34 : type == LR_BF16 ? 70 : 260; // beyond 256 no part of k is a block of its own
        auto x = normals(r, (size_t)many * p.k);
        std::vector<float> all, y;
        if (!multiply("company", p, LR_CU_EXACT, x, many, true, nullptr, &all)) return;
        for (int m : {1, 2, 8, 9, 32}) {
            int from = m == 1 ? 33 : m == 2 ? 17 : 1;
            std::vector<float> part(x.begin() + (size_t)from * p.k, x.begin() + (size_t)(from + m) * p.k);
            std::string name = fmt("%s: rows %d..%d of %d", lr_dtype_name(type), from, from + m - 1, many);
            if (multiply(name, p, LR_CU_EXACT, part, m, true, nullptr, &y))
                same(name, y.data(), all.data() + (size_t)from * p.n, y.size() * 4);
        }
        for (lr_cu_math math : {LR_CU_FAST, LR_CU_REF}) {
            std::vector<float> few(x.begin(), x.begin() + 8 * (size_t)p.k),
                single(x.begin() + 5 * (size_t)p.k, x.begin() + 6 * (size_t)p.k);
            std::string name = fmt("%s: row 5 of 8, math %d", lr_dtype_name(type), math);
            if (multiply(name, p, math, few, 8, false, nullptr, &all) &&
                multiply(name, p, math, single, 1, false, nullptr, &y))
                same(name, y.data(), all.data() + 5 * (size_t)p.n, y.size() * 4);
        }
    }
}
} // namespace

void test_linear()
{
    test_formats();
    test_shapes();
    test_company();
}
