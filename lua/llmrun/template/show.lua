-- Values as text: Python's str() and repr().

local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local text = require "llmrun.template.text"
local value = require "llmrun.template.value"
local raise, charge_bytes = state.raise, state.charge_bytes
local flat, kind = rope.flat, value.kind

local M = {}

local MAX_NEST = 100

---Digits of a float as Python's repr chooses them: the fewest that read back as the same number.
---Returns sign, digits, exponent (value = 0.DIGITS * 10^exponent).
local function digits_of(x)
    local s
    for precision = math.abs(x) < 0x1p-1022 and 0 or 14, 16 do
        s = string.format("%." .. precision .. "e", x)
        if tonumber(s) == x then
            break
        end
    end
    local sign, lead, rest, exp = s:match "^(-?)(%d)%.?(%d*)e([-+]%d+)$"
    local digits = (lead .. rest):gsub("0+$", "")
    return sign, digits == "" and "0" or digits, tonumber(exp) + 1
end

---repr() of a float.
function M.float(x)
    if x ~= x then
        return "nan"
    elseif x == math.huge then
        return "inf"
    elseif x == -math.huge then
        return "-inf"
    end
    local sign, digits, exp = digits_of(x)
    if digits == "0" then
        return (1 / x < 0) and "-0.0" or "0.0"
    end
    if exp > 16 or exp < -3 then
        local mantissa = #digits > 1 and digits:sub(1, 1) .. "." .. digits:sub(2) or digits
        return string.format("%s%se%s%02d", sign, mantissa, exp - 1 < 0 and "-" or "+", math.abs(exp - 1))
    elseif exp <= 0 then
        return sign .. "0." .. ("0"):rep(-exp) .. digits
    elseif #digits <= exp then
        return sign .. digits .. ("0"):rep(exp - #digits) .. ".0"
    end
    return sign .. digits:sub(1, exp) .. "." .. digits:sub(exp + 1)
end

local escapes = { ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t" }

local function escape_byte(c)
    return escapes[c] or string.format("\\x%02x", c:byte())
end

local function escape_char(c)
    if text.is_printable(c) then
        return c
    end
    local code = utf8.len(c) and utf8.codepoint(c)
    if not code then
        return (c:gsub(".", escape_byte))
    elseif code < 0x100 then
        return string.format("\\x%02x", code)
    end
    return string.format(code < 0x10000 and "\\u%04x" or "\\U%08x", code)
end

---repr() of a string.
function M.quote(s)
    charge_bytes(#s)
    local q = "'"
    if s:find("'", 1, true) and not s:find('"', 1, true) then
        q = '"'
    end
    s = s:gsub("[%c\x7F\\]", escape_byte)
    if q == "'" then
        s = s:gsub("'", "\\'")
    end
    if not text.is_ascii(s) then
        s = s:gsub("[\x80-\xFF][\x80-\xBF]*", escape_char)
    end
    return q .. s .. q
end

local repr

local function items_of(v, n, depth)
    local out = {}
    for i = 1, n do
        out[i] = repr(v[i], depth + 1)
    end
    return table.concat(out, ", ")
end

local function repr_dict(v, depth)
    local keys, n = value.keys(v)
    local out = {}
    for i = 1, n do
        out[i] = repr(keys[i], depth + 1) .. ": " .. repr(v[keys[i]], depth + 1)
    end
    return "{" .. table.concat(out, ", ") .. "}"
end

local by_kind = {
    str = function(v)
        return M.quote(flat(v))
    end,
    int = function(v)
        return string.format("%d", v)
    end,
    float = M.float,
    bool = function(v)
        return v and "True" or "False"
    end,
    none = function()
        return "None"
    end,
    undef = function()
        return "Undefined"
    end,
    list = function(v, depth)
        return "[" .. items_of(v, #v, depth) .. "]"
    end,
    tuple = function(v, depth)
        return "(" .. items_of(v, #v, depth) .. (#v == 1 and ",)" or ")")
    end,
    dict = repr_dict,
    range = function(v)
        if v.step ~= 1 then
            return string.format("range(%d, %d, %d)", v.start, v.stop, v.step)
        end
        return string.format("range(%d, %d)", v.start, v.stop)
    end,
    view = function(v, depth)
        return v.view .. "([" .. items_of(v, #v, depth) .. "])"
    end,
    gen = function()
        return "<generator object>"
    end,
    opaque = function(v)
        return raise("type", "a value of Lua type '%s' cannot be used in a template", type(v))
    end,
}

---repr() of a value, as a plain Lua string.
function repr(v, depth)
    depth = depth or 0
    if depth > MAX_NEST then
        raise("limit", "a value is nested too deeply")
    end
    local f = by_kind[kind(v)]
    local s = f and f(v, depth) or "<" .. kind(v) .. ">"
    charge_bytes(#s + 320)
    return s
end
M.repr = repr

---str() of a value: strings as they are (with provenance), others as data.
function M.str(v)
    local t = type(v)
    if t == "string" then
        return v
    elseif t == "table" then
        if rope.is_str(v) then
            return v
        elseif value.is_undef(v) then
            return ""
        end
    elseif v == nil then
        return ""
    end
    return repr(v)
end

return M
