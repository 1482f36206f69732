--- llm.exec: runs a program beside the engine and waits for its end, while everything else goes on.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local loop = require "llmrun.loop"
local notes = require "llmrun.record.notes"
local options = require "llmrun.options"

local M = {}

local CALL = "llm.exec"

local known = {
    stdin = "string", timeout = "number", cwd = "string", env = "table", max_output = "integer",
    on_stdout = "function", on_stderr = "function",
}

--- Our environment with changes: { NAME = "value", GONE = false }.
local function environment(changes)
    if not changes then return nil end
    local list = {}
    for _, line in ipairs(core.environment()) do
        if changes[line:match("^[^=]*")] == nil then list[#list + 1] = line end
    end
    local names = {}
    for name, value in pairs(changes) do
        if type(name) ~= "string" or name == "" or name:find("[=%z]") then
            errors.raise(CALL, ("env: '%s' is no name of a variable"):format(tostring(name)))
        elseif value ~= false and type(value) ~= "string" and type(value) ~= "number" then
            errors.raise(CALL, ("env.%s: text or false expected, got %s"):format(name, type(value)))
        end
        names[#names + 1] = name
    end
    table.sort(names)
    for _, name in ipairs(names) do
        if changes[name] then list[#list + 1] = name .. "=" .. changes[name] end
    end
    return list
end

local function arguments(command)
    if type(command) == "string" then return { "/bin/sh", "-c", command } end
    if type(command) ~= "table" then
        errors.raise(CALL, ("a list of program and arguments, or a shell command, expected, got %s"):format(
            type(command)))
    elseif #command == 0 then
        errors.raise(CALL, "the list of program and arguments is empty")
    end
    local argv = {}
    for i, v in ipairs(command) do
        if type(v) ~= "string" and type(v) ~= "number" then
            errors.raise(CALL, ("argument %d: text expected, got %s"):format(i, type(v)))
        end
        argv[i] = tostring(v)
        if argv[i]:find("\0", 1, true) then errors.raise(CALL, ("argument %d holds a zero byte"):format(i)) end
    end
    return argv
end

--- A child at work.
local Job = {}
Job.__index = Job

--- Takes what a pipe has; true when it is at its end.
function Job:drain(name, hook)
    while true do
        local bytes = self.process:read(name)
        if bytes == nil then return false end
        if bytes == "" then return true end
        if hook then hook(bytes) end
        local buffer = self[name]
        local room = self.max - buffer.n
        if #bytes > room then
            self.truncated = true
            bytes = bytes:sub(1, room)
        end
        if #bytes > 0 then
            buffer[#buffer + 1] = bytes
            buffer.n = buffer.n + #bytes
        end
    end
end

function Job:unwatch(fd)
    if fd and self.watched[fd] then
        self.watched[fd] = nil
        loop.unwatch(fd)
    end
end

function Job:watch(fd, what, fn)
    self.watched[fd] = true
    loop.watch(fd, what, function()
        local ok, err = pcall(fn)
        if not ok then
            self.failure = err
            self:finish()
        end
    end)
end

--- Ends everything that the loop knows of it and wakes who waits.
function Job:finish()
    if self.finished then return end
    self.finished = true
    for fd in pairs(self.watched) do loop.unwatch(fd) end
    self.watched = {}
    for _, name in ipairs { "timer", "poll_timer", "grace" } do
        if self[name] then loop.cancel_timer(self[name]) end
    end
    loop.fire(self.ticket)
end

--- The process has ended, and its pipes too, or nobody else will write to them for long.
function Job:check()
    if self.finished then return end
    local how, value = self.process:ended()
    if not how then return end
    self.how, self.value = how, value
    if self.open == 0 or self.timed_out then return self:finish() end
    -- something that it started may still hold the pipes
    self.grace = self.grace or loop.after(0.2, function() self:finish() end)
end

function Job:read_from(name, fd, hook)
    self.open = self.open + 1
    self:watch(fd, "r", function()
        if not self:drain(name, hook) then return end
        self:unwatch(fd)
        self.process:shut(name)
        self.open = self.open - 1
        self:check()
    end)
end

function Job:feed(text, fd)
    local at = 0
    local function done()
        self:unwatch(fd)
        self.process:shut "in"
    end
    if text == "" then return self.process:shut "in" end
    self:watch(fd, "w", function()
        local n = self.process:write(text, at)
        if not n then return done() end
        at = at + n
        if at >= #text then done() end
    end)
end

function Job:start(o)
    local fd_in, fd_out, fd_err, fd_end = self.process:fds()
    self:read_from("out", fd_out, o.on_stdout)
    self:read_from("err", fd_err, o.on_stderr)
    self:feed(o.stdin or "", fd_in)
    if fd_end then
        self:watch(fd_end, "r", function()
            self:unwatch(fd_end)
            self:check()
        end)
    else -- no pidfd: look now and then
        local function again()
            self:check()
            if not self.finished then self.poll_timer = loop.after(0.005, again) end
        end
        again()
    end
    self.timer = loop.after(o.timeout or 60, function()
        self.timed_out = true
        self.process:kill()
        if self.how then self:finish() end
    end)
end

--- Runs a program: a list { program, arguments ... }, or a text for /bin/sh. Returns { status (nil if a signal ended
--- it), signal, stdout, stderr, timed_out, truncated, seconds }; nil, text, code if it can't be started. Options:
--- stdin (text), timeout (seconds; 60; then it and what it has started are ended), cwd, env ({ NAME = text or false },
--- changes to ours), max_output (bytes kept of each stream; 1 MiB), on_stdout(bytes), on_stderr(bytes) as they come.
---@param command string[]|string
---@param opts? table
---@return table? result, string? err, string? code
function M.exec(command, opts)
    options.check(CALL, opts, known, 2)
    local o = opts or {}
    if o.timeout and (o.timeout <= 0 or o.timeout ~= o.timeout) then
        errors.raise(CALL, "timeout: seconds above 0 expected")
    end
    if o.max_output and o.max_output < 0 then errors.raise(CALL, "max_output: at least 0 expected") end
    loop.check_can_wait(CALL)
    local process, err, code = core.exec_start(arguments(command), environment(o.env), o.cwd)
    if not process then return nil, CALL .. ": " .. err, code end
    local guard <close> = process -- luacheck: ignore 211
    local job = setmetatable({
        process = process, out = { n = 0 }, err = { n = 0 }, max = o.max_output or 1 << 20, open = 0, watched = {},
        ticket = loop.ticket(),
    }, Job)
    local began = core.now()
    job:start(o)
    loop.wait(job.ticket, CALL, function() job:finish() end)
    if job.failure then error(job.failure, 0) end
    local result = {
        status = job.how == "exit" and job.value or nil, signal = job.how == "signal" and job.value or nil,
        stdout = table.concat(job.out), stderr = table.concat(job.err), timed_out = job.timed_out or false,
        truncated = job.truncated or false, seconds = core.now() - began,
    }
    notes.put("exec", { status = result.status, signal = result.signal, stdout = result.stdout,
        stderr = result.stderr, seconds = result.seconds })
    return result
end

return M
