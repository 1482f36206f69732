-- An idle server costs next to no processor time: its threads sleep, those that compute and those of the connections.
local llm = require "llmrun"
local net = require "llmrun.net"
local support = dofile "tests/spec/serve_support.lua"

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
end)
