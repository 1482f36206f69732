--- The error values that calls of the library raise: a message, a code, and how to print them.
---
--- code is one of the engine's error names ("full", "invalid", "not_found", "unsupported", "state", "script", ...), so
--- that a program can tell what to do: local ok, err = pcall(...); if not ok and err.code == "full" then ... end

local M = {}

---@class llmrun.Error
---@field message string
---@field code string
local Error = {}
Error.__index = Error
M.Error = Error

function Error:__tostring() return self.message end
function Error.__concat(a, b) return tostring(a) .. tostring(b) end

--- Whether a value is an error of the library's.
function M.is(e) return getmetatable(e) == Error end

--- Raises an error of the library's; the message begins with the place in the user's program.
---@param call string the call's name
---@param message string
---@param code? string
function M.raise(call, message, code)
    local where = require("llmrun.loop").where()
    error(setmetatable({ message = ("%s%s: %s"):format(where, call, message), code = code or "invalid" }, Error), 0)
end

--- Passes good results on; raises nil, message, code as an error of the call.
function M.check(call, ok, ...)
    if ok == nil or ok == false then M.raise(call, ...) end
    return ok, ...
end

return M
