--- Routers of simulated fleets: which replica a request goes to. A router is a function(request, replicas) that returns
--- a replica's number, or a table { name =, route = function(self, request, replicas) }.
---
--- request: the trace's row (prompt, output, tenant, session, priority ...) with its `number` and `at`. replicas[i]:
--- outstanding (requests sent there that have not ended), running, waiting, kv_used, kv_cached, kv_total (blocks), as
--- they are when the request comes.

local options = require "llmrun.options"
local userfile = require "llmrun.userfile"

local M = {}

M.names = { "least_loaded", "round_robin", "session" }

--- A number that follows from a text alone.
local function hash(text)
    local h = 0xcbf29ce484222325
    for i = 1, #text do h = (h ~ text:byte(i)) * 0x100000001b3 end
    h = h ~ h >> 32
    return h & 0x7fffffffffffffff
end

--- What a request's prompt begins with, as a text; nil if it shares nothing.
local function beginning(row)
    if row.session then return "s" .. tostring(row.session) end
    if row.blocks and row.blocks[1] then return "b" .. tostring(row.blocks[1]) end
end

local made = {
    least_loaded = function()
        return function(_, _, fleet) return fleet:least() end
    end,
    round_robin = function()
        local last = 0
        return function(_, replicas)
            last = last % #replicas + 1
            return last
        end
    end,
    --- Requests of a session (or with the same first block) go to the replica that has their prefix; others to the
    --- least loaded one.
    session = function()
        return function(row, replicas, fleet)
            local key = beginning(row)
            return key and hash(key) % #replicas + 1 or fleet:least()
        end
    end,
}

--- The function(request, replicas, fleet) that a router, its name or its file stands for, and its name; or nil, text.
---@param what function|table|string|nil
function M.load(what)
    local name
    if what == nil then what = "least_loaded" end
    if type(what) == "string" then
        local key = what:gsub("-", "_")
        if made[key] then return made[key](), key end
        if not what:find("[/.]") then
            local close = options.closest(what, M.names)
            return nil, ("no router '%s'%s; there are %s, and files"):format(what,
                close and " (did you mean '" .. close .. "'?)" or "", table.concat(M.names, ", "))
        end
        local loaded, err = userfile.load(what)
        if err then return nil, err end
        name = what:match("([^/]+)%.lua$") or what
        what = loaded
    end
    if type(what) == "function" then return what, name or "custom" end
    if type(what) == "table" and type(what.route) == "function" then
        local router = what
        return function(...) return router:route(...) end, router.name or name or "custom"
    end
    return nil, "a router is a function(request, replicas), or a table with a function 'route'; got " .. type(what)
end

return M
