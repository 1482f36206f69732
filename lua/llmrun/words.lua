--- Texts for people: numbers of things, and what others wrote.

local M = {}

--- "1 replica", "2 replicas"; many: the plural, if it isn't one with an s.
---@param n integer
---@param one string
---@param many? string
---@return string
function M.count(n, one, many) return ("%d %s"):format(n, n == 1 and one or many or one .. "s") end

local QUOTED = 200 -- bytes of a text that somebody else wrote

--- As fmt:format(...), with long texts among the arguments cut: for messages that quote what a file or a client says.
function M.quoting(fmt, ...)
    local args = table.pack(...)
    for i = 1, args.n do
        if type(args[i]) == "string" and #args[i] > QUOTED then
            args[i] = args[i]:sub(1, QUOTED):gsub("[\xC0-\xFF][\x80-\xBF]*$", "") .. "..."
        end
    end
    return fmt:format(table.unpack(args, 1, args.n))
end

return M
