--- llmrun attach: a console into a program that runs.

local args = require "llmrun.cli.args"
local attach = require "llmrun.attach"
local core = require "llmrun.core"

local M = {
    summary = "a console in a running server or program",
    usage = "[PATH|PID] [-e LINE]...",
    args = true,
    help = [[
Looks into a running llmrun serve, or a program that was started with --attach: the queue, the batch, KV blocks, the
prefix tree, metrics; tries a policy in the shadow of the one in charge, switches, and switches back. Lines are commands
(help lists them) or Lua, which runs between two steps within limits. Only the user who runs the program gets in.
Without PATH or PID the one program that runs is taken. Ctrl-D ends the console; the program goes on.]],
    examples = [[
        llmrun attach
        llmrun attach 4711 -e queue -e "model:metrics().ttft"
        llmrun attach /run/llmrun/attach.sock
        llmrun attach -e "try fair.lua"
        llmrun attach -e shadow
        llmrun attach -e "switch fair.lua"
        llmrun attach -e back]],
    flags = {
        { "eval", short = "e", arg = "LINE", type = "list", help = "says this line, prints the answer, and ends" },
    },
}

--- The path of a socket: given, of a process, or the only one.
local function find(what)
    if what and not what:find "^%d+$" then
        local kind = core.stat(what)
        if kind == "file" or kind == "folder" then args.fail(what .. ": no socket, but a " .. kind) end
        return what
    end
    local living = {}
    for _, s in ipairs(attach.sockets()) do
        if what and s.pid == math.tointeger(tonumber(what)) then return s.path end
        if core.stat("/proc/" .. s.pid) then living[#living + 1] = s end
    end
    if what then args.fail(("process %s has no console (%s)"):format(what, attach.default_path(what))) end
    if #living == 1 then return living[1].path end
    if #living == 0 then args.fail(("no program with a console runs here (%s)"):format(attach.folder())) end
    local lines = { "several run; say which:" }
    for _, s in ipairs(living) do lines[#lines + 1] = ("  llmrun attach %d"):format(s.pid) end
    args.fail(table.concat(lines, "\n"))
end

local function ask(c, line)
    local text, ok = c:ask(line)
    if not text then args.fail("the program is gone") end
    if text ~= "" then (ok and io.stdout or io.stderr):write(text, "\n") end
    return ok
end

function M.run(o)
    if o.args[2] then args.fail(("unexpected argument '%s'"):format(o.args[2]), 2) end
    local path = find(o.args[1])
    local c, err = attach.connect(path)
    if not c then args.fail(err) end
    local guard <close> = c -- luacheck: ignore 211
    if not c.welcome then args.fail(c.greeting) end
    if o.eval then
        local good = true
        for _, line in ipairs(o.eval) do good = ask(c, line) and good end
        return good and 0 or 1
    end
    local lines = require("llmrun.cli.lineedit").new()
    if lines.tty then print(c.greeting) end
    while true do
        local line, why = lines:line "attach> "
        if why == "eof" or why == "signal" or line == "quit" or line == "exit" then break end
        if line then
            lines:remember(line)
            ask(c, line)
        end
    end
    return 0
end

return M
