--- tokenizer.json and what stands beside it (tokenizer_config.json, generation_config.json, chat_template.jinja) as a
--- vocabulary of core.vocab_new.

local core = require "llmrun.core"
local json = require "llmrun.json"
local steps = require "llmrun.hf.steps"
local words = require "llmrun.words"

local M = {}

local function fail(fmt, ...) error({ message = words.quoting(fmt, ...), code = "format" }, 0) end
local function unsupported(fmt, ...) error({ message = words.quoting(fmt, ...), code = "unsupported" }, 0) end

local NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
local MOST = 1 << 24

local function get(t, name)
    local v = t[name]
    if v == json.null then return nil end
    return v
end

--- The chat template: chat_template.jinja, or that of tokenizer_config.json (of several the one named default).
function M.template(path, read, read_json)
    local file = read(path, "chat_template.jinja", 4 << 20)
    if file then return file end
    local c = read_json(path, "tokenizer_config.json")
    local t = c and get(c, "chat_template")
    if type(t) == "table" then
        for _, named in ipairs(t) do
            if type(named) == "table" and named.name == "default" then return named.template end
        end
        local first = t[1]
        return type(first) == "table" and type(first.template) == "string" and first.template or nil
    end
    return type(t) == "string" and t or nil
end

-- ---- tokens ----

local function check_id(id, what)
    if math.type(id) ~= "integer" or id < 0 or id >= MOST then
        fail("tokenizer.json: %s has the id %s", what, tostring(id))
    end
    return id
end

--- Tokens and scores of the model's vocabulary into tok.tokens, tok.scores (0-based); tok.n: one more than the highest
--- id.
local function read_vocab(tok, model)
    local vocab = model.vocab
    if type(vocab) ~= "table" then fail("tokenizer.json: model.vocab is missing") end
    if json.is_array(vocab) then -- Unigram: { token, score }
        tok.scores = {}
        for i, pair in ipairs(vocab) do
            if type(pair) ~= "table" or type(pair[1]) ~= "string" or type(pair[2]) ~= "number" then
                fail("tokenizer.json: model.vocab[%d] is no token with its score", i - 1)
            end
            tok.tokens[i - 1], tok.scores[i - 1], tok.n = pair[1], pair[2], i
        end
        return
    end
    for token, id in pairs(vocab) do
        check_id(id, ("token %q"):format(token))
        if tok.tokens[id] then fail("tokenizer.json: tokens %q and %q have the id %d", tok.tokens[id], token, id) end
        tok.tokens[id] = token
        if id >= tok.n then tok.n = id + 1 end
    end
end

--- Added tokens: names that stand for themselves in texts. Those from `size` on, which the weights know nothing of, are
--- left out.
local function read_added(tok, list, size)
    tok.flags = {}
    for i, a in ipairs(list or {}) do
        if type(a) ~= "table" or type(a.content) ~= "string" then
            fail("tokenizer.json: added_tokens[%d] is no token", i - 1)
        end
        local id = check_id(a.id, ("added token %q"):format(a.content))
        if id < (size or MOST) and a.content ~= "" then
            tok.tokens[id] = a.content
            tok.types[id] = a.special and CONTROL or USER
            if id >= tok.n then tok.n = id + 1 end
            local f = (a.lstrip and 1 or 0) | (a.rstrip and 2 or 0) | (a.single_word and 4 or 0)
            if f ~= 0 then tok.flags[id] = f end
        end
    end
end

local function id_of(tok, text)
    for id, t in pairs(tok.tokens) do
        if t == text then return id end
    end
end

--- Ids of special tokens by their names in tokenizer_config.json, else as config.json and generation_config.json say.
local function read_special(tok, named, o)
    local function of(name)
        local v = named and get(named, name .. "_token")
        if type(v) == "table" then v = v.content end
        local id = type(v) == "string" and id_of(tok, v)
        if id then return id end
        for _, c in ipairs { o.generation or {}, o.config or {} } do
            local n = get(c, name .. "_token_id")
            if type(n) == "table" then n = n[1] end
            if math.type(n) == "integer" and n >= 0 and n < tok.n then return n end
        end
    end
    tok.bos, tok.eos, tok.pad = tok.bos or of "bos", of "eos", of "pad"
    tok.eogs = {}
    for _, c in ipairs { o.generation or {}, o.config or {} } do
        local n = get(c, "eos_token_id")
        for _, id in ipairs(type(n) == "table" and n or { n }) do
            if math.type(id) == "integer" and id >= 0 and id < tok.n then tok.eogs[#tok.eogs + 1] = id end
        end
    end
end

--- BOS and EOS that the post-processor puts round a text.
local function read_template(tok, post)
    if post == nil then return end
    if post.type == "Sequence" then
        for _, p in ipairs(post.processors or {}) do read_template(tok, p) end
        return
    elseif post.type == "ByteLevel" then
        return
    elseif post.type == "BertProcessing" or post.type == "RobertaProcessing" then
        tok.add_bos, tok.bos, tok.add_eos = true, check_id(post.cls[2], "cls"), true
        return
    elseif post.type ~= "TemplateProcessing" then
        unsupported("tokenizer.json: post_processor '%s' is not supported", tostring(post.type))
    end
    local before, after, seen = {}, {}, false
    for _, piece in ipairs(post.single or {}) do
        if piece.Sequence then
            seen = true
        elseif piece.SpecialToken then
            local list = seen and after or before
            list[#list + 1] = piece.SpecialToken.id
        end
    end
    if #before > 1 or #after > 1 then
        unsupported("tokenizer.json: post_processor puts %d tokens before and %d behind a text", #before, #after)
    end
    local function id(name)
        local s = type(post.special_tokens) == "table" and post.special_tokens[name]
        local n = type(s) == "table" and type(s.ids) == "table" and s.ids[1]
        if math.type(n) ~= "integer" or not tok.tokens[n] then
            fail("tokenizer.json: post_processor's token %q has no id", tostring(name))
        end
        return n
    end
    if before[1] then tok.add_bos, tok.bos = true, id(before[1]) end
    if after[1] then tok.add_eos, tok.eos_after = true, id(after[1]) end
end

-- ---- models ----

local function read_merges(model)
    local list, out = get(model, "merges"), {}
    if not json.is_array(list) then fail("tokenizer.json: model.merges is no list") end
    for i, m in ipairs(list) do
        if type(m) == "table" and type(m[1]) == "string" and type(m[2]) == "string" then
            local apart = (m[1] .. m[2]):find(" ", 1, true) and "\0" or " "
            out[i] = m[1] .. apart .. m[2]
        elseif type(m) == "string" and m:find(" ", 2, true) then
            out[i] = m
        else
            fail("tokenizer.json: model.merges[%d] is not two tokens", i - 1)
        end
    end
    return out
end

--- The lists that core.vocab_new takes, padded to the size of the embedding.
local function columns(tok, size)
    local n = size and math.max(size, 1) or tok.n
    if tok.n > n then
        fail("tokenizer.json has tokens up to %d, config.json's vocab_size is %d", tok.n - 1, n)
    end
    local tokens, types, scores = {}, {}, tok.scores and {}
    for id = 0, n - 1 do
        local t = tok.tokens[id]
        tokens[id + 1] = t or ("[PAD%d]"):format(id)
        types[id + 1] = not t and UNUSED or tok.types[id] or NORMAL
        if tok.unk == id and types[id + 1] == NORMAL then types[id + 1] = UNKNOWN end
        if tok.bytes and types[id + 1] == NORMAL and t:find("^<0x%x%x>$") then types[id + 1] = BYTE end
        if scores then scores[id + 1] = tok.scores[id] or 0 end
    end
    return tokens, types, scores
end

--- Calls fn(...). Where a value of the file is of another kind than the format says, what Lua or a binding raises is a
--- text; it becomes an error like ours, without its place in our code.
local function of_file(fn, ...)
    local function done(ok, v, ...)
        if ok then return v, ... end
        if type(v) ~= "string" then error(v, 0) end
        if v:find("not enough memory", 1, true) then error({ message = "not enough memory", code = "no_memory" }, 0) end
        fail("tokenizer.json is not of the form that is known: %s", (v:gsub("^[^\n]-%.lua:%d+: ", "")))
    end
    return done(pcall(fn, ...))
end

local function spec_of(path, o)
    local t = o.read_json(path, "tokenizer.json")
    if not t then unsupported("the folder has no tokenizer.json, which is the form of tokenizers that is read") end
    local named = o.read_json(path, "tokenizer_config.json")
    local model = get(t, "model")
    if type(model) ~= "table" then fail("tokenizer.json: 'model' is missing") end
    local size = o.size and o.size[1]
    local tok = { tokens = {}, types = {}, n = 0 }
    read_vocab(tok, model)
    if tok.n == 0 then fail("tokenizer.json: model.vocab is empty") end
    read_added(tok, get(t, "added_tokens"), size)
    local unk = get(model, "unk_token")
    if type(unk) == "string" then tok.unk = id_of(tok, unk) end
    if math.type(get(model, "unk_id")) == "integer" then tok.unk = model.unk_id end
    read_template(tok, get(t, "post_processor"))
    read_special(tok, named, o)
    tok.bytes = get(model, "byte_fallback") == true
    local spec = steps.read(t, model)
    local tokens, types, scores = columns(tok, size)
    spec.tokens, spec.types, spec.logs = tokens, types, scores
    if spec.model ~= "unigram" then spec.merges = read_merges(model) end
    spec.flags = {}
    for id, f in pairs(tok.flags) do
        spec.flags[#spec.flags + 1] = id
        spec.flags[#spec.flags + 1] = f
    end
    spec.bos, spec.eos, spec.unk, spec.pad = tok.bos, tok.eos_after or tok.eos, tok.unk, tok.pad
    spec.eogs = tok.eogs
    spec.add_bos, spec.add_eos = tok.add_bos, tok.add_eos
    return spec
end

--- What core.vocab_new takes to make the vocabulary of a folder. o: read, read_json, size ({ vocab_size }), config,
--- generation. Raises errors.
function M.spec(path, o) return of_file(spec_of, path, o) end

--- The vocabulary of a folder; o as above. Raises errors.
function M.vocab(path, o)
    local v, err, code = of_file(core.vocab_new, M.spec(path, o))
    if not v then error({ message = "tokenizer.json: " .. err, code = code }, 0) end
    return v
end

return M
