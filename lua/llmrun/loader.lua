--- From a model's files to a model: opens a GGUF file or a Hugging Face folder, reads its hyperparameters, runs its
-- architecture's script.
local core = require "llmrun.core"
local Graph = require "llmrun.graph"
local hparams = require "llmrun.hparams"

local loader = {}

-- llama-like files under other names
local ALIAS = { mistral = "llama", smollm = "llama", phi4 = "phi3", granitemoe = "granite" }

local function script_of(arch, opts)
  local want = opts.arch or ALIAS[arch] or arch
  if type(want) == "function" then return want end
  if want:find("[/.]lua$") or want:find("/", 1, true) then
    local script, err = require("llmrun.userfile").load(want)
    if err then return nil, ("architecture script: %s"):format(err) end
    if type(script) ~= "function" then
      return nil, ("architecture script %s must return a function(g, hp)"):format(want)
    end
    return script
  end
  local ok, script = pcall(require, "llmrun.arch." .. want)
  if ok then return script end
  if script:find("not found", 1, true) then
    return nil, ("architecture '%s' is not known; give your own with arch = \"file.lua\""):format(want)
  end
  return nil, script
end

--- The architecture script of a name: the function, or nil and why not.
function loader.script(arch) return script_of(arch, {}) end

-- Tensors that no script reads, and that mean nothing to a forward pass.
local function leftovers(file, used)
  local list = {}
  for _, t in ipairs(file:tensors()) do
    if not used[t.name] then list[#list + 1] = t.name end
  end
  return list
end

local function describe_error(e)
  if type(e) == "table" and e.message then return e.message, e.code end
  return tostring(e), "script"
end

-- The place in the script instead of that in graph.lua, where shapes are checked.
local function place(e)
  local text, n = e:gsub("^lua/llmrun/graph%.lua:%d+: ", "")
  if n == 0 then return e end
  for level = 3, 40 do
    local info = debug.getinfo(level, "Sl")
    if not info then return e end
    if info.currentline > 0 and not info.source:find("llmrun/graph.lua", 1, true) then
      return ("%s:%d: %s"):format(info.short_src, info.currentline, text)
    end
  end
  return e
end

local function traceback(e)
  if type(e) ~= "string" then return e end
  return debug.traceback(place(e), 2)
end

-- hold.graph: what is to be freed if it fails.
local function build(file, path, opts, hold)
  local vocab, err, code = file:vocab()
  if not vocab then return nil, err, code end
  local hp = hparams.read(file, #vocab, opts.ctx)
  local script, why = script_of(hp.arch, opts)
  if not script then return nil, why, "unsupported" end
  local graph
  local backend = { device = opts.device, threads = opts.threads, isa = opts.isa, compute = opts.compute,
    parted = opts.parted }
  graph, err, code = core.graph_new(file.core or file, backend)
  if not graph then return nil, err, code end
  hold.graph = graph
  local g = Graph.new(graph)
  local logits, hidden = script(g, hp)
  if getmetatable(logits) ~= Graph.Node then error("an architecture script must return the node of the logits", 0) end
  local rest = leftovers(file, g.used)
  if #rest > 0 and not opts.allow_unused then
    local names = table.concat(rest, ", ", 1, math.min(#rest, 4)) .. (#rest > 4 and ", ..." or "")
    return nil, ("architecture '%s' does not use %d of the file's tensors: %s (allow_unused = true loads it anyway)")
      :format(hp.arch, #rest, names), "unsupported"
  end
  local info = file:info()
  collectgarbage() -- tables of tokens and tensors
  local model
  model, err, code = graph:finish(logits.id, hidden and hidden.id or nil, vocab,
    { name = file:get("general.name") or path:match("[^/]+$"), ctx = hp.ctx, fingerprint = info.fingerprint })
  if not model then return nil, err, code end
  return model, {
    path = path, arch = hp.arch, hparams = hp, vocab = vocab, file = file, bytes = info.bytes, formats = info.formats,
    sampling = file.sampling and file:sampling(),
    chat_template = file:get("tokenizer.chat_template"), fingerprint = info.fingerprint,
  }
end

--- The open file of a path, GGUF or a Hugging Face folder; nil, message, code.
function loader.file(path)
  if core.stat(path) == "folder" then
    local file, err, code = require("llmrun.hf").open(path)
    if not file then return nil, ("%s: %s"):format(path, err), code end
    return file
  end
  return core.gguf_open(path)
end

--- Opens a GGUF file or a Hugging Face folder and builds its model.
-- opts: device, threads, isa, compute ("fast", "bf16", "f32" = the exact reference path), arch (a name, a file or a
-- function that builds the layer graph), allow_unused (load although tensors are left over).
-- Returns the model and a table { path, arch, hparams, vocab, file, bytes, chat_template, fingerprint }, or
-- nil, message, code.
function loader.open(path, opts)
  opts = opts or {}
  local dist = require "llmrun.dist"
  if dist.active() then return dist.open(path, opts) end
  return loader.open_here(path, opts)
end

--- The same by this process alone (on several processes: for models that one of them has to itself). opts.parted: this
--- rank's part.
function loader.open_here(path, opts)
  local file, err, code = loader.file(path)
  if not file then return nil, err, code end
  local hold = {}
  local r = table.pack(xpcall(build, traceback, file, path, opts, hold))
  local message, kind = r[3], r[4]
  if r[1] and r[2] then return r[2], r[3] end
  if not r[1] then message, kind = describe_error(r[2]) end
  if file.explain then message = file:explain(message) end
  if hold.graph then hold.graph:close() end -- not when the collector comes by
  file:close()
  return nil, ("%s: %s"):format(path, message), kind
end

return loader
