-- What a limited call can't get away with: Lua's own functions that go on and on inside C, message handlers; and files
-- of the user's that never return.
local branch = require "llmrun.branch"
local core = require "llmrun.core"
local policy = require "llmrun.policy"
local routers = require "llmrun.simulate.routers"
local serve = require "llmrun.cli.serve"
local userfile = require "llmrun.userfile"

local hf = dofile "tests/spec/hf_support.lua"
local P = dofile "tests/spec/program_support.lua"
local shell = dofile "tests/spec/shell_support.lua"
local folder = shell.folder()
teardown(function() folder:remove() end)

local slow = os.getenv "LLMRUN_TEST_SANITIZE" and 30 or 1

--- fn under a limit of 0.1 s and 64 MiB; the first line of its error, or nil. Fails if it took much longer.
local function limited(fn)
    local began = os.clock()
    local ok, err = core.call_limited(0.1, 64 << 20, fn)
    assert.is_true(os.clock() - began < 10 * slow, "it was not stopped in time")
    return not ok and err:match "^[^\n]*" or nil
end

local late = "over the time limit of a hook: 100 ms of processor time"

describe("under a time limit", function()
    local text, pattern = ("a"):rep(40), ("a*"):rep(20) .. "b"

    it("patterns that explode are stopped", function()
        for name, fn in pairs {
            find = function() return text:find(pattern) end,
            match = function() return text:match(pattern) end,
            gsub = function() return text:gsub(pattern, "") end,
            gmatch = function() return text:gmatch(pattern)() end,
        } do
            assert.matches(late, limited(fn), 1, true, name)
        end
    end)

    it("a pcall does not swallow that", function()
        assert.matches(late, limited(function()
            while true do pcall(text.find, text, pattern) end
        end), 1, true)
    end)

    it("a plain search of any length takes time in proportion to it", function()
        assert.is_nil(limited(function() return ("a"):rep(1000000):find(("a"):rep(10000) .. "b", 1, true) end))
    end)

    it("loops over elements that are only claimed are refused", function()
        local many = { __len = function() return 1 << 50 end }
        for name, fn in pairs {
            move = function() return table.move({}, 1, 1 << 50, 2) end,
            move_all = function() return table.move({}, math.mininteger + 1, -1, 1) end,
            insert = function() table.insert(setmetatable({}, many), 1, 0) end,
            remove = function() table.remove(setmetatable({}, many), 1) end,
        } do
            assert.matches("elements are too many", limited(fn), 1, true, name)
        end
        assert.is_nil(limited(function()
            local t = table.move({ 1, 2, 3 }, 1, 3, 2)
            table.insert(t, 1, 0)
            table.remove(t, 1)
            assert(table.concat(t, ",") == "1,1,2,3")
        end))
    end)

    it("long lists are sorted as ever, and no longer than there is time", function()
        local list, n = {}, 600000
        for i = 1, n do list[i] = i * 7919 % n end
        assert.matches(late, limited(function() table.sort(list) end), 1, true)
        local few = table.move(list, 1, 110000, 1, {})
        local ok, err = core.call_limited(20 * slow, 0, table.sort, few)
        assert.is_true(ok, err)
        for i = 2, #few do assert(few[i - 1] <= few[i]) end
        assert.matches("attempt to compare", limited(function()
            few[7] = {}
            table.sort(few)
        end), 1, true)
    end)

    local function forever() while true do end end
    local function closing(fn) return setmetatable({}, { __close = fn }) end

    it("close handlers that loop are stopped, also those of a coroutine that was stopped itself", function()
        local function busy()
            local x <close> = closing(forever) -- luacheck: ignore 211
            forever()
        end
        for name, fn in pairs {
            plain = function() local x <close> = closing(forever) end, -- luacheck: ignore 211
            wrap = function() coroutine.wrap(busy)() end,
            close = function()
                local co = coroutine.create(busy)
                coroutine.resume(co)
                coroutine.close(co)
            end,
            caught = function() while true do pcall(coroutine.wrap(busy)) end end,
            suspended = function()
                local co = coroutine.create(function()
                    local x <close> = closing(forever) -- luacheck: ignore 211
                    coroutine.yield()
                end)
                coroutine.resume(co)
                coroutine.close(co)
            end,
            again_and_again = function() while true do coroutine.close(coroutine.create(forever)) end end,
        } do
            assert.matches(late, limited(fn), 1, true, name)
        end
    end)

    it("a coroutine that was stopped is dead afterwards, and closing it runs nothing", function()
        local co = coroutine.create(function()
            local x <close> = closing(forever) -- luacheck: ignore 211
            forever()
        end)
        limited(function() coroutine.resume(co) end)
        assert.equal("dead", coroutine.status(co))
        assert.same({ false, "cannot resume dead coroutine" }, { coroutine.resume(co) })
        assert.same({ false, "over the time limit" }, { coroutine.close(co) })
    end)

    it("calls with limits in a loop count too", function()
        assert.matches(late, limited(function()
            while true do core.call_limited(10, 0, function() end) end
        end), 1, true)
    end)

    it("a message handler that loops is left out when the time is over, and stopped before", function()
        assert.matches(late, limited(function() xpcall(forever, forever) end), 1, true)
        assert.matches(late, limited(function() xpcall(error, forever) end), 1, true)
        assert.is_nil(limited(function()
            local ok, err = xpcall(error, function(e) return e .. "!" end, "no")
            assert(not ok and err == "no!")
        end))
    end)
end)

describe("a task that may be interrupted", function()
    it("is not slow in the library's own work, which is not interrupted", function()
        local words = {}
        for i = 1, 8000 do words[i] = ('"w%07dx"'):format(i * 7919 % 9999991) end
        local text, sum = "root ::= " .. table.concat(words, " | "), 0
        local function work()
            assert(require("llmrun.grammar").compile { grammar = text })
            for i = 1, 1000000 do sum = sum + i end
        end
        local function seconds(fn)
            local began = core.thread_seconds()
            fn()
            return core.thread_seconds() - began
        end
        local best = math.huge
        for _ = 1, 3 do
            local plain, interrupted = seconds(work), 0
            local co = coroutine.create(work)
            local took = seconds(function()
                while true do
                    local how = core.step_limited(0.005, 30, co)
                    if how == "done" then return end
                    assert.equal("preempted", how)
                    interrupted = interrupted + 1
                end
            end)
            assert.is_true(interrupted > 0) -- in what is the program's
            best = math.min(best, took / plain)
        end
        assert.is_true(best < 6 * slow, ("%.1f times as long"):format(best))
    end)
end)

describe("a finalizer", function()
    local function collected(mt)
        setmetatable({}, mt)
        setmetatable({}, mt)
        collectgarbage()
        collectgarbage()
    end

    it("that loops is stopped, and takes of the time of what it interrupts", function()
        local began, ran = os.clock(), 0
        for _, fn in ipairs {
            function() while true do end end,
            function() while true do pcall(function() while true do end end) end end,
            coroutine.wrap(function() while true do end end),
            function() coroutine.wrap(function() while true do end end)() end,
        } do
            core.call_limited(0.3, 0, collected, { __gc = function(x) ran = ran + 1; fn(x) end })
            core.call_limited(0.3, 0, collected, { __gc = fn })
        end
        assert.is_true(ran >= 4)
        assert.is_true(os.clock() - began < 20 * slow, "it was not stopped in time")
        local again
        function again() setmetatable({}, { __gc = again }) end
        assert.matches("over the time limit", limited(function()
            again()
            while true do collectgarbage() end
        end), 1, true)
        again = nil
    end)

    it("can't be put in the place of another, or of a mark, unseen", function()
        local began, ran = os.clock(), 0
        local function spin()
            ran = ran + 1
            while true do end
        end
        for _, mark in pairs { true, {}, function() end, print } do
            for _, put in pairs {
                function(mt) mt.__gc = spin end,
                function(mt) rawset(mt, "__gc", spin) end,
                function(mt) mt.__gc = setmetatable({}, { __call = spin }) end,
            } do
                local before = ran
                local mt = { __gc = mark }
                core.call_limited(0.03, 0, function()
                    local t = setmetatable({}, mt)
                    assert(mt.__gc == mark and getmetatable(t) == mt)
                    put(mt)
                    t = nil -- luacheck: ignore 311
                    collectgarbage()
                end)
                collectgarbage()
                collectgarbage()
                assert.equal(before + 1, ran)
            end
        end
        assert.is_true(os.clock() - began < 60 * slow, "it was not stopped in time")
        assert.is_nil(limited(function()
            for _, v in pairs { io.stdout, require("lpeg").P(1), core.http_client and core.http_client() } do
                local mt = getmetatable(v)
                assert(mt.__index, "no methods")
                assert(pcall(function() mt.__gc = spin end))
                assert(getmetatable(v) == mt and not pcall(setmetatable, v, {}))
            end
            for _ = 1, 100 do require("lpeg").P(1) end
            io.open("/dev/null"):close()
            collectgarbage()
        end))
    end)

    it("is called as Lua does: once, in the other order, with an object that is whole", function()
        local log, kept, weak = {}, {}, setmetatable({}, { __mode = "k" })
        local mt = { __gc = function(x)
            log[#log + 1] = x.name .. weak[x]
            kept[1] = x
        end }
        local function make(name, meta)
            local t = setmetatable({ name = name }, meta)
            weak[t] = name
            return nil
        end
        local function all()
            collectgarbage()
            collectgarbage()
            local got = table.concat(log, " ")
            log = {}
            return got
        end
        make("a", mt)
        make("b", mt)
        assert.equal("bb aa", all())
        assert.equal("a", kept[1].name)
        kept[1] = nil
        assert.equal("", all())
        make("c", mt)
        assert.equal("cc", all())
        setmetatable(kept[1], mt) -- marked again
        weak[kept[1]] = "-"
        setmetatable(kept[1], mt) -- but not twice
        kept[1] = nil
        assert.equal("c-", all())
        kept[1] = nil
        local unmarked = {}
        make("d", unmarked)
        unmarked.__gc = mt.__gc
        assert.equal("", all())
        local gone = { __gc = mt.__gc }
        make("e", gone)
        gone.__gc = nil
        assert.equal("", all())
        local t = setmetatable({ name = "f" }, mt)
        setmetatable(t, nil)
        t = nil -- luacheck: ignore 311
        assert.equal("", all())
    end)

    it("that fails or takes all memory hurts nobody", function()
        assert.is_nil(limited(function()
            collected { __gc = function() error {} end }
            collected { __gc = function() error() end }
            collected { __gc = function() coroutine.yield() end }
            collected { __gc = function() return table.unpack({}, 1, 1e9), ("x"):rep(1 << 34) end }
        end))
    end)

    it("does what it did, whoever sets it", function()
        local log = {}
        collected { __gc = function(x) log[#log + 1] = type(x) end }
        local mt = debug.setmetatable({}, { __gc = function() log[#log + 1] = "debug" end })
        assert.is_table(mt)
        mt = nil -- luacheck: ignore 311
        collectgarbage()
        collectgarbage()
        assert.same({ "table", "table", "debug" }, log)
        assert.error_matches(function() setmetatable({}) end, "bad argument #2 to 'setmetatable'")
        assert.error_matches(function() setmetatable(1, {}) end, "bad argument #1 to 'setmetatable'")
        local t = setmetatable({}, { __metatable = "locked", __gc = function() end })
        assert.error_matches(function() setmetatable(t, {}) end, "protected metatable")
    end)
end)

describe("without one", function()
    it("nothing repeated for ever is nothing", function()
        assert.equal("", (""):rep(1 << 60))
        assert.equal("", (""):rep(1 << 60, ""))
        assert.equal(",,", (""):rep(3, ","))
        assert.equal("", ("x"):rep(-1))
        assert.error_matches(function() return (""):rep "x" end, "number expected")
    end)

    it("Lua's own functions do what they do, also across waits", function()
        assert.same({ 1, 2, 3 }, (function()
            local t = { 3, 1, 2 }
            table.sort(t)
            return t
        end)())
        local co = coroutine.wrap(function()
            return xpcall(function() return coroutine.yield(1) end, debug.traceback)
        end)
        assert.equal(1, co())
        assert.same({ true, 7 }, { co(7) })
        assert.error_matches(function() ("x"):find "[" end, "malformed pattern")
        assert.error_matches(function() string.find() end, "bad argument #1 to 'find'")
    end)
end)

describe("a file that never returns", function()
    local before = userfile.seconds
    setup(function()
        userfile.seconds = 0.1
        hf.write(folder:at "loop.lua", "local n = 0\nwhile true do n = n + 1 end\n")
        hf.write(folder:at "make.lua", "return function() while true do end end\n")
        hf.write(folder:at "good.lua", "return { schedule = function(_, step) step:default() end }\n")
    end)
    teardown(function() userfile.seconds = before end)

    it("is no policy: the error says where it was", function()
        local p, err = policy.load(folder:at "loop.lua")
        assert.is_nil(p)
        assert.matches("loop.lua:2: over the time limit of loading", err, 1, true)
        p, err = policy.load(folder:at "make.lua")
        assert.is_nil(p)
        assert.matches("make.lua:1: over the time limit of loading", err, 1, true)
        assert.not_matches("userfile", err)
    end)

    it("changes nothing when a policy is read again", function()
        local log, was = {}, policy.log
        policy.log = function(text) log[#log + 1] = text end
        local m <close> = P.constant()
        local path = folder:at "changing.lua"
        hf.write(path, "return { schedule = function(_, step) step:default() end }\n")
        local w = m:watch(path)
        local good = w.status.policy
        hf.write(path, "while true do end -- a file of another length\n")
        w:poll()
        policy.log = was
        assert.equal(good, w.status.policy)
        assert.matches("does not load; the policy stays as it was: .*over the time limit of loading", log[1])
        local s <close> = P.session(m, "x")
        s:gen { max_tokens = 2 }
        assert.equal(2, #s.result.tokens)
    end)

    it("is no router, no template and no architecture", function()
        local r, err = routers.load(folder:at "loop.lua")
        assert.is_nil(r)
        assert.matches("loop.lua:2: over the time limit of loading", err, 1, true)
        local _, _, text = require("llmrun.cli.args").catch(function()
            require("llmrun.cli.common").template(folder:at "loop.lua")
        end)
        assert.matches("loop.lua:2: over the time limit of loading", text, 1, true)
    end)

    it("makes no routes: who waits is told, and then it is over", function()
        serve.routes_time, serve.routes_note = 0.3, 0.1
        local ok, err = pcall(serve.load_routes, folder:at "loop.lua")
        serve.routes_time, serve.routes_note = 600, 10
        assert.is_false(ok)
        assert.matches("loop.lua: timed out after 0.3 s", tostring(err), 1, true)
        assert.is_nil(branch.timeout(0, function() end))
    end)
end)

it("a chat template in Lua that loops fails its message", function()
    local t = require("llmrun.template.builtin").wrap(function() while true do end end)
    local list, err, code = t:segments { messages = {} }
    assert.is_nil(list)
    assert.equal("limit", code)
    assert.matches("over the time limit of a template", err, 1, true)
end)
