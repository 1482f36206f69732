--- A Hugging Face folder's metadata as keys of a GGUF file: for llmrun quantize.
--
-- Rows of q and k: GGUF files of some architectures (llama, granite, ...) have the halves of a head, which RoPE turns
-- against each other, as neighbours; a folder has them apart and says so with the key "<arch>.rope.interleaved". Such
-- rows are put in order on the way, and the key is left out, so that the file is one like any other.
local errors = require "llmrun.errors"
local words = require "llmrun.words"

local M = {}

local function fail(fmt, ...) errors.raise("llmrun.quantize", words.quoting(fmt, ...), "unsupported") end

-- architectures whose GGUF files have neighbours
local NEIGHBOURS = { llama = true, granite = true, granitemoe = true, smollm3 = true }
local function reorders(folder)
  local arch = folder:get "general.architecture"
  return NEIGHBOURS[arch] and folder:get(arch .. ".rope.interleaved") == false
end

-- rule of the pre-tokenizer, then with NFC, then with whole words -> tokenizer.ggml.pre
local PRE = {
  ["gpt-2"] = "gpt-2", ["gpt-2 nfc"] = "olmo", smollm = "smollm", ["smollm nfc"] = "command-r",
  hunyuan = "hunyuan", ["hunyuan nfc"] = "qwen2", dbrx = "dbrx", ["dbrx whole"] = "llama-bpe", ["gpt-4o"] = "gpt-4o",
  ["tekken whole"] = "tekken",
}

local function yes(flag) return flag == true or flag == 1 end

local function pre_of(spec)
  local key = (spec.pre or "") .. (yes(spec.nfc) and " nfc" or "") .. (yes(spec.whole) and " whole" or "")
  return PRE[key] or fail("the folder's tokenizer cuts words by a rule that GGUF files have no name for (%s)", key)
end

local function put_vocab(spec, put)
  if spec.model ~= "gpt2" and spec.model ~= "llama" then
    fail("the folder's tokenizer is of a kind that GGUF files are not written with here (%s)", spec.model)
  end
  put("tokenizer.ggml.model", "str", spec.model)
  if spec.model == "gpt2" then put("tokenizer.ggml.pre", "str", pre_of(spec)) end
  put("tokenizer.ggml.tokens", "[str]", spec.tokens)
  put("tokenizer.ggml.token_type", "[i32]", spec.types)
  if spec.scores then put("tokenizer.ggml.scores", "[f32]", spec.scores) end
  if spec.model == "gpt2" then put("tokenizer.ggml.merges", "[str]", spec.merges or {}) end
  local function id(name, v)
    if v and v >= 0 then put("tokenizer.ggml." .. name .. "_token_id", "u32", v) end
  end
  id("bos", spec.bos)
  id("eos", spec.eos)
  id("unknown", spec.unk)
  id("padding", spec.pad)
  for _, other in ipairs(spec.eogs or {}) do
    if other ~= spec.eos then
      id("eot", other)
      break
    end
  end
  put("tokenizer.ggml.add_bos_token", "bool", spec.add_bos or false)
  put("tokenizer.ggml.add_eos_token", "bool", spec.add_eos or false)
  if spec.model == "llama" then put("tokenizer.ggml.add_space_prefix", "bool", spec.add_space_prefix or false) end
end

-- Values of a list are written in the type of the list.
local LISTS = { f32 = true, u32 = true, i32 = true, str = true, bool = true }

--- Puts all keys of a folder: put(key, type, value) as the writer takes it. Raises.
function M.keys(folder, put)
  local arch = folder:get "general.architecture"
  for _, k in ipairs(folder:keys()) do
    local v, kind = folder:get(k.key)
    if type(v) == "table" then
      if not LISTS[kind] then fail("key '%s' is a list of %s", k.key, tostring(kind)) end
      put(k.key, "[" .. kind .. "]", v)
    elseif not (k.key == arch .. ".rope.interleaved" and reorders(folder)) then
      put(k.key, kind, v)
    end
  end
  if not folder:get "general.name" then put("general.name", "str", folder.path:match("[^/]+$") or arch) end
  local spec, err, code = folder:vocab_spec()
  if not spec then errors.raise("llmrun.quantize", err, code) end
  put_vocab(spec, put)
  local template = folder:get "tokenizer.chat_template"
  if template then put("tokenizer.chat_template", "str", template) end
end

--- In how many heads the rows of a tensor are to be put in order; nil: in none.
function M.heads(folder, name)
  local arch = folder:get "general.architecture"
  if not reorders(folder) then return nil end
  local heads = folder:get(arch .. ".attention.head_count")
  if name:find("%.attn_q%.%a+$") then return math.tointeger(heads) end
  if name:find("%.attn_k%.%a+$") then
    return math.tointeger((folder:get(arch .. ".attention.head_count_kv"))) or math.tointeger(heads)
  end
end

--- The folder's weights; raises if it holds tensors that belong to none.
function M.tensors(folder)
  local rest = folder.made.rest
  if #rest > 0 then
    fail("%s: tensor '%s' %sbelongs to no weight of architecture '%s'", folder.path, rest[1].name,
      #rest > 1 and ("and %d more "):format(#rest - 1) or "", (folder:get "general.architecture"))
  end
  return folder.made.tensors
end

return M
