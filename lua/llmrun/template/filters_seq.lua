-- Filters on sequences and dicts; they add themselves to the table of filters.lua.
--
-- Where Jinja gives an iterator (map, select, unique, reverse, items...) the result here is computed at once but acts
-- as one: it is true even if empty, has no length, and is used up by its first use.

local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local text = require "llmrun.template.text"
local value = require "llmrun.template.value"
local ops = require "llmrun.template.ops"
local show = require "llmrun.template.show"
local methods = require "llmrun.template.methods"
local tests = require "llmrun.template.tests"
local filters = require "llmrun.template.filters"
local raise, charge = state.raise, state.charge
local flat, str = rope.flat, show.str
local null = value.null

local function define(names, params, fn, raw)
    for name in names:gmatch "%S+" do
        filters[name] = value.func(name, params, fn, raw)
    end
end

local function truth_arg(v)
    return v ~= nil and value.truth(v)
end

-- Attributes by name -------------------------------------------------------------------------------------------------

-- A function item -> value for "a.b.0", a number, or nil (the item itself).
local function getter(attribute, default)
    if attribute == nil or attribute == null then
        return nil
    end
    local path = {}
    if math.type(attribute) == "integer" then
        path[1] = attribute
    else
        for part in (flat(str(attribute)) .. "."):gmatch "([^.]*)%." do
            path[#path + 1] = part:find "^%d+$" and math.tointeger(tonumber(part)) or part
        end
    end
    return function(item)
        for i = 1, #path do
            item = value.getitem(item, path[i])
            if default ~= nil and value.is_undef(item) then
                item = default
            end
        end
        charge(#path)
        return item
    end
end

-- Strings compare without regard to case unless asked.
local function fold(v)
    return rope.is_str(v) and text.lower(flat(v)) or v
end

-- A function item -> key to compare by, or nil for the item itself.
local function key_getter(attribute, case_sensitive, default)
    local get = getter(attribute, default)
    if truth_arg(case_sensitive) then
        return get
    elseif not get then
        return fold
    end
    return function(item)
        return fold(get(item))
    end
end

-- Order --------------------------------------------------------------------------------------------------------------

-- a < b, where equal values need no order of their own (Python compares lists of keys so).
local function lt_unless_equal(a, b)
    return not ops.eq(a, b) and ops.lt(a, b)
end

-- True if all keys are plain strings, or all numbers, so that Lua's own < orders them.
local function comparable(keys, n)
    local first = type(keys[1])
    if first ~= "string" and first ~= "number" then
        return false
    end
    for i = 2, n do
        if type(keys[i]) ~= first then
            return false
        end
    end
    return true
end

-- The items in order of their keys; equal ones stay as they were.
local function sorted(items, n, key, reverse, lt)
    local keys, order = {}, {}
    for i = 1, n do
        keys[i] = key and key(items[i]) or items[i]
        order[i] = i
    end
    local rounds = math.ceil(math.log(n + 2, 2))
    local simple = comparable(keys, n)
    charge(1 + n * rounds * (simple and 2 or 6))
    lt = lt or ops.lt
    if simple then
        lt = function(a, b)
            return a < b
        end
    end
    table.sort(order, function(a, b)
        local x, y = keys[a], keys[b]
        if reverse then
            x, y = y, x
        end
        if lt(x, y) then
            return true
        elseif lt(y, x) then
            return false
        end
        return a < b
    end)
    local out = {}
    for i = 1, n do
        out[i] = items[order[i]]
    end
    return out
end

define("sort", { "reverse", "case_sensitive", "attribute" }, function(v, reverse, case_sensitive, attribute)
    local items, n = value.iter(v)
    local key = key_getter(nil, case_sensitive)
    if rope.is_str(attribute) and flat(attribute):find(",", 1, true) then
        local keys = {}
        for part in flat(attribute):gmatch "[^,]+" do
            keys[#keys + 1] = key_getter(part, case_sensitive)
        end
        key = function(item)
            local t = {}
            for i = 1, #keys do
                t[i] = keys[i](item)
            end
            return value.tuple(t)
        end
    elseif attribute ~= nil then
        key = key_getter(attribute, case_sensitive)
    end
    return value.list(sorted(items, n, key, truth_arg(reverse), lt_unless_equal))
end)

define("dictsort", { "case_sensitive", "by", "reverse" }, function(v, case_sensitive, by, reverse)
    if value.kind(v) ~= "dict" then
        if value.length(v) == 0 then
            return value.list {}
        end
        raise("type", "dictsort: expected a dict, not '%s'", value.type_name(v))
    end
    by = by == nil and "key" or flat(str(by))
    if by ~= "key" and by ~= "value" then
        raise("value", "dictsort: by must be 'key' or 'value'")
    end
    local items, n = methods.items(v)
    return value.list(sorted(items, n, key_getter(by == "key" and 0 or 1, case_sensitive), truth_arg(reverse)))
end)

-- min and max: the first of the smallest (or largest).
local function extreme(name, better)
    define(name, { "case_sensitive", "attribute" }, function(v, case_sensitive, attribute)
        local items, n = value.iter(v)
        if n == 0 then
            return value.undef_attr(name)
        end
        local key = key_getter(attribute, case_sensitive)
        charge(n)
        local best, best_key = items[1], key and key(items[1]) or items[1]
        for i = 2, n do
            local k = key and key(items[i]) or items[i]
            if better(k, best_key) then
                best, best_key = items[i], k
            end
        end
        return best
    end)
end
extreme("min", function(a, b)
    return ops.lt(a, b)
end)
extreme("max", function(a, b)
    return ops.lt(b, a, 0, ">")
end)

define("unique", { "case_sensitive", "attribute" }, function(v, case_sensitive, attribute)
    local items, n = value.iter(v)
    local key = key_getter(attribute, case_sensitive)
    local seen, out = {}, {}
    charge(n)
    for i = 1, n do
        local k = key and key(items[i]) or items[i]
        local id = type(k) == "boolean" and (k and 1 or 0) or value.to_key(k)
        if id == nil then
            if value.is_undef(k) then
                id = value.Undef
            else
                raise("type", "unhashable type: '%s'", value.type_name(k))
            end
        end
        if not seen[id] then
            seen[id] = true
            out[#out + 1] = items[i]
        end
    end
    return value.gen(out)
end)

define("groupby", { "attribute", "default", "case_sensitive" }, function(v, attribute, default, case_sensitive)
    local items, n = value.iter(v)
    local key, raw_key = key_getter(attribute, case_sensitive, default), getter(attribute, default)
    local ordered = sorted(items, n, key, false)
    local out, last, group = {}, nil, nil
    for i = 1, n do
        local k = key(ordered[i])
        if not group or not ops.eq(k, last) then
            last, group = k, value.list {}
            out[#out + 1] = value.tuple { raw_key(ordered[i]), group }
            out[#out].names = { grouper = 1, list = 2 }
        end
        group[#group + 1] = ordered[i]
    end
    return value.list(out)
end)

define("reverse", {}, function(v)
    if rope.is_str(v) then
        local chars, n = text.chars(flat(v))
        for i = 1, n // 2 do
            chars[i], chars[n + 1 - i] = chars[n + 1 - i], chars[i]
        end
        return rope.like(v, table.concat(chars))
    end
    local items, n = value.iter(v)
    local out = {}
    charge(n)
    for i = 1, n do
        out[i] = items[n + 1 - i]
    end
    return value.gen(out)
end)

-- Parts and sums -----------------------------------------------------------------------------------------------------

define("length count", {}, value.length)

define("first", {}, function(v)
    if value.kind(v) == "gen" then
        local at = (v.used or 0) + 1
        v.used = math.min(at, #v)
        local r = rawget(v, at)
        return r == nil and value.undef_attr "first" or r
    end
    local items, n = value.iter(v)
    if n == 0 then
        return value.undef_attr "first"
    end
    return items[1]
end)

define("last", {}, function(v)
    if value.kind(v) == "gen" then
        raise("type", "an iterator has no last item; use |list first")
    end
    local items, n = value.iter(v)
    if n == 0 then
        return value.undef_attr "last"
    end
    return items[n]
end)

define("list", {}, function(v)
    local items, n = value.iter(v)
    charge(n)
    return value.list(table.move(items, 1, n, 1, {}))
end)

define("join", { "d", "attribute" }, function(v, sep, attribute)
    local items, n = value.iter(v)
    local get = getter(attribute)
    sep = sep == nil and "" or str(sep)
    local parts, k = {}, 0
    for i = 1, n do
        if i > 1 then
            k = k + 1
            parts[k] = sep
        end
        k = k + 1
        local item = items[i]
        if get then
            item = get(item)
        end
        parts[k] = str(item)
    end
    return rope.join(parts, k)
end)

define("sum", { "attribute", "start" }, function(v, attribute, start)
    local items, n = value.iter(v)
    local get = getter(attribute)
    local total = start == nil and 0 or start
    charge(n)
    for i = 1, n do
        total = ops.add(total, get and get(items[i]) or items[i])
    end
    return total
end)

define("items", {}, function(v)
    if value.is_undef(v) then
        return value.gen {}
    elseif value.kind(v) ~= "dict" then
        -- an empty unmarked table may well be an empty dict
        if value.kind(v) == "list" and #v == 0 then
            return value.gen {}
        end
        raise("type", "Can only get item pairs from a mapping.")
    end
    return value.gen((methods.items(v)))
end)

define("batch", { "linecount", "fill_with" }, function(v, size, fill)
    local items, n = value.iter(v)
    if math.type(size) ~= "integer" or size < 1 then
        raise("value", "batch: expected a positive count")
    end
    charge(n)
    local out = {}
    for i = 1, n, size do
        out[#out + 1] = value.list(table.move(items, i, math.min(i + size - 1, n), 1, {}))
    end
    if fill ~= nil and fill ~= null and #out > 0 then
        local row = out[#out]
        charge(size)
        for i = #row + 1, size do
            row[i] = fill
        end
    end
    return value.gen(out)
end)

define("slice", { "slices", "fill_with" }, function(v, slices, fill)
    local items, n = value.iter(v)
    if math.type(slices) ~= "integer" or slices < 1 then
        raise("value", "slice: expected a positive count")
    end
    charge(n + slices)
    local per, extra, at, out = n // slices, n % slices, 1, {}
    for i = 1, slices do
        local size = per + (i <= extra and 1 or 0)
        local row = value.list(table.move(items, at, at + size - 1, 1, {}))
        at = at + size
        if fill ~= nil and fill ~= null and i > extra then
            row[size + 1] = fill
        end
        out[i] = row
    end
    return value.gen(out)
end)

-- Filters that apply other filters and tests -------------------------------------------------------------------------

-- Runs a Func of this module or tests.lua on a value with further arguments.
local function apply(func, v, args, n, named)
    if func.raw then
        return func.fn(args, n, named, v)
    end
    if named then
        args, n = value.bind(func, table.move(args, 1, n, 1, {}), n, named)
    end
    if n > #func.params then
        raise("type", "%s takes at most %d arguments", func.name, #func.params)
    end
    return func.fn(v, table.unpack(args, 1, n))
end

-- The items that map, select and reject go through: nothing false is looked at, not even to complain.
local function items_of(v)
    if not value.truth(v) then
        return {}, 0
    end
    return value.iter(v)
end

local function find(set, name, what)
    name = rope.is_str(name) and flat(name) or raise("type", "the name of a %s must be a string", what)
    return set[name] or raise("value", "there is no %s named '%s'", what, name)
end

define("map", {}, function(args, n, named, v)
    local items, count = items_of(v)
    local out = {}
    charge(10 + 2 * count)
    if n == 0 and named and named.attribute ~= nil then
        local get = getter(named.attribute, named.default)
        for i = 1, count do
            out[i] = get(items[i])
        end
        return value.gen(out)
    elseif n == 0 then
        raise("type", "map requires a filter or an attribute")
    end
    local filter = find(filters, args[1], "filter")
    local rest = table.move(args, 2, n, 1, {})
    for i = 1, count do
        out[i] = apply(filter, items[i], rest, n - 1, named)
    end
    return value.gen(out)
end, true)

local function selector(name, with_attr, keep)
    define(name, {}, function(args, n, named, v)
        local items, count = items_of(v)
        local get, at = nil, 1
        if with_attr then
            if n == 0 then
                raise("type", "%s: missing the name of an attribute", name)
            end
            get, at = getter(args[1]), 2
        end
        local test = n >= at and find(tests, args[at], "test")
        local rest = table.move(args, at + 1, n, 1, {})
        local out = {}
        charge(2 * count)
        for i = 1, count do
            local x = items[i]
            if get then
                x = get(x)
            end
            local pass
            if test then
                pass = apply(test, x, rest, n - at, named)
            else
                pass = value.truth(x)
            end
            if pass == keep then
                out[#out + 1] = items[i]
            end
        end
        return value.gen(out)
    end, true)
end

selector("select", false, true)
selector("reject", false, false)
selector("selectattr", true, true)
selector("rejectattr", true, false)
