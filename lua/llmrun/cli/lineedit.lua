--- A line editor for terminals: UTF-8, history, one line that scrolls sideways. Without a terminal it just reads lines.
---
--- Keys: arrows, Home, End, Delete, Backspace; Ctrl-A, E, B, F, D, H, K, U, W, L, P, N; Alt-B, F. Pasted text may hold
--- line ends; they are shown as one character. Ctrl-C drops the line, Ctrl-D on an empty one is the end.

local core = require "llmrun.core"

local M = {}

---@class llmrun.LineEdit
local Editor = {}
Editor.__index = Editor

--- history_path: file that keeps the lines of earlier runs, or nil. input: what to read keys with (for tests).
function M.new(history_path, input)
    local self = setmetatable({ history = {}, path = history_path, pending = "" }, Editor)
    self.read = input or core.read
    self.tty = input ~= nil or (core.isatty(0) and core.isatty(1))
    local f = history_path and io.open(history_path, "r")
    if f then
        for line in f:lines() do self.history[#self.history + 1] = line:gsub("\\n", "\n") end
        f:close()
    end
    return self
end

--- Adds a line to the history, and to its file.
function Editor:remember(line)
    if line == "" or line == self.history[#self.history] then return end
    self.history[#self.history + 1] = line
    local f = self.path and io.open(self.path, "a")
    if f then
        f:write((line:gsub("\n", "\\n")), "\n")
        f:close()
    end
end

local function shown(c)
    if c == "\n" then return "\u{21B5}" end
    local code = utf8.codepoint(c)
    return (code < 32 or code == 127) and "?" or c
end

local function width(c)
    local ok, code = pcall(utf8.codepoint, c)
    if not ok or code < 32 then return 1 end
    return core.char_width(code)
end

local function columns(text)
    local n = 0
    for _, code in utf8.codes(text, true) do n = n + core.char_width(code) end
    return n
end

--- Draws prompt and line; what doesn't fit is scrolled out of sight.
function Editor:draw()
    local room = core.term_width() - columns(self.prompt) - 1
    local from, used = self.at, 0
    while from > 1 and used + width(self.chars[from - 1]) <= room // 2 + room % 2 do
        from = from - 1
        used = used + width(self.chars[from])
    end
    -- all of it if it fits
    local whole = 0
    for _, c in ipairs(self.chars) do whole = whole + width(c) end
    if whole <= room then from = 1 end
    local parts, cursor, total = {}, 0, 0
    for i = from, #self.chars do
        local w = width(self.chars[i])
        if total + w > room then break end
        total = total + w
        if i < self.at then cursor = cursor + w end
        parts[#parts + 1] = shown(self.chars[i])
    end
    local move = columns(self.prompt) + cursor
    self.write("\r" .. self.prompt .. table.concat(parts) .. "\27[K\r" .. (move > 0 and "\27[" .. move .. "C" or ""))
end

--- Reads more; nil at the end of input ("eof", as what can't be read is) or a signal.
function Editor:more()
    local s, err = self.read(4096)
    if s == "" or err then return nil, "eof" end
    if s == nil then return nil, "signal" end
    self.pending = self.pending .. s
    return true
end

--- The next byte; nil at the end of input or a signal.
function Editor:byte()
    while self.pending == "" do
        local ok, why = self:more()
        if not ok then return nil, why end
    end
    local b = self.pending:sub(1, 1)
    self.pending = self.pending:sub(2)
    return b
end

function Editor:insert(text)
    for c in text:gmatch("[%z\1-\127\194-\244][\128-\191]*") do
        table.insert(self.chars, self.at, c)
        self.at = self.at + 1
    end
end

local function is_word(c) return c ~= nil and c:find("^[%w\128-\255]") ~= nil end

function Editor:word_left()
    local i = self.at
    while i > 1 and not is_word(self.chars[i - 1]) do i = i - 1 end
    while i > 1 and is_word(self.chars[i - 1]) do i = i - 1 end
    return i
end

function Editor:word_right()
    local i, n = self.at, #self.chars
    while i <= n and not is_word(self.chars[i]) do i = i + 1 end
    while i <= n and is_word(self.chars[i]) do i = i + 1 end
    return i
end

--- Removes characters first .. last and puts the cursor there.
function Editor:cut(first, last)
    for _ = first, last do table.remove(self.chars, first) end
    self.at = first
end

--- Shows the history entry `step` further back.
function Editor:recall(step)
    local to = self.entry - step
    if to < 1 or to > #self.history + 1 then return end
    if self.entry == #self.history + 1 then self.draft = table.concat(self.chars) end
    self.entry = to
    self.chars, self.at = {}, 1
    self:insert(self.history[to] or self.draft)
end

local moves = {
    A = function(e) e:recall(1) end,
    B = function(e) e:recall(-1) end,
    C = function(e) e.at = math.min(e.at + 1, #e.chars + 1) end,
    D = function(e) e.at = math.max(e.at - 1, 1) end,
    H = function(e) e.at = 1 end,
    F = function(e) e.at = #e.chars + 1 end,
}
moves["1"], moves["7"], moves["4"], moves["8"] = moves.H, moves.H, moves.F, moves.F
moves["3"] = function(e) if e.at <= #e.chars then e:cut(e.at, e.at) end end

--- Text up to the end mark of a paste.
function Editor:paste()
    local text = {}
    while true do
        local b = self:byte()
        if not b then return end
        text[#text + 1] = b
        if b == "~" then
            local all = table.concat(text)
            if all:sub(-6) == "\27[201~" then
                self:insert((all:sub(1, -7):gsub("\r\n?", "\n")))
                return
            end
        end
    end
end

function Editor:escape()
    local b = self:byte()
    if b == "b" then self.at = self:word_left() return end
    if b == "f" then self.at = self:word_right() return end
    if b ~= "[" and b ~= "O" then return end
    local args, last = "", self:byte()
    while last and last:find("[%d;]") do
        args = args .. last
        last = self:byte()
    end
    if last == "~" then
        if args == "200" then return self:paste() end
        last = args:match("^%d+")
    elseif args:find(";5$") and last == "C" then
        self.at = self:word_right()
        return
    elseif args:find(";5$") and last == "D" then
        self.at = self:word_left()
        return
    end
    local move = last and moves[last]
    if move then move(self) end
end

local keys = {
    ["\1"] = moves.H, ["\5"] = moves.F, ["\2"] = moves.D, ["\6"] = moves.C, ["\16"] = moves.A, ["\14"] = moves.B,
    ["\8"] = function(e) if e.at > 1 then e:cut(e.at - 1, e.at - 1) end end,
    ["\11"] = function(e) e:cut(e.at, #e.chars) end,
    ["\21"] = function(e) e:cut(1, e.at - 1) end,
    ["\23"] = function(e) e:cut(e:word_left(), e.at - 1) end,
    ["\12"] = function(e) e.write("\27[H\27[2J") end,
    ["\27"] = function(e) e:escape() end,
    ["\4"] = moves["3"],
}
keys["\127"] = keys["\8"]

--- The rest of a character that begins with byte b.
function Editor:character(b)
    local lead = b:byte()
    local n = lead >= 0xF0 and 3 or lead >= 0xE0 and 2 or lead >= 0xC0 and 1 or 0
    for _ = 1, n do b = b .. (self:byte() or "") end
    return utf8.len(b) and b or ""
end

function Editor:edit()
    while true do
        if self.pending == "" then self:draw() end
        local b, why = self:byte()
        if not b then return nil, why end
        if b == "\r" or b == "\n" then return table.concat(self.chars) end
        if b == "\3" then return nil, "interrupt" end
        if b == "\4" and #self.chars == 0 then return nil, "eof" end
        local key = keys[b]
        if key then
            key(self)
        elseif b:byte() >= 32 then
            self:insert(self:character(b))
        end
    end
end

--- A line of what is no terminal; the last one may lack its end.
function Editor:plain_line()
    local parts = {}
    while true do
        local at = self.pending:find("\n", 1, true)
        parts[#parts + 1] = self.pending:sub(1, at and at - 1)
        self.pending = at and self.pending:sub(at + 1) or ""
        if at then return table.concat(parts) end
        local _, why = self:more()
        if why == "eof" then
            local line = table.concat(parts)
            if line == "" then return nil, why end
            return line
        end
        if why == "signal" and core.interrupted() then
            self.pending = table.concat(parts)
            return nil, why
        end
    end
end

--- Reads a line. nil and "eof", "interrupt" or "signal" if there is none.
---@param prompt string
function Editor:line(prompt)
    if not self.tty then return self:plain_line() end
    self.write = self.write or function(s) io.stdout:write(s):flush() end
    self.prompt, self.chars, self.at, self.entry = prompt, {}, 1, #self.history + 1
    core.raw(true)
    self.write("\27[?2004h")
    local line, why = self:edit()
    self.write("\27[?2004l")
    core.raw(false)
    if line then self:draw() end
    self.write("\r\n")
    return line, why
end

return M
