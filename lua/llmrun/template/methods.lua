-- Methods of str, list, tuple and dict, as Python has them.
--
-- Strings keep their provenance piece by piece where a result is cut out of them (strip, split, slices, replace); what
-- is computed (upper, zfill...) is literal only if all of its input was. Lists and dicts can be changed only if the
-- template made them itself: the engine's own data is never changed.

local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local text = require "llmrun.template.text"
local value = require "llmrun.template.value"
local ops = require "llmrun.template.ops"
local show = require "llmrun.template.show"
local format = require "llmrun.template.format"
local raise, charge, charge_bytes = state.raise, state.charge, state.charge_bytes
local flat, like, cutter = rope.flat, rope.like, rope.cutter
local null = value.null

local M = {}

local str, list, tuple, dict = value.methods.str, value.methods.list, value.methods.tuple, value.methods.dict

local function define(set, name, params, fn, raw)
    set[name] = value.func(name, params, fn, raw)
end

local function defined(v)
    return v ~= nil and v ~= null
end

local function text_arg(v, what)
    if not rope.is_str(v) then
        if value.is_undef(v) and v ~= nil then
            value.raise_undef(v)
        end
        raise("type", "%s: expected a string, not '%s'", what, value.type_name(v))
    end
    return flat(v)
end

local function int_arg(v, default, what)
    if not defined(v) then
        return default
    end
    v = ops.num(v)
    if math.type(v) ~= "integer" then
        raise("type", "%s: expected an integer", what)
    end
    return v
end

-- Strings ------------------------------------------------------------------------------------------------------------

---strip, lstrip, rstrip of a string value; chars is nil, None or a string.
function M.strip(v, left, right, chars)
    local s = flat(v)
    local i, j = text.strip_span(s, left, right, defined(chars) and text_arg(chars, "strip") or nil)
    if i == 1 and j == #s then
        return v
    end
    return rope.sub(v, i, j)
end

for name, ends in pairs { strip = { true, true }, lstrip = { true, false }, rstrip = { false, true } } do
    define(str, name, { "chars" }, function(v, chars)
        return M.strip(v, ends[1], ends[2], chars)
    end)
end

for _, name in ipairs { "upper", "lower", "title", "capitalize", "swapcase" } do
    define(str, name, {}, function(v)
        return like(v, text[name](flat(v)))
    end)
end
str.casefold = value.func("casefold", {}, str.lower.fn)

-- Splits at white space. limit: splits at most, or -1; what is left over is one piece at the end (or the start).
local function split_space(v, limit, from_right)
    local s, cut = flat(v), cutter(v)
    local from, to, n = text.words(s)
    local size = #s
    local first, last = 1, n
    if limit >= 0 and limit < n then
        if from_right then
            first = n - limit
            from[first] = 1
        else
            last = limit + 1
            to[last] = size
        end
    end
    local out = {}
    for a = first, last do
        out[a - first + 1] = cut(from[a], to[a])
    end
    return value.list(out)
end

-- Byte positions of `part` in s, from the left or from the right, at most `limit` (or -1 for all).
local function occurrences(s, part, limit)
    local at, n, i = {}, 0, 1
    text.charge_search(s, part)
    while n ~= limit do
        local a, b = s:find(part, i, true)
        if not a then
            break
        end
        n = n + 1
        at[n] = a
        i = b + 1
        charge(4)
    end
    return at, n
end

local function last_occurrences(s, part, limit)
    local at, n = occurrences(s:reverse(), part:reverse(), limit)
    local out = {}
    for i = 1, n do
        out[n + 1 - i] = #s - at[i] - #part + 2
    end
    return out, n
end

local function split(v, sep, limit, from_right)
    limit = int_arg(limit, -1, "split")
    if limit < 0 then
        limit = -1
    end
    if not defined(sep) then
        return split_space(v, limit, from_right)
    end
    local s, part = flat(v), text_arg(sep, "split")
    if part == "" then
        raise("value", "empty separator")
    end
    local at, n = (from_right and last_occurrences or occurrences)(s, part, limit)
    local cut, out, i = cutter(v), {}, 1
    for k = 1, n do
        out[k] = cut(i, at[k] - 1)
        i = at[k] + #part
    end
    out[n + 1] = cut(i, #s)
    return value.list(out)
end

define(str, "split", { "sep", "maxsplit" }, function(v, sep, limit)
    return split(v, sep, limit, false)
end)
define(str, "rsplit", { "sep", "maxsplit" }, function(v, sep, limit)
    return split(v, sep, limit, true)
end)

local function partition(v, sep, from_right)
    local s, part = flat(v), text_arg(sep, "partition")
    if part == "" then
        raise("value", "empty separator")
    end
    local at, n = (from_right and last_occurrences or occurrences)(s, part, 1)
    if n == 0 then
        return value.tuple(from_right and { "", "", v } or { v, "", "" })
    end
    local cut = cutter(v)
    local a, b = at[1], at[1] + #part - 1
    return value.tuple { cut(1, a - 1), cut(a, b), cut(b + 1, #s) }
end

define(str, "partition", { "sep" }, function(v, sep)
    return partition(v, sep, false)
end)
define(str, "rpartition", { "sep" }, function(v, sep)
    return partition(v, sep, true)
end)

-- Line ends for splitlines, by their first byte.
local function line_end(s, i)
    local at = s:find("[\n\r\v\f\x1c-\x1e\xC2\xE2]", i)
    while at do
        local c = s:sub(at, at)
        if c == "\r" and s:sub(at + 1, at + 1) == "\n" then
            return at, at + 1
        elseif c == "\xC2" then
            if s:sub(at, at + 1) == "\u{85}" then
                return at, at + 1
            end
        elseif c == "\xE2" then
            local three = s:sub(at, at + 2)
            if three == "\u{2028}" or three == "\u{2029}" then
                return at, at + 2
            end
        else
            return at, at
        end
        at = s:find("[\n\r\v\f\x1c-\x1e\xC2\xE2]", at + 1)
    end
end

---splitlines(): the lines as a Lua list.
function M.lines(v, keep_ends)
    local s, cut = flat(v), cutter(v)
    local out, n, i = {}, 0, 1
    charge(1 + #s // 16)
    while i <= #s do
        local a, b = line_end(s, i)
        n = n + 1
        if not a then
            out[n] = cut(i, #s)
            break
        end
        out[n] = cut(i, keep_ends and b or a - 1)
        i = b + 1
    end
    charge(n)
    return out, n
end

define(str, "splitlines", { "keepends" }, function(v, keep)
    return value.list((M.lines(v, keep ~= nil and value.truth(keep))))
end)

---str.replace: provenance stays with each part.
function M.replace(v, old, new, count)
    local s, part = flat(v), text_arg(old, "replace")
    local with = text_arg(new, "replace") and new
    count = int_arg(count, -1, "replace")
    if count < 0 then
        count = -1
    end
    local parts, n, cut, i = {}, 0, cutter(v), 1
    if part == "" then
        local list_of, size = text.chars(s)
        charge(size)
        for k = 1, size do
            if k <= count or count < 0 then
                parts[n + 1] = with
                n = n + 1
            end
            n = n + 1
            parts[n] = cut(i, i + #list_of[k] - 1)
            i = i + #list_of[k]
        end
        if count < 0 or count > size then
            n = n + 1
            parts[n] = with
        end
        return rope.join(parts, n)
    end
    local at, found = occurrences(s, part, count)
    if found == 0 then
        return v
    end
    for k = 1, found do
        if at[k] > i then
            n = n + 1
            parts[n] = cut(i, at[k] - 1)
        end
        n = n + 1
        parts[n] = with
        i = at[k] + #part
    end
    n = n + 1
    parts[n] = cut(i, #s)
    return rope.join(parts, n)
end

define(str, "replace", { "old", "new", "count" }, function(v, old, new, count)
    return M.replace(v, old, new, count)
end)

---sep.join(items): every item must be a string.
function M.join(sep, items)
    local all, n = value.iter(items)
    local parts, k = {}, 0
    for i = 1, n do
        if not rope.is_str(all[i]) then
            raise("type", "sequence item %d: expected str instance, %s found", i - 1, value.type_name(all[i]))
        end
        if i > 1 then
            k = k + 1
            parts[k] = sep
        end
        k = k + 1
        parts[k] = all[i]
    end
    return rope.join(parts, k)
end
define(str, "join", { "iterable" }, M.join)

define(str, "format", {}, function(args, n, named, self)
    return format.braces(self, args, n, named)
end, true)

-- The part of s between character positions start and stop, with the byte offset before it.
local function window(s, start, stop)
    if not defined(start) and not defined(stop) then
        return s, 0
    end
    local n = text.len(s)
    local a, b = int_arg(start, 0, "start"), int_arg(stop, n, "stop")
    a = a < 0 and math.max(a + n, 0) or a
    b = b < 0 and math.max(b + n, 0) or math.min(b, n)
    if a > n then
        return nil
    elseif a >= b then
        return "", #s:sub(1, select(2, text.span(s, 0, a)))
    end
    local i, j = text.span(s, a, b)
    return s:sub(i, j), i - 1
end

local function starts(s, part)
    return s:sub(1, #part) == part
end
local function ends(s, part)
    return part == "" or s:sub(-#part) == part
end

local function affix(name, test)
    define(str, name, { "prefix", "start", "end" }, function(v, part, start, stop)
        local s = window(flat(v), start, stop)
        if value.kind(part) ~= "tuple" then
            local p = text_arg(part, name)
            return s ~= nil and test(s, p)
        end
        for i = 1, #part do
            if s and test(s, text_arg(part[i], name)) then
                return true
            end
        end
        return false
    end)
end
affix("startswith", starts)
affix("endswith", ends)

local function finder(name, search, missing)
    define(str, name, { "sub", "start", "end" }, function(v, part, start, stop)
        local s = flat(v)
        local p = text_arg(part, name)
        local part_of, before = window(s, start, stop)
        if part_of then
            text.charge_search(part_of, p)
            local at = search(part_of, p)
            if at then
                return text.index(s, before + at)
            end
        end
        if missing then
            return missing
        end
        return raise("value", "substring not found")
    end)
end

local function find_first(s, p)
    return (s:find(p, 1, true))
end
local function find_last(s, p)
    local at = s:reverse():find(p:reverse(), 1, true)
    return at and #s - at - #p + 2
end
finder("find", find_first, -1)
finder("rfind", find_last, -1)
finder("index", find_first)
finder("rindex", find_last)

define(str, "count", { "sub", "start", "end" }, function(v, part, start, stop)
    local s = window(flat(v), start, stop)
    local p = text_arg(part, "count")
    if not s then
        return 0
    elseif p == "" then
        return text.len(s) + 1
    end
    local _, n = occurrences(s, p, -1)
    return n
end)

define(str, "removeprefix", { "prefix" }, function(v, part)
    local s, p = flat(v), text_arg(part, "removeprefix")
    return starts(s, p) and rope.sub(v, #p + 1, #s) or v
end)
define(str, "removesuffix", { "suffix" }, function(v, part)
    local s, p = flat(v), text_arg(part, "removesuffix")
    return ends(s, p) and rope.sub(v, 1, #s - #p) or v
end)

-- True if s is not empty and all of its characters pass.
local function all_chars(name, test)
    define(str, name, {}, function(v)
        local chars, n = text.chars(flat(v))
        for i = 1, n do
            if not test(chars[i]) then
                return false
            end
        end
        return n > 0
    end)
end
local function is_digit(c)
    return c:find "^%d$" ~= nil
end
all_chars("isdigit", is_digit)
all_chars("isdecimal", is_digit)
all_chars("isnumeric", is_digit)
all_chars("isalpha", text.is_alpha)
all_chars("isalnum", function(c)
    return is_digit(c) or text.is_alpha(c)
end)
all_chars("isspace", text.is_space)

define(str, "isascii", {}, function(v)
    return text.is_ascii(flat(v))
end)
define(str, "isupper", {}, function(v)
    return text.is_case(flat(v), "upper")
end)
define(str, "islower", {}, function(v)
    return text.is_case(flat(v), "lower")
end)
define(str, "istitle", {}, function(v)
    local s = flat(v)
    return text.title(s) == s and (text.lower(s) ~= s or text.upper(s) ~= s)
end)
define(str, "isidentifier", {}, function(v)
    return flat(v):find "^[%a_\x80-\xFF][%w_\x80-\xFF]*$" ~= nil
end)

---Pads to a width in characters; side is "left", "right" or "center" (where the text goes).
function M.pad(v, width, fill, side)
    local s = flat(v)
    fill = fill == nil and " " or text_arg(fill, "fill character")
    if text.len(fill) ~= 1 then
        raise("type", "the fill character must be exactly one character long")
    end
    local n = text.len(s)
    local gap = int_arg(width, 0, "width") - n
    if gap <= 0 then
        return v
    end
    charge_bytes(#s + gap * #fill)
    local before = side == "left" and 0 or gap
    if side == "center" then
        before = gap // 2 + (gap & (gap + n) & 1)
    end
    return rope.join({ fill:rep(before), v, fill:rep(gap - before) }, 3)
end

define(str, "ljust", { "width", "fillchar" }, function(v, width, fill)
    return M.pad(v, width, fill, "left")
end)
define(str, "rjust", { "width", "fillchar" }, function(v, width, fill)
    return M.pad(v, width, fill, "right")
end)
define(str, "center", { "width", "fillchar" }, function(v, width, fill)
    return M.pad(v, width, fill, "center")
end)
define(str, "zfill", { "width" }, function(v, width)
    local s = flat(v)
    local gap = int_arg(width, 0, "zfill") - text.len(s)
    if gap <= 0 then
        return v
    end
    charge_bytes(#s + gap)
    local sign, rest = s:match "^([-+]?)(.*)$"
    return like(v, sign .. ("0"):rep(gap) .. rest)
end)

-- Sequences ----------------------------------------------------------------------------------------------------------

for _, set in ipairs { list, tuple } do
    define(set, "count", { "value" }, function(v, x)
        local n = 0
        charge(#v)
        for i = 1, #v do
            if ops.eq(v[i], x) then
                n = n + 1
            end
        end
        return n
    end)
    define(set, "index", { "value", "start", "end" }, function(v, x, start, stop)
        local n = #v
        charge(n)
        local a, b = int_arg(start, 0, "index"), int_arg(stop, n, "index")
        a = a < 0 and math.max(a + n, 0) or a
        b = b < 0 and b + n or math.min(b, n)
        for i = a + 1, b do
            if ops.eq(v[i], x) then
                return i - 1
            end
        end
        return raise("value", "%s is not in the list", show.repr(x))
    end)
end

define(list, "copy", {}, function(v)
    charge(1 + #v)
    return value.list(table.move(v, 1, #v, 1, {}))
end)

-- A method that changes a list, allowed on the template's own lists.
local function changer(name, params, fn)
    define(list, name, params, function(v, ...)
        if getmetatable(v) ~= value.List then
            raise("security", "'%s' would change data that the template did not make", name)
        end
        charge(2)
        return fn(v, ...) or null
    end)
end

changer("append", { "object" }, function(v, x)
    v[#v + 1] = x
end)
changer("extend", { "iterable" }, function(v, items)
    local all, n = value.iter(items)
    charge(n)
    table.move(all, 1, n, #v + 1, v)
end)
changer("insert", { "index", "object" }, function(v, i, x)
    i = int_arg(i, 0, "insert")
    i = i < 0 and math.max(i + #v, 0) or math.min(i, #v)
    charge(#v - i)
    table.insert(v, i + 1, x)
end)
changer("pop", { "index" }, function(v, i)
    i = int_arg(i, -1, "pop")
    i = i < 0 and i + #v or i
    if i < 0 or i >= #v then
        raise("value", "pop index out of range")
    end
    charge(#v - i)
    return table.remove(v, i + 1)
end)
changer("remove", { "value" }, function(v, x)
    charge(#v)
    for i = 1, #v do
        if ops.eq(v[i], x) then
            table.remove(v, i)
            return
        end
    end
    raise("value", "the value is not in the list")
end)
changer("clear", {}, function(v)
    charge(#v)
    for i = #v, 1, -1 do
        v[i] = nil
    end
end)
changer("reverse", {}, function(v)
    local n = #v
    charge(n)
    for i = 1, n // 2 do
        v[i], v[n + 1 - i] = v[n + 1 - i], v[i]
    end
end)

-- Dicts --------------------------------------------------------------------------------------------------------------

define(dict, "get", { "key", "default" }, function(d, key, default)
    local k = value.hash_key(key)
    local v
    if k ~= nil then
        v = rawget(d, k)
    end
    if v == nil then
        v = default
    end
    if v == nil then
        return null
    end
    return v
end)

---The pairs of a dict as a Lua list of tuples.
function M.items(d)
    local keys, n = value.keys(d)
    for i = 1, n do
        keys[i] = value.tuple { keys[i], d[keys[i]] }
    end
    charge(8 * n)
    return keys, n
end

local function view(t, name)
    t.view = name
    return setmetatable(t, value.View)
end

define(dict, "items", {}, function(d)
    return view(M.items(d), "dict_items")
end)
define(dict, "keys", {}, function(d)
    return view(value.keys(d), "dict_keys")
end)
define(dict, "values", {}, function(d)
    local keys, n = value.keys(d)
    for i = 1, n do
        keys[i] = d[keys[i]]
    end
    return view(keys, "dict_values")
end)
define(dict, "copy", {}, function(d)
    local keys, n = value.keys(d)
    local t = {}
    for i = 1, n do
        t[keys[i]] = d[keys[i]]
    end
    return value.dict(t, keys, true)
end)

-- A method that changes a dict, allowed on the template's own dicts.
local function dict_changer(name, params, fn, raw)
    define(dict, name, params, function(d, a, b, self)
        local target = raw and self or d
        local mt = getmetatable(target)
        if not (mt and mt.own) then
            raise("security", "'%s' would change data that the template did not make", name)
        end
        charge(2)
        local r = fn(d, a, b, self)
        if r == nil then
            return null
        end
        return r
    end, raw)
end

local function remove_key(d, key)
    local keys = getmetatable(d).__keys
    charge(#keys)
    for i = 1, #keys do
        if keys[i] == key then
            table.remove(keys, i)
            break
        end
    end
    d[key] = nil
end

---Adds what dict(x) would hold to d: a mapping or a sequence of pairs.
function M.update(d, from)
    if value.kind(from) == "dict" then
        local keys, n = value.keys(from)
        for i = 1, n do
            value.dict_set(d, keys[i], from[keys[i]])
        end
        return
    end
    local all, n = value.iter(from)
    charge(2 * n)
    for i = 1, n do
        local pair, m = value.iter(all[i])
        if m ~= 2 then
            raise("value", "a dict is made of pairs")
        end
        value.dict_set(d, pair[1], pair[2])
    end
end

dict_changer("pop", { "key", "default" }, function(d, key, default)
    local k = value.to_key(key)
    local v = k ~= nil and rawget(d, k)
    if k == nil or v == nil then
        if default == nil then
            raise("value", "no such key: %s", show.repr(key))
        end
        return default
    end
    remove_key(d, k)
    return v
end)
dict_changer("setdefault", { "key", "default" }, function(d, key, default)
    local k = value.to_key(key)
    local v
    if k ~= nil then
        v = rawget(d, k)
    end
    if v == nil then
        v = default == nil and null or default
        value.dict_set(d, key, v)
    end
    return v
end)
dict_changer("clear", {}, function(d)
    for _, key in ipairs(table.move(getmetatable(d).__keys, 1, #getmetatable(d).__keys, 1, {})) do
        remove_key(d, key)
    end
end)
dict_changer("update", {}, function(args, n, named, self)
    for i = 1, n do
        M.update(self, args[i])
    end
    for i = 1, named and #named or 0 do
        value.dict_set(self, named[i], named[named[i]])
    end
end, true)

return M
