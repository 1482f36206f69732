--- Quantized Hugging Face folders against the logits of what their integers mean (scripts/gen_hf_ref.py), and damaged ones.

local llm = require "llmrun"
local json = require "llmrun.json"
local hf = dofile "tests/spec/hf_support.lua"

local refs = hf.reference "quant"

--- The folder of a format. settings: quantization_config instead of the format's own; change: of the tensors' file.
local function folder(name, settings, change)
    local data = hf.data .. "/quant/"
    local config = json.decode(hf.read(data .. "config.json"))
    config.quantization_config = settings or refs[name].settings
    local weights = hf.read(data .. name .. ".safetensors")
    if change then weights = change(weights) end
    local map = {}
    for file, text in pairs { ["rest.safetensors"] = hf.read(data .. "rest.safetensors"), ["q.safetensors"] = weights } do
        for key in pairs(assert(json.decode((string.unpack("<s8", text))))) do
            if key ~= "__metadata__" then map[key] = file end
        end
    end
    return hf.folder {
        ["config.json"] = { text = json.encode(config) }, ["q.safetensors"] = { text = weights },
        ["rest.safetensors"] = data .. "rest.safetensors",
        ["model.safetensors.index.json"] = { text = json.encode { weight_map = map } },
        ["tokenizer.json"] = hf.data .. "/bytes/tokenizer.json",
    }
end

-- what each becomes for the kernels, and whether nothing is rounded
local FORMATS = {
    ["gptq4"] = { "Q4_0", true }, ["gptq4-order"] = { "Q8_0", false }, ["gptq4-v2"] = { "Q5_0", true },
    ["gptq3"] = { "Q4_0", true }, ["gptq2"] = { "Q4_0", true }, ["gptq8"] = { "Q8_0", true },
    ["gptq8-asym"] = { "F16", false }, ["awq"] = { "Q5_0", true }, ["w4a16"] = { "Q4_0", true },
    ["w4a16-asym"] = { "Q5_0", true }, ["w8a16"] = { "Q8_0", true }, ["fp8-tensor"] = { "Q8_0", false },
    ["fp8-channel"] = { "Q8_0", false }, ["fp8-block"] = { "Q8_0", false }, ["int8"] = { "Q8_0", false },
    ["llm-int8"] = { "Q8_0", false },
}

local function quantized(model)
    for _, f in ipairs(model.info.formats) do
        if f.count > 2 then return f end
    end
end

describe("a quantized Hugging Face folder", function()
    after_each(hf.clean)

    for name, made in pairs(FORMATS) do
        it("means what its quantizer meant: " .. name, function()
            local path = folder(name)
            local exact <close> = llm.load(path, { compute = "f32" })
            local worst = hf.compare(exact, refs[name])
            assert.is_true(worst < 1e-4, ("logits differ by %g"):format(worst))
            local fast <close> = llm.load(path)
            local _, nmse = hf.compare(fast, refs[name])
            local most = fast.info.backend:find "amx" and 3e-4 or 1e-3 -- rows of 11 bits, or of 8
            assert.is_true(nmse < most, ("mean square error of %g"):format(nmse))
            local f = quantized(fast)
            assert.same({ made[1], made[2], 7 }, { f.to, f.exact, f.count })
        end)
    end
end)

describe("a damaged quantized folder", function()
    after_each(hf.clean)

    local function fails(pattern, ...)
        local ok, e = pcall(llm.load, folder(...))
        assert.is_false(ok)
        assert.matches(pattern, tostring(e))
    end
    --- Renames or reshapes a tensor in the header, which keeps its length.
    local function header(from, to)
        return function(text)
            local head = string.unpack("<s8", text)
            local at, stop = head:find(from)
            assert(at, "no " .. from)
            local new = head:sub(1, at - 1) .. to .. head:sub(stop + 1)
            new = new:gsub("%s+$", "")
            return string.pack("<s8", new .. (" "):rep(-#new % 8)) .. text:sub(9 + #head)
        end
    end

    it("is refused, with tensors and shapes", function()
        fails("scales': shape %(2, 64%), but '.+qweight' is %(16, 32%), which needs 32 outputs, and groups of 128 inputs", "gptq4", nil,
            header('(q_proj%.qweight":{"dtype":"I32","shape":)%[8,64%]', 'q_proj.qweight":{"dtype":"I32","shape":[16,32]'))
    end)

    it("with settings that do not fit is refused", function()
        fails("quant_method is nil", "gptq4", {})
        fails("does not say how many bits", "gptq4", { quant_method = "gptq" })
        fails("5 bits; 2, 3, 4 and 8", "gptq4", { quant_method = "gptq", bits = 5 })
        fails("shape", "gptq4", { quant_method = "awq", bits = 4 })
        fails("version is 'gemv'", "awq", { quant_method = "awq", bits = 4, version = "gemv" })
        fails("shape %(2, 2%), but .+%(64, 128%), which needs one, 64, or one for each block of 128 x 128", "fp8-block", { quant_method = "fp8", weight_block_size = { 128, 128 } })
    end)
end)
