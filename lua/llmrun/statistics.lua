--- Quantiles, and means with confidence intervals, of runs that differ in nothing but their seed.

local M = {}

-- two-sided 95 % points of Student's t for 1 to 30 degrees of freedom
local t_points = {
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
}

--- The value below which the part q of a sorted list lies, interpolated.
---@param sorted number[] one value at least
---@param q number 0 to 1
---@return number
function M.quantile(sorted, q)
    local at = 1 + q * (#sorted - 1)
    local low = math.floor(at)
    local high = math.min(low + 1, #sorted)
    return sorted[low] + (sorted[high] - sorted[low]) * (at - low)
end

--- The two-sided 95 % point of Student's t.
---@param freedom integer degrees of freedom, 1 or more
---@return number
function M.t95(freedom)
    if t_points[freedom] then return t_points[freedom] end
    local z, v = 1.959964, freedom -- the first terms of its series around the normal distribution's
    return z + (z ^ 3 + z) / (4 * v) + (5 * z ^ 5 + 16 * z ^ 3 + 3 * z) / (96 * v * v)
end

--- { mean, half (of the 95 % interval of the mean by Student's t; nil of a single value), n, low, high (least and most
--- of the values) } of a list; nil of an empty one.
---@param values number[]
---@return { mean: number, half: number?, n: integer, low: number, high: number }?
function M.interval(values)
    local n, sum, square = #values, 0, 0
    if n == 0 then return nil end
    local low, high = values[1], values[1]
    for _, v in ipairs(values) do
        sum, low, high = sum + v, math.min(low, v), math.max(high, v)
    end
    local mean = sum / n
    for _, v in ipairs(values) do square = square + (v - mean) ^ 2 end
    local half = n > 1 and M.t95(n - 1) * math.sqrt(square / (n - 1) / n) or nil
    return { mean = mean, half = half, n = n, low = low, high = high }
end

--- The interval of the differences b - a of two lists in pairs; pairs of which one is missing (nil) are left out.
---@param a table<integer, number>
---@param b table<integer, number>
---@param n integer the number of pairs
---@return table?
function M.paired(a, b, n)
    local list = {}
    for i = 1, n do
        if a[i] and b[i] then list[#list + 1] = b[i] - a[i] end
    end
    return M.interval(list)
end

return M
