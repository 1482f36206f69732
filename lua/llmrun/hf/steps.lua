--- The normalizer, pre-tokenizer and decoder of tokenizer.json as steps of core.vocab_new.
---
--- The usual rules of byte-level tokenizers have matchers of their own (src/text/presplit.c), which take linear time
--- and no stack: a pre-tokenizer that says just what one of them does is that rule.

local json = require "llmrun.json"

local M = {}

local function unsupported(fmt, ...)
    error({ message = ("tokenizer.json: " .. fmt):format(...), code = "unsupported" }, 0)
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
    local words = {}
    for i, p in ipairs(parts) do
        if p.type == "ByteLevel" then
            if p.add_prefix_space or i < #parts then return nil end
            if p.use_regex ~= false then words[#words + 1] = "gpt2" end
        elseif p.type == "Digits" then
            words[#words + 1] = p.individual_digits and "digits1" or "digits"
        elseif p.type == "Split" and p.behavior == "Isolated" and not p.invert and type(p.pattern) == "table"
            and p.pattern.Regex then
            words[#words + 1] = "split:" .. p.pattern.Regex
        else
            return nil
        end
    end
    return table.concat(words, ",")
end

--- Fields of core.vocab_new that say how text becomes tokens.
function M.read(t, model)
    local normal, pre = flat(get(t, "normalizer"), "normalizers"), flat(get(t, "pre_tokenizer"), "pretokenizers")
    local kind = model.type or (model.merges and "BPE")
    if kind == "BPE" and #pre > 0 and pre[#pre].type == "ByteLevel" then
        local nfc = #normal == 1 and normal[1].type == "NFC"
        local rule = (#normal == 0 or nfc) and RULES[line(pre) or ""]
        if rule then
            return { model = "gpt2", pre = rule, nfc = nfc, whole = get(model, "ignore_merges") == true }
        end
    end
    unsupported("a %s model with %s before it is not supported", tostring(kind), #pre > 0 and pre[1].type or "nothing")
end

return M
