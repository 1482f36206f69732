-- A scheduling policy of our own: nobody's burst of work keeps the others waiting.
--
--   llmrun examples/policy.lua [MODEL [PLOT.svg]]
--
-- One tenant ("batch") sends twelve requests at once, another ("chat") three right after. First come, first served lets
-- chat wait for all of batch; the policy below takes tenants in turn. Both are run; a table shows the time to the first
-- token, and a plot is written (policy.svg).
--
-- test-args: {smollm2} build/policy.svg
-- test-expect: fcfs +batch +%d+%.%d+
-- test-expect: in%-turn +chat +%d+%.%d+
-- test-expect: chat gets its first token %d+%.%d times sooner
-- test-expect: the answers are the same
-- test-expect: policy%.svg

local llm = require "llmrun"
local plot = require "llmrun.plot"

local in_turn = {
    name = "in-turn",
    schedule = function(_, step)
        local count = {} -- of each tenant's requests: the n-th of one goes before the n+1-th of another
        local function turn(r)
            count[r.tenant] = (count[r.tenant] or 0) + 1
            return count[r.tenant]
        end
        for _, r in ipairs(step.running) do turn(r) end
        step:serve(step:sorted(step.waiting, turn)) -- equals stay in order of arrival
    end,
}

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 512, max_seqs = 3 })

local jobs = {}
for i = 1, 12 do jobs[i] = { tenant = "batch", text = ("Tell me fact number %d about the sea."):format(i) } end
for i = 13, 15 do jobs[i] = { tenant = "chat", text = ("Say hello in %d words."):format(i - 10) } end

local function run(policy)
    model:use(policy)
    model:drop_cached()
    return llm.map(jobs, function(job)
        local s <close> = model:session()
        s:user(job.text)
        return s:gen { tenant = job.tenant, temperature = 0, max_tokens = 24, ignore_eos = true }
    end)
end

local function mean(results, tenant)
    local sum, n = 0, 0
    for i, job in ipairs(jobs) do
        if job.tenant == tenant then sum, n = sum + results[i].timing.first_token, n + 1 end
    end
    return sum / n
end

local results, series = {}, {}
print(("%-14s %-8s %s"):format("policy", "tenant", "seconds to the first token, mean"))
for _, policy in ipairs { "fcfs", in_turn } do
    local name = policy.name or policy
    local r = run(policy)
    results[name] = r
    local line = { name = name, kind = "points", x = {}, y = {} }
    for i = 1, #jobs do line.x[i], line.y[i] = i, r[i].timing.first_token end
    series[#series + 1] = line
    for _, tenant in ipairs { "batch", "chat" } do print(("%-14s %-8s %6.2f"):format(name, tenant, mean(r, tenant))) end
end

local before, after = mean(results.fcfs, "chat"), mean(results["in-turn"], "chat")
print(("\nchat gets its first token %.1f times sooner"):format(before / after))
for i = 1, #jobs do assert(results.fcfs[i].text == results["in-turn"][i].text) end
print("the answers are the same")

local path = arg[2] or "policy.svg"
assert(plot.save(path, {
    title = "A burst of 12 batch requests, then 3 of chat",
    x = { label = "request, in order of arrival (chat: 13 to 15)" },
    y = { label = "seconds to the first token", min = 0 },
    series = series,
}))
print("written: " .. path)
