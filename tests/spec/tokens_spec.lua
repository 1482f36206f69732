-- Long texts are cut into tokens aside, where others may have their turn: the same ids, and nobody else waits.
local core = require "llmrun.core"
local gguf = require "llmrun.testing.gguf"
local llm = require "llmrun"
local loop = require "llmrun.loop"
local messages = require "llmrun.openai.messages"
local tokens = require "llmrun.tokens"

local TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
local long = ("Some words, \xc3\xa9t\xc3\xa9 <user> and 12345 numbers.\n"):rep(20000)

local m
local path = os.tmpname()
setup(function() m = llm.load(gguf.tiny(path), { ctx = 64, template = TEMPLATE }) end)
teardown(function()
    m:close()
    os.remove(path)
end)

--- How many texts fn(...), as work that is known to be long, has cut aside, and what it gives. (That others had a turn
--- meanwhile can't be asked here: a job may be done before the loop looks at it.)
local function beside(fn, ...)
    local n, aside = 0, core.aside
    local over <close> = setmetatable({}, { __close = function() core.aside = aside end }) -- luacheck: ignore 211
    function core.aside(...) -- luacheck: ignore 122
        n = n + 1
        return aside(...)
    end
    local r = table.pack(loop.breathing(fn, ...))
    return n, table.unpack(r, 1, r.n)
end

--- How many turns another task has while fn() runs, a few times over.
local function turns_beside(fn)
    local turns, over = 0, false
    local other = llm.spawn(function()
        while not over do
            turns = turns + 1
            llm.sleep(0)
        end
    end)
    llm.sleep(0)
    local before = turns
    for _ = 1, 10 do loop.breathing(fn) end
    over = true
    other:wait()
    return turns - before
end

describe("a long text", function()
    it("is cut aside: the same ids, while others have their turn", function()
        local want = m.vocab:encode(long)
        local n, ids = beside(tokens.encode, m.vocab, long)
        assert.equal(1, n)
        assert.same(want, ids)
        for _, o in ipairs { { bos = true }, { special = true }, { bos = true, special = true } } do
            n, ids = beside(tokens.encode, m.vocab, long, o)
            assert.equal(1, n)
            assert.same(m.vocab:encode(long, o), ids)
        end
    end)

    it("leaves others their turn", function()
        assert.is_true(turns_beside(function() tokens.encode(m.vocab, long) end) > 0)
        assert.equal(0, turns_beside(function() tokens.encode(m.vocab, "short") end))
    end)

    it("is cut at once where nobody can have a turn, or it is short", function()
        assert.equal(0, (beside(tokens.encode, m.vocab, "short")))
        local n, ids = beside(function() -- table.sort can't be left
            local got
            table.sort({ 1, 2 }, function(a, b)
                got = got or tokens.encode(m.vocab, long)
                return a < b
            end)
            return got
        end)
        assert.equal(0, n)
        assert.same(m.vocab:encode(long), ids)
        assert.same(ids, tokens.encode(m.vocab, long))
    end)

    it("tells what is wrong as a short one does", function()
        local few = assert(core.vocab_new { model = "gpt2", pre = "gpt-2", tokens = { "a", "b", "ab" }, merges = { "a b" } })
        local text = ("ab"):rep(40000) .. "c"
        local want = table.pack(few:encode(text))
        assert.is_nil(want[1])
        local n, ids, err, code = beside(tokens.encode, few, text)
        assert.equal(1, n)
        assert.same({ want[1], want[2], want[3] }, { ids, err, code })
    end)

    it("may be one of many, and given up", function()
        local texts, got = {}, {}
        for i = 1, 8 do texts[i] = tostring(i) .. long:sub(1, 100000 + 50000 * i) end
        local tasks = {}
        for i, text in ipairs(texts) do
            tasks[i] = loop.spawn(function() got[i] = loop.breathing(tokens.encode, m.vocab, text) end)
        end
        llm.sleep(0)
        for i = 1, 8, 3 do tasks[i]:cancel() end -- one that is worked at, and some that wait
        for i = 1, 8 do
            if i % 3 ~= 1 then tasks[i]:wait() end
        end
        for i = 1, 8 do
            if i % 3 ~= 1 then
                assert.same(m.vocab:encode(texts[i]), got[i])
            else
                assert.is_nil(got[i])
            end
        end
    end)

    it("may be dropped by a program that ends", function()
        for _ = 1, 3 do
            local job = assert(core.aside(m.vocab, long))
            assert.is_true(job:fd() >= 0)
            job:close()
            job:close()
            assert.error_matches(function() job:result() end, "is closed", 1, true)
        end
        core.aside(m.vocab, long) -- luacheck: ignore 211
        collectgarbage()
    end)

    it("is cut so in what the server reads", function()
        local list = { { role = "user", content = long } }
        local want = m.chat:encode("x", m.chat:segments("x", list, { add_generation_prompt = true }))
        local n, ids = beside(messages.prompt, m, list, nil, nil, 2 << 20)
        assert.equal(1, n)
        assert.same(want, ids)
    end)
end)
