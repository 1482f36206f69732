--- Low-rank adapters (LoRA, arXiv:2106.09685) from files: folders of PEFT, and GGUF files.
--
-- Either comes down to pairs of matrices for weights named as in architecture scripts. A PEFT folder has
-- adapter_config.json and adapter_model.safetensors, whose modules are named as in Hugging Face's models
-- (base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight); a GGUF adapter's are named after the weights
-- (blk.0.attn_q.weight.lora_a). Where the model's file has rows of q and k permuted for RoPE over neighbouring pairs,
-- the rows of PEFT's B are permuted the same way; GGUF adapters are so already.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local json = require "llmrun.json"
local options = require "llmrun.options"

local M = {}

---@class llmrun.Adapter
---@field name string
---@field path string
---@field rank integer the largest
local Adapter = {}
Adapter.__index = Adapter

local function bad(code, fmt, ...) error({ message = fmt:format(...), code = code }, 0) end

-- Architectures whose GGUF files have permuted rows.
local PERMUTED = { llama = true, mistral = true, granite = true, granitemoe = true, smollm3 = true }

--- Rows of a (rows, width) text of floats in the order that turns neighbouring pairs instead of halves.
local function permute(text, rows, width, heads)
    local out, dim, bytes = {}, rows // heads, width * 4
    for h = 0, heads - 1 do
        for i = 0, dim // 2 - 1 do
            for half = 0, 1 do
                local from = (h * dim + half * dim // 2 + i) * bytes
                out[#out + 1] = text:sub(from + 1, from + bytes)
            end
        end
    end
    return table.concat(out)
end

--- What an adapter's list of tensors holds: { weight = { a = tensor, b = tensor } }. split: name -> weight, "a" or "b".
local function pair_up(tensors, split)
    local pairs_of, order = {}, {}
    for _, t in ipairs(tensors) do
        local weight, half = split(t.name)
        local p = pairs_of[weight]
        if not p then
            p = { weight = weight }
            pairs_of[weight], order[#order + 1] = p, p
        end
        if p[half] then bad("format", "tensor '%s' is a second %s for '%s'", t.name, half:upper(), weight) end
        p[half] = t
    end
    for _, p in ipairs(order) do
        if not p.a or not p.b then
            bad("format", "tensor '%s' has no other half: '%s' needs A and B", (p.a or p.b).name, p.weight)
        end
    end
    if #order == 0 then bad("format", "the adapter is empty") end
    return order
end

--- Shapes as rank, width, rows. Lists are (slowest, fastest).
local function check_shapes(p, a, b)
    if #a ~= 2 or #b ~= 2 then bad("format", "tensors '%s' and '%s' are no matrices", p.a.name, p.b.name) end
    if a[1] ~= b[2] then
        bad("format", "'%s' has rank %d, '%s' rank %d", p.a.name, a[1], p.b.name, b[2])
    end
    if a[1] < 1 then bad("format", "'%s' has rank 0", p.a.name) end
    p.rank, p.width, p.rows = a[1], a[2], b[1]
end

local function values(file, t)
    return file:floats(t.name) or bad("unsupported", "tensor '%s': type %s is not one of F32, F16, BF16", t.name,
        t.dtype or t.type)
end

local function part(file, p, scale)
    return { weight = p.weight, rank = p.rank, scale = scale, width = p.width, rows = p.rows, a = values(file, p.a),
             b = values(file, p.b) }
end

local function read_gguf(path, source)
    local file, err, code = core.gguf_open(path)
    if not file then error({ message = err, code = code }, 0) end
    local guard <close> = setmetatable({}, { __close = function() file:close() end }) -- luacheck: ignore 211
    local kind = file:get "adapter.type"
    if kind ~= "lora" then bad("unsupported", "key 'adapter.type': '%s' where 'lora' is needed", tostring(kind)) end
    local arch = file:get "general.architecture"
    if arch ~= source.arch then
        bad("invalid", "the adapter is for architecture '%s', the model is '%s'", tostring(arch), source.arch)
    end
    local alpha = file:get "adapter.lora.alpha"
    if type(alpha) ~= "number" then bad("format", "key 'adapter.lora.alpha' is missing") end
    local parts = {}
    for i, p in ipairs(pair_up(file:tensors(), function(name)
        local weight, half = name:match "^(.+)%.lora_([ab])$"
        if not weight then bad("unsupported", "tensor '%s' is no part of a low-rank adapter", name) end
        return weight, half
    end)) do
        check_shapes(p, { p.a.shape[2], p.a.shape[1] }, { p.b.shape[2], p.b.shape[1] })
        parts[i] = part(file, p, alpha / p.rank)
    end
    return parts
end

local function read_config(path)
    local f <close> = io.open(path, "rb")
    if not f then bad("not_found", "adapter_config.json is missing") end
    local c, err = json.decode(f:read(1 << 20) or "")
    if not json.is_object(c) then bad("format", "adapter_config.json: %s", err or "an object is needed") end
    if c.peft_type ~= "LORA" then
        bad("unsupported", "adapter_config.json: peft_type is '%s', not LORA", tostring(c.peft_type))
    end
    if c.use_dora == true then bad("unsupported", "adapter_config.json: use_dora is not supported") end
    if type(c.bias) == "string" and c.bias ~= "none" then
        bad("unsupported", "adapter_config.json: bias is '%s'; only 'none' is supported", c.bias)
    end
    if type(c.modules_to_save) == "table" and #c.modules_to_save > 0 then
        bad("unsupported", "adapter_config.json: modules_to_save is not supported")
    end
    return c
end

--- A number of the config for a module: that of the pattern it ends in, or the field's.
local function for_module(c, patterns, field, module)
    for key, v in pairs(type(c[patterns]) == "table" and c[patterns] or {}) do
        if module == key or module:sub(-#key - 1) == "." .. key then return v end
    end
    return c[field]
end

local function read_peft(folder, source)
    local c = read_config(folder .. "/adapter_config.json")
    local file = core.folder_new()
    local guard <close> = setmetatable({}, { __close = function() file:close() end }) -- luacheck: ignore 211
    local ok, err, code = file:open(folder .. "/adapter_model.safetensors")
    if not ok then error({ message = err, code = code }, 0) end
    local weights, kind = require "llmrun.hf.weights", M.kind_of(source)
    local modules = {}
    local parts = {}
    for i, p in ipairs(pair_up(file:tensors(), function(name)
        local module, half = name:match "^base_model%.model%.(.+)%.lora_([AB])%.weight$"
        if not module then module, half = name:match "^base_model%.model%.(.+)%.lora_([AB])%.default%.weight$" end
        local weight = module and weights.translate(kind, module)
        if not weight then bad("unsupported", "tensor '%s' belongs to no matrix of the model", name) end
        modules[weight .. ".weight"] = module
        return weight .. ".weight", half:lower()
    end)) do
        check_shapes(p, p.a.shape, p.b.shape)
        local module = modules[p.weight]
        local alpha = for_module(c, "alpha_pattern", "lora_alpha", module)
        if type(alpha) ~= "number" then bad("format", "adapter_config.json: lora_alpha is no number") end
        parts[i] = part(file, p, alpha / (c.use_rslora == true and p.rank ^ 0.5 or p.rank))
        local hp, half = source.hparams, p.weight:match "attn_([qk])%.weight$"
        local heads = half == "q" and hp.heads or half == "k" and hp.kv_heads
        if heads and source.permuted and p.rows % (2 * heads) == 0 then
            parts[i].b = permute(parts[i].b, p.rows, p.rank, heads)
        end
    end
    return parts
end

--- The entry of hf/models.lua that says how Hugging Face names the modules of a model.
function M.kind_of(source)
    local kinds, names = require("llmrun.hf.models").kinds, {}
    if kinds[source.arch] then return kinds[source.arch] end
    for name, k in pairs(kinds) do if k.arch == source.arch then names[#names + 1] = name end end
    table.sort(names)
    return kinds[names[1]] or {}
end

--- What of a loaded model adapters ask for. info: of loader.open.
function M.source(info)
    if not info.hparams then return nil end
    local hp = info.hparams
    return { arch = info.arch, hparams = hp, permuted = PERMUTED[info.arch] and hp.rope.interleaved ~= false }
end

local function read(path, source)
    if core.stat(path) == "folder" then return read_peft(path, source) end
    if path:find "%.safetensors$" then return read_peft(path:match "^(.*)/[^/]*$" or ".", source) end
    return read_gguf(path, source)
end

--- Reads an adapter for a model: see Model:adapter.
---@return llmrun.Adapter
function M.load(call, model, path, opts)
    if type(path) ~= "string" then errors.raise(call, "a folder or a file expected, got " .. type(path)) end
    options.check(call, opts, { scale = "number", name = "string" }, 3)
    if not model.source then errors.raise(call, "this kind of model takes no adapters", "unsupported") end
    local scale = opts and opts.scale or 1
    local ok, parts = pcall(read, path, model.source)
    if not ok then
        local e = parts
        local text = type(e) == "table" and e.message or tostring(e)
        if text:sub(1, #path + 1) ~= path .. ":" then text = path .. ": " .. text end
        errors.raise(call, text, type(e) == "table" and e.code or nil)
    end
    local rank = 0
    for _, p in ipairs(parts) do
        p.scale = p.scale * scale
        rank = math.max(rank, p.rank)
    end
    local made, err, code = core.adapter_new(model.engine, parts)
    if not made then errors.raise(call, ("%s: %s"):format(path, err), code) end
    local info = made:info()
    local a = setmetatable({
        core = made, path = path, scale = scale, name = opts and opts.name or path:match "([^/]+)/*$", rank = rank,
        parts = #parts, bytes = info.bytes, key = info.fingerprint,
    }, Adapter)
    model.adapters = model.adapters or setmetatable({}, { __mode = "v" }) -- for recordings
    table.insert(model.adapters, a)
    if model.runner.recorder then model.runner.recorder:adapter(a) end
    return a
end

--- Lets go of the adapter: no new sessions with it; those that have it keep it until they are closed.
function Adapter:close()
    self.closed = true
    self.core:close()
end
Adapter.__close = Adapter.close
function Adapter:__tostring() return ("llmrun adapter %s (rank %d)"):format(self.name, self.rank) end

--- The adapter of a session's options, checked.
function M.check(call, adapter)
    if adapter == nil then return nil end
    if getmetatable(adapter) ~= Adapter then
        errors.raise(call, "adapter: what model:adapter returned expected, got " .. type(adapter))
    end
    if adapter.closed then errors.raise(call, ("the adapter %s is closed"):format(adapter.name), "state") end
    return adapter
end

--- A model seen through an adapter: the same model, whose sessions have the adapter unless they name another.
function M.view(call, model, adapter)
    M.check(call, adapter)
    local view = { adapter_in_use = adapter }
    for _, name in ipairs { "session", "restore" } do
        view[name] = function(self, ...)
            local args = table.pack(...)
            local at = name == "session" and 1 or 2
            local o = {}
            for k, v in pairs(args[at] or {}) do o[k] = v end
            o.adapter = o.adapter or self.adapter_in_use
            args[at] = o
            return model[name](self, table.unpack(args, 1, at))
        end
    end
    return setmetatable(view, { __index = model })
end

return M
