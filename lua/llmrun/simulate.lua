--- Simulation: a fleet of engines on a trace, with the engine's own scheduler, block pool, prefix index and policies,
--- and a cost model (profile.lua) and a virtual clock in the place of the forward pass.
---
---   local simulate = require "llmrun.simulate"
---   local r = simulate.run { policy = "fair", trace = rows, profile = "h100-8b", replicas = 8 }
---
--- Options: policy (a name, a file, a function, a table; nil: the built-in rule; each replica makes its own, but of a
--- table), policy_options, trace, profile, replicas (1), router (simulate/routers.lua), seed (of math.random; 1), tp,
--- pp, engine { max_batch_tokens, max_seqs, chunk, prompt_rows, block_size, kv_tokens, prefix_cache, preempt,
--- swap_bytes }, slo { ttft, tpot } in seconds, rows (true: keep a record of each request), progress(done, virtual
--- seconds; or 0, 0, how many replicas are made), sample (seconds between two points of the time line, from 0.001 on,
--- of which there are at most a million), oversize ("error", or "drop": what fits no replica
--- counts as failed), steady (false: every step asks the policy).
---
--- The trace is a list of rows, or a function that gives the next row, or nil:
---
---   at        seconds since the start, not falling
---   prompt, output      numbers of tokens
---   blocks    ids: where two rows have the same, so are the tokens; block: their length (512)
---   session   the prompt begins with the text, prompt and output, of the session's row before (of the `after` row, if
---             that is of the same session); a shorter prompt is the beginning of it
---   tenant, priority, deadline (seconds after its arrival)
---   after     number of an earlier row: it comes `delay` seconds after that one has ended, and `at` does not matter.
---             If that one fails it never comes, and counts as failed. In an iterator it has to stand before the next
---             row with a time of its own
---   number    its number, if it is not its place
---
--- The same input gives the same result, to the last bit, but for `wall` (seconds that it took). What it holds stands
--- at the end of this file and in simulate/results.lua; times are in seconds.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local heap = require "llmrun.simulate.heap"
local options = require "llmrun.options"
local policies = require "llmrun.policy"
local profiles = require "llmrun.profile"
local results = require "llmrun.simulate.results"
local routers = require "llmrun.simulate.routers"

local M = {}

local CALL = "simulate"

local known = {
    policy = "table|function|string", policy_options = "table", trace = "table|function", profile = "table|string",
    replicas = "integer", router = "string|function|table", seed = "integer", tp = "integer", pp = "integer",
    engine = "table", slo = "table", rows = "boolean", progress = "function", sample = "number", oversize = "string",
    steady = "boolean",
}
local engine_known = {
    max_batch_tokens = "integer", max_seqs = "integer", chunk = "integer", prompt_rows = "integer",
    block_size = "integer", kv_tokens = "integer", prefix_cache = "boolean", preempt = "string", swap_bytes = "integer",
}

local function fail(text, ...) errors.raise(CALL, text:format(...)) end

---- The fleet

local vocabulary

--- The engine's options from the profile's and the caller's.
local function engine_options(p, o)
    local e = {}
    for k, v in pairs(p.engine or {}) do
        if engine_known[k] then e[k] = type(v) == "number" and math.tointeger(v) or v end
    end
    for k, v in pairs(o.engine or {}) do e[k] = v end
    e.block_size = e.block_size or 16
    if e.block_size < 1 or e.block_size > 256 then fail("engine.block_size is %d: 1 to 256 expected", e.block_size) end
    return e
end

--- Makes an engine; the policy's status, if it has one.
local function new_engine(cost, e, kv_tokens, o)
    local model = errors.check(CALL, core.simulated_new(cost))
    local engine = errors.check(CALL, core.engine_new(model, {
        max_batch_tokens = e.max_batch_tokens, max_seqs = e.max_seqs, chunk = e.chunk, prompt_rows = e.prompt_rows,
        block_size = e.block_size,
        kv_blocks = math.max(1, kv_tokens // e.block_size), prefix_cache = e.prefix_cache, preempt = e.preempt,
        swap_bytes = e.swap_bytes, max_waiting = 1 << 24,
    }))
    if o.policy == nil then return engine, { name = "default", errors = {} } end
    return engine, errors.check(CALL, policies.use(engine, o.policy, o.policy_options, { steady = o.steady }))
end

--- What a router sees of a replica; fields are looked up when they are asked for.
local fields = { outstanding = 1, running = 2, waiting = 3, kv_used = 4, kv_cached = 5, kv_total = 6 }
local Replica = {}
function Replica.__index(r, key)
    local i = fields[key]
    return i and (select(i, rawget(r, "fleet"):look(rawget(r, "number"))))
end

--- Refuses more replicas than there is memory for. first: bytes of the process before the 16 that it has now.
local function check_memory(n, first)
    local now, _, free = core.memory()
    local each = (now - first) / 16
    if (n - 16) * each > free then
        fail("%d replicas need %.1f GB of memory, and there are %.1f GB: fewer, or less KV each (engine.kv_tokens)", n,
            n * each / 1e9, (free + 16 * each) / 1e9)
    end
end

local function new_fleet(p, o)
    local e = engine_options(p, o)
    local ok, cost, kv_tokens = pcall(profiles.cost, p, { tp = o.tp, pp = o.pp, block_size = e.block_size })
    if not ok then fail("%s", cost) end
    vocabulary = vocabulary or errors.check(CALL, core.vocab_new {
        model = "gpt2", pre = "gpt-2", tokens = { "a" }, types = { 1 },
    })
    cost.vocab = vocabulary
    kv_tokens = e.kv_tokens or kv_tokens
    if kv_tokens < 1 then fail("engine.kv_tokens is %d", kv_tokens) end
    local self = { engines = {}, status = nil, replicas = {} }
    local told, n = core.now(), o.replicas or 1
    local first = core.memory()
    for i = 1, n do
        local status
        self.engines[i], status = new_engine(cost, e, kv_tokens, o)
        self.status = self.status or status
        if i == 16 then check_memory(n, first) end
        if core.interrupted() then errors.raise(CALL, "interrupted", "cancelled") end
        if o.progress and core.now() > told + 0.25 then
            told = core.now()
            o.progress(0, 0, i)
        end
    end
    self.core = core.fleet_new(self.engines)
    for i = 1, #self.engines do
        self.replicas[i] = setmetatable({ fleet = self.core, number = i }, Replica)
    end
    self.blocks = math.max(1, kv_tokens // e.block_size)
    return self
end

---- The trace

local Trace = {}
Trace.__index = Trace

--- Rows of a list or an iterator, with their numbers.
local function new_trace(trace)
    local self = setmetatable({ n = 0, last = 0, dependents = {}, n_dependents = 0, ended = {} }, Trace)
    if type(trace) == "function" then
        self.pull = trace
    else
        local i = 0
        self.pull = function()
            i = i + 1
            return trace[i]
        end
        self.list = trace
    end
    return self
end

local function whole(row, number, name, least)
    local n = math.tointeger(row[name])
    if not n or n < least then
        fail("row %d of the trace: %s is %s: a whole number of at least %d expected", number, name,
            tostring(row[name]), least)
    end
    return n
end

local function seconds(row, number, name, default)
    local v = row[name]
    if v == nil then v = default end
    if type(v) ~= "number" or not (v >= 0 and v <= 1e12) then
        fail("row %d of the trace: %s is %s: seconds, up to 1e12, expected", number, name, tostring(v))
    end
    return v
end

--- A request to be: what the row says, checked.
local function new_job(row, number)
    if type(row) ~= "table" then fail("row %d of the trace is a %s: a table expected", number, type(row)) end
    local job = {
        number = row.number and whole(row, number, "number", 0) or number, prompt = whole(row, number, "prompt", 1),
        output = whole(row, number, "output", 1), tenant = row.tenant, session = row.session,
        priority = row.priority, deadline = row.deadline, blocks = row.blocks, block = row.block, row = row,
    }
    if row.deadline ~= nil then seconds(row, number, "deadline") end
    if row.after ~= nil then
        job.after, job.delay = whole(row, number, "after", 0), seconds(row, number, "delay", 0)
    else
        job.at = seconds(row, number, "at")
    end
    return job
end

--- Reads up to the next row with a time of its own, which becomes `self.next`; those that come after others are kept.
function Trace:read()
    self.next = nil
    while not self.next do
        local row = self.pull()
        if row == nil then return end
        self.n = self.n + 1
        local job = new_job(row, self.n)
        if job.after then
            if self.ended[job.after] then
                fail("row %d of the trace comes after row %d, which had ended when it was read: it has to stand "
                    .. "before the next row with a time of its own", job.number, job.after)
            end
            local list = self.dependents[job.after] or {}
            list[#list + 1] = job
            self.dependents[job.after] = list
            self.n_dependents = self.n_dependents + 1
        elseif job.at < self.last then
            fail("row %d of the trace comes at %g s, behind one at %g s: rows must be in order of `at`", job.number,
                job.at, self.last)
        else
            self.last, self.next = job.at, job
        end
    end
end

---- Prompts

-- Texts are lists { salt, n, salt, n, ..., n = tokens in all }, see fleet:submit.

--- The text of a row's prompt that begins with these pieces, as far as it goes; the rest is its own.
local function text_of(job, pieces)
    local text, left = { n = job.prompt }, job.prompt
    for i = 1, #pieces, 2 do
        local n = math.min(pieces[i + 1], left)
        if n <= 0 then break end
        text[#text + 1], text[#text + 2] = pieces[i], n
        left = left - n
    end
    if left > 0 then text[#text + 1], text[#text + 2] = 2 * job.number, left end
    return text
end

local function prompt_of(job, sessions)
    if job.blocks then
        local pieces, size = {}, job.block or 512
        for i, id in ipairs(job.blocks) do pieces[2 * i - 1], pieces[2 * i] = 2 * id + 1, size end
        return text_of(job, pieces)
    end
    return text_of(job, job.session and (job.before or sessions[job.session]) or {})
end

---- The run

local Run = {}
Run.__index = Run

--- Sends a request to its replica.
function Run:submit(job)
    local i = self.route(job, self.fleet.replicas, self.fleet.core)
    if not math.tointeger(i) or i < 1 or i > #self.fleet.replicas then
        fail("the router sent row %d to replica %s of %d", job.number, tostring(i), #self.fleet.replicas)
    end
    local text = prompt_of(job, self.sessions)
    self.keys = self.keys + 1
    self.results:arrive(job, job.at)
    local given = job
    if job.deadline then
        given = { tenant = job.tenant, priority = job.priority, deadline = job.at + job.deadline }
    end
    local ok, err, code = self.fleet.core:submit(i, job.at, self.keys, text, job.prompt, job.output, given)
    if job.session then
        text[#text + 1], text[#text + 2] = -1, job.output
        text.n = text.n + job.output
        self.sessions[job.session], job.text = text, text
    end
    if ok then
        self.live[self.keys] = job
        self.inside = self.inside + 1
        return
    end
    local refused = err:find("^refused by policy") ~= nil
    if not refused and not (code == "full" and self.o.oversize == "drop") then
        fail("row %d of the trace: %s", job.number, err)
    end
    self:failed(job, job.at, err)
end

--- A row has failed: those that would have come after it fail too.
function Run:failed(job, at, why)
    local trace = self.trace
    self.results:fail(job, at, why)
    trace.ended[job.number] = true
    local list = trace.dependents[job.number]
    trace.dependents[job.number] = nil
    for _, d in ipairs(list or {}) do
        trace.n_dependents = trace.n_dependents - 1
        d.at = at
        self.results:arrive(d, at)
        self:failed(d, at, ("row %d, which it comes after, failed"):format(job.number))
    end
end

--- A row has ended: those that come after it.
function Run:ended(job, at)
    local trace = self.trace
    trace.ended[job.number] = true
    local list = trace.dependents[job.number]
    if not list then return end
    trace.dependents[job.number] = nil
    for _, d in ipairs(list) do
        d.at = at + d.delay
        if d.session and d.session == job.session then d.before = job.text end
        self.due:push(d.at, d)
        trace.n_dependents = trace.n_dependents - 1
    end
end

function Run:collect()
    local fleet, live = self.fleet.core, self.live
    while true do
        local key, replica, done, _, first, last, ended, _, cached, generated, preempted = fleet:next()
        if not key then return end
        local job = live[key]
        live[key] = nil
        self.inside = self.inside - 1
        if done then
            self.results:finish(job, replica, first, last, ended, cached, generated, preempted)
            self:ended(job, ended)
        else
            self:failed(job, ended, "failed in the engine")
        end
    end
end

function Run:sample(at)
    local running, waiting, used, total = self.fleet.core:total()
    self.results:sample(at, running, waiting, used, total)
end

--- The next request to come, and when; nil, infinity at the end.
function Run:next()
    local own = self.trace.next
    local at, job = self.due:peek()
    if own and (not at or own.at <= at) then return own, own.at end
    return job, at or math.huge
end

function Run:report_progress(at)
    self.steps = self.steps + 1
    if self.steps % 256 ~= 0 then return end
    if core.interrupted() then errors.raise(CALL, "interrupted", "cancelled") end
    local now = core.now()
    if self.o.progress and now >= self.told then
        self.told = now + 0.25
        self.o.progress(self.results.finished + self.results.failed, at)
    end
end

function Run:loop()
    local fleet, trace, r = self.fleet.core, self.trace, self.results
    trace:read()
    while true do
        local job, at = self:next()
        if not job and self.inside == 0 then break end
        local until_ = math.min(at, r.next_sample)
        -- what comes after others comes in order, so nobody may run ahead
        local _, reached = fleet:advance(until_, trace.n_dependents > 0)
        self:collect()
        if reached and until_ < at then
            self:sample(until_)
        elseif reached and job == self:next() then
            if job == trace.next then trace:read() else self.due:pop() end
            self:submit(job)
        end
        self:report_progress(until_)
    end
    if trace.n_dependents > 0 then
        local missing = next(trace.dependents)
        fail("rows of the trace come after row %d, which is not there", missing)
    end
end

--- Raises if an option slo is not one.
function M.check_slo(slo, call)
    options.check(call .. ": slo", slo, { ttft = "number", tpot = "number" }, 3)
    for name, v in pairs(slo or {}) do
        if not (v > 0 and v < math.huge) then errors.raise(call, ("slo.%s is %g: seconds expected"):format(name, v)) end
    end
end

local function check_options(o)
    options.check(CALL, o, known, 3)
    options.check(CALL .. ": engine", o.engine, engine_known, 3)
    if not o.trace then fail("trace: rows expected") end
    if not o.profile then fail("profile: a profile, its name or its file expected") end
    local n = o.replicas or 1
    if n < 1 or n > 100000 then fail("replicas is %d: 1 to 100000 expected", n) end
    M.check_slo(o.slo, CALL)
    if o.sample and not (o.sample >= 1e-3 and o.sample <= 1e9) then
        fail("sample is %g: 0.001 to 1e+09 seconds expected", o.sample)
    end
    if o.oversize and o.oversize ~= "drop" and o.oversize ~= "error" then
        fail("oversize is '%s': \"error\" or \"drop\" expected", o.oversize)
    end
end

local function of_fleet(r, fleet)
    local busy, blocks, peak, steps = 0, 0, 0, 0
    r.replicas = {}
    for i = 1, #fleet.replicas do
        local requests, n, seconds_busy, block_seconds, most = fleet.core:stats(i)
        r.replicas[i] = { requests = requests, steps = n, busy = seconds_busy }
        busy, blocks, steps, peak = busy + seconds_busy, blocks + block_seconds, steps + n, math.max(peak, most)
    end
    local whole_time = r.seconds * #fleet.replicas
    r.steps = steps
    r.busy = whole_time > 0 and busy / whole_time or 0
    r.kv = {
        mean = whole_time > 0 and blocks / (whole_time * fleet.blocks) or 0, peak = peak / fleet.blocks,
        tokens = fleet.blocks * fleet.engines[1]:info().block_size,
    }
end

--- Runs a trace: see the top of this file.
---@param o table
---@return table
function M.run(o)
    check_options(o)
    local begin = core.now()
    math.randomseed(o.seed or 1)
    local p, err = profiles.load(o.profile)
    if not p then fail("%s", err) end
    local route, router_name = routers.load(o.router)
    if not route then fail("%s", router_name) end
    local run = setmetatable({
        o = o, fleet = new_fleet(p, o), trace = new_trace(o.trace), route = route, due = heap.new(), live = {},
        sessions = {}, results = results.new(o), keys = 0, inside = 0, steps = 0, told = 0,
    }, Run)
    run:loop()
    local r = run.results:report(run.results.last_end)
    of_fleet(r, run.fleet)
    r.profile, r.policy, r.router = p.name or "custom", run.fleet.status.name, router_name
    r.policy_error = run.fleet.status.last_error
    run.fleet.core:close()
    for _, e in ipairs(run.fleet.engines) do e:close() end
    r.wall = core.now() - begin
    return r
end

return M
