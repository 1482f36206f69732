--- llmrun test: runs busted specs inside llmrun, so that a spec is a program like any other and may wait for models.

local core = require "llmrun.core"

local M = {
    summary = "runs busted specs (Lua tests) that use llmrun",
    raw = true, -- flags are busted's own
    usage = "[FLAGS...] [SPEC or FOLDER...]",
    help = [[
Runs busted specs inside llmrun. Folders are searched for *_spec.lua; without any, tests/spec or spec. Flags are
busted's own (busted --help lists them); the exit status is the number of failures, 0 if there are none. Ctrl-C ends
the run, tells what was run so far, and makes the status 130.
A spec needs no model file: require "llmrun.testing" has a model that says what the spec tells it, and an engine that is
stepped by hand. llmrun new writes specs to begin with.]],
    examples = [[
        llmrun test tests/spec
        llmrun test tests/spec/loop_spec.lua --filter "map"]],
}

local function default_folders()
    for _, folder in ipairs { "tests/spec", "spec" } do
        if core.stat(folder) == "folder" then return folder end
    end
end

local function has_path(argv)
    local takes_value = {}
    for flag in ([[-o --output -t --tags --filter -p --pattern -e --name --seed --lang --repeat --helper --exclude-tags
        --filter-out -f --config-file -m --lpath --cpath -r --run -C --directory --loaders --exclude-names-file -Xoutput
        -Xhelper]]):gmatch("%S+") do
        takes_value[flag] = true
    end
    local skip = false
    for _, a in ipairs(argv) do
        if skip then
            skip = false
        elseif a:sub(1, 1) == "-" then
            skip = takes_value[a] or false
        else
            return true
        end
    end
    return false
end

--- Sees to it that a run of busted ends at Ctrl-C. What computes then has failed with an error, and no further spec is
--- begun. What waits then is not resumed: the result is closed in its place, and tells what busted would have told.
local function stoppable()
    local make, busted, suite = require "busted.core", nil, nil
    local function on_end()
        if core.interrupted() then busted.skipAll = true end
        return nil, true -- others are to hear of it too
    end
    local function tell_end()
        if not suite then return end
        local at = busted.context.get()
        if at ~= suite then
            busted.publish({ "error", at.descriptor }, at, busted.context.parent(at), "interrupted", at.trace)
        end
        if at.descriptor == "it" then
            busted.safe_publish("it", { "test", "end" }, at, busted.context.parent(at), "error")
        end
        busted.safe_publish("suite", { "suite", "end" }, suite, 1, 1)
        io.stdout:flush()
    end
    package.loaded["busted.core"] = function()
        busted = make()
        busted.subscribe({ "suite", "start" }, function(root)
            suite = root
            return nil, true
        end)
        busted.subscribe({ "suite", "end" }, function()
            suite = nil
            return nil, true
        end)
        for _, what in ipairs { "test", "describe", "file" } do busted.subscribe({ what, "end" }, on_end) end
        return busted
    end
    return setmetatable({}, { __close = tell_end })
end

function M.run(argv)
    if argv[1] == "--help" or argv[1] == "-h" then
        io.stdout:write(require("llmrun.cli.args").help(M, "test"))
        return 0
    end
    if not has_path(argv) then
        local folder = default_folders()
        if not folder then
            io.stderr:write("llmrun test: no spec given, and there is no folder tests/spec or spec\n")
            return 2
        end
        argv[#argv + 1] = folder
    end
    argv[0] = "llmrun test"
    arg = argv -- luacheck: ignore 121
    local ok, runner = pcall(require, "busted.runner")
    if not ok then
        io.stderr:write("llmrun test: busted is not installed (Debian package lua-busted): ",
            runner:match "^[^\n]*", "\n")
        return 1
    end
    local told <close> = stoppable() -- luacheck: ignore 211
    local exit = os.exit
    os.exit = function(...) -- luacheck: ignore 122
        if not core.interrupted() then exit(...) end -- by busted, with the number of failures
        io.stderr:write("llmrun: interrupted\n")
        exit(130, true)
    end
    runner { standalone = false }
    return 0
end

return M
