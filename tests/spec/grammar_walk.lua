--- Walks a text through a grammar's masks: whether all of it is let through, and may end there.

local bytes = dofile "tests/spec/grammar_support.lua" ()
local M = {}

--- Byte by byte.
function M.by_bytes(g, text)
    local m = assert(g:matcher(bytes))
    for i = 1, #text do
        if not m:accept_text(text:sub(i, i)) then return false end
    end
    return m:can_end()
end

--- Token by token, as the vocabulary encodes the text.
function M.by_tokens(g, vocab, text)
    local m = assert(g:matcher(vocab))
    for _, id in ipairs((assert(vocab:encode(text)))) do
        local yes, err = m:in_mask(id)
        if err then error(err) end
        if not yes then return false end
        assert(m:accept(id))
    end
    return m:can_end()
end

return M
