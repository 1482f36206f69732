--- Programs in requests, where the server lets them in (llm.serve's option scripts, --allow-scripts): a sampler in a
--- completion (field "sampler"), or a whole program (POST /v1/programs). Both run in the untrusted profile of
--- sandbox.lua.
---
---   { "messages": [...], "sampler": "return { { 'top_k', 40 }, function(logits, ctx) logits:mask(13) end }" }
---   { "program": "local s = llm.model:session() s:append(...) return s:gen{ max_tokens = 8 }.text",
---     "args": ["Once"] }
---
--- A program finds the request's model as llm.model, each by its name in llm; args are its `...`. The answer has what
--- it returned (values), what it printed (output) and its usage; with stream the output comes as events. Its `limits`
--- may be lower than the server's, never higher. Errors in scripts are their sender's: 400, script_error, script_limit.

local errors = require "llmrun.errors"
local exchange = require "llmrun.exchange"
local fields = require "llmrun.openai.fields"
local json = require "llmrun.json"
local options = require "llmrun.options"
local sampler = require "llmrun.sandbox.sampler"
local sandbox = require "llmrun.sandbox"

local M = {}

--- The limits of one request, and how many scripts run at once; changed with the option scripts.
M.limits = {
    source = 256 << 10, -- bytes of its text
    seconds = 5, -- of processor time
    timeout = 60, -- of a program as a whole
    memory = 32 << 20, tokens = 4096, sessions = 16,
    output = 256 << 10, -- bytes printed
    step_seconds = 0.1, -- of processor time of a sampler's call
    choices = 8, -- of a request with a sampler
    at_once = 16,
}

--- The settings of a server: nil if scripts are off.
function M.settings(given)
    if not given then return nil end
    local types, all = {}, {}
    for k, v in pairs(M.limits) do types[k], all[k] = "number", v end
    if type(given) == "table" then
        options.check("llm.serve: scripts", given, types, 4)
        for k, v in pairs(given) do
            if v <= 0 then require("llmrun.errors").raise("llm.serve", ("scripts.%s: above 0 expected"):format(k)) end
            all[k] = v
        end
    end
    return { limits = all, running = 0 }
end

--- A browser tells where a request comes from: pages of others may not send scripts, whatever the server's address.
local function check_origin(req)
    local origin, host = req.headers.origin, req.headers.host
    if origin and not (host and origin:lower():match("^https?://(.*)$") == host:lower()) and not
        req.server.cors[origin] then
        exchange.fail(403, "scripts from pages of another origin are not taken", nil, "origin_not_allowed")
    end
end

local function check_allowed(api, req, param)
    if not api.scripts then
        exchange.fail(403, "this server takes no scripts (see llmrun serve --allow-scripts)", param, "scripts_off")
    end
    check_origin(req)
end

--- A place among the scripts that run at once; given back when it is closed.
local function take_place(api)
    local s = api.scripts
    if s.running >= s.limits.at_once then
        exchange.fail(429, "too many scripts are running", nil, "overloaded")
    end
    s.running = s.running + 1
    return setmetatable({}, { __close = function() s.running = s.running - 1 end })
end

local function code_of(code) return code == "limit" and "script_limit" or "script_error" end

-- Samplers -----------------------------------------------------------------------------------------------------------

local Script = {}
Script.__index = Script

local function told(text)
    text = text:gsub("^sandbox%.sampler: ", "")
    return text:find("^sampler:") and text or "sampler: " .. text
end

--- A sampler for one choice, to be closed; its stages are in it.
function Script:start()
    local l = self.api.scripts.limits
    local s, err, code = sampler.new(self.source, { memory = l.memory, seconds = l.seconds,
        step_seconds = l.step_seconds })
    if not s then exchange.fail(400, told(err), "sampler", code_of(code)) end
    return s
end

--- Raises what an error of a choice becomes that had a sampler: its own failure, or that of the stages it asked for.
function M.explain(s, e)
    if s.failure then
        exchange.fail(400, told(s.failure), "sampler", code_of(s.failure:find("limit", 1, true) and "limit"))
    elseif exchange.is_failure(e) and e.status == 400 and not e.param then
        exchange.fail(400, told(e.message), "sampler", "script_error")
    elseif errors.is(e) and e.code == "script" then
        exchange.fail(400, told(e.message), "sampler", "script_error")
    end
    error(e, 0)
end

local replaced = { "temperature", "top_k", "top_p", "min_p", "typical_p" }

--- Reads the field; its program is run once here, so that what is wrong with it is told before the answer begins.
function M.read(api, r, req, o)
    local source = r:text "sampler"
    if not source then return end
    check_allowed(api, req, "sampler")
    local l = api.scripts.limits
    fields.text("sampler", source, l.source)
    for _, name in ipairs(replaced) do
        if r:get(name) ~= nil then
            fields.bad(name, "no effect beside sampler: make it one of the sampler's stages")
        end
    end
    local n = math.max(o.n, o.best_of or 1)
    if n > l.choices then fields.bad("n", ("at most %d choices with a sampler"):format(l.choices)) end
    if o.max_tokens and o.max_tokens > l.tokens then
        fields.bad("max_tokens", ("at most %d with a sampler"):format(l.tokens))
    end
    o.gen.max_tokens = o.gen.max_tokens or l.tokens
    o.script = setmetatable({ api = api, source = source }, Script)
    local s <close> = o.script:start()
    local ok, err = pcall(require("llmrun.sampler").new, s.stages)
    if not ok then fields.bad("sampler", (tostring(err):gsub("^.-llm%.sampler: ", "")), "script_error") end
end

--- Room for the samplers of a request, and nothing for one that has none.
function M.place(api, o) return o.script and take_place(api) or nil end

-- Programs -----------------------------------------------------------------------------------------------------------

local lower = { "seconds", "timeout", "memory", "tokens", "sessions", "output" }

local function read_limits(api, r)
    local given, limits = r:object "limits", {}
    local lr = given and fields.reader(given, "limits.")
    for _, name in ipairs(lower) do
        local most = api.scripts.limits[name]
        local whole = name ~= "seconds" and name ~= "timeout"
        local v = lr and (whole and lr:integer(name, 1, most) or not whole and lr:number(name, 0.001, most))
        limits[name] = v or most
    end
    return limits
end

local function read(api, req, r)
    check_allowed(api, req, nil)
    local o = read_limits(api, r)
    o.source = r:text("program", api.scripts.limits.source)
    if not o.source then fields.wrong_type("program", "string", json.null) end
    o.args = {}
    for i, v in ipairs(r:array("args", 256) or {}) do o.args[i] = v end
    o.salt = "script:" .. (req.key or "") .. ":" .. (r:text("cache_salt", 1024) or "")
    o.stream = r:boolean "stream"
    return o
end

local function usage_of(u)
    return json.object({ completion_tokens = u.completion_tokens, seconds = u.seconds, cpu_seconds = u.cpu_seconds,
        memory = u.memory }, { "completion_tokens", "seconds", "cpu_seconds", "memory" })
end

local function result_of(name, result)
    local values = json.array()
    for i = 1, result.values.n do
        values[i] = result.values[i]
        if values[i] == nil then values[i] = json.null end
    end
    local body = json.object({
        id = require("llmrun.openai.choices").id "prog", object = "program.result", created = os.time(), model = name,
        values = values, output = result.output, usage = usage_of(result.usage),
    }, { "id", "object", "created", "model", "values", "output", "usage" })
    local text, err = json.encode(body, { replace = true })
    if not text then exchange.fail(400, "program: what it returned is nothing that JSON holds: " .. err, "program",
        "script_error") end
    return text
end

--- POST /v1/programs
function M.answer(api, req, res)
    local r = fields.read(req)
    local model, name = api:model(r)
    local o = read(api, req, r)
    api:admit(req, model, {})
    local place <close> = take_place(api) -- luacheck: ignore 211
    local result, err, code = sandbox.run(o.source, {
        model = model, models = api.by_name, args = o.args, name = "program", seconds = o.seconds,
        timeout = o.timeout, memory = o.memory, tokens = o.tokens, sessions = o.sessions, output = o.output,
        salt = o.salt, on_print = o.stream and function(text)
            res:event(json.object({ object = "program.output", text = text }, { "object", "text" }))
        end or nil,
    })
    if not result then exchange.fail(400, (err:gsub("^sandbox%.run: ", "program: ")), "program", code_of(code)) end
    local text = result_of(name, result)
    if not o.stream then return res:answer(200, text, "application/json") end
    res:event(text)
    res:event "[DONE]"
end

return M
