-- The HTTP server under llm.serve, over real sockets: transport, limits, routes, keys, streams, clients that leave.
local llm = require "llmrun"
local core = require "llmrun.core"
local json = require "llmrun.json"
local net = require "llmrun.net"
local S = dofile "tests/spec/serve_support.lua"

local slow = os.getenv "LLMRUN_TEST_SANITIZE" and 4 or 1

local function echo(req, res)
    return res:json { method = req.method, path = req.path, query = req.query, bytes = #req.body,
        head = req.body:sub(1, 20), x = req.headers["x-test"] or json.null }
end

local function server_of(opts)
    opts.routes = opts.routes or {}
    opts.routes["POST /echo"] = echo
    opts.routes["GET /echo"] = echo
    return S.start(opts)
end

local function head_of(text) return tonumber(text:match("^HTTP/1%.%d (%d%d%d)")) end

describe("requests", function()
    local server
    setup(function() server = server_of { max_body = 4 << 20, routes = {
        ["GET /thing/{id}/part"] = function(req) return { id = req.params.id } end,
        ["GET /rest/*"] = function(req) return { rest = req.params.rest } end,
        ["GET /text"] = function() return "plain" end,
        ["GET /nothing"] = function() end,
        ["GET /bug"] = function() error "a fault" end,
        ["GET /refuse"] = function() require("llmrun.exchange").fail(409, "not now", "when", "busy") end,
        ["GET /twice"] = function(_, res)
            res:answer(200, "a")
            res:answer(200, "b")
        end,
    } } end)
    teardown(function() server:close() end)

    local function raw(...) return S.raw(server, ...) end
    local function chunked(...)
        return "POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" .. table.concat { ... }
    end

    it("come with chunked bodies: of one byte, with extensions, with trailers", function()
        local out = raw(chunked(("1\r\nx\r\n"):rep(500), "0\r\n\r\n"))
        assert.equal(200, head_of(out))
        assert.matches('"bytes":500', out, 1, true)
        out = raw(chunked("3;a=b\r\nabc\r\n2;q=\"z\"\r\nde\r\n", "0;last\r\nTrailer: x\r\n\r\n"))
        assert.matches('"head":"abcde"', out, 1, true)
    end)

    it("are refused when two ways say different things of their length", function()
        local function post(lines, body)
            return raw("POST /echo HTTP/1.1\r\nHost: localhost\r\n" .. lines .. "\r\n" .. body)
        end
        for _, lines in ipairs {
            "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", "Content-Length: 3\r\nContent-Length: 3\r\n",
            "Content-Length: 3\r\nContent-Length: 4\r\n", "Content-Length: -3\r\n", "Content-Length: 3x\r\n",
            "Content-Length : 3\r\n", "Content-Length:\r\n 3\r\n", "Transfer-Encoding:\r\n\tchunked\r\n", "X: a\r\n b\r\n",
            "X\"y: a\r\n", "X y: a\r\n", "X: a\rContent-Length: 3\r\n", "X\255: a\r\n",
            "Content-Length: +3\r\n", "Transfer-Encoding: gzip\r\n", "Transfer-Encoding: chunked, chunked\r\n",
        } do
            local out, ended = post(lines, "abc")
            assert.equal(400, head_of(out), lines)
            assert.is_true(ended, lines)
        end
        local out, ended = post("Content-Length: 99999999999999999999999\r\n", "abc")
        assert.equal(413, head_of(out))
        assert.is_true(ended)
        out, ended = raw(chunked("zz\r\nabc\r\n0\r\n\r\n"))
        assert.equal(400, head_of(out))
        assert.is_true(ended)
        out, ended = raw((chunked("3\r\nabc\r\n0\r\n\r\n"):gsub("1%.1", "1.0", 1)))
        assert.equal(400, head_of(out))
        assert.is_true(ended)
        assert.equal(200, head_of((post("X:a\r\nY:\t b \r\nZ:\r\nContent-Length:" .. (" "):rep(300) .. "3\r\n", "abc"))))
    end)

    it("have a limit of length, said before or found on the way", function()
        local r = S.post(server, "/echo", ("a"):rep(2 << 20))
        assert.equal(2 << 20, r.json.bytes)
        r = S.post(server, "/echo", ("a"):rep(5 << 20))
        assert.equal(413, r.status)
        assert.equal("body_too_large", r.json.error.code)
        assert.equal("close", r.headers.connection)
        local out, ended = raw(chunked(("100000\r\n" .. ("a"):rep(1 << 20) .. "\r\n"):rep(5), "0\r\n\r\n"), 3)
        assert.equal(413, head_of(out))
        assert.is_true(ended)
        out, ended = raw("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000000\r\n\r\nabc")
        assert.equal(413, head_of(out))
        assert.is_true(ended)
    end)

    it("may ask first (Expect)", function()
        local c <close> = assert(net.connect(server.host, server.port))
        c:send "POST /echo HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
        assert.equal("HTTP/1.1 100 Continue\r\n\r\n", c:read_to("\r\n\r\n", 2))
        c:send "abc"
        assert.equal(200, net.read_head(c).status)
        local out, ended = raw("POST /echo HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            .. "Content-Length: 5000000\r\n\r\n")
        assert.equal(413, head_of(out))
        assert.is_true(ended)
    end)

    it("may follow each other without waiting, and by the thousand on one connection", function()
        local out = raw(("GET /text HTTP/1.1\r\nHost: localhost\r\n\r\n"):rep(2))
        local _, n = out:gsub("HTTP/1.1 200 OK", "")
        assert.equal(2, n)
        local c <close> = assert(net.connect(server.host, server.port))
        for i = 1, 1000 // slow do
            local r = assert(net.request(c, { path = "/echo?n=" .. i }))
            assert.equal(200, r.status)
            assert.matches('"n":"' .. i .. '"', r.body, 1, true)
        end
    end)

    it("have a limit of headers", function()
        local function get(lines) return raw("GET /text HTTP/1.1\r\nHost: localhost\r\n" .. lines .. "\r\n") end
        assert.equal(431, head_of((get("X: " .. ("a"):rep(65536) .. "\r\n"))))
        local many = {}
        for i = 1, 1000 do many[i] = "X-" .. i .. ": a\r\n" end
        assert.equal(431, head_of((get(table.concat(many)))))
        assert.equal(200, head_of((get(("X: a\r\n"):rep(50)))))
        assert.equal(414, head_of((raw("GET /" .. ("a"):rep(65536) .. " HTTP/1.1\r\nHost: localhost\r\n\r\n"))))
    end)

    it("come in all forms that clients use", function()
        local function status(line, lines)
            return head_of((raw(line .. "\r\n" .. (lines or "Host: localhost\r\n") .. "\r\n")))
        end
        assert.equal(405, status "get /text HTTP/1.1")
        assert.equal(200, status "GET http://localhost/text HTTP/1.1")
        assert.equal(200, status "GET http://localhost/text?a=b HTTP/1.1")
        assert.equal(404, status "OPTIONS * HTTP/1.1")
        assert.equal(405, status "PURGE /text HTTP/1.1")
        assert.equal(400, status("GET /text HTTP/1.1", ""))
        assert.equal(200, status("GET /text HTTP/1.0", ""))
        assert.equal(505, status "GET /text HTTP/2.0")
        local out, ended = raw "GET /text HTTP/1.0\r\n\r\n"
        assert.matches("plain$", out)
        assert.is_true(ended)
        assert.equal(200, head_of((raw "GET /text HTTP/1.1\nHost: localhost\n\n")))
        assert.equal(200, head_of((raw "GET /text HTTP/1.1\nHost: localhost\nX: a \nY:\n\n")))
        assert.equal(200, status("GET /text HTTP/1.1", "Host: localhost\r\nX: a \t\r\nY:\r\nZ:  b\r\n"))
        assert.equal(200, head_of((raw "\r\nGET /text HTTP/1.1\r\nHost: localhost\r\n\r\n")))
        out = raw "\22\3\1\0\165\1\0\0\r\n\r\n"
        assert.is_true(out == "" or head_of(out) == 400)
    end)

    it("are refused if a proxy may see their lines otherwise", function()
        for _, text in ipairs {
            "GET /te\0xt HTTP/1.1\r\nHost: localhost\r\n", "GET /text\0 HTTP/1.1\r\nHost: localhost\r\n",
            "GET /text  HTTP/1.1\r\nHost: localhost\r\n", "GET /text HTTP/1.1\0\r\nHost: localhost\r\n",
            "GET /text HTTP/1.1\r\nX: a\0b\r\nHost: localhost\r\n", "GET /text HTTP/1.1\r\nX: a\0\r\nHost: localhost\r\n",
            "GET /text HTTP/1.1\r\nX: \0\r\nHost: localhost\r\n", "GET /text HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n",
            "GET /text HTTP/1.1\r\nHost: localhost\nX: a\r\n", "GET /text HTTP/1.1\nHost: localhost\r\nX: a\r\n",
            "GET /text HTTP/1.1\r\nHost: localhost\r\nX: a\n b: c\r\n", "GET /text HTTP/1.1\nHost: local\0host\nX: a\n",
            "GET /text HTTP/1.1\r\nHost: localhost\r\nX: a\rY: b\r\n", "GET /text HTTP/1.1\r\nHost: localhost\r\nX : a\r\n",
        } do
            local out = raw(text .. "\r\n")
            assert.is_true(out == "" or head_of(out) == 400, text)
        end
    end)

    it("by HEAD and OPTIONS get heads", function()
        local c <close> = assert(net.connect(server.host, server.port))
        local r = assert(net.request(c, { method = "HEAD", path = "/text" }))
        assert.equal(200, r.status)
        assert.equal("5", r.headers["content-length"])
        assert.equal("", r.body)
        r = assert(net.request(c, { method = "OPTIONS", path = "/echo" }))
        assert.equal(204, r.status)
        assert.equal("GET, HEAD, OPTIONS, POST", r.headers.allow)
        r = assert(net.request(c, { method = "DELETE", path = "/echo" }))
        assert.equal(405, r.status)
        assert.equal("GET, HEAD, OPTIONS, POST", r.headers.allow)
        assert.matches("method_not_allowed", r.body, 1, true)
    end)

    it("find their routes", function()
        assert.equal("a-b", S.get(server, "/thing/a-b/part").json.id)
        assert.equal(404, S.get(server, "/thing//part").status)
        assert.equal(404, S.get(server, "/thing/a/b/part").status)
        assert.equal("x/y", S.get(server, "/rest/x/y").json.rest)
        assert.equal(204, S.get(server, "/nothing").status)
        assert.same({ a = "1 2", b = "", ["c d"] = "/" }, S.get(server, "/echo?a=1+2&b&c%20d=%2F").json.query)
        assert.equal("v", S.get(server, "/echo", { ["X-Test"] = "v" }).json.x)
        for _, path in ipairs { "//text", "/./text", "/x/../text", "/TEXT", "/%74ext", "/text/", "/rest/" } do
            assert.equal(404, S.get(server, path).status, path)
        end
    end)

    it("get errors in one shape", function()
        local r = S.get(server, "/bug")
        assert.equal(500, r.status)
        assert.equal("server_error", r.json.error.type)
        assert.is_nil(r.body:find("fault", 1, true))
        r = S.get(server, "/refuse")
        assert.equal(409, r.status)
        local want = { message = "not now", type = "invalid_request_error", param = "when", code = "busy" }
        assert.same(want, r.json.error)
        r = S.get(server, "/none")
        assert.same({ message = "there is no /none", type = "not_found_error", param = json.null, code = "not_found" },
            r.json.error)
        assert.equal("a", S.get(server, "/twice").body)
    end)

    it("come by the hundred at once", function()
        local n = 300 // slow
        local list = {}
        for i = 1, n do list[i] = i end
        local done = llm.map(list, function(i)
            local c <close> = assert(net.connect(server.host, server.port))
            llm.sleep(0.01)
            return assert(net.request(c, { path = "/echo?n=" .. i })).status
        end)
        for i = 1, n do assert.equal(200, done[i]) end
    end)
end)

describe("slow and silent clients", function()
    it("are cut off; the others go on", function()
        local server <close> = server_of { header_timeout = 1, body_timeout = 1, idle_timeout = 1 }
        local function drip(text)
            local c <close> = assert(net.connect(server.host, server.port))
            local begin = core.now()
            for i = 1, #text do
                if not c:send(text:sub(i, i)) then break end
                local got = c:recv(0.1)
                if got then return core.now() - begin, got end
            end
            return core.now() - begin, "never"
        end
        local head = "GET /echo HTTP/1.1\r\nHost: localhost\r\n"
        local times = llm.all {
            line = function() return (drip(("G"):rep(200))) end,
            header = function()
                local c <close> = assert(net.connect(server.host, server.port))
                c:send(head)
                local begin = core.now()
                while core.now() - begin < 10 do
                    if not c:send "X" then break end
                    if c:recv(0.1) then break end
                end
                return core.now() - begin
            end,
            body = function()
                local c <close> = assert(net.connect(server.host, server.port))
                c:send "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
                local begin = core.now()
                while core.now() - begin < 10 do
                    if not c:send "X" then break end
                    if c:recv(0.1) then break end
                end
                return core.now() - begin
            end,
            silent = function()
                local c <close> = assert(net.connect(server.host, server.port))
                local begin = core.now()
                assert.equal("", c:recv(10))
                return core.now() - begin
            end,
            other = function()
                for _ = 1, 10 do
                    assert.equal(200, S.get(server, "/echo").status)
                    llm.sleep(0.2)
                end
                return 1
            end,
        }
        for what, t in pairs(times) do assert.is_true(t < 5 * slow, what .. " took " .. t) end
    end)
end)

describe("clients that hold all connections and ask for nothing", function()
    it("give way to others; those that are served do not", function()
        local served = false
        local server <close> = server_of { max_connections = 4, routes = { ["GET /long"] = function(_, res)
            res:write "x"
            while not served do llm.sleep(0.01) end
        end } }
        local held = {}
        for i = 1, 3 do held[i] = assert(net.connect(server.host, server.port)) end
        held[1]:send "GET"
        assert.equal(200, assert(net.request(held[2], { path = "/echo" })).status)
        local long = llm.spawn(S.get, server, "/long")
        S.eventually(function() return server.core:stats().connections == 4 end)
        assert.equal(200, S.get(server, "/echo").status)
        served = true
        assert.equal("x", long:wait().body)
        for i = 1, 3 do held[i]:close() end
    end)
end)

describe("limits", function()
    it("of requests at once give 503 with Retry-After", function()
        local gate = false
        local server <close> = server_of { max_requests = 2, routes = { ["GET /wait"] = function()
            while not gate do llm.sleep(0.005) end
            return "x"
        end } }
        local two = { llm.spawn(S.get, server, "/wait"), llm.spawn(S.get, server, "/wait") }
        S.eventually(function() return server.core:stats().requests == 2 end)
        local r = S.get(server, "/echo")
        assert.equal(503, r.status)
        assert.equal("1", r.headers["retry-after"])
        assert.equal("overloaded", r.json.error.code)
        gate = true
        assert.equal(200, two[1]:wait().status)
        assert.equal(200, two[2]:wait().status)
        assert.equal(200, S.get(server, "/echo").status)
    end)

    it("of all bodies together give 503", function()
        local gate = false
        local server <close> = server_of { max_bodies = 3 << 20, max_body = 2 << 20, routes = {
            ["POST /keep"] = function() return "x" end } }
        -- bodies are given back once a route has them, so what counts are those that come in now
        local c <close> = assert(net.connect(server.host, server.port))
        c:send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n\r\n" .. ("a"):rep(1900000))
        S.eventually(function() return server.core:stats().bodies >= 1900000 end)
        local r = S.post(server, "/echo", ("a"):rep(1900000))
        assert.equal(503, r.status)
        c:send(("a"):rep(100000))
        assert.equal(200, net.read_head(c).status)
        assert.equal(200, S.post(server, "/echo", ("a"):rep(1900000)).status)
        assert.is_false(gate)
    end)

    it("of time end a request", function()
        local closed
        local server <close> = server_of { request_timeout = 0.1, routes = { ["GET /long"] = function()
            local guard <close> = setmetatable({}, { __close = function() closed = true end }) -- luacheck: ignore 211
            llm.sleep(10)
        end } }
        local r = S.get(server, "/long")
        assert.equal(503, r.status)
        assert.is_true(closed)
    end)

    describe("of computing end a request, while others are answered:", function()
        local function spin() while true do end end
        local closing = { __close = spin }
        local ends = {
            ["a loop"] = spin,
            ["a loop that catches errors"] = function() while true do pcall(spin) end end,
            ["a loop in a coroutine"] = function() coroutine.wrap(spin)() end,
            ["a loop in a callback"] = function() table.sort({ 2, 1, 3 }, spin) end,
            ["a loop in a branch"] = function() llm.all { spin, function() return 1 end } end,
            ["a loop, and one in a close handler"] = function()
                local guard <close> = setmetatable({}, closing) -- luacheck: ignore 211
                spin()
            end,
            ["a loop in a close handler"] = function()
                local guard <close> = setmetatable({}, closing) -- luacheck: ignore 211
            end,
            ["a close handler of a callback's coroutine"] = function()
                table.sort({ 2, 1, 3 }, coroutine.wrap(function()
                    local guard <close> = setmetatable({}, closing) -- luacheck: ignore 211
                    spin()
                end))
            end,
            ["an error whose text is never done"] = function() error(setmetatable({}, { __tostring = spin })) end,
        }
        for name, fn in pairs(ends) do
            it(name, function()
                local log = {}
                local server <close> = server_of {
                    max_busy = 0.1, log = function(text) log[#log + 1] = text end,
                    routes = { ["GET /busy"] = fn, ["GET /quick"] = function() return "here" end },
                }
                local r, quick
                llm.all {
                    function() r = S.get(server, "/busy") end,
                    function()
                        llm.sleep(0.01)
                        quick = S.get(server, "/quick")
                    end,
                }
                assert.equal("here", quick.body)
                assert.is_true(r.status >= 500, r.status)
                assert.equal(1, #log)
                assert.matches(log[1]:find("computed", 1, true) and "GET /busy: computed for more than 0.1 s without waiting"
                    or "over the time limit", log[1], 1, true)
            end)
        end

        it("with a limit for the whole request", function()
            local server <close> = server_of { request_timeout = 0.1, routes = { ["GET /busy"] = spin } }
            assert.equal(503, S.get(server, "/busy").status)
        end)

        it("but not one that waits in between", function()
            local server <close> = server_of { max_busy = 0.2, routes = { ["GET /long"] = function()
                local began = core.now()
                while core.now() - began < 0.5 do
                    for _ = 1, 1e5 do end
                    llm.sleep(0)
                end
                return "done"
            end } }
            assert.equal("done", S.get(server, "/long").body)
        end)
    end)
end)

describe("streams", function()
    it("come as they are written", function()
        local step = 0
        local server <close> = server_of { routes = { ["GET /count"] = function(_, res)
            for i = 1, 3 do
                res:write(i .. "\n")
                while step < i do llm.sleep(0.002) end
            end
        end } }
        local got = {}
        local c <close> = assert(net.connect(server.host, server.port))
        local r = assert(net.request(c, { path = "/count", on_data = function(piece)
            got[#got + 1] = piece
            step = step + 1
        end }))
        assert.equal("chunked", r.headers["transfer-encoding"])
        assert.same({ "1\n", "2\n", "3\n" }, got)
        assert.equal(200, assert(net.request(c, { path = "/echo" })).status) -- the connection goes on
        local old = S.raw(server, "GET /count HTTP/1.0\r\n\r\n")
        assert.matches("\r\n\r\n1\n2\n3\n$", old)
    end)

    it("wait for a slow reader, with bounded memory", function()
        local written, done = 0, false
        local piece = ("x"):rep(10000)
        local server <close> = server_of { max_stream = 65536, routes = { ["GET /big"] = function(_, res)
            for _ = 1, 1200 do
                res:write(piece)
                written = written + #piece
            end
            done = true
        end } }
        local c <close> = assert(net.connect(server.host, server.port))
        c.sock:buffers(65536)
        c:send "GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n"
        local last = -1
        S.eventually(function() -- until it goes no further
            local same = written == last and written > 0
            last = written
            llm.sleep(0.1)
            return same
        end)
        assert.is_true(written < 9e6, "it wrote " .. written)
        assert.is_false(done)
        assert.equal(200, S.get(server, "/echo").status)
        local total = 0
        local r = assert(net.read_head(c))
        assert(net.read_body(c, r, "GET", function(s) total = total + #s end))
        assert.equal(12000000, total)
        S.eventually(function() return done end)
    end)

    it("of several tasks do not mix", function()
        local server <close> = server_of { max_stream = 1024, routes = { ["GET /mix"] = function(_, res)
            llm.map({ "a", "b", "c" }, function(letter)
                for _ = 1, 20 do res:write(letter:rep(999) .. "\n") end
            end)
        end } }
        local r = S.get(server, "/mix")
        local n = 0
        for line in r.body:gmatch("[^\n]+") do
            n = n + 1
            assert.equal(999, #line)
            assert.equal(line:sub(1, 1):rep(999), line)
        end
        assert.equal(60, n)
    end)

    it("that fail on the way are cut, so that the client can tell", function()
        local server <close> = server_of { routes = { ["GET /half"] = function(_, res)
            res:write "some"
            llm.sleep(0.02)
            error "broken"
        end } }
        local c <close> = assert(net.connect(server.host, server.port))
        local r, err = net.request(c, { path = "/half" })
        assert.is_nil(r)
        assert.matches("ended too soon", err, 1, true)
        assert.equal(200, S.get(server, "/echo").status)
    end)
end)

describe("clients that leave", function()
    local function left_behind(how)
        local events = {}
        local server <close> = server_of { routes = {
            ["GET /wait"] = function(req)
                local guard <close> = setmetatable({}, { __close = function() -- luacheck: ignore 211
                    events[#events + 1] = "closed"
                    events.gone = req.gone
                end })
                events[#events + 1] = "began"
                llm.sleep(30)
                events[#events + 1] = "not ended"
            end,
            ["GET /stream"] = function(_, res)
                local guard <close> = setmetatable({}, { __close = function() -- luacheck: ignore 211
                    events[#events + 1] = "closed"
                end })
                events[#events + 1] = "began"
                while true do
                    res:write "tick\n"
                    llm.sleep(0.005)
                end
            end,
        } }
        for _, path in ipairs { "/wait", "/stream" } do
            events = {}
            local c = assert(net.connect(server.host, server.port))
            c:send("GET " .. path .. " HTTP/1.1\r\nHost: localhost\r\n\r\n")
            S.eventually(function() return events[1] == "began" end)
            if path == "/stream" then assert(c:recv(1)) end
            c[how](c)
            S.eventually(function() return #events >= 2 end)
            assert.same({ "began", "closed" }, { events[1], events[2] })
        end
        S.eventually(function() return server.core:stats().pending == 0 end)
        assert.equal(2, server.core:stats().gone)
        assert.is_nil(next(server.active))
        assert.equal(200, S.get(server, "/echo").status)
    end

    it("only with their sending half get their answers", function()
        local server <close> = server_of { routes = {
            ["GET /later"] = function() llm.sleep(0.2) return "later" end,
            ["GET /stream"] = function(_, res) for i = 1, 3 do res:write(i .. "\n") llm.sleep(0.05) end end,
        } }
        for path, want in pairs { ["/echo"] = 200, ["/later"] = "later", ["/stream"] = "3\n\r\n0\r\n\r\n" } do
            local c = assert(net.connect(server.host, server.port))
            c:send("GET " .. path .. " HTTP/1.1\r\nHost: localhost\r\n\r\n")
            c.sock:shutdown()
            local all = {}
            repeat
                local text = c:recv(10)
                all[#all + 1] = text
            until not text or text == ""
            c:close()
            local text = table.concat(all):gsub("^HTTP/1.1 100 Continue\r\n\r\n", "")
            assert.matches("^HTTP/1.1 200 OK\r\n", text, nil, path)
            assert.matches(tostring(want), text, 1, true)
        end
        assert.equal(0, server.core:stats().gone)
    end)

    it("by closing end their request at once", function() left_behind "close" end)
    it("by a reset end their request at once", function() left_behind "reset" end)

    it("while they have sent half of a request leave nothing", function()
        local server <close> = server_of {}
        for _, text in ipairs {
            "", "GET", "GET /echo HTTP/1.1\r\n",
            "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc",
        } do
            local c = assert(net.connect(server.host, server.port))
            c:send(text)
            llm.sleep(0.01)
            c:close()
        end
        S.eventually(function()
            local s = server.core:stats()
            return s.pending == 0 and s.connections == 0 and s.bodies == 0
        end)
        assert.equal(200, S.get(server, "/echo").status)
    end)
end)

describe("keys and hosts", function()
    it("keep all routes but /health", function()
        local server <close> = S.start { api_keys = { a = "sk-secret", b = "other" }, models = { S.teller { "x" } },
            routes = { ["GET /who"] = function(req) return { key = req.key } end } }
        local function status(path, header, method)
            return S.request(server, { path = path, method = method, headers = { Authorization = header } }).status
        end
        for _, spec in ipairs(server.routes:list()) do
            local method, path = spec:match("^(%u+) (.*)$")
            path = path:gsub("%*", "x")
            if path ~= "/health" then
                for _, header in ipairs {
                    false, "", "Bearer", "Bearer ", "Bearer sk-secre", "Bearer sk-secretx", "Bearer SK-SECRET",
                    "Basic sk-secret", "sk-secret", "Bearer sk-secret sk-secret", "Bearer sk-secret,x",
                } do
                    local headers = { Authorization = header or nil }
                    local r = S.request(server, { path = path, method = method, headers = headers })
                    assert.equal(401, r.status, spec .. " with " .. tostring(header))
                    assert.equal("Bearer", r.headers["www-authenticate"])
                end
            end
        end
        assert.equal(200, status("/health", nil))
        assert.equal(200, status("/v1/models", "Bearer sk-secret"))
        assert.equal(200, status("/v1/models", "bearer other"))
        assert.equal("b", S.get(server, "/who", { Authorization = "Bearer other" }).json.key)
        for _, path in ipairs {
            "//v1/models", "/v1/../slots", "/V1/models", "/health/../slots", "/health/", "/%2fslots",
            "/health%2f..%2fslots", "/nothing",
        } do
            assert.equal(401, status(path), path)
            assert.equal(404, status(path, "Bearer sk-secret"), path)
        end
        local two = S.raw(server, "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-secret\r\n"
            .. "Authorization: Bearer sk-secret\r\n\r\n")
        assert.equal(401, head_of(two))
        local split = S.raw(server, "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
            .. "Authorization: Bearer sk-secret\n\r\n\r\n")
        assert.is_true(head_of(split) == 200 or head_of(split) == 400) -- a bare line end is a line end
    end)

    it("let no other origin in, unless it is named", function()
        local server <close> = server_of { cors = { "https://good.example" } }
        for _, method in ipairs { "OPTIONS", "GET", "POST" } do
            local r = S.request(server, { method = method, path = "/echo", headers = { Origin = "https://evil.example",
                ["Access-Control-Request-Method"] = "POST" } })
            for name in pairs(r.headers) do assert.is_nil(name:find "^access%-control", name) end
        end
        local r = S.request(server, { method = "OPTIONS", path = "/echo", headers = { Origin = "https://good.example",
            ["Access-Control-Request-Method"] = "POST" } })
        assert.equal(204, r.status)
        assert.equal("https://good.example", r.headers["access-control-allow-origin"])
        assert.is_nil(r.headers["access-control-allow-credentials"])
    end)

    it("let no page of another origin do anything, where no key is needed", function()
        local server <close> = server_of { cors = { "https://good.example" } }
        local own = ("127.0.0.1:%d"):format(server.port)
        local function status(method, headers)
            return S.request(server, { method = method, path = "/echo", headers = headers }).status
        end
        for _, origin in ipairs { "https://evil.example", "null", "http://127.0.0.1:1", "http://" .. own .. ".evil.example", "" } do
            assert.equal(403, status("POST", { Origin = origin }), origin)
            assert.equal(403, status("POST", { Origin = origin, ["Sec-Fetch-Site"] = "cross-site" }), origin)
            assert.equal(403, status("POST", { Origin = origin, ["Sec-Fetch-Site"] = "same-site" }), origin)
            assert.equal(200, status("GET", { Origin = origin }), origin)
        end
        for _, headers in ipairs {
            {}, { Origin = "http://" .. own }, { Origin = "https://good.example" },
            { Origin = "http://" .. own, ["Sec-Fetch-Site"] = "same-origin" },
            { Origin = "https://proxy.example", ["Sec-Fetch-Site"] = "same-origin" }, -- a proxy that names us otherwise
        } do
            assert.equal(200, status("POST", headers), headers.Origin)
        end
        assert.equal(403, status("POST", { ["Sec-Fetch-Site"] = "cross-site" }))
        local keyed <close> = server_of { api_keys = { "k" } }
        assert.equal(200, S.request(keyed, { method = "POST", path = "/echo",
            headers = { Origin = "https://evil.example", Authorization = "Bearer k" } }).status)
        local all <close> = server_of { cors = { "*" } }
        assert.equal(200, S.request(all, { method = "POST", path = "/echo", headers = { Origin = "https://evil.example" } }).status)
    end)

    it("without a key are this machine's names only", function()
        local server <close> = server_of { hosts = { "mine.example" } }
        for host, status in pairs {
            ["localhost"] = 200, ["localhost:99"] = 200, ["127.0.0.1"] = 200, ["[::1]:80"] = 200,
            ["a.localhost"] = 200, ["mine.example:1"] = 200, ["evil.example"] = 403, ["localhost.evil.example"] = 403,
            ["127.0.0.1.evil.example"] = 403, [""] = 403,
        } do
            assert.equal(status, S.get(server, "/echo", { Host = host }).status, host)
        end
    end)

    it("are compared as a whole", function()
        assert.is_true(core.same_secret("abc", "abc"))
        for _, other in ipairs { "", "ab", "abcd", "abd", "ABC", "abc\0" } do
            assert.is_false(core.same_secret(other, "abc"))
        end
    end)
end)

describe("servers", function()
    it("answer what has come, and no more, when they end", function()
        local server = server_of { routes = { ["GET /slow"] = function(_, res)
            for i = 1, 5 do
                res:write(i .. "\n")
                llm.sleep(0.02)
            end
        end } }
        local idle <close> = assert(net.connect(server.host, server.port))
        assert.equal(200, assert(net.request(idle, { path = "/echo" })).status)
        local task = llm.spawn(S.get, server, "/slow")
        S.eventually(function() return next(server.active) ~= nil end)
        local stopping = llm.spawn(server.stop, server)
        llm.sleep(0.01)
        assert.is_nil(net.connect(server.host, server.port, 1))
        assert.equal(503, assert(net.request(idle, { path = "/echo" })).status)
        assert.equal("1\n2\n3\n4\n5\n", task:wait().body)
        stopping:wait()
        server:wait()
        assert.is_true(server.closed)
    end)

    it("cut off what takes too long to end", function()
        local closed
        local server = server_of { drain_timeout = 0.1, routes = { ["GET /ever"] = function()
            local guard <close> = setmetatable({}, { __close = function() closed = true end }) -- luacheck: ignore 211
            llm.sleep(60)
        end } }
        local task = llm.spawn(function() pcall(S.get, server, "/ever") end)
        S.eventually(function() return next(server.active) ~= nil end)
        server:stop()
        task:wait()
        assert.is_true(closed)
    end)

    it("say what is wrong with their options", function()
        local function raises(pattern, o)
            local ok, err = pcall(S.start, o)
            assert.is_false(ok)
            assert.matches(pattern, tostring(err), 1, true)
        end
        raises("unknown option 'porr' (did you mean 'port'?)", { porr = 1 })
        raises("\"METHOD /path\" expected, got 'GET'", { routes = { GET = print } })
        raises("function expected, got number", { routes = { ["GET /x"] = 1 } })
        raises("a model expected, got number", { models = { 1 } })
        raises("port 70000", { port = 70000 })
        local server <close> = S.start {}
        raises("can't listen on 127.0.0.1 port " .. server.port, { port = server.port })
        raises("api_keys: the table is empty", { api_keys = {} })
    end)

    it("take no processor time when idle, and little memory for idle connections", function()
        local server <close> = server_of {}
        local n = 1000 // slow
        local before = core.memory()
        local list = {}
        for i = 1, n do list[i] = assert(net.connect(server.host, server.port)) end
        for i = 1, n do assert.equal(200, assert(net.request(list[i], { path = "/echo" })).status) end
        local after = core.memory()
        assert.is_true(after - before < 50e6 * slow * slow, ("%.1f MB"):format((after - before) / 1e6))
        local cpu = os.clock()
        llm.sleep(1)
        assert.is_true(os.clock() - cpu < 0.1, "idle took " .. os.clock() - cpu)
        for i = 1, n do list[i]:close() end
        S.eventually(function() return server.core:stats().connections == 0 end)
    end)
end)
