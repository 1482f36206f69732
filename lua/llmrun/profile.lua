--- Profiles: what a step of a model on a machine costs, for simulations (simulate.lua).
---
--- A profile is a table, or JSON, { format = "llmrun-profile-1", name, source, model, machine, step, links, kv,
--- engine, error }. `llmrun profile` measures one (kind "table"); those by name follow from published figures (kind
--- "roofline").
---
---   model   context; for a roofline also parameters, weight_bytes, layers, width, heads, head_dim
---   step    kind = "table": rows, seconds (lists: a step of so many rows without context), and seconds for each
---           step, sequence (in a step), token (drawn), decode_context (token that a decoding row looks back at),
---           prefill_pair (a row of a prompt and a token that it sees); weights that get cold (model/simulated.h):
---           cold_narrow, cold_wide (what a step of up to narrow_rows, of more takes longer if all is cold),
---           cool_seconds, cold_keep
---           kind = "roofline": flops, attention_flops, bandwidth (a second, as reached), and step, sequence, token as
---           above
---   links   roofline: tp = { latency, bandwidth } of one exchange between the GPUs of a replica, pp = the same from
---           stage to stage; exchanges = { layer = how many in a layer, bytes = of a row in all of a layer's }
---   kv      bytes_per_token; capacity_tokens, or for a roofline memory (bytes of one GPU) and reserve (bytes of it
---           that hold neither weights nor KV); swap_bandwidth (bytes a second to host memory)
---   engine  defaults of max_batch_tokens, max_seqs, chunk, prompt_rows, block_size
---   error   how far the fit is off on kinds of steps that it has not seen: mean_abs, p90 (relative); disturbed: share
---           of the steps beside which the machine had other work

local json = require "llmrun.json"
local options = require "llmrun.options"
local words = require "llmrun.words"

local M = {}

M.format = "llmrun-profile-1"
--- Those that come with llmrun.
M.names = { "h100-8b", "h100-70b", "h200-8b", "h200-70b" }

---- Checking

--- A number field of a part of the profile: at least `least`; default may stand for it.
local function number(part, where, name, least, default)
    local v = part[name]
    if v == nil then
        if default ~= nil then return default end
        error(("%s.%s is missing"):format(where, name), 0)
    end
    if type(v) ~= "number" or v ~= v or v < least or v == math.huge then
        error(("%s.%s is %s: a number of at least %g expected"):format(where, name, tostring(v), least), 0)
    end
    return v
end

local function part(p, name)
    if type(p[name]) ~= "table" then error(("%s is missing: a table expected"):format(name), 0) end
    return p[name]
end

local TINY = 1e-30

local cold = { "cold_narrow", "cold_wide", "narrow_rows", "cool_seconds", "cold_keep" }

local function check_table(step)
    for _, name in ipairs { "rows", "seconds" } do
        if type(step[name]) ~= "table" or #step[name] == 0 then error("step." .. name .. ": a list expected", 0) end
    end
    if #step.rows ~= #step.seconds or #step.rows > 64 then
        error(("step.rows has %d points and step.seconds %d: the same number, up to 64, expected"):format(#step.rows,
            #step.seconds), 0)
    end
    for i, n in ipairs(step.rows) do
        if not math.tointeger(n) or n < 1 or i > 1 and n <= step.rows[i - 1] then
            error(("step.rows[%d] is %s: numbers from 1 on, ascending, expected"):format(i, tostring(n)), 0)
        end
        number(step.seconds, "step.seconds", i, TINY)
    end
    for _, name in ipairs { "step", "sequence", "token", "decode_context", "prefill_pair" } do
        number(step, "step", name, 0, 0)
    end
    for _, name in ipairs(cold) do number(step, "step", name, 0, 0) end
    if number(step, "step", "cold_keep", 0, 0) > 1 then error("step.cold_keep is above 1", 0) end
end

local function check_links(p)
    local links = part(p, "links")
    for _, name in ipairs { "tp", "pp" } do
        local link = part(links, name)
        number(link, "links." .. name, "latency", 0)
        number(link, "links." .. name, "bandwidth", TINY)
    end
    local e = part(links, "exchanges")
    number(e, "links.exchanges", "layer", 0)
    number(e, "links.exchanges", "bytes", 0)
end

local function check_roofline(p)
    local step, model, kv = p.step, p.model, p.kv
    for _, name in ipairs { "flops", "bandwidth" } do number(step, "step", name, TINY) end
    number(step, "step", "attention_flops", TINY, step.flops)
    for _, name in ipairs { "step", "sequence", "token" } do number(step, "step", name, 0, 0) end
    for _, name in ipairs { "parameters", "weight_bytes", "layers", "width", "heads", "head_dim" } do
        number(model, "model", name, 1)
    end
    if kv.capacity_tokens == nil then
        number(kv, "kv", "memory", 1)
        number(kv, "kv", "reserve", 0)
    end
    check_links(p)
end

local function check(p)
    if type(p) ~= "table" then
        error("an object expected, got " .. (p == json.null and "null" or type(p)), 0)
    elseif p.format == nil then
        error(("it is no profile: it has no format '%s'"):format(M.format), 0)
    end
    if p.format ~= M.format then
        error(("format is %s: '%s' expected"):format(tostring(p.format), M.format), 0)
    end
    local step, kv = part(p, "step"), part(p, "kv")
    number(part(p, "model"), "model", "context", 1)
    number(kv, "kv", "bytes_per_token", 1)
    number(kv, "kv", "swap_bandwidth", TINY, 1e10)
    if step.kind == "table" then
        check_table(step)
        number(kv, "kv", "capacity_tokens", 1)
    elseif step.kind == "roofline" then
        check_roofline(p)
    else
        error(("step.kind is %s: \"table\" or \"roofline\" expected"):format(tostring(step.kind)), 0)
    end
end

--- The profile that a table, a name or the path of a JSON file stands for; or nil and what is wrong.
---@param what table|string
function M.load(what)
    local p, where = what, "profile"
    if type(what) == "string" then
        where = what
        local known = false
        for _, name in ipairs(M.names) do known = known or name == what end
        if known then
            p = require("llmrun.profiles." .. what:gsub("-", "_"))
        elseif what:find("[/.]") then
            local file <close>, err = io.open(what, "rb")
            local text = file and file:read("a")
            if not text then return nil, err or what .. ": can't be read" end
            local bad
            p, bad = json.decode(text)
            if p == nil then return nil, ("%s: %s"):format(what, bad) end
        else
            local close = options.closest(what, M.names)
            return nil, ("no profile '%s'%s; there are %s, and files"):format(what,
                close and " (did you mean '" .. close .. "'?)" or "", table.concat(M.names, ", "))
        end
    elseif type(what) ~= "table" then
        return nil, "a profile, its name or its file expected, got " .. type(what)
    end
    local ok, err = pcall(check, p)
    if not ok then return nil, ("%s: %s"):format(where, err) end
    return p
end

---- The cost model

-- Rows at which a roofline becomes a table; between them it is linear or nearly so.
local points = { 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 448, 512, 640, 768, 1024,
    1536, 2048, 3072, 4096, 8192, 16384 }

--- Seconds of `rows` rows on a replica of tp x pp GPUs, by the roofline and the links.
local function roofline(p, rows, tp, pp)
    local step, model, links = p.step, p.model, p.links
    local micro = math.max(1, math.min(4 * pp, rows // 128)) -- parts that follow each other through the stages
    if pp == 1 then micro = 1 end
    local n = rows / micro
    local stage = math.max(model.weight_bytes / tp / step.bandwidth, 2 * model.parameters * n / tp / step.flops) / pp
    if tp > 1 then
        local e = links.exchanges
        stage = stage + model.layers / pp *
            (e.layer * links.tp.latency + n * e.bytes * (tp - 1) / tp / links.tp.bandwidth)
    end
    local hop = pp > 1 and links.pp.latency + n * model.width * 2 / links.pp.bandwidth or 0
    return (micro + pp - 1) * (stage + hop) - hop
end

local function check_degrees(p, tp, pp)
    if p.step.kind == "table" then
        local own_tp, own_pp = p.machine and p.machine.tp or 1, p.machine and p.machine.pp or 1
        if (tp or own_tp) ~= own_tp or (pp or own_pp) ~= own_pp then
            error(("tp %d, pp %d: profile '%s' was measured with tp %d and pp %d, and knows nothing of others"):format(
                tp or own_tp, pp or own_pp, tostring(p.name), own_tp, own_pp), 0)
        end
        return own_tp, own_pp
    end
    tp, pp = tp or p.tp or 1, pp or p.pp or 1
    if tp < 1 or pp < 1 then error(("tp %d, pp %d: numbers of 1 or more are needed"):format(tp, pp), 0) end
    if tp > p.model.heads or p.model.heads % tp ~= 0 then
        error(("tp = %d does not divide the model's %d heads"):format(tp, p.model.heads), 0)
    end
    if pp > p.model.layers then error(("pp = %d: the model has %d layers"):format(pp, p.model.layers), 0) end
    return tp, pp
end

--- Tokens of KV that a replica holds.
local function capacity(p, tp, pp)
    local kv = p.kv
    if kv.capacity_tokens then return math.tointeger(kv.capacity_tokens // 1) end
    local room = tp * pp * (kv.memory - kv.reserve) - p.model.weight_bytes
    local tokens = math.tointeger(room // kv.bytes_per_token)
    if tokens < 1 then
        error(("%s of %.0f GB don't hold %.0f GB of weights and %.0f GB of reserve each; more tp or pp is needed")
            :format(words.count(tp * pp, "GPU"), kv.memory / 1e9, p.model.weight_bytes / 1e9, kv.reserve / 1e9), 0)
    end
    return tokens
end

--- What core.simulated_new wants, and the KV tokens of a replica. Raises a text.
---@param p table a profile that M.load has checked
---@param opts { tp?: integer, pp?: integer, block_size: integer }
function M.cost(p, opts)
    local tp, pp = check_degrees(p, opts.tp, opts.pp)
    local step, kv = p.step, p.kv
    local c = {
        ctx = math.tointeger(p.model.context // 1), token_bytes = math.tointeger(kv.bytes_per_token // 1),
        step = step.step or 0, sequence = step.sequence or 0, token = step.token or 0,
        block_move = kv.bytes_per_token * opts.block_size / (kv.swap_bandwidth or 1e10),
    }
    if step.kind == "table" then
        c.rows, c.seconds = {}, step.seconds
        for i, n in ipairs(step.rows) do c.rows[i] = math.tointeger(n) end
        c.decode_context, c.prefill_pair = step.decode_context or 0, step.prefill_pair or 0
        for _, name in ipairs(cold) do c[name] = step[name] or 0 end
        c.narrow_rows = math.tointeger(math.min(c.narrow_rows, 1 << 20) // 1)
    else
        c.rows, c.seconds = points, {}
        for i, n in ipairs(points) do c.seconds[i] = roofline(p, n, tp, pp) end
        c.decode_context = kv.bytes_per_token / step.bandwidth / tp
        local flops = step.attention_flops or step.flops
        c.prefill_pair = 4 * p.model.layers * p.model.heads * p.model.head_dim / flops / tp / pp
    end
    return c, capacity(p, tp, pp)
end

return M
