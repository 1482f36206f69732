--- llm.scripted: a model whose logits or tokens a Lua function gives. Exact and fast, with the whole engine behind it:
--- for specs of programs, samplers, policies.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local options = require "llmrun.options"
local model = require "llmrun.model"

local M = {}

local chatml = [[{% for m in messages %}{{ '<|im_start|>' + m.role + '
' + m.content + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}]]

-- The byte-level alphabet of GPT-2: printable bytes are themselves, the others follow from U+0100 on.
local function byte_alphabet()
    local map, n = {}, 0
    for b = 0, 255 do
        local shown = (b >= 33 and b <= 126) or (b >= 161 and b <= 172) or b >= 174
        map[b] = utf8.char(shown and b or 256 + n)
        if not shown then n = n + 1 end
    end
    return map
end

local NORMAL, CONTROL = 1, 3

--- A vocabulary object that cuts text into the longest pieces, over a core vocabulary.
local Pieces = {}
Pieces.__index = Pieces

function Pieces:encode(text, opts)
    local ids, at = {}, 1
    if opts and opts.bos and self.bos then ids[1] = self.bos end
    while at <= #text do
        local found, len
        for l = math.min(self.longest, #text - at + 1), 1, -1 do
            local piece = text:sub(at, at + l - 1)
            local id = opts and opts.special and self.special[piece] or self.plain[piece]
            if id then
                found, len = id, l
                break
            end
        end
        ids[#ids + 1], at = found, at + len
    end
    return ids
end

function Pieces:decode(...) return self.core:decode(...) end
function Pieces:piece(id) return self.core:piece(id) end
function Pieces:kind(id) return self.core:kind(id) end
function Pieces:find(text) return self.special[text] or self.plain[text] end
function Pieces:info() return self.core:info() end
function Pieces:detok(...) return self.core:detok(...) end
Pieces.__len = function(self) return #self.core end

--- pieces: list of strings (any bytes); special: names of control tokens. Ids: the pieces, the 256 bytes (so that every
--- text has tokens), then the special ones.
local function vocabulary(call, pieces, o)
    local alphabet = byte_alphabet()
    local self = { plain = {}, special = {}, longest = 1 }
    local tokens, types = {}, {}
    local function add(piece, kind)
        tokens[#tokens + 1] = kind == CONTROL and piece or piece:gsub(".", function(c) return alphabet[c:byte()] end)
        types[#tokens] = kind
        local set = kind == CONTROL and self.special or self.plain
        set[piece] = set[piece] or #tokens - 1
        self.longest = math.max(self.longest, #piece)
    end
    for i, p in ipairs(pieces) do
        if type(p) ~= "string" or p == "" then errors.raise(call, ("vocab[%d]: a piece of text expected"):format(i)) end
        add(p, NORMAL)
    end
    for b = 0, 255 do add(string.char(b), NORMAL) end
    for _, name in ipairs(o.special or { "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>" }) do add(name, CONTROL) end
    local function id_of(name, default)
        if name == nil then name = default end
        if math.type(name) == "integer" or not name then return name or nil end
        return self.special[name] or self.plain[name]
    end
    self.bos = o.add_bos and id_of(o.bos, "<|bos|>") or nil
    self.core = errors.check(call, core.vocab_new {
        model = "gpt2", pre = "gpt-2", tokens = tokens, types = types, bos = id_of(o.bos, "<|bos|>"),
        eos = id_of(o.eos, "<|eos|>"), add_bos = o.add_bos or false,
    })
    return setmetatable(self, Pieces)
end

local known = {
    vocab = "table|string", next = "function", special = "table", bos = "string|integer", eos = "string|integer",
    add_bos = "boolean", window = "integer", name = "string",
}
for k, v in pairs(model.engine_options) do known[k] = v end

--- The core model of options vocab, next, ctx, window, special, bos, eos, add_bos; what runs its function, and its
--- vocabulary.
function M.core(call, o)
    local vocab, raw = o.vocab or "bytes", nil
    if type(vocab) == "string" then
        if vocab ~= "bytes" then errors.raise(call, "vocab: \"bytes\", a list of pieces or a model expected") end
        vocab = vocabulary(call, {}, o)
    elseif vocab.vocab then
        raw = vocab.vocab
        vocab = raw
    else
        vocab = vocabulary(call, vocab, o)
    end
    raw = raw and (raw.core or raw) or vocab.core
    local core_model, script = core.scripted_new {
        vocab = raw, next = o.next, ctx = o.ctx or 4096, window = o.window,
    }
    errors.check(call, core_model, script)
    return core_model, script, vocab
end

--- A model whose next token a function gives.
---   vocab: "bytes", a list of pieces (ids 0, 1, ... in this order, then the 256 bytes, then `special`), or a model
---     (its vocabulary)
---   next: function(tokens) -> a token id, a table { [id] = logit, default = that of the rest }, or { row = all }
---   special, bos, eos, add_bos: names of its control tokens; window: a second KV group with that sliding window
---   name, template, ctx, kv, max_seqs ...: as in llm.load
---@param o table
---@return llmrun.Model
function M.new(o)
    local call = "llm.scripted"
    options.check(call, o, known, 2)
    if not o or not o.next then errors.raise(call, "next: a function(tokens) expected") end
    local core_model, script, vocab = M.core(call, o)
    return model.new(call, core_model, o, {
        name = o.name or "scripted", arch = "scripted", vocab = vocab, script = script,
        chat_template = chatml, default_kv_type = "f32",
    })
end

return M
