--- Loading models: small files that are right, and files whose values make no model.

local llm = require "llmrun"
local gguf = require "llmrun.testing.gguf"

local path = os.tmpname()

local function logits_of(opts, ids)
    local model <close> = llm.load(path, opts)
    local s <close> = model:session()
    s:append(ids or { 72, 101, 108, 108, 111 })
    local view, list = s:logits(), {}
    for i = 0, 255 do list[i + 1] = view:get(i) end
    return list
end

local function worst(a, b)
    local d, top = 0, 0
    for i = 1, #a do
        assert.is_true(a[i] == a[i] and math.abs(a[i]) < math.huge)
        d, top = math.max(d, math.abs(a[i] - b[i])), math.max(top, math.abs(b[i]))
    end
    return d / top
end

--- Loading the tiny model with a change is refused with a text that holds all of `parts`.
local function refused(change, ...)
    gguf.tiny(path, change)
    local ok, err = pcall(llm.load, path)
    if ok then err:close() end
    assert.is_false(ok)
    for _, part in ipairs { ... } do assert.matches(part, tostring(err), 1, true) end
end

describe("a small model file", function()
    teardown(function() os.remove(path) end)

    it("runs, and the same whatever the form of compute", function()
        gguf.tiny(path)
        local want = logits_of { compute = "f32" }
        assert.is_true(worst(logits_of(), want) < 1e-4) -- float weights: float products
        assert.is_true(worst(logits_of { threads = 1, kv = { block_size = 1 } }, want) < 1e-2)
    end)

    it("keeps its sums in range when one row of weights is huge", function() -- B50
        gguf.tiny(path, function(_, tensors)
            local t = tensors.of["blk.0.ffn_up.weight"]
            local row = 64 * 4
            local big = {}
            for i = 0, 63 do big[i + 1] = string.pack("<f", string.unpack("<f", t[3], i * 4 + 1) * 3e4) end
            t[3] = table.concat(big) .. t[3]:sub(row + 1)
        end)
        assert.is_true(worst(logits_of(), logits_of { compute = "f32" }) < 2e-2)
    end)

    it("is refused with the key's name where a value makes no model", function() -- B15
        local cases = {
            { "llama.attention.head_count", gguf.u32(0) },
            { "llama.attention.head_count", gguf.f32(2) },
            { "llama.attention.head_count_kv", gguf.u32(0) },
            { "llama.attention.head_count_kv", gguf.u32(3) },
            { "llama.embedding_length", gguf.u32(0) },
            { "llama.block_count", gguf.u32(0) },
            { "llama.block_count", gguf.u32(0x80000000) },
            { "llama.context_length", gguf.u32(0) },
            { "llama.rope.freq_base", gguf.f32(0) },
            { "llama.rope.freq_base", gguf.f32(0 / 0) },
            { "llama.vocab_size", gguf.u32(255) },
            { "llama.attention.layer_norm_rms_epsilon", gguf.f32(-1) },
            { "general.architecture", gguf.u32(1) },
        }
        for _, c in ipairs(cases) do
            refused(function(keys) keys.of[c[1]][2] = c[2] end, c[1])
        end
        refused(function(keys) keys[#keys + 1] = { "general.alignment", gguf.u32(48) } end, "general.alignment")
        refused(function(keys) keys[#keys + 1] = { "general.alignment", gguf.u32(0) } end, "general.alignment")
        refused(function(keys) keys.of["general.architecture"][2] = gguf.string "nosuch" end, "nosuch")
        refused(function(keys) keys.of["tokenizer.ggml.model"][2] = gguf.string "nosuch" end, "nosuch")
    end)

    it("is refused with both shapes, and the tensor's name, where a weight does not fit", function()
        refused(function(_, t) t.of["blk.1.attn_k.weight"][2] = { 32, 64 } end, "blk.1.attn_k.weight", "32, 64", "64")
        refused(function(_, t) t.of["blk.1.ffn_norm.weight"][2] = { 32, 2 } end, "blk.1.ffn_norm.weight", "32, 2", "64")
        refused(function(_, t) t.of["blk.0.ffn_up.weight"][1] = "blk.0.ffn_upp.weight" end, "blk.0.ffn_up.weight")
    end)

    it("is refused for tensors that the architecture does not use, unless asked", function() -- B51
        local function extra(_, t) t[#t + 1] = { "blk.0.mystery.weight", { 32 }, gguf.random(32, 1, 1) } end
        refused(extra, "blk.0.mystery.weight")
        gguf.tiny(path, extra)
        local model <close> = llm.load(path, { allow_unused = true })
        assert.equal("tiny", model.info.name)
    end)

    it("uses its own output head where there is one", function() -- B51
        gguf.tiny(path)
        local tied = logits_of { compute = "f32" }
        gguf.tiny(path, function(_, t)
            local twice, text = {}, t.of["token_embd.weight"][3]
            for i = 1, #text, 4 do twice[#twice + 1] = string.pack("<f", 2 * string.unpack("<f", text, i)) end
            t[#t + 1] = { "output.weight", { 64, 256 }, table.concat(twice) }
        end)
        local own = logits_of { compute = "f32" }
        for i = 1, #tied do assert.is_true(math.abs(own[i] - 2 * tied[i]) <= 1e-4 * math.abs(own[i]) + 1e-5) end
    end)

    it("loads with an architecture of the user's, whose mistakes are named", function()
        gguf.tiny(path)
        local function script(g, hp)
            local x = g:embed "token_embd"
            local q = g:linear(g:rms_norm(x, "blk.0.attn_norm", hp.eps), "blk.0.attn_q")
            local k = g:linear(x, "blk.0.attn_k")
            local a = g:attention(q, k, g:linear(x, "blk.0.attn_v"), { heads = 2, kv_heads = 1, head_dim = 32 })
            return g:head(g:rms_norm(x + a, "output_norm", hp.eps))
        end
        assert.equal(256, #logits_of { arch = script, allow_unused = true })
        local function fails(fn, ...)
            local ok, err = pcall(llm.load, path, { arch = fn, allow_unused = true })
            assert.is_false(ok)
            for _, part in ipairs { ... } do assert.matches(part, tostring(err), 1, true) end
        end
        fails(function(g) return g:linear(g:embed "token_embd", "blk.0.ffn_down") end, "blk.0.ffn_down", "96, 64", "64")
        fails(function(g) return g:head(g:embed "token_embd") end, "no attention")
        fails(function(g) return g:rms_norm(g:embed "token_embd", "nosuch") end, "nosuch")
        fails(function() return 7 end, "must return the node")
        fails(function(g) return g:add(g:embed "token_embd", 3) end, "expected a node")
        fails(function() error "from the script" end, "from the script")
    end)
end)
