// test_kv.cpp - kv.cu: rotation, head norms, keys and values in every type, copies of blocks.
#include "test_kv.h"

double kv_read(const kv_store &kv, bool of_v, const std::vector<uint8_t> &bytes, int block, int head, int slot, int i)
{
    const uint8_t *p = bytes.data() + (size_t)block * (of_v ? kv.v_stride : kv.stride);
    size_t at = ((size_t)head * kv.block_size + slot) * kv.dim + i, n = (size_t)kv.heads * kv.block_size * kv.dim;
    uint16_t h;
    float f;
    switch (of_v ? kv.v_type : kv.type) {
    case LR_F32:
        memcpy(&f, p + 4 * at, 4);
        return f;
    case LR_F16:
        memcpy(&h, p + 2 * at, 2);
        return lr_f16_to_f32(h);
    case LR_BF16:
        memcpy(&h, p + 2 * at, 2);
        return lr_bf16_to_f32(h);
    case LR_Q8_0:
        memcpy(&h, p + (n + 15) / 16 * 16 + at / 32 * 2, 2);
        return (double)lr_f16_to_f32(h) * (int8_t)p[at];
    case LR_Q4_0: {
        memcpy(&h, p + (n / 2 + 15) / 16 * 16 + at / 32 * 2, 2);
        int q = p[at / 32 * 16 + at % 16] >> (at % 32 < 16 ? 0 : 4) & 15;
        return (double)lr_f16_to_f32(h) * (q < 8 ? q : q - 16);
    }
    case LR_CU_Q6: {
        size_t upper = (n / 2 + 15) / 16 * 16;
        memcpy(&h, p + upper + (n / 4 + 15) / 16 * 16 + at / 32 * 2, 2);
        int q = p[at / 32 * 16 + at % 16] >> (at % 32 < 16 ? 0 : 4) & 15;
        q |= (p[upper + at / 32 * 8 + at % 8] >> at % 32 / 8 * 2 & 3) << 4;
        return (double)lr_f16_to_f32(h) * (q < 32 ? q : q - 64);
    }
    default: { // E4M3
        int b = p[at], e = b >> 3 & 15, m = b & 7;
        double v = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
        return b & 0x80 ? -v : v;
    }
    }
}

double kv_round(int type, double v, const std::vector<float> &group)
{
    switch (type) {
    case LR_F32:
        return (float)v;
    case LR_F16:
        return round_f16((float)fmin(fmax(v, -65504.0), 65504.0));
    case LR_BF16:
        return round_bf16((float)v);
    case LR_Q8_0: {
        float max = 0;
        for (float x : group) max = fmaxf(max, fabsf(x));
        float d = round_f16(max / 127.0f);
        return d > 0 ? (double)d * nearbyintf((float)v / d) : 0;
    }
    case LR_Q4_0:
    case LR_CU_Q6: {
        float max = 0, high = 0, low = type == LR_Q4_0 ? -8 : -32;
        for (float x : group) {
            max = fmaxf(max, fabsf(x));
            high = fmaxf(high, x);
        }
        float d = round_f16((high == max ? max : -max) / low);
        return d != 0 ? (double)d * fmin(fmax(nearbyintf((float)v / d), low), -low - 1) : 0;
    }
    default: {
        double a = fmin(fabs(v), 448.0);
        int e;
        frexp(a, &e);
        double step = ldexp(1, e - 4 > -9 ? e - 4 : -9);
        return copysign(nearbyint(a / step) * step, v);
    }
    }
}

namespace
{
struct put_case {
    int type, heads, kv_heads, dim, n_rot, block_size;
    bool interleaved, norms, rotate, q;
    int v_type = -1; // as type
};

std::vector<float> rope_ref(const std::vector<float> &x, int heads, int dim, int n_rot, bool interleaved,
                            const std::vector<int> &pos, const std::vector<double> &freq, float attn_scale,
                            const std::vector<float> *norm)
{
    std::vector<float> y(x.size());
    for (size_t row = 0; row < pos.size(); row++)
        for (int h = 0; h < heads; h++) {
            const float *a = &x[(row * heads + h) * dim];
            float *b = &y[(row * heads + h) * dim];
            std::vector<double> v(a, a + dim);
            if (norm) {
                double s = 0;
                for (double t : v) s += t * t / dim;
                for (int i = 0; i < dim; i++) v[i] = v[i] / sqrt(s + 1e-6) * (*norm)[i];
            }
            for (int i = 0; i < dim; i++) b[i] = (float)v[i];
            for (int i = 0; i < n_rot / 2; i++) {
                double angle = pos[row] * freq[i], c = cos(angle) * attn_scale, s = sin(angle) * attn_scale;
                int p = interleaved ? 2 * i : i, q = interleaved ? 2 * i + 1 : i + n_rot / 2;
                b[p] = (float)(v[p] * c - v[q] * s);
                b[q] = (float)(v[q] * c + v[p] * s);
            }
        }
    return y;
}

void put_one(const put_case &c, rnd &r)
{
    std::string name =
        fmt("rope+kv type %d heads %d/%d dim %d rot %d block %d%s%s%s", c.type, c.heads, c.kv_heads, c.dim, c.n_rot,
            c.block_size, c.interleaved ? " interleaved" : "", c.norms ? " norms" : "", c.rotate ? "" : " plain");
    int v_type = c.v_type < 0 ? c.type : c.v_type;
    kv_store kv(c.type, v_type, c.kv_heads, c.dim, c.block_size, 6);
    std::vector<int32_t> seq = {0, 1, 1, -1}, pos = {5, 9000, 9001, 7},
                         slot = {5, 2 * c.block_size - 1, 2 * c.block_size, 7};
    slot[0] = c.block_size > 5 ? 5 : 0;
    std::vector<int32_t> table = {3, 0, 1, 4}, table_at = {0, 1};
    int m = (int)seq.size();
    auto q = normals(r, (size_t)m * c.heads * c.dim), k = normals(r, (size_t)m * c.kv_heads * c.dim, 3),
         v = normals(r, k.size()), wq = normals(r, c.dim), wk = normals(r, c.dim);
    if (c.type == LR_F16) v[1] = 1e6f; // held within the range
    dev<int32_t> dseq(seq), dpos(pos), dslot(slot), dtable(table), dat(table_at);
    dev<float> dq(q), dk(k), dv(v), dqo(q.size()), dwq(wq), dwk(wk);
    std::vector<double> freq(c.n_rot / 2 + 1);
    lr_cu_rope_freq(10000, 1, nullptr, c.n_rot, freq.data());
    dev<double> dfreq(freq);
    lr_cu_rope rope = {c.heads, c.dim, c.n_rot, c.interleaved, 1.25f, dfreq};
    lr_cu_rows_at at = {m, dseq, dpos, dslot, dtable, dat, nullptr, nullptr, 0};
    lr_cu_norm nq = {dwq, nullptr, c.heads * c.dim, c.dim, 1e-6f, false},
               nk = {dwk, nullptr, c.kv_heads * c.dim, c.dim, 1e-6f, false};
    lr_cu_kv lkv = kv.view();
    auto center = normals(r, (size_t)c.kv_heads * c.dim, 20);
    dev<float> dcenter(center);
    bool centered = lr_cu_kv_turned(c.type) && c.norms;
    if (centered) lkv.center = dcenter;
    const lr_cu_rope *pr = c.rotate ? &rope : nullptr;
    if (!run(name, [&] {
            return lr_cu_rope_kv(pr, pr, c.norms ? &nq : nullptr, c.norms ? &nk : nullptr, c.q ? dq.p : nullptr, dk, dv,
                                 dqo, c.heads, &lkv, &at, 0);
        }))
        return;
    std::vector<int> p(pos.begin(), pos.end());
    int rot = c.rotate ? c.n_rot : 0;
    auto qr = rope_ref(q, c.heads, c.dim, rot, c.interleaved, p, freq, 1.25f, c.norms ? &wq : nullptr);
    auto kr = rope_ref(k, c.kv_heads, c.dim, rot, c.interleaved, p, freq, 1.25f, c.norms ? &wk : nullptr);
    if (lr_cu_kv_turned(c.type)) {
        for (size_t i = 0; i < kr.size() && centered; i++) kr[i] -= center[i % center.size()];
        qr = turned(qr, c.dim);
        kr = turned(kr, c.dim);
    }
    if (lr_cu_kv_turned(v_type)) v = turned(v, c.dim);
    size_t real = (size_t)3 * c.heads * c.dim;
    if (c.q) {
        auto got = dqo.get();
        near(name + ": q", {got.begin(), got.begin() + real}, {qr.begin(), qr.begin() + real}, 2e-6);
        bool untouched = true;
        for (size_t i = real; i < got.size(); i++) untouched = untouched && got[i] != got[i];
        verdict(untouched, name + ": padding", "written");
    }
    auto kb = kv.k.get(), vb = kv.v.get();
    std::vector<float> got, raw;
    std::vector<double> want, size;
    size_t written = 0;
    for (int row = 0; row < 3; row++)
        for (int what = 0; what < 2; what++)
            for (int h = 0; h < c.kv_heads; h++)
                for (int i = 0; i < c.dim; i++) {
                    const std::vector<float> &from = what ? v : kr;
                    size_t j = ((size_t)row * c.kv_heads + h) * c.dim + i;
                    int block = table[table_at[seq[row]] + slot[row] / c.block_size];
                    got.push_back((float)kv_read(kv, what, what ? vb : kb, block, h, slot[row] % c.block_size, i));
                    size_t g = j - i % 32;
                    std::vector<float> group;
                    int type = what ? v_type : c.type;
                    if (lr_cu_kv_turned(type)) group.assign(from.begin() + g, from.begin() + g + 32);
                    want.push_back(kv_round(type, from[j], group));
                    // a value next to a rounding edge may go either way, as the device's own arithmetic decides
                    double max = fabs(from[j]);
                    for (float x : group) max = fmax(max, fabs((double)x));
                    double step = what                 ? 1e-6
                                  : c.type == LR_F32   ? 2e-6
                                  : c.type == LR_F16   ? 1e-3
                                  : c.type == LR_BF16  ? 8e-3
                                  : c.type == LR_Q8_0  ? 8e-3
                                  : c.type == LR_CU_Q6 ? 0.033
                                                       : 0.13;
                    size.push_back(step * max + 1e-6 + (what || c.type != LR_CU_E4M3 ? 0 : 0.002));
                    written++;
                }
    near(name + ": kv", got, want, 1.0, &size);
    auto bits = [](int t) {
        return t == LR_F32 ? 32 : t == LR_F16 || t == LR_BF16 ? 16 : t == LR_CU_Q6 ? 6 : t == LR_Q4_0 ? 4 : 8;
    };
    size_t touched = 0;
    for (auto *b : {&kb, &vb})
        for (uint8_t x : *b) touched += x != 0xff;
    verdict(touched <= written / 2 * (bits(c.type) + bits(v_type)) / 8 + written / 32 * 2, name + ": elsewhere",
            "more was written than the rows' slots");
}

void test_copy()
{
    rnd r(22);
    size_t bytes = 16 * 300;
    std::vector<uint8_t> base(bytes * 5);
    for (auto &b : base) b = (uint8_t)r.u32();
    dev<uint8_t> d(base);
    dev<int32_t> dst(std::vector<int32_t>{4, 1}), src(std::vector<int32_t>{0, 2});
    if (!run("kv copy", [&] { return lr_cu_kv_copy(d, bytes, dst, src, 2, 0); })) return;
    memcpy(&base[4 * bytes], &base[0], bytes);
    memcpy(&base[1 * bytes], &base[2 * bytes], bytes);
    same("kv copy", d.get().data(), base.data(), base.size());
    refuses("copy of 17 bytes", [&] { return lr_cu_kv_copy(d, 17, dst, src, 1, 0); });
}

void test_rope()
{
    rnd r(23);
    for (bool inter : {false, true}) {
        int heads = 3, dim = 20, n_rot = 12;
        std::vector<int32_t> seq = {0, 0}, pos = {0, 131071};
        std::vector<float> factors = {1, 2, 1, 4, 1, 1}, x = normals(r, 2 * heads * dim);
        std::vector<double> freq(n_rot / 2);
        lr_cu_rope_freq(500000, 0.5f, factors.data(), n_rot, freq.data());
        verdict(fabs(freq[3] - 0.5 * pow(500000, -0.5) / 4) < 1e-15, "rope frequencies", "wrong");
        dev<int32_t> dseq(seq), dpos(pos);
        dev<double> df(freq);
        dev<float> dx(x);
        lr_cu_rope rope = {heads, dim, n_rot, inter, 1, df};
        lr_cu_rows_at at = {2, dseq, dpos, dpos, nullptr, nullptr, nullptr, nullptr, 0};
        if (!run("rope in place", [&] { return lr_cu_rope_rows(&rope, dx, &at, dx, 0); })) return;
        auto want = rope_ref(x, heads, dim, n_rot, inter, {0, 131071}, freq, 1, nullptr);
        near("rope in place", dx.get(), {want.begin(), want.end()}, 1e-6);
    }
}
} // namespace

void test_kv()
{
    rnd r(21);
    for (put_case c : std::initializer_list<put_case>{
             {LR_F16, 4, 2, 64, 64, 16, false, false, true, true},
             {LR_BF16, 3, 1, 80, 40, 7, true, true, true, true},
             {LR_F32, 2, 2, 20, 20, 32, false, true, true, true},
             {LR_Q8_0, 2, 1, 128, 128, 16, false, false, true, true},
             {LR_CU_Q6, 4, 2, 64, 64, 16, false, true, true, true, LR_Q4_0},
             {LR_CU_Q6, 2, 1, 96, 96, 5, true, false, true, false, LR_Q8_0},
             {LR_Q8_0, 2, 1, 256, 128, 3, false, false, true, true, LR_F16},
             {LR_CU_E4M3, 2, 2, 64, 32, 16, true, false, true, false},
             {LR_F16, 2, 2, 256, 256, 1, false, true, false, true},
         })
        put_one(c, r);
    test_copy();
    test_rope();
    verdict(lr_cu_kv_bytes(LR_Q4_0, 1, 64, 16) == 576 && lr_cu_kv_bytes(LR_CU_Q6, 1, 64, 16) == 832 &&
                lr_cu_kv_bytes(LR_Q4_1, 1, 64, 16) == 0 && lr_cu_kv_bytes(LR_Q8_0, 1, 48, 16) == 0 &&
                lr_cu_kv_bytes(LR_F16, 1, 258, 16) == 0 && lr_cu_kv_bytes(LR_F16, 3, 10, 7) == 432,
            "kv bytes", "wrong");
}
