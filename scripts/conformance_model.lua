-- A server whose model costs nothing, for tools that send thousands of requests:
--   llmrun scripts/conformance_model.lua KEY
-- Answers are "ab " over and over, and end after a number of tokens that follows from the prompt.
--
-- example:
--   build/llmrun scripts/conformance_model.lua sk-test

local llm = require "llmrun"
local key = require "usage".arguments "KEY"

local m
m = llm.scripted {
    vocab = { "a", "b", " " }, ctx = 512, max_seqs = 64, name = "scripted", next = function(tokens)
        if #tokens % 37 == 0 then return m.info.eos end
        return { [#tokens % 3] = 5, [(#tokens + 1) % 3] = 4, default = -5 }
    end,
}
llm.serve {
    port = 0, models = { scripted = m }, api_keys = { key }, scripts = { seconds = 1, timeout = 5 },
    on_ready = function(server) io.stderr:write("serving at ", server:url(), "\n") end,
}
