--- Every architecture on a tiny random model against the float32 logits and greedy tokens of Transformers.

local llm = require "llmrun"
local support = dofile "tests/spec/arch_support.lua"

local path = os.tmpname()

local NAMES = {
    "llama", "llama_linear", "llama_dynamic", "llama_yarn", "llama_llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3",
    "olmo2", "phi3_short", "phi3_long", "gpt2", "granite", "smollm3", "mixtral", "qwen2moe", "qwen3moe",
    "granitemoe", "gpt-oss", "deepseek_v2", "deepseek_v3",
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

describe("latent attention", function()
    teardown(function() os.remove(path) end)
    local gguf = support.gguf

    local function split(tensors, rank, heads, nope, value)
        for i = #tensors, 1, -1 do
            local t = tensors[i]
            local layer = t[1]:match "^(blk%.%d+%.)attn_kv_b%.weight$"
            if layer then
                local ks, vs = {}, {}
                local function at(row, col) return t[3]:sub((row * rank + col) * 4 + 1, (row * rank + col) * 4 + 4) end
                for h = 0, heads - 1 do
                    local first = h * (nope + value)
                    for r = 0, rank - 1 do
                        for c = 0, nope - 1 do ks[#ks + 1] = at(first + c, r) end
                    end
                    vs[#vs + 1] = t[3]:sub((first + nope) * rank * 4 + 1, (first + nope + value) * rank * 4)
                end
                table.remove(tensors, i)
                tensors[#tensors + 1] = { layer .. "attn_k_b.weight", { nope, rank, heads }, table.concat(ks) }
                tensors[#tensors + 1] = { layer .. "attn_v_b.weight", { rank, value, heads }, table.concat(vs) }
            end
        end
    end

    --- The model of a case with attn_kv_b (rank, heads of nope + value) as attn_k_b (nope, rank, heads) and attn_v_b
    --- (rank, value, heads), and the keys of such files.
    local function absorbed(name, change)
        local case, n = support.case(name), {}
        for _, k in ipairs(case.keys) do n[k[1]:match "[%w_]+$"] = k[3] end
        local rank, heads, value = n.kv_lora_rank // 1 | 0, n.head_count // 1 | 0, n.value_length // 1 | 0
        local rot, key = n.dimension_count // 1 | 0, n.key_length // 1 | 0
        local nope = key - rot
        local function make(keys, tensors)
            for k, v in pairs { head_count_kv = 1, key_length = rank + rot, value_length = rank } do
                keys.of["deepseek2.attention." .. k][2] = gguf.u32(v)
            end
            for k, v in pairs { key_length_mla = key, value_length_mla = value } do
                keys[#keys + 1] = { "deepseek2.attention." .. k, gguf.u32(v) }
            end
            split(tensors, rank, heads, nope, value)
            if change then change(tensors) end
        end
        support.write(path, case, make)
        return case
    end
    for _, name in ipairs { "deepseek_v2", "deepseek_v3" } do
        it("absorbed gives what it gives expanded: " .. name, function()
            local case = absorbed(name)
            local m <close> = llm.load(path, { compute = "f32", threads = 2, ctx = case.ctx, kv = { type = "f32", block_size = 4 } })
            local s <close> = m:session()
            s:append(table.move(case.prompt, 1, case.at[1] + 1, 1, {}))
            close_to(case.logits[1], s:logits(), 1e-4, name)
        end)
    end

    it("absorbed names a weight with too few heads", function()
        absorbed("deepseek_v2", function(tensors)
            local t = tensors[#tensors]
            t[2][3], t[3] = t[2][3] - 1, t[3]:sub(1, #t[3] - t[2][1] * t[2][2] * 4)
        end)
        local ok, err = pcall(llm.load, path)
        assert.is_false(ok)
        assert.matches("attn_v_b.weight': shape %(.*%) has no rows", tostring(err))
    end)
end)

describe("experts", function()
    teardown(function() os.remove(path) end)
    local gguf = support.gguf

    local function logits(opts, prompt)
        local m <close> = llm.load(path, opts)
        local s <close> = m:session()
        s:append(prompt)
        local list, view = {}, s:logits()
        for i = 0, #view - 1 do list[i] = view:get(i) end
        return list
    end

    it("in blocks give what their exact values give", function()
        local case = support.case "gpt-oss"
        support.write(path, case, function(_, tensors)
            for i, t in ipairs(tensors) do
                local part = t[1]:match("ffn_(%a+)_exps%.weight$")
                if part then t[3], t[4] = gguf.blocks(39, 64 * 32 * 4, i, part == "down" and -6 or -5), 39 end
            end
        end)
        local exact = logits({ compute = "f32" }, case.prompt)
        for _, compute in ipairs { "fast", "int8" } do
            local device = compute == "int8" and "cpu" or nil -- one of CPUs
            local quick, error, size = logits({ compute = compute, device = device }, case.prompt), 0, 0
            for i = 0, #exact do
                error = error + (exact[i] - quick[i]) ^ 2
                size = size + exact[i] ^ 2
            end
            assert.is_true(size > 1)
            assert.is_true(error < 1e-3 * size, error / size)
        end
    end)

    it("whose gate and up are one tensor give the same", function()
        for _, name in ipairs { "qwen3moe", "gpt-oss" } do
            local case = support.case(name)
            support.write(path, case)
            local apart = logits({ threads = 2 }, case.prompt)
            support.write(path, case, function(_, tensors)
                for i = #tensors, 1, -1 do
                    local t = tensors[i]
                    local layer, kind = t[1]:match "^(blk%.%d+%.)ffn_gate_exps(%.%a+)$"
                    if layer then
                        local up, parts = tensors.of[layer .. "ffn_up_exps" .. kind], {}
                        local n = t[2][#t[2]]
                        local one = #t[3] // n
                        for e = 0, n - 1 do
                            parts[#parts + 1] = t[3]:sub(e * one + 1, (e + 1) * one)
                            parts[#parts + 1] = up[3]:sub(e * one + 1, (e + 1) * one)
                        end
                        local shape = { table.unpack(t[2]) }
                        shape[#shape - 1] = shape[#shape - 1] * 2
                        t[1], t[2], t[3] = layer .. "ffn_gate_up_exps" .. kind, shape, table.concat(parts)
                        up.gone = true
                    end
                end
                for i = #tensors, 1, -1 do
                    if tensors[i].gone then table.remove(tensors, i) end
                end
            end)
            assert.same(apart, logits({ threads = 2 }, case.prompt))
        end
    end)

    it("that nobody chose are not read", function()
        local case = support.case "gpt-oss"
        local function with(value)
            support.write(path, case, function(_, tensors)
                for _, t in ipairs(tensors) do
                    local one = 64 * 32 * 4 -- bytes of an expert's matrix
                    if t[1]:find "ffn_gate_inp%.bias$" then
                        t[3] = t[3]:sub(1, 8) .. string.pack("<f", -1e9) .. t[3]:sub(13)
                    elseif t[1]:find "_exps%.weight$" then
                        t[3] = t[3]:sub(1, 2 * one) .. string.pack("<f", value):rep(one // 4) .. t[3]:sub(3 * one + 1)
                    end
                end
            end)
            return logits({ threads = 2 }, case.prompt)
        end
        local zeros, nans = with(0), with(0 / 0)
        for i = 0, #zeros do assert.equal(zeros[i], nans[i]) end
    end)

    it("show in what inspect says", function()
        support.write(path, support.case "qwen3moe")
        local p <close> = assert(io.popen(("'%s' inspect '%s'"):format(require("llmrun.core").executable(), path)))
        assert.matches("of them read for a token: 2 of 8 experts", p:read "a", 1, true)
    end)
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

    it("names both numbers where more experts are used than there are", function()
        local err = refusal("mixtral", function(keys) keys.of["llama.expert_used_count"][2] = gguf.u32(5) end)
        assert.matches("key 'llama.expert_used_count': 5 experts are used of 4", err, 1, true)
    end)

    it("names the experts' tensor and both shapes", function()
        local err = refusal("mixtral", function(_, tensors)
            local t = tensors.of["blk.1.ffn_up_exps.weight"]
            t[2], t[3] = { 64, 96, 3 }, t[3]:sub(1, 64 * 96 * 3 * 4)
        end)
        assert.matches("tensor 'blk.1.ffn_up_exps.weight': shape (64, 96, 3) where (64, 96, 4) is needed", err, 1, true)
        err = refusal("gpt-oss", function(_, tensors)
            local t = tensors.of["blk.0.ffn_down_exps.bias"]
            t[2], t[3] = { 64, 3 }, t[3]:sub(1, 64 * 3 * 4)
        end)
        assert.matches("tensor 'blk.0.ffn_down_exps.bias': shape (64, 3) where (64, 4) is needed", err, 1, true)
    end)

    it("names an experts' tensor that is missing", function()
        local err = refusal("qwen3moe", function(_, tensors)
            for i, t in ipairs(tensors) do
                if t[1] == "blk.1.ffn_down_exps.weight" then table.remove(tensors, i) break end
            end
        end)
        assert.matches("no tensor 'blk.1.ffn_down_exps.weight'", err, 1, true)
    end)

    it("names divisors of another length", function()
        local err = refusal("phi3_long", function(_, tensors)
            local t = tensors.of["rope_factors_long.weight"]
            t[2], t[3] = { 5 }, t[3]:sub(1, 20)
        end)
        assert.matches("tensor 'rope_factors_long.weight': 5 values where 6 are needed", err, 1, true)
    end)
end)
