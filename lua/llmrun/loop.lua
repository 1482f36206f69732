--- The run loop: programs and their branches are coroutines ("tasks") that wait for tickets; engines, timers and other
--- sources fire them. One thread, no locks.
---
---   what has come in, due timers -> ready tasks run until each waits -> every busy source takes one step -> again
---
--- A ticket is fired once, with values; who waits on it gets them (at once if it was fired before). A task that is
--- cancelled while it waits runs the wait's cleanup, then its <close> handlers.
---
--- Where Lua has no memory left, the task that asks for it fails; the loop itself goes on with a reserve (lua_guard.c).
--- What tasks do here changes nothing before it has the memory for all of it.

local core = require "llmrun.core"

local M = {}

--- fn(...), which goes on with the reserve where there is no other memory, and can't wait.
M.critical = core.critical or function(fn, ...) return fn(...) end
local memory_low = core.memory_low or function() return false end

---@class llmrun.Task
---@field state "ready"|"running"|"waiting"|"done"|"failed"|"cancelled"
local Task = {}
Task.__index = Task

local queue, head, tail = {}, 1, 0 -- tasks that can run
local alive = {} -- set of unfinished tasks
local current -- the running task
local resumed = 0 -- since when it runs
local sources = {} -- list of { busy = function(self), step = function(self) }
local unseen = {} -- failed tasks that nobody has waited for

local ROUNDS = 2 -- of ready tasks between two steps: a task that came in, and what it starts
local TRY_EVERY = 32 -- times that it does not pay to wait for what is expected, after which it is tried
local BREATH = 0.01 -- seconds that a task whose work is known to be long goes on before others have their turn
local SLICE = 0.05 -- seconds that a task with a time limit may be busy before others have their turn
local REST = 2 -- seconds between two times that memory is tidied
local CLOSING = 5 -- seconds of processor time that the close handlers of such a task may take, while all others wait

--- Called at Ctrl-C instead of ending the program, if set.
M.on_interrupt = nil

--- Whether M.run is at work, also while no task runs (in hooks).
M.running = false

--- In a sandbox, in place of sleeping: called with 0 between rounds, with the seconds to the next timer (nil: none)
--- when nothing can run; true if something may happen then.
M.pause = nil

local function push(task)
    queue[tail + 1] = task
    tail = tail + 1
end

--- A traceback without the loop's own frames at its end.
local function tidy(trace)
    trace = trace:gsub("\n%s*%[C%]: in function 'xpcall'.*$", "")
    return trace
end

local function on_error(err)
    local text = err
    if type(err) ~= "string" then
        local meta = getmetatable(err)
        if type(meta) == "table" and meta.__tostring then
            text = tostring(err)
        elseif type(err) ~= "number" then
            text = ("(error object is a %s value)"):format(type(err))
        end
    end
    return { value = err, trace = tidy(debug.traceback(text, 2)) }
end

--- Whether a task failed only because what it waited for was ended by someone else: no news to anybody.
local function was_ended(task) return type(task.error) == "table" and task.error.code == "cancelled" end

local function finish_now(task, state)
    local ticket, cleanup = task.ticket, task.cleanup
    if ticket then -- it had no memory to wait with
        ticket.task, task.ticket, task.cleanup = false, false, false
        if cleanup then pcall(cleanup) end
    end
    task.state = state
    alive[task] = nil
    task.co = false
    if state == "failed" and not task.owned and not was_ended(task) then unseen[task] = true end
    local done = task.on_done
    task.on_done = nil
    for i = 1, #done do done[i](task) end
end

local function finish(task, state) return M.critical(finish_now, task, state) end

--- Starts fn(...) as a task of its own. It runs when the present task waits next.
---@param fn function
---@return llmrun.Task
function M.spawn(fn, ...)
    local task = setmetatable({ -- all its fields from the first: one that is new later needs memory, which can fail
        state = "ready", on_done = {}, values = table.pack(...), ticket = false, cleanup = false, owned = false,
        limit = current and current.limit or false, most_busy = current and current.most_busy or false, busy = 0,
        meter = current and current.meter or false, breathes = false,
        co = false, results = false, error = false, trace = false, cancel_reason = false,
    }, Task)
    task.co = coroutine.create(function(...)
        return xpcall(fn, on_error, ...)
    end)
    push(task)
    alive[task] = true -- before that it is not run
    return task
end

--- As spawn, for a task whose failure its maker takes care of.
function M.spawn_owned(fn, ...)
    local task = M.spawn(fn, ...)
    task.owned = true
    return task
end

--- For a task that a timer will end, and for those that it starts: when it has been busy for a while it is interrupted,
--- so that others, and the timer, have their turn. Where it can't be (a callback of table.sort ...), an error ends it
--- after so many seconds. most_busy: what it may take of processor time between two waits, whatever the timer says.
function M.limit(task, seconds, most_busy)
    task.limit, task.most_busy = math.max(seconds, SLICE), most_busy
end

--- Calls fn(...), whose work may be long and goes through M.breathe: others have their turn meanwhile.
function M.breathing(fn, ...)
    local task = current
    if not task or task.breathes then return fn(...) end
    task.breathes = true
    local over <close> = setmetatable({}, { __close = function() task.breathes = false end }) -- luacheck: ignore 211
    return fn(...)
end

--- Whether the running code is in such work, and can wait.
function M.may_wait()
    local task = current
    return task and task.breathes and coroutine.running() == task.co and coroutine.isyieldable() or false
end

--- A place in the middle of work where others may have their turn, if the work is known to be long, and it is due.
function M.breathe()
    if current and current.breathes and core.now() - resumed >= BREATH and M.may_wait() then coroutine.yield() end
end

--- What the task, and those that it starts, take of processor time from now on is added to meter.spent (seconds).
function M.measure(task, meter) task.meter = meter end

--- The running task; nil outside of the loop.
function M.current() return current end

local function conclude(task, ok, ...)
    if ok then
        task.results = table.pack(...)
        return finish(task, "done")
    end
    local e = ...
    if type(e) ~= "table" then e = { value = e, trace = tostring(e) } end -- out of memory: no handler is called
    task.error, task.trace = e.value, e.trace
    return finish(task, "failed")
end

local function after_step(task, how, ...)
    if how == "parked" then
        task.state, task.busy = "waiting", 0
    elseif how == "done" then
        conclude(task, ...)
    elseif how == "yielded" or how == "preempted" then -- a plain coroutine.yield of the program's: lets others run
        if how == "preempted" then task.busy = task.busy + SLICE end
        task.state = "ready"
        task.values = { n = 0 }
        push(task)
    elseif how == "dead" then -- what xpcall can't catch: an error in error handling
        conclude(task, false, { value = ..., trace = tostring((...)) })
    end
end

local function close(task)
    if not (task.limit and core.call_limited) then return M.critical(core.close, task.co) end
    local seconds = math.min(task.limit, CLOSING)
    local in_time, ok, err = M.critical(core.call_limited, seconds, 0, core.close, task.co)
    if in_time then return ok, err end
    return false, (tostring(ok):match "^[^\n]*":gsub(" of a hook", "", 1))
end

local function close_or_tell(task, what)
    local ok, err = close(task)
    local ctrl_c = type(err) == "table" and tostring(err.value):find "interrupted$" -- what ended it, not a handler's
    if not ok and not ctrl_c then
        io.stderr:write("llmrun: error in a close handler of ", what, " branch: ", tostring(err), "\n")
    end
end

local function too_busy(task)
    task.error = ("computed for more than %g s without waiting"):format(task.most_busy)
    task.trace = tidy(debug.traceback(task.co, task.error))
    alive[task] = nil
    close_or_tell(task, "an ended")
    finish(task, "failed")
end

local function run_task(task)
    local values = task.values
    task.values = false
    task.state = "running"
    current, resumed = task, core.now()
    local meter = task.meter
    local began = meter and core.thread_seconds()
    -- core.step never raises, whatever the task does
    if task.limit and core.step_limited then
        after_step(task, core.step_limited(SLICE, task.limit, task.co, table.unpack(values, 1, values.n)))
    else
        after_step(task, core.step(task.co, table.unpack(values, 1, values.n)))
    end
    current = nil
    if meter then meter.spent = meter.spent + core.thread_seconds() - began end
    if alive[task] and task.most_busy and task.busy > task.most_busy then too_busy(task) end
end

--- A new ticket: fired once, waited for by one task at most.
function M.ticket() return { fired = false, task = false, values = false } end

--- Fires a ticket. A second firing does nothing.
function M.fire(ticket, ...)
    if ticket.fired then return end
    local task, values = ticket.task, table.pack(...)
    if task and task.ticket == ticket and task.state == "waiting" then
        push(task)
        task.values = values
        task.ticket, task.cleanup = false, false
        task.state = "ready"
    else
        ticket.values = values
    end
    ticket.fired = true
end

--- "file:line: " of the innermost function that is not part of this library; "" if there is none.
function M.where()
    for level = 2, 60 do
        local info = debug.getinfo(level, "Sl")
        if not info then return "" end
        if info.currentline > 0 and not info.source:find("lua/llmrun/", 1, true) then
            return ("%s:%d: "):format(info.short_src, info.currentline)
        end
    end
    return ""
end

--- Raises text at the place in the user's program.
function M.misuse(text) error(M.where() .. text, 0) end

local function cant_wait(what, obstacle)
    M.misuse(("%s: can't wait for the engine inside %s"):format(what, obstacle))
end

--- Raises an error if the running code can't wait here. For calls that do something before they wait.
function M.check_can_wait(what)
    local obstacle = current and core.obstacle()
    if obstacle then cant_wait(what, obstacle) end
    if not current and M.running then cant_wait(what, "a function that the engine calls (a sampler, a hook)") end
    if not current then M.misuse(what .. ": can't wait for the engine outside of a program (llm.run makes one)") end
end

-- A wait that could not be: nothing stays registered, and the error is raised where the call stands.
local function woken(ticket, what, first, ...)
    if first ~= core.failed then return first, ... end
    local task, cleanup = current, current.cleanup
    ticket.task, task.ticket, task.cleanup, task.state = false, false, false, "running"
    if cleanup then cleanup() end
    cant_wait(what, ...)
end

--- Waits until the ticket is fired; returns what it was fired with.
---@param what string the call's name, for errors
---@param cleanup? function called if the task is cancelled while it waits
function M.wait(ticket, what, cleanup)
    if ticket.fired then
        local v = ticket.values
        return table.unpack(v, 1, v.n)
    end
    M.check_can_wait(what)
    local task = current
    ticket.task = task
    task.ticket, task.cleanup = ticket, cleanup or false
    return woken(ticket, what, core.wait())
end

--- Ends a task: the cleanup of what it waits for, then its <close> handlers, innermost first. False if it had finished.
---@param reason? string
---@return boolean
function Task:cancel(reason)
    if not alive[self] then return false end
    if self == current then error("a task can't cancel itself", 2) end
    local cleanup = self.cleanup
    if self.ticket then self.ticket.task = false end
    self.ticket, self.cleanup, self.values = false, false, false
    self.cancel_reason = reason or "cancelled"
    alive[self] = nil
    if cleanup then cleanup() end
    close_or_tell(self, "a cancelled")
    finish(self, "cancelled")
    return true
end

--- Calls fn(task) when the task has finished (now, if it has).
function Task:when_done(fn)
    if alive[self] then
        self.on_done[#self.on_done + 1] = fn
    else
        fn(self)
    end
end

--- Waits for the end without looking at the outcome.
function Task:join(cleanup)
    if alive[self] then
        local ticket = M.ticket()
        self:when_done(function() M.fire(ticket) end)
        M.wait(ticket, "task:wait", cleanup)
    end
end

--- The results, or the error again with the branch's traceback; nil, text, code if it was cancelled.
function Task:result(name)
    unseen[self] = nil
    if self.state == "done" then
        return table.unpack(self.results, 1, self.results.n)
    elseif self.state == "failed" then
        if type(self.error) ~= "string" then error(self.error, 0) end
        local trace = self.trace:sub(1, #self.error) == self.error and self.trace:sub(#self.error + 1) or self.trace
        trace = trace:gsub("^\nstack traceback:", "", 1)
        error(("%s\ntraceback of %s:%s"):format(self.error, name or "the branch", trace), 0)
    end
    return nil, self.cancel_reason, "cancelled"
end

--- Waits for the end and gives the task's results; an error in it is raised here, with its traceback.
---@return any ...
function Task:wait()
    self:join()
    return self:result()
end

-- Timers: a binary heap by time, then by age.
local timers, timer_count = {}, 0
local function earlier(a, b) return a.at < b.at or (a.at == b.at and a.n < b.n) end

--- Calls fn() after so many seconds, from the loop. Returns a timer for M.cancel_timer.
function M.after(seconds, fn)
    timer_count = timer_count + 1
    local t = { at = core.now() + seconds, n = timer_count, fn = fn }
    local i = #timers + 1
    timers[i] = t
    while i > 1 and earlier(t, timers[i // 2]) do
        timers[i], timers[i // 2] = timers[i // 2], t
        i = i // 2
    end
    return t
end

function M.cancel_timer(timer) timer.fn = nil end

local function pop_timer()
    local top, n = timers[1], #timers
    local last = timers[n]
    timers[n] = nil
    n = n - 1
    if n > 0 then
        local i = 1
        while true do
            local c = 2 * i
            if c > n then break end
            if c < n and earlier(timers[c + 1], timers[c]) then c = c + 1 end
            if not earlier(timers[c], last) then break end
            timers[i] = timers[c]
            i = c
        end
        timers[i] = last
    end
    return top
end

local function run_timers()
    while timers[1] and not timers[1].fn do pop_timer() end
    if not timers[1] then return end
    local now = core.now()
    while timers[1] and (not timers[1].fn or timers[1].at <= now) do
        local t = pop_timer()
        if t.fn then t.fn() end
    end
end

-- Descriptors: sockets and the like. While any is watched, the loop sleeps in them when it has nothing else to do.
local poller
local watched, n_watched = {}, 0 -- fd -> function

--- Calls fn() from the loop whenever a descriptor is ready: "r" to be read, "w" to be written, "rw" either. Again with
--- other arguments: changes that.
---@param fd integer
---@param what "r"|"w"|"rw"
---@param fn function
function M.watch(fd, what, fn)
    poller = poller or assert(core.poller())
    assert(poller:set(fd, what))
    if not watched[fd] then n_watched = n_watched + 1 end
    watched[fd] = fn
end

--- Watches it no longer; to be called before the descriptor is closed.
function M.unwatch(fd)
    if not watched[fd] then return end
    watched[fd] = nil
    n_watched = n_watched - 1
    poller:set(fd, nil)
end

--- Waits at most so many seconds (nil: without end) for a descriptor; does nothing if none is watched.
local function poll(seconds)
    if n_watched == 0 then return false end
    for _, fd in ipairs(poller:wait(seconds)) do
        local fn = watched[fd]
        if fn then fn() end
    end
    return true
end

--- Adds a source of work: source:busy() tells whether source:step() has something to do; source:crowd(), if there is
--- such a method, how many are at work in it and how many wait for their turn. source.every: seconds after which it is
--- asked again also while the loop sleeps in descriptors.
function M.add_source(source) sources[#sources + 1] = source end

function M.remove_source(source)
    for i = #sources, 1, -1 do
        if sources[i] == source then table.remove(sources, i) end
    end
end

-- Memory ------------------------------------------------------------------------------------------------------------
--
-- Lua collects garbage only while something runs, and the heaps of threads keep what is free, so that after a burst of
-- large requests a loop with nothing to do would hold all of it. Before it sleeps it gives that back, now and then.

local untidy, tidied, kept = false, -math.huge, 0 -- whether something ran since; when; kilobytes of Lua's heap after it

--- Seconds until memory is to be tidied; nil: it is tidy.
local function tidy_memory()
    if not untidy then return nil end
    local now = core.now()
    if now < tidied + REST then return tidied + REST - now end
    if collectgarbage "count" > 1.5 * kept then
        collectgarbage()
        kept = collectgarbage "count"
    end
    core.trim_memory()
    untidy, tidied = false, now
    return nil
end

local long_step = 0 -- seconds that a long round of steps took lately

local function step_sources()
    local worked, begin = false, core.now()
    for i = #sources, 1, -1 do
        local s = sources[i]
        if s and s:busy() then
            worked = true
            s:step()
        end
    end
    if worked then long_step = math.max(core.now() - begin, 0.995 * long_step) end
    return worked
end

--- How long the loop may sleep in descriptors: so many seconds (nil: without end), or until a source is to be asked.
local function till_asked(seconds)
    for _, s in ipairs(sources) do
        if s.every then seconds = math.min(seconds or s.every, s.every) end
    end
    return seconds
end

local function cancel_all(reason)
    while true do
        local task = next(alive)
        if not task then return end
        task:cancel(reason)
    end
end

local function run_ready()
    local last = tail -- those that become ready meanwhile run in the next round
    if head <= last then untidy = true end
    while head <= last do
        local task = queue[head]
        queue[head] = nil
        head = head + 1
        if alive[task] then run_task(task) end
        if core.interrupted() then return end
    end
    if head > tail then head, tail = 1, 0 end
end

-- What is about to come in -------------------------------------------------------------------------------------------
--
-- A client that has just got its answer often sends its next request at once, and finds a step begun, whose end it has
-- to wait for: with prompts in it that is long. So before a step the loop waits a moment for such clients, as long as
-- they come, and as what it spares them is more than what it costs the others, who all wait.

local PATIENCE = 0.0015 -- seconds, at most
local expected, patient_until = 0, 0
local hits, wait_seconds = 1, PATIENCE / 2 -- how many of those expected come (0..1), after how long
local tries = 0

--- Tells that something is likely to come in at once.
function M.expect() expected, patient_until = expected + 1, core.now() + PATIENCE end

--- Tells that it has come.
function M.came() expected = math.max(0, expected - 1) end

--- Whether it is worth waiting: who comes is spared a step, and so are those that come next and would queue behind it.
--- Where something waits for its turn already, a newcomer would as well.
local function pays()
    local running = 0
    for _, s in ipairs(sources) do
        if s.crowd then
            local n, waiting = s:crowd()
            if waiting > 0 then return false end
            running = running + n
        end
    end
    tries = tries + 1
    return running > 0 and (2 * hits * long_step > running * wait_seconds or tries % TRY_EVERY == 0)
end

local function await_expected()
    local n, begin = expected, core.now()
    local now = begin
    if now < patient_until and pays() then
        while expected > 0 and now < patient_until and not core.interrupted() do
            poll(patient_until - now)
            run_ready()
            now = core.now()
        end
        hits = hits + ((n - expected) / n - hits) / 8
        wait_seconds = wait_seconds + (now - begin - wait_seconds) / 8
    end
    expected = 0
end

--- One round. False if nothing can happen any more.
local function turn(main)
    if memory_low() then collectgarbage() end
    poll(0)
    run_timers()
    for _ = 1, ROUNDS do
        run_ready()
        if not alive[main] then return true end -- what is still watched is waited for by nobody
        if head > tail or core.interrupted() then break end
    end
    if expected > 0 then await_expected() end
    if head <= tail then
        step_sources()
        if M.pause then M.pause(0) end
        return true
    end
    if step_sources() or head <= tail then return true end
    local seconds = timers[1] and math.max(0, timers[1].at - core.now()) or nil
    if M.pause then return M.pause(seconds) end
    local rest = tidy_memory()
    local nap = rest and math.min(seconds or rest, rest) or seconds
    if poll(till_asked(nap)) then return true end
    if seconds then
        core.sleep(nap)
        return true
    end
    return false
end

--- Runs fn(...) as the main task until it ends; branches that are still alive then are cancelled.
--- Returns "done" and the results, "failed", the traceback and the error, or "interrupted" (and the traceback, if code
--- was running).
function M.run(fn, ...)
    local ending <close> = setmetatable({}, { __close = function() M.running = false end }) -- luacheck: ignore 211
    M.running = true
    local main = M.spawn(fn, ...)
    while alive[main] do
        local going = turn(main)
        if core.interrupted() then
            core.interrupted(true)
            if not M.on_interrupt then
                cancel_all("interrupted")
                return "interrupted", main.trace
            end
            M.on_interrupt()
        elseif not going and alive[main] then
            local trace = debug.traceback(main.co, "all branches wait, and nothing is left that could wake them")
            trace = tidy(trace)
            cancel_all("deadlock")
            return "failed", trace
        end
    end
    unseen[main] = nil
    cancel_all("the program has ended")
    for task in pairs(unseen) do
        io.stderr:write("llmrun: a branch failed, and nobody waited for it: ", task.trace, "\n")
        unseen[task] = nil
        if main.state == "done" then main.state, main.trace = "failed", nil end
    end
    if main.state == "done" then return "done", table.unpack(main.results, 1, main.results.n) end
    return "failed", main.trace or "", main.error
end

return M
