-- The run loop, branches, cancellation, and waiting in every place where Lua code may stand.
local llm = require "llmrun"
local loop = require "llmrun.loop"

-- Waits one round of the loop, as a request to a model would.
local function wait(v)
    llm.sleep(0)
    return v
end

describe("waiting", function()
    it("works through pcall, xpcall and nested pcall", function()
        assert.equal(7, select(2, pcall(function() return select(2, pcall(wait, 7)) end)))
        local ok, err = pcall(function() wait(); error("boom", 0) end)
        assert.is_false(ok)
        assert.equal("boom", err)
        assert.equal(8, select(2, xpcall(wait, debug.traceback, 8)))
    end)

    it("works in metamethods", function()
        local mt = {}
        mt.__index = function(_, k) return wait(k) end
        mt.__newindex = function(t, k, v) rawset(t, k, wait(v)) end
        mt.__call = function(_, a) return wait(a) end
        mt.__eq = function() return wait(true) end
        mt.__lt = function() return wait(true) end
        mt.__concat = function(_, b) return wait("<" .. tostring(b)) end
        mt.__add = function() return wait(3) end
        mt.__len = function() return wait(9) end
        mt.__unm = function() return wait(-1) end
        local a, b = setmetatable({}, mt), setmetatable({}, mt)
        assert.equal("key", a.key)
        a.x = 5
        assert.equal(5, rawget(a, "x"))
        assert.equal(4, a(4))
        assert.is_true(a == b)
        assert.is_true(a < b)
        assert.equal("<z", a .. "z")
        assert.equal(3, a + 1)
        assert.equal(9, #a)
        assert.equal(-1, -a)
    end)

    it("works in close handlers, in both ways out", function()
        local log = {}
        local function scope(fail)
            local _ <close> = setmetatable({}, { __close = function() log[#log + 1] = wait("closed") end })
            if fail then error("oops", 0) end
            return "left"
        end
        assert.equal("left", scope(false))
        local ok, err = pcall(scope, true)
        assert.is_false(ok)
        assert.equal("oops", err)
        assert.same({ "closed", "closed" }, log)
    end)

    it("works in iterators", function()
        local sum = 0
        for v in function(_, last) return wait((last or 0) < 3 and (last or 0) + 1 or nil) end do sum = sum + v end
        assert.equal(6, sum)
    end)

    it("works in the main chunk of a module", function()
        package.preload["spec.waiting"] = function(name) return { name = wait(name) } end
        assert.equal("spec.waiting", require("spec.waiting").name)
        assert.equal(require "spec.waiting", require "spec.waiting")
    end)

    it("loads a module once when two branches require it at the same time", function()
        local loads = 0
        package.preload["spec.shared"] = function() loads = loads + 1; wait(); return { n = loads } end
        local r = llm.all { function() return require "spec.shared" end, function() return require "spec.shared" end }
        assert.equal(1, loads)
        assert.equal(r[1], r[2])
    end)

    it("reports a module that requires itself, or is not there", function()
        package.preload["spec.self"] = function() return require "spec.self" end
        assert.has_error(function() require "spec.self" end, nil, "requires itself")
        local _, err = pcall(require, "spec.nowhere")
        assert.matches("module 'spec.nowhere' not found", err)
        assert.matches("no embedded module", err)
    end)

    it("goes through coroutines of the program's own; its own yields reach its resume", function()
        local co = coroutine.create(function(a)
            local b = coroutine.yield(wait(a + 1))
            wait()
            local c = coroutine.yield(b + 1)
            return wait(c + 1)
        end)
        assert.same({ true, 2 }, { coroutine.resume(co, 1) })
        assert.same({ true, 11 }, { coroutine.resume(co, 10) })
        assert.same({ true, 101 }, { coroutine.resume(co, 100) })
        assert.equal("dead", coroutine.status(co))
        local out = {}
        for v in coroutine.wrap(function() for i = 1, 3 do wait(); coroutine.yield(i) end end) do out[#out + 1] = v end
        assert.same({ 1, 2, 3 }, out)
    end)

    it("goes through a coroutine in a coroutine", function()
        local outer = coroutine.wrap(function()
            local inner = coroutine.wrap(function() wait(); coroutine.yield("inner"); wait(); error("deep", 0) end)
            coroutine.yield(inner())
            local ok, err = pcall(inner)
            coroutine.yield(tostring(ok) .. " " .. err)
        end)
        assert.equal("inner", outer())
        assert.matches("^false .*deep$", outer())
    end)

    it("keeps resume's own errors", function()
        local co = coroutine.create(function() end)
        coroutine.resume(co)
        assert.same({ false, "cannot resume dead coroutine" }, { coroutine.resume(co) })
        local ok, err = coroutine.resume(coroutine.create(function() error({ code = 1 }) end))
        assert.is_false(ok)
        assert.same({ code = 1 }, err)
        assert.has_error(function() coroutine.resume(1) end)
    end)

    for name, f in pairs {
        ["table.sort"] = function() table.sort({ 3, 1, 2 }, function(a, b) wait(); return a < b end) end,
        ["string.gsub"] = function() return ("abc"):gsub("%w", function(c) return wait(c) end) end,
        ["string.format"] = function()
            return ("%s"):format(setmetatable({}, { __tostring = function() return wait("x") end }))
        end,
        ["tostring"] = function()
            return tostring(setmetatable({}, { __tostring = function() return wait("x") end }))
        end,
        ["load"] = function() local f, e = load(function() return wait(nil) end); return f or error(e, 0) end,
    } do
        it("says so where it can't: " .. name, function()
            local ok, err = pcall(f)
            assert.is_false(ok)
            assert.matches("^tests/spec/loop_spec.lua:%d+: llm.sleep: can't wait for the engine", err)
            assert.matches("inside " .. name .. "$", err)
            -- also when a coroutine of the program's stands between
            ok, err = pcall(function()
                table.sort({ 2, 1 }, function(a, b) coroutine.wrap(wait)(); return a < b end)
            end)
            assert.is_false(ok)
            assert.matches("can't wait for the engine inside table.sort", err, 1, true)
        end)
    end

    it("says so in a message handler and in a finalizer", function()
        local text
        xpcall(error, function() text = select(2, pcall(wait)) end)
        assert.matches("inside an xpcall message handler", text)
        setmetatable({}, { __gc = function() text = select(2, pcall(wait)) end })
        collectgarbage()
        assert.matches("inside a finalizer", text)
    end)

    it("a plain yield of the main program lets the others run", function()
        local log = {}
        llm.all {
            function() log[#log + 1] = "a1"; coroutine.yield(); log[#log + 1] = "a2" end,
            function() log[#log + 1] = "b1"; coroutine.yield(); log[#log + 1] = "b2" end,
        }
        assert.same({ "a1", "b1", "a2", "b2" }, log)
    end)
end)

describe("branches", function()
    it("all gives first results under the same keys", function()
        local r = llm.all { function() return wait(1), "more" end, x = function() return wait("x") end,
            function() return nil end, llm.spawn(wait, 4) }
        assert.same({ [1] = 1, x = "x", [3] = 4 }, r)
        assert.same({}, llm.all {})
    end)

    it("all lets the others finish, then raises with the branch's traceback", function()
        local finished = false
        local function culprit() wait(); error("branch broke") end
        local ok, err = pcall(llm.all, {
            function() local v = culprit(); return v end,
            function() for _ = 1, 5 do wait() end finished = true end,
        })
        assert.is_false(ok)
        assert.is_true(finished)
        assert.matches("branch broke", err)
        assert.matches("traceback of branch 1", err)
        assert.matches("in upvalue 'culprit'", err)
    end)

    it("keeps error values that are no strings", function()
        local ok, err = pcall(llm.all, { function() wait(); error({ code = 42 }) end })
        assert.is_false(ok)
        assert.equal(42, err.code)
    end)

    it("race takes the first to end and cancels the others, closing their variables", function()
        local closed = {}
        local function branch(n, rounds)
            return function()
                local _ <close> = setmetatable({}, { __close = function() closed[#closed + 1] = n end })
                for _ = 1, rounds do wait() end
                return n
            end
        end
        assert.same({ "b", 2 }, { llm.race { branch("a", 9), branch("b", 1), branch("c", 9) } })
        assert.same({ "b", "a", "c" }, closed)
        assert.has_error(function() llm.race { branch("a", 9), function() error("first", 0) end } end)
    end)

    it("any takes the first success; all failures are one error", function()
        assert.equal("good", (llm.any { function() error("bad") end, function() wait(); return "good" end }))
        local _, err = pcall(llm.any, { function() error("one") end, function() wait(); error("two") end })
        assert.matches("all branches failed.*one.*two", err)
    end)

    it("map bounds how many run at once and keeps the order", function()
        local running, most = 0, 0
        local r = llm.map({ 5, 1, 3, 2, 4 }, function(v, i)
            running = running + 1
            most = math.max(most, running)
            for _ = 1, v do wait() end
            running = running - 1
            return v * 10 + i
        end, { concurrency = 2 })
        assert.same({ 51, 12, 33, 24, 45 }, r)
        assert.equal(2, most)
        assert.same({}, llm.map({}, wait))
    end)

    it("map raises an item's error after the others are done", function()
        local done = 0
        local _, err = pcall(llm.map, { 1, 2, 3 }, function(v)
            wait()
            if v == 2 then error("item broke") end
            done = done + 1
        end)
        assert.equal(2, done)
        assert.matches("item broke", err)
        assert.matches("traceback of item 2", err)
    end)

    it("joins in any order", function()
        local a = llm.spawn(function() wait(); wait(); return "a" end)
        local b = llm.spawn(function() wait(); return "b" end)
        assert.equal("a", a:wait())
        assert.equal("b", b:wait())
        assert.equal("b", b:wait())
    end)

    it("cancel runs close handlers of nested coroutines, innermost first", function()
        local log = {}
        local function guard(n) return setmetatable({}, { __close = function() log[#log + 1] = n end }) end
        local task = llm.spawn(function()
            local a <close> = guard "outer"
            coroutine.wrap(function()
                local b <close> = guard "inner"
                wait(llm.sleep(1000))
                return b
            end)()
            return a
        end)
        wait()
        assert.is_true(task:cancel())
        assert.same({ "inner", "outer" }, log)
        assert.equal("cancelled", task.state)
        assert.is_false(task:cancel())
        assert.same({ nil, "cancelled", "cancelled" }, { task:wait() })
    end)

    it("cancels what a cancelled branch waits for", function()
        local inner_closed = false
        local task = llm.spawn(function()
            llm.all { function()
                local x <close> = setmetatable({}, { __close = function() inner_closed = true end })
                llm.sleep(1000)
                return x
            end }
        end)
        wait()
        wait()
        task:cancel()
        assert.is_true(inner_closed)
    end)

    it("timeout gives nil, text, code and ends the call", function()
        local closed = false
        local r = table.pack(llm.timeout(0.01, function()
            local x <close> = setmetatable({}, { __close = function() closed = true end })
            llm.sleep(1000)
            return x
        end))
        assert.same({ nil, "timed out after 0.01 s", "limit", n = 3 }, r)
        assert.is_true(closed)
        assert.same({ 1, 2 }, { llm.timeout(100, function() wait(); return 1, 2 end) })
        assert.has_error(function() llm.timeout(100, error, "x") end)
    end)

    it("sleeps in order of time", function()
        local log = {}
        llm.map({ 0.03, 0.01, 0.02 }, function(s) llm.sleep(s); log[#log + 1] = s end)
        assert.same({ 0.01, 0.02, 0.03 }, log)
    end)

    it("checks arguments and names the call", function()
        for _, case in ipairs {
            { "llm.spawn: function expected, got nil", llm.spawn },
            { "llm.sleep: number of seconds expected", llm.sleep, "x" },
            { "llm.timeout: number of seconds expected", llm.timeout, 0 / 0, wait },
            { "llm.all: branch 1: function expected, got number", llm.all, { 1 } },
            { "llm.map: unknown option 'concurency' (did you mean 'concurrency'?)", llm.map, {}, wait,
                { concurency = 1 } },
            { "llm.map: option 'concurrency': integer expected, got string", llm.map, {}, wait,
                { concurrency = "2" } },
            { "llm.race: the table is empty", llm.race, {} },
        } do
            local ok, err = pcall(table.unpack(case, 2))
            assert.is_false(ok)
            assert.matches(case[1], err, 1, true)
        end
    end)

    it("a ticket fired early is not lost, and fires once", function()
        local t = loop.ticket()
        loop.fire(t, "early")
        loop.fire(t, "late")
        assert.equal("early", loop.wait(t, "spec"))
    end)
end)

describe("steps", function()
    local core = require "llmrun.core"
    local folder = require("tests.spec.shell_support").folder()
    teardown(function() folder:remove() end)
    local count = 0

    --- A source that calls step(number) until that gives true, and a bell: ring() makes a descriptor ready, for which a
    --- task notes in `heard` how many steps there were by then. Returns heard.
    local function run(step, crowd)
        count = count + 1
        local path, steps, heard, over = folder:at("bell" .. count), 0, {}, loop.ticket()
        local bell <close> = assert(core.local_listen(path))
        local rung = {}
        loop.watch(bell:fd(), "r", function()
            rung[#rung + 1] = bell:accept()
            loop.came()
            loop.spawn(function() heard[#heard + 1] = steps end)
        end)
        local source = { busy = function() return true end, crowd = crowd }
        function source:step()
            steps = steps + 1
            if not step(steps, function() rung[#rung + 1] = assert(core.local_connect(path)) end) then return end
            loop.remove_source(self)
            loop.fire(over)
        end
        loop.add_source(source)
        loop.wait(over, "spec")
        llm.sleep(0)
        loop.unwatch(bell:fd())
        for _, s in ipairs(rung) do s:close() end
        return heard
    end

    --- ring, in a task of its own: after the descriptors were looked at.
    local function reply(ring)
        loop.spawn(function()
            loop.expect()
            ring()
        end)
    end

    it("begin when what came in during the last one has been taken in", function()
        assert.same({ 1, 2, 3 }, run(function(n, ring)
            if n <= 3 then ring() end
            return n == 6
        end))
    end)

    it("take in what a task started that came in", function()
        local log, steps = {}, 0
        run(function(n)
            steps = n
            if n == 1 then
                loop.spawn(function() loop.spawn(function() log[#log + 1] = steps end) end)
            end
            return n == 3
        end)
        assert.same({ 1 }, log)
    end)

    it("begin a moment later where an answer's client is likely to ask again", function()
        local function steps(n, ring)
            core.sleep(0.02)
            if n == 2 then reply(ring) end
            return n == 5
        end
        assert.same({ 2 }, run(steps, function() return 1, 0 end))
        assert.same({ 3 }, run(steps, function() return 1, 1 end)) -- it would wait behind another
        assert.same({ 3 }, run(steps, function() return 1000, 0 end)) -- a thousand would wait for it
        assert.same({ 3 }, run(steps)) -- nothing that takes turns
    end)

    it("wait no longer for clients that do not ask again, and try now and then", function()
        local now, real = core.now(), core.now
        local back <close> = setmetatable({}, { __close = function() core.now = real end }) -- luacheck: ignore 211
        core.now = function()
            now = now + 0.0006
            return now
        end
        local rung = {}
        local heard = run(function(n, ring)
            now = now + 0.02
            if n <= 40 then
                loop.spawn(loop.expect) -- in vain
            else
                rung[#rung + 1] = n
                reply(ring)
            end
            return n == 120
        end, function() return 1, 0 end)
        assert.equal(rung[1] + 1, heard[1]) -- it had to wait for a step
        assert.equal(rung[60], heard[60])
        local late = 0
        for i, n in ipairs(heard) do late = late + (n - rung[i]) end
        assert.is_true(late >= 8 and late <= 32)
    end)
end)

describe("a program that ends", function()
    local folder = require("tests.spec.shell_support").folder()
    teardown(function() folder:remove() end)

    it("waits for nothing that is only watched", function()
        local f <close> = assert(io.open(folder:at "p.lua", "w"))
        f:write 'require("llmrun.serve").start { port = 0 } print "over"'
        f:close()
        local out, errors, status = folder:llmrun "p.lua"
        assert.equal("over\n", out)
        assert.equal("", errors)
        assert.equal(0, status)
    end)
end)
