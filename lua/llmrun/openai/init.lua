--- The OpenAI API, as routes of llm.serve: /v1/models, /v1/chat/completions, /v1/completions, /v1/responses,
--- /v1/embeddings, /v1/programs, /tokenize, /detokenize, /openapi.json. Plain Lua over sessions, meant to be read and
--- changed.
---
--- Options (the table `openai` of llm.serve): limits (see sampling.lua), max_queue (completions that may wait for the
--- engine before further ones get 503), names (further names of the models: name -> model). Scripts in requests: see
--- scripts.lua.

local choices = require "llmrun.openai.choices"
local exchange = require "llmrun.exchange"
local fields = require "llmrun.openai.fields"
local json = require "llmrun.json"
local loop = require "llmrun.loop"
local messages = require "llmrun.openai.messages"
local options = require "llmrun.options"
local sampling = require "llmrun.openai.sampling"
local scripts = require "llmrun.openai.scripts"

local M = {}

---@class llmrun.Api
local Api = {}
Api.__index = Api

--- The model that a request names (the first if it names none), and its name as it is to be shown.
function Api:model(r)
    local name = r:text("model", 1024)
    if name == nil then return self.list[1].model, self.list[1].name end
    local model = self.by_name[name]
    if not model then
        exchange.fail(404, ("there is no model %s here"):format(fields.show(name)), "model", "model_not_found")
    end
    return model, name
end

--- Refuses work while too much of it waits.
function Api:admit(req, model, gen)
    if model:stats().waiting >= self.max_queue then
        exchange.fail(503, "too many requests are waiting", nil, "overloaded")
    end
    if req.key then gen.tenant = req.key:sub(1, 63) end
end

local model_keys = { "id", "object", "created", "owned_by", "root", "max_model_len" }

local function model_object(self, entry)
    return json.object({
        id = entry.name, object = "model", created = self.created, owned_by = "llmrun", root = entry.model.info.name,
        max_model_len = entry.model.info.ctx,
    }, model_keys)
end

local function list_models(self)
    local data = json.array()
    for i, entry in ipairs(self.list) do data[i] = model_object(self, entry) end
    return json.object { object = "list", data = data }
end

local function show_model(self, req)
    for _, entry in ipairs(self.list) do
        if entry.name == req.params.rest then return model_object(self, entry) end
    end
    exchange.fail(404, ("there is no model %s here"):format(fields.show(req.params.rest)), "model", "model_not_found")
end

local function tokenize(self, req)
    local r = fields.read(req)
    local model = self:model(r)
    local ids
    local bos = r:boolean "add_special_tokens" ~= false
    if r:get "messages" ~= nil then
        local list = messages.read(r:get "messages", self.limits)
        local vars = { add_generation_prompt = r:boolean "add_generation_prompt" ~= false }
        ids = choices.guarded(messages.prompt, model, list, messages.read_tools(r:get "tools", self.limits), vars,
            self.limits.text_bytes)
    else
        local text = r:text("prompt", self.limits.text_bytes) or r:text("content", self.limits.text_bytes)
        if not text then fields.wrong_type("prompt", "string", json.null) end
        ids = loop.breathing(model.tokenize, model, text, { special = r:boolean "parse_special" ~= false, bos = bos })
    end
    local out = { count = #ids, max_model_len = model.info.ctx, tokens = json.array(ids) }
    if r:boolean "return_token_strs" then
        out.token_strs = json.array()
        for i, id in ipairs(ids) do out.token_strs[i] = model.vocab:piece(id) end
    end
    return out
end

local function detokenize(self, req)
    local r = fields.read(req)
    local model = self:model(r)
    local v = r:get "tokens"
    if v == nil then fields.wrong_type("tokens", "array", json.null) end
    local ids = sampling.token_ids("tokens", v, nil, model.info.n_vocab)
    return { prompt = model:detokenize(ids, { special = r:boolean "skip_special_tokens" ~= true }) }
end

local known = { limits = "table", max_queue = "integer", names = "table" }

local function check_limits(given)
    local limits = {}
    for k, v in pairs(sampling.limits) do limits[k] = v end
    for k, v in pairs(given or {}) do
        if not limits[k] or math.type(v) ~= "integer" or v < 1 then
            require("llmrun.errors").raise("llm.serve", ("openai.limits: no limit '%s' = %s"):format(tostring(k),
                tostring(v)))
        end
        limits[k] = v
    end
    return limits
end

--- Adds the routes to a server.
---@param server llmrun.Server
---@param o table
function M.add(server, o)
    options.check("llm.serve: openai", o, known, 4)
    local self = setmetatable({
        server = server, list = {}, by_name = {}, created = os.time(), limits = check_limits(o.limits),
        max_queue = o.max_queue or 1024, scripts = scripts.settings(server.options.scripts),
    }, Api)
    for _, model in ipairs(server.models) do
        local entry = { name = server.names[model], model = model }
        self.list[#self.list + 1] = entry
        self.by_name[entry.name] = self.by_name[entry.name] or model
    end
    for name, model in pairs(o.names or {}) do
        self.by_name[name] = model
        table.insert(self.list, { name = name, model = model })
    end
    local function route(spec, fn)
        server.routes:add(spec, function(req, res) return fn(self, req, res) end)
    end
    route("GET /v1/models", list_models)
    route("GET /v1/models/*", show_model)
    route("GET /openapi.json", function() return require("llmrun.openai.openapi").document(self) end)
    route("POST /tokenize", tokenize)
    route("POST /detokenize", detokenize)
    route("POST /v1/chat/completions", require("llmrun.openai.chat").answer)
    route("POST /v1/completions", require("llmrun.openai.completions").answer)
    route("POST /v1/responses", require("llmrun.openai.responses").answer)
    route("POST /v1/embeddings", require("llmrun.openai.embeddings").answer)
    route("POST /v1/programs", scripts.answer)
    return self
end

return M
