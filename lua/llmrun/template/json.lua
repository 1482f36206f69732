-- JSON for templates: the tojson filter (Python's json.dumps as Hugging Face calls it) and a reader that keeps the
-- order of keys, so that tools and arguments come out of a template as they came in.

local state = require "llmrun.template.state"
local rope = require "llmrun.template.rope"
local value = require "llmrun.template.value"
local show = require "llmrun.template.show"
local raise, charge, charge_bytes = state.raise, state.charge, state.charge_bytes
local kind = value.kind

local M = {}

local MAX_NEST = 100

-- Writer -------------------------------------------------------------------------------------------------------------

local escapes = {
    ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ["\f"] = "\\f", ["\b"] = "\\b",
}

local function escape_byte(c)
    return escapes[c] or string.format("\\u%04x", c:byte())
end

local function escape_char(c)
    local code = utf8.len(c) and utf8.codepoint(c) or 0xFFFD
    if code < 0x10000 then
        return string.format("\\u%04x", code)
    end
    code = code - 0x10000
    return string.format("\\u%04x\\u%04x", 0xD800 + (code >> 10), 0xDC00 + (code & 0x3FF))
end

local function quote(s, ascii)
    charge_bytes(#s)
    s = s:gsub('[\0-\x1F"\\]', escape_byte)
    if ascii then
        s = s:gsub("[\x80-\xFF][\x80-\xBF]*", escape_char)
    end
    return '"' .. s .. '"'
end

local function number(x)
    if math.type(x) == "integer" then
        return string.format("%d", x)
    elseif x ~= x then
        return "NaN"
    elseif x == math.huge then
        return "Infinity"
    elseif x == -math.huge then
        return "-Infinity"
    end
    return show.float(x)
end

local function key_text(k)
    if type(k) == "string" then
        return k
    elseif type(k) == "number" then
        return number(k)
    elseif type(k) == "boolean" then
        return k and "true" or "false"
    elseif k == value.null then
        return "null"
    end
    return raise("type", "keys of JSON must be strings or numbers")
end

local Writer = {}
Writer.__index = Writer

function Writer:put(s)
    local n = self.n + 1
    self.n = n
    self.out[n] = s
    self.bytes = self.bytes + #s
    charge(1)
    if self.bytes > state.S.max_bytes then
        charge_bytes(self.bytes)
    end
end

-- Writes n members between brackets; member(i) writes the i-th.
function Writer:group(open, close, n, depth, member)
    if n == 0 then
        return self:put(open .. close)
    end
    self:put(open)
    for i = 1, n do
        if i > 1 then
            self:put(self.comma)
        end
        if self.indent then
            self:put("\n" .. self.indent:rep(depth + 1))
        end
        member(i)
    end
    if self.indent then
        self:put("\n" .. self.indent:rep(depth))
    end
    return self:put(close)
end

function Writer:value(v, depth)
    if depth > MAX_NEST then
        raise("limit", "a value for tojson is nested too deeply")
    end
    local k = kind(v)
    charge(8)
    if k == "str" then
        self:put(quote(rope.flat(v), self.ascii))
    elseif k == "int" or k == "float" then
        self:put(number(v))
    elseif k == "bool" then
        self:put(v and "true" or "false")
    elseif k == "none" then
        self:put "null"
    elseif k == "dict" then
        local keys, n = value.keys(v)
        if self.sort then
            table.sort(keys, function(a, b)
                return key_text(a) < key_text(b)
            end)
        end
        self:group("{", "}", n, depth, function(i)
            self:put(quote(key_text(keys[i]), self.ascii))
            self:put(self.colon)
            self:value(v[keys[i]], depth + 1)
        end)
    elseif k == "list" or k == "tuple" then
        self:group("[", "]", #v, depth, function(i)
            self:value(v[i], depth + 1)
        end)
    else
        raise("type", "Object of type %s is not JSON serializable", value.type_name(v))
    end
end

---json.dumps. indent: nil, a count of blanks or a string; separators: nil or a list of two strings.
function M.encode(v, ascii, indent, comma, colon, sort)
    if math.type(indent) == "integer" then
        if indent > 100 then
            raise("value", "the indent of tojson is too large")
        end
        indent = (" "):rep(math.max(indent, 0))
    end
    local w = setmetatable({
        n = 0, out = {}, bytes = 0, ascii = ascii, indent = indent, sort = sort,
        comma = comma or (indent and "," or ", "), colon = colon or ": ",
    }, Writer)
    w:value(v, 0)
    return table.concat(w.out)
end

-- Reader -------------------------------------------------------------------------------------------------------------

local function bad(s, i, what)
    error(setmetatable({ code = "json", msg = ("%s at byte %d"):format(what, i), src = s }, state.Error), 0)
end

local unescapes = {
    ['"'] = '"', ["\\"] = "\\", ["/"] = "/", n = "\n", r = "\r", t = "\t", f = "\f", b = "\b",
}

-- Text with backslashes; half a surrogate pair becomes U+FFFD.
local function read_escapes(s, from, raw)
    local out, n, i = {}, 0, 1
    while true do
        local at = raw:find("\\", i, true)
        n = n + 1
        out[n] = raw:sub(i, (at or #raw + 1) - 1)
        if not at then
            return table.concat(out)
        end
        local c = raw:sub(at + 1, at + 1)
        n = n + 1
        i = at + 2
        if c == "u" then
            local code = tonumber(raw:match("^%x%x%x%x", i) or bad(s, from, "bad escape"), 16)
            i = i + 4
            local low = code >= 0xD800 and code < 0xDC00 and raw:match("^\\u([dD][c-fC-F]%x%x)", i)
            if low then
                code = 0x10000 + ((code & 0x3FF) << 10) + (tonumber(low, 16) & 0x3FF)
                i = i + 6
            elseif code >= 0xD800 and code < 0xE000 then
                code = 0xFFFD
            end
            out[n] = utf8.char(code)
        else
            out[n] = unescapes[c] or bad(s, from, "bad escape")
        end
    end
end

local function read_string(s, i)
    local j = i + 1
    while true do
        j = s:find('["\\%c]', j)
        local c = j and s:sub(j, j)
        if c == '"' then
            return read_escapes(s, i, s:sub(i + 1, j - 1)), j + 1
        elseif c == "\\" then
            j = j + 2
        elseif c == "\x7F" then
            j = j + 1
        else
            bad(s, i, "bad string")
        end
    end
end

local read

local function skip(s, i)
    return s:match("^[ \t\r\n]*()", i)
end

local function read_list(s, i, depth)
    local list, n = {}, 0
    i = skip(s, i + 1)
    if s:sub(i, i) == "]" then
        return value.data_list(list), i + 1
    end
    while true do
        n = n + 1
        list[n], i = read(s, i, depth + 1)
        i = skip(s, i)
        local c = s:sub(i, i)
        if c == "]" then
            return value.data_list(list), i + 1
        elseif c ~= "," then
            bad(s, i, "expected ',' or ']'")
        end
        i = i + 1
    end
end

local function read_dict(s, i, depth)
    local dict, keys = {}, {}
    i = skip(s, i + 1)
    if s:sub(i, i) == "}" then
        return value.dict(dict, keys), i + 1
    end
    while true do
        i = skip(s, i)
        if s:sub(i, i) ~= '"' then
            bad(s, i, "expected a key")
        end
        local key
        key, i = read_string(s, i)
        i = skip(s, i)
        if s:sub(i, i) ~= ":" then
            bad(s, i, "expected ':'")
        end
        if dict[key] == nil then
            keys[#keys + 1] = key
        end
        dict[key], i = read(s, i + 1, depth + 1)
        i = skip(s, i)
        local c = s:sub(i, i)
        if c == "}" then
            return value.dict(dict, keys), i + 1
        elseif c ~= "," then
            bad(s, i, "expected ',' or '}'")
        end
        i = i + 1
    end
end

local words = { t = { "true", true }, f = { "false", false }, n = { "null", value.null } }

function read(s, i, depth)
    if depth > 500 then
        bad(s, i, "nested too deeply")
    end
    i = skip(s, i)
    local c = s:sub(i, i)
    if c == "{" then
        return read_dict(s, i, depth)
    elseif c == "[" then
        return read_list(s, i, depth)
    elseif c == '"' then
        return read_string(s, i)
    end
    local word = words[c]
    if word and s:sub(i, i + #word[1] - 1) == word[1] then
        return word[2], i + #word[1]
    end
    local text, after = s:match("^(-?%d+%.?%d*[eE]?[-+]?%d*)()", i)
    local n = text and not text:find "^-?0%d" and tonumber(text)
    if not n then
        bad(s, i, "unexpected text")
    end
    return n, after
end

---Reads JSON text. Dicts keep the order of their keys, empty lists and dicts stay apart, whole numbers are integers.
---@return any value, string? err  nil and a message on bad text
function M.decode(s)
    local ok, v, i = pcall(read, s, 1, 0)
    if ok then
        i = skip(s, i)
        if i > #s then
            return v
        end
        return nil, ("text after the value at byte %d"):format(i)
    end
    if getmetatable(v) == state.Error then
        return nil, v.msg
    end
    return error(v, 0)
end

return M
