-- A scripted model for the specs of constraints.
local llm = require "llmrun"

--- A model whose logits are anything: they follow from the last tokens. lift: { [text of one token] = more }.
return function(opts, lift)
    local m
    local o = { vocab = { "tr", "ue", '{"', '":', " ", "ab", "abc", '"}', ", " }, kv = { blocks = 400 }, max_seqs = 24 }
    for k, v in pairs(opts or {}) do o[k] = v end
    local ids
    o.next = function(tokens)
        if not ids then
            ids = {}
            for text, more in pairs(lift or {}) do ids[m.vocab:find(text)] = more end
        end
        local n, row = #tokens, {}
        local h = (tokens[n] * 31 + (tokens[n - 1] or 0) * 17 + n) & 0xffffff
        for i = 1, m.info.n_vocab do
            h = (h * 1103515245 + 12345) & 0x7fffffff
            row[i] = (h >> 16) % 1000 / 250
        end
        for id, more in pairs(ids) do row[id + 1] = row[id + 1] + more end
        return { row = row }
    end
    m = llm.scripted(o)
    return m
end
