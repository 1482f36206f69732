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

describe("a broken or hostile tokenizer.json", function()
    local function changed(name, change)
        local t = assert(json.decode(hf.read(("%s/tokenizers/%s.json"):format(hf.data, name))))
        change(t)
        return json.encode(t)
    end
    local function fails(pattern, name, change)
        local ok, e = pcall(vocab, changed(name, change))
        assert.is_false(ok)
        assert.matches(pattern, type(e) == "table" and e.message or tostring(e))
    end

    it("is refused with what is wrong", function()
        fails("model 'WordPiece' is not supported", "spm", function(t) t.model.type = "WordPiece" end)
        fails("normalizer 'Nmt' is not supported", "own", function(t) t.normalizer.normalizers[1].type = "Nmt" end)
        fails("pre_tokenizer 'Magic' is not supported", "own", function(t) t.pre_tokenizer.pretokenizers[1].type = "Magic" end)
        fails("behavior 'Sideways' is not known", "own", function(t) t.pre_tokenizer.pretokenizers[1].behavior = "Sideways" end)
        fails("the expression \"%(unclosed\": missing closing parenthesis", "own", function(t)
            t.pre_tokenizer.pretokenizers[1].pattern = { Regex = "(unclosed" }
        end)
        fails("an intersection of classes", "own", function(t)
            t.pre_tokenizer.pretokenizers[1].pattern = { Regex = "[a-z&&[^b]]+" }
        end)
        fails("has .W in a class", "own", function(t) t.pre_tokenizer.pretokenizers[1].pattern = { Regex = "[\\W_]+" } end)
        fails("a pattern is no text", "own", function(t) t.pre_tokenizer.pretokenizers[1].pattern = 7 end)
        fails("a compiled normalizer of 8 bytes whose trie has 4294967295", "unigram-map", function(t)
            t.normalizer.precompiled_charsmap = "/////wAAAAA="
        end)
        fails("post_processor's token \"<none>\" has no id", "spm", function(t)
            t.post_processor.single[1].SpecialToken.id = "<none>"
        end)
        fails("puts 2 tokens before", "spm", function(t) table.insert(t.post_processor.single, 1, t.post_processor.single[1]) end)
        fails("model.vocab%[3%] is no token with its score", "unigram", function(t) t.model.vocab[4] = "x" end)
        fails("model.merges%[1%] is not two tokens", "spm", function(t) t.model.merges[2] = { "a" } end)
        fails("tokens that do not exist", "spm", function(t) t.model.merges[2] = { "a", "never seen" } end)
        fails("added_tokens%[0%] is no token", "spm", function(t) t.added_tokens[1] = 5 end)
        fails("continuing_subword_prefix", "spm", function(t) t.model.continuing_subword_prefix = "##" end)
        fails("too many steps", "own", function(t)
            for i = 1, 40 do t.normalizer.normalizers[i] = { type = "NFC" } end
        end)
    end)

    it("whose compiled rules point anywhere is read without harm", function()
        local t = changed("unigram-map", function() end)
        local map = t:match('"precompiled_charsmap":"([^"]+)"')
        local seed = 1
        for _ = 1, 60 do
            seed = (seed * 1103515245 + 12345) % 2147483648
            local at = seed % (#map - 24) + 12
            local ok, v = pcall(vocab, (t:gsub(map, function() return map:sub(1, at) .. "w8Q/" .. map:sub(at + 5) end, 1)))
            if ok then
                for _, case in ipairs(refs["unigram-map"]) do v:encode(case[1], { special = true }) end
            end
        end
    end)

    it("whose expression runs away refuses the text", function()
        local v = vocab(changed("own", function(t)
            t.pre_tokenizer.pretokenizers[1].pattern = { Regex = "(a|aa)+$(?<=b)" }
        end))
        local ids, err, code = v:encode(("a"):rep(200) .. "c")
        assert.is_nil(ids)
        assert.matches("splitting the text: match limit exceeded", err)
        assert.equal("limit", code)
        assert.is_truthy(v:encode "short")
    end)

    it("takes time in proportion to a text without words", function()
        for _, name in ipairs { "spm", "unigram", "own" } do
            local v = of(name)
            local function seconds(n)
                local begin = os.clock()
                assert(v:encode(("a"):rep(n)))
                return os.clock() - begin
            end
            local small, large = seconds(20000), seconds(200000)
            assert.is_true(large < 100 * small + 2, ("%s: %g s, then %g s"):format(name, small, large))
        end
    end)
end)
