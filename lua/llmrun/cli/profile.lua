--- llmrun profile: what a model's steps cost on this machine, for llmrun simulate.

local args = require "llmrun.cli.args"
local common = require "llmrun.cli.common"
local count = require("llmrun.words").count

local M = {
    summary = "measures what a model's steps cost, for simulate",
    usage = "[-m MODEL] -o FILE.json [FLAGS...]",
    model = true,
    help = [[
Runs steps of all sizes (prompts, decoding, both together; short and long contexts), fits a cost model to their times,
what happens between two steps included, and writes it as JSON, with its error on steps that were kept out of the fit.
Nothing else should run on the machine meanwhile. llmrun simulate --profile FILE takes it.]],
    examples = [[
        llmrun profile -m smollm2 -o smollm2.json
        llmrun profile -m qwen-0.5b --threads 1 --repeat 4 -o qwen.json]],
    flags = {
        { "out", short = "o", arg = "FILE", help = "the file to write" },
        { "name", arg = "NAME", help = "of the profile (default: the model's)" },
        { "repeat", arg = "N", type = "integer", default = 2, range = { 1, 1000 }, help = "how often all is measured" },
        { "kv-tokens", arg = "N", type = "integer", default = 32768, range = { 1024, 1 << 28 },
            help = "KV that the simulated replica has (and the model here)" },
        { "max-batch-tokens", arg = "N", type = "integer", help = "rows of a step" },
        { "max-seqs", arg = "N", type = "integer", help = "requests at once" },
        { "samples", arg = "FILE", help = "writes the measured steps too, a line of JSON each" },
    },
}

local function encode(v)
    local text, err = require("llmrun.json").encode(v)
    if not text then args.fail(err) end
    return text
end

function M.run(o)
    if not o.out then args.fail("-o FILE is needed", 2) end
    local out <close> = common.create(o.out)
    local lines <close> = common.create(o.samples) -- luacheck: ignore 211
    local block = o.block_size or 16
    local model <close> = common.load(o, {
        max_batch_tokens = o.max_batch_tokens, max_seqs = o.max_seqs,
        kv = {
            type = o.kv_type, value_type = o.kv_value_type, block_size = o.block_size,
            blocks = (o.kv_tokens + block - 1) // block,
        },
    })
    local bar = common.bar()
    local p, samples = common.guard(require("llmrun.profile.make").profile, model, {
        name = o.name, ["repeat"] = o["repeat"], progress = function(done) bar(done, "measuring") end,
    })
    bar()
    common.check(out:write(encode(p), "\n"))
    common.check(out:done())
    if lines then
        for _, s in ipairs(samples) do common.check(lines:write(encode(s), "\n")) end
        common.check(lines:done())
    end
    print(("%s: %s; on %s kept out of the fit, mean error %.1f %%, p90 %.1f %%"):format(o.out, count(#samples, "step"),
        count(p.error.n, "kind of steps", "kinds of steps"), 100 * p.error.mean_abs, 100 * p.error.p90))
    if p.error.disturbed > 0.05 then
        print(("other work on the machine disturbed %.0f %% of the steps%s"):format(100 * p.error.disturbed,
            p.error.disturbed > 0.5 and ": measure again when it is quiet" or ", which were left out"))
    end
    return 0
end

return M
