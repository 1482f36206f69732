-- Decoding of forks that share a prefix: tokens a second by number of forks.
--
--   llmrun tests/bench/forks.lua [MODEL] [PREFIX] [TOKENS] [RUNS] [THREADS]
--
-- Beside it the processor time of a token, which other load on the machine disturbs less (with one thread; threads
-- that wait spin). What forks share lies in the same KV blocks and is read once for up to 8 rows of a step
-- (src/backend/cpu_attn.c).

local core = require "llmrun.core"
local llm = require "llmrun"

local model <close> = llm.load(arg[1] or "smollm2", { ctx = 4096, max_seqs = 64, threads = math.tointeger(arg[5]) })
local prefix, tokens = math.tointeger(arg[2]) or 2048, math.tointeger(arg[3]) or 48
local runs = math.tointeger(arg[4]) or 3
local words = {}
for i = 1, prefix do words[i] = ("item %d"):format(i) end
local ids = table.move(model:tokenize(table.concat(words, ", ")), 1, prefix, 1, {})

local s <close> = model:session()
s:append(ids)
s:logits()
local function run(n)
    local forks = {}
    for i = 1, n do
        forks[i] = s:fork()
        forks[i]:append(model:tokenize((" %d"):format(i)))
    end
    local function more(count)
        llm.map(forks, function(f)
            f:gen { max_tokens = count, ignore_eos = true, temperature = 1, seed = f.len }
        end)
    end
    more(2)
    local clock, start = os.clock(), core.now()
    more(tokens)
    clock, start = os.clock() - clock, core.now() - start
    for _, f in ipairs(forks) do f:close() end
    return n * tokens / start, clock / n / tokens * 1e3
end

for _, n in ipairs { 1, 4, 8, 16, 32 } do
    local rates, costs = {}, {}
    for i = 1, runs do rates[i], costs[i] = run(n) end
    table.sort(rates)
    table.sort(costs)
    local mid = runs // 2 + 1
    print(("%2d forks of %d tokens: %7.1f tokens/s, %6.2f ms"):format(n, prefix, rates[mid], costs[mid]))
end
