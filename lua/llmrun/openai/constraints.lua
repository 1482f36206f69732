--- What a request wants its answer to look like: response_format, the guided_* and structured_outputs fields of vLLM,
--- regex, json_schema and ebnf of SGLang, grammar and json_schema of llama.cpp, and tools that must be called. It is
--- kept exactly, or refused: never left aside.

local constrain = require "llmrun.constrain"
local fields = require "llmrun.openai.fields"
local json = require "llmrun.json"
local loop = require "llmrun.loop"
local toolcalls = require "llmrun.openai.toolcalls"

local M = {}

local MAX_GRAMMAR = 1 << 20 -- bytes; making its automaton takes 0.1 s at most, while which nobody else is served

local function set(o, param, kind, value)
    if o.constraint then
        fields.bad(param, ("%s is given already; one is enough"):format(o.constraint.param))
    end
    o.constraint = { param = param, kind = kind, value = value }
end

local function schema_of(param, v)
    if type(v) == "string" then
        local value, err = json.decode(v, { ordered = true })
        if err then fields.bad(param, "no valid JSON: " .. err, "invalid_json") end
        v = value
    end
    if type(v) ~= "boolean" and not json.is_object(v) then fields.wrong_type(param, "JSON schema", v) end
    return v
end

local function read_response_format(r, o)
    local f = r:object "response_format"
    if not f then return end
    local fr = fields.reader(f, "response_format.")
    local kind = fr:text "type"
    if not kind then fields.wrong_type("response_format.type", "string", json.null) end
    if kind == "text" then return end
    if kind == "json_object" then return set(o, "response_format", "json", json.object({ type = "object" })) end
    if kind == "json_schema" then
        local js = fr:object "json_schema"
        if not js then fields.wrong_type("response_format.json_schema", "object", json.null) end
        local schema = fields.get(js, "schema")
        if schema == nil then fields.wrong_type("response_format.json_schema.schema", "object", json.null) end
        return set(o, "response_format", "json", schema_of("response_format.json_schema.schema", schema))
    end
    local texts = { grammar = "grammar", regex = "pattern" }
    if texts[kind] then
        local text = fr:text(texts[kind], MAX_GRAMMAR)
        if not text then fields.wrong_type("response_format." .. texts[kind], "string", json.null) end
        return set(o, "response_format", kind, text)
    end
    fields.bad("response_format.type", "one of text, json_object, json_schema, regex, grammar expected, got "
        .. fields.show(kind))
end

local function read_choice_list(param, v)
    local list = {}
    fields.array(param, v, 100000, function(at, item)
        if type(item) ~= "string" then fields.wrong_type(at, "string", item == nil and json.null or item) end
        list[#list + 1] = item
    end)
    if #list == 0 then fields.bad(param, "it is empty") end
    return list
end

local function read_guided(r, o, prefix, at)
    local v = r:get(prefix .. "json")
    if v ~= nil then set(o, at .. prefix .. "json", "json", schema_of(at .. prefix .. "json", v)) end
    v = r:text(prefix .. "regex", 1 << 20)
    if v then set(o, at .. prefix .. "regex", "regex", v) end
    v = r:text(prefix .. "grammar", MAX_GRAMMAR)
    if v then set(o, at .. prefix .. "grammar", "grammar", v) end
    v = r:get(prefix .. "choice")
    if v ~= nil then set(o, at .. prefix .. "choice", "choices", read_choice_list(at .. prefix .. "choice", v)) end
    if r:boolean(prefix .. "json_object") then
        set(o, at .. prefix .. "json_object", "json", json.object({ type = "object" }))
    end
    if r:get(prefix .. "structural_tag") ~= nil then
        fields.bad(at .. prefix .. "structural_tag", "not supported", "unsupported_parameter")
    end
end

--- Asks for it of s:gen; refused at once if it can't be kept.
local function put(o, model)
    local c = o.constraint
    o.gen[c.kind] = c.value
    local grammar, text = loop.breathing(constrain.compile, c.kind, o.gen, model)
    if not grammar then fields.bad(c.param, (text:gsub("^" .. c.kind .. ": ", ""))) end
end

--- Reads all such fields into o.constraint and o.gen.
function M.read(r, model, o)
    read_response_format(r, o)
    read_guided(r, o, "guided_", "")
    local so = r:object "structured_outputs"
    if so then read_guided(fields.reader(so, "structured_outputs."), o, "", "structured_outputs.") end
    local v = r:text("regex", 1 << 20)
    if v then set(o, "regex", "regex", v) end
    for _, name in ipairs { "ebnf", "grammar" } do
        v = r:text(name, MAX_GRAMMAR)
        if v then set(o, name, "grammar", v) end
    end
    v = r:get "json_schema"
    if v ~= nil then set(o, "json_schema", "json", schema_of("json_schema", v)) end
    if o.constraint then put(o, model) end
    if o.choice == "required" or type(o.choice) == "table" then
        if o.constraint then fields.bad("tool_choice", "not together with " .. o.constraint.param) end
        o.forced = true
    elseif o.constraint then
        o.tools = nil -- an answer of that form holds no calls
    end
end

-- Calls that must come ----------------------------------------------------------------------------------------------

-- How models of a family write a call, per format of tools.lua: what stands before its JSON, the name of the
-- arguments in it, whether it is an item of a list, what stands behind it where marks are text.
local forms = {
    hermes = { before = "<tool_call>\n", arguments = "arguments", after = "\n</tool_call>" },
    llama3 = { before = "", arguments = "parameters" },
    mistral = { before = "[TOOL_CALLS] ", arguments = "arguments", list = true },
    gemma = { before = "", arguments = "parameters" },
}

--- The schema of a tool's arguments as a part of a larger one: its references stay its own.
local function arguments_schema(def, i)
    local given = def.schema or json.object { type = "object", additionalProperties = false }
    local schema, keys = {}, json.keys(given)
    for _, k in ipairs(keys) do schema[k] = given[k] end
    if schema["$id"] == nil then
        schema["$id"] = "llmrun:tools/" .. i
        table.insert(keys, 1, "$id")
    end
    if schema.type == nil and schema["$ref"] == nil then
        schema.type = "object"
        keys[#keys + 1] = "type"
    end
    return json.object(schema, keys)
end

local function call_schema(def, i, form)
    local order = { "name", form.arguments }
    local call = json.object({
        type = "object", additionalProperties = false, required = json.array { "name", form.arguments },
        properties = json.object({
            name = json.object { const = def.name }, [form.arguments] = arguments_schema(def, i),
        }, order),
    }, { "type", "properties", "required", "additionalProperties" })
    if not form.list then return call end
    return json.object({ type = "array", items = call, minItems = 1, maxItems = 1 })
end

--- Refuses the tool whose arguments can't be held to its schema.
local function refuse(o, which, form, text)
    for i, def in ipairs(o.tools) do
        if which(def) then
            local ok, why = loop.breathing(constrain.compile, "json", { json = call_schema(def, i, form) })
            if not ok then
                local place = why:gsub("^json: ", ""):gsub("#/properties/" .. form.arguments, "#", 1)
                fields.bad(("tools[%d].function.parameters"):format(i - 1), place)
            end
        end
    end
    fields.bad("tools", text)
end

--- A call that must come: the answer is the JSON of one call and nothing else, behind what a model of the family puts
--- before it.
function M.prepare(model, o)
    if not o.forced then return end
    local form, any = forms[o.style.format.name] or forms.hermes, json.array()
    local function which(def) return o.choice == "required" or def.name == o.choice.name end
    for i, def in ipairs(o.tools) do
        if which(def) then any[#any + 1] = call_schema(def, i, form) end
    end
    o.form, o.gen.json = form, #any == 1 and any[1] or json.object { anyOf = any }
    local ok, text = loop.breathing(constrain.compile, "json", o.gen, model)
    if not ok then refuse(o, which, form, text) end
    if form.before ~= "" then
        for _, id in ipairs(model:tokenize(form.before, { special = true, bos = false })) do o.ids[#o.ids + 1] = id end
    end
end

--- Calls that may come: what stands between the marks is held to the tools' schemas, where the family's marks are text
--- and the schemas can be kept.
function M.prepare_auto(model, o)
    local form = forms[o.style.format.name]
    if not form or not form.after then return end
    local mark = model.vocab:find(form.before:match "^[^\n]+")
    if mark and model.vocab:kind(mark) == "control" then return end
    local any = json.array()
    for i, def in ipairs(o.tools) do any[i] = call_schema(def, i, form) end
    local spec = { open = form.before, close = form.after, json = json.object { anyOf = any },
        most = o.one_call and 1 or nil }
    if loop.breathing(constrain.compile, "tagged", { tagged = spec }, model) then
        o.gen.tagged = spec
        return
    end
    for i, def in ipairs(o.tools) do
        if def.strict then refuse(o, function(d) return d == def end, form, ("tools[%d]"):format(i - 1)) end
    end
end

--- Reads such an answer as it comes.
function M.reader(o) return toolcalls.forced(o.form) end

return M
