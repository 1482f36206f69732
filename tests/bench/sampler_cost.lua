-- What a sampler in Lua costs: decode throughput with "top-k 40, temperature 0.8" as native stages, and as a Lua
-- function that takes the 40 best from C, weighs them and draws. One JSON line a kind, the last one with the loss.
--
--   llmrun tests/bench/sampler_cost.lua [MODEL] [BATCH] [ROUNDS] [THREADS]
--
-- The kinds take turns, so that a machine whose speed drifts favours none; medians over the rounds. On a machine that
-- others use too, look at the loss by processor time.

local llm = require "llmrun"
local core = require "llmrun.core"

local name, batch, rounds = arg[1] or "smollm2", tonumber(arg[2]) or 16, tonumber(arg[3]) or 7
local tokens = 48
local model <close> = llm.load(name, { ctx = 256, threads = tonumber(arg[4]), max_seqs = batch })

local exp = math.exp

local function in_lua(logits, ctx)
    local ids, x = logits:topk(40)
    local best, sum = x[1], 0
    for i = 1, #x do
        local w = exp((x[i] - best) / 0.8)
        x[i], sum = w, sum + w
    end
    local u = ctx:uniform() * sum
    for i = 1, #x do
        u = u - x[i]
        if u < 0 then return ids[i] end
    end
    return ids[#x]
end

local kinds = {
    { name = "native", options = { top_k = 40, temperature = 0.8 } },
    { name = "lua", options = { sampler = in_lua } },
    { name = "mixed", options = { sampler = { { "top_k", 40 }, function(l) l:scale(1 / 0.8) end } } },
}

local prompt = {}
for i = 1, batch do prompt[i] = i end

local function once(options)
    local sessions = llm.map(prompt, function(i)
        local s = model:session()
        s:append(("Story number %d. Once upon a time"):format(i))
        s:logits() -- the prompt is computed before the clock starts
        return s
    end)
    local before, began, cpu = model:metrics(), core.now(), os.clock()
    llm.map(sessions, function(s)
        local o = { max_tokens = tokens, ignore_eos = true, seed = s.len }
        for k, v in pairs(options) do o[k] = v end
        s:gen(o)
    end)
    local seconds = core.now() - began
    cpu = os.clock() - cpu
    local steps = model:metrics().steps - before.steps
    for _, s in ipairs(sessions) do s:close() end
    return batch * tokens / seconds, batch * tokens / cpu, steps
end

local function median(list)
    table.sort(list)
    local n = #list
    return n % 2 == 1 and list[n // 2 + 1] or (list[n // 2] + list[n // 2 + 1]) / 2
end

for _, k in ipairs(kinds) do k.rates, k.cpu = {}, {} end
once(kinds[1].options) -- warm
for _ = 1, rounds do
    for _, k in ipairs(kinds) do
        local n = #k.rates + 1
        k.rates[n], k.cpu[n], k.steps = once(k.options)
    end
end
for _, k in ipairs(kinds) do k.median, k.cpu = median(k.rates), median(k.cpu) end
for _, k in ipairs(kinds) do
    print(('{"bench":"sampler_cost","kind":"%s","batch":%d,"tokens_per_second":%.1f,"steps":%d,"loss_percent":%.2f,'
        .. '"loss_percent_cpu":%.2f}'):format(k.name, batch, k.median, k.steps,
        100 * (1 - k.median / kinds[1].median), 100 * (1 - k.cpu / kinds[1].cpu)))
end
