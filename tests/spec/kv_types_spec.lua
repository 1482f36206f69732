--- Keys and values in few bits, at length: teacher-forced perplexity of 2000 tokens against that of F16, in blocks of any
--- size. And copies of a real file with a head of its own, with a tensor too many, with one too few.

local llm = require "llmrun"
local catalog = require "llmrun.catalog"

local function read(path)
    local f = assert(io.open(path, "rb"))
    local text = f:read "a"
    f:close()
    return text
end

local function find(name)
    return assert(catalog.find(name), name .. " is missing: run scripts/fetch_model " .. name)
end

--- Sum of the log-probabilities of the text's first n tokens but the first.
local function score(name, n, kv_type, block_size, value_type)
    local size = block_size or 16
    local model <close> = llm.load(find(name), { ctx = n, kv = { type = kv_type, value_type = value_type,
        block_size = size, blocks = n // size + 2, prefix_cache = false } })
    local ids = table.move(model:tokenize(read "tests/data/ref/gpl3.txt", { bos = true }), 1, n, 1, {})
    local s <close> = model:session()
    s:append(ids)
    local scored, sum = s:score { from = 2 }
    assert.equal(n - 1, #scored)
    return sum
end

local sanitized = os.getenv "LLMRUN_TEST_SANITIZE" == "1" -- some ten times slower

describe("keys and values in few bits", function() -- B51
    for _, name in ipairs { "smollm2", not sanitized and "qwen-0.5b" or nil } do
        it("keep the perplexity of " .. name .. " over 2000 tokens", function()
            local n = sanitized and 200 or 2000
            local f16 = score(name, n, "f16")
            for few, most in pairs { q8_0 = 0.005, q4_0 = 0.05 } do
                local pairs_of = { { few, few }, { few, "f16" }, { "f16", few } }
                for _, types in ipairs(name == "smollm2" and pairs_of or { pairs_of[1] }) do
                    local rise = math.exp((f16 - score(name, n, types[1], nil, types[2])) / (n - 1)) - 1
                    local text = ("%s: %s and %s: perplexity %+.2f %% of F16's"):format(name, types[1], types[2],
                        100 * rise)
                    print(text)
                    assert.is_true(sanitized or rise <= most, text)
                end
            end
        end)
    end

    it("write on as well after 600 tokens", function()
        local n = sanitized and 60 or 600
        local function open(kv_type)
            return llm.load(find "smollm2", { ctx = 1024, kv = { type = kv_type, blocks = 64, prefix_cache = false } })
        end
        local judge <close> = open "f16"
        local prompt = judge:tokenize("Once upon a time, in a town by the sea,", { bos = true })
        -- what f16 thinks of a text, after its first half
        local function surprise(ids)
            local s <close> = judge:session()
            s:append(ids)
            local sum, from = 0, #ids - n // 2
            for _, token in ipairs(s:score { from = from }) do sum = sum - token.logprob end
            return sum / (#ids - from + 1)
        end
        local own
        for _, kv_type in ipairs { "f16", "q8_0", "q4_0" } do
            local model <close> = open(kv_type)
            local s <close> = model:session()
            s:append(prompt)
            local r = s:gen { max_tokens = n, temperature = 0, ignore_eos = true }
            assert.equal(n, #r.tokens)
            local ids = table.move(prompt, 1, #prompt, 1, {})
            for _, id in ipairs(r.tokens) do ids[#ids + 1] = id end
            local found = surprise(ids)
            own = own or found
            print(("600 tokens with %s: %.3f nats a token"):format(kv_type, found))
            -- text that has decayed is worth 5 and more
            assert.is_true(found < own + (sanitized and 2 or 1), ("%s: %.3f nats a token, f16's own %.3f"):format(kv_type, found, own))
        end
    end)

    it("do not depend on the block size, to the bit", function()
        for _, kv_type in ipairs { "q8_0", "q4_0" } do
            local want = score("smollm2", 150, kv_type, 16)
            for _, size in ipairs { 1, 32 } do assert.equal(want, score("smollm2", 150, kv_type, size)) end
        end
    end)
end)

--- A GGUF file taken apart: head (version, keys), list of { name, dims, type, bytes }.
local sizes = { [0] = 1, 1, 2, 2, 4, 4, 4, 1, [10] = 8, [11] = 8, [12] = 8 }

local function skip_value(text, at, kind)
    if kind == 8 then return select(2, string.unpack("<s8", text, at)) end
    if kind ~= 9 then return at + sizes[kind] end
    local item, n
    item, n, at = string.unpack("<I4I8", text, at)
    if sizes[item] then return at + n * sizes[item] end
    for _ = 1, n do at = skip_value(text, at, item) end
    return at
end

local function take_apart(text)
    local n_tensors, n_keys, at = string.unpack("<I8I8", text, 9)
    local first = at
    for _ = 1, n_keys do
        local kind
        kind, at = string.unpack("<I4", text, select(2, string.unpack("<s8", text, at)))
        at = skip_value(text, at, kind)
    end
    local file = { keys = text:sub(first, at - 1), n_keys = n_keys }
    for i = 1, n_tensors do
        local t = { dims = {} }
        local n_dims
        t.name, n_dims, at = string.unpack("<s8I4", text, at)
        for d = 1, n_dims do t.dims[d], at = string.unpack("<I8", text, at) end
        t.type, t.offset, at = string.unpack("<I4I8", text, at)
        file[i] = t
    end
    local data = (at - 1 + 31) // 32 * 32
    table.sort(file, function(a, b) return a.offset < b.offset end)
    for i, t in ipairs(file) do
        t.bytes = text:sub(data + t.offset + 1, file[i + 1] and data + file[i + 1].offset or #text)
    end
    return file
end

local function put_together(path, file)
    local head = { "GGUF", string.pack("<I4I8I8", 3, #file, file.n_keys), file.keys }
    local offset = 0
    for _, t in ipairs(file) do
        head[#head + 1] = string.pack("<s8I4", t.name, #t.dims)
        for _, d in ipairs(t.dims) do head[#head + 1] = string.pack("<I8", d) end
        head[#head + 1] = string.pack("<I4I8", t.type, offset)
        offset = offset + (#t.bytes + 31) // 32 * 32
    end
    local text = table.concat(head)
    local f = assert(io.open(path, "wb"))
    f:write(text, ("\0"):rep(-#text % 32))
    for _, t in ipairs(file) do f:write(t.bytes, ("\0"):rep(-#t.bytes % 32)) end
    f:close()
end

--- Twice the float16 numbers that stand first in each block of `block` bytes, `n` of them.
local function double_scales(bytes, block, n)
    local parts, k = {}, 0
    for at = 1, #bytes - block + 1, block do
        for i = 0, n - 1 do
            local h = string.unpack("<I2", bytes, at + 2 * i)
            local e = h >> 10 & 31
            if e == 0 then h = (h & 0x8000) | (h & 0x3ff) << 1 else h = h + 0x400 end
            k = k + 1
            parts[k] = string.pack("<I2", h)
        end
        k = k + 1
        parts[k] = bytes:sub(at + 2 * n, at + block - 1)
    end
    return table.concat(parts)
end

local blocks = { [2] = { 18, 1 }, [3] = { 20, 2 }, [8] = { 34, 1 } } -- Q4_0, Q4_1, Q8_0: bytes, float16 numbers

describe("a copy of a real file", function() -- B51
    local path, file = os.tmpname(), nil
    local function of(name)
        for i, t in ipairs(file) do if t.name == name then return t, i end end
    end
    setup(function() file = take_apart(read(find "smollm2")) end)
    teardown(function() os.remove(path) end)

    local function logits(where)
        local model <close> = llm.load(where, { ctx = 64, kv = { blocks = 8 } })
        local s <close> = model:session()
        s:append(model:tokenize("The capital of France is", { bos = true }))
        local view, list = s:logits(), {}
        for id = 0, model.info.n_vocab - 1, 97 do list[#list + 1] = view:get(id) end
        return list
    end

    it("with an output head of twice the embedding has twice the logits", function()
        local embed = of "token_embd.weight"
        assert.is_nil(of "output.weight")
        local b = assert(blocks[embed.type], "the embedding's type is " .. embed.type)
        file[#file + 1] = { name = "output.weight", dims = embed.dims, type = embed.type,
            bytes = double_scales(embed.bytes, b[1], b[2]) }
        put_together(path, file)
        table.remove(file)
        local tied, own = logits(find "smollm2"), logits(path)
        for i = 1, #tied do assert.is_true(math.abs(own[i] - 2 * tied[i]) <= 1e-5 * math.abs(own[i]) + 1e-5) end
    end)

    it("with a tensor that nobody knows is refused by its name, unless asked", function()
        file[#file + 1] = { name = "blk.0.mystery.weight", dims = { 32 }, type = 0, bytes = ("\0"):rep(128) }
        put_together(path, file)
        table.remove(file)
        local ok, err = pcall(llm.load, path)
        assert.is_false(ok)
        assert.matches("blk.0.mystery.weight", tostring(err), 1, true)
        local model <close> = llm.load(path, { allow_unused = true, ctx = 64, kv = { blocks = 8 } })
        assert.equal("llama", model.info.arch)
    end)

    it("without one of its tensors is refused by its name", function()
        local t, at = of "blk.7.ffn_up.weight"
        table.remove(file, at)
        put_together(path, file)
        table.insert(file, at, t)
        local ok, err = pcall(llm.load, path)
        assert.is_false(ok)
        assert.matches("blk.7.ffn_up.weight", tostring(err), 1, true)
    end)
end)
