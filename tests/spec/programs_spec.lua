-- What programs are made of: join, pins, tags, forks of a stream, first_valid, best_of, cancelling in mid-prefill.
local llm = require "llmrun"

local support = dofile "tests/spec/program_support.lua"
local raises, constant, session = support.raises, support.constant, support.session

local function rounds(n) for _ = 1, n do llm.sleep(0) end end

describe("join", function()
    it("goes on as the winner, with its KV, and closes the others", function()
        local m <close> = llm.scripted { next = function(t) return (t[#t] + 1) % 256 end, kv = { block_size = 2 } }
        local s <close> = session(m, "abc")
        s:logits()
        local a, b, c = s:fork(3)
        b:append "x"
        local r = b:gen { max_tokens = 3 }
        assert.equal(s, s:join(b))
        assert.equal("abcxyz{", s.text)
        assert.equal(r, s.result)
        assert.equal("|}", s:gen({ max_tokens = 2 }).text)
        assert.equal(7, s.result.usage.prompt_tokens)
        assert.equal(6, s.result.usage.cached_tokens)
        for _, f in ipairs { a, b, c } do raises("s:gen: the session is closed", f.gen, f) end
        assert.equal(1, m:stats().sequences)
        assert.is_true(m:check())
    end)

    it("frees losers at once, also in mid-prefill", function()
        local m <close> = constant { chunk = 2, max_batch_tokens = 8, ctx = 512,
            kv = { block_size = 4, prefix_cache = false } }
        local s <close> = session(m, "abcd")
        s:logits()
        local used = m:stats().kv[1].used
        local a, b, c = s:fork(3)
        local ended = {}
        for _, f in ipairs { a, c } do
            f:append(("x"):rep(300))
            llm.spawn(function()
                local _ <close> = setmetatable({}, { __close = function() ended[#ended + 1] = f end })
                f:gen { max_tokens = 5 }
            end)
        end
        assert.equal("AA", b:gen({ max_tokens = 2 }).text)
        rounds(5)
        local st = m:stats()
        assert.equal(2, st.running)
        assert.is_true(st.kv[1].used > used + 4)
        s:join(b)
        st = m:stats()
        assert.equal(0, st.running + st.waiting)
        assert.equal(1, st.sequences)
        assert.equal(2, st.kv[1].used) -- 6 tokens in blocks of 4
        rounds(2)
        assert.equal(2, #ended)
        assert.is_true(m:check())
        assert.equal("A", s:gen({ max_tokens = 1 }).text)
    end)

    it("takes messages, picks and the open turn along", function()
        local m
        m = llm.scripted { eos = "<|im_end|>", next = function(t) return t[#t] == 10 and 65 or m.info.eos end }
        local s <close> = m:session()
        s:user "one"
        local f, g = s:fork(2)
        f:select("p", { "A", "B" })
        g:gen()
        s:join(f)
        assert.equal("A", s.picked.p)
        s:user "two"
        assert.same({ "one", "A", "two" }, { s.messages[1].content, s.messages[2].content, s.messages[3].content })
        assert.equal("A", s:gen().text)
        raises("the session is closed", g.user, g, "x")
        m:close()
    end)

    it("keeps the others when told to, keeps a pin", function()
        local m <close> = constant()
        local s <close> = session(m, "ab")
        s:logits()
        s:pin()
        local a, b = s:fork(2)
        a:gen { max_tokens = 2 }
        s:join(a, { keep = true })
        assert.equal("A", b:gen({ max_tokens = 1 }).text)
        assert.is_true(m:stats().pinned > 0)
        raises("was not forked from this one", s.join, s, b:fork())
        s:join(b)
        assert.equal("abA", s.text)
    end)

    it("refuses strangers, busy and closed sessions", function()
        local m <close> = constant()
        local s <close> = session(m, "ab")
        local other <close> = session(m, "ab")
        raises("s:join: a fork of the session expected, got string", s.join, s, "x")
        raises("s:join: the session given was not forked from this one", s.join, s, other)
        raises("s:join: unknown option 'kep'", s.join, s, s:fork(), { kep = true })
        local a, b = s:fork(2)
        local task = llm.spawn(function() return b:gen { max_tokens = 3 } end)
        rounds(1)
        raises("s:join: the fork: the session is busy", s.join, s, b)
        assert.equal("AAA", task:wait().text)
        a:close()
        raises("s:join: the fork: the session is closed", s.join, s, a)
        s:join(b)
        assert.equal("abAAA", s.text)
    end)
end)

describe("forks", function()
    it("branch off a stream between its pieces", function()
        local m <close> = llm.scripted { next = function(t) return (t[#t] + 1) % 256 end }
        local s <close> = session(m, "a")
        local forks, n = {}, 0
        for _ in s:stream { max_tokens = 5 } do
            n = n + 1
            if n == 2 then forks[1] = s:fork() end
        end
        assert.equal("abcdef", s.text)
        assert.equal("a", forks[1].text:sub(1, 1))
        local len = forks[1].len
        assert.equal(("bcdef"):sub(len, len), forks[1]:gen({ max_tokens = 1 }).text)
        assert.is_true(forks[1].result.usage.cached_tokens >= len - 1)
    end)
end)

describe("pin, truncate, tags", function()
    it("pins for a time", function()
        local m <close> = constant()
        local s <close> = session(m, "abc")
        s:logits()
        assert.equal(s, s:pin(0.02))
        assert.equal(1, m:stats().pinned)
        llm.sleep(0.04)
        assert.equal(0, m:stats().pinned)
        s:pin(0.01):pin()
        llm.sleep(0.03)
        assert.equal(1, m:stats().pinned)
        s:pin(false)
        assert.equal(0, m:stats().pinned)
        local t = session(m, "x")
        t:logits()
        t:pin(0.01)
        t:close()
        llm.sleep(0.03)
        assert.equal(0, m:stats().pinned)
        for _, bad in ipairs { 0, -1, "5" } do raises("s:pin: true, false or a number of seconds", s.pin, s, bad) end
    end)

    it("truncates", function()
        local m <close> = constant()
        local s <close> = session(m, "abc")
        s:truncate(2)
        assert.equal("ab", s.text)
        s:truncate(0)
        assert.equal(0, s.len)
        raises("s:truncate: a length (integer) expected, got -1", s.truncate, s, -1)
        raises("s:truncate: position 7 is outside", s.truncate, s, 7)
    end)

    it("tags", function()
        local m <close> = constant()
        local tag = {}
        local s <close> = m:session { tag = tag }
        s:append "x"
        assert.equal(tag, s:fork().tag)
        s:set_tag(5)
        s:set_tag(nil)
        raises("s:set_tag: integer or table expected, got string", s.set_tag, s, "x")
    end)
end)

describe("first_valid", function()
    it("returns the first valid result and cancels the others", function()
        local closed = 0
        local function try(i)
            local _ <close> = setmetatable({}, { __close = function() closed = closed + 1 end })
            if i == 2 then error("broken") end
            rounds(i)
            return i * 10
        end
        local r, which = llm.first_valid(6, try, function(v) return v >= 30 end)
        assert.same({ 30, 3 }, { r, which })
        assert.equal(6, closed)
        local a, b = llm.first_valid({ function() return "x" end, function() return "y" end },
            function(v) return v == "y" end)
        assert.same({ "y", 2 }, { a, b })
    end)

    it("frees what cancelled tries held", function()
        local m <close> = constant { kv = { prefix_cache = false } }
        local s <close> = session(m, "ab")
        s:logits()
        local r = llm.first_valid(4, function(i)
            local f <close> = s:fork()
            return f:gen({ max_tokens = i == 3 and 2 or 500 }).text
        end, function(t) return #t < 10 end)
        assert.equal("AA", r)
        assert.equal(1, m:stats().sequences)
        assert.equal(0, m:stats().running)
    end)

    it("says when none is valid, with the failures", function()
        local r, text, code = llm.first_valid(2, function(i) if i == 1 then error("no luck") end return i end,
            function() return false end)
        assert.is_nil(r)
        assert.equal("not_found", code)
        assert.matches("none of 2 results was valid; 1 failed:\n.*no luck", text)
    end)

    it("bounds how many run at once, begins no more than needed", function()
        local running, most, begun = 0, 0, 0
        local r = llm.first_valid(20, function(i)
            running, begun = running + 1, begun + 1
            most = math.max(most, running)
            rounds(2)
            running = running - 1
            return i
        end, function(v) return v == 4 end, { concurrency = 2 })
        assert.equal(4, r)
        assert.equal(2, most)
        assert.is_true(begun <= 6)
    end)

    it("raises an error of the judge's", function()
        raises("bad judge", llm.first_valid, 2, function() return 1 end, function() error("bad judge") end)
    end)

    it("names what is wrong", function()
        local f = function() end
        raises("llm.first_valid: a number of tries or a list of functions expected, got string", llm.first_valid, "x")
        raises("llm.first_valid: 0 tries: at least 1", llm.first_valid, 0, f, f)
        raises("llm.first_valid: the list of functions is empty", llm.first_valid, {}, f)
        raises("llm.first_valid: try 2: function expected, got number", llm.first_valid, { f, 3 }, f)
        raises("llm.first_valid: a function that tells a valid result expected, got nil", llm.first_valid, 2, f)
        raises("llm.first_valid: unknown option 'x'", llm.first_valid, 2, f, f, { x = 1 })
        raises("llm.first_valid: concurrency must be at least 1", llm.first_valid, 2, f, f, { concurrency = 0 })
    end)
end)

describe("best_of", function()
    it("keeps the highest score, of equals the first", function()
        local values = { 3, 9, 9, 1 }
        local r, score, which = llm.best_of(4, function(i) rounds(5 - i); return { v = values[i] } end,
            { score = function(x) return x.v end })
        assert.same({ 9, 9, 2 }, { r.v, score, which })
        r = llm.best_of({ function() return { score = 1, name = "a" } end,
            function() return { score = 2, name = "b" } end })
        assert.equal("b", r.name)
    end)

    it("stops early when a score is enough", function()
        local finished = 0
        local r, score = llm.best_of(5, function(i)
            rounds(i * 2)
            finished = finished + 1
            return i
        end, { score = function(i) return i end, enough = 2 })
        assert.same({ 2, 2 }, { r, score })
        assert.equal(2, finished)
    end)

    it("leaves out failed and ineligible tries", function()
        assert.equal(2, (llm.best_of(3, function(i) if i == 3 then error("x") end return i end,
            { score = function(i) return i == 2 and 1 or nil end })))
        raises("llm.best_of: no try succeeded:\n", llm.best_of, 2, function() error("broke") end)
        local r, text = llm.best_of(2, function() return {} end)
        assert.is_nil(r)
        assert.matches("no result got a score", text)
        raises("score: number expected, got string", llm.best_of, 1, function() return { score = "high" } end)
    end)
end)

describe("cancelling", function()
    it("a race's loser in mid-prefill frees its blocks, its close handlers run", function()
        local m <close> = constant { chunk = 2, max_batch_tokens = 8, kv = { block_size = 4, prefix_cache = false } }
        local log = {}
        local r, k = llm.race {
            slow = function()
                local s <close> = session(m, ("x"):rep(400))
                local _ <close> = setmetatable({}, { __close = function() log[#log + 1] = m:stats().running end })
                return s:gen { max_tokens = 4 }
            end,
            quick = function()
                local s <close> = session(m, "ab")
                return s:gen({ max_tokens = 2 }).text
            end,
        }
        assert.same({ "AA", "quick" }, { r, k })
        assert.equal(1, #log)
        local st = m:stats()
        assert.same({ 0, 0, 0, 0 }, { st.running, st.waiting, st.sequences, st.kv[1].used })
        assert.is_true(m:check())
    end)

    it("a timeout around nested branches ends all of them", function()
        local m <close> = constant()
        local _, _, code = llm.timeout(0.02, function()
            llm.map({ 1, 2, 3 }, function()
                local s <close> = session(m, "a")
                return s:gen { max_tokens = 3000 }
            end)
        end)
        assert.equal("limit", code)
        assert.same({ 0, 0 }, { m:stats().running, m:stats().sequences })
    end)

    it("an error in one branch leaves its siblings alone and carries its traceback", function()
        local m <close> = constant()
        local texts = {}
        local err = raises("branch 2", llm.all, {
            function()
                local s <close> = session(m, "a")
                texts[1] = s:gen({ max_tokens = 30 }).text
            end,
            function(x) return x.field end,
        })
        assert.equal(("A"):rep(30), texts[1])
        assert.matches("programs_spec.lua:%d+:.*traceback of branch 2", tostring(err))
    end)
end)

describe("generating wherever Lua code may stand", function()
    local m, s
    before_each(function()
        m = constant()
        s = session(m, "x")
    end)
    after_each(function() m:close() end)
    local function gen(n) return s:gen({ max_tokens = n or 1 }).text end

    it("in nested pcalls, metamethods, close handlers, iterators, modules", function()
        assert.same({ true, true, "A" }, { pcall(pcall, gen) })
        local mt = {}
        local t = setmetatable({}, mt)
        for name, use in pairs {
            __index = function() return t.x end, __call = function() return t() end,
            __concat = function() return t .. "" end, __eq = function() return t == setmetatable({}, mt) and "A" end,
            __lt = function() return t < t and "A" end, __unm = function() return -t end,
        } do
            mt[name] = function() return gen() end
            assert.equal("A", use(), name)
            mt[name] = nil
        end
        local closed
        do
            local _ <close> = setmetatable({}, { __close = function() closed = gen(2) end })
        end
        assert.equal("AA", closed)
        local out = {}
        for v in function(_, last) return #(last or "") < 3 and (last or "") .. gen() or nil end do
            out[#out + 1] = v
        end
        assert.same({ "A", "AA", "AAA" }, out)
        package.preload["spec.generating"] = function() return { text = gen(4) } end
        assert.equal("AAAA", require("spec.generating").text)
        package.loaded["spec.generating"] = nil
    end)

    it("in coroutines of the program's own, two at once, joined in the other order", function()
        local co = coroutine.create(function(a)
            local b = coroutine.yield(a .. gen())
            return b .. gen(2)
        end)
        assert.same({ true, "1A" }, { coroutine.resume(co, "1") })
        assert.same({ true, "2AA" }, { coroutine.resume(co, "2") })
        assert.equal("dead", coroutine.status(co))
        local other = session(m, "y")
        local a = llm.spawn(function() return s:gen { max_tokens = 9 } end)
        local b = llm.spawn(function() return other:gen { max_tokens = 3 } end)
        assert.equal("AAA", b:wait().text)
        assert.equal(("A"):rep(9), a:wait().text)
    end)

    it("says where it can't, and nothing stays behind", function()
        local cant = "s:gen: can't wait for the engine inside "
        raises(cant .. "table.sort", table.sort, { 2, 1 }, function() return gen() < "B" end)
        raises(cant .. "string.gsub", string.gsub, "x", "x", function() return gen() end)
        raises(cant .. "tostring", tostring, setmetatable({}, { __tostring = function() return gen() end }))
        local ok, err = xpcall(error, function() return select(2, pcall(gen)) end, "x")
        assert.is_false(ok)
        assert.matches("s:gen: can't wait for the engine inside an xpcall message handler", tostring(err), 1, true)
        local text
        setmetatable({}, { __gc = function() text = tostring(select(2, pcall(gen))) end })
        collectgarbage()
        collectgarbage()
        assert.matches("s:gen: can't wait for the engine inside a finalizer", text, 1, true)
        assert.same({ 0, 0 }, { m:stats().running, m:stats().waiting })
        assert.equal("A", gen())
    end)
end)
