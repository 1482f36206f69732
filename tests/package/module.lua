-- The same by a Lua that is not llmrun's.
local llm = require "llmrun"
llm.run(dofile, "/tmp/hello.lua")
