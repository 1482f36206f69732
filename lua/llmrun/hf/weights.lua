--- Which tensors of a folder make which weight, and in what form: module names become the names that the architecture
--- scripts use, and the tensors that a quantizer keeps for a module become the parts of one weight.

local models = require "llmrun.hf.models"
local words = require "llmrun.words"

local M = {}

local function bad(code, fmt, ...) error({ message = words.quoting(fmt, ...), code = code }, 0) end

-- What the last part of a tensor's name says it is of its module.
local ROLES = {}
for _, r in ipairs { "weight", "bias", "qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv",
    "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx", "SCB", "weight_format", "input_scale",
    "input_zero_point", "k_scale", "v_scale", "output_scale", "sinks",
    "gate_up_proj", "gate_up_proj_bias", "gate_up_proj_blocks", "gate_up_proj_scales", -- gpt-oss
    "down_proj", "down_proj_bias", "down_proj_blocks", "down_proj_scales" } do ROLES[r] = true end

--- Names of the scripts of a module: "blk.3.attn_q"; or nil. expert: its number, where the module is one of many.
local function translate(kind, module)
    module = module:gsub("^language_model%.model%.", "model."):gsub("^model%.language_model%.", "model.")
        :gsub("^language_model%.lm_head$", "lm_head")
    local own = kind.top or {}
    local top = own[module] or own[module:match("^transformer%.(.+)$") or ""] or models.top[module]
    if top then return top end
    local number, rest = module:match("^model%.layers%.(%d+)%.(.+)$")
    if not number then number, rest = module:match("^transformer%.h%.(%d+)%.(.+)$") end -- GPT-2
    if not number then number, rest = module:match("^h%.(%d+)%.(.+)$") end
    if not number or #number > 6 then return nil end
    local name = kind.layer and kind.layer[rest]
    if name == nil then name = models.layer[rest] end
    if name then return ("blk.%d.%s"):format(math.tointeger(number), name) end
    for path, of in pairs(kind.experts or {}) do
        if rest:sub(1, #path + 1) == path .. "." then
            local expert, inner = rest:sub(#path + 2):match("^(%d+)%.(.+)$")
            if expert and #expert <= 6 and of[inner] then
                return ("blk.%d.%s"):format(math.tointeger(number), of[inner]), math.tointeger(expert)
            end
        end
    end
    return nil
end

M.translate = translate

local function ignored(kind, name)
    for _, list in ipairs { models.ignore, kind.ignore or {} } do
        for _, pattern in ipairs(list) do
            if name:find(pattern) then return true end
        end
    end
    return false
end

--- Modules of the tensors: list of { name, expert, module, parts = { role = tensor } } in the files' order, and the
--- tensors that belong to none.
local function collect(kind, tensors, tied)
    local list, by_module, rest, left_out = {}, {}, {}, 0
    for _, t in ipairs(tensors) do
        local module, role = t.name:match("^(.+)%.([%w_]+)$")
        if not module or not ROLES[role] then module, role = t.name, "weight" end
        local name, expert = translate(kind, module)
        local make = not name and kind.stacked and kind.stacked[module:match("^model%.layers%.%d+%.(.+)$") or ""]
        if make then name = "blk." .. module:match("%d+") end
        if ignored(kind, t.name) or (tied and name == "output") then
            left_out = left_out + 1
        elseif not name then
            rest[#rest + 1] = t
        else
            local m = by_module[module]
            if not m then
                m = { name = name, expert = expert, make = make, module = module, parts = {} }
                by_module[module], list[#list + 1] = m, m
            end
            m.parts[role] = t
        end
    end
    return list, rest, left_out
end

-- ---- formats ----

--- The settings that a compressed-tensors configuration has for linear modules.
local function compressed(q)
    local first
    for _, group in pairs(type(q.config_groups) == "table" and q.config_groups or {}) do
        if first and type(group.weights) == "table" and group.weights.num_bits ~= first.num_bits then
            bad("unsupported", "config.json: quantization_config has groups of %s and of %s bits",
                tostring(first.num_bits), tostring(group.weights.num_bits))
        end
        first = first or (type(group) == "table" and type(group.weights) == "table" and group.weights)
    end
    return first or {}
end

local function bits_of(q, what)
    local bits = q.bits or q.w_bit or q.num_bits
    if math.type(bits) ~= "integer" then
        bad("format", "config.json: quantization_config does not say how many bits %s has", what)
    end
    return bits
end

local function groups_text(q)
    local n = q.group_size or q.q_group_size
    return type(n) == "number" and n > 0 and ("groups of %d"):format(n) or "whole rows"
end

--- The part of a weight that a module's tensors make, and what it is called.
local function part_of(m, q)
    local p = m.parts
    local function needs(role)
        if not p[role] then bad("format", "module '%s' has no tensor '%s.%s'", m.module, m.module, role) end
        return p[role].name
    end
    if p.qweight then
        local method = q.quant_method
        if method ~= "gptq" and method ~= "awq" then
            bad("unsupported", "tensor '%s': config.json's quantization_config.quant_method is %s; gptq and awq have "
                .. "such tensors", p.qweight.name, tostring(method))
        end
        local text = groups_text(q)
        if method == "awq" then
            if (q.version or "gemm"):lower() ~= "gemm" then
                bad("unsupported", "config.json: quantization_config.version is '%s'; gemm is supported", q.version)
            end
            if bits_of(q, "awq") ~= 4 then bad("unsupported", "config.json: awq of %s bits", tostring(q.bits)) end
            return { kind = "awq", w = p.qweight.name, scale = needs "scales", zero = needs "qzeros" },
                "AWQ, 4 bits, " .. text
        end
        local bits = bits_of(q, "gptq")
        return { kind = "gptq", w = p.qweight.name, scale = needs "scales", zero = p.qzeros and p.qzeros.name,
                 order = p.g_idx and p.g_idx.name, bits = bits,
                 zero_offset = q.checkpoint_format == "gptq_v2" and 0 or 1 },
            ("GPTQ, %d bits, %s"):format(bits, text)
    end
    if p.weight_packed then
        local bits = bits_of(compressed(q), "weight_packed")
        return { kind = "packed", w = p.weight_packed.name, scale = needs "weight_scale", bits = bits,
                 zero = p.weight_zero_point and p.weight_zero_point.name,
                 order = p.weight_g_idx and p.weight_g_idx.name },
            ("packed, %d bits, %s"):format(bits, groups_text(compressed(q)))
    end
    local w = p.weight
    if not w then return nil end
    if w.dtype == "F8_E4M3" then
        local role = p.weight_scale_inv and "weight_scale_inv" or "weight_scale"
        local block = q.weight_block_size or compressed(q).block_structure
        if type(block) ~= "table" then block = { 0, 0 } end
        local scale = needs(role)
        return { kind = "fp8", w = w.name, scale = scale, block_out = math.tointeger(block[1]) or 0,
                 block_in = math.tointeger(block[2]) or 0 }, "FP8 E4M3"
    elseif w.dtype == "I8" then
        if p.weight_zero_point then
            bad("unsupported", "tensor '%s': 8 bits with zero points are not supported", p.weight_zero_point.name)
        end
        local int8 = p.SCB ~= nil
        return { kind = "int8", w = w.name, scale = needs(int8 and "SCB" or "weight_scale"),
                 mul = int8 and 1 / 127 or 1 }, int8 and "LLM.int8" or "INT8"
    elseif w.dtype == "F32" or w.dtype == "F16" or w.dtype == "BF16" then
        return { kind = "plain", w = w.name }, w.dtype
    end
    bad("unsupported", "tensor '%s': type %s is not supported here%s", w.name, w.dtype,
        q.quant_method and (" (quantization_config.quant_method is %s)"):format(tostring(q.quant_method)) or "")
end

-- ---- weights ----

--- Declares a weight to the core; adds it to r.
local function add(r, name, parts, stack, from)
    local type_name, exact, shape, bytes = r.core:add(name, parts, stack)
    if not type_name then error({ message = exact, code = shape }, 0) end
    r.tensors[#r.tensors + 1] = { name = name, type = type_name, shape = shape, from = from, exact = exact,
        bytes = bytes }
    if #shape > 1 then
        local key = from .. "|" .. type_name .. "|" .. tostring(exact)
        local f = r.by_format[key]
        if not f then
            f = { from = from, to = type_name, exact = exact, count = 0 }
            r.by_format[key], r.formats[#r.formats + 1] = f, f
        end
        f.count = f.count + 1
    end
end

--- Makes the weights of an open folder. Returns { tensors = list of { name, type, shape, bytes, from, exact }, rest =
--- tensors that no name is known for, formats = list of { from, to, exact, count } }; raises what is wrong.
---@param core any core.folder
---@param c table of config.lua
function M.make(core, c)
    local kind, q = c.kind, c.quantization or {}
    if type(q) ~= "table" then bad("format", "config.json: quantization_config is no object") end
    local modules, rest, left_out = collect(kind, core:tensors(), c.tied)
    local r = { core = core, tensors = {}, rest = rest, formats = {}, by_format = {}, left_out = left_out }
    local stacks, order = {}, {}
    for _, m in ipairs(modules) do
        local part, from
        if m.make then
            m.make(m, function(name, parts, stack)
                local t = parts[1].kind == "mxfp4" and "MXFP4"
                for _, x in pairs(m.parts) do t = t or x.name == parts[1].w and x.dtype end
                add(r, m.name .. "." .. name, parts, stack, t)
            end)
        else
            part, from = part_of(m, q)
        end
        if m.parts.bias then add(r, m.name .. ".bias", { { w = m.parts.bias.name } }, false, m.parts.bias.dtype) end
        local sinks = m.parts.sinks
        if sinks then add(r, m.name .. ".weight", { { w = sinks.name } }, false, sinks.dtype) end
        if part and m.expert then
            local s = stacks[m.name]
            if not s then
                s = { parts = {}, from = from, n = 0, name = m.name }
                stacks[m.name], order[#order + 1] = s, s
            end
            if s.parts[m.expert + 1] then bad("format", "module '%s': expert %d comes twice", m.module, m.expert) end
            s.parts[m.expert + 1], s.n = part, s.n + 1
        elseif part then
            if kind.transpose and kind.transpose[m.name:match("[%w_]+$")] then part.transpose = true end
            if kind.norm_add and m.name:find(kind.norm_of) then part.add = kind.norm_add end
            add(r, m.name .. ".weight", { part }, false, from)
        end
    end
    for _, s in ipairs(order) do
        if #s.parts ~= s.n then bad("format", "'%s': %d experts, numbered up to %d", s.name, s.n, #s.parts - 1) end
        add(r, s.name .. ".weight", s.parts, true, s.from)
    end
    r.core, r.by_format = nil, nil
    return r
end

return M
