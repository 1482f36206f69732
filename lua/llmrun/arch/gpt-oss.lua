--- gpt-oss: experts in MXFP4 with biases and a gate of held values, a sink beside the scores of each head, every other
-- layer with a sliding window (the pattern belongs to the architecture). arXiv:2508.10925
return function(g, hp)
  local x = g:embed "token_embd"
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local q, k, v = g:qkv(g:rms_norm(x, b .. ".attn_norm", hp.eps), b, hp, true)
    local a = g:attention(g:rotate(q, hp, hp.heads), g:rotate(k, hp, hp.kv_heads), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim, sinks = b .. ".attn_sinks.weight",
        window = hp:windowed(l, l % 2 == 0) and hp.window or 0 })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width, bias = true })
    x = x + g:moe(g:rms_norm(x, b .. ".post_attention_norm", hp.eps), b, hp,
      { gate = "softmax_chosen", act = "swiglu_clamp" })
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
