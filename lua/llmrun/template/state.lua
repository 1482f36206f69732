-- The one render in progress: what is left of its budget, where it is, and the buffer it writes to.
--
-- A render never yields, so there is at most one at a time in a Lua state and its counters can live in a module table
-- (`S`) instead of travelling through every call. init.lua saves and restores the table around each render.
--
-- Words: a step is the work of about one small closure; string work is charged a step per 16 bytes. An output buffer
-- is { n, bytes, t = {text...}, f = {literal?...} }: piece i is text t[i], and f[i] says whether it is the template's
-- own text (true) or came from data (false).
--
-- Errors inside the template modules are tables { code, msg, pos } with the metatable `Error`; init.lua turns them into
-- "name:line:column: message". Codes: syntax, undefined, type, value, raised, security, limit.

local S = {
    left = 0, -- steps left
    depth = 0, -- macro calls and recursive loops in progress
    pos = 0, -- byte offset in the source of the statement being run
    max_bytes = 8 * 1024 * 1024, -- longest string and longest output
    max_depth = 150, -- deepest nesting of macro calls
    vars = nil, -- the variables of this render
    now = nil, -- seconds since the epoch for strftime_now, or nil for the clock
    out = nil, -- the output buffer
}

local M = { S = S }

local Error = {}
M.Error = Error

---Raises a template error.
---@param code string
---@param fmt string  a string.format pattern when there are further arguments, else plain text
function M.raise(code, fmt, ...)
    local msg = select("#", ...) > 0 and string.format(fmt, ...) or fmt
    error(setmetatable({ code = code, msg = msg }, Error), 0)
end
local raise = M.raise

---Takes n steps from the budget.
function M.charge(n)
    local left = S.left - n
    S.left = left
    if left < 0 then
        raise("limit", "the template takes too many steps")
    end
end

---Charges for making a string (or list) of the given size and refuses one that is too long.
function M.charge_bytes(n)
    if n > S.max_bytes then
        raise("limit", "a string of %.0f bytes is over the limit of %d", n, S.max_bytes)
    end
    local left = S.left - n // 16
    S.left = left
    if left < 0 then
        raise("limit", "the template takes too many steps")
    end
end

function M.new_buffer()
    return { n = 0, bytes = 0, t = {}, f = {} }
end

---Writes one piece. The text is not copied.
---@param text string
---@param literal boolean
function M.emit(text, literal)
    local size = #text
    if size == 0 then
        return
    end
    local out = S.out
    local n = out.n + 1
    out.n, out.t[n], out.f[n] = n, text, literal
    local bytes = out.bytes + size
    out.bytes = bytes
    if bytes > S.max_bytes then
        raise("limit", "the output is over the limit of %d bytes", S.max_bytes)
    end
    local left = S.left - 4 - size // 16
    S.left = left
    if left < 0 then
        raise("limit", "the template takes too many steps")
    end
end

return M
