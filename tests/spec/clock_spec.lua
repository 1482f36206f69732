-- A wall clock that is set back, again and again: nothing but dates comes from it.
local core = require "llmrun.core"
local shell = dofile "tests/spec/shell_support.lua"

it("timeouts, limits, measured times, the server and the simulator heed no wall clock", function()
    local folder = shell.folder()
    local shim = folder:at "shim.so"
    assert(os.execute(("'%s' -shared -fPIC -O1 -o '%s' tests/spec/clock_shim.c -ldl"):format(os.getenv "CC" or "cc", shim)))
    local preload = ("LD_PRELOAD='%s' ASAN_OPTIONS=\"$ASAN_OPTIONS:verify_asan_link_order=0\""):format(shim)
    local p <close> = assert(io.popen(("%s timeout 300 '%s' tests/spec/clock_program.lua '%s' 2>&1"):format(preload,
        core.executable(), folder.path)))
    local out = p:read "a"
    folder:remove()
    assert.equal("as ever\n", out)
end)
