--- llmrun compare: how far one model's predictions are from another's, as a model from its quantized self.

local core = require "llmrun.core"
local common = require "llmrun.cli.common"
local count = require("llmrun.words").count
local args = require "llmrun.cli.args"
local kv_types = require "llmrun.kv_types"

local M = {
    summary = "measures how far a model's predictions are from another's",
    usage = "A B -f FILE [FLAGS...]",
    args = true,
    help = [[
Both models read the text in windows; behind the first half of each, their probabilities of what comes next are held
side by side, with A as the truth: Kullback-Leibler divergence, whether the most probable token is the same, how the
probability of the text's own token changed, and both perplexities. Both need the same vocabulary.]],
    examples = [[
        llmrun compare model-f16.gguf model-q4.gguf -f text.txt
        llmrun compare qwen-0.5b mine.gguf -f text.txt --tokens 4096 --json
        llmrun compare smollm2 smollm2 -f text.txt --kv-type-b q8_0]],
    flags = {
        { "file", short = "f", arg = "FILE", help = "the text" },
        { "window", short = "w", arg = "N", type = "integer", range = { 4 }, default = 512,
            help = "tokens of a window" },
        { "tokens", arg = "N", type = "integer", range = { 1 }, help = "reads only the first N tokens" },
        { "compute", arg = "MODE", choices = { "fast", "int8", "bf16", "f32" }, help = "arithmetic of both" },
        { "compute-b", arg = "MODE", choices = { "fast", "int8", "bf16", "f32" }, help = "arithmetic of B" },
        { "kv-type", arg = "TYPE", choices = kv_types,
            help = "KV format of both" },
        { "kv-type-b", arg = "TYPE", choices = kv_types,
            help = "KV format of B" },
        { "threads", short = "t", arg = "N", type = "integer", range = { 0, 256 },
            help = "compute threads (default: all processors)" },
        { "json", help = "prints one JSON object" },
    },
}

local PIECE = 32 -- rows of logits held at once

local function quantile(sorted, q) return sorted[math.max(1, math.ceil(q * #sorted))] end

local function load(o, name, which)
    local llm = require "llmrun"
    local path = common.find(name)
    local compute, kv_type = o.compute, o.kv_type
    if which == "b" then compute, kv_type = o.compute_b or compute, o.kv_type_b or kv_type end
    return common.guard(llm.load, path, {
        ctx = o.window, threads = o.threads, compute = compute,
        kv = { type = kv_type, blocks = (o.window // 16 + 2) * 2, prefix_cache = false },
    })
end

-- The next ids of a window, and the logits that foretold them.
local function piece(session, ids, from, n, rows)
    session:append(table.move(ids, from, from + n - 1, 1, {}))
    local scored = session:score { from = from, keep = rows }
    assert(#scored == n)
    return scored
end

local function measure(a, b, list, rows_a, rows_b)
    local bar, begun = common.bar(), core.now()
    local out = { kl = {}, same = 0, change = {}, nll_a = 0, nll_b = 0 }
    for at, ids in ipairs(list) do
        local sa <close> = a:session()
        local sb <close> = b:session()
        local first = #ids // 2 + 1
        sa:append(table.move(ids, 1, first - 1, 1, {}))
        sb:append(table.move(ids, 1, first - 1, 1, {}))
        for from = first, #ids, PIECE do
            local n = math.min(PIECE, #ids - from + 1)
            local one = piece(sa, ids, from, n, rows_a)
            local two = piece(sb, ids, from, n, rows_b)
            for i = 1, n do
                local kl, same, pa, pb = rows_a:diverge(i, rows_b, ids[from + i - 1])
                out.kl[#out.kl + 1] = kl
                out.same = out.same + (same and 1 or 0)
                out.change[#out.change + 1] = pb - pa
                out.nll_a, out.nll_b = out.nll_a - one[i].logprob, out.nll_b - two[i].logprob
            end
            bar((at - 1 + (from + n - first) / (#ids - first + 1)) / #list, ("window %d of %d"):format(at, #list))
        end
    end
    bar()
    out.seconds = core.now() - begun
    return out
end

local function report(a, b, r)
    local n = #r.kl
    local mean, sd = common.statistics(r.kl)
    local change, change_sd = common.statistics(r.change)
    table.sort(r.kl)
    local share = r.same / n
    return {
        a = a.info.name, b = b.info.name, tokens = n, seconds = r.seconds,
        kl_mean = mean, kl_error = sd / n ^ 0.5, kl_median = quantile(r.kl, 0.5), kl_p99 = quantile(r.kl, 0.99),
        kl_max = r.kl[n], same_top = share, same_top_error = (share * (1 - share) / n) ^ 0.5,
        change_mean = change, change_rms = (change ^ 2 + change_sd ^ 2) ^ 0.5,
        perplexity_a = math.exp(r.nll_a / n), perplexity_b = math.exp(r.nll_b / n),
    }
end

function M.run(o)
    if not o.args[2] or o.args[3] then args.fail("two models are needed", 2) end
    if not o.file then args.fail("no text; give a file with -f", 2) end
    local text = common.read_file(o.file)
    local a <close> = load(o, o.args[1], "a")
    local b <close> = load(o, o.args[2], "b")
    if a.info.n_vocab ~= b.info.n_vocab then
        args.fail(("the models have different vocabularies, of %d and %d tokens"):format(a.info.n_vocab,
            b.info.n_vocab))
    end
    local ids = a:tokenize(text, { bos = true })
    local other = b:tokenize(text, { bos = true })
    for i = 1, math.max(#ids, #other) do
        if ids[i] ~= other[i] then args.fail(("the models cut the text apart at token %d"):format(i)) end
    end
    if o.tokens then ids = table.move(ids, 1, math.min(o.tokens, #ids), 1, {}) end
    if #ids < 4 then args.fail("the text is too short") end
    local rows_a = core.rows(PIECE, a.info.n_vocab)
    local rows_b = core.rows(PIECE, b.info.n_vocab)
    local list = common.windows(ids, o.window, a.info.add_bos and a.info.bos or nil)
    local r = report(a, b, common.guard(measure, a, b, list, rows_a, rows_b))
    if o.json then
        print(require("cjson").encode(r))
        return 0
    end
    print(("KL divergence      %.6f +- %.6f  (median %.6f, 99 %% %.6f, most %.4f)"):format(r.kl_mean, r.kl_error,
        r.kl_median, r.kl_p99, r.kl_max))
    print(("same best token    %.2f +- %.2f %%"):format(100 * r.same_top, 100 * r.same_top_error))
    print(("probability of the text's tokens changed by %+.3f %% on average, %.3f %% root mean square"):format(
        100 * r.change_mean, 100 * r.change_rms))
    print(("perplexity         %.4f, then %.4f (%+.3f %%)"):format(r.perplexity_a, r.perplexity_b,
        100 * (r.perplexity_b / r.perplexity_a - 1)))
    print(("%d tokens in %s"):format(r.tokens, count(#list, "window")))
    return 0
end

return M
