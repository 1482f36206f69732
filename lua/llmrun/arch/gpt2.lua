--- GPT-2: learned positions, layer norms, biases everywhere, no gate. Radford et al. 2019
return function(g, hp)
  local x = g:embed "token_embd" + g:embed_at "position_embd"
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local q, k, v = g:qkv(g:layer_norm(x, b .. ".attn_norm", hp.eps), b, hp, true)
    local a = g:attention(q, k, v, { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width, bias = true })
    local f = g:linear(g:layer_norm(x, b .. ".ffn_norm", hp.eps), b .. ".ffn_up", { out = hp.ff, bias = true })
    x = x + g:linear(g:act(f, "gelu"), b .. ".ffn_down", { out = hp.width, bias = true })
  end
  x = g:layer_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
