--- llmrun new: a starter that works, with its spec.

local core = require "llmrun.core"
local args = require "llmrun.cli.args"
local save = require("llmrun.files").save
local starters = require "llmrun.cli.starters"

local M = {
    summary = "writes a starter: a program, policy, sampler, architecture or route, with its spec",
    usage = "NAME [--kind KIND]",
    args = true,
    help = [[
A program is a folder NAME with main.lua; the other kinds are a file NAME.lua. Each comes with a spec that llmrun test
runs in milliseconds, without a model file (require "llmrun.testing"). Nothing is overwritten.]],
    examples = [[
        llmrun new travel && llmrun travel/main.lua && llmrun test travel
        llmrun new patient --kind policy && llmrun test patient_spec.lua
        llmrun new bold --kind sampler
        llmrun new mine --kind architecture
        llmrun new triage --kind route && llmrun serve --routes triage.lua]],
    flags = {
        { "kind", short = "k", arg = "KIND", default = "program", choices = starters.kinds,
            help = "what it is to be" },
    },
}

--- written: a list of what is there so far; all of it goes again where something can't be written.
local function write(path, text, written)
    local ok, why = save(path, text)
    if ok then
        table.insert(written, path)
        return
    end
    for i = #written, 1, -1 do os.remove(written[i]) end
    args.fail(why)
end

function M.run(o, words)
    if #words ~= 1 then args.fail("one name expected (see llmrun new --help)", 2) end
    local folder, name = words[1]:match("^(.-)([^/]+)$")
    if not name or not name:find("^[%a_][%w_]*$") then
        args.fail(("'%s' is no name: letters, digits and _ expected, the first no digit"):format(name or words[1]), 2)
    end
    if folder ~= "" and core.stat(folder) ~= "folder" then args.fail("there is no folder " .. folder) end
    local files, run = starters.make(o.kind, name)
    for _, file in ipairs(files) do
        if core.stat(folder .. file.path) then args.fail(folder .. file.path .. " is there already") end
    end
    local written = {}
    if o.kind == "program" then
        local at = folder .. name
        if core.stat(at) then args.fail(at .. " is there already") end
        local ok, err = core.mkdir(at)
        if not ok then args.fail(err) end
        written[1] = at
    end
    for _, file in ipairs(files) do write(folder .. file.path, file.text, written) end
    for _, file in ipairs(files) do print("wrote " .. folder .. file.path) end
    print("run   " .. run:gsub("@", folder))
    print(("test  llmrun test %s%s"):format(folder, o.kind == "program" and name or files[2].path))
    return 0
end

return M
