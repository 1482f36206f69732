--- Names of models: where scripts/fetch_model puts the files.

local core = require "llmrun.core"
local tables = require "llmrun.tables"

local M = {}

M.files = {
    smollm2 = "SmolLM2-135M-Instruct.Q4_1.gguf",
    gemma3 = "gemma-3-270m-q4_k_m.gguf",
    ["qwen-0.5b"] = "qwen2.5-0.5b.gguf",
    ["qwen-1.5b"] = "qwen2.5-1.5b.gguf",
}

function M.folder()
    local folder = os.getenv("LLMRUN_MODELS")
    if folder and folder ~= "" then return folder end
    return (os.getenv("HOME") or "/root") .. "/.cache/llmrun"
end

local function in_folder(folder)
    folder = folder:match("^(.*[^/])/+$") or folder
    local first, hugging_face
    local names = core.list(folder) or {}
    for _, name in ipairs(names) do hugging_face = hugging_face or name:find("%.safetensors$") ~= nil end
    if hugging_face and core.stat(folder .. "/config.json") then return folder end
    for _, name in ipairs(names) do
        if name:find("%.gguf$") and (not name:find("%-%d%d%d%d%d%-of%-") or name:find("%-00001%-of%-")) then
            if first then return nil, ("%s holds several models; name one of its files"):format(folder), "invalid" end
            first = folder .. "/" .. name
        end
    end
    if not first and core.stat(folder .. "/config.json") then return folder end -- to be told what is missing
    if not first then return nil, ("%s holds no .gguf file and no config.json"):format(folder), "not_found" end
    return first
end

--- The file of a name, a path or a folder (of one with config.json the folder itself); nil, text, code.
function M.find(name)
    local kind = core.stat(name)
    if kind == "folder" then return in_folder(name) end
    if kind then return name end
    local file = M.files[name]
    if file then
        local path = M.folder() .. "/" .. file
        if core.stat(path) then return path end
        return nil, ("model '%s' is not in %s; run scripts/fetch_model %s"):format(name, M.folder(), name), "not_found"
    end
    return nil, ("no file '%s', and no model of that name (known: %s)"):format(name,
        table.concat(tables.sorted_keys(M.files), ", ")), "not_found"
end

return M
