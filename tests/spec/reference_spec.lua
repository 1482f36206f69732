--- The four real models against float32 references (tests/data/ref, made with PyTorch and Transformers).
---
--- With LLMRUN_FULL=1 everything runs on all four models; else the float32 path runs on the small models' short
--- prompts, because it is slow by design.
---
--- Where the CPU has tiles, rows of activations have 11 and 14 bits; elsewhere 8, and the bounds are those of that rounding.

local json = require "cjson"
local llm = require "llmrun"
local catalog = require "llmrun.catalog"

local FULL = os.getenv "LLMRUN_FULL" == "1"
local COMPUTE = os.getenv "LLMRUN_COMPUTE" -- of the fast path: nil or "bf16"
local MODELS = {
    { name = "smollm2", ref = "smollm2-135m", perplexity = 0.0087, f32 = true },
    { name = "gemma3", ref = "gemma-3-270m", perplexity = 0.0070, f32 = true },
    { name = "qwen-0.5b", ref = "qwen2.5-0.5b", perplexity = 0.0013, perplexity8 = 0.003, f32 = FULL },
    { name = "qwen-1.5b", ref = "qwen2.5-1.5b", perplexity = 0.0026, nmse8 = 3e-2, f32 = FULL, slow = true },
}

local function read(path)
    local f = assert(io.open(path, "rb"))
    local text = f:read "a"
    f:close()
    return text
end

local function reference(m) return json.decode(read("tests/data/ref/" .. m.ref .. ".json")) end

--- The logits behind a prompt and 32 greedy tokens of all prompts, as one batch.
local function run_prompts(model, prompts, n_greedy)
    return llm.map(prompts, function(p)
        local s <close> = model:session()
        s:append(p.ids)
        local top = {}
        local logits = s:logits()
        for i, t in ipairs(p.top10) do top[i] = logits:get(t[1]) end
        local first = logits:argmax()
        local out = n_greedy > 0 and s:gen { max_tokens = n_greedy, temperature = 0, ignore_eos = true }.tokens or {}
        return { top = top, first = first, tokens = out }
    end)
end

local function first_difference(a, b)
    for i = 1, math.min(#a, #b) do
        if a[i] ~= b[i] then return i end
    end
end

--- Normalised mean square error of the top-10 logits: squared error over the variance of the model's logits.
local function compare(prompts, got)
    local r = { first = 0, n = #prompts, worst = 0, error = 0, variance = 0, same = 0, wrong = {} }
    for i, p in ipairs(prompts) do
        local g = got[i]
        if g.first == p.top10[1][1] then r.first = r.first + 1 end
        for j, t in ipairs(p.top10) do
            local d = math.abs(g.top[j] - t[2])
            r.worst = math.max(r.worst, d)
            r.error = r.error + d * d
            r.variance = r.variance + p.logit_std ^ 2
        end
        local at = first_difference(g.tokens, p.greedy)
        if not at then r.same = r.same + 1
        else r.wrong[#r.wrong + 1] = { name = p.name, step = at, margin = p.greedy_margin[at] } end
    end
    r.nmse = r.error / r.variance
    return r
end

local function short(prompts)
    local list = {}
    for _, p in ipairs(prompts) do
        if FULL or p.n_tokens <= 64 then list[#list + 1] = p end
    end
    return list
end

-- Sanitized builds run some ten times slower: there the small model alone shows that nothing is touched out of bounds.
if os.getenv "LLMRUN_TEST_SANITIZE" == "1" then MODELS = { { name = "smollm2", ref = "smollm2-135m", perplexity = 1 } } end

local function has_tiles(model) return model.info.backend:find "amx" ~= nil end

local total, agreed = { first = 0, n = 0, error = 0, variance = 0 }, nil

for _, m in ipairs(MODELS) do
    describe("reference of " .. m.ref, function()
        local ref = reference(m)
        local path = catalog.find(m.name)

        it("tokenizes every text as the model's own tokenizer", function()
            assert.is_truthy(path, m.name .. " is missing: run scripts/fetch_model " .. m.name)
            local model <close> = llm.load(path, { ctx = 256, kv = { blocks = 16 } })
            for _, list in ipairs { ref.prompts, ref.tokenize } do
                for _, p in ipairs(list) do
                    local special = list == ref.prompts
                    local ids = model:tokenize(p.text, { special = true, bos = ref.bos ~= json.null })
                    if #ids ~= #p.ids and not special then
                        ids = model:tokenize(p.text, { special = true, bos = false })
                    end
                    assert.same(p.ids, ids, p.text:sub(1, 60))
                end
            end
        end)

        if m.f32 then
            it("gives the float32 logits and continuations on the reference path", function()
                local model <close> = llm.load(path, { compute = "f32", ctx = 2048 })
                local prompts = short(ref.prompts)
                local r = compare(prompts, run_prompts(model, prompts, FULL and 32 or 8))
                assert.is_true(r.worst < 2e-3, ("worst difference %.5f"):format(r.worst))
                assert.equal(r.n, r.first)
                for _, w in ipairs(r.wrong) do
                    local text = ("%s differs at step %d, margin %.4f"):format(w.name, w.step, w.margin)
                    assert.is_true(w.margin < 0.01, text)
                end
            end)
        end

        it("is near with the fast kernels, and differs only where two tokens are close", function()
            local model <close> = llm.load(path, { ctx = 2048, compute = COMPUTE })
            local prompts = (m.slow and not FULL) and short(ref.prompts) or ref.prompts
            local r = compare(prompts, run_prompts(model, prompts, (m.slow and not FULL) and 8 or 32))
            print(("%s: nmse %.2e, worst %.3f, first token %d of %d, same continuation %d"):format(
                m.name, r.nmse, r.worst, r.first, r.n, r.same))
            local most = not has_tiles(model) and m.nmse8 or 5e-3
            assert.is_true(r.nmse < most, ("normalised mean square error %.2e"):format(r.nmse))
            for _, w in ipairs(r.wrong) do
                assert.is_true(w.margin < 0.3, ("%s differs at step %d, margin %.4f"):format(w.name, w.step, w.margin))
            end
            for k in pairs(total) do total[k] = total[k] + r[k] end
            agreed = has_tiles(model) and 0.95 or 0.9
        end)

        if m.perplexity < 1 and (not m.slow or FULL) then
            it("has the perplexity of the reference", function()
                local model <close> = llm.load(path, { ctx = 512, compute = COMPUTE })
                local ids = model:tokenize(read "tests/data/ref/gpl3.txt", { bos = true })
                local want = ref.ppl[1].llama_style_ctx512
                local windows = {}
                for c = 0, want.chunks - 1 do
                    local w = table.move(ids, c * 512 + 1, c * 512 + 512, 1, {})
                    if ref.bos ~= json.null then w[1] = ref.bos end
                    windows[#windows + 1] = w
                end
                local sums = llm.map(windows, function(w)
                    local s <close> = model:session()
                    s:append(w)
                    local scored, sum = s:score { from = 258 }
                    return { sum = sum, n = #scored }
                end, { concurrency = 2 })
                local sum, n = 0, 0
                for _, s in ipairs(sums) do sum, n = sum + s.sum, n + s.n end
                assert.equal(want.n_scored, n)
                local ppl = math.exp(-sum / n)
                local rise = ppl / want.ppl - 1
                print(("%s: perplexity %.4f, %+.2f %% of the reference"):format(m.name, ppl, 100 * rise))
                local most = not has_tiles(model) and m.perplexity8 or m.perplexity
                assert.is_true(rise <= most, ("perplexity %.4f against %.4f"):format(ppl, want.ppl))
            end)
        end
    end)
end

describe("the four models together", function()
    it("agree with the reference on the first token of 95 % of the prompts, 90 % with rows of 8 bits", function()
        assert.is_true(total.n >= 12)
        assert.is_true(total.first >= agreed * total.n, ("%d of %d"):format(total.first, total.n))
    end)
end)
