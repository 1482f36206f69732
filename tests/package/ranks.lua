-- A model in parts: a tiny file with random weights, written here; which process writes it does not matter.
local llm = require "llmrun"
local path = require("llmrun.testing.gguf").tiny(os.tmpname())
local model <close> = llm.load(path, { ctx = 64 })
local s <close> = model:session()
s:append "abc"
local r = s:gen { max_tokens = 5, temperature = 0, ignore_eos = true }
print(#r.tokens, "tokens from", model:stats().ranks and "two processes")
os.remove(path)
