--- Throughput of a real model under a policy in Lua against the built-in rule, at 64 sequences decoding and 256
--- waiting.
---
---   llmrun tests/bench/policy_throughput.lua [--policy NAME] [--model NAME] [--steps N] [--pairs N]
---
--- Both ways take turns on one engine, so many steps each, and which comes first changes from pair to pair: a busy
--- machine and growing sequences hurt both alike. Prints one JSON line: tokens/s of both (wall clock, medians), and how
--- much slower the policy is, as the median over the pairs, by the wall clock and by processor time, and its
--- standard error; hook_us is the time of all hooks of a step, measured inside, and hook_percent its share of a step:
--- on a noisy machine that is the figure to go by.

local core = require "llmrun.core"
local json = require "cjson"
local llm = require "llmrun"
local common = require "llmrun.cli.common"

local RUNNING, WAITING, PROMPT = 64, 256, 8
local opts = { policy = "fcfs", model = "smollm2", steps = 4, pairs = 30 }
for i = 1, #arg, 2 do opts[arg[i]:gsub("^%-%-", "")] = tonumber(arg[i + 1]) or arg[i + 1] end

local length = 2 * (opts.pairs + 2) * opts.steps + PROMPT
local model = llm.load(opts.model, {
    max_seqs = RUNNING, ctx = length + 64,
    kv = { blocks = (RUNNING + 1) * ((length + 64) // 16 + 2), prefix_cache = false },
})
local engine = model.engine
local requests = {}
for i = 1, RUNNING + WAITING do
    local seq, ids = assert(engine:seq()), {}
    for k = 1, PROMPT do ids[k] = 400 + k * 31 + i end
    assert(seq:append(ids))
    requests[i] = assert(engine:request(seq, { max_tokens = length, ignore_eos = true }))
end

local function segment(policy)
    model:use(policy)
    local clock, wall = os.clock(), core.now()
    for _ = 1, opts.steps do
        assert(engine:step() == RUNNING, "not all of them decode")
        while engine:next_event() do end
    end
    return core.now() - wall, os.clock() - clock
end

for _ = 1, 4 do
    assert(engine:step())
    while engine:next_event() do end
end
local hooks_before
local walls = { default = {}, lua = {} }
local slower = { wall = {}, cpu = {} }
for pair = 0, opts.pairs do
    local wall, cpu = {}, {}
    for _, way in ipairs(pair % 2 == 0 and { "default", "lua" } or { "lua", "default" }) do
        wall[way], cpu[way] = segment(way == "lua" and opts.policy or nil)
    end
    if pair == 0 then
        hooks_before = engine:metrics().hook
    else
        for way, seconds in pairs(wall) do table.insert(walls[way], seconds / opts.steps) end
        slower.wall[pair] = 100 * (wall.lua / wall.default - 1)
        slower.cpu[pair] = 100 * (cpu.lua / cpu.default - 1)
    end
end

local function show(x) return tonumber(("%.3f"):format(x)) end
local function median(list) return select(3, common.statistics(list)) end
local function error_of(list) return select(2, common.statistics(list)) / (#list) ^ 0.5 end
local hooks = engine:metrics().hook
local hook = (hooks.sum - hooks_before.sum) / (hooks.n - hooks_before.n)
local info = engine:info()
print(json.encode {
    policy = opts.policy, model = model.info.name, backend = model.info.backend, running = info.running,
    waiting = info.waiting, requests = #requests, tps_default = show(RUNNING / median(walls.default)),
    tps_policy = show(RUNNING / median(walls.lua)), slower_percent = show(median(slower.wall)),
    slower_percent_error = show(error_of(slower.wall)), slower_cpu_percent = show(median(slower.cpu)),
    slower_cpu_percent_error = show(error_of(slower.cpu)), hook_us = show(hook * 1e6),
    hook_percent = show(100 * hook / median(walls.default)), failures = engine:metrics().policy_failed,
})
model:close()
