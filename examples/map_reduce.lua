-- Map and reduce over a document that is longer than the context: each piece is summed up on its own, side by side,
-- then the summaries are put together.
--
--   llmrun examples/map_reduce.lua [MODEL] [FILE] [PIECES AT MOST]
--
-- The instruction stands before the piece, so that its KV is computed once and shared by all of them.
--
-- test-args: {smollm2} README.md 6
-- test-expect: piece 1: %S
-- test-expect: piece %d+: %S
-- test-expect: all: %S
-- test-expect: %d+ tokens of the document in a context of 512
-- test-expect: computed %d+ tokens, %d+ more were shared

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 512, kv = { blocks = 160 } })
local file = assert(io.open(arg[2] or "README.md", "rb"))
local tokens = model:tokenize(file:read "a")
file:close()

local size = 200
local pieces = {}
for at = 1, math.min(#tokens, size * (tonumber(arg[3]) or 1000)), size do
    pieces[#pieces + 1] = model:detokenize(table.move(tokens, at, math.min(at + size - 1, #tokens), 1, {}))
end

local system = "You sum up texts. Answer with one short sentence that says what the text is about, nothing else."
local shared = 0

local function sum_up(text, most)
    local s <close> = model:session()
    s:system(system)
    s:user(text)
    local r = s:gen { temperature = 0, max_tokens = most, stop = "\n" }
    shared = shared + r.usage.cached_tokens
    return r.text
end

local summaries = llm.map(pieces, function(text) return sum_up(text, 24) end, { concurrency = 4 })
for i, text in ipairs(summaries) do print(("piece %d: %s"):format(i, text)) end
print("all: " .. sum_up(table.concat(summaries, "\n"):sub(1, 1200), 40))
print(("%d tokens of the document in a context of %d"):format(#tokens, model.info.ctx))
print(("computed %d tokens, %d more were shared"):format(model:metrics().computed_tokens, shared))
