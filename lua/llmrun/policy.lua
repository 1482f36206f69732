--- Policies: which request runs next, who gives way, what the cache forgets. A policy is a table of optional hooks;
--- where it has none, and whenever one fails, the engine's built-in rule decides (first come, first served).
---
---   admit(p, request)       a new request. Nothing: it is taken; false, or nil and a reason: it is refused. May set
---                           request.priority and request.deadline
---   schedule(p, step)       fills the step: step:run(request, rows) for each that is to run
---   preempt(p, step, need)  need.blocks KV blocks are missing for need.request: returns the running request that
---                           gives its blocks back, and how ("recompute", "swap"); or calls step:preempt; asked again
---                           until it is enough
---   evict(p, leaf)          a score for a cached prefix: the lowest is forgotten first
---   token(p, request, id)   a token was drawn; true ends the request
---   finish(p, request)      it has ended, however
---   draft(p, request, info) it may get a draft (see spec.lua; info: most, batch, acceptance, method). Nothing: as its
---                           own options say; false: none; how many tokens, a method, both, or the tokens
---
--- step: waiting, running (lists in order of arrival; reused, so not to be kept), budget (rows left), slots (requests
--- that may still start), active (that run now), free_blocks, block_size, now, prompt_rows (rows that the built-in rule
--- takes of prompts in this step at most), prompt_least (with so many it begins no further prompt); run(r [, n]) ->
--- rows granted (0: it starts, but leaves its rows to another one that computes the same prompt in this step), or nil
--- and why not; preempt(r [, how]) -> true, or nil and why not; fits(r): a waiting request would find room without
--- preempting; blocks(group); default(): the built-in rule takes the rest;
--- sorted(list, key): a list by key(request), least first; serve, last and displace: see policy/serve.lua.
---
--- request: id, kind, state, tenant, tag (the table or integer that the program gave it), priority, deadline,
--- arrival, queue_time (seconds waited so far), prompt_tokens, cached_tokens, computed_tokens, generated_tokens,
--- max_tokens, pending (tokens to compute before the next one can be drawn; of one that waits, less what the cache
--- holds, as of the last fits or prompt_rows), granted (rows in this step), wants (rows that it may still have in it),
--- writing (draws its next token, or takes up some that came without a choice), blocks, block_seconds, preempted
--- (times), seq; cancel(); prefix(): tokens that the cache holds; head(n): a number that prompts with the same first n
--- tokens share. Any other field is the policy's own, and lives as long as the request.
---
--- leaf: tag (of the session that used it last), tokens (length of the prefix), hits, last_used, idle (seconds).
---
--- A file returns the policy, a function(options) that makes it, or { params, make }: policy/params.lua.
---
--- steady = true in a policy says: where nothing waits and all that run draw tokens, schedule gives each its row, in
--- order, and skipping that changes nothing. Simulations (simulate.lua) then leave such steps out, and run faster.
---
--- Hooks can't wait, and have limits of time and memory; so has the file, and the function that makes the policy
--- (userfile.lua). The first failure of each hook is logged with a traceback;
--- after several in a row the policy is set aside.

local core = require "llmrun.core"
local loop = require "llmrun.loop"
local options = require "llmrun.options"
local params = require "llmrun.policy.params"
local userfile = require "llmrun.userfile"
require "llmrun.policy.serve"

local M = {}

--- Those that come with llmrun, by name.
M.names = { "fcfs", "priority", "shortest_first", "longest_prefix", "deadline", "fair", "mlfq" }

local hooks = { "admit", "schedule", "preempt", "evict", "token", "finish", "draft" }

--- Where messages about policies go; may be replaced.
M.log = function(text) io.stderr:write("llmrun: ", text, "\n") end

--- What hooks may take unless told otherwise: seconds of processor time and bytes of Lua memory a call, failures in a
--- row.
M.limits = { seconds = 0.05, memory = 64 << 20, failures = 8 }

local function load_file(path)
    local result, err = userfile.load(path)
    if err then return nil, err end
    if type(result) ~= "table" and type(result) ~= "function" then
        return nil, ("%s: a policy (table) or a function that makes one expected, got %s"):format(path, type(result))
    end
    return result
end

local function find(what)
    if type(what) == "table" or type(what) == "function" then return what end
    if type(what) ~= "string" then return nil, "a policy, its name or its file expected, got " .. type(what) end
    for _, name in ipairs(M.names) do
        if name == what:gsub("-", "_") then return require("llmrun.policy." .. name) end
    end
    if what:find("[/.]") then return load_file(what) end
    local close = options.closest(what, M.names)
    return nil, ("no policy '%s'%s; there are %s, and files"):format(what,
        close and " (did you mean '" .. close .. "'?)" or "", table.concat(M.names, ", "))
end

--- Its hooks as functions, looked up once; or nil and what is wrong with it.
local function probe(policy)
    local found, any = {}, false
    for _, hook in ipairs(hooks) do
        local f = policy[hook]
        if f ~= nil and type(f) ~= "function" then
            return nil, ("%s: function expected, got %s"):format(hook, type(f))
        end
        found[hook], any = f, any or f ~= nil
    end
    for key, value in pairs(policy) do
        local meant = type(value) == "function" and type(key) == "string" and not found[key] and
            options.closest(key, hooks)
        if meant then return nil, ("there is no hook '%s'; did you mean '%s'?"):format(key, meant) end
    end
    if not any then return nil, "it has none of the hooks " .. table.concat(hooks, ", ") end
    return found
end

--- What a policy is made of: the function that makes it and its parameters (see policy/params.lua; nil: not told), or
--- nil, nil and the policy itself where it takes no options; or nil and what is wrong.
local function take_apart(policy)
    if type(policy) == "function" then return policy end
    if policy.make == nil and policy.params == nil then return nil, nil, policy end
    if type(policy.make) ~= "function" then
        return nil, "make: a function that makes the policy expected, got " .. type(policy.make)
    end
    local flaw = policy.params ~= nil and params.flaw(policy.params)
    if flaw then return nil, flaw end
    return policy.make, policy.params or {}
end

--- The parameters of a policy, by name (policy/params.lua): nil if it does not say, or nil and what is wrong with it.
---@param what table|function|string
---@return table<string, table>? params, string? err
function M.params(what)
    local policy, err = find(what)
    if not policy then return nil, err end
    local _, known, plain = take_apart(policy)
    if plain then return {} end
    if type(known) == "string" then return nil, known end
    return known
end

local function parse(text)
    local what, opts = params.parse(text)
    local policy = what and opts and find(what) or nil
    if what and opts and not M.params(policy or what) then
        for k, v in pairs(opts) do
            if type(v) == "string" then opts[k] = tonumber(v) or v == "true" or (v ~= "false" and v) end
        end
    end
    return what, opts, policy
end

--- A command line's "mlfq:quantum=128,levels=4" as a name or file and its options (nil: none), or nil and what is
--- wrong. Where the policy does not declare its options, what looks like a number, true or false is one.
---@param text string
---@return string? what, table? options
function M.parse(text)
    local what, opts = parse(text)
    return what, opts
end

--- The policy that a table, a name or a file stands for, and its hooks; or nil and a text. A function, or a table with
--- params and make (a file may return either, those that come with llmrun do), is called with the options to make it.
---@param what table|function|string
---@param opts? table
function M.load(what, opts)
    local policy, err = find(what)
    if not policy then return nil, err end
    local make, known, plain = take_apart(policy)
    if make then
        local given = opts or {}
        if known then
            given, err = params.complete(known, given)
            if not given then return nil, err end
        end
        local ok, made = userfile.call(make, given)
        if not ok then return nil, made end
        if type(made) ~= "table" then return nil, "the function made no policy (table) but " .. type(made) end
        policy = made
    elseif not plain then
        return nil, known
    elseif opts and next(opts) then
        return nil, "this policy takes no options"
    end
    local found, why = probe(policy)
    if not found then return nil, why end
    return policy, found
end

local function name_of(policy, what)
    if type(policy.name) == "string" then return policy.name end
    return type(what) == "string" and what:match("([^/]+)%.lua$") or "custom"
end

--- Writes down a failure of a hook, and logs it.
local function on_failed(status)
    return function(hook, message, failures, set_aside)
        message = tostring(message or "out of memory"):gsub("\n%s*%[C%]: in %?$", "")
        status.last_error = ("%s: %s"):format(hook, message)
        status.set_aside = set_aside
        if not status.errors[hook] then
            M.log(("policy '%s', hook %s: %s\n(the built-in rule decides instead)"):format(status.name, hook, message))
        end
        status.errors[hook] = failures
        if set_aside then
            M.log(("policy '%s' is set aside: its hook %s has failed %d times in a row"):format(status.name, hook,
                status.failures))
        end
    end
end

--- Puts a policy in charge of an engine (nil or "default": the built-in rule), between two steps: requests and their
--- KV stay. Returns what is known of it: { name, policy, errors (of each hook whose failure was logged, by then),
--- last_error, set_aside }. Or nil, text, code; then the old one stays.
---@param engine any
---@param what table|function|string|nil
---@param opts? table what a function that makes the policy gets
---@param limits? table see M.limits; steady = false: it is asked at every step, whatever it says
---@param ready? table of M.prepare: it is not read and made again
function M.use(engine, what, opts, limits, ready)
    limits = limits or {}
    options.check("policy", limits, {
        seconds = "number", memory = "integer", failures = "integer", steady = "boolean",
    }, 2)
    if what == nil or what == "default" then
        local ok, err, code = engine:set_policy(nil)
        if not ok then return nil, err, code end
        return { name = "default", errors = {} }
    end
    local policy, found
    if ready then policy, found = ready.policy, ready.found else policy, found = M.load(what, opts) end
    if not policy then return nil, found, "invalid" end
    local status = { name = name_of(policy, what), policy = policy, errors = {} }
    status.failures = limits.failures or M.limits.failures
    local set = {
        name = status.name, self = policy, failed = on_failed(status), failures = status.failures,
        seconds = limits.seconds or M.limits.seconds, bytes = limits.memory or M.limits.memory,
        steady = policy.steady == true and limits.steady ~= false,
    }
    for hook, f in pairs(found) do set[hook] = f end
    local ok, err, code = engine:set_policy(set)
    if not ok then return nil, err, code end
    return status
end

---@class llmrun.PolicyWatch
local Watch = {}
Watch.__index = Watch

local function version(path)
    local kind, size, changed = core.stat(path)
    return kind and ("%d %.9f"):format(size, changed)
end

--- A command line's policy (see parse), read and made before there is an engine for it: { name (or file), options,
--- policy, found, version }, for one M.use or M.watch, later. Or nil and a text.
---@param text string
function M.prepare(text)
    local what, opts, policy = parse(text)
    if not what then return nil, opts end
    local before = version(what)
    local made, found = M.load(policy or what, opts)
    if not made then return nil, found end
    return { name = what, options = opts, policy = made, found = found, version = before }
end

--- Looks whether the file has changed, and if so puts what it holds in charge. A file that does not load changes
--- nothing and is reported once. True if the policy was replaced.
function Watch:poll()
    local now = version(self.path)
    if not now or now == self.version then return false end
    self.version = now
    local ok, status, err = pcall(M.use, self.engine, self.path, self.opts, self.limits)
    if ok and status then
        self.status = status
        M.log(("policy '%s' is read again from %s"):format(status.name, self.path))
        return true
    end
    self.error = ok and err or status
    M.log(("%s has changed but does not load; the policy stays as it was: %s"):format(self.path, self.error))
    return false
end

--- Ends it; the policy stays.
function Watch:stop() loop.remove_source(self) end
Watch.__close = Watch.stop

-- As a source of the run loop it never has work; being asked is the occasion to look.
function Watch:busy()
    local now = core.now()
    if now >= self.due then
        self.due = now + self.between
        self:poll()
    end
    return false
end

function Watch:step() end

--- Puts the policy of a file in charge, and again whenever the file changes (looked at every 0.25 s, between steps;
--- once a second by a server that has nothing to do). Or nil, text, code.
---@param engine any
---@param path string
---@param opts? { every?: number, options?: table, limits?: table, ready?: table }
function M.watch(engine, path, opts)
    options.check("policy", opts, { every = "number", options = "table", limits = "table", ready = "table" }, 2)
    opts = opts or {}
    local before = opts.ready and opts.ready.version or version(path)
    local status, err, code = M.use(engine, path, opts.options, opts.limits, opts.ready)
    if not status then return nil, err, code end
    local watch = setmetatable({
        engine = engine, path = path, opts = opts.options, limits = opts.limits, status = status, version = before,
        between = opts.every or 0.25, every = 1, due = core.now(),
    }, Watch)
    loop.add_source(watch)
    return watch
end

return M
