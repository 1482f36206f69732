--- Sessions: a sequence of tokens with its KV, as a chat or as plain text.
---
--- Messages (s:user, ...) are collected; gen renders them with the chat template, keeps the longest prefix of tokens
--- that the session holds already, and computes the rest. What the model then says is the assistant's message. Between
--- the beginning of an answer and the next message the assistant's turn is "open": s:append and token-level loops add
--- to it.

local anchors = require "llmrun.anchors"
local constrain = require "llmrun.constrain"
local errors = require "llmrun.errors"
local json = require "llmrun.json"
local loop = require "llmrun.loop"
local options = require "llmrun.options"
local runner = require "llmrun.runner"
local sampler = require "llmrun.sampler"
local seeds = require "llmrun.seeds"
local spec = require "llmrun.spec"

local M = {}

---@class llmrun.Session
---@field model llmrun.Model
---@field len integer tokens it holds
---@field tokens integer[] a copy of them
---@field text string their text
---@field messages table[] the chat so far
---@field result? llmrun.Result of the last gen, stream or select
---@field picked table<string, string> the texts that select chose, by name
local Session = {}

local properties = {
    len = function(self) return self.seq:len() end,
    tokens = function(self) return self.seq:tokens() end,
    text = function(self) return (self.model.vocab:decode(self.seq:tokens(), false)) end,
    computed = function(self) return self.seq:info().computed end,
}

function Session.__index(self, key)
    local method = Session[key]
    if method ~= nil then return method end
    local get = properties[key]
    if get then
        if rawget(self, "closed") then errors.raise("s." .. key, "the session is closed", "state") end
        return get(self)
    end
end

function Session:__len() return self.len end
function Session:__tostring()
    return self.closed and "llmrun session (closed)" or ("llmrun session of %d tokens"):format(self.seq:len())
end

function M.new(model, seq, chat, opts)
    return setmetatable({
        model = model, seq = seq, chat = chat, messages = {}, tools = opts.tools, vars = opts.vars, tag = opts.tag,
        salt = opts.adapter and opts.adapter.key .. (opts.salt or "") or opts.salt, adapter = opts.adapter,
        ends = setmetatable({}, { __mode = "k" }), -- message -> tokens up to its end, once it was rendered
        forks = setmetatable({}, { __mode = "k" }), -- set of sessions that were forked from it
        picked = {},
    }, Session)
end

local function ready(self, call)
    if self.closed then errors.raise(call, "the session is closed", "state") end
    if self.model.closed then errors.raise(call, "the model is closed", "state") end
    if self.op then errors.raise(call, "the session is busy with another call; fork it, or wait", "state") end
end

--- Ends the assistant's open turn: what was added since becomes its message.
local function close_turn(self)
    local turn = self.turn
    if not turn then return end
    self.turn = nil
    local ids = self.seq:tokens(turn.at + 1)
    local text = turn.text or self.model.vocab:decode(ids, false)
    self.messages[#self.messages + 1] = { role = "assistant", content = text }
end

--- Puts an id or a list behind the session's tokens; where they don't fit, the error says by how much, and what helps.
---@param max_tokens? integer of the answer
local function put(self, call, ids, max_tokens)
    local total, info = self.seq:len() + (type(ids) == "table" and #ids or 1), self.model.info
    if total > info.ctx then
        local asked = max_tokens and (", the answer up to %d"):format(max_tokens) or ""
        local help = ", as the model allows no larger context"
        if info.ctx < info.n_ctx then
            help = (", or the context larger (ctx, kv; the model allows %d)"):format(info.n_ctx)
        end
        errors.raise(call, ("the context holds %d tokens, and the prompt has %d%s; it must be shorter by %d at least%s")
            :format(info.ctx, total, asked, total - info.ctx + 1, help), "full")
    end
    errors.check(call, self.seq:append(ids))
end

--- Brings the tokens up to the messages, with the beginning of the assistant's turn.
local function open_turn(self, call, max_tokens)
    if self.turn or #self.messages == 0 then return end
    local vars = { add_generation_prompt = true, tools = self.tools }
    for k, v in pairs(self.vars or {}) do vars[k] = v end
    local ids, pinned = self.chat:encode(call, self.chat:segments(call, self.messages, vars))
    local common = self.seq:common(ids)
    if common < self.seq:len() then errors.check(call, self.seq:truncate(common)) end
    if common < #ids then put(self, call, table.move(ids, common + 1, #ids, 1, {}), max_tokens) end
    for _, m in ipairs(self.messages) do self.ends[m] = self.ends[m] or #ids end
    self.turn, self.to_keep = { at = #ids }, pinned
end

--- Keeps what the template marked as pinned, once it is computed.
local function keep_pinned(self)
    local n = self.to_keep
    self.to_keep = nil
    if n and n > 0 and n <= self.seq:len() then anchors.keep(self, n) end
end

--- Adds a message of any form that the template knows: { role =, content =, ... }.
---@param message table
---@return llmrun.Session
function Session:message(message)
    ready(self, "s:message")
    if type(message) ~= "table" or type(message.role) ~= "string" then
        errors.raise("s:message", "a table with a role expected")
    end
    if #self.messages == 0 and not self.turn and not self.is_chat and self.seq:len() > 0 then
        errors.raise("s:message", "the session holds plain text already; a chat begins with an empty session", "state")
    end
    close_turn(self)
    self.is_chat = true
    self.messages[#self.messages + 1] = message
    return self
end

local function add_message(self, role, content)
    local call = "s:" .. role
    ready(self, call)
    if type(content) ~= "string" and type(content) ~= "table" then
        errors.raise(call, ("text expected, got %s"):format(type(content)))
    end
    return self:message { role = role, content = content }
end

--- Adds a message of the system's: what the model is to know and to do.
---@param content string|table
---@return llmrun.Session
function Session:system(content) return add_message(self, "system", content) end

--- Adds a message of the user's.
---@param content string|table
---@return llmrun.Session
function Session:user(content) return add_message(self, "user", content) end

--- Adds an answer of the model's, as if it had given it.
---@param content string|table
---@return llmrun.Session
function Session:assistant(content) return add_message(self, "assistant", content) end

--- Adds what a tool has returned.
---@param content string|table
---@return llmrun.Session
function Session:tool(content) return add_message(self, "tool", content) end

--- Adds tokens: a text, an id or a list of ids. In a chat they belong to the assistant's turn, which is opened if it is
--- not yet. A text at the very beginning gets the BOS token that the model wants. Options: special (names of special
--- tokens in the text count), bos (false: none).
---@param what string|integer|integer[]
---@param opts? { special?: boolean, bos?: boolean }
---@return llmrun.Session
function Session:append(what, opts)
    ready(self, "s:append")
    options.check("s:append", opts, { special = "boolean", bos = "boolean" }, 2)
    open_turn(self, "s:append")
    if type(what) == "string" then
        local bos = self.seq:len() == 0 and not (opts and opts.bos == false)
        what = errors.check("s:append", self.model.vocab:encode(what, { special = opts and opts.special, bos = bos }))
    elseif math.type(what) ~= "integer" and type(what) ~= "table" then
        errors.raise("s:append", ("text, token id or list of ids expected, got %s"):format(type(what)))
    end
    local ok, err = pcall(put, self, "s:append", what)
    if not ok and type(err) == "string" then errors.raise("s:append", (err:gsub("^.-:%d+: ", ""))) end
    if not ok then error(err, 0) end
    if self.turn then self.turn.text = nil end
    return self
end

-- Generating

M.gen_options = {
    max_tokens = "integer", stop = "string|table", stop_ids = "table", ignore_eos = "boolean", special = "boolean",
    logprobs = "boolean|integer", seed = "integer", priority = "integer", deadline = "number", tenant = "string",
    tag = "integer|table", fault = "string|table", speculate = spec.type,
}
for k, v in pairs(sampler.options) do M.gen_options[k] = v end
for k, v in pairs(constrain.options) do M.gen_options[k] = v end

local MAX_STOP = 4096 -- bytes of a stop string: a stream holds back as many

local function stop_list(call, stop)
    if stop == nil then return nil end
    if type(stop) == "string" then stop = { stop } end
    for i, s in ipairs(stop) do
        if type(s) ~= "string" then errors.raise(call, ("stop[%d]: string expected, got %s"):format(i, type(s))) end
        if s == "" then errors.raise(call, "stop: an empty string would end at once") end
        if #s > MAX_STOP then
            errors.raise(call, ("stop[%d]: a string of %d bytes; %d are the most"):format(i, #s, MAX_STOP))
        end
    end
    return stop
end

local function start(self, call, o)
    ready(self, call)
    options.check(call, o, M.gen_options, 3)
    o = o or {}
    if o.max_tokens and o.max_tokens < 1 then errors.raise(call, "max_tokens must be at least 1") end
    local stop = stop_list(call, o.stop)
    local n_top = -1
    if o.logprobs then n_top = o.logprobs == true and 0 or o.logprobs end
    local deadline = options.deadline(call, o.deadline, self.model.engine)
    local seed = o.seed or seeds.next()
    local recorder = self.model.runner.recorder
    if recorder then o = recorder:wrap(o) end
    local stages = sampler.from_options(call, o, self.model)
    local matcher, constraint = constrain.from_options(call, o, self.model)
    if matcher then ready(self, call) end -- others may have had their turn
    local drafts = spec.for_request(call, o.speculate, self, o.tenant)
    open_turn(self, call, o.max_tokens)
    if self.seq:len() == 0 then errors.raise(call, "nothing to go on from: the session is empty", "state") end
    local ok, op, err, code = pcall(self.model.runner.submit, self.model.runner, call, self.seq, {
        kind = "generate", stages = stages, seed = seed, max_tokens = o.max_tokens, stop = stop, stop_ids = o.stop_ids,
        ignore_eos = o.ignore_eos, special = o.special, n_top = n_top, priority = o.priority,
        deadline = deadline, tenant = o.tenant, tag = o.tag, speculate = drafts,
        matcher = matcher, options = recorder and o,
    })
    if not ok then
        if type(op) == "string" then op = op:gsub("^[^\n]-:%d+: ", "") end
        errors.raise(call, (tostring(op):gsub("^" .. call:gsub("%p", "%%%0") .. ": ", "")))
    end
    errors.check(call, op, err, code)
    if o.fault then
        local f = type(o.fault) == "table" and o.fault or { o.fault }
        op.req:inject(f[1], f[2] or 0)
    end
    op.seed, op.stop, op.from, op.constraint = seed, stop, self.seq:len(), constraint
    self.op = op
    return op
end

--- Text and position of each record of logprobs.
local function logprob_list(self, req)
    local list = req:logprobs()
    for _, r in ipairs(list) do
        r.text = self.model.vocab:piece(r.id)
        for _, t in ipairs(r.top or {}) do t.text = self.model.vocab:piece(t.id) end
    end
    return list
end

local function make_result(self, op, info)
    local req = op.req
    local r = {
        text = req:text(), tokens = req:tokens(), finish_reason = info.finish, seed = op.seed,
        usage = {
            prompt_tokens = info.n_prompt, cached_tokens = info.n_cached, completion_tokens = info.n_generated,
            computed_tokens = info.n_computed, forced_tokens = op.constraint and info.n_forced or nil,
        },
        timing = { queued = info.t_queued, total = info.t_end - info.t_arrival, preempted = info.n_preempted },
    }
    r.speculation = spec.stats(info.speculation)
    if info.stop_string >= 0 then r.stop = op.stop[info.stop_string + 1] end
    if info.stop_token >= 0 then r.stop_token = info.stop_token end
    if info.t_first > 0 then
        r.timing.first_token = info.t_first - info.t_arrival
        local n = info.n_generated - 1
        if n > 0 and info.t_last > info.t_first then r.timing.tokens_per_second = n / (info.t_last - info.t_first) end
    end
    if op.logprobs then r.logprobs = logprob_list(self, req) end
    if op.constraint == "json" then r.value = (json.decode(r.text, { ordered = true })) end
    return r
end

--- Ends the call: its result, with the assistant's message in its place; raises if the request failed.
local function finish(self, call, op)
    self.op = nil
    if self.model.closed then errors.raise(call, "the model was closed meanwhile", "cancelled") end
    if op.closed then errors.raise(call, "the session was closed meanwhile", "cancelled") end
    local info = op.req:info()
    if info.state == "failed" then
        op:close()
        self.turn = nil
        local text = info.error
        local why = self.model.script and self.model.script:last_error()
        if why then text = text .. ": " .. why end
        errors.raise(call, text, info.code)
    end
    local r = make_result(self, op, info)
    op:close()
    keep_pinned(self)
    if self.turn then
        local before = self.model.vocab:decode(self.seq:tokens(self.turn.at + 1, op.from), false)
        self.turn.text = before .. r.text
        close_turn(self)
        self.ends[self.messages[#self.messages]] = self.seq:len()
    end
    self.result = r
    return r
end

local function release(self, op)
    if self.op == op then self.op = nil end
    op:close()
end

--- Generates until a stop, and returns { text, tokens, finish_reason ("stop", "length", "cancelled"), stop, logprobs,
--- usage = { prompt_tokens, cached_tokens, computed_tokens, completion_tokens }, timing = { queued, first_token, total,
--- tokens_per_second }, seed, value (with json) }. Options: max_tokens, stop, stop_ids, ignore_eos, special, logprobs,
--- seed, the sampling options (sampler.lua), what the text must look like (constrain.lua), priority, deadline (seconds
--- from now), tenant, tag.
---@param opts? llmrun.GenOptions
---@return llmrun.Result
function Session:gen(opts)
    local op = start(self, "s:gen", opts)
    op.logprobs = opts and opts.logprobs
    local guard <close> = setmetatable({}, { __close = function() release(self, op) end }) -- luacheck: ignore 211
    op:wait(runner.DONE)
    return finish(self, "s:gen", op)
end

--- As gen, piece by piece: for piece in s:stream{...} do ... end. Leaving the loop early ends the request; s.result has
--- what gen would have returned.
---@param opts? llmrun.GenOptions
---@return fun(): string?
function Session:stream(opts)
    local op = start(self, "s:stream", opts)
    op.logprobs = opts and opts.logprobs
    local sent = 0
    local function next_piece()
        if self.op ~= op then return nil end
        while true do
            local done = op.done
            local piece, n = op.req:text(sent)
            if piece ~= "" then
                sent = n
                return piece
            end
            if done then
                finish(self, "s:stream", op)
                return nil
            end
            op:wait(runner.TEXT)
            if op.closed then return nil end
        end
    end
    local guard = setmetatable({}, {
        __close = function()
            if self.op ~= op then return end
            op:cancel()
            if not op.closed then finish(self, "s:stream", op) end
            release(self, op)
        end,
    })
    return next_piece, nil, nil, guard
end

--- Ends the call that another branch waits for in this session; it returns what there is, with finish_reason
--- "cancelled". False if there is none.
---@return boolean
function Session:cancel()
    if not self.op then return false end
    self.op:cancel()
    return true
end

-- Tokens

--- Computes what is pending and gives the logits for the next token: a view that is dead once anything waits (see
--- lua_logits.c: argmax, topk, get, softmax, logprob, entropy, sample, add, scale, mask, keep, copy).
---@return llmrun.Logits
function Session:logits()
    ready(self, "s:logits")
    open_turn(self, "s:logits")
    if self.seq:len() == 0 then errors.raise("s:logits", "the session is empty", "state") end
    local op = errors.check("s:logits", self.model.runner:submit("s:logits", self.seq, { kind = "logits" }))
    self.op = op
    local guard <close> = setmetatable({}, { -- luacheck: ignore 211
        __close = function()
            if self.op == op then self.op = nil end
        end,
    })
    op:wait(runner.DONE)
    local info = op.req:info()
    if info.state == "failed" then
        local why = self.model.script and self.model.script:last_error()
        errors.raise("s:logits", info.error .. (why and ": " .. why or ""), info.code)
    end
    return op.req:logits()
end

--- Log-probabilities of the session's own tokens from position `from` on (1-based; 2 or more): a list of { id, logprob,
--- text }, and their sum. top = n adds the n best of each place; keep = core.rows(n, vocabulary) takes their logits.
---@param opts? { from?: integer, top?: integer, keep?: userdata }
---@return table[] list, number sum
function Session:score(opts)
    ready(self, "s:score")
    options.check("s:score", opts, { from = "integer", top = "integer", keep = "any" }, 2)
    local from = opts and opts.from or 2
    if from < 2 or from > self.seq:len() then
        errors.raise("s:score", ("from = %d: 2 to the session's length (%d) expected"):format(from, self.seq:len()))
    end
    local op = errors.check("s:score", self.model.runner:submit("s:score", self.seq,
        { kind = "score", score_from = from - 1, n_top = opts and opts.top or 0,
            keep = opts and opts.keep }))
    self.op = op
    local guard <close> = setmetatable({}, { __close = function() release(self, op) end }) -- luacheck: ignore 211
    op:wait(runner.DONE)
    local info = op.req:info()
    if info.state == "failed" then errors.raise("s:score", info.error, info.code) end
    return logprob_list(self, op.req), (op.req:logprob_sum())
end

--- Which of several texts the model finds most probable next: one batch on the shared prefix. The session goes on
--- behind it, as if it had been appended. Returns the text and { name, text, index, method, choices = { { text, tokens,
--- logprobs, logprob, score }, ... }, usage }; s.picked[name] is the text. Options: method
--- ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized": see select.lua),
--- priority, deadline, tenant.
---@param name string
---@param choices string[]
---@param opts? table
---@return string text, table result
function Session:select(name, choices, opts)
    return require("llmrun.select").run(self, M.internal, name, choices, opts)
end

local function copy_chat(self, f)
    f.messages = table.move(self.messages, 1, #self.messages, 1, {})
    for m, e in pairs(self.ends) do f.ends[m] = e end
    f.turn = self.turn and { at = self.turn.at, text = not self.op and self.turn.text or nil }
    f.is_chat, f.picked = self.is_chat, {}
    for k, v in pairs(self.picked) do f.picked[k] = v end
end

--- Takes over a sequence in place of its own.
local function adopt(self, seq)
    self.seq:close()
    self.seq = seq
    if self.pinned then self.seq:pin(true) end -- if there is room
    if self.tag ~= nil then self.seq:set_tag(self.tag) end
end

local MAX_FORKS = 4096 -- at once: a slip of the pen must not take all memory

--- n sessions (1) that go on from here; they share the KV so far. Also between the pieces of a stream.
---@param n? integer
---@return llmrun.Session ...
function Session:fork(n)
    if self.closed or self.model.closed then ready(self, "s:fork") end
    n = n or 1
    if math.type(n) ~= "integer" or n < 1 or n > MAX_FORKS then
        errors.raise("s:fork", ("a number of forks expected, 1 to %d, got %s"):format(MAX_FORKS, tostring(n)))
    end
    local forks = {}
    for i = 1, n do
        local seq, err, code = self.seq:fork()
        if not seq then
            for _, f in ipairs(forks) do f:close() end
            errors.raise("s:fork", err, code)
        end
        forks[i] = M.new(self.model, seq, self.chat, self)
        copy_chat(self, forks[i])
        self.forks[forks[i]] = true
    end
    return table.unpack(forks)
end

--- Goes on as one of its forks: takes its tokens, KV and messages; the fork is closed. The session's other forks are
--- closed too, whatever they are doing: what they hold is free at once, and a call that waits in one of them ends with
--- an error of code "cancelled". keep = true leaves them alone.
---@param winner llmrun.Session
---@param opts? { keep?: boolean }
---@return llmrun.Session
function Session:join(winner, opts)
    ready(self, "s:join")
    options.check("s:join", opts, { keep = "boolean" }, 2)
    if getmetatable(winner) ~= Session then
        errors.raise("s:join", ("a fork of the session expected, got %s"):format(type(winner)))
    elseif not self.forks[winner] then
        errors.raise("s:join", "the session given was not forked from this one")
    end
    ready(winner, "s:join: the fork")
    local seq = winner.seq
    winner.closed = true
    self.forks[winner] = nil
    copy_chat(winner, self)
    self.result = winner.result
    if not (opts and opts.keep) then
        for f in pairs(self.forks) do f:close() end
        self.forks = setmetatable({}, { __mode = "k" })
    end
    adopt(self, seq)
    return self
end

local function cut(self, call, pos)
    local len = self.seq:len()
    if pos < 0 or pos > len then
        errors.raise(call, ("position %d is outside the session (0 to %d)"):format(pos, len))
    end
    errors.check(call, self.seq:truncate(pos))
    for i = #self.messages, 1, -1 do
        local e = self.ends[self.messages[i]]
        if e and e <= pos then break end
        self.messages[i] = nil
    end
    if self.turn and self.turn.at > pos then self.turn = nil end
    if self.turn then self.turn.text = nil end
    return self
end

--- Cuts the session to its first pos tokens; messages whose end is cut off go too. A negative pos counts from the end.
---@param pos integer
---@return llmrun.Session
function Session:rewind(pos)
    ready(self, "s:rewind")
    if math.type(pos) ~= "integer" then errors.raise("s:rewind", "a position (integer) expected, got " .. type(pos)) end
    return cut(self, "s:rewind", pos < 0 and self.seq:len() + pos or pos)
end

--- As rewind, to a length counted from the beginning.
---@param n integer
---@return llmrun.Session
function Session:truncate(n)
    ready(self, "s:truncate")
    if math.type(n) ~= "integer" or n < 0 then
        errors.raise("s:truncate", ("a length (integer) expected, got %s"):format(tostring(n)))
    end
    return cut(self, "s:truncate", n)
end

--- Keeps its blocks when memory runs short: for so many seconds, or (true, nothing) until s:pin(false).
---@param how? boolean|number
function Session:pin(how)
    ready(self, "s:pin")
    if how == nil then how = true end
    local seconds = type(how) == "number" and how
    if type(how) ~= "boolean" and not (seconds and seconds > 0) then
        errors.raise("s:pin", ("true, false or a number of seconds above 0 expected, got %s"):format(tostring(how)))
    end
    errors.check("s:pin", self.seq:pin(how ~= false))
    if self.pin_timer then loop.cancel_timer(self.pin_timer) end
    self.pin_timer, self.pinned = nil, how ~= false
    if seconds then
        self.pin_timer = loop.after(seconds, function()
            self.pin_timer, self.pinned = nil, false
            if not self.closed and not self.model.closed then self.seq:pin(false) end
        end)
    end
    return self
end

--- Sets the tag that policies see: an integer or a table (nil: none).
---@param tag integer|table|nil
function Session:set_tag(tag)
    ready(self, "s:set_tag")
    if tag ~= nil and math.type(tag) ~= "integer" and type(tag) ~= "table" then
        errors.raise("s:set_tag", ("integer or table expected, got %s"):format(type(tag)))
    end
    self.seq:set_tag(tag)
    self.tag = tag
    return self
end

--- Writes tokens and KV to a file that model:restore reads.
---@param path string
---@return llmrun.Session
function Session:save(path)
    ready(self, "s:save")
    if type(path) ~= "string" then errors.raise("s:save", "a path expected, got " .. type(path)) end
    errors.check("s:save", self.seq:save(path))
    return self
end

local function close_now(self)
    self.closed = true
    if self.op then
        self.op:cancel() -- wakes who waits for it, with what there is
        self.op:close()
        self.op = nil
    end
    if self.pin_timer then loop.cancel_timer(self.pin_timer) end
    self.seq:close()
end

--- Frees the session; what it computed may stay in the prefix cache. A call that waits in another branch is ended.
function Session:close()
    if not self.closed then loop.critical(close_now, self) end
end

Session.__close = Session.close

--- For other modules of the library.
M.internal = { ready = ready, open_turn = open_turn, adopt = adopt, keep_pinned = keep_pinned }

return M
