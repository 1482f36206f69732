// test_adapt.cpp - adapt.cu: what adapters add to products, against double, and a row's bits in any company.
#include "test.h"

namespace
{
// An adapter of two products that read the same rows, the second of which it may leave alone.
struct adapter {
    int rank[2];
    std::vector<float> a[2], b[2];
    dev<float> da, db, da2, db2;
    dev<lr_cu_adapter_part> parts;
    adapter(rnd &r, int r0, int r1, int k, const int n[2])
        : rank{r0, r1}, a{normals(r, (size_t)r0 * k), normals(r, (size_t)r1 * k)}, b{normals(r, (size_t)r0 * n[0]),
                                                                                     normals(r, (size_t)r1 * n[1])},
          da(a[0]), db(b[0]), da2(a[1], 16), db2(b[1], 16), parts(3)
    {
        // a site that none of the products has lies between them
        parts.set({{da, db, rank[0]}, {nullptr, nullptr, 1 << 20}, {da2, db2, rank[1]}});
    }
};

// Rows as a form keeps them.
std::vector<double> unpacked(lr_cu_form form, const std::vector<uint8_t> &p, int m, int k)
{
    std::vector<double> v((size_t)m * k);
    size_t n = v.size(), scales = ((form == LR_CU_INT8 ? n : 2 * n) + 15) & ~(size_t)15;
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        float f, scale = 1;
        if (form == LR_CU_F32) {
            memcpy(&f, &p[4 * i], 4);
        } else if (form == LR_CU_INT8) {
            f = (float)(int8_t)p[i];
            memcpy(&scale, &p[scales + i / 32 * 4], 4);
        } else {
            memcpy(&h, &p[2 * i], 2);
            f = form == LR_CU_BF16 ? lr_bf16_to_f32(h) : lr_f16_to_f32(h);
            if (form == LR_CU_F16) memcpy(&scale, &p[scales + i / k * 4], 4);
        }
        v[i] = (double)f * scale;
    }
    return v;
}

struct shape {
    int m, k, n[2];
    lr_cu_form form;
};

// What the rows from `first` on get, beside others or not: y of both products.
bool adapt(const std::string &name, const shape &c, int first, int m, const std::vector<float> &x,
           const std::vector<const adapter *> &who, const std::vector<float> y_old[2], int ranks,
           std::vector<float> y[2], std::vector<uint8_t> *rows = nullptr)
{
    std::vector<float> part(x.begin() + (size_t)first * c.k, x.begin() + (size_t)(first + m) * c.k);
    std::vector<const lr_cu_adapter_part *> of;
    for (int i = first; i < first + m; i++) of.push_back(who[i] ? who[i]->parts.p : nullptr);
    dev<const lr_cu_adapter_part *> dof(of);
    dev<float> dx(part), dy0((size_t)m * c.n[0]), dy1((size_t)m * c.n[1]);
    for (int w = 0; w < 2; w++)
        (w ? dy1 : dy0)
            .set({y_old[w].begin() + (size_t)first * c.n[w], y_old[w].begin() + (size_t)(first + m) * c.n[w]});
    dev<uint8_t> packed(lr_cu_rows_bytes(c.form, m, c.k)), work(lr_cu_adapt_work(2, ranks, m));
    lr_cu_product p = {};
    p.n_weights = 2;
    for (int w = 0; w < 2; w++) {
        p.w[w] = {nullptr, LR_F32, c.n[w], c.k, 0};
        p.y[w] = w ? dy1 : dy0;
    }
    lr_cu_adapters l = {dof, {0, 2}, ranks};
    bool ok = run(name, [&] {
        cudaError_t e = lr_cu_rows(dx, m, c.k, {nullptr, packed, c.form}, 0);
        return e ? e : lr_cu_adapt(&l, &p, c.form, packed, m, work, 0);
    });
    if (!ok) return false;
    y[0] = dy0.get();
    y[1] = dy1.get();
    if (rows) *rows = packed.get();
    return true;
}

void one(rnd &r, const shape &c)
{
    static const char *const forms[] = {"f32", "bf16", "f16", "int8"};
    std::string name = fmt("adapt %s m %d k %d n %d, %d", forms[c.form], c.m, c.k, c.n[0], c.n[1]);
    adapter big(r, 17, 8, c.k, c.n), part(r, 3, 0, c.k, c.n), last(r, 1, 9, c.k, c.n);
    const adapter *const some[] = {&big, nullptr, &part, &big, &last};
    auto x = normals(r, (size_t)c.m * c.k, 3);
    x[1] = 300;
    std::vector<const adapter *> who;
    for (int i = 0; i < c.m; i++) who.push_back(some[i < 12 ? i % 5 : i / 9 % 5]);
    std::vector<float> old[2] = {normals(r, (size_t)c.m * c.n[0]), normals(r, (size_t)c.m * c.n[1])}, y[2];
    std::vector<uint8_t> rows;
    if (!adapt(name, c, 0, c.m, x, who, old, 24, y, &rows)) return;
    auto xr = unpacked(c.form, rows, c.m, c.k);
    for (int w = 0; w < 2; w++) {
        std::vector<double> want(y[w].size()), size(want.size());
        bool left_alone = true;
        for (int row = 0; row < c.m; row++) {
            const adapter *l = who[row];
            int rank = l ? l->rank[w] : 0;
            std::vector<double> t(rank), abs(rank);
            for (int i = 0; i < rank; i++)
                for (int j = 0; j < c.k; j++) {
                    double v = xr[(size_t)row * c.k + j] * l->a[w][(size_t)i * c.k + j];
                    t[i] += v, abs[i] += fabs(v);
                }
            for (int f = 0; f < c.n[w]; f++) {
                size_t at = (size_t)row * c.n[w] + f;
                want[at] = old[w][at], size[at] = fabs(want[at]);
                for (int i = 0; i < rank; i++) {
                    want[at] += t[i] * l->b[w][(size_t)i * c.n[w] + f];
                    size[at] += abs[i] * fabs(l->b[w][(size_t)i * c.n[w] + f]);
                }
                if (!rank && memcmp(&y[w][at], &old[w][at], 4)) left_alone = false;
            }
        }
        near(fmt("%s: product %d", name.c_str(), w), y[w], want, 1e-6, &size);
        verdict(left_alone, name, "rows without an adapter have changed");
    }
    // alone, and among few
    for (int first : {0, c.m / 2}) {
        int m = first ? (c.m - first < 3 ? c.m - first : 3) : 1;
        std::vector<float> z[2];
        if (!adapt(name, c, first, m, x, who, old, 17, z)) return;
        for (int w = 0; w < 2; w++)
            same(fmt("%s: rows %d..%d", name.c_str(), first, first + m - 1), z[w].data(),
                 y[w].data() + (size_t)first * c.n[w], z[w].size() * 4);
    }
}
} // namespace

void test_adapt()
{
    rnd r(41);
    for (lr_cu_form form : {LR_CU_F32, LR_CU_BF16, LR_CU_F16, LR_CU_INT8}) {
        one(r, {5, 96, {33, 257}, form});
        if (!small_only || form == LR_CU_F16) one(r, {70, 544, {260, 7}, form});
    }
    one(r, {1, 8, {1, 300}, LR_CU_F16});
    dev<float> f(64);
    dev<const lr_cu_adapter_part *> none(1);
    lr_cu_product p = {};
    p.n_weights = 1;
    p.w[0] = {nullptr, LR_F32, 8, 8, 0};
    p.y[0] = f;
    lr_cu_adapters l = {none, {0}, 8};
    lr_cu_product bad = p;
    bad.glu = true;
    refuses("adapter of a GLU", [&] { return lr_cu_adapt(&l, &bad, LR_CU_F32, f, 1, f, 0); });
    bad = p;
    bad.w[0].k = 12;
    refuses("adapter, k 12", [&] { return lr_cu_adapt(&l, &bad, LR_CU_F32, f, 1, f, 0); });
    l.site[0] = -1;
    refuses("no site", [&] { return lr_cu_adapt(&l, &p, LR_CU_F32, f, 1, f, 0); });
}
