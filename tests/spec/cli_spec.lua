-- The llmrun program from outside: exit statuses, tracebacks, flags, signals.
local core = require "llmrun.core"

local exe = core.executable()

local function quote(s) return "'" .. s:gsub("'", "'\\''") .. "'" end

-- Runs a shell command line with the program as $L: output, errors, status.
local function sh(command)
    local err_path = os.tmpname()
    local p <close> = assert(io.popen(("L=%s; { %s\n} 2>%s; echo \"|$?\""):format(quote(exe), command, err_path)))
    local out, status = p:read("a"):match("^(.*)|(%d+)\n$")
    local f <close> = assert(io.open(err_path))
    local err = f:read("a")
    os.remove(err_path)
    return out, err, tonumber(status)
end

local function with_script(text, fn)
    local path = os.tmpname()
    local f = assert(io.open(path, "w"))
    f:write(text)
    f:close()
    local named = path .. ".lua"
    os.rename(path, named)
    local ok, e = pcall(fn, named)
    os.remove(named)
    if not ok then error(e, 0) end
end

describe("llmrun FILE.lua", function()
    it("passes arguments in ... and arg", function()
        with_script([[print(..., arg[0]:match("%.lua$"), arg[2], #arg, select("#", ...))]], function(path)
            local out, _, status = sh("$L " .. path .. " one 'two words'")
            assert.equal("one\ttwo words\t.lua\ttwo words\t2\t2\n", (out:gsub("^one\t", "one\ttwo words\t", 1)))
            assert.equal(0, status)
        end)
    end)

    it("ends with a traceback and status 1 on an error", function()
        with_script("local function f() error('broken') end\nlocal function g() f() end\ng()", function(path)
            local out, err, status = sh("$L " .. path)
            assert.equal("", out)
            assert.equal(1, status)
            assert.matches("^llmrun: .*%.lua:1: broken\nstack traceback:", err)
            assert.matches(":2: in .*'g'", err)
            assert.not_matches("loop.lua", err)
        end)
    end)

    it("reports a syntax error, a missing file and a wrong command", function()
        with_script("x = = 1", function(path)
            local _, err, status = sh("$L " .. path)
            assert.matches(":1: unexpected symbol near '='", err)
            assert.equal(1, status)
        end)
        local _, err, status = sh("$L /no/such/file.lua")
        assert.matches("/no/such/file.lua", err)
        assert.equal(1, status)
        _, err, status = sh("$L inspct")
        assert.matches("did you mean inspect%?", err)
        assert.equal(2, status)
    end)

    it("reports error objects, failed branches and deadlocks", function()
        local _, err, status = sh(
            "echo 'error(setmetatable({}, {__tostring = function() return [[an object]] end}))' | $L -")
        assert.matches("^llmrun: an object\n", err)
        assert.equal(1, status)
        _, err, status = sh([[echo 'local llm = require "llmrun"; llm.spawn(error, "lost") llm.sleep(0)' | $L -]])
        assert.matches("a branch failed, and nobody waited for it: lost", err)
        assert.equal(1, status)
        _, err, status = sh([[echo 'local l = require "llmrun.loop"; l.wait(l.ticket(), "x")' | $L -]])
        assert.matches("all branches wait", err)
        assert.equal(1, status)
    end)

    it("finds modules beside the script", function()
        local folder = os.tmpname()
        os.remove(folder)
        core.mkdir(folder)
        local function write(name, text)
            local f = assert(io.open(folder .. "/" .. name, "w"))
            f:write(text)
            f:close()
        end
        write("beside.lua", "return 'found'")
        write("main.lua", "print((require 'beside'))")
        local out = sh("$L " .. folder .. "/main.lua")
        assert.equal("found\n", out)
        sh("rm -r " .. folder)
    end)

    it("os.exit sets the status", function()
        local _, _, status = sh("echo 'os.exit(7, true)' | $L -")
        assert.equal(7, status)
    end)

    for name, text in pairs {
        ["a busy loop"] = "while true do end",
        ["a sleep"] = "require'llmrun'.sleep(100)",
        ["a loop in a coroutine"] = "coroutine.wrap(function() while true do end end)()",
        ["a loop around pcall"] = "while true do pcall(function() while true do end end) end",
    } do
        it("Ctrl-C ends " .. name .. " with status 130 and runs close handlers", function()
            local script = "local _ <close> = setmetatable({}, {__close = function() print 'closed' end})\n" .. text
            with_script(script, function(path)
                -- a second signal ends what swallows the first
                local out, err, status = sh("$L " .. path .. " & p=$!; sleep .2; kill -INT $p; sleep .2; kill -INT $p "
                    .. "2>/dev/null; wait $p")
                assert.equal(130, status)
                if not name:find("pcall") then
                    assert.equal("closed\n", out)
                    assert.matches("llmrun: interrupted", err)
                end
            end)
        end)
    end
end)

describe("llmrun COMMAND", function()
    it("shows help and version", function()
        local out, _, status = sh("$L --help")
        assert.matches("usage: llmrun FILE.lua", out)
        assert.matches("\n%s+test%s+runs busted specs", out)
        assert.equal(0, status)
        assert.matches("^llmrun %d+%.%d+%.%d+\n$", (sh("$L --version")))
        assert.equal(2, (select(3, sh("$L"))))
    end)

    it("fails a failing spec, and passes a good one", function()
        with_script("it('x', function() assert.equal(1, 2) end)", function(path)
            assert.not_equal(0, (select(3, sh("$L test " .. path))))
        end)
        with_script("it('x', function() assert.equal(1, 1) end)", function(path)
            local out, _, status = sh("$L test -o TAP " .. path)
            assert.equal(0, status)
            assert.matches("ok 1", out)
        end)
    end)
end)
