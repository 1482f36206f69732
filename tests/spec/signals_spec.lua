-- Signals that come while a program serves or writes: who stops it and lets it go on, whose reader leaves, who ends it.
local core = require "llmrun.core"
local llm = require "llmrun"
local net = require "llmrun.net"
local S = dofile "tests/spec/serve_support.lua"
local shell = dofile "tests/spec/shell_support.lua"

local folder
setup(function() folder = shell.folder() end)
teardown(function() folder:remove() end)

local function put(name, text)
    local f <close> = assert(io.open(folder:at(name), "wb"))
    f:write(text)
end

local function get(name)
    local f <close> = io.open(folder:at(name), "rb")
    return f and f:read "a"
end

--- Starts a program of ours in the folder; after: what its shell line ends with. Its process id once it is ready.
local function start(name, text, after)
    put(name, text)
    os.execute(("cd '%s'; '%s' %s %s &"):format(folder.path, core.executable(), name, after))
    S.eventually(function() return get "ready" end, 20)
    os.remove(folder:at "ready")
    return (get("ready.pid"):match "%d+")
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
    local function begin(after)
        pid = start("serve.lua", SERVER, after)
        address = { host = "127.0.0.1", port = math.tointeger(tonumber((get "port"))) }
    end
    after_each(function() send("KILL", pid) end)

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
end)
