--- llmrun serve: models behind the OpenAI API, with routes and a policy of one's own.

local args = require "llmrun.cli.args"
local branch = require "llmrun.branch"
local common = require "llmrun.cli.common"
local core = require "llmrun.core"
local kv_types = require "llmrun.kv_types"
local loop = require "llmrun.loop"

local M = {
    summary = "serves models over HTTP with the OpenAI API",
    usage = "[-m MODEL]... [FLAGS...]",
    help = [[
Answers /v1/chat/completions, /v1/completions, /v1/models and more (see lua/llmrun/openai), /health, /metrics, and shows
a page at /. Without an API key it listens on this machine only unless --host says otherwise. --routes names a Lua file
that returns a table of further routes, { ["POST /path"] = function(req, res) ... end }. SIGTERM and Ctrl-C end it after
the requests that have come are answered. Flags are called as vLLM calls them; the names that other commands have for
the same (--ctx, --kv-type, --draft, ...) are taken too.]],
    examples = [[
        llmrun serve -m qwen-0.5b
        llmrun serve -m smollm2 -m qwen-0.5b --port 9000 --api-key secret --host 0.0.0.0
        llmrun serve --routes triage.lua --policy fair
        llmrun serve -m qwen-0.5b --record today.rec
        curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \
            -d '{"messages":[{"role":"user","content":"Hello"}]}']],
    flags = {
        { "model", short = "m", arg = "MODEL", type = "list",
            help = "a GGUF file, or a name (smollm2, gemma3, qwen-0.5b, ...); may be given more than once [smollm2]" },
        { "host", arg = "ADDRESS", default = "127.0.0.1", help = "address to listen on" },
        { "port", short = "p", arg = "N", type = "integer", range = { 0, 65535 }, default = 8080,
            help = "0: any free one" },
        { "api-key", arg = "KEY", type = "list",
            help = "requests need one of these keys (also from LLMRUN_API_KEY); may be given more than once" },
        { "served-model-name", arg = "NAME", type = "list",
            help = "name of the (first) model in the API; further ones are further names" },
        { "adapter", arg = "NAME=PATH", type = "list",
            help = "a low-rank adapter of the first model (a PEFT folder or a GGUF file), served as MODEL:NAME" },
        { "max-model-len", short = "c", arg = "N", type = "integer", range = { 1, 1 << 28 },
            help = "longest sequence in tokens" },
        { "max-num-seqs", arg = "N", type = "integer", range = { 1, 4096 },
            help = "requests in a batch at most (default 64)" },
        { "max-num-batched-tokens", arg = "N", type = "integer", range = { 1, 1 << 16 },
            help = "tokens in a batch at most (default 512)" },
        { "max-queue", arg = "N", type = "integer", range = { 1 },
            help = "requests that may wait before 503 is answered (1024)" },
        { "block-size", arg = "N", type = "integer", range = { 1, 256 },
            help = "tokens in a KV block, 1 to 256 (default 16)" },
        { "kv-memory", arg = "X", type = "number", above = 0,
            help = "of the memory that is free: a fraction, or bytes" },
        { "kv-cache-dtype", arg = "TYPE", choices = { "auto", table.unpack(kv_types) },
            help = "number format of the KV cache" },
        { "enable-prefix-caching", help = "keeps computed prefixes for later requests (the default)" },
        { "no-enable-prefix-caching", help = "does not" },
        { "enable-chunked-prefill", help = "computes long prompts in pieces between other work (the default)" },
        { "no-enable-chunked-prefill", help = "computes each prompt in one step" },
        { "speculative-model", arg = "MODEL", help = "a small model of the same vocabulary that drafts" },
        { "speculative-method", arg = "METHOD", choices = { "ngram", "suffix", "draft" },
            help = "drafts from what was said before, or the draft model's (its default)" },
        { "num-speculative-tokens", arg = "N", type = "integer", range = { 1, 64 },
            help = "tokens of a draft at most" },
        { "policy", arg = "FILE", help = "who runs when: a Lua file (read again when it changes) or a name" },
        common.record_flag,
        { "attach-socket", arg = "PATH",
            help = "socket for llmrun attach, in a folder that is yours alone [$XDG_RUNTIME_DIR/llmrun/PID.sock; "
                .. "/tmp/llmrun-UID/PID.sock without that variable]" },
        { "no-attach", help = "no such socket" },
        { "trace", arg = "FILE", help = "writes a trace of the (first) model's steps and requests, for Perfetto" },
        { "routes", arg = "FILE", help = "a Lua file that returns further routes" },
        { "allow-scripts", help = "requests may carry Lua samplers and programs; they run in a sandbox" },
        { "script-limit", arg = "NAME=N", type = "list",
            help = "a limit of such scripts: seconds, timeout, memory, tokens, sessions, output, ..." },
        { "chat-template", arg = "FILE", help = "Jinja file in place of the model's chat template" },
        { "cors", arg = "ORIGIN", type = "list", help = "lets a browser's pages of this origin in (* for all)" },
        { "allowed-host", arg = "NAME", type = "list", help = "a further Host name of this server" },
        { "max-body", arg = "BYTES", type = "integer", range = { 1 }, help = "longest request body (default 64 MiB)" },
        { "request-timeout", arg = "SECONDS", type = "number", above = 0, help = "ends requests that take longer" },
        { "max-busy", arg = "SECONDS", type = "number", above = 0,
            help = "ends requests whose route computes for longer without waiting (default 30)" },
        { "drain-timeout", arg = "SECONDS", type = "number", range = { 0 },
            help = "how long the end waits for answers (default 30)" },
        { "no-page", help = "no page at /" },
        { "open-page", help = "with keys: the page at / itself comes without one, and asks for it" },
        { "threads", short = "t", arg = "N", type = "integer", range = { 0, 256 },
            help = "compute threads (default: all processors)" },
        { "compute", arg = "MODE", help = "fast, bf16, f32, ...: see llmrun run --help" },
        { "device", arg = "NAME", help = "cpu, cuda:N or auto: a GPU if one can be used, else the CPU [auto]" },
    },
}

local function on_off(o, name)
    if o["enable_" .. name] and o["no_enable_" .. name] then
        args.fail(("--enable-%s and --no-enable-%s contradict each other"):format(name:gsub("_", "-"), name), 2)
    end
    return not o["no_enable_" .. name]
end

local function load_options(o)
    local chunked = on_off(o, "chunked_prefill")
    local type = o.kv_cache_dtype ~= "auto" and o.kv_cache_dtype or nil
    local max_batch = o.max_num_batched_tokens
    if not chunked then max_batch = math.max(max_batch or 0, o.max_model_len or 8192) end
    local drafts = { draft = o.speculative_model, method = o.speculative_method, k = o.num_speculative_tokens }
    if drafts.k and not (drafts.draft or drafts.method) then
        args.fail("--num-speculative-tokens without --speculative-model or --speculative-method", 2)
    end
    return {
        speculate = next(drafts) and drafts or nil,
        threads = o.threads, ctx = o.max_model_len, compute = o.compute, device = o.device, max_seqs = o.max_num_seqs,
        max_batch_tokens = max_batch, prompt_rows = not chunked and max_batch or nil,
        template = o.chat_template and common.read_file(o.chat_template) or nil,
        kv = { type = type, block_size = o.block_size, memory = o.kv_memory,
            prefix_cache = on_off(o, "prefix_caching") },
    }
end

--- Name under which a model is served: as it was asked for, a file without folder and ending.
local function short_name(what) return (what:match("([^/]+)/*$"):gsub("%.gguf$", "")) end

--- Adapters of the first model, each as a model "NAME:ADAPTER".
local function load_adapters(o, first)
    local named = {}
    for _, text in ipairs(o.adapter or {}) do
        local name, path = text:match "^([^=/]+)=(.+)$"
        if not name then args.fail(("--adapter %s: NAME=PATH expected"):format(text), 2) end
        local a = common.guard(first.model.adapter, first.model, path, { name = name })
        named[("%s:%s"):format(first.name, name)] = first.model:with(a)
    end
    return named
end

local function load_models(o)
    local list, names, given = {}, {}, o.model or { "smollm2" }
    for i, what in ipairs(given) do
        local model = common.load({ model = what, trace = i == 1 and o.trace or nil }, load_options(o))
        local name = short_name(what)
        if names[name] then args.fail(("two models are called %s"):format(name), 2) end
        names[name], list[#list + 1] = model, { name = name, model = model }
    end
    local aliases = {}
    for i, name in ipairs(o.served_model_name or {}) do
        if i == 1 then list[1].name = name else aliases[name] = list[1].model end
    end
    for name, view in pairs(load_adapters(o, list[1])) do aliases[name] = view end
    return list, aliases
end

--- Seconds that a file of routes may take: it may load further models, or wait for something. Who waits for the server
--- is told after M.routes_note.
M.routes_time, M.routes_note = 600, 10

--- What a file of routes returns (nil: no file); ends the command if it is no table.
function M.load_routes(path)
    if not path then return nil end
    local chunk, err = loadfile(path, "t")
    if not chunk then args.fail(err) end
    local folder = path:match("^(.*)/[^/]*$") or "."
    package.path = folder .. "/?.lua;" .. folder .. "/?/init.lua;" .. package.path
    local note = loop.after(M.routes_note, function()
        io.stderr:write(("llmrun: %s still runs; the server begins when it has returned its routes\n"):format(path))
    end)
    local routes, why, code = branch.timeout(M.routes_time, chunk, path)
    loop.cancel_timer(note)
    if code == "limit" then args.fail(("%s: %s"):format(path, why)) end
    if type(routes) ~= "table" then args.fail(path .. ": a table of routes expected, got " .. type(routes)) end
    return routes
end

local function api_keys(o)
    local keys = o.api_key
    local from_env = os.getenv "LLMRUN_API_KEY"
    if not keys and from_env and from_env ~= "" then keys = { from_env } end
    return keys
end

--- What would fail once the models are loaded, which may take minutes, fails now: an address that is not to be had, a
--- policy that does not load. Returns the policy (policy.prepare).
local function look_ahead(o)
    local listener, why = core.http_new { host = o.host, port = o.port }
    if not listener then args.fail(why) end
    listener:close()
    if not o.policy or o.policy == "default" then return nil end
    local policy, err = require("llmrun.policy").prepare(o.policy)
    if not policy then args.fail(("--policy %s: %s"):format(o.policy, err)) end
    return policy
end

--- Each model has a policy of its own; the first one's has been read already.
local function use_policy(model, policy, first)
    if not policy then return end
    local name, own = policy.name, policy.options
    if name:find("[/.]") then
        return common.guard(model.watch, model, name, { options = own, ready = first and policy or nil })
    end
    common.guard(model.use, model, name, own)
end

local function scripts_of(o)
    if o.script_limit and not o.allow_scripts then args.fail("--script-limit without --allow-scripts", 2) end
    if not o.allow_scripts then return nil end
    local limits = {}
    for _, text in ipairs(o.script_limit or {}) do
        local name, n = text:match("^([%w_]+)=(.+)$")
        limits[name or text] = tonumber(n) or args.fail(("--script-limit %s: NAME=NUMBER expected"):format(text), 2)
    end
    return limits
end

local function page_of(o)
    if o.no_page then return false end
    return o.open_page and "open" or true
end

--- The console for llmrun attach: where the flag says, else in the user's own folder, if that can be.
local function open_console(o, models, server)
    local attach = require "llmrun.attach"
    if o.no_attach then return nil end
    local ok, console = pcall(attach.listen, { models = models, path = o.attach_socket, server = server })
    if ok then return console end
    if o.attach_socket then error(console, 0) end
    io.stderr:write("llmrun: no console: ", tostring(console), "\n")
end

function M.run(o)
    common.record(o)
    local scripts = scripts_of(o)
    local policy = look_ahead(o)
    local routes = M.load_routes(o.routes)
    local list, aliases = load_models(o)
    local models, names = {}, {}
    for i, entry in ipairs(list) do
        models[i], names[entry.model] = entry.model, entry.name
        use_policy(entry.model, policy, i == 1)
    end
    local console
    local guard <close> = setmetatable({}, { __close = function() -- luacheck: ignore 211
        if console then console:close() end
    end })
    common.guard(require("llmrun.serve").run, {
        host = o.host, port = o.port, models = models, model_names = names, routes = routes, api_keys = api_keys(o),
        openai = { names = aliases, max_queue = o.max_queue }, page = page_of(o), cors = o.cors,
        hosts = o.allowed_host, max_body = o.max_body, request_timeout = o.request_timeout,
        max_busy = o.max_busy, drain_timeout = o.drain_timeout, scripts = scripts,
        on_ready = function(server)
            console = open_console(o, models, server)
            local shown = {}
            for i, entry in ipairs(list) do shown[i] = entry.name end
            io.stderr:write(("llmrun: serving %s at %s (%s)\n"):format(table.concat(shown, ", "), server:url(),
                list[1].model.info.backend))
            if not server.keys and not server.check_host then
                io.stderr:write("llmrun: no API key is set: whoever reaches this address can use it\n")
            end
        end,
    })
    return 0
end

return M
