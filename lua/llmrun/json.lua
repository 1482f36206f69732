--- JSON: reading and writing, exact both ways.
---
---   local value, err = json.decode(text)        local text, err = json.encode(value)
---
--- Arrays stay arrays: decode marks them (json.is_array), so that an empty one is written as [] again; json.array marks
--- one of your own. A table without a mark is an array if it is a sequence, else an object; an empty one is {}. null is
--- json.null, also inside arrays, which so keep their length. Integers of 64 bits stay integers; larger ones, and
--- numbers with a fraction or an exponent, are floats (1.0 is written as 1.0).
---
--- Objects lose the order of their keys, and are written with keys in byte order, unless decode gets ordered = true:
--- then encode and templates keep it. A key that comes twice has its last value.
---
--- Errors (nil, text, code): text that is no JSON, not UTF-8, or half a surrogate pair; a number beyond a float's
--- range, nesting over 512 deep (max_depth), more than a million values (max_values; ordered objects count as three);
--- values that JSON can't hold: NaN, infinities, functions, lists with holes, tables half list and half object,
--- keys that aren't strings, circles, strings that aren't UTF-8 (encode with replace = true writes U+FFFD for these).
--- Metamethods are never called.

local core = require "llmrun.core"
local options = require "llmrun.options"

local M = {}

--- Stands for null.
M.null = require("cjson").null

local array_mt, object_mt = core.json_array_mt, core.json_object_mt
local decode_options = { ordered = "boolean", max_depth = "integer", max_values = "integer" }
local encode_options = { replace = "boolean" }

--- The value that a text stands for; or nil, what is wrong with it, a code ("format", "limit").
---@param text string
---@param opts? { ordered?: boolean, max_depth?: integer, max_values?: integer }
---@return any value, string? err, string? code
function M.decode(text, opts)
    options.check("json.decode", opts, decode_options, 2)
    return core.json_decode(text, opts)
end

--- The text of a value, without blanks; or nil and why it has none.
---@param value any
---@param opts? { replace?: boolean }
---@return string? text, string? err, string? code
function M.encode(value, opts)
    options.check("json.encode", opts, encode_options, 2)
    return core.json_encode(value, opts and opts.replace)
end

--- Marks a table (or a new one) as an array.
---@param t? table
function M.array(t) return setmetatable(t or {}, array_mt) end

--- Marks a table (or a new one) as an object. keys: its keys in the order in which they are to be written.
---@param t? table
---@param keys? string[]
function M.object(t, keys) return setmetatable(t or {}, keys and { __keys = keys } or object_mt) end

local function mark_of(v)
    local mt = type(v) == "table" and getmetatable(v)
    if type(mt) ~= "table" then return nil end
    return rawget(mt, "__keys") and "object" or rawget(mt, "__jsontype")
end

--- Whether encode writes it as an array.
function M.is_array(v)
    if type(v) ~= "table" then return false end
    local mark = mark_of(v)
    if mark then return mark == "array" end
    return rawlen(v) > 0
end

--- Whether encode writes it as an object.
function M.is_object(v) return type(v) == "table" and not M.is_array(v) end

--- Keys of an object: in their order if it has one, else sorted.
function M.keys(t)
    local mt, list = getmetatable(t), {}
    local seen = {}
    for _, k in ipairs(type(mt) == "table" and rawget(mt, "__keys") or {}) do
        if rawget(t, k) ~= nil and not seen[k] then
            seen[k] = true
            list[#list + 1] = k
        end
    end
    local from = #list
    local rest = {}
    for k in next, t do
        if not seen[k] then rest[#rest + 1] = k end
    end
    table.sort(rest, function(a, b) return tostring(a) < tostring(b) end)
    table.move(rest, 1, #rest, from + 1, list)
    return list
end

return M
