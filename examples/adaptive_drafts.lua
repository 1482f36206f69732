-- A policy that says in each step how much to speculate: more while drafts are right, less as the batch fills.
-- test-args: {smollm2}
-- test-expect: batch 1: +%d+%.%d tokens/s, without drafts +%d+%.%d: %d+%.%d+ times
-- test-expect: batch 8: +%d+%.%d tokens/s
local llm = require "llmrun"
local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024, speculate = { method = "ngram", k = 12 } })

local policy = { name = "adaptive drafts", draft = function(_, _, info)
    if info.batch > 16 then return false end
    local worth = 0.1 * info.batch -- what a token must at least promise to be worth its row
    return info.acceptance > worth and math.floor(math.log(worth) / math.log(math.min(info.acceptance, 0.95))) or 1
end }
local function speed(batch, speculate)
    local branches, n, seconds = {}, 0, 0
    for i = 1, batch do branches[i] = function()
        local s <close> = model:session()
        s:append(i .. ". Counting: " .. ("one two three four five six seven eight nine ten, "):rep(3))
        return s:gen { max_tokens = 80, temperature = 0, ignore_eos = true, speculate = speculate }
    end end
    for _, r in ipairs(llm.all(branches)) do n, seconds = n + #r.tokens, math.max(seconds, r.timing.total) end
    return n / seconds
end
for _, batch in ipairs { 1, 8 } do
    model:use(nil)
    local off = speed(batch, false)
    model:use(policy)
    local on = speed(batch)
    print(("batch %d: %6.1f tokens/s, without drafts %6.1f: %.2f times"):format(batch, on, off, on / off))
end
