--- Reading the fields of a request: their types and bounds, and the 400 that names a wrong one. null is the same as a
--- field that is not there.

local exchange = require "llmrun.exchange"
local json = require "llmrun.json"

local M = {}

local function show(v)
    if type(v) == "string" then
        if #v > 40 then v = v:sub(1, utf8.offset(v, 0, 38) - 1) .. "..." end
        return ("'%s'"):format(v)
    elseif type(v) == "table" then
        return json.is_array(v) and "an array" or "an object"
    elseif v == json.null then
        return "nothing (or null)"
    end
    return tostring(v)
end
M.show = show

--- Ends the request with a 400.
---@param param string
---@param text string
---@param code? string
function M.bad(param, text, code) exchange.fail(400, ("%s: %s"):format(param, text), param, code or "invalid_value") end

local function wrong_type(param, want, v)
    M.bad(param, ("%s expected, got %s"):format(want, show(v)), "invalid_type")
end
M.wrong_type = wrong_type

--- body[name], nil for null.
function M.get(body, name)
    local v = body[name]
    if v == json.null then return nil end
    return v
end

local function check_range(param, v, min, max)
    if (min and v < min) or (max and v > max) then
        local range = min and max and ("%s to %s"):format(min, max) or min and ("%s or more"):format(min)
            or ("%s or less"):format(max)
        M.bad(param, ("%s expected, got %s"):format(range, show(v)))
    end
    return v
end

--- Checks an integer; min and max are inclusive.
function M.integer(param, v, min, max)
    if v == nil then return nil end
    local n = type(v) == "number" and math.tointeger(v) or nil
    if not n then wrong_type(param, "integer", v) end
    return check_range(param, n, min, max)
end

function M.number(param, v, min, max)
    if v == nil then return nil end
    if type(v) ~= "number" then wrong_type(param, "number", v) end
    return check_range(param, v, min, max)
end

function M.boolean(param, v)
    if v == nil then return nil end
    if type(v) ~= "boolean" then wrong_type(param, "boolean", v) end
    return v
end

--- Checks how many bytes texts have. what: how they are called ("bytes").
function M.fits(param, bytes, max, what)
    if bytes > max then
        M.bad(param, ("at most %d %s expected, got %d"):format(max, what or "bytes", bytes), "string_too_long")
    end
end

--- Checks a text; max: its longest length in bytes.
function M.text(param, v, max)
    if v == nil then return nil end
    if type(v) ~= "string" then wrong_type(param, "string", v) end
    if max then M.fits(param, #v, max) end
    return v
end

function M.object(param, v)
    if v == nil then return nil end
    if not json.is_object(v) then wrong_type(param, "object", v) end
    return v
end

--- Checks an array of at most max items; check(param, item) for each.
function M.array(param, v, max, check)
    if v == nil then return nil end
    if not json.is_array(v) then wrong_type(param, "array", v) end
    if max and #v > max then M.bad(param, ("at most %d items expected, got %d"):format(max, #v), "array_too_long") end
    if check then
        for i, item in ipairs(v) do
            if item == json.null then item = nil end
            check(("%s[%d]"):format(param, i - 1), item)
        end
    end
    return v
end

--- Checks that it is one of a few texts.
function M.choice(param, v, choices)
    if v == nil then return nil end
    if type(v) ~= "string" then wrong_type(param, "string", v) end
    for _, c in ipairs(choices) do
        if c == v then return v end
    end
    M.bad(param, ("one of %s expected, got %s"):format(table.concat(choices, ", "), show(v)))
end

--- A reader of an object's fields: r:integer(name, ...) and so on.
local Reader = {}
Reader.__index = Reader

---@param body table
---@param prefix? string put before the names in messages
---@param names? table<string, string> what fields are called in this object
function M.reader(body, prefix, names)
    return setmetatable({ body = body, prefix = prefix or "", names = names or {} }, Reader)
end

function Reader:get(name) return M.get(self.body, self.names[name] or name) end

for _, kind in ipairs { "integer", "number", "boolean", "text", "object", "array", "choice" } do
    local check = M[kind]
    Reader[kind] = function(self, name, ...)
        name = self.names[name] or name
        return check(self.prefix .. name, M.get(self.body, name), ...)
    end
end

--- The fields of a body that must be an object. names: see reader.
function M.read(req, names)
    local body = req:json { ordered = true }
    if not json.is_object(body) then
        exchange.fail(400, "the body is no JSON object but " .. show(body), nil, "invalid_type")
    end
    return M.reader(body, nil, names)
end

return M
