-- Templates as Lua functions, and a few ready ones for models whose file brings no chat template.
--
-- A function template is fn(messages, opts) -> list of segments { text =, literal = }, or a string. In literal text
-- special tokens are recognised; a plain string counts as data, in which they are not. M.builder() makes segments:
--
--   return function(messages, opts)
--       local b = builtin.builder()
--       for _, m in ipairs(messages) do b:lit("<|" .. m.role .. "|>"):data(m.content):lit "<|end|>" end
--       return b:segments()
--   end
--
-- M.wrap(fn) gives an object with the render and segments methods of a compiled template. The ready ones are chosen by
-- name by the user and never by the program itself: chatml, llama3, gemma, mistral, plain. They know no tools: they
-- refuse to drop them. opts: add_generation_prompt, bos_token, eos_token.

local cjson = require "cjson"
local core = require "llmrun.core"

local M = {}

local SECONDS, BYTES = 1, 256 << 20 -- of processor time and of Lua memory, for one call of a function template

local Builder = {}
Builder.__index = Builder

---A list of segments in the making.
function M.builder()
    return setmetatable({ list = {} }, Builder)
end

local function add(b, text, literal)
    local list = b.list
    local last = list[#list]
    if text == nil or text == "" or text == cjson.null then
        return b
    end
    if type(text) ~= "string" then
        error(("template: expected text, found a value of type '%s'"):format(type(text)), 3)
    end
    if last and last.literal == literal then
        last.text = last.text .. text
    else
        list[#list + 1] = { text = text, literal = literal }
    end
    return b
end

---Adds the template's own text.
function Builder:lit(text)
    return add(self, text, true)
end

---Adds text from a message or another source that is not to be trusted.
function Builder:data(text)
    return add(self, text, false)
end

---The segments so far.
function Builder:segments()
    return self.list
end

local roles = { system = true, user = true, assistant = true, tool = true, developer = true }

-- A role is written as literal text only if it is a known one.
function Builder:role(role)
    return add(self, role, roles[role] == true)
end

-- The text of a content: a string, or the text parts of a list of parts.
local function text_of(content)
    if type(content) ~= "table" then
        return content
    end
    local texts = {}
    for _, part in ipairs(content) do
        if type(part) ~= "table" or part.type ~= "text" then
            error "template: this template knows no content but text"
        end
        texts[#texts + 1] = part.text
    end
    return table.concat(texts)
end

-- Content without the white space around it.
local function trimmed(content)
    local text = text_of(content)
    if type(text) ~= "string" then
        return text
    end
    local i, j = text:find "%S" or #text + 1, #text
    while j >= i and text:find("^%s", j) do
        j = j - 1
    end
    return text:sub(i, j)
end

local function refuse_tools(messages, opts)
    local tools = opts.tools
    if type(tools) == "table" and next(tools) ~= nil then
        error "template: this template knows no tools"
    end
    for i, m in ipairs(messages) do
        if type(m.tool_calls) == "table" and next(m.tool_calls) ~= nil then
            error(("template: message %d calls tools, of which this template knows nothing"):format(i))
        end
    end
end

-- The system text, taken from the first message, and the index of the first message after it.
local function split_system(messages)
    local first = messages[1]
    if first and first.role == "system" then
        return trimmed(first.content), 2
    end
    return nil, 1
end

---Turns as <|im_start|>role ... <|im_end|>.
function M.chatml(messages, opts)
    refuse_tools(messages, opts)
    local b = M.builder()
    for _, m in ipairs(messages) do
        b:lit("<|im_start|>"):role(m.role):lit("\n"):data(text_of(m.content)):lit "<|im_end|>\n"
    end
    if opts.add_generation_prompt then
        b:lit "<|im_start|>assistant\n"
    end
    return b:segments()
end

---Turns as <|start_header_id|>role<|end_header_id|> ... <|eot_id|>.
function M.llama3(messages, opts)
    refuse_tools(messages, opts)
    local b = M.builder():lit(opts.bos_token)
    for _, m in ipairs(messages) do
        b:lit("<|start_header_id|>"):role(m.role):lit("<|end_header_id|>\n\n"):data(trimmed(m.content)):lit "<|eot_id|>"
    end
    if opts.add_generation_prompt then
        b:lit "<|start_header_id|>assistant<|end_header_id|>\n\n"
    end
    return b:segments()
end

-- Raises unless users and the model take turns from message `from` on.
local function check_turns(messages, from)
    for i = from, #messages do
        local want = (i - from) % 2 == 0 and "user" or "assistant"
        if messages[i].role ~= want then
            error(("template: message %d must be of the role '%s' (roles alternate)"):format(i, want))
        end
    end
end

---Turns as <start_of_turn>user|model ... <end_of_turn>; the system text goes before the first user's.
function M.gemma(messages, opts)
    refuse_tools(messages, opts)
    local system, from = split_system(messages)
    check_turns(messages, from)
    local b = M.builder():lit(opts.bos_token)
    for i = from, #messages do
        local m = messages[i]
        b:lit("<start_of_turn>" .. (m.role == "assistant" and "model" or "user") .. "\n")
        if i == from and system then
            b:data(system):lit "\n\n"
        end
        b:data(trimmed(m.content)):lit "<end_of_turn>\n"
    end
    if opts.add_generation_prompt then
        b:lit "<start_of_turn>model\n"
    end
    return b:segments()
end

---Turns as [INST] ... [/INST] answer</s>; the system text goes before the first user's.
function M.mistral(messages, opts)
    refuse_tools(messages, opts)
    local system, from = split_system(messages)
    check_turns(messages, from)
    local b = M.builder():lit(opts.bos_token)
    for i = from, #messages do
        local m = messages[i]
        if m.role == "user" then
            b:lit "[INST] "
            if i == from and system then
                b:data(system):lit "\n\n"
            end
            b:data(trimmed(m.content)):lit "[/INST]"
        else
            b:lit(" "):data(trimmed(m.content)):lit(opts.eos_token)
        end
    end
    return b:segments()
end

---No markers: "User: ..." and "Assistant: ..." on lines of their own, for models that were never trained on chats.
function M.plain(messages, opts)
    refuse_tools(messages, opts)
    local names = { user = "User: ", assistant = "Assistant: ", system = "" }
    local b = M.builder():lit(opts.bos_token)
    for _, m in ipairs(messages) do
        local name = names[m.role]
        if name then
            b:lit(name)
        else
            b:data(m.role):lit ": "
        end
        b:data(trimmed(m.content)):lit "\n"
    end
    if opts.add_generation_prompt then
        b:lit "Assistant:"
    end
    return b:segments()
end

-- Function templates as objects --------------------------------------------------------------------------------------

local Wrapped = {}
Wrapped.__index = Wrapped

---Checks what a function template returned; gives segments, neighbours differing in `literal`.
local function checked(result)
    if type(result) == "string" then
        return M.builder():data(result):segments()
    elseif type(result) ~= "table" then
        error(("template: the function returned neither segments nor a string, but a %s"):format(type(result)))
    end
    local b = M.builder()
    for i, s in ipairs(result) do
        if type(s) ~= "table" or type(s.text) ~= "string" or type(s.literal) ~= "boolean" then
            error(("template: segment %d is not of the form { text = string, literal = boolean }"):format(i))
        end
        add(b, s.text, s.literal)
    end
    return b:segments()
end

---As the method of a compiled template. vars.messages goes to the function first, all of vars second. It can't wait,
---and has limits, as the requests of others wait for it.
function Wrapped:segments(vars)
    local ok, result, code = core.call_limited(SECONDS, BYTES, self.fn, vars.messages or {}, vars)
    if not ok then
        result = result:gsub("\nstack traceback:.*", ""):gsub("limit of a hook", "limit of a template")
        return nil, result, code == "limit" and "limit" or "raised"
    end
    if ok then
        ok, result = pcall(checked, result)
    end
    if not ok then
        return nil, type(result) == "string" and result or tostring(result), "raised"
    end
    return result
end

function Wrapped:render(vars)
    local list, err, code = self:segments(vars)
    if not list then
        return nil, err, code
    end
    local texts = {}
    for i, s in ipairs(list) do
        texts[i] = s.text
    end
    return table.concat(texts)
end

---A function template as an object like a compiled template.
---@param fn function  fn(messages, opts) -> segments or string
---@param name? string
function M.wrap(fn, name)
    return setmetatable({ fn = fn, name = name or "function" }, Wrapped)
end

---The names of the ready templates.
M.names = { "chatml", "llama3", "gemma", "mistral", "plain" }

---A ready template by name.
---@param name string
---@return table? template, string? err
function M.get(name)
    for _, ready in ipairs(M.names) do
        if name == ready then
            return M.wrap(M[name], name)
        end
    end
    local known = table.concat(M.names, ", ")
    return nil, ("there is no built-in template '%s' (there are: %s)"):format(tostring(name), known)
end

return M
