--- llmrun trace: makes traces of requests, says what one is like, and turns files of other services into our format.

local args = require "llmrun.cli.args"
local common = require "llmrun.cli.common"
local count = require("llmrun.words").count
local errors = require "llmrun.errors"
local json = require "llmrun.json"
local traces = require "llmrun.traces"
local workload = require "llmrun.workload"

local function describe_option(o)
    local default = o[2] ~= nil and (" [%s]"):format(o[2]) or ""
    return ("  %-10s %s%s"):format(o[1], o.help or "", default)
end

local function help()
    local lines = {
        "Makes a trace of requests (arrival times and lengths, no text) for llmrun simulate and sweep, says what a",
        "trace is like, or turns one of Azure, BurstGPT, Mooncake or llmrun serve --record into llmrun's own format.",
        "", "TRACE is a file, or KIND:KEY=VALUE,... (which simulate and sweep take as well; parts joined by + run side",
        "by side). Keys of all kinds:",
    }
    for _, o in ipairs(workload.common) do lines[#lines + 1] = describe_option(o) end
    lines[#lines + 1] = "kinds, and their own keys (tokens and seconds are means):"
    for _, kind in ipairs(workload.names) do
        local keys = {}
        for i, o in ipairs(workload.kinds[kind]) do keys[i] = ("%s [%s]"):format(o[1], o[2]) end
        lines[#lines + 1] = ("  %-13s %s"):format(kind, table.concat(keys, ", "))
    end
    return table.concat(lines, "\n")
end

local M = {
    summary = "makes and describes traces of requests",
    usage = "[TRACE] [FLAGS...]",
    args = true,
    help = help(),
    flags = {
        { "kind", arg = "KIND", choices = workload.names, help = "instead of TRACE: what to make" },
        { "rate", arg = "X", type = "number", help = "requests a second" },
        { "requests", short = "n", arg = "N", type = "integer", range = { 1, 1 << 53 },
            help = "how many; of a file: at most" },
        { "seed", arg = "N", type = "integer", help = "same seed, same trace" },
        { "scale", arg = "X", type = "number", range = { 1e-6, 1e6 }, help = "lengths times X" },
        { "speed", arg = "X", type = "number", range = { 1e-6, 1e6 }, help = "arrivals X times as fast" },
        { "limit", arg = "N", type = "integer", range = { 1, 1 << 53 },
            help = "leave out requests of more tokens, output included" },
        { "output", short = "o", arg = "FILE", help = "writes the trace (JSON lines)" },
        { "json", help = "what it is like as JSON" },
    },
    examples = [[llmrun trace --kind poisson --rate 5 --requests 1000 -o poisson.jsonl
        llmrun trace agents:rate=2,shape=0.2,requests=500,tenants=3 -o agents.jsonl
        llmrun trace "conversation:rate=3,tenant=chat+burst:rate=9,tenant=batch"
        llmrun trace AzureLLMInferenceTrace_conv.csv
        llmrun trace BurstGPT_1.csv --requests 10000 --speed 60 -o burst.jsonl]],
}

local function show(d)
    print(("%s, %d of them arrive%s, in %.1f s%s%s"):format(count(d.requests, "request"), d.arrivals,
        d.arrivals == 1 and "s by itself" or " by themselves", d.seconds,
        d.rate and (": %.3g a second"):format(d.rate) or "",
        d.burstiness and (", burstiness %.2f (Poisson: 1)"):format(d.burstiness) or ""))
    print(("%-8s %10s %8s %8s %8s %8s"):format("tokens", "mean", "p50", "p90", "p99", "max"))
    for _, name in ipairs { "prompt", "output" } do
        local s = d[name]
        print(("%-8s %10.1f %8d %8d %8d %8d"):format(name, s.mean, s.p50, s.p90, s.p99, s.max))
    end
    if next(d.tenants, next(d.tenants)) or not d.tenants[""] then
        local list = {}
        for _, name in ipairs(json.keys(d.tenants)) do
            if #list == 12 then
                list[13] = "..."
                break
            end
            list[#list + 1] = ("%s %d"):format(name == "" and "(none)" or name, d.tenants[name])
        end
        print("tenants: " .. table.concat(list, ", "))
    end
end

--- The text of the trace that the flags mean.
local function wanted(o)
    local what = o.args[1]
    if #o.args > 1 then args.fail("one trace at a time; parts joined by + make one", 2) end
    if not what and not o.kind then args.fail("TRACE or --kind expected", 2) end
    if what and o.kind then args.fail("TRACE or --kind, not both", 2) end
    if not what then
        what = ("%s:requests=%d"):format(o.kind, o.requests or 1000)
        if o.rate then what = what .. (",rate=%.17g"):format(o.rate) end
    elseif o.rate then
        args.fail("--rate goes with --kind; of a trace that is there, --speed changes it", 2)
    end
    return what
end

function M.run(o)
    local what = wanted(o)
    local function open()
        local rows, err = traces.open(what, { most = o.requests, seed = o.seed, scale = o.scale, speed = o.speed,
            limit = o.limit })
        if not rows then args.fail(err) end
        return rows
    end
    local ok, err = pcall(function()
        if o.output then
            local n, why = traces.write(o.output, open(), { made = what, seed = o.seed })
            if not n then args.fail(why) end
            io.stderr:write(("%s: %s, %s\n"):format(o.output, count(n, "request"), common.size(select(2,
                require("llmrun.core").stat(o.output)))))
            return
        end
        local d = traces.describe(open())
        if o.json then print((json.encode(d))) else show(d) end
    end)
    if ok then return 0 end
    if errors.is(err) then args.fail((err.message:gsub("^.-trace: ", ""))) end
    error(err, 0)
end

return M
