--- Branches of a program: spawn, all, any, race, map, sleep, timeout. Everything that waits in one of them lets the
--- others run, and their requests share the engine's batches.

local loop = require "llmrun.loop"

local M = {}

--- Starts fn(...) beside the present task; task:wait() gives its results, task:cancel() ends it.
---@param fn function
---@return llmrun.Task
function M.spawn(fn, ...)
    if type(fn) ~= "function" then error("llm.spawn: function expected, got " .. type(fn), 2) end
    return loop.spawn(fn, ...)
end

--- Lets the others run for so many seconds.
---@param seconds number
function M.sleep(seconds)
    if type(seconds) ~= "number" or seconds ~= seconds then
        error("llm.sleep: number of seconds expected, got " .. tostring(seconds), 2)
    end
    local ticket = loop.ticket()
    local timer = loop.after(math.max(0, seconds), function() loop.fire(ticket) end)
    loop.wait(ticket, "llm.sleep", function() loop.cancel_timer(timer) end)
end

--- Keys in a fixed order: 1..n, then the others by their text.
local function ordered_keys(list)
    local keys, n = {}, #list
    for i = 1, n do keys[i] = i end
    local rest = {}
    for k in pairs(list) do
        if not (math.type(k) == "integer" and k >= 1 and k <= n) then rest[#rest + 1] = k end
    end
    table.sort(rest, function(a, b) return tostring(a) < tostring(b) end)
    table.move(rest, 1, #rest, n + 1, keys)
    return keys
end

--- Makes tasks of a table of functions (and tasks). Returns keys, tasks by key, and a function that cancels those that
--- were started here.
local function start(list, what)
    if type(list) ~= "table" then error(what .. ": table of functions expected, got " .. type(list), 3) end
    local keys, tasks, own = ordered_keys(list), {}, {}
    for _, k in ipairs(keys) do
        local f = list[k]
        local is_task = type(f) == "table" and type(f.join) == "function"
        if not is_task and type(f) ~= "function" then
            error(("%s: branch %s: function expected, got %s"):format(what, tostring(k), type(f)), 3)
        end
    end
    for _, k in ipairs(keys) do
        local f = list[k]
        if type(f) == "function" then
            f = loop.spawn_owned(f)
            own[#own + 1] = f
        end
        tasks[k] = f
    end
    return keys, tasks, function()
        for _, t in ipairs(own) do t:cancel("a sibling was chosen") end
    end
end

local function branch_name(k) return "branch " .. tostring(k) end

--- Runs the functions of a table side by side and waits for all of them. Returns their first results under the same
--- keys. If one fails, the others go on to their end; then its error is raised, with its traceback.
---@param list table<any, function|llmrun.Task>
---@return table
function M.all(list)
    local keys, tasks, cancel = start(list, "llm.all")
    for _, k in ipairs(keys) do tasks[k]:join(cancel) end
    local results = {}
    for _, k in ipairs(keys) do results[k] = (tasks[k]:result(branch_name(k))) end
    return results
end

local function first(list, what, wanted)
    local keys, tasks, cancel = start(list, what)
    if #keys == 0 then error(what .. ": the table is empty", 3) end
    local ticket, left = loop.ticket(), #keys
    for _, k in ipairs(keys) do
        tasks[k]:when_done(function(t)
            left = left - 1
            if wanted(t) or left == 0 then loop.fire(ticket, k) end
        end)
    end
    local k = loop.wait(ticket, what, cancel)
    cancel()
    return keys, tasks, k
end

--- Runs the functions side by side; returns the result of the first that ends without an error, and its key. The others
--- are cancelled. If all fail, their errors are raised together.
function M.any(list)
    local keys, tasks, k = first(list, "llm.any", function(t) return t.state == "done" end)
    if tasks[k].state == "done" then return (tasks[k]:result()), k end
    local texts = {}
    for _, key in ipairs(keys) do
        local ok, err = pcall(tasks[key].result, tasks[key], branch_name(key))
        texts[#texts + 1] = ok and (branch_name(key) .. " was cancelled") or tostring(err)
    end
    error("llm.any: all branches failed:\n" .. table.concat(texts, "\n"), 0)
end

--- Runs the functions side by side; the first that ends, well or with an error, decides: its result and its key are
--- returned, or its error is raised. The others are cancelled.
function M.race(list)
    local _, tasks, k = first(list, "llm.race", function() return true end)
    return (tasks[k]:result(branch_name(k))), k
end

--- fn(item, index) for every item of a list, side by side; at most opts.concurrency at once (all, if not given).
--- Returns the list of first results. An error in one leaves the others alone and is raised at the end.
---@param list table
---@param fn function
---@param opts? { concurrency?: integer }
---@return table
function M.map(list, fn, opts)
    if type(list) ~= "table" then error("llm.map: list expected, got " .. type(list), 2) end
    if type(fn) ~= "function" then error("llm.map: function expected, got " .. type(fn), 2) end
    require("llmrun.options").check("llm.map", opts, { concurrency = "integer" }, 2)
    local n = #list
    local limit = opts and opts.concurrency or n
    if limit < 1 and n > 0 then error("llm.map: concurrency must be at least 1", 2) end
    local tasks, next_index, running = {}, 1, 0
    local all_done = loop.ticket()
    local function fill()
        while next_index <= n and running < limit do
            local i = next_index
            next_index, running = i + 1, running + 1
            tasks[i] = loop.spawn_owned(fn, list[i], i)
            tasks[i]:when_done(function()
                running = running - 1
                fill()
            end)
        end
        if running == 0 then loop.fire(all_done) end
    end
    fill()
    loop.wait(all_done, "llm.map", function()
        next_index = n + 1
        for i = 1, #tasks do tasks[i]:cancel("the map was cancelled") end
    end)
    local results = {}
    for i = 1, n do results[i] = (tasks[i]:result("item " .. i)) end
    return results
end

--- fn(...) with a time limit: its results, or nil, text, "limit" if it took longer (it is cancelled then, also if it is
--- in an endless loop).
---@param seconds number
---@param fn function
function M.timeout(seconds, fn, ...)
    if type(seconds) ~= "number" or seconds ~= seconds then
        error("llm.timeout: number of seconds expected, got " .. tostring(seconds), 2)
    end
    if type(fn) ~= "function" then error("llm.timeout: function expected, got " .. type(fn), 2) end
    local task, ticket = loop.spawn_owned(fn, ...), loop.ticket()
    loop.limit(task, seconds)
    local timer = loop.after(math.max(0, seconds), function() loop.fire(ticket, true) end)
    task:when_done(function() loop.fire(ticket, false) end)
    local late = loop.wait(ticket, "llm.timeout", function()
        loop.cancel_timer(timer)
        task:cancel()
    end)
    loop.cancel_timer(timer)
    if late and task:cancel("timeout") then return nil, ("timed out after %g s"):format(seconds), "limit" end
    return task:result("the timed call")
end

return M
