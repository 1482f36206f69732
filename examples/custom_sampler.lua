-- A sampler in Lua: the top-k stage narrows in C, then a function of ours decides.
--
--   llmrun examples/custom_sampler.lua [MODEL]
--
-- It writes without the letter "e": of the 200 most probable tokens those that hold one are masked. C does the loop
-- over the vocabulary, Lua sees the few candidates.
--
-- test-args: {smollm2}
-- test-expect: with: +%S
-- test-expect: without: +%S
-- test-expect: nothing with an e in it

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 512 })

local has_e = {} -- token id -> whether its text holds an e
local function holds_e(id)
    if has_e[id] == nil then has_e[id] = model:detokenize(id):lower():find("e", 1, true) ~= nil end
    return has_e[id]
end

local function no_e(logits)
    local banned = {}
    for _, id in ipairs(logits:candidates()) do
        if holds_e(id) then banned[#banned + 1] = id end
    end
    logits:mask(banned)
end

local function write(sampler)
    local s <close> = model:session()
    s:append "My morning walk was long. I saw"
    return s:gen { sampler = sampler, max_tokens = 24, seed = 7, stop = "\n" }.text
end

print("with:   " .. write { { "top_k", 200 }, { "temperature", 0 } })
local text = write { { "top_k", 200 }, no_e, { "temperature", 0 } }
print("without: " .. text)
if not text:lower():find("e", 1, true) then print("nothing with an e in it") end
