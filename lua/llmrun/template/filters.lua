-- Filters on strings and single values, as name -> Func whose fn(value, ...) gives the result; those on sequences are
-- in filters_seq.lua, which adds to the same table.

local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local text = require "llmrun.template.text"
local value = require "llmrun.template.value"
local ops = require "llmrun.template.ops"
local show = require "llmrun.template.show"
local json = require "llmrun.template.json"
local format = require "llmrun.template.format"
local methods = require "llmrun.template.methods"
local raise, charge, charge_bytes = state.raise, state.charge, state.charge_bytes
local flat, like, str = rope.flat, rope.like, show.str
local null = value.null

local M = {}

local function define(names, params, fn, raw)
    for name in names:gmatch "%S+" do
        M[name] = value.func(name, params, fn, raw)
    end
end

local function defined(v)
    return v ~= nil and v ~= null
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

for _, name in ipairs { "upper", "lower", "capitalize" } do
    define(name, {}, function(v)
        v = str(v)
        return like(v, text[name](flat(v)))
    end)
end

-- Words begin after blanks and opening brackets, unlike str.title.
define("title", {}, function(v)
    v = str(v)
    local s = flat(v)
    local out = s:gsub("[^%-%s({%[<]+", text.capitalize)
    return like(v, out)
end)

define("trim", { "chars" }, function(v, chars)
    return methods.strip(str(v), true, true, chars)
end)

define("replace", { "old", "new", "count" }, function(v, old, new, count)
    return methods.replace(str(v), str(old), str(new), count)
end)

define("center", { "width" }, function(v, width)
    return methods.pad(str(v), width == nil and 80 or width, nil, "center")
end)

define("string safe", {}, str)

local entities = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ["'"] = "&#39;", ['"'] = "&#34;" }

define("escape e forceescape", {}, function(v)
    v = str(v)
    local s = flat(v)
    local cut, parts, n, i = rope.cutter(v), {}, 0, 1
    for at, c in s:gmatch "()([&<>'\"])" do
        parts[n + 1] = cut(i, at - 1)
        parts[n + 2] = like(cut(at, at), entities[c])
        n = n + 2
        i = at + 1
    end
    if n == 0 then
        return v
    end
    parts[n + 1] = cut(i, #s)
    return rope.join(parts, n + 1)
end)

define("indent", { "width", "first", "blank" }, function(v, width, first, blank)
    if not rope.is_str(v) then
        raise("type", "indent: expected a string, not '%s'", value.type_name(v))
    end
    local pad
    if rope.is_str(width) then
        pad = width
    else
        local n = int_arg(width, 4, "indent")
        charge_bytes(math.max(n, 0))
        pad = (" "):rep(n)
    end
    local lines, n = methods.lines(rope.concat(v, "\n"))
    local parts, k = {}, 0
    if first ~= nil and value.truth(first) then
        k = 1
        parts[1] = pad
    end
    for i = 1, n do
        if i > 1 then
            k = k + 1
            parts[k] = "\n"
            if rope.size(lines[i]) > 0 or (blank ~= nil and value.truth(blank)) then
                k = k + 1
                parts[k] = pad
            end
        end
        k = k + 1
        parts[k] = lines[i]
    end
    return rope.join(parts, k)
end)

define("truncate", { "length", "killwords", "end", "leeway" }, function(v, length, killwords, tail, leeway)
    length, leeway = int_arg(length, 255, "truncate"), int_arg(leeway, 5, "truncate")
    tail = tail == nil and "..." or str(tail)
    local room = length - text.len(flat(tail))
    if room < 0 or leeway < 0 then
        raise("value", "truncate: the length is too short")
    end
    if value.length(v) <= length + leeway then
        return v
    elseif not rope.is_str(v) then
        raise("type", "truncate: expected a string, not '%s'", value.type_name(v))
    end
    local head = value.slice(v, nil, room)
    if killwords == nil or not value.truth(killwords) then
        local s = flat(head)
        local at = s:reverse():find(" ", 1, true)
        if at then
            head = rope.sub(head, 1, #s - at)
        end
    end
    return rope.concat(head, tail)
end)

define("wordcount", {}, function(v)
    local s = flat(str(v))
    charge(1 + #s // 4)
    local n, inside = 0, false
    for c in s:gmatch(text.CHAR) do
        local word = c:find "^[%w_]" or (#c > 1 and text.is_alpha(c))
        if word and not inside then
            n = n + 1
        end
        inside = word
    end
    return n
end)

local function percent_encode(s, safe)
    charge_bytes(#s * 3)
    return (s:gsub("[^%w%-._~" .. safe .. "]", function(c)
        return string.format("%%%02X", c:byte())
    end))
end

define("urlencode", {}, function(v)
    if rope.is_str(v) then
        return percent_encode(flat(v), "/")
    end
    local k = value.kind(v)
    if k == "int" or k == "float" or k == "bool" or k == "none" then
        return percent_encode(flat(str(v)), "/")
    end
    local pairs_of, n
    if k == "dict" then
        pairs_of, n = methods.items(v)
    else
        pairs_of, n = value.iter(v)
    end
    local out = {}
    for i = 1, n do
        local pair, m = value.iter(pairs_of[i])
        if m ~= 2 then
            raise("value", "urlencode: expected pairs")
        end
        local key, val = percent_encode(flat(str(pair[1])), " "), percent_encode(flat(str(pair[2])), " ")
        out[i] = key:gsub(" ", "+") .. "=" .. val:gsub(" ", "+")
    end
    return table.concat(out, "&")
end)

define("format", {}, function(args, n, named, v)
    local all = value.tuple(table.move(args, 1, n, 1, {}))
    if named then
        if n > 0 then
            raise("type", "format takes positional or named arguments, not both")
        end
        local d = value.dict({}, {}, true)
        for i = 1, #named do
            value.dict_set(d, named[i], named[named[i]])
        end
        all = d
    end
    return format.percent(str(v), all)
end, true)

define("tojson", { "ensure_ascii", "indent", "separators", "sort_keys" }, function(v, ascii, indent, separators, sort)
    local comma, colon
    if defined(separators) then
        local pair, n = value.iter(separators)
        if n ~= 2 then
            raise("value", "tojson: separators must be two strings")
        end
        comma, colon = flat(str(pair[1])), flat(str(pair[2]))
    end
    if not defined(indent) then
        indent = nil
    elseif rope.is_str(indent) then
        indent = flat(indent)
    else
        indent = int_arg(indent, nil, "tojson")
    end
    return json.encode(
        v, ascii ~= nil and value.truth(ascii), indent, comma, colon, sort ~= nil and value.truth(sort)
    )
end)

-- Beyond Jinja: some models' templates expect it of their own runner.
define("from_json", {}, function(v)
    if not rope.is_str(v) then
        raise("type", "from_json: expected a string, not '%s'", value.type_name(v))
    end
    local s = flat(v)
    charge_bytes(#s)
    charge(#s)
    local r, err = json.decode(s)
    if r == nil then
        raise("value", "from_json: %s", err)
    end
    return r
end)

-- Numbers ------------------------------------------------------------------------------------------------------------

local function trimmed(v)
    local s = flat(v)
    local i, j = text.strip_span(s, true, true)
    return s:sub(i, j)
end

-- Python's float(text), or nil.
local function parse_float(s)
    local low = s:lower()
    local sign, word = low:match "^([-+]?)(%a+)$"
    if word == "inf" or word == "infinity" then
        return sign == "-" and -math.huge or math.huge
    elseif word == "nan" then
        return 0 / 0
    end
    if s:find "__" or s:find "^_" or s:find "_$" then
        return nil
    end
    s = s:gsub("(%d)_(%d)", "%1%2")
    -- part by part: a pattern of all would try each way to share the digits
    local at = s:match("^[eE]?[-+]?%d*()", s:match("^%.?%d*()", s:match "^[-+]?%d*()"))
    if at <= #s or not s:find "%d" then
        return nil
    end
    local n = tonumber((s:gsub("^%+", "")))
    return n and n + 0.0
end

-- Python's int(text, base), or nil.
local function parse_int(s, base)
    local sign, body = s:match "^([-+]?)(.*)$"
    local prefix = body:sub(1, 2):lower()
    local prefix_base = ({ ["0x"] = 16, ["0o"] = 8, ["0b"] = 2 })[prefix]
    if prefix_base and (base == prefix_base or base == 0) then
        body, base = body:sub(3):gsub("^_", ""), prefix_base
    elseif base == 0 then
        base = 10
    end
    if body:find "__" or body:find "^_" or body:find "_$" then
        return nil
    end
    body = body:gsub("_", "")
    if body == "" or not body:find "^%w+$" then
        return nil
    end
    local n
    if base == 10 then
        n = body:find "^%d+$" and math.tointeger(tonumber(body))
        if n and math.type(tonumber(body)) ~= "integer" then
            n = nil
        end
    else
        n = tonumber(body, base)
    end
    if not n then
        if base == 10 and body:find "^%d+$" then
            raise("value", "an integer leaves the range of 64 bits")
        end
        return nil
    end
    return sign == "-" and -n or n
end

local function truncated(x, default)
    if x ~= x or x == math.huge or x == -math.huge then
        return default
    end
    local r = x >= 0 and math.floor(x) or math.ceil(x)
    return math.tointeger(r) or raise("value", "an integer leaves the range of 64 bits")
end

define("int", { "default", "base" }, function(v, default, base)
    default = default == nil and 0 or default
    if type(v) == "boolean" then
        return v and 1 or 0
    elseif type(v) == "number" then
        return math.type(v) == "integer" and v or truncated(v, default)
    elseif rope.is_str(v) then
        base = int_arg(base, 10, "int")
        if base < 0 or base > 36 or base == 1 then
            return default
        end
        local s = trimmed(v)
        local n = parse_int(s, base)
        if n then
            return n
        end
        local x = parse_float(s)
        return x and truncated(x, default) or default
    elseif value.is_undef(v) then
        value.raise_undef(v)
    end
    return default
end)

define("float", { "default" }, function(v, default)
    default = default == nil and 0.0 or default
    local x = ops.num(v)
    if x then
        return x + 0.0
    elseif rope.is_str(v) then
        return parse_float(trimmed(v)) or default
    elseif value.is_undef(v) then
        value.raise_undef(v)
    end
    return default
end)

define("abs", {}, function(v)
    local x = ops.num(v)
    if not x then
        if value.is_undef(v) then
            value.raise_undef(v)
        end
        raise("type", "bad operand type for abs(): '%s'", value.type_name(v))
    end
    if x == math.mininteger then
        raise("value", "an integer leaves the range of 64 bits")
    end
    return math.abs(x)
end)

-- Rounds to `precision` decimals, half to even on the exact value.
local function round_common(x, precision)
    if math.type(x) == "integer" then
        if precision >= 0 then
            return x
        end
        local unit = precision > -19 and 10 ^ -precision
        if not unit then
            return 0
        end
        unit = math.tointeger(unit)
        local q, r = x // unit, x % unit
        if 2 * r > unit or (2 * r == unit and q % 2 == 1) then
            q = q + 1
        end
        return q * unit
    elseif x ~= x or x == math.huge or x == -math.huge then
        return x
    elseif precision < 0 then
        local unit = 10.0 ^ -precision
        return tonumber(string.format("%.0f.0", x / unit)) * unit
    end
    return tonumber(string.format("%." .. math.min(precision, 99) .. "f", x) .. (precision == 0 and ".0" or ""))
end

define("round", { "precision", "method" }, function(v, precision, method)
    local x = ops.num(v)
    if not x then
        if value.is_undef(v) then
            value.raise_undef(v)
        end
        raise("type", "round: expected a number, not '%s'", value.type_name(v))
    end
    precision = int_arg(precision, 0, "round")
    method = method == nil and "common" or flat(str(method))
    if method == "common" then
        return round_common(x, precision)
    elseif method ~= "ceil" and method ~= "floor" then
        raise("value", "round: method must be common, ceil or floor")
    end
    local unit = 10.0 ^ precision
    local r = math[method](x * unit) / unit
    return r + 0.0
end)

-- Any value ----------------------------------------------------------------------------------------------------------

define("default d", { "default_value", "boolean" }, function(v, default, boolean)
    if value.is_undef(v) or (boolean ~= nil and value.truth(boolean) and not value.truth(v)) then
        if default == nil then
            return ""
        end
        return default
    end
    return v
end)

define("attr", { "name" }, function(v, name)
    name = flat(str(name))
    if value.kind(v) == "dict" then
        return value.method(v, name) and value.getattr(v, name) or value.undef_attr(name)
    elseif value.is_undef(v) then
        return value.undef_attr(name)
    end
    return value.getattr(v, name)
end)

---The filter or nil.
package.loaded["llmrun.template.filters"] = M
require "llmrun.template.filters_seq"

return M
