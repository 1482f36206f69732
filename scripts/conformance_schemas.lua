-- The llmrun side of scripts/conformance_schemas: compiles the schemas of a file of rows, walks their instances byte by
-- byte and token by token through the masks of a model's vocabulary, and generates texts under each at random.
--
--   llmrun scripts/conformance_schemas.lua MODEL.gguf ROWS.jsonl RESULTS.jsonl
--
-- A line of results: { refused, code } or { ms, verdicts = { { bytes, tokens } }, samples = { text }, stuck }.
--
-- example:
--   build/llmrun scripts/conformance_schemas.lua smollm2.gguf rows.jsonl results.jsonl

local core = require "llmrun.core"
local grammar = require "llmrun.grammar"
local json = require "llmrun.json"

local model_path, rows_path, results_path = require "usage".arguments "MODEL.gguf ROWS.jsonl RESULTS.jsonl"
local file = assert(core.gguf_open(model_path))
local real = assert(file:vocab())
local bytes = dofile "tests/spec/grammar_support.lua" ()
local walk = dofile "tests/spec/grammar_walk.lua"
local MAX_MODEL_TOKENS, MAX_BYTES = 150, 700

-- A random number generator of our own, so that the texts are the same everywhere.
local seed = 1
local function random(n)
    seed = (seed * 6364136223846793005 + 1442695040888963407)
    return (seed >> 33) % n + 1
end

-- Ids of the tokens that bring a text to its end, best first.
local function closers(vocab)
    local out = {}
    for _, piece in ipairs { '"', "}", "]", "0", "1" } do out[#out + 1] = vocab:encode(piece)[1] end
    return out
end
local CLOSERS = { [real] = closers(real), [bytes] = closers(bytes) }

-- One text; nil if it did not end.
local function sample(g, vocab, most)
    local m, out, eog = assert(g:matcher(vocab)), {}, {}
    for _, id in ipairs(vocab:info().eog) do eog[id] = true end
    local hurry = random(most)
    for step = 1, most do
        local pick
        if (step > hurry or random(4) == 1) then
            if m:can_end() then return table.concat(out) end
            for _, id in ipairs(CLOSERS[vocab]) do
                if not pick and m:allows(id) then pick = id end
            end
        end
        if not pick then
            local ids, err = m:allowed()
            if not ids then return nil, err end
            if #ids == 0 then return nil, "stuck" end
            pick = ids[random(#ids)]
        end
        if eog[pick] then return table.concat(out) end
        out[#out + 1] = (vocab:piece(pick))
        assert(m:accept(pick))
    end
    return m:can_end() and table.concat(out) or nil
end

local function examine(row)
    local start = os.clock()
    local g, err, code = grammar.compile { json = row.schema }
    if not g then return { refused = err, code = code } end
    local r = { ms = (os.clock() - start) * 1000, verdicts = json.array(), samples = json.array(), stuck = 0 }
    for i, t in ipairs(row.tests) do
        local v = { bytes = false, tokens = false }
        for _, text in ipairs(t.texts) do
            v.bytes = v.bytes or walk.by_bytes(g, text)
            v.tokens = v.tokens or walk.by_tokens(g, real, text)
        end
        r.verdicts[i] = v
    end
    for _, vocab in ipairs { bytes, bytes, real } do
        local text = sample(g, vocab, vocab == bytes and MAX_BYTES or MAX_MODEL_TOKENS)
        if text and utf8.len(text) then
            r.samples[#r.samples + 1] = text
        else
            r.stuck = r.stuck + 1
        end
    end
    return r
end

local out <close> = assert(require("llmrun.files").create(results_path))
for line in io.lines(rows_path) do
    assert(out:write(assert(json.encode(examine(assert(json.decode(line))))), "\n"))
    collectgarbage()
end
assert(out:done())
