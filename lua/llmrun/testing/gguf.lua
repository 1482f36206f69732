--- Makes small GGUF files for tests: metadata and float tensors, written with string.pack.
---
--- Format: docs/gguf.md in github.com/ggml-org/ggml, version 3, little-endian.

local M = {}

local U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10

local function str(s) return string.pack("<s8", s) end

--- Typed values: M.u32(7), M.f32(1e-5), M.strings{...}, ... Anything else may be given raw as { type, bytes }.
function M.u32(v) return { U32, string.pack("<I4", v) } end
function M.i32(v) return { I32, string.pack("<i4", v) } end
function M.u64(v) return { U64, string.pack("<i8", v) } end
function M.f32(v) return { F32, string.pack("<f", v) } end
function M.bool(v) return { BOOL, v and "\1" or "\0" } end
function M.string(v) return { STRING, str(v) } end
function M.strings(list)
    local parts = {}
    for i, s in ipairs(list) do parts[i] = str(s) end
    return { ARRAY, string.pack("<I4I8", STRING, #list) .. table.concat(parts) }
end
function M.array(kind, format, list)
    local parts = {}
    for i, v in ipairs(list) do parts[i] = string.pack(format, v) end
    return { ARRAY, string.pack("<I4I8", kind, #list) .. table.concat(parts) }
end

--- Floats in [-scale, scale) from a seed: the same each time.
function M.random(n, seed, scale)
    local x, parts = seed * 2654435761 % 4294967296 + 1, {}
    for i = 1, n do
        x = (x * 1664525 + 1013904223) % 4294967296
        parts[i] = string.pack("<f", (x / 2147483648 - 1) * scale)
    end
    return table.concat(parts)
end

--- Random values in blocks of Q8_0 (type 8) or MXFP4 (type 39), each block with the scale 2^exponent.
function M.blocks(type, n, seed, exponent)
    local x, parts = seed * 2654435761 % 4294967296 + 1, {}
    local head = type == 8 and string.pack("<I2", 15 + exponent << 10) or string.char(127 + exponent)
    for i = 1, n // 32 do
        local bytes = {}
        for j = 1, type == 8 and 32 or 16 do
            x = (x * 1664525 + 1013904223) % 4294967296
            bytes[j] = string.char(x >> 24)
        end
        parts[i] = head .. table.concat(bytes)
    end
    return table.concat(parts)
end

--- Writes a file: keys is a list of { name, value }, tensors a list of { name, shape, bytes, type } (type 0 = F32).
function M.write(path, keys, tensors)
    local head = { "GGUF", string.pack("<I4I8I8", 3, #tensors, #keys) }
    for _, k in ipairs(keys) do head[#head + 1] = str(k[1]) .. string.pack("<I4", k[2][1]) .. k[2][2] end
    local offset, data = 0, {}
    for _, t in ipairs(tensors) do
        head[#head + 1] = str(t[1]) .. string.pack("<I4", #t[2])
        for _, n in ipairs(t[2]) do head[#head + 1] = string.pack("<I8", n) end
        head[#head + 1] = string.pack("<I4I8", t[4] or 0, offset)
        local padded = t[3] .. ("\0"):rep(-#t[3] % 32)
        data[#data + 1] = padded
        offset = offset + #padded
    end
    local text = table.concat(head)
    local f = assert(io.open(path, "wb"))
    f:write(text, ("\0"):rep(-#text % 32), table.concat(data))
    f:close()
end

--- A whole llama-like model: 2 layers, width 64, 2 heads, 256 byte tokens. change(keys, tensors) may alter both (keys,
--- by name in keys.of; tensors by name in tensors.of) before it is written.
function M.tiny(path, change)
    local width, ff, n, layers = 64, 96, 256, 2
    local tokens, types = {}, {}
    for i = 0, 255 do
        tokens[#tokens + 1] = ("<0x%02X>"):format(i)
        types[#types + 1] = 6
    end
    local scores = {}
    for i = 1, n do scores[i] = 0 end
    local keys = {
        { "general.architecture", M.string "llama" },
        { "general.name", M.string "tiny" },
        { "llama.block_count", M.u32(layers) },
        { "llama.context_length", M.u32(256) },
        { "llama.embedding_length", M.u32(width) },
        { "llama.feed_forward_length", M.u32(ff) },
        { "llama.attention.head_count", M.u32(2) },
        { "llama.attention.head_count_kv", M.u32(1) },
        { "llama.attention.layer_norm_rms_epsilon", M.f32(1e-5) },
        { "llama.rope.freq_base", M.f32(10000) },
        { "llama.vocab_size", M.u32(n) },
        { "tokenizer.ggml.model", M.string "llama" },
        { "tokenizer.ggml.tokens", M.strings(tokens) },
        { "tokenizer.ggml.scores", M.array(F32, "<f", scores) },
        { "tokenizer.ggml.token_type", M.array(I32, "<i4", types) },
        { "tokenizer.ggml.add_bos_token", M.bool(false) },
        { "tokenizer.ggml.add_space_prefix", M.bool(false) },
    }
    local tensors, seed = {}, 0
    local function add(name, shape, scale, bytes)
        seed = seed + 1
        local count = shape[1] * (shape[2] or 1)
        tensors[#tensors + 1] = { name, shape, bytes or M.random(count, seed, scale) }
    end
    local function ones(count) return string.pack("<f", 1):rep(count) end
    add("token_embd.weight", { width, n }, 1)
    for l = 0, layers - 1 do
        local b = ("blk.%d."):format(l)
        add(b .. "attn_norm.weight", { width }, 0, ones(width))
        add(b .. "attn_q.weight", { width, width }, 0.2)
        add(b .. "attn_k.weight", { width, width // 2 }, 0.2)
        add(b .. "attn_v.weight", { width, width // 2 }, 0.2)
        add(b .. "attn_output.weight", { width, width }, 0.2)
        add(b .. "ffn_norm.weight", { width }, 0, ones(width))
        add(b .. "ffn_gate.weight", { width, ff }, 0.2)
        add(b .. "ffn_up.weight", { width, ff }, 0.2)
        add(b .. "ffn_down.weight", { ff, width }, 0.2)
    end
    add("output_norm.weight", { width }, 0, ones(width))
    keys.of, tensors.of = {}, {}
    for _, k in ipairs(keys) do keys.of[k[1]] = k end
    for _, t in ipairs(tensors) do tensors.of[t[1]] = t end
    if change then change(keys, tensors) end
    M.write(path, keys, tensors)
    return path
end

return M
