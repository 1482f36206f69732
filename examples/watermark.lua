-- A watermark (arXiv:2301.10226) as a sampler in Lua: behind each token a secret half of the vocabulary is green, and
-- green tokens are made a little more probable. Whoever knows the secret can count them.
--
--   llmrun examples/watermark.lua [MODEL]
--
-- The top-k stage narrows in C, so Lua looks at the colour of 50 tokens a step, not of the whole vocabulary.
--
-- test-args: {smollm2}
-- test-expect: plain: .- z = %-?%d
-- test-expect: marked: .- z = %d
-- test-expect: told apart: true

local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 512 })
local secret, strength = 0x5EED, 3.0

--- Whether a token is green behind another: one bit of a hash of the pair.
local function green(before, id)
    local h = (before * 0x9E3779B1 ~ id * 0x85EBCA77 ~ secret) & 0xFFFFFFFF
    h = ((h ~ h >> 15) * 0x2C1B3C6D) & 0xFFFFFFFF
    h = ((h ~ h >> 12) * 0x297A2D39) & 0xFFFFFFFF
    return (h ~ h >> 15) & 1 == 1
end

local function mark(logits, ctx)
    local list = {}
    for _, id in ipairs(logits:candidates()) do
        if green(ctx.last, id) then list[#list + 1] = id end
    end
    if #list > 0 then logits:add(list, strength) end
end

--- How far the number of green tokens lies above what chance gives, in standard deviations.
local function z_score(ids)
    local n, count = #ids - 1, 0
    for i = 2, #ids do count = count + (green(ids[i - 1], ids[i]) and 1 or 0) end
    return (count - n / 2) / math.sqrt(n / 4)
end

local function write(sampler)
    local s <close> = model:session()
    s:user "Tell me a short story about a fox."
    return s:gen { sampler = sampler, max_tokens = 80, seed = 11, ignore_eos = true }
end

local texts = llm.map({
    { { "top_k", 50 }, { "temperature", 1.0 } },
    { { "top_k", 50 }, mark, { "temperature", 1.0 } },
}, write)
local z = {}
for i, name in ipairs { "plain:", "marked:" } do
    z[i] = z_score(texts[i].tokens)
    print(("%-7s %s... z = %.1f"):format(name, texts[i].text:sub(1, 60):gsub("\n", " "), z[i]))
end
print("told apart: " .. tostring(z[1] < 4 and z[2] > 4))
