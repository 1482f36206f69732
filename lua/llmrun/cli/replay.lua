--- llmrun replay: a recording's requests again, compared token by token; stops where one wants to look around.

local args = require "llmrun.cli.args"
local common = require "llmrun.cli.common"
local core = require "llmrun.core"
local count = require("llmrun.words").count
local file = require "llmrun.recording"
local replay = require "llmrun.replay"
local views = require "llmrun.views"

local M = {
    summary = "repeats what --record wrote: the same tokens, bit by bit",
    usage = "FILE [-m MODEL] [FLAGS...]",
    args = true,
    help = [[
Runs the requests of a recording again, in the recorded order, each step with the rows that it had, and compares the
tokens. Ends with status 1 if any differs. With --request a request runs by itself. With --stop-at it stops before that
step for a look around: queue, batch, blocks, tree, logits, Lua; "step" and "go" go on.]],
    examples = [[
        llmrun --record agent.rec agent.lua
        llmrun replay agent.rec
        llmrun replay agent.rec --request 12
        llmrun replay agent.rec --request all
        llmrun replay agent.rec --stop-at-request 12:40
        echo 'logits 12' | llmrun replay agent.rec --stop-at 500
        llmrun replay agent.rec --policy fair
        llmrun replay yesterday.rec --shadow mine.lua]],
    flags = {
        { "model", short = "m", arg = "MODEL", help = "the model, if it is not where it was" },
        { "request", short = "r", arg = "N", help = "this request by itself; all: each by itself" },
        { "stop-at", arg = "STEP", type = "integer", help = "stops before this step, in a console" },
        { "stop-at-request", arg = "N:TOKEN", help = "stops before request N draws its TOKENth token" },
        { "policy", arg = "NAME|FILE", help = "decides instead of what is written down" },
        { "shadow", arg = "NAME|FILE", help = "decides too, and nothing of it is done: how it differs is counted" },
        { "list", short = "l", help = "lists the requests, and runs nothing" },
        { "threads", short = "t", arg = "N", type = "integer", range = { 0, 256 },
            help = "compute threads (default: all processors)" },
        { "device", arg = "NAME", help = "cpu, cuda:N or auto [auto]" },
    },
}

local function list(rec)
    local rows = {}
    for i, id in ipairs(rec.order) do
        local r = rec.requests[id]
        rows[i] = {
            id = id, t = r.t, kind = r.kind, tenant = r.tenant, prompt = r.prompt, tokens = #r.tokens,
            ended = r.ended or "at work", first = r.steps[1], last = r.steps[#r.steps], line = r.line,
        }
    end
    print(("%s: %s, %s, %s%s"):format(rec.path, tostring(rec.header.model.name), count(#rows, "request"),
        count(rec.steps, "step"),
        rec.cut and ", without an end" or ""))
    if #rows == 0 then return end
    print(views.columns(rows, {
        { "id", "request" }, { "t", "arrival s" }, { "kind", "kind" }, { "tenant", "tenant" }, { "prompt", "prompt" },
        { "tokens", "tokens" }, { "ended", "end" }, { "first", "first step" }, { "last", "last step" },
        { "line", "line" },
    }, math.huge))
end

local function load_model(o, rec)
    local load_options = replay.load_options(rec)
    load_options.threads, load_options.device = o.threads, o.device
    local name = o.model or rec.header.model.path
    if type(name) ~= "string" then
        args.fail(("%s names no model's file; give one with -m"):format(rec.path))
    elseif not o.model and not core.stat(name) then
        args.fail(("%s: the model that was recorded is not there any more; give it with -m"):format(name))
    end
    return common.load({ model = name }, load_options)
end

--- The step to stop before.
local function stop_step(o, rec)
    if not o.stop_at_request then return o.stop_at end
    local id, token = o.stop_at_request:match "^(%d+):(%d+)$"
    id, token = math.tointeger(tonumber(id)), math.tointeger(tonumber(token))
    if not id then args.fail("--stop-at-request: N:TOKEN expected, got '" .. o.stop_at_request .. "'", 2) end
    local r = rec.requests[id]
    if not r then args.fail(("%s: there is no request %d"):format(rec.path, id)) end
    return r.steps[token] or args.fail(("request %d drew %s, no %dth"):format(id, count(#r.tokens, "token"), token))
end

local function alone(o, rec, model)
    local ids = rec.order
    if o.request ~= "all" then
        local id = math.tointeger(tonumber(o.request))
        if not id then args.fail("--request: a number or all expected, got '" .. o.request .. "'", 2) end
        if not rec.requests[id] then args.fail(("%s: there is no request %d"):format(rec.path, id)) end
        ids = { id }
    end
    local all
    for _, id in ipairs(ids) do
        local r = replay.alone(rec, model, id)
        for _, d in ipairs(r.differences) do r:explain(d) end
        if not all then
            all = r
        else
            for _, name in ipairs { "compared", "tokens", "given", "not_compared" } do
                all[name] = all[name] + r[name]
            end
            table.move(r.differences, 1, #r.differences, #all.differences + 1, all.differences)
        end
    end
    print(replay.report(all))
    return #all.differences == 0 and 0 or 1
end

-- The console ---------------------------------------------------------------------------------------------------------

local function piece(model, id) return require("llmrun.console").show(model.vocab:piece(id)) end

local function console_of(r, model)
    local rec, over = r.rec, nil
    local function where()
        local n = r:next_step()
        return n and ("before step %d"):format(n) or "at the end"
    end
    local function run_of(rest)
        local id = math.tointeger(tonumber(rest:match "^%d+" or ""))
        local run = id and r.runs[id]
        if not run then require("llmrun.console").fail("no request %s has come yet", rest) end
        return run
    end
    local commands = {
        where = { "the step that comes next", function() return where() end },
        step = { "makes a step, or N", function(rest)
            for _ = 1, tonumber(rest) or 1 do
                local n = r:next_step()
                if not n then break end
                r:run(n + 1)
            end
            return where()
        end, "[N]" },
        to = { "goes on to before a step", function(rest)
            r:run(math.tointeger(tonumber(rest)) or require("llmrun.console").fail "a step's number expected")
            return where()
        end, "STEP" },
        go = { "goes on to the end", function() over = true end },
        quit = { "ends the replay here", function() over = "quit" end },
        requests = { "those that have come and not ended", function()
            local rows = {}
            for _, run in pairs(r.active) do
                rows[#rows + 1] = { id = run.r.id, state = run.req:info().state, prompt = run.r.prompt, drawn = run.n,
                    of = #run.r.tokens, tenant = run.r.tenant, differs = run.differs and run.differs.at or nil }
            end
            table.sort(rows, function(a, b) return a.id < b.id end)
            return views.columns(rows, { { "id", "request" }, { "state", "state" }, { "tenant", "tenant" },
                { "prompt", "prompt" }, { "drawn", "drawn" }, { "of", "of" }, { "differs", "differs at" } })
        end },
        request = { "what it was asked with, and its tokens", function(rest)
            local run = run_of(rest)
            local t, text = {}, {}
            for k, v in pairs(run.r) do t[k] = v end
            for i = 1, run.n do text[i] = piece(model, run.r.tokens[i] or 0) end
            t.tokens, t.steps = nil, nil
            return require("llmrun.console").show(t) .. "\n" .. table.concat(text, " ")
        end, "N" },
        decisions = { "what is written down for the next step", function()
            for i = r.next, #rec.events do
                local e = rec.events[i]
                if e.kind == "step" then
                    return ("step %d, %d rows\nrun   %s\ndraft %s\ntook  %s\nended %s"):format(e.v.step, e.v.rows,
                        e.v.run or "", e.v.draft or "", e.v.took or "", e.v.ended or "")
                end
            end
        end },
        logits = { "logits of a request's next token, the best K", function(rest)
            local run = run_of(rest)
            local best = r:logits(run.seq, nil, tonumber(rest:match "%s(%d+)$") or 10)
            local rows = {}
            for i, b in ipairs(best) do rows[i] = { id = b.id, logit = b.logit, text = piece(model, b.id) } end
            local want = run.r.tokens[run.n + 1]
            return views.columns(rows, { { "id", "token" }, { "logit", "logit" }, { "text", "text" } })
                .. (want and ("\nrecorded: %d %s"):format(want, piece(model, want)) or "")
        end, "N [K]" },
        policy = { "who decided then, and decides now", function()
            return ("recorded: %s\nnow: %s"):format(rec.header.policy or "the built-in rule",
                r.free and "the policy that was given" or "as recorded")
        end },
        shadow = { "how the policy in the shadow differs so far", function()
            return r.shadow and r.shadow:text() or "none is there; --shadow POLICY"
        end },
        differences = { "what differed so far", function() return require("llmrun.console").show(r.differences) end },
    }
    for _, name in ipairs { "queue", "batch", "blocks", "tree", "metrics" } do
        commands[name] = { "of the engine", function() return views[name](r.engine) end }
    end
    local c = require("llmrun.console").new {
        commands = commands, env = { replay = r, recording = rec, model = model, policy = r.policy, shadow = r.shadow },
    }
    return c, where, function() return over end
end

--- A look around; true if the replay is to go on.
local function look_around(r, model)
    local c, where, over = console_of(r, model)
    local lines = require("llmrun.cli.lineedit").new()
    print(("stopped %s; help lists what there is, go goes on"):format(where()))
    while not over() do
        local line, why = lines:line "replay> "
        if why == "eof" or why == "signal" then break end
        if line then
            lines:remember(line)
            local text = c:eval(line)
            core.interrupted(true) -- Ctrl-C meanwhile has ended the line
            if text ~= "" then print(text) end
        end
    end
    return over() ~= "quit"
end

function M.run(o)
    if not o.args[1] then args.fail("no recording; see llmrun replay --help", 2) end
    if o.args[2] then args.fail(("unexpected argument '%s'"):format(o.args[2]), 2) end
    local rec, err = file.read(o.args[1])
    if not rec then args.fail(err) end
    if o.list then return list(rec) end
    if #rec.order == 0 then args.fail(rec.path .. ": it has no requests, there is nothing to repeat") end
    local stop_at = stop_step(o, rec)
    local model <close> = load_model(o, rec)
    return common.guard(function()
        replay.check_model(rec, model)
        if o.request then return alone(o, rec, model) end
        local r = replay.new(rec, model, { policy = o.policy, shadow = o.shadow })
        if stop_at and not r:run(stop_at) and not look_around(r, model) then return 0 end
        r:run()
        if r.differences[1] then r:explain(r.differences[1]) end
        print(replay.report(r))
        return #r.differences == 0 and 0 or 1
    end)
end

return M
