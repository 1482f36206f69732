--- A model in a Hugging Face folder, shown as a GGUF file is: get, keys, tensors, info, vocab.
---
--- config.json becomes metadata (config.lua), safetensors files become weights (weights.lua), tokenizer.json a
--- vocabulary (tokenizer.lua). What is asked of the folder's files is small: the weights stay mapped.

local config = require "llmrun.hf.config"
local core = require "llmrun.core"
local json = require "llmrun.json"
local tables = require "llmrun.tables"
local weights = require "llmrun.hf.weights"
local words = require "llmrun.words"

local M = {}

local Folder = {}
Folder.__index = Folder

local function fail(code, fmt, ...) error({ message = words.quoting(fmt, ...), code = code }, 0) end

--- The text of a small file of the folder, or nil if there is none.
local function read(path, name, most)
    local f <close> = io.open(path .. "/" .. name, "rb")
    if not f then return nil end
    most = most or 64 << 20
    local text = f:read(most)
    if not text and core.stat(path .. "/" .. name) == "folder" then fail("invalid", "%s is a folder", name) end
    if text and #text == most then fail("limit", "%s is larger than %d MiB", name, most >> 20) end
    return text or ""
end

local function read_json(path, name)
    local text = read(path, name)
    if not text then return nil end
    local v, err = json.decode(text, { max_values = 8000000 })
    if v == nil then fail("format", "%s: %s", name, err) end
    if type(v) ~= "table" or json.is_array(v) then fail("format", "%s: an object is needed", name) end
    return v
end

--- The names of the files with weights, and those that the index says are in them: { tensor = file }.
local function weight_files(path)
    local index = read_json(path, "model.safetensors.index.json")
    if not index then
        if core.stat(path .. "/model.safetensors") then return { "model.safetensors" } end
        local found = {}
        for _, name in ipairs(core.list(path) or {}) do
            if name:find("%.safetensors$") then found[#found + 1] = name end
        end
        if #found == 1 then return found end
        fail("not_found", #found == 0 and "the folder holds no .safetensors file"
            or "%d .safetensors files, but no model.safetensors.index.json that says how they belong together", #found)
    end
    local map = index.weight_map
    if not json.is_object(map) then fail("format", "model.safetensors.index.json: 'weight_map' is no object") end
    local files, seen = {}, {}
    for tensor, name in pairs(map) do
        if type(name) ~= "string" or name:find("[/%z]") or name == "" or name:sub(1, 1) == "." then
            fail("format", "model.safetensors.index.json: tensor '%s' is in %s, which is no name of a file", tensor,
                tostring(name))
        end
        if not seen[name] then
            seen[name], files[#files + 1] = true, name
            if not core.stat(path .. "/" .. name) then
                fail("not_found", "model.safetensors.index.json: tensor '%s' is in %s, which is not there", tensor,
                    name)
            end
        end
    end
    table.sort(files)
    return files, map
end

local function check_index(files, map)
    local there = {}
    for _, t in ipairs(files:tensors()) do there[t.name] = t.file:match("[^/]+$") end
    for _, name in ipairs(tables.sorted_keys(map)) do
        if there[name] ~= map[name] then
            fail("format", "model.safetensors.index.json: tensor '%s' is to be in %s, but %s", name, map[name],
                there[name] and "is in " .. there[name] or "no file has it")
        end
    end
end

local function open(path, hold)
    local text = read(path, "config.json", 4 << 20)
    if not text then fail("not_found", "the folder has no config.json") end
    local self = setmetatable({ path = path, text = text }, Folder)
    self.config = config.read(text)
    self.meta, self.fields = self.config.meta, self.config.fields
    self.generation = read_json(path, "generation_config.json")
    local names, map = weight_files(path)
    self.core = core.folder_new()
    hold.core = self.core
    for _, name in ipairs(names) do
        local ok, err, code = self.core:open(path .. "/" .. name)
        if not ok then fail(code, "%s", err) end
    end
    if map then check_index(self.core, map) end
    self.made = weights.make(self.core, self.config)
    return self
end

--- Opens a folder: an object, or nil, text, code.
---@param path string
function M.open(path)
    local hold = {}
    local ok, r = pcall(open, path:match("^(.-)/+$") or path, hold)
    if ok then return r end
    if hold.core then hold.core:close() end
    if type(r) == "table" and r.message then return nil, r.message, r.code end
    error(r, 0)
end

--- Whether a folder is one of these, and not a place of GGUF files.
function M.is(path) return core.stat(path .. "/config.json") ~= nil end

--- The value of a key and its type's name, as of a GGUF file.
function Folder:get(key)
    local v = self.meta[key]
    if v then return v[1], v[2] end
    if key == "tokenizer.chat_template" then
        local template = require("llmrun.hf.tokenizer").template(self.path, read, read_json)
        return template, template and "str"
    end
end

function Folder:keys()
    local list = {}
    for key, v in pairs(self.meta) do
        list[#list + 1] = { key = key, type = v[2], count = type(v[1]) == "table" and #v[1] or nil }
    end
    table.sort(list, function(a, b) return a.key < b.key end)
    return list
end

--- The weights by the names of the architecture scripts, and tensors that have none.
function Folder:tensors()
    local list = table.move(self.made.tensors, 1, #self.made.tensors, 1, {})
    for _, t in ipairs(self.made.rest) do
        list[#list + 1] = { name = t.name, type = t.dtype, shape = t.shape, bytes = t.bytes }
    end
    return list
end

function Folder:info()
    local info = self.core:info(self.text)
    return { bytes = info.bytes, fingerprint = info.fingerprint, shards = info.files, formats = self.made.formats,
        kind = "safetensors", left_out = self.made.left_out }
end

local function tokenizer(self, what)
    local ok, r, err, code = pcall(require("llmrun.hf.tokenizer")[what], self.path, {
        read = read, read_json = read_json, size = self.meta[self.config.kind.arch .. ".vocab_size"],
        config = self.config.config, generation = self.generation,
    })
    if ok then return r, err, code end
    if type(r) == "table" and r.message then return nil, r.message, r.code end
    error(r, 0)
end

--- The vocabulary; nil, text, code.
function Folder:vocab() return tokenizer(self, "vocab") end

--- The vocabulary's columns and rules, as core.vocab_new takes them; nil, text, code.
function Folder:vocab_spec() return tokenizer(self, "spec") end

--- The sampling that generation_config.json recommends, as options of gen.
function Folder:sampling()
    local g, out = self.generation or {}, {}
    local function take(name, low, high)
        local v = g[name]
        if type(v) == "number" and v >= low and v <= high then out[name] = v end
    end
    if g.do_sample == false then return { temperature = 0 } end
    take("temperature", 0, 100)
    take("top_p", 0, 1)
    take("min_p", 0, 1)
    take("repetition_penalty", 0.01, 100)
    if math.type(g.top_k) == "integer" and g.top_k > 0 then out.top_k = g.top_k end
    return out
end

--- Words of an error about a key, in terms of the folder's own files.
function Folder:explain(message)
    return (message:gsub("key '([%w_.]+)'", function(key)
        return self.fields[key] and ("config.json: '%s'"):format(self.fields[key]) or nil
    end))
end

function Folder:close() self.core:close() end

return M
