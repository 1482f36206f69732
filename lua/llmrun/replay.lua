--- Replaying a recording (record/): the same requests on the same model give the same tokens, bit by bit.
---
---   in the crowd   replay.new(rec, model):run(): everything in its order, each step with the rows that it had: a
---                  policy does what is written down. Stops anywhere, to look around, and goes on.
---   alone          replay.alone(rec, model, id): one request by itself
---
--- Either gives what differed: the request, the place, both tokens, and the logits there. What can't be repeated is
--- taken as it is written: tokens that a Lua sampler chose (given), drafts (so that steps have the rows that they had),
--- what functions of constraints returned. Requests whose drafts were judged by distribution are not compared.
---
--- A replay that gets out of step (another cache, a policy that evicted) computes what is missing before it goes on;
--- the tokens don't depend on it.

local constrain = require "llmrun.constrain"
local count = require("llmrun.words").count
local errors = require "llmrun.errors"
local file = require "llmrun.recording"
local json = require "llmrun.json"
local plain = require "llmrun.record.plain"
local policy = require "llmrun.policy"
local sampler = require "llmrun.sampler"

local M = {}

local CALL = "replay"

-- The model -----------------------------------------------------------------------------------------------------------

local numbers = { "ctx", "max_batch_tokens", "max_seqs", "chunk", "swap_bytes", "max_pinned", "patience" }

--- Options of llm.load with which the recorded model was loaded. Only plain ones: a recording names no scripts to run.
function M.load_options(rec)
    local from, o = rec.header.options, {}
    for _, name in ipairs(numbers) do o[name] = math.tointeger(from[name]) end
    for _, name in ipairs { "preempt", "compute" } do
        if type(from[name]) == "string" then o[name] = from[name] end
    end
    local kv = type(from.kv) == "table" and from.kv or {}
    o.kv = { block_size = math.tointeger(kv.block_size) }
    for _, name in ipairs { "type", "value_type" } do
        if type(kv[name]) == "string" then o.kv[name] = kv[name] end
    end
    if kv.prefix_cache == false then o.kv.prefix_cache = false end
    local blocks = {}
    for i, n in ipairs(type(kv.blocks) == "table" and kv.blocks or {}) do blocks[i] = math.tointeger(n) end
    if #blocks > 0 then o.kv.blocks = blocks end
    return o
end

--- Raises if the recording is of another model.
function M.check_model(rec, model)
    local want = rec.header.model.fingerprint
    local have = require("llmrun.record").fingerprint(model)
    if have ~= want then
        errors.raise(CALL, ("%s was recorded with another model: %s (fingerprint %s), and this is %s (%s)"):format(
            rec.path, tostring(rec.header.model.name), tostring(want), model.info.name, have), "state")
    end
end

-- Requests ------------------------------------------------------------------------------------------------------------

--- The function of a constraint that gives what is written down.
local function recorded_function(rec, n)
    local answers = {} -- what it was asked -> list of answers
    for _, v in ipairs(rec.calls[n] or {}) do
        local text = plain.decode(v.text)
        answers[text] = answers[text] or {}
        table.insert(answers[text], v)
    end
    local asked = {}
    return function(text)
        local list = answers[text]
        if not list then error("the recording has no answer of this function for the text so far", 0) end
        asked[text] = math.min((asked[text] or 0) + 1, #list)
        return (plain.decode(list[asked[text]].v))
    end
end

local function has_function(v)
    if type(v) == "function" then return true end
    if type(v) ~= "table" then return false end
    for _, x in pairs(v) do
        if has_function(x) then return true end
    end
    return false
end

--- What a request was asked with, as the engine takes it. given: its tokens are taken from the recording.
local function params_of(rec, model, r, draft)
    local p = {
        kind = r.kind, key = r.id, seed = r.seed, max_tokens = r.max_tokens, stop_ids = r.stop_ids,
        ignore_eos = r.ignore_eos, special = r.special, n_top = r.n_top, score_from = r.score_from,
        priority = r.priority, tenant = r.tenant, stop = r.stop and plain.decode(r.stop),
    }
    if r.kind ~= "generate" then return p end
    local marker = function() end -- stands for functions whose doings are not kept
    local o = plain.decode(r.options, function(n) return n > 0 and recorded_function(rec, n) or marker end) or {}
    if o.stages then o.sampler, o.stages = sampler.restored(o.stages), nil end
    if has_function(o.sampler) then
        p.stages = { { "lua", function(_, ctx) return r.tokens[ctx.n_generated + 1] end } }
        r.given = true
    else
        p.stages = sampler.from_options(CALL, o, model)
    end
    p.matcher = constrain.from_options(CALL, o, model)
    if r.drafts then p.speculate = { method = "off", fn = draft } end
    return p
end

--- A request at work here.
local Run = {}
Run.__index = Run

local function start(self, r, seq)
    local run = setmetatable({ r = r, seq = seq, n = 0 }, Run)
    local made, params = pcall(params_of, self.rec, self.model, r, function() return self:draft(r.id) end)
    if not made then
        errors.raise(CALL, ("%s:%d: request %d can't be made again: %s"):format(self.rec.path, r.line, r.id,
            tostring(params)), "format")
    end
    local ok, req, err, code = pcall(self.engine.request, self.engine, seq, params)
    if not ok then req, err = nil, req end
    if not req then errors.raise(CALL, ("request %d: %s"):format(r.id, tostring(err)), code) end
    run.req = req
    if self.shadow then self.shadow:submitted(run) end
    return run
end

--- Compares the tokens that have come since; the first that differs is noted.
function Run:compare(self_step)
    local ids, n = self.req:tokens(self.n)
    local list = ids
    local info = not self.req:active() and self.req:info()
    if info and info.stop_token >= 0 then
        list[#list + 1] = info.stop_token
        n = n + 1
    end
    for i, id in ipairs(list) do
        local at = self.n + i
        local want = self.r.tokens[at]
        if id ~= want and not self.differs and want then
            self.differs = { request = self.r.id, at = at, recorded = want, drawn = id, step = self_step }
        end
    end
    self.n = n
    if info then
        self.done = true
        local short = self.n < #self.r.tokens and info.state ~= "cancelled"
        if short and not self.differs then
            self.differs = {
                request = self.r.id, at = self.n + 1, recorded = self.r.tokens[self.n + 1], step = self_step,
                why = info.error or "it ended here",
            }
        end
    end
end

-- In the crowd --------------------------------------------------------------------------------------------------------

---@class llmrun.Replay
local Replay = {}
Replay.__index = Replay

--- The policy that does what is written down for the present step.
local function recorded_policy(self)
    local views = {} -- recorded id -> what hooks see of it
    local by_id = {} -- the engine's id -> recorded id
    local how = { ["!"] = "recompute", ["~"] = "swap" }
    return {
        name = "as recorded",
        admit = function(_, r)
            by_id[r.id] = self.admitting
            views[self.admitting] = r
        end,
        finish = function(_, r) views[by_id[r.id] or 0] = nil end,
        schedule = function(_, step)
            if self.only then
                local r = views[self.only]
                if r then step:run(r) end
                return
            end
            for _, d in ipairs(self.decisions) do
                local r = views[d[1]]
                if d[2] == "^" then
                    local seq = self.seqs[d[1]]
                    if seq then seq:park() end
                elseif r and how[d[2]] then
                    step:preempt(r, how[d[2]])
                elseif r then
                    step:run(r, d[3] ~= 0 and d[3] or nil)
                end
            end
            for _, t in ipairs(self.event.took) do -- who drew a token then has to get that far now
                local r = views[t[1]]
                if r and r.pending > r.granted and r.generated_tokens < self.upto[t[1]] then
                    step:run(r, r.pending - r.granted)
                end
            end
        end,
    }
end

--- A replay of a recording on a model that nobody else uses. opts.policy: decides in place of what is written down.
---@param rec llmrun.Recording
---@param model llmrun.Model
--- opts.shadow: decides too, in the shadow (shadow.lua), judged against what was done.
---@param opts? { policy?: any, shadow?: any }
---@return llmrun.Replay
function M.new(rec, model, opts)
    M.check_model(rec, model)
    local self = setmetatable({
        rec = rec, model = model, engine = model.engine, next = 1, seqs = {}, seq_len = {}, runs = {}, active = {},
        step = 0, step_rows = 0, equal_steps = 0, steps = 0, decisions = {}, only = nil, upto = {}, drafts = {},
        admitting = 0, differences = {}, compared = 0, tokens = 0, given = 0, not_compared = 0,
    }, Replay)
    self.engine:set_exact(true)
    local deciding = opts and opts.policy or recorded_policy(self)
    local status, err, code = policy.use(self.engine, deciding, nil, { seconds = 10 })
    if not status then errors.raise(CALL, err, code) end
    self.policy, self.free = status.policy, opts and opts.policy ~= nil
    if opts and opts.shadow then
        self.shadow = require("llmrun.shadow").new(model, opts.shadow)
        errors.check(CALL, self.engine:record(true))
    end
    return self
end

--- Drafts of the present step, for a request that had some at one time.
function Replay:draft(id)
    if self.only then return false end
    return self.drafts[id] or false
end

local function conclude(self, run)
    if run.counted then return end
    run.counted = true
    self.active[run.r.id] = nil
    local r = run.r
    if r.kind ~= "generate" then return end
    if r.distribution then
        self.not_compared = self.not_compared + 1
        return
    elseif r.given then
        self.given = self.given + 1
    end
    self.compared = self.compared + 1
    self.tokens = self.tokens + math.min(run.n, #r.tokens)
    if run.differs then
        run.differs.prompt_len = r.prompt
        self.differences[#self.differences + 1] = run.differs
    end
end

--- Lets the engine make one step, and looks at what came.
local function engine_step(self)
    local rows, err, code = self.engine:step()
    if not rows then errors.raise(CALL, err, code) end
    if self.shadow then self.shadow:took(self.engine:record_take()) end
    local key = self.engine:next_event()
    while key do
        local run = self.runs[key]
        if run and not run.done then run:compare(self.step) end
        key = self.engine:next_event()
    end
    return rows
end

--- Computes what a request lacks of what it had at this place of the recording: n tokens, or its end.
local function catch_up(self, run, n)
    local idle = 0
    self.only = run.r.id
    while not run.done and run.n < n and idle < 20 do
        idle = engine_step(self) > 0 and 0 or idle + 1
    end
    self.only = nil
end

--- The end of a request as it is written down.
local function end_request(self, t)
    local run = self.runs[t[1]]
    if not run then return end
    local r = run.r
    if not run.done and r.ended ~= "cancelled" and r.ended ~= "error" then
        catch_up(self, run, #r.tokens + (r.kind == "generate" and 0 or 1))
    elseif not run.done and r.ended == "cancelled" then
        catch_up(self, run, #r.tokens)
    end
    if not run.done then run.req:cancel() end
    if not run.done then run:compare(self.step) end
    conclude(self, run)
    local seq = run.seq
    if run.differs or seq:len() ~= t[3] then -- what follows goes on from the text that was
        local kept = t[3] - r.prompt
        if kept >= 0 and kept <= #r.tokens and seq:len() >= r.prompt then
            errors.check(CALL, seq:truncate(r.prompt))
            if kept > 0 then errors.check(CALL, seq:append(table.move(r.tokens, 1, kept, 1, {}))) end
        end
    end
end

local function seq_of(self, id, e)
    return self.seqs[id] or errors.raise(CALL, ("%s:%d: sequence %d is not there"):format(self.rec.path, e.line, id))
end

local function adapter_of(self, fingerprint, e)
    if not fingerprint then return nil end
    self.adapters = self.adapters or {}
    if not self.adapters[fingerprint] then
        local a = self.rec.adapters[fingerprint]
        if not a then
            errors.raise(CALL, ("%s:%d: the adapter %s is not named"):format(self.rec.path, e.line, fingerprint))
        end
        self.adapters[fingerprint] = self.model:adapter(a.path, { scale = a.scale })
    end
    return self.adapters[fingerprint].core
end

local on = {}

function on.seq(self, e)
    local lora = adapter_of(self, e.v.adapter, e)
    self.seqs[e.v.seq] = errors.check(CALL, self.engine:seq { salt = e.v.salt, lora = lora })
end

function on.fork(self, e)
    local f = errors.check(CALL, seq_of(self, e.v.of, e):fork())
    self.seqs[e.v.fork] = f
    local len = e.v.len
    if f:len() > len then errors.check(CALL, f:truncate(len)) end
    if f:len() < len then -- the request on it is behind
        local missing = {}
        local run = self.runs[self.on_seq and self.on_seq[e.v.of] or 0]
        for i = f:len() - (run and run.r.prompt or 0) + 1, len - (run and run.r.prompt or 0) do
            missing[#missing + 1] = run and run.r.tokens[i]
        end
        if #missing > 0 then errors.check(CALL, f:append(missing)) end
    end
end

function on.add(self, e) errors.check(CALL, seq_of(self, e.v.add, e):append(e.v.ids)) end
function on.cut(self, e)
    local seq = seq_of(self, e.v.cut, e)
    if seq:len() > e.v.len then errors.check(CALL, seq:truncate(e.v.len)) end
end

function on.drop(self, e)
    local seq = self.seqs[e.v.drop]
    self.seqs[e.v.drop] = nil
    if seq then seq:close() end
end

function on.pin(self, e) seq_of(self, e.v.pin, e):pin(e.v.on) end -- if there is room
function on.forget(self) self.engine:drop_cached() end

function on.request(self, e)
    local r = self.rec.requests[e.v.request]
    self.admitting = r.id
    local run = start(self, r, seq_of(self, r.of, e))
    self.runs[r.id], self.active[r.id] = run, run
    self.on_seq = self.on_seq or {}
    self.on_seq[r.of] = r.id
    self.upto[r.id] = 0
end

function on.step(self, e)
    self.event, self.step, self.steps = e, e.v.step, self.steps + 1
    self.decisions = assert(file.decisions(e.v.run or ""))
    self.drafts = e.draft
    for _, t in ipairs(e.took) do self.upto[t[1]] = (self.upto[t[1]] or 0) + #t[2] end
    if self.shadow then self.shadow:before() end
    self.step_rows = engine_step(self)
    if self.step_rows == e.v.rows then self.equal_steps = self.equal_steps + 1 end
    for _, t in ipairs(e.ended) do end_request(self, t) end
end

function on.ended(self, e)
    for _, t in ipairs(e.ended) do end_request(self, t) end
end

--- The number of the step that comes next, nil at the end.
function Replay:next_step()
    for i = self.next, #self.rec.events do
        if self.rec.events[i].kind == "step" then return self.rec.events[i].v.step end
    end
end

--- Goes on, to before the step of that number (nil: to the end). True at the end.
---@param stop_at? integer
function Replay:run(stop_at)
    while self.next <= #self.rec.events do
        local e = self.rec.events[self.next]
        if stop_at and e.kind == "step" and e.v.step >= stop_at then return false end
        self.next = self.next + 1
        local f = on[e.kind]
        local ok, err = true, nil
        if f then ok, err = pcall(f, self, e) end
        if not ok then
            if errors.is(err) then error(err, 0) end
            errors.raise(CALL, ("%s:%d: %s"):format(self.rec.path, e.line, tostring(err)), "format")
        end
    end
    self:finish()
    return true
end

--- Those whose end is not in the recording get as far as they had come.
function Replay:finish()
    for _, id in ipairs(self.rec.order) do
        local run = self.active[id]
        if run then
            catch_up(self, run, #run.r.tokens)
            if not run.done then run.req:cancel() end
            if not run.done then run:compare(self.step) end
            conclude(self, run)
        end
    end
end

--- Logits behind these tokens: the n best as { id, logit }, and the values of some ids. They are computed in steps of
--- their own.
---@param seq any whose salt and adapter count
---@param tokens integer[]|nil in place of the sequence's own
---@param n? integer
---@param ids? integer[]
function Replay:logits(seq, tokens, n, ids)
    local f <close> = errors.check(CALL, seq:fork())
    if tokens then
        local common = f:common(tokens)
        if common < f:len() then errors.check(CALL, f:truncate(common)) end
        if common < #tokens then errors.check(CALL, f:append(table.move(tokens, common + 1, #tokens, 1, {}))) end
    end
    local only, admitting = self.only, self.admitting
    self.admitting, self.only = -1, -1
    local req <close> = errors.check(CALL, self.engine:request(f, { kind = "logits", key = -1 }))
    while req:active() do engine_step(self) end
    self.admitting, self.only = admitting, only
    local info = req:info()
    if info.state ~= "done" then errors.raise(CALL, info.error or "no logits came") end
    local row = req:logits()
    local best, values = {}, {}
    local best_ids, best_logits = row:topk(n or 5)
    for i, id in ipairs(best_ids) do best[i] = { id = id, logit = best_logits[i] } end
    if ids then
        for i, v in ipairs(row:get(ids)) do values[i] = v end
    end
    return best, values
end

--- Adds the logits to what differs: values of both tokens, the best two.
function Replay:explain(d)
    local r = self.rec.requests[d.request]
    local tokens = self.rec:prompt(d.request)
    table.move(r.tokens, 1, d.at - 1, #tokens + 1, tokens)
    local seq <close> = errors.check(CALL, self.engine:seq {
        salt = r.salt, lora = adapter_of(self, r.adapter, { line = r.line }),
    })
    errors.check(CALL, seq:append(tokens))
    local ids = { d.recorded, d.drawn }
    d.best, d.logits = self:logits(seq, nil, 2, ids)
    return d
end

-- Alone ---------------------------------------------------------------------------------------------------------------

--- One request by itself: nothing else runs. Returns what Replay has: compared, tokens, given, differences ...
---@param rec llmrun.Recording
---@param model llmrun.Model
---@param id integer
---@return llmrun.Replay
function M.alone(rec, model, id)
    M.check_model(rec, model)
    local r = rec.requests[id]
    if not r then errors.raise(CALL, ("%s: there is no request %d"):format(rec.path, id), "not_found") end
    local self = M.new(rec, model)
    local seq <close> = errors.check(CALL, self.engine:seq {
        salt = r.salt, lora = adapter_of(self, r.adapter, { line = r.line }),
    })
    errors.check(CALL, seq:append(rec:prompt(id)))
    self.admitting = id
    local run = start(self, r, seq)
    self.runs[id], self.active[id] = run, run
    self:finish()
    self.engine:set_policy(nil)
    return self
end

-- Words ---------------------------------------------------------------------------------------------------------------

local function shown(model, id)
    if not id then return "nothing" end
    return ("%d %s"):format(id, (json.encode(model.vocab:piece(id), { replace = true })))
end

--- What came of it, in lines.
---@param self llmrun.Replay
---@return string
function M.report(self)
    local lines = {}
    local d = self.differences[1]
    local n = #self.differences
    if not d then
        lines[1] = ("%s of %s equal"):format(count(self.tokens, "token"), count(self.compared, "request"))
    else
        lines[1] = ("%d of %s differ; the first: request %d (line %d of the recording), token %d%s"):format(n,
            count(self.compared, "request"), d.request, self.rec.requests[d.request].line, d.at,
            d.step and self.steps > 0 and (", step %d"):format(d.step) or "")
        lines[2] = ("  recorded %s, drawn %s%s"):format(shown(self.model, d.recorded), shown(self.model, d.drawn),
            d.why and (" (%s)"):format(d.why) or "")
        if d.best and d.best[2] then
            lines[3] = ("  logits: recorded %.6g%s; the best two are %s with %.6g and %s with %.6g, %.3g apart"):format(
                d.logits[1], d.drawn and (", drawn %.6g"):format(d.logits[2]) or "", shown(self.model, d.best[1].id),
                d.best[1].logit, shown(self.model, d.best[2].id), d.best[2].logit, d.best[1].logit - d.best[2].logit)
        end
    end
    local function more(times, text)
        if times > 0 then lines[#lines + 1] = ("  %d %s"):format(times, text) end
    end
    more(self.given, "of them had a Lua sampler: their tokens are taken from the recording")
    more(self.not_compared, "further requests judged drafts by distribution and are not compared")
    if self.steps > 0 and not self.free then
        lines[#lines + 1] = ("  %d of %s had as many rows as recorded"):format(self.equal_steps,
            count(self.steps, "step"))
    end
    if self.shadow then lines[#lines + 1] = self.shadow:text() end
    if self.rec.cut then lines[#lines + 1] = "  the recording has no end: the program was killed, or still runs" end
    return table.concat(lines, "\n")
end

return M
