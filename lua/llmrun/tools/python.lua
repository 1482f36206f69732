--- Calls written as Python: f(a=1, b="x"). The names, strings, numbers, lists and dicts of such calls, nothing else of
--- the language. Gemma writes its tool calls so.

local null = require("cjson").null
local template = require "llmrun.template"

local M = {}

local MAX_DEPTH = 100

local function bad(at, text) error({ python = ("%s at byte %d"):format(text, at) }, 0) end

-- Skips blanks and comments.
local function skip(s, i)
    while true do
        i = s:match("^%s*()", i)
        if s:sub(i, i) ~= "#" then return i end
        i = s:match("^[^\n]*()", i)
    end
end

local unescapes = {
    n = "\n", t = "\t", r = "\r", b = "\b", f = "\f", v = "\v", a = "\a", ["0"] = "\0", ["\\"] = "\\", ["'"] = "'",
    ['"'] = '"', ["\n"] = "",
}

local function read_escape(s, i)
    local c = s:sub(i, i)
    local digits = c == "x" and s:match("^%x%x", i + 1) or c == "u" and s:match("^%x%x%x%x", i + 1)
        or c == "U" and s:match("^%x%x%x%x%x%x%x%x", i + 1)
    if digits then
        local code = tonumber(digits, 16)
        return code <= 0x10FFFF and utf8.char(code) or "\u{FFFD}", i + 1 + #digits
    end
    return unescapes[c] or ("\\" .. c), i + 1
end

local function read_string(s, i, raw)
    local quote = s:match('^"""', i) or s:match("^'''", i) or s:sub(i, i)
    local from, out = i, {}
    i = i + #quote
    while true do
        local at = s:find('[\\"\'\n]', i)
        if not at then bad(from, "a string without an end") end
        out[#out + 1] = s:sub(i, at - 1)
        local c = s:sub(at, at)
        if s:sub(at, at + #quote - 1) == quote then
            return table.concat(out), at + #quote
        elseif c == "\\" and not raw then
            out[#out + 1], i = read_escape(s, at + 1)
        elseif c == "\n" and #quote == 1 then
            bad(from, "a string without an end")
        else
            out[#out + 1] = c
            i = at + 1
        end
    end
end

local function read_number(s, i)
    local text, after = s:match("^([-+]?%d[%d_]*%.?%d*[eE]?[-+]?%d*)()", i)
    if not text then text, after = s:match("^([-+]?%.%d+[eE]?[-+]?%d*)()", i) end
    local n = text and tonumber((text:gsub("_", "")))
    if not n then bad(i, "a value expected") end
    return n, after
end

local read

-- Members up to the closing bracket: add(i) reads one and returns the place behind it.
local function read_group(s, i, close, add)
    i = skip(s, i)
    while s:sub(i, i) ~= close do
        i = skip(s, add(i))
        local c = s:sub(i, i)
        if c == "," then
            i = skip(s, i + 1)
        elseif c ~= close then
            bad(i, ("',' or '%s' expected"):format(close))
        end
    end
    return i + 1
end

local words = { True = true, False = false, None = null, ["true"] = true, ["false"] = false, null = null }

function read(s, i, depth)
    if depth > MAX_DEPTH then bad(i, "nested too deeply") end
    i = skip(s, i)
    local c = s:sub(i, i)
    if c == '"' or c == "'" then
        local text
        text, i = read_string(s, i)
        local j = skip(s, i)
        while s:find("^['\"]", j) do -- neighbouring strings are one
            local more
            more, i = read_string(s, j)
            text, j = text .. more, skip(s, i)
        end
        return text, i
    elseif s:find("^[rR]['\"]", i) then
        return read_string(s, i + 1, true)
    elseif c == "[" or c == "(" then
        local list = {}
        i = read_group(s, i + 1, c == "[" and "]" or ")", function(at)
            local v
            v, at = read(s, at, depth + 1)
            list[#list + 1] = v
            return at
        end)
        return template.list(list), i
    elseif c == "{" then
        local members = {}
        i = read_group(s, i + 1, "}", function(at)
            local key, v
            key, at = read(s, at, depth + 1)
            if type(key) ~= "string" and type(key) ~= "number" then bad(at, "a key expected") end
            at = skip(s, at)
            if s:sub(at, at) ~= ":" then bad(at, "':' expected") end
            v, at = read(s, at + 1, depth + 1)
            members[#members + 1] = { tostring(key), v }
            return at
        end)
        return template.dict(members), i
    end
    local word, after = s:match("^([%a_][%w_]*)()", i)
    if word then
        if words[word] == nil then bad(i, ("the name '%s' where a value is expected"):format(word)) end
        return words[word], after
    end
    return read_number(s, i)
end

local function read_call(s, i)
    local name, after = s:match("^([%a_][%w_.]*)%s*%(()", skip(s, i))
    if not name then bad(i, "a call expected") end
    local named, placed = {}, {}
    i = read_group(s, after, ")", function(at)
        local key, behind = s:match("^([%a_][%w_]*)%s*=()", at)
        local v
        v, at = read(s, behind or at, 0)
        if key then named[#named + 1] = { key, v } else placed[#placed + 1] = v end
        return at
    end)
    return { name = name, named = template.dict(named), placed = placed }, i
end

--- The calls in a text: one behind the other, on lines or with commas or semicolons between, perhaps in brackets, or
--- inside print(...). A list of { name, named = { [name] = value }, placed = { values without a name } }; nil and why
--- not, if the text is anything else.
---@param text string
---@return table[]|nil, string?
function M.calls(text)
    local list, closing = {}, nil
    local ok, err = pcall(function()
        local i = skip(text, 1)
        if text:sub(i, i) == "[" then closing, i = true, i + 1 end
        while true do
            i = skip(text, i)
            local inner = text:match("^print%s*%(()", i)
            local variable = text:match("^[%a_][%w_]*%s*=%s*()[%a_][%w_.]*%s*%(", i)
            list[#list + 1], i = read_call(text, inner or variable or i)
            if inner then
                i = skip(text, i)
                if text:sub(i, i) ~= ")" then bad(i, "')' expected") end
                i = i + 1
            end
            i = text:match("^[%s,;]*()", skip(text, i))
            i = skip(text, i)
            if closing and text:sub(i, i) == "]" then
                if skip(text, i + 1) <= #text then bad(i + 1, "text behind the calls") end
                return
            end
            if i > #text then
                if closing then bad(i, "']' expected") end
                return
            end
        end
    end)
    if ok then return list end
    if type(err) == "table" and err.python then return nil, err.python end
    error(err, 0)
end

return M
