--- The profiles of GPUs against the throughputs that they were fitted to: TensorRT-LLM's performance overview
--- (docs/source/performance/perf-overview.md at commit 00f3768), output tokens a second under maximum load.
---
---   llmrun tests/bench/simulate_published.lua [SHARE]     SHARE of the requests that were sent there (0.2)

local simulate = require "llmrun.simulate"

local lengths = { { 128, 128, 30000 }, { 128, 2048, 3000 }, { 128, 4096, 1500 }, { 500, 2000, 3000 },
    { 1000, 1000, 3000 }, { 1000, 2000, 1500 }, { 2048, 128, 3000 }, { 2048, 2048, 1500 }, { 5000, 500, 1500 },
    { 20000, 2000, 1000 } }
local published = {
    { "h200-8b", 1, { 27911, 26221, 18027, 20770, 17744, 16828, 3538, 12194, 3902, 1804 } },
    { "h100-8b", 1, { 28312, 22714, 14325, 17660, 15220, 13899, 3450, 9305, 3459, 1351 } },
    { "h200-70b", 1, { 3803, 4336, 2872, 3666, 2909, 2994, 442, 2003, 566, 283 } },
    { "h100-70b", 2, { 6378, 6651, 4199, 5222, 4205, 4146, 762, 3082, 898, 437 } },
}

local share = tonumber(arg[1] or 0.2)
for _, p in ipairs(published) do
    local text, sum = {}, 0
    for i, l in ipairs(lengths) do
        local n, k = math.max(64, math.floor(l[3] * share)), 0
        local r = simulate.run {
            trace = function()
                k = k + 1
                return k <= n and { at = 0, prompt = l[1], output = l[2] } or nil
            end,
            profile = p[1], tp = p[2],
        }
        local e = r.tokens_per_s / p[3][i] - 1
        sum = sum + math.abs(e)
        text[i] = ("%d/%d %.0f (%.0f) %+.0f %%"):format(l[1], l[2], r.tokens_per_s, p[3][i], 100 * e)
    end
    print(("%s, tp %d: mean error %.1f %%"):format(p[1], p[2], 100 * sum / #lengths))
    print("  " .. table.concat(text, ", "))
end
