--- GBNF, the grammars that llama.cpp reads: name ::= "literal" [class] . other ( ) | * + ? {m,n}, # comments.
---
--- Characters are Unicode's; in strings and classes \n \r \t \\ \" \[ \] \- \^ \xHH \uHHHH \UHHHHHHHH. A rule ends with
--- its line, unless a parenthesis is open or the line ends with ::= or |. <name> is a hole (see grammar.compile).

local loop = require "llmrun.loop"
local scanner = require "llmrun.grammar.scanner"

local Gbnf = {}
Gbnf.__index = Gbnf

local ESCAPES = { n = 10, r = 13, t = 9, ["\\"] = 92, ['"'] = 34, ["["] = 91, ["]"] = 93, ["-"] = 45, ["^"] = 94 }
-- What may begin a space: blanks, # of remarks.
local BLANK = { [9] = true, [10] = true, [13] = true, [32] = true, [35] = true }
local HEX = { x = 2, u = 4, U = 8 }

-- Blanks and comments; line ends too if lines is true.
function Gbnf:space(lines)
    local s = self.s
    if not BLANK[s.text:byte(s.pos)] then return end
    repeat
        local before = s.pos
        s:take(lines and "^[ \t\r\n]*()" or "^[ \t]*()")
        if s:peek() == "#" then s:take "^[^\r\n]*()" end
    until s.pos == before
end

-- A character of a string or class.
function Gbnf:char()
    local s = self.s
    if s:peek():find "^[\r\n]" then s:fail("format", "the line ends too early") end
    if not s:eat "\\" then return s:char() end
    local at = s.pos - 1
    local e = s:take "^(.)()"
    if HEX[e] then return s:hex(HEX[e]) end
    if not ESCAPES[e] then s:fail("format", "an unknown escape", at) end
    return ESCAPES[e]
end

function Gbnf:literal()
    local s, out = self.s, {}
    while not s:eat '"' do out[#out + 1] = s:take '^([^"\\\r\n]+)()' or utf8.char(self:char()) end
    return self.b:lit(table.concat(out))
end

-- Ranges as the builder wants them: ascending and apart; the opposite if negate.
local function ranges_of(list, negate)
    table.sort(list, function(x, y) return x[1] < y[1] end)
    local out, from = {}, 0
    for _, r in ipairs(list) do
        local last = out[#out]
        if last and r[1] <= last[2] + 1 then
            last[2] = math.max(last[2], r[2])
        else
            out[#out + 1] = { r[1], r[2] }
        end
    end
    local flat = {}
    local function add(lo, hi)
        if lo <= hi then
            flat[#flat + 1] = lo
            flat[#flat + 1] = hi
        end
    end
    for _, r in ipairs(out) do
        if negate then
            add(from, r[1] - 1)
            from = r[2] + 1
        else
            add(r[1], r[2])
        end
    end
    if negate then add(from, 0x10FFFF) end
    return flat
end

function Gbnf:class()
    local s, list, at = self.s, {}, self.s.pos - 1
    local negate = s:eat "^"
    while not s:eat "]" do
        local lo = self:char()
        local hi = lo
        if s:peek() == "-" and s:peek(2) ~= "-]" then
            s.pos = s.pos + 1
            hi = self:char()
        end
        if hi < lo then s:fail("format", "a range that is out of order", at) end
        list[#list + 1] = { lo, hi }
    end
    return self.b:chars(ranges_of(list, negate), "raw")
end

function Gbnf:atom(nested)
    loop.breathe()
    local s = self.s
    local at = s.pos
    if s:eat '"' then return self:literal() end
    if s:eat "[" then return self:class() end
    if s:eat "." then return self.b:chars({ 0, 0x10FFFF }, "raw") end
    if s:eat "(" then
        self:space(true)
        local node = s:deeper(self.alternatives, self, true)
        self:space(true)
        s:need(")", "')' expected")
        return node
    end
    if s:eat "<" then
        local name = s:take "^([%w_-]+)>()"
        if not name then s:fail("unsupported", "tokens in grammars are not known", at) end
        return self.rules:hole(name, at)
    end
    local name = s:take "^([%a_][%w_-]*)()"
    if not name then return nil end
    local after = s.pos
    self:space(nested)
    if s:peek(3) == "::=" then -- the next rule
        s.pos = at
        return nil
    end
    s.pos = after
    return self.rules:ref(name, at)
end

function Gbnf:repeated(node)
    local s, b = self.s, self.b
    while true do
        if s:eat "*" then
            node = b:rep(node, 0, -1)
        elseif s:eat "+" then
            node = b:rep(node, 1, -1)
        elseif s:eat "?" then
            node = b:rep(node, 0, 1)
        elseif s:eat "{" then
            local at = s.pos
            self:space(false)
            local min = s:peek() == "," and 0 or s:count()
            local max = min
            self:space(false)
            if s:eat "," then
                self:space(false)
                max = s:peek() == "}" and -1 or s:count()
            end
            self:space(false)
            s:need("}", "'}' expected")
            if max >= 0 and max < min then s:fail("format", "the bounds of a repetition are out of order", at) end
            node = b:rep(node, min, max)
        else
            return node
        end
        self:space(false)
    end
end

function Gbnf:sequence(nested)
    local list = {}
    while true do
        self:space(nested)
        local node = self:atom(nested)
        if not node then return self.b:seq(list) end
        self:space(nested)
        list[#list + 1] = self:repeated(node)
    end
end

function Gbnf:alternatives(nested)
    local list = { self:sequence(nested) }
    self:space(nested)
    while self.s:eat "|" do
        self:space(true)
        list[#list + 1] = self:sequence(nested)
        self:space(nested)
    end
    return self.b:alt(list)
end

function Gbnf:rule()
    local s = self.s
    local at = s.pos
    local name = s:take "^([%a_][%w_-]*)()"
    if not name then s:fail("format", "a rule's name expected") end
    self:space(false)
    s:need("::=", "'::=' expected")
    self:space(true)
    local node = self:alternatives(false)
    self.rules:define(name, node, at)
    if s.pos <= #s.text and not s:peek():find "^[\r\n]" then s:fail("format", "unexpected text") end
end

local M = {}

--- Defines the rules of a text in builder b. -> the rule "root" (or opts.root), names of its holes
function M.rule(b, text, opts)
    local s = scanner.new("gbnf", text)
    local g = setmetatable({ s = s, b = b, rules = scanner.rules(s, b, opts.holes) }, Gbnf)
    g:space(true)
    while s.pos <= #text do
        g:rule()
        g:space(true)
    end
    return g.rules:finish(opts.root or "root")
end

return M
