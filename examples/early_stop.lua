-- Best of n with early stopping: N answers are written side by side, a few tokens at a time; one that has fallen too
-- far behind the best finished one is given up, and the search ends when one is good enough.
--
--   llmrun examples/early_stop.lua [MODEL] [N]
--
-- test-args: {smollm2} 6
-- test-expect: best %(try %d+, %-%d
-- test-expect: %d+ of 6 tries given up early
-- test-expect: drew %d+ tokens; %d+ without stopping early
-- test-expect: computed %d+ tokens; %d+ without forks

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 512 })
local n = tonumber(arg[2]) or 6
local most, piece = 32, 8

llm.seed(3)
local s <close> = model:session()
local _, prompt = model:apply_template { { role = "user", content = "Give me a motto for a library, one sentence." } }
s:append(prompt) -- plain tokens, so that an answer may be written in pieces
s:logits()

local best, given_up, drawn = -math.huge, 0, 0

local function try()
    local f <close> = s:fork()
    local text, sum, count = "", 0, 0
    while count < most do
        local r = f:gen { max_tokens = piece, temperature = 1.1, top_p = 0.95, logprobs = true }
        for _, t in ipairs(r.logprobs) do sum = sum + t.logprob end
        text, count, drawn = text .. r.text, count + #r.tokens, drawn + #r.tokens
        if r.finish_reason == "stop" then break end
        if sum / count < best - 0.5 then
            given_up = given_up + 1
            return { text = text } -- no score: out
        end
    end
    local score = sum / math.max(count, 1)
    best = math.max(best, score)
    return { text = text, score = score }
end

local winner, score, which = llm.best_of(n, try, { enough = -0.4, concurrency = 3 })
print(("best (try %d, %.2f a token): %s"):format(which, score, winner.text:gsub("\n", " ")))
print(("%d of %d tries given up early"):format(given_up, n))
print(("drew %d tokens; %d without stopping early"):format(drawn, n * most))
local m = model:metrics()
print(("computed %d tokens; %d without forks and their KV"):format(m.computed_tokens,
    m.prompt_tokens + m.generation_tokens))
