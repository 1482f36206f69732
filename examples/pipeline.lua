-- A conversation of three turns with a streamed answer, and what it took: the first program to look at.
--
--   llmrun examples/pipeline.lua [MODEL]
--
-- A session keeps its tokens and their KV: each turn computes only what is new.
--
-- test-args: {smollm2}
-- test-expect: Paris
-- test-expect: Rome
-- test-expect: from the cache
-- test-expect: time to first token: %d+ ms
-- test-expect: tokens per second: +%d+
-- test-expect: memory used: +%d+

local llm = require "llmrun"
local core = require "llmrun.core"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 2048 })
local s <close> = model:session()

s:system "You are a helpful assistant. Answer in one short sentence."

local first_token, tokens, seconds
for turn, question in ipairs {
    "What is the capital of France?",
    "And what is the capital of Italy?",
    "Which of the two cities has the Eiffel Tower?",
} do
    print("user:      " .. question)
    io.write("assistant: ")
    s:user(question)
    for piece in s:stream { temperature = 0, max_tokens = 60 } do
        io.write(piece)
        io.flush()
    end
    local r = s.result
    print(("\n           (%d prompt tokens, of them %d from the cache)\n"):format(r.usage.prompt_tokens,
        r.usage.cached_tokens))
    if turn == 1 then first_token = r.timing.first_token end
    tokens = (tokens or 0) + r.usage.completion_tokens
    seconds = (seconds or 0) + r.timing.total
end

local resident = core.memory()
print(("time to first token: %.0f ms"):format(first_token * 1000))
print(("tokens per second:   %.1f"):format(tokens / seconds))
print(("memory used:         %.0f MB"):format(resident / 1e6))
