--- JSON schemas (draft 2020-12, and what older drafts wrote otherwise) in a form that a grammar can be made of.
---
--- A place in a document falls under a "conjunction": a set of schemas that must all hold. It is expanded into a list
--- of constraints of which one must hold; a constraint has no $ref, allOf, anyOf and the like any more. It holds, for
--- each type, the bounds on values of that type; members of objects and arrays are conjunctions again, expanded only
--- when they are needed, so that schemas may refer to themselves.
---
--- Nothing is dropped silently: a word that can't be enforced is refused with its place.

local json = require "llmrun.json"
local obey = require "llmrun.grammar.obey"
local opposite = require "llmrun.grammar.opposite"
local loop = require "llmrun.loop"
local refs = require "llmrun.grammar.refs"
local refuse = require "llmrun.grammar.refuse"
local words = require "llmrun.grammar.words"

local Schema = {}
Schema.__index = Schema
for _, part in ipairs { words.methods, opposite, obey } do
    for name, fn in pairs(part) do Schema[name] = fn end
end

local raise, at_of = refuse.raise, refs.at
local MAX_WORK, MAX_CHOICES = 100000, 400
local MAX_EXCLUDED, MAX_LIKELY = 40, 24

-- Joining constraints -------------------------------------------------------------------------------------------------

local function append(a, b)
    if #a == 0 then return b end
    if #b == 0 then return a end
    local out = { table.unpack(a) }
    for _, v in ipairs(b) do out[#out + 1] = v end
    return out
end

local function join_sets(a, b)
    if next(a) == nil then return b end
    if next(b) == nil then return a end
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
    if a.free then return b end
    if b.free then return a end
    local c = words.fresh(a.at)
    c.free, c.types = nil, {}
    for t in pairs(a.types) do c.types[t] = b.types[t] end
    if not next(c.types) then return nil end
    if a.enum and b.enum then
        local has = {}
        for _, v in ipairs(b.enum) do has[words.canonical(v)] = true end
        c.enum = {}
        for _, v in ipairs(a.enum) do
            if has[words.canonical(v)] then c.enum[#c.enum + 1] = v end
        end
        if #c.enum == 0 then return nil end
    else
        c.enum = a.enum or b.enum
    end
    for _, x in ipairs { a, b } do
        if x.low ~= nil then words.raise_low(c, x.low, x.low_open) end
        if x.high ~= nil then words.lower_high(c, x.high, x.high_open) end
        for _, f in ipairs { "min_len", "min_items", "min_props" } do
            if x[f] then words.at_least(c, f, x[f]) end
        end
        for _, f in ipairs { "max_len", "max_items", "max_props" } do
            if x[f] then words.at_most(c, f, x[f]) end
        end
        c.unique = c.unique or x.unique
    end
    for _, f in ipairs { "patterns", "multiples", "parts", "names", "arrays", "contains" } do
        c[f] = append(a[f], b[f])
    end
    c.required, c.forbidden = join_sets(a.required, b.required), join_sets(a.forbidden, b.forbidden)
    return c
end

function Schema:work(n)
    loop.breathe()
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

local function copy(t)
    local out = {}
    for k, v in pairs(t) do out[k] = v end
    return out
end

-- What an opposite looks at does not count as evaluated.
local function hushed(list)
    local out = {}
    for k, c in ipairs(list) do
        out[k] = copy(c)
        for _, f in ipairs { "parts", "arrays" } do
            local parts = {}
            for i, part in ipairs(c[f]) do
                parts[i] = copy(part)
                parts[i].silent = true
            end
            out[k][f] = parts
        end
    end
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

-- Where only one place has that dynamic anchor, it is an ordinary reference.
APPLY["$dynamicRef"] = function(self, list, v, at, s, seen)
    if not self.refs:is_static(v) then
        raise("unsupported", "%s: its target depends on where it is reached from", at)
    end
    return APPLY["$ref"](self, list, v, at, s, seen)
end

function APPLY.allOf(self, list, v, at, _, seen)
    for i, s in ipairs(words.list_word(v, at)) do
        list = self:cross(list, self:expand(self:loc(s, at_of(at, i - 1)), seen), at)
    end
    return list
end

function APPLY.anyOf(self, list, v, at, _, seen)
    return self:cross(list, self:union(words.list_word(v, at), at, seen), at)
end

-- Whether some value may obey constraints of both lists.
function Schema:overlap(a, b, at)
    for _, c in ipairs(self:cross(a, b, at)) do
        if self:possible(c, 0) then return true end
    end
    return false
end

-- Names that members of the constraints' objects are likely to have.
local function likely_names(list)
    local out, seen = {}, {}
    local function add(name)
        if not seen[name] and #out < MAX_LIKELY then out[#out + 1] = name end
        seen[name] = true
    end
    for _, c in ipairs(list) do
        for _, name in ipairs(c.required) do add(name) end
    end
    for _, c in ipairs(list) do
        for _, part in ipairs(c.parts) do
            for _, name in ipairs(part.names) do add(name) end
        end
    end
    return out
end

-- Constraints of `list` under which a schema does not hold: all, or, where the opposite can't be said in full or
-- would be very many, some. nil: none can be told.
function Schema:exclude(list, schema, at, seen)
    local before, out = self.likely, {}
    self.likely = likely_names(list)
    local none, less = self:opposite(schema, at)
    self.likely = before
    local most = less and MAX_EXCLUDED or MAX_CHOICES // 2
    for i, s in ipairs(none) do
        if #out >= most then break end
        for _, c in ipairs(self:cross(list, hushed(self:expand(self:loc(s, at_of(at, i - 1)), seen)), at)) do
            if #out < most and self:possible(c, 0) then out[#out + 1] = c end
        end
    end
    if #out == 0 and less then return nil end
    return out
end

function APPLY.oneOf(self, list, v, at, _, seen)
    local each, out = {}, {}
    for i, s in ipairs(words.list_word(v, at)) do
        each[i] = self:cross(list, self:expand(self:loc(s, at_of(at, i - 1)), seen), at)
    end
    for i, mine in ipairs(each) do
        for k, other in ipairs(self.loose_one_of and {} or each) do
            if i ~= k and self:overlap(mine, other, at) then
                mine = self:exclude(mine, v[k], at_of(at, k - 1), seen)
                if not mine then
                    raise("unsupported", "%s: a value may match both %d and %d, and this cannot be kept from happening",
                        at, math.min(i, k) - 1, math.max(i, k) - 1)
                end
            end
        end
        out = append(out, mine)
        if #out > MAX_CHOICES then raise("limit", "%s: more than %d combinations", at, MAX_CHOICES) end
    end
    return out
end

APPLY["not"] = function(self, list, v, at, _, seen)
    local out = self:exclude(list, v, at, seen)
    if out then return out end
    for _, c in ipairs(self:cross(list, self:expand(self:loc(v, at), seen), at)) do
        if self:possible(c, 0) then raise("unsupported", "%s: this opposite cannot be enforced", at) end
    end
    return list
end

APPLY["if"] = function(self, list, v, at, s, seen)
    if s["then"] == nil and s["else"] == nil then return list end
    local base = at:gsub("/if$", "")
    local function branch(l, word)
        if s[word] == nil then return l end
        return self:cross(l, self:expand(self:loc(s[word], at_of(base, word)), seen), at)
    end
    local yes = branch(self:cross(list, self:expand(self:loc(v, at), seen), at), "then")
    local no = self:exclude(list, v, at, seen)
    if not no then raise("unsupported", "%s: the opposite of this cannot be enforced", at) end
    return append(yes, branch(no, "else"))
end

-- A value without property `name`, or one with it that obeys `schema`.
local function depends(self, list, name, schema, at, seen)
    local without = self:expand(self:loc({ ["$forbidden"] = name }, at), seen)
    local with = self:expand(self:loc({ type = "object", required = json.array { name } }, at), seen)
    return self:cross(list, append(without, self:cross(with, self:expand(self:loc(schema, at), seen), at)), at)
end

function APPLY.dependentRequired(self, list, v, at, _, seen)
    for _, name in ipairs(json.keys(words.object_word(v, at))) do
        local need = words.list_word(v[name], at_of(at, name))
        if #need > 0 then list = depends(self, list, name, { required = json.array(need) }, at_of(at, name), seen) end
    end
    return list
end

function APPLY.dependentSchemas(self, list, v, at, _, seen)
    for _, name in ipairs(json.keys(words.object_word(v, at))) do
        list = depends(self, list, name, v[name], at_of(at, name), seen)
    end
    return list
end

function APPLY.dependencies(self, list, v, at, _, seen) -- until draft 7
    for _, name in ipairs(json.keys(words.object_word(v, at))) do
        local x = v[name]
        if json.is_array(x) then x = { required = x } end
        list = depends(self, list, name, x, at_of(at, name), seen)
    end
    return list
end

-- What no part of this schema has looked at.
function APPLY.unevaluatedProperties(self, list, v, at)
    local out = {}
    for i, c in ipairs(list) do
        out[i] = copy(c)
        out[i].free = nil
        out[i].parts = append(c.parts, { { names = {}, props = {}, patterns = {}, rest_of = c.parts,
            additional = self:loc(v, at) } })
    end
    return out
end

function APPLY.unevaluatedItems(self, list, v, at)
    local out = {}
    for i, c in ipairs(list) do
        if #c.contains > 0 then raise("unsupported", "%s: beside contains it cannot be enforced", at) end
        local first, all, prefix = 0, false, {}
        for _, part in ipairs(c.arrays) do
            first = math.max(first, part.silent and 0 or #part.prefix)
            all = all or (part.items ~= nil and not part.silent)
        end
        for k = 1, first do prefix[k] = self:loc(true, at) end
        out[i] = copy(c)
        if not all then
            out[i].free = nil
            out[i].arrays = append(c.arrays, { { prefix = prefix, items = self:loc(v, at) } })
        end
    end
    return out
end

local ORDER = { "$ref", "$dynamicRef", "allOf", "dependentRequired", "dependentSchemas", "dependencies", "anyOf", "if",
    "not", "oneOf", "unevaluatedProperties", "unevaluatedItems" }

--- The constraints of one schema. seen: schemas that are being expanded at this place.
function Schema:expand(loc, seen)
    self:work(1)
    local s = loc.schema
    if s == true then return { words.fresh(loc.at) } end
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
        list = { words.fresh(locs[1] and locs[1].at or "#") }
        for _, l in ipairs(set) do list = self:cross(list, self:expand(l, {}), l.at) end
        self.expanded[key] = list
    end
    return list
end

--- The schema of a document. opts: one_of = "any" takes oneOf as anyOf; ignore = list of words that are not looked at.
local function new(root, opts)
    local s = setmetatable({ left = MAX_WORK, id = {}, n_id = 0, expanded = {}, sat = {}, ignored = {} }, Schema)
    s.loose_one_of = opts.one_of == "any"
    for _, word in ipairs(opts.ignore or {}) do s.ignored[word] = true end
    s.refs = refs.new(root)
    return s
end

return { new = new, canonical = words.canonical }
