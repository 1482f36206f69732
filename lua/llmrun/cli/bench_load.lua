--- llmrun bench under load: requests together (--concurrency), many turns on a shared prefix (--load agents), and a
--- real service's arrivals (--replay).
---
--- All drive the engine step by step with requests that arrive at set times on its clock. TTFT: from a request's due
--- time to its first token. TPOT: mean time of its tokens after the first. Replies are arg max without an end.

local core = require "llmrun.core"
local common = require "llmrun.cli.common"
local args = require "llmrun.cli.args"
local traces = require "llmrun.traces"
local quantile = require("llmrun.statistics").quantile

local M = {}

M.flags = {
    { "concurrency", arg = "LIST", help = "so many requests at once, e.g. 1,4,8,16,32: throughput, TTFT, TPOT" },
    { "load", arg = "KIND", choices = { "agents" },
      help = "agents: sessions of many turns with a long shared prefix, short replies, forks" },
    { "replay", arg = "FILE", help = "requests as in a trace file: see traces.lua" },
    { "prompt", arg = "N", type = "integer", range = { 1 },
        help = "prompt tokens of a request (128); new tokens of a turn (32)" },
    { "shared", arg = "N", type = "integer", range = { 0 },
        help = "leading tokens that all prompts share (64; agents 1024)" },
    { "output", arg = "N", type = "integer", range = { 1 }, help = "tokens to generate (64; agents 16)" },
    { "sessions", arg = "N", type = "integer", range = { 1 }, default = 4,
        help = "agents: sessions at once; every other one forks" },
    { "turns", arg = "N", type = "integer", range = { 1 }, default = 16, help = "agents: turns of a session" },
    { "requests", arg = "N", type = "integer", range = { 1 }, default = 100, help = "replay: most rows of the trace" },
    { "skip", arg = "N", type = "integer", range = { 0 }, default = 0,
        help = "replay: rows to leave out at the beginning" },
    { "scale", arg = "X", type = "number", above = 0, default = 0.1, help = "replay: lengths times X" },
    { "speed", arg = "X", type = "number", range = { 0 }, default = 1,
        help = "replay: X times as fast (0: all at once)" },
    { "kv-tokens", arg = "N", type = "integer", range = { 1 }, help = "agents, replay: size of the KV pool" },
}

--- Whether the flags ask for a load rather than for plain speed.
function M.wanted(o) return o.concurrency or o.load or o.replay end

local function must(ok, err)
    if not ok then args.fail(err) end
    return ok
end

M.some_tokens = require "llmrun.sample_tokens"

--- { mean, median, p90, p99 } of a list of seconds, in milliseconds; nil without any.
function M.percentiles(list)
    if #list == 0 then return nil end
    local sorted, sum = table.move(list, 1, #list, 1, {}), 0
    table.sort(sorted)
    for _, v in ipairs(sorted) do sum = sum + v end
    local function ms(v) return math.floor(v * 1e5 + 0.5) / 100 end
    return {
        mean = ms(sum / #sorted), median = ms(quantile(sorted, 0.5)), p90 = ms(quantile(sorted, 0.9)),
        p99 = ms(quantile(sorted, 0.99)),
    }
end

---- Requests that arrive at set times

local Driver = {}
Driver.__index = Driver

--- Requests that are due wait in `due`, ordered by time: { at =, ids =, output =, done = function(request, result) }.
local function new_driver(model)
    return setmetatable({ model = model, engine = model.engine, due = {}, active = {}, results = {} }, Driver)
end

function Driver:add(job)
    local at = #self.due + 1
    while at > 1 and self.due[at - 1].at > job.at do at = at - 1 end
    table.insert(self.due, at, job)
end

function Driver:submit(job)
    local seq = must(self.engine:seq())
    must(seq:append(job.ids))
    job.request = must(self.engine:request(seq, {
        kind = "generate", max_tokens = job.output, ignore_eos = true, stages = { { "temperature", 0 } },
    }))
    job.seq = seq
    self.active[#self.active + 1] = job
    job.beside = #self.active - 1
end

local function result_of(job)
    local i = job.request:info()
    if i.state ~= "done" then args.fail(i.error or i.state) end
    return {
        prompt = i.n_prompt, cached = i.n_cached, computed = i.n_computed, output = i.n_generated,
        preempted = i.n_preempted, beside = job.beside, ttft = i.t_first - job.at, total = i.t_end - job.at,
        ended = i.t_end,
        tpot = i.n_generated > 1 and (i.t_last - i.t_first) / (i.n_generated - 1) or nil,
    }
end

function Driver:collect()
    local kept = {}
    for _, job in ipairs(self.active) do
        if job.request:active() then
            kept[#kept + 1] = job
        else
            local result = result_of(job)
            self.results[#self.results + 1] = result
            if job.done then job.done(job.request:tokens(), result) end
            job.request:close()
            job.seq:close()
        end
    end
    self.active = kept
end

--- Runs until nothing is due and nothing runs: the results in the order of ending, and the seconds that it took.
function Driver:run()
    local engine = self.engine
    local begin = engine:now()
    for _, job in ipairs(self.due) do job.at = job.at + begin end
    while #self.due > 0 or #self.active > 0 do
        if core.interrupted() then args.fail("interrupted", 130) end
        while self.due[1] and self.due[1].at <= engine:now() do self:submit(table.remove(self.due, 1)) end
        if #self.active > 0 then
            local t = core.now()
            must(engine:step())
            while engine:next_event() do end
            self:collect()
            if self.saw_step then self.saw_step(t, core.now() - t) end
        else
            core.sleep(math.max(0, math.min(self.due[1].at - engine:now(), 0.1)))
        end
    end
    return self.results, engine:now() - begin
end

local function totals(results)
    local t = { prompt = 0, cached = 0, output = 0, preempted = 0, ttft = {}, tpot = {} }
    for _, r in ipairs(results) do
        for _, k in ipairs { "prompt", "cached", "output", "preempted" } do t[k] = t[k] + r[k] end
        t.ttft[#t.ttft + 1] = r.ttft
        t.tpot[#t.tpot + 1] = r.tpot
    end
    return t
end

local function round(x, digits)
    local f = 10 ^ (digits or 2)
    return math.floor(x * f + 0.5) / f
end

---- Requests together

--- n requests at once, several times on an empty cache: a record for the report.
---@param o { prompt: integer, shared: integer, output: integer, repeat: integer }
function M.measure_together(model, n, o, progress)
    local rates, all = {}, {}
    for k = 0, o["repeat"] do
        if progress then progress(("%d requests: %d of %d"):format(n, k, o["repeat"])) end
        model.engine:drop_cached()
        local driver = new_driver(model)
        for i = 1, n do
            local ids = M.some_tokens(model, o.shared, k * 1009)
            table.move(M.some_tokens(model, o.prompt - o.shared, k * 1009 + i), 1, o.prompt - o.shared, #ids + 1, ids)
            driver:add { at = 0, ids = ids, output = o.output }
        end
        local results, seconds = driver:run()
        if k > 0 then -- the first is to warm up
            rates[k] = n * o.output / seconds
            table.move(results, 1, #results, #all + 1, all)
        end
    end
    if progress then progress() end
    local mean, sd, median = common.statistics(rates)
    local t = totals(all)
    return {
        concurrency = n, prompt = o.prompt, shared = o.shared, output = o.output, ["repeat"] = o["repeat"],
        output_tps = round(mean), output_tps_sd = round(sd), output_tps_median = round(median),
        ttft_ms = M.percentiles(t.ttft), tpot_ms = M.percentiles(t.tpot), hit_rate = round(t.cached / t.prompt, 4),
        preempted = t.preempted,
    }
end

---- Agents

--- Mean of a field over a list.
local function mean_of(list, field)
    local sum = 0
    for _, r in ipairs(list) do sum = sum + r[field] end
    return sum / #list
end

--- Least squares of y = a + b x1 + c x2 over rows { x1, x2, y }: a, b, c.
function M.fit(rows)
    local m = { { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 } }
    for _, r in ipairs(rows) do
        local x = { 1, r[1], r[2], r[3] }
        for i = 1, 3 do
            for j = 1, 4 do m[i][j] = m[i][j] + x[i] * x[j] end
        end
    end
    for i = 1, 3 do
        local best = i
        for k = i + 1, 3 do
            if math.abs(m[k][i]) > math.abs(m[best][i]) then best = k end
        end
        m[i], m[best] = m[best], m[i]
        if math.abs(m[i][i]) < 1e-12 then return nil end
        for k = 1, 3 do
            if k ~= i then
                local f = m[k][i] / m[i][i]
                for j = i, 4 do m[k][j] = m[k][j] - f * m[i][j] end
            end
        end
    end
    return m[1][4] / m[1][1], m[2][4] / m[2][2], m[3][4] / m[3][3]
end

--- One session: each turn a new request with the whole history, as a client without a session would send it. The new
--- tokens of a turn vary from a quarter to seven quarters of o.prompt. The other sessions start when the first one has
--- had its first turn, so that the shared prefix is there.
local function start_session(driver, model, o, state, history, number, turn)
    local span = math.max(1, o.prompt * 3 // 2)
    local n_new = math.max(1, o.prompt // 4 + (number * 7 + turn * 29) * 13 % span)
    local before = #history
    local ids = table.move(history, 1, before, 1, {})
    table.move(M.some_tokens(model, n_new, number * 4099 + turn), 1, n_new, before + 1, ids)
    driver:add {
        at = state.now(), ids = ids, output = o.output,
        done = function(reply, result)
            result.history, result.new, result.turn = before, n_new, turn
            table.move(reply, 1, #reply, #ids + 1, ids)
            if state.first then
                state.first = nil
                for i = 2, o.sessions do
                    start_session(driver, model, o, state, M.some_tokens(model, o.shared, 77), i, 1)
                end
            end
            if turn >= o.turns then return end
            start_session(driver, model, o, state, ids, number, turn + 1)
            if turn == o.turns // 2 and number % 2 == 0 and number < state.forks then
                state.forked = state.forked + 1
                start_session(driver, model, o, state, ids, state.forks + number, turn + 1)
            end
        end,
    }
end

--- Sessions of many turns on an empty cache: a record and the turns.
---@param o { sessions: integer, turns: integer, shared: integer, prompt: integer, output: integer }
function M.measure_agents(model, o)
    model.engine:drop_cached()
    local driver = new_driver(model)
    local running = false
    local state = {
        first = true, forks = 1 << 20, forked = 0, now = function() return running and model.engine:now() or 0 end,
    }
    start_session(driver, model, o, state, M.some_tokens(model, o.shared, 77), 1, 1)
    running = true
    local turns, seconds = driver:run()
    local t = totals(turns)
    local later = {}
    for _, r in ipairs(turns) do
        if r.turn > 1 then later[#later + 1] = r end
    end
    local record = {
        load = "agents", sessions = o.sessions, forked = state.forked, turns = #turns, shared = o.shared,
        new_tokens = o.prompt, output = o.output, output_tps = round(t.output / seconds),
        hit_rate = round(t.cached / t.prompt, 4), ttft_ms = M.percentiles(t.ttft), tpot_ms = M.percentiles(t.tpot),
        preempted = t.preempted,
    }
    if #later >= 4 then
        table.sort(later, function(a, b) return a.history < b.history end)
        record.quarters = M.quarters(later)
    end
    return record, turns
end

--- Turns in order of history in four groups: means of each.
function M.quarters(turns)
    local out = {}
    for q = 1, 4 do
        local part = table.move(turns, (q - 1) * #turns // 4 + 1, q * #turns // 4, 1, {})
        out[q] = {
            history = round(mean_of(part, "history"), 0), new = round(mean_of(part, "new"), 1),
            computed = round(mean_of(part, "computed"), 1), beside = round(mean_of(part, "beside"), 1),
            ttft_ms = round(mean_of(part, "ttft") * 1e3),
            turn_ms = round(mean_of(part, "total") * 1e3),
        }
    end
    return out
end

--- Turns alone on a cached history: the time to their first token by length of history and number of new tokens. The
--- cases are measured in turn, o.repeat times; the medians count.
---@param o { longest: integer, repeat: integer }
function M.measure_turns(model, o)
    local driver = new_driver(model)
    local history = M.some_tokens(model, o.longest, 78)
    driver:add { at = 0, ids = history, output = 1 }
    driver:run()
    local cases = {}
    for _, part in ipairs { 8, 4, 2, 1 } do
        for _, new in ipairs { 8, 32, 128 } do
            cases[#cases + 1] = { history = o.longest // part, new = new, ttft = {}, computed = 0 }
        end
    end
    for k = 0, o["repeat"] do
        for i, c in ipairs(cases) do
            local ids = table.move(history, 1, c.history, 1, {})
            table.move(M.some_tokens(model, c.new, 5000 + k * 100 + i), 1, c.new, c.history + 1, ids)
            local one = new_driver(model)
            one:add { at = 0, ids = ids, output = 1 }
            local r = one:run()[1]
            if k > 0 then c.ttft[k] = r.ttft end
            c.computed = math.max(c.computed, r.computed)
        end
    end
    local rows = {}
    for i, c in ipairs(cases) do
        table.sort(c.ttft)
        local t = quantile(c.ttft, 0.5)
        rows[i] = { c.new, c.history, t }
        c.ttft, c.ttft_ms = nil, round(t * 1e3)
    end
    local _, per_new, per_history = M.fit(rows)
    return { turns = cases, us_per_new_token = round(per_new * 1e6), us_per_history_token = round(per_history * 1e6) }
end

---- Replay

--- The rows of a scaled trace as requests.
---@param rows table[] as traces.scale gives them
---@param saw_step? fun(begin: number, seconds: number) called after each step
function M.measure_replay(model, rows, saw_step)
    model.engine:drop_cached()
    local driver = new_driver(model)
    driver.saw_step = saw_step
    local function tokens(n, salt) return M.some_tokens(model, n, salt) end
    for i, row in ipairs(rows) do
        driver:add { at = row.at, ids = traces.prompt(row, tokens, i), output = row.output }
    end
    local results, seconds = driver:run()
    local t = totals(results)
    local kv = model.engine:info().kv[1]
    return {
        requests = #results, seconds = round(seconds), arrivals_seconds = round(rows[#rows].at),
        prompt_tokens = t.prompt, output_tokens = t.output, output_tps = round(t.output / seconds),
        ttft_ms = M.percentiles(t.ttft), tpot_ms = M.percentiles(t.tpot), hit_rate = round(t.cached / t.prompt, 4),
        possible_hit_rate = round(traces.possible_hits(rows), 4), preempted = t.preempted, evicted = kv.evicted,
        kv_tokens = kv.total * model.engine:info().block_size,
    }
end

---- The command

local function four(p)
    if not p then return "        -         -         -         -" end
    return ("%9.1f %9.1f %9.1f %9.1f"):format(p.mean, p.median, p.p90, p.p99)
end

local HEAD = ("%38s  %38s"):format("TTFT ms: mean  median     p90     p99", "TPOT ms: mean  median     p90     p99")

local function emit(o, model, record, show)
    if o.json then
        local _, peak = core.memory()
        record.model, record.path, record.backend = model.info.name, model.info.path, model.info.backend
        record.kv_type, record.peak_memory = model:stats().kv_type, peak
        print(require("cjson").encode(record))
    else
        show(record)
    end
end

--- "1,4,16" -> { 1, 4, 16 }
function M.numbers(flag, text)
    local list = {}
    for word in text:gmatch("[^,]+") do
        local n = math.tointeger(tonumber(word))
        if not n or n < 1 then args.fail(("--%s: '%s' is no number of sequences"):format(flag, word), 2) end
        list[#list + 1] = n
    end
    if #list == 0 then args.fail(("--%s: a list of numbers expected"):format(flag), 2) end
    return list
end

local function run_together(o)
    local sizes = M.numbers("concurrency", o.concurrency)
    local set = {
        prompt = o.prompt or 128, shared = o.shared or math.min(64, (o.prompt or 128) // 2), output = o.output or 64,
        ["repeat"] = o["repeat"],
    }
    if set.shared > set.prompt then args.fail("--shared is more than --prompt", 2) end
    local most, block = math.max(table.unpack(sizes)), o.block_size or 16
    local model <close> = common.load(o, {
        ctx = o.ctx or set.prompt + set.output + 1, max_seqs = math.max(64, most),
        kv = {
            type = o.kv_type, block_size = o.block_size,
            blocks = ((set.prompt + set.output) // block + 2) * most + 1,
        },
    })
    if not o.json then
        print(("%s, %s\nrequests of %d prompt tokens, %d of them shared, and %d output tokens"):format(model.info.name,
            model.info.backend, set.prompt, set.shared, set.output))
        print(("%5s %10s  %s"):format("at", "output", HEAD))
        print(("%5s %10s"):format("once", "tokens/s"))
    end
    local progress = common.progress()
    for _, n in ipairs(sizes) do
        emit(o, model, M.measure_together(model, n, set, progress), function(r)
            print(("%5d %10.1f  %s  %s"):format(n, r.output_tps, four(r.ttft_ms), four(r.tpot_ms)))
        end)
    end
    return 0
end

--- Sizes of the pool for loads whose cache matters: as many tokens as the flag says.
local function pool(o, least)
    local block = o.block_size or 16
    local tokens = o.kv_tokens or least
    return { type = o.kv_type, block_size = o.block_size, blocks = tokens and (tokens + block - 1) // block or nil }
end

local function show_times(r)
    print("               mean    median       p90       p99")
    print("TTFT ms   " .. four(r.ttft_ms))
    print("TPOT ms   " .. four(r.tpot_ms))
end

local function run_agents(o)
    local set = {
        sessions = o.sessions, turns = o.turns, shared = o.shared or 1024, prompt = o.prompt or 32,
        output = o.output or 16,
    }
    local longest = set.shared + set.turns * (2 * set.prompt + 1 + set.output) + 130
    local own = (longest - set.shared) * 2 * set.sessions + set.shared
    local model <close> = common.load(o, { ctx = o.ctx or longest, kv = pool(o, own + 64 * set.sessions) })
    local record = M.measure_agents(model, set)
    record.alone = M.measure_turns(model, { longest = longest - 130, ["repeat"] = o["repeat"] })
    emit(o, model, record, function(r)
        print(("%s, %s"):format(model.info.name, model.info.backend))
        print(("%d sessions (%d of them forks) of %d turns on a prefix of %d tokens; %d turns, %.1f output tokens/s")
            :format(r.sessions + r.forked, r.forked, set.turns, r.shared, r.turns, r.output_tps))
        print(("prefix hit rate %.2f %%, preemptions %d"):format(100 * r.hit_rate, r.preempted))
        show_times(r)
        if r.quarters then
            print("turns after the first, by length of history (beside: other turns under way when it came):")
            print("  history  new tokens  computed  beside   TTFT ms   turn ms")
        end
        for _, q in ipairs(r.quarters or {}) do
            print(("  %7d  %10.1f %9.1f %7.1f %9.2f %9.2f"):format(q.history, q.new, q.computed, q.beside, q.ttft_ms,
                q.turn_ms))
        end
        print("turns alone on a cached history: TTFT in ms\n  history  8 new  32 new  128 new")
        local t = r.alone.turns
        for i = 1, #t, 3 do
            print(("  %7d %6.1f %7.1f %8.1f"):format(t[i].history, t[i].ttft_ms, t[i + 1].ttft_ms, t[i + 2].ttft_ms))
        end
        print(("TTFT grows by %.1f us a new token, by %.2f us a token of history"):format(r.alone.us_per_new_token,
            r.alone.us_per_history_token))
    end)
    return 0
end

local function run_replay(o)
    local rows, format = traces.read(o.replay, o.requests, o.skip)
    if not rows then args.fail(format) end
    local model <close> = common.load(o, { kv = pool(o) })
    local scaled, left_out = traces.scale(rows, { scale = o.scale, speed = o.speed, limit = model.info.ctx - 1 })
    if #scaled == 0 then args.fail("no row of the trace fits the context; a smaller --scale would help") end
    local record = M.measure_replay(model, scaled)
    record.replay, record.format, record.scale, record.speed = o.replay, format, o.scale, o.speed
    record.left_out = left_out
    emit(o, model, record, function(r)
        print(("%s, %s"):format(model.info.name, model.info.backend))
        print(("%s trace at scale %g, speed %g: %d requests (%d too long left out) in %.1f s, arrivals over %.1f s")
            :format(format, o.scale, o.speed, r.requests, left_out, r.seconds, r.arrivals_seconds))
        print(("%d prompt and %d output tokens, %.1f output tokens/s, preemptions %d, KV pool %d tokens"):format(
            r.prompt_tokens, r.output_tokens, r.output_tps, r.preempted, r.kv_tokens))
        show_times(r)
        if format == "mooncake" then
            print(("prefix hit rate %.1f %%; an endless cache would have %.1f %%; %d blocks evicted"):format(
                100 * r.hit_rate, 100 * r.possible_hit_rate, r.evicted))
        end
    end)
    return 0
end

--- Runs the load that the flags ask for; an exit status.
function M.run(o)
    if (o.concurrency and 1 or 0) + (o.load and 1 or 0) + (o.replay and 1 or 0) > 1 then
        args.fail("one of --concurrency, --load and --replay at a time", 2)
    end
    if o.concurrency then return run_together(o) end
    return o.load and run_agents(o) or not o.load and run_replay(o) or 0
end

return M
