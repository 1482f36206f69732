--- Decimal numbers between bounds, as regular expressions.
---
--- A bound is a Lua number; it means the decimal that Lua writes for it (0.1 is one tenth). Numbers with bounds have no
--- exponent, and no more than 15 digits if they have a fraction. What is made are patterns over digits; the two bounds
--- and multiples are joined as sets.

local core = require "llmrun.core"
local refuse = require "llmrun.grammar.refuse"

local M = {}

local INTEGER = "-?(?:0|[1-9][0-9]*)"
-- Not more digits than a float keeps apart: what reads the text may compare floats.
local SHORT = "(?:0\\.[0-9]{1,15}|[1-9][0-9]{0,8}\\.[0-9]{1,6})"
local DECIMAL = "-?(?:0|[1-9][0-9]{0,199}|" .. SHORT .. ")"
local FRACTION = INTEGER .. "\\.[0-9]*[1-9][0-9]*"
--- JSON numbers whose value a float can hold: at most 200 digits before the point, exponents of two digits.
M.any = "-?(?:0|[1-9][0-9]{0,199})(?:\\.[0-9]{1,200})?(?:[eE][+-]?[0-9]{1,2})?"
M.any_integer = "(?:0|-?[1-9][0-9]*)"

--- { negative, int, frac }: digits before the point without leading zeros, behind it without trailing ones.
function M.decimal(v)
    local s = math.type(v) == "integer" and ("%d"):format(v) or nil
    for digits = 15, 17 do
        if s then break end
        local t = ("%%.%dg"):format(digits):format(v)
        if tonumber(t) == v then s = t end
    end
    local sign, int, frac, exp = s:match "^(-?)(%d+)%.?(%d*)e?([+-]?%d*)$"
    if not int then return nil end
    exp = tonumber(exp) or 0
    if exp > 0 then
        frac = frac .. ("0"):rep(math.max(exp - #frac, 0))
        int, frac = int .. frac:sub(1, exp), frac:sub(exp + 1)
    elseif exp < 0 then
        int = ("0"):rep(math.max(-exp - #int + 1, 0)) .. int
        int, frac = int:sub(1, exp - 1), int:sub(exp) .. frac
    end
    int = int:gsub("^0+", "")
    frac = frac:gsub("0+$", "")
    return { negative = sign == "-" and (int ~= "" or frac ~= ""), int = int == "" and "0" or int, frac = frac }
end

-- Digits from a to z, as a class.
local function class(a, z) return a == z and a or ("[%s-%s]"):format(a, z) end
local function digit(c, by) return string.char(c:byte() + by) end

local function any(n) return n == 0 and "" or ("[0-9]{%d}"):format(n) end

-- Digit strings of s's length that are larger (up) or smaller, not equal; list of alternatives.
local function beyond(s, up)
    local out = {}
    for i = 1, #s do
        local c = s:sub(i, i)
        local first = i == 1 and #s > 1 and "1" or "0"
        if up and c < "9" then
            out[#out + 1] = s:sub(1, i - 1) .. class(digit(c, 1), "9") .. any(#s - i)
        elseif not up and c > first then
            out[#out + 1] = s:sub(1, i - 1) .. class(first, digit(c, -1)) .. any(#s - i)
        end
    end
    return out
end

-- Whole numbers without sign above (up) or below s.
local function integers(s, up)
    local out = beyond(s, up)
    if up then
        out[#out + 1] = ("[1-9][0-9]{%d,}"):format(#s)
    elseif #s > 1 then
        out[#out + 1] = "0"
        out[#out + 1] = ("[1-9][0-9]{0,%d}"):format(#s - 2)
    end
    return out
end

-- Fractions (with the point, or nothing) above or below 0.f; open: not equal.
local function fractions(f, up, open)
    local out = {}
    for i = 1, #f do
        local c = f:sub(i, i)
        if up and c < "9" then
            out[#out + 1] = "\\." .. f:sub(1, i - 1) .. class(digit(c, 1), "9") .. "[0-9]*"
        elseif not up and c > "0" then
            out[#out + 1] = "\\." .. f:sub(1, i - 1) .. class("0", digit(c, -1)) .. "[0-9]*"
        end
        if not up and i < #f then out[#out + 1] = "\\." .. f:sub(1, i) end -- a shorter one is smaller
    end
    if not up and f ~= "" then out[#out + 1] = "" end
    if up then -- more digits behind f
        local head = "\\." .. f
        if open then
            out[#out + 1] = head .. "[0-9]*[1-9][0-9]*"
        elseif f == "" then
            out[#out + 1] = "(?:\\.[0-9]+)?"
        else
            out[#out + 1] = head .. "[0-9]*"
        end
    elseif not open then -- equal: zeros behind f
        out[#out + 1] = f == "" and "(?:\\.0+)?" or "\\." .. f .. "0*"
    end
    return out
end

-- Numbers without sign on one side of d, as a pattern; nil if there are none.
local function unsigned(d, up, open)
    local out = {}
    local whole = integers(d.int, up)
    if #whole > 0 then out[1] = "(?:" .. table.concat(whole, "|") .. ")(?:\\.[0-9]+)?" end
    local frac = fractions(d.frac, up, open)
    if #frac > 0 then out[#out + 1] = d.int .. "(?:" .. table.concat(frac, "|") .. ")" end
    return #out > 0 and table.concat(out, "|") or nil
end

local POSITIVE = "(?:0|[1-9][0-9]*)(?:\\.[0-9]+)?" -- and zero
local NEGATIVE = "-(?:0\\.[0-9]*[1-9][0-9]*|[1-9][0-9]*(?:\\.[0-9]+)?)"

--- Pattern of the decimals that are >= v (up) or <= v, or > and < (open); nil if there are none. Zero has no sign.
function M.side(v, up, open)
    local d = M.decimal(v)
    if not d then return nil end
    local beyond_zero = d.negative == up -- zero lies on the side that is meant, or is the bound of v <= 0
    local part = unsigned(d, not beyond_zero, open)
    local out = {}
    if beyond_zero then out[1] = up and POSITIVE or NEGATIVE end
    if part then out[#out + 1] = (d.negative and "-" or "") .. "(?:" .. part .. ")" end
    return #out > 0 and table.concat(out, "|") or nil
end

-- v as p / 10^k with whole p; nil if it is not positive.
local function fraction(v)
    local d = M.decimal(v)
    if not d or d.negative or (d.int == "0" and d.frac == "") then return nil end
    return (d.int .. d.frac):gsub("^0+", ""), #d.frac
end

--- The numbers that c allows: { low, low_open, high, high_open, multiples = list }. kind: "integer", "number", or
--- "fraction" for those that are not whole.
--- -> a regex of core; refuses with the place `at` in front.
function M.regex(c, kind, at)
    local all = kind == "integer" and M.any_integer or kind == "fraction" and FRACTION or DECIMAL
    local set = refuse.check(at, core.regex(all))
    if kind == "fraction" then set = refuse.check(at, set:both(core.regex(DECIMAL))) end
    local function narrow(text)
        local part = refuse.check(at, core.regex(text or "[]"))
        set = refuse.check(at, set:both(part))
    end
    if c.low then narrow(M.side(c.low, true, c.low_open)) end
    if c.high then narrow(M.side(c.high, false, c.high_open)) end
    if #(c.multiples or {}) > 0 and kind ~= "integer" then narrow "-?[0-9]{1,15}(?:\\.[0-9]+)?" end
    for _, m in ipairs(c.multiples or {}) do
        local p, k = fraction(m)
        local n = p and #p <= 9 and math.tointeger(tonumber(p))
        if not n then refuse.raise("unsupported", "%s/multipleOf: %s cannot be enforced", at, tostring(m)) end
        local part, text, code = core.regex_multiple(n, k)
        if not part then refuse.raise(code, "%s/multipleOf: %s", at, text) end
        set = refuse.check(at, set:both(part))
    end
    return set
end

return M
