-- Consoles in running programs: real sockets, who gets in, hostile and hanging clients, policies tried and switched.
local attach = require "llmrun.attach"
local console = require "llmrun.console"
local core = require "llmrun.core"
local llm = require "llmrun"
local net = require "llmrun.net"
local testing = require "llmrun.testing"

local hf = dofile "tests/spec/hf_support.lua"
local P = dofile "tests/spec/program_support.lua"
local S = dofile "tests/spec/serve_support.lua"
local shell = dofile "tests/spec/shell_support.lua"

local folder = shell.folder()
teardown(function()
    folder:remove()
    hf.clean()
end)

local count = 0

--- A console on a model, in a folder of its own.
local function open(model, opts)
    count = count + 1
    local o = { models = { model }, path = folder:at("s" .. count) .. "/a.sock", log = function() end }
    for k, v in pairs(opts or {}) do o[k] = v end
    return attach.listen(o)
end

local function mode(path)
    local p <close> = assert(io.popen(("stat -c %%a '%s'"):format(path)))
    return p:read "l"
end

local function busy_model() return P.constant { ctx = 4096, max_seqs = 4 } end

--- A request that goes on until it is cancelled.
local function endless(m)
    local s = P.session(m, ("abc"):rep(20))
    local task = llm.spawn(function()
        local guard <close> = s -- luacheck: ignore 211
        return s:gen { max_tokens = 3000 }
    end)
    S.eventually(function() return m:metrics().generation_tokens > 0 end)
    return task
end

describe("a console", function()
    it("shows the engine, and values of Lua", function()
        local m <close> = busy_model()
        local a <close> = open(m)
        local task = endless(m)
        local c <close> = assert(attach.connect(a.path))
        assert.matches("llmrun, process %d+, scripted", c.greeting)
        local function answer(line)
            local text, ok = c:ask(line)
            assert.is_true(ok, text)
            return text
        end
        assert.equal("2", answer "1 + 1")
        assert.equal("nobody waits", answer "queue")
        assert.matches("1 run\nrequest", answer "batch", 1, true)
        assert.matches("group 1: %d+ blocks", answer "blocks")
        assert.matches("depth", answer "tree")
        assert.matches("generation_tokens", answer "metrics")
        assert.matches("default", answer "policy")
        assert.equal("1", answer "model:stats().running")
        assert.equal("a\tb", answer "print('a', 'b')")
        assert.equal("", answer "x = 7")
        assert.equal("7\n\"y\"", answer "x, 'y'")
        assert.matches("queue +requests that wait", answer "help")
        assert.matches("n  model", answer "models", 1, true)
        assert.equal("{ 1, 2, a = { b = true } }", answer "{ 1, 2, a = { b = true } }")
        task:cancel()
    end)

    it("says what is wrong with a line", function()
        local m <close> = busy_model()
        local a <close> = open(m)
        local c <close> = assert(attach.connect(a.path))
        for line, want in pairs {
            ["error 'x'"] = "console:1: x", ["local"] = "<name> expected", ["nothing.at.all"] = "attempt to index",
            ["try no_such"] = "no policy 'no_such'", ["try"] = "a name or a file expected", ["back"] = "nothing was switched",
            ["switch"] = "nothing is in the shadow", ["io.write(1)"] = "a nil value", ["os.exit(1)"] = "a nil value",
            ["model:session():append('x'):gen()"] = "a line of the console can't wait",
            ["llm.sleep(1)"] = "a line of the console can't wait", ["error {}"] = "error object is a table", ["look 7"] = "no model '7'",
        } do
            local text, ok = c:ask(line)
            assert.is_false(ok, line)
            assert.matches(want, text, 1, true)
            assert.is_nil(text:find("llmrun/console.lua", 1, true), text)
            if line:find "^%l+ ?[%w_]*$" then assert.is_nil(text:find("traceback", 1, true), text) end -- a command
        end
        assert.is_true(select(2, c:ask "getmetatable('').__index = nil")) -- of a copy
        local text, ok = c:ask "('x'):rep(5000000)"
        assert.is_true(ok and #text < 5000)
        text = c:ask "for i = 1, 300000 do print('0123456789') end"
        assert.is_true(#text < (1 << 20) + 100)
        assert.matches("... (cut)", text, 1, true)
    end)

    it("that loops for ever, or eats memory, is cut; requests go on", function()
        local m <close> = busy_model()
        local a <close> = open(m, { seconds = 0.02, bytes = 16 << 20 })
        local task = endless(m)
        local c <close> = assert(attach.connect(a.path))
        for _, line in ipairs {
            "while true do end", "while true do pcall(error) end", "local t = {} while true do t[#t + 1] = {} end",
            "(function() while true do local x <close> = nil end end)()", "return ('x'):rep(1 << 40)",
            "('a'):rep(40):find(('a*'):rep(20) .. 'b')",
        } do
            local before = m:metrics().generation_tokens
            local text, ok = c:ask(line)
            assert.is_false(ok, line)
            assert.matches(" of a line", text:gsub("not enough memory", "memory limit of a line"):gsub("resulting string too large",
                "limit of a line"), 1, true)
            S.eventually(function() return m:metrics().generation_tokens > before or task.state ~= "waiting" end)
        end
        local text = c:ask "try { }"
        assert.is_string(text)
        task:cancel()
    end)

    it("can't close the model, nor set what no limit reaches", function()
        local m <close> = busy_model()
        local a <close> = open(m)
        local c <close> = assert(attach.connect(a.path))
        for line, want in pairs {
            ["model:close()"] = "can't close a model, which the program uses",
            ["setmetatable({}, { __gc = print })"] = "can't set __gc",
        } do
            local text, ok = c:ask(line)
            assert.is_false(ok)
            assert.matches(want, text, 1, true)
        end
        assert.equal("{}", (c:ask "setmetatable({}, {})"))
        assert.is_nil(m.closed)
    end)

    it("ends with quit", function()
        local m <close> = busy_model()
        local a <close> = open(m)
        local c <close> = assert(attach.connect(a.path))
        assert.matches("quit", (c:ask "help"), 1, true)
        assert.equal("", (c:ask "quit"))
        assert.is_nil((c:ask "1"))
        S.eventually(function() return next(a.clients) == nil end)
    end)

    it("that hangs up, sends nonsense or never reads holds nothing up", function()
        local m <close> = busy_model()
        local a <close> = open(m)
        local function raw(bytes)
            local conn = assert(net.local_connect(a.path))
            conn:send(bytes)
            return conn
        end
        local line = string.pack(">s4", "('x'):rep(100000)")
        local silent = raw(string.pack(">s4", "for i = 1, 90000 do print 'ten bytes.' end"):rep(50)) -- reads nothing
        local half = raw "\0\0"
        local gone = raw(line)
        gone:close()
        local huge = raw "\x7f\xff\xff\xff"
        local r = P.session(m, "abc"):gen { max_tokens = 300 }
        assert.equal(300, #r.tokens)
        local parts = {}
        while true do
            local piece = huge:recv(2)
            if not piece or piece == "" then break end
            parts[#parts + 1] = piece
        end
        assert.matches("are the most", table.concat(parts), 1, true)
        local c <close> = assert(attach.connect(a.path))
        assert.equal("3", (c:ask "1 + 2"))
        silent:reset()
        half:close()
        huge:close()
        assert.equal("4", (c:ask "2 + 2"))
        S.eventually(function()
            local n = 0
            for _ in pairs(a.clients) do n = n + 1 end
            return n == 1
        end)
    end)

    it("is one of eight at most", function()
        local m <close> = busy_model()
        local a <close> = open(m)
        local list = {}
        for i = 1, 8 do
            list[i] = assert(attach.connect(a.path))
            assert.is_true(list[i].welcome)
        end
        local more = assert(attach.connect(a.path))
        assert.is_false(more.welcome)
        assert.matches("8 consoles are open", more.greeting, 1, true)
        for _, c in ipairs(list) do c:close() end
        S.eventually(function() return next(a.clients) == nil end)
        local c <close> = assert(attach.connect(a.path))
        assert.is_true(c.welcome)
    end)
end)

describe("the socket", function()
    it("is the owner's alone, replaced if it is left over, removed at the end", function()
        local m <close> = busy_model()
        local a = open(m)
        local dir = a.path:match "^(.*)/"
        assert.equal("700", mode(dir))
        assert.equal("600", mode(a.path))
        P.raises("Address already in use", attach.listen, { models = { m }, path = a.path })
        a:close()
        assert.is_nil((core.stat(a.path)))
        local left = assert(core.local_listen(a.path))
        left:close() -- as a killed program leaves it
        local again <close> = attach.listen { models = { m }, path = a.path }
        local c <close> = assert(attach.connect(again.path))
        assert.equal("1", (c:ask "1"))
    end)

    it("is not made where others can look, nor over what is no socket", function()
        local m <close> = busy_model()
        local open_folder = folder:at "open"
        os.execute(("mkdir -m 755 '%s'; mkdir -m 700 '%s'; ln -s '%s' '%s'; touch '%s/file'"):format(open_folder,
            folder:at "mine", folder:at "mine", folder:at "link", folder:at "mine"))
        P.raises("mode 0700", attach.listen, { models = { m }, path = open_folder .. "/a.sock" })
        P.raises("mode 0700", attach.listen, { models = { m }, path = folder:at "link" .. "/a.sock" })
        P.raises("Address already in use", attach.listen, { models = { m }, path = folder:at "mine" .. "/file" })
        P.raises("No such file", attach.listen, { models = { m }, path = folder:at "no/such/a.sock" })
        P.raises("a socket's path has", attach.listen, { models = { m }, path = folder:at "mine/" .. ("x"):rep(200) })
    end)

    it("refuses other users", function()
        local uid = core.ids()
        assert.is_true(attach.allowed(uid))
        assert.is_false(attach.allowed(uid + 1))
        assert.is_false(attach.allowed(65534))
        local exe = core.executable()
        local other = ("setpriv --reuid 65534 --clear-groups '%s'"):format(exe)
        if uid ~= 0 or not os.execute(other .. " --version >/dev/null 2>&1") then return end
        local m <close> = busy_model()
        local logged = {}
        local a <close> = open(m, { log = function(text) logged[#logged + 1] = text end })
        local function try()
            local r = assert(llm.exec(("%s attach '%s' -e 'model:close()'"):format(other, a.path)))
            assert.equal(1, r.status)
            return r.stderr
        end
        assert.matches("Permission denied", try(), 1, true)
        -- if modes fail to keep them out, the system still says who it is
        os.execute(("chmod 755 '%s' '%s'; chmod 666 '%s'"):format(folder.path, a.path:match "^(.*)/", a.path))
        assert.matches("this console is for the user who runs the program", try(), 1, true)
        assert.matches("a connection of user 65534", logged[1], 1, true)
        assert.is_nil(m.closed)
    end)
end)

describe("policies in a running engine", function()
    it("are tried, switched and switched back without losing a request", function()
        local path = folder:at "mine.lua"
        hf.write(path, [[return { name = "mine", schedule = function(p, step)
            p.n = (p.n or 0) + 1
            step:serve(function(r) return -r.id end)
        end }]])
        local m <close> = P.constant { ctx = 2048, max_seqs = 2, max_batch_tokens = 16 }
        m:watch(path)
        local a <close> = open(m)
        local c <close> = assert(attach.connect(a.path))
        local tasks = {}
        for i = 1, 8 do
            tasks[i] = llm.spawn(function()
                local s <close> = P.session(m, ("x"):rep(10 * i))
                return s:gen { max_tokens = 200 }
            end)
        end
        local function answer(line)
            local text, ok = c:ask(line)
            assert.is_true(ok, text)
            return text
        end
        assert.matches("mine, read again when", answer "policy", 1, true)
        assert.matches("shortest_first decides in the shadow", answer "try shortest_first")
        assert.matches("is in the shadow", answer "policy", 1, true)
        llm.sleep(0.01)
        assert.matches("shortest_first in the shadow: %d+ of %d+ steps differ", answer "shadow")
        assert.equal("shortest_first decides, instead of mine; back undoes it", answer "switch")
        assert.equal("nothing is in the shadow; try POLICY begins", answer "shadow")
        assert.equal("fair decides, instead of shortest_first; back undoes it", answer "switch fair")
        local bad, ok = c:ask "switch no_such"
        assert.is_false(ok)
        assert.matches("no policy 'no_such'", bad, 1, true)
        assert.matches("^fair", answer "policy")
        assert.equal("shortest_first decides again", answer "back")
        assert.equal("mine decides again", answer "back")
        assert.matches("mine, read again when", answer "policy", 1, true)
        assert.is_false((select(2, c:ask "back")))
        hf.write(path, [[return { name = "mine, once more", evict = function() return 0 end }]])
        local lines = testing.logged(function()
            for _ = 1, 400 do
                if answer("policy"):find "once more" then break end
                llm.sleep(0.05)
            end
        end)
        assert.matches("policy 'mine, once more' is read again", lines[1], 1, true)
        assert.equal("fair decides, instead of mine, once more; back undoes it", answer "switch fair")
        assert.equal("mine, once more decides again", answer "back")
        answer "try fcfs"
        answer "try off"
        for _, t in ipairs(tasks) do assert.equal(200, #t:wait().tokens) end
        assert.equal(0, m:metrics().policy_failed)
        m:check()
    end)
end)

describe("on the command line", function()
    it("a server is looked into, and leaves no socket behind", function()
        local model = hf.model "llama-bf16"
        local path = folder:at "run/a.sock"
        local pid
        do
            local p <close> = assert(io.popen(("'%s' serve -m '%s' --port 0 --attach-socket '%s' >/dev/null 2>&1 & echo $!")
                :format(core.executable(), model, path)))
            pid = p:read "n"
        end
        S.eventually(function() return core.stat(path) end, 30)
        local out, err, status = folder:llmrun(("attach '%s' -e queue -e 'model.info.arch' -e 'switch fair' -e policy"):format(path))
        assert.equal(0, status, err)
        assert.equal('nobody waits\n"llama"\nfair decides, instead of default; back undoes it\nfair\n', out)
        out, err, status = folder:llmrun(("attach '%s' -e 'while true do end'"):format(path))
        assert.equal(1, status)
        assert.matches("over the time limit of a line", out .. err, 1, true)
        hf.write(folder:at "lines", "1 + 1\nback\nquit\n")
        out, err, status = folder:llmrun(("attach '%s' <lines"):format(path))
        assert.equal("", err)
        assert.equal(0, status)
        assert.equal("2\ndefault decides again\n", out)
        os.execute("kill " .. pid)
        S.eventually(function() return not core.stat(path) end, 30)
        out, err, status = folder:llmrun(("attach '%s'"):format(path))
        assert.equal("", out)
        assert.equal(1, status)
        assert.matches("No such file", err, 1, true)
    end)

    it("a program is looked into; the only one is found by itself", function()
        hf.write(folder:at "p.lua", [[
            local llm = require "llmrun"
            local m <close> = llm.scripted { next = function() return 65 end, name = "little" }
            local s <close> = m:session()
            s:append "x"
            while not stop do s:gen { max_tokens = 20 } s:rewind(1) llm.sleep(0.002) end
        ]])
        local env = ("XDG_RUNTIME_DIR='%s'"):format(folder:at "xdg")
        os.execute(("mkdir -m 700 '%s'"):format(folder:at "xdg"))
        os.execute(("cd '%s'; %s '%s' --attach p.lua >/dev/null 2>&1 &"):format(folder.path, env, core.executable()))
        S.eventually(function() return #(core.list(folder:at "xdg/llmrun") or {}) == 1 end, 30)
        local r
        S.eventually(function()
            r = assert(llm.exec(("%s '%s' attach -e 'model.info.name'"):format(env, core.executable())))
            return r.status == 0
        end, 20)
        assert.equal('"little"\n', r.stdout)
        r = assert(llm.exec(("%s '%s' attach -e 'stop = true' -e 'setmetatable(_ENV, nil)'"):format(env, core.executable())))
        assert.equal(0, r.status, r.stderr)
        r = assert(llm.exec(("%s '%s' attach -e 'load(\"stop = true\")()'"):format(env, core.executable())))
        assert.equal(0, r.status, r.stderr)
        S.eventually(function() return #core.list(folder:at "xdg/llmrun") == 0 end, 20)
        r = assert(llm.exec(("%s '%s' attach"):format(env, core.executable())))
        assert.equal(1, r.status)
        assert.matches("no program with a console runs here", r.stderr, 1, true)
        r = assert(llm.exec(("%s '%s' attach 1"):format(env, core.executable())))
        assert.equal(1, r.status)
        assert.matches("process 1 has no console", r.stderr, 1, true)
    end)

    it("without a folder of the system's there is one of the user's own; nothing is asked in others' folders", function()
        local getenv, base = os.getenv, nil
        local back <close> = setmetatable({}, { __close = function() rawset(os, "getenv", getenv) end }) -- luacheck: ignore 211
        rawset(os, "getenv", function(name)
            if name == "XDG_RUNTIME_DIR" then return base end
            return getenv(name)
        end)
        local uid, pid = core.ids()
        assert.equal(("/tmp/llmrun-%d/%d.sock"):format(uid, pid), attach.default_path())
        do
            local a <close> = attach.listen { models = {} }
            assert.equal(attach.default_path(), a.path)
            local found = {}
            for _, s in ipairs(attach.sockets()) do found[s.pid] = s.path end
            assert.equal(a.path, found[pid])
        end
        base = folder:at "open"
        os.execute(("mkdir -p '%s/llmrun'; chmod 755 '%s/llmrun'; touch '%s/llmrun/1.sock'"):format(base, base, base))
        assert.same({}, attach.sockets())
        assert.has_error(function() attach.listen { models = {} } end)
        os.execute(("chmod 700 '%s/llmrun'"):format(base))
        assert.same({ { path = base .. "/llmrun/1.sock", pid = 1 } }, attach.sockets())
    end)
end)

describe("a console's values", function()
    it("are shown within bounds", function()
        local t = { 1, "two\n", [10] = 1.5, ["a b"] = true }
        t.self = t
        assert.equal('{ 1, "two\\n", [10] = 1.5, ["a b"] = true, self = (as above) }', console.show(t))
        assert.equal("{ a = null }", console.show { a = require("llmrun.json").null })
        local deep = {}
        local at = deep
        for _ = 1, 50 do
            at.x = {}
            at = at.x
        end
        assert.is_true(#console.show(deep) < 200)
        local long = {}
        for i = 1, 1000 do long[i] = i end
        assert.matches("... (1000 items)", console.show(long), 1, true)
        assert.matches("x", console.show(setmetatable({}, { __index = function() error "x" end, __tostring = function()
            return "x"
        end })) .. "x")
    end)
end)
