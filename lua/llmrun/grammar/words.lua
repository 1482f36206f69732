--- What the words of a JSON schema say, one schema at a time: "constraints" (see schema.lua), and the methods of
--- schemas that read them.

local core = require "llmrun.core"
local json = require "llmrun.json"
local loop = require "llmrun.loop"
local options = require "llmrun.options"
local formats = require "llmrun.grammar.formats"
local refs = require "llmrun.grammar.refs"
local refuse = require "llmrun.grammar.refuse"
local tables = require "llmrun.tables"

local M = {} -- methods
local raise, at_of = refuse.raise, refs.at

-- Words that say something about values, and how they are read (own words), or that expand() sees to (true).
local WORDS = {
    ["$ref"] = true, ["$dynamicRef"] = true, allOf = true, anyOf = true, oneOf = true, ["not"] = true,
    ["if"] = true, ["then"] = true,
    ["else"] = true, dependentRequired = true, dependentSchemas = true, dependencies = true,
    unevaluatedProperties = true, unevaluatedItems = true, nullable = true, additionalItems = true,
    minContains = true, maxContains = true, patternProperties = true, additionalProperties = true,
    ["$nopattern"] = true,
}
local ANNOTATIONS = {}
for word in ([[$schema $id $anchor $defs $comment $vocabulary id definitions title description default examples example
    deprecated readOnly writeOnly contentEncoding contentMediaType contentSchema $dynamicAnchor]]):gmatch "%S+" do
    ANNOTATIONS[word] = true
end

local TYPES = {
    null = { "null" }, boolean = { "boolean" }, integer = { "integer" }, number = { "integer", "number" },
    string = { "string" }, array = { "array" }, object = { "object" }, ["$fraction"] = { "number" },
}

-- Values --------------------------------------------------------------------------------------------------------------

--- A text that equal JSON values share.
local function canonical(v)
    loop.breathe()
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
    local keys = tables.sorted_keys(v)
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

local MAX_NAMES = 5000
local NONE = {} -- shared by all constraints, never changed: put() makes a list of one's own
local EVERY = {}
for _, t in ipairs { "null", "boolean", "integer", "number", "string", "array", "object" } do EVERY[t] = true end

-- A constraint that says nothing.
local function fresh(at)
    return { at = at, free = true, types = EVERY, patterns = NONE, multiples = NONE, parts = NONE, required = NONE,
        forbidden = NONE, names = NONE, arrays = NONE, contains = NONE }
end

-- Appends to a list of a constraint, or sets a key of it.
local function put(c, field, v, key)
    if c[field] == NONE then c[field] = {} end
    c[field][key or #c[field] + 1] = v
end

local function number_word(v, at)
    if type(v) ~= "number" or v ~= v or math.abs(v) == math.huge then raise("format", "%s: a number expected", at) end
    return v
end

local function count_word(v, at)
    local n = type(v) == "number" and math.tointeger(v)
    if not n or n < 0 then raise("format", "%s: a whole number of at least 0 expected", at) end
    if n > 1048576 then raise("limit", "%s: %d is over the limit of 1048576", at, n) end
    return n
end

local function list_word(v, at)
    if type(v) ~= "table" or (next(v) ~= nil and not json.is_array(v)) then
        raise("format", "%s: a list expected", at)
    end
    return v
end

local function object_word(v, at)
    if type(v) ~= "table" or (next(v) ~= nil and json.is_array(v)) then
        raise("format", "%s: an object expected", at)
    end
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

function M.loc(_, schema, at)
    if type(schema) ~= "boolean" and type(schema) ~= "table" then raise("format", "%s: a schema expected", at) end
    return { schema = schema, at = at }
end

local function add_regex(c, text, opts, at, key)
    local r, why, code = core.regex(text, opts)
    if not r then raise(code, "%s: %s", at, why) end
    put(c, "patterns", { regex = r, key = key })
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
    put(c, "multiples", v)
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
        put(c, "required", true, name)
        put(c, "required", name)
    end
    return s
end

function READ.propertyNames(self, c, v, at) put(c, "names", self:loc(v, at)) end

function READ.contains(self, c, v, at, s)
    local place = at:gsub("/contains$", "")
    local min = s.minContains ~= nil and count_word(s.minContains, place .. "/minContains") or 1
    local max = s.maxContains ~= nil and count_word(s.maxContains, place .. "/maxContains") or nil
    if min > 0 or max then put(c, "contains", { loc = self:loc(v, at), min = min, max = max, at = at }) end
end

-- properties, patternProperties and additionalProperties of one schema belong together.
function READ.properties(self, c, v, at)
    local part = self:part(c)
    local names = json.keys(object_word(v, at))
    if #names > MAX_NAMES then raise("limit", "%s: more than %d properties", at, MAX_NAMES) end
    for _, name in ipairs(names) do
        part.names[#part.names + 1] = name
        part.props[name] = self:loc(v[name], at_of(at, name))
    end
end

function M.part(_, c)
    local part = c.parts[1]
    if not part then
        part = { names = {}, props = {}, patterns = {} }
        put(c, "parts", part)
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

function M.items_part(_, c)
    local part = c.arrays[1]
    if not part then
        part = { prefix = {} }
        put(c, "arrays", part)
    end
    return part
end

function M.loc_list(self, v, at)
    local out = {}
    for i, s in ipairs(list_word(v, at)) do out[i] = self:loc(s, at_of(at, i - 1)) end
    return out
end

local function check_word(word, at)
    if READ[word] or WORDS[word] or ANNOTATIONS[word] then return end
    if word == "$recursiveRef" then raise("unsupported", "%s: it is not known", at_of(at, word)) end
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
function M.own(self, loc)
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
    if #words > 0 then c.free = nil end
    for _, word in ipairs(words) do READ[word](self, c, s[word], at_of(loc.at, word), s) end
    if s.patternProperties ~= nil or s.additionalProperties ~= nil or s["$nopattern"] or s["$forbidden"] then
        c.free = nil
    end
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
        put(c, "patterns", { regex = refuse.check(loc.at, r:none()), key = "no pattern " .. s["$nopattern"] })
    end
    if s.nullable == true and s.type ~= nil then
        put(c, "types", true, "null")
        if c.enum then c.enum[#c.enum + 1] = json.null end
    end
    if s["$forbidden"] then put(c, "forbidden", true, s["$forbidden"]) end
    return c
end

return {
    methods = M, fresh = fresh, put = put, canonical = canonical, type_of = type_of, raise_low = raise_low,
    lower_high = lower_high, at_least = at_least, at_most = at_most, list_word = list_word, object_word = object_word,
    means_nothing = function(word) return ANNOTATIONS[word] or not (READ[word] or WORDS[word]) end,
}
