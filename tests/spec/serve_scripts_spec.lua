-- Scripts in requests: samplers and programs of clients, their limits, and who may send them.
local llm = require "llmrun"
local core = require "llmrun.core"
local json = require "llmrun.json"
local S = dofile "tests/spec/serve_support.lua"

local CHAT, COMPLETE, PROGRAM = "/v1/chat/completions", "/v1/completions", "/v1/programs"

--- A model that likes the pieces a, b, c in this order, wherever it is.
local function model_of()
    return S.teller({ "a", "b", "c" }, { name = "tell", ctx = 512 }, function(_, n, m)
        if n >= 12 then return m.info.eos end
        return { [0] = 5, [1] = 4, [2] = 3, default = -20 }
    end)
end

local function serving(opts)
    local o = { models = { model_of() }, scripts = true }
    for k, v in pairs(opts or {}) do o[k] = v end
    local server = S.start(o)
    local t = { server = server, model = o.models[1] }
    function t.ok(path, body)
        local r = S.post(server, path, body)
        assert.equal(200, r.status, r.body)
        return r.json or r.events
    end
    function t.refused(path, body, param, code, status)
        local r = S.post(server, path, body)
        assert.equal(status or 400, r.status, r.body)
        assert.equal(param or json.null, r.json.error.param, r.body)
        assert.equal(code, r.json.error.code, r.body)
        return r.json.error.message
    end
    return setmetatable(t, { __close = function()
        assert.equal(0, server.openai.scripts and server.openai.scripts.running or 0)
        server:close()
        t.model:check()
        assert.equal(0, t.model:stats().sequences)
        t.model:close()
    end })
end

local function complete(sampler, more)
    local body = { prompt = ">", max_tokens = 4, sampler = sampler }
    for k, v in pairs(more or {}) do body[k] = v end
    return body
end

describe("scripts in requests", function()
    it("are off unless the server lets them in", function()
        local t <close> = serving { scripts = false }
        t.refused(COMPLETE, complete "return {}", "sampler", "scripts_off", 403)
        t.refused(CHAT, { messages = { { role = "user", content = "x" } }, sampler = "return {}" }, "sampler",
            "scripts_off", 403)
        t.refused(PROGRAM, { program = "return 1" }, nil, "scripts_off", 403)
    end)

    it("need a key where others than this machine can send them", function()
        local ok, err = pcall(serving, { host = "0.0.0.0" })
        assert.is_false(ok)
        assert.matches("Set an API key", tostring(err), 1, true)
        local t <close> = serving { host = "0.0.0.0", api_keys = { "k" } }
        assert.equal(401, S.post(t.server, PROGRAM, { program = "return 1" }).status)
        local r = S.post(t.server, PROGRAM, { program = "return 1" }, { Authorization = "Bearer k" })
        assert.equal(1, r.json.values[1])
    end)

    it("do not come from a page of another origin, or by another name of this machine", function()
        local t <close> = serving { cors = { "https://good.example" } }
        local function status(headers) return S.post(t.server, PROGRAM, { program = "return 1" }, headers).status end
        local own = ("http://127.0.0.1:%d"):format(t.server.port)
        assert.equal(200, status {})
        assert.equal(200, status { Origin = own, Host = own:sub(8) })
        assert.equal(200, status { Origin = "https://good.example" })
        for _, origin in ipairs { "https://evil.example", "null", "http://127.0.0.1:1", "" } do
            assert.equal(403, status { Origin = origin }, origin)
        end
        assert.equal(403, status { Host = "evil.example" })
        assert.equal(403, status { Host = "evil.example", Origin = "http://evil.example" })
    end)

    it("have limits that a server can set, and only that are there", function()
        local ok, err = pcall(S.start, { models = { model_of() }, scripts = { speed = 1 } })
        assert.is_false(ok)
        assert.matches("unknown option 'speed'", tostring(err), 1, true)
        ok, err = pcall(S.start, { models = { model_of() }, scripts = { seconds = 0 } })
        assert.is_false(ok)
        assert.matches("seconds: above 0", tostring(err), 1, true)
    end)
end)

describe("a sampler of a client's", function()
    it("is a function, or a list as llm.sampler takes it", function()
        local t <close> = serving()
        local function say(sampler, more) return t.ok(COMPLETE, complete(sampler, more)).choices[1].text end
        assert.equal("aaaa", say "return { 'greedy' }")
        assert.equal("bbbb", say "return { { 'ban', { 0 } }, 'greedy' }")
        assert.equal("bbbb", say "return function(logits) logits:mask(0) return (logits:argmax()) end")
        assert.equal("cccc", say "return { function(l) l:mask { 0, 1 } end, { 'top_k', 1 } }")
        assert.equal("abca", say "return function(_, ctx) return ctx.n_generated % 3 end")
        assert.equal("abab", say [[
            return function(logits, ctx)
                ctx.turn = (ctx.turn or -1) + 1 -- kept from token to token
                logits:add({ ctx.turn % 2 }, 50)
                local ids, best = logits:topk(2)
                assert(#ids == 2 and best[1] > best[2] and #logits == logits:vocab_size())
                return ids[1]
            end]])
        assert.equal("acac", say [[
            return function(l, ctx)
                local last = ctx:tokens(1)[1]
                local u = ctx:uniform()
                assert(u >= 0 and u < 1 and ctx.position == ctx.n_prompt + ctx.n_generated)
                return last == 0 and 2 or 0
            end]])
        -- in a chat, in a stream, for several choices, with a seed
        local chat = { messages = { { role = "user", content = "x" } }, max_tokens = 3, stream = true,
            sampler = "return function(_, ctx) return ctx.n_generated end" }
        local text = {}
        for _, e in ipairs(t.ok(CHAT, chat)) do
            local c = e ~= "[DONE]" and e.choices[1]
            if c and c.delta.content then text[#text + 1] = c.delta.content end
        end
        assert.equal("abc", table.concat(text))
        local random = "return { { 'temperature', 3 }, { 'top_k', 3 }, function() end }"
        local r = t.ok(COMPLETE, complete(random, { n = 4, seed = 3, max_tokens = 8 }))
        local same = t.ok(COMPLETE, complete(random, { n = 4, seed = 3, max_tokens = 8 }))
        local seen = {}
        for i = 1, 4 do
            assert.equal(r.choices[i].text, same.choices[i].text)
            seen[r.choices[i].text] = true
        end
        assert.is_not_nil(next(seen, next(seen)))
        -- without max_tokens it goes to the limit of tokens of a script, and no further than the model
        r = t.ok(CHAT, { messages = { { role = "user", content = "x" } }, sampler = "return { 'greedy' }" })
        assert.equal("stop", r.choices[1].finish_reason)
    end)

    it("has errors of its own, told as the client's", function()
        local t <close> = serving()
        local function refused(sampler, pattern, code, more)
            local text = t.refused(COMPLETE, complete(sampler, more), "sampler", code or "script_error")
            assert.matches(pattern, text)
        end
        refused("return", "must return a function or a list")
        refused("return 5", "must return a function or a list")
        refused("return {", "^sampler:1: .* near")
        refused("error 'no'", "no")
        refused("return { 'nothing' }", "unknown stage 'nothing'")
        refused("return { { 'top_k', 'x' } }", "top_k")
        refused("return { { 'ban', { 100000000 } }, 'greedy' }", "")
        refused("print 'x' return {}", "nil value")
        refused("return function() error 'not today' end", "not today")
        refused("return function() return 'x' end", "must return a token id")
        refused("return function() return 99999999 end", "")
        refused("return function(l) l:mask(-5) end", "mask")
        refused("return function(l) return l:nothing() end", "nothing")
        refused("return function(l) return l.x.y end", "nil value")
        refused("return function() coroutine.yield() end", "yielded by itself")
        refused("return function() error(coroutine.yield { 'copy', { n = 0 } }.error) end", "not to be had")
        refused("return function(l) return coroutine.wrap(function() return l:argmax() end)() end", "coroutine of your own")
        refused("return function(l) l.x = 1 end", "no fields")
        refused("\27Lua", "binary chunk")
        refused("require 'llmrun'", "is not there")
        for _, name in ipairs { "llm", "io", "os.exit", "debug", "package" } do
            refused(("return function() assert(%s, 'nothing') end"):format(name), "noth")
        end
        -- in a stream that has begun it is an error event
        local events = t.ok(COMPLETE, complete([[return function(_, ctx)
            if ctx.n_generated == 2 then error "enough" end return 0 end]], { stream = true }))
        assert.equal("script_error", events[#events].error.code)
        assert.equal("a", events[1].choices[1].text)
        for _, name in ipairs { "temperature", "top_p", "top_k", "min_p", "typical_p" } do
            t.refused(COMPLETE, complete("return {}", { [name] = 1 }), name, "invalid_value")
        end
        t.refused(COMPLETE, { prompt = ">", sampler = 5 }, "sampler", "invalid_type")
        assert.equal("aaaa", t.ok(COMPLETE, complete "return { 'greedy' }").choices[1].text)
    end)

    it("is stopped at its limits; the others go on", function()
        local t <close> = serving { scripts = { seconds = 1, step_seconds = 0.05, memory = 8 << 20, tokens = 8,
            choices = 2 } }
        local loops = {
            "while true do end", "return function() while true do end end",
            "return function() while true do pcall(error) end end",
            "return function(l) while true do l:argmax() end end",
            "return function(l) while true do pcall(l.topk, l, 50) end end",
            "return function() local s = '' while true do s = s .. s .. 'x' end end",
            "local t = {} for i = 1, 1e9 do t[i] = i end",
            "return function(l) return ('a'):rep(1e7):find(('a*'):rep(30) .. 'b') end",
        }
        local neighbour = llm.spawn(function()
            local n = 0
            for _ = 1, 5 do
                assert.equal("aaaa", t.ok(COMPLETE, { prompt = ">", max_tokens = 4, temperature = 0 }).choices[1].text)
                n = n + 1
            end
            return n
        end)
        local before = core.memory()
        for _, source in ipairs(loops) do
            local r = S.post(t.server, COMPLETE, complete(source))
            assert.equal(400, r.status, source .. r.body)
            assert.is_true(r.json.error.code == "script_limit" or r.json.error.code == "script_error", r.body)
            assert.equal("sampler", r.json.error.param)
        end
        assert.equal(5, neighbour:wait())
        assert.is_true(core.memory() - before < 100e6)
        t.refused(COMPLETE, complete("return {}", { max_tokens = 9 }), "max_tokens", "invalid_value")
        t.refused(COMPLETE, complete("return {}", { n = 3 }), "n", "invalid_value")
        t.refused(COMPLETE, complete(("-"):rep(300 << 10)), "sampler", "string_too_long")
        local r = t.ok(CHAT, { messages = { { role = "user", content = "x" } }, sampler = "return { 'greedy' }" })
        assert.equal("length", r.choices[1].finish_reason)
        assert.equal(8, r.usage.completion_tokens)
    end)
end)

describe("a program of a client's", function()
    it("runs beside the engine, and gives values and output", function()
        local t <close> = serving()
        local r = t.ok(PROGRAM, { program = [[
            local what, list = ...
            local s <close> = llm.model:session()
            s:append(what)
            local out = s:gen { max_tokens = 3, temperature = 0 }
            print("said", out.text)
            write "no line end"
            return out.text, #list, nil, { a = 1, list = { 1, 2 } }, llm.tell == llm.model
        ]], args = { ">", { 1, 2, 3 } } })
        assert.equal("program.result", r.object)
        assert.equal("tell", r.model)
        assert.same({ "aaa", 3, json.null, { a = 1, list = { 1, 2 } }, true }, { table.unpack(r.values) })
        assert.equal("said\taaa\nno line end", r.output)
        assert.equal(3, r.usage.completion_tokens)
        assert.is_true(r.usage.memory > 0 and r.usage.cpu_seconds >= 0)
        -- branches batch as in programs of one's own
        r = t.ok(PROGRAM, { program = [[
            local function one(bias)
                local s <close> = llm.model:session()
                s:append ">"
                return s:gen { max_tokens = 2, temperature = 0, logit_bias = { [bias] = 50 } }.text
            end
            return llm.map({ 0, 1, 2 }, one)]] })
        assert.same({ "aa", "bb", "cc" }, { table.unpack(r.values[1]) })
    end)

    it("streams what it prints", function()
        local t <close> = serving()
        local events = t.ok(PROGRAM, { stream = true, program = [[
            local s <close> = llm.model:session()
            s:append ">"
            for piece in s:stream { max_tokens = 3, temperature = 0 } do write(piece) end
            return "end"]] })
        local text = {}
        for i = 1, #events - 2 do
            assert.equal("program.output", events[i].object)
            text[i] = events[i].text
        end
        assert.equal("aaa", table.concat(text))
        assert.equal("end", events[#events - 1].values[1])
        assert.equal("[DONE]", events[#events])
    end)

    it("has errors of its own, told as the client's", function()
        local t <close> = serving()
        local function refused(program, pattern, code)
            assert.matches(pattern, t.refused(PROGRAM, { program = program }, "program", code or "script_error"))
        end
        refused("return +", "program:1:")
        refused("local x = nil\nreturn x.y", "program:2:")
        refused("error { 1 }", "")
        refused("return print", "function")
        refused("return 0/0", "JSON")
        refused("return llm.model:session():gen { max_tokens = 'x' }", "max_tokens")
        refused("return llm.model:session { priority = 5 }", "not to be had")
        refused("os.execute 'true'", "nil value")
        refused("return io.open('/etc/passwd')", "nil value")
        t.refused(PROGRAM, json.object(), "program", "invalid_type")
        t.refused(PROGRAM, { program = "return 1", model = "none" }, "model", "model_not_found", 404)
        t.refused(PROGRAM, { program = "return 1", args = 5 }, "args", "invalid_type")
        local events = t.ok(PROGRAM, { program = "print 'x' error 'later'", stream = true })
        assert.equal("x\n", events[1].text)
        assert.equal("script_error", events[2].error.code)
    end)

    it("is stopped at its limits", function()
        local t <close> = serving { scripts = { seconds = 0.5, timeout = 5, memory = 8 << 20, tokens = 6, sessions = 2,
            output = 1000, at_once = 2 } }
        local function limit(program, limits)
            t.refused(PROGRAM, { program = program, limits = limits }, "program", "script_limit")
        end
        limit "while true do end"
        limit("while true do end", { seconds = 0.05 })
        limit("return 1", { memory = 1 })
        limit("return 1", { memory = 100000 })
        limit "local t = {} for i = 1, 1e9 do t[i] = i end"
        limit("llm.sleep(100)", { timeout = 0.1 })
        local gen = [[local s = llm.model:session() s:append ">"
            local r = s:gen { ignore_eos = true, temperature = 0 }
            local ok, e = pcall(s.gen, s, { max_tokens = 1 }) return #r.tokens, ok]]
        local r = t.ok(PROGRAM, { program = gen })
        assert.same({ 6, false }, { table.unpack(r.values) })
        r = t.ok(PROGRAM, { program = gen, limits = { tokens = 2 } })
        assert.same({ 2, false }, { table.unpack(r.values) })
        assert.matches("sessions", t.refused(PROGRAM, { program = "for i = 1, 3 do llm.model:session() end" },
            "program", "script_error"))
        assert.matches("output", t.refused(PROGRAM, { program = "while true do print(('x'):rep(99)) end" }, "program",
            "script_error"))
        t.refused(PROGRAM, { program = "return 1", limits = { seconds = 100 } }, "limits.seconds", "invalid_value")
        t.refused(PROGRAM, { program = "return 1", limits = { memory = 1 << 40 } }, "limits.memory", "invalid_value")
        local two = {}
        for i = 1, 2 do
            two[i] = llm.spawn(S.post, t.server, PROGRAM, { program = "llm.sleep(0.5) return 1" })
        end
        S.eventually(function() return t.server.openai.scripts.running == 2 end)
        local busy = S.post(t.server, PROGRAM, { program = "return 1" })
        assert.equal(429, busy.status)
        assert.equal("1", busy.headers["retry-after"])
        for i = 1, 2 do assert.equal(200, two[i]:wait().status) end
        assert.equal(200, S.post(t.server, PROGRAM, { program = "return 1" }).status)
    end)

    it("ends when its client goes away, with all that it began", function()
        local t <close> = serving()
        local net = require "llmrun.net"
        local body = json.encode { program = [[
            local s = llm.model:session()
            s:append ">"
            s:gen { ignore_eos = true, max_tokens = 400, temperature = 0 }
            llm.sleep(100)]] }
        local c = assert(net.connect(t.server.host, t.server.port))
        c:send(("POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"):format(PROGRAM, #body, body))
        S.eventually(function() return t.server.openai.scripts.running == 1 and t.model:stats().sequences == 1 end)
        c:close()
        S.eventually(function() return t.server.openai.scripts.running == 0 and t.model:stats().sequences == 0 end)
    end)
end)
