--- Hyperparameters of a model file, checked: what architecture scripts get as `hp`.
--
-- Fields: arch, layers, width, heads, kv_heads, head_dim, value_dim, ff, ctx, eps, vocab, window, experts (0 = none),
-- experts_used, rope (llmrun.rope), and
-- hp:get(name, kind, default) for a key of the architecture's own ("attention.logit_cap"), hp:opt(name, kind) for one
-- that may be missing.
-- A key that is missing, of the wrong type or out of range is an error that names it.
local rope = require "llmrun.rope"

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
function check.number(key, v, t)
  if t ~= "f32" and t ~= "f64" then bad(key, "type %s where a float is needed", t) end
  if not (v > -math.huge and v < math.huge) then bad(key, "%s is not a number", v) end
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

--- The value of "<arch>.<name>". kind: count (integer >= 1), size (integer >= 0), positive (float), number (float),
--- bool, string.
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

--- The same, nil if it is missing.
function HP:opt(name, kind)
  if self.gguf:get(self.arch .. "." .. name) ~= nil then return self:get(name, kind) end
end

--- An array of n floats, or nil if the key is missing.
function HP:floats(name, n)
  local key = self.arch .. "." .. name
  local v = self.gguf:get(key)
  if v == nil then return nil end
  if type(v) ~= "table" or #v ~= n then bad(key, "is not an array of %d numbers", n) end
  for _, x in ipairs(v) do
    if type(x) ~= "number" or not (x > 0 and x < math.huge) then bad(key, "%s is not a positive number", x) end
  end
  return v
end

--- Whether layer l (0-based) has the sliding window: as "attention.sliding_window_pattern" says, which is one bool a
--- layer or the number of layers of which the last sees everything; without it, `default`.
function HP:windowed(l, default)
  local v = self.gguf:get(self.arch .. ".attention.sliding_window_pattern")
  if v == nil then return default end
  if type(v) == "table" then
    if #v ~= self.layers or type(v[l + 1]) ~= "boolean" then
      self:bad("attention.sliding_window_pattern", "is not one bool for each of the %d layers", self.layers)
    end
    return v[l + 1]
  end
  return (l + 1) % self:get("attention.sliding_window_pattern", "count") ~= 0
end

--- Raises the error of a bad value of "<arch>.<name>".
function HP:bad(name, fmt, ...) bad(self.arch .. "." .. name, fmt, ...) end

--- Reads the hyperparameters of an open file. n_tokens: size of the vocabulary. ctx: longest sequence that is to be
--- run, if that is known; some kinds of RoPE scaling ask for it.
function hparams.read(gguf, n_tokens, ctx)
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
  hp.value_dim = hp:get("attention.value_length", "count", hp.head_dim)
  hp.ff = hp:get("feed_forward_length", "count", 0)
  hp.eps = hp:opt("attention.layer_norm_rms_epsilon", "positive")
    or hp:get("attention.layer_norm_epsilon", "positive", 1e-5)
  hp.window = hp:get("attention.sliding_window", "size", 0)
  hp.vocab = hp:get("vocab_size", "count", n_tokens)
  if hp.vocab ~= n_tokens then
    bad(arch .. ".vocab_size", "%d, but the file lists %d tokens", hp.vocab, n_tokens)
  end
  hp.experts = hp:get("expert_count", "size", 0)
  if hp.experts > 0 then
    hp.experts_used = hp:get("expert_used_count", "count")
    if hp.experts_used > hp.experts then
      hp:bad("expert_used_count", "%d experts are used of %d", hp.experts_used, hp.experts)
    end
  end
  hp.rope = rope.read(hp, math.min(ctx or hp.ctx, hp.ctx))
  return hp
end

return hparams
