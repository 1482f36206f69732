-- Drafts that branch: the text, to the last bit, is that of no speculation, wherever the way through a tree leads.
local llm = require "llmrun"
local drafts = dofile "tests/spec/draft_support.lua"
local gguf = require "llmrun.testing.gguf"

local slow = os.getenv "LLMRUN_TEST_SANITIZE" ~= nil

-- A model over bytes whose logits depend on the last two bytes and, slowly, on the place.
local function logits_of(tokens)
    local n, row = #tokens, { default = -math.huge }
    local h = (tokens[n] * 31 + (tokens[n - 1] or 0) * 17 + n // 24 * 7) % 10007
    for i = 0, 7 do
        h = (h * 1103 + 12345) % 100003
        row[97 + i] = h % 1000 / 200
    end
    return row
end

local function near(tokens) return logits_of(#tokens % 3 == 0 and { 97, 98, tokens[#tokens] } or tokens) end

local function model_of(opts)
    local o = { ctx = 512, max_seqs = 16, next = logits_of, speculate = { method = "off", draft = { next = near } } }
    for k, v in pairs(opts or {}) do o[k] = v end
    return llm.scripted(o)
end

local run, both = drafts.run, drafts.both

-- A drafter of random trees around the truth: each node has up to `wide` children, one of them right with odds of 2/3.
local function forest(m, o, prompt, seed, wide)
    local s <close> = m:session()
    s:append(prompt or "hello abcab")
    local rest = { max_tokens = (o.max_tokens or 60) + 12, temperature = o.temperature, seed = o.seed }
    s:gen(rest)
    local truth, x = s.tokens, seed
    local function random(n)
        x = (x * 1103515245 + 12345) & 0x7fffffff
        return (x >> 16) % n
    end
    return function(ctx)
        local at, t = ctx.n_prompt + ctx.n_generated, { parents = {} }
        local right, depth = { [0] = true }, { [0] = 0 } -- whether the way to a node is the truth
        for place = 0, 31 do
            if place > #t then break end
            for child = 1, random(wide) + (place == 0 and 1 or 0) do
                local hit = child == 1 and right[place] and random(3) > 0
                local id = hit and truth[at + depth[place] + 1] or 97 + random(8)
                if #t == 32 then break end
                local i = #t + 1
                t[i], t.parents[i] = id, place
                right[i], depth[i] = right[place] and id == truth[at + depth[place] + 1], depth[place] + 1
            end
        end
        if seed % 2 == 0 then -- the right branch last: each node's children the other way round
            for i = 1, #t do
                if t.parents[i] == 0 and i > 1 then
                    t[1], t[i] = t[i], t[1]
                    for j = 1, #t do
                        local p = t.parents[j]
                        if j > i and (p == 1 or p == i) then t.parents[j] = p == 1 and i or 1 end
                        if j <= i and p == 1 then return t end -- would stand before its parent
                    end
                    break
                end
            end
        end
        return t
    end
end

local METHODS = {
    { method = "draft", fixed = true, k = 4, branches = 4 }, { method = "draft", branches = 3 },
    { method = "ngram", min_match = 1, fixed = true, k = 5, branches = 4 }, { method = "ngram", branches = 4 },
}

describe("a tree of drafts", function()
    it("leaves the text of every seed as it is, greedy or not", function()
        for block = 1, slow and 2 or 4 do
            local m <close> = model_of { kv = { block_size = ({ 16, 1, 3, 5 })[block], blocks = 1024 } }
            local accepted, most, branched = 0, 0, 0
            for seed = 1, slow and 3 or 8 do
                local o = { max_tokens = 50, temperature = seed % 3 == 0 and 0 or 0.9, seed = seed,
                    top_p = seed == 4 and 0.8 or nil, presence_penalty = seed == 5 and 0.7 or nil }
                local r = both(m, o, forest(m, o, nil, seed, 4))
                accepted = accepted + r.speculation.accepted
                most = math.max(most, r.speculation.length)
                branched = branched + r.speculation.drafted
                for i, how in ipairs(METHODS) do
                    if (i + seed) % 2 == 0 then both(m, o, how) end
                end
            end
            assert.is_true(accepted > 40 and most > 1 and branched > 4 * accepted)
        end
    end)

    it("may branch wherever it likes", function()
        local m <close> = model_of { kv = { block_size = 4, blocks = 512 } }
        local function drafter(t, parents)
            t.parents = parents
            return function() return t end
        end
        local o = { max_tokens = 30, temperature = 0 }
        local all, parents = {}, {}
        for i = 1, 32 do all[i], parents[i] = 97 + (i - 1) % 8, (i - 1) // 8 end
        assert.is_true(both(m, o, drafter(all, parents)).speculation.accepted >= 14) -- each first token is there
        both(m, o, drafter({ 97, 97, 98, 98, 97 }, { 0, 0, 1, 2, 2 }))               -- siblings alike
        both(m, o, drafter({ 97, 1 << 30, 98, 99 }, { 0, 0, 2, 1 }))                 -- no ids
        for _, bad in ipairs { { 1 }, { 0, 2 }, { 0, -1 }, { 0, "x" }, { 0 }, "x" } do
            local ok, err = pcall(run, m, { max_tokens = 5, speculate = drafter({ 97, 98 }, bad) })
            assert.is_false(ok)
            assert.matches("parent", tostring(err), 1, true)
            m:check()
        end
    end)

    it("takes what is beside the draft model's first choice", function()
        local m <close> = model_of { speculate = { method = "off", draft = { next = function(tokens)
            local row, best, second = logits_of(tokens), 97, nil
            if #tokens % 3 > 0 then return row end
            for i = 98, 104 do if row[i] > row[best] then best = i end end
            for i = 97, 104 do if i ~= best and (not second or row[i] > row[second]) then second = i end end
            row[best], row[second] = row[second], row[best]
            return row
        end } } }
        local o = { max_tokens = 60, temperature = 0 }
        local chain = both(m, o, { method = "draft", fixed = true, k = 4 }).speculation
        local tree = both(m, o, { method = "draft", fixed = true, k = 4, branches = 4 }).speculation
        assert.is_true(tree.length > chain.length, ("%g, %g"):format(tree.length, chain.length))
    end)

    it("finds what followed at several earlier places", function()
        local m <close> = model_of { next = function(tokens) -- a, then whatever followed the a before the last one
            if tokens[#tokens] ~= 97 then return 97 end
            local seen = 0
            for i = #tokens - 1, 1, -1 do
                if tokens[i] == 97 then seen = seen + 1 end
                if tokens[i] == 97 and seen == 2 then return tokens[i + 1] end
            end
            return 98
        end }
        local o = { max_tokens = 40, temperature = 0 }
        local how = { method = "ngram", min_match = 1, max_match = 1, fixed = true, k = 2 }
        local chain = both(m, o, how, "abacadaeabacada").speculation
        how.branches = 3
        local tree = both(m, o, how, "abacadaeabacada").speculation
        assert.is_true(tree.accepted > chain.accepted)
    end)

    it("is the same in a batch of many, that come and go, fork and are preempted", function()
        local m <close> = model_of { max_seqs = 4, max_batch_tokens = 40, kv = { block_size = 4, blocks = 64 } }
        local function all(speculate)
            local list = {}
            for i = 1, 12 do list[i] = ("prompt %d "):format(i):rep(1 + i % 4) end
            return llm.map(list, function(p, i)
                local s <close> = m:session()
                s:append(p)
                local o = { max_tokens = 10 + 5 * (i % 5), temperature = i % 2, seed = i,
                    fault = i % 3 == 0 and { i % 2 == 0 and "preempt" or "swap", i % 4 } or nil }
                o.speculate = speculate and (i % 3 == 0 and METHODS[i % #METHODS + 1] or function()
                    local t = { parents = {} }
                    for j = 1, 24 do t[j], t.parents[j] = 97 + (i + j) % 8, j // 3 end
                    return t
                end) or nil
                local text = s:gen(o).text
                local f <close> = s:fork()
                o.max_tokens = 6
                return text .. "|" .. f:gen(o).text .. "|" .. s:gen(o).text
            end)
        end
        assert.same(all(false), all(true))
        m:check()
    end)

    it("ends at max_tokens, a stop string, an end token and the end of the context, inside of a branch", function()
        local m <close> = model_of { ctx = 40 }
        local o = { max_tokens = 40, temperature = 0 }
        local whole = run(m, o).text
        for n = 1, 10 do
            for _, seed in ipairs { 1, 2 } do
                local r = both(m, { max_tokens = n, temperature = 0 }, forest(m, o, nil, seed, 4))
                assert.equal("length", r.finish_reason)
                r = both(m, { max_tokens = 40, temperature = 0, stop = whole:sub(n, n + 2) },
                    forest(m, o, nil, seed + 4, 4))
                assert.equal("stop", r.finish_reason)
            end
        end
        assert.equal(40, #both(m, { temperature = 0 }, forest(m, o, nil, 2, 4)).all)
        local eos
        local ends <close> = model_of { next = function(tokens)
            return #tokens == 20 and eos or 97 + #tokens % 7
        end }
        eos = ends.info.eos
        both(ends, { max_tokens = 40, temperature = 0 }, function(ctx)
            local at, t = ctx.n_prompt + ctx.n_generated, { parents = {} }
            for i = 0, 5 do -- a wrong way and the right one at each place
                t[2 * i + 1], t[2 * i + 2] = 122, at + i == 20 and eos or 97 + (at + i) % 7
                t.parents[2 * i + 1], t.parents[2 * i + 2] = 2 * i, 2 * i
            end
            return t
        end)
    end)

    it("ends with the grammar inside of a branch", function()
        local m <close> = model_of { next = function(tokens)
            return { default = 0, [97 + #tokens % 2] = 1, [123] = 0.5, [34] = 0.4, [125] = 0.3 }
        end }
        local function tree()
            local t = { parents = {} }
            for i = 0, 9 do
                t[2 * i + 1], t[2 * i + 2] = 122, 97 + i % 2
                t.parents[2 * i + 1], t.parents[2 * i + 2] = 2 * i, 2 * i
            end
            return t
        end
        local r = both(m, { regex = "(ab){6}|a(bz)*", temperature = 0, max_tokens = 40 }, tree)
        assert.equal(("ab"):rep(6), r.text)
        for seed = 1, slow and 4 or 20 do
            both(m, { json = { type = "object", properties = { a = { enum = { "red", "reed" } } }, required = { "a" } },
                temperature = 1, seed = seed, max_tokens = 40 }, METHODS[seed % #METHODS + 1])
            both(m, { regex = "(ab){6}|a(bz)*", temperature = 1, seed = seed, max_tokens = 12 }, tree)
        end
    end)

    it("is cancelled in the middle of a verification, and leaves nothing behind", function()
        local m <close> = model_of { kv = { block_size = 4, blocks = 128 } }
        local o = { max_tokens = 60, temperature = 0 }
        local whole = run(m, o).tokens
        for at = 1, slow and 4 or 12 do
            local how = forest(m, o, nil, at, 4)
            local s <close> = m:session()
            s:append "hello abcab"
            m:use { name = "cancels", token = function(_, req)
                req.n = (req.n or 0) + 1
                if req.n == at then req:cancel() end
            end }
            local r = s:gen { max_tokens = 60, temperature = 0, speculate = how }
            m:use(nil)
            assert.equal("cancelled", r.finish_reason)
            assert.same(table.move(whole, 1, at, 1, {}), r.tokens)
            m:check()
            local f <close> = s:fork()
            assert.same(table.move(whole, at + 1, at + 10, 1, {}), f:gen { max_tokens = 10, temperature = 0 }.tokens)
        end
    end)

    it("takes the rows and blocks that are left, and no more", function()
        for _, blocks in ipairs { 18, 20, 24, 40 } do
            local m <close> = model_of { kv = { block_size = 4, blocks = blocks }, max_batch_tokens = 12, ctx = 64 }
            local o = { max_tokens = 40, temperature = 0 }
            both(m, o, forest(m, o, nil, 3, 4))
        end
    end)
end)

-- Two letters are drawn, each of a known distribution whatever the first one is; the nine cells are counted.
describe("the distribution of text drafted in branches", function()
    local P = { a = 0.5, b = 0.3, c = 0.2 }
    local function target() return { [97] = math.log(P.a), [98] = math.log(P.b), [99] = math.log(P.c),
        [100] = math.log(0.4), default = -math.huge } end
    local function draft() return { [97] = math.log(0.2), [98] = math.log(0.1), [99] = math.log(0.7),
        [100] = math.log(0.9), default = -math.huge } end

    -- Chi-square at p = 0.001 by Wilson and Hilferty.
    local function limit(df)
        local v = 2 / (9 * df)
        return df * (1 - v + 3.0902 * math.sqrt(v)) ^ 3
    end

    -- name, options, weights of the letters
    local SAMPLERS = {
        { "temperature 1", {}, { a = 0.5, b = 0.3, c = 0.2 } },
        { "temperature 0.5", { temperature = 0.5 }, { a = 0.25, b = 0.09, c = 0.04 } },
        { "top_k", { top_k = 2 }, { a = 0.5, b = 0.3 } },
        { "top_p", { top_p = 0.7 }, { a = 0.5, b = 0.3 } },
        { "min_p", { min_p = 0.5 }, { a = 0.5, b = 0.3 } },
        { "logit_bias", { logit_bias = { [99] = math.log(2) } }, { a = 0.5, b = 0.3, c = 0.4 } },
        { "a function", { sampler = { function(l) l:add(98, math.log(2)) end } }, { a = 0.5, b = 0.6, c = 0.2 } },
    }
    local METHODS_OF = {
        { "a draft model", { method = "draft", fixed = true, k = 3, branches = 2 } },
        { "n-grams", { method = "ngram", fixed = true, k = 3, min_match = 1, branches = 3 } },
        { "a function", function()
            return { 99, 98, 97, 98, 97, parents = { 0, 0, 1, 2, 2 } }
        end },
    }

    -- chi-square and its limit
    local function statistic(m, sampler, how, n, seed)
        local list, seen, sum, cells, x, accepted = {}, {}, 0, 0, 0, 0
        for i = 1, n do list[i] = i end
        llm.map(list, function(i)
            local s <close> = m:session()
            s:append "xaxbxcacbx"
            local o = { regex = "[abc]{2}", seed = (seed + i) * 7919, speculate = how, max_tokens = 4 }
            for k, v in pairs(sampler[2]) do o[k] = v end
            local r = s:gen(o)
            seen[r.text] = (seen[r.text] or 0) + 1
            accepted = accepted + (r.speculation and r.speculation.accepted or 0)
        end, { concurrency = 16 })
        for _, w in pairs(sampler[3]) do sum = sum + w end
        for a, p in pairs(sampler[3]) do
            for b, q in pairs(sampler[3]) do
                local want = p * q / sum ^ 2 * n
                x, cells = x + ((seen[a .. b] or 0) - want) ^ 2 / want, cells + 1
                seen[a .. b] = nil
            end
        end
        assert.is_nil(next(seen), "letters that the sampler never takes")
        return x, limit(cells - 1), accepted
    end

    it("is the target's, with a grammar, for each sampler and method", function()
        local m <close> = model_of { next = target, speculate = { method = "off", draft = { next = draft } } }
        local n, taken = slow and 150 or 700, {}
        for i, sampler in ipairs(SAMPLERS) do
            for j, how in ipairs(METHODS_OF) do
                if not slow or (i + j) % 3 == 0 then
                    local x, most, accepted = statistic(m, sampler, how[2], n, 100000 * (3 * i + j))
                    assert.is_true(x < most, ("%s, %s: chi-square %.1f of %.1f"):format(sampler[1], how[1], x, most))
                    taken[j] = (taken[j] or 0) + accepted
                end
            end
        end
        for j = 1, #METHODS_OF do assert.is_true(taken[j] > n // 4, METHODS_OF[j][1] .. ": " .. taken[j]) end
        -- a rule that took the drafted letter once in ten times whatever was drawn would be noticed
        local wrong = { "wrong", { sampler = { function(l, ctx)
            if ctx:uniform(9) < 0.1 then l:keep { 99 } end
        end } }, SAMPLERS[1][3] }
        local x, most = statistic(m, wrong, METHODS_OF[3][2], slow and 1200 or 2000, 1)
        assert.is_true(x > most, ("%.1f of %.1f"):format(x, most))
    end)
end)

-- Real kernels: log-probabilities are those of no speculation, bit by bit.
describe("a tree of drafts on the kernels", function()
    local path = os.tmpname()
    teardown(function() os.remove(path) end)

    it("has the bits of its path", function()
        gguf.tiny(path, function() end)
        for _, kv in ipairs { { type = "f16", block_size = 16 }, { type = "f32", block_size = 5 },
            { type = "q8_0", block_size = 32 }, { type = "q4_0", value_type = "f16", block_size = 16 } } do
            kv.blocks = 128
            local m <close> = llm.load(path, { threads = 1, ctx = 256, kv = kv })
            local prompt = ("a long prompt, so that a step of 64 positions ends within the text; "):rep(slow and 1 or 2)
            local o = { max_tokens = slow and 20 or 60, temperature = 1, seed = 7, logprobs = 2, ignore_eos = true }
            local right = run(m, o, prompt)
            local r = both(m, o, function(ctx)
                local at, t = ctx.n_prompt + ctx.n_generated, { parents = {} }
                for i = 0, 7 do -- the right way is each node's second, third ... child
                    local id = right.all[at + i + 1]
                    if not id then break end
                    local parent = #t
                    for j = 1, 1 + (at + i) % 3 do
                        t[#t + 1], t.parents[#t + 1] = (id + j) % 256, parent
                    end
                    t[#t + 1], t.parents[#t + 1] = id, parent
                end
                return #t > 0 and t or nil
            end, prompt)
            local taken = r.speculation.accepted
            assert.is_true(taken > o.max_tokens // 2, tostring(taken))
        end
    end)
end)
