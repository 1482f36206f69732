--- What the grammar fuzz targets and the replay of their corpora do with a text: compile it, and if it compiles, walk a
--- few texts and compare masks with what is accepted one by one. Raises where something is wrong.

local grammar = require "llmrun.grammar"
local vocab = dofile "tests/spec/grammar_support.lua" { '","', '":', 'a"', "aa", "\\u00", "12", "tr", '{"', "]}", " a" }

local CODES = { format = true, unsupported = true, limit = true, invalid = true, no_memory = true }
local OFTEN = { 34, 93, 125, 97, 49 }

--- kind: of grammar.compile.
return function(text, kind)
    local g, err, code = grammar.compile { [kind] = text, holes = (kind == "grammar" or kind == "lark") and
        { hole = function() return { "x", "yz" } end } or nil }
    if not g then
        assert(CODES[code] and type(err) == "string" and #err > 0 and #err < 2000, ("%s: %s"):format(code, err))
        return code
    end
    local seed = #text + 1
    for i = 1, math.min(#text, 64) do seed = seed * 31 + text:byte(i) end
    local function random(n)
        seed = seed * 6364136223846793005 + 1442695040888963407
        return (seed >> 33) % n + 1
    end
    local m, why, what = g:matcher(vocab)
    if not m then
        assert(CODES[what], why)
        return what
    end
    for _ = 1, 24 do
        local ids, e, c = m:allowed()
        if not ids then
            assert(CODES[c], e)
            return c
        end
        local has = {}
        for _, id in ipairs(ids) do has[id] = true end
        for _ = 1, 12 do
            local id = random(#vocab) - 1
            assert((has[id] or false) == m:allows(id), ("token %d"):format(id))
        end
        if #ids == 0 then break end
        local pick = ids[random(#ids)]
        for _, id in ipairs(OFTEN) do
            if has[id] and random(4) == 1 then pick = id end
        end
        local ok, e2, c2 = m:accept(pick)
        if not ok then
            assert(CODES[c2] and c2 ~= "invalid", e2)
            return c2
        end
        if random(8) == 1 then assert(m:rollback(1)) end
        if m:done() then break end
    end
    return "ok"
end
