--- Messages and tools of a chat request: checked, and put as chat templates take them.
---
--- content is a text or an array of text parts (joined by line ends); developer is the system. Arguments of earlier
--- tool calls are JSON objects, as text or as they are. Where a model's template knows nothing of tools, they are told
--- to it in the system message, and results come as the user's words.

local chat_text = require("llmrun.chat").text
local fields = require "llmrun.openai.fields"
local json = require "llmrun.json"
local loop = require "llmrun.loop"
local tools = require "llmrun.tools"

local M = {}

-- Messages -----------------------------------------------------------------------------------------------------------

local function read_parts(param, parts)
    if #parts == 0 then fields.bad(param, "an empty array; one part at least expected") end
    local texts = {}
    for i, part in ipairs(parts) do
        local at = ("%s[%d]"):format(param, i - 1)
        if not json.is_object(part) then fields.wrong_type(at, "object", part) end
        local r = fields.reader(part, at .. ".")
        local kind = r:get "type"
        if type(kind) ~= "string" then fields.wrong_type(at .. ".type", "string", kind == nil and json.null or kind) end
        local field = kind == "refusal" and "refusal" or "text"
        if kind ~= "text" and kind ~= "refusal" and kind ~= "input_text" and kind ~= "output_text" then
            fields.bad(at .. ".type", ("this model reads text only, not %s"):format(fields.show(kind)),
                "unsupported_content")
        end
        local text = r:text(field)
        if not text then fields.wrong_type(at .. "." .. field, "string", json.null) end
        texts[i] = text
    end
    return table.concat(texts, "\n")
end

--- The text of a message's content; nil if there is none.
function M.read_content(param, v)
    if v == nil then return nil end
    if type(v) == "string" then return v end
    if not json.is_array(v) then fields.wrong_type(param, "string or array of parts", v) end
    return read_parts(param, v)
end

--- The arguments of an earlier call, as an object.
local function read_arguments(param, v)
    if v == nil or v == "" then return json.object({}, {}) end
    if type(v) == "string" then
        local value, err = json.decode(v, { ordered = true })
        if err then fields.bad(param, "no valid JSON: " .. err, "invalid_json") end
        v = value
    end
    if not json.is_object(v) then fields.wrong_type(param, "JSON object", v) end
    return v
end

local call_keys, function_keys = { "id", "type", "function" }, { "name", "arguments" }

local function read_call(param, c)
    if not json.is_object(c) then fields.wrong_type(param, "object", c == nil and json.null or c) end
    local r = fields.reader(c, param .. ".")
    r:choice("type", { "function" })
    local f = r:object "function"
    if not f then fields.wrong_type(param .. ".function", "object", json.null) end
    local fr = fields.reader(f, param .. ".function.")
    local name = fr:text("name", 256)
    if not name then fields.wrong_type(param .. ".function.name", "string", json.null) end
    return json.object({
        id = r:text("id", 256), type = "function",
        ["function"] = json.object({ name = name, arguments = read_arguments(param .. ".function.arguments",
            fr:get "arguments") }, function_keys),
    }, call_keys)
end

local roles = { "system", "developer", "user", "assistant", "tool", "function" }

local function read_message(param, m)
    if not json.is_object(m) then fields.wrong_type(param, "object", m == nil and json.null or m) end
    local r = fields.reader(m, param .. ".")
    local role = r:choice("role", roles)
    if not role then fields.wrong_type(param .. ".role", "string", json.null) end
    local content = M.read_content(param .. ".content", r:get "content")
    local out = { role = role, content = content, name = r:text("name", 256) }
    if role == "developer" then out.role = "system" end
    if role == "function" then out.role = "tool" end
    if role == "assistant" then
        local calls = r:array("tool_calls", 128)
        if calls and #calls > 0 then
            out.tool_calls = {}
            for i, c in ipairs(calls) do
                out.tool_calls[i] = read_call(("%s.tool_calls[%d]"):format(param, i - 1), c)
            end
        end
        if not out.content and r:get "refusal" then out.content = r:text "refusal" end
        if not out.content and not out.tool_calls then
            fields.bad(param .. ".content", "needed unless there are tool_calls")
        end
        out.reasoning_content = r:text "reasoning_content"
        return out
    end
    if not out.content then fields.wrong_type(param .. ".content", "string", json.null) end
    if role == "tool" then out.tool_call_id = r:text("tool_call_id", 256) end
    return out
end

--- The messages of a request.
---@param v any
---@param limits table
function M.read(v, limits, param)
    param = param or "messages"
    if v == nil then fields.wrong_type(param, "array", json.null) end
    fields.array(param, v, limits.messages)
    if #v == 0 then fields.bad(param, "it is empty") end
    local list, names, bytes = {}, {}, 0
    for i, m in ipairs(v) do
        local out = read_message(("%s[%d]"):format(param, i - 1), m)
        for _, c in ipairs(out.tool_calls or {}) do
            if c.id then names[c.id] = c["function"].name end
        end
        -- templates of some models want the function's name with its result
        bytes = bytes + #(out.content or "")
        if out.role == "tool" and not out.name and out.tool_call_id then out.name = names[out.tool_call_id] end
        list[i] = out
    end
    fields.fits(param, bytes, limits.text_bytes, "bytes of text")
    return list
end

-- Tools --------------------------------------------------------------------------------------------------------------

local function read_tool(param, t, seen, flat)
    if not json.is_object(t) then fields.wrong_type(param, "object", t == nil and json.null or t) end
    local r = fields.reader(t, param .. ".")
    if r:choice("type", { "function" }) == nil then fields.wrong_type(param .. ".type", "string", json.null) end
    local f = flat and t or r:object "function"
    if not f then fields.wrong_type(param .. ".function", "object", json.null) end
    local fr = fields.reader(f, flat and param .. "." or param .. ".function.")
    local name = fr:text("name", 64)
    if not name then fields.wrong_type(fr.prefix .. "name", "string", json.null) end
    if not name:find "^[%w_.-]+$" then
        fields.bad(fr.prefix .. "name", "letters, digits, _, - and . expected, got " .. fields.show(name))
    elseif seen[name] then
        fields.bad(fr.prefix .. "name", ("two tools are called '%s'"):format(name))
    end
    seen[name] = true
    fr:text "description"
    local strict = fr:boolean "strict"
    local schema = fr:object "parameters"
    local properties = schema and fields.get(schema, "properties")
    if properties and not json.is_object(properties) then
        fields.wrong_type(fr.prefix .. "parameters.properties", "object", properties)
    end
    local spec = t
    if flat then
        spec = json.object({ type = "function", ["function"] = json.object({
            name = name, description = fr:get "description", parameters = schema,
        }, { "name", "description", "parameters" }) }, { "type", "function" })
    end
    return {
        name = name, schema = schema, strict = strict, spec = spec, order = properties and json.keys(properties) or {},
    }
end

--- The tools of a request: a list of { name, schema, spec, order }, also by name; nil if there are none. flat: as
--- /v1/responses writes them.
function M.read_tools(v, limits, flat)
    if v == nil then return nil end
    fields.array("tools", v, limits.tools)
    if #v == 0 then return nil end
    local list, by_name, seen = {}, {}, {}
    for i, t in ipairs(v) do
        local def = read_tool(("tools[%d]"):format(i - 1), t, seen, flat)
        list[i], by_name[def.name] = def, def
    end
    return list, by_name
end

--- The names that a tool_choice of type allowed_tools has, and "auto" or "required".
local function read_allowed(r, by_name)
    local inner = r:object "allowed_tools"
    if inner then r = fields.reader(inner, "tool_choice.allowed_tools.") end
    local mode, names = r:choice("mode", { "auto", "required" }), {}
    if not mode then fields.wrong_type(r.prefix .. "mode", "string", json.null) end
    local list = r:array("tools", nil, function(param, item)
        local t = fields.object(param, item)
        local f = t and fields.object(param .. ".function", fields.get(t, "function")) or t
        local name = f and fields.text(param .. ".name", fields.get(f, "name"))
        if not name then fields.wrong_type(param .. ".name", "string", json.null) end
        if not by_name or not by_name[name] then
            fields.bad(param, ("there is no tool %s"):format(fields.show(name)))
        end
        names[name] = true
    end)
    if not list or #list == 0 then fields.bad(r.prefix .. "tools", "there are none") end
    return mode, names
end

--- The tools of a request without those that may not be called (allowed: set of names, nil = all).
function M.only_allowed(list, by_name, allowed)
    if not allowed or not list then return list, by_name end
    local few, few_by_name = {}, {}
    for _, t in ipairs(list) do
        if allowed[t.name] then few[#few + 1], few_by_name[t.name] = t, t end
    end
    return few, few_by_name
end

--- tool_choice: "none", "auto", "required", or the name that must be called as { name }; and the set of names that may
--- be called, if not all.
function M.read_choice(v, by_name)
    if v == nil then return by_name and "auto" or "none" end
    if type(v) == "string" then
        fields.choice("tool_choice", v, { "none", "auto", "required" })
        if not by_name and v == "required" then fields.bad("tool_choice", "there are no tools") end
        return by_name and v or "none"
    end
    if not json.is_object(v) then fields.wrong_type("tool_choice", "string or object", v) end
    local r = fields.reader(v, "tool_choice.")
    local kind = r:choice("type", { "function", "allowed_tools" })
    if kind == "allowed_tools" then return read_allowed(r, by_name) end
    if kind == nil then fields.wrong_type("tool_choice.type", "string", json.null) end
    local f = r:object "function"
    local name = f and fields.reader(f, "tool_choice.function."):text "name" or r:text "name"
    if not name then fields.wrong_type("tool_choice.function.name", "string", json.null) end
    if not by_name or not by_name[name] then
        fields.bad("tool_choice", ("there is no tool %s"):format(fields.show(name)))
    end
    return { name = name }
end

-- Prompts ------------------------------------------------------------------------------------------------------------

--- How a model is told of tools: { format, in_template }. Found out once for each model.
local styles = setmetatable({}, { __mode = "k" })
function M.style(model)
    local style = styles[model]
    if style then return style end
    local spec = json.decode([[{"type":"function","function":{"name":"f","description":"d","parameters":
        {"type":"object","properties":{"x":{"type":"string"}}}}}]], { ordered = true })
    local function render(list)
        local ok, segments = pcall(model.chat.segments, model.chat, "tools", { { role = "user", content = "x" } },
            { add_generation_prompt = true, tools = list })
        return ok and chat_text(segments) or nil
    end
    local with, without = render { spec }, render(nil)
    local text = with and with ~= without and with or nil
    style = { format = tools.guess(model.vocab, text), in_template = text ~= nil }
    styles[model] = style
    return style
end

--- Calls and results as plain text, for templates that know no tools.
local function without_template(list, format, defs)
    local out, results = {}, {}
    local function flush()
        if #results > 0 then out[#out + 1] = { role = "user", content = table.concat(results, "\n") } end
        results = {}
    end
    for _, m in ipairs(list) do
        if m.role == "tool" then
            results[#results + 1] = format.result(m.content, { name = m.name, id = m.tool_call_id })
        else
            flush()
            if m.tool_calls then
                local texts = { m.content }
                for _, c in ipairs(m.tool_calls) do
                    texts[#texts + 1] = "<tool_call>\n" .. json.encode(c["function"]) .. "\n</tool_call>"
                end
                m = { role = "assistant", content = table.concat(texts, "\n") }
            end
            out[#out + 1] = m
        end
    end
    flush()
    if not defs then return out end
    local text = format.prompt(defs)
    if out[1].role == "system" then
        out[1] = { role = "system", content = out[1].content .. "\n\n" .. text }
    else
        table.insert(out, 1, { role = "system", content = text })
    end
    return out
end

--- The prompt of a chat: ids, and its text.
---@param model llmrun.Model
---@param list table[] messages, read
---@param defs table[]? tools, read
---@param vars table? further variables of the template
---@param most integer bytes that its text may have
---@param param string? where a text that is longer is told
function M.prompt(model, list, defs, vars, most, param)
    local style = M.style(model)
    local all = {}
    for k, v in pairs(vars or {}) do all[k] = v end
    if all.add_generation_prompt == nil then all.add_generation_prompt = true end
    if style.in_template and defs then
        all.tools = {}
        for i, d in ipairs(defs) do all.tools[i] = d.spec end
    elseif not style.in_template then
        list = without_template(list, style.format, defs)
    end
    -- a template that joins texts must not meet a content that isn't there
    for i, m in ipairs(list) do
        if m.content == nil then
            local copy = {}
            for k, v in pairs(m) do copy[k] = v end
            copy.content = ""
            list[i] = copy
        end
    end
    local segments = model.chat:segments("messages", list, all)
    local text = chat_text(segments)
    fields.fits(param or "messages", #text, most, "bytes of text")
    return loop.breathing(model.chat.encode, model.chat, "messages", segments), text, style
end

return M
