--- Hugging Face folders for specs: the tiny ones of tests/data/hf, put together in a temporary folder, whole or damaged;
--- and safetensors files written here.

local json = require "llmrun.json"

local M = { data = "tests/data/hf" }
local made = {}

function M.read(path)
    local f = assert(io.open(path, "rb"))
    local text = f:read("a")
    f:close()
    return text
end

function M.write(path, text)
    local f = assert(io.open(path, "wb"))
    f:write(text)
    f:close()
end

--- A new folder with copies of files: { name in it = path or { text = ... } }.
function M.folder(files)
    local path = os.tmpname()
    os.remove(path)
    assert(os.execute(("mkdir '%s'"):format(path)))
    made[#made + 1] = path
    for name, from in pairs(files) do
        M.write(path .. "/" .. name, type(from) == "table" and from.text or M.read(from))
    end
    return path
end

--- A model's folder with the tokenizer of bytes. change: { file = false (leave out) or text or function(text) -> text }.
function M.model(name, change)
    local files = {}
    local core = require "llmrun.core"
    for _, dir in ipairs { M.data .. "/models/" .. name, M.data .. "/bytes" } do
        for _, file in ipairs(core.list(dir)) do files[file] = dir .. "/" .. file end
    end
    for file, how in pairs(change or {}) do
        if how == false then
            files[file] = nil
        elseif type(how) == "function" then
            files[file] = { text = how(M.read(files[file])) }
        else
            files[file] = { text = how }
        end
    end
    return M.folder(files)
end

function M.reference(name) return json.decode(M.read(M.data .. "/ref/" .. name .. ".json")) end

--- The largest difference of logits, and their mean square error over their variance.
function M.compare(model, ref)
    local worst, err, var = 0, 0, 0
    for i, row in ipairs(ref.rows) do
        local s <close> = model:session()
        for j = 1, row + 1 do s:append(ref.ids[j]) end
        local l = s:logits()
        for id, want in ipairs(ref.logits[i]) do
            local d = math.abs(l:get { id - 1 }[1] - want)
            worst, err, var = math.max(worst, d == d and d or math.huge), err + d * d, var + want * want
        end
    end
    return worst, err / var
end

--- A safetensors file's text of tensors { name, dtype, shape, bytes }.
function M.safetensors(tensors)
    local head, data, at = {}, {}, 0
    for i, t in ipairs(tensors) do
        head[i] = ("%s:{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%d,%d]}"):format(json.encode(t[1]), t[2],
            table.concat(t[3], ","), at, at + #t[4])
        data[i], at = t[4], at + #t[4]
    end
    local text = "{" .. table.concat(head, ",") .. "}"
    text = text .. (" "):rep(-#text % 8)
    return string.pack("<s8", text) .. table.concat(data)
end

function M.clean()
    for _, path in ipairs(made) do os.execute(("rm -rf '%s'"):format(path)) end
    made = {}
end

return M
