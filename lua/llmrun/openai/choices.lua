--- Running the choices of a request, one or many side by side, and what their tokens look like in an answer.
---
--- A record is a token of an answer: { id, logprob, top, text (its bytes), at (byte of the answer's text at which it
--- begins) }. A stream gives each record with the piece of text in which its token begins; tokens of a stop text that
--- ended the answer are left out.

local exchange = require "llmrun.exchange"
local errors = require "llmrun.errors"
local json = require "llmrun.json"
local loop = require "llmrun.loop"

local M = {}

--- Bytes of a token that show in the text.
local function shown(model, id, special)
    if not special and model.vocab:kind(id) == "control" then return 0 end
    return #model.vocab:piece(id)
end

--- Orders the records of an answer: feed(list) takes the next ones, take(upto) gives those whose token begins before
--- that byte (nil: all).
local Records = {}
Records.__index = Records

local function new_records(model, special)
    return setmetatable({ model = model, special = special, seen = 0, at = 0, waiting = {} }, Records)
end

function Records:feed(list, from)
    for i = from or 1, #list do
        local r = list[i]
        self.seen = self.seen + 1
        r.text, r.at = self.model.vocab:piece(r.id), self.at
        for _, t in ipairs(r.top or {}) do t.text = self.model.vocab:piece(t.id) end
        self.at = self.at + shown(self.model, r.id, self.special)
        self.waiting[#self.waiting + 1] = r
    end
end

function Records:take(upto)
    local n, waiting = 0, self.waiting
    while waiting[n + 1] and (not upto or waiting[n + 1].at < upto) do n = n + 1 end
    self.waiting = table.move(waiting, n + 1, #waiting, 1, {})
    return table.move(waiting, 1, n, 1, {})
end

--- What an error of the engine's becomes for a client, before any work is done.
function M.raise(e)
    if not errors.is(e) then error(e, 0) end
    local text = e.message:gsub("^[^\n]-:%d+: ", ""):gsub("^s:%a+: ", "")
    if e.code == "full" then exchange.fail(400, text, nil, "context_length_exceeded") end
    if e.code == "invalid" or e.code == "unsupported" or e.code == "limit" then
        exchange.fail(400, text, nil, "invalid_value")
    end
    if e.code == "cancelled" then exchange.fail(503, text, nil, "cancelled") end
    error(e, 0)
end

local function guarded(fn, ...)
    local r = table.pack(pcall(fn, ...))
    if not r[1] then M.raise(r[2]) end
    return table.unpack(r, 2, r.n)
end
M.guarded = guarded

local function generate(model, s, gen, on_piece)
    local sent, records = 0, gen.logprobs and new_records(model, gen.special)
    local next_piece, state, first, guard = guarded(s.stream, s, gen)
    for piece in next_piece, state, first, guard do
        sent = sent + #piece
        if on_piece then
            if records then records:feed(s.op.req:logprobs(records.seen)) end
            on_piece(piece, records and records:take(sent), s.op.req:info().n_generated)
        end
    end
    local r = s.result
    if records then
        records:feed(r.logprobs, records.seen + 1)
        r.records = records:take(r.stop and #r.text or nil)
    end
    return r
end

local function with_trace(e) return type(e) == "string" and debug.traceback(e, 2) or e end

--- Generates one choice on a session. on_piece(text, records, tokens so far) gets it as it comes. Returns s:gen's
--- result with records: those not yet given.
---@param model llmrun.Model
---@param s llmrun.Session
---@param gen table options of s:gen
---@param on_piece? function
---@param script? table a sampler that came with the request: its errors are the client's
function M.run(model, s, gen, on_piece, script)
    if script then gen.sampler = script.stages end
    local ok, r = xpcall(generate, with_trace, model, s, gen, on_piece)
    if ok then return r end
    if script then require("llmrun.openai.scripts").explain(script, r) end
    if errors.is(r) and r.message:find("no token is left to draw", 1, true) then M.raise(r) end -- by bans and biases
    error(r, 0)
end

--- fn(i) for 1 to n side by side, all ended if one fails or the caller is ended. Returns the list of results.
---@param n integer
---@param fn function
function M.all(n, fn)
    if n == 1 then return { (fn(1)) } end
    local tasks, results = {}, {}
    local stop <close> = setmetatable({}, { -- luacheck: ignore 211
        __close = function()
            for _, t in ipairs(tasks) do t:cancel("the request has ended") end
        end,
    })
    local done, left, failed = loop.ticket(), n, nil
    for i = 1, n do
        tasks[i] = loop.spawn_owned(fn, i)
        tasks[i]:when_done(function(t)
            left = left - 1
            if t.state == "failed" then failed = failed or t end
            if left == 0 or failed then loop.fire(done) end
        end)
    end
    loop.wait(done, "choices")
    if failed then error(failed.error, 0) end
    for i = 1, n do results[i] = (tasks[i]:result()) end
    return results
end

--- n sessions that begin with these ids; they share what is computed for them. Closed by who asked. And how many tokens
--- were in the cache.
---@param model llmrun.Model
---@param ids integer[]
---@param n integer
---@param opts table { salt }
---@param close table list to which they are added as they are made
function M.sessions(model, ids, n, opts, close)
    return guarded(function()
        local s = model:session { salt = opts.salt }
        close[#close + 1] = s
        s:append(ids)
        if n == 1 then return { s } end
        local cached = s.seq:info().cached
        s:logits() -- computes the prompt once, before it is shared
        local all = table.pack(s:fork(n - 1))
        for _, f in ipairs(all) do close[#close + 1] = f end
        table.insert(all, 1, s)
        return all, cached
    end)
end

--- The last tokens of a prompt, as truncate_prompt_tokens says (nil: all; -1: as many as the context takes).
function M.truncate(model, ids, most)
    if not most then return ids end
    if most < 0 then most = model.info.ctx - 1 end
    return #ids > most and table.move(ids, #ids - most + 1, #ids, 1, {}) or ids
end

--- Checks that a prompt leaves room for an answer. max_tokens: of the answer, if told.
function M.check_length(model, n_prompt, param, max_tokens)
    local ctx = model.info.ctx
    if n_prompt < ctx then return end
    local asked = max_tokens and (", the answer up to %d"):format(max_tokens) or ""
    exchange.fail(400, ("this model's context holds %d tokens, and the prompt has %d%s; the prompt must be shorter by"
        .. " %d at least, so that one is left for the answer"):format(ctx, n_prompt, asked, n_prompt - ctx + 1),
        param, "context_length_exceeded")
end

-- Tokens in answers --------------------------------------------------------------------------------------------------

local function bytes_of(text) return json.array { text:byte(1, -1) } end

--- A log-probability that JSON can hold.
local function finite(v) return v > -9999.0 and v or -9999.0 end

local entry_keys = { "token", "logprob", "bytes" }
local function entry(r)
    return json.object({ token = r.text, logprob = finite(r.logprob), bytes = bytes_of(r.text) }, entry_keys)
end

--- Records in the shape of chat answers.
function M.chat_logprobs(records)
    local content = json.array()
    for i, r in ipairs(records) do
        local e = entry(r)
        e.top_logprobs = json.array()
        for k, t in ipairs(r.top or {}) do e.top_logprobs[k] = entry(t) end
        content[i] = e
    end
    return json.object { content = content, refusal = json.null }
end

--- A token's name as a key: its text, or its bytes where that is no UTF-8.
local function key_of(text)
    if utf8.len(text) then return text end
    return "bytes:" .. text:gsub(".", function(c) return ("\\x%02x"):format(c:byte()) end)
end

--- Counts characters: of pieces that may end inside one.
local Counter = {}
Counter.__index = Counter

function M.counter() return setmetatable({ chars = 0, rest = "" }, Counter) end

--- The place (in characters) at which a piece begins that comes next.
function Counter:add(text)
    local at = self.chars
    local s = self.rest .. text
    local n, bad = utf8.len(s)
    if n then
        self.chars, self.rest = at + n, ""
        return at
    end
    -- whole characters, then the beginning of one (kept), or bytes that are none (each counts)
    while bad do
        self.chars = self.chars + utf8.len(s, 1, bad - 1)
        s = s:sub(bad)
        local lead = s:byte()
        local want = lead >= 0xf0 and 4 or lead >= 0xe0 and 3 or lead >= 0xc0 and 2 or 1
        if #s < want and s:find("^[\xc2-\xf4][\x80-\xbf]*$") then
            self.rest = s
            return at
        end
        self.chars = self.chars + 1
        s = s:sub(2)
        n, bad = utf8.len(s)
    end
    self.chars, self.rest = self.chars + n, ""
    return at
end

--- Records in the shape of completions. counter: of the text before them. n_top: how many alternatives were asked for.
function M.completion_logprobs(records, counter, n_top)
    local tokens, logprobs, tops, offsets = json.array(), json.array(), json.array(), json.array()
    for i, r in ipairs(records) do
        tokens[i] = key_of(r.text)
        logprobs[i] = r.logprob and finite(r.logprob) or json.null
        offsets[i] = counter:add(r.hidden and "" or r.text)
        local top = json.null
        if r.logprob then
            top = json.object()
            for k = 1, math.min(n_top, #(r.top or {})) do top[key_of(r.top[k].text)] = finite(r.top[k].logprob) end
            top[key_of(r.text)] = finite(r.logprob)
        end
        tops[i] = top
    end
    return json.object { tokens = tokens, token_logprobs = logprobs, top_logprobs = tops, text_offset = offsets }
end

-- Answers ------------------------------------------------------------------------------------------------------------

--- The reason in OpenAI's words.
function M.finish_reason(r)
    if r.finish_reason == "stop" or r.finish_reason == "length" then return r.finish_reason end
    return "stop"
end

--- Sums of the usage of results; n_prompt: tokens of the prompts, each counted once.
function M.usage(n_prompt, results)
    local completion, cached = 0, 0
    for _, r in ipairs(results) do
        completion = completion + r.usage.completion_tokens
    end
    if results[1] then cached = math.min(results.cached or results[1].usage.cached_tokens, n_prompt) end
    return json.object({
        prompt_tokens = n_prompt, completion_tokens = completion, total_tokens = n_prompt + completion,
        prompt_tokens_details = json.object { cached_tokens = cached },
    }, { "prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details" })
end

--- The usage so far of one choice of a stream.
function M.usage_so_far(n_prompt, completion)
    return json.object({
        prompt_tokens = n_prompt, completion_tokens = completion, total_tokens = n_prompt + completion,
    }, { "prompt_tokens", "completion_tokens", "total_tokens" })
end

local base, count = ("%08x"):format(math.random(0) & 0xffffffff), 0

--- A new id: "chatcmpl-..."
function M.id(prefix)
    count = count + 1
    return ("%s-%s%08x"):format(prefix, base, count)
end

--- What is sent of the stop text or token that ended an answer.
function M.stop_reason(r, gen)
    if r.stop then return r.stop end
    if r.stop_token then
        for _, id in ipairs(gen.stop_ids or {}) do
            if id == r.stop_token then return id end
        end
    end
    return json.null
end

return M
