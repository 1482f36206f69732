--- Gemma 2. arXiv:2408.00118
-- Norms before and after each part, embedding times sqrt(width), scores and logits held by tanh, every other layer with
-- a sliding window. The pattern and (of the 27B model, whose 46 layers tell it) the scores' scale belong to the
-- architecture. The files' norm weights already contain the +1.
local LAYERS_27B = 46

return function(g, hp)
  local x = g:embed("token_embd", hp.width ^ 0.5)
  local cap = hp:get("attn_logit_softcapping", "positive", 50.0)
  local scale = hp:get("attention.scale", "positive",
    (hp.layers == LAYERS_27B and hp.width / hp.heads or hp.head_dim) ^ -0.5)
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local q, k, v = g:qkv(g:rms_norm(x, b .. ".attn_norm", hp.eps), b, hp)
    local a = g:attention(g:rotate(q, hp, hp.heads), g:rotate(k, hp, hp.kv_heads), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim, scale = scale, softcap = cap,
        window = hp:windowed(l, l % 2 == 0) and hp.window or 0 })
    a = g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:rms_norm(a, b .. ".post_attention_norm", hp.eps)
    local f = g:gated_ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, "gelu", hp.ff)
    x = x + g:rms_norm(f, b .. ".post_ffw_norm", hp.eps)
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:softcap(g:head(x), hp:get("final_logit_softcapping", "positive", 30.0)), x
end
