--- How long grammars take: compiling JSON schemas, and token masks along texts that obey them, with a model's tokens.
---
---   llmrun tests/bench/grammar_masks.lua [--model NAME] [--runs N] [--out FILE] [--each 1]
---
--- Prints one JSON line: compile_ms (median and worst over the schemas, each compiled --runs times), first_us and
--- again_us (median, 99th percentile and worst of a mask: along a grammar's first text, and along the same text once
--- more; processor time), masks, vocab. --each prints a line for each schema before. --out writes what another engine
--- needs to do the same (scripts/peers/grammars.py): the vocabulary's pieces, the schemas, the tokens.

local core = require "llmrun.core"
local common = require "llmrun.cli.common"
local grammar = require "llmrun.grammar"
local json = require "llmrun.json"

local opts = { model = "qwen-0.5b", runs = 5 }
for i = 1, #arg, 2 do opts[arg[i]:gsub("^%-%-", "")] = tonumber(arg[i + 1]) or arg[i + 1] end

-- Schemas, each with a text that obeys it. Texts have one space behind commas and colons, objects are closed but for
-- one, properties come in order: what every engine reads alike.
local CASES = {}
for line in io.lines "tests/data/grammar/bench.jsonl" do CASES[#CASES + 1] = assert(json.decode(line)) end

local file = assert(core.gguf_open(assert(common.find(opts.model))))
local vocab = assert(file:vocab())
assert(grammar.compile { regex = "a" }):matcher(vocab):count() -- the trie is built at the first

local function statistics(list)
    table.sort(list)
    local function at(q) return tonumber(("%.2f"):format(list[math.max(1, math.ceil(q * #list))])) end
    return { median = at(0.5), p99 = at(0.99), max = at(1) }
end

local function walk(g, ids, times, name)
    local m = assert(g:matcher(vocab))
    for _, id in ipairs(ids) do
        local n, seconds = m:count()
        if not n then error(seconds) end
        times[#times + 1] = seconds * 1e6
        if not m:accept(id) then error(name .. ": its text is not allowed") end
    end
    assert(m:can_end(), name)
end

local compile, first, again, out = {}, {}, {}, { cases = json.array() }
for _, case in ipairs(CASES) do
    local name, schema, text = case.name, case.schema, case.text
    local ids, g = assert(vocab:encode(text)), nil
    local here, one, two = {}, {}, {}
    for _ = 1, opts.runs do
        local start = os.clock()
        g = assert(grammar.compile { json = schema })
        here[#here + 1] = (os.clock() - start) * 1e3
    end
    walk(g, ids, one, name)
    walk(g, ids, two, name)
    compile[#compile + 1] = statistics(here).median
    for i = 1, #one do first[#first + 1], again[#again + 1] = one[i], two[i] end
    if opts.each then
        print(json.encode { name = name, compile_ms = statistics(here), first_us = statistics(one),
            again_us = statistics(two) })
    end
    out.cases[#out.cases + 1] = { name = name, schema = schema, ids = json.array(ids) }
end
if opts.out then
    out.pieces = json.array()
    for id = 0, #vocab - 1 do
        out.pieces[id + 1] = vocab:kind(id) == "control" and "" or
            (vocab:piece(id):gsub(".", function(c) return ("%02x"):format(c:byte()) end))
    end
    out.eog = json.array(vocab:info().eog)
    local h = assert(io.open(opts.out, "w"))
    h:write(assert(json.encode(out)))
    h:close()
end
local n = #first
print(json.encode { engine = "llmrun", vocab = #vocab, masks = n, compile_ms = statistics(compile),
    first_us = statistics(first), again_us = statistics(again) })
