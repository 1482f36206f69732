-- Ten conversations at once: llm.map runs them side by side, and the engine puts their tokens into the same batches.
--
--   llmrun examples/ten_sessions.lua [MODEL]
--
-- test-args: {smollm2}
-- test-expect: France +%-> .-Paris
-- test-expect: 10 answers, %d+ tokens in %d+ steps
-- test-expect: tokens a step: %d+

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 512 })

local countries = { "France", "Italy", "Spain", "Japan", "Egypt", "Greece", "Poland", "Norway", "Peru", "Kenya" }

local answers = llm.map(countries, function(country)
    local s <close> = model:session()
    s:user(("What is the capital of %s? Answer with the name only."):format(country))
    return s:gen { temperature = 0, max_tokens = 16, stop = "\n" }
end)

local tokens = 0
for i, country in ipairs(countries) do
    tokens = tokens + answers[i].usage.completion_tokens
    print(("%-8s -> %s"):format(country, answers[i].text))
end
local m = model:metrics()
print(("\n%d answers, %d tokens in %d steps"):format(#answers, tokens, m.steps))
print(("tokens a step: %.1f"):format(tokens / m.steps))
