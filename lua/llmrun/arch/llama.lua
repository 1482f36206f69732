--- Llama, and what is wired like it: Mistral, SmolLM, TinyLlama; with experts: Mixtral. arXiv:2307.09288, 2401.04088
-- In GGUF files the rows of q and k are permuted so that RoPE turns neighbouring pairs (interleaved).
return function(g, hp)
  local x = g:embed "token_embd"
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local q, k, v = g:qkv(g:rms_norm(x, b .. ".attn_norm", hp.eps), b, hp)
    local a = g:attention(g:rotate(q, hp, hp.heads, true), g:rotate(k, hp, hp.kv_heads, true), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim, window = hp.window })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, hp, { normalize = true })
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
