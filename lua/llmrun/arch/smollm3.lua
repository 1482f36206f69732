--- SmolLM3: Llama without positions in every fourth layer. The interval belongs to the architecture.
-- huggingface.co/blog/smollm3
local INTERVAL = 4

return function(g, hp)
  local x = g:embed "token_embd"
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local q, k, v = g:qkv(g:rms_norm(x, b .. ".attn_norm", hp.eps), b, hp)
    if (l + 1) % INTERVAL ~= 0 then
      q, k = g:rotate(q, hp, hp.heads, true), g:rotate(k, hp, hp.kv_heads, true)
    end
    local a = g:attention(q, k, v, { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width })
    x = x + g:gated_ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, "silu", hp.ff)
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
