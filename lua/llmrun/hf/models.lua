--- What is particular about each kind of model in Hugging Face's folders, by config.json's model_type.
---
--- A folder is shown to the rest as if it were a GGUF file: config.json becomes the keys that hparams.lua and the
--- architecture scripts read, and the modules' names become those of the scripts. An entry has
---   arch     the architecture script, and the prefix of the keys
---   layer    module names within a layer ("self_attn.q_proj") -> names of the scripts, beside or instead of the common
---   top      the same for modules outside of the layers
---   experts  path of numbered experts within a layer -> { module within an expert = name of the stacked weight }
---   stacked  module names within a layer whose tensors hold all experts -> function(m, add): m.parts = { role =
---            tensor }; add(name in the layer, parts of core.folder, stack)
---   ignore   patterns of tensor names that a forward pass does not need
---   norm_add what is added to the weights of norms (patterns of the scripts' names in norm_of)
---   transpose  names whose matrices are (inputs, outputs)
---   tied     the head is the embedding, whatever config.json says
---   defaults fields of config.json that may be left out
---   config   function(c, put): further keys; put(key, type, value, field): field names it in errors
local json = require "llmrun.json"

local M = {}

M.layer = {
    ["input_layernorm"] = "attn_norm",
    ["self_attn.q_proj"] = "attn_q",
    ["self_attn.k_proj"] = "attn_k",
    ["self_attn.v_proj"] = "attn_v",
    ["self_attn.o_proj"] = "attn_output",
    ["self_attn.q_norm"] = "attn_q_norm",
    ["self_attn.k_norm"] = "attn_k_norm",
    ["post_attention_layernorm"] = "ffn_norm",
    ["mlp.gate_proj"] = "ffn_gate",
    ["mlp.up_proj"] = "ffn_up",
    ["mlp.down_proj"] = "ffn_down",
}
M.top = {
    ["model.embed_tokens"] = "token_embd",
    ["model.norm"] = "output_norm",
    ["lm_head"] = "output",
}
--- Tensors that belong to no forward pass of text.
M.ignore = { "rotary_emb%.inv_freq$", "^vision_tower%.", "^model%.vision_tower%.", "^multi_modal_projector%.",
    "^model%.multi_modal_projector%." }

--- layer_types ("sliding_attention", "full_attention", ...) as a pattern of windows.
local function windows(c, put)
    local list = {}
    for i, kind in ipairs(type(c.layer_types) == "table" and c.layer_types or {}) do
        list[i] = kind == "sliding_attention"
    end
    if #list > 0 then
        put("attention.sliding_window_pattern", "bool_list", json.array(list), "layer_types")
    elseif math.type(c.sliding_window_pattern) == "integer" then
        put("attention.sliding_window_pattern", "u32", c.sliding_window_pattern, "sliding_window_pattern")
    end
end

local function query_scale(c, put)
    local n = c.query_pre_attn_scalar
    if type(n) == "number" and n > 0 then put("attention.scale", "f32", n ^ -0.5, "query_pre_attn_scalar") end
end

local function caps(c, put)
    put("attn_logit_softcapping", "f32", c.attn_logit_softcapping)
    put("final_logit_softcapping", "f32", c.final_logit_softcapping)
end

local gemma_layer = {
    ["post_attention_layernorm"] = "post_attention_norm",
    ["pre_feedforward_layernorm"] = "ffn_norm",
    ["post_feedforward_layernorm"] = "post_ffw_norm",
}

local gemma2 = {
    arch = "gemma2", layer = gemma_layer, norm_add = 1, norm_of = "norm$",
    defaults = { head_dim = 256, num_attention_heads = 8, num_key_value_heads = 4, rms_norm_eps = 1e-6,
        max_position_embeddings = 8192, sliding_window = 4096 },
    config = function(c, put)
        windows(c, put)
        query_scale(c, put)
        caps(c, put)
    end,
}

local gemma3 = {
    arch = "gemma3", layer = gemma_layer, norm_add = 1, norm_of = "norm$",
    defaults = { head_dim = 256, num_attention_heads = 8, num_key_value_heads = 4, rms_norm_eps = 1e-6,
        max_position_embeddings = 131072, sliding_window = 4096, rope_theta = 1e6 },
    config = function(c, put)
        windows(c, put)
        query_scale(c, put)
        put("final_logit_softcapping", "f32", c.final_logit_softcapping)
        local p = c.rope_parameters
        local near = type(p) == "table" and type(p.sliding_attention) == "table" and p.sliding_attention.rope_theta
        put("rope.freq_base_swa", "f32", near or c.rope_local_base_freq, "rope_local_base_freq")
    end,
}

local gpt2 = {
    arch = "gpt2",
    layer = {
        ["ln_1"] = "attn_norm", ["ln_2"] = "ffn_norm", ["attn.c_attn"] = "attn_qkv", ["attn.c_proj"] = "attn_output",
        ["mlp.c_fc"] = "ffn_up", ["mlp.c_proj"] = "ffn_down",
    },
    top = { ["wte"] = "token_embd", ["wpe"] = "position_embd", ["ln_f"] = "output_norm" },
    transpose = { attn_qkv = true, attn_output = true, ffn_up = true, ffn_down = true }, -- (inputs, outputs)
    ignore = { "%.attn%.bias$", "%.attn%.masked_bias$" },
    tied = true,
    config = function(c, put)
        put("block_count", "u32", c.n_layer, "n_layer")
        put("embedding_length", "u32", c.n_embd, "n_embd")
        put("context_length", "u32", c.n_positions, "n_positions")
        put("attention.head_count", "u32", c.n_head, "n_head")
        local inner = math.type(c.n_inner) == "integer" and c.n_inner
        put("feed_forward_length", "u32", inner or math.type(c.n_embd) == "integer" and 4 * c.n_embd or nil, "n_inner")
        put("attention.layer_norm_epsilon", "f32", c.layer_norm_epsilon, "layer_norm_epsilon")
    end,
}

local phi3 = {
    arch = "phi3",
    layer = { ["self_attn.qkv_proj"] = "attn_qkv", ["mlp.gate_up_proj"] = "ffn_up" },
}

local granite = {
    arch = "granite",
    config = function(c, put)
        put("embedding_scale", "f32", c.embedding_multiplier, "embedding_multiplier")
        put("residual_scale", "f32", c.residual_multiplier, "residual_multiplier")
        put("attention.scale", "f32", c.attention_multiplier, "attention_multiplier")
        put("logit_scale", "f32", c.logits_scaling, "logits_scaling")
    end,
}

local function experts(c, put)
    put("expert_count", "u32", c.num_local_experts or c.num_experts, "num_experts")
    put("expert_used_count", "u32", c.num_experts_per_tok, "num_experts_per_tok")
    put("expert_feed_forward_length", "u32", c.moe_intermediate_size, "moe_intermediate_size")
    put("expert_shared_feed_forward_length", "u32", c.shared_expert_intermediate_size,
        "shared_expert_intermediate_size")
    put("expert_weights_norm", "bool", c.norm_topk_prob, "norm_topk_prob")
end

local numbered = { gate_proj = "ffn_gate_exps", up_proj = "ffn_up_exps", down_proj = "ffn_down_exps" }

local mixtral = {
    arch = "llama",
    layer = { ["block_sparse_moe.gate"] = "ffn_gate_inp" },
    experts = { ["block_sparse_moe.experts"] = { w1 = "ffn_gate_exps", w3 = "ffn_up_exps", w2 = "ffn_down_exps" } },
    config = experts,
}

local qwen2_moe = {
    arch = "qwen2moe",
    layer = {
        ["mlp.gate"] = "ffn_gate_inp", ["mlp.shared_expert.gate_proj"] = "ffn_gate_shexp",
        ["mlp.shared_expert.up_proj"] = "ffn_up_shexp", ["mlp.shared_expert.down_proj"] = "ffn_down_shexp",
        ["mlp.shared_expert_gate"] = "ffn_gate_inp_shexp",
    },
    experts = { ["mlp.experts"] = numbered },
    config = experts,
}

local qwen3_moe = {
    arch = "qwen3moe", layer = { ["mlp.gate"] = "ffn_gate_inp" }, experts = { ["mlp.experts"] = numbered },
    config = experts,
}

--- A part for each slice of a tensor's first dimension.
local function slices(tensor, part)
    local list = {}
    for e = 1, tensor.shape[1] do
        local p = {}
        for k, v in pairs(part) do p[k] = v end
        p.w, p.index = tensor.name, e - 1
        list[e] = p
    end
    return list
end

local granite_moe = {
    arch = "granitemoe",
    layer = { ["block_sparse_moe.router.layer"] = "ffn_gate_inp" },
    stacked = {
        ["block_sparse_moe.input_linear"] = function(m, add)
            local w = m.parts.weight
            local half = w and (w.shape[2] or 0) // 2 or 0
            if half < 1 then return end
            add("ffn_gate_exps.weight", slices(w, { first = 0, count = half }), true)
            add("ffn_up_exps.weight", slices(w, { first = half, count = half }), true)
        end,
        ["block_sparse_moe.output_linear"] = function(m, add)
            if m.parts.weight then add("ffn_down_exps.weight", slices(m.parts.weight, {}), true) end
        end,
    },
    config = function(c, put)
        granite.config(c, put)
        experts(c, put)
    end,
}

--- gpt-oss: gate and up are every other output of one matrix, in MXFP4 (blocks and scales) or, turned, in floats.
local gpt_oss = {
    arch = "gpt-oss",
    layer = {
        ["mlp.router"] = "ffn_gate_inp", ["self_attn"] = "attn_sinks",
        ["post_attention_layernorm"] = "post_attention_norm",
    },
    stacked = {
        ["mlp.experts"] = function(m, add)
            local p = m.parts
            local function weight(role, name, choice)
                local part = { first = choice.first, step = choice.step }
                local w = p[role]
                if p[role .. "_blocks"] and p[role .. "_scales"] then
                    w = p[role .. "_blocks"]
                    part.kind, part.scale = "mxfp4", p[role .. "_scales"].name
                elseif w then
                    part.transpose = true
                end
                if w then add(name .. ".weight", slices(w, part), true) end
            end
            local both, down = p.gate_up_proj_bias, p.down_proj_bias
            weight("gate_up_proj", "ffn_gate_exps", { first = 0, step = 2 })
            weight("gate_up_proj", "ffn_up_exps", { first = 1, step = 2 })
            weight("down_proj", "ffn_down_exps", {})
            local function column(first) return slices(both, { first = first, step = 2, transpose = true }) end
            if both then
                add("ffn_gate_exps.bias", column(0), true)
                add("ffn_up_exps.bias", column(1), true)
            end
            if down then add("ffn_down_exps.bias", { { w = down.name } }, false) end
        end,
    },
    config = function(c, put)
        windows(c, put)
        experts(c, put)
        put("expert_feed_forward_length", "u32", c.intermediate_size, "intermediate_size")
    end,
}

local olmo2 = {
    arch = "olmo2",
    layer = { ["post_attention_layernorm"] = "post_attention_norm", ["post_feedforward_layernorm"] = "post_ffw_norm" },
}

M.kinds = {
    llama = { arch = "llama" },
    mistral = { arch = "llama" },
    qwen2 = { arch = "qwen2" },
    qwen3 = { arch = "qwen3" },
    gemma2 = gemma2,
    gemma3 = gemma3,
    gemma3_text = gemma3,
    phi3 = phi3,
    olmo2 = olmo2,
    mixtral = mixtral,
    qwen2_moe = qwen2_moe,
    qwen3_moe = qwen3_moe,
    granitemoe = granite_moe,
    gpt_oss = gpt_oss,
    granite = granite,
    smollm3 = { arch = "smollm3" },
    gpt2 = gpt2,
}

return M
