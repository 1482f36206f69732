--- The inside of a sandbox that holds a sampler (outside: sampler.lua): runs the program, which returns what
--- llm.sampler takes, tells its stages as plain data, then runs its functions when they are called.
---
--- What a function asks of its logits is yielded, { op, arguments }, and comes back as { values } or { error = text }.
--- A program may yield what it likes: the outside checks what it is asked for.

local yield, running = coroutine.yield, coroutine.running

local M = {}

local main

local function ask(call, op, ...)
    if running() ~= main then error(call .. ": not in a coroutine of your own in a sandbox", 3) end
    local reply = yield({ op, table.pack(...) })
    if reply.error then error(call .. ": " .. reply.error, 3) end
    return table.unpack(reply.values, 1, reply.values.n)
end

--- The objects that functions get: logits, and a ctx that lives as long as the sampler.
local function objects(names)
    local methods = {}
    for _, name in ipairs(names) do
        methods[name] = function(_, ...) return ask("logits:" .. name, name, ...) end
    end
    local logits = setmetatable({}, {
        __name = "llmrun logits", __metatable = false, __index = methods,
        __len = function() return (ask("#logits", "len")) end,
        __newindex = function() error("logits have no fields of your own", 2) end,
    })
    local ctx = setmetatable({}, { __metatable = false, __index = {
        tokens = function(_, ...) return ask("ctx:tokens", "tokens", ...) end,
        uniform = function(_, ...) return ask("ctx:uniform", "uniform", ...) end,
    } })
    return logits, ctx
end

--- One stage as plain data: a function becomes its number.
local function describe(stage, functions)
    if type(stage) ~= "function" then return stage end
    functions[#functions + 1] = stage
    return { fn = #functions }
end

--- The program has been loaded: chunk. Never returns well: the outside closes the sandbox.
---@param chunk function
---@param c table { ops = names of methods }
function M.run(chunk, c)
    main = running()
    local value = chunk()
    if type(value) == "function" then value = { value } end
    if type(value) ~= "table" then
        error("the sampler must return a function or a list of stages, not a " .. type(value) .. " value", 0)
    end
    local functions, list = {}, {}
    for k, stage in pairs(value) do list[k] = describe(stage, functions) end
    local logits, ctx = objects(c.ops)
    local call = yield({ "stages", list })
    while true do
        for k, v in pairs(call.about) do rawset(ctx, k, v) end
        call = yield({ "drawn", functions[call.fn](logits, ctx) })
    end
end

return M
