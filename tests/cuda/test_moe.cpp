// test_moe.cpp - moe.cu and what experts and joint products need of linear.cu and rows.cu: who is chosen, where slots
// lie, products of pieces against double, a row's bits in any company.
#include "test.h"
#include <algorithm>

namespace
{
typedef std::vector<float> floats;

struct choice_case {
    const char *name;
    lr_cu_choice c;
    bool bias;
};

// The better of two scores is the higher, of equal ones the lower number; NaN comes last.
bool better(float a, int i, float b, int j)
{
    if (std::isnan(a) != std::isnan(b)) return std::isnan(b);
    return std::isnan(a) || a == b ? i < j : a > b;
}
std::vector<int> best_of(const floats &v, int n)
{
    std::vector<int> at(v.size());
    for (size_t i = 0; i < at.size(); i++) at[i] = (int)i;
    std::sort(at.begin(), at.end(), [&](int a, int b) { return better(v[a], a, v[b], b); });
    at.resize(n);
    return at;
}

void reference_route(const lr_cu_choice &c, const float *x, const float *bias, std::vector<int> *chosen, floats *weight)
{
    int n = c.n_experts;
    floats p(n), score(n);
    double sum = 0, top = -INFINITY;
    for (int e = 0; e < n; e++) top = fmax(top, x[e]);
    for (int e = 0; e < n; e++) sum += exp(x[e] - top);
    for (int e = 0; e < n; e++) p[e] = c.gate == 0 ? exp(x[e] - top) / sum : c.gate == 1 ? 1 / (1 + exp(-x[e])) : x[e];
    for (int e = 0; e < n; e++) score[e] = p[e] + (bias ? bias[e] : 0);
    std::vector<int> numbers(n);
    for (int e = 0; e < n; e++) numbers[e] = e;
    if (c.n_groups > 1) {
        int each = n / c.n_groups;
        floats group(c.n_groups);
        for (int g = 0; g < c.n_groups; g++) {
            floats mine(score.begin() + g * each, score.begin() + (g + 1) * each);
            for (int e : best_of(mine, c.group_best)) group[g] += mine[e];
        }
        numbers.clear();
        for (int g : best_of(group, c.n_groups_used))
            for (int e = 0; e < each; e++) numbers.push_back(g * each + e);
    }
    std::sort(numbers.begin(), numbers.end(), [&](int a, int b) { return better(score[a], a, score[b], b); });
    chosen->assign(numbers.begin(), numbers.begin() + c.n_used);
    std::vector<double> w;
    double most = -INFINITY, all = 0;
    for (int e : *chosen) most = fmax(most, p[e]);
    for (int e : *chosen) w.push_back(c.gate == 2 ? exp(p[e] - most) : p[e]);
    for (double v : w) all += v;
    weight->clear();
    for (double v : w) weight->push_back((float)((c.gate == 2 || c.normalize ? v / all : v) * c.scale));
}

struct routed {
    dev<float> chosen;
    dev<uint8_t> mem;
    lr_cu_slots s = {};
    routed(int n_experts, int n_used, int m, lr_cu_math math, int from, int n_own)
        : chosen((size_t)m * 2 * n_used), mem(lr_cu_slots_bytes(n_experts, n_used, m))
    {
        cudaMemset(mem, 1, mem.n); // 0xff would be what stands behind the last slot
        s.n_experts = n_experts;
        s.n_used = n_used;
        s.from = from;
        s.n_own = n_own;
        lr_cu_slots_in(&s, mem, math, m);
    }
    std::vector<int> ints(const int32_t *at, size_t n) const
    {
        std::vector<int> v(n);
        cudaMemcpy(v.data(), at, n * 4, cudaMemcpyDeviceToHost);
        return v;
    }
};

void check_slots(const std::string &name, const routed &t, const std::vector<std::vector<int>> &chosen)
{
    int used = t.s.n_used, n = t.s.m * used, n_experts = t.s.n_experts;
    std::vector<std::pair<int, int>> order; // (expert, row * used + rank)
    for (int row = 0; row < t.s.m; row++)
        for (int i = 0; i < used; i++)
            order.push_back({chosen[row].empty() ? n_experts : chosen[row][i], row * used + i});
    if (t.s.m > 1 || t.s.n_own < n_experts)
        std::stable_sort(order.begin(), order.end(), [](auto a, auto b) { return a.first < b.first; });
    std::vector<int> row(n, -1), own(n, -1), at(n);
    int mine = 0;
    for (int i = 0; i < n; i++) {
        int e = order[i].first - t.s.from;
        at[order[i].second] = i;
        if (e < 0 || e >= t.s.n_own || order[i].first == n_experts) continue;
        row[mine] = order[i].second / used;
        own[mine++] = e;
    }
    auto got_row = t.ints(t.s.row, n), got_own = t.ints(t.s.own, n), got_at = t.ints(t.s.at, n);
    same(name + ": rows", got_row.data(), row.data(), n * 4);
    same(name + ": experts", got_own.data(), own.data(), n * 4);
    same(name + ": places", got_at.data(), at.data(), n * 4);
    auto p = t.ints((const int32_t *)t.s.pieces, 3 * (size_t)t.s.n_pieces);
    std::vector<int> covered(n);
    bool ok = true;
    for (int i = 0; i < t.s.n_pieces; i++)
        for (int k = 0; k < p[3 * i + 2]; k++) {
            int slot = p[3 * i + 1] + k;
            ok = ok && p[3 * i + 2] <= t.s.tile && slot >= 0 && slot < mine && own[slot] == p[3 * i];
            if (ok) covered[slot]++;
        }
    for (int i = 0; i < n; i++) ok = ok && covered[i] == (i < mine);
    verdict(ok, name + ": pieces", "do not cover the slots");
}

void route_case(rnd &r, const choice_case &k, int m, int from, int n_own)
{
    const lr_cu_choice &c = k.c;
    std::string name = fmt("route %s, %d rows, experts %d+%d", k.name, m, from, n_own);
    auto x = normals(r, (size_t)m * c.n_experts, 2), bias = normals(r, c.n_experts, 0.3f);
    for (int i = 0; i < c.n_experts; i += 3) x[i] = 0.5f; // ties
    if (m > 2) x[2 * (size_t)c.n_experts + 1] = -INFINITY;
    std::vector<int32_t> live(m, 3);
    if (m > 3) live[1] = live[m - 1] = -1;
    routed t(c.n_experts, c.n_used, m, LR_CU_EXACT, from, n_own);
    dev<float> dx(x), db(bias);
    dev<int32_t> dl(live);
    if (!run(name, [&] { return lr_cu_route(&c, &t.s, dx, k.bias ? db.p : nullptr, dl, t.chosen, 0); })) return;
    auto got = t.chosen.get();
    std::vector<std::vector<int>> all(m);
    bool ok = true;
    floats weights;
    std::vector<double> want;
    for (int row = 0; row < m; row++) {
        floats w(c.n_used, 0.0f);
        if (live[row] >= 0)
            reference_route(c, &x[(size_t)row * c.n_experts], k.bias ? bias.data() : nullptr, &all[row], &w);
        const float *g = &got[(size_t)row * 2 * c.n_used];
        for (int i = 0; i < c.n_used; i++) {
            ok = ok && (int)g[i] == (all[row].empty() ? c.n_experts : all[row][i]);
            weights.push_back(g[c.n_used + i]);
            want.push_back(w[i]);
        }
    }
    verdict(ok, name, "other experts");
    near(name, weights, want, 2e-6);
    check_slots(name, t, all);
}

void test_route()
{
    rnd r(61);
    const choice_case cases[] = {
        {"mixtral", {8, 2, 0, true, 1, 0, 0, 0}, false},        {"qwen", {60, 4, 0, false, 1, 0, 0, 0}, false},
        {"gpt-oss", {32, 4, 2, false, 1, 0, 0, 0}, false},      {"deepseek", {64, 6, 1, true, 2.5f, 8, 3, 2}, true},
        {"groups of one", {6, 6, 1, false, 1, 6, 6, 1}, false}, {"most", {1024, 3, 0, true, 1, 32, 4, 1}, true},
    };
    for (auto &k : cases) {
        if (small_only && k.c.n_experts > 60) continue;
        for (int m : {1, 7, small_only ? 9 : 200}) {
            if (m == 200 && k.c.n_experts > 60) continue;
            route_case(r, k, m, 0, k.c.n_experts);
        }
        route_case(r, k, 5, k.c.n_experts / 4, k.c.n_experts / 2);
    }
    dev<float> f(64);
    routed t(8, 2, 3, LR_CU_EXACT, 0, 8);
    lr_cu_choice bad = cases[0].c;
    bad.n_used = 9;
    refuses("9 of 8 experts", [&] { return lr_cu_route(&bad, &t.s, f, nullptr, nullptr, f, 0); });
    bad = cases[0].c;
    bad.n_groups = 3;
    refuses("3 groups of 8", [&] { return lr_cu_route(&bad, &t.s, f, nullptr, nullptr, f, 0); });
}

// ---- products ----

struct experts {
    int type, n_experts, n, k;
    std::vector<uint8_t> blocks;
    floats w, bias;
    dev<uint8_t> dw;
    dev<float> dbias;
    experts(rnd &r, int t, int e, int rows, int cols)
        : type(t), n_experts(e), n(rows), k(cols), blocks(random_blocks(r, t, e * rows, cols)),
          w((size_t)e * rows * cols), bias(normals(r, (size_t)e * rows)), dw(blocks, 16), dbias(bias)
    {
        lr_dtype_to_f32(type, blocks.data(), w.data(), w.size());
    }
    lr_cu_weight weight() const { return {dw, type, n, k, blocks.size() / n / n_experts}; }
    // what a row gives, with rows as halves where the product takes them so; size: of the terms
    double dot(int expert, int f, const float *x, bool half, double *size) const
    {
        double s = bias[(size_t)expert * n + f], abs = fabs(s);
        for (int i = 0; i < k; i++) {
            float v = w[((size_t)expert * n + f) * k + i];
            s += (double)(half ? round_f16(v) : v) * x[i];
            abs += fabs((double)v * x[i]);
        }
        *size = abs;
        return s;
    }
};

// Gate and up of each row's experts, with an activation; then down, of slots; then the mix. The result's rows.
struct layer {
    experts gate, up, down;
    lr_cu_choice c;
    int act;
};

bool forward(const std::string &name, const layer &l, lr_cu_math math, const floats &x, const floats &logits, int m,
             bool together, floats *chosen, floats *inner, floats *y)
{
    int used = l.c.n_used, slots = m * used, width = l.gate.k, ff = l.gate.n;
    routed t(l.c.n_experts, used, m, math, 0, l.c.n_experts);
    lr_cu_form form = lr_cu_linear_form(math, l.gate.type, m), form2 = lr_cu_linear_form(math, l.down.type, slots);
    lr_cu_product p = {}, d = {};
    p.n_weights = together ? 2 : 1;
    p.slots = d.slots = &t.s;
    p.of_rows = true;
    p.w[0] = l.gate.weight();
    p.w[1] = l.up.weight();
    p.bias[0] = l.gate.dbias;
    p.bias[1] = l.up.dbias;
    p.glu = together;
    p.act = l.act;
    d.n_weights = 1;
    d.w[0] = l.down.weight();
    d.bias[0] = l.down.dbias;
    dev<float> dx(x), dl(logits), h((size_t)slots * ff), h2((size_t)slots * ff), o((size_t)slots * width),
        dy((size_t)m * width);
    dev<uint8_t> px(lr_cu_rows_bytes(form, m, width)), ph(lr_cu_rows_bytes(form2, slots, ff)),
        work(lr_cu_product_work(math, &p, m) + lr_cu_product_work(math, &d, slots));
    p.y[0] = h;
    d.y[0] = o;
    bool ok = run(name, [&] {
        cudaError_t e = lr_cu_route(&l.c, &t.s, dl, nullptr, nullptr, t.chosen, 0);
        if (!e) e = lr_cu_rows(dx, m, width, {nullptr, px, form}, 0);
        if (!e) e = lr_cu_multiply(math, &p, px, m, work, 0);
        if (!together) {
            p.w[0] = p.w[1];
            p.bias[0] = p.bias[1];
            p.y[0] = h2;
            if (!e) e = lr_cu_multiply(math, &p, px, m, work, 0);
            if (!e) e = lr_cu_glu(l.act, h, h2, slots, ff, {h, nullptr, LR_CU_F32}, 0);
        }
        if (!e) e = lr_cu_rows(h, slots, ff, {nullptr, ph, form2}, 0);
        if (!e) e = lr_cu_multiply(math, &d, ph, slots, work, 0);
        if (!e) e = lr_cu_mix(&t.s, o, t.chosen, m, width, {dy, nullptr, LR_CU_F32}, 0);
        return e;
    });
    if (!ok) return false;
    *chosen = t.chosen.get();
    *y = dy.get();
    // the inner rows by (row, rank)
    auto at = t.ints(t.s.at, slots);
    auto raw = h.get();
    inner->resize(raw.size());
    for (int i = 0; i < slots; i++) std::copy_n(&raw[(size_t)at[i] * ff], ff, &(*inner)[(size_t)i * ff]);
    return true;
}

double glu(int act, double g, double u)
{
    if (act == LR_ACT_SWIGLU_CLAMP) {
        g = fmin(g, 7);
        return g / (1 + exp(-1.702 * g)) * (fmin(fmax(u, -7), 7) + 1);
    }
    return g / (1 + exp(-g)) * u;
}

void against_double(const std::string &name, const layer &l, lr_cu_math math, const floats &x, int m,
                    const floats &chosen, const floats &inner, const floats &y, double tol)
{
    int used = l.c.n_used, ff = l.gate.n, width = l.gate.k;
    bool half = math != LR_CU_REF;
    std::vector<double> want, size, want_y((size_t)m * width), size_y(want_y.size());
    for (int row = 0; row < m; row++)
        for (int i = 0; i < used; i++) {
            int e = (int)chosen[(size_t)row * 2 * used + i];
            double w = chosen[(size_t)row * 2 * used + used + i];
            const float *in = &inner[((size_t)row * used + i) * ff];
            for (int f = 0; f < ff; f++) {
                double sg, su, g = l.gate.dot(e, f, &x[(size_t)row * width], half, &sg);
                double u = l.up.dot(e, f, &x[(size_t)row * width], half, &su);
                want.push_back(glu(l.act, g, u));
                size.push_back(sg * (1 + fabs(u)) + su * (1 + fabs(g)));
            }
            for (int f = 0; f < width; f++) {
                double s;
                want_y[(size_t)row * width + f] += w * l.down.dot(e, f, in, half, &s);
                size_y[(size_t)row * width + f] += fabs(w) * s;
            }
        }
    near(name + ": inner", inner, want, tol, &size);
    near(name + ": out", y, want_y, tol, &size_y);
}

void test_experts()
{
    rnd r(62);
    const struct {
        int type, down, act;
    } kinds[] = {
        {LR_Q8_0, LR_Q6_K, LR_ACT_SILU}, {LR_MXFP4, LR_MXFP4, LR_ACT_SWIGLU_CLAMP}, {LR_BF16, LR_BF16, LR_ACT_SILU}};
    for (auto &k : kinds) {
        if (!lr_cu_weight_good(k.type) || (small_only && k.type == LR_MXFP4)) continue;
        int width = 96, ff = k.down == LR_Q6_K ? 256 : 96, many = small_only ? 13 : 150;
        layer l = {experts(r, k.type, 5, ff, width),
                   experts(r, k.type, 5, ff, width),
                   experts(r, k.down, 5, width, ff),
                   {5, 2, 2, false, 1, 0, 0, 0},
                   k.act};
        auto x = normals(r, (size_t)many * width), logits = normals(r, (size_t)many * 5);
        floats chosen, inner, all, all_inner, y;
        for (bool together : {true, false})
            for (int m : {many, 1, 4}) {
                if (small_only && m == 4) continue;
                std::string name = fmt("experts %s, %d rows%s", lr_dtype_name(k.type), m, together ? " together" : "");
                int from = m == many ? 0 : m == 1 ? 2 : 3;
                floats part(&x[(size_t)from * width], &x[(size_t)(from + m) * width]),
                    pl(&logits[(size_t)from * 5], &logits[(size_t)(from + m) * 5]);
                if (!forward(name, l, LR_CU_EXACT, part, pl, m, together, &chosen, &inner, &y)) return;
                if (m != many) { // the same bits as among many
                    same(name + ": inner", inner.data(), &all_inner[(size_t)from * 2 * ff], inner.size() * 4);
                    same(name, y.data(), &all[(size_t)from * width], y.size() * 4);
                    continue;
                }
                all = y;
                all_inner = inner;
                against_double(name, l, LR_CU_EXACT, part, m, chosen, inner, y, k.type == LR_BF16 ? 6e-3 : 1e-3);
            }
        for (lr_cu_math math : {LR_CU_REF, LR_CU_FAST})
            for (int m : {1, 6}) {
                if (small_only && m == 1) continue;
                std::string name = fmt("experts %s, %d rows, math %d", lr_dtype_name(k.type), m, math);
                floats part(x.begin(), x.begin() + (size_t)m * width), pl(logits.begin(), logits.begin() + m * 5);
                if (!forward(name, l, math, part, pl, m, false, &chosen, &inner, &y)) return;
                against_double(name, l, math, part, m, chosen, inner, y, math == LR_CU_REF ? 2e-6 : 1e-2);
            }
    }
}

// Three weights at once: each as alone, but for the cut of k; a row's bits in any company.
void test_joint()
{
    rnd r(63);
    experts q(r, LR_Q8_0, 1, 130, 1056), k(r, LR_Q8_0, 1, 5, 1056), v(r, LR_Q8_0, 1, 64, 1056);
    const experts *w[] = {&q, &k, &v};
    int many = small_only ? 10 : 70;
    auto x = normals(r, (size_t)many * q.k);
    std::vector<floats> all(3);
    for (int m : {many, 1, 9}) {
        std::string name = fmt("joint, %d rows", m);
        floats part(x.end() - (size_t)m * q.k, x.end());
        lr_cu_form form = lr_cu_linear_form(LR_CU_EXACT, q.type, m);
        dev<float> dx(part), y0((size_t)m * q.n), y1((size_t)m * k.n), y2((size_t)m * v.n);
        dev<float> *y[] = {&y0, &y1, &y2};
        lr_cu_product p = {};
        p.n_weights = 3;
        for (int i = 0; i < 3; i++) {
            p.w[i] = w[i]->weight();
            p.bias[i] = i == 1 ? nullptr : w[i]->dbias.p;
            p.y[i] = *y[i];
        }
        dev<uint8_t> packed(lr_cu_rows_bytes(form, m, q.k)), work(lr_cu_product_work(LR_CU_EXACT, &p, m));
        if (!run(name, [&] {
                cudaError_t e = lr_cu_rows(dx, m, q.k, {nullptr, packed, form}, 0);
                return e ? e : lr_cu_multiply(LR_CU_EXACT, &p, packed, m, work, 0);
            }))
            return;
        for (int i = 0; i < 3; i++) {
            auto got = y[i]->get();
            if (m == many) {
                std::vector<double> want, size;
                for (int row = 0; row < m; row++)
                    for (int f = 0; f < w[i]->n; f++) {
                        double s;
                        want.push_back(w[i]->dot(0, f, &part[(size_t)row * q.k], true, &s) - (i == 1 ? k.bias[f] : 0));
                        size.push_back(s);
                    }
                near(name, got, want, 1e-3, &size);
                all[i] = got;
            } else {
                same(name, got.data(), &all[i][(size_t)(many - m) * w[i]->n], got.size() * 4);
            }
        }
        p.w[1].k -= 32;
        refuses("weights of two widths", [&] { return lr_cu_multiply(LR_CU_EXACT, &p, packed, m, work, 0); });
    }
}
} // namespace

void test_moe()
{
    test_route();
    test_experts();
    test_joint();
}
