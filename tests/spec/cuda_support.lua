--- Programs on the emulated device, in processes of their own. The plugin is libllmrun_cuda_emu.so beside the program.
local core = require "llmrun.core"

local exe = core.executable()
local M = { exe = exe, plugin = exe:match("^(.*)/") .. "/libllmrun_cuda_emu.so" }

--- Whether there is the emulated device: it needs a C++ compiler.
M.built = core.stat(M.plugin) == "file"

local function quote(s) return "'" .. tostring(s):gsub("'", "'\\''") .. "'" end

--- A command of the program with variables set: output and errors, status.
function M.run(variables, ...)
    local words = { "env", "LLMRUN_DEVICE=", "LLMRUN_CUDA_PLUGIN=" .. quote(M.plugin) }
    for k, v in pairs(variables) do words[#words + 1] = k .. "=" .. quote(v) end
    words[#words + 1] = quote(exe)
    for _, a in ipairs { ... } do words[#words + 1] = quote(a) end
    local p <close> = assert(io.popen(table.concat(words, " ") .. " 2>&1; echo \"|$?\""))
    local out, status = p:read("a"):match("^(.*)|(%d+)\n$")
    return out, tonumber(status)
end

--- The same with a program given as text, which must end well: what it printed.
function M.run_text(variables, text, ...)
    local path = os.tmpname()
    local f <close> = assert(io.open(path, "w"))
    f:write(text)
    f:close()
    local out, status = M.run(variables, path, ...)
    os.remove(path)
    assert(status == 0, out)
    return out
end

return M
