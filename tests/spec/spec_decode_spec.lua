-- Speculation: whatever drafts, nobody can tell from the text; each way that a run of drafts can end; distributions.
local llm = require "llmrun"
local gguf = require "llmrun.testing.gguf"
local drafts = dofile "tests/spec/draft_support.lua"

local slow = os.getenv "LLMRUN_TEST_SANITIZE" ~= nil

-- A model over bytes whose logits depend on the last bytes: periods at first, then noise.
local function logits_of(tokens, salt)
    local n, row = #tokens, { default = -math.huge }
    local h = (tokens[n] * 31 + (tokens[n - 1] or 0) * 17 + n // 24 * 7 + (salt or 0)) % 10007
    for i = 0, 7 do
        h = (h * 1103 + 12345) % 100003
        row[97 + i] = h % 1000 / 200
    end
    return row
end

local function model_of(opts)
    local o = {
        ctx = 512, max_seqs = 16, next = logits_of,
        speculate = { method = "off", draft = {
            next = function(tokens) return logits_of(tokens, #tokens % 5 == 0 and 3 or 0) end,
        } },
    }
    for k, v in pairs(opts or {}) do o[k] = v end
    return llm.scripted(o)
end

local run, both = drafts.run, drafts.both

-- A drafter that knows the future: what the model says after `prompt`, and more.
local function oracle(m, o, prompt, extra)
    local s <close> = m:session()
    s:append(prompt or "hello abcab")
    local from = s.len
    s:gen(o)
    local all = s.tokens
    for _, id in ipairs(extra or {}) do all[#all + 1] = id end
    return function(ctx)
        local at = ctx.n_prompt + ctx.n_generated
        return table.move(all, at + 1, math.min(at + 12, #all), 1, {})
    end, from
end

local METHODS = {
    { method = "ngram", min_match = 1, fixed = true, k = 5 }, { method = "suffix", min_match = 1, fixed = true, k = 5 },
    { method = "draft", fixed = true, k = 4 }, "ngram", "suffix", "draft",
    function(ctx) return ctx:tokens(4) end, function() return 3, "draft" end, function() return "ngram" end,
}

describe("speculation", function()
    it("chooses the drafts of a model from a part of a large vocabulary, or from all", function()
        local path = os.tmpname()
        local over <close> = setmetatable({}, { __close = function() os.remove(path) end }) -- luacheck: ignore 211
        gguf.tiny(path)
        local accepted = {}
        for i, list in ipairs { 0, 64, 1 << 40 } do
            local m <close> = llm.load(path, { threads = 1, ctx = 256,
                speculate = { method = "draft", draft = { model = path, shortlist = list } } })
            accepted[i] = 0
            for seed = 1, 4 do
                local o = { max_tokens = 40, temperature = (seed - 1) / 3, seed = seed, logprobs = 1, ignore_eos = true,
                    regex = seed == 4 and "[x-z]{9}[a-c]{20}" or nil }
                local r = both(m, o, { method = "draft", fixed = true, k = 4 })
                accepted[i] = accepted[i] + r.speculation.accepted
            end
            local o = { max_tokens = 40, temperature = 1, seed = 9, ignore_eos = true,
                speculate = { method = "draft", fixed = true, k = 4, accept = "distribution" } }
            assert.equal(40, #run(m, o).tokens)
            assert.is_true(accepted[i] > 0)
        end
        assert.equal(accepted[3], accepted[1]) -- a list as long as the vocabulary is none
    end)

    it("leaves the text of every seed as it is, greedy or not", function()
        local m <close> = model_of()
        local accepted = 0
        for _, how in ipairs(METHODS) do
            for seed = 1, slow and 2 or 6 do
                local r = both(m, { max_tokens = 60, temperature = seed == 1 and 0 or 0.9, seed = seed,
                    top_p = seed == 3 and 0.8 or nil, presence_penalty = seed == 4 and 0.7 or nil,
                    frequency_penalty = seed == 4 and 0.3 or nil, mirostat = seed == 5 and 2 or nil }, how)
                accepted = accepted + (r.speculation and r.speculation.accepted or 0)
            end
        end
        assert.is_true(accepted > 50)
    end)

    it("is the same in a batch of many, that come and go", function()
        local m <close> = model_of { max_seqs = 4, max_batch_tokens = 24 }
        local prompts = {}
        for i = 1, 12 do prompts[i] = ("prompt %d "):format(i):rep(1 + i % 4) end
        local function all(speculate)
            return llm.map(prompts, function(p, i)
                local s <close> = m:session()
                s:append(p)
                return s:gen { max_tokens = 10 + 5 * (i % 5), temperature = i % 2, seed = i,
                    speculate = speculate and METHODS[i % #METHODS + 1] or nil,
                    fault = i % 3 == 0 and { i % 2 == 0 and "preempt" or "swap", i % 4 } or nil }.text
            end)
        end
        assert.same(all(false), all(true))
        m:check()
    end)

    it("ends at max_tokens, and at the end of the context, inside of a draft", function()
        local m <close> = model_of { ctx = 40 }
        local future = oracle(m, { temperature = 0 })
        for n = 1, 12 do
            local r = both(m, { max_tokens = n, temperature = 0 }, future)
            assert.equal(n, #r.tokens)
            assert.equal("length", r.finish_reason)
        end
        local r = both(m, { temperature = 0 }, future)
        assert.equal(40, #r.all)
    end)

    it("ends at a stop string inside of a draft", function()
        local m <close> = model_of()
        local whole = run(m, { max_tokens = 40, temperature = 0 }).text
        local future = oracle(m, { max_tokens = 60, temperature = 0 })
        for at = 1, 12 do
            local r = both(m, { max_tokens = 40, temperature = 0, stop = whole:sub(at, at + 2) }, future)
            assert.equal("stop", r.finish_reason)
            assert.is_nil(r.text:find(r.stop, 1, true))
        end
    end)

    it("ends at an end token or a stop id inside of a draft", function()
        local eos
        local m <close> = model_of { next = function(tokens)
            if #tokens == 20 then return eos end
            return 97 + #tokens % 7
        end }
        eos = m.info.eos
        local r = both(m, { max_tokens = 40, temperature = 0 }, function(ctx)
            local n, t = ctx.n_prompt + ctx.n_generated, {}
            for i = 1, 12 do t[i] = n + i - 1 == 20 and eos or 97 + (n + i - 1) % 7 end
            return t
        end)
        assert.equal("stop", r.finish_reason)
        assert.equal(eos, r.stop_token)
        assert.is_true(r.speculation.accepted > 4)
        r = both(m, { max_tokens = 40, temperature = 0, stop_ids = { 97 + 3 } }, function(ctx)
            local n, t = ctx.n_prompt + ctx.n_generated, {}
            for i = 1, 12 do t[i] = 97 + (n + i - 1) % 7 end
            return t
        end)
        assert.equal(97 + 3, r.stop_token)
        r = both(m, { max_tokens = 40, temperature = 0, ignore_eos = true }, function() return { eos, eos } end)
        assert.equal("length", r.finish_reason)
    end)

    it("gives the log-probabilities of the same tokens", function()
        local m <close> = model_of()
        local on, off = both(m, { max_tokens = 30, temperature = 0, logprobs = 3 },
            (oracle(m, { max_tokens = 40, temperature = 0 })))
        assert.same(off.logprobs, on.logprobs)
        assert.is_true(on.speculation.accepted > 15)
        assert.is_true(on.usage.computed_tokens <= off.usage.computed_tokens + on.speculation.drafted)
    end)

    it("calls a sampler's function once for each token, in order, with the tokens before it", function()
        local m <close> = model_of()
        local future = oracle(m, { max_tokens = 60, temperature = 0 })
        local function stage(seen)
            return function(logits, ctx)
                local t = ctx:tokens()
                assert(#t == ctx.n_generated)
                seen[#seen + 1] = ctx.position .. ":" .. table.concat(t, ",")
                if ctx.n_generated % 7 == 6 then return 97 end -- something that no draft foresees
                return logits:argmax()
            end
        end
        local a, b = {}, {}
        local s1, s2 = m:session(), m:session()
        s1:append "hello abcab"
        s2:append "hello abcab"
        local off = s1:gen { max_tokens = 40, sampler = stage(a) }
        local on = s2:gen { max_tokens = 40, sampler = stage(b), speculate = future }
        assert.equal(off.text, on.text)
        assert.same(a, b)
        assert.equal(40, #b)
        assert.is_true(on.speculation.accepted > 3)
        s1:close()
        s2:close()
    end)

    it("is cancelled in the middle of a verification", function()
        local m <close> = model_of()
        local future = oracle(m, { max_tokens = 60, temperature = 0 })
        for at = 1, 9 do
            m:use { name = "cancels", token = function(_, req)
                req.n = (req.n or 0) + 1
                if req.n == at then req:cancel() end
            end }
            local r = both(m, { max_tokens = 40, temperature = 0 }, future)
            assert.equal("cancelled", r.finish_reason)
            assert.equal(at, #r.tokens)
        end
        m:use { name = "ends", token = function(_, req) return req.generated_tokens == 5 end }
        local r = both(m, { max_tokens = 40, temperature = 0 }, future)
        assert.equal("stop", r.finish_reason)
        assert.equal(5, #r.tokens)
    end)

    it("goes on well in a fork, after a rewind, and in a fork of a stream", function()
        local m <close> = model_of()
        local want = run(m, { max_tokens = 60, temperature = 0 }).text
        for _, how in ipairs(METHODS) do
            local s <close> = m:session()
            s:append "hello abcab"
            local from = s.len
            local text, forks = "", {}
            for piece in s:stream { max_tokens = 30, temperature = 0, speculate = how } do
                text = text .. piece
                if #forks < 4 then forks[#forks + 1] = s:fork() end
            end
            assert.equal(want:sub(1, 30), text)
            local f = s:fork()
            assert.equal(want:sub(31), f:gen { max_tokens = 30, temperature = 0, speculate = how }.text)
            f:close()
            for _, g in ipairs(forks) do
                local have = g.len - from
                local rest = g:gen { max_tokens = 60 - have, temperature = 0, speculate = how }.text
                assert.equal(want:sub(have + 1), rest)
                g:close()
            end
            s:rewind(from + 10)
            assert.equal(want:sub(11), s:gen { max_tokens = 50, temperature = 0, speculate = how }.text)
            m:check()
        end
    end)

    it("is preempted with drafts in flight", function()
        local m <close> = model_of { kv = { blocks = 60, block_size = 4 } }
        for _, how in ipairs(METHODS) do
            for at = 1, slow and 1 or 4 do
                both(m, { max_tokens = 60, temperature = 0.8, seed = at, fault = { "preempt", at } }, how)
                both(m, { max_tokens = 60, temperature = 0.8, seed = at, fault = { "swap", at } }, how)
            end
        end
    end)

    it("fits into the smallest pool, and stands back when blocks are short", function()
        local m <close> = model_of { kv = { blocks = 24, block_size = 2 }, ctx = 40 }
        local function all(how)
            return llm.map({ "abc", "abd", "abe", "abf" }, function(p)
                local s <close> = m:session()
                s:append(p)
                return s:gen { max_tokens = 30, temperature = 0, speculate = how }.text
            end)
        end
        local want = all "off"
        for _, how in ipairs(METHODS) do assert.same(want, all(how)) end
        m:check()
    end)
end)

describe("speculation under a grammar", function()
    local SCHEMA = { type = "object", properties = { a = { enum = { "red", "reed" } } }, required = { "a" },
        additionalProperties = false }

    -- A table of wrong ideas: right beginnings, wrong letters, text past the end, ends.
    local function bad_ngrams(m)
        local eos = m.info.eos
        local texts = { '{"a":"re', '{"a":"rex', '{"a":"red"}trailing', '{"a":"reed"} {"a"', '{"a" :"reed"}', '}' }
        local n = 0
        return function(ctx)
            n = n + 1
            local text = texts[n % #texts + 1]
            local t = { text:byte(1 + ctx.n_generated, -1) }
            if n % 3 == 0 then table.move({ eos, eos }, 1, 2, #t + 1, t) end
            return #t > 0 and t or { eos, eos }
        end
    end

    local function any(tokens)
        local h, row = tokens[#tokens] * 7 + #tokens, {}
        for i = 1, 260 do
            h = (h * 1103515245 + 12345) & 0x7fffffff
            row[i] = (h >> 16) % 1000 / 250
        end
        return { row = row }
    end

    it("keeps every output valid, and equal to none", function()
        local m <close> = model_of { next = any, speculate = { draft = { next = any }, method = "off" } }
        local drafted, values = 0, {}
        for seed = 1, slow and 20 or 200 do
            local o = { json = SCHEMA, temperature = 1, seed = seed, max_tokens = 40 }
            local r = both(m, o, seed % 4 == 0 and { method = "draft", fixed = true, k = 4 } or bad_ngrams(m))
            assert.is_true(r.value.a == "red" or r.value.a == "reed")
            values[r.value.a] = true
            drafted = drafted + (r.speculation and r.speculation.drafted or 0)
        end
        assert.is_true(values.red and values.reed and drafted > 20)
        both(m, { json = SCHEMA, temperature = 0, max_tokens = 40 }, bad_ngrams(m))
    end)

    it("and under a function that says what comes next", function()
        local m <close> = model_of { next = any }
        for seed = 1, slow and 5 or 40 do
            local r = both(m, { lua = function(prefix)
                if prefix == "" then return { "yes", "yet", "no" } end
                return #prefix < 6 and { "-a", "-b" } or nil
            end, temperature = 1, seed = seed, max_tokens = 40 }, function(ctx)
                return { ("yes-a-bq"):byte(1 + ctx.n_generated, -1) }
            end)
            assert.matches("^[yn]e?[sto]", r.text)
        end
    end)

    it("ends with the grammar inside of a draft", function()
        local m <close> = model_of { next = any }
        local r = both(m, { regex = "(ab){6}", temperature = 0, max_tokens = 40, logprobs = 0 }, function()
            return { ("abababababababababab"):byte(1, 16) }
        end)
        assert.equal(("ab"):rep(6), r.text)
        assert.equal("stop", r.finish_reason)
        assert.is_true(r.speculation.accepted >= 5)
    end)
end)

describe("the distribution of drafted text", function()
    -- Chi-square at p = 0.001 by Wilson and Hilferty.
    local function limit(df)
        local v = 2 / (9 * df)
        return df * (1 - v + 3.0902 * math.sqrt(v)) ^ 3
    end

    local P = { a = 0.5, b = 0.3, c = 0.2 }
    local function target() return { [97] = math.log(P.a), [98] = math.log(P.b), [99] = math.log(P.c),
        [100] = math.log(0.4), default = -math.huge } end
    local function draft() return { [97] = math.log(0.2), [98] = math.log(0.1), [99] = math.log(0.7),
        [100] = math.log(0.9), default = -math.huge } end

    it("is the target's, with a grammar, drawn from the draft model's and judged", function()
        local m <close> = model_of { next = target, max_seqs = 16, prefix = nil,
            speculate = { draft = { next = draft }, accept = "distribution", fixed = true, k = 3, method = "draft" } }
        local N, seen, accepted = slow and 600 or 3000, {}, 0
        local list = {}
        for i = 1, N do list[i] = i end
        local function once(seed, wrong)
            local s <close> = m:session()
            s:append "x"
            local r = s:gen { regex = "[abc]{2}", seed = seed * 7919,
                sampler = wrong and { function(l) l:add(97, 0.5) end } or nil }
            accepted = accepted + (r.speculation and r.speculation.accepted or 0)
            return r.text
        end
        local function statistic(wrong)
            seen = {}
            for _, t in ipairs(llm.map(list, function(seed) return once(seed, wrong) end, { concurrency = 16 })) do
                seen[t] = (seen[t] or 0) + 1
            end
            local x, cells = 0, 0
            for a, p in pairs(P) do
                for b, q in pairs(P) do
                    local want = p * q * N
                    x, cells = x + ((seen[a .. b] or 0) - want) ^ 2 / want, cells + 1
                end
            end
            return x, limit(cells - 1)
        end
        local x, most = statistic(false)
        assert.is_true(x < most, ("chi-square %.1f"):format(x))
        assert.is_true(accepted > N // 10)
        assert.is_true(statistic(true) > most) -- half a nat more of one letter would be noticed
    end)
end)

describe("drafters", function()
    it("remember what a session said, and what a tenant's sessions said", function()
        local m <close> = model_of { next = function(tokens) return 97 + (#tokens * #tokens // 3) % 26 end }
        local s <close> = m:session()
        s:append "start here"
        local from = s.len
        local how = { method = "suffix", min_match = 2, fixed = true, k = 8 }
        local first = s:gen { max_tokens = 60, temperature = 0, speculate = how }
        s:rewind(from)
        local again = s:gen { max_tokens = 60, temperature = 0, speculate = how }
        assert.equal(first.text, again.text)
        assert.is_true(again.speculation.accepted > 25)
        local function other(tenant)
            local o <close> = m:session()
            o:append "start here"
            local r = o:gen { max_tokens = 60, temperature = 0, tenant = tenant,
                speculate = { method = "suffix", scope = "tenant", min_match = 2, fixed = true, k = 8 } }
            return r.speculation and r.speculation.accepted or 0
        end
        other "one"
        assert.is_true(other "one" > 25)
        assert.is_true(other "two" < 10) -- nothing is shared with another one
    end)

    it("say what has come of them", function()
        local m <close> = model_of()
        local r = run(m, { max_tokens = 40, temperature = 0, speculate = (oracle(m, { max_tokens = 60,
            temperature = 0 })) })
        local sp = r.speculation
        assert.is_true(sp.accepted > 20 and sp.accepted <= sp.drafted)
        assert.equal(1, sp.at[1])
        assert.is_true(sp.length > 3 and sp.acceptance > 0.9)
        assert.is_true(sp.verify_time > 0)
        assert.equal(sp.accepted, m:metrics().speculation.accepted)
        local text = m:prometheus()
        for _, name in ipairs { "num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total",
            "num_accepted_tokens_per_pos_total" } do
            assert.matches("llmrun:spec_decode_" .. name .. "{", text, 1, true)
        end
        assert.matches('spec_decode_num_accepted_tokens_per_pos_total{model_name="scripted",position="0"} [1-9]', text)
    end)

    it("may be a policy's", function()
        local m <close> = model_of()
        local asked = {}
        m:use { name = "drafts", draft = function(_, req, info)
            asked[#asked + 1] = info.method
            assert(info.most >= 1 and info.batch == 1 and info.acceptance > 0)
            if req.generated_tokens < 10 then return false end
            return 3, "draft"
        end }
        local r = both(m, { max_tokens = 40, temperature = 0 }, "ngram")
        assert.is_true(r.speculation.drafts >= 5)
        assert.is_true(r.speculation.accepted > 10)
        assert.equal("ngram", asked[1])
        local log = require("llmrun.policy").log
        require("llmrun.policy").log = function() end
        m:use { name = "fails", draft = function() error "no idea" end }
        both(m, { max_tokens = 40, temperature = 0 }, "ngram") -- as without a policy
        require("llmrun.policy").log = log
    end)

    it("hurt their own request only", function()
        local m <close> = model_of()
        local ok, err = pcall(run, m, { max_tokens = 40, speculate = function(ctx)
            if ctx.n_generated > 3 then error "out of ideas" end
        end })
        assert.is_false(ok)
        assert.matches("out of ideas", tostring(err))
        for _, bad in ipairs { function() return { "x" } end, function() return -1 end, function() return 1.5 end,
            function() return "magic" end, function() return {}, 3 end } do
            pcall(run, m, { max_tokens = 10, speculate = bad })
            m:check()
        end
        -- ids that the vocabulary lacks are no drafts
        both(m, { max_tokens = 20, temperature = 0 }, function() return { 97, 1 << 30, 98 } end)
    end)

    it("refuse what can't be", function()
        local function raises(pattern, fn)
            local ok, err = pcall(fn)
            assert.is_false(ok)
            assert.matches(pattern, tostring(err), 1, true)
        end
        local m <close> = llm.scripted { next = function() return 65 end }
        raises("without a draft model", function() run(m, { speculate = "draft", max_tokens = 3 }) end)
        raises("method 'magic'", function() run(m, { speculate = "magic" }) end)
        raises("unknown option 'n'", function() run(m, { speculate = { n = 3 } }) end)
        raises("k = 99", function() run(m, { speculate = { method = "ngram", k = 99 } }) end)
        raises("got true", function() run(m, { speculate = true }) end)
        raises("scope 'world'", function() run(m, { speculate = { method = "suffix", scope = "world" } }) end)
        raises("shortlist: a number of tokens expected, got -1", function()
            llm.scripted { next = print, speculate = { draft = { model = "x", shortlist = -1 } } }
        end)
        raises("needs draft", function() llm.scripted { next = print, speculate = "draft" } end)
        raises("token 0 is 'b' there and 'a' here", function()
            llm.scripted { vocab = { "a" }, next = print, speculate = { draft = { vocab = { "b" }, next = print } } }
        end)
    end)
end)
