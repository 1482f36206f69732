--- Writes a model's weights in fewer bits: which tensor gets which type, and the GGUF file that holds them.
--
-- A type's name is a number format (Q8_0, F16, ...) or a mix (Q4_K_M, ...), which gives some tensors more bits than
-- others. The mixes are llama.cpp's (llama-quant.cpp in github.com/ggml-org/llama.cpp), so that a name means the same
-- size and quality here as there; layers count by their number, wherever they lie in the file. Norms, biases, routers
-- and everything with one dimension are left alone (or become F32, if they have 16 bits and one dimension).
local core = require "llmrun.core"
local errors = require "llmrun.errors"
local tables = require "llmrun.tables"
local to_gguf = require "llmrun.hf.to_gguf"

local M = {}

-- name -> the type of most tensors, general.file_type, and what differs
local MIXES = {
  F32 = { "F32", 0 }, F16 = { "F16", 1 }, BF16 = { "BF16", 32 }, Q8_0 = { "Q8_0", 7 },
  Q4_0 = { "Q4_0", 2 }, Q4_1 = { "Q4_1", 3 }, Q5_0 = { "Q5_0", 8 }, Q5_1 = { "Q5_1", 9 },
  Q2_K = { "Q2_K", 10 }, Q2_K_S = { "Q2_K", 21 },
  Q3_K_S = { "Q3_K", 11 }, Q3_K_M = { "Q3_K", 12 }, Q3_K_L = { "Q3_K", 13 },
  Q4_K_S = { "Q4_K", 14 }, Q4_K_M = { "Q4_K", 15 }, Q5_K_S = { "Q5_K", 16 }, Q5_K_M = { "Q5_K", 17 },
  Q6_K = { "Q6_K", 18 }, IQ4_NL = { "IQ4_NL", 25 }, IQ4_XS = { "IQ4_XS", 30 }, MXFP4 = { "MXFP4", 38 },
}
local ALIAS = { Q3_K = "Q3_K_M", Q4_K = "Q4_K_M", Q5_K = "Q5_K_M" }
local PLAIN = { F32 = true, F16 = true, BF16 = true }

--- The names of types and mixes, sorted.
function M.types()
  return tables.sorted_keys(MIXES)
end

--- The mix of a name in any case ("q4_k_m"), or nil.
function M.mix(name)
  local upper = name:upper()
  upper = ALIAS[upper] or upper
  return MIXES[upper] and upper
end

-- What a row can't hold in blocks of 256 goes into blocks of 32 of about that many bits, or stays 16-bit.
local SMALLER = {
  Q2_K = "IQ4_NL", Q3_K = "IQ4_NL", IQ4_XS = "IQ4_NL", Q4_K = "Q5_0", Q5_K = "Q5_1", Q6_K = "Q8_0",
}
local function fitting(type, row)
  local function divides(t)
    local _, block = core.dtype_info(t)
    return row % block == 0
  end
  if divides(type) then return type end
  local other = SMALLER[type]
  return other and divides(other) and other or "F16"
end

-- The first and last eighth of the layers, and each third of the others.
local function more_bits(i, n) return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 end

local function down(mix, i, n, has_importance)
  if mix == "Q2_K" then return "Q3_K" end
  if mix == "Q2_K_S" then return i < n // 8 and "Q4_K" or nil end
  if mix == "Q3_K_M" then return i < n // 16 and "Q5_K" or "Q4_K" end
  if mix == "Q3_K_L" then return "Q5_K" end
  if mix == "Q4_K_M" or mix == "Q5_K_M" then return more_bits(i, n) and "Q6_K" or nil end
  if mix == "Q4_K_S" or mix == "IQ4_NL" or mix == "IQ4_XS" then
    return i < n // 8 and not (has_importance and mix:find "IQ") and "Q5_K" or nil
  end
  if has_importance and i < n // 8 then
    return mix == "Q4_0" and "Q4_1" or mix == "Q5_0" and "Q5_1" or nil
  end
end

local function value(mix, i, n, hp)
  if hp.experts == 8 then return "Q8_0" end -- small beside eight experts, and worth it
  if mix == "Q2_K" then return hp.grouped >= 4 and "Q4_K" or "Q3_K" end
  if mix == "Q2_K_S" then return hp.grouped >= 4 and "Q4_K" or nil end
  if mix == "Q3_K_M" then return i < 2 and "Q5_K" or "Q4_K" end
  if mix == "Q3_K_L" then return "Q5_K" end
  if mix == "Q4_K_M" or mix == "Q5_K_M" then return more_bits(i, n) and "Q6_K" or nil end
  if mix == "Q4_K_S" then return i < 4 and "Q5_K" or nil end
  if mix:find "IQ4" then return hp.grouped >= 4 and "Q5_K" or nil end
end

local JOINED = { Q3_K_M = "Q4_K", Q3_K_L = "Q4_K", Q4_K_M = "Q5_K", Q5_K_M = "Q6_K" }
local OUT = { Q2_K = "Q3_K", Q3_K_M = "Q4_K", Q3_K_L = "Q5_K" }
local OUT_EXPERTS = { Q2_K = "Q5_K", Q3_K_S = "Q5_K", Q3_K_M = "Q5_K", Q4_K_S = "Q5_K", Q4_K_M = "Q5_K",
  IQ4_NL = "Q5_K", IQ4_XS = "Q5_K" }

-- The better type of a tensor that a mix treats apart, or nil.
local function better(mix, name, hp, has_importance)
  local kind = name:match("%.([%w_]+)%.weight$") or name
  local layer = math.tointeger(tonumber((name:match("^blk%.(%d+)%.")))) or 0
  if kind == "attn_v" or kind == "attn_kv_b" then return value(mix, layer, hp.layers, hp) end
  if kind == "attn_qkv" then return JOINED[mix] end
  if kind == "attn_k" then return hp.experts == 8 and "Q8_0" or nil end
  if kind == "attn_output" then return (hp.experts == 8 and OUT_EXPERTS or OUT)[mix] end
  if kind:find "^ffn_down" then return down(mix, layer, hp.layers, has_importance) end
end

local KEEP = { "_norm%.weight$", "ffn_gate_inp", "^position_embd", "^token_types", "ssm_conv1d", "attn_sinks" }
local function kept(t)
  if #t.shape < 2 or not t.name:find("%.weight$") then return true end
  for _, p in ipairs(KEEP) do
    if t.name:find(p) then return true end
  end
  local _, _, _, writable = core.dtype_info(t.type)
  return not writable -- integers
end

--- What becomes of each tensor: a list of { name, shape, rows, from, to, bytes, out_bytes }.
-- opts.output, opts.embedding: types of these two tensors instead of the mix's; opts.pure: all of one type;
-- opts.importance: whether there are importances; opts.overrides: list of { pattern, type }, the first that fits is
-- taken.
function M.plan(file, mix, opts)
  local base, list = MIXES[mix][1], {}
  local tensors, names = file:tensors(), {}
  if file.core then tensors = to_gguf.tensors(file) end
  for _, t in ipairs(tensors) do names[t.name] = true end
  local tied = not names["output.weight"]
  local arch = file:get("general.architecture") or ""
  local function hp(key) return math.tointeger((file:get(arch .. "." .. key))) end
  local heads, kv = hp("attention.head_count") or 1, hp("attention.head_count_kv")
  local shape = {
    layers = hp("block_count") or 0, experts = hp("expert_count") or 0,
    grouped = heads // math.max(1, kv or heads),
  }
  for _, t in ipairs(tensors) do
    local to = t.type
    if not kept(t) then
      to = base
      local is_output = t.name == "output.weight" or tied and t.name == "token_embd.weight"
      if is_output then
        local plain = PLAIN[base] or base == "Q8_0" or opts.pure
        to = opts.output or tied and opts.embedding or plain and base or
          t.shape[1] % 256 == 0 and "Q6_K" or "Q8_0"
      elseif t.name == "token_embd.weight" then
        to = opts.embedding or base
      elseif not opts.pure then
        to = better(mix, t.name, shape, opts.importance) or base
      end
      for _, o in ipairs(opts.overrides or {}) do
        if t.name:find(o[1]) then
          to = o[2]
          break
        end
      end
      to = fitting(to, t.shape[1])
    elseif PLAIN[t.type] and (mix == "F32" or #t.shape < 2) then
      to = "F32"
    end
    local rows = 1
    for d = 2, #t.shape do rows = rows * t.shape[d] end
    local _, block, bytes = core.dtype_info(to)
    list[#list + 1] = { name = t.name, shape = t.shape, rows = rows, from = t.type, to = to, bytes = t.bytes,
      out_bytes = (t.shape[1] or 1) // block * bytes * rows }
  end
  return list
end

local function must(ok, err, code) return (errors.check("llmrun.quantize", ok, err, code)) end
local function bad(path, fmt, ...)
  errors.raise("llmrun.quantize", ("%s: " .. fmt):format(path, ...), "format")
end

-- Keys that say how the file was quantized, and those of a file's own place among shards.
local OWN = { ["general.file_type"] = true, ["general.quantization_version"] = true, ["split.no"] = true,
  ["split.count"] = true, ["split.tensors.count"] = true }

local function write_tensor(w, file, t, importance, progress)
  local imp = importance and t.to ~= t.from and importance[t.name]
  local matrices, width = #t.shape > 2 and t.rows // t.shape[2] or 1, t.shape[1] or 1
  local each, piece = t.rows // matrices, math.max(1, 4194304 // width)
  local source, heads = file, nil
  if file.core then -- a folder: a weight is made as a whole
    source, heads, piece = file.core, to_gguf.heads(file, t.name), t.rows
    if matrices == 1 or not imp then matrices, each = 1, t.rows end
  end
  for m = 0, matrices - 1 do
    local weights = imp and #imp >= 4 * width * (m + 1) and imp:sub(4 * width * m + 1, 4 * width * (m + 1))
    for from = 0, each - 1, piece do
      local n = math.min(piece, each - from)
      must(w:encode(source, t.name, t.to, m * each + from, heads and -1 or n, weights or nil, heads))
      progress(t, n)
    end
  end
end

local function write_keys(w, file)
  if file.core then
    to_gguf.keys(file, function(...) must(w:put(...)) end)
  else
    for _, key in ipairs(file:keys()) do
      if not OWN[key.key] then must(w:copy(file, key.key)) end
    end
  end
end

--- Writes file (an open GGUF file, or folder of llmrun.hf) as `mix` to out. opts: as M.plan; threads; importance: a
-- table name -> float32s as a string, as M.importance reads it; progress(done, total, tensor): called while it works,
-- in bytes read. The file gets its name only when it is whole. Returns the plan. Raises.
function M.write(file, out, mix, opts)
  local plan = M.plan(file, mix, opts)
  local w <close> = must(core.gguf_writer(out, opts.threads or 0))
  write_keys(w, file)
  must(w:put("general.file_type", "u32", MIXES[mix][2]))
  must(w:put("general.quantization_version", "u32", 2))
  if opts.importance then
    must(w:put("quantize.imatrix.entries_count", "u32", opts.importance_count or 0))
    if opts.importance_file then must(w:put("quantize.imatrix.file", "str", opts.importance_file)) end
  end
  local total, done = 0, 0
  for _, t in ipairs(plan) do
    total = total + t.bytes
    must(w:tensor(t.name, t.to, t.shape))
  end
  for _, t in ipairs(plan) do
    write_tensor(w, file, t, opts.importance, function(what, rows)
      done = done + what.bytes * rows / what.rows
      if opts.progress then opts.progress(done, total, what) end
    end)
  end
  must(w:finish())
  return plan
end

--- Importances from a file that `llmrun imatrix` (or llama.cpp's llama-imatrix, in its GGUF form) wrote: a table from
-- tensor name to float32s as a string, mean squares of the inputs; and how many tensors. Raises.
function M.importance(path)
  local file <close> = must(core.gguf_open(path))
  if file:get("general.type") ~= "imatrix" then
    bad(path, "general.type is '%s', not 'imatrix'", tostring((file:get "general.type")))
  end
  local list, n = {}, 0
  for _, t in ipairs(file:tensors()) do
    local name = t.name:match("^(.*)%.in_sum2$")
    if name then
      local counts = file:bytes(name .. ".counts")
      if not counts or t.type ~= "F32" then
        bad(path, "tensor '%s' has no counts, or is no F32", t.name)
      end
      local sums, parts = file:bytes(t.name), {}
      for m = 1, #counts // 4 do
        local count = ("<f"):unpack(counts, 4 * m - 3)
        for i = 1, t.shape[1] do
          local sum = ("<f"):unpack(sums, 4 * ((m - 1) * t.shape[1] + i) - 3)
          parts[#parts + 1] = ("<f"):pack(count > 0 and sum / count or 1)
        end
      end
      list[name], n = table.concat(parts), n + 1
    end
  end
  if n == 0 then bad(path, "holds no sums of squares") end
  return list, n
end

return M
