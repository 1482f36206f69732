-- Ways out of the untrusted profile, each tried in a program and in a sampler: what must not be reached, and what must end
-- within the limits of time and memory. sandbox_spec.lua has what is about programs alone.
local core = require "llmrun.core"
local llm = require "llmrun"
local sampler = require "llmrun.sandbox.sampler"
local sandbox = require "llmrun.sandbox"
local tables = require "llmrun.tables"

local SECONDS, MEMORY, STEPS = 0.02, 4 << 20, 100000
local slow = os.getenv "LLMRUN_TEST_SANITIZE" and 20 or 1

--- Bodies of functions that return what they got hold of, or nothing.
local reach = {
    ["globals of the outside"] = [[
        for _, name in ipairs { "io", "debug", "package", "dofile", "loadfile", "collectgarbage", "core", "chunks", "arg",
            "module", "unpack", "loadstring", "cjson", "jit" } do
            if _G[name] ~= nil or rawget(_G, name) ~= nil then return name end
        end]],
    ["dangerous functions of the libraries"] = [[
        for lib, names in pairs { string = { "dump" }, os = { "execute", "exit", "getenv", "remove", "rename", "tmpname",
            "setlocale", "date", "difftime" }, coroutine = { "step", "step_limited", "hold" } } do
            for _, name in ipairs(names) do if _G[lib][name] then return lib .. "." .. name end end
        end]],
    ["the registry, through require"] = [[
        for _, name in ipairs { "io", "os", "debug", "package", "string", "llmrun.core", "llmrun", "llmrun.loop",
            "llmrun.sandbox.inside", "cjson", "lpeg", "../x", "/etc/passwd" } do
            local ok, m = pcall(require, name)
            if ok and type(m) == "table" then return name end
        end]],
    ["the string metatable"] = [[
        local mt = getmetatable ""
        if mt then return "a metatable" end
        if pcall(setmetatable, "", {}) then return "setmetatable on a string" end
        if ("").dump or ("x").format == nil then return "string methods" end]],
    ["metatables of functions, coroutines, numbers, nil"] = [[
        for _, v in pairs { tostring, coroutine.create(function() end), 1, true } do
            if getmetatable(v) then return type(v) end
            if pcall(setmetatable, v, {}) then return "set on a " .. type(v) end
        end
        if getmetatable(nil) then return "nil" end]],
    ["protected metatables"] = [[
        local t = setmetatable({}, { __metatable = "locked" })
        if pcall(setmetatable, t, {}) or getmetatable(t) ~= "locked" then return "a locked metatable" end
        for _, v in pairs(_G) do
            if type(v) == "table" then
                local mt = getmetatable(v)
                if type(mt) == "table" and (mt.__index or mt.__gc) then return "the metatable of a library" end
            end
        end]],
    ["binary chunks"] = [[
        for _, text in ipairs { "\27Lua\x54\0\x19\x93\r\n\x1a\n", "\27", "\27LJ\2", "# x\n\27Lua" } do
            if load(text, "x", "b") or load(text) or load(text, "x", "bt") then return "a binary chunk" end
            local n = 0
            local f = load(function() n = n + 1 return n <= #text and text:sub(n, n) or nil end, "x", "bt")
            if f and text:sub(1, 1) == "\27" then return "a binary chunk in pieces" end
        end
        local ok, f = pcall(load, function() return setmetatable({}, {}) end)
        if ok and f then return "a reader that gives no text" end]],
    ["environments of other functions"] = [[
        local env = {}
        local f = load("return print, _G, _ENV", "x", "t", env)
        local p, g, e = f()
        if p or g or e ~= env then return "an environment" end
        local up = load "return io or debug or package"
        if up() then return "globals by load" end]],
    ["what errors carry"] = [[
        local function look(v)
            if type(v) == "table" and (v.traceback or v.co or v.stack) then return true end
        end
        local ok, e = pcall(error, setmetatable({}, { __index = function(t, k) return _ENV[k] end }))
        if look(rawget(_G, "e")) then return "an error" end
        local _, m = xpcall(function() local x = nil; x() end, function(m) return m end)
        if type(m) ~= "string" then return "an error value" end]],
    ["chunk names that look like the library's"] = [[
        local f = load("while true do end", "@lua/llmrun/loop.lua")
        local co = coroutine.wrap(function() f() end)
        return nil]],
    ["finalizers"] = [[
        if pcall(setmetatable, {}, { __gc = function() end }) then return "__gc" end
        local mt = {}
        local t = setmetatable({}, mt)
        mt.__gc = function() ESCAPED = true end
        t = nil
        for i = 1, 2000 do local _ = { i } end
        if ESCAPED then return "a late __gc ran" end
        for _, mark in ipairs { true, false, 0, "", {}, print } do
            if pcall(setmetatable, {}, { __gc = mark }) then return "a mark for __gc" end
        end
        local hidden = setmetatable({}, { __index = { __gc = print } })
        local u = setmetatable({}, hidden)
        rawset(hidden, "__gc", function() ESCAPED = true end)
        u = nil
        for i = 1, 2000 do local _ = { i } end
        if ESCAPED then return "__gc by way of __index" end]],
    ["weak tables and modes"] = [[
        local t = setmetatable({}, { __mode = "kv" })
        t[1], t.x = {}, function() end
        for _ in pairs(t) do end]],
    ["yields across the border"] = [[
        local co = coroutine.create(function() coroutine.yield("drawn", 1, { fn = 1 }) end)
        local ok, a = coroutine.resume(co)
        if a ~= "drawn" then return "a yield" end]],
    ["names of the border's own messages"] = [[
        if rawget(_G, "requests") or rawget(_G, "pending") or rawget(_G, "config") then return "a local of the inside" end
        if llm and (llm.core or llm.load or llm.exec or llm.http or llm.serve) then return "llm" end]],
    ["numbers that are no sizes"] = [[
        for _, f in ipairs { function() return ("x"):rep(-1) end, function() return ("x"):sub(math.mininteger, math.maxinteger) end,
            function() return table.concat({}, "", math.mininteger, math.maxinteger) end,
            function() return ("x"):byte(math.mininteger, math.maxinteger) end,
            function() return select(math.mininteger) end, function() return utf8.char(-1) end,
            function() return utf8.codepoint("x", math.mininteger) end, function() return string.pack("i17", 1) end,
            function() return string.unpack("s8", "\255\255\255\255\255\255\255\127") end,
            function() return string.format("%" .. ("9"):rep(50) .. "d", 1) end,
            function() return table.unpack({}, math.mininteger, math.maxinteger) end,
            function() return table.move({}, math.mininteger, math.maxinteger, 1) end,
            function() return math.random(0, -1) end, function() return tostring(-0.0 / 0.0) end,
            function() return table.insert({}, math.mininteger, 1) end } do
            pcall(f)
        end]],
}

--- Bodies that must come to an end by a limit (or an error), whatever they catch.
local forever = "setmetatable({}, { __close = function() while true do end end })"
local bounded = {
    ["a close handler"] = "local x <close> = " .. forever,
    ["a close handler of a coroutine that is stopped, in wrap"] =
        "coroutine.wrap(function() local x <close> = " .. forever .. " while true do end end)()",
    ["a close handler of a coroutine that is stopped, in close"] = "local co = coroutine.create(function() local x <close> = "
        .. forever .. " while true do end end) coroutine.resume(co) coroutine.close(co)",
    ["a close handler of a coroutine that waits"] = "local co = coroutine.create(function() local x <close> = " .. forever
        .. " coroutine.yield() end) coroutine.resume(co) coroutine.close(co) while true do end",
    ["close handlers of coroutines, in a callback"] = "table.sort({ 3, 2, 1 }, function() coroutine.wrap(function() "
        .. "local x <close> = " .. forever .. " while true do end end)() end)",
    ["coroutine.close in a loop"] = "while true do local co = coroutine.create(function() end) coroutine.close(co) end",
    ["an error whose text is never done"] = "error(setmetatable({}, { __tostring = function() while true do end end }))",
    ["an error whose fields are never there"] = "error(setmetatable({}, { __index = function() while true do end end }))",
    ["an endless loop"] = "while true do end",
    ["a loop that swallows the limit's error"] = "while true do pcall(function() while true do end end) end",
    ["pcall in pcall, with handlers"] =
        "local function f() return xpcall(f, function() while true do end end) end while true do pcall(f) end",
    ["a coroutine that hides from hooks"] =
        "while true do local co = coroutine.wrap(function() while true do end end) pcall(co) end",
    ["coroutines in coroutines"] =
        "local function f() return coroutine.wrap(f)() end while true do pcall(f) end",
    ["__close that loops"] =
        "while true do pcall(function() local x <close> = setmetatable({}, { __close = function() while true do end end }) "
        .. "error 'x' end) end",
    ["__close of a coroutine that is closed"] =
        "local co = coroutine.create(function() local x <close> = setmetatable({}, { __close = function() while true do end "
        .. "end }) coroutine.yield() end) coroutine.resume(co) coroutine.close(co) while true do end",
    ["error objects with __tostring"] =
        "error(setmetatable({}, { __tostring = function() while true do end end, __name = ('x'):rep(1000) })) ",
    ["metamethods that loop"] =
        "local t = setmetatable({}, { __eq = function() while true do end end, __concat = function() while true do end end,"
        .. " __len = function() while true do end end }) return t .. t",
    ["__index chains"] = "local t = {} for i = 1, 1e9 do t = setmetatable({}, { __index = t }) end return t.x",
    ["sort with a bad order"] =
        "local t = {} for i = 1, 1000 do t[i] = i end while true do pcall(table.sort, t, function() return true end) end",
    ["gsub with a function"] = "while true do (('x'):rep(1000)):gsub('x', function() return 'y' end) end",
    ["patterns that explode"] = "return (('a'):rep(200000)):find(('a-'):rep(20) .. 'b')",
    ["patterns that explode, one after the other"] =
        "while true do pcall(string.find, ('a'):rep(30000), ('a*'):rep(30) .. 'b') end",
    ["gmatch"] = "while true do for _ in (('ab'):rep(10000)):gmatch('.-') do end end",
    ["load in a loop"] = "while true do load('local x = ' .. ('{'):rep(150) .. ('}'):rep(150)) end",
    ["code that nests deeply"] = "return load('return ' .. ('('):rep(100000) .. '1' .. (')'):rep(100000))()",
    ["code with many names"] = "local t = {} for i = 1, 1e7 do t[i] = 'x' .. i .. '=' .. i end return load(table.concat(t, '\\n'))()",
    ["deep recursion"] = "local function f(n) return 1 + f(n + 1) end return f(1)",
    ["deep recursion in C"] = "local function f() return (('x'):gsub('x', f)) end return f()",
    ["string.rep"] = "return #('x'):rep(1 << 40)",
    ["string.rep with a separator"] = "return #('x'):rep(1 << 24, ('y'):rep(1 << 20))",
    ["doubling a string"] = "local s = 'x' while true do s = s .. s end",
    ["doubling, caught"] = "local s = 'x' while true do pcall(function() s = s .. s end) end",
    ["string.format"] = "local s = ('%s'):rep(200) while true do s = s:format(table.unpack((function() local t = {} for i = 1, "
        .. "200 do t[i] = s end return t end)())) end",
    ["string.pack"] = "while true do pcall(string.pack, 's8', ('x'):rep(1 << 22)) end",
    ["table.concat"] = "local t = {} for i = 1, 1000 do t[i] = ('x'):rep(10000) end while true do t[1] = table.concat(t) end",
    ["table.concat of what __index makes up"] =
        "return #table.concat(setmetatable({}, { __index = function() return 'xxxxxxxx' end }), '', 1, 1 << 30)",
    ["table.unpack"] = "while true do pcall(table.unpack, {}, 1, 1 << 30) end",
    ["table.insert at the front"] = "local t = {} while true do table.insert(t, 1, 1) end",
    ["tables in tables"] = "local t = {} while true do t = { t, t } end",
    ["many coroutines"] = "local t = {} while true do t[#t + 1] = coroutine.create(function() end) coroutine.resume(t[#t]) end",
    ["many closures"] = "local t = {} while true do local i = #t t[i + 1] = function() return i end end",
    ["varargs that grow"] = "local function f(...) return f(1, 2, 3, ...) end return f()",
    ["json.encode in circles"] = "local t = {} t.t = t while true do pcall(json.encode, t) end",
    ["json.decode, deep"] = "while true do pcall(json.decode, ('['):rep(100000)) end",
    ["utf8 over long texts"] = "local s = ('x'):rep(1 << 21) while true do utf8.len(s) end",
    ["tostring of huge formats"] = "while true do pcall(string.format, '%99.99f', 1e308) end",
    ["random and arithmetic"] = "local x = 0 while true do x = x + math.random(1, 5) // 1 end",
}

local function model() return llm.scripted { next = function() return 65 end, ctx = 64 } end

--- The outcome of a body as a program: value or nil, error, code.
local function program(body)
    local r, err, code = sandbox.run("return (function() " .. body .. "\nend)()",
        { seconds = SECONDS, memory = MEMORY, steps = STEPS, timeout = 5 * slow })
    if r then return r.values[1], nil end
    return nil, err, code
end

--- The same as a sampler's stage, and as a sampler's main chunk.
local function stage(m, body, at_once)
    local text = "(function() " .. body .. "\nend)()"
    local made, err, code = sampler.new(at_once and ("local r = %s if r then error('GOT ' .. r) end return {}"):format(text)
        or ("return function() local r = %s if r then error('GOT ' .. r) end end"):format(text),
        { seconds = SECONDS, step_seconds = SECONDS, memory = MEMORY, steps = STEPS })
    if not made then return nil, err, code end
    local guard <close> = made -- luacheck: ignore 211
    local s <close> = m:session()
    s:append "x"
    local ok, e = pcall(s.gen, s, { max_tokens = 1, sampler = made.stages })
    if ok then return nil end
    return nil, made.failure or tostring(e), "script"
end

describe("what a script must not reach:", function()
    local m
    setup(function() m = model() end)
    teardown(function() m:close() end)
    for _, name in ipairs(tables.sorted_keys(reach)) do
        it(name, function()
            local got, err = program(reach[name])
            assert.is_nil(err, err)
            assert.is_nil(got)
            for _, at_once in ipairs { false, true } do
                _, err = stage(m, reach[name], at_once)
                assert.is_nil(err, err)
            end
        end)
    end
end)

describe("what must end within its limits:", function()
    local m
    setup(function() m = model() end)
    teardown(function() m:close() end)

    --- Runs fn, which must fail, take little time and leave the process as large as it was.
    local function ends(fn)
        local began = os.clock()
        local got, err = fn()
        assert.is_string(err, "it came to an end by itself: " .. tostring(got))
        local taken = os.clock() - began
        assert.is_true(taken < 2 * slow, ("it took %.1f s"):format(taken))
    end

    for _, name in ipairs(tables.sorted_keys(bounded)) do
        it(name, function()
            local before = core.memory()
            ends(function() return program(bounded[name]) end)
            ends(function() return stage(m, bounded[name]) end)
            if slow == 1 then ends(function() return stage(m, bounded[name], true) end) end
            assert.is_true(core.memory() - before < (slow > 1 and 400e6 or 60e6), "the process has grown")
        end)
    end

    it("and others go on", function()
        assert.equal(3, program "return 1 + 2")
        m:check()
        assert.equal(0, m:stats().sequences)
    end)
end)
