--- What a request wants its answer to look like: response_format, the guided_* and structured_outputs fields of vLLM,
--- regex, json_schema and ebnf of SGLang, and tools that must be called. It is kept exactly, or refused: never left
--- aside.

local fields = require "llmrun.openai.fields"
local json = require "llmrun.json"

local M = {}

--- Whether s:gen takes constraints in this build.
local function supported() return require("llmrun.session").constraints == true end

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
    if kind == "grammar" then return set(o, "response_format", "grammar", fr:text "grammar") end
    if kind == "regex" then return set(o, "response_format", "regex", fr:text "pattern") end
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
    v = r:text(prefix .. "grammar", 1 << 22)
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

local function put(o)
    local c = o.constraint
    if not supported() then
        fields.bad(c.param, "constrained answers are not supported by this build", "unsupported_parameter")
    end
    o.gen[c.kind] = c.value
end

--- Reads all such fields into o.constraint and o.gen.
function M.read(r, _, o)
    read_response_format(r, o)
    read_guided(r, o, "guided_", "")
    local so = r:object "structured_outputs"
    if so then read_guided(fields.reader(so, "structured_outputs."), o, "", "structured_outputs.") end
    local v = r:text("regex", 1 << 20)
    if v then set(o, "regex", "regex", v) end
    v = r:text("ebnf", 1 << 22)
    if v then set(o, "ebnf", "grammar", v) end
    v = r:get "json_schema"
    if v ~= nil then set(o, "json_schema", "json", schema_of("json_schema", v)) end
    if o.constraint then put(o) end
    if o.choice == "required" or type(o.choice) == "table" then
        if o.constraint then fields.bad("tool_choice", "not together with " .. o.constraint.param) end
        o.forced = true
        if not supported() then
            fields.bad("tool_choice", "calls that must be made are not supported by this build",
                "unsupported_parameter")
        end
    elseif o.constraint then
        o.tools = nil -- an answer of that form holds no calls
    end
end

local no_arguments = json.object({ type = "object", additionalProperties = false })

local function call_schema(def)
    return json.object({
        type = "object", additionalProperties = false, required = json.array { "name", "arguments" },
        properties = json.object({
            name = json.object { const = def.name },
            arguments = def.schema or no_arguments,
        }, { "name", "arguments" }),
    }, { "type", "properties", "required", "additionalProperties" })
end

--- A call that must come: the answer is the JSON of the call and nothing else.
function M.prepare(_, o)
    if not o.forced then return end
    local any = json.array()
    for _, def in ipairs(o.tools) do
        if o.choice == "required" or def.name == o.choice.name then any[#any + 1] = call_schema(def) end
    end
    o.gen.json = #any == 1 and any[1] or json.object { anyOf = any }
end

--- The call that a forced answer is; none if it was cut short.
function M.calls(_, r)
    local call = json.decode(r.text, { ordered = true })
    if not call then return {} end
    return { { id = require("llmrun.openai.toolcalls").id(), name = call.name, arguments =
        json.encode(call.arguments) } }
end

return M
