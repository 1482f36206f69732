-- A program without a model file: the scripted model spells a text.
local llm = require "llmrun"
local model <close> = llm.scripted { next = function(tokens) return ("hello"):byte(#tokens + 1) end }
local s <close> = model:session()
s:append "h"
print("h" .. s:gen { temperature = 0, max_tokens = 4 }.text)
