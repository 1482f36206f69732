--- A JSON schema as a grammar.
---
--- Restrictions on how a value is written: the properties of an object come in the order in which the schema lists them
--- (then those that only `required` names, then others); white space is bounded (see values.lua); strings of enum and
--- const are spelt one way, numbers too; numbers with bounds or multipleOf have no exponent, other numbers at most 200
--- digits before the point and a two-digit exponent; integers have no fraction. Formats are held to (formats.lua).
---
--- Refused, with the place: references out of the document; $dynamicRef with several targets; not, if, maxContains and
--- overlapping alternatives of oneOf where nothing of the opposite can be said (opposite.lua); contains twice or
--- beside bounds over 64; unevaluatedItems beside contains; patterns that lr_regex_new refuses.
---
--- No name comes twice in an object, nor an item in an array with uniqueItems (unique.c); where its items can only be
--- one of 9 to 1000 values, they come in the order of the schema's list, or of their texts. Where part of an opposite
--- can't be said, values that only that part would tell apart are left out.
--- options.one_of = "any" takes oneOf as anyOf, options.ignore leaves out words: both may let through what is invalid.

local core = require "llmrun.core"
local json = require "llmrun.json"
local numbers = require "llmrun.grammar.number"
local refuse = require "llmrun.grammar.refuse"
local schemas = require "llmrun.grammar.schema"
local values = require "llmrun.grammar.values"

local Emit = {}
Emit.__index = Emit

local raise, check = refuse.raise, refuse.check
local MAX_PLACES, MAX_UNIQUE, MAX_LISTED, MAX_NAMED, MAX_PATTERNS = 20000, 8, 1000, 100, 4

-- A graph under construction: places are named by any key.
local Graph = {}
Graph.__index = Graph

local function new_graph(at) return setmetatable({ at = at, place = {}, n = 0, edges = {} }, Graph) end

function Graph:id(key)
    local i = self.place[key]
    if not i then
        i = self.n
        self.n = i + 1
        self.place[key] = i
        if i > MAX_PLACES then raise("limit", "%s: its bounds need more than %d states", self.at, MAX_PLACES) end
    end
    return i
end

function Graph:edge(from, to, node)
    local e = self.edges
    local n = #e
    e[n + 1], e[n + 2], e[n + 3] = self:id(from), self:id(to), node
end

-- The end must be the last place.
function Graph:node(b)
    local last = self.n
    local e, map = self.edges, self.place["end"]
    for i = 1, #e, 3 do
        if e[i] == map then e[i] = last end
        if e[i + 1] == map then e[i + 1] = last end
    end
    return b:graph(last + 1, e)
end

-- Conjunctions --------------------------------------------------------------------------------------------------------

--- A node for what obeys all schemas of a list of places.
function Emit:conjunction(locs)
    local key, set = self.schema:key(locs)
    if not key then return self.b:never() end
    if #set == 0 then return self.v:any() end
    local rule = self.rules[key]
    if not rule then
        rule = self.b:rule(set[1].at)
        self.rules[key] = rule
        local alts = {}
        self.depth = self.depth + 1
        if self.depth > 180 then raise("limit", "%s: nested too deeply", set[1].at) end
        for i, c in ipairs(self.schema:constraints(set)) do alts[i] = self:constraint(c) end
        self.depth = self.depth - 1
        self.b:define(rule, self.b:alt(alts))
    end
    return self.b:ref(rule)
end

function Emit:constraint(c)
    if c.enum then
        local list, has = {}, {}
        for _, v in ipairs(c.enum) do
            local k = schemas.canonical(v)
            if not has[k] and self.schema:fits(v, c, 0) then list[#list + 1] = v end
            has[k] = true
        end
        return self.v:one_of(list, c.at)
    end
    local alts, t = {}, c.types
    local function add(node) alts[#alts + 1] = node end
    if t.null then add(self.v:null()) end
    if t.boolean then add(self.v:boolean()) end
    if t.number or t.integer then add(self:number(c)) end
    if t.string then add(self:string(c)) end
    if t.object then add(self:object(c)) end
    if t.array then add(self:array(c)) end
    return self.b:alt(alts)
end

function Emit:number(c)
    local kind = not c.types.number and "integer" or c.types.integer and "number" or "fraction"
    if kind ~= "fraction" and c.low == nil and c.high == nil and #c.multiples == 0 then
        return kind == "integer" and self.v:integer() or self.v:number()
    end
    return self.b:regex(numbers.regex(c, kind, c.at), "raw")
end

function Emit:string(c)
    if #c.patterns == 0 then
        local min, max = c.min_len or 0, c.max_len or -1
        if max >= 0 and min > max then return self.b:never() end
        return self.v:string(min, max)
    end
    local keys = {}
    for i, p in ipairs(c.patterns) do keys[i] = p.key end
    local key = ("%s {%s,%s}"):format(table.concat(keys, " and "), c.min_len or 0, c.max_len or "")
    return self.v:matching(self.schema:string_set(c), key)
end

-- Objects -------------------------------------------------------------------------------------------------------------

-- Names in the order in which they come.
local function names_of(c)
    local list, seen = {}, {}
    local function add(name)
        if not seen[name] then
            seen[name] = true
            list[#list + 1] = name
        end
    end
    for _, part in ipairs(c.parts) do
        for _, name in ipairs(part.names) do add(name) end
    end
    for _, name in ipairs(c.required) do add(name) end
    return list, seen
end

-- The regex of names that `names` (places) allow; nil if all.
function Emit:name_set(locs)
    local key, set = self.schema:key(locs)
    if not key then return core.regex "[]" end
    if #set == 0 then return nil end
    local all
    for _, c in ipairs(self.schema:constraints(set)) do
        local one
        if c.enum then
            local texts = {}
            for _, v in ipairs(c.enum) do
                if type(v) == "string" and self.schema:fits(v, c, 0) then texts[#texts + 1] = v end
            end
            one = check(c.at, core.regex_lits(texts))
        elseif c.types.string then
            one = self.schema:string_set(c)
            if not one then return nil end
        end
        if one then all = all and check(c.at, all:either(one)) or one end
    end
    return all or core.regex "[]"
end

-- Patterns of all parts, each once.
local function patterns_of(c)
    local list, seen = {}, {}
    local function add(part)
        for _, p in ipairs(part.patterns) do
            if not seen[p.text] then
                seen[p.text] = true
                list[#list + 1] = p
            end
        end
        for _, r in ipairs(part.rest_of or {}) do add(r) end
    end
    for _, part in ipairs(c.parts) do add(part) end
    return list
end

-- Node of a member whose name is in no list, when the patterns `on` match it and the others of `list` do not.
function Emit:other_member(c, declared, list, on, names, extra)
    local locs = {}
    local function matches(p) return on[p.text] end
    for _, part in ipairs(c.parts) do
        for _, l in ipairs((self.schema.part_locs(part, nil, matches))) do locs[#locs + 1] = l end
    end
    if not self.schema:satisfiable(locs, 0) then return nil end
    local set = names
    for _, p in ipairs(list) do
        local r = p.regex
        if not on[p.text] then r = check(c.at, r:none()) end
        set = set and check(c.at, set:both(r)) or r
    end
    if #declared > 0 then
        local rest = check(c.at, check(c.at, core.regex_lits(declared)):none())
        set = set and check(c.at, set:both(rest)) or rest
    end
    if set and check(c.at, set:is_empty()) then return nil end
    local few = set and check(c.at, set:words(MAX_NAMED))
    if few then
        for _, name in ipairs(few) do extra[#extra + 1] = name end
        return nil
    end
    self.n_names = self.n_names + 1
    return self.b:seq { self.v:name(set, "names " .. self.n_names), self.v.colon, self:conjunction(locs) }
end

-- Node of a member whose name is in no list; nil if there may be none. Where only a few names are left they are put
-- into extra instead.
function Emit:others(c, declared, extra)
    local list = patterns_of(c)
    if #list > MAX_PATTERNS then
        raise("limit", "%s/patternProperties: more than %d patterns at one object", c.at, MAX_PATTERNS)
    end
    local names = self:name_set(c.names)
    local alts = {}
    for bits = 0, (1 << #list) - 1 do
        local on = {}
        for i, p in ipairs(list) do on[p.text] = bits >> (i - 1) & 1 == 1 end
        alts[#alts + 1] = self:other_member(c, declared, list, on, names, extra)
    end
    return #alts > 0 and self.b:alt(alts) or nil
end

-- Members in order: { node, required }; false if one that must be there cannot be.
function Emit:members(c, declared)
    local out = {}
    local need = {}
    for _, name in ipairs(c.required) do need[name] = true end
    for _, name in ipairs(declared) do
        local locs = self.schema:member_locs(c, name)
        local ok = not c.forbidden[name] and self.schema:satisfiable(locs, 0) and
            (#c.names == 0 or self.schema:obeys(name, c.names))
        if ok then
            local text = check(c.at, json.encode(name))
            local node = self.b:seq { self.b:lit(text), self.v.colon, self:conjunction(locs) }
            out[#out + 1] = { node = node, required = need[name] }
        elseif need[name] then
            return false
        end
    end
    return out
end

-- The members between the braces. Places: "F" nothing written yet; "S" behind a member; "K" behind a comma; i: the next
-- member that may come; n: members written so far, as far as it matters (top).
local function member_graph(b, comma, members, other, lo, hi, at)
    local g, last = new_graph(at), #members + 1
    local counted = lo > 0 or hi ~= nil
    local top = hi or lo
    local function key(kind, i, n) return kind .. i .. ":" .. n end
    local function more(n) -- count behind one more member, nil if there may be none
        if not counted then return 0 end
        if hi and n >= hi then return nil end
        return math.min(n + 1, top)
    end
    g:id(key("F", 1, 0))
    local empty = b:empty()
    local queue, seen = { { "F", 1, 0 } }, { [key("F", 1, 0)] = true }
    local function go(from, kind, i, n, node)
        local to = key(kind, i, n)
        g:edge(from, to, node)
        if not seen[to] then
            seen[to] = true
            queue[#queue + 1] = { kind, i, n }
        end
    end
    local free = {} -- whether all members from i on may be left out
    free[last] = true
    for i = last - 1, 1, -1 do free[i] = free[i + 1] and not members[i].required end
    local at_queue = 1
    while queue[at_queue] do
        local kind, i, n = table.unpack(queue[at_queue])
        at_queue = at_queue + 1
        local from, m, n2 = key(kind, i, n), members[i], more(n)
        if kind == "S" then
            if free[i] and n >= lo then g:edge(from, "end", empty) end
            if (i < last or other) and n2 then go(from, "K", i, n, comma) end
        elseif m then
            if n2 then go(from, "S", i + 1, n2, m.node) end
            if not m.required then go(from, kind, i + 1, n, empty) end
        else
            if other and n2 then go(from, "S", last, n2, other) end
            if kind == "F" and n >= lo then g:edge(from, "end", empty) end
        end
    end
    g:id("end")
    return g:node(b)
end

function Emit:object(c)
    local b = self.b
    local declared = names_of(c)
    for name in pairs(c.forbidden) do -- not among the others either
        declared[#declared + 1] = name
    end
    local extra = {}
    local other = self:others(c, declared, extra)
    if #extra > 0 then -- listed as well: they come in order, and run out by themselves
        for _, name in ipairs(extra) do declared[#declared + 1] = name end
        other = self:others(c, declared, {})
    end
    local members = self:members(c, declared)
    if not members then return b:never() end
    local lo, hi, sure = c.min_props or 0, c.max_props, 0
    for _, m in ipairs(members) do sure = sure + (m.required and 1 or 0) end
    if lo <= sure then lo = 0 end
    if hi and not other and hi >= #members then hi = nil end
    local body
    if #members == 0 and other then
        if hi and hi < math.max(lo, 1) then
            body = lo == 0 and b:empty() or b:never()
        else
            body = b:seq { other, b:rep(b:seq { self.v.comma, other }, math.max(lo - 1, 0), hi and hi - 1 or -1) }
            if lo == 0 then body = b:rep(body, 0, 1) end
        end
    else
        body = member_graph(b, self.v.comma, members, other, lo, hi, c.at)
    end
    return b:seq { self.v.open_object, body, self.v.close_object }
end

-- Arrays --------------------------------------------------------------------------------------------------------------

-- The values of one type that a constraint may allow, as far as they can be listed; nil otherwise.
function Emit:values_of(c, t, most)
    if t == "null" then return { json.null } end
    if t == "boolean" then return { true, false } end
    if t == "integer" then
        local low, high = math.tointeger(c.low and math.ceil(c.low)), math.tointeger(c.high and math.floor(c.high))
        if not low or not high or high // 2 - low // 2 > most then return nil end
        local list = {}
        for v = low, high do list[#list + 1] = v end
        return list
    end
    if t == "string" then
        local set = self.schema:string_set(c)
        return set and check(c.at, set:words(most)) or nil
    end
end

-- The values that a conjunction allows, if they are at most so many; nil otherwise.
function Emit:few_values(locs, most)
    local out, has = {}, {}
    for _, c in ipairs(self.schema:constraints(locs)) do
        local list = c.enum
        if not list then
            list = {}
            for _, t in ipairs { "null", "boolean", "integer", "number", "string", "object", "array" } do
                local some = {}
                if c.types[t] then some = self:values_of(c, t, most) end
                if not some then return nil end
                for _, v in ipairs(some) do list[#list + 1] = v end
            end
        end
        for _, v in ipairs(list) do
            local k = schemas.canonical(v)
            if not has[k] and self.schema:fits(v, c, 0) then out[#out + 1] = v end
            has[k] = true
            if #out > most then return nil end
        end
    end
    return out
end

-- A node for an item; where items may not come twice it is a rule of its own that sees to it.
function Emit:item(c, locs)
    local node = self:conjunction(locs)
    if not c.unique then return node end
    local key = self.schema:key(locs)
    return self.v:unique(node, "unique " .. (key or ""))
end

-- Arrays without repetitions over listed values. Few may come in any order: places are sets of values used. Many
-- come in the order of the list.
function Emit:unique_list(c, list, min, max)
    local g, b = new_graph(c.at), self.b
    if #list > MAX_UNIQUE then
        local members = {}
        for i, v in ipairs(list) do members[i] = { node = self.v:literal(v, c.at), required = false } end
        return member_graph(b, self.v.comma, members, nil, min, max < #list and max or nil, c.at)
    end
    g:id "0"
    for used = 0, (1 << #list) - 1 do
        local n = 0
        for i = 0, #list - 1 do n = n + (used >> i & 1) end
        for i, v in ipairs(list) do
            if used >> (i - 1) & 1 == 0 and n < max then
                local node = self.v:literal(v, c.at)
                if used ~= 0 then node = b:seq { self.v.comma, node } end
                g:edge(tostring(used), tostring(used | 1 << (i - 1)), node)
            end
        end
        if n >= min and n <= max then g:edge(tostring(used), "end", b:empty()) end
    end
    g:id "end"
    return g:node(b)
end

-- Arrays with items of a kind: places are items written and items of the kind among them. If there may be only so many,
-- the others must be of no such kind.
function Emit:containing(c, min, max)
    local k, none = c.contains[1], nil
    if #c.contains > 1 then raise("unsupported", "%s: beside another contains it cannot be enforced", k.at) end
    if k.max and k.max < max then
        local less
        none, less = self.schema:opposite(k.loc.schema, k.at)
        if #none == 0 and less then raise("unsupported", "%s: beside maxContains it cannot be enforced", k.at) end
        none = self.schema:loc(#none > 0 and { anyOf = json.array(none) } or false, k.at)
    end
    local most = none and k.max or k.min
    if k.min > most or min > 64 or most > 64 or (max < math.huge and max > 64) then
        raise("unsupported", "%s: it cannot be enforced beside bounds over 64, or out of order", k.at)
    end
    local prefix = 0
    for _, part in ipairs(c.arrays) do prefix = math.max(prefix, #part.prefix) end
    local top = max < math.huge and max or math.max(min, prefix, 1)
    local g, b = new_graph(c.at), self.b
    g:id "0:0"
    local function item(from, n, m, locs)
        if n >= max or not self.schema:satisfiable(locs, 0) then return end
        local node = self:item(c, locs)
        if n > 0 then node = b:seq { self.v.comma, node } end
        g:edge(from, math.min(n + 1, top) .. ":" .. m, node)
    end
    for n = 0, top do
        for m = 0, most do
            local from, locs = n .. ":" .. m, self.schema:item_locs(c, n + 1)
            local function with(l) return { l, table.unpack(locs) } end
            item(from, n, m, none and with(none) or locs)
            if m < most then item(from, n, m + 1, with(k.loc)) end
            if n >= min and m >= k.min then g:edge(from, "end", b:empty()) end
        end
    end
    g:id "end"
    return g:node(b)
end

-- Arrays of listed items and more of one kind.
function Emit:items(c, min, max, prefix)
    local g, b = new_graph(c.at), self.b
    local comma = self.v.comma
    g:id "0"
    local first = math.min(prefix, max)
    for n = 0, first - 1 do
        local node = self:item(c, self.schema:item_locs(c, n + 1))
        g:edge(tostring(n), tostring(n + 1), n == 0 and node or b:seq { comma, node })
    end
    for n = min, first do g:edge(tostring(n), "end", b:empty()) end
    if max > prefix then
        local item = self:item(c, self.schema:item_locs(c, prefix + 1))
        local lo, hi = math.max(min - prefix, 1), max < math.huge and max - prefix or -1
        local more = b:seq { comma, item }
        local node
        if prefix == 0 then
            node = b:seq { item, b:rep(more, lo - 1, hi < 0 and -1 or hi - 1) }
        else
            node = b:rep(more, lo, hi)
        end
        g:edge(tostring(prefix), "end", node)
    end
    g:id "end"
    return g:node(b)
end

function Emit:array(c)
    local b = self.b
    local min, max, prefix = c.min_items or 0, c.max_items or math.huge, 0
    for _, part in ipairs(c.arrays) do prefix = math.max(prefix, #part.prefix) end
    for i = 1, prefix + 1 do
        if i <= max and not self.schema:satisfiable(self.schema:item_locs(c, i), 0) then max = i - 1 end
    end
    if min > max then return b:never() end
    local body
    local list = c.unique and max > 1 and prefix == 0 and #c.contains == 0 and #c.arrays > 0 and
        self:few_values(self.schema:item_locs(c, 1), MAX_LISTED)
    if list then
        body = self:unique_list(c, list, min, max)
    elseif #c.contains > 0 then
        body = self:containing(c, min, max)
    elseif max == 0 then
        body = b:empty()
    else
        body = self:items(c, min, max, prefix)
    end
    return b:seq { self.v.open_array, body, self.v.close_array }
end

-- Documents -----------------------------------------------------------------------------------------------------------

local M = {}

local SPACES = { none = true, line = true, pretty = true }

--- Defines a rule of builder b that matches what obeys the schema (a table, a boolean, or JSON text). -> the rule
---@param b any
---@param schema table|boolean|string
---@param opts { whitespace?: string, one_of?: string, ignore?: string[] }
function M.rule(b, schema, opts)
    if type(schema) == "string" then
        if #schema > 4 * 1024 * 1024 then raise("limit", "json schema: over 4 MiB of text") end
        local v, err = json.decode(schema, { ordered = true })
        if v == nil then raise("format", "json schema: %s", err) end
        schema = v
    end
    if type(schema) ~= "table" and type(schema) ~= "boolean" then
        raise("format", "json schema: an object or a boolean expected")
    end
    local space = opts.whitespace or "line"
    if not SPACES[space] then raise("invalid", "json schema: whitespace must be none, line or pretty") end
    local e = setmetatable({ b = b, rules = {}, depth = 0, n_names = 0 }, Emit)
    e.schema = schemas.new(schema, opts)
    e.v = values.new(b, space)
    local root = b:rule "#"
    b:define(root, e:conjunction { e.schema:loc(schema, "#") })
    return root
end

return M
