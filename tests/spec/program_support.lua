--- What specs of programs share: an error wanted, a model that always says the same, a session that begins with a text.
local assert = require "luassert"
local llm = require "llmrun"

local M = {}

function M.raises(pattern, fn, ...)
    local ok, err = pcall(fn, ...)
    assert.is_false(ok)
    assert.matches(pattern, tostring(err), 1, true)
    return err
end

function M.constant(o)
    o = o or {}
    o.next = o.next or function() return 65 end
    return llm.scripted(o)
end

function M.session(m, text)
    local s = m:session()
    s:append(text)
    return s
end

return M
