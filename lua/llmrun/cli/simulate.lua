--- llmrun simulate: a policy on a fleet that is not there.

local args = require "llmrun.cli.args"
local common = require "llmrun.cli.common"
local count = require("llmrun.words").count
local errors = require "llmrun.errors"
local tables = require "llmrun.tables"

local M = {
    summary = "runs a policy on a trace with a simulated fleet",
    usage = "--policy NAME|FILE --trace TRACE --profile NAME|FILE [FLAGS...]",
    help = [[
Runs the requests of a trace through the engine's own scheduler, KV blocks and prefix index under a policy, with a cost
model (a profile) and a virtual clock in the place of the forward pass, on one or many replicas, and prints latencies,
throughput and goodput. A policy is the same file that a server runs. Profiles: h100-8b, h100-70b, h200-8b, h200-70b, or
a file that llmrun profile wrote. The same input gives the same output.]],
    examples = [[
        llmrun simulate --trace tests/data/traces/azure_conv_2023.csv --profile h100-8b
        llmrun simulate --policy mine.lua --trace day.jsonl --profile mine.json --replicas 8 --router session
        llmrun simulate --policy fair --trace day.jsonl --profile h100-70b --slo-ttft 1 --slo-tpot 0.05 --json]],
    flags = {
        { "policy", short = "p", arg = "NAME|FILE",
            help = "scheduling policy, perhaps with options: mlfq:quantum=128 (default: by arrival)" },
        { "trace", arg = "TRACE", help = "a file, or a made one: poisson:rate=5,requests=1000 (llmrun trace --help)" },
        { "profile", arg = "NAME|FILE", help = "what steps cost" },
        { "replicas", short = "r", arg = "N", type = "integer", default = 1, range = { 1, 100000 },
            help = "engines, each with a model" },
        { "router", arg = "NAME|FILE", default = "least_loaded",
            help = "least_loaded, round_robin, session, or a Lua file" },
        { "seed", arg = "N", type = "integer", default = 1, help = "of math.random, for policies and routers" },
        { "tp", arg = "N", type = "integer", help = "GPUs that share the layers of a replica" },
        { "pp", arg = "N", type = "integer", help = "stages of a replica" },
        { "slo-ttft", arg = "S", type = "number", range = { 1e-9, 1e9 },
            help = "goodput: seconds to the first token at most" },
        { "slo-tpot", arg = "S", type = "number", range = { 1e-9, 1e9 },
            help = "goodput: mean seconds a token at most" },
        { "max-batch-tokens", arg = "N", type = "integer", help = "rows of a step (default: the profile's)" },
        { "max-seqs", arg = "N", type = "integer", help = "requests that run at once on a replica" },
        { "chunk", arg = "N", type = "integer", help = "most prompt rows of one request in a step" },
        { "prompt-rows", arg = "N", type = "integer", help = "prompt rows that the built-in rule always takes" },
        { "block-size", arg = "N", type = "integer", range = { 1, 256 }, help = "tokens in a KV block" },
        { "kv-tokens", arg = "N", type = "integer", help = "KV of a replica" },
        { "no-prefix-cache", help = "nothing is shared" },
        { "requests", arg = "N", type = "integer", range = { 1, 1 << 53 }, help = "most rows of the trace" },
        { "skip", arg = "N", type = "integer", default = 0, range = { 0, 1 << 53 },
            help = "rows to leave out at the beginning" },
        { "scale", arg = "X", type = "number", range = { 1e-6, 1e6 }, default = 1, help = "lengths times X" },
        { "speed", arg = "X", type = "number", range = { 1e-6, 1e6 }, default = 1, help = "arrivals X times as fast" },
        { "limit", arg = "N", type = "integer", range = { 1, 1 << 53 },
            help = "leaves out rows of more than N tokens" },
        { "sample", arg = "S", type = "number", range = { 1e-3, 1e9 },
            help = "seconds between two points of the time line" },
        { "drop-oversize", help = "rows that fit no replica count as failed; else they end the command" },
        { "rows", arg = "FILE", help = "writes a line of JSON for each request" },
        { "json", help = "prints everything as JSON" },
    },
}

local function encode(v)
    local text, err = require("llmrun.json").encode(v)
    if not text then args.fail(err) end
    return text
end

local function line(name, s, unit)
    if s.n == 0 then return ("%-8s %10s"):format(name, "-") end
    return ("%-8s %10.2f %10.2f %10.2f %10.2f %10.2f  %s"):format(name, s.mean * unit, s.p50 * unit, s.p90 * unit,
        s.p99 * unit, s.max * unit, unit == 1 and "s" or "ms")
end

local function show(r)
    print(("%s, %d done, %d failed; %s of %s, policy %s, router %s"):format(count(r.requests, "request"), r.finished,
        r.failed, count(#r.replicas, "replica"), r.profile, r.policy, r.router))
    print(("%.1f s (simulated in %.2f s): %.1f tokens/s, %.2f requests/s, %s, busy %.1f %%"):format(r.seconds,
        r.wall, r.tokens_per_s, r.requests_per_s, count(r.steps, "step"), 100 * r.busy))
    print(("%-8s %10s %10s %10s %10s %10s"):format("", "mean", "p50", "p90", "p99", "max"))
    print(line("TTFT", r.ttft, 1000))
    print(line("TPOT", r.tpot, 1000))
    print(line("total", r.e2e, 1))
    print(("goodput %.1f %% (%.2f requests/s), prefix hits %.1f %%, preemptions %d, KV %.1f %% (at most %.1f %%)")
        :format(100 * r.goodput, r.goodput_per_s, 100 * r.hit_rate, r.preemptions, 100 * r.kv.mean, 100 * r.kv.peak))
    if r.deadlines then
        print(("deadlines met by %.1f %% of %d"):format(100 * r.deadlines.met, r.deadlines.requests))
    end
    local names = tables.sorted_keys(r.tenants)
    if #names > 1 and #names <= 50 then
        print(("%-16s %9s %8s %12s %12s %14s"):format("tenant", "requests", "share", "TTFT p50 ms", "TTFT p99 ms",
            "work a second"))
        for _, name in ipairs(names) do
            local t = r.tenants[name]
            print(("%-16s %9d %7.1f%% %12.1f %12.1f %14.1f"):format(name == "" and "(none)" or name, t.requests,
                100 * t.share, (t.ttft.p50 or 0) * 1000, (t.ttft.p99 or 0) * 1000, t.service))
        end
    end
    if #names > 1 then print(("fairness %.4f over %d tenants (Jain)"):format(r.fairness, #names)) end
    if r.policy_error then print("the policy failed: " .. r.policy_error) end
end

--- The rows that the flags name, one after the other.
function M.read_trace(o)
    if not o.trace then args.fail("--trace TRACE is needed", 2) end
    local rows, err = require("llmrun.traces").open(o.trace, {
        most = o.requests, skip = o.skip, scale = o.scale, speed = o.speed, limit = o.limit,
    })
    if not rows then args.fail(err, 2) end
    return rows
end

--- The options of simulate.run that the flags say, but for the trace.
function M.options(o)
    if not o.profile then args.fail("--profile NAME|FILE is needed", 2) end
    local policy, policy_options
    if o.policy then policy, policy_options = common.policy_of(o.policy) end
    return {
        policy = policy, policy_options = policy_options, profile = o.profile, replicas = o.replicas,
        router = o.router, seed = o.seed, tp = o.tp,
        pp = o.pp, slo = { ttft = o.slo_ttft, tpot = o.slo_tpot }, sample = o.sample, rows = o.rows ~= nil,
        oversize = o.drop_oversize and "drop" or nil,
        engine = {
            max_batch_tokens = o.max_batch_tokens, max_seqs = o.max_seqs, chunk = o.chunk, prompt_rows = o.prompt_rows,
            block_size = o.block_size,
            kv_tokens = o.kv_tokens, prefix_cache = not o.no_prefix_cache,
        },
    }
end

function M.run(o)
    local run = M.options(o)
    run.trace = M.read_trace(o)
    local out <close> = common.create(o.rows) -- luacheck: ignore 211
    local progress = common.progress()
    run.progress = function(done, at, made)
        progress(made and ("%d of %s made"):format(made, count(o.replicas, "replica"))
            or ("%s done, %.0f s"):format(count(done, "request"), at))
    end
    local ok, r = pcall(require("llmrun.simulate").run, run)
    progress()
    if not ok then
        if errors.is(r) then args.fail((r.message:gsub("^simulate: ", ""))) end
        error(r, 0)
    end
    if out then
        for _, record in ipairs(r.records) do common.check(out:write(encode(record), "\n")) end
        common.check(out:done())
        r.records = nil
    end
    if o.json then
        r.wall = nil
        print(encode(r))
    else
        show(r)
    end
    return 0
end

return M
