// test_attn.cpp - attn.cu against double, and a row's bits whatever its tile, width, chunking and pages.
#include "test_kv.h"

namespace
{
struct seq_of {
    int pos, n; // rows at positions pos .. pos + n - 1
    bool tree;
};
struct attn_case {
    const char *name;
    int type, heads, kv_heads, dim, block_size;
    float softcap;
    int window;
    bool sinks;
    std::vector<seq_of> seqs;
    int v_type = -1; // as type
    int of_v() const { return v_type < 0 ? type : v_type; }
};

struct scene {
    attn_case c;
    std::vector<int32_t> seq, pos, slot, table, table_at, tree_at;
    std::vector<uint32_t> bits;
    std::vector<float> q, sinks;
    int rows = 0, max_slots = 0, blocks = 0;
    bool trees = false;
};

// Tree rows: row i's parent is (i - 1) / 2.
scene make(const attn_case &c, rnd &r)
{
    scene s;
    s.c = c;
    for (size_t i = 0; i < c.seqs.size(); i++) {
        const seq_of &q = c.seqs[i];
        s.table_at.push_back((int)s.table.size());
        int blocks = (q.pos + q.n + c.block_size - 1) / c.block_size;
        for (int b = 0; b < blocks; b++) s.table.push_back(s.blocks++);
        for (int j = 0; j < q.n; j++) {
            s.seq.push_back((int)i);
            s.slot.push_back(q.pos + j);
            int depth = 0;
            uint32_t mask = 0;
            for (int t = q.tree ? j : 0;; t = (t - 1) / 2) {
                mask |= 1u << t;
                if (t == 0) break;
                depth++;
            }
            s.pos.push_back(q.tree ? q.pos + depth : q.pos + j);
            s.tree_at.push_back(q.tree ? q.pos : -1);
            s.bits.push_back(q.tree ? mask : 0);
            s.trees = s.trees || q.tree;
        }
        if (q.pos + q.n > s.max_slots) s.max_slots = q.pos + q.n;
    }
    s.blocks += 2;
    for (size_t i = s.table.size(); i > 1; i--) std::swap(s.table[i - 1], s.table[r.below((int)i)]);
    s.rows = (int)s.seq.size();
    s.q = normals(r, (size_t)s.rows * c.heads * c.dim, 1.5f);
    s.sinks = normals(r, c.heads, 2);
    return s;
}

// Keys and values for all slots that hold something; the rest of the store stays NaN.
void fill(const scene &s, kv_store &kv, rnd &r, std::vector<float> *k, std::vector<float> *v)
{
    const attn_case &c = s.c;
    std::vector<int32_t> seq, slot;
    for (size_t i = 0; i < c.seqs.size(); i++)
        for (int t = 0; t < c.seqs[i].pos + c.seqs[i].n; t++) {
            seq.push_back((int)i);
            slot.push_back(t);
        }
    size_t n = seq.size() * c.kv_heads * c.dim;
    *k = normals(r, n, 1);
    *v = normals(r, n, 1);
    dev<float> dk(*k), dv(*v);
    dev<int32_t> dseq(seq), dslot(slot), dtable(s.table), dat(s.table_at);
    lr_cu_rows_at at = {(int)seq.size(), dseq, dslot, dslot, dtable, dat, nullptr, nullptr, 0};
    lr_cu_kv view = kv.view();
    run("fill", [&] { return lr_cu_kv_put(&view, dk, dv, &at, 0); });
}

// Blocks that no row of their sequence sees any more have gone: a number that leads nowhere is in their place.
void forget(scene &s)
{
    for (size_t i = 0; i < s.c.seqs.size() && s.c.window > 0; i++) {
        const seq_of &q = s.c.seqs[i];
        for (int b = 0; (b + 1) * s.c.block_size <= q.pos - s.c.window + 1; b++)
            s.table[s.table_at[i] + b] = -(1 << 20);
    }
}

bool attend(const std::string &name, const scene &s, const kv_store &kv, bool wide, int tile_rows, int max_slots,
            std::vector<float> *out)
{
    const attn_case &c = s.c;
    dev<int32_t> dseq(s.seq), dpos(s.pos), dslot(s.slot), dtable(s.table), dat(s.table_at), dtree(s.tree_at);
    dev<uint32_t> dbits(s.bits);
    dev<float> dq(s.q), dsinks(s.sinks), dout(s.q.size());
    if (lr_cu_kv_turned(c.type)) run(name, [&] { return lr_cu_turn_rows(dq, s.rows, c.heads, c.dim, dq, 0); });
    std::vector<lr_cu_tile> tiles;
    for (int i = 0; i < s.rows;) {
        int n = 1;
        while (n < tile_rows && i + n < s.rows && s.seq[i + n] == s.seq[i]) n++;
        tiles.push_back({i, n});
        i += n;
    }
    tiles.push_back({0, 0}); // none
    dev<lr_cu_tile> dtiles(tiles);
    lr_cu_rows_at at = {s.rows, dseq, dpos, dslot, dtable, dat, s.trees ? dtree.p : nullptr, dbits, 1};
    lr_cu_attn p = {c.heads, 1 / sqrtf((float)c.dim), c.softcap, c.window, c.sinks ? dsinks.p : nullptr};
    lr_cu_kv view = kv.view();
    dev<uint8_t> work(wide ? 0 : lr_cu_attn_work(s.rows, c.heads, c.dim, max_slots));
    bool list = tile_rows > 0;
    if (!run(name, [&] {
            return lr_cu_attn_rows(&p, &view, dq, &at, list ? dtiles.p : nullptr, list ? (int)tiles.size() : s.rows, 0,
                                   wide, max_slots, dout, work, 0);
        }))
        return false;
    if (lr_cu_kv_turned(c.of_v())) run(name, [&] { return lr_cu_turn_rows(dout, s.rows, c.heads, c.dim, dout, 0); });
    *out = dout.get();
    return true;
}

bool visible(const scene &s, int row, int slot)
{
    if (slot > s.slot[row]) return false;
    if (s.tree_at[row] >= 0 && slot >= s.tree_at[row]) return s.bits[row] >> (slot - s.tree_at[row]) & 1;
    return s.c.window == 0 || slot > s.pos[row] - s.c.window;
}

std::vector<double> reference(const scene &s, std::vector<float> k, std::vector<float> v)
{
    const attn_case &c = s.c;
    std::vector<float> q = s.q;
    if (lr_cu_kv_turned(c.type)) {
        q = turned(q, c.dim);
        k = turned(k, c.dim);
    }
    if (lr_cu_kv_turned(c.of_v())) v = turned(v, c.dim);
    int type16 = c.type == LR_BF16 || c.type == LR_F32 ? c.type : LR_F16; // what is multiplied
    std::vector<double> out(s.q.size());
    std::vector<size_t> begin;
    size_t at = 0;
    for (auto &seq : c.seqs) {
        begin.push_back(at);
        at += (size_t)(seq.pos + seq.n);
    }
    auto kept = [&](int type, const std::vector<float> &x, size_t j) {
        std::vector<float> group;
        if (lr_cu_kv_turned(type)) group.assign(x.begin() + j / 32 * 32, x.begin() + j / 32 * 32 + 32);
        return kv_round(type16, kv_round(type, x[j], group), {});
    };
    for (int row = 0; row < s.rows; row++)
        for (int h = 0; h < c.heads; h++) {
            int kvh = h / (c.heads / c.kv_heads), n = s.slot[row] + 1;
            std::vector<double> p(n);
            double top = c.sinks ? s.sinks[h] : -INFINITY, sum = 0;
            for (int t = 0; t < n; t++) {
                p[t] = -INFINITY;
                if (!visible(s, row, t)) continue;
                double d = 0;
                size_t base = ((begin[s.seq[row]] + t) * c.kv_heads + kvh) * c.dim;
                for (int i = 0; i < c.dim; i++)
                    d += kv_round(type16, q[((size_t)row * c.heads + h) * c.dim + i], {}) * kept(c.type, k, base + i);
                d /= sqrt((double)c.dim);
                if (c.softcap > 0) d = c.softcap * tanh(d / c.softcap);
                p[t] = d;
                top = fmax(top, d);
            }
            if (c.sinks) sum = exp(s.sinks[h] - top);
            for (double &x : p) sum += x = exp(x - top);
            for (int t = 0; t < n; t++)
                if (p[t] > 0)
                    for (int i = 0; i < c.dim; i++)
                        out[((size_t)row * c.heads + h) * c.dim + i] +=
                            p[t] / sum * kept(c.of_v(), v, ((begin[s.seq[row]] + t) * c.kv_heads + kvh) * c.dim + i);
        }
    return lr_cu_kv_turned(c.of_v()) ? turned(out, c.dim) : out;
}

void one(const attn_case &c, uint64_t seed)
{
    rnd r(seed), r2(seed + 1), r3(seed + 1);
    scene s = make(c, r);
    std::string name = fmt("attn %s", c.name);
    kv_store kv(c.type, c.of_v(), c.kv_heads, c.dim, c.block_size, s.blocks);
    std::vector<float> k, v, decode, other;
    fill(s, kv, r2, &k, &v);
    std::vector<int32_t> table = s.table;
    forget(s);
    if (!attend(name, s, kv, false, 0, s.max_slots, &decode)) return;
    near(name, decode, reference(s, k, v), c.type == LR_F32 ? 2e-6 : c.type == LR_BF16 ? 6e-3 : 1e-3);
    auto again = [&](const char *how, bool wide, int tile_rows, int max_slots) {
        std::string n = name + ": " + how;
        if (attend(n, s, kv, wide, tile_rows, max_slots, &other))
            same(n, other.data(), decode.data(), decode.size() * 4);
    };
    int narrow = lr_cu_attn_tile_rows(c.heads, c.kv_heads, c.dim, false),
        wide = lr_cu_attn_tile_rows(c.heads, c.kv_heads, c.dim, true);
    again("wide tiles", true, wide, s.max_slots);
    if (small_only) return;
    if (narrow > 1) again("narrow tiles", false, narrow, s.max_slots);
    again("more chunks", false, 1, s.max_slots + 700);
    again("wide tiles of one", true, 0, s.max_slots);
    s.table = table; // other pages
    for (auto &b : s.table) b = s.blocks - 1 - b;
    kv_store kv2(c.type, c.of_v(), c.kv_heads, c.dim, c.block_size, s.blocks);
    fill(s, kv2, r3, &k, &v);
    forget(s);
    if (attend(name, s, kv2, true, wide, s.max_slots, &other))
        same(name + ": other pages", other.data(), decode.data(), decode.size() * 4);
}
} // namespace

void test_attn()
{
    const attn_case cases[] = {
        {"f16 64", LR_F16, 4, 2, 64, 16, 0, 0, false, {{0, 1, false}, {63, 3, false}, {255, 2, false}, {20, 9, false}}},
        {"bf16 80 softcap", LR_BF16, 3, 1, 80, 7, 2.5f, 0, false, {{100, 4, false}, {0, 70, false}}},
        {"f16 128 window", LR_F16, 4, 1, 128, 32, 0, 50, false, {{300, 6, false}, {10, 2, false}}},
        {"f16 64 long window sinks", LR_F16, 2, 2, 64, 16, 0, 300, true, {{590, 2, false}, {5, 1, false}}},
        {"f32 20", LR_F32, 2, 1, 20, 5, 0, 0, true, {{40, 3, false}}},
        {"f32 64 trees window softcap", LR_F32, 2, 1, 64, 16, 3, 40, false, {{100, 7, true}, {50, 2, false}}},
        {"q8_0 64", LR_Q8_0, 4, 2, 64, 16, 0, 0, false, {{70, 5, false}}},
        {"q4_0 64", LR_CU_Q6, 4, 2, 64, 16, 0, 0, false, {{70, 5, false}, {258, 1, false}}, LR_Q4_0},
        {"q4_0 128 trees window", LR_CU_Q6, 4, 1, 128, 16, 0, 60, true, {{130, 7, true}, {3, 1, false}}, LR_Q4_0},
        {"q8_0 96 f16", LR_Q8_0, 2, 1, 96, 7, 3, 0, false, {{40, 30, false}}, LR_F16},
        {"f16 64 e4m3", LR_F16, 2, 1, 64, 16, 0, 0, false, {{40, 5, true}}, LR_CU_E4M3},
        {"e4m3 96", LR_CU_E4M3, 2, 2, 96, 16, 0, 0, false, {{65, 2, false}}},
        {"f16 256", LR_F16, 2, 1, 256, 16, 30.0f, 0, false, {{80, 5, false}}},
        {"20 heads share", LR_F16, 20, 1, 32, 16, 0, 0, false, {{30, 2, false}, {0, 1, false}}},
        {"trees", LR_F16, 4, 2, 64, 16, 0, 0, false, {{60, 7, true}, {130, 1, false}, {250, 15, true}}},
        {"trees, window", LR_F16, 2, 1, 64, 16, 0, 40, false, {{300, 7, true}}},
    };
    uint64_t seed = 31;
    int i = 0;
    for (auto &c : cases) {
        i++;
        if (!small_only || i == 1 || i == 4 || i == 5 || i == 8 || i == 15) one(c, seed += 2);
    }
    kv_store kv(LR_F16, LR_F16, 2, 64, 16, 1);
    lr_cu_kv view = kv.view();
    lr_cu_attn p = {3, 1, 0, 0, nullptr};
    refuses("3 heads on 2",
            [&] { return lr_cu_attn_rows(&p, &view, nullptr, nullptr, nullptr, 1, 0, false, 1, nullptr, nullptr, 0); });
    verdict(lr_cu_attn_tile_rows(32, 8, 128, true) == 16 && lr_cu_attn_tile_rows(32, 8, 128, false) == 4 &&
                lr_cu_attn_tile_rows(64, 1, 128, false) == 1 && lr_cu_attn_work(4, 32, 128, 256) == 0,
            "tile sizes", "wrong");
}
