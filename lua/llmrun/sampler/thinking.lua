--- A limit on how long a model thinks: after so many tokens between <think> and </think> the end is forced.
---
---   s:gen { thinking_budget = 200 }
---   llm.sampler { require("llmrun.sampler.thinking").stage(model, { budget = 200, message = "\n\nSo:\n" }), ... }

local errors = require "llmrun.errors"
local options = require "llmrun.options"

local M = {}

local known = { budget = "integer", start = "string", stop = "string", message = "string" }

local function ends_with(tokens, ids)
    local shift = #tokens - #ids
    if shift < 0 then return false end
    for i = 1, #ids do
        if tokens[shift + i] ~= ids[i] then return false end
    end
    return true
end

--- Whether the prompt ends inside of thoughts: some templates open them.
local function opened_by_prompt(ctx, start, stop)
    local tokens, open = ctx:tokens(64, true), false
    local seen = {}
    for i = 1, #tokens do
        seen[i] = tokens[i]
        if ends_with(seen, start) then open = true end
        if ends_with(seen, stop) then open = false end
    end
    return open
end

--- A stage for a sampler chain, to be its first. Options: budget (tokens; 0: no thoughts), start ("<think>"), stop
--- ("</think>"), message (text that is put before the forced stop).
---@param model llmrun.Model
---@param o table
function M.stage(model, o)
    local call = "sampler.thinking"
    options.check(call, o, known, 2)
    if not o or not o.budget or o.budget < 0 then errors.raise(call, "budget: a number of tokens expected") end
    local function ids_of(text) return model:tokenize(text, { special = true }) end
    local start, stop = ids_of(o.start or "<think>"), ids_of(o.stop or "</think>")
    local forced = ids_of((o.message or "") .. (o.stop or "</think>"))
    if #start == 0 or #stop == 0 then errors.raise(call, "start and stop may not be empty") end
    return function(_, ctx)
        local t = ctx.thinking
        if not t then
            t = { n = 0, open = opened_by_prompt(ctx, start, stop) }
            ctx.thinking = t
        elseif t.forcing then
            t.forcing = t.forcing + 1
        else
            local last = ctx:tokens(math.max(#start, #stop))
            if t.open and ends_with(last, stop) then
                t.open = false
            elseif t.open then
                t.n = t.n + 1
            elseif ends_with(last, start) then
                t.open, t.n = true, 0
            end
        end
        if t.open and not t.forcing and t.n >= o.budget then t.forcing = 1 end
        local id = t.forcing and forced[t.forcing]
        if t.forcing and not id then t.forcing, t.open = nil, false end
        return id
    end
end

return M
