-- Reading tool calls: Hermes/Qwen, Llama 3, Mistral, Gemma; their schemas; what is no call, and calls that are broken.
local tools = require "llmrun.tools"
local python = require "llmrun.tools.python"
local validate = require "llmrun.validate"
local null = require("cjson").null

local function raises(pattern, fn, ...)
    local ok, err = pcall(fn, ...)
    assert.is_false(ok)
    assert.matches(pattern, tostring(err), 1, true)
end

-- name(json of arguments) for each call, "!error" for broken ones
local function read(format, text, defs)
    local calls, rest = tools.formats[format].parse(text, defs)
    local out = {}
    for i, c in ipairs(calls) do
        out[i] = c.error and "!" .. c.error or ("%s(%s)"):format(c.name, tools.encode(c.arguments))
    end
    return table.concat(out, " "), rest, calls
end

local function two(...)
    local calls, rest = read(...)
    return calls, rest
end

describe("Hermes and Qwen", function()
    it("one call, several, text around them", function()
        assert.same({ 'f({"a": 1})', "" },
            { two("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>') })
        local calls, rest = read("hermes", 'Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n'
            .. '<tool_call>\n{"arguments": {"x": [1, 2.5, null, true]}, "name": "g.h"}\n</tool_call> Done.')
        assert.equal('f({}) g.h({"x": [1, 2.5, null, true]})', calls)
        assert.equal("Let me see.\n\n Done.", rest)
        assert.same({ "", "no call here" }, { two("hermes", "no call here") })
    end)

    it("markup in strings, missing ends, arguments as text", function()
        assert.equal('f({"s": "</tool_call> } \\" {"})',
            (read("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "</tool_call> } \\" {"}}\n</tool_call>')))
        assert.equal('f({"a": 1})', (read("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}')))
        assert.equal('f({"a": 1})', (read("hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')))
        assert.equal("f({})", (read("hermes", '<tool_call>{"name": "f"}</tool_call>')))
        assert.equal("f({})", (read("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>')))
        assert.equal('f({}) g({})', (read("hermes",
            '<tool_call>{"name": "f"}<tool_call>{"name": "g"}</tool_call>')))
    end)

    it("broken calls say how", function()
        assert.matches("^!the call is no JSON: ", (read("hermes", '<tool_call>{"name": "f", </tool_call>')))
        assert.matches("^!the call is no JSON: ", (read("hermes", "<tool_call>f(1)</tool_call>")))
        assert.equal("!an object with name and arguments expected", (read("hermes", '<tool_call>{"a": 1}</tool_call>')))
        assert.equal("!the arguments are no object but a number",
            (read("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>')))
        assert.matches("^!the arguments are no JSON object", (read("hermes",
            '<tool_call>{"name": "f", "arguments": "x="}</tool_call>')))
        assert.matches("^f%({}%) !the call", (read("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>{"na')))
    end)

    it("bare JSON counts if it names a tool", function()
        local defs = select(2, tools.define("spec", { f = print }))
        assert.equal('f({"a": 1})', (read("hermes", '{"name": "f", "arguments": {"a": 1}}', defs)))
        assert.equal("f({}) f({})", (read("hermes",
            '```json\n{"name": "f", "arguments": {}}\n{"name": "f", "parameters": {}}\n```', defs)))
        for _, text in ipairs { '{"name": "g", "arguments": {}}', '{"name": "f"}', '{"a": 1}', "{}",
            'So: {"name": "f", "arguments": {}}' } do
            assert.same({ "", text }, { two("hermes", text, defs) })
        end
    end)

    it("calls in thoughts don't count", function()
        local calls, rest = read("hermes", '<think>maybe <tool_call>{"name": "f"}</tool_call></think>\n\nNo.')
        assert.equal("", calls)
        assert.matches("No%.$", rest)
        assert.equal("", (read("hermes", '<think>maybe <tool_call>{"name": "f"}</tool_call>')))
        assert.equal("g({})", (read("hermes", '<think>hm</think><tool_call>{"name": "g"}</tool_call>')))
    end)
end)

describe("Llama 3", function()
    it("an object, several, behind the tag, with other names", function()
        assert.equal('f({"a": "b"})', (read("llama3", '{"name": "f", "parameters": {"a": "b"}}')))
        assert.equal('f({"a": 1})', (read("llama3", ' <|python_tag|>{"name": "f", "arguments": {"a": 1}}<|eom_id|>')))
        assert.equal("f({}) g({})", (read("llama3",
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}')))
        assert.equal("f({})", (read("llama3",
            '{"type": "function", "function": {"name": "f", "parameters": {}}}')))
        assert.same({ 'f({"x": 1})', "So: ." }, { two("llama3", 'So: <function=f>{"x": 1}</function>.') })
        assert.equal('search({"query": "rain in Rome"})',
            (read("llama3", '<|python_tag|>search.call(query="rain in Rome")')))
    end)

    it("JSON that is no call stays text", function()
        for _, text in ipairs { '{"a": 1}', '{"name": "Bob"}', "plain", '{"name": "f", "parameters": {}} and more',
            "[1, 2]", "" } do
            assert.same({ "", text }, { two("llama3", text) })
        end
    end)

    it("broken calls say how", function()
        assert.matches("^!the call is no JSON", (read("llama3", '{"name": "f", "parameters": {')))
        assert.equal("!no call could be read behind <|python_tag|>", (read("llama3", "<|python_tag|>print(1)")))
        assert.matches("^!the arguments are no JSON object", (read("llama3", "<function=f>x</function>")))
    end)
end)

describe("Mistral", function()
    it("a list, with and without ids", function()
        local calls, rest, list = read("mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]')
        assert.equal('f({"a": 1}) g({})', calls)
        assert.equal("", rest)
        assert.equal("abcdefghi", list[1].id)
        assert.equal("f({})", (read("mistral", ' [{"name": "f", "arguments": {}}]'))) -- the token was left out
        assert.same({ "", "[1, 2]" }, { two("mistral", "[1, 2]") })
    end)

    it("the later form", function()
        local calls, rest, list = read("mistral",
            'Sure.[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}')
        assert.equal('f({"a": 1}) g({})', calls)
        assert.equal("Sure.", rest)
        assert.equal("123456789", list[1].id)
        assert.equal('f({"a": 1})', (read("mistral", '[TOOL_CALLS]f{"a": 1}')))
    end)

    it("broken calls say how", function()
        assert.matches("^!the list of calls is no JSON", (read("mistral", '[TOOL_CALLS] [{"name": "f"')))
        assert.equal("!an object with name and arguments expected", (read("mistral", "[TOOL_CALLS] [5]")))
        assert.equal("!the arguments are no JSON object", (read("mistral", "[TOOL_CALLS]f[ARGS]{")))
    end)
end)

describe("Gemma", function()
    local defs = select(2, tools.define("spec", {
        { name = "f", parameters = { properties = { b = {}, a = {} }, required = { "b", "a" } }, run = print },
        { name = "g", run = print },
    }))

    it("fences, bare lists, JSON", function()
        local calls, rest = read("gemma", "I look.\n```tool_code\nf(a=1, b='x')\ng()\n```\n", defs)
        assert.equal('f({"a": 1, "b": "x"}) g({})', calls)
        assert.equal("I look.\n\n", rest)
        assert.equal('f({"b": 1}) g({})', (read("gemma", "[f(b=1), g()]", defs)))
        assert.equal('f({"a": 2})', (read("gemma", '```json\n{"name": "f", "parameters": {"a": 2}}\n```', defs)))
        assert.equal('f({"a": 5, "b": 4})', (read("gemma", "```tool_code\nprint(f(4, a=5))\n```", defs)))
        assert.equal('f({"a": 5})', (read("gemma", "```tool_code\nx = f(a=5)\n```", defs)))
        assert.equal('f({"a": 5})', (read("gemma", "```tool_code\nf(a=5)", defs)))
        assert.same({ "", "[see(1)]" }, { two("gemma", "[see(1)]", defs) })
        assert.same({ "", "```python\nf(a=1)\n```" }, { two("gemma", "```python\nf(a=1)\n```", defs) })
    end)

    it("broken calls say how", function()
        assert.equal("!arguments with their names expected: name=value",
            (read("gemma", "```tool_code\ng(1)\n```", defs)))
        assert.equal("!the call can't be read: a string without an end at byte 5",
            (read("gemma", "```tool_code\nf(a='x)\n```", defs)))
    end)
end)

describe("Python literals", function()
    local function value(text)
        local list, err = python.calls("f(x=" .. text .. ")")
        if not list then return nil, err end
        return list[1].named.x
    end

    it("read as Python would", function()
        for text, expect in pairs {
            ["'a\\n\\x41\\u00e9\\''"] = "a\nA\u{e9}'", ['"""a "b"\nc"""'] = 'a "b"\nc', ["r'\\n'"] = "\\n",
            ["'a' \"b\""] = "ab",
            ["-3"] = -3, ["1_000"] = 1000, ["2.5e3"] = 2500.0, [".5"] = .5, True = true, ["None"] = null,
            ["'\\q'"] = "\\q",
        } do
            assert.same(expect, (value(text)))
        end
        assert.is_false((value "False"))
        assert.same({ 1, { a = { "x", {} } } }, (value "[1, {'a': ('x', []), }, ]"))
    end)

    it("refuses what is none", function()
        for _, text in ipairs { "x", "1 + 2", "[1", "{1 2}", "'a", "", "f(1)", "{[1]: 2}",
            ("["):rep(200) .. ("]"):rep(200) } do
            local v, err = value(text)
            assert.is_nil(v)
            assert.is_string(err)
        end
        assert.is_nil((python.calls "import os"))
        assert.is_nil((python.calls "f(1) oops"))
        assert.is_nil((python.calls ""))
    end)
end)

describe("definitions", function()
    it("take lists, maps, JSON text, bare functions; keep an order", function()
        local list, map = tools.define("spec", {
            zeta = { description = "Z", parameters = '{"type":"object","properties":{"b":{},"a":{}}}', run = print },
            alpha = print,
        })
        assert.equal("alpha", list[1].name)
        assert.equal(print, map.zeta.run)
        assert.equal('{"type": "function", "function": {"name": "zeta", "description": "Z", "parameters": '
            .. '{"type": "object", "properties": {"b": {}, "a": {}}}}}', tools.encode(map.zeta.spec))
        assert.equal('{"type": "function", "function": {"name": "alpha", "description": "", "parameters": '
            .. '{"type": "object", "properties": {}}}}', tools.encode(map.alpha.spec))
    end)

    it("name what is wrong", function()
        raises("spec: tools: table expected, got nil", tools.define, "spec", nil)
        raises("spec: the table of tools is empty", tools.define, "spec", {})
        raises("spec: tool 'f': run: function expected, got nil", tools.define, "spec", { f = {} })
        raises("spec: tool 'f': unknown option 'runs' (did you mean 'run'?)", tools.define, "spec",
            { f = { runs = print } })
        raises("spec: tools[1]: a table with name and run expected", tools.define, "spec", { { run = print } })
        raises("spec: tool 'a b': a name of letters", tools.define, "spec", { ["a b"] = print })
        raises("spec: two tools are called 'f'", tools.define, "spec", { { name = "f", run = print }, f = print })
        raises("spec: tool 'f': parameters: a schema of type \"object\" expected, got 'array'", tools.define, "spec",
            { f = { run = print, parameters = { type = "array" } } })
        raises("spec: tool 'f': parameters are no JSON object", tools.define, "spec",
            { f = { run = print, parameters = "{" } })
    end)
end)

describe("arguments", function()
    local schema = {
        type = "object", required = { "city" }, additionalProperties = false,
        properties = {
            city = { type = "string", minLength = 2, maxLength = 5 },
            days = { type = "integer", minimum = 1, maximum = 9 },
            unit = { enum = { "C", "F", null } }, tags = { type = "array", items = { type = "string" }, maxItems = 2 },
            where = { anyOf = { { type = "null" }, { type = "object", required = { "x" } } } }, v = { const = 1 },
        },
    }
    local function check(v) return validate.check(schema, v, "arguments") end

    it("pass, whole numbers become integers", function()
        local v = { city = "Rome", days = 3.0, unit = "C", tags = { "a" }, where = null, v = 1 }
        assert.equal(v, check(v))
        assert.equal("integer", math.type(v.days))
        assert.same({ city = "Rome", tags = {}, where = { x = 1 } },
            check { city = "Rome", tags = {}, where = { x = 1 } })
        assert.is_false((validate.check({ type = "boolean" }, false)))
    end)

    it("fail with the place and what would do", function()
        for _, case in ipairs {
            { {}, "arguments: 'city' is missing" },
            { { city = 5 }, "arguments.city: string expected, got integer" },
            { { city = "R" }, "arguments.city: a text of 1 characters is too short" },
            { { city = "Romes!" }, "arguments.city: a text of 6 characters is too long" },
            { { city = "Rome", days = 1.5 }, "arguments.days: integer expected, got number" },
            { { city = "Rome", days = 10 }, "arguments.days: 10 is above 9" },
            { { city = "Rome", days = 0 }, "arguments.days: 0 is below 1" },
            { { city = "Rome", unit = "K" }, 'arguments.unit: one of "C", "F", null expected, got "K"' },
            { { city = "Rome", tags = { "a", 2 } }, "arguments.tags[1]: string expected, got integer" },
            { { city = "Rome", tags = { "a", "b", "c" } }, "arguments.tags: at most 2 items expected, got 3" },
            { { city = "Rome", tags = "a" }, "arguments.tags: array expected, got string" },
            { { city = "Rome", town = 1 }, "arguments: unknown 'town'; known: city, days, tags, unit, v, where" },
            { { city = "Rome", where = {} }, "arguments.where: 'x' is missing" },
            { { city = "Rome", v = 2 }, "arguments.v: 1 expected, got 2" },
            { { "Rome" }, "arguments: object expected, got array" },
        } do
            local v, why = check(case[1])
            assert.is_nil(v)
            assert.equal(case[2], why)
        end
    end)
end)

describe("guessing the format", function()
    local function vocab(names) return { find = function(_, n) return names[n] end } end
    it("goes by what the template makes of tools, then by the vocabulary", function()
        local none = vocab {}
        assert.equal("hermes", tools.guess(none, "<tools>...").name)
        assert.equal("mistral", tools.guess(none, "[AVAILABLE_TOOLS] [").name)
        assert.equal("llama3", tools.guess(vocab { ["<|python_tag|>"] = 5 }, "some tools").name)
        assert.equal("gemma", tools.guess(vocab { ["<start_of_turn>"] = 5 }, nil).name)
        assert.equal("hermes", tools.guess(none, nil).name)
        raises("unknown format 'xml'; valid: gemma, hermes, llama3, mistral", tools.format, "spec", "xml")
        raises("format: a function prompt expected", tools.format, "spec", {})
    end)
end)
