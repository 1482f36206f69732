--- A model with its engine: what llm.load and llm.scripted return.

local adapter = require "llmrun.adapter"
local anchors = require "llmrun.anchors"
local core = require "llmrun.core"
local errors = require "llmrun.errors"
local options = require "llmrun.options"
local policy = require "llmrun.policy"
local chat = require "llmrun.chat"
local runner = require "llmrun.runner"
local session = require "llmrun.session"
local spec = require "llmrun.spec"
local tokens = require "llmrun.tokens"

local M = {}

---@class llmrun.Model
---@field info { name: string, arch: string, path: string, n_vocab: integer, ctx: integer, bos: integer, eos: integer }
---@field closed? boolean
local Model = {}
Model.__index = Model

--- Options of the engine that llm.load and llm.scripted take beside their own.
M.engine_options = {
    ctx = "integer", max_batch_tokens = "integer", max_seqs = "integer", max_waiting = "integer", chunk = "integer",
    prompt_rows = "integer", preempt = "string", swap_bytes = "integer", max_pinned = "integer", patience = "integer",
    kv = "table", template = "string|function", policy = "table|function|string", speculate = spec.type,
}
--- While this is a text, no model can be closed, for that reason.
---@type string?
M.kept = nil

--- Models that are open; may hold some that nobody uses any more.
M.open = setmetatable({}, { __mode = "k" })
local n_made = 0

--- What llm.load takes beside these.
M.load_options = {
    device = "string", threads = "integer", isa = "string", compute = "string", arch = "string|function",
    allow_unused = "boolean",
}
for k, v in pairs(M.engine_options) do M.load_options[k] = v end
M.kv_options = {
    blocks = "integer|string|table", memory = "number", type = "string", value_type = "string",
    block_size = "integer",
    prefix_cache = "boolean", hash_bits = "integer", spill = "string", spill_bytes = "integer",
}

local function engine_config(call, o, default_kv_type)
    local kv = o.kv or {}
    options.check(call .. ": kv", kv, M.kv_options, 3)
    local types = require("llmrun.plan").kv_value_bytes
    for _, name in ipairs { "type", "value_type" } do
        if kv[name] and not types[kv[name]] then
            errors.raise(call, ("kv.%s: f32, f16, bf16, fp8, q8_0 or q4_0 expected, got '%s'"):format(name, kv[name]))
        end
    end
    local blocks = kv.blocks
    if type(blocks) == "string" then
        if blocks ~= "auto" then
            errors.raise(call, ("kv.blocks: a number or \"auto\" expected, got '%s'"):format(blocks))
        end
        blocks = nil
    end
    local c = {
        context = o.ctx, max_batch_tokens = o.max_batch_tokens, max_seqs = o.max_seqs, max_waiting = o.max_waiting,
        chunk = o.chunk, prompt_rows = o.prompt_rows, preempt = o.preempt, swap_bytes = o.swap_bytes,
        max_pinned = o.max_pinned, patience = o.patience, kv_blocks = blocks, kv_type = kv.type or default_kv_type,
        kv_value_type = kv.value_type, block_size = kv.block_size, prefix_cache = kv.prefix_cache,
        hash_bits = kv.hash_bits, spill = kv.spill, spill_bytes = kv.spill_bytes,
    }
    if kv.memory then
        if not (kv.memory > 0 and kv.memory < 2 ^ 53) then
            errors.raise(call, "kv.memory: a fraction below 1 or a number of bytes expected")
        end
        if kv.memory < 1 then c.kv_fraction = kv.memory else c.kv_bytes = math.tointeger(kv.memory // 1) end
    end
    return c
end

-- What has been made so far and goes if the rest can't be made: at once, not when the collector comes by, as a device
-- whose memory it holds may be wanted for another try.
local Hold = { __close = function(h) if h.made then h.made:close() end end }

--- Makes an engine for a core model, which it takes over.
---@param call string
---@param core_model any
---@param o table options
---@param info table { name, arch, vocab, chat_template, path, bytes, default_kv_type }
function M.new(call, core_model, o, info)
    local hold <close> = setmetatable({ made = core_model }, Hold)
    local engine = errors.check(call, core.engine_new(core_model, engine_config(call, o, info.default_kv_type)))
    hold.made = engine
    local vocab = info.vocab
    local self = setmetatable({ runner = runner.new(engine), engine = engine, vocab = vocab, anchors = {} }, Model)
    self.script = info.script
    self.source = adapter.source(info)
    local made = engine:model_info()
    local vi = vocab:info()
    self.info = {
        name = info.name or made.name, arch = info.arch, path = info.path, bytes = info.bytes, n_vocab = made.n_vocab,
        n_ctx = made.n_ctx, ctx = engine:info().context, n_embd = made.n_embd, bos = vi.bos, eos = vi.eos, eog = vi.eog,
        add_bos = vi.add_bos, windows = made.windows, formats = info.formats, sampling = info.sampling,
        backend = engine:info().backend,
    }
    self.chat = chat.new(call, o.template or info.chat_template, vocab, self.info.name)
    spec.for_model(call, self, o)
    self.config = {
        preempt = o.preempt, swap_bytes = o.swap_bytes, max_pinned = o.max_pinned, patience = o.patience,
        compute = o.compute, kv = o.kv and { prefix_cache = o.kv.prefix_cache },
    }
    n_made = n_made + 1
    M.open[self] = n_made
    hold.made = self
    require("llmrun.record").made(call, self)
    if o.policy then self:use(o.policy) end
    hold.made = nil
    return self
end

local function check_open(self, call)
    if self.closed then errors.raise(call, "the model is closed", "state") end
end

M.session_options = {
    template = "string|function", tools = "table", vars = "table", salt = "string", tag = "integer|table",
    adapter = "table",
}

--- Options of a sequence of the engine.
local function seq_options(call, opts)
    local a = adapter.check(call, opts.adapter)
    return { salt = opts.salt, tag = opts.tag, lora = a and a.core }
end

--- A new session: a sequence of tokens with its KV, and perhaps a chat. Options: template (instead of the model's),
--- tools and vars (for the template), salt (keeps its prefix cache apart), tag (for eviction policies), adapter (of
--- model:adapter; part of the prefix cache's key).
---@param opts? llmrun.SessionOptions
---@return llmrun.Session
function Model:session(opts)
    check_open(self, "model:session")
    options.check("model:session", opts, M.session_options, 2)
    opts = opts or {}
    local seq = errors.check("model:session", self.engine:seq(seq_options("model:session", opts)))
    local c = opts.template and chat.new("model:session", opts.template, self.vocab, self.info.name) or self.chat
    return session.new(self, seq, c, opts)
end

--- A session that s:save wrote. Options as in session. The file holds tokens and KV; a chat also needs its messages
--- back before it goes on: s.messages = those of the session that was saved.
---@param path string
---@param opts? llmrun.SessionOptions
---@return llmrun.Session
function Model:restore(path, opts)
    check_open(self, "model:restore")
    options.check("model:restore", opts, M.session_options, 2)
    opts = opts or {}
    local seq = errors.check("model:restore", self.engine:restore(path, seq_options("model:restore", opts)))
    local c = opts.template and chat.new("model:restore", opts.template, self.vocab, self.info.name) or self.chat
    return session.new(self, seq, c, opts)
end

--- Loads a low-rank adapter for this model: a folder of PEFT (adapter_config.json, adapter_model.safetensors) or a GGUF
--- file. It is used by sessions that name it, beside others in the same batch. Options: scale (multiplies the file's
--- own), name.
---@param path string
---@param opts? { scale?: number, name?: string }
---@return llmrun.Adapter
function Model:adapter(path, opts)
    check_open(self, "model:adapter")
    return adapter.load("model:adapter", self, path, opts)
end

--- This model as if it had the adapter in it: for code that makes its own sessions, as a server does.
---@param a llmrun.Adapter
---@return llmrun.Model
function Model:with(a)
    check_open(self, "model:with")
    if a == nil then errors.raise("model:with", "an adapter expected, got nil") end
    return adapter.view("model:with", self, a)
end

local tokenize_options = { special = "boolean", bos = "boolean" }

--- Token ids of a text. special: names of special tokens in it count as such; bos: with what the model wants at a
--- text's beginning and end.
---@param text string
---@param opts? { special?: boolean, bos?: boolean }
---@return integer[]
function Model:tokenize(text, opts)
    check_open(self, "model:tokenize")
    if type(text) ~= "string" then errors.raise("model:tokenize", "string expected, got " .. type(text)) end
    options.check("model:tokenize", opts, tokenize_options, 2)
    return (errors.check("model:tokenize", tokens.encode(self.vocab, text, opts)))
end

--- The text of token ids. special: control tokens show their names.
---@param ids integer[]|integer
---@param opts? { special?: boolean }
---@return string
function Model:detokenize(ids, opts)
    check_open(self, "model:detokenize")
    options.check("model:detokenize", opts, { special = "boolean" }, 2)
    if math.type(ids) == "integer" then ids = { ids } end
    if type(ids) ~= "table" then errors.raise("model:detokenize", "list of token ids expected, got " .. type(ids)) end
    return (errors.check("model:detokenize", self.vocab:decode(ids, opts and opts.special or false)))
end

--- The prompt that the chat template makes of messages: its text and its ids. Options are the template's variables;
--- add_generation_prompt is true unless given.
---@param messages table[]
---@param vars? table
---@return string text, integer[] ids
function Model:apply_template(messages, vars)
    check_open(self, "model:apply_template")
    if type(messages) ~= "table" then
        errors.raise("model:apply_template", "list of messages expected, got " .. type(messages))
    end
    local all = { add_generation_prompt = true }
    for k, v in pairs(vars or {}) do all[k] = v end
    local segments = self.chat:segments("model:apply_template", messages, all)
    return chat.text(segments), self.chat:encode("model:apply_template", segments)
end

--- Counters and histograms of the engine (see engine/metrics.h).
---@return table
function Model:metrics()
    check_open(self, "model:metrics")
    local m = self.engine:metrics()
    spec.stats(m.speculation)
    return m
end

--- The same as Prometheus text.
---@return string
function Model:prometheus()
    check_open(self, "model:prometheus")
    return (errors.check("model:prometheus", self.engine:prometheus(self.info.name)))
end

--- What runs now and what memory holds: see lua_engine.c, engine_info.
---@return table
function Model:stats()
    check_open(self, "model:stats")
    return self.engine:info()
end

--- Checks the engine's invariants; raises if one is broken. For tests.
function Model:check()
    check_open(self, "model:check")
    return errors.check("model:check", self.engine:check())
end

--- Writes a trace of all steps from now on to a file (Chrome's and Perfetto's format); nil ends it, as the model's end
--- does. The file takes its place then, whole.
---@param path? string
function Model:trace(path)
    check_open(self, "model:trace")
    errors.check("model:trace", self.engine:trace(path))
end

--- Puts a policy in charge (see policy.lua): a table, a function that makes one, a name or a file; nil: the built-in
--- rule. At any moment; no request and no KV is lost. opts: the policy's own. Returns what is known of it.
---@param what table|function|string|nil
---@param opts? table
---@param limits? { seconds?: number, memory?: integer, failures?: integer }
function Model:use(what, opts, limits)
    check_open(self, "model:use")
    local status = errors.check("model:use", policy.use(self.engine, what, opts, limits))
    if self.policy_watch then self.policy_watch:stop() end
    self.policy_status, self.policy_watch = status, nil
    if self.runner.recorder then self.runner.recorder:line { policy = status.name } end
    return status
end

--- As use, with a file that is read again whenever it changes; watch:stop() ends that.
---@param path string
---@param opts? { every?: number, options?: table, limits?: table }
function Model:watch(path, opts)
    check_open(self, "model:watch")
    local watch = errors.check("model:watch", policy.watch(self.engine, path, opts))
    if self.policy_watch then self.policy_watch:stop() end
    self.policy_status, self.policy_watch = watch.status, watch
    if self.runner.recorder then self.runner.recorder:line { policy = watch.status.name } end
    return watch
end

--- Forgets cached prefixes that no session holds, also what templates pinned.
function Model:drop_cached()
    check_open(self, "model:drop_cached")
    anchors.drop(self)
    self.engine:drop_cached()
end

--- Ends its requests, frees its memory; its sessions are dead then.
function Model:close()
    if self.closed then return end
    if M.kept then errors.raise("model:close", M.kept, "state") end
    self.closed = true
    M.open[self] = nil
    anchors.drop(self)
    self.runner:close()
end

Model.__close = Model.close

--- Models that are open, the oldest first.
---@return llmrun.Model[]
function M.list()
    local list = {}
    for m in pairs(M.open) do list[#list + 1] = m end
    table.sort(list, function(a, b) return M.open[a] < M.open[b] end)
    return list
end

function Model:__tostring() return ("llmrun model %s"):format(self.info.name) end

return M
