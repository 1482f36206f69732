--- What a constraint costs a decode step: a real model, 16 sequences at temperature 1, held to a JSON schema and free.
---
---   llmrun tests/bench/constraint_throughput.lua [--model NAME] [--steps N] [--pairs N] [--running N]
---
--- Both ways take turns on one engine, so many decode steps each, and which comes first changes from pair to pair. A
--- stage that bans one token keeps forced tokens out (each token has its forward pass, as in the free batch). Prints
--- one JSON line: tokens/s of both (wall clock, medians), how much slower the constraint is as the median over the
--- pairs (wall clock and processor time), mask_us: processor time of one mask and one accept, from a walk over the
--- tokens that were drawn, and mask_percent, its share of a step for all sequences: on a noisy machine that is the
--- figure to go by. forced_tps: tokens/s of the constrained batch when forced tokens are taken without a forward pass,
--- forced_percent: their share.

local core = require "llmrun.core"
local json = require "cjson"
local llm = require "llmrun"
local common = require "llmrun.cli.common"
local grammar = require "llmrun.grammar"

local opts = { model = "smollm2", steps = 48, pairs = 12, running = 16 }
for i = 1, #arg, 2 do opts[arg[i]:gsub("^%-%-", "")] = tonumber(arg[i + 1]) or arg[i + 1] end

local SCHEMA = [[{ "type": "array", "minItems": 500, "items": { "type": "object", "properties": {
    "name": { "type": "string", "maxLength": 24 }, "age": { "type": "integer", "minimum": 0, "maximum": 120 },
    "email": { "type": "string", "pattern": "^[a-z.]+@[a-z]+[.](com|org)$" },
    "role": { "enum": ["admin", "user", "guest"] },
    "tags": { "type": "array", "items": { "type": "string" }, "maxItems": 4 }, "score": { "type": "number" } },
    "required": ["name", "age", "role", "tags"], "additionalProperties": false } }]]

local model = llm.load(opts.model, { max_seqs = opts.running, ctx = 1024,
    kv = { blocks = (opts.running + 1) * 65, prefix_cache = false } })
local engine, vocab = model.engine, model.vocab.core or model.vocab
local t0 = os.clock()
local g = assert(grammar.compile { json = SCHEMA })
local compile_ms = 1e3 * (os.clock() - t0)
assert(g:matcher(vocab)):count() -- the trie is built at the first

local function show(x) return tonumber(("%.3f"):format(x)) end
local function median(list) return select(3, common.statistics(list)) end
local function error_of(list) return select(2, common.statistics(list)) / (#list) ^ 0.5 end

local drawn = {}

--- Decodes one batch: seconds, processor seconds and tokens of all but the first step.
local function batch(matcher, force, seed)
    local ids = model:tokenize "<|im_start|>user\nList people as JSON.<|im_end|>\n<|im_start|>assistant\n"
    local requests, seqs = {}, {}
    for i = 1, opts.running do
        seqs[i] = assert(engine:seq())
        assert(seqs[i]:append(ids))
        local stages = { { "temperature", 1 } }
        if not force then table.insert(stages, 1, { "ban", { 0 } }) end
        requests[i] = assert(engine:request(seqs[i], { max_tokens = 900, ignore_eos = true, matcher = matcher,
            stages = stages, seed = seed * 100 + i }))
    end
    local function drain()
        while engine:next_event() do end
    end
    assert(engine:step() > 0)
    drain()
    local function count()
        local n = 0
        for _, r in ipairs(requests) do n = n + r:info().n_generated end
        return n
    end
    local before, wall, clock = count(), core.now(), os.clock()
    for _ = 1, opts.steps do
        assert(engine:step() >= opts.running)
        drain()
    end
    wall, clock = core.now() - wall, os.clock() - clock
    local n, forced = count() - before, 0
    for i, r in ipairs(requests) do
        forced = forced + r:info().n_forced
        if matcher and not force then drawn[#drawn + 1] = r:tokens() end
        r:close()
        seqs[i]:close()
    end
    return { wall = wall / opts.steps, clock = clock / opts.steps, tps = n / wall, forced = forced / n }
end

local m = assert(g:matcher(vocab))
batch(m, false, 0)
local free, held, jump = { wall = {}, tps = {} }, { wall = {}, tps = {} }, { tps = {}, share = {} }
local slower = { wall = {}, clock = {} }
for pair = 1, opts.pairs do
    local a, b
    if pair % 2 == 0 then
        a, b = batch(nil, false, pair), batch(m, false, pair)
    else
        b, a = batch(m, false, pair), batch(nil, false, pair)
    end
    free.wall[pair], free.tps[pair], held.tps[pair] = a.wall, a.tps, b.tps
    slower.wall[pair], slower.clock[pair] = 100 * (b.wall / a.wall - 1), 100 * (b.clock / a.clock - 1)
    if pair % 4 == 1 then
        local c = batch(m, true, pair)
        table.insert(jump.tps, c.tps)
        table.insert(jump.share, 100 * c.forced)
    end
end

-- the constraint alone, over the tokens that were drawn
local n, clock = 0, os.clock()
for _, tokens in ipairs(drawn) do
    local walk <close> = assert(g:matcher(vocab))
    for _, id in ipairs(tokens) do
        walk:count()
        assert(walk:accept(id))
        n = n + 1
    end
end
local mask = (os.clock() - clock) / n

print(json.encode {
    model = model.info.name, backend = model.info.backend, running = opts.running, compile_ms = show(compile_ms),
    tps_free = show(median(free.tps)), tps_held = show(median(held.tps)), slower_percent = show(median(slower.wall)),
    slower_percent_error = show(error_of(slower.wall)), slower_cpu_percent = show(median(slower.clock)),
    slower_cpu_percent_error = show(error_of(slower.clock)), mask_us = show(mask * 1e6),
    mask_percent = show(100 * opts.running * mask / median(free.wall)), forced_tps = show(median(jump.tps)),
    forced_percent = show(median(jump.share)),
})
model:close()
