--- Samplers: chains of native stages and Lua functions, and the sampling options of gen.
---
---   llm.sampler{ { "top_k", 40 }, function(logits, ctx) logits:mask(13) end, { "temperature", 0.7 } }

local errors = require "llmrun.errors"
local options = require "llmrun.options"
local core = require "llmrun.core"
local more = require "llmrun.sampler.more"
local tables = require "llmrun.tables"

local M = {}

---@class llmrun.Sampler a list of stages, in the form that lua_sample.c reads
local Sampler = {}
Sampler.__index = Sampler

local function fail(i, text) errors.raise("llm.sampler", ("stage %d: %s"):format(i, text)) end

local function check_number(i, name, v)
    if type(v) ~= "number" then fail(i, ("%s: number expected, got %s"):format(name, type(v))) end
    return v
end

local function check_ids(i, name, v)
    if type(v) ~= "table" then fail(i, ("%s: list of token ids expected, got %s"):format(name, type(v))) end
    return v
end

--- { [id] = bias } -> sorted ids, values
local function split_bias(what, bias)
    local ids, values = {}, {}
    for id, v in pairs(bias) do
        if math.type(id) ~= "integer" then
            errors.raise(what, ("logit_bias: token ids are integers, got %s"):format(tostring(id)))
        elseif type(v) ~= "number" then
            errors.raise(what, ("logit_bias[%d]: number expected, got %s"):format(id, type(v)))
        end
        ids[#ids + 1] = id
    end
    table.sort(ids)
    for i, id in ipairs(ids) do values[i] = bias[id] end
    return ids, values
end

local penalty_names = { repetition = "number", presence = "number", frequency = "number", window = "integer" }

-- name -> function(i, stage) -> stage in core form
local builders = {
    penalties = function(i, s)
        local o = s[2] == nil and s or s[2]
        if type(o) ~= "table" then fail(i, "penalties: a table of repetition, presence, frequency, window expected") end
        local clean = {}
        for k, v in pairs(o) do
            if k ~= 1 then clean[k] = v end
        end
        options.check("llm.sampler: penalties", clean, penalty_names, 4)
        return { "penalties", clean.repetition or 1, clean.presence or 0, clean.frequency or 0, clean.window or 0 }
    end,
    logit_bias = function(i, s)
        if type(s[2]) ~= "table" then fail(i, "logit_bias: a table { [id] = bias } expected") end
        return { "logit_bias", split_bias("llm.sampler", s[2]) }
    end,
    min_tokens = function(i, s)
        return { "min_tokens", check_number(i, "min_tokens", s[2]), check_ids(i, "min_tokens: end tokens", s[3]) }
    end,
    greedy = function() return { "temperature", 0 } end,
}
for _, name in ipairs { "temperature", "top_k", "top_p", "min_p", "typical", "top_n_sigma" } do
    builders[name] = function(i, s) return { name, check_number(i, name, s[2]) } end
end
for _, name in ipairs { "allow", "ban" } do
    builders[name] = function(i, s) return { name, check_ids(i, name, s[2]) } end
end

for name, build in pairs(more.builders) do builders[name] = build end

local function build_stage(i, s)
    if type(s) == "function" then return { "lua", s } end
    if type(s) == "string" then s = { s } end
    if type(s) ~= "table" then fail(i, ("a name, a { name, ... } or a function expected, got %s"):format(type(s))) end
    local build = builders[s[1]]
    if not build then
        local names = tables.sorted_keys(builders)
        local close = type(s[1]) == "string" and options.closest(s[1], names)
        fail(i, ("unknown stage '%s'%s; valid: %s"):format(tostring(s[1]),
            close and " (did you mean '" .. close .. "'?)" or "", table.concat(names, ", ")))
    end
    return build(i, s)
end

--- A chain of stages, run in this order: names, { name, argument } and functions f(logits, ctx). A function may change
--- the logits, and may return a token id, which is then drawn; it runs inside the engine's step and can't wait.
---@param stages table
---@return llmrun.Sampler
function M.new(stages)
    if type(stages) ~= "table" then errors.raise("llm.sampler", "list of stages expected, got " .. type(stages)) end
    if getmetatable(stages) == Sampler then return stages end
    for k in pairs(stages) do
        if math.type(k) ~= "integer" then
            errors.raise("llm.sampler", ("a list of stages has no field '%s'"):format(tostring(k)))
        end
    end
    local list = {}
    for i = 1, #stages do list[i] = build_stage(i, stages[i]) end
    return setmetatable(list, Sampler)
end

--- Whether it is a chain that M.new made; and a chain again of its list of stages.
function M.is(v) return getmetatable(v) == Sampler end
function M.restored(list) return setmetatable(list, Sampler) end

local function native(call, self, context, logits)
    local list = more.resolve(call, table.move(self, 1, #self, 1, {}))
    return core.sampler_new(list, context and context.seed or 0, logits:vocab_size())
end

--- A sampler that remembers: what mirostat and adaptive-p learn goes from draw to draw (see Sampler:draw). For n_vocab
--- tokens; to be closed.
---@param n_vocab integer
---@param seed? integer
function Sampler:start(n_vocab, seed)
    return core.sampler_new(more.resolve("sampler:start", table.move(self, 1, #self, 1, {})), seed or 0, n_vocab)
end

--- The distribution that the chain makes of logits (a list, or a logits object): ids and probabilities, best first.
--- context: { seed =, prompt = ids, generated = ids, position = n }
function Sampler:probs(logits, context)
    if type(logits) == "table" then logits = core.logits_new(logits) end
    local s <close> = native("sampler:probs", self, context, logits)
    return errors.check("sampler:probs", s:probs(logits, context))
end

--- Draws a token from logits: id, and its log-probability before any stage.
function Sampler:draw(logits, context)
    if type(logits) == "table" then logits = core.logits_new(logits) end
    local s <close> = native("sampler:draw", self, context, logits)
    return errors.check("sampler:draw", s:draw(logits, context))
end

--- Sampling options of gen and stream: name -> type.
M.options = {
    temperature = "number", top_k = "integer", top_p = "number", min_p = "number", typical_p = "number",
    top_n_sigma = "number", repetition_penalty = "number", presence_penalty = "number", frequency_penalty = "number",
    penalty_window = "integer", logit_bias = "table", allowed_tokens = "table", banned_tokens = "table",
    min_tokens = "integer", sampler = "table|function",
}
for k, v in pairs(more.options) do M.options[k] = v end

--- The stages that the options of a call ask for. Order as in vLLM: bias and bans, penalties, temperature, then what
--- narrows, XTC, mirostat or adaptive-p. A sampler of one's own stands in place of temperature and all that narrows.
---@param call string
---@param o table
---@param model llmrun.Model
function M.from_options(call, o, model)
    local s = {}
    more.check(call, o)
    if o.thinking_budget then
        s[1] = { "lua", require("llmrun.sampler.thinking").stage(model, { budget = o.thinking_budget }) }
    end
    if o.logit_bias then s[#s + 1] = { "logit_bias", split_bias(call, o.logit_bias) } end
    if o.allowed_tokens then s[#s + 1] = { "allow", o.allowed_tokens } end
    if o.banned_tokens then s[#s + 1] = { "ban", o.banned_tokens } end
    if o.min_tokens then s[#s + 1] = { "min_tokens", o.min_tokens, model.info.eog } end
    if o.repetition_penalty or o.presence_penalty or o.frequency_penalty then
        s[#s + 1] = { "penalties", o.repetition_penalty or 1, o.presence_penalty or 0, o.frequency_penalty or 0,
            o.penalty_window or 0 }
    elseif o.penalty_window then
        errors.raise(call, "penalty_window without a penalty")
    end
    more.repetition(s, call, o)
    if o.sampler then
        for _, names in ipairs { { "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma" },
            more.replaced } do
            for _, name in ipairs(names) do
                if o[name] then
                    errors.raise(call, ("%s has no effect beside sampler: make it one of its stages"):format(name))
                end
            end
        end
        local chain = M.new(type(o.sampler) == "function" and { o.sampler } or o.sampler)
        return more.resolve(call, table.move(chain, 1, #chain, #s + 1, s), model.vocab)
    end
    local t = o.temperature or 1
    local dynamic = more.dynamic(call, o, t)
    if t <= 0 and not dynamic then
        s[#s + 1] = { "temperature", t } -- arg max; a negative one is refused below
        return more.resolve(call, s, model.vocab)
    end
    if t ~= 1 or dynamic then s[#s + 1] = dynamic or { "temperature", t } end
    if o.top_n_sigma then s[#s + 1] = { "top_n_sigma", o.top_n_sigma } end
    if o.min_p then s[#s + 1] = { "min_p", o.min_p } end
    if o.top_k then s[#s + 1] = { "top_k", o.top_k } end
    if o.typical_p then s[#s + 1] = { "typical", o.typical_p } end
    if o.top_p then s[#s + 1] = { "top_p", o.top_p } end
    more.last(s, call, o)
    return more.resolve(call, s, model.vocab)
end

return M
