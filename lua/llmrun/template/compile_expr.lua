-- Expressions: syntax tree -> closures.
--
-- Expr.value(scope, node) gives function(frame) -> value; Expr.cond(scope, node) gives function(frame) -> true or
-- false. Common shapes (comparison with a constant string, attribute of a plain table, calls with few arguments) have
-- closures of their own. A frame is described in scope.lua.

local lexer = require "llmrun.template.lexer"
local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local value = require "llmrun.template.value"
local ops = require "llmrun.template.ops"
local show = require "llmrun.template.show"
local filters = require "llmrun.template.filters"
local tests = require "llmrun.template.tests"
local S, raise, charge = state.S, state.raise, state.charge
local Rope, flat = rope.Rope, rope.flat
local kind, truth, getattr, getitem, methods = value.kind, value.truth, value.getattr, value.getitem, value.methods
local null, Undef, Func = value.null, value.Undef, value.Func
local type, getmetatable, rawget, math_type = type, getmetatable, rawget, math.type

local Expr = {}

local compile, compile_cond = {}, {}

---function(frame) -> value
function Expr.value(scope, node)
    return compile[node.k](scope, node)
end
local to_value = Expr.value

---function(frame) -> boolean
function Expr.cond(scope, node)
    local special = compile_cond[node.k]
    if special then
        return special(scope, node)
    end
    local e = to_value(scope, node)
    return function(f)
        return truth(e(f))
    end
end
local to_cond = Expr.cond

local function values(scope, nodes)
    local list = {}
    for i = 1, #nodes do
        list[i] = to_value(scope, nodes[i])
    end
    return list, #nodes
end

-- Constants and names ------------------------------------------------------------------------------------------------

local function constant(v)
    return function()
        return v
    end
end

function compile.const(_, node)
    return constant(node.v)
end

function compile.none()
    return constant(null)
end

function compile.str(_, node)
    return constant(rope.lit(node.v))
end

function compile.name(scope, node)
    return scope:getter(node.id)
end

local function sequence(mt)
    return function(scope, node)
        local items, n = values(scope, node.items)
        return function(f)
            local t = {}
            charge(6 + n)
            for i = 1, n do
                t[i] = items[i](f)
            end
            return setmetatable(t, mt)
        end
    end
end

compile.list, compile.tuple = sequence(value.List), sequence(value.Tuple)

function compile.dict(scope, node)
    local keys, n = values(scope, node.keys)
    local vals = values(scope, node.vals)
    return function(f)
        local d = value.dict({}, {}, true)
        charge(20 + 4 * n)
        for i = 1, n do
            value.dict_set(d, keys[i](f), vals[i](f))
        end
        return d
    end
end

-- Operators ----------------------------------------------------------------------------------------------------------

function compile.binary(scope, node)
    local a, b, op = node.a, node.b, ops.binary[node.op]
    if node.op == "+" and a.k == "str" and b.k == "str" then
        return constant(rope.lit(a.v .. b.v))
    end
    a, b = to_value(scope, a), to_value(scope, b)
    return function(f)
        return op(a(f), b(f))
    end
end

function compile.concat(scope, node)
    local items, n = values(scope, node.items)
    local str, concat = show.str, rope.concat
    return function(f)
        local r = str(items[1](f))
        for i = 2, n do
            r = concat(r, str(items[i](f)))
        end
        return r
    end
end

function compile.neg(scope, node)
    local a, neg = to_value(scope, node.a), ops.neg
    return function(f)
        return neg(a(f))
    end
end

function compile.pos(scope, node)
    local a, pos = to_value(scope, node.a), ops.pos
    return function(f)
        return pos(a(f))
    end
end

compile["and"] = function(scope, node)
    local a, b = to_value(scope, node.a), to_value(scope, node.b)
    return function(f)
        local v = a(f)
        if truth(v) then
            return b(f)
        end
        return v
    end
end

compile["or"] = function(scope, node)
    local a, b = to_value(scope, node.a), to_value(scope, node.b)
    return function(f)
        local v = a(f)
        if truth(v) then
            return v
        end
        return b(f)
    end
end

compile_cond["and"] = function(scope, node)
    local a, b = to_cond(scope, node.a), to_cond(scope, node.b)
    return function(f)
        return a(f) and b(f)
    end
end

compile_cond["or"] = function(scope, node)
    local a, b = to_cond(scope, node.a), to_cond(scope, node.b)
    return function(f)
        return a(f) or b(f)
    end
end

compile_cond["not"] = function(scope, node)
    local a = to_cond(scope, node.a)
    return function(f)
        return not a(f)
    end
end

compile["if"] = function(scope, node)
    local cond = to_cond(scope, node.cond)
    local a, b = Expr.in_branch(scope, function()
        return to_value(scope, node.a), node.b and to_value(scope, node.b)
    end)
    b = b or constant(value.undef "the value of an if without else")
    return function(f)
        if cond(f) then
            return a(f)
        end
        return b(f)
    end
end

-- a == 'text' and a != 'text'
local function compare_text(e, s, equal)
    return function(f)
        local v = e(f)
        return (v == s or (getmetatable(v) == Rope and flat(v) == s)) == equal
    end
end

local function compare_one(scope, a, op, b)
    if op == "==" or op == "!=" then
        if b.k == "str" then
            return compare_text(to_value(scope, a), b.v, op == "==")
        elseif a.k == "str" then
            return compare_text(to_value(scope, b), a.v, op == "==")
        end
    end
    local x, y, test = to_value(scope, a), to_value(scope, b), ops.compare[op]
    return function(f)
        return test(x(f), y(f))
    end
end

function compile_cond.compare(scope, node)
    local opers, n = node.ops, #node.ops
    if n == 1 then
        return compare_one(scope, node.a, opers[1], node.list[1])
    end
    local first, rest = to_value(scope, node.a), values(scope, node.list)
    return function(f)
        local a = first(f)
        for i = 1, n do
            local b = rest[i](f)
            if not ops.compare[opers[i]](a, b) then
                return false
            end
            a = b
        end
        return true
    end
end

compile.compare = compile_cond.compare
compile["not"] = compile_cond["not"]

-- Attributes and items -----------------------------------------------------------------------------------------------

-- The names of builtin methods, which hide a dict's keys in x.name.
local function is_method(name)
    for _, set in pairs(methods) do
        if set[name] then
            return true
        end
    end
    return false
end

-- A message's role counts as literal text if it is one of the known role names: templates put it between markers of
-- their own. Such a word can do no harm, any other one stays data.
local function literal_role(scope, get)
    local roles = scope.options.roles
    return function(f)
        local v = get(f)
        return roles[v] or v
    end
end

local function attribute(scope, node)
    local obj, name = to_value(scope, node.obj), node.name
    local undef = value.undef_attr(name)
    if is_method(name) then
        return function(f)
            return getattr(obj(f), name, undef)
        end
    end
    return function(f)
        local o = obj(f)
        if type(o) == "table" then
            local mt = getmetatable(o)
            if mt == nil or (type(mt) == "table" and rawget(mt, "__keys")) then
                local v = rawget(o, name)
                if v == nil then
                    return undef
                end
                return v
            end
        end
        return getattr(o, name, undef)
    end
end

function compile.attr(scope, node)
    local get = attribute(scope, node)
    return node.name == "role" and literal_role(scope, get) or get
end

local function constant_item(obj, key)
    return function(f)
        local o = obj(f)
        if type(o) == "table" then
            local mt = getmetatable(o)
            if mt == nil or (type(mt) == "table" and rawget(mt, "__keys")) then
                local v = rawget(o, key)
                if v ~= nil then
                    return v
                end
            end
        end
        return getitem(o, key)
    end
end

function compile.item(scope, node)
    local obj, key = to_value(scope, node.obj), node.key
    if key.k == "slice" then
        local from = key.from and to_value(scope, key.from) or constant(nil)
        local to = key.to and to_value(scope, key.to) or constant(nil)
        local step = key.step and to_value(scope, key.step) or constant(nil)
        return function(f)
            return value.slice(obj(f), from(f), to(f), step(f))
        end
    elseif key.k == "str" then
        local get = constant_item(obj, key.v)
        return key.v == "role" and literal_role(scope, get) or get
    end
    local k = to_value(scope, key)
    return function(f)
        local o, i = obj(f), k(f)
        if type(o) == "table" and math_type(i) == "integer" and i >= 0 and getmetatable(o) == nil and o[1] ~= nil then
            local v = o[i + 1]
            if v ~= nil then
                return v
            end
        end
        return getitem(o, i)
    end
end

function compile.slice(_, node)
    return lexer.fail(node.pos, "a slice is not supported here")
end

-- Calls --------------------------------------------------------------------------------------------------------------

-- function(frame) -> args, n, named for a call's arguments.
local function arguments(scope, args)
    local list, n = values(scope, args)
    local vals, names = values(scope, args.vals), args.names
    local star = args.star and to_value(scope, args.star)
    local star2 = args.star2 and to_value(scope, args.star2)
    local function named_of(f)
        local named = {}
        for i = 1, #names do
            named[i] = names[i]
            if named[names[i]] ~= nil then
                raise("type", "the keyword argument '%s' is repeated", names[i])
            end
            named[names[i]] = vals[i](f)
        end
        if star2 then
            local d = star2(f)
            if kind(d) ~= "dict" and value.length(d) > 0 then
                raise("type", "the argument after ** must be a dict")
            end
            local keys, m = value.keys(d)
            for i = 1, m do
                local key = keys[i]
                if type(key) ~= "string" or named[key] ~= nil then
                    raise("type", "bad keyword argument after **")
                end
                named[#named + 1] = key
                named[key] = d[key]
            end
        end
        return named
    end
    return function(f)
        local t = {}
        for i = 1, n do
            t[i] = list[i](f)
        end
        local count = n
        if star then
            local more, m = value.iter(star(f))
            if m > 200 then
                raise("limit", "too many arguments")
            end
            table.move(more, 1, m, count + 1, t)
            count = count + m
        end
        local named = (#names > 0 or star2) and named_of(f) or nil
        return t, count, named and #named > 0 and named or nil
    end
end
Expr.arguments = arguments

local function is_plain(args)
    return #args.names == 0 and not args.star and not args.star2
end

-- A call of obj.name(...), without making a method value on the way.
local function method_call(scope, node)
    local obj, name, pos = to_value(scope, node.fn.obj), node.fn.name, node.pos
    local args = arguments(scope, node.args)
    local n = node.args.n
    local simple = is_plain(node.args) and n <= 2
    local a = simple and n >= 1 and to_value(scope, node.args[1])
    local b = simple and n == 2 and to_value(scope, node.args[2])
    return function(f)
        local o = obj(f)
        S.pos = pos
        local set = methods[kind(o)]
        local m = set and set[name]
        if not m then
            local fn = getattr(o, name)
            local list, count, named = args(f)
            S.pos = pos
            return value.call(fn, list, count, named)
        elseif simple and not m.raw and n <= #m.params then
            charge(2)
            if n == 0 then
                return m.fn(o)
            elseif n == 1 then
                return m.fn(o, a(f))
            end
            return m.fn(o, a(f), b(f))
        end
        return value.call_func(m, o, args(f))
    end
end

function compile.call(scope, node)
    if node.fn.k == "attr" then
        return method_call(scope, node)
    end
    local fn, args, pos = to_value(scope, node.fn), arguments(scope, node.args), node.pos
    return function(f)
        local callee = fn(f)
        local list, n, named = args(f)
        charge(4)
        S.pos = pos
        return value.call(callee, list, n, named)
    end
end

-- The closures of a filter's or test's arguments in the order of its parameters; unset ones are nil up to the count.
local function bind_static(scope, func, node)
    local args = node.args
    if args.star or args.star2 then
        lexer.fail(node.pos, "* and ** are not supported in the arguments of '%s'", node.name)
    end
    local list, n = values(scope, args)
    for i = 1, #args.names do
        local at
        for j = 1, #func.params do
            if func.params[j] == args.names[i] then
                at = j
            end
        end
        if not at or list[at] then
            lexer.fail(node.pos, "'%s' takes no such argument: %s", node.name, args.names[i])
        end
        list[at] = to_value(scope, args.vals[i])
        n = math.max(n, at)
    end
    if n > #func.params then
        lexer.fail(node.pos, "'%s' takes at most %d arguments", node.name, #func.params)
    end
    for i = 1, n do
        list[i] = list[i] or constant(nil)
    end
    return list, n
end

-- function(frame) -> fn(obj, arguments...)
local function apply_static(scope, func, node, obj)
    local fn, pos = func.fn, node.pos
    if func.raw then
        local args = arguments(scope, node.args)
        return function(f)
            local v = obj(f)
            local list, n, named = args(f)
            S.pos = pos
            return fn(list, n, named, v)
        end
    end
    local list, n = bind_static(scope, func, node)
    local a, b = list[1], list[2]
    if n == 0 then
        return function(f)
            local v = obj(f)
            S.pos = pos
            return fn(v)
        end
    elseif n == 1 then
        return function(f)
            local v, x = obj(f), a(f)
            S.pos = pos
            return fn(v, x)
        end
    elseif n == 2 then
        return function(f)
            local v, x, y = obj(f), a(f), b(f)
            S.pos = pos
            return fn(v, x, y)
        end
    end
    return function(f)
        local v, args = obj(f), {}
        for i = 1, n do
            args[i] = list[i](f)
        end
        S.pos = pos
        return fn(v, table.unpack(args, 1, n))
    end
end

-- The Func of a filter or test node. An unknown one is an error at once, but in a branch that may never be taken only
-- when it is reached: then this returns nil and the closure that raises.
local function find(scope, set, node, what)
    local func = set[node.name]
    if getmetatable(func) == Func then
        return func
    end
    local msg = ("there is no %s named '%s'"):format(what, node.name)
    if not scope.options.branches then
        lexer.fail(node.pos, "%s", msg)
    end
    return nil, function()
        S.pos = node.pos
        return raise("value", "%s", msg)
    end
end

---Runs fn, which compiles a branch that may never be taken.
function Expr.in_branch(scope, fn)
    local options = scope.options
    local before = options.branches
    options.branches = true
    local a, b = fn()
    options.branches = before
    return a, b
end

---The closure of a filter node over obj: function(frame) -> value.
function Expr.filter(scope, node, obj)
    local func, missing = find(scope, filters, node, "filter")
    return missing or apply_static(scope, func, node, obj)
end

function compile.filter(scope, node)
    return Expr.filter(scope, node, to_value(scope, node.obj))
end

local quick_tests = {
    defined = function(e)
        return function(f)
            return getmetatable(e(f)) ~= Undef
        end
    end,
    none = function(e)
        return function(f)
            return e(f) == null
        end
    end,
    string = function(e)
        return function(f)
            local v = e(f)
            return type(v) == "string" or getmetatable(v) == Rope
        end
    end,
}

function compile.test(scope, node)
    local func, missing = find(scope, tests, node, "test")
    if missing then
        return missing
    end
    local obj = to_value(scope, node.obj)
    if node.args.n == 0 and quick_tests[node.name] and #node.args.names == 0 then
        return quick_tests[node.name](obj)
    end
    if #func.params > 0 and node.args.n == 0 and #node.args.names == 0 then
        lexer.fail(node.pos, "the test '%s' needs an argument", node.name)
    end
    return apply_static(scope, func, node, obj)
end
compile_cond.test = compile.test

return Expr
