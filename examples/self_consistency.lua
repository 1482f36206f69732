-- Self-consistency (arXiv:2203.11171): several lines of reasoning are drawn for one question; the answer that most of
-- them come to wins. Drawing ends as soon as no other answer could still overtake it.
--
--   llmrun examples/self_consistency.lua [MODEL] [N]
--
-- test-args: {smollm2} 9
-- test-expect: answer: %d+, %d+ of %d+ votes
-- test-expect: %d of 9 lines of reasoning were not needed
-- test-expect: computed %d+ tokens; %d+ without forks

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 1024 })
local n = tonumber(arg[2]) or 9

local examples = [[
Q: Ann has 3 apples and buys 4 more. How many apples has she?
A: She has 3 and buys 4. 3 + 4 = 7. The answer is 7.

Q: A bus has 10 seats, 6 are taken. How many are free?
A: There are 10 seats and 6 are taken. 10 - 6 = 4. The answer is 4.

Q: Tom reads 2 pages a day. How many pages does he read in 5 days?
A: He reads 2 pages a day for 5 days. 2 * 5 = 10. The answer is 10.

]]

llm.seed(7)
local s <close> = model:session()
s:append(examples .. "Q: Eve has 5 red pens and 3 blue pens. How many pens has she?\nA:")
s:logits() -- the prompt is computed once

local votes, leader, voted = {}, nil, 0

--- Counts an answer; true when the leader can't be overtaken any more.
local function count(answer)
    if not answer then return false end
    voted = voted + 1
    votes[answer] = (votes[answer] or 0) + 1
    if not leader or votes[answer] > votes[leader] then leader = answer end
    local second = 0
    for a, v in pairs(votes) do
        if a ~= leader then second = math.max(second, v) end
    end
    return votes[leader] > second + (n - voted)
end

llm.first_valid(n, function()
    local f <close> = s:fork()
    local r = f:gen { temperature = 0.7, max_tokens = 40, stop = "\n" }
    print("  " .. r.text:gsub("^ ", ""))
    return r.text:match("answer is (%d+)") or r.text:match("= (%d+)")
end, count, { concurrency = 3 })

print(("answer: %s, %d of %d votes"):format(leader, votes[leader], voted))
print(("%d of %d lines of reasoning were not needed"):format(n - voted, n))
local m = model:metrics()
print(("computed %d tokens; %d without forks and their KV"):format(m.computed_tokens,
    m.prompt_tokens + m.generation_tokens))
