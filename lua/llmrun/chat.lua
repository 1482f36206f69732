--- Chat messages to tokens: the model's template, and only its own text parsed for special tokens.

local errors = require "llmrun.errors"

local M = {}

---@class llmrun.Chat
local Chat = {}
Chat.__index = Chat

--- template: Jinja source, or a function(vars) that returns a string (all of it trusted) or a list of segments
--- { text =, literal = } (vars: messages, add_generation_prompt, tools, bos_token, eos_token, ...).
---@param call string
---@param template string|function|nil
---@param vocab any
---@param name string of the model, for errors
function M.new(call, template, vocab, name)
    local info = vocab:info()
    local self = setmetatable({ vocab = vocab, own = {}, names = {} }, Chat)
    for _, t in ipairs { "bos", "eos", "unk", "pad" } do
        if info[t] then self.names[t .. "_token"] = (vocab:piece(info[t])) end
    end
    if type(template) == "string" then
        local compiled, err, code = require("llmrun.template").compile(template, { name = name })
        if not compiled then errors.raise(call, "chat template: " .. err, code) end
        self.run = function(vars) return compiled:segments(vars) end
    elseif template then
        self.run = function(vars)
            local r = template(vars)
            if type(r) == "string" then return { { text = r, literal = true } } end
            if type(r) ~= "table" then return nil, "a template must return a string or a list of segments", "type" end
            return r
        end
    end
    return self
end

function Chat:has_template() return self.run ~= nil end

--- Segments of the rendered messages.
---@param call string
---@param messages table[]
---@param vars? table further variables; add_generation_prompt, tools ...
function Chat:segments(call, messages, vars)
    if not self.run then
        errors.raise(call, "the model has no chat template; give one to llm.load or model:session (template = ...), "
            .. "or use s:append", "unsupported")
    end
    local all = {}
    for k, v in pairs(self.names) do all[k] = v end
    for k, v in pairs(vars or {}) do all[k] = v end
    all.messages = messages
    local segments, err, code = self.run(all)
    if not segments then errors.raise(call, "chat template: " .. err, code) end
    return segments
end

--- Whether an id met in literal text stands apart: a control token, or a name that plain text does not give.
local function stands_apart(self, id)
    local known = self.own[id]
    if known == nil then
        local kind = self.vocab:kind(id)
        known = kind == "control" or kind == "unknown"
        if not known and kind == "user" then
            local plain = self.vocab:encode((self.vocab:piece(id)))
            known = #plain ~= 1 or plain[1] ~= id
        end
        self.own[id] = known
    end
    return known
end

--- Ids of segments. Names of special tokens count in literal text only; plain text is tokenized as one piece across the
--- borders of segments.
function Chat:encode(call, segments)
    local vocab, ids, buffer = self.vocab, {}, {}
    local function flush()
        local text = table.concat(buffer)
        buffer = {}
        if text == "" then return end
        local plain = errors.check(call, vocab:encode(text))
        table.move(plain, 1, #plain, #ids + 1, ids)
    end
    for _, seg in ipairs(segments) do
        local text = seg.text
        if seg.literal then
            local at = 1
            for _, id in ipairs(errors.check(call, vocab:encode(text, { special = true }))) do
                if stands_apart(self, id) then
                    local name = vocab:piece(id)
                    local from, to = text:find(name, at, true)
                    if from then
                        buffer[#buffer + 1] = text:sub(at, from - 1)
                        flush()
                        ids[#ids + 1] = id
                        at = to + 1
                    end
                end
            end
            buffer[#buffer + 1] = text:sub(at)
        else
            buffer[#buffer + 1] = text
        end
    end
    flush()
    return ids
end

--- The text of segments.
function M.text(segments)
    local parts = {}
    for i, s in ipairs(segments) do parts[i] = s.text end
    return table.concat(parts)
end

return M
