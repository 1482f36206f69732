-- Classifier-free guidance (arXiv:2306.17806): two sessions, one with the instruction and one without; the logits move
-- away from what the model would say anyway: u + g (c - u).
--
--   llmrun examples/guidance.lua [MODEL] [STRENGTH]
--
-- Both sessions take their steps in one batch: twice the rows, but not twice the time.
--
-- test-args: {smollm2} 1.5
-- test-expect: 1%.0: +%S
-- test-expect: 1%.5: +%S
-- test-expect: two rows in one step: true
-- test-expect: computed %d+ tokens; %d+ without sessions

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 512 })
local strength = tonumber(arg[2]) or 1.5

local ends = {}
for _, id in ipairs(model.info.eog) do ends[id] = true end

local function guided(instruction, question, g, length)
    local with <close> = model:session()
    local without <close> = model:session()
    with:system(instruction)
    with:user(question)
    without:user(question)
    local ids, batched = {}, true
    for _ = 1, length do
        local before = model:metrics().steps
        -- a copy each, as a view is dead once the other session's wait has let the engine take a step
        local l = llm.map({ with, without }, function(s) return s:logits():copy() end)
        batched = batched and (#ids == 0 or model:metrics().steps == before + 1)
        l[1]:scale(g):add(l[2], 1 - g)
        local id = l[1]:argmax()
        if ends[id] then break end
        ids[#ids + 1] = id
        with:append(id)
        without:append(id)
    end
    return model:detokenize(ids), batched
end

local together
for _, g in ipairs { 1, strength } do
    local text
    text, together = guided("You are a pirate. You talk like a pirate.", "How was your day?", g, 32)
    print(("%.1f: %s"):format(g, text:gsub("\n", " ")))
end
print("two rows in one step: " .. tostring(together))
local m = model:metrics()
print(("computed %d tokens; %d without sessions"):format(m.computed_tokens, m.prompt_tokens + m.generation_tokens))
