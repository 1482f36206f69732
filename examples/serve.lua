-- A server with programs as endpoints, and the OpenAI API beside them. With a port it serves until Ctrl-C; without one
-- it asks itself some questions and ends.
--
--   llmrun examples/serve.lua [PORT] [MODEL]
--
-- test-expect: triage: %l+, because %C+
-- test-expect: For:
-- test-expect: Against:
-- test-expect: chat: %C+
-- test-expect: the client left after %d pieces; the engine holds 0 sequences

local llm = require "llmrun"
local json = require "llmrun.json"
local net = require "llmrun.net"
local serve = require "llmrun.serve"

local port, name = tonumber(arg[1]), arg[2] or "smollm2"
local model <close> = llm.load(name)
local server <close> = serve.start {
    port = port or 0, models = { [name] = model }, routes = require "deploy.routes",
}
print("serving at " .. server:url())
if port then
    server:wait()
    return
end

local function ask(path, body)
    local r = assert(llm.http.post(server:url() .. path, nil, { json = body }))
    assert(r.status == 200, r.body)
    return assert(json.decode(r.body))
end

--- Calls on_event with each event of a stream, until it returns false.
local function listen(path, body, on_event)
    local go_on = true
    local feed = net.events(function(data)
        if go_on and data ~= "[DONE]" then go_on = on_event(assert(json.decode(data))) ~= false end
    end)
    for piece in llm.http.stream { url = server:url() .. path, method = "POST", json = body } do
        feed(piece)
        if not go_on then break end
    end
end

local triage = ask("/triage", { text = "The printer in my office is on fire, please come at once." })
print(("triage: %s, because%s"):format(triage.urgency, triage.why))

local sides = {}
listen("/both-sides", { text = "Cats in the office" }, function(event)
    sides[event.side] = (sides[event.side] or "") .. event.text
end)
for _, side in ipairs { "For:", "Against:" } do print(side .. sides[side]) end

local question = { messages = { { role = "user", content = "Say hello." } }, max_tokens = 12, temperature = 0 }
print("chat: " .. ask("/v1/chat/completions", question).choices[1].message.content)

-- a client that leaves: its request ends within a step, and what it held is free
local n = 0
listen("/v1/chat/completions", { stream = true, ignore_eos = true, messages = question.messages }, function()
    n = n + 1
    return n < 5
end)
while model:stats().sequences > 0 do llm.sleep(0.01) end
print(("the client left after %d pieces; the engine holds %d sequences"):format(n, model:stats().sequences))
