--- Makes the profile of a loaded model on this machine: measures steps, fits the cost model, and says how well it fits
--- steps that were kept out of the fit.

local errors = require "llmrun.errors"
local fit = require "llmrun.profile.fit"
local measure = require "llmrun.profile.measure"

local M = {}

local knots = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320,
    384, 448, 512, 640, 768, 1024, 1536, 2048, 4096 }

local function points_for(samples)
    local most, points = 1, {}
    for _, s in ipairs(samples) do most = math.max(most, s.rows) end
    for _, n in ipairs(knots) do
        if n < most then points[#points + 1] = n end
    end
    points[#points + 1] = most
    return points
end

--- A step beside which others kept more than this part of a processor busy is left out, if enough are left.
local MUCH = 0.08

--- Marks the steps that count; the share of those that don't.
local function choose(samples)
    local quiet = 0
    for _, s in ipairs(samples) do
        s.use = (s.others or 0) <= MUCH
        quiet = quiet + (s.use and 1 or 0)
    end
    if quiet < #samples / 2 then
        for _, s in ipairs(samples) do s.use = true end
    end
    return 1 - quiet / math.max(1, #samples)
end

--- A kind's steps as one: mean contexts and coldness, and the median time.
local function middle(list)
    local m = { rows = list[1].rows, seqs = list[1].seqs, outs = list[1].outs, context = 0, pairs = 0, cold = 0 }
    local times = {}
    for i, s in ipairs(list) do
        for _, name in ipairs { "context", "pairs", "cold" } do m[name] = m[name] + s[name] / #list end
        times[i] = s.seconds
    end
    table.sort(times)
    m.seconds = times[(#times + 1) // 2]
    return m
end

--- Every fourth kind is kept out of the fit that is judged; the profile's own is of all.
local function judged_fit(samples)
    local points, used = points_for(samples), {}
    for _, s in ipairs(samples) do used[#used + 1] = s.use and s or nil end
    local kinds, kept, all = measure.kinds(used), {}, {}
    for i, list in ipairs(kinds) do
        for _, s in ipairs(list) do s.kept = i % 4 == 2 end
    end
    local half = errors.check("profile", fit.fit_run(samples, points, function(s) return s.use and not s.kept end))
    for i, list in ipairs(kinds) do kept[#kept + 1] = i % 4 == 2 and middle(list) or nil end
    local step = errors.check("profile", fit.fit_run(samples, points, function(s) return s.use end))
    for i, list in ipairs(kinds) do all[i] = middle(list) end
    local e = fit.error(half, kept)
    e.fitted = fit.error(step, all).mean_abs
    for _, s in ipairs(samples) do s.use, s.kept, s.cold = nil, nil, nil end
    return step, e, #kinds
end

local function processor()
    local file <close> = io.open("/proc/cpuinfo", "r")
    for line in file and file:lines() or function() end do
        local name = line:match("^model name%s*:%s*(.*)")
        if name then return name end
    end
    return "unknown processor"
end

--- The steps of a designed set, measured. part: { k, n }, only an n-th of the set.
---@param model llmrun.Model
---@param o? { repeat?: integer, part?: integer[], progress?: function }
---@return table[] samples
function M.measure(model, o)
    local info = model.engine:info()
    local longest = math.min(info.context, 1200, info.kv[1].total * info.block_size // 4)
    return measure.run(model, {
        max_seqs = math.min(info.max_seqs, 64), longest = longest, ["repeat"] = o and o["repeat"] or 2,
        progress = o and o.progress, part = o and o.part,
    })
end

--- The profile, and the steps that it was fitted to.
---@param model llmrun.Model
---@param o? { name?: string, repeat?: integer, raw?: table[], progress?: function } raw: what M.measure gave; else it
---  is measured here
function M.profile(model, o)
    o = o or {}
    local info = model.engine:info()
    local kv = info.kv[1]
    local raw = o.raw or M.measure(model, o)
    local busy = choose(raw)
    local step, e, n_kinds = judged_fit(raw)
    e.disturbed = busy
    local ranks = info.ranks
    return {
        format = "llmrun-profile-1", name = o.name or model.info.name,
        source = ("measured by llmrun profile, %d steps of %d kinds"):format(#raw, n_kinds),
        model = { name = model.info.name, context = info.context },
        machine = { name = processor(), backend = info.backend,
            tp = ranks and ranks.tp or 1, pp = ranks and ranks.pp or 1 },
        step = step,
        kv = {
            bytes_per_token = math.max(1, kv.block_bytes // info.block_size),
            capacity_tokens = kv.total * info.block_size,
            swap_bandwidth = 5e9, type = info.kv_type,
        },
        engine = {
            max_batch_tokens = info.max_batch_tokens, max_seqs = info.max_seqs, chunk = info.chunk,
            prompt_rows = info.prompt_rows, block_size = info.block_size,
        },
        error = e,
    }, raw
end

return M
