--- require "llmrun": what programs use. See lua/README.md.

local branch = require "llmrun.branch"

---@class llmrun
local llm = {
    version = "0.1.0",
    spawn = branch.spawn,
    all = branch.all,
    any = branch.any,
    race = branch.race,
    map = branch.map,
    sleep = branch.sleep,
    timeout = branch.timeout,
}

return llm
