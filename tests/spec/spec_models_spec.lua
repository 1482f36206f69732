-- Drafts by the model itself: its first layers. The text is that of no speculation, to the last bit, on real kernels.
local llm = require "llmrun"
local drafts = dofile "tests/spec/draft_support.lua"
local gguf = require "llmrun.testing.gguf"

local slow = os.getenv "LLMRUN_TEST_SANITIZE" ~= nil

local run, both = drafts.run, drafts.both

local raises = dofile("tests/spec/program_support.lua").raises

describe("early exit", function()
    local path, idle = os.tmpname(), os.tmpname()
    -- idle: the second layer adds nothing, so the first one knows all
    setup(function()
        gguf.tiny(path, function() end)
        gguf.tiny(idle, function(_, tensors)
            for _, name in ipairs { "attn_output", "ffn_down" } do
                local t = tensors.of["blk.1." .. name .. ".weight"]
                t[3] = ("\0"):rep(#t[3])
            end
        end)
    end)
    teardown(function()
        os.remove(path)
        os.remove(idle)
    end)

    it("drafts what the layers say, and changes no bit", function()
        for _, name in ipairs { path, idle } do
            local m <close> = llm.load(name, { threads = 1, ctx = 256, kv = { block_size = 5, blocks = 128 } })
            local accepted, drafted = 0, 0
            for seed = 1, slow and 2 or 4 do
                for _, how in ipairs { { fixed = true, k = 4 }, { fixed = true, k = 3, branches = 4 }, {},
                    { fixed = true, k = 4, accept = seed == 1 and "distribution" or nil } } do
                    how.method, how.layers = "early_exit", 1
                    local o = { max_tokens = slow and 20 or 40, temperature = (seed - 1) / 2, seed = seed, logprobs = 1,
                        ignore_eos = true }
                    local r = both(m, o, how)
                    if how.fixed and not how.branches then
                        accepted, drafted = accepted + r.speculation.accepted, drafted + r.speculation.drafted
                    end
                end
            end
            if name == idle then assert.is_true(accepted > 0.9 * drafted, ("%d of %d"):format(accepted, drafted)) end
        end
    end)

    it("is the same in a batch, in forks, when it is preempted, and under a grammar", function()
        local m <close> = llm.load(idle, { threads = 1, ctx = 128, max_seqs = 3, kv = { block_size = 4, blocks = 70 } })
        local function all(how) return drafts.crowd(m, how) end
        assert.same(all(false), all { method = "early_exit", layers = 1, fixed = true, k = 4 })
        assert.same(all(false), all { method = "early_exit", layers = 1, fixed = true, k = 3, branches = 3 })
        assert.same(all(false), all(function() return 3, "early_exit" end))
        m:check()
    end)

    it("refuses what can't be", function()
        local m <close> = llm.load(path, { threads = 1, ctx = 64 })
        for _, layers in ipairs { -1, 2, 99 } do
            raises(("%d layers are not in 1..1"):format(layers), function()
                run(m, { max_tokens = 3, speculate = { method = "early_exit", layers = layers } })
            end)
        end
        raises("needs layers", function() run(m, { speculate = "early_exit" }) end)
        local scripted <close> = llm.scripted { next = function() return 65 end }
        raises("no layers to leave early", function()
            run(scripted, { max_tokens = 3, speculate = { method = "early_exit", layers = 1 } })
        end)
    end)
end)

describe("heads", function()
    local path, heads, odd = os.tmpname(), os.tmpname(), os.tmpname()
    local WIDTH, VOCAB = 64, 256

    -- A safetensors file of float tensors: { name, { n, k }, bytes }.
    local function write(file, tensors)
        local header, data, at = {}, {}, 0
        for _, t in ipairs(tensors) do
            header[#header + 1] = ('"%s":{"dtype":"F32","shape":[%s],"data_offsets":[%d,%d]}'):format(t[1],
                table.concat(t[2], ","), at, at + #t[3])
            data[#data + 1], at = t[3], at + #t[3]
        end
        local text = "{" .. table.concat(header, ",") .. "}"
        local f = assert(io.open(file, "wb"))
        f:write(string.pack("<s8", text .. (" "):rep(-#text % 8)), table.concat(data))
        f:close()
    end

    local function head(i, seed, own)
        local list = {
            { i .. ".0.linear.weight", { WIDTH, WIDTH }, gguf.random(WIDTH * WIDTH, seed, 0.2) },
            { i .. ".0.linear.bias", { WIDTH }, gguf.random(WIDTH, seed + 1, 0.2) },
        }
        if own then list[3] = { i .. ".1.weight", { VOCAB, WIDTH }, gguf.random(VOCAB * WIDTH, seed + 2, 0.5) } end
        return list
    end

    local function all_of(...)
        local list = {}
        for _, l in ipairs { ... } do table.move(l, 1, #l, #list + 1, list) end
        return list
    end

    setup(function()
        gguf.tiny(path, function() end)
        write(heads, all_of(head(0, 11, true), head(1, 21, false), head(2, 31, false), head(3, 41, true)))
    end)
    teardown(function() for _, p in ipairs { path, heads, odd } do os.remove(p) end end)

    local function open(more)
        local o = { threads = 1, ctx = 256, max_seqs = 3, speculate = { method = "off", heads = heads },
            kv = { block_size = 5, blocks = 160 } }
        for k, v in pairs(more or {}) do o[k] = v end
        return llm.load(path, o)
    end

    it("guess from the model's row, and change no bit", function()
        local m <close> = open()
        local drafted = 0
        for seed = 1, slow and 2 or 5 do
            for _, how in ipairs { { fixed = true, k = 24 }, { fixed = true, k = 3, branches = 1 }, { branches = 8 } } do
                how.method = "heads"
                local r = both(m, { max_tokens = slow and 20 or 40, temperature = (seed - 1) / 2, seed = seed, logprobs = 1,
                    ignore_eos = true }, how)
                drafted = drafted + (r.speculation and r.speculation.drafted or 0)
            end
        end
        assert.is_true(drafted > 100)
        -- random heads are never right, so that is noticed, and they are asked seldom (but for odd times of steps)
        local fewest = 120
        for _ = 1, 8 do
            local r = both(m, { max_tokens = 120, temperature = 0, ignore_eos = true }, "heads")
            fewest = math.min(fewest, r.speculation and r.speculation.drafts or 0)
            if fewest < 80 then break end
        end
        assert.is_true(fewest < 80, tostring(fewest))
        both(m, { regex = "[a-f]{20}", temperature = 1, seed = 3, max_tokens = 40 },
            { method = "heads", fixed = true, k = 24 })
        both(m, { max_tokens = 30, temperature = 0 }, function(ctx) return ctx.n_generated % 2 == 0 and 9 or false, "heads" end)
    end)

    it("are the same in a batch, in forks, and when it is preempted", function()
        local m <close> = open { ctx = 128, max_seqs = 3, kv = { block_size = 4, blocks = 90 } }
        assert.same(drafts.crowd(m, false), drafts.crowd(m, { method = "heads", fixed = true, k = 12 }))
        m:check()
    end)

    it("are refused where they do not fit", function()
        local plain <close> = llm.load(path, { threads = 1, ctx = 64 })
        raises("without heads", function() run(plain, { max_tokens = 3, speculate = "heads" }) end)
        raises("needs heads", function() llm.load(path, { speculate = "heads" }) end)
        local function with(tensors)
            write(odd, tensors)
            return function() llm.load(path, { threads = 1, ctx = 64, speculate = { heads = odd } }) end
        end
        raises("no heads", with(all_of()))
        raises("64 x 64 expected", with { { "0.0.linear.weight", { 32, 64 }, gguf.random(32 * 64, 1, 1) } })
        raises("256 x 64 expected", with { { "0.0.weight", { 64, 64 }, gguf.random(64 * 64, 1, 1) } })
        raises("hidden rows", function() llm.scripted { next = print, speculate = { heads = heads } } end)
        raises("cannot open", function() llm.load(path, { threads = 1, ctx = 64, speculate = { heads = "/nowhere/at/all" } }) end)
    end)
end)
