--- Speculation: what `speculate` may say in llm.load, llm.scripted, gen and stream.
---
---   speculate = "ngram"                          "ngram", "suffix", "draft", "heads", "eagle", or "off" (false)
---   speculate = function(ctx) ... end            drafts in Lua, see below
---   speculate = { method = "suffix", k = 12, scope = "tenant" }
---
---   speculate = { method = "early_exit", layers = 20 }: the model's first 20 layers draft, with its own norm and head
---
--- Fields: method; k, the most tokens of a draft (16; 8 for a draft model); fixed = true: always k, paying or not;
--- branches, ways at a place that ngram and draft try (1: none branches off; see below); min_match (2), max_match (8):
--- tokens that must have stood before, ngram's longest; scope, what suffix keeps: "request", "session" (default) or
--- "tenant"; accept = "distribution" (see engine/speculate.h); fn: a function. In
--- llm.load also draft: the draft model, a name or file, or { model =, kv = { blocks = n } }; and heads, a safetensors
--- file of Medusa heads (model/heads.h, scripts/train_heads), whose best guesses are a tree of at most k tokens; or
--- eagle, the folder (config.json, model.safetensors) of an EAGLE head (model/eagle.h, scripts/train_heads).
---
--- A function is asked in each step, inside of it (it can't wait): f(ctx). ctx has most (tokens that there is room
--- for), batch (requests that generate), acceptance (of late, per token), method, n_prompt, n_generated, last, and
--- ctx:tokens(n, all), ctx:cost(rows). It returns nothing (as the options say), false, how many tokens, a method, both
--- (`4, "ngram"`), or the tokens themselves.
---
--- Drafts may be trees: `return { a, b, c, parents = { 0, 1, 1 } }` says that b or c may follow a; a parent is the
--- place of the token before, 0 is the text, and what stands in front is kept if there is not room for all. All
--- branches are rows of one step, each sees the text and what leads to it.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local options = require "llmrun.options"

local M = {}

--- For tables of options.
M.type = "boolean|string|table|function"

local fields = {
    method = "string", k = "integer", fixed = "boolean", min_match = "integer", max_match = "integer", scope = "string",
    accept = "string", branches = "integer", layers = "integer", fn = "function",
}
local model_fields = { draft = "string|table", heads = "string", eagle = "string" }
for k, v in pairs(fields) do model_fields[k] = v end

local methods = { ngram = true, suffix = true, draft = true, early_exit = true, heads = true, eagle = true,
    off = true }
local scopes = { request = true, session = true, tenant = true }

--- The option as a table with a method; nil if it is nil.
local function normal(call, what, known)
    if what == nil then return nil end
    if what == false then return { method = "off" } end
    if what == true then errors.raise(call, "speculate: a method, a function or a table expected, got true") end
    if type(what) == "string" then what = { method = what } end
    if type(what) == "function" then what = { fn = what } end
    options.check(call .. ": speculate", what, known, 4)
    if what.method and not methods[what.method] then
        errors.raise(call, ("speculate: method '%s' is none of ngram, suffix, draft, early_exit, heads, eagle, off")
            :format(what.method))
    elseif what.scope and not scopes[what.scope] then
        errors.raise(call, ("speculate: scope '%s' is none of request, session, tenant"):format(what.scope))
    elseif what.branches and what.branches > 1 and what.accept == "distribution" then
        errors.raise(call, "speculate: accept 'distribution' judges drafts without branches only")
    elseif what.accept and what.accept ~= "same" and what.accept ~= "distribution" then
        errors.raise(call, ("speculate: accept '%s' is none of same, distribution"):format(what.accept))
    end
    return what
end

local draft_fields = { model = "string", kv = "table", threads = "integer", shortlist = "integer" }

--- First ids of shortlists (spec.h): 0 in Lua, -1 in C: a draft's logits are computed of all.
local function shortlist_of(call, n)
    if not n then return 0 end
    if math.type(n) ~= "integer" or n < 0 then
        errors.raise(call, ("speculate.draft.shortlist: a number of tokens expected, got %s"):format(n))
    end
    return n == 0 and -1 or math.min(n, 1 << 30)
end

local function open_draft(call, draft, o, model)
    if type(draft) == "table" and draft.next then
        return (require("llmrun.scripted").core(call,
            { vocab = draft.vocab or model, next = draft.next, ctx = draft.ctx or o.ctx }))
    end
    local name = draft
    if type(draft) == "table" then
        options.check(call .. ": speculate.draft", draft, draft_fields, 4)
        name = draft.model
    end
    if type(name) ~= "string" then errors.raise(call, "speculate.draft: a model's name or file expected") end
    local path = errors.check(call, require("llmrun.catalog").find(name))
    return (errors.check(call, require("llmrun.loader").open_here(path, {
        device = o.device, isa = o.isa, compute = o.compute,
        threads = type(draft) == "table" and draft.threads or o.threads,
    })))
end

--- What the config.json of an EAGLE head says of its layers.
local function eagle_config(call, folder)
    local path = folder .. "/config.json"
    local file, text = io.open(path, "rb")
    if not file then errors.raise(call, "speculate.eagle: " .. tostring(text)) end
    local ok, c = pcall(require("cjson").decode, file:read "a")
    file:close()
    if not ok or type(c) ~= "table" then errors.raise(call, ("speculate.eagle: %s is no JSON object"):format(path)) end
    local function integer(name, default)
        local v = math.tointeger(tonumber(c[name]) or default)
        if not v or v < 1 or v > 1 << 20 then
            errors.raise(call, ("speculate.eagle: %s: %s is no such number: %s"):format(path, name, tostring(c[name])))
        end
        return v
    end
    local scaling = c.rope_scaling
    if type(scaling) == "table" and (scaling.rope_type or scaling.type) ~= "default" then
        errors.raise(call, ("speculate.eagle: %s: rope_scaling is not supported"):format(path))
    end
    if c.norm_before_residual == true then
        errors.raise(call, ("speculate.eagle: %s: norm_before_residual is not supported"):format(path))
    end
    local taps = c.eagle_aux_hidden_state_layer_ids
    for i = 1, type(taps) == "table" and 3 or 0 do
        if not math.tointeger(taps[i]) or taps[i] < 1 or taps[i] > 1 << 20 or #taps ~= 3 then
            errors.raise(call, ("speculate.eagle: %s: eagle_aux_hidden_state_layer_ids: three numbers expected")
                :format(path))
        end
        taps[i] = math.tointeger(taps[i])
    end
    local heads = integer "num_attention_heads"
    return {
        taps = type(taps) == "table" and taps or nil,
        heads = heads, kv_heads = integer("num_key_value_heads", heads),
        head_dim = integer("head_dim", integer "hidden_size" // heads),
        eps = tonumber(c.rms_norm_eps) or 1e-6, rope_base = tonumber(c.rope_theta) or 10000,
    }
end

local function set_eagle(call, model, s, o)
    if s.draft then errors.raise(call, "speculate: a draft model and an EAGLE head exclude each other") end
    local config = eagle_config(call, s.eagle)
    config.as_is = o.compute == "f32"
    s.method = s.method or "eagle"
    errors.check(call, model.engine:set_eagle(s.eagle .. "/model.safetensors", config))
end

--- Keeps a model's `speculate` for its requests, and gives its engine the draft model.
---@param call string
---@param model llmrun.Model
---@param o table options of llm.load or llm.scripted
function M.for_model(call, model, o)
    local s = normal(call, o.speculate, model_fields)
    if not s then return end
    model.speculate = s
    if s.heads then
        s.method = s.method or "heads"
        errors.check(call, model.engine:set_heads(s.heads))
    elseif s.method == "heads" then
        errors.raise(call, "speculate: method 'heads' needs heads = a file")
    end
    if s.eagle then
        set_eagle(call, model, s, o)
    elseif s.method == "eagle" then
        errors.raise(call, "speculate: method 'eagle' needs eagle = a folder")
    end
    if not s.draft then
        if s.method == "draft" then errors.raise(call, "speculate: method \"draft\" needs draft = a model") end
        return
    end
    s.method = s.method or "draft"
    local more = type(s.draft) == "table" and s.draft or {}
    local shortlist = shortlist_of(call, more.shortlist)
    local draft = open_draft(call, s.draft, o, model)
    errors.check(call, model.engine:set_draft(draft, {
        kv_blocks = more.kv and more.kv.blocks, context = o.ctx, shortlist = shortlist,
    }))
end

local MAX_TENANTS = 64

--- What the sessions of a tenant said. Of many tenants, those that spoke last are remembered.
local function tenant_memory(model, tenant)
    local order = model.memories or {} -- { tenant =, memory = }, the last used first
    model.memories = order
    local at = #order + 1
    for i, e in ipairs(order) do
        if e.tenant == tenant then at = i end
    end
    local entry = table.remove(order, at) or { tenant = tenant, memory = core.suffix_new() }
    table.insert(order, 1, entry)
    order[MAX_TENANTS + 1] = nil
    return entry.memory
end

local function memory(self, s, tenant)
    local scope = s.scope or "session"
    if s.method ~= "suffix" and not s.fn or scope == "request" then return nil end
    if scope == "session" then
        self.memory = self.memory or core.suffix_new()
        return self.memory
    end
    return tenant_memory(self.model, tenant or "")
end

--- What a request of a session gets (see lua_spec.c), or nil.
---@param call string
---@param what any the option of the call
---@param self llmrun.Session
---@param tenant? string
function M.for_request(call, what, self, tenant)
    local base = self.model.speculate
    local s = normal(call, what, fields) or base
    if not s then return nil end
    local method = s.method or (base and base.method) or (s.fn and "off") or "ngram"
    if method == "off" and not s.fn then return nil end
    local layers = s.layers or (base and base.layers) or nil
    if method == "early_exit" and not layers then
        errors.raise(call, "speculate: method 'early_exit' needs layers = how many of the model's layers draft")
    end
    return {
        method = method, k = s.k or (base and base.method == method and base.k) or nil, fixed = s.fixed,
        branches = s.branches or (base and base.method == method and base.branches) or nil,
        layers = layers, min_match = s.min_match, max_match = s.max_match, accept = s.accept or (base and base.accept),
        memory = memory(self, { method = method, scope = s.scope or (base and base.scope), fn = s.fn }, tenant),
        fn = s.fn,
    }
end

--- Adds what can be computed from the counts of drafts: acceptance (of a token looked at), length (tokens taken of a
--- draft), at (acceptance by place).
function M.stats(s)
    if not s then return nil end
    s.acceptance = s.drafted > 0 and s.accepted / s.drafted or 0
    s.length = s.drafts > 0 and s.accepted / s.drafts or 0
    s.at = {}
    for i, n in ipairs(s.tried_at) do s.at[i] = s.accepted_at[i] / n end
    return s
end

--- A memory of texts for drafters: add(ids), propose(ids, k, min) -> what followed the longest end of ids in it, and
--- that end's length; len().
---@param max_tokens? integer
function M.memory(max_tokens) return core.suffix_new(max_tokens) end

return M
