-- Generating under a constraint: json, regex, choices, grammar, lua and holes of s:gen and s:stream.
local llm = require "llmrun"
local constrain = require "llmrun.constrain"
local json = require "llmrun.json"
local anything = dofile "tests/spec/constraint_support.lua"

local slow = os.getenv "LLMRUN_TEST_SANITIZE" ~= nil

local function text_of(m, o, prompt)
    local s <close> = m:session()
    s:append(prompt or "p")
    return s:gen(o)
end

--- Asserts that fn(...) raises an error of the library with that code whose message holds all those texts.
local function raises(code, texts, fn, ...)
    local ok, e = pcall(fn, ...)
    assert.is_false(ok)
    assert.equal(code, e.code, tostring(e))
    for _, t in ipairs(texts) do assert.truthy(tostring(e):find(t, 1, true), tostring(e) .. "\nlacks " .. t) end
    return e
end

local person = [[{ "type": "object", "properties": { "name": { "type": "string", "maxLength": 8 },
    "age": { "type": "integer", "minimum": 0, "maximum": 120 } }, "required": ["name", "age"],
    "additionalProperties": false }]]

describe("a constraint", function()
    it("json: the text is the schema's, and the result has its value", function()
        local m <close> = anything()
        for seed = 1, slow and 3 or 15 do
            local r = text_of(m, { json = person, seed = seed, max_tokens = 200 })
            assert.equal("stop", r.finish_reason)
            assert.equal(r.text, json.encode(r.value):gsub("([:,])", "%1") and r.text)
            assert.is_true(math.type(r.value.age) == "integer" and r.value.age >= 0 and r.value.age <= 120, r.text)
            assert.is_true(utf8.len(r.value.name) <= 8, r.text)
            assert.truthy(r.text:find('^{"name": ?".-', 1), r.text) -- the order of the text
        end
        local r = text_of(m, { json = json.decode(person), seed = 1, max_tokens = 200 })
        assert.truthy(r.text:find('^{"age"'), r.text) -- a table without an order: by name
        r = text_of(m, { json = true, seed = 4, max_tokens = 400, temperature = 0.2 })
        if r.finish_reason == "stop" then assert.is_not_nil(json.decode(r.text)) end
        assert.is_nil(text_of(m, { json = person, max_tokens = 3 }).value) -- cut short
    end)

    it("regex, choices, GBNF and Lark", function()
        local m <close> = anything()
        for seed = 1, 10 do
            local o = { seed = seed, max_tokens = 60, temperature = 2 }
            local function gen(k, v)
                o[k] = v
                local r = text_of(m, o)
                o[k] = nil
                return r.text, r.finish_reason
            end
            assert.truthy(gen("regex", "[a-f]{3}-\\d{2}"):find "^[a-f][a-f][a-f]%-%d%d$")
            local pick = gen("choices", { "abc", "abcd", "yes" })
            assert.is_true(pick == "abc" or pick == "abcd" or pick == "yes", pick)
            assert.truthy(gen("grammar", 'root ::= "a" item{2}\nitem ::= "<" [xyz] ">"'):find "^a<[xyz]><[xyz]>$")
            assert.truthy(gen("grammar", 'start: "a" item ~ 2\nitem: "<" /[xyz]/ ">"'):find "^a<[xyz]><[xyz]>$")
            assert.truthy(gen("grammar", '%import common.INT\nstart: INT "."'):find "^%d+%.?$")
        end
    end)

    it("tagged: free text, with values of a schema between marks", function()
        local m <close> = anything({ vocab = { "<v>" } }, { ["<v>"] = 5 })
        local tagged = { open = "<v>", close = "</v>", json = { enum = { "ab", 12 } } }
        local found, free = {}, 0
        for seed = 1, 8 do
            local r = text_of(m, { tagged = tagged, seed = seed, max_tokens = 60 })
            if r.finish_reason == "stop" or r.text:find "</v>[^<]*$" then
                local rest = r.text:gsub("<v>(.-)</v>", function(v)
                    found[v] = true
                    return ""
                end)
                assert.is_nil(rest:find("<v>", 1, true), r.text)
                free = free + #rest
            end
        end
        assert.same({ ['"ab"'] = true, ["12"] = true }, found)
        assert.is_true(free > 0)
        tagged.most = 1
        assert.truthy(text_of(m, { tagged = tagged, seed = 1, max_tokens = 200 }).text:find "^.-<v>[^<]+</v>$")
        raises("format", { "tagged.close: a text expected" }, text_of, m, { tagged = { open = "x", json = true } })
        raises("format", { "tagged: #/type" }, text_of, m, { tagged = { open = "x", close = "y",
            json = { type = "z" } } })
    end)

    it("is the same whoever shares the batch, streamed, forked, and preempted", function()
        local kinds = {
            { json = person }, { regex = "([a-z]+ ){4}" }, { choices = { "abcdefgh", "abcdefxyz" } },
            { grammar = 'root ::= "(" root ")" | [a-z]{2,6}' },
            { grammar = "root ::= <w> <w> <w>", holes = { w = function(t) return { "ab" .. #t, "cd", "ef" } end } },
            { lua = function(t) return #t < 12 and { "abc", "x" .. #t, "yy" } or nil end },
        }
        local want = {}
        local m <close> = anything()
        for i, k in ipairs(kinds) do
            k.max_tokens, k.seed = 120, 7
            want[i] = text_of(m, k).text
            assert.is_true(#want[i] > 3)
        end
        local function same(i, text) assert.equal(want[i], text, "constraint " .. i) end
        llm.map({ 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6 }, function(i) same(i, text_of(m, kinds[i]).text) end)
        for i, k in ipairs(kinds) do
            local s <close> = m:session()
            s:append "p"
            local parts = {}
            for piece in s:stream(k) do
                parts[#parts + 1] = piece
                if #parts == 2 then s:fork():close() end
            end
            same(i, table.concat(parts))
            local base <close> = m:session()
            base:append "p"
            for f = 1, 2 do
                local fork <close> = base:fork()
                k.fault = { f == 1 and "preempt" or "swap", 1 }
                local r = fork:gen(k)
                same(i, r.text)
                k.fault = nil
            end
        end
        -- a pool so small that they preempt each other
        local tight <close> = anything { kv = { blocks = 40, block_size = 4, prefix_cache = false } }
        llm.map({ 1, 2, 3, 4, 5, 6, 1, 2 }, function(i) same(i, text_of(tight, kinds[i]).text) end)
        assert.is_true(tight:stats().preempted == nil or tight:stats().preempted >= 0)
    end)

    it("stands beside stop strings, log-probabilities, samplers and chats", function()
        local m <close> = anything()
        local s <close> = m:session()
        s:user "hi"
        local r = s:gen { regex = "[a-z]{30}", stop = "e", seed = 3, logprobs = 2 }
        assert.is_nil(r.text:find "e")
        assert.equal(#r.tokens, #r.logprobs)
        s:user "again"
        r = s:gen { choices = { "left", "right" }, sampler = { { "top_k", 5 }, { "temperature", 1 } } }
        assert.truthy(r.text == "left" or r.text == "right")
        assert.equal(r.text, s.messages[#s.messages].content)
        assert.equal("yes", (s:select("x", { "yes" })))
    end)
end)

describe("a constraint that can't be honoured", function()
    it("is an error of the call that names option and place", function()
        local m <close> = anything()
        local s <close> = m:session()
        s:append "p"
        local function bad(code, texts, o)
            texts[#texts + 1] = "s:gen: "
            raises(code, texts, s.gen, s, o)
            raises(code, {}, s.stream, s, o)
        end
        bad("format", { "json: #/properties/a/type", "strin" }, { json = { properties = { a = { type = "strin" } } } })
        bad("unsupported", { "json: #/properties/a/pattern" }, { json = { properties = { a = { pattern = "(?<=x)" } } } })
        bad("invalid", { "json: " }, { json = false })
        bad("invalid", { "json: " }, { json = '{"$defs":{"a":{"type":"object","required":["x"],"properties":{"x":'
            .. '{"$ref":"#/$defs/a"}}}},"$ref":"#/$defs/a"}' }) -- no base case
        bad("format", { "json: " }, { json = "{" })
        bad("format", { "json: " }, { json = { type = print } })
        bad("format", { "regex, byte 2" }, { regex = "a(" })
        bad("unsupported", { "regex" }, { regex = "(a)\\1" })
        bad("invalid", { "choices: the list is empty" }, { choices = {} })
        bad("format", { "choices: string expected at 2" }, { choices = { "a", 1 } })
        bad("format", { "grammar: ", "'foo' is not defined" }, { grammar = "root ::= foo" })
        bad("format", { "grammar: ", ":2:" }, { grammar = "start: a\na: (" })
        bad("unsupported", { "<x> is no hole" }, { grammar = "root ::= <x>" })
        bad("invalid", { "both json and regex: one is enough" }, { json = true, regex = "a" })
        bad("invalid", { "both choices and lua" }, { choices = { "a" }, lua = print })
        bad("invalid", { "holes has no effect without grammar" }, { regex = "a", holes = {} })
        bad("invalid", { "whitespace has no effect without json" }, { regex = "a", whitespace = "none" })
        bad("invalid", { "holes.x: a function expected" }, { grammar = "root ::= <x>", holes = { x = "y" } })
        assert.has_error(function() s:gen { regex = 5 } end)
        assert.equal("abc", s:gen({ choices = { "abc" } }).text) -- the session goes on
    end)

    it("is bounded: what is hostile works or is refused, in good time", function()
        local m <close> = anything()
        local many = {}
        for i = 1, slow and 5000 or 100000 do many[i] = ("choice %06d"):format(i) end
        local r = text_of(m, { choices = many, seed = 1 })
        assert.truthy(r.text:find "^choice %d%d%d%d%d%d$")
        local parts = {}
        for i = 1, slow and 500 or 30000 do
            parts[i] = ('"k%d":{"type":"string","description":"%s"}'):format(i, ("x"):rep(30))
        end
        local ok, e = pcall(text_of, m, { json = '{"type":"object","properties":{' .. table.concat(parts, ",") .. "}}",
            max_tokens = 4 })
        assert.is_true(ok or e.code == "limit", tostring(e))
        r = text_of(m, { grammar = 'root ::= root "+" "1" | "1"', max_tokens = 20 })
        assert.truthy(r.text:find "^1[+1]*$")
        r = text_of(m, { grammar = 'root ::= e\ne ::= e e | "x"', max_tokens = 20 })
        assert.truthy(r.text:find "^x+$")
        ok, e = pcall(text_of, m, { regex = ("("):rep(2000) .. "a" .. (")*"):rep(2000), max_tokens = 4 })
        assert.is_true(ok or e.code == "limit", tostring(e))
    end)

    it("keeps compiled grammars within bounds", function()
        local g = constrain.compile("regex", { regex = "abc" })
        assert.equal(g, constrain.compile("regex", { regex = "abc" }))
        assert.not_equal(g, constrain.compile("choices", { choices = { "abc" } }))
        local a = constrain.compile("json", { json = { type = "object", properties = { a = { type = "integer" } } } })
        assert.equal(a, constrain.compile("json", { json = { properties = { a = { type = "integer" } }, type = "object" } }))
        assert.not_equal(a, constrain.compile("json", { json = '{"type":"object"}' }))
        local m <close> = anything()
        local other <close> = anything()
        local of_m = constrain.compile("regex", { regex = "abc" }, m)
        assert.equal(of_m, constrain.compile("regex", { regex = "abc" }, m))
        assert.not_equal(of_m, constrain.compile("regex", { regex = "abc" }, other)) -- masks are of one vocabulary
        for i = 1, 200 do constrain.compile("regex", { regex = "a{" .. i .. "}" }) end
        local n, bytes = constrain.kept()
        assert.is_true(n <= 64 and bytes <= 128 << 20)
        assert.not_equal(g, constrain.compile("regex", { regex = "abc" })) -- forgotten meanwhile
    end)
end)

describe("a hole", function()
    local grammar = 'root ::= "SELECT * FROM " <table> " WHERE id = " [0-9]{1,2} ";"'

    it("asks for the strings when the text has come there", function()
        local m <close> = anything()
        local tables = { "users", "orders" }
        local seen = {}
        local function names(text)
            seen[text] = true
            return tables
        end
        local got = {}
        for seed = 1, 12 do
            if seed == 7 then tables = { "invoices" } end
            local t = text_of(m, { grammar = grammar, holes = { table = names }, seed = seed }).text
            local name = t:match "^SELECT %* FROM (%a+) WHERE id = %d%d?;$"
            assert.is_not_nil(name, t)
            if seed < 7 then got[name] = true else assert.equal("invoices", name) end
        end
        assert.is_true(got.users and got.orders)
        assert.same({ ["SELECT * FROM "] = true }, seen)
    end)

    it("whose function fails, waits or answers nonsense is the error of its own request", function()
        local m <close> = anything()
        local function with(fn) return text_of(m, { grammar = grammar, holes = { table = fn } }, "q") end
        local good = llm.spawn(function() return text_of(m, { regex = "[a-z]{60}", seed = 2 }).text end)
        raises("script", { "hole table: ", "no database" }, with, function() error "no database" end)
        raises("script", { "hole table: its function cannot wait" }, with, function() coroutine.yield() end)
        raises("script", { "hole table: " }, with, function() llm.sleep(0.01) end)
        raises("script", { "hole table: its function returned nil" }, with, function() end)
        raises("script", { "hole table: ", "number at 2" }, with, function() return { "a", 5 } end)
        raises("invalid", { "hole table: ", "empty string" }, with, function() return { "" } end)
        raises("invalid", { "no token" }, with, function() return {} end)
        if not slow then
            raises("limit", { "hole table: " }, with, function()
                while true do pcall(error) end
            end)
        end
        assert.equal(60, #good:wait())
        assert.equal("SELECT * FROM t WHERE", with(function() return { "t" } end).text:sub(1, 21))
    end)
end)

describe("lua", function()
    it("sees the prefix and says what comes next", function()
        local m <close> = anything()
        local asked = {}
        local function steps(prefix)
            asked[#asked + 1] = prefix
            if prefix == "" then return "move: " end
            if prefix == "move: " then return { "e4", "d4", "Nf3" } end
            if not prefix:find "!" then return { regex = "(, [a-h][1-8])?!" } end
        end
        for seed = 1, 8 do
            local r = text_of(m, { lua = steps, seed = seed, temperature = 2 })
            assert.equal("stop", r.finish_reason)
            assert.truthy(r.text:find "^move: [edN]f?[34]!$" or r.text:find "^move: [edN]f?[34], [a-h][1-8]!$", r.text)
        end
        assert.equal("", asked[1])
        assert.equal("move: ", asked[2])
    end)

    it("pieces that may end and go on: so may the text", function()
        local m <close> = anything(nil, { ["5"] = 4 })
        local r = text_of(m, { seed = 1, temperature = 0.5, max_tokens = 40, lua = function(prefix)
            if prefix == "" then return { regex = "\\d+" } end
            if prefix:find "^%d+$" then return #prefix > 3 and { choices = { " apples", " pears" } } or { "." } end
        end })
        assert.truthy(r.text:find "^%d+%.$" or r.text:find "^%d%d%d%d+ %a+$", r.text)
        r = text_of(m, { seed = 1, max_tokens = 40, lua = function(prefix) -- the end is the model's choice
            if prefix == "" then return { json = { type = "integer", minimum = 1, maximum = 99 } } end
        end })
        assert.truthy(r.text:find "^%d%d?$")
    end)

    it("whose function fails is the error of its own request", function()
        local m <close> = anything()
        local function with(fn) return text_of(m, { lua = fn, max_tokens = 30 }, "q") end
        local good = llm.spawn(function() return text_of(m, { regex = "[a-z]{60}", seed = 2 }).text end)
        raises("script", { "lua: ", "no idea" }, with, function() error "no idea" end)
        raises("script", { "lua: ", "later" }, with, function(p)
            if p ~= "" then error "later" end
            return "abc"
        end)
        raises("script", { "lua: its function cannot wait" }, with, function() coroutine.yield() end)
        raises("script", { "lua: ", "got number" }, with, function() return 5 end)
        raises("script", { "lua: ", "json: #/type" }, with, function() return { json = { type = "x" } } end)
        raises("script", { "lua: ", "choices: an empty string" }, with, function() return "" end)
        raises("script", { "lua: ", "without json, regex" }, with, function() return {} end)
        raises("script", { "lua: ", "both" }, with, function() return { json = true, regex = "a" } end)
        raises("limit", { "at once" }, with, function() return { regex = "a+" } end)
        assert.equal(60, #good:wait())
        assert.equal("", with(function() end).text)
    end)
end)

describe("speculation under a constraint (B35)", function()
    local schema = [[{"type":"object","properties":{"a":{"enum":["red","reed"]}},"required":["a"],
        "additionalProperties":false}]]

    it("changes nothing, whatever the drafts", function()
        local m <close> = anything({ vocab = { '{"', '":', " ", "re", '"}', "red", "ed" } })
        local function ids(text) return m:tokenize(text, { bos = false }) end
        local ends = { m.info.eos, m.info.eos }
        local drafts = { ids '{"a":"rexx', ids '{"a": "red"} and more', ends, ids '"re', ids "ed", ids '{"a":"reed"}' }
        drafts[2] = table.move(ends, 1, 2, #drafts[2] + 1, drafts[2])
        local asked = 0
        local function drafter(ctx)
            asked = asked + 1
            local d = drafts[(asked + ctx.n_generated) % #drafts + 1]
            return table.move(d, 1, math.min(#d, ctx.most), 1, {})
        end
        local function word(prefix) return prefix == "" and { "red", "reed" } or prefix ~= "reed" and { " ", "!" } or nil end
        for seed = 1, slow and 10 or 100 do
            local o = { json = schema, seed = seed, temperature = seed % 4 == 0 and 0 or 1, max_tokens = 60 }
            local plain = text_of(m, o).text
            assert.truthy(plain:find '^{"a": ?"ree?d"}$', plain)
            o.speculate = drafter
            assert.equal(plain, text_of(m, o).text)
            o.speculate = nil
            local prompt = plain .. plain
            plain = text_of(m, o, prompt).text
            o.speculate = "ngram"
            assert.equal(plain, text_of(m, o, prompt).text)
            o = { lua = word, seed = seed, max_tokens = 6 }
            plain = text_of(m, o).text
            o.speculate = drafter
            assert.equal(plain, text_of(m, o).text)
        end
        assert.is_true(asked > 20)
    end)
end)

describe("white space between the tokens of JSON (B40)", function()
    it("is bounded, whatever the model would like", function()
        local m <close> = anything(nil, { [" "] = 60, ["\n"] = 60, ["\t"] = 60 })
        local schema = [[{ "type": "object", "properties": { "a": { "type": "array", "items": { "enum": [1, 2] },
            "minItems": 2, "maxItems": 3 }, "b": { "type": "boolean" } }, "required": ["a", "b"],
            "additionalProperties": false }]]
        for seed = 1, slow and 3 or 12 do
            for _, whitespace in ipairs { "line", "none" } do
                local r = text_of(m, { json = schema, temperature = 5, seed = seed, whitespace = whitespace,
                    max_tokens = 200 })
                assert.equal("stop", r.finish_reason)
                assert.is_true(#r.text - #json.encode(r.value) <= 64, r.text)
            end
            local r = text_of(m, { json = true, temperature = 5, seed = seed, max_tokens = 600 })
            local outside = r.text:gsub("\\\\.", ""):gsub('"[^"]*"?', "")
            local blanks, places = outside:gsub("%S", ""), outside:gsub("[^,:]", "")
            if r.finish_reason == "stop" then assert.is_not_nil(json.decode(r.text)) end
            assert.is_true(#blanks <= #places, r.text)
        end
    end)
end)

describe("a grammar that takes long to compile", function()
    it("leaves others their turn meanwhile, and the session its state", function()
        local m <close> = anything()
        local function long(letter)
            local words = {}
            for i = 1, 24000 do words[i] = ('"%s%07dx"'):format(letter, i * 7919 % 9999991) end
            return { grammar = "root ::= " .. table.concat(words, " | "), max_tokens = 2 }
        end
        local s <close> = m:session()
        s:append "p"
        local turns = 0
        local others = llm.spawn(function()
            while not s.op do -- no request yet
                turns = turns + 1
                coroutine.yield()
            end
        end)
        s:gen(long "a")
        others:wait()
        assert.is_true(turns > 0)
        -- a call that comes between has the session
        local second = llm.spawn(function() return #s:gen { max_tokens = 200, ignore_eos = true }.tokens end)
        local ok, e = pcall(s.gen, s, long "b")
        assert.is_false(ok)
        assert.matches("the session is busy with another call", tostring(e), 1, true)
        assert.equal(200, second:wait())
    end)
end)
