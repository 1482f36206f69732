--- llmrun quantize: a model's weights in fewer bits.

local core = require "llmrun.core"
local common = require "llmrun.cli.common"
local count = require("llmrun.words").count
local args = require "llmrun.cli.args"
local quantize = require "llmrun.quantize"

local M = {
    summary = "writes a model's weights in fewer bits",
    usage = "IN OUT --type TYPE [FLAGS...]",
    args = true,
    help = [[
IN is a GGUF file, a folder in Hugging Face's form, or a name, OUT the GGUF file to write; it appears, or takes an old
file's place, only when it is whole.
Types: ]] .. table.concat(quantize.types(), " ") .. [[.
The names with _S, _M, _L are mixes that give some tensors more bits. Rows that don't divide into a type's blocks get a
type of about as many bits. Start from F16, BF16 or F32 weights: what was quantized once loses more each time.]],
    examples = [[
        llmrun quantize model-f16.gguf model-q4.gguf --type Q4_K_M
        llmrun quantize model-f16.gguf model-q4.gguf --type Q4_K_M --imatrix model.imatrix
        llmrun quantize model-f16.gguf small.gguf --type Q3_K_M --override "ffn_down=Q5_K"
        llmrun quantize model-f16.gguf - --type Q4_K_S --dry-run]],
    flags = {
        { "type", arg = "TYPE", help = "the mix or number format" },
        { "imatrix", arg = "FILE", help = "importances of inputs, as llmrun imatrix writes them" },
        { "output-type", arg = "TYPE", help = "type of the output matrix" },
        { "embedding-type", arg = "TYPE", help = "type of the token embeddings" },
        { "override", arg = "NAME=TYPE", type = "list", help = "type of tensors whose names hold NAME, a Lua pattern" },
        { "pure", help = "one type for all matrices" },
        { "requantize", help = "also from weights that are quantized already" },
        { "dry-run", help = "shows what would be written" },
        { "quiet", short = "q", help = "prints nothing but errors" },
        { "threads", short = "t", arg = "N", type = "integer", range = { 1, 256 },
            help = "threads (default: all processors)" },
    },
}

local function type_of(flag, name)
    if not name then return nil end
    local known, _, _, writable = core.dtype_info(name)
    if not known then args.fail(("--%s: '%s' is no type of tensors"):format(flag, name), 2) end
    if not writable then args.fail(("--%s: %s is no type of weights"):format(flag, known), 2) end
    return known
end

local function overrides(list)
    local out = {}
    for i, text in ipairs(list or {}) do
        local pattern, name = text:match("^(.+)=([^=]+)$")
        if not pattern then args.fail(("--override: NAME=TYPE expected, got '%s'"):format(text), 2) end
        if not pcall(string.find, "", pattern) then
            args.fail(("--override: '%s' is no Lua pattern"):format(pattern), 2)
        end
        out[i] = { pattern, type_of("override", name) }
    end
    return out
end

local QUANTIZED = "is quantized already (%s); quantizing again loses more than quantizing once: " ..
    "start from F16, BF16 or F32 weights, or give --requantize"

local function check_source(path, plan)
    for _, t in ipairs(plan) do
        local _, block = core.dtype_info(t.from)
        if block > 1 and t.to ~= t.from then
            args.fail(("%s: tensor '%s' "):format(path, t.name) .. QUANTIZED:format(t.from))
        end
    end
end

local function summary(plan)
    local by, order, values, bytes = {}, {}, 0, 0
    for _, t in ipairs(plan) do
        if not by[t.to] then
            by[t.to] = { 0, 0 }
            order[#order + 1] = t.to
        end
        by[t.to] = { by[t.to][1] + 1, by[t.to][2] + t.out_bytes }
        values, bytes = values + t.rows * (t.shape[1] or 1), bytes + t.out_bytes
    end
    table.sort(order, function(a, b) return by[a][2] > by[b][2] end)
    for i, name in ipairs(order) do
        order[i] = ("%s: %s, %s"):format(name, count(by[name][1], "tensor"), common.size(by[name][2]))
    end
    return bytes, 8 * bytes / math.max(1, values), table.concat(order, "; ")
end

local function shown(plan)
    for _, t in ipairs(plan) do
        print(("%-32s %-18s %-7s %s"):format(t.name, table.concat(t.shape, " x "), t.from,
            t.to == t.from and "" or "-> " .. t.to))
    end
end

function M.run(o)
    local from, out = o.args[1], o.args[2]
    if not out or o.args[3] then args.fail("two files are needed: the model, and the file to write", 2) end
    if not o.type then args.fail("no type; give one with --type, for example Q4_K_M", 2) end
    local mix = quantize.mix(o.type)
    if not mix then
        args.fail(("--type: '%s' is not known; there are %s"):format(o.type, table.concat(quantize.types(), " ")), 2)
    end
    local path = common.find(from)
    if core.stat(out) == "folder" then args.fail(("%s is a folder"):format(out)) end
    local file, err = require("llmrun.loader").file(path)
    if not file then args.fail(err) end
    local opts = {
        output = type_of("output-type", o.output_type), embedding = type_of("embedding-type", o.embedding_type),
        overrides = overrides(o.override), pure = o.pure, threads = o.threads,
    }
    if o.imatrix then
        opts.importance, opts.importance_count = common.guard(quantize.importance, o.imatrix)
        opts.importance_file = o.imatrix
    end
    local plan = quantize.plan(file, mix, opts)
    if not o.requantize then check_source(path, plan) end
    if o.dry_run then shown(plan) end
    local before = file:info().bytes
    if not o.dry_run then
        local bar, begin = common.bar(), core.now()
        opts.progress = function(done, total, t) bar(done / total, t.name) end
        common.guard(quantize.write, file, out, mix, opts)
        bar()
        if o.quiet then return 0 end
        local _, bytes = core.stat(out)
        print(("%s: %s, from %s, in %.1f s"):format(out, common.size(bytes), common.size(before), core.now() - begin))
    end
    local bytes, bits, what = summary(plan)
    print(("%s: weights %s, %.2f bits a value (%s)"):format(mix, common.size(bytes), bits, what))
    return 0
end

return M
