--- Hyperparameters of a model file, checked: what architecture scripts get as `hp`.
--
-- Fields: arch, layers, width, heads, kv_heads, head_dim, ff, ctx, eps, vocab, window, rope = { base, scale, rot,
-- factors, attn_scale }, and hp:get(name, kind, default) for a key of the architecture's own ("attention.logit_cap").
-- A key that is missing, of the wrong type or out of range is an error that names it.
local hparams = {}

local HP = {}
HP.__index = HP

local function bad(key, fmt, ...)
  error({ message = ("key '%s': " .. fmt):format(key, ...), code = "format" }, 0)
end

local INT = { u8 = true, u16 = true, u32 = true, u64 = true, i8 = true, i16 = true, i32 = true, i64 = true }
local check = {}

function check.count(key, v, t)
  if not INT[t] then bad(key, "type %s where an integer is needed", t) end
  if math.type(v) ~= "integer" or v < 1 or v > 0x7fffff then bad(key, "%s is not in 1..8388607", v) end
  return v
end
function check.size(key, v, t)
  if not INT[t] then bad(key, "type %s where an integer is needed", t) end
  if math.type(v) ~= "integer" or v < 0 or v > 0x7fffffff then bad(key, "%s is out of range", v) end
  return v
end
function check.positive(key, v, t)
  if t ~= "f32" and t ~= "f64" then bad(key, "type %s where a float is needed", t) end
  if not (v > 0 and v < math.huge) then bad(key, "%s is not a positive number", v) end
  return v
end
function check.bool(key, v, t)
  if t ~= "bool" then bad(key, "type %s where a bool is needed", t) end
  return v
end
function check.string(key, v, t)
  if t ~= "str" then bad(key, "type %s where a string is needed", t) end
  return v
end

--- The value of "<arch>.<name>". kind: count (integer >= 1), size (integer >= 0), positive (float), bool, string.
--- default nil = the key must be there.
function HP:get(name, kind, default)
  local key = self.arch .. "." .. name
  local v, t = self.gguf:get(key)
  if v == nil then
    if default == nil then bad(key, "is missing") end
    return default
  end
  if type(v) == "table" then -- one value a layer: usable if all are the same
    local info = v
    for i = 2, #info do
      if info[i] ~= info[1] then bad(key, "differs from layer to layer, which this build does not support") end
    end
    v, t = info[1], math.type(info[1]) == "integer" and "u32" or "f32"
    if v == nil then bad(key, "is an empty array") end
  end
  return check[kind](key, v, t)
end

local function rope_of(hp)
  local rope = {
    base = hp:get("rope.freq_base", "positive", 10000.0),
    rot = hp:get("rope.dimension_count", "count", hp.head_dim),
    scale = 1.0, attn_scale = 1.0,
  }
  if rope.rot % 2 ~= 0 or rope.rot > hp.head_dim then
    bad(hp.arch .. ".rope.dimension_count", "%d is odd or more than the head width %d", rope.rot, hp.head_dim)
  end
  local kind = hp:get("rope.scaling.type", "string", "none")
  if kind == "linear" then
    rope.scale = 1.0 / hp:get("rope.scaling.factor", "positive", 1.0)
  elseif kind ~= "none" then
    bad(hp.arch .. ".rope.scaling.type", "'%s' is not supported", kind)
  end
  return rope
end

--- Reads the hyperparameters of an open file. n_tokens: size of the vocabulary.
function hparams.read(gguf, n_tokens)
  local arch, t = gguf:get("general.architecture")
  if t ~= "str" then bad("general.architecture", "is missing or not a string") end
  local hp = setmetatable({ gguf = gguf, arch = arch }, HP)
  hp.layers = hp:get("block_count", "count")
  if hp.layers > 4096 then bad(arch .. ".block_count", "%d layers are too many", hp.layers) end
  hp.width = hp:get("embedding_length", "count")
  hp.ctx = hp:get("context_length", "count")
  hp.heads = hp:get("attention.head_count", "count")
  hp.kv_heads = hp:get("attention.head_count_kv", "count", hp.heads)
  if hp.heads % hp.kv_heads ~= 0 then
    bad(arch .. ".attention.head_count_kv", "%d does not divide the %d heads", hp.kv_heads, hp.heads)
  end
  hp.head_dim = hp:get("attention.key_length", "count", math.max(1, hp.width // hp.heads))
  if hp:get("attention.value_length", "count", hp.head_dim) ~= hp.head_dim then
    bad(arch .. ".attention.value_length", "differs from the keys' length %d", hp.head_dim)
  end
  hp.ff = hp:get("feed_forward_length", "count", 0)
  hp.eps = hp:get("attention.layer_norm_rms_epsilon", "positive", 1e-5)
  hp.window = hp:get("attention.sliding_window", "size", 0)
  hp.vocab = hp:get("vocab_size", "count", n_tokens)
  if hp.vocab ~= n_tokens then
    bad(arch .. ".vocab_size", "%d, but the file lists %d tokens", hp.vocab, n_tokens)
  end
  hp.rope = rope_of(hp)
  return hp
end

return hparams
