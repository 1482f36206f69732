-- What the specs of the server share: scripted models, and a client for each request.
local assert = require "luassert"
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

--- A copy of a table with more in it.
function M.with(base, more)
    local o = {}
    for k, v in pairs(base) do o[k] = v end
    for k, v in pairs(more or {}) do o[k] = v end
    return o
end

--- Joins the deltas of a stream: { [index] = { text, logprobs = list, finish } }, and usage.
function M.join(events)
    local out, usage = {}, nil
    assert.equal("[DONE]", events[#events])
    for i = 1, #events - 1 do
        local e = events[i]
        if e.usage and e.usage ~= json.null then usage = e.usage end
        for _, c in ipairs(e.choices) do
            local o = out[c.index] or { text = "", logprobs = {}, roles = 0, calls = {} }
            out[c.index] = o
            assert.is_nil(o.finish, "nothing may follow the end of a choice")
            local delta = c.delta or c
            local text = c.delta and delta.content or c.text
            if text and text ~= json.null then
                assert.is_truthy(utf8.len(text), "an event that is no UTF-8")
                o.text = o.text .. text
            end
            if delta.role then o.roles = o.roles + 1 end
            for _, call in ipairs(delta.tool_calls or {}) do
                local t = o.calls[call.index + 1] or { arguments = "" }
                o.calls[call.index + 1] = t
                if call.id then t.id, t.name = call.id, call["function"].name end
                t.arguments = t.arguments .. call["function"].arguments
            end
            local lp = c.logprobs
            if lp and lp ~= json.null then
                for _, item in ipairs(lp.content or lp.tokens) do table.insert(o.logprobs, item) end
                for k, at in ipairs(lp.text_offset or {}) do
                    o.offsets = o.offsets or {}
                    o.offsets[#o.offsets + 1] = at
                    assert.is_number(lp.token_logprobs[k] == json.null and 0 or lp.token_logprobs[k])
                end
            end
            if c.finish_reason ~= json.null then o.finish = c.finish_reason end
        end
    end
    return out, usage
end

--- A server for one model, and shorthands that check the status.
function M.serving(model, opts)
    local server = M.start(M.with({ models = { model } }, opts))
    local api = { server = server, model = model }
    function api.ok(path, body)
        local r = M.post(server, path, body)
        assert.equal(200, r.status, r.body)
        return r.json or r.events
    end
    function api.refused(path, body, param, status)
        local r = M.post(server, path, body)
        assert.equal(status or 400, r.status, r.body)
        local e = r.json.error
        assert.is_string(e.message)
        assert.is_string(e.type)
        assert.equal(param or json.null, e.param, r.body)
        return e
    end
    return setmetatable(api, { __close = function()
        server:close()
        model:check()
        assert.equal(0, model:stats().sequences)
        model:close()
    end })
end

return M
