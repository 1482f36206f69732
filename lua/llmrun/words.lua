--- Numbers of things for people.

local M = {}

--- "1 replica", "2 replicas"; many: the plural, if it isn't one with an s.
---@param n integer
---@param one string
---@param many? string
---@return string
function M.count(n, one, many) return ("%d %s"):format(n, n == 1 and one or many or one .. "s") end

return M
