--- Rotary position embedding: what a file's keys say about its scaling, as numbers for g:rope.
--
-- Every kind comes down to a base, one factor for all frequencies (scale), a divisor for each (factors), and a factor
-- of the rotated values (attn_scale). A model runs with one set of them from the first token to the last: kinds that
-- depend on a sequence's length (longrope, dynamic) take the longest that the model is loaded for, since keys that are
-- in the cache were turned already, and no result may depend on what else runs.
--
--   linear    all frequencies divided by `factor`
--   dynamic   NTK: a base that grows with the context beyond original_context_length
--   yarn      arXiv:2309.00071: fast frequencies stay, slow ones are divided, a ramp between; attn_scale grows
--   llama3    the same idea with limits in wavelengths
--   longrope  arXiv:2402.13753: divisors from the file, long ones beyond original_context_length
local M = {}

local log, pi = math.log, math.pi

local function clamp(x, low, high) return math.max(low, math.min(high, x)) end

local KINDS = {}

function KINDS.none() end

function KINDS.linear(r, hp) r.scale = 1.0 / hp:get("rope.scaling.factor", "positive", 1.0) end

function KINDS.dynamic(r, hp, ctx)
  local original = hp:get("rope.scaling.original_context_length", "count", hp.ctx)
  local factor = hp:get("rope.scaling.factor", "positive", 1.0)
  if ctx > original and r.rot > 2 then
    r.base = r.base * (factor * ctx / original - (factor - 1)) ^ (r.rot / (r.rot - 2))
  end
end

--- Which frequency makes `turns` turns over the original context.
local function yarn_dim(r, turns, original) return r.rot * log(original / (turns * 2 * pi)) / (2 * log(r.base)) end

function KINDS.yarn(r, hp)
  local factor = hp:get("rope.scaling.factor", "positive")
  local original = hp:get("rope.scaling.original_context_length", "count", hp.ctx)
  local low = yarn_dim(r, hp:get("rope.scaling.yarn_beta_fast", "positive", 32.0), original)
  local high = yarn_dim(r, hp:get("rope.scaling.yarn_beta_slow", "positive", 1.0), original)
  -- whether the ramp begins and ends at whole numbers is not in GGUF files: it belongs to the architecture
  if hp:get("rope.scaling.truncate", "bool", hp.arch ~= "gpt-oss") then low, high = low // 1, -(-high // 1) end
  low, high = math.max(low, 0), math.min(high, r.rot - 1)
  if low == high then high = high + 0.001 end
  r.factors = {}
  for i = 0, r.rot // 2 - 1 do
    local ramp = clamp((i - low) / (high - low), 0, 1)
    r.factors[i + 1] = 1 / (ramp / factor + 1 - ramp)
  end
  r.factor = factor
  local grown = factor > 1 and 0.1 * log(factor) + 1 or 1.0
  local whole = hp:opt("rope.scaling.attention_factor", "positive") -- in place of the formula
  r.attn_scale = whole or grown * hp:get("rope.scaling.attn_factor", "positive", 1.0)
  -- DeepSeek: scores grow instead of (or beside) the turned values
  local one, all = hp:opt("rope.scaling.mscale", "number"), hp:opt("rope.scaling.mscale_all_dim", "number")
  local slope = hp:opt("rope.scaling.yarn_log_multiplier", "positive") or all and all > 0 and 0.1 * all
  if slope and factor > 1 then
    r.score_scale = (1 + slope * log(factor)) ^ 2
    r.attn_scale = whole or one and all and (1 + 0.1 * one * log(factor)) / (1 + 0.1 * all * log(factor)) or 1.0
  end
end

function KINDS.llama3(r, hp)
  local factor = hp:get("rope.scaling.factor", "positive")
  local original = hp:get("rope.scaling.original_context_length", "count", 8192)
  local low = hp:get("rope.scaling.low_freq_factor", "positive", 1.0)
  local high = hp:get("rope.scaling.high_freq_factor", "positive", 4.0)
  if high <= low then hp:bad("rope.scaling.high_freq_factor", "%g is not more than the low one, %g", high, low) end
  r.factors = {}
  for i = 0, r.rot // 2 - 1 do
    local turns = original / (2 * pi * r.base ^ (2 * i / r.rot)) -- over the original context
    local smooth = clamp((turns - low) / (high - low), 0, 1)
    r.factors[i + 1] = 1 / ((1 - smooth) / factor + smooth)
  end
end

function KINDS.longrope(r, hp, ctx)
  local original = hp:get("rope.scaling.original_context_length", "count", hp.ctx)
  r.long = ctx > original
  local factor = hp.ctx / original
  local grown = factor > 1 and (1 + log(factor) / log(original)) ^ 0.5 or 1.0
  r.attn_scale = hp:get("rope.scaling.attn_factor", "positive", grown)
  r.factors = hp:floats("rope.scaling." .. (r.long and "long" or "short") .. "_factor", r.rot // 2) -- or tensors
end

--- RoPE of a model: { kind, base, rot, scale, attn_scale, factors, interleaved }. ctx: the longest sequence.
function M.read(hp, ctx)
  local r = {
    base = hp:get("rope.freq_base", "positive", 10000.0),
    rot = hp:get("rope.dimension_count", "count", hp.head_dim),
    kind = hp:get("rope.scaling.type", "string", "none"),
    interleaved = hp:opt("rope.interleaved", "bool"), -- where a file says other than its architecture does
    scale = 1.0, attn_scale = 1.0,
  }
  if r.rot % 2 ~= 0 or r.rot > hp.head_dim then
    hp:bad("rope.dimension_count", "%d is odd or more than the head width %d", r.rot, hp.head_dim)
  end
  local kind = KINDS[r.kind]
  if not kind then
    local names = {}
    for name in pairs(KINDS) do names[#names + 1] = name end
    table.sort(names)
    hp:bad("rope.scaling.type", "'%s' is not one of %s", r.kind, table.concat(names, ", "))
  end
  kind(r, hp, ctx)
  return r
end

return M
