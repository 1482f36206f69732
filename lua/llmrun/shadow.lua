--- Shadow mode: a second policy decides too, before each step, and nothing of it is done; how its decisions differ from
--- those of the policy in charge is counted.
---
---   local s = shadow.start(model, "fair")        s:summary()        s:text()        s:stop()
---
--- The shadow sees what hooks see (policy.lua), made for it from the engine's state: a step whose run and preempt only
--- note what they would do, requests that can't be changed (priority, deadline and fields of its own are the shadow's
--- alone; tags can be read only). Its hooks have the limits that hooks have; after some failures in a row it is set
--- aside. Called are admit, schedule, preempt, token and finish; what it would evict or draft is not asked.
---
--- Each step is judged from where the engine truly is, so a request that the shadow would have started is still waiting
--- in the next step if the policy in charge did not start it. What a run would get is reckoned by rows, slots and
--- blocks of the first group; who leaves rows to others in the engine counts as having got them.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local policy = require "llmrun.policy"
local recording = require "llmrun.recording"

local M = {}

local MAX_REQUESTS = 10000 -- whose differences are kept one by one

-- Requests ------------------------------------------------------------------------------------------------------------

local hidden = setmetatable({}, { __mode = "k" }) -- a request as the shadow sees it -> what is known of it

local fields = {}
for name in ([[id kind state tenant tag priority deadline arrival queue_time prompt_tokens cached_tokens computed_tokens
    generated_tokens max_tokens pending granted wants writing blocks block_seconds preempted seq]]):gmatch "%S+" do
    fields[name] = true
end

local function read_only(t)
    if type(t) ~= "table" then return t end
    return setmetatable({}, {
        __index = function(_, k) return read_only(t[k]) end,
        __newindex = function() error("it can't be changed by a policy in the shadow", 2) end,
        __len = function() return #t end,
        __pairs = function()
            local k
            return function()
                local v
                k, v = next(t, k)
                if k ~= nil then return k, read_only(v) end
            end
        end,
        __metatable = "llmrun",
    })
end

local Request = { __metatable = "llmrun" }

local methods = {
    cancel = function(r) hidden[r].would_cancel = true end,
    prefix = function(r)
        local h = hidden[r]
        return h.ended and 0 or h.req:prefix()
    end,
    head = function(r, n)
        local h = hidden[r]
        return h.ended and 0 or h.req:head(n)
    end,
}

function Request.__index(r, key)
    if methods[key] then return methods[key] end
    if not fields[key] then return nil end
    local h = hidden[r]
    if key == "id" then return h.id end
    if h.own[key] ~= nil then return h.own[key] end
    if h.ended then
        if key == "state" then return "ended" end
        error(("request %d has ended"):format(h.id), 2)
    end
    if key == "tag" then return read_only(h.req:field "tag") end
    local view = h.view
    if view then
        if key == "granted" then return view.granted[r] or 0 end
        if key == "state" then return view.state[r] or h.req:field "state" end
        if key == "pending" then return view:pending_of(r) end
        if key == "wants" then
            local granted = view.granted[r] or 0
            return math.min(view:pending_of(r), view.chunk) - granted
        end
    end
    return h.req:field(key)
end

function Request.__newindex(r, key, value)
    if key == "priority" or key == "deadline" then
        if type(value) ~= "number" then error(key .. ": number expected", 2) end
        hidden[r].own[key] = value
    elseif fields[key] or methods[key] then
        error(("'%s' of a request can't be changed"):format(tostring(key)), 2)
    else
        rawset(r, key, value)
    end
end

function Request.__tostring(r) return ("request %d (%s)"):format(hidden[r].id, r.state) end

-- The step ------------------------------------------------------------------------------------------------------------

--- The step that a shadow fills: notes, and nothing else.
local View = {}

local step_methods = {}
for _, name in ipairs { "serve", "last", "displace" } do
    step_methods[name] = function(...) return core.policy_step[name](...) end
end

local function lists(view)
    local running, waiting = {}, {}
    for _, r in ipairs(view.shadow.order) do
        local state = hidden[r].req:field "state"
        local list = state == "running" and running or state == "waiting" and waiting
        if list then list[#list + 1] = r end
    end
    return running, waiting
end

local function new_view(shadow)
    local engine = shadow.engine
    local available, idle, prompt_rows = engine:room()
    local view = setmetatable({
        shadow = shadow, granted = {}, state = {}, runs = {}, preempts = {}, cached = {}, taken = {},
        for_prompts = prompt_rows, room = available + idle,
        bs = shadow.block_size, rows = shadow.max_rows, chunk = shadow.chunk, over = false, at = engine:now(),
    }, View)
    view.is_running, view.is_waiting = lists(view)
    view.n_active = #view.is_running
    for _, r in ipairs(shadow.order) do hidden[r].view = view end
    return view
end

--- Tokens to compute before the next one: of a waiting request less what the cache has.
function View:pending_of(r)
    local h = hidden[r]
    local pending = h.req:field "pending"
    if h.req:field "state" ~= "waiting" or pending <= self.bs then return pending end
    if not self.cached[r] then self.cached[r] = h.req:prefix() end
    local held = h.req:field "prompt_tokens" + h.req:field "generated_tokens" - pending
    return math.max(1, pending - math.max(0, self.cached[r] - held))
end

local values = {
    running = function(v) return v.is_running end,
    waiting = function(v) return v.is_waiting end,
    budget = function(v) return v.rows end,
    slots = function(v) return v.shadow.max_seqs - v.n_active end,
    active = function(v) return v.n_active end,
    free_blocks = function(v) return math.max(0, v.room) end,
    block_size = function(v) return v.bs end,
    now = function(v) return v.at end,
    prompt_rows = function(v) return v.for_prompts end,
    prompt_least = function(v) return v.shadow.prompt_least end,
}

function View.__index(v, key)
    if View[key] then return View[key] end
    if step_methods[key] then return step_methods[key] end
    local get = values[key]
    if not get then error(("step has no field '%s'"):format(tostring(key)), 2) end
    if rawget(v, "over") then error(("step: %s is used after the step is over"):format(key), 2) end
    return get(v)
end

local function checked(v, r, what)
    if rawget(v, "over") then error(("step: %s is used after the step is over"):format(what), 3) end
    if not hidden[r] then error(("step:%s: a request expected, got %s"):format(what, type(r)), 3) end
    return hidden[r]
end

--- Blocks that r needs to hold n more rows than it holds now.
local function missing(v, r, n)
    local h = hidden[r]
    local total = h.req:field "prompt_tokens" + h.req:field "generated_tokens"
    local done = total - v:pending_of(r) + (v.granted[r] or 0)
    local held = math.max(h.req:field "blocks", done // v.bs)
    return math.max(0, (done + n + v.bs - 1) // v.bs - held - (v.taken[r] or 0))
end

local function take(v, r, n)
    local need = missing(v, r, n)
    v.taken[r] = (v.taken[r] or 0) + need
    v.room = v.room - need
end

local function give_way(v, r, how)
    local h = hidden[r]
    v.preempts[h.id] = how or "recompute"
    v.room = v.room + h.req:field "blocks" + (v.taken[r] or 0)
    v.rows = v.rows + (v.granted[r] or 0)
    v.granted[r], v.runs[h.id], v.state[r] = nil, nil, "waiting"
    v.n_active = v.n_active - 1
end

--- Somebody gives way for r; false if nobody can.
local function make_way(v, r, need)
    if v.n_active <= 1 then return false end
    local p, before = v.shadow.policy, v.n_active
    if p.preempt then
        local victim, how = p.preempt(p, v, { request = r, blocks = need, group = 1 })
        if victim and hidden[victim] and victim.state == "running" then give_way(v, victim, how) end
        if v.n_active < before then return true end
    end
    local youngest
    for _, o in ipairs(v.shadow.order) do
        if o.state == "running" and (not youngest or o.id > youngest.id) then youngest = o end
    end
    if not youngest then return false end
    give_way(v, youngest)
    return true
end

function View:run(r, n)
    local h = checked(self, r, "run")
    if n ~= nil and math.type(n) ~= "integer" then error("step:run: integer expected", 2) end
    if h.ended then return nil, "it has ended" end
    if n and n <= 0 then return nil, "no rows asked for" end
    if self.preempts[h.id] then return nil, "preempted in this step" end
    if self.rows <= 0 then return nil, "no rows left in this step" end
    local waits = r.state == "waiting"
    if waits and self.n_active >= self.shadow.max_seqs then return nil, "no place for another request" end
    local had = self.granted[r] or 0
    local want = self:pending_of(r) - had
    if want <= 0 then return nil, "nothing more to compute" end
    n = math.min(n or want, want, self.chunk - had, self.rows)
    if n <= 0 then return nil, "its share of this step is used up" end
    while missing(self, r, n) > self.room do
        if n > 1 then
            n = n // 2
        elseif waits or had > 0 then
            return nil, "no free blocks"
        elseif not make_way(self, r, missing(self, r, n)) then
            return nil, "no free blocks"
        elseif self.preempts[h.id] then
            return nil, "it had to give way itself"
        end
    end
    take(self, r, n)
    if waits then
        self.n_active, self.state[r] = self.n_active + 1, "running"
    end
    self.granted[r] = had + n
    self.runs[h.id] = had + n
    self.rows = self.rows - n
    return n
end

function View:preempt(r, how)
    checked(self, r, "preempt")
    if how ~= nil and how ~= "recompute" and how ~= "swap" then
        error("preempt: \"recompute\" or \"swap\" expected", 2)
    end
    if hidden[r].ended or r.state ~= "running" then return nil, "not running" end
    give_way(self, r, how)
    return true
end

function View:fits(r)
    checked(self, r, "fits")
    if hidden[r].ended or r.state ~= "waiting" then return false end
    return missing(self, r, math.min(self:pending_of(r), self.chunk)) + 1 <= self.room
end

function View:blocks(group)
    if group ~= nil and group ~= 1 then return 0 end
    return math.max(0, self.room)
end

function View:default() core.policy_step.serve(self) end

function View:sorted(list, key)
    if type(list) ~= "table" or type(key) ~= "function" then error("step:sorted: a list and a function expected", 2) end
    local keys, places, out = {}, {}, {}
    for i, r in ipairs(list) do
        keys[r], places[r], out[i] = key(r), i, r
        if type(keys[r]) ~= "number" or keys[r] ~= keys[r] then
            error(("step:sorted: the key of item %d is not a number"):format(i), 2)
        end
    end
    table.sort(out, function(a, b)
        if keys[a] ~= keys[b] then return keys[a] < keys[b] end
        return places[a] < places[b]
    end)
    return out
end

-- The shadow ----------------------------------------------------------------------------------------------------------

---@class llmrun.Shadow
local Shadow = {}
Shadow.__index = Shadow

--- A hook under the limits that hooks have. nil: it failed.
local function call(self, hook, f, ...)
    if self.set_aside then return nil end
    local began = os.clock()
    local r = table.pack(core.call_limited(policy.limits.seconds, policy.limits.memory, f, ...))
    self.seconds = self.seconds + os.clock() - began
    if r[1] then
        self.in_a_row = 0
        return r
    end
    self.failures, self.in_a_row, self.last_error = self.failures + 1, self.in_a_row + 1, ("%s: %s"):format(hook, r[2])
    if self.in_a_row >= policy.limits.failures then self.set_aside = true end
end

local function forget(self, r)
    local h = hidden[r]
    h.ended, h.view = true, nil
    self.by_id[h.id] = nil
    for i, o in ipairs(self.order) do
        if o == r then
            table.remove(self.order, i)
            break
        end
    end
end

local function meet(self, req)
    local id = req:field "id"
    local r = setmetatable({}, Request)
    hidden[r] = { id = id, req = req, own = {} }
    self.by_id[id] = r
    self.order[#self.order + 1] = r
    return r
end

--- Observer: a new request.
function Shadow:submitted(op)
    local r = meet(self, op.req)
    self.requests = self.requests + 1
    local p = self.policy
    if not p.admit then return end
    local got = call(self, "admit", p.admit, p, r)
    if got and (got[2] == false or got[2] == nil and got[3] ~= nil) then self.refused = self.refused + 1 end
end

--- Observer: a step is about to be made.
function Shadow:before()
    for i = #self.order, 1, -1 do -- those that were closed meanwhile
        local r = self.order[i]
        if not pcall(hidden[r].req.active, hidden[r].req) then forget(self, r) end
    end
    local view = new_view(self)
    self.view = view
    local p = self.policy
    local done = call(self, "schedule", p.schedule or function(_, step) step:default() end, p, view)
    self.valid = done ~= nil
    view.over = true
end

local function entry(self, id)
    local e = self.by_request[id]
    if not e and self.n_kept < MAX_REQUESTS then
        local r = self.by_id[id]
        e = { id = id, tenant = r and not hidden[r].ended and r.tenant or nil, steps = 0, real = 0, shadow = 0 }
        self.by_request[id] = e
        self.n_kept = self.n_kept + 1
    end
    return e
end

--- Differences of a step whose decisions are a list { id, what, n }.
local function judge(self, list)
    local view, real, gone, differs = self.view, {}, {}, false
    for _, d in ipairs(list) do
        if d[2] == ":" or d[2] == "+" then real[d[1]] = (real[d[1]] or 0) + d[3] end
        if d[2] == "!" or d[2] == "~" then gone[d[1]], real[d[1]] = true, nil end
    end
    local function note(id, kind, mine, its)
        differs = true
        self.kinds[kind] = self.kinds[kind] + 1
        local e = entry(self, id)
        if e then
            e.steps, e.real, e.shadow = e.steps + 1, e.real + (mine or 0), e.shadow + (its or 0)
            e[kind] = (e[kind] or 0) + 1
        end
    end
    for id, n in pairs(real) do
        local its = view.runs[id]
        self.rows_real = self.rows_real + n
        if not its then note(id, "later", n, 0) elseif its ~= n then note(id, "rows", n, its) end
    end
    for id, n in pairs(view.runs) do
        self.rows_shadow = self.rows_shadow + n
        if not real[id] then note(id, "earlier", 0, n) end
    end
    for id in pairs(gone) do
        if not view.preempts[id] then note(id, "kept") end
    end
    for id in pairs(view.preempts) do
        if not gone[id] then note(id, "preempted") end
    end
    self.steps = self.steps + 1
    if differs then self.differing = self.differing + 1 end
end

--- Tokens that were drawn, and ends, for policies that count.
local function tell(self, took, ended)
    local p = self.policy
    if p.token then
        call(self, "token", function()
            for _, t in ipairs(took) do
                local r = self.by_id[t[1]]
                for _, id in ipairs(r and t[2] or {}) do
                    if p.token(p, r, id) then self.would_end = self.would_end + 1 end
                end
            end
        end)
    end
    for _, t in ipairs(ended) do
        local r = self.by_id[t[1]]
        if r then
            if p.finish then call(self, "finish", p.finish, p, r) end
            forget(self, r)
        end
    end
end

--- Observer: lines of what has happened.
function Shadow:took(text)
    for line in (text or ""):gmatch "[^\n]+" do
        local e = (line:find('^{"step"') or line:find('^{"ended"')) and recording.event(line, self.last_run)
        if e and e.kind == "step" then
            self.last_run = e.v.run or self.last_run
            if self.valid and self.view then judge(self, assert(recording.decisions(e.v.run or ""))) end
            self.view, self.valid = nil, false
        end
        if e then tell(self, e.took or {}, e.ended or {}) end
    end
end

function Shadow:closing() self.stopped = true end

--- Ends it.
function Shadow:stop()
    if self.stopped then return end
    self.stopped = true
    self.model.runner:unobserve(self)
    if self.model.shadow == self then self.model.shadow = nil end
end

--- What was counted: steps, differing (steps), kinds (earlier, later, rows, preempted, kept: how often), rows_real,
--- rows_shadow, requests = list of { id, tenant, steps, real, shadow, ... }, those that differ most first.
function Shadow:summary()
    local list = {}
    for _, e in pairs(self.by_request) do list[#list + 1] = e end
    table.sort(list, function(a, b) return a.steps > b.steps or (a.steps == b.steps and a.id < b.id) end)
    return {
        policy = self.name, steps = self.steps, differing = self.differing, kinds = self.kinds,
        rows_real = self.rows_real, rows_shadow = self.rows_shadow, requests = list, n_requests = self.requests,
        refused = self.refused,
        would_end = self.would_end, failures = self.failures, set_aside = self.set_aside, last_error = self.last_error,
        seconds = self.seconds,
    }
end

--- The same for people.
function Shadow:text()
    local s = self:summary()
    local lines = {
        ("%s in the shadow: %d of %d steps differ (%.1f %%), in %d of %d requests"):format(s.policy, s.differing,
            s.steps, s.steps > 0 and 100 * s.differing / s.steps or 0, #s.requests, s.n_requests),
        ("rows: %d, in the shadow %d; earlier %d times, later %d, other shares %d; preempted %d more, %d fewer"):format(
            s.rows_real, s.rows_shadow, s.kinds.earlier, s.kinds.later, s.kinds.rows, s.kinds.preempted, s.kinds.kept),
        ("it took %.3f ms a step"):format(s.steps > 0 and 1e3 * s.seconds / s.steps or 0),
    }
    if s.refused > 0 then lines[#lines + 1] = ("it would have refused %d"):format(s.refused) end
    if s.would_end > 0 then lines[#lines + 1] = ("it would have ended some at %d tokens"):format(s.would_end) end
    if s.failures > 0 then
        lines[#lines + 1] = ("it failed %d times%s; the last: %s"):format(s.failures,
            s.set_aside and " and is set aside" or "", s.last_error)
    end
    if #s.requests > 0 then
        lines[#lines + 1] = require("llmrun.views").columns(s.requests, {
            { "id", "request" }, { "tenant", "tenant" }, { "steps", "steps" }, { "real", "rows" },
            { "shadow", "in the shadow" }, { "earlier", "earlier" }, { "later", "later" }, { "preempted", "preempted" },
            { "kept", "kept" },
        }, 10)
    end
    return table.concat(lines, "\n")
end

--- A shadow that is told by its maker what happens (before, submitted, took): for replays. Raises what is wrong with
--- the policy.
---@param model llmrun.Model
---@param what table|function|string
---@param opts? table the policy's own
---@return llmrun.Shadow
function M.new(model, what, opts)
    local p, found = policy.load(what, opts)
    if not p then errors.raise("shadow", found) end
    local info = model.engine:info()
    return setmetatable({
        model = model, engine = model.engine, policy = p, what = what, steps = 0, differing = 0, rows_real = 0,
        rows_shadow = 0, kinds = { earlier = 0, later = 0, rows = 0, preempted = 0, kept = 0 }, by_request = {},
        n_kept = 0, by_id = {}, order = {}, requests = 0, refused = 0, would_end = 0, failures = 0, in_a_row = 0,
        seconds = 0, prompt_least = info.prompt_rows, block_size = info.block_size,
        max_rows = info.max_batch_tokens, max_seqs = info.max_seqs,
        chunk = info.chunk, name = type(p.name) == "string" and p.name or tostring(what),
    }, Shadow)
end

--- Lets a policy decide in the shadow of the model's own, from now on. Arguments as M.new's.
---@return llmrun.Shadow
function M.start(model, what, opts)
    local self = M.new(model, what, opts)
    if model.shadow then model.shadow:stop() end
    local ops = {}
    for _, op in pairs(model.runner.ops) do ops[#ops + 1] = op end
    table.sort(ops, function(a, b) return a.key < b.key end)
    for _, op in ipairs(ops) do
        if op.req:active() then meet(self, op.req) end
    end
    self.requests = #self.order
    errors.check("shadow", model.runner:observe(self))
    model.runner:pump()
    model.shadow = self
    return self
end

return M
