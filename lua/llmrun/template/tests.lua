-- Tests: what may follow "is", as name -> Func whose fn(value, ...) gives a boolean.

local rope = require "llmrun.template.rope"
local text = require "llmrun.template.text"
local value = require "llmrun.template.value"
local ops = require "llmrun.template.ops"
local show = require "llmrun.template.show"
local kind, is_undef = value.kind, value.is_undef

local M = {}

local function define(names, params, fn)
    for name in names:gmatch "%S+" do
        M[name] = value.func(name, params, fn)
    end
end

local function of_kind(names, ...)
    local set = {}
    for _, k in ipairs { ... } do
        set[k] = true
    end
    define(names, {}, function(v)
        return set[kind(v)] == true
    end)
end

define("defined", {}, function(v)
    return not is_undef(v)
end)
define("undefined", {}, is_undef)
define("none", {}, function(v)
    return v == value.null
end)
define("true", {}, function(v)
    return v == true
end)
define("false", {}, function(v)
    return v == false
end)
define("string", {}, rope.is_str)
of_kind("boolean", "bool")
of_kind("integer", "int")
of_kind("float", "float")
of_kind("number", "int", "float", "bool")
of_kind("mapping", "dict")
of_kind("sequence", "str", "list", "tuple", "range", "dict", "undef")
of_kind("iterable", "str", "list", "tuple", "range", "dict", "undef", "gen", "view", "loop")
define("callable", {}, function(v)
    return is_undef(v) or value.is_callable(v)
end)
define("escaped", {}, function()
    return false
end)

define("sameas", { "other" }, function(a, b)
    local k = kind(a)
    if k ~= kind(b) then
        return false
    end
    if k == "str" then
        return rope.flat(a) == rope.flat(b)
    end
    return rawequal(a, b)
end)

define("odd", {}, function(v)
    return ops.mod(v, 2) == 1
end)
define("even", {}, function(v)
    return ops.mod(v, 2) == 0
end)
define("divisibleby", { "num" }, function(v, n)
    return ops.mod(v, n) == 0
end)

define("lower", {}, function(v)
    return text.is_case(rope.flat(show.str(v)), "lower")
end)
define("upper", {}, function(v)
    return text.is_case(rope.flat(show.str(v)), "upper")
end)

define("eq equalto ==", { "other" }, ops.compare["=="])
define("ne !=", { "other" }, ops.compare["!="])
define("lt lessthan <", { "other" }, ops.compare["<"])
define("gt greaterthan >", { "other" }, ops.compare[">"])
define("le <=", { "other" }, ops.compare["<="])
define("ge >=", { "other" }, ops.compare[">="])
define("in", { "seq" }, ops.compare["in"])

-- "x is filter": whether a filter or test of that name exists
define("filter", {}, function(v)
    return rope.is_str(v) and require "llmrun.template.filters"[rope.flat(v)] ~= nil
end)
define("test", {}, function(v)
    return rope.is_str(v) and M[rope.flat(v)] ~= nil
end)

return M
