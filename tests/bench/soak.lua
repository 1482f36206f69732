--- Mixed load through the server with random faults, for a time: right answers stay right, nothing is left behind.
---
---   llmrun tests/bench/soak.lua SECONDS [MODEL [CLIENTS [SEED]]]      MODEL: "scripted" (default), or one of llm.load
---
--- Clients stream chats, whose text must be what it was before the faults began, and do what real ones do: hang up,
--- read slowly, send nonsense (the fuzz corpus of requests, bytes that are no HTTP), ask for schemas, programs,
--- samplers that fail, loop or hoard. Meanwhile policies are swapped, some of which fail or loop, and allocations fail.
--- Prints a report, and fails if an answer was wrong or if something is left.
--- tests/spec/soak_spec.lua runs it for some seconds.

local core = require "llmrun.core"
local json = require "llmrun.json"
local llm = require "llmrun"
local net = require "llmrun.net"
local tables = require "llmrun.tables"
local S = dofile "tests/spec/serve_support.lua"

local M = {}

local CHAT = "/v1/chat/completions"

-- What clients do: each returns the name of what came of it ---------------------------------------------------------

local function body(i, n, more)
    local b = {
        messages = { { role = "user", content = ("Tell me about the number %d."):format(i) } }, max_tokens = n,
        temperature = 0, stream = true, ignore_eos = true,
    }
    for k, v in pairs(more or {}) do b[k] = v end
    return assert(json.encode(b))
end

local stop = {}

--- Streams one answer: its text so far, "done", "left" or "refused" or "cut" (its last event is an error, or the stream
--- ended too soon), status.
local function stream(server, text, leave, pause)
    local c <close> = assert(net.connect(server.host, server.port))
    local parts, last = {}, nil
    local feed = net.events(function(data)
        last = data
        if data == "[DONE]" then return end
        local v = json.decode(data)
        local delta = v.choices and v.choices[1] and v.choices[1].delta
        if delta and delta.content and delta.content ~= json.null and delta.content ~= "" then
            parts[#parts + 1] = delta.content
            if pause then llm.sleep(pause) end
            if leave and #parts >= leave then error(stop, 0) end
        end
    end)
    local status
    local ok, r = pcall(net.request, c, {
        path = CHAT, body = text, timeout = 120, on_head = function(head) status = head.status end, on_data = feed,
    })
    local got = table.concat(parts)
    if not ok then
        if r ~= stop then error(r, 0) end
        c[#got % 2 == 0 and "close" or "reset"](c)
        return got, "left", status
    end
    if status ~= 200 then return got, "refused", status or 0 end
    return got, r and last == "[DONE]" and "done" or "cut", status
end

local function post(server, path, value)
    local c <close> = assert(net.connect(server.host, server.port))
    local r = net.request(c, {
        path = path, method = "POST", body = type(value) == "string" and value or json.encode(value), timeout = 120,
    })
    return r and r.status or 0, r and r.body
end

local SCRIPTS = {
    "error('no')", "while true do end", "local t = {} while true do t[#t + 1] = ('x'):rep(10000) end",
    "return (function() return pcall(string.rep, 'x', 1 << 40) end)()",
    "local s = llm.model:session() s:append 'a' return", "while true do pcall(function() while true do end end) end",
    "print(('x'):rep(1000000))", "return ('a'):rep(30):find(('a?'):rep(30) .. 'b')",
}
local SAMPLERS = {
    "return function(logits) error 'no' end", "return function(logits) while true do end end", "return 5",
    "return { { 'top_k', 3 }, function(logits, ctx) logits:add(5, 1) end }",
}

local function corpus()
    local list = {}
    for _, name in ipairs(core.list "tests/fuzz/corpus/openai") do
        local f <close> = assert(io.open("tests/fuzz/corpus/openai/" .. name, "rb"))
        list[#list + 1] = f:read "a"
    end
    return list
end

--- A request of the corpus with its length put right, perhaps with damage.
local function nonsense(run)
    local text = run.corpus[run.random(#run.corpus)]
    local head, rest = text:match "^(.-)\n\n(.*)$"
    head, rest = head or text, rest or ""
    local line, headers = head:match "^([^\n]*)\n?(.*)$"
    if rest ~= "" and run.random(2) == 1 then
        local at = run.random(#rest)
        rest = rest:sub(1, at - 1) .. string.char(run.random(256) - 1) .. rest:sub(at + run.random(4) - 1)
    end
    local raw = ("%s HTTP/1.1\r\n%s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"):format(line,
        headers:gsub("\n", "\r\n"), #rest, rest)
    if run.random(4) == 1 then raw = raw:sub(1, run.random(#raw)) end
    local c <close> = assert(net.connect(run.server.host, run.server.port))
    if not c:send(raw) then return "nonsense, cut off" end
    local first = c:recv(2)
    local status = first and first:match "^HTTP/1%.1 (%d)"
    return status and ("nonsense, %sxx"):format(status) or "nonsense, cut off"
end

local acts = {}

local function chat(run, leave, pause)
    local i = run.random(#run.want)
    local text, how, status = stream(run.server, body(i, run.tokens), leave, pause)
    if how == "done" then
        if text ~= run.want[i] then run.wrong[#run.wrong + 1] = ("%q instead of %q"):format(text, run.want[i]) end
    elseif text ~= run.want[i]:sub(1, #text) then
        run.wrong[#run.wrong + 1] = ("%q is no beginning of %q"):format(text, run.want[i])
    end
    return how == "refused" and ("chat, %d"):format(status) or "chat, " .. how
end

function acts.chat(run) return chat(run) end
function acts.leave(run) return chat(run, run.random(run.tokens)) end
function acts.slow(run) return chat(run, nil, 0.02) .. " (slow reader)" end
acts.nonsense = nonsense
function acts.bytes(run)
    local t = {}
    for i = 1, run.random(200) do t[i] = string.char(run.random(256) - 1) end
    S.raw(run.server, table.concat(t), 0.2)
    return "bytes that are no HTTP"
end
function acts.schema(run)
    local status, text = post(run.server, CHAT, {
        messages = { { role = "user", content = "JSON" } }, max_tokens = 12,
        response_format = { type = "json_schema", json_schema = { name = "x", schema = {
            type = "object", properties = { a = { enum = { 1, 2 } } }, required = { "a" }, additionalProperties = false,
        } } },
    })
    if status == 200 then
        local choice = json.decode(text).choices[1]
        local v = choice.finish_reason == "stop" and json.decode(choice.message.content)
        if choice.finish_reason == "stop" and not (v and (v.a == 1 or v.a == 2)) then
            run.wrong[#run.wrong + 1] = "schema: " .. choice.message.content
        end
    end
    return "schema, " .. status
end
function acts.many(run)
    return "n = 4, " .. post(run.server, "/v1/completions", {
        prompt = { "a>", "b>" }, n = 2, best_of = 4, max_tokens = 4, temperature = 1, seed = run.random(1000),
    })
end
function acts.program(run)
    return "failing program, " .. post(run.server, "/v1/programs", { program = SCRIPTS[run.random(#SCRIPTS)] })
end
function acts.sampler(run)
    return "sampler, " .. post(run.server, CHAT, {
        messages = { { role = "user", content = "x" } }, max_tokens = 3, sampler = SAMPLERS[run.random(#SAMPLERS)],
    })
end

local ORDER = { "chat", "chat", "chat", "leave", "leave", "slow", "nonsense", "nonsense", "bytes", "schema", "many",
    "program", "sampler" }

-- Faults -------------------------------------------------------------------------------------------------------------

local POLICIES = {
    "fcfs", "shortest_first", "fair", "priority", "mlfq", "longest_prefix", "deadline",
    { name = "fails", schedule = function() error "no" end },
    { name = "does nothing", schedule = function() end },
    { name = "preempts", schedule = function(_, step)
        for _, r in ipairs(step.running) do step:preempt(r) end
        for _, r in ipairs(step.waiting) do step:run(r, 64) end
    end },
    { name = "loops", schedule = function() while true do end end },
}

local function faults(run)
    while core.now() < run.deadline do
        llm.sleep(0.2 + run.random(100) / 100)
        local what = run.random(3)
        if what == 1 then
            local p = POLICIES[run.random(#POLICIES)]
            run.model:use(p)
            local name = type(p) == "table" and p.name or p
            run.did["policy " .. name] = (run.did["policy " .. name] or 0) + 1
        elseif run.allocations then
            core.fail_alloc(run.random(3000))
            run.did["failing allocation"] = (run.did["failing allocation"] or 0) + 1
        end
    end
    core.fail_alloc(0)
    run.model:use "fcfs"
end

-- The run ------------------------------------------------------------------------------------------------------------

local function scripted()
    local pieces = { "one", " two", " three", " four", " five", " six", '{"a":', " 1", "}" }
    return S.teller(pieces, { ctx = 1024, max_seqs = 16, kv = { blocks = 192 } }, function(tokens, n, m)
        local h = 7
        for i = math.max(1, #tokens - n - 20), #tokens - n do h = (h * 31 + (tokens[i] or 0)) % 1000003 end
        return { [(h + n * 5) % #pieces] = 6, [m.info.eos] = 1, default = 0 }
    end)
end

local function count(t, k) t[k] = (t[k] or 0) + 1 end

--- o: seconds, model, clients, seed, allocations (let some fail), log. Returns what happened: answers, did, wrong,
--- left (what is left behind, texts), memory (bytes more at the end), seconds.
function M.run(o)
    local seed = o.seed or 1
    local function random(n)
        seed = seed * 6364136223846793005 + 1442695040888963407
        return (seed >> 33) % n + 1
    end
    local model = (o.model or "scripted") == "scripted" and scripted() or llm.load(o.model, { ctx = 2048 })
    local run = {
        model = model, random = random, corpus = corpus(), want = {}, wrong = {}, answers = {}, did = {},
        tokens = 12, allocations = o.allocations,
        server = S.start {
            models = { model }, scripts = { seconds = 0.1, timeout = 2, memory = 8 << 20, at_once = 8 },
            openai = { limits = { n = 8, best_of = 8 } },
            log = function(text) count(o.log or {}, text:sub(1, 400)) end,
        },
    }
    for i = 1, 4 do run.want[i] = stream(run.server, body(i, run.tokens)) end
    collectgarbage()
    local memory, open, began = core.memory(), #core.list "/proc/self/fd", core.now()
    run.deadline = began + o.seconds
    local tasks = { function() faults(run) end }
    for _ = 1, o.clients or 12 do
        tasks[#tasks + 1] = function()
            while core.now() < run.deadline do
                local name = ORDER[random(#ORDER)]
                local ok, what = pcall(acts[name], run)
                count(run.answers, ok and what or ("%s: %s"):format(name, tostring(what):sub(1, 200)))
            end
        end
    end
    llm.all(tasks)
    local left = {}
    local function eventually(what, fn)
        local ok = pcall(S.eventually, fn, 20)
        if not ok then left[#left + 1] = what end
    end
    eventually("requests", function()
        local s = model:stats()
        return s.running == 0 and s.waiting == 0 and s.sequences == 0 and run.server.core:stats().pending == 0
    end)
    for i = 1, 4 do
        local text, how = stream(run.server, body(i, run.tokens))
        if how ~= "done" or text ~= run.want[i] then left[#left + 1] = "a wrong answer after all is over" end
    end
    eventually("connections", function() return run.server.core:stats().connections == 0 end)
    eventually("blocks", function() return model:stats().kv[1].used == 0 end)
    eventually("descriptors", function() return #core.list "/proc/self/fd" <= open end)
    model:check()
    collectgarbage()
    run.left, run.memory, run.seconds = left, core.memory() - memory, core.now() - began
    run.server:stop()
    model:close()
    return run
end

local function main(seconds, model, clients, seed)
    local log = {}
    local run = M.run {
        seconds = tonumber(seconds), model = model, clients = tonumber(clients or "12"), seed = tonumber(seed or "1"),
        allocations = true, log = log,
    }
    print(("%s, %d clients, %.0f s, seed %s"):format(model or "scripted", clients or 12, run.seconds, seed or 1))
    print "\n| what clients got | times |\n|---|---|"
    for _, k in ipairs(tables.sorted_keys(run.answers)) do print(("| %s | %d |"):format(k, run.answers[k])) end
    print "\n| faults | times |\n|---|---|"
    for _, k in ipairs(tables.sorted_keys(run.did)) do print(("| %s | %d |"):format(k, run.did[k])) end
    print(("\nwrong answers: %d; left behind: %s; resident memory: %+.1f MB"):format(#run.wrong,
        #run.left == 0 and "nothing" or table.concat(run.left, ", "), run.memory / 1e6))
    for i = 1, math.min(5, #run.wrong) do print(run.wrong[i]) end
    for _, k in ipairs(tables.sorted_keys(log)) do print(("\nlog, %d times: %s"):format(log[k], k)) end
    return (#run.wrong == 0 and #run.left == 0) and 0 or 1
end

if ... then os.exit(main(...), true) end
return M
