-- Wrong use of programs' calls: each is an error that names the call and the place, and nothing is broken afterwards.
local llm = require "llmrun"

local support = dofile "tests/spec/program_support.lua"
local raises, constant, session = support.raises, support.constant, support.session

describe("wrong use", function()
    local m, s
    before_each(function()
        m = constant()
        s = session(m, "x")
    end)
    after_each(function()
        assert.equal("AA", session(m, "y"):gen({ max_tokens = 2 }).text) -- all goes on
        assert.is_true(m:check())
        m:close()
    end)

    it("of option names, in every call that has options", function()
        local function f() end
        local tools = { f = f }
        for call, fn in pairs {
            ["s:gen"] = function(o) s:gen(o) end, ["s:stream"] = function(o) s:stream(o) end,
            ["s:select"] = function(o) s:select("x", { "a" }, o) end, ["s:score"] = function(o) s:score(o) end,
            ["s:append"] = function(o) s:append("x", o) end, ["s:join"] = function(o) s:join(s, o) end,
            ["model:session"] = function(o) m:session(o) end, ["model:tokenize"] = function(o) m:tokenize("x", o) end,
            ["model:detokenize"] = function(o) m:detokenize({ 1 }, o) end, ["llm.load"] = function(o) llm.load("x", o) end,
            ["llm.scripted"] = function(o) o.next = f llm.scripted(o) end, ["llm.map"] = function(o) llm.map({ 1 }, f, o) end,
            ["llm.first_valid"] = function(o) llm.first_valid(1, f, f, o) end,
            ["llm.best_of"] = function(o) llm.best_of(1, f, o) end, ["llm.exec"] = function(o) llm.exec({ "true" }, o) end,
            ["llm.http.get"] = function(o) llm.http.get("http://127.0.0.1:1", o) end,
            ["llm.agent"] = function(o) o.model, o.tools = m, tools llm.agent(o) end,
            ["sandbox.run"] = function(o) llm.sandbox("", o) end,
        } do
            raises(call .. ": unknown option 'nonsense'", fn, { nonsense = 1 })
        end
    end)

    it("of types", function()
        raises("s:gen: option 'temperature': number expected, got string", s.gen, s, { temperature = "hot" })
        raises("s:gen: option 'stop': string or table expected, got boolean", s.gen, s, { stop = true })
        raises("s:gen: stop[2]: string expected, got number", s.gen, s, { stop = { "a", 1 } })
        raises("s:gen: option 'max_tokens': integer expected, got number", s.gen, s, { max_tokens = 1.5 })
        raises("s:gen: option 'logit_bias': table expected", s.gen, s, { logit_bias = 1 })
        raises("s:append: text, token id or list of ids expected, got boolean", s.append, s, true)
        raises("s:user: text expected, got number", s.user, m:session(), 1)
        raises("s:save: a path expected, got nil", s.save, s)
        raises("llm.all: table of functions expected, got number", llm.all, 3)
        raises("llm.all: branch 1: function expected, got string", llm.all, { "x" })
        raises("llm.map: list expected, got nil", llm.map)
        raises("llm.spawn: function expected, got nil", llm.spawn)
        raises("llm.sleep: number of seconds expected, got x", llm.sleep, "x")
        raises("llm.timeout: number of seconds expected, got nil", llm.timeout)
    end)

    it("of numbers outside their range", function()
        for option, bad in pairs {
            top_p = { 1.01, -0.1, 0 / 0 }, min_p = { 1.5, -1 }, typical_p = { 2 }, temperature = { -1, 1 / 0 },
            repetition_penalty = { 0, -1 }, xtc_probability = { 2 }, top_k = { -2 }, min_tokens = { -1 },
        } do
            for _, x in ipairs(bad) do raises("s:gen: " .. option:gsub("xtc_", "xtc: "), s.gen, s, { [option] = x }) end
        end
        raises("s:gen: max_tokens must be at least 1", s.gen, s, { max_tokens = 0 })
        raises("s:fork: a number of forks expected, 1 to 4096, got 1000000000", s.fork, s, 1000000000)
        raises("s:fork: a number of forks expected, 1 to 4096, got 0", s.fork, s, 0)
        raises("s:fork: a number of forks expected, 1 to 4096, got 1e+300", s.fork, s, 1e300)
        assert.equal(4096, select("#", s:fork(4096)))
        collectgarbage()
    end)

    it("of texts: empty choices, long stops", function()
        raises("s:select: choice 2 is an empty string", s.select, s, "x", { "a", "" })
        raises("s:gen: stop: an empty string would end at once", s.gen, s, { stop = { "a", "" } })
        raises("s:gen: stop[1]: a string of 10240 bytes; 4096 are the most", s.gen, s, { stop = ("x"):rep(10240) })
        raises("s:stream: stop[2]: a string of 4097 bytes", s.stream, s, { stop = { "a", ("x"):rep(4097) } })
        assert.equal("AA", s:gen({ stop = ("x"):rep(4096), max_tokens = 2 }).text)
    end)

    it("of sessions and models after their end", function()
        local closed, f = session(m, "x"), session(m, "y")
        closed:close()
        for _, call in ipairs { "gen", "stream", "logits", "append", "user", "message", "fork", "rewind", "truncate",
            "pin", "save", "score", "join", "set_tag", "select" } do
            raises("s:" .. call .. ": the session is closed", closed[call], closed, call == "truncate" and 1 or "x")
        end
        for _, name in ipairs { "len", "text", "tokens", "computed" } do
            raises("s." .. name .. ": the session is closed", function() return closed[name] end)
        end
        assert.equal("llmrun session (closed)", tostring(closed))
        raises("s:join: the fork: the session is closed", function()
            local g = f:fork()
            g:close()
            f:join(g)
        end)
        local m2 = constant()
        local t = session(m2, "x")
        m2:close()
        raises("s:gen: the model is closed", t.gen, t)
        for _, call in ipairs { "session", "tokenize", "metrics", "stats", "drop_cached", "restore" } do
            raises("model:" .. call .. ": the model is closed", m2[call], m2, "x")
        end
    end)

    it("of waiting where it can't be", function()
        for name, fn in pairs {
            ["table.sort"] = function() table.sort({ 2, 1 }, function() return s:gen { max_tokens = 1 } end) end,
            ["string.gsub"] = function() return (("x"):gsub("x", function() return s:gen({ max_tokens = 1 }).text end)) end,
            ["tostring"] = function()
                return tostring(setmetatable({}, { __tostring = function() return s:gen({ max_tokens = 1 }).text end }))
            end,
            ["load"] = function() assert(load(function() return s:gen({ max_tokens = 1 }).text end)) end,
        } do
            raises("s:gen: can't wait for the engine inside " .. name, fn)
        end
        raises("s:fork: not possible from inside a step", s.gen, s, { sampler = function() s:fork() end })
        raises("llm.sleep: can't wait for the engine inside a function that the engine calls", s.gen, s, { sampler = function() llm.sleep(0) end })
        assert.same({ 0, 0 }, { m:stats().running, m:stats().waiting })
    end)

    it("carries the place in the program", function()
        local function program() s:gen { temprature = 1 } end
        local place = "misuse_spec.lua:" .. debug.getinfo(program, "S").linedefined .. ": s:gen: unknown option"
        raises(place, program)
    end)
end)

describe("what never returns", function()
    local loops = {
        plain = function() while true do end end,
        ["inside pcall"] = function() while true do pcall(function() while true do end end) end end,
        ["in a coroutine"] = function() coroutine.wrap(function() while true do end end)() end,
    }

    for _, name in ipairs { "plain", "inside pcall" } do
        local forever = loops[name]
        it("a sampler: " .. name .. ", is an error of its own request", function()
            local m <close> = constant { max_seqs = 4 }
            local other = llm.spawn(function() return session(m, "y"):gen({ max_tokens = 5 }).text end)
            local s <close> = session(m, "x")
            local err = raises("s:gen: sampler stage: ", s.gen, s, { sampler = { { "top_k", 4 }, forever } })
            assert.matches("over the time limit of a hook: 1000 ms of processor time", err.message, 1, true)
            assert.equal("limit", err.code)
            assert.matches("misuse_spec.lua:%d+", err.message)
            assert.equal("AAAAA", (other:wait()))
            assert.equal("AA", s:gen({ max_tokens = 2 }).text)
            assert.is_true(m:check())
        end)
    end

    it("a sampler that eats memory", function()
        local m <close> = constant()
        local s <close> = session(m, "x")
        -- of memory, or of time where the system is slow to give pages; policy_spec.lua has a smaller limit
        raises("limit of a hook: ", s.gen, s, { sampler = function()
            local hoard = {}
            for i = 1, 1e9 do hoard[#hoard + 1] = ("%d"):format(i):rep(1 << 18) end
        end })
        assert.equal("AA", s:gen({ max_tokens = 2 }).text)
    end)

    it("the next of a scripted model", function()
        local m <close> = constant { next = function(t) while t[1] == 33 do end return 65 end }
        local bad, good = session(m, "!"), session(m, "x")
        local r = llm.map({ bad, good }, function(s)
            return table.pack(pcall(s.gen, s, { max_tokens = 3 }))
        end)
        assert.is_false(r[1][1])
        assert.matches("s:gen: .*over the time limit of a hook", tostring(r[1][2]))
        assert.equal("AAA", r[2][2].text)
    end)

    for name, forever in pairs(loops) do
        it("a function under llm.timeout: " .. name .. ", while others go on", function()
            local ticks, closed = 0, false
            local ticker = llm.spawn(function() for _ = 1, 1000 do ticks = ticks + 1 llm.sleep(0) end end)
            local r, text, code = llm.timeout(0.3, function()
                local _ <close> = setmetatable({}, { __close = function() closed = true end })
                forever()
            end)
            assert.same({ nil, "timed out after 0.3 s", "limit" }, { r, text, code })
            assert.is_true(closed)
            assert.is_true(ticks > 1)
            ticker:cancel()
        end)
    end

    it("where it can't be interrupted: an error, at the limit", function()
        raises("over the time limit: 200 ms of processor time", llm.timeout, 0.2, function()
            table.sort({ 1, 2, 3 }, function() while true do end end)
        end)
    end)

    it("its branches, too", function()
        local _, _, code = llm.timeout(0.2, function()
            llm.map({ 1, 2 }, function() while true do end end)
        end)
        assert.equal("limit", code)
    end)

    it("work that takes longer than a slice is done all the same", function()
        assert.equal(20000000, llm.timeout(60, function()
            local n = 0
            for _ = 1, 20000000 do n = n + 1 end
            return n
        end))
    end)
end)

describe("rewinding", function()
    it("into a chat's first message leaves an empty chat", function()
        local m <close> = constant()
        local s <close> = m:session()
        s:user "one"
        s:gen { max_tokens = 2 }
        s:rewind(3)
        assert.equal(0, #s.messages)
        s:user "two"
        s:gen { max_tokens = 1 }
        assert.equal("two", s.messages[1].content)
        assert.matches("user\ntwo", s.text, 1, true)
        assert.not_matches("one", s.text, 1, true)
        local f = s:fork()
        f:rewind(0)
        f:user "three"
        assert.equal("A", f:gen({ max_tokens = 1 }).text)
    end)
end)

describe("errors of a program's own functions", function()
    it("in a template carry its frames", function()
        local m <close> = constant()
        local function render(vars) return vars.nothing.there end
        local s <close> = m:session { template = function(vars) return (render(vars)) end }
        s:user "x"
        local task = llm.spawn(function() s:gen() end)
        local err = raises("attempt to index a nil value (field 'nothing')", task.wait, task)
        assert.matches("misuse_spec.lua:%d+: in upvalue 'render'", err)
        assert.matches("in upvalue 'template'", err, 1, true)
    end)
end)
