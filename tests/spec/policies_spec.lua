-- The policies that come with llmrun, each by what it promises.
local shared = dofile "tests/spec/policy_lab.lua"
local lab, reference, generator = shared.lab, shared.reference, shared.generator

local function check_results(l)
    assert.equal(0, l.engine:metrics().policy_failed)
    for _, r in ipairs(l.requests) do
        local info = r:info()
        if info.state == "done" then assert.same(reference(l.prompts[r], info.n_generated), r:tokens()) end
    end
end

describe("fcfs", function()
    -- Everything that a step changes of every request, for a random load in a small pool.
    local function history(seed, use)
        local random = generator(seed)
        local l = lab {
            max_seqs = 2 + random(6), max_batch_tokens = 16 * random(12), chunk = 16 * random(8),
            preempt = random(2) == 1 and "swap" or "recompute",
            kv = { blocks = 30 + random(60), block_size = 4, prefix_cache = random(3) > 1 },
        }
        l.model:use(use)
        local out, left = {}, 60
        while left > 0 or l.engine:busy() > 0 do
            for _ = 1, random(4) - 2 do
                if left > 0 then
                    left = left - 1
                    l.submit(random(4) == 1 and 60 + random(40) or random(20), { max_tokens = random(16) })
                end
            end
            if random(12) == 1 and #l.requests > 0 then l.requests[random(#l.requests)]:cancel() end
            local line = { assert(l.engine:step()) }
            for _, r in ipairs(l.requests) do
                local i = r:info()
                line[#line + 1] = ("%s %d %d %d"):format(i.state, i.n_computed, i.n_generated, i.n_preempted)
            end
            out[#out + 1] = table.concat(line, ", ")
            assert(#out < 5000)
        end
        assert(l.engine:check())
        local m = l.engine:metrics()
        local preempted = m.preempt_recompute + m.preempt_swap
        l.model:close()
        return out, preempted
    end

    it("decides exactly as the built-in rule", function()
        local preempted = 0
        for seed = 1, 25 do
            local default, n = history(seed, nil)
            assert.same(default, (history(seed, "fcfs")))
            preempted = preempted + n
        end
        assert.is_true(preempted > 50, preempted .. " preemptions only")
    end)
end)

describe("priority", function()
    it("starts the urgent first, in order of arrival among equals", function()
        local l = lab { max_seqs = 1 }
        l.model:use("priority", { displace = false })
        for _, p in ipairs { 0, 5, -1, 5, 9 } do l.submit(4, { max_tokens = 3, priority = p }) end
        assert.same({ 5, 2, 4, 1, 3 }, l.order())
        check_results(l)
    end)

    it("lets the urgent take the place of those that run, but not of equals", function()
        local l = lab { max_seqs = 2 }
        l.model:use "priority"
        local low = l.submit(4, { max_tokens = 10, priority = 1 })
        local mid = l.submit(4, { max_tokens = 10, priority = 2 })
        l.step()
        l.submit(4, { max_tokens = 2, priority = 2 })
        l.step()
        assert.equal("waiting", low:info().state)
        local equal = l.submit(4, { max_tokens = 2, priority = 2 })
        l.step()
        assert.equal("running", mid:info().state)
        assert.equal("waiting", equal:info().state)
        assert.same({ 3, 4, 2, 1 }, l.order())
        assert.equal(1, low:info().n_preempted)
        assert.equal(0, mid:info().n_preempted)
        check_results(l)
    end)

    it("takes memory from the least urgent, not the youngest", function()
        local l = lab { kv = { blocks = 14, block_size = 4, prefix_cache = false } }
        l.model:use "priority"
        local low = l.submit(20, { max_tokens = 20, priority = 1 })
        local high = l.submit(20, { max_tokens = 20, priority = 2 })
        l.finish()
        assert.is_true(low:info().n_preempted > 0)
        assert.equal(0, high:info().n_preempted)
        check_results(l)
    end)
end)

describe("shortest_first", function()
    it("starts short prompts before long ones", function()
        local l = lab { max_seqs = 1 }
        l.model:use "shortest-first"
        for _, n in ipairs { 30, 10, 20, 5, 10 } do l.submit(n, { max_tokens = 2 }) end
        assert.same({ 4, 2, 5, 3, 1 }, l.order())
        check_results(l)
    end)

    it("counts waiting against length", function()
        local l = lab { max_seqs = 1 }
        l.model:use("shortest-first", { aging = 1e9 })
        l.submit(30, { max_tokens = 2 })
        local stop = os.clock() + 0.001
        while os.clock() < stop do end
        l.submit(5, { max_tokens = 2 })
        assert.same({ 1, 2 }, l.order())
    end)
end)

describe("longest_prefix", function()
    local function text(seed, n)
        local random, t = generator(seed), {}
        for i = 1, n do t[i] = random(190) end
        return t
    end
    local function with(base, n, seed)
        local t = table.move(base, 1, #base, 1, {})
        return table.move(text(seed, n), 1, n, #t + 1, t)
    end

    it("starts those first whose prompt is cached", function()
        local l = lab { max_seqs = 1, kv = { block_size = 4 } }
        l.model:use "longest-prefix"
        local base = text(1, 64)
        l.submit(base, { max_tokens = 1 })
        l.finish()
        l.requests = {}
        l.submit(text(2, 50), { max_tokens = 2 })
        l.submit(with({ table.unpack(base, 1, 40) }, 10, 3), { max_tokens = 2 })
        l.submit(with(base, 10, 4), { max_tokens = 2 })
        assert.same({ 3, 2, 1 }, l.order())
        check_results(l)
    end)

    it("computes what new prompts share once", function()
        for _, name in ipairs { "default", "fcfs", "longest_prefix" } do
            local l = lab { max_batch_tokens = 128, kv = { block_size = 4 } }
            l.model:use(name)
            local base = text(5, 100)
            for i = 1, 4 do l.submit(with(base, 8, i), { max_tokens = 2 }) end
            l.finish()
            check_results(l)
            local m = l.engine:metrics()
            assert.is_true(m.computed_tokens < 100 + 4 * (8 + 2 + 4), name .. " " .. m.computed_tokens)
            assert.equal(0, m.prefix_joined) -- the others are not even started
        end
    end)

    it("and any policy sees that a request leaves its rows to another", function()
        local l = lab { max_batch_tokens = 256, kv = { block_size = 4 } }
        local seen = {}
        l.model:use {
            schedule = function(_, step)
                for _, r in ipairs(step.running) do step:run(r) end
                for _, r in ipairs(step.waiting) do
                    seen[r.id] = { step:run(r) }
                    seen[r.id].state = r.state
                end
            end,
        }
        for i = 1, 3 do l.submit(with(text(5, 100), 8, i), { max_tokens = 2 }) end
        l.finish()
        check_results(l)
        local joined = { 0, state = "running" }
        assert.same({ { 108, state = "running" }, joined, joined }, seen)
        assert.equal(0, l.engine:metrics().policy_refused)
        assert.equal(2 * 100, l.engine:metrics().prefix_joined)
    end)

    it("leaves it to arrival when many wait", function()
        local l = lab { max_seqs = 1 }
        l.model:use("longest-prefix", { many = 3 })
        local base = text(1, 64)
        l.submit(base, { max_tokens = 1 })
        l.finish()
        l.requests = {}
        for i = 1, 3 do l.submit(text(i + 7, 40), { max_tokens = 1 }) end
        l.submit(base, { max_tokens = 1 })
        assert.same({ 1, 4, 2, 3 }, l.order()) -- the first by arrival, then three wait
    end)
end)

describe("deadline", function()
    it("starts, and keeps, those with the earliest deadline", function()
        local l = lab { max_seqs = 1 }
        l.model:use "deadline"
        local now = l.engine:now()
        local late = l.submit(4, { max_tokens = 5 })
        l.submit(4, { max_tokens = 5, deadline = now + 300 })
        l.step()
        l.submit(4, { max_tokens = 5, deadline = now + 100 })
        l.submit(4, { max_tokens = 5, deadline = now + 200 })
        assert.same({ 3, 4, 2, 1 }, l.order())
        assert.equal(0, late:info().n_preempted)
        assert.equal(1, l.requests[2]:info().n_preempted)
        check_results(l)
    end)

    it("drops what is too late, if told to", function()
        local l = lab { max_seqs = 1 }
        l.model:use("deadline", { drop = true })
        local now = l.engine:now()
        local running = l.submit(4, { max_tokens = 5, deadline = now + 0.02 })
        l.step()
        local waiting = l.submit(4, { max_tokens = 5, deadline = now + 0.03 })
        local fine = l.submit(4, { max_tokens = 5, deadline = now + 1e6 })
        while l.engine:now() < now + 0.03 do end
        l.finish()
        assert.equal("cancelled", running:info().state)
        assert.equal("cancelled", waiting:info().state)
        assert.equal("done", fine:info().state)
        check_results(l)
    end)
end)

describe("fair", function()
    -- Work done for each tenant: prompt tokens of what has started, and twice the drawn ones.
    local function work(l)
        local sum = {}
        for i, r in ipairs(l.requests) do
            local info = r:info()
            local t = l.tenants[i]
            if info.t_start > 0 then sum[t] = (sum[t] or 0) + info.n_prompt + 2 * info.n_generated end
        end
        return sum
    end
    local function flood(l, tenant, count, prompt, max_tokens)
        for _ = 1, count do
            l.submit(prompt, { max_tokens = max_tokens, tenant = tenant })
            l.tenants[#l.requests] = tenant
        end
    end
    local function new(opts, weights)
        local l = lab(opts)
        l.tenants = {}
        l.model:use("fair", { weights = weights })
        return l
    end
    it("gives each tenant the same work however many requests it sends", function()
        for _, sizes in ipairs { { 10, 10 }, { 60, 10 }, { 10, 60 } } do
            local l = new { max_seqs = 4, ctx = 256 }
            flood(l, "many", 60, sizes[1], 10)
            flood(l, "few", 20, sizes[2], 10)
            local worst, steps = 0, 0
            repeat
                l.step()
                steps = steps + 1
                local w = work(l)
                worst = math.max(worst, math.abs((w.many or 0) - (w.few or 0)))
            until l.requests[80]:info().t_start > 0 or l.requests[60]:info().t_start > 0
            assert.is_true(steps > 30)
            -- the work of two requests: one that was just started, and one that was almost through
            assert.is_true(worst <= 2 * (60 + 2 * 10), "a difference of " .. worst)
            l.finish()
            check_results(l)
        end
    end)

    it("goes by weights", function()
        local l = new({ max_seqs = 4 }, { gold = 3 })
        flood(l, "gold", 90, 10, 10)
        flood(l, "plain", 90, 10, 10)
        repeat l.step() until l.requests[90]:info().t_start > 0
        local w = work(l)
        assert.is_true(math.abs(w.gold / w.plain - 3) < 0.4, w.gold / w.plain)
    end)

    it("saves up no right for those who pause, nor takes any from them", function()
        local l = new { max_seqs = 2 }
        flood(l, "busy", 40, 10, 10)
        for _ = 1, 100 do l.step() end
        local before = work(l).busy
        flood(l, "back", 30, 10, 10)
        for _ = 1, 60 do l.step() end
        local w = work(l)
        assert.is_true(before > 300)
        assert.is_true(math.abs(w.back - (w.busy - before)) < 150, w.back .. " against " .. w.busy - before)
    end)

    it("does not start all of one tenant's long prompts in a free engine", function()
        local l = new { max_seqs = 8, max_batch_tokens = 64 }
        flood(l, "long", 8, 60, 4)
        flood(l, "short", 8, 5, 4)
        l.step()
        l.step()
        local w = { long = 0, short = 0 }
        for i, r in ipairs(l.requests) do
            if r:info().t_start > 0 then w[l.tenants[i]] = w[l.tenants[i]] + 1 end
        end
        assert.is_true(w.short >= 1 and w.long <= 2)
        l.finish()
        check_results(l)
    end)
end)

describe("mlfq", function()
    it("lets short work pass long work that nobody announced", function()
        local l = lab { max_seqs = 1 }
        l.model:use("mlfq", { quantum = 16 })
        l.submit(8, { max_tokens = 100 })
        for _ = 1, 40 do l.step() end
        l.submit(8, { max_tokens = 5 })
        l.submit(8, { max_tokens = 50 })
        l.submit(8, { max_tokens = 5 })
        assert.same({ 2, 4, 3, 1 }, l.order())
        local m = l.engine:metrics()
        assert.is_true(m.preempt_swap > 0)
        assert.equal(0, m.preempt_recompute)
        check_results(l)
    end)

    it("lets nobody wait for ever", function()
        local starved = {}
        for _, patience in ipairs { 1e9, 0.01 } do
            local l = lab { max_seqs = 1 }
            l.model:use("mlfq", { quantum = 16, patience = patience })
            local long = l.submit(40, { max_tokens = 40 })
            local steps = 0
            while long:active() and steps < 400 do
                if steps % 4 == 0 then l.submit(4, { max_tokens = 4 }) end
                l.step()
                local stop = l.engine:now() + 0.0003
                while l.engine:now() < stop do end
                steps = steps + 1
            end
            starved[#starved + 1] = long:active()
            l.finish()
            check_results(l)
        end
        assert.same({ true, false }, starved)
    end)
end)
