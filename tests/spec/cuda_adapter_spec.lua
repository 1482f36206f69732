-- Low-rank adapters on the emulated device: the CPU's tokens, a row's bits in any company, memory that is counted, given
-- back and refused.
local gguf = require "llmrun.testing.gguf"
local emulated = dofile "tests/spec/cuda_support.lua"
local shell = dofile "tests/spec/shell_support.lua"

-- Six sequences, with one of two adapters or none; prompts of few rows and of many.
local RUN = [[
local llm = require "llmrun"
local model, one, two, device, compute, how = ...
local m <close> = llm.load(model, { device = device, compute = compute, threads = 1, ctx = 128, chunk = 100,
    max_batch_tokens = how == "together" and 200 or 100,
    kv = { type = compute == "f32" and "f32" or "f16", blocks = 64, prefix_cache = false } })
local a <close> = m:adapter(one)
local b <close> = m:adapter(two)
local which, lengths = { false, a, b, a, false, b }, { 9, 70, 3, 12, 20, 1 }
local function gen(i)
    local s <close> = m:session { adapter = which[i] or nil }
    local ids = {}
    for k = 1, lengths[i] do ids[k] = (k * 37 + i * 91) % 256 end
    s:append(ids)
    local l, values = s:logits(), {}
    for k = 0, 255 do values[k + 1] = ("%a"):format(l:get(k)) end
    local tokens = s:gen({ max_tokens = 3, temperature = 0, ignore_eos = true }).tokens
    return table.concat(tokens, ",") .. " " .. table.concat(values, " ")
end
local out = how == "together" and llm.map({ 1, 2, 3, 4, 5, 6 }, gen) or {}
for i = 1, how == "together" and 0 or 6 do out[i] = gen(i) end
print(table.concat(out, "\n"))
]]

local FULL = [[
local llm = require "llmrun"
local path, name, adapter = ...
local file = assert(io.open(name, "r+b"))
file:setvbuf "no"
local function ledger() -- kernels/cuda/emu/emu_ledger.h
    file:seek("set", 0)
    local _, _, _, live, _, _, used = string.unpack("<i8i8i8i8i8i8i8", file:read(56))
    return live, used
end
local function refuse(n)
    file:seek("set", 0)
    file:write(string.pack("<i8", n))
end
local m = llm.load(path, { device = "cuda:0", ctx = 64, kv = { blocks = 16, block_size = 4 } })
local function tokens(a)
    m:drop_cached()
    local s <close> = m:session { adapter = a }
    s:append { 5, 6, 7, 8 }
    local tokens = s:gen({ max_tokens = 6, temperature = 0, ignore_eos = true }).tokens
    return ("%s %a"):format(table.concat(tokens, ","), s:logits():get(3))
end
local function until_it_works(f)
    local n, ok, r, said = 0
    repeat
        n = n + 1
        refuse(n)
        ok, r = pcall(f)
        refuse(0)
        if not ok then
            said = tostring(r)
            assert(said:find "cuda:0 is full: %d+ bytes %([%d.]+ MiB%) are needed for [%l ]+, %d+ %([%d.]+ MiB%) of", said)
        end
    until ok
    return r, n, said
end
local plain = tokens()
local live, used = ledger()
local a, tries, said = until_it_works(function()
    local ok, r = pcall(m.adapter, m, adapter)
    local now, bytes = ledger()
    assert(ok or now == live and bytes == used, "left behind")
    return ok and r or error(r)
end)
assert(tries == 2 and said:find "needed for an adapter", said)
local now, bytes = ledger()
assert(now == live + 1 and bytes - used > 15000, ("%d %d"):format(now - live, bytes - used))
local with, again, why = until_it_works(function() return tokens(a) end)
assert(again > 1 and why:find "needed for rows with adapters", why)
assert(with ~= plain and tokens(a) == with and tokens() == plain)
local live2, used2 = ledger()
a:close()
local live3, used3 = ledger()
assert(live2 - live3 == 1 and used2 - used3 == bytes - used)
m:close()
assert(ledger() == 0, "after closing")
print "good"
]]

describe("adapters on the CUDA backend, emulated", function()
    if not emulated.built then
        pending "is not built here: no C++ compiler"
        return
    end
    local folder
    local function path(name) return folder:at(name) end

    -- rank: of all products that are named
    local function adapter(name, rank, products)
        local tensors = {}
        for i, p in ipairs(products) do
            local k, n = p[2], p[3]
            tensors[#tensors + 1] = { p[1] .. ".weight.lora_a", { k, rank }, gguf.random(k * rank, i + rank, 0.2) }
            tensors[#tensors + 1] = { p[1] .. ".weight.lora_b", { rank, n }, gguf.random(rank * n, i + 2 * rank, 0.1) }
        end
        gguf.write(path(name), {
            { "general.architecture", gguf.string "llama" }, { "general.type", gguf.string "adapter" },
            { "adapter.type", gguf.string "lora" }, { "adapter.lora.alpha", gguf.f32(2 * rank) },
        }, tensors)
    end

    setup(function()
        folder = shell.folder()
        gguf.tiny(path "tiny")
        adapter("one", 4, {
            { "blk.0.attn_q", 64, 64 }, { "blk.0.attn_k", 64, 32 }, { "blk.0.attn_v", 64, 32 }, { "blk.0.attn_output", 64, 64 },
            { "blk.0.ffn_gate", 64, 96 }, { "blk.0.ffn_up", 64, 96 }, { "blk.0.ffn_down", 96, 64 }, { "blk.1.ffn_gate", 64, 96 },
        })
        adapter("two", 17, { { "blk.0.ffn_up", 64, 96 }, { "blk.1.attn_v", 64, 32 }, { "blk.1.ffn_down", 96, 64 } })
    end)
    teardown(function() folder:remove() end)

    local function run(device, compute, how)
        return emulated.run_text({}, RUN, path "tiny", path "one", path "two", device, compute, how)
    end
    -- Tokens, and the logits before them, of each sequence.
    local function parsed(text)
        local list = {}
        for tokens, values in text:gmatch "([%d,]+) ([^\n]+)\n" do
            local l = {}
            for v in values:gmatch "%S+" do l[#l + 1] = tonumber(v) end
            list[#list + 1] = { tokens = tokens, logits = l }
        end
        return list
    end

    it("give the CPU's tokens, in each arithmetic, and change no bit of other rows, nor of their own in company", function()
        local want = parsed(run("cpu", "f32", "alone"))
        assert.equal(6, #want)
        for compute, limit in pairs { f32 = 1e-4, fast = 3e-2, loose = 0.2 } do
            local text = run("cuda:0", compute, "together")
            local got = parsed(text)
            for i, w in ipairs(want) do
                for k, v in ipairs(w.logits) do assert.near(v, got[i].logits[k], limit) end
                assert.equal(w.tokens, got[i].tokens)
            end
            if compute == "fast" then assert.equal(run("cuda:0", "fast", "alone"), text) end
        end
    end)

    it("do what adapters do elsewhere", function()
        for _, filter in ipairs { "apart, on weights in blocks", "is there for drafts", "on qwen2" } do
            local out, status = emulated.run({ LLMRUN_DEVICE = "cuda:0" }, "test", "--output=TAP", "--filter=" .. filter,
                "tests/spec/adapter_spec.lua")
            assert.equal(0, status, out)
            assert.matches("\nok 1 ", "\n" .. out)
            assert.not_matches("not ok", out)
        end
    end)

    it("are counted and given back, and a device without room for them says so", function()
        local ledger = path "ledger"
        local f <close> = assert(io.open(ledger, "wb"))
        f:write(("\0"):rep(32))
        f:flush()
        assert.equal("good\n", emulated.run_text({ EMU_LEDGER = ledger }, FULL, path "tiny", ledger, path "one"))
    end)
end)
