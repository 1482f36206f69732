-- A policy lab: fair share and earliest deadline first against first come, first served, on a fleet that is not there.
--
--   llmrun examples/policy_lab.lua [REPORT.html]
--
-- One H100 with a 70B model, simulated: 8 requests at a time. The tenant "batch" starts agents in bursts, each with
-- many calls of tools on a growing history; "live" are a few agents whose users wait, with short deadlines. Scheduler,
-- KV blocks, prefix cache and policies are the engine's own; only the forward pass is a cost model. Three loads and
-- four seeds, in processes side by side; the report (policy_lab.html) is one page with plots and intervals.
--
-- test-args: build/policy_lab.html
-- test-expect: TTFT p99 at load 1, s +live +batch
-- test-expect: fcfs +%d+%.%d+ ± +%d
-- test-expect: fair +%d+%.%d+ ± +%d
-- test-expect: deadline +%d+%.%d+ ± +%d
-- test-expect: live agents wait %d+%.%d times less under fair, %d+%.%d under deadline
-- test-expect: written: build/policy_lab%.html

local page = require "llmrun.sweep.page"
local report = require "llmrun.report"
local statistics = require "llmrun.statistics"
local sweep = require "llmrun.sweep"

local policies = { "fcfs", "fair", "deadline" }
local loads = { 0.25, 0.5, 1 }

local result = sweep.run {
    policies = policies, loads = loads, seeds = 4, profile = "h100-70b",
    trace = "agents:rate=20,shape=0.1,tool=0.5,result=600,requests=160,tenant=batch,deadline=60..300"
        .. "+agents:rate=4,steps=4,tool=1,requests=32,tenant=live,deadline=2..6",
    engine = { max_seqs = 8 }, slo = { ttft = 2, tpot = 0.05 },
}
assert(result.failed == 0, sweep.text(result))

-- The 99th percentile of a tenant's times to the first token at the highest load, over the seeds.
local function tail(p, tenant)
    local values = {}
    for seed = 1, 4 do values[seed] = result.at(p, #loads, seed).value.tenants[tenant].ttft.p99 end
    return statistics.interval(values)
end

print(("%-26s %16s %16s"):format("TTFT p99 at load 1, s", "live", "batch"))
for p, name in ipairs(policies) do
    local live, batch = tail(p, "live"), tail(p, "batch")
    print(("%-26s %8.2f ± %5.2f %8.2f ± %5.2f"):format(name, live.mean, live.half, batch.mean, batch.half))
end
local slow = tail(1, "live").mean
print(("live agents wait %.1f times less under fair, %.1f under deadline"):format(slow / tail(2, "live").mean,
    slow / tail(3, "live").mean))

local path = arg[1] or "policy_lab.html"
assert(report.save(path, page.html(result, { title = "Agents in bursts: fair share and deadlines against arrival" })))
print("written: " .. path)
