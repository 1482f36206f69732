--- llm.agent: a model that calls tools until it has an answer.
---
---   local agent <close> = llm.agent { model = model, tools = { weather = {
---       description = "The weather in a city now.",
---       parameters = { properties = { city = { type = "string" } }, required = { "city" } },
---       run = function(args) return llm.http.get(...).body end } } }
---   print(agent:run("Do I need an umbrella in Rome?").text)
---
--- A turn is one answer of the model. The calls in it run side by side (where they wait); their results, or what went
--- wrong with them, are the next messages. All of it is one session, so each turn computes only what is new.

local branch = require "llmrun.branch"
local errors = require "llmrun.errors"
local loop = require "llmrun.loop"
local notes = require "llmrun.record.notes"
local options = require "llmrun.options"
local template = require "llmrun.template"
local tools = require "llmrun.tools"
local validate = require "llmrun.validate"

local M = {}

local CALL, RUN = "llm.agent", "agent:run"

---@class llmrun.Agent
---@field session llmrun.Session
---@field format table see tools.lua
local Agent = {}
Agent.__index = Agent

M.options = {
    model = "table", session = "table", system = "string", tools = "table", format = "string|table",
    tool_choice = "string", max_turns = "integer", timeout = "number", tool_timeout = "number",
    concurrency = "integer", gen = "table",
    on_call = "function", on_result = "function", on_turn = "function",
}

--- The text that the template makes of tools, or nil if it makes nothing of them.
local function template_text(chat, specs)
    if not chat:has_template() then return nil end
    local function render(list)
        local vars = { messages = { { role = "user", content = "x" } }, add_generation_prompt = true, tools = list }
        for k, v in pairs(chat.names) do vars[k] = v end
        local ok, segments = pcall(chat.run, vars)
        return ok and segments and require("llmrun.chat").text(segments) or nil
    end
    local with, without = render(specs), render(nil)
    return with and with ~= without and with or nil
end

local function check_options(o)
    options.check(CALL, o, M.options, 3)
    if not o or not (o.model or o.session) or (o.model and o.session) then
        errors.raise(CALL, "either model or session expected")
    elseif not o.tools then
        errors.raise(CALL, "tools expected")
    elseif o.max_turns and o.max_turns < 1 then
        errors.raise(CALL, "max_turns must be at least 1")
    end
    if o.tool_choice and o.tool_choice ~= "auto" and o.tool_choice ~= "required" then
        errors.raise(CALL, ("tool_choice: \"auto\" or \"required\" expected, got '%s'"):format(o.tool_choice))
    end
    for _, name in ipairs { "timeout", "tool_timeout" } do
        if o[name] and o[name] <= 0 then errors.raise(CALL, name .. ": seconds above 0 expected") end
    end
    if o.session and o.system then errors.raise(CALL, "system: the session has its messages already") end
end

--- Makes an agent. Options: model (or session: an empty one, or a chat to go on with); tools (see tools.lua); system
--- (text); format ("hermes", "llama3", "mistral", "gemma"; from the model if not given); tool_choice ("auto";
--- "required": the first turn of a run is a call, whose beginning is written for the model); max_turns (8); timeout
--- (seconds for a run); tool_timeout (30 s for a call); concurrency (of calls of one turn); gen (options of s:gen);
--- on_call(call), on_result(call), on_turn(result, n): called as things happen.
---@param o llmrun.AgentOptions
---@return llmrun.Agent
function M.new(o)
    check_options(o)
    local list, by_name = tools.define(CALL, o.tools)
    local specs = tools.specs(list)
    local model = o.model or o.session.model
    local chat = o.session and o.session.chat or model.chat
    local text = template_text(chat, specs)
    local format = o.format and tools.format(CALL, o.format) or tools.guess(model.vocab, text)
    local session = o.session or model:session { tools = text and specs or nil }
    if o.session and text then session.tools = specs end
    local self = setmetatable({
        session = session, owned = not o.session, format = format, in_template = text ~= nil, list = list,
        tools = by_name, opts = o, turns = 0,
    }, Agent)
    local system = o.system
    if not text then system = (system and system .. "\n\n" or "") .. format.prompt(list) end
    if system and o.session and #session.messages > 0 then
        errors.raise(CALL, "the session's template knows no tools, and its messages begin without a word of them: "
            .. "give an empty session")
    end
    if system then session:system(system) end
    return self
end

-- One call ------------------------------------------------------------------------------------------------------------

--- Without the place in a file, of which a model can make nothing.
local function without_place(text)
    text = text:match("^[^\n]*")
    return (text:gsub("^[^\n:]+:%d+: ", ""))
end

local function as_text(value)
    if type(value) == "string" then return value end
    if value == nil then return "null" end
    if type(value) == "number" or type(value) == "boolean" then return tostring(value) end
    return tools.encode(value)
end

--- Runs a call to its end and writes result or error into it. Raises nothing but the end of the branch.
local function perform(self, call)
    local function fail(text, trace)
        call.error, call.trace = text, trace
    end
    if call.error then return end
    local def = self.tools[call.name]
    if not def then
        local names = {}
        for i, d in ipairs(self.list) do names[i] = d.name end
        local close = options.closest(call.name, names)
        return fail(("there is no function '%s'%s; there are: %s"):format(call.name,
            close and " (did you mean '" .. close .. "'?)" or "", table.concat(names, ", ")))
    end
    local args, why = validate.check(def.schema, call.arguments, "arguments")
    if why then return fail(why) end
    local context = { agent = self, call = call, turn = self.turns }
    local seconds = def.timeout or self.opts.tool_timeout or 30
    local began = require("llmrun.core").now()
    local ok, value, extra, code = pcall(branch.timeout, seconds, def.run, args, context)
    call.seconds = require("llmrun.core").now() - began
    if not ok then return fail(without_place(tostring(value)), tostring(value)) end
    if value == nil and code == "limit" and call.seconds >= seconds then
        return fail(("the function '%s' did not return within %g s and was ended"):format(call.name, seconds))
    elseif value == nil and extra ~= nil then
        return fail(tostring(extra))
    end
    local text, no = as_text(value)
    if not text then return fail("the result can't be shown: " .. tostring(no)) end
    call.result, call.value = text, value
end

local function result_message(self, call)
    local text = call.result or tools.encode { error = call.error }
    if not self.in_template then return { role = "user", content = self.format.result(text, call) } end
    return { role = "tool", name = call.name, tool_call_id = call.id, content = text }
end

--- Results of formats that go into the user's turn are one message: templates want the roles to alternate.
local function give_results(self, calls)
    local s = self.session
    if self.in_template then
        for _, call in ipairs(calls) do s:message(result_message(self, call)) end
        return
    end
    local texts = {}
    for i, call in ipairs(calls) do texts[i] = result_message(self, call).content end
    s:message { role = "user", content = table.concat(texts, "\n") }
end

--- The assistant's message as calls rather than as its text, where the text holds control tokens, which a template
--- would take for plain text, or lacks the marks of a call, which the model so sees how to write.
local function restate(self, calls, rest)
    if not self.in_template or not (self.format.special or calls[1].bare) then return end
    for _, call in ipairs(calls) do
        if not call.arguments then return end
    end
    local list = {}
    for i, call in ipairs(calls) do
        local f = template.dict { { "name", call.name }, { "arguments", call.arguments } }
        list[i] = { id = call.id, type = "function", ["function"] = f }
    end
    local s = self.session
    s.messages[#s.messages] = { role = "assistant", content = rest, tool_calls = list }
end

local function call_id(self)
    self.ids = (self.ids or 0) + 1
    return ("call%05d"):format(self.ids) -- nine characters: Mistral's templates insist
end

-- Runs ----------------------------------------------------------------------------------------------------------------

local function gen_options(self)
    local o = {}
    for k, v in pairs(self.opts.gen or {}) do o[k] = v end
    if self.format.special then o.special = true end
    local stop = {}
    if type(o.stop) == "string" then stop[1] = o.stop else table.move(o.stop or {}, 1, #(o.stop or {}), 1, stop) end
    for _, text in ipairs(self.format.stop or {}) do stop[#stop + 1] = text end
    if #stop > 0 then o.stop = stop end
    return o
end

local function add_usage(usage, r)
    for k in pairs(usage) do usage[k] = usage[k] + r.usage[k] end
end

--- One answer of the model and the calls in it. True if it was the last.
local function turn(self, r)
    self.turns, r.turns = self.turns + 1, r.turns + 1
    local begun = ""
    if self.opts.tool_choice == "required" and r.turns == 1 and self.format.open then
        begun = self.format.open
        self.session:append(begun, { special = true })
    end
    local result = self.session:gen(gen_options(self))
    add_usage(r.usage, result)
    if self.opts.on_turn then self.opts.on_turn(result, r.turns) end
    local calls, rest = self.format.parse(begun .. result.text, self.tools)
    r.text = rest
    if #calls == 0 then
        r.finish_reason = result.finish_reason
        return true
    end
    for _, call in ipairs(calls) do
        call.turn, call.id = r.turns, call.id and #call.id == 9 and call.id or call_id(self)
        r.calls[#r.calls + 1] = call
        if self.opts.on_call then self.opts.on_call(call) end
    end
    restate(self, calls, rest)
    branch.map(calls, function(call)
        perform(self, call)
        notes.put("tool", { name = call.name, arguments = call.raw, result = call.result, error = call.error,
            seconds = call.seconds })
        if self.opts.on_result then self.opts.on_result(call) end
    end, { concurrency = self.opts.concurrency })
    give_results(self, calls)
    return false
end

--- Gives the model a text and lets it work until it answers without a call. Returns { text, finish_reason ("stop",
--- "length"; "turns": max_turns went by; "timeout"), turns, calls = { { name, arguments, result or error, seconds,
--- turn, id, raw }, ... }, usage (sums over the turns) }. What goes wrong in a tool goes to the model; what goes wrong
--- with the model is raised. A further run goes on with the same conversation.
---@param text string
---@return table
function Agent:run(text)
    if self.closed then errors.raise(RUN, "the agent is closed", "state") end
    if self.busy then errors.raise(RUN, "the agent is at work on another call", "state") end
    if type(text) ~= "string" then errors.raise(RUN, ("text expected, got %s"):format(type(text))) end
    loop.check_can_wait(RUN)
    local usage = { cached_tokens = 0, computed_tokens = 0, completion_tokens = 0 }
    local r = { turns = 0, calls = {}, usage = usage, text = "" }
    self.busy = true
    local guard <close> = setmetatable({}, { __close = function() self.busy = nil end }) -- luacheck: ignore 211
    self.session:user(text)
    local function work()
        for _ = 1, self.opts.max_turns or 8 do
            if turn(self, r) then return true end
        end
        r.finish_reason = "turns"
        return true
    end
    if not self.opts.timeout then
        work()
        return r
    end
    local done, _, code = branch.timeout(self.opts.timeout, work)
    if not done and code == "limit" then r.finish_reason = "timeout" end
    return r
end

--- Closes the agent's session, if it made it itself.
function Agent:close()
    if self.closed then return end
    self.closed = true
    if self.owned then self.session:close() end
end

Agent.__close = Agent.close

function Agent:__tostring() return ("llmrun agent with %d tools"):format(#self.list) end

return M
