-- Chat templates: the part of Jinja that real ones use, compiled once to closures and rendered fast.
--
--   local T = require "llmrun.template"
--   local t, err = T.compile(source, { name = "model.gguf" })      -- nil, "model.gguf:3:14: unexpected ')'"
--   local prompt = t:render { messages = msgs, add_generation_prompt = true, bos_token = "<s>" }
--   local parts = t:segments { ... }                                -- { { text =, literal = }, ... }
--
-- What a template gets. Python values are Lua's: lists are sequences, dicts other tables, None is T.null (cjson.null).
-- T.dict and T.json_decode make dicts that keep the order of their keys; other dicts are in the order of sorted keys.
-- An empty table is a list unless made by T.dict. As with Hugging Face, `tools` and `documents` are None and
-- `add_generation_prompt` is false if not given.
--
-- Where text comes from. segments() tells the template's own text (literal = true: markup, strings written in the
-- template, and the variables named in options.trusted) from text of the messages, tools and other variables
-- (literal = false). Only literal text may be searched for special tokens; the rest must be encoded as plain text, so
-- that a user cannot close his turn and open another. Neighbouring segments still belong to one prompt: a tokenizer
-- should merge across their borders what is not a special token. `x.role` and `x['role']` are literal if they are one
-- of T.roles, so that templates may write '<|' + message.role + '|>'; any other role is data. Numbers and tojson are
-- data. The filters keep the distinction piece by piece (rope.lua). The trusted variables must come from the model's
-- file: a server must not let a request set them.
--
-- What is there: for (else, if, recursive, loop.*), break, continue, if, set (blocks, namespaces, tuples), macros,
-- call, filter, with, raw, generation; all operators and tests; the filters and methods of filters.lua,
-- filters_seq.lua and methods.lua; range, dict, namespace, cycler, joiner, raise_exception, strftime_now. White space:
-- trim_blocks and lstrip_blocks. Undefined values print as nothing, and using them further is an error. It agrees with
-- Jinja as Hugging Face sets it up, byte for byte, on all that tests/data/template holds. Beyond it: lists and dicts
-- that the template made may be changed (append, update...). Not there: include, import, extends, block, do; the
-- filters pprint, random, urlize, striptags, wordwrap, xmlattr, filesizeformat; Markup (safe and escape give plain
-- strings); integers beyond 64 bits. What is not there is refused by compile, with its place (an unknown filter or
-- test inside an if only when it is reached, as in Jinja); nothing is ever replaced silently.
--
-- Limits (options.limits): steps (10 million; one is about one closure or 16 bytes of string), output (8 MiB, of any
-- string too), depth of macro calls (150). A template reaches nothing but its variables and the functions named above.
--
-- Files, each using those before it: state, rope, unicode, text, value, show, ops, json, format, methods, tests,
-- filters, filters_seq, globals (the runtime); lexer, expr, parser (text -> tree); scope, compile_expr, compile (tree
-- -> closures); builtin (templates as Lua functions).

local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local value = require "llmrun.template.value"
local json = require "llmrun.template.json"
local lexer = require "llmrun.template.lexer"
local parser = require "llmrun.template.parser"
local compiler = require "llmrun.template.compile"

local S = state.S

local M = {}

---None.
M.null = value.null

---Names of roles that count as literal text.
M.roles = {
    "system", "user", "assistant", "tool", "tools", "developer", "function", "ipython", "model", "observation",
    "environment", "context", "documents", "human", "bot", "tool_response", "tool_results",
}

---Names of variables whose strings count as literal text.
M.trusted = { "bos_token", "eos_token", "unk_token", "pad_token" }

local DEFAULTS = { tools = value.null, documents = value.null, add_generation_prompt = false }
local LIMITS = { steps = 10000000, output = 8 * 1024 * 1024, depth = 150 }
local MAX_SOURCE = 1024 * 1024

---A dict with its keys in order, from a list of { key, value } pairs, or from a table and the list of its keys.
---@param a table
---@param keys? table
---@return table
function M.dict(a, keys)
    if keys then
        return value.dict(a, keys)
    end
    local t, order = {}, {}
    for i, pair in ipairs(a) do
        t[pair[1]], order[i] = pair[2], pair[1]
    end
    return value.dict(t, order)
end

---Marks a table as a list; needed only for an empty one in a place where a dict is expected otherwise.
function M.list(t)
    return value.data_list(t)
end

---Reads JSON text into values for templates, keys in order.
---@param text string
---@return any value, string? err
function M.json_decode(text)
    return json.decode(text)
end

-- Errors -------------------------------------------------------------------------------------------------------------

-- The message and code of a caught error. Errors that are not ours are thrown on, but for Lua's own.
local function explain(err, name, src, pos)
    local code, msg
    if getmetatable(err) == state.Error then
        code, msg, pos = err.code, err.msg, err.pos or pos
    elseif type(err) ~= "string" then
        error(err, 0)
    elseif err:find("stack overflow", 1, true) then
        code, msg = "limit", "the template is nested too deeply"
    elseif err:find("not enough memory", 1, true) then
        code, msg = "limit", "not enough memory"
    else
        code, msg = "internal", "internal error: " .. err
    end
    local line, column = lexer.place(src, pos or 1)
    return ("%s:%d:%d: %s"):format(name, line, column, msg), code
end

-- Runs fn with a fresh state; what was there is put back afterwards.
local function guarded(limits, vars, now, fn)
    local saved = {}
    for key, v in pairs(S) do
        saved[key] = v
    end
    local out = state.new_buffer()
    S.left, S.max_bytes, S.max_depth = limits.steps, limits.output, limits.depth
    S.depth, S.pos, S.vars, S.now, S.out = 0, 1, vars, now, out
    local ok, r1, r2 = pcall(fn)
    local pos = S.pos
    for key in pairs(S) do
        S[key] = saved[key]
    end
    for key, v in pairs(saved) do
        S[key] = v
    end
    return ok, r1, r2, pos, out
end

-- Templates ----------------------------------------------------------------------------------------------------------

local Template = {}
Template.__index = Template

local OPTIONS = { name = true, trusted = true, roles = true, limits = true, now = true, defaults = true }

local function set_of(list, make)
    local set = {}
    for _, name in ipairs(list) do
        set[name] = make(name)
    end
    return set
end

local function yes()
    return true
end

---Compiles a template.
---@param source string
---@param options? table  name: for messages; trusted, roles: lists in place of T.trusted and T.roles; limits: { steps,
---  output, depth }; now: seconds since the epoch for strftime_now instead of the clock; defaults: variables for
---  renders that do not give them, in place of the three above
---@return table? template, string? err, string? code  code: "syntax" or "limit"
function M.compile(source, options)
    options = options or {}
    for key in pairs(options) do
        if not OPTIONS[key] then
            error(("template.compile: unknown option '%s'"):format(tostring(key)), 2)
        end
    end
    if type(source) ~= "string" then
        error("template.compile: the source must be a string", 2)
    end
    local name = options.name or "template"
    if #source > MAX_SOURCE then
        return nil, ("%s:1:1: the template is over the limit of %d bytes"):format(name, MAX_SOURCE), "limit"
    end
    local limits = setmetatable(options.limits or {}, { __index = LIMITS })
    local src = source
    local ok, run, body_src, pos = guarded(LIMITS, nil, nil, function()
        local body
        body, src = parser.parse(source)
        return compiler.compile(body, {
            trusted = set_of(options.trusted or M.trusted, yes),
            roles = set_of(options.roles or M.roles, rope.lit),
        }), src
    end)
    if not ok then
        return nil, explain(run, name, src, pos)
    end
    return setmetatable({
        name = name, source = body_src, run = run, limits = limits, now = options.now,
        defaults = options.defaults or DEFAULTS,
    }, Template)
end

local function execute(t, vars)
    local all = setmetatable({}, {
        __index = function(_, key)
            local v = vars and vars[key]
            if v == nil then
                v = t.defaults[key]
            end
            return v
        end,
    })
    local ok, err, _, pos, out = guarded(t.limits, all, t.now, t.run)
    if not ok then
        return nil, explain(err, t.name, t.source, pos)
    end
    return out
end

---Renders to a string.
---@param vars table
---@return string? text, string? err, string? code  code: undefined, type, value, raised (by raise_exception),
---security, limit
function Template:render(vars)
    local out, err, code = execute(self, vars)
    if not out then
        return nil, err, code
    end
    return table.concat(out.t)
end

---Renders to segments: a list of { text = string, literal = boolean }, neighbours differing in `literal`.
---@param vars table
---@return table? segments, string? err, string? code
function Template:segments(vars)
    local out, err, code = execute(self, vars)
    if not out then
        return nil, err, code
    end
    local segments, n = {}, 0
    local t, f, i = out.t, out.f, 1
    while i <= out.n do
        local literal, j = f[i], i
        while j < out.n and f[j + 1] == literal do
            j = j + 1
        end
        n = n + 1
        segments[n] = { text = table.concat(t, "", i, j), literal = literal }
        i = j + 1
    end
    return segments
end

return M
