--- Makes waiting possible where plain Lua can't yield: inside require, and in coroutines of the program's own.

local core = require "llmrun.core"
local loop = require "llmrun.loop"

local M = {}

local loading = {} -- name -> { task, ticket }

local function find_loader(name)
    local texts = {}
    for _, searcher in ipairs(package.searchers) do
        local loader, extra = searcher(name)
        if type(loader) == "function" then return loader, extra end
        if type(loader) == "string" then texts[#texts + 1] = loader:gsub("^\n?\t?", "\n\t") end
    end
    error(("module '%s' not found:%s"):format(name, table.concat(texts)), 3)
end

--- As Lua's require; the module's main chunk may wait for the engine. Two tasks that need a module at the same time
--- share one load of it.
local function require_(name)
    if type(name) ~= "string" then
        error(("bad argument #1 to 'require' (string expected, got %s)"):format(type(name)), 2)
    end
    local loaded = package.loaded
    local value = loaded[name]
    if value then return value end
    local other = loading[name]
    if other then
        if other.task == loop.current() then error(("module '%s' requires itself"):format(name), 2) end
        loop.wait(other.ticket, "require")
        return require_(name)
    end
    local loader, extra = find_loader(name)
    local mine <close> = setmetatable({ task = loop.current(), ticket = loop.ticket() }, {
        __close = function(self)
            loading[name] = nil
            loop.fire(self.ticket)
        end,
    })
    loading[name] = mine
    value = loader(name, extra)
    if value ~= nil then loaded[name] = value end
    if loaded[name] == nil then loaded[name] = true end
    return loaded[name], extra
end

--- Replaces the global functions. Returns a function that puts the former ones back.
function M.install()
    local resume, wrap, plain = coroutine.resume, coroutine.wrap, require
    coroutine.resume = core.resume -- luacheck: ignore 122
    coroutine.wrap = core.wrap -- luacheck: ignore 122
    require = require_ -- luacheck: ignore 121
    return function()
        coroutine.resume, coroutine.wrap = resume, wrap -- luacheck: ignore 122
        require = plain -- luacheck: ignore 121
    end
end

return M
