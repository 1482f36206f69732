-- What a server of the OpenAI API does under strain: requests that ask for too much, queues, clients that leave, engines
-- that fail; health and figures.
local llm = require "llmrun"
local core = require "llmrun.core"
local json = require "llmrun.json"
local S = dofile "tests/spec/serve_support.lua"

local CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
local with, serving = S.with, S.serving

local function messages(text) return { { role = "user", content = text or "hi" } } end

describe("one request that asks for too much", function()
    it("is refused fast and without memory; others go on", function()
        local t <close> = serving(S.teller { "a", "b" })
        local function big(n, item)
            local list = json.array()
            for i = 1, n do list[i] = type(item) == "function" and item(i) or item end
            return list
        end
        local tools = function(i) return { type = "function", ["function"] = { name = "f" .. i } } end
        local base = { messages = messages() }
        local cases = {
            { CHAT, with(base, { n = 1000000000 }), "n" },
            { COMPLETE, { prompt = ">", best_of = 1000000 }, "best_of" },
            { CHAT, with(base, { n = 128, max_tokens = 4096 }), "max_tokens" },
            { COMPLETE, { prompt = ">", logprobs = 1000000000, echo = true }, "logprobs" },
            { COMPLETE, { prompt = ("x"):rep(2000) .. ">", logprobs = -1, echo = true }, "logprobs" },
            { COMPLETE, { prompt = big(100000, "x") }, "prompt" },
            { COMPLETE, { prompt = big(1000, ">"), n = 128 }, "n" },
            { CHAT, with(base, { stop = big(100000, "x") }), "stop" },
            { CHAT, with(base, { stop = ("x"):rep(1 << 20) }), "stop" },
            { CHAT, with(base, { logit_bias = big(100000, { 1, 1 }) }), "logit_bias" },
            { CHAT, with(base, { tools = big(10000, tools) }), "tools" },
            { "/tokenize", { prompt = ("a"):rep(3 << 20) }, "prompt" },
            { COMPLETE, { prompt = ("a"):rep(3 << 20) }, "prompt" },
            { COMPLETE, { prompt = { ("a"):rep(3 << 19), ("a"):rep(3 << 19) } }, "prompt" },
            { "/v1/embeddings", { input = { ("a"):rep(3 << 19), ("a"):rep(3 << 19) } }, "input" },
            { CHAT, { messages = messages(("a"):rep(3 << 20)) }, "messages" },
            { "/v1/responses", { input = ("a"):rep(3 << 20) }, "input" },
            { "/tokenize", { messages = messages(("a"):rep(3 << 20)) }, "messages" },
            { CHAT, { messages = big(100000, { role = "user", content = "x" }) }, "messages" },
        }
        for i, c in ipairs(cases) do cases[i] = { c[1], assert(json.encode(c[2])), c[3] } end
        local function raw(text) table.insert(cases, { CHAT, text }) end
        raw(("["):rep(1000000))
        raw(("{\"a\":"):rep(1000000))
        raw("{\"n\":" .. ("9"):rep(1000000) .. "}")
        raw("{\"" .. ("k"):rep(10000000) .. "\":1}")
        raw("{\"messages\":[" .. ("[],"):rep(2000000) .. "1]}")
        collectgarbage()
        local sanitized = os.getenv "LLMRUN_TEST_SANITIZE"
        local before, patience = core.memory(), sanitized and 10 or 2
        for i, c in ipairs(cases) do
            local begin = core.now()
            local r = S.post(t.server, c[1], c[2])
            local took = core.now() - begin
            assert.equal(400, r.status, ("case %d: %s"):format(i, r.body:sub(1, 200)))
            if c[3] then assert.equal(c[3], r.json.error.param, r.body:sub(1, 200)) end
            assert.is_true(took < patience, ("case %d took %.2f s"):format(i, took))
            assert.equal("ab", t.ok(COMPLETE, { prompt = ">" }).choices[1].text)
        end
        local grown = core.memory() - before
        assert.is_true(grown < 200e6 * (sanitized and 4 or 1), ("%d MB"):format(grown // 1000000))
    end)

    it("waits in a queue that has an end", function()
        local m = S.teller({ "x" }, { max_seqs = 1 }, function(_, n, model) return n < 300 and 0 or model.info.eos end)
        local t <close> = serving(m, { openai = { max_queue = 2 } })
        local tasks = {}
        for i = 1, 12 do tasks[i] = llm.spawn(S.post, t.server, CHAT, { messages = messages() }) end
        local ok, busy = 0, 0
        for _, task in ipairs(tasks) do
            local r = task:wait()
            if r.status == 200 then ok = ok + 1 end
            if r.status == 503 then
                busy = busy + 1
                assert.equal("1", r.headers["retry-after"])
                assert.equal("overloaded", r.json.error.code)
            end
        end
        assert.equal(12, ok + busy)
        assert.is_true(ok >= 2 and busy >= 1, ok .. " answered, " .. busy .. " refused")
    end)
end)

describe("clients that leave", function()
    it("free what the model held for them within a step", function()
        local m = S.teller({ "x" }, { max_seqs = 8 }, function() return 0 end)
        local t <close> = serving(m)
        local net = require "llmrun.net"
        for _, body in ipairs {
            { messages = messages() }, { messages = messages(), stream = true },
            { messages = messages(), n = 4 }, { messages = messages(), n = 4, stream = true },
        } do
            local c = assert(net.connect(t.server.host, t.server.port))
            local text = json.encode(body)
            c:send(("POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"):format(CHAT, #text, text))
            S.eventually(function() return m:stats().running == (body.n or 1) end)
            if body.stream then assert(c:recv(1)) end
            c:close()
            local steps = m:stats().steps
            S.eventually(function() return m:stats().running == 0 and m:stats().sequences == 0 end)
            assert.is_true(m:stats().steps - steps < 50, "steps: " .. m:stats().steps - steps)
            m:check()
            assert.equal(0, m:stats().kv[1].used)
        end
        assert.equal(200, S.post(t.server, CHAT, { messages = messages(), max_tokens = 2 }).status)
    end)
end)

describe("an engine that fails", function()
    it("is a 500 for its request, and an error event in a stream", function()
        local m = S.teller({ "a", "b" }, nil, function(_, n)
            if n == 1 then error "model trouble" end
            return 0
        end)
        local server <close> = S.start { models = { m } }
        local r = S.post(server, CHAT, { messages = messages() })
        assert.equal(500, r.status)
        assert.equal("server_error", r.json.error.type)
        local ok = S.post(server, CHAT, { messages = messages(), max_tokens = 1 })
        assert.equal(200, ok.status)
        r = S.post(server, CHAT, { messages = messages(), stream = true })
        assert.equal("a", r.events[2].choices[1].delta.content)
        assert.equal("server_error", r.events[#r.events].error.type)
    end)
end)

describe("metrics and health", function()
    it("say so when a model is closed under the server", function()
        local a, b = S.teller({ "x" }, { name = "a" }), S.teller({ "y" }, { name = "b" })
        local server <close> = S.start { models = { a, b } }
        b:close()
        local r = S.get(server, "/health")
        assert.equal(503, r.status)
        assert.same({ status = "failed", reason = "the model 'b' is closed" }, r.json)
        r = S.get(server, "/metrics")
        assert.equal(200, r.status)
        assert.matches('model_name="a"', r.body, 1, true)
        assert.not_matches('model_name="b"', r.body)
        assert.equal(200, S.post(server, CHAT, { model = "a", messages = messages() }).status)
        assert.equal(500, S.post(server, CHAT, { model = "b", messages = messages() }).status)
    end)

    it("are there", function()
        local a, b = S.teller({ "x" }, { name = "a" }), S.teller({ "y" }, { name = "b" })
        local server <close> = S.start { models = { a, b } }
        assert.same({ status = "ok" }, S.get(server, "/health").json)
        S.post(server, CHAT, { messages = messages() })
        S.get(server, "/nothing")
        local r = S.get(server, "/metrics")
        assert.matches("^text/plain; version=0.0.4", r.headers["content-type"])
        assert.matches('llmrun:generation_tokens_total{model_name="a"} 2', r.body, 1, true)
        assert.matches('llmrun:generation_tokens_total{model_name="b"} 0', r.body, 1, true)
        assert.matches('llmrun:http_requests_total{route="/v1/chat/completions",status="200"} 1', r.body, 1, true)
        assert.matches('llmrun:http_requests_total{route="(none)",status="404"} 1', r.body, 1, true)
        -- the lines of a metric stand together, under one TYPE
        local seen, last = {}, nil
        for line in r.body:gmatch("[^\n]+") do
            local kind = line:match("^# TYPE (%S+)")
            if kind then
                assert.is_nil(seen[kind], kind)
                seen[kind], last = true, kind
            elseif line:sub(1, 1) ~= "#" then
                assert.equal(last, line:sub(1, #last), line)
            end
        end
    end)
end)
