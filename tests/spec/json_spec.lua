-- JSON: exact round trips, what is refused, what bounds there are.
local json = require "llmrun.json"

local function refused(text, pattern, opts)
    local v, err = json.decode(text, opts)
    assert.is_nil(v)
    assert.matches(pattern, err, 1, true)
end

local function unwritable(value, pattern)
    local text, err, code = json.encode(value)
    assert.is_nil(text)
    assert.matches(pattern, err, 1, true)
    assert.equal("invalid", code)
end

describe("decode and encode", function()
    it("keep arrays and objects apart, also empty ones", function()
        for _, text in ipairs { "[[],{}]", "{\"a\":[]}", "[]", "{}", "[null]", "[1,null,3]", "[[[]]]" } do
            assert.equal(text, json.encode(json.decode(text)))
        end
        local t = json.decode "{\"a\":[]}"
        t.a[#t.a + 1] = "x"
        assert.equal("{\"a\":[\"x\"]}", json.encode(t))
        assert.is_true(json.is_array(json.decode "[]"))
        assert.is_true(json.is_object(json.decode "{}"))
        assert.is_false(json.is_array {})
        assert.equal("{}", json.encode {})
        assert.equal("[]", json.encode(json.array()))
        assert.equal(3, #json.decode "[null,null,null]")
    end)

    it("keep integers of 64 bits and floats", function()
        for _, text in ipairs {
            "9007199254740993", "-9223372036854775808", "9223372036854775807", "1686041011364000000", "0.1", "1.0", "-0.0", "0", "-1", "0.5", "1e+300", "1.7976931348623157e+308",
        } do
            assert.equal(text, json.encode(json.decode(text)))
        end
        assert.equal(9007199254740993, json.decode "9007199254740993")
        assert.equal("integer", math.type(json.decode "-9223372036854775808"))
        assert.equal(1e-7, json.decode "1e-7")
        assert.equal(1e-7, json.decode(json.encode(1e-7)))
        assert.equal(18446744073709551615.0, json.decode "18446744073709551615")
        assert.equal("float", math.type(json.decode "18446744073709551615"))
        assert.equal(json.decode "18446744073709551615", json.decode(json.encode(json.decode "18446744073709551615")))
        assert.equal(5e-324, json.decode(json.encode(5e-324)))
        assert.equal("float", math.type(json.decode "1E2"))
        refused("1e400", "number out of range at byte 1")
        refused("-1e400", "number out of range")
        refused(("9"):rep(1000000), "number out of range")
    end)

    it("read strings as they were written", function()
        assert.equal("\0", json.decode "\"\\u0000\"")
        assert.equal("a\0b", json.decode "\"a\\u0000b\"")
        assert.equal("/", json.decode "\"\\/\"")
        assert.equal("\u{1F600}", json.decode "\"\\ud83d\\ude00\"")
        assert.equal("\"\\\b\f\n\r\t\u{e9}", json.decode [["\"\\\b\f\n\r\t\u00e9"]])
        assert.equal([["\"\\\b\f\n\r\t\u0000\u001f]] .. "\u{e9}\"", json.encode "\"\\\b\f\n\r\t\0\x1f\u{e9}")
        for _, s in ipairs { "", "a", "\0", "\u{1F600}", ("x"):rep(100000), "\x7f", "\u{2028}" } do
            assert.equal(s, json.decode(json.encode(s)))
        end
    end)

    it("keep the order of keys if asked to", function()
        local text = [[{"z":1,"a":{"y":[],"b":2},"m":null,"__proto__":3}]]
        local v = json.decode(text, { ordered = true })
        assert.equal(text, json.encode(v))
        assert.same({ "z", "a", "m", "__proto__" }, json.keys(v))
        v.new, v.z = true, nil
        assert.equal([[{"a":{"y":[],"b":2},"m":null,"__proto__":3,"new":true}]], json.encode(v))
        assert.equal([[{"__proto__":3,"a":{"b":2,"y":[]},"m":null,"z":1}]], json.encode(json.decode(text)))
        assert.equal([[{"b":1,"a":2}]], json.encode(json.object({ a = 2, b = 1 }, { "b", "a" })))
        local twice = json.decode([[{"a":1,"b":2,"a":3}]], { ordered = true })
        assert.equal([[{"a":3,"b":2}]], json.encode(twice))
        assert.equal(3, json.decode([[{"a":1,"a":3}]]).a)
    end)

    it("go over blanks between tokens only", function()
        assert.equal("[1,{\"a\":true}]", json.encode(json.decode " \t\r\n[ 1 , { \"a\" : true } ]\n"))
        refused("\u{feff}1", "unexpected text")
        refused("\v1", "unexpected text")
    end)
end)

describe("decode refuses", function()
    it("what is no JSON", function()
        for text, what in pairs {
            [""] = "too soon", ["{"] = "too soon", ["["] = "too soon", ["[1"] = "too soon",
            ["[1,]"] = "unexpected text",
            ["{\"a\"}"] = "':' expected", ["{\"a\":1,}"] = "a key expected", ["{a:1}"] = "a key expected",
            ["{} x"] = "text behind the value at byte 4", ["01"] = "leading zero", ["+1"] = "unexpected text",
            [".5"] = "unexpected text", ["1."] = "bad number", ["1e"] = "bad number", ["-"] = "unexpected text",
            ["nul"] = "unexpected text", ["NaN"] = "unexpected text", ["Infinity"] = "unexpected text",
            ["\"\\x41\""] = "bad escape", ["\"\\u12\""] = "bad escape", ["\"a"] = "too soon", ["\"\\"] = "bad escape",
            ["'a'"] = "unexpected text", ["[1 2]"] = "',' or ']' expected at byte 4",
            ["\"a\nb\""] = "control character",
            ["\"a\tb\""] = "control character", ["[1]]"] = "text behind the value",
        } do refused(text, what) end
    end)

    it("half surrogate pairs and bytes that are not UTF-8", function()
        for _, s in ipairs { [["a\ud83d b"]], [["\ude00"]], [["\ud83d"]], [["\ud83d\u0041"]], [["\ud83d\ud83d"]] } do
            refused(s, "lone surrogate")
        end
        for _, s in ipairs {
            "\xff", "a\xffb", "\xe6\xad", "\xf0\x9f\x98", "\xc0\x80", "\xed\xa0\x80", "\xf5\x80\x80\x80", "\xc1\xbf", "\xf4\x90\x80\x80",
            "\x80",
        } do
            refused("\"" .. s .. "\"", "not UTF-8")
        end
    end)

    it("what would take too much", function()
        refused(("["):rep(200000) .. ("]"):rep(200000), "nested too deeply")
        refused(("{\"a\":"):rep(200000), "nested too deeply")
        assert.is_table(json.decode(("["):rep(512) .. ("]"):rep(512)))
        refused(("["):rep(513) .. ("]"):rep(513), "nested too deeply")
        refused(("["):rep(4) .. ("]"):rep(4), "nested too deeply", { max_depth = 3 })
        local _, err, code = json.decode("[" .. ("[],"):rep(1000000) .. "1]")
        assert.equal("too many values", err)
        assert.equal("limit", code)
        refused("[1,2,3]", "too many values", { max_values = 3 })
        assert.is_table(json.decode("[1,2,3]", { max_values = 4 }))
    end)
end)

describe("encode refuses", function()
    it("what JSON can't hold", function()
        unwritable(0 / 0, "NaN")
        unwritable({ 1, 1 / 0 }, "infinity")
        unwritable(-1 / 0, "infinity")
        unwritable({ [1] = 1, [1000000] = 2 }, "neither a list nor an object")
        unwritable({ 1, 2, nil, 4 }, "holes")
        unwritable({ 1, a = 2 }, "neither a list nor an object (key a)")
        unwritable({ [1.5] = 1 }, "keys of an object are strings (key 1.5)")
        unwritable({ [true] = 1 }, "keys of an object are strings (key true)")
        unwritable(json.object { [1] = 2 }, "keys of an object are strings")
        unwritable(print, "a function can't be JSON")
        unwritable({ a = io.stdout }, "a userdata can't be JSON")
        unwritable("a\xff", "not UTF-8 in a string, at byte 2")
        unwritable({ ["\xff"] = 1 }, "not UTF-8")
        local circle = {}
        circle.a = circle
        unwritable(circle, "in a circle")
        assert.equal("\"a\u{FFFD}b\"", json.encode("a\xffb", { replace = true }))
        assert.equal("null", json.encode(json.null))
        assert.equal("[1]", json.encode { 1 }) -- nothing is left of the errors before
    end)

    it("to call metamethods", function()
        local t = setmetatable({ a = 1 }, { __pairs = error, __index = error, __len = error, __tostring = error })
        assert.equal("{\"a\":1}", json.encode(t))
        local proxy = setmetatable({}, { __index = function() return 1 end, __len = function() return 3 end })
        assert.equal("{}", json.encode(proxy))
    end)
end)

describe("round trips", function()
    it("of random values are exact", function()
        math.randomseed(4)
        local function value(depth)
            local k = math.random(depth > 4 and 5 or 7)
            if k == 1 then return math.random(0) end
            if k == 2 then return (math.random() - 0.5) * 10.0 ^ math.random(-300, 300) end
            if k == 3 then return math.random(2) == 1 end
            if k == 4 then return json.null end
            if k == 5 then
                local s = {}
                for i = 1, math.random(0, 6) do s[i] = utf8.char(math.random(0, 0xd7ff)) end
                return table.concat(s)
            end
            local t = k == 6 and json.array() or json.object()
            for i = 1, math.random(0, 5) do
                if k == 6 then t[i] = value(depth + 1) else t["k" .. i] = value(depth + 1) end
            end
            return t
        end
        for _ = 1, 300 do
            local text = assert(json.encode { value(0) })
            assert.equal(text, json.encode(assert(json.decode(text))))
            assert.equal(text, json.encode(assert(json.decode(text, { ordered = true }))))
        end
    end)

    it("go through chat templates with their order", function()
        local T = require "llmrun.template"
        local t = assert(T.compile "{{ tools | tojson }}")
        local tools = json.decode([=[[{"z":1,"a":[],"b":{},"n":null}]]=], { ordered = true })
        assert.equal([=[[{"z": 1, "a": [], "b": {}, "n": null}]]=], t:render { tools = tools })
    end)
end)
