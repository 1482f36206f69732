--- Gemma 3 (text). arXiv:2503.19786
-- Norms before and after each part, query and key norms, embedding times sqrt(width), five layers with a sliding
-- window for each one that sees everything. The window layers turn with RoPE base 10000, without scaling; neither that
-- base nor the pattern is in GGUF files: both belong to the architecture, as does the scores' scale of the 27B model
-- (62 layers). The files' norm weights already contain the +1.
local LOCAL_BASE, PATTERN, LAYERS_27B = 10000.0, 6, 62

return function(g, hp)
  local x = g:embed("token_embd", hp.width ^ 0.5)
  local near = hp:get("rope.freq_base_swa", "positive", LOCAL_BASE)
  local scale = hp:get("attention.scale", "positive",
    (hp.layers == LAYERS_27B and hp.width / hp.heads or hp.head_dim) ^ -0.5)
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local windowed = hp:windowed(l, (l + 1) % PATTERN ~= 0)
    local function head(t, norm, heads)
      t = g:rms_norm(t, norm, hp.eps, hp.head_dim)
      if not windowed then return g:rotate(t, hp, heads) end
      return g:rope(t, { heads = heads, head_dim = hp.head_dim, base = near })
    end
    local q, k, v = g:qkv(g:rms_norm(x, b .. ".attn_norm", hp.eps), b, hp)
    local a = g:attention(head(q, b .. ".attn_q_norm", hp.heads), head(k, b .. ".attn_k_norm", hp.kv_heads), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim, scale = scale,
        window = windowed and hp.window or 0 })
    a = g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:rms_norm(a, b .. ".post_attention_norm", hp.eps)
    local f = g:gated_ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, "gelu", hp.ff)
    x = x + g:rms_norm(f, b .. ".post_ffw_norm", hp.eps)
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  local logits, cap = g:head(x), hp:opt("final_logit_softcapping", "positive")
  return cap and g:softcap(logits, cap) or logits, x
end
