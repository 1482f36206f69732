-- Shadow mode: a second policy decides too, nothing is done, and what differs is counted.
local llm = require "llmrun"
local policy = require "llmrun.policy"
local shadow = require "llmrun.shadow"

local P = dofile "tests/spec/program_support.lua"

local function model_of(opts)
    local o = { next = function(t) return 97 + (t[#t] * 7 + #t) % 20 end, ctx = 512, max_seqs = 4, kv = { blocks = 200 } }
    for k, v in pairs(opts or {}) do o[k] = v end
    return llm.scripted(o)
end

--- Requests of these prompt lengths, side by side; their texts.
local function ask(m, lengths, opts)
    return llm.map(lengths, function(n, i)
        local s <close> = m:session()
        s:append(string.char(97 + i % 26) .. ("abcdefgh"):rep(n // 8 + 1):sub(1, n - 1))
        local o = { max_tokens = 8, tenant = i % 2 == 0 and "even" or "odd" }
        for k, v in pairs(opts or {}) do o[k] = v end
        return s:gen(o).text
    end)
end

describe("a shadow", function()
    it("that decides as the policy in charge does differs nowhere", function()
        for _, charge in ipairs { "default", "fcfs" } do
            local m <close> = model_of { max_batch_tokens = 40, chunk = 24 }
            m:use(charge)
            local s = shadow.start(m, "fcfs")
            ask(m, { 30, 5, 60, 20, 9, 41, 33, 12 })
            local sum = s:summary()
            assert.is_true(sum.steps > 8)
            assert.equal(0, sum.failures, sum.last_error)
            assert.equal(0, sum.differing, s:text())
            assert.equal(sum.rows_real, sum.rows_shadow)
            assert.equal(8, sum.n_requests)
            s:stop()
            assert.is_nil(m.runner.observers)
        end
    end)

    it("says which requests, how many rows, how often", function()
        local m <close> = model_of { max_seqs = 1 }
        local s = shadow.start(m, "shortest_first")
        ask(m, { 40, 10 }) -- one place: the built-in rule takes the first, shortest_first the second
        local sum = s:summary()
        local by_id = {}
        for _, e in ipairs(sum.requests) do by_id[e.id] = e end
        assert.equal(1, sum.differing, s:text())
        assert.equal(1, by_id[1].later)
        assert.equal(1, by_id[2].earlier)
        assert.equal(10, by_id[2].shadow)
        assert.equal(40, by_id[1].real)
        assert.equal("odd", by_id[1].tenant)
        local text = s:text()
        assert.matches("shortest_first in the shadow: 1 of %d+ steps differ %(%d", text)
        assert.matches("earlier 1 times, later 1", text)
        s:stop()
    end)

    it("can't change anything", function()
        local function run(with)
            local m <close> = model_of { max_seqs = 3, kv = { blocks = 14, block_size = 8 } }
            local seen = {}
            local tag = { keep = 1 }
            local s = with and shadow.start(m, {
                name = "vandal",
                admit = function(_, r)
                    r.priority, r.mine = 99, true
                    return false
                end,
                schedule = function(_, step)
                    for _, r in ipairs(step.running) do
                        r:cancel()
                        step:preempt(r, "swap")
                    end
                    for _, r in ipairs(step.waiting) do
                        assert(r.priority == 99 and r.mine)
                        step:run(r)
                        seen[#seen + 1] = pcall(function() r.pending = 1 end)
                        seen[#seen + 1] = pcall(function() r.tag.keep = 2 end)
                        seen[#seen + 1] = pcall(function() getmetatable(r).__index = nil end)
                        seen[#seen + 1] = pcall(function() return step.no_such_field end)
                    end
                    step.waiting[1], step.running[1] = nil, nil
                end,
                token = function() return true end,
                finish = function(_, r) r:cancel() end,
            })
            local texts = ask(m, { 30, 5, 60, 20 }, { tag = tag })
            m:check()
            assert.equal(1, tag.keep)
            if not s then return texts end
            local sum = s:summary()
            assert.equal(0, sum.failures, sum.last_error)
            assert.is_true(#seen > 0)
            for _, ok in ipairs(seen) do assert.is_false(ok) end
            assert.equal(4, sum.refused)
            assert.equal(32, sum.would_end)
            assert.is_true(sum.kinds.preempted > 0)
            return texts
        end
        assert.same(run(false), run(true))
    end)

    it("sees a step only while it lasts", function()
        local m <close> = model_of()
        local kept
        local s = shadow.start(m, { schedule = function(_, step)
            if kept then
                local ok, err = pcall(function() return kept.budget end)
                assert(not ok and err:find("after the step is over", 1, true))
                assert(not pcall(kept.run, kept, step.running[1] or step.waiting[1]))
            end
            kept = step
            assert(not pcall(step.run, step, {}))
            step:default()
        end })
        ask(m, { 10, 20 })
        assert.equal(0, s:summary().failures, s:summary().last_error)
        assert.equal(0, s:summary().differing, s:text())
    end)

    it("that fails, or never ends, is cut off and set aside; the model goes on", function()
        for _, bad in ipairs { function() error "no idea" end, function() while true do end end } do
            local m <close> = model_of()
            local limits = policy.limits
            policy.limits = { seconds = 0.01, memory = 1 << 20, failures = 3 }
            local s = shadow.start(m, { schedule = bad })
            local texts = ask(m, { 10, 20 })
            policy.limits = limits
            assert.equal(2, #texts)
            local sum = s:summary()
            assert.equal(3, sum.failures)
            assert.is_true(sum.set_aside)
            assert.equal(0, sum.steps)
            assert.matches("it failed 3 times and is set aside", s:text(), 1, true)
        end
    end)

    it("may be any policy that comes with llmrun, also when memory is short", function()
        for _, name in ipairs(policy.names) do
            local m <close> = model_of { max_seqs = 4, max_batch_tokens = 32, kv = { blocks = 14, block_size = 8 } }
            local s = shadow.start(m, name)
            ask(m, { 30, 5, 60, 20, 9, 41, 33, 12 }, { deadline = 100 })
            local sum = s:summary()
            assert.equal(0, sum.failures, sum.last_error)
            assert.is_true(sum.steps > 8 and sum.rows_shadow > 0)
            if name == "fcfs" then assert.is_true(sum.differing <= sum.steps // 4, s:text()) end
        end
    end)

    it("begins while requests run, one at a time, and tells what is wrong with a policy", function()
        local m <close> = model_of()
        local s <close> = P.session(m, "abc")
        local task = llm.spawn(s.gen, s, { max_tokens = 100 })
        llm.sleep(0)
        local first = shadow.start(m, "fair")
        assert.equal(1, first:summary().n_requests)
        local second = shadow.start(m, "mlfq")
        assert.is_true(first.stopped)
        assert.equal(second, m.shadow)
        P.raises("no policy 'fairr'", shadow.start, m, "fairr")
        assert.equal(second, m.shadow)
        task:wait()
        assert.is_true(second:summary().steps > 5)
        assert.equal(0, second:summary().differing, second:text())
    end)
end)
