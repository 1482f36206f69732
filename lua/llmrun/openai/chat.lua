--- POST /v1/chat/completions: messages through the model's chat template, and what the assistant says: text, or calls
--- of tools.

local choices = require "llmrun.openai.choices"
local constraints = require "llmrun.openai.constraints"
local fields = require "llmrun.openai.fields"
local json = require "llmrun.json"
local messages = require "llmrun.openai.messages"
local sampling = require "llmrun.openai.sampling"
local scripts = require "llmrun.openai.scripts"
local toolcalls = require "llmrun.openai.toolcalls"

local M = {}

local function template_vars(r)
    local vars = {}
    local more = r:object "chat_template_kwargs"
    for _, k in ipairs(more and json.keys(more) or {}) do vars[k] = more[k] end
    vars.messages, vars.tools = nil, nil
    local add = r:boolean "add_generation_prompt"
    if add ~= nil then vars.add_generation_prompt = add end
    local effort = r:text("reasoning_effort", 32)
    if effort then vars.reasoning_effort = effort end
    return vars
end

local function refuse_unknown(r)
    for _, name in ipairs { "functions", "function_call", "audio", "chat_template", "web_search_options" } do
        if r:get(name) ~= nil then fields.bad(name, "not supported", "unsupported_parameter") end
    end
    local kinds = r:array "modalities"
    for _, kind in ipairs(kinds or {}) do
        if kind ~= "text" then fields.bad("modalities", "this model gives text only", "unsupported_parameter") end
    end
    for _, name in ipairs { "continue_final_message", "echo" } do
        if r:boolean(name) then fields.bad(name, "not supported", "unsupported_parameter") end
    end
end

local function read_logprobs(r, limits, gen)
    local on = r:boolean "logprobs"
    local top = r:integer("top_logprobs", 0, limits.logprobs)
    if top and not on then fields.bad("top_logprobs", "only together with logprobs = true") end
    if on then gen.logprobs = top or 0 end
    return on
end

--- What the tools of a request ask of the answer: nothing, text that may hold calls, or one call that must come.
local function read_tools(o, r, limits)
    local list, by_name = messages.read_tools(r:get "tools", limits)
    local choice, allowed = messages.read_choice(r:get "tool_choice", by_name)
    list, by_name = messages.only_allowed(list, by_name, allowed)
    o.one_call = r:boolean "parallel_tool_calls" == false
    if choice == "none" then return end
    o.tools, o.by_name, o.choice = list, by_name, choice
end

--- Reads a request: everything is checked before anything is done for it.
function M.read(api, r, model)
    local o = sampling.read(r, model, api.limits, 1)
    refuse_unknown(r)
    o.logprobs = read_logprobs(r, api.limits, o.gen)
    o.messages = messages.read(r:get "messages", api.limits)
    read_tools(o, r, api.limits)
    o.vars = template_vars(r)
    constraints.read(r, model, o)
    sampling.check_work(api.limits, o.n, o.max_tokens)
    return o
end

--- Makes the prompt of a request that has been read.
function M.prepare(model, o, param)
    o.ids, o.prompt, o.style = choices.guarded(messages.prompt, model, o.messages, o.tools, o.vars,
        o.text_bytes, param)
    o.ids = choices.truncate(model, o.ids, o.truncate)
    constraints.prepare(model, o)
    if o.tools and not o.forced then constraints.prepare_auto(model, o) end
    choices.check_length(model, #o.ids, param or "messages", o.max_tokens)
    if o.tools and not o.forced and o.style.format.special then o.gen.special = true end
end

--- The end of an answer that is a call: its calls and finish.
local function finish_forced(r, reader, on_call)
    local more, cut = reader:finish()
    if on_call and more ~= "" then on_call(reader.call, more) end
    r.rest, r.calls = "", { reader.call }
    r.finish = cut and choices.finish_reason(r) or "tool_calls"
end

--- Runs choice k on session s. show(text, records), if given, gets text as soon as it can be shown; on_call(call, text)
--- likewise the arguments of a call that must come (else they are in the result alone). Returns the result with rest
--- (the text not yet shown), calls, finish and records (those not yet shown). count(tokens), if given, is told before
--- each piece of text how many tokens there are.
function M.run_choice(model, s, o, k, show, on_call, count)
    local gen = {}
    for name, v in pairs(o.gen) do gen[name] = v end
    gen.seed = o.seed + k - 1
    local script <close> = o.script and o.script:start() or nil
    local splitter = show and o.tools and not o.forced and toolcalls.new(o.style.format, o.by_name, o.one_call) or nil
    local waiting, reader = {}, o.forced and constraints.reader(o) or nil
    local r = choices.run(model, s, gen, show and function(text, records, tokens)
        if count then count(tokens) end
        if records then table.move(records, 1, #records, #waiting + 1, waiting) end
        if reader then
            local call, more = reader:push(text)
            if call and on_call then on_call(call, more) end
            return
        end
        if splitter then text = splitter:push(text) end
        if text == "" and #waiting == 0 then return end
        show(text, waiting)
        waiting = {}
    end or nil, script)
    if reader then
        if not show then reader:push(r.text) end
        finish_forced(r, reader, on_call)
    elseif splitter then
        r.rest, r.calls = splitter:finish()
    elseif o.tools then
        r.calls, r.rest = toolcalls.parse(r.text, o.style.format, o.by_name, o.one_call)
    else
        r.calls, r.rest = {}, show and "" or r.text
    end
    if o.include_stop and r.stop then r.rest = r.rest .. r.stop end
    r.finish = r.finish or #r.calls > 0 and "tool_calls" or choices.finish_reason(r)
    r.records = table.move(r.records or {}, 1, #(r.records or {}), #waiting + 1, waiting)
    return r
end

--- Runs all choices: run(session, k) for each, side by side.
function M.run_all(model, o, run)
    local close <close> = setmetatable({}, { -- luacheck: ignore 211
        __close = function(list)
            for _, s in ipairs(list) do s:close() end
        end,
    })
    local sessions, cached = choices.sessions(model, o.ids, o.n, o, close)
    local results = choices.all(o.n, function(k) return run(sessions[k], k) end)
    results.cached = cached
    return results
end

-- Answers ------------------------------------------------------------------------------------------------------------

local call_keys, function_keys = { "index", "id", "type", "function" }, { "name", "arguments" }

local function call_object(c, index)
    return json.object({
        index = index, id = c.id, type = "function",
        ["function"] = json.object({ name = c.name, arguments = c.arguments }, function_keys),
    }, call_keys)
end

local message_keys = { "role", "content", "refusal", "tool_calls" }
local choice_keys = { "index", "message", "delta", "logprobs", "finish_reason", "stop_reason" }
local body_keys = { "id", "object", "created", "model", "choices", "usage", "system_fingerprint" }

local function whole_choice(o, r, index)
    local message = { role = "assistant", content = r.rest, refusal = json.null }
    if #r.calls > 0 then
        if r.rest == "" then message.content = json.null end
        message.tool_calls = json.array()
        for i, c in ipairs(r.calls) do message.tool_calls[i] = call_object(c) end
    end
    return json.object({
        index = index, message = json.object(message, message_keys),
        logprobs = o.logprobs and choices.chat_logprobs(r.records) or json.null, finish_reason = r.finish,
        stop_reason = choices.stop_reason(r, o.gen),
    }, choice_keys)
end

local function whole(model, o, name)
    local list = json.array()
    local results = M.run_all(model, o, function(s, k) return M.run_choice(model, s, o, k) end)
    for k, r in ipairs(results) do list[k] = whole_choice(o, r, k - 1) end
    return json.object({
        id = choices.id "chatcmpl", object = "chat.completion", created = os.time(), model = name, choices = list,
        usage = choices.usage(#o.ids, results), system_fingerprint = "llmrun",
    }, body_keys)
end

--- A text in pieces of some characters.
function M.pieces(text)
    local at = 1
    return function()
        if at > #text then return nil end
        local from = at
        at = math.min(at + 48, #text + 1)
        while at <= #text and text:find("^[\x80-\xbf]", at) do at = at + 1 end
        return text:sub(from, at - 1)
    end
end

local function stream(model, o, name, res)
    local id, created = choices.id "chatcmpl", os.time()
    local usage_field = o.include_usage and json.null or nil
    local function send(list, usage)
        res:event(json.object({
            id = id, object = "chat.completion.chunk", created = created, model = name, choices = list,
            usage = usage or usage_field, system_fingerprint = "llmrun",
        }, body_keys))
    end
    local tokens = {} -- of each choice so far
    local function delta(k, fields_of, records, finish, stop)
        send(json.array { json.object({
            index = k - 1, delta = json.object(fields_of, message_keys),
            logprobs = records and #records > 0 and choices.chat_logprobs(records) or json.null,
            finish_reason = finish or json.null, stop_reason = stop,
        }, choice_keys) }, o.usage_always and choices.usage_so_far(#o.ids, tokens[k] or 0) or nil)
    end
    local function begin_call(k, c, i)
        c.begun = true
        delta(k, { tool_calls = json.array { call_object({ id = c.id, name = c.name, arguments = "" }, i - 1) } })
    end
    local function send_arguments(k, i, text)
        delta(k, { tool_calls = json.array { json.object({
            index = i - 1, ["function"] = json.object { arguments = text },
        }, call_keys) } })
    end
    local function send_calls(k, calls)
        for i, c in ipairs(calls) do
            if not c.begun then
                begin_call(k, c, i)
                for piece in M.pieces(c.arguments) do send_arguments(k, i, piece) end
            end
        end
    end
    local results = M.run_all(model, o, function(s, k)
        delta(k, { role = "assistant", content = "" })
        local r = M.run_choice(model, s, o, k, function(text, records) delta(k, { content = text }, records) end,
            function(c, text)
                if not c.begun then begin_call(k, c, 1) end
                if text ~= "" then send_arguments(k, 1, text) end
            end, function(n) tokens[k] = n end)
        tokens[k] = r.usage.completion_tokens
        if r.rest ~= "" or #r.records > 0 then delta(k, { content = r.rest }, r.records) end
        send_calls(k, r.calls)
        delta(k, {}, nil, r.finish, choices.stop_reason(r, o.gen))
        return r
    end)
    if o.include_usage then send(json.array(), choices.usage(#o.ids, results)) end
    res:event "[DONE]"
end

--- The route function's work.
function M.answer(api, req, res)
    local r = fields.read(req)
    local model, name = api:model(r)
    local o = M.read(api, r, model)
    scripts.read(api, r, req, o)
    M.prepare(model, o)
    api:admit(req, model, o.gen)
    local place <close> = scripts.place(api, o) -- luacheck: ignore 211
    if not o.stream then return whole(model, o, name) end
    stream(model, o, name, res)
end

return M
