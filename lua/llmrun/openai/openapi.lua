--- GET /openapi.json: the API of this server as an OpenAPI 3.1 document, made of the same limits that requests are
--- checked against. null is allowed wherever a field is optional, and counts as absent.

local json = require "llmrun.json"
local merged = require("llmrun.tables").merged

local M = {}

-- Schemas ------------------------------------------------------------------------------------------------------------

local function list(...) return json.array { ... } end

local function ref(name) return { ["$ref"] = "#/components/schemas/" .. name } end

local function also_null(s)
    if s.enum then
        local all = json.array { table.unpack(s.enum) }
        all[#all + 1] = json.null
        local out = {}
        for k, v in pairs(s) do out[k] = v end
        out.enum = all
        if type(out.type) == "string" then out.type = list(out.type, "null") end
        return out
    end
    if type(s.type) == "string" then
        local out = {}
        for k, v in pairs(s) do out[k] = v end
        out.type = list(s.type, "null")
        return out
    end
    return { anyOf = list(s, { type = "null" }) }
end

--- An object: the fields of `needed` must be there, those of `optional` may be, or be null.
local function object(needed, optional, more)
    local properties, required = {}, json.array()
    for k, v in pairs(needed or {}) do
        properties[k] = v
        required[#required + 1] = k
    end
    table.sort(required)
    for k, v in pairs(optional or {}) do properties[k] = also_null(v) end
    local s = { type = "object", properties = json.object(properties) }
    if #required > 0 then s.required = required end
    for k, v in pairs(more or {}) do s[k] = v end
    return s
end

local str, bool, number = { type = "string" }, { type = "boolean" }, { type = "number" }
local function integer(min, max) return { type = "integer", minimum = min, maximum = max } end
local function range(min, max) return { type = "number", minimum = min, maximum = max } end
local function one_of(...) return { type = "string", enum = list(...) } end
local function array(items, min, max) return { type = "array", items = items, minItems = min, maxItems = max } end
local function any(...) return { anyOf = list(...) } end
local function text(max, min) return { type = "string", maxLength = max, minLength = min } end

local tokens_most = 2147483647

-- Requests -----------------------------------------------------------------------------------------------------------

--- What all that draw tokens take.
local function sampling(l)
    local bias = range(-100, 100)
    return {
        temperature = range(0, 100), top_p = range(0, 1), top_k = integer(-1), min_p = range(0, 1),
        typical_p = range(0, 1), repetition_penalty = { type = "number", exclusiveMinimum = 0, maximum = 100 },
        presence_penalty = range(-2, 2), frequency_penalty = range(-2, 2),
        logit_bias = any({ type = "object", maxProperties = l.logit_bias, propertyNames = { pattern = "^[0-9]{1,9}$" },
            additionalProperties = bias }, array({ type = "array", prefixItems = list(integer(0), bias), minItems = 2,
            maxItems = 2 }, nil, l.logit_bias)),
        seed = { type = "integer" }, stop = any(text(l.stop_bytes), array(text(l.stop_bytes, 1), nil, l.stop)),
        stop_token_ids = array(integer(0), nil, l.stop_token_ids),
        allowed_token_ids = array(integer(0), 1, l.allowed_token_ids), min_tokens = integer(0, tokens_most),
        ignore_eos = bool, skip_special_tokens = bool, include_stop_str_in_output = bool,
        priority = integer(-1000000, 1000000), user = text(4096), cache_salt = text(1024), stream = bool,
        sampler = { type = "string", description = "Lua that returns what llm.sampler takes (--allow-scripts)" },
        model = text(1024),
    }
end

local schema_of_json = any({ type = "object" }, bool, str)

local function constraints()
    return {
        response_format = any(
            object({ type = one_of("text", "json_object") }),
            object({ type = one_of "json_schema", json_schema = object({ schema = schema_of_json },
                { name = str, strict = bool }) }),
            object({ type = one_of "regex", pattern = str }), object({ type = one_of "grammar", grammar = str })),
        guided_json = schema_of_json, guided_regex = str, guided_grammar = str, guided_choice = array(str, 1),
    }
end

local function several(l, least)
    return {
        n = integer(1, l.n), max_tokens = integer(least, tokens_most), max_completion_tokens = integer(least,
            tokens_most), stream_options = object(nil, { include_usage = bool,
            continuous_usage_stats = bool }), truncate_prompt_tokens = any(one_of(-1), integer(1, tokens_most)),
    }
end

local function tool_function(name_field)
    return object({ name = { type = "string", pattern = "^[A-Za-z0-9_.-]+$", maxLength = name_field or 64 } },
        { description = str, parameters = object(nil, { properties = { type = "object" } }) })
end

local function part(...) return object({ type = one_of(...), text = str }) end

local function message_schemas(l)
    local parts = array(part("text", "input_text", "output_text"), 1)
    local content = any(str, parts)
    local call = object({ ["function"] = object({ name = text(256) }, { arguments = any(str, { type = "object" }) }) },
        { id = text(256), type = one_of "function" })
    return {
        Tool = object({ type = one_of "function", ["function"] = tool_function() }),
        FlatTool = object(merged(tool_function().properties and { name = tool_function().properties.name }, {
            type = one_of "function" }), { description = str, parameters = object(nil, { properties = {
            type = "object" } }) }),
        Message = any(
            object({ role = one_of("system", "developer", "user", "tool", "function"), content = content },
                { name = text(256), tool_call_id = text(256) }),
            object({ role = one_of "assistant", content = content }, { tool_calls = array(call, nil, 128) }),
            object({ role = one_of "assistant", tool_calls = array(call, 1, 128) })),
        ToolChoice = any(one_of("none", "auto", "required"),
            object({ type = one_of "function", ["function"] = object { name = str } }),
            object({ type = one_of "allowed_tools", allowed_tools = object { mode = one_of("auto", "required"),
                tools = array(object { type = one_of "function", ["function"] = object { name = str } }, 1) } })),
        ChatRequest = object({ messages = array(ref "Message", 1, l.messages) }, merged(sampling(l), constraints(),
            several(l, 1), {
                logprobs = bool, top_logprobs = integer(0, l.logprobs), tools = array(ref "Tool", nil, l.tools),
                tool_choice = ref "ToolChoice", parallel_tool_calls = bool, add_generation_prompt = bool,
                chat_template_kwargs = { type = "object" }, reasoning_effort = text(32),
                modalities = array(one_of "text"),
            })),
    }
end

local function other_requests(l)
    local ids = array(integer(0))
    local words = text(l.text_bytes, 1)
    local inputs = any(words, array(integer(0), 1), array(words, 1, l.prompts),
        array(array(integer(0), 1), 1, l.prompts))
    local responses = merged(sampling(l), { max_output_tokens = integer(1, tokens_most), instructions = str,
        top_logprobs = integer(0, l.logprobs), tools = array(ref "FlatTool", nil, l.tools),
        tool_choice = any(one_of("none", "auto", "required"), object { type = one_of "function", name = str },
            object { type = one_of "allowed_tools", mode = one_of("auto", "required"),
                tools = array(object { type = one_of "function", name = str }, 1) }),
        parallel_tool_calls = bool, store = bool, background = { type = "boolean", enum = list(false) },
        metadata = { type = "object" },
        text = object(nil, { format = any(object { type = one_of("text", "json_object") },
            object({ type = one_of "json_schema", schema = schema_of_json }, { name = str, strict = bool })) }) })
    return {
        CompletionRequest = object({ prompt = inputs }, merged(sampling(l), constraints(), several(l, 0), {
            logprobs = integer(0, l.logprobs), echo = bool, best_of = integer(1, l.best_of), parse_special = bool,
            add_special_tokens = bool,
        })),
        ResponseRequest = object({ input = any(str, array(any(
            object({ role = one_of("system", "developer", "user"), content = any(str, array(part("input_text", "text"),
                1)) }, { type = one_of "message" }),
            object({ role = one_of "assistant", content = any(str, array(part("output_text", "text"), 1)) },
                { type = one_of "message" }),
            object({ type = one_of "function_call", name = text(256) }, { call_id = text(256), arguments = str }),
            object({ type = one_of "function_call_output", output = str }, { call_id = text(256) })), 1, l.messages)) },
            responses),
        EmbeddingRequest = object({ input = any(words, array(integer(0), 1), array(any(words,
            array(integer(0), 1)), 1, l.embeddings)) }, { model = text(1024), encoding_format = one_of("float",
            "base64"), dimensions = integer(1), user = str, cache_salt = text(1024) }),
        TokenizeRequest = any(
            object({ prompt = text(l.text_bytes) }, { model = text(1024), add_special_tokens = bool,
                parse_special = bool, return_token_strs = bool }),
            object({ messages = array(ref "Message", 1, l.messages) }, { model = text(1024), tools = array(ref "Tool",
                nil, l.tools), add_generation_prompt = bool, return_token_strs = bool })),
        DetokenizeRequest = object({ tokens = ids }, { model = text(1024), skip_special_tokens = bool }),
        ProgramRequest = object({ program = str }, { model = text(1024), args = array({}, nil, 256), stream = bool,
            cache_salt = text(1024), limits = object(nil, { seconds = number, timeout = number, memory = integer(1),
                tokens = integer(1), sessions = integer(1), output = integer(1) }) }),
    }
end

-- Answers ------------------------------------------------------------------------------------------------------------

local function logprob_schemas()
    local entry = { token = str, logprob = number, bytes = array(integer(0, 255)) }
    local nullable = { type = list("number", "null") }
    return {
        ChatLogprobs = object({ content = array(object(merged(entry, { top_logprobs = array(object(entry)) }))) },
            { refusal = array(object(entry)) }),
        CompletionLogprobs = object { tokens = array(str), token_logprobs = array(nullable),
            top_logprobs = array { type = list("object", "null") }, text_offset = array(integer(0)) },
        Usage = object({ prompt_tokens = integer(0), completion_tokens = integer(0), total_tokens = integer(0) },
            { prompt_tokens_details = object { cached_tokens = integer(0) } }),
    }
end

local function answers()
    local function whole(kind, fields) return object(merged({ object = one_of(kind) }, fields)) end
    local call = object { id = str, type = one_of "function", ["function"] = object { name = str, arguments = str } }
    local reason = one_of("stop", "length", "tool_calls")
    local model = whole("model", { id = str, created = integer(0), owned_by = str })
    return merged(logprob_schemas(), {
        Error = object { error = object({ message = str, type = str }, { param = str, code = str }) },
        Model = model,
        ModelList = whole("list", { data = array(ref "Model") }),
        ChatCompletion = whole("chat.completion", { id = str, created = integer(0), model = str, usage = ref "Usage",
            choices = array(object({ index = integer(0), message = object({ role = one_of "assistant" }, {
                content = str, refusal = str, tool_calls = array(call) }), finish_reason = reason }, { logprobs = ref
                "ChatLogprobs" })) }),
        Completion = whole("text_completion", { id = str, created = integer(0), model = str, usage = ref "Usage",
            choices = array(object({ index = integer(0), text = str, finish_reason = reason }, { logprobs = ref
                "CompletionLogprobs" })) }),
        Response = whole("response", { id = str, created_at = integer(0), model = str, output = array(object {
            type = one_of("message", "function_call"), id = str }), status = one_of("completed", "incomplete") }),
        Embeddings = whole("list", { model = str, data = array(object { object = one_of "embedding", index = integer(0),
            embedding = any(array(number), str) }), usage = object { prompt_tokens = integer(0), total_tokens =
            integer(0) } }),
        Tokens = object({ count = integer(0), tokens = array(integer(0)), max_model_len = integer(1) },
            { token_strs = array(str) }),
        Text = object { prompt = str },
        ProgramResult = whole("program.result", { id = str, created = integer(0), model = str, values = array {},
            output = str, usage = { type = "object" } }),
        Health = object({ status = one_of("ok", "ending", "failed") }, { reason = str }),
    })
end

-- Paths --------------------------------------------------------------------------------------------------------------

local reasons = {
    ["400"] = "a field is wrong; error.param names it", ["401"] = "no valid key", ["403"] = "not allowed",
    ["404"] = "no such model", ["413"] = "the body is too long", ["415"] = "the body is no JSON",
    ["429"] = "too many at once", ["501"] = "this model can't", ["503"] = "overloaded, or ending",
}

local function content(schema, kind) return json.object { [kind or "application/json"] = { schema = schema } } end

local function responses_of(good, ...)
    local all = { ["200"] = good }
    for _, status in ipairs { "401", "403", "503", ... } do
        all[status] = { description = reasons[status], content = content(ref "Error") }
    end
    return json.object(all)
end

local function post(name, summary, request, answer, streams, ...)
    local good = content(ref(answer))
    if streams then
        good["text/event-stream"] = json.object() -- events, each a JSON text; the last one is [DONE]
    end
    return { post = {
        operationId = name, summary = summary,
        requestBody = { required = true, content = content(ref(request)) },
        responses = responses_of({ description = "the answer", content = good }, "400", "404", "413", "415", "429",
            ...),
    } }
end

local function get(name, summary, answer, more, kind)
    local op = { operationId = name, summary = summary, responses = responses_of({ description = "the answer",
        content = content(answer, kind) }, "404") }
    for k, v in pairs(more or {}) do op[k] = v end
    return { get = op }
end

local function paths(server, scripts)
    local all = {
        ["/v1/chat/completions"] = post("createChatCompletion", "An answer to a conversation", "ChatRequest",
            "ChatCompletion", true),
        ["/v1/completions"] = post("createCompletion", "What follows a text", "CompletionRequest", "Completion", true),
        ["/v1/responses"] = post("createResponse", "An answer, as items", "ResponseRequest", "Response", true),
        ["/v1/embeddings"] = post("createEmbedding", "A vector for each text", "EmbeddingRequest", "Embeddings", false,
            "501"),
        ["/tokenize"] = post("tokenize", "The token ids of a text or conversation", "TokenizeRequest", "Tokens"),
        ["/detokenize"] = post("detokenize", "The text of token ids", "DetokenizeRequest", "Text"),
        ["/v1/models"] = get("listModels", "The models that are served", ref "ModelList"),
        ["/v1/models/{model}"] = get("retrieveModel", "One of them", ref "Model", { parameters = list { name = "model",
            ["in"] = "path", required = true, schema = { type = "string", minLength = 1 } } }),
        ["/health"] = get("health", "Whether requests are taken", ref "Health", { security = json.array() }),
        ["/metrics"] = get("metrics", "Figures for Prometheus", { type = "string" }, nil, "text/plain"),
    }
    if scripts then
        all["/v1/programs"] = post("runProgram", "Runs a Lua program beside the engine", "ProgramRequest",
            "ProgramResult", true)
    end
    if not server.keys then
        for _, p in pairs(all) do
            for _, op in pairs(p) do op.responses["401"], op.security = nil, nil end
        end
    end
    return json.object(all)
end

--- The document for a server whose API this is.
---@param api table
function M.document(api)
    local l = api.limits
    local doc = {
        openapi = "3.1.0",
        info = { title = "llmrun", version = "1", description = "The OpenAI API, and what llmrun serve adds to it." },
        paths = paths(api.server, api.scripts),
        components = { schemas = json.object(merged(message_schemas(l), other_requests(l), answers())) },
    }
    if api.server.keys then
        doc.components.securitySchemes = { key = { type = "http", scheme = "bearer" } }
        doc.security = list { key = json.array() }
    end
    return json.object(doc, { "openapi", "info", "security", "paths", "components" })
end

return M
