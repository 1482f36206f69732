--- llmrun ARGS...: a Lua program, or a command (a module llmrun.cli.NAME).
---
--- A command's module is { summary = "...", usage = "...", help = "...", flags = {...}, run = function(opts, args) };
--- see cli/args.lua for flags. run returns an exit status or nothing (0).

local core = require "llmrun.core"
local loop = require "llmrun.loop"

local M = {}

M.commands = require "llmrun.cli.commands"

local function usage()
    local lines = {
        "usage: llmrun FILE.lua [ARGS...]     runs a Lua program",
        "       llmrun --record FILE FILE.lua ...          writes down all that llmrun replay needs to repeat the run",
        "       llmrun --attach FILE.lua ...               lets llmrun attach in",
        "       mpirun -n N llmrun [--tp N] [--pp N] FILE.lua | COMMAND ...   on N processes",
        "       llmrun COMMAND [FLAGS...]     one of:",
    }
    for _, name in ipairs(M.commands) do
        local ok, cmd = pcall(require, "llmrun.cli." .. name)
        if ok then lines[#lines + 1] = ("         %-11s %s"):format(name, cmd.summary) end
    end
    lines[#lines + 1] = "       llmrun COMMAND --help         flags and examples of a command"
    lines[#lines + 1] = "       llmrun --version"
    return table.concat(lines, "\n") .. "\n"
end

local function fail_usage(text)
    io.stderr:write("llmrun: ", text, "\n", "see llmrun --help\n")
    return 2
end

--- The outcome of loop.run as an exit status; what went wrong goes to stderr.
local function status_of(how, value)
    if how == "done" then return value or 0 end
    io.stdout:flush()
    if how == "interrupted" then
        io.stderr:write("llmrun: interrupted\n")
        if value and value ~= "" then io.stderr:write(value, "\n") end
        return 130
    end
    if value and value ~= "" then io.stderr:write("llmrun: ", value, "\n") end
    return 1
end

--- Ends the recordings; the exit status, which is not 0 if one of them is cut.
local function finish(status)
    local whole = require("llmrun.record").finish_all()
    return status == 0 and not whole and 1 or status
end

local function is_model(path)
    local f <close> = io.open(path, "rb")
    return f and f:read(4) == "GGUF"
end

local function run_program(path, argv, first, flags)
    local chunk, err
    local record = require "llmrun.record"
    local good, why = record.check()
    if not good then
        io.stderr:write("llmrun: --record: ", why, "\n")
        return 1
    end
    if path == "-" then
        chunk, err = loadfile(nil, "t")
    else
        local folder = path:match("^(.*)/[^/]*$") or "."
        package.path = folder .. "/?.lua;" .. folder .. "/?/init.lua;" .. package.path
        if core.stat(path) == "file" and is_model(path) then
            io.stderr:write("llmrun: ", path, " is a model, not a program; llmrun run -m ", path, " -p TEXT asks it\n")
            return 1
        end
        chunk, err = loadfile(path, "t")
    end
    if not chunk then
        if err:find("^attempt to load a binary chunk") then err = path .. ": compiled Lua is not run, only source" end
        io.stderr:write("llmrun: ", err, "\n")
        return 1
    end
    local args = { [0] = path }
    for i = first, #argv do args[#args + 1] = argv[i] end
    for i = 0, first - 2 do args[i - first + 1] = argv[i] end
    arg = args -- luacheck: ignore 121
    local how, value = loop.run(function(...)
        if not flags.attach then return chunk(...) end
        local attached <close> = require("llmrun.attach").listen { -- luacheck: ignore 211
            models = require("llmrun.model").list, path = flags.socket,
        }
        return chunk(...)
    end, table.unpack(args))
    return finish(status_of(how, how ~= "done" and value or nil))
end

local function run_command(name, argv)
    local ok, cmd = pcall(require, "llmrun.cli." .. name)
    if not ok then
        io.stderr:write("llmrun: ", cmd, "\n")
        return 1
    end
    local rest = table.move(argv, 2, #argv, 1, {})
    if cmd.raw then
        local how, value = loop.run(cmd.run, rest)
        return status_of(how, how ~= "interrupted" and value or nil)
    end
    local args = require "llmrun.cli.args"
    local opts, err = args.parse(cmd, name, rest)
    if not opts then
        io.stderr:write("llmrun ", name, ": ", err, "\n", "see llmrun ", name, " --help\n")
        return 2
    end
    if opts.help then
        io.stdout:write(args.help(cmd, name))
        return 0
    end
    local how, value = loop.run(function()
        local good, status, text = args.catch(cmd.run, opts, opts.args)
        if good then return status or 0 end
        io.stdout:flush()
        if not core.interrupted() then io.stderr:write("llmrun ", name, ": ", text, "\n") end
        return status
    end)
    return finish(status_of(how, how ~= "interrupted" and value or nil)) -- where a command was is nobody's business
end

--- Takes the flags of a program off the front of the command line: { attach = true, socket = path }; nil and what is
--- wrong.
local function program_flags(argv)
    local o = {}
    while argv[1] do
        local name, value = argv[1]:match("^(%-%-[%a%-]+)=(.+)$")
        name = name or argv[1]
        if name == "--attach" and not value then
            o.attach = true
            table.remove(argv, 1)
        elseif name == "--record" or name == "--attach-socket" then
            table.remove(argv, 1)
            value = value or table.remove(argv, 1)
            if not value then return nil, name .. " needs a value" end
            if name == "--record" then require("llmrun.record").path = value else o.attach, o.socket = true, value end
        else
            break
        end
    end
    return o
end

--- Runs a command line (argv[0] is the program); returns the exit status.
function M.main(argv)
    local flags, bad = program_flags(argv)
    if not flags then return fail_usage(bad) end
    require("llmrun.yieldable").install()
    core.catch_interrupts("stop")
    local dist = require "llmrun.dist"
    local ranks, wrong = dist.flags(argv)
    if not ranks then return fail_usage(wrong) end
    local status = dist.start(ranks)
    if status then return status end
    local name = argv[1]
    if not name then
        io.stderr:write(usage())
        return 2
    elseif name == "--help" or name == "-h" or name == "help" then
        io.stdout:write(usage())
        return 0
    elseif name == "--version" or name == "-V" then
        print("llmrun " .. require("llmrun").version)
        return 0
    end
    for _, c in ipairs(M.commands) do
        if c == name then return run_command(name, argv) end
    end
    if name == "-" or name:find("%.lua$") or core.stat(name) == "file" then return run_program(name, argv, 2, flags) end
    if name:sub(1, 1) == "-" then return fail_usage("unknown flag " .. name) end
    if core.stat(name) == "folder" then return fail_usage(name .. " is a folder; a program is a file") end
    local close = require("llmrun.options").closest(name, M.commands)
    return fail_usage(("no command or file '%s'%s"):format(name, close and "; did you mean " .. close .. "?" or ""))
end

return M.main
