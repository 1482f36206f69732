--- Low-rank adapters: against Transformers with the adapter in the weights; many in a batch; bad files.

local cjson = require "cjson"
local core = require "llmrun.core"
local llm = require "llmrun"
local served = require "tests.spec.serve_support"
local support = dofile "tests/spec/arch_support.lua"
local gguf = support.gguf

local folder = os.tmpname()
os.remove(folder)
assert(os.execute(("mkdir -p '%s'"):format(folder)))
local function path(name) return folder .. "/" .. name end

local function write(name, text)
    local f <close> = assert(io.open(path(name), "wb"))
    f:write(text)
end

--- A PEFT folder of a case. change(tensors, config) may alter { name, shape, bytes } and the config.
local function write_peft(name, case, change)
    os.execute(("mkdir -p '%s'"):format(path(name)))
    local tensors, config = {}, { peft_type = "LORA", r = case.rank, lora_alpha = case.alpha, bias = "none" }
    local r = math.tointeger(case.rank)
    for _, m in ipairs(case.modules) do
        local n, k = math.tointeger(m[2]), math.tointeger(m[3])
        local module = "base_model.model." .. m[1]
        tensors[#tensors + 1] = { module .. ".lora_A.weight", { r, k }, support.values(m[1] .. ".lora_A", r * k, 0.3, 0) }
        tensors[#tensors + 1] = { module .. ".lora_B.weight", { n, r }, support.values(m[1] .. ".lora_B", n * r, 0.1, 0) }
    end
    if change then change(tensors, config) end
    local parts, data, at = {}, {}, 0
    for _, t in ipairs(tensors) do
        parts[#parts + 1] = ('"%s":{"dtype":"F32","shape":[%s],"data_offsets":[%d,%d]}'):format(t[1],
            table.concat(t[2], ","), at, at + #t[3])
        data[#data + 1], at = t[3], at + #t[3]
    end
    local head = "{" .. table.concat(parts, ",") .. "}"
    write(name .. "/adapter_model.safetensors", string.pack("<s8", head) .. table.concat(data))
    write(name .. "/adapter_config.json", cjson.encode(config))
    return path(name)
end

local MODULES = { ["self_attn.q_proj"] = "attn_q", ["mlp.down_proj"] = "ffn_down" }

--- The same as a GGUF file, for an architecture whose rows are not permuted.
local function write_gguf(name, case, arch, alpha)
    local keys = {
        { "general.architecture", gguf.string(arch) }, { "general.type", gguf.string "adapter" },
        { "adapter.type", gguf.string "lora" }, { "adapter.lora.alpha", gguf.f32(alpha or case.alpha) },
    }
    local tensors, r = {}, math.tointeger(case.rank)
    for _, m in ipairs(case.modules) do
        local n, k = math.tointeger(m[2]), math.tointeger(m[3])
        local layer, module = m[1]:match "layers%.(%d+)%.(.+)$"
        local weight = ("blk.%s.%s.weight.lora_"):format(layer, MODULES[module])
        tensors[#tensors + 1] = { weight .. "a", { k, r }, support.values(m[1] .. ".lora_A", r * k, 0.3, 0) }
        tensors[#tensors + 1] = { weight .. "b", { r, n }, support.values(m[1] .. ".lora_B", n * r, 0.1, 0) }
    end
    gguf.write(path(name), keys, tensors)
    return path(name)
end

--- blocks: the layers' matrices in Q8_0.
local function load(base, opts, blocks)
    local case = support.case(base)
    support.write(path(base .. ".gguf"), case, blocks and function(_, tensors)
        for i, t in ipairs(tensors) do
            if t[1]:find "^blk" and t[2][2] then t[3], t[4] = gguf.blocks(8, t[2][1] * t[2][2], i, -9), 8 end
        end
    end)
    opts = opts or { compute = "f32", kv = { type = "f32" } }
    opts.threads, opts.ctx = opts.threads or 1, case.ctx
    return llm.load(path(base .. ".gguf"), opts), case
end

local function logits(model, ids, adapter)
    local s <close> = model:session { adapter = adapter }
    s:append(ids)
    local list, view = {}, s:logits()
    for i = 1, #view do list[i] = view:get(i - 1) end
    return list
end

local function worst(a, b)
    local most = 0
    for i = 1, #a do most = math.max(most, math.abs(a[i] - b[i])) end
    return most
end

describe("an adapter", function()
    teardown(function() os.execute(("rm -r '%s'"):format(folder)) end)

    for _, base in ipairs { "llama", "qwen2", "phi3_short" } do
        it("of PEFT on " .. base .. " gives what Transformers gives with it in the weights", function()
            local case = support.case("lora_" .. base)
            local m <close>, whole = load(base)
            local a <close> = m:adapter(write_peft("peft", case))
            for i, at in ipairs(case.at) do
                local ids = table.move(whole.prompt, 1, at + 1, 1, {})
                assert.is_true(worst(case.logits[i], logits(m, ids, a)) < 1e-4)
                assert.is_true(worst(case.logits[i], logits(m, ids)) > 0.05)
            end
        end)
    end

    it("of a GGUF file is the same", function()
        local case = support.case "lora_qwen2"
        local m <close>, whole = load "qwen2"
        local a <close> = m:adapter(write_gguf("lora.gguf", case, "qwen2"))
        assert.equal(6, a.rank)
        assert.is_true(worst(case.logits[2], logits(m, whole.prompt, a)) < 1e-4)
        local half <close> = m:adapter(path "lora.gguf", { scale = 0 })
        assert.same(logits(m, whole.prompt), logits(m, whole.prompt, half))
    end)

    it("is in recordings, and replayed with them", function()
        local record, recording = require "llmrun.record", require "llmrun.recording"
        local replay = require "llmrun.replay"
        local case, file = support.case "lora_llama", path "lora.rec"
        local function generate(m, whole, a)
            local s <close> = m:session { adapter = a }
            s:append(whole.prompt)
            return s:gen { max_tokens = 4, temperature = 0, ignore_eos = true }.tokens
        end
        local plain, with
        do
            local m <close>, whole = load "llama"
            local before <close> = m:adapter(write_peft("peft", case))
            assert(record.begin(m, file))
            local after <close> = m:adapter(path "peft", { scale = 0.5 })
            plain, with = generate(m, whole), generate(m, whole, before)
            generate(m, whole, after)
        end
        assert.is_false(table.concat(plain, " ") == table.concat(with, " "))
        local rec = assert(recording.read(file))
        local m <close> = load "llama"
        local r = replay.new(rec, m)
        r:run()
        assert.same({}, r.differences)
        assert.equal(12, r.tokens)
        assert.equal(r.steps, r.equal_steps)
        for _, id in ipairs(rec.order) do assert.same({}, replay.alone(rec, m, id).differences) end
    end)

    it("on weights in blocks is what it is on their values", function()
        local a = write_peft("peft", support.case "lora_llama")
        local exact <close>, whole = load("llama", nil, true)
        local quick <close> = load("llama", {}, true)
        local e <close> = exact:adapter(a)
        local q <close> = quick:adapter(a)
        local want = logits(exact, whole.prompt, e)
        local plain = logits(exact, whole.prompt)
        local rounding = worst(plain, logits(quick, whole.prompt)) -- of the rows: 8, 11 or 14 bits, as the CPU has it
        assert.is_true(rounding < 0.1)
        assert.is_true(worst(want, logits(quick, whole.prompt, q)) < 1.5 * rounding + 0.01)
        assert.is_true(worst(want, plain) > 0.3)
    end)

    for _, blocks in ipairs { false, true } do
    it("beside others in a batch changes its own rows only, and the cache keeps them apart"
        .. (blocks and ", on weights in blocks" or ""), function()
        local case = support.case "lora_llama"
        local m <close>, whole = load("llama", { threads = 2, chunk = 5, kv = { block_size = 4 } }, blocks)
        local one <close> = m:adapter(write_peft("one", case))
        local two <close> = m:adapter(write_peft("two", case, function(tensors)
            for i, t in ipairs(tensors) do
                if i % 2 == 0 then t[3] = support.values("two" .. t[1], #t[3] // 4, 0.2, 0) end
            end
        end))
        local plans = { { nil, 24 }, { one, 24 }, { two, 24 }, { nil, 9 }, { one, 13 }, { two, 17 } }
        local function run(plan)
            local s <close> = m:session { adapter = plan[1] }
            s:append(table.move(whole.prompt, 1, plan[2], 1, {}))
            local bits = {}
            for i, t in ipairs(s:gen({ max_tokens = 6, temperature = 0, logprobs = true, ignore_eos = true }).logprobs) do
                bits[i] = ("%d:%a"):format(t.id, t.logprob)
            end
            return table.concat(bits, " ")
        end
        local alone = {}
        for i, plan in ipairs(plans) do
            m:drop_cached()
            alone[i] = run(plan)
        end
        assert.not_equal(alone[1], alone[2])
        assert.not_equal(alone[2], alone[3])
        m:drop_cached()
        assert.same(alone, llm.map(plans, run))
        assert.same(alone, llm.map(plans, run)) -- from the cache
        assert.is_true(m:metrics().batch.p99 >= 6)
    end)
    end

    it("is there for drafts of the model's first layers and for what they are judged by", function()
        local m <close>, whole = load("llama", {})
        local a <close> = m:adapter(write_peft("peft", support.case "lora_llama"))
        local function run(speculate)
            m:drop_cached()
            local s <close> = m:session { adapter = a }
            s:append(whole.prompt)
            local r = s:gen { max_tokens = 24, temperature = 0, ignore_eos = true, logprobs = true, speculate = speculate }
            local bits = {}
            for i, t in ipairs(r.logprobs) do bits[i] = ("%d:%a"):format(t.id, t.logprob) end
            return bits
        end
        local plain = run "off"
        assert.same(plain, run "ngram")
        assert.same(plain, run { method = "early_exit", layers = 1 })
    end)

    it("names a file that can't be read once", function()
        local m <close> = load "llama"
        for file, text in pairs {
            ["/no/such"] = "/no/such: cannot open", ["README.md"] = "README.md: is not a GGUF file",
            lua = "lua: adapter_config.json",
        } do
            local ok, err = pcall(m.adapter, m, file)
            assert.is_false(ok)
            assert.matches("model:adapter: " .. text, tostring(err), 1, true)
        end
    end)

    it("stays with its sessions and forks when it is closed, and is needed to restore them", function()
        local m <close>, whole = load "llama"
        local a = m:adapter(write_peft("peft", support.case "lora_llama"))
        local s <close> = m:session { adapter = a }
        s:append(whole.prompt)
        local want = logits(m, whole.prompt, a)
        s:save(path "chat.kv")
        local ok, err = pcall(m.restore, m, path "chat.kv")
        assert.is_false(ok)
        assert.matches("another model or adapter", tostring(err))
        local r <close> = m:restore(path "chat.kv", { adapter = a })
        a:close()
        local f <close> = s:fork()
        for _, x in ipairs { s, f, r } do
            local view = x:logits()
            for i = 1, #want do assert.equal(want[i], view:get(i - 1)) end
        end
        ok, err = pcall(m.session, m, { adapter = a })
        assert.is_false(ok)
        assert.matches("the adapter peft is closed", tostring(err))
    end)

    it("belongs to the model that it was loaded for, and may outlive it", function()
        local m = load "llama"
        local a = m:adapter(path "peft")
        m:close()
        local n <close> = load "llama"
        local ok, err = pcall(n.session, n, { adapter = a })
        assert.is_false(ok)
        assert.matches("belongs to another model", tostring(err))
        a:close()
    end)

    it("that is wrong is refused, with what is wrong with it", function()
        local case = support.case "lora_llama"
        local m <close> = load "llama"
        local function refusal(change)
            local ok, err = pcall(m.adapter, m, write_peft("bad", case, change))
            assert.is_false(ok)
            return tostring(err)
        end
        local name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        local texts = {
            { "'blk.0.attn_q.weight': the adapter is for a matrix of 64 x 48, the model's has 64 x 64", function(t)
                t[1][2], t[1][3] = { 6, 48 }, t[1][3]:sub(1, 6 * 48 * 4)
            end },
            { "'" .. name .. "A.weight' has rank 0", function(t)
                t[1][2], t[1][3], t[2][2], t[2][3] = { 0, 64 }, "", { 64, 0 }, ""
            end },
            { "tensor '" .. name .. "A.weight' has no other half", function(t) table.remove(t, 2) end },
            { "has rank 5, '" .. name .. "B.weight' rank 6", function(t)
                t[1][2], t[1][3] = { 5, 64 }, t[1][3]:sub(1, 5 * 64 * 4)
            end },
            { "belongs to no matrix of the model", function(t) t[1][1] = "base_model.model.model.x.lora_A.weight" end },
            { "no matrix product with 'blk.9.attn_q.weight'", function(t)
                for i = 1, 2 do t[i][1] = t[i][1]:gsub("layers%.0", "layers.9") end
            end },
            { "use_dora is not supported", function(_, c) c.use_dora = true end },
            { "peft_type is 'IA3'", function(_, c) c.peft_type = "IA3" end },
            { "lora_alpha is no number", function(_, c) c.lora_alpha = "x" end },
            { "the adapter is empty", function(t) for i = 1, #t do t[i] = nil end end },
        }
        for _, t in ipairs(texts) do assert.matches(t[1], refusal(t[2]), 1, true) end
        local ok, err = pcall(m.adapter, m, write_gguf("other.gguf", support.case "lora_qwen2", "qwen2"))
        assert.is_false(ok)
        assert.matches("the adapter is for architecture 'qwen2', the model is 'llama'", tostring(err), 1, true)
        assert.is_false(pcall(m.adapter, m, path "nothing"))
        assert.equal(nil, core.stat(path "nothing"))
    end)

    it("is a model of its own behind the API", function()
        local m <close>, whole = load "qwen2"
        local a <close> = m:adapter(write_peft("tuned", support.case "lora_qwen2"), { name = "tuned" })
        local server <close> = served.start { models = { base = m }, openai = { names = { ["base:tuned"] = m:with(a) } } }
        local function answer(name)
            local r = served.post(server, "/v1/completions", { model = name, prompt = whole.prompt, max_tokens = 8,
                temperature = 0, ignore_eos = true, logprobs = 1 })
            assert.equal(200, r.status, r.body)
            assert.equal(name, r.json.model)
            return r.json.choices[1].logprobs.token_logprobs
        end
        local function direct(adapter)
            local s <close> = m:session { adapter = adapter }
            s:append(whole.prompt)
            local list = s:gen({ max_tokens = 8, temperature = 0, ignore_eos = true, logprobs = true }).logprobs
            for i, t in ipairs(list) do list[i] = t.logprob end
            return list
        end
        for name, adapter in pairs { base = false, ["base:tuned"] = a } do
            local want = direct(adapter or nil)
            for i, v in ipairs(answer(name)) do assert.is_true(math.abs(v - want[i]) < 1e-6) end
        end
        assert.not_same(answer "base", answer "base:tuned")
        local names = {}
        for _, e in ipairs(served.get(server, "/v1/models").json.data) do names[e.id] = true end
        assert.same({ base = true, ["base:tuned"] = true }, names)
    end)
end)
