-- The side of llmrun of scripts/compare programs: the two programs of programs.json. One JSON line a run.
--
--   llmrun scripts/peers/programs.lua MODEL THREADS RUNS FIRST [PROGRAM]
--
-- Prefixes differ from run to run (FIRST, FIRST + 1, ... stands in them), and what is cached is dropped before each.

local llm = require "llmrun"
local core = require "llmrun.core"
local json = require "llmrun.json"

local f <close> = assert(io.open((arg[0]:gsub("%.lua$", ".json")), "rb"))
local config = assert(json.decode(f:read "a"))
local model <close> = llm.load(arg[1], { threads = tonumber(arg[2]), ctx = 4096, max_seqs = 32,
    compute = "int8", -- rows of 8 bits with a scale for each 32, as the other servers take them
    kv = { type = "bf16" } }) -- attention on tiles where the CPU has AMX
local runs, first = tonumber(arg[3]), tonumber(arg[4])

local usage

local function count(r)
    usage.computed = usage.computed + r.usage.computed_tokens
    usage.generated = usage.generated + r.usage.completion_tokens
    usage.prompt = usage.prompt + r.usage.prompt_tokens
    usage.calls = usage.calls + 1
    return r
end

-- exactly n tokens, as on the other side: the work must not depend on when a model finds an end
local function say(s, n, seed)
    return count(s:gen { max_tokens = n, min_tokens = n, temperature = 0.8, top_k = 40, top_p = 0.95,
        seed = seed })
end

--- The expected digit.
local function rating(s, question)
    local fork <close> = s:fork()
    fork:user(question)
    local r = count(fork:gen { max_tokens = 1, temperature = 0, logprobs = 10 })
    local sum, weight = 0, 0
    for _, t in ipairs(r.logprobs[1].top) do
        local digit = tonumber(t.text:match "^%s*([1-9])$")
        if digit then sum, weight = sum + digit * math.exp(t.logprob), weight + math.exp(t.logprob) end
    end
    return weight > 0 and sum / weight or 0
end

-- what llama-server takes for models whose file has no template
local chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    .. "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

local function begin(task, run)
    local s = model:session { template = not model.chat:has_template() and chatml or nil }
    s:system(("Shift %d.\n%s"):format(run, table.concat(config.system, "\n\n")))
    return s:user(task:format(run))
end

--- n next turns of each of several sessions side by side, each judged; best first.
local function proposals(sessions, n, c, seed)
    local forks = {}
    llm.map(sessions, function(s) s:logits() end) -- what is new is computed once; forks share it
    for _, s in ipairs(sessions) do table.move({ s:fork(n) }, 1, n, #forks + 1, forks) end
    local list = llm.map(forks, function(s, i)
        say(s, c.step_tokens, seed + i)
        return { session = s, score = rating(s, c.rate), number = i }
    end)
    table.sort(list, function(a, b) return a.score > b.score or (a.score == b.score and a.number < b.number) end)
    return list
end

local programs = {}

function programs.tree(run)
    local c = config.tree
    local kept = { begin(c.task, run) }
    for level = 1, c.levels do
        local list = proposals(kept, c.proposals, c, 100 * level)
        for _, s in ipairs(kept) do s:close() end
        kept = {}
        for i, p in ipairs(list) do
            local more = level < c.levels and c.next or c.answer
            if i > c.keep then p.session:close() else kept[i] = p.session:user(more) end
        end
    end
    say(kept[1], c.answer_tokens, 7)
    for _, s in ipairs(kept) do s:close() end
end

function programs.agent(run)
    local c = config.agent
    local s <close> = begin(c.task, run)
    for turn = 1, #c.results + 1 do
        s:join(proposals({ s }, c.branches, c, 100 * turn)[1].session)
        if c.results[turn] then s:user(c.results[turn]) end
    end
end

for run = first, first + runs - 1 do
    for _, name in ipairs(arg[5] and { arg[5] } or { "tree", "agent" }) do
        model:drop_cached()
        usage = { prompt = 0, computed = 0, generated = 0, calls = 0 }
        local before, began = model:metrics().computed_tokens, core.now()
        programs[name](run)
        usage.seconds = core.now() - began
        usage.computed = model:metrics().computed_tokens - before
        usage.program, usage.side = name, "llmrun"
        print(json.encode(usage))
    end
end
