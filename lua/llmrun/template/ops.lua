-- Operators: arithmetic, comparison and membership as Python has them.

local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local text = require "llmrun.template.text"
local value = require "llmrun.template.value"
local raise, charge = state.raise, state.charge
local is_str, flat, Rope = rope.is_str, rope.flat, rope.Rope
local kind = value.kind
local math_type, type, getmetatable = math.type, type, getmetatable

local M = {}

local MAX_NEST = 100

local function bad_operands(op, a, b)
    if value.is_undef(a) then
        value.raise_undef(a)
    elseif value.is_undef(b) then
        value.raise_undef(b)
    end
    raise("type", "unsupported operand types for %s: '%s' and '%s'", op, value.type_name(a), value.type_name(b))
end

-- A number for arithmetic: numbers themselves, booleans as 0 and 1, else nil.
local function num(v)
    if type(v) == "number" then
        return v
    elseif v == true then
        return 1
    elseif v == false then
        return 0
    end
end
M.num = num

local function overflow()
    raise("value", "an integer leaves the range of 64 bits")
end

local function joined(a, b, mt)
    local n, m = #a, #b
    charge(1 + n + m)
    return setmetatable(table.move(b, 1, m, n + 1, table.move(a, 1, n, 1, {})), mt)
end

function M.add(a, b)
    local x, y = num(a), num(b)
    if x and y then
        local r = x + y
        if math_type(r) == "integer" and ((r ~ x) & (r ~ y)) < 0 then
            overflow()
        end
        return r
    elseif is_str(a) and is_str(b) then
        return rope.concat(a, b)
    end
    local k = kind(a)
    if k == kind(b) then
        if k == "list" then
            return joined(a, b, value.List)
        elseif k == "tuple" then
            return joined(a, b, value.Tuple)
        end
    end
    return bad_operands("+", a, b)
end

function M.sub(a, b)
    local x, y = num(a), num(b)
    if not (x and y) then
        return bad_operands("-", a, b)
    end
    local r = x - y
    if math_type(r) == "integer" and ((x ~ y) & (r ~ x)) < 0 then
        overflow()
    end
    return r
end

local function mul_int(x, y)
    local r = x * y
    if x ~= 0 and y ~= 0 then
        local f = (x + 0.0) * (y + 0.0)
        if math.abs(f) >= 9.2e18 and (f < -0x1p63 or f >= 0x1p63 or r // y ~= x or r % y ~= 0) then
            overflow()
        end
    end
    return r
end

local function repeated(v, n, k)
    if math_type(n) ~= "integer" then
        return nil
    end
    if k == "str" then
        return rope.rep(v, n)
    end
    local size = #v
    if n <= 0 or size == 0 then
        return setmetatable({}, getmetatable(v) == value.Tuple and value.Tuple or value.List)
    elseif n > 10000000 or size * n > 10000000 then
        raise("limit", "a repeated list is too long")
    end
    charge(size * n)
    local out = {}
    for i = 0, n - 1 do
        table.move(v, 1, size, i * size + 1, out)
    end
    return setmetatable(out, k == "tuple" and value.Tuple or value.List)
end

local repeats = { str = true, list = true, tuple = true }

function M.mul(a, b)
    local x, y = num(a), num(b)
    if x and y then
        if math_type(x) == "integer" and math_type(y) == "integer" then
            return mul_int(x, y)
        end
        return x * y
    end
    local r
    if y and repeats[kind(a)] then
        r = repeated(a, y, kind(a))
    elseif x and repeats[kind(b)] then
        r = repeated(b, x, kind(b))
    end
    return r or bad_operands("*", a, b)
end

local function numbers(op, a, b)
    local x, y = num(a), num(b)
    if not (x and y) then
        bad_operands(op, a, b)
    end
    if y == 0 and op ~= "**" then
        raise("value", "division by zero")
    end
    return x, y
end

function M.div(a, b)
    local x, y = numbers("/", a, b)
    return x / y
end

function M.floordiv(a, b)
    local x, y = numbers("//", a, b)
    if x == math.mininteger and y == -1 and math_type(x) == "integer" then
        overflow()
    end
    return x // y
end

function M.mod(a, b)
    if is_str(a) then
        return require "llmrun.template.format".percent(a, b)
    end
    local x, y = numbers("%", a, b)
    local r = x % y
    if r == 0 and math_type(r) == "float" then
        r = y < 0 and -0.0 or 0.0
    end
    return r
end

function M.pow(a, b)
    local x, y = numbers("**", a, b)
    if math_type(x) == "integer" and math_type(y) == "integer" and y >= 0 then
        local r = 1
        while y > 0 do
            if y & 1 == 1 then
                r = mul_int(r, x)
            end
            y = y >> 1
            if y > 0 then
                x = mul_int(x, x)
            end
        end
        return r
    end
    if x == 0 and y < 0 then
        raise("value", "0.0 cannot be raised to a negative power")
    elseif x < 0 and y ~= math.floor(y) then
        raise("value", "a negative number cannot be raised to a fractional power")
    end
    local r = (x + 0.0) ^ y
    if (r == math.huge or r == -math.huge) and math.abs(x) ~= math.huge and math.abs(y) ~= math.huge then
        raise("value", "the result of ** is too large")
    end
    return r
end

function M.neg(a)
    local x = num(a)
    if not x then
        if value.is_undef(a) then
            value.raise_undef(a)
        end
        raise("type", "bad operand type for unary -: '%s'", value.type_name(a))
    end
    if x == math.mininteger then
        overflow()
    end
    return -x
end

function M.pos(a)
    local x = num(a)
    if not x then
        if value.is_undef(a) then
            value.raise_undef(a)
        end
        raise("type", "bad operand type for unary +: '%s'", value.type_name(a))
    end
    return x
end

-- Comparison ---------------------------------------------------------------------------------------------------------

local eq

local function eq_items(a, b, depth)
    local n = #a
    if n ~= #b then
        return false
    end
    charge(8 + 3 * n)
    for i = 1, n do
        if not eq(a[i], b[i], depth) then
            return false
        end
    end
    return true
end

local function eq_dict(a, b, depth)
    local n = 0
    for k, v in next, a do
        local w = rawget(b, k)
        if w == nil or not eq(v, w, depth) then
            return false
        end
        n = n + 1
    end
    for _ in next, b do
        n = n - 1
    end
    charge(1 + math.abs(n))
    return n == 0
end

---a == b
function eq(a, b, depth)
    local ta, tb = type(a), type(b)
    if ta ~= "table" and tb ~= "table" then
        if ta == tb then
            return a == b
        end
        local x, y = num(a), num(b)
        return x ~= nil and x == y
    end
    if is_str(a) then
        return is_str(b) and flat(a) == flat(b)
    end
    if a == b then
        return true
    end
    depth = (depth or 0) + 1
    if depth > MAX_NEST then
        raise("limit", "a value is nested too deeply")
    end
    local k = kind(a)
    if k ~= kind(b) then
        return false
    elseif k == "list" or k == "tuple" or k == "range" then
        return eq_items(a, b, depth)
    elseif k == "dict" then
        return eq_dict(a, b, depth)
    end
    return k == "undef"
end
M.eq = eq

local lt

local function lt_items(a, b, depth)
    local n, m = #a, #b
    for i = 1, math.min(n, m) do
        charge(1)
        if not eq(a[i], b[i], depth) then
            return lt(a[i], b[i], depth)
        end
    end
    return n < m
end

---a < b; op is the operator as written, for messages.
function lt(a, b, depth, op)
    local x, y = num(a), num(b)
    if x and y then
        return x < y
    elseif is_str(a) and is_str(b) then
        return flat(a) < flat(b)
    end
    depth = (depth or 0) + 1
    if depth > MAX_NEST then
        raise("limit", "a value is nested too deeply")
    end
    local k = kind(a)
    if k == kind(b) and (k == "list" or k == "tuple") then
        return lt_items(a, b, depth)
    end
    if value.is_undef(a) then
        value.raise_undef(a)
    elseif value.is_undef(b) then
        value.raise_undef(b)
    end
    return raise(
        "type", "'%s' not supported between '%s' and '%s'", op or "<", value.type_name(a), value.type_name(b)
    )
end
M.lt = lt

local function le(a, b, op)
    local x, y = num(a), num(b)
    if x and y then
        return x <= y
    end
    return not lt(b, a, 0, op)
end

---v in container
local function contains(container, v)
    local k = kind(container)
    if k == "str" then
        if not is_str(v) then
            raise("type", "'in <string>' requires a string, not '%s'", value.type_name(v))
        end
        local s, part = flat(container), flat(v)
        text.charge_search(s, part)
        return s:find(part, 1, true) ~= nil
    elseif k == "dict" then
        local key = value.hash_key(v)
        return key ~= nil and rawget(container, key) ~= nil
    elseif k == "undef" then
        return false
    end
    local items, n = value.iter(container)
    charge(n)
    for i = 1, n do
        if eq(items[i], v) then
            return true
        end
    end
    return false
end
M.contains = contains

---Comparison operators by name: function(a, b) -> boolean
M.compare = {
    ["=="] = function(a, b)
        return eq(a, b)
    end,
    ["!="] = function(a, b)
        return not eq(a, b)
    end,
    ["<"] = function(a, b)
        return lt(a, b, 0, "<")
    end,
    [">"] = function(a, b)
        return lt(b, a, 0, ">")
    end,
    ["<="] = function(a, b)
        return le(a, b, "<=")
    end,
    [">="] = function(a, b)
        return le(b, a, ">=")
    end,
    ["in"] = function(a, b)
        return contains(b, a)
    end,
    ["not in"] = function(a, b)
        return not contains(b, a)
    end,
}

M.binary = {
    ["+"] = M.add, ["-"] = M.sub, ["*"] = M.mul, ["/"] = M.div, ["//"] = M.floordiv, ["%"] = M.mod, ["**"] = M.pow,
}

---True if v is a string equal to the plain Lua string s. The fast path of comparisons with constants.
function M.is_text(v, s)
    return v == s or (getmetatable(v) == Rope and flat(v) == s)
end

return M
