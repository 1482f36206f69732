-- What has to do with time, run by clock_spec.lua under a wall clock that jumps (clock_shim.c). Argument: a folder.
local core = require "llmrun.core"
local llm = require "llmrun"
local net = require "llmrun.net"
local sandbox = require "llmrun.sandbox"
local simulate = require "llmrun.simulate"
local S = dofile "tests/spec/serve_support.lua"
local folder = ...

-- The clock does jump, or nothing here means anything.
local back = 0
for _ = 1, 10 do
    if os.time() > os.time() then back = back + 1 end
end
assert(back > 0, "the wall clock does not jump")

--- fn takes at least and at most so many seconds.
local function takes(name, least, most, fn)
    local began = core.now()
    local r = table.pack(fn())
    local seconds = core.now() - began
    if not (seconds >= least and seconds <= most) then error(("%s took %g s"):format(name, seconds), 2) end
    return table.unpack(r, 1, r.n)
end

local function code(_, _, c) return c end

takes("sleep", 0.05, 20, function() llm.sleep(0.05) end)
assert(takes("timeout", 0.05, 20, function() return code(llm.timeout(0.05, llm.sleep, 60)) end) == "limit")
local order = {}
llm.all {
    function() llm.sleep(0.06) order[#order + 1] = 2 end, function() llm.sleep(0.02) order[#order + 1] = 1 end,
}
assert(order[1] == 1 and order[2] == 2)

local r = takes("exec", 0.1, 20, function() return assert(llm.exec({ "sleep", "60" }, { timeout = 0.1 })) end)
assert(r.timed_out, "exec did not end it in time")

assert(takes("sandbox", 0.02, 30, function()
    return code(sandbox.run("while true do end", { seconds = 0.05 }))
end) == "limit")

-- The server, its limits, and clients of both kinds
local m <close> = S.teller { "a", "b" }
local server <close> = S.start {
    models = { m }, request_timeout = 0.2, routes = { ["GET /slow"] = function() llm.sleep(60) end },
}
local answer = S.post(server, "/v1/chat/completions", { messages = { { role = "user", content = "x" } } })
assert(answer.status == 200 and answer.json.choices[1].message.content == "ab", answer.body)
assert(math.type(answer.json.created) == "integer")
assert(takes("request_timeout", 0.2, 20, function() return S.get(server, "/slow").status end) >= 500)
local deaf <close> = S.start { models = {}, routes = { ["GET /deaf"] = function() llm.sleep(60) end } }
assert(takes("http", 0.1, 20, function()
    return code(llm.http.get(deaf:url() .. "/deaf", { timeout = 0.1 }))
end) == "limit")
local c <close> = assert(net.connect(deaf.host, deaf.port))
assert(c:send(("GET /deaf HTTP/1.1\r\nHost: %s:%d\r\n\r\n"):format(deaf.host, deaf.port)))
assert(not takes("recv", 0.1, 20, function() return c:recv(0.1) end))

-- Times in results
local s <close> = m:session()
s:append ">"
local t = s:gen({ max_tokens = 2 }).timing
for _, name in ipairs { "queued", "first_token", "total" } do
    assert(t[name] >= 0 and t[name] < 20, name .. " is " .. t[name])
end
for k, v in pairs(m:metrics()) do
    if type(v) == "number" then assert(v >= 0, k) end
end

-- A policy whose file seems to be older than before is read again
local path = folder .. "/p.lua"
local function write(text)
    local f <close> = assert(io.open(path, "w"))
    f:write(text)
end
write "return { name = 'one', finish = function() end }"
require("llmrun.policy").log = function() end
local w = m:watch(path, { every = 0.01 })
write "return { name = 'two', finish = function() end }"
os.execute(("touch -d 2001-01-01 '%s'"):format(path))
S.eventually(function()
    s:rewind(1)
    s:gen { max_tokens = 1 }
    return w.status.name == "two"
end)

-- The simulator has a clock of its own
local profile = {
    format = "llmrun-profile-1", name = "plain", model = { context = 1000 },
    step = { kind = "table", rows = { 1, 100 }, seconds = { 1, 100 } },
    kv = { bytes_per_token = 100, capacity_tokens = 1600 },
}
local one = simulate.run { trace = { { at = 5, prompt = 10, output = 4 } }, profile = profile, rows = true }
assert(one.records[1].e2e == 13 and one.seconds == 18)
takes("drain", 0, 20, function() server:stop(0.2) end)
print "as ever"
