-- Servers that are stopped and let go on, whose log's reader leaves, that may have few files, or no threads.
local core = require "llmrun.core"
local llm = require "llmrun"
local net = require "llmrun.net"
local S = dofile "tests/spec/serve_support.lua"
local shell = dofile "tests/spec/shell_support.lua"
local support = dofile "tests/spec/arch_support.lua"

local folder
setup(function() folder = shell.folder() end)
teardown(function() folder:remove() end)

local function put(name, text) folder:put(name, text) end

local function get(name) return (folder:get(name)) end

--- Starts a program of ours in the folder; after: what its shell line ends with, before: what it begins with. Its
--- process id once it is ready.
local function start(name, text, after, before)
    put(name, text)
    os.execute(("cd '%s'; %s '%s' %s %s &"):format(folder.path, before or "", core.executable(), name, after))
    S.eventually(function() return get "ready" end, 20)
    os.remove(folder:at "ready")
    return (get("ready.pid"):match "%d+")
end

--- All that a program of ours prints; before: what its shell line begins with.
local function run(name, before)
    local p <close> = assert(io.popen(("cd '%s'; %s timeout 60 '%s' %s 2>&1"):format(folder.path, before,
        core.executable(), name)))
    return p:read "a"
end

local function send(signal, pid) return os.execute(("kill -%s %s 2>/dev/null"):format(signal, pid)) end

local READY = [[
    local function ready(text)
        local f = io.open("/proc/self/stat") local pid = f:read "n" f:close()
        f = io.open("ready.pid", "w") f:write(pid) f:close()
        f = io.open("ready.part", "w") f:write(text or "") f:close()
        os.rename("ready.part", "ready")
    end
]]

local SERVER = READY .. [[
    local llm = require "llmrun"
    llm.serve { port = 0, routes = {
        ["GET /slow"] = function(req, res)
            for i = 1, 5 do res:write(i .. "\n") llm.sleep(0.05) end
        end,
        ["GET /log"] = function() error "a line for the log" end,
        ["GET /exec"] = function() return llm.exec({ "sh", "-c", "kill -PIPE $$" }).signal or "none" end,
        ["GET /here"] = function() return "here" end,
    }, on_ready = function(server)
        local f = io.open("port", "w") f:write(server.port) f:close()
        ready()
    end }
]]

describe("a server", function()
    local pid, address
    local function ask(path)
        local c <close> = assert(net.connect(address.host, address.port))
        return assert(net.request(c, { path = path }))
    end
    local function begin(after, before)
        pid = start("serve.lua", SERVER, after, before)
        address = { host = "127.0.0.1", port = math.tointeger(tonumber((get "port"))) }
    end
    after_each(function()
        if pid then send("KILL", pid) end
        pid = nil
    end)

    it("goes on where it was when it is stopped and continued", function()
        begin "2>log"
        local r, stopped
        llm.all {
            function() r = ask "/slow" end,
            function()
                for _ = 1, 5 do
                    send("STOP", pid)
                    llm.sleep(0.02)
                    send("CONT", pid)
                    llm.sleep(0.02)
                end
                stopped = true
            end,
        }
        assert.is_true(stopped)
        assert.equal("1\n2\n3\n4\n5\n", r.body)
        assert.equal("here", ask "/here".body)
        assert.equal("", get "log")
    end)

    it("goes on when nobody reads its log any more; what it starts has its signals as ever", function()
        begin "2>&1 | true"
        assert.equal(500, ask "/log".status)
        assert.equal(500, ask "/log".status)
        send("PIPE", pid)
        assert.equal("here", ask "/here".body)
        assert.equal("13", ask "/exec".body)
    end)

    it("that may have few open files keeps enough of them for its requests; others wait", function()
        begin("2>log", "ulimit -n 40;")
        local held = {}
        for i = 1, 60 do held[i] = assert(net.connect(address.host, address.port)) end
        assert(held[1]:send "GET /exec HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert.equal(200, assert(net.read_head(held[1], 10)).status)
        assert(held[60]:send "GET /here HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert.is_nil(held[60]:recv(0.1))
        for i = 1, 59 do held[i]:close() end
        assert.equal(200, assert(net.read_head(held[60], 10)).status)
        held[60]:close()
        assert.equal("", get "log")
        assert.matches("llm.serve: this process may have 20 open files (ulimit -n); to serve it needs at least",
            run("serve.lua", "ulimit -n 20;"), 1, true)
    end)
end)

describe("a program that can start no threads", function()
    it("is told so wherever it needs one, and does the rest", function()
        local shim = folder:at "shim.so"
        assert(os.execute(("'%s' -shared -fPIC -O1 -o '%s' tests/spec/thread_shim.c"):format(os.getenv "CC" or "cc", shim)))
        support.write(folder:at "tiny.gguf", support.case "llama")
        put("alone.lua", [[
            local llm = require "llmrun"
            local function try(fn, ...)
                local r = table.pack(pcall(fn, ...))
                local text = tostring(r[1] and not r[2] and r[3] or r[2])
                print(text:match "^[^\n]*Resource temporarily unavailable" and "no thread" or text)
            end
            try(llm.load, "tiny.gguf", { threads = 2 })
            try(llm.load, "tiny.gguf", { threads = 1 })
            try(llm.serve, { port = 0 })
            try(require("llmrun.sandbox").run, "while true do end")
            try(require("llmrun.core").call_limited, 1, 0, function() while true do end end)
            try(llm.exec, { "true" })
        ]])
        local out = run("alone.lua", ("LD_PRELOAD='%s' ASAN_OPTIONS=\"$ASAN_OPTIONS:verify_asan_link_order=0\""):format(shim))
        out = out:gsub("table: .*", "table")
        assert.equal("no thread\nllmrun model tiny\nno thread\nno thread\nno thread\ntable", out)
    end)
end)
