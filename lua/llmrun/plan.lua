--- What a model will take, before loading it: its KV layers, found by running its architecture's script on a graph that
--- only keeps count.

local Graph = require "llmrun.graph"
local hparams = require "llmrun.hparams"

local M = {}

--- A stand-in for the core graph (lua_graph.c): widths and KV layers only.
local Counter = {}
Counter.__index = Counter

function Counter:new_node(width)
    self.widths[#self.widths + 1] = width
    return #self.widths
end

function Counter:shape(name) return self.shapes[name] end
function Counter:width(id) return self.widths[id] end

local function need(self, name)
    local shape = self.shapes[name]
    if not shape then error(("the model file has no tensor '%s'"):format(name), 0) end
    return shape
end

function Counter:embed(name) return self:new_node(need(self, name)[1]) end
function Counter:norm(x) return self:new_node(self.widths[x]) end
Counter.embed_at = Counter.embed
function Counter:linear(_, name, _, out, first)
    local shape = need(self, name)
    return self:new_node(first and first >= 0 and out or shape[2] or 1)
end
function Counter:slice(_, heads, _, n) return self:new_node(heads * n) end
function Counter:concat(a, _, heads, n) return self:new_node(self.widths[a] + heads * n) end
function Counter:route(_, o) return self:new_node(2 * o.used) end
function Counter:experts(_, _, name) return self:new_node(need(self, name)[2]) end
function Counter:attention(q, _, _, o)
    self.kv[#self.kv + 1] = { kv_heads = o.kv_heads, head_dim = o.head_dim, window = o.window or 0 }
    return self:new_node(self.widths[q])
end
for _, op in ipairs { "rope", "add", "mul", "glu", "act", "scale", "softcap", "mix" } do
    Counter[op] = function(self, x) return self:new_node(self.widths[x]) end
end

local function run_script(file, hp, script)
    local counter = setmetatable({ shapes = {}, widths = {}, kv = {} }, Counter)
    for _, t in ipairs(file:tensors()) do counter.shapes[t.name] = t.shape end
    script(Graph.new(counter), hp)
    return counter.kv
end

--- Bytes of one value in KV of a type. Keys of q4_0 have 6 bits.
M.kv_value_bytes = { f32 = 4, f16 = 2, bf16 = 2, fp8 = 1, q8_0 = 34 / 32, q4_0 = 18 / 32 }
M.kv_key_bytes = setmetatable({ q4_0 = 26 / 32 }, { __index = M.kv_value_bytes })

--- KV layers { kv_heads, head_dim, window } of an open GGUF file, and its hyperparameters; nil, text.
---@param file any
---@param n_tokens integer size of the vocabulary
---@param script? function the architecture's script, if it is none of ours
function M.layers(file, n_tokens, script)
    local ok, hp = pcall(hparams.read, file, n_tokens)
    if not ok then return nil, type(hp) == "table" and hp.message or tostring(hp) end
    if not script then
        ok, script = pcall(require("llmrun.loader").script, hp.arch)
        if not ok or not script then return nil, ("architecture '%s' is not known"):format(hp.arch) end
    end
    local done, kv = pcall(run_script, file, hp, script)
    if not done then return nil, type(kv) == "table" and kv.message or tostring(kv) end
    return kv, hp
end

--- Bytes of KV for so many sequences of ctx tokens, in whole blocks. q8_0 and q4_0 leave the first layer at f16.
---@param kv_type string of keys
---@param block_size integer
---@param value_type? string of values, if another
function M.kv_bytes(layers, ctx, batch, kv_type, block_size, value_type)
    local function of(i, type) return i == 1 and type:find("^q") and "f16" or type end
    local total = 0
    for i, l in ipairs(layers) do
        local slot = M.kv_key_bytes[of(i, kv_type)] + M.kv_value_bytes[of(i, value_type or kv_type)]
        -- a window's layers let go of blocks that they can no longer see
        local tokens = l.window > 0 and math.min(ctx, l.window + 2 * block_size) or ctx
        local blocks = (tokens + block_size - 1) // block_size
        total = total + l.kv_heads * l.head_dim * slot * blocks * block_size
    end
    return math.ceil(total * batch)
end

return M
