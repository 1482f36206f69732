--- POST /v1/embeddings: the model's last hidden row behind each input (the input's last token), scaled to length 1.
---
--- dimensions cuts it to its first numbers, scaled again. encoding_format: "float", or "base64" of 32-bit floats.

local choices = require "llmrun.openai.choices"
local exchange = require "llmrun.exchange"
local fields = require "llmrun.openai.fields"
local json = require "llmrun.json"
local loop = require "llmrun.loop"
local runner = require "llmrun.runner"
local sampling = require "llmrun.openai.sampling"

local M = {}

--- The inputs: a list of texts or of lists of ids.
local function input_list(v, limits, n_vocab)
    if type(v) == "string" then return { v } end
    if not json.is_array(v) then
        fields.wrong_type("input", "text, token ids, or an array of either", v == nil and json.null or v)
    end
    if #v == 0 then fields.bad("input", "it is empty") end
    if type(v[1]) == "number" then return { sampling.token_ids("input", v, nil, n_vocab) } end
    fields.array("input", v, limits.embeddings)
    local list = {}
    for i, item in ipairs(v) do
        local param = ("input[%d]"):format(i - 1)
        if type(item) ~= "string" and not json.is_array(item) then
            fields.wrong_type(param, "text or token ids", item)
        end
        list[i] = type(item) == "string" and item or sampling.token_ids(param, item, nil, n_vocab)
    end
    return list
end

local function hidden_row(model, ids, salt)
    local s <close> = model:session { salt = salt }
    s:append(ids)
    local op <close> = setmetatable({}, { __close = function(t) if t.op then t.op:close() end end })
    local err, code
    op.op, err, code = model.runner:submit("/v1/embeddings", s.seq, { kind = "logits" })
    if not op.op then require("llmrun.errors").raise("/v1/embeddings", err, code) end
    op.op:wait(runner.DONE)
    local info = op.op.req:info()
    if info.state == "failed" then require("llmrun.errors").raise("/v1/embeddings", info.error, info.code) end
    return op.op.req:hidden()
end

--- The first n floats of a row, scaled to length 1.
local function scaled(row, n)
    local x, sum = {}, 0
    for i = 1, n do
        x[i] = string.unpack("<f", row, 4 * i - 3)
        sum = sum + x[i] * x[i]
    end
    local scale = sum > 0 and 1 / math.sqrt(sum) or 0
    for i = 1, n do x[i] = x[i] * scale end
    return x
end

local alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

local function base64(text)
    local out = {}
    for i = 1, #text, 3 do
        local a, b, c = text:byte(i, i + 2)
        local v = a << 16 | (b or 0) << 8 | (c or 0)
        for k = 0, 3 do
            local at = (v >> (18 - 6 * k) & 63) + 1
            out[#out + 1] = (k == 2 and not b or k == 3 and not c) and "=" or alphabet:sub(at, at)
        end
    end
    return table.concat(out)
end

local function encoded(x, format)
    if format ~= "base64" then return json.array(x) end
    local parts = {}
    for i, v in ipairs(x) do parts[i] = string.pack("<f", v) end
    return base64(table.concat(parts))
end

--- The route function's work.
function M.answer(api, req)
    local r = fields.read(req)
    local model, name = api:model(r)
    local width = model.info.n_embd
    local list = sampling.check_texts("input", input_list(r:get "input", api.limits, model.info.n_vocab), api.limits)
    local format = r:choice("encoding_format", { "float", "base64" })
    local n = r:integer("dimensions", 1, math.max(width, 1)) or width
    local salt = r:text("cache_salt", 1024)
    if width == 0 then
        exchange.fail(501, ("the model %s tells no hidden rows, so it has no embeddings"):format(name), "model",
            "not_supported")
    end
    local all, total = {}, 0
    for i, item in ipairs(list) do
        local param = #list == 1 and "input" or ("input[%d]"):format(i - 1)
        local ids = item
        if type(item) == "string" then ids = loop.breathing(model.tokenize, model, item, { bos = true }) end
        if #ids == 0 then fields.bad(param, "it is empty") end
        choices.check_length(model, #ids, param)
        all[i], total = ids, total + #ids
    end
    api:admit(req, model, {})
    local data = json.array()
    local rows = require("llmrun.branch").map(all, function(ids) return hidden_row(model, ids, salt) end,
        { concurrency = 64 })
    for i, row in ipairs(rows) do
        data[i] = json.object({ object = "embedding", index = i - 1, embedding = encoded(scaled(row, n), format) },
            { "object", "index", "embedding" })
    end
    return json.object({
        object = "list", data = data, model = name, usage = { prompt_tokens = total, total_tokens = total },
    }, { "object", "data", "model", "usage" })
end

return M
