-- s:select on scripted models: scores against sums worked out by hand, the three methods, batching, errors.
local llm = require "llmrun"

local function raises(pattern, fn, ...)
    local ok, err = pcall(fn, ...)
    assert.is_false(ok)
    assert.matches(pattern, tostring(err), 1, true)
    return err
end

-- Pieces a b c d e with ids 0..4; the distribution follows from the last token only: rows[last][id] = probability, the
-- rest of the vocabulary has none.
local function markov(rows, opts)
    local o = { vocab = { "a", "b", "c", "d", "e" }, ctx = 256 }
    for k, v in pairs(opts or {}) do o[k] = v end
    o.next = function(tokens)
        local logits = { default = -1e4 }
        for id, p in pairs(rows[tokens[#tokens]] or rows.default) do logits[id] = math.log(p) end
        return logits
    end
    return llm.scripted(o)
end

local rows = {
    [0] = { [1] = .5, [2] = .3, [3] = .2 }, -- behind a
    [1] = { [2] = .9, [3] = .1 }, -- behind b
    [2] = { [0] = .25, [3] = .75 }, -- behind c
    [3] = { [4] = 1 }, -- behind d
    default = { [0] = .1, [1] = .4, [2] = .2, [3] = .3 },
}

local function session(m, text)
    local s = m:session()
    s:append(text, { bos = false })
    return s
end

describe("select", function()
    it("scores every token of every choice", function()
        local m <close> = markov(rows)
        local s <close> = session(m, "ea")
        local text, r = s:select("x", { "bc", "c", "da", "bcd" })
        local expect = { { .5, .9 }, { .3 }, { .2, nil }, { .5, .9, .75 } }
        for i, e in ipairs(expect) do
            for k, p in ipairs(e) do assert.near(math.log(p), r.choices[i].logprobs[k], 1e-5) end
        end
        assert.is_true(r.choices[3].logprobs[2] < -1000)
        assert.near(math.log(.45), r.choices[1].logprob, 1e-5)
        assert.near(math.log(.45) / 2, r.choices[1].score, 1e-5)
        assert.equal("bcd", text) -- mean of log .5 .9 .75 > mean of log .5 .9
        assert.equal(4, r.index)
        assert.equal("token_length_normalized", r.method)
        assert.equal("bcd", s.picked.x)
        assert.equal(r, s.result)
    end)

    it("goes on behind the chosen text, whose KV is at hand", function()
        local m <close> = markov(rows)
        local s <close> = session(m, "a")
        assert.equal("bcd", (s:select("x", { "bcd", "c" })))
        assert.equal("abcd", s.text)
        assert.equal(3, s.computed) -- all but the last token
        assert.equal("e", s:gen({ max_tokens = 1, temperature = 0 }).text)
        assert.is_true(m:check())
    end)

    it("greedy: token by token, a choice that has ended counts with its mean", function()
        local m <close> = markov {
            default = { [0] = .5, [1] = .3, [2] = .2 },
            [0] = { [3] = .1, [2] = .9 }, [1] = { [2] = 1 }, [2] = { [3] = 1 },
        }
        local s <close> = session(m, "e")
        -- ad: .5 .1; bc: .3 1; the mean prefers bc, the first token ad
        assert.equal("bc", (s:fork():select("x", { "ad", "bc" })))
        local pick, r = s:fork():select("x", { "ad", "bc" }, { method = "greedy_token_selection" })
        assert.equal("ad", pick)
        assert.equal(1, r.choices[1].score)
        assert.equal(0, r.choices[2].score)
        -- a | ad: equal at first, then a counts with its mean log .5, ad with log .1; a | ac: .5 < .9
        assert.equal("a", (s:fork():select("x", { "ad", "a" }, { method = "greedy_token_selection" })))
        assert.equal("ac", (s:fork():select("x", { "a", "ac" }, { method = "greedy_token_selection" })))
    end)

    it("unconditional: what the prefix adds to a choice's own likelihood", function()
        local m <close> = markov(rows)
        local s <close> = session(m, "a")
        local pick, r = s:select("x", { "b", "c", "d" }, { method = "unconditional_likelihood_normalized" })
        -- behind a: .5 .3 .2; behind BOS: .4 .2 .3
        assert.near(math.log(.5 / .4), r.choices[1].score, 1e-5)
        assert.near(math.log(.3 / .2), r.choices[2].score, 1e-5)
        assert.near(math.log(.2 / .3), r.choices[3].score, 1e-5)
        assert.equal("c", pick)
        local t <close> = session(m, "a")
        pick, r = t:select("x", { "bc", "cd" }, { method = "unconditional_likelihood_normalized" })
        assert.near((math.log(.5 / .4) + math.log(.9 / .9)) / 2, r.choices[1].score, 1e-5)
        assert.near(math.log(.4), r.choices[1].unconditional[1], 1e-5)
        assert.equal("cd", pick)
    end)

    it("takes the first of equals", function()
        local m <close> = markov { default = { [0] = .25, [1] = .25, [2] = .25, [3] = .25 } }
        local s <close> = session(m, "e")
        for _, method in ipairs { "token_length_normalized", "greedy_token_selection",
            "unconditional_likelihood_normalized" } do
            assert.equal("c", (s:fork():select("x", { "c", "a", "b" }, { method = method })))
        end
    end)

    it("computes the prefix once and all choices in one batch", function()
        local m <close> = markov(rows, { kv = { prefix_cache = false, block_size = 4 }, ctx = 1024 })
        local s <close> = session(m, ("a"):rep(100))
        local before = m:metrics()
        local choices = {}
        for i = 1, 7 do choices[i] = ("abcd"):rep(2) .. string.char(64 + i) .. "b" end
        local _, r = s:select("x", choices)
        assert.equal(100 + 7 * 9, r.usage.computed_tokens)
        assert.equal(2, m:metrics().steps - before.steps)
        local t <close> = s:fork() -- all but the last token is known: one row for it, then what follows the first token
        _, r = t:select("x", { "ab", "b" })
        assert.equal(2, r.usage.computed_tokens)
        assert.equal(109, r.usage.cached_tokens)
    end)

    it("same choice, however the pool, chunks and company", function()
        local function pick(opts)
            local m <close> = markov(rows, opts)
            local got = llm.map({ "ea", "ab", "ac", "bb" }, function(p)
                local s <close> = session(m, p:rep(9))
                local text, r = s:select("x", { "bcd", "cda", "d", "abcdabcd", "de" })
                local list = { text }
                for i, c in ipairs(r.choices) do list[i + 1] = ("%.9g"):format(c.score) end
                return table.concat(list, " ")
            end)
            assert.is_true(m:check())
            s = nil -- luacheck: ignore 111
            assert.equal(0, m:stats().kv[1].used)
            return table.concat(got, "\n")
        end
        local plain = pick { kv = { prefix_cache = false } }
        assert.equal(plain, pick { kv = { block_size = 1, blocks = 40 }, ctx = 40 })
        assert.equal(plain, pick { kv = { block_size = 3 }, chunk = 2, max_seqs = 3, max_batch_tokens = 5 })
    end)

    it("is the sum that gen's own log-probabilities make", function()
        local m <close> = markov(rows)
        local s <close> = session(m, "a")
        local f <close> = s:fork()
        local r = f:gen { max_tokens = 3, temperature = 0, logprobs = true }
        local sum = 0
        for _, t in ipairs(r.logprobs) do sum = sum + t.logprob end
        local _, sel = s:select("x", { r.text, "cd" })
        assert.near(sum, sel.choices[1].logprob, 1e-6)
    end)

    it("belongs to the assistant's turn in a chat", function()
        local m
        m = llm.scripted { eos = "<|im_end|>", next = function(t) return t[#t] == 10 and 65 or m.info.eos end }
        local s <close> = m:session()
        s:user "How do you feel?"
        assert.equal("A", (s:select("mood", { "B", "A" })))
        s:append "!"
        s:user "Why?"
        assert.same({ role = "assistant", content = "A!" }, s.messages[2])
        s:gen()
        assert.equal("A", s.messages[4].content)
        m:close()
    end)

    it("closing the session, the model or the branch ends it", function()
        local function slow()
            return llm.scripted { next = function() return 65 end, chunk = 1, max_batch_tokens = 2 }
        end
        local m <close> = slow()
        local s = session(m, ("x"):rep(50))
        local task = llm.spawn(function() return s:select("x", { "aa", "bb" }) end)
        for _ = 1, 5 do llm.sleep(0) end
        raises("s:user: the session is busy", s.user, s, "q")
        s:close()
        assert.equal("cancelled", raises("s:select: the session was closed meanwhile", task.wait, task).code)
        assert.is_true(m:check())

        local t = session(m, ("y"):rep(50))
        task = llm.spawn(function() return t:select("x", { "aa", "bb" }) end)
        for _ = 1, 5 do llm.sleep(0) end
        assert.is_true(task:cancel())
        assert.equal(0, m:stats().running + m:stats().waiting)
        assert.equal(1, m:stats().sequences)
        assert.equal("AA", (t:select("x", { "aa", "AA" }))) -- and the session is as it was

        local m2 = slow()
        local u = session(m2, ("y"):rep(50))
        task = llm.spawn(function() return u:select("x", { "aa", "bb" }) end)
        for _ = 1, 5 do llm.sleep(0) end
        assert.is_true(u:cancel())
        raises("s:select: cancelled", task.wait, task)
        task = llm.spawn(function() return u:select("x", { "aa", "bb" }) end)
        for _ = 1, 5 do llm.sleep(0) end
        m2:close()
        raises("s:select: the model was closed meanwhile", task.wait, task)
    end)

    it("names what is wrong", function()
        local m <close> = markov(rows, { ctx = 16 })
        local s <close> = session(m, "abc")
        raises("s:select: a name for the choice (string) expected, got table", s.select, s, { "a", "b" })
        raises("s:select: list of texts expected, got string", s.select, s, "x", "a")
        raises("s:select: the list of choices is empty", s.select, s, "x", {})
        raises("s:select: choice 2 is an empty string", s.select, s, "x", { "a", "" })
        raises("s:select: choice 1: text expected, got number", s.select, s, "x", { 1 })
        raises("s:select: choices 1 and 3 are the same: 'a'", s.select, s, "x", { "a", "b", "a" })
        raises("s:select: unknown method 'greedy'", s.select, s, "x", { "a" }, { method = "greedy" })
        raises("s:select: unknown option 'metod' (did you mean 'method'?)", s.select, s, "x", { "a" }, { metod = "x" })
        local err = raises("s:select: choice 2: ", s.select, s, "x", { "a", ("b"):rep(20) })
        assert.equal("full", err.code)
        assert.equal("abc", s.text)
        local empty <close> = m:session()
        raises("s:select: nothing to go on from", empty.select, empty, "x", { "a" })
        s:close()
        raises("s:select: the session is closed", s.select, s, "x", { "a" })
        assert.is_true(m:check())
        assert.equal(1, m:stats().sequences)
    end)

    it("a failing model fails the call with its text", function()
        local m <close> = llm.scripted { next = function(t) if #t > 4 then error("no more") end return 65 end }
        local s <close> = session(m, "xyz")
        raises("no more", s.select, s, "x", { "aaaa", "bbbb" })
        assert.equal(1, m:stats().sequences)
        assert.equal("aa", (s:select("x", { "aa", "ab" })))
    end)
end)
