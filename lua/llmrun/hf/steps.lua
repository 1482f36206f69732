--- The normalizer, pre-tokenizer and decoder of tokenizer.json as steps of core.vocab_new.
---
--- The usual rules of byte-level tokenizers have matchers of their own (src/text/presplit.c), which take linear time
--- and no stack: a pre-tokenizer that says just what one of them does is that rule.

local json = require "llmrun.json"
local words = require "llmrun.words"

local M = {}

local function unsupported(fmt, ...)
    error({ message = words.quoting("tokenizer.json: " .. fmt, ...), code = "unsupported" }, 0)
end

local function get(t, name)
    local v = t[name]
    if v == json.null then return nil end
    return v
end

--- A normalizer or pre-tokenizer as a list of its parts.
local function flat(part, field, out)
    out = out or {}
    if part == nil then return out end
    if type(part) ~= "table" then unsupported("'%s' is no object", field) end
    if part.type == "Sequence" then
        for _, p in ipairs(part[field] or {}) do flat(p, field, out) end
    else
        out[#out + 1] = part
    end
    return out
end

local CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
local TAIL = [[| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+]]
local UPPER, LOWER = [=[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]]=], [=[[\p{Ll}\p{Lm}\p{Lo}\p{M}]]=]
local WORD = [=[[^\r\n\p{L}\p{N}]?]=]

--- What a list of steps says, in one line -> the rule that does it.
local RULES = {
    ["gpt2"] = "gpt-2",
    ["digits1,gpt2"] = "smollm",
    ["split:" .. CONTRACTIONS .. "|" .. WORD .. [[\p{L}+|\p{N}]] .. TAIL] = "hunyuan",
    ["split:" .. CONTRACTIONS .. "|" .. WORD .. [[\p{L}+|\p{N}{1,3}]] .. TAIL] = "dbrx",
    ["split:" .. WORD .. UPPER .. "*" .. LOWER .. "+" .. CONTRACTIONS .. "?|" .. WORD .. UPPER .. "+" .. LOWER .. "*"
        .. CONTRACTIONS .. [[?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+]]] = "gpt-4o",
    ["split:" .. WORD .. UPPER .. "*" .. LOWER .. "+|" .. WORD .. UPPER .. "+" .. LOWER
        .. [[*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+]]] = "tekken",
}

--- The one-line name of byte-level pre-tokenizer steps; nil if they have none. The last must be ByteLevel.
local function line(parts)
    local named = {}
    for i, p in ipairs(parts) do
        if p.type == "ByteLevel" then
            if p.add_prefix_space or i < #parts then return nil end
            if p.use_regex ~= false then named[#named + 1] = "gpt2" end
        elseif p.type == "Digits" then
            named[#named + 1] = p.individual_digits and "digits1" or "digits"
        elseif p.type == "Split" and p.behavior == "Isolated" and not p.invert and type(p.pattern) == "table"
            and p.pattern.Regex then
            named[#named + 1] = "split:" .. p.pattern.Regex
        else
            return nil
        end
    end
    return table.concat(named, ",")
end

-- ---- steps ----

local function text_of(v, what)
    if type(v) ~= "string" then unsupported("%s is no text", what) end
    return v
end

local WORDS = [[\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}]]

--- An expression in Oniguruma's words in those of PCRE2: \w has marks in it. \W within a class can't be said.
local function translated(regex)
    local out, i, class = {}, 1, 0
    while i <= #regex do
        local c = regex:sub(i, i)
        if c == "\\" then
            c = regex:sub(i, i + 1)
            i = i + 1
            if c == "\\w" then
                c = class > 0 and WORDS or "[" .. WORDS .. "]"
            elseif c == "\\W" then
                if class > 0 then unsupported("the expression %q has \\W in a class", regex:sub(1, 80)) end
                c = "[^" .. WORDS .. "]"
            end
        elseif c == "[" then
            class = class + 1
        elseif c == "]" and class > 0 then
            class = class - 1
        end
        out[#out + 1] = c
        i = i + 1
    end
    return table.concat(out)
end

--- A pattern of { String = } or { Regex = } as fields of a step.
local function pattern(p, step)
    local v = type(p) == "table" and p or {}
    step.regex = v.Regex ~= nil
    step.pattern = text_of(v.Regex or v.String, "a pattern")
    if step.regex then step.pattern = translated(step.pattern) end
    return step
end

local BASE64 = {}
for i = 1, 64 do
    BASE64[("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"):byte(i)] = i - 1
end

local function base64(text)
    local out, bits, n = {}, 0, 0
    for i = 1, #text do
        local v = BASE64[text:byte(i)]
        if v then
            bits, n = (bits << 6 | v) & 0xFFFFFF, n + 6
            if n >= 8 then
                n = n - 8
                out[#out + 1] = string.char(bits >> n & 255)
            end
        end
    end
    return table.concat(out)
end

local BEHAVIOR = { Removed = "removed", Isolated = "isolated", MergedWithPrevious = "previous",
    MergedWithNext = "next", Contiguous = "contiguous" }

local function behavior(p)
    return BEHAVIOR[p.behavior or ""] or unsupported("behavior '%s' is not known", tostring(p.behavior))
end

local NORMAL = {
    NFC = function() return { kind = "nfc" } end,
    NFD = function() return { kind = "nfd" } end,
    NFKC = function() return { kind = "nfkc" } end,
    NFKD = function() return { kind = "nfkd" } end,
    Lowercase = function() return { kind = "lower" } end,
    StripAccents = function() return { kind = "strip_accents" } end,
    Strip = function(p) return { kind = "strip", a = p.strip_left == true, b = p.strip_right == true } end,
    Replace = function(p) return pattern(p.pattern, { kind = "replace", content = text_of(p.content, "content") }) end,
    Prepend = function(p) return { kind = "prepend", content = text_of(p.prepend, "prepend") } end,
    Precompiled = function(p)
        local map = get(p, "precompiled_charsmap")
        return map and map ~= "" and { kind = "charsmap", content = base64(text_of(map, "precompiled_charsmap")) }
    end,
}

local PRE = {
    ByteLevel = function(p)
        if p.use_regex == false then
            if p.add_prefix_space then unsupported("ByteLevel with add_prefix_space, but without its expression") end
            return nil
        end
        return { kind = "gpt2", a = p.add_prefix_space == true }
    end,
    Split = function(p)
        return pattern(p.pattern, { kind = "split", behavior = behavior(p), a = p.invert == true })
    end,
    Metaspace = function(p)
        local scheme = get(p, "prepend_scheme") or (p.add_prefix_space == false and "never" or "always")
        return { kind = "metaspace", content = text_of(p.replacement, "replacement"), prepend = scheme,
                 a = p.split ~= false }
    end,
    Digits = function(p) return { kind = "digits", a = p.individual_digits == true } end,
    Punctuation = function(p) return { kind = "punctuation", behavior = p.behavior and behavior(p) or "isolated" } end,
    WhitespaceSplit = function() return { kind = "spaces" } end,
    Whitespace = function()
        return { kind = "split", regex = true, pattern = translated [=[\w+|[^\w\s]+]=], behavior = "removed", a = true }
    end,
    CharDelimiterSplit = function(p)
        return { kind = "split", pattern = text_of(p.delimiter, "delimiter"), behavior = "removed" }
    end,
}

local function add_steps(list, parts, known, what)
    for _, p in ipairs(parts) do
        local make = known[p.type or ""]
        if not make then unsupported("%s '%s' is not supported", what, tostring(p.type)) end
        list[#list + 1] = make(p) or nil
    end
end

--- Whether decoding takes a space away at the start.
local function strips(decoder)
    for _, d in ipairs(flat(decoder, "decoders")) do
        if d.type == "Strip" and d.content == " " and (d.start or 0) > 0 then return true end
        if d.type == "Metaspace" then
            return (get(d, "prepend_scheme") or (d.add_prefix_space == false and "never" or "always")) ~= "never"
        end
    end
    return false
end

--- Fields of core.vocab_new that say how text becomes tokens.
function M.read(t, model)
    local normal, pre = flat(get(t, "normalizer"), "normalizers"), flat(get(t, "pre_tokenizer"), "pretokenizers")
    local kind = get(model, "type")
    if not kind then kind = json.is_array(model.vocab) and "Unigram" or "BPE" end
    if kind ~= "BPE" and kind ~= "Unigram" then unsupported("model '%s' is not supported", tostring(kind)) end
    for _, name in ipairs { "continuing_subword_prefix", "end_of_word_suffix" } do
        local v = get(model, name)
        if v and v ~= "" then unsupported("model.%s '%s' is not supported", name, tostring(v)) end
    end
    local bytes = kind == "BPE" and #pre > 0 and pre[#pre].type == "ByteLevel"
    local whole = get(model, "ignore_merges") == true
    local nfc = #normal == 1 and normal[1].type == "NFC"
    local rule = bytes and (#normal == 0 or nfc) and RULES[line(pre) or ""]
    if rule then return { model = "gpt2", pre = rule, nfc = nfc, whole = whole } end
    local list, once = {}, false
    add_steps(list, normal, NORMAL, "normalizer")
    add_steps(list, pre, PRE, "pre_tokenizer")
    for _, s in ipairs(list) do once = once or (s.kind == "metaspace" and s.prepend == "first") end
    if #list == 0 then list[1] = { kind = "prepend", content = "" } end
    return { model = bytes and "gpt2" or kind == "BPE" and "chars" or "unigram", steps = list, whole = whole,
             fuse_unk = get(model, "fuse_unk") == true, add_space_prefix = strips(get(t, "decoder")),
             prefix_once = once }
end

return M
