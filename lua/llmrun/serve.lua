--- llm.serve: an HTTP server whose endpoints are programs. Each request runs its route's function as a task of its
--- own, so that what they wait for (models, timers, other tasks) batches and interleaves by itself.
---
---   llm.serve { port = 8080, models = { model }, routes = {
---       ["POST /triage"] = function(req, res)
---           local s <close> = req.models[1]:session()
---           s:user(req:json().text)
---           for piece in s:stream { max_tokens = 100 } do res:write(piece) end
---       end } }
---
--- With models, the OpenAI API is there too (openai.lua), and a page at /.
---
--- A function may return its answer: a text, or a table (sent as JSON), and a status; or use res. If its client goes
--- away it is ended where it waits (its <close> handlers run), and with it the model's work for it.
---
--- Who may ask: with api_keys, whoever sends one ("Authorization: Bearer KEY"; all routes but /health need it).
--- Without, the server listens on this machine only unless told otherwise, and then takes no request whose Host is
--- another name (a web page that resolves its own name to this machine would otherwise get in). No other origin is let
--- in by a browser, unless cors names it; without keys, nothing is done for its pages either.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local exchange = require "llmrun.exchange"
local json = require "llmrun.json"
local loop = require "llmrun.loop"
local options = require "llmrun.options"
local routes = require "llmrun.routes"
local sleep = require("llmrun.branch").sleep

local M = {}

---@class llmrun.Server
---@field models llmrun.Model[]
local Server = {}
Server.__index = Server

M.options = {
    host = "string", port = "integer", models = "table", model_names = "table", routes = "table",
    api_keys = "table|string", openai = "boolean|table", page = "boolean|string", cors = "table", hosts = "table",
    scripts = "boolean|table", log = "function",
    request_timeout = "number", max_busy = "number", drain_timeout = "number", keep_alive = "number",
    on_ready = "function",
    max_connections = "integer", max_requests = "integer", max_header = "integer", max_body = "integer",
    max_bodies = "integer", max_stream = "integer", idle_timeout = "number", header_timeout = "number",
    body_timeout = "number",
}
local listener_options = {
    "host", "port", "max_connections", "max_requests", "max_header", "max_body", "max_bodies", "max_stream",
    "idle_timeout", "header_timeout", "body_timeout",
}

local NEW, ROOM, GONE = 1, 2, 4
local MAX_BUSY = 30 -- seconds of processor time

-- Who may ask --------------------------------------------------------------------------------------------------------

--- { name = key }, a list, or one key -> list of { name, key }
local function key_list(keys)
    if keys == nil then return nil end
    if type(keys) == "string" then keys = { keys } end
    local list = {}
    for name, key in pairs(keys) do
        if type(key) ~= "string" or #key < 1 or key:find("%s") then
            errors.raise("llm.serve", "api_keys: keys are texts without blanks")
        end
        list[#list + 1] = { name = type(name) == "string" and name or "key" .. name, key = key }
    end
    if #list == 0 then errors.raise("llm.serve", "api_keys: the table is empty") end
    table.sort(list, function(a, b) return a.name < b.name end)
    for _, k in ipairs(list) do require("llmrun.record").hide(k.key) end
    return list
end

--- The name of the key that the request carries; nil if none is right. All keys are compared, whatever comes.
local function key_of(self, req)
    local given = req.headers.authorization
    given = given and not req.repeated.authorization and given:match("^[Bb][Ee][Aa][Rr][Ee][Rr] +([^%s]+)$") or ""
    local name
    for _, k in ipairs(self.keys) do
        if core.same_secret(given, k.key) then name = k.name end
    end
    return name
end

local function host_name(host)
    return (host:match("^(%[[^%]]*%])") or host:match("^([^:]*)")):lower()
end

--- Whether the Host that a request names is this machine.
local function own_host(self, host)
    if not host then return true end
    local name = host_name(host)
    if self.hosts[name] then return true end
    return name == "localhost" or name:find("%.localhost$") ~= nil or name:find("^127%.%d+%.%d+%.%d+$") ~= nil
        or name == "[::1]"
end

local reading = { GET = true, HEAD = true, OPTIONS = true }

--- Whether a page of another origin, which is not let in, wants something done: browsers send such requests, and only
--- keep the answer from the page. They say who asks, in headers that a page can't set.
local function foreign(self, req)
    local origin, site, host = req.headers.origin, req.headers["sec-fetch-site"], req.headers.host
    if reading[req.method] or site == "same-origin" or site == "none" then return false end
    if self.cors["*"] or origin and self.cors[origin] then return false end
    if site then return true end
    return origin ~= nil and not (host and origin:lower():match("^https?://(.*)$") == host:lower())
end

local open_paths = { ["GET /health"] = true, ["HEAD /health"] = true }

--- nil if the request may go on; else status, code, message.
local function refusal(self, req)
    local line = req.method .. " " .. req.path
    if self.keys and not open_paths[line] and not (line == "GET /" and self.options.page == "open") then
        req.key = key_of(self, req)
        if not req.key then return 401, "invalid_api_key", "a valid API key is needed (Authorization: Bearer KEY)" end
    end
    if self.check_host and (req.repeated.host or not own_host(self, req.headers.host)) then
        return 403, "host_not_allowed", "this server is not called by that host name"
    end
    if not self.keys and foreign(self, req) then
        return 403, "origin_not_allowed", "pages of that origin are not let in (--cors)"
    end
end

local function cors_headers(self, req)
    local origin = req.headers.origin
    if not origin or not (self.cors[origin] or self.cors["*"]) then return nil end
    return {
        ["Access-Control-Allow-Origin"] = origin, ["Vary"] = "Origin",
        ["Access-Control-Allow-Headers"] = "Authorization, Content-Type", ["Access-Control-Allow-Methods"] =
            "GET, POST, OPTIONS",
    }
end

-- Requests -----------------------------------------------------------------------------------------------------------

local function dispatch(self, x)
    local req, res = x.req, x.res
    local cors = cors_headers(self, req)
    for k, v in pairs(cors or {}) do res:header(k, v) end
    if cors and req.method == "OPTIONS" and req.headers["access-control-request-method"] then
        return res:answer(204, "")
    end
    local status, code, message = refusal(self, req)
    if status then
        if status == 401 then res:header("WWW-Authenticate", "Bearer") end
        return res:fail(status, message, nil, code)
    end
    local handler, params, allowed = self.routes:find(req.method, req.path)
    req.route = handler and params.route or "(none)"
    if not handler then
        if not allowed then return res:fail(404, "there is no " .. req.path, nil, "not_found") end
        res:header("Allow", table.concat(allowed, ", "))
        if req.method == "OPTIONS" then return res:answer(204, "") end
        return res:fail(405, ("%s is not done with %s"):format(req.method, req.path), nil, "method_not_allowed")
    end
    req.params = params
    local body, back = handler(req, res)
    if res.begun then return res:finish() end
    if type(body) == "table" then return res:json(body, back) end
    if body ~= nil then return res:answer(back or 200, tostring(body), "text/plain; charset=utf-8") end
    return res:answer(back or 204, "")
end

--- What an error of a handler's becomes: status, message, param, code; nil: a fault of the server's own.
local function explain(e)
    if exchange.is_failure(e) then return e.status, e.message, e.param, e.code end
    if errors.is(e) and e.code == "cancelled" then return 503, e.message, nil, "cancelled" end
end

local function ended(self, x, task)
    local res = x.res
    self.active[x.id] = nil
    res:rest()
    if task.state == "failed" and not x.gone then
        local status, message, param, code = explain(task.error)
        if not status then
            local line = (x.req.method .. " " .. x.req.path):gsub("[^ -~]", "?") -- nothing that a terminal obeys
            self.log(line .. ": " .. (task.trace or tostring(task.error)))
            status, message, code = 500, "the server failed at this request", "internal_error"
        end
        pcall(res.broken, res, status, message, param, code)
    elseif task.state == "cancelled" and not x.gone and not res.begun then
        pcall(res.fail, res, 503, "the request was ended: " .. tostring(task.cancel_reason), nil, "cancelled")
    end
    local status = x.gone and 499 or res.status or 500
    local key = ("%s\0%d"):format(x.req.route or "(none)", status)
    self.counts[key] = (self.counts[key] or 0) + 1
    if x.timer then loop.cancel_timer(x.timer) end
    x.core:close()
    if not x.gone then loop.expect() end
    if self.ending and not next(self.active) then loop.fire(self.idle) end
end

--- Answers a request, an object as the listener gives them.
function Server:take(core_req, id)
    local x = exchange.new(self, core_req, id)
    loop.came()
    self.active[id] = x
    local task = loop.spawn_owned(dispatch, self, x)
    x.task = task
    task:when_done(function(t) ended(self, x, t) end)
    if self.request_timeout then
        x.timer = loop.after(self.request_timeout, function() task:cancel("it took too long") end)
    end
end

local function on_news(self)
    self.core:poll()
    while true do
        local core_req, id, what = self.core:next()
        if not core_req then return end
        if what & NEW ~= 0 then self:take(core_req, id) end
        local x = self.active[id]
        if x and what & GONE ~= 0 then
            x:lost()
        elseif x and what & ROOM ~= 0 then
            x:room()
        end
    end
end

-- The server ---------------------------------------------------------------------------------------------------------

local function model_list(models, given)
    local list, names = {}, {}
    for k, m in pairs(models or {}) do
        if type(m) ~= "table" or type(m.session) ~= "function" then
            errors.raise("llm.serve", ("models[%s]: a model expected, got %s"):format(tostring(k), type(m)))
        end
        list[#list + 1] = m
        names[m] = given and given[m] or type(k) == "string" and k or m.info.name
    end
    table.sort(list, function(a, b) return names[a] < names[b] end)
    if models and #models > 0 then list = table.move(models, 1, #models, 1, {}) end
    return list, names
end

local function listener_config(o)
    local c = {}
    for _, name in ipairs(listener_options) do c[name] = o[name] end
    return c
end

--- A route of the user's: one that computes for ever must not keep all others waiting.
local function own(self, fn)
    if type(fn) ~= "function" then return fn end -- the error is the table of routes'
    local busy = self.options.max_busy or MAX_BUSY
    return function(req, res)
        loop.limit(loop.current(), math.min(busy, self.request_timeout or busy), busy)
        coroutine.yield() -- what comes now runs under the limit
        return fn(req, res)
    end
end

--- Starts a server and returns it; the calling task goes on. Options: see M.run.
---@param o llmrun.ServeOptions
---@return llmrun.Server
function M.start(o)
    options.check("llm.serve", o, M.options, 2)
    o = o or {}
    local list, names = model_list(o.models, o.model_names)
    local self = setmetatable({
        models = list, names = names, active = {}, counts = {}, cors = {}, hosts = {}, options = o,
        log = o.log or function(text) io.stderr:write("llmrun: ", text, "\n") end,
        request_timeout = o.request_timeout, idle = loop.ticket(), over = loop.ticket(), started = core.now(),
    }, Server)
    self.keys = key_list(o.api_keys)
    for _, origin in ipairs(o.cors or {}) do self.cors[origin] = true end
    for _, name in ipairs(o.hosts or {}) do self.hosts[name:lower()] = true end
    self.routes = routes.new()
    require("llmrun.status").add(self)
    if #list > 0 and o.openai ~= false then
        self.openai = require("llmrun.openai").add(self, type(o.openai) == "table" and o.openai or {})
    end
    if #list > 0 and o.page ~= false then require("llmrun.web").add(self) end
    for pattern, fn in pairs(o.routes or {}) do self.routes:add(pattern, own(self, fn)) end
    self.core = errors.check("llm.serve", core.http_new(listener_config(o)))
    local loopback
    self.host, loopback = self.core:host()
    self.port = self.core:port()
    self.check_host = loopback and not self.keys
    if o.scripts and not self.keys and not loopback then
        self.core:close()
        errors.raise("llm.serve", "scripts, from everybody who can reach it? Set an API key, or listen on loopback")
    end
    loop.watch(self.core:fd(), "r", function() on_news(self) end)
    return self
end

--- Answers what has come, takes nothing more, and ends; what takes longer than so many seconds is cut off.
---@param seconds? number
function Server:stop(seconds)
    if self.closed or self.ending then return self:wait() end
    self.ending = true
    self.core:drain()
    local deadline = core.now() + (seconds or self.options.drain_timeout or 30)
    if next(self.active) then
        local timer = loop.after(deadline - core.now(), function() loop.fire(self.idle) end)
        loop.wait(self.idle, "server:stop")
        loop.cancel_timer(timer)
    end
    while not self.closed and self.core:stats().pending > 0 and core.now() < deadline do sleep(0.01) end
    self:close()
end

--- Ends it at once.
function Server:close()
    if self.closed then return end
    self.closed = true
    for _, x in pairs(self.active) do
        if x.task ~= loop.current() then x.task:cancel("the server is ending") end
    end
    loop.unwatch(self.core:fd())
    self.core:close()
    loop.fire(self.over)
end
Server.__close = Server.close

--- Waits until it has ended.
function Server:wait()
    if not self.closed then loop.wait(self.over, "server:wait", function() self:close() end) end
end

--- Its address, as http://HOST:PORT.
---@return string
function Server:url()
    local host = self.host:find(":", 1, true) and "[" .. self.host .. "]" or self.host
    return ("http://%s:%d"):format(host, self.port)
end

--- Serves until SIGTERM, SIGHUP (unless nohup has it ignored) or Ctrl-C, then drains. Options:
---   host ("127.0.0.1"), port (8080; 0: any free one)
---   models: a list, or name -> model; model_names: model -> name
---   routes: "METHOD /path" -> function(req, res); /path/{name} and /path/* match more
---   api_keys: a key, a list, or name -> key
---   openai: false: no OpenAI API; a table: its options, see openai/init.lua
---   scripts: true, or a table of limits: requests may carry samplers and programs, see openai/scripts.lua
---   page: false: no page at /; "open": it comes without a key, and asks for one
---   cors: origins that browsers let in; hosts: further names of this server; log: function(text)
---   request_timeout, drain_timeout (30): seconds; on_ready(server)
---   max_busy (30): seconds that a route may compute without waiting (for the engine, a client, a timer); it is
---     interrupted all the while, so that others go on
---   keep_alive (15; 0: never): seconds of silence after which a stream of events gets a comment, which clients skip
---   limits: max_connections (4096), max_requests (1024 at once), max_header (32 KiB), max_body (64 MiB),
---     max_bodies (256 MiB together), max_stream (256 KiB waiting for a client), idle_timeout (75 s), header_timeout
---     (20 s), body_timeout (120 s)
---@param o llmrun.ServeOptions
function M.run(o)
    local server <close> = M.start(o)
    local fd = errors.check("llm.serve", core.catch_terminate(true))
    local stop <close> = setmetatable({}, { -- luacheck: ignore 211
        __close = function()
            loop.unwatch(fd)
            core.catch_terminate(false)
            core.catch_interrupts("stop")
        end,
    })
    loop.watch(fd, "r", function()
        loop.unwatch(fd)
        server.log("ending: answering what has come")
        loop.spawn(function() server:stop() end)
    end)
    if o.on_ready then o.on_ready(server) end
    server:wait()
end

M.json = json

return M
