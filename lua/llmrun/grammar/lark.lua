--- EBNF as Lark writes it.
---
--- Known: rule: and TERMINAL: definitions (with priorities, the marks ? and !, aliases ->, which mean nothing here),
--- "text", "text"i, /regex/ with the flags i and s, "a".."z", ( ), [ ], |, ? * + ~n ~n..m, // and # comments, %ignore,
--- %import common.NAME (also with -> NAME, or in parentheses). <name> is a hole (see grammar.compile). Templates,
--- %declare, %extend, %override and imports from elsewhere are refused.
---
--- A text is read by characters, not by Lark's lexer: two terminals side by side may take their characters in any way.
--- What %ignore names may stand between terminals, at most twice in a row and 32 characters each.

local core = require "llmrun.core"
local loop = require "llmrun.loop"
local scanner = require "llmrun.grammar.scanner"

local Lark = {}
Lark.__index = Lark

-- Terminals of Lark's common.lark, as regular expressions.
local COMMON = {
    DIGIT = "[0-9]", HEXDIGIT = "[0-9A-Fa-f]", INT = "[0-9]+", SIGNED_INT = "[+-]?[0-9]+",
    DECIMAL = "[0-9]+\\.[0-9]*|\\.[0-9]+",
    FLOAT = "[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\\.[0-9]*|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    NUMBER = "[0-9]+(?:[eE][+-]?[0-9]+)?|(?:[0-9]+\\.[0-9]*|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    LCASE_LETTER = "[a-z]", UCASE_LETTER = "[A-Z]", LETTER = "[A-Za-z]", WORD = "[A-Za-z]+",
    CNAME = "[A-Za-z_][A-Za-z0-9_]*", ESCAPED_STRING = '"(?:[^"\\\\\\n]|\\\\[^\\n])*"',
    WS_INLINE = "[ \\t]+", WS = "[ \\t\\f\\r\\n]+", CR = "\\r", LF = "\\n", NEWLINE = "(?:\\r?\\n)+",
    SH_COMMENT = "#[^\\n]*", CPP_COMMENT = "//[^\\n]*", SQL_COMMENT = "--[^\\n]*",
    C_COMMENT = "/\\*(?:[^*]|\\*+[^*/])*\\*+/",
}
COMMON.SIGNED_FLOAT = "[+-]?(?:" .. COMMON.FLOAT .. ")"
COMMON.SIGNED_NUMBER = "[+-]?(?:" .. COMMON.NUMBER .. ")"

local ESCAPES = { n = "\n", r = "\r", t = "\t", f = "\f", ["\\"] = "\\", ['"'] = '"', ["'"] = "'", ["/"] = "/" }
-- What may begin a space: blanks, # and // of remarks.
local BLANK = { [9] = true, [10] = true, [13] = true, [32] = true, [35] = true, [47] = true }
local HEX = { x = 2, u = 4, U = 8 }
local IGNORE_MAX = 32

-- Blanks, comments and line ends. A line end followed by what begins a definition is the caller's to see.
function Lark:space()
    local s = self.s
    if not BLANK[s.text:byte(s.pos)] then return end
    repeat
        local before = s.pos
        s:take "^[ \t\r\n]*()"
        if s:peek(2) == "//" or s:peek() == "#" then s:take "^[^\r\n]*()" end
    until s.pos == before
end

function Lark:regex(pattern, flags, at)
    local r, text, code = core.regex(pattern, flags)
    if not r then self.s:fail(code, text, at) end
    return r
end

-- Behind the opening quote.
function Lark:text()
    local s, out = self.s, {}
    while not s:eat '"' do
        local at = s.pos
        if s:peek():find "^[\r\n]" then s:fail("format", "the line ends too early") end
        local plain = s:take '^([^"\\\r\n]+)()'
        if plain then
            out[#out + 1] = plain
        elseif s:eat "\\" then
            local e = s:take "^(.)()"
            if HEX[e] then
                out[#out + 1] = utf8.char(s:hex(HEX[e]))
            elseif ESCAPES[e] then
                out[#out + 1] = ESCAPES[e]
            else
                s:fail("format", "an unknown escape", at)
            end
        else
            out[#out + 1] = utf8.char(s:char())
        end
    end
    return table.concat(out)
end

local function quote(text) return (text:gsub("[%^%$%\\%.%*%+%?%(%)%[%]%{%}%|/]", "\\%0")) end

function Lark:string(at)
    local s, text = self.s, self:text()
    if s:eat "i" then return self.b:regex(self:regex(quote(text), { icase = true }, at), "raw") end
    if not s:eat ".." then return self.b:lit(text) end
    s:need('"', "a range needs a second text")
    local last = self:text()
    if utf8.len(text) ~= 1 or utf8.len(last) ~= 1 or utf8.codepoint(text) > utf8.codepoint(last) then
        s:fail("format", "a range needs two characters in order", at)
    end
    return self.b:chars({ utf8.codepoint(text), utf8.codepoint(last) }, "raw")
end

-- Behind the opening slash.
function Lark:pattern(at)
    local s, from = self.s, self.s.pos
    local in_class = false
    while true do
        local c = s:take "^([^\r\n])()"
        if not c then s:fail("format", "a regular expression without its end", at) end
        if c == "\\" then
            s:take "^[^\r\n]()"
        elseif c == "[" then
            in_class = true
        elseif c == "]" then
            in_class = false
        elseif c == "/" and not in_class then
            break
        end
    end
    local pattern, flags = s.text:sub(from, s.pos - 2), {}
    for f in (s:take "^(%l*)()" or ""):gmatch "." do
        if f == "i" then
            flags.icase = true
        elseif f == "s" then
            flags.dotall = true
        elseif f ~= "u" and f ~= "m" then
            s:fail("unsupported", ("the flag %s of a regular expression"):format(f), at)
        end
    end
    return self.b:regex(self:regex(pattern, flags, at), "raw")
end

local function is_terminal(name) return not name:find "%l" end

-- A terminal in a rule may be followed by what is ignored.
function Lark:terminal(node)
    if self.in_terminal or not self.has_ignore then return node end
    return self.b:seq { node, self.b:ref(self.gap) }
end

function Lark:atom()
    loop.breathe()
    local s = self.s
    local at = s.pos
    if s:eat '"' then return self:terminal(self:string(at)) end
    if s:peek() == "/" and s:peek(2) ~= "//" then
        s.pos = s.pos + 1
        return self:terminal(self:pattern(at))
    end
    if s:eat "(" then
        local node = s:deeper(self.alternatives, self)
        s:need(")", "')' expected")
        return node
    end
    if s:eat "[" then
        local node = s:deeper(self.alternatives, self)
        s:need("]", "']' expected")
        return self.b:rep(node, 0, 1)
    end
    if s:eat "<" then
        local name = s:take "^([%w_-]+)>()"
        if not name then s:fail("unsupported", "tokens in grammars are not known", at) end
        return self:terminal(self.rules:hole(name, at))
    end
    local name = s:take "^([%a_][%w_]*)()"
    if not name then return nil end
    if s:peek() == "{" then s:fail("unsupported", "templates are not known", at) end
    local after = s.pos
    s:take "^%.%d+()"
    self:space()
    if s:peek() == ":" then -- the next definition
        s.pos = at
        return nil
    end
    s.pos = after
    local node = self.rules:ref(name, at)
    return is_terminal(name) and self:terminal(node) or node
end

-- Whether the ? here belongs to the next definition.
function Lark:defines()
    local s = self.s
    local behind = s.text:match("^%?[%l_][%w_]*()", s.pos)
    return behind and s.text:find("^[%.%d]*%s*:", behind) ~= nil
end

function Lark:repeated(node)
    local s, b = self.s, self.b
    while true do
        if s:eat "*" then
            node = b:rep(node, 0, -1)
        elseif s:eat "+" then
            node = b:rep(node, 1, -1)
        elseif s:peek() == "?" and not self:defines() then
            s.pos = s.pos + 1
            node = b:rep(node, 0, 1)
        elseif s:eat "~" then
            self:space()
            local at = s.pos
            local min = s:count()
            local max = min
            if s:eat ".." then max = s:count() end
            if max < min then s:fail("format", "the bounds of a repetition are out of order", at) end
            node = b:rep(node, min, max)
        else
            return node
        end
        self:space()
    end
end

function Lark:sequence()
    local list = {}
    while true do
        self:space()
        local node = self:atom()
        if not node then break end
        self:space()
        list[#list + 1] = self:repeated(node)
    end
    if self.s:eat "->" then
        self:space()
        if not self.s:take "^[%a_][%w_]*()" then self.s:fail("format", "a name expected") end
        self:space()
    end
    return self.b:seq(list)
end

function Lark:alternatives()
    local list = {}
    repeat list[#list + 1] = self:sequence() until not self.s:eat "|"
    return self.b:alt(list)
end

function Lark:definition()
    local s = self.s
    local at = s.pos
    s:take "^[?!]*()"
    local name = s:take "^([%a_][%w_]*)()"
    if not name then s:fail("format", "a definition expected") end
    if s:peek() == "{" then s:fail("unsupported", "templates are not known", at) end
    s:take "^%.%-?%d+()"
    self:space()
    s:need(":", "':' expected")
    self.in_terminal = is_terminal(name)
    local node = self:alternatives()
    self.in_terminal = false
    self.rules:define(name, node, at)
end

function Lark:common(name, as, at)
    local pattern = COMMON[name]
    if not pattern then self.s:fail("unsupported", ("common.%s is not known"):format(name), at) end
    self.rules:define(as or name, self.b:regex(self:regex(pattern, nil, at), "raw"), at)
end

function Lark:import(at)
    local s = self.s
    self:space()
    local from = s:take "^([%w_.]+)()"
    if not from then s:fail("format", "a name expected") end
    self:space()
    if s:eat "(" then
        if from ~= "common" then s:fail("unsupported", "imports from " .. from, at) end
        repeat
            self:space()
            local name = s:take "^([%w_]+)()"
            if not name then s:fail("format", "a name expected") end
            self:common(name, nil, at)
            self:space()
        until not s:eat ","
        s:need(")", "')' expected")
        return
    end
    local name = from:match "^common%.([%w_]+)$"
    if not name then s:fail("unsupported", "imports from " .. from, at) end
    local as
    if s:eat "->" then
        self:space()
        as = s:take "^([%w_]+)()"
        if not as then s:fail("format", "a name expected") end
    end
    self:common(name, as, at)
end

-- What is ignored: a regex is cut to IGNORE_MAX characters, a terminal's name is taken as it is.
function Lark:ignore()
    local s = self.s
    self:space()
    local at = s.pos
    self.in_terminal = true
    local node
    local name = s:take "^([%a_][%w_]*)()"
    local pattern = name and COMMON[name]
    if not name and s:peek() == "/" then
        s.pos = s.pos + 1
        local from = s.pos
        node = self:pattern(at)
        pattern = s.text:sub(from, s.pos - 1):match "^(.*)/%l*$"
    end
    if pattern then
        local r = self:regex(pattern, nil, at)
        node = self.b:regex(r:length(1, IGNORE_MAX) or r, "raw")
        if name then self.rules:ref(name, at) end
    elseif name then
        node = self.rules:ref(name, at)
    else
        node = node or self:alternatives()
    end
    self.in_terminal = false
    self.ignored[#self.ignored + 1] = node
end

function Lark:directive()
    local s = self.s
    local at = s.pos
    local word = s:take "^%%(%l+)()"
    if word == "ignore" then
        self:ignore()
    elseif word == "import" then
        self:import(at)
    else
        s:fail("unsupported", ("%%%s is not known"):format(word or ""), at)
    end
end

local M = {}

--- Defines the rules of a text in builder b. -> the rule "start" (or opts.root), names of its holes
function M.rule(b, text, opts)
    local s = scanner.new("lark", text)
    local g = setmetatable({ s = s, b = b, rules = scanner.rules(s, b, opts.holes), ignored = {} }, Lark)
    g.has_ignore = text:find "%%ignore" ~= nil
    if g.has_ignore then g.gap = b:rule "what is ignored" end
    g:space()
    while s.pos <= #text do
        if s:peek() == "%" then g:directive() else g:definition() end
        g:space()
    end
    local start, holes = g.rules:finish(opts.root or "start")
    if not g.has_ignore then return start, holes end
    b:define(g.gap, b:rep(b:alt(g.ignored), 0, 2))
    local whole = b:rule "start"
    b:define(whole, b:seq { b:ref(g.gap), b:ref(start) })
    return whole, holes
end

return M
