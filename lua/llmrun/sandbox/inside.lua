--- The inside of a sandbox: runs in a Lua state of its own (lua_sandbox.c) as a coroutine that sandbox.lua resumes.
--- Makes the environment of the user's program and runs it with the same run loop as outside; what it wants of the
--- engine is yielded as plain data and comes back as plain data.
---
--- Nothing here guards the outside: that does the border. What is guarded here is that no call into C can run on and on
--- (where no hook stops it), and that a program gets clear errors.

local core, chunks, debug = core, chunks, debug -- luacheck: ignore 113
local cjson = { null = nil }

local loaded = { ["llmrun.core"] = core, cjson = cjson }
function require(name) -- luacheck: ignore 121
    if loaded[name] == nil then
        local chunk = chunks[name] or error("no module '" .. tostring(name) .. "'", 2)
        loaded[name] = chunk(name) or true
    end
    return loaded[name]
end

function core.interrupted() return false end -- Ctrl-C is the outside's affair

local loop = require "llmrun.loop"
local errors = require "llmrun.errors"
local raw_getmetatable = debug.getmetatable

local MOST = 1e7 -- rounds of a loop in C that nothing can stop

-- Calls to the outside -----------------------------------------------------------------------------------------------

local requests, pending, next_id, waiting = {}, {}, 0, 0
io = { stderr = { write = function(_, ...) -- luacheck: ignore 121
    requests[#requests + 1] = { print = table.concat({ ... }) }
end } }
local config
local kinds = {} -- kind -> class of proxies
local handle_of = setmetatable({}, { __mode = "k" }) -- proxy -> { id =, kind = }
local proxy_of = setmetatable({}, { __mode = "v" }) -- id -> proxy

local function proxy(kind, id)
    local p = proxy_of[id]
    if not p then
        p = setmetatable({}, kinds[kind])
        handle_of[p], proxy_of[id] = { id = id, kind = kind }, p
    end
    return p
end

--- Runs in the coroutine that the outside resumes: gives it what piled up, takes what came back.
local function exchange(seconds) -- luacheck: ignore 431
    local out = requests
    requests = {}
    for _, reply in ipairs(coroutine.yield(seconds or false, out)) do
        local ticket = pending[reply.id]
        if ticket then
            pending[reply.id] = nil
            waiting = waiting - 1
            loop.fire(ticket, reply)
        end
    end
end

function loop.pause(seconds)
    if waiting == 0 and not seconds then return false end
    exchange(seconds) -- with 0 too, so that others have their turn
    return true
end

--- Calls a method of an object outside (0: the sandbox itself) and waits for what it returns.
local function outside(call, object, method, ...)
    loop.check_can_wait(call)
    local args, handles = table.pack(...), {}
    for i = 1, args.n do
        local h = handle_of[args[i]]
        if h then args[i], handles[i] = false, h.id end
    end
    next_id = next_id + 1
    local id, ticket = next_id, loop.ticket()
    requests[#requests + 1] = { id = id, object = object, method = method, args = args, handles = handles }
    pending[id], waiting = ticket, waiting + 1
    local reply = loop.wait(ticket, call, function()
        pending[id], waiting = nil, waiting - 1
        requests[#requests + 1] = { cancel = id }
    end)
    if reply.error then
        local text = reply.error
        if text:sub(1, #call + 2) == call .. ": " then text = text:sub(#call + 3) end
        errors.raise(call, text, reply.code)
    end
    for i, h in pairs(reply.handles) do reply.values[i] = proxy(h.kind, h.id) end
    return table.unpack(reply.values, 1, reply.values.n)
end

local function class(kind, prefix, methods, properties)
    local mt = { __name = "llmrun " .. kind, __metatable = false }
    local table_of = {}
    for _, method in ipairs(methods) do
        local call = prefix .. method
        table_of[method] = function(self, ...)
            local h = handle_of[self]
            if not h or h.kind ~= kind then
                error(("%s: a %s expected as the first argument (call it with a colon)"):format(call, kind), 2)
            end
            return outside(call, h.id, method, ...)
        end
    end
    local readable = {}
    for _, name in ipairs(properties) do readable[name] = true end
    function mt.__index(self, key)
        if readable[key] then return (outside(prefix .. key, handle_of[self].id, "get", key)) end
        return table_of[key]
    end
    function mt.__newindex() error(("a %s has no fields of your own"):format(kind), 2) end
    mt.__close = table_of.close and function(self) return table_of.close(self) end
    mt.__tostring = function() return "llmrun " .. kind end
    kinds[kind] = mt
    return table_of
end

--- for piece in s:stream{...}: an iterator over the object outside.
local function stream_of(methods)
    local start = methods.stream
    function methods.stream(self, opts)
        local st = start(self, opts)
        local id = handle_of[st].id
        local guard = setmetatable({}, { __close = function() outside("s:stream", id, "close") end })
        return function() return (outside("s:stream", id, "next")) end, nil, nil, guard
    end
end

-- The environment ----------------------------------------------------------------------------------------------------

local function plain_list(what, t)
    if type(t) ~= "table" then return end
    local mt = raw_getmetatable(t)
    if type(mt) == "table" and rawget(mt, "__len") ~= nil then
        error(what .. ": a table with __len can't be used here in a sandbox", 3)
    end
end

local function bounded(what, n)
    if n > MOST then error(("%s: %d elements are too many in a sandbox"):format(what, n), 3) end
end

local function safe_table()
    local t = {}
    for k, v in pairs(table) do t[k] = v end
    for _, name in ipairs { "insert", "remove", "sort", "concat", "unpack" } do
        local fn = table[name]
        t[name] = function(list, ...)
            plain_list("table." .. name, list)
            return fn(list, ...)
        end
    end
    local concat, unpack = t.concat, t.unpack
    function t.concat(list, sep, i, j)
        if math.type(i) and math.type(j) then bounded("table.concat", j - i) end
        return concat(list, sep, i, j)
    end
    function t.unpack(list, i, j)
        if math.type(i) and math.type(j) then bounded("table.unpack", j - i) end
        return unpack(list, i, j)
    end
    function t.move(a, f, e, to, b)
        if math.type(f) and math.type(e) then bounded("table.move", e - f) end
        return table.move(a, f, e, to, b)
    end
    return t
end

local function safe_string()
    local s, rep = {}, string.rep
    for k, v in pairs(string) do s[k] = v end
    function s.rep(text, n, sep)
        if #text == 0 and (sep == nil or #sep == 0) then return "" end
        return rep(text, n, sep)
    end
    return s
end

--- As xpcall, but the handler runs once the stack is unwound: inside of an error no hook could stop it.
local function safe_xpcall(fn, handler, ...)
    if type(handler) ~= "function" then error("bad argument #2 to 'xpcall' (function expected)", 2) end
    local r = table.pack(pcall(fn, ...))
    if r[1] then return table.unpack(r, 1, r.n) end
    return false, handler(r[2])
end

local function safe_setmetatable(t, mt)
    if type(mt) == "table" and rawget(mt, "__gc") ~= nil then
        error("setmetatable: finalizers (__gc) are not allowed in a sandbox", 2)
    end
    return setmetatable(t, mt)
end

local env

local function safe_load(chunk, name, mode, e)
    if mode ~= nil and mode ~= "t" and mode ~= "bt" then
        return nil, "load: binary chunks are not allowed in a sandbox"
    end
    if type(chunk) == "function" then
        local parts, size = {}, 0
        for piece in chunk do
            if piece == "" then break end
            if type(piece) ~= "string" then error("load: reader function must return a string", 2) end
            parts[#parts + 1], size = piece, size + #piece
            if size > 1 << 20 then return nil, "load: a chunk of more than 1 MiB" end
        end
        chunk = table.concat(parts)
    end
    if type(chunk) ~= "string" then error("bad argument #1 to 'load' (string expected)", 2) end
    if #chunk > 1 << 20 then return nil, "load: a chunk of more than 1 MiB" end
    if e == nil then e = env end
    name = tostring(name or chunk):sub(1, 200)
    if name:find("^[@=]") then name = name:sub(2) end
    return load(chunk, "=" .. name, "t", e) -- no name that looks like one of our modules
end

local printed = 0
local function put(call, text)
    printed = printed + #text
    if printed > config.output then
        error(("%s: over the limit of %d bytes of output"):format(call, config.output), 3)
    end
    requests[#requests + 1] = { print = text }
end

local function safe_print(...)
    local parts = table.pack(...)
    for i = 1, parts.n do parts[i] = tostring(parts[i]) end
    put("print", table.concat(parts, "\t") .. "\n")
end

local function safe_write(...)
    for i, v in ipairs { ... } do
        if type(v) ~= "string" and type(v) ~= "number" then
            error(("bad argument #%d to 'write' (string expected, got %s)"):format(i, type(v)), 2)
        end
        put("write", tostring(v))
    end
end

--- Modules that the program may require: texts, run once each, in the same environment.
local function requirer(modules)
    local done, loading = {}, {}
    return function(name)
        if done[name] ~= nil then return done[name] end
        local text = type(name) == "string" and modules[name]
        if not text then error(("module '%s' is not there"):format(tostring(name)), 2) end
        if loading[name] then error(("module '%s' requires itself"):format(name), 2) end
        loading[name] = true
        local chunk, err = load(text, "=" .. name, "t", env)
        if not chunk then error(err, 2) end
        local value = chunk(name)
        loading[name] = nil
        done[name] = value == nil and true or value
        return done[name]
    end
end

local function copy(t, ...)
    local c = {}
    for _, name in ipairs { ... } do c[name] = t[name] end
    return c
end

local function library()
    local branch, best = require "llmrun.branch", require "llmrun.best"
    local llm = {
        spawn = branch.spawn, all = branch.all, any = branch.any, race = branch.race, map = branch.map,
        sleep = branch.sleep, timeout = branch.timeout, first_valid = best.first_valid, best_of = best.best_of,
    }
    for kind, c in pairs(config.classes) do
        local methods = class(kind, c.prefix, c.methods, c.properties)
        if methods.stream then stream_of(methods) end
    end
    for name, id in pairs(config.objects) do llm[name] = proxy(id.kind, id.id) end
    return llm
end

local function environment()
    local s = safe_string()
    raw_getmetatable("").__index = s
    raw_getmetatable("").__metatable = false
    local json = require "llmrun.json"
    env = {
        assert = assert, error = error, getmetatable = getmetatable, ipairs = ipairs, next = next, pairs = pairs,
        pcall = pcall, rawequal = rawequal, rawget = rawget, rawlen = rawlen, rawset = rawset, select = select,
        tonumber = tonumber, tostring = tostring, type = type, _VERSION = _VERSION,
        xpcall = safe_xpcall, setmetatable = safe_setmetatable, load = safe_load, print = safe_print,
        write = safe_write, require = requirer(config.modules), string = s, table = safe_table(),
        math = copy(math, "abs", "acos", "asin", "atan", "ceil", "cos", "deg", "exp", "floor", "fmod", "huge", "log",
            "max", "maxinteger", "min", "mininteger", "modf", "pi", "rad", "random", "randomseed", "sin", "sqrt", "tan",
            "tointeger", "type", "ult"),
        utf8 = copy(utf8, "char", "charpattern", "codes", "codepoint", "len", "offset"),
        coroutine = copy(coroutine, "create", "isyieldable", "running", "status", "yield"),
        os = {
            time = function() return math.floor(config.epoch + core.now() - config.began) end,
            clock = function() return core.now() - config.began end,
        },
        json = copy(json, "decode", "encode", "array", "object", "null", "is_array", "is_object"),
        llm = not config.sampler and library() or nil,
    }
    if config.sampler then env.print, env.write = nil, nil end
    env.coroutine.resume, env.coroutine.wrap, env.coroutine.close = core.resume, core.wrap, function(co)
        if coroutine.status(co) == "running" or coroutine.status(co) == "normal" then
            error(("cannot close a %s coroutine"):format(coroutine.status(co)), 2)
        end
        return core.close(co)
    end
    for name, value in pairs(config.globals) do env[name] = value end
    env._G = env
    return env
end

--- The program: config (plain data) -> the last requests, "done" and its results, or "failed", a text, a code.
local function main(c, ...)
    config = c
    cjson.null = c.null
    local chunk, err = load(c.source, "=" .. c.name, "t", environment())
    if config.sampler then
        if not chunk then error(err, 0) end
        return require("llmrun.sandbox.stages").run(chunk, c)
    end
    if not chunk then return requests, "failed", err, "format" end
    local results = table.pack(loop.run(chunk, ...))
    if results[1] ~= "done" then return requests, "failed", tostring(results[2]), "script" end
    return requests, "done", table.pack(table.unpack(results, 2, results.n))
end

return main(...)
