-- The pass of the next step, begun on the device before this step's tokens are dealt with: the tokens are those of
-- steps one after the other, whatever ends, is cancelled, forks, gives way or is stopped in between. A sampler with a
-- function keeps a request on the host, and its steps one after the other.
local gguf = require "llmrun.testing.gguf"
local emulated = dofile "tests/spec/cuda_support.lua"

local PROGRAM = [[
local llm = require "llmrun"
local path, how, blocks = ...
local m = llm.load(path, { device = "cuda:0", compute = "fast", ctx = 96, max_seqs = 16,
    kv = { blocks = tonumber(blocks), block_size = 4, prefix_cache = true } })
local chain = { { "temperature", 5 }, { "top_k", 60 } }
if how == "apart" then table.insert(chain, 1, function() end) end
local sampler = llm.sampler(chain)
m:use { token = function(_, r, id) return r.tag == 77 and id % 13 == 0 end }

local function begun(i)
    local ids = {}
    for k = 1, 2 + i % 5 do ids[k] = (k * 37 + i // 3 * 91) % 200 + 3 end
    local s = m:session()
    s:append(ids)
    return s
end
local function options(i, more)
    local o = { max_tokens = 8 + i * 2, seed = 40 + i, ignore_eos = true, sampler = sampler }
    for k, v in pairs(more or {}) do o[k] = v end
    return o
end
local function show(r) return r.finish_reason .. " " .. table.concat(r.tokens, ",") end

local kinds = {
    function(i) local s <close> = begun(i); return show(s:gen(options(i))) end,
    function(i) local s <close> = begun(i); return show(s:gen(options(i, { stop_ids = { 3, 17, 40, 41, 42, 90, 91, 120 } }))) end,
    function(i) local s <close> = begun(i); return show(s:gen(options(i, { stop = { "a", "Z", "%", "7", "k" } }))) end,
    function(i) local s <close> = begun(i); return show(s:gen(options(i, { tag = 77 }))) end,
    function(i) -- two ways from where it has come to
        local s <close> = begun(i)
        s:gen(options(i, { max_tokens = 6 }))
        local f <close> = s:fork()
        local r = llm.all { function() return show(s:gen(options(i))) end,
            function() return show(f:gen(options(i, { seed = 7 }))) end }
        return table.concat(r, " | ")
    end,
    function(i) -- what it had when it was cancelled is a beginning
        local s <close> = begun(i)
        local t = llm.spawn(function() return s:gen(options(i, { max_tokens = 70 })) end)
        llm.sleep(0.01 * (i % 3))
        t:cancel()
        return "cancelled"
    end,
    function(i)
        local s <close> = begun(i)
        local parts = {}
        for piece in s:stream(options(i)) do parts[#parts + 1] = piece end
        return (table.concat(parts):gsub("[^ -~]", function(c) return ("\\%d"):format(c:byte()) end))
    end,
    function(i) local s <close> = begun(i); return show(s:gen(options(i, { regex = "([a-z ]{1,9}|[0-9]+)*" }))) end,
}
local jobs = {}
for i = 1, 2 * #kinds do jobs[i] = i end
local out = llm.map(jobs, function(i) return kinds[(i - 1) % #kinds + 1](i) end)
for i, text in ipairs(out) do print(i, text) end
local c = m:metrics()
print("steps", c.steps .. " " .. c.ahead_taken .. " " .. c.ahead_lost .. " " .. c.device_draws .. " " .. c.preempt_recompute)
]]

describe("a pass begun ahead", function()
    if not emulated.built then
        pending "is not built here: no C++ compiler"
        return
    end
    local tiny = os.tmpname()
    setup(function() gguf.tiny(tiny) end)
    teardown(function() os.remove(tiny) end)

    local function run(how, blocks, lazy)
        local out = emulated.run_text({ EMU_LAZY = lazy and "1" or nil }, PROGRAM, tiny, how, blocks)
        local jobs, counts = {}, {}
        for i, text in out:gmatch "(%w+)\t([^\n]*)\n" do
            if i == "steps" then
                for n in text:gmatch "%d+" do counts[#counts + 1] = tonumber(n) end
            else
                jobs[tonumber(i)] = text
            end
        end
        assert.equal(16, #jobs, out)
        return jobs, counts
    end

    it("counts for nothing when something else comes", function()
        local text = [=[
local llm = require "llmrun"
local m = llm.load(..., { device = "cuda:0", compute = "fast", ctx = 96, kv = { blocks = 128, block_size = 4 } })
local function gen(s, n) return s:gen { max_tokens = n, ignore_eos = true, seed = 1 }.tokens end
local a, b = {}, {}
local long = llm.spawn(function()
    local s <close> = m:session()
    s:append { 5, 6, 7 }
    a = gen(s, 30)
end)
local s <close> = m:session()
s:append { 5, 6, 9 }
gen(s, 6)
s:append { 8, 9, 10, 11 }
b = gen(s, 6)
long:wait()
local c = m:metrics()
print(#a, #b, c.steps, c.ahead_taken, c.ahead_lost)]=]
        local out = emulated.run_text({}, text, tiny)
        assert.equal("30\t6\t30\t25\t1\n", out)
    end)

    it("changes no token", function()
        local want, apart = run("apart", 512)
        assert.equal(0, apart[2])
        assert.equal(0, apart[4])
        for _, blocks in ipairs { 512, 40 } do
            local got, n = run("together", blocks, blocks == 512)
            for i, text in ipairs(want) do assert.equal(text, got[i], ("job %d, %d blocks"):format(i, blocks)) end
            assert.is_true(n[2] > (blocks == 512 and n[1] // 2 or 0), table.concat(n, " ")) -- many steps were ahead
            assert.is_true(n[4] > 100)
            assert.is_true(blocks == 512 or n[5] > 0, "nobody gave way")
        end
    end)
end)
