--- OLMo 2: norms behind each part only, and over all query and all key heads at once; RoPE over halves.
-- arXiv:2501.00656
return function(g, hp)
  local x = g:embed "token_embd"
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local q, k, v = g:qkv(x, b, hp)
    q = g:rotate(g:rms_norm(q, b .. ".attn_q_norm", hp.eps), hp, hp.heads)
    k = g:rotate(g:rms_norm(k, b .. ".attn_k_norm", hp.eps), hp, hp.kv_heads)
    local a = g:attention(q, k, v, { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim })
    a = g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:rms_norm(a, b .. ".post_attention_norm", hp.eps)
    x = x + g:rms_norm(g:gated_ffn(x, b, "silu", hp.ff), b .. ".post_ffw_norm", hp.eps)
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
