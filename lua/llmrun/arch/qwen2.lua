--- Qwen2 and Qwen2.5: Llama with biases on q, k and v, and RoPE over halves. arXiv:2407.10671
return function(g, hp)
  local x = g:embed "token_embd"
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local q, k, v = g:qkv(g:rms_norm(x, b .. ".attn_norm", hp.eps), b, hp, true)
    local a = g:attention(g:rotate(q, hp, hp.heads), g:rotate(k, hp, hp.kv_heads), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:gated_ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, "silu", hp.ff)
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
