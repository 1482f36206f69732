--- Several tries at one thing, of which one is kept: first_valid, best_of. The others are cancelled as soon as it is
--- known that they can't win; their <close> handlers run, so the KV of their sessions is free at once.

local errors = require "llmrun.errors"
local loop = require "llmrun.loop"
local options = require "llmrun.options"

local M = {}

--- Runs fns side by side, at most `limit` at once. judge(task, i) is called as each ends; true stops all others.
--- Returns the tasks by index (nil: not begun).
local function run(call, fns, limit, judge)
    local tasks, next_index, running, stopped = {}, 1, 0, false
    local ticket = loop.ticket()
    local function stop()
        stopped = true
        for i = 1, #fns do
            if tasks[i] then tasks[i]:cancel("a sibling was chosen") end
        end
    end
    local function fill()
        while not stopped and next_index <= #fns and running < limit do
            local i = next_index
            next_index, running = i + 1, running + 1
            tasks[i] = loop.spawn_owned(fns[i], i)
            tasks[i]:when_done(function(t)
                running = running - 1
                if stopped then return end
                local ok, enough = pcall(judge, t, i)
                if not ok then loop.fire(ticket, enough) end
                if not ok or enough then
                    stopped = true
                    loop.fire(ticket)
                else
                    fill()
                end
            end)
        end
        if running == 0 then loop.fire(ticket) end
    end
    fill()
    local failure = loop.wait(ticket, call, stop)
    stop()
    if failure ~= nil then error(failure, 0) end
    return tasks
end

local function functions(call, what, fn)
    local fns = {}
    if math.type(what) == "integer" then
        if type(fn) ~= "function" then errors.raise(call, "function expected, got " .. type(fn)) end
        if what < 1 then errors.raise(call, ("%d tries: at least 1 expected"):format(what)) end
        for i = 1, what do fns[i] = fn end
        return fns
    end
    if type(what) ~= "table" then
        errors.raise(call, ("a number of tries or a list of functions expected, got %s"):format(type(what)))
    elseif #what == 0 then
        errors.raise(call, "the list of functions is empty")
    end
    for i, f in ipairs(what) do
        if type(f) ~= "function" then
            errors.raise(call, ("try %d: function expected, got %s"):format(i, type(f)))
        end
        fns[i] = f
    end
    return fns
end

local known = { concurrency = "integer" }
local known_best = { concurrency = "integer", score = "function", enough = "number" }

local function limit_of(call, o, n)
    local limit = o and o.concurrency or n
    if limit < 1 then errors.raise(call, "concurrency must be at least 1") end
    return limit
end

--- Shifts arguments: (n, fn, ...) or (list, ...).
local function arguments(what, a, b, c)
    if math.type(what) == "integer" then return a, b, c end
    return nil, a, b
end

local function trouble(tasks, n)
    local texts = {}
    for i = 1, n do
        if tasks[i] and tasks[i].state == "failed" then
            local _, err = pcall(tasks[i].result, tasks[i], "try " .. i)
            texts[#texts + 1] = tostring(err)
        end
    end
    return texts
end

--- llm.first_valid(n, fn, valid, opts) or (functions, valid, opts): runs the tries side by side and returns the first
--- result for which valid(result) holds, and the try's number; the others are cancelled at once. A try that fails with
--- an error counts as invalid. nil, text, "not_found" if none was valid. Options: concurrency.
function M.first_valid(what, ...)
    local call = "llm.first_valid"
    local fn, valid, o = arguments(what, ...)
    local fns = functions(call, what, fn)
    if type(valid) ~= "function" then
        errors.raise(call, ("a function that tells a valid result expected, got %s"):format(type(valid)))
    end
    options.check(call, o, known, 2)
    local chosen
    local tasks = run(call, fns, limit_of(call, o, #fns), function(t, i)
        if t.state == "done" and valid(t.results[1]) then chosen = i end
        return chosen
    end)
    if chosen then return tasks[chosen].results[1], chosen end
    local texts = trouble(tasks, #fns)
    local text = ("%s: none of %d results was valid"):format(call, #fns)
    if #texts > 0 then text = text .. ("; %d failed:\n"):format(#texts) .. table.concat(texts, "\n") end
    return nil, text, "not_found"
end

--- llm.best_of(n, fn, opts) or (functions, opts): runs the tries side by side and returns the result with the highest
--- score, that score, and the try's number. Options: score = function(result) -> number (nil: not eligible; default:
--- the result's own field "score"), enough = a score that ends the search at once, the others being cancelled;
--- concurrency. A try that fails with an error is out; if all are, their errors are raised together.
function M.best_of(what, ...)
    local call = "llm.best_of"
    local fn, o = arguments(what, ...)
    local fns = functions(call, what, fn)
    options.check(call, o, known_best, 2)
    local score, enough = o and o.score or function(r) return r.score end, o and o.enough or math.huge
    local best, best_score
    local tasks = run(call, fns, limit_of(call, o, #fns), function(t, i)
        if t.state ~= "done" then return false end
        local v = score(t.results[1])
        if v == nil then return false end
        if type(v) ~= "number" then
            errors.raise(call, ("score: number expected, got %s"):format(type(v)))
        end
        -- of equals the lowest number, whichever ended first
        if not best or v > best_score or (v == best_score and i < best) then best, best_score = i, v end
        return best_score >= enough
    end)
    if best then return tasks[best].results[1], best_score, best end
    local texts = trouble(tasks, #fns)
    if #texts == 0 then return nil, call .. ": no result got a score", "not_found" end
    error(call .. ": no try succeeded:\n" .. table.concat(texts, "\n"), 0)
end

return M
