-- Drafts of an EAGLE head: a layer that goes on from what the model made of its rows. The text is that of no
-- speculation, to the last bit, on real kernels; and what early exits, heads and EAGLE draft leaves the distribution as
-- it is.
local llm = require "llmrun"
local drafts = dofile "tests/spec/draft_support.lua"
local gguf = require "llmrun.testing.gguf"
local hf = dofile "tests/spec/hf_support.lua"
local raises = dofile("tests/spec/program_support.lua").raises

local slow = os.getenv "LLMRUN_TEST_SANITIZE" ~= nil
local run, both = drafts.run, drafts.both
local WIDTH, KV, INNER, VOCAB = 64, 32, 96, 256

local CONFIG = [[{"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0}]]

local function write(path, text)
    local f = assert(io.open(path, "wb"))
    f:write(text)
    f:close()
end

-- The unit matrix, then zeros: what passes the embedding through and ignores the feature, or the other way round.
local function pass(feature)
    local parts = {}
    for i = 1, WIDTH do
        for j = 1, 2 * WIDTH do parts[#parts + 1] = string.pack("<f", j == i + (feature and WIDTH or 0) and 1 or 0) end
    end
    return table.concat(parts)
end

-- A head out of the model's first layer, norm and matrix: for a model whose second layer adds nothing it says what the
-- model says, but for the text's first token, which it does not see.
local function knowing(tensors, feature)
    local function t(name) return tensors.of[name][3] end
    local list = { { "fc.weight", "F32", { WIDTH, 2 * WIDTH }, pass(feature) } }
    local function add(name, n, k, from) list[#list + 1] = { name, "F32", k and { n, k } or { n }, t(from) } end
    local l = "layers.0."
    add(l .. "input_layernorm.weight", WIDTH, nil, "blk.0.attn_norm.weight")
    add(l .. "self_attn.q_proj.weight", WIDTH, WIDTH, "blk.0.attn_q.weight")
    add(l .. "self_attn.k_proj.weight", KV, WIDTH, "blk.0.attn_k.weight")
    add(l .. "self_attn.v_proj.weight", KV, WIDTH, "blk.0.attn_v.weight")
    add(l .. "self_attn.o_proj.weight", WIDTH, WIDTH, "blk.0.attn_output.weight")
    add(l .. "post_attention_layernorm.weight", WIDTH, nil, "blk.0.ffn_norm.weight")
    add(l .. "mlp.gate_proj.weight", INNER, WIDTH, "blk.0.ffn_gate.weight")
    add(l .. "mlp.up_proj.weight", INNER, WIDTH, "blk.0.ffn_up.weight")
    add(l .. "mlp.down_proj.weight", WIDTH, INNER, "blk.0.ffn_down.weight")
    add("norm.weight", WIDTH, nil, "output_norm.weight")
    add("lm_head.weight", VOCAB, WIDTH, "token_embd.weight")
    return list
end

-- The permuted rows of a GGUF llama's queries and keys as a Hugging Face folder has them.
local function unpermute(tensors)
    for name, rows in pairs { ["blk.0.attn_q.weight"] = WIDTH, ["blk.0.attn_k.weight"] = KV } do
        local from, to = tensors.of[name][3], {}
        for h = 0, rows // 32 - 1 do
            for i = 0, 31 do -- row i of the file is pair i // 2, half i % 2
                to[h * 32 + i % 2 * 16 + i // 2 + 1] = from:sub((h * 32 + i) * WIDTH * 4 + 1, (h * 32 + i + 1) * WIDTH * 4)
            end
        end
        tensors.of[name] = { name, nil, table.concat(to) }
    end
end

local function new_folder()
    local path = os.tmpname()
    os.remove(path)
    assert(os.execute("mkdir " .. path))
    return path
end

local model, folder, blind, odd, heads = os.tmpname(), new_folder(), new_folder(), new_folder(), os.tmpname()

local function quiet_layer(_, tensors)
    for _, name in ipairs { "attn_output", "ffn_down" } do
        local t = tensors.of["blk.1." .. name .. ".weight"]
        t[3] = ("\0"):rep(#t[3])
    end
end

setup(function()
    local all
    gguf.tiny(model, function(keys, tensors)
        quiet_layer(keys, tensors)
        all = { of = {} }
        for k, t in pairs(tensors.of) do all.of[k] = t end
    end)
    unpermute(all)
    write(folder .. "/config.json", CONFIG)
    write(folder .. "/model.safetensors", hf.safetensors(knowing(all, false)))
    write(blind .. "/config.json", CONFIG)
    write(blind .. "/model.safetensors", hf.safetensors(knowing(all, true)))
    -- guesses of letters a to d, which are all that the texts below may hold
    local list, rest = {}, ("\0"):rep(WIDTH * 4)
    for h = 0, 1 do
        list[#list + 1] = { h .. ".0.weight", "F32", { VOCAB, WIDTH },
            rest:rep(97) .. gguf.random(4 * WIDTH, 11 + h, 1) .. rest:rep(VOCAB - 101) }
    end
    write(heads, hf.safetensors(list))
end)
teardown(function()
    for _, p in ipairs { model, heads } do os.remove(p) end
    for _, f in ipairs { folder, blind, odd } do
        os.remove(f .. "/config.json")
        os.remove(f .. "/model.safetensors")
        os.remove(f)
    end
end)

local function open(more)
    local o = { threads = 1, ctx = 256, max_seqs = 3, speculate = { method = "off", eagle = folder },
        kv = { block_size = 5, blocks = 160 } }
    for k, v in pairs(more or {}) do o[k] = v end
    return llm.load(model, o)
end

describe("an EAGLE head", function()
    it("goes on from the model's features, and changes no bit", function()
        for _, from in ipairs { folder, blind } do
            local m <close> = open { speculate = { method = "off", eagle = from } }
            local accepted, drafted, late = 0, 0, 0
            for seed = 1, slow and 2 or 4 do
                for _, how in ipairs { { fixed = true, k = 4 }, { fixed = true, k = 3, branches = 4 }, {},
                    { fixed = true, k = 4, accept = seed == 1 and "distribution" or nil } } do
                    how.method = "eagle"
                    local r = both(m, { max_tokens = slow and 20 or 40, temperature = (seed - 1) / 2, seed = seed,
                        logprobs = 1, ignore_eos = true }, how)
                    if how.fixed and not how.branches and seed == 1 then
                        accepted, drafted = accepted + r.speculation.accepted, drafted + r.speculation.drafted
                        late = late + (r.speculation.at[4] or 0) / 2
                    end
                end
            end
            if from == folder then
                assert.is_true(accepted > 0.8 * drafted and late > 0.8, ("%d of %d, %.2f"):format(accepted, drafted, late))
            end
        end
    end)

    -- Here each token says which comes next, g(t), and nothing else counts. Feature i is token i's normalised embedding,
    -- and the head draws g(g(t)) from it: right only if it gets the feature of the token before the last one.
    it("gets the features of the rows before its own", function()
        local plain, rows, out = os.tmpname(), {}, {}
        gguf.tiny(plain, function(_, tensors)
            for l = 0, 1 do
                for _, name in ipairs { "attn_output", "ffn_down" } do
                    local t = tensors.of[("blk.%d.%s.weight"):format(l, name)]
                    t[3] = ("\0"):rep(#t[3])
                end
            end
            tensors[#tensors + 1] = { "output.weight", { WIDTH, VOCAB }, gguf.random(WIDTH * VOCAB, 77, 1) }
            local function matrix(bytes, to)
                for v = 0, VOCAB - 1 do to[v] = { string.unpack(("<" .. ("f"):rep(WIDTH)), bytes, v * WIDTH * 4 + 1) } end
            end
            matrix(tensors.of["token_embd.weight"][3], rows)
            matrix(tensors[#tensors][3], out)
        end)
        local g, pull = {}, {}
        for t, row in pairs(rows) do
            local best, sum = -math.huge, 0
            for j = 1, WIDTH do sum = sum + row[j] ^ 2 end
            for j = 1, WIDTH do row[j] = row[j] / math.sqrt(sum / WIDTH + 1e-5) end
            for v = 0, VOCAB - 1 do
                local x = 0
                for j = 1, WIDTH do x = x + out[v][j] * row[j] end
                if x > best then best, g[t] = x, v end
            end
        end
        for v = 0, VOCAB - 1 do
            pull[v] = {}
            for j = 1, WIDTH do pull[v][j] = 0 end
        end
        for t, row in pairs(rows) do
            for j = 1, WIDTH do pull[g[g[t]]][j] = pull[g[g[t]]][j] + row[j] end
        end
        local tensors, zeros = {}, {
            ["self_attn.q_proj"] = { WIDTH, WIDTH }, ["self_attn.k_proj"] = { KV, WIDTH },
            ["self_attn.v_proj"] = { KV, WIDTH }, ["self_attn.o_proj"] = { WIDTH, WIDTH },
            ["mlp.gate_proj"] = { INNER, WIDTH }, ["mlp.up_proj"] = { INNER, WIDTH }, ["mlp.down_proj"] = { WIDTH, INNER },
        }
        for name, shape in pairs(zeros) do
            tensors[#tensors + 1] = { "layers.0." .. name .. ".weight", "F32", shape, ("\0"):rep(shape[1] * shape[2] * 4) }
        end
        for v = 0, VOCAB - 1 do pull[v] = string.pack("<" .. ("f"):rep(WIDTH), table.unpack(pull[v])) end
        tensors[#tensors + 1] = { "fc.weight", "F32", { WIDTH, 2 * WIDTH }, pass(true) }
        tensors[#tensors + 1] = { "layers.0.post_attention_layernorm.weight", "F32", { WIDTH }, ("\0"):rep(WIDTH * 4) }
        tensors[#tensors + 1] = { "lm_head.weight", "F32", { VOCAB, WIDTH }, table.concat(pull, "", 0) }
        write(odd .. "/config.json", CONFIG)
        write(odd .. "/model.safetensors", hf.safetensors(tensors))
        local m <close> = llm.load(plain, { threads = 1, ctx = 64, speculate = { eagle = odd, fixed = true, k = 1 } })
        local right, tried = 0, 0
        for i = 1, 40 do
            local s <close> = m:session()
            s:append { i * 5 % 256, i * 11 % 256, i * 37 % 256 }
            local sp = s:gen { max_tokens = 3, temperature = 0, ignore_eos = true }.speculation
            right, tried = right + sp.accepted, tried + sp.drafted
        end
        os.remove(plain)
        assert.is_true(tried >= 40 and right > 0.8 * tried, ("%d of %d"):format(right, tried))
    end)

    it("sees a prompt that came in pieces, and what was said after", function()
        local m <close> = open { max_batch_tokens = 48, ctx = 256 }
        local s <close> = m:session()
        s:append(("the quick brown fox "):rep(8))
        local how = { method = "eagle", fixed = true, k = 4 }
        local a = s:gen { max_tokens = 20, temperature = 0, ignore_eos = true, speculate = how }.speculation
        s:append " and then"
        local b = s:gen { max_tokens = 20, temperature = 0, ignore_eos = true, speculate = how }.speculation
        s:rewind(s.len - 12)
        s:append "other"
        local c = s:gen { max_tokens = 20, temperature = 0, ignore_eos = true, speculate = how }.speculation
        for i, sp in ipairs { a, b, c } do assert.is_true(sp.acceptance > 0.7, i .. ": " .. sp.acceptance) end
        m:check()
    end)

    it("is the same in a batch, in forks, when it is preempted, and under a grammar", function()
        local m <close> = open { ctx = 128, kv = { block_size = 4, blocks = 70 } }
        local function all(how) return drafts.crowd(m, how) end
        assert.same(all(false), all { method = "eagle", fixed = true, k = 4 })
        assert.same(all(false), all { method = "eagle", fixed = true, k = 3, branches = 3 })
        assert.same(all(false), all(function() return 3, "eagle" end))
        assert.same(all(false), all "eagle")
        m:check()
    end)

    it("is refused where it does not fit", function()
        local plain <close> = llm.load(model, { threads = 1, ctx = 64 })
        raises("without an EAGLE head", function() run(plain, { max_tokens = 3, speculate = "eagle" }) end)
        raises("needs eagle", function() llm.load(model, { speculate = "eagle" }) end)
        raises("exclude each other", function() llm.load(model, { speculate = { eagle = folder, draft = model } }) end)
        raises("config.json", function() llm.load(model, { speculate = { eagle = "/nowhere/at/all" } }) end)
        local function with(config, tensors)
            write(odd .. "/config.json", config)
            write(odd .. "/model.safetensors", hf.safetensors(tensors))
            return function() llm.load(model, { threads = 1, ctx = 64, speculate = { eagle = odd } }) end
        end
        raises("no JSON object", with("[", {}))
        raises("num_attention_heads", with("{}", {}))
        raises("rope_scaling", with('{"rope_scaling": {"rope_type": "yarn"}}', {}))
        raises("norm_before_residual", with('{"norm_before_residual": true}', {}))
        raises("three numbers", with('{"eagle_aux_hidden_state_layer_ids": [2, 4]}', {}))
        raises("no EAGLE head", with(CONFIG, {}))
        local fc = { "fc.weight", "F32", { 32, 64 }, gguf.random(32 * 64, 1, 1) }
        raises("rows of 32", with(CONFIG, { fc }))
        fc = { "fc.weight", "F32", { WIDTH, 2 * WIDTH }, gguf.random(WIDTH * 2 * WIDTH, 1, 1) }
        raises("no tensor layers.0.self_attn.q_proj.weight", with(CONFIG, { fc }))
        fc[4] = fc[4]:sub(1, WIDTH * 8) .. ("<f"):pack(1 / 0) .. fc[4]:sub(WIDTH * 8 + 5)
        raises("fc.weight: values of row 1 are not finite", with(CONFIG, { fc }))
    end)
end)

describe("the distribution of what a model's parts draft", function()
    local LETTERS = { 97, 98, 99, 100 }

    -- Chi-square at p = 0.001 by Wilson and Hilferty.
    local function limit(df)
        local v = 2 / (9 * df)
        return df * (1 - v + 3.0902 * math.sqrt(v)) ^ 3
    end

    local function chances(s, temperature)
        local logits, p, sum = s:logits(), {}, 0
        for _, id in ipairs(LETTERS) do p[id] = math.exp(logits:get { id }[1] / temperature) end
        for _, v in pairs(p) do sum = sum + v end
        for id, v in pairs(p) do p[id] = v / sum end
        return p
    end

    -- Of the words that [abcd]{2} allows, by the model's logits.
    local function words(m, prompt, temperature)
        local p, s <close> = {}, m:session()
        s:append(prompt)
        for a, first in pairs(chances(s, temperature)) do
            local f <close> = s:fork()
            f:append { a }
            for b, second in pairs(chances(f, temperature)) do p[string.char(a, b)] = first * second end
        end
        return p
    end

    local TEMPERATURE = 4 -- of a model whose logits are far apart

    local function statistic(m, p, how, n, seed, sampler)
        local list, seen, x, accepted, cells, rest, want_rest = {}, {}, 0, 0, 0, 0, 0
        for i = 1, n do list[i] = i end
        llm.map(list, function(i)
            local s <close> = m:session()
            s:append "xaxbxcacbx"
            local r = s:gen { regex = "[abcd]{2}", temperature = not sampler and TEMPERATURE or nil, seed = (seed + i) * 7919, speculate = how,
                max_tokens = 4, sampler = sampler }
            seen[r.text] = (seen[r.text] or 0) + 1
            accepted = accepted + (r.speculation and r.speculation.accepted or 0)
        end, { concurrency = 8 })
        for word, chance in pairs(p) do
            local want = chance * n
            if want < 5 then
                want_rest, rest = want_rest + want, rest + (seen[word] or 0)
            else
                x, cells = x + ((seen[word] or 0) - want) ^ 2 / want, cells + 1
            end
        end
        if want_rest >= 5 then x, cells = x + (rest - want_rest) ^ 2 / want_rest, cells + 1 end
        return x, limit(cells - 1), accepted
    end

    it("is the model's own", function()
        local m <close> = open { max_seqs = 8, speculate = { method = "off", eagle = folder, heads = heads },
            kv = { block_size = 8, blocks = 200 } }
        local p = words(m, "xaxbxcacbx", TEMPERATURE)
        local n = slow and 150 or 600
        local ways = {
            { "early exit", { method = "early_exit", layers = 1, fixed = true, k = 2 } },
            { "early exit, judged", { method = "early_exit", layers = 1, fixed = true, k = 2, accept = "distribution" } },
            { "heads", { method = "heads", fixed = true, k = 12 } },
            { "eagle", { method = "eagle", fixed = true, k = 2 } },
            { "eagle, branches", { method = "eagle", fixed = true, k = 2, branches = 4 } },
            { "eagle, judged", { method = "eagle", fixed = true, k = 2, accept = "distribution" } },
        }
        for i, how in ipairs(ways) do
            local x, most, accepted = statistic(m, p, how[2], n, 100000 * i)
            assert.is_true(x < most, ("%s: chi-square %.1f of %.1f"):format(how[1], x, most))
            assert.is_true(accepted > n // 20, how[1] .. ": " .. accepted)
        end
        -- a rule that took the likeliest letter, which is what these draft, once in seven times whatever was drawn
        local best = 97
        local s <close> = m:session()
        s:append "xaxbxcacbx"
        local first = chances(s, TEMPERATURE)
        for id, v in pairs(first) do if v > first[best] then best = id end end
        local x, most = statistic(m, p, ways[4][2], slow and 1200 or 2500, 1, { { "temperature", TEMPERATURE },
            function(l, ctx) if ctx:uniform(9) < 0.15 then l:keep { best } end end })
        assert.is_true(x > most, ("%.1f of %.1f"):format(x, most))
    end)
end)
