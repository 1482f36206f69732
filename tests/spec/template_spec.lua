-- Chat templates against what Jinja makes of the same ones (tests/data/template, scripts/gen_template_ref.py).

local T = require "llmrun.template"

local DIR = "tests/data/template/"

local function read(name)
    local f = assert(io.open(DIR .. name, "rb"))
    local s = f:read "a"
    f:close()
    return s
end

local function read_json(name)
    return assert(T.json_decode(read(name)))
end

local NOW = os.time { year = 2026, month = 3, day = 5, hour = 8, min = 7, sec = 9 }
local TOKENS = { bos_token = "<s>", eos_token = "</s>", pad_token = "<pad>", unk_token = "<unk>" }

-- Variables with the special tokens added.
local function variables(vars)
    local all = {}
    for k, v in pairs(TOKENS) do
        all[k] = v
    end
    for k, v in pairs(vars) do
        all[k] = v
    end
    return all
end

-- Our error codes for what Python raises.
local CODES = {
    TemplateSyntaxError = { syntax = true },
    SyntaxError = { syntax = true },
    RuntimeError = { type = true },
    TemplateAssertionError = { syntax = true, value = true },
    TemplateRuntimeError = { value = true, type = true },
    TemplateError = { raised = true },
    UndefinedError = { undefined = true },
    TypeError = { type = true, undefined = true, syntax = true },
    ValueError = { value = true },
    AttributeError = { type = true },
    AssertionError = { value = true },
    KeyError = { value = true },
    IndexError = { value = true },
    ZeroDivisionError = { value = true },
    OverflowError = { limit = true },
    SecurityError = { security = true },
    FilterArgumentError = { type = true, value = true },
}

local function check(row, compiled, vars)
    local t, err, code = compiled.t, compiled.err, compiled.code
    local text
    if t then
        text, err, code = t:render(vars)
    end
    if row.text then
        assert.equal(row.text, text or ("error: " .. err))
        -- the segments are the same text
        local parts = {}
        for i, s in ipairs((assert(t:segments(vars)))) do
            parts[i] = s.text
        end
        assert.equal(row.text, table.concat(parts))
    else
        assert.is_nil(text, ("rendered %q, but Jinja says %s: %s"):format(text or "", row.error, row.message))
        assert.matches("^test:%d+:%d+: .", err)
        local codes = CODES[row.error] or {}
        local both = ("%s (%s), but Jinja says %s: %s"):format(err, code, row.error, row.message)
        assert.is_true(codes[code] == true, both)
        if row.error == "TemplateError" then
            assert.is_truthy(err:find(row.message, 1, true))
        end
    end
end

local function compile(source)
    local t, err, code = T.compile(source, { name = "test", now = NOW })
    return { t = t, err = err, code = code }
end

describe("template chats", function()
    local chats = read_json "conversations.json"
    local compiled = {}
    for _, row in ipairs(read_json "chats.json") do
        it(("renders %s with %s as Jinja does"):format(row.chat, row.template), function()
            local c = compiled[row.template]
            if not c then
                c = compile(read(row.template))
                assert(c.t, c.err)
                compiled[row.template] = c
            end
            check(row, c, variables(chats[row.chat]))
        end)
    end
end)

describe("template snippets", function()
    local vars = variables(read_json "snippets_vars.json")
    for _, row in ipairs(read_json "snippets.json") do
        it(row.source:gsub("\n", "¶"), function()
            check(row, compile(row.source), vars)
        end)
    end
end)
