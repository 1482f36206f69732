--- What binds a figure of llmrun bench, and how far the figure is from it: bytes read a second beside the bandwidth of
--- memory, operations a second beside the peak of the instruction set, both measured in the same run.

local core = require "llmrun.core"
local plan = require "llmrun.plan"

local M = {}

local SMALL = 16e6 -- weights below this lie in caches, and the machine's memory says nothing about them
local BUFFER, SECONDS = 512 << 20, 0.05 -- the buffer is at least twice the last-level cache, up to a GiB

local function count(shape)
    local n = 1
    for _, d in ipairs(shape) do n = n * d end
    return n
end

--- What a model asks of the machine: { bytes = of weights read by a step, layers, output = multiply-adds of a row,
--- kv = layers of keys and values, hp }; nil if that can't be told from its file, or if it is small.
function M.work(path)
    local file = require("llmrun.loader").file(path)
    if not file then return nil end
    local w = { bytes = 0, layers = 0, output = 0 }
    local embed
    for _, t in ipairs(file:tensors()) do
        if t.name == "token_embd.weight" then
            embed = t
        else
            w.bytes = w.bytes + t.bytes
            if t.name == "output.weight" then
                w.output = count(t.shape)
            elseif #t.shape > 1 then
                w.layers = w.layers + count(t.shape)
            end
        end
    end
    if not embed or w.bytes + embed.bytes < SMALL then return nil end
    if w.output == 0 then -- tied
        w.output, w.bytes = count(embed.shape), w.bytes + embed.bytes
    end
    w.kv, w.hp = plan.layers(file, embed.shape[2])
    return w.kv and w
end

--- Bytes that a decoding step of `batch` sequences reads, their context `ctx` tokens.
function M.step_bytes(w, batch, ctx, kv_type, value_type)
    return w.bytes + plan.kv_bytes(w.kv, ctx, batch, kv_type:lower(), 1, value_type:lower())
end

--- Operations of a prompt of n tokens: a multiply and its add count as two; logits of the last row only.
function M.prompt_operations(w, n)
    local pairs_seen = 0
    for _, l in ipairs(w.kv) do
        local window = l.window > 0 and math.min(l.window, n) or n
        pairs_seen = pairs_seen + window * (window + 1) / 2 + (n - window) * window
    end
    return 2 * (w.layers * n + w.output + 2 * w.hp.heads * w.hp.head_dim * pairs_seen)
end

--- Measures { read = GB/s, peak = 10^9 operations/s of the arithmetic in use, peak_name = } into `best`, which keeps
--- the better of two measurements.
function M.measure(o, best)
    local threads = (o.threads or 0) > 0 and o.threads or core.cpus()
    local isa = core.cpu_isa(o.isa)
    if not isa or o.compute == "f32" then return nil end
    local buffer = math.max(BUFFER, math.min(2 * core.cpu_cache(), 1 << 30))
    local l = core.cpu_limits(threads, buffer, SECONDS, isa)
    best = best or { peak = 0, read = 0 }
    best.read = math.max(best.read, l.read or 0)
    local kind = o.compute == "bf16" and "^bf16" or "^int8"
    for name, value in pairs(l) do
        if name:find(kind) and value > best.peak then best.peak, best.peak_name = value, name end
    end
    return best
end

local function share(x, of) return of > 0 and math.floor(x / of * 1e4 + 0.5) / 1e4 or nil end

--- Adds to a record what its decoding read. tps: of all sequences.
function M.add_decode(record, best, w, tps, ctx, kv_type, value_type)
    local gbs = tps / record.batch * M.step_bytes(w, record.batch, ctx, kv_type, value_type) * 1e-9
    record.decode_gbps, record.read_gbps = math.floor(gbs * 100 + 0.5) / 100, math.floor(best.read * 100 + 0.5) / 100
    record.decode_share = share(gbs, best.read)
    local line = ("%.1f GB/s, %.0f %% of %.1f"):format(gbs, 100 * gbs / best.read, best.read)
    local cache = core.cpu_cache()
    if w.bytes > cache then return line end
    record.cache = cache
    return ("%s (memory need not be the limit: the %.0f MB of weights fit the last-level cache of %.0f MB)"):format(
        line, w.bytes / 1e6, cache / 1e6)
end

--- Adds to a record what its prompt took.
function M.add_prefill(record, best, w, tps)
    local gops = tps / record.prefill * M.prompt_operations(w, record.prefill) * 1e-9
    record.prefill_gops, record.peak_gops = math.floor(gops + 0.5), math.floor(best.peak + 0.5)
    record.peak = best.peak_name
    record.prefill_share = share(gops, best.peak)
    return ("%.0f GOPS, %.1f %% of %s's %.0f"):format(gops, 100 * gops / best.peak, best.peak_name or "?", best.peak)
end

return M
