--- Whether values obey a schema's constraints, and whether any value can.

local core = require "llmrun.core"
local numbers = require "llmrun.grammar.number"
local refuse = require "llmrun.grammar.refuse"
local words = require "llmrun.grammar.words"

local M = {} -- methods
local raise = refuse.raise
local canonical, type_of = words.canonical, words.type_of

-- Whether a value obeys -----------------------------------------------------------------------------------------------

function M:obeys(value, locs, depth)
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

function M:fits_array(v, c, depth)
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

function M:fits_object(v, c, depth)
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
function M:fits(v, c, depth)
    if type(v) == "table" then self:work(1) end
    if depth > 100 then raise("limit", "%s: nested too deeply", c.at) end
    local t = type_of(v)
    if not c.types[t] then return false end
    if c.enum then
        if not c.enum_has then
            c.enum_has = {}
            for _, e in ipairs(c.enum) do c.enum_has[canonical(e)] = true end
        end
        if not c.enum_has[canonical(v)] then return false end
    end
    if t == "integer" or t == "number" then return fits_number(v, c) end
    if t == "string" then return fits_string(v, c) end
    if t == "array" then return self:fits_array(v, c, depth) end
    if t == "object" then return self:fits_object(v, c, depth) end
    return true
end

--- The conjunction that item i (from 1) of an array falls under.
function M:item_locs(c, i)
    local out = {}
    for _, part in ipairs(c.arrays) do out[#out + 1] = part.prefix[i] or part.items end
    return out
end

--- Places of one part for a name; second result: whether the part looks at that name. A name that no part lists is
--- nil. matches(p) says whether the pattern p matches it.
local function part_locs(part, name, matches)
    local out = {}
    if part.rest_of then
        for _, p in ipairs(part.rest_of) do
            local _, looked = part_locs(p, name, matches)
            if looked and not p.silent then return out, true end
        end
        return { part.additional }, true
    end
    if name and part.props[name] then out[1] = part.props[name] end
    for _, p in ipairs(part.patterns) do
        if matches(p) then out[#out + 1] = p.loc end
    end
    if #out == 0 and part.additional then out[1] = part.additional end
    return out, #out > 0
end
M.part_locs = part_locs

--- The conjunction that the property `name` of an object falls under.
function M:member_locs(c, name)
    self:work(#c.parts / 10) -- ten of them take as long as a join
    local out = {}
    local function matches(p) return p.regex:matches(name) end
    for _, part in ipairs(c.parts) do
        for _, l in ipairs((part_locs(part, name, matches))) do out[#out + 1] = l end
    end
    return out
end

-- Whether anything can obey: true unless it is certain that nothing does ----------------------------------------------

function M:satisfiable(locs, depth)
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
function M:string_set(c)
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

function M:strings_possible(c)
    if (c.min_len or 0) > (c.max_len or math.huge) then return false end
    if #c.patterns == 0 then return true end
    return not refuse.check(c.at, self:string_set(c):is_empty())
end

function M:objects_possible(c, depth)
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

function M:arrays_possible(c, depth)
    if (c.min_items or 0) > (c.max_items or math.huge) then return false end
    for i = 1, math.min(c.min_items or 0, 32) do
        if not self:satisfiable(self:item_locs(c, i), depth) then return false end
    end
    return true
end

function M:possible(c, depth)
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

return M
