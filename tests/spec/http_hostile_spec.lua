-- The server's port under connections of all kinds that mean no good: bytes that are no HTTP, requests with a few bytes
-- changed, bodies of other lengths than they say, headers without end, ends in the middle. Others are answered all the
-- while, and nothing is left: no connection, descriptor, memory.
local core = require "llmrun.core"
local llm = require "llmrun"
local net = require "llmrun.net"
local S = dofile "tests/spec/serve_support.lua"

local slow = os.getenv "LLMRUN_TEST_SANITIZE"
local ROUNDS = slow and 60 or 120 -- of this many connections

local random = require("llmrun.random").new(7)
local function upto(n) return random:integer(n) end
local function pick(list) return list[upto(#list)] end

local function bytes(n)
    local t = {}
    for i = 1, n do t[i] = string.char(upto(256) - 1) end
    return table.concat(t)
end

local function get(lines) return "GET /echo HTTP/1.1\r\nHost: localhost\r\n" .. (lines or "") .. "\r\n" end
local function post(lines, body) return "POST /echo HTTP/1.1\r\nHost: localhost\r\n" .. lines .. "\r\n" .. (body or "") end
local function chunked(body) return post("Transfer-Encoding: chunked\r\n", body) end

local whole = { get(), post("Content-Length: 5\r\n", "abcde"), chunked "5\r\nabcde\r\n0\r\n\r\n" }

--- What a client sends.
local texts = {
    bytes = function() return bytes(upto(2000)) end,
    lines = function() return bytes(upto(60)) .. "\r\n" .. bytes(upto(60)) .. "\r\n\r\n" end,
    changed = function()
        local s = pick(whole)
        for _ = 1, upto(4) do
            local at = upto(#s)
            s = s:sub(1, at - 1) .. pick { bytes(1), "", "\r\n", "\0", " ", ":" } .. s:sub(at + 1)
        end
        return s
    end,
    cut = function()
        local s = pick(whole)
        return s:sub(1, upto(#s))
    end,
    chunks = function()
        return chunked(pick {
            "5\r\nabcdefgh\r\n0\r\n\r\n", "-5\r\nabcde\r\n", "FFFFFFFFFFFFFFFF\r\nabc", "FFFFFFFFFFFFFFFFF1\r\nabc", "\r\n", "g\r\n",
            "7fffffffffffffff\r\nabc", "5\r\nab", "5\nabcde\n0\n\n", " 5\r\nabcde\r\n", "0x5\r\nabcde\r\n0\r\n\r\n",
            "5;" .. ("x"):rep(40000) .. "\r\nabcde\r\n", "0\r\n" .. ("T: x\r\n"):rep(2000) .. "\r\n", "5\r\nabcde0\r\n\r\n",
        })
    end,
    lengths = function()
        return post("Content-Length: " .. pick {
            "4", "6", "0", "-1", "5, 5", "5 5", "0x5", "18446744073709551616", "9223372036854775808", "5e0", " ", "",
        } .. "\r\n", "abcde")
    end,
    many = function()
        local t = {}
        for i = 1, upto(20) do t[i] = pick(whole) end
        if upto(2) == 1 then table.insert(t, upto(#t), bytes(upto(100))) end
        return table.concat(t)
    end,
    headers = function()
        return get(pick {
            ("X: " .. ("a"):rep(1 << 20) .. "\r\n"), ("X: a\r\n"):rep(5000), ("a"):rep(100000), "Host: x\r\nHost: y\r\n",
            " folded\r\n", "X:\r\n y\r\n", ": a\r\n", "X a\r\n", "Connection: upgrade\r\nUpgrade: websocket\r\n",
            "X: " .. bytes(300) .. "\r\n",
        })
    end,
    others = function()
        return pick {
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\22\3\1\2\0\1\0\1\252\3\3" .. bytes(200), "SSH-2.0-OpenSSH_9\r\n",
            "\4\1\0\80\127\0\0\1\0", "EHLO x\r\n", "*1\r\n$4\r\nPING\r\n", ("\0"):rep(500), ("\r\n"):rep(2000),
            "GET /" .. ("%"):rep(3000) .. " HTTP/1.1\r\n\r\n", "GET /echo HTTP/" .. ("9"):rep(500) .. "\r\n\r\n",
        }
    end,
}
local names = {}
for name in pairs(texts) do names[#names + 1] = name end
table.sort(names)

--- How it ends.
local ends = {
    function(c) c:close() end, function(c) c:reset() end,
    function(c) -- half closed, and waits
        c.sock:shutdown()
        c:recv(0.2)
        c:close()
    end,
    function(c) -- takes what comes
        while #(c:recv(0.05) or "") > 0 do end
        c:close()
    end,
}

local function descriptors()
    local n = 0
    for _ in pairs(core.list "/proc/self/fd") do n = n + 1 end
    return n
end

describe("a port that strangers can reach", function()
    it("takes whatever comes, answers others meanwhile, and keeps nothing of it", function()
        local log = {}
        local server <close> = S.start {
            log = function(text) log[#log + 1] = text end, header_timeout = 1, idle_timeout = 3, body_timeout = 1, max_body = 1 << 20,
            routes = {
                ["GET /echo"] = function() return "here" end,
                ["POST /echo"] = function(req) return ("%d bytes"):format(#req.body) end,
            },
        }
        local function settled()
            local s = server.core:stats()
            return s.pending == 0 and s.connections == 0 and s.bodies == 0
        end
        local function answered()
            local r = S.get(server, "/echo")
            assert.equal(200, r.status)
            assert.equal("here", r.body)
            assert.equal("5 bytes", S.post(server, "/echo", "abcde").body)
        end
        local function hostile(name)
            local c = assert(net.connect(server.host, server.port))
            local text = texts[name]()
            local at, ok = 1, true
            while ok and at <= #text do -- in pieces
                local n = upto(3) == 1 and upto(20) or #text
                ok = c:send(text:sub(at, at + n - 1), 1)
                at = at + n
                if at <= #text then llm.sleep(0) end
            end
            local first = ok and upto(2) == 1 and c:recv(0.05)
            if first and #first > 0 then
                assert.matches("^HTTP/1%.%d [1-5]%d%d ", first)
            end
            pick(ends)(c)
        end
        local function round()
            local jobs, busy = {}, true
            for i = 1, ROUNDS do jobs[i] = names[i % #names + 1] end
            local slowest = 0
            llm.all {
                function()
                    for i = 1, #jobs, 50 do llm.map(table.move(jobs, i, math.min(i + 49, #jobs), 1, {}), hostile) end
                    busy = false
                end,
                function()
                    while busy do
                        local began = core.now()
                        answered()
                        slowest = math.max(slowest, core.now() - began)
                        llm.sleep(0.02)
                    end
                end,
                function() -- drips its headers
                    local c <close> = assert(net.connect(server.host, server.port))
                    local text = get()
                    for i = 1, #text - 1 do
                        if not (busy and c:send(text:sub(i, i))) then break end
                        llm.sleep(0.01)
                    end
                end,
            }
            assert.is_true(slowest < (slow and 120 or 30), ("others waited for %.1f s"):format(slowest))
            S.eventually(settled, 30)
            answered()
            S.eventually(settled, 30)
        end
        round()
        collectgarbage()
        local memory, open = core.memory(), descriptors()
        round()
        collectgarbage()
        assert.equal(open, descriptors())
        assert.is_true(core.memory() - memory < (slow and 200e6 or 8e6), "the process has grown")
        assert.is_nil(next(server.active))
        assert.same({}, log) -- no error of ours
    end)
end)
