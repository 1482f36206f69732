--- Makes the tiny models that tests/data/arch describes, as GGUF files (scripts/gen_arch_ref.py says what is in there).

local gguf = require "llmrun.testing.gguf"
local cjson = require "cjson"

local M = {}

--- The description of a name.
function M.case(name)
    local f = assert(io.open(("tests/data/arch/%s.json"):format(name)))
    local text = f:read "a"
    f:close()
    return cjson.decode(text)
end

--- n values in offset +- scale as float32 bytes: a hash of the name's FNV-1a and the number of each, as in the script.
function M.values(name, n, scale, offset)
    local seed = 0x811C9DC5
    for i = 1, #name do seed = (seed ~ name:byte(i)) * 0x01000193 & 0xFFFFFFFF end
    local parts, chunk = {}, {}
    for i = 0, n - 1 do
        local x = i * 0x9E3779B1 + seed & 0xFFFFFFFF
        x = (x ~ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ~ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        x = x ~ x >> 16
        chunk[#chunk + 1] = (x / 2147483648.0 - 1.0) * scale + offset
        if #chunk == 128 or i == n - 1 then
            parts[#parts + 1] = string.pack("<" .. ("f"):rep(#chunk), table.unpack(chunk))
            chunk = {}
        end
    end
    return table.concat(parts)
end

local function key_value(kind, v)
    if kind == "u32" then return gguf.u32(math.tointeger(v)) end
    if kind == "f32" then return gguf.f32(v) end
    if kind == "bool" then return gguf.bool(v) end
    return gguf.string(v)
end

--- Writes the model of a case. change(keys, tensors) may alter both first: keys is a list of { name, value } with
--- keys.of by name, tensors one of { name, shape, bytes } with tensors.of by name.
function M.write(path, case, change)
    local n = 0
    local keys = { { "general.architecture", gguf.string(case.arch) }, { "general.name", gguf.string "tiny" } }
    for _, k in ipairs(case.keys) do keys[#keys + 1] = { k[1], key_value(k[2], k[3]) } end
    local tensors = {}
    for _, t in ipairs(case.tensors) do
        local count, shape = 1, {}
        for i, d in ipairs(t[2]) do
            shape[i] = math.tointeger(d)
            count = count * shape[i]
        end
        if t[1] == "token_embd.weight" then n = shape[2] end
        tensors[#tensors + 1] = { t[1], shape, M.values(t[1], count, t[3], t[4]) }
    end
    for _, t in ipairs(case.raw) do
        tensors[#tensors + 1] = { t[1], { #t[2] }, string.pack("<" .. ("f"):rep(#t[2]), table.unpack(t[2])) }
    end
    local tokens, types, scores = {}, {}, {}
    for i = 1, n do tokens[i], types[i], scores[i] = ("<0x%02X>"):format(i - 1), 6, 0 end
    for _, k in ipairs {
        { "tokenizer.ggml.model", gguf.string "llama" }, { "tokenizer.ggml.tokens", gguf.strings(tokens) },
        { "tokenizer.ggml.scores", gguf.array(6, "<f", scores) },
        { "tokenizer.ggml.token_type", gguf.array(5, "<i4", types) },
        { "tokenizer.ggml.add_bos_token", gguf.bool(false) }, { "tokenizer.ggml.add_space_prefix", gguf.bool(false) },
    } do keys[#keys + 1] = k end
    keys.of, tensors.of = {}, {}
    for _, k in ipairs(keys) do keys.of[k[1]] = k end
    for _, t in ipairs(tensors) do tensors.of[t[1]] = t end
    if change then change(keys, tensors) end
    gguf.write(path, keys, tensors)
    return path
end

M.gguf = gguf
return M
