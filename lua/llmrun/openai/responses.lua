--- POST /v1/responses: the text and function-call part. Answers are not kept: previous_response_id is refused, store
--- counts as false.

local chat = require "llmrun.openai.chat"
local choices = require "llmrun.openai.choices"
local constraints = require "llmrun.openai.constraints"
local fields = require "llmrun.openai.fields"
local json = require "llmrun.json"
local messages = require "llmrun.openai.messages"
local sampling = require "llmrun.openai.sampling"

local M = {}

-- Requests -----------------------------------------------------------------------------------------------------------

--- What the chat's fields are called here.
local names = {
    max_tokens = "max_output_tokens", max_completion_tokens = "max_output_tokens", stream_options = "(none)",
    n = "(none)", logprobs = "(none)", response_format = "(none)",
}

local function read_call(param, item)
    local r = fields.reader(item, param .. ".")
    local name = r:text("name", 256)
    if not name then fields.wrong_type(param .. ".name", "string", json.null) end
    return {
        role = "assistant", tool_calls = { { id = r:text("call_id", 256), type = "function",
            ["function"] = { name = name, arguments = r:get "arguments" } } },
    }
end

local function read_output(param, item)
    local v = fields.get(item, "output")
    if v == nil then fields.wrong_type(param .. ".output", "string", json.null) end
    return {
        role = "tool", content = messages.read_content(param .. ".output", v),
        tool_call_id = fields.reader(item, param .. "."):text("call_id", 256),
    }
end

--- Items as chat messages; calls that stand together are one message.
local function read_items(v, limits)
    local list = {}
    fields.array("input", v, limits.messages, function(param, item)
        if not json.is_object(item) then fields.wrong_type(param, "object", item == nil and json.null or item) end
        local kind = fields.text(param .. ".type", fields.get(item, "type")) or "message"
        local last = list[#list]
        if kind == "message" then
            list[#list + 1] = { role = fields.get(item, "role"), content = fields.get(item, "content") }
        elseif kind == "function_call" then
            local m = read_call(param, item)
            if last and last.role == "assistant" and last.tool_calls then
                table.insert(last.tool_calls, m.tool_calls[1])
            elseif last and last.role == "assistant" then
                last.tool_calls = m.tool_calls
            else
                list[#list + 1] = m
            end
        elseif kind == "function_call_output" then
            list[#list + 1] = read_output(param, item)
        elseif kind ~= "reasoning" then
            fields.bad(param .. ".type", ("%s is not supported"):format(fields.show(kind)), "unsupported_parameter")
        end
    end)
    return list
end

local function read_input(r, limits)
    local v = r:get "input"
    local list
    if type(v) == "string" then
        list = { { role = "user", content = v } }
    elseif json.is_array(v) then
        list = read_items(v, limits)
    else
        fields.wrong_type("input", "string or array", v == nil and json.null or v)
    end
    local instructions = r:text "instructions"
    if instructions then table.insert(list, 1, { role = "system", content = instructions }) end
    for _, m in ipairs(list) do
        if m.tool_calls then json.array(m.tool_calls) end
    end
    return messages.read(json.array(list), limits, "input")
end

--- text = { format = ... } in the words of response_format.
local function read_format(r)
    local text = r:object "text"
    local f = text and fields.reader(text, "text."):object "format"
    if not f then return nil end
    local fr = fields.reader(f, "text.format.")
    local kind = fr:text "type"
    if kind == "json_schema" then
        return json.object { type = kind, json_schema = json.object { schema = fr:get "schema" } }
    end
    return json.object { type = kind }
end

local function refuse_unknown(r)
    for _, name in ipairs { "previous_response_id", "conversation", "prompt" } do
        if r:get(name) ~= nil then fields.bad(name, "not supported: answers are not kept", "unsupported_parameter") end
    end
    if r:boolean "background" then fields.bad("background", "not supported", "unsupported_parameter") end
end

local function read_include(r, o, limits)
    local top = r:integer("top_logprobs", 0, limits.logprobs)
    for _, what in ipairs(r:array("include", 16) or {}) do
        if what == "message.output_text.logprobs" then o.logprobs = true end
    end
    if o.logprobs then o.gen.logprobs = top or 0 end
end

local function read(api, r, model)
    local o = sampling.read(r, model, api.limits, 1)
    refuse_unknown(r)
    o.messages = read_input(r, api.limits)
    local list, by_name = messages.read_tools(r:get "tools", api.limits, true)
    o.asked_choice = r:get "tool_choice"
    local choice, allowed = messages.read_choice(o.asked_choice, by_name)
    list, by_name = messages.only_allowed(list, by_name, allowed)
    o.one_call = r:boolean "parallel_tool_calls" == false
    if choice ~= "none" then o.tools, o.by_name, o.choice = list, by_name, choice end
    read_include(r, o, api.limits)
    constraints.read(fields.reader(json.object { response_format = read_format(r) }), model, o)
    return o
end

-- Answers ------------------------------------------------------------------------------------------------------------

local function id(prefix) return (choices.id(prefix):gsub("-", "_")) end

local function usage_of(o, r)
    local u = choices.usage(#o.ids, { r })
    return json.object({
        input_tokens = u.prompt_tokens, input_tokens_details = u.prompt_tokens_details,
        output_tokens = u.completion_tokens, output_tokens_details = json.object { reasoning_tokens = 0 },
        total_tokens = u.total_tokens,
    }, { "input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens" })
end

local response_keys = {
    "id", "object", "created_at", "status", "error", "incomplete_details", "instructions", "max_output_tokens",
    "model", "output",
}

local function response_object(self, status, output, r)
    local body, o = self.reader.body, self.o
    local function given(name, default)
        local v = fields.get(body, name)
        if v == nil then return default end
        return v
    end
    local cut = status == "incomplete"
    return json.object({
        id = self.id, object = "response", created_at = self.created, status = status, error = json.null,
        incomplete_details = cut and json.object { reason = "max_output_tokens" } or json.null,
        instructions = given("instructions", json.null), max_output_tokens = given("max_output_tokens", json.null),
        model = self.name, output = output, parallel_tool_calls = not o.one_call, previous_response_id = json.null,
        reasoning = json.object { effort = json.null, summary = json.null }, store = false, background = false,
        temperature = given("temperature", 1.0), top_p = given("top_p", 1.0), text = given("text",
            json.object { format = json.object { type = "text" } }),
        tool_choice = given("tool_choice", "auto"), tools = given("tools", json.array()), truncation = "disabled",
        metadata = given("metadata", json.object()), user = given("user", json.null),
        usage = r and usage_of(o, r) or json.null,
    }, response_keys)
end

local function text_part(text, records)
    return json.object({
        type = "output_text", text = text, annotations = json.array(),
        logprobs = records and choices.chat_logprobs(records).content or json.array(),
    }, { "type", "text", "annotations", "logprobs" })
end

local function message_item(item_id, status, content)
    return json.object({ type = "message", id = item_id, status = status, role = "assistant", content = content },
        { "type", "id", "status", "role", "content" })
end

local function call_item(item_id, status, c, arguments)
    return json.object({
        type = "function_call", id = item_id, call_id = c.id, name = c.name, arguments = arguments, status = status,
    }, { "type", "id", "call_id", "name", "arguments", "status" })
end

local function status_of(r) return r.finish == "length" and "incomplete" or "completed" end

local function whole(self, model)
    local o = self.o
    local r = chat.run_all(model, o, function(s, k) return chat.run_choice(model, s, o, k) end)[1]
    local output, status = json.array(), status_of(r)
    if r.rest ~= "" or #r.calls == 0 then
        output[1] = message_item(id "msg", status, json.array { text_part(r.rest, o.logprobs and r.records) })
    end
    for _, c in ipairs(r.calls) do output[#output + 1] = call_item(id "fc", "completed", c, c.arguments) end
    return response_object(self, status, output, r)
end

--- The events of a stream, numbered.
local function sender(res)
    local n = -1
    return function(kind, event)
        n = n + 1
        event.type, event.sequence_number = kind, n
        res:event(json.object(event, { "type", "sequence_number" }), kind)
    end
end

--- The message of a stream: begun when the first text comes.
local function message_stream(send, output, logprobs)
    local self = { text = "", records = {} }
    function self.begin()
        if self.id then return end
        self.id, self.at = id "msg", #output
        output[#output + 1] = message_item(self.id, "in_progress", json.array())
        send("response.output_item.added", { output_index = self.at, item = output[#output] })
        send("response.content_part.added", { item_id = self.id, output_index = self.at, content_index = 0,
            part = text_part "" })
    end
    function self.show(text, records)
        self.begin()
        self.text = self.text .. text
        table.move(records, 1, #records, #self.records + 1, self.records)
        send("response.output_text.delta", { item_id = self.id, output_index = self.at, content_index = 0,
            delta = text, logprobs = logprobs and choices.chat_logprobs(records).content or json.array() })
    end
    function self.finish(status)
        if not self.id then return end
        local part = text_part(self.text, logprobs and self.records)
        local place = { item_id = self.id, output_index = self.at, content_index = 0 }
        send("response.output_text.done", { item_id = place.item_id, output_index = place.output_index,
            content_index = 0, text = self.text, logprobs = part.logprobs })
        send("response.content_part.done", { item_id = place.item_id, output_index = place.output_index,
            content_index = 0, part = part })
        output[self.at + 1] = message_item(self.id, status, json.array { part })
        send("response.output_item.done", { output_index = self.at, item = output[self.at + 1] })
    end
    return self
end

--- More of a call's arguments; the call is begun with the first.
local function send_arguments(send, output, c, text)
    if not c.item then
        c.item, c.at = id "fc", #output
        output[c.at + 1] = call_item(c.item, "in_progress", c, "")
        send("response.output_item.added", { output_index = c.at, item = output[c.at + 1] })
    end
    if text == "" then return end
    send("response.function_call_arguments.delta", { item_id = c.item, output_index = c.at, delta = text })
end

--- The end of a call, and all of it that was not sent as it came.
local function send_call(send, output, c, status)
    if not c.item then
        for piece in chat.pieces(c.arguments) do send_arguments(send, output, c, piece) end
    end
    send("response.function_call_arguments.done", { item_id = c.item, output_index = c.at, name = c.name,
        arguments = c.arguments })
    output[c.at + 1] = call_item(c.item, status, c, c.arguments)
    send("response.output_item.done", { output_index = c.at, item = output[c.at + 1] })
end

local function stream(self, model, res)
    local o, output, send = self.o, json.array(), sender(res)
    send("response.created", { response = response_object(self, "in_progress", output) })
    send("response.in_progress", { response = response_object(self, "in_progress", output) })
    local message = message_stream(send, output, o.logprobs)
    local function on_call(c, text) send_arguments(send, output, c, text) end
    local r = chat.run_all(model, o, function(s, k)
        return chat.run_choice(model, s, o, k, message.show, on_call)
    end)[1]
    if r.rest ~= "" or #r.records > 0 then message.show(r.rest, r.records) end
    if #r.calls == 0 then message.begin() end
    local status = status_of(r)
    message.finish(status)
    for _, c in ipairs(r.calls) do send_call(send, output, c, status) end
    send("response." .. status, { response = response_object(self, status, output, r) })
end

--- The route function's work.
function M.answer(api, req, res)
    local r = fields.read(req, names)
    local model, name = api:model(r)
    local o = read(api, r, model)
    chat.prepare(model, o, "input")
    api:admit(req, model, o.gen)
    local self = { id = id "resp", created = os.time(), name = name, reader = r, o = o }
    if not o.stream then return whole(self, model) end
    stream(self, model, res)
end

return M
