--- Recordings: all that decided what a model's engine did, written down as it happens, so that it can be repeated
--- (llmrun replay, replay.lua) or given to the simulator. The file's lines are told in lua/README.md.
---
---   record.begin(model, "run.rec")          -- from now on; no request may be active
---   record.finish(model)                    -- also when the model is closed, or the program ends
---
--- After each step the system has all of it, so a process that is killed leaves a file that is whole up to the last
--- step. It holds prompts (as tokens) and what tools returned, so only its owner may read it; it never holds keys of
--- the API: texts given to record.hide are cut out of every line. Files that can't be written end the recording, with a
--- word on standard error, not the program.

local constrain = require "llmrun.constrain"
local core = require "llmrun.core"
local json = require "llmrun.json"
local notes = require "llmrun.record.notes"
local plain = require "llmrun.record.plain"
local sampler = require "llmrun.sampler"

local M = {}

M.VERSION = 1

--- Set by the command line: models that are made from now on are recorded to this file, further ones to FILE.2, FILE.3.
M.path = nil

local MAX_NOTE = 64 << 10 -- bytes of a text that a tool returned

local active, n_active = {}, 0 -- recorder -> true
local note
local hidden = {} -- texts that never come into a file
local made = 0 -- models recorded because of M.path
local broken = false -- a recording could not be written to its end

--- Keeps a text out of every recording: a key.
function M.hide(text)
    if type(text) == "string" and #text >= 4 then hidden[#hidden + 1] = text end
end

---@class llmrun.Recorder
local Recorder = {}
Recorder.__index = Recorder

local function without_hidden(line)
    for _, text in ipairs(hidden) do
        local quoted = text:gsub("%p", "%%%0")
        if line:find(text, 1, true) then line = line:gsub(quoted, "[key]") end
    end
    return line
end

local function stop(self, why)
    if self.stopped then return end
    self.stopped = true
    active[self] = nil
    n_active = n_active - 1
    if n_active == 0 then notes.unlisten(note) end
    if self.runner.recorder == self then self.runner.recorder = nil end
    self.runner:unobserve(self)
    self.file:close()
    if not why then return end
    broken = true
    io.stderr:write("llmrun: the recording ", self.path, " ends here: ", why, "\n")
end

local function write(self, text)
    if self.stopped or text == "" then return end
    local ok, err = self.file:write(text)
    if not ok then stop(self, err) end
end

--- Observer (runner.lua): what the engine did.
function Recorder:took(text, err)
    if not text then return stop(self, err) end
    write(self, text)
end

function Recorder:closing() M.finish(self) end

local function now(self) return math.max(0, self.runner.core:now() - self.start) end

local function seconds(v) return tonumber(("%.6f"):format(v)) end

--- A line behind what the engine has done so far.
function Recorder:line(t)
    if self.stopped then return end
    self.runner:pump()
    local text, err = json.encode(t, { replace = true })
    if not text then return stop(self, err) end
    write(self, without_hidden(text) .. "\n")
end

-- Requests ------------------------------------------------------------------------------------------------------------

local kept_options = {}
for name in pairs(sampler.options) do kept_options[name] = true end
for name in pairs(constrain.options) do kept_options[name] = true end

--- A function whose answers are kept, by what it was asked.
function Recorder:wrap_function(fn)
    self.n_fns = self.n_fns + 1
    local n = self.n_fns
    local function kept(text, ...)
        local v = fn(text, ...)
        self:line { call = n, text = plain.encode(text), v = plain.encode(v) }
        return v
    end
    self.fns[kept] = n
    return kept
end

--- Options of a call whose functions (of constraints) are kept.
function Recorder:wrap(o)
    if not (o and (o.lua or o.holes)) then return o end
    local out = {}
    for k, v in pairs(o) do out[k] = v end
    if type(o.lua) == "function" then out.lua = self:wrap_function(o.lua) end
    if type(o.holes) == "table" then
        out.holes = {}
        for name, fn in pairs(o.holes) do
            out.holes[name] = type(fn) == "function" and self:wrap_function(fn) or fn
        end
    end
    return out
end

local request_keys = {
    "request", "of", "t", "kind", "prompt", "tenant", "priority", "deadline", "max_tokens", "seed", "n_top", "stop",
    "stop_ids", "ignore_eos", "special", "score_from", "distribution", "options",
}

--- Observer: a new request.
function Recorder:submitted(op, seq, params)
    local info = op.req:info()
    local o, options = params.options, nil
    for name in pairs(o or {}) do
        if kept_options[name] then
            options = options or {}
            options[name] = o[name]
            if name == "sampler" and sampler.is(o.sampler) then -- stages in the form that the engine takes
                options.sampler, options.stages = nil, table.move(o.sampler, 1, #o.sampler, 1, {})
            end
        end
    end
    local spec = params.speculate
    local line = {
        request = info.id, of = seq:info().id, t = seconds(math.max(0, info.t_arrival - self.start)),
        kind = params.kind, prompt = info.n_prompt, tenant = params.tenant, priority = params.priority,
        deadline = params.deadline and params.deadline < math.huge and seconds(params.deadline - info.t_arrival) or nil,
        max_tokens = params.kind == "generate" and info.max_tokens or nil, seed = params.seed,
        n_top = params.n_top ~= -1 and params.n_top or nil, stop = plain.encode(params.stop),
        stop_ids = params.stop_ids and json.array(table.move(params.stop_ids, 1, #params.stop_ids, 1, {})) or nil,
        ignore_eos = params.ignore_eos, special = params.special, score_from = params.score_from,
        distribution = spec and spec.accept == "distribution" or nil, options = plain.encode(options, self.fns),
    }
    self:line(json.object(line, request_keys))
end

-- Beginning and ending ------------------------------------------------------------------------------------------------

--- The fingerprint of a model as it stands in recordings.
function M.fingerprint(model) return ("%016x"):format(model.engine:model_info().fingerprint) end

local function header(model)
    local info, config = model.engine:info(), model.config or {}
    local blocks = json.array()
    for i, group in ipairs(info.kv) do blocks[i] = group.total end
    local options = {
        ctx = info.context, max_batch_tokens = info.max_batch_tokens, max_seqs = info.max_seqs, chunk = info.chunk,
        preempt = config.preempt, swap_bytes = config.swap_bytes, max_pinned = config.max_pinned,
        patience = config.patience, compute = config.compute,
        kv = {
            blocks = blocks, type = info.kv_type:lower(), value_type = info.kv_value_type:lower(),
            block_size = info.block_size,
            prefix_cache = not (config.kv and config.kv.prefix_cache == false),
        },
    }
    return json.object({
        llmrun = "recording", version = M.VERSION, started = os.time(),
        model = {
            name = model.info.name, path = model.info.path, arch = model.info.arch, n_vocab = model.info.n_vocab,
            fingerprint = M.fingerprint(model), backend = info.backend,
        },
        options = options, policy = model.policy_status and model.policy_status.name,
    }, { "llmrun", "version", "started", "model", "options", "policy" })
end

--- Records a model's engine from now on. nil, text, code: it can't be.
---@param model llmrun.Model
---@param path string
---@return llmrun.Recorder?, string?, string?
function M.begin(model, path)
    local runner = model.runner
    if runner.recorder then return nil, "it is recorded already, to " .. runner.recorder.path, "state" end
    if runner:busy() then return nil, "a recording begins while no request is active", "state" end
    local file, err, code = core.private_file(path)
    if not file then return nil, err, code end
    local self = setmetatable({
        runner = runner, file = file, path = path, fns = setmetatable({}, { __mode = "k" }), n_fns = 0,
        start = runner.core:now(),
    }, Recorder)
    local ok
    ok, err, code = file:write(without_hidden(json.encode(header(model), { replace = true })) .. "\n")
    if ok then ok, err, code = runner:observe(self) end
    if not ok then
        file:close()
        return nil, ("%s: %s"):format(path, err), code
    end
    active[self] = true
    n_active = n_active + 1
    if n_active == 1 then notes.listen(note) end
    runner.recorder = self
    runner:pump()
    for _, a in pairs(model.adapters or {}) do self:adapter(a) end
    return self
end

--- A low-rank adapter that sequences name by its fingerprint.
function Recorder:adapter(a)
    self:line { adapter = a.core:info().fingerprint, path = a.path, scale = a.scale }
end

--- Ends a recording (of a model, or a recorder).
function M.finish(what)
    local self = getmetatable(what) == Recorder and what or what.runner.recorder
    if not self or self.stopped then return end
    if not self.runner.closed then self:line { ["end"] = true, t = seconds(now(self)) } end
    stop(self)
end

--- Ends all: the program is over. Whether all recordings of it are whole.
function M.finish_all()
    local list = {}
    for r in pairs(active) do list[#list + 1] = r end
    for _, r in ipairs(list) do M.finish(r) end
    return not broken
end

--- Whether M.path, if there is one, can be written: true; or nil and a text.
function M.check()
    if not M.path then return true end
    local there = core.stat(M.path) ~= nil
    local file <close>, err = io.open(M.path, "ab")
    if not file then return nil, err end
    if not there then os.remove(M.path) end -- it comes with the first model
    return true
end

--- A model was made: recorded, if the command line wants it. Raises if it can't be.
function M.made(call, model)
    if not M.path then return end
    made = made + 1
    require("llmrun.errors").check(call, M.begin(model, made == 1 and M.path or ("%s.%d"):format(M.path, made)))
end

-- What comes from outside ---------------------------------------------------------------------------------------------

local function cut(v)
    if type(v) ~= "string" or #v <= MAX_NOTE then return v end
    return v:sub(1, MAX_NOTE) .. ("... (%d bytes)"):format(#v)
end

--- Something came from outside: into all recordings.
function note(kind, t)
    local line = { note = kind }
    for k, v in pairs(t) do line[k] = plain.encode(cut(v)) end
    for r in pairs(active) do
        line.t = seconds(now(r))
        r:line(line)
    end
end

return M
