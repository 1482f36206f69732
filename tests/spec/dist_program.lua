--- Run by dist_spec.lua on several processes, and on one, which must print the same: llmrun dist_program.lua MODEL KV FILE
---
--- Prints tokens and log-probabilities to the last bit: of a long prompt, forks that draw, a cancelled one, a session
--- that was saved and restored, drafts, requests that preempt each other by swapping.

local llm = require "llmrun"
local path, kv_type, file = ...

local function show(name, r)
    local out = {}
    for i, id in ipairs(r.tokens) do
        local l = r.logprobs and r.logprobs[i]
        out[i] = l and ("%d:%a"):format(id, l.logprob) or tostring(id)
    end
    print(name, table.concat(out, " "))
end

local text = "It was a bright cold day in April, and the clocks were striking thirteen. "
do
    local model <close> = llm.load(path, { ctx = 256, max_batch_tokens = 64,
        kv = { type = kv_type, blocks = 64, block_size = 8 } })
    local s = model:session()
    s:append(text:rep(2))
    show("greedy", s:gen { max_tokens = 64, temperature = 0, logprobs = 0, ignore_eos = true })
    local forks = { s:fork(3) }
    local results = llm.map(forks, function(f)
        return f:gen { max_tokens = 10, seed = f.len, logprobs = 0, ignore_eos = true }
    end)
    for i, r in ipairs(results) do show("fork " .. i, r) end
    local n = 0
    for _ in forks[1]:stream { max_tokens = 50, temperature = 0, ignore_eos = true } do
        n = n + 1
        if n == 4 then break end
    end
    show("after a cancelled one", s:gen { max_tokens = 8, temperature = 0, logprobs = 0, ignore_eos = true })
    s:save(file)
    local again = model:restore(file)
    show("restored", again:gen { max_tokens = 8, temperature = 0, logprobs = 0, ignore_eos = true })
    local l = again:logits()
    print("logits", l:argmax(), ("%a"):format(l:get(l:argmax())))
    -- drafts, as lines and as trees: the rows of a tree go to several sequences' blocks
    local function tree() return { 65, 66, 67, 68, parents = { 0, 1, 1, 0 } } end
    for _, how in ipairs { "ngram", { fn = tree, fixed = true } } do
        local d <close> = model:session()
        d:append(text)
        show("drafted", d:gen { max_tokens = 12, temperature = 0, logprobs = 0, ignore_eos = true, speculate = how })
    end
    assert(model:check())
end

-- a pool that holds two of the three
local model <close> = llm.load(path, { ctx = 96, max_batch_tokens = 32, preempt = "swap",
    kv = { type = kv_type, blocks = 22, block_size = 4, prefix_cache = false } })
local results = llm.map({ 1, 2, 3 }, function(i)
    local s <close> = model:session()
    s:append(text:sub(i, 30))
    return s:gen { max_tokens = 16, temperature = 0, logprobs = 0, ignore_eos = true }
end)
for i, r in ipairs(results) do show("swapped " .. i, r) end
print("swaps", model:metrics().preempt_swap > 0)
local ranks = model:stats().ranks
if ranks then
    io.stderr:write(("ranks tp %d pp %d: %d passes, %d micro-batches, %d gathers\n"):format(ranks.tp, ranks.pp,
        ranks.passes, ranks.micro_batches, ranks.gathers))
end
