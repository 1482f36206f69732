--- Qwen2 and Qwen2.5: Llama with biases on q, k and v, and RoPE over halves. arXiv:2407.10671
return function(g, hp)
  local x = g:embed "token_embd"
  local function rope(t, heads)
    return g:rope(t, { heads = heads, head_dim = hp.head_dim, rot = hp.rope.rot,
                       base = hp.rope.base, scale = hp.rope.scale })
  end
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local h = g:rms_norm(x, b .. ".attn_norm", hp.eps)
    local q = g:linear(h, b .. ".attn_q", { out = hp.heads * hp.head_dim, bias = true })
    local k = g:linear(h, b .. ".attn_k", { out = hp.kv_heads * hp.head_dim, bias = true })
    local v = g:linear(h, b .. ".attn_v", { out = hp.kv_heads * hp.head_dim, bias = true })
    local a = g:attention(rope(q, hp.heads), rope(k, hp.kv_heads), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:gated_ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, "silu", hp.ff)
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
