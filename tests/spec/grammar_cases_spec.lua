-- Constraints where others have failed: escapes, patterns, objects and arrays, grammars that run away, hostile ones. Each
-- text is walked byte by byte, and token by token through the masks of real vocabularies, as these tokenize it.

local core = require "llmrun.core"
local grammar = require "llmrun.grammar"
local json = require "llmrun.json"
local make_vocab = dofile "tests/spec/grammar_support.lua"

local sanitized = os.getenv "LLMRUN_TEST_SANITIZE" ~= nil
local home = os.getenv "LLMRUN_MODELS" or (os.getenv "HOME" or "") .. "/.cache/llmrun"
local bytes = make_vocab()
local vocabs = {}
for i, name in ipairs { "SmolLM2-135M-Instruct.Q4_1.gguf", "qwen2.5-0.5b.gguf" } do
    local file = (i == 1 or not sanitized) and core.gguf_open(home .. "/" .. name)
    vocabs[#vocabs + 1] = file and file:vocab() or nil
end

local walk = dofile "tests/spec/grammar_walk.lua"
local by_bytes, by_tokens = walk.by_bytes, walk.by_tokens

local function check(opts, yes, no)
    local g = assert(grammar.compile(type(opts) == "string" and { json = opts } or opts))
    for wanted, list in pairs { [true] = yes, [false] = no } do
        for _, text in ipairs(list) do
            assert.equal(wanted, by_bytes(g, text), ("%s: %q"):format(opts.json or opts, text))
            for _, v in ipairs(vocabs) do
                if utf8.len(text) then assert.equal(wanted, by_tokens(g, v, text), ("tokens of %q"):format(text)) end
            end
        end
    end
    return g
end

local function refused(opts, pattern, code)
    local g, err, c = grammar.compile(type(opts) == "string" and { json = opts } or opts)
    assert.is_nil(g)
    assert.equal(code, c, err)
    assert.is_truthy(err:find(pattern), err)
    assert.is_true(#err < 600)
end

it("real vocabularies are there", function() assert.is_true(#vocabs == (sanitized and 1 or 2)) end)

describe("escapes in strings, enum and const", function()
    it("count as the characters that they are", function()
        check([[{"type":"string","maxLength":4}]],
            { [["a\nb"]], [["\"q\""]], [["\u00e9\u00e9\u00e9\u00e9"]], [["\ud83d\ude00abc"]] },
            { [["abcde"]], '"a\tb"', '"a\nb"', [["\x41"]], [["\u12"]], [["\ud83d"]] })
    end)
    it("reach each value of an enum as JSON spells it", function()
        check([==[{"enum":["a\"b","c\\d","/e/","\u00fc","tab\there",""]}]==],
            { [["a\"b"]], [["c\\d"]], '"/e/"', '"ü"', [["tab\there"]], '""' }, { [["a"b"]], [["c\d"]] })
    end)
end)

describe("pattern", function()
    it("is found anywhere, or where its anchors say", function()
        check([[{"type":"string","pattern":"\\S"}]], { '"x"', '" x "' }, { '""', '"  "' })
        check([[{"type":"string","pattern":"^ab"}]], { '"abz"' }, { '"zab"' })
        check([[{"type":"string","pattern":"yz$"}]], { '"xyz"', '"yz"' }, { '"yzx"' })
    end)
    it("holds in items of an array in a property", function()
        check([[{"type":"object","properties":{"list":{"type":"array","items":{"type":"string",
            "pattern":"^(\\d+|id:[A-Z_-]+)$"}}},"required":["list"],"additionalProperties":false}]],
            { '{"list":["12","id:A_-Z"]}', '{"list": []}' }, { '{"list":["id:"]}', '{"list":["12a"]}', '{"list":[""]}' })
    end)
    it("knows ECMAScript's escapes, and JSON's come on top", function()
        check([[{"type":"string","pattern":"^https?:\\/\\/[^\\/\\s]+\\/?$"}]],
            { '"http://a.b/"', '"https://x"' }, { '"http:/a"', '"http://a/b"', '"ftp://a"' })
        check([[{"type":"string","pattern":"^[^\"]+$"}]], { '"ab"' }, { [["a\"b"]], '""' })
        check([[{"type":"string","pattern":"^\".*\"$"}]], { [["\"q\""]] }, { '"q"', '"\\"q"' })
        check([[{"type":"string","pattern":"^[\u00e0-\u00ff]{2}$"}]], { '"éè"' }, { '"e"', '"éèé"', '"é"' })
        check([[{"type":"string","pattern":"^.$"}]], { '"\u{1F600}"', [["\ud83d\ude00"]], '"a"' }, { '"ab"', '""' })
    end)
    it("is refused with its place, or right", function()
        refused([[{"pattern":"^(?:a|b)\\b"}]], "^#/pattern: .*byte 9: \\b", "unsupported")
        check([[{"type":"string","pattern":"^(?i:x)$"}]], { '"x"', '"X"' }, { '"y"', '"xx"' })
    end)
end)

describe("objects and arrays", function()
    it("mix required and optional properties", function()
        check([[{"type":"object","properties":{"r":{"type":"integer"},"o1":{"type":"integer"},"o2":{"type":"integer"}},
            "required":["r"]}]],
            { '{"r":1}', '{"r":1,"o1":2}', '{"r":1,"o2":3}', '{"r":1,"o1":2,"o2":3}' },
            { "{}", '{"r":1,}', '{,"r":1}', '{"o1":2}', '{"r":1,"r":1}', '{"r":1,"x":1,"x":2}' })
    end)
    it("hold additionalProperties to what it says", function()
        check([[{"type":"object","additionalProperties":false}]], { "{}" }, { '{"a":1}', "{ }" })
        check([[{"properties":{"a":{"type":"string"}},"additionalProperties":{"type":"integer"},"type":"object"}]],
            { '{"a":"x","ab":1}', '{"ab":1}' }, { '{"a":1}', '{"b":"x"}', '{"b":1,"b":2}' })
    end)
    it("have names of any kind", function()
        check([[{"type":"object","properties":{"a\"b":{"type":"integer"},"ü":{"type":"integer"},"":{"type":"integer"}},
            "additionalProperties":false,"required":["ü"]}]], { [[{"a\"b":1,"ü":2,"":3}]], '{"ü":1}' }, { '{"":1}', '{"a"b":1}' })
    end)
    it("have bounds on arrays", function()
        check([[{"type":"array","maxItems":0}]], { "[]" }, { "[1]", "[ ]" })
        check([[{"type":"array","minItems":2}]], { "[1,2]", '[[],"x",null]' }, { "[]", "[1]", "[1,]" })
        check([[{"type":"array","prefixItems":[{"type":"integer"},{"type":"string"}],"items":false}]],
            { "[]", "[1]", '[1,"a"]' }, { '["a"]', '[1,"a",2]' })
        check("{}", { "[1,[2,{}]]", '{"a":{"b":[true,false,null]}}', "-1.5e3", '"x"' }, { "[1,]", "01", "nul", "{1:2}" })
    end)
end)

describe("values in free text", function()
    local opts = { tagged = { open = "<call>\n", close = "\n</call>", json = [[{"type":"object","additionalProperties":
        {"type":"array","items":{"type":"string"},"uniqueItems":true}}]] } }
    it("do not repeat names and items, whatever the text around them holds", function()
        check(opts, { 'so "that [{ is, \\ it\n<call>\n{"a":["x","y"],"b":["x"]}\n</call> "[{<call>\n{"a":[]}\n</call>', "" },
            { '" [<call>\n{"a":[],"a":[]}\n</call>', '"<call>\n{"a":["x","x"]}\n</call>',
                '<call>\n{}\n</call> "{ <call>\n{"b":["<call>","<call>"]}\n</call>' })
    end)
end)

describe("grammars that run away", function()
    it("have their states merged", function()
        local g = assert(grammar.compile { grammar = 'root ::= ("k"? "k"? "k"? "k"? "k"? "k"? [0-9])+' })
        local m = assert(g:matcher(bytes))
        local start = os.clock()
        for _ = 1, 100 do
            for c in ("k1kk2kkk3"):gmatch "." do assert(m:accept_text(c)) end
        end
        local us = (os.clock() - start) * 1e6 / 900
        assert.is_true(us < (sanitized and 2000 or 200), us .. " us a byte")
    end)
    it("recurse to the left, are ambiguous, or empty", function()
        check({ grammar = 'root ::= root "+" "1" | "1"' }, { "1", "1+1+1" }, { "+1", "1+", "" })
        check({ grammar = 'root ::= ("" | "a")*' }, { "", "aaa" }, { "b", "ab" })
        check({ grammar = 'root ::= e\ne ::= e e | "x"' }, { "x", ("x"):rep(60) }, { "", "xy" })
        check({ grammar = 'root ::= a\na ::= b "1" | "x"\nb ::= a "2" | "y"' }, { "x21", "y1", "y121" }, { "x1", "y" })
    end)
    it("match by bytes, whatever the pieces", function()
        local v = make_vocab { "\xF0", "\x9F\x98", "\x80" }
        local g = assert(grammar.compile { grammar = [[root ::= [\U0001F600-\U0001F64F]+]] })
        local m = assert(g:matcher(v))
        for _, id in ipairs { 256, 257, 258, 256, 257, 0x8A } do
            assert.is_true(m:in_mask(id))
            assert.is_true(m:accept(id))
        end
        assert.is_true(m:can_end())
        assert.is_true(m:accept(256))
        assert.is_false(m:in_mask(258))
        assert.is_false(m:can_end())
    end)
    it("leave no room for blanks", function() -- whoever always takes white space where it may stand still comes to the end
        local text = [[{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"array","items":{"type":"boolean"},
            "minItems":2,"maxItems":2}},"required":["a","b"],"additionalProperties":false}]]
        for _, space in ipairs { "line", "none" } do
            local m = assert(assert(grammar.compile { json = text, whitespace = space }):matcher(bytes))
            local out = {}
            while not m:done() do
                local pick
                for _, c in ipairs { " ", "\n", "\t", "}", "]", ",", "t", "1" } do
                    if not pick and m:in_mask(c:byte()) then pick = c:byte() end
                end
                pick = pick or m:allowed()[1]
                assert(m:accept(pick))
                out[#out + 1] = string.char(pick)
                assert.is_true(#out < 36 + 64)
                if m:can_end() then break end
            end
            assert.is_table(json.decode(table.concat(out)))
        end
    end)
end)

describe("hostile input is an error, or works, in time:", function()
    local patience = sanitized and 100 or 10
    local function quick(opts)
        local start, before = os.clock(), collectgarbage "count"
        local g, err, code = grammar.compile(opts)
        assert.is_true(os.clock() - start < patience, "took too long")
        if not g then assert.is_truthy(code == "limit" or code == "unsupported" or code == "invalid" or code == "format", err) end
        assert.is_true(collectgarbage "count" - before < 2e6)
        return g, err, code
    end
    it("regular expressions nested catastrophically", function()
        for _, p in ipairs { "(a+)+$", "((a*)*)*b", "(a|aa)+c", "(x+x+)+y", "(?:a?){40}a{40}", "((((a{1,30}){1,30}){1,30}){1,30})",
            "(.*a){20}", "(a|b|ab)*c(a|b|ab)*d", ("(?:"):rep(140) .. "a" .. (")*"):rep(140), "[^a]{0,1000}b[^c]{0,1000}" } do
            local g = quick { regex = p }
            if g then
                local m = assert(g:matcher(bytes))
                local start = os.clock()
                for _ = 1, 300 do
                    if not m:accept_text "a" then break end
                end
                assert.is_true(os.clock() - start < patience, p)
            end
        end
        refused({ regex = ("("):rep(5000) }, "nested", "limit")
    end)
    it("two megabytes of schema", function()
        local parts = {}
        for i = 1, 4000 do parts[i] = ('"p%d":{"description":"%s","type":"string"}'):format(i, ("x"):rep(450)) end
        local text = '{"type":"object","additionalProperties":false,"properties":{' .. table.concat(parts, ",") .. "}}"
        assert.is_true(#text > 1.9e6)
        local g = assert(quick { json = text })
        assert.is_true(by_bytes(g, '{"p17":"a","p3999":"b"}'))
        assert.is_false(by_bytes(g, '{"p3999":"a","p17":"b"}'))
        refused([["]] .. ("x"):rep(5e6) .. [["]], "over 4 MiB", "limit")
    end)
    it("references without an end", function()
        refused([[{"$ref":"#"}]], "refers to itself", "invalid")
        refused([[{"$ref":"#/$defs/a","$defs":{"a":{"type":"array","items":{"$ref":"#/$defs/a"},"minItems":1}}}]],
            "no finite text", "invalid")
        refused([[{"$ref":"#/$defs/a","$defs":{"a":{"allOf":[{"$ref":"#/$defs/b"}]},"b":{"not":{"$ref":"#/$defs/a"}}}}]],
            "itself", "invalid")
    end)
    it("a hundred thousand choices", function()
        local list = {}
        for i = 1, 100000 do list[i] = ("choice number %d"):format(i * 7919) end
        local g = assert(quick { choices = list })
        assert.is_true(by_bytes(g, list[77777]))
        assert.is_false(by_bytes(g, "choice number 7"))
        assert.is_true(vocabs[1] == nil or by_tokens(g, vocabs[1], list[99999]))
    end)
    it("nesting without measure", function()
        quick { grammar = "root ::= " .. ("("):rep(3000) .. '"a"' .. (")"):rep(3000) }
        quick { lark = "start: " .. ("["):rep(3000) .. '"a"' .. ("]"):rep(3000) }
        quick { json = ('{"properties":{"a":'):rep(900) .. "{}" .. ("}}"):rep(900) }
        quick { json = ('{"not":'):rep(450) .. '{"type":"string"}' .. ("}"):rep(450) }
        local g = assert(quick { json = "{}" })
        local m = assert(g:matcher(bytes)) -- deeper than is followed: refused there, and the matcher stands
        local depth = 0
        while m:accept_text "[" do depth = depth + 1 end
        assert.is_true(depth > 100 and depth < 2000, depth)
        assert.is_true(m:accept_text(("]"):rep(depth)))
        assert.is_true(m:can_end())
    end)
    it("alternatives by the thousand, oneOf over oneOf", function()
        local list = {}
        for i = 1, 60 do list[i] = ('{"type":"object","properties":{"k%d":{"oneOf":[{"minLength":%d},{"maxLength":%d}]}}}')
            :format(i, i, i + 3) end
        quick { json = '{"oneOf":[' .. table.concat(list, ",") .. "]}" }
        quick { json = '{"not":{"not":{"oneOf":[' .. table.concat(list, ",") .. "]}}}" }
        quick { json = '{"if":{"oneOf":[{"required":["a"]},{"required":["b"]}]},"then":{"not":{"required":["c"]}},' ..
            '"else":{"maxProperties":1}}' }
    end)
    it("arrays without repetitions that grow", function()
        local m = assert(assert(quick { json = [[{"type":"array","items":{"type":"string"},"uniqueItems":true}]] }):matcher(bytes))
        local start = os.clock()
        assert(m:accept_text "[")
        for i = 1, 300 do
            assert(m:accept_text((i > 1 and "," or "") .. '"item '))
            m:allowed()
            assert(m:accept_text(i .. '"'))
        end
        assert.is_nil((m:accept_text ',"item 7"'))
        assert.is_true(os.clock() - start < patience)
    end)
end)
