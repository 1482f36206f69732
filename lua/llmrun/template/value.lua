-- The values that templates see, and how Python's view of them maps to Lua's.
--
--   Python        here
--   str           Lua string (data) or rope (rope.lua)
--   int, float    Lua integer, Lua float; bool: Lua boolean; None: M.null (the NULL light userdata, as cjson.null)
--   list          a sequence. Lists that a template makes have the metatable List; only these may be changed by it
--   dict          any other table, or one whose metatable has `__keys`: the list of its keys in order. Without it the
--                 order is that of the sorted keys. A table that is empty and unmarked is a list
--   tuple, range, iterators and dict views: sequences with metatables of their own
--   undefined     { name = } or { attr = } with the metatable Undef
-- Other things (macros, loop, namespaces...) are tables whose metatable is registered with a kind.
-- Input tables are never copied and never changed, and no metamethod of theirs is called.

local cjson = require "cjson"
local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local text = require "llmrun.template.text"
local raise, charge, charge_bytes = state.raise, state.charge, state.charge_bytes
local Rope, flat = rope.Rope, rope.flat
local getmetatable, rawget, next, type, math_type = getmetatable, rawget, next, type, math.type

local M = {}

local null = cjson.null
M.null = null

local List, DataList, Tuple, Gen, View, Range, Undef, Func, Method = {}, {}, {}, {}, {}, {}, {}, {}, {}
M.List, M.Tuple, M.Gen, M.View, M.Range, M.Undef, M.Func, M.Method = List, Tuple, Gen, View, Range, Undef, Func, Method

local kind_of = {
    [Rope] = "str", [List] = "list", [DataList] = "list", [Tuple] = "tuple", [Gen] = "gen", [View] = "view",
    [Range] = "range", [Undef] = "undef", [Func] = "func", [Method] = "method",
}
for _, name in ipairs { "array_mt", "empty_array_mt" } do
    if type(cjson[name]) == "table" then
        kind_of[cjson[name]] = "list"
    end
end

local attr_of, call_of = {}, {}

-- Fields of the pairs that groupby makes.
function attr_of.tuple(v, name)
    local names = rawget(v, "names")
    return names and names[name] and v[names[name]]
end

---Registers a kind of object. attr(o, name) gives an attribute or nil; call(o, args, n, named) calls it.
function M.register(mt, kind, attr, call)
    kind_of[mt] = kind
    attr_of[kind] = attr
    call_of[kind] = call
end

-- Making values ------------------------------------------------------------------------------------------------------

function M.list(t)
    return setmetatable(t, List)
end

---A list of the caller's, which templates may not change. Needed only to tell an empty one from a dict.
function M.data_list(t)
    return setmetatable(t, DataList)
end

function M.tuple(t)
    return setmetatable(t, Tuple)
end

---An iterator over the items: true whatever it holds, without a length, and used up by its first use.
function M.gen(t)
    return setmetatable(t, Gen)
end

---A dict with these keys in order. `own` marks those that a template made and may change.
function M.dict(t, keys, own)
    return setmetatable(t, { __keys = keys, own = own })
end

---A builtin. params: names of its parameters, for calls by name; raw: fn gets (args, n, named) as they are.
function M.func(name, params, fn, raw)
    return setmetatable({ name = name, params = params, fn = fn, raw = raw }, Func)
end

function M.undef(name)
    return setmetatable({ name = name }, Undef)
end

function M.undef_attr(attr)
    return setmetatable({ attr = attr }, Undef)
end

-- Kinds --------------------------------------------------------------------------------------------------------------

local function kind_of_table(v)
    local mt = getmetatable(v)
    if mt ~= nil then
        local kind = kind_of[mt]
        if kind then
            return kind
        elseif type(mt) == "table" then
            if rawget(mt, "__keys") or rawget(mt, "__jsontype") == "object" then
                return "dict"
            elseif rawget(mt, "__jsontype") == "array" then
                return "list"
            end
        end
    end
    if rawget(v, 1) ~= nil or next(v) == nil then
        return "list"
    end
    return "dict"
end

---str int float bool none list tuple gen view range dict undef func method ..., or "opaque" for what templates cannot
---use.
function M.kind(v)
    local t = type(v)
    if t == "table" then
        return kind_of_table(v)
    elseif t == "string" then
        return "str"
    elseif t == "number" then
        return math_type(v) == "integer" and "int" or "float"
    elseif t == "boolean" then
        return "bool"
    elseif v == null then
        return "none"
    elseif t == "nil" then
        return "undef"
    end
    return "opaque"
end
local kind = M.kind

local python_names = {
    none = "NoneType", undef = "Undefined", gen = "generator", view = "dict view", func = "function",
    opaque = "host value",
}

---What Python calls the type, for messages.
function M.type_name(v)
    local k = kind(v)
    return python_names[k] or k
end

function M.is_undef(v)
    return v == nil or getmetatable(v) == Undef
end

local indexed = { list = true, tuple = true, range = true }
local sized = { list = true, tuple = true, range = true, view = true }
M.indexed = indexed

---Raises the error of using an undefined value.
function M.raise_undef(v)
    if v and v.attr and v.attr:find "^__" then
        raise("security", "there is no access to '%s'", v.attr)
    elseif v and v.attr then
        raise("undefined", "'%s' is undefined (no such attribute or key)", v.attr)
    end
    raise("undefined", "'%s' is undefined", v and v.name or "value")
end

function M.truth(v)
    local t = type(v)
    if t == "boolean" then
        return v
    elseif t == "string" then
        return v ~= ""
    elseif t == "table" then
        local mt = getmetatable(v)
        if mt == nil then
            return next(v) ~= nil
        elseif mt == Rope then
            return v.n > 0
        end
        local k = kind_of_table(v)
        if k == "dict" then
            return next(v) ~= nil
        elseif sized[k] then
            return rawget(v, 1) ~= nil
        end
        return k ~= "undef"
    elseif t == "number" then
        return v ~= 0
    end
    return v ~= nil and v ~= null
end

-- Dicts --------------------------------------------------------------------------------------------------------------

local rank = { boolean = 1, number = 2, string = 3 }

local function key_less(a, b)
    local ra, rb = rank[type(a)] or 4, rank[type(b)] or 4
    if ra ~= rb then
        return ra < rb
    elseif ra == 1 then
        return not a and b
    elseif ra == 4 then
        return tostring(a) < tostring(b)
    end
    return a < b
end

---The keys of a dict in order, and their number. The list is fresh.
function M.keys(d)
    local mt = getmetatable(d)
    local order = type(mt) == "table" and (rawget(mt, "__keys") or rawget(mt, "__jsonorder"))
    local keys, n, seen = {}, 0, nil
    if type(order) == "table" then
        seen = {}
        for i = 1, #order do
            local key = order[i]
            if not seen[key] and rawget(d, key) ~= nil then
                seen[key] = true
                n = n + 1
                keys[n] = key
            end
        end
    end
    local first = n
    for key in next, d do
        if not (seen and seen[key]) then
            n = n + 1
            keys[n] = key
        end
    end
    charge(1 + n)
    if n > first then
        local rest = table.move(keys, first + 1, n, 1, {})
        charge(8 * #rest)
        table.sort(rest, key_less)
        table.move(rest, 1, #rest, first + 1, keys)
    end
    return keys, n
end

---A value as the key of a dict; nil if it cannot be one.
function M.to_key(v)
    local t = type(v)
    if t == "table" then
        return getmetatable(v) == Rope and flat(v) or nil
    elseif v ~= v then
        return nil
    end
    return v
end
local to_key = M.to_key

---As to_key, for looking something up: raises where Python would say that the value is unhashable.
function M.hash_key(v)
    local key = to_key(v)
    if key == nil then
        local k = kind(v)
        if k == "list" or k == "dict" then
            raise("type", "unhashable type: '%s'", k)
        end
    end
    return key
end

---Sets a key of a dict made by M.dict.
function M.dict_set(d, key, val)
    local k = to_key(key)
    if k == nil then
        raise("type", "unhashable type: '%s'", M.type_name(key))
    end
    if rawget(d, k) == nil then
        local keys = getmetatable(d).__keys
        keys[#keys + 1] = k
    end
    d[k] = val
end

-- Sequences ----------------------------------------------------------------------------------------------------------

---The items of anything that can be iterated: a list that the caller must not change, and its length.
function M.iter(v)
    local k = kind(v)
    if k == "list" or k == "tuple" or k == "range" or k == "view" then
        local n = #v
        charge(1 + n // 8)
        return v, n
    elseif k == "dict" then
        return M.keys(v)
    elseif k == "gen" then
        local from = (v.used or 0) + 1
        v.used = #v
        charge(1 + #v)
        if from == 1 then
            return v, #v
        end
        return table.move(v, from, #v, 1, {}), #v - from + 1
    elseif k == "str" then
        local s = flat(v)
        local list, n = text.chars(s)
        if type(v) ~= "string" then
            local cut, at = rope.cutter(v), 1
            charge(10 * n)
            for i = 1, n do
                local size = #list[i]
                list[i] = cut(at, at + size - 1)
                at = at + size
            end
        end
        return list, n
    elseif k == "undef" then
        return {}, 0
    end
    return raise("type", "'%s' object is not iterable", M.type_name(v))
end

---len() of a value.
function M.length(v)
    local k = kind(v)
    if k == "str" then
        return text.len(flat(v))
    elseif sized[k] then
        return #v
    elseif k == "dict" then
        local n = 0
        for _ in next, v do
            n = n + 1
        end
        charge(n)
        return n
    elseif k == "undef" then
        return 0
    end
    return raise("type", "object of type '%s' has no len()", M.type_name(v))
end

---Character i (0-based, negative from the end) of a string, or nil.
local function char_at(v, i)
    local s = flat(v)
    local n = text.len(s)
    if i < 0 then
        i = i + n
    end
    if i < 0 or i >= n then
        return nil
    end
    return rope.sub(v, text.span(s, i, i + 1))
end

local function bound(v, name)
    if v == nil or v == null then
        return nil
    elseif v == true or v == false then
        return v and 1 or 0
    elseif math_type(v) ~= "integer" then
        raise("type", "slice %s must be an integer or None", name)
    end
    return v
end

-- First, last and step (0-based, inclusive) of a slice over n items; nil if it is empty.
local function slice_range(n, from, to, step)
    step = bound(step, "step") or 1
    from, to = bound(from, "start"), bound(to, "stop")
    if step == 0 then
        raise("value", "slice step cannot be zero")
    end
    local low, high = 0, n
    if step < 0 then
        low, high = -1, n - 1
    end
    local function clamp(i, default)
        if not i then
            return default
        end
        if i < 0 then
            i = i + n
        end
        return math.max(low, math.min(high, i))
    end
    from = clamp(from, step < 0 and high or low)
    to = clamp(to, step < 0 and low or high)
    if step > 0 then
        if from >= to then
            return nil
        end
        return from, to - 1, step
    elseif from <= to then
        return nil
    end
    return from, to + 1, step
end

local function slice_text(v, from, to, step)
    local s = flat(v)
    local first, last, by = slice_range(text.len(s), from, to, step)
    if not first then
        return ""
    elseif by == 1 then
        return rope.sub(v, text.span(s, first, last + 1))
    end
    local list, out, n = text.chars(s), {}, 0
    for i = first, last, by do
        n = n + 1
        out[n] = list[i + 1]
    end
    charge_bytes(n)
    return rope.like(v, table.concat(out))
end

---v[from:to:step].
function M.slice(v, from, to, step)
    local k = kind(v)
    if k == "str" then
        return slice_text(v, from, to, step)
    elseif indexed[k] then
        local out, n = {}, 0
        local first, last, by = slice_range(#v, from, to, step)
        if first then
            for i = first, last, by do
                n = n + 1
                out[n] = v[i + 1]
            end
        end
        charge(1 + n)
        return setmetatable(out, k == "tuple" and Tuple or List)
    elseif k == "undef" then
        M.raise_undef(v)
    end
    return raise("type", "'%s' object cannot be sliced", M.type_name(v))
end

-- Attributes and items -----------------------------------------------------------------------------------------------

---Methods by kind: name -> Func. Filled by methods.lua.
M.methods = { str = {}, list = {}, tuple = {}, dict = {} }
local methods = M.methods

---The builtin method `name` of v, or nil. A dict key of that name does not hide it, as with Python's getattr.
function M.method(v, name)
    local set = methods[kind(v)]
    return set and set[name]
end

---v.name without the keys of a dict; nil if there is none.
local function own_attr(v, k, name)
    local set = methods[k]
    local m = set and set[name]
    if m then
        return setmetatable({ self = v, func = m }, Method)
    end
    local attr = attr_of[k]
    return attr and attr(v, name)
end

---v.name, or `undef` if there is no such thing.
function M.getattr(v, name, undef)
    local k = kind(v)
    if k == "undef" then
        M.raise_undef(v)
    end
    local r = own_attr(v, k, name)
    if r == nil and k == "dict" then
        r = rawget(v, name)
    end
    if r == nil then
        return undef or M.undef_attr(name)
    end
    return r
end

---v[key], or an undefined value if there is no such thing.
function M.getitem(v, key)
    local k, r = kind(v), nil
    if k == "dict" then
        local id = to_key(key)
        r = id ~= nil and rawget(v, id)
        if r == nil or id == nil then
            r = nil
        end
    elseif k == "undef" then
        M.raise_undef(v)
    else
        if type(key) == "boolean" then
            key = key and 1 or 0
        end
        if math_type(key) == "integer" then
            if indexed[k] then
                r = rawget(v, key < 0 and #v + key + 1 or key + 1)
            elseif k == "str" then
                r = char_at(v, key)
            end
        end
    end
    if r ~= nil then
        return r
    end
    local name = rope.is_str(key) and flat(key)
    if name then
        r = own_attr(v, k, name)
        if r ~= nil then
            return r
        end
    end
    return M.undef_attr(name or tostring(to_key(key)))
end

-- Calls --------------------------------------------------------------------------------------------------------------

-- Puts named arguments in their places. Returns the arguments and their count.
local function bind(f, args, n, named)
    local params = f.params
    for i = 1, #named do
        local name, at = named[i], nil
        for j = 1, #params do
            if params[j] == name then
                at = j
                break
            end
        end
        if not at then
            raise("type", "%s() got an unexpected keyword argument '%s'", f.name, name)
        elseif args[at] ~= nil then
            raise("type", "%s() got multiple values for argument '%s'", f.name, name)
        end
        args[at] = named[name]
        n = math.max(n, at)
    end
    return args, n
end
M.bind = bind

local function call_func(f, self, args, n, named)
    if f.raw then
        return f.fn(args, n, named, self)
    end
    if named then
        args, n = bind(f, args, n, named)
    end
    if n > #f.params then
        raise("type", "%s() takes at most %d arguments (%d given)", f.name, #f.params, n)
    end
    if self ~= nil then
        return f.fn(self, table.unpack(args, 1, n))
    end
    return f.fn(table.unpack(args, 1, n))
end
M.call_func = call_func

call_of.func = function(f, args, n, named)
    return call_func(f, nil, args, n, named)
end
call_of.method = function(m, args, n, named)
    return call_func(m.func, m.self, args, n, named)
end

---Calls a value. named is nil or { name..., [name] = value }.
function M.call(f, args, n, named)
    local k = kind(f)
    local call = call_of[k]
    if call then
        return call(f, args, n, named)
    elseif k == "undef" then
        M.raise_undef(f)
    end
    return raise("type", "'%s' object is not callable", M.type_name(f))
end

function M.is_callable(v)
    return call_of[kind(v)] ~= nil
end

return M
