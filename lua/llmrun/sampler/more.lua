--- Stages and options of samplers that look further than one row: dynamic temperature, XTC, DRY, no-repeat n-grams,
--- mirostat, adaptive-p. What they do is told in src/sample/stages_more.c.

local errors = require "llmrun.errors"
local options = require "llmrun.options"

local M = {}

--- Texts after which a repetition begins anew, as in llama.cpp.
M.breakers = { "\n", ":", '"', "*" }

--- Stages with named settings: name -> { setting = { type, default }, ... }; the first may be given without its name.
local settings = {
    dynamic_temperature = { first = "temperature", temperature = { "number", 1 }, range = { "number", 0.5 },
        exponent = { "number", 1 } },
    xtc = { first = "probability", probability = { "number", 0.5 }, threshold = { "number", 0.1 } },
    dry = { first = "multiplier", multiplier = { "number", 0.8 }, base = { "number", 1.75 },
        allowed_length = { "integer", 2 }, window = { "integer", 0 }, breakers = { "table", M.breakers } },
    no_repeat_ngram = { first = "n", n = { "integer", 3 }, window = { "integer", 0 } },
    mirostat = { first = "version", version = { "integer", 2 }, tau = { "number", 5 }, eta = { "number", 0.1 },
        m = { "integer", 100 } },
    adaptive_p = { first = "target", target = { "number", 0.5 }, decay = { "number", 0.9 } },
}

-- What each becomes for lua_sample.c.
local make = {
    dynamic_temperature = function(o) return { "dynamic", o.temperature, o.range, o.exponent } end,
    xtc = function(o) return { "xtc", o.probability, o.threshold } end,
    dry = function(o) return { "dry", o.multiplier, o.base, o.allowed_length, o.window, o.breakers } end,
    no_repeat_ngram = function(o) return { "no_repeat", o.n, o.window } end,
    mirostat = function(o, call)
        if o.version == 1 then return { "mirostat1", o.tau, o.eta, o.m } end
        if o.version ~= 2 then
            errors.raise(call, ("mirostat: version 1 or 2 expected, got %s"):format(tostring(o.version)))
        end
        return { "mirostat2", o.tau, o.eta }
    end,
    adaptive_p = function(o) return { "adaptive_p", o.target, o.decay } end,
}

--- name -> function(i, stage) -> stage in core form; the stage is { name, value, setting = ... }.
M.builders = {}
for name, known in pairs(settings) do
    local types = {}
    for k, v in pairs(known) do
        if k ~= "first" then types[k] = v[1] end
    end
    M.builders[name] = function(i, stage)
        local call, given, o = ("llm.sampler: stage %d: %s"):format(i, name), {}, {}
        for k, v in pairs(stage) do
            if k == 2 then given[known.first] = v elseif k ~= 1 then given[k] = v end
        end
        options.check(call, given, types, 5)
        for k in pairs(types) do
            o[k] = given[k]
            if o[k] == nil then o[k] = known[k][2] end
        end
        return make[name](o, "llm.sampler")
    end
end

--- Options of gen: name -> type.
M.options = {
    dynatemp_range = "number", dynatemp_exponent = "number", xtc_probability = "number", xtc_threshold = "number",
    dry_multiplier = "number", dry_base = "number", dry_allowed_length = "integer", dry_window = "integer",
    dry_breakers = "table", no_repeat_ngram = "integer", mirostat = "integer", mirostat_tau = "number",
    mirostat_eta = "number", adaptive_target = "number", adaptive_decay = "number", thinking_budget = "integer",
}

--- An option that means nothing without another.
local needs = {
    dynatemp_exponent = "dynatemp_range", xtc_threshold = "xtc_probability", dry_base = "dry_multiplier",
    dry_allowed_length = "dry_multiplier", dry_window = "dry_multiplier", dry_breakers = "dry_multiplier",
    mirostat_tau = "mirostat", mirostat_eta = "mirostat", adaptive_decay = "adaptive_target",
}

--- Options that have no effect beside a sampler of one's own.
M.replaced = { "dynatemp_range", "xtc_probability", "mirostat", "adaptive_target" }

local function build(name, o, call)
    local full = {}
    for k, v in pairs(settings[name]) do
        if k ~= "first" then
            full[k] = o[k]
            if full[k] == nil then full[k] = v[2] end
        end
    end
    return make[name](full, call)
end

--- Raises if an option is there without the one that it belongs to.
function M.check(call, o)
    for name, other in pairs(needs) do
        if o[name] ~= nil and o[other] == nil then errors.raise(call, ("%s without %s"):format(name, other)) end
    end
    if o.mirostat and o.adaptive_target then errors.raise(call, "mirostat or adaptive_target, not both") end
end

--- Stages against repetitions, for the beginning of a chain.
function M.repetition(s, call, o)
    if o.dry_multiplier then
        s[#s + 1] = build("dry", { multiplier = o.dry_multiplier, base = o.dry_base, window = o.dry_window,
            allowed_length = o.dry_allowed_length, breakers = o.dry_breakers }, call)
    end
    if o.no_repeat_ngram then s[#s + 1] = build("no_repeat_ngram", { n = o.no_repeat_ngram }, call) end
end

--- A temperature that follows the entropy, if it is wanted.
function M.dynamic(call, o, temperature)
    if not o.dynatemp_range then return nil end
    return build("dynamic_temperature", { temperature = temperature, range = o.dynatemp_range,
        exponent = o.dynatemp_exponent }, call)
end

--- Stages for the end of a chain.
function M.last(s, call, o)
    if o.xtc_probability then
        s[#s + 1] = build("xtc", { probability = o.xtc_probability, threshold = o.xtc_threshold }, call)
    end
    if o.mirostat and o.mirostat ~= 0 then
        s[#s + 1] = build("mirostat", { version = o.mirostat, tau = o.mirostat_tau, eta = o.mirostat_eta }, call)
    elseif o.adaptive_target then
        s[#s + 1] = build("adaptive_p", { target = o.adaptive_target, decay = o.adaptive_decay }, call)
    end
end

-- Breakers ------------------------------------------------------------------------------------------------------------

local of_vocab = setmetatable({}, { __mode = "k" }) -- vocabulary -> text -> ids of the tokens that hold it

--- All at once: one pass over the vocabulary for the texts not seen before.
local function look_up(vocab, texts)
    local known = of_vocab[vocab] or {}
    of_vocab[vocab] = known
    local new = {}
    for _, text in ipairs(texts) do
        if not known[text] then
            known[text] = {}
            new[#new + 1] = text
        end
    end
    if #new > 0 then
        for id = 0, #vocab - 1 do
            local piece = vocab:piece(id)
            for _, text in ipairs(new) do
                if piece:find(text, 1, true) then known[text][#known[text] + 1] = id end
            end
        end
    end
    return known
end

--- Replaces the texts among the breakers of DRY stages by token ids. Without a vocabulary, texts are refused.
function M.resolve(call, stages, vocab)
    for i, s in ipairs(stages) do
        if s[1] == "dry" then
            local ids, texts = {}, {}
            for _, b in ipairs(s[6]) do
                if math.type(b) == "integer" then
                    ids[#ids + 1] = b
                elseif type(b) == "string" and b ~= "" then
                    texts[#texts + 1] = b
                else
                    errors.raise(call, ("dry: a breaker is a text or a token id, not '%s'"):format(tostring(b)))
                end
            end
            if #texts > 0 and not vocab then
                errors.raise(call, "dry: breakers given as texts need a model's vocabulary; give token ids")
            end
            local known = #texts > 0 and look_up(vocab, texts)
            for _, text in ipairs(texts) do table.move(known[text], 1, #known[text], #ids + 1, ids) end
            stages[i] = { s[1], s[2], s[3], s[4], s[5], ids }
        end
    end
    return stages
end

return M
