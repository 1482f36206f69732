// test_sample.cpp - sample.cu against a plain sampler that sorts everything: the same token each time.
#include "base/mass.h"
#include "test.h"
#include <algorithm>

namespace
{
struct entry {
    int id;
    float x;
};

struct request {
    lr_draw d;
    lr_draw_stage *add(int kind, float a, float b = 0)
    {
        lr_draw_stage *s = &d.stage[d.n_stages++];
        *s = {kind, a, b, 0, 0};
        return s;
    }
    void top_k(int n) { add(LR_DRAW_TOP_K, 0)->n = n; }
};

uint64_t mass(const std::vector<entry> &c, float best)
{
    uint64_t s = 0;
    for (auto &e : c) s += lr_mass_units(lr_mass(e.x - best));
    return s;
}

int pick(const std::vector<entry> &c, float best, double u)
{
    uint64_t target = lr_mass_target(u, mass(c, best)), at = 0;
    for (auto &e : c)
        if ((at += lr_mass_units(lr_mass(e.x - best))) > target) return e.id;
    return -2;
}

// The row as a stage leaves it: a list in the order of ids, or (narrowed) with the best first.
void narrow(const lr_draw_stage &s, std::vector<entry> &c, size_t n_vocab, bool &narrowed)
{
    float best = -INFINITY;
    size_t n = 0;
    for (auto &e : c) best = fmaxf(best, e.x);
    if (s.kind == LR_DRAW_TEMPERATURE) {
        for (auto &e : c) e.x = (e.x - best) / s.a;
        return;
    }
    if (s.kind == LR_DRAW_TOP_K && !narrowed && (size_t)s.n >= n_vocab) return;
    if (!narrowed) std::stable_sort(c.begin(), c.end(), [](const entry &a, const entry &b) { return a.x > b.x; });
    narrowed = true;
    if (s.kind == LR_DRAW_TOP_K) n = (size_t)s.n;
    if (s.kind == LR_DRAW_MIN_P)
        while (n < c.size() && c[n].x >= best + s.a) n++;
    if (s.kind == LR_DRAW_TOP_P) {
        uint64_t need = lr_mass_share(s.a, mass(c, best)), sum = 0;
        while (sum < need) sum += lr_mass_units(lr_mass(c[n++].x - best));
    }
    if (n < c.size()) c.resize(n);
}

int draw(const lr_draw &w, std::vector<float> x, const std::vector<lr_draw_edit> &edits, const uint32_t *mask)
{
    int n = (int)x.size();
    bool narrowed = false;
    for (int i = 0; i < n; i++)
        if (!(x[i] > -INFINITY) || (mask && !(mask[i / 32] >> i % 32 & 1))) x[i] = -INFINITY;
    std::vector<entry> c;
    bool listed = false;
    for (int k = 0; k <= w.n_stages; k++) {
        const lr_draw_stage *s = k < w.n_stages ? &w.stage[k] : nullptr;
        for (int i = 0; s && s->kind <= LR_DRAW_COUNTS && i < s->n; i++) {
            const lr_draw_edit &e = edits[s->at + i];
            float &v = x[e.id];
            if (s->kind == LR_DRAW_ADD) v += e.value;
            if (s->kind == LR_DRAW_REPEAT) v = v > 0 ? v / s->a : v * s->a;
            if (s->kind == LR_DRAW_COUNTS) v -= s->a + s->b * e.value;
        }
        if (s && s->kind <= LR_DRAW_COUNTS) continue;
        if (!listed)
            for (int i = 0; i < n; i++)
                if (x[i] > -INFINITY) c.push_back({i, x[i]});
        listed = true;
        if (c.empty()) return -1;
        if (s) narrow(*s, c, x.size(), narrowed);
    }
    float best = -INFINITY;
    for (auto &e : c) best = fmaxf(best, e.x);
    return pick(c, best, w.u);
}

void test_chains(int n_vocab)
{
    rnd r(41);
    const int rows = 4;
    auto logits = normals(r, (size_t)rows * n_vocab, 3);
    for (int i = 0; i < n_vocab; i++) { // row 1 has many ties, row 2 holes, row 3 both zeros and what weighs nothing
        logits[n_vocab + i] = (float)(i % 7);
        if (i % 5 == 0) logits[2 * n_vocab + i] = i % 10 ? NAN : -INFINITY;
        logits[3 * n_vocab + i] = i % 3 == 0 ? 0.0f : i % 3 == 1 ? -0.0f : -40.0f;
    }
    int words = (n_vocab + 31) / 32;
    std::vector<uint32_t> masks(2 * words);
    for (auto &m : masks) m = r.u32() & r.u32();
    std::vector<lr_draw_edit> edits;
    for (int i = 0; i < n_vocab; i += 3) edits.push_back({i, i % 4 == 0 ? -INFINITY : i % 2 ? 1.5f : -0.25f});

    std::vector<request> what;
    auto add = [&](int mask = -1) -> request & {
        what.push_back({{(int)what.size() % rows, mask, (int)what.size() % 7 - 1, 0, 0, {}}});
        what.back().d.u = (double)(r.u32() >> 1) * 0x1p-31;
        return what.back();
    };
    for (int i = 0; i < rows; i++) add().top_k(1);
    for (int i = 0; i < (small_only ? 4 : 20); i++) {
        add().add(LR_DRAW_TEMPERATURE, 0.8f);
        add(1).top_k(5);
        request &a = add();
        a.add(LR_DRAW_TEMPERATURE, 0.7f);
        a.top_k(40);
        a.add(LR_DRAW_TOP_P, 0.9f);
        request &b = add(i % 2 - 1);
        b.add(LR_DRAW_TOP_P, 0.5f + 0.02f * (float)i);
        b.add(LR_DRAW_MIN_P, logf(0.05f));
        b.add(LR_DRAW_TEMPERATURE, 1.3f);
        b.add(LR_DRAW_MIN_P, logf(0.2f));
        request &c = add(0);
        lr_draw_stage *s = c.add(LR_DRAW_ADD, 0);
        s->n = (int)edits.size() / 2;
        s = c.add(LR_DRAW_REPEAT, 1.3f);
        s->at = 2;
        s->n = (int)edits.size() - 2;
        s = c.add(LR_DRAW_COUNTS, 0.4f, 0.2f);
        s->n = (int)edits.size() / 3;
        if (i % 2) c.top_k(n_vocab / 2);
        request &d = add();
        d.add(LR_DRAW_TEMPERATURE, 1.4f);
        d.add(LR_DRAW_MIN_P, logf(0.1f));
        d.top_k(n_vocab + i);
        d.add(LR_DRAW_TOP_P, 0.95f);
        add().add(LR_DRAW_TOP_P, 0.9999f);
    }
    add(1).top_k(1);
    add().add(LR_DRAW_TOP_P, 1e-9f);
    add().d.out = -1;
    for (double u : {0.0, 1 - 0x1p-53}) { // the ends
        add().d.u = u;
        add().d.u = u;
        what.back().add(LR_DRAW_TOP_P, 0.99f);
    }
    std::vector<lr_draw> list;
    for (auto &w : what) list.push_back(w.d);
    int n = (int)list.size(), top = 5;
    dev<float> dl(logits);
    dev<lr_draw> dw(list);
    dev<lr_draw_edit> de(edits);
    dev<uint32_t> dm(masks);
    dev<lr_draw_result> out(n);
    dev<lr_draw_best> best((size_t)n * top);
    dev<uint8_t> work(lr_cu_draw_work(n, n_vocab));
    std::string name = fmt("draws of %d", n_vocab);
    if (!run(name, [&] { return lr_cu_draw_rows(dl, n_vocab, dw, n, de, dm, out, best, top, work, 0); })) return;
    same(name + ": logits stay", dl.get().data(), logits.data(), logits.size() * 4);
    auto got = out.get();
    auto tops = best.get();
    for (int i = 0; i < n; i++) {
        const lr_draw &w = list[i];
        std::string each = fmt("%s, entry %d: row %d, %d stages", name.c_str(), i, w.out, w.n_stages);
        if (w.out < 0) {
            verdict(got[i].token == -1, each, "drawn");
            continue;
        }
        std::vector<float> x(logits.begin() + (size_t)w.out * n_vocab, logits.begin() + (size_t)(w.out + 1) * n_vocab);
        int want = draw(w, x, edits, w.mask >= 0 ? &masks[(size_t)w.mask * words] : nullptr);
        verdict(got[i].status == LR_DRAWN && got[i].token == want, each,
                fmt("token %d status %d, want %d", got[i].token, got[i].status, want));
        if (w.n_top < 0 || got[i].token < 0) continue;
        std::vector<entry> c, all;
        for (int k = 0; k < n_vocab; k++) {
            if (x[k] > -INFINITY) c.push_back({k, x[k]});
            all.push_back({k, x[k] > -INFINITY ? x[k] : -INFINITY});
        }
        std::stable_sort(all.begin(), all.end(), [](const entry &a, const entry &b) { return a.x > b.x; });
        verdict(got[i].best == all[0].x && got[i].logit == x[got[i].token] && got[i].mass == mass(c, all[0].x), each,
                "the row's mass");
        for (int k = 0; k < w.n_top; k++) {
            const lr_draw_best &t = tops[(size_t)i * top + k];
            verdict(t.id == all[k].id && t.logit == all[k].x, each, fmt("best %d: %d, want %d", k, t.id, all[k].id));
        }
    }
}

void test_odd_rows()
{
    int n = 3000;
    std::vector<float> x(4 * n, 0.0f); // row 0: flat
    for (int i = 0; i < n; i++) {
        x[n + i] = NAN;
        x[2 * n + i] = i == 7 ? INFINITY : 0;
        x[3 * n + i] = i == 7 ? 3e38f : 0;
    }
    std::vector<uint32_t> none((n + 31) / 32, 0);
    std::vector<lr_draw_edit> edits = {{7, 3e38f}};
    std::vector<lr_draw> w(6, lr_draw{0, -1, 0, 1, 0.75, {{LR_DRAW_TOP_P, 0.9f, 0, 0, 0}}});
    w[1].out = 1;
    w[2].out = 2;
    w[3].mask = 0;
    w[4].out = 3;
    w[4].stage[0] = {LR_DRAW_ADD, 0, 0, 1, 0};
    w[5].n_stages = 0;
    const int want[] = {LR_DRAWN,          LR_DRAW_NOT_FINITE, LR_DRAW_NOT_FINITE,
                        LR_DRAW_NONE_LEFT, LR_DRAW_NOT_FINITE, LR_DRAWN};
    dev<float> dl(x);
    dev<lr_draw> dw(w);
    dev<lr_draw_edit> de(edits);
    dev<uint32_t> dm(none);
    dev<lr_draw_result> out(w.size());
    dev<uint8_t> work(lr_cu_draw_work((int)w.size(), n));
    if (!run("odd rows", [&] { return lr_cu_draw_rows(dl, n, dw, (int)w.size(), de, dm, out, nullptr, 0, work, 0); }))
        return;
    auto got = out.get();
    for (size_t i = 0; i < w.size(); i++)
        verdict(got[i].status == want[i] && (got[i].token >= 0) == (want[i] == LR_DRAWN), fmt("odd row %zu", i),
                fmt("status %d token %d, want %d", got[i].status, got[i].token, want[i]));
    verdict(got[0].token == 2025 && got[5].token == 2250 && got[0].mass == (uint64_t)n << 40, "a flat row",
            fmt("tokens %d, %d", got[0].token, got[5].token));
    refuses("a vocabulary too large",
            [&] { return lr_cu_draw_rows(dl, 1 << 24, dw, 1, de, dm, out, nullptr, 0, work, 0); });
}
} // namespace

void test_sample()
{
    test_chains(50);
    if (!small_only) test_chains(1999);
    if (!small_only) test_chains(40000);
    test_odd_rows();
}
