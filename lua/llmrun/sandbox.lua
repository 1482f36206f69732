--- Programs from strangers: each runs in a Lua state of its own, with limits on memory, processor time, time, matching,
--- output, sessions and tokens, and with nothing but a list of harmless functions, llm's branches and sessions of the
--- models that it is given.
---
---   local r, err, code = sandbox.run(text, { model = model, args = { "Rome" }, seconds = 2, memory = 32 << 20 })
---   -- r.values (what the program returned), r.output (what it printed), r.usage
---
--- Two profiles of a program, side by side:
---
---                       trusted (llmrun FILE.lua)            untrusted (here)
---   state               one, shared                          one a run, gone afterwards
---   globals, modules    shared, any                          its own; modules only as texts in opts.modules
---   io, os, debug       all                                  os.time, os.clock; print, write
---   load                text and binary                      text
---   string matching     Lua's                                bounded steps (lua_pattern.c)
---   memory              the machine's                        a cap in the allocator
---   endless loops       Ctrl-C                               processor time, by the watchdog (lua_guard.c)
---   finalizers (__gc)   as in Lua                            refused: no hook stops them
---   models              llm.load, anything                   what it is given, through the methods below
---   Lua in samplers     yes                                  in a state of their own: sandbox/sampler.lua

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local loop = require "llmrun.loop"
local options = require "llmrun.options"

local M = {}

local CALL = "sandbox.run"
local MAX_TEXT = 4 << 20 -- bytes of a call's texts: nothing else runs while they are cut into tokens

-- What programs may call ---------------------------------------------------------------------------------------------

local classes = {
    model = { prefix = "model:", methods = { "session", "tokenize", "detokenize", "apply_template" },
        properties = { "info" } },
    session = { prefix = "s:", methods = { "system", "user", "assistant", "tool", "message", "append", "gen", "stream",
        "select", "fork", "join", "rewind", "truncate", "score", "cancel", "close" },
        properties = { "len", "text", "tokens", "messages", "computed" } },
    stream = { prefix = "stream:", methods = { "next", "close" }, properties = {} },
}

--- Options that are the outside's alone.
local withheld = { fault = true, priority = true, tenant = true, tag = true, salt = true, vars = true, template = true }

local allowed = {}
for kind, c in pairs(classes) do
    allowed[kind] = { get = true }
    for _, m in ipairs(c.methods) do allowed[kind][m] = true end
end

-- Code of the inside -------------------------------------------------------------------------------------------------

local modules = { "llmrun.sandbox.inside", "llmrun.sandbox.stages", "llmrun.loop", "llmrun.branch", "llmrun.best",
    "llmrun.errors", "llmrun.options", "llmrun.tables", "llmrun.json" }

local function module_text(name)
    local folder = os.getenv("LLMRUN_LUA")
    if folder and folder ~= "" then
        local path = ("%s/%s.lua"):format(folder, name:gsub("%.", "/"))
        local f <close> = io.open(path, "rb")
        if f then return f:read "a", "lua/" .. name:gsub("%.", "/") .. ".lua" end
    end
    return core.module_text(name)
end

local compiled
--- The modules of the inside as binary chunks: name -> code.
function M.chunks()
    if not compiled then
        compiled = {}
        for _, name in ipairs(modules) do
            local text, path = module_text(name)
            compiled[name] = string.dump(assert(load(assert(text, name), "@" .. path, "t")))
        end
    end
    return compiled
end

-- The border ---------------------------------------------------------------------------------------------------------

---@class llmrun.Sandbox one run
local Run = {}
Run.__index = Run

local function refuse(text, code) error(setmetatable({ message = text, code = code or "invalid" }, errors.Error), 0) end

--- A handle for an object; the same one for the same object.
function Run:handle(kind, object)
    local id = self.ids[object]
    if not id then
        self.last_id = self.last_id + 1
        id = self.last_id
        self.ids[object], self.objects[id] = id, { kind = kind, object = object }
    end
    return { kind = kind, id = id }
end

local function check_options(o)
    if type(o) ~= "table" then return o end
    local clean = {}
    for k, v in pairs(o) do
        if withheld[k] then refuse(("option '%s' is not to be had in a sandbox"):format(k)) end
        clean[k] = v
    end
    return clean
end

function Run:count_session()
    if self.sessions >= self.opts.sessions then
        refuse(("over the limit of %d sessions"):format(self.opts.sessions), "limit")
    end
    self.sessions = self.sessions + 1
end

--- Options of gen and stream within the tokens that are left.
function Run:within(o)
    o = check_options(o) or {}
    if type(o) ~= "table" then return o end
    if self.tokens <= 0 then refuse(("over the limit of %d tokens"):format(self.opts.tokens), "limit") end
    if not o.max_tokens or math.type(o.max_tokens) == "integer" and o.max_tokens > self.tokens then
        o.max_tokens = self.tokens
    end
    return o
end

local perform = {}

function perform.model(self, model, method, args)
    if method == "get" then
        if args[1] ~= "info" then refuse(("a model has no '%s'"):format(tostring(args[1]))) end
        local i = model.info
        return { name = i.name, arch = i.arch, ctx = i.ctx, n_ctx = i.n_ctx, n_vocab = i.n_vocab, eog = i.eog,
            bos = i.bos, eos = i.eos }
    elseif method == "session" then
        self:count_session()
        local o = check_options(args[1]) or {}
        o.salt = self.opts.salt
        return model:session(o)
    elseif method == "apply_template" and args[2] ~= nil then
        refuse("variables for the template are not to be had in a sandbox")
    end
    return model[method](model, table.unpack(args, 1, args.n))
end

local function result_of(self, session)
    local r = session.result
    if r and r.usage and r.usage.completion_tokens then
        self.tokens = self.tokens - r.usage.completion_tokens
        self.used = self.used + r.usage.completion_tokens
    end
    return r
end

function perform.session(self, s, method, args)
    if method == "get" then
        for _, name in ipairs(classes.session.properties) do
            if name == args[1] then return s[name] end
        end
        refuse(("a session has no '%s'"):format(tostring(args[1])))
    elseif method == "gen" then
        s:gen(self:within(args[1]))
        return result_of(self, s)
    elseif method == "stream" then
        local next_piece, _, _, guard = s:stream(self:within(args[1]))
        local st = { next = next_piece, guard = guard, session = s }
        self.streams[st] = true
        return st
    elseif method == "fork" then
        local n = args[1] == nil and 1 or args[1]
        if math.type(n) == "integer" then
            for _ = 1, n do self:count_session() end
        end
        return s:fork(args[1])
    elseif method == "close" then
        if not s.closed then self.sessions = self.sessions - 1 end
        return s:close()
    elseif method == "join" then
        local before = 0
        for _ in pairs(s.forks) do before = before + 1 end
        s:join(args[1], args[2])
        self.sessions = self.sessions - (args[2] and args[2].keep and 1 or before)
        return s
    elseif method == "select" then
        local text, r = s:select(args[1], args[2], check_options(args[3]))
        return text, r
    elseif method == "message" then
        return s:message(args[1])
    end
    return s[method](s, table.unpack(args, 1, args.n))
end

function perform.stream(self, st, method)
    if not self.streams[st] then return nil end
    if method == "next" then
        local piece = st.next()
        if piece then return piece end
        result_of(self, st.session)
    else
        getmetatable(st.guard).__close(st.guard)
        if st.session.result then result_of(self, st.session) end
    end
    self.streams[st] = nil
end

local function is_session(v)
    return type(v) == "table" and rawget(v, "seq") ~= nil and rawget(v, "ends") ~= nil and rawget(v, "model") ~= nil
end

--- Results as the inside can have them: objects become handles.
function Run:export(values)
    local handles = {}
    for i = 1, values.n do
        local v = values[i]
        if is_session(v) then
            values[i], handles[i] = false, self:handle("session", v)
        elseif type(v) == "table" and self.streams[v] then
            values[i], handles[i] = false, self:handle("stream", v)
        end
    end
    return values, handles
end

function Run:object(id)
    local o = self.objects[id]
    if not o then refuse "an object that is not there" end
    return o
end

--- Bytes of the texts in a value of the inside's.
local function bytes_of(v)
    if type(v) == "string" then return #v end
    local n = 0
    if type(v) == "table" then
        for _, item in pairs(v) do n = n + bytes_of(item) end
    end
    return n
end

--- Does what a request asks; a reply for the inside.
function Run:answer(request)
    local reply = { id = request.id, handles = {} }
    local r = table.pack(pcall(function()
        local o = self:object(request.object)
        local method = request.method
        if not allowed[o.kind][method] then refuse(("'%s' is not to be had in a sandbox"):format(tostring(method))) end
        local args = request.args
        if bytes_of(args) > MAX_TEXT then
            refuse(("texts of more than %d MiB can't be passed at once"):format(MAX_TEXT >> 20), "limit")
        end
        for i, id in pairs(request.handles) do args[i] = self:object(id).object end
        return perform[o.kind](self, o.object, method, args)
    end))
    if r[1] then
        local values = { n = r.n - 1 }
        for i = 2, r.n do values[i - 1] = r[i] end
        reply.values, reply.handles = self:export(values)
        return reply
    end
    local e = r[2]
    reply.error = errors.is(e) and e.message or tostring(e)
    reply.code = errors.is(e) and e.code or "script"
    return reply
end

function Run:take(requests)
    for _, request in ipairs(requests) do
        if request.print then
            self.output[#self.output + 1] = request.print
            if self.opts.on_print then self.opts.on_print(request.print) end
        elseif request.cancel then
            local task = self.tasks[request.cancel]
            if task then task:cancel() end
        elseif request.id then
            local task = loop.spawn_owned(function() return self:answer(request) end)
            loop.measure(task, self)
            self.tasks[request.id] = task
            task:when_done(function(t)
                self.tasks[request.id] = nil
                if t.state ~= "done" then return end -- cancelled: nobody wants to know
                self.replies[#self.replies + 1] = t.results[1]
                if self.ticket then loop.fire(self.ticket) end
            end)
        end
    end
end

--- Waits for replies, at most so many seconds (false: for ever); the time of the whole run goes before. 0: one round.
function Run:wait(seconds)
    if #self.replies > 0 and seconds ~= 0 then return end
    local left = self.deadline and self.deadline - core.now()
    if left and left <= 0 then return end
    if left and (not seconds or left < seconds) then seconds = left end
    self.ticket = loop.ticket()
    local ticket = self.ticket
    local timer = seconds and loop.after(seconds, function() loop.fire(ticket) end)
    loop.wait(ticket, CALL, function()
        if timer then loop.cancel_timer(timer) end
    end)
    if timer then loop.cancel_timer(timer) end
    self.ticket = nil
end

function Run:close()
    for _, task in pairs(self.tasks) do task:cancel() end
    for st in pairs(self.streams) do getmetatable(st.guard).__close(st.guard) end
    for _, o in pairs(self.objects) do
        if o.kind == "session" then o.object:close() end
    end
    self.box:close()
end
Run.__close = Run.close

function Run:step(...)
    local _, cpu = self.box:usage()
    return self.box:step(self.opts.seconds - cpu - self.spent, ...)
end

function Run:usage()
    local bytes, cpu = self.box:usage()
    return { memory = bytes, cpu_seconds = cpu + self.spent, seconds = core.now() - self.began,
        completion_tokens = self.used }
end

local function work(self, first, args)
    local how, a, b, c, d = self:step(first, table.unpack(args, 1, #args))
    while true do
        if how == "failed" or how == "limit" then return nil, a, how == "limit" and "limit" or "script" end
        if how == "done" then
            self:take(a)
            if b == "failed" and c:find("not enough memory", 1, true) then
                return nil, ("over the memory limit of %g MiB: %s"):format(self.opts.memory / (1 << 20), c), "limit"
            elseif b == "failed" then
                return nil, c, d
            end
            return { values = c, output = table.concat(self.output), usage = self:usage() }
        end
        if how == "slice" then a = 0 else self:take(b) end
        self:wait(a)
        if self.deadline and core.now() >= self.deadline then
            return nil, ("over the limit of %g s"):format(self.opts.timeout), "limit"
        end
        if how == "slice" then
            how, a, b, c, d = self:step()
        else
            local replies = self.replies
            self.replies = {}
            how, a, b, c, d = self:step(replies)
        end
    end
end

local known = {
    model = "table", models = "table", args = "table", name = "string", memory = "integer", seconds = "number",
    timeout = "number", steps = "integer", output = "integer", sessions = "integer", tokens = "integer",
    modules = "table", globals = "table", salt = "string", on_print = "function",
}

local function settings(o)
    options.check(CALL, o, known, 3)
    local all = { memory = 64 << 20, seconds = 10, timeout = 120, steps = 10000000, output = 1 << 20, sessions = 64,
        tokens = 4096, name = "program", args = {}, modules = {}, globals = {} }
    for k, v in pairs(o or {}) do all[k] = v end
    for _, k in ipairs { "memory", "seconds", "timeout", "steps", "tokens", "sessions" } do
        if all[k] <= 0 then errors.raise(CALL, k .. ": a number above 0 expected") end
    end
    return all
end

--- Runs a program, a text. Returns { values = { what it returned, n = }, output, usage }; or nil, text, code: "format"
--- (it is no Lua), "script" (an error in it, with its traceback), "limit". Options:
---   model, models = { name = model }: what it sees as llm.model, llm.NAME; args: its ...; globals, modules = { name =
---     text }: plain data, and what it may require
---   memory (64 MiB), seconds (of processor time for its code and what that calls, but steps of the engine; 10),
---     timeout (of everything; 120 s), steps (of one pattern match; 10 million), output (bytes printed; 1 MiB),
---     sessions (at once; 64), tokens (drawn in all; 4096)
---   salt: a namespace of its own in the prefix cache; on_print(text); name: what its errors call it
---@param source string
---@param opts? table
---@return table? result, string? err, string? code
function M.run(source, opts)
    if type(source) ~= "string" then errors.raise(CALL, "a program (text) expected, got " .. type(source)) end
    local o = settings(opts)
    loop.check_can_wait(CALL)
    local box, err, code = core.sandbox_new { memory = o.memory, steps = o.steps, chunks = M.chunks() }
    if not box then return nil, ("%s: %s"):format(CALL, err), code end
    local self <close> = setmetatable({
        box = box, opts = o, objects = {}, ids = {}, last_id = 0, tasks = {}, replies = {}, streams = {}, output = {},
        spent = 0, sessions = 0, tokens = o.tokens, used = 0, began = core.now(), deadline = core.now() + o.timeout,
    }, Run)
    local objects = {}
    for name, model in pairs(o.models or {}) do objects[name] = self:handle("model", model) end
    if o.model then objects.model = self:handle("model", o.model) end
    local r, text, why = work(self, {
        source = source, name = o.name, classes = classes, objects = objects, modules = o.modules, globals = o.globals,
        output = o.output, epoch = os.time(), began = core.now(), null = require("cjson").null,
    }, o.args)
    if r then return r end
    return nil, ("%s: %s"):format(CALL, text), why, table.concat(self.output)
end

return M
