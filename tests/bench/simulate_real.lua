--- How near the simulator comes to the engine on this machine: three loads under two policies, really and simulated
--- with a profile that is measured first (or given), side by side.
---
---   llmrun tests/bench/simulate_real.lua [--model smollm2] [--profile FILE] [--repeat N] [--requests N] [--json]
---
--- Real requests go through the driver of llmrun bench --replay. Nothing else should run: what a step takes is
--- measured before the real runs and after them. With SmolLM2 on two threads it takes about 45 s.

local llm = require "llmrun"
local load = require "llmrun.cli.bench_load"
local make = require "llmrun.profile.make"
local json = require "llmrun.json"
local profile = require "llmrun.profile"
local simulate = require "llmrun.simulate"

local o = { model = "smollm2", ["repeat"] = "1", requests = "24" }
do
    local i = 1
    while arg[i] do
        local name = arg[i]:match("^%-%-(%a+)$")
        if name == "json" then
            o.json = true
        elseif name and arg[i + 1] then
            o[name], i = arg[i + 1], i + 1
        else
            error("unknown argument " .. arg[i], 0)
        end
        i = i + 1
    end
end

--- Numbers that look random and are always the same.
local function random_of(x)
    return function()
        x = (x * 1103515245 + 12345) % 2147483648
        return (x // 65536) / 32768
    end
end

--- n rows with exponential gaps of `gap` seconds on average; half of the prompts begin with one of two texts.
local function rows_of(n, gap, seed)
    local random, rows, at = random_of(seed), {}, 0
    for i = 1, n do
        at = at - gap * math.log(1 - random())
        local row = { at = at, prompt = 24 + math.floor(330 * random() ^ 2), output = 8 + math.floor(56 * random()) }
        if random() < 0.5 then
            row.block, row.blocks = 64, {}
            for b = 1, (row.prompt + 63) // 64 do row.blocks[b] = b == 1 and i % 2 or 1000 * i + b end
        end
        rows[i] = row
    end
    return rows
end

local n = math.tointeger(tonumber(o.requests))
local loads = {
    { name = "light", rows = rows_of(n, 0.25, 11) },
    { name = "heavy", rows = rows_of(n, 0.11, 12) },
    { name = "burst", rows = rows_of(n, 0, 13) },
}
local policies = { "fcfs", "shortest_first" }

local model <close> = llm.load(o.model, { max_seqs = 16, kv = { blocks = 2048 } })
local p
local raw = {}
--- Steps are measured before the real runs and after them, so that a machine that changes meanwhile is met halfway.
local function measure_more()
    if o.profile then return end
    local more = make.measure(model, { ["repeat"] = math.tointeger(tonumber(o["repeat"])) })
    table.move(more, 1, #more, #raw + 1, raw)
end

local function ms(x) return x * 1000 end
local function simulated(rows, policy)
    local r = simulate.run { trace = rows, policy = policy, profile = p }
    return {
        ttft_mean = ms(r.ttft.mean), ttft_p90 = ms(r.ttft.p90), tpot_mean = ms(r.tpot.mean), tpot_p90 = ms(r.tpot.p90),
        tokens_per_s = r.tokens_per_s,
    }
end
local function real(rows, policy)
    model:use(policy)
    local r = load.measure_replay(model, rows)
    return {
        ttft_mean = r.ttft_ms.mean, ttft_p90 = r.ttft_ms.p90, tpot_mean = r.tpot_ms.mean, tpot_p90 = r.tpot_ms.p90,
        tokens_per_s = r.output_tps,
    }
end

local figures = { "ttft_mean", "ttft_p90", "tpot_mean", "tpot_p90", "tokens_per_s" }
measure_more()
local reals = {}
for i, l in ipairs(loads) do
    reals[i] = {}
    for k, policy in ipairs(policies) do reals[i][k] = real(l.rows, policy) end
end
model:use(nil)
measure_more()
p = o.profile and assert(profile.load(o.profile)) or make.profile(model, { raw = raw })

local out = { profile_error = p.error, runs = {} }
if not o.json then
    print(("%s: profile's error on held-out steps: mean %.1f %%, p90 %.1f %%"):format(model.info.name,
        100 * p.error.mean_abs, 100 * p.error.p90))
    print(("%-6s %-15s %s"):format("load", "policy", "TTFT mean, p90, TPOT mean, p90 (ms), tokens/s: real / simulated"))
end
local worst, sum, count = 0, 0, 0
for at, l in ipairs(loads) do
    for k, policy in ipairs(policies) do
        local a, b = reals[at][k], simulated(l.rows, policy)
        local run, text = { load = l.name, policy = policy, real = a, simulated = b, error = {} }, {}
        for i, f in ipairs(figures) do
            local e = b[f] / a[f] - 1
            run.error[f] = e
            worst, sum, count = math.max(worst, math.abs(e)), sum + math.abs(e), count + 1
            text[i] = ("%8.1f /%8.1f %+5.1f %%"):format(a[f], b[f], 100 * e)
        end
        out.runs[#out.runs + 1] = run
        if not o.json then print(("%-6s %-15s %s"):format(l.name, policy, table.concat(text, " "))) end
    end
end

-- Whether the simulator ranks the policies as the engine does, by each figure that differs by more than 2 %.
local asked, right = 0, 0
for i = 1, #out.runs, 2 do
    local x, y = out.runs[i], out.runs[i + 1]
    for _, f in ipairs(figures) do
        if math.abs(x.real[f] / y.real[f] - 1) > 0.02 then
            asked = asked + 1
            if (x.real[f] < y.real[f]) == (x.simulated[f] < y.simulated[f]) then right = right + 1 end
        end
    end
end
out.worst, out.mean, out.ranked, out.compared = worst, sum / count, right, asked
if o.json then
    print(json.encode(out))
else
    print(("errors: mean %.1f %%, worst %.1f %%; policies ranked alike in %d of %d figures"):format(100 * sum / count,
        100 * worst, right, asked))
end
