--- How long the simulator takes for a day of requests on many replicas, and how that grows with their number.
---
---   llmrun tests/bench/simulate_scale.lua [REQUESTS [REPLICAS [POLICY]]]
---
--- Requests come at random over 86400 s (prompts of 100 to 1999 tokens, outputs of 10 to 399, two tenants), one after
--- the other from a function. Prints the wall time, processor time and peak memory.

local core = require "llmrun.core"
local simulate = require "llmrun.simulate"

local n = math.tointeger(tonumber(arg[1] or 1000000))
local replicas = math.tointeger(tonumber(arg[2] or 100))
local x, i, at = 1, 0, 0

local function random()
    x = (x * 1103515245 + 12345) % 2147483648
    return (x // 65536) / 32768
end

local function rows()
    i = i + 1
    if i > n then return nil end
    at = at - 86400 / n * math.log(1 - random())
    return {
        at = at, prompt = 100 + math.floor(1900 * random()), output = 10 + math.floor(390 * random()),
        tenant = random() < 0.3 and "a" or "b",
    }
end

local begin = os.clock()
local r = simulate.run { trace = rows, profile = "h100-8b", replicas = replicas, policy = arg[3] }
local _, peak = core.memory()
print(("%d requests, %d replicas, policy %s: %.1f s wall, %.1f s of processor time, %.0f MB; %d steps")
    :format(r.finished, replicas, r.policy, r.wall, os.clock() - begin, peak / 1e6, r.steps))
print(("%.1f us of processor time a request"):format(1e6 * (os.clock() - begin) / n))
print(("TTFT %.1f ms, TPOT %.2f ms, busy %.1f %%"):format(1e3 * r.ttft.mean, 1e3 * r.tpot.mean, 100 * r.busy))
