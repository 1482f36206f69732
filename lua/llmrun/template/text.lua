-- Code points in UTF-8 strings: lengths, slices, case and white space as Python's str has them.
--
-- Positions that templates see count code points; positions in this module's results count bytes. A string that is not
-- valid UTF-8 is still handled: every byte that begins no character counts together with the character before it.

local state = require "llmrun.template.state"
local unicode = require "llmrun.template.unicode"
local charge = state.charge
local utf8_len, utf8_offset, utf8_char, codepoint = utf8.len, utf8.offset, utf8.char, utf8.codepoint

local M = {}

local CHAR = ".[\x80-\xBF]*" -- one character, or a stray byte at the start
M.CHAR = CHAR

function M.is_ascii(s)
    return utf8_len(s, 1, -1, true) == #s -- much faster than a search for high bytes
end
local is_ascii = M.is_ascii

---The characters of s as a list of strings.
function M.chars(s)
    local list, n = {}, 0
    for c in s:gmatch(CHAR) do
        n = n + 1
        list[n] = c
    end
    charge(2 * n)
    return list, n
end

---Number of code points.
function M.len(s)
    charge(1 + #s // 256)
    local n = utf8_len(s, 1, -1, true)
    if not n then
        n = select(2, s:gsub(CHAR, ""))
    end
    return n
end
local len = M.len

---The byte positions of characters from..to-1 (0-based, both within 0..len): first byte, last byte.
function M.span(s, from, to)
    if to <= from then
        return 1, 0
    end
    charge(1 + #s // 256)
    if is_ascii(s) then
        return from + 1, to
    end
    if utf8_len(s, 1, -1, true) then
        local i = utf8_offset(s, from + 1)
        return i, utf8_offset(s, to - from + 1, i) - 1
    end
    local pos, k, i = 1, 0, 1
    for c in s:gmatch(CHAR) do
        if k == from then
            i = pos
        end
        k = k + 1
        pos = pos + #c
        if k == to then
            break
        end
    end
    charge(k)
    return i, pos - 1
end

---The code point offset of byte position i (1-based byte -> 0-based character).
function M.index(s, i)
    return len(s:sub(1, i - 1))
end

---Charges for one pass of plain searches for `part` over s: its worst case is their product.
function M.charge_search(s, part)
    charge(1 + #s // 64 + #s * #part // 1024)
end

-- Case ---------------------------------------------------------------------------------------------------------------

local maps = {}

-- The table character -> mapped character, made at first use.
local function case_map(name)
    local map = maps[name]
    if not map then
        map = {}
        local runs = unicode[name]
        for i = 1, #runs, 4 do
            for c = runs[i], runs[i + 1], runs[i + 2] do
                map[utf8_char(c)] = utf8_char(c + runs[i + 3])
            end
        end
        for c, to in pairs(unicode[name .. "_many"]) do
            map[utf8_char(c)] = to
        end
        maps[name] = map
    end
    return map
end

local MULTI = "[\xC2-\xF4][\x80-\xBF]+"

function M.upper(s)
    charge(1 + #s // 16)
    local r = s:upper()
    if is_ascii(s) then
        return r
    end
    return (r:gsub(MULTI, case_map("upper")))
end

-- True where the character before or after byte i is a letter with case (skipping nothing else than what is there).
local function letter_at(s, i)
    local c = s:match("^[\0-\x7F\xC2-\xF4][\x80-\xBF]*", i)
    if not c then
        return false
    end
    return c:find("^%a$") ~= nil or case_map("upper")[c] ~= nil or case_map("lower")[c] ~= nil
end

local function char_before(s, i)
    local j = i - 1
    while j > 1 and s:find("^[\x80-\xBF]", j) do
        j = j - 1
    end
    return j
end

function M.lower(s)
    charge(1 + #s // 16)
    local r = s:lower()
    if is_ascii(s) then
        return r
    end
    if r:find("\u{3A3}", 1, true) then
        -- a capital sigma at the end of a word becomes the final form
        r = r:gsub("()\u{3A3}()", function(a, b)
            if a > 1 and letter_at(r, char_before(r, a)) and not letter_at(r, b) then
                return "\u{3C2}"
            end
            return "\u{3C3}"
        end)
    end
    return (r:gsub(MULTI, case_map("lower")))
end

---First character upper, the rest lower.
function M.capitalize(s)
    local c = s:match("^" .. CHAR) or ""
    return M.upper(c) .. M.lower(s:sub(#c + 1))
end

---Python's str.title: letters after a letter are lower, others upper.
function M.title(s)
    local up, low = case_map("upper"), case_map("lower")
    local list, n = M.chars(s)
    local inside = false
    for i = 1, n do
        local c = list[i]
        local cased = c:find("^%a$") or up[c] or low[c]
        if cased then
            list[i] = inside and M.lower(c) or M.upper(c)
        end
        inside = cased
    end
    return table.concat(list)
end

function M.swapcase(s)
    local up = case_map("upper")
    local list, n = M.chars(s)
    for i = 1, n do
        local c = list[i]
        list[i] = (c:find("^%l") or up[c]) and M.upper(c) or M.lower(c)
    end
    return table.concat(list)
end

---True if s has letters with case and all of them are as `name` ("upper" or "lower") leaves them.
function M.is_case(s, name)
    return M[name](s) == s and M[name == "upper" and "lower" or "upper"](s) ~= s
end

-- Classes ------------------------------------------------------------------------------------------------------------

local function in_ranges(list, c)
    local lo, hi = 1, #list // 2
    while lo <= hi do
        local mid = (lo + hi) // 2
        if c < list[2 * mid - 1] then
            hi = mid - 1
        elseif c > list[2 * mid] then
            lo = mid + 1
        else
            return true
        end
    end
    return false
end

---True if the character (a string) is a letter.
function M.is_alpha(c)
    if #c == 1 then
        return c:find("^%a") ~= nil
    end
    return utf8_len(c) ~= nil and in_ranges(unicode.alpha, codepoint(c))
end

---True if repr() may show the character (of two bytes or more) as it is.
function M.is_printable(c)
    return utf8_len(c) ~= nil and not in_ranges(unicode.unprintable, codepoint(c))
end

local SPACE = {}
for c in ("\t\n\v\f\r\x1c\x1d\x1e\x1f "):gmatch "." do
    SPACE[c] = true
end
for _, c in ipairs { 0x85, 0xA0, 0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000 } do
    SPACE[utf8_char(c)] = true
end
for c = 0x2000, 0x200A do
    SPACE[utf8_char(c)] = true
end

---True if the character is white space to Python.
function M.is_space(c)
    return SPACE[c] == true
end

---The byte position of the first character from i on that is no white space.
function M.skip_space(s, i)
    while true do
        i = s:match("^[\t-\r\x1c-\x1f ]*()", i)
        local c = s:match("^[\xC2-\xE3][\x80-\xBF]+", i)
        if not c or not SPACE[c] then
            return i
        end
        i = i + #c
    end
end

-- True if s has white space beyond ASCII.
local function has_wide_space(s)
    for c in s:gmatch "[\xC2\xE1-\xE3][\x80-\xBF]+" do
        if SPACE[c] then
            return true
        end
    end
    return false
end

---The words of s: lists of their first and last bytes, and their number.
function M.words(s)
    local from, to, n = {}, {}, 0
    charge(1 + #s // 16)
    if is_ascii(s) or not has_wide_space(s) then
        for a, b in s:gmatch "()[^\t-\r\x1c-\x1f ]+()" do
            n = n + 1
            from[n], to[n] = a, b - 1
            charge(12)
        end
        return from, to, n
    end
    local i, size = M.skip_space(s, 1), #s
    charge(4 * size)
    while i <= size do
        local k = i
        while k <= size do
            local c = s:match("^" .. CHAR, k)
            if SPACE[c] then
                break
            end
            k = k + #c
        end
        n = n + 1
        from[n], to[n] = i, k - 1
        i = M.skip_space(s, k)
    end
    return from, to, n
end

-- The set of characters of a string, or the white space.
local function set_of(chars)
    if not chars then
        return SPACE
    end
    local set = {}
    for c in chars:gmatch(CHAR) do
        set[c] = true
    end
    return set
end

---The byte positions that stay when the characters of `chars` (default: white space) are stripped from the chosen ends.
function M.strip_span(s, left, right, chars)
    local set = set_of(chars)
    charge(1 + #s // 64)
    local i, j = 1, #s
    if left then
        while i <= j do
            local c = s:match("^" .. CHAR, i)
            if not set[c] then
                break
            end
            i = i + #c
        end
    end
    if right then
        while j >= i do
            local k = j
            while k > i and s:find("^[\x80-\xBF]", k) do
                k = k - 1
            end
            if not set[s:sub(k, j)] then
                break
            end
            j = k - 1
        end
    end
    return i, j
end

return M
