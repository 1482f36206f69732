-- Best of n: one prompt, several answers drawn from forks of the same session, the most probable one wins.
--
--   llmrun examples/best_of.lua [MODEL] [N]
--
-- Forks share the prompt's KV, so it is computed once; the answers come in the same batches.
--
-- test-args: {smollm2} 4
-- test-expect: 4 answers
-- test-expect: best:
-- test-expect: prompt computed once

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024 })
local n = tonumber(arg[2]) or 5

llm.seed(42) -- so that every run draws the same
local s <close> = model:session()
s:user "Give a name to a small red cat. Answer with the name only."
s:logits() -- computes the prompt

local answers = llm.map({ s:fork(n) }, function(branch)
    local f <close> = branch
    local r = f:gen { temperature = 1.0, top_p = 0.95, max_tokens = 12, stop = "\n", logprobs = true }
    local sum = 0
    for _, t in ipairs(r.logprobs) do sum = sum + t.logprob end
    return { text = r.text, score = sum / math.max(1, #r.logprobs), cached = r.usage.cached_tokens }
end)

print(("%d answers, by mean log-probability:"):format(n))
table.sort(answers, function(a, b) return a.score > b.score end)
local cached = math.huge
for _, a in ipairs(answers) do
    print(("  %6.2f  %s"):format(a.score, a.text))
    cached = math.min(cached, a.cached)
end
print("best: " .. answers[1].text)
if cached >= s.len - 1 then print(("(%d tokens of prompt computed once, for %d answers)"):format(cached, n)) end
print("prompt computed once: " .. tostring(cached >= s.len - 1))
