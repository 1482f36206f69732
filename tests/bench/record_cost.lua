--- What a recording costs: steps of 64 sequences that decode, written down and not, in turn.
---
---   llmrun tests/bench/record_cost.lua [--model FILE] [--steps N] [--segments N]
---
--- Prints JSON lines, for a scripted model, whose steps cost so little that the difference is seen well, and for
--- --model: step_us, processor time of a step that is not recorded; record_us, how much more one takes that is (medians
--- of segments, so that a busy machine hurts both alike); write_us, the part of it that comes between the steps (taking
--- the lines, giving them to the system), measured by itself; share, write_us of the step's time; bytes a step.

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
    local on, written, pumps = true, 0, 0
    local pump = runner.pump
    function runner.pump(self)
        local t = core.now()
        pump(self)
        written, pumps = written + core.now() - t, pumps + 1
    end
    local function run(recorded)
        if on ~= recorded then
            if recorded then assert(runner:observe(recorder)) else runner:unobserve(recorder) end
            on = recorded
        end
        local _, before = core.stat(path)
        local began, wall = os.clock(), core.now()
        for _ = 1, opts.steps do runner:step() end
        local seconds, real = (os.clock() - began) / opts.steps, (core.now() - wall) / opts.steps
        local _, after = core.stat(path)
        return seconds * 1e6, (after - before) / opts.steps, real * 1e6
    end
    run(true)
    run(false)
    written, pumps = 0, 0
    local with, without, bytes, real = {}, {}, {}, {}
    for i = 1, opts.segments do
        if i % 2 == 0 then without[i] = run(false) end
        with[i], bytes[i], real[i] = run(true)
        if i % 2 == 1 then without[i] = run(false) end
    end
    local differences = {}
    for i = 1, opts.segments do differences[i] = with[i] - without[i] end
    local write_us = written / pumps * 1e6
    print(json.encode { what = name, sequences = SEQUENCES, step_us = median(without), record_us = median(differences),
        write_us = write_us, share = write_us / median(real), bytes = median(bytes) })
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
