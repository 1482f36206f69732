--- llmrun quantize: types of mixes, files that load and answer alike, and nothing left behind when it fails.

local core = require "llmrun.core"
local llm = require "llmrun"
local quantize = require "llmrun.quantize"
local gguf = require "llmrun.testing.gguf"
local shell = dofile "tests/spec/shell_support.lua"

local folder

local function path(name) return folder:at(name) end

local function exists(name) return core.stat(path(name)) ~= nil end

local function run(line) return folder:llmrun("quantize " .. line) end

local function types_of(name)
    local file <close> = assert(core.gguf_open(path(name)))
    local by = {}
    for _, t in ipairs(file:tensors()) do by[t.name] = t.type end
    return by, file:get "general.file_type"
end

-- Log-probabilities of a fixed text.
local function scores(name)
    local m <close> = llm.load(path(name), { ctx = 128, compute = "f32", threads = 1 })
    local s <close> = m:session()
    s:append(m:tokenize "In 2026 the quick brown fox jumped over 13 lazy dogs.")
    local list = {}
    for i, t in ipairs(s:score {}) do list[i] = t.logprob or t end
    return list
end

-- A description of a model as quantize.plan asks for it.
local function described(layers, shapes, keys)
    local list = {}
    for l = 0, layers - 1 do
        for name, shape in pairs(shapes) do
            list[#list + 1] = { name = ("blk.%d.%s.weight"):format(l, name), shape = shape, type = "F16", bytes = 2 }
        end
    end
    for _, n in ipairs { "token_embd", "output" } do
        list[#list + 1] = { name = n .. ".weight", shape = { 512, 1000 }, type = "F16", bytes = 2 }
    end
    keys["general.architecture"], keys["llama.block_count"] = "llama", layers
    return { tensors = function() return list end, get = function(_, k) return keys[k] end }
end

local function planned(file, mix, opts)
    local by = {}
    for _, t in ipairs(quantize.plan(file, mix, opts or {})) do by[t.name] = t.to end
    return by
end

describe("llmrun quantize", function()
    setup(function()
        folder = shell.folder()
        gguf.tiny(path "tiny.gguf")
    end)
    teardown(function() folder:remove() end)

    it("gives tensors the types of a mix", function()
        local shapes = { attn_q = { 512, 512 }, attn_v = { 512, 128 }, attn_output = { 512, 512 }, ffn_up = { 512, 2048 },
            ffn_down = { 2048, 512 }, attn_norm = { 512 }, ffn_gate_inp = { 512, 8 } }
        local file = described(16, shapes, { ["llama.attention.head_count"] = 8, ["llama.attention.head_count_kv"] = 2 })
        local m = planned(file, "Q4_K_M")
        assert.equal("Q6_K", m["output.weight"])
        assert.equal("Q4_K", m["token_embd.weight"])
        assert.equal("F32", m["blk.3.attn_norm.weight"])
        assert.equal("F16", m["blk.3.ffn_gate_inp.weight"])
        local six = {}
        for l = 0, 15 do
            assert.equal("Q4_K", m[("blk.%d.attn_q.weight"):format(l)])
            assert.equal(m[("blk.%d.attn_v.weight"):format(l)], m[("blk.%d.ffn_down.weight"):format(l)])
            if m[("blk.%d.ffn_down.weight"):format(l)] == "Q6_K" then six[#six + 1] = l end
        end
        assert.same({ 0, 1, 4, 7, 10, 13, 14, 15 }, six)
        m = planned(file, "Q3_K_M")
        assert.equal("Q5_K", m["blk.1.attn_v.weight"])
        assert.equal("Q4_K", m["blk.2.attn_v.weight"])
        assert.equal("Q4_K", m["blk.2.attn_output.weight"])
        assert.equal("Q3_K", m["blk.2.attn_q.weight"])
        assert.equal("Q4_K", planned(file, "Q4_K_M", { pure = true })["blk.0.ffn_down.weight"])
        assert.equal("Q8_0", planned(file, "Q4_K_M", { overrides = { { "ffn_up", "Q8_0" } } })["blk.9.ffn_up.weight"])
        assert.equal("F16", planned(file, "Q4_K_M", { output = "F16" })["output.weight"])
    end)

    it("falls back where rows don't divide into blocks", function()
        local file = described(2, { ffn_up = { 96, 64 }, ffn_down = { 40, 64 } }, {})
        local m = planned(file, "Q4_K_M")
        assert.equal("Q5_0", m["blk.0.ffn_up.weight"])
        assert.equal("F16", m["blk.0.ffn_down.weight"])
        assert.equal("IQ4_NL", planned(file, "Q3_K_S")["blk.0.ffn_up.weight"])
        assert.equal("Q8_0", planned(file, "Q6_K")["blk.0.ffn_up.weight"])
    end)

    it("writes files that load and score alike", function()
        local want = scores "tiny.gguf"
        -- mean differences; twice what was measured
        local limits = { F32 = 0, F16 = 0.006, BF16 = 0.05, Q8_0 = 0.12, Q6_K = 0.12, Q5_1 = 0.7, Q5_K_M = 0.7,
            Q4_K_M = 0.8, Q4_0 = 1.7, Q4_1 = 1.7, IQ4_NL = 1.4, MXFP4 = 2.2 }
        for mix, limit in pairs(limits) do
            local out, err, status = run(("tiny.gguf out.gguf --type %s"):format(mix:lower()))
            assert.equal("", err)
            assert.equal(0, status)
            assert.matches("^out.gguf: .*\n" .. mix .. ": weights ", out)
            local off, got = 0, scores "out.gguf"
            assert.equal(#want, #got)
            for i, v in ipairs(got) do off = off + math.abs(v - want[i]) / #want end
            if off > limit then error(("%s: off by %.3f"):format(mix, off)) end
            if limit > 0 then assert.is_true(off > 0) end
        end
        local by, file_type = types_of "out.gguf"
        assert.is_number(file_type)
        assert.equal("F32", by["blk.0.attn_norm.weight"])
    end)

    it("is the same for any number of threads", function()
        local texts = {}
        for i, n in ipairs { 1, 2, 3 } do
            run(("tiny.gguf out.gguf --type Q4_1 -q -t %d"):format(n))
            local f <close> = assert(io.open(path "out.gguf", "rb"))
            texts[i] = f:read "a"
        end
        assert.is_true(#texts[1] > 10000 and texts[1] == texts[2] and texts[2] == texts[3])
    end)

    it("weighs errors by importances", function()
        local name = "blk.1.ffn_down.weight"
        -- sums of squares of a thousandth, but for input 5
        local sums = {}
        for i = 1, 96 do sums[i] = string.pack("<f", i == 6 and 1000 or 1) end
        gguf.write(path "imatrix", { { "general.type", gguf.string "imatrix" } }, {
            { name .. ".in_sum2", { 96, 1 }, table.concat(sums) }, { name .. ".counts", { 1, 1 }, string.pack("<f", 10) },
        })
        local function error_of(file)
            run(("%s back.gguf --type F32 --requantize -q"):format(file))
            local a <close> = assert(core.gguf_open(path "tiny.gguf"))
            local b <close> = assert(core.gguf_open(path "back.gguf"))
            local x, y, sum = a:bytes(name), b:bytes(name), 0
            for row = 0, 63 do
                local at = 4 * (96 * row + 5) + 1
                sum = sum + (("<f"):unpack(x, at) - ("<f"):unpack(y, at)) ^ 2
            end
            return sum
        end
        run "tiny.gguf out.gguf --type Q4_0 -q"
        local without = error_of "out.gguf"
        local out, err = run "tiny.gguf out.gguf --type Q4_0 --imatrix imatrix"
        assert.equal("", err)
        assert.matches("Q4_0", out)
        assert.is_true(error_of "out.gguf" < 0.3 * without)
    end)

    it("refuses what makes no sense, and says what would", function()
        local cases = {
            ["tiny.gguf"] = "two files are needed",
            ["tiny.gguf out.gguf"] = "no type; give one with %-%-type",
            ["tiny.gguf out.gguf --type Q4_K_X"] = "'Q4_K_X' is not known; there are .*Q4_K_M",
            ["none.gguf out.gguf --type Q4_0"] = "no file 'none.gguf'",
            ["tiny.gguf . --type Q4_0"] = "%. is a folder",
            ["tiny.gguf /no/such/folder/x --type Q4_0"] = "/no/such/folder/x",
            ["tiny.gguf out2.gguf --type Q4_0 --override ffn"] = "NAME=TYPE expected, got 'ffn'",
            ["tiny.gguf out2.gguf --type Q4_0 --override 'ffn=Q9'"] = "'Q9' is no type of tensors",
            ["tiny.gguf out2.gguf --type Q4_0 --override '[=Q8_0'"] = "'%[' is no Lua pattern",
            ["tiny.gguf out2.gguf --type Q4_0 --output-type I8"] = "I8 is no type of weights",
            ["tiny.gguf out2.gguf --type Q4_0 --imatrix tiny.gguf"] = "general.type is 'nil', not 'imatrix'",
            ["q4.gguf out2.gguf --type Q8_0"] = "is quantized already %(Q4_0%)",
        }
        run "tiny.gguf q4.gguf --type Q4_0 -q"
        for line, want in pairs(cases) do
            local _, err, status = run(line)
            assert.matches(want, err)
            assert.not_matches("traceback", err)
            assert.is_true(status ~= 0, line)
        end
        assert.is_false(exists "out2.gguf")
        assert.equal(0, select(3, run "q4.gguf out3.gguf --type Q8_0 --requantize"))
    end)

    it("leaves the old file where it fails, and nothing beside it", function()
        gguf.tiny(path "broken.gguf", function(_, tensors)
            local t = tensors.of["blk.1.ffn_up.weight"]
            t[3] = t[3]:sub(1, -5) .. string.pack("<f", 0 / 0)
        end)
        run "tiny.gguf old.gguf --type Q8_0 -q"
        local before = { core.stat(path "old.gguf") }
        local _, err, status = run "broken.gguf old.gguf --type Q4_0"
        assert.equal(1, status)
        assert.matches("tensor 'blk.1.ffn_up.weight' has values that Q4_0 can't hold", err)
        assert.same(before, { core.stat(path "old.gguf") })
        for _, name in ipairs(core.list(folder.path)) do assert.not_matches("^%.?old.gguf.+", name) end
        -- a file may be written over itself: it is read to the end first
        local _, e2, s2 = run "old.gguf old.gguf --type F16 --requantize"
        assert.equal("", e2)
        assert.equal(0, s2)
        assert.equal("F16", types_of("old.gguf")["blk.0.ffn_up.weight"])
    end)

    it("shows what it would do", function()
        local out, _, status = run "tiny.gguf - --type Q5_K_M --dry-run"
        assert.equal(0, status)
        assert.matches("blk.0.ffn_up.weight%s+64 x 96%s+F32%s+%-> Q5_1", out)
        assert.matches("\nQ5_K_M: weights ", out)
    end)
end)

describe("llmrun imatrix", function()
    setup(function()
        folder = shell.folder()
        gguf.tiny(path "tiny.gguf")
        local f <close> = assert(io.open(path "text", "w"))
        for i = 1, 60 do f:write(("%d times %d is %d. "):format(i, i + 1, i * (i + 1))) end
    end)
    teardown(function() folder:remove() end)

    -- Mean squares of what the first layer's projections get: the normalised embeddings.
    local function expected(ids)
        local file <close> = assert(core.gguf_open(path "tiny.gguf"))
        local rows, sums = file:bytes "token_embd.weight", {}
        for i = 1, 64 do sums[i] = 0 end
        for _, id in ipairs(ids) do
            local x, square = {}, 0
            for i = 1, 64 do
                x[i] = (("<f"):unpack(rows, 4 * (64 * id + i) - 3))
                square = square + x[i] ^ 2
            end
            for i = 1, 64 do sums[i] = sums[i] + x[i] ^ 2 / (square / 64 + 1e-5) end
        end
        for i = 1, 64 do sums[i] = sums[i] / #ids end
        return sums
    end

    it("writes the mean squares of inputs, whatever the arithmetic and threads", function()
        local m <close> = llm.load(path "tiny.gguf", { ctx = 64 })
        local f <close> = assert(io.open(path "text"))
        local ids = table.move(m:tokenize(f:read "a"), 1, 128, 1, {})
        table.remove(ids, 128) -- nothing is foretold behind the last token of a window
        table.remove(ids, 64)
        local want, texts = expected(ids), {}
        for i, flags in ipairs { "-t 1", "-t 2", "-t 1 --compute f32" } do
            local out, err = folder:llmrun(("imatrix -m tiny.gguf -f text -o im --tokens 128 --window 64 %s"):format(flags))
            assert.equal("", err)
            assert.equal("im: 15 matrices over 126 tokens in 2 windows\n", out)
            local list, n = quantize.importance(path "im")
            assert.equal(15, n)
            for _, name in ipairs { "attn_q", "attn_k", "attn_v" } do
                local got = list[("blk.0.%s.weight"):format(name)]
                assert.equal(256, #got)
                for k = 1, 64 do assert.near(want[k], (("<f"):unpack(got, 4 * k - 3)), 1e-3 * want[k] + 1e-6) end
            end
            assert.equal(4 * 96, #list["blk.1.ffn_down.weight"])
            assert.is_string(list["token_embd.weight"]) -- the output matrix, tied
            local file <close> = assert(io.open(path "im", "rb"))
            texts[i] = file:read "a"
        end
        assert.equal(texts[1], texts[2])
        assert.equal(0, select(3, run "tiny.gguf q.gguf --type Q4_K_M --imatrix im"))
        local q <close> = assert(core.gguf_open(path "q.gguf"))
        assert.equal(15, (q:get "quantize.imatrix.entries_count"))
        assert.equal("Q5_0", types_of("q.gguf")["blk.0.attn_q.weight"])
    end)

    it("says what is missing", function()
        for line, want in pairs {
            ["-m tiny.gguf -o im"] = "no text; give a file with %-f",
            ["-m tiny.gguf -f text"] = "no file to write; give one with %-o",
            ["-m tiny.gguf -f none -o im"] = "none: No such file",
            ["-m tiny.gguf -f text -o /no/folder/im --tokens 64"] = "/no/folder/im",
        } do
            local _, err, status = folder:llmrun("imatrix " .. line)
            assert.matches(want, err)
            assert.not_matches("traceback", err)
            assert.is_true(status ~= 0, line)
        end
    end)
end)
