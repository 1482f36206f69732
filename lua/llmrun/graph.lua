--- The layer graph as an architecture script sees it.
--
-- A script gets `g` (this) and `hp` (llmrun.hparams) and returns the node of the logits, and optionally the node of the
-- final hidden rows. Nodes add and multiply with + and *. Names of weights are those of the model file without
-- ".weight"; every call checks shapes and its error names the tensor and both shapes.
--
--   return function(g, hp)
--     local x = g:embed "token_embd"
--     for l = 0, hp.layers - 1 do
--       local h = g:rms_norm(x, g:name("blk", l, "attn_norm"), hp.eps)
--       ...
--     end
--     return g:linear(x, "output")
--   end
local Graph = {}
Graph.__index = Graph

local Node = {}
Node.__index = Node

local function node(g, id)
  return setmetatable({ g = g, id = id, width = g.core:width(id) }, Node)
end

local function id_of(g, x, what)
  if getmetatable(x) ~= Node or x.g ~= g then
    error(("%s: expected a node of this graph, got %s"):format(what, type(x)), 3)
  end
  return x.id
end

function Node.__add(a, b) return a.g:add(a, b) end
function Node.__mul(a, b)
  if type(b) == "number" then return a.g:scale(a, b) end
  if type(a) == "number" then return b.g:scale(b, a) end
  return a.g:mul(a, b)
end
function Node:__tostring() return ("node %d (width %d)"):format(self.id, self.width) end

--- Wraps a core graph. used: set of tensor names that the script asked for.
function Graph.new(core)
  return setmetatable({ core = core, used = {} }, Graph)
end

--- "blk.3.attn_q" from "blk", 3, "attn_q".
function Graph:name(...)
  local parts = { ... }
  for i = 1, #parts do parts[i] = tostring(parts[i]) end
  return table.concat(parts, ".")
end

local function full(name, suffix)
  if name:find("%.weight$") or name:find("%.bias$") then return name end
  return name .. "." .. suffix
end

--- Shape of a weight as a list (values a row first), or nil if the file has none of this name.
function Graph:shape(name)
  return self.core:shape(full(name, "weight"))
end

--- Whether the file has a weight (or, with suffix "bias", a bias) of this name.
function Graph:has(name, suffix)
  return self.core:shape(full(name, suffix or "weight")) ~= nil
end

function Graph:use(name)
  self.used[name] = true
  return name
end

--- Rows of an embedding by token id, times scale.
function Graph:embed(name, scale)
  return node(self, self.core:embed(self:use(full(name, "weight")), scale or 1.0))
end

--- Rows of a weight by the position of each token (learned positions).
function Graph:embed_at(name)
  return node(self, self.core:embed_at(self:use(full(name, "weight"))))
end

local function norm(g, x, name, opts)
  local weight = name and g:use(full(name, "weight"))
  return node(g, g.core:norm(id_of(g, x, "norm"), weight, opts))
end

--- x / rms(x) * weight over groups of `group` values (default: the whole row). name may be nil (no weight).
function Graph:rms_norm(x, name, eps, group)
  return norm(self, x, name, { eps = eps, group = group })
end

--- Layer norm with weight and, if the file has one, bias.
function Graph:layer_norm(x, name, eps)
  local bias = name and self:has(name, "bias") and self:use(full(name, "bias")) or nil
  return norm(self, x, name, { eps = eps, layer_norm = true, bias = bias })
end

--- x . weight^T + bias. opts.bias: true = must be there, false = must not, "auto" (default) = if the file has one.
--- opts.out: the width that the result must have. opts.first: only rows first .. first+out-1 of the weight and its
--- bias, for files that keep several matrices as one.
function Graph:linear(x, name, opts)
  opts = opts or {}
  local bias = full(name, "bias")
  local has = self.core:shape(bias) ~= nil
  local want = opts.bias
  if want == nil then want = "auto" end
  if want == true and not has then
    error(("the model file has no tensor '%s', which this architecture needs"):format(bias), 2)
  elseif want == false and has then
    error(("the model file has a tensor '%s', which this architecture does not use"):format(bias), 2)
  end
  local weight = self:use(full(name, "weight"))
  local id = self.core:linear(id_of(self, x, "linear"), weight, has and self:use(bias) or nil, opts.out or 0,
    opts.first or -1)
  return node(self, id)
end

--- Rotary position embedding. opts: heads, head_dim, rot (values rotated), interleaved, base, scale (of frequencies),
--- attn_scale, factors (per-frequency divisors: a list, or the name of a tensor).
function Graph:rope(x, opts)
  if type(opts.factors) == "string" then self:use(opts.factors) end
  return node(self, self.core:rope(id_of(self, x, "rope"), opts))
end

--- RoPE of `heads` heads as the hyperparameters say, whatever its scaling. interleaved: neighbouring pairs are turned
--- instead of halves.
function Graph:rotate(x, hp, heads, interleaved)
  local r = hp.rope
  local factors = r.factors
  if r.kind == "longrope" and not factors then
    for _, name in ipairs { "rope_factors_long", "rope_factors_short" } do
      if self:has(name) then self:use(full(name, "weight")) end
    end
    factors = r.long and "rope_factors_long.weight" or "rope_factors_short.weight"
  elseif not factors and self:has "rope_freqs" then
    factors = "rope_freqs.weight"
  end
  if r.interleaved ~= nil then interleaved = r.interleaved end
  return self:rope(x, { heads = heads, head_dim = hp.head_dim, rot = r.rot, interleaved = interleaved, base = r.base,
                        scale = r.scale, attn_scale = r.attn_scale, factors = factors })
end

--- Causal attention of queries q over keys k and values v, which go to a KV layer of their own. opts: heads, kv_heads,
--- head_dim, scale (default 1/sqrt(head_dim)), softcap, window (positions looked back over; 0 = all), sinks (tensor).
function Graph:attention(q, k, v, opts)
  local o = { heads = opts.heads, kv_heads = opts.kv_heads, head_dim = opts.head_dim, softcap = opts.softcap,
              window = opts.window, sinks = opts.sinks, scale = opts.scale or opts.head_dim ^ -0.5 }
  if o.sinks then self:use(o.sinks) end
  local iq, ik, iv = id_of(self, q, "attention"), id_of(self, k, "attention"), id_of(self, v, "attention")
  return node(self, self.core:attention(iq, ik, iv, o))
end

function Graph:add(a, b) return node(self, self.core:add(id_of(self, a, "add"), id_of(self, b, "add"))) end
--- b may be one value a row.
function Graph:mul(a, b) return node(self, self.core:mul(id_of(self, a, "mul"), id_of(self, b, "mul"))) end
--- act(gate) * up; act: "silu", "gelu" (tanh form), "gelu_erf", "relu", "relu2", "sigmoid"; "swiglu_clamp" is
--- gpt-oss's, of held values and with up + 1.
function Graph:glu(gate, up, act)
  return node(self, self.core:glu(id_of(self, gate, "glu"), id_of(self, up, "glu"), act or "silu"))
end
function Graph:act(x, act) return node(self, self.core:act(id_of(self, x, "act"), act)) end
function Graph:scale(x, s) return node(self, self.core:scale(id_of(self, x, "scale"), s)) end
--- cap * tanh(x / cap)
function Graph:softcap(x, cap) return node(self, self.core:softcap(id_of(self, x, "softcap"), cap)) end

--- Queries, keys and values of the usual form, for scripts to build on: from attn_q, attn_k, attn_v or, in files that
--- keep the three as one, attn_qkv. bias as in linear.
function Graph:qkv(x, prefix, hp, bias)
  local q, k = hp.heads * hp.head_dim, hp.kv_heads * hp.head_dim
  if self:has(prefix .. ".attn_qkv") then
    local name = prefix .. ".attn_qkv"
    return self:linear(x, name, { out = q, first = 0, bias = bias }),
      self:linear(x, name, { out = k, first = q, bias = bias }),
      self:linear(x, name, { out = k, first = q + k, bias = bias })
  end
  return self:linear(x, prefix .. ".attn_q", { out = q, bias = bias }),
    self:linear(x, prefix .. ".attn_k", { out = k, bias = bias }),
    self:linear(x, prefix .. ".attn_v", { out = k, bias = bias })
end

--- A feed-forward with a gate. Where the file has no ffn_gate, ffn_up is both, the gate first.
function Graph:gated_ffn(x, prefix, act, width)
  local gate, up
  if not self:has(prefix .. ".ffn_gate") and (self:shape(prefix .. ".ffn_up") or {})[2] == 2 * width then
    gate = self:linear(x, prefix .. ".ffn_up", { out = width, first = 0 })
    up = self:linear(x, prefix .. ".ffn_up", { out = width, first = width })
  else
    gate = self:linear(x, prefix .. ".ffn_gate", { out = width })
    up = self:linear(x, prefix .. ".ffn_up", { out = width })
  end
  return self:linear(self:glu(gate, up, act), prefix .. ".ffn_down")
end

--- Of each of `heads` equal parts of a row the n values from `first` on.
function Graph:slice(x, heads, first, n)
  return node(self, self.core:slice(id_of(self, x, "slice"), heads, first, n))
end

--- Each of `heads` parts of a with that of b behind it, or with the whole of b where b has n values in all; b = nil:
--- with n zeros.
function Graph:concat(a, b, heads, n)
  return node(self, self.core:concat(id_of(self, a, "concat"), b and id_of(self, b, "concat") or nil, heads, n))
end

--- Chooses experts for each row from their logits. opts: experts, used (how many), gate ("softmax" over all, "sigmoid"
--- of each, "softmax_chosen"), normalize (weights divided by their sum), scale, bias (name of a vector that counts for
--- the choice only), groups, groups_used, group_best (only experts of the best groups, which are scored by the sum of
--- their best so many).
function Graph:route(logits, opts)
  if opts.bias then self:use(opts.bias) end
  return node(self, self.core:route(id_of(self, logits, "route"), opts))
end

--- x with each chosen expert's own matrix of a weight (in, out, experts), plus its bias (out, experts) if the file has
--- one. x: token rows, or what another g:experts of this route made; the result has a row for each chosen expert, and
--- act, glu, add, mul, scale, slice work on it. opts.out as in linear.
function Graph:experts(x, route, name, opts)
  local bias = full(name, "bias")
  local id = self.core:experts(id_of(self, x, "experts"), id_of(self, route, "experts"),
    self:use(full(name, "weight")), self.core:shape(bias) and self:use(bias) or nil, opts and opts.out or 0)
  return node(self, id)
end

--- A row's experts added up with their weights.
function Graph:mix(x, route)
  return node(self, self.core:mix(id_of(self, x, "mix"), id_of(self, route, "mix")))
end

--- Experts of the usual form: ffn_gate_inp, ffn_{gate,up,down}_exps (or ffn_gate_up_exps, the gate first), and, if the
--- file has them, shared ones that every row goes through (ffn_{gate,up,down}_shexp, times the sigmoid of
--- ffn_gate_inp_shexp). opts: as in route, and act.
function Graph:moe(x, prefix, hp, opts)
  local width = hp:get("expert_feed_forward_length", "count", hp.ff)
  local choice = { experts = hp.experts, used = hp.experts_used }
  for k, v in pairs(opts) do choice[k] = v end
  local route = self:route(self:linear(x, prefix .. ".ffn_gate_inp", { out = hp.experts }), choice)
  local gate, up
  if self:has(prefix .. ".ffn_gate_up_exps") then
    local both = self:experts(x, route, prefix .. ".ffn_gate_up_exps", { out = 2 * width })
    gate, up = self:slice(both, 1, 0, width), self:slice(both, 1, width, width)
  else
    gate = self:experts(x, route, prefix .. ".ffn_gate_exps", { out = width })
    up = self:experts(x, route, prefix .. ".ffn_up_exps", { out = width })
  end
  local down = self:experts(self:glu(gate, up, opts.act), route, prefix .. ".ffn_down_exps", { out = hp.width })
  local y = self:mix(down, route)
  if not self:has(prefix .. ".ffn_gate_shexp") then return y end
  gate = self:linear(x, prefix .. ".ffn_gate_shexp")
  up = self:linear(x, prefix .. ".ffn_up_shexp")
  local shared = self:linear(self:glu(gate, up, opts.act), prefix .. ".ffn_down_shexp", { out = hp.width })
  if self:has(prefix .. ".ffn_gate_inp_shexp") then
    shared = shared * self:act(self:linear(x, prefix .. ".ffn_gate_inp_shexp", { out = 1 }), "sigmoid")
  end
  return y + shared
end

--- The feed-forward of a layer: dense (gated_ffn), or with experts where the file has them. opts as in moe.
function Graph:ffn(x, prefix, hp, opts)
  if hp.experts > 0 and self:has(prefix .. ".ffn_gate_inp") then return self:moe(x, prefix, hp, opts) end
  return self:gated_ffn(x, prefix, opts.act or "silu", hp.ff)
end

--- The logits of x: the file's own output head, or the embedding where the two are tied.
function Graph:head(x)
  return self:linear(x, self:has "output" and "output" or "token_embd")
end

Graph.Node = Node
return Graph
