-- The engine on a real model: whatever the schedule, a request's tokens and their log-probabilities are the same to the
-- last bit. And the spill file, on a scripted model.
local llm = require "llmrun"
local shared = dofile "tests/spec/policy_lab.lua"

local MODEL = "smollm2"

local function ids(n, salt)
    local t, x = {}, salt
    for i = 1, n do
        x = (x * 1103515245 + 12345) % 2147483648
        t[i] = 300 + x // 64 % 20000
    end
    return t
end

local function joined(a, b)
    return table.move(b, 1, #b, #a + 1, table.move(a, 1, #a, 1, {}))
end

-- Two share 33 tokens, two are the same prompt with other seeds; half are greedy.
local PREFIX = ids(33, 1)
local greedy = { { "temperature", 0 } }
local random = { { "temperature", 0.9 }, { "top_k", 40 }, { "top_p", 0.95 } }
local REQUESTS = {
    { prompt = ids(5, 2), stages = greedy, seed = 0 },
    { prompt = joined(PREFIX, ids(9, 3)), stages = greedy, seed = 0 },
    { prompt = joined(PREFIX, ids(20, 4)), stages = random, seed = 11 },
    { prompt = ids(40, 5), stages = random, seed = 12 },
    { prompt = ids(40, 5), stages = random, seed = 13 },
    { prompt = ids(1, 6), stages = random, seed = 14 },
}
local OUTPUT = 8

local function start(engine, q)
    local seq = assert(engine:seq())
    assert(seq:append(q.prompt))
    return assert(engine:request(seq, {
        max_tokens = OUTPUT, ignore_eos = true, n_top = 0, stages = q.stages, seed = q.seed,
    })), seq
end

-- Steps until all are done; what each drew, log-probabilities to the last bit.
local function finish(engine, requests)
    while engine:busy() > 0 do
        assert(engine:step())
        while engine:next_event() do end
    end
    assert(engine:check())
    local out = {}
    for i, r in ipairs(requests) do
        local info = r:info()
        assert.equal("done", info.state, info.error)
        local line = {}
        for k, t in ipairs(r:logprobs()) do line[k] = ("%d:%a"):format(t.id, t.logprob) end
        assert.equal(OUTPUT, #line)
        out[i] = table.concat(line, " ")
        r:close()
    end
    return out
end

local function alone(engine)
    local out = {}
    for i, q in ipairs(REQUESTS) do
        local r, seq = start(engine, q)
        out[i] = finish(engine, { r })[1]
        seq:close()
    end
    return out
end

-- All at once; those of `late` join after so many steps.
local function together(engine, late)
    local requests, seqs = {}, {}
    for i, q in ipairs(REQUESTS) do
        requests[i], seqs[i] = start(engine, q)
        for _ = 1, late and i % 3 or 0 do engine:step() end
    end
    local out = finish(engine, requests)
    for _, s in ipairs(seqs) do s:close() end
    return out
end

local sanitized = os.getenv "LLMRUN_TEST_SANITIZE" == "1" -- some ten times slower

local function load(o)
    o.ctx = o.ctx or 128
    return llm.load(MODEL, o)
end

describe("the same tokens on a real model", function()
    local expected

    setup(function()
        local m <close> = load { threads = 2, kv = { prefix_cache = false, blocks = 64 } }
        expected = alone(m.engine)
        assert.not_equal(expected[4], expected[5])
        assert.equal(0, m:metrics().prefix_hits)
    end)

    local function each_chunk(kv, threads)
        for _, chunk in ipairs(sanitized and { 7 } or { 1, 7, 64 }) do
            local m <close> = load { threads = threads, chunk = chunk, kv = kv }
            assert.same(expected, together(m.engine, chunk == 7))
        end
    end

    it("with one thread, alone", function()
        local m <close> = load { threads = 1, kv = { prefix_cache = false, blocks = 64 } }
        assert.same(expected, alone(m.engine))
    end)

    it("in a batch without prefix cache, prompts in chunks of 1, 7 and 64", function()
        each_chunk({ prefix_cache = false, blocks = 64 })
    end)

    -- Q4_K and Q6_K behind a GLU: threads complete blocks of 256 columns together. Too slow under sanitizers.
    if not sanitized then
        it("with weights of super-blocks, on 1 and 3 threads", function()
            local got = {}
            for _, threads in ipairs { 1, 3 } do
                local m <close> = llm.load("qwen-0.5b", { ctx = 128, threads = threads,
                    kv = { prefix_cache = false, blocks = 64 } })
                got[threads] = together(m.engine)
                if threads == 3 then assert.same(got[3], alone(m.engine)) end
            end
            assert.same(got[1], got[3])
        end)
    end

    it("with blocks of 1 and 3 tokens", function()
        each_chunk({ block_size = 3, blocks = 256 }, 1)
        local m <close> = load { chunk = 7, kv = { block_size = 1, blocks = 512 } }
        assert.same(expected, together(m.engine))
    end)

    it("from the prefix cache", function()
        for _, block in ipairs { 3, 16 } do
            local m <close> = load { kv = { block_size = block, blocks = 512 // block } }
            assert.same(expected, together(m.engine))
            local before = m:metrics().prefix_hits
            assert.same(expected, together(m.engine, true))
            assert.same(expected, alone(m.engine))
            assert.is_true(m:metrics().prefix_hits - before > 2 * 100)
        end
    end)

    for _, way in ipairs { "recompute", "swap" } do
        it("after preemption by " .. way, function()
            for _, block in ipairs { 3, 16 } do
                for _, cache in ipairs { true, false } do
                    local m <close> = load {
                        chunk = 16, preempt = way, ctx = 64,
                        kv = { block_size = block, blocks = 128 // block, prefix_cache = cache },
                    }
                    assert.same(expected, together(m.engine))
                    local t = m:metrics()
                    assert.is_true(t["preempt_" .. way] > 0, ("no %s, block %d, cache %s"):format(way, block, cache))
                    -- with a cache it may have kept more than what was swapped out
                    if way == "swap" and not cache then assert.is_true(t.swap_in > 0) end
                    assert.equal(0, m:stats().swapped)
                end
            end
        end)
    end

    it("with keys and values in q8_0", function()
        local first
        for _, o in ipairs { { chunk = 64 }, { chunk = 7, threads = 1 } } do
            o.kv = { type = "q8_0", block_size = 3, blocks = 256 }
            local m <close> = load(o)
            first = first or alone(m.engine)
            assert.same(first, together(m.engine))
        end
    end)
end)

describe("a sliding window and a reused prefix", function()
    -- Lengths around the window of gemma-3-270m: cold in one piece without a cache, then from the cache, after other
    -- prompts, in chunks of 7, and as the beginning of the next prompt. Logits of the last row to the last bit.
    local function last_row(engine, prompt)
        local seq <close> = assert(engine:seq())
        assert(seq:append(prompt))
        local r <close> = assert(engine:request(seq, {
            max_tokens = 8, ignore_eos = true, n_top = 5, stages = { { "temperature", 0 } },
        }))
        while engine:busy() > 0 do assert(engine:step()) end
        while engine:next_event() do end
        assert.equal("done", r:info().state, r:info().error)
        local out = {}
        for i, t in ipairs(r:logprobs()) do
            out[i] = ("%d:%a"):format(t.id, t.logprob)
            for _, o in ipairs(t.top) do out[i] = out[i] .. (" %d:%a"):format(o.id, o.logprob) end
        end
        return table.concat(out, "\n"), r:tokens(), r:info().n_cached
    end

    -- Twenty other prompts, in one batch.
    local function others(engine, salt)
        for k = 1, 20 do
            local seq = assert(engine:seq())
            assert(seq:append(ids(20 + k, 1000 * salt + k)))
            assert(engine:request(seq, { max_tokens = 1, free_seq = true }))
        end
        while engine:busy() > 0 do assert(engine:step()) end
        while engine:next_event() do end
    end

    it("give what a cache of full length gives #slow", function()
        local cold <close> = llm.load("gemma3", {
            ctx = 1100, max_batch_tokens = 1100, kv = { blocks = 80, prefix_cache = false },
        })
        local warm <close> = llm.load("gemma3", { ctx = 1100, kv = { blocks = { 250, 150 } } })
        local chunks <close> = llm.load("gemma3", { ctx = 1100, chunk = 7, kv = { blocks = 100, block_size = 16 } })
        local w = warm.info.windows[2]
        assert.equal(512, w)
        local lengths = { w - 1, w, w + 1, 2 * w + 1 } -- more of them: test_engine_load.c
        if os.getenv "LLMRUN_TEST_SANITIZE" then lengths = { w + 1 } end -- some ten times slower
        for i, n in ipairs(lengths) do
            local prompt = ids(n, 100 + i)
            local expected, answer = last_row(cold.engine, prompt)
            assert.equal(expected, (last_row(warm.engine, prompt)))
            local again, _, cached = last_row(warm.engine, prompt)
            assert.equal(expected, again)
            assert.is_true(cached >= n - 17, cached)
            others(warm.engine, i)
            assert.equal(expected, (last_row(warm.engine, prompt)))
            if n == w + 1 then assert.equal(expected, (last_row(chunks.engine, prompt))) end
            if i % 2 == 0 then
                local longer = joined(prompt, answer)
                assert.equal((last_row(cold.engine, longer)), (last_row(warm.engine, longer)))
            end
            assert(warm.engine:check())
        end
    end)
end)

describe("metrics", function()
    it("are there under the names that dashboards know, and in Lua", function()
        local l = shared.lab { kv = { block_size = 4, blocks = 60 } }
        l.model:use { name = "mine", token = function() end }
        for i = 1, 6 do l.submit(20 + i, { max_tokens = 5 }) end
        l.finish()
        local text, types = l.model:prometheus(), {}
        for name, kind in text:gmatch("# TYPE llmrun:(%S+) (%S+)") do types[name] = kind end
        for kind, names in pairs {
            histogram = [[time_to_first_token_seconds request_time_per_output_token_seconds inter_token_latency_seconds
                request_queue_time_seconds e2e_request_latency_seconds request_prompt_tokens request_generation_tokens
                iteration_tokens_total step_time_seconds results_time_seconds hook_time_seconds]],
            gauge = "num_requests_running num_requests_waiting kv_cache_usage_perc kv_blocks_free kv_slots_unused",
            counter = [[prompt_tokens_total generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total
                prefix_cache_joined_tokens_total num_preemptions_total preemptions_swap_total kv_evictions_total
                request_success_total policy_errors_total policy_refusals_total]],
        } do
            for name in names:gmatch("%S+") do assert.equal(kind, types[name], name) end
        end
        assert.matches('llmrun:e2e_request_latency_seconds_count{model_name="[^"]+"} 6\n', text)
        assert.matches('llmrun:request_success_total{model_name="[^"]+",finished_reason="length"} 6\n', text)
        for line in text:gmatch("[^\n]+") do
            assert.matches(line:sub(1, 1) == "#" and "^# %u+ llmrun:[%l_%d]+ %S" or
                "^llmrun:[%l_%d]+{[^}]+} [%d.e+-]+$", line)
        end
        local m = l.model:metrics()
        assert.equal(30, m.generation_tokens)
        assert.same({ 6, 24, 6 }, { m.ttft.n, m.itl.n, m.tpot.n })
        assert.is_true(m.hook.sum > 0 and m.hook.n == m.steps)
        assert.is_true(l.model:stats().slack <= 6 * 3)
    end)
end)

describe("kv.spill", function()
    local function stats(model) return model:stats().kv[1] end

    -- Prompts that together are four times the pool, three times over: every one has gone from memory when it comes
    -- again.
    local function rounds(kv)
        kv.blocks, kv.block_size = 12, 4
        local l = shared.lab { ctx = 48, kv = kv }
        local cached = 0
        for _ = 1, 3 do
            for i = 1, 6 do
                local prompt = {}
                for k = 1, 32 do prompt[k] = (k * 7 + i * 31) % 190 end
                local r, seq = assert(l.submit(prompt, { max_tokens = 4 }))
                l.finish()
                assert.same(shared.reference(prompt, 4), r:tokens())
                cached = cached + r:info().n_cached
                seq:close()
            end
        end
        return l, cached
    end

    it("brings evicted blocks back", function()
        local l, cached = rounds { spill = "/tmp" }
        local s = stats(l.model)
        assert.is_true(s.spill_out > 0 and s.spill_in >= 2 * 6 * 7, s.spill_in .. " blocks came back")
        assert.is_true(cached >= 2 * 6 * 28, cached .. " tokens were cached")
        assert.matches("kv_spill_in_total", l.model:prometheus())
        l.model:close()
        local without, few = rounds {}
        assert.equal(0, stats(without.model).spill_out)
        assert.is_true(few < cached // 4, few .. " tokens were cached without a file")
        without.model:close()
    end)

    it("refuses a path it can't use and options it does not know", function()
        local function fails(text, kv)
            local ok, err = pcall(shared.lab, { kv = kv })
            assert.is_false(ok)
            assert.matches(text, tostring(err), 1, true)
        end
        fails("/nonexistent/x", { spill = "/nonexistent/x" })
        fails("spill_bytes", { spill = "/tmp", spill_bytes = -1 })
        fails("spil", { spil = "/tmp" })
    end)
end)
