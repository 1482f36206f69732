--- Hugging Face folders: the tiny models of scripts/gen_hf_ref.py against Transformers' logits, and damaged ones.

local llm = require "llmrun"
local core = require "llmrun.core"
local hf = dofile "tests/spec/hf_support.lua"

local LLAMA = "llama-bf16" -- three files and their index

local function fails(pattern, path, opts)
    local ok, e = pcall(llm.load, path, opts)
    assert.is_false(ok)
    assert.matches(pattern, tostring(e))
end

describe("a Hugging Face folder", function()
    after_each(hf.clean)

    -- names of tests/data/hf/models; the context matters where RoPE depends on it
    for name, ctx in pairs { ["llama-bf16"] = false, ["qwen2-f16"] = false, ["qwen3-f32"] = false,
        ["gemma3-bf16"] = false, ["mistral-llama3"] = false, ["gemma2-bf16"] = false, ["phi3-bf16"] = 64,
        ["olmo2-bf16"] = false, ["granite-bf16"] = false, ["smollm3-bf16"] = false, ["gpt2-bf16"] = false,
        ["mixtral-bf16"] = false, ["qwen2moe-bf16"] = false, ["qwen3moe-bf16"] = false, ["granitemoe-bf16"] = false,
        ["gptoss-bf16"] = false, ["gptoss-mxfp4"] = false } do
        it("has Transformers' logits: " .. name, function()
            local path, ref = hf.model(name), hf.reference(name)
            local exact <close> = llm.load(path, { compute = "f32", ctx = ctx or nil })
            local worst = hf.compare(exact, ref)
            assert.is_true(worst < 1e-4, ("logits differ by %g"):format(worst))
            local fast <close> = llm.load(path, { ctx = ctx or nil })
            local _, nmse = hf.compare(fast, ref)
            assert.is_true(nmse < 1e-4, ("mean square error of %g"):format(nmse))
        end)
    end

    it("chats, and says what it is", function()
        local model <close> = llm.load(hf.model(LLAMA))
        assert.equal("llama", model.info.arch)
        assert.equal(256, model.info.n_ctx)
        assert.equal(1, model.info.bos)
        assert.same({ 2 }, model.info.eog)
        assert.equal("user: hi\n", (model:apply_template { { role = "user", content = "hi" } }))
        local a <close> = model:session()
        a:user("hi")
        assert.is_true(#a:gen { max_tokens = 4, temperature = 0 }.tokens > 0)
    end)

    it("takes a template from its own file, and the default of several", function()
        local path = hf.model(LLAMA, { ["chat_template.jinja"] = "own" })
        local model <close> = llm.load(path)
        assert.equal("own", (model:apply_template { { role = "user", content = "hi" } }))
        local several <close> = llm.load(hf.model(LLAMA, { ["tokenizer_config.json"] =
            [[{"chat_template":[{"name":"tool_use","template":"tools"},{"name":"default","template":"plain"}]}]] }))
        assert.equal("plain", (several:apply_template { { role = "user", content = "hi" } }))
    end)

    it("ends at all tokens that generation_config.json names", function()
        local model <close> = llm.load(hf.model(LLAMA, { ["generation_config.json"] = [[{"eos_token_id":[2,65]}]] }))
        assert.same({ 2, 65 }, model.info.eog)
        assert.same({}, model.info.sampling)
        local advised <close> = llm.load(hf.model(LLAMA, { ["generation_config.json"] =
            [[{"temperature":0.6,"top_k":20,"top_p":0.95,"do_sample":true,"min_p":"x"}]] }))
        assert.same({ temperature = 0.6, top_k = 20, top_p = 0.95 }, advised.info.sampling)
        local greedy <close> = llm.load(hf.model(LLAMA, { ["generation_config.json"] = [[{"do_sample":false}]] }))
        assert.same({ temperature = 0 }, greedy.info.sampling)
    end)

    it("is inspected", function()
        local file = assert(require("llmrun.loader").file(hf.model(LLAMA)))
        local names = {}
        for _, t in ipairs(file:tensors()) do names[t.name] = t.type .. " " .. table.concat(t.shape, "x") end
        assert.equal("BF16 64x32", names["blk.1.attn_k.weight"])
        assert.equal(3, #file:info().shards)
        file:close()
    end)
end)

describe("a folder's kind", function()
    after_each(hf.clean)

    it("is a GGUF file's where only its description lies beside", function()
        local find = require("llmrun.catalog").find
        local path = hf.folder { ["config.json"] = { text = "{}" }, ["x.gguf"] = { text = "" } }
        assert.equal(path .. "/x.gguf", find(path))
        assert.equal(hf.model(LLAMA):sub(1, 5), find(hf.model(LLAMA)):sub(1, 5))
        local both = hf.model(LLAMA, { ["x.gguf"] = "" })
        assert.equal(both, find(both .. "/"))
        local model <close> = llm.load(both .. "/")
        assert.equal(both:match("[^/]+$"), model.info.name)
    end)
end)

describe("a damaged Hugging Face folder", function()
    after_each(hf.clean)

    it("without its parts says which is missing", function()
        fails("holds no %.gguf file and no config%.json", hf.model(LLAMA, { ["config.json"] = false }))
        fails("no %.safetensors file", hf.model("qwen2-f16", { ["model.safetensors"] = false }))
        fails("tensor '.+' is in model%-00002%-of%-00003%.safetensors, which is not there",
            hf.model(LLAMA, { ["model-00002-of-00003.safetensors"] = false }))
        fails("3 %.safetensors files, but no model%.safetensors%.index%.json",
            hf.model(LLAMA, { ["model.safetensors.index.json"] = false }))
        fails("no tokenizer%.json", hf.model(LLAMA, { ["tokenizer.json"] = false }))
    end)

    it("is refused where config.json contradicts the weights, with both shapes", function()
        local function config(from, to)
            return { ["config.json"] = function(t)
                local changed, n = t:gsub(from, to)
                assert.equal(1, n)
                return changed
            end }
        end
        fails("tensor 'blk%.0%.ffn_gate%.weight': shape %(64, 96%) where %(64, 80%)",
            hf.model(LLAMA, config('"intermediate_size":96', '"intermediate_size":80')))
        fails("tensor 'blk%.0%.attn_q%.weight': shape %(64, 64%) where %(64, 96%)",
            hf.model(LLAMA, config('"num_attention_heads":2', '"num_attention_heads":3')))
        fails("does not use 9 of the file's tensors", hf.model(LLAMA, config('"num_hidden_layers":2', '"num_hidden_layers":1')))
        fails("no tensor 'blk%.2%.attn_norm%.weight'", hf.model(LLAMA, config('"num_hidden_layers":2', '"num_hidden_layers":3')))
        fails("config%.json: 'hidden_size' is 6%.5, an integer", hf.model(LLAMA, config('"hidden_size":64', '"hidden_size":6.5')))
        fails("config%.json: 'num_key_value_heads': 3 does not divide",
            hf.model(LLAMA, config('"num_key_value_heads":1', '"num_key_value_heads":3')))
        fails("config%.json: 'hidden_size': is missing", hf.model(LLAMA, config('"hidden_size":64,', '')))
        fails("model_type 'parrot' is not known", hf.model(LLAMA, config('"model_type":"llama"', '"model_type":"parrot"')))
        fails("vocab_size is 200", hf.model(LLAMA, config('"vocab_size":264', '"vocab_size":200')))
    end)

    it("with a cut file or an index that lies is refused", function()
        fails("model%-00002.+not within the %d+ bytes of data", hf.model(LLAMA, {
            ["model-00002-of-00003.safetensors"] = function(t) return t:sub(1, -50) end }))
        fails("header", hf.model("qwen2-f16", { ["model.safetensors"] = function(t) return t:sub(1, 60) end }))
        local function index(map) return { ["model.safetensors.index.json"] = '{"weight_map":' .. map .. "}" } end
        local one = "model-00001-of-00003.safetensors"
        fails("tensor 'ghost' is to be in model%-00001%-of%-00003%.safetensors, but no file has it",
            hf.model(LLAMA, index(('{"ghost":"%s"}'):format(one))))
        fails("is no name of a file", hf.model(LLAMA, index '{"x":"../secret.safetensors"}'))
        fails("is no name of a file", hf.model(LLAMA, index '{"x":7}'))
        fails("'weight_map' is no object", hf.model(LLAMA, index "[]"))
        fails("index%.json: ", hf.model(LLAMA, index "{"))
    end)

    it("with tensors of its own kind or none is refused", function()
        local function weights(tensors) return { ["model.safetensors"] = hf.safetensors(tensors) } end
        fails("type I64 is not supported", hf.model("qwen2-f16", weights {
            { "model.embed_tokens.weight", "I64", { 1 }, ("\0"):rep(8) } }))
        fails("type Q9 is not supported", hf.model("qwen2-f16", weights {
            { "model.embed_tokens.weight", "Q9", { 1 }, "\0" } }))
        fails("no tensor 'token_embd%.weight'", hf.model("qwen2-f16", weights {
            { "model.norm.weight", "F32", { 1 }, ("\0"):rep(4) } }))
        fails("tensor 'model%.norm%.weight' is in .+ too", hf.model(LLAMA, {
            ["model-00001-of-00003.safetensors"] = function(t) return t end,
            ["extra.safetensors"] = hf.safetensors { { "model.norm.weight", "F32", { 1 }, ("\0"):rep(4) } },
            ["model.safetensors.index.json"] = function(t)
                return (t:gsub('"model.norm.weight": ?"[^"]+"', '"model.norm.weight":"extra.safetensors"', 1))
            end }))
    end)

    it("with a tokenizer that is broken is refused", function()
        local function tokenizer(from, to)
            return { ["tokenizer.json"] = function(t)
                local at, stop = t:find(from, 1, true)
                return t:sub(1, at - 1) .. to .. t:sub(stop + 1)
            end }
        end
        fails("tokenizer%.json: ", hf.model(LLAMA, { ["tokenizer.json"] = "{" }))
        fails("'model' is missing", hf.model(LLAMA, { ["tokenizer.json"] = "{}" }))
        fails("model%.vocab is empty", hf.model(LLAMA, { ["tokenizer.json"] = '{"model":{"type":"BPE","vocab":{},"merges":[]}}' }))
        fails("has the id 99999999", hf.model(LLAMA, tokenizer('"!":3', '"!":99999999')))
        fails("has the id %-1", hf.model(LLAMA, tokenizer('"!":3', '"!":-1')))
        fails("have the id 4", hf.model(LLAMA, tokenizer('"!":3', '"!":4')))
        fails('"!+%.%.%.".* have the id %d+$', -- what is quoted is cut
            hf.model(LLAMA, tokenizer('"!":3', ('"%s":4'):format(("!"):rep(100000)))))
        fails("merges%[0%] is not two tokens", hf.model(LLAMA, tokenizer('"merges":[]', '"merges":[7]')))
        fails("tokens that do not exist", hf.model(LLAMA, tokenizer('"merges":[]', '"merges":["a zzzz"]')))
        fails("not supported", hf.model(LLAMA, tokenizer('"ByteLevel","use_regex"', '"Mystery","use_regex"')))
        fails("tokenizer%.json: nested too deeply", hf.model(LLAMA, { ["tokenizer.json"] = ("["):rep(5000) }))
    end)

    it("leaves nothing behind", function()
        collectgarbage()
        local before = core.memory()
        local path = hf.model(LLAMA, { ["config.json"] = function(t)
            return (t:gsub('"intermediate_size":96', '"intermediate_size":80'))
        end })
        for _ = 1, 50 do pcall(llm.load, path) end
        collectgarbage()
        assert.is_true(core.memory() - before < 32 << 20)
        local n = #core.list("/proc/self/fd")
        pcall(llm.load, path)
        collectgarbage()
        assert.is_true(#core.list("/proc/self/fd") <= n)
    end)
end)
