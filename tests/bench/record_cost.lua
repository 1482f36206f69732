--- What a recording costs: steps of 64 sequences that decode, written down and not, in turn.
---
---   llmrun tests/bench/record_cost.lua [--model FILE] [--steps N] [--segments N]
---
--- Prints JSON lines: record_us, how much longer a step takes with the recording (medians of segments, so that a busy
--- machine hurts both alike), bytes a step; with --model also the step and the share of it. Without, steps are those of
--- a scripted model, so that the difference is seen well.

local core = require "llmrun.core"
local json = require "cjson"
local llm = require "llmrun"
local record = require "llmrun.record"

local SEQUENCES = 64
local opts = { steps = 50, segments = 20 }
for i = 1, #arg, 2 do opts[arg[i]:gsub("^%-%-", "")] = tonumber(arg[i + 1]) or arg[i + 1] end

local function median(list)
    table.sort(list)
    return list[#list // 2 + 1]
end

local function measure(name, model)
    local path = os.tmpname()
    local recorder = assert(record.begin(model, path))
    local runner = model.runner
    for i = 1, SEQUENCES do
        local seq = assert(model.engine:seq())
        assert(seq:append { 70, 71, 72, 73, 74 + i % 10 })
        assert(runner:submit("bench", seq, {
            kind = "generate", ignore_eos = true, seed = i, max_tokens = opts.steps * (2 * opts.segments + 4),
        }))
    end
    local on = true
    local function run(recorded)
        if on ~= recorded then
            if recorded then assert(runner:observe(recorder)) else runner:unobserve(recorder) end
            on = recorded
        end
        local _, before = core.stat(path)
        local began = os.clock()
        for _ = 1, opts.steps do runner:step() end
        local seconds = (os.clock() - began) / opts.steps
        local _, after = core.stat(path)
        return seconds * 1e6, (after - before) / opts.steps
    end
    run(true)
    run(false)
    local with, without, bytes = {}, {}, {}
    for i = 1, opts.segments do
        if i % 2 == 0 then without[i] = run(false) end
        with[i], bytes[i] = run(true)
        if i % 2 == 1 then without[i] = run(false) end
    end
    local differences = {}
    for i = 1, opts.segments do differences[i] = with[i] - without[i] end
    local step, cost = median(without), median(differences)
    print(json.encode { what = name, sequences = SEQUENCES, step_us = step, record_us = cost,
        share = cost / step, bytes = median(bytes) })
    record.finish(recorder)
    os.remove(path)
end

do
    local model <close> = llm.scripted {
        next = function() return 65 end, ctx = 8192, max_seqs = SEQUENCES,
        kv = { blocks = 40000, prefix_cache = false },
    }
    measure("scripted", model)
end
if opts.model then
    local model <close> = llm.load(opts.model, { kv = { blocks = 8192 } })
    measure(model.info.name, model)
end
