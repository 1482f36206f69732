--- Tools of agents: their definitions, and how models of the families in use write calls of them.
---
--- A format is { name, special = whether control tokens belong to the text, stop = texts behind which nothing of the
--- model's own comes, open = how a call begins, prompt(defs) = what tells a model of the tools whose chat template does
--- not, parse(text, defs) = calls and the text beside them, result(text, call) = what the model reads of a result where
--- its template has no place for it }.
---
--- A call is { name, arguments (table), raw (its text), id, bare = written without the marks } or, if it can't be read,
--- { raw, error, name or nil }.

local errors = require "llmrun.errors"
local python = require "llmrun.tools.python"
local tables = require "llmrun.tables"
local template = require "llmrun.template"

local M = {}

-- JSON ---------------------------------------------------------------------------------------------------------------

local to_json = template.compile("{{ value | tojson }}")

--- JSON text of a value; keys in a fixed order. nil and why not, if it can't be.
---@return string? text, string? err
function M.encode(value)
    local text, err = to_json:render { value = value }
    if text then return text end
    return nil, (err:gsub("^template:%d+:%d+: ", ""))
end

M.decode = template.json_decode

--- The place behind the JSON object or list that begins at i; nil if it has no end.
local function json_end(s, i)
    local depth = 0
    while true do
        local at = s:find('["{}%[%]]', i)
        if not at then return nil end
        local c = s:sub(at, at)
        i = at + 1
        if c == '"' then
            while true do
                i = s:find('["\\]', i)
                if not i then return nil end
                if s:sub(i, i) == '"' then break end
                i = i + 2
            end
            i = i + 1
        elseif c == "{" or c == "[" then
            depth = depth + 1
        else
            depth = depth - 1
            if depth == 0 then return i end
        end
    end
end

-- Definitions --------------------------------------------------------------------------------------------------------

local known = {
    name = "string", description = "string", parameters = "table|string", run = "function", timeout = "number",
}

local function ordered(t, first)
    local keys, seen = {}, {}
    for _, k in ipairs(first) do
        if t[k] ~= nil then
            keys[#keys + 1] = k
            seen[k] = true
        end
    end
    local rest = {}
    for k in pairs(t) do
        if not seen[k] then rest[#rest + 1] = k end
    end
    table.sort(rest, function(a, b) return tostring(a) < tostring(b) end)
    table.move(rest, 1, #rest, #keys + 1, keys)
    return template.dict(t, keys)
end

local function schema_of(call, name, parameters)
    if type(parameters) == "string" then
        local value, err = M.decode(parameters)
        if type(value) ~= "table" then
            errors.raise(call, ("tool '%s': parameters are no JSON object: %s"):format(name, err or type(value)))
        end
        return value
    end
    local schema = {}
    for k, v in pairs(parameters or {}) do schema[k] = v end
    schema.type = schema.type or "object"
    if schema.type ~= "object" then
        errors.raise(call, ("tool '%s': parameters: a schema of type \"object\" expected, got '%s'"):format(name,
            tostring(schema.type)))
    end
    schema.properties = ordered(schema.properties or {}, schema.required or {})
    if schema.required and #schema.required == 0 then schema.required = nil end
    return ordered(schema, { "type", "properties", "required" })
end

--- Checks a table of tools: a list, or name -> tool; a tool is { name, description, parameters (a JSON schema, as a
--- table or as text), run = function(arguments, context), timeout }. Returns a list of { name, run, timeout, schema,
--- spec = what templates get } and a map by name.
---@param call string
---@param tools table
function M.define(call, tools)
    if type(tools) ~= "table" then errors.raise(call, ("tools: table expected, got %s"):format(type(tools))) end
    local names, list, by_name = {}, {}, {}
    for k in pairs(tools) do names[#names + 1] = k end
    table.sort(names, function(a, b)
        if type(a) == type(b) and type(a) ~= "table" then return a < b end
        return tostring(a) < tostring(b)
    end)
    for _, key in ipairs(names) do
        local t = tools[key]
        local name = type(key) == "string" and key or type(t) == "table" and t.name
        if type(t) == "function" then t = { run = t } end
        if type(t) ~= "table" or type(name) ~= "string" then
            errors.raise(call, ("tools[%s]: a table with name and run expected"):format(tostring(key)))
        end
        require("llmrun.options").check(("%s: tool '%s'"):format(call, name), t, known, 3)
        if not name:find("^[%a_][%w_.-]*$") or #name > 64 then
            errors.raise(call, ("tool '%s': a name of letters, digits and _ expected"):format(name))
        elseif not t.run then
            errors.raise(call, ("tool '%s': run: function expected, got nil"):format(name))
        elseif by_name[name] then
            errors.raise(call, ("two tools are called '%s'"):format(name))
        end
        local def = { name = name, run = t.run, timeout = t.timeout, schema = schema_of(call, name, t.parameters) }
        local meta = getmetatable(def.schema.properties)
        def.order = type(meta) == "table" and meta.__keys or {} -- of arguments that are given without a name
        local f = { name = name, description = t.description or "", parameters = def.schema }
        def.spec = template.dict { { "type", "function" },
            { "function", ordered(f, { "name", "description", "parameters" }) } }
        list[#list + 1], by_name[name] = def, def
    end
    if #list == 0 then errors.raise(call, "the table of tools is empty") end
    return list, by_name
end

--- What a template gets as its variable `tools`.
function M.specs(list)
    local specs = {}
    for i, def in ipairs(list) do specs[i] = def.spec end
    return specs
end

-- Reading calls ------------------------------------------------------------------------------------------------------

--- A call from an object { name, arguments or parameters, id }; nil if it is none.
local function call_of(v, raw)
    if type(v) ~= "table" then return nil end
    if type(v["function"]) == "table" then v = v["function"] end
    local args = v.arguments
    if args == nil then args = v.parameters end
    if type(v.name) ~= "string" then return nil end
    if type(args) == "string" then -- some models write the arguments as a text of JSON
        local inner, err = M.decode(args)
        if type(inner) ~= "table" then
            return { name = v.name, raw = raw, error = "the arguments are no JSON object: " .. (err or type(inner)) }
        end
        args = inner
    end
    if args == nil or args == require("cjson").null then args = template.dict {} end
    if type(args) ~= "table" then
        return { name = v.name, raw = raw, error = ("the arguments are no object but a %s"):format(type(args)) }
    end
    return { name = v.name, arguments = args, raw = raw, id = type(v.id) == "string" and v.id or nil }
end

local function read_json_call(raw)
    local v, err = M.decode(raw)
    if v == nil then return { raw = raw, error = "the call is no JSON: " .. err } end
    return call_of(v, raw) or { raw = raw, error = "an object with name and arguments expected" }
end

--- The answer without a block of thoughts before it: calls in there don't count.
-- Without blanks at both ends. A pattern that does it at once looks at all blanks again from each place.
local function trim(s)
    local first = s:find "%S"
    return first and s:match("^.*%S", first) or ""
end

-- What stands in an answer that is nothing but a block of JSON, with or without its fence.
local function unfenced(s)
    s = trim(s)
    local inner = s:match "^```json(.*)```$"
    return inner and trim(inner) or s
end

local function behind_thoughts(text)
    local _, last = text:find("^.*</think>")
    if last then return text:sub(last + 1), text:sub(1, last) end
    if text:find("^%s*<think>") then return "", text end
    return text, ""
end

local function tool_lines(defs)
    local lines = {}
    for i, def in ipairs(defs) do lines[i] = M.encode(def.spec) end
    return table.concat(lines, "\n")
end

-- Formats ------------------------------------------------------------------------------------------------------------

local formats = {}
M.formats = formats

-- Hermes and Qwen: <tool_call>{"name": ..., "arguments": ...}</tool_call>, any number, text around them. Small models
-- leave the marks out: an answer that is nothing but calls of tools that there are counts too.
formats.hermes = { special = false, stop = { "<tool_response>" }, open = '<tool_call>\n{"name": "' }

function formats.hermes.prompt(defs)
    return "You can call these functions, described one a line:\n<tools>\n" .. tool_lines(defs)
        .. "\n</tools>\n\nTo call one, write exactly this and then stop; the result will be given to you:\n"
        .. "<tool_call>\n{\"name\": \"<function>\", \"arguments\": {...}}\n</tool_call>"
end

local llama_objects

local function bare_calls(answer, defs)
    local body = unfenced(answer)
    local found = defs and body:sub(1, 1) == "{" and llama_objects(body)
    for _, call in ipairs(found or {}) do
        if not defs[call.name] then return nil end
        call.bare = true
    end
    return found and #found > 0 and found or nil
end

function formats.hermes.parse(text, defs)
    local answer, thoughts = behind_thoughts(text)
    local calls, rest, at = {}, {}, 1
    while true do
        local from, to = answer:find("<tool_call>%s*", at)
        if not from then break end
        rest[#rest + 1] = answer:sub(at, from - 1)
        local behind = answer:sub(to + 1, to + 1) == "{" and json_end(answer, to + 1)
        local stop, stop_end = answer:find("</tool_call>", behind or to + 1, true)
        local raw = trim(answer:sub(to + 1, (behind or stop or #answer + 1) - 1))
        calls[#calls + 1] = read_json_call(raw)
        if stop and behind and answer:sub(behind, stop - 1):find("%S") then stop = nil end
        at = stop and stop_end + 1 or behind or #answer + 1
    end
    local bare = #calls == 0 and bare_calls(answer, defs)
    if bare then return bare, thoughts end
    rest[#rest + 1] = answer:sub(at)
    return calls, thoughts .. table.concat(rest)
end

function formats.hermes.result(text) return "<tool_response>\n" .. text .. "\n</tool_response>" end

-- Llama 3: the whole answer is {"name": ..., "parameters": ...}, or several with ";" between, perhaps behind
-- <|python_tag|>; or <function=name>{...}</function>; or name.call(a="x") of the built-in tools.
formats.llama3 = { special = true, stop = {}, open = '{"name": "' }

function formats.llama3.prompt(defs)
    return "You can call these functions, described one a line:\n\n" .. tool_lines(defs)
        .. "\n\nTo call one, answer with nothing but a JSON object of this form; the result will be given to you:\n"
        .. "{\"name\": \"<function>\", \"parameters\": {...}}"
end

function llama_objects(text)
    local calls, i = {}, 1
    while true do
        i = text:match("^[%s;,]*()", i)
        if i > #text then return calls end
        if text:sub(i, i) ~= "{" then return nil end
        local behind = json_end(text, i)
        local raw = text:sub(i, behind and behind - 1)
        local v = behind and M.decode(raw)
        local call = v and call_of(v, raw)
        if call and (v.arguments == nil and v.parameters == nil and v["function"] == nil) then return nil end
        if not call then
            if not raw:find('^{%s*"name"') and not raw:find('^{%s*"type"%s*:%s*"function"') then return nil end
            calls[#calls + 1] = read_json_call(raw)
            return calls
        end
        calls[#calls + 1] = call
        i = behind
    end
end

function formats.llama3.parse(text)
    local before, tagged = text:match("^(.-)<|python_tag|>(.*)$")
    local body = (tagged or text):gsub("<|eo[mt]_id|>", "")
    body = trim(body)
    local calls, rest = {}, {}
    local at = 1
    while true do
        local from, to, name = body:find("<function=([%w_.-]+)>", at)
        if not from then break end
        local stop, stop_end = body:find("</function>", to + 1, true)
        rest[#rest + 1] = body:sub(at, from - 1)
        local raw = body:sub(to + 1, (stop or #body + 1) - 1)
        local args, err = M.decode(raw)
        calls[#calls + 1] = type(args) == "table" and { name = name, arguments = args, raw = raw }
            or { name = name, raw = raw, error = "the arguments are no JSON object: " .. (err or type(args)) }
        at = (stop_end or #body) + 1
    end
    if #calls > 0 then return calls, (before or "") .. table.concat(rest) .. body:sub(at) end
    local found = llama_objects(body)
    if found and #found > 0 then return found, before or "" end
    if tagged then
        local name, inner = body:match("^([%w_]+)%.call(%(.*%))$")
        local list = name and python.calls(name .. inner)
        if list then return { { name = name, arguments = list[1].named, raw = body } }, before end
        return { { raw = body, error = "no call could be read behind <|python_tag|>" } }, before
    end
    return {}, text
end

function formats.llama3.result(text) return text end

-- Mistral: [TOOL_CALLS] and a list of {"name", "arguments", "id"}; later models write name[ARGS]{...} instead.
formats.mistral = { special = true, stop = {}, open = '[TOOL_CALLS] [{"name": "' }

function formats.mistral.prompt(defs)
    return "You can call these functions, described one a line:\n\n" .. tool_lines(defs)
        .. "\n\nTo call some, answer with nothing but [TOOL_CALLS] and a JSON list; the results will be given to you:\n"
        .. "[TOOL_CALLS] [{\"name\": \"<function>\", \"arguments\": {...}}]"
end

local function mistral_list(body)
    local behind = json_end(body, 1)
    local raw = body:sub(1, behind and behind - 1)
    local v, err = M.decode(raw)
    if type(v) ~= "table" then return { { raw = raw, error = "the list of calls is no JSON: " .. (err or "") } } end
    local calls = {}
    for i, item in ipairs(v) do
        local text = M.encode(item)
        calls[i] = call_of(item, text) or { raw = text, error = "an object with name and arguments expected" }
    end
    return calls, behind
end

function formats.mistral.parse(text)
    local before, body = text:match("^(.-)%[TOOL_CALLS%]%s*(.*)$")
    if not body then
        -- the token may have been left out of the text
        local list = text:match('^%s*(%[%s*{%s*"name"%s*:.*)$')
        if not list then return {}, text end
        return mistral_list(list), ""
    end
    if body:sub(1, 1) == "[" then return mistral_list(body), before end
    local calls = {}
    for part in (body .. "[TOOL_CALLS]"):gmatch("(.-)%[TOOL_CALLS%]") do
        part = trim(part)
        local name, tail = part:match("^([%w_.-]+)(.*)$")
        local id = tail and tail:match("^%[CALL_ID%]([%w]+)")
        local args = tail and (tail:match("%[ARGS%]%s*({.*)$") or tail:match("^%s*({.*)$"))
        local v = args and M.decode(args)
        if type(v) == "table" then
            calls[#calls + 1] = { name = name, arguments = v, raw = part, id = id }
        elseif part ~= "" then
            calls[#calls + 1] = { name = name, raw = part, error = "the arguments are no JSON object" }
        end
    end
    return calls, before
end

function formats.mistral.result(text) return "[TOOL_RESULTS] " .. text .. "[/TOOL_RESULTS]" end

-- Gemma: Python, in a fence ```tool_code; or a bare list of calls; or JSON as Llama's.
formats.gemma = { special = false, stop = { "```tool_output" }, open = "```tool_code\n" }

function formats.gemma.prompt(defs)
    return "You can call these functions, described one a line:\n" .. tool_lines(defs)
        .. "\n\nTo call one, write a block like this and then stop; the result will be given to you:\n"
        .. "```tool_code\nfunction_name(argument=\"value\")\n```"
end

local function python_calls(raw, defs)
    local list, err = python.calls(raw)
    if not list then return { { raw = raw, error = "the call can't be read: " .. err } } end
    local calls = {}
    for i, c in ipairs(list) do
        local def = defs and defs[c.name]
        local order = def and def.order or {}
        local call, args = { name = c.name, raw = raw }, c.named
        for k, v in ipairs(c.placed) do
            if not order[k] then
                call.error = "arguments with their names expected: name=value"
                break
            end
            args[order[k]] = v
        end
        if not call.error then call.arguments = args end
        calls[i] = call
    end
    return calls
end

function formats.gemma.parse(text, defs)
    local calls, rest, at = {}, {}, 1
    while true do
        local from, to = text:find("```tool_code[ \t]*\n", at)
        if not from then break end
        rest[#rest + 1] = text:sub(at, from - 1)
        local stop, stop_end = text:find("\n?```", to + 1)
        local list = python_calls(text:sub(to + 1, (stop or #text + 1) - 1), defs)
        table.move(list, 1, #list, #calls + 1, calls)
        at = (stop_end or #text) + 1
    end
    rest[#rest + 1] = text:sub(at)
    if #calls > 0 then return calls, table.concat(rest) end
    local body = unfenced(text)
    local found = body:sub(1, 1) == "{" and llama_objects(body)
    if found and #found > 0 then return found, "" end
    if body:find("^%[%s*[%a_][%w_.]*%s*%(") then
        local list = python_calls(body, defs)
        local all_known = true
        for _, c in ipairs(list) do all_known = all_known and (c.name == nil or not defs or defs[c.name] ~= nil) end
        if all_known then return list, "" end
    end
    return {}, text
end

function formats.gemma.result(text) return "```tool_output\n" .. text .. "\n```" end

for name, f in pairs(formats) do f.name = name end

--- The format of that name, or a table of one's own.
function M.format(call, what)
    if type(what) == "table" then
        for _, k in ipairs { "prompt", "parse", "result" } do
            if type(what[k]) ~= "function" then
                errors.raise(call, ("format: a function %s expected, got %s"):format(k, type(what[k])))
            end
        end
        return what
    end
    if not formats[what] then
        errors.raise(call, ("unknown format '%s'; valid: %s"):format(tostring(what),
            table.concat(tables.sorted_keys(formats), ", ")))
    end
    return formats[what]
end

--- Which format a model wants, from the text that its template makes of tools (nil: the template knows none) and its
--- vocabulary.
function M.guess(vocab, text)
    if text then
        if text:find("[AVAILABLE_TOOLS]", 1, true) then return formats.mistral end
        if text:find("<tool_call>", 1, true) or text:find("<tools>", 1, true) then return formats.hermes end
    end
    if vocab:find "[TOOL_CALLS]" and text then return formats.mistral end
    if vocab:find "<|python_tag|>" or text and text:find('"parameters": ...', 1, true) then return formats.llama3 end
    if vocab:find "<start_of_turn>" then return formats.gemma end
    return formats.hermes
end

return M
