--- Architecture scripts on small random weights, held against a plain forward pass written here, number by number.

local llm = require "llmrun"
local gguf = require "llmrun.testing.gguf"

local path = os.tmpname()
local WIDTH, HEADS, KV_HEADS, DIM, FF, EPS, BASE = 64, 4, 2, 32, 96, 1e-5, 10000

--- A file of the architecture: heads * head_dim is not the width, KV heads are shared. opts: biases, head_norms.
local function make(arch, opts)
    local seed = 100
    local function weight(shape, scale)
        seed = seed + 1
        return gguf.random(shape[1] * (shape[2] or 1), seed, scale)
    end
    local function norm(n) -- about 1
        local parts = {}
        for i = 1, n do parts[i] = string.pack("<f", 1 + 0.3 * math.sin(i + seed)) end
        seed = seed + 1
        return table.concat(parts)
    end
    gguf.tiny(path, function(keys, tensors)
        for _, k in ipairs(keys) do k[1] = k[1]:gsub("^llama%.", arch .. ".") end
        keys.of["general.architecture"][2] = gguf.string(arch)
        keys.of["llama.attention.head_count"][2] = gguf.u32(HEADS)
        keys.of["llama.attention.head_count_kv"][2] = gguf.u32(KV_HEADS)
        for _, name in ipairs { "key_length", "value_length" } do
            keys[#keys + 1] = { arch .. ".attention." .. name, gguf.u32(DIM) }
        end
        local function put(name, shape, bytes)
            local t = tensors.of[name] or { name }
            if not tensors.of[name] then tensors[#tensors + 1], tensors.of[name] = t, t end
            t[2], t[3] = shape, bytes
        end
        for l = 0, 1 do
            local b = ("blk.%d."):format(l)
            for name, out in pairs { q = HEADS, k = KV_HEADS, v = KV_HEADS } do
                put(b .. "attn_" .. name .. ".weight", { WIDTH, out * DIM }, weight({ WIDTH, out * DIM }, 0.2))
                if opts.biases then
                    put(b .. "attn_" .. name .. ".bias", { out * DIM }, weight({ out * DIM }, 0.5))
                end
                if opts.head_norms and name ~= "v" then
                    put(b .. "attn_" .. name .. "_norm.weight", { DIM }, norm(DIM))
                end
            end
            put(b .. "attn_output.weight", { HEADS * DIM, WIDTH }, weight({ HEADS * DIM, WIDTH }, 0.2))
            put(b .. "attn_norm.weight", { WIDTH }, norm(WIDTH))
            put(b .. "ffn_norm.weight", { WIDTH }, norm(WIDTH))
        end
        put("output_norm.weight", { WIDTH }, norm(WIDTH))
        opts.tensors = tensors.of
    end)
end

--- The forward pass in double precision: logits after the last of ids. interleaved: RoPE turns neighbours, else halves.
local function forward(tensors, ids, interleaved)
    local function values(name)
        local t = tensors[name]
        local n = #t[3] // 4
        local list = {}
        for i = 1, n do list[i] = string.unpack("<f", t[3], 4 * i - 3) end
        return list, t[2]
    end
    local cache = {}
    local function load(name)
        if not cache[name] then cache[name] = { values(name) } end
        return cache[name][1], cache[name][2]
    end
    local function linear(x, name)
        local w, shape = load(name .. ".weight")
        local bias = tensors[name .. ".bias"] and load(name .. ".bias")
        local y = {}
        for j = 1, shape[2] do
            local sum = bias and bias[j] or 0
            for i = 1, shape[1] do sum = sum + x[i] * w[(j - 1) * shape[1] + i] end
            y[j] = sum
        end
        return y
    end
    local function rms(x, name, from, n)
        local w, sum, y = load(name .. ".weight"), 0, x
        if not from then from, n, y = 0, #x, {} end
        for i = 1, n do sum = sum + x[from + i] ^ 2 end
        local f = 1 / math.sqrt(sum / n + EPS)
        for i = 1, n do y[from + i] = x[from + i] * f * w[i] end
        return y
    end
    local function rope(x, from, pos)
        for i = 0, DIM // 2 - 1 do
            local angle = pos * BASE ^ (-2 * i / DIM)
            local a = from + (interleaved and 2 * i or i) + 1
            local b = interleaved and a + 1 or a + DIM // 2
            x[a], x[b] = x[a] * math.cos(angle) - x[b] * math.sin(angle), x[a] * math.sin(angle) + x[b] * math.cos(angle)
        end
    end
    local embed = load "token_embd.weight"
    local keys, vals, x = { {}, {} }, { {}, {} }, nil
    for pos, id in ipairs(ids) do
        x = table.move(embed, id * WIDTH + 1, id * WIDTH + WIDTH, 1, {})
        for l = 0, 1 do
            local b = ("blk.%d."):format(l)
            local h = rms(x, b .. "attn_norm")
            local q, k, v = linear(h, b .. "attn_q"), linear(h, b .. "attn_k"), linear(h, b .. "attn_v")
            for _, t in ipairs { { q, "q", HEADS }, { k, "k", KV_HEADS } } do
                for i = 0, t[3] - 1 do
                    local name = b .. "attn_" .. t[2] .. "_norm"
                    if tensors[name .. ".weight"] then rms(t[1], name, i * DIM, DIM) end
                    rope(t[1], i * DIM, pos - 1)
                end
            end
            keys[l + 1][pos], vals[l + 1][pos] = k, v
            local out = {}
            for i = 0, HEADS - 1 do
                local kv, scores, total = i // (HEADS // KV_HEADS), {}, 0
                for p = 1, pos do
                    local s = 0
                    for d = 1, DIM do s = s + q[i * DIM + d] * keys[l + 1][p][kv * DIM + d] end
                    scores[p] = math.exp(s / math.sqrt(DIM))
                    total = total + scores[p]
                end
                for d = 1, DIM do
                    local s = 0
                    for p = 1, pos do s = s + scores[p] / total * vals[l + 1][p][kv * DIM + d] end
                    out[i * DIM + d] = s
                end
            end
            for i, y in ipairs(linear(out, b .. "attn_output")) do x[i] = x[i] + y end
            h = rms(x, b .. "ffn_norm")
            local gate, up = linear(h, b .. "ffn_gate"), linear(h, b .. "ffn_up")
            for i = 1, FF do gate[i] = gate[i] / (1 + math.exp(-gate[i])) * up[i] end
            for i, y in ipairs(linear(gate, b .. "ffn_down")) do x[i] = x[i] + y end
        end
    end
    return linear(rms(x, "output_norm"), "token_embd")
end

describe("an architecture script", function()
    teardown(function() os.remove(path) end)
    for arch, opts in pairs {
        llama = { interleaved = true }, qwen2 = { biases = true }, qwen3 = { head_norms = true },
    } do
        it("builds " .. arch .. " as its paper has it", function()
            make(arch, opts)
            local ids = { 72, 101, 108, 108, 111, 0, 255 }
            local want = forward(opts.tensors, ids, opts.interleaved)
            for compute, most in pairs { f32 = 1e-5, fast = 2e-2 } do
                local model <close> = llm.load(path, { compute = compute, ctx = 64, kv = { blocks = 16 } })
                assert.equal(arch, model.info.arch)
                local s <close> = model:session()
                s:append(ids)
                local view, top, worst = s:logits(), 0, 0
                for i = 1, 256 do
                    top = math.max(top, math.abs(want[i]))
                    worst = math.max(worst, math.abs(view:get(i - 1) - want[i]))
                end
                assert.is_true(worst <= most * top, ("%s: off by %g of %g"):format(compute, worst, top))
            end
        end)
    end
end)
