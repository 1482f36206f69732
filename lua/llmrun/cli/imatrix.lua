--- llmrun imatrix: how much each input of a model's matrices moves, for llmrun quantize.

local core = require "llmrun.core"
local common = require "llmrun.cli.common"
local count = require("llmrun.words").count
local args = require "llmrun.cli.args"

local M = {
    summary = "measures which inputs of a model's matrices matter, for quantize",
    usage = "[-m MODEL] -f FILE -o OUT [FLAGS...]",
    model = true,
    help = [[
Runs the model over a text and writes the mean square of each input of each matrix. llmrun quantize --imatrix OUT then
keeps errors small where inputs are large. Names and layout of the file are those of llama.cpp's GGUF form.
The text should be like what the model will be used for; some ten thousand tokens are enough.]],
    examples = [[
        llmrun imatrix -m model-f16.gguf -f calibration.txt -o model.imatrix
        llmrun imatrix -m qwen-0.5b -f README.md -o qwen.imatrix --tokens 20000 --window 1024]],
    flags = {
        { "file", short = "f", arg = "FILE", help = "the text" },
        { "out", short = "o", arg = "OUT", help = "the file to write" },
        { "window", short = "w", arg = "N", type = "integer", range = { 4 }, default = 512,
            help = "tokens of a window" },
        { "tokens", arg = "N", type = "integer", range = { 1 }, help = "reads only the first N tokens" },
        { "quiet", short = "q", help = "prints nothing but errors" },
    },
}

local function check(ok, err)
    if not ok then args.fail(err) end
    return ok
end

local function write(w, observed, o, windows)
    check(w:put("general.type", "str", "imatrix"))
    check(w:put("imatrix.datasets", "[str]", { (o.file:match "[^/]+$") }))
    check(w:put("imatrix.chunk_count", "u32", windows))
    check(w:put("imatrix.chunk_size", "u32", o.window))
    local seen, list = {}, {}
    for _, t in ipairs(observed) do
        if t.rows > 0 and not seen[t.name] then
            seen[t.name] = true
            list[#list + 1] = t
            check(w:tensor(t.name .. ".in_sum2", "F32", { t.width, 1 }))
            check(w:tensor(t.name .. ".counts", "F32", { 1, 1 }))
        end
    end
    for _, t in ipairs(list) do
        check(w:data(t.sums))
        check(w:data(string.pack("<f", t.rows)))
    end
    check(w:finish())
    return #list, list[1] and list[1].rows or 0
end

function M.run(o)
    if not o.file then args.fail("no text; give a file with -f", 2) end
    if not o.out then args.fail("no file to write; give one with -o", 2) end
    local text = common.read_file(o.file)
    local w <close> = check(core.gguf_writer(o.out, 1)) -- that it can't be written is told before all the work
    local model <close> = common.load(o, {
        ctx = o.window,
        kv = { type = o.kv_type, value_type = o.kv_value_type, blocks = (o.window // (o.block_size or 16) + 2) * 2,
            block_size = o.block_size, prefix_cache = false },
    })
    local ids = model:tokenize(text, { bos = true })
    if o.tokens then ids = table.move(ids, 1, math.min(o.tokens, #ids), 1, {}) end
    if #ids < 4 then args.fail("the text is too short") end
    check(model.engine:observe(true))
    local list = common.windows(ids, o.window, model.info.add_bos and model.info.bos or nil)
    local bar = common.bar()
    for i, tokens in ipairs(list) do
        local s <close> = model:session()
        s:append(tokens)
        s:score { from = 2 }
        bar(i / #list, ("window %d of %d"):format(i, #list))
    end
    bar()
    local n, rows = write(w, model.engine:observed(), o, #list)
    if not o.quiet then
        print(("%s: %d matrices over %d tokens in %s"):format(o.out, n, rows, count(#list, "window")))
    end
    return 0
end

return M
