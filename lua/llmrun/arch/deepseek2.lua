--- DeepSeek V2, V2-Lite, V3, R1: multi-head latent attention and experts with shared ones. arXiv:2405.04434, 2412.19437
-- Keys and values of all heads are made from one short vector; a part of each key, the same for all heads, has RoPE.
-- Files with attn_kv_b are run in the expanded form: keys and values of each head are kept, the values with zeros up to
-- the keys' width. Files with attn_k_b and attn_v_b are run in the absorbed form: what is kept is the short vector, as
-- the one key (with the turned part) and value of all heads; attn_k_b takes each head's query to its width, attn_v_b
-- what was read back to the head's.

--- Equal parts side by side.
local function join(g, parts)
  while #parts > 1 do
    local pairs_of = {}
    for i = 1, #parts, 2 do
      local a, b = parts[i], parts[i + 1]
      pairs_of[#pairs_of + 1] = b and g:concat(a, b, 1, b.width) or a
    end
    parts = pairs_of
  end
  return parts[1]
end

--- Of each of `heads` parts of x its product with its own matrix, n wide, of a weight (part, n, heads).
local function per_head(g, x, name, heads, n)
  local width, parts = x.width // heads, {}
  for i = 1, heads do
    parts[i] = g:linear(g:slice(x, 1, (i - 1) * width, width), name, { out = n, first = (i - 1) * n, bias = false })
  end
  return join(g, parts)
end

return function(g, hp)
  local x = g:embed "token_embd"
  local rank, rot = hp:get("attention.kv_lora_rank", "count"), hp.rope.rot
  local key = hp:get("attention.key_length_mla", "count", hp.head_dim)
  local value = hp:get("attention.value_length_mla", "count", hp.value_dim)
  if key <= rot or value > key then
    hp:bad("attention.key_length", "%d, with %d values turned and %d of a value", key, rot, value)
  end
  local nope, heads, compressed = key - rot, hp.heads, hp:get("attention.q_lora_rank", "size", 0) > 0
  local scale = key ^ -0.5 * (hp.rope.score_scale or 1)
  local sigmoid = hp:get("expert_gating_func", "size", 1) == 2
  local groups = hp:get("expert_group_count", "size", 0)
  local choice = {
    gate = sigmoid and "sigmoid" or "softmax", normalize = hp:get("expert_weights_norm", "bool", false),
    scale = hp:get("expert_weights_scale", "positive", 1.0), groups = groups > 1 and groups or 0,
    groups_used = hp:get("expert_group_used_count", "size", 0),
  }
  local function turn(t, n)
    return g:rope(t, { heads = n, head_dim = rot, rot = rot, interleaved = hp.rope.interleaved ~= false,
                       base = hp.rope.base, scale = hp.rope.scale, attn_scale = hp.rope.attn_scale,
                       factors = hp.rope.factors })
  end
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local h = g:rms_norm(x, b .. ".attn_norm", hp.eps)
    local q
    if compressed then
      q = g:rms_norm(g:linear(h, b .. ".attn_q_a"), b .. ".attn_q_a_norm", hp.eps)
      q = g:linear(q, b .. ".attn_q_b", { out = heads * key })
    else
      q = g:linear(h, b .. ".attn_q", { out = heads * key })
    end
    local c = g:rms_norm(g:linear(h, b .. ".attn_kv_a_mqa", { out = rank, first = 0 }), b .. ".attn_kv_a_norm", hp.eps)
    local shared = turn(g:linear(h, b .. ".attn_kv_a_mqa", { out = rot, first = rank }), 1)
    local plain, turned = g:slice(q, heads, 0, nope), turn(g:slice(q, heads, nope, rot), heads)
    local a
    if g:has(b .. ".attn_k_b") then
      q = g:concat(per_head(g, plain, b .. ".attn_k_b", heads, rank), turned, heads, rot)
      a = g:attention(q, g:concat(c, shared, 1, rot), g:concat(c, nil, 1, rot),
        { heads = heads, kv_heads = 1, head_dim = rank + rot, scale = scale })
      a = per_head(g, g:slice(a, heads, 0, rank), b .. ".attn_v_b", heads, value)
    else
      local kv = g:linear(c, b .. ".attn_kv_b", { out = heads * (nope + value) })
      local v = g:slice(kv, heads, nope, value)
      if value < key then v = g:concat(v, nil, heads, key - value) end
      a = g:attention(g:concat(plain, turned, heads, rot), g:concat(g:slice(kv, heads, 0, nope), shared, heads, rot), v,
        { heads = heads, kv_heads = heads, head_dim = key, scale = scale })
      if value < key then a = g:slice(a, heads, 0, value) end
    end
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width })
    choice.bias = g:has(b .. ".exp_probs_b", "bias") and b .. ".exp_probs_b.bias" or nil
    choice.group_best = choice.bias and 2 or 1
    x = x + g:ffn(g:rms_norm(x, b .. ".ffn_norm", hp.eps), b, hp, choice)
  end
  x = g:rms_norm(x, "output_norm", hp.eps)
  return g:head(x), x
end
