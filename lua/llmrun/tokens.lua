--- Texts into tokens. Long ones are cut aside (lua_aside.c) where others may have their turn (loop.breathing).

local core = require "llmrun.core"
local loop = require "llmrun.loop"

local M = {}

local LONG = 65536 -- bytes; what is shorter takes some milliseconds at most

--- As vocab:encode: ids; nil, text, code.
---@param vocab table
---@param text string
---@param opts? { special?: boolean, bos?: boolean }
function M.encode(vocab, text, opts)
    if #text < LONG or type(vocab) ~= "userdata" or not loop.may_wait() then return vocab:encode(text, opts) end
    local job, err, code = core.aside(vocab, text, opts)
    if not job then return nil, err, code end
    local over <close> = job -- luacheck: ignore 211
    local fd, done = job:fd(), loop.ticket()
    local function stop() loop.unwatch(fd) end
    loop.watch(fd, "r", function()
        stop()
        loop.fire(done)
    end)
    loop.wait(done, "cutting a text into tokens", stop)
    return job:result()
end

--- Puts ids behind a list of ids; with many, others may have their turn.
function M.add(list, ids)
    for at = 1, #ids, LONG do
        table.move(ids, at, math.min(at + LONG - 1, #ids), #list + 1, list)
        loop.breathe()
    end
end

return M
