--- The sampling fields of a request, as options of s:gen.
---
--- Fields: OpenAI's (temperature, top_p, presence_penalty, frequency_penalty, logit_bias, seed, stop, max_tokens,
--- max_completion_tokens, logprobs, top_logprobs, n) and those that vLLM and SGLang add (top_k, min_p, typical_p,
--- repetition_penalty, min_tokens, stop_token_ids, ignore_eos, skip_special_tokens, include_stop_str_in_output,
--- allowed_token_ids, priority: lower comes first, cache_salt, truncate_prompt_tokens). Those of theirs that change
--- what is written and are not here are refused; others are left alone.
---
--- Bounds (limits below) are checked before anything is taken up for the request. Choice i of several has seed + i.

local fields = require "llmrun.openai.fields"
local json = require "llmrun.json"
local seeds = require "llmrun.seeds"

local M = {}

--- Caps, to be changed with the option `limits` of the API.
M.limits = {
    n = 128, best_of = 20, prompts = 1024, choices = 1024, total_tokens = 262144, logprobs = 20, stop = 64,
    stop_bytes = 4096, logit_bias = 300, stop_token_ids = 256, allowed_token_ids = 100000, tools = 128,
    messages = 16384, embeddings = 2048,
    text_bytes = 2 << 20, -- of all texts of a request; cutting them into tokens takes 0.1 to 0.5 s
}

--- Checks the texts of a list of prompts, which may hold lists of ids too.
function M.check_texts(param, list, limits)
    local bytes = 0
    for _, v in ipairs(list) do bytes = bytes + (type(v) == "string" and #v or 0) end
    fields.fits(param, bytes, limits.text_bytes)
    return list
end

local function read_stop(r, limits)
    local v = r:get "stop"
    if v == nil then return nil end
    if type(v) == "string" then
        if v == "" then return nil end
        return { fields.text("stop", v, limits.stop_bytes) }
    end
    fields.array("stop", v, limits.stop, function(param, item)
        if item == nil then fields.wrong_type(param, "string", json.null) end
        fields.text(param, item, limits.stop_bytes)
        if item == "" then fields.bad(param, "an empty text would end the answer at once") end
    end)
    return #v > 0 and table.move(v, 1, #v, 1, {}) or nil
end

--- Checks token ids against the vocabulary; returns a plain list.
function M.token_ids(param, v, max, n_vocab)
    if v == nil then return nil end
    local ids = {}
    fields.array(param, v, max, function(at, id)
        id = type(id) == "number" and math.tointeger(id) or fields.wrong_type(at, "token id (integer)", id)
        if id < 0 or id >= n_vocab then
            fields.bad(at, ("%d is no token id of this model (0 to %d)"):format(id, n_vocab - 1), "invalid_token_id")
        end
        ids[#ids + 1] = id
    end)
    return ids
end

local function bias_entry(out, param, id, bias, n_vocab)
    local n = math.type(id) == "integer" and id
        or type(id) == "string" and #id < 12 and id:find "^%-?%d+$" and math.tointeger(tonumber(id))
    if not n or n < 0 or n >= n_vocab then
        fields.bad(param, ("%s is no token id of this model (0 to %d)"):format(fields.show(id), n_vocab - 1),
            "invalid_token_id")
    end
    if type(bias) ~= "number" then fields.wrong_type(param, "number", bias) end
    if bias < -100 or bias > 100 then fields.bad(param, ("-100 to 100 expected, got %s"):format(bias)) end
    out[n] = bias
end

--- logit_bias: { "id": number } or [[id, number], ...]. -100 bans.
local function read_bias(r, limits, n_vocab, gen)
    local v = r:get "logit_bias"
    if v == nil then return end
    if type(v) ~= "table" then fields.wrong_type("logit_bias", "object", v) end
    local out = {}
    if json.is_array(v) then
        fields.array("logit_bias", v, limits.logit_bias, function(param, pair)
            if not json.is_array(pair) or #pair ~= 2 then fields.wrong_type(param, "[id, number]", pair) end
            bias_entry(out, param, pair[1], pair[2], n_vocab)
        end)
    else
        local keys = json.keys(v)
        if #keys > limits.logit_bias then
            fields.bad("logit_bias", ("at most %d entries expected, got %d"):format(limits.logit_bias, #keys))
        end
        for _, id in ipairs(keys) do
            local shown = #id > 20 and id:sub(1, 20) or id
            bias_entry(out, "logit_bias." .. shown, id, v[id], n_vocab)
        end
    end
    local banned = {}
    for id, bias in pairs(out) do
        if bias == -100 then
            banned[#banned + 1] = id
            out[id] = nil
        end
    end
    table.sort(banned)
    if next(out) then gen.logit_bias = out end
    if #banned > 0 then gen.banned_tokens = banned end
end

local function read_max_tokens(r, least)
    local limit = r:integer("max_completion_tokens", least, 2147483647)
    local old = r:integer("max_tokens", least, 2147483647)
    return limit or old
end

--- What others' servers do, and would be missed if it were passed over.
local function refuse_unknown(r)
    for _, name in ipairs { "bad_words", "logits_processors", "prompt_logprobs" } do
        local v = r:get(name)
        if v ~= nil and not (json.is_array(v) and #v == 0) then
            fields.bad(name, "not supported", "unsupported_parameter")
        end
    end
    if r:boolean "use_beam_search" then fields.bad("use_beam_search", "not supported", "unsupported_parameter") end
end

--- How many of a prompt's last tokens count: nil for all.
local function read_truncate(r)
    local n = r:integer("truncate_prompt_tokens", -1, 2147483647)
    if n == 0 then fields.bad("truncate_prompt_tokens", "-1, or 1 or more expected, got 0") end
    return n
end

--- Options of s:gen; and n, seed, and what else of the fields matters to who asks: { gen, n, seed, max_tokens,
--- include_stop, stream, include_usage, usage_always (in every part of a stream), truncate (see choices.truncate) }.
---@param r table a reader of fields
---@param model llmrun.Model
---@param limits table
---@param least integer smallest max_tokens
function M.read(r, model, limits, least)
    local n_vocab = model.info.n_vocab
    local gen = {}
    refuse_unknown(r)
    r:object "metadata"
    gen.temperature = r:number("temperature", 0, 100)
    local top_p = r:number("top_p", 0, 1)
    if top_p == 0 then gen.temperature = 0 elseif top_p and top_p < 1 then gen.top_p = top_p end
    local top_k = r:integer("top_k", -1)
    if top_k and top_k > 0 then gen.top_k = top_k end
    local min_p = r:number("min_p", 0, 1)
    if min_p and min_p > 0 then gen.min_p = min_p end
    local typical = r:number("typical_p", 0, 1)
    if typical and typical > 0 and typical < 1 then gen.typical_p = typical end
    local repetition = r:number("repetition_penalty", 0, 100)
    if repetition == 0 then fields.bad("repetition_penalty", "above 0 expected, got 0") end
    if repetition and repetition ~= 1 then gen.repetition_penalty = repetition end
    local presence, frequency = r:number("presence_penalty", -2, 2), r:number("frequency_penalty", -2, 2)
    if presence and presence ~= 0 then gen.presence_penalty = presence end
    if frequency and frequency ~= 0 then gen.frequency_penalty = frequency end
    read_bias(r, limits, n_vocab, gen)
    gen.stop = read_stop(r, limits)
    gen.stop_ids = M.token_ids("stop_token_ids", r:get "stop_token_ids", limits.stop_token_ids, n_vocab)
    gen.allowed_tokens = M.token_ids("allowed_token_ids", r:get "allowed_token_ids", limits.allowed_token_ids, n_vocab)
    if gen.allowed_tokens and #gen.allowed_tokens == 0 then fields.bad("allowed_token_ids", "it is empty") end
    local min_tokens = r:integer("min_tokens", 0, 2147483647)
    if min_tokens and min_tokens > 0 then gen.min_tokens = min_tokens end
    gen.ignore_eos = r:boolean "ignore_eos"
    if r:boolean "skip_special_tokens" == false then gen.special = true end
    local priority = r:integer("priority", -1000000, 1000000)
    if priority then gen.priority = -priority end
    local user = r:text("user", 4096)
    if user and user ~= "" then gen.tenant = user:sub(1, 63) end
    local max = read_max_tokens(r, least)
    if max and max > 0 then gen.max_tokens = max end
    if max and min_tokens and min_tokens > max then fields.bad("min_tokens", "more than max_tokens") end
    local stream = r:boolean "stream" or false
    local so = r:object "stream_options"
    if so and not stream then fields.bad("stream_options", "only together with stream = true") end
    so = so and fields.reader(so, "stream_options.")
    local include_usage = so and so:boolean "include_usage" or false
    local always = so and so:boolean "continuous_usage_stats" or false
    return {
        gen = gen, n = r:integer("n", 1, limits.n) or 1, seed = r:integer "seed" or seeds.next(), max_tokens = max,
        include_stop = r:boolean "include_stop_str_in_output", stream = stream,
        include_usage = include_usage, usage_always = include_usage and always,
        salt = r:text("cache_salt", 1024), truncate = read_truncate(r),
        text_bytes = limits.text_bytes,
    }
end

--- Refuses what would be too much work in one request.
function M.check_work(limits, choices, max_tokens)
    if choices > limits.choices then
        fields.bad("n", ("at most %d choices in one request, asked for %d"):format(limits.choices, choices))
    end
    if choices > 1 and max_tokens and choices * max_tokens > limits.total_tokens then
        fields.bad("max_tokens", ("at most %d tokens in one request, asked for %d times %d"):format(
            limits.total_tokens, choices, max_tokens))
    end
end

return M
