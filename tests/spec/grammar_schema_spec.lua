-- JSON schemas: against an independent validator's judgement (tests/data/grammar/schemas.jsonl, made by
-- scripts/gen_grammar_ref.py), and the cases that are hard.

local grammar = require "llmrun.grammar"
local json = require "llmrun.json"
local vocab = dofile "tests/spec/grammar_support.lua" ()

-- Whether the grammar matches the text, byte by byte; and how many bytes were taken.
local function matches(g, text)
    local m = assert(g:matcher(vocab))
    for i = 1, #text do
        if not m:accept_text(text:sub(i, i)) then return false, i - 1 end
    end
    return m:can_end(), #text
end

local function compile(schema, opts)
    local o = { json = schema }
    for k, v in pairs(opts or {}) do o[k] = v end
    return grammar.compile(o)
end

-- Checks texts that must match and texts that must not.
local function check(schema, yes, no, opts)
    local g = assert(compile(schema, opts))
    for _, s in ipairs(yes) do
        local ok, at = matches(g, s)
        assert.is_true(ok, ("%s should allow %s, stopped behind byte %d"):format(schema, s, at))
    end
    for _, s in ipairs(no) do assert.is_false((matches(g, s)), ("%s should not allow %s"):format(schema, s)) end
end

local function refused(schema, text, code)
    local g, err, c = compile(schema)
    assert.is_nil(g, schema .. " should be refused")
    assert.is_truthy(err:find(text, 1, true), err)
    assert.equal(code, c)
end

describe("JSON schemas judged by another validator", function()
    local n = 0
    for line in io.lines "tests/data/grammar/schemas.jsonl" do
        local row = assert(json.decode(line))
        n = n + 1
        it(row.schema:sub(1, 100), function()
            local g = assert(compile(row.schema))
            for _, t in ipairs(row.tests) do
                local any = false
                for _, text in ipairs(t.texts) do any = any or matches(g, text) end
                assert.equal(t.valid, any, t.texts[1])
            end
        end)
    end
    it("were many", function() assert.is_true(n > 60) end)
end)

describe("strings, enum and const", function()
    it("count characters behind their escapes", function()
        check([[{"type":"string","maxLength":4}]],
            { [["a\nb"]], [["\"q\""]], [["\u00e9\u00e9\u00e9\u00e9"]], [["\ud83d\ude00abc"]], [["éüñß"]], [[""]] },
            { [["abcde"]], '"a\tb"', '"a\nb"', [["\x41"]], [["\u12"]], [["\ud83d"]], [["\ude00"]], '"\xC3"', '"\xFF"' })
    end)
    it("are spelt as JSON spells them", function()
        check([==[{"enum":["a\"b","c\\d","/e/","\u00fc","tab\there",""]}]==],
            { [["a\"b"]], [["c\\d"]], '"/e/"', [["tab\there"]], '""', '"ü"' },
            { [["a"b"]], [["c\d"]], '"x"', '"tab\there"' })
        check([==[{"const":{"b":[1,null,true],"a":"\u0001"}}]==], { [[{"b":[1,null,true],"a":"\u0001"}]] }, { "{}" })
    end)
    it("have long bounds", function()
        local g = assert(compile [[{"type":"string","minLength":3000,"maxLength":100000}]])
        assert.is_false((matches(g, '"' .. ("x"):rep(2999) .. '"')))
        assert.is_true((matches(g, '"' .. ("x"):rep(3000) .. '"')))
        assert.is_true((matches(g, '"' .. ("é"):rep(5000) .. '"')))
    end)
end)

describe("pattern", function()
    it("is found anywhere unless anchored", function()
        check([[{"type":"string","pattern":"\\S"}]], { '"x"', '" x "' }, { '""', '"  "' })
        check([[{"type":"string","pattern":"^ab"}]], { '"abz"' }, { '"zab"' })
        check([[{"type":"string","pattern":"yz$"}]], { '"xyz"' }, { '"yzx"' })
    end)
    it("works inside of items and properties", function()
        check([[{"type":"object","properties":{"x":{"type":"array","items":
            {"type":"string","pattern":"^(\\d+|id:[A-Z_-]+)$"}}}}]],
            { '{"x":["12","id:A_-"]}', '{"x":[]}', "{}" }, { '{"x":["a"]}', '{"x":["id:"]}' })
    end)
    it("is spelt as a JSON string", function()
        check([[{"type":"string","pattern":"^https?:\\/\\/[^\\/\\s]+\\/?$"}]],
            { '"http://a.b/"', '"https://x"', [["http:\/\/a"]] }, { '"http:/a"', '"http://a/b"' })
        check([[{"type":"string","pattern":"^[^\"]+$"}]], { '"ab"' }, { [["a\"b"]], '""' })
        check([[{"type":"string","pattern":"^\".*\"$"}]], { [["\"q\""]] }, { '"q"' })
        check([[{"type":"string","pattern":"^[\u00e0-\u00ff]{2}$"}]], { '"éè"', [["\u00e9é"]] }, { '"e"', '"éèé"' })
        check([[{"type":"string","pattern":"^.$"}]], { '"\u{1F600}"', [["\ud83d\ude00"]], '"a"' }, { '"ab"', [["\n"]] })
    end)
    it("is refused where it cannot be enforced, or right", function()
        refused([[{"type":"array","items":{"pattern":"^(?:a|b)\\b"}}]], "#/items/pattern: regex, byte 9: \\b",
            "unsupported")
        refused([[{"pattern":"(a"}]], "#/pattern: regex, byte 1: a ( without its )", "format")
        check([[{"type":"string","pattern":"^(?i:x)$"}]], { '"x"', '"X"' }, { '"y"' })
        check([[{"type":"string","pattern":"^(?=.*[A-Z])(?=.*\\d).{4,}$"}]], { '"abC1"' }, { '"abc1"', '"A1b"' })
    end)
    it("goes with lengths and other patterns", function()
        check([[{"type":"string","pattern":"^[a-z]+$","maxLength":3,"minLength":2}]], { '"ab"' },
            { '"a"', '"abcd"', '"a1"' })
    end)
end)

describe("objects", function()
    it("mix required and optional properties", function()
        check([[{"type":"object","properties":{"r":{"type":"integer"},"o1":{"type":"integer"},"o2":{"type":"integer"}},
            "required":["r"]}]],
            { '{"r":1}', '{"r":1,"o1":2}', '{"r":1,"o2":3}', '{"r":1,"o1":2,"o2":3}', '{"r": 1, "other": [{}]}' },
            { "{}", '{"r":1,}', '{,"r":1}', '{"o1":2}', '{"r":1,"r":2}', '{"r":1,"o2":3,"o1":2}' })
    end)
    it("close and open for other names", function()
        check([[{"type":"object","additionalProperties":false}]], { "{}" }, { '{"a":1}' })
        check([[{"type":"object","properties":{"a":{"type":"string"}},"additionalProperties":{"type":"integer"}}]],
            { '{"a":"x","ab":1}', '{"ab":1,"b":2}', "{}" }, { '{"a":1}', '{"b":"x"}', [[{"\u0061":1}]] })
        check([[{"type":"object"}]], { '{"a":1,"b":{"a":1,"c":1}}' },
            { '{"a":1,"a":1}', [[{"a":1,"\u0061":2}]], '{"x":{"a":1,"b":2,"a":3}}' })
        check([[{"type":"object","propertyNames":{"enum":["a","b"]},"minProperties":2}]], { '{"a":1,"b":2}' },
            { '{"a":1}', '{"a":1,"a":1}', '{"a":1,"b":1,"c":1}' })
        refused([[{"type":"object","propertyNames":{"enum":["a","b"]},"minProperties":3}]], "no finite text", "invalid")
        check([[{"type":"object","minProperties":3}]], { '{"a":1,"b":1,"c":1}' }, { '{"a":1,"b":1}', '{"a":1,"b":1,"a":1}' })
    end)
    it("have names of any kind", function()
        check([[{"type":"object","properties":{"a\"b":{"type":"integer"},"ü":{"type":"integer"},"":{"type":"integer"}},
            "additionalProperties":false}]], { [[{"a\"b":1,"ü":2,"":3}]], '{"":1}' }, { '{"":1,"":1}', '{"a"b":1}' })
    end)
    it("with many optional properties", function()
        local props = {}
        for i = 1, 120 do props[i] = ('"p%d":{"type":"integer"}'):format(i) end
        local g = assert(compile('{"type":"object","additionalProperties":false,"properties":{' ..
            table.concat(props, ",") .. "}}"))
        assert.is_true((matches(g, '{"p3":1,"p70":2,"p120":3}')))
        assert.is_false((matches(g, '{"p70":1,"p3":2}')))
        assert.is_true((matches(g, "{}")))
    end)
end)

describe("arrays", function()
    it("have bounds", function()
        check([[{"type":"array","maxItems":0}]], { "[]" }, { "[1]" })
        check([[{"type":"array","minItems":2}]], { "[1,2]", "[1, 2, 3]" }, { "[]", "[1]" })
        check([[{"type":"array","prefixItems":[{"type":"integer"}],"items":false}]], { "[]", "[1]" },
            { "[1,2]", '["a"]' })
        local g = assert(compile [[{"type":"array","items":{"type":"integer"},"minItems":500,"maxItems":2000}]])
        assert.is_false((matches(g, "[" .. ("1,"):rep(498) .. "1]")))
        assert.is_true((matches(g, "[" .. ("1,"):rep(499) .. "1]")))
        assert.is_false((matches(g, "[" .. ("1,"):rep(2000) .. "1]")))
    end)
    it("without repetitions", function()
        check([[{"type":"array","items":{"type":"string"},"uniqueItems":true}]],
            { "[]", '["a"]', '["a", "b"]', [==[["a","aa","","b\\"]]==] },
            { '["a","a"]', '["a","b", "a"]', [==[["a","\u0061"]]==], '["",""]', [==[["\n","\u000a"]]==] })
        check([[{"type":"array","uniqueItems":true}]],
            { '[1,2,[1],[2],[1,2],{},{"a":1},{"a":2}]', '[true,1,"1",null,"true"]', "[[1,1],[1]]" },
            { "[1,1]", "[1,1.0]", "[10,1e1]", "[[1],[ 1]]", "[null,2,null]", '[{"a":1,"b":2},{"b":2,"a":1}]',
                '[[{"x":[1]}],[{"x":[1.0]}]]' })
        check([[{"type":"array","items":{"enum":["a","b","c","d","e","f","g","h","i"]},"uniqueItems":true,
            "minItems":2}]], { '["a","i"]', '["b","c","d"]' }, { '["a"]', '["b","a"]', '["a","a"]' })
        check([[{"type":"array","prefixItems":[{"type":"integer"}],"items":{"type":"integer"},"uniqueItems":true,
            "contains":{"const":3}}]], { "[3]", "[1,3,2]" }, { "[3,3]", "[1,1,3]", "[1,2]" })
    end)
    it("of anything", function()
        check("{}", { "[1,[2,{}]]", "null", "-1.5e3", '"x"' }, { "[1,]", "[,1]", "01", "nul" })
    end)
end)

describe("references", function()
    it("recurse", function()
        check([[{"$ref":"#/$defs/n","$defs":{"n":{"type":"object","properties":{"v":{"type":"integer"},
            "next":{"$ref":"#/$defs/n"}},"required":["v"],"additionalProperties":false}}}]],
            { '{"v":1}', '{"v":1,"next":{"v":2,"next":{"v":3}}}' }, { '{"next":{"v":1}}' })
    end)
    it("without an end are refused", function()
        refused([[{"$ref":"#/$defs/a","$defs":{"a":{"type":"object","properties":{"n":{"$ref":"#/$defs/a"}},
            "required":["n"]}}}]], "no finite text matches", "invalid")
        refused([[{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}]],
            "refers to itself", "invalid")
        refused([[{"$ref":"#/$defs/a","$defs":{"a":{"anyOf":[{"$ref":"#"},{"$ref":"#/$defs/a"}]}}}]],
            "refers to itself", "invalid")
    end)
    it("lead somewhere", function()
        refused([[{"$ref":"#/$defs/x"}]], "#/$ref: '#/$defs/x' does not exist", "format")
        refused([[{"items":{"$ref":"https://example.org/s.json"}}]], "#/items/$ref: 'https://example.org/s.json'",
            "unsupported")
        check([[{"$defs":{"a/b~c%":{"type":"integer"}},"$ref":"#/$defs/a~1b~0c%25"}]], { "1" }, { '"1"' })
    end)
end)

describe("white space", function()
    local schema = [[{"type":"object","properties":{"a":{"type":"array","items":{"type":"integer"}},
        "b":{"type":"integer"}},"required":["a","b"],"additionalProperties":false}]]
    it("is one space behind : and , or none", function()
        check(schema, { '{"a":[1,2],"b":3}', '{"a": [1, 2], "b": 3}' },
            { '{ "a":[],"b":1}', '{"a" :[],"b":1}', '{"a":  [],"b":1}', '{"a":[],"b":1 }', '{"a":[],\n"b":1}',
                ' {"a":[],"b":1}' })
    end)
    it("may be none, or pretty", function()
        check(schema, { '{"a":[1,2],"b":3}' }, { '{"a": [1,2],"b":3}' }, { whitespace = "none" })
        check(schema, { '{\n  "a": [\n    1,\n    2\n  ],\n  "b": 3\n}', '{"a":[1],"b":2}' }, { '{\n\n"a":[],"b":1}' },
            { whitespace = "pretty" })
    end)
end)

describe("schemas that cannot be honoured", function()
    it("are refused with their place", function()
        refused([[{"type":"object","minLenght":3}]], "#: unknown word 'minLenght'; 'minLength' is meant", "format")
        refused([[{"properties":{"a":{"type":"strin"}}}]], "#/properties/a/type: 'strin' is no type", "format")
        refused([[{"items":{"minimum":"3"}}]], "#/items/minimum: a number expected", "format")
        refused([[{"minLength":-1}]], "#/minLength: a whole number of at least 0 expected", "format")
        refused([[{"maxLength":2000000}]], "#/maxLength: 2000000 is over the limit", "limit")
        refused([[{"oneOf":[{"required":["a"],"items":{"type":"integer"}},{"items":{"type":"integer"}}]}]],
            "#/oneOf: a value may match both 0 and 1", "unsupported")
        refused([[{"type":"array","unevaluatedItems":false,"contains":{}}]], "#/unevaluatedItems: beside contains",
            "unsupported")
        refused([[{"const":1,"type":"string"}]], "no finite text matches", "invalid")
        refused("{", "json schema:", "format")
        refused("3", "json schema: an object or a boolean expected", "format")
    end)
    it("may be loosened by the caller", function()
        check([[{"type":"array","uniqueItems":true}]], { "[1,1]" }, {}, { ignore = { "uniqueItems" } })
        check([[{"oneOf":[{"items":{"type":"integer"}},{"items":{"type":"integer"},"maxItems":2}],"type":"array"}]],
            { "[1]" }, {}, { one_of = "any" })
    end)
end)

describe("hostile schemas", function()
    local patience = os.getenv "LLMRUN_TEST_SANITIZE" and 100 or 10
    local function quick(schema, opts)
        local start = os.clock()
        local g, err, code = compile(schema, opts)
        assert.is_true(os.clock() - start < patience, "took too long")
        return g, err, code
    end
    it("of two megabytes", function()
        local parts = {}
        for i = 1, 30000 do parts[i] = ('"property_number_%d":{"type":"string","maxLength":%d}'):format(i, i % 90) end
        local text = '{"type":"object","properties":{' .. table.concat(parts, ",") .. "}}"
        local g, err, code = quick(text)
        assert.is_true(g ~= nil or code == "limit", err)
    end)
    it("nested deeply", function()
        local _, err, code = quick(('{"items":'):rep(400) .. "{}" .. ("}"):rep(400))
        assert.equal("limit", code, err)
        assert.is_true(#err < 500)
        local g
        g, err = quick(('{"not":'):rep(300) .. "{}" .. ("}"):rep(300))
        assert.is_true(g ~= nil, err)
    end)
    it("with many combinations", function()
        local any = '{"anyOf":[' .. ('{"type":"integer"},'):rep(9) .. '{"type":"string"}]}'
        local _, err, code = quick('{"allOf":[' .. (any .. ","):rep(9) .. any .. "]}")
        assert.equal("limit", code, err)
    end)
    it("of 100000 choices", function()
        local list = {}
        for i = 1, 100000 do list[i] = "choice number " .. i * 7919 end
        local g = assert(quick({ enum = list }))
        assert.is_true((matches(g, '"choice number 7919"')))
        assert.is_false((matches(g, '"choice number 7918"')))
    end)
end)
