--- How near the simulator comes to the engine on this machine: three loads under two policies, really and simulated.
---
---   llmrun tests/bench/simulate_real.lua [--model smollm2] [--rounds N] [--save FILE] [--requests N] [--json]
---
--- A round measures pieces of the profile between the real runs (the driver of llmrun bench --replay). The profile is
--- fitted to the pieces of all rounds; the pieces before and after a real run tell how fast the machine was just then,
--- for narrow steps and for wide ones, and the run is simulated with the profile at that speed. Real runs beside which
--- others kept more than a tenth of a processor busy don't count. Figures are medians over rounds;
--- behind the real one stands half of its range. Policies are compared in figures whose difference is larger than half
--- of its own range over the rounds (and 2 %).
---
--- The steps of the real runs are also predicted one by one, from what they held: that is the error of the cost model
--- alone. --save FILE keeps what was measured and adds to what is there (--rounds 0: only evaluates it). A round of
--- SmolLM2 on two threads takes 30 s.

local llm = require "llmrun"
local load = require "llmrun.cli.bench_load"
local core = require "llmrun.core"
local fit = require "llmrun.profile.fit"
local json = require "llmrun.json"
local make = require "llmrun.profile.make"
local others = require "llmrun.profile.others"
local simulate = require "llmrun.simulate"

local o = { model = "smollm2", rounds = "2", requests = "24" }
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
local figures = { "ttft_mean", "ttft_p90", "tpot_mean", "tpot_p90", "tokens_per_s" }

---- Measuring

local model <close> = llm.load(o.model, { max_seqs = 16, kv = { blocks = 2048 } })

local function real(rows, policy)
    local steps, watch = {}, others.watch()
    model:use(policy)
    watch:look()
    local begin = core.now()
    local r = load.measure_replay(model, rows, function(at, seconds)
        local n_rows, seqs, outs, context, pairs_ = model.engine:last_load()
        steps[#steps + 1] = {
            at = at, seconds = seconds, rows = n_rows, seqs = seqs, outs = outs, context = context, pairs = pairs_,
        }
        watch:look()
    end)
    local ended = core.now()
    watch:look()
    model:use(nil)
    return {
        ttft_mean = r.ttft_ms.mean, ttft_p90 = r.ttft_ms.p90, tpot_mean = r.tpot_ms.mean, tpot_p90 = r.tpot_ms.p90,
        tokens_per_s = r.output_tps, others = watch:share(begin, ended), steps = steps,
    }
end

--- { pieces = lists of steps, one more than runs; runs = those of all loads and policies in turn }
local function measure_round()
    local round, all = { pieces = {}, runs = {} }, #loads * #policies
    for i, l in ipairs(loads) do
        for k, policy in ipairs(policies) do
            local part = (i - 1) * #policies + k
            round.pieces[part] = make.measure(model, { ["repeat"] = 1, part = { part, all } })
            round.runs[part] = real(l.rows, policy)
        end
    end
    round.pieces[all + 1] = make.measure(model, { ["repeat"] = 1, part = { 1, all } })
    return round
end

local rounds = {}
if o.save and core.stat(o.save) then
    for line in io.lines(o.save) do rounds[#rounds + 1] = assert(json.decode(line)) end
end
for _ = 1, math.tointeger(tonumber(o.rounds)) do
    local round = measure_round()
    rounds[#rounds + 1] = round
    if o.save then
        local file <close> = assert(io.open(o.save, "a"))
        assert(file:write(assert(json.encode(round)), "\n"))
    end
end
if #rounds == 0 then error("nothing was measured", 0) end

---- The profile, and how fast the machine was

local function median(list)
    local sorted = table.move(list, 1, #list, 1, {})
    table.sort(sorted)
    local mid = #sorted // 2
    return #sorted % 2 == 1 and sorted[mid + 1] or (sorted[mid] + sorted[mid + 1]) / 2
end

local raw = {}
for _, round in ipairs(rounds) do
    for _, piece in ipairs(round.pieces) do table.move(piece, 1, #piece, #raw + 1, raw) end
end
local p = make.profile(model, { raw = raw })
local step = p.step

--- What steps took over what the profile says, by kind; 1 where there are none.
local function speed_of(pieces)
    local ratio = { narrow = {}, wide = {} }
    for _, piece in ipairs(pieces) do
        fit.chill(piece, step.cool_seconds, step.cold_keep)
        for _, s in ipairs(piece) do
            if (s.others or 0) < 0.1 then
                local list = s.rows <= step.narrow_rows and ratio.narrow or ratio.wide
                list[#list + 1] = s.seconds / fit.seconds(step, s)
            end
        end
    end
    return #ratio.narrow > 5 and median(ratio.narrow) or 1, #ratio.wide > 5 and median(ratio.wide) or 1
end

--- The profile on a machine that takes so many times as long.
local function at_speed(narrow, wide)
    local q, s = {}, {}
    for key, v in pairs(p) do q[key] = v end
    for key, v in pairs(step) do s[key] = v end
    s.seconds = {}
    for i, t in ipairs(step.seconds) do s.seconds[i] = t * (step.rows[i] <= step.narrow_rows and narrow or wide) end
    for _, key in ipairs { "decode_context", "cold_narrow", "token", "sequence" } do s[key] = step[key] * narrow end
    for _, key in ipairs { "prefill_pair", "cold_wide" } do s[key] = step[key] * wide end
    q.step = s
    return q
end

local function simulated(rows, policy, profile)
    local r = simulate.run { trace = rows, policy = policy, profile = profile }
    return {
        ttft_mean = 1e3 * r.ttft.mean, ttft_p90 = 1e3 * r.ttft.p90, tpot_mean = 1e3 * r.tpot.mean,
        tpot_p90 = 1e3 * r.tpot.p90, tokens_per_s = r.tokens_per_s,
    }
end

---- Side by side

--- Half of the range of a list, and the median.
local function spread(list)
    if #list == 0 then return 0, 0 end
    return (math.max(table.unpack(list)) - math.min(table.unpack(list))) / 2, median(list)
end

--- Real and simulated figures of a load and policy in the rounds that count, by round.
local function side_by_side(part, rows, policy)
    local list, disturbed = {}, 0
    for k, round in ipairs(rounds) do
        local run = round.runs[part]
        if run.others <= 0.1 then
            local narrow, wide = speed_of { round.pieces[part], round.pieces[part + 1] }
            list[k] = { real = run, simulated = simulated(rows, policy, at_speed(narrow, wide)) }
        else
            disturbed = disturbed + 1
        end
    end
    return list, disturbed
end

local out = { profile_error = p.error, rounds = #rounds, runs = {} }
local worst, sum, count, far = 0, 0, 0, 0
for i, l in ipairs(loads) do
    for k, policy in ipairs(policies) do
        local by_round, disturbed = side_by_side((i - 1) * #policies + k, l.rows, policy)
        local run = { load = l.name, policy = policy, disturbed = disturbed, by_round = by_round, error = {},
            real = {}, spread = {}, simulated = {} }
        run.used = 0
        for _, f in ipairs(next(by_round) and figures or {}) do
            local a, b, e = {}, {}, {}
            for _, r in pairs(by_round) do
                a[#a + 1], b[#b + 1], e[#e + 1] = r.real[f], r.simulated[f], r.simulated[f] / r.real[f] - 1
            end
            local half, mid = spread(a)
            run.real[f], run.spread[f], run.simulated[f], run.error[f] = mid, half / mid, median(b), median(e)
            run.used = #a
            worst, sum, count = math.max(worst, math.abs(run.error[f])), sum + math.abs(run.error[f]), count + 1
            if math.abs(run.error[f]) > 0.1 then far = far + 1 end
        end
        out.runs[#out.runs + 1] = run
    end
end
out.worst, out.mean, out.beyond, out.figures = worst, sum / count, far, count

-- Whether the simulator ranks the policies as the engine does.
out.compared, out.ranked = 0, 0
for i = 1, #out.runs, 2 do
    local x, y = out.runs[i], out.runs[i + 1]
    for _, f in ipairs(figures) do
        local really, simulated_ = {}, {}
        for round, r in pairs(x.by_round) do
            local other = y.by_round[round]
            if other then
                really[#really + 1] = r.real[f] / other.real[f] - 1
                simulated_[#simulated_ + 1] = r.simulated[f] / other.simulated[f] - 1
            end
        end
        local half, mid = spread(really)
        if math.abs(mid) > math.max(0.02, half) and #really > 0 then
            out.compared = out.compared + 1
            if (mid < 0) == (median(simulated_) < 0) then out.ranked = out.ranked + 1 end
        end
    end
end

-- Each step of the real runs by itself.
local kinds = {
    { "decoding, 1 row", function(s) return s.rows == 1 end },
    { "2 to 4 rows", function(s) return s.rows == s.seqs and s.rows <= 4 end },
    { "5 to 8 rows", function(s) return s.rows == s.seqs and s.rows <= 8 end },
    { "9 to 16 rows", function(s) return s.rows == s.seqs end },
    { "a prompt's rows", function(s) return s.seqs == 1 end },
    { "both", function() return true end },
}
for _, kind in ipairs(kinds) do kind.off, kind.real, kind.said = {}, 0, 0 end
for _, round in ipairs(rounds) do
    for part, run in ipairs(round.runs) do
        local narrow, wide = speed_of { round.pieces[part], round.pieces[part + 1] }
        local then_ = at_speed(narrow, wide).step
        fit.chill(run.steps, step.cool_seconds, step.cold_keep)
        for _, s in ipairs(run.others <= 0.1 and run.steps or {}) do
            local said = fit.seconds(then_, s)
            for _, kind in ipairs(kinds) do
                if kind[2](s) then
                    kind.off[#kind.off + 1] = math.abs(said / s.seconds - 1)
                    kind.real, kind.said = kind.real + s.seconds, kind.said + said
                    break
                end
            end
        end
    end
end
out.steps = {}
for i, kind in ipairs(kinds) do
    out.steps[i] = { kind = kind[1], n = #kind.off, seconds = kind.real, total = kind.said / kind.real - 1,
        median = #kind.off > 0 and median(kind.off) or nil }
end

---- Told

if o.json then
    for _, run in ipairs(out.runs) do run.by_round = nil end
    print(json.encode(out))
    return
end
print(("%s, %d rounds: profile's error on kinds of steps kept out of its fit: mean %.1f %%, p90 %.1f %%; "
    .. "%.0f %% of its steps were beside other work"):format(model.info.name, #rounds, 100 * p.error.mean_abs,
    100 * p.error.p90, 100 * p.error.disturbed))
print "real (± half of its range over the rounds) / simulated at the speed that the machine had just then, error"
for _, run in ipairs(out.runs) do
    print(("%s, %s, rounds: %d%s"):format(run.load, run.policy, run.used, run.disturbed > 0
        and (", and %d beside other work"):format(run.disturbed) or ""))
    for _, f in ipairs(run.used > 0 and figures or {}) do
        print(("    %-14s %8.1f ± %4.1f %% / %8.1f  %+5.1f %%"):format(f:gsub("_mean$", " mean, ms")
            :gsub("_p90$", " p90, ms"):gsub("tokens_per_s", "tokens/s"), run.real[f], 100 * run.spread[f],
            run.simulated[f], 100 * run.error[f]))
    end
end
print(("errors: mean %.1f %%, worst %.1f %%, %d of %d figures within 10 %%; policies ranked alike in %d of %d figures "
    .. "that tell them apart"):format(100 * out.mean, 100 * out.worst, out.figures - out.beyond, out.figures,
    out.ranked, out.compared))
print "steps of the real runs, each predicted from what it held:"
for _, k in ipairs(out.steps) do
    if k.n > 0 then
        print(("    %-16s %5d steps, %6.2f s: total %+5.1f %%, a step's error %4.1f %% (median)"):format(k.kind, k.n,
            k.seconds, 100 * k.total, 100 * k.median))
    end
end
