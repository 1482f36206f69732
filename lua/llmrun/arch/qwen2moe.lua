--- Qwen2 with experts (Qwen1.5-MoE, Qwen2-57B-A14B): weights of the chosen are not normalised; a shared expert behind a
-- gate of its own. arXiv:2407.10671
return function(g, hp)
  local x = g:embed "token_embd"
  local normalize = hp:get("expert_weights_norm", "bool", false)
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local q, k, v = g:qkv(g:rms_norm(x, b .. ".attn_norm", hp.eps), b, hp, true)
    local a = g:attention(g:rotate(q, hp, hp.heads), g:rotate(k, hp, hp.kv_heads), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, hp, { normalize = normalize })
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
