--- tokenizer.json: ids and texts of the tokenizers of scripts/gen_hf_ref.py, one of each kind, against the library's own.

local hf = dofile "tests/spec/hf_support.lua"
local tokenizer = require "llmrun.hf.tokenizer"
local json = require "llmrun.json"

local refs = hf.reference "tokenizers"

--- The vocabulary of a text of tokenizer.json.
local function vocab(text, config)
    local o = { read = function() end, read_json = function(_, name)
        if name == "tokenizer.json" then return assert(json.decode(text, { max_values = 30000000 })) end
    end, config = config or {} }
    return tokenizer.vocab("", o)
end

local function of(name) return vocab(hf.read(("%s/tokenizers/%s.json"):format(hf.data, name))) end

local function show(text, got, want)
    return ("%q: %s, not %s"):format(text, table.concat(got, " "), table.concat(want, " "))
end

describe("tokenizer.json", function()
    for name, cases in pairs(refs) do
        it("gives the library's ids: " .. name, function()
            local v = of(name)
            for _, case in ipairs(cases) do
                local ids = assert(v:encode(case[1], { special = true, bos = true }))
                assert.same(case[2], ids, show(case[1], ids, case[2]))
            end
        end)
    end

    it("gives texts back", function()
        for _, name in ipairs { "gpt2", "smollm", "llama3", "spm", "gemma" } do
            local v = of(name)
            for _, case in ipairs(refs[name]) do
                local text = case[1]
                local ids = assert(v:encode(text))
                if not text:find("\u{2581}", 1, true) and not text:find("<", 1, true) then
                    assert.equal(text, (v:decode(ids)))
                end
            end
        end
    end)
end)
