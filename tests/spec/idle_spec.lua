-- An idle server costs next to no processor time: its threads sleep, those that compute and those of the connections.
local llm = require "llmrun"
local net = require "llmrun.net"
local support = dofile "tests/spec/serve_support.lua"

local core = require "llmrun.core"

describe("an idle server", function()
    it("uses no processor time to speak of", function()
        local model <close> = llm.load("smollm2", { ctx = 128, threads = 2 })
        local server <close> = support.start { models = { model } }
        local r = support.request(server, { path = "/v1/completions", body = { prompt = "A", max_tokens = 4 } })
        assert.equal(200, r.status)
        local connection <close> = assert(net.connect(server.host, server.port))
        llm.sleep(0.05) -- threads that wait look around for some microseconds before they sleep
        local before = os.clock() -- of all threads
        llm.sleep(1)
        assert.is_true(os.clock() - before < 0.2)
        assert.is_truthy(connection) -- open until here
    end)

    it("gives back what large requests took whose clients have gone", function()
        if os.getenv "LLMRUN_TEST_SANITIZE" then return end -- sanitizers keep what is free
        local model <close> = llm.load("smollm2", { ctx = 128 })
        local server <close> = support.start { models = { model } }
        local body = ('{"prompt":"%s","max_tokens":4}'):format(("One more word. "):rep(130000))
        local head = ("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"):format(#body)
        collectgarbage()
        core.trim_memory()
        local before, clients = core.memory(), {}
        for i = 1, 12 do
            clients[i] = assert(net.connect(server.host, server.port))
            clients[i]:send(head .. body)
        end
        for _, c in ipairs(clients) do c:close() end
        support.eventually(function() return core.memory() < before + (40 << 20) end, 60)
    end)
end)
