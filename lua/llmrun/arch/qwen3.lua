--- Qwen3: Qwen2 without biases, with a norm on each query and key head. arXiv:2505.09388
return function(g, hp)
  local x = g:embed "token_embd"
  local function head(t, norm, heads)
    t = g:rms_norm(t, norm, hp.eps, hp.head_dim)
    return g:rope(t, { heads = heads, head_dim = hp.head_dim, rot = hp.rope.rot,
                       base = hp.rope.base, scale = hp.rope.scale })
  end
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local h = g:rms_norm(x, b .. ".attn_norm", hp.eps)
    local q = g:linear(h, b .. ".attn_q", { out = hp.heads * hp.head_dim, bias = false })
    local k = g:linear(h, b .. ".attn_k", { out = hp.kv_heads * hp.head_dim, bias = false })
    local v = g:linear(h, b .. ".attn_v", { out = hp.kv_heads * hp.head_dim, bias = false })
    local a = g:attention(head(q, b .. ".attn_q_norm", hp.heads), head(k, b .. ".attn_k_norm", hp.kv_heads), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:gated_ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, "silu", hp.ff)
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
