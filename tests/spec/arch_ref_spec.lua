--- Every architecture on a tiny random model against the float32 logits and greedy tokens of Transformers.

local llm = require "llmrun"
local support = dofile "tests/spec/arch_support.lua"

local path = os.tmpname()

local NAMES = {
    "llama", "llama_linear", "llama_dynamic", "llama_yarn", "llama_llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3",
    "olmo2", "phi3_short", "phi3_long", "gpt2", "granite", "smollm3",
}

local function close_to(want, logits, limit, what)
    assert.equal(#want, #logits)
    local worst = 0
    for i, w in ipairs(want) do worst = math.max(worst, math.abs(logits:get(i - 1) - w)) end
    assert.is_true(worst < limit, ("%s: off by %g"):format(what, worst))
end

describe("against Transformers", function()
    teardown(function() os.remove(path) end)

    for _, name in ipairs(NAMES) do
        it(name, function()
            local case = support.case(name)
            support.write(path, case)
            local m <close> = llm.load(path, { compute = "f32", threads = 1, ctx = case.ctx,
                                               kv = { type = "f32", block_size = 4 } })
            local s <close> = m:session()
            local from = 1
            for i, at in ipairs(case.at) do
                s:append(table.move(case.prompt, from, at + 1, 1, {}))
                from = at + 2
                close_to(case.logits[i], s:logits(), 1e-4, name .. " at " .. math.tointeger(at))
            end
            if #case.greedy == 0 then return end
            assert.same(case.greedy, s:gen { max_tokens = #case.greedy, temperature = 0, ignore_eos = true }.tokens)
        end)
    end
end)

describe("a file that is wrong", function()
    local function refusal(name, change, opts)
        support.write(path, support.case(name), change)
        local ok, err = pcall(llm.load, path, opts)
        assert.is_false(ok)
        return tostring(err)
    end
    local gguf = support.gguf

    it("names a kind of RoPE that is not known, and those that are", function()
        local err = refusal("llama_yarn", function(keys)
            keys.of["llama.rope.scaling.type"][2] = gguf.string "spiral"
        end)
        assert.matches("llama.rope.scaling.type': 'spiral' is not one of dynamic, linear, llama3, longrope, none, yarn", err,
            1, true)
    end)

    it("names a factor that is missing", function()
        local err = refusal("llama_yarn", function(keys)
            for i, k in ipairs(keys) do if k[1] == "llama.rope.scaling.factor" then table.remove(keys, i) break end end
        end)
        assert.matches("key 'llama.rope.scaling.factor': is missing", err, 1, true)
    end)

    it("names a matrix that is too short for its three parts", function()
        local err = refusal("gpt2", function(_, tensors)
            local t = tensors.of["blk.1.attn_qkv.weight"]
            t[2], t[3] = { 64, 190 }, t[3]:sub(1, 64 * 190 * 4)
        end)
        assert.matches("tensor 'blk.1.attn_qkv.weight': shape (64, 190) has no rows 128 to 191", err, 1, true)
    end)

    it("names divisors of another length", function()
        local err = refusal("phi3_long", function(_, tensors)
            local t = tensors.of["rope_factors_long.weight"]
            t[2], t[3] = { 5 }, t[3]:sub(1, 20)
        end)
        assert.matches("tensor 'rope_factors_long.weight': 5 values where 6 are needed", err, 1, true)
    end)
end)
