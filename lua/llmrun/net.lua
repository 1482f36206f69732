--- TCP and HTTP/1.1 as a client, on the run loop: what waits here lets other branches run. Plain connections without
--- TLS, meant for servers on this machine and beside it (load tests, tests of our own server).
---
---   local c <close> = assert(net.connect("127.0.0.1", 8080))
---   local r = assert(net.request(c, { path = "/v1/models" }))      -- r.status, r.headers, r.body
---   net.request(c, { method = "POST", path = ..., body = text, on_data = function(piece) ... end })

local core = require "llmrun.core"
local loop = require "llmrun.loop"

local M = {}

---@class llmrun.Connection
local Connection = {}
Connection.__index = Connection
Connection.__name = "llmrun.Connection"

--- Waits until the socket (or what has a descriptor) is ready; false if that took longer than so many seconds.
local function wait_ready(self, what, call, seconds)
    local fd, ticket = self.sock:fd(), loop.ticket()
    local timer = seconds and loop.after(seconds, function() loop.fire(ticket, false) end)
    local function stop()
        if not self.closed then loop.unwatch(fd) end
        if timer then loop.cancel_timer(timer) end
    end
    loop.watch(fd, what, function() loop.fire(ticket, true) end)
    self.stop_waiting = function() loop.fire(ticket, false) end
    local ready = loop.wait(ticket, call, stop)
    self.stop_waiting = nil
    stop()
    return ready
end

--- A connection over a socket of core.tcp, or over anything that has its methods.
---@return llmrun.Connection
function M.over(sock, host, port)
    return setmetatable({ sock = sock, buffer = "", host = host, port = port }, Connection)
end

--- The addresses of a host, itself if it is one; nil, text, code.
local function addresses(host, seconds)
    if host:find "^[%d.]+$" or host:find(":", 1, true) then return { host } end
    local job <close>, err, code = core.lookup(host)
    if not job then return nil, err, code end
    if not wait_ready({ sock = job }, "r", "net.connect", seconds) then
        return nil, ("%s: no address after %g s"):format(host, seconds), "limit"
    end
    return job:result()
end

--- Connects; nil, text, code.
---@param host string
---@param port integer
---@param seconds? number how long looking up its name, and connecting, may take (10)
---@return llmrun.Connection?
function M.connect(host, port, seconds)
    local list, err, code = addresses(host, seconds or 10)
    if not list then return nil, err, code end
    local sock
    sock, err, code = core.tcp(list[1], port)
    if not sock then return nil, err, code end
    local self = M.over(sock, host, port)
    if not wait_ready(self, "w", "net.connect", seconds or 10) then
        self:close()
        return nil, ("%s port %d: no connection after %g s"):format(host, port, seconds or 10), "limit"
    end
    local ok
    ok, err, code = sock:check()
    if not ok then
        self:close()
        return nil, ("%s port %d: %s"):format(host, port, err), code
    end
    return self
end

--- Connects to a local (Unix) socket; nil, text, code.
---@param path string
---@return llmrun.Connection?
function M.local_connect(path)
    local sock, err, code = core.local_connect(path)
    if not sock then return nil, err, code end
    return setmetatable({ sock = sock, buffer = "", host = path, port = 0 }, Connection)
end

--- Sends all of a text; nil, text, code.
function Connection:send(text, seconds)
    local at = 0
    while at < #text do
        if self.closed then return nil, "the connection is closed", "state" end
        local n, err, code = self.sock:send(text, at)
        if n then
            at = at + n
        elseif code ~= "again" then
            return nil, err, code
        elseif not wait_ready(self, "w", "net.send", seconds or 60) then
            return nil, "the other side takes nothing", "limit"
        end
    end
    return true
end

--- Some bytes as soon as there are any; "" when the other side has ended; nil, text, code.
function Connection:recv(seconds)
    if self.buffer ~= "" then
        local text = self.buffer
        self.buffer = ""
        return text
    end
    while true do
        if self.closed then return nil, "the connection is closed", "state" end
        local text, err, code = self.sock:recv()
        if text then return text end
        if code ~= "again" then return nil, err, code end
        if not wait_ready(self, "r", "net.recv", seconds or 60) then return nil, "nothing came", "limit" end
    end
end

--- Bytes up to and with a text; nil, text, code.
function Connection:read_to(mark, seconds)
    local got = self.buffer
    self.buffer = ""
    local from = 1
    while true do
        local _, last = got:find(mark, from, true)
        if last then
            self.buffer = got:sub(last + 1)
            return got:sub(1, last)
        end
        from = math.max(1, #got - #mark + 2)
        local more, err, code = self:recv(seconds)
        if not more or more == "" then
            self.buffer = got
            return nil, err or "the connection ended too soon", code or "io"
        end
        got = got .. more
    end
end

--- Exactly n bytes, in pieces: on_data(piece) for each.
function Connection:read_bytes(n, on_data, seconds)
    while n > 0 do
        local text, err, code = self:recv(seconds)
        if not text or text == "" then return nil, err or "the connection ended too soon", code or "io" end
        if #text > n then
            self.buffer = text:sub(n + 1)
            text = text:sub(1, n)
        end
        n = n - #text
        on_data(text)
    end
    return true
end

function Connection:close()
    if self.closed then return end
    loop.unwatch(self.sock:fd())
    self.closed = true
    self.sock:close()
    if self.stop_waiting then self.stop_waiting() end
end
Connection.__close = Connection.close

--- Closes it so that the other side gets a reset.
function Connection:reset()
    if self.closed then return end
    loop.unwatch(self.sock:fd())
    self.closed = true
    self.sock:reset()
end

-- HTTP

local function request_text(self, o)
    local lines = { ("%s %s HTTP/1.1"):format(o.method or (o.body and "POST" or "GET"), o.path or "/") }
    local headers = { Host = ("%s:%d"):format(self.host, self.port) }
    if o.body then
        headers["Content-Length"] = #o.body
        headers["Content-Type"] = "application/json"
    end
    for k, v in pairs(o.headers or {}) do headers[k] = v end
    for k, v in pairs(headers) do
        if v then lines[#lines + 1] = ("%s: %s"):format(k, v) end
    end
    return table.concat(lines, "\r\n") .. "\r\n\r\n" .. (o.body or "")
end

--- Reads the head of an answer: { status, headers (names in lower case) }; nil, text, code.
function M.read_head(self, seconds)
    local head, err, code = self:read_to("\r\n\r\n", seconds)
    if not head then return nil, err, code end
    local r = { headers = {}, status = math.tointeger(tonumber(head:match("^HTTP/1%.%d (%d%d%d)"))), head = head }
    if not r.status then return nil, "no HTTP answer", "format" end
    for name, value in head:gmatch("\r\n([^:\r\n]+):[ \t]*([^\r\n]*)") do r.headers[name:lower()] = value end
    return r
end

local function read_chunks(self, on_data, seconds)
    while true do
        local line, err, code = self:read_to("\r\n", seconds)
        local digits = line and line:match("^0*(%x+)")
        if not digits or #digits > 15 then return nil, err or "a bad chunk", code or "format" end
        local n = tonumber(digits, 16)
        if n == 0 then return self:read_to("\r\n", seconds) end
        local ok
        ok, err, code = self:read_bytes(n, on_data, seconds)
        if not ok then return nil, err, code end
        if self:read_to("\r\n", seconds) ~= "\r\n" then return nil, "a bad chunk", "format" end
    end
end

local function read_rest(self, on_data, seconds)
    while true do
        local text, err, code = self:recv(seconds)
        if not text then return nil, err, code end
        if text == "" then return true end
        on_data(text)
    end
end

--- Reads an answer's body, piece by piece.
function M.read_body(self, r, method, on_data, seconds)
    local given = r.headers["content-length"]
    local length = given and given:find("^%d+$") and #given < 19 and math.tointeger(tonumber(given))
    if method == "HEAD" or r.status == 204 or r.status == 304 or r.status < 200 then return true end
    if r.headers["transfer-encoding"] == "chunked" then return read_chunks(self, on_data, seconds) end
    if given and not length then return nil, "a bad Content-Length", "format" end
    if length then return self:read_bytes(length, on_data, seconds) end
    return read_rest(self, on_data, seconds)
end

--- Sends a request and reads its answer: { status, headers, body }; nil, text, code. Options: method, path, headers,
--- body, on_head(answer), on_data(piece) instead of the body, timeout (seconds without a byte, 60).
---@param self llmrun.Connection
---@param o table
---@return table?
function M.request(self, o)
    local ok, err, code = self:send(request_text(self, o), o.timeout)
    if not ok then return nil, err, code end
    local r
    r, err, code = M.read_head(self, o.timeout)
    if not r then return nil, err, code end
    if o.on_head then o.on_head(r) end
    local parts = {}
    ok, err, code = M.read_body(self, r, o.method, o.on_data or function(s) parts[#parts + 1] = s end, o.timeout)
    if not ok then return nil, err, code end
    r.body = table.concat(parts)
    return r
end

--- Reads server-sent events: returns a function to be given the pieces of a stream; on_event(text) gets each event's
--- data.
function M.events(on_event)
    local buffer = ""
    return function(piece)
        buffer = buffer .. piece
        while true do
            local from, to = buffer:find("\r?\n\r?\n")
            if not from then return end
            local event = buffer:sub(1, from - 1)
            buffer = buffer:sub(to + 1)
            local data = {}
            for line in (event .. "\n"):gmatch("(.-)\r?\n") do
                local text = line:match("^data: ?(.*)$")
                if text then data[#data + 1] = text end
            end
            if #data > 0 then on_event(table.concat(data, "\n")) end
        end
    end
end

return M
