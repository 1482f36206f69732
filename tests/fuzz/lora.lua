--- Any bytes as a low-rank adapter of a tiny model: a GGUF file, or, where they begin with "{", adapter_config.json, a
--- line end, adapter_model.safetensors. What is taken computes a row.

local errors = require "llmrun.errors"
local llm = require "llmrun"
local support = dofile "tests/spec/arch_support.lua"

local CODES = { format = true, unsupported = true, limit = true, invalid = true, no_memory = true, shape = true,
    not_found = true, io = true }
local folder, model

local function set_up()
    folder = os.tmpname()
    os.remove(folder)
    assert(os.execute(("mkdir -p '%s/peft'"):format(folder)))
    support.write(folder .. "/model.gguf", support.case "qwen2")
    model = llm.load(folder .. "/model.gguf", { compute = "f32", kv = { type = "f32" }, threads = 1, ctx = 32 })
end

local function write(name, text)
    local f <close> = assert(io.open(folder .. "/" .. name, "wb"))
    f:write(text)
end

return function(text)
    if not model then set_up() end
    local path = folder .. "/lora.gguf"
    local config, rest = text:match "^(%b{})\n(.*)$"
    if config then
        path = folder .. "/peft"
        write("peft/adapter_config.json", config)
        write("peft/adapter_model.safetensors", rest)
    else
        write("lora.gguf", text)
    end
    local ok, a = pcall(model.adapter, model, path)
    if not ok then
        assert(errors.is(a) and CODES[a.code] and not a.message:find "lua/llmrun/[%w_/]+%.lua:%d+:", tostring(a))
        return a.code
    end
    local guard <close> = a -- luacheck: ignore 211
    local s <close> = model:session { adapter = a }
    s:append { 1, 2, 3 }
    local computed, why = pcall(s.logits, s) -- factors of any size may make infinities
    assert(computed or errors.is(why) and why.message:find "not finite", tostring(why))
    return "ok"
end
