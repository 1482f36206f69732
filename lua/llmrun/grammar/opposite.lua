--- Opposites: the schemas that hold where a schema does not, for not, if, oneOf and maxContains.

local json = require "llmrun.json"
local refs = require "llmrun.grammar.refs"
local refuse = require "llmrun.grammar.refuse"
local words = require "llmrun.grammar.words"

local M = {} -- methods
local raise, at_of = refuse.raise, refs.at

local function append(a, b)
    local out = { table.unpack(a) }
    for _, v in ipairs(b) do out[#out + 1] = v end
    return out
end

-- Schemas that together are the opposite of one, of which one must hold; nil if that can't be said.
local OPPOSITE = {
    minimum = function(v) return { type = "number", exclusiveMaximum = v } end,
    maximum = function(v) return { type = "number", exclusiveMinimum = v } end,
    exclusiveMinimum = function(v) return { type = "number", maximum = v } end,
    exclusiveMaximum = function(v) return { type = "number", minimum = v } end,
    minLength = function(v) return v > 0 and { type = "string", maxLength = v - 1 } or false end,
    maxLength = function(v) return { type = "string", minLength = v + 1 } end,
    minItems = function(v) return v > 0 and { type = "array", maxItems = v - 1 } or false end,
    maxItems = function(v) return { type = "array", minItems = v + 1 } end,
    minProperties = function(v) return v > 0 and { type = "object", maxProperties = v - 1 } or false end,
    maxProperties = function(v) return { type = "object", minProperties = v + 1 } end,
    pattern = function(v) return { type = "string", ["$nopattern"] = v } end,
    ["$nopattern"] = function(v) return { type = "string", pattern = v } end,
}

local function quote_pattern(list)
    local out = {}
    for i, s in ipairs(list) do out[i] = s:gsub("[%^%$%\\%.%*%+%?%(%)%[%]%{%}%|/]", "\\%0") end
    return "^(?:" .. table.concat(out, "|") .. ")$"
end

local function opposite_type(v)
    local keep, gone = json.array(), {}
    for _, t in ipairs(type(v) == "table" and v or { v }) do gone[t] = true end
    if gone.integer and not gone.number then
        gone.number = true
        keep[1] = "$fraction"
    end
    for _, t in ipairs { "null", "boolean", "number", "string", "array", "object" } do
        if not gone[t] then keep[#keep + 1] = t end
    end
    return { type = keep }
end

-- Numbers that are none of a list.
local function between(numbers_list, out)
    table.sort(numbers_list)
    local low
    for _, v in ipairs(numbers_list) do
        if low == nil or v > low then
            out[#out + 1] = { type = "number", exclusiveMinimum = low, exclusiveMaximum = v }
            low = v
        end
    end
    out[#out + 1] = { type = "number", exclusiveMinimum = low }
end

local function opposite_enum(list)
    local texts, values, gone, bools, out = {}, {}, {}, {}, {}
    for _, v in ipairs(list) do
        local t = words.type_of(v)
        if t == "string" then
            texts[#texts + 1] = v
        elseif t == "boolean" then
            bools[tostring(v)] = true
        elseif t == "integer" or t == "number" then
            values[#values + 1] = v
            t = "number"
        elseif t ~= "null" then
            return nil
        end
        gone[t] = true
    end
    local keep = json.array()
    for _, t in ipairs { "null", "boolean", "number", "string", "array", "object" } do
        if not gone[t] then keep[#keep + 1] = t end
    end
    out[1] = { type = keep }
    if gone.string then out[#out + 1] = { type = "string", ["$nopattern"] = quote_pattern(texts) } end
    if gone.number then between(values, out) end
    for _, v in ipairs { true, false } do
        if gone.boolean and not bools[tostring(v)] then out[#out + 1] = { const = v } end
    end
    return out
end

-- Opposites of words that hold schemas: (self, value, place, schema) -> list or nil.
local OPPOSITE_OF = {}

function OPPOSITE_OF.properties(self, v, at)
    local out = {}
    for _, name in ipairs(json.keys(v)) do
        local none = self:opposite(v[name], at_of(at, name))
        if not none then return nil end
        for _, s in ipairs(none) do
            out[#out + 1] = { type = "object", required = json.array { name }, properties = json.object { [name] = s } }
        end
    end
    return out
end

function OPPOSITE_OF.required(_, v)
    local out = {}
    for _, name in ipairs(v) do out[#out + 1] = { type = "object", ["$forbidden"] = name } end
    return out
end

function OPPOSITE_OF.allOf(self, v, at)
    local out = {}
    for i, s in ipairs(v) do
        local none = self:opposite(s, at_of(at, i - 1))
        if not none then return nil end
        out = append(out, none)
    end
    return out
end

function OPPOSITE_OF.anyOf(self, v, at)
    local all = json.array()
    for i, s in ipairs(v) do
        local none = self:opposite(s, at_of(at, i - 1))
        if not none then return nil end
        all[i] = { anyOf = json.array(none) }
    end
    return { { allOf = all } }
end

OPPOSITE_OF["not"] = function(_, v) return { v } end
function OPPOSITE_OF.type(_, v)
    local s = opposite_type(v)
    return s and { s }
end
function OPPOSITE_OF.enum(_, v) return opposite_enum(v) end
function OPPOSITE_OF.const(_, v) return opposite_enum { v } end
OPPOSITE_OF["$forbidden"] = function(_, v) return { { type = "object", required = json.array { v } } } end

OPPOSITE_OF["$ref"] = function(self, v, at, s)
    local target, place = self.refs:resolve(v, s, at)
    return self:opposite(target, place)
end

function M.opposite(self, s, at)
    self:work(1)
    if type(s) == "boolean" then return s and {} or { true } end
    if type(s) ~= "table" then raise("format", "%s: a schema expected", at) end
    self.opposing = (self.opposing or 0) + 1
    if self.opposing > 100 then raise("limit", "%s: nested too deeply", at) end
    local out = {}
    local list_of = {}
    for word in pairs(s) do list_of[#list_of + 1] = word end
    table.sort(list_of)
    for _, word in ipairs(list_of) do
        local list
        if OPPOSITE[word] and type(s[word]) ~= "boolean" then
            local one = OPPOSITE[word](s[word])
            list = one and { one } or {}
        elseif OPPOSITE_OF[word] then
            list = OPPOSITE_OF[word](self, s[word], at_of(at, word), s)
        elseif words.means_nothing(word) then
            list = {}
        end
        if not list then
            self.opposing = self.opposing - 1
            return nil
        end
        out = append(out, list)
    end
    self.opposing = self.opposing - 1
    return out
end

return M
