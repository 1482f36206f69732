--- Granite 3: Llama with multipliers on embedding, scores, residuals and logits; with experts as well.
-- arXiv:2408.13359
return function(g, hp)
  local x = g:embed("token_embd", hp:get("embedding_scale", "positive", 1.0))
  local residual = hp:get("residual_scale", "positive", 1.0)
  local scale = hp:get("attention.scale", "positive", hp.head_dim ^ -0.5)
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local q, k, v = g:qkv(g:rms_norm(x, b .. ".attn_norm", hp.eps), b, hp)
    local a = g:attention(g:rotate(q, hp, hp.heads, true), g:rotate(k, hp, hp.kv_heads, true), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim, scale = scale })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width }) * residual
    x = x + g:ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, hp, { normalize = true }) * residual
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x) * (1 / hp:get("logit_scale", "positive", 1.0)), x
end
