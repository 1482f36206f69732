-- Every sampler stage against tests/data/sample/ref.json (scripts/gen_sample_ref.py); the options of gen; thinking.
local llm = require "llmrun"
local core = require "llmrun.core"
local json = require "llmrun.json"

local function raises(pattern, fn, ...)
    local ok, err = pcall(fn, ...)
    assert.is_false(ok)
    assert.matches(pattern, tostring(err), 1, true)
end

local function reference()
    local f <close> = assert(io.open("tests/data/sample/ref.json", "rb"))
    return assert(json.decode(f:read "a"))
end

local function stage_of(s)
    local args, stage = s.args, { s.name }
    if s.name == "logit_bias" then
        local bias = {}
        for _, pair in ipairs(args[1]) do bias[pair[1]] = pair[2] end
        args = { bias }
    end
    table.move(args, 1, #args, 2, stage)
    for k, v in pairs(s.settings) do stage[k] = v end
    return stage
end

local function chain(stages)
    local list = {}
    for i, s in ipairs(stages) do
        list[i] = stage_of(s)
        if s.name == "min_tokens" then list[i] = { "min_tokens", s.args[1], s.args[2] } end
    end
    return llm.sampler(list)
end

--- What differs, or nil.
local function compare(expect, ids, p)
    if #expect ~= #ids then return ("%d tokens expected, got %d"):format(#expect, #ids) end
    local got = {}
    for i, id in ipairs(ids) do
        got[id] = p[i]
        if i > 1 and p[i] > p[i - 1] then return ("place %d is more probable than the one before"):format(i) end
    end
    for _, e in ipairs(expect) do
        local q = got[e[1]]
        if not q or math.abs(e[2] - q) > 1e-6 + 2e-5 * e[2] then
            return ("token %d: probability %.9g expected, got %s"):format(e[1], e[2], q)
        end
    end
end

describe("reference table", function()
    local ref = reference()
    local by_stage = {}
    for _, c in ipairs(ref.single) do
        local name = c.stages[1].name
        if c.name:find "^greedy" then name = "greedy" elseif #c.stages > 2 then name = "a long chain" elseif #c.stages == 2 then name = c.stages[2].name end
        by_stage[name] = by_stage[name] or {}
        table.insert(by_stage[name], c)
    end
    local names = {}
    for name in pairs(by_stage) do names[#names + 1] = name end
    table.sort(names)

    it("covers all stages", function()
        assert.equal("a long chain allow ban dry dynamic_temperature greedy logit_bias min_p min_tokens no_repeat_ngram "
            .. "penalties temperature top_k top_n_sigma top_p typical xtc", table.concat(names, " "))
        assert.equal(19, #ref.runs)
    end)

    for _, name in ipairs(names) do
        it(name, function()
            for _, c in ipairs(by_stage[name]) do
                local ids, p = chain(c.stages):probs(c.logits, c.context)
                local what = compare(c.expect, ids, p)
                if what then error(c.name .. ": " .. what) end
            end
        end)
    end

    it("thinking budget", function()
        local thinking = require "llmrun.sampler.thinking"
        for n, c in ipairs(ref.thinking) do
            local markers = { start = c.start, stop = c.stop, ["message stop"] = {} }
            table.move(c.message, 1, #c.message, 1, markers["message stop"])
            table.move(c.stop, 1, #c.stop, #c.message + 1, markers["message stop"])
            local model = { tokenize = function(_, text) return markers[text] end }
            local stage = thinking.stage(model, { budget = c.budget, start = "start",
                stop = "stop", message = "message " })
            local said, ctx = {}, {}
            function ctx.tokens(_, most, all)
                local list = all and table.move(c.prompt, 1, #c.prompt, 1, {}) or {}
                table.move(said, 1, #said, #list + 1, list)
                return table.move(list, math.max(1, #list - most + 1), #list, 1, {})
            end
            for i, wish in ipairs(c.wishes) do
                said[i] = stage(nil, ctx) or wish
                assert.equal(c.said[i], said[i], ("case %d, token %d"):format(n, i))
            end
        end
    end)

    it("watermark", function()
        local f <close> = assert(io.open("examples/watermark.lua", "rb"))
        local code = assert(f:read("a"):match "\n(local secret.-)\n%-%-%- How far")
        local mark = assert(load(code .. "\nreturn mark"))()
        for n, c in ipairs(ref.watermark) do
            local l = core.logits_new(c.logits)
            l:keep((l:topk(c.top_k)))
            local view = setmetatable({ candidates = function() return (l:topk(c.top_k)) end,
                add = function(_, ids, x) return l:add(ids, x) end }, { __index = l })
            mark(view, { last = c.last })
            local ids, p = llm.sampler({}):probs(l)
            local what = compare(c.expect, ids, p)
            if what then error(("case %d: %s"):format(n, what)) end
        end
    end)

    for _, c in ipairs(ref.runs) do
        it(c.name, function()
            local s <close> = chain(c.stages):start(#c.rows[1].logits, c.seed)
            local generated = {}
            for n, row in ipairs(c.rows) do
                local l = core.logits_new(row.logits)
                local ctx = { prompt = { 0 }, generated = generated, position = n }
                local ids, p = s:probs(l, ctx)
                local what = compare(row.expect, ids, p)
                if what then error(("step %d: %s"):format(n, what)) end
                assert.equal(row.token, (s:draw(l, ctx)))
                generated[n] = 0
            end
        end)
    end
end)

describe("stages that look further", function()
    local function model(o)
        o = o or {}
        o.vocab = o.vocab or { "a", "b", "c", "d", "\n" }
        o.next = o.next or function() return { [0] = 4, [1] = 3, [2] = 2, [3] = 1, default = -20 } end
        return llm.scripted(o)
    end
    local function gen(m, opts, prompt)
        local s <close> = m:session()
        s:append(prompt or "x")
        opts.max_tokens = opts.max_tokens or 6
        return s:gen(opts).text
    end

    it("no_repeat_ngram as an option", function()
        local m <close> = model()
        assert.equal("aabacada\n", gen(m, { temperature = 0, no_repeat_ngram = 2, max_tokens = 9 }))
        assert.equal("abcd", gen(m, { temperature = 0, no_repeat_ngram = 1, max_tokens = 4 }))
    end)

    it("dry as an option; breakers as texts", function()
        local m <close> = model()
        assert.equal("aaaaaa", gen(m, { temperature = 0 }))
        assert.equal("aaabaa", gen(m, { temperature = 0, dry_multiplier = 1.5, dry_base = 2, dry_allowed_length = 2 }))
        -- behind "ab\n": the match of "ab" is broken by the line's end, unless nothing breaks
        local prompt = "cab\nacab\n"
        local o = { temperature = 0, dry_multiplier = 10, dry_allowed_length = 2, max_tokens = 1 }
        assert.equal("a", gen(m, o, prompt))
        o.dry_breakers = {}
        assert.equal("b", gen(m, o, prompt))
        o.dry_breakers = { "b" }
        assert.equal("a", gen(m, o, prompt))
        o.dry_breakers = { m.vocab:find "c", "zz" }
        assert.equal("b", gen(m, o, prompt))
        raises("s:gen: dry: a breaker is a text or a token id, not 'true'", gen, m,
            { dry_multiplier = 1, dry_breakers = { true } })
        raises("sampler:probs: dry: breakers given as texts need a model's vocabulary", function()
            llm.sampler { { "dry" } }:probs { 1, 2, 3 }
        end)
    end)

    it("xtc takes the best out by chance, the same for the same seed", function()
        local m <close> = model { next = function() return { [0] = 4, [1] = 4.1, [2] = 3.9, default = -20 } end }
        assert.equal("cccccc", gen(m, { xtc_probability = 1, seed = 3 }))
        local o = { xtc_probability = 0.5, seed = 4, max_tokens = 40 }
        local text = gen(m, o)
        assert.equal(text, gen(m, o))
        local _, c = text:gsub("c", "")
        assert.is_true(c > 18 and c < 36)
    end)

    it("dynamic temperature, mirostat and adaptive-p as options", function()
        local m <close> = model()
        assert.equal("aaaaaa", gen(m, { temperature = 0.1, dynatemp_range = 0.1, seed = 1 }))
        assert.equal("aaaaaa", gen(m, { mirostat = 2, mirostat_tau = 0.01, mirostat_eta = 1, seed = 1 }))
        assert.equal("aaaaaa", gen(m, { mirostat = 1, mirostat_tau = 0.0001, seed = 1 }))
        local text = gen(m, { adaptive_target = 0.03, adaptive_decay = 0, min_p = 0.01, seed = 1, max_tokens = 60 })
        local _, d = text:gsub("d", "")
        assert.is_true(d > 15)
        assert.equal(6, #gen(m, { mirostat = 0 }))
    end)

    it("what mirostat has learnt survives preemption; sessions don't share it", function()
        local m <close> = model { kv = { block_size = 2 } }
        local o = { mirostat = 2, mirostat_tau = 1, mirostat_eta = 0.5, seed = 9, max_tokens = 20 }
        local plain = gen(m, o)
        o.fault = { "preempt", 7 }
        assert.equal(plain, gen(m, o))
        o.fault = nil
        local r = llm.map({ 1, 2, 3 }, function() return gen(m, o) end)
        assert.same({ plain, plain, plain }, r)
    end)

    it("name what is wrong", function()
        local m <close> = model()
        raises("s:gen: dry_base without dry_multiplier", gen, m, { dry_base = 2 })
        raises("s:gen: xtc_threshold without xtc_probability", gen, m, { xtc_threshold = 0.1 })
        raises("s:gen: mirostat_tau without mirostat", gen, m, { mirostat_tau = 1 })
        raises("s:gen: mirostat or adaptive_target, not both", gen, m, { mirostat = 1, adaptive_target = 0.5 })
        raises("s:gen: mirostat: version 1 or 2 expected, got 3", gen, m, { mirostat = 3 })
        raises("xtc: probability = 2: 0 to 1 expected", gen, m, { xtc_probability = 2 })
        raises("dry: base = 0.5", gen, m, { dry_multiplier = 1, dry_base = 0.5 })
        raises("adaptive_p: decay = 1", gen, m, { adaptive_target = 0.5, adaptive_decay = 1 })
        raises("mirostat: tau = -1", gen, m, { mirostat = 2, mirostat_tau = -1 })
        raises("no_repeat_ngram = -1", gen, m, { no_repeat_ngram = -1 })
        raises("xtc_probability has no effect beside sampler", gen, m, { xtc_probability = 1, sampler = { "greedy" } })
        raises("must be the last stage", gen, m, { sampler = { { "mirostat" }, { "temperature", 2 } } })
        raises("llm.sampler: stage 1: xtc: unknown option 'treshold' (did you mean 'threshold'?)", llm.sampler,
            { { "xtc", 0.5, treshold = 1 } })
        raises("llm.sampler: stage 2: dry: option 'allowed_length': integer expected", llm.sampler,
            { "greedy", { "dry", allowed_length = "x" } })
        raises("window of -1 tokens is negative", gen, m, { sampler = { { "no_repeat_ngram", 2, window = -1 } } })
    end)
end)

describe("thinking_budget", function()
    local special = { "<|bos|>", "<|eos|>", "<think>", "</think>" }
    -- thinks (letters t) until told to stop, then says "ok" and ends
    local function thinker(o)
        local m
        o = o or {}
        o.special = special
        o.next = function(t)
            local last = m:detokenize(t[#t], { special = true })
            local closed = false
            for _, id in ipairs(t) do closed = closed or m:detokenize(id, { special = true }) == "</think>" end
            if not closed then
                return m:tokenize((last == "<think>" or last == "t") and "t" or "<think>", { special = true })[1]
            end
            if last == "k" then return m.info.eos end
            return m:tokenize(last == "o" and "k" or "o")[1]
        end
        m = llm.scripted(o)
        return m
    end
    local function gen(m, opts, prompt)
        local s <close> = m:session()
        s:append(prompt or "x", { special = true })
        opts.special, opts.max_tokens = true, opts.max_tokens or 30
        return s:gen(opts).text
    end

    it("forces the end after so many tokens", function()
        local m <close> = thinker()
        assert.equal("<think>ttttt</think>ok", gen(m, { thinking_budget = 5 }))
        assert.equal("<think></think>ok", gen(m, { thinking_budget = 0 }))
        assert.equal("<think>tttt", gen(m, { thinking_budget = 100, max_tokens = 5 }))
    end)

    it("counts from a prompt that opened the thoughts", function()
        local m <close> = thinker()
        assert.equal("ttt</think>ok", gen(m, { thinking_budget = 3 }, "x<think>"))
        assert.equal("ok", gen(m, { thinking_budget = 3 }, "x<think>t</think>"))
    end)

    it("works with other samplers, other markers, a message", function()
        local m <close> = thinker()
        assert.equal("<think>tt</think>ok", gen(m, { thinking_budget = 2, temperature = 0, top_k = 5 }))
        local thinking = require "llmrun.sampler.thinking"
        assert.equal("<think>ttend.</think>ok", gen(m, { sampler = {
            thinking.stage(m, { budget = 2, message = "end." }), "greedy",
        } }))
        raises("sampler.thinking: budget: a number of tokens expected", thinking.stage, m, {})
        raises("sampler.thinking: unknown option 'bugdet'", thinking.stage, m, { bugdet = 1 })
        raises("thinking_budget", gen, m, { thinking_budget = "x" })
    end)
end)
