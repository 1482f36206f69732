-- Signals: Ctrl-C reaches whatever the program waits in, whichever thread gets it; two at once are one.
local core = require "llmrun.core"
local shell = dofile "tests/spec/shell_support.lua"

local folder
setup(function() folder = shell.folder() end)
teardown(function() folder:remove() end)

--- A shell line in the folder, with the program as $L: output and errors, status.
local function sh(line)
    local p <close> = assert(io.popen(("cd '%s'; L='%s'; { %s\n} 2>&1; echo \"|$?\"")
        :format(folder.path, core.executable(), line)))
    local out, status = p:read("a"):match "^(.*)|(%d+)\n$"
    return out, tonumber(status)
end

--- Shell text: waits, a minute at most, until a test holds.
local function wait_until(test) return ("for i in $(seq 600); do %s && break; sleep .1; done; "):format(test) end

describe("a name server that does not answer", function()
    local shim
    setup(function()
        shim = folder:at "resolver.so"
        local cc = os.getenv "CC" or "cc"
        assert(os.execute(("'%s' -shared -fPIC -O1 -o '%s' tests/spec/resolver_shim.c"):format(cc, shim)))
        shim = ("LD_PRELOAD='%s' ASAN_OPTIONS=\"$ASAN_OPTIONS:verify_asan_link_order=0\""):format(shim)
    end)

    it("keeps nobody from Ctrl-C, also if it is the thread that looks up which gets the signal", function()
        folder:put("get.lua", [[
            local llm = require "llmrun"
            local _ <close> = setmetatable({}, { __close = function() print "closed" end })
            llm.http.get("http://a.name/", { timeout = 500, connect_timeout = 500 })]])
        local out, status = sh(shim .. " RESOLVER_SHIM_INTERRUPTS=1 timeout 60 $L get.lua")
        assert.same({ "closed\nllmrun: interrupted\n", 130 }, { (out:gsub("\nstack.*", "\n")), status })
    end)

    it("keeps a load test from nothing either", function()
        folder:put("connect.lua", [[
            local llm, net = require "llmrun", require "llmrun.net"
            print(net.connect("a.name", 80, 0.2))
            llm.spawn(function()
                llm.sleep(0.2)
                io.popen("kill -INT $PPID"):close()
            end)
            net.connect("a.name", 80, 500)]])
        local out, status = sh(shim .. " timeout 60 $L connect.lua")
        assert.equal(130, status)
        assert.matches("^nil\ta.name: no address after 0.2 s\tlimit\nllmrun: interrupted\n", out)
    end)

    it("is waited for as long as a request has time", function()
        folder:put("late.lua", [[
            local llm = require "llmrun"
            local _, err, code = llm.http.get("http://a.name/", { timeout = 0.2 })
            print(code, err)]])
        local out, status = sh(shim .. " timeout 60 $L late.lua")
        assert.equal(0, status)
        assert.matches("^limit\t", out)
    end)
end)

describe("Ctrl-C", function()
    it("that came before ends a wait for a key", function()
        folder:put("key.lua", [[
            local core = require "llmrun.core"
            core.catch_interrupts "flag"
            io.popen("kill -INT $PPID"):close()
            while not core.interrupted() do end
            print(core.read(10))
            print(core.interrupted(true), core.interrupted(), core.sleep(0.01), core.read(10, 0.01))]])
        assert.same({ "nil\ntrue\tfalse\ttrue\tnil\n", 0 }, { sh "sleep 60 | timeout 20 $L key.lua" })
    end)

    for name, line in pairs {
        ["a chat whose lines come from a pipe"] = "chat -m smollm2 --ctx 256",
        ["a command that reads its standard input"] = "run -m smollm2 -p - --ctx 256",
    } do
        it("ends " .. name, function()
            local out, status = sh("mkfifo in; $L " .. line .. " < in > out 2>&1 & p=$!; exec 3>in; "
                .. wait_until "[ \"$(cat /proc/$p/wchan)\" = do_sys_poll ] || grep -q ' (llmrun) S ' /proc/$p/stat"
                .. "sleep .3; kill -INT $p; wait $p; s=$?; cat out; rm in out; (exit $s)")
            assert.same({ "llmrun: interrupted\n", 130 }, { out, status })
        end)
    end
end)

describe("a server", function()
    setup(function()
        folder:put("serve.lua", [[
            local llm = require "llmrun"
            local pid = io.open("/proc/self/stat"):read "n"
            llm.serve { port = 0, log = function() end,
                routes = { ["GET /"] = function()
                    os.execute(("(%s) &"):format(arg[1]:gsub("KILL", "kill -" .. arg[2] .. " " .. pid)))
                    llm.sleep(0.5)
                    return "answered"
                end },
                on_ready = function(server)
                    llm.spawn(function() print(llm.http.get("http://localhost:" .. server.port .. "/").body) end)
                end }]])
    end)

    it("answers what has come when a signal comes twice at once, as from timeout and supervisors", function()
        for _, signal in ipairs { "TERM", "INT", "HUP" } do
            local out, status
            for _ = 1, 5 do -- as often as something else comes between the two
                out, status = sh("timeout 60 $L serve.lua 'KILL; sleep .01; KILL' " .. signal)
                if status == 0 then break end
            end
            assert.same({ "answered\n", 0 }, { out, status }, signal)
        end
    end)

    it("ends at once when a signal comes again later", function()
        local out, status = sh "$L serve.lua 'KILL; sleep .2; KILL' TERM"
        assert.equal(143, status)
        assert.not_matches("answered", out)
    end)
end)
