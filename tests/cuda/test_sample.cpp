// test_sample.cpp - sample.cu against a plain sampler that sorts everything.
#include "test.h"
#include <algorithm>

namespace
{
double uniform(uint64_t seed, uint64_t position)
{
    uint64_t z = seed ^ (0x9e3779b97f4a7c15u * (position + 1)) ^ 0xd1b54a32d192ed03u;
    for (int i = 0; i < 2; i++) {
        z += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

struct entry {
    int id;
    float x;
};

// The token, and how far the drawn number was from the next one's share (a tie may go either way).
int draw(const lr_cu_sample &w, std::vector<float> x, const std::vector<lr_cu_edit> &edits, const uint32_t *mask,
         double *margin)
{
    *margin = 1;
    int n = (int)x.size();
    for (int i = 0; i < n; i++)
        if (!(x[i] > -INFINITY) || (mask && !(mask[i / 32] >> i % 32 & 1))) x[i] = -INFINITY;
    for (int i = 0; i < w.n_edits; i++) {
        const lr_cu_edit &e = edits[w.edit_at + i];
        float &v = x[e.id];
        v += e.bias;
        if (e.seen && w.repetition != 1) v = v > 0 ? v / w.repetition : v * w.repetition;
        if (e.count) v -= w.presence + w.frequency * (float)e.count;
    }
    std::vector<entry> c;
    for (int i = 0; i < n; i++)
        if (x[i] > -INFINITY) c.push_back({i, x[i]});
    std::vector<entry> by_id = c;
    std::stable_sort(c.begin(), c.end(), [](const entry &a, const entry &b) { return a.x > b.x; });
    if (c.empty()) return -1;
    if (!(w.temperature > 0)) return c[0].id;
    auto warm = [&](std::vector<entry> &l) {
        float best = c[0].x;
        if (w.temperature != 1)
            for (auto &e : l) e.x = (e.x - best) / w.temperature;
    };
    bool narrows = w.top_k > 0 || w.top_p < 1 || w.min_p > 0;
    if (!narrows) {
        warm(by_id);
        double best = -1e300, sum = 0, at = 0, u = uniform(w.seed, w.position);
        for (auto &e : by_id) best = fmax(best, e.x);
        for (auto &e : by_id) sum += exp(e.x - best);
        for (auto &e : by_id) {
            at += exp(e.x - best);
            *margin = fmin(*margin, fabs(at / sum - u));
            if (at > u * sum) return e.id;
        }
        return by_id.back().id;
    }
    if (!w.temperature_last) warm(c);
    if (w.top_k > 0 && (int)c.size() > w.top_k) c.resize(w.top_k);
    auto total = [&] {
        double s = 0;
        for (auto &e : c) s += exp((double)e.x - c[0].x);
        return s;
    };
    if (w.top_p < 1) {
        double s = 0, all = total();
        size_t k = 0;
        while (k < c.size() && s < (double)w.top_p * all) {
            s += exp((double)c[k++].x - c[0].x);
            *margin = fmin(*margin, fabs(s / all - (double)w.top_p));
        }
        c.resize(std::max<size_t>(k, 1));
    }
    if (w.min_p > 0) {
        float least = c[0].x + logf(w.min_p < 1 ? w.min_p : 1);
        size_t k = 0;
        while (k < c.size() && c[k].x >= least) k++;
        c.resize(k);
    }
    if (w.temperature_last) warm(c);
    double sum = total(), at = 0, u = uniform(w.seed, w.position);
    for (auto &e : c) {
        at += exp((double)e.x - c[0].x);
        *margin = fmin(*margin, fabs(at / sum - u));
        if (at > u * sum) return e.id;
    }
    return c.back().id;
}

void test_chains(int n_vocab)
{
    rnd r(41);
    const int rows = 3;
    auto logits = normals(r, (size_t)rows * n_vocab, 3);
    for (int i = 0; i < n_vocab; i++) { // row 1 has many ties, row 2 holes
        logits[n_vocab + i] = (float)(i % 7);
        if (i % 5 == 0) logits[2 * n_vocab + i] = i % 10 ? NAN : -INFINITY;
    }
    int words = (n_vocab + 31) / 32;
    std::vector<uint32_t> masks(2 * words);
    for (auto &m : masks) m = r.u32() & r.u32();
    std::vector<lr_cu_edit> edits;
    for (int i = 0; i < 40; i++) edits.push_back({i * 7 % n_vocab, i % 3, i % 2, i % 4 ? 0 : 1.5f});
    std::sort(edits.begin(), edits.end(), [](auto &a, auto &b) { return a.id < b.id; });
    edits.erase(std::unique(edits.begin(), edits.end(), [](auto &a, auto &b) { return a.id == b.id; }), edits.end());

    std::vector<lr_cu_sample> what;
    auto add = [&](float t, int k, float p, float m) {
        lr_cu_sample w = {
            t, k, p, m, 1, 0, 0, 0, 0, 0, -1, (int)what.size() % rows, 77 + what.size(), 1000 + what.size()};
        what.push_back(w);
        return &what.back();
    };
    add(0, 0, 1, 0);
    add(0, 0, 1, 0);
    add(0, 0, 1, 0);
    for (int i = 0; i < (small_only ? 2 : 7); i++) {
        add(0.8f, 0, 1, 0);
        add(1, 5, 1, 0)->mask = 1;
        add(0.7f, 40, 0.9f, 0);
        add(1.3f, 0, 0.5f, 0.05f)->temperature_last = i % 2;
        add(1, 0, 1, 0.2f)->mask = 0;
        *add(0.9f, 20, 1, 0.1f) = {0.9f, 20,    1, 0.1f,       1.3f, 0.4f, 0.2f, 0, 0, (int)edits.size(),
                                   0,    i % 3, 5, (uint64_t)i};
    }
    add(1, 1, 1, 0)->mask = 1;
    add(1, 0, 0, 0);
    add(0.6f, 1024, 1, 0);
    add(1, 0, 1, 0)->row = -1;

    dev<float> dl(logits);
    dev<lr_cu_sample> dw(what);
    dev<lr_cu_edit> de(edits);
    dev<uint32_t> dm(masks);
    dev<lr_cu_drawn> out(what.size());
    dev<uint8_t> work(lr_cu_sample_work((int)what.size(), n_vocab));
    std::string name = fmt("sample of %d", n_vocab);
    if (!run(name, [&] { return lr_cu_sample_rows(dl, n_vocab, dw, (int)what.size(), de, dm, out, work, 0); })) return;
    same(name + ": logits stay", dl.get().data(), logits.data(), logits.size() * 4);
    auto got = out.get();
    for (size_t i = 0; i < what.size(); i++) {
        const lr_cu_sample &w = what[i];
        std::string n = fmt("sample of %d, entry %zu: t %g k %d p %g m %g row %d", n_vocab, i, (double)w.temperature,
                            w.top_k, (double)w.top_p, (double)w.min_p, w.row);
        if (w.row < 0) {
            verdict(got[i].token == -1, n, "drawn");
            continue;
        }
        std::vector<float> x(logits.begin() + (size_t)w.row * n_vocab, logits.begin() + (size_t)(w.row + 1) * n_vocab);
        double margin;
        int want = draw(w, x, edits, w.mask >= 0 ? &masks[(size_t)w.mask * words] : nullptr, &margin);
        verdict(got[i].status == LR_CU_DRAWN && (got[i].token == want || margin < 1e-6), n,
                fmt("token %d status %d, want %d (margin %g)", got[i].token, got[i].status, want, margin));
        double best = -1e300, sum = 0;
        for (float v : x)
            if (v > -INFINITY) best = fmax(best, v);
        for (float v : x)
            if (v > -INFINITY) sum += exp(v - best);
        verdict(fabs(got[i].logprob - (x[got[i].token] - best - log(sum))) < 1e-5 && got[i].top == (float)best, n,
                fmt("logprob %g", (double)got[i].logprob));
    }
    std::vector<int32_t> at(what.size(), -1), tokens(4, 9);
    at[0] = 2;
    at[4] = 0;
    dev<int32_t> da(at), dt(tokens);
    if (run("feed", [&] { return lr_cu_feed(out, da, (int)at.size(), dt, 0); })) {
        auto t = dt.get();
        verdict(t[2] == got[0].token && t[0] == got[4].token && t[1] == 9 && t[3] == 9, "feed", "wrong tokens");
    }
}

void test_refusals()
{
    int n = 3000;
    std::vector<float> x(4 * n, 0.0f); // row 0: flat
    for (int i = 0; i < n; i++) {
        x[n + i] = NAN;
        x[2 * n + i] = i == 7 ? INFINITY : 0;
        x[3 * n + i] = (float)i * 1e-3f;
    }
    std::vector<uint32_t> none((n + 31) / 32, 0);
    auto entry = [](int row, float p, float m, int k, int mask) {
        return lr_cu_sample{1, k, p, m, 1, 0, 0, 0, 0, 0, mask, row, 1, 1};
    };
    std::vector<lr_cu_sample> w = {entry(0, 0.9f, 0, 0, -1), entry(1, 1, 0, 0, -1),    entry(2, 1, 0, 0, -1),
                                   entry(0, 1, 0, 0, 0),     entry(0, 1, 0.5f, 0, -1), entry(3, 1, 0, 1500, -1),
                                   entry(3, 0.2f, 0, 0, -1), entry(0, 0.9f, 0, 30, -1)};
    std::vector<int> want = {LR_CU_TO_HOST, LR_CU_NOT_FINITE, LR_CU_NOT_FINITE, LR_CU_NONE_LEFT,
                             LR_CU_TO_HOST, LR_CU_TO_HOST,    LR_CU_DRAWN,      LR_CU_DRAWN};
    dev<float> dl(x);
    dev<lr_cu_sample> dw(w);
    dev<uint32_t> dm(none);
    dev<lr_cu_drawn> out(w.size());
    dev<uint8_t> work(lr_cu_sample_work((int)w.size(), n));
    if (!run("odd rows", [&] { return lr_cu_sample_rows(dl, n, dw, (int)w.size(), nullptr, dm, out, work, 0); }))
        return;
    auto got = out.get();
    for (size_t i = 0; i < w.size(); i++)
        verdict(got[i].status == want[i] && (got[i].token >= 0) == (want[i] == LR_CU_DRAWN), fmt("odd row %zu", i),
                fmt("status %d token %d, want %d", got[i].status, got[i].token, want[i]));
}
} // namespace

void test_sample()
{
    test_chains(50);
    if (!small_only) test_chains(1999);
    test_refusals();
}
