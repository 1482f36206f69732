--- Fits a profile's cost model to measured steps by least squares of relative errors.
---
--- The model is linear in what is sought: a table over rows between whose points it interpolates, and so much for each
--- sequence, token drawn, token that a decoding row looks back at, pair of a prompt's row and a token it sees, and
--- for weights that got cold (model/simulated.h). What would be negative is left out and the rest fitted again.

local M = {}

--- Rows up to which a step counts as narrow: those that the kernels of single rows take, which wait for memory.
M.narrow_rows = 8

local linear = { "sequence", "token", "decode_context", "prefill_pair", "cold_narrow", "cold_wide" }
local of_sample = {
    sequence = function(s) return s.seqs end, token = function(s) return s.outs end,
    decode_context = function(s) return s.context end, prefill_pair = function(s) return s.pairs end,
    cold_narrow = function(s) return s.rows <= M.narrow_rows and s.cold or 0 end,
    cold_wide = function(s) return s.rows > M.narrow_rows and s.cold or 0 end,
}

--- Says for each of the steps of a run, in order, how cold the weights were at its begin: `cold`, from 0 to 1.
function M.chill(samples, cool_seconds, keep)
    local cold, ended = 1, nil
    for _, s in ipairs(samples) do
        if ended then cold = 1 - (1 - cold) * math.exp(-math.max(0, s.at - ended) / cool_seconds) end
        s.cold = cold
        cold = keep * (1 - (1 - cold) * math.exp(-s.seconds / cool_seconds))
        ended = s.at + s.seconds
    end
end

--- The points among which `rows` lies: index of the lower one, and the upper one's weight.
local function place(points, rows)
    local i = 1
    while i < #points - 1 and points[i + 1] < rows do i = i + 1 end
    if #points == 1 then return 1, 0 end
    return i, math.max(0, (rows - points[i]) / (points[i + 1] - points[i]))
end

--- The model's seconds for a sample.
function M.seconds(step, s)
    local i, w = place(step.rows, s.rows)
    local t = step.seconds[i] * (1 - w) + (step.seconds[i + 1] or 0) * w
    for _, name in ipairs(linear) do t = t + (step[name] or 0) * of_sample[name](s) end
    return t
end

--- Solves m x = v (m symmetric, positive): x, or nil if it can't be.
local function solve(m, v)
    local n = #v
    for i = 1, n do
        local best = i
        for k = i + 1, n do
            if math.abs(m[k][i]) > math.abs(m[best][i]) then best = k end
        end
        m[i], m[best], v[i], v[best] = m[best], m[i], v[best], v[i]
        if math.abs(m[i][i]) < 1e-300 then return nil end
        for k = 1, n do
            local f = k ~= i and m[k][i] / m[i][i] or 0
            if f ~= 0 then
                for j = i, n do m[k][j] = m[k][j] - f * m[i][j] end
                v[k] = v[k] - f * v[i]
            end
        end
    end
    for i = 1, n do v[i] = v[i] / m[i][i] end
    return v
end

--- One least-squares fit with the linear terms in `terms`; a little of a straight line between neighbouring points
--- keeps points that nothing was measured at in place.
local function fit_terms(samples, points, terms, weight)
    local n, m, v = #points + #terms, {}, {}
    for i = 1, n do
        m[i], v[i] = {}, 0
        for j = 1, n do m[i][j] = 0 end
    end
    local function add(row, y)
        for i, a in pairs(row) do
            for j, b in pairs(row) do m[i][j] = m[i][j] + a * b end
            v[i] = v[i] + a * y
        end
    end
    for _, s in ipairs(samples) do
        local i, w = place(points, s.rows)
        local f = weight(s)
        local row = { [i] = (1 - w) * f }
        if points[i + 1] then row[i + 1] = w * f end
        for k, name in ipairs(terms) do row[#points + k] = of_sample[name](s) * f end
        add(row, s.seconds * f)
    end
    for i = 2, #points - 1 do
        local w = (points[i] - points[i - 1]) / (points[i + 1] - points[i - 1])
        local f = 0.02 / samples.typical
        add({ [i - 1] = (1 - w) * f, [i] = -f, [i + 1] = w * f }, 0)
    end
    for i = #points + 1, n do m[i][i] = m[i][i] * (1 + 1e-9) end -- two terms that these steps don't tell apart share
    return solve(m, v)
end

--- The cost model { kind = "table", rows, seconds, sequence, ... } of samples { rows, seqs, outs, context, pairs,
--- seconds, cold }, with these points of the table. Steps that took much longer than the model says count little.
function M.fit(samples, points)
    local terms, step = {}, nil
    local sum = 0
    for _, name in ipairs(linear) do
        for _, s in ipairs(samples) do
            if of_sample[name](s) ~= 0 then
                terms[#terms + 1] = name
                break
            end
        end
    end
    for _, s in ipairs(samples) do sum = sum + s.seconds end
    samples.typical = sum / #samples
    for round = 1, 12 do
        local before = step
        local x = fit_terms(samples, points, terms, function(s)
            local off = before and math.abs(s.seconds - M.seconds(before, s)) / s.seconds or 0
            return 1 / s.seconds / math.max(1, off / 0.05) ^ 0.5
        end)
        if not x then return nil, "too few different steps were measured" end
        step = { kind = "table", rows = points, seconds = table.move(x, 1, #points, 1, {}) }
        local least, at
        for k, name in ipairs(terms) do
            step[name] = x[#points + k]
            if step[name] < 0 and (not least or step[name] < least) then least, at = step[name], k end
        end
        if at then
            table.remove(terms, at)
            step = before
        elseif round > 4 then
            break
        end
    end
    for _, name in ipairs(linear) do step[name] = math.max(0, step[name] or 0) end
    for i, t in ipairs(step.seconds) do step.seconds[i] = math.max(t, 1e-9) end
    return step
end

local cools = { 0.01, 0.02, 0.03, 0.05 }
local keeps = { 0.5, 0.6, 0.7, 0.8, 0.9 }

--- The same for steps that follow each other ({ at, seconds, ... }, in order): how weights get cold is found too.
--- use(s): whether a step counts.
function M.fit_run(run, points, use)
    local best, least
    for _, cool in ipairs(cools) do
        for _, keep in ipairs(keeps) do
            M.chill(run, cool, keep)
            local samples, sum = {}, 0
            for _, s in ipairs(run) do
                if use(s) then samples[#samples + 1] = s end
            end
            local step, err = M.fit(samples, points)
            if not step then return nil, err end
            for _, s in ipairs(samples) do
                sum = sum + math.min(0.3, math.abs(M.seconds(step, s) / s.seconds - 1))
            end
            if not least or sum < least then
                best, least = step, sum
                step.narrow_rows, step.cool_seconds, step.cold_keep = M.narrow_rows, cool, keep
            end
        end
    end
    M.chill(run, best.cool_seconds, best.cold_keep)
    return best
end

--- { mean_abs, p90, n } relative errors of a model on samples.
function M.error(step, samples)
    local list, sum = {}, 0
    for i, s in ipairs(samples) do
        list[i] = math.abs(M.seconds(step, s) - s.seconds) / s.seconds
        sum = sum + list[i]
    end
    table.sort(list)
    return { mean_abs = sum / math.max(1, #list), p90 = list[math.max(1, math.ceil(0.9 * #list))] or 0, n = #list }
end

return M
