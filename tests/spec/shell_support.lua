--- A folder of a spec's own, and llmrun's command line run in it.
local core = require "llmrun.core"

local Folder = {}
Folder.__index = Folder

--- The path of a name in the folder.
function Folder:at(name) return self.path .. "/" .. name end

--- Writes a file of the folder.
function Folder:put(name, text)
    local f <close> = assert(io.open(self:at(name), "wb"))
    assert(f:write(text))
end

--- The text of a file of the folder; nil and why where there is none.
function Folder:get(name)
    local f <close>, err = io.open(self:at(name), "rb")
    if not f then return nil, err end
    return f:read "a"
end

--- Runs llmrun with a line of arguments, in the folder: output, errors, status.
function Folder:llmrun(line)
    local p <close> = assert(io.popen(("cd '%s'; '%s' %s 2>errors; echo \"|$?\""):format(self.path, core.executable(), line)))
    local out, status = p:read("a"):match("^(.*)|(%d+)\n$")
    local f <close> = assert(io.open(self:at "errors"))
    return out, f:read("a"), tonumber(status)
end

function Folder:remove() os.execute(("rm -r '%s'"):format(self.path)) end

local M = {}

--- A new, empty folder.
function M.folder()
    local path = os.tmpname()
    os.remove(path)
    assert(os.execute(("mkdir '%s'"):format(path)))
    return setmetatable({ path = path }, Folder)
end

return M
