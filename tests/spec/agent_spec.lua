-- Agents on scripted models that say a given text at each turn: calls, results, errors, limits, the formats of the
-- families through their templates.
local llm = require "llmrun"

local function raises(pattern, fn, ...)
    local ok, err = pcall(fn, ...)
    assert.is_false(ok)
    assert.matches(pattern, tostring(err), 1, true)
    return err
end

local function read_file(path)
    local f <close> = assert(io.open(path, "rb"))
    return f:read "a"
end

--- A model that says answers[n] in the n-th turn. Turns are told by the text before each, one of `heads`.
local function teller(answers, o)
    o = o or {}
    local heads = o.heads or { "<|im_start|>assistant\n" }
    o.heads = nil
    o.ctx = o.ctx or 16384
    o.eos = o.eos or "<|im_end|>"
    local m, head_ids
    local function head_at(t, i) -- length of the head that begins there
        for _, ids in ipairs(head_ids) do
            local same = true
            for j = 1, #ids do same = same and t[i + j - 1] == ids[j] end
            if same then return #ids end
        end
    end
    local texts = {}
    o.next = function(t)
        if not head_ids then
            head_ids = {}
            for i, h in ipairs(heads) do head_ids[i] = m.vocab:encode(h, { special = true }) end
        end
        local n, at = 0, nil
        for i = 1, #t do
            local k = head_at(t, i)
            if k then n, at = n + 1, i + k end
        end
        texts[n] = texts[n] or m.vocab:encode(answers[n] or "no more", { special = true })
        local said = #t - at + 1
        return texts[n][said + 1] or m.info.eos
    end
    m = llm.scripted(o)
    return m
end

local function call(name, args)
    return ('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'):format(name, args)
end

local weather = {
    description = "The weather in a city.",
    parameters = { properties = { city = { type = "string" } }, required = { "city" } },
    run = function(args) return { city = args.city, sky = "clear", degrees = 21 } end,
}

local function contents(s, role)
    local list = {}
    for _, m in ipairs(s.messages) do
        if not role or m.role == role then list[#list + 1] = m.content end
    end
    return list
end

describe("an agent", function()
    it("answers at once when the model calls nothing", function()
        local m <close> = teller { "Hello." }
        local a <close> = llm.agent { model = m, tools = { weather = weather } }
        local r = a:run "Hi."
        assert.equal("Hello.", r.text)
        assert.equal("stop", r.finish_reason)
        assert.equal(1, r.turns)
        assert.same({}, r.calls)
    end)

    it("runs a call and gives its result to the model", function()
        local m <close> = teller { "I look.\n" .. call("weather", '{"city": "Rome"}'), "Clear, 21 degrees." }
        local a <close> = llm.agent { model = m, tools = { weather = weather }, system = "Be brief." }
        local r = a:run "Weather in Rome?"
        assert.equal("Clear, 21 degrees.", r.text)
        assert.equal(2, r.turns)
        assert.equal(1, #r.calls)
        local c = r.calls[1]
        assert.same({ "weather", { city = "Rome" }, 1 }, { c.name, { city = c.arguments.city }, c.turn })
        assert.equal('{"city": "Rome", "degrees": 21, "sky": "clear"}', c.result)
        assert.equal(21, c.value.degrees)
        local system = contents(a.session, "system")[1]
        assert.matches("^Be brief%.\n\nYou can call", system)
        assert.matches('"name": "weather"', system, 1, true)
        assert.same({ "Weather in Rome?", "<tool_response>\n" .. c.result .. "\n</tool_response>" },
            contents(a.session, "user"))
    end)

    it("computes each turn's new tokens only", function()
        local m <close> = teller { call("weather", '{"city": "Rome"}'), call("weather", '{"city": "Oslo"}'), "Done." }
        local a <close> = llm.agent { model = m, tools = { weather = weather } }
        local cached = {}
        a.opts.on_turn = function(result) cached[#cached + 1] = result.usage end
        local r = a:run "Compare."
        assert.equal("Done.", r.text)
        for i = 2, 3 do
            assert.equal(cached[i].cached_tokens, cached[i - 1].prompt_tokens + cached[i - 1].completion_tokens - 1)
        end
        assert.equal(cached[1].computed_tokens + cached[2].computed_tokens + cached[3].computed_tokens,
            r.usage.computed_tokens)
        assert.is_true(r.usage.computed_tokens < a.session.len + 5)
    end)

    it("runs the calls of a turn side by side, results in their order", function()
        local calls = call("slow", '{"n": 3}') .. call("slow", '{"n": 1}') .. call("slow", '{"n": 2}')
        local m <close> = teller { calls, "ok" }
        local running, most, log = 0, 0, {}
        local a <close> = llm.agent { model = m, tools = { slow = function(args)
            running = running + 1
            most = math.max(most, running)
            llm.sleep(args.n * 0.005)
            running = running - 1
            log[#log + 1] = args.n
            return args.n
        end } }
        local r = a:run "go"
        assert.equal(3, most)
        assert.same({ 1, 2, 3 }, log)
        assert.equal("<tool_response>\n3\n</tool_response>\n<tool_response>\n1\n</tool_response>\n"
            .. "<tool_response>\n2\n</tool_response>", a.session.messages[4].content)
        assert.equal("ok", r.text)
        most = 0
        local m2 <close> = teller { call("slow", '{"n": 1}'):rep(4), "ok" }
        local b <close> = llm.agent { model = m2, tools = { slow = a.tools.slow.run }, concurrency = 2 }
        b:run "go"
        assert.equal(2, most)
    end)

    it("gives a tool's errors to the model", function()
        local m <close> = teller {
            call("f", '{"x": 1}'), call("f", '{"x": "a"}'), call("f", "{}"), call("g", "{}"), call("h", "{}"),
            "<tool_call>{oops</tool_call>", call("cyclic", "{}"), "I give up.",
        }
        local cyclic = {}
        cyclic.self = cyclic
        local a <close> = llm.agent { model = m, max_turns = 10, tools = {
            f = { parameters = { properties = { x = { type = "string" } }, required = { "x" } },
                run = function() error "the door is locked" end },
            g = function() return nil, "no such key" end,
            cyclic = function() return cyclic end,
        } }
        local r = a:run "try"
        assert.equal("I give up.", r.text)
        local e = {}
        for i, c in ipairs(r.calls) do e[i] = c.error end
        assert.equal("arguments.x: string expected, got integer", e[1])
        assert.equal("the door is locked", e[2])
        assert.matches("agent_spec.lua:%d+: the door is locked.*traceback", r.calls[2].trace)
        assert.equal("arguments: 'x' is missing", e[3])
        assert.equal("no such key", e[4])
        assert.equal("there is no function 'h' (did you mean 'f'?); there are: cyclic, f, g", e[5])
        assert.matches("^the call is no JSON", e[6])
        assert.matches("^the result can't be shown: .*nested", e[7])
        assert.equal('<tool_response>\n{"error": "the door is locked"}\n</tool_response>',
            a.session.messages[6].content)
    end)

    it("ends a tool that never returns; the others' results stand", function()
        local m <close> = teller { call("hang", "{}") .. call("quick", "{}"), "ok" }
        local closed = false
        local a <close> = llm.agent { model = m, tool_timeout = 0.02, tools = {
            hang = function()
                local _ <close> = setmetatable({}, { __close = function() closed = true end })
                llm.sleep(1000)
            end,
            quick = function() return "q" end,
        } }
        local r = a:run "go"
        assert.equal("the function 'hang' did not return within 0.02 s and was ended", r.calls[1].error)
        assert.equal("q", r.calls[2].result)
        assert.equal("ok", r.text)
        assert.is_true(closed)
    end)

    it("is bounded in turns and in time", function()
        local m <close> = teller { call("f", "{}"), call("f", "{}"), call("f", "{}"), call("f", "{}") }
        local a <close> = llm.agent { model = m, max_turns = 3, tools = { f = function() return 1 end } }
        local r = a:run "loop"
        assert.equal("turns", r.finish_reason)
        assert.equal(3, r.turns)
        assert.equal(3, #r.calls)
        local m2 <close> = teller { call("f", "{}"), "late" }
        local b <close> = llm.agent { model = m2, timeout = 0.5, tools = { f = function() llm.sleep(30) end } }
        r = b:run "loop"
        assert.equal("timeout", r.finish_reason)
        assert.equal(1, r.turns)
        assert.is_nil(r.calls[1].result)
        assert.equal(0, m2:stats().running)
    end)

    it("goes on in a second run, and in forks of its session", function()
        local m <close> = teller { "One.", call("weather", '{"city": "X"}'), "Two." }
        local a <close> = llm.agent { model = m, tools = { weather = weather } }
        assert.equal("One.", a:run("first").text)
        local r = a:run "second"
        assert.equal("Two.", r.text)
        assert.equal(2, r.turns)
        assert.equal(3, a.turns)
    end)

    it("tools can use models and agents of their own", function()
        local inner <close> = teller { "42" }
        local m <close> = teller { call("ask", '{"q": "6*7"}'), "It is 42." }
        local a <close> = llm.agent { model = m, tools = { ask = function(args, context)
            assert.equal("ask", context.call.name)
            local s <close> = inner:session()
            s:user(args.q)
            return s:gen().text
        end } }
        local r = a:run "?"
        assert.equal("42", r.calls[1].result)
        assert.equal("It is 42.", r.text)
    end)

    it("tool_choice = required writes the beginning of a call", function()
        local m <close> = teller { call("weather", '{"city": "Rome"}'), "Clear." }
        local a <close> = llm.agent { model = m, tools = { weather = weather }, tool_choice = "required" }
        local pieces = {}
        a.opts.on_turn = function(result) pieces[#pieces + 1] = result.text end
        local r = a:run "Weather in Rome?"
        assert.equal('weather", "arguments": {"city": "Rome"}}\n</tool_call>', pieces[1])
        assert.equal("Clear.", r.text)
        assert.equal("Rome", r.calls[1].arguments.city)
        raises('llm.agent: tool_choice: "auto" or "required" expected', llm.agent,
            { model = m, tools = { weather = weather }, tool_choice = "always" })
    end)

    it("many agents share the engine's batches", function()
        local m <close> = teller { call("weather", '{"city": "Rome"}'), "Clear." }
        local r = llm.map({ 1, 2, 3, 4 }, function()
            local a <close> = llm.agent { model = m, tools = { weather = weather } }
            return a:run("Weather in Rome?").text
        end)
        assert.same({ "Clear.", "Clear.", "Clear.", "Clear." }, r)
        assert.is_true(m:metrics().batch.mean > 2)
        assert.equal(0, m:stats().sequences)
    end)

    it("cancelling its branch ends tools and requests", function()
        local m <close> = teller { call("f", "{}") }
        local closed = false
        local a <close> = llm.agent { model = m, tools = { f = function()
            local _ <close> = setmetatable({}, { __close = function() closed = true end })
            llm.sleep(1000)
        end } }
        local _, _, code = llm.timeout(0.4, function() a:run "x" end)
        assert.equal("limit", code)
        assert.is_true(closed)
        assert.is_nil(a.busy)
    end)

    it("names what is wrong", function()
        local m <close> = teller { "x" }
        local tools = { f = function() end }
        raises("llm.agent: either model or session expected", llm.agent, { tools = tools })
        raises("llm.agent: tools expected", llm.agent, { model = m })
        raises("llm.agent: unknown option 'tool' (did you mean 'tools'?)", llm.agent, { model = m, tool = tools })
        raises("llm.agent: max_turns must be at least 1", llm.agent, { model = m, tools = tools, max_turns = 0 })
        raises("llm.agent: timeout: seconds above 0", llm.agent, { model = m, tools = tools, timeout = 0 })
        raises("llm.agent: unknown format 'x'", llm.agent, { model = m, tools = tools, format = "x" })
        raises("llm.agent: option 'gen': table expected, got integer", llm.agent, { model = m, tools = tools, gen = 1 })
        local a = llm.agent { model = m, tools = tools, gen = { temprature = 0 } }
        raises("s:gen: unknown option 'temprature'", a.run, a, "x")
        raises("agent:run: text expected, got nil", a.run, a)
        a:close()
        raises("agent:run: the agent is closed", a.run, a, "x")
        local s <close> = m:session()
        s:user "x"
        raises("give an empty session", llm.agent, { session = s, tools = tools })
        raises("system: the session has its messages already", llm.agent, { session = s, tools = tools, system = "x" })
        local slow <close> = teller { call("f", "{}"), "x" }
        a = llm.agent { model = slow, tools = { f = function() llm.sleep(0.01) return 1 end } }
        local task = llm.spawn(function() return a:run "x" end)
        llm.sleep(0)
        raises("the agent is at work on another call", a.run, a, "y")
        assert.equal("x", task:wait().text)
    end)
end)

describe("formats through templates", function()
    local function run(template, special, heads, answers, o)
        local m <close> = teller(answers, { template = read_file("tests/data/template/" .. template), heads = heads,
            special = special, eos = o.eos, bos = o.bos })
        local a <close> = llm.agent { model = m, tools = { weather = weather }, gen = { temperature = 0 } }
        assert.equal(o.format, a.format.name)
        local r = a:run "Weather in Rome?"
        local shown = m:detokenize(a.session.tokens, { special = true })
        return r, shown, a
    end
    local json = '{"city": "Rome", "degrees": 21, "sky": "clear"}'

    it("Qwen", function()
        local r, shown = run("qwen3.jinja", { "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>" },
            nil, { call("weather", '{"city": "Rome"}'), "Clear." },
            { format = "hermes", eos = "<|im_end|>" })
        assert.equal("Clear.", r.text)
        assert.matches('<tools>\n{"type": "function", "function": {"name": "weather"', shown, 1, true)
        assert.matches("<|im_start|>user\n<tool_response>\n" .. json .. "\n</tool_response><|im_end|>", shown, 1, true)
    end)

    it("Llama 3", function()
        local r, shown = run("llama3_tools.jinja", { "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>",
            "<|end_header_id|>", "<|python_tag|>" }, { "<|start_header_id|>assistant<|end_header_id|>\n\n" },
            { '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "Clear." },
            { format = "llama3", eos = "<|eot_id|>", bos = "<|begin_of_text|>" })
        assert.equal("Clear.", r.text)
        assert.matches('assistant<|end_header_id|>\n\n{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>',
            shown, 1, true)
        assert.matches("ipython<|end_header_id|>\n\n" .. json .. "<|eot_id|>", shown, 1, true)
    end)

    it("Mistral", function()
        local r, shown = run("mistral_tools.jinja", { "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]" },
            { "[/INST]", "[/TOOL_RESULTS]" },
            { '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]', "Clear." },
            { format = "mistral", eos = "</s>", bos = "<s>" })
        assert.equal(1, #r.calls)
        assert.equal(json, r.calls[1].result)
        assert.equal(9, #r.calls[1].id)
        assert.equal("Clear.", r.text)
        assert.matches('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "' .. r.calls[1].id
            .. '"}]</s>[TOOL_RESULTS] {"content": ' .. json .. ', "call_id": "' .. r.calls[1].id .. '"}[/TOOL_RESULTS]',
            shown, 1, true)
    end)

    it("Gemma", function()
        local r, _, a = run("gemma.jinja", { "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>" },
            { "<start_of_turn>model\n" }, { "```tool_code\nweather(city='Rome')\n```", "Clear." },
            { format = "gemma", eos = "<end_of_turn>", bos = "<bos>" })
        assert.equal("Clear.", r.text)
        assert.equal("```tool_output\n" .. json .. "\n```", a.session.messages[4].content)
    end)
end)
