-- A device that has no room: whatever is asked of it for the first, second, ... time is refused once, from loading a
-- model to drafts, forks and saved sessions; two processes on one device; a model that is larger than it. Errors have
-- numbers, nothing is left behind, and what comes next has the tokens that it always had.
local gguf = require "llmrun.testing.gguf"
local emulated = dofile "tests/spec/cuda_support.lua"

local few = os.getenv "LLMRUN_TEST_SANITIZE" ~= nil

-- The ledger of the emulated device, kernels/cuda/emu/emu_ledger.h, and a model on it.
local COMMON = [[
local llm = require "llmrun"
local path, name = ...
local file = assert(io.open(name, "r+b"))
file:setvbuf "no"
local function ledger()
    file:seek("set", 0)
    local _, asked, refused, live = string.unpack("<i8i8i8i8", file:read(32))
    return { asked = asked, refused = refused, live = live }
end
local function refuse(n)
    file:seek("set", 0)
    file:write(string.pack("<i8", n))
end
local function load(compute)
    return llm.load(path, { device = "cuda:0", ctx = 96, max_seqs = 16, max_batch_tokens = 16, compute = compute,
        kv = { blocks = 45, block_size = 4, prefix_cache = true } })
end
local function good(e)
    e = tostring(e)
    return e:find "cuda:0 is full: .*%d%.%d[ MiB)]* of %d+%.%d MiB are free" or
        e:find "cuda:0: the host has no %d+%.%d MiB of page%-locked memory" or e:find "cuda:0: .*%(%d+%)"
end
]]

local LOADS = COMMON .. [[
for _, compute in ipairs { "fast", "loose" } do
    local n, m = 0
    repeat
        n = n + 1
        refuse(n)
        local ok, e = pcall(load, compute)
        m = ok and e
        refuse(0)
        if not m then
            assert(good(e), e)
            assert(ledger().live == 0, ("%d are left behind %s"):format(ledger().live, e))
        end
    until m
    assert(ledger().live > 10)
    m:close()
    assert(ledger().live == 0, "after closing")
    print(compute, n)
end
]]

local STEPS = COMMON .. [[
local every = tonumber((select(3, ...)))
local failed, messages = 0, {}
local saved = name .. "-saved"
local function ids(i)
    local t = {}
    for k = 1, 5 + i * 3 do t[k] = (k * 37 + i * 91) % 200 + 3 end
    return t
end
local function tree() return { 7, 9, 11, parents = { 0, 0, 1 } } end

local function all(m)
    local function one(i)
        local out = {}
        local function try(f)
            local ok, v = pcall(f)
            if ok then
                out[#out + 1] = tostring(v)
            else
                failed = failed + 1
                messages[#messages + 1] = tostring(v)
                assert(good(v), v)
            end
        end
        local s <close> = m:session()
        s:append(ids(i))
        local function text(q, o)
            o.ignore_eos = true
            return table.concat(q:gen(o).tokens, ",")
        end
        try(function() return text(s, { max_tokens = 4, seed = i, temperature = 2 }) end)
        try(function()
            local f <close> = s:fork()
            f:append { 9, 9 }
            return text(f, { max_tokens = 3, temperature = 0 })
        end)
        if i == 1 then return table.concat(out, " ") end
        try(function()
            local q <close> = m:session()
            q:append(ids(7))
            return text(q, { max_tokens = 4, temperature = 0, speculate = tree })
        end)
        try(function()
            s:save(saved)
            local q <close> = m:restore(saved)
            return text(q, { max_tokens = 2, temperature = 0 })
        end)
        return table.concat(out, " ")
    end
    return table.concat(llm.map({ 1, 2 }, one), "|")
end

-- Tables of many that share blocks, and draws with much to say, outgrow what was made at the start.
local function grow(m)
    local s <close> = m:session()
    local bias = {}
    for i = 0, 249 do bias[i] = i % 7 / 8 end
    s:append(ids(27))
    local forks = { s:fork(12) }
    local out = llm.map(forks, function(f)
        local ok, r = pcall(f.gen, f, { max_tokens = 1, temperature = 0, ignore_eos = true, logit_bias = bias })
        f:close()
        if ok then return table.concat(r.tokens, ",") end
        failed, messages[#messages + 1] = failed + 1, tostring(r)
        return "failed"
    end)
    return table.concat(out, " ")
end
local function both(m) return all(m) .. "/" .. grow(m) end

local want
do
    local m <close> = load()
    want = both(m)
    assert(failed == 0, messages[1])
end
local n, tries, refused = 1 - every, 0, 0
repeat
    n, tries, failed = n + every, tries + 1, 0
    do
        local m <close> = load()
        local before = ledger().refused
        refuse(n)
        both(m)
        refuse(0)
        refused = ledger().refused - before
        assert(refused <= 1)
        failed = 0
        local got = both(m)
        assert(failed == 0 and got == want, ("%d: '%s', not '%s'"):format(n, got, want))
        m:check()
    end
    assert(ledger().live == 0)
until refused == 0
os.remove(saved)
print(tries, #messages, messages[1])
]]

local BESIDE = [[
local llm = require "llmrun"
local path, exe = ...
local function other()
    local p <close> = io.popen(("'%s' run -m '%s' --raw -p abc -n 4 --temperature 0 --device cuda:0 2>&1; echo \"|$?\""):format(exe, path))
    return (p:read "a":gsub("\n", " "))
end
local m = llm.load(path, { device = "cuda:0", ctx = 96, kv = { blocks = 32 } })
local function text()
    local s <close> = m:session()
    s:append { 5, 6, 7 }
    return table.concat(s:gen { max_tokens = 8, temperature = 0, ignore_eos = true }.tokens, ",")
end
local before = text()
print(other())
assert(text() == before)
m:close()
print(other())
]]

-- A pool of a share of what is there leaves room for what else is needed.
local SHARES = [[
local llm = require "llmrun"
local path, name, all = ...
for _, share in ipairs { 0.3, 0.97, "auto" } do
    local m <close> = llm.load(path, { device = "cuda:0", ctx = 96, max_seqs = 4, max_batch_tokens = 200,
        kv = { memory = tonumber(share) } })
    local f <close> = assert(io.open(name, "rb"))
    local used = string.unpack("<i8", f:read(56):sub(49))
    local s <close> = m:session()
    s:append { 5, 6, 7 }
    assert(#s:gen({ max_tokens = 3, temperature = 0, ignore_eos = true }).tokens == 3)
    print(used / tonumber(all))
end
]]

describe("a full device", function()
    if not emulated.built then
        pending "is not built here: no C++ compiler"
        return
    end
    local tiny, ledger, program = os.tmpname(), os.tmpname(), os.tmpname()
    setup(function() gguf.tiny(tiny) end)
    before_each(function()
        local f <close> = assert(io.open(ledger, "wb"))
        f:write(("\0"):rep(32))
    end)
    teardown(function()
        for _, p in ipairs { tiny, ledger, program } do os.remove(p) end
    end)

    it("is said while a model is loaded, and nothing is left behind", function()
        local out = emulated.run_text({ EMU_LEDGER = ledger }, LOADS, tiny, ledger)
        local fast, loose = out:match "^fast\t(%d+)\nloose\t(%d+)\n$"
        assert.is_true(tonumber(fast) > 30 and tonumber(loose) > tonumber(fast), out)
    end)

    it("fails the requests that want of it, and no later ones", function()
        local out = emulated.run_text({ EMU_LEDGER = ledger }, STEPS, tiny, ledger, few and "3" or "1")
        local tries, messages = out:match "^(%d+)\t(%d+)\t.*cuda:0"
        assert.is_true(tries and tonumber(tries) > (few and 2 or 7) and tonumber(messages) > 3, out)
    end)

    it("is full because of another process, which goes on", function()
        local out = emulated.run_text({ EMU_LEDGER = ledger, EMU_MEMORY = "1600000" }, BESIDE, tiny, emulated.exe)
        local refused, taken = out:match "^([^\n]*)\n([^\n]*)\n$"
        assert.is_truthy(refused, out)
        local free, all, own = refused:match("cuda:0 is full: .*, %d+ %(([%d.]+) MiB%) of ([%d.]+) MiB are free; "
            .. "this model has ([%d.]+) MiB")
        assert.matches("|1 $", refused)
        assert.equal("1.5", all)
        assert.is_true(free + own < 1.2, refused) -- the rest is the other's
        assert.matches("|0 $", taken)
    end)

    it("is shared by KV and activations", function()
        for _, bytes in ipairs { "4000000", "9000000" } do
            local out = emulated.run_text({ EMU_LEDGER = ledger, EMU_MEMORY = bytes }, SHARES, tiny, ledger, bytes)
            local some, most, auto = out:match "^(%S+)\n(%S+)\n(%S+)\n$"
            assert.is_true(tonumber(some) < tonumber(most) and tonumber(most) > 0.9, out)
            assert.is_true(tonumber(auto) <= tonumber(most), out)
        end
        local out, status = emulated.run({ EMU_MEMORY = "800000" }, "run", "-m", tiny, "--raw", "-p", "x", "-n", "1",
            "--device", "cuda:0")
        assert.equal(1, status, out)
        assert.matches("the device's free 0%.%d MiB hold no KV block of 16 tokens %(4096 bytes%) beside the activations of "
            .. "batches of 512 rows", out)
    end)

    it("is smaller than the model", function()
        for _, bytes in ipairs { 1, 60000, 200000, 300000 } do
            local out, status = emulated.run({ EMU_MEMORY = bytes }, "run", "-m", tiny, "--raw", "-p", "x", "-n", "1",
                "--device", "cuda:0")
            assert.equal(1, status, out)
            assert.matches("tensor '[%w._]+' of the model's 0%.3 MiB: cuda:0 is full: %d+ bytes %([%d.]+ MiB%) are needed "
                .. "for a weight, %d+ %([%d.]+ MiB%) of [%d.]+ MiB are free; this model has [%d.]+ MiB of weights", out)
        end
    end)
end)
