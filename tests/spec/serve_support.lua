-- What the specs of the server share: scripted models, and a client for each request.
local llm = require "llmrun"
local json = require "llmrun.json"
local net = require "llmrun.net"
local serve = require "llmrun.serve"

local M = {}

--- A model that says these pieces after any prompt (a chat, or a text that ends in ">"), then its end. pick(tokens, n):
--- instead of the pieces: the n-th (0-based) token of an answer.
function M.teller(pieces, opts, pick)
    local m, start, head
    local o = { vocab = pieces, ctx = 2048, max_seqs = 64, kv = { blocks = 1024 } }
    for k, v in pairs(opts or {}) do o[k] = v end
    local function answered(tokens)
        for i = #tokens, 1, -1 do
            if tokens[i] == start then return #tokens - i - head end
            if tokens[i] == m.mark then return #tokens - i end
        end
        return #tokens
    end
    o.next = function(tokens)
        local n = answered(tokens)
        if pick then return pick(tokens, n, m) end
        return n < #pieces and n or m.info.eos
    end
    m = llm.scripted(o)
    start = m:tokenize("<|im_start|>", { special = true })[1]
    head = #m:tokenize "assistant\n"
    m.mark = m:tokenize(">")[1]
    return m
end

--- A server on any free port, without a log.
function M.start(opts)
    local o = { port = 0, log = function() end }
    for k, v in pairs(opts or {}) do o[k] = v end
    return serve.start(o)
end

--- A request on a connection of its own. The answer's JSON is in r.json, server-sent events in r.events (decoded).
function M.request(server, o)
    local c <close> = assert(net.connect(server.host, server.port))
    if type(o.body) == "table" then
        o.body = assert(json.encode(o.body))
    end
    local r = assert(net.request(c, o))
    if (r.headers["content-type"] or ""):find("application/json", 1, true) and r.body ~= "" then
        r.json = assert(json.decode(r.body))
    elseif (r.headers["content-type"] or ""):find("event-stream", 1, true) then
        r.events = {}
        net.events(function(data)
            r.events[#r.events + 1] = data == "[DONE]" and data or assert(json.decode(data))
        end)(r.body)
    end
    return r
end

function M.get(server, path, headers) return M.request(server, { path = path, headers = headers }) end
function M.post(server, path, body, headers)
    return M.request(server, { path = path, body = body, headers = headers, method = "POST" })
end

--- Bytes on a connection of their own, and all that comes back until the end or nothing more within `wait` seconds.
function M.raw(server, text, wait)
    local c <close> = assert(net.connect(server.host, server.port))
    local ok = c:send(text)
    local parts = {}
    while ok do
        local piece = c:recv(wait or 0.3)
        if not piece then break end
        if piece == "" then
            parts.ended = true
            break
        end
        parts[#parts + 1] = piece
    end
    return table.concat(parts), parts.ended or false
end

--- Waits until fn() is true; fails after some seconds.
function M.eventually(fn, seconds)
    local core = require "llmrun.core"
    local deadline = core.now() + (seconds or 5) * (os.getenv "LLMRUN_TEST_SANITIZE" and 5 or 1)
    while not fn() do
        if core.now() > deadline then error("it did not come to that in time", 2) end
        llm.sleep(0.005)
    end
end

return M
