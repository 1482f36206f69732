-- Formatting: "%s" % x and "{}".format(x). The literal parts of a format keep their provenance, and so does a value
-- that is put in unchanged; a value that is padded, cut or converted becomes data.

local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local text = require "llmrun.template.text"
local value = require "llmrun.template.value"
local show = require "llmrun.template.show"
local raise, charge_bytes = state.raise, state.charge_bytes
local flat = rope.flat

local M = {}

local function pad(s, width, left, fill)
    width = width or 0
    local gap = width - text.len(s)
    if gap <= 0 then
        return s
    end
    charge_bytes(width)
    fill = (fill or " "):rep(gap)
    return left and s .. fill or fill .. s
end

local function number_of(v, what)
    if type(v) == "boolean" then
        return v and 1 or 0
    elseif type(v) ~= "number" then
        if value.is_undef(v) then
            value.raise_undef(v)
        end
        raise("type", "%s format: a number is required, not %s", what, value.type_name(v))
    end
    return v
end

local function to_int(v, what)
    v = number_of(v, what)
    if math.type(v) == "float" then
        local r = v >= 0 and math.floor(v) or math.ceil(v)
        v = math.tointeger(r) or raise("value", "cannot convert the float to an integer")
    end
    return v
end

-- Size limits on widths and precisions, which string.format would refuse above 99.
local function bounded(s, what)
    if s == "" or s == nil then
        return nil
    end
    local n = tonumber(s)
    if not n or n > 100000 then
        raise("value", "the %s of a format is too large", what)
    end
    return n
end

-- x with `prec` digits in style f, e or g.
local function float_text(x, style, prec)
    if x ~= x then
        return "nan"
    elseif x == math.huge then
        return "inf"
    elseif x == -math.huge then
        return "-inf"
    end
    prec = prec or 6
    local extra = 0
    if prec > 99 then
        extra, prec = style:lower() == "g" and 0 or prec - 99, 99
    end
    return string.format("%." .. prec .. style, x) .. ("0"):rep(extra)
end

local function radix_text(n, base)
    local mag = n < 0 and -n or n
    local s
    if base == 2 then
        local bits = {}
        repeat
            table.insert(bits, 1, mag & 1)
            mag = mag >> 1
        until mag == 0
        s = table.concat(bits)
    else
        s = string.format(base == 8 and "%o" or base == 16 and "%x" or "%d", mag)
    end
    return (n < 0 and "-" or "") .. s
end

-- Percent ------------------------------------------------------------------------------------------------------------

local function signed(s, flags)
    if s:sub(1, 1) ~= "-" then
        if flags:find("+", 1, true) then
            return "+" .. s
        elseif flags:find(" ", 1, true) then
            return " " .. s
        end
    end
    return s
end

local function zero_pad(s, width)
    local gap = (width or 0) - #s
    if gap <= 0 then
        return s
    end
    charge_bytes(width)
    local sign, rest = s:match "^([-+ ]?)(.*)$"
    return sign .. ("0"):rep(gap) .. rest
end

-- One conversion of a % format.
local function convert(v, flags, width, prec, c)
    local left = flags:find("-", 1, true) ~= nil
    if c == "s" or c == "r" or c == "a" then
        local s = c == "s" and show.str(v) or show.repr(v)
        if prec then
            s = value.slice(s, nil, prec)
        end
        if width and text.len(flat(s)) < width then
            s = pad(flat(s), width, left)
        end
        return s
    elseif c == "c" then
        local s = type(v) == "number" and utf8.char(to_int(v, "%c")) or flat(show.str(v))
        return pad(s, width, left)
    end
    local s
    if c == "d" or c == "i" or c == "u" then
        s = radix_text(to_int(v, "%d"), 10)
        if prec then
            s = zero_pad(s, prec + (s:find "^-" and 1 or 0))
        end
    elseif c == "x" or c == "X" or c == "o" then
        if math.type(v) == "float" then
            raise("type", "%%%s format: an integer is required, not float", c)
        end
        s = radix_text(to_int(v, "%" .. c), c == "o" and 8 or 16)
        if flags:find("#", 1, true) then
            s = s:gsub("^(-?)", "%10" .. c:lower())
        end
        s = c == "X" and s:upper() or s
    elseif c:find "[eEfFgG]" then
        s = float_text(number_of(v, "%" .. c) + 0.0, c == "F" and "f" or c, prec)
    else
        raise("value", "unsupported format character '%s'", c)
    end
    s = signed(s, flags)
    if flags:find("0", 1, true) and not left then
        return zero_pad(s, width)
    end
    return pad(s, width, left)
end

local Args = {}
Args.__index = Args

function Args:next()
    self.i = self.i + 1
    local v = self.list[self.i]
    if v == nil then
        raise("type", "not enough arguments for format string")
    end
    return v
end

-- flags, width, ".", precision, letter, position after it
local CONVERSION = "^([-+ #0]*)([%d*]*)(%.?)([%d*]*)[hlL]?(.)()"

-- Kinds of an only argument that a format need not use, since Python takes them for mappings.
local unused_is_fine = { dict = true, list = true, range = true, undef = true }

---format % args
function M.percent(format, args)
    local s = flat(format)
    local cut = rope.cutter(format)
    local is_tuple = value.kind(args) == "tuple"
    local left = setmetatable({ list = is_tuple and args or { args }, i = 0 }, Args)
    local is_dict = value.kind(args) == "dict"
    local may_stay = unused_is_fine[value.kind(args)]
    local parts, n, i = {}, 0, 1
    charge_bytes(#s)
    while true do
        local at = s:find("%", i, true)
        n = n + 1
        parts[n] = cut(i, (at or #s + 1) - 1)
        if not at then
            break
        end
        local key, from = s:match("^(%b())()", at + 1)
        local flags, width, dot, prec, c, after = s:match(CONVERSION, from or at + 1)
        if not c then
            raise("value", "incomplete format")
        end
        n = n + 1
        if c == "%" then
            parts[n] = cut(after - 1, after - 1)
        else
            width = width == "*" and tostring(to_int(left:next(), "*")) or width
            prec = prec == "*" and tostring(to_int(left:next(), "*")) or prec
            if width:sub(1, 1) == "-" then
                flags, width = flags .. "-", width:sub(2)
            end
            local v
            if key then
                if not is_dict then
                    raise("type", "format requires a mapping")
                end
                v = value.getitem(args, key:sub(2, -2))
                left.i = 1
            else
                v = left:next()
            end
            local digits = dot ~= "" and (bounded(prec, "precision") or 0) or nil
            parts[n] = convert(v, flags, bounded(width, "width"), digits, c)
        end
        i = after
    end
    if left.i < #left.list and not may_stay then
        raise("type", "not all arguments converted during string formatting")
    end
    return rope.join(parts, n)
end

-- str.format ---------------------------------------------------------------------------------------------------------

local function group_thousands(s, sep)
    local sign, int, rest = s:match "^([-+ ]?)(%d+)(.*)$"
    if not int then
        return s
    end
    int = int:reverse():gsub("(%d%d%d)", "%1" .. sep):reverse()
    if int:sub(1, 1) == sep then
        int = int:sub(2)
    end
    return sign .. int .. rest
end

local radix = { b = 2, o = 8, x = 16, X = 16, d = 10 }

local function format_number(v, kind, prec, grouping, sign, alt)
    local s
    if kind == "" and math.type(v) == "float" then
        s = prec and float_text(v, "g", prec) or show.float(v)
    elseif kind == "" or radix[kind] then
        if math.type(v) == "float" then
            raise("value", "unknown format code '%s' for a float", kind)
        end
        s = radix_text(v, radix[kind] or 10)
        if alt and kind ~= "" and kind ~= "d" then
            s = s:gsub("^(-?)", "%10" .. kind:lower())
        end
        s = kind == "X" and s:upper() or s
    elseif kind == "%" then
        s = float_text(v * 100.0, "f", prec) .. "%"
    elseif kind:find "^[eEfFgG]$" then
        s = float_text(v + 0.0, kind == "F" and "f" or kind, prec)
    elseif kind == "n" then
        s = math.type(v) == "integer" and radix_text(v, 10) or float_text(v, "g", prec)
    elseif kind == "c" and math.type(v) == "integer" then
        s = utf8.char(v)
    else
        raise("value", "unknown format code '%s'", kind)
    end
    if sign ~= "" and sign ~= "-" and s:sub(1, 1) ~= "-" then
        s = sign .. s
    end
    if grouping ~= "" then
        s = group_thousands(s, grouping)
    end
    return s
end

-- Applies a format specification to a value.
local function apply_spec(v, spec)
    if spec == "" then
        return show.str(v)
    end
    local fill, align, rest = spec:match("^(" .. text.CHAR .. ")([<>=^])(.*)$")
    if not fill then
        fill, align, rest = " ", spec:match "^([<>=^]?)(.*)$"
    end
    local sign, alt, zero, width, grouping, prec, kind = rest:match "^([-+ ]?)(#?)(0?)(%d*)([,_]?)(%.?%d*)([%a%%]?)$"
    if not sign then
        raise("value", "invalid format specification")
    end
    width = bounded(width, "width")
    prec = bounded(prec:sub(2), "precision")
    local numeric = type(v) == "number" or (type(v) == "boolean" and kind ~= "" and kind ~= "s")
    local s
    if numeric then
        s = format_number(number_of(v, "format"), kind, prec, grouping, sign, alt ~= "")
        if zero == "0" and align == "" then
            align, fill = "=", "0"
        end
    else
        if not (rope.is_str(v) or type(v) == "boolean") then
            raise("type", "unsupported format string for '%s'", value.type_name(v))
        elseif kind ~= "" and kind ~= "s" then
            raise("value", "unknown format code '%s' for a string", kind)
        end
        s = flat(show.str(v))
        if prec then
            s = value.slice(s, nil, prec)
        end
        if zero == "0" and align == "" then
            fill = "0"
        end
    end
    local gap = (width or 0) - text.len(s)
    if gap <= 0 then
        return s
    end
    charge_bytes(width * 4)
    if align == "" then
        align = numeric and ">" or "<"
    end
    if align == "^" then
        return fill:rep(gap // 2) .. s .. fill:rep(gap - gap // 2)
    elseif align == "=" then
        local sgn, body = s:match "^([-+ ]?)(.*)$"
        return sgn .. fill:rep(gap) .. body
    end
    return align == "<" and s .. fill:rep(gap) or fill:rep(gap) .. s
end

-- Follows "name.attr[key]" from the arguments.
local function field_value(field, args, n, named, auto)
    local first, path = field:match "^([^%.%[]*)(.*)$"
    local v
    if first == "" or first:find "^%d+$" then
        local index = tonumber(first)
        if (index == nil) ~= (auto.manual ~= true) and auto.used then
            raise("value", "cannot mix automatic and numbered fields")
        end
        auto.used, auto.manual = true, index ~= nil
        if not index then
            index = auto.i
            auto.i = auto.i + 1
        end
        v = index < n and args[index + 1] or nil
        if index >= n then
            raise("value", "replacement index %s out of range", tostring(index))
        end
    else
        v = named and named[first]
        if v == nil then
            raise("value", "format: no argument named '%s'", first)
        end
    end
    while path ~= "" do
        local attr, rest = path:match "^%.([^%.%[]+)(.*)$"
        if attr then
            v = value.getattr(v, attr)
        else
            attr, rest = path:match "^%[([^%]]*)%](.*)$"
            if not attr then
                raise("value", "bad field name in a format")
            end
            v = value.getitem(v, attr:find "^%d+$" and math.tointeger(tonumber(attr)) or attr)
        end
        path = rest
    end
    return v
end

-- A replacement field starting at the "{" at i: the value and the position after the field.
local function replacement(s, i, args, n, named, auto)
    local field, conv, spec, after = s:match("^{([^{}!:]*)(!?%a?):?(.-)}()", i)
    if not field then
        raise("value", "expected '}' in a format")
    end
    local v = field_value(field, args, n, named, auto)
    if spec:find("{", 1, true) then
        -- a nested field: the spec goes to the brace after the inner ones
        local inner
        inner, after = s:match("^([^{}]*{[^{}]*}[^{}]*)}()", after - #spec - 1)
        if not inner then
            raise("value", "expected '}' in a format")
        end
        spec = inner:gsub("{([^{}]*)}", function(name)
            return flat(show.str(field_value(name, args, n, named, auto)))
        end)
    end
    if conv == "!r" or conv == "!a" then
        v = show.repr(v)
    elseif conv == "!s" then
        v = show.str(v)
    elseif conv ~= "" then
        raise("value", "unknown conversion in a format")
    end
    return apply_spec(v, spec), after
end

---format.format(*args, **named)
function M.braces(format, args, n, named)
    local s = flat(format)
    local cut = rope.cutter(format)
    local auto = { i = 0 }
    local parts, k, i = {}, 0, 1
    charge_bytes(#s)
    while true do
        local at = s:find("[{}]", i)
        k = k + 1
        parts[k] = cut(i, (at or #s + 1) - 1)
        if not at then
            break
        end
        k = k + 1
        local c = s:sub(at, at)
        if s:sub(at + 1, at + 1) == c then
            parts[k] = cut(at, at)
            i = at + 2
        elseif c == "}" then
            raise("value", "single '}' encountered in format string")
        else
            parts[k], i = replacement(s, at, args, n, named, auto)
        end
    end
    return rope.join(parts, k)
end

return M
