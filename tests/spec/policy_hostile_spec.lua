-- Random policies that do everything wrong, at random moments, against small pools: after every step all invariants of
-- pool, sequences and lists hold, every request ends, what is not cancelled says what the model alone would have said,
-- and all blocks come back.
local llm = require "llmrun"
local shared = dofile "tests/spec/policy_lab.lua"
local lab, reference, generator, logged = shared.lab, shared.reference, shared.generator, shared.logged

local slow = os.getenv "LLMRUN_TEST_SANITIZE" and 0.2 or 1 -- share of the trials that are run

-- What a hook may do besides its work. l: the lab; p: the policy; random: of the trial.
local evil = {
    function() error("an error") end,
    function() error({}) end,
    function() error(nil) end,
    function() error(setmetatable({}, { __tostring = function() error "again" end })) end,
    function() local function deep() return 1 + deep() end deep() end,
    function() coroutine.yield() end,
    function() llm.sleep(0) end,
    function(p) return p.missing.field end,
    function(_, _, x) x.running = {} end,
    function(_, l) l.engine:step() end,
    function(_, l) assert(l.engine:seq()) end,
    function(_, l) l.engine:set_policy(nil) end,
    function(_, l) l.engine:close() end,
    function(_, l) l.engine:drop_cached() end,
    function(_, l) l.engine:check() l.engine:info() l.engine:metrics() end,
    function(_, l, _, random) local r = l.requests[random(#l.requests)] r:info() r:text() r:tokens() end,
    function() collectgarbage() end,
    function() debug.sethook() end,
    function() table.sort({ 3, 1, 2, 5, 4, 7, 6, 9, 8, 0, 3, 4 }, function() return true end) end,
}
local endless = {
    function() while true do end end,
    function() while true do pcall(function() while true do end end) end end,
    function() coroutine.wrap(function() while true do end end)() end,
    function(p) p.hoard = {} for i = 1, 1e9 do p.hoard[i] = { i } end end,
    function() return ("x"):rep(1 << 32) end,
}

local function policy_of(l, random)
    local p = { kept = {}, name = "hostile" }
    local sizes = { -5, 0, 1, 1, 2, 3, 7, 50, 1000, math.maxinteger, math.mininteger, 2.5, 0 / 0, "x", "3" }
    local function any(step)
        local lists = { step.waiting, step.running, p.kept }
        local list = lists[random(3)]
        return list[random(math.max(1, #list))] or p.kept[1] or step.waiting[1] or step.running[1]
    end
    local function misbehave(x)
        if random(25) == 1 then evil[random(#evil)](p, l, x, random) end
        if random(1500) == 1 then endless[random(#endless)](p) end
    end
    local function act(step)
        local r, what = any(step), random(12)
        if what <= 6 then
            local before = step.budget
            local n = sizes[random(#sizes)]
            local got = step:run(r, n)
            assert(not got or (got >= 1 and got <= before))
            if random(5) == 1 then step:run(r, n) end
        elseif what == 7 then
            step:preempt(r, random(2) == 1 and "swap" or nil)
        elseif what == 8 then
            for _, x in ipairs(step.running) do
                if random(2) == 1 then step:preempt(x) end
            end
        elseif what == 9 then
            step:fits(r)
            step:blocks(random(4))
        elseif what == 10 then
            p.kept[random(5)] = r
            p.step = step
        elseif what == 11 then
            r.priority, r.own = random(9), { r }
            if random(30) == 1 then r:cancel() end
        else
            step.running[random(3)] = nil
            step.waiting[#step.waiting + 1] = "nonsense"
            if random(3) == 1 then step:serve(function(x) return x.prompt_tokens end) end
            if random(3) == 1 then step:default() end
        end
    end
    local hooks = {
        admit = function(_, r)
            misbehave(r)
            p.kept[random(5)] = r
            if random(12) == 1 then return false, "no" end
        end,
        schedule = function(_, step)
            for _ = 1, random(12) do
                act(step)
                misbehave(step)
            end
        end,
        preempt = function(_, step, need)
            misbehave(need)
            if random(2) == 1 then return any(step), "swap" end
            if random(2) == 1 then step:preempt(any(step)) end
            if random(6) == 1 then step:run(need.request) end
            if random(6) == 1 then p.step:run(need.request) end
            return random(3) == 1 and {} or nil
        end,
        evict = function(_, leaf)
            misbehave(leaf)
            if random(9) == 1 and p.step then p.step:preempt(p.kept[1]) end
            return ({ 0 / 0, "no", leaf.idle, -leaf.tokens, nil, leaf.hits })[random(6)]
        end,
        token = function(_, r)
            misbehave(r)
            if random(9) == 1 and p.step then p.step:run(r) end
            return random(40) == 1
        end,
        finish = function(_, r)
            misbehave(r)
            if p.kept[1] and random(30) == 1 then p.kept[1]:cancel() end
            p.kept[random(5)] = r
        end,
    }
    for name, f in pairs(hooks) do
        if random(4) > 1 then p[name] = f end
    end
    p.schedule = p.schedule or hooks.schedule
    return p
end

local totals = { done = 0, cancelled = 0, refused = 0, failures = 0, aside = 0, preempted = 0 }

local function trial(seed)
    local random = generator(seed)
    local l = lab {
        max_seqs = 1 + random(6), max_batch_tokens = 4 + random(100), chunk = 1 + random(64), patience = 1 + random(4),
        preempt = random(2) == 1 and "swap" or "recompute", swap_bytes = random(2) == 1 and 2000 or 1 << 24,
        kv = { blocks = 25 + random(40), block_size = ({ 1, 2, 3, 16 })[random(4)], prefix_cache = random(4) > 1 },
        window = random(2) == 1 and 10 + random(20) or nil, ctx = 160,
    }
    local limits = { seconds = 0.004, memory = 4 << 20, failures = random(2) == 1 and 1 << 30 or 1 + random(20) }
    local status
    local seqs, left, steps, made = {}, 25, 0, 0
    local most = l.engine:info().context
    local function use()
        status = l.model:use(policy_of(l, random), nil, limits)
        made = made + 1
    end
    use()
    while left > 0 or l.engine:busy() > 0 do
        steps = steps + 1
        assert(steps < 3000, "requests do not end")
        if left > 0 then
            left = left - 1
            local n = math.min(random(60), most - 2)
            local r, seq = l.submit(n, { max_tokens = random(20) })
            if r then seqs[#seqs + 1] = seq end
        end
        if random(40) == 1 and #l.requests > 0 then l.requests[random(#l.requests)]:cancel() end
        if random(60) == 1 then
            if status.set_aside then totals.aside = totals.aside + 1 end
            use()
        end
        l.step()
    end
    if status.set_aside then totals.aside = totals.aside + 1 end
    for _, r in ipairs(l.requests) do
        local info = r:info()
        assert(info.state == "done" or info.state == "cancelled", info.error)
        local ids = r:tokens()
        assert.same(reference(l.prompts[r], #ids), ids)
        totals[info.state] = totals[info.state] + 1
    end
    for _, s in ipairs(seqs) do s:close() end
    local m = l.engine:metrics()
    totals.refused = totals.refused + m.policy_refused
    totals.failures = totals.failures + m.policy_failed
    totals.preempted = totals.preempted + m.preempt_recompute + m.preempt_swap
    l.requests, l.prompts = {}, {}
    l.engine:drop_cached()
    collectgarbage()
    for _, kv in ipairs(l.engine:info().kv) do assert.equal(kv.total, kv.free) end
    assert(l.engine:check())
    l.model:close()
end

describe("hostile policies", function()
    local count = math.ceil(60 * slow)
    it("break nothing, whatever they do", function()
        logged(function()
            for seed = 1, count do
                local ok, err = pcall(trial, seed)
                err = type(err) == "table" and err.message or err
                if not ok then error(("seed %d: %s"):format(seed, tostring(err)), 0) end
            end
        end)
    end)

    it("were hostile indeed", function()
        for what, n in pairs(totals) do
            assert.is_true(n > (slow == 1 and count / 10 or -1), ("%s: only %d"):format(what, n))
        end
        assert.is_true(totals.failures > 5 * count)
    end)
end)
