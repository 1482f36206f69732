--- JSON schemas (draft 2020-12, and what older drafts wrote otherwise) in a form that a grammar can be made of.
---
--- A place in a document falls under a "conjunction": a set of schemas that must all hold. It is expanded into a list of
--- constraints of which one must hold; a constraint has no $ref, allOf, anyOf and the like any more. It holds, for each
--- type, the bounds on values of that type; members of objects and arrays are conjunctions again, expanded only when
--- they are needed, so that schemas may refer to themselves.
---
--- Nothing is dropped silently: a word that can't be enforced is refused with its place.

local core = require "llmrun.core"
local json = require "llmrun.json"
local options = require "llmrun.options"
local formats = require "llmrun.grammar.formats"
local numbers = require "llmrun.grammar.number"
local refs = require "llmrun.grammar.refs"
local refuse = require "llmrun.grammar.refuse"

local Schema = {}
Schema.__index = Schema

local raise, at_of = refuse.raise, refs.at
local MAX_WORK, MAX_CHOICES = 200000, 400

-- Words that say something about values, and how they are read (own words), or that expand() sees to (true).
local WORDS = {
    ["$ref"] = true, allOf = true, anyOf = true, oneOf = true, ["not"] = true, ["if"] = true, ["then"] = true,
    ["else"] = true, dependentRequired = true, dependentSchemas = true, dependencies = true,
    unevaluatedProperties = true, unevaluatedItems = true, nullable = true, additionalItems = true,
    minContains = true, maxContains = true, patternProperties = true, additionalProperties = true, ["$nopattern"] = true,
}
local ANNOTATIONS = {}
for word in ([[$schema $id $anchor $defs $comment $vocabulary id definitions title description default examples example
    deprecated readOnly writeOnly contentEncoding contentMediaType contentSchema $dynamicAnchor]]):gmatch "%S+" do
    ANNOTATIONS[word] = true
end

local TYPES = {
    null = { "null" }, boolean = { "boolean" }, integer = { "integer" }, number = { "integer", "number" },
    string = { "string" }, array = { "array" }, object = { "object" },
}
local ALL = { "null", "boolean", "integer", "number", "string", "array", "object" }

-- Values --------------------------------------------------------------------------------------------------------------

--- A text that equal JSON values share.
local function canonical(v)
    if type(v) == "number" then
        local i = math.tointeger(v)
        return i and ("%d"):format(i) or ("%.17g"):format(v)
    elseif type(v) ~= "table" then
        return type(v) == "string" and ("%q"):format(v) or tostring(v)
    end
    local out = {}
    if json.is_array(v) then
        for i, x in ipairs(v) do out[i] = canonical(x) end
        return "[" .. table.concat(out, ",") .. "]"
    end
    local keys = {}
    for k in pairs(v) do keys[#keys + 1] = k end
    table.sort(keys)
    for i, k in ipairs(keys) do out[i] = ("%q"):format(k) .. ":" .. canonical(v[k]) end
    return "{" .. table.concat(out, ",") .. "}"
end

local function type_of(v)
    if v == json.null then return "null" end
    if type(v) == "number" then return math.tointeger(v) and "integer" or "number" end
    if type(v) == "table" then return json.is_array(v) and "array" or "object" end
    return type(v)
end

-- Reading words -------------------------------------------------------------------------------------------------------

local function fresh(at)
    local c = { at = at, types = {}, patterns = {}, multiples = {}, parts = {}, required = {}, forbidden = {}, names = {},
        arrays = {}, contains = {} }
    for _, t in ipairs(ALL) do c.types[t] = true end
    return c
end

local function number_word(v, at)
    if type(v) ~= "number" or v ~= v or v == math.huge or v == -math.huge then raise("format", "%s: a number expected", at) end
    return v
end

local function count_word(v, at)
    local n = type(v) == "number" and math.tointeger(v)
    if not n or n < 0 then raise("format", "%s: a whole number of at least 0 expected", at) end
    if n > 1048576 then raise("limit", "%s: %d is over the limit of 1048576", at, n) end
    return n
end

local function list_word(v, at)
    if type(v) ~= "table" or (next(v) ~= nil and not json.is_array(v)) then raise("format", "%s: a list expected", at) end
    return v
end

local function object_word(v, at)
    if type(v) ~= "table" or (next(v) ~= nil and json.is_array(v)) then raise("format", "%s: an object expected", at) end
    return v
end

local function raise_low(c, v, open)
    if c.low == nil or v > c.low or (v == c.low and open) then c.low, c.low_open = v, open end
end

local function lower_high(c, v, open)
    if c.high == nil or v < c.high or (v == c.high and open) then c.high, c.high_open = v, open end
end

local function at_least(c, field, n) if (c[field] or 0) < n then c[field] = n end end
local function at_most(c, field, n) if not c[field] or c[field] > n then c[field] = n end end

function Schema:loc(schema, at)
    if type(schema) ~= "boolean" and type(schema) ~= "table" then raise("format", "%s: a schema expected", at) end
    return { schema = schema, at = at }
end

local function add_regex(c, text, opts, at, key)
    local r, why, code = core.regex(text, opts)
    if not r then raise(code, "%s: %s", at, why) end
    c.patterns[#c.patterns + 1] = { regex = r, key = key }
end

-- Each reads one word: (self, constraint, value, place, schema).
local READ = {}

function READ.type(_, c, v, at)
    local list = type(v) == "table" and list_word(v, at) or { v }
    local types = {}
    for _, name in ipairs(list) do
        if not TYPES[name] then raise("format", "%s: '%s' is no type", at, tostring(name)) end
        for _, t in ipairs(TYPES[name]) do types[t] = true end
    end
    c.types = types
end

function READ.enum(_, c, v, at)
    c.enum = { table.unpack(list_word(v, at)) }
end

function READ.const(_, c, v)
    c.enum = { v }
end

function READ.minimum(_, c, v, at, s) raise_low(c, number_word(v, at), s.exclusiveMinimum == true) end
function READ.maximum(_, c, v, at, s) lower_high(c, number_word(v, at), s.exclusiveMaximum == true) end

function READ.exclusiveMinimum(_, c, v, at)
    if type(v) ~= "boolean" then raise_low(c, number_word(v, at), true) end
end

function READ.exclusiveMaximum(_, c, v, at)
    if type(v) ~= "boolean" then lower_high(c, number_word(v, at), true) end
end

function READ.multipleOf(_, c, v, at)
    if number_word(v, at) <= 0 then raise("format", "%s: a number above 0 expected", at) end
    c.multiples[#c.multiples + 1] = v
end

function READ.minLength(_, c, v, at) at_least(c, "min_len", count_word(v, at)) end
function READ.maxLength(_, c, v, at) at_most(c, "max_len", count_word(v, at)) end

function READ.pattern(_, c, v, at)
    if type(v) ~= "string" then raise("format", "%s: a string expected", at) end
    add_regex(c, v, { search = true }, at, "pattern " .. v)
end

function READ.format(_, c, v, at)
    if type(v) ~= "string" then raise("format", "%s: a string expected", at) end
    if formats.patterns[v] then add_regex(c, formats.patterns[v], nil, at, "format " .. v) end
end

function READ.minItems(_, c, v, at) at_least(c, "min_items", count_word(v, at)) end
function READ.maxItems(_, c, v, at) at_most(c, "max_items", count_word(v, at)) end
function READ.minProperties(_, c, v, at) at_least(c, "min_props", count_word(v, at)) end
function READ.maxProperties(_, c, v, at) at_most(c, "max_props", count_word(v, at)) end

function READ.uniqueItems(self, c, v, at)
    if v == true and not self.ignored.uniqueItems then c.unique = at end
end

function READ.required(_, c, v, at, s)
    if type(v) == "boolean" then return end -- draft 3, on a property
    for i, name in ipairs(list_word(v, at)) do
        if type(name) ~= "string" then raise("format", "%s/%d: a string expected", at, i - 1) end
        c.required[name] = true
        c.required[#c.required + 1] = name
    end
    return s
end

function READ.propertyNames(self, c, v, at) c.names[#c.names + 1] = self:loc(v, at) end

function READ.contains(self, c, v, at, s)
    local place = at:gsub("/contains$", "")
    local min = s.minContains ~= nil and count_word(s.minContains, place .. "/minContains") or 1
    local max = s.maxContains ~= nil and count_word(s.maxContains, place .. "/maxContains") or nil
    if min > 0 or max then c.contains[#c.contains + 1] = { loc = self:loc(v, at), min = min, max = max, at = at } end
end

-- properties, patternProperties and additionalProperties of one schema belong together.
function READ.properties(self, c, v, at)
    local part = self:part(c)
    for _, name in ipairs(json.keys(object_word(v, at))) do
        part.names[#part.names + 1] = name
        part.props[name] = self:loc(v[name], at_of(at, name))
    end
end

function Schema:part(c)
    local part = c.parts[1]
    if not part then
        part = { names = {}, props = {}, patterns = {} }
        c.parts[1] = part
    end
    return part
end

function READ.prefixItems(self, c, v, at) self:items_part(c).prefix = self:loc_list(v, at) end

function READ.items(self, c, v, at, s)
    if json.is_array(v) and #v > 0 then -- until 2019-09
        self:items_part(c).prefix = self:loc_list(v, at)
        if s.additionalItems ~= nil then
            self:items_part(c).items = self:loc(s.additionalItems, (at:gsub("items$", "additionalItems")))
        end
    else
        self:items_part(c).items = self:loc(v, at)
    end
end

function Schema:items_part(c)
    local part = c.arrays[1]
    if not part then
        part = { prefix = {} }
        c.arrays[1] = part
    end
    return part
end

function Schema:loc_list(v, at)
    local out = {}
    for i, s in ipairs(list_word(v, at)) do out[i] = self:loc(s, at_of(at, i - 1)) end
    return out
end

local function check_word(word, at)
    if READ[word] or WORDS[word] or ANNOTATIONS[word] then return end
    if word == "$dynamicRef" or word == "$recursiveRef" then
        raise("unsupported", "%s: %s is not known", at_of(at, word), word)
    end
    local known = {}
    for w in pairs(READ) do known[#known + 1] = w end
    for w in pairs(WORDS) do known[#known + 1] = w end
    table.sort(known)
    local near = #word > 4 and options.closest(word, known)
    if near and math.abs(#near - #word) <= 2 and (near:lower() == word:lower() or near:sub(1, 3) == word:sub(1, 3)) then
        raise("format", "%s: unknown word '%s'; '%s' is meant, it seems", at, word, near)
    end
end

-- The constraint of a schema's own words.
function Schema:own(loc)
    local c, s = fresh(loc.at), loc.schema
    local words = {}
    for word in pairs(s) do
        if type(word) ~= "string" then raise("format", "%s: a schema expected, not a list", loc.at) end
        if not self.ignored[word] then
            check_word(word, loc.at)
            if READ[word] then words[#words + 1] = word end
        end
    end
    table.sort(words)
    for _, word in ipairs(words) do READ[word](self, c, s[word], at_of(loc.at, word), s) end
    if s.patternProperties ~= nil then
        local at = at_of(loc.at, "patternProperties")
        for _, text in ipairs(json.keys(object_word(s.patternProperties, at))) do
            local place = at_of(at, text)
            local r, why, code = core.regex(text, { search = true })
            if not r then raise(code, "%s: %s", place, why) end
            local patterns = self:part(c).patterns
            patterns[#patterns + 1] = { regex = r, text = text, loc = self:loc(s.patternProperties[text], place) }
        end
    end
    if s.additionalProperties ~= nil then
        self:part(c).additional = self:loc(s.additionalProperties, at_of(loc.at, "additionalProperties"))
    end
    if s["$nopattern"] then
        local r = refuse.check(loc.at, core.regex(s["$nopattern"], { search = true }))
        c.patterns[#c.patterns + 1] = { regex = refuse.check(loc.at, r:none()), key = "no pattern " .. s["$nopattern"] }
    end
    if s.nullable == true and s.type ~= nil then
        c.types.null = true
        if c.enum then c.enum[#c.enum + 1] = json.null end
    end
    if s["$forbidden"] then c.forbidden[s["$forbidden"]] = true end
    return c
end

-- Joining constraints -------------------------------------------------------------------------------------------------

local function append(a, b)
    local out = { table.unpack(a) }
    for _, v in ipairs(b) do out[#out + 1] = v end
    return out
end

local function join_sets(a, b)
    local out = {}
    for _, side in ipairs { a, b } do
        for k, v in pairs(side) do
            if type(k) == "string" then out[k] = v end
        end
        for _, v in ipairs(side) do out[#out + 1] = v end
    end
    return out
end

-- What holds where both a and b do; nil if plainly nothing.
function Schema:join(a, b)
    self:work(1)
    local c = fresh(a.at)
    c.types = {}
    for t in pairs(a.types) do c.types[t] = b.types[t] end
    if not next(c.types) then return nil end
    if a.enum and b.enum then
        local has = {}
        for _, v in ipairs(b.enum) do has[canonical(v)] = true end
        c.enum = {}
        for _, v in ipairs(a.enum) do
            if has[canonical(v)] then c.enum[#c.enum + 1] = v end
        end
        if #c.enum == 0 then return nil end
    else
        c.enum = a.enum or b.enum
    end
    for _, x in ipairs { a, b } do
        if x.low ~= nil then raise_low(c, x.low, x.low_open) end
        if x.high ~= nil then lower_high(c, x.high, x.high_open) end
        for _, f in ipairs { "min_len", "min_items", "min_props" } do
            if x[f] then at_least(c, f, x[f]) end
        end
        for _, f in ipairs { "max_len", "max_items", "max_props" } do
            if x[f] then at_most(c, f, x[f]) end
        end
        c.unique = c.unique or x.unique
    end
    for _, f in ipairs { "patterns", "multiples", "parts", "names", "arrays", "contains" } do c[f] = append(a[f], b[f]) end
    c.required, c.forbidden = join_sets(a.required, b.required), join_sets(a.forbidden, b.forbidden)
    return c
end

function Schema:work(n)
    self.left = self.left - n
    if self.left < 0 then raise("limit", "the schema takes too much work: too many combinations of its parts") end
end

function Schema:cross(list, more, at)
    local out = {}
    for _, a in ipairs(list) do
        for _, b in ipairs(more) do
            out[#out + 1] = self:join(a, b)
            if #out > MAX_CHOICES then raise("limit", "%s: more than %d combinations", at, MAX_CHOICES) end
        end
    end
    return out
end

-- Expanding -----------------------------------------------------------------------------------------------------------

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
    if gone.integer and not gone.number then return nil end
    for _, t in ipairs { "null", "boolean", "number", "string", "array", "object" } do
        if not gone[t] then keep[#keep + 1] = t end
    end
    return { type = keep }
end

local function opposite_enum(list)
    local texts, gone, out = {}, {}, {}
    local bools = {}
    for _, v in ipairs(list) do
        local t = type_of(v)
        if t == "string" then
            texts[#texts + 1] = v
        elseif t == "boolean" then
            bools[tostring(v)] = true
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

function Schema:opposite(s, at, depth)
    self:work(1)
    if type(s) == "boolean" then return s and {} or { true } end
    if type(s) ~= "table" then raise("format", "%s: a schema expected", at) end
    self.opposing = (self.opposing or 0) + 1
    if self.opposing > 100 then raise("limit", "%s: nested too deeply", at) end
    local out = {}
    local words = {}
    for word in pairs(s) do words[#words + 1] = word end
    table.sort(words)
    for _, word in ipairs(words) do
        local list
        if OPPOSITE[word] and type(s[word]) ~= "boolean" then
            local one = OPPOSITE[word](s[word])
            list = one and { one } or {}
        elseif OPPOSITE_OF[word] then
            list = OPPOSITE_OF[word](self, s[word], at_of(at, word), s)
        elseif ANNOTATIONS[word] or not (READ[word] or WORDS[word]) then
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

-- Constraints of one of several schemas.
function Schema:union(list, at, seen)
    local out = {}
    for i, s in ipairs(list) do
        out = append(out, self:expand(self:loc(s, at_of(at, i - 1)), seen))
        if #out > MAX_CHOICES then raise("limit", "%s: more than %d combinations", at, MAX_CHOICES) end
    end
    return out
end

-- Each applies one word to a list of constraints: (self, list, value, place, schema, seen) -> list.
local APPLY = {}

APPLY["$ref"] = function(self, list, v, at, s, seen)
    local target, place = self.refs:resolve(v, s, at)
    return self:cross(list, self:expand(self:loc(target, place), seen), at)
end

function APPLY.allOf(self, list, v, at, _, seen)
    for i, s in ipairs(list_word(v, at)) do
        list = self:cross(list, self:expand(self:loc(s, at_of(at, i - 1)), seen), at)
    end
    return list
end

function APPLY.anyOf(self, list, v, at, _, seen)
    return self:cross(list, self:union(list_word(v, at), at, seen), at)
end

function APPLY.oneOf(self, list, v, at, _, seen)
    local each = {}
    for i, s in ipairs(list_word(v, at)) do
        each[i] = self:cross(list, self:expand(self:loc(s, at_of(at, i - 1)), seen), at)
    end
    for i = 1, self.loose_one_of and 0 or #each do
        for k = i + 1, #each do
            for _, c in ipairs(self:cross(each[i], each[k], at)) do
                if self:possible(c, 0) then
                    raise("unsupported", "%s: a value may match both %d and %d, and this cannot be kept from happening",
                        at, i - 1, k - 1)
                end
            end
        end
    end
    local out = {}
    for _, e in ipairs(each) do out = append(out, e) end
    return out
end

APPLY["not"] = function(self, list, v, at, _, seen)
    local none = self:opposite(v, at)
    if none then return self:cross(list, self:union(none, at, seen), at) end
    for _, c in ipairs(self:cross(list, self:expand(self:loc(v, at), seen), at)) do
        if self:possible(c, 0) then raise("unsupported", "%s: this opposite cannot be enforced", at) end
    end
    return list
end

APPLY["if"] = function(self, list, v, at, s, seen)
    local base = at:gsub("/if$", "")
    local none = self:opposite(v, at)
    if s["then"] == nil and s["else"] == nil then return list end
    if not none then raise("unsupported", "%s: the opposite of this cannot be enforced", at) end
    local function branch(head, word)
        local l = self:cross(list, head, at)
        if s[word] == nil then return l end
        return self:cross(l, self:expand(self:loc(s[word], at_of(base, word)), seen), at)
    end
    return append(branch(self:expand(self:loc(v, at), seen), "then"), branch(self:union(none, at, seen), "else"))
end

-- A value without property `name`, or one that obeys `schema`.
local function depends(self, list, name, schema, at, seen)
    local without = self:expand(self:loc({ ["$forbidden"] = name }, at), seen)
    return self:cross(list, append(without, self:expand(self:loc(schema, at), seen)), at)
end

function APPLY.dependentRequired(self, list, v, at, _, seen)
    for _, name in ipairs(json.keys(object_word(v, at))) do
        local need = list_word(v[name], at_of(at, name))
        if #need > 0 then list = depends(self, list, name, { required = json.array(need) }, at_of(at, name), seen) end
    end
    return list
end

function APPLY.dependentSchemas(self, list, v, at, _, seen)
    for _, name in ipairs(json.keys(object_word(v, at))) do
        list = depends(self, list, name, v[name], at_of(at, name), seen)
    end
    return list
end

function APPLY.dependencies(self, list, v, at, _, seen) -- until draft 7
    for _, name in ipairs(json.keys(object_word(v, at))) do
        local x = v[name]
        if json.is_array(x) then x = { required = x } end
        list = depends(self, list, name, x, at_of(at, name), seen)
    end
    return list
end

-- What no part of this schema has looked at.
function APPLY.unevaluatedProperties(self, list, v, at)
    for _, c in ipairs(list) do
        c.parts[#c.parts + 1] = { names = {}, props = {}, patterns = {}, rest_of = { table.unpack(c.parts) },
            additional = self:loc(v, at) }
    end
    return list
end

function APPLY.unevaluatedItems(self, list, v, at)
    for _, c in ipairs(list) do
        if #c.contains > 0 then raise("unsupported", "%s: beside contains it cannot be enforced", at) end
        local first, all = 0, false
        for _, part in ipairs(c.arrays) do
            first = math.max(first, #part.prefix)
            all = all or part.items ~= nil
        end
        if not all then
            local prefix = {}
            for i = 1, first do prefix[i] = self:loc(true, at) end
            c.arrays[#c.arrays + 1] = { prefix = prefix, items = self:loc(v, at) }
        end
    end
    return list
end

local ORDER = { "$ref", "allOf", "dependentRequired", "dependentSchemas", "dependencies", "anyOf", "if", "not", "oneOf",
    "unevaluatedProperties", "unevaluatedItems" }

--- The constraints of one schema. seen: schemas that are being expanded at this place.
function Schema:expand(loc, seen)
    self:work(1)
    local s = loc.schema
    if s == true then return { fresh(loc.at) } end
    if s == false then return {} end
    if seen[s] then raise("invalid", "%s: the schema refers to itself at the same place", loc.at) end
    seen[s] = true
    local list = { self:own(loc) }
    for _, word in ipairs(ORDER) do
        if s[word] ~= nil and not self.ignored[word] then
            list = APPLY[word](self, list, s[word], at_of(loc.at, word), s, seen)
        end
    end
    seen[s] = nil
    return list
end

-- Conjunctions --------------------------------------------------------------------------------------------------------

--- A name for a set of places; nil if one of them is false. Also gives the set without trues and repetitions.
function Schema:key(locs)
    local set, ids = {}, {}
    for _, l in ipairs(locs) do
        local s = l.schema
        if s == false then return nil end
        if s ~= true and next(s) ~= nil then
            local id = self.id[s]
            if not id then
                self.n_id = self.n_id + 1
                id = self.n_id
                self.id[s] = id
            end
            if not set[id] then
                set[id] = l
                ids[#ids + 1] = id
            end
        end
    end
    table.sort(ids)
    local out = {}
    for i, id in ipairs(ids) do out[i] = set[id] end
    return table.concat(ids, "+"), out
end

--- The constraints of a conjunction.
function Schema:constraints(locs)
    local key, set = self:key(locs)
    if not key then return {} end
    local list = self.expanded[key]
    if not list then
        list = { fresh(locs[1] and locs[1].at or "#") }
        for _, l in ipairs(set) do list = self:cross(list, self:expand(l, {}), l.at) end
        self.expanded[key] = list
    end
    return list
end

-- Whether a value obeys --------------------------------------------------------------------------------------------------

function Schema:obeys(value, locs, depth)
    for _, c in ipairs(self:constraints(locs)) do
        if self:fits(value, c, (depth or 0) + 1) then return true end
    end
    return false
end

local function fits_number(v, c)
    if c.low ~= nil and (v < c.low or (v == c.low and c.low_open)) then return false end
    if c.high ~= nil and (v > c.high or (v == c.high and c.high_open)) then return false end
    if #c.multiples == 0 then return true end
    local d = numbers.decimal(v)
    local text = (d.negative and "-" or "") .. d.int .. (d.frac ~= "" and "." .. d.frac or "")
    return numbers.regex({ multiples = c.multiples }, false, c.at):matches(text)
end

local function fits_string(v, c)
    local n = utf8.len(v)
    if not n or n < (c.min_len or 0) or n > (c.max_len or math.huge) then return false end
    for _, p in ipairs(c.patterns) do
        if not p.regex:matches(v) then return false end
    end
    return true
end

function Schema:fits_array(v, c, depth)
    if #v < (c.min_items or 0) or #v > (c.max_items or math.huge) then return false end
    local seen = {}
    for i, x in ipairs(v) do
        if not self:obeys(x, self:item_locs(c, i), depth) then return false end
        if c.unique and seen[canonical(x)] then return false end
        seen[canonical(x)] = true
    end
    for _, k in ipairs(c.contains) do
        local n = 0
        for _, x in ipairs(v) do n = n + (self:obeys(x, { k.loc }, depth) and 1 or 0) end
        if n < k.min or n > (k.max or math.huge) then return false end
    end
    return true
end

function Schema:fits_object(v, c, depth)
    local n = 0
    for name, x in pairs(v) do
        n = n + 1
        if c.forbidden[name] or not self:obeys(x, self:member_locs(c, name), depth) then return false end
        if #c.names > 0 and not self:obeys(name, c.names, depth) then return false end
    end
    for _, name in ipairs(c.required) do
        if v[name] == nil then return false end
    end
    return n >= (c.min_props or 0) and n <= (c.max_props or math.huge)
end

--- Whether a value fits a constraint.
function Schema:fits(v, c, depth)
    self:work(1)
    if depth > 100 then raise("limit", "%s: nested too deeply", c.at) end
    local t = type_of(v)
    if not c.types[t] then return false end
    if c.enum then
        local found = false
        for _, e in ipairs(c.enum) do found = found or canonical(e) == canonical(v) end
        if not found then return false end
    end
    if t == "integer" or t == "number" then return fits_number(v, c) end
    if t == "string" then return fits_string(v, c) end
    if t == "array" then return self:fits_array(v, c, depth) end
    if t == "object" then return self:fits_object(v, c, depth) end
    return true
end

--- The conjunction that item i (from 1) of an array falls under.
function Schema:item_locs(c, i)
    local out = {}
    for _, part in ipairs(c.arrays) do out[#out + 1] = part.prefix[i] or part.items end
    return out
end

-- Places of one part for a name; second result: whether the part looks at that name.
local function part_locs(part, name)
    local out = {}
    if part.rest_of then
        for _, p in ipairs(part.rest_of) do
            local _, looked = part_locs(p, name)
            if looked then return out, true end
        end
        return { part.additional }, true
    end
    if part.props[name] then out[1] = part.props[name] end
    for _, p in ipairs(part.patterns) do
        if p.regex:matches(name) then out[#out + 1] = p.loc end
    end
    if #out == 0 and part.additional then out[1] = part.additional end
    return out, #out > 0
end

--- The conjunction that the property `name` of an object falls under.
function Schema:member_locs(c, name)
    local out = {}
    for _, part in ipairs(c.parts) do
        for _, l in ipairs((part_locs(part, name))) do out[#out + 1] = l end
    end
    return out
end

-- Whether anything can obey: true unless it is certain that nothing does ---------------------------------------------------

function Schema:satisfiable(locs, depth)
    local key, set = self:key(locs)
    if not key then return false end
    if depth > 6 then return true end
    local known = self.sat[key]
    if known ~= nil then return known end
    self.sat[key] = true -- while it is being found out
    local yes = false
    for _, c in ipairs(self:constraints(set)) do yes = yes or self:possible(c, depth + 1) end
    self.sat[key] = yes
    return yes
end

--- The set of a constraint's strings as a regex; nil if it is all of them.
function Schema:string_set(c)
    if #c.patterns == 0 and not c.min_len and not c.max_len then return nil end
    local set
    for _, p in ipairs(c.patterns) do set = set and refuse.check(c.at, set:both(p.regex)) or p.regex end
    if c.min_len or c.max_len then
        set = set or core.regex("", { search = true })
        set = refuse.check(c.at, set:length(c.min_len or 0, c.max_len or -1))
    end
    return set
end

local function numbers_possible(c)
    if c.low == nil or c.high == nil then return true end
    return c.low < c.high or (c.low == c.high and not c.low_open and not c.high_open)
end

function Schema:strings_possible(c)
    if (c.min_len or 0) > (c.max_len or math.huge) then return false end
    if #c.patterns == 0 then return true end
    return not refuse.check(c.at, self:string_set(c):is_empty())
end

function Schema:objects_possible(c, depth)
    if #c.required > 0 and c.max_props and #c.required > c.max_props then
        local n, seen = 0, {}
        for _, name in ipairs(c.required) do
            n = n + (seen[name] and 0 or 1)
            seen[name] = true
        end
        if n > c.max_props then return false end
    end
    if (c.min_props or 0) > (c.max_props or math.huge) then return false end
    for _, name in ipairs(c.required) do
        if c.forbidden[name] or not self:satisfiable(self:member_locs(c, name), depth) then return false end
        if #c.names > 0 and not self:obeys(name, c.names) then return false end
    end
    return true
end

function Schema:arrays_possible(c, depth)
    if (c.min_items or 0) > (c.max_items or math.huge) then return false end
    for i = 1, math.min(c.min_items or 0, 32) do
        if not self:satisfiable(self:item_locs(c, i), depth) then return false end
    end
    return true
end

function Schema:possible(c, depth)
    self:work(1)
    if c.enum then
        for _, v in ipairs(c.enum) do
            if self:fits(v, c, 0) then return true end
        end
        return false
    end
    local t = c.types
    if t.null or t.boolean then return true end
    if (t.integer or t.number) and numbers_possible(c) then return true end
    if t.string and self:strings_possible(c) then return true end
    if t.array and self:arrays_possible(c, depth) then return true end
    return t.object and self:objects_possible(c, depth) or false
end

--- The schema of a document. opts: one_of = "any" takes oneOf as anyOf; ignore = list of words that are not looked at.
local function new(root, opts)
    local s = setmetatable({ left = MAX_WORK, id = {}, n_id = 0, expanded = {}, sat = {}, ignored = {} }, Schema)
    s.loose_one_of = opts.one_of == "any"
    for _, word in ipairs(opts.ignore or {}) do s.ignored[word] = true end
    s.refs = refs.new(root)
    return s
end

return { new = new, fresh = fresh, canonical = canonical, type_of = type_of }
