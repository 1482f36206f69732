-- Samplers: order and limits of the stages, Lua stages, and the logits view.
local llm = require "llmrun"
local core = require "llmrun.core"

local function raises(pattern, fn, ...)
    local ok, err = pcall(fn, ...)
    assert.is_false(ok)
    assert.matches(pattern, tostring(err), 1, true)
end

local five = {}
for i, p in ipairs { .5, .25, .125, .0625, .0625 } do five[i] = math.log(p) end

local function kept(stages, logits)
    local ids = llm.sampler(stages):probs(logits or five)
    return table.concat(ids, " ")
end

describe("stages", function()
    it("keep what they should at their limits", function()
        assert.equal("0 1 2 3 4", kept { { "top_k", 0 } })
        assert.equal("0 1 2 3 4", kept { { "top_k", -1 } })
        assert.equal("0 1", kept { { "top_k", 2 } })
        assert.equal("0 1 2 3 4", kept { { "top_k", 7 } })
        assert.equal("0", kept { { "top_p", .45 } })
        assert.equal("0 1", kept { { "top_p", .55 } })
        assert.equal("0", kept { { "top_p", 0 } })
        assert.equal("0 1 2 3 4", kept { { "top_p", 1 } })
        assert.equal("0 1 2", kept { { "min_p", .2 } })
        assert.equal("0 1", kept { { "min_p", .4 } })
        assert.equal("0 1 2 3 4", kept { { "min_p", 0 } })
        for _, t in ipairs { 0, 1e-4, 1e-8, 1e-38 } do assert.equal("0", kept { { "temperature", t } }) end
        local far = {}
        for i, v in ipairs(five) do far[i] = v + 60000 end
        assert.equal("0 1", kept({ { "top_k", 2 } }, far))
        assert.equal("0", kept({ "greedy" }, { 1, 1, 0 }))
    end)

    it("all tokens come when nothing narrows", function()
        local count = { [0] = 0, 0, 0, 0, 0 }
        local s <close> = core.sampler_new(llm.sampler { { "top_k", 0 } }, 1, 5)
        local logits = core.logits_new(five)
        for i = 1, 10000 do
            local id = s:draw(logits, { position = i })
            count[id] = count[id] + 1
        end
        for id, p in pairs { [0] = .5, .25, .125, .0625, .0625 } do assert.near(p, count[id] / 10000, .02) end
    end)

    it("penalties count what they should", function()
        local logits = { 2, 1, .5, -1, 0 }
        local s = llm.sampler { { "penalties", repetition = 1.5, presence = .4, frequency = .3 } }
        local function penalised(context)
            local ids, p = s:probs(logits, context)
            local of = {}
            for i, id in ipairs(ids) do of[id] = math.log(p[i]) end
            return of
        end
        local got = penalised { prompt = { 0, 0, 3 }, generated = { 1, 1, 4 } }
        for id, want in pairs { [0] = 1.33333, [1] = -.33333, [3] = -1.5, [4] = -.7 } do
            assert.near(want - .5, got[id] - got[2], 1e-4)
        end
        got = penalised { prompt = { 0, 0, 3 } }
        for id, want in pairs { [0] = 1.33333, [1] = 1, [3] = -1.5, [4] = 0 } do
            assert.near(want - .5, got[id] - got[2], 1e-4)
        end
    end)

    it("bias, allow, ban", function()
        assert.equal("3 0 1 2 4", kept { { "logit_bias", { [3] = 10 } } })
        assert.equal("0 1 2 4", kept { { "logit_bias", { [3] = -math.huge } } })
        assert.equal("1 4", kept { { "allow", { 4, 1 } } })
        assert.equal("1 2 3", kept { { "ban", { 0, 4 } } })
    end)

    it("say what is wrong", function()
        raises("llm.sampler: stage 2: unknown stage 'topk' (did you mean 'top_k'?); valid: adaptive_p, allow, ban,",
            llm.sampler, { "greedy", { "topk", 3 } })
        raises("llm.sampler: stage 1: top_k: number expected, got nil", llm.sampler, { "top_k" })
        raises("llm.sampler: list of stages expected, got nil", llm.sampler)
        raises("llm.sampler: a list of stages has no field 'top_k'", llm.sampler, { top_k = 1 })
        raises("llm.sampler: penalties: unknown option 'windw' (did you mean 'window'?)", llm.sampler,
            { { "penalties", windw = 1 } })
    end)
end)

describe("Lua stages", function()
    local function model(o)
        o = o or {}
        o.vocab = { "a", "b", "c", "d" }
        o.next = function() return { [0] = 4, [1] = 3, [2] = 2, [3] = 1 } end
        return llm.scripted(o)
    end
    local function gen(m, opts)
        local s <close> = m:session()
        s:append "x"
        opts.max_tokens = opts.max_tokens or 4
        return s:gen(opts).text
    end

    it("change logits, before and after narrowing", function()
        local m <close> = model()
        assert.equal("bbbb", gen(m, { sampler = { function(l) l:mask(0) end, "greedy" } }))
        assert.equal("bbbb", gen(m, { sampler = { { "top_k", 3 }, function(l) l:mask { 0, 3 } end, "greedy" } }))
        assert.equal("cccc", gen(m, { sampler = { function(l) l:add({ 2 }, 10) end, "greedy" } }))
        assert.equal("dddd", gen(m, { sampler = { { "top_k", 4 }, function(l) l:add { [3] = 10, [1] = -1 } end,
            "greedy" } }))
        assert.equal("aaaa", gen(m, { sampler = { function(l) l:scale(1e6) end } }))
        assert.equal("dddd", gen(m, { sampler = { function(l) l:keep(3) end } }))
    end)

    it("may choose the token", function()
        local m <close> = model()
        assert.equal("dddd", gen(m, { sampler = function() return 3 end }))
        assert.equal("aaaa", gen(m, { sampler = function(l) return (l:argmax()) end }))
    end)

    it("see context: position, tokens, state of their own, random numbers by seed", function()
        local m <close> = model()
        local seen = {}
        assert.equal("abcd", gen(m, { sampler = function(_, ctx)
            ctx.n = (ctx.n or -1) + 1
            seen[#seen + 1] = {
                ctx.position, ctx.n_prompt, ctx.n_generated, ctx.last, #ctx:tokens(), #ctx:tokens(9, true),
            }
            return ctx.n
        end }))
        local x = m.vocab:find "x"
        assert.same({ 1, 1, 0, x, 0, 1 }, seen[1])
        assert.same({ 3, 1, 2, 1, 2, 3 }, seen[3])
        local function by_chance(l, ctx) return l:sample(ctx:uniform()) end
        local a = gen(m, { sampler = by_chance, seed = 5, max_tokens = 30 })
        assert.equal(a, gen(m, { sampler = by_chance, seed = 5, max_tokens = 30 }))
        assert.not_equal(a, gen(m, { sampler = by_chance, seed = 6, max_tokens = 30 }))
    end)

    it("fail their own request, with a traceback", function()
        local m <close> = model { max_seqs = 4 }
        local r = llm.map({ 1, 2 }, function(i)
            return { pcall(gen, m, { sampler = function(_, ctx)
                if i == 1 and ctx.n_generated == 2 then error("sampler broke") end
                return 1
            end }) }
        end)
        assert.is_false(r[1][1])
        assert.matches("s:gen: sampler stage: .*sampler_spec.lua:%d+: sampler broke\nstack traceback",
            tostring(r[1][2]))
        assert.equal("bbbb", r[2][2])
        for value, text in pairs { [99999] = "must return a token id or nothing, not 99999", x = "not x" } do
            raises(text, gen, m, { sampler = function() return value end })
        end
    end)

    it("may close its own session, which ends the call", function()
        for _, name in ipairs { "gen", "stream" } do
            local m <close> = llm.scripted { next = function() return 65 end }
            local s = m:session()
            s:append "a"
            local function stage() s:close() end
            local ok, err = pcall(function()
                if name == "gen" then return s:gen { sampler = stage } end
                for _ in s:stream { sampler = stage } do error "a piece of a closed session" end
            end)
            if name == "gen" then
                assert.is_false(ok)
                assert.equal("cancelled", err.code)
            else
                assert.is_true(ok, tostring(err))
            end
            assert.equal(0, m:stats().sequences)
            assert.is_true(m:check())
        end
    end)

    it("can return ids of the vocabulary only", function()
        local m <close> = llm.scripted { next = function() return 65 end }
        for _, id in ipairs { -1, 1 << 40, 1.5, "x", m.info.n_vocab } do
            local s <close> = m:session()
            s:append "a"
            local ok, err = pcall(s.gen, s, { sampler = function() return id end, max_tokens = 1 })
            assert.is_false(ok)
            assert.matches("must return a token id or nothing, not " .. tostring(id), tostring(err), 1, true)
        end
    end)

    it("can't wait, and say so", function()
        local m <close> = model()
        raises("llm.sleep: can't wait for the engine", gen, m, { sampler = function() llm.sleep(0) end })
    end)

    it("their view is dead afterwards, and so is ctx", function()
        local m <close> = model()
        local kept_view, kept_ctx
        gen(m, { sampler = function(l, ctx) kept_view, kept_ctx = l, ctx end })
        raises("stale view", kept_view.argmax, kept_view)
        raises("inside its sampler stage only", kept_ctx.tokens, kept_ctx)
    end)

    it("masking everything ends the request clearly", function()
        local m <close> = model()
        raises("no token is left", gen, m, { sampler = function(l) l:keep {} end })
    end)
end)

describe("the logits view", function()
    local function view() return core.logits_new(five) end

    it("reads", function()
        local l = view()
        assert.equal(5, #l)
        assert.equal(5, l:vocab_size())
        assert.equal(0, (l:argmax()))
        assert.near(math.log(.25), l:get(1), 1e-6)
        assert.near(math.log(.125), l:get({ 1, 2 })[2], 1e-6)
        local ids, vals = l:topk(3)
        assert.same({ 0, 1, 2 }, ids)
        assert.near(math.log(.125), vals[3], 1e-6)
        assert.equal(5, #l:topk(100))
        assert.same({ 0, 1 }, (l:copy():keep({ 1, 0 }):topk(5)))
        local row = {}
        for i = 1, 3000 do row[i] = i * 7919 % 3000 end
        local big = core.logits_new(row)
        local all, values = big:topk(3000)
        assert.equal(3000, #all)
        for i = 1, 3000 do assert.equal(3000 - i, values[i]) end
        assert.same(table.move(all, 1, 1000, 1, {}), (big:topk(1000)))
        assert.near(.25, l:softmax(1), 1e-6)
        assert.near(.125, l:softmax({ 0, 2 })[2], 1e-6)
        assert.near(math.log(.5), l:logprob(0), 1e-6)
        assert.near(0, l:logsumexp(), 1e-6)
        assert.near(1.875 * math.log(2), l:entropy(), 1e-5)
        assert.equal(0, l:sample(0))
        assert.equal(1, l:sample(.6))
        assert.equal(4, l:sample(.999))
        assert.is_nil(l:candidates())
    end)

    it("changes, and chains", function()
        local l = view()
        assert.equal(4, (l:copy():mask({ 0, 1 }):add(4, 3):argmax()))
        assert.equal(0, (l:argmax()))
        assert.equal("1 3", table.concat(llm.sampler {}:probs(l:copy():keep { 3, 1 }), " "))
        local other = core.logits_new { 0, 0, 0, 0, 1 }
        assert.equal(4, (l:copy():add(other, 10):argmax()))
        assert.near(2 * l:get(2), l:copy():scale(2):get(2), 1e-6)
        assert.near(2 * l:get(2), l:copy():scale({ 2 }, 2):get(2), 1e-6)
        assert.equal(-math.huge, l:copy():mask(3):get(3))
        assert.is_nil(l:copy():keep({}):argmax())
    end)

    it("checks ids and numbers", function()
        local l = view()
        for _, bad in ipairs { -1, 5, 2 ^ 31 // 1 | 0 } do
            raises("no id of this vocabulary", l.get, l, bad)
            raises("no id of this vocabulary", l.mask, l, { bad })
        end
        raises("number has no integer representation", l.get, l, 1.5)
        raises("not a number", l.add, l, 0, 0 / 0)
        raises("at least 1 expected", l.topk, l, 0)
        raises("[0, 1)", l.sample, l, 1)
        raises("two vocabularies", l.add, l, core.logits_new { 1, 2 })
    end)

    it("of a session is stale after the next step, the close of session or model", function()
        local m = llm.scripted { next = function(t) return t[#t] + 1 end }
        local s = m:session()
        s:append "a"
        local l = s:logits()
        assert.equal(98, (l:argmax()))
        local copy = l:copy()
        s:append(98)
        assert.equal(98, (l:argmax())) -- nothing has waited yet
        local l2 = s:logits()
        raises("stale view", l.argmax, l)
        assert.equal(99, (l2:argmax()))
        assert.equal(98, (copy:argmax()))
        m:close()
        raises("stale view", l2.argmax, l2)
        l2 = nil -- luacheck: ignore 311
        collectgarbage()
    end)

    it("decodes greedily as gen does, side by side", function()
        local m <close> = llm.scripted { next = function(t) return (t[#t] * 7 + #t) % 256 end, max_seqs = 8 }
        local r = llm.map({ 1, 2, 3, 4 }, function(i)
            local s <close> = m:session()
            s:append { i }
            local f <close> = s:fork()
            local by_hand = {}
            for n = 1, 12 do
                by_hand[n] = s:logits():argmax()
                s:append(by_hand[n])
            end
            return { by_hand, f:gen({ max_tokens = 12, temperature = 0 }).tokens }
        end)
        for i = 1, 4 do assert.same(r[i][2], r[i][1]) end
    end)
end)
