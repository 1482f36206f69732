-- What many places need of plain tables.
local M = {}

--- The keys of a table in ascending order (all of them strings, or all numbers); of nil, none.
function M.sorted_keys(t)
    local keys = {}
    for k in pairs(t or {}) do keys[#keys + 1] = k end
    table.sort(keys)
    return keys
end

--- A new table with the fields of all; of equal names the last counts. nil in between is left out.
function M.merged(...)
    local all = {}
    for i = 1, select("#", ...) do
        for k, v in pairs((select(i, ...)) or {}) do all[k] = v end
    end
    return all
end

return M
