-- The API's fields that say what an answer must look like: response_format, guided_*, structured_outputs, tool_choice.
local core = require "llmrun.core"
local json = require "llmrun.json"
local llm = require "llmrun"
local anything = dofile "tests/spec/constraint_support.lua"
local S = dofile "tests/spec/serve_support.lua"

local CHAT, COMPLETE, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

local function serving(opts, lift)
    local t = { model = anything(opts, lift) }
    t.server = S.start { models = { tell = t.model } }
    function t.ok(path, body)
        local r = S.post(t.server, path, body)
        assert.equal(200, r.status, r.body)
        return r.json or r.events
    end
    function t.refused(path, body, param, text)
        local r = S.post(t.server, path, body)
        assert.equal(400, r.status, r.body)
        assert.equal(param, r.json.error.param, r.body)
        if text then assert.truthy(r.json.error.message:find(text, 1, true), r.body) end
        return r.json.error
    end
    return setmetatable(t, { __close = function()
        t.server:close()
        t.model:close()
    end })
end

local function chat(fields)
    local body = { messages = { { role = "user", content = "hi" } }, max_tokens = 300, seed = 3 }
    for k, v in pairs(fields or {}) do body[k] = v end
    return body
end

local function content(r) return r.choices[1].message.content end

local person = json.decode([[{ "type": "object", "properties": { "name": { "type": "string", "maxLength": 8 },
    "age": { "type": "integer", "minimum": 0, "maximum": 120 } }, "required": ["name", "age"],
    "additionalProperties": false }]], { ordered = true })

local tools = json.decode([[[
    { "type": "function", "function": { "name": "get_time", "parameters": { "type": "object",
      "properties": { "zone": { "$ref": "#/$defs/zone" } }, "required": ["zone"], "additionalProperties": false,
      "$defs": { "zone": { "enum": ["UTC", "CET"] } } } } },
    { "type": "function", "function": { "name": "get_rain", "parameters": { "type": "object",
      "properties": { "city": { "type": "string", "maxLength": 6 }, "days": { "type": "integer", "minimum": 1,
      "maximum": 7 } }, "required": ["city", "days"], "additionalProperties": false } } } ]
]], { ordered = true })

--- Asserts that a call is one of these tools' and its arguments are valid.
local function valid(call)
    assert.equal("function", call.type)
    local args = assert(json.decode(call["function"].arguments))
    if call["function"].name == "get_time" then
        assert.truthy(args.zone == "UTC" or args.zone == "CET")
    else
        assert.equal("get_rain", call["function"].name)
        assert.is_true(math.type(args.days) == "integer" and args.days >= 1 and args.days <= 7)
        assert.is_true(utf8.len(args.city) <= 6)
    end
    return args
end

describe("an answer's form", function()
    it("response_format", function()
        local t <close> = serving()
        for seed = 1, 5 do
            local r = t.ok(CHAT, chat { seed = seed, response_format = { type = "json_schema",
                json_schema = { name = "person", strict = true, schema = person } } })
            assert.equal("stop", r.choices[1].finish_reason)
            local v = assert(json.decode(content(r)))
            assert.is_true(v.age <= 120 and utf8.len(v.name) <= 8)
        end
        local r = t.ok(CHAT, chat { response_format = { type = "json_object" }, max_tokens = 40, seed = 2 })
        assert.equal("{", content(r):sub(1, 1))
        assert.equal("yes", content(t.ok(CHAT, chat { response_format = { type = "regex", pattern = "yes" } })))
        t.refused(CHAT, chat { response_format = { type = "json_schema", json_schema = { name = "x",
            schema = json.decode '{"properties":{"a":{"pattern":"(?<=x)"}}}' } } },
            "response_format", "#/properties/a/pattern")
        t.refused(CHAT, chat { response_format = { type = "json_schema", json_schema = { schema = false } } },
            "response_format")
    end)

    it("guided_*, structured_outputs, and SGLang's names", function()
        local t <close> = serving()
        local function is(text, fields)
            assert.equal(text, content(t.ok(CHAT, chat(fields))))
            fields.prompt, fields.seed = "p", 1
            assert.equal(text, t.ok(COMPLETE, fields).choices[1].text)
        end
        is("12", { guided_regex = "12" })
        is("ab", { guided_choice = { "ab" } })
        is("xy", { guided_grammar = 'root ::= "x" "y"' })
        is("xy", { guided_grammar = 'start: "x" "y"' })
        is('"v"', { guided_json = { const = "v" } })
        is('"v"', { guided_json = '{"const":"v"}' })
        is("12", { structured_outputs = { regex = "12" } })
        is("ab", { structured_outputs = { choice = { "ab" } } })
        is("xy", { structured_outputs = { grammar = 'root ::= "x" "y"' } })
        is('"v"', { structured_outputs = { json = { const = "v" } } })
        is("12", { regex = "12" })
        is("xy", { ebnf = 'root ::= "x" "y"' })
        is("yx", { grammar = 'root ::= "y" "x"' })
        is('"v"', { json_schema = '{"const":"v"}' })
        t.refused(CHAT, chat { guided_regex = "a(" }, "guided_regex", "byte 2")
        t.refused(CHAT, chat { guided_grammar = "root ::= foo" }, "guided_grammar", "foo")
        t.refused(CHAT, chat { guided_choice = json.array() }, "guided_choice")
        t.refused(CHAT, chat { guided_choice = { 1 } }, "guided_choice[0]")
        t.refused(CHAT, chat { guided_json = "{" }, "guided_json")
        t.refused(CHAT, chat { guided_regex = "a", guided_choice = { "b" } }, "guided_choice", "guided_regex")
        t.refused(COMPLETE, { prompt = "p", structured_outputs = { json = { type = "x" } } },
            "structured_outputs.json", "#/type")
        t.refused(CHAT, chat { structured_outputs = { structural_tag = "x" } }, "structured_outputs.structural_tag")
        -- a bad one has no effect on the next
        is("12", { guided_regex = "12" })
    end)

    it("is kept by all choices, and streamed", function()
        local t <close> = serving()
        local o = chat { n = 4, guided_regex = "[a-f]{12}", temperature = 2 }
        local texts = {}
        for i, c in ipairs(t.ok(CHAT, o).choices) do
            texts[i] = c.message.content
            assert.truthy(texts[i]:find "^[a-f]+$" and #texts[i] == 12)
        end
        o.stream = true
        local parts = { "", "", "", "" }
        for _, e in ipairs(t.ok(CHAT, o)) do
            for _, c in ipairs(e ~= "[DONE]" and e.choices or {}) do
                parts[c.index + 1] = parts[c.index + 1] .. (c.delta.content or "")
            end
        end
        assert.same(texts, parts)
        local r = t.ok(RESPONSES, { input = "hi", max_output_tokens = 300, text = { format = { type = "json_schema",
            name = "person", schema = person } } })
        assert.is_true(json.decode(r.output[1].content[1].text).age <= 120)
    end)
end)

describe("tool_choice (B44)", function()
    it("required and a name: one call, whose arguments are valid", function()
        local t <close> = serving()
        local seen = {}
        for seed = 1, 10 do
            local r = t.ok(CHAT, chat { tools = tools, tool_choice = "required", seed = seed, temperature = 2 })
            local c = r.choices[1]
            assert.equal("tool_calls", c.finish_reason)
            assert.equal(json.null, c.message.content)
            assert.equal(1, #c.message.tool_calls)
            valid(c.message.tool_calls[1])
            seen[c.message.tool_calls[1]["function"].name] = true
        end
        assert.is_true(seen.get_time and seen.get_rain)
        local named = { type = "function", ["function"] = { name = "get_rain" } }
        for seed = 1, 4 do
            local r = t.ok(CHAT, chat { tools = tools, tool_choice = named, seed = seed, parallel_tool_calls = false })
            local call = r.choices[1].message.tool_calls[1]
            assert.equal("get_rain", call["function"].name)
            valid(call)
        end
    end)

    it("streamed: id and name first, then the arguments as they come", function()
        local t <close> = serving()
        for seed = 1, 4 do
            local o = chat { tools = tools, tool_choice = "required", seed = seed, n = 2 }
            local whole = t.ok(CHAT, o).choices
            o.stream = true
            local got, finish, pieces = { {}, {} }, {}, 0
            for _, e in ipairs(t.ok(CHAT, o)) do
                for _, c in ipairs(e ~= "[DONE]" and e.choices or {}) do
                    local g = got[c.index + 1]
                    finish[c.index + 1] = c.finish_reason
                    assert.is_true(c.delta.content == nil or c.delta.content == "")
                    for _, call in ipairs(c.delta.tool_calls or {}) do
                        assert.equal(0, call.index)
                        assert.equal(g.name == nil, call.id ~= nil)
                        assert.equal(g.name == nil, call["function"].name ~= nil)
                        g.name = g.name or call["function"].name
                        g.text = (g.text or "") .. call["function"].arguments
                        pieces = pieces + 1
                    end
                end
            end
            for k = 1, 2 do
                assert.equal(whole[k].message.tool_calls[1]["function"].name, got[k].name)
                assert.equal(whole[k].message.tool_calls[1]["function"].arguments, got[k].text)
                assert.equal("tool_calls", finish[k])
            end
            assert.is_true(pieces > 6)
        end
    end)

    it("allowed_tools: one of those, as if there were no others", function()
        local t <close> = serving()
        local rain = { tools[1]["function"].name == "get_rain" and tools[1] or tools[2] }
        local of_rain = { { type = "function", ["function"] = { name = "get_rain" } } }
        local function allowed(mode, list)
            return chat { tools = tools, temperature = 2, tool_choice = { type = "allowed_tools",
                allowed_tools = { mode = mode, tools = list } } }
        end
        for seed = 1, 4 do
            local r = t.ok(CHAT, S.with(allowed("required", of_rain), { seed = seed }))
            assert.equal("get_rain", r.choices[1].message.tool_calls[1]["function"].name)
        end
        local auto = t.ok(CHAT, S.with(allowed("auto", of_rain), { max_tokens = 1 }))
        assert.equal(t.ok(CHAT, chat { tools = rain, max_tokens = 1 }).usage.prompt_tokens, auto.usage.prompt_tokens)
        t.ok("/v1/responses", { input = "x", max_output_tokens = 1, tools = { { type = "function", name = "f" } },
            tool_choice = { type = "allowed_tools", mode = "auto", tools = { { type = "function", name = "f" } } } })
        local where = "tool_choice.allowed_tools."
        t.refused(CHAT, allowed("none", of_rain), where .. "mode")
        t.refused(CHAT, allowed(nil, of_rain), where .. "mode")
        t.refused(CHAT, allowed("auto", json.array()), where .. "tools")
        t.refused(CHAT, allowed("auto", { { type = "function", ["function"] = { name = "x" } } }), where .. "tools[0]")
        t.refused(CHAT, allowed("auto", { 5 }), where .. "tools[0]")
        t.refused(CHAT, allowed("auto", { json.object() }), where .. "tools[0].name")
    end)

    it("none: no call, and no word of the tools in the prompt", function()
        local t <close> = serving()
        local plain = t.ok(CHAT, chat { max_tokens = 4 })
        for _, body in ipairs { chat { tools = tools, tool_choice = "none", max_tokens = 4 },
            chat { tool_choice = "none", max_tokens = 4 } } do
            local r = t.ok(CHAT, body)
            assert.equal(plain.usage.prompt_tokens, r.usage.prompt_tokens)
            assert.equal(content(plain), content(r))
            assert.is_nil(r.choices[1].message.tool_calls)
        end
        assert.is_true(t.ok(CHAT, chat { tools = tools, max_tokens = 4 }).usage.prompt_tokens
            > plain.usage.prompt_tokens)
        t.refused(CHAT, chat { tools = tools, tool_choice = { type = "function", ["function"] = { name = "nope" } } },
            "tool_choice", "nope")
        t.refused(CHAT, chat { tools = tools, tool_choice = { type = "function", ["function"] = json.object() } },
            "tool_choice.function.name")
        t.refused(CHAT, chat { tool_choice = "required" }, "tool_choice")
        t.refused(CHAT, chat { tools = tools, tool_choice = "required", guided_regex = "x" }, "tool_choice")
    end)

    it("auto: what a model writes between the marks of a call is valid, too", function()
        local t <close> = serving({ vocab = { "<tool_call>\n", " ", "ab", '"}' } }, { ["<tool_call>\n"] = 40 })
        for seed = 1, 5 do
            local o = chat { tools = tools, seed = seed, parallel_tool_calls = false, temperature = 1 }
            local c = t.ok(CHAT, o).choices[1]
            assert.equal("tool_calls", c.finish_reason)
            assert.equal(1, #c.message.tool_calls)
            valid(c.message.tool_calls[1])
            o.stream = true
            local text, name = "", nil
            for _, e in ipairs(t.ok(CHAT, o)) do
                for _, d in ipairs(e ~= "[DONE]" and e.choices or {}) do
                    for _, call in ipairs(d.delta.tool_calls or {}) do
                        name = name or call["function"].name
                        text = text .. call["function"].arguments
                    end
                end
            end
            assert.same({ c.message.tool_calls[1]["function"].name, c.message.tool_calls[1]["function"].arguments },
                { name, text })
            o = chat { tools = tools, seed = seed, max_tokens = 900 }
            for _, call in ipairs(t.ok(CHAT, o).choices[1].message.tool_calls or {}) do valid(call) end
        end
        -- schemas that can't be held to: as the model writes it, unless the tool is strict
        local bad = json.decode [[ [{ "type": "function", "function": { "name": "bad", "parameters": {
            "type": "object", "properties": { "a": { "pattern": "(?<=x)" } } } } }] ]]
        t.ok(CHAT, chat { tools = bad, max_tokens = 4 })
        bad[1]["function"].strict = true
        t.refused(CHAT, chat { tools = bad, max_tokens = 4 }, "tools[0].function.parameters", "#/properties/a/pattern")
    end)

    it("arguments that can't be held to their schema are refused, with the place", function()
        local t <close> = serving()
        local bad = json.decode [=[[{ "type": "function", "function": { "name": "ok" } }, { "type": "function",
            "function": { "name": "bad", "parameters": { "type": "object", "properties": { "a": {
            "pattern": "(?<=x)" } } } } }]]=]
        t.refused(CHAT, chat { tools = bad, tool_choice = "required" }, "tools[1].function.parameters",
            "#/properties/a/pattern")
        -- one without parameters takes none
        local r = t.ok(CHAT, chat { tools = bad, tool_choice = { type = "function", ["function"] = { name = "ok" } } })
        assert.equal("{}", r.choices[1].message.tool_calls[1]["function"].arguments)
    end)

    it("cut short it is what there is", function()
        local t <close> = serving()
        local o = chat { tools = tools, tool_choice = { type = "function", ["function"] = { name = "get_rain" } },
            max_tokens = 50 }
        local c = t.ok(CHAT, o).choices[1]
        assert.equal("length", c.finish_reason)
        assert.equal(1, #c.message.tool_calls)
        assert.is_nil(json.decode(c.message.tool_calls[1]["function"].arguments))
        o.max_tokens = 2
        assert.is_nil(t.ok(CHAT, o).choices[1].message.tool_calls)
        local flat = { { type = "function", name = "get_rain", parameters = tools[2]["function"].parameters } }
        local body = { input = "hi", tools = flat, tool_choice = "required", seed = 2, max_output_tokens = 300 }
        local call = t.ok(RESPONSES, body).output[1]
        body.stream = true
        local args, kinds, done = "", {}, nil
        for _, e in ipairs(t.ok(RESPONSES, body)) do
            kinds[e.type] = (kinds[e.type] or 0) + 1
            if e.type == "response.function_call_arguments.delta" then args = args .. e.delta end
            if e.type == "response.function_call_arguments.done" then done = e.arguments end
        end
        assert.same({ call.arguments, call.arguments }, { args, done })
        assert.is_true(kinds["response.function_call_arguments.delta"] > 3)
        assert.equal(1, kinds["response.output_item.added"])
        assert.equal(1, kinds["response.output_item.done"])
        local r = t.ok(RESPONSES, { input = "hi", tools = { { type = "function", name = "f", parameters = {
            type = "object" } } }, tool_choice = "required", max_output_tokens = 3 })
        assert.equal("incomplete", r.status)
    end)

    it("the form of each family of models can be read back", function()
        local constraints = require "llmrun.openai.constraints"
        local families = { hermes = "arguments", llama3 = "parameters", mistral = "arguments", gemma = "parameters" }
        for family, name in pairs(families) do
            local o = { forced = true, choice = "required", gen = {}, ids = { 1 }, tools = { { name = "f" } },
                style = { format = { name = family } } }
            local t <close> = anything()
            constraints.prepare(t, o)
            local reader = constraints.reader(o)
            local text = ('{"name": "f", "%s": {"a": "}"}}'):format(name)
            if family == "mistral" then text = "[" .. text .. "]" end
            local args = ""
            for c in text:gmatch "." do args = args .. select(2, reader:push(c)) end
            local more, cut = reader:finish()
            assert.equal('{"a": "}"}', args .. more)
            assert.equal("f", reader.call.name)
            assert.is_false(cut)
        end
    end)
end)

describe("a grammar that takes long to read", function()
    --- How long others waited at most, and how long it took.
    local function waited(t, letter)
        local words = {}
        for i = 1, 60000 do words[i] = ('"%s%07dx"'):format(letter, i * 7919 % 9999991) end
        local body = json.encode(chat { max_tokens = 2, guided_grammar = "root ::= " .. table.concat(words, " | ") })
        local longest, over = 0, false
        local others = llm.spawn(function()
            local last = core.now()
            while not over do
                llm.sleep(0)
                local now = core.now()
                longest, last = math.max(longest, now - last), now
            end
        end)
        local began = core.now()
        t.ok(CHAT, body)
        over = true
        others:wait()
        return longest, core.now() - began
    end

    it("keeps nobody else waiting while it is read", function()
        local t <close> = serving()
        if os.getenv "LLMRUN_TEST_SANITIZE" == "1" then return waited(t, "a") end -- the part in C takes longest there
        local longest, took
        for _, letter in ipairs { "a", "b", "c" } do -- a busy machine may halt it anywhere
            longest, took = waited(t, letter)
            if longest < took / 2 then return end
        end
        error(("%.3f of %.3f s"):format(longest, took))
    end)
end)
