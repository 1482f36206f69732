-- The CUDA backend under the whole engine, on the emulated device: tokens of the CPU, promise 1, what is said when there
-- is no device.
local gguf = require "llmrun.testing.gguf"

local emulated = dofile "tests/spec/cuda_support.lua"
local run = emulated.run

-- Five prompts, two of them alike at the beginning, with a fork; tokens, and logits behind them to the last bit.
local PROGRAM = [[
local llm = require "llmrun"
local path, device, compute, how, kv_type = ...
local together = how == "together"
local m = llm.load(path, { device = device, compute = compute, ctx = 128, chunk = together and 5 or 64,
    kv = { type = kv_type, block_size = together and 4 or 16, blocks = 128, prefix_cache = together } })
local function one(i)
    local ids = {}
    for k = 1, 3 + i * 5 do ids[k] = (k * 37 + i // 2 * 91) % 256 end
    local s <close> = m:session()
    s:append(ids)
    local first = s:gen { max_tokens = 3, temperature = 0, ignore_eos = true }.tokens
    local f <close> = s:fork()
    f:append { i }
    local l = f:logits():copy()
    local more = s:gen { max_tokens = 2, temperature = 0, ignore_eos = true }.tokens
    return ("%s %s %a %a %d"):format(table.concat(first, ","), table.concat(more, ","), l:get(3), l:get(200), l:argmax())
end
local out = together and llm.map({ 0, 1, 2, 3, 4 }, one) or {}
for i = 0, together and -1 or 4 do out[i + 1] = one(i) end
print(m.info.backend:match "^%a+")
print(table.concat(out, "\n"))
]]

describe("the CUDA backend, emulated", function()
    if not emulated.built then
        pending "is not built here: no C++ compiler"
        return
    end
    local tiny, small, program = os.tmpname(), os.tmpname(), os.tmpname()
    os.remove(program)
    program = program .. ".lua"

    setup(function()
        local f <close> = assert(io.open(program, "w"))
        f:write(PROGRAM)
        gguf.tiny(tiny)
        -- SmolLM2's shape, one layer, a small vocabulary; tensors of one shape hold the same numbers
        gguf.tiny(small, function(keys, tensors)
            local width, ff, heads, kv = 576, 1536, 9, 3
            local function set(name, v) keys.of["llama." .. name][2] = gguf.u32(v) end
            set("block_count", 1)
            set("embedding_length", width)
            set("feed_forward_length", ff)
            set("attention.head_count", heads)
            set("attention.head_count_kv", kv)
            local made = {}
            for i = #tensors, 1, -1 do
                local t = tensors[i]
                if t[1]:find "^blk%.1%." then table.remove(tensors, i) end
                local shape = {}
                for k, n in ipairs(t[2]) do shape[k] = n == 64 and width or n == 96 and ff or n == 32 and kv * 64 or n end
                local id, norm = table.concat(shape, "x"), t[1]:find "norm"
                local scale = t[1]:find "embd" and 1 or 0.05
                made[id] = made[id] or norm and string.pack("<f", 1):rep(shape[1])
                    or gguf.random(shape[1] * (shape[2] or 1), 7 + #id, scale)
                t[2], t[3] = shape, made[id]
            end
        end)
    end)
    teardown(function()
        for _, path in ipairs { tiny, small, program } do os.remove(path) end
    end)

    local function tokens(text)
        local list = {}
        for line in text:gmatch "[^\n]+" do list[#list + 1] = line:match "^([%d,]+ [%d,]+) " end
        return list
    end

    for _, name in ipairs { "tiny", "small" } do
        it("gives the CPU's tokens for a " .. name .. " model", function()
            local path = name == "tiny" and tiny or small
            local want, s1 = run({}, program, path, "cpu", "f32", "alone", "f32")
            assert.equal(0, s1, want)
            local got, s2 = run({}, program, path, "cuda:0", "f32", "together", "f32")
            assert.equal(0, s2, got)
            assert.matches("^cpu\n", want)
            assert.matches("^cuda\n", got)
            assert.equal(5, #tokens(want))
            assert.same(tokens(want), tokens(got))
        end)
    end

    it("gives the same bits alone and in any company", function()
        for _, kv_type in ipairs { "f16", "q8_0", "q4_0" } do
            local want, s1 = run({}, program, tiny, "cuda:0", "fast", "alone", kv_type)
            assert.equal(0, s1, want)
            local got, s2 = run({ LLMRUN_DEVICE = "cuda:0" }, program, tiny, "auto", "fast", "together", kv_type)
            assert.equal(0, s2, got)
            assert.equal(want, got)
        end
    end)

    it("cuts and joins rows as the CPU does", function()
        local parts = program:gsub("%.lua$", "-parts.lua")
        local f <close> = assert(io.open(parts, "w"))
        f:write [[
local llm = require "llmrun"
local function arch(g, hp)
  local x = g:embed "token_embd"
  for l = 0, hp.layers - 1 do
    local b = g:name("blk", l)
    local q, k, v = g:qkv(g:rms_norm(x, b .. ".attn_norm", hp.eps), b, hp)
    local n = hp.head_dim // 2
    local function swap(t, heads) -- halves of each head change places
      return g:concat(g:slice(t, heads, n, n), g:slice(t, heads, 0, n), heads, n)
    end
    local shared = g:slice(k, 1, 0, n) -- of the first head, for all
    q = swap(g:rotate(q, hp, hp.heads, true), hp.heads)
    k = g:concat(g:slice(swap(k, hp.kv_heads), hp.kv_heads, 0, n), shared, hp.kv_heads, n)
    v = g:concat(g:slice(v, hp.kv_heads, 0, n), nil, hp.kv_heads, n)
    local a = g:attention(q, k, v, { heads = hp.heads, kv_heads = hp.kv_heads, head_dim = hp.head_dim })
    x = x + g:linear(a, b .. ".attn_output", { out = hp.width }) * g:act(g:slice(x, 1, 5, 1), "sigmoid")
    local h = g:rms_norm(x, b .. ".ffn_norm", hp.eps)
    x = x + g:linear(g:glu(g:linear(h, b .. ".ffn_gate"), g:linear(h, b .. ".ffn_up"), "swiglu_clamp"), b .. ".ffn_down")
  end
  return g:head(g:rms_norm(x, "output_norm", hp.eps))
end
local m <close> = llm.load(..., { device = select(2, ...), compute = "f32", ctx = 64, arch = arch, kv = { type = "f32" } })
local s <close> = m:session()
s:append { 7, 9, 200, 30, 31, 32 }
local l = s:logits()
for i = 0, #l - 1 do print(l:get(i)) end]]
        f:close()
        local want, s1 = run({}, parts, tiny, "cpu")
        local got, s2 = run({}, parts, tiny, "cuda:0")
        os.remove(parts)
        assert.equal(0, s1, want)
        assert.equal(0, s2, got)
        local a, b = {}, {}
        for v in want:gmatch "%S+" do a[#a + 1] = tonumber(v) end
        for v in got:gmatch "%S+" do b[#b + 1] = tonumber(v) end
        assert.is_true(#a > 200 and #a == #b)
        for i, v in ipairs(a) do assert.near(v, b[i], 1e-4) end
    end)

    it("gives the CPU's tokens for every architecture with experts", function()
        local script = program:gsub("%.lua$", "-experts.lua")
        local f <close> = assert(io.open(script, "w"))
        f:write [[
local llm = require "llmrun"
local support = dofile "tests/spec/arch_support.lua"
local path = os.tmpname()
local function run(case, device, compute)
  local m <close> = llm.load(path, { device = device, compute = compute, threads = 1, ctx = case.ctx, kv = { block_size = 4,
      type = compute == "f32" and "f32" or "f16" } })
  local s <close> = m:session()
  s:append(case.prompt)
  local l = s:logits():copy()
  return l, table.concat(s:gen { max_tokens = 6, temperature = 0, ignore_eos = true }.tokens, ",")
end
for _, name in ipairs { "mixtral", "qwen2moe", "qwen3moe", "granitemoe", "gpt-oss", "deepseek_v2", "deepseek_v3" } do
  local case = support.case(name)
  support.write(path, case)
  local logits, tokens = run(case, "cpu", "f32")
  for compute, limit in pairs { f32 = 1e-4, fast = 3e-2, loose = 3e-2 } do
    local l, t = run(case, "cuda:0", compute)
    local off = 0
    for i = 0, #l - 1 do off = math.max(off, math.abs(l:get(i) - logits:get(i))) end
    if t ~= tokens or not (off < limit) then print(name, compute, off, tokens, t) end
  end
end
os.remove(path)
print "all"]]
        f:close()
        local out, status = run({}, script)
        os.remove(script)
        assert.equal(0, status, out)
        assert.equal("all\n", out)
    end)

    it("has drafts of parts of the model, and they change no bit", function()
        for file, filter in pairs { spec_eagle = "gets the features", spec_models = "heads are the same" } do
            local out, status = run({ LLMRUN_DEVICE = "cuda:0" }, "test", "--output=TAP", "--filter=" .. filter,
                "tests/spec/" .. file .. "_spec.lua")
            assert.equal(0, status, out)
            assert.matches("\nok 1 ", "\n" .. out)
            assert.not_matches("not ok", out)
        end
    end)

    it("says what is missing", function()
        local function fails(pattern, variables, device)
            local out, status = run(variables, "run", "-m", tiny, "--raw", "-p", "x", "-n", "1", "--device", device)
            assert.equal(1, status, out)
            assert.matches(pattern, out)
            assert.matches("^llmrun run: ", out)
        end
        fails("there is no cuda:3: this process sees 2 GPUs, the last is cuda:1", { EMU_DEVICES = "2" }, "cuda:3")
        fails("the NVIDIA driver finds no GPU", { EMU_DEVICES = "0" }, "cuda:0")
        fails("cuda:0 is full: %d+ bytes .* are needed for .* are free", { EMU_MEMORY = "100000" }, "cuda:0")
        fails("device 'cuda:one' is not known", {}, "cuda:one")
        fails("there is no file /no/such%.so", { LLMRUN_CUDA_PLUGIN = "/no/such.so" }, "cuda:0")
        local other = program .. ".so" -- a file that is no plugin
        local f = assert(io.open(other, "w"))
        f:write "nothing"
        f:close()
        fails("can't be opened", { LLMRUN_CUDA_PLUGIN = other }, "cuda:0")
        os.remove(other)
    end)

    it("falls back to the CPU only if asked", function()
        local out, status = run({ EMU_DEVICES = "0" }, program, tiny, "auto", "fast", "alone", "f16")
        assert.equal(0, status, out)
        assert.matches("^cpu\n", out)
        out, status = run({ LLMRUN_DEVICE = "cpu" }, program, tiny, "auto", "fast", "alone", "f16")
        assert.equal(0, status, out)
        assert.matches("^cpu\n", out)
    end)
end)
