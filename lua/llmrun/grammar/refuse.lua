--- Errors of the grammar front ends: raised as tables inside, given as nil, text, code outside.

local M = {}

local Refusal = {}
local MAX_TEXT = 400

--- Raises a refusal. code: "format" (the text is wrong), "unsupported" (right, but it can't be enforced), "limit",
--- "invalid" (nothing can match).
function M.raise(code, text, ...)
    if select("#", ...) > 0 then text = text:format(...) end
    if #text > MAX_TEXT then text = text:sub(1, MAX_TEXT // 2) .. " ... " .. text:sub(-MAX_TEXT // 2) end
    error(setmetatable({ code = code, text = text }, Refusal), 0)
end

--- Calls fn(...). -> its result; or nil, text, code. Other errors are raised on.
function M.guard(fn, ...)
    local ok, result = pcall(fn, ...)
    if ok then return result end
    if getmetatable(result) == Refusal then return nil, result.text, result.code end
    if type(result) == "string" and result:find("stack overflow", 1, true) then
        return nil, "nested too deeply", "limit"
    end
    error(result, 0)
end

--- Passes on what a core function returned; nil, text, code becomes a refusal with the place in front.
function M.check(at, value, text, code)
    if value == nil then M.raise(code or "invalid", "%s: %s", at, text) end
    return value
end

--- Calls a method of a builder; its error becomes a refusal.
function M.build(builder, at, method, ...)
    local ok, result = pcall(builder[method], builder, ...)
    if ok then return result end
    local text, code = builder:error()
    if not text then error(result, 0) end
    return M.raise(code, "%s: %s", at, text)
end

return M
