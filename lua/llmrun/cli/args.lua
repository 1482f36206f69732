--- Command-line flags: declared in a table, parsed, and explained by --help.
---
--- A flag is { "name", short = "n", arg = "N", type = "integer|number|string|flag|list", default = v,
--- choices = {...}, range = { least, most }, above = X, help = "..." }; most may be left out. A flag without arg is
--- true when given. "--name=V", "--name V" and "-n V" are the same; "--" ends the flags. Names use dashes on the
--- command line and underscores in the result.

local kv_types = require "llmrun.kv_types"
local options = require "llmrun.options"

local M = {}

--- Flags of every command that loads a model.
M.model_flags = {
    { "model", short = "m", arg = "MODEL", default = "smollm2",
        help = "a GGUF file, or a name: smollm2, gemma3, qwen-0.5b, qwen-1.5b" },
    { "threads", short = "t", arg = "N", type = "integer", range = { 0, 256 },
        help = "compute threads (default: all processors)" },
    { "ctx", short = "c", arg = "N", type = "integer", range = { 1, 1 << 28 },
        help = "longest sequence in tokens (default: what the model allows)" },
    { "compute", arg = "MODE", choices = { "fast", "int8", "bf16", "f32", "loose" },
      help = "int8, bf16: form of activations; f32: the exact, slow reference path; loose: cuBLAS, on GPUs" },
    { "kv-type", arg = "TYPE", choices = kv_types,
      help = "number format of the KV cache" },
    { "kv-value-type", arg = "TYPE", choices = kv_types,
      help = "number format of its values (default: as --kv-type)" },
    { "block-size", arg = "N", type = "integer", range = { 1, 256 },
      help = "tokens in a KV block, 1 to 256 (default 16)" },
    { "device", arg = "NAME", help = "cpu, cuda:N or auto: a GPU if one can be used, else the CPU [auto]" },
    { "policy", arg = "NAME|FILE",
      help = "scheduling policy: a name (fair, mlfq:quantum=128) or a file (default: by arrival)" },
    { "watch", help = "reads the policy's file again whenever it changes" },
    { "trace", arg = "FILE", help = "writes a trace of steps, requests and hooks, for Perfetto or Chrome" },
}

-- Names that mean the same. A command that has a flag of one name takes the other too, unless it has that for itself.
-- text: only of flags whose value is no number.
local same = {
    { "ctx", "max-model-len" },
    { "draft", "speculative-model" },
    { "kv-type", "kv-cache-dtype" },
    { "load", "speed" },
    { "load-seed", "seed" },
    { "max-batch-tokens", "max-num-batched-tokens" },
    { "max-seqs", "max-num-seqs" },
    { "no-prefix-cache", "no-enable-prefix-caching" },
    { "out", "output", text = true },
    { "policy", "policies" },
    { "served-model", "served-model-name" },
    { "speculate", "speculative-method" },
    { "template", "chat-template" },
}

--- Adds the other names of flags to { [name] = flag }.
local function add_names(by_long)
    for _, names in ipairs(same) do
        local f = by_long[names[1]] or by_long[names[2]]
        if f and not (names.text and f.type) then
            for _, name in ipairs(names) do by_long[name] = by_long[name] or f end
        end
    end
end

--- The model flags as options of llm.load.
function M.load_options(o)
    return {
        threads = o.threads, ctx = o.ctx, compute = o.compute, device = o.device,
        kv = { type = o.kv_type, value_type = o.kv_value_type, block_size = o.block_size },
    }
end

--- All flags of a command: its own, those of models if it takes one, --help.
function M.flags_of(cmd)
    local list = {}
    local own = {}
    for _, f in ipairs(cmd.flags or {}) do list[#list + 1], own[f[1]] = f, true end
    for _, f in ipairs(cmd.model and M.model_flags or {}) do
        if not own[f[1]] then list[#list + 1] = f end
    end
    list[#list + 1] = { "help", short = "h", help = "shows this text" }
    return list
end

local function shown(n) return math.type(n) == "float" and ("%g"):format(n) or tostring(n) end

--- n, or nil and what is wrong with it.
local function in_range(f, name, n)
    local least, most = table.unpack(f.range or {})
    local wanted
    if f.above and n <= f.above then
        wanted = ("above %s"):format(shown(f.above))
    elseif least and most and (n < least or n > most) then
        wanted = ("%s to %s"):format(shown(least), shown(most))
    elseif least and n < least then
        wanted = ("at least %s"):format(shown(least))
    end
    if wanted then return nil, ("--%s: %s expected, got %s"):format(name, wanted, shown(n)) end
    return n
end

local may_be_empty = { TEXT = true, LINE = true, IDS = true }

local function convert(f, name, text)
    local kind = f.type or "string"
    if text == "" and not may_be_empty[f.arg] then
        return nil, ("--%s: %s expected, got an empty text"):format(name, f.arg)
    end
    if kind == "integer" then
        local n = math.tointeger(tonumber(text))
        if not n then return nil, ("--%s: integer expected, got '%s'"):format(name, text) end
        return in_range(f, name, n)
    elseif kind == "number" then
        local n = tonumber(text)
        if not n or n ~= n or math.abs(n) == math.huge then
            return nil, ("--%s: number expected, got '%s'"):format(name, text)
        end
        return in_range(f, name, n)
    end
    if f.choices then
        for _, c in ipairs(f.choices) do
            if c == text then return text end
        end
        return nil, ("--%s: one of %s expected, got '%s'"):format(name, table.concat(f.choices, ", "), text)
    end
    return text
end

local function unknown(word, flags)
    local names = {}
    for _, f in ipairs(flags) do names[#names + 1] = f[1] end
    local close = options.closest(word:gsub("^%-+", ""), names)
    return ("unknown flag %s%s"):format(word, close and " (did you mean --" .. close .. "?)" or "")
end

--- argv -> { name = value, ..., args = {...} }, or nil and a text.
function M.parse(cmd, _, argv)
    local flags, by_long, by_short = M.flags_of(cmd), {}, {}
    local out = { args = {} }
    for _, f in ipairs(flags) do
        by_long[f[1]] = f
        if f.short then by_short[f.short] = f end
        out[f[1]:gsub("-", "_")] = f.default
    end
    add_names(by_long)
    local i = 1
    while i <= #argv do
        local word, f, value, name = argv[i], nil, nil, nil
        if word == "--" then
            table.move(argv, i + 1, #argv, #out.args + 1, out.args)
            break
        elseif word:sub(1, 2) == "--" then
            name, value = word:match("^%-%-([^=]+)=(.*)$")
            name = name or word:sub(3)
            f = by_long[name]
            if not f then return nil, unknown("--" .. name, flags) end
        elseif word:match("^%-%a") then
            f = by_short[word:sub(2, 2)]
            if not f then return nil, unknown(word, flags) end
            if #word > 2 then value = word:sub(3) end
        end
        if word == "" then
            return nil, "an argument is an empty text"
        elseif not f then
            out.args[#out.args + 1] = word
        else
            local key = f[1]:gsub("-", "_")
            name = name or f[1]
            if f.arg then
                if value == nil then
                    i = i + 1
                    value = argv[i]
                    if value == nil then return nil, ("--%s needs a value (%s)"):format(name, f.arg) end
                end
                local v, err = convert(f, name, value)
                if v == nil then return nil, err end
                if f.type == "list" then
                    out[key] = out[key] or {}
                    table.insert(out[key], v)
                else
                    out[key] = v
                end
            elseif value ~= nil then
                return nil, ("--%s takes no value"):format(name)
            else
                out[key] = true
            end
        end
        i = i + 1
    end
    if not out.help and not cmd.args and #out.args > 0 then
        return nil, ("unexpected argument '%s'"):format(out.args[1])
    end
    return out
end

local function wrap(text, indent, width)
    local lines, line = {}, ""
    for word in text:gmatch("%S+") do
        if line ~= "" and #line + 1 + #word > width - indent then
            lines[#lines + 1] = line
            line = word
        else
            line = line == "" and word or line .. " " .. word
        end
    end
    lines[#lines + 1] = line
    return table.concat(lines, "\n" .. (" "):rep(indent))
end

--- The --help text of a command.
function M.help(cmd, name)
    local out = { ("usage: llmrun %s %s\n\n%s\n"):format(name, cmd.usage or "[FLAGS...]", cmd.summary) }
    if cmd.help then out[#out + 1] = "\n" .. cmd.help .. "\n" end
    out[#out + 1] = "\nflags:\n"
    for _, f in ipairs(M.flags_of(cmd)) do
        local left = (f.short and "-" .. f.short .. ", " or "    ") .. "--" .. f[1] .. (f.arg and " " .. f.arg or "")
        local text = f.help or ""
        if f.choices then text = text .. " (" .. table.concat(f.choices, ", ") .. ")" end
        if f.default ~= nil then text = text .. " [" .. tostring(f.default) .. "]" end
        out[#out + 1] = ("  %-24s %s\n"):format(left, wrap(text, 27, 100))
    end
    if cmd.examples then
        out[#out + 1] = "\nexamples:\n" .. cmd.examples:gsub("^%s*", "  "):gsub("\n%s*", "\n  ") .. "\n"
    end
    return table.concat(out)
end

--- A text of several lines with its common indent taken off.
function M.lines(text)
    local list = {}
    for line in text:gsub("^%s*\n", ""):gsub("%s+$", ""):gmatch("[^\n]*") do list[#list + 1] = line:gsub("^%s+", "") end
    return list
end

local quit = {} -- error value of M.fail

--- Ends a command with a plain message (no traceback) and an exit status (1).
function M.fail(text, status)
    error(setmetatable({ text = text, status = status or 1 }, quit), 0)
end
quit.__tostring = function(q) return q.text end

--- Calls fn(...): true and its result, or false, status, text if it ended in M.fail. Other errors go on.
function M.catch(fn, ...)
    local r = table.pack(xpcall(fn, function(e)
        if getmetatable(e) == quit then return e end
        return { e, debug.traceback(type(e) == "string" and e or tostring(e), 2) }
    end, ...))
    if r[1] then return true, table.unpack(r, 2, r.n) end
    if getmetatable(r[2]) == quit then return false, r[2].status, r[2].text end
    error(type(r[2]) == "table" and r[2][2] or r[2], 0) -- out of memory: no handler is called
end

return M
