--- Files that are there whole or not at all: written under another name and renamed at the end. A place that is no
--- plain file (/dev/stdout) is written to as it is.
---
---   local out <close> = assert(files.create(path))      -- says at once if the place can't be written
---   assert(out:write(text)); assert(out:done())
---
--- Without done, also after an error or Ctrl-C, nothing is left, and what was there before stays.

local core = require "llmrun.core"

local M = {}

local File = {}
File.__index = File

---@return table? file, string? err
function M.create(path)
    local kind = core.stat(path)
    if kind == "folder" then return nil, path .. ": it is a folder" end
    local direct = kind ~= nil and kind ~= "file"
    local place = direct and path or path .. ".part"
    local f, err = io.open(place, "wb")
    if not f then return nil, direct and err or (err:gsub("%.part: ", ": ", 1)) end
    return setmetatable({ f = f, path = path, place = place, direct = direct }, File)
end

--- true; or nil and what is wrong.
function File:write(...)
    local ok, err = self.f:write(...)
    if ok then return true end
    return nil, ("%s: %s"):format(self.path, err)
end

--- It is whole: gives it its name. true; or nil and what is wrong.
function File:done()
    local f = self.f
    self.f = nil
    local ok, err = f:close()
    if ok and not self.direct then ok, err = os.rename(self.place, self.path) end
    if ok then return true end
    if not self.direct then os.remove(self.place) end
    return nil, ("%s: %s"):format(self.path, err)
end

function File:__close()
    if not self.f then return end
    self.f:close()
    self.f = nil
    if not self.direct then os.remove(self.place) end
end

return M
