--- llmrun compare: a model against another, and the rows of logits that scoring may keep.

local core = require "llmrun.core"
local llm = require "llmrun"
local gguf = require "llmrun.testing.gguf"
local shell = dofile "tests/spec/shell_support.lua"

local folder, text

local function path(name) return folder:at(name) end

local function run(line) return folder:llmrun(line) end

local function compared(line)
    local out, err, status = run(("compare %s -f text --window 64 --json"):format(line))
    assert.equal("", err)
    assert.equal(0, status)
    return require("cjson").decode(out)
end

describe("llmrun compare", function()
    setup(function()
        folder = shell.folder()
        gguf.tiny(path "a.gguf")
        run "quantize a.gguf b.gguf --type Q4_0 -q"
        run "quantize a.gguf c.gguf --type Q8_0 -q"
        text = {}
        for i = 1, 40 do text[i] = ("line %d of %d; "):format(i * i, i) end
        text = table.concat(text)
        local f <close> = assert(io.open(path "text", "w"))
        f:write(text)
    end)
    teardown(function() folder:remove() end)

    it("finds a model to be itself", function()
        local r = compared "a.gguf a.gguf"
        assert.equal(0, r.kl_mean)
        assert.equal(0, r.kl_max)
        assert.equal(1, r.same_top)
        assert.equal(0, r.change_rms)
        assert.equal(r.perplexity_a, r.perplexity_b)
        assert.is_true(r.tokens >= 200)
    end)

    it("orders quantized models by their bits", function()
        local four, eight = compared "a.gguf b.gguf --compute f32", compared "a.gguf c.gguf --compute f32"
        assert.is_true(eight.kl_mean > 0 and eight.kl_mean < four.kl_mean / 4)
        assert.is_true(eight.same_top > four.same_top and four.same_top < 1)
        assert.equal(four.perplexity_a, eight.perplexity_a)
        assert.is_true(four.kl_median <= four.kl_p99 and four.kl_p99 <= four.kl_max)
        local out = run "compare a.gguf b.gguf -f text --tokens 100"
        assert.matches("^KL divergence +%d+%.%d+ %+%- .*\nsame best token .*\nperplexity ", (out:gsub("prob[^\n]*\n", "")))
    end)

    it("agrees with a divergence worked out here", function()
        local a <close> = llm.load(path "a.gguf", { ctx = 256 })
        local b <close> = llm.load(path "b.gguf", { ctx = 256 })
        local ids = a:tokenize "a few words to score"
        local kept = {}
        for i, m in ipairs { a, b } do
            local s <close> = m:session()
            s:append(ids)
            kept[i] = core.rows(#ids - 1, m.info.n_vocab)
            local scored = s:score { keep = kept[i] }
            -- probability of the token that comes, from the kept row, is what was scored
            for k = 1, #ids - 1 do
                local _, _, p = kept[i]:diverge(k, kept[i], ids[k + 1])
                assert.near(scored[k].logprob, math.log(p), 1e-4)
            end
        end
        for k = 1, #ids - 1 do
            local sum, best_p, best_q, same = 0, -1, -1, nil
            for id = 0, a.info.n_vocab - 1 do
                local _, top, p, q = kept[1]:diverge(k, kept[2], id)
                sum = sum + p * math.log(p / q)
                if p > best_p then best_p, same = p, id end
                if q > best_q then best_q = q end
                if id == 0 then assert.is_boolean(top) end
            end
            local kl, top, _, q = kept[1]:diverge(k, kept[2], same)
            assert.near(sum, kl, 1e-5)
            assert.equal(top, q == best_q)
        end
    end)

    it("refuses what can't be compared", function()
        gguf.tiny(path "small.gguf", function(keys, tensors)
            local pieces = {}
            for i = 0, 127 do pieces[#pieces + 1] = ("<0x%02X>"):format(i) end
            keys.of["tokenizer.ggml.tokens"][2] = gguf.strings(pieces)
            local zero, kinds = {}, {}
            for i = 1, 128 do zero[i], kinds[i] = 0, 6 end
            keys.of["tokenizer.ggml.scores"][2] = gguf.array(6, "<f", zero)
            keys.of["tokenizer.ggml.token_type"][2] = gguf.array(5, "<i4", kinds)
            keys.of["llama.vocab_size"][2] = gguf.u32(128)
            local t = tensors.of["token_embd.weight"]
            t[2], t[3] = { 64, 128 }, t[3]:sub(1, 64 * 128 * 4)
        end)
        local cases = {
            ["a.gguf -f text"] = "two models are needed",
            ["a.gguf b.gguf"] = "no text; give a file with %-f",
            ["a.gguf b.gguf -f nothing"] = "nothing: No such file",
            ["a.gguf none.gguf -f text"] = "no file 'none.gguf'",
            ["a.gguf small.gguf -f text"] = "different vocabularies, of 256 and 128 tokens",
            ["a.gguf b.gguf -f text --window 2"] = "%-%-window: at least 4 expected, got 2",
        }
        for line, want in pairs(cases) do
            local _, err, status = run("compare " .. line)
            assert.matches(want, err)
            assert.not_matches("traceback", err)
            assert.is_true(status ~= 0, line)
        end
        local m <close> = llm.load(path "a.gguf", { ctx = 64 })
        local s <close> = m:session()
        s:append(m:tokenize "hello")
        local ok, e = pcall(s.score, s, { keep = core.rows(2, m.info.n_vocab) })
        assert.is_false(ok)
        assert.matches("room for 2 rows of logits, 4 wanted", tostring(e))
        ok, e = pcall(s.score, s, { keep = core.rows(4, 17) })
        assert.is_false(ok)
        assert.matches("rows of 17 logits, where the vocabulary has 256", tostring(e))
        assert.equal(4, #s:score())
    end)
end)
