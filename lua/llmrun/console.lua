--- A console's other side: a line is a command or Lua, its answer a text. What reads lines and shows answers is
--- elsewhere (cli/attach.lua over a socket, cli/replay.lua on the terminal).
---
---   local c = console.new { env = { model = m }, commands = { queue = { "who waits", function(rest) ... end } } }
---   local text, ok = c:eval "queue"          c:eval "1 + 1"          c:eval "for i = 1, 3 do print(i) end"
---
--- With limits a line has so much processor time and memory, and can't wait: a loop for ever is ended.

local core = require "llmrun.core"
local tables = require "llmrun.tables"
local errors = require "llmrun.errors"
local null = require("llmrun.json").null

local M = {}

local MAX_TEXT = 1 << 20 -- bytes of an answer

---@class llmrun.Console
local Console = {}
Console.__index = Console

-- Showing values ------------------------------------------------------------------------------------------------------

local MAX_ITEMS, MAX_LEVELS = 100, 4

local function quoted(s)
    if #s > 2000 then return quoted(s:sub(1, 2000)) .. (" ... (%d bytes)"):format(#s) end
    return '"' .. s:gsub('[\\"\n]', { ["\\"] = "\\\\", ['"'] = '\\"', ["\n"] = "\\n" })
        :gsub("[%c\127]", function(c) return ("\\%d"):format(c:byte()) end) .. '"'
end

local function key_text(k)
    if type(k) == "string" and k:find "^[%a_][%w_]*$" then return k end
    return "[" .. (type(k) == "string" and quoted(k) or tostring(k)) .. "]"
end

local function sorted_keys(t)
    local keys, n = {}, rawlen(t)
    for k in next, t do
        if not (math.type(k) == "integer" and k >= 1 and k <= n) then keys[#keys + 1] = k end
        if #keys > 10000 then break end
    end
    table.sort(keys, function(a, b)
        if type(a) == type(b) and (type(a) == "number" or type(a) == "string") then return a < b end
        return tostring(a) < tostring(b)
    end)
    return keys
end

local function show(v, indent, level, seen)
    if type(v) == "string" then return quoted(v) end
    if type(v) ~= "table" then return v == null and "null" or tostring(v) end
    local mt = getmetatable(v)
    if type(mt) == "table" and rawget(mt, "__tostring") and level > 1 then return tostring(v) end
    if seen[v] then return "(as above)" end
    if level > MAX_LEVELS then return "{...}" end
    seen[v] = true
    local items, inner = {}, indent .. "  "
    local n = rawlen(v)
    for i = 1, math.min(n, MAX_ITEMS) do items[#items + 1] = show(rawget(v, i), inner, level + 1, seen) end
    if n > MAX_ITEMS then items[#items + 1] = ("... (%d items)"):format(n) end
    local keys = sorted_keys(v)
    for i = 1, math.min(#keys, MAX_ITEMS) do
        items[#items + 1] = key_text(keys[i]) .. " = " .. show(rawget(v, keys[i]), inner, level + 1, seen)
    end
    if #keys > MAX_ITEMS then items[#items + 1] = ("... (%d fields)"):format(#keys) end
    if #items == 0 then return "{}" end
    local flat = "{ " .. table.concat(items, ", ") .. " }"
    if #flat + #indent <= 100 and not flat:find "\n" then return flat end
    return "{\n" .. inner .. table.concat(items, ",\n" .. inner) .. "\n" .. indent .. "}"
end

--- Raises what is the asker's mistake: a text without a traceback.
function M.fail(text, ...)
    error(setmetatable({ message = text:format(...), code = "invalid" }, errors.Error), 0)
end

--- A value as text for people.
function M.show(v) return show(v, "", 1, {}) end

-- Lines ---------------------------------------------------------------------------------------------------------------

--- opts: env (globals of its Lua, beside those of the program), commands (name -> { help, function(rest) -> text,
--- usage }), seconds and bytes (limits of a line), locked (names of globals that it has not).
function M.new(opts)
    local self = setmetatable({
        commands = opts.commands or {}, seconds = opts.seconds, bytes = opts.bytes or 0,
    }, Console)
    local hidden = {}
    for _, name in ipairs(opts.locked or {}) do hidden[name] = true end
    self.env = setmetatable({
        print = function(...)
            local parts = table.pack(...)
            for i = 1, parts.n do parts[i] = tostring(parts[i]) end
            self:put(table.concat(parts, "\t") .. "\n")
        end,
        show = M.show,
        getmetatable = function(v) -- that of strings is the whole program's: a copy
            local m = getmetatable(v)
            return type(v) == "string" and { __index = m.__index } or m
        end,
        setmetatable = function(t, m) -- no limit reaches a finalizer
            if type(m) == "table" and rawget(m, "__gc") ~= nil then M.fail "a line of the console can't set __gc" end
            return setmetatable(t, m)
        end,
    }, { __index = function(_, key)
        if not hidden[key] then return _G[key] end
    end })
    for k, v in pairs(opts.env or {}) do self.env[k] = v end
    self.commands.help = { "this list", function() return self:help() end }
    return self
end

function Console:put(text)
    if self.n_out >= MAX_TEXT then return end
    self.n_out = self.n_out + #text
    self.out[#self.out + 1] = text
end

function Console:help()
    local lines = {}
    for _, name in ipairs(tables.sorted_keys(self.commands)) do
        local c = self.commands[name]
        lines[#lines + 1] = ("  %-24s %s"):format(name .. (c[3] and " " .. c[3] or ""), c[1])
    end
    lines[#lines + 1] = "Everything else is Lua; an expression is shown."
    return table.concat(lines, "\n")
end

--- The command that a line is, and the rest of the line.
function Console:command(line)
    local name, rest = line:match "^%s*([%a_][%w_]*)%s*(.-)%s*$"
    local c = name and self.commands[name]
    if c and not rest:find "^[=.%[(:,]" then return c, rest end
end

local function run_lua(self, line)
    local text = line:gsub("^%s*=", "")
    local f = load("return " .. text, "=console", "t", self.env)
    if not f then
        local err
        f, err = load(text, "=console", "t", self.env)
        if not f then error(err, 0) end
    end
    local r = table.pack(f())
    for i = 1, r.n do self:put(M.show(r[i]) .. "\n") end
end

local function run(self, line)
    local c, rest = self:command(line)
    if not c then return run_lua(self, line) end
    local text = c[2](rest)
    if text then self:put(text) end
end

--- An error's text: without the console's own frames, and no traceback if only they are in it.
local function tidy(text)
    text = tostring(text):gsub(": can't wait for the engine [^\n]*", ": a line of the console can't wait")
        :gsub("over the (%a+) limit of a hook", "over the %1 limit of a line")
    local message, trace = text:match "^(.-)\nstack traceback:\n(.*)$"
    if not message then return text end
    local frames = {}
    for frame in trace:gmatch "[^\n]+" do
        if frame:find("llmrun/console.lua:", 1, true) then break end
        frames[#frames + 1] = frame
    end
    while #frames > 0 and (frames[#frames]:find "%(%.%.%.tail calls" or frames[#frames]:find "%[C%]: in"
        or frames[#frames]:find "^%s*console:%d+: in") do
        frames[#frames] = nil
    end
    if #frames == 0 then return message end
    return message .. "\nstack traceback:\n" .. table.concat(frames, "\n")
end

--- The answer to a line, and whether it went well.
---@param line string
---@return string text, boolean ok
function Console:eval(line)
    self.out, self.n_out = {}, 0
    if not line:find "%S" then return "", true end
    local ok, err
    if self.seconds then
        ok, err = core.call_limited(self.seconds, self.bytes, run, self, line)
    else
        ok, err = xpcall(run, function(e)
            return type(e) == "string" and debug.traceback(e, 2) or tostring(e)
        end, self, line)
    end
    local text = table.concat(self.out)
    if self.n_out > MAX_TEXT then text = text:sub(1, MAX_TEXT) .. "\n... (cut)" end
    self.out, self.n_out = {}, 0
    if ok then return (text:gsub("\n$", "")), true end
    return text .. tidy(err), false
end

return M
