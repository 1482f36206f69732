-- What share of a step goes to what comes behind the forward pass: penalties, sampling, masks, stop strings and text.
-- A batch of requests in several forms; one JSON line a form.
--
--   llmrun tests/bench/results_cost.lua [MODEL] [BATCH] [TOKENS] [THREADS]
--
-- The engine times both (metrics step and results), so that a machine that others use too hardly
-- changes the share.

local llm = require "llmrun"

local name, batch, tokens = arg[1] or "qwen-0.5b", tonumber(arg[2]) or 32, tonumber(arg[3]) or 32
local model <close> = llm.load(name, { ctx = 512, threads = tonumber(arg[4]), max_seqs = batch })

local schema = { type = "object", required = { "title", "story" }, properties = {
    title = { type = "string", minLength = 300 }, story = { type = "string" } } }

local forms = {
    { name = "greedy", options = { temperature = 0 } },
    { name = "temperature, top-k", options = { temperature = 0.8, top_k = 40 } },
    { name = "temperature, top-p", options = { temperature = 0.8, top_p = 0.95 } },
    { name = "temperature only", options = { temperature = 1 } },
    { name = "min-p", options = { temperature = 1, min_p = 0.05 } },
    { name = "temperature, top-p, log-probabilities of 5", options = { temperature = 0.8, top_p = 0.95,
        logprobs = 5 } },
    { name = "penalties, top-k, top-p, min-p", options = { temperature = 0.8, top_k = 40, top_p = 0.95, min_p = 0.05,
        repetition_penalty = 1.1, presence_penalty = 0.2, frequency_penalty = 0.2 } },
    { name = "JSON schema, greedy", options = { temperature = 0, json = schema } },
    { name = "JSON schema, temperature, top-p", options = { temperature = 0.8, top_p = 0.95, json = schema } },
    { name = "penalties, top-k, top-p, min-p, JSON schema, stop strings", options = { temperature = 0.8, top_k = 40,
        top_p = 0.95, min_p = 0.05, repetition_penalty = 1.1, presence_penalty = 0.2, frequency_penalty = 0.2,
        json = schema, stop = { "@@" } } },
}

local list = {}
for i = 1, batch do list[i] = i end

local function once(options, length)
    local sessions = llm.map(list, function(i)
        local s = model:session()
        s:append(("Story number %d. Once upon a time there was a machine that"):format(i))
        s:logits() -- the prompt is computed before
        return s
    end)
    local before = model:metrics()
    llm.map(sessions, function(s)
        local o = { max_tokens = length, seed = s.len }
        if not options.json then o.ignore_eos = true end
        for k, v in pairs(options) do o[k] = v end
        s:gen(o)
    end)
    local after = model:metrics()
    for _, s in ipairs(sessions) do s:close() end
    local function spent(what) return after[what].sum - before[what].sum end
    return spent "results", spent "step", after.steps - before.steps
end

for _, f in ipairs(forms) do
    once(f.options, 6) -- warm: what a process makes once, as the masks of a schema's strings
    local results, steps, n = once(f.options, tokens)
    print(('{"bench":"results_cost","model":"%s","form":"%s","batch":%d,"step_ms":%.2f,"results_ms":%.3f,'
        .. '"share_percent":%.2f}')
        :format(name, f.name, batch, 1e3 * steps / n, 1e3 * results / n, 100 * results / steps))
end
