-- Token masks against brute force: at each place of random walks the mask holds exactly the tokens that the matcher
-- would accept one by one, and bytes and tokens agree; copies and rolled back matchers stand where they should. Over a
-- small vocabulary with awkward pieces, and over those of real models.

local core = require "llmrun.core"
local grammar = require "llmrun.grammar"
local json = require "llmrun.json"
local make_vocab = dofile "tests/spec/grammar_support.lua"

local sanitized = os.getenv "LLMRUN_TEST_SANITIZE" ~= nil
local home = os.getenv "LLMRUN_MODELS" or (os.getenv "HOME" or "") .. "/.cache/llmrun"

local function real_vocab(name)
    local file = core.gguf_open(home .. "/" .. name)
    return file and assert(file:vocab())
end

local seed
local function random(n)
    seed = seed * 6364136223846793005 + 1442695040888963407
    return (seed >> 33) % n + 1
end

-- The small vocabulary: what a piece of JSON may be cut into, across the ends of strings, items and names.
local small = make_vocab {
    '","', '":', '":"', '": "', '","a', '"a"', 'a"', '","a"', '","a":', '"a","a"', '{"', '["', '[]', "{}", '"]', '"}', "}]",
    "]]", ", ", ',"', ', "', "\\u0061", "\\u00", "61", '\\"', "\\n", "aa", "ab", "aab", "a,", "12", "1,", "1,1", "0.", ".0",
    "e1", "true", "false", "nul", "null", "  ", "\n", "\n  ", "é", "\xC3", "\xA9", "\xF0\x9F\x98", "\x80", "b\"", "b", "{\"a\":",
    "\"b\":", "],[", "[1", "xyz", "red", "reed", "ed\"",
}

local SCHEMAS = {
    [[{"type":"array","items":{"type":"string"},"uniqueItems":true}]],
    [[{"type":"array","items":{"type":"string","maxLength":2,"minLength":1},"uniqueItems":true,"minItems":2,"maxItems":5}]],
    [[{"type":"array","items":{"type":"string","pattern":"^(red|reed|a|ab)$"},"uniqueItems":true}]],
    [[{"type":"array","items":{"type":"string","pattern":"^[ab12]{1,3}$"},"uniqueItems":true,"maxItems":40}]],
    [[{"type":"array","items":{"type":"string","pattern":"^[a-z]{2}$"},"uniqueItems":true}]],
    [[{"type":"array","items":{"type":"integer","minimum":0,"maximum":70000},"uniqueItems":true}]],
    [[{"type":"array","uniqueItems":true}]],
    [[{"type":"array","items":{"type":["integer","string","array"],"items":{"type":"string"}},"uniqueItems":true}]],
    [[{"type":"array","items":{"type":"object","properties":{"a":{"type":"string"}}},"uniqueItems":true}]],
    [[{"type":"array","items":{"type":"array","items":{"type":"string"},"uniqueItems":true},"uniqueItems":true}]],
    [[{"type":"object"}]],
    [[{"type":"object","propertyNames":{"enum":["a","b","red"]},"additionalProperties":{"type":"boolean"}}]],
    [[{"type":"object","patternProperties":{"^(a|ab)$":{"type":"null"}},"additionalProperties":false,"minProperties":1}]],
    [[{"type":"object","additionalProperties":{"type":"string"},"minProperties":2}]],
    [[{"type":"object","properties":{"a":{"type":"integer"},"b":{}},"required":["b"]}]],
    [[{"type":"object","patternProperties":{"^a":{"type":"integer"}},"additionalProperties":{"type":"null"}}]],
    [[{"type":"object","additionalProperties":{"type":"array","items":{"type":"string"},"uniqueItems":true}}]],
    [[{"type":"string","maxLength":4}]], [[{"enum":["a\"b","red","reed","é"]}]], [[{"type":"number","minimum":0.5,"maximum":12}]],
    [[{"type":"array","items":{"type":"string","pattern":"^(a|ab)+$"},"maxItems":3}]],
    [[{"oneOf":[{"type":"object","properties":{"a":{"type":"integer"}}},{"type":"object","required":["b"]}]}]],
}

local OTHERS = {
    { regex = "(a|ab)*(b|12){1,3}[^x]?" }, { regex = "(?:a?){8}b" }, { choices = { "red", "reed", "aab", "a", "nul", "null" } },
    { grammar = 'root ::= e\ne ::= e "," e | "[" e "]" | [0-9]+ | "a"' },
    { grammar = 'root ::= ("a" | "b")* ("" | "aa") [é-ë]?' },
    { lark = 'start: item ("," item)*\nitem: /[a-z]+/ | INT\n%import common.INT\n%ignore " "' },
}

-- The random schemas that every run makes anew from their numbers.
local function random_schema(depth)
    local kind = random(depth > 0 and 9 or 5)
    if kind == 1 then return { type = "string", maxLength = random(4) - 1 } end
    if kind == 2 then return { type = "integer", minimum = random(30) - 15, maximum = random(30) + 12 } end
    if kind == 3 then return { enum = { "red", "reed", random(20), json.null } } end
    if kind == 4 then return { type = { "boolean", "null" } } end
    if kind == 5 then return { type = "string", pattern = ({ "a", "^a+$", "b$", "^[^a]*$" })[random(4)] } end
    if kind == 6 then
        return { type = "array", items = random_schema(depth - 1), minItems = random(3) - 1, uniqueItems = random(2) == 1 }
    end
    if kind == 7 then return { anyOf = { random_schema(depth - 1), random_schema(depth - 1) } } end
    local s = { type = "object", properties = json.object {}, required = json.array {} }
    for _, name in ipairs { "a", "b", "aa" } do
        if random(3) > 1 then s.properties[name] = random_schema(depth - 1) end
        if random(3) == 1 then s.required[#s.required + 1] = name end
    end
    if random(2) == 1 then s.additionalProperties = random(2) == 1 and random_schema(depth - 1) end
    return s
end

-- Compares a mask with what is accepted one by one; -> the ids allowed.
local function check_mask(m, vocab, text, every)
    local ids, has = assert(m:allowed()), {}
    for _, id in ipairs(ids) do has[id] = true end
    for id = 0, #vocab - 1 do
        if (every or has[id] or id % 97 == seed % 97) and m:allows(id) ~= (has[id] or false) then
            error(("behind %q: token %d (%q) is %sin the mask"):format(text, id, vocab:piece(id), has[id] and "" or "not "))
        end
    end
    return ids
end

-- Random walks; every: each token of the vocabulary is tried at each place.
local function walk(g, vocab, steps, every)
    local m, texts, eog = assert(g:matcher(vocab)), { "" }, {}
    for _, id in ipairs(vocab:info().eog) do eog[id] = true end
    for _ = 1, steps do
        local text = texts[#texts]
        local ids = check_mask(m, vocab, text, every)
        assert.equal(m:can_end(), eog[ids[#ids]] == true or eog[ids[1]] == true)
        if random(6) == 1 and #texts > 1 then -- back, in place or in a copy
            local n = random(#texts - 1)
            if random(2) == 1 then m = assert(m:copy()) end
            assert(m:rollback(n))
            for _ = 1, n do table.remove(texts) end
        else
            local pick = ids[random(#ids)]
            for _ = 1, 3 do -- short texts have more ends in them
                if eog[pick] or #(vocab:piece(pick)) > 4 then pick = ids[random(#ids)] end
            end
            if not pick or eog[pick] then break end
            local piece = vocab:piece(pick)
            local bytes = assert(g:matcher(vocab))
            for i = 1, #text do assert(bytes:accept_text(text:sub(i, i))) end
            assert(bytes:accept_text(piece))
            assert.equal(bytes:can_end(), (m:accept(pick) and m:can_end()))
            texts[#texts + 1] = text .. piece
        end
    end
end

describe("masks are what is accepted, over a small vocabulary,", function()
    local rounds = sanitized and 2 or 8
    for i, schema in ipairs(SCHEMAS) do
        it("under " .. schema, function()
            seed = i
            local g = assert(grammar.compile { json = schema })
            for _ = 1, rounds do walk(g, small, 24, true) end
        end)
    end
    for i, opts in ipairs(OTHERS) do
        it("under grammar " .. i, function()
            seed = i
            local g = assert(grammar.compile(opts))
            for _ = 1, rounds do walk(g, small, 16, true) end
        end)
    end
    it("under random schemas", function()
        local done = 0
        for i = 1, sanitized and 15 or 120 do
            seed = i * 7919
            local schema = random_schema(3)
            local g, err, code = grammar.compile { json = schema }
            if g then
                done = done + 1
                walk(g, small, 20, true)
            else
                assert.is_truthy(code == "invalid" or code == "unsupported", err)
            end
        end
        assert.is_true(done > (sanitized and 10 or 80), done .. " compiled")
    end)
    it("under random regular expressions", function()
        local function regex(depth)
            local kind = random(depth > 0 and 8 or 3)
            if kind == 1 then return ({ "a", "b", "é", "1" })[random(4)] end
            if kind == 2 then return ({ "[ab]", "[^a]", "\\d", "." })[random(4)] end
            if kind == 3 then return ({ "aa", "red", "" })[random(3)] end
            if kind == 4 then return "(?:" .. regex(depth - 1) .. "|" .. regex(depth - 1) .. ")" end
            if kind == 5 then return "(?:" .. regex(depth - 1) .. ")" .. ({ "*", "+", "?", "{2,3}", "{0,9}" })[random(5)] end
            return regex(depth - 1) .. regex(depth - 1)
        end
        for i = 1, sanitized and 20 or 150 do
            seed = i * 104729
            local text = regex(4)
            local g, err, code = grammar.compile { regex = text }
            if g then walk(g, small, 10, true) else assert.equal("invalid", code, text .. ": " .. err) end
        end
    end)
end)

for _, name in ipairs { "SmolLM2-135M-Instruct.Q4_1.gguf", "qwen2.5-0.5b.gguf" } do
    describe("masks are what is accepted, over the vocabulary of " .. name .. ",", function()
        local vocab = (not sanitized or name:find "^Smol") and real_vocab(name)
        if not vocab then return end
        for _, i in ipairs { 1, 5, 7, 9, 12, 13, 18 } do
            it("under " .. SCHEMAS[i], function()
                seed = i
                walk(assert(grammar.compile { json = SCHEMAS[i] }), vocab, sanitized and 4 or 12, false)
            end)
        end
        it("every token tried", function()
            seed = 3
            walk(assert(grammar.compile { json = SCHEMAS[13] }), vocab, sanitized and 2 or 4, true)
        end)
    end)
end
