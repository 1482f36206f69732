--- POST /v1/completions: a prompt (text, token ids, or a list of either) and what comes next.
---
--- Names of special tokens in a text prompt count as such unless parse_special is false; the model's first token is
--- put before it unless add_special_tokens is false. max_tokens is 16 unless given, 0 gives nothing new (for echo).

local choices = require "llmrun.openai.choices"
local constraints = require "llmrun.openai.constraints"
local fields = require "llmrun.openai.fields"
local json = require "llmrun.json"
local loop = require "llmrun.loop"
local sampling = require "llmrun.openai.sampling"
local scripts = require "llmrun.openai.scripts"

local M = {}

local function bad_prompt(v)
    fields.wrong_type("prompt", "text, token ids, or an array of either", v == nil and json.null or v)
end

--- The prompts of a request: a list of texts, or of lists of ids.
local function prompt_list(v, limits, n_vocab)
    if type(v) == "string" then return { v } end
    if not json.is_array(v) then bad_prompt(v) end
    if #v == 0 then fields.bad("prompt", "it is empty") end
    if type(v[1]) == "number" then return { sampling.token_ids("prompt", v, nil, n_vocab) } end
    if #v > limits.prompts then
        fields.bad("prompt", ("at most %d prompts expected, got %d"):format(limits.prompts, #v), "array_too_long")
    end
    local list, kind = {}, type(v[1])
    if kind ~= "string" and not json.is_array(v[1]) then bad_prompt(v[1]) end
    for i, p in ipairs(v) do
        if type(p) ~= kind or (kind == "table" and not json.is_array(p)) then
            fields.bad("prompt", "texts and token ids can't be mixed")
        end
        list[i] = kind == "string" and p
            or sampling.token_ids(("prompt[%d]"):format(i - 1), p, nil, n_vocab)
    end
    return list
end

--- The ids of each prompt, checked.
local function encode_all(model, list, opts)
    local all = {}
    for i, p in ipairs(list) do
        local param = #list == 1 and "prompt" or ("prompt[%d]"):format(i - 1)
        local ids = p
        if type(p) == "string" then
            ids = loop.breathing(choices.guarded, model.tokenize, model, p,
                { special = opts.parse_special, bos = opts.bos })
        end
        if #ids == 0 then fields.bad(param, "it is empty") end
        local all_ids = ids
        ids = choices.truncate(model, ids, opts.truncate)
        if ids ~= all_ids then list[i] = ids end -- what an echo repeats
        choices.check_length(model, #ids, param, opts.max_tokens)
        all[i] = ids
    end
    return all
end

local function refuse_unknown(r)
    for _, name in ipairs { "suffix", "prompt_embeds" } do
        if r:get(name) ~= nil and r:get(name) ~= "" then fields.bad(name, "not supported", "unsupported_parameter") end
    end
end

local function read(r, model, limits)
    local o = sampling.read(r, model, limits, 0)
    refuse_unknown(r)
    o.max_tokens = o.max_tokens or 16
    o.gen.max_tokens = o.max_tokens > 0 and o.max_tokens or nil
    o.logprobs = r:integer("logprobs", 0, limits.logprobs)
    o.gen.logprobs = o.logprobs
    o.echo = r:boolean "echo" or false
    o.best_of = r:integer("best_of", 1, limits.best_of) or o.n
    if o.best_of < o.n then fields.bad("best_of", "n or more expected") end
    if o.best_of > o.n and o.stream then fields.bad("best_of", "more than n can't be streamed") end
    if o.best_of > o.n then o.gen.logprobs = o.gen.logprobs or 0 end
    local parse, bos = r:boolean "parse_special", r:boolean "add_special_tokens"
    o.parse_special, o.bos = parse ~= false, bos ~= false
    o.prompts = sampling.check_texts("prompt", prompt_list(r:get "prompt", limits, model.info.n_vocab), limits)
    constraints.read(r, model, o)
    sampling.check_work(limits, #o.prompts * o.best_of, o.max_tokens)
    o.ids = encode_all(model, o.prompts, o)
    return o
end

--- The text of a prompt as echo gives it, and the records of its tokens.
local function echo_of(model, s, o, i)
    local text = o.prompts[i]
    if type(text) ~= "string" then text = model:detokenize(o.ids[i], { special = true }) end
    if not o.logprobs then return { text = text, records = {} } end
    local ids, records = o.ids[i], {}
    local scored = #ids > 1 and choices.guarded(s.score, s, { from = 2, top = o.logprobs }) or {}
    records[1] = { id = ids[1], text = model.vocab:piece(ids[1]) }
    for k, r in ipairs(scored) do records[k + 1] = r end
    for _, r in ipairs(records) do
        r.hidden = type(o.prompts[i]) == "string" and o.bos and r == records[1] and model.info.add_bos
    end
    return { text = text, records = records }
end

--- Nothing is asked for but the prompt.
local function nothing(o, i)
    return {
        text = "", tokens = {}, finish_reason = "length", records = {}, logprobs = {},
        usage = { prompt_tokens = #o.ids[i], cached_tokens = 0, completion_tokens = 0 },
    }
end

local function mean_logprob(r)
    local sum = 0
    for _, t in ipairs(r.logprobs) do sum = sum + t.logprob end
    return #r.logprobs > 0 and sum / #r.logprobs or -math.huge
end

--- One prompt's candidates: a list of results. on_piece(candidate, text, records), on_end(candidate, result).
local function run_prompt(model, o, i, hooks)
    local close <close> = setmetatable({}, { -- luacheck: ignore 211
        __close = function(list)
            for _, s in ipairs(list) do s:close() end
        end,
    })
    local count = o.best_of
    local echo
    local sessions = {}
    if o.max_tokens > 0 or (o.echo and o.logprobs) then
        sessions = choices.sessions(model, o.ids[i], 1, o, close)
        if o.echo then echo = echo_of(model, sessions[1], o, i) end
        if count > 1 and o.max_tokens > 0 then
            choices.guarded(sessions[1].logits, sessions[1])
            for k, f in ipairs(table.pack(choices.guarded(sessions[1].fork, sessions[1], count - 1))) do
                close[#close + 1], sessions[k + 1] = f, f
            end
        end
    elseif o.echo then
        echo = echo_of(model, nil, o, i)
    end
    local results = choices.all(count, function(k)
        local counter = choices.counter()
        if hooks and echo then hooks.piece(k, echo.text, echo.records, counter, 0) end
        if o.max_tokens == 0 then
            local r = nothing(o, i)
            if hooks then hooks.done(k, r, counter) end
            return r
        end
        local gen = {}
        for name, v in pairs(o.gen) do gen[name] = v end
        gen.seed = o.seed + k - 1
        local script <close> = o.script and o.script:start() or nil
        local r = choices.run(model, sessions[k], gen, hooks and function(text, records, tokens)
            hooks.piece(k, text, records, counter, tokens)
        end, script)
        if hooks then hooks.done(k, r, counter) end
        return r
    end)
    for _, r in ipairs(results) do r.echo = echo end
    return results
end

local choice_keys = { "index", "text", "logprobs", "finish_reason", "stop_reason" }

local function choice_of(index, text, logprobs, finish, stop)
    return json.object({
        index = index, text = text, logprobs = logprobs or json.null, finish_reason = finish or json.null,
        stop_reason = stop or json.null,
    }, choice_keys)
end

--- The text that is shown of a result, without its echo.
local function text_of(r, o)
    return o.include_stop and r.stop and r.text .. r.stop or r.text
end

local function whole_choice(o, r, index)
    local text, logprobs = text_of(r, o), nil
    local echo = o.echo and r.echo
    if o.logprobs then
        local counter, records = choices.counter(), {}
        if echo then records = table.move(echo.records, 1, #echo.records, 1, {}) end
        table.move(r.records, 1, #r.records, #records + 1, records)
        logprobs = choices.completion_logprobs(records, counter, o.logprobs)
    end
    if echo then text = echo.text .. text end
    return choice_of(index, text, logprobs, choices.finish_reason(r), choices.stop_reason(r, o.gen))
end

local body_keys = { "id", "object", "created", "model", "choices", "usage" }

local function whole(model, o, name)
    local all, list, n_prompt = choices.all(#o.ids, function(i) return run_prompt(model, o, i) end), json.array(), 0
    local counted = {}
    for i, results in ipairs(all) do
        n_prompt = n_prompt + #o.ids[i]
        table.move(results, 1, #results, #counted + 1, counted)
        if o.best_of > o.n then
            for _, r in ipairs(results) do r.rank = mean_logprob(r) end
            table.sort(results, function(a, b) return a.rank > b.rank end)
        end
        for k = 1, o.n do list[#list + 1] = whole_choice(o, results[k], #list) end
    end
    return json.object({
        id = choices.id "cmpl", object = "text_completion", created = os.time(), model = name, choices = list,
        usage = choices.usage(n_prompt, counted),
    }, body_keys)
end

local function stream(model, o, name, res)
    local id, created, n_prompt = choices.id "cmpl", os.time(), 0
    for _, ids in ipairs(o.ids) do n_prompt = n_prompt + #ids end
    local function send(list, usage)
        res:event(json.object({
            id = id, object = "text_completion", created = created, model = name, choices = list,
            usage = usage or (o.include_usage and json.null or nil),
        }, body_keys))
    end
    local all = {}
    choices.all(#o.ids, function(i)
        local function index(k) return (i - 1) * o.n + k - 1 end
        local function so_far(tokens) return o.usage_always and choices.usage_so_far(#o.ids[i], tokens) or nil end
        local hooks = {
            piece = function(k, text, records, counter, tokens)
                local lp = o.logprobs and choices.completion_logprobs(records or {}, counter, o.logprobs)
                send(json.array { choice_of(index(k), text, lp) }, so_far(tokens))
            end,
            done = function(k, r, counter)
                all[#all + 1] = r
                local lp = o.logprobs and #r.records > 0 and
                    choices.completion_logprobs(r.records, counter, o.logprobs) or nil
                local text = o.include_stop and r.stop or ""
                send(json.array { choice_of(index(k), text, lp, choices.finish_reason(r),
                    choices.stop_reason(r, o.gen)) }, so_far(r.usage.completion_tokens))
            end,
        }
        return run_prompt(model, o, i, hooks)
    end)
    if o.include_usage then send(json.array(), choices.usage(n_prompt, all)) end
    res:event "[DONE]"
end

--- The route function's work.
---@param api table
---@param req table
---@param res table
function M.answer(api, req, res)
    local r = fields.read(req)
    local model, name = api:model(r)
    local o = read(r, model, api.limits)
    scripts.read(api, r, req, o)
    api:admit(req, model, o.gen)
    local place <close> = scripts.place(api, o) -- luacheck: ignore 211
    if not o.stream then return whole(model, o, name) end
    stream(model, o, name, res)
end

return M
