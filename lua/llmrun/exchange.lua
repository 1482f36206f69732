--- A request and its answer, as route functions see them.
---
---   req: method, path, query (table), headers (names in lower case), body, id, peer, params (of the route), key (name
---        of the API key), models (list), server; req:json([opts]); req.gone
---   res: res:header(name, value), res:write(text) (a stream; waits while the client is slow), res:event(data, name)
---        (one server-sent event), res:finish(); or at once: res:answer(status, text, type), res:json(value, status),
---        res:fail(status, message, param, code); res.status, res.begun
---
--- exchange.fail(...) raises an error that becomes that answer.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local json = require "llmrun.json"
local loop = require "llmrun.loop"

local M = {}

-- Failures -----------------------------------------------------------------------------------------------------------

local Failure = {}
Failure.__index = Failure
Failure.__tostring = function(f) return ("%d %s"):format(f.status, f.message) end

--- Ends the running route function with an answer in OpenAI's error shape.
---@param status integer
---@param message string
---@param param? string the field at fault
---@param code? string
function M.fail(status, message, param, code)
    error(setmetatable({ status = status, message = message, param = param, code = code }, Failure), 0)
end

function M.is_failure(e) return getmetatable(e) == Failure end

local types = {
    [401] = "authentication_error", [403] = "permission_error", [404] = "not_found_error", [429] = "rate_limit_error",
    [501] = "not_implemented_error", [503] = "overloaded_error",
}

--- The body of an error answer.
function M.error_body(status, message, param, code)
    local kind = types[status] or (status < 500 and "invalid_request_error" or "server_error")
    return json.object({
        error = json.object({ message = message, type = kind, param = param or json.null, code = code or json.null },
            { "message", "type", "param", "code" }),
    })
end

-- Request ------------------------------------------------------------------------------------------------------------

local Request = {}
Request.__index = Request

local unescape = require("llmrun.routes").unescape

local function parse_query(text)
    local query = {}
    for pair in text:gmatch("[^&]+") do
        local k, v = pair:match("^([^=]*)=?(.*)$")
        query[unescape(k:gsub("+", " "))] = unescape(v:gsub("+", " "))
    end
    return query
end

--- Path and query of a request's target, which may also be a whole URL.
local function parse_target(target)
    local path = target:gsub("^[Hh][Tt][Tt][Pp][Ss]?://[^/?#]*", ""):gsub("#.*$", "")
    local query
    path, query = path:match("^([^?]*)%??(.*)$")
    if path == "" then path = "/" end
    return path, query
end

--- The body as JSON. Options as json.decode's. Ends the request with a 400 if it is none.
function Request:json(opts)
    local kind = self.headers["content-type"]
    if kind and not kind:lower():find("^%s*application/json%s*$") and not kind:lower():find("^%s*application/json%s*;")
        and not kind:lower():find("^%s*application/[%w.-]+%+json") then
        M.fail(415, "Content-Type: application/json expected", nil, "unsupported_media_type")
    end
    if self.body == "" then M.fail(400, "the request has no body; JSON expected", nil, "invalid_json") end
    local value, err = json.decode(self.body, opts)
    if err then M.fail(400, "the body is no valid JSON: " .. err, nil, "invalid_json") end
    return value
end

-- Response -----------------------------------------------------------------------------------------------------------

local Response = {}
Response.__index = Response

--- Sets a header of the answer to come.
function Response:header(name, value)
    if self.begun then error("res:header: the answer has begun already", 2) end
    self.headers[name] = tostring(value)
    return self
end

--- What to do when the client has gone: the function is ended, here.
local function leave(self)
    self.x.gone = true
    M.fail(499, "the client has gone", nil, "cancelled")
end

local function check_sent(self, ok, err, code)
    if ok then return ok end
    if code == "cancelled" then leave(self) end
    error(err, 3)
end

--- The whole answer.
---@param status integer
---@param text string
---@param kind? string its content type
function Response:answer(status, text, kind)
    if self.begun then error("res:answer: the answer has begun already", 2) end
    if kind then self.headers["Content-Type"] = kind end
    self.begun, self.ended, self.status = true, true, status
    return check_sent(self, self.core:answer(status, self.headers, text))
end

--- The whole answer, a value as JSON.
---@param value any
---@param status? integer
function Response:json(value, status)
    local text, err = json.encode(value, { replace = true })
    if not text then error("res:json: " .. err, 2) end
    return self:answer(status or 200, text, "application/json")
end

--- The whole answer, in OpenAI's error shape.
---@param status integer
---@param message string
---@param param? string the field at fault
---@param code? string
function Response:fail(status, message, param, code)
    if status == 429 or status == 503 then self:header("Retry-After", "1") end
    return self:json(M.error_body(status, message, param, code), status)
end

--- Begins a stream; write does it by itself.
function Response:begin(status, kind)
    if self.begun then error("res:begin: the answer has begun already", 2) end
    if kind then self.headers["Content-Type"] = kind end
    if not self.headers["Content-Type"] then self.headers["Content-Type"] = "text/plain; charset=utf-8" end
    self.begun, self.status = true, status or 200
    return check_sent(self, self.core:begin(self.status, self.headers))
end

--- Waits for one's turn: several tasks may write to one answer, each its piece as a whole.
local function take_turn(self)
    while self.writing do
        local turn = loop.ticket()
        self.turns = self.turns or {}
        table.insert(self.turns, turn)
        loop.wait(turn, "res:write")
        if self.x.gone then leave(self) end
    end
    self.writing = true
end

local function give_turn(self)
    self.writing, self.full = nil, nil
    local turn = self.turns and table.remove(self.turns, 1)
    if turn then loop.fire(turn) end
end

--- Sends a piece. Waits while the client is too slow to take it.
function Response:write(text)
    if self.ended then error("res:write: the answer is complete already", 2) end
    if not self.begun then self:begin(200) end
    take_turn(self)
    self.wrote = core.now()
    local at = check_sent(self, self.core:write(text))
    if at < #text then
        local guard <close> = setmetatable({}, { __close = function() give_turn(self) end }) -- luacheck: ignore 211
        while at < #text do
            self.full = loop.ticket()
            loop.wait(self.full, "res:write")
            if self.x.gone then leave(self) end
            at = at + check_sent(self, self.core:write(text, at))
        end
    else
        give_turn(self)
    end
    return self
end

--- Sends a comment, which clients skip, whenever a stream of events has been silent for so many seconds: proxies and
--- clients cut off what seems dead, and a long prompt may take minutes.
local function keep_alive(self, seconds)
    if seconds <= 0 then return end
    local function look()
        local silent = core.now() - self.wrote
        if silent >= seconds and not self.writing then
            self.sign = loop.spawn_owned(function() self:write(": still at work\n\n") end)
            silent = 0
        end
        self.timer = loop.after(math.max(seconds - silent, 0.01), look)
    end
    self.wrote = core.now()
    self.timer = loop.after(seconds, look)
end

--- Nothing more is sent by itself.
function Response:rest()
    if self.timer then loop.cancel_timer(self.timer) end
    if self.sign then self.sign:cancel("the answer has ended") end
    self.timer, self.sign = nil, nil
end

--- One server-sent event: a text, or a value that is sent as JSON; and its name, if it has one.
function Response:event(data, name)
    if not self.begun then
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"
        self.events = true
        self:begin(200, "text/event-stream")
        keep_alive(self, self.x.req.server.options.keep_alive or 15)
    end
    if type(data) ~= "string" then data = assert(json.encode(data, { replace = true })) end
    return self:write((name and "event: " .. name .. "\n" or "") .. "data: " .. data .. "\n\n")
end

--- The last word after a failure: an error answer; in a stream of events an event with the error. Other streams are cut
--- off, so that the client can tell.
function Response:broken(status, message, param, code)
    if not self.begun then return self:fail(status, message, param, code) end
    if not self.events or self.ended or self.writing then return end
    local body = assert(json.encode(M.error_body(status, message, param, code), { replace = true }))
    self.ended = true
    self.core:write("data: " .. body .. "\n\n")
    self.core:finish()
end

--- Ends a stream.
function Response:finish()
    if self.ended then return end
    if not self.begun then self:begin(200) end
    self.ended = true
    self.core:finish()
end

-- Both ---------------------------------------------------------------------------------------------------------------

local Exchange = {}
Exchange.__index = Exchange

--- server: what req.server is; core_req: the listener's request.
function M.new(server, core_req, id)
    local headers, repeated = core_req:headers()
    local path, query = parse_target(core_req:target())
    local x = setmetatable({ id = id, core = core_req }, Exchange)
    x.req = setmetatable({
        id = id, server = server, models = server.models, method = core_req:method(), path = path, query_text = query,
        query = parse_query(query), headers = headers, repeated = repeated, body = core_req:body(),
        peer = core_req:peer(), params = {},
    }, Request)
    core_req:drop_body()
    x.res = setmetatable({ x = x, core = core_req, headers = {} }, Response)
    return x
end

--- The client has gone: the function is ended where it waits.
function Exchange:lost()
    self.gone, self.req.gone = true, true
    if self.task ~= loop.current() then self.task:cancel("the client has gone") end
end

--- The client has taken enough of the stream to go on.
function Exchange:room()
    local ticket = self.res.full
    if ticket then
        self.res.full = nil
        loop.fire(ticket)
    end
end

M.errors = errors

return M
