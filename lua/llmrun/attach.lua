--- llmrun attach, the side of the program that is looked into: a console on a local (Unix) socket.
---
---   local a = attach.listen { models = { m }, path = "/run/user/1000/llmrun/4711.sock" }      a:close()
---
--- Only the user who runs the program gets in: the socket lies in a folder that nobody else can look into, its own mode
--- is 0600, and the system says who connects. A line runs between two steps, with 0.25 s of processor time and 256 MiB
--- at most, and can't wait; answers go out as their reader takes them, and no line is read before the answer to the one
--- before is gone. So neither a loop for ever nor a reader that never reads holds anything up.
---
--- On the wire both sides send frames: a length (4 bytes, the highest first) and that many bytes. A frame of the
--- client's is a line; an answer begins with "+" or, if the line failed, "!". The first frame comes from here: a
--- greeting.

local console = require "llmrun.console"
local core = require "llmrun.core"
local errors = require "llmrun.errors"
local loop = require "llmrun.loop"
local model_class = require "llmrun.model"
local policy = require "llmrun.policy"
local views = require "llmrun.views"

local M = {}

--- Limits of a line.
M.seconds, M.bytes = 0.25, 256 << 20

local MAX_LINE, MAX_CLIENTS = 64 << 10, 8

--- The folder of sockets that nobody named: the system's for this user, else one of his own in /tmp. It is made, and
--- looked at, by listen: who made it first does not matter, as it must be this user's and closed to all others.
function M.folder()
    local base = os.getenv "XDG_RUNTIME_DIR"
    return base and base ~= "" and base .. "/llmrun" or ("/tmp/llmrun-%d"):format((core.ids()))
end

--- The socket that a program of this process id (this one) listens on unless told otherwise.
---@param pid? integer
function M.default_path(pid) return ("%s/%s.sock"):format(M.folder(), pid or select(2, core.ids())) end

-- Commands ------------------------------------------------------------------------------------------------------------

---@class llmrun.Attach
local Attach = {}
Attach.__index = Attach

--- What is in charge of a model's engine, to come back to it.
local function in_charge(model) return { status = model.policy_status, watch = model.policy_watch } end

-- A watch has what it has read last.
local function status_of(charge) return charge.watch and charge.watch.status or charge.status end

local function name_of(charge)
    local status = status_of(charge)
    return status and status.name or "default"
end

local function back_to(model, charge)
    if charge.watch then
        model:use(charge.watch.status.policy)
        loop.add_source(charge.watch)
        model.policy_watch = charge.watch
    else
        model:use(charge.status and charge.status.policy or nil)
    end
end

--- The models that there are now.
local function model_list(self)
    local models = self.owner.models
    return type(models) == "function" and models() or models
end

--- The model that a console looks at.
local function only(self)
    if self.model and self.model.closed then self.model = nil end
    self.model = self.model or model_list(self)[1]
    if not self.model then console.fail "there is no model yet" end
    return self.model
end

local commands = {}

for _, name in ipairs { "queue", "batch", "blocks", "tree", "metrics" } do
    local words = {
        queue = "requests that wait", batch = "requests that run", blocks = "KV blocks and who holds them",
        tree = "the prefix tree", metrics = "counters and times",
    }
    commands[name] = { words[name], function(self) return views[name](only(self).engine) end }
end

commands.models = { "the models; which one is looked at", function(self)
    local rows = {}
    for i, m in ipairs(model_list(self)) do
        local s = m:stats()
        rows[i] = { n = i, name = m.info.name, running = s.running, waiting = s.waiting,
            policy = name_of(in_charge(m)), at = m == self.model and "<" or nil }
    end
    return views.columns(rows, { { "n", "n" }, { "name", "model" }, { "running", "run" }, { "waiting", "wait" },
        { "policy", "policy" }, { "at", "" } })
end }

commands.look = { "looks at another model", function(self, rest)
    local m = model_list(self)[math.tointeger(tonumber(rest)) or 0]
    for _, other in ipairs(model_list(self)) do m = m or (other.info.name == rest and other) end
    if not m then console.fail("no model '%s'; models lists them", rest) end
    self.model, self.console.env.model = m, m
    return "looking at " .. m.info.name
end, "N|NAME" }

commands.policy = { "who decides", function(self)
    local m = only(self)
    local status, watch, lines = status_of(in_charge(m)), m.policy_watch, {}
    lines[1] = (status and status.name or "default (the built-in rule)") .. (watch and ", read again when "
        .. watch.path .. " changes" or "")
    if status and status.last_error then lines[2] = "last failure: " .. status.last_error end
    if status and status.set_aside then lines[#lines + 1] = "it is set aside: the built-in rule decides" end
    if m.shadow then lines[#lines + 1] = m.shadow.name .. " is in the shadow" end
    return table.concat(lines, "\n")
end }

commands.try = { "lets a policy decide in the shadow (off: ends that)", function(self, rest)
    local m = only(self)
    if rest == "off" then
        if not m.shadow then return "nothing is in the shadow" end
        local text = m.shadow:text()
        m.shadow:stop()
        return text
    end
    if rest == "" then console.fail "try POLICY: a name or a file expected" end
    return require("llmrun.shadow").start(m, rest).name .. " decides in the shadow; shadow tells what differs"
end, "POLICY|off" }

commands.shadow = { "how the policy in the shadow differs", function(self)
    local s = only(self).shadow
    return s and s:text() or "nothing is in the shadow; try POLICY begins"
end }

commands.switch = { "puts a policy in charge (none named: the one in the shadow)", function(self, rest)
    local m = only(self)
    local what = rest
    if rest == "" then
        if not m.shadow then
            console.fail "switch POLICY: a name or a file expected, since nothing is in the shadow"
        end
        what = m.shadow.policy
    end
    local before = in_charge(m)
    m:use(what)
    if m.shadow and what == m.shadow.policy then m.shadow:stop() end
    local stack = self.before[m] or {}
    self.before[m] = stack
    stack[#stack + 1] = before
    return ("%s decides, instead of %s; back undoes it"):format(name_of(in_charge(m)), name_of(before))
end, "[POLICY]" }

commands.back = { "puts the policy before in charge again", function(self)
    local m = only(self)
    local stack = self.before[m] or {}
    local charge = stack[#stack]
    if not charge then console.fail "nothing was switched" end
    back_to(m, charge)
    stack[#stack] = nil
    return name_of(charge) .. " decides again"
end }

for _, name in ipairs { "quit", "exit" } do
    commands[name] = { "ends the console (as Ctrl-D does); the program goes on", function(self) self.ends = true end }
end

-- Clients -------------------------------------------------------------------------------------------------------------

local Client = {}
Client.__index = Client

local function frame(text) return string.pack(">s4", text) end

function Client:close()
    if self.closed then return end
    self.closed = true
    loop.unwatch(self.sock:fd())
    self.sock:close()
    self.owner.clients[self] = nil
end

function Client:answer(text) self.out = self.out .. frame(text) end

--- Answers the line that is there; false if none is whole yet.
function Client:take_line()
    if #self.got < 4 then return false end
    local n = string.unpack(">I4", self.got)
    if n > MAX_LINE then
        self:answer(("!a line of %d bytes; %d are the most"):format(n, MAX_LINE))
        self.ends = true
        return true
    elseif #self.got < 4 + n then
        return false
    end
    local line = self.got:sub(5, 4 + n)
    self.got = self.got:sub(5 + n)
    model_class.kept = "a line of the console can't close a model, which the program uses"
    local text, ok = self.console:eval(line)
    model_class.kept = nil
    self:answer((ok and "+" or "!") .. text)
    return true
end

--- Goes on as far as it goes: sends what there is, answers at most one line, and waits for more.
function Client:go_on()
    for _ = 1, 2 do
        while self.sent < #self.out do
            local n, _, code = self.sock:send(self.out, self.sent)
            if not n then
                if code ~= "again" then return self:close() end
                return loop.watch(self.sock:fd(), "w", function() self:wake() end)
            end
            self.sent = self.sent + n
        end
        self.out, self.sent = "", 0
        if self.ends then return self:close() end
        if self.answered or not self:take_line() then break end
        self.answered = true
    end
    self.answered = false
    loop.watch(self.sock:fd(), "r", function()
        local text, _, code = self.sock:recv()
        if not text and code == "again" then return end
        if not text or text == "" then return self:close() end
        self.got = self.got .. text
        self:wake()
    end)
    if #self.got >= 4 and #self.got >= 4 + math.min(MAX_LINE + 1, (string.unpack(">I4", self.got))) then
        loop.after(0, function() self:wake() end) -- a further line: after the others had their turn
    end
end

--- Nothing that goes wrong here reaches the loop.
function Client:wake()
    if self.closed then return end
    local ok, err = xpcall(self.go_on, debug.traceback, self)
    if not ok then
        self.owner.log("attach: " .. tostring(err))
        self:close()
    end
end

local function console_of(self, client)
    local own = {}
    for name, c in pairs(commands) do
        own[name] = { c[1], function(rest) return c[2](client, rest) end, c[3] }
    end
    return console.new {
        commands = own, seconds = self.seconds or M.seconds, bytes = self.bytes or M.bytes,
        locked = { "io", "os", "dofile", "loadfile", "require", "debug", "arg", "_G" },
        env = {
            model = client.model, models = model_list(client), server = self.server, llm = require "llmrun",
            views = views,
            os = { time = os.time, clock = os.clock, date = os.date, getenv = os.getenv },
        },
    }
end

--- Whether a user may use the console.
function M.allowed(uid) return uid == (core.ids()) end

local function accept(self)
    while true do
        local sock, uid, pid = self.listener:accept()
        if not sock then return end
        local n = 0
        for _ in pairs(self.clients) do n = n + 1 end
        local client = setmetatable({ owner = self, sock = sock, got = "", out = "", sent = 0 }, Client)
        if not M.allowed(uid) then
            self.log(("attach: a connection of user %d (process %d) is refused"):format(uid, pid))
            client:answer "!this console is for the user who runs the program"
            client.ends = true
        elseif n >= MAX_CLIENTS then
            client:answer(("!%d consoles are open, that is the most"):format(n))
            client.ends = true
        else
            client.model, client.before = model_list(client)[1], self.before
            client.console = console_of(self, client)
            client:answer(("+llmrun, process %d, %s; help lists what there is"):format(select(2, core.ids()),
                client.model and client.model.info.name or "no model"))
        end
        self.clients[client] = true
        client:wake()
    end
end

--- Opens the console. opts: models (a list, or a function that gives it), path (default_path() unless given), server
--- (shown to Lua), log(text), seconds and bytes (limits of a line). Raises if the socket can't be
--- made or would be open to others.
---@param opts table
---@return llmrun.Attach
function M.listen(opts)
    local path = opts.path or M.default_path()
    local folder = path:match "^(.*)/[^/]*$" or "."
    if folder == "" then folder = "/" end
    errors.check("attach", core.private_folder(folder))
    if not opts.path then -- those of programs that were killed
        for _, s in ipairs(M.sockets()) do
            if not core.stat("/proc/" .. s.pid) then os.remove(s.path) end
        end
    end
    local listener = errors.check("attach", core.local_listen(path))
    local self = setmetatable({
        listener = listener, path = path, models = opts.models, server = opts.server, clients = {},
        before = setmetatable({}, { __mode = "k" }), log = opts.log or policy.log, seconds = opts.seconds,
        bytes = opts.bytes,
    }, Attach)
    loop.watch(listener:fd(), "r", function() accept(self) end)
    return self
end

--- Ends it: consoles are closed, the socket goes.
function Attach:close()
    if self.closed then return end
    self.closed = true
    local list = {}
    for c in pairs(self.clients) do list[#list + 1] = c end
    for _, c in ipairs(list) do c:close() end
    loop.unwatch(self.listener:fd())
    self.listener:close()
    os.remove(self.path)
end
Attach.__close = Attach.close

-- The other side ------------------------------------------------------------------------------------------------------

--- Sockets of the default folder: list of { path, pid }.
function M.sockets()
    local folder, list = M.folder(), {}
    local own = core.stat(folder) and core.private_folder(folder) -- what others put there is not asked
    for _, name in ipairs(own and core.list(folder) or {}) do
        local pid = name:match "^(%d+)%.sock$"
        if pid then list[#list + 1] = { path = folder .. "/" .. name, pid = math.tointeger(tonumber(pid)) } end
    end
    return list
end

--- A console of a running program: c.greeting, c:ask(line) -> text, ok; c:close(). nil, text, code.
---@param path string
function M.connect(path)
    local conn, err, code = require("llmrun.net").local_connect(path)
    if not conn then return nil, err, code end
    local c = { conn = conn }
    local function read()
        local head, text = {}, {}
        local ok, why, what = conn:read_bytes(4, function(s) head[#head + 1] = s end, 3600)
        if not ok then return nil, why, what end
        local n = string.unpack(">I4", table.concat(head))
        ok, why, what = conn:read_bytes(n, function(s) text[#text + 1] = s end, 3600)
        if not ok then return nil, why, what end
        local all = table.concat(text)
        return all:sub(2), all:sub(1, 1) == "+"
    end
    function c:ask(line) -- luacheck: ignore 212
        local ok, why, what = conn:send(frame(line))
        if not ok then return nil, why, what end
        return read()
    end
    function c:close() conn:close() end -- luacheck: ignore 212
    c.greeting, c.welcome = read()
    if not c.greeting then
        conn:close()
        return nil, path .. ": " .. tostring(c.welcome), "io"
    end
    return setmetatable(c, { __close = function() conn:close() end })
end

return M
