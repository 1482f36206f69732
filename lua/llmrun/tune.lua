--- Looks for good values of a policy's parameters in the simulator: many candidates drawn by chance are tried on a
--- short piece of the trace, the better part of them on a longer one, and so on (successive halving; Jamieson and
--- Talwalkar, 2016).
---
---   local t = tune.run { policy = "mlfq", trace = "agents:rate=40", requests = 900, profile = "h100-8b" }
---   print(tune.text(t))
---
--- What is searched is what the policy declares (policy/params.lua) and is not given: "mlfq:levels=4" leaves quantum
--- and patience. Better means the front of two measures, throughput and the 99th percentile of a latency: who is
--- beaten by nobody in both comes first, then who is beaten by those alone, and so on; among equals who stands further
--- from the others. The default values go through all rounds, to compare with. Same options, same result.
---
--- Result: { setup, space = parameters, rounds = { { requests, tried } }, candidates = { { text, options, round = the
--- last one it was in, more, less = intervals there (statistics.lua), default, front, error } }, front = places }.

local count = require("llmrun.words").count
local errors = require "llmrun.errors"
local farm = require "llmrun.farm"
local options = require "llmrun.options"
local params = require "llmrun.policy.params"
local policies = require "llmrun.policy"
local random = require "llmrun.random"
local statistics = require "llmrun.statistics"
local tables = require "llmrun.tables"
local sweep = require "llmrun.sweep"
local traces = require "llmrun.traces"
local workload = require "llmrun.workload"

local M = {}

local CALL = "tune"

local known = {
    policy = "string", trace = "string", profile = "string|table", requests = "integer", skip = "integer",
    scale = "number", limit = "integer", replicas = "integer", router = "string", tp = "integer", pp = "integer",
    engine = "table", slo = "table", oversize = "string", load = "number", seeds = "integer", seed = "integer",
    candidates = "integer", rounds = "integer", eta = "number", more = "string", less = "string", jobs = "integer",
    progress = "function",
}

-- The space -----------------------------------------------------------------------------------------------------------

--- What can be searched of the declared parameters, in order of their names: { name, kind, low, high | values }.
local function space_of(declared, given)
    local list = {}
    for _, name in ipairs(tables.sorted_keys(declared)) do
        local p = declared[name]
        local low, high = (p.search or {})[1] or p.min, (p.search or {})[2] or p.max
        if given[name] ~= nil then -- luacheck: ignore 542
            -- it is settled
        elseif p.choices then
            list[#list + 1] = { name = name, values = p.choices }
        elseif type(p[1]) == "boolean" then
            list[#list + 1] = { name = name, values = { false, true } }
        elseif type(p[1]) == "number" and low and high and low < high then
            if p.log and low <= 0 then errors.raise(CALL, ("%s: a logarithm needs a low end above 0"):format(name)) end
            list[#list + 1] = { name = name, low = low, high = high, log = p.log, integer = p.integer }
        end
    end
    return list
end

local function draw(r, p)
    if p.values then return p.values[r:integer(#p.values)] end
    local u = r:uniform()
    local v = p.log and p.low * (p.high / p.low) ^ u or p.low + (p.high - p.low) * u
    if p.integer then return math.tointeger(math.min(p.high, math.floor(v + 0.5))) end
    return math.max(p.low, math.min(p.high, tonumber(("%.3g"):format(v)))) -- so that it can be written down
end

--- "quantum=128,levels=4" of options, in order; tables with a dot.
local function text_of(opts)
    local parts = {}
    for k, v in pairs(opts) do
        if type(v) == "table" then
            for inner, value in pairs(v) do parts[#parts + 1] = ("%s.%s=%s"):format(k, inner, tostring(value)) end
        else
            parts[#parts + 1] = ("%s=%s"):format(k, tostring(v))
        end
    end
    table.sort(parts)
    return table.concat(parts, ",")
end

--- The candidates: the defaults, then others that are all different, as many as there are up to n.
local function candidates_of(setup, space, declared)
    local r, seen, list = random.new(setup.seed), {}, {}
    local function add(opts, default)
        for k, v in pairs(setup.given) do opts[k] = v end
        local text = text_of(opts)
        if seen[text] then return false end
        seen[text] = true
        list[#list + 1] = {
            options = opts, default = default or nil, round = 0, index = #list + 1,
            text = setup.policy .. (text ~= "" and ":" .. text or ""),
        }
        return true
    end
    local defaults = {}
    for _, p in ipairs(space) do defaults[p.name] = declared[p.name][1] end
    add(defaults, true)
    local failures = 0
    while #list < setup.candidates and failures < 200 do
        local opts = {}
        for _, p in ipairs(space) do opts[p.name] = draw(r, p) end
        failures = add(opts) and 0 or failures + 1
    end
    return list
end

-- Who is better -------------------------------------------------------------------------------------------------------

--- Whether a is at least as good as b in both measures, and better in one.
local function beats(a, b)
    local x, y = a.more.mean - b.more.mean, b.less.mean - a.less.mean
    return x >= 0 and y >= 0 and (x > 0 or y > 0)
end

--- How far a candidate of a layer stands from its neighbours; the ends count as furthest.
local function room(layer)
    local far = {}
    for _, c in ipairs(layer) do far[c] = 0 end
    for _, key in ipairs { "more", "less" } do
        local list = table.move(layer, 1, #layer, 1, {})
        table.sort(list, function(a, b)
            if a[key].mean ~= b[key].mean then return a[key].mean < b[key].mean end
            return a.index < b.index
        end)
        local range = list[#list][key].mean - list[1][key].mean
        far[list[1]], far[list[#list]] = math.huge, math.huge
        for i = 2, #list - 1 do
            far[list[i]] = far[list[i]] + (range > 0 and (list[i + 1][key].mean - list[i - 1][key].mean) / range or 0)
        end
    end
    return far
end

--- Candidates that were measured, best first; and how many of them nobody beats.
local function ranked(list)
    local left, out, front = table.move(list, 1, #list, 1, {}), {}, nil
    while #left > 0 do
        local layer, rest = {}, {}
        for _, c in ipairs(left) do
            local beaten = false
            for _, d in ipairs(left) do beaten = beaten or beats(d, c) end
            table.insert(beaten and rest or layer, c)
        end
        local far = room(layer)
        table.sort(layer, function(a, b)
            if far[a] ~= far[b] then return far[a] > far[b] end
            return a.index < b.index
        end)
        table.move(layer, 1, #layer, #out + 1, out)
        front = front or #layer
        left = rest
    end
    return out, front or 0
end

-- The search ----------------------------------------------------------------------------------------------------------

local function check_number(o, name, default, low, high)
    local v = o[name] or default
    if not (v >= low and v <= high) then
        errors.raise(CALL, ("%s: %g to %g expected, got %g"):format(name, low, high, v))
    end
    return v
end

local function check_measure(key, want)
    local m = sweep.by_key[key]
    if not m or m[6] ~= want then
        local names = {}
        for _, each in ipairs(sweep.metrics) do
            if each[6] == want then names[#names + 1] = each[1] end
        end
        errors.raise(CALL, ("%s: one of %s expected, got '%s'"):format(want, table.concat(names, ", "), key))
    end
    return key
end

local function check(o)
    options.check(CALL, o, known, 3)
    for _, name in ipairs { "policy", "trace", "profile" } do
        if not o[name] then errors.raise(CALL, name .. " expected") end
    end
    local s = {}
    for k, v in pairs(o) do s[k] = v end
    s.jobs, s.progress = nil, nil
    s.policy, s.given = params.parse(o.policy)
    if not s.policy then errors.raise(CALL, s.given) end
    local declared, err = policies.params(s.policy)
    if not declared then
        errors.raise(CALL, err or ("policy '%s' does not say what can be set (policy/params.lua)"):format(s.policy))
    end
    local given = s.given or {}
    local all, why = params.complete(declared, given)
    if not all then errors.raise(CALL, why) end
    for k in pairs(given) do given[k] = all[k] end
    s.given = given
    s.candidates = check_number(o, "candidates", 27, 1, 100000)
    s.rounds = check_number(o, "rounds", 3, 1, 10)
    s.eta = check_number(o, "eta", 3, 1.5, 100)
    s.seeds, s.seed = check_number(o, "seeds", 2, 1, 1000), o.seed or 1
    s.load = check_number(o, "load", 1, 1e-6, 1e6)
    s.more, s.less = check_measure(o.more or "tokens_per_s", "more"), check_measure(o.less or "ttft_p99", "less")
    s.requests = check_number(o, "requests", 1000, 1, 1e9)
    require("llmrun.simulate").check_slo(o.slo, CALL)
    return s, declared
end

--- Measures candidates on `requests` rows with every seed: their more, less, or error.
local function measure(s, list, requests, o, told)
    local jobs, setup = {}, {}
    for k, v in pairs(s) do setup[k] = v end
    setup.requests = requests
    for _, c in ipairs(list) do
        for seed = 1, s.seeds do
            local job = sweep.job(setup, { policy = s.policy, options = c.options }, s.load, seed)
            if not workload.is(s.trace) then job.open.skip = (s.skip or 0) + (seed - 1) * s.requests end
            jobs[#jobs + 1] = job
        end
    end
    local results = farm.run(jobs, { module = "llmrun.sweep", name = "simulate", jobs = o.jobs, done = told })
    for i, c in ipairs(list) do
        local more, less = {}, {}
        for seed = 1, s.seeds do
            local r = results[(i - 1) * s.seeds + seed]
            c.error = c.error or r.error or (r.value.policy_error and "policy: " .. r.value.policy_error)
            more[seed] = r.value and sweep.value(r.value, s.more)
            less[seed] = r.value and sweep.value(r.value, s.less)
        end
        if not c.error and (#more < s.seeds or #less < s.seeds) then
            c.error = ("the runs have no %s"):format(#more < s.seeds and s.more or s.less)
        end
        c.more, c.less = statistics.interval(more), statistics.interval(less)
    end
end

--- How many candidates and rows each round has.
local function plan(s, n)
    local list = {}
    for k = 1, s.rounds do
        list[k] = {
            requests = math.max(1, math.floor(s.requests / s.eta ^ (s.rounds - k) + 0.5)),
            tried = math.max(1, math.ceil(n / s.eta ^ (k - 1) - 1e-9)),
        }
    end
    return list
end

--- The longest trace that will be needed is there, or an error before anything is run.
local function check_trace(s)
    for _, seed in ipairs { 1, s.seeds } do
        local open = { most = 1, skip = s.skip, scale = s.scale, limit = s.limit, seed = seed }
        if not workload.is(s.trace) then open.seed, open.skip = nil, (s.skip or 0) + (seed - 1) * s.requests end
        local rows, err = traces.open(s.trace, open)
        if not rows then errors.raise(CALL, err) end
    end
    local profile, why = require("llmrun.profile").load(s.profile)
    if not profile then errors.raise(CALL, why) end
end

--- The search; raises where its options are wrong, or nothing could be measured. Options: those of sweep.run of one
--- policy, and load (1), candidates (27), rounds (3), eta (3: one in three goes on, on a piece three times as long),
--- requests (of the last round; 1000), seeds (2, of each trial), seed (of the draws), more and less (keys of
--- sweep.metrics; tokens_per_s and ttft_p99), jobs, progress(done, all, text).
---@param o table
---@return table
function M.run(o)
    local s, declared = check(o)
    check_trace(s)
    local space = space_of(declared, s.given)
    if #space == 0 then errors.raise(CALL, ("nothing of the policy '%s' is left to be searched"):format(o.policy)) end
    local all = candidates_of(s, space, declared)
    local rounds, list = plan(s, #all), all
    local trials, done = 0, 0
    for _, round in ipairs(rounds) do trials = trials + (round.tried + 1) * s.seeds end
    local front
    for k, round in ipairs(rounds) do
        measure(s, list, round.requests, o, o.progress and function()
            done = done + 1
            o.progress(math.min(done, trials), trials, ("round %d of %d"):format(k, #rounds))
        end)
        round.tried = #list
        local good = {}
        for _, c in ipairs(list) do
            c.round = k
            if not c.error then good[#good + 1] = c end
        end
        if #good == 0 then errors.raise(CALL, "no candidate could be measured: " .. list[1].error) end
        local order
        order, front = ranked(good)
        list = {}
        for i, c in ipairs(order) do
            c.front = k == #rounds and i <= front or nil
            if rounds[k + 1] and (i <= rounds[k + 1].tried or c.default) then list[#list + 1] = c end
        end
        table.sort(list, function(a, b) return a.index < b.index end)
    end
    local t = { setup = s, space = space, rounds = rounds, candidates = all, front = {} }
    for _, c in ipairs(all) do
        if c.front then t.front[#t.front + 1] = c.index end
    end
    table.sort(t.front, function(a, b)
        local x, y = all[a], all[b]
        if x.less.mean ~= y.less.mean then return x.less.mean < y.less.mean end
        return a < b
    end)
    return t
end

--- The candidates of the last round: the front, from the lowest latency on, then the others.
---@param t table
---@return table[]
function M.finalists(t)
    local list, rest = {}, {}
    for _, i in ipairs(t.front) do list[#list + 1] = t.candidates[i] end
    for _, c in ipairs(t.candidates) do
        if c.round == #t.rounds and not c.front and not c.error then rest[#rest + 1] = c end
    end
    table.sort(rest, function(a, b)
        if a.less.mean ~= b.less.mean then return a.less.mean < b.less.mean end
        return a.index < b.index
    end)
    return table.move(rest, 1, #rest, #list + 1, list)
end

local function remark(c)
    return (c.front and "front" or "") .. (c.front and c.default and ", " or "") .. (c.default and "default" or "")
end

--- Tables for a terminal.
---@param t table
---@return string
function M.text(t)
    local s, lines = t.setup, {}
    for k, round in ipairs(t.rounds) do
        lines[k] = ("round %d: %s on %s"):format(k, count(round.tried, "candidate"), count(round.requests, "request"))
    end
    local rows = { { "policy", sweep.by_key[s.more][3], sweep.by_key[s.less][3], "" } }
    for _, c in ipairs(M.finalists(t)) do
        rows[#rows + 1] = { c.text, sweep.show(c.more, s.more), sweep.show(c.less, s.less), remark(c) }
    end
    lines[#lines + 1] = ""
    for _, line in ipairs(sweep.columns(rows)) do lines[#lines + 1] = (line:gsub(" +$", "")) end
    lines[#lines + 1] = ("\nfront: nobody is better in both%s"):format(s.seeds > 1
        and (("; ± half of the 95 %% interval over %d seeds, by Student's t"):format(s.seeds)) or "")
    local failed, first = 0, nil
    for _, c in ipairs(t.candidates) do
        if c.error then failed, first = failed + 1, first or c end
    end
    if first then
        lines[#lines + 1] = ("%s failed; the first, %s: %s"):format(count(failed, "candidate"), first.text, first.error)
    end
    return table.concat(lines, "\n") .. "\n"
end

--- The page of a search: the front as a plot, the finalists, the space.
---@param t table
---@return string
function M.html(t)
    local report = require "llmrun.report"
    local s, rows, space = t.setup, {}, {}
    local sets = { { name = "front" }, { name = "others of the last round" }, { name = "default" } }
    for i, set in ipairs(sets) do
        set.x, set.y, set.titles, set.kind, set.color = {}, {}, {}, "points", report.color(i)
    end
    sets[1].kind, sets[1].marks = "line", true
    for i, c in ipairs(M.finalists(t)) do
        for k, set in ipairs(sets) do
            if k == 1 and c.front or k == 2 and not c.front or k == 3 and c.default then
                set.x[#set.x + 1], set.y[#set.y + 1] = c.less.mean, c.more.mean
                set.titles[#set.titles + 1] = c.text
            end
        end
        rows[i] = { c.text, { sweep.show(c.more, s.more), c.front and "best" or nil },
            { sweep.show(c.less, s.less), c.front and "best" or nil }, remark(c) }
    end
    local more, less = sweep.by_key[s.more][3], sweep.by_key[s.less][3]
    for i, p in ipairs(t.space) do
        local values = {}
        for k, v in ipairs(p.values or {}) do values[k] = tostring(v) end
        space[i] = { p.name, p.values and table.concat(values, ", ")
            or ("%g to %g%s"):format(p.low, p.high, p.log and ", by the logarithm" or "") }
    end
    local rounds = {}
    for k, round in ipairs(t.rounds) do
        rounds[k] = { ("round %d"):format(k), ("%s, %s, %s"):format(count(round.tried, "candidate"),
            count(round.requests, "request"), count(s.seeds, "seed")) }
    end
    return report.page {
        title = "Parameters of the policy " .. s.policy,
        lead = ("%s on the trace %s at load %g: %s against %s."):format(count(#t.candidates, "candidate"), s.trace,
            s.load, more, less),
        sections = {
            { title = "Front", report.plot { width = 720, height = 420, series = sets, x = { label = less },
                y = { label = more } } },
            { title = "Last round", report.table { caption = "Bold: nobody is better in both", heads = { "policy", more,
                less, "" }, rows = rows } },
            { title = "What was searched", report.facts(space), report.facts(rounds) },
        },
    }
end

return M
