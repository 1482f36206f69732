-- What goes wrong outside of the program: it is killed while it writes, the disk is full, a model's file is cut while it
-- is mapped, memory runs out at any moment. Clear errors, nothing damaged or left behind, and others go on.

local core = require "llmrun.core"
local json = require "llmrun.json"
local llm = require "llmrun"
local shell = dofile "tests/spec/shell_support.lua"
local support = dofile "tests/spec/arch_support.lua"
local S = dofile "tests/spec/serve_support.lua"

local sanitized = os.getenv "LLMRUN_TEST_SANITIZE"
local folder

local function put(name, text) folder:put(name, text) end

local function get(name) return assert(folder:get(name)) end

local function names()
    local list = core.list(folder.path)
    table.sort(list)
    return list
end

setup(function()
    folder = shell.folder()
    support.write(folder:at "tiny.gguf", support.case "llama")
end)
teardown(function() folder:remove() end)

local function load(name) return llm.load(folder:at(name), { threads = 1, ctx = 64, kv = { block_size = 4 } }) end

describe("a program that is ended while it writes a model", function()
    for _, signal in ipairs { "KILL", "TERM", "INT", "HUP", "USR1", "PIPE" } do
        it("by SIG" .. signal, function()
            put("out.gguf", "old")
            put("write.lua", [[
                local core = require "llmrun.core"
                local w = assert(core.gguf_writer("out.gguf", 1))
                assert(w:put("general.name", "str", "x") and w:tensor("t", "F32", { 1 << 18 }))
                assert(w:data(("x"):rep(1 << 19)))
                io.open("ready", "w"):close()
                while true do core.sleep(10) end
            ]])
            local before = names()
            local _, errors = folder:llmrun(([[write.lua >/dev/null 2>&1 & pid=$!
                while ! [ -e ready ]; do sleep 0.02; done
                kill -STOP $pid; kill -CONT $pid; kill -%s $pid; wait $pid 2>/dev/null; rm -f ready; true]]):format(signal))
            assert.equal("", errors)
            assert.equal("old", get "out.gguf")
            local after = {}
            for _, n in ipairs(names()) do after[#after + 1] = n ~= "errors" and n or nil end
            for i = #before, 1, -1 do if before[i] == "errors" then table.remove(before, i) end end
            assert.same(before, after)
        end)
    end
end)

describe("a disk without room", function()
    --- Files of the program and what it starts may have 16 KiB: as a full disk, but for the error's text.
    local function short_of_room(line)
        local p <close> = assert(io.popen(("cd '%s'; ulimit -f 16; '%s' %s 2>&1; echo \"|$?\""):format(folder.path,
            core.executable(), line)))
        return p:read("a"):match "^(.*)|(%d+)\n$"
    end

    it("leaves an old model as it was", function()
        put("out.gguf", "old")
        local out, status = short_of_room "quantize -q tiny.gguf out.gguf --type F32"
        assert.equal("1", status)
        assert.matches("out.gguf: cannot write", out, 1, true)
        assert.equal("old", get "out.gguf")
    end)

    it("leaves an old session as it was", function()
        put("s.kv", "old")
        put("save.lua", [[
            local llm = require "llmrun"
            local m <close> = llm.scripted { next = function() return 65 end, ctx = 16384 }
            local s <close> = m:session()
            s:append(("x"):rep(8000))
            s:gen { max_tokens = 1 }
            print(pcall(s.save, s, "s.kv"))
            print(s:gen({ max_tokens = 2 }).text)
        ]])
        local out, status = short_of_room "save.lua"
        assert.equal("0", status, out)
        assert.matches("^false\t[^\n]*s.kv: [^\n]*\nAA\n$", out)
        assert.equal("old", get "s.kv")
    end)

    it("is told by the status of a program that is recorded, which goes on", function()
        put("recorded.lua", [[
            local m <close> = require("llmrun").scripted { next = function() return 65 end, ctx = 16384 }
            local s <close> = m:session()
            s:append(("x"):rep(16000))
            print(s:gen({ max_tokens = 2 }).text)
        ]])
        local out, status = short_of_room "--record r.rec recorded.lua"
        assert.equal("1", status, out)
        assert.matches("llmrun: the recording r.rec ends here: [^\n]*\n", out)
        assert.matches("AA\n", out, 1, true)
    end)

    it("leaves an old trace as it was", function()
        put("trace.json", "old")
        put("trace.lua", [[
            local m <close> = require("llmrun").scripted { next = function() return 65 end }
            m:trace "trace.json"
            local s <close> = m:session()
            s:append "x"
            print(#s:gen({ max_tokens = 200 }).text)
            print(pcall(m.trace, m))
        ]])
        local out, status = short_of_room "trace.lua"
        assert.equal("0", status, out)
        assert.matches("^200\nfalse\t[^\n]*trace.json: the trace could not be written to its end: File too large\n$", out)
        assert.equal("old", get "trace.json")
    end)
end)

describe("a model's file that is cut while it is in use", function()
    local function cut(name, bytes)
        assert(os.execute(("truncate -s %d '%s'"):format(bytes, folder:at(name))))
    end

    it("fails the requests of that model, with its name; another goes on", function()
        put("cut.gguf", get "tiny.gguf")
        local m <close> = load "cut.gguf"
        local other <close> = load "tiny.gguf"
        local server <close> = S.start { models = { m, other }, model_names = { [m] = "cut", [other] = "whole" } }
        local function ask(name)
            return S.post(server, "/v1/completions", { model = name, prompt = { 1, 2, 3, 4, 5 }, max_tokens = 4,
                temperature = 0 })
        end
        local want = ask "cut"
        assert.equal(200, want.status)
        cut("cut.gguf", 4096)
        local s <close> = m:session()
        s:append { 9, 8, 7 }
        local ok, err = pcall(s.gen, s, { max_tokens = 2 })
        assert.is_false(ok)
        assert.matches("cut.gguf: can't be read any more", tostring(err), 1, true)
        assert.equal(500, ask "cut".status)
        local r = ask "whole"
        assert.equal(200, r.status)
        assert.equal(want.json.choices[1].text, r.json.choices[1].text)
        m:check()
        other:check()
    end)

    it("is refused when it changed while it was loaded", function()
        put("cut.gguf", get "tiny.gguf")
        local file <close> = assert(core.gguf_open(folder:at "cut.gguf"))
        cut("cut.gguf", 4096)
        local t = file:tensors()
        local ok, err = pcall(file.floats, file, t[#t].name)
        assert.is_false(ok)
        assert.matches("cut.gguf: can't be read any more", err, 1, true)
    end)
end)

describe("too little memory", function()
    it("is an error with numbers; less fits", function()
        if sanitized then return end -- the sanitizer needs an address space without bounds
        put("big.lua", [[
            local llm = require "llmrun"
            local function try(blocks)
                local ok, m = pcall(llm.load, "tiny.gguf", { threads = 1, ctx = 64, kv = { blocks = blocks } })
                print(ok, ok or m.code)
                if ok then
                    local s <close> = m:session()
                    s:append { 1, 2, 3 }
                    print(#s:gen({ max_tokens = 3, ignore_eos = true }).tokens)
                end
            end
            try(1 << 24)
            try(16)
        ]])
        local p <close> = assert(io.popen(("cd '%s'; ulimit -v 1000000; '%s' big.lua 2>&1"):format(folder.path,
            core.executable())))
        assert.equal("false\tno_memory\ntrue\ttrue\n3\n", p:read "a")
    end)
end)

-- Failing allocations ------------------------------------------------------------------------------------------------

--- Lets the n-th allocation of C code (core.fail_alloc), or of Lua (core.fail_lua_alloc), within fn fail, for n = 1, 2,
--- 3, 5, ... until fn is done before that. It may fail with an error that says so, or make do without. Returns how many
--- times it failed.
local function starve(fn, fail)
    local failed, n = 0, 1
    fail = fail or core.fail_alloc
    while true do
        fail(n)
        local ok, err = pcall(fn)
        local left = fail(0)
        if not ok then
            failed = failed + 1
            assert.matches("memory", tostring(err))
        end
        if left > 0 then
            assert.is_true(ok, tostring(err))
            return failed
        end
        n = n + 1 + n // (sanitized and 4 or 12)
    end
end

--- So many allocations of Lua's fail, one after the other: a single one makes Lua collect garbage and try again.
local function lua_fails(count)
    return function(n) return core.fail_lua_alloc(n, count) end
end

--- What was begun is given up, at the latest once the collector has found it.
local function nothing_left(m)
    S.eventually(function()
        collectgarbage()
        return m:stats().sequences == 0
    end)
    m:check()
end

describe("an allocation that fails", function()
    it("while a model is loaded", function()
        for _, fail in ipairs { core.fail_alloc, lua_fails(2), lua_fails(40) } do
            assert.is_true(starve(function() load("tiny.gguf"):close() end, fail) > 10)
        end
        load("tiny.gguf"):close()
    end)

    it("in the programs' own Lua, samplers, policies, grammars, branches", function()
        local m <close> = load "tiny.gguf"
        local function gen(opts)
            local s <close> = m:session()
            s:append { 1, 2, 3 }
            for k, v in pairs { max_tokens = 4, ignore_eos = true } do opts[k] = v end
            return table.concat(s:gen(opts).tokens, " ")
        end
        local ways = {
            sampler = function() return gen { sampler = { function(l) l:add(1, -100) end, "greedy" } } end,
            grammar = function() return gen { temperature = 0, regex = "[^q]+" } end,
            policy = function()
                m:use { schedule = function(_, step)
                    for _, list in ipairs { step.running, step.waiting } do
                        for _, r in ipairs(list) do step:run(r) end
                    end
                end, finish = function(_, r) r.last = r.generated_tokens end }
                local text = gen { temperature = 0 }
                m:use(nil)
                return text
            end,
            stream = function()
                local s <close> = m:session()
                s:append { 1, 2, 3 }
                for _ in s:stream { max_tokens = 4, ignore_eos = true, temperature = 0 } do llm.sleep(0) end
                return table.concat(s.result.tokens, " ")
            end,
            branches = function()
                local t = llm.all { function() llm.sleep(0.0001) return 1 end, function()
                    return llm.timeout(1, function() llm.sleep(0.0001) return 2 end)
                end }
                return t[1] + t[2]
            end,
        }
        local log = require("llmrun.policy").log
        require("llmrun.policy").log = function() end -- of hooks that failed
        for name, way in pairs(ways) do
            local want = way()
            for _, count in ipairs { 2, 40 } do
                assert.is_true(starve(function()
                    if way() ~= want then error(name .. ": memory made a difference") end
                end, lua_fails(count)) > 10, name)
                nothing_left(m)
            end
            assert.equal(want, way())
        end
        require("llmrun.policy").log = log
    end)

    it("in sessions, steps, forks, saves", function()
        local m <close> = load "tiny.gguf"
        local function talk()
            local s <close> = m:session()
            s:append { 1, 2, 3, 4, 5, 6 }
            local text = s:gen({ max_tokens = 6, temperature = 0, ignore_eos = true }).tokens
            local f <close> = s:fork()
            f:append { 7 }
            f:gen { max_tokens = 3, temperature = 0.5, seed = 1, ignore_eos = true }
            f:save(folder:at "f.kv")
            local r <close> = m:restore(folder:at "f.kv")
            assert.equal(#f, #r)
            return text
        end
        local want = talk()
        for _, fail in ipairs { core.fail_alloc, lua_fails(2), lua_fails(40) } do
            local got
            assert.is_true(starve(function()
                got = nil
                got = talk()
            end, fail) > 10)
            nothing_left(m)
            assert.same(want, got)
        end
        assert.same(want, talk())
    end)

    it("in the server: that request fails, the next one works", function()
        local m <close> = S.teller({ "Hello", " world" }, {}, function(_, n, model)
            return { [n == 0 and 0 or n == 1 and 1 or model.info.eos] = 50, default = 0 }
        end)
        local server <close> = S.start { models = { m } }
        local body = json.encode { messages = { { role = "user", content = "x" } }, n = 2, max_tokens = 8,
            response_format = { type = "regex", pattern = "Hello( world)?" } }
        local function ask()
            local r = S.post(server, "/v1/chat/completions", body)
            if r.status ~= 200 then error("memory: " .. r.body, 0) end
            return r.json.choices[1].message.content
        end
        ask()
        local function once()
            local ok, got = pcall(ask)
            -- where the listener itself has no memory it closes the connection
            if not ok then error("memory: " .. tostring(got), 0) end
            if not got:find "^Hello" then error(got) end
        end
        for _, fail in ipairs { core.fail_alloc, lua_fails(2), lua_fails(40) } do
            assert.is_true(starve(once, fail) > 5)
            nothing_left(m)
            assert.matches("^Hello", ask())
        end
    end)
end)
