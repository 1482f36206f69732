--- Samplers of strangers: a text that returns what llm.sampler takes, run in a sandbox (sandbox.lua) of its own.
---
---   local s <close> = assert(sampler.new("return function(logits, ctx) logits:mask(13) end"))
---   session:gen { sampler = s.stages }
---
--- Its functions run inside the engine's step, so all that they may take is bounded: processor time of a call and of
--- all calls, memory, steps of matching. They have the methods of logits (but copy) and of ctx, and the sandbox's
--- harmless functions; no models, no branches. What goes wrong in it ends its request; s.failure then says what.

local core = require "llmrun.core"
local errors = require "llmrun.errors"
local options = require "llmrun.options"

local M = {}

local CALL = "sandbox.sampler"

---@class llmrun.SandboxSampler
---@field stages table what the option sampler takes
---@field failure string? what went wrong in it
local Sampler = {}
Sampler.__index = Sampler

local ops = { "get", "argmax", "topk", "logsumexp", "softmax", "logprob", "entropy", "sample", "vocab_size",
    "candidates", "add", "scale", "mask", "keep" }
local allowed = {}
for _, name in ipairs(ops) do allowed[name] = true end

local function fail(self, text)
    self.failure = self.failure or text
    error(setmetatable({ message = ("%s: %s"):format(CALL, text), code = "script" }, errors.Error), 0)
end

--- Does what a function asks for, on the row that is being drawn from.
local function perform(logits, ctx, op, args)
    if type(args) ~= "table" or math.type(args.n) ~= "integer" or args.n < 0 or args.n > 8 then
        return { error = "up to 8 arguments expected" }
    end
    local r
    if op == "len" then
        r = table.pack(pcall(function() return #logits end))
    elseif op == "tokens" or op == "uniform" then
        r = table.pack(pcall(ctx[op], ctx, table.unpack(args, 1, args.n)))
    elseif allowed[op] then
        r = table.pack(pcall(logits[op], logits, table.unpack(args, 1, args.n)))
    else
        return { error = ("'%s' is not to be had in a sandbox"):format(tostring(op)) }
    end
    if not r[1] then return { error = (tostring(r[2]):gsub("^[^\n]-:%d+: ", "")) } end
    local values = { n = r.n - 1 }
    for i = 2, r.n do
        if type(r[i]) ~= "userdata" then values[i - 1] = r[i] end -- methods return their object, to be chained
    end
    return { values = values }
end

--- Goes on with the inside until it says `want`; what it asks for on the way is done. Returns what comes with it.
local function advance(self, want, first, logits, ctx)
    local began, _, used = os.clock(), self.box:usage()
    local how, said, more = self.box:step(math.min(self.step_seconds, self.seconds - used), first)
    while true do
        if how == "failed" or how == "limit" then fail(self, said) end
        if how == "done" or how == "idle" and type(said) ~= "table" then fail(self, "it yielded by itself") end
        if how == "idle" and said[1] == want then return said[2] end
        local _, cpu = self.box:usage()
        local left = math.min(self.step_seconds - (os.clock() - began), self.seconds - cpu)
        if left <= 0 then fail(self, "over the limit of processor time") end
        if how == "slice" then
            how, said, more = self.box:step(left)
        elseif logits then
            how, said, more = self.box:step(left, perform(logits, ctx, said[1], said[2]))
        else
            fail(self, "there are no logits yet")
        end
        if more ~= nil then fail(self, "it yielded by itself") end
    end
end

local function stage_of(self, n)
    return function(logits, ctx)
        local drawn = advance(self, "drawn", { fn = n, about = {
            position = ctx.position, n_prompt = ctx.n_prompt, n_generated = ctx.n_generated, last = ctx.last,
        } }, logits, ctx)
        if drawn ~= nil and math.type(drawn) ~= "integer" then
            fail(self, "a stage must return a token id or nothing, not a " .. type(drawn) .. " value")
        end
        return drawn
    end
end

function Sampler:close() self.box:close() end
Sampler.__close = Sampler.close

local known = { memory = "integer", seconds = "number", step_seconds = "number", steps = "integer", name = "string" }

--- A sampler from a text. Options: memory (16 MiB), seconds (of processor time, of all its calls; 5), step_seconds (of
--- one call; 0.1), steps (of one pattern match; 1 million), name. nil, text, code if it can't be run.
---@param source string
---@param opts? table
---@return llmrun.SandboxSampler? sampler, string? err, string? code
function M.new(source, opts)
    options.check(CALL, opts, known, 2)
    local o = opts or {}
    local box, err, code = core.sandbox_new {
        memory = o.memory or 16 << 20, steps = o.steps or 1000000, chunks = require("llmrun.sandbox").chunks(),
    }
    if not box then return nil, ("%s: %s"):format(CALL, err), code end
    local self = setmetatable({ box = box, seconds = o.seconds or 5, step_seconds = o.step_seconds or 0.1 }, Sampler)
    local ok, list = pcall(advance, self, "stages", {
        sampler = true, source = source, name = o.name or "sampler", ops = ops, classes = {}, objects = {},
        modules = {}, globals = {}, output = 0, epoch = os.time(), began = core.now(),
        null = require("cjson").null,
    })
    if not ok then
        self:close()
        if errors.is(list) then return nil, list.message, list.code end
        error(list, 0)
    end
    self.stages = {}
    for k, stage in pairs(list) do
        local n = type(stage) == "table" and math.type(stage.fn)
        self.stages[k] = n == "integer" and stage_of(self, stage.fn) or stage
    end
    return self
end

return M
