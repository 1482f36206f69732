--- llmrun perplexity: how well a model foretells a text.

local common = require "llmrun.cli.common"
local count = require("llmrun.words").count
local args = require "llmrun.cli.args"

local M = {
    summary = "measures how well a model foretells a text",
    usage = "[-m MODEL] -f FILE [FLAGS...]",
    model = true,
    help = [[
The text's tokens are cut into windows; the second half of each is scored, given what stands before it in the window,
which begins with BOS where the model wants one. --whole scores all but the first token of each window.]],
    examples = [[
        llmrun perplexity -m smollm2 -f text.txt
        llmrun perplexity -m smollm2 -f text.txt --tokens 4000 --window 4000 --whole
        llmrun perplexity -m gemma3 -f text.txt --compute f32 --json]],
    flags = {
        { "file", short = "f", arg = "FILE", help = "the text" },
        { "window", short = "w", arg = "N", type = "integer", range = { 4 }, default = 512,
            help = "tokens of a window" },
        { "whole", help = "scores the whole window instead of its second half" },
        { "tokens", arg = "N", type = "integer", range = { 1 }, help = "reads only the first N tokens" },
        { "parallel", arg = "N", type = "integer", range = { 1, 4096 }, default = 4,
            help = "windows computed side by side" },
        { "json", help = "prints one JSON object" },
    },
}

function M.run(o)
    local llm = require "llmrun"
    if not o.file then args.fail("no text; give a file with -f", 2) end
    local text = common.read_file(o.file)
    local parallel = o.whole and 1 or math.max(1, o.parallel)
    local block = o.block_size or 16
    local model <close> = common.load(o, {
        ctx = math.max(o.ctx or 0, o.window),
        kv = { type = o.kv_type, value_type = o.kv_value_type, block_size = o.block_size,
            blocks = (o.window // block + 2) * (parallel + 1),
            prefix_cache = false },
    })
    local ids = model:tokenize(text, { bos = true })
    if o.tokens then ids = table.move(ids, 1, math.min(o.tokens, #ids), 1, {}) end
    if #ids < 4 then args.fail("the text is too short") end
    local list = common.windows(ids, o.window, model.info.add_bos and model.info.bos or nil)
    local progress, done = common.progress(), 0
    local sums = llm.map(list, function(w)
        local s <close> = model:session()
        s:append(w)
        local scored, sum = s:score { from = o.whole and 2 or #w // 2 + 2 }
        done = done + 1
        progress(("window %d of %d"):format(done, #list))
        return { n = #scored, sum = sum }
    end, { concurrency = parallel })
    progress()
    local n, total, means = 0, 0, {}
    for i, s in ipairs(sums) do
        n, total = n + s.n, total + s.sum
        means[i] = -s.sum / s.n
    end
    local nll = -total / n
    local _, sd = common.statistics(means)
    local record = {
        model = model.info.name, windows = #list, window = math.min(o.window, #ids), tokens = #ids, scored = n,
        mean_nll = nll, perplexity = math.exp(nll), error = #list > 1 and math.exp(nll) * sd / (#list) ^ 0.5 or nil,
        compute = o.compute or "fast", backend = model.info.backend,
    }
    if o.json then
        print(require("cjson").encode(record))
    else
        print(("perplexity %.4f%s  (mean negative log-likelihood %.6f, %d tokens scored in %s of %d)"):format(
            record.perplexity, record.error and (" +- %.4f"):format(record.error) or "", nll, n,
            count(#list, "window"), record.window))
    end
    return 0
end

return M
