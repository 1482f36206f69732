-- Contrastive decoding (arXiv:2210.15097) with two models: of the tokens that the expert finds plausible, the one that
-- it prefers most over an amateur.
--
--   llmrun examples/contrastive.lua [EXPERT] [AMATEUR]
--
-- The amateur must have the expert's vocabulary. Without one, a function plays it: a model that just repeats what was
-- said, so that the contrast is against repetition. Two engines run side by side then, one of them in Lua.
--
-- test-args: {smollm2}
-- test-expect: expert alone: +%S
-- test-expect: contrastive: +%S
-- test-expect: repeated words: %d+ and %d+
-- test-expect: fewer: true
-- test-expect: computed %d+ tokens; %d+ without sessions

local llm = require "llmrun"

local expert <close> = llm.load(arg[1] or "smollm2", { ctx = 512 })
local amateur <close> = arg[2] and llm.load(arg[2], { ctx = 512 }) or llm.scripted {
    vocab = expert, ctx = 512,
    next = function(tokens)
        local logits = { default = 0 }
        for i = math.max(1, #tokens - 60), #tokens do logits[tokens[i]] = (logits[tokens[i]] or 0) + 2 end
        return logits
    end,
}

local ends = {}
for _, id in ipairs(expert.info.eog) do ends[id] = true end

local plausible = math.log(0.1) -- of the best token's probability

local function contrast(prompt, length)
    local e <close> = expert:session()
    local a <close> = amateur:session()
    e:append(prompt)
    a:append(e.tokens)
    local ids = {}
    for _ = 1, length do
        local l = llm.map({ e, a }, function(s) return s:logits():copy() end)
        local some = l[1]:topk(50)
        local expert_p, amateur_p = l[1]:logprob(some), l[2]:logprob(some)
        local best, id = -math.huge, some[1]
        for i, lp in ipairs(expert_p) do
            if lp >= expert_p[1] + plausible and lp - 0.5 * amateur_p[i] > best then
                best, id = lp - 0.5 * amateur_p[i], some[i]
            end
        end
        if ends[id] then break end
        ids[#ids + 1] = id
        e:append(id)
        a:append(id)
    end
    return expert:detokenize(ids)
end

local function repeated(text)
    local seen, n = {}, 0
    for word in text:lower():gmatch("%a%a%a%a+") do
        if seen[word] then n = n + 1 end
        seen[word] = true
    end
    return n
end

local prompt = "The old house stood on a hill. The old house was"
local s <close> = expert:session()
s:append(prompt)
local alone = s:gen({ temperature = 0, max_tokens = 48 }).text
local contrasted = contrast(prompt, 48)
print("expert alone: " .. alone:gsub("\n", " "))
print("contrastive:  " .. contrasted:gsub("\n", " "))
print(("repeated words: %d and %d"):format(repeated(alone), repeated(contrasted)))
print("fewer: " .. tostring(repeated(contrasted) < repeated(alone)))
local computed, all = 0, 0
for _, model in ipairs { expert, amateur } do
    local m = model:metrics()
    computed, all = computed + m.computed_tokens, all + m.prompt_tokens + m.generation_tokens
end
print(("computed %d tokens; %d without sessions, which keep what both models have read"):format(computed, all))
