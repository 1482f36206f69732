--- Chat messages to tokens: the model's template, and only its own text parsed for special tokens.
---
--- A template that is a function may say of each segment how long it stays the same (cache):
---   "pinned": for all sessions (instructions, tools); kept in memory for good (anchors.lua)
---   "shared": for as long as the conversation goes on; the rule
---   "volatile": for this call (a clock, what a search found)
--- What changes sooner stands behind what changes later, or the template is refused: so whatever is in them, the tokens
--- of all that comes before are those of the call before. Text is tokenized for itself on both sides of such a border,
--- for the same reason.

local errors = require "llmrun.errors"
local options = require "llmrun.options"
local tokens = require "llmrun.tokens"

local M = {}

---@class llmrun.Chat
local Chat = {}
Chat.__index = Chat

local ranks = { pinned = 1, shared = 2, volatile = 3 }
local segment_fields = { text = "string", literal = "boolean", cache = "string" }

--- The segments that a template function returned; raises if they are none, or can't be cached as they say.
local function check_segments(call, segments)
    local rank, name, at = 1, nil, nil
    if #segments == 0 and next(segments) ~= nil then
        errors.raise(call, "chat template: it must return a string or a list of segments, not a table with names")
    end
    for i, seg in ipairs(segments) do
        local what = ("%s: chat template: segment %d"):format(call, i)
        if type(seg) ~= "table" or type(seg.text) ~= "string" then
            errors.raise(what, "a table { text = string, literal = boolean, cache = hint } expected")
        end
        options.check(what, seg, segment_fields, 4)
        if seg.cache then
            local r = ranks[seg.cache]
            if not r then
                errors.raise(what, "cache: \"pinned\", \"shared\" or \"volatile\" expected, got '" .. seg.cache .. "'")
            elseif r < rank then
                errors.raise(what, ("it is %s, but stands behind segment %d, which is %s: what changes has to come "
                    .. "last"):format(seg.cache, at, name))
            end
            rank, name, at = r, seg.cache, i
        end
    end
    return segments
end

--- template: Jinja source, or a function(vars) that returns a string (all of it trusted) or a list of segments
--- { text =, literal =, cache = } (vars: messages, add_generation_prompt, tools, bos_token, eos_token, ...).
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
        self.run = function(vars, what)
            local r = template(vars)
            if type(r) == "string" then return { { text = r, literal = true } } end
            if type(r) ~= "table" then return nil, "a template must return a string or a list of segments", "type" end
            return check_segments(what or call, r)
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
    local segments, err, code = self.run(all, call)
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

--- Ids of segments, and how many of them are pinned (nil: none). Names of special tokens count in literal text only;
--- plain text is tokenized as one piece across the borders of segments, but not where their cache hints differ.
---@return integer[], integer?
function Chat:encode(call, segments)
    local vocab, ids, buffer = self.vocab, {}, {}
    local hint, pinned
    local function flush()
        local text = table.concat(buffer)
        buffer = {}
        if text == "" then return end
        tokens.add(ids, errors.check(call, tokens.encode(vocab, text)))
    end
    for _, seg in ipairs(segments) do
        local text = seg.text
        if seg.cache and seg.cache ~= hint then
            if hint or seg.cache ~= "pinned" then flush() end
            if hint == "pinned" then pinned = #ids end
            hint = seg.cache
        end
        if seg.literal then
            local at = 1
            for _, id in ipairs(errors.check(call, tokens.encode(vocab, text, { special = true }))) do
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
    if hint == "pinned" then pinned = #ids end
    return ids, pinned
end

--- The text of segments.
function M.text(segments)
    local parts = {}
    for i, s in ipairs(segments) do parts[i] = s.text end
    return table.concat(parts)
end

return M
