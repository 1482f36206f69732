--- Lua files of the user's whose worth is what they return: policies, routers, templates, scripts of architectures.
--- They run to their end at once, before anything else goes on, so they have limits: a loop for ever is an error that
--- says where it was, not a program that hangs.

local core = require "llmrun.core"

local M = {}

--- What such a file, or the function that it returns to make something, may take: seconds of processor time, bytes of
--- Lua memory.
M.seconds, M.bytes = 5, 1 << 30

--- fn(...) within the limits: true and its results, or false and the error with its traceback.
---@param fn function
function M.call(fn, ...)
    local r = table.pack(core.call_limited(M.seconds, M.bytes, fn, ...))
    if r[1] then return table.unpack(r, 1, r.n) end
    local text = tostring(r[2]):gsub("over the (%a+) limit of a hook", "over the %1 limit of loading")
    text = text:gsub("\n%s*%[C%]: in function 'llmrun%.core%.call_limited'.*", "")
    return false, (text:gsub(": can't wait for the engine [^\n]*", ": can't wait while it is loaded"))
end

--- What a file returns (its argument is its path); or nil, text.
---@param path string
function M.load(path)
    local chunk, err = loadfile(path, "t")
    if not chunk then return nil, err end
    local ok, result = M.call(chunk, path)
    if not ok then return nil, result:find(path, 1, true) and result or path .. ": " .. result end
    return result
end

return M
