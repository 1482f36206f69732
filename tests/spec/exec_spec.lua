-- llm.exec: child processes beside the loop: output, input, limits, what is left behind.
local llm = require "llmrun"
local core = require "llmrun.core"

local function raises(pattern, fn, ...)
    local ok, err = pcall(fn, ...)
    assert.is_false(ok)
    assert.matches(pattern, tostring(err), 1, true)
end

--- Whether a killed process still runs; the kernel may take a moment on a busy machine.
local function alive(pid)
    for _ = 1, 300 do
        if not core.stat("/proc/" .. pid .. "/exe") then return false end
        llm.sleep(0.01)
    end
    return true
end

--- Descriptors that this process has open.
local function open_files()
    local n = 0
    for _ in pairs(core.list("/proc/self/fd")) do n = n + 1 end
    return n
end

describe("llm.exec", function()
    it("gives status and both streams", function()
        local r = llm.exec("echo out; echo err >&2; exit 3")
        assert.same({ 3, "out\n", "err\n", false, false }, { r.status, r.stdout, r.stderr, r.timed_out, r.truncated })
        assert.is_nil(r.signal)
        assert.is_true(r.seconds >= 0)
        r = llm.exec { "printf", "%s|", "a b", "$HOME", 5 }
        assert.equal("a b|$HOME|5|", r.stdout)
        assert.equal(15, llm.exec("kill $$").signal)
    end)

    it("feeds input, also more than a pipe holds, also to who doesn't read it", function()
        local text = ("0123456789abcdef"):rep(20000)
        assert.equal(text, llm.exec({ "cat" }, { stdin = text }).stdout)
        assert.equal("", llm.exec({ "cat" }).stdout)
        local r = llm.exec("exec 0<&-; echo done", { stdin = text })
        assert.equal("done\n", r.stdout)
        assert.equal(0, llm.exec({ "true" }, { stdin = text }).status)
    end)

    it("lets everything else go on", function()
        local m <close> = llm.scripted { next = function() return 65 end }
        local a, b = os.tmpname(), os.tmpname()
        local over <close> = setmetatable({}, { __close = function() -- luacheck: ignore 211
            os.remove(a)
            os.remove(b)
        end })
        local meet = "echo > %s; until [ -s %s ]; do sleep 0.01; done; echo %s"
        local r = llm.all {
            function() return llm.exec(meet:format(a, b, "a"), { timeout = 60 }).stdout end, -- each waits for the other
            function() return llm.exec(meet:format(b, a, "b"), { timeout = 60 }).stdout end,
            function()
                local s <close> = m:session()
                s:append "x"
                return s:gen({ max_tokens = 3 }).text
            end,
        }
        assert.same({ "a\n", "b\n", "AAA" }, r)
    end)

    it("ends what takes too long, with what it has started", function()
        local began = core.now()
        local r = llm.exec("sleep 1000 & echo $!; echo begun; sleep 1000", { timeout = 0.1 })
        assert.is_true(r.timed_out)
        assert.equal(9, r.signal)
        local pid = r.stdout:match("^(%d+)\nbegun\n$")
        assert.is_string(pid)
        assert.is_false(alive(pid))
        assert.is_true(core.now() - began < 500)
    end)

    it("does not wait for those whom a program leaves behind", function()
        local r = llm.exec("sleep 1000 & echo $!", { timeout = 100 })
        assert.equal(0, r.status)
        assert.is_false(r.timed_out)
        assert.is_true(r.seconds < 50)
        local pid = r.stdout:match("^(%d+)\n$")
        llm.sleep(0.02)
        assert.is_false(alive(pid))
    end)

    it("is ended with its branch, and leaves no descriptor", function()
        llm.exec("true")
        local before = open_files()
        for _ = 1, 3 do
            local _, _, code = llm.timeout(0.02, llm.exec, "sleep 1000")
            assert.equal("limit", code)
        end
        llm.exec("echo x")
        llm.exec("/nonexistent/program")
        assert.equal(before, open_files())
        local r = llm.exec { "ls", "/proc/self/fd" } -- and gets none of ours: 0, 1, 2 and the folder
        assert.equal("0\n1\n2\n3\n", r.stdout)
    end)

    it("bounds its output", function()
        local r = llm.exec("yes | head -c 100000; echo end >&2", { max_output = 1000 })
        assert.equal(1000, #r.stdout)
        assert.is_true(r.truncated)
        assert.equal("end\n", r.stderr)
        assert.equal(0, r.status)
    end)

    it("calls hooks as output comes", function()
        local seen, at = {}, {}
        local r = llm.exec("echo a; sleep 0.05; echo b; echo c >&2", {
            on_stdout = function(s) seen[#seen + 1] = s; at[#at + 1] = core.now() end,
            on_stderr = function(s) seen.err = s end,
        })
        assert.equal("a\nb\n", table.concat(seen))
        assert.equal("c\n", seen.err)
        assert.is_true(at[#at] - at[1] > 0.03)
        assert.equal("a\nb\n", r.stdout)
        raises("hook broke", llm.exec, "echo a; sleep 10", { on_stdout = function() error("hook broke") end })
    end)

    it("takes a folder and an environment", function()
        assert.equal("/\n", llm.exec("pwd", { cwd = "/" }).stdout)
        local r = llm.exec('echo "$A|$PATH_GONE|${HOME-none}"', { env = { A = "x y", HOME = false, N = 5 } })
        assert.equal("x y||none\n", r.stdout)
    end)

    it("says what can't be started", function()
        local r, err, code = llm.exec { "/nonexistent/program" }
        assert.is_nil(r)
        assert.equal("llm.exec: /nonexistent/program: No such file or directory", err)
        assert.equal("not_found", code)
        r, err = llm.exec({ "true" }, { cwd = "/nonexistent" })
        assert.is_nil(r)
        assert.matches("/nonexistent: No such file", err)
        assert.equal(127, llm.exec("no_such_program_here 2>/dev/null").status)
    end)

    it("names what is wrong", function()
        raises("llm.exec: a list of program and arguments, or a shell command, expected, got nil", llm.exec)
        raises("llm.exec: the list of program and arguments is empty", llm.exec, {})
        raises("llm.exec: argument 2: text expected, got table", llm.exec, { "a", {} })
        raises("llm.exec: argument 1 holds a zero byte", llm.exec, { "a\0b" })
        raises("llm.exec: unknown option 'timout' (did you mean 'timeout'?)", llm.exec, "x", { timout = 1 })
        raises("llm.exec: timeout: seconds above 0", llm.exec, "x", { timeout = 0 })
        raises("llm.exec: env: 'A=B' is no name", llm.exec, "x", { env = { ["A=B"] = "x" } })
        raises("llm.exec: env.A: text or false expected, got boolean", llm.exec, "x", { env = { A = true } })
        raises("llm.exec: can't wait for the engine inside table.sort", table.sort, { 2, 1 },
            function() llm.exec("true") end)
    end)
end)
