--- Which function answers a request: "METHOD /path" -> function. {name} in a path stands for one part of it, a * at the
--- end for all that follows. Exact paths come before patterns, longer patterns before shorter ones. GET answers HEAD.

local errors = require "llmrun.errors"

local M = {}

local Routes = {}
Routes.__index = Routes

--- A text in which bytes may stand as %XX.
function M.unescape(text)
    return (text:gsub("%%(%x%x)", function(h) return string.char(tonumber(h, 16)) end))
end

function M.new() return setmetatable({ exact = {}, patterns = {} }, Routes) end

local function compile(path)
    local names = {}
    local pattern = path:gsub("[%^%$%(%)%%%.%[%]%+%-%?]", "%%%0")
    pattern = pattern:gsub("{([%w_]+)}", function(name)
        names[#names + 1] = name
        return "([^/]+)"
    end)
    pattern = pattern:gsub("%*$", function()
        names[#names + 1] = "rest"
        return "(.+)"
    end)
    return "^" .. pattern .. "$", names
end

--- Adds a route; one that is there already is replaced.
---@param spec string "POST /path"
---@param fn function(req, res)
function Routes:add(spec, fn)
    local method, path = tostring(spec):match("^(%u+) (/%S*)$")
    if not method then
        errors.raise("llm.serve", ("routes: \"METHOD /path\" expected, got '%s'"):format(tostring(spec)))
    elseif type(fn) ~= "function" then
        errors.raise("llm.serve", ("routes['%s']: function expected, got %s"):format(spec, type(fn)))
    end
    if not path:find("[{*]") then
        self.exact[path] = self.exact[path] or {}
        self.exact[path][method] = fn
        return
    end
    for _, p in ipairs(self.patterns) do
        if p.path == path then
            p.methods[method] = fn
            return
        end
    end
    local pattern, names = compile(path)
    table.insert(self.patterns, { path = path, pattern = pattern, names = names, methods = { [method] = fn } })
    table.sort(self.patterns, function(a, b)
        if #a.path ~= #b.path then return #a.path > #b.path end
        return a.path < b.path
    end)
end

local function pick(methods, method) return methods[method] or method == "HEAD" and methods.GET or nil end

local function allowed_of(methods)
    local list = {}
    for m in pairs(methods) do list[#list + 1] = m end
    if methods.GET then list[#list + 1] = "HEAD" end
    list[#list + 1] = "OPTIONS"
    table.sort(list)
    return list
end

--- The function and its parameters (by name, and the path as `route`); or nil, nil and the methods that the path knows
--- (nil: there is no such path).
function Routes:find(method, path)
    local methods = self.exact[path]
    if methods then
        local fn = pick(methods, method)
        if fn then return fn, { route = path } end
        return nil, nil, allowed_of(methods)
    end
    local known
    for _, p in ipairs(self.patterns) do
        local found = table.pack(path:match(p.pattern))
        if found[1] then
            local fn = pick(p.methods, method)
            if fn then
                local params = { route = p.path }
                for i, name in ipairs(p.names) do params[name] = M.unescape(found[i]) end
                return fn, params
            end
            known = known or allowed_of(p.methods)
        end
    end
    return nil, nil, known
end

--- All of them: { "GET /health", ... }, sorted.
function Routes:list()
    local all = {}
    for path, methods in pairs(self.exact) do
        for m in pairs(methods) do all[#all + 1] = m .. " " .. path end
    end
    for _, p in ipairs(self.patterns) do
        for m in pairs(p.methods) do all[#all + 1] = m .. " " .. p.path end
    end
    table.sort(all)
    return all
end

return M
