--- llmrun sweep: policies, loads and seeds in the simulator, side by side, as tables and one page.

local args = require "llmrun.cli.args"
local common = require "llmrun.cli.common"
local core = require "llmrun.core"
local json = require "llmrun.json"
local params = require "llmrun.policy.params"
local simulate = require "llmrun.cli.simulate"

local M = {}

--- Flags of the fleet and the trace, as those of llmrun simulate.
function M.fleet_flags()
    local list = {}
    local other = { policy = true, seed = true, speed = true, sample = true, rows = true, json = true }
    for _, f in ipairs(simulate.flags) do
        if not other[f[1]] then list[#list + 1] = f end
    end
    return list
end

--- What those flags say, as options of sweep.run.
function M.fleet_options(o)
    if not o.trace then args.fail("--trace TRACE is needed", 2) end
    local f = simulate.options(o)
    return {
        trace = o.trace, requests = o.requests, skip = o.skip, scale = o.scale, limit = o.limit, profile = f.profile,
        replicas = f.replicas, router = f.router, tp = f.tp, pp = f.pp, engine = f.engine, slo = f.slo,
        oversize = f.oversize,
    }
end

M.jobs_flag = { "jobs", short = "j", arg = "N", type = "integer", range = { 1, 1024 },
    help = "processes at once (default: all processors)" }

local flags = {
    { "policies", short = "p", arg = "LIST", default = "fcfs,fair",
        help = "names and files, options behind a colon: fcfs,mlfq:quantum=128,levels=4,mine.lua" },
    { "loads", arg = "LIST", default = "1", help = "arrivals so many times as fast: 0.5,1,2" },
    { "seeds", arg = "N", type = "integer", default = 3, range = { 1, 10000 },
        help = "runs of each; seed k of a file is its k-th --requests rows" },
    M.jobs_flag,
    { "output", short = "o", arg = "FILE", help = "writes a report: one page, .html" },
    { "json", help = "prints everything as JSON" },
}

M.summary = "compares policies in the simulator over loads and seeds"
M.usage = "--policies LIST --trace TRACE --profile NAME|FILE [FLAGS...]"
M.flags = common.flags(flags, M.fleet_flags())
M.help = [[
Simulates every policy at every load with every seed, each in a process of its own, and prints the means over the seeds
with 95 % confidence intervals (Student's t). The report (-o) has plots over the load, differences seed by seed, tenants
and a time line in one file that needs nothing else. The same flags give the same output, to the byte. A run that fails
is told with its error, the others go on; the exit status is then 1.]]
M.examples = [[llmrun sweep --policies fcfs,fair,deadline --loads 0.5,1,2 --seeds 5 --profile h100-8b \
          --trace burst:rate=150,shape=0.2,tenants=3,deadline=2..30 -o report.html
        llmrun sweep --policies fcfs,mine.lua --trace AzureLLMInferenceTrace_conv.csv --requests 2000 --seeds 5 \
          --loads 1,4,16 --profile h100-70b --replicas 4 --slo-ttft 1 --slo-tpot 0.05 -j 8 -o report.html]]

local function numbers(text)
    local list = {}
    for part in text:gmatch("[^,]+") do
        list[#list + 1] = tonumber(part) or args.fail(("--loads: numbers expected, got '%s'"):format(part), 2)
    end
    return list
end

--- An error of the library as that of a command: without the name of the call.
function M.guard(fn, ...)
    local r = table.pack(pcall(fn, ...))
    if r[1] then return table.unpack(r, 2, r.n) end
    if require("llmrun.errors").is(r[2]) then args.fail((r[2].message:gsub("^.-%f[%a]%a+: ", "", 1))) end
    error(r[2], 0)
end


function M.run(o)
    local sweep = require "llmrun.sweep"
    local options = M.fleet_options(o)
    options.policies, options.loads, options.seeds = params.split(o.policies), numbers(o.loads), o.seeds
    options.jobs = o.jobs or core.cpus()
    local out <close> = common.create(o.output) -- luacheck: ignore 211
    local bar = common.bar()
    options.progress = function(done, all) bar(done / all, ("%d of %d runs"):format(done, all)) end
    local s = M.guard(sweep.run, options)
    bar()
    if out then
        common.check(out:write(require("llmrun.sweep.page").html(s)))
        common.check(out:done())
    end
    if o.json then
        s.at = nil
        print((assert(json.encode(s))))
    else
        io.write(sweep.text(s))
    end
    return s.failed > 0 and 1 or 0
end

return M
