--- What the readers of grammar texts share: a place in a text, errors that name it, rules by name.

local refuse = require "llmrun.grammar.refuse"

local Scanner = {}
Scanner.__index = Scanner

local MAX_TEXT, MAX_DEPTH = 4 * 1024 * 1024, 120

--- kind: "gbnf" or "lark", for messages.
local function new(kind, text)
    if #text > MAX_TEXT then refuse.raise("limit", "%s: over %d bytes of text", kind, MAX_TEXT) end
    local bad = select(2, utf8.len(text))
    local s = setmetatable({ kind = kind, text = text, pos = 1, depth = 0 }, Scanner)
    if bad then s:fail("format", "the text is not UTF-8", bad) end
    return s
end

--- Refuses with the line and column of a place (default: here).
function Scanner:fail(code, what, pos)
    pos = pos or self.pos
    local line, start = 1, 1
    for at in self.text:gmatch "()\n" do
        if at >= pos then break end
        line, start = line + 1, at + 1
    end
    refuse.raise(code, "%s:%d:%d: %s", self.kind, line, pos - start + 1, what)
end

--- The captures of a Lua pattern here (it must start with ^), and the place moves behind it; nil if it does not match.
--- The pattern's last capture is the place behind.
function Scanner:take(pattern)
    local a, b = self.text:match(pattern, self.pos)
    if a == nil then return nil end
    if b == nil then
        self.pos = a
        return true
    end
    self.pos = b
    return a
end

function Scanner:peek(n) return self.text:sub(self.pos, self.pos + (n or 1) - 1) end

--- Takes exactly this text.
function Scanner:eat(s)
    if self.text:sub(self.pos, self.pos + #s - 1) ~= s then return false end
    self.pos = self.pos + #s
    return true
end

function Scanner:need(s, what)
    if not self:eat(s) then self:fail("format", what or ("'%s' expected"):format(s)) end
end

--- One character as a code point.
function Scanner:char()
    if self.pos > #self.text then self:fail("format", "the text ends too early") end
    local c = utf8.codepoint(self.text, self.pos)
    self.pos = utf8.offset(self.text, 2, self.pos)
    return c
end

--- Runs fn one level deeper.
function Scanner:deeper(fn, ...)
    self.depth = self.depth + 1
    if self.depth > MAX_DEPTH then self:fail("limit", "nested too deeply") end
    local r = fn(...)
    self.depth = self.depth - 1
    return r
end

--- Exactly n hexadecimal digits as a code point.
function Scanner:hex(n)
    local at = self.pos
    local v = tonumber(self.text:match("^" .. ("%x"):rep(n), self.pos) or "", 16)
    if not v or v > 0x10FFFF or (v >= 0xD800 and v < 0xE000) then
        self:fail("format", ("%d hexadecimal digits of a character expected"):format(n), at)
    end
    self.pos = self.pos + n
    return v
end

--- A number of a repetition.
function Scanner:count()
    local digits = self:take "^(%d+)()"
    if not digits then self:fail("format", "a number expected") end
    local n = math.tointeger(tonumber(digits))
    if not n or n > 1048576 then self:fail("limit", "the bound of a repetition is over 1048576") end
    return n
end

--- Rules of a builder by name; a name may be used before it is defined. Holes have functions.
local Rules = {}
Rules.__index = Rules

local function rules(scanner, b, holes)
    return setmetatable({ s = scanner, b = b, of = {}, fns = holes or {}, holes = {}, hole_node = {} }, Rules)
end

function Rules:get(name)
    local r = self.of[name]
    if not r then
        r = { id = self.b:rule(name) }
        self.of[name] = r
    end
    return r
end

function Rules:ref(name, pos)
    local r = self:get(name)
    r.used_at = r.used_at or pos
    return self.b:ref(r.id)
end

function Rules:define(name, node, pos)
    local r = self:get(name)
    if r.defined then self.s:fail("format", ("rule '%s' is defined twice"):format(name), pos) end
    r.defined = true
    self.b:define(r.id, node)
end

--- The node of hole <name>.
function Rules:hole(name, pos)
    if not self.hole_node[name] then
        local fn = self.fns[name]
        if type(fn) ~= "function" then
            self.s:fail("unsupported", ("<%s> is no hole: holes.%s is not a function"):format(name, name), pos)
        end
        self.holes[#self.holes + 1] = name
        self.hole_node[name] = self.b:hole(#self.holes, name)
    end
    return self.hole_node[name]
end

--- The id of the first rule, and the names of the holes by number; every rule that is used must be defined.
function Rules:finish(root)
    local missing, at
    for name, r in pairs(self.of) do
        if not r.defined and (not at or r.used_at < at) then missing, at = name, r.used_at end
    end
    if missing then self.s:fail("format", ("rule '%s' is not defined"):format(missing), at) end
    local r = self.of[root]
    if not r then self.s:fail("format", ("there is no rule '%s'"):format(root), 1) end
    return r.id, self.holes
end

return { new = new, rules = rules }
