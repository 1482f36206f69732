-- A decoding loop of one's own, token by token: entropy decides how bold the draw is.
--
--   llmrun examples/logits_loop.lua [MODEL]
--
-- s:logits() waits for one step of the engine and gives a view of the next token's logits; several such loops still run
-- in one batch. Where the model is sure we take its best token, where it is not we draw, with a random number that
-- depends on the seed and the place only.
--
-- test-args: {smollm2}
-- test-expect: loop 1: %S
-- test-expect: loop 2: %S
-- test-expect: %d+ of %d+ tokens drawn
-- test-expect: mean batch +[1-9]%.%d

local llm = require "llmrun"
local core = require "llmrun.core"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 512 })
local drawn, total = 0, 0

local function decode(prompt, seed, most)
    local s <close> = model:session()
    s:user(prompt)
    local ids, ends = {}, {}
    for _, id in ipairs(model.info.eog) do ends[id] = true end
    for n = 1, most do
        local logits = s:logits()
        local id = logits:argmax()
        if logits:entropy() > 2 then
            logits:scale(1 / 0.8)
            id = logits:sample(core.uniform(seed, s.len))
            drawn = drawn + 1
        end
        total = total + 1
        if ends[id] then break end
        ids[n] = id
        s:append(id)
    end
    return model:detokenize(ids)
end

local texts = llm.map({ 1, 2 }, function(seed)
    return decode("Tell me something about the sea, in one sentence.", seed, 40)
end)
for i, text in ipairs(texts) do print(("loop %d: %s"):format(i, text:gsub("\n", " "))) end
print(("%d of %d tokens drawn, the others were the best"):format(drawn, total))
local m = model:metrics()
print(("mean batch %.1f rows"):format(m.batch.mean))
