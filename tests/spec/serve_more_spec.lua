-- /v1/responses, /v1/embeddings, the page and what it draws, two models in one process.
local llm = require "llmrun"
local json = require "llmrun.json"
local S = dofile "tests/spec/serve_support.lua"

local RESPONSES, EMBED = "/v1/responses", "/v1/embeddings"
local with, serving = S.with, S.serving

describe("a stream of events that is silent", function()
    local function body(keep_alive)
        local server <close> = S.start { keep_alive = keep_alive, routes = { ["GET /slow"] = function(_, res)
            res:event "1"
            llm.sleep(0.15)
            res:event "2"
        end, ["GET /text"] = function(_, res)
            res:write "a"
            llm.sleep(0.1)
            res:write "b"
        end } }
        local r = S.get(server, "/slow")
        return r.body, S.get(server, "/text").body
    end

    it("shows that it lives by comments", function()
        local events, text = body(0.02)
        assert.matches("^data: 1\n\n: still at work\n\n", events)
        assert.equal("data: 1\n\ndata: 2\n\n", (events:gsub(": still at work\n\n", "")))
        assert.equal("ab", text)
        assert.equal("data: 1\n\ndata: 2\n\n", (body(0)))
        assert.equal("data: 1\n\ndata: 2\n\n", (body(nil)))
    end)

    it("takes nothing with it when its client goes", function()
        local res
        local server <close> = S.start { keep_alive = 0.01, routes = { ["GET /slow"] = function(_, r)
            res = r
            r:event "a"
            llm.sleep(60)
        end } }
        local net = require "llmrun.net"
        local c = assert(net.connect("127.0.0.1", server.port))
        c:send("GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        S.eventually(function() return res and res.sign end, 30)
        c:close()
        S.eventually(function() return not next(server.active) end, 30)
        assert.is_nil(res.timer)
        assert.is_nil(res.sign)
    end)
end)

describe("a response", function()
    it("has OpenAI's shape", function()
        local t <close> = serving(S.teller({ "Hello", " world" }, { name = "tell" }))
        local r = t.ok(RESPONSES, { input = "hi", instructions = "Be kind.", metadata = { a = "b" }, temperature = 0.5 })
        assert.equal("response", r.object)
        assert.matches("^resp_", r.id)
        assert.equal("tell", r.model)
        assert.equal("completed", r.status)
        assert.equal("Be kind.", r.instructions)
        assert.equal("b", r.metadata.a)
        assert.equal(0.5, r.temperature)
        assert.is_false(r.store)
        assert.equal(1, #r.output)
        local m = r.output[1]
        assert.same({ "message", "assistant", "completed", "Hello world" },
            { m.type, m.role, m.status, m.content[1].text })
        assert.equal("output_text", m.content[1].type)
        assert.equal(3, r.usage.output_tokens)
        assert.equal(r.usage.total_tokens, r.usage.input_tokens + r.usage.output_tokens)
        r = t.ok(RESPONSES, { input = "hi", max_output_tokens = 1 })
        assert.equal("incomplete", r.status)
        assert.equal("max_output_tokens", r.incomplete_details.reason)
    end)

    it("streams numbered events that add up to the whole", function()
        local t <close> = serving(S.teller { "a", "\xf0\x9f", "\x98\x80", " b" })
        local whole = t.ok(RESPONSES, { input = "hi" })
        local events = t.ok(RESPONSES, { input = "hi", stream = true })
        local text, count = {}, {}
        for i, e in ipairs(events) do
            assert.equal(i - 1, e.sequence_number)
            count[e.type] = (count[e.type] or 0) + 1
            if e.type == "response.output_text.delta" then
                assert.is_truthy(utf8.len(e.delta))
                text[#text + 1] = e.delta
            end
        end
        assert.equal("response.created", events[1].type)
        assert.equal("response.completed", events[#events].type)
        for _, kind in ipairs { "in_progress", "output_item.added", "content_part.added", "output_text.done",
            "content_part.done", "output_item.done" } do assert.equal(1, count["response." .. kind], kind) end
        assert.equal("a\u{1F600} b", table.concat(text))
        local last = events[#events].response
        assert.equal(whole.output[1].content[1].text, last.output[1].content[1].text)
        assert.equal(whole.usage.output_tokens, last.usage.output_tokens)
    end)

    it("takes items: messages, calls, their results", function()
        local seen
        local t <close> = serving(S.teller({ "ok" }, { template = function(vars)
            seen = vars.messages
            return "<|im_start|>assistant\n"
        end }))
        t.ok(RESPONSES, { instructions = "rules", input = {
            { role = "user", content = { { type = "input_text", text = "time?" } } },
            { type = "reasoning", summary = json.array() },
            { type = "function_call", call_id = "c1", name = "f", arguments = "{\"a\":1}" },
            { type = "function_call", call_id = "c2", name = "g", arguments = "{}" },
            { type = "function_call_output", call_id = "c1", output = "one" },
            { type = "function_call_output", call_id = "c2", output = { { type = "output_text", text = "two" } } },
            { type = "message", role = "assistant", content = { { type = "output_text", text = "done" } } },
            { role = "developer", content = "more rules" },
        } })
        local roles = {}
        for i, m in ipairs(seen) do roles[i] = m.role end
        assert.equal("system user assistant user assistant system", table.concat(roles, " "))
        assert.matches("one", seen[4].content, 1, true)
        assert.matches("two", seen[4].content, 1, true)
    end)

    it("is refused with the field's name", function()
        local t <close> = serving(S.teller { "x" })
        local function refused(more, param) t.refused(RESPONSES, with({ input = "x" }, more), param) end
        t.refused(RESPONSES, json.object(), "input")
        refused({ input = 5 }, "input")
        refused({ input = json.array() }, "input")
        refused({ input = { { type = "nothing" } } }, "input[0].type")
        refused({ input = { { role = "user" } } }, "input[0].content")
        refused({ input = { { type = "function_call", arguments = "{}" } } }, "input[0].name")
        refused({ previous_response_id = "resp_1" }, "previous_response_id")
        refused({ background = true }, "background")
        refused({ max_output_tokens = 0 }, "max_output_tokens")
        refused({ tools = { { type = "function" } } }, "tools[0].name")
        refused({ tool_choice = { type = "function", name = "nope" } }, "tool_choice")
        refused({ text = { format = { type = "xml" } } }, "response_format.type")
        refused({ input = ("x"):rep(5000) }, "input")
    end)
end)

describe("embeddings", function()
    it("are unit vectors that depend on their text alone", function()
        local model <close> = llm.load("smollm2", { ctx = 512 })
        local server <close> = S.start { models = { model } }
        local function embed(body)
            local r = S.post(server, EMBED, body)
            assert.equal(200, r.status, r.body)
            return r.json
        end
        local texts = { "a cat sat on the mat", "a kitten sat on the rug", "quarterly revenue rose" }
        local all = embed { input = texts }
        assert.equal(3, #all.data)
        assert.equal(all.usage.prompt_tokens, all.usage.total_tokens)
        local function dot(a, b)
            local sum = 0
            for i = 1, #a do sum = sum + a[i] * b[i] end
            return sum
        end
        for i, d in ipairs(all.data) do
            assert.equal(i - 1, d.index)
            assert.equal(model.info.n_embd, #d.embedding)
            assert.near(1, dot(d.embedding, d.embedding), 1e-4)
            assert.same(d.embedding, embed({ input = texts[i] }).data[1].embedding) -- alone, and from the cache
        end
        local a, b, c = all.data[1].embedding, all.data[2].embedding, all.data[3].embedding
        assert.is_true(dot(a, b) > dot(a, c))
        assert.same(a, embed({ input = model:tokenize(texts[1], { bos = true }) }).data[1].embedding)
        local short = embed({ input = texts[1], dimensions = 8 }).data[1].embedding
        assert.equal(8, #short)
        assert.near(1, dot(short, short), 1e-4)
        assert.near(a[1] / a[2], short[1] / short[2], 1e-4)
        local packed = embed({ input = texts[1], encoding_format = "base64" }).data[1].embedding
        assert.equal((4 * #a + 2) // 3 * 4, #packed)
        for body, param in pairs {
            [{}] = "input", [{ input = json.array() }] = "input", [{ input = "" }] = "input", [{ input = 5 }] = "input",
            [{ input = { "a", 5 } }] = "input[1]", [{ input = "a", dimensions = 0 }] = "dimensions",
            [{ input = "a", dimensions = 100000 }] = "dimensions",
            [{ input = "a", encoding_format = "hex" }] = "encoding_format",
            [{ input = { 999999 } }] = "input[0]", [{ input = ("word "):rep(2000) }] = "input",
        } do
            local r = S.post(server, EMBED, next(body) and body or json.object())
            assert.equal(400, r.status)
            assert.equal(param, r.json.error.param)
        end
        assert.equal(0, model:stats().sequences)
    end)
end)

describe("two models in one process", function()
    it("answer side by side, each with its own engine and figures", function()
        local a, b = S.teller({ "a" }, { name = "a" }, function() return 0 end),
            S.teller({ "b" }, { name = "b" }, function() return 0 end)
        local server <close> = S.start { models = { a, b } }
        local list = {}
        for i = 1, 16 do list[i] = i end
        llm.map(list, function(i)
            local name = i % 2 == 0 and "a" or "b"
            local r = S.post(server, "/v1/completions", { model = name, prompt = ">", max_tokens = 40 })
            assert.equal(name:rep(40), r.json.choices[1].text)
        end)
        local look = S.get(server, "/engine").json
        assert.equal(2, #look.models)
        for i, name in ipairs { "a", "b" } do
            assert.equal(name, look.models[i].name)
            assert.equal(320, look.models[i].counters.generation_tokens)
        end
    end)
end)

describe("the page", function()
    it("is one text without anything from elsewhere, under a policy that forbids it", function()
        local t <close> = serving(S.teller { "x" })
        local r, again = S.get(t.server, "/"), S.get(t.server, "/")
        assert.matches("^text/html", r.headers["content-type"])
        local policy = r.headers["content-security-policy"]
        local nonce = policy:match "script%-src 'nonce%-(%x+)'"
        assert.matches("default-src 'none'", policy, 1, true)
        assert.matches('<script nonce="' .. nonce .. '">', r.body, 1, true)
        assert.is_nil(again.body:find(nonce, 1, true))
        for _, pattern in ipairs { "src=", "href=", "@import", "url%(", "https?://" } do
            assert.is_nil(r.body:find(pattern), pattern)
        end
        local off <close> = S.start { models = { S.teller { "x" } }, page = false }
        assert.equal(404, S.get(off, "/").status)
        assert.equal(404, S.get(off, "/engine").status)
    end)

    it("is told of sizes and places, never of texts", function()
        local t <close> = serving(S.teller({ "secret" }, { max_seqs = 4 }, function() return 0 end))
        local tasks = {}
        for i = 1, 6 do
            tasks[i] = llm.spawn(S.post, t.server, "/v1/chat/completions", { max_tokens = 300, n = i % 2 + 1,
                messages = { { role = "user", content = "a private question " .. ("x"):rep(40) } } })
        end
        S.eventually(function() return t.model:stats().running == 4 end)
        local r = S.get(t.server, "/engine")
        local m = r.json.models[1]
        assert.equal(4, m.running)
        assert.is_true(m.waiting >= 1)
        assert.is_true(#m.look.blocks > 0 and #m.look.sequences >= 4)
        local shared = false
        for _, b in ipairs(m.look.blocks) do shared = shared or b.refs > 1 end
        assert.is_true(shared)
        assert.is_nil(r.body:find("secret", 1, true))
        assert.is_nil(r.body:find("private", 1, true))
        for _, task in ipairs(tasks) do assert.equal(200, task:wait().status) end
    end)
end)
