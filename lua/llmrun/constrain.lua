--- What a generated text must look like: the options json, regex, choices, grammar and lua of s:gen and s:stream.
---
---   json     a JSON schema (a table, or its text), or true for any JSON value; the result's `value` is what came
---   regex    a regular expression in ECMAScript's syntax; the whole text must match
---   choices  a list of strings
---   grammar  GBNF (rules with ::=) or EBNF as Lark writes it (rules with :)
---   lua      a function(prefix): sees the text so far and says what comes next (below)
---   tagged   { open =, close =, json = schema }: free text with values of a schema between marks (grammar/tagged.lua)
---   holes    { name = function(text) -> list of strings } for grammar: <name> in it asks when the text has come there
---   whitespace, one_of  for json, as grammar.compile takes them
---
--- One of the first six. What can't be honoured is an error of the call, which names the place.
---
--- The function of lua is called at the beginning, and whenever a piece that it gave may have ended. It returns nil or
--- false: the text is complete; a string: this comes next; a list of strings: one of them does; or a table with one of
--- json, regex, choices, grammar (and holes): what comes next matches that. A piece is never empty, and no token
--- belongs to two pieces. Where a piece may both end and go on (digits), so may the text.
---
--- Compiled grammars are kept, by their content: the last used, within bounds. Functions run between two tokens: they
--- can't wait. An error in one is the error of its own request.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local grammars = require "llmrun.grammar"
local json = require "llmrun.json"
local loop = require "llmrun.loop"

local M = {}

local KINDS = { "json", "regex", "choices", "grammar", "lua", "tagged" }

--- Names and types, for options.check.
M.options = {
    json = "any", regex = "string", choices = "table", grammar = "string", lua = "function", holes = "table",
    whitespace = "string", one_of = "string", tagged = "table",
}

-- Compiled grammars ---------------------------------------------------------------------------------------------------

local MAX_KEPT, MAX_BYTES = 64, 128 << 20

local kept, n_kept, clock = {}, 0, 0
local vocabs, n_vocabs = setmetatable({}, { __mode = "k" }), 0

--- The raw vocabulary of a model, and a number for it: masks in a grammar are those of one vocabulary.
local function vocab_of(model)
    local v = model.vocab.core or model.vocab
    if not vocabs[v] then
        n_vocabs = n_vocabs + 1
        vocabs[v] = n_vocabs
    end
    return v, vocabs[v]
end

local function forget_oldest()
    local oldest
    for _, e in pairs(kept) do
        if not oldest or e.used < oldest.used then oldest = e end
    end
    kept[oldest.key] = nil
    n_kept = n_kept - 1
end

local function bytes_kept()
    local sum = 0
    for key, e in pairs(kept) do sum = sum + #key + e.grammar:info().bytes end
    return sum
end

local function keep(key, grammar)
    kept[key] = { key = key, grammar = grammar, used = clock }
    n_kept = n_kept + 1
    while n_kept > MAX_KEPT or n_kept > 1 and bytes_kept() > MAX_BYTES do forget_oldest() end
end

--- Grammars that are kept at present, and their bytes.
function M.kept() return n_kept, bytes_kept() end

local function is_lark(text)
    for line in text:gmatch "[^\n]+" do
        if line:find("^%s*[%w_-]+%s*::=") then return false end
        local behind = line:match("^%s*[%w_?!]+()") -- by itself: both at once would try all ways to share the letters
        if behind and line:find("^[%w_.{} ,]*:", behind) or line:find("^%s*%%") then return true end
    end
    return false
end

--- What compile gets, and a text that stands for it; nil and why, if there is none.
local function request_of(kind, o)
    local v = o[kind]
    if kind == "json" or kind == "tagged" then
        local text = v
        if type(v) ~= "string" then
            local err
            text, err = json.encode(v)
            if not text then return nil, kind .. ": " .. err end
        end
        return { [kind] = v, whitespace = o.whitespace, one_of = o.one_of },
            ("%s\0%s\0%s\0%s"):format(kind, o.whitespace or "", o.one_of or "", text)
    elseif kind == "choices" then
        local parts = { "choices" }
        for i, s in ipairs(v) do parts[i + 1] = type(s) == "string" and string.pack("s4", s) or "?" .. type(s) end
        return { choices = v }, table.concat(parts, "\0")
    elseif kind == "grammar" then
        local names = {}
        for name in pairs(o.holes or {}) do names[#names + 1] = tostring(name) end
        table.sort(names)
        return { [is_lark(v) and "lark" or "grammar"] = v, holes = o.holes },
            ("grammar\0%s\0%s"):format(table.concat(names, "\0"), v)
    end
    return { [kind] = v }, kind .. "\0" .. v
end

--- The grammar of one of json, regex, choices, grammar, tagged in a table of options, for a model (nil: any).
--- nil, text, code: it can't be honoured.
---@param kind string
---@param o table
---@param model? llmrun.Model
function M.compile(kind, o, model)
    local request, key = request_of(kind, o)
    if not request then return nil, key, "format" end
    if model then key = key .. "\0" .. select(2, vocab_of(model)) end
    clock = clock + 1
    local e = kept[key]
    if e then
        e.used = clock
        return e.grammar
    end
    local g, text, code = grammars.compile(request)
    if not g then return nil, (text:gsub("^lark: ", "grammar: ")), code end
    if not kept[key] then keep(key, g) end -- another task may have compiled the same meanwhile (loop.breathe)
    return g
end

-- Options -------------------------------------------------------------------------------------------------------------

--- Which of the options is given (nil: none); two together are refused, and those that belong to none of them.
local function kind_of(call, o, lua_too)
    local kind
    for _, k in ipairs(KINDS) do
        if o[k] ~= nil and (k ~= "lua" or lua_too) then
            if kind then errors.raise(call, ("both %s and %s: one is enough"):format(kind, k)) end
            kind = k
        end
    end
    for name, of in pairs { holes = "grammar", whitespace = "json", one_of = "json" } do
        if o[name] ~= nil and kind ~= of then
            errors.raise(call, ("%s has no effect without %s"):format(name, of))
        end
    end
    for name, fn in pairs(o.holes or {}) do
        if type(name) ~= "string" or type(fn) ~= "function" then
            errors.raise(call, ("holes.%s: a function expected, got %s"):format(tostring(name), type(fn)))
        end
    end
    return kind
end

local function matcher_of(kind, o, model)
    local g, text, code = M.compile(kind, o, model)
    if not g then return nil, text:find("^" .. kind .. "[:,]") and text or kind .. ": " .. text, code end
    local m
    m, text, code = g:matcher((vocab_of(model)), { holes = o.holes })
    if not m then return nil, kind .. ": " .. text, code end
    return m
end

local PIECE = "the function's answer"

--- What the function of option lua returned, as a matcher, or nil: the text is complete. Raises texts.
local function piece_of(v, model)
    if v == nil or v == false then return nil end
    local o
    if type(v) == "string" then
        o = { choices = { v } }
    elseif type(v) == "table" then
        o = v[1] ~= nil and { choices = v } or v
    else
        error(("%s: a string, a list of strings, a table with json, regex, choices or grammar, or nil expected, got %s")
            :format(PIECE, type(v)), 0)
    end
    local ok, kind = pcall(kind_of, PIECE, o)
    if not ok then error(kind.message or kind, 0) end
    if not kind then error(PIECE .. ": a table without json, regex, choices or grammar", 0) end
    local want = M.options[kind]
    if want ~= "any" and type(o[kind]) ~= want then
        error(("%s: %s: %s expected, got %s"):format(PIECE, kind, want, type(o[kind])), 0)
    end
    local m, text = matcher_of(kind, o, model)
    if not m then error(PIECE .. ": " .. text, 0) end
    return m
end

--- What a request is held to by the options of a call: a matcher, or a function that gives one for each piece; and the
--- option's name. nil: nothing. Raises. Others may have their turn while a large grammar is compiled.
---@param call string
---@param o table
---@param model llmrun.Model
function M.from_options(call, o, model)
    local kind = kind_of(call, o, true)
    if not kind then return nil end
    if kind == "lua" then
        local fn = o.lua
        return core.pieces(function(prefix) return piece_of(fn(prefix), model) end), kind
    end
    local m, text, code = loop.breathing(matcher_of, kind, o, model)
    if not m then errors.raise(call, text, code) end
    return m, kind
end

return M
