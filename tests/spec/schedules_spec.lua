-- Hundreds of random schedules on small models with real kernels: whatever the batch, the chunks, the block size, the
-- number of threads, the prefix cache, the policy, preemption by recompute and by swap, forks and cancellations, what a
-- request draws, and its log-probabilities, are to the last bit what they are when it runs alone.
local gguf = require "llmrun.testing.gguf"
local llm = require "llmrun"
local shared = dofile "tests/spec/policy_lab.lua"

local sanitized = os.getenv "LLMRUN_TEST_SANITIZE" ~= nil
local ROUNDS = sanitized and 12 or 125 -- of each model

local greedy = { { "temperature", 0 } }
local drawn = { { "temperature", 0.9 }, { "top_k", 40 }, { "top_p", 0.95 } }

-- Prompts of two families that begin alike, and some of their own; every other one is greedy.
local function make_requests()
    local random = shared.generator(7)
    local list = {}
    for i = 1, 16 do
        local ids, own = {}, 2 + random(30)
        for k = 1, i % 3 * 22 do ids[k] = (k * 37 + i % 3 * 91) % 256 end
        for _ = 1, own do ids[#ids + 1] = random(256) - 1 end
        list[i] = {
            prompt = ids, output = 4 + random(12), stages = i % 2 == 0 and greedy or drawn, seed = i, priority = i % 4,
            tenant = "t" .. i % 3, deadline = i % 5 * 0.01,
        }
    end
    return list
end

local REQUESTS = make_requests()

local function start(engine, q, seq)
    if not seq then
        seq = assert(engine:seq())
        assert(seq:append(q.prompt))
    end
    return assert(engine:request(seq, {
        max_tokens = q.output, ignore_eos = true, n_top = 0, stages = q.stages, seed = q.seed, priority = q.priority,
        tenant = q.tenant, deadline = engine:now() + q.deadline,
    })), seq
end

local function what_came(r)
    local line = {}
    for k, t in ipairs(r:logprobs()) do line[k] = ("%d:%a"):format(t.id, t.logprob) end
    return line
end

-- Alone, one after the other, without a prefix cache.
local function alone(path, kv_type)
    local m <close> = llm.load(path, { threads = 2, kv = { type = kv_type, blocks = 64, prefix_cache = false } })
    local out = {}
    for i, q in ipairs(REQUESTS) do
        local r, seq = start(m.engine, q)
        while m.engine:busy() > 0 do assert(m.engine:step()) end
        while m.engine:next_event() do end
        assert.equal("done", r:info().state, r:info().error)
        out[i] = what_came(r)
        seq:close()
    end
    return out
end

local function pick(random, list) return list[random(#list)] end

local POLICIES = { "default", "fcfs", "priority", "shortest_first", "longest_prefix", "deadline", "fair", "mlfq" }

-- A schedule of its own for each number; what it met is added to seen.
local function one_schedule(path, kv_type, expected, number, seen)
    local random = shared.generator(number)
    local block = pick(random, { 1, 2, 3, 16 })
    local o = {
        threads = random(2), chunk = pick(random, { 1, 3, 7, 16, 64 }), max_batch_tokens = pick(random, { 8, 24, 96 }),
        max_seqs = random(7) + 1, preempt = pick(random, { "recompute", "swap" }), ctx = 128,
        swap_bytes = random(4) == 1 and 3000 or nil,
        kv = { type = kv_type, block_size = block, blocks = (100 + random(120)) // block, prefix_cache = random(3) > 1 },
    }
    local m <close> = llm.load(path, o)
    local engine, policy = m.engine, pick(random, POLICIES)
    m:use(policy)
    local which, active = {}, {}
    for i = 1, 6 + random(6) do which[i] = random(number % 2 == 0 and #REQUESTS or 5) end
    local at, steps, forks = 1, 0, {}
    while at <= #which or #active > 0 do
        while at <= #which and random(3) == 1 do
            local i = which[at]
            local fork = forks[i] and random(2) == 1 and assert(forks[i]:fork()) or nil
            local r, seq = start(engine, REQUESTS[i], fork)
            active[#active + 1] = { r = r, seq = seq, i = i }
            at = at + 1
        end
        local some = active[1] and active[random(#active)]
        if some and not forks[some.i] and random(3) == 1 then -- in the middle of whatever it does
            forks[some.i] = assert(some.seq:fork())
            assert(forks[some.i]:truncate(#REQUESTS[some.i].prompt))
        end
        if random(40) == 1 and active[1] then active[random(#active)].r:cancel() end
        assert(engine:step())
        while engine:next_event() do end
        steps = steps + 1
        assert(steps < 20000, "no end")
        for k = #active, 1, -1 do
            local a = active[k]
            if not a.r:active() then
                local info, have, want = a.r:info(), what_came(a.r), expected[a.i]
                local text = ("schedule %d, request %d, policy %s"):format(number, a.i, policy)
                if info.state ~= "cancelled" then
                    assert.equal("done", info.state, text .. ": " .. tostring(info.error))
                    assert.equal(#want, #have, text)
                    seen.done = seen.done + 1
                end
                for j = 1, #have do
                    if have[j] ~= want[j] then error(("%s: token %d is %s, not %s"):format(text, j, have[j], want[j])) end
                end
                a.seq:close()
                table.remove(active, k)
            end
        end
    end
    for _, s in pairs(forks) do s:close() end
    assert(engine:check())
    local t = m:metrics()
    for _, key in ipairs { "preempt_recompute", "preempt_swap", "swap_in", "prefix_hits", "prefix_joined" } do
        seen[key] = (seen[key] or 0) + t[key]
    end
    m:drop_cached()
    local kv = m:stats().kv
    for g = 1, #kv do assert.equal(kv[g].total, kv[g].free) end
end

-- Six experts instead of each dense feed-forward, three of them used; weights in blocks, as real models have them.
local function with_experts(keys, tensors)
    keys[#keys + 1] = { "llama.expert_count", gguf.u32(6) }
    keys[#keys + 1] = { "llama.expert_used_count", gguf.u32(3) }
    for i = 1, #tensors do
        local t = tensors[i]
        local b, part = t[1]:match("^(blk%.%d+%.)ffn_(%a+)%.weight$")
        if part == "gate" then tensors[#tensors + 1] = { b .. "ffn_gate_inp.weight", { 64, 6 }, gguf.random(384, i, 1) } end
        if part and part ~= "norm" then
            local type = part == "up" and 39 or 8
            t[1], t[2], t[4] = b .. "ffn_" .. part .. "_exps.weight", { t[2][1], t[2][2], 6 }, type
            t[3] = gguf.blocks(type, 64 * 96 * 6, i, type == 8 and -9 or -5)
        end
    end
end

describe("any schedule gives the same tokens", function()
    for _, case in ipairs {
        { name = "full attention, f16" },
        { name = "sliding windows, f16", window = 24 },
        { name = "full attention, q8_0", kv_type = "q8_0", rounds = 0.4 },
        { name = "experts", experts = true, rounds = 0.4 },
    } do
        it("with " .. case.name, function()
            local path = os.tmpname()
            gguf.tiny(path, function(keys, tensors)
                tensors.of["token_embd.weight"][3] = gguf.random(64 * 256, 5, 0.1) -- it is the output too: not too sure
                if case.experts then with_experts(keys, tensors) end
                if case.window then
                    keys[#keys + 1] = { "llama.attention.sliding_window", gguf.u32(case.window) }
                end
            end)
            local expected = alone(path, case.kv_type)
            local seen, rounds = { done = 0 }, math.ceil(ROUNDS * (case.rounds or 1))
            local ok, err = pcall(function()
                for k = 1, rounds do one_schedule(path, case.kv_type, expected, k, seen) end
            end)
            os.remove(path)
            assert(ok, err)
            assert.is_true(seen.done > 5 * rounds, seen.done)
            for key, n in pairs(seen) do assert.is_true(n > 0 or rounds < 40, key) end
        end)
    end
end)
