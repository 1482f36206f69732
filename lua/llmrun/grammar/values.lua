--- JSON as a grammar: white space, strings, numbers, literal values, any value. One object of this is made per grammar.
---
--- White space is bounded. "line" (the default): one space or none behind each ":" and ","; "none": none at all;
--- "pretty": besides that, a line break and up to 32 spaces behind "{", "[" and "," and before "}" and "]".
--- Strings are RFC 8259's. Literal strings are spelt one way, as json.encode spells them.

local core = require "llmrun.core"
local json = require "llmrun.json"
local numbers = require "llmrun.grammar.number"
local loop = require "llmrun.loop"
local refuse = require "llmrun.grammar.refuse"

local Values = {}
Values.__index = Values

local ANY_CHAR = { 0, 0x10FFFF }

---@param b any builder of core
---@param whitespace string
local function new(b, whitespace)
    local v = setmetatable({ b = b, cache = {} }, Values)
    local space = b:rep(b:lit " ", 0, 1)
    local none = b:empty()
    local line = whitespace == "pretty" and
        b:rep(b:seq { b:lit "\n", b:rep(b:lit " ", 0, 32) }, 0, 1) or none
    local gap = whitespace == "none" and none or space
    if whitespace == "pretty" then
        gap = b:alt { space, b:seq { b:lit "\n", b:rep(b:lit " ", 0, 32) } }
    end
    v.comma = b:seq { b:lit ",", gap }
    v.colon = whitespace == "none" and b:lit ":" or b:seq { b:lit ":", space }
    v.open_object, v.close_object = b:seq { b:lit "{", line }, b:seq { line, b:lit "}" }
    v.open_array, v.close_array = b:seq { b:lit "[", line }, b:seq { line, b:lit "]" }
    return v
end

-- make(self), once for each key, as a rule that places call.
local function shared(self, key, make)
    local rule = self.cache[key]
    if not rule then
        rule = self.b:rule(key)
        self.cache[key] = rule
        self.b:keep(rule)
        self.b:define(rule, make(self))
    end
    return self.b:ref(rule)
end

--- A string of min..max characters (max -1: no bound).
function Values:string(min, max)
    return shared(self, ("string %d %d"):format(min, max), function()
        local b = self.b
        self.char = self.char or b:chars(ANY_CHAR, "json")
        return b:seq { b:lit '"', b:rep(self.char, min, max), b:lit '"' }
    end)
end

--- A string whose characters a regex of core matches. key: a name for it if it may come again.
function Values:matching(regex, key)
    local function make()
        return self.b:seq { self.b:lit '"', self.b:regex(regex, "json"), self.b:lit '"' }
    end
    if key then return shared(self, key, make) end
    return make()
end

--- What a node matches, but nothing twice in one array (items), or in one object (names).
function Values:unique(node, key)
    local rule = self.cache[key]
    if not rule then
        rule = self.b:rule(key)
        self.cache[key] = rule
        self.b:unique(rule)
        self.b:define(rule, node)
    end
    return self.b:ref(rule)
end

--- A name of an object: any, or one that a regex matches.
function Values:name(regex, key)
    if not regex then return self:unique(self:string(0, -1), "any name") end
    return self:unique(self:matching(regex), key)
end

function Values:pattern(text)
    return shared(self, text, function() return self.b:regex(refuse.check("number", core.regex(text)), "raw") end)
end

function Values:number() return self:pattern(numbers.any) end
function Values:integer() return self:pattern(numbers.any_integer) end
function Values:boolean() return self.b:lits { "true", "false" } end
function Values:null() return self.b:lit "null" end

local function encode(value, at)
    local text, err = json.encode(value)
    if not text then refuse.raise("format", "%s: %s", at, err) end
    return text
end

--- A literal value; objects keep the order of their keys.
function Values:literal(value, at)
    local b = self.b
    if type(value) ~= "table" then return b:lit(encode(value, at)) end
    local parts, is_array = {}, json.is_array(value)
    parts[1] = is_array and self.open_array or self.open_object
    if is_array then
        for i, v in ipairs(value) do
            if i > 1 then parts[#parts + 1] = self.comma end
            parts[#parts + 1] = self:literal(v, at)
        end
    else
        for i, k in ipairs(json.keys(value)) do
            if i > 1 then parts[#parts + 1] = self.comma end
            parts[#parts + 1] = b:lit(encode(k, at))
            parts[#parts + 1] = self.colon
            parts[#parts + 1] = self:literal(value[k], at)
        end
    end
    parts[#parts + 1] = is_array and self.close_array or self.close_object
    return b:seq(parts)
end

--- One of several literal values.
function Values:one_of(list, at)
    local texts, nodes = {}, {}
    for _, v in ipairs(list) do
        loop.breathe()
        if type(v) == "table" then
            nodes[#nodes + 1] = self:literal(v, at)
        else
            texts[#texts + 1] = encode(v, at)
        end
    end
    if #texts > 0 then nodes[#nodes + 1] = self.b:lits(texts) end
    return self.b:alt(nodes)
end

--- open, then items with commas between them or none, then close.
function Values:list(open, item, close)
    local b = self.b
    return b:seq { open, b:rep(b:seq { item, b:rep(b:seq { self.comma, item }, 0, -1) }, 0, 1), close }
end

--- Any object whose values are `value`; any array of them.
function Values:object_of(value)
    return self:list(self.open_object, self.b:seq { self:name(), self.colon, value }, self.close_object)
end

function Values:array_of(value) return self:list(self.open_array, value, self.close_array) end

--- Any value.
function Values:any()
    local rule = self.cache.any
    if not rule then
        local b = self.b
        rule = b:rule "any value"
        self.cache.any = rule
        local value = b:ref(rule)
        b:define(rule, b:alt {
            self:string(0, -1), self:number(), self:boolean(), self:null(), self:object_of(value), self:array_of(value),
        })
    end
    return self.b:ref(rule)
end

return { new = new }
