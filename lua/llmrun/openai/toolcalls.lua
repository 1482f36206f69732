--- Splitting an answer that may call tools: into text that can be shown as it comes, and calls.
---
--- push(piece) returns text that is safe to show: what could be the beginning of a call is held back. finish() returns
--- the rest and the calls, each { id, name, arguments (JSON text) }. What looks like a call but can't be read, or calls
--- a tool that isn't there, stays text.

local json = require "llmrun.json"

local M = {}

-- Texts with which calls begin, per format; `whole`: an answer whose first characters are these is one.
local begins = {
    hermes = { "<tool_call>" },
    mistral = { "[TOOL_CALLS]" },
    llama3 = { "<|python_tag|>", "<function=", whole = { "{" } },
    gemma = { "```tool_code", "```json", whole = { "[", "{" } },
}

local Splitter = {}
Splitter.__index = Splitter

---@param format table of tools.lua
---@param by_name table tools by name
---@param one? boolean only the first call counts
function M.new(format, by_name, one)
    return setmetatable({
        format = format, tools = by_name, one = one, marks = begins[format.name] or { whole = { "" } }, text = "",
        shown = 0, calling = false,
    }, Splitter)
end

--- Length of the longest end of s, from byte `from` on, that a mark begins with.
local function held(s, from, marks)
    local most = 0
    for _, mark in ipairs(marks) do
        for n = math.min(#mark - 1, #s - from + 1), most + 1, -1 do
            if s:sub(-n) == mark:sub(1, n) then
                most = n
                break
            end
        end
    end
    return most
end

local function whole_call(self)
    local first = self.text:match("^%s*(%S)")
    for _, mark in ipairs(self.marks.whole or {}) do
        if mark == "" or not first or first == mark then return true end
    end
    return false
end

--- Text that can be shown now.
function Splitter:push(piece)
    self.text = self.text .. piece
    if self.calling or self.shown == 0 and whole_call(self) then return "" end
    local from = self.shown + 1
    local stop = #self.text - held(self.text, from, self.marks)
    for _, mark in ipairs(self.marks) do
        local at = self.text:find(mark, math.max(1, from - #mark), true)
        if at then
            self.calling = true
            stop = math.min(stop, at - 1)
        end
    end
    if stop < from then return "" end
    -- blanks before a call are not shown, so they wait
    if self.shown == 0 and not self.text:sub(1, stop):find "%S" then return "" end
    self.shown = stop
    return self.text:sub(from, stop)
end

local count, base = 0, ("%08x"):format(math.random(0) & 0xffffffff)

--- A new id of a call.
function M.id()
    count = count + 1
    return ("call_%s%08x"):format(base, count)
end

--- The calls of a whole answer and the text beside them; no calls if one of them is none.
function M.parse(text, format, by_name, one)
    local found, rest = format.parse(text, by_name)
    if #found == 0 then return {}, text end
    local calls = {}
    for i, c in ipairs(found) do
        local arguments = c.arguments and not c.error and by_name[c.name] and json.encode(c.arguments)
        if not arguments then return {}, text end
        calls[i] = { id = M.id(), name = c.name, arguments = arguments }
    end
    if one then calls = { calls[1] } end
    rest = rest:match("^%s*$") and "" or rest
    return calls, rest
end

--- The text that has not been shown, and the calls.
function Splitter:finish()
    local calls, rest = M.parse(self.text, self.format, self.tools, self.one)
    if #calls == 0 then return self.text:sub(self.shown + 1), calls end
    return #rest > self.shown and rest:sub(self.shown + 1) or "", calls
end

-- Answers that are one call in JSON of a known form (constraints.lua).
local Forced = {}
Forced.__index = Forced

---@param form table { arguments = their name in it, list = whether it stands in a list }
function M.forced(form)
    return setmetatable({
        text = "", tail = form.list and 2 or 1, -- bytes behind the arguments
        head = '^%s*%[?%s*{%s*"name":%s*"([^"]*)",%s*"' .. form.arguments .. '":%s*()%S',
    }, Forced)
end

--- Takes a piece; returns the call { id, name } once it is known, and more of the arguments' text.
function Forced:push(piece)
    self.text = self.text .. piece
    if not self.call then
        local name, at = self.text:match(self.head)
        if not name then return nil, "" end
        self.call, self.at, self.sent = { id = M.id(), name = name }, at, at - 1
    end
    local stop = math.max(self.sent, #self.text - self.tail)
    while stop > self.sent and self.text:find("^[\x80-\xbf]", stop + 1) do stop = stop - 1 end
    local more = self.text:sub(self.sent + 1, stop)
    self.sent = stop
    return self.call, more
end

--- The end: the rest of the arguments (only of an answer that was cut short there is any), and whether it was.
function Forced:finish()
    if not self.call then return "", true end
    local whole = json.decode(self.text) ~= nil
    local stop = whole and #self.text - self.tail or #self.text
    local more = self.text:sub(self.sent + 1, stop)
    self.call.arguments = self.text:sub(self.at, stop)
    return more, not whole
end

return M
