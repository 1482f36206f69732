--- Files that are there whole or not at all (file/newfile.h): they take their place when they are complete. A place
--- that is no plain file (/dev/stdout) is written to as it is.
---
---   local out <close> = assert(files.create(path))      -- says at once if the place can't be written
---   assert(out:write(text)); assert(out:done())
---
--- Without done, also after an error, Ctrl-C or an end by force, nothing is left, and what was there before stays.

local core = require "llmrun.core"

local M = {}

local File = {}
File.__index = File

---@return table? file, string? err
function M.create(path)
    local kind = core.stat(path)
    if kind == "folder" then return nil, path .. ": it is a folder" end
    local f, err
    if kind == "other" then f, err = io.open(path, "wb") else f, err = core.newfile(path) end
    if not f then return nil, (err:gsub(": cannot create a file beside it: ", ": ", 1)) end
    return setmetatable({ f = f, path = path, direct = kind == "other" }, File)
end

--- What a method returns: true; or nil and what is wrong, with the place, which Lua's own files do not tell.
local function told(self, ok, err)
    if ok then return true end
    return nil, self.direct and ("%s: %s"):format(self.path, err) or err
end

--- true; or nil and what is wrong.
function File:write(...) return told(self, self.f:write(...)) end

--- It is whole: gives it its name. true; or nil and what is wrong.
function File:done()
    local f = self.f
    self.f = false
    if self.direct then return told(self, f:close()) end
    return told(self, f:finish())
end

function File:__close()
    local f = self.f
    self.f = false
    if f then f:close() end
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
