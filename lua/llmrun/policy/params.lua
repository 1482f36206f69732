--- What a policy may be told: a file may return { params = {...}, make = function(options) ... return policy end }.
---
---   params = {
---       quantum = { 64, min = 1, max = 65536, integer = true, log = true, help = "tokens of the first level" },
---       drop = { false, help = "ends requests whose deadline has passed" },
---       order = { "age", choices = { "age", "length" } },
---       weights = { type = "table", help = "tenant -> share" },
---   }
---
--- The first value is the default, which says the type where `type` does not. Options are checked and completed before
--- make gets them: names that are not there, other types, numbers outside min and max are refused. tune.lua looks for
--- good values between min and max (or search = { low, high }), evenly or by the logarithm, and among choices; other
--- text and tables it leaves alone.

local options = require "llmrun.options"

local M = {}

local kinds = { boolean = true, number = true, string = true, table = true }

local function kind_of(p)
    local kind = p.type or type(p[1])
    if p.type == "integer" then return "number" end
    return kinds[kind] and kind or "any"
end

local function sorted(t)
    local names = {}
    for name in pairs(t) do names[#names + 1] = tostring(name) end
    table.sort(names)
    return names
end

--- What is wrong with a table of parameters, or nothing.
function M.flaw(params)
    if type(params) ~= "table" then return "params: a table expected, got " .. type(params) end
    for name, p in pairs(params) do
        if type(name) ~= "string" or type(p) ~= "table" then
            return ("params.%s: a table { default, min =, max =, help = ... } expected"):format(tostring(name))
        end
        for _, key in ipairs { "min", "max" } do
            if p[key] ~= nil and type(p[key]) ~= "number" then
                return ("params.%s.%s: number expected, got %s"):format(name, key, type(p[key]))
            end
        end
    end
end

local function check_number(name, p, v)
    local n = tonumber(v)
    if not n or n ~= n or (p.integer and not math.tointeger(n)) then
        return nil, ("option '%s': %s expected, got '%s'"):format(name, p.integer and "integer" or "number",
            tostring(v))
    end
    if (p.min and n < p.min) or (p.max and n > p.max) then
        return nil, ("option '%s': %s to %s expected, got %s"):format(name, tostring(p.min or "any"),
            tostring(p.max or "any"), tostring(v))
    end
    return p.integer and math.tointeger(n) or n
end

local function check(name, p, v)
    local kind = kind_of(p)
    if kind == "number" then return check_number(name, p, v) end
    if kind == "boolean" and (v == "true" or v == "false") then v = v == "true" end
    if kind ~= "any" and type(v) ~= kind then
        return nil, ("option '%s': %s expected, got %s"):format(name, kind,
            type(v) == "string" and "'" .. v .. "'" or type(v))
    end
    for _, c in ipairs(p.choices or {}) do
        if c == v then return v end
    end
    if p.choices then
        return nil, ("option '%s': one of %s expected, got '%s'"):format(name, table.concat(p.choices, ", "), v)
    end
    return v
end

--- Options, checked and with the defaults of those that are not given; or nil and what is wrong. Numbers and booleans
--- may be texts, as a command line has them.
---@param params table
---@param opts? table
---@return table? complete, string? err
function M.complete(params, opts)
    local out = {}
    for _, name in ipairs(sorted(opts or {})) do
        local p = params[name]
        if not p then
            local names = sorted(params)
            local close = options.closest(name, names)
            return nil, ("unknown option '%s'%s; %s"):format(name, close and " (did you mean '" .. close .. "'?)" or "",
                #names > 0 and "valid: " .. table.concat(names, ", ") or "this policy takes none")
        end
        local v, err = check(name, p, opts[name])
        if v == nil then return nil, err end
        out[name] = v
    end
    for name, p in pairs(params) do
        if out[name] == nil then out[name] = p[1] end
    end
    return out
end

--- "mlfq:quantum=128,weights.chat=4" -> "mlfq", { quantum = "128", weights = { chat = 4 } } (numbers stay texts where
--- complete reads them); nothing but the name without options. Or nil and what is wrong.
---@param text string
---@return string? name, table? opts
function M.parse(text)
    local name, rest = text:match("^(.-):(.*)$")
    if not name then return text, nil end
    local opts = {}
    for part in rest:gmatch("[^,]+") do
        local key, value = part:match("^%s*([^=]-)%s*=%s*(.-)%s*$")
        if not key or key == "" then return nil, ("%s: OPTION=VALUE expected, got '%s'"):format(name, part) end
        local outer, inner = key:match("^([^.]+)%.(.+)$")
        if outer then
            if type(opts[outer]) ~= "table" then opts[outer] = {} end
            opts[outer][inner] = tonumber(value) or value
        else
            opts[key] = value
        end
    end
    return name, opts
end

--- The policies of a list "fcfs,mlfq:quantum=128,levels=4,own.lua": a part OPTION=VALUE belongs to the one before.
---@param text string
---@return string[]
function M.split(text)
    local list = {}
    for part in text:gmatch("[^,]+") do
        part = part:match("^%s*(.-)%s*$")
        if #list > 0 and part:find("=", 1, true) and not part:match("^[^=]*:") then
            list[#list] = list[#list] .. (list[#list]:find(":", 1, true) and "," or ":") .. part
        elseif part ~= "" then
            list[#list + 1] = part
        end
    end
    return list
end

return M
