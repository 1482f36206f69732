--- Checks a value against a JSON schema, as far as arguments of tools need it: type (also a list of types), enum,
--- const, properties, required, additionalProperties = false, items, minItems, maxItems, minimum, maximum, minLength,
--- maxLength, anyOf. Other words are not looked at.

local null = require("cjson").null
local tables = require("llmrun.tables")

local M = {}

local MAX_DEPTH = 50

local function is_list(v) return type(v) == "table" and (#v > 0 or next(v) == nil) end
local function is_object(v) return type(v) == "table" and #v == 0 end

local is = {
    string = function(v) return type(v) == "string" end,
    number = function(v) return type(v) == "number" end,
    integer = function(v) return type(v) == "number" and math.tointeger(v) ~= nil end,
    boolean = function(v) return type(v) == "boolean" end,
    array = is_list,
    object = is_object,
    null = function(v) return v == null end,
}

local function kind_of(v)
    if v == null then return "null" end
    if type(v) == "table" then return is_object(v) and "object" or "array" end
    return math.type(v) == "integer" and "integer" or type(v)
end

local function list_of(values)
    local texts = {}
    for i, v in ipairs(values) do
        texts[i] = type(v) == "string" and '"' .. v .. '"' or v == null and "null" or tostring(v)
    end
    return table.concat(texts, ", ")
end

local check

local function check_object(schema, v, at, depth)
    local required = type(schema.required) == "table" and schema.required or {}
    local properties = type(schema.properties) == "table" and schema.properties or {}
    for _, name in ipairs(required) do
        if v[name] == nil then return nil, ("%s: '%s' is missing"):format(at, name) end
    end
    local keys = {}
    for k in pairs(v) do keys[#keys + 1] = tostring(k) end
    table.sort(keys)
    for _, k in ipairs(keys) do
        local inner = properties[k]
        if inner == nil then inner = schema.additionalProperties end
        if inner == false then
            return nil, ("%s: unknown '%s'; known: %s"):format(at, k,
                table.concat(tables.sorted_keys(properties), ", "))
        elseif type(inner) == "table" then
            local value, why = check(inner, v[k], at .. "." .. k, depth + 1)
            if why then return nil, why end
            v[k] = value
        end
    end
    return v
end

local function check_list(schema, v, at, depth)
    if schema.minItems and #v < schema.minItems then
        return nil, ("%s: at least %d items expected, got %d"):format(at, schema.minItems, #v)
    elseif schema.maxItems and #v > schema.maxItems then
        return nil, ("%s: at most %d items expected, got %d"):format(at, schema.maxItems, #v)
    end
    if type(schema.items) == "table" and next(schema.items) ~= nil then
        for i = 1, #v do
            local value, why = check(schema.items, v[i], ("%s[%d]"):format(at, i - 1), depth + 1)
            if why then return nil, why end
            v[i] = value
        end
    end
    return v
end

local function check_type(schema, v, at)
    local types = schema.type
    if types == nil then return true end
    if type(types) == "string" then types = { types } end
    for _, t in ipairs(types) do
        if is[t] and is[t](v) then return true end
    end
    return nil, ("%s: %s expected, got %s"):format(at, table.concat(types, " or "), kind_of(v))
end

local function check_bounds(schema, v, at)
    if type(v) == "number" then
        if schema.minimum and v < schema.minimum then
            return nil, ("%s: %s is below %s"):format(at, v, schema.minimum)
        elseif schema.maximum and v > schema.maximum then
            return nil, ("%s: %s is above %s"):format(at, v, schema.maximum)
        end
    elseif type(v) == "string" and (schema.minLength or schema.maxLength) then
        local n = utf8.len(v) or #v
        if n < (schema.minLength or 0) or n > (schema.maxLength or math.huge) then
            return nil, ("%s: a text of %d characters is too %s"):format(at, n,
                n < (schema.minLength or 0) and "short" or "long")
        end
    end
    return true
end

function check(schema, v, at, depth)
    if depth > MAX_DEPTH then return nil, at .. ": nested too deeply" end
    local ok, why = check_type(schema, v, at)
    if not ok then return nil, why end
    if type(schema.enum) == "table" then
        local found = false
        for _, e in ipairs(schema.enum) do found = found or e == v end
        if not found then
            return nil, ("%s: one of %s expected, got %s"):format(at, list_of(schema.enum), list_of { v })
        end
    end
    if schema.const ~= nil and schema.const ~= v then
        return nil, ("%s: %s expected, got %s"):format(at, list_of { schema.const }, list_of { v })
    end
    ok, why = check_bounds(schema, v, at)
    if not ok then return nil, why end
    if type(schema.anyOf) == "table" then
        for _, inner in ipairs(schema.anyOf) do
            local value, no = check(inner, v, at, depth + 1)
            if not no then return value end
            why = no
        end
        if why then return nil, why end
    end
    local whole = type(v) == "number" and math.tointeger(v)
    if whole and is.integer(v) and schema.type == "integer" then return whole end
    if is_object(v) and (next(v) ~= nil or schema.type ~= "array") and type(v) == "table" then
        return check_object(schema, v, at, depth)
    elseif is_list(v) then
        return check_list(schema, v, at, depth)
    end
    return v
end

--- The value (whole numbers as integers where the schema wants them), or nil and what is wrong, with its place.
---@param schema table
---@param value any
---@param name? string what the value is called in the message
---@return any value, string? why
function M.check(schema, value, name)
    return check(schema, value, name or "value", 0)
end

return M
