--- s:select: which of several texts does the model find most probable as the session's next text?
---
--- The prefix is computed once; its last row gives the first token of every choice. Then one batch scores the others,
--- on forks that share the prefix's KV (a step gives at most max_seqs rows of logits; more tokens take more steps). The
--- session takes over the winner's fork and goes on behind the chosen text.
---
--- Methods, as SGLang's frontend names them:
---   token_length_normalized: the mean log-probability of a choice's tokens.
---   greedy_token_selection: token by token, those choices stay that are best at this place; one that has ended counts
---     with the mean of its tokens.
---   unconditional_likelihood_normalized: the mean of what each token gains over its log-probability without the
---     prefix (behind the BOS token, or an end token where the vocabulary has no BOS).

local errors = require "llmrun.errors"
local options = require "llmrun.options"
local runner = require "llmrun.runner"
local tables = require "llmrun.tables"

local M = {}

local CALL = "s:select"

local function mean(list)
    local sum = 0
    for _, v in ipairs(list) do sum = sum + v end
    return sum / #list, sum
end

--- Sets score of each choice and returns the winner's place. The first of equals wins.
local methods = {}

local function highest(choices)
    local best = 1
    for i, c in ipairs(choices) do
        if c.score > choices[best].score then best = i end
    end
    return best
end

function methods.token_length_normalized(choices)
    for _, c in ipairs(choices) do c.score = mean(c.logprobs) end
    return highest(choices)
end

--- score: at how many places it was among the best.
function methods.greedy_token_selection(choices)
    local left, longest = {}, 0
    for i, c in ipairs(choices) do
        left[i] = c
        c.score = 0
        longest = math.max(longest, #c.logprobs)
    end
    for place = 1, longest do
        local best, stay = -math.huge, {}
        for _, c in ipairs(left) do
            local v = c.logprobs[place] or mean(c.logprobs)
            if v > best then best, stay = v, {} end
            if v == best then stay[#stay + 1] = c end
        end
        left = stay
        for _, c in ipairs(left) do c.score = c.score + 1 end
        if #left == 1 then break end
    end
    for i, c in ipairs(choices) do
        if c == left[1] then return i end
    end
    return 1 -- nothing but -inf
end

function methods.unconditional_likelihood_normalized(choices)
    for _, c in ipairs(choices) do c.score = mean(c.logprobs) - mean(c.unconditional) end
    return highest(choices)
end

local select_options = { method = "string", priority = "integer", deadline = "number", tenant = "string" }

local function check(name, choices, o)
    if type(name) ~= "string" then
        errors.raise(CALL, ("a name for the choice (string) expected, got %s"):format(type(name)))
    elseif type(choices) ~= "table" then
        errors.raise(CALL, ("list of texts expected, got %s"):format(type(choices)))
    elseif #choices == 0 then
        errors.raise(CALL, "the list of choices is empty")
    end
    options.check(CALL, o, select_options, 3)
    local method = o and o.method or "token_length_normalized"
    if not methods[method] then
        local names = tables.sorted_keys(methods)
        local close = options.closest(method, names)
        errors.raise(CALL, ("unknown method '%s'%s; valid: %s"):format(method,
            close and " (did you mean '" .. close .. "'?)" or "", table.concat(names, ", ")))
    end
    local seen = {}
    for i, text in ipairs(choices) do
        if type(text) ~= "string" then
            errors.raise(CALL, ("choice %d: text expected, got %s"):format(i, type(text)))
        elseif text == "" then
            errors.raise(CALL, ("choice %d is an empty string, which has no tokens to score"):format(i))
        elseif seen[text] then
            errors.raise(CALL, ("choices %d and %d are the same: '%s'"):format(seen[text], i, text))
        end
        seen[text] = i
    end
    return method
end

--- All that is at work for one call; stands in the session as its operation, so that closing or cancelling ends it.
local Job = {}
Job.__index = Job

function Job:submit(seq, params)
    local o = self.opts
    params.priority, params.tenant, params.deadline = o.priority, o.tenant, self.deadline
    local op = errors.check(CALL, self.session.model.runner:submit(CALL, seq, params))
    self.ops[#self.ops + 1] = op
    return op
end

--- Waits for a request; raises if it failed or the call was ended.
function Job:wait(op)
    op:wait(runner.DONE)
    local s = self.session
    if s.model.closed then errors.raise(CALL, "the model was closed meanwhile", "cancelled") end
    if self.closed then errors.raise(CALL, "the session was closed meanwhile", "cancelled") end
    local info = op.req:info()
    if info.state == "cancelled" then errors.raise(CALL, "cancelled", "cancelled") end
    if info.state == "failed" then
        local why = s.model.script and s.model.script:last_error()
        errors.raise(CALL, info.error .. (why and ": " .. why or ""), info.code)
    end
    self.computed = self.computed + info.n_computed
    return info
end

function Job:cancel()
    for _, op in ipairs(self.ops) do op:cancel() end
end

function Job:close()
    if self.closed then return end
    self.closed = true
    for _, op in ipairs(self.ops) do op:close() end
    if not self.session.model.closed then
        for _, seq in pairs(self.seqs) do seq:close() end
    end
end

local function release(self, job)
    if self.op == job then self.op = nil end
    job:close()
end

--- A request that scores ids from position `from` (0-based) on of a sequence of the job's own; nil if there is none.
local function score(job, key, seq, from)
    job.seqs[key] = seq
    if from >= seq:len() then return nil end
    return job:submit(seq, { kind = "score", score_from = from, n_top = 0 })
end

local function take_scores(job, op, into)
    if not op then return end
    job:wait(op)
    for _, r in ipairs(op.req:logprobs()) do into[#into + 1] = r.logprob end
end

--- Log-probabilities of every token of every choice.
local function run(job, choices, unconditional)
    local s = job.session
    local op = job:submit(s.seq, { kind = "logits" })
    local info = job:wait(op)
    job.prompt, job.cached = info.n_prompt, info.n_cached
    local firsts = {}
    for i, c in ipairs(choices) do firsts[i] = c.tokens[1] end
    firsts = op.req:logits():logprob(firsts)
    op:close()
    local len, jobs, alone = s.seq:len(), {}, {}
    for i, c in ipairs(choices) do
        c.logprobs = { firsts[i] }
        local fork = errors.check(CALL, s.seq:fork())
        job.seqs[i] = fork
        local ok, err, code = fork:append(c.tokens)
        if not ok then errors.raise(CALL, ("choice %d: %s"):format(i, err), code) end
        jobs[i] = score(job, i, fork, len + 1)
        if unconditional then
            local seq = errors.check(CALL, s.seq:fork()) -- so that it has the session's salt
            job.seqs[-i] = seq
            errors.check(CALL, seq:truncate(0))
            errors.check(CALL, seq:append(unconditional))
            errors.check(CALL, seq:append(c.tokens))
            alone[i] = score(job, -i, seq, 1)
            c.unconditional = {}
        end
    end
    for i, c in ipairs(choices) do
        take_scores(job, jobs[i], c.logprobs)
        take_scores(job, alone[i], c.unconditional)
        c.logprob = select(2, mean(c.logprobs))
    end
end

--- See Session:select.
function M.run(self, internal, name, choices, o)
    internal.ready(self, CALL)
    local method = check(name, choices, o)
    local deadline = options.deadline(CALL, o and o.deadline, self.model.engine)
    internal.open_turn(self, CALL)
    if self.seq:len() == 0 then errors.raise(CALL, "nothing to go on from: the session is empty", "state") end
    local vocab, list = self.model.vocab, {}
    for i, text in ipairs(choices) do
        list[i] = { text = text, tokens = errors.check(CALL, vocab:encode(text)) }
    end
    local job = setmetatable({
        session = self, opts = o or {}, ops = {}, seqs = {}, computed = 0, deadline = deadline,
    }, Job)
    self.op = job
    local guard <close> = setmetatable({}, { __close = function() release(self, job) end }) -- luacheck: ignore 211
    local plain = vocab:info()
    run(job, list, method:find("unconditional", 1, true) and { plain.bos or plain.eos or 0 } or nil)
    local won = methods[method](list)
    internal.adopt(self, job.seqs[won])
    job.seqs[won] = nil
    internal.keep_pinned(self)
    if self.turn then self.turn.text = nil end
    local r = {
        name = name, text = list[won].text, index = won, choices = list, method = method,
        usage = { prompt_tokens = job.prompt, cached_tokens = job.cached, computed_tokens = job.computed },
    }
    self.picked[name], self.result = r.text, r
    return r.text, r
end

return M
