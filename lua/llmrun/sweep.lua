--- A sweep: several policies, loads and seeds in the simulator, each run in a process of its own; means over the seeds
--- with confidence intervals.
---
---   local s = sweep.run { policies = { "fcfs", "fair" }, loads = { 0.5, 1, 2 }, seeds = 5,
---       trace = "agents:rate=2,requests=400", profile = "h100-8b", slo = { ttft = 1, tpot = 0.05 } }
---   print(sweep.text(s))                           -- report.lua makes a page of it
---
--- A load is how many times as fast requests arrive; what waits for others (agents, for tools) waits as before. Seed k
--- of a made trace is another trace of the kind; seed k of a file is the k-th `requests` rows of it. All policies get
--- the same traces, so that they can be compared in pairs.
---
--- Result: { setup = what was asked for, runs = { { policy =, load =, seed =, value | error, notes } }, cells = {
--- [policy][load] = { metric = statistics.interval } }, differences = the same, to the first policy, seed by seed }.
--- policy and load are places in the lists of setup. The same input gives the same result.

local errors = require "llmrun.errors"
local farm = require "llmrun.farm"
local options = require "llmrun.options"
local policies = require "llmrun.policy"
local statistics = require "llmrun.statistics"
local traces = require "llmrun.traces"
local workload = require "llmrun.workload"

local M = {}

local CALL = "sweep"

--- What is looked at: key, where it stands in a simulation's result, its name, the factor to its unit, decimals, what
--- is better ("less", "more", or nothing).
M.metrics = {
    { "ttft_mean", { "ttft", "mean" }, "TTFT mean, ms", 1e3, 1, "less" },
    { "ttft_p50", { "ttft", "p50" }, "TTFT p50, ms", 1e3, 1, "less" },
    { "ttft_p90", { "ttft", "p90" }, "TTFT p90, ms", 1e3, 1, "less" },
    { "ttft_p99", { "ttft", "p99" }, "TTFT p99, ms", 1e3, 1, "less" },
    { "tpot_mean", { "tpot", "mean" }, "TPOT mean, ms", 1e3, 2, "less" },
    { "tpot_p50", { "tpot", "p50" }, "TPOT p50, ms", 1e3, 2, "less" },
    { "tpot_p90", { "tpot", "p90" }, "TPOT p90, ms", 1e3, 2, "less" },
    { "tpot_p99", { "tpot", "p99" }, "TPOT p99, ms", 1e3, 2, "less" },
    { "e2e_mean", { "e2e", "mean" }, "E2E mean, s", 1, 2, "less" },
    { "e2e_p50", { "e2e", "p50" }, "E2E p50, s", 1, 2, "less" },
    { "e2e_p90", { "e2e", "p90" }, "E2E p90, s", 1, 2, "less" },
    { "e2e_p99", { "e2e", "p99" }, "E2E p99, s", 1, 2, "less" },
    { "tokens_per_s", { "tokens_per_s" }, "tokens/s", 1, 1, "more" },
    { "requests_per_s", { "requests_per_s" }, "requests/s", 1, 2, "more" },
    { "goodput", { "goodput" }, "within the SLO, %", 100, 1, "more" },
    { "goodput_per_s", { "goodput_per_s" }, "goodput, requests/s", 1, 2, "more" },
    { "deadlines", { "deadlines", "met" }, "deadlines met, %", 100, 1, "more" },
    { "fairness", { "fairness" }, "fairness (Jain)", 1, 3, "more" },
    { "kv_mean", { "kv", "mean" }, "KV used, mean, %", 100, 1 },
    { "kv_peak", { "kv", "peak" }, "KV used, peak, %", 100, 1 },
    { "hit_rate", { "hit_rate" }, "prefix hits, %", 100, 1, "more" },
    { "preemptions", { "preemptions" }, "preemptions", 1, 1, "less" },
    { "failed", { "failed" }, "failed", 1, 1, "less" },
}

M.by_key = {}
for _, m in ipairs(M.metrics) do M.by_key[m[1]] = m end

--- A metric of a simulation's result, in its unit; nil where there is none.
function M.value(result, key)
    local m, v = M.by_key[key], result
    for _, field in ipairs(m[2]) do
        v = type(v) == "table" and v[field] or nil
    end
    return type(v) == "number" and v * m[4] or nil
end

-- One run, in a process of its own ------------------------------------------------------------------------------------

--- Simulates one job: the options of simulate.run and of traces.open together.
---@param job table
---@return table
function M.simulate(job)
    local rows, err = traces.open(job.trace, job.open)
    if not rows then errors.raise(CALL, err) end
    local o = { trace = rows }
    for k, v in pairs(job.simulate) do o[k] = v end
    local r, why = require("llmrun.simulate").run(o)
    if not r then errors.raise(CALL, tostring(why)) end
    r.wall, r.records, r.replicas = nil, nil, nil -- wall differs from run to run; the others are long
    if not job.timeline then r.timeline = nil end
    return r
end

-- What is to be run ---------------------------------------------------------------------------------------------------

local known = {
    policies = "table", loads = "table", seeds = "integer", trace = "string", profile = "string|table",
    requests = "integer", skip = "integer", scale = "number", limit = "integer", replicas = "integer",
    router = "string", tp = "integer", pp = "integer", engine = "table", slo = "table", oversize = "string",
    jobs = "integer", progress = "function",
}
local passed_on = { "profile", "replicas", "router", "tp", "pp", "engine", "slo", "oversize" }

--- { name, policy, options } of a policy: "mlfq:quantum=128", or already such a table.
local function policy_of(what, call)
    if type(what) == "string" then
        local name, opts = policies.parse(what)
        if not name then errors.raise(call, opts) end
        what = { name = what, policy = name, options = opts }
    end
    if type(what) ~= "table" or type(what.policy) ~= "string" then
        errors.raise(call, "policies: names, files or { name, policy, options } expected")
    end
    return { name = what.name or what.policy, policy = what.policy, options = what.options }
end

--- Policies, checked: a name that is not there is an error at once; a file that fails is left to its run, which says
--- so.
local function policies_of(list, call)
    local out, seen = {}, {}
    for i, what in ipairs(list) do
        local p = policy_of(what, call)
        if p.policy ~= "default" and not p.policy:find("[/.]") then
            local ok, err = policies.load(p.policy, p.options)
            if not ok then errors.raise(call, err) end
        end
        if seen[p.name] then errors.raise(call, ("policies: '%s' is there twice"):format(p.name)) end
        seen[p.name] = true
        out[i] = p
    end
    if #out == 0 then errors.raise(call, "policies: at least one expected") end
    return out
end

local function check_loads(list)
    for i, load in ipairs(list) do
        if type(load) ~= "number" or not (load >= 1e-6 and load <= 1e6) then
            errors.raise(CALL, ("loads: numbers from 1e-06 to 1e+06 expected, got '%s'"):format(tostring(load)))
        elseif i > 1 and load <= list[i - 1] then
            errors.raise(CALL, "loads: each is to be higher than the one before")
        end
    end
    if #list == 0 then errors.raise(CALL, "loads: at least one expected") end
end

--- The options of traces.open for a seed.
local function open_options(o, seed)
    local open = { most = o.requests, skip = o.skip, scale = o.scale, limit = o.limit }
    if workload.is(o.trace) then
        open.seed = seed
    else
        open.skip = (o.skip or 0) + (seed - 1) * (o.requests or 0)
    end
    return open
end

--- A job of M.simulate.
---@param o table the sweep's options
---@param policy { policy: string, options: table? }
---@param load number
---@param seed integer
function M.job(o, policy, load, seed)
    local job = { trace = o.trace, open = open_options(o, seed), simulate = { seed = seed } }
    job.open.speed = load
    for _, name in ipairs(passed_on) do job.simulate[name] = o[name] end
    if policy.policy ~= "default" then
        job.simulate.policy, job.simulate.policy_options = policy.policy, policy.options
    end
    return job
end

local function check(o)
    options.check(CALL, o, known, 3)
    if not o.trace then errors.raise(CALL, "trace: a file or what to make expected") end
    if not o.profile then errors.raise(CALL, "profile: a profile's name or file expected") end
    local setup = {}
    for k, v in pairs(o) do setup[k] = v end
    setup.jobs, setup.progress = nil, nil
    setup.seeds, setup.loads = o.seeds or 1, o.loads or { 1 }
    if setup.seeds < 1 or setup.seeds > 10000 then errors.raise(CALL, "seeds: 1 to 10000 expected") end
    check_loads(setup.loads)
    require("llmrun.simulate").check_slo(o.slo, CALL)
    setup.policies = policies_of(o.policies or { "fcfs" }, CALL)
    local profile, why = require("llmrun.profile").load(o.profile)
    if not profile then errors.raise(CALL, why) end
    -- what can't be read at all is one error, not one of every run
    for seed = 1, workload.is(o.trace) and 1 or setup.seeds do
        if seed > 1 and not o.requests then
            errors.raise(CALL, "several seeds of a file are several pieces of it: requests says how long they are")
        end
        local rows, err = traces.open(o.trace, open_options(setup, seed))
        if not rows then errors.raise(CALL, err) end
    end
    return setup
end

-- What came of it -----------------------------------------------------------------------------------------------------

local function summarize(s)
    local setup = s.setup
    s.cells, s.differences = {}, {}
    for p in ipairs(setup.policies) do
        s.cells[p], s.differences[p] = {}, {}
        for l in ipairs(setup.loads) do
            local cell, difference = {}, {}
            for _, m in ipairs(M.metrics) do
                local key = m[1]
                local all, values, base = {}, {}, {}
                for seed = 1, setup.seeds do
                    local mine, first = s.at(p, l, seed), s.at(1, l, seed)
                    values[seed] = mine.value and M.value(mine.value, key)
                    base[seed] = first.value and M.value(first.value, key)
                    all[#all + 1] = values[seed]
                end
                cell[key] = statistics.interval(all)
                if p > 1 then difference[key] = statistics.paired(base, values, setup.seeds) end
            end
            s.cells[p][l], s.differences[p][l] = cell, difference
        end
    end
end

--- The sweep; raises where its options are wrong. o.jobs: processes at once; o.progress(done, all, text).
---@param o table
---@return table
function M.run(o)
    local setup = check(o)
    local jobs, runs = {}, {}
    local n_loads, n_seeds = #setup.loads, setup.seeds
    for p, policy in ipairs(setup.policies) do
        for l, load in ipairs(setup.loads) do
            for seed = 1, n_seeds do
                local job = M.job(setup, policy, load, seed)
                job.timeline = seed == 1 and l == n_loads
                jobs[#jobs + 1] = job
                runs[#runs + 1] = { policy = p, load = l, seed = seed }
            end
        end
    end
    local results = farm.run(jobs, {
        module = "llmrun.sweep", name = "simulate", jobs = o.jobs,
        done = o.progress and function(n) o.progress(n, #jobs) end,
    })
    for i, r in ipairs(results) do runs[i].value, runs[i].error, runs[i].notes = r.value, r.error, r.notes end
    local s = { setup = setup, runs = runs, failed = 0 }
    for _, r in ipairs(runs) do s.failed = s.failed + (r.error and 1 or 0) end
    function s.at(p, l, seed) return runs[((p - 1) * n_loads + l - 1) * n_seeds + seed] end
    summarize(s)
    return s
end

-- As text -------------------------------------------------------------------------------------------------------------

--- "123.4 ± 5.6" in a metric's decimals; "-" of nothing.
---@param interval table?
---@param key string
function M.show(interval, key)
    if not interval then return "-" end
    local digits = M.by_key[key][5]
    local text = ("%." .. digits .. "f"):format(interval.mean)
    if interval.half then text = text .. (" ± %." .. digits .. "f"):format(interval.half) end
    return text
end

--- Keys of the metrics that a sweep has anything to say of.
---@param s table
---@param keys string[]
---@return string[]
function M.there(s, keys)
    local list = {}
    for _, key in ipairs(keys) do
        local any = false
        for p in ipairs(s.setup.policies) do
            for l in ipairs(s.setup.loads) do any = any or s.cells[p][l][key] ~= nil end
        end
        local slo = s.setup.slo and next(s.setup.slo)
        if any and (slo or not key:find("^goodput")) then list[#list + 1] = key end
    end
    return list
end

--- Rows of texts as lines, columns as wide as they need to be; the first to the left, the others to the right.
---@param rows string[][]
---@return string[]
function M.columns(rows)
    local widths, lines = {}, {}
    for _, row in ipairs(rows) do
        for i, text in ipairs(row) do widths[i] = math.max(widths[i] or 0, utf8.len(text) or #text) end
    end
    for r, row in ipairs(rows) do
        local out = {}
        for i, text in ipairs(row) do
            local blank = (" "):rep(widths[i] - (utf8.len(text) or #text))
            out[i] = i == 1 and text .. blank or blank .. text
        end
        lines[r] = table.concat(out, "  ")
    end
    return lines
end

--- What went wrong: each text once, with how often and for whom.
---@param s table
---@return { text: string, who: string, n: integer, kind: string }[]
function M.troubles(s)
    local list, by = {}, {}
    for _, r in ipairs(s.runs) do
        local name = s.setup.policies[r.policy].name
        local text = r.error or r.notes or r.value and r.value.policy_error
        if text then
            local id = name .. "\0" .. text
            local t = by[id]
            if not t then
                t = { text = text, who = name, n = 0, kind = r.error and "failed" or "said" }
                by[id], list[#list + 1] = t, t
            end
            t.n = t.n + 1
        end
    end
    return list
end

--- Tables for a terminal.
---@param s table
---@return string
function M.text(s)
    local lines = {}
    local keys = M.there(s, { "ttft_p50", "ttft_p99", "tpot_mean", "tokens_per_s", "goodput", "deadlines", "fairness",
        "kv_peak" })
    for l, load in ipairs(s.setup.loads) do
        lines[#lines + 1] = ("%sload %g"):format(l > 1 and "\n" or "", load)
        local rows = { { "policy" } }
        for i, key in ipairs(keys) do rows[1][i + 1] = M.by_key[key][3] end
        for p, policy in ipairs(s.setup.policies) do
            rows[p + 1] = { policy.name }
            for i, key in ipairs(keys) do rows[p + 1][i + 1] = M.show(s.cells[p][l][key], key) end
        end
        for _, line in ipairs(M.columns(rows)) do lines[#lines + 1] = line end
    end
    if s.setup.seeds > 1 then
        lines[#lines + 1] = ("\n± half of the 95 %% interval of the mean over %d seeds, by Student's t"):format(
            s.setup.seeds)
    else
        lines[#lines + 1] = "\none seed: no intervals"
    end
    for _, t in ipairs(M.troubles(s)) do
        lines[#lines + 1] = ("%s %s in %d of %d runs: %s"):format(t.who, t.kind == "failed" and "failed" or "said", t.n,
            #s.setup.loads * s.setup.seeds, t.text)
    end
    return table.concat(lines, "\n") .. "\n"
end

return M
