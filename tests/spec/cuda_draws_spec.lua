-- Tokens drawn on the device: those that the host draws from the same logits, whatever the chain, the mask and the
-- company. A function that does nothing in a chain keeps it on the host.
local gguf = require "llmrun.testing.gguf"
local emulated = dofile "tests/spec/cuda_support.lua"

-- Each chain many times on one sequence, drawn on the device and on the host, all in one batch; then what they gave.
local PROGRAM = [[
local llm = require "llmrun"
local m = llm.load(..., { device = "cuda:0", compute = "fast", ctx = 96, kv = { blocks = 512 }, max_seqs = 64 })
local function nothing() end
local chains = {
    { "greedy" },
    {},
    { { "temperature", 8.5 } },
    { { "temperature", 4 }, { "top_k", 20 } },
    { { "top_k", 200 }, { "temperature", 10 } },
    { { "temperature", 7.5 }, { "min_p", 0.02 }, { "top_k", 90 }, { "top_p", 0.9 } },
    { { "top_p", 0.97 }, { "temperature", 15 }, { "min_p", 0.5 } },
    { { "top_p", 0 } },
    { { "min_p", 0.3 } },
    { { "penalties", repetition = 1.4, window = 9 }, { "temperature", 6 } },
    { { "penalties", presence = 0.7, frequency = 0.4 }, { "top_k", 1 } },
    { { "logit_bias", { [7] = 4.5, [9] = -3, [11] = -math.huge } }, { "penalties", repetition = 0.8 }, { "top_p", 0.8 } },
    { { "ban", { 1, 2, 3, 65, 66 } }, { "temperature", 5.5 } },
    { { "temperature", 10 }, { "typical", 0.9 } }, -- not one of the device's
    { { "xtc", probability = 0.5, threshold = 0.01 }, { "temperature", 10 } },
}
local function host(chain)
    local c = { table.unpack(chain) }
    table.insert(c, 1, nothing)
    return c
end
local jobs = {}
for i, c in ipairs(chains) do
    for _, where in ipairs { "device", "host" } do
        jobs[#jobs + 1] = { i = i, where = where, sampler = where == "host" and host(c) or c }
    end
end
for _, where in ipairs { "device", "host" } do
    local c = { { "temperature", 8 }, { "top_p", 0.95 } }
    jobs[#jobs + 1] = { i = #chains + 1, where = where, grammar = true, sampler = where == "host" and host(c) or c }
end
local out = llm.map(jobs, function(job)
    local s <close> = m:session()
    s:append { 3, 50, 90, 17 + job.i }
    local r = s:gen { max_tokens = 14, seed = 5 + job.i, ignore_eos = true, logprobs = job.i % 3 * 3,
        sampler = llm.sampler(job.sampler), regex = job.grammar and "[a-z]{3} [0-9]{2,5}(x|yz)*" or nil }
    local l = {}
    for k, id in ipairs(r.tokens) do
        local t = r.logprobs and r.logprobs[k] or {}
        l[#l + 1] = ("%d:%a"):format(id, t.logprob or 0)
        for _, top in ipairs(t.top or {}) do l[#l + 1] = ("(%d:%a)"):format(top.id, top.logprob) end
    end
    return table.concat(l, " ")
end)
for k, job in ipairs(jobs) do print(job.where, job.i, out[k]) end
print("drawn", 0, m:metrics().device_draws)
]]

describe("tokens drawn on the device", function()
    if not emulated.built then
        pending "is not built here: no C++ compiler"
        return
    end
    local tiny = os.tmpname()
    setup(function() gguf.tiny(tiny) end)
    teardown(function() os.remove(tiny) end)

    it("are the host's", function()
        local got, drawn = { device = {}, host = {} }, nil
        for where, i, text in emulated.run_text({}, PROGRAM, tiny):gmatch "(%a+)\t(%d+)\t([^\n]*)\n" do
            if where == "drawn" then
                drawn = tonumber(text)
            else
                got[where][tonumber(i)] = text
            end
        end
        assert.equal(16, #got.host)
        local drawn_there = 0
        for i, want in ipairs(got.host) do
            assert.equal(want, got.device[i], "chain " .. i)
            local n = select(2, (" " .. want):gsub(" %d+:", ""))
            assert.is_true(n == 14 or i == 16 and n > 4)
            if i ~= 14 and i ~= 15 then drawn_there = drawn_there + n end
        end
        assert.equal(drawn_there, drawn) -- all of the device's chains were drawn there
        local different = {}
        for id in got.host[3]:gmatch "%f[%d](%d+):" do different[id] = true end
        assert.is_true(next(different, next(different, next(different))) ~= nil) -- a choice there was
    end)
end)
