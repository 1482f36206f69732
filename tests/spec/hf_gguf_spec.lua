--- llmrun quantize on Hugging Face folders: the GGUF file says what the folder said, to the reference's tolerance.

local core = require "llmrun.core"
local llm = require "llmrun"
local hf = dofile "tests/spec/hf_support.lua"

local TEXT = "It's 2026; the naïve fox paid 1234.50 for 東京.\n\n  End"

local function quantize(folder, out, flags)
    local errors = os.tmpname()
    local p <close> = assert(io.popen(("'%s' quantize '%s' '%s' %s 2>'%s'; echo \"|$?\""):format(core.executable(), folder,
        out, flags, errors)))
    local text, status = p:read("a"):match("^(.*)|(%d+)\n$")
    local f <close> = assert(io.open(errors))
    local err = f:read "a"
    os.remove(errors)
    return text, err, tonumber(status)
end

describe("llmrun quantize of a folder", function()
    teardown(hf.clean)

    for _, name in ipairs(core.list(hf.data .. "/models")) do
        it("writes " .. name .. " as a file of the same logits and token ids", function()
            local folder = hf.model(name)
            local out = folder .. "/out.gguf"
            local _, err, status = quantize(folder, out, "--type F32 --requantize")
            assert.equal("", err)
            assert.equal(0, status)
            local opts = { compute = "f32", threads = 1, ctx = name:find "phi3" and 64 or nil } -- longrope depends on it
            local a <close> = llm.load(folder, opts)
            local b <close> = llm.load(out, opts)
            assert.same(a:tokenize(TEXT), b:tokenize(TEXT))
            assert.equal(a.info.bos, b.info.bos)
            assert.same(a.info.eog, b.info.eog)
            assert.equal(a.info.arch, b.info.arch)
            local worst = hf.compare(b, hf.reference(name))
            assert.is_true(worst < 1e-3, ("worst %g"):format(worst))
            -- what comes of rows in GGUF's order is what comes of rows as they lie in the folder
            local sa <close> = a:session()
            local sb <close> = b:session()
            sa:append(a:tokenize(TEXT))
            sb:append(b:tokenize(TEXT))
            local la, lb = sa:logits(), sb:logits()
            for id = 0, a.info.n_vocab - 1 do assert.near(la:get { id }[1], lb:get { id }[1], 1e-4) end
            local file <close> = assert(core.gguf_open(out))
            if a.info.arch == "llama" then assert.is_nil((file:get "llama.rope.interleaved")) end
        end)
    end

    it("quantizes on the way", function()
        local folder = hf.model "llama-bf16"
        local out, err, status = quantize(folder, folder .. "/q.gguf", "--type Q8_0")
        assert.equal("", err)
        assert.equal(0, status)
        assert.matches("Q8_0", out)
        local m <close> = llm.load(folder .. "/q.gguf")
        local s <close> = m:session()
        s:append(m:tokenize "abc")
        assert.is_true(#s:gen({ max_tokens = 4, temperature = 0, ignore_eos = true }).tokens == 4)
    end)

    it("refuses a folder with tensors that belong nowhere", function()
        local folder = hf.model("qwen3-f32", { ["model.safetensors"] = function(text)
            local n = ("<I8"):unpack(text)
            local head = text:sub(9, 8 + n):gsub("model%.layers%.0%.mlp%.up_proj", "model.layers.0.mlp.up_prej")
            return text:sub(1, 8) .. head .. text:sub(9 + n)
        end })
        local _, err, status = quantize(folder, folder .. "/q.gguf", "--type Q8_0")
        assert.equal(1, status)
        assert.matches("up_prej", err)
        assert.is_nil((core.stat(folder .. "/q.gguf")))
    end)
end)
