-- Tokens that a constraint leaves no choice about: taken without a forward pass, cut as the tokenizer cuts them.
local llm = require "llmrun"
local core = require "llmrun.core"
local grammars = require "llmrun.grammar"

local slow = os.getenv "LLMRUN_TEST_SANITIZE" ~= nil

-- A byte as byte-level BPE spells it.
local function spelt(text)
    return (text:gsub(".", function(c)
        local b = c:byte()
        if b < 33 then return utf8.char(256 + b) end
        if b == 127 then return utf8.char(256 + 33) end
        if b >= 128 and b <= 160 then return utf8.char(256 + 34 + b - 128) end
        return b == 173 and utf8.char(256 + 67) or c
    end))
end

--- A byte-level vocabulary with these merges ("a" .. "b" pairs), best first.
local function vocabulary(merges)
    local tokens, list = {}, {}
    for b = 0, 255 do
        local s = spelt(string.char(b))
        tokens[b + 1] = b < 128 and s or utf8.char(b >= 161 and b ~= 173 and b or b == 173 and 323 or 256 + 34 + b - 128)
    end
    for i, m in ipairs(merges) do
        tokens[#tokens + 1] = spelt(m[1] .. m[2])
        list[i] = spelt(m[1]) .. " " .. spelt(m[2])
    end
    tokens[#tokens + 1] = "<|endoftext|>"
    local types = {}
    for i = 1, #tokens do types[i] = i < #tokens and 1 or 3 end
    return assert(core.vocab_new { model = "gpt2", pre = "gpt-2", tokens = tokens, types = types, merges = list,
        eos = #tokens - 1 })
end

local MERGES = { { "n", "a" }, { "m", "e" }, { "na", "me" }, { '"', ":" }, { " ", '"' }, { "{", '"' } }

local function model_of(merges, opts)
    local o = { vocab = { vocab = vocabulary(merges) }, kv = { blocks = 300 }, max_seqs = 16 }
    for k, v in pairs(opts or {}) do o[k] = v end
    local n_vocab = 256 + #merges + 1
    o.next = function(tokens)
        local n, row = #tokens, {}
        local h = (tokens[n] * 31 + (tokens[n - 1] or 0) * 17 + n) & 0xffffff
        for i = 1, n_vocab do
            h = (h * 1103515245 + 12345) & 0x7fffffff
            row[i] = (h >> 16) % 1000 / 250
        end
        return { row = row }
    end
    return llm.scripted(o)
end

local function run(m, o, prompt)
    local s <close> = m:session()
    s:append(prompt or "p")
    local r = s:gen(o)
    local pieces = {}
    for i, id in ipairs(r.tokens) do pieces[i] = m.vocab:piece(id) end
    return table.concat(pieces, "|"), r
end

local PERSON = '\\{"name": "[a-z]{3}", "name": [0-9]\\}'

describe("tokens that must come", function()
    it("are those of the tokenizer, and need no forward pass of their own", function()
        local m <close> = model_of(MERGES)
        local before = m:metrics().steps
        local text, r = run(m, { regex = PERSON, seed = 1 })
        assert.truthy(text:find('^{"|name|":| "|%l|%l|%l|"|,| "|name|":| |%d|}$'), text)
        assert.equal(10, r.usage.forced_tokens) -- the first of the first run is drawn, from a mask of one
        assert.equal("stop", r.finish_reason)
        assert.is_true(m:metrics().steps - before <= #r.tokens) -- how many fewer, a measured time decides
        assert.equal(10, m:metrics().forced_tokens)
    end)

    it("leave out what might be the beginning of a longer token", function()
        local more = { table.unpack(MERGES) }
        more[#more + 1] = { ' "', "x" }
        local m <close> = model_of(more)
        local ends = {}
        for seed = 1, 20 do
            local text, r = run(m, { regex = '\\{"name": "x?[a-z]{3}"', seed = seed })
            local from = text:match '^{"|name|":|( "?x?)|'
            ends[from] = true
            assert.equal(3 + (from == " " and 1 or 0), r.usage.forced_tokens, text) -- name, ":, the last "
        end
        assert.is_true(ends[" "] and ends[' "'] and ends[' "x']) -- it was the model's choice
        local text, r = run(m, { regex = '\\{"name": "[a-w]{3}"', seed = 1 }) -- no x: nothing longer is allowed
        assert.truthy(text:find('^{"|name|":| "|'), text)
        assert.equal(3 + 1, r.usage.forced_tokens)
    end)

    it("are the same with log-probabilities, which need every row", function()
        local m <close> = model_of(MERGES)
        for seed = 1, 5 do
            local plain = run(m, { regex = PERSON, seed = seed })
            local text, r = run(m, { regex = PERSON, seed = seed, logprobs = 1 })
            assert.equal(plain, text)
            assert.equal(0, r.usage.forced_tokens)
            for _, t in ipairs(r.logprobs) do assert.is_true(t.logprob <= 0 and t.logprob > -20) end
        end
    end)

    it("are the same in any batch, preempted, in small chunks, under a policy of single rows", function()
        local m <close> = model_of(MERGES)
        local want = {}
        local function o(i) return { regex = PERSON, seed = i } end
        for i = 1, 6 do want[i] = run(m, o(i)) end
        local function all(model, prepare)
            local got = llm.map({ 1, 2, 3, 4, 5, 6 }, function(i)
                local opts = o(i)
                if prepare then prepare(opts, i) end
                return (run(model, opts))
            end)
            assert.same(want, got)
        end
        all(m)
        for at = 0, slow and 2 or 5 do
            all(m, function(opts, i) opts.fault = { i % 2 == 0 and "preempt" or "swap", at } end)
        end
        local tight <close> = model_of(MERGES, { kv = { blocks = 14, block_size = 4, prefix_cache = false } })
        all(tight)
        local narrow <close> = model_of(MERGES, { chunk = 1, max_batch_tokens = 7 })
        all(narrow)
        local single <close> = model_of(MERGES, { policy = { name = "single", schedule = function(_, step)
            for _, r in ipairs(step.running) do step:run(r, 1) end
            for _, r in ipairs(step.waiting) do step:run(r, 1) end
        end } })
        all(single)
    end)

    it("end at max_tokens, stop strings, and are streamed", function()
        local m <close> = model_of(MERGES)
        local text, cut = run(m, { regex = PERSON, seed = 1, max_tokens = 3 })
        assert.equal('{"|name|":', text)
        assert.equal("length", cut.finish_reason)
        assert.equal('{"na', select(2, run(m, { regex = PERSON, seed = 1, stop = "me" })).text)
        local s <close> = m:session()
        s:append "p"
        local parts = {}
        for piece in s:stream { regex = PERSON, seed = 1 } do parts[#parts + 1] = piece end
        local _, whole = run(m, { regex = PERSON, seed = 1 })
        assert.equal(whole.text, table.concat(parts))
    end)

    it("are not forced on samplers that ban, or want to see each token", function()
        local m <close> = model_of(MERGES)
        local name = m:tokenize("name", { bos = false })[1]
        local text, r = run(m, { regex = PERSON, seed = 1, banned_tokens = { name } })
        assert.is_nil(text:find("name", 1, true))
        assert.truthy(r.text:find '^{"name": "')
        local seen = 0
        text, r = run(m, { regex = PERSON, seed = 1, sampler = { function() seen = seen + 1 end } })
        assert.equal(#r.tokens, seen)
        assert.truthy(r.text:find '^{"name": "')
        assert.is_true(#text > 0)
    end)

    it("behind a hole, too", function()
        local m <close> = model_of(MERGES)
        local asked = {}
        local text, r = run(m, { grammar = 'root ::= "name" <t> "name" [a-z]', seed = 2, holes = { t = function(prefix)
            asked[#asked + 1] = prefix
            return { "name" }
        end } })
        assert.truthy(text:find "^name|name|name|%l$", text)
        assert.equal(2, r.usage.forced_tokens)
        assert.is_true(#asked >= 1)
        for _, prefix in ipairs(asked) do assert.equal("name", prefix) end
    end)

    it("of pieces that a function gives", function()
        local m <close> = model_of(MERGES)
        local function pieces(prefix)
            if prefix == "" then return 'name": "' end
            if prefix == 'name": "' then return { regex = "[a-c]{2}" } end
            if #prefix == 10 then return { "name", "me" } end
        end
        local ends = {}
        for seed = 1, 12 do
            local text, r = run(m, { lua = pieces, seed = seed })
            assert.truthy(text:find '^name|":| "|[abc]|[abc]|', text)
            ends[r.text:match '^name": "[abc][abc]([name]+)$'] = true
            assert.is_true(r.usage.forced_tokens >= 2 and r.usage.forced_tokens <= 5, text) -- m|e has one more
            assert.equal(text, (run(m, { lua = pieces, seed = seed, logprobs = 0 })))
            assert.equal(text, (run(m, { lua = pieces, seed = seed, fault = { "preempt", 1 } })))
        end
        assert.same({ name = true, me = true }, ends)
    end)

    it("spell the forced bytes, whatever the vocabulary", function()
        for round = 1, slow and 20 or 120 do
            local merges, parts = {}, { "a", "b", "c", "ab", "é", " " }
            for i = 1, round % 9 do merges[i] = { parts[(round * 7 + i * 5) % 3 + 1], parts[(round + i * i) % 3 + 1] } end
            local seen, list = {}, {}
            for _, p in ipairs(merges) do
                local k = p[1] .. p[2]
                if not seen[k] then list[#list + 1] = p end
                seen[k] = true
            end
            local vocab = vocabulary(list)
            local pattern = ("(ab|ac)%s(a|b)*c"):format(("abcab c"):sub(1, round % 7 + 1))
            local m = assert(assert(grammars.compile { regex = pattern }):matcher(vocab))
            local model <close> = model_of(list)
            local _, r = run(model, { regex = pattern, seed = round, max_tokens = 40 })
            local full = r.finish_reason == "stop"
            for _, id in ipairs(r.tokens) do assert(m:accept(id)) end
            if full then assert.is_true(m:can_end()) end
        end
    end)
end)
