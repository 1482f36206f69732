--- Work in child processes of llmrun, several side by side: each calls one function of a module with a table of plain
--- data and hands back another one.
---
---   local results = farm.run({ { seed = 1 }, { seed = 2 } }, { module = "my.module", name = "fn", jobs = 2 })
---   results[1] = { value = what fn returned } or { error = text }, and notes = what it wrote to stderr, if anything
---
--- A child that fails, or dies, is an error of its own job alone. When the caller is cancelled (Ctrl-C), the children
--- end with it.

local branch = require "llmrun.branch"
local core = require "llmrun.core"
local errors = require "llmrun.errors"
local exec = require "llmrun.exec"
local json = require "llmrun.json"
local options = require "llmrun.options"

local M = {}

local MARK = "llmrun_result " -- begins the line of a child's output that holds the result

--- What a child runs: prints the result of module.name(job).
---@param module string
---@param name string
---@param text string the job as JSON
function M.child(module, name, text)
    local job = assert(json.decode(text))
    local ok, value = xpcall(require(module)[name], function(e)
        if errors.is(e) then return (e.message:gsub("^stdin:1: ", "")) end
        return debug.traceback(tostring(e), 2)
    end, job)
    local line = assert(json.encode(ok and { value = value } or { error = value }))
    io.stdout:write("\n", MARK, line, "\n")
end

--- The end of what a child said, as one text.
local function last_words(text)
    text = text:gsub("%s+$", "")
    return #text > 2000 and "..." .. text:sub(-2000) or text
end

local function result_of(r, err)
    if not r then return { error = err } end
    local line = r.stdout:match("\n" .. MARK .. "([^\n]*)\n$")
    local out = line and json.decode(line)
    local said = last_words(r.stderr)
    if out then
        out.notes = said ~= "" and said or nil
        return out
    end
    local how = r.signal and ("ended by signal %d"):format(r.signal) or ("ended with status %d"):format(r.status or -1)
    if r.truncated then how = "said too much" end
    return { error = ("the process %s%s"):format(how, said ~= "" and ": " .. said or "") }
end

local known = { module = "string", name = "string", jobs = "integer", done = "function" }

--- Runs module.name(job) for each job, at most `jobs` at once (all processors). done(how many are done, result) is
--- told. Results in the order of the jobs.
---@param list table[] plain data
---@param o { module: string, name: string, jobs?: integer, done?: function }
---@return table[]
function M.run(list, o)
    options.check("farm.run", o, known, 2)
    local at_once = o.jobs or core.cpus()
    local program, err = core.executable()
    if not program then errors.raise("farm.run", err) end
    local finished = 0
    return branch.map(list, function(job)
        local text = assert(json.encode(job))
        local r, why = exec.exec({ program, "-" }, {
            stdin = ("require('llmrun.farm').child(%q, %q, %q)"):format(o.module, o.name, text),
            timeout = 1e8, max_output = 1 << 28,
        })
        local result = result_of(r, why)
        finished = finished + 1
        if o.done then o.done(finished, result) end
        return result
    end, { concurrency = at_once })
end

return M
