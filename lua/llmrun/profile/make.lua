--- Makes the profile of a loaded model on this machine: measures steps, fits the cost model, and says how well it fits
--- steps that were kept out of the fit.

local errors = require "llmrun.errors"
local fit = require "llmrun.profile.fit"
local measure = require "llmrun.profile.measure"

local M = {}

local knots = { 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448,
    512, 640, 768, 1024, 1536, 2048, 4096 }

local function points_for(samples)
    local most, points = 1, {}
    for _, s in ipairs(samples) do most = math.max(most, s.rows) end
    for _, n in ipairs(knots) do
        if n < most then points[#points + 1] = n end
    end
    points[#points + 1] = most
    return points
end

--- Every fourth sample is kept out of the fit that is judged; the profile's own is of all.
local function judged_fit(samples)
    local points = points_for(samples)
    local seen, kept = {}, {}
    for i, s in ipairs(samples) do
        local list = i % 4 == 2 and kept or seen
        list[#list + 1] = s
    end
    local half = errors.check("profile", fit.fit(seen, points))
    local step = errors.check("profile", fit.fit(samples, points))
    local e = fit.error(half, kept)
    e.fitted = fit.error(step, samples).mean_abs
    return step, e
end

local function processor()
    local file <close> = io.open("/proc/cpuinfo", "r")
    for line in file and file:lines() or function() end do
        local name = line:match("^model name%s*:%s*(.*)")
        if name then return name end
    end
    return "unknown processor"
end

--- The steps of a designed set, measured.
---@param model llmrun.Model
---@param o? { repeat?: integer, progress?: function }
---@return table[] samples
function M.measure(model, o)
    local info = model.engine:info()
    local longest = math.min(info.context, 1200, info.kv[1].total * info.block_size // 4)
    return measure.run(model, {
        max_seqs = math.min(info.max_seqs, 64), longest = longest, ["repeat"] = o and o["repeat"] or 2,
        progress = o and o.progress,
    })
end

--- The profile, and the kinds of steps that it was fitted to.
---@param model llmrun.Model
---@param o? { name?: string, repeat?: integer, raw?: table[], progress?: function } raw: what M.measure gave; else it
---  is measured here
function M.profile(model, o)
    o = o or {}
    local info = model.engine:info()
    local kv = info.kv[1]
    local raw = o.raw or M.measure(model, o)
    local samples = measure.merge(raw)
    local step, e = judged_fit(samples)
    local ranks = info.ranks
    return {
        format = "llmrun-profile-1", name = o.name or model.info.name,
        source = ("measured by llmrun profile, %d steps of %d kinds"):format(#raw, #samples),
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
    }, samples
end

return M
