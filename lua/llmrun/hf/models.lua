--- What is particular about each kind of model in Hugging Face's folders, by config.json's model_type.
---
--- A folder is shown to the rest as if it were a GGUF file: config.json becomes the keys that hparams.lua and the
--- architecture scripts read, and the modules' names become those of the scripts. An entry has
---   arch     the architecture script, and the prefix of the keys
---   layer    module names within a layer ("self_attn.q_proj") -> names of the scripts, beside or instead of the common
---   top      the same for modules outside of the layers
---   experts  path of numbered experts within a layer -> { module within an expert = name of the stacked weight }
---   ignore   patterns of tensor names that a forward pass does not need
---   norm_add what is added to the weights of norms (patterns of the scripts' names in norm_of)
---   config   function(c, put): further keys; put(key, type, value, field): field names it in errors
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

local gemma3 = {
    arch = "gemma3",
    layer = {
        ["post_attention_layernorm"] = "post_attention_norm",
        ["pre_feedforward_layernorm"] = "ffn_norm",
        ["post_feedforward_layernorm"] = "post_ffw_norm",
    },
    norm_add = 1,
    norm_of = "norm$",
}

M.kinds = {
    llama = { arch = "llama" },
    mistral = { arch = "llama" },
    qwen2 = { arch = "qwen2" },
    qwen3 = { arch = "qwen3" },
    gemma3 = gemma3,
    gemma3_text = gemma3,
}

return M
