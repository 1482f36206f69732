--- What specs of drafts share: one generation, and the same one with and without speculation.
local assert = require "luassert"

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

return M
