--- What a policy in Lua costs: the fcfs policy against the engine's built-in rule, at 64 running and 256 waiting
--- requests.
---
---   llmrun tests/bench/policy_cost.lua [--policy NAME] [--model FILE] [--steps N]
---
--- Prints JSON lines. hook_us: time of all hooks of a step, engine work that they ask for included; overhead_us: how
--- much longer a step takes than with the built-in rule. Segments of both are run in turn, so that a busy machine
--- hurts both alike, and the medians are taken. "steady": 64 decode and 256 wait; "churn": short requests that come
--- and go. With --model the share of a real step (64 sequences decoding) that the overhead is.

local llm = require "llmrun"
local json = require "cjson"

local RUNNING, WAITING = 64, 256
local opts = { policy = "fcfs", steps = 40, segments = 16 }
for i = 1, #arg, 2 do opts[arg[i]:gsub("^%-%-", "")] = tonumber(arg[i + 1]) or arg[i + 1] end

local function median(list)
    table.sort(list)
    return list[#list // 2 + 1]
end

local function scripted()
    return llm.scripted {
        vocab = "bytes", ctx = 8192, max_seqs = RUNNING, next = function() return 65 end,
        kv = { blocks = 40000, prefix_cache = false },
    }
end

--- Requests of so many tokens on sequences of their own, so that 64 run and 256 wait.
local function fill(engine, requests, max_tokens)
    while engine:busy() < RUNNING + WAITING do
        local seq = engine:seq()
        assert(seq:append { 70, 71, 72, 73, 74, 75, 76, 77 + #requests % 16 })
        requests[#requests + 1] = assert(engine:request(seq, { max_tokens = max_tokens, ignore_eos = true }))
    end
end

--- Runs n steps; seconds of processor time a step, seconds of hooks a step.
local function run(engine, requests, n, refill)
    local before = engine:metrics().hook
    local clock = os.clock()
    for _ = 1, n do
        if refill then fill(engine, requests, refill) end
        assert(engine:step())
        while engine:next_event() do end
    end
    local seconds = os.clock() - clock
    local after = engine:metrics().hook
    return seconds / n, after.n > before.n and (after.sum - before.sum) / (after.n - before.n) or 0
end

--- Both ways in turn on one engine.
local function compare(name, model, max_tokens, refill)
    local engine, requests = model.engine, {}
    local steps, hooks = { default = {}, lua = {} }, {}
    fill(engine, requests, max_tokens)
    run(engine, requests, 5, refill)
    for i = 1, opts.segments do
        -- steps of the scripted model get longer as its sequences do: neither way is always the later one
        for _, way in ipairs(i % 2 == 0 and { "default", "lua" } or { "lua", "default" }) do
            model:use(way == "lua" and opts.policy or nil)
            local step, hook = run(engine, requests, opts.steps, refill)
            table.insert(steps[way], step)
            if way == "lua" then hooks[#hooks + 1] = hook end
        end
    end
    local info = engine:info()
    local default, lua = median(steps.default), median(steps.lua)
    local overhead = lua - default
    print(json.encode {
        case = name, policy = opts.policy, running = info.running, waiting = info.waiting,
        hook_us = tonumber(("%.1f"):format(median(hooks) * 1e6)), step_us = tonumber(("%.1f"):format(default * 1e6)),
        overhead_us = tonumber(("%.1f"):format(overhead * 1e6)),
        failures = engine:metrics().policy_failed,
    })
    model:close()
    return overhead
end

local overhead = compare("steady", scripted(), 8000)
compare("churn", scripted(), 8, 8)

if opts.model then
    local model = llm.load(opts.model, { max_seqs = RUNNING, policy = opts.policy })
    local requests = {}
    fill(model.engine, requests, 100)
    run(model.engine, requests, 3)
    local step, hook = run(model.engine, requests, 10)
    print(json.encode {
        case = "model", policy = opts.policy, model = model.info.name, step_ms = step * 1e3, hook_us = hook * 1e6,
        overhead_percent = 100 * overhead / step,
    })
end
