-- Template text -> tokens, with Jinja's white space rules as Hugging Face sets them (trim_blocks, lstrip_blocks).
--
-- Tokens come as three parallel arrays: kind, val, pos (byte offset in the normalised source). Kinds: "data" (template
-- text), "{{" "}}" "{%" "%}", "name", "str", "int", "float", "eof", and each operator under its own text.
--
-- White space: line ends become \n and one at the very end is dropped. A newline right after %} or #} goes; blanks from
-- the start of a line up to {% or {# go if nothing else is before them. "-" inside a delimiter takes all white space on
-- that side, "+" keeps what the two rules above would take.

local lpeg = require "lpeg"
local state = require "llmrun.template.state"
local text = require "llmrun.template.text"

local P, R, S, C, Cp, Cc, Ct = lpeg.P, lpeg.R, lpeg.S, lpeg.C, lpeg.Cp, lpeg.Cc, lpeg.Ct

local M = {}

-- Reports a mistake at a byte offset of the source.
function M.fail(pos, fmt, ...)
    local msg = select("#", ...) > 0 and string.format(fmt, ...) or fmt
    error(setmetatable({ code = "syntax", msg = msg, pos = pos }, state.Error), 0)
end
local fail = M.fail

-- Patterns of what stands inside a tag -------------------------------------------------------------------------------

local digit = R "09"
local digits = digit ^ 1 * (P "_" * digit ^ 1) ^ 0
local exponent = S "eE" * S "+-" ^ -1 * digits
local float = digits * (P "." * digits * exponent ^ -1 + exponent)
local function radix(letters, set)
    return P "0" * S(letters) * (P "_" ^ -1 * set) ^ 1
end
local integer = radix("xX", R("09", "af", "AF")) + radix("oO", R "07") + radix("bB", S "01") + digits
local letter = R("az", "AZ", "__", "\x80\xFF")
local name = letter * (letter + digit) ^ 0
local function quoted(q)
    return P(q) * C((1 - S(q .. "\\") + P "\\" * 1) ^ 0) * P(q)
end

local op = P "//" + "**" + "==" + "!=" + ">=" + "<=" + S "+-/*%~[](){}><=.:|,;"

-- One token: kind, value, position after it.
local token = Cc "float" * C(float) * Cp()
    + Cc "int" * C(integer) * Cp()
    + Cc "name" * C(name) * Cp()
    + Cc "str" * (quoted "'" + quoted '"') * Cp()
    + C(op) * Cc(false) * Cp()
-- After "." a number is an index, never a float: a.0.1
local index = Cc "int" * C(digits) * Cp()

-- Literals -----------------------------------------------------------------------------------------------------------

local simple = {
    n = "\n", t = "\t", r = "\r", a = "\a", b = "\b", f = "\f", v = "\v",
    ["\\"] = "\\", ["'"] = "'", ['"'] = '"', ["\n"] = "",
}

local hex = R("09", "af", "AF")
local escape = P "\\"
    * (
        P "x" * Cc(16) * C(hex * hex)
        + P "u" * Cc(16) * C(hex * hex * hex * hex)
        + P "U" * Cc(16) * C(hex * hex * hex * hex * hex * hex * hex * hex)
        + Cc(8) * C(R "07" * R "07" ^ -2)
        + Cc(0) * C(P(1))
    )
local pieces = Ct((C((1 - P "\\") ^ 1) + Ct(escape)) ^ 0)

-- The value of a quoted string, escapes as in Python; an unknown escape keeps its backslash.
local function unquote(s, pos)
    if not s:find("\\", 1, true) then
        return s
    end
    local out, high = {}, nil
    for i, p in ipairs(pieces:match(s)) do
        if type(p) == "string" then
            out[i] = p
        elseif p[1] == 0 then
            local c = p[2]
            if c == "x" or c == "u" or c == "U" or c == "N" then
                fail(pos, "bad escape \\%s in a string", c)
            end
            out[i] = simple[c] or "\\" .. c
        else
            local c = tonumber(p[2], p[1])
            if c > 0x10FFFF then
                fail(pos, "bad code point in a string")
            end
            out[i] = ""
            if high and c >= 0xDC00 and c < 0xE000 then
                -- a pair of surrogates written as two escapes
                out[i - 1] = ""
                c = 0x10000 + (high - 0xD800) * 0x400 + (c - 0xDC00)
            end
            out[i] = utf8.char(c)
            high = c >= 0xD800 and c < 0xDC00 and c or nil
            goto next
        end
        high = nil
        ::next::
    end
    return table.concat(out)
end

local function integer_value(s, pos)
    s = s:gsub("_", ""):lower()
    local base = ({ ["0x"] = 16, ["0o"] = 8, ["0b"] = 2 })[s:sub(1, 2)]
    if base then
        local n = #s <= 17 and tonumber(s:sub(3), base)
        return n or fail(pos, "number out of range")
    end
    if #s > 1 and s:find "^0+[1-9]" then
        fail(pos, "a number may not begin with 0")
    end
    local n = math.tointeger(tonumber(s))
    if not n or math.type(tonumber(s)) ~= "integer" then
        fail(pos, "number out of range")
    end
    return n
end

-- The lexer ----------------------------------------------------------------------------------------------------------

local Lexer = {}
Lexer.__index = Lexer

function Lexer:add(kind, val, pos)
    local n = self.n + 1
    self.n = n
    self.kind[n], self.val[n], self.pos[n] = kind, val, pos
end

local closes = { ["("] = ")", ["["] = "]", ["{"] = "}" }
local is_close = { [")"] = true, ["]"] = true, ["}"] = true }

-- Tokens from position i up to the end of a tag; returns the position after the end and the sign before it.
function Lexer:inside(i, stop, opened)
    local src = self.src
    local depth, stack = 0, {}
    while true do
        i = text.skip_space(src, i)
        if i > #src then
            fail(opened, "this %s has no end '%s'", stop == "}}" and "expression" or "block", stop)
        end
        if depth == 0 then
            local c = src:sub(i, i)
            if src:sub(i, i + 1) == stop then
                return i + 2, ""
            elseif (c == "-" or (c == "+" and stop == "%}")) and src:sub(i + 1, i + 2) == stop then
                return i + 3, c
            end
        end
        local kind, val, after
        if self.kind[self.n] == "." then
            kind, val, after = index:match(src, i)
        end
        if not kind then
            kind, val, after = token:match(src, i)
        end
        if not kind then
            local c = src:match("^" .. text.CHAR, i)
            fail(i, (c == "'" or c == '"') and "a string has no end" or "unexpected character '%s'", c)
        end
        if kind == "str" then
            val = unquote(val, i)
        elseif kind == "int" then
            val = integer_value(val, i)
        elseif kind == "float" then
            val = tonumber((val:gsub("_", ""))) + 0.0
        elseif closes[kind] then
            depth = depth + 1
            stack[depth] = closes[kind]
        elseif is_close[kind] then
            if depth == 0 then
                fail(i, "unexpected '%s'", kind)
            elseif stack[depth] ~= kind then
                fail(i, "unexpected '%s', expected '%s'", kind, stack[depth])
            end
            depth = depth - 1
        end
        self:add(kind, val, i)
        i = after
    end
end

-- Adds template text i..j after what the sign of the following tag takes from its end.
function Lexer:data(i, j, sign, strip_line, at_line_start)
    local s = self.src:sub(i, j)
    if sign == "-" then
        local a, b = text.strip_span(s, false, true)
        s = s:sub(a, b)
    elseif sign ~= "+" and strip_line then
        local line = s:match ".*\n()" or 1
        if (line > 1 or at_line_start) and text.skip_space(s, line) > #s then
            s = s:sub(1, line - 1)
        end
    end
    if s ~= "" then
        self:add("data", s, i)
    end
end

-- White space to skip after a tag that ends before position i: all of it after "-", one newline after a block.
function Lexer:after(i, sign, trims)
    local src = self.src
    if sign == "-" then
        return text.skip_space(src, i)
    elseif sign ~= "+" and trims and src:sub(i, i) == "\n" then
        return i + 1
    end
    return i
end

-- {% raw %} at tag position i: adds its text and returns the position after {% endraw %}, or nil if it is another tag.
function Lexer:raw(i)
    local src = self.src
    local sign, body = src:match("^{%%[-+]?%s*raw%s*(%-?)%%}()", i)
    if not body then
        return nil
    end
    body = self:after(body, sign, false)
    local from = body
    while true do
        local at = src:find("{%", from, true)
        if not at then
            fail(i, "this raw block has no {%% endraw %%}")
        end
        local before, after, stop = src:match("^{%%([-+]?)%s*endraw%s*([-+]?)%%}()", at)
        if stop then
            self:data(body, at - 1, before, true, src:sub(body - 1, body - 1) == "\n")
            return self:after(stop, after, true)
        end
        from = at + 2
    end
end

function Lexer:run()
    local src = self.src
    local i, size = 1, #src
    while i <= size do
        local at = src:find("{[{%%#]", i) or size + 1
        local line_start = i == 1 or src:sub(i - 1, i - 1) == "\n"
        local what = src:sub(at, at + 1)
        local sign = src:match("^[-+]", at + 2) or ""
        if what == "" then
            self:data(i, size, "", false)
            break
        end
        self:data(i, at - 1, sign, what ~= "{{", line_start)
        if what == "{#" then
            local first = at + 2 + #sign
            local stop = src:find("#}", first, true)
            if not stop then
                fail(at, "this comment has no end '#}'")
            end
            i = self:after(stop + 2, stop > first and src:match("^[-+]", stop - 1) or "", true)
        else
            local after = what == "{%" and self:raw(at)
            if not after then
                local close = what == "{{" and "}}" or "%}"
                self:add(what, false, at)
                after, sign = self:inside(at + 2 + #sign, close, at)
                self:add(close, false, after - 2)
                after = self:after(after, sign, close == "%}")
            end
            i = after
        end
    end
    self:add("eof", false, size + 1)
end

---Tokens of a template.
---@return table  { kind = {}, val = {}, pos = {}, n = count, src = the normalised source }
function M.scan(source)
    local src = source
    if src:find("\r", 1, true) then
        src = src:gsub("\r\n?", "\n")
    end
    if src:sub(-1) == "\n" then
        src = src:sub(1, -2)
    end
    local lexer = setmetatable({ src = src, n = 0, kind = {}, val = {}, pos = {} }, Lexer)
    lexer:run()
    return lexer
end

---Line and column (both from 1) of a byte offset.
function M.place(src, pos)
    local line, from = 1, 1
    for at in src:sub(1, pos - 1):gmatch "()\n" do
        line = line + 1
        from = at + 1
    end
    return line, select(2, src:sub(from, pos - 1):gsub(text.CHAR, "")) + 1
end

return M
