--- What the Lua scripts share at their start, as usage.py is for the Python ones: --help prints a script's own words,
--- the comment at its head, and wrong arguments are told before anything is done:
---
---   local first, second, rest = require "usage".arguments "FIRST [SECOND] [MORE...]"
---
--- An argument in brackets may be left out, and is nil then; one with dots is the list of all others.
local M = {}

local me = "scripts/" .. arg[0]:match "[^/]*$"

--- Ends with status 2.
function M.refuse(why)
    io.stderr:write(("%s: %s (see llmrun %s --help)\n"):format(me, why, me))
    os.exit(2)
end

local function head_comment()
    local lines = {}
    for line in io.lines(arg[0]) do
        local text = line:match "^%-%- ?(.*)$"
        if not text then break end
        lines[#lines + 1] = text .. "\n"
    end
    return table.concat(lines)
end

--- The values of the arguments that are named. flags: words with a dash that may be among them.
function M.arguments(names, flags)
    local given, known = table.pack(table.unpack(arg)), {}
    for _, flag in ipairs(flags or {}) do known[flag] = true end
    for _, word in ipairs(given) do
        if word == "-h" or word == "--help" then
            io.write(("usage: llmrun %s %s"):format(me, names):gsub("%s*$", ""), "\n\n", head_comment())
            os.exit(true, true)
        end
    end
    for _, word in ipairs(given) do
        if word == "" or word:find "^%-" and not known[word] then M.refuse(("unknown argument '%s'"):format(word)) end
    end
    local values, n, at = {}, 0, 1
    for name in names:gmatch "%S+" do
        n = n + 1
        if name:find("...", 1, true) then
            values[n] = table.move(given, at, #given, 1, {})
            at = #given + 1
        elseif given[at] then
            values[n] = given[at]
            at = at + 1
        elseif name:sub(1, 1) ~= "[" then
            M.refuse(name .. " is missing")
        end
    end
    if given[at] then M.refuse(("unexpected argument '%s'"):format(given[at])) end
    return table.unpack(values, 1, n)
end

return M
