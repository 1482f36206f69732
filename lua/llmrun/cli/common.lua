--- What the commands share: loading with a word on the terminal, progress, sizes and numbers for people.

local core = require "llmrun.core"
local args = require "llmrun.cli.args"
local errors = require "llmrun.errors"

local M = {}

--- "1.1 GB", "98 MB", "512 B"
function M.size(bytes)
    if bytes >= 1e9 then return ("%.2f GB"):format(bytes / 1e9) end
    if bytes >= 1e6 then return ("%.1f MB"):format(bytes / 1e6) end
    if bytes >= 1e3 then return ("%.1f kB"):format(bytes / 1e3) end
    return ("%d B"):format(bytes)
end

--- The file of a model's name; ends the command if there is none.
function M.find(name)
    local path, err = require("llmrun.catalog").find(name)
    if not path then args.fail(err) end
    return path
end

--- A line on the terminal that says how far something is: p(text), p() removes it. Shown only on a terminal, and only
--- once a second has gone by.
function M.progress()
    local begin, shown = core.now(), false
    local tty = core.isatty(2)
    return function(text)
        if not tty then return end
        if not text then
            if shown then io.stderr:write("\r\27[K") end
            shown = false
        elseif core.now() - begin > 1 then
            io.stderr:write("\r\27[K", text:sub(1, core.term_width() - 1))
            shown = true
        end
    end
end

--- A bar on the terminal: b(fraction, text), b() removes it. Shown as M.progress is.
function M.bar()
    local show, begin = M.progress(), core.now()
    return function(fraction, text)
        if not fraction then return show() end
        local full = math.floor(24 * fraction + 0.5)
        local left = fraction > 0.02 and (core.now() - begin) * (1 / fraction - 1)
        show(("[%s%s] %3d %%  %s%s"):format(("#"):rep(full), (" "):rep(24 - full), math.floor(100 * fraction),
            left and left > 1 and ("%d s left  "):format(math.ceil(left)) or "", text or ""))
    end
end

--- "mlfq:quantum=128,levels=4" as a name or file and the policy's options (nil: none).
function M.policy_of(text)
    local what, opts = require("llmrun.policy").parse(text)
    if not what then args.fail("--policy: " .. opts, 2) end
    return what, opts
end

--- Puts the policy of the flags --policy and --watch in charge.
function M.use_policy(model, opts)
    if not opts.policy then
        if opts.watch then args.fail("--watch needs --policy FILE", 2) end
        return
    end
    local what, own = M.policy_of(opts.policy)
    if opts.watch then model:watch(what, { options = own }) else model:use(what, own) end
end

--- The flag --record, and what it asks for: models that are loaded afterwards are recorded.
M.record_flag = { "record", arg = "FILE", help = "writes down all that llmrun replay needs to repeat this run" }

function M.record(o)
    if o.record then require("llmrun.record").path = o.record end
end

--- Loads the model that the flags name; more: further options of llm.load. Ends the command if it can't be had.
function M.load(opts, more)
    local llm = require "llmrun"
    local load_opts = args.load_options(opts)
    M.record(opts)
    for k, v in pairs(more or {}) do load_opts[k] = v end
    local path = M.find(opts.model)
    local _, bytes = core.stat(path)
    local slow = (bytes or 0) > 3e8 and core.isatty(2)
    if slow then io.stderr:write(("\r\27[Kloading %s (%s) ..."):format(path:match("[^/]+$"), M.size(bytes))) end
    local ok, model = pcall(llm.load, path, load_opts)
    if slow then io.stderr:write("\r\27[K") end
    if ok then
        M.guard(M.use_policy, model, opts)
        if opts.trace then M.guard(model.trace, model, opts.trace) end
        return model
    end
    if errors.is(model) then args.fail((model.message:gsub("^llm%.load: ", ""))) end
    error(model, 0)
end

--- Calls fn(...); an error of the library's ends the command with its text, others with a traceback.
function M.guard(fn, ...)
    local r = table.pack(pcall(fn, ...))
    if r[1] then return table.unpack(r, 2, r.n) end
    if errors.is(r[2]) then args.fail((r[2].message:gsub("^%a+:%a+: ", ""):gsub("^llmrun%.%a+: ", ""))) end
    error(r[2], 0)
end

local function read_all(f, name)
    local text, err = f:read("a")
    if not text then args.fail(("%s: %s"):format(name, err)) end
    return text
end

--- Ends the command with what went wrong: common.check(file:write(text)).
function M.check(ok, err)
    if not ok then args.fail(err) end
    return ok
end

--- A file to be written (files.lua), nil without a path; ends the command if it can't be.
function M.create(path) return path and M.check(require("llmrun.files").create(path)) or nil end

--- All of a file, or of standard input; ends the command if it can't be read.
function M.read_file(path)
    local f <close>, err = io.open(path, "rb") -- that of a directory succeeds
    if not f then args.fail(err) end
    return read_all(f, path)
end

--- Without io.read, which misses a Ctrl-C that comes just before it waits.
function M.read_stdin()
    local parts = {}
    while true do
        local s, err = core.read()
        if err then args.fail(err) end
        if s == "" then return table.concat(parts) end
        if not s and core.interrupted() then args.fail("interrupted", 130) end
        parts[#parts + 1] = s
    end
end

--- Text of a flag: itself, "-" standard input, "@FILE" a file.
function M.text_of(value)
    if value == "-" then return M.read_stdin() end
    local path = value:match("^@(.+)$")
    return path and M.read_file(path) or value
end

--- Mean, standard deviation, median of a list.
function M.statistics(list)
    local n, sum = #list, 0
    for _, v in ipairs(list) do sum = sum + v end
    local mean, square = sum / n, 0
    for _, v in ipairs(list) do square = square + (v - mean) ^ 2 end
    local sorted = table.move(list, 1, n, 1, {})
    table.sort(sorted)
    local mid = sorted[(n + 1) // 2]
    if n % 2 == 0 then mid = (mid + sorted[n // 2 + 1]) / 2 end
    return mean, n > 1 and (square / (n - 1)) ^ 0.5 or 0, mid
end

--- Token ids cut into lists of size, each begun with bos if there is one; the tail that fills none is left out,
--- as long as there is a full one.
function M.windows(ids, size, bos)
    local list = {}
    for at = 1, #ids - size + 1, size do
        local w = table.move(ids, at, at + size - 1, 1, {})
        if bos then w[1] = bos end
        list[#list + 1] = w
    end
    if #list == 0 then list[1] = ids end
    return list
end

--- The flag of a chat template, and the template it names: Jinja text, or for a .lua file the function it returns.
M.template_flag = {
    "template", arg = "FILE", help = "chat template instead of the model's: Jinja, or Lua that returns a function",
}

function M.template(path)
    if not path then return nil end
    if not path:find("%.lua$") then return M.read_file(path) end
    local template, err = require("llmrun.userfile").load(path)
    if err then args.fail(err) end
    if type(template) ~= "function" then args.fail(path .. " must return a function") end
    return template
end

--- Ends the command if the model can't chat.
function M.check_chat(model, hint)
    if not model.chat:has_template() then
        args.fail(("the model has no chat template; give one with --template FILE%s"):format(hint or ""))
    end
end

--- Sampling flags of the commands that generate, and the options of gen that they stand for.
M.sampling_flags = {
    { "max-tokens", short = "n", arg = "N", type = "integer", range = { 1 },
        help = "most tokens to generate (default: to the end)" },
    { "temperature", arg = "X", type = "number", range = { 0 },
        help = "0: always the most probable token (default: as the model recommends, else 0.7)" },
    { "top-k", arg = "N", type = "integer", help = "draw from the N most probable (0: all)" },
    { "top-p", arg = "X", type = "number", range = { 0, 1 },
        help = "draw from the most probable that make up X (default: as the model recommends, else 0.95)" },
    { "min-p", arg = "X", type = "number", range = { 0, 1 },
        help = "leave out what is less probable than X times the best" },
    { "repetition-penalty", arg = "X", type = "number", above = 0,
        help = "above 1: tokens that were there are less probable" },
    { "stop", arg = "TEXT", type = "list", help = "ends at this text; may be given more than once" },
    { "seed", arg = "N", type = "integer", help = "same seed, same text" },
    { "speculate", arg = "METHOD", choices = { "ngram", "suffix", "draft", "early_exit", "heads", "eagle", "off" },
        help = "drafts several tokens a step, the text stays the same; draft: with --draft" },
    { "draft", arg = "MODEL", help = "a small model of the same vocabulary that drafts" },
    { "draft-layers", arg = "N", type = "integer", range = { 1 },
        help = "early_exit: so many of the model's layers draft" },
    { "heads", arg = "FILE", help = "Medusa heads that draft (scripts/train_heads)" },
    { "eagle", arg = "FOLDER", help = "an EAGLE head that drafts (scripts/train_heads)" },
}

--- The option speculate of llm.load that these flags stand for.
function M.drafts(o)
    if o.speculate == "draft" and not o.draft then args.fail("--speculate draft needs --draft MODEL", 2) end
    if o.speculate == "heads" and not o.heads then args.fail("--speculate heads needs --heads FILE", 2) end
    if o.speculate == "eagle" and not o.eagle then args.fail("--speculate eagle needs --eagle FOLDER", 2) end
    if o.speculate == "early_exit" and not o.draft_layers then
        args.fail("--speculate early_exit needs --draft-layers N", 2)
    end
    local method = o.speculate or o.draft_layers and "early_exit" or nil
    if not (method or o.draft or o.heads or o.eagle) then return nil end
    return { method = method, draft = o.draft, heads = o.heads, eagle = o.eagle, layers = o.draft_layers }
end

--- Options of gen that the flags stand for. What is not given is as the model's own files recommend.
function M.sampling(o, model)
    local own = model.info.sampling or {}
    return {
        max_tokens = o.max_tokens, temperature = o.temperature or own.temperature or 0.7,
        top_k = o.top_k or own.top_k, top_p = o.top_p or own.top_p or 0.95, min_p = o.min_p or own.min_p,
        repetition_penalty = o.repetition_penalty or own.repetition_penalty, stop = o.stop, seed = o.seed,
    }
end

--- The flags of several lists in one.
function M.flags(...)
    local all = {}
    for _, list in ipairs { ... } do table.move(list, 1, #list, #all + 1, all) end
    return all
end

--- One line about a result: tokens, times, memory.
function M.stats_line(model, r)
    local t, u = r.timing, r.usage
    local _, peak = core.memory()
    local d = r.speculation
    return ("%d prompt tokens (%d cached), first token after %.2f s, %d tokens%s%s, memory %s (KV %s)"):format(
        u.prompt_tokens, u.cached_tokens, t.first_token or t.total, u.completion_tokens,
        t.tokens_per_second and (" at %.1f tokens/s"):format(t.tokens_per_second) or "",
        d and (" (%d of %d drafted ones taken)"):format(d.accepted, d.drafted) or "", M.size(peak),
        M.size(model:stats().kv_bytes))
end

return M
