--- The report of a sweep: tables, plots over the load, differences, tenants, a time line, as one page (report.lua).

local count = require("llmrun.words").count
local report = require "llmrun.report"
local statistics = require "llmrun.statistics"
local sweep = require "llmrun.sweep"
local tables = require "llmrun.tables"

local M = {}

local MOST_TENANTS = 12 -- in a table
local PLOTTED_TENANTS = 4 -- at most, else only the table

local function metric(key) return sweep.by_key[key] end

--- What was run, as facts.
local function facts(setup)
    local function list(values, fn)
        local out = {}
        for i, v in ipairs(values) do out[i] = fn(v) end
        return table.concat(out, ", ")
    end
    local profile = setup.profile
    local out = {
        { "policies", list(setup.policies, function(p) return p.name end) },
        { "trace", setup.trace .. (setup.requests and ", " .. count(setup.requests, "request") .. " of it" or "")
            .. (setup.scale and (", lengths times %g"):format(setup.scale) or "") },
        { "loads", list(setup.loads, function(l) return ("%g"):format(l) end) .. " (times as fast)" },
        { "seeds", ("%d"):format(setup.seeds) },
        { "profile", type(profile) == "table" and (profile.name or "custom") or profile },
        { "replicas", ("%d"):format(setup.replicas or 1) .. (setup.router and ", router " .. setup.router or "") },
    }
    for _, name in ipairs { "tp", "pp" } do
        if setup[name] then out[#out + 1] = { name, ("%d"):format(setup[name]) } end
    end
    for _, group in ipairs { "engine", "slo" } do
        local parts = {}
        for i, k in ipairs(tables.sorted_keys(setup[group])) do
            parts[i] = ("%s %s"):format(k, tostring(setup[group][k]))
        end
        if #parts > 0 then
            out[#out + 1] = { group == "slo" and "SLO, seconds" or group, table.concat(parts, ", ") }
        end
    end
    return report.facts(out)
end

--- The place of the best mean of a column, if the metric knows what is better and they differ.
local function best_of(s, load, key)
    local better = metric(key)[6]
    local best, differ
    for p in ipairs(s.setup.policies) do
        local i = s.cells[p][load][key]
        local b = best and s.cells[best][load][key]
        if i then
            if b and i.mean ~= b.mean then differ = true end
            local ahead = b and (better == "less" and i.mean < b.mean or better == "more" and i.mean > b.mean)
            if not b or ahead then best = p end
        end
    end
    return better and differ and best or nil
end

local function load_table(s, load, keys)
    local heads, rows = { "policy" }, {}
    for i, key in ipairs(keys) do heads[i + 1] = metric(key)[3] end
    for p, policy in ipairs(s.setup.policies) do
        local row = { policy.name }
        for i, key in ipairs(keys) do
            row[i + 1] = { sweep.show(s.cells[p][load][key], key), best_of(s, load, key) == p and "best" or nil }
        end
        rows[p] = row
    end
    return report.table { caption = ("Load %g"):format(s.setup.loads[load]), heads = heads, rows = rows }
end

--- What cell(policy, load) has, against the load; with one load, as bars. key: the metric whose unit it has.
local function load_plot(s, key, title, log, cell)
    local m, setup = metric(key), s.setup
    local series, least, most = {}, math.huge, 0
    local top = m[4] == 100 and m[6] and 100 or key == "fairness" and 1 or nil
    for p, policy in ipairs(setup.policies) do
        local line = { name = policy.name, x = {}, y = {}, low = {}, high = {}, titles = {}, marks = true,
            color = report.color(p) }
        for l, load in ipairs(setup.loads) do
            local i = cell(p, l)
            if i then
                local n = #line.y + 1
                line.x[n], line.y[n] = load, i.mean
                line.low[n] = math.max(0, i.mean - (i.half or 0))
                line.high[n] = math.min(top or math.huge, i.mean + (i.half or 0))
                line.titles[n] = ("%s, load %g: %s"):format(policy.name, load, sweep.show(i, key))
                least, most = math.min(least, i.mean), math.max(most, i.mean)
            end
        end
        if #line.y > 0 then series[#series + 1] = line end
    end
    log = log and least > 0 and most / least > 20
    local spec = { title = title, width = 560, height = 340, series = series, x = { label = "load" },
        y = { min = not log and 0 or nil, log = log, max = top } }
    if #setup.loads == 1 then
        spec.categories = { ("load %g"):format(setup.loads[1]) }
        for _, one in ipairs(series) do one.kind, one.marks = "bars", nil end
        spec.y.log = nil
    end
    if log then -- an error bar that reaches zero ends at the edge
        for _, one in ipairs(series) do
            for i, v in ipairs(one.low) do one.low[i] = math.max(v, one.y[i] / 10) end
        end
    end
    return report.plot(spec)
end

local function plots(s, keys, log)
    local list = {}
    for i, key in ipairs(sweep.there(s, keys)) do
        list[i] = load_plot(s, key, metric(key)[3], log, function(p, l) return s.cells[p][l][key] end)
    end
    return report.plots(list)
end

--- Differences to the first policy, seed by seed.
local function differences(s, keys)
    local heads, parts = { "policy" }, {}
    for i, key in ipairs(keys) do heads[i + 1] = metric(key)[3] end
    for l, load in ipairs(s.setup.loads) do
        local rows = {}
        for p = 2, #s.setup.policies do
            local row = { s.setup.policies[p].name }
            for i, key in ipairs(keys) do
                local d = s.differences[p][l][key]
                local text, class = "-", nil
                if d then
                    local m = metric(key)
                    text = ("%+." .. m[5] .. "f ± %." .. m[5] .. "f"):format(d.mean, d.half or 0)
                    if m[6] and d.half and math.abs(d.mean) > d.half then
                        local good = (d.mean < 0) == (m[6] == "less")
                        text, class = text .. (good and " better" or " worse"), good and "good" or "bad"
                    end
                end
                row[i + 1] = { text, class }
            end
            rows[#rows + 1] = row
        end
        parts[l] = report.table {
            caption = ("Load %g, against %s"):format(load, s.setup.policies[1].name), heads = heads, rows = rows,
        }
    end
    return table.concat(parts)
end

--- The tenants with the most requests, by name, and how many others there are; nil of fewer than two.
local function tenants_of(s)
    local requests, names = {}, {}
    for _, run in ipairs(s.runs) do
        for name, t in pairs(run.value and run.value.tenants or {}) do
            requests[name] = (requests[name] or 0) + t.requests
        end
    end
    for name in pairs(requests) do names[#names + 1] = name end
    if #names < 2 then return nil end
    table.sort(names, function(a, b)
        if requests[a] ~= requests[b] then return requests[a] > requests[b] end
        return a < b
    end)
    local left_out = math.max(0, #names - MOST_TENANTS)
    for i = #names, MOST_TENANTS + 1, -1 do names[i] = nil end
    table.sort(names)
    return names, left_out
end

--- A tenant's value over the seeds: of(its part of a result).
local function tenant_cell(s, p, l, name, of)
    local values = {}
    for seed = 1, s.setup.seeds do
        local r = s.at(p, l, seed).value
        local t = r and r.tenants and r.tenants[name]
        values[#values + 1] = t and of(t)
    end
    return statistics.interval(values)
end

local function ttft_p99(t) return t.ttft and t.ttft.p99 and t.ttft.p99 * 1e3 end
local function share(t) return t.share and t.share * 100 end

--- Tenants: TTFT against the load, and at the highest one with the share of each under every policy.
local function tenants(s)
    local names, left_out = tenants_of(s)
    if not names then return nil end
    local last, list = #s.setup.loads, {}
    local heads, rows = { "tenant" }, {}
    for _, policy in ipairs(s.setup.policies) do
        heads[#heads + 1] = policy.name .. ": TTFT p99, ms"
        heads[#heads + 1] = "share of work, %"
    end
    for i, name in ipairs(names) do
        local label = name == "" and "(none)" or name
        if #names <= PLOTTED_TENANTS then
            list[i] = load_plot(s, "ttft_p99", ("%s: TTFT p99, ms"):format(label), true,
                function(p, l) return tenant_cell(s, p, l, name, ttft_p99) end)
        end
        local row = { label }
        for p in ipairs(s.setup.policies) do
            row[#row + 1] = sweep.show(tenant_cell(s, p, last, name, ttft_p99), "ttft_p99")
            row[#row + 1] = sweep.show(tenant_cell(s, p, last, name, share), "goodput")
        end
        rows[i] = row
    end
    local note = left_out > 0 and report.text(count(left_out, "tenant with fewer requests is",
        "tenants with fewer requests are") .. " left out.") or ""
    return (#list > 0 and report.plots(list) or "")
        .. report.table { caption = ("Load %g"):format(s.setup.loads[last]), heads = heads, rows = rows } .. note
end

--- KV and queue over time, of the first seed at the highest load.
local function timeline(s)
    local list, last = {}, #s.setup.loads
    for _, what in ipairs { { "kv", "KV used, %", 100 }, { "waiting", "requests waiting", 1 },
        { "running", "requests running", 1 } } do
        local series = {}
        for p, policy in ipairs(s.setup.policies) do
            local r = s.at(p, last, 1).value
            local line = { name = policy.name, kind = "steps", x = {}, y = {}, color = report.color(p) }
            for i, point in ipairs(r and r.timeline or {}) do
                line.x[i], line.y[i] = point.t, point[what[1]] * what[3]
            end
            if #line.x > 1 then series[#series + 1] = line end
        end
        if #series > 0 then
            list[#list + 1] = report.plot { title = what[2], width = 560, height = 300, series = series,
                x = { label = "seconds", min = 0 }, y = { min = 0 } }
        end
    end
    return #list > 0 and report.plots(list) or nil
end

local function troubles(s)
    local rows = {}
    for i, t in ipairs(sweep.troubles(s)) do
        rows[i] = { t.who, t.kind == "failed" and "failed" or "said",
            ("%d of %d"):format(t.n, #s.setup.loads * s.setup.seeds) }
    end
    if #rows == 0 then return nil end
    local out = { report.table {
        caption = "Policies with failed runs, or messages", heads = { "policy", "what", "runs" }, rows = rows,
    } }
    for _, t in ipairs(sweep.troubles(s)) do out[#out + 1] = report.pre(t.who .. ": " .. t.text) end
    return table.concat(out)
end

local measured = "TTFT: from a request's arrival to its first token. TPOT: mean time of a token after the first. E2E: "
    .. "from arrival to the last token. Percentiles are over the requests of a run, then averaged over the seeds. "
    .. "Fairness: Jain's index of what tenants were served a second while they had requests; 1 is equal, 1/n is all "
    .. "for one."

local function explain(setup)
    local seeds = setup.seeds > 1
        and ("± is half of the 95 %% confidence interval of the mean over %d seeds, by Student's t. Bold: the best "
            .. "mean of its column, which may lie within the intervals of others."):format(setup.seeds)
        or "One seed was run, so there are no confidence intervals."
    return report.text(seeds) .. report.text(measured)
end

--- The page as text. about: { title, command } may say more.
---@param s table what sweep.run returned
---@param about? { title?: string, command?: string }
---@return string
function M.html(s, about)
    about = about or {}
    local sections = {}
    local function add(title, ...)
        if (...) then sections[#sections + 1] = { title = title, ... } end
    end
    add("Failures", troubles(s))
    local keys = sweep.there(s, { "ttft_p50", "ttft_p90", "ttft_p99", "tpot_mean", "tpot_p99", "e2e_p50", "e2e_p99",
        "tokens_per_s", "goodput", "goodput_per_s", "deadlines", "fairness", "kv_mean", "kv_peak", "hit_rate",
        "preemptions", "failed" })
    local of_loads = {}
    for l in ipairs(s.setup.loads) do of_loads[l] = load_table(s, l, keys) end
    add("Latency", plots(s, { "ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p90", "tpot_p99", "e2e_p50",
        "e2e_p99" }, true))
    add("Service", plots(s, { "goodput", "goodput_per_s", "deadlines", "fairness", "tokens_per_s", "kv_mean", "kv_peak",
        "hit_rate" }))
    add("Tenants", tenants(s))
    add("Tables", table.concat(of_loads))
    if #s.setup.policies > 1 and s.setup.seeds > 1 then
        add("Differences", report.text("Each seed's trace is the same for all policies, so the differences are taken "
            .. "seed by seed; better or worse where the interval does not hold zero."), differences(s, sweep.there(s,
            { "ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "tokens_per_s", "goodput", "deadlines", "fairness" })))
    end
    add(("Time line, load %g, seed 1"):format(s.setup.loads[#s.setup.loads]), timeline(s))
    add("What was run", facts(s.setup), explain(s.setup), about.command and report.pre(about.command) or "")
    local first = s.setup.policies[1].name
    return report.page {
        title = about.title or ("Policies in the simulator: %s%s"):format(first, #s.setup.policies > 1
            and (" and %d more"):format(#s.setup.policies - 1) or ""),
        lead = ("%d policies, %d loads, %d seeds on the trace %s."):format(#s.setup.policies, #s.setup.loads,
            s.setup.seeds, s.setup.trace),
        sections = sections,
    }
end

return M
