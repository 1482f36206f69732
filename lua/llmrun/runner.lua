--- An engine as a source of the run loop: steps it while it has requests, and wakes whoever waits for one.

local loop = require "llmrun.loop"

local M = {}

--- Event bits, as in engine.h.
M.START, M.TOKEN, M.TEXT, M.PREEMPT, M.DONE = 1, 2, 4, 8, 16

---@class llmrun.Runner
local Runner = {}
Runner.__index = Runner

--- Those who watch an engine: told before each step (before()), of what happened since (took(text): lines of its
--- record, see engine/record.h), and of each new request (submitted(op, seq, params)). All are optional. One that
--- raises an error is let go.
function Runner:observe(observer)
    if not self.observers then
        local ok, err, code = self.core:record(true)
        if not ok then return nil, err, code end
        self.observers = {}
    end
    self.observers[#self.observers + 1] = observer
    return true
end

--- It is told nothing more.
function Runner:unobserve(observer)
    for i = #(self.observers or {}), 1, -1 do
        if self.observers[i] == observer then table.remove(self.observers, i) end
    end
    if self.observers and #self.observers == 0 then
        self.observers = nil
        self.stale = not self.closed and not self.core:record(false) -- inside of a step it can't be ended
    end
end

local function tell(self, what, ...)
    local list = self.observers
    for i = #(list or {}), 1, -1 do
        local o = list[i]
        if o[what] then
            local ok, err = xpcall(o[what], debug.traceback, o, ...)
            if not ok then
                self:unobserve(o)
                io.stderr:write("llmrun: what watches the engine failed, and is told nothing more: ", err, "\n")
            end
        end
    end
end

--- Tells observers what has happened since they were told last.
function Runner:pump()
    if not self.observers or self.closed then return end
    local text, err = self.core:record_take()
    tell(self, "took", text or nil, err)
end

--- A request at work.
local Op = {}
Op.__index = Op

function M.new(core) return setmetatable({ core = core, ops = {}, keys = 0, active = false }, Runner) end

function Runner:busy() return not self.closed and self.core:busy() > 0 end

--- How many requests run, and how many wait to be started.
function Runner:crowd()
    if self.closed then return 0, 0 end
    local all, waiting = self.core:busy()
    return all - waiting, waiting
end

--- Ends all requests and the engine; whoever waits is woken.
function Runner:close()
    if self.closed then return end
    for _, op in pairs(self.ops) do op.req:cancel() end
    self:dispatch()
    self:pump()
    tell(self, "closing")
    self.closed = true
    loop.remove_source(self)
    self.core:close()
end

function Runner:dispatch()
    local ops, core = self.ops, self.core
    local key, what = core:next_event()
    while key do
        local op = ops[key]
        if op then
            op.news = op.news | what
            if what & M.DONE ~= 0 then
                op.done = true
                ops[key] = nil
            end
            local ticket = op.ticket
            if ticket and (op.done or op.news & op.want ~= 0) then
                op.ticket = nil
                loop.fire(ticket)
            end
        end
        key, what = core:next_event()
    end
end

function Runner:step()
    if self.observers then tell(self, "before") end
    local rows, err = self.core:step()
    if not rows then error("engine: " .. err, 0) end
    if self.observers then
        self:pump()
    elseif self.stale then
        self.stale = not self.core:record(false)
    end
    self:dispatch()
    if not self:busy() then
        self.active = false
        loop.remove_source(self)
    end
    return rows
end

--- Queues a request (see lua_request.c for the parameters). Op, or nil, text, code.
---@param call string what waits for it, for errors
function Runner:submit(call, seq, params)
    loop.check_can_wait(call)
    self.keys = self.keys + 1
    params.key = self.keys
    local req, err, code = self.core:request(seq, params)
    if not req then return nil, err, code end
    local op = setmetatable({ req = req, runner = self, key = self.keys, call = call, news = 0, want = 0 }, Op)
    self.ops[op.key] = op
    if self.observers then
        self:pump()
        tell(self, "submitted", op, seq, params)
    end
    if not self.active then
        self.active = true
        loop.add_source(self)
    end
    return op
end

--- Waits until one of the events has happened since the last wait, or the request is done. If the waiting task is
--- cancelled, so is the request.
function Op:wait(want)
    if not self.done and self.news & want == 0 then
        self.want = want
        self.ticket = loop.ticket()
        loop.wait(self.ticket, self.call, function() self:close() end)
    end
    self.news = 0
end

local function cancel_now(self)
    self.req:cancel()
    self.runner:dispatch()
end

--- Ends the request if it still runs; who waits for it gets what there is.
function Op:cancel()
    if not self.closed and not self.done then loop.critical(cancel_now, self) end
end

local function close_now(self)
    self.closed, self.done = true, true
    self.runner.ops[self.key] = nil
    if not self.runner.closed then self.req:close() end
    local ticket = self.ticket
    self.ticket = nil
    if ticket then loop.fire(ticket) end
end

--- Ends the request if it still runs, and lets go of its results. Who waits for it is woken: inside of a step the
--- request's end is put off, and by then nobody listens.
function Op:close()
    if not self.closed then loop.critical(close_now, self) end
end

return M
