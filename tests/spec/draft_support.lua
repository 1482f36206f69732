--- What specs of drafts share: one generation, and the same one with and without speculation.
local assert = require "luassert"
local llm = require "llmrun"

local M = {}

--- One generation: its result, with the ids of the session behind it.
function M.run(m, o, prompt)
    local s <close> = m:session()
    s:append(prompt or "hello abcab")
    local r = s:gen(o)
    m:check()
    r.all = s.tokens
    return r
end

--- The same options with and without speculation, which must give the same: (with, without).
function M.both(m, o, speculate, prompt)
    local off, on = {}, {}
    for k, v in pairs(o) do off[k], on[k] = v, v end
    on.speculate = speculate
    local a, b = M.run(m, off, prompt), M.run(m, on, prompt)
    for _, field in ipairs { "tokens", "all", "text", "finish_reason", "stop", "stop_token", "logprobs" } do
        assert.same(a[field], b[field])
    end
    return b, a
end

--- What four sessions at once write, with forks, preemptions and a grammar among them.
function M.crowd(m, how)
    return llm.map({ "one", "another prompt", "a third one that is longer than the others", "four" }, function(p, i)
        local s <close> = m:session()
        s:append(p)
        local text = s:gen { max_tokens = 10 + i, temperature = i % 2, seed = i, ignore_eos = true, speculate = how,
            fault = i % 2 == 0 and { i % 4 == 0 and "preempt" or "swap", i } or nil }.text
        local f <close> = s:fork()
        return text .. f:gen { max_tokens = 9, temperature = 0, ignore_eos = true, speculate = how }.text ..
            s:gen { regex = "[a-f]{9}", temperature = 1, seed = i, speculate = how }.text
    end)
end

return M
