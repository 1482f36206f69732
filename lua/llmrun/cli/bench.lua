--- llmrun bench: prefill and decode speed of a model, measured over the engine's steps alone.

local core = require "llmrun.core"
local common = require "llmrun.cli.common"
local args = require "llmrun.cli.args"
local load = require "llmrun.cli.bench_load"
local limits = require "llmrun.cli.bench_limits"
local bench_url = require "llmrun.cli.bench_url"
local bench_spec = require "llmrun.cli.bench_spec"
local ranks = require "llmrun.cli.bench_ranks"

local M = {
    summary = "measures prefill and decode speed, and speed under load",
    usage = "[-m MODEL] [FLAGS...]",
    model = true,
    help = [[
Prefill: one prompt of N tokens, computed at once. Decode: tokens one by one behind a prompt of --depth tokens; with
--batch, that many sequences together (tokens of all are counted). No sampling but the arg max, no text. Each is done
once to warm up, then --repeat times. Beside each figure: what it reads or computes a second, and its share of what the
machine can do at best by the limit that binds it (decode: weights and KV read / memory bandwidth; prefill: operations /
the instruction set's peak), measured in the same run.

Under load, one of: --concurrency (requests at once), --load agents (many turns on a shared prefix), --replay (a trace
of real arrivals). They print throughput, time to first token (TTFT), time per token after it (TPOT), prefix hits.]],
    examples = [[
        llmrun bench -m qwen-0.5b
        llmrun bench --prefill 512 --decode 128 --repeat 5 --threads 2 --json
        llmrun bench --batch 1,4,16
        llmrun bench --concurrency 1,4,8,16,32
        llmrun bench --url http://127.0.0.1:8080 --requests 200 --rate 4 --goodput ttft:500,tpot:60
        llmrun bench -m qwen-1.5b --spec --draft qwen-0.5b --decode 128 --repeat 3
        llmrun bench --load agents --sessions 8 --turns 20
        llmrun bench --replay tests/data/traces/mooncake_conversation.jsonl --scale 0.03 --speed 0.5]],
    flags = common.flags({
        { "prefill", arg = "N", type = "integer", range = { 0 }, default = 512,
            help = "prompt tokens (0: leave it out)" },
        { "decode", arg = "N", type = "integer", range = { 0 }, default = 64,
            help = "tokens to decode (0: leave it out)" },
        { "depth", arg = "N", type = "integer", range = { 1 }, default = 128, help = "prompt tokens before decoding" },
        { "batch", arg = "LIST", default = "1", help = "sequences decoded together, e.g. 1,4,16" },
        { "repeat", short = "r", arg = "N", type = "integer", range = { 1 }, default = 5, help = "measurements" },
        { "no-limits", help = "doesn't measure the machine's limits" },
        { "json", help = "prints one JSON object a line" },
    }, load.flags, bench_url.flags, bench_spec.flags),
}

local some_tokens = load.some_tokens

local function must(ok, err)
    if not ok then args.fail(err) end
    return ok
end

local function drain(engine)
    while engine:next_event() do end
end

--- Steps until the requests are done; seconds that took.
local function run_to_end(engine, requests)
    local begin = core.now()
    for _, r in ipairs(requests) do
        while r:active() do
            must(engine:step())
            drain(engine)
            if core.interrupted() then args.fail("interrupted", 130) end
        end
    end
    return core.now() - begin
end

local function check_done(r)
    local info = r:info()
    if info.state ~= "done" then args.fail(info.error or info.state) end
    return info
end

local function measure_prefill(model, n, salt)
    local engine = model.engine
    local seq <close> = must(engine:seq())
    must(seq:append(some_tokens(model, n, salt)))
    local r <close> = must(engine:request(seq, { kind = "logits" }))
    local seconds = run_to_end(engine, { r })
    check_done(r)
    return n / seconds
end

local function measure_decode(model, n, depth, batch, salt)
    local engine = model.engine
    local seqs, requests = {}, {}
    for i = 1, batch do
        seqs[i] = must(engine:seq())
        must(seqs[i]:append(some_tokens(model, depth, salt * 131 + i)))
        local r <close> = must(engine:request(seqs[i], { kind = "logits" }))
        run_to_end(engine, { r })
        check_done(r)
        must(seqs[i]:append(some_tokens(model, 1, salt * 131 + i)))
    end
    for i = 1, batch do
        requests[i] = must(engine:request(seqs[i], {
            kind = "generate", max_tokens = n, ignore_eos = true, stages = { { "temperature", 0 } },
        }))
    end
    local seconds = run_to_end(engine, requests)
    for i = 1, batch do
        check_done(requests[i])
        requests[i]:close()
        seqs[i]:close()
    end
    return batch * n / seconds
end

--- fn(i) once to warm up and then `times` times: the list of its results.
local function repeated(times, what, progress, model, fn)
    local list, before = {}, nil
    for i = 0, times do
        progress(("%s: %d of %d"):format(what, i, times))
        local v = fn(i)
        if i > 0 then list[i] = v else before = model:stats().ranks end
    end
    progress()
    list.ranks, list.line = ranks.share(before, model:stats().ranks)
    return list
end

local function round(x) return math.floor(x * 100 + 0.5) / 100 end

--- The record's figures, and behind each its share of the limit. sight: the machine's limits and the model's work.
local function report(o, record, prefill, decode, sight)
    local prefill_share, decode_share
    if prefill then
        local mean, sd, median = common.statistics(prefill)
        record.prefill, record.prefill_tps, record.prefill_sd = o.prefill, round(mean), round(sd)
        record.prefill_median = round(median)
        record.prefill_ranks = prefill.ranks
        if sight then prefill_share = limits.add_prefill(record, sight.best, sight.work, median) end
    end
    if decode then
        local mean, sd, median = common.statistics(decode)
        record.decode, record.decode_tps, record.decode_sd = o.decode, round(mean), round(sd)
        record.decode_median = round(median)
        record.decode_ranks = decode.ranks
        if sight then
            decode_share = limits.add_decode(record, sight.best, sight.work, median, o.depth + o.decode // 2,
                record.kv_type, record.kv_value_type)
        end
    end
    if o.json then
        print(require("cjson").encode(record))
        return
    end
    if prefill then
        print(("prefill %5d tokens            %9.1f tokens/s  +- %6.1f  median %9.1f   %s"):format(o.prefill,
            record.prefill_tps, record.prefill_sd, record.prefill_median, prefill_share or ""))
        if prefill.line then print("        " .. prefill.line) end
    end
    if decode then
        print(("decode  %5d tokens, batch %3d %9.1f tokens/s  +- %6.1f  median %9.1f   %s"):format(o.decode,
            record.batch, record.decode_tps, record.decode_sd, record.decode_median, decode_share or ""))
        if decode.line then print("        " .. decode.line) end
    end
end

function M.run(o)
    if bench_url.wanted(o) then return bench_url.run(o) end
    if load.wanted(o) then return load.run(o) end
    local sizes = load.numbers("batch", o.batch)
    if o.spec then return bench_spec.run(o, sizes) end
    local most = math.max(table.unpack(sizes))
    local need = math.max(o.prefill, o.depth + o.decode) + 16
    local block = o.block_size or 16
    local blocks = ((o.depth + o.decode + 1) // block + 2) * most + (o.prefill // block + 2)
    local model <close> = common.load(o, {
        ctx = o.ctx or need, max_batch_tokens = math.max(512, o.prefill), max_seqs = math.max(64, most),
        kv = { type = o.kv_type, value_type = o.kv_value_type, block_size = o.block_size, blocks = blocks,
            prefix_cache = false },
    })
    local progress = common.progress()
    if not o.json then print(("%s, %s"):format(model.info.name, model.info.backend)) end
    local work = not o.no_limits and limits.work(model.info.path) or nil
    local best = work and limits.measure(o)
    local prefill = o.prefill > 0 and repeated(o["repeat"], "prefill", progress, model, function(i)
        return measure_prefill(model, o.prefill, i)
    end) or nil
    for k, batch in ipairs(sizes) do
        local decode = o.decode > 0 and repeated(o["repeat"], "decode", progress, model, function(i)
            return measure_decode(model, o.decode, o.depth, batch, i)
        end) or nil
        local _, peak = core.memory()
        best = best and limits.measure(o, best)
        local first = k == 1 and prefill or nil
        report(o, {
            model = model.info.name, path = model.info.path, backend = model.info.backend, batch = batch,
            depth = o.depth, ["repeat"] = o["repeat"], compute = o.compute or "fast", peak_memory = peak,
            kv_type = model:stats().kv_type, kv_value_type = model:stats().kv_value_type,
        }, first, decode, best and { best = best, work = work })
    end
    return 0
end

return M
