--- llmrun inspect: what is in a model file, and what it takes to run it.

local core = require "llmrun.core"
local common = require "llmrun.cli.common"
local count = require("llmrun.words").count
local args = require "llmrun.cli.args"
local kv_types = require "llmrun.kv_types"
local plan = require "llmrun.plan"

local M = {
    summary = "shows a model file's metadata, tensors and the memory it needs",
    usage = "MODEL [FLAGS...]",
    args = true,
    help = "Reads the file's tables only; nothing is loaded.",
    examples = [[
        llmrun inspect smollm2
        llmrun inspect model.gguf --ctx 4096 --batch 8 --kv-type q8_0
        llmrun inspect qwen-1.5b --ctx 4096 --draft qwen-0.5b
        llmrun inspect model.gguf --tensors
        llmrun inspect model.gguf --kernels --compute int8
        llmrun inspect model.gguf --key tokenizer.chat_template
        llmrun inspect model.gguf --json]],
    flags = {
        { "model", short = "m", arg = "MODEL", help = "the same as the argument" },
        { "ctx", short = "c", arg = "N", type = "integer", range = { 1, 1 << 28 },
            help = "tokens of a sequence (default: what the model allows)" },
        { "batch", short = "b", arg = "N", type = "integer", range = { 1 }, default = 1, help = "sequences at once" },
        { "kv-type", arg = "TYPE", default = "f16", choices = kv_types,
          help = "KV format" },
        { "kv-value-type", arg = "TYPE", choices = kv_types,
          help = "format of its values (default: as --kv-type)" },
        { "draft", arg = "MODEL", help = "a model that drafts for it: its memory too" },
        { "block-size", arg = "N", type = "integer", range = { 1, 256 }, default = 16, help = "tokens of a KV block" },
        { "tensors", help = "lists every tensor" },
        { "kernels", help = "how this machine does the products of each type and shape of weight" },
        { "compute", arg = "KIND", default = "fast", choices = { "fast", "int8", "bf16", "f32" },
          help = "--kernels: arithmetic" },
        { "isa", arg = "NAME", help = "--kernels: of one instruction set" },
        { "key", arg = "NAME", help = "prints this metadata value in full, and nothing else" },
        { "json", help = "prints everything as one JSON object" },
    },
}

local function show_value(file, k)
    local v = file:get(k.key)
    if type(v) == "table" then
        local parts = {}
        for i = 1, math.min(#v, 6) do
            parts[i] = type(v[i]) == "string" and ("%q"):format(v[i]):sub(1, 20) or tostring(v[i])
        end
        return ("[%s%s] (%d)"):format(table.concat(parts, ", "), #v > 6 and ", ..." or "", #v)
    elseif type(v) == "string" then
        local line = v:gsub("\n", "\\n")
        return #line > 70 and line:sub(1, 67) .. "..." or line
    end
    return tostring(v)
end

local function totals(tensors)
    local by_type, order, bytes, params = {}, {}, 0, 0
    for _, t in ipairs(tensors) do
        local n = 1
        for _, d in ipairs(t.shape) do n = n * d end
        local e = by_type[t.type]
        if not e then
            e = { n = 0, bytes = 0, type = t.type }
            by_type[t.type], order[#order + 1] = e, e
        end
        e.n, e.bytes = e.n + 1, e.bytes + t.bytes
        bytes, params = bytes + t.bytes, params + n
    end
    table.sort(order, function(a, b) return a.bytes > b.bytes end)
    return order, bytes, params
end

--- Bytes that the products of one token read: all weights but the experts that it does not use, and one row of an
--- embedding that is no output head.
local function token_bytes(r)
    local share, total, tied = r.hp.experts_used / r.hp.experts, 0, true
    for _, t in ipairs(r.tensors) do tied = tied and t.name ~= "output.weight" end
    for _, t in ipairs(r.tensors) do
        if #t.shape == 3 then
            total = total + t.bytes * share
        elseif tied or t.name ~= "token_embd.weight" then
            total = total + t.bytes
        end
    end
    return math.ceil(total)
end

local function open(path)
    local file, err = require("llmrun.loader").file(path)
    if not file then args.fail(err) end
    return file
end

local function gather(path, o)
    local file = open(path)
    local r = { path = path, file = file, info = file:info(), tensors = file:tensors(), keys = file:keys() }
    r.types, r.weight_bytes, r.parameters = totals(r.tensors)
    local tokens = file:get("tokenizer.ggml.tokens")
    r.n_tokens = tokens and #tokens or r.info.kind and file:get(file:get("general.architecture") .. ".vocab_size") or 0
    r.layers, r.hp = plan.layers(file, r.n_tokens)
    if not r.layers then
        r.problem = file.explain and file:explain(r.hp) or r.hp
        return r
    end
    r.ctx = o.ctx or r.hp.ctx
    if r.ctx < 1 then args.fail("--ctx must be at least 1", 2) end -- the file may say none
    if r.hp.experts > 0 then r.token_bytes = token_bytes(r) end
    r.kv_bytes = plan.kv_bytes(r.layers, r.ctx, o.batch, o.kv_type, o.block_size, o.kv_value_type)
    return r
end

--- What a draft model takes beside it: its KV has the type of the model's keys.
local function gather_draft(r, o)
    local path = common.find(o.draft)
    local file = open(path)
    local tokens = file:get("tokenizer.ggml.tokens")
    local layers, why = plan.layers(file, tokens and #tokens or r.n_tokens)
    if not layers then args.fail(("--draft %s: %s"):format(path, tostring(why))) end
    local _, bytes = totals(file:tensors())
    r.draft = { path = path, weight_bytes = bytes,
        kv_bytes = plan.kv_bytes(layers, r.ctx, o.batch, o.kv_type, o.block_size) }
end

local function print_memory(r, o)
    if r.problem then
        print("\nmemory     can't be told: " .. r.problem)
        return
    end
    local windowed, window = 0, 0
    for _, l in ipairs(r.layers) do
        if l.window > 0 then windowed, window = windowed + 1, l.window end
    end
    print(("\nmodel      %d layers, width %d, %d heads of %d, %d of keys and values, context %d%s"):format(r.hp.layers,
        r.hp.width, r.hp.heads, r.hp.head_dim, r.hp.kv_heads, r.hp.ctx,
        windowed > 0 and (", %d layers with a window of %d"):format(windowed, window) or ""))
    print("\nmemory")
    print(("  weights  %10s   mapped, and repacked at most once"):format(common.size(r.weight_bytes)))
    if r.token_bytes then
        print(("           %10s   of them read for a token: %d of %d experts"):format(common.size(r.token_bytes),
            r.hp.experts_used, r.hp.experts))
    end
    local types = o.kv_value_type and ("%s and %s"):format(o.kv_type, o.kv_value_type) or o.kv_type
    print(("  KV       %10s   %s of %d tokens, %s, blocks of %d"):format(common.size(r.kv_bytes),
        count(o.batch, "sequence"), r.ctx, types, o.block_size))
    local all = r.weight_bytes + r.kv_bytes
    if r.draft then
        print(("  draft    %10s   weights of the model that drafts"):format(common.size(r.draft.weight_bytes)))
        print(("           %10s   its KV"):format(common.size(r.draft.kv_bytes)))
        all = all + r.draft.weight_bytes + r.draft.kv_bytes
    end
    print(("  together %10s"):format(common.size(all)))
end

local MOST_ROWS = 512 -- more are multiplied as these

--- How products of weights of a type are done: { from = 1, to = 8, way = text } ..., the last one without an end.
local function ways_of(type, k, o)
    local list = {}
    for rows = 1, MOST_ROWS do
        local way, last = core.cpu_product(type, k, rows, o.compute, o.isa), list[#list]
        if not last or last.way ~= way then
            if last then last.to = rows - 1 end
            list[#list + 1] = { from = rows, way = way }
        end
    end
    return list
end

--- The products of a step, largest first: { type, n, k, count, bytes, first = name, ways = as ways_of } ...
local function products(r, o)
    local list, by_key, tied = {}, {}, true
    for _, t in ipairs(r.tensors) do tied = tied and t.name ~= "output.weight" end
    for _, t in ipairs(r.tensors) do
        if (#t.shape == 2 or #t.shape == 3) and (tied or t.name ~= "token_embd.weight") then
            local key = ("%s %d %d"):format(t.type, t.shape[1], t.shape[2])
            local e = by_key[key]
            if not e then
                e = { type = t.type, k = t.shape[1], n = t.shape[2], count = 0, bytes = 0, first = t.name,
                    ways = ways_of(t.type, t.shape[1], o) }
                by_key[key], list[#list + 1] = e, e
            end
            e.count, e.bytes = e.count + (t.shape[3] or 1), e.bytes + t.bytes
        end
    end
    table.sort(list, function(a, b) return a.bytes > b.bytes end)
    return list
end

local function print_kernels(r, o)
    local isa = core.cpu_isa(o.isa)
    if not isa then args.fail(("instruction set '%s' is not one of this machine's"):format(o.isa), 2) end
    print(("\nkernels of %s, compute = %q"):format(isa, o.compute))
    for _, e in ipairs(products(r, o)) do
        print(("  %-6s %6d x %-6d %4d  %10s   %s%s"):format(e.type, e.n, e.k, e.count, common.size(e.bytes), e.first,
            e.count > 1 and " ..." or ""))
        for _, w in ipairs(e.ways) do
            local rows = not w.to and (w.from == 1 and "any rows" or w.from .. " rows and more")
                or w.to > w.from and ("%d to %d rows"):format(w.from, w.to)
                or w.from .. (w.from == 1 and " row" or " rows")
            print(("      %-18s %s"):format(rows, w.way))
        end
    end
end

local function print_text(r, o)
    print(("%s\n  %s, %s%s, %d keys, %d tensors, %.1f million parameters"):format(r.path,
        r.info.version and ("GGUF version %d"):format(r.info.version) or "Hugging Face folder",
        common.size(r.info.bytes),
        #r.info.shards > 1 and (" in %d files"):format(#r.info.shards) or "", #r.keys,
        #r.tensors, r.parameters / 1e6))
    print("\nmetadata")
    for _, k in ipairs(r.keys) do print(("  %-42s %-5s %s"):format(k.key, k.type, show_value(r.file, k))) end
    print("\ntensors")
    for _, e in ipairs(r.types) do print(("  %-6s %5d  %10s"):format(e.type, e.n, common.size(e.bytes))) end
    for _, f in ipairs(r.info.formats or {}) do
        if f.from ~= f.to then
            print(("  %d from %s, as %s%s"):format(f.count, f.from, f.to, f.exact and "" or ", rounded"))
        end
    end
    if o.tensors then
        for _, t in ipairs(r.tensors) do
            print(("  %-42s %-6s %-20s %s"):format(t.name, t.type, table.concat(t.shape, " x "), common.size(t.bytes)))
        end
    end
    if o.kernels then print_kernels(r, o) end
    print_memory(r, o)
end

local function print_json(r, o)
    local json = require "cjson"
    local out = { path = r.path, version = r.info.version, bytes = r.info.bytes, parameters = r.parameters,
        formats = r.info.formats, weight_bytes = r.weight_bytes, token_bytes = r.token_bytes, tensors = r.tensors,
        metadata = {}, kv_bytes = r.kv_bytes, ctx = r.ctx, batch = o.batch, kv_type = o.kv_type,
        kv_value_type = o.kv_value_type, draft = r.draft, problem = r.problem }
    for _, k in ipairs(r.keys) do
        local v = r.file:get(k.key)
        if type(v) == "table" and #v > 64 then v = { count = #v, type = k.type } end
        out.metadata[k.key] = v
    end
    if o.kernels then
        out.kernels = { isa = core.cpu_isa(o.isa), compute = o.compute, products = products(r, o) }
    end
    print(json.encode(out))
end

function M.run(o, words)
    local name = words[1] or o.model
    if not name then args.fail("which model? llmrun inspect MODEL", 2) end
    if words[2] then args.fail(("unexpected argument '%s'"):format(words[2]), 2) end
    local path = common.find(name)
    if o.key then
        local file = open(path)
        local v = file:get(o.key)
        if v == nil then args.fail(("%s has no key '%s'"):format(path, o.key)) end
        print(type(v) == "table" and table.concat(v, "\n") or tostring(v))
        return 0
    end
    local r = gather(path, o)
    if o.draft and r.kv_bytes then gather_draft(r, o) end
    if o.json then print_json(r, o) else print_text(r, o) end
    return 0
end

return M
