-- The llmrun program from outside: exit statuses, tracebacks, flags, signals.
local core = require "llmrun.core"
local shell = dofile "tests/spec/shell_support.lua"

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

-- What the program says of a command that it refuses, and its status; nothing on standard output.
local function refused(command, text, want)
    local out, err, status = sh("$L " .. command)
    assert.equal("", out)
    assert.matches(text, err, 1, true)
    assert.equal(want, status, command)
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

-- Shell text that waits, a minute at most, until a test holds.
local function wait_until(test) return ("for i in $(seq 600); do %s && break; sleep .1; done; "):format(test) end

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
        _, err, status = sh("$L /tmp")
        assert.equal("llmrun: /tmp is a folder; a program is a file\nsee llmrun --help\n", err)
        assert.equal(2, status)
        with_script("\27Lua", function(path)
            _, err, status = sh("$L " .. path)
            assert.equal("llmrun: " .. path .. ": compiled Lua is not run, only source\n", err)
            assert.equal(1, status)
        end)
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

    it("says that memory ran out", function()
        if os.getenv "LLMRUN_TEST_SANITIZE" then return end -- sanitizers reserve terabytes of addresses
        local _, err, status = sh("ulimit -v 1000000; " ..
            [[echo 'local t = {} while true do t[#t + 1] = ("x"):rep(1 << 20) .. #t end' | $L -]])
        assert.equal("llmrun: not enough memory\n", err)
        assert.equal(1, status)
    end)

    it("raises a limit of the stack that is too low for deep recursion, or names it", function()
        local deep = [[echo 'local function f() return (("x"):gsub("x", f)) end print(pcall(f))' | $L -]]
        local out, err, status = sh("ulimit -S -s 64; " .. deep)
        assert.equal("", err)
        assert.equal(0, status)
        assert.matches("^false\t.*C stack overflow\n$", out)
        local none, why, failed = sh("ulimit -s 64; " .. deep)
        assert.equal("", none)
        assert.equal("llmrun: the stack may have 64 KiB (ulimit -s); at least 1024 are needed\n", why)
        assert.equal(1, failed)
    end)

    it("fails when its output can't be written", function()
        for _, to in ipairs { ">/dev/full", ">&-" } do
            for _, command in ipairs { "echo 'print(1)' | $L - ", "$L --help ", "$L run --help " } do
                local _, err, status = sh(command .. to)
                assert.matches("^llmrun: standard output: [^\n]+\n$", err)
                assert.equal(1, status)
            end
        end
    end)

    it("keeps what is printed out of files when standard output is closed", function()
        local path = os.tmpname()
        sh(([[echo 'local f <close> = io.open("%s", "w") print "text" io.stdout:flush()' | $L - >&-]]):format(path))
        local f <close> = assert(io.open(path))
        assert.equal("", f:read("a"))
        os.remove(path)
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
            local file = os.tmpname()
            local script = "local _ <close> = setmetatable({}, {__close = function() print 'closed' end})\n"
                .. "io.write 'ready ' io.flush()\n" .. text
            with_script(script, function(path)
                -- a second signal ends what swallows the first
                local out, err, status = sh("$L " .. path .. " > " .. file .. " & p=$!; "
                    .. wait_until("[ -s " .. file .. " ]") .. "sleep .1; kill -INT $p; sleep .3; kill -INT $p "
                    .. "2>/dev/null; wait $p; s=$?; cat " .. file .. "; (exit $s)")
                os.remove(file)
                assert.equal(130, status)
                if not name:find("pcall") then
                    assert.equal("ready closed\n", out)
                    assert.matches("llmrun: interrupted", err)
                end
            end)
        end)
    end
end)

local models = require("llmrun.catalog").folder()
local smollm2 = models .. "/" .. require("llmrun.catalog").files.smollm2

describe("llmrun COMMAND on a model #model", function()
    if not core.stat(smollm2) then
        it("needs scripts/fetch_model smollm2", function() error("no file " .. smollm2) end)
        return
    end

    it("run answers, from a flag or standard input, in raw mode too", function()
        local ask = "-s 'You are a helpful assistant. Answer in one short sentence.' --temperature 0 -c 256 -n 20"
        local out, err, status = sh("$L run -p 'What is the capital of France?' --stats " .. ask)
        assert.equal("The capital of France is Paris.\n", out)
        assert.matches("^%d+ prompt tokens %(0 cached%), first token after [%d.]+ s", err)
        assert.equal(0, status)
        assert.equal(out, (sh("echo 'What is the capital of France?' | $L run -p - --temperature=0 -n20 " .. ask)))
        out = sh("$L run --raw -p 'The capital of France is' --temperature 0 -n 3 --ctx 64")
        assert.matches("Paris", out)
    end)

    it("numbers out of range are refused before anything is loaded", function()
        for flags, text in pairs {
            ["serve --port 99999"] = "--port: 0 to 65535 expected, got 99999",
            ["serve --port -1"] = "--port: 0 to 65535 expected, got -1",
            ["serve --max-num-seqs 0"] = "--max-num-seqs: 1 to 4096 expected, got 0",
            ["serve --max-num-batched-tokens 65537"] = "--max-num-batched-tokens: 1 to 65536 expected, got 65537",
            ["serve --max-model-len 0"] = "--max-model-len: 1 to 268435456 expected, got 0",
            ["serve --max-queue 0"] = "--max-queue: at least 1 expected, got 0",
            ["serve --kv-memory 0"] = "--kv-memory: above 0 expected, got 0",
            ["serve --kv-memory 1e999"] = "--kv-memory: number expected, got '1e999'",
            ["serve --request-timeout -1"] = "--request-timeout: above 0 expected, got -1",
            ["serve --drain-timeout -0.5"] = "--drain-timeout: at least 0 expected, got -0.5",
            ["serve --threads 257"] = "--threads: 0 to 256 expected, got 257",
            ["run --temperature -1"] = "--temperature: at least 0 expected, got -1",
            ["run --top-p 1.5"] = "--top-p: 0 to 1 expected, got 1.5",
            ["bench --repeat 0"] = "--repeat: at least 1 expected, got 0",
            ["bench --url http://127.0.0.1:1 --rate 0"] = "--rate: above 0 expected, got 0",
        } do
            refused(flags .. " -m /no/such/model", text, 2)
        end
    end)

    it("serve refuses what can't be before it loads models", function()
        local other = assert(core.http_new { port = 0 })
        for flags, text in pairs {
            ["--port " .. other:port()] = "Address already in use",
            ["--port 0 --policy fare"] = "--policy fare: no policy 'fare'; there are fcfs",
            ["--port 0 --policy /no/such.lua"] = "--policy /no/such.lua: cannot open /no/such.lua",
            ["--port 0 --policy default"] = "no file '/no/such/model'",
            ["--port 0 --allow-scripts --script-limit x"] = "--script-limit x: NAME=NUMBER expected",
        } do
            local _, err, status = sh("$L serve -m /no/such/model " .. flags)
            assert.matches(text, err, 1, true)
            assert.is_true(status > 0, flags)
        end
        other:close()
    end)

    it("serve reads a policy's file once", function()
        with_script("io.stderr:write('(read)\\n') return { schedule = function(_, step) step:serve() end }",
            function(path)
                local log = os.tmpname()
                local out = sh("$L serve --port 0 --no-attach --max-model-len 64 --policy " .. path .. " 2> " .. log .. " & p=$!; "
                    .. wait_until("grep -q serving " .. log) .. "kill $p; wait $p; cat " .. log)
                os.remove(log)
                assert.matches("^%(read%)\nllmrun: serving", out)
                assert.is_nil(out:match "%(read%).*%(read%)")
            end)
    end)

    it("run reports what is wrong, without a traceback", function()
        for command, text in pairs {
            ["$L run"] = "llmrun run: no prompt; give one with %-p",
            ["$L run -p x --top-k -5 --ctx 64"] = "llmrun run: top_k = %-5 is below %-1",
            ["$L run -p x --temprature 1"] = "unknown flag %-%-temprature %(did you mean %-%-temperature%?%)",
            ["$L run -p x --ctx abc"] = "%-%-ctx: integer expected, got 'abc'",
            ["$L run -p x --compute f64"] = "%-%-compute: one of [%w, ]+ expected, got 'f64'",
            ["$L run -p"] = "%-%-prompt needs a value",
            ["$L run -p x --threads 4294967297"] = "%-%-threads: 0 to 256 expected, got 4294967297",
            ["$L run -p x --ctx -1"] = "llmrun run: %-%-ctx: 1 to 268435456 expected, got %-1",
            ["$L run -p x --ctx 99999999999999"] = "%-%-ctx: 1 to 268435456 expected",
            ["$L run -p x --block-size 0"] = "llmrun run: %-%-block%-size: 1 to 256 expected, got 0",
            ["$L bench --block-size 257"] = "llmrun bench: %-%-block%-size: 1 to 256 expected, got 257",
            ["$L serve --block-size 0"] = "llmrun serve: %-%-block%-size: 1 to 256 expected, got 0",
            ["$L run -p x --ctx 64 --trace /no/such/folder/x"] = "llmrun run: /no/such/folder/x: .*No such file",
            ["$L run -p @/tmp"] = "llmrun run: /tmp: Is a directory",
            ["$L run -p x --template /tmp"] = "llmrun run: /tmp: Is a directory",
            ["$L run -p - < /"] = "llmrun run: standard input: Is a directory",
            ["$L tokenize -p @/tmp"] = "llmrun tokenize: /tmp: Is a directory",
            ["$L tokenize < /"] = "llmrun tokenize: standard input: Is a directory",
            ["$L perplexity -f /tmp"] = "llmrun perplexity: /tmp: Is a directory",
            ["$L bench --replay /tmp"] = "llmrun bench: /tmp: Is a directory",
            ["$L run -p x extra"] = "unexpected argument 'extra'",
            ["$L run -m nothing -p x"] = "no file 'nothing', and no model of that name",
            ["$L run -m /dev/null -p x"] = "/dev/null",
            ["LLMRUN_MODELS=/nowhere $L run -p x"] = "run scripts/fetch_model smollm2",
            ["$L run -p x -c 20 --system \"$(printf 'x %.0s' $(seq 50))\""] = "tokens",
        } do
            local out, err, status = sh(command)
            assert.equal("", out)
            assert.matches(text, err)
            assert.not_matches("traceback", err)
            assert.is_true(status == 1 or status == 2)
        end
    end)

    it("--watch takes over a policy's file that is saved meanwhile; the answer stays the same", function()
        local function policy(name)
            return "return { name = '" .. name .. "', schedule = function(_, step) step:serve() end }"
        end
        with_script(policy "one", function(path)
            local out = os.tmpname()
            local n = os.getenv "LLMRUN_TEST_SANITIZE" and 30 or 250 -- there a token takes ten times as long
            local story = "$L run -p 'Write a story.' --temperature 0 --ctx 512 -n " .. n
            local _, err, status = sh(story .. " --policy " .. path .. " --watch > " .. out .. " & p=$!; "
                .. wait_until("[ -s " .. out .. " ]") .. "echo \"" .. policy "two" .. "\" > " .. path .. "; wait $p")
            assert.equal(0, status)
            assert.matches("policy 'two' is read again from", err)
            local f <close> = assert(io.open(out))
            assert.equal((sh(story)), f:read("a"))
            os.remove(out)
        end)
    end)

    it("--trace writes what Perfetto and Chrome read", function()
        local path = os.tmpname()
        local _, err, status = sh("$L run -p Hello -n 3 --ctx 128 --policy fcfs --trace " .. path)
        assert.equal(0, status, err)
        local f <close> = assert(io.open(path))
        local events = require("cjson").decode(f:read("a"))
        os.remove(path)
        local seen, last = {}, 0
        for _, e in ipairs(events) do
            assert.is_true(type(e.pid) == "number" and type(e.tid) == "number" and type(e.name) == "string")
            assert.is_true(e.ph == "M" or type(e.ts) == "number")
            if e.ph == "X" then assert.is_true(e.dur >= 0) end
            if e.name == "step" then
                assert.is_true(e.ts >= last and e.args.rows > 0 and e.args.hook_us > 0)
                last = e.ts + e.dur
            end
            local track = e.pid == 1 and e.tid == 1 and "hooks" or e.pid == 2 and "requests" or "engine"
            seen[e.ph .. " " .. track .. " " .. e.name] = (seen[e.ph .. " " .. track .. " " .. e.name] or 0) + 1
        end
        for _, name in ipairs { "step", "forward", "schedule", "results" } do
            assert.equal(3, seen["X engine " .. name], name)
        end
        assert.equal(3, seen["X hooks schedule"])
        assert.equal(1, seen["X requests done"])
        assert.equal(3, seen["C engine KV blocks"])
    end)

    it("chat keeps the conversation; commands work", function()
        local lines = "My name is Bob.\\nWhat is my name?\\n/stats\\n/undo\\n/nope\\n/quit\\nmore\\n"
        local out, err, status = sh("printf '" .. lines .. "' | $L chat --temperature 0 -n 12 --ctx 512")
        assert.equal("", err)
        assert.equal(0, status)
        assert.matches("\n%d+ prompt tokens %([1-9]%d* cached%)", out)
        assert.matches("no command /nope", out)
    end)

    it("Ctrl-C stops an answer and keeps the chat", function()
        local file = os.tmpname()
        local out, _, status = sh("(echo 'Write a very long story.'; " .. wait_until("grep -q stopped " .. file)
            .. "echo /stats) | $L chat --temperature 0 --ctx 4096 > " .. file .. " & p=$!; "
            .. wait_until("[ -s " .. file .. " ]") .. "kill -INT $p; wait $p; s=$?; cat " .. file .. "; (exit $s)")
        os.remove(file)
        assert.matches("%(stopped%)\n%d+ prompt tokens", out)
        assert.equal(0, status)
    end)

    it("Ctrl-C ends run with status 130", function()
        local file = os.tmpname()
        local _, err, status = sh("$L run --temperature 0 -p 'Write a very long story.' --ctx 4096 > " .. file .. " & p=$!; "
            .. wait_until("[ -s " .. file .. " ]") .. "kill -INT $p 2>/dev/null; wait $p")
        os.remove(file)
        assert.equal(130, status)
        assert.equal("llmrun: interrupted\n", err)
    end)

    it("a program's locale leaves numbers their point", function()
        local folder = shell.folder()
        local guard <close> = setmetatable({}, { __close = function() folder:remove() end }) -- luacheck: ignore 211
        local made = os.execute(("localedef -i de_DE -f UTF-8 '%s' >/dev/null 2>&1"):format(folder:at "de_DE.UTF-8"))
        if not made then return pending "no source of the locale de_DE (package locales)" end
        with_script([[
            print(os.setlocale "de_DE.UTF-8" ~= nil, os.setlocale("de_DE.UTF-8", "numeric"), os.date("%B", 0))
            local json = require "llmrun.json"
            print(1.5, json.encode { 1.5 }, json.decode("[2.5]")[1], load "return 0.5"())]], function(path)
            assert.equal("true\tnil\tJanuar\n1.5\t[1.5]\t2.5\t0.5\n", (sh(("LOCPATH='%s' $L "):format(folder.path) .. path)))
        end)
    end)

    it("Ctrl-C that nobody took note of ends what waits then", function()
        for what, text in pairs {
            ["for a descriptor"] = [[
                local server <close> = require("llmrun").serve { port = 0, log = function() end }
                loop.wait(loop.ticket(), "x")]],
            ["for a time"] = "llm.sleep(50)",
        } do
            with_script([[
                local llm, loop = require "llmrun", require "llmrun.loop"
                pcall(function()
                    io.popen("kill -INT $PPID"):close()
                    while true do end
                end)
                io.stdout:write "on" io.stdout:flush()
                ]] .. text, function(path)
                local out, err, status = sh("timeout 20 $L " .. path)
                assert.same({ "on", 130 }, { out, status }, what)
                assert.matches("llmrun: interrupted\n", err, 1, true)
            end)
        end
    end)

    it("Ctrl-C at any moment of a command is said in one line", function()
        for _, after in ipairs { 0.05, 0.15, 0.25 } do -- while it loads; or not yet, or not any more
            local _, err, status = sh(("$L run -p 'Write a story.' -n 20 > /dev/null & p=$!; sleep %g; kill -INT $p 2>/dev/null; wait $p")
                :format(after))
            assert.equal(status == 0 and "" or "llmrun: interrupted\n", err)
        end
        with_script("it('x', function() print 'on' while true do end end)", function(path)
            local _, err, status = sh("$L test " .. path .. " > /dev/null & p=$!; sleep 1; kill -INT $p; wait $p")
            assert.same({ "llmrun: interrupted\n", 130 }, { err, status })
        end)
    end)

    it("Ctrl-C ends all of a test run, and tells what was run so far", function()
        local sleep = "require('llmrun').sleep(1000)"
        local ways = { -- NOW: that it has come so far
            computes = "it('x', function() NOW while true do end end)",
            waits = "it('x', function() NOW " .. sleep .. " end)",
            ["waits in a branch"] = "it('x', function() NOW require('llmrun').map({ 1 }, function() " .. sleep .. " end) end)",
            ["sets up"] = "describe('x', function() setup(function() NOW " .. sleep .. " end) it('y', function() end) end)",
        }
        for name, way in pairs(ways) do
            local text = ("it('first', function() end) %s it('late', function() end)")
                :format(way:gsub("NOW", "io.open(arg[#arg] .. '.on', 'w'):close()"))
            with_script(text, function(path)
                local out, err, status = sh(("s=%s; $L test --output=TAP $s > $s.out & p=$!; %s kill -INT $p; wait $p; r=$?; "
                    .. "cat $s.out; rm $s.o*; (exit $r)"):format(path, wait_until "[ -e $s.on ]"))
                assert.same({ "llmrun: interrupted\n", 130 }, { err, status }, name)
                assert.matches("^ok 1 %- first\nnot ok 2 .*interrupted.*\n1%.%.2\n$", out, name)
                assert.is_nil(out:find "late", name)
            end)
        end
    end)

    it("inspect shows metadata, tensors, memory", function()
        local out, _, status = sh("$L inspect smollm2 --ctx 2048 --batch 2 --kv-type q8_0")
        assert.equal(0, status)
        assert.matches("general.architecture%s+str%s+llama", out)
        assert.matches("Q4_1%s+%d+%s+%d", out)
        assert.matches("30 layers, width 576", out)
        assert.matches("KV%s+51.6 MB   2 sequences of 2048 tokens, q8_0", out)
        local info = require("cjson").decode((sh("$L inspect -m smollm2 --json")))
        assert.equal(272, #info.tensors)
        assert.equal("llama", info.metadata["general.architecture"])
        assert.equal(188743680, info.kv_bytes)
        out = sh("$L inspect smollm2 --ctx 2048 --batch 2 --kv-type q8_0 --draft smollm2")
        assert.matches("draft%s+%d+%.%d MB   weights", out)
        assert.matches("51%.6 MB   its KV", out)
        assert.equal("llama\n", (sh("$L inspect smollm2 --key general.architecture")))
        assert.equal(1, (select(3, sh("$L inspect smollm2 --key no.such"))))
    end)

    it("inspect names the kernels of each type and shape", function()
        local out = sh("$L inspect smollm2 --kernels --isa scalar")
        assert.matches("kernels of scalar, compute = \"fast\"", out)
        assert.matches("Q4_1%s+1536 x 576%s+60 ", out)
        assert.matches("any rows%s+plain C", out)
        local k = require("cjson").decode((sh("$L inspect smollm2 --kernels --json"))).kernels
        local count = 0
        for _, e in ipairs(k.products) do
            count = count + e.count
            local next_row = 1
            for i, w in ipairs(e.ways) do
                assert.equal(next_row, w.from)
                for rows = w.from, math.min(w.to or 512, 96) do
                    assert.equal(w.way, core.cpu_product(e.type, e.k, rows, "fast"), e.type .. " " .. rows)
                end
                assert.is_true(w.to ~= nil or i == #e.ways)
                next_row = (w.to or 0) + 1
            end
        end
        assert.equal(211, count)
        local _, err, status = sh("$L inspect smollm2 --kernels --isa mmx")
        assert.equal(2, status)
        assert.matches("'mmx' is not one of this machine's", err)
    end)

    it("bench tells the share of the limit that binds", function()
        local out = sh("$L bench --prefill 16 --decode 2 --depth 8 --repeat 1 --json")
        local r = require("cjson").decode(out)
        assert.is_true(r.decode_share >= 0 and r.read_gbps > 0)
        assert.is_true(math.abs(r.decode_gbps / r.read_gbps - r.decode_share) < 0.01)
        -- 96 MB of weights, tied, and a little KV are read for a token
        assert.is_true(math.abs(r.decode_gbps / r.decode_median * 1e9 - 97e6) < 2e6 + 6e6 / r.decode_median)
        assert.is_true(r.prefill_share >= 0 and r.peak_gops > 0)
        -- which is no limit where they stay in a cache
        local cache = core.cpu_cache()
        assert.equal(cache > 97e6 and cache or nil, r.cache)
        local shown = sh("$L bench --prefill 0 --decode 2 --depth 8 --repeat 1")
        assert.equal(cache > 97e6, shown:find("not be the limit: the 9%d MB of weights fit the last%-level cache of") ~= nil)
        assert.is_nil(require("cjson").decode((sh("$L bench --prefill 0 --decode 2 --depth 8 --repeat 1 --json --no-limits")))
            .decode_share)
    end)

    it("tokenize goes there and back", function()
        assert.equal("788 216 34 32 34 38 42 216 35 30 33 36 33 37 41\n",
            (sh("$L tokenize --ids -p 'In 2026: 3.14159'")))
        assert.equal("In 2026\n", (sh("$L tokenize --decode '788 216 34 32 34 38'")))
        assert.equal("4\n", (sh("printf '  x\\n\\n  y' | $L tokenize --count")))
        assert.matches("1  \"<|im_start|>\"  control\n1 tokens", (sh("$L tokenize --special -p '<|im_start|>'")))
        assert.equal(1, (select(3, sh("$L tokenize --decode 99999999"))))
    end)

    it("bench --spec tells how many times as fast, and that the text is the same", function()
        local out, _, status = sh("$L bench --spec --task edit --method off,ngram=3 --batch 1,2 --decode 8 --repeat 2 --json")
        assert.equal(0, status)
        local rows = {}
        for line in out:gmatch "[^\n]+" do rows[#rows + 1] = require("cjson").decode(line) end
        assert.equal(4, #rows)
        for _, r in ipairs(rows) do
            assert.is_true(r.same_text and r.speedup > 0 and r.error >= 0 and #r.rounds == 2)
            assert.equal(r.method == "ngram=3", r.drafted > 0)
            assert.is_true(math.abs(r.speedup - r.tps / r.off_tps) < 1e-9)
        end
        refused("bench --spec --decode 1", "--decode: with --spec at least 2", 2)
        refused("bench --spec --method of", "--method: 'of' is none of", 2)
    end)

    it("bench prints JSON lines", function()
        local out, _, status = sh("$L bench --prefill 32 --decode 4 --depth 16 --repeat 2 --batch 1,3 --json")
        assert.equal(0, status)
        local lines = {}
        for line in out:gmatch("[^\n]+") do lines[#lines + 1] = require("cjson").decode(line) end
        assert.equal(2, #lines)
        assert.is_true(lines[1].prefill_tps > 0 and lines[1].decode_tps > 0)
        assert.equal(3, lines[2].batch)
    end)

    it("perplexity scores a text", function()
        local path = os.tmpname()
        local f = assert(io.open(path, "w"))
        f:write(("The quick brown fox jumps over the lazy dog. "):rep(20))
        f:close()
        local r = require("cjson").decode((sh("$L perplexity -f " .. path .. " --window 64 --json")))
        assert.equal(31 * r.windows, r.scored)
        assert.is_true(r.perplexity > 1 and r.perplexity < 20)
        local whole = require("cjson").decode((sh("$L perplexity -f " .. path .. " --window 64 --whole --json")))
        assert.equal(63 * r.windows, whole.scored)
        os.remove(path)
    end)
end)

describe("llmrun COMMAND", function()
    it("shows help and version", function()
        local out, _, status = sh("$L --help")
        assert.matches("usage: llmrun FILE.lua", out)
        assert.matches("\n%s+test%s+runs busted specs", out)
        assert.equal(0, status)
        for _, name in ipairs(require("llmrun.cli.commands")) do
            assert.matches("\n%s+" .. name .. "%s+%l", out)
            local text, err, st = sh("$L " .. name .. " --help")
            assert.equal("", err)
            assert.equal(0, st)
            assert.matches("usage: llmrun " .. name, text)
            assert.matches("examples:\n  llmrun " .. name, (text:gsub("examples:.*\n(  llmrun)", "examples:\n%1", 1)))
        end
        assert.matches("^llmrun %d+%.%d+%.%d+\n$", (sh("$L --version")))
        assert.equal(2, (select(3, sh("$L"))))
    end)

    it("says that a model is no program", function()
        with_script("GGUF\3\0\0\0", function(path)
            refused(path, path .. " is a model, not a program; llmrun run -m " .. path .. " -p TEXT asks it", 1)
        end)
    end)

    it("says before all the work that a file can't be written", function()
        for command, text in pairs {
            ["imatrix -f README.md -m /no/such/model -o /no/such/folder/x"] = "/no/such/folder/x: cannot create",
            ["imatrix -f README.md -m /no/such/model -o tests"] = "tests is no regular file",
            ["profile -m /no/such/model -o /no/such/folder/x"] = "/no/such/folder/x: No such file",
            ["attach tests"] = "tests: no socket, but a folder",
            ["attach README.md"] = "README.md: no socket, but a file",
        } do
            refused(command, text, 1)
        end
    end)

    it("refuses empty names of files and models, and knows each flag once", function()
        for flags, text in pairs {
            ["run -p x -m ''"] = "--model: MODEL expected, got an empty text",
            ["run -p x --trace ''"] = "--trace: FILE expected, got an empty text",
            ["run -p x --eagle="] = "--eagle: FOLDER expected, got an empty text",
            ["profile -o ''"] = "--out: FILE expected, got an empty text",
            ["serve --policy ''"] = "--policy: FILE expected, got an empty text",
            ["serve -t ''"] = "--threads: N expected, got an empty text",
            ["trace ''"] = "an argument is an empty text",
            ["replay ''"] = "an argument is an empty text",
            ["inspect ''"] = "an argument is an empty text",
        } do
            refused(flags, text, 2)
        end
        for _, name in ipairs(require("llmrun.cli.commands")) do
            local seen = {}
            for flag in sh("$L " .. name .. " --help"):gmatch "\n  [- ][%a ][, ] (%-%-%S+)" do
                assert.is_nil(seen[flag], name .. " " .. flag)
                seen[flag] = true
            end
        end
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
