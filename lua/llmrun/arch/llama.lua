--- Llama, and what is wired like it: Mistral, SmolLM, TinyLlama. arXiv:2307.09288
-- In GGUF files the rows of q and k are permuted so that RoPE turns neighbouring pairs (interleaved).
return function(g, hp)
  local x = g:embed "token_embd"
  local factors = g:has "rope_freqs" and "rope_freqs.weight" or nil
  local function rope(t, heads)
    return g:rope(t, { heads = heads, head_dim = hp.head_dim, rot = hp.rope.rot, interleaved = true,
                       base = hp.rope.base, scale = hp.rope.scale, factors = factors })
  end
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local h = g:rms_norm(x, b .. ".attn_norm", hp.eps)
    local q = g:linear(h, b .. ".attn_q", { out = hp.heads * hp.head_dim })
    local k = g:linear(h, b .. ".attn_k", { out = hp.kv_heads * hp.head_dim })
    local v = g:linear(h, b .. ".attn_v", { out = hp.kv_heads * hp.head_dim })
    local a = g:attention(rope(q, hp.heads), rope(k, hp.kv_heads), v,
      { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim, window = hp.window })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:gated_ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, "silu", hp.ff)
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
