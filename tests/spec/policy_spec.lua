-- Policies: the hooks and what they see, limits, hot swap, and each policy that comes with llmrun. All on scripted
-- models, whose every token depends on all tokens before it; engines are stepped by hand where it matters when.
local llm = require "llmrun"
local policy = require "llmrun.policy"
local params = require "llmrun.policy.params"

local shared = dofile "tests/spec/policy_lab.lua"
local lab, next_token, reference, logged = shared.lab, shared.next_token, shared.reference, shared.logged

local function state(r) return r:info().state end

describe("hooks", function()
    it("schedule decides who runs and with how many rows", function()
        local l = lab { max_batch_tokens = 32 }
        local seen = {}
        l.model:use {
            schedule = function(_, step)
                seen[#seen + 1] = { #step.waiting, #step.running, step.budget, step.slots, step.active }
                for _, r in ipairs(step.waiting) do assert.equal(5, step:run(r, 5)) end
                for _, r in ipairs(step.running) do step:run(r, 3) end
                assert.equal(step.budget, 32 - 5 * #step.waiting - 3 * #step.running)
            end,
        }
        local r = l.submit(11, { max_tokens = 1 })
        assert.equal(5, l.step())
        assert.equal(3, l.step())
        assert.equal(3, l.step())
        assert.equal("done", state(r))
        assert.same({ 1, 0, 32, 64, 0 }, seen[1])
        assert.same({ 0, 1, 32, 63, 1 }, seen[2])
    end)

    it("see what a request is and what it has cost", function()
        local l = lab()
        local tag, fields = { tool = "search" }, nil
        l.model:use {
            finish = function(_, r)
                fields = {
                    id = r.id, kind = r.kind, state = r.state, tenant = r.tenant, tag = r.tag, priority = r.priority,
                    deadline = r.deadline, prompt = r.prompt_tokens, cached = r.cached_tokens,
                    computed = r.computed_tokens, generated = r.generated_tokens, max = r.max_tokens,
                    preempted = r.preempted, granted = r.granted, own = r.own,
                }
                assert.is_true(r.arrival <= l.engine:now() and r.queue_time >= 0 and r.block_seconds >= 0)
                assert.equal("request " .. r.id .. " (done)", tostring(r))
            end,
            token = function(_, r) r.own = (r.own or 0) + 1 end,
        }
        local first, seq = l.submit(40, { max_tokens = 1 })
        l.finish()
        l.submit(40, { max_tokens = 1 })
        l.finish()
        first:close()
        seq:close()
        local r = l.submit({ table.unpack(l.prompts[first]) }, {
            max_tokens = 4, tenant = "blue", priority = -3, deadline = 1e9, tag = tag,
        })
        l.finish()
        assert.same({
            id = 3, kind = "generate", state = "done", tenant = "blue", tag = tag, priority = -3, deadline = 1e9,
            prompt = 40, cached = 32, computed = 8 + 3, generated = 4, max = 4, preempted = 0, granted = 0, own = 4,
        }, fields)
        assert.equal(tag, fields.tag)
        assert.equal(3, r:info().id)
    end)

    it("admit refuses with a reason, or changes priority and deadline", function()
        local l = lab()
        l.model:use {
            name = "gate",
            admit = function(_, r)
                if r.prompt_tokens > 10 then return false, "too long" end
                if r.prompt_tokens > 5 then return nil, "hardly" end
                if r.prompt_tokens == 5 then return false end
                r.priority, r.deadline = 9, 77
            end,
        }
        assert.same({ nil, "refused by policy 'gate': too long" }, { l.submit(11) })
        assert.same({ nil, "refused by policy 'gate': hardly" }, { l.submit(6) })
        assert.same({ nil, "refused by policy 'gate'" }, { l.submit(5) })
        local r = l.submit(4, { max_tokens = 1 })
        assert.equal(9, r:info().priority)
        l.finish()
        assert.equal(3, l.engine:metrics().refused)
        assert.equal(0, l.engine:metrics().policy_failed)
    end)

    it("token ends a request, finish sees every end", function()
        local l, ended = lab(), {}
        l.model:use {
            token = function(_, r, id)
                assert.is_true(id >= 0 and id < 200)
                return r.generated_tokens == 3
            end,
            finish = function(_, r) ended[r.id] = r.state end,
        }
        local a = l.submit(4, { max_tokens = 9 })
        local b = l.submit(4, { max_tokens = 2 })
        local c = l.submit(4, { max_tokens = 9 })
        l.step()
        c:cancel()
        l.finish()
        assert.equal(3, a:info().n_generated)
        assert.equal("stop", a:info().finish)
        assert.equal("length", b:info().finish)
        assert.same({ "done", "done", "cancelled" }, ended)
    end)

    it("preempt names who gives way, and how", function()
        for _, how in ipairs { "recompute", "swap" } do
            local l = lab { kv = { blocks = 16, block_size = 4, prefix_cache = false } }
            local asked = 0
            l.model:use {
                preempt = function(_, step, need)
                    asked = asked + 1
                    assert.is_true(need.blocks >= 1 and need.group == 1)
                    assert.equal("running", need.request.state)
                    for _, r in ipairs(step.running) do
                        if r.tenant == "victim" then return r, how end
                    end
                end,
            }
            local victim = l.submit(24, { max_tokens = 20, tenant = "victim" })
            local other = l.submit(24, { max_tokens = 20 })
            l.finish()
            assert.equal(1, asked)
            assert.equal(1, victim:info().n_preempted)
            assert.equal(0, other:info().n_preempted)
            assert.equal(how == "swap" and 1 or 0, l.engine:metrics().preempt_swap)
            assert.same(reference(l.prompts[victim], 20), victim:tokens())
            assert.same(reference(l.prompts[other], 20), other:tokens())
        end
    end)

    it("evict goes by tags, which may change later", function()
        local keep, drop = { keep = 1 }, { keep = 0 }
        for _, swapped in ipairs { false, true } do
            local l = lab { kv = { blocks = 16, block_size = 4 } }
            local seen = {}
            l.model:use {
                evict = function(_, leaf)
                    seen[leaf.tag] = true
                    assert.is_true(leaf.tokens >= 4 and leaf.hits >= 0 and leaf.idle >= 0 and leaf.last_used > 0)
                    return leaf.tag.keep
                end,
            }
            keep.keep, drop.keep = 1, 0
            local a = {}
            for i, tag in ipairs { keep, drop } do
                local r, seq = l.submit(24, { max_tokens = 1, seq_tag = tag })
                l.finish()
                a[i] = l.prompts[r]
                seq:close()
            end
            if swapped then keep.keep, drop.keep = 0, 1 end
            local _, seq = l.submit(30, { max_tokens = 1 })
            l.finish()
            seq:close()
            local function cached(ids)
                local s = l.engine:seq()
                s:append(ids)
                return s:info().cached
            end
            local more, less = cached(a[swapped and 2 or 1]), cached(a[swapped and 1 or 2])
            assert.is_true(more > less, more .. " > " .. less)
            assert.is_true(seen[keep] and seen[drop])
        end
    end)

    it("are told what is refused", function()
        local l = lab { max_seqs = 2, max_batch_tokens = 8 }
        local got = {}
        local ended
        l.model:use {
            schedule = function(_, step)
                if ended then got.ended = { step:run(ended) } end
                local r = step.waiting[1] or step.running[1]
                ended = ended or r
                got.negative, got.zero = { step:run(r, -1) }, { step:run(r, 0) }
                got.all = { step:run(r, math.maxinteger) }
                got.again = { step:run(r) }
                local other = step.waiting[2]
                if other then
                    got.budget, got.preempt = { step:run(other) }, { step:preempt(other) }
                    got.fits = step:fits(other)
                end
            end,
        }
        l.submit(8, { max_tokens = 1 })
        l.submit(3, { max_tokens = 1 })
        l.step()
        assert.same({ 8 }, got.all)
        assert.same({ nil, "a negative number of rows" }, got.negative)
        assert.same({ nil, "no rows asked for" }, got.zero)
        assert.same({ nil, "no rows left in this step" }, got.again)
        assert.same({ nil, "no rows left in this step" }, got.budget)
        assert.same({ nil, "not running" }, got.preempt)
        assert.is_true(got.fits)
        l.step()
        assert.same({ nil, "it has ended" }, got.ended)
        assert.is_true(l.engine:metrics().policy_refused >= 3)
        assert.equal(0, l.engine:metrics().policy_failed)
    end)

    it("sort a list by a number, and keep the order of equals", function()
        local l, got = lab(), nil
        l.model:use {
            schedule = function(_, step)
                got = got or step:sorted({ 5, 3, 9, 4, 8, 1 }, function(x) return x % 2 end)
                assert.has_error(function() step:sorted({ 1 }, function() return 0 / 0 end) end)
                assert.has_error(function() step:sorted({ 1 }, function() return {} end) end)
                step:default()
            end,
        }
        l.submit(2, { max_tokens = 1 })
        l.finish()
        assert.same({ 4, 8, 5, 3, 9, 1 }, got)
        assert.equal(0, l.engine:metrics().policy_failed)
    end)
end)

describe("use", function()
    it("takes tables, functions, names and files", function()
        local l = lab()
        assert.equal("fair", l.model:use("fair", { weights = { a = 2 } }).name)
        assert.equal("longest_prefix", l.model:use("longest-prefix").name)
        assert.equal("mine", l.model:use({ name = "mine", token = print }).name)
        local function make(o) return { name = o.name, token = print } end
        assert.equal("made", l.model:use(make, { name = "made" }).name)
        local function told(o) return { name = ("%d %s"):format(o.n, o.way), token = print } end
        local some = { n = { 4, min = 1, max = 9, integer = true }, way = { "up", choices = { "up", "down" } } }
        assert.equal("4 up", l.model:use({ params = some, make = told }).name)
        assert.equal("7 down", l.model:use({ params = some, make = told }, { n = "7", way = "down" }).name)
        assert.equal("default", l.model:use(nil).name)
        assert.equal("default", l.model:use("default").name)
        local m = llm.scripted { next = next_token, policy = "priority" }
        m:close()
    end)

    it("reads options as a command line has them", function()
        assert.same({ "fcfs" }, { params.parse "fcfs" })
        assert.same({ "mlfq", { quantum = "128", levels = "4" } }, { params.parse "mlfq:quantum=128, levels=4" })
        assert.same({ "fair", { weights = { chat = 4, batch = 0.5 } } }, { params.parse "fair:weights.chat=4,weights.batch=0.5" })
        assert.same({ "fcfs", "mlfq:quantum=128,levels=4", "own.lua" }, params.split "fcfs,mlfq:quantum=128,levels=4, own.lua")
        assert.same({ "fcfs:a=1", "b:c=2", "d" }, params.split "fcfs,a=1,b:c=2,,d")
        assert.matches("OPTION=VALUE expected, got 'x'", select(2, params.parse "fcfs:x"))
        local path = os.tmpname()
        local f <close> = assert(io.open(path, "w"))
        f:write "return function() return { token = print } end"
        f:flush()
        assert.same({ path, { a = 5, b = true, c = false, d = "x" } }, { policy.parse(path .. ":a=5,b=true,c=false,d=x") })
        assert.same({ "mlfq", { quantum = "5" } }, { policy.parse "mlfq:quantum=5" }) -- declared: load reads it
        os.remove(path)
        for _, name in ipairs(policy.names) do
            for key, p in pairs(assert(policy.params(name))) do
                assert.is_true(p[1] ~= nil or p.type == "table", name .. "." .. key)
                assert.equal("string", type(p.help), name .. "." .. key)
            end
        end
        assert.is_nil(policy.params(function() return {} end))
    end)

    it("says what is wrong, and keeps the old one", function()
        local l = lab()
        local status = l.model:use { token = function() return true end }
        local function wrong(what, pattern, ...)
            local ok, err = pcall(l.model.use, l.model, what, ...)
            assert.is_false(ok)
            assert.matches(pattern, tostring(err), 1, true)
        end
        wrong("fairr", "no policy 'fairr' (did you mean 'fair'?)")
        wrong("/no/such.lua", "/no/such.lua")
        wrong({}, "it has none of the hooks admit, schedule")
        wrong({ shedule = print, token = print }, "there is no hook 'shedule'; did you mean 'schedule'?")
        wrong({ schedule = 3 }, "schedule: function expected, got number")
        wrong({ token = print }, "takes no options", { x = 1 })
        wrong(function() error "no" end, "no")
        wrong(7, "its name or its file expected")
        wrong("fair", "unknown option 'weight' (did you mean 'weights'?); valid: generated, weights", { weight = {} })
        wrong("fair", "option 'weights': table expected, got 'x'", { weights = "x" })
        wrong("mlfq", "option 'quantum': integer expected, got '1.5'", { quantum = 1.5 })
        wrong("mlfq", "option 'levels': 1 to 20 expected, got 0", { levels = 0 })
        wrong("deadline", "option 'drop': boolean expected, got 'yes'", { drop = "yes" })
        wrong("fcfs", "unknown option 'x'; this policy takes none", { x = 1 })
        wrong({ params = {}, token = print }, "make: a function that makes the policy expected, got nil")
        wrong({ params = { a = 5 }, make = print }, "params.a: a table { default, min =, max =, help = ... } expected")
        wrong({ params = { a = { 1, min = "0" } }, make = print }, "params.a.min: number expected, got string")
        wrong({ params = { a = { "x", choices = { "x", "y" } } }, make = print }, "one of x, y expected, got 'z'", { a = "z" })
        wrong({ token = print }, "unknown option 'second'", nil, { second = 1 })
        local r = l.submit(3, { max_tokens = 5 })
        l.finish()
        assert.equal(1, r:info().n_generated)
        assert.same({}, status.errors)
    end)

    it("swaps between any two steps; nothing is lost or computed twice", function()
        local l = lab { max_batch_tokens = 16, max_seqs = 3, kv = { blocks = 30, block_size = 4 } }
        local names = { "fcfs", "priority", "shortest_first", "longest_prefix", "deadline", "fair", "mlfq", "default" }
        for i = 1, 8 do l.submit(10 + i, { max_tokens = 10, tenant = "t" .. i % 2, priority = i % 3, deadline = i }) end
        local n = 0
        while l.engine:busy() > 0 do
            n = n + 1
            l.model:use(names[n % #names + 1])
            l.step()
        end
        for _, r in ipairs(l.requests) do
            assert.equal("done", state(r))
            assert.same(reference(l.prompts[r], 10), r:tokens())
        end
        assert.equal(0, l.engine:metrics().policy_failed)
    end)

    it("is not possible inside a hook, nor is anything that changes the engine", function()
        local l, got = lab(), {}
        l.model:use {
            token = function()
                got.use = { policy.use(l.engine, "fcfs") }
                got.step = { l.engine:step() }
                got.seq = { l.engine:seq() }
                got.close = { pcall(l.engine.close, l.engine) }
            end,
            admit = function() got.admit_close = { pcall(l.engine.close, l.engine) } end,
        }
        l.submit(3, { max_tokens = 1 })
        l.finish()
        assert.same({ nil, "not possible from inside a step", "state" }, got.use)
        assert.equal("not possible from inside a step", got.step[2])
        assert.equal("not possible from inside a step", got.seq[2])
        assert.is_false(got.close[1])
        assert.is_false(got.admit_close[1])
    end)

    it("lets go of a policy and an engine that refer to each other", function()
        local gone = setmetatable({}, { __mode = "v" })
        do
            local l = lab()
            local p = { engine = l.engine, schedule = function(p, step) step:default() end }
            l.model:use(p)
            l.submit(5, { max_tokens = 50 })
            l.step()
            gone[1], gone[2] = p, l.engine
        end
        collectgarbage()
        collectgarbage()
        assert.is_nil(gone[1])
        assert.is_nil(gone[2])
    end)
end)

describe("a failing hook", function()
    it("is logged once, counted, and the built-in rule decides", function()
        local l = lab()
        local status
        local lines = logged(function()
            status = l.model:use {
                name = "clumsy",
                schedule = function(_, step)
                    step:run(step.waiting[1] or step.running[1])
                    return step.waiting[100].id
                end,
            }
            l.submit(3, { max_tokens = 3 })
            l.submit(3, { max_tokens = 3 })
            l.finish()
        end)
        assert.equal(1, #lines)
        assert.matches("^policy 'clumsy', hook schedule: .*policy_spec.lua:%d+: attempt to index a nil value", lines[1])
        assert.matches("stack traceback:", lines[1])
        assert.equal(3, l.engine:metrics().policy_failed)
        assert.equal(1, status.errors.schedule)
        for _, r in ipairs(l.requests) do assert.same(reference(l.prompts[r], 3), r:tokens()) end
    end)

    it("is set aside after some failures in a row", function()
        local l = lab()
        local calls, status = 0, nil
        local lines = logged(function()
            status = l.model:use({
                name = "hopeless",
                schedule = function() calls = calls + 1 error({}) end,
                finish = function() calls = calls + 100 end,
            }, nil, { failures = 4 })
            l.submit(3, { max_tokens = 20 })
            l.finish()
        end)
        assert.equal(4, calls)
        assert.is_true(status.set_aside)
        assert.equal(4, l.engine:metrics().policy_failed)
        assert.equal(2, #lines)
        assert.equal("policy 'hopeless' is set aside: its hook schedule has failed 4 times in a row", lines[2])
    end)

    it("counts only failures in a row", function()
        local l, n = lab(), 0
        local status
        logged(function()
            status = l.model:use({
                schedule = function(_, step)
                    n = n + 1
                    if n % 3 ~= 0 then error "now and then" end
                    step:default()
                end,
            }, nil, { failures = 3 })
            l.submit(3, { max_tokens = 20 })
            l.finish()
        end)
        assert.equal(20, n)
        assert.is_falsy(status.set_aside)
    end)

    local loops = {
        ["a loop"] = function() while true do end end,
        ["a loop around pcall"] = function() while true do pcall(function() while true do end end) end end,
        ["a loop in a coroutine"] = function() coroutine.wrap(function() while true do end end)() end,
        ["a loop around coroutines"] = function()
            while true do coroutine.resume(coroutine.create(function() while true do end end)) end
        end,
        ["a loop that clears hooks"] = function() while true do debug.sethook() end end,
        ["a loop in a comparison"] = function() table.sort({ 1, 2, 3 }, function() while true do end end) end,
    }
    for name, loop in pairs(loops) do
        it("is stopped in " .. name, function()
            local l = lab()
            local n, begin = 0, os.clock()
            local lines = logged(function()
                l.model:use({
                    token = function()
                        n = n + 1
                        if n == 2 then loop() end
                    end,
                }, nil, { seconds = 0.02 })
                l.submit(3, { max_tokens = 5 })
                l.finish()
            end)
            assert.equal(5, n)
            assert.matches("hook token: .*over the time limit of a hook: 20 ms of processor time", lines[1])
            assert.is_true(os.clock() - begin < 20)
            assert.same(reference(l.prompts[l.requests[1]], 5), l.requests[1]:tokens())
        end)
    end

    it("may take its time up to the limit", function()
        local l = lab()
        l.model:use({
            token = function()
                local stop = os.clock() + 0.03
                while os.clock() < stop do end
            end,
        }, nil, { seconds = 1 })
        l.submit(3, { max_tokens = 5 })
        l.finish()
        assert.equal(0, l.engine:metrics().policy_failed)
    end)

    it("an inner hook's loop ends both, and the step goes on", function()
        local l = lab { kv = { blocks = 8, block_size = 4, prefix_cache = false } }
        local lines = logged(function()
            l.model:use({
                schedule = function(_, step) step:serve() end,
                preempt = function() while true do end end,
            }, nil, { seconds = 0.02, failures = 100 })
            l.submit(8, { max_tokens = 20 })
            l.submit(8, { max_tokens = 20 })
            l.finish()
        end)
        assert.is_true(l.engine:metrics().policy_failed >= 1)
        assert.matches("hook preempt: ", lines[1])
        for _, r in ipairs(l.requests) do assert.same(reference(l.prompts[r], 20), r:tokens()) end
    end)

    it("gets no more memory than its limit", function()
        local hoard
        for name, eat in pairs {
            table = function() hoard = {} for i = 1, 1e9 do hoard[i] = { i } end end,
            string = function() hoard = ("x"):rep(1 << 30) end,
            swallowed = function()
                hoard = {}
                while pcall(function() for _ = 1, 1000 do hoard[#hoard + 1] = ("x"):rep(1000) .. #hoard end end) do end
                error "done"
            end,
        } do
            local l = lab()
            local before
            local lines = logged(function()
                l.model:use({
                    token = function(_, r)
                        if r.generated_tokens == 2 then eat() end
                    end,
                }, nil, { memory = 8 << 20, seconds = 10 })
                l.submit(3, { max_tokens = 5 })
                before = collectgarbage("count")
                l.finish()
            end)
            local grown = collectgarbage("count") - before
            hoard = nil
            collectgarbage()
            assert.is_true(grown < 12 * 1024, name .. " took " .. grown .. " KiB")
            assert.equal(1, l.engine:metrics().policy_failed)
            assert.equal(1, #lines)
            if name ~= "swallowed" then
                assert.matches("hook token: over the memory limit of a hook: 8 MiB", lines[1])
            end
            assert.same(reference(l.prompts[l.requests[1]], 5), l.requests[1]:tokens())
        end
    end)

    it("is told that it can't wait", function()
        local l = lab()
        local lines = logged(function()
            l.model:use {
                token = function() coroutine.yield() end,
                schedule = function() llm.sleep(1) end,
                admit = function() l.model:session():append("x"):gen() end,
            }
            l.submit(3, { max_tokens = 2 })
            l.finish()
        end)
        table.sort(lines)
        assert.equal(3, #lines)
        assert.matches("hook admit: .*not possible from inside a step", lines[1])
        assert.matches("hook schedule: .*can't wait for the engine", lines[2])
        assert.matches("hook token: attempt to yield", lines[3])
    end)

    it("can't use a step, a leaf or a request that is over", function()
        local l = lab { kv = { blocks = 8, block_size = 4 } }
        local kept, ended, leaf = nil, nil, nil
        l.model:use {
            schedule = function(_, step)
                kept = step
                step:default()
            end,
            evict = function(_, x)
                leaf = x
                return 0
            end,
            finish = function(_, r) ended = r end,
        }
        for _ = 1, 3 do
            local _, seq = l.submit(20, { max_tokens = 1 })
            l.finish()
            seq:close()
        end
        local function wrong(pattern, fn)
            local ok, err = pcall(fn)
            assert.is_false(ok)
            assert.matches(pattern, err, 1, true)
        end
        wrong("step: run is used after the step is over", function() kept:run(ended) end)
        wrong("step: budget is used after the step is over", function() return kept.budget end)
        wrong("leaf: used after its hook is over", function() return leaf.tag end)
        wrong("request 3 has ended", function() return ended.tenant end)
        wrong("request 3 has ended", function() ended.priority = 1 end)
        wrong("request 3 has ended", function() ended:cancel() end)
        assert.equal(3, ended.id)
        assert.equal("ended", ended.state)
        assert.equal("request 3 (ended)", tostring(ended))
        l.model:use(nil)
        wrong("step: slots is used after the step is over", function() return kept.slots end)
        wrong("leaf: used after its hook is over", function() return leaf.tag end)
        assert.equal("llmrun", getmetatable(kept))
    end)

    it("gets errors that name the mistake", function()
        local l, errors = lab(), {}
        local function try(name, fn) errors[name] = select(2, pcall(fn)) end
        l.model:use {
            schedule = function(p, step)
                local r = step.waiting[1]
                try("field", function() return step.wating end)
                try("assign", function() step.budget = 1000 end)
                try("unknown", function() step:run(5) end)
                try("float", function() step:run(r, 1.5) end)
                try("how", function() step:preempt(r, "gently") end)
                try("id", function() r.id = 7 end)
                try("priority", function() r.priority = 1 << 40 end)
                try("deadline", function() r.deadline = 0 / 0 end)
                step:default()
                p.step = step
            end,
            token = function(p) try("phase", function() return p.step:run(p) end) end,
        }
        l.submit(3, { max_tokens = 2 })
        l.step()
        assert.matches("step has no field 'wating'", errors.field)
        assert.matches("can't be changed", errors.assign)
        assert.matches("request", errors.unknown)
        assert.matches("no integer representation", errors.float)
        assert.matches('"recompute" or "swap" expected, got gently', errors.how)
        assert.matches("'id' of a request can't be changed", errors.id)
        assert.matches("out of range", errors.priority)
        assert.matches("not a number", errors.deadline)
        assert.matches("step: run can't be used in the hook token", errors.phase)
    end)
end)

describe("the README's policy", function()
    it("does what it says", function()
        local f <close> = assert(io.open("lua/README.md"))
        local code = f:read("a"):match("\n## Policies.-\n(    return {.-\n    })\n")
        local l = shared.lab { max_seqs = 4, max_batch_tokens = 256, ctx = 2048, kv = { blocks = 500 } }
        local p = assert(load(code))()
        l.model:use(p)
        local names = { "long 1", "long 2", "short" }
        for _, n in ipairs { 1200, 1200, 10 } do l.submit(n, { max_tokens = 2 }) end
        l.step()
        assert.same({ "running", "waiting", "running" }, { l.requests[1]:info().state, l.requests[2]:info().state,
            l.requests[3]:info().state })
        assert.same({ "short", "long 1", "long 2" }, l.order(names))
        assert.equal(0, l.engine:metrics().policy_failed)
        assert.equal(65, p:evict { last_used = 5, tag = { keep = 60 } })
        assert.equal(5, p:evict { last_used = 5, tag = 3 })
    end)
end)

describe("watch", function()
    local path
    before_each(function() path = os.tmpname() .. ".lua" end)
    after_each(function() os.remove(path) end)

    local function write(text)
        local f <close> = assert(io.open(path, "w"))
        f:write(text)
    end

    it("reads a changed file between steps, and keeps the old policy if it does not load", function()
        local l = lab()
        write "return { name = 'three', token = function(_, r) return r.generated_tokens == 3 end }"
        local watch
        local lines = logged(function()
            watch = llm.watch(l.model, path, { every = 0 })
            assert.equal("three", watch.status.name)
            local s <close> = l.model:session()
            s:append "abc"
            assert.equal(3, #s:gen { max_tokens = 9, ignore_eos = true }.tokens)
            write "return { name = 'five', token = function(_, r) return r.generated_tokens == 5 end } "
            assert.equal(5, #s:gen { max_tokens = 9, ignore_eos = true }.tokens)
            write "return { name = 'broken', token = = 1 } -- not Lua"
            assert.equal(5, #s:gen { max_tokens = 9, ignore_eos = true }.tokens)
            os.remove(path)
            assert.equal(5, #s:gen { max_tokens = 9, ignore_eos = true }.tokens)
            write "return { name = 'seven', token = function(_, r) return r.generated_tokens == 7 end } -- again"
            assert.equal(7, #s:gen { max_tokens = 9, ignore_eos = true }.tokens)
            watch:stop()
            write "return { name = 'one', token = function(_, r) return true end }"
            assert.equal(7, #s:gen { max_tokens = 9, ignore_eos = true }.tokens)
        end)
        assert.equal(3, #lines)
        assert.matches("policy 'five' is read again", lines[1])
        assert.matches("does not load; the policy stays as it was: .*unexpected symbol", lines[2])
        assert.matches("policy 'seven' is read again", lines[3])
    end)

    it("takes a file that was read before there was an engine, and what has changed since", function()
        for _, flag in ipairs { "", ":n=3" } do -- with options it is asked for its parameters first
            local count = { n = 0 }
            package.loaded["spec.count"] = count
            local head = "local c = require 'spec.count'; c.n = c.n + 1; "
            local text = head .. "return { name = 'three', token = function(_, r) "
                .. "return r.generated_tokens == 3 end }"
            local made = head .. "return { params = { n = { 1 } }, make = function(o) "
                .. "return { name = 'n', token = function(_, r) return r.generated_tokens == o.n end } end }"
            write(flag == "" and text or made)
            local ready = assert(policy.prepare(path .. flag))
            local l = lab()
            local watch <close> = l.model:watch(path, { every = 0, options = ready.options, ready = ready })
            assert.equal(1, count.n)
            local s <close> = l.model:session()
            s:append "abc"
            assert.equal(3, #s:gen { max_tokens = 9, ignore_eos = true }.tokens)
            assert.equal(1, count.n)
            watch:stop()
            ready = assert(policy.prepare(path .. flag))
            write "return { name = 'later', token = function(_, r) return r.generated_tokens == 5 end }"
            local l2 = lab()
            local lines = logged(function()
                local again <close> = l2.model:watch(path, { every = 0, ready = ready }) -- luacheck: ignore 211
                local s2 <close> = l2.model:session()
                s2:append "abc"
                assert.equal(5, #s2:gen { max_tokens = 9, ignore_eos = true }.tokens)
            end)
            assert.matches("policy 'later' is read again", lines[1])
        end
        package.loaded["spec.count"] = nil
        assert.matches("cannot open", select(2, policy.prepare "/no/such.lua"))
        assert.matches("no policy 'fare'", select(2, policy.prepare "fare"))
        assert.is_nil((policy.prepare "fair:=3"))
    end)

    it("loses no request and no KV", function()
        local l = lab()
        write "return { schedule = function(_, step) step:serve() end }"
        local watch = policy.watch(l.engine, path, { every = 0 })
        local r = l.submit(20, { max_tokens = 12 })
        logged(function()
            for i = 1, 4 do
                l.step()
                write("return { schedule = function(_, step) step:serve() end } " .. ("--"):rep(i))
                assert.is_true(watch:poll())
                assert.is_false(watch:poll())
            end
        end)
        l.finish()
        watch:stop()
        assert.same(reference(l.prompts[r], 12), r:tokens())
        assert.equal(20 + 11, r:info().n_computed)
    end)

    it("reads it also while a server has nothing to do", function()
        local core, loop, l = require "llmrun.core", require "llmrun.loop", lab()
        write "return { name = 'before', schedule = function(_, step) step:serve() end }"
        local socket <close> = assert(core.local_listen(path .. ".sock"))
        loop.watch(socket:fd(), "r", function() end)
        local watch <close> = policy.watch(l.engine, path, { every = 0 })
        assert.equal(1, watch.every)
        watch.every = 0.02
        local log, news = policy.log, loop.ticket()
        policy.log = function(line) loop.fire(news, line) end
        write "return { name = 'after', schedule = function(_, step) step:serve() end } -- longer"
        local line = llm.timeout(60, function() return loop.wait(news, "spec") end)
        policy.log = log
        loop.unwatch(socket:fd())
        os.remove(path .. ".sock")
        assert.matches("policy 'after' is read again", line)
        assert.equal("after", watch.status.name)
    end)

    it("fails at once if the file is not there or no policy", function()
        local l = lab()
        assert.has_error(function() l.model:watch("/no/such/policy.lua") end)
        write "return 5"
        local ok, err = pcall(l.model.watch, l.model, path)
        assert.is_false(ok)
        assert.matches("a policy %(table%) or a function", tostring(err))
    end)
end)
