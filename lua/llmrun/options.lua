--- Option tables with checked keys: a misspelt name or a wrong type is an error that names the call and what is valid.

local errors = require "llmrun.errors"
local tables = require "llmrun.tables"

local M = {}

local function type_of(v)
    return math.type(v) == "integer" and "integer" or math.type(v) == "float" and "number" or type(v)
end

--- Whether a value is of a type: a name of Lua's, "integer", "any", or several with "|".
function M.is(v, want)
    if want == "any" then return true end
    local t = type_of(v)
    for w in want:gmatch("[^|]+") do
        if t == w or (t == "integer" and w == "number") then return true end
        if w == "integer" and t == "number" and math.tointeger(v) then return true end
    end
    return false
end

local function distance(a, b)
    local row = {}
    for j = 0, #b do row[j] = j end
    for i = 1, #a do
        local diagonal = row[0]
        row[0] = i
        for j = 1, #b do
            local old = row[j]
            local cost = a:byte(i) == b:byte(j) and 0 or 1
            row[j] = math.min(row[j] + 1, row[j - 1] + 1, diagonal + cost)
            diagonal = old
        end
    end
    return row[#b]
end

--- The candidate that a misspelt name most probably means, or nil.
function M.closest(name, candidates)
    local best, best_d
    for _, c in ipairs(candidates) do
        local d = distance(name, c)
        if d <= math.max(1, #name // 3) and (not best_d or d < best_d) then best, best_d = c, d end
    end
    return best
end

--- Checks the options of a call against names -> types. Raises at the caller's caller (level) otherwise.
---@param call string
---@param opts table|nil
---@param known table<string, string>
---@param level? integer
function M.check(call, opts, known, level)
    level = (level or 1) + 1
    if opts == nil then return end
    if type(opts) ~= "table" then
        error(("%s: table of options expected, got %s"):format(call, type(opts)), level)
    end
    for k, v in pairs(opts) do
        local want = known[k]
        if not want then
            local names = tables.sorted_keys(known)
            local hint = type(k) == "string" and M.closest(k, names)
            error(("%s: unknown option %s%s; valid: %s"):format(call, type(k) == "string" and "'" .. k .. "'" or
                "[" .. tostring(k) .. "]", hint and (" (did you mean '" .. hint .. "'?)") or "",
                table.concat(names, ", ")), level)
        elseif not M.is(v, want) then
            error(("%s: option '%s': %s expected, got %s"):format(call, k, want:gsub("|", " or "), type_of(v)), level)
        end
    end
end

--- The option deadline, seconds from now, as a time on the engine's clock; nil without it.
function M.deadline(call, seconds, engine)
    if not seconds then return nil end
    if seconds <= 0 or seconds ~= seconds then errors.raise(call, "deadline: seconds from now expected, above 0") end
    return engine:now() + seconds
end

return M
