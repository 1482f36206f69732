--- A real model as GGUF file and as Hugging Face folder (scripts/gen_hf_ref.py real): how many of the greedy tokens
--- agree, and what loading takes.
---
---   llmrun tests/bench/hf_real.lua [GGUF] [FOLDER]

local llm = require "llmrun"
local core = require "llmrun.core"

local home = os.getenv "HOME" .. "/.cache/llmrun"
local paths = { arg[1] or "smollm2", arg[2] or home .. "/smollm2-hf" }
local prompts = { "Name a city in Italy.", "Write a haiku about rain.", "What is 17 + 25?",
    "Explain gravity to a child.",
    "List three colours.", "Who wrote Hamlet?" }

local said = {}
for i, path in ipairs(paths) do
    local begin = core.now()
    local model <close> = llm.load(path, { compute = "f32", ctx = 256 })
    print(("%s: loaded in %.2f s"):format(path, core.now() - begin))
    said[i] = llm.map(prompts, function(p)
        local s <close> = model:session()
        s:user(p)
        return s:gen { max_tokens = 24, temperature = 0 }.tokens
    end)
end
local same, total = 0, 0
for p = 1, #prompts do
    local a, b, k = said[1][p], said[2][p], 0
    while k < #a and a[k + 1] == b[k + 1] do k = k + 1 end
    same, total = same + k, total + #a
    print(("%2d of %2d tokens  %s"):format(k, #a, prompts[p]))
end
print(("%d of %d"):format(same, total))
