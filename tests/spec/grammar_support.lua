--- A vocabulary of the 256 bytes as tokens 0..255, then any further pieces given, then the end token.

local core = require "llmrun.core"

-- A byte as byte-level BPE spells it.
local function spelt(b)
    if b < 33 then return utf8.char(256 + b) end
    if b == 127 then return utf8.char(256 + 33) end
    if b >= 128 and b <= 160 then return utf8.char(256 + 34 + b - 128) end
    if b == 173 then return utf8.char(256 + 67) end
    return utf8.char(b)
end

return function(pieces)
    local tokens, types = {}, {}
    for b = 0, 255 do tokens[b + 1] = spelt(b) end
    for _, p in ipairs(pieces or {}) do
        tokens[#tokens + 1] = p:gsub(".", function(c) return spelt(c:byte()) end)
    end
    for i = 1, #tokens do types[i] = 1 end
    tokens[#tokens + 1] = "<|endoftext|>"
    types[#tokens] = 3
    return assert(core.vocab_new { model = "gpt2", pre = "smollm", tokens = tokens, types = types, eos = #tokens - 1 })
end
