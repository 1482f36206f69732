-- An architecture of our own: SmolLM2's layers written from scratch, and checked against the built-in ones.
--
--   llmrun examples/own_architecture.lua [MODEL]
--
-- An architecture is a function that gets a graph g and the file's hyperparameters hp. It is called once, at load, says
-- which operations follow each other and which tensors of the file they use, and returns the logits. C plans and runs
-- it. Every shape is checked on the way: the last lines ask for a wrong one, to show what the error says. The function
-- may as well stand in a file of its own: llm.load(model, { arch = "mine.lua" }).
--
-- test-args: {smollm2}
-- test-expect: layers: 30
-- test-expect: ours: +%S
-- test-expect: same logits as the built%-in: yes
-- test-expect: error: .*blk%.0%.attn_q

local llm = require "llmrun"

local path = arg[1] or "smollm2"
local layers = 0

local function smol(g, hp)
    local function rope(x, heads) -- the file's rows of q and k are in the order that turns neighbouring pairs
        return g:rope(x, { heads = heads, head_dim = hp.head_dim, rot = hp.head_dim, interleaved = true,
                           base = hp.rope.base })
    end

    local function attention(x, blk)
        local q = g:linear(x, blk .. ".attn_q", { out = hp.heads * hp.head_dim })
        local k = g:linear(x, blk .. ".attn_k", { out = hp.kv_heads * hp.head_dim })
        local v = g:linear(x, blk .. ".attn_v", { out = hp.kv_heads * hp.head_dim })
        local mixed = g:attention(rope(q, hp.heads), rope(k, hp.kv_heads), v,
            { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim })
        return g:linear(mixed, blk .. ".attn_output", { out = hp.width })
    end

    local x = g:embed "token_embd"
    layers = 0
    for l = 0, hp.layers - 1 do
        local blk = g:name("blk", l)
        x = x + attention(g:rms_norm(x, blk .. ".attn_norm", hp.eps), blk)
        x = x + g:gated_ffn(g:rms_norm(x, blk .. ".ffn_norm", hp.eps), blk, "silu", hp.ff)
        layers = layers + 1
    end
    x = g:rms_norm(x, "output_norm", hp.eps)
    return g:head(x), x -- the logits, and the hidden state before them
end

local function answer(model)
    local s <close> = model:session()
    s:user "What is the capital of France?"
    local text = s:gen({ max_tokens = 12, temperature = 0 }).text
    return text, s:logits():topk(10)
end

local ours <close> = llm.load(path, { arch = smol, ctx = 256 })
local builtin <close> = llm.load(path, { ctx = 256 })
print("layers: " .. layers)
local text, ids, values = answer(ours)
local _, same_ids, same_values = answer(builtin)
print("ours: " .. text)
local same = true
for i = 1, 10 do same = same and ids[i] == same_ids[i] and values[i] == same_values[i] end
print("same logits as the built-in: " .. (same and "yes" or "no"))

local _, err = pcall(llm.load, path, { arch = function(g, hp)
    return g:linear(g:embed "token_embd", "blk.0.attn_q", { out = hp.width + 1 })
end })
print("error: " .. tostring(err):match "[^\n]+")
