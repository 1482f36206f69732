--- Opposites: the schemas that hold where a schema does not, for not, if, oneOf and maxContains.
---
--- An opposite is a list of schemas of which one must hold. Some can't be said (of format, uniqueItems, what recurs);
--- they are left out of the list, so that what is said may be less than the whole opposite, but never more: a text that
--- obeys it does not obey the schema. The second result of opposite() tells whether something was left out.

local core = require "llmrun.core"
local json = require "llmrun.json"
local refs = require "llmrun.grammar.refs"
local refuse = require "llmrun.grammar.refuse"
local words = require "llmrun.grammar.words"

local M = {} -- methods
local raise, at_of = refuse.raise, refs.at
local MAX_PREFIX = 32

local function append(a, b)
    local out = { table.unpack(a) }
    for _, v in ipairs(b) do out[#out + 1] = v end
    return out
end

local function count(v, at)
    local n = type(v) == "number" and math.tointeger(v)
    if not n or n < 0 then raise("format", "%s: a whole number of at least 0 expected", at) end
    return n
end

local function any_of(list) return #list == 0 and false or { anyOf = json.array(list) } end

-- Opposites of words that hold plain values: (value, place) -> one schema.
local OPPOSITE = {
    minimum = function(v) return { type = "number", exclusiveMaximum = v } end,
    maximum = function(v) return { type = "number", exclusiveMinimum = v } end,
    exclusiveMinimum = function(v) return { type = "number", maximum = v } end,
    exclusiveMaximum = function(v) return { type = "number", minimum = v } end,
    minLength = function(v, at) return count(v, at) > 0 and { type = "string", maxLength = v - 1 } end,
    maxLength = function(v, at) return { type = "string", minLength = count(v, at) + 1 } end,
    minItems = function(v, at) return count(v, at) > 0 and { type = "array", maxItems = v - 1 } end,
    maxItems = function(v, at) return { type = "array", minItems = count(v, at) + 1 } end,
    minProperties = function(v, at) return count(v, at) > 0 and { type = "object", maxProperties = v - 1 } end,
    maxProperties = function(v, at) return { type = "object", minProperties = count(v, at) + 1 } end,
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
    local texts, values, gone, bools, out, said = {}, {}, {}, {}, {}, true
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
            said = false -- other arrays, other objects
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
    return out, not said
end

-- Opposites of words that hold schemas, or several values: (self, value, place, schema) -> list, whether it is less
-- than the whole.
local OPPOSITE_OF = {}

-- An object with a member of that name that does not obey a schema.
local function member_against(self, name, schema, at)
    local none, less = self:opposite(schema, at)
    local out = {}
    for i, s in ipairs(none) do
        out[i] = { type = "object", required = json.array { name }, properties = json.object { [name] = s } }
    end
    return out, less
end

function OPPOSITE_OF.properties(self, v, at)
    local out, less = {}, false
    for _, name in ipairs(json.keys(words.object_word(v, at))) do
        local list, l = member_against(self, name, v[name], at_of(at, name))
        out, less = append(out, list), less or l
    end
    return out, less
end

-- Of the names that a schema does not list, only those that are likely to come are looked at (self.likely).
function OPPOSITE_OF.patternProperties(self, v, at)
    local out = {}
    for _, text in ipairs(json.keys(words.object_word(v, at))) do
        local place = at_of(at, text)
        local r = refuse.check(place, core.regex(text, { search = true }))
        for _, name in ipairs(self.likely or {}) do
            if r:matches(name) then out = append(out, (member_against(self, name, v[text], place))) end
        end
    end
    return out, true
end

function OPPOSITE_OF.additionalProperties(self, v, at, s)
    local out, patterns = {}, {}
    for _, text in ipairs(s.patternProperties and json.keys(s.patternProperties) or {}) do
        patterns[#patterns + 1] = refuse.check(at, core.regex(text, { search = true }))
    end
    for _, name in ipairs(self.likely or {}) do
        local listed = s.properties ~= nil and s.properties[name] ~= nil
        for _, r in ipairs(patterns) do listed = listed or r:matches(name) end
        if not listed then out = append(out, (member_against(self, name, v, at))) end
    end
    return out, v ~= true
end

-- An array whose item i does not obey a schema.
local function item_against(self, i, schema, at)
    local none, less = self:opposite(schema, at)
    local s = any_of(none)
    if not s then return {}, less end
    local prefix = json.array()
    for k = 1, i - 1 do prefix[k] = true end
    prefix[i] = s
    return { { type = "array", minItems = i, prefixItems = prefix } }, less
end

local function prefix_against(self, v, at)
    local out, less = {}, false
    for i, s in ipairs(words.list_word(v, at)) do
        local list, l = item_against(self, i, s, at_of(at, i - 1))
        out, less = append(out, list), less or l
    end
    return out, less
end

OPPOSITE_OF.prefixItems = prefix_against

-- Of the items behind the listed ones only the first is looked at.
function OPPOSITE_OF.items(self, v, at, s)
    if json.is_array(v) and #v > 0 then
        local out, less = prefix_against(self, v, at)
        return out, less or s.additionalItems ~= nil
    end
    local n = s.prefixItems ~= nil and #words.list_word(s.prefixItems, at) or 0
    if n > MAX_PREFIX then return {}, true end
    local out, less = item_against(self, n + 1, v, at)
    return out, less or type(v) ~= "boolean"
end

function OPPOSITE_OF.contains(self, v, at, s)
    if s.minContains ~= nil or s.maxContains ~= nil then return {}, true end
    local none, less = self:opposite(v, at)
    return { { type = "array", items = any_of(none) } }, less
end

function OPPOSITE_OF.required(_, v, at)
    local out = {}
    if type(v) == "boolean" then return out end
    for i, name in ipairs(words.list_word(v, at)) do out[i] = { type = "object", ["$forbidden"] = name } end
    return out
end

function OPPOSITE_OF.allOf(self, v, at)
    local out, less = {}, false
    for i, s in ipairs(words.list_word(v, at)) do
        local list, l = self:opposite(s, at_of(at, i - 1))
        out, less = append(out, list), less or l
    end
    return out, less
end

function OPPOSITE_OF.anyOf(self, v, at)
    local all, less = json.array(), false
    for i, s in ipairs(words.list_word(v, at)) do
        local list, l = self:opposite(s, at_of(at, i - 1))
        all[i], less = any_of(list), less or l
    end
    return { { allOf = all } }, less
end

function OPPOSITE_OF.oneOf(self, v, at) -- none of them; two of them are left out
    return (OPPOSITE_OF.anyOf(self, v, at)), true
end

OPPOSITE_OF["not"] = function(_, v) return { v } end

OPPOSITE_OF["if"] = function(self, v, at, s)
    local out, base = {}, at:gsub("/if$", "")
    local none, less = self:opposite(v, at)
    local function both(head, word)
        local list, l = self:opposite(s[word], at_of(base, word))
        less = less or l
        for _, x in ipairs(list) do out[#out + 1] = { allOf = json.array { head, x } } end
    end
    if s["then"] ~= nil then both(v, "then") end
    if s["else"] ~= nil and #none > 0 then both(any_of(none), "else") end
    return out, less
end

function OPPOSITE_OF.type(_, v) return { opposite_type(v) } end
function OPPOSITE_OF.enum(_, v, at) return opposite_enum(words.list_word(v, at)) end
function OPPOSITE_OF.const(_, v) return opposite_enum { v } end
OPPOSITE_OF["$forbidden"] = function(_, v) return { { type = "object", required = json.array { v } } } end

OPPOSITE_OF["$ref"] = function(self, v, at, s)
    local target, place = self.refs:resolve(v, s, at)
    return self:opposite(target, place)
end

local NOTHING = { ["then"] = true, ["else"] = true }

function M.opposite(self, s, at)
    self:work(1)
    if type(s) == "boolean" then return s and {} or { true }, false end
    if type(s) ~= "table" then raise("format", "%s: a schema expected", at) end
    self.opposing = self.opposing or {}
    if self.opposing[s] then return {}, true end
    self.opposing[s] = true
    local out, less, list_of = {}, false, {}
    for word in pairs(s) do list_of[#list_of + 1] = word end
    table.sort(list_of)
    for _, word in ipairs(list_of) do
        if OPPOSITE[word] and type(s[word]) ~= "boolean" then
            out[#out + 1] = OPPOSITE[word](s[word], at_of(at, word)) or nil
        elseif OPPOSITE_OF[word] then
            local list, l = OPPOSITE_OF[word](self, s[word], at_of(at, word), s)
            out, less = append(out, list), less or l
        elseif not words.means_nothing(word) and not NOTHING[word] then
            less = true
        end
    end
    self.opposing[s] = nil
    return out, less
end

return M
