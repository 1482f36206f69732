--- llmrun tune: good values of a policy's parameters, found in the simulator.

local args = require "llmrun.cli.args"
local common = require "llmrun.cli.common"
local core = require "llmrun.core"
local json = require "llmrun.json"
local sweep = require "llmrun.cli.sweep"

local M = {
    summary = "searches a policy's parameters in the simulator",
    usage = "--policy NAME|FILE --trace TRACE --profile NAME|FILE [FLAGS...]",
    help = [[
Draws candidates from what the policy declares (its params: see lua/llmrun/policy/params.lua), tries all of them on a
short piece of the trace and the better ones on longer pieces, and prints the front of throughput against a latency:
those that nobody beats in both. Parameters that are given (mlfq:levels=4) are left as they are. The same flags give the
same output.]],
    examples = [[llmrun tune --policy mlfq --trace burst:rate=250,shape=0.2 --profile h100-8b --requests 900
        llmrun tune --policy mine.lua --candidates 81 --rounds 4 --trace day.jsonl --requests 5000 --load 2 \
          --less e2e_p99 --more goodput_per_s --slo-ttft 1 --profile h100-70b -j 8 -o front.html]],
    flags = common.flags({
        { "policy", short = "p", arg = "NAME|FILE", help = "what is searched; options behind a colon are settled" },
        { "candidates", short = "c", arg = "N", type = "integer", default = 27, help = "how many in the first round" },
        { "rounds", arg = "N", type = "integer", default = 3, help = "--requests are those of the last one" },
        { "eta", arg = "X", type = "number", default = 3, help = "one in X goes on, on a piece X times as long" },
        { "load", arg = "X", type = "number", default = 1, help = "arrivals X times as fast" },
        { "seeds", arg = "N", type = "integer", default = 2, help = "traces of each trial" },
        { "seed", arg = "N", type = "integer", default = 1, help = "of the draws" },
        { "more", arg = "KEY", default = "tokens_per_s", help = "what is to be high: tokens_per_s, goodput_per_s ..." },
        { "less", arg = "KEY", default = "ttft_p99", help = "what is to be low: ttft_p99, tpot_p99, e2e_p99 ..." },
        sweep.jobs_flag,
        { "output", short = "o", arg = "FILE", help = "writes a page with the front, .html" },
        { "json", help = "prints everything as JSON" },
    }, sweep.fleet_flags()),
}

function M.run(o)
    if not o.policy then args.fail("--policy NAME|FILE is needed", 2) end
    local tune = require "llmrun.tune"
    local options = sweep.fleet_options(o)
    for _, name in ipairs { "policy", "candidates", "rounds", "eta", "load", "seeds", "seed", "more", "less" } do
        options[name] = o[name]
    end
    options.jobs = o.jobs or core.cpus()
    local out <close> = common.create(o.output) -- luacheck: ignore 211
    local bar = common.bar()
    options.progress = function(done, all, text) bar(done / all, text) end
    local t = sweep.guard(tune.run, options)
    bar()
    if out then
        common.check(out:write(tune.html(t)))
        common.check(out:done())
    end
    if o.json then print((assert(json.encode(t)))) else io.write(tune.text(t)) end
    return 0
end

return M
