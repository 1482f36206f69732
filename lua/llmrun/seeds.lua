--- Seeds for requests that name none: from the system's randomness, or from llm.seed(n), counted up, so that a program
--- that always asks in the same order always gets the same.

local M = {}

local base, count

local function system_seed()
    local f = io.open("/dev/urandom", "rb")
    if not f then return os.time() end
    local bytes = f:read(7)
    f:close()
    return (string.unpack("<I7", bytes))
end

--- Sets the seed from which those of later requests follow.
---@param seed integer
function M.set(seed)
    if math.type(seed) ~= "integer" then error("llm.seed: integer expected, got " .. type(seed), 3) end
    base, count = seed, 0
end

function M.next()
    if not base then base, count = system_seed(), 0 end
    count = count + 1
    return (base + (count - 1) * 0x9E3779B97F4A7C1) & 0x1FFFFFFFFFFFFF
end

return M
