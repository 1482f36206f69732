--- Qwen3 with experts: 128, of which 8 are used, their weights normalised. arXiv:2505.09388
return function(g, hp)
  local x = g:embed "token_embd"
  local normalize = hp:get("expert_weights_norm", "bool", true)
  local function head(t, norm, heads)
    return g:rotate(g:rms_norm(t, norm, hp.eps, hp.head_dim), hp, heads)
  end
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local q, k, v = g:qkv(g:rms_norm(x, b .. ".attn_norm", hp.eps), b, hp, false)
    local a = g:attention(head(q, b .. ".attn_q_norm", hp.heads), head(k, b .. ".attn_k_norm", hp.kv_heads), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, hp, { normalize = normalize })
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
