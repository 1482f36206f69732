-- Many streaming clients on a real model, one in four of which hangs up at a random moment: no wrong answer, nothing
-- left behind. LLMRUN_SOAK sets the seconds (20).
local llm = require "llmrun"
local core = require "llmrun.core"
local json = require "llmrun.json"
local net = require "llmrun.net"
local S = dofile "tests/spec/serve_support.lua"

local PATH = "/v1/chat/completions"

local function body_of(i, n)
    return assert(json.encode {
        messages = { { role = "user", content = ("Tell me about the number %d."):format(i) } }, max_tokens = n,
        temperature = 0, stream = true, ignore_eos = true,
    })
end

--- Streams one answer; `leave`: the number of pieces after which the client hangs up.
local function ask(server, body, leave, how)
    local c <close> = assert(net.connect(server.host, server.port))
    local text, pieces = {}, 0
    local stop = {}
    local feed = net.events(function(data)
        if data == "[DONE]" then return end
        local delta = json.decode(data).choices[1].delta
        if delta.content and delta.content ~= "" then
            text[#text + 1] = delta.content
            pieces = pieces + 1
            if leave and pieces >= leave then error(stop, 0) end
        end
    end)
    local ok, err = pcall(net.request, c, { path = PATH, body = body, on_data = feed, timeout = 120 })
    if not ok then
        assert(err == stop, tostring(err))
        c[how](c)
        return table.concat(text), true
    end
    assert(err, "no answer")
    return table.concat(text), false
end

local function descriptors() return #core.list "/proc/self/fd" end

describe("64 clients that stream #slow", function()
    it("get right answers, and leave nothing behind", function()
        local seconds = tonumber(os.getenv "LLMRUN_SOAK" or "20")
        local model = llm.load "smollm2"
        local server = S.start { models = { model } }
        local want = {}
        for i = 1, 8 do want[i] = ask(server, body_of(i, 24)) end
        collectgarbage()
        local memory, open = core.memory(), descriptors()
        local deadline, answers, left = core.now() + seconds, 0, 0
        local clients = {}
        for k = 1, 64 do
            clients[k] = function()
                local n = k
                while core.now() < deadline do
                    n = n * 1103515245 + 12345 & 0x7fffffff
                    local i, leave = n // 65536 % 8 + 1, nil
                    if n // 1024 % 4 == 0 then leave = n // 4096 % 20 + 1 end
                    local text, gone = ask(server, body_of(i, 24), leave, n % 2 == 0 and "close" or "reset")
                    if gone then
                        left = left + 1
                        assert.equal(text, want[i]:sub(1, #text))
                    else
                        answers = answers + 1
                        assert.equal(want[i], text)
                    end
                end
                return true
            end
        end
        llm.all(clients)
        S.eventually(function()
            local s = model:stats()
            return s.running == 0 and s.waiting == 0 and s.sequences == 0 and server.core:stats().pending == 0
        end, 10)
        model:check()
        assert.equal(0, model:stats().kv[1].used)
        S.eventually(function() return server.core:stats().connections == 0 end, 10)
        assert.equal(open, descriptors())
        collectgarbage()
        -- sanitizers keep what is freed, and know of each byte
        local most = os.getenv "LLMRUN_TEST_SANITIZE" == "1" and 2e9 or 60e6
        assert.is_true(core.memory() - memory < most, ("%d MB more"):format((core.memory() - memory) // 1000000))
        assert.is_true(answers >= 32 and left >= 8, answers .. " answers, " .. left .. " left")
        io.stderr:write(("  %d answers, %d clients left in %d s\n"):format(answers, left, seconds))
        server:stop()
        model:close()
    end)
end)
