--- What tests of programs, policies and routes need: a model that says what a test tells it, and an engine that is
--- stepped by hand. Exact, and done in milliseconds; `llmrun test` runs the specs.
---
---   local testing = require "llmrun.testing"
---   local model <close> = testing.model { "Rome.", "Paris." }        -- one answer for each prompt, in order
---   assert.equal("Rome.", my_program(model, "Italy?"))
---   assert.matches("Italy", model.asked[1])
---
---   local lab <close> = testing.lab { policy = my_policy, max_seqs = 1 }
---   lab:submit(30, { name = "long" })
---   lab:submit(5, { name = "short" })
---   assert.same({ "short", "long" }, lab:order())

local llm = require "llmrun"
local errors = require "llmrun.errors"

local M = {}

-- Models --------------------------------------------------------------------------------------------------------------

--- A key for a list of tokens.
local function key_of(tokens)
    local parts = {}
    for i = 1, #tokens, 200 do
        parts[#parts + 1] = string.pack(("i4"):rep(math.min(200, #tokens - i + 1)),
            table.unpack(tokens, i, math.min(#tokens, i + 199)))
    end
    return table.concat(parts)
end

--- The end of the last place where a list of tokens stands in another; nil if it is nowhere.
local function last_end(tokens, part)
    for i = #tokens - #part, 0, -1 do
        local same = true
        for j = 1, #part do same = same and tokens[i + j] == part[j] end
        if same then return i + #part end
    end
end

--- A model that answers with texts: a list, of which each new prompt gets the next, or a function(prompt, n) that gives
--- the answer to the n-th prompt. Each answer ends with the end token. A prompt that comes again, in a fork or later,
--- gets the same answer. model.asked is the list of prompts, as texts with their special tokens. Options: those of
--- llm.scripted except next (template, ctx, max_seqs, policy ...).
---@param answers string[]|fun(prompt: string, n: integer): string
---@param opts? table
---@return llmrun.Model
function M.model(answers, opts)
    local call = "testing.model"
    if type(answers) ~= "table" and type(answers) ~= "function" then
        errors.raise(call, "a list of answers or a function expected, got " .. type(answers))
    end
    local o = { name = "fake" }
    for k, v in pairs(opts or {}) do o[k] = v end
    local self, asked, mark = nil, {}, nil
    local going = {} -- text so far, as a key -> { answer's ids, place of the next }
    local function begin(tokens, key)
        local prompt = self:detokenize(tokens, { special = true })
        local n = #asked + 1
        local answer
        if type(answers) == "function" then answer = answers(prompt, n) else answer = answers[n] end
        if type(answer) ~= "string" then
            error(("testing.model: there is no answer %d, for the prompt '%s'"):format(n, prompt:sub(-200)), 0)
        end
        asked[n] = prompt
        going[key] = { self:tokenize(answer), 1 }
        return going[key]
    end
    -- Where an answer stands that was going on at tokens[1..n], if the tokens behind are its own; they may have been
    -- forced by a grammar, without a question to the model.
    local function further(tokens, n, at)
        for i = n + 1, #tokens do
            if tokens[i] ~= at[1][at[2] + i - n - 1] then return nil end
        end
        return { at[1], at[2] + #tokens - n }
    end
    local function place(tokens, key)
        for n = #tokens - 1, math.max(1, #tokens - 256), -1 do
            local at = going[key:sub(1, 4 * n)]
            if at then
                at = further(tokens, n, at)
                if at then return at end
                break
            end
        end
        local last = last_end(tokens, mark)
        if not last or last == #tokens then return begin(tokens, key) end
        local at = begin(table.move(tokens, 1, last, 1, {}), key:sub(1, 4 * last))
        return further(tokens, last, at) or begin(tokens, key)
    end
    o.next = function(tokens)
        local key = key_of(tokens)
        local at = going[key] or place(tokens, key)
        going[key] = at
        local ids, i = at[1], at[2]
        local id = ids[i] or self.info.eos
        if ids[i] then going[key .. string.pack("i4", id)] = { ids, i + 1 } end
        return id
    end
    self = llm.scripted(o)
    self.asked = asked
    mark = self:tokenize("<|im_start|>assistant\n", { special = true })
    return self
end

-- Policies ------------------------------------------------------------------------------------------------------------

--- An engine that is stepped by hand, with requests that have no program.
---@class llmrun.Lab
---@field model llmrun.Model
---@field engine any the engine itself
---@field requests any[] in the order in which they were submitted
local Lab = {}
Lab.__index = Lab

--- The token that a lab's model says after these: it depends on all of them, so a wrong page or copy shows at once.
---@param tokens integer[]
---@return integer
function M.next_token(tokens)
    local h = #tokens
    for i = 1, #tokens do h = (h * 31 + tokens[i] + 7) % 65521 end
    return h % 200
end

--- Makes a lab. Options: those of llm.scripted (policy, max_seqs, max_batch_tokens, chunk, kv = { blocks =,
--- block_size = } ...).
---@param opts? table
---@return llmrun.Lab
function M.lab(opts)
    local o = { vocab = "bytes", ctx = 512, next = M.next_token }
    for k, v in pairs(opts or {}) do o[k] = v end
    local model = llm.scripted(o)
    return setmetatable({ model = model, engine = model.engine, requests = {}, prompts = {}, names = {},
        computed = {} }, Lab)
end

--- A new request: a prompt's length or its ids. Options: name (what order and ran call it; its number if not given),
--- seq_tag (the sequence's, for evict), and those of requests: max_tokens, priority, deadline, tenant, tag, seed.
--- Returns it and its sequence; nil and a text if the policy refuses it.
---@param prompt integer|integer[]
---@param options? table
---@return any? request, any sequence
function Lab:submit(prompt, options)
    if type(prompt) == "number" then
        local ids = {}
        for i = 1, prompt do ids[i] = (i * 7 + #self.requests * 13) % 190 end
        prompt = ids
    end
    local o = {}
    for k, v in pairs(options or {}) do o[k] = v end
    local name, seq = o.name, assert(self.engine:seq { tag = o.seq_tag })
    o.name, o.seq_tag = nil, nil
    assert(seq:append(prompt))
    o.ignore_eos = true
    local r, err = self.engine:request(seq, o)
    if not r then return nil, err end
    local n = #self.requests + 1
    self.requests[n], self.prompts[r], self.names[n] = r, prompt, name or n
    return r, seq
end

--- One step; the engine's invariants are checked. Returns its rows.
---@return integer
function Lab:step()
    local rows = assert(self.engine:step())
    assert(self.engine:check())
    while self.engine:next_event() do end
    return rows
end

--- Who has run since this was last asked: rows computed, by the requests' names.
---@return table<any, integer>
function Lab:ran()
    local by = {}
    for i, r in ipairs(self.requests) do
        local n = r:info().n_computed
        if n > (self.computed[i] or 0) then by[self.names[i]] = n - (self.computed[i] or 0) end
        self.computed[i] = n
    end
    return by
end

--- Steps until nothing runs; raises after so many steps (5000). Returns the steps taken.
---@param most? integer
---@return integer
function Lab:finish(most)
    local n = 0
    while self.engine:busy() > 0 do
        self:step()
        n = n + 1
        assert(n < (most or 5000), "requests do not end")
    end
    return n
end

--- Steps until all have ended; their names in the order in which they did. names: others than they have, by number.
---@param names? table
---@return any[]
function Lab:order(names)
    local left, order = {}, {}
    for i, r in ipairs(self.requests) do left[i] = r end
    while next(left) do
        for i = 1, #self.requests do
            if left[i] and not left[i]:active() then
                order[#order + 1] = names and names[i] or self.names[i]
                left[i] = nil
            end
        end
        if next(left) then self:step() end
    end
    return order
end

--- Ends it.
function Lab:close() self.model:close() end
Lab.__close = Lab.close

--- What a lab's model says after a prompt, without any engine: n tokens.
---@param prompt integer[]
---@param n integer
---@return integer[]
function M.reference(prompt, n)
    local t = table.move(prompt, 1, #prompt, 1, {})
    for _ = 1, n do t[#t + 1] = M.next_token(t) end
    return table.move(t, #prompt + 1, #t, 1, {})
end

--- Calls fn() and returns the lines that policies log meanwhile.
---@param fn function
---@return string[]
function M.logged(fn)
    local policy = require "llmrun.policy"
    local lines, old = {}, policy.log
    policy.log = function(text) lines[#lines + 1] = text end
    local ok, err = pcall(fn)
    policy.log = old
    if not ok then error(err, 0) end
    return lines
end

-- Routes --------------------------------------------------------------------------------------------------------------

--- Serves routes with a model, asks once, and ends the server. method_path: "POST /triage"; body: a text, or a table
--- that is sent as JSON. Returns { status, headers, body, json (if it is JSON) }.
---@param routes table
---@param model llmrun.Model
---@param method_path string
---@param body? string|table
---@return table
function M.request(routes, model, method_path, body)
    local json, net = require "llmrun.json", require "llmrun.net"
    local method, path = method_path:match "^(%u+) (.+)$"
    if not method then errors.raise("testing.request", "\"METHOD /path\" expected, got " .. method_path) end
    local server <close> = require("llmrun.serve").start {
        port = 0, models = { model }, routes = routes, page = false, log = function() end,
    }
    local c <close> = assert(net.connect(server.host, server.port))
    local headers = {}
    if type(body) == "table" then
        body, headers["Content-Type"] = assert(json.encode(body)), "application/json"
    end
    local r = assert(net.request(c, { method = method, path = path, headers = headers, body = body }))
    if (r.headers["content-type"] or ""):find("json", 1, true) then r.json = json.decode(r.body) end
    return r
end

return M
