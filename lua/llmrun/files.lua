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
    -- whole before the file is there: Ctrl-C may come at any place, before anybody closes it too
    local self = setmetatable({ f = false, path = path, place = place, temporary = not direct }, File)
    local f, err = io.open(place, "wb")
    if not f then
        self.temporary = false
        return nil, direct and err or (err:gsub("%.part: ", ": ", 1))
    end
    self.f = f
    return self
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
    self.f = false
    local ok, err = f:close()
    if ok and self.temporary then ok, err = os.rename(self.place, self.path) end
    if ok then
        self.temporary = false
        return true
    end
    self:__close()
    return nil, ("%s: %s"):format(self.path, err)
end

function File:__close()
    if self.f then
        self.f:close()
        self.f = false
    end
    if self.temporary then
        self.temporary = false
        os.remove(self.place)
    end
end

File.__gc = File.__close

--- A whole text. true; or nil and what is wrong.
---@param path string
---@param text string
function M.save(path, text)
    local f <close>, err = M.create(path)
    if not f then return nil, err end
    local ok, why = f:write(text)
    if not ok then return nil, why end
    return f:done()
end

return M
