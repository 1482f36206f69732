--- Any bytes as a request to the server: "METHOD TARGET", header lines, an empty line, the body. Whatever comes is
--- answered, never with the server's own failure, and leaves nothing behind.

local json = require "llmrun.json"
local S = dofile "tests/spec/serve_support.lua"

local server, model, faults
local number = 0

local function set_up()
    local pieces = { '{"a"', ":", "1}", " word", "\n" }
    model = S.teller(pieces, { ctx = 1024, max_seqs = 8, kv = { blocks = 256 } }, function(_, n, m)
        return { [n >= 0 and n < #pieces and n or m.info.eos] = 8, default = 0 }
    end)
    server = S.start {
        models = { model }, scripts = { seconds = 0.05, timeout = 0.5, memory = 8 << 20, output = 4096, tokens = 64 },
        openai = { limits = { n = 4, best_of = 4, prompts = 4, choices = 8, total_tokens = 2000, embeddings = 4 } },
        log = function(text) faults = text end,
    }
end

--- What the listener would hand over, and what becomes of it in a.
local function request(text, a)
    local head, body = text:match("^(.-)\n\n(.*)$")
    head, body = head or text, body or ""
    local method, target = head:match("^(%u+) (%S+)")
    local headers, repeated = {}, {}
    for name, value in head:gmatch("\n([^:\n]+): ?([^\n]*)") do
        name = name:lower()
        repeated[name] = headers[name] ~= nil or nil
        headers[name] = value
    end
    local r = {}
    function r.headers() return headers, repeated end
    function r.target() return target or "/v1/chat/completions" end
    function r.method() return method or "POST" end
    function r.body() return body end
    function r.peer() return "127.0.0.1" end
    function r.drop_body() end
    function r.answer(_, status, _, out)
        assert(not a.status, "a second answer")
        a.status, a.text, a.ended = status, out, true
        return true
    end
    function r.begin(_, status)
        assert(not a.status, "a second answer")
        a.status, a.parts = status, {}
        return true
    end
    function r.write(_, out, at)
        assert(a.parts and not a.ended, "no stream")
        a.parts[#a.parts + 1] = out:sub((at or 0) + 1)
        return #out
    end
    function r.finish() a.ended = true end
    function r.close() a.closed = true end
    return r
end

return function(text)
    if not server then set_up() end
    local a = {}
    number, faults = number + 1, nil
    server:take(request(text, a), number)
    local task = server.active[number].task
    task:join()
    assert(not faults, faults)
    assert(a.closed and a.ended and a.status >= 200 and a.status < 600 and a.status ~= 500, "status " ..
        tostring(a.status) .. ": " .. tostring(a.text))
    if a.status >= 400 and a.text ~= "" then
        local e = json.decode(a.text).error
        assert(type(e.message) == "string" and utf8.len(e.message) and #e.message < 4000, a.text)
    end
    if number % 64 == 0 then
        local s = model:stats()
        assert(s.running == 0 and s.waiting == 0 and s.sequences == 0, "a request left work behind")
        model:check()
    end
    return a.status, a
end
