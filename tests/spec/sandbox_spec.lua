-- The sandbox: what programs can do in it, each way out tried, each limit hit; the bounded string functions against
-- Lua's.
local llm = require "llmrun"
local core = require "llmrun.core"
local sandbox = require "llmrun.sandbox"

local function raises(pattern, fn, ...)
    local ok, err = pcall(fn, ...)
    assert.is_false(ok)
    assert.matches(pattern, tostring(err), 1, true)
end

--- The program's results; raises if it failed.
local function run(source, opts, ...)
    local r, err = sandbox.run(source, opts, ...)
    if not r then error(err, 2) end
    return table.unpack(r.values, 1, r.values.n)
end

local function fails(source, opts)
    local r, err, code = sandbox.run(source, opts)
    assert.is_nil(r, "it should have failed: " .. source)
    return err, code
end

local function letters(o)
    o = o or {}
    o.next = o.next or function(t) return (t[#t] + 1) % 256 end
    return llm.scripted(o)
end

describe("a program in a sandbox", function()
    it("gets arguments, returns values, prints", function()
        local seen = {}
        local r = sandbox.run([[
            local a, b = ...
            print("hello", a, b.x[2])
            print(nil, true)
            return a .. "!", { list = { 1, 2.5 }, flag = false }, nil
        ]], { args = { "you", { x = { 7, 8 } } }, on_print = function(s) seen[#seen + 1] = s end })
        assert.equal("hello\tyou\t8\nnil\ttrue\n", r.output)
        assert.equal(r.output, table.concat(seen))
        assert.equal(3, r.values.n)
        assert.same({ "you!", { list = { 1, 2.5 }, flag = false } }, { r.values[1], r.values[2] })
        assert.is_true(r.usage.memory > 0 and r.usage.cpu_seconds >= 0)
    end)

    it("has the harmless parts of Lua", function()
        local names = run [[
            local names = {}
            for k in pairs(_G) do names[#names + 1] = k end
            table.sort(names)
            return table.concat(names, " ")
        ]]
        assert.equal("_G _VERSION assert coroutine error getmetatable ipairs json llm load math next os pairs pcall "
            .. "print rawequal rawget rawlen rawset require select setmetatable string table tonumber tostring type "
            .. "utf8 write xpcall", names)
        assert.equal("clock time", run [[
            local n = {}
            for k in pairs(os) do n[#n + 1] = k end
            table.sort(n)
            return table.concat(n, " ")
        ]])
        assert.is_true(math.abs(run "return os.time()" - os.time()) <= 1)
        assert.same({ 6, "3 2 1", "a,b", 5 }, { run [[
            local sum = 0
            for _, v in ipairs { 1, 2, 3 } do sum = sum + v end
            local t = { 3, 1, 2 }
            table.sort(t, function(a, b) return a > b end)
            return sum, table.concat(t, " "), ("a b"):gsub(" ", ","), #table.pack(table.unpack { 1, 2, 3, 4, 5 })
        ]] })
        assert.equal('{"a":[1,null]}', run "return json.encode { a = { 1, json.null } }")
        assert.equal("x", run "return json.decode('[\"x\"]')[1]")
    end)

    it("runs coroutines, closes, metamethods, branches", function()
        assert.same({ 1, 2, 3, "closed" }, { run [[
            local out = {}
            for v in coroutine.wrap(function() for i = 1, 3 do llm.sleep(0) coroutine.yield(i) end end) do
                out[#out + 1] = v
            end
            do
                local x <close> = setmetatable({}, { __close = function() out[#out + 1] = "closed" end })
            end
            return table.unpack(out)
        ]] })
        assert.same({ "a", "b" }, { run [[
            local r = llm.all { function() llm.sleep(0.01) return "a" end, function() return "b" end }
            return r[1], r[2]
        ]] })
        assert.same({ "quick", 2 }, { run [[
            return llm.race { function() llm.sleep(10) end, function() llm.sleep(0.001) return "quick" end }
        ]] })
        assert.same({ "limit" }, { run "return select(3, llm.timeout(0.01, llm.sleep, 100))" })
        assert.same({ false, "handled x" }, { run [[
            return xpcall(function() error("x", 0) end, function(e) return "handled " .. e end)
        ]] })
    end)

    it("works with a model as programs outside do", function()
        local m <close> = letters()
        local r = sandbox.run([[
            local s <close> = llm.model:session()
            s:append("a")
            local r = s:gen { max_tokens = 3, temperature = 0 }
            local f, g = s:fork(2)
            local texts = llm.map({ f, g }, function(x) return x:gen({ max_tokens = 2 }).text end)
            local pieces = {}
            for piece in s:stream { max_tokens = 3 } do pieces[#pieces + 1] = piece end
            f:close()
            g:append("q")
            s:join(g)
            local pick, info = s:select("p", { "r", "z" })
            s:rewind(2)
            return r.text, r.usage.completion_tokens, texts[1], texts[2], table.concat(pieces), pick, info.index,
                s.text, s.len, llm.model.info.n_vocab, table.concat(llm.model:tokenize("ab"), " ")
        ]], { model = m })
        assert.same({ "bcd", 3, "ef", "ef", "efg", "r", 1, "ab", 2, 260, "97 98", n = 11 }, r.values)
        assert.equal(3 + 2 + 2 + 3, r.usage.completion_tokens)
        assert.equal(0, m:stats().sequences)
        assert.is_true(m:check())
    end)

    it("chats", function()
        local m
        m = llm.scripted { eos = "<|im_end|>", next = function(t) return t[#t] == 10 and 88 or m.info.eos end }
        assert.same({ "X", "assistant", 2 }, { run([[
            local s = llm.model:session()
            s:user("hello")
            local r = s:gen()
            return r.text, s.messages[2].role, #s.messages
        ]], { model = m }) })
        m:close()
    end)

    it("errors carry their place and traceback, name the call", function()
        local err, code = fails("local x = nil\nreturn x.field", { name = "user.lua" })
        assert.matches("^sandbox.run: user.lua:2: attempt to index a nil value", err)
        assert.matches("stack traceback", err)
        assert.equal("script", code)
        err, code = fails("return +", { name = "user.lua" })
        assert.matches("user.lua:1: unexpected symbol near", err)
        assert.equal("format", code)
        local m <close> = letters()
        err = fails("local s = llm.model:session()\ns:gen { temprature = 1 }", { model = m, name = "user.lua" })
        assert.matches("s:gen: unknown option 'temprature' (did you mean 'temperature'?)", err, 1, true)
        assert.matches("user.lua:2:", err, 1, true)
        assert.same({ false, "state" }, { run([[
            local s = llm.model:session()
            local ok, e = pcall(s.gen, s)
            return ok, e.code
        ]], { model = m }) })
        err = fails("table.sort({ 2, 1 }, function() llm.sleep(0) end)")
        assert.matches("llm.sleep: can't wait for the engine inside table.sort", err, 1, true)
        err = fails "error(setmetatable({}, { __tostring = function() return 'object' end }))"
        assert.matches("object", err)
        err = fails "llm.spawn(function() error('lost branch') end) llm.sleep(0.01)"
        assert.is_string(err)
    end)

    it("requires modules that it was given, as texts", function()
        assert.same({ 3, true }, { run([[
            local m = require "mine"
            return m.add(1, 2), require "mine" == m
        ]], { modules = { mine = "return { add = function(a, b) return a + b end }" } }) })
        assert.matches("module 'other' is not there", fails "require 'other'")
        assert.matches("mine:1: unexpected symbol", fails("require 'mine'", { modules = { mine = "+" } }))
        assert.matches("requires itself", fails("require 'a'", { modules = { a = "require 'a'" } }))
    end)

    it("names what is wrong with the call", function()
        raises("sandbox.run: a program (text) expected, got nil", sandbox.run)
        raises("sandbox.run: unknown option 'memry' (did you mean 'memory'?)", sandbox.run, "", { memry = 1 })
        raises("sandbox.run: seconds: a number above 0", sandbox.run, "", { seconds = 0 })
        local _, err = sandbox.run("return 1", { args = { print } })
        assert.matches("a function can't be passed", err)
    end)
end)

describe("ways out", function()
    it("reach nothing", function()
        for _, name in ipairs { "io", "debug", "package", "dofile", "loadfile", "collectgarbage", "core", "chunks",
            "string.dump", "os.execute", "os.exit", "os.getenv", "os.remove", "coroutine.step", "llm.load",
            "llm.exec" } do
            assert.equal("nil", run(("return type(%s)"):format(name)), name)
        end
    end)

    it("binary chunks", function()
        local code = string.dump(function() return 1 end)
        local r = sandbox.run("return load(...)", { args = { code } })
        assert.is_nil(r.values[1])
        assert.matches("binary", r.values[2])
        assert.matches("not allowed", run "return select(2, load('\\27Lua', 'x', 'b'))")
        assert.matches("binary", run [[
            local pieces = { "\27", "Lua" }
            return select(2, load(function() return table.remove(pieces, 1) end))
        ]])
        local _, err, kind = sandbox.run(code)
        assert.equal("format", kind)
        assert.matches("binary", err)
    end)

    it("load sees the program's environment only", function()
        assert.equal("nil nil", run "return load('return tostring(io) .. \" \" .. tostring(debug)')()")
        assert.equal(5, run "return load('return x', 'c', 't', { x = 5 })()")
        assert.is_true(run "y = 7 return load('return y')() == 7")
    end)

    it("work that it has others do", function()
        local m <close> = llm.scripted { next = function() return 65 end, ctx = 64 }
        local began = os.clock()
        for _, call in ipairs {
            "llm.model:tokenize(s)", "llm.model:session():append(s)",
            "llm.model:apply_template { { role = 'user', content = s } }",
        } do
            local r, err, code = sandbox.run("local s = ('a'):rep(200000) while true do pcall(function() " .. call
                .. " end) end", { model = m, seconds = 0.1, timeout = 60, sessions = 1 })
            assert.is_nil(r)
            assert.matches("over the limit of processor time", err, 1, true)
            assert.equal("limit", code)
        end
        assert.is_true(os.clock() - began < 60)
        local r, err = sandbox.run("llm.model:tokenize(('a'):rep(5 << 20))", { model = m })
        assert.is_nil(r)
        assert.matches("texts of more than 4 MiB can't be passed at once", err, 1, true)
    end)

    it("finalizers", function()
        assert.matches("finalizers", fails "setmetatable({}, { __gc = function() end })")
        run "local t = setmetatable({}, {}) getmetatable(t).__gc = function() end" -- has no effect in Lua
    end)

    it("metatables of strings and of our objects", function()
        assert.is_false(run "return getmetatable('')")
        local m <close> = letters()
        assert.is_false(run("return getmetatable(llm.model)", { model = m }))
        assert.matches("no fields of your own", fails("llm.model.x = 1", { model = m }))
        assert.matches("a session expected", fails("llm.model:session().gen({})", { model = m }))
        assert.matches("a session expected", fails("llm.model:session().gen(llm.model)", { model = m }))
        assert.equal("nil", run("return type(llm.model.engine)", { model = m }))
        assert.equal("nil", run("return type(llm.model:session().seq)", { model = m }))
    end)

    it("what is the outside's alone", function()
        local m <close> = letters()
        for _, what in ipairs { "s:gen { priority = 5 }", "s:gen { fault = 'error' }", "s:gen { tenant = 'x' }",
            "llm.model:session { salt = 'x' }", "llm.model:session { template = 'x' }" } do
            assert.matches("is not to be had in a sandbox", fails("local s = llm.model:session() s:append 'x' " .. what,
                { model = m }))
        end
        assert.matches("can't be passed", fails(
            "local s = llm.model:session() s:append 'x' s:gen { sampler = function() end }", { model = m }))
        assert.equal("nil", run("local s = llm.model:session() return type(s.save)", { model = m }))
        assert.equal(0, m:stats().sequences)
    end)

    it("objects of another run", function()
        local m <close> = letters()
        -- handles are numbers that the inside could make up; the outside looks at its own list
        run("local s = llm.model:session() return 1", { model = m })
        assert.equal("nil", run "return type(llm.model)")
    end)

    it("values in circles, too deep, too many", function()
        assert.matches("nested too deeply", fails "local t = {} t.t = t return t")
        assert.matches("can't be passed", fails "return function() end")
        assert.matches("can't be passed", fails "return coroutine.create(function() end)")
        assert.matches("can't be passed", fails "return 1, { [{}] = print }")
    end)
end)

describe("isolation", function()
    it("globals don't outlive a run", function()
        run "user = 'A'"
        assert.is_nil(run "return user")
    end)

    it("runs side by side don't see each other", function()
        local r = llm.map({ "A", "B" }, function(name)
            return run([[
                user = ...
                llm.sleep(0.01)
                return user
            ]], { args = { name } })
        end)
        assert.same({ "A", "B" }, r)
    end)

    it("string functions, modules and libraries are each run's own", function()
        run "string.upper = nil table.insert = nil math.floor = nil json.encode = nil llm.map = nil"
        assert.equal("ABC", run "return ('abc'):upper()")
        assert.equal("abc", ("ABC"):lower())
        local modules = { m = "return { n = 0 }" }
        run("require('m').n = 5", { modules = modules })
        assert.equal(0, run("return require('m').n", { modules = modules }))
    end)

    it("the salt keeps prefix caches apart", function()
        local m <close> = letters { kv = { block_size = 4 } }
        local program = [[
            local s = llm.model:session()
            s:append(("secret"):rep(10))
            return s:gen({ max_tokens = 1 }).usage.cached_tokens
        ]]
        assert.equal(0, run(program, { model = m, salt = "a" }))
        assert.is_true(run(program, { model = m, salt = "a" }) > 0)
        assert.equal(0, run(program, { model = m, salt = "b" }))
    end)
end)

describe("memory", function()
    local o = { memory = 8 << 20, seconds = 1 }

    it("is capped, whatever asks for it", function()
        for _, what in ipairs {
            "return ('x'):rep(1e10)", "local s = 'x' while true do s = s .. s end",
            "local t = {} for i = 1, 1e9 do t[i] = i end", "local t = {} while true do t = { t } end",
            "return table.concat(setmetatable({}, { __index = function() return ('y'):rep(1000) end }), '', 1, 1e6)",
            "local f f = function(...) return f(1, ...) end f()", "return #string.format('%99d', 1):rep(1e8)",
            "local co = {} for i = 1, 1e7 do co[i] = coroutine.create(function() end) end",
            "return ('x'):rep(1e6):gsub('x', ('y'):rep(1000))", "return { ('a'):byte(1, -1), utf8.char(65):rep(1e9) }",
        } do
            local err = fails(what, o)
            assert.is_truthy(err:find("memory", 1, true) or err:find("overflow", 1, true) or err:find("too", 1, true)
                or err:find("limit", 1, true), what .. ": " .. err)
        end
        local err, code = fails("return ('x'):rep(1e9)", o)
        assert.matches("over the memory limit of 8 MiB", err)
        assert.equal("limit", code)
        assert.matches("too large", (fails("return ('x'):rep(1e10)", o)))
    end)

    it("can be caught, and does no harm then", function()
        assert.same({ false, 5 }, { run([[
            local ok = pcall(function() return ('x'):rep(1e9) end)
            return ok, 5
        ]], o) })
        assert.matches("does not fit", fails("return 1", { memory = 1 << 20, args = { ("x"):rep(2 << 20) } }))
    end)

    it("is one run's own; the outside does not grow", function()
        collectgarbage() collectgarbage()
        local before = collectgarbage "count"
        for _ = 1, 20 do sandbox.run("local t = {} for i = 1, 1e5 do t[i] = {} end", { memory = 32 << 20 }) end
        collectgarbage() collectgarbage()
        assert.is_true(collectgarbage "count" - before < 500)
        assert.matches("can't be set up", select(2, sandbox.run("return 1", { memory = 10000 })))
    end)
end)

describe("time", function()
    local o = { seconds = 0.06 }

    it("endless loops end, also those that catch errors", function()
        for _, what in ipairs {
            "while true do end", "while true do pcall(function() while true do end end) end",
            "repeat until false", "local function f() return f() end f()",
            "for _ in function() return 1 end do end",
            "xpcall(function() while true do end end, function() while true do end end)",
            "coroutine.wrap(function() while true do end end)()",
            "local co = coroutine.create(function() while true do coroutine.yield() end end) "
                .. "while true do coroutine.resume(co) end",
            "table.sort({ 1, 2, 3 }, function() while true do end end)",
            "('x'):gsub('x', function() while true do end end)",
            "local x <close> = setmetatable({}, { __close = function() while true do end end })",
            "local co = coroutine.create(function() local x <close> = setmetatable({}, { __close = function() "
                .. "while true do end end }) coroutine.yield() end) coroutine.resume(co) coroutine.close(co)",
            "local t = llm.spawn(function() local x <close> = setmetatable({}, { __close = function() "
                .. "while true do end end }) llm.sleep(100) end) llm.sleep(0) t:cancel()",
            "error(setmetatable({}, { __tostring = function() while true do end end }))",
            "print(setmetatable({}, { __tostring = function() while true do end end }))",
            "return setmetatable({}, { __index = function(t, k) return t[k] end }).x",
            "while true do llm.sleep(0) end",
            "while true do load('return 1')() end",
            "llm.all { function() while true do end end, function() while true do end end }",
            "setmetatable(_G, { __index = function() while true do end end }) return missing",
            "local s = setmetatable({}, { __lt = function() while true do end end }) return s < s",
        } do
            local began = os.clock()
            local err, code = fails(what, o)
            assert.is_truthy(code == "limit" or err:find "overflow", what .. ": " .. tostring(err))
            assert.is_true(os.clock() - began < 30, what)
        end
    end)

    it("calls into C that could run for ever don't", function()
        for what, text in pairs {
            ['("a"):rep(1e5):find((".-"):rep(8) .. "z")'] = "pattern matching took more than 10000000 steps",
            ['("a"):rep(1e5):match("(.-)-(.-)-(.-)b")'] = "steps",
            ['("a"):rep(3e4):gsub(("a?"):rep(30) .. "b", "")'] = "steps",
            ['table.insert(setmetatable({}, { __len = function() return 2^53 // 1 | 0 end }), 1, 1)'] = "__len",
            ['table.remove(setmetatable({}, { __len = function() return 1 << 53 end, __metatable = 1 }), 1)'] = "__len",
            ['table.sort(setmetatable({}, { __len = function() return 1 << 30 end }))'] = "__len",
            ['table.move({}, 1, 1 << 60, 2)'] = "too many",
            ['table.concat(setmetatable({}, { __index = tostring }), "", 1, 1 << 60)'] = "too many",
            ['table.unpack({}, 1, 1 << 40)'] = "too many",
        } do
            local began = os.clock()
            local err = fails("return " .. what)
            assert.matches(text, err, 1, true)
            assert.is_true(os.clock() - began < 20, what)
        end
        assert.equal("", run "return (''):rep(1 << 60)")
        assert.equal("", run "return (''):rep(1 << 60, '')")
    end)

    it("a busy program leaves the engine and other programs their turns", function()
        local m <close> = letters()
        local rounds, done = 0, false
        local r = llm.all {
            busy = function() return select(3, sandbox.run("while true do end", { seconds = 0.4 })) end,
            wrapped = function()
                return run("local n = 0 for _ in coroutine.wrap(function() for i = 1, 3e6 do if i % 1e5 == 0 then "
                    .. "coroutine.yield(i) end end end) do n = n + 1 end return n", { seconds = 5 })
            end,
            gen = function()
                local s <close> = m:session()
                s:append "a"
                local text = s:gen({ max_tokens = 20 }).text
                done = true
                return text
            end,
            clock = function()
                while not done do
                    rounds = rounds + 1
                    llm.sleep(0)
                end
            end,
        }
        assert.equal("limit", r.busy)
        assert.equal(30, r.wrapped) -- preempted in a coroutine of its own: its yields still reach its resume
        assert.equal("bcdefghijklmnopqrstu", r.gen)
        assert.is_true(rounds > 3)
    end)

    it("everything together is bounded too", function()
        local began = core.now()
        local err, code = fails("llm.sleep(100)", { timeout = 0.05 })
        assert.equal("limit", code)
        assert.matches("over the limit of 0.05 s", err)
        assert.is_true(core.now() - began < 50)
        local m <close> = llm.scripted { next = function() return 65 end, ctx = 1 << 16 }
        err = fails("local s = llm.model:session() s:append 'x' s:gen { max_tokens = 60000 }",
            { model = m, timeout = 0.05, tokens = 100000 })
        assert.matches("over the limit", err)
        assert.same({ 0, 0 }, { m:stats().running, m:stats().sequences })
    end)

    it("cancelling the run ends all that it began", function()
        local m <close> = llm.scripted { next = function() return 65 end, ctx = 1 << 16 }
        local _, _, code = llm.timeout(0.05, sandbox.run, [[
            local s = llm.model:session()
            s:append("x")
            llm.all { function() s:gen { max_tokens = 60000 } end, function() llm.sleep(1000) end }
        ]], { model = m, tokens = 100000 })
        assert.equal("limit", code)
        assert.same({ 0, 0 }, { m:stats().running, m:stats().sequences })
    end)
end)

describe("other limits", function()
    it("output", function()
        local err = fails("while true do print(('x'):rep(100)) end", { output = 5000 })
        assert.matches("over the limit of 5000 bytes of output", err)
    end)

    it("sessions and tokens", function()
        local m <close> = letters()
        assert.matches("over the limit of 3 sessions",
            fails("for i = 1, 10 do llm.model:session() end", { model = m, sessions = 3 }))
        assert.matches("over the limit of 3 sessions",
            fails("local s = llm.model:session() s:append 'x' s:fork(5)", { model = m, sessions = 3 }))
        assert.equal(20, run("for i = 1, 20 do local s <close> = llm.model:session() s:append 'x' end return 20",
            { model = m, sessions = 1 }))
        assert.same({ "bcde", false }, { run([[
            local s = llm.model:session()
            s:append "a"
            local text = s:gen().text
            return text, (pcall(s.gen, s))
        ]], { model = m, tokens = 4 }) })
        assert.equal(0, m:stats().sequences)
    end)
end)

describe("bounded string functions", function()
    local bounded = core.patterns(1 << 40)

    it("agree with Lua's on all kinds of patterns", function()
        local seed = 12345
        local function random(n)
            seed = (seed * 1103515245 + 12345) & 0x7fffffff
            return (seed >> 8) % n + 1
        end
        local atoms = { "a", "b", "c", ".", "%a", "%d", "%s", "%w", "%p", "%A", "%%", "[ab]", "[^ab]", "[a-c]",
            "[%d_]", "[]]", "[^]]", "[a-]", "(", ")", "()", "^", "$", "%1", "%2", "%bab", "%b()", "%f[%w]", "%f[^a]",
            "1", " ", "-",
            "%", "[", "\0" }
        local suffixes = { "", "", "", "*", "+", "-", "?" }
        local letters_of_text = { "a", "b", "c", "1", "2", " ", "(", ")", "_", "]", "-", "\0", "ab", "aab" }
        local function text(list, n)
            local parts = {}
            for i = 1, random(n) - 1 do parts[i] = list[random(#list)] end
            return parts
        end
        local compared = 0
        for _ = 1, 6000 do
            local p = text(atoms, 7)
            for i = 1, #p do p[i] = p[i] .. suffixes[random(#suffixes)] end
            local pattern, s = table.concat(p), table.concat(text(letters_of_text, 14))
            local init = random(5) == 1 and random(20) - 8 or nil
            local function all(lib)
                local out = { pcall(lib.find, s, pattern, init) }
                out[#out + 1] = "|"
                table.move({ pcall(lib.match, s, pattern, init) }, 1, 40, #out + 1, out)
                out[#out + 1] = { pcall(lib.gsub, s, pattern, "<%0>") }
                out[#out + 1] = { pcall(lib.gsub, s, pattern, "%1", 3) }
                out[#out + 1] = { pcall(function()
                    local got = {}
                    for a, b in lib.gmatch(s, pattern) do got[#got + 1] = tostring(a) .. "," .. tostring(b) end
                    return table.concat(got, ";")
                end) }
                return out
            end
            local function plain(v)
                if type(v) == "table" then
                    for k, x in pairs(v) do v[k] = plain(x) end
                elseif type(v) == "string" then
                    -- where an error is raised from, and which function names itself, differ
                    return (v:gsub("^[^\n]-:%d+: ", ""):gsub("bad argument.-%(", "("))
                end
                return v
            end
            local mine, theirs = plain(all(bounded)), plain(all(string))
            if not pcall(assert.same, theirs, mine) then
                error(("pattern %q on %q"):format(pattern, s))
            end
            compared = compared + 1
        end
        assert.equal(6000, compared)
    end)

    it("agree on the rest of the manual", function()
        for _, lib in ipairs { string, bounded } do
            assert.same({ 3, 4 }, { lib.find("abcd", "cd") })
            assert.same({ 2, 2 }, { lib.find("a.b", ".", 2, true) })
            assert.same({ 1, 0 }, { lib.find("abc", "") })
            assert.same({ 4, 3 }, { lib.find("abc", "", 4) })
            assert.is_nil((lib.find("abc", "", 10)))
            assert.is_nil((lib.find("abc", "b", -1)))
            assert.equal("hello hello world world", (lib.gsub("hello world", "(%w+)", "%1 %1")))
            assert.equal("world hello", (lib.gsub("hello world", "(%w+) (%w+)", "%2 %1")))
            assert.equal("4+5 = x9", (lib.gsub("4+5 = $return 4+5$", "%$(.-)%$", function(s)
                return "x" .. tostring(load(s)())
            end)))
            assert.equal("lua-5.4!", (lib.gsub("$name-$version!", "%$(%w+)", { name = "lua", version = 5.4 })))
            assert.equal("$other", (lib.gsub("$other", "%$(%w+)", {})))
            assert.same({ "xx", 2 }, { lib.gsub("abab", "ab", "x") })
            assert.same({ "k", 2 }, { lib.match("k2", "(%a)()") })
            local pairs_found = {}
            for k, v in lib.gmatch("from=world, to=Lua", "(%w+)=(%w+)") do pairs_found[k] = v end
            assert.same({ from = "world", to = "Lua" }, pairs_found)
        end
        raises("invalid replacement value (a boolean)", bounded.gsub, "a", "a", function() return true end)
        raises("string/function/table expected", bounded.gsub, "a", "a", true)
        raises("pattern too complex", bounded.find, "a", ("a*"):rep(300))
        raises("a number of steps expected", core.patterns, 0)
    end)
end)
