-- The functions that every template can call: range, namespace, dict, cycler, joiner, raise_exception, strftime_now.
-- With the filters, tests and methods they are all that a template can reach besides its variables.

local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local value = require "llmrun.template.value"
local show = require "llmrun.template.show"
local methods = require "llmrun.template.methods"
local raise, charge = state.raise, state.charge
local flat = rope.flat
local date, time = os.date, os.time

local M = {}

local MAX_RANGE = 100000 -- as in Jinja's sandbox

local function define(name, params, fn, raw)
    M[name] = value.func(name, params, fn, raw)
end

local function int(v)
    if type(v) == "boolean" then
        return v and 1 or 0
    elseif math.type(v) ~= "integer" then
        if value.is_undef(v) then
            value.raise_undef(v)
        end
        raise("type", "'%s' object cannot be interpreted as an integer", value.type_name(v))
    end
    return v
end

define("range", { "start", "stop", "step" }, function(start, stop, step)
    if start == nil then
        raise("type", "range expected at least 1 argument")
    end
    if stop == nil then
        start, stop = 0, start
    end
    start, stop, step = int(start), int(stop), step == nil and 1 or int(step)
    if step == 0 then
        raise("value", "range() arg 3 must not be zero")
    end
    local count = math.max(0.0, math.ceil((stop + 0.0 - start) / step))
    if count > MAX_RANGE then
        raise("limit", "a range may have at most %d numbers", MAX_RANGE)
    end
    count = math.tointeger(count)
    charge(10 + count)
    local t = { start = start, stop = stop, step = step }
    for i = 1, count do
        t[i] = start + (i - 1) * step
    end
    return setmetatable(t, value.Range)
end)

-- A new dict from dict(x, a=1...).
local function new_dict(args, n, named)
    if n > 1 then
        raise("type", "dict expected at most 1 argument, got %d", n)
    end
    local d = value.dict({}, {}, true)
    charge(20)
    if n == 1 then
        methods.update(d, args[1])
    end
    for i = 1, named and #named or 0 do
        value.dict_set(d, named[i], named[named[i]])
    end
    return d
end

define("dict", {}, new_dict, true)

-- Namespaces: objects whose attributes a template may set, even from inside loops ------------------------------------

local Namespace = {}
value.register(Namespace, "namespace", function(ns, name)
    return ns.vars[name]
end)

local function check_name(name)
    if type(name) ~= "string" then
        raise("type", "the names in a namespace must be strings")
    elseif name:sub(1, 1) == "_" then
        raise("security", "a namespace cannot hold '%s': names with a leading underscore are refused", name)
    end
end

define("namespace", {}, function(args, n, named)
    local vars = new_dict(args, n, named)
    for _, name in ipairs(getmetatable(vars).__keys) do
        check_name(name)
    end
    return setmetatable({ vars = vars }, Namespace)
end, true)

---Sets an attribute of a namespace.
function M.set_namespace(ns, name, v)
    if getmetatable(ns) ~= Namespace then
        raise("type", "cannot assign attribute on non-namespace object")
    end
    check_name(name)
    ns.vars[name] = v
end

-- cycler, joiner -----------------------------------------------------------------------------------------------------

local Cycler = {}
local cycler_methods = {
    next = value.func("next", {}, function(c)
        local v = c.items[c.at]
        c.at = c.at % #c.items + 1
        return v
    end),
    reset = value.func("reset", {}, function(c)
        c.at = 1
        return value.null
    end),
}
value.register(Cycler, "cycler", function(c, name)
    if name == "current" then
        return c.items[c.at]
    end
    local f = cycler_methods[name]
    return f and setmetatable({ self = c, func = f }, value.Method)
end)

define("cycler", {}, function(args, n)
    if n == 0 then
        raise("type", "at least one item has to be provided")
    end
    return setmetatable({ items = table.move(args, 1, n, 1, {}), at = 1 }, Cycler)
end, true)

local Joiner = {}
value.register(Joiner, "joiner", nil, function(j)
    if not j.used then
        j.used = true
        return ""
    end
    return j.sep
end)

define("joiner", { "sep" }, function(sep)
    return setmetatable({ sep = sep == nil and ", " or sep }, Joiner)
end)

-- Errors and time ----------------------------------------------------------------------------------------------------

define("raise_exception", { "message" }, function(message)
    raise("raised", "%s", flat(show.str(message)))
end)

local DATE_CODES = "aAbBcdDeFgGhHIjmMnpRSTuUVwWxXyYzZ"

define("strftime_now", { "format" }, function(fmt)
    local s = flat(show.str(fmt))
    local now = state.S.now or time()
    local plain = s:gsub("%%(%-?)(.?)", function(minus, c)
        if c == "%" then
            return "%"
        elseif c == "f" then
            return "000000"
        elseif c == "s" then
            return tostring(now)
        elseif c == "P" then
            return date("%p", now):lower()
        elseif c == "k" or c == "l" then
            return (date(c == "k" and "%H" or "%I", now):gsub("^0", minus == "" and " " or ""))
        elseif c == "" or not DATE_CODES:find(c, 1, true) then
            return "%" .. minus .. c
        end
        local r = date("%" .. c, now)
        return minus == "-" and (r:gsub("^[0 ]+(.)", "%1")) or r
    end)
    return plain
end)

return M
