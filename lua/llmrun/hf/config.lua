--- config.json as the keys of a GGUF file: what hparams.lua and the architecture scripts read.

local json = require "llmrun.json"
local models = require "llmrun.hf.models"
local words = require "llmrun.words"

local M = {}

local function bad(fmt, ...) error({ message = words.quoting("config.json: " .. fmt, ...), code = "format" }, 0) end

local function value(c, name)
    local v = c[name]
    if v == json.null then return nil end
    return v
end

local checks = {}
function checks.u32(field, v)
    local n = math.type(v) == "integer" and v or math.type(v) == "float" and math.tointeger(v)
    if not n then bad("'%s' is %s, an integer is needed", field, tostring(v)) end
    return n
end
function checks.f32(field, v)
    if type(v) ~= "number" then bad("'%s' is %s, a number is needed", field, tostring(v)) end
    return v + 0.0
end
function checks.bool(field, v)
    if type(v) ~= "boolean" then bad("'%s' is %s, true or false is needed", field, tostring(v)) end
    return v
end
function checks.str(field, v)
    if type(v) ~= "string" then bad("'%s' is %s, a string is needed", field, tostring(v)) end
    return v
end
local function list_of(kind)
    return function(field, v)
        if not json.is_array(v) then bad("'%s' is %s, a list is needed", field, tostring(v)) end
        local list = {}
        for i, x in ipairs(v) do list[i] = checks[kind](("%s[%d]"):format(field, i), x) end
        return list
    end
end
checks.f32_list, checks.u32_list, checks.bool_list = list_of "f32", list_of "u32", list_of "bool"

local FIELDS = {
    { "num_hidden_layers", "block_count", "u32" },
    { "hidden_size", "embedding_length", "u32" },
    { "max_position_embeddings", "context_length", "u32" },
    { "num_attention_heads", "attention.head_count", "u32" },
    { "num_key_value_heads", "attention.head_count_kv", "u32" },
    { "head_dim", "attention.key_length", "u32" },
    { "head_dim", "attention.value_length", "u32" },
    { "intermediate_size", "feed_forward_length", "u32" },
    { "rms_norm_eps", "attention.layer_norm_rms_epsilon", "f32" },
    { "vocab_size", "vocab_size", "u32" },
}
-- of rope_scaling or rope_parameters
local SCALING = {
    { "factor", "rope.scaling.factor", "f32" },
    { "original_max_position_embeddings", "rope.scaling.original_context_length", "u32" },
    { "low_freq_factor", "rope.scaling.low_freq_factor", "f32" },
    { "high_freq_factor", "rope.scaling.high_freq_factor", "f32" },
    { "attention_factor", "rope.scaling.attention_factor", "f32" },
    { "truncate", "rope.scaling.truncate", "bool" },
    { "beta_fast", "rope.scaling.yarn_beta_fast", "f32" },
    { "beta_slow", "rope.scaling.yarn_beta_slow", "f32" },
    { "mscale", "rope.scaling.mscale", "f32" },
    { "mscale_all_dim", "rope.scaling.mscale_all_dim", "f32" },
    { "short_factor", "rope.scaling.short_factor", "f32_list" },
    { "long_factor", "rope.scaling.long_factor", "f32_list" },
}

--- The rope parameters of a kind of layer: rope_parameters (by kind or not), or rope_scaling and rope_theta.
local function rope_of(c)
    local p = value(c, "rope_parameters")
    if p ~= nil then
        if type(p) ~= "table" then bad("'rope_parameters' is %s, an object is needed", tostring(p)) end
        local full = value(p, "full_attention")
        return type(full) == "table" and full or p, "rope_parameters"
    end
    local scaling = value(c, "rope_scaling")
    if scaling ~= nil and type(scaling) ~= "table" then
        bad("'rope_scaling' is %s, an object is needed", tostring(scaling))
    end
    local r = {}
    for k, v in pairs(scaling or {}) do r[k] = v end
    r.rope_theta = value(c, "rope_theta")
    return r, "rope_scaling"
end

local function put_rope(c, put)
    local r, field = rope_of(c)
    put("rope.freq_base", "f32", value(r, "rope_theta") or value(c, "rope_theta"), "rope_theta")
    local share = value(r, "partial_rotary_factor") or value(c, "partial_rotary_factor")
    if share ~= nil then
        checks.f32("partial_rotary_factor", share)
        local heads, width = value(c, "num_attention_heads"), value(c, "hidden_size")
        local dim = value(c, "head_dim") or (math.type(heads) == "integer" and heads > 0 and
            math.type(width) == "integer" and width // heads)
        if math.type(dim) == "integer" then
            put("rope.dimension_count", "u32", math.floor(dim * share), "partial_rotary_factor")
        end
    end
    local kind = value(r, "rope_type") or value(r, "type")
    if kind == nil or kind == "default" then return end
    if kind == "su" then kind = "longrope" end -- its first name
    put("rope.scaling.type", "str", kind, field)
    for _, f in ipairs(SCALING) do put(f[2], f[3], value(r, f[1]), field .. "." .. f[1]) end
    -- longrope has it beside
    if value(r, "original_max_position_embeddings") == nil then
        put("rope.scaling.original_context_length", "u32", value(c, "original_max_position_embeddings"),
            "original_max_position_embeddings")
    end
end

--- Reads the text of config.json: { kind (an entry of models), config (of the text model), meta = { key = { value,
--- type } }, fields = { key = name in config.json } }. Raises errors that name the field.
function M.read(text)
    local c, err = json.decode(text)
    if not c then bad("%s", err) end
    if type(c) ~= "table" or json.is_array(c) then bad("an object is needed") end
    local outer = c
    local inner = value(c, "text_config")
    if type(inner) == "table" then c = inner end
    local model_type = value(outer, "model_type") or value(c, "model_type")
    if type(model_type) ~= "string" then bad("'model_type' is missing") end
    local kind = models.kinds[value(c, "model_type") or model_type] or models.kinds[model_type]
    if not kind then
        error({ message = ("config.json: model_type '%s' is not known"):format(model_type), code = "unsupported" }, 0)
    end
    for k, v in pairs(kind.defaults or {}) do
        if value(c, k) == nil and not (k == "rope_theta" and value(c, "rope_parameters")) then c[k] = v end
    end
    local meta, fields = {}, {}
    local function put(key, type_name, v, field)
        local full = kind.arch .. "." .. key
        fields[full] = field or key
        if v == nil or v == json.null then return end
        meta[full] = { checks[type_name](field or key, v), (type_name:gsub("_list$", "")) }
    end
    meta["general.architecture"] = { kind.arch, "str" }
    for _, f in ipairs(FIELDS) do put(f[2], f[3], value(c, f[1]), f[1]) end
    if value(c, "use_sliding_window") ~= false then
        put("attention.sliding_window", "u32", value(c, "sliding_window"), "sliding_window")
    end
    put_rope(c, put)
    put("rope.interleaved", "bool", false, "rope")
    if kind.config then kind.config(c, put) end
    local tied = value(outer, "tie_word_embeddings")
    if tied == nil then tied = value(c, "tie_word_embeddings") end
    return {
        kind = kind, config = c, meta = meta, fields = fields, model_type = model_type,
        tied = tied == true or kind.tied == true,
        quantization = value(outer, "quantization_config") or value(c, "quantization_config"),
    }
end

return M
