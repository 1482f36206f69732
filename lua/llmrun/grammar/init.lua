--- Grammars: what a generated text must look like.
---
---   local grammar = require "llmrun.grammar"
---   local g, err = grammar.compile { json = { type = "object", ... } }     -- or regex =, choices =, grammar =, lark =
---   local m = g:matcher(vocab)           -- walks one text; see lua_matcher.c for its methods
---
--- compile takes exactly one of
---   json     a JSON schema: a table, JSON text (then properties keep their order), or true for any JSON value
---   regex    a regular expression in ECMAScript's syntax; the whole text must match
---   choices  a list of strings
---   grammar  GBNF, as llama.cpp reads it; the text is what rule root matches
---   lark     EBNF as Lark writes it; the text is what rule start matches
---   tagged   free text with values of a schema between marks (tagged.lua)
--- and options: whitespace ("line", "none", "pretty"), one_of ("any"), ignore (a list of words) for json (see
--- json_schema.lua), holes = { name = function(text) -> list of strings }: in grammar and lark, <name> is a place where
--- one of the strings must stand that the function returns when the text has come there; root = name of the first rule.
---
--- Errors: nil, text with the place, code ("format", "unsupported", "limit", "invalid").

local core = require "llmrun.core"
local options = require "llmrun.options"
local refuse = require "llmrun.grammar.refuse"

local M = {}

---@class llmrun.Grammar
local Grammar = {}
Grammar.__index = Grammar

local KINDS = { "json", "regex", "choices", "grammar", "lark", "tagged" }
local KNOWN = {
    json = "any", regex = "string", choices = "table", grammar = "string", lark = "string", whitespace = "string",
    one_of = "string", ignore = "table", holes = "table", root = "string", tagged = "table",
}

-- Each defines the rule of one kind: (builder, value, options) -> rule, holes.
local make = {}

function make.json(b, schema, opts)
    return require("llmrun.grammar.json_schema").rule(b, schema, opts)
end

function make.regex(b, pattern)
    local r, text, code = core.regex(pattern)
    if not r then refuse.raise(code, text) end
    local rule = b:rule "regex"
    b:define(rule, b:regex(r, "raw"))
    return rule
end

function make.choices(b, list)
    if #list == 0 then refuse.raise("invalid", "choices: the list is empty") end
    for i, s in ipairs(list) do
        if type(s) ~= "string" then refuse.raise("format", "choices: string expected at %d, got %s", i, type(s)) end
        if s == "" then refuse.raise("invalid", "choices: an empty string at %d", i) end
    end
    local rule = b:rule "choices"
    b:define(rule, b:lits(list))
    return rule
end

function make.grammar(b, text, opts)
    return require("llmrun.grammar.gbnf").rule(b, text, opts)
end

function make.lark(b, text, opts)
    return require("llmrun.grammar.lark").rule(b, text, opts)
end

function make.tagged(b, spec, opts)
    return require("llmrun.grammar.tagged").rule(b, spec, opts)
end

local function compile(kind, opts)
    local b = refuse.check(kind, core.grammar_builder())
    local ok, rule, holes = pcall(make[kind], b, opts[kind], opts)
    if not ok then
        local text, code = b:error()
        if text and type(rule) == "string" then refuse.raise(code, "%s: %s", kind, text) end
        error(rule, 0)
    end
    local core_grammar, text, code = b:compile(rule)
    if not core_grammar then refuse.raise(code, "%s: %s", kind, text) end
    return setmetatable({ core = core_grammar, kind = kind, holes = holes or {}, fns = opts.holes }, Grammar)
end

--- Compiles a grammar.
---@param opts table
---@return llmrun.Grammar? grammar, string? err, string? code
function M.compile(opts)
    options.check("grammar.compile", opts, KNOWN, 2)
    local kind
    for _, k in ipairs(KINDS) do
        if opts[k] ~= nil then
            if kind then error(("grammar.compile: both %s and %s"):format(kind, k), 2) end
            kind = k
        end
    end
    if not kind then error("grammar.compile: one of " .. table.concat(KINDS, ", ") .. " is needed", 2) end
    return refuse.guard(compile, kind, opts)
end

--- A matcher at the start of a text. holes: functions in place of those that compile got.
---@param vocab any
---@param opts? { strip_space?: boolean, holes?: table<string, function> }
function Grammar:matcher(vocab, opts)
    local o = { strip_space = opts and opts.strip_space or nil }
    if #self.holes > 0 then
        local names, fns = self.holes, opts and opts.holes or self.fns
        o.hole = function(id, text) return fns[names[id]](text) end
    end
    return core.matcher(self.core, vocab, o)
end

--- Sizes: { rules, states, holes, dfa, frames, bytes, walked }.
function Grammar:info() return self.core:info() end

return M
