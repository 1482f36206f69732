--- Options as JSON can hold them, and back: what JSON has no word for is an object whose only key is "$".
---
---   { "$": "inf" | "-inf" | "nan" }   such a number
---   { "$": "hex", "v": "00ff" }       a text that is not UTF-8
---   { "$": "pairs", "v": [[k, v]] }   a table whose keys are not all texts
---   { "$": "fn", "v": n }             a function: what it gave stands in lines of its own (n, 0: it was not kept)

local json = require "llmrun.json"

local M = {}

local special = { inf = math.huge, ["-inf"] = -math.huge, nan = 0 / 0 }
local MAX_DEPTH = 100

local function number(v)
    if v ~= v then return { ["$"] = "nan" } end
    if v == math.huge then return { ["$"] = "inf" } end
    if v == -math.huge then return { ["$"] = "-inf" } end
    return v
end

local function text(v)
    if utf8.len(v) then return v end
    return { ["$"] = "hex", v = (v:gsub(".", function(c) return ("%02x"):format(c:byte()) end)) }
end

local function is_list(v)
    local n = 0
    for k in pairs(v) do
        if math.type(k) ~= "integer" or k < 1 then return false end
        n = n + 1
    end
    return n == #v and n > 0
end

local function all_texts(v)
    for k in pairs(v) do
        if type(k) ~= "string" or not utf8.len(k) then return false end
    end
    return v["$"] == nil
end

local encode

local function from_table(v, fns, depth)
    if depth > MAX_DEPTH then error("options nested too deep for a recording", 0) end
    if json.is_array(v) and getmetatable(v) or is_list(v) then
        local list = json.array()
        for i = 1, #v do list[i] = encode(v[i], fns, depth) end
        return list
    elseif all_texts(v) then
        local keys, out = json.keys(v), {}
        for _, k in ipairs(keys) do out[k] = encode(v[k], fns, depth) end
        return json.object(out, keys)
    end
    local list = json.array()
    for k, x in pairs(v) do list[#list + 1] = json.array { encode(k, fns, depth), encode(x, fns, depth) } end
    table.sort(list, function(a, b) return tostring(a[1]) < tostring(b[1]) end)
    return { ["$"] = "pairs", v = list }
end

--- fns: function -> number, of those whose answers are kept.
function encode(v, fns, depth)
    local kind = type(v)
    if kind == "number" then return math.type(v) == "integer" and v or number(v) end
    if kind == "string" then return text(v) end
    if kind == "table" then return from_table(v, fns, depth + 1) end
    if kind == "function" or kind == "userdata" and v ~= json.null then
        return { ["$"] = "fn", v = fns and fns[v] or 0 }
    end
    return v
end

---@param v any
---@param fns? table<function, integer>
function M.encode(v, fns) return encode(v, fns, 0) end

--- The value again. fn(n): what stands for the function of that number.
---@param v any
---@param fn? fun(n: integer): any
function M.decode(v, fn)
    if type(v) ~= "table" then return v end
    local mark = rawget(v, "$")
    if mark == nil then
        local out = setmetatable({}, getmetatable(v))
        for k, x in pairs(v) do out[k] = M.decode(x, fn) end
        return out
    elseif special[mark] then
        return special[mark]
    elseif mark == "hex" and type(v.v) == "string" then
        return (v.v:gsub("%x%x", function(h) return string.char(tonumber(h, 16)) end))
    elseif mark == "pairs" and type(v.v) == "table" then
        local out = {}
        for _, p in ipairs(v.v) do
            local k = type(p) == "table" and M.decode(p[1], fn)
            if k ~= nil and k == k then out[k] = M.decode(p[2], fn) end
        end
        return out
    elseif mark == "fn" then
        return fn and fn(math.tointeger(v.v) or 0)
    end
    error("unknown mark '" .. tostring(mark) .. "'", 0)
end

return M
