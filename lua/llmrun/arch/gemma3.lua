--- Gemma 3 (text). arXiv:2503.19786
-- Norms before and after each part, query and key norms, embedding times sqrt(width), five layers with a sliding window
-- for each one that sees everything. The window layers turn with RoPE base 10000; neither that base nor the pattern is
-- in GGUF files: both belong to the architecture. The files' norm weights already contain the +1.
local LOCAL_BASE, PATTERN = 10000.0, 6

return function(g, hp)
  local x = g:embed("token_embd", hp.width ^ 0.5)
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local everything = (l + 1) % PATTERN == 0
    local function head(t, norm, heads)
      t = g:rms_norm(t, norm, hp.eps, hp.head_dim)
      return g:rope(t, { heads = heads, head_dim = hp.head_dim, base = everything and hp.rope.base or LOCAL_BASE,
                         scale = everything and hp.rope.scale or 1.0 })
    end
    local h = g:rms_norm(x, b .. ".attn_norm", hp.eps)
    local q = g:linear(h, b .. ".attn_q", { out = hp.heads * hp.head_dim })
    local k = g:linear(h, b .. ".attn_k", { out = hp.kv_heads * hp.head_dim })
    local v = g:linear(h, b .. ".attn_v", { out = hp.kv_heads * hp.head_dim })
    local a = g:attention(head(q, b .. ".attn_q_norm", hp.heads), head(k, b .. ".attn_k_norm", hp.kv_heads), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim, window = everything and 0 or hp.window })
    a = g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:rms_norm(a, b .. ".post_attention_norm", hp.eps)
    local f = g:gated_ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, "gelu", hp.ff)
    x = x + g:rms_norm(f, b .. ".post_ffw_norm", hp.eps)
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
